//! Writes a manifest, row by row, in memory that does not grow with the rows.
//!
//! Each column collects `BLOCK_BYTES`, then appends them to a scratch file that all columns share and keeps
//! only the number of the block. `finish` knows all lengths and checksums: it writes the header, then copies
//! column after column. A crash leaves an unnamed scratch file and an unfinished target; the caller names the
//! target only after `finish` and an fsync.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom, Write};

use headrace_base::checksum::Crc32c;
use headrace_base::ids::SealId;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, Result, SegmentId, Version, crc32c};

use super::*;
use crate::record::{self, SegmentKind};

/// 28 columns of these are 1.75 MiB.
const BLOCK_BYTES: usize = 64 * 1024;

/// A regular file of the sealed tree.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// As `ManifestWriter::directory` answered.
    pub directory: u32,
    /// Relative to the sealed root, without a leading slash.
    pub path: &'a [u8],
    pub size: u64,
    pub mtime: Timestamp,
    /// Permission bits.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub ino: Ino,
    /// In order of file offset, within `size`.
    pub extents: &'a [record::Extent],
    /// The bytes of the inline extents among them, one slice each, in their order.
    pub inline: &'a [&'a [u8]],
}

/// What a manifest belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Seal {
    pub seal: SealId,
    pub version: Version,
    pub created: Timestamp,
}

/// What `finish` wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    pub samples: u64,
    /// The sum of the samples' sizes.
    pub bytes: u64,
    pub manifest_bytes: u64,
}

/// `S` is scratch space, empty and used by nobody else: an unnamed file, or a `Cursor` for few samples.
#[derive(Debug)]
pub struct ManifestWriter<S> {
    scratch: Scratch<S>,
    columns: Vec<ColumnWriter>,
    segments: HashMap<SegmentId, (u32, SegmentKind)>,
    samples: u64,
    bytes: u64,
    extents: u64,
    directories: u32,
    last_path: Vec<u8>,
}

impl<S: Read + Write + Seek> ManifestWriter<S> {
    /// `root_path`: the sealed root's, from the volume's root.
    pub fn new(root_path: &[u8], scratch: S) -> Result<Self> {
        let mut writer = ManifestWriter {
            scratch: Scratch { file: scratch, blocks: 0 },
            columns: COLUMNS.iter().map(|_| ColumnWriter::default()).collect(),
            segments: HashMap::new(),
            samples: 0,
            bytes: 0,
            extents: 0,
            directories: 0,
            last_path: Vec::new(),
        };
        writer.put(ROOT_PATH, root_path)?;
        for starts in [PATH_START, EXTENT_START, X_CRC_START, DIR_PATH_START] {
            writer.u64(starts, 0)?;
        }
        Ok(writer)
    }

    /// Adds a directory, and gives its row. The first is the sealed root: path "", parent 0.
    pub fn directory(&mut self, path: &[u8], parent: u32, mode: u16, uid: u32, gid: u32) -> Result<u32> {
        let row = self.directories;
        if row == 0 && (parent != 0 || !path.is_empty()) {
            return Err(Error::internal(format!(
                "manifest: the first directory is {}; it must be the sealed root",
                path.escape_ascii()
            )));
        }
        if row > 0 && (parent >= row || path.is_empty()) {
            return Err(Error::internal(format!(
                "manifest: directory {row} {} has parent {parent}, which does not come before it",
                path.escape_ascii()
            )));
        }
        self.directories = row.checked_add(1).filter(|&rows| rows < u32::MAX).ok_or_else(|| {
            Error::invalid("a sealed view holds at most 2^32 - 2 directories: seal smaller subtrees")
        })?;
        self.put(DIR_PATH_BYTES, path)?;
        self.u64(DIR_PATH_START, self.columns[DIR_PATH_BYTES].bytes)?;
        self.u32(DIR_PARENT, parent)?;
        self.u32(DIR_MODE, u32::from(mode & 0o7777))?;
        self.u32(DIR_UID, uid)?;
        self.u32(DIR_GID, gid)?;
        Ok(row)
    }

    /// Adds a sample. Samples come in the order of the tree; each one's directory has been added before.
    pub fn sample(&mut self, sample: Sample<'_>) -> Result<()> {
        self.check(&sample).map_err(|error| error.context(sample.path.escape_ascii()).context("manifest"))?;
        self.put(PATH_BYTES, sample.path)?;
        self.u64(PATH_START, self.columns[PATH_BYTES].bytes)?;
        self.u32(DIRECTORY, sample.directory)?;
        self.u64(SIZE, sample.size)?;
        self.put(MTIME, &sample.mtime.0.to_le_bytes())?;
        self.u32(MODE, u32::from(sample.mode & 0o7777))?;
        self.u32(UID, sample.uid)?;
        self.u32(GID, sample.gid)?;
        self.u64(INO, sample.ino.0)?;
        let mut inline = sample.inline.iter();
        for extent in sample.extents {
            self.extent(extent, &mut inline)?;
        }
        self.extents += sample.extents.len() as u64;
        self.u64(EXTENT_START, self.extents)?;
        self.samples += 1;
        self.bytes += sample.size;
        self.last_path.clear();
        self.last_path.extend_from_slice(sample.path);
        Ok(())
    }

