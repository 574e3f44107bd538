//! The file system: the one place where metadata and segments meet, and where POSIX promises live.
//!
//! | module | what it owns |
//! |---|---|
//! | `volume` | the volume as a whole: folder, lock, start, recovery, stop |
//! | `live` | inodes in use: what is newer in memory than in the store |
//! | `namespace` | names: lookup, create, link, unlink, rename |
//! | `file` | open files: read, write, truncate, fsync |
//! | `flush` | the road of dirty bytes: segment, fdatasync, metadata commit |
//! | `gate` | the bound of dirty memory |
//! | `backup`, `adopt` | the metadata beside the segments in the bucket; bringing a volume back from there |
//! | `rescue` | a tree from segments alone |
//! | `export` | files as plain objects of any bucket |
//! | `announce` | a segment's announcement: what is unfinished, for recovery and uploads |
//! | `packs` | the open pack |
//! | `room` | what is kept of a full disk |
//! | `placed` | reading what extents name |
//! | `segments`, `remote` | bytes of segments wherever they are: flash, object tier; fetching, eviction |
//! | `tiers`, `tiering` | the object tier as a whole; where files are, by path |
//! | `uploads` | dirty segments on their way into the object tier |
//! | `directory`, `xattr` | listings, extended attributes |
//! | `by_path`, `put` | the same by path and identity, with permission checks; bulk import |
//! | `fsck` | whether all is whole |
//! | `seal`, `sealed` | freezing a subtree; reading it without locks |
//! | `snapshots`, `past`, `diff` | snapshots: make, delete, restore; reading one as a folder; comparing two |
//! | `versions` | which versions are readable; cleaning after those that are not |
//! | `compact` | writing packs anew that are mostly dead, or small |
//! | `collect` | giving back segments that nothing can reach |
//! | `changes` | telling mounts what changed through other doors |
//! | `extents`, `dirty` | pure maps from file offsets to places and to bytes |
//!
//! Methods by inode trust their caller (the kernel checked permissions, see `default_permissions`); methods by
//! path take an `Identity` and check it.
//!
//! Locks are taken in this order: directory stripes (by index), live inodes (by number), the open pack, the
//! store. No lock is held while a kernel is notified.

mod adopt;
mod announce;
mod backup;
mod by_path;
mod changes;
mod collect;
mod compact;
mod diff;
mod directory;
mod dirty;
mod export;
mod extents;
mod file;
mod flush;
mod fsck;
mod gate;
mod live;
mod namespace;
mod packs;
mod past;
mod placed;
mod put;
mod remote;
mod rescue;
mod room;
mod seal;
mod sealed;
mod segments;
mod snapshots;
mod tiering;
mod tiers;
mod types;
mod uploads;
mod versions;
mod volume;
mod xattr;

pub use backup::BackupStatus;
pub use by_path::Access;
pub use changes::Subscription;
pub use diff::{ChangeKind, Difference};
pub use directory::OpenDir;
pub use export::ExportTarget;
pub use file::OpenFile;
pub use headrace_format::record::{FileKind, Snapshot};
pub use headrace_object::Location;
pub use past::FOLDER_NAME as SNAPSHOTS_FOLDER;
pub use sealed::SealedView;
pub use segments::is_not_here;
pub use snapshots::Restored;
pub use tiers::TierStatus;
pub use types::{
    Attr, Change, Contents, CreateOptions, Created, DirItem, Identity, NewInode, OpenMode, Origin,
    RenameMode, Rescued, SetAttr, Statfs, VolumeOptions,
};
pub use volume::Volume;
