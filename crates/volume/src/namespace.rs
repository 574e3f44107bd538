//! Names: lookup, create, link, unlink, rename, and attributes of what they lead to.
//!
//! Every change of a directory happens under that directory's stripe lock and is one commit, whose
//! preconditions say what it relies on: the parent is alive, the name is absent or leads where it did. With one
//! engine they always hold; they are what will keep several engines apart.
//!
//! A directory's times and counts are a row per node (`DirDelta`), not fields of its inode, so that creates in
//! one directory need not agree on one record.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use headrace_base::error::errno;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Ino, Kind, Result};
use headrace_format::key;
use headrace_format::record::{Content, Dentry, DirDelta, FileKind, Inode, Place};
use headrace_meta::{At, Commit, CommitError, Durability, MetaStore, Precondition, Write};

use crate::extents;
use crate::file::OpenFile;
use crate::flush::Again;
use crate::live::{Pin, State, load_inode, no_inode};
use crate::past::{FOLDER_NAME, Place as Where, is_live};
use crate::types::{
    Attr, Change, FILE_BYTES_MAX, NAME_BYTES_MAX, NewInode, OpenMode, Origin, RenameMode, SetAttr,
    TARGET_BYTES_MAX,
};
use crate::volume::Volume;

/// This engine's row of directory deltas. One engine: one node.
pub const NODE: u32 = 0;
const STRIPES: usize = 256;
const MODE_MASK: u16 = 0o7777;
pub const SETGID: u16 = 0o2000;

/// One lock per directory, shared by directories that fall on one stripe; above them one for the whole tree,
/// which every change shares. No thread takes these locks twice.
#[derive(Debug)]
pub struct Stripes {
    tree: RwLock<()>,
    stripes: Vec<Mutex<()>>,
}

impl Default for Stripes {
    fn default() -> Self {
        Stripes { tree: RwLock::new(()), stripes: (0..STRIPES).map(|_| Mutex::new(())).collect() }
    }
}

/// Locked stripes, the tree's lock among them.
pub type Locked<'a> = (RwLockReadGuard<'a, ()>, Vec<MutexGuard<'a, ()>>);

impl Stripes {
    /// Nothing changes in the whole tree, and no file is opened, until it is dropped.
    pub fn lock_all(&self) -> RwLockWriteGuard<'_, ()> {
        self.tree.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a change of an inode that needs no directory, and for opening it.
    pub fn share(&self) -> RwLockReadGuard<'_, ()> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the stripes of these directories, each once, in order.
    pub fn lock(&self, directories: &[Ino]) -> Locked<'_> {
        let tree = self.share();
        let mut indices: Vec<usize> = directories.iter().map(|ino| ino.0 as usize % STRIPES).collect();
        indices.sort_unstable();
        indices.dedup();
        let stripes = indices
            .into_iter()
            .map(|index| self.stripes[index].lock().unwrap_or_else(PoisonError::into_inner))
            .collect();
        (tree, stripes)
    }
}

/// Names seen lately, so that a segment's records and error messages can name a path. A hint, never relied on:
/// two generations, the older dropped when the younger is full.
#[derive(Debug, Default)]
pub struct Names(Mutex<[Generation; 2]>);

/// Inode -> (parent, name).
type Generation = HashMap<Ino, (Ino, Vec<u8>)>;

impl Names {
    const GENERATION_NAMES: usize = 32 * 1024;

    pub fn note(&self, parent: Ino, name: &[u8], ino: Ino) {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if generations[0].len() >= Self::GENERATION_NAMES {
            generations[1] = std::mem::take(&mut generations[0]);
        }
        generations[0].insert(ino, (parent, name.to_vec()));
    }

    /// Where an inode was seen last: its directory and its name there.
    pub fn last(&self, ino: Ino) -> Option<(Ino, Vec<u8>)> {
        let generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        generations[0].get(&ino).or_else(|| generations[1].get(&ino)).cloned()
    }

    /// The path of an inode, without a leading slash; empty if a part of it is not known.
    pub fn path(&self, ino: Ino) -> Vec<u8> {
        let generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |ino: Ino| generations[0].get(&ino).or_else(|| generations[1].get(&ino));
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut current = ino;
        // A path has at most PATH_MAX / 2 parts; a loop cannot be, but a hint is only a hint.
        while current != Ino::ROOT && parts.len() < 2048 {
            match find(current) {
                Some((parent, name)) => {
                    parts.push(name);
                    current = *parent;
                }
                None => return Vec::new(),
            }
        }
        parts.reverse();
        parts.join(&b'/')
    }
}

