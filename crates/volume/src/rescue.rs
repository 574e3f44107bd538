//! Rebuilds a tree from segments alone, when no metadata is left: `headrace rescue`.
//!
//! 1. *read*: what each segment in the bucket says about itself. Of packs that are the headers of their frames, of file
//!    segments their indexes; no byte of a file is fetched, except of packs that were cut off.
//! 2. *put together*: each inode's records in the order in which they were written, a later one over an earlier one, the
//!    file cut or grown to the size that each names. The rules are those of `headrace.control.extraction`.
//! 3. *name*: the last path that a record knows; of several inodes the newest keeps it, the others get a suffix.
//! 4. *fill*: inodes under their old numbers, whose extents name the segments that are there.
//!
//! Invariant: an inode keeps its number. The collector asks a segment for the inodes that it has bytes of; under another
//! number the segment would look as if nothing named it, and go.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Ino, KIB, Kind, Result, SegmentId, thread};
use headrace_flash::{Placed, SegmentBytes, describe_pack};
use headrace_format::key;
use headrace_format::record::{
    Content, Dentry, DirDelta, Extent, FileKind, Inode, Place, REGION, SegmentKind, encode_number,
};
use headrace_format::segment::{Origin, decode_index};
use headrace_meta::{Commit, MetaStore, Write};
use headrace_object::ObjectTier;

use crate::extents;
use crate::live::{content_of, region_writes};
use crate::namespace::{NODE, check_name, shown};
use crate::packs::must_commit;
use crate::past::{FOLDER_NAME, INO_MAX};
use crate::remote::{data_name, object_name};
use crate::types::Rescued;

/// Rows of one commit.
const COMMIT_ROWS: usize = 2000;
/// Segments that are read at a time. Each waits for the store most of the time.
const READERS: usize = 16;
/// Fetched at once: the header of a frame of 2,000 small files; of a pack of small frames several of them.
const WINDOW_BYTES: u64 = 128 * KIB;
/// Below the root, for files whose path no record knows or that cannot be had; as `extraction` has it.
const UNNAMED: &[u8] = b"headrace-unnamed";
/// A person reads them.
const NOTES_MAX: usize = 1000;
/// Without setuid and setgid: an owner that was changed since is not known here.
const MODE_MASK: u16 = 0o777;
/// Extents are kept by region, whose number has 32 bits.
const SIZE_MAX: u64 = REGION << 32;

/// What the segments of a bucket say.
#[derive(Debug)]
pub struct Found {
    files: Vec<File>,
    directories: Vec<Directory>,
    next_ino: u64,
    rescued: Rescued,
}

#[derive(Debug)]
struct File {
    ino: Ino,
    parent: usize,
    name: Vec<u8>,
    extents: Vec<Extent>,
    size: u64,
    last: Origin,
}

/// The first is the root.
#[derive(Debug)]
struct Directory {
    ino: Ino,
    parent: usize,
    name: Vec<u8>,
    count: DirDelta,
}

/// One run of a file's bytes.
#[derive(Debug)]
struct Record {
    segment: SegmentId,
    kind: SegmentKind,
    origin: Origin,
    placed: Placed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    pack: Option<u64>,
    file: Option<u64>,
    index: bool,
}

/// Reads all segments. NotFound if there are none; the store's error if it cannot be asked.
pub fn find(tier: &Arc<ObjectTier>) -> Result<Found> {
    let segments = list(tier)?;
    if segments.is_empty() {
        return Err(Error::not_found(format!(
            "there are no segments at {}: name the bucket and the prefix of a volume",
            tier.location()
        )));
    }
    let mut notes = Vec::new();
    let mut inodes: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    for (records, damage) in read_all(tier, segments)? {
        notes.extend(damage);
        for record in records {
            inodes.entry(record.origin.ino.0).or_default().push(record);
        }
    }
    let mut rebuilt = Vec::with_capacity(inodes.len());
    for (ino, records) in inodes {
        if ino <= Ino::ROOT.0 || ino >= INO_MAX / 2 {
            notes.push(format!("segments claim bytes of inode {ino}, which is no file's: left out"));
            continue;
        }
        rebuilt.push(put_together(Ino(ino), records, &mut notes));
    }
    Ok(name_all(rebuilt, notes))
}

