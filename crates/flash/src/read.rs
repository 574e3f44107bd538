//! Bytes into a buffer, and not one of them unverified.
//!
//! Whatever range is asked for, the chunks it touches are read whole: the range straight into `out`, what
//! lies before it in its first chunk and behind it in its last one into scratch, all by one system call.
//! The checksum runs over the pieces where they lie, so nothing is copied. Where the range covers its
//! chunks exactly (a small file read whole, long aligned reads) there is no scratch and a plain read.
//!
//! Invariant: on an error `out` holds zeros, nothing of the disk.

use std::cell::RefCell;
use std::fs::File;
use std::io::IoSliceMut;
use std::path::PathBuf;

use headrace_base::checksum::Crc32c;
use headrace_base::{Error, Result, SegmentId, crc32c};
use headrace_format::CHUNK;

use crate::disk;

thread_local! {
    /// Holds less than two chunks.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file that is read, and what to call it in an error.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) segment: SegmentId,
    pub(crate) path: &'a dyn Fn() -> PathBuf,
    pub(crate) file: &'a File,
}

/// Checksums of the chunks from `start` on, `covered` bytes together.
#[derive(Clone, Copy)]
pub(crate) struct Sums<'a> {
    pub(crate) start: u64,
    pub(crate) covered: u64,
    pub(crate) crcs: &'a [u32],
}

/// Fills `out` from `offset`, which must lie within `sums`.
pub(crate) fn read_verified(source: &Source<'_>, sums: &Sums<'_>, offset: u64, out: &mut [u8]) -> Result<()> {
    let read = read_range(source, sums, offset, out);
    if read.is_err() {
        out.fill(0);
    }
    read
}

