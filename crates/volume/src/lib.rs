//! The file system: the one place where metadata and segments meet, and where POSIX promises live.
//!
//! API skeleton: bodies follow. Methods by inode trust their caller (the kernel checked permissions, see
//! `default_permissions`); methods by path take an `Identity` and check it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use headrace_base::ids::{SealId, VolumeId};
use headrace_base::time::Timestamp;
use headrace_base::{Budget, Ino, Result, SessionId, Version};
use headrace_format::message;
pub use headrace_format::record::FileKind;

/// Who asks, for methods by path. Root passes every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity { pub uid: u32, pub gid: u32, pub groups: Vec<u32> }

/// Through which door a change came: that door's own caches need no notice of it. 0: the local socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(pub u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino, pub kind: FileKind, pub mode: u16, pub nlink: u32, pub uid: u32, pub gid: u32, pub rdev: u32,
    pub size: u64, /* of 512 bytes */ pub blocks: u64,
    pub atime: Timestamp, pub mtime: Timestamp, pub ctime: Timestamp, pub btime: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAttr { pub mode: Option<u16>, pub uid: Option<u32>, pub gid: Option<u32>, pub size: Option<u64>, pub atime: Option<Timestamp>, pub mtime: Option<Timestamp>, pub ctime: Option<Timestamp> }

/// What a new inode is to be. mkdir, mknod, symlink and create differ in nothing else.
#[derive(Clone, Debug)]
pub struct NewInode { pub kind: FileKind, pub mode: u16, pub uid: u32, pub gid: u32, pub rdev: u32, /* of a symlink */ pub target: Vec<u8> }

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode { Replace, NoReplace, Exchange }

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode { pub read: bool, pub write: bool, pub truncate: bool }

#[derive(Clone, Debug)]
pub struct DirItem { pub name: Vec<u8>, pub ino: Ino, pub kind: FileKind, /* pass back to read on after this one; survives unlinks in between */ pub cursor: u64 }

#[derive(Clone, Copy, Debug)]
pub struct Statfs { pub bytes_total: u64, pub bytes_free: u64, pub bytes_available: u64, pub inodes_used: u64 }

/// What another door's caches must forget.
#[derive(Clone, Debug)]
pub enum Change { /* attributes and data of an inode */ Inode(Ino), /* a name in a directory */ Entry(Ino, Vec<u8>) }

#[derive(Clone, Debug)]
pub struct VolumeOptions { pub memory_bytes_max: u64, pub open_files_max: usize }

#[derive(Debug)]
pub struct Volume {}

impl Volume {
    /// Makes a new volume in `folder` (made when missing, must be empty).
    pub fn create(_folder: &Path) -> Result<VolumeId> { todo!() }
    /// Takes the volume's lock (Conflict naming the owner's pid), recovers what a crash left, starts the flusher.
    pub fn open(_folder: &Path, _options: VolumeOptions) -> Result<Arc<Volume>> { todo!() }
    /// Flushes everything, closes segments and metadata. No call may follow.
    pub fn close(&self) -> Result<()> { todo!() }
    pub fn folder(&self) -> &Path { todo!() }
    pub fn id(&self) -> VolumeId { todo!() }
    pub fn session(&self) -> SessionId { todo!() }
    /// What recovery did at this start, one sentence each.
    pub fn recovery(&self) -> &[String] { todo!() }
    pub fn warnings(&self) -> Vec<String> { todo!() }
    pub fn budget(&self) -> &Arc<Budget> { todo!() }
    pub fn dirty_bytes(&self) -> u64 { todo!() }
    /// (number, bytes)
    pub fn segments(&self) -> Result<(u64, u64)> { todo!() }