/// The part of a path that one directory holds, checked as POSIX asks.
pub fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::errno(
            errno::ENAMETOOLONG,
            format!("a name of {} bytes is longer than {NAME_BYTES_MAX}", name.len()),
        ));
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(Error::invalid(format!("{:?} cannot be a name", name.escape_ascii().to_string())));
    }
    Ok(())
}

/// What a symbolic link may hold.
pub fn check_target(target: &[u8]) -> Result<()> {
    if target.len() > TARGET_BYTES_MAX {
        return Err(Error::errno(
            errno::ENAMETOOLONG,
            format!(
                "the target of a symbolic link has {} bytes, at most {TARGET_BYTES_MAX} fit",
                target.len()
            ),
        ));
    }
    if target.is_empty() || target.contains(&0) {
        return Err(Error::invalid("the target of a symbolic link is empty or holds a NUL"));
    }
    Ok(())
}

pub fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// A directory's change: what it adds to the delta row.
#[derive(Clone, Copy, Default)]
pub struct Count {
    pub entries: i64,
    pub subdirectories: i64,
}

impl Count {
    pub fn plus(kind: FileKind) -> Count {
        Count { entries: 1, subdirectories: i64::from(kind == FileKind::Directory) }
    }

    pub fn minus(kind: FileKind) -> Count {
        Count { entries: -1, subdirectories: -i64::from(kind == FileKind::Directory) }
    }

    fn and(self, other: Count) -> Count {
        Count {
            entries: self.entries + other.entries,
            subdirectories: self.subdirectories + other.subdirectories,
        }
    }
}

