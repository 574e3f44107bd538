//! Gives back segments that nothing can reach. Never by age.
//!
//! A segment's bytes can be named only by the inodes whose records it holds: its own descriptors say which. So a
//! segment that lost a reference is looked at one inode at a time, in the present and in every readable version,
//! and removed when none of them names it. Announced segments are left alone; a closed one gets no new names.
//! Versions are listed before and after the look at the present: one that ended in between shows what the present
//! showed at its end, and one from which the present was restored was readable before.
//! A reader that had copied extents of a removed segment finds it gone and looks again (`file`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace_base::{Error, Ino, Kind, Result, SegmentId, Version, crash};
use headrace_format::record::{Content, Extent, Place, SegmentKind};
use headrace_format::{BLOCK, key};
use headrace_meta::{At, MetaStore};

use crate::live::{LiveTable, load_extents, load_inode};
use crate::segments::Segments;
use crate::versions::{Pinned, recorded_versions};
use crate::volume::named_ends;

/// Removals come in bursts; one look serves a whole burst.
const PAUSE: Duration = Duration::from_secs(2);

type Suspects = HashMap<SegmentId, SegmentKind>;

#[derive(Debug)]
pub struct Collector {
    store: Arc<dyn MetaStore>,
    segments: Arc<Segments>,
    pinned: Arc<Pinned>,
    /// Segments that lost a reference since they were last looked at.
    suspects: Mutex<Suspects>,
    /// Suspects that were still announced: looked at again with the next burst, or when they are clean.
    open: Mutex<Suspects>,
    wake: Condvar,
    stop: AtomicBool,
    /// A crash may have left objects that nothing names.
    crashed: AtomicBool,
}

impl Collector {
    pub fn new(store: Arc<dyn MetaStore>, segments: Arc<Segments>, pinned: Arc<Pinned>) -> Collector {
        Collector {
            store,
            segments,
            pinned,
            suspects: Mutex::default(),
            open: Mutex::default(),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            crashed: AtomicBool::new(false),
        }
    }

