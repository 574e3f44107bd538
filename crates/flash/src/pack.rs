//! Writes a pack segment. `append` lays out one frame and writes it where the last one ended; that end moves
//! only when the whole frame is written, so a failure in between leaves nothing but a torn tail, which is cut
//! off at once or overwritten by the next append, and which nobody was told of.
//!
//! Crash windows: in `append` a torn frame, cut off by recovery; before `sync` perhaps no frame at all; in
//! `close` a torn footer, written anew by recovery.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use headrace_base::{MIB, Result, SegmentId, crash, time};
use headrace_format::BLOCK;
use headrace_format::record::Check;
use headrace_format::segment::{self, DENSE_BYTES_MAX, FrameSpan, PACK_HEADER_BYTES, PackHeader, RecordPlan};

use crate::disk::DiskFile;
use crate::flash::{Flash, PackRecord, Part, Placed};

/// Frees a buffer that one large frame has blown up.
const KEPT_BUFFER_BYTES_MAX: usize = MIB as usize;

#[derive(Debug)]
pub struct PackWriter {
    segment: SegmentId,
    disk: Arc<DiskFile>,
    frames: Vec<FrameSpan>,
    records: u64,
    /// Where the last frame ends.
    end: u64,
    /// A failed append may have left bytes behind `end`.
    torn: bool,
    header: Vec<u8>,
    staging: Vec<u8>,
}

impl PackWriter {
    pub(crate) fn create(flash: &Arc<Flash>, segment: SegmentId) -> Result<PackWriter> {
        let disk = Arc::new(DiskFile::create(flash.path(segment, Part::Pack))?);
        let header = segment::encode_pack_header(&PackHeader { segment, created: time::wall_now() });
        disk.write(&header, 0)?;
        Ok(PackWriter {
            segment,
            disk,
            frames: Vec::new(),
            records: 0,
            end: PACK_HEADER_BYTES,
            torn: false,
            header: Vec::new(),
            staging: Vec::new(),
        })
    }

    pub fn segment(&self) -> SegmentId {
        self.segment
    }

