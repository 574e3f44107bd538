//! What a crash left of a segment: the valid prefix is kept and closed, the rest cut off.
//!
//! Order: find the valid prefix, reading only; refuse if it is shorter than what metadata names; then cut,
//! write the footer or closing entry, sync. Each step can be repeated: a crash in between leaves an open
//! segment with the same valid prefix. An error of the disk is an error, never "not valid": nothing is cut
//! off because a cable was loose.

use std::fs::File;
use std::io;

use headrace_base::time::Timestamp;
use headrace_base::{Error, Kind, MIB, Result, SegmentId, crc32c};
use headrace_format::CHUNK;
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment::{
    self, FOOTER_END_BYTES, FRAME_PREFIX_BYTES, Footer, Frame, FrameSpan, INDEX_ENTRY_BYTES, Index,
    IndexEntry, Origin, PACK_HEADER_BYTES, PackHeader,
};

use crate::disk::{self, DiskFile};
use crate::flash::{Flash, Part, Placed, Recovered, is_missing, missing_or_unreadable};
use crate::pack;

const EMPTY: Recovered = Recovered { bytes: 0, truncated_bytes: 0, records: 0 };

/// Where the bytes of a segment come from.
pub trait SegmentBytes {
    /// Fills `out` from `offset` on; gives how many bytes there were, fewer only where the segment ends.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize>;
}

struct OnDisk<'a> {
    file: &'a File,
    path: &'a std::path::Path,
}

impl SegmentBytes for OnDisk<'_> {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        disk::read(self.file, out, offset).map_err(|cause| disk::io_error("read", self.path, cause))
    }
}

/// A file of a segment, read for what it says about itself.
struct Inspected<'a> {
    segment: SegmentId,
    from: &'a dyn SegmentBytes,
    bytes: u64,
}

impl Inspected<'_> {
    /// Up to `count` bytes at `offset`: fewer where the file ends.
    fn read(&self, offset: u64, count: u64) -> Result<Vec<u8>> {
        let count = count.min(self.bytes.saturating_sub(offset));
        let mut bytes = vec![0; count as usize];
        let done = self.fill(offset, &mut bytes)?;
        bytes.truncate(done);
        Ok(bytes)
    }

    fn fill(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let read = self.from.read_at(offset, out);
        read.map_err(|error| error.context(format_args!("segment {}", self.segment)))
    }

    /// None: the pack is open.
    fn footer(&self) -> Result<Option<Footer>> {
        let last = self.read(self.bytes.saturating_sub(FOOTER_END_BYTES as u64), FOOTER_END_BYTES as u64)?;
        let Some(end) = segment::decode_footer_end(self.segment, self.bytes, &last)? else { return Ok(None) };
        segment::decode_footer(self.segment, &end, &self.read(end.offset, end.bytes as u64)?).map(Some)
    }

    /// The frame at `offset`; its payloads are not looked at.
    fn frame(&self, offset: u64) -> Result<Frame> {
        let prefix = self.read(offset, FRAME_PREFIX_BYTES as u64)?;
        let prefix = segment::decode_frame_prefix(self.segment, offset, &prefix)?;
        if prefix.span.end() > self.bytes {
            return Err(Error::corrupt(format!(
                "segment {}: the frame at byte {offset} is cut off: it has {} bytes, {} are there",
                self.segment,
                prefix.span.bytes,
                self.bytes - offset
            )));
        }
        segment::decode_frame(self.segment, offset, &self.read(offset, prefix.header_bytes as u64)?)
    }

    /// Reads `length` bytes at `offset` and compares the checksum of each chunk. The first that differs is
    /// given: where it begins, and its checksum as found and as expected.
    fn first_mismatch(&self, offset: u64, length: u64, crcs: &[u32]) -> Result<Option<(u64, u32, u32)>> {
        let mut buffer = vec![0; length.min(MIB) as usize];
        let chunks_at_once = (MIB / CHUNK) as usize;
        for (step, crcs) in crcs.chunks(chunks_at_once).enumerate() {
            let begin = step as u64 * MIB;
            let buffer = &mut buffer[..(length - begin).min(MIB) as usize];
            let done = self.fill(offset + begin, buffer)?;
            // What is not there counts as zeros: a mismatch, unless the checksum says otherwise.
            buffer[done..].fill(0);
            for ((chunk, bytes), expected) in buffer.chunks(CHUNK as usize).enumerate().zip(crcs) {
                let found = crc32c(bytes);
                if found != *expected {
                    return Ok(Some((offset + begin + chunk as u64 * CHUNK, found, *expected)));
                }
            }
        }
        Ok(None)
    }

    /// The frames of an open pack, up to the first that is not valid, and why that one is not.
    fn scan(&self) -> Result<(Vec<Frame>, Option<Error>)> {
        let mut frames = Vec::new();
        let mut offset = PACK_HEADER_BYTES;
        while offset < self.bytes {
            let frame = match self.frame(offset) {
                Ok(frame) => frame,
                Err(error) if error.kind() == Kind::Corrupt => return Ok((frames, Some(error))),
                Err(error) => return Err(error),
            };
            for record in &frame.records {
                let mismatch = self.first_mismatch(record.offset, record.length, &record.crcs)?;
                if let Some((at, found, expected)) = mismatch {
                    let why = Error::corrupt(format!(
                        "segment {}: the bytes at offset {at} have CRC32C {found:08x}, expected {expected:08x}",
                        self.segment
                    ));
                    return Ok((frames, Some(why)));
                }
            }
            offset = frame.span.end();
            frames.push(frame);
        }
        Ok((frames, None))
    }
}

