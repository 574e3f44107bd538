//! The open pack: announced before its first byte, shared by whoever flushes, closed at 64 MiB.
//!
//! Its announcement stays in the store until it is closed, and every commit that names it requires the
//! announcement; so a commit can never name a pack that recovery or the collector has taken away.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headrace_base::{Error, MIB, Result, SegmentId, SessionId};
use headrace_flash::{Flash, PackRecord, PackSyncer, PackWriter, Placed};
use headrace_format::key;
use headrace_format::record::{Pending, SegmentKind};
use headrace_meta::{Commit, CommitError, Durability, MetaStore, Precondition, Write};

use crate::room::Room;

/// Large enough that one object per pack is cheap to store and to fetch, small enough to fetch whole.
pub const PACK_BYTES: u64 = 64 * MIB;

/// A pack that may still grow. The last one who holds it closes it.
#[derive(Debug)]
pub struct OpenPack {
    pub segment: SegmentId,
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
    store: Arc<dyn MetaStore>,
    session: SessionId,
    room: Arc<Room>,
    current: Mutex<Option<Arc<OpenPack>>>,
}

impl Packs {
    pub fn new(flash: Arc<Flash>, store: Arc<dyn MetaStore>, room: Arc<Room>) -> Packs {
        let session = store.session();
        Packs { flash, store, session, room, current: Mutex::new(None) }
    }

    /// Appends one frame. The pack must be given back with `release` once the records are committed.
    pub fn append(&self, records: &[PackRecord<'_>]) -> Result<(Arc<OpenPack>, Vec<Placed>)> {
        self.room.check_bytes(records.iter().map(PackRecord::length).sum())?;
        let mut current = self.lock();
        let pack = match current.as_ref() {
            Some(pack) => Arc::clone(pack),
            None => {
                let segment = SegmentId::generate();
                announce(&*self.store, segment, SegmentKind::Pack, self.session)?;
                headrace_base::crash::point("after-announce");
                let writer = match self.flash.create_pack(segment) {
                    Ok(writer) => writer,
                    Err(error) => {
                        // Nothing came of it. If even that cannot be said, recovery finds the announcement.
                        let _ = self.flash.remove(segment, SegmentKind::Pack);
                        let _ = withdraw(&*self.store, segment);
                        return Err(error);
                    }
                };
                let pack = Arc::new(OpenPack {
                    segment,
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
        let full = writer.bytes() >= PACK_BYTES;
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
            let closed = writer.close().and_then(|()| withdraw(&*self.store, segment));
            if let Err(error) = closed {
                tracing::error!(%segment, %error, "a pack could not be closed; the next start recovers it");
            }
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

/// Says that this session is about to write the segment.
pub fn announce(
    store: &dyn MetaStore,
    segment: SegmentId,
    kind: SegmentKind,
    session: SessionId,
) -> Result<()> {
    let pending = Pending { session, kind };
    let commit = Commit {
        preconditions: vec![Precondition::Absent(key::pending(segment))],
        writes: vec![Write::Put(key::pending(segment), pending.encode())],
    };
    must_commit(store, commit)
}

/// The segment is closed, or was abandoned: from now on only what names it keeps it.
pub fn withdraw(store: &dyn MetaStore, segment: SegmentId) -> Result<()> {
    must_commit(store, Commit { preconditions: vec![], writes: vec![Write::Delete(key::pending(segment))] })
}

/// For commits whose preconditions only a fault of ours can break.
pub fn must_commit(store: &dyn MetaStore, commit: Commit) -> Result<()> {
    match store.commit(commit, Durability::Relaxed) {
        Ok(_) => Ok(()),
        Err(CommitError::Failed(error)) => Err(error),
        Err(CommitError::Conflict(key)) => Err(Error::internal(format!(
            "a commit met an unexpected state of key {:?}",
            key.escape_ascii().to_string()
        ))),
    }
}
