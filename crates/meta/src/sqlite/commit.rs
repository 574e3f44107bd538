//! Commits: one at a time they check their preconditions against the newest state and apply their writes to
//! the active layer, all at once.
//!
//! room -> lock -> session alive? -> preconditions -> keys under deleted prefixes -> apply -> unlock -> flush.
//! Nothing but a commit changes what readers see, so what was checked under the commit lock still holds when
//! the writes are applied.

use std::sync::atomic::Ordering;

use headrace_base::error::errno;
use headrace_base::{Error, Result, Version, time};
use headrace_format::key::{self, Key};
use headrace_format::record::{Session, SessionState, encode_number};

use crate::store::{At, Commit, CommitError, Durability, Precondition, Sequence, Write};

use super::flush::{ACTIVE_BYTES_MAX, FLUSH_BYTES};
use super::overlay::Layer;
use super::read::Reader;
use super::schema::{VERSION_KEY, show};
use super::{Shared, lock, read, write};

/// What only the commit that holds the lock may touch.
#[derive(Debug)]
pub struct Committer {
    pub reader: Reader,
    /// The newest state of the session's own row, as far as this store wrote it.
    pub alive: bool,
    pub closed: bool,
}

impl Shared {
    pub fn commit(&self, commit: Commit, durability: Durability) -> Result<Sequence, CommitError> {
        check_writes(&commit.writes)?;
        self.make_room()?;
        let mut committer = lock(&self.committer);
        self.usable(&committer)?;
        self.check(&commit.preconditions, &committer.reader)?;
        let covered = self.covered(&commit.writes, &committer.reader)?;
        let ends_session = self.touches_session(&commit.writes);
        let now = time::monotonic_now();
        let (sequence, crowded) = {
            let mut overlay = write(&self.overlay);
            if !commit.writes.is_empty() {
                overlay.committed += 1;
                let sequence = overlay.committed;
                let layer = &mut overlay.active;
                let bytes_before = layer.bytes();
                layer.apply(commit.writes, covered);
                layer.last = sequence;
                layer.commits += 1;
                layer.since.get_or_insert(now);
                let crowded = bytes_before < FLUSH_BYTES && layer.bytes() >= FLUSH_BYTES;
                if ends_session {
                    committer.alive = self.alive_in(layer);
                }
                (sequence, crowded)
            } else {
                (overlay.committed, false)
            }
        };
        drop(committer);
        // Also for what this thread flushes itself: that may fail, and it fills the log.
        self.wake_flusher(crowded);
        if durability == Durability::Durable {
            self.flush_to(sequence)?;
        }
        Ok(Sequence(sequence))
    }

    pub fn seal(&self, commit: Commit) -> Result<Version, CommitError> {
        check_writes(&commit.writes)?;
        let committer = lock(&self.committer);
        self.usable(&committer)?;
        if self.touches_session(&commit.writes) {
            return Err(Error::invalid("a seal may not write the session's own row").into());
        }
        self.check(&commit.preconditions, &committer.reader)?;
        // All earlier commits first: if this fails, nothing has changed.
        let (version, committed) = {
            let overlay = read(&self.overlay);
            (overlay.version, overlay.committed)
        };
        self.flush_to(committed)?;
        let covered = self.covered(&commit.writes, &committer.reader)?;
        let mut layer = Layer::default();
        layer.last = committed + 1;
        layer.apply(commit.writes, covered);
        layer.set(VERSION_KEY.to_vec(), Some(encode_number(version.0 + 1)));
        let sealed = self.flush_seal(&layer).inspect_err(|error| {
            if error.raw_errno() == errno::ESTALE {
                self.fenced.store(true, Ordering::Release);
            }
        })?;
        Ok(sealed)
    }

    pub fn close(&self) -> Result<()> {
        let mut committer = lock(&self.committer);
        if committer.closed {
            return Ok(());
        }
        self.usable(&committer)?;
        let committed = read(&self.overlay).committed;
        self.flush_to(committed)?;
        let mut writer = lock(&self.writer);
        writer.end(committed)?;
        // Its row has changed below the cache.
        write(&self.overlay).generation += 1;
        self.cache.remove(writer.session_key());
        committer.closed = true;
        Ok(())
    }

