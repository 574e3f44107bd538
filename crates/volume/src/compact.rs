//! Writes packs anew that have become mostly dead or were small from the start, so that the collector can take them:
//! space comes back, and a volume that was filled by many fsyncs is not left in as many objects.
//!
//! A survey looks at every extent of the present once (about a second for a million files), and at the size of every
//! pack. What a snapshot or a sealed view names stays where it is: moving it would free nothing. A pack that is chosen
//! is brought to flash, and its live records go into the open pack like bytes that were just written: appended, synced,
//! committed one inode at a time under its lock. A crash in between leaves both places valid. The pack itself goes when
//! nothing names it any more, the last backup included.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use headrace_base::{Ino, MIB, Result, SegmentId, crash, thread};
use headrace_format::BLOCK;
use headrace_format::key;
use headrace_format::message;
use headrace_format::record::{Extent, Place, SegmentKind};
use headrace_meta::At;

use crate::flush::Leaving;
use crate::versions::named_versions;
use crate::volume::{Volume, each_extents};

const EVERY: Duration = Duration::from_secs(600);
/// A pack below this is small: a quarter of what is fetched in one request.
const SMALL_BYTES: u64 = 2 * MIB;
/// So many small ones are worth a rewrite.
const SMALL_PACKS_MIN: usize = 16;
/// Rewritten at most per survey: background work is not to be felt.
const REWRITE_BYTES_MAX: u64 = 512 * MIB;
/// What a record costs beside its payload: its descriptor, generously, so that a pack of tiny files never looks dead.
const RECORD_BYTES: u64 = 96;

#[derive(Debug, Default)]
pub struct Compaction {
    stop: Mutex<bool>,
    wake: Condvar,
    /// One at a time.
    working: Mutex<()>,
}

impl Compaction {
    pub fn stop(&self) {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.wake.notify_all();
    }

    fn is_stopped(&self) -> bool {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: told to stop.
    fn rest(&self, how_long: Duration) -> bool {
        let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        let (stop, _) = self
            .wake
            .wait_timeout_while(stop, how_long, |stop| !*stop)
            .unwrap_or_else(PoisonError::into_inner);
        !*stop
    }
}

/// Starts the thread. It holds the volume only while it works.
pub fn start(volume: &Arc<Volume>) -> Result<std::thread::JoinHandle<()>> {
    let compaction = Arc::clone(&volume.compaction);
    let volume = Arc::downgrade(volume);
    thread::spawn("compact", move || {
        while compaction.rest(EVERY) {
            let Some(volume) = volume.upgrade() else { return };
            match volume.compact() {
                Ok(done) if done.packs > 0 => {
                    tracing::info!(packs = done.packs, bytes = done.bytes, "packs were written anew");
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "packs could not be written anew; later again"),
            }
        }
    })
}

/// What a record takes of a pack.
fn footprint(length: u64) -> u64 {
    let aligned =
        if length < BLOCK / 2 { length.next_multiple_of(64) } else { length.next_multiple_of(BLOCK) };
    aligned + RECORD_BYTES
}

impl Volume {
    /// Looks at all packs and writes anew what is worth it. Gives what it wrote.
    pub fn compact(&self) -> Result<message::Compacted> {
        let _one = self.compaction.working.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = message::Compacted { packs: 0, bytes: 0 };
        for segment in self.choose()? {
            if self.compaction.is_stopped() || done.bytes >= REWRITE_BYTES_MAX {
                break;
            }
            if let Some(remote) = &self.segments.remote {
                remote.bring_whole(segment, SegmentKind::Pack)?;
            }
            let records = self.segments.records(segment, SegmentKind::Pack)?;
            let bytes = records.iter().map(|(_, placed)| placed.length).sum::<u64>();
            let paths: HashMap<Ino, Vec<u8>> =
                records.into_iter().map(|(origin, _)| (origin.ino, origin.path)).collect();
            self.flusher.empty_pack(&Leaving { segment, paths })?;
            crash::point("after-compaction");
            // Normally told by the commits; a pack that nothing named from the start was not.
            self.collector.note_segments([(segment, SegmentKind::Pack)]);
            done.packs += 1;
            done.bytes += bytes;
        }
        Ok(done)
    }

    fn choose(&self) -> Result<Vec<SegmentId>> {
        let mut live: HashMap<SegmentId, u64> = HashMap::new();
        each_extents(&*self.store, &[At::Latest], &mut |extents: &[Extent]| {
            for extent in extents {
                if let Place::Pack { segment, .. } = extent.place {
                    *live.entry(segment).or_default() += footprint(extent.length);
                }
            }
        })?;
        let mut kept: HashSet<SegmentId> = HashSet::new();
        let named: Vec<At> = named_versions(&*self.store)?.into_iter().map(At::Version).collect();
        each_extents(&*self.store, &named, &mut |extents: &[Extent]| {
            kept.extend(extents.iter().filter_map(|extent| match extent.place {
                Place::Pack { segment, .. } => Some(segment),
                _ => None,
            }));
        })?;
        let packs: Vec<(SegmentId, u64)> = match &self.segments.remote {
            Some(remote) => {
                let listed = remote.list()?.into_iter();
                listed
                    .filter(|listed| listed.kind == SegmentKind::Pack)
                    .map(|listed| (listed.segment, listed.bytes))
                    .collect()
            }
            None => {
                let files = self.flash.list()?.into_iter();
                files
                    .filter(|file| file.kind == SegmentKind::Pack)
                    .map(|file| (file.segment, file.bytes))
                    .collect()
            }
        };
        let (mut chosen, mut small) = (Vec::new(), Vec::new());
        for (segment, bytes) in packs {
            if kept.contains(&segment) || self.store.get(&key::pending(segment), At::Latest)?.is_some() {
                continue;
            }
            match live.get(&segment) {
                // Nothing to move: the collector looks whether somebody else names it.
                None => self.collector.note_segments([(segment, SegmentKind::Pack)]),
                Some(live) if live * 2 < bytes => chosen.push(segment),
                Some(_) if bytes < SMALL_BYTES => small.push(segment),
                Some(_) => {}
            }
        }
        if small.len() >= SMALL_PACKS_MIN {
            chosen.extend(small);
        }
        // In the order in which they were written, which is the order in which they will be read.
        chosen.sort_unstable();
        Ok(chosen)
    }
}
