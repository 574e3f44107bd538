//! The object tier as reads see it: what is on flash, what is on its way, what goes when flash is full.
//!
//! Every clean segment that is on flash, whole or in part, is a `Local`. A read looks at the segment's own file first,
//! then at its part; what is missing is fetched in ranges, each range once however many wait for it, and arrives in the
//! part. How much more than was asked for is fetched follows from what was read before:
//!
//! - *Small files of one pack*: whoever reads `WHOLE_AFTER` of them within a while goes through them all: the rest of
//!   the pack follows.
//! - *One after the other*: a window ahead of the reader, doubling up to `WINDOW_BYTES_MAX`.
//! - Anything else: the chunks that were touched, nothing more.
//!
//! Eviction takes the least recently read segments, whole ones, and never one that is dirty or arriving. It unlinks:
//! a reader that has the file open reads on. When nothing can be evicted, or the disk is full all the same, bytes go
//! from the object tier to the reader without being kept: a full flash never fails a read.
//!
//! Locks: a `Local`'s state, then the map of them. Neither is held while anything is fetched or written; a `Local`'s
//! `index` is, and is taken before the others.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use headrace_base::{Error, Kind, MIB, Result, SegmentId, time};
use headrace_flash::{Flash, PART_BLOCK_BYTES, Ranges, SegmentFile, SegmentPart, is_missing};
use headrace_format::record::SegmentKind;
use headrace_meta::MetaStore;
use headrace_object::{ObjectTier, Sink, Urgency};

use crate::room::reserve_bytes;
use crate::segments::{Fetch, not_here};
use crate::tiers::{self, Owner};
use crate::uploads::Uploads;

/// One request: large enough that latency does not count, small enough for several connections to share a pack.
const FETCH_BYTES: u64 = 8 * MIB;
/// A record up to this length that is read whole is a small file.
const SMALL_BYTES_MAX: u64 = MIB;
/// So many small files of one pack within `WHOLE_WITHIN_MS`, and the pack is fetched whole. Less than one request for
/// a thousand files; and whoever reads a few files here and there pays for no more than those.
const WHOLE_AFTER: u32 = 4;
const WHOLE_WITHIN_MS: u64 = 30_000;
/// How far ahead a sequential reader is read for, at first and at most: eight requests keep eight connections busy.
const WINDOW_BYTES_MIN: u64 = 2 * MIB;
const WINDOW_BYTES_MAX: u64 = 64 * MIB;
/// A read this far behind the last one's end still follows on it: kernels read a little out of order.
const SEQUENCE_SLACK_BYTES: u64 = MIB;
/// How old the knowledge may be that the prefix is ours when an object is deleted.
const CONFIRMED_FOR: Duration = Duration::from_secs(5);
/// How often one read asks for bytes again that fail their checksums: what was damaged on the way is whole the next
/// time, what is damaged in the store stays so.
const REPAIRS_MAX: u32 = 3;
/// Evicting stops when this share of the flash tier is free again.
const EVICT_SHARE: u64 = 20;