    /// What a reader refuses at `open` is refused here, before anything of the sample is written.
    fn check(&self, sample: &Sample<'_>) -> Result<()> {
        let fault = |why: String| Err(Error::internal(why));
        if sample.directory >= self.directories {
            return fault(format!("its directory {} has not been added", sample.directory));
        }
        if self.samples > 0 && in_tree(&self.last_path, sample.path) != Ordering::Less {
            return fault(format!("comes after {} in the tree's order", self.last_path.escape_ascii()));
        }
        if self.bytes.checked_add(sample.size).is_none() {
            return fault("the samples have more than 2^64 bytes".to_owned());
        }
        let mut inline = sample.inline.iter();
        let mut end = 0;
        for extent in sample.extents {
            let next = extent.file_offset.checked_add(extent.length);
            match next.filter(|&next| extent.file_offset >= end && next <= sample.size) {
                Some(next) => end = next,
                None => return fault(format!("extent beyond its place or the file's end: {extent:?}")),
            }
            match &extent.place {
                record::Place::Pack { offset, check, .. } => {
                    let covered_end = check.start.checked_add(check.covered);
                    let within = check.start <= *offset
                        && covered_end.is_some_and(|end| {
                            offset.checked_add(extent.length).is_some_and(|last| last <= end)
                        });
                    if !within || check.crcs.len() as u64 != check.covered.div_ceil(crate::CHUNK) {
                        return fault(format!("checksums do not cover the extent: {extent:?}"));
                    }
                }
                record::Place::File { offset, .. } => {
                    if offset.checked_add(extent.length).is_none() {
                        return fault(format!("extent ends beyond 64 bits: {extent:?}"));
                    }
                }
                record::Place::Inline { .. } => match inline.next() {
                    Some(bytes) if bytes.len() as u64 == extent.length => {}
                    given => {
                        let given = given.map(|bytes| bytes.len());
                        return fault(format!("inline bytes given: {given:?}, for {extent:?}"));
                    }
                },
            }
        }
        if inline.next().is_some() {
            return fault("more inline bytes than inline extents".to_owned());
        }
        Ok(())
    }

    fn extent<'i>(
        &mut self,
        extent: &record::Extent,
        inline: &mut impl Iterator<Item = &'i &'i [u8]>,
    ) -> Result<()> {
        let (segment, offset, check_start, covered) = match &extent.place {
            record::Place::Pack { segment, offset, check } => {
                for crc in &check.crcs {
                    self.u32(CRCS, *crc)?;
                }
                (self.segment(*segment, SegmentKind::Pack)?, *offset, check.start, check.covered)
            }
            record::Place::File { segment, offset } => {
                (self.segment(*segment, SegmentKind::File)?, *offset, 0, 0)
            }
            record::Place::Inline { .. } => {
                // `check` counted them.
                let bytes = inline.next().copied().unwrap_or_default();
                let offset = self.columns[INLINE_BYTES].bytes;
                self.put(INLINE_BYTES, bytes)?;
                self.u32(CRCS, crc32c(bytes))?;
                (INLINE, offset, offset, extent.length)
            }
        };
        self.u64(X_FILE_OFFSET, extent.file_offset)?;
        self.u64(X_LENGTH, extent.length)?;
        self.u32(X_SEGMENT, segment)?;
        self.u64(X_OFFSET, offset)?;
        self.u64(X_CHECK_START, check_start)?;
        self.u64(X_COVERED, covered)?;
        self.u64(X_CRC_START, self.columns[CRCS].bytes / 4)
    }

    fn segment(&mut self, segment: SegmentId, kind: SegmentKind) -> Result<u32> {
        if let Some(&(row, known)) = self.segments.get(&segment) {
            if known != kind {
                return Err(Error::corrupt(format!(
                    "manifest: segment {segment} is named as {known:?} and as {kind:?}"
                )));
            }
            return Ok(row);
        }
        let row = u32::try_from(self.segments.len()).ok().filter(|&row| row != INLINE).ok_or_else(|| {
            Error::invalid("a sealed view holds at most 2^32 - 1 segments: seal smaller subtrees")
        })?;
        self.put(SEG_ID, &segment.to_bytes())?;
        self.put(SEG_KIND, &[kind.number()])?;
        self.segments.insert(segment, (row, kind));
        Ok(row)
    }

    #[inline]
    fn put(&mut self, column: usize, bytes: &[u8]) -> Result<()> {
        self.columns[column].put(bytes, &mut self.scratch)
    }

    #[inline]
    fn u32(&mut self, column: usize, value: u32) -> Result<()> {
        self.put(column, &value.to_le_bytes())
    }

    #[inline]
    fn u64(&mut self, column: usize, value: u64) -> Result<()> {
        self.put(column, &value.to_le_bytes())
    }

    /// Writes the manifest to `out`, from its start to its end. What makes it durable is the caller's.
    pub fn finish(mut self, of: Seal, out: &mut impl Write) -> Result<Written> {
        if self.directories == 0 {
            return Err(Error::internal("manifest: the sealed root was not added"));
        }
        let root_path_bytes = u32::try_from(self.columns[ROOT_PATH].bytes)
            .map_err(|_| Error::invalid("manifest: the sealed root's path is longer than 4 GiB"))?;
        let mut header = [0_u8; HEADER];
        let mut set = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        let mut end = HEADER as u64;
        for (number, (column, (name, kind))) in self.columns.iter_mut().zip(COLUMNS).enumerate() {
            let at = TABLE + number * COLUMN;
            let offset = end.next_multiple_of(ALIGNMENT);
            set(at, name.as_bytes());
            set(at + NAME, &(*kind as u32).to_le_bytes());
            set(at + NAME + 4, &column.checksum().to_le_bytes());
            set(at + NAME + 8, &offset.to_le_bytes());
            set(at + NAME + 16, &(column.bytes / kind.bytes()).to_le_bytes());
            end = offset + column.bytes;
        }
        let manifest_bytes = end.next_multiple_of(ALIGNMENT);
        set(0, &MAGIC);
        set(8, &FORMAT.to_le_bytes());
        set(12, &(COLUMNS.len() as u32).to_le_bytes());
        set(16, &self.samples.to_le_bytes());
        set(24, &self.bytes.to_le_bytes());
        set(32, &of.version.0.to_le_bytes());
        set(40, &of.seal.to_bytes());
        set(56, &of.created.0.to_le_bytes());
        set(64, &manifest_bytes.to_le_bytes());
        set(72, &root_path_bytes.to_le_bytes());
        let crc = crc32c(&header[..HEADER_CRC]);
        header[HEADER_CRC..].copy_from_slice(&crc.to_le_bytes());

        let mut write =
            |bytes: &[u8]| out.write_all(bytes).map_err(|error| Error::io("write a manifest", error));
        write(&header)?;
        let mut block = vec![0; BLOCK_BYTES];
        for column in std::mem::take(&mut self.columns) {
            for number in column.spilled {
                self.scratch.read(number, &mut block)?;
                write(&block)?;
            }
            write(&column.filling)?;
            let padding = column.bytes.next_multiple_of(ALIGNMENT) - column.bytes;
            write(&[0; ALIGNMENT as usize][..padding as usize])?;
        }
        Ok(Written { samples: self.samples, bytes: self.bytes, manifest_bytes })
    }
}

