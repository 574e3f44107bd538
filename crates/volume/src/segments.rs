//! Where flash and object tier meet for reading: bytes of segments, wherever they are.
//!
//! A volume without an object tier has all its segments on flash, and this adds nothing to a read. With one, what is
//! not on flash is fetched (`remote`), and a clean copy on flash that turns out to be damaged is replaced by the one
//! in the object tier.

use std::ops::Range;
use std::sync::Arc;

use headrace_base::{Error, Kind, Result, SegmentId};
use headrace_flash::{Flash, Placed};
use headrace_format::CHUNK;
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment::Origin;

use crate::remote::{From, Remote};

/// Whether a read may wait for the object tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    Wait,
    /// Says that the bytes are not here instead: for threads that others wait for.
    Refuse,
}

/// The answer of a read that would have had to wait.
#[derive(Debug)]
struct NotHere;

impl std::fmt::Display for NotHere {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("not on flash")
    }
}

impl std::error::Error for NotHere {}

pub(crate) fn not_here() -> Error {
    Error::new(Kind::Unavailable, "the bytes are in the object tier alone").with_cause(NotHere)
}

/// Whether a read was refused because it would have had to wait (`Fetch::Refuse`).
pub fn is_not_here(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|cause| cause.is::<NotHere>())
}

/// What is named and in no tier is damage, and no name that does not exist: whoever skips files that are gone must not
/// skip it.
pub(crate) fn lost(error: Error) -> Error {
    if error.kind() == Kind::NotFound { Error::corrupt(error.message()).with_cause(error) } else { error }
}

#[derive(Debug)]
pub struct Segments {
    pub flash: Arc<Flash>,
    pub remote: Option<Arc<Remote>>,
}

impl Segments {
    /// `Flash::read_pack` of a segment that may be in the object tier alone.
    pub fn read_pack(
        &self,
        segment: SegmentId,
        offset: u64,
        check: &Check,
        out: &mut [u8],
        fetch: Fetch,
    ) -> Result<()> {
        let flash = &self.flash;
        let Some(remote) = &self.remote else { return flash.read_pack(segment, offset, check, out) };
        if out.is_empty() {
            return Ok(());
        }
        let touched = touched(offset - check.start, out.len() as u64, check.covered);
        let touched = check.start + touched.start..check.start + touched.end;
        remote.read(segment, SegmentKind::Pack, touched, fetch, &mut |from| match from {
            From::Whole => flash.read_pack(segment, offset, check, out),
            From::Part(part) => flash.read_pack_part(part, offset, check, out),
            From::Memory(start, bytes) => flash.copy_pack(segment, (start, bytes), offset, check, out),
        })
    }

    /// `Flash::read_file` of a segment that may be in the object tier alone.
    pub fn read_file(&self, segment: SegmentId, offset: u64, out: &mut [u8], fetch: Fetch) -> Result<()> {
        let flash = &self.flash;
        let Some(remote) = &self.remote else { return flash.read_file(segment, offset, out) };
        if out.is_empty() {
            return Ok(());
        }
        let touched = touched(offset, out.len() as u64, u64::MAX);
        remote.read(segment, SegmentKind::File, touched, fetch, &mut |from| match from {
            From::Whole => flash.read_file(segment, offset, out),
            From::Part(part) => flash.read_file_part(part, offset, out),
            From::Memory(start, bytes) => flash.copy_file(segment, (start, bytes), offset, out),
        })
    }

    /// Starts fetching what of `length` bytes at `offset` is not on flash.
    pub fn prefetch(&self, segment: SegmentId, kind: SegmentKind, offset: u64, length: u64) {
        if let Some(remote) = &self.remote
            && length > 0
        {
            // A record of a pack begins wherever its payload does, a file segment's chunks at multiples of them.
            let range = match kind {
                SegmentKind::Pack => offset..offset + length,
                SegmentKind::File => touched(offset, length, u64::MAX),
            };
            remote.prefetch(segment, kind, range);
        }
    }

    /// What a segment says about itself. One that is not on flash is fetched for it. Corrupt if it says nothing: none is
    /// stored that is empty, so its records are lost, and whose bytes it holds is not known.
    pub fn records(&self, segment: SegmentId, kind: SegmentKind) -> Result<Vec<(Origin, Placed)>> {
        if let Some(remote) = &self.remote {
            remote.bring_description(segment, kind)?;
        }
        let records = self.flash.records(segment)?;
        if records.is_empty() && self.remote.is_some() {
            return Err(Error::corrupt(format!("segment {segment} is damaged: it holds no record")));
        }
        Ok(records)
    }

    /// Removes a segment from the object tier, then from flash.
    pub fn remove(&self, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        match &self.remote {
            Some(remote) => remote.remove(segment, kind),
            None => self.flash.remove(segment, kind),
        }
    }
}

/// The chunks that `length` bytes at `offset` touch, of `covered` bytes.
fn touched(offset: u64, length: u64, covered: u64) -> Range<u64> {
    let start = offset / CHUNK * CHUNK;
    let end = (offset + length).div_ceil(CHUNK).saturating_mul(CHUNK).min(covered);
    start..end
}
