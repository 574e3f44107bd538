//! Which versions of the volume are readable, and the end of those that are not any more.
//!
//! A version is kept by a record (a snapshot's `T`, a seal's `Z`, `H` for one without a name) or by somebody who
//! reads it at this moment (`Pinned`). Giving one up is one commit: its record goes, and a record `G` says that
//! its rows are to be cleaned. The cleaner's thread does that in short steps beside other commits, and hands the
//! extents of removed rows to the collector. A crash loses no more than the step under way: `G` stays until the
//! last one, and holds where to go on.
//!
//! Whoever opens a version pins it first and then looks at its record once more; the cleaner looks at records
//! first and then at pins. So one of the two always sees the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace_base::{Error, Result, Version, crash, time};
use headrace_format::key::{self, Key};
use headrace_format::record::{Content, Inode, Seal, Snapshot, decode_extents};
use headrace_meta::{At, Commit, CommitError, Durability, Kept, MetaStore, Precondition, Write};

use crate::collect::Collector;
use crate::packs::{must_commit, no_conflict};
use crate::volume::Volume;

/// Keys of one step: a transaction of a few milliseconds, which commits may have to wait for.
const STEP_KEYS: usize = 500;
/// Steps between two notes of how far cleaning came.
const STEPS_PER_NOTE: usize = 20;
/// After a step the cleaner rests for as long as the step took, at most this.
const REST_MAX: Duration = Duration::from_millis(100);
const RETRY_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct State {
    pins: BTreeMap<Version, u32>,
    /// A version may have lost its last reader.
    due: bool,
    stop: bool,
}

/// Versions that are being read, whatever became of their records.
#[derive(Debug, Default)]
pub struct Pinned {
    state: Mutex<State>,
    changed: Condvar,
}

/// Keeps a version readable.
#[derive(Debug)]
pub struct VersionPin {
    pinned: Arc<Pinned>,
    version: Version,
}

impl Pinned {
    /// The caller must find the version's record after this.
    pub fn pin(self: &Arc<Self>, version: Version) -> VersionPin {
        *self.lock().pins.entry(version).or_default() += 1;
        VersionPin { pinned: Arc::clone(self), version }
    }

    pub fn versions(&self) -> Vec<Version> {
        self.lock().pins.keys().copied().collect()
    }

    fn note_due(&self) {
        self.lock().due = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VersionPin {
    pub fn version(&self) -> Version {
        self.version
    }
}

impl Drop for VersionPin {
    fn drop(&mut self) {
        let mut state = self.pinned.lock();
        if let Some(count) = state.pins.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(&self.version);
                state.due = true;
                self.pinned.changed.notify_all();
            }
        }
    }
}

/// Versions that a snapshot or a sealed view keeps, ascending.
pub fn named_versions(store: &dyn MetaStore) -> Result<Vec<Version>> {
    let all = |letter: u8| store.scan(&[letter], &[letter + 1], usize::MAX, At::Latest);
    let mut versions = BTreeSet::new();
    for (_, value) in all(b'Z')? {
        versions.insert(Seal::decode(&value)?.version);
    }
    for (_, value) in all(b'T')? {
        versions.insert(Snapshot::decode(&value)?.version);
    }
    Ok(versions.into_iter().collect())
}

/// Versions that a record keeps, ascending: also those that are held without a name.
pub fn recorded_versions(store: &dyn MetaStore) -> Result<Vec<Version>> {
    let mut versions: BTreeSet<Version> = named_versions(store)?.into_iter().collect();
    let held = store.scan(b"H", b"I", usize::MAX, At::Latest)?;
    versions.extend(held.iter().filter_map(|(key, _)| key::version_of(key)));
    Ok(versions.into_iter().collect())
}

/// The writes that give a version up. Its record's own deletion goes with them, and `Cleaner::wake` follows.
pub fn give_up(version: Version) -> Write {
    Write::Put(key::given_up(version), Vec::new())
}

#[derive(Debug)]
pub struct Cleaner {
    store: Arc<dyn MetaStore>,
    collector: Arc<Collector>,
    pub pinned: Arc<Pinned>,
    /// One version ends at a time, so that a record can say which.
    cuts: Mutex<()>,
}

impl Cleaner {
    /// Tells the store which versions are kept: from here on it leaves no rows of others.
    pub fn new(store: Arc<dyn MetaStore>, collector: Arc<Collector>, pinned: Arc<Pinned>) -> Result<Cleaner> {
        let cleaner = Cleaner { store, collector, pinned, cuts: Mutex::default() };
        cleaner.tell()?;
        // What the last engine left.
        cleaner.wake();
        Ok(cleaner)
    }

    /// Ends the current version; `writes` gets its number. What the writes record keeps it readable.
    pub fn cut(
        &self,
        preconditions: Vec<Precondition>,
        writes: impl FnOnce(Version) -> Vec<Write>,
    ) -> Result<Version, CommitError> {
        let _one = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        let version = self.store.version();
        let sealed = self.store.seal(Commit { preconditions, writes: writes(version) })?;
        if sealed != version {
            return Err(Error::internal(format!("version {} ended, not {}", sealed.0, version.0)).into());
        }
        Ok(sealed)
    }

