//! The road of dirty bytes: into a segment, made durable, named by a metadata commit. In this order always, so
//! that a crash leaves garbage at worst and never a dangling name.
//!
//! 1. *take*: an inode's dirty ranges become `flushing` (still read), the inode is busy.
//! 2. *append*: many inodes' ranges go as one frame into the open pack; a large file that is written from its
//!    start goes into a file segment of its own.
//! 3. *apply*: extents point at the new bytes; the memory is free.
//! 4. *sync*: fdatasync of the segments.
//! 5. *commit*: the inode with its new extents, under the announcement of each segment it names.
//!
//! A writer that streams a large file does 1 to 3 itself (`spill`); everything else is done by fsync for one
//! inode and by the flusher's thread for all, at the latest `AGE_MAX` after the write. A failed append (disk
//! full) puts the bytes back: nothing is lost while the engine lives, writers get the error, and the flusher
//! tries again each second.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use headrace_base::{Error, Ino, Kind, MIB, Result, SegmentId, crash, time};
use headrace_flash::{FileSegmentWriter, Flash, PackRecord};
use headrace_format::key;
use headrace_format::record::{Extent, Place, SegmentKind};
use headrace_format::segment::Origin as SegmentOrigin;
use headrace_meta::{At, Commit, MetaStore, Precondition, Write};

use crate::announce::Announcements;
use crate::collect::{Collector, segment_of};
use crate::dirty::DirtyRanges;
use crate::extents;
use crate::gate::Gate;
use crate::live::{Live, LiveTable, Pin, State, region_writes};
use crate::namespace::Names;
use crate::packs::{OpenPack, Packs, must_commit};
use crate::placed::Placed;
use crate::room::Room;
use crate::segments::{Fetch, Segments, is_not_here};
use crate::uploads::Uploads;

/// A file that has this much to flush at once, from its start on, gets a segment of its own.
pub const FILE_SEGMENT_BYTES: u64 = 16 * MIB;
/// The same while dirty memory is short: many large files are written at once.
const FILE_SEGMENT_BYTES_PRESSED: u64 = 4 * MIB;
/// A streaming writer appends to its file segment in pieces of this size.
const SPILL_BYTES: u64 = 4 * MIB;
/// Payload of one frame: large enough that headers and fdatasync are shared, small enough to build in memory.
const FRAME_BYTES: u64 = 8 * MIB;
/// Dirty bytes wait this long for more to come. With the store's own delay this keeps the promise of 5 s.
const AGE_MAX: Duration = Duration::from_millis(1500);
const TICK: Duration = Duration::from_millis(500);
/// fsynced bytes up to this ride inside the metadata commit: one flush of the disk, not two.
pub const INLINE_BYTES_MAX: u64 = 64 << 10;
/// They move to a pack when an inode has this many pieces of them, or the volume this many inodes with some.
const INLINE_EXTENTS_MAX: usize = 16;
const INLINE_INODES_MAX: usize = 256;
const INLINE_AGE_MAX: Duration = Duration::from_secs(5);
/// A stretch of this length that has more extents is written again, in one piece, with the next bytes that go into
/// it: 256 extents per 64 MiB at most, and each byte of an append log is rewritten a bounded number of times.
const WINDOW_BYTES: u64 = 4 * MIB;
const WINDOW_EXTENTS_MAX: usize = 16;
/// With an object tier a segment stays open no longer than this, so that what was written is stored there within 5 s:
/// up to 2 s in memory, as long in the open segment, the rest for the upload. (A file segment is looked at when its
/// file is flushed, about 2 s after it was opened.)
const OPEN_AGE_MAX: Duration = Duration::from_secs(2);
const FILE_OPEN_AGE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Queue {
    /// Inodes that are ahead of the store, and since when.
    ahead: HashMap<Ino, (Pin, Instant)>,
    /// Inodes with bytes in the metadata store.
    inline: HashSet<Ino>,
    inline_since: Option<Instant>,
    pressed: bool,
    stop: bool,
}

#[derive(Debug)]
pub struct Flusher {
    store: Arc<dyn MetaStore>,
    flash: Arc<Flash>,
    segments: Arc<Segments>,
    announcements: Arc<Announcements>,
    live: Arc<LiveTable>,
    names: Arc<Names>,
    collector: Arc<Collector>,
    pub room: Arc<Room>,
    pub packs: Packs,
    pub gate: Gate,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Shared while bytes are put into the metadata store; exclusive while that must not be. Taken before any
    /// inode's lock.
    inline_gate: RwLock<()>,
    /// Shared while the flusher's thread works; exclusive while it must not.
    background: RwLock<()>,
}

