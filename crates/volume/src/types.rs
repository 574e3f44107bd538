//! The plain values that callers pass in and get back.

use headrace_base::Ino;
use headrace_base::ids::VolumeId;
use headrace_base::time::Timestamp;
use headrace_format::record::{Content, FileKind, Inode};
use headrace_object::Location;

/// Who asks, for methods by path. Root passes every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

impl Identity {
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// Through which door a change came: that door's own caches need no notice of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(pub u32);

impl Origin {
    /// The local socket, which caches nothing.
    pub const SOCKET: Origin = Origin(0);
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino,
    pub kind: FileKind,
    pub mode: u16,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub size: u64,
    /// Of 512 bytes each.
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
}

impl Attr {
    pub(crate) fn of(ino: Ino, inode: &Inode) -> Attr {
        let bytes = match &inode.content {
            Content::Empty => 0,
            Content::Target(target) => target.len() as u64,
            Content::Extents(extents) => extents.iter().map(|extent| extent.length).sum(),
            Content::Regions => inode.size,
        };
        Attr {
            ino,
            kind: inode.kind,
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev,
            size: inode.size,
            blocks: bytes.div_ceil(512),
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    pub mode: Option<u16>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Timestamp>,
    pub mtime: Option<Timestamp>,
    pub ctime: Option<Timestamp>,
}

/// What a new inode is to be. mkdir, mknod, symlink and create differ in nothing else.
#[derive(Clone, Debug)]
pub struct NewInode {
    pub kind: FileKind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// Of a symbolic link; else empty.
    pub target: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    Replace,
    NoReplace,
    Exchange,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode {
    pub read: bool,
    pub write: bool,
    pub truncate: bool,
}

impl OpenMode {
    pub const READ: OpenMode = OpenMode { read: true, write: false, truncate: false };
    pub const WRITE: OpenMode = OpenMode { read: true, write: true, truncate: false };
}

#[derive(Clone, Debug)]
pub struct DirItem {
    pub name: Vec<u8>,
    pub ino: Ino,
    pub kind: FileKind,
    /// Pass it back to read on after this item; it survives unlinks in between.
    pub cursor: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Statfs {
    pub bytes_total: u64,
    pub bytes_free: u64,
    pub bytes_available: u64,
    /// Inode numbers given out so far: an upper bound of the inodes in use.
    pub inodes_used: u64,
}

/// What another door's caches must forget.
#[derive(Clone, Debug)]
pub enum Change {
    /// Attributes and data of an inode.
    Inode(Ino),
    /// A name in a directory.
    Entry(Ino, Vec<u8>),
}

/// What a new volume holds from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    #[default]
    Nothing,
    /// The volume that is in the object tier, as its last backup knows it.
    Backup,
    /// The files that the segments in the object tier know of.
    Segments,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct Created {
    pub volume: VolumeId,
    /// With `Contents::Segments`.
    pub rescued: Option<Rescued>,
}

/// What a rescue found.
#[derive(Clone, Debug, Default)]
pub struct Rescued {
    pub files: u64,
    pub bytes: u64,
    /// What is not as it was, or cannot be known; one sentence each.
    pub notes: Vec<String>,
}

/// What a new volume is to be.
#[derive(Clone, Debug, Default)]
pub struct CreateOptions {
    /// Where its segments are to be durable. None: on this disk.
    pub object: Option<Location>,
    /// What it holds from the start. All but `Nothing` needs an object tier.
    pub contents: Contents,
    /// With an object tier: what its segments may take of this disk. None: most of what is free.
    pub flash_bytes_max: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// For all buffers of the engine together: dirty data, batches, frames.
    pub memory_bytes_max: u64,
    /// Segment descriptors kept open.
    pub open_files_max: usize,
}

/// Bytes of a name, NUL excluded: NAME_MAX of Linux.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of a symbolic link's target: PATH_MAX less the NUL.
pub const TARGET_BYTES_MAX: usize = 4095;
/// As ext4: names and values of one xattr.
pub const XATTR_NAME_BYTES_MAX: usize = 255;
pub const XATTR_VALUE_BYTES_MAX: usize = 64 * 1024;
/// The greatest file size: offsets are i64 in the kernel.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;
