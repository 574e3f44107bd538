//! Checks that a volume is whole: names, links, extents, segments on flash and in the object tier. Changes nothing, and
//! runs beside everything else: what changes meanwhile is looked at a second time before it is called a problem.
//!
//! 1. Every name leads to an inode of its kind; every file has as many names as its link count says.
//! 2. Every segment that the present or a kept version names is there, and long enough; with an object tier, there too
//!    (what is dirty is not yet).
//! 3. Deep: every record of those segments is read, from the object tier where it is not on flash, and compared with its
//!    checksums. That fetches all of the volume.
//!
//! Segments that nothing names are counted; they are the collector's business and no problem.

use std::collections::{HashMap, HashSet};

use headrace_base::{Ino, Kind, Result, SegmentId};
use headrace_format::key;
use headrace_format::message::FsckReport;
use headrace_format::record::{Dentry, Extent, FileKind, Inode, Place, SegmentKind};
use headrace_meta::At;

use crate::live::load_inode;
use crate::namespace::shown;
use crate::segments::Fetch;
use crate::versions::recorded_versions;
use crate::volume::{Volume, each_extents};

const PAGE_ROWS: usize = 10_000;
/// Problems told in words; more are only counted.
const TOLD_MAX: usize = 1000;
/// Records are read in pieces of this size.
const PIECE_BYTES: u64 = 4 << 20;

/// What is known of a segment that something names.
struct Named {
    kind: SegmentKind,
    end: u64,
}

impl Volume {
    /// Looks at everything. `deep`: reads every byte too.
    pub fn fsck(&self, deep: bool) -> Result<FsckReport> {
        let mut report = FsckReport::default();
        self.flusher.flush_all()?;
        self.check_names(&mut report)?;
        let named = self.check_segments(&mut report)?;
        if deep {
            for (segment, named) in &named {
                self.check_records(&mut report, *segment, named.kind)?;
            }
        }
        Ok(report)
    }

