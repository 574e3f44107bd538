//! A part of a segment whose whole is in the object tier: some of its bytes, each at its own offset.
//!
//! ```text
//! ULID.pack-part, ULID.file-part     sparse; what the file system holds as data is there, holes are not
//! ```
//! No list of what is there is kept on disk: the file system has one (SEEK_DATA). It is right after a clean stop. After
//! a crash of the machine it may name blocks whose bytes never came; they fail their checksums when they are read,
//! and are fetched again. So a part needs no sync and no order of writes.
//!
//! Once all bytes are there the file takes the segment's own name, and is a segment like any other.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use headrace_base::{Error, Result, SegmentId};
use headrace_format::BLOCK;
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment;
use rustix::fs::SeekFrom;

use crate::disk::{self, DiskFile};
use crate::flash::{Flash, Part};
use crate::ranges::Ranges;
use crate::read::{Source, Sums, read_verified, verified_copy};

/// Bytes are fetched in whole blocks: a block of the file system is data or a hole.
pub const PART_BLOCK_BYTES: u64 = BLOCK;

#[derive(Debug)]
pub struct SegmentPart {
    segment: SegmentId,
    kind: SegmentKind,
    file: Arc<File>,
    path: PathBuf,
}

fn part_of(kind: SegmentKind) -> (Part, Part) {
    match kind {
        SegmentKind::Pack => (Part::PartialPack, Part::Pack),
        SegmentKind::File => (Part::PartialData, Part::Data),
    }
}

impl Flash {
    /// The part of a segment that is here, or a new empty one, and which bytes it holds.
    pub fn open_part(&self, segment: SegmentId, kind: SegmentKind) -> Result<(SegmentPart, Ranges)> {
        let path = self.path(segment, part_of(kind).0);
        let open =
            || OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open().or_else(|error| match (error.kind(), path.parent()) {
            (io::ErrorKind::NotFound, Some(folder)) => {
                disk::make_folder(folder)?;
                open()
            }
            _ => Err(error),
        });
        let file = file.map_err(|cause| disk::io_error("open", &path, cause))?;
        let present = present(&file).map_err(|cause| disk::io_error("map the data of", &path, cause))?;
        Ok((SegmentPart { segment, kind, file: Arc::new(file), path }, present))
    }

    /// Keeps the index of a file segment that is in the object tier, as it was read there. Corrupt if it is none.
    pub fn put_index(&self, segment: SegmentId, bytes: &[u8]) -> Result<()> {
        let index = segment::decode_index(segment, bytes)?;
        if !index.closed {
            return Err(Error::corrupt(format!(
                "segment {segment}: its index in the object tier is not closed"
            )));
        }
        let path = self.path(segment, Part::Index);
        let temporary = path.with_extension("idx-new");
        let _ = std::fs::remove_file(&temporary);
        let file = DiskFile::create(temporary.clone())?;
        file.write(bytes, 0)?;
        std::fs::rename(&temporary, &path).map_err(|cause| disk::io_error("name", &path, cause))
    }

    /// How long a file segment is, by its index. Missing (see `is_missing`) if that is not here.
    pub fn file_segment_bytes(&self, segment: SegmentId) -> Result<u64> {
        self.sums_bytes(segment)
    }

    /// Whether the whole segment is here.
    pub fn has(&self, segment: SegmentId, kind: SegmentKind) -> bool {
        self.path(segment, part_of(kind).1).exists()
    }

    /// `read_pack` of bytes that the part holds.
    pub fn read_pack_part(
        &self,
        part: &SegmentPart,
        offset: u64,
        check: &Check,
        out: &mut [u8],
    ) -> Result<()> {
        let sums = Sums { start: check.start, covered: check.covered, crcs: &check.crcs };
        let path = || part.path.clone();
        read_verified(&Source { segment: part.segment, path: &path, file: &part.file }, &sums, offset, out)
    }

    /// `read_file` of bytes that the part holds. Its index must be here.
    pub fn read_file_part(&self, part: &SegmentPart, offset: u64, out: &mut [u8]) -> Result<()> {
        self.with_sums(part.segment, offset, out.len() as u64, |sums| {
            let path = || part.path.clone();
            read_verified(&Source { segment: part.segment, path: &path, file: &part.file }, sums, offset, out)
        })
    }

    /// Verifies bytes of a pack that are in memory (`bytes`, from `start` of the segment) and copies what was asked for.
    pub fn copy_pack(
        &self,
        segment: SegmentId,
        (start, bytes): (u64, &[u8]),
        offset: u64,
        check: &Check,
        out: &mut [u8],
    ) -> Result<()> {
        let sums = Sums { start: check.start, covered: check.covered, crcs: &check.crcs };
        verified_copy(segment, &sums, (start, bytes), offset, out)
    }

    /// The same of a file segment, whose index must be here.
    pub fn copy_file(
        &self,
        segment: SegmentId,
        (start, bytes): (u64, &[u8]),
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        self.with_sums(segment, offset, out.len() as u64, |sums| {
            verified_copy(segment, sums, (start, bytes), offset, out)
        })
    }
}

impl SegmentPart {
    pub fn kind(&self) -> SegmentKind {
        self.kind
    }

    /// Puts bytes in their place. Full when the disk is.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&self.file, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(disk::io_error("write", &self.path, io::ErrorKind::WriteZero.into())),
                Ok(written) => done += written,
                Err(rustix::io::Errno::INTR) => {}
                Err(cause) => return Err(disk::io_error("write", &self.path, cause.into())),
            }
        }
        Ok(())
    }

    /// All bytes are here: the part takes the segment's name.
    pub fn complete(&self, flash: &Flash) -> Result<()> {
        let whole = flash.path(self.segment, part_of(self.kind).1);
        std::fs::rename(&self.path, &whole).map_err(|cause| disk::io_error("name", &whole, cause))
    }

    /// Bytes that it takes on the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
    }
}

fn present(file: &File) -> io::Result<Ranges> {
    let mut ranges = Ranges::default();
    let mut at = 0;
    loop {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data behind this.
            Err(rustix::io::Errno::NXIO) => return Ok(ranges),
            Err(cause) => return Err(cause.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        ranges.insert(start..end);
        at = end;
    }
}
