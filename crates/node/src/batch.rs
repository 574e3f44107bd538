//! One batch: where its samples go in memory, and gathering them there.
//!
//! ```text
//! 0            indices   u64[count]
//! offsets_at   offsets   u64[count + 1], from data_at on
//! data_at      data      a multiple of 64; sample i is [offsets[i], offsets[i + 1])
//! ```
//! Samples are read in the order in which they lie on disk, whatever their order in the batch. Many threads
//! read for one batch (`pool`): each claims a run of samples, whose places in memory are its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use headrace_base::{Error, Result, time};
use headrace_format::message::BatchLayout;
use headrace_volume::{Identity, SealedView};
use rustix::event::{PollFd, PollFlags, poll};

use crate::slots::SlotMemory;
use crate::wake::Wake;

/// NumPy arrays and decoders like their data on cache lines.
const DATA_ALIGNMENT: u64 = 64;
/// Samples claimed at once: enough to make claiming cheap, few enough to spread a batch over the threads.
const RUN_SAMPLES: usize = 16;
/// Large samples are claimed in runs of about these bytes.
const RUN_BYTES: u64 = 256 << 10;

#[derive(Clone, Copy, Debug)]
struct Item {
    index: u64,
    start: u64,
    bytes: u64,
}

#[derive(Debug)]
pub struct Plan {
    indices: Vec<u64>,
    offsets: Vec<u64>,
    items: Vec<Item>,
    offsets_at: u64,
    data_at: u64,
}

impl Plan {
    /// Invalid if an index is out of range.
    pub fn new(view: &SealedView, indices: Vec<u64>) -> Result<Plan> {
        let mut offsets = Vec::with_capacity(indices.len() + 1);
        let mut placed = Vec::with_capacity(indices.len());
        let mut end = 0_u64;
        offsets.push(0);
        for &index in &indices {
            let bytes = view.sample_bytes(index)?;
            placed.push((view.sample_place(index), Item { index, start: end, bytes }));
            end = end.checked_add(bytes).ok_or_else(|| Error::invalid("a batch of more than 2^64 bytes"))?;
            offsets.push(end);
        }
        placed.sort_unstable_by_key(|(place, _)| *place);
        let items = placed.into_iter().map(|(_, item)| item).collect();
        let offsets_at = indices.len() as u64 * 8;
        let data_at = (offsets_at + offsets.len() as u64 * 8).next_multiple_of(DATA_ALIGNMENT);
        Ok(Plan { indices, offsets, items, offsets_at, data_at })
    }

    pub fn count(&self) -> u64 {
        self.indices.len() as u64
    }

    pub fn data_bytes(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// What the memory must hold.
    pub fn bytes(&self) -> u64 {
        self.data_at.saturating_add(self.data_bytes())
    }

    pub fn layout(&self, slot_bytes: u64, gather_ns: u64) -> BatchLayout {
        BatchLayout {
            count: self.count(),
            offsets_at: self.offsets_at,
            data_at: self.data_at,
            data_bytes: self.data_bytes(),
            slot_bytes,
            gather_ns,
        }
    }
}

/// A batch being gathered.
#[derive(Debug)]
pub struct Gather {
    pub plan: Plan,
    view: Arc<SealedView>,
    /// Whose rights are checked for each sample. None: they may read all.
    who: Option<Identity>,
    memory: Arc<SlotMemory>,
    run: usize,
    claimed: AtomicUsize,
    left: AtomicUsize,
    cancelled: AtomicBool,
    failed: Mutex<Option<Error>>,
    begun: Instant,
    gather_ns: AtomicU64,
    done: Arc<Wake>,
}

impl Gather {
    /// `memory` is the caller's alone and holds at least `plan.bytes()`. `done` rings at the end.
    pub fn new(
        plan: Plan,
        view: Arc<SealedView>,
        who: Option<Identity>,
        memory: Arc<SlotMemory>,
        done: Arc<Wake>,
    ) -> Gather {
        // All of it at once: the store answers many requests at a time as quickly as one.
        plan.items.iter().for_each(|item| view.prefetch(item.index));
        for (at, numbers) in [(0, &plan.indices), (plan.offsets_at, &plan.offsets)] {
            // SAFETY: the caller alone has this memory, and no thread has begun to read into it.
            let part = unsafe { memory.part(at, numbers.len() as u64 * 8) };
            for (bytes, number) in part.chunks_exact_mut(8).zip(numbers) {
                bytes.copy_from_slice(&number.to_le_bytes());
            }
        }
        let samples = plan.items.len();
        let mean_bytes = (plan.data_bytes() / samples.max(1) as u64).max(1);
        Gather {
            run: (RUN_BYTES / mean_bytes).clamp(1, RUN_SAMPLES as u64) as usize,
            claimed: AtomicUsize::new(0),
            left: AtomicUsize::new(samples),
            cancelled: AtomicBool::new(false),
            failed: Mutex::new(None),
            begun: time::monotonic_now(),
            gather_ns: AtomicU64::new(0),
            plan,
            view,
            who,
            memory,
            done,
        }
    }