/// What `Flash::records` gives for a pack.
pub(crate) fn pack_records(flash: &Flash, segment: SegmentId) -> Result<Vec<(Origin, Placed)>> {
    let file = flash.file(segment, Part::Pack)?;
    let path = flash.path(segment, Part::Pack);
    let bytes = file.metadata().map_err(|cause| disk::io_error("look at", &path, cause))?.len();
    let on_disk = OnDisk { file: &file, path: &path };
    let pack = Inspected { segment, from: &on_disk, bytes };
    segment::decode_pack_header(segment, &pack.read(0, PACK_HEADER_BYTES)?)?;
    let frames = match pack.footer()? {
        Some(footer) => {
            let frames: Vec<Frame> =
                footer.frames.iter().map(|span| pack.frame(span.offset)).collect::<Result<_>>()?;
            let records: u64 = frames.iter().map(|frame| frame.records.len() as u64).sum();
            let differs = frames.iter().zip(&footer.frames).any(|(frame, span)| frame.span != *span);
            if differs || records != footer.records {
                return Err(Error::corrupt(format!(
                    "segment {segment} is damaged: its footer names {} records, its frames hold {records} ({})",
                    footer.records,
                    path.display()
                )));
            }
            frames
        }
        None => pack.scan()?.0,
    };
    Ok(placed(frames))
}

fn placed(frames: Vec<Frame>) -> Vec<(Origin, Placed)> {
    let records = frames.into_iter().flat_map(|frame| frame.records).map(|record| {
        let check = Check { start: record.offset, covered: record.length, crcs: record.crcs };
        (record.origin, Placed { offset: record.offset, length: record.length, check })
    });
    records.collect()
}

/// What a pack says about itself, as far as it can be read.
#[derive(Debug)]
pub struct Described {
    /// In the order in which they were written.
    pub records: Vec<(Origin, Placed)>,
    /// What of it cannot be read, and why.
    pub damage: Vec<Error>,
}

