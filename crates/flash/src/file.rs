//! Writes a file segment, and keeps its index: in memory while it is open (so that what was appended can be
//! read, verified, at once), beside it on disk as far as it is durable.
//!
//! Order of `sync`: data durable, then the entries that cover it, durable too. So an entry never covers bytes
//! that are not there, and recovery may trust whatever entries it finds. A crash in between leaves data that
//! no entry covers; recovery cuts it off, no extent names it.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use headrace_base::checksum::Crc32c;
use headrace_base::error::errno;
use headrace_base::{Error, Result, SegmentId, crash, time};
use headrace_format::CHUNK;
use headrace_format::segment::{self, IndexEntry, Origin};

use crate::disk::DiskFile;
use crate::flash::{Flash, Part};

/// The number of a chunk has 32 bits in the index, and the greatest one closes it.
const DATA_BYTES_MAX: u64 = u32::MAX as u64 * CHUNK;

/// The checksums of a file segment: as its writer knows them while it is open, later as they are on disk.
#[derive(Debug, Default)]
pub(crate) struct ChunkSums {
    pub(crate) crcs: Vec<u32>,
    /// How many bytes they cover.
    pub(crate) bytes: u64,
}

/// A segment that is open for writing here. Readers take what they need out of it and read without it.
pub(crate) type LiveSums = RwLock<ChunkSums>;

#[derive(Debug)]
pub struct FileSegmentWriter {
    flash: Arc<Flash>,
    segment: SegmentId,
    data: DiskFile,
    index: DiskFile,
    live: Arc<LiveSums>,
    bytes: u64,
    /// Of the last chunk, as far as it is written.
    open_chunk: Crc32c,
    /// Bytes of the index that are written, and bytes of the data that they cover.
    index_bytes: u64,
    indexed_bytes: u64,
    /// A failed append may have left bytes behind the end.
    torn: bool,
    opened: Instant,
}

impl FileSegmentWriter {
    /// How long it has been open.
    pub fn age(&self) -> Duration {
        time::monotonic_now().duration_since(self.opened)
    }

    pub(crate) fn create(
        flash: &Arc<Flash>,
        segment: SegmentId,
        origin: &Origin,
    ) -> Result<FileSegmentWriter> {
        let data = DiskFile::create(flash.path(segment, Part::Data))?;
        let index = DiskFile::create(flash.path(segment, Part::Index))?;
        let header = segment::encode_index_header(segment, origin);
        index.write(&header, 0)?;
        Ok(FileSegmentWriter {
            live: flash.add_live(segment),
            flash: Arc::clone(flash),
            segment,
            data,
            index,
            bytes: 0,
            open_chunk: Crc32c::default(),
            index_bytes: header.len() as u64,
            indexed_bytes: 0,
            torn: false,
            opened: time::monotonic_now(),
        })
    }

    pub fn segment(&self) -> SegmentId {
        self.segment
    }

    /// Bytes in the segment so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends and gives the offset it wrote at; readable at once through `Flash::read_file`, durable after
    /// `sync`. On failure (`Full` when the disk is) the segment is as before.
    pub fn append(&mut self, bytes: &[u8]) -> Result<u64> {
        let offset = self.bytes;
        if offset + bytes.len() as u64 > DATA_BYTES_MAX {
            return Err(Error::errno(
                errno::EFBIG,
                format!("segment {}: more than {DATA_BYTES_MAX} bytes: go on in another one", self.segment),
            ));
        }
        self.torn = true;
        if let Err(error) = self.data.write(bytes, offset) {
            // Gives the space back. If not even that works, the tail is overwritten or cut off later.
            self.torn = self.data.truncate(offset).is_err();
            return Err(error);
        }
        self.torn = false;
        // Only now: a failure must not have moved the sum of the last chunk.
        let filled = (offset % CHUNK) as usize;
        let (front, rest) = bytes.split_at(bytes.len().min((CHUNK as usize - filled) % CHUNK as usize));
        self.open_chunk.update(front);
        let grown = (!front.is_empty()).then(|| self.open_chunk.value());
        let mut added = Vec::with_capacity(rest.len().div_ceil(CHUNK as usize));
        for chunk in rest.chunks(CHUNK as usize) {
            self.open_chunk = Crc32c::default();
            self.open_chunk.update(chunk);
            added.push(self.open_chunk.value());
        }
        self.bytes += bytes.len() as u64;
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        if let (Some(grown), Some(last)) = (grown, live.crcs.last_mut()) {
            *last = grown;
        }
        live.crcs.extend(added);
        live.bytes = self.bytes;
        drop(live);
        Ok(offset)
    }

    /// Data, then its index, both durable. After a failed fdatasync the segment takes nothing more: what was
    /// appended since the last good sync must be written again, into another one.
    pub fn sync(&mut self) -> Result<()> {
        self.sync_with(None)
    }

    /// As `sync`, with the closing entry. The segment is immutable from here on. On failure recovery closes
    /// it.
    pub fn close(mut self) -> Result<()> {
        if self.torn {
            self.data.truncate(self.bytes)?;
        }
        self.sync_with(Some(IndexEntry::Closing { bytes: self.bytes }))
    }

    fn sync_with(&mut self, closing: Option<IndexEntry>) -> Result<()> {
        self.data.sync()?;
        // Both names are in the folder that the data's first sync made durable.
        self.index.entry_is_durable();
        crash::point("after-file-data");
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        let mut entries = index_entries(self.segment, &live, self.indexed_bytes);
        drop(live);
        if let Some(closing) = closing {
            entries.extend_from_slice(&segment::encode_index_entry(self.segment, &closing));
        }
        if !entries.is_empty() {
            self.index.write(&entries, self.index_bytes)?;
        }
        // Also without entries: the index must be there when the segment is.
        self.index.sync()?;
        self.index_bytes += entries.len() as u64;
        self.indexed_bytes = self.bytes;
        Ok(())
    }
}

impl Drop for FileSegmentWriter {
    fn drop(&mut self) {
        self.flash.remove_live(self.segment);
    }
}

/// Entries for all chunks that have grown since `indexed_bytes` were covered.
fn index_entries(segment: SegmentId, sums: &ChunkSums, indexed_bytes: u64) -> Vec<u8> {
    let first = (indexed_bytes / CHUNK) as usize;
    let mut entries = Vec::new();
    if sums.bytes > indexed_bytes {
        for (chunk, crc) in sums.crcs.iter().enumerate().skip(first) {
            let covered = (sums.bytes - chunk as u64 * CHUNK).min(CHUNK) as u32;
            let entry = IndexEntry::Chunk { chunk: chunk as u32, covered, crc: *crc };
            entries.extend_from_slice(&segment::encode_index_entry(segment, &entry));
        }
    }
    entries
}