/// One inode in the middle of its flush.
struct Taken {
    pin: Pin,
    ranges: Arc<DirtyRanges>,
    /// The size that goes with these bytes.
    size: u64,
    road: Road,
    extents: Vec<Extent>,
    segments: Vec<SegmentId>,
    writer: Option<FileSegmentWriter>,
    close_writer: bool,
    /// Its path as an earlier record has it.
    path: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Road {
    Pack,
    FileSegment,
}

/// What is written again with the dirty bytes although it is placed already.
#[derive(Clone, Copy, Debug)]
pub enum Again<'a> {
    Nothing,
    /// Bytes that ride in the metadata store.
    Inline,
    /// What lies in one pack, which is to go.
    Pack(&'a Leaving),
}

/// A pack whose live records move into the open one.
#[derive(Debug)]
pub struct Leaving {
    pub segment: SegmentId,
    /// The path of each inode in it as its record has it: for the new one, where nobody has looked it up since.
    pub paths: HashMap<Ino, Vec<u8>>,
}

impl Again<'_> {
    fn takes(&self, extent: &Extent) -> bool {
        match self {
            Again::Nothing => false,
            Again::Inline => matches!(extent.place, Place::Inline { .. }),
            Again::Pack(leaving) => segment_of(&extent.place) == Some(leaving.segment),
        }
    }
}

impl Flusher {
    pub fn new(
        segments: Arc<Segments>,
        announcements: Arc<Announcements>,
        live: Arc<LiveTable>,
        names: Arc<Names>,
        collector: Arc<Collector>,
        room: Arc<Room>,
        dirty_bytes_max: u64,
    ) -> Flusher {
        let flash = Arc::clone(&segments.flash);
        Flusher {
            packs: Packs::new(Arc::clone(&flash), Arc::clone(&announcements), Arc::clone(&room)),
            store: Arc::clone(&announcements.store),
            flash,
            segments,
            announcements,
            live,
            names,
            collector,
            room,
            gate: Gate::new(dirty_bytes_max),
            queue: Mutex::default(),
            wake: Condvar::new(),
            inline_gate: RwLock::new(()),
            background: RwLock::new(()),
        }
    }

    /// Keeps fsyncs from putting bytes into the metadata store until it is dropped: they wait.
    pub fn hold_inline(&self) -> RwLockWriteGuard<'_, ()> {
        self.inline_gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the flusher's thread from writing anything until it is dropped.
    pub fn hold_background(&self) -> RwLockWriteGuard<'_, ()> {
        self.background.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever holds it may put bytes into the metadata store.
    pub fn share_inline(&self) -> RwLockReadGuard<'_, ()> {
        self.inline_gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `bytes` more may be dirty. Full (or what else the flusher met) while it cannot write.
    pub fn admit(&self, bytes: u64) -> Result<()> {
        self.gate.acquire(bytes, || {
            self.lock().pressed = true;
            self.wake.notify_one();
        })
    }

    /// Queues an inode whose state is ahead of the store. The caller holds its lock.
    pub fn enqueue(&self, pin: &Pin, state: &mut State) {
        if !state.queued {
            state.queued = true;
            self.lock().ahead.insert(pin.ino, (pin.clone(), time::monotonic_now()));
        }
    }

    /// Leaves the inode in the queue if it is still ahead. Only here does one leave it, so that whoever flushes
    /// everything also waits for what another thread is flushing.
    fn requeue(&self, pin: &Pin, state: &mut State) {
        // With an object tier an open file segment is looked after until it is closed.
        let open = state.writer.is_some() && (state.writers == 0 || self.uploads().is_some());
        if state.is_ahead() || open {
            state.queued = true;
            self.lock().ahead.insert(pin.ino, (pin.clone(), time::monotonic_now()));
        } else if state.queued {
            state.queued = false;
            let left = self.lock().ahead.remove(&pin.ino);
            drop(left);
        }
    }

    /// Remembers that the inode has bytes in the metadata store, to be moved later.
    pub fn note_inline(&self, ino: Ino) {
        let mut queue = self.lock();
        queue.inline.insert(ino);
        queue.inline_since.get_or_insert_with(time::monotonic_now);
        if queue.inline.len() > INLINE_INODES_MAX {
            self.wake.notify_one();
        }
    }

    /// After a write: a large file that is written from its start goes into its own segment at once, by the
    /// writer itself; that is also what slows the writer down to the disk's speed.
    pub fn spill_if_streaming(&self, pin: &Pin) -> Result<()> {
        let taken = {
            let mut state = pin.lock();
            let bytes = state.dirty.bytes();
            let streams = match &state.writer {
                Some(writer) => bytes >= SPILL_BYTES && state.dirty.contiguous_from(writer.bytes()).is_some(),
                None => {
                    self.has_file_segments()
                        && bytes >= FILE_SEGMENT_BYTES
                        && starts_file_segment(&state, FILE_SEGMENT_BYTES)
                }
            };
            if !streams || state.busy {
                return Ok(());
            }
            self.take(pin, &mut state, Again::Nothing)?
        };
        let Some(taken) = taken else { return Ok(()) };
        let mut batch = vec![taken];
        let appended =
            self.append(&mut batch).map(|packs| packs.into_iter().for_each(|pack| self.packs.release(pack)));
        for taken in &mut batch {
            self.apply(taken, appended.is_ok());
            let mut state = taken.pin.lock();
            state.writer = taken.writer.take();
            taken.pin.finish(&mut state);
        }
        appended?;
        if pin.lock().writer.as_ref().is_some_and(|writer| self.is_outgrown(writer)) {
            self.end_segment(pin)?;
        }
        Ok(())
    }