/// Reads the records of a pack of `bytes` bytes. Of a closed one its footer and the headers of its frames: one that is
/// damaged is left out. Of one without a footer (or with a damaged one) everything, payloads too: its frames up to the
/// first that is not whole, which is what recovery would keep. Fails only if the bytes cannot be had, or if a later
/// release wrote them.
pub fn describe_pack(segment: SegmentId, from: &dyn SegmentBytes, bytes: u64) -> Result<Described> {
    let pack = Inspected { segment, from, bytes };
    let mut damage = Vec::new();
    let header = pack.read(0, PACK_HEADER_BYTES)?;
    or_damage(segment::decode_pack_header(segment, &header), &mut damage)?;
    let before = damage.len();
    let footer = or_damage(pack.footer(), &mut damage)?.flatten();
    let Some(footer) = footer else {
        let (frames, why) = pack.scan()?;
        if why.is_none() && damage.len() == before {
            damage.push(Error::corrupt(format!("segment {segment} was cut off: it has no footer")));
        }
        damage.extend(why);
        return Ok(Described { records: placed(frames), damage });
    };
    let mut frames = Vec::with_capacity(footer.frames.len());
    for span in &footer.frames {
        let frame = pack.frame(span.offset).and_then(|frame| match frame.span == *span {
            true => Ok(frame),
            false => Err(Error::corrupt(format!(
                "segment {segment}: the frame at byte {} is not as long as the footer says",
                span.offset
            ))),
        });
        frames.extend(or_damage(frame, &mut damage)?);
    }
    Ok(Described { records: placed(frames), damage })
}