fn read_range(source: &Source<'_>, sums: &Sums<'_>, offset: u64, out: &mut [u8]) -> Result<()> {
    let length = out.len() as u64;
    let range = offset.checked_sub(sums.start).and_then(|from| Some((from, from.checked_add(length)?)));
    let Some((from, to)) = range.filter(|(_, to)| *to <= sums.covered) else {
        return Err(Error::internal(format!(
            "segment {}: {length} bytes at {offset} were asked for, the checksums cover {} bytes at {}",
            source.segment, sums.covered, sums.start
        )));
    };
    if sums.crcs.len() as u64 != sums.covered.div_ceil(CHUNK)
        || sums.start.checked_add(sums.covered).is_none()
    {
        return Err(Error::internal(format!(
            "segment {}: {} checksums for {} bytes at {}",
            source.segment,
            sums.crcs.len(),
            sums.covered,
            sums.start
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let first = from / CHUNK;
    let last = (to - 1) / CHUNK;
    let before = (from - first * CHUNK) as usize;
    let behind = (((last + 1) * CHUNK).min(sums.covered) - to) as usize;
    if before == 0 && behind == 0 {
        return fill(source, &mut [], out, &mut [], offset)
            .and_then(|()| verify(source, sums, first, [&[], out, &[]]));
    }
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < before + behind {
            scratch.resize(before + behind, 0);
        }
        let (head, tail) = scratch[..before + behind].split_at_mut(before);
        fill(source, head, out, tail, offset - before as u64)?;
        verify(source, sums, first, [head, out, tail])
    })
}

fn fill(source: &Source<'_>, head: &mut [u8], out: &mut [u8], tail: &mut [u8], offset: u64) -> Result<()> {
    let wanted = head.len() + out.len() + tail.len();
    let mut slices = [IoSliceMut::new(head), IoSliceMut::new(out), IoSliceMut::new(tail)];
    let done = disk::read_vectored(source.file, &mut slices, offset)
        .map_err(|cause| disk::io_error("read", &(source.path)(), cause).context(source.segment))?;
    if done < wanted {
        let end = offset + done as u64;
        return Err(too_short(source, end, offset + wanted as u64));
    }
    Ok(())
}

/// Copies `out.len()` bytes at `offset` from bytes in memory (which begin at `start` of the segment and hold every
/// chunk that the range touches), verified like those of a file.
pub(crate) fn verified_copy(
    segment: SegmentId,
    sums: &Sums<'_>,
    (start, bytes): (u64, &[u8]),
    offset: u64,
    out: &mut [u8],
) -> Result<()> {
    let from = offset.saturating_sub(sums.start);
    let to = from + out.len() as u64;
    let first = from / CHUNK;
    let end = (to.div_ceil(CHUNK) * CHUNK).min(sums.covered);
    let slice = |from: u64, to: u64| {
        let begin = (sums.start + from).checked_sub(start)?;
        bytes.get(begin as usize..(begin + (to - from)) as usize)
    };
    let (Some(chunks), Some(wanted)) = (slice(first * CHUNK, end), slice(from, to)) else {
        return Err(Error::corrupt(format!(
            "segment {segment} is too short in the object tier: {} bytes came from byte {start} on, those at {offset} \
             were asked for",
            bytes.len()
        )));
    };
    let path = || PathBuf::from("the object tier");
    for (chunk, part) in (first..).zip(chunks.chunks(CHUNK as usize)) {
        let found = crc32c(part);
        let expected = sums.crcs.get(chunk as usize).copied().unwrap_or(!found);
        if found != expected {
            let at = sums.start + chunk * CHUNK;
            return Err(damaged_bytes(segment, &path, at, part.len(), expected, found));
        }
    }
    out.copy_from_slice(wanted);
    Ok(())
}

/// Checks all chunks from `first` on that `pieces`, put together, hold.
fn verify(source: &Source<'_>, sums: &Sums<'_>, first: u64, pieces: [&[u8]; 3]) -> Result<()> {
    let mut pieces = pieces;
    let mut chunk = first;
    loop {
        let begin = chunk * CHUNK;
        let left: usize = pieces.iter().map(|piece| piece.len()).sum();
        if left == 0 {
            return Ok(());
        }
        let bytes = left.min(CHUNK as usize);
        let found = crc_of_front(&mut pieces, bytes);
        let expected = sums.crcs[chunk as usize];
        if found != expected {
            return Err(mismatch(source, sums.start + begin, bytes, expected, found));
        }
        chunk += 1;
    }
}

/// Takes `bytes` off the front of `pieces` and gives their checksum.
fn crc_of_front(pieces: &mut [&[u8]; 3], bytes: usize) -> u32 {
    if let Some(whole) =
        pieces.iter_mut().find(|piece| !piece.is_empty()).filter(|piece| piece.len() >= bytes)
    {
        let (now, later) = whole.split_at(bytes);
        *whole = later;
        return crc32c(now);
    }
    let mut sum = Crc32c::default();
    let mut left = bytes;
    for piece in pieces {
        let (now, later) = piece.split_at(piece.len().min(left));
        sum.update(now);
        left -= now.len();
        *piece = later;
    }
    sum.value()
}

fn mismatch(source: &Source<'_>, offset: u64, bytes: usize, expected: u32, found: u32) -> Error {
    damaged_bytes(source.segment, source.path, offset, bytes, expected, found)
}

fn damaged_bytes(
    segment: SegmentId,
    path: &dyn Fn() -> PathBuf,
    offset: u64,
    bytes: usize,
    expected: u32,
    found: u32,
) -> Error {
    Error::corrupt(format!(
        "segment {segment} is damaged: the {bytes} bytes at offset {offset} have CRC32C {found:08x}, expected \
         {expected:08x} ({}): check the disk, and write the file again or take the segment from a backup",
        path().display()
    ))
}

pub(crate) fn too_short(source: &Source<'_>, end: u64, wanted: u64) -> Error {
    Error::corrupt(format!(
        "segment {} is too short: it ends at byte {end}, bytes up to {wanted} were written ({}): check the \
         disk, and write the file again or take the segment from a backup",
        source.segment,
        (source.path)().display()
    ))
}