    /// Whether large files get segments of their own. A flash tier that a few of them fill has packs alone, which end
    /// sooner.
    fn has_file_segments(&self) -> bool {
        self.room.segment_bytes_max() >= FILE_SEGMENT_BYTES
    }

    /// Commits what is in the inode's file segment and closes that, so that it can be uploaded. The file goes on in
    /// packs.
    fn end_segment(&self, pin: &Pin) -> Result<()> {
        let mut state = pin.lock_idle();
        let Some(mut writer) = state.writer.take() else { return Ok(()) };
        // What is behind the segment's end is still in memory, and not to be read as zeros after a crash.
        let size = state.committed_size.max(writer.bytes().min(state.inode.size));
        let extents = Arc::clone(&state.extents);
        let committed = writer.sync().and_then(|()| {
            self.commit_state(pin, &mut state, extents, size, Vec::new(), &[writer.segment()])
        });
        match committed {
            Ok(()) => {
                self.close_writer(writer);
                state.uncommitted |= state.inode.size != size;
            }
            Err(_) => state.writer = Some(writer),
        }
        self.requeue(pin, &mut state);
        committed
    }

    /// Closes all that is open when what is dirty fills the flash tier: only what is closed can be uploaded.
    fn make_room(&self) -> Result<()> {
        if !self.room.is_near(0) {
            return Ok(());
        }
        self.packs.close();
        self.streaming().iter().try_for_each(|pin| self.end_segment(pin))
    }

    /// Inodes with an open file segment.
    fn streaming(&self) -> Vec<Pin> {
        let mut pins = self.live.all();
        pins.retain(|pin| pin.lock().writer.is_some());
        pins
    }

    /// Everything of this inode is in a segment and committed when it returns; durable after `store.sync`.
    pub fn flush_inode(&self, pin: &Pin, again: Again<'_>) -> Result<()> {
        let taken = {
            let mut state = pin.lock_idle();
            self.take(pin, &mut state, again)?
        };
        match taken {
            Some(taken) => self.flush_taken(vec![taken]),
            None => Ok(()),
        }
    }

    fn uploads(&self) -> Option<&Arc<Uploads>> {
        self.announcements.uploads.as_ref()
    }

    /// fsync of one inode. What was written before the call is durable when it returns, and once the segments that it
    /// gives are clean.
    pub fn fsync(&self, pin: &Pin) -> Result<Vec<SegmentId>> {
        let road = {
            let _gate = self.share_inline();
            let mut state = pin.lock_idle();
            if let Some(message) = state.lost.take() {
                return Err(Error::internal(message));
            }
            if !state.is_ahead() {
                None
            } else if self.may_ride_inline(&state) {
                self.commit_inline(pin, &mut state)?;
                None
            } else {
                Some(self.take(pin, &mut state, Again::Inline)?)
            }
        };
        if let Some(Some(taken)) = road {
            self.flush_taken(vec![taken])?;
        }
        let waits = if self.uploads().is_some() { self.hurry_inode(pin)? } else { Vec::new() };
        self.store.sync()?;
        Ok(waits)
    }

    /// Has what this inode's extents name uploaded now. Gives the segments that are still dirty.
    fn hurry_inode(&self, pin: &Pin) -> Result<Vec<SegmentId>> {
        // What is still being streamed ends here: an open segment has no object.
        self.retire_writer(pin)?;
        let segments: HashSet<SegmentId> =
            pin.lock().committed_extents.iter().filter_map(|extent| segment_of(&extent.place)).collect();
        Ok(self.hurry(segments))
    }

    /// Has these segments uploaded now. Gives those that are dirty.
    pub fn hurry(&self, segments: impl IntoIterator<Item = SegmentId>) -> Vec<SegmentId> {
        let Some(uploads) = self.uploads() else { return Vec::new() };
        let waits = uploads.hurry(segments);
        if !waits.is_empty() && uploads.want_cut() {
            self.packs.cut(&waits);
        }
        waits
    }

    pub fn wait_clean(&self, segments: &[SegmentId]) -> Result<()> {
        self.uploads().map_or(Ok(()), |uploads| uploads.wait_clean(segments))
    }

    pub fn when_clean(&self, segments: &[SegmentId], done: impl FnOnce(Result<()>) + Send + 'static) {
        match self.uploads() {
            Some(uploads) => uploads.when_clean(segments, done),
            None => done(Ok(())),
        }
    }

