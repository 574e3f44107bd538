//! From flash to the object tier: which segments are dirty, and the threads that make them clean.
//!
//! A segment is dirty from its announcement until its object is stored and the announcement withdrawn; so what a crash
//! left dirty is what is still announced, and the next start goes on with it. States: *open* (somebody writes to it),
//! *waiting* (closed), *under way*. An upload that fails is repeated without end, with pauses; nobody who reads waits
//! for it, and nothing dirty leaves flash.
//!
//! The object is made in one step (a put, or the completion of its parts), a file segment's index before its data: where
//! the data is, all is. The content of a segment never changes, so storing it twice is harmless.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use headrace_base::error::errno;
use headrace_base::{Error, Kind, Result, SegmentId, crash, time};
use headrace_flash::{Flash, is_missing};
use headrace_format::record::SegmentKind;
use headrace_meta::MetaStore;
use headrace_object::ObjectTier;

use crate::announce::withdraw;
use crate::remote::{Remote, data_name, object_name};

/// Uploads under way. Large ones go in several parts each.
pub const UPLOADS_MAX: usize = 4;
/// Of segments that somebody waits for: while so many are under way, further ones gather in the open pack, and one
/// request carries them all.
pub const URGENT_MAX: usize = 2;
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);

type Waiter = Box<dyn FnOnce(Result<()>) + Send>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Waiting,
    UnderWay,
    /// Its file could not be closed: only the next start can go on.
    Stuck,
}

struct Dirty {
    kind: SegmentKind,
    bytes: u64,
    phase: Phase,
    urgent: bool,
    since: Instant,
    waiters: Vec<Waiter>,
}

#[derive(Default)]
struct State {
    dirty: HashMap<SegmentId, Dirty>,
    /// What the last upload that failed said, and when to try again.
    failing: Option<(Kind, String)>,
    pause_until: Option<Instant>,
    pause: Duration,
    /// The object tier has passed its check.
    started: bool,
    fenced: bool,
    stop: bool,
}

pub struct Uploads {
    state: Mutex<State>,
    changed: Condvar,
    bytes: AtomicU64,
    urgent_under_way: AtomicU64,
    /// Somebody waits for what is in the open pack.
    cut_wanted: AtomicBool,
    remote: OnceLock<Weak<Remote>>,
}

impl std::fmt::Debug for Uploads {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Uploads {{ segments: {} }}", self.lock().dirty.len())
    }
}

/// What `status` tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    pub segments: u64,
    pub bytes: u64,
    /// How long the oldest has been dirty.
    pub age: Duration,
    pub failing: Option<String>,
}

impl Uploads {
    pub fn new() -> Uploads {
        Uploads {
            state: Mutex::default(),
            changed: Condvar::new(),
            bytes: AtomicU64::new(0),
            urgent_under_way: AtomicU64::new(0),
            cut_wanted: AtomicBool::new(false),
            remote: OnceLock::new(),
        }
    }

