//! Reads a manifest where it lies, usually in a memory map.
//!
//! `open` checks, in this order: header, column table, columns against each other, then every row. From there
//! on an accessor takes a row below its count and finds all that it needs within the bytes; a row beyond the
//! count panics, as an index into a slice does. The bytes must not change while a `Manifest` lives: the engine
//! never changes a manifest that has its name.

use headrace_base::ids::SealId;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, Result, SegmentId, Version, crc32c};

use super::*;
use crate::CHUNK;
use crate::record::{self, SegmentKind};

/// The manifest of a sealed view, over its bytes (`&[u8]`, a memory map, an `Arc` of one).
#[derive(Clone)]
pub struct Manifest<B> {
    bytes: B,
    columns: [Column; COLUMNS.len()],
    samples: u64,
    directories: u32,
    segments: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Column {
    start: usize,
    end: usize,
    crc: u32,
}

/// A directory of the sealed view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Directory<'a> {
    /// Relative to the sealed root; the root's is empty.
    pub path: &'a [u8],
    /// The root's is 0, itself.
    pub parent: u32,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
}

/// `record::Extent`, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent<'a> {
    pub file_offset: u64,
    pub length: u64,
    pub place: Place<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    Pack {
        segment: SegmentId,
        offset: u64,
        check: Check<'a>,
    },
    File {
        segment: SegmentId,
        offset: u64,
    },
    /// The extent's bytes themselves, and their CRC32C, not yet compared.
    Inline {
        bytes: &'a [u8],
        crc: u32,
    },
}

/// `record::Check`, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check<'a> {
    pub start: u64,
    pub covered: u64,
    crcs: &'a [[u8; 4]],
}

impl Check<'_> {
    pub fn crcs(&self) -> impl ExactSizeIterator<Item = u32> {
        self.crcs.iter().map(|crc| u32::from_le_bytes(*crc))
    }

    /// Allocates only for more than one chunk.
    pub fn to_record(&self) -> record::Check {
        record::Check { start: self.start, covered: self.covered, crcs: self.crcs().collect() }
    }
}

/// The extents of one sample, in order of file offset.
#[derive(Debug)]
pub struct Extents<'a, B> {
    manifest: &'a Manifest<B>,
    rows: std::ops::Range<usize>,
}

impl<'a, B: AsRef<[u8]>> Iterator for Extents<'a, B> {
    type Item = Extent<'a>;

    #[inline]
    fn next(&mut self) -> Option<Extent<'a>> {
        self.rows.next().map(|row| self.manifest.extent(row))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rows.size_hint()
    }
}

impl<B: AsRef<[u8]>> ExactSizeIterator for Extents<'_, B> {}

#[cold]
fn corrupt(why: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("manifest: {why}"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|k| bytes[at + k]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|k| bytes[at + k]))
}

/// Without the bytes: there may be gigabytes.
impl<B> std::fmt::Debug for Manifest<B> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Manifest")
            .field("samples", &self.samples)
            .field("directories", &self.directories)
            .field("segments", &self.segments)
            .finish_non_exhaustive()
    }
}

impl<B: AsRef<[u8]>> Manifest<B> {
    /// Checks the whole but for the columns' checksums, in one pass over most of it (about 10 ms for a million
    /// samples). Errors: `Corrupt` saying what is wrong, `Invalid` for a newer format.
    pub fn open(bytes: B) -> Result<Manifest<B>> {
        let raw = bytes.as_ref();
        if raw.len() < HEADER || raw[..8] != MAGIC {
            return Err(corrupt(format_args!("{} bytes do not begin as a manifest does", raw.len())));
        }
        let stored = u32_at(raw, HEADER_CRC);
        let computed = crc32c(&raw[..HEADER_CRC]);
        if stored != computed {
            return Err(corrupt(format_args!("header has checksum {computed:08x}, not {stored:08x}")));
        }
        let format = u32_at(raw, 8);
        if format != FORMAT {
            return Err(Error::invalid(format!(
                "manifest of format {format}; this engine reads format {FORMAT}: upgrade headrace"
            )));
        }
        let file_bytes = u64_at(raw, 64);
        if file_bytes != raw.len() as u64 {
            return Err(corrupt(format_args!("holds {} of {file_bytes} bytes", raw.len())));
        }
        let columns = read_table(raw)?;
        let mut manifest = Manifest { columns, samples: u64_at(raw, 16), directories: 0, segments: 0, bytes };
        manifest.check_lengths()?;
        manifest.check_directories()?;
        manifest.check_samples()?;
        manifest.check_extents()?;
        Ok(manifest)
    }