/// Damage is noted; another error is one.
fn or_damage<T>(read: Result<T>, damage: &mut Vec<Error>) -> Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.kind() == Kind::Corrupt => {
            damage.push(error);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

pub(crate) fn recover_pack(flash: &Flash, segment: SegmentId, keep_bytes: u64) -> Result<Recovered> {
    let path = flash.path(segment, Part::Pack);
    let disk = match DiskFile::open(path.clone()) {
        Ok(disk) => disk,
        // Announced, but never made.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound && keep_bytes == 0 => return Ok(EMPTY),
        Err(cause) => return Err(missing_or_unreadable(segment, &path, cause)),
    };
    let on_disk = OnDisk { file: &disk.file, path: &path };
    let pack = Inspected { segment, from: &on_disk, bytes: disk.bytes()? };
    let header = match segment::decode_pack_header(segment, &pack.read(0, PACK_HEADER_BYTES)?) {
        // What a later release wrote is not ours to cut.
        Err(error) if error.kind() != Kind::Corrupt => return Err(error),
        header => header,
    };
    let closed = match pack.footer() {
        // A damaged footer is written anew: all it says is in the frames too.
        Err(error) if error.kind() == Kind::Corrupt => None,
        footer => footer?,
    };
    if let (Some(footer), Ok(_)) = (closed, &header) {
        let why = Error::corrupt(format!("segment {segment} was closed there"));
        check_kept(segment, footer.offset, keep_bytes, Some(&why))?;
        if footer.records > 0 {
            return Ok(Recovered { bytes: footer.offset, truncated_bytes: 0, records: footer.records });
        }
        flash.remove(segment, SegmentKind::Pack)?;
        return Ok(EMPTY);
    }

    let (frames, why) = pack.scan()?;
    let spans: Vec<FrameSpan> = frames.iter().map(|frame| frame.span).collect();
    let records = frames.iter().map(|frame| frame.records.len() as u64).sum();
    let end = spans.last().map_or(0, FrameSpan::end);
    check_kept(segment, end, keep_bytes, why.as_ref())?;
    if end == 0 {
        flash.remove(segment, SegmentKind::Pack)?;
        return Ok(Recovered { truncated_bytes: pack.bytes, ..EMPTY });
    }
    if header.is_err() {
        // A segment's id begins with its time, in milliseconds.
        let created = Timestamp(((segment.0 >> 80) as i64).saturating_mul(1_000_000));
        disk.write(&segment::encode_pack_header(&PackHeader { segment, created }), 0)?;
    }
    disk.truncate(end)?;
    pack::finish(&disk, segment, &spans, records, &mut Vec::new())?;
    Ok(Recovered { bytes: end, truncated_bytes: pack.bytes - end, records })
}

pub(crate) fn recover_file(flash: &Flash, segment: SegmentId, keep_bytes: u64) -> Result<Recovered> {
    let open = |part| {
        let path = flash.path(segment, part);
        DiskFile::open(path.clone()).map_err(|cause| missing_or_unreadable(segment, &path, cause))
    };
    let opened = open(Part::Data).and_then(|data| Ok((data, open(Part::Index)?)));
    let (data, index_file) = match opened {
        Ok(both) => both,
        // One of them may be there: the crash came between making the two, or between removing them.
        Err(error) if is_missing(&error) && keep_bytes == 0 => {
            let there = std::fs::metadata(flash.path(segment, Part::Data)).map_or(0, |file| file.len());
            flash.remove(segment, SegmentKind::File)?;
            return Ok(Recovered { truncated_bytes: there, ..EMPTY });
        }
        Err(error) => return Err(error),
    };
    let on_disk = OnDisk { file: &index_file.file, path: &index_file.path };
    let inspected = Inspected { segment, from: &on_disk, bytes: index_file.bytes()? };
    let raw = inspected.read(0, inspected.bytes)?;
    let index = match segment::decode_index_prefix(segment, &raw) {
        Ok(index) => Some(index),
        Err(error) if error.kind() == Kind::Corrupt => {
            check_kept(segment, 0, keep_bytes, Some(&error))?;
            None
        }
        // What a later release wrote is not ours to cut.
        Err(error) => return Err(error),
    };
    let on_disk = OnDisk { file: &data.file, path: &data.path };
    let inspected = Inspected { segment, from: &on_disk, bytes: data.bytes()? };
    let Some(index) = index.filter(|index| index.bytes > 0) else {
        check_kept(segment, 0, keep_bytes, None)?;
        flash.remove(segment, SegmentKind::File)?;
        return Ok(Recovered { truncated_bytes: inspected.bytes, ..EMPTY });
    };
    let untouched = index.closed && index.valid_bytes == raw.len() && inspected.bytes == index.bytes;
    if untouched {
        let why = Error::corrupt(format!("segment {segment} was closed there"));
        check_kept(segment, index.bytes, keep_bytes, Some(&why))?;
        return Ok(Recovered { bytes: index.bytes, truncated_bytes: 0, records: 1 });
    }
    close_file(flash, &inspected, &data, &index_file, index, keep_bytes)
}

/// Verifies the data against the index, cuts both to what is valid, and closes.
fn close_file(
    flash: &Flash,
    inspected: &Inspected<'_>,
    data: &DiskFile,
    index_file: &DiskFile,
    index: Index,
    keep_bytes: u64,
) -> Result<Recovered> {
    let segment = inspected.segment;
    let mismatch = inspected.first_mismatch(0, index.bytes, &index.crcs)?;
    let why = mismatch.map(|(at, found, expected)| {
        Error::corrupt(format!("the bytes at offset {at} have CRC32C {found:08x}, expected {expected:08x}"))
    });
    let bytes = mismatch.map_or(index.bytes, |(at, _, _)| at);
    check_kept(segment, bytes, keep_bytes, why.as_ref())?;
    if bytes == 0 {
        flash.remove(segment, SegmentKind::File)?;
        return Ok(Recovered { truncated_bytes: inspected.bytes, ..EMPTY });
    }
    // Only ever appended to, so that a crash here leaves the same valid entries as before.
    let entries_end = index.valid_bytes as u64 - if index.closed { INDEX_ENTRY_BYTES as u64 } else { 0 };
    data.truncate(bytes)?;
    data.sync()?;
    index_file.truncate(entries_end)?;
    let closing = segment::encode_index_entry(segment, &IndexEntry::Closing { bytes });
    index_file.write(&closing, entries_end)?;
    index_file.sync()?;
    let truncated_bytes = inspected.bytes.saturating_sub(bytes);
    Ok(Recovered { bytes, truncated_bytes, records: 1 })
}

fn check_kept(segment: SegmentId, valid: u64, keep_bytes: u64, why: Option<&Error>) -> Result<()> {
    if valid >= keep_bytes {
        return Ok(());
    }
    let why = why.map_or_else(|| "it ends there".to_owned(), Error::to_string);
    Err(Error::corrupt(format!(
        "segment {segment} is damaged: {valid} bytes are valid, files need {keep_bytes} ({why}): it is left as it \
         is; check the disk, and take it from a backup"
    )))
}