    /// These extents are named once less.
    pub fn note_extents<'a>(&self, extents: impl IntoIterator<Item = &'a Extent>) {
        self.note_segments(
            extents
                .into_iter()
                .filter_map(|extent| Some((segment_of(&extent.place)?, kind_of(&extent.place)))),
        );
    }

    pub fn note_segments(&self, segments: impl IntoIterator<Item = (SegmentId, SegmentKind)>) {
        let mut suspects = self.lock();
        let before = suspects.len();
        suspects.extend(segments);
        if suspects.len() > before {
            suspects.extend(self.open.lock().unwrap_or_else(PoisonError::into_inner).drain());
            self.wake.notify_one();
        }
    }

    /// An engine died: the object tier is looked through once.
    pub fn note_crash(&self) {
        self.crashed.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Removes objects that no version names and nobody has announced. The look at all names is only a first one:
    /// names change meanwhile, so what it did not see is looked at as every other suspect.
    fn sweep(&self, live: &Arc<LiveTable>) -> Result<u64> {
        let Some(remote) = &self.segments.remote else { return Ok(0) };
        let listed = remote.list()?;
        let named = named_ends(&*self.store)?;
        let suspects = listed.into_iter().map(|file| (file.segment, file.kind));
        let suspects = suspects.filter(|(segment, _)| !named.contains_key(segment));
        self.collect(live, suspects.collect())
    }

    /// A segment's announcement was withdrawn. If it was suspect before, it can be judged now.
    pub fn note_clean(&self, segment: SegmentId) {
        let was_open = self.open.lock().unwrap_or_else(PoisonError::into_inner).remove_entry(&segment);
        self.note_segments(was_open);
    }

    pub fn run(&self, live: &Arc<LiveTable>) {
        while !self.stop.load(Ordering::Acquire) {
            let suspects = {
                let mut suspects = self.lock();
                if suspects.is_empty() {
                    suspects = self
                        .wake
                        .wait_timeout(suspects, PAUSE * 10)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                // Let the burst end.
                if !suspects.is_empty() && !self.stop.load(Ordering::Acquire) {
                    suspects =
                        self.wake.wait_timeout(suspects, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
                }
                std::mem::take(&mut *suspects)
            };
            if self.crashed.load(Ordering::Acquire) && !self.stop.load(Ordering::Acquire) {
                match self.sweep(live) {
                    Ok(removed) => {
                        self.crashed.store(false, Ordering::Release);
                        if removed > 0 {
                            tracing::info!(removed, "removed objects that a crash had left");
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the object tier could not be looked through; later again")
                    }
                }
            }
            if suspects.is_empty() || self.stop.load(Ordering::Acquire) {
                continue;
            }
            match self.collect(live, suspects) {
                Ok(0) => {}
                Ok(removed) => tracing::info!(removed, "gave back segments that nothing names"),
                Err(error) => {
                    tracing::error!(%error, "the collector stopped half-way; it goes on with the next removal")
                }
            }
        }
    }

    /// Looks at each suspect; gives how many were removed.
    pub fn collect(&self, live: &Arc<LiveTable>, suspects: Suspects) -> Result<u64> {
        let mut removed = 0;
        // Without an object tier what is not on flash is gone already.
        let files: HashMap<SegmentId, u64> =
            self.segments.flash.list()?.into_iter().map(|file| (file.segment, file.bytes)).collect();
        for (segment, kind) in suspects {
            if self.stop.load(Ordering::Acquire) {
                break;
            }
            let bytes = files.get(&segment);
            if bytes.is_none() && self.segments.remote.is_none() {
                continue;
            }
            if self.store.get(&key::pending(segment), At::Latest)?.is_some() {
                self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(segment, kind);
                continue;
            }
            match self.is_named(live, segment, kind) {
                Ok(true) => {}
                Ok(false) => {
                    self.remove(segment, kind);
                    removed += 1;
                }
                // Cut short before its first record: nothing can ever have named a byte of it.
                Err(error) if error.kind() == Kind::Corrupt && bytes.is_some_and(|bytes| *bytes <= BLOCK) => {
                    tracing::info!(%segment, %error, "an unfinished segment is removed");
                    self.remove(segment, kind);
                    removed += 1;
                }
                // It was removed already.
                Err(error) if error.kind() == Kind::NotFound => {}
                // The object tier cannot be asked now.
                Err(error) if error.kind() == Kind::Unavailable => self.later(segment, kind, &error),
                // What it holds is not known: it stays, and does not keep others from being looked at.
                Err(error) => {
                    tracing::error!(%segment, %error, "it is not known what names this segment: it stays");
                }
            }
        }
        Ok(removed)
    }

    fn remove(&self, segment: SegmentId, kind: SegmentKind) {
        crash::point("before-collect");
        if let Err(error) = self.check_backup().and_then(|()| self.segments.remove(segment, kind)) {
            self.later(segment, kind, &error);
        }
    }

    /// A folder that took a volume over has only the backup that it was made from until its own first one: what that
    /// names stays.
    fn check_backup(&self) -> Result<()> {
        let adopted = self.segments.remote.as_ref().is_some_and(|remote| remote.owner().epoch > 0);
        if adopted && self.store.get(&key::backup(), At::Latest)?.is_none() {
            return Err(Error::new(Kind::Unavailable, "the first backup of this folder is not complete yet"));
        }
        Ok(())
    }

    /// Looks at it again with the next burst.
    fn later(&self, segment: SegmentId, kind: SegmentKind, error: &Error) {
        tracing::warn!(%segment, %error, "a segment could not be collected now; it is tried again");
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(segment, kind);
    }

    /// Ended versions that are kept, or read at this moment.
    fn readable(&self) -> Result<Vec<Version>> {
        let mut versions = recorded_versions(&*self.store)?;
        versions.extend(self.pinned.versions());
        Ok(versions)
    }

    fn is_named(&self, live: &Arc<LiveTable>, segment: SegmentId, kind: SegmentKind) -> Result<bool> {
        let inodes: HashSet<Ino> =
            self.segments.records(segment, kind)?.into_iter().map(|(origin, _)| origin.ino).collect();
        let names =
            |extents: &[Extent]| extents.iter().any(|extent| segment_of(&extent.place) == Some(segment));
        let before = self.readable()?;
        for ino in &inodes {
            // Under the inode's lock: its extents cannot change form between two reads.
            match live.pin(&*self.store, *ino) {
                Ok(pin) => {
                    let state = pin.lock();
                    if !state.removed && (names(&state.extents) || names(&state.committed_extents)) {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == Kind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let versions: BTreeSet<Version> = before.into_iter().chain(self.readable()?).collect();
        for ino in &inodes {
            // Extents in the inode's row: versions that see the same row see the same extents.
            let mut seen = None;
            let stored = self.store.stored_versions(&key::inode(*ino))?;
            for version in &versions {
                let row = stored.iter().rev().find(|stored| *stored <= version);
                if row.is_none() || row == seen {
                    continue;
                }
                let at = At::Version(*version);
                let Some(inode) = load_inode(&*self.store, *ino, at)? else { continue };
                if names(&load_extents(&*self.store, *ino, &inode, at)?) {
                    return Ok(true);
                }
                // Those in rows of their own may differ under one row of the inode, after a restore.
                if inode.content != Content::Regions {
                    seen = row;
                }
            }
        }
        Ok(false)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Suspects> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn segment_of(place: &Place) -> Option<SegmentId> {
    match place {
        Place::Pack { segment, .. } | Place::File { segment, .. } => Some(*segment),
        Place::Inline { .. } => None,
    }
}

fn kind_of(place: &Place) -> SegmentKind {
    if matches!(place, Place::File { .. }) { SegmentKind::File } else { SegmentKind::Pack }
}