    /// Bytes in the segment so far.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    /// Appends one frame with these records. In the page cache when it returns (readable through
    /// `Flash::read_pack`); durable after `sync`. On failure (`Full` when the disk is) the segment is as
    /// before. Costs a pass over the bytes for their checksums and one for the kernel's copy.
    pub fn append(&mut self, records: &[PackRecord<'_>]) -> Result<Vec<Placed>> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let lengths: Vec<u64> = records.iter().map(PackRecord::length).collect();
        let crcs: Vec<_> = records.iter().map(|record| segment::chunk_crcs(&record.pieces)).collect();
        let plans: Vec<RecordPlan<'_>> = records
            .iter()
            .zip(lengths.iter().zip(&crcs))
            .map(|(record, (length, crcs))| RecordPlan { origin: &record.origin, length: *length, crcs })
            .collect();
        let layout = segment::lay_out_frame(self.segment, self.end, &plans, &mut self.header)?;

        // Until the last byte is written: whatever fails, there may be something behind the end.
        self.torn = true;
        let written = self.write_frame(records, &lengths, &layout.offsets, layout.end);
        self.staging.clear();
        self.staging.shrink_to(KEPT_BUFFER_BYTES_MAX);
        self.header.shrink_to(KEPT_BUFFER_BYTES_MAX);
        if let Err(error) = written {
            // Gives the space back. If not even that works, the tail is overwritten or cut off later.
            self.torn = self.disk.truncate(self.end).is_err();
            return Err(error);
        }
        self.torn = false;
        self.frames.push(FrameSpan { offset: self.end, bytes: layout.end - self.end });
        self.records += records.len() as u64;
        self.end = layout.end;
        let placed = lengths.into_iter().zip(crcs).zip(layout.offsets).map(|((length, crcs), offset)| {
            let check = Check { start: offset, covered: length, crcs };
            Placed { offset, length, check }
        });
        Ok(placed.collect())
    }

    fn write_frame(
        &mut self,
        records: &[PackRecord<'_>],
        lengths: &[u64],
        offsets: &[u64],
        end: u64,
    ) -> Result<()> {
        let mut gather = Gather::new(&self.disk, self.end, &mut self.staging);
        gather.push(&self.header)?;
        for dense in [true, false] {
            for ((record, length), offset) in records.iter().zip(lengths).zip(offsets) {
                if (*length < DENSE_BYTES_MAX) == dense {
                    gather.zeros_to(*offset)?;
                    for piece in &record.pieces {
                        gather.push(piece)?;
                    }
                }
            }
        }
        gather.zeros_to(end)?;
        gather.flush()
    }

    /// What was appended is durable when it returns. After a failure the segment takes nothing more: what
    /// was appended since the last good sync must be written again, into another one.
    pub fn sync(&self) -> Result<()> {
        self.disk.sync()
    }

    /// For a sync while others append: it covers what was appended before it began.
    pub fn syncer(&self) -> PackSyncer {
        PackSyncer { disk: Arc::clone(&self.disk) }
    }

    /// Footer, fdatasync. The segment is immutable from here on. On failure recovery closes it.
    pub fn close(mut self) -> Result<()> {
        if self.torn {
            self.disk.truncate(self.end)?;
        }
        finish(&self.disk, self.segment, &self.frames, self.records, &mut self.staging)
    }
}

/// Makes a pack's bytes durable without holding its writer.
#[derive(Debug)]
pub struct PackSyncer {
    disk: Arc<DiskFile>,
}

impl PackSyncer {
    /// See `PackWriter::sync`.
    pub fn sync(&self) -> Result<()> {
        self.disk.sync()
    }
}

/// Writes the footer behind the last frame, where the file must end.
pub(crate) fn finish(
    disk: &DiskFile,
    segment: SegmentId,
    frames: &[FrameSpan],
    records: u64,
    staging: &mut Vec<u8>,
) -> Result<()> {
    staging.clear();
    segment::encode_footer(segment, frames, records, staging);
    disk.write(staging, frames.last().map_or(PACK_HEADER_BYTES, FrameSpan::end))?;
    crash::point("after-footer");
    disk.sync()
}

/// Gathers pieces that lie one behind the other in the file into few system calls. Small pieces are copied
/// together, large ones are written from where they lie.
struct Gather<'a, 'p> {
    disk: &'a DiskFile,
    /// Where in the file the first part that is not written yet begins, and where the last one ends.
    begin: u64,
    end: u64,
    staging: &'a mut Vec<u8>,
    parts: Vec<Gathered<'p>>,
}

enum Gathered<'p> {
    Staged(Range<usize>),
    Borrowed(&'p [u8]),
}

/// From here on a slice of its own costs less than copying.
const BORROWED_BYTES_MIN: usize = 2048;
/// Bounds the memory of a frame of many small files; a system call for each MiB is not felt.
const STAGED_BYTES_MAX: usize = MIB as usize;
/// UIO_MAXIOV of Linux.
const PARTS_MAX: usize = 1024;
static ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

impl<'a, 'p> Gather<'a, 'p> {
    fn new(disk: &'a DiskFile, begin: u64, staging: &'a mut Vec<u8>) -> Self {
        staging.clear();
        Gather { disk, begin, end: begin, staging, parts: Vec::new() }
    }

    fn push(&mut self, bytes: &'p [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.end += bytes.len() as u64;
        if bytes.len() >= BORROWED_BYTES_MIN {
            self.parts.push(Gathered::Borrowed(bytes));
        } else {
            let from = self.staging.len();
            self.staging.extend_from_slice(bytes);
            match self.parts.last_mut() {
                Some(Gathered::Staged(range)) => range.end = self.staging.len(),
                _ => self.parts.push(Gathered::Staged(from..self.staging.len())),
            }
        }
        if self.parts.len() >= PARTS_MAX || self.staging.len() >= STAGED_BYTES_MAX {
            self.flush()?;
        }
        Ok(())
    }

    fn zeros_to(&mut self, offset: u64) -> Result<()> {
        // Payloads lie at most one block apart.
        self.push(&ZEROS[..(offset - self.end) as usize])
    }

    fn flush(&mut self) -> Result<()> {
        let mut slices: Vec<IoSlice<'_>> = self
            .parts
            .iter()
            .map(|part| match part {
                Gathered::Staged(range) => IoSlice::new(&self.staging[range.clone()]),
                Gathered::Borrowed(bytes) => IoSlice::new(bytes),
            })
            .collect();
        self.disk.write_vectored(&mut slices, self.begin)?;
        self.begin = self.end;
        self.parts.clear();
        self.staging.clear();
        Ok(())
    }
}