fn list(tier: &ObjectTier) -> Result<Vec<(SegmentId, Sizes)>> {
    let mut found: BTreeMap<SegmentId, Sizes> = BTreeMap::new();
    tier.list("segments", |listed| {
        let file = listed.name.rsplit('/').next().unwrap_or_default();
        let Some((name, extension)) = file.split_once('.') else { return Ok(()) };
        let Ok(segment) = name.parse::<SegmentId>() else { return Ok(()) };
        if listed.name == object_name(segment, extension) {
            let sizes = found.entry(segment).or_default();
            match extension {
                "pack" => sizes.pack = Some(listed.bytes),
                "file" => sizes.file = Some(listed.bytes),
                "idx" => sizes.index = true,
                _ => {}
            }
        }
        Ok(())
    })?;
    Ok(found.into_iter().collect())
}

/// A segment's records in the order in which they were written, and what cannot be read of it.
type Read = (Vec<Record>, Vec<String>);

/// In the order of the segments' names, which is that of their making.
fn read_all(tier: &Arc<ObjectTier>, segments: Vec<(SegmentId, Sizes)>) -> Result<Vec<Read>> {
    struct Work {
        segments: Vec<(SegmentId, Sizes)>,
        next: AtomicUsize,
        read: Mutex<BTreeMap<usize, Read>>,
        failed: Mutex<Option<Error>>,
    }
    let readers = READERS.min(segments.len());
    let work = Arc::new(Work {
        segments,
        next: AtomicUsize::new(0),
        read: Mutex::default(),
        failed: Mutex::default(),
    });
    let mut threads = Vec::with_capacity(readers);
    for _ in 0..readers {
        let (work, tier) = (Arc::clone(&work), Arc::clone(tier));
        threads.push(thread::spawn("rescue", move || {
            loop {
                let index = work.next.fetch_add(1, Ordering::Relaxed);
                let Some((segment, sizes)) = work.segments.get(index) else { return };
                match read_segment(&tier, *segment, *sizes) {
                    Ok(read) => {
                        work.read.lock().unwrap_or_else(PoisonError::into_inner).insert(index, read);
                    }
                    Err(error) => {
                        work.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        // Nobody needs to go on.
                        work.next.store(work.segments.len(), Ordering::Relaxed);
                    }
                }
            }
        })?);
    }
    let panicked = threads.into_iter().map(std::thread::JoinHandle::join).filter(Result::is_err).count();
    if panicked > 0 {
        return Err(Error::internal("a thread that reads segments ended early"));
    }
    if let Some(error) = work.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error.context("rescue reads every segment"));
    }
    let read = std::mem::take(&mut *work.read.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(read.into_values().collect())
}

fn read_segment(tier: &ObjectTier, segment: SegmentId, sizes: Sizes) -> Result<Read> {
    let read = match sizes {
        Sizes { pack: Some(bytes), .. } => read_pack(tier, segment, bytes),
        Sizes { file: Some(bytes), index: true, .. } => read_index(tier, segment, bytes),
        Sizes { file: Some(_), .. } => Err(Error::corrupt(format!(
            "segment {segment}: its index is gone, which says whose bytes it holds"
        ))),
        Sizes { index: true, .. } => {
            Err(Error::corrupt(format!("segment {segment}: its bytes are gone, only the index is left")))
        }
        Sizes { .. } => Ok(Read::default()),
    };
    match read {
        // Removed since it was listed, or damaged: the others are not.
        Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound) => {
            Ok((Vec::new(), vec![format!("{}: the segment is left out", error.message())]))
        }
        read => read,
    }
}

fn read_pack(tier: &ObjectTier, segment: SegmentId, bytes: u64) -> Result<Read> {
    let window = Window { tier, name: data_name(segment, SegmentKind::Pack), bytes, held: Mutex::default() };
    let described = describe_pack(segment, &window, bytes)?;
    let records = described.records.into_iter().map(|(origin, placed)| Record {
        segment,
        kind: SegmentKind::Pack,
        origin,
        placed,
    });
    let records: Vec<Record> = records.collect();
    let left = records.len();
    let damage = described.damage.into_iter();
    let damage =
        damage.map(|error| format!("{}: of segment {segment} {left} records are left", error.message()));
    Ok((records, damage.collect()))
}