/// Where a read finds its bytes.
pub enum From<'a> {
    Whole,
    Part(&'a SegmentPart),
    /// From this offset of the segment on.
    Memory(u64, &'a [u8]),
}

/// Of one segment: what of it is on flash.
#[derive(Debug)]
struct Local {
    segment: SegmentId,
    kind: SegmentKind,
    /// When it was last read, in milliseconds of this engine's life.
    used_ms: AtomicU64,
    state: Mutex<State>,
    arrived: Condvar,
    /// Held by who fetches the index: the others wait and find it there.
    index: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    whole: bool,
    part: Option<Arc<SegmentPart>>,
    present: Ranges,
    on_the_way: Ranges,
    /// What the last request that failed said.
    failure: Option<(Kind, String)>,
    object_bytes: Option<u64>,
    index_here: bool,
    /// Small files that were not here: how many, since when.
    misses: u32,
    misses_since_ms: u64,
    whole_wanted: bool,
    /// Where the last read ended, how many followed on each other, how far they are read ahead for.
    next: u64,
    run: u32,
    window: u64,
    ahead_to: u64,
    /// Bytes that it takes on flash.
    bytes: u64,
    /// Evicted: whoever still holds it looks again.
    gone: bool,
}

#[derive(Debug)]
pub struct Remote {
    pub tier: Arc<ObjectTier>,
    owner: Owner,
    /// When the prefix was last seen to be ours.
    confirmed: Mutex<Option<Instant>>,
    flash: Arc<Flash>,
    pub uploads: Arc<Uploads>,
    bytes_max: u64,
    used: AtomicU64,
    locals: RwLock<HashMap<SegmentId, Arc<Local>>>,
    evicting: Mutex<()>,
    started: Instant,
    evicted: metrics::Counter,
}

pub fn object_name(segment: SegmentId, extension: &str) -> String {
    let name = segment.to_string();
    format!("segments/{}/{name}.{extension}", &name[name.len() - 2..])
}

pub fn data_name(segment: SegmentId, kind: SegmentKind) -> String {
    object_name(segment, extension(kind))
}

fn extension(kind: SegmentKind) -> &'static str {
    match kind {
        SegmentKind::Pack => "pack",
        SegmentKind::File => "file",
    }
}

enum Arrived {
    Part(Arc<SegmentPart>),
    Whole,
    /// It was evicted meanwhile.
    Gone,
}

impl Remote {
    /// `bytes_max`: of the flash tier, dirty and clean.
    pub fn new(
        tier: Arc<ObjectTier>,
        owner: Owner,
        flash: Arc<Flash>,
        uploads: Arc<Uploads>,
        bytes_max: u64,
    ) -> Remote {
        Remote {
            tier,
            owner,
            confirmed: Mutex::default(),
            flash,
            uploads,
            bytes_max,
            used: AtomicU64::new(0),
            locals: RwLock::default(),
            evicting: Mutex::new(()),
            started: time::monotonic_now(),
            evicted: metrics::counter!("headrace_flash_evicted_bytes_total"),
        }
    }

    /// Takes note of what an earlier engine left on flash.
    pub fn adopt(&self) -> Result<()> {
        for file in self.flash.list()? {
            if !self.uploads.is_dirty(file.segment) {
                let local = self.local(file.segment, file.kind);
                let mut state = local.lock();
                state.whole = file.whole;
                self.account(&mut state, file.bytes);
            }
        }
        Ok(())
    }

    /// One of the threads that upload.
    pub fn run_uploads(&self, store: &dyn MetaStore, finished: &dyn Fn(SegmentId)) {
        self.uploads.run(&self.tier, &self.flash, store, finished);
    }

    /// ESTALE if the volume was taken over by another machine. Asked of the bucket unless that was done within
    /// `age_max`.
    pub fn confirm_owner(&self, age_max: Duration) -> Result<()> {
        let now = time::monotonic_now();
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        if confirmed.is_some_and(|at| now.duration_since(at) < age_max) {
            return Ok(());
        }
        tiers::confirm(&self.tier, self.owner)?;
        *confirmed = Some(now);
        Ok(())
    }

    pub fn owner(&self) -> Owner {
        self.owner
    }

    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Clean bytes on flash.
    pub fn clean_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// A segment has become clean; all of it is on flash.
    pub fn add_whole(&self, segment: SegmentId, kind: SegmentKind, bytes: u64) {
        let local = self.local(segment, kind);
        let mut state = local.lock();
        state.whole = true;
        state.index_here = true;
        self.account(&mut state, bytes);
        drop(state);
        self.touch(&local);
        self.make_room(0);
    }

    fn now_ms(&self) -> u64 {
        time::monotonic_now().duration_since(self.started).as_millis() as u64
    }