    pub fn usable(&self, committer: &Committer) -> Result<()> {
        if committer.closed {
            return Err(Error::errno(
                errno::EBADF,
                format!("metadata database {} was closed by this session", self.path.display()),
            ));
        }
        if !committer.alive || self.fenced.load(Ordering::Acquire) {
            return Err(Error::errno(
                errno::ESTALE,
                format!(
                    "session {} was declared dead: it may commit nothing more; open the volume again",
                    self.session
                ),
            ));
        }
        Ok(())
    }

    /// Holds up commits while the disk is behind. If the disk takes nothing, they are refused with its error.
    fn make_room(&self) -> Result<()> {
        loop {
            let before = {
                let overlay = read(&self.overlay);
                if overlay.active.bytes() < ACTIVE_BYTES_MAX {
                    return Ok(());
                }
                match &overlay.flushing {
                    Some(layer) => layer.last,
                    None => overlay.committed,
                }
            };
            self.flush_to(before)?;
        }
    }

    pub fn check(&self, preconditions: &[Precondition], reader: &Reader) -> Result<(), CommitError> {
        for precondition in preconditions {
            match precondition {
                Precondition::Present(key) => {
                    if self.newest(key, Some(reader))?.is_none() {
                        return Err(CommitError::Conflict(key.clone()));
                    }
                }
                Precondition::Absent(key) => {
                    if self.newest(key, Some(reader))?.is_some() {
                        return Err(CommitError::Conflict(key.clone()));
                    }
                }
                Precondition::Equals(key, value) => {
                    if self.newest(key, Some(reader))?.as_ref() != Some(value) {
                        return Err(CommitError::Conflict(key.clone()));
                    }
                }
                Precondition::Empty { prefix, guard } => {
                    if prefix.is_empty() {
                        return Err(Error::invalid("a prefix without a byte covers the whole store").into());
                    }
                    // Without its guard a range cannot be held by anyone.
                    if self.newest(guard, Some(reader))?.is_none() {
                        return Err(CommitError::Conflict(guard.clone()));
                    }
                    if !self.scan_by(reader, prefix, &key::end_of(prefix), 1, At::Latest)?.is_empty() {
                        return Err(CommitError::Conflict(prefix.clone()));
                    }
                }
            }
        }
        Ok(())
    }

    /// For each DeletePrefix the keys that it deletes, as they are before the commit.
    pub fn covered(&self, writes: &[Write], reader: &Reader) -> Result<Vec<Vec<Key>>> {
        let mut covered = Vec::new();
        for write in writes {
            if let Write::DeletePrefix(prefix) = write {
                let rows = self.scan_by(reader, prefix, &key::end_of(prefix), usize::MAX, At::Latest)?;
                covered.push(rows.into_iter().map(|(key, _)| key).collect());
            }
        }
        Ok(covered)
    }

    pub fn touches_session(&self, writes: &[Write]) -> bool {
        writes.iter().any(|write| match write {
            Write::Put(key, _) | Write::Delete(key) => *key == self.session_key,
            Write::DeletePrefix(prefix) => self.session_key.starts_with(prefix),
        })
    }

    fn alive_in(&self, layer: &Layer) -> bool {
        match layer.find(&self.session_key) {
            Some(Some(record)) => {
                Session::decode(record).is_ok_and(|record| record.state == SessionState::Alive)
            }
            Some(None) => false,
            None => true,
        }
    }
}

pub fn check_writes(writes: &[Write]) -> Result<()> {
    for write in writes {
        match write {
            Write::Put(key, _) | Write::Delete(key) => {
                if key.is_empty() {
                    return Err(Error::invalid("a commit writes a key without a byte"));
                }
                if key == VERSION_KEY {
                    return Err(refuse(key));
                }
            }
            Write::DeletePrefix(prefix) => {
                if prefix.is_empty() {
                    return Err(Error::invalid("a prefix without a byte covers the whole store"));
                }
                if VERSION_KEY.starts_with(prefix) {
                    return Err(refuse(prefix));
                }
            }
        }
    }
    Ok(())
}

fn refuse(key: &[u8]) -> Error {
    Error::invalid(format!("key \"{}\" is the store's own: no commit may write it", show(key)))
}
