//! Segments on local disks: append, close, read, verify, recover. For a `file://` volume the flash tier and
//! the object tier are this one copy.
//!
//! | module | what it owns |
//! |---|---|
//! | `flash` | the folder: which segments there are, their descriptors and indexes; reading by name |
//! | `pack`, `file` | the writers: what is durable when, and what a failure leaves behind |
//! | `part`, `ranges` | some bytes of a segment whose whole is in the object tier |
//! | `read` | bytes into a buffer, and not one of them unverified |
//! | `recover` | what a crash left: the valid prefix is kept and closed |
//! | `disk` | system calls that may be cut short, syncs that may fail, errors that name the file |
//! | `cache` | bounded caches, for descriptors and indexes |
//!
//! Invariant: bytes that were placed are never changed, and what a reader gets is what was written or an
//! error. The bytes' layout is drawn in `headrace_format::segment`.

mod cache;
mod disk;
mod file;
pub mod flash;
mod pack;
mod part;
mod ranges;
mod read;
mod recover;

pub use flash::{
    FileSegmentWriter, Flash, PackRecord, PackSyncer, PackWriter, Placed, Recovered, SegmentFile, is_missing,
};
pub use part::{PART_BLOCK_BYTES, SegmentPart};
pub use ranges::Ranges;
pub use recover::{Described, SegmentBytes, describe_pack};