    pub fn is_done(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Whether every sample has been claimed by some thread.
    pub fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) >= self.plan.items.len()
    }

    /// Blocks until it is done.
    pub fn wait(&self) {
        while !self.is_done() {
            let mut fds = [PollFd::new(&*self.done, PollFlags::IN)];
            // Whatever ends the wait, the condition is looked at again.
            let _ = poll(&mut fds, None);
        }
    }

    /// Once it is done: its layout, or the first error.
    pub fn outcome(&self) -> Result<BatchLayout> {
        match self.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(self.plan.layout(self.memory.bytes(), self.gather_ns.load(Ordering::Relaxed))),
        }
    }

    /// What is not yet read need not be.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Claims a run of samples and reads it. False: all are claimed. Gives how slow it was compared to what
    /// the page cache can do: above 1, the thread waited for something.
    pub fn work(&self) -> Option<f64> {
        let start = self.claimed.fetch_add(self.run, Ordering::Relaxed);
        let items = self.plan.items.get(start..)?;
        let items = &items[..items.len().min(self.run)];
        if items.is_empty() {
            return None;
        }
        let begun = time::monotonic_now();
        if let Err(error) = self.read(items) {
            self.cancel();
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        let ended = time::monotonic_now();
        self.gather_ns.fetch_max(nanos(ended - self.begun), Ordering::Relaxed);
        // Release: whoever sees 0 sees the bytes, and the time of the thread that came last.
        if self.left.fetch_sub(items.len(), Ordering::AcqRel) == items.len() {
            self.done.ring();
        }
        let bytes: u64 = items.iter().map(|item| item.bytes).sum();
        Some((ended - begun).as_secs_f64() / expected(items.len(), bytes).as_secs_f64())
    }

    fn read(&self, items: &[Item]) -> Result<()> {
        for item in items {
            if self.cancelled.load(Ordering::Relaxed) {
                return Ok(());
            }
            // SAFETY: the samples' parts do not overlap, and each sample is claimed by one thread.
            let part = unsafe { self.memory.part(self.plan.data_at + item.start, item.bytes) };
            // A bug below must end one batch, not leave its client waiting for ever.
            catch_unwind(AssertUnwindSafe(|| {
                if let Some(who) = &self.who {
                    self.view.check_readable(who, item.index)?;
                }
                self.view.read_sample(item.index, part)
            }))
            .unwrap_or_else(|_| {
                Err(Error::internal(format!(
                    "reading sample {}, {:?}, failed in the engine: see its log",
                    item.index,
                    String::from_utf8_lossy(&self.view.sample_path(item.index))
                )))
            })?;
        }
        Ok(())
    }
}

/// What reading samples takes at most when the page cache has them: measured about 6 us for 10 KiB; a device
/// takes 60 us and more.
fn expected(samples: usize, bytes: u64) -> Duration {
    Duration::from_micros(15 * samples as u64) + Duration::from_nanos(bytes)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