    /// Where clean segments are told of.
    pub fn connect(&self, remote: &Arc<Remote>) {
        let _ = self.remote.set(Arc::downgrade(remote));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_dirty(&self, segment: SegmentId) -> bool {
        self.lock().dirty.contains_key(&segment)
    }

    pub fn dirty_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn backlog(&self) -> Backlog {
        let state = self.lock();
        let now = time::monotonic_now();
        Backlog {
            segments: state.dirty.len() as u64,
            bytes: self.dirty_bytes(),
            age: state.dirty.values().map(|dirty| now.duration_since(dirty.since)).max().unwrap_or_default(),
            failing: state.failing.as_ref().map(|(_, message)| message.clone()),
        }
    }

    /// A segment was announced.
    pub fn opened(&self, segment: SegmentId, kind: SegmentKind) {
        self.lock().dirty.insert(
            segment,
            Dirty {
                kind,
                bytes: 0,
                phase: Phase::Open,
                urgent: false,
                since: time::monotonic_now(),
                waiters: Vec::new(),
            },
        );
    }

    /// It has this many bytes by now.
    pub fn grown(&self, segment: SegmentId, bytes: u64) {
        if let Some(dirty) = self.lock().dirty.get_mut(&segment) {
            self.bytes.fetch_add(bytes.wrapping_sub(dirty.bytes), Ordering::Relaxed);
            dirty.bytes = bytes;
        }
    }

    /// It is closed: its turn comes.
    pub fn closed(&self, segment: SegmentId, kind: SegmentKind, bytes: u64) {
        if !self.is_dirty(segment) {
            self.opened(segment, kind);
        }
        self.grown(segment, bytes);
        if let Some(dirty) = self.lock().dirty.get_mut(&segment) {
            dirty.phase = Phase::Waiting;
        }
        self.changed.notify_all();
    }

    /// It could not be closed. Whoever waits for it is told.
    pub fn stuck(&self, segment: SegmentId, error: &Error) {
        let waiters = {
            let mut state = self.lock();
            let Some(dirty) = state.dirty.get_mut(&segment) else { return };
            dirty.phase = Phase::Stuck;
            std::mem::take(&mut dirty.waiters)
        };
        for waiter in waiters {
            waiter(Err(Error::errno(error.raw_errno(), error.message())));
        }
    }

    /// It came to nothing: no file of it is left.
    pub fn dropped(&self, segment: SegmentId) {
        self.grown(segment, 0);
        let dropped = self.lock().dirty.remove(&segment);
        for waiter in dropped.into_iter().flat_map(|dirty| dirty.waiters) {
            waiter(Ok(()));
        }
        self.changed.notify_all();
    }

    /// Whether a segment that somebody waits for should be closed now, or may gather more while others are under way.
    pub fn want_cut(&self) -> bool {
        if self.urgent_under_way.load(Ordering::Acquire) < URGENT_MAX as u64 {
            return true;
        }
        self.cut_wanted.store(true, Ordering::Release);
        // Whoever finished between the look and the mark has not seen the mark.
        self.urgent_under_way.load(Ordering::Acquire) < URGENT_MAX as u64
    }

    pub fn take_cut_wanted(&self) -> bool {
        self.cut_wanted.swap(false, Ordering::AcqRel)
    }

    /// Those of `segments` that are dirty: somebody waits for them now.
    pub fn hurry(&self, segments: impl IntoIterator<Item = SegmentId>) -> Vec<SegmentId> {
        let mut state = self.lock();
        let mut hurried = Vec::new();
        for segment in segments {
            if let Some(dirty) = state.dirty.get_mut(&segment) {
                dirty.urgent = true;
                hurried.push(segment);
            }
        }
        drop(state);
        self.changed.notify_all();
        hurried
    }

    pub fn all_dirty(&self) -> Vec<SegmentId> {
        self.lock().dirty.keys().copied().collect()
    }

    /// Calls `done` when all of them are clean, or as soon as the store refuses one of them. On this thread if all are
    /// clean already.
    pub fn when_clean(&self, segments: &[SegmentId], done: impl FnOnce(Result<()>) + Send + 'static) {
        struct Together {
            left: usize,
            done: Option<Waiter>,
        }
        let together =
            Arc::new(Mutex::new(Together { left: segments.len() + 1, done: Some(Box::new(done)) }));
        let one = {
            let together = Arc::clone(&together);
            move |outcome: Result<()>| {
                let done = {
                    let mut together = together.lock().unwrap_or_else(PoisonError::into_inner);
                    together.left -= 1;
                    if together.left == 0 || outcome.is_err() { together.done.take() } else { None }
                };
                if let Some(done) = done {
                    done(outcome);
                }
            }
        };
        for segment in segments {
            let mut now = None;
            {
                let mut state = self.lock();
                let refused = match &state.failing {
                    Some((kind, message)) if state.fenced => {
                        Some(Error::new(*kind, message.clone()).answered_as(errno::ESTALE))
                    }
                    _ if state.stop => Some(stopping()),
                    _ => None,
                };
                match state.dirty.get_mut(segment) {
                    None => now = Some(Ok(())),
                    Some(dirty) if dirty.phase == Phase::Stuck => {
                        now = Some(Err(Error::internal(format!("segment {segment} could not be closed"))));
                    }
                    Some(dirty) => match refused {
                        Some(error) => now = Some(Err(error)),
                        None => {
                            dirty.waiters.push(Box::new(one.clone()));
                            // Whoever asks is told what the store says now, not what it said before somebody changed
                            // a policy.
                            if matches!(state.failing, Some((Kind::Permission, _))) {
                                state.pause_until = None;
                                self.changed.notify_all();
                            }
                        }
                    },
                }
            }
            if let Some(outcome) = now {
                one(outcome);
            }
        }
        one(Ok(()));
    }

    /// The same, waiting.
    pub fn wait_clean(&self, segments: &[SegmentId]) -> Result<()> {
        let outcome = Arc::new((Mutex::new(None), Condvar::new()));
        let told = Arc::clone(&outcome);
        self.when_clean(segments, move |result| {
            *told.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            told.1.notify_all();
        });
        let mut result = outcome.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            result = outcome.1.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `bytes` more may be dirty. What the uploads say if none succeeded for `patience`.
    pub fn wait_for_room(&self, bytes: u64, bytes_max: u64, patience: Duration) -> Result<(), String> {
        let mut state = self.lock();
        let mut deadline = time::monotonic_now() + patience;
        let mut least = self.dirty_bytes();
        while self.dirty_bytes() + bytes > bytes_max && self.dirty_bytes() > 0 {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if left.is_zero() {
                return Err(match &state.failing {
                    Some((_, message)) => format!("uploads fail: {message}"),
                    None if !state.started => "the object tier has not passed its check".to_owned(),
                    None => format!("no upload has succeeded for {} s", patience.as_secs()),
                });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if self.dirty_bytes() < least {
                least = self.dirty_bytes();
                deadline = time::monotonic_now() + patience;
            }
        }
        Ok(())
    }

    /// Waits until nothing is dirty, for `patience_all` at most and as long as one upload succeeds in each `patience`.
    /// True if nothing is.
    pub fn drain(&self, patience: Duration, patience_all: Duration) -> bool {
        let end = time::monotonic_now() + patience_all;
        let mut state = self.lock();
        let (mut left_over, mut deadline) = (state.dirty.len(), time::monotonic_now() + patience);
        loop {
            if state.dirty.is_empty() {
                return true;
            }
            if state.dirty.len() < left_over {
                (left_over, deadline) = (state.dirty.len(), time::monotonic_now() + patience);
            }
            let left = deadline.min(end).saturating_duration_since(time::monotonic_now());
            if left.is_zero() || state.failing.is_some() || !state.started || state.stop {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn start(&self) {
        self.lock().started = true;
        self.changed.notify_all();
    }

    /// Ends the threads. Whoever waits is told that it is not known when their segments will be clean.
    pub fn stop(&self) {
        let waiters: Vec<Waiter> = {
            let mut state = self.lock();
            state.stop = true;
            state.dirty.values_mut().flat_map(|dirty| std::mem::take(&mut dirty.waiters)).collect()
        };
        self.changed.notify_all();
        for waiter in waiters {
            waiter(Err(stopping()));
        }
    }

    /// The volume is another machine's by now: nothing more is uploaded, and whoever waits is told.
    pub fn fence(&self, error: &Error) {
        let waiters: Vec<Waiter> = {
            let mut state = self.lock();
            state.started = false;
            state.fenced = true;
            state.failing = Some((error.kind(), error.message().to_owned()));
            state.dirty.values_mut().flat_map(|dirty| std::mem::take(&mut dirty.waiters)).collect()
        };
        for waiter in waiters {
            waiter(Err(Error::new(error.kind(), error.message()).answered_as(error.raw_errno())));
        }
        self.changed.notify_all();
    }

    pub fn is_fenced(&self) -> bool {
        self.lock().fenced
    }

    /// The next that is closed; urgent ones first, then the oldest. None: the end.
    fn next(&self) -> Option<(SegmentId, SegmentKind, bool)> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            let now = time::monotonic_now();
            let pause =
                state.pause_until.map(|until| until.saturating_duration_since(now)).unwrap_or_default();
            let next = if pause.is_zero() && state.started {
                let waiting = state.dirty.iter().filter(|(_, dirty)| dirty.phase == Phase::Waiting);
                waiting.min_by_key(|(_, dirty)| (!dirty.urgent, dirty.since)).map(|(segment, _)| *segment)
            } else {
                None
            };
            if let Some(segment) = next
                && let Some(dirty) = state.dirty.get_mut(&segment)
            {
                dirty.phase = Phase::UnderWay;
                if dirty.urgent {
                    self.urgent_under_way.fetch_add(1, Ordering::AcqRel);
                }
                return Some((segment, dirty.kind, dirty.urgent));
            }
            state = if pause.is_zero() {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    /// One of the threads. `finished` is called after each upload, whatever became of it.
    pub fn run(&self, tier: &ObjectTier, flash: &Flash, store: &dyn MetaStore, finished: &dyn Fn(SegmentId)) {
        while let Some((segment, kind, urgent)) = self.next() {
            let outcome = upload(tier, flash, segment, kind).and_then(|bytes| {
                crash::point("after-upload");
                withdraw(store, segment).map(|()| bytes)
            });
            if urgent {
                self.urgent_under_way.fetch_sub(1, Ordering::AcqRel);
            }
            match outcome {
                Ok(bytes) => self.succeeded(segment, kind, bytes),
                Err(error) => self.failed(segment, &error),
            }
            finished(segment);
        }
    }

    fn succeeded(&self, segment: SegmentId, kind: SegmentKind, bytes: u64) {
        self.grown(segment, 0);
        let (waiters, was_failing) = {
            let mut state = self.lock();
            state.pause = Duration::ZERO;
            state.pause_until = None;
            let waiters = state.dirty.remove(&segment).map(|dirty| dirty.waiters).unwrap_or_default();
            (waiters, state.failing.take())
        };
        if was_failing.is_some() {
            tracing::warn!("uploads to the object tier work again");
        }
        if let Some(remote) = self.remote.get().and_then(Weak::upgrade) {
            remote.add_whole(segment, kind, bytes);
        }
        for waiter in waiters {
            waiter(Ok(()));
        }
        self.changed.notify_all();
    }

    fn failed(&self, segment: SegmentId, error: &Error) {
        let mut state = self.lock();
        if state.failing.is_none() {
            tracing::error!(%segment, %error, "an upload failed; the segment stays on flash and is tried again without end");
        }
        state.failing = Some((error.kind(), error.message().to_owned()));
        state.pause = (state.pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        state.pause_until = Some(time::monotonic_now() + state.pause);
        if let Some(dirty) = state.dirty.get_mut(&segment) {
            dirty.phase = Phase::Waiting;
        }
        // Who is refused for good is told at once, and not left waiting for somebody to change a policy.
        let refused: Vec<Waiter> = if error.kind() == Kind::Permission {
            state.dirty.values_mut().flat_map(|dirty| std::mem::take(&mut dirty.waiters)).collect()
        } else {
            Vec::new()
        };
        drop(state);
        metrics::counter!("headrace_object_upload_failures_total").increment(1);
        for waiter in refused {
            waiter(Err(Error::new(error.kind(), error.message())));
        }
        self.changed.notify_all();
    }
}

fn stopping() -> Error {
    Error::new(
        Kind::Unavailable,
        "the engine stops before all of it is in the object tier: it is on flash, and goes on at the next start",
    )
}

/// Stores one segment; gives how many bytes of data it has.
fn upload(tier: &ObjectTier, flash: &Flash, segment: SegmentId, kind: SegmentKind) -> Result<u64> {
    let name = data_name(segment, kind);
    let (data, bytes) = match flash.whole(segment, kind) {
        Ok(found) => found,
        // An earlier engine stored it and evicted it; only the withdrawal of its announcement was lost.
        Err(error) if is_missing(&error) => {
            return tier.bytes_of(&name).map_err(|cause| match cause.kind() {
                Kind::NotFound => error,
                _ => cause,
            });
        }
        Err(error) => return Err(error),
    };
    if kind == SegmentKind::File {
        let (index, index_bytes) = flash.index_file(segment)?;
        tier.put_file(&object_name(segment, "idx"), &index, index_bytes)?;
    }
    crash::point("before-upload");
    tier.put_file(&name, &data, bytes)?;
    Ok(bytes)
}