    /// An upload is over: what gathered meanwhile goes next.
    pub fn upload_finished(&self, segment: SegmentId) {
        if self.uploads().is_some_and(|uploads| uploads.take_cut_wanted()) {
            self.packs.close();
        }
        self.collector.note_clean(segment);
    }

    /// sync(2): flushes all that is ahead, and gives the segments that it must wait for.
    pub fn sync_all(&self) -> Result<Vec<SegmentId>> {
        self.flush_all()?;
        let Some(uploads) = self.uploads() else { return Ok(Vec::new()) };
        self.streaming().iter().try_for_each(|pin| self.retire_writer(pin))?;
        let waits = uploads.hurry(uploads.all_dirty());
        self.packs.close();
        self.store.sync()?;
        Ok(waits)
    }

    fn may_ride_inline(&self, state: &State) -> bool {
        if self.uploads().is_some() {
            // Durable is what is in the object tier.
            return false;
        }
        let pieces =
            state.extents.iter().filter(|extent| matches!(extent.place, Place::Inline { .. })).count();
        state.writer.is_none() && state.dirty.bytes() <= INLINE_BYTES_MAX && pieces < INLINE_EXTENTS_MAX
    }

    /// Puts the dirty bytes into the metadata commit itself.
    fn commit_inline(&self, pin: &Pin, state: &mut State) -> Result<()> {
        if !state.dirty.is_empty() {
            self.room.check_bytes(state.dirty.bytes())?;
        }
        let next_slot = state
            .extents
            .iter()
            .filter_map(|extent| match extent.place {
                Place::Inline { slot, .. } => Some(slot + 1),
                _ => None,
            })
            .max()
            .unwrap_or(0);
        let mut writes = Vec::new();
        let mut new = Vec::new();
        for (slot, (offset, bytes)) in (next_slot..).zip(state.dirty.iter()) {
            writes.push(Write::Put(key::inline(pin.ino, slot), bytes.to_vec()));
            new.push(Extent {
                file_offset: offset,
                length: bytes.len() as u64,
                place: Place::Inline { slot, offset: 0 },
            });
        }
        let has_inline = !new.is_empty();
        let extents = Arc::new(extents::overlay(&state.extents, new));
        self.commit_state(pin, state, extents, state.inode.size, writes, &[])?;
        self.gate.release(state.dirty.bytes());
        state.dirty = DirtyRanges::default();
        if has_inline {
            self.note_inline(pin.ino);
        }
        Ok(())
    }

    /// Flushes all that is ahead, and makes the commits durable.
    pub fn flush_all(&self) -> Result<()> {
        let pins: Vec<Pin> = self.lock().ahead.values().map(|(pin, _)| pin.clone()).collect();
        self.flush_pins(pins, Again::Nothing, Wait::UntilIdle)?;
        self.store.sync()
    }

    /// Commits attributes or a new size that need no bytes written. The caller holds the lock.
    pub fn commit_state(
        &self,
        pin: &Live,
        state: &mut State,
        extents: Arc<Vec<Extent>>,
        size: u64,
        mut writes: Vec<Write>,
        segments: &[SegmentId],
    ) -> Result<()> {
        let mut preconditions = vec![Precondition::Present(key::inode(pin.ino))];
        preconditions.extend(segments.iter().map(|segment| Precondition::Present(key::pending(*segment))));
        writes.extend(region_writes(pin.ino, &state.committed_extents, &extents));
        writes.extend(dropped_inline(pin.ino, &state.committed_extents, &extents));
        let before = (Arc::clone(&state.committed_extents), state.committed_size);
        state.committed_extents = Arc::clone(&extents);
        state.committed_size = size;
        writes.push(Write::Put(key::inode(pin.ino), state.committed_record().encode()));
        match must_commit(&*self.store, Commit { preconditions, writes }) {
            Ok(()) => {
                let kept: HashSet<_> = extents.iter().map(|extent| segment_of(&extent.place)).collect();
                self.collector
                    .note_extents(before.0.iter().filter(|old| !kept.contains(&segment_of(&old.place))));
                state.extents = extents;
                state.uncommitted = false;
                Ok(())
            }
            Err(error) => {
                (state.committed_extents, state.committed_size) = before;
                Err(error)
            }
        }
    }

