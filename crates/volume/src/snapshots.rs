//! Snapshots: making, listing, deleting, and putting the present back to one.
//!
//! A snapshot is a version of the metadata that a record with a name keeps readable (`versions`); it shows as a
//! folder (`past`). Making one writes what is dirty and ends the version: its cost does not depend on the volume.
//!
//! Restoring, in this order, with everything that changes names or attributes waiting:
//! 1. Nothing may be open for writing, and nothing that would change may be open (EBUSY, naming it).
//! 2. All that is dirty is written, and a snapshot `before-restore-TIME` keeps the present.
//! 3. One commit of the store puts back every row that was written since, and only those. A crash leaves the tree
//!    as it was before or as it is after.
//! 4. What is remembered of inodes is read anew, and the kernels are told what changed.

use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, Ino, Result, Version, crash, time};
use headrace_format::key::{self, Key};
use headrace_format::record::{FileKind, Inode, Snapshot};
use headrace_meta::{At, Commit, CommitError, Durability, Precondition, Write};

use crate::live::load_extents;
use crate::namespace::{check_name, shown};
use crate::past::{FOLDER, moment};
use crate::types::{Change, Origin};
use crate::versions::give_up;
use crate::volume::Volume;

/// Keys read from the store at once.
const PAGE_KEYS: usize = 4096;
/// How long mounts may take to forget one page of changes.
const FORGET_PATIENCE: Duration = Duration::from_secs(10);
/// How long a restore waits for files to be closed before it says which are open.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// Files named in an error.
const NAMED_MAX: usize = 3;

/// What a restore did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The snapshot of what was before.
    pub before: Vec<u8>,
    /// Rows of the metadata that were put back.
    pub changed: u64,
}

impl Volume {
    /// Everything written before the call is in it. EEXIST if the name is taken. Rights are the caller's to check.
    pub fn snapshot_create(&self, name: &[u8]) -> Result<Snapshot> {
        check_name(name)?;
        self.flusher.room.check_name()?;
        if self.store.get(&key::snapshot(name), At::Latest)?.is_some() {
            return Err(taken(name));
        }
        self.flusher.flush_all()?;
        let snapshot = self.cut_snapshot(name)?;
        crash::point("after-snapshot");
        self.tell_snapshot(name);
        Ok(snapshot)
    }

    fn cut_snapshot(&self, name: &[u8]) -> Result<Snapshot> {
        let created = time::wall_now();
        let key = key::snapshot(name);
        let cut = self.cleaner.cut(vec![Precondition::Absent(key.clone())], |version| {
            vec![Write::Put(key, Snapshot { version, created }.encode())]
        });
        match cut {
            Ok(version) => Ok(Snapshot { version, created }),
            Err(CommitError::Failed(error)) => Err(error),
            Err(CommitError::Conflict(_)) => Err(taken(name)),
        }
    }

    /// In the order of their names.
    pub fn snapshots(&self) -> Result<Vec<(Vec<u8>, Snapshot)>> {
        self.store
            .scan(b"T", b"U", usize::MAX, At::Latest)?
            .into_iter()
            .map(|(key, value)| Ok((key::snapshot_name_of(&key).to_vec(), Snapshot::decode(&value)?)))
            .collect()
    }