    /// Compares every column with its checksum: reads the whole manifest.
    pub fn verify(&self) -> Result<()> {
        for (column, (name, _)) in self.columns.iter().zip(COLUMNS) {
            let computed = crc32c(&self.bytes.as_ref()[column.start..column.end]);
            if computed != column.crc {
                let stored = column.crc;
                return Err(corrupt(format_args!(
                    "column {name} has checksum {computed:08x}, not {stored:08x}"
                )));
            }
        }
        Ok(())
    }

    /// The bytes that the manifest was opened over.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The sum of the samples' sizes.
    pub fn bytes(&self) -> u64 {
        u64_at(self.bytes.as_ref(), 24)
    }

    pub fn version(&self) -> Version {
        Version(u64_at(self.bytes.as_ref(), 32))
    }

    pub fn seal(&self) -> SealId {
        SealId::from_bytes(std::array::from_fn(|k| self.bytes.as_ref()[40 + k]))
    }

    pub fn created(&self) -> Timestamp {
        Timestamp(u64_at(self.bytes.as_ref(), 56) as i64)
    }

    /// The sealed root, from the volume's root.
    pub fn root_path(&self) -> &[u8] {
        self.raw(ROOT_PATH)
    }

    #[inline]
    pub fn size(&self, sample: u64) -> u64 {
        self.u64s(SIZE)[self.row(sample)].number()
    }

    /// Relative to the sealed root.
    pub fn path(&self, sample: u64) -> &[u8] {
        let row = self.row(sample);
        let starts = self.u64s(PATH_START);
        &self.raw(PATH_BYTES)[starts[row].number() as usize..starts[row + 1].number() as usize]
    }

    /// The row of the sample's directory.
    #[inline]
    pub fn directory(&self, sample: u64) -> u32 {
        self.u32s(DIRECTORY)[self.row(sample)].number()
    }

    /// Permission bits.
    #[inline]
    pub fn mode(&self, sample: u64) -> u16 {
        self.u32s(MODE)[self.row(sample)].number() as u16
    }

    #[inline]
    pub fn uid(&self, sample: u64) -> u32 {
        self.u32s(UID)[self.row(sample)].number()
    }

    #[inline]
    pub fn gid(&self, sample: u64) -> u32 {
        self.u32s(GID)[self.row(sample)].number()
    }

    pub fn ino(&self, sample: u64) -> Ino {
        Ino(self.u64s(INO)[self.row(sample)].number())
    }

    pub fn mtime(&self, sample: u64) -> Timestamp {
        Timestamp(self.u64s(MTIME)[self.row(sample)].number() as i64)
    }

