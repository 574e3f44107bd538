//! The index beside a file segment. The data file holds nothing but the file's bytes (so that it can be
//! passed on, mapped and sent as it is); whose bytes they are and their checksums lie here.
//!
//! ```text
//! header   0    8  magic "HRINDEX\x01"
//!          8    4  u32 format
//!          12   4  u32 header_bytes, a multiple of 16
//!          16  16  segment id
//!          32   4  u32 bytes of the origin
//!          36      origin | zeros
//!          -4   4  u32 crc of the header up to here
//!
//! entry    0    4  u32 chunk: bytes chunk x 16 KiB .. of the data, the first `covered` of them
//! (16)     4    4  u32 covered, 1 to 16384
//!          8    4  u32 crc of these bytes
//!          12   4  u32 crc of the segment id and bytes 0..12
//!
//! closing  0    4  u32 0xFFFFFFFF
//! (16)     4    8  u64 bytes of the data: what the entries cover, or fewer whole chunks
//!          12   4  u32 crc of the segment id and bytes 0..12
//! ```
//! Entries are appended when the data they cover is durable. They come in order of chunks; a chunk that has
//! grown since is written again with more covered, and the last entry for it counts. So only the last chunk
//! may be covered in part. The closing entry is the last of the file. It names fewer bytes than the entries
//! do when recovery had to cut damaged chunks off: the index itself is never rewritten.

use headrace_base::checksum::Crc32c;
use headrace_base::{Result, SegmentId, crc32c};

use super::{Fields, Origin, check_format, damaged};
use crate::{CHUNK, FORMAT};

const INDEX_MAGIC: [u8; 8] = *b"HRINDEX\x01";
const CLOSING: u32 = u32::MAX;