    pub fn lookup(&self, _parent: Ino, _name: &[u8]) -> Result<Attr> { todo!() }
    pub fn getattr(&self, _ino: Ino) -> Result<Attr> { todo!() }
    /// One answer per inode, in order; None: gone.
    pub fn getattrs(&self, _inos: &[Ino]) -> Result<Vec<Option<Attr>>> { todo!() }
    pub fn setattr(&self, _origin: Origin, _ino: Ino, _set: &SetAttr) -> Result<Attr> { todo!() }
    pub fn readlink(&self, _ino: Ino) -> Result<Vec<u8>> { todo!() }
    /// mkdir, mknod, symlink. EEXIST if the name is there.
    pub fn make(&self, _origin: Origin, _parent: Ino, _name: &[u8], _new: NewInode) -> Result<Attr> { todo!() }
    /// Creates a file and opens it. EEXIST if the name is there.
    pub fn create_file(self: &Arc<Self>, _origin: Origin, _parent: Ino, _name: &[u8], _new: NewInode, _mode: OpenMode) -> Result<(Attr, OpenFile)> { todo!() }
    pub fn link(&self, _origin: Origin, _ino: Ino, _parent: Ino, _name: &[u8]) -> Result<Attr> { todo!() }
    pub fn unlink(&self, _origin: Origin, _parent: Ino, _name: &[u8]) -> Result<()> { todo!() }
    pub fn rmdir(&self, _origin: Origin, _parent: Ino, _name: &[u8]) -> Result<()> { todo!() }
    pub fn rename(&self, _origin: Origin, _from: (Ino, &[u8]), _to: (Ino, &[u8]), _mode: RenameMode) -> Result<()> { todo!() }
    pub fn open_file(self: &Arc<Self>, _origin: Origin, _ino: Ino, _mode: OpenMode) -> Result<OpenFile> { todo!() }
    pub fn open_dir(self: &Arc<Self>, _ino: Ino) -> Result<OpenDir> { todo!() }
    pub fn getxattr(&self, _ino: Ino, _name: &[u8]) -> Result<Vec<u8>> { todo!() }
    /// create: fail with EEXIST if there; replace: fail with ENODATA if not there.
    pub fn setxattr(&self, _origin: Origin, _ino: Ino, _name: &[u8], _value: &[u8], _create: bool, _replace: bool) -> Result<()> { todo!() }
    pub fn listxattr(&self, _ino: Ino) -> Result<Vec<Vec<u8>>> { todo!() }
    pub fn removexattr(&self, _origin: Origin, _ino: Ino, _name: &[u8]) -> Result<()> { todo!() }
    pub fn statfs(&self) -> Result<Statfs> { todo!() }
    /// fsync of a directory, or of metadata in general.
    pub fn sync_metadata(&self) -> Result<()> { todo!() }
    /// Everything written before is durable when it returns.
    pub fn sync(&self) -> Result<()> { todo!() }

    // By path, with permission checks.
    pub fn resolve(&self, _who: &Identity, _path: &[u8], _follow: bool) -> Result<Attr> { todo!() }
    /// The directory that holds the last component, and its name; checks write and search permission on it.
    pub fn resolve_parent(&self, _who: &Identity, _path: &[u8]) -> Result<(Ino, Vec<u8>)> { todo!() }
    /// r, w, x as in access(2): EACCES if one is missing.
    pub fn check_access(&self, _who: &Identity, _attr: &Attr, _read: bool, _write: bool, _execute: bool) -> Result<()> { todo!() }
    /// Names of a directory greater than `after`, byte order.
    pub fn list(&self, _who: &Identity, _directory: Ino, _after: Option<&[u8]>, _limit: usize) -> Result<Vec<DirItem>> { todo!() }
    /// Sticky bit and parent's write permission for removing or renaming `name`; ownership for chmod/chown/utimes.
    pub fn check_remove(&self, _who: &Identity, _parent: Ino, _name: &[u8]) -> Result<()> { todo!() }
    pub fn check_setattr(&self, _who: &Identity, _attr: &Attr, _set: &SetAttr) -> Result<()> { todo!() }
    /// The bulk road in: see `message::Request::Put`.
    pub fn put(&self, _who: &Identity, _entries: &[message::PutEntry], _payload: &[u8], _parents: bool, _durable: bool) -> Result<message::PutDone> { todo!() }

