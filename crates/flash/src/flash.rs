//! The folder of segments: which there are, their descriptors and indexes, and reading by name.
//!
//! ```text
//! folder/XX/ULID.pack | ULID.file, ULID.idx       XX: the last two characters of the ULID, which are random
//! ```
//! A read looks up the descriptor (and, of a file segment, its checksums) under a shared lock, and reads
//! without any. A descriptor lives as long as someone reads from it, whatever the cache does meanwhile.
//!
//! Where next: `read` for what is verified, `pack` and `file` for writing, `recover` for crashes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use headrace_base::{Error, Kind, MIB, Result, SegmentId};
use headrace_format::CHUNK;
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment::{self, Origin};

use crate::cache::Cache;
use crate::disk;
pub use crate::file::FileSegmentWriter;
use crate::file::{ChunkSums, LiveSums};
pub use crate::pack::{PackSyncer, PackWriter};
use crate::read::{Source, Sums, read_verified};

/// One record that goes into a pack: whose bytes they are, and the bytes (possibly in several pieces).
#[derive(Debug)]
pub struct PackRecord<'a> {
    pub origin: Origin,
    pub pieces: Vec<&'a [u8]>,
}

impl PackRecord<'_> {
    pub fn length(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// Where a record's payload lies, in the order of the records given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub offset: u64,
    pub length: u64,
    pub check: Check,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentFile {
    pub segment: SegmentId,
    pub kind: SegmentKind,
    /// Length of the pack, or of a file segment's data; of a part of one, what it takes on the disk.
    pub bytes: u64,
    /// All of it is here.
    pub whole: bool,
}

/// What recovery found in a segment whose writer never closed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Valid bytes that are kept: to the end of a pack's last frame, of a file segment's data; 0: the segment
    /// was empty and is removed.
    pub bytes: u64,
    pub truncated_bytes: u64,
    /// Records of the pack; 1 for a file segment that is kept.
    pub records: u64,
}

/// The files of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Pack,
    Data,
    Index,
    /// Some bytes of a pack, of a file segment's data: see `part`.
    PartialPack,
    PartialData,
}

impl Part {
    const ALL: [Part; 5] = [Part::Pack, Part::Data, Part::Index, Part::PartialPack, Part::PartialData];

    fn extension(self) -> &'static str {
        match self {
            Part::Pack => "pack",
            Part::Data => "file",
            Part::Index => "idx",
            Part::PartialPack => "pack-part",
            Part::PartialData => "file-part",
        }
    }
}

/// Checksums of 256 GiB of file segments; a larger one is kept alone.
const INDEX_CACHE_BYTES_MAX: usize = 16 * MIB as usize;

#[derive(Debug)]
pub struct Flash {
    folder: PathBuf,
    files: Cache<(SegmentId, Part), Arc<File>>,
    indexes: Cache<SegmentId, Arc<ChunkSums>>,
    /// File segments that are being written here.
    live: RwLock<HashMap<SegmentId, Arc<LiveSums>>>,
}

impl Flash {
    /// Opens the folder of segments (made when missing, its parent must be there). `open_files_max` bounds
    /// the cached descriptors; reads under way and writers hold theirs beside them.
    pub fn open(folder: &Path, open_files_max: usize) -> Result<Arc<Flash>> {
        if !folder.is_dir() {
            disk::make_folder(folder).map_err(|cause| disk::io_error("make folder", folder, cause))?;
            disk::sync_folder(folder.parent().unwrap_or(folder))?;
        }
        Ok(Arc::new(Flash {
            folder: folder.to_owned(),
            files: Cache::new(open_files_max),
            indexes: Cache::new(INDEX_CACHE_BYTES_MAX),
            live: RwLock::default(),
        }))
    }

    /// A new pack; `Conflict` if there is one of this name.
    pub fn create_pack(self: &Arc<Self>, segment: SegmentId) -> Result<PackWriter> {
        PackWriter::create(self, segment)
    }

    /// A new file segment; `Conflict` if there is one of this name.
    pub fn create_file_segment(
        self: &Arc<Self>,
        segment: SegmentId,
        origin: Origin,
    ) -> Result<FileSegmentWriter> {
        FileSegmentWriter::create(self, segment, &origin)
    }