    fn touch(&self, local: &Local) {
        let now = self.now_ms();
        // Looked at first: a store would take the cache line from the other readers each time.
        if local.used_ms.load(Ordering::Relaxed) != now {
            local.used_ms.store(now, Ordering::Relaxed);
        }
    }

    fn account(&self, state: &mut State, bytes: u64) {
        self.used.fetch_add(bytes.wrapping_sub(state.bytes), Ordering::Relaxed);
        state.bytes = bytes;
    }

    fn find(&self, segment: SegmentId) -> Option<Arc<Local>> {
        self.locals.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned()
    }

    fn local(&self, segment: SegmentId, kind: SegmentKind) -> Arc<Local> {
        if let Some(local) = self.find(segment) {
            return local;
        }
        let mut locals = self.locals.write().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            Arc::new(Local {
                segment,
                kind,
                used_ms: AtomicU64::new(self.now_ms()),
                state: Mutex::default(),
                arrived: Condvar::new(),
                index: Mutex::default(),
            })
        };
        Arc::clone(locals.entry(segment).or_insert_with(new))
    }

    /// Calls `read` with the place of the bytes, which include `touched`, once they are there.
    pub fn read(
        self: &Arc<Self>,
        segment: SegmentId,
        kind: SegmentKind,
        touched: Range<u64>,
        fetch: Fetch,
        read: &mut dyn FnMut(From<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut repairs = 0;
        loop {
            let known = self.find(segment);
            if known.as_ref().is_none_or(|local| local.lock().whole) {
                match read(From::Whole) {
                    Ok(()) => {
                        if let Some(local) = &known {
                            self.touch(local);
                        }
                        return Ok(());
                    }
                    Err(error) if is_missing(&error) && !self.uploads.is_dirty(segment) => {
                        if let Some(local) = known {
                            self.forget(&local);
                        }
                    }
                    // A damaged copy of what is in the object tier too.
                    Err(error)
                        if error.kind() == Kind::Corrupt
                            && repairs < REPAIRS_MAX
                            && !self.uploads.is_dirty(segment) =>
                    {
                        repairs += 1;
                        tracing::warn!(%segment, %error, "a damaged copy on flash is replaced from the object tier");
                        metrics::counter!("headrace_flash_repaired_total").increment(1);
                        let local = self.local(segment, kind);
                        if !self.evict_one(&local, Evict::EvenIfArriving)? {
                            return Err(error);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            let local = self.local(segment, kind);
            let arrived = match self.arrive(&local, &touched, fetch) {
                // Flash is full of what must stay: the bytes go straight to the reader.
                Err(error) if error.kind() == Kind::Full => {
                    let fetched = self
                        .tier
                        .get(&data_name(segment, kind), touched.clone(), None)
                        .map_err(|error| error.context(format_args!("segment {segment}")))?;
                    match read(From::Memory(touched.start, &fetched.bytes)) {
                        Err(error) if error.kind() == Kind::Corrupt && repairs < REPAIRS_MAX => {
                            repairs += 1;
                            continue;
                        }
                        outcome => return outcome,
                    }
                }
                arrived => arrived.map_err(|error| error.context(format_args!("segment {segment}")))?,
            };
            match arrived {
                Arrived::Gone | Arrived::Whole => {}
                Arrived::Part(part) => match read(From::Part(&part)) {
                    // What a crash of the machine left, or a damaged disk or answer: fetched again.
                    Err(error) if error.kind() == Kind::Corrupt && repairs < REPAIRS_MAX => {
                        repairs += 1;
                        tracing::warn!(%segment, %error, "damaged bytes on flash are fetched again");
                        metrics::counter!("headrace_flash_repaired_total").increment(1);
                        let mut state = local.lock();
                        state.present.remove(touched.clone());
                        if kind == SegmentKind::Pack {
                            // Whatever the answer said of the object's length is in doubt too.
                            state.object_bytes = None;
                        }
                    }
                    outcome => return outcome,
                },
            }
        }
    }

    /// Waits until `touched` is in the part; fetches what nobody fetches yet.
    fn arrive(self: &Arc<Self>, local: &Arc<Local>, touched: &Range<u64>, fetch: Fetch) -> Result<Arrived> {
        self.touch(local);
        if local.kind == SegmentKind::File {
            self.bring_index(local, fetch)?;
        }
        let mut state = local.lock();
        let mut asked = false;
        loop {
            if state.gone {
                return Ok(Arrived::Gone);
            }
            if state.whole {
                return Ok(Arrived::Whole);
            }
            let wanted = touched.start..touched.end.min(state.object_bytes.unwrap_or(u64::MAX));
            let part = self.open_part(local, &mut state)?;
            if state.present.contains(&wanted) {
                if !asked {
                    self.read_ahead(local, &mut state, &wanted);
                }
                return Ok(Arrived::Part(part));
            }
            if fetch == Fetch::Refuse {
                return Err(not_here());
            }
            let gaps: Vec<_> = state.missing(&wanted);
            if asked
                && !gaps.is_empty()
                && let Some((kind, message)) = &state.failure
            {
                return Err(Error::new(*kind, message.clone()));
            }
            // Whoever waits for what others fetch already has missed nothing new.
            let fetches = !gaps.is_empty();
            for gap in gaps {
                self.start(local, &mut state, gap, Urgency::Now);
            }
            if !asked {
                asked = true;
                state.failure = None;
                if fetches {
                    self.count_miss(local, &mut state, touched);
                }
                self.read_ahead(local, &mut state, &wanted);
            }
            state = local.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts fetching ranges that will be read soon, and waits for nothing.
    pub fn prefetch(self: &Arc<Self>, segment: SegmentId, kind: SegmentKind, touched: Range<u64>) {
        if self.uploads.is_dirty(segment) {
            return;
        }
        let local = self.local(segment, kind);
        let mut state = local.lock();
        if state.gone || state.whole {
            return;
        }
        if self.flash.has(segment, kind) {
            // Put there by somebody before it was known here.
            state.whole = true;
            return;
        }
        if self.open_part(&local, &mut state).is_err() {
            // Full, most likely: whoever reads it will get it without keeping it.
            return;
        }
        self.touch(&local);
        let wanted = touched.start..touched.end.min(state.object_bytes.unwrap_or(u64::MAX));
        let gaps = state.missing(&wanted);
        if !gaps.is_empty() {
            for gap in gaps {
                self.start(&local, &mut state, gap, Urgency::Now);
            }
            self.count_miss(&local, &mut state, &touched);
        }
    }

    fn open_part(&self, local: &Local, state: &mut State) -> Result<Arc<SegmentPart>> {
        if let Some(part) = &state.part {
            return Ok(Arc::clone(part));
        }
        let (part, present) = self.flash.open_part(local.segment, local.kind)?;
        let part = Arc::new(part);
        state.part = Some(Arc::clone(&part));
        state.present = present;
        Ok(part)
    }

    /// Small files of one pack that were not here make the whole of it wanted.
    fn count_miss(self: &Arc<Self>, local: &Arc<Local>, state: &mut State, touched: &Range<u64>) {
        if local.kind != SegmentKind::Pack
            || touched.end - touched.start > SMALL_BYTES_MAX
            || state.whole_wanted
        {
            return;
        }
        let now = self.now_ms();
        if now - state.misses_since_ms > WHOLE_WITHIN_MS {
            state.misses = 0;
            state.misses_since_ms = now;
        }
        state.misses += 1;
        if state.misses >= WHOLE_AFTER && state.run < 2 {
            state.whole_wanted = true;
            self.want_rest(local, state);
        }
    }

    /// Starts fetching all that is missing, as soon as it is known how much that is.
    fn want_rest(self: &Arc<Self>, local: &Arc<Local>, state: &mut State) {
        let Some(object_bytes) = state.object_bytes else { return };
        // A flash tier that a few packs fill would only evict one for the other.
        if object_bytes > self.bytes_max / 4 {
            return;
        }
        for gap in state.missing(&(0..object_bytes)) {
            self.start(local, state, gap, Urgency::Ahead);
        }
    }

    /// Fetches ahead of whoever reads one stretch after the other.
    fn read_ahead(self: &Arc<Self>, local: &Arc<Local>, state: &mut State, read: &Range<u64>) {
        let follows =
            read.start <= state.next + SEQUENCE_SLACK_BYTES && read.end + SEQUENCE_SLACK_BYTES > state.next;
        if !follows || state.next == 0 {
            state.run = u32::from(read.start == 0);
            state.window = 0;
            state.ahead_to = 0;
        } else if read.end > state.next {
            state.run += 1;
        }
        state.next = if follows { state.next.max(read.end) } else { read.end };
        // Small files that lie side by side look like a sequence too: they are counted above.
        let long = read.end - read.start >= SMALL_BYTES_MAX;
        if state.run < 2 && !(long && state.run > 0) {
            return;
        }
        if read.end + state.window / 2 < state.ahead_to {
            return;
        }
        state.window = (state.window * 2).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
        let end = (read.end + state.window).min(state.object_bytes.unwrap_or(u64::MAX));
        let start = state.ahead_to.max(read.end);
        state.ahead_to = end;
        if start < end {
            for gap in state.missing(&(start..end)) {
                self.start(local, state, gap, Urgency::Ahead);
            }
        }
    }

    fn start(self: &Arc<Self>, local: &Arc<Local>, state: &mut State, gap: Range<u64>, urgency: Urgency) {
        let Some(part) = state.part.clone() else { return };
        if state.whole_wanted {
            // All of it comes anyhow: in large pieces from the first on.
            let piece = gap.start / FETCH_BYTES * FETCH_BYTES..gap.end.next_multiple_of(FETCH_BYTES);
            for gap in state.missing(&piece) {
                self.start_exactly(local, state, &part, gap, urgency);
            }
        } else {
            self.start_exactly(local, state, &part, gap, urgency);
        }
    }

    fn start_exactly(
        self: &Arc<Self>,
        local: &Arc<Local>,
        state: &mut State,
        part: &Arc<SegmentPart>,
        gap: Range<u64>,
        urgency: Urgency,
    ) {
        // Whole blocks: the file system's map of what is there knows no smaller ones.
        let end = gap.end.next_multiple_of(PART_BLOCK_BYTES);
        let mut at = gap.start / PART_BLOCK_BYTES * PART_BLOCK_BYTES;
        while at < end {
            // Pieces end on a grid, so that those of several callers fit together.
            let range = at..end.min((at / FETCH_BYTES + 1) * FETCH_BYTES);
            at = range.end;
            state.on_the_way.insert(range.clone());
            let arrival = Arrival {
                remote: Arc::clone(self),
                local: Arc::clone(local),
                part: Arc::clone(part),
                progress: Mutex::new(Progress {
                    begin: range.start,
                    end: range.start,
                    ..Progress::default()
                }),
                range: range.clone(),
            };
            self.tier.start_get(&data_name(local.segment, local.kind), range, urgency, arrival);
        }
    }

    /// The index of a file segment, whose checksums every read of it needs.
    fn bring_index(&self, local: &Local, fetch: Fetch) -> Result<()> {
        if local.lock().index_here {
            return Ok(());
        }
        // Until it is known to be here: whoever waits must find that.
        let _one;
        let bytes = match self.flash.file_segment_bytes(local.segment) {
            Ok(bytes) => bytes,
            // Missing, or damaged on flash: the object tier has it.
            Err(error) if error.kind() == Kind::Corrupt => {
                if fetch == Fetch::Refuse {
                    return Err(not_here());
                }
                _one = local.index.lock().unwrap_or_else(PoisonError::into_inner);
                if local.lock().index_here {
                    return Ok(());
                }
                self.fetch_index(local.segment).or_else(|error| match error.kind() {
                    // Damaged on its way, perhaps.
                    Kind::Corrupt => self.fetch_index(local.segment),
                    _ => Err(error),
                })?;
                self.flash.file_segment_bytes(local.segment)?
            }
            Err(error) => return Err(error),
        };
        let mut state = local.lock();
        state.object_bytes = Some(bytes);
        state.index_here = true;
        Ok(())
    }

    fn fetch_index(&self, segment: SegmentId) -> Result<()> {
        let index = self.tier.get_all(&object_name(segment, "idx"))?;
        // Without a place for the index nothing of the segment can be verified.
        self.make_room(index.len() as u64);
        self.flash.put_index(segment, &index)
    }

    /// Brings what `Flash::records` needs: the index of a file segment, all of a pack.
    pub fn bring_description(self: &Arc<Self>, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        if self.uploads.is_dirty(segment) || self.flash.has(segment, kind) {
            return Ok(());
        }
        let local = self.local(segment, kind);
        if kind == SegmentKind::File {
            return self.bring_index(&local, Fetch::Wait);
        }
        self.bring_whole(segment, kind)
    }

    /// Waits until these bytes of a segment are on flash.
    pub fn bring(self: &Arc<Self>, segment: SegmentId, kind: SegmentKind, range: Range<u64>) -> Result<()> {
        loop {
            if self.uploads.is_dirty(segment) || self.flash.has(segment, kind) {
                return Ok(());
            }
            let local = self.local(segment, kind);
            match self.arrive(&local, &range, Fetch::Wait)? {
                Arrived::Gone => {}
                Arrived::Whole | Arrived::Part(_) => return Ok(()),
            }
        }
    }

    /// Waits until all of a segment is on flash.
    pub fn bring_whole(self: &Arc<Self>, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        loop {
            if self.uploads.is_dirty(segment) || self.flash.has(segment, kind) {
                return Ok(());
            }
            let local = self.local(segment, kind);
            let known = local.lock().object_bytes;
            let bytes = match known {
                Some(bytes) => bytes,
                None => {
                    let bytes = self.tier.bytes_of(&data_name(segment, kind))?;
                    local.lock().object_bytes = Some(bytes);
                    bytes
                }
            };
            match self.arrive(&local, &(0..bytes), Fetch::Wait)? {
                Arrived::Whole => return Ok(()),
                Arrived::Gone => {}
                // All there, but its new name could not be given.
                Arrived::Part(_) => {
                    let mut state = local.lock();
                    self.finish(&local, &mut state)?;
                }
            }
        }
    }

    /// Gives the part the segment's own name if nothing of it is missing.
    fn finish(&self, local: &Local, state: &mut State) -> Result<()> {
        let (Some(part), Some(bytes)) = (&state.part, state.object_bytes) else { return Ok(()) };
        if state.gone || !state.present.contains(&(0..bytes)) {
            return Ok(());
        }
        part.complete(&self.flash)?;
        self.account(state, bytes);
        state.whole = true;
        state.part = None;
        state.present = Ranges::default();
        tracing::debug!(segment = %local.segment, bytes, "a segment is on flash as a whole");
        Ok(())
    }

    /// Gives up what is known of a local copy that is not there.
    fn forget(&self, local: &Arc<Local>) {
        let mut state = local.lock();
        if state.whole {
            self.drop_locked(local, &mut state);
        }
    }

    fn drop_locked(&self, local: &Arc<Local>, state: &mut State) {
        state.gone = true;
        self.account(state, 0);
        let mut locals = self.locals.write().unwrap_or_else(PoisonError::into_inner);
        if locals.get(&local.segment).is_some_and(|known| Arc::ptr_eq(known, local)) {
            locals.remove(&local.segment);
        }
    }

    /// Evicts until `bytes` more fit, as far as that is possible.
    pub fn make_room(&self, bytes: u64) {
        let total = || self.clean_bytes() + self.uploads.dirty_bytes();
        let crowded = |slack: u64| {
            total() + bytes + slack > self.bytes_max
                || self.flash.space().is_ok_and(|(disk, _, free)| {
                    free < bytes + slack.min(disk / EVICT_SHARE) + (disk / 50).max(reserve_bytes(disk))
                })
        };
        if !crowded(0) {
            return;
        }
        let _one = self.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locals: Vec<_> =
            self.locals.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        locals.sort_by_key(|local| local.used_ms.load(Ordering::Relaxed));
        for local in locals {
            if !crowded(self.bytes_max / EVICT_SHARE) {
                return;
            }
            if let Err(error) = self.evict_one(&local, Evict::IfAtRest) {
                tracing::warn!(segment = %local.segment, %error, "a segment could not be evicted");
            }
        }
    }

    /// Removes what is clean from flash; true if it did.
    fn evict_one(&self, local: &Arc<Local>, when: Evict) -> Result<bool> {
        let mut state = local.lock();
        let arriving = state.on_the_way.bytes() > 0;
        if state.gone || self.uploads.is_dirty(local.segment) || (arriving && when == Evict::IfAtRest) {
            return Ok(false);
        }
        self.flash.remove(local.segment, local.kind)?;
        self.evicted.increment(state.bytes);
        self.drop_locked(local, &mut state);
        local.arrived.notify_all();
        Ok(true)
    }

    /// Removes clean segments from flash, all or those given. Gives how many bytes were freed.
    pub fn evict(&self, only: Option<&std::collections::HashSet<SegmentId>>) -> Result<u64> {
        let before = self.clean_bytes();
        let locals: Vec<_> =
            self.locals.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for local in locals.iter().filter(|local| only.is_none_or(|only| only.contains(&local.segment))) {
            self.evict_one(local, Evict::IfAtRest)?;
        }
        Ok(before.saturating_sub(self.clean_bytes()))
    }

    /// How many bytes of [start, end) of a segment are on flash.
    pub fn bytes_here(&self, segment: SegmentId, kind: SegmentKind, range: Range<u64>) -> u64 {
        let all = range.end - range.start;
        if self.uploads.is_dirty(segment) {
            return all;
        }
        let Some(local) = self.find(segment) else {
            return if self.flash.has(segment, kind) { all } else { 0 };
        };
        let mut state = local.lock();
        if state.whole {
            return all;
        }
        if self.open_part(&local, &mut state).is_err() {
            return 0;
        }
        all - state.present.gaps(range).iter().map(|gap| gap.end - gap.start).sum::<u64>()
    }

    /// How long a segment is in the object tier; None: it is not there, or a file segment's index is not.
    pub fn stored_bytes(&self, segment: SegmentId, kind: SegmentKind) -> Result<Option<u64>> {
        let found = (|| {
            if kind == SegmentKind::File {
                self.tier.bytes_of(&object_name(segment, "idx"))?;
            }
            self.tier.bytes_of(&data_name(segment, kind))
        })();
        match found {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == Kind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All segments in the object tier.
    pub fn list(&self) -> Result<Vec<SegmentFile>> {
        let mut found = Vec::new();
        self.tier.list("segments", |listed| {
            let file = listed.name.rsplit('/').next().unwrap_or_default();
            if let Some((name, extension)) = file.split_once('.')
                && let Ok(segment) = name.parse::<SegmentId>()
                && let Some(kind) = [SegmentKind::Pack, SegmentKind::File]
                    .into_iter()
                    .find(|kind| self::extension(*kind) == extension)
                && listed.name == data_name(segment, kind)
            {
                found.push(SegmentFile { segment, kind, bytes: listed.bytes, whole: true });
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// From the object tier first: what a crash leaves is a copy on flash, which the next start finds.
    pub fn remove(&self, segment: SegmentId, kind: SegmentKind) -> Result<()> {
        // Whoever has the volume by now may name it.
        self.confirm_owner(CONFIRMED_FOR)?;
        self.tier.delete(&data_name(segment, kind))?;
        if kind == SegmentKind::File {
            self.tier.delete(&object_name(segment, "idx"))?;
        }
        let local = self.local(segment, kind);
        let mut state = local.lock();
        self.flash.remove(segment, kind)?;
        self.drop_locked(&local, &mut state);
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Evict {
    IfAtRest,
    EvenIfArriving,
}

impl Local {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// What of `wanted` is neither here nor on its way.
    fn missing(&self, wanted: &Range<u64>) -> Vec<Range<u64>> {
        let gaps = self.present.gaps(wanted.clone());
        gaps.into_iter().flat_map(|gap| self.on_the_way.gaps(gap)).collect()
    }
}

/// A range that was asked for. Whatever happens to the request, those who wait for it are told.
struct Arrival {
    remote: Arc<Remote>,
    local: Arc<Local>,
    part: Arc<SegmentPart>,
    range: Range<u64>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Where the stretch begins that is written and that nobody was told of, and where it ends.
    begin: u64,
    end: u64,
    failed: Option<Error>,
    told: bool,
}

/// Readers are told of what has come in stretches of this length: seldom enough to cost nothing.
const STRETCH_BYTES: u64 = MIB;

impl Arrival {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let remote = &self.remote;
        if offset == self.range.start {
            let wanted = self.range.end - self.range.start;
            remote.make_room(wanted);
            if remote.clean_bytes() + remote.uploads.dirty_bytes() + wanted > remote.bytes_max {
                return Err(Error::new(Kind::Full, "the flash tier is full of what cannot be evicted now"));
            }
        }
        self.part.write(offset, bytes)
    }

    /// Shows what was written to those who wait.
    fn show(&self, progress: &mut Progress) {
        let mut state = self.local.lock();
        if !state.gone {
            state.present.insert(progress.begin..progress.end);
            let held = state.present.bytes();
            self.remote.account(&mut state, held);
        }
        drop(state);
        progress.begin = progress.end;
        self.local.arrived.notify_all();
    }

    fn end(&self, outcome: Result<u64>) {
        let mut progress = self.progress();
        progress.told = true;
        self.show(&mut progress);
        let outcome = match progress.failed.take() {
            Some(error) => Err(error),
            None => outcome,
        };
        drop(progress);
        let (remote, local) = (&self.remote, &self.local);
        let mut state = local.lock();
        state.on_the_way.remove(self.range.clone());
        match outcome {
            Ok(object_bytes) => {
                state.object_bytes = Some(object_bytes);
                if let Err(error) = remote.finish(local, &mut state) {
                    tracing::warn!(segment = %local.segment, %error, "a segment that is all here stays a part");
                }
                if state.whole_wanted && !state.whole && !state.gone {
                    remote.want_rest(local, &mut state);
                }
            }
            Err(error) => state.failure = Some((error.kind(), error.message().to_owned())),
        }
        drop(state);
        local.arrived.notify_all();
    }
}

impl Sink for Arrival {
    fn take(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut progress = self.progress();
        if progress.failed.is_some() {
            return false;
        }
        if let Err(error) = self.put(offset, bytes) {
            progress.failed = Some(error);
            return false;
        }
        if offset != progress.end {
            // The answer was asked for again from the start.
            progress.begin = offset;
        }
        progress.end = offset + bytes.len() as u64;
        if progress.end - progress.begin >= STRETCH_BYTES {
            self.show(&mut progress);
        }
        true
    }

    fn is_full(&self) -> bool {
        self.progress().failed.is_some()
    }

    fn done(self, outcome: Result<u64>) {
        self.end(outcome);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if !self.progress().told {
            self.end(Err(Error::new(Kind::Unavailable, "the engine is stopping")));
        }
    }
}
