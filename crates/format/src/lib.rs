//! Bytes on disk and on the wire. Everything here is a pure function from values to bytes and back; bytes
//! that come from a disk or a socket never panic, they answer `Corrupt` or `Invalid`.
//!
//! | module | what it lays out |
//! |---|---|
//! | `key` | metadata keys: order-preserving, one letter a kind |
//! | `record` | metadata values: inodes, extents, names, seals, sessions |
//! | `segment` | pack frames and footers, and the index beside a file segment |
//! | `backup` | metadata as it lies beside the segments in a bucket |
//! | `manifest` | the sample table of a sealed view, memory-mappable |
//! | `message` | requests and answers between client and engine |
//! | `order` | the keyed permutation that shuffles an epoch |
//!
//! A change of any layout needs a new `FORMAT` (disk) or `message::WIRE` (socket), a golden file under
//! tests/golden and a decision record.

pub mod backup;
pub mod key;
pub mod manifest;
pub mod message;
pub mod order;
pub mod record;
pub mod segment;

/// The volume format that this release writes. It reads 1 to this.
pub const FORMAT: u32 = 1;

/// The unit of alignment in packs. A constant of the format, whatever the machine's page size.
pub const BLOCK: u64 = 4096;

/// Checksums cover this many bytes of a record or file segment each; the last covers what is left.
pub const CHUNK: u64 = 16 * 1024;
