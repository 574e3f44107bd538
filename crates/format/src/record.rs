//! Metadata values. (types; codec below)

use headrace_base::ids::{SealId, VolumeId};
use headrace_base::time::Timestamp;
use headrace_base::{Ino, OpId, Result, SegmentId, SessionId, Version};
use smallvec::SmallVec;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// All that the file system knows of an inode, but for names, xattrs and (for directories) deltas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub kind: FileKind,
    /// Permission bits, setuid, setgid and sticky: the low 12 bits of st_mode.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u32,
    pub size: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// The directory that holds a directory; for others the one it was created in (a hint for rescue).
    pub parent: Ino,
    /// The inode whose quota this one counts against; the root until quotas exist.
    pub quota_root: Ino,
    pub content: Content,
}

/// Where an inode's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: directories, devices, empty files, files that are one hole.
    Empty,
    /// The target of a symbolic link.
    Target(Vec<u8>),
    /// Up to `EXTENTS_INLINE_MAX` extents, here. In order of file offset, never overlapping.
    Extents(Vec<Extent>),
    /// More than that: in rows of their own, one for each 64 MiB of the file (`key::extents`).
    Regions,
}

pub const EXTENTS_INLINE_MAX: usize = 4;
pub const REGION: u64 = 64 << 20;

/// One run of a file's bytes. What no extent covers, below the file's size, reads as zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    pub file_offset: u64,
    pub length: u64,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a pack segment, at `offset`, verified by the checksums that travel with the extent.
    Pack { segment: SegmentId, offset: u64, check: Check },
    /// In a file segment, at `offset`, verified by the index beside the segment (`ULID.idx`).
    File { segment: SegmentId, offset: u64 },
    /// In the metadata store itself (`key::inline(ino, slot)`), from byte `offset` of that value on.
    /// Where small fsynced data rides until it moves to a pack.
    Inline { slot: u64, offset: u64 },
}

/// CRC32C of each `CHUNK` of the pack record that an extent lies in. The extent may be a part of the
/// record (after overwrites and truncation); then only the chunks that it touches are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Where in the segment the first listed chunk begins; at or before the extent's offset.
    pub start: u64,
    /// How many bytes the listed chunks cover from `start`; all but the last chunk are `CHUNK` long.
    pub covered: u64,
    pub crcs: SmallVec<[u32; 1]>,
}

/// What a name in a directory leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dentry {
    pub ino: Ino,
    pub kind: FileKind,
}

/// What one node changed of a directory: cumulative, so that a row per node is enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirDelta {
    pub entries: i64,
    /// Subdirectories: each adds a link to its parent.
    pub subdirectories: i64,
    /// The latest change of the directory by this node; mtime and ctime are the greatest of all rows
    /// and of the inode's own.
    pub changed: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub state: SessionState,
    pub node: u32,
    pub pid: u32,
    pub host: String,
    pub started: Timestamp,
    /// The greatest op-id of this session that is in the store.
    pub last_op: OpId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    Alive,
    /// Ended by itself.
    Ended,
    /// Declared dead by another: nothing of it may commit any more.
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    Pack,
    File,
}

/// A segment that its writer may still add to or has not named yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    pub session: SessionId,
    pub kind: SegmentKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seal {
    pub version: Version,
    pub path: Vec<u8>,
    pub root: Ino,
    pub created: Timestamp,
    pub samples: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    pub volume: VolumeId,
    pub format: u32,
    pub created: Timestamp,
}