    /// Reads for a flush. Nobody's flush waits for the object tier: what is there alone can be rewritten later.
    fn placed(&self, ino: Ino) -> Placed<'_> {
        Placed { store: &*self.store, segments: &self.segments, ino, at: At::Latest, fetch: Fetch::Refuse }
    }

    /// A file segment that must end here although its file does not: its bytes are to be stored.
    fn is_outgrown(&self, writer: &FileSegmentWriter) -> bool {
        self.uploads().is_some()
            && (writer.age() > FILE_OPEN_AGE_MAX || writer.bytes() >= self.room.segment_bytes_max())
    }

    fn take(&self, pin: &Pin, state: &mut State, again: Again<'_>) -> Result<Option<Taken>> {
        if state.removed {
            self.gate.release(state.dirty.bytes());
            state.dirty = DirtyRanges::default();
            state.uncommitted = false;
            return Ok(None);
        }
        let moves = state.extents.iter().any(|extent| again.takes(extent));
        let closes =
            state.writer.as_ref().is_some_and(|writer| state.writers == 0 || self.is_outgrown(writer));
        if !state.is_ahead() && !moves && !closes {
            return Ok(None);
        }
        let beneath = self.read_beneath(pin.ino, state, again)?;
        let mut ranges = std::mem::take(&mut state.dirty);
        if !beneath.is_empty() {
            self.gate.add(beneath.bytes());
            let held = beneath.bytes() + ranges.bytes();
            ranges.put_beneath(beneath);
            // What dirty bytes cover of the others is free already.
            self.gate.release(held - ranges.bytes());
        }

        let threshold = if self.gate.is_pressed() { FILE_SEGMENT_BYTES_PRESSED } else { FILE_SEGMENT_BYTES };
        let road = match &state.writer {
            Some(writer) if ranges.contiguous_from(writer.bytes()).is_some() => Road::FileSegment,
            Some(_) => Road::Pack,
            None if !self.has_file_segments() => Road::Pack,
            None if state.extents.is_empty()
                && state.writers > 0
                && ranges.contiguous_from(0).is_some_and(|end| end >= threshold) =>
            {
                Road::FileSegment
            }
            None if ranges.contiguous_from(0).is_some_and(|end| end >= FILE_SEGMENT_BYTES)
                && ranges.bytes() >= state.inode.size =>
            {
                Road::FileSegment
            }
            None => Road::Pack,
        };
        let writer = state.writer.take();
        let goes_on = road == Road::FileSegment || ranges.is_empty();
        let outgrown = writer.as_ref().is_some_and(|writer| self.is_outgrown(writer));
        let close_writer = state.writers == 0 || !goes_on || outgrown;
        let ranges = Arc::new(ranges);
        state.flushing = Some(Arc::clone(&ranges));
        state.busy = true;
        Ok(Some(Taken {
            pin: pin.clone(),
            ranges,
            size: state.inode.size,
            road,
            extents: Vec::new(),
            segments: Vec::new(),
            writer,
            close_writer,
            path: match again {
                Again::Pack(leaving) => leaving.paths.get(&pin.ino).cloned().unwrap_or_default(),
                _ => Vec::new(),
            },
        }))
    }

    /// Bytes that are placed already and are written again with the dirty ones: those that are to move, and
    /// stretches of the file that have become a patchwork.
    fn read_beneath(&self, ino: Ino, state: &State, again: Again<'_>) -> Result<DirtyRanges> {
        let mut beneath = DirtyRanges::default();
        for extent in state.extents.iter().filter(|extent| again.takes(extent)) {
            let mut bytes = vec![0; extent.length as usize];
            self.placed(ino).read(std::slice::from_ref(extent), extent.file_offset, &mut bytes)?;
            beneath.write(extent.file_offset, &bytes);
        }
        if state.extents.len() <= WINDOW_EXTENTS_MAX {
            return Ok(beneath);
        }
        let windows: BTreeSet<u64> = state
            .dirty
            .iter()
            .chain(beneath.iter())
            .flat_map(|(start, bytes)| start / WINDOW_BYTES..=(start + bytes.len() as u64 - 1) / WINDOW_BYTES)
            .collect();
        for window in windows {
            let (start, end) = (window * WINDOW_BYTES, (window + 1) * WINDOW_BYTES);
            let crowd = extents::touching(&state.extents, start, end);
            if crowd.len() <= WINDOW_EXTENTS_MAX {
                continue;
            }
            for extent in crowd {
                let from = extent.file_offset.max(start);
                let to = (extent.file_offset + extent.length).min(end);
                let mut bytes = vec![0; (to - from) as usize];
                match self.placed(ino).read(std::slice::from_ref(extent), from, &mut bytes) {
                    Ok(()) => beneath.write(from, &bytes),
                    Err(error) if is_not_here(&error) => {}
                    // Damaged bytes stay where they are, to be reported to whoever reads them.
                    Err(error) => {
                        tracing::warn!(ino = ino.0, %error, "a fragmented stretch cannot be rewritten")
                    }
                }
            }
        }
        Ok(beneath)
    }

    fn flush_taken(&self, mut batch: Vec<Taken>) -> Result<()> {
        let appended = self.append(&mut batch);
        for taken in &mut batch {
            self.apply(taken, appended.is_ok());
        }
        let packs = match appended {
            Ok(packs) => packs,
            Err(error) => {
                for taken in &mut batch {
                    let mut state = taken.pin.lock();
                    state.writer = taken.writer.take();
                    self.requeue(&taken.pin, &mut state);
                    taken.pin.finish(&mut state);
                }
                return Err(error);
            }
        };
        let synced = packs.iter().try_for_each(|pack| pack.sync());
        crash::point("after-data-sync");
        let mut first_error = None;
        for taken in &mut batch {
            if let Err(error) = self.commit_taken(taken, &synced) {
                first_error.get_or_insert(error);
            }
        }
        for pack in packs {
            self.packs.release(pack);
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Steps 4 and 5 for one inode whose bytes are appended.
    fn commit_taken(&self, taken: &mut Taken, packs_synced: &Result<()>) -> Result<()> {
        let pin = &taken.pin;
        let synced = match (packs_synced, &mut taken.writer) {
            (Err(error), _) => Err(Error::errno(error.raw_errno(), error.message())),
            (Ok(()), Some(writer)) => writer.sync(),
            (Ok(()), None) => Ok(()),
        };
        let mut state = pin.lock();
        let mut segments = std::mem::take(&mut taken.segments);
        if let Some(writer) = &taken.writer {
            segments.push(writer.segment());
        }
        let committed = match synced {
            Ok(()) => {
                crash::point("before-commit");
                let extents = Arc::clone(&state.extents);
                self.commit_state(pin, &mut state, extents, taken.size, Vec::new(), &segments)
            }
            Err(error) => {
                // The kernel has dropped what it could not write: these bytes may be gone.
                state.lost = Some(format!("inode {}: {}", pin.ino, error.message()));
                Err(error)
            }
        };
        crash::point("after-commit");
        if committed.is_ok() && state.inode.size != taken.size {
            state.uncommitted = true;
        }
        if let Some(writer) = taken.writer.take() {
            if committed.is_ok() && taken.close_writer {
                self.close_writer(writer);
            } else {
                state.writer = Some(writer);
            }
        }
        self.requeue(pin, &mut state);
        pin.finish(&mut state);
        committed
    }

    /// Step 2. Gives the packs that were written to; they are held until the commit.
    fn append(&self, batch: &mut [Taken]) -> Result<Vec<Arc<OpenPack>>> {
        for taken in batch.iter_mut().filter(|taken| taken.road == Road::FileSegment) {
            self.append_to_file_segment(taken)?;
        }
        // (inode in the batch, file offset, length) of each record of the frame being filled.
        let mut packs: Vec<Arc<OpenPack>> = Vec::new();
        let mut frame: Vec<(usize, u64, Vec<&[u8]>)> = Vec::new();
        let mut frame_bytes = 0;
        let ranges: Vec<Arc<DirtyRanges>> = batch.iter().map(|taken| Arc::clone(&taken.ranges)).collect();
        let mut results: Vec<(usize, Extent, SegmentId)> = Vec::new();
        let mut write = |frame: &mut Vec<(usize, u64, Vec<&[u8]>)>, batch: &[Taken]| -> Result<()> {
            if frame.is_empty() {
                return Ok(());
            }
            let records: Vec<PackRecord<'_>> = frame
                .iter_mut()
                .map(|(index, offset, pieces)| PackRecord {
                    origin: self.origin_of(&batch[*index], *offset),
                    pieces: std::mem::take(pieces),
                })
                .collect();
            let (pack, placed) = self.packs.append(&records)?;
            for ((index, file_offset, _), placed) in frame.drain(..).zip(placed) {
                let place = Place::Pack { segment: pack.segment, offset: placed.offset, check: placed.check };
                let extent = Extent { file_offset, length: placed.length, place };
                results.push((index, extent, pack.segment));
            }
            packs.push(pack);
            Ok(())
        };
        let mut outcome = Ok(());
        'all: for (index, ranges) in ranges.iter().enumerate() {
            if batch[index].road != Road::Pack {
                continue;
            }
            let mut end_of_last = None;
            for (offset, bytes) in ranges.iter() {
                if frame_bytes + bytes.len() as u64 > FRAME_BYTES && frame_bytes > 0 {
                    outcome = write(&mut frame, batch);
                    if outcome.is_err() {
                        break 'all;
                    }
                    frame_bytes = 0;
                    end_of_last = None;
                }
                match frame.last_mut() {
                    // Continues the record before it: one record, one extent.
                    Some((_, _, pieces)) if end_of_last == Some(offset) => pieces.push(bytes),
                    _ => frame.push((index, offset, vec![bytes])),
                }
                end_of_last = Some(offset + bytes.len() as u64);
                frame_bytes += bytes.len() as u64;
            }
        }
        if outcome.is_ok() {
            outcome = write(&mut frame, batch);
        }
        if let Err(error) = outcome {
            packs.into_iter().for_each(|pack| self.packs.release(pack));
            return Err(error);
        }
        for (index, extent, segment) in results {
            let taken = &mut batch[index];
            taken.extents.push(extent);
            if taken.segments.last() != Some(&segment) {
                taken.segments.push(segment);
            }
        }
        Ok(packs)
    }

    fn append_to_file_segment(&self, taken: &mut Taken) -> Result<()> {
        self.room.check_bytes(taken.ranges.bytes())?;
        let mut writer = match taken.writer.take() {
            Some(writer) => writer,
            None => {
                let segment = self.announcements.announce(SegmentKind::File)?;
                self.flash.create_file_segment(segment, self.origin_of(taken, 0)).inspect_err(|error| {
                    let _ = self.flash.remove(segment, SegmentKind::File);
                    self.announcements.dropped(segment, error);
                })?
            }
        };
        let segment = writer.segment();
        let mut appended = Ok(());
        for (offset, bytes) in taken.ranges.iter() {
            debug_assert_eq!(offset, writer.bytes(), "a file segment holds the file's bytes in order");
            match writer.append(bytes) {
                Ok(at) => taken.extents.push(Extent {
                    file_offset: offset,
                    length: bytes.len() as u64,
                    place: Place::File { segment, offset: at },
                }),
                Err(error) => {
                    appended = Err(error);
                    break;
                }
            }
        }
        self.announcements.grown(segment, writer.bytes());
        taken.writer = Some(writer);
        appended
    }

    fn close_writer(&self, writer: FileSegmentWriter) {
        let (segment, bytes) = (writer.segment(), writer.bytes());
        self.announcements.closed(segment, SegmentKind::File, bytes, writer.close());
    }

    /// Step 3; after a failed append the bytes go back to being dirty, beneath what was written since.
    fn apply(&self, taken: &mut Taken, appended: bool) {
        let mut state = taken.pin.lock();
        state.flushing = None;
        let ranges = std::mem::take(&mut taken.ranges);
        let bytes = ranges.bytes();
        if appended {
            if !taken.extents.is_empty() {
                let new = std::mem::take(&mut taken.extents);
                state.extents = Arc::new(extents::overlay(&state.extents, new));
                state.uncommitted = true;
            }
            drop(state);
            self.gate.release(bytes);
        } else {
            // Whatever was appended of a file segment is real and stays; writing it again is harmless, but the
            // segment would not continue: those bytes are dropped from what goes back.
            let mut older = Arc::try_unwrap(ranges).unwrap_or_else(|shared| (*shared).clone());
            let new = std::mem::take(&mut taken.extents);
            if taken.road == Road::FileSegment && !new.is_empty() {
                for extent in &new {
                    older.remove(extent.file_offset, extent.file_offset + extent.length);
                }
                state.extents = Arc::new(extents::overlay(&state.extents, new));
                state.uncommitted = true;
            }
            let held = bytes + state.dirty.bytes();
            state.dirty.put_beneath(older);
            self.gate.release(held - state.dirty.bytes());
        }
    }

    fn origin_of(&self, taken: &Taken, file_offset: u64) -> SegmentOrigin {
        let state = taken.pin.lock();
        let mut path = self.names.path(taken.pin.ino);
        if path.is_empty() {
            path.clone_from(&taken.path);
        }
        SegmentOrigin {
            ino: taken.pin.ino,
            path,
            mode: state.inode.mode,
            uid: state.inode.uid,
            gid: state.inode.gid,
            mtime: state.inode.mtime,
            file_offset,
            file_bytes: taken.size,
        }
    }

    fn flush_pins(&self, pins: Vec<Pin>, again: Again<'_>, wait: Wait) -> Result<()> {
        let mut pins = pins;
        // In the order of creation, which is the order in which they will be read.
        pins.sort_by_key(|pin| pin.ino);
        let mut batch: Vec<Taken> = Vec::new();
        let mut bytes = 0;
        let mut first_error = None;
        for pin in pins {
            {
                let mut state = match wait {
                    // Whoever waits here holds only inodes of lower numbers busy, so nobody waits in a circle.
                    Wait::UntilIdle => pin.lock_idle(),
                    Wait::Skip => pin.lock(),
                };
                if state.busy {
                    continue;
                }
                match self.take(&pin, &mut state, again) {
                    Ok(Some(taken)) => {
                        bytes += taken.ranges.bytes();
                        batch.push(taken);
                    }
                    Ok(None) => self.requeue(&pin, &mut state),
                    Err(error) => {
                        first_error.get_or_insert(error);
                    }
                }
            }
            if bytes >= FRAME_BYTES {
                bytes = 0;
                if let Err(error) = self.flush_taken(std::mem::take(&mut batch)) {
                    // It has waited for uploads, in vain: the other batches would, one after the other, while writers
                    // wait to be told.
                    if error.kind() == Kind::Full && self.uploads().is_some() {
                        return Err(error);
                    }
                    first_error.get_or_insert(error);
                }
            }
        }
        if let Err(error) = self.flush_taken(batch) {
            first_error.get_or_insert(error);
        }
        first_error.map_or(Ok(()), Err)
    }

    /// The flusher's thread.
    pub fn run(&self) {
        loop {
            let (pins, inline, stop) = {
                let mut queue = self.lock();
                if !queue.stop && !queue.pressed {
                    queue = self.wake.wait_timeout(queue, TICK).unwrap_or_else(PoisonError::into_inner).0;
                }
                let now = time::monotonic_now();
                let pressed = std::mem::take(&mut queue.pressed);
                let due = |since: &Instant| pressed || now.duration_since(*since) >= AGE_MAX;
                let pins: Vec<Pin> = queue
                    .ahead
                    .values()
                    .filter(|(_, since)| due(since))
                    .map(|(pin, _)| pin.clone())
                    .collect();
                let inline_due = queue.inline.len() > INLINE_INODES_MAX
                    || queue.inline_since.is_some_and(|since| now.duration_since(since) >= INLINE_AGE_MAX);
                let inline: Vec<Ino> = if inline_due {
                    queue.inline_since = None;
                    queue.inline.drain().collect()
                } else {
                    Vec::new()
                };
                (pins, inline, queue.stop)
            };
            if stop {
                return;
            }
            let working = self.background.read().unwrap_or_else(PoisonError::into_inner);
            let mut outcome =
                self.make_room().and_then(|()| self.flush_pins(pins, Again::Nothing, Wait::Skip));
            if !inline.is_empty() {
                let moved = self.move_inline(inline);
                outcome = outcome.and(moved);
            }
            if outcome.is_ok() && self.gate.failing().is_some() {
                // Nothing may have been due: see whether what is left can be written now.
                outcome = self.flush_all();
            }
            if self.uploads().is_some() {
                self.packs.cut_older(OPEN_AGE_MAX);
            }
            drop(working);
            self.gate.set_failing(outcome.as_ref().err());
            if outcome.is_err() {
                time::sleep(Duration::from_millis(500));
            }
        }
    }

    /// Moves bytes from the metadata store into a pack.
    pub fn move_inline(&self, inodes: Vec<Ino>) -> Result<()> {
        let mut pins = Vec::new();
        for ino in inodes {
            match self.live.pin(&*self.store, ino) {
                Ok(pin) => pins.push(pin),
                Err(error) if error.kind() == Kind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let inodes: Vec<Ino> = pins.iter().map(|pin| pin.ino).collect();
        self.flush_pins(pins, Again::Inline, Wait::UntilIdle).inspect_err(|_| {
            inodes.iter().for_each(|ino| self.note_inline(*ino));
        })
    }

    /// Writes what inodes have in a pack into the open one, and commits it; an inode that has nothing there any more is
    /// left alone. The pack must be on flash. Waits while the present is being restored from a snapshot.
    pub fn empty_pack(&self, leaving: &Leaving) -> Result<()> {
        let _working = self.background.read().unwrap_or_else(PoisonError::into_inner);
        let mut pins = Vec::new();
        for ino in leaving.paths.keys() {
            match self.live.pin(&*self.store, *ino) {
                Ok(pin) => pins.push(pin),
                Err(error) if error.kind() == Kind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        self.flush_pins(pins, Again::Pack(leaving), Wait::UntilIdle)
    }

    /// Inodes that have bytes in the metadata store, forgotten here: the caller moves them.
    pub fn take_inline(&self) -> Vec<Ino> {
        self.lock().inline.drain().collect()
    }

    /// Ends the inode's file segment, if it has one: everything in it is committed, no more comes.
    pub fn retire_writer(&self, pin: &Pin) -> Result<()> {
        let mut state = pin.lock_idle();
        if state.is_ahead() && !state.removed {
            drop(state);
            self.flush_inode(pin, Again::Nothing)?;
            state = pin.lock_idle();
        }
        self.abandon_writer(&mut state);
        Ok(())
    }

    /// Closes the inode's file segment, whatever of it is committed. The collector sees to what nothing names.
    pub fn abandon_writer(&self, state: &mut State) {
        if let Some(writer) = state.writer.take() {
            let segment = writer.segment();
            self.close_writer(writer);
            self.collector.note_segments([(segment, SegmentKind::File)]);
        }
    }

    pub fn stop(&self) {
        self.lock().stop = true;
        self.wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    UntilIdle,
    Skip,
}

fn starts_file_segment(state: &State, threshold: u64) -> bool {
    state.extents.is_empty() && state.dirty.contiguous_from(0).is_some_and(|end| end >= threshold)
}

/// Deletes of inline values that no extent names any more.
fn dropped_inline(ino: Ino, old: &[Extent], new: &[Extent]) -> Vec<Write> {
    let slots = |list: &[Extent]| -> HashSet<u64> {
        list.iter()
            .filter_map(|extent| match extent.place {
                Place::Inline { slot, .. } => Some(slot),
                _ => None,
            })
            .collect()
    };
    let old = slots(old);
    if old.is_empty() {
        return Vec::new();
    }
    let new = slots(new);
    old.difference(&new).map(|slot| Write::Delete(key::inline(ino, *slot))).collect()
}
