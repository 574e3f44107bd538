//! The open pack: announced before its first byte, shared by whoever flushes, closed at 64 MiB.
//!
//! Its announcement stays in the store at least until it is closed (`announce`), and every commit that names it
//! requires the announcement; so a commit can never name a pack that recovery or the collector has taken away.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use headrace_base::{Error, MIB, Result, SegmentId, time};
use headrace_flash::{Flash, PackRecord, PackSyncer, PackWriter, Placed};
use headrace_format::record::SegmentKind;
use headrace_meta::{Commit, CommitError, Durability, MetaStore};

use crate::announce::Announcements;
use crate::room::Room;

/// Large enough that one object per pack is cheap to store and to fetch, small enough to fetch whole.
pub const PACK_BYTES: u64 = 64 * MIB;

/// A pack that may still grow. The last one who holds it closes it.
#[derive(Debug)]
pub struct OpenPack {
    pub segment: SegmentId,
    opened: Instant,
    writer: Mutex<PackWriter>,
    syncer: PackSyncer,
    /// Bytes that an fdatasync has covered. Whoever syncs holds it: those who wait find the work done.
    synced: Mutex<u64>,
}

impl OpenPack {
    /// Makes everything appended so far durable; callers at the same time share the work, and others may
    /// append meanwhile.
    pub fn sync(&self) -> Result<()> {
        let wanted = self.lock().bytes();
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        if *synced < wanted {
            let covered = self.lock().bytes();
            self.syncer.sync()?;
            *synced = covered;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, PackWriter> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub struct Packs {
    flash: Arc<Flash>,
    announcements: Arc<Announcements>,
    room: Arc<Room>,
    bytes_max: u64,
    current: Mutex<Option<Arc<OpenPack>>>,
}

impl Packs {
    pub fn new(flash: Arc<Flash>, announcements: Arc<Announcements>, room: Arc<Room>) -> Packs {
        let bytes_max = room.segment_bytes_max().min(PACK_BYTES);
        Packs { flash, announcements, room, bytes_max, current: Mutex::new(None) }
    }

    /// Appends one frame. The pack must be given back with `release` once the records are committed.
    pub fn append(&self, records: &[PackRecord<'_>]) -> Result<(Arc<OpenPack>, Vec<Placed>)> {
        let bytes = records.iter().map(PackRecord::length).sum();
        if self.room.is_near(bytes) {
            // What is open cannot be uploaded, and so makes no room.
            self.close();
        }
        self.room.check_bytes(bytes)?;
        let mut current = self.lock();
        let pack = match current.as_ref() {
            Some(pack) => Arc::clone(pack),
            None => {
                let segment = self.announcements.announce(SegmentKind::Pack)?;
                let writer = match self.flash.create_pack(segment) {
                    Ok(writer) => writer,
                    Err(error) => {
                        let _ = self.flash.remove(segment, SegmentKind::Pack);
                        self.announcements.dropped(segment, &error);
                        return Err(error);
                    }
                };
                let pack = Arc::new(OpenPack {
                    segment,
                    opened: time::monotonic_now(),
                    syncer: writer.syncer(),
                    writer: Mutex::new(writer),
                    synced: Mutex::new(0),
                });
                *current = Some(Arc::clone(&pack));
                pack
            }
        };
        let mut writer = pack.lock();
        let placed = writer.append(records);
        let full = writer.bytes() >= self.bytes_max;
        self.announcements.grown(pack.segment, writer.bytes());
        drop(writer);
        let retired = if full || placed.is_err() { current.take() } else { None };
        drop(current);
        headrace_base::crash::point("after-append");
        if let Some(retired) = retired {
            self.release(retired);
        }
        match placed {
            Ok(placed) => Ok((pack, placed)),
            Err(error) => {
                self.release(pack);
                Err(error)
            }
        }
    }

    /// The last holder closes the pack. A failure leaves it to recovery at the next start.
    pub fn release(&self, pack: Arc<OpenPack>) {
        if let Some(pack) = Arc::into_inner(pack) {
            let segment = pack.segment;
            let writer = pack.writer.into_inner().unwrap_or_else(PoisonError::into_inner);
            let bytes = writer.bytes();
            self.announcements.closed(segment, SegmentKind::Pack, bytes, writer.close());
        }
    }

    /// Closes the current pack if it is one of these: what is in it is to be uploaded.
    pub fn cut(&self, segments: &[SegmentId]) {
        self.cut_if(|pack| segments.contains(&pack.segment));
    }

    /// Closes the current pack if it has been open for so long.
    pub fn cut_older(&self, age: Duration) {
        let now = time::monotonic_now();
        self.cut_if(|pack| now.duration_since(pack.opened) >= age);
    }

    fn cut_if(&self, due: impl Fn(&OpenPack) -> bool) {
        let retired = {
            let mut current = self.lock();
            if current.as_deref().is_some_and(due) { current.take() } else { None }
        };
        if let Some(pack) = retired {
            self.release(pack);
        }
    }

    /// Closes the current pack, if there is one and nobody else uses it.
    pub fn close(&self) {
        let current = self.lock().take();
        if let Some(pack) = current {
            self.release(pack);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<OpenPack>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For commits whose preconditions only a fault of ours can break.
pub fn must_commit(store: &dyn MetaStore, commit: Commit) -> Result<()> {
    no_conflict(store.commit(commit, Durability::Relaxed)).map(drop)
}

/// The outcome of a commit or a seal whose preconditions only a fault of ours can break.
pub fn no_conflict<T>(outcome: Result<T, CommitError>) -> Result<T> {
    outcome.map_err(|error| match error {
        CommitError::Failed(error) => error,
        CommitError::Conflict(key) => Error::internal(format!(
            "a commit met an unexpected state of key {:?}",
            key.escape_ascii().to_string()
        )),
    })
}
