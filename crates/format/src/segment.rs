//! Segments: what lies in a `ULID.pack`, and in the `ULID.idx` beside a `ULID.file`. Pure codecs; the files
//! themselves are the business of `headrace-flash`.
//!
//! ```text
//! ULID.pack    header, one block | frame | frame | .. | footer, once it is closed             `pack`
//! ULID.file    the bytes of one file from offset 0, nothing else
//! ULID.idx     header | entry | entry | .. | closing entry, once the segment is closed        `index`
//! ```
//! In all of them `n` is a varint (LEB128: 7 bits a byte, low first, at most 10 bytes), `z` a zigzag varint
//! (0, -1, 1, -2, ..), wrapping; fixed widths are little-endian, segment ids 16 bytes, big-endian. Checksums
//! are CRC32C. A payload has one for each `CHUNK` of it, so a small file has one of the whole.
//!
//! Invariant: no bytes make a decoder panic or allocate more than a small multiple of their length, and what
//! a decoder returns needs no further check of bounds: every payload lies within its frame, every frame
//! within its segment, no sum overflows.

mod index;
mod pack;

use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, Result, SegmentId};

pub use index::{
    INDEX_ENTRY_BYTES, Index, IndexEntry, decode_index, decode_index_prefix, encode_index_entry,
    encode_index_header,
};
pub use pack::{
    DENSE_ALIGNMENT, DENSE_BYTES_MAX, FOOTER_END_BYTES, FRAME_PREFIX_BYTES, Footer, FooterEnd, Frame,
    FrameLayout, FramePrefix, FrameRecord, FrameSpan, PACK_HEADER_BYTES, PackHeader, RecordPlan, chunk_crcs,
    decode_footer, decode_footer_end, decode_frame, decode_frame_prefix, decode_pack_header, encode_footer,
    encode_pack_header, lay_out_frame,
};

use crate::FORMAT;

/// Whose bytes a record holds: enough to rebuild a tree from segments alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub ino: Ino,
    /// Path from the volume's root, as it was when the bytes were written; empty if unknown.
    pub path: Vec<u8>,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    /// Where in the file the record's bytes begin.
    pub file_offset: u64,
    /// The file's size when they were written.
    pub file_bytes: u64,
}

impl Origin {
    /// `n ino | n bytes, path | n mode | n uid | n gid | i64 mtime | n file_offset | n file_bytes`
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32 + self.path.len());
        put_number(&mut out, self.ino.0);
        put_number(&mut out, self.path.len() as u64);
        out.extend_from_slice(&self.path);
        for number in [u64::from(self.mode), u64::from(self.uid), u64::from(self.gid)] {
            put_number(&mut out, number);
        }
        out.extend_from_slice(&self.mtime.0.to_le_bytes());
        put_number(&mut out, self.file_offset);
        put_number(&mut out, self.file_bytes);
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Origin> {
        let mut from = Fields::new(bytes);
        let origin = Origin::of(&mut from).filter(|_| from.left() == 0);
        origin.ok_or_else(|| {
            Error::corrupt(format!("origin of {} bytes: no valid field at byte {}", bytes.len(), from.at()))
        })
    }

    fn of(from: &mut Fields<'_>) -> Option<Origin> {
        Some(Origin {
            ino: Ino(from.number()?),
            path: from.counted()?.to_vec(),
            mode: u16::try_from(from.number()?).ok()?,
            uid: u32::try_from(from.number()?).ok()?,
            gid: u32::try_from(from.number()?).ok()?,
            mtime: Timestamp(i64::from_le_bytes(from.array()?)),
            file_offset: from.number()?,
            file_bytes: from.number()?,
        })
    }
}

/// What is wrong with a segment, from byte `offset` on.
fn damaged(segment: SegmentId, offset: u64, what: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("segment {segment} is damaged at byte {offset}: {what}"))
}

/// Refuses what a later release wrote. Its own kind, since nothing is damaged: the way out is an upgrade.
fn check_format(segment: SegmentId, format: u32) -> Result<()> {
    match format {
        0 => Err(damaged(segment, 8, "it says format 0")),
        1..=FORMAT => Ok(()),
        _ => Err(Error::invalid(format!(
            "segment {segment} holds format {format}; this engine reads 1-{FORMAT}: upgrade headrace"
        ))),
    }
}

fn put_number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_signed(out: &mut Vec<u8>, value: i64) {
    put_number(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// Reads fields in the order of a layout. None: what is left does not hold such a field; the caller says of
/// which segment.
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { bytes, at: 0 }
    }

    fn at(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes[self.at..].get(..count)?;
        self.at += count;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let taken = self.bytes[self.at..].first_chunk::<N>()?;
        self.at += N;
        Some(*taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn segment(&mut self) -> Option<SegmentId> {
        self.array().map(SegmentId::from_bytes)
    }

    fn number(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            // The tenth byte holds bit 63 alone; a zero last byte would be a second encoding of a value.
            if (shift == 63 && byte > 1) || (shift > 0 && byte == 0) {
                return None;
            }
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let value = self.number()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn counted(&mut self) -> Option<&'a [u8]> {
        let count = self.number()?;
        self.take(usize::try_from(count).ok()?)
    }
}

#[cfg(test)]
mod tests;