    /// Its name is free at once; what only it held is given back in the background. Files of it that are open stay
    /// readable until they are closed. Rights are the caller's to check.
    pub fn snapshot_delete(&self, name: &[u8]) -> Result<()> {
        let snapshot = self.snapshot_record(name)?;
        let key = key::snapshot(name);
        let commit = Commit {
            preconditions: vec![Precondition::Equals(key.clone(), snapshot.encode())],
            writes: vec![Write::Delete(key), give_up(snapshot.version)],
        };
        match self.store.commit(commit, Durability::Durable) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => {
                return Err(Error::not_found(format!("snapshot {:?} was just deleted", shown(name))));
            }
        }
        crash::point("after-snapshot-delete");
        self.pasts.forget(name, snapshot.version);
        self.cleaner.wake();
        self.tell_snapshot(name);
        Ok(())
    }

    fn tell_snapshot(&self, name: &[u8]) {
        self.changes
            .tell(Origin::SOCKET, || vec![Change::Entry(FOLDER, name.to_vec()), Change::Inode(FOLDER)]);
    }

    /// The live tree becomes what the snapshot holds: see the head of this module. Returns when the mounts have
    /// forgotten what was. Rights are the caller's to check.
    pub fn snapshot_restore(&self, name: &[u8]) -> Result<Restored> {
        let record = self.snapshot_record(name)?;
        let past = record.version;
        let _pin = self.cleaner.pinned.pin(past);
        // A kernel tells of a close after close(2) has returned: not every file that looks open is.
        let deadline = time::monotonic_now() + CLOSE_PATIENCE;
        while self.check_nothing_is_written().and_then(|()| self.check_closed_since(past)).is_err()
            && time::monotonic_now() < deadline
        {
            time::sleep(Duration::from_millis(10));
        }
        let (before, kept) = {
            let _no_changes = self.stripes.lock_all();
            let _no_moves = self.flusher.hold_background();
            self.check_nothing_is_written()?;
            self.flusher.flush_all()?;
            for pin in self.live.all() {
                self.flusher.retire_writer(&pin)?;
            }
            self.check_closed_since(past)?;
            let (before, kept) = self.keep_present()?;
            crash::point("restore-begun");
            let (erased, inline) = self.look_back(past, kept.version)?;
            let commit = Commit {
                preconditions: vec![Precondition::Equals(key::snapshot(name), record.encode())],
                writes: erased,
            };
            match self.store.restore(past, commit) {
                Ok(_) => {}
                Err(CommitError::Failed(error)) => return Err(error),
                Err(CommitError::Conflict(_)) => {
                    return Err(Error::not_found(format!("snapshot {:?} was just deleted", shown(name))));
                }
            }
            crash::point("restored");
            self.live.reload(&*self.store)?;
            inline.into_iter().for_each(|ino| self.flusher.note_inline(ino));
            (before, kept.version)
        };
        self.tell_snapshot(&before);
        let changed = self.tell_restored(kept)?;
        Ok(Restored { before, changed })
    }

    fn keep_present(&self) -> Result<(Vec<u8>, Snapshot)> {
        let base = format!("before-restore-{}", moment(time::wall_now())).into_bytes();
        let mut name = base.clone();
        for number in 2.. {
            match self.cut_snapshot(&name) {
                Err(error) if error.raw_errno() == errno::EEXIST => {
                    name = [&base[..], format!("-{number}").as_bytes()].concat();
                }
                cut => return Ok((name, cut?)),
            }
        }
        Err(Error::internal("numbers have ended"))
    }

    fn check_nothing_is_written(&self) -> Result<()> {
        self.check_unused("open for writing", |_, writers| Ok(writers > 0))
    }

    fn check_closed_since(&self, past: Version) -> Result<()> {
        self.check_unused("open, and other in the snapshot", |ino, _| {
            let key = key::inode(ino);
            Ok(!self.store.written(past, At::Latest, &key, &key::end_of(&key), 1)?.is_empty())
        })
    }

    /// EBUSY if an open file is `in_the_way`, by its number and its writers.
    fn check_unused(&self, what: &str, in_the_way: impl Fn(Ino, u32) -> Result<bool>) -> Result<()> {
        let mut busy = Vec::new();
        for pin in self.live.all() {
            let (is_open, writers) = {
                let state = pin.lock();
                (state.opens > 0 && state.inode.kind == FileKind::File, state.writers)
            };
            if is_open && in_the_way(pin.ino, writers)? {
                let path = self.names.path(pin.ino);
                busy.push(match path.is_empty() {
                    true => format!("inode {}", pin.ino),
                    false => format!("{:?}", format!("/{}", shown(&path))),
                });
            }
        }
        if busy.is_empty() {
            return Ok(());
        }
        busy.sort_unstable();
        let (count, more) = (busy.len(), busy.len().saturating_sub(NAMED_MAX));
        busy.truncate(NAMED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Err(Error::errno(
            errno::EBUSY,
            format!(
                "{count} file{} {what}: {}{more}: close {} and try again",
                if count == 1 { " is" } else { "s are" },
                busy.join(", "),
                if count == 1 { "it" } else { "them" }
            ),
        ))
    }

    /// What a restore must know of the past beforehand: the writes that keep files from coming back that had no
    /// name any more (open then, closed since), and which inodes get bytes in the metadata store.
    fn look_back(&self, past: Version, present: Version) -> Result<(Vec<Write>, Vec<Ino>)> {
        let at = At::Version(past);
        let mut erased = Vec::new();
        self.each_written(past, At::Version(present), (b"i", b"j"), |keys| {
            for (key, value) in keys.iter().zip(self.store.get_many(keys, at)?) {
                let Some(ino) = key::ino_of(key) else { continue };
                let Some(inode) = value.map(|value| Inode::decode(&value)).transpose()? else { continue };
                if inode.nlink > 0 || inode.kind == FileKind::Directory {
                    continue;
                }
                erased.push(Write::Delete(key.clone()));
                for prefix in [key::all_extents(ino), key::all_xattrs(ino), key::all_inline(ino)] {
                    let rows = self.store.scan(&prefix, &key::end_of(&prefix), usize::MAX, at)?;
                    erased.extend(rows.into_iter().map(|(key, _)| Write::Delete(key)));
                }
                self.collector.note_extents(&load_extents(&*self.store, ino, &inode, at)?);
            }
            Ok(())
        })?;
        let mut inline = Vec::new();
        self.each_written(past, At::Version(present), (b"b", b"c"), |keys| {
            for (key, value) in keys.iter().zip(self.store.get_many(keys, at)?) {
                if value.is_some() {
                    inline.extend(key::ino_of(key));
                }
            }
            Ok(())
        })?;
        inline.dedup();
        Ok((erased, inline))
    }

    /// Pages of keys in [start, end) that were written after one version, up to another.
    pub(crate) fn each_written(
        &self,
        after: Version,
        through: At,
        (start, end): (&[u8], &[u8]),
        mut body: impl FnMut(&[Key]) -> Result<()>,
    ) -> Result<()> {
        let mut start = start.to_vec();
        loop {
            let keys = self.store.written(after, through, &start, end, PAGE_KEYS)?;
            body(&keys)?;
            match keys.last() {
                Some(last) if keys.len() == PAGE_KEYS => start = [&last[..], &[0]].concat(),
                _ => return Ok(()),
            }
        }
    }

    /// Lets mounts forget all that was written after `version`, page by page: their queues stay short.
    fn tell_restored(&self, version: Version) -> Result<u64> {
        let mut changed = 0;
        self.each_written(version, At::Latest, (b"a", b"{"), |keys| {
            changed += keys.len() as u64;
            self.changes.tell(Origin::SOCKET, || {
                let mut changes = Vec::new();
                let mut last = None;
                for key in keys {
                    let ino = key::ino_of(key);
                    if key.starts_with(b"e")
                        && let Some(parent) = ino
                    {
                        changes.push(Change::Entry(parent, key::name_of(key).to_vec()));
                    }
                    if ino != last {
                        changes.extend(ino.map(Change::Inode));
                        last = ino;
                    }
                }
                changes
            });
            self.settle(FORGET_PATIENCE);
            Ok(())
        })?;
        Ok(changed)
    }
}

fn taken(name: &[u8]) -> Error {
    Error::errno(
        errno::EEXIST,
        format!("there is a snapshot {:?} already: delete it, or choose another name", shown(name)),
    )
}