    /// Fills `out` from `offset` of a pack, verified against `check`. Thread-safe, no lock held while
    /// reading. `Corrupt` if the bytes are not those that were written; then `out` holds zeros.
    pub fn read_pack(&self, segment: SegmentId, offset: u64, check: &Check, out: &mut [u8]) -> Result<()> {
        let sums = Sums { start: check.start, covered: check.covered, crcs: &check.crcs };
        self.read(segment, Part::Pack, &sums, offset, out)
    }

    /// Fills `out` from `offset` of a file segment (open or closed), verified against its index. `Corrupt` if
    /// the bytes are not those that were written, or were never; then `out` holds zeros.
    pub fn read_file(&self, segment: SegmentId, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).ok_or_else(|| {
            Error::invalid(format!("segment {segment}: {} bytes at {offset} end beyond 2^64", out.len()))
        })?;
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned();
        if let Some(live) = live {
            // Only the sums of what is read leave the lock. The last chunk may grow meanwhile: what it
            // covers now stays as it is.
            let live = live.read().unwrap_or_else(PoisonError::into_inner);
            let (start, covered, crcs) = self.touched(segment, &live, offset, end)?;
            let crcs = crcs.to_vec();
            drop(live);
            return self.read(segment, Part::Data, &Sums { start, covered, crcs: &crcs }, offset, out);
        }
        let length = out.len() as u64;
        self.with_sums(segment, offset, length, |sums| self.read(segment, Part::Data, sums, offset, out))
    }

    pub(crate) fn sums_bytes(&self, segment: SegmentId) -> Result<u64> {
        Ok(self.index(segment)?.bytes)
    }

    /// Calls `read` with the checksums of `length` bytes at `offset` of a closed file segment.
    pub(crate) fn with_sums<T>(
        &self,
        segment: SegmentId,
        offset: u64,
        length: u64,
        read: impl FnOnce(&Sums<'_>) -> Result<T>,
    ) -> Result<T> {
        let index = self.index(segment)?;
        let (start, covered, crcs) = self.touched(segment, &index, offset, offset.saturating_add(length))?;
        read(&Sums { start, covered, crcs })
    }

    /// The sums of the chunks that [offset, end) touches: where they start, what they cover.
    fn touched<'a>(
        &self,
        segment: SegmentId,
        sums: &'a ChunkSums,
        offset: u64,
        end: u64,
    ) -> Result<(u64, u64, &'a [u32])> {
        let first = offset / CHUNK;
        let last = end.div_ceil(CHUNK).max(first);
        let crcs = sums.crcs.get(first as usize..last as usize).filter(|_| end <= sums.bytes);
        let crcs = crcs.ok_or_else(|| {
            Error::corrupt(format!(
                "segment {segment} is too short: its index covers {} bytes, bytes {offset} to {end} were asked \
                 for ({}): check the disk, and write the file again or take the segment from a backup",
                sums.bytes,
                self.path(segment, Part::Index).display()
            ))
        })?;
        Ok((first * CHUNK, (last * CHUNK).min(sums.bytes) - first * CHUNK, crcs))
    }

    fn read(
        &self,
        segment: SegmentId,
        part: Part,
        sums: &Sums<'_>,
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let file = self.file(segment, part).inspect_err(|_| out.fill(0))?;
        // A read that succeeds needs no path.
        let path = || self.path(segment, part);
        read_verified(&Source { segment, path: &path, file: &file }, sums, offset, out)
    }

    pub(crate) fn file(&self, segment: SegmentId, part: Part) -> Result<Arc<File>> {
        let key = (segment, part);
        if let Some(file) = self.files.get(&key) {
            return Ok(file);
        }
        let path = self.path(segment, part);
        let file = Arc::new(File::open(&path).map_err(|cause| missing_or_unreadable(segment, &path, cause))?);
        self.files.insert(key, Arc::clone(&file), 1);
        // A segment removed between opening it and putting it here would keep its space until evicted.
        // `remove` unlinks first and forgets second, so one of the two sees the other.
        if file.metadata().is_ok_and(|metadata| std::os::unix::fs::MetadataExt::nlink(&metadata) == 0) {
            self.files.remove(&key);
        }
        Ok(file)
    }

    /// The checksums of a file segment that is not being written here.
    fn index(&self, segment: SegmentId) -> Result<Arc<ChunkSums>> {
        if let Some(index) = self.indexes.get(&segment) {
            return Ok(index);
        }
        let path = self.path(segment, Part::Index);
        let bytes = std::fs::read(&path).map_err(|cause| missing_or_unreadable(segment, &path, cause))?;
        let index = segment::decode_index(segment, &bytes).map_err(|cause| cause.context(path.display()))?;
        let sums = Arc::new(ChunkSums { crcs: index.crcs, bytes: index.bytes });
        // An open one may still be recovered, which changes it.
        if index.closed {
            self.indexes.insert(segment, Arc::clone(&sums), sums.crcs.len() * size_of::<u32>());
        }
        Ok(sums)
    }

    /// All records of a segment, open or closed, with where they lie: what it says about itself, without the
    /// metadata store. Of a closed pack only the frames' headers are read, of an open one all bytes, up to
    /// the first that are not valid. A file segment is one record. `Corrupt` if it is damaged.
    pub fn records(&self, segment: SegmentId) -> Result<Vec<(Origin, Placed)>> {
        if self.path(segment, Part::Pack).exists() {
            return crate::recover::pack_records(self, segment);
        }
        let path = self.path(segment, Part::Index);
        let bytes = std::fs::read(&path).map_err(|cause| missing_or_unreadable(segment, &path, cause))?;
        let index = segment::decode_index(segment, &bytes).map_err(|cause| cause.context(path.display()))?;
        let check = Check { start: 0, covered: index.bytes, crcs: index.crcs.into() };
        Ok(vec![(index.origin, Placed { offset: 0, length: index.bytes, check })])
    }

    /// Recovers a segment after a crash: truncates to the last valid record, closes it. One that is closed
    /// stays untouched; one that never came to be, or holds nothing, is removed. `keep_bytes` is the end of
    /// the last committed extent in it (0: none): if less than that is valid, `Corrupt`, and nothing is
    /// changed. Nobody may be writing the segment.
    pub fn recover(&self, segment: SegmentId, kind: SegmentKind, keep_bytes: u64) -> Result<Recovered> {
        self.forget(segment);
        let recovered = match kind {
            SegmentKind::Pack => crate::recover::recover_pack(self, segment, keep_bytes),
            SegmentKind::File => crate::recover::recover_file(self, segment, keep_bytes),
        };
        // A read meanwhile may have brought an index here that is not that of the closed segment.
        self.forget(segment);
        recovered
    }

    /// An open descriptor of a whole closed segment's bytes, and how many there are: for copying it elsewhere.
    pub fn whole(&self, segment: SegmentId, kind: SegmentKind) -> Result<(Arc<File>, u64)> {
        let part = match kind {
            SegmentKind::Pack => Part::Pack,
            SegmentKind::File => Part::Data,
        };
        self.opened(segment, part)
    }

    /// The same of a file segment's index.
    pub fn index_file(&self, segment: SegmentId) -> Result<(Arc<File>, u64)> {
        self.opened(segment, Part::Index)
    }

    fn opened(&self, segment: SegmentId, part: Part) -> Result<(Arc<File>, u64)> {
        let file = self.file(segment, part)?;
        let metadata =
            file.metadata().map_err(|cause| disk::io_error("look at", &self.path(segment, part), cause))?;
        Ok((file, metadata.len()))
    }

    /// Takes the segment's files away. It is no error if they are gone already (a removal that a crash cut
    /// short is repeated). Not durable by itself: what comes back after a crash is garbage that nobody names.
    pub fn remove(&self, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        let parts: &[Part] = match kind {
            SegmentKind::Pack => &[Part::Pack, Part::PartialPack],
            SegmentKind::File => &[Part::Data, Part::PartialData, Part::Index],
        };
        let mut removed = Ok(());
        for part in parts {
            let path = self.path(segment, *part);
            match std::fs::remove_file(&path) {
                Ok(()) => {}
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
                Err(cause) => removed = Err(disk::io_error("remove", &path, cause)),
            }
        }
        self.forget(segment);
        removed
    }

    pub(crate) fn forget(&self, segment: SegmentId) {
        for part in Part::ALL {
            self.files.remove(&(segment, part));
        }
        self.indexes.remove(&segment);
    }

    /// Every segment in the folder, in no particular order. Of a file segment that a removal left half, too.
    pub fn list(&self) -> Result<Vec<SegmentFile>> {
        let mut found: HashMap<(SegmentId, bool), SegmentFile> = HashMap::new();
        let failed = |path: &Path, cause| disk::io_error("list", path, cause);
        for entry in std::fs::read_dir(&self.folder).map_err(|cause| failed(&self.folder, cause))? {
            let folder = entry.map_err(|cause| failed(&self.folder, cause))?.path();
            if !folder.is_dir() {
                continue;
            }
            for entry in std::fs::read_dir(&folder).map_err(|cause| failed(&folder, cause))? {
                let entry = entry.map_err(|cause| failed(&folder, cause))?;
                let path = entry.path();
                let Some((segment, part)) = self.segment_of(&path) else {
                    tracing::debug!(path = %path.display(), "not a segment: left alone");
                    continue;
                };
                let bytes = match entry.metadata() {
                    Ok(metadata) if matches!(part, Part::PartialPack | Part::PartialData) => {
                        std::os::unix::fs::MetadataExt::blocks(&metadata) * 512
                    }
                    Ok(metadata) => metadata.len(),
                    // Removed since it was listed.
                    Err(cause) if cause.kind() == io::ErrorKind::NotFound => continue,
                    Err(cause) => return Err(failed(&path, cause)),
                };
                let pack = matches!(part, Part::Pack | Part::PartialPack);
                let kind = if pack { SegmentKind::Pack } else { SegmentKind::File };
                let listed = found.entry((segment, pack)).or_insert(SegmentFile {
                    segment,
                    kind,
                    bytes: 0,
                    whole: false,
                });
                let whole = matches!(part, Part::Pack | Part::Data);
                if whole || (part != Part::Index && !listed.whole) {
                    listed.bytes = bytes;
                    listed.whole = whole;
                }
            }
        }
        Ok(found.into_values().collect())
    }

    /// Which segment a path names, if it is where that one belongs.
    fn segment_of(&self, path: &Path) -> Option<(SegmentId, Part)> {
        let segment = path.file_stem()?.to_str()?.parse().ok()?;
        let extension = path.extension()?;
        let part = Part::ALL.into_iter().find(|part| extension == part.extension())?;
        (self.path(segment, part) == path).then_some((segment, part))
    }

    /// (total, free, available) bytes of the disk.
    pub fn space(&self) -> Result<(u64, u64, u64)> {
        let disk = rustix::fs::statvfs(&self.folder)
            .map_err(|cause| disk::io_error("ask for the space of", &self.folder, cause.into()))?;
        Ok((disk.f_blocks * disk.f_frsize, disk.f_bfree * disk.f_frsize, disk.f_bavail * disk.f_frsize))
    }

    pub(crate) fn path(&self, segment: SegmentId, part: Part) -> PathBuf {
        let name = segment.to_string();
        let folder = &name[name.len() - 2..];
        let mut path = self.folder.join(folder);
        path.push(format!("{name}.{}", part.extension()));
        path
    }

    pub(crate) fn add_live(&self, segment: SegmentId) -> Arc<LiveSums> {
        let live = Arc::new(LiveSums::default());
        let mut all = self.live.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(segment, Arc::clone(&live));
        live
    }

    pub(crate) fn remove_live(&self, segment: SegmentId) {
        self.live.write().unwrap_or_else(PoisonError::into_inner).remove(&segment);
    }
}

/// Whether a read failed because the segment is not there at all. The collector may have taken it between
/// the look-up of its extents and the read: such a reader looks them up once more.
pub fn is_missing(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    error.kind() == Kind::Corrupt && cause.is_some_and(|cause| cause.kind() == io::ErrorKind::NotFound)
}

pub(crate) fn missing_or_unreadable(segment: SegmentId, path: &Path, cause: io::Error) -> Error {
    if cause.kind() == io::ErrorKind::NotFound {
        return Error::corrupt(format!(
            "segment {segment} is missing ({}): put it back from a backup, or write the file again",
            path.display()
        ))
        .with_cause(cause);
    }
    disk::io_error("open", path, cause).context(format_args!("segment {segment}"))
}
