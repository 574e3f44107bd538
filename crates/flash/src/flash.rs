//! Signatures first; see the crate's helper notes.
use std::path::Path;
use std::sync::Arc;

use headrace_base::{Result, SegmentId};
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment::Origin;

/// One record that goes into a pack: whose bytes they are, and the bytes (possibly in several pieces).
#[derive(Debug)]
pub struct PackRecord<'a> {
    pub origin: Origin,
    pub pieces: Vec<&'a [u8]>,
}

/// Where a record's payload lies, in the order of the records given.
#[derive(Clone, Debug)]
pub struct Placed {
    pub offset: u64,
    pub length: u64,
    pub check: Check,
}

#[derive(Clone, Debug)]
pub struct SegmentFile {
    pub segment: SegmentId,
    pub kind: SegmentKind,
    pub bytes: u64,
}

/// What recovery found in a segment whose writer never closed it.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// Valid bytes that are kept; 0: the segment was empty and is removed.
    pub bytes: u64,
    pub truncated_bytes: u64,
    pub records: u64,
}

#[derive(Debug)]
pub struct Flash;

impl Flash {
    /// Opens the folder of segments (made when missing). `open_files_max` bounds the cached descriptors.
    pub fn open(_folder: &Path, _open_files_max: usize) -> Result<Arc<Flash>> { todo!() }
    pub fn create_pack(self: &Arc<Self>, _segment: SegmentId) -> Result<PackWriter> { todo!() }
    pub fn create_file_segment(self: &Arc<Self>, _segment: SegmentId, _origin: Origin) -> Result<FileSegmentWriter> { todo!() }
    /// Fills `out` from `offset` of a pack, verified against `check`. Thread-safe, no lock held while reading.
    pub fn read_pack(&self, _segment: SegmentId, _offset: u64, _check: &Check, _out: &mut [u8]) -> Result<()> { todo!() }
    /// Fills `out` from `offset` of a file segment (open or closed), verified against its index.
    pub fn read_file(&self, _segment: SegmentId, _offset: u64, _out: &mut [u8]) -> Result<()> { todo!() }
    /// Recovers an open segment after a crash: truncates to the last valid record, closes it.
    /// For a file segment `keep_bytes` is the end of the last committed extent: it must be covered.
    pub fn recover(&self, _segment: SegmentId, _kind: SegmentKind, _keep_bytes: u64) -> Result<Recovered> { todo!() }
    pub fn remove(&self, _segment: SegmentId, _kind: SegmentKind) -> Result<()> { todo!() }
    pub fn list(&self) -> Result<Vec<SegmentFile>> { todo!() }
    /// (total, free, available) bytes of the disk.
    pub fn space(&self) -> Result<(u64, u64, u64)> { todo!() }
}

#[derive(Debug)]
pub struct PackWriter;

impl PackWriter {
    pub fn segment(&self) -> SegmentId { todo!() }
    /// Bytes in the segment so far.
    pub fn bytes(&self) -> u64 { todo!() }
    /// Appends one frame with these records. In the page cache when it returns (readable through
    /// `Flash::read_pack`); durable after `sync`. On failure (ENOSPC) the segment is as before.
    pub fn append(&mut self, _records: &[PackRecord<'_>]) -> Result<Vec<Placed>> { todo!() }
    pub fn sync(&self) -> Result<()> { todo!() }
    /// Footer, fdatasync. The segment is immutable from here on.
    pub fn close(self) -> Result<()> { todo!() }
}

#[derive(Debug)]
pub struct FileSegmentWriter;

impl FileSegmentWriter {
    pub fn segment(&self) -> SegmentId { todo!() }
    pub fn bytes(&self) -> u64 { todo!() }
    /// Appends; readable at once through `Flash::read_file`, durable after `sync`.
    pub fn append(&mut self, _bytes: &[u8]) -> Result<u64> { todo!() }
    /// Data, then its index, both durable.
    pub fn sync(&mut self) -> Result<()> { todo!() }
    pub fn close(self) -> Result<()> { todo!() }
}