impl Volume {
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr> {
        if name.len() > NAME_BYTES_MAX {
            check_name(name)?;
        }
        match self.place(parent)? {
            Where::Live if parent != Ino::ROOT || name != FOLDER_NAME => {}
            place => return self.lookup_past(&place, parent, name),
        }
        if name == b"." {
            return self.getattr(parent);
        }
        if name == b".." {
            return self.getattr(self.parent_of(parent)?);
        }
        let (dentry, _) = self.dentry(parent, name)?.ok_or_else(|| no_name(name))?;
        self.names.note(parent, name, dentry.ino);
        self.getattr(dentry.ino)
    }

    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        if !is_live(ino) {
            return self.getattr_past(&self.place(ino)?);
        }
        if let Some(pin) = self.live.find(ino) {
            let state = pin.lock();
            // A removed directory that is open still answers, as a removed file does.
            if state.inode.kind != FileKind::Directory || (state.removed && state.opens > 0) {
                let gone = state.removed && state.opens == 0;
                return if gone { Err(no_inode(ino)) } else { Ok(state.attr(ino)) };
            }
        }
        let inode = load_inode(&*self.store, ino, At::Latest)?.ok_or_else(|| no_inode(ino))?;
        self.attr_of(ino, &inode)
    }

    /// One answer per inode, in order; None: gone. One read of the store for all of them.
    pub fn getattrs(&self, inos: &[Ino]) -> Result<Vec<Option<Attr>>> {
        if !inos.iter().all(|ino| is_live(*ino)) {
            return self.getattrs_past(inos);
        }
        let keys: Vec<_> = inos.iter().map(|ino| key::inode(*ino)).collect();
        let values = self.store.get_many(&keys, At::Latest)?;
        inos.iter()
            .zip(values)
            .map(|(ino, value)| {
                if let Some(pin) = self.live.find(*ino) {
                    let state = pin.lock();
                    if state.inode.kind != FileKind::Directory {
                        return Ok((!state.removed).then(|| state.attr(*ino)));
                    }
                }
                value.map(|value| self.attr_of(*ino, &Inode::decode(&value)?)).transpose()
            })
            .collect()
    }

    fn attr_of(&self, ino: Ino, inode: &Inode) -> Result<Attr> {
        self.attr_at(ino, inode, At::Latest)
    }

    pub(crate) fn attr_at(&self, ino: Ino, inode: &Inode, at: At) -> Result<Attr> {
        let mut attr = Attr::of(ino, inode);
        if inode.kind == FileKind::Directory {
            let prefix = key::all_deltas(ino);
            let mut total = Count::default();
            for (_, value) in self.store.scan(&prefix, &key::end_of(&prefix), usize::MAX, at)? {
                let delta = DirDelta::decode(&value)?;
                total = total.and(Count { entries: delta.entries, subdirectories: delta.subdirectories });
                attr.mtime = attr.mtime.max(delta.changed);
                attr.ctime = attr.ctime.max(delta.changed);
            }
            attr.nlink = 2 + u32::try_from(total.subdirectories).unwrap_or(0);
            attr.size = u64::try_from(total.entries).unwrap_or(0);
        }
        Ok(attr)
    }

    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        if !is_live(ino) {
            return self.readlink_past(&self.place(ino)?);
        }
        match load_inode(&*self.store, ino, At::Latest)?.ok_or_else(|| no_inode(ino))?.content {
            Content::Target(target) => Ok(target),
            _ => Err(Error::invalid(format!("inode {ino} is not a symbolic link"))),
        }
    }

    pub fn setattr(&self, origin: Origin, ino: Ino, set: &SetAttr) -> Result<Attr> {
        self.check_live(ino)?;
        if let Some(size) = set.size {
            let _tree = self.stripes.share();
            let pin = self.live.pin(&*self.store, ino)?;
            self.truncate(&pin, size)?;
        }
        let attr = if set.mode.is_some()
            || set.uid.is_some()
            || set.gid.is_some()
            || set.atime.is_some()
            || set.mtime.is_some()
            || set.ctime.is_some()
        {
            self.set_attributes(ino, set)?
        } else {
            self.getattr(ino)?
        };
        self.changes.tell(origin, || vec![Change::Inode(ino)]);
        Ok(attr)
    }

    fn set_attributes(&self, ino: Ino, set: &SetAttr) -> Result<Attr> {
        let _stripe = self.stripes.lock(&[ino]);
        let pin = self.live.pin(&*self.store, ino)?;
        let mut state = pin.lock();
        if state.removed {
            return Err(no_inode(ino));
        }
        let now = time::wall_now();
        let before = state.inode.clone();
        let inode = &mut state.inode;
        if let Some(mode) = set.mode {
            inode.mode = mode & MODE_MASK;
        }
        inode.uid = set.uid.unwrap_or(inode.uid);
        inode.gid = set.gid.unwrap_or(inode.gid);
        inode.atime = set.atime.unwrap_or(inode.atime);
        inode.mtime = set.mtime.unwrap_or(inode.mtime);
        inode.ctime = set.ctime.unwrap_or(now);
        let mut writes = vec![Write::Put(key::inode(ino), state.committed_record().encode())];
        if state.inode.kind == FileKind::Directory
            && set.mtime.is_some()
            && let Some(mut delta) = self.delta(ino)?
        {
            // The row's time is older than this call: it must not hide what was set.
            delta.changed = Timestamp(i64::MIN);
            writes.push(Write::Put(key::delta(ino, NODE), delta.encode()));
        }
        let preconditions = vec![Precondition::Present(key::inode(ino))];
        if let Err(error) = self.commit(Commit { preconditions, writes }) {
            state.inode = before;
            return Err(error);
        }
        if state.inode.kind == FileKind::Directory {
            let inode = state.inode.clone();
            drop(state);
            return self.attr_of(ino, &inode);
        }
        Ok(state.attr(ino))
    }

    /// Cuts or extends a file. What is cut is gone also from bytes that are not flushed yet.
    pub(crate) fn truncate(&self, pin: &Pin, size: u64) -> Result<Attr> {
        if size > FILE_BYTES_MAX {
            return Err(Error::errno(errno::EFBIG, format!("{size} bytes are more than a file can have")));
        }
        loop {
            let mut state = pin.lock_idle();
            match state.inode.kind {
                FileKind::File => {}
                FileKind::Directory => {
                    return Err(Error::errno(errno::EISDIR, "a directory has no size to set"));
                }
                _ => return Err(Error::invalid("only a file has a size to set")),
            }
            if state.removed {
                return Err(no_inode(pin.ino));
            }
            if state.writer.is_some() && size < state.inode.size {
                // Its file segment ends here; the file goes on elsewhere.
                drop(state);
                self.flusher.retire_writer(pin)?;
                continue;
            }
            let now = time::wall_now();
            let held = state.dirty.bytes();
            state.dirty.truncate(size);
            self.flusher.gate.release(held - state.dirty.bytes());
            let cut = |list: &Arc<Vec<headrace_format::record::Extent>>| match list.last() {
                Some(last) if last.file_offset + last.length > size => {
                    Arc::new(extents::truncate(list, size))
                }
                _ => Arc::clone(list),
            };
            let committed = cut(&state.committed_extents);
            state.extents = cut(&state.extents);
            state.inode.size = size;
            state.inode.mtime = now;
            state.inode.ctime = now;
            // While bytes wait for their flush, the store may know only as much as it has bytes for.
            let ahead = state.is_ahead();
            let committed_size = if ahead { state.committed_size.min(size) } else { size };
            let current = Arc::clone(&state.extents);
            self.flusher.commit_state(pin, &mut state, committed, committed_size, Vec::new(), &[])?;
            state.extents = current;
            if ahead {
                state.uncommitted = true;
                self.flusher.enqueue(pin, &mut state);
            }
            return Ok(state.attr(pin.ino));
        }
    }

    /// mkdir, mknod and symlink. EEXIST if the name is there.
    pub fn make(&self, origin: Origin, parent: Ino, name: &[u8], new: NewInode) -> Result<Attr> {
        let _stripe = self.stripes.lock(&[parent]);
        let (ino, inode) = self.make_locked(origin, parent, name, new)?;
        self.attr_of(ino, &inode)
    }

    /// Creates a file and opens it. EEXIST if the name is there.
    pub fn create_file(
        self: &Arc<Self>,
        origin: Origin,
        parent: Ino,
        name: &[u8],
        new: NewInode,
        mode: OpenMode,
    ) -> Result<(Attr, OpenFile)> {
        let _stripe = self.stripes.lock(&[parent]);
        let (ino, inode) = self.make_locked(origin, parent, name, new)?;
        let pin = self.live.pin_new(ino, inode);
        let mut state = pin.lock();
        let attr = state.attr(ino);
        let file = self.opened(origin, pin.clone(), &mut state, mode);
        drop(state);
        Ok((attr, file))
    }

    fn make_locked(&self, origin: Origin, parent: Ino, name: &[u8], new: NewInode) -> Result<(Ino, Inode)> {
        check_name(name)?;
        self.check_new_name(parent, name)?;
        self.flusher.room.check_name()?;
        if new.kind == FileKind::Symlink {
            check_target(&new.target)?;
        }
        if self.dentry(parent, name)?.is_some() {
            return Err(exists(name));
        }
        let mut directory = self.directory_inode(parent)?;
        let ino = self.next_ino()?;
        let inode = new_inode(parent, &mut directory, new);
        let kind = inode.kind;
        let mut writes = vec![
            Write::Put(key::dentry(parent, name), Dentry { ino, kind }.encode()),
            Write::Put(key::inode(ino), inode.encode()),
            self.delta_write(parent, Count::plus(kind), inode.ctime)?,
        ];
        if kind == FileKind::Directory {
            writes.push(Write::Put(key::alive(ino), Vec::new()));
        }
        let preconditions =
            vec![Precondition::Present(key::alive(parent)), Precondition::Absent(key::dentry(parent, name))];
        match self.store.commit(Commit { preconditions, writes }, Durability::Relaxed) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(key)) if key == key::alive(parent) => return Err(no_inode(parent)),
            Err(CommitError::Conflict(_)) => return Err(exists(name)),
        }
        self.names.note(parent, name, ino);
        self.tell_entry(origin, parent, name);
        Ok((ino, inode))
    }

    pub fn link(&self, origin: Origin, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        self.check_new_name(parent, name)?;
        if !is_live(ino) {
            return Err(Error::errno(errno::EXDEV, "a file of a snapshot gets no second name: copy it"));
        }
        self.flusher.room.check_name()?;
        let _stripe = self.stripes.lock(&[parent]);
        if self.dentry(parent, name)?.is_some() {
            return Err(exists(name));
        }
        self.directory_inode(parent)?;
        let pin = self.live.pin(&*self.store, ino)?;
        let mut state = pin.lock();
        if state.inode.kind == FileKind::Directory {
            return Err(Error::errno(errno::EPERM, "a directory cannot have a second name"));
        }
        if state.removed || state.inode.nlink == 0 {
            return Err(no_inode(ino));
        }
        let before = state.inode.clone();
        let now = time::wall_now();
        state.inode.nlink += 1;
        state.inode.ctime = now;
        let dentry = Dentry { ino, kind: state.inode.kind };
        let commit = Commit {
            preconditions: vec![
                Precondition::Present(key::alive(parent)),
                Precondition::Present(key::inode(ino)),
                Precondition::Absent(key::dentry(parent, name)),
            ],
            writes: vec![
                Write::Put(key::dentry(parent, name), dentry.encode()),
                Write::Put(key::inode(ino), state.committed_record().encode()),
                self.delta_write(parent, Count::plus(dentry.kind), now)?,
            ],
        };
        if let Err(error) = self.commit(commit) {
            state.inode = before;
            return Err(error);
        }
        let attr = state.attr(ino);
        drop(state);
        self.changes.tell(origin, || {
            vec![Change::Entry(parent, name.to_vec()), Change::Inode(parent), Change::Inode(ino)]
        });
        Ok(attr)
    }

    pub fn unlink(&self, origin: Origin, parent: Ino, name: &[u8]) -> Result<()> {
        self.check_old_name(parent, name)?;
        let _stripe = self.stripes.lock(&[parent]);
        let (dentry, value) = self.dentry(parent, name)?.ok_or_else(|| no_name(name))?;
        if dentry.kind == FileKind::Directory {
            return Err(Error::errno(errno::EISDIR, format!("{:?} is a directory: use rmdir", shown(name))));
        }
        let pin = self.live.pin(&*self.store, dentry.ino)?;
        let mut state = pin.lock_idle();
        let now = time::wall_now();
        let mut preconditions = vec![Precondition::Equals(key::dentry(parent, name), value)];
        let mut writes = vec![
            Write::Delete(key::dentry(parent, name)),
            self.delta_write(parent, Count::minus(dentry.kind), now)?,
        ];
        let dropped = self.drop_link(&pin, &mut state, now, &mut preconditions, &mut writes);
        self.commit(Commit { preconditions, writes })?;
        self.dropped(&mut state, dropped);
        drop(state);
        self.changes.tell(origin, || {
            vec![Change::Entry(parent, name.to_vec()), Change::Inode(parent), Change::Inode(dentry.ino)]
        });
        Ok(())
    }

    /// The writes that take one name from an inode, and the inode as it is then. `state` is changed by
    /// `dropped`, once they are committed.
    pub(crate) fn drop_link(
        &self,
        pin: &Pin,
        state: &mut State,
        now: Timestamp,
        preconditions: &mut Vec<Precondition>,
        writes: &mut Vec<Write>,
    ) -> Inode {
        let mut after = state.inode.clone();
        after.nlink = after.nlink.saturating_sub(1);
        after.ctime = now;
        preconditions.push(Precondition::Present(key::inode(pin.ino)));
        if after.nlink == 0 && state.opens == 0 {
            writes.extend(erase(pin.ino, &state.committed_record()));
        } else {
            let mut record = state.committed_record();
            record.nlink = after.nlink;
            record.ctime = now;
            writes.push(Write::Put(key::inode(pin.ino), record.encode()));
            if after.nlink == 0 {
                writes.push(Write::Put(key::orphan(pin.ino, self.store.session()), Vec::new()));
            }
        }
        after
    }

    pub(crate) fn dropped(&self, state: &mut State, after: Inode) {
        state.inode = after;
        if state.inode.nlink == 0 && state.opens == 0 {
            self.forget_bytes(state);
        }
    }

    /// The inode is gone from the store: nothing of it needs to be flushed any more.
    pub(crate) fn forget_bytes(&self, state: &mut State) {
        state.removed = true;
        self.flusher.gate.release(state.dirty.bytes());
        state.dirty = Default::default();
        state.uncommitted = false;
        self.flusher.abandon_writer(state);
        self.collector.note_extents(state.extents.iter());
    }

    pub fn rmdir(&self, origin: Origin, parent: Ino, name: &[u8]) -> Result<()> {
        if name == b"." {
            return Err(Error::invalid("\".\" cannot be removed"));
        }
        self.check_old_name(parent, name)?;
        let (dentry, _) = self.dentry(parent, name)?.ok_or_else(|| no_name(name))?;
        let _stripes = self.stripes.lock(&[parent, dentry.ino]);
        let (again, value) = self.dentry(parent, name)?.ok_or_else(|| no_name(name))?;
        if again.kind != FileKind::Directory {
            return Err(not_a_directory(name));
        }
        if again != dentry {
            return Err(Error::errno(errno::EBUSY, format!("{:?} was replaced meanwhile", shown(name))));
        }
        let now = time::wall_now();
        let mut writes = vec![
            Write::Delete(key::dentry(parent, name)),
            self.delta_write(parent, Count::minus(FileKind::Directory), now)?,
        ];
        writes.extend(erase(dentry.ino, &self.directory_inode(dentry.ino)?));
        let preconditions = vec![
            Precondition::Equals(key::dentry(parent, name), value),
            Precondition::Empty { prefix: key::dentries(dentry.ino), guard: key::alive(dentry.ino) },
        ];
        match self.store.commit(Commit { preconditions, writes }, Durability::Relaxed) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => return Err(not_empty(name)),
        }
        self.forget_directory(dentry.ino);
        self.changes.tell(origin, || {
            vec![Change::Entry(parent, name.to_vec()), Change::Inode(parent), Change::Inode(dentry.ino)]
        });
        Ok(())
    }

    /// A directory was removed; whoever has it open still may look at it.
    fn forget_directory(&self, ino: Ino) {
        if let Some(pin) = self.live.find(ino) {
            let mut state = pin.lock();
            state.removed = true;
            state.inode.nlink = 0;
        }
    }

    pub fn rename(
        &self,
        origin: Origin,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
    ) -> Result<()> {
        check_name(from.1)?;
        check_name(to.1)?;
        self.check_old_name(from.0, from.1)?;
        self.check_old_name(to.0, to.1)?;
        // Directories move under one lock, so that no two moves can tie a knot.
        let _moving = self.renames.lock().unwrap_or_else(PoisonError::into_inner);
        let replaced = match self.dentry(to.0, to.1)? {
            Some((dentry, _)) if dentry.kind == FileKind::Directory => vec![from.0, to.0, dentry.ino],
            _ => vec![from.0, to.0],
        };
        if mode != RenameMode::Exchange {
            self.flush_before_moving(from)?;
        }
        let _stripes = self.stripes.lock(&replaced);
        let (source, source_value) = self.dentry(from.0, from.1)?.ok_or_else(|| no_name(from.1))?;
        let target = self.dentry(to.0, to.1)?;
        let replaced_ino = target.as_ref().map(|(target, _)| target.ino);
        self.directory_inode(to.0)?;
        if source.kind == FileKind::Directory && from.0 != to.0 {
            self.check_not_within(source.ino, to.0)?;
        }
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(exists(to.1)),
            (RenameMode::Exchange, None) => return Err(no_name(to.1)),
            (RenameMode::Exchange, Some((target, target_value))) => {
                if target.kind == FileKind::Directory && from.0 != to.0 {
                    self.check_not_within(target.ino, from.0)?;
                }
                self.exchange((from, source, source_value), (to, target, target_value))?;
            }
            (_, Some((target, _))) if target.ino == source.ino => return Ok(()),
            (_, target) => self.move_name((from, source, source_value), to, target, &replaced)?,
        }
        self.names.note(to.0, to.1, source.ino);
        self.changes.tell(origin, || {
            let mut changes = vec![
                Change::Entry(from.0, from.1.to_vec()),
                Change::Entry(to.0, to.1.to_vec()),
                Change::Inode(from.0),
                Change::Inode(to.0),
                Change::Inode(source.ino),
            ];
            changes.extend(replaced_ino.map(Change::Inode));
            changes
        });
        Ok(())
    }

    /// A file is flushed before it gets its new name: a crash leaves nothing there, or the file that was there, or
    /// all bytes of this one, as every program that writes a temporary file and renames it expects. (ext4 does it
    /// for names that are replaced: auto_da_alloc.)
    fn flush_before_moving(&self, from: (Ino, &[u8])) -> Result<()> {
        if let Some((source, _)) = self.dentry(from.0, from.1)?
            && source.kind == FileKind::File
            && let Some(pin) = self.live.find(source.ino)
        {
            self.flusher.flush_inode(&pin, Again::Nothing)?;
        }
        Ok(())
    }

    fn move_name(
        &self,
        ((from, name), source, source_value): ((Ino, &[u8]), Dentry, Vec<u8>),
        (to, new_name): (Ino, &[u8]),
        target: Option<(Dentry, Vec<u8>)>,
        locked: &[Ino],
    ) -> Result<()> {
        let now = time::wall_now();
        let mut preconditions = vec![
            Precondition::Equals(key::dentry(from, name), source_value),
            Precondition::Present(key::alive(to)),
        ];
        let mut writes = vec![
            Write::Delete(key::dentry(from, name)),
            Write::Put(key::dentry(to, new_name), source.encode()),
        ];
        let mut arriving = Count::plus(source.kind);
        let mut replaced = None;
        match &target {
            None => preconditions.push(Precondition::Absent(key::dentry(to, new_name))),
            Some((target, value)) => {
                arriving = arriving.and(Count::minus(target.kind));
                preconditions.push(Precondition::Equals(key::dentry(to, new_name), value.clone()));
                match (source.kind, target.kind) {
                    (FileKind::Directory, FileKind::Directory) => {
                        if !locked.contains(&target.ino) {
                            return Err(Error::errno(errno::EBUSY, "the target was replaced meanwhile"));
                        }
                        preconditions.push(Precondition::Empty {
                            prefix: key::dentries(target.ino),
                            guard: key::alive(target.ino),
                        });
                        writes.extend(erase(target.ino, &self.directory_inode(target.ino)?));
                    }
                    (FileKind::Directory, _) => return Err(not_a_directory(new_name)),
                    (_, FileKind::Directory) => {
                        return Err(Error::errno(
                            errno::EISDIR,
                            format!("{:?} is a directory", shown(new_name)),
                        ));
                    }
                    _ => replaced = Some(self.live.pin(&*self.store, target.ino)?),
                }
            }
        }
        if from == to {
            writes.push(self.delta_write(from, arriving.and(Count::minus(source.kind)), now)?);
        } else {
            writes.push(self.delta_write(from, Count::minus(source.kind), now)?);
            writes.push(self.delta_write(to, arriving, now)?);
        }
        let moved = self.live.pin(&*self.store, source.ino)?;
        // Two inodes: the lower number first. Neither is flushed while it is changed here.
        let (mut moved_state, mut replaced_state) = match &replaced {
            Some(replaced) if replaced.ino < moved.ino => {
                let first = replaced.lock_idle();
                (moved.lock(), Some(first))
            }
            Some(replaced) => {
                let first = moved.lock();
                (first, Some(replaced.lock_idle()))
            }
            None => (moved.lock(), None),
        };
        let before = moved_state.inode.clone();
        moved_state.inode.ctime = now;
        // Of a file a hint, by which a diff of snapshots finds its name.
        moved_state.inode.parent = to;
        writes.push(Write::Put(key::inode(moved.ino), moved_state.committed_record().encode()));
        let dropped = match (&replaced, &mut replaced_state) {
            (Some(pin), Some(state)) => {
                Some(self.drop_link(pin, state, now, &mut preconditions, &mut writes))
            }
            _ => None,
        };
        match self.store.commit(Commit { preconditions, writes }, Durability::Relaxed) {
            Ok(_) => {}
            Err(error) => {
                moved_state.inode = before;
                return Err(match error {
                    CommitError::Failed(error) => error,
                    CommitError::Conflict(_) if target.is_some() => not_empty(new_name),
                    CommitError::Conflict(_) => no_name(name),
                });
            }
        }
        if let (Some(state), Some(after)) = (&mut replaced_state, dropped) {
            self.dropped(state, after);
        }
        drop((moved_state, replaced_state));
        if let Some((target, _)) = target.filter(|(target, _)| target.kind == FileKind::Directory) {
            self.forget_directory(target.ino);
        }
        Ok(())
    }

    fn exchange(
        &self,
        ((from, name), source, source_value): ((Ino, &[u8]), Dentry, Vec<u8>),
        ((to, new_name), target, target_value): ((Ino, &[u8]), Dentry, Vec<u8>),
    ) -> Result<()> {
        if source.ino == target.ino {
            return Ok(());
        }
        let now = time::wall_now();
        let mut writes = vec![
            Write::Put(key::dentry(from, name), target.encode()),
            Write::Put(key::dentry(to, new_name), source.encode()),
        ];
        if from == to {
            writes.push(self.delta_write(from, Count::default(), now)?);
        } else {
            writes.push(self.delta_write(
                from,
                Count::plus(target.kind).and(Count::minus(source.kind)),
                now,
            )?);
            writes.push(self.delta_write(
                to,
                Count::plus(source.kind).and(Count::minus(target.kind)),
                now,
            )?);
        }
        let mut pins = [
            (self.live.pin(&*self.store, source.ino)?, to),
            (self.live.pin(&*self.store, target.ino)?, from),
        ];
        pins.sort_by_key(|(pin, _)| pin.ino);
        let mut states: Vec<_> = pins.iter().map(|(pin, _)| pin.lock()).collect();
        let before: Vec<Inode> = states.iter().map(|state| state.inode.clone()).collect();
        for (state, (pin, parent)) in states.iter_mut().zip(&pins) {
            state.inode.ctime = now;
            state.inode.parent = *parent;
            writes.push(Write::Put(key::inode(pin.ino), state.committed_record().encode()));
        }
        let preconditions = vec![
            Precondition::Equals(key::dentry(from, name), source_value),
            Precondition::Equals(key::dentry(to, new_name), target_value),
            Precondition::Present(key::alive(from)),
            Precondition::Present(key::alive(to)),
        ];
        if let Err(error) = self.commit(Commit { preconditions, writes }) {
            states.iter_mut().zip(before).for_each(|(state, inode)| state.inode = inode);
            return Err(error);
        }
        self.names.note(from, name, target.ino);
        Ok(())
    }

    /// A directory cannot move into itself or beneath itself.
    fn check_not_within(&self, directory: Ino, mut place: Ino) -> Result<()> {
        while place != Ino::ROOT {
            if place == directory {
                return Err(Error::invalid("a directory cannot be moved into itself"));
            }
            place = self.parent_of(place)?;
        }
        Ok(())
    }

    pub(crate) fn parent_of(&self, directory: Ino) -> Result<Ino> {
        if directory == Ino::ROOT {
            return Ok(Ino::ROOT);
        }
        Ok(self.directory_inode(directory)?.parent)
    }

    /// The name's entry and its raw value, for a precondition.
    pub(crate) fn dentry(&self, parent: Ino, name: &[u8]) -> Result<Option<(Dentry, Vec<u8>)>> {
        self.store
            .get(&key::dentry(parent, name), At::Latest)?
            .map(|value| Ok((Dentry::decode(&value)?, value)))
            .transpose()
    }

    pub(crate) fn directory_inode(&self, ino: Ino) -> Result<Inode> {
        let inode = load_inode(&*self.store, ino, At::Latest)?.ok_or_else(|| no_inode(ino))?;
        if inode.kind != FileKind::Directory {
            return Err(Error::errno(errno::ENOTDIR, format!("inode {ino} is not a directory")));
        }
        Ok(inode)
    }

    fn delta(&self, directory: Ino) -> Result<Option<DirDelta>> {
        self.store
            .get(&key::delta(directory, NODE), At::Latest)?
            .map(|value| DirDelta::decode(&value))
            .transpose()
    }

    /// The write that counts a change of a directory. The caller holds its stripe.
    pub(crate) fn delta_write(&self, directory: Ino, count: Count, now: Timestamp) -> Result<Write> {
        let mut delta = self.delta(directory)?.unwrap_or_default();
        delta.entries += count.entries;
        delta.subdirectories += count.subdirectories;
        delta.changed = delta.changed.max(now);
        Ok(Write::Put(key::delta(directory, NODE), delta.encode()))
    }

    /// For commits that only another engine could make fail.
    pub(crate) fn commit(&self, commit: Commit) -> Result<()> {
        match self.store.commit(commit, Durability::Relaxed) {
            Ok(_) => Ok(()),
            Err(CommitError::Failed(error)) => Err(error),
            Err(CommitError::Conflict(key)) => Err(Error::new(
                Kind::Conflict,
                format!("it was changed meanwhile (key {:?}): try again", key.escape_ascii().to_string()),
            )),
        }
    }

    pub(crate) fn tell_entry(&self, origin: Origin, parent: Ino, name: &[u8]) {
        self.changes.tell(origin, || vec![Change::Entry(parent, name.to_vec()), Change::Inode(parent)]);
    }
}