#[derive(Debug)]
struct Scratch<S> {
    file: S,
    blocks: u64,
}

impl<S: Read + Write + Seek> Scratch<S> {
    fn append(&mut self, block: &[u8]) -> Result<u64> {
        let number = self.blocks;
        self.seek(number)?;
        self.file.write_all(block).map_err(|error| Error::io("write a manifest's scratch file", error))?;
        self.blocks += 1;
        Ok(number)
    }

    fn read(&mut self, number: u64, block: &mut [u8]) -> Result<()> {
        self.seek(number)?;
        self.file.read_exact(block).map_err(|error| Error::io("read a manifest's scratch file", error))
    }

    fn seek(&mut self, number: u64) -> Result<()> {
        self.file
            .seek(SeekFrom::Start(number * BLOCK_BYTES as u64))
            .map(drop)
            .map_err(|error| Error::io("seek in a manifest's scratch file", error))
    }
}

#[derive(Debug, Default)]
struct ColumnWriter {
    filling: Vec<u8>,
    /// Numbers of the full blocks before `filling`.
    spilled: Vec<u64>,
    /// Of the spilled blocks.
    crc: Crc32c,
    bytes: u64,
}

impl ColumnWriter {
    #[inline]
    fn put<S: Read + Write + Seek>(&mut self, bytes: &[u8], scratch: &mut Scratch<S>) -> Result<()> {
        self.bytes += bytes.len() as u64;
        if self.filling.len() + bytes.len() < BLOCK_BYTES {
            self.filling.extend_from_slice(bytes);
            return Ok(());
        }
        self.put_spilling(bytes, scratch)
    }

    fn put_spilling<S: Read + Write + Seek>(
        &mut self,
        mut bytes: &[u8],
        scratch: &mut Scratch<S>,
    ) -> Result<()> {
        while self.filling.len() + bytes.len() >= BLOCK_BYTES {
            let (now, later) = bytes.split_at(BLOCK_BYTES - self.filling.len());
            self.filling.extend_from_slice(now);
            self.crc.update(&self.filling);
            self.spilled.push(scratch.append(&self.filling)?);
            self.filling.clear();
            bytes = later;
        }
        self.filling.extend_from_slice(bytes);
        Ok(())
    }

    /// The column is complete.
    fn checksum(&mut self) -> u32 {
        self.crc.update(&self.filling);
        self.crc.value()
    }
}

/// The order of paths in a walk, depth first, names in byte order: '/' comes before any byte of a name.
fn in_tree(one: &[u8], other: &[u8]) -> Ordering {
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    match (one.get(same), other.get(same)) {
        (Some(b'/'), Some(_)) => Ordering::Less,
        (Some(_), Some(b'/')) => Ordering::Greater,
        (a, b) => a.cmp(&b),
    }
}