fn read_index(tier: &ObjectTier, segment: SegmentId, bytes: u64) -> Result<Read> {
    let index = decode_index(segment, &tier.get_all(&object_name(segment, "idx"))?)?;
    let mut damage = Vec::new();
    if bytes < index.bytes {
        // Named all the same: who reads the missing part gets an error, and not zeros.
        damage.push(format!(
            "segment {segment} is damaged: it was cut off after {bytes} of {} bytes: the rest of its file cannot be read",
            index.bytes
        ));
    }
    let check = headrace_format::record::Check { start: 0, covered: 0, crcs: Default::default() };
    let placed = Placed { offset: 0, length: index.bytes, check };
    Ok((vec![Record { segment, kind: SegmentKind::File, origin: index.origin, placed }], damage))
}

/// Ranges of an object, in steps that are worth a request.
struct Window<'a> {
    tier: &'a ObjectTier,
    name: String,
    bytes: u64,
    /// What was fetched last, and where it begins.
    held: Mutex<(u64, Vec<u8>)>,
}

impl SegmentBytes for Window<'_> {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let end = (offset + out.len() as u64).min(self.bytes);
        if offset >= end {
            return Ok(0);
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if offset < held.0 || end > held.0 + held.1.len() as u64 {
            // Near its end all of the end: the footer's last part tells where its first one is.
            let start = offset.min(self.bytes.saturating_sub(WINDOW_BYTES));
            let fetched =
                self.tier.get(&self.name, start..end.max(start + WINDOW_BYTES).min(self.bytes), None)?;
            *held = (start, fetched.bytes.to_vec());
        }
        let from = ((offset - held.0) as usize).min(held.1.len());
        let there = &held.1[from..];
        let count = there.len().min((end - offset) as usize);
        out[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }
}

/// Records, given in the order of their segments' names, in the order in which they were written.
///
/// Packs are filled one behind the other, so theirs is that order. A file segment is written beside a pack that is open,
/// and nothing says when: what that pack holds of the same inode is taken for later if its mtime is, what it holds of
/// another if that inode was made later.
fn in_order<T>(records: Vec<T>, record: impl Fn(&T) -> &Record) -> Vec<T> {
    let (mut ordered, files): (Vec<T>, Vec<T>) =
        records.into_iter().partition(|entry| record(entry).kind == SegmentKind::Pack);
    for whole in files {
        let later = ordered.iter().position(|entry| is_later(record(entry), record(&whole)));
        ordered.insert(later.unwrap_or(ordered.len()), whole);
    }
    ordered
}

fn is_later(record: &Record, whole: &Record) -> bool {
    if record.segment > whole.segment {
        return true;
    }
    let (own, other) = (&record.origin, &whole.origin);
    if own.ino == other.ino { own.mtime > other.mtime } else { own.ino > other.ino }
}

/// A file before it has a name. `last` is the record that was written last.
struct Rebuilt {
    ino: Ino,
    path: Vec<u8>,
    extents: Vec<Extent>,
    size: u64,
    last: Record,
}

fn put_together(ino: Ino, records: Vec<Record>, notes: &mut Vec<String>) -> Option<Rebuilt> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut size = 0;
    let mut path = Vec::new();
    let mut last = None;
    for record in in_order(records, |record| record) {
        let origin = &record.origin;
        let end = origin.file_offset.checked_add(record.placed.length);
        let Some(end) = end.filter(|end| *end.max(&origin.file_bytes) <= SIZE_MAX) else {
            notes.push(format!(
                "segment {} claims {} bytes at {} of a file of {} bytes, inode {ino}, which no file can have: left out",
                record.segment, record.placed.length, origin.file_offset, origin.file_bytes
            ));
            continue;
        };
        if record.placed.length > 0 {
            let place = match record.kind {
                SegmentKind::File => Place::File { segment: record.segment, offset: 0 },
                SegmentKind::Pack => Place::Pack {
                    segment: record.segment,
                    offset: record.placed.offset,
                    check: record.placed.check.clone(),
                },
            };
            let extent = Extent { file_offset: origin.file_offset, length: record.placed.length, place };
            if extents.last().is_none_or(|before| before.end() <= extent.file_offset) {
                extents.push(extent);
            } else {
                extents = extents::overlay(&extents, vec![extent]);
            }
        }
        // A file segment grows behind its header: it is as long as it is.
        size = origin.file_bytes.max(end);
        // What a truncate cut off before this write must not come back with it.
        if extents.last().is_some_and(|before| before.end() > size) {
            extents = extents::truncate(&extents, size);
        }
        if !origin.path.is_empty() {
            path = meant_path(&origin.path);
        }
        last = Some(record);
    }
    last.map(|last| Rebuilt { ino, path, extents, size, last })
}

