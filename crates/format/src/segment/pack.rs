//! Pack segments: many small files' bytes, and beside them whose bytes they are.
//!
//! ```text
//! header    0    8  magic "HRPACK\0\x01"
//! (1 block) 8    4  u32 format
//!           12   4  zero
//!           16  16  segment id
//!           32   8  i64 created, ns
//!           4092 4  u32 crc of bytes 0..4092
//!
//! frame     0    8  magic "HRFRAME\x01"               one append; each begins where the one before ends
//!           8    4  u32 crc of bytes 12..header_bytes
//!           12   4  u32 header_bytes
//!           16   8  u64 frame_bytes: header, payloads and the zeros between and behind them
//!           24   8  u64 offset of the frame in the segment
//!           32  16  segment id
//!           48   4  u32 directories
//!           52   4  u32 records
//!           56      directories: n bytes, path up to and with its last slash
//!                   records: z ino - that of the record before (0 before the first)
//!                            | n row of the directory | n bytes, name | n mode | n uid | n gid
//!                            | z mtime - that of the record before (0 before the first)
//!                            | n file_offset | n length | z file_bytes - (file_offset + length)
//!                            | u32 offset of the payload in the frame / 64
//!                            | u32 crc of each 16 KiB of the payload
//!           ..      dense payloads, in the order of their records, each on a multiple of 64
//!           ..      aligned payloads likewise, each on a multiple of 4096 of the segment
//!
//! footer    0       for each frame: u64 offset | u64 frame_bytes
//!           -64 16  segment id
//!           -48  8  u64 frames
//!           -40  8  u64 records
//!           -32  8  u64 offset of the footer: where the last frame ends
//!           -24 12  zero
//!           -12  4  u32 crc of the footer up to here
//!           -8   8  magic "HRPKEND\x01", the last bytes of a closed pack
//! ```
//! A payload below 2 KiB is dense, a larger one aligned, its last block filled with zeros: one aligned read
//! fetches it, and its blocks can be mapped without showing a neighbour. Dense ones lie behind the frame's
//! header, where the aligned ones leave a gap anyhow. A frame begins on the next multiple of 64, which costs
//! least: its aligned payloads lie on block boundaries either way, and nothing before them grows.
//!
//! A frame names its segment and its own offset, so that bytes that were copied elsewhere (a pack that is
//! stored as a file, what a failed append left behind) are not taken for a frame of this segment.

use std::collections::HashMap;

use headrace_base::checksum::Crc32c;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, Result, SegmentId, crc32c};
use smallvec::SmallVec;

use super::{Fields, Origin, check_format, damaged, put_number, put_signed};
use crate::{BLOCK, CHUNK, FORMAT};

const PACK_MAGIC: [u8; 8] = *b"HRPACK\0\x01";
const FRAME_MAGIC: [u8; 8] = *b"HRFRAME\x01";
const FOOTER_MAGIC: [u8; 8] = *b"HRPKEND\x01";

pub const PACK_HEADER_BYTES: u64 = BLOCK;
/// What must be read of a frame to know how long its header is.
pub const FRAME_PREFIX_BYTES: usize = 56;
/// What must be read at the end of a pack to know whether and where it has a footer.
pub const FOOTER_END_BYTES: usize = 64;
/// A payload shorter than this is dense. Half a block: what is longer wastes less by alignment than a
/// second block would cost to read.
pub const DENSE_BYTES_MAX: u64 = 2048;
/// A cache line, so that a dense payload begins no read in the middle of one.
pub const DENSE_ALIGNMENT: u64 = 64;

/// The shortest descriptor: ten numbers of one byte and the offset.
const DESCRIPTOR_BYTES_MIN: usize = 14;
const FOOTER_FRAME_BYTES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackHeader {
    pub segment: SegmentId,
    pub created: Timestamp,
}

/// A record that is to be laid out: whose bytes, how many, and their checksums, one for each `CHUNK`.
#[derive(Clone, Copy, Debug)]
pub struct RecordPlan<'a> {
    pub origin: &'a Origin,
    pub length: u64,
    pub crcs: &'a [u32],
}