    fn check_names(&self, report: &mut FsckReport) -> Result<()> {
        let mut links: HashMap<Ino, u32> = HashMap::new();
        let mut lost: Vec<(Ino, Vec<u8>)> = Vec::new();
        self.each_row(b"e", |key, value| {
            let dentry = Dentry::decode(value)?;
            *links.entry(dentry.ino).or_default() += 1;
            let inode = load_inode(&*self.store, dentry.ino, At::Latest)?;
            if inode.is_none_or(|inode| inode.kind != dentry.kind) {
                lost.push((key::ino_of(key).unwrap_or(Ino::ROOT), key::name_of(key).to_vec()));
            }
            report.names += 1;
            Ok(())
        })?;
        for (parent, name) in lost {
            // Removed or replaced since it was read?
            let Some(value) = self.store.get(&key::dentry(parent, &name), At::Latest)? else { continue };
            let dentry = Dentry::decode(&value)?;
            if load_inode(&*self.store, dentry.ino, At::Latest)?.is_none_or(|inode| inode.kind != dentry.kind)
            {
                tell(
                    report,
                    format!("{:?} in directory {parent} leads to no inode of its kind", shown(&name)),
                );
            }
        }
        let mut differing: Vec<Ino> = Vec::new();
        self.each_row(b"i", |key, value| {
            let inode = Inode::decode(value)?;
            let Some(ino) = key::ino_of(key) else { return Ok(()) };
            report.inodes += 1;
            if inode.kind != FileKind::Directory
                && inode.nlink > 0
                && links.get(&ino).copied().unwrap_or(0) != inode.nlink
            {
                differing.push(ino);
            }
            Ok(())
        })?;
        if differing.is_empty() {
            return Ok(());
        }
        // Linked, unlinked or renamed since: counted once more, these alone.
        let suspects: HashSet<Ino> = differing.into_iter().collect();
        let mut again: HashMap<Ino, u32> = suspects.iter().map(|ino| (*ino, 0)).collect();
        self.each_row(b"e", |_, value| {
            if let Some(count) = again.get_mut(&Dentry::decode(value)?.ino) {
                *count += 1;
            }
            Ok(())
        })?;
        for (ino, count) in again {
            match load_inode(&*self.store, ino, At::Latest)? {
                Some(inode) if inode.nlink > 0 && inode.nlink != count => {
                    tell(report, format!("inode {ino} has {count} names, its link count is {}", inode.nlink));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn each_row(&self, prefix: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
        let end = key::end_of(prefix);
        let mut start = prefix.to_vec();
        loop {
            let rows = self.store.scan(&start, &end, PAGE_ROWS, At::Latest)?;
            for (key, value) in &rows {
                each(key, value)?;
            }
            match rows.last() {
                Some((last, _)) if rows.len() == PAGE_ROWS => start = [last.as_slice(), &[0]].concat(),
                _ => return Ok(()),
            }
        }
    }

    fn named_segments(&self) -> Result<HashMap<SegmentId, Named>> {
        let mut named: HashMap<SegmentId, Named> = HashMap::new();
        let versions: Vec<At> =
            recorded_versions(&*self.store)?.into_iter().map(At::Version).chain([At::Latest]).collect();
        each_extents(&*self.store, &versions, &mut |extents: &[Extent]| {
            for extent in extents {
                let (segment, kind, offset) = match extent.place {
                    Place::Pack { segment, offset, .. } => (segment, SegmentKind::Pack, offset),
                    Place::File { segment, offset } => (segment, SegmentKind::File, offset),
                    Place::Inline { .. } => continue,
                };
                let named = named.entry(segment).or_insert(Named { kind, end: 0 });
                named.end = named.end.max(offset + extent.length);
            }
        })?;
        Ok(named)
    }

    fn check_segments(&self, report: &mut FsckReport) -> Result<HashMap<SegmentId, Named>> {
        let here: HashMap<SegmentId, u64> = self
            .flash
            .list()?
            .into_iter()
            .filter(|file| file.whole)
            .map(|file| (file.segment, file.bytes))
            .collect();
        let stored: Option<HashMap<SegmentId, u64>> = match &self.segments.remote {
            Some(remote) => Some(remote.list()?.into_iter().map(|file| (file.segment, file.bytes)).collect()),
            None => None,
        };
        // Listed first: what is named after this was not there to be listed.
        let named = self.named_segments()?;
        let mut missing = Vec::new();
        for (segment, named) in &named {
            let dirty = self.segments.remote.as_ref().is_some_and(|remote| remote.uploads.is_dirty(*segment));
            let bytes = match &stored {
                Some(stored) if !dirty => stored.get(segment),
                _ => here.get(segment),
            };
            if bytes.is_none_or(|bytes| *bytes < named.end) {
                missing.push((*segment, bytes.copied()));
            }
        }
        report.segments = named.len() as u64;
        let all = stored.as_ref().unwrap_or(&here);
        report.unnamed = all.keys().filter(|segment| !named.contains_key(segment)).count() as u64;
        if missing.is_empty() {
            return Ok(named);
        }
        // Written, uploaded or collected since the listing?
        let again = self.named_segments()?;
        for (segment, _) in missing {
            let Some(named) = again.get(&segment) else { continue };
            let bytes = match &self.segments.remote {
                Some(remote) if !remote.uploads.is_dirty(segment) => {
                    remote.stored_bytes(segment, named.kind)?
                }
                // A descriptor that is still open hides that the file has gone.
                _ if !self.flash.has(segment, named.kind) => None,
                _ => self.flash.whole(segment, named.kind).ok().map(|(_, bytes)| bytes),
            };
            match bytes {
                Some(bytes) if bytes >= named.end => {}
                Some(bytes) => {
                    tell(report, format!("segment {segment} has {bytes} bytes, files need {}", named.end))
                }
                None => tell(
                    report,
                    format!("segment {segment} is missing, files need {} bytes of it", named.end),
                ),
            }
        }
        Ok(again)
    }

    fn check_records(&self, report: &mut FsckReport, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        let records = match self.segments.records(segment, kind) {
            Ok(records) => records,
            Err(error) if error.kind() == Kind::Unavailable => return Err(error),
            Err(error) => {
                tell(report, format!("segment {segment} cannot be read: {error}"));
                return Ok(());
            }
        };
        let mut buffer = vec![0; PIECE_BYTES as usize];
        for (origin, placed) in records {
            let mut done = 0;
            while done < placed.length {
                let piece = (placed.length - done).min(PIECE_BYTES);
                let out = &mut buffer[..piece as usize];
                let at = placed.offset + done;
                let read = match kind {
                    SegmentKind::Pack => {
                        self.segments.read_pack(segment, at, &placed.check, out, Fetch::Wait)
                    }
                    SegmentKind::File => self.segments.read_file(segment, at, out, Fetch::Wait),
                };
                match read {
                    Ok(()) => report.verified_bytes += piece,
                    Err(error) if error.kind() == Kind::Unavailable => return Err(error),
                    Err(error) => {
                        tell(report, format!("{:?} (inode {}): {error}", shown(&origin.path), origin.ino));
                        break;
                    }
                }
                done += piece;
            }
        }
        Ok(())
    }
}

fn tell(report: &mut FsckReport, problem: String) {
    report.problems_count += 1;
    if report.problems.len() < TOLD_MAX {
        report.problems.push(problem);
    }
}