    pub fn wake(&self) {
        self.pinned.note_due();
    }

    pub fn stop(&self) {
        self.pinned.lock().stop = true;
        self.pinned.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.pinned.lock().stop
    }

    /// The cleaner's thread.
    pub fn run(&self) {
        loop {
            {
                let mut state = self.pinned.lock();
                while !state.due && !state.stop {
                    state = self.pinned.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if state.stop {
                    return;
                }
                state.due = false;
            }
            if let Err(error) = self.clean() {
                tracing::error!(%error, "versions that nobody needs are not cleaned yet");
                self.rest(RETRY_AFTER);
                self.wake();
            }
        }
    }

    /// Waits, unless told to stop.
    fn rest(&self, how_long: Duration) {
        let deadline = time::monotonic_now() + how_long;
        let mut state = self.pinned.lock();
        while !state.stop {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if left.is_zero() {
                return;
            }
            state = self.pinned.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The versions that must stay readable, told to the store.
    fn tell(&self) -> Result<BTreeSet<Version>> {
        let since = self.store.version();
        let mut kept: BTreeSet<Version> = recorded_versions(&*self.store)?.into_iter().collect();
        kept.extend(self.pinned.versions());
        self.store.keep(&Kept { versions: kept.iter().copied().collect(), since });
        Ok(kept)
    }

    /// Cleans after every version that was given up and is not read any more. Gives how many rows it removed.
    pub fn clean(&self) -> Result<u64> {
        let kept = self.tell()?;
        let mut removed = 0;
        for (key, value) in self.store.scan(b"G", b"H", usize::MAX, At::Latest)? {
            let Some(gone) = key::version_of(&key).filter(|gone| !kept.contains(gone)) else { continue };
            let Some(rows) = self.clean_version(gone, key, value)? else { return Ok(removed) };
            tracing::debug!(version = gone.0, rows, "cleaned after a version");
            removed += rows;
        }
        Ok(removed)
    }

    /// None: stopped before the end.
    fn clean_version(&self, gone: Version, record: Key, mut next: Key) -> Result<Option<u64>> {
        let mut rows = 0;
        for step in 1.. {
            if self.is_stopped() {
                return Ok(None);
            }
            let begun = time::monotonic_now();
            let cleaned = self.store.clean(gone, &next, STEP_KEYS)?;
            crash::point("clean-step");
            rows += cleaned.removed.len() as u64;
            self.note_removed(&cleaned.removed);
            let Some(after) = cleaned.next else { break };
            next = after;
            if step % STEPS_PER_NOTE == 0 {
                let writes = vec![Write::Put(record.clone(), next.clone())];
                must_commit(&*self.store, Commit { preconditions: Vec::new(), writes })?;
            }
            self.rest((time::monotonic_now() - begun).min(REST_MAX));
        }
        crash::point("clean-end");
        must_commit(&*self.store, Commit { preconditions: Vec::new(), writes: vec![Write::Delete(record)] })?;
        Ok(Some(rows))
    }

    /// What removed rows named may be named by nothing now.
    fn note_removed(&self, rows: &[(Key, Vec<u8>)]) {
        for (key, value) in rows {
            let extents = match key.first() {
                Some(b'i') => Inode::decode(value).map(|inode| match inode.content {
                    Content::Extents(extents) => extents,
                    _ => Vec::new(),
                }),
                Some(b'x') => decode_extents(value),
                _ => continue,
            };
            match extents {
                Ok(extents) => self.collector.note_extents(&extents),
                Err(error) => tracing::warn!(%error, "what a removed row named is not known"),
            }
        }
    }
}

impl Volume {
    /// Ends the current version and keeps it readable, without a name, until `release_version`. Everything
    /// written before the call is in it.
    pub fn hold_version(&self) -> Result<Version> {
        self.flusher.flush_all()?;
        no_conflict(self.cleaner.cut(Vec::new(), |version| vec![Write::Put(key::held(version), Vec::new())]))
    }

    /// Versions that are held without a name, oldest first.
    pub fn held_versions(&self) -> Result<Vec<Version>> {
        let rows = self.store.scan(b"H", b"I", usize::MAX, At::Latest)?;
        Ok(rows.iter().filter_map(|(key, _)| key::version_of(key)).collect())
    }

    pub fn release_version(&self, version: Version) -> Result<()> {
        let key = key::held(version);
        let commit = Commit {
            preconditions: vec![Precondition::Present(key.clone())],
            writes: vec![Write::Delete(key), give_up(version)],
        };
        match self.store.commit(commit, Durability::Relaxed) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => {
                return Err(Error::not_found(format!("version {} is not held", version.0)));
            }
        }
        self.cleaner.wake();
        Ok(())
    }
}