/// Where everything of a frame goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameLayout {
    /// Offsets of the payloads in the segment, in the order of the records. Written in order of offset
    /// they are: first those shorter than `DENSE_BYTES_MAX`, then the others.
    pub offsets: Vec<u64>,
    /// Where in the segment the frame ends and the next begins.
    pub end: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameRecord {
    pub origin: Origin,
    /// Where in the segment the payload lies.
    pub offset: u64,
    pub length: u64,
    pub crcs: SmallVec<[u32; 1]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePrefix {
    pub header_bytes: usize,
    pub span: FrameSpan,
}

/// Where in the segment a frame lies. `offset + bytes` does not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameSpan {
    pub offset: u64,
    pub bytes: u64,
}

impl FrameSpan {
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub span: FrameSpan,
    pub records: Vec<FrameRecord>,
}

/// The footer's fixed part: where its table begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FooterEnd {
    pub offset: u64,
    /// Of the whole footer, to the end of the file.
    pub bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    pub frames: Vec<FrameSpan>,
    pub records: u64,
    /// Where the last frame ends and the footer begins.
    pub offset: u64,
}

pub fn encode_pack_header(header: &PackHeader) -> Vec<u8> {
    let mut out = Vec::with_capacity(PACK_HEADER_BYTES as usize);
    out.extend_from_slice(&PACK_MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&header.segment.to_bytes());
    out.extend_from_slice(&header.created.0.to_le_bytes());
    out.resize(PACK_HEADER_BYTES as usize - 4, 0);
    out.extend_from_slice(&crc32c(&out).to_le_bytes());
    out
}

/// `bytes`: the first `PACK_HEADER_BYTES` of the file, or all of a shorter one. `Invalid` if a later release
/// wrote it, `Corrupt` if it is no header of this segment.
pub fn decode_pack_header(segment: SegmentId, bytes: &[u8]) -> Result<PackHeader> {
    let Some(block) = bytes.first_chunk::<{ PACK_HEADER_BYTES as usize }>() else {
        return Err(damaged(segment, 0, format_args!("the header is cut off after {} bytes", bytes.len())));
    };
    let (covered, stored) = block.split_at(block.len() - 4);
    let mut from = Fields::new(covered);
    if from.array() != Some(PACK_MAGIC) {
        return Err(damaged(segment, 0, "it does not begin as a pack does"));
    }
    check_crc(segment, 0, "header", stored, crc32c(covered))?;
    check_format(segment, from.u32().unwrap_or(0))?;
    let header = (|| {
        from.u32()?;
        Some(PackHeader { segment: from.segment()?, created: Timestamp(i64::from_le_bytes(from.array()?)) })
    })();
    match header {
        Some(header) if header.segment == segment => Ok(header),
        Some(header) => Err(damaged(segment, 16, format_args!("it says that it is {}", header.segment))),
        None => Err(damaged(segment, 0, "the header ends early")),
    }
}