/// The client and the importer write a large file under a temporary name that ends in the one that is meant:
/// `headrace.model.temporary`.
fn meant_path(path: &[u8]) -> Vec<u8> {
    let (folder, name) =
        path.split_at(path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1));
    let meant = [(&b".headrace-partial-"[..], 2), (b".headrace-import-", 1)].into_iter().find_map(
        |(kind, numbers)| {
            let mut rest = name.strip_prefix(kind)?;
            for _ in 0..numbers {
                let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
                rest = rest[digits..].strip_prefix(b"-").filter(|rest| digits > 0 && !rest.is_empty())?;
            }
            Some(rest)
        },
    );
    [folder, meant.unwrap_or(name)].concat()
}

fn name_all(rebuilt: Vec<Option<Rebuilt>>, mut notes: Vec<String>) -> Found {
    let next_ino = rebuilt.iter().flatten().map(|file| file.ino.0).max().unwrap_or(Ino::ROOT.0) + 1;
    let mut by_path: HashMap<Vec<u8>, Vec<Rebuilt>> = HashMap::new();
    for file in rebuilt.into_iter().flatten() {
        by_path.entry(file.path.clone()).or_default().push(file);
    }
    let at = |file: &Rebuilt| (file.last.segment, file.last.placed.offset);
    let mut groups: Vec<Vec<Rebuilt>> = by_path
        .into_values()
        .map(|mut rivals| {
            rivals.sort_by_key(at);
            in_order(rivals, |file| &file.last)
        })
        .collect();
    // The newest first: where one path is a folder of another, it keeps its name too.
    groups.sort_by_key(|group| std::cmp::Reverse(group.last().map(at)));
    let root = Directory {
        ino: Ino::ROOT,
        parent: 0,
        name: Vec::new(),
        count: DirDelta { changed: time::wall_now(), ..DirDelta::default() },
    };
    let mut tree = Tree { next_ino, directories: vec![root], places: HashMap::from([(Vec::new(), Some(0))]) };
    let mut files = Vec::new();
    let mut rescued = Rescued::default();
    for file in groups.into_iter().flat_map(|group| group.into_iter().rev()) {
        let Some((parent, name)) = tree.place(&file.path, file.ino) else {
            // Nobody but us makes names there.
            notes.push(format!("inode {} cannot be named: left out", file.ino));
            continue;
        };
        if name != file.path {
            notes.push(match &file.path[..] {
                b"" => format!("{}: no segment knows its path", shown(&name)),
                path => format!(
                    "{}: its path was {}, which a newer file has or which cannot be used",
                    shown(&name),
                    shown(path)
                ),
            });
        }
        rescued.files += 1;
        rescued.bytes += file.size;
        let leaf = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
        files.push(File {
            ino: file.ino,
            parent,
            name: leaf,
            extents: file.extents,
            size: file.size,
            last: file.last.origin,
        });
    }
    let untold = notes.len().saturating_sub(NOTES_MAX);
    notes.truncate(NOTES_MAX);
    if untold > 0 {
        notes.push(format!("{untold} more of the same kind"));
    }
    rescued.notes = notes;
    Found { files, directories: tree.directories, next_ino: tree.next_ino, rescued }
}

struct Tree {
    next_ino: u64,
    directories: Vec<Directory>,
    /// By path: which directory it is, or a file (None).
    places: HashMap<Vec<u8>, Option<usize>>,
}

impl Tree {
    /// Takes the first name that can be had. Gives its directory, and the whole path.
    fn place(&mut self, path: &[u8], ino: Ino) -> Option<(usize, Vec<u8>)> {
        let beside = [path, format!(".ino-{ino}").as_bytes()].concat();
        let apart = [UNNAMED, format!("/ino-{ino}").as_bytes()].concat();
        let again = [UNNAMED, format!("-{ino}/ino-{ino}").as_bytes()].concat();
        [path.to_vec(), beside, apart, again].into_iter().find_map(|name| {
            let parent = (!path.is_empty() || name.starts_with(UNNAMED)).then(|| self.take(&name))??;
            Some((parent, name))
        })
    }