    /// Freezes the tree under `path` and writes its manifest. The caller must be able to read and search every
    /// directory in it (else Permission, naming the first that it may not).
    pub fn seal(&self, _who: &Identity, _path: &[u8]) -> Result<Arc<SealedView>> { todo!() }
    pub fn open_seal(&self, _who: &Identity, _seal: SealId) -> Result<Arc<SealedView>> { todo!() }
    pub fn seals(&self) -> Result<Vec<message::Sealed>> { todo!() }

    /// Changes made through other doors than `origin`, for a mount's notifier thread.
    pub fn subscribe(&self, _origin: Origin) -> Subscription { todo!() }
    /// A fresh origin for a new mount.
    pub fn new_origin(&self) -> Origin { todo!() }
    /// Waits until every subscriber has handled the changes made so far, at most `patience`.
    pub fn settle(&self, _patience: Duration) { todo!() }
}

/// An open file; dropping it is the close. Safe to use from many threads.
#[derive(Debug)]
pub struct OpenFile {}

impl OpenFile {
    pub fn ino(&self) -> Ino { todo!() }
    pub fn attr(&self) -> Result<Attr> { todo!() }
    /// Fills `out` from `offset`; fewer bytes only at the end of the file.
    pub fn read(&self, _offset: u64, _out: &mut [u8]) -> Result<usize> { todo!() }
    pub fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<()> { todo!() }
    /// Gives the offset it wrote at.
    pub fn append(&self, _bytes: &[u8]) -> Result<u64> { todo!() }
    pub fn truncate(&self, _size: u64) -> Result<Attr> { todo!() }
    pub fn fsync(&self) -> Result<()> { todo!() }
}

#[derive(Debug)]
pub struct OpenDir {}

impl OpenDir {
    pub fn ino(&self) -> Ino { todo!() }
    /// "." and ".." first, then names in byte order. `cursor` 0 starts anew; at most `limit` items.
    pub fn read(&self, _cursor: u64, _limit: usize) -> Result<Vec<DirItem>> { todo!() }
}

/// A frozen subtree. Cheap to clone by Arc; reads take no lock.
#[derive(Debug)]
pub struct SealedView {}

impl SealedView {
    pub fn id(&self) -> SealId { todo!() }
    pub fn version(&self) -> Version { todo!() }
    pub fn describe(&self) -> message::Sealed { todo!() }
    /// The manifest, for passing its descriptor (read-only).
    pub fn manifest_file(&self) -> &File { todo!() }
    pub fn samples(&self) -> u64 { todo!() }
    /// Invalid if out of range.
    pub fn sample_bytes(&self, _index: u64) -> Result<u64> { todo!() }
    /// A key by which neighbours on disk sort together: (segment number, offset).
    pub fn sample_place(&self, _index: u64) -> (u32, u64) { todo!() }
    pub fn sample_path(&self, _index: u64) -> Vec<u8> { todo!() }
    /// Whether `who` may read the sample's bytes: mode bits of the file and search permission on the way.
    pub fn check_readable(&self, _who: &Identity, _index: u64) -> Result<()> { todo!() }
    /// True if `who` may read every sample (owner or root): then `check_readable` need not be asked.
    pub fn all_readable(&self, _who: &Identity) -> bool { todo!() }
    /// Fills `out`, exactly `sample_bytes(index)` long, verified.
    pub fn read_sample(&self, _index: u64, _out: &mut [u8]) -> Result<()> { todo!() }
}

#[derive(Debug)]
pub struct Subscription {}

impl Subscription {
    /// The next change, or None after `patience`. Calling it again says that the one before was handled.
    pub fn next(&self, _patience: Duration) -> Option<Change> { todo!() }
}

#[allow(dead_code)]
type Keep = PathBuf;