/// A new inode in `directory`, which decides the group under its setgid bit.
pub fn new_inode(parent: Ino, directory: &mut Inode, new: NewInode) -> Inode {
    let now = time::wall_now();
    let mut mode = new.mode & MODE_MASK;
    let mut gid = new.gid;
    if directory.mode & SETGID != 0 {
        gid = directory.gid;
        if new.kind == FileKind::Directory {
            mode |= SETGID;
        }
    }
    Inode {
        kind: new.kind,
        mode,
        uid: new.uid,
        gid,
        nlink: if new.kind == FileKind::Directory { 2 } else { 1 },
        rdev: new.rdev,
        size: new.target.len() as u64,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        parent,
        quota_root: directory.quota_root,
        content: if new.kind == FileKind::Symlink { Content::Target(new.target) } else { Content::Empty },
    }
}

/// The writes that remove an inode and all that hangs on it.
pub fn erase(ino: Ino, inode: &Inode) -> Vec<Write> {
    let mut writes = vec![Write::Delete(key::inode(ino)), Write::DeletePrefix(key::all_xattrs(ino))];
    match &inode.content {
        Content::Regions => {
            writes.push(Write::DeletePrefix(key::all_extents(ino)));
            writes.push(Write::DeletePrefix(key::all_inline(ino)));
        }
        Content::Extents(extents) => {
            for extent in extents {
                if let Place::Inline { slot, .. } = extent.place {
                    writes.push(Write::Delete(key::inline(ino, slot)));
                }
            }
        }
        Content::Empty | Content::Target(_) => {}
    }
    if inode.kind == FileKind::Directory {
        writes.push(Write::DeletePrefix(key::all_deltas(ino)));
        writes.push(Write::Delete(key::alive(ino)));
    }
    writes
}

pub fn no_name(name: &[u8]) -> Error {
    Error::not_found(format!("there is no {:?} here", shown(name)))
}

pub fn exists(name: &[u8]) -> Error {
    Error::errno(errno::EEXIST, format!("{:?} exists already", shown(name)))
}

fn not_empty(name: &[u8]) -> Error {
    Error::errno(errno::ENOTEMPTY, format!("{:?} is not empty", shown(name)))
}

pub fn not_a_directory(name: &[u8]) -> Error {
    Error::errno(errno::ENOTDIR, format!("{:?} is not a directory", shown(name)))
}

/// Whether an inode row is there, for callers that need no more.
pub fn inode_exists(store: &dyn MetaStore, ino: Ino) -> Result<bool> {
    Ok(store.get(&key::inode(ino), At::Latest)?.is_some())
}
