//! The embedded metadata store: SQLite below, an overlay of recent commits above. One process owns the file.
//!
//! ```text
//! get, scan     overlay (active, flushing) -> cache -> database by a pool of readers      sqlite/read.rs
//! commit        check, apply to the active layer                                          sqlite/commit.rs
//! sync, seal    active -> flushing -> one transaction -> cache                            sqlite/flush.rs
//! written, restore, clean     by an index over versions                                   sqlite/versions.rs
//! ```
//! The file is described in `sqlite/schema.rs`, the layers in `sqlite/overlay.rs`.
//!
//! Locks, in the order in which one thread may take them: committer, (group | writer), overlay, (pool, shards
//! of the cache). The group's lock is never held while anything is written.
//!
//! A store that is dropped without `close` is like one that crashed: commits that nobody made durable may be
//! lost, always from the end.

mod cache;
mod commit;
mod flush;
mod overlay;
mod read;
mod schema;
#[cfg(test)]
mod tests;
mod versions;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use headrace_base::{MIB, Result, SessionId, Version, thread};
use headrace_format::key::{self, Key};
use headrace_format::record::{Session, VolumeRecord};

use crate::store::{At, Cleaned, Commit, CommitError, Durability, Kept, MetaStore, Sequence, Value};

use cache::Cache;
use commit::Committer;
use flush::{Alarm, Group, Writer};
use overlay::Overlay;
use read::{Reader, Readers};
use schema::Role;

/// About 80,000 inodes. The kernel caches names and attributes above this, the disk's pages are below.
const CACHE_BYTES_MAX: usize = 16 * MIB as usize;

#[derive(Debug)]
pub struct SqliteStore {
    shared: Arc<Shared>,
    flusher: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    session: SessionId,
    session_key: Key,

    committer: Mutex<Committer>,
    overlay: RwLock<Overlay>,
    cache: Cache,
    readers: Readers,

    writer: Mutex<Writer>,
    group: Mutex<Group>,
    group_changed: Condvar,
    /// The session was found dead when its commits were to be written.
    fenced: AtomicBool,

    alarm: Mutex<Alarm>,
    alarm_changed: Condvar,
    /// The flusher is awake or has a deadline: no need to ring.
    armed: AtomicBool,
}

impl SqliteStore {
    /// Makes the database of a new volume with its VolumeRecord; all else is the caller's first commit. The
    /// file must not exist yet (EEXIST); a failed attempt leaves none. Durable when it returns.
    pub fn create(path: &Path, volume: VolumeRecord) -> Result<()> {
        schema::create(path, &volume)
    }

    /// Opens the database, after a crash as it was then, and enters the session durably. The id must be new and
    /// the record alive. One process at a time: the caller holds the volume's lock.
    ///
    /// Errors: NotFound; Corrupt (not a database, damaged); Invalid (of a newer format); Permission; Full.
    pub fn open(path: &Path, session: SessionId, record: Session) -> Result<SqliteStore> {
        let (connection, version) = schema::open(path)?;
        let writer = Writer::register(connection, path, session, &record)?;
        let checkpointer = schema::connect(path, Role::Checkpointer)?;
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            session,
            session_key: key::session(session),
            committer: Mutex::new(Committer { reader: Reader::open(path)?, alive: true, closed: false }),
            overlay: RwLock::new(Overlay::new(version)),
            cache: Cache::new(CACHE_BYTES_MAX),
            readers: Readers::new(path),
            writer: Mutex::new(writer),
            group: Mutex::default(),
            group_changed: Condvar::new(),
            fenced: AtomicBool::new(false),
            alarm: Mutex::default(),
            alarm_changed: Condvar::new(),
            armed: AtomicBool::new(false),
        });
        let flusher = thread::spawn("meta-flusher", {
            let shared = Arc::clone(&shared);
            move || flush::run(&shared, &checkpointer)
        })?;
        Ok(SqliteStore { shared, flusher: Mutex::new(Some(flusher)) })
    }

    fn stop(&self) {
        self.shared.stop_flusher();
        if let Some(flusher) = lock(&self.flusher).take()
            && flusher.join().is_err()
        {
            tracing::error!("the metadata flusher has panicked");
        }
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        self.stop();
        let commits = read(&self.shared.overlay).pending_commits();
        if commits > 0 {
            tracing::warn!(commits, "metadata store dropped without close: its last commits are lost");
        }
    }
}

impl MetaStore for SqliteStore {
    fn session(&self) -> SessionId {
        self.shared.session
    }

    fn version(&self) -> Version {
        read(&self.shared.overlay).version
    }

    fn get(&self, key: &[u8], at: At) -> Result<Option<Value>> {
        self.shared.get(key, at)
    }

    fn get_many(&self, keys: &[Key], at: At) -> Result<Vec<Option<Value>>> {
        self.shared.get_many(keys, at)
    }

    fn scan(&self, start: &[u8], end: &[u8], limit: usize, at: At) -> Result<Vec<(Key, Value)>> {
        self.shared.scan(start, end, limit, at)
    }

    fn commit(&self, commit: Commit, durability: Durability) -> Result<Sequence, CommitError> {
        self.shared.commit(commit, durability)
    }

    fn seal(&self, commit: Commit) -> Result<Version, CommitError> {
        self.shared.seal(commit)
    }

    fn written(
        &self,
        after: Version,
        through: At,
        start: &[u8],
        end: &[u8],
        limit: usize,
    ) -> Result<Vec<Key>> {
        self.shared.written(after, through, start, end, limit)
    }

    fn stored_versions(&self, key: &[u8]) -> Result<Vec<Version>> {
        self.shared.stored_versions(key)
    }

    fn restore(&self, version: Version, commit: Commit) -> Result<Sequence, CommitError> {
        self.shared.restore(version, commit)
    }

    fn keep(&self, kept: &Kept) {
        lock(&self.shared.writer).keep(kept, self.version());
    }

    fn clean(&self, gone: Version, start: &[u8], limit: usize) -> Result<Cleaned> {
        self.shared.clean(gone, start, limit)
    }

    fn sync(&self) -> Result<()> {
        let committed = read(&self.shared.overlay).committed;
        self.shared.flush_to(committed)
    }

    fn close(&self) -> Result<()> {
        self.shared.close()?;
        self.stop();
        Ok(())
    }
}

// Poisoned locks are taken all the same: what they guard is changed in single steps that do not panic half-way,
// and a store that answers nothing any more would turn one thread's fault into everybody's.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(|poison| poison.into_inner())
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(|poison| poison.into_inner())
}