pub const INDEX_ENTRY_BYTES: usize = 16;
const FIXED_BYTES: usize = 36;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexEntry {
    Chunk { chunk: u32, covered: u32, crc: u32 },
    Closing { bytes: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    pub origin: Origin,
    /// Of each chunk, in order.
    pub crcs: Vec<u32>,
    /// How many bytes of the data they cover.
    pub bytes: u64,
    pub closed: bool,
    /// How many bytes of the index are valid. New entries go there, or over the closing one.
    pub valid_bytes: usize,
}

pub fn encode_index_header(segment: SegmentId, origin: &Origin) -> Vec<u8> {
    let origin = origin.encode();
    let header_bytes = (FIXED_BYTES + origin.len() + 4).next_multiple_of(INDEX_ENTRY_BYTES);
    let mut out = Vec::with_capacity(header_bytes);
    out.extend_from_slice(&INDEX_MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&(header_bytes as u32).to_le_bytes());
    out.extend_from_slice(&segment.to_bytes());
    out.extend_from_slice(&(origin.len() as u32).to_le_bytes());
    out.extend_from_slice(&origin);
    out.resize(header_bytes - 4, 0);
    out.extend_from_slice(&crc32c(&out).to_le_bytes());
    out
}

pub fn encode_index_entry(segment: SegmentId, entry: &IndexEntry) -> [u8; INDEX_ENTRY_BYTES] {
    let mut out = [0; INDEX_ENTRY_BYTES];
    match entry {
        IndexEntry::Chunk { chunk, covered, crc } => {
            out[0..4].copy_from_slice(&chunk.to_le_bytes());
            out[4..8].copy_from_slice(&covered.to_le_bytes());
            out[8..12].copy_from_slice(&crc.to_le_bytes());
        }
        IndexEntry::Closing { bytes } => {
            out[0..4].copy_from_slice(&CLOSING.to_le_bytes());
            out[4..12].copy_from_slice(&bytes.to_le_bytes());
        }
    }
    let crc = entry_crc(segment, &out[..12]);
    out[12..].copy_from_slice(&crc.to_le_bytes());
    out
}

fn entry_crc(segment: SegmentId, fields: &[u8]) -> u32 {
    let mut crc = Crc32c::default();
    crc.update(&segment.to_bytes());
    crc.update(fields);
    crc.value()
}

fn decode_entry(segment: SegmentId, bytes: &[u8; INDEX_ENTRY_BYTES]) -> Option<IndexEntry> {
    let mut from = Fields::new(bytes);
    let (chunk, fields) = (from.u32()?, from.array::<8>()?);
    if from.u32()? != entry_crc(segment, &bytes[..12]) {
        return None;
    }
    if chunk == CLOSING {
        return Some(IndexEntry::Closing { bytes: u64::from_le_bytes(fields) });
    }
    let mut from = Fields::new(&fields);
    let (covered, crc) = (from.u32()?, from.u32()?);
    (covered >= 1 && u64::from(covered) <= CHUNK).then_some(IndexEntry::Chunk { chunk, covered, crc })
}

/// A whole index. Anything in it that is not valid is `Corrupt`; it may be still open (`closed` false).
pub fn decode_index(segment: SegmentId, bytes: &[u8]) -> Result<Index> {
    let (index, wrong) = walk(segment, bytes)?;
    match wrong {
        None => Ok(index),
        Some(why) => Err(damaged(segment, index.valid_bytes as u64, format_args!("in its index: {why}"))),
    }
}

/// The valid part of an index whose writer may have been cut off. `Corrupt` if not even its header is valid.
pub fn decode_index_prefix(segment: SegmentId, bytes: &[u8]) -> Result<Index> {
    walk(segment, bytes).map(|(index, _)| index)
}

/// Reads up to the first entry that is not valid, and says what is wrong with it.
fn walk(segment: SegmentId, bytes: &[u8]) -> Result<(Index, Option<&'static str>)> {
    let (origin, header_bytes) = decode_header(segment, bytes)?;
    let mut index = Index { origin, crcs: Vec::new(), bytes: 0, closed: false, valid_bytes: header_bytes };
    let (entries, torn) = bytes[header_bytes..].as_chunks::<INDEX_ENTRY_BYTES>();
    for entry in entries {
        if index.closed {
            return Ok((index, Some("entries behind the closing one")));
        }
        match decode_entry(segment, entry) {
            None => return Ok((index, Some("an entry's checksum is wrong"))),
            Some(IndexEntry::Closing { bytes })
                if bytes == index.bytes || (bytes < index.bytes && bytes.is_multiple_of(CHUNK)) =>
            {
                index.closed = true;
                index.bytes = bytes;
                index.crcs.truncate(bytes.div_ceil(CHUNK) as usize);
            }
            Some(IndexEntry::Closing { .. }) => {
                return Ok((index, Some("the closing entry names other bytes than the entries cover")));
            }
            Some(IndexEntry::Chunk { chunk, covered, crc }) => {
                let begin = u64::from(chunk) * CHUNK;
                let end = begin + u64::from(covered);
                if chunk as usize == index.crcs.len() && index.bytes == begin {
                    index.crcs.push(crc);
                } else if chunk as usize + 1 == index.crcs.len() && end > index.bytes {
                    index.crcs[chunk as usize] = crc;
                } else {
                    return Ok((index, Some("an entry follows on no other")));
                }
                index.bytes = end;
            }
        }
        index.valid_bytes += INDEX_ENTRY_BYTES;
    }
    let wrong = if torn.is_empty() { None } else { Some("an entry is cut off") };
    Ok((index, wrong))
}

fn decode_header(segment: SegmentId, bytes: &[u8]) -> Result<(Origin, usize)> {
    let mut from = Fields::new(bytes);
    if from.array() != Some(INDEX_MAGIC) {
        return Err(damaged(segment, 0, "its index does not begin as one does"));
    }
    let fields = (|| Some((from.u32()?, from.u32()? as usize, from.segment()?, from.u32()? as usize)))();
    let header = fields.and_then(|(format, header_bytes, own, origin_bytes)| {
        let fits = header_bytes.is_multiple_of(INDEX_ENTRY_BYTES) && header_bytes >= FIXED_BYTES + 4;
        let (covered, stored) = bytes.get(..header_bytes).filter(|_| fits)?.split_last_chunk::<4>()?;
        let origin = covered.get(FIXED_BYTES..)?.get(..origin_bytes)?;
        (u32::from_le_bytes(*stored) == crc32c(covered)).then_some((format, header_bytes, own, origin))
    });
    let Some((format, header_bytes, own, origin)) = header else {
        return Err(damaged(segment, 0, "the header of its index is cut off or its checksum is wrong"));
    };
    check_format(segment, format)?;
    if own != segment {
        return Err(damaged(segment, 16, format_args!("its index says that it is of segment {own}")));
    }
    let origin = Origin::decode(origin).map_err(|cause| cause.context(format_args!("index of {segment}")))?;
    Ok((origin, header_bytes))
}