/// Lays out a frame at `start`, a multiple of `DENSE_ALIGNMENT`, and writes its header to `header` (cleared
/// first). `Invalid` if it would be larger than its fields can say (4 GiB of header, 256 GiB of payloads).
pub fn lay_out_frame(
    segment: SegmentId,
    start: u64,
    records: &[RecordPlan<'_>],
    header: &mut Vec<u8>,
) -> Result<FrameLayout> {
    debug_assert!(start.is_multiple_of(DENSE_ALIGNMENT), "a frame cannot begin at {start}");
    header.clear();
    header.extend_from_slice(&FRAME_MAGIC);
    // Checksum, lengths: known last, see below.
    header.extend_from_slice(&[0; 16]);
    header.extend_from_slice(&start.to_le_bytes());
    header.extend_from_slice(&segment.to_bytes());

    let directories = put_directories(header, records);
    let mut offset_fields = Vec::with_capacity(records.len());
    let (mut ino, mut mtime) = (0, 0);
    for (record, directory) in records.iter().zip(directories) {
        let origin = record.origin;
        debug_assert_eq!(record.crcs.len() as u64, record.length.div_ceil(CHUNK), "one checksum a chunk");
        let (_, name) = split_path(&origin.path);
        put_signed(header, origin.ino.0.wrapping_sub(ino) as i64);
        put_number(header, u64::from(directory));
        put_number(header, name.len() as u64);
        header.extend_from_slice(name);
        for number in [u64::from(origin.mode), u64::from(origin.uid), u64::from(origin.gid)] {
            put_number(header, number);
        }
        put_signed(header, origin.mtime.0.wrapping_sub(mtime));
        put_number(header, origin.file_offset);
        put_number(header, record.length);
        let end = origin.file_offset.wrapping_add(record.length);
        put_signed(header, origin.file_bytes.wrapping_sub(end) as i64);
        // Of fixed width, so that where payloads begin does not depend on how long the header says it.
        offset_fields.push(header.len());
        header.extend_from_slice(&[0; 4]);
        for crc in record.crcs {
            header.extend_from_slice(&crc.to_le_bytes());
        }
        (ino, mtime) = (origin.ino.0, origin.mtime.0);
    }

    let layout = place(start, header.len() as u64, records)?;
    for (field, offset) in offset_fields.into_iter().zip(&layout.offsets) {
        let units = u32::try_from((offset - start) / DENSE_ALIGNMENT).map_err(|_| too_large(segment))?;
        header[field..field + 4].copy_from_slice(&units.to_le_bytes());
    }
    let header_bytes = u32::try_from(header.len()).map_err(|_| too_large(segment))?;
    header[12..16].copy_from_slice(&header_bytes.to_le_bytes());
    header[16..24].copy_from_slice(&(layout.end - start).to_le_bytes());
    let crc = crc32c(&header[12..]);
    header[8..12].copy_from_slice(&crc.to_le_bytes());
    Ok(layout)
}

/// Writes the counts and the table of directories; the rows come back in the order of the records.
fn put_directories(header: &mut Vec<u8>, records: &[RecordPlan<'_>]) -> Vec<u32> {
    let mut known = HashMap::new();
    let mut paths: Vec<&[u8]> = Vec::new();
    let mut rows = Vec::with_capacity(records.len());
    let mut last: Option<(&[u8], u32)> = None;
    for record in records {
        let (directory, _) = split_path(&record.origin.path);
        let row = match last {
            // Files come directory by directory: most need no look-up.
            Some((path, row)) if path == directory => row,
            _ => *known.entry(directory).or_insert_with(|| {
                paths.push(directory);
                paths.len() as u32 - 1
            }),
        };
        last = Some((directory, row));
        rows.push(row);
    }
    header.extend_from_slice(&(paths.len() as u32).to_le_bytes());
    header.extend_from_slice(&(records.len() as u32).to_le_bytes());
    for path in paths {
        put_number(header, path.len() as u64);
        header.extend_from_slice(path);
    }
    rows
}

/// The directory with its slash, and the name: put together they are the path, whatever bytes it holds.
fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    let name = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    path.split_at(name)
}

fn place(start: u64, header_bytes: u64, records: &[RecordPlan<'_>]) -> Result<FrameLayout> {
    let overflow = || Error::invalid("a frame beyond 2^64 bytes was asked for");
    let mut offsets = vec![0; records.len()];
    let mut end = start + header_bytes;
    for (dense, alignment) in [(true, DENSE_ALIGNMENT), (false, BLOCK)] {
        for (record, offset) in records.iter().zip(&mut offsets) {
            if (record.length < DENSE_BYTES_MAX) == dense {
                *offset = end.checked_next_multiple_of(alignment).ok_or_else(overflow)?;
                end = offset.checked_add(record.length).ok_or_else(overflow)?;
                if !dense {
                    end = end.checked_next_multiple_of(alignment).ok_or_else(overflow)?;
                }
            }
        }
    }
    end = end.checked_next_multiple_of(DENSE_ALIGNMENT).ok_or_else(overflow)?;
    Ok(FrameLayout { offsets, end })
}

fn too_large(segment: SegmentId) -> Error {
    Error::invalid(format!("a frame of segment {segment} is too large: append fewer records at once"))
}

/// `bytes`: the first `FRAME_PREFIX_BYTES` at `offset` of the segment. Its checksum is not looked at yet:
/// that takes the whole header.
pub fn decode_frame_prefix(segment: SegmentId, offset: u64, bytes: &[u8]) -> Result<FramePrefix> {
    let mut from = Fields::new(bytes);
    if from.array() != Some(FRAME_MAGIC) {
        return Err(damaged(segment, offset, "no frame begins here"));
    }
    let fields = (|| Some((from.u32()?, from.u32()?, from.u64()?, from.u64()?, from.segment()?)))();
    let Some((_, header_bytes, bytes, own_offset, own_segment)) = fields else {
        return Err(damaged(segment, offset, "the frame's header is cut off"));
    };
    if own_segment != segment || own_offset != offset {
        return Err(damaged(
            segment,
            offset,
            format_args!("the frame says that it lies at byte {own_offset} of segment {own_segment}"),
        ));
    }
    if (header_bytes as usize) < FRAME_PREFIX_BYTES
        || u64::from(header_bytes) > bytes
        || !bytes.is_multiple_of(DENSE_ALIGNMENT)
        || offset.checked_add(bytes).is_none()
    {
        return Err(damaged(
            segment,
            offset,
            format_args!("the frame says {header_bytes} bytes of header in {bytes} bytes of frame"),
        ));
    }
    Ok(FramePrefix { header_bytes: header_bytes as usize, span: FrameSpan { offset, bytes } })
}

/// `header`: the `header_bytes` at `offset` of the segment that the frame's prefix names.
pub fn decode_frame(segment: SegmentId, offset: u64, header: &[u8]) -> Result<Frame> {
    let prefix = decode_frame_prefix(segment, offset, header)?;
    let Some(header) = header.get(..prefix.header_bytes) else {
        return Err(damaged(segment, offset, "the frame's header is cut off"));
    };
    check_crc(segment, offset, "frame's header", &header[8..12], crc32c(&header[12..]))?;
    let mut from = Fields::new(header);
    let records = frame_records(&mut from, &prefix).filter(|_| from.left() == 0);
    // The checksum is right: only a fault of the writer leads here.
    let at = offset + from.at() as u64;
    let records =
        records.ok_or_else(|| damaged(segment, at, "the frame's header holds no valid field here"))?;
    Ok(Frame { span: prefix.span, records })
}

fn frame_records(from: &mut Fields<'_>, prefix: &FramePrefix) -> Option<Vec<FrameRecord>> {
    from.take(FRAME_PREFIX_BYTES - 8)?;
    let (directory_count, record_count) = (from.u32()? as usize, from.u32()? as usize);
    if directory_count > from.left() || record_count > from.left() / DESCRIPTOR_BYTES_MIN {
        return None;
    }
    let mut directories = Vec::with_capacity(directory_count);
    for _ in 0..directory_count {
        directories.push(from.counted()?);
    }
    let mut records = Vec::with_capacity(record_count);
    let (mut ino, mut mtime) = (0_u64, 0_i64);
    // Where the next dense and the next aligned payload may begin at the earliest, in the frame.
    let mut dense_from = prefix.header_bytes as u64;
    let mut aligned_from = dense_from;
    let mut aligned_first = prefix.span.bytes;
    for _ in 0..record_count {
        ino = ino.wrapping_add(from.signed()? as u64);
        let directory = directories.get(usize::try_from(from.number()?).ok()?)?;
        let path = [directory, from.counted()?].concat();
        let mode = u16::try_from(from.number()?).ok()?;
        let uid = u32::try_from(from.number()?).ok()?;
        let gid = u32::try_from(from.number()?).ok()?;
        mtime = mtime.wrapping_add(from.signed()?);
        let file_offset = from.number()?;
        let length = from.number()?;
        let file_bytes = file_offset.wrapping_add(length).wrapping_add(from.signed()? as u64);
        let offset = u64::from(from.u32()?) * DENSE_ALIGNMENT;
        let crcs = from.take(usize::try_from(length.div_ceil(CHUNK)).ok()?.checked_mul(4)?)?;
        let crcs = crcs.as_chunks::<4>().0.iter().map(|crc| u32::from_le_bytes(*crc)).collect();

        let end = offset.checked_add(length).filter(|end| *end <= prefix.span.bytes)?;
        if length < DENSE_BYTES_MAX {
            if offset < dense_from {
                return None;
            }
            dense_from = end;
        } else {
            if offset < aligned_from || !(prefix.span.offset + offset).is_multiple_of(BLOCK) {
                return None;
            }
            aligned_from = end;
            aligned_first = aligned_first.min(offset);
        }
        let mtime = Timestamp(mtime);
        let origin = Origin { ino: Ino(ino), path, mode, uid, gid, mtime, file_offset, file_bytes };
        records.push(FrameRecord { origin, offset: prefix.span.offset + offset, length, crcs });
    }
    (dense_from <= aligned_first).then_some(records)
}

/// Appends the footer to `out`. Frames follow each other without gaps from `PACK_HEADER_BYTES` on.
pub fn encode_footer(segment: SegmentId, frames: &[FrameSpan], records: u64, out: &mut Vec<u8>) {
    let begin = out.len();
    for frame in frames {
        out.extend_from_slice(&frame.offset.to_le_bytes());
        out.extend_from_slice(&frame.bytes.to_le_bytes());
    }
    out.extend_from_slice(&segment.to_bytes());
    let offset = frames.last().map_or(PACK_HEADER_BYTES, FrameSpan::end);
    for number in [frames.len() as u64, records, offset] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(&[0; 12]);
    let crc = crc32c(&out[begin..]);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(&FOOTER_MAGIC);
}

/// Finds the footer. `last`: the last `FOOTER_END_BYTES` of the file, `file_bytes` long. None: the pack does
/// not end as a closed one does.
pub fn decode_footer_end(segment: SegmentId, file_bytes: u64, last: &[u8]) -> Result<Option<FooterEnd>> {
    let Some(last) = last.last_chunk::<FOOTER_END_BYTES>() else { return Ok(None) };
    if last[FOOTER_END_BYTES - 8..] != FOOTER_MAGIC {
        return Ok(None);
    }
    let at = file_bytes.saturating_sub(FOOTER_END_BYTES as u64);
    let mut from = Fields::new(last);
    let fields = (|| Some((from.segment()?, from.u64()?, from.u64()?, from.u64()?)))();
    let found = fields.and_then(|(own, frames, _, offset)| {
        let bytes = frames.checked_mul(FOOTER_FRAME_BYTES as u64)?.checked_add(FOOTER_END_BYTES as u64)?;
        let whole = own == segment && offset >= PACK_HEADER_BYTES && offset.checked_add(bytes)? == file_bytes;
        whole.then_some(FooterEnd { offset, bytes: usize::try_from(bytes).ok()? })
    });
    match found {
        Some(end) => Ok(Some(end)),
        None => Err(damaged(segment, at, "the footer does not fit this segment and its length")),
    }
}

/// `bytes`: the whole footer, `FooterEnd::bytes` from `FooterEnd::offset` on.
pub fn decode_footer(segment: SegmentId, end: &FooterEnd, bytes: &[u8]) -> Result<Footer> {
    if bytes.len() != end.bytes || bytes.len() < FOOTER_END_BYTES {
        return Err(damaged(segment, end.offset, "the footer is cut off"));
    }
    let (covered, tail) = bytes.split_at(bytes.len() - 12);
    check_crc(segment, end.offset, "footer", &tail[..4], crc32c(covered))?;
    let mut from = Fields::new(bytes);
    let mut frames = Vec::with_capacity((bytes.len() - FOOTER_END_BYTES) / FOOTER_FRAME_BYTES);
    let mut next = PACK_HEADER_BYTES;
    while from.left() > FOOTER_END_BYTES {
        let span = from.u64().zip(from.u64()).map(|(offset, bytes)| FrameSpan { offset, bytes });
        let span = span.filter(|span| span.offset == next && span.offset.checked_add(span.bytes).is_some());
        let Some(span) = span else {
            let at = end.offset + from.at() as u64;
            return Err(damaged(segment, at, format_args!("the footer lists no frame at byte {next}")));
        };
        next = span.end();
        frames.push(span);
    }
    let records = from.take(24).and_then(|_| from.u64()).unwrap_or(0);
    if next != end.offset {
        return Err(damaged(
            segment,
            end.offset,
            format_args!("the footer's frames end at byte {next}, the footer begins at {}", end.offset),
        ));
    }
    Ok(Footer { frames, records, offset: end.offset })
}

fn check_crc(segment: SegmentId, offset: u64, what: &str, stored: &[u8], found: u32) -> Result<()> {
    let expected = Fields::new(stored).u32();
    if expected == Some(found) {
        return Ok(());
    }
    let expected = expected.unwrap_or(0);
    Err(damaged(segment, offset, format_args!("the {what} has CRC32C {found:08x}, expected {expected:08x}")))
}

/// The checksums of a payload in pieces: one for each `CHUNK` of it, wherever the pieces meet.
pub fn chunk_crcs(pieces: &[&[u8]]) -> SmallVec<[u32; 1]> {
    let mut crcs = SmallVec::new();
    if let [piece] = pieces {
        crcs.extend(piece.chunks(CHUNK as usize).map(crc32c));
        return crcs;
    }
    let mut sum = Crc32c::default();
    let mut room = CHUNK as usize;
    for piece in pieces {
        let mut rest = *piece;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(room));
            sum.update(now);
            room -= now.len();
            rest = later;
            if room == 0 {
                crcs.push(sum.value());
                sum = Crc32c::default();
                room = CHUNK as usize;
            }
        }
    }
    if room < CHUNK as usize {
        crcs.push(sum.value());
    }
    crcs
}