    fn take(&mut self, path: &[u8]) -> Option<usize> {
        if self.places.contains_key(path) || path.split(|byte| *byte == b'/').next() == Some(FOLDER_NAME) {
            return None;
        }
        let slashes = || path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        // Before a folder is made for it.
        if path.split(|byte| *byte == b'/').any(|name| check_name(name).is_err())
            || slashes().any(|slash| self.places.get(&path[..slash]) == Some(&None))
        {
            return None;
        }
        let mut parent = 0;
        let mut start = 0;
        for slash in slashes() {
            parent = match self.places.get(&path[..slash]) {
                Some(Some(directory)) => *directory,
                _ => self.make(parent, &path[start..slash], &path[..slash]),
            };
            start = slash + 1;
        }
        self.directories[parent].count.entries += 1;
        self.places.insert(path.to_vec(), None);
        Some(parent)
    }

    fn make(&mut self, parent: usize, name: &[u8], path: &[u8]) -> usize {
        let count = &mut self.directories[parent].count;
        count.entries += 1;
        count.subdirectories += 1;
        let changed = count.changed;
        self.directories.push(Directory {
            ino: Ino(self.next_ino),
            parent,
            name: name.to_vec(),
            count: DirDelta { changed, ..DirDelta::default() },
        });
        self.next_ino += 1;
        let directory = self.directories.len() - 1;
        self.places.insert(path.to_vec(), Some(directory));
        directory
    }
}

impl Found {
    /// Fills a new store, which holds an empty root.
    pub fn fill(self, store: &dyn MetaStore, root: &Inode) -> Result<Rescued> {
        let now = root.ctime;
        let inos: Vec<Ino> = self.directories.iter().map(|directory| directory.ino).collect();
        let mut writes = vec![Write::Put(key::next_inode(), encode_number(self.next_ino))];
        for (index, directory) in self.directories.iter().enumerate() {
            let parent = inos[directory.parent];
            writes.push(Write::Put(key::delta(directory.ino, NODE), directory.count.encode()));
            if index > 0 {
                let inode = Inode { parent, ..root.clone() };
                let dentry = Dentry { ino: directory.ino, kind: FileKind::Directory };
                writes.push(Write::Put(key::inode(directory.ino), inode.encode()));
                writes.push(Write::Put(key::alive(directory.ino), Vec::new()));
                writes.push(Write::Put(key::dentry(parent, &directory.name), dentry.encode()));
            }
            commit_if_full(store, &mut writes)?;
        }
        for file in &self.files {
            let parent = inos[file.parent];
            let inode = inode_of(file, parent, root, now);
            if inode.content == Content::Regions {
                writes.extend(region_writes(file.ino, &[], &file.extents));
            }
            let dentry = Dentry { ino: file.ino, kind: FileKind::File };
            writes.push(Write::Put(key::inode(file.ino), inode.encode()));
            writes.push(Write::Put(key::dentry(parent, &file.name), dentry.encode()));
            commit_if_full(store, &mut writes)?;
        }
        must_commit(store, Commit { preconditions: Vec::new(), writes })?;
        Ok(self.rescued)
    }
}

fn inode_of(file: &File, parent: Ino, root: &Inode, now: Timestamp) -> Inode {
    Inode {
        kind: FileKind::File,
        mode: file.last.mode & MODE_MASK,
        uid: file.last.uid,
        gid: file.last.gid,
        nlink: 1,
        size: file.size,
        atime: file.last.mtime,
        mtime: file.last.mtime,
        ctime: now,
        btime: file.last.mtime,
        parent,
        content: content_of(&file.extents),
        ..root.clone()
    }
}

fn commit_if_full(store: &dyn MetaStore, writes: &mut Vec<Write>) -> Result<()> {
    if writes.len() < COMMIT_ROWS {
        return Ok(());
    }
    must_commit(store, Commit { preconditions: Vec::new(), writes: std::mem::take(writes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_end_in_the_one_that_is_meant() {
        for (path, meant) in [
            (&b"a/.headrace-partial-77-0-b-1"[..], &b"a/b-1"[..]),
            (b".headrace-import-12-c", b"c"),
            (b"a/.headrace-import-12", b"a/.headrace-import-12"),
            (b"a/.headrace-import-12-", b"a/.headrace-import-12-"),
            (b"a/.headrace-partial-7-x", b"a/.headrace-partial-7-x"),
            (b"a/.headrace-import--x", b"a/.headrace-import--x"),
            (b".headrace-import-1-/b", b".headrace-import-1-/b"),
            (b"", b""),
        ] {
            assert_eq!(meant_path(path), meant);
        }
    }
}
