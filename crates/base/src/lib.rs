//! What every crate stands on: error kinds, ids, checksums, the memory budget, and the only door to
//! time, chance and threads. Nothing here knows what a file system is.
//!
//! Read next: `error.rs` (kinds by what the caller must do), `time.rs` (why there is one door).

pub mod budget;
pub mod checksum;
pub mod crash;
pub mod error;
pub mod ids;
pub mod random;
pub mod thread;
pub mod time;

pub use budget::{Budget, Reservation};
pub use checksum::crc32c;
pub use error::{Error, Kind, Result};
pub use ids::{Ino, OpId, SegmentId, SessionId, Version};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