    /// What no extent covers, below the sample's size, is zeros.
    #[inline]
    pub fn extents(&self, sample: u64) -> Extents<'_, B> {
        let row = self.row(sample);
        let starts = self.u64s(EXTENT_START);
        Extents { manifest: self, rows: starts[row].number() as usize..starts[row + 1].number() as usize }
    }

    pub fn directories(&self) -> u32 {
        self.directories
    }

    /// The directory in a row; 0 is the sealed root.
    pub fn dir(&self, row: u32) -> Directory<'_> {
        let row = row as usize;
        let starts = self.u64s(DIR_PATH_START);
        Directory {
            path: &self.raw(DIR_PATH_BYTES)[starts[row].number() as usize..starts[row + 1].number() as usize],
            parent: self.u32s(DIR_PARENT)[row].number(),
            mode: self.u32s(DIR_MODE)[row].number() as u16,
            uid: self.u32s(DIR_UID)[row].number(),
            gid: self.u32s(DIR_GID)[row].number(),
        }
    }

    /// All segments that the samples lie in, each once.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (SegmentId, SegmentKind)> {
        (0..self.segments).map(|row| self.segment(row))
    }

    #[inline]
    fn extent(&self, row: usize) -> Extent<'_> {
        let length = self.u64s(X_LENGTH)[row].number();
        let offset = self.u64s(X_OFFSET)[row].number();
        let crcs = || {
            let starts = self.u64s(X_CRC_START);
            let all = self.raw(CRCS).as_chunks().0;
            &all[starts[row].number() as usize..starts[row + 1].number() as usize]
        };
        let place = match self.u32s(X_SEGMENT)[row].number() {
            INLINE => {
                let bytes = &self.raw(INLINE_BYTES)[offset as usize..(offset + length) as usize];
                Place::Inline { bytes, crc: u32::from_le_bytes(crcs()[0]) }
            }
            segment => match self.segment(segment) {
                (segment, SegmentKind::File) => Place::File { segment, offset },
                (segment, SegmentKind::Pack) => {
                    let start = self.u64s(X_CHECK_START)[row].number();
                    let covered = self.u64s(X_COVERED)[row].number();
                    Place::Pack { segment, offset, check: Check { start, covered, crcs: crcs() } }
                }
            },
        };
        Extent { file_offset: self.u64s(X_FILE_OFFSET)[row].number(), length, place }
    }

    #[inline]
    fn segment(&self, row: u32) -> (SegmentId, SegmentKind) {
        let row = row as usize;
        let ids: &[[u8; 16]] = self.raw(SEG_ID).as_chunks().0;
        // `check_lengths` saw that there are but two.
        let kind = SegmentKind::of_number(self.raw(SEG_KIND)[row]).unwrap_or(SegmentKind::Pack);
        (SegmentId::from_bytes(ids[row]), kind)
    }

    #[inline]
    fn row(&self, sample: u64) -> usize {
        assert!(sample < self.samples, "sample {sample} of {}", self.samples);
        sample as usize
    }

    #[inline]
    fn raw(&self, column: usize) -> &[u8] {
        let Column { start, end, .. } = self.columns[column];
        &self.bytes.as_ref()[start..end]
    }

    #[inline]
    fn u32s(&self, column: usize) -> &[[u8; 4]] {
        self.raw(column).as_chunks().0
    }

    #[inline]
    fn u64s(&self, column: usize) -> &[[u8; 8]] {
        self.raw(column).as_chunks().0
    }

    fn check_lengths(&mut self) -> Result<()> {
        let elements = |column: usize| {
            let Column { start, end, .. } = self.columns[column];
            (end - start) as u64 / COLUMNS[column].1.bytes()
        };
        let (samples, extents) = (self.samples, elements(X_LENGTH));
        let (segments, directories) = (elements(SEG_KIND), elements(DIR_PARENT));
        let groups: &[(u64, &[usize])] = &[
            (samples, &[DIRECTORY, SIZE, MTIME, MODE, UID, GID, INO]),
            (samples.saturating_add(1), &[PATH_START, EXTENT_START]),
            (extents, &[X_FILE_OFFSET, X_SEGMENT, X_OFFSET, X_CHECK_START, X_COVERED]),
            (extents + 1, &[X_CRC_START]),
            (segments * 16, &[SEG_ID]),
            (directories, &[DIR_MODE, DIR_UID, DIR_GID]),
            (directories + 1, &[DIR_PATH_START]),
            (u64::from(u32_at(self.bytes.as_ref(), 72)), &[ROOT_PATH]),
        ];
        for (due, columns) in groups {
            for &column in *columns {
                if elements(column) != *due {
                    let name = COLUMNS[column].0;
                    return Err(corrupt(format_args!("{} elements in {name}, not {due}", elements(column))));
                }
            }
        }
        for (starts, of) in [
            (PATH_START, PATH_BYTES),
            (EXTENT_START, X_LENGTH),
            (X_CRC_START, CRCS),
            (DIR_PATH_START, DIR_PATH_BYTES),
        ] {
            let count = elements(of);
            let values = self.u64s(starts);
            // Branchless, so that it runs at the speed of memory.
            let rising =
                values.windows(2).fold(true, |so_far, two| so_far & (two[0].number() <= two[1].number()));
            let ends =
                (values.first().map(|value| value.number()), values.last().map(|value| value.number()));
            if !rising || ends != (Some(0), Some(count)) {
                let name = COLUMNS[starts].0;
                return Err(corrupt(format_args!("{name} does not rise from 0 to {count}")));
            }
        }
        if let Some(row) = self.raw(SEG_KIND).iter().position(|&kind| SegmentKind::of_number(kind).is_none())
        {
            let kind = self.raw(SEG_KIND)[row];
            return Err(corrupt(format_args!("segment {row} is of kind {kind}, not 1 or 2")));
        }
        let few = |count: u64, what: &str| {
            u32::try_from(count).map_err(|_| corrupt(format_args!("{count} {what} are too many")))
        };
        (self.directories, self.segments) = (few(directories, "directories")?, few(segments, "segments")?);
        Ok(())
    }

    fn check_directories(&self) -> Result<()> {
        if self.directories == 0 {
            return Err(corrupt("it has no directory, not even the sealed root"));
        }
        self.check_modes(DIR_MODE)?;
        for (row, parent) in self.u32s(DIR_PARENT).iter().enumerate() {
            let parent = parent.number();
            if parent as usize >= row.max(1) {
                return Err(corrupt(format_args!("directory {row} has parent {parent}, not one before it")));
            }
        }
        Ok(())
    }

    fn check_modes(&self, column: usize) -> Result<()> {
        let all = self.u32s(column).iter().fold(0, |bits, mode| bits | mode.number());
        if all > 0o7777 {
            let name = COLUMNS[column].0;
            return Err(corrupt(format_args!("{name} holds {all:o}, more than permission bits")));
        }
        Ok(())
    }

    fn check_samples(&self) -> Result<()> {
        self.check_modes(MODE)?;
        let last = self.u32s(DIRECTORY).iter().fold(0, |last, row| last.max(row.number()));
        if self.samples > 0 && last >= self.directories {
            let count = self.directories;
            return Err(corrupt(format_args!("a sample lies in directory {last} of {count}")));
        }
        let sum = self.u64s(SIZE).iter().try_fold(0_u64, |sum, size| sum.checked_add(size.number()));
        if sum != Some(self.bytes()) {
            let due = self.bytes();
            return Err(corrupt(format_args!("the samples have {sum:?} bytes, not {due}")));
        }
        // Extents in order, none beyond the end of its sample.
        let starts = self.u64s(EXTENT_START);
        let (offsets, lengths) = (self.u64s(X_FILE_OFFSET), self.u64s(X_LENGTH));
        for (row, size) in self.u64s(SIZE).iter().enumerate() {
            let mut end = 0;
            for extent in starts[row].number() as usize..starts[row + 1].number() as usize {
                let (offset, length) = (offsets[extent].number(), lengths[extent].number());
                match offset.checked_add(length).filter(|&next| offset >= end && next <= size.number()) {
                    Some(next) => end = next,
                    None => {
                        return Err(corrupt(format_args!(
                            "extent {extent} ({length} bytes at {offset}) of sample {row} overlaps another or \
                             ends after the sample"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_extents(&self) -> Result<()> {
        let segments = self.u32s(X_SEGMENT);
        let (offsets, lengths) = (self.u64s(X_OFFSET), self.u64s(X_LENGTH));
        let (starts, covereds) = (self.u64s(X_CHECK_START), self.u64s(X_COVERED));
        let crcs = self.u64s(X_CRC_START);
        let kinds = self.raw(SEG_KIND);
        let inline_bytes = self.raw(INLINE_BYTES).len() as u64;
        for (row, segment) in segments.iter().enumerate() {
            let segment = segment.number();
            let (offset, length) = (offsets[row].number(), lengths[row].number());
            let (start, covered) = (starts[row].number(), covereds[row].number());
            let count = crcs[row + 1].number() - crcs[row].number();
            let end = offset.checked_add(length);
            let fits = if segment == INLINE {
                count == 1 && end.is_some_and(|end| end <= inline_bytes)
            } else {
                match kinds.get(segment as usize) {
                    None => false,
                    Some(&kind) if kind == SegmentKind::Pack.number() => {
                        start <= offset
                            && count == covered.div_ceil(CHUNK)
                            && end.zip(start.checked_add(covered)).is_some_and(|(end, last)| end <= last)
                    }
                    Some(_) => count == 0 && end.is_some(),
                }
            };
            if !fits {
                return Err(corrupt(format_args!(
                    "extent {row} ({length} bytes at {offset} of segment row {segment} of {}) has {count} \
                     checksums for {covered} bytes from {start}, or lies beyond what there is",
                    kinds.len()
                )));
            }
        }
        Ok(())
    }
}

fn read_table(raw: &[u8]) -> Result<[Column; COLUMNS.len()]> {
    let count = u32_at(raw, 12) as usize;
    let Some(table) = raw[TABLE..HEADER_CRC].get(..count.saturating_mul(COLUMN)) else {
        return Err(corrupt(format_args!("{count} columns do not fit its header")));
    };
    let mut columns = [None; COLUMNS.len()];
    for entry in table.chunks_exact(COLUMN) {
        let name = entry[..NAME].trim_ascii_end();
        let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(name.len())];
        // Columns of a later engine are left alone.
        let Some(number) = COLUMNS.iter().position(|(known, _)| known.as_bytes() == name) else { continue };
        let name = COLUMNS[number].0;
        let kind = COLUMNS[number].1;
        let (stored, crc) = (u32_at(entry, NAME), u32_at(entry, NAME + 4));
        let (offset, elements) = (u64_at(entry, NAME + 8), u64_at(entry, NAME + 16));
        if stored != kind as u32 {
            return Err(corrupt(format_args!("column {name} is of type {stored}, not {}", kind as u32)));
        }
        let end = elements.checked_mul(kind.bytes()).and_then(|bytes| bytes.checked_add(offset));
        let end = end.filter(|&end| end <= raw.len() as u64);
        let (Some(end), true) = (end, offset >= HEADER as u64 && offset.is_multiple_of(ALIGNMENT)) else {
            return Err(corrupt(format_args!(
                "column {name}, {elements} elements at {offset}, does not lie in its {} bytes",
                raw.len()
            )));
        };
        // Both fit: the bytes are in memory.
        let column = Column { start: offset as usize, end: end as usize, crc };
        if columns[number].replace(column).is_some() {
            return Err(corrupt(format_args!("column {name} comes twice")));
        }
    }
    let mut all = [Column::default(); COLUMNS.len()];
    for ((column, found), (name, _)) in all.iter_mut().zip(columns).zip(COLUMNS) {
        *column = found.ok_or_else(|| corrupt(format_args!("column {name} is missing")))?;
    }
    Ok(all)
}

/// A little-endian number in a column.
trait Little {
    type Number;
    fn number(&self) -> Self::Number;
}

impl Little for [u8; 4] {
    type Number = u32;

    #[inline]
    fn number(&self) -> u32 {
        u32::from_le_bytes(*self)
    }
}

impl Little for [u8; 8] {
    type Number = u64;

    #[inline]
    fn number(&self) -> u64 {
        u64::from_le_bytes(*self)
    }
}
