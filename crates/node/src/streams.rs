//! A loader's batches: gathered ahead into slots, sent in order, never overwritten while the client has them.
//!
//! ```text
//! positions -> indices -> plan -> slot -> gather (pool) -> ready -> Batch event -> with the client -> Release
//!              at most `ahead_max` batches that the client has not read -----^
//! ```
//! One thread, the connection's own, does all but the gathering. It waits for commands, for gathers that are
//! done, and for the client's death.
//!
//! **How far ahead.** A batch counts as read when the socket's queue is empty (the kernel tells): `prefetch`
//! batches beyond that are gathered. A client reads its socket when `next()` finds nothing received before, so
//! what it has read but not yet taken is at most one queue's content, `ahead_max` batches again.
//!
//! **When memory runs out.** Slots come from the engine's budget. Gathering ahead takes a fair share of it;
//! only the batch that a client waits for may take the rest. If that one cannot be had, the client has to
//! release something, which a training loop does with every step. A client that keeps all its batches never
//! will: it has more of them than it could have without keeping, and gets an error that says so.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headrace_base::{Error, Kind, Result, time};
use headrace_format::message::{
    BatchLayout, ErrorBody, LoaderRequest, StreamCommand, StreamEvent, decode_meta, encode_meta,
};
use headrace_format::order::Permutation;
use headrace_volume::{Identity, SealedView};

use crate::batch::{Gather, Plan};
use crate::channel::{Broken, Channel};
use crate::node::Node;
use crate::slots::SlotTable;
use crate::wake::Wake;

const PREFETCH_MAX: u32 = 1024;
/// Batches that a loop may well have at one time beside those that wait for it: the one it works on, the one
/// before it, and as many in some pipeline of its own.
const KEPT_NORMALLY: u64 = 4;
/// Of the budget, in percent, what all streams together may take for gathering ahead.
const AHEAD_SHARE_PERCENT: u64 = 75;
/// Reading by the client and memory given back by others ring no bell: they are looked for.
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_LAST: Duration = Duration::from_millis(250);
/// Where the budget is so small that keeping cannot be told from working, time tells.
const SMALL_BUDGET_PATIENCE: Duration = Duration::from_secs(10);
/// A client with nothing of its own waits this long for memory that others have.
const OTHERS_PATIENCE: Duration = Duration::from_secs(60);

/// Which samples each batch of a stream has.
#[derive(Debug)]
struct Order {
    samples: u64,
    permutation: Option<Permutation>,
    rank: u64,
    world_size: u64,
    batch_size: u64,
    batches: u64,
}

impl Order {
    fn new(samples: u64, request: &LoaderRequest) -> Order {
        let (rank, world_size) = (u64::from(request.rank), u64::from(request.world_size));
        let batch_size = u64::from(request.batch_size);
        let own = samples.saturating_sub(rank).div_ceil(world_size);
        let batches = if request.drop_last {
            // All ranks take as many steps as the one with the fewest samples can.
            samples / world_size / batch_size
        } else {
            own.div_ceil(batch_size)
        };
        let permutation = request.shuffle.then(|| Permutation::new(samples, request.seed, request.epoch));
        Order { samples, permutation, rank, world_size, batch_size, batches }
    }

    fn indices(&self, batch: u64) -> Vec<u64> {
        // Below `batches` nothing here overflows: all positions are below `samples`.
        let first = self.rank + batch * self.batch_size * self.world_size;
        let positions = (0..self.batch_size)
            .map_while(|k| k.checked_mul(self.world_size)?.checked_add(first))
            .take_while(|position| *position < self.samples);
        match &self.permutation {
            Some(permutation) => positions.map(|position| permutation.index(position)).collect(),
            None => positions.collect(),
        }
    }
}

/// A loader request that was found good.
#[derive(Debug)]
pub struct StreamPlan {
    view: Arc<SealedView>,
    who: Option<Identity>,
    order: Order,
    first_batch: u64,
    prefetch: u64,
}

impl StreamPlan {
    pub fn new(view: Arc<SealedView>, who: Option<Identity>, request: &LoaderRequest) -> Result<StreamPlan> {
        if request.batch_size == 0 {
            return Err(Error::invalid("batch_size must be at least 1"));
        }
        if request.rank >= request.world_size {
            return Err(Error::invalid(format!(
                "rank {} of world size {}: ranks are 0 to world size - 1",
                request.rank, request.world_size
            )));
        }
        if request.prefetch > PREFETCH_MAX {
            return Err(Error::invalid(format!(
                "prefetch {} is more than the {PREFETCH_MAX} batches that can be gathered ahead",
                request.prefetch
            )));
        }
        Ok(StreamPlan {
            order: Order::new(view.samples(), request),
            view,
            who,
            first_batch: request.first_batch,
            prefetch: u64::from(request.prefetch.max(1)),
        })
    }
}

struct Ahead {
    batch: u64,
    slot: u32,
    gather: Arc<Gather>,
}

/// The next batch, laid out but not begun.
struct Pending {
    plan: Plan,
    /// When memory for it was first wanted and not there.
    starving_since: Option<Instant>,
    warned: bool,
}

impl Pending {
    fn waited(&self) -> Duration {
        self.starving_since.map_or(Duration::ZERO, |since| time::monotonic_now() - since)
    }
}

struct Stream<'a> {
    node: &'a Arc<Node>,
    channel: &'a mut Channel,
    plan: StreamPlan,
    table: SlotTable,
    bell: Arc<Wake>,
    /// Being gathered or ready, in the order of the batches.
    ahead: VecDeque<Ahead>,
    next_batch: u64,
    pending: Option<Pending>,
    /// Batches sent, and how many of them the client has certainly read.
    sent: u64,
    read: u64,
    /// The last event, End or Error, was sent.
    over: bool,
}

/// Serves the stream until the client leaves. Returns Protocol for a client that cannot be understood.
pub fn run(node: &Arc<Node>, channel: &mut Channel, plan: StreamPlan) -> Result<(), Broken> {
    let _count = node.count_stream();
    let bell = Arc::new(Wake::new().map_err(Broken::Protocol)?);
    let next_batch = plan.first_batch;
    let mut stream = Stream {
        node,
        channel,
        plan,
        table: SlotTable::default(),
        bell,
        ahead: VecDeque::new(),
        next_batch,
        pending: None,
        sent: 0,
        read: 0,
        over: false,
    };
    let outcome = stream.serve();
    for ahead in &stream.ahead {
        ahead.gather.cancel();
    }
    outcome
}

impl Stream<'_> {
    fn serve(&mut self) -> Result<(), Broken> {
        let mut look = LOOK_FIRST;
        loop {
            let mut progress = self.take_commands()?;
            if !self.over {
                progress |= self.send_ready()?;
                progress |= self.gather_ahead()?;
            }
            if progress {
                look = LOOK_FIRST;
                continue;
            }
            let patience = (!self.over && self.looks_for_something()).then_some(look);
            self.channel.wait_with(self.bell.as_fd(), patience)?;
            self.bell.clear();
            look = (look * 2).min(LOOK_LAST);
        }
    }

    fn take_commands(&mut self) -> Result<bool, Broken> {
        let mut progress = false;
        while let Some(meta) = self.channel.try_message()? {
            let StreamCommand::Release { slot } = decode_meta(&meta).map_err(Broken::Protocol)?;
            if let Err(error) = self.table.release(slot) {
                self.finish(&StreamEvent::Error(ErrorBody::from(&error)))?;
                return Err(Broken::Protocol(error));
            }
            progress = true;
        }
        if progress && self.over {
            self.table.drop_unused();
        }
        Ok(progress)
    }

    fn send_ready(&mut self) -> Result<bool, Broken> {
        let mut progress = false;
        while let Some(ahead) = self.ahead.pop_front_if(|ahead| ahead.gather.is_done()) {
            progress = true;
            match ahead.gather.outcome() {
                Ok(layout) => self.send_batch(&ahead, layout)?,
                Err(error) => {
                    let error = error.context(format_args!("batch {}", ahead.batch));
                    self.fail(&error)?;
                    return Ok(true);
                }
            }
        }
        if self.ahead.is_empty() && self.next_batch >= self.plan.order.batches {
            self.finish(&StreamEvent::End {})?;
            progress = true;
        }
        Ok(progress)
    }

    fn send_batch(&mut self, ahead: &Ahead, layout: BatchLayout) -> Result<(), Broken> {
        let numbers = &self.node.numbers;
        numbers.loader_batches.increment(1);
        numbers.loader_samples.increment(layout.count);
        numbers.loader_bytes.increment(layout.data_bytes);
        numbers.gather_seconds.record(layout.gather_ns as f64 / 1e9);
        let announces = self.table.give(ahead.slot);
        let event = StreamEvent::Batch { batch: ahead.batch, slot: ahead.slot, layout };
        let meta = encode_meta(&event).map_err(Broken::Protocol)?;
        let memory = self.table.memory(ahead.slot).filter(|_| announces);
        let fds: Vec<_> = memory.iter().map(|memory| memory.fd()).collect();
        self.channel.send(&meta, &[], &fds)?;
        self.sent += 1;
        Ok(())
    }

    fn fail(&mut self, error: &Error) -> Result<(), Broken> {
        metrics::counter!("headrace_errors_total", "kind" => error.kind().name()).increment(1);
        self.finish(&StreamEvent::Error(ErrorBody::from(error)))
    }

    /// The last event. What the client has stays its own until it leaves; the rest is given back.
    fn finish(&mut self, event: &StreamEvent) -> Result<(), Broken> {
        self.over = true;
        for ahead in self.ahead.drain(..) {
            ahead.gather.cancel();
        }
        self.pending = None;
        self.table.drop_unused();
        let meta = encode_meta(event).map_err(Broken::Protocol)?;
        self.channel.send(&meta, &[], &[])
    }

    /// How many batches may be there that the client has not read.
    fn ahead_max(&self, batch_bytes: u64) -> u64 {
        let fit = self.node.volume.budget().bytes_max() / batch_bytes.max(1);
        self.plan.prefetch.min(fit.saturating_sub(KEPT_NORMALLY)).max(1)
    }

    fn gather_ahead(&mut self) -> Result<bool, Broken> {
        let mut progress = false;
        while !self.over && (self.next_batch < self.plan.order.batches) {
            let unread = self.ahead.len() as u64 + self.sent - self.read;
            if unread > 0 && self.channel.all_was_read()? {
                progress |= self.read < self.sent;
                self.read = self.sent;
            }
            let unread = self.ahead.len() as u64 + self.sent - self.read;
            if unread >= self.plan.prefetch {
                break;
            }
            let pending = match self.pending.take() {
                Some(pending) => pending,
                None => match Plan::new(&self.plan.view, self.plan.order.indices(self.next_batch)) {
                    Ok(plan) => Pending { plan, starving_since: None, warned: false },
                    Err(error) => {
                        self.fail(&error)?;
                        return Ok(true);
                    }
                },
            };
            if unread >= self.ahead_max(pending.plan.bytes()) {
                self.pending = Some(pending);
                break;
            }
            match self.begin(pending, unread == 0) {
                Ok(true) => progress = true,
                Ok(false) => break,
                Err(error) => {
                    self.fail(&error)?;
                    return Ok(true);
                }
            }
        }
        Ok(progress)
    }

    /// Starts to gather the next batch. False: there is no memory for it now. `awaited`: the client has
    /// nothing else to read.
    fn begin(&mut self, mut pending: Pending, awaited: bool) -> Result<bool> {
        let budget = self.node.volume.budget();
        let bytes = pending.plan.bytes();
        if bytes > budget.bytes_max() {
            return Err(Error::new(
                Kind::Full,
                format!(
                    "batch {} has {bytes} bytes, more than the engine's whole budget for batches, {}: make \
                     batches smaller or start the engine with more memory (--memory-bytes)",
                    self.next_batch,
                    budget.bytes_max()
                ),
            ));
        }
        let share =
            budget.bytes_max() / 100 * AHEAD_SHARE_PERCENT / u64::from(self.node.streams_count().max(1));
        let bytes_max = if awaited || self.table.count() < 2 { u64::MAX } else { share };
        let Some(slot) = self.table.acquire(bytes, budget, bytes_max)? else {
            // Wanting to gather further ahead is no want.
            if awaited {
                pending.starving_since.get_or_insert_with(time::monotonic_now);
                self.check_starving(&pending)?;
                self.warn_starving(&mut pending);
            }
            self.pending = Some(pending);
            return Ok(false);
        };
        if pending.starving_since.is_some() {
            self.node.numbers.slot_wait_seconds.record(pending.waited().as_secs_f64());
        }
        let memory =
            self.table.memory(slot).ok_or_else(|| Error::internal(format!("slot {slot} has no memory")))?;
        let gather = Arc::new(Gather::new(
            pending.plan,
            Arc::clone(&self.plan.view),
            self.plan.who.clone(),
            Arc::clone(memory),
            Arc::clone(&self.bell),
        ));
        self.node.pool.submit(Arc::clone(&gather));
        self.ahead.push_back(Ahead { batch: self.next_batch, slot, gather });
        self.next_batch += 1;
        Ok(true)
    }

    /// The client has read all, nothing is on the way, and there is no memory for more: is that an error?
    fn check_starving(&self, pending: &Pending) -> Result<()> {
        let budget = self.node.volume.budget();
        let bytes = pending.plan.bytes();
        let waited = pending.waited();
        let (kept, kept_bytes) = self.table.with_client();
        let certain = self.ahead_max(bytes) + KEPT_NORMALLY;
        let all_that_fit = (budget.bytes_max() / bytes.max(1)).max(1);
        let keeps = kept >= certain || (kept >= all_that_fit && waited >= SMALL_BUDGET_PATIENCE);
        if keeps {
            return Err(Error::new(
                Kind::Full,
                format!(
                    "no memory for batch {}: this client keeps {kept} batches, {kept_bytes} bytes, and the engine's \
                     budget for batches is {} bytes ({} in use): let go of batches (and of arrays that are views \
                     of them; .copy() what is to stay) or start the engine with more memory (--memory-bytes)",
                    self.next_batch,
                    budget.bytes_max(),
                    budget.used()
                ),
            ));
        }
        if kept == 0 && waited >= OTHERS_PATIENCE {
            return Err(Error::new(
                Kind::Full,
                format!(
                    "no memory for batch {} of {bytes} bytes for {} s: other clients keep {} of the {} bytes that \
                     the engine has for batches: let them go or start it with more memory (--memory-bytes)",
                    self.next_batch,
                    waited.as_secs(),
                    budget.used(),
                    budget.bytes_max()
                ),
            ));
        }
        Ok(())
    }

    fn warn_starving(&self, pending: &mut Pending) {
        if pending.warned || pending.waited() < OTHERS_PATIENCE {
            return;
        }
        pending.warned = true;
        let (kept, kept_bytes) = self.table.with_client();
        let budget = self.node.volume.budget();
        tracing::warn!(
            batch = self.next_batch,
            kept,
            kept_bytes,
            buffers_bytes = budget.used(),
            buffers_bytes_max = budget.bytes_max(),
            "a loader waits for memory"
        );
    }

    /// Whether something may change that rings no bell.
    fn looks_for_something(&self) -> bool {
        self.next_batch < self.plan.order.batches && (self.read < self.sent || self.ahead.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(batch_size: u32, rank: u32, world_size: u32, drop_last: bool, shuffle: bool) -> LoaderRequest {
        LoaderRequest {
            seal: String::new(),
            batch_size,
            shuffle,
            seed: 5,
            epoch: 2,
            drop_last,
            first_batch: 0,
            prefetch: 4,
            rank,
            world_size,
        }
    }

    #[test]
    fn ranks_share_an_epoch_without_gap_or_overlap() {
        for samples in [0, 1, 2, 7, 64, 1001] {
            for world_size in [1, 2, 3, 8] {
                for shuffle in [false, true] {
                    let mut seen = Vec::new();
                    for rank in 0..world_size {
                        let order = Order::new(samples, &request(4, rank, world_size, false, shuffle));
                        for batch in 0..order.batches {
                            let indices = order.indices(batch);
                            assert!(!indices.is_empty() && indices.len() <= 4);
                            assert!(batch + 1 == order.batches || indices.len() == 4);
                            seen.extend(indices);
                        }
                    }
                    seen.sort_unstable();
                    assert_eq!(seen, (0..samples).collect::<Vec<_>>(), "{world_size} ranks");
                }
            }
        }
    }

    #[test]
    fn drop_last_gives_every_rank_the_same_full_batches() {
        for (samples, world_size, batches) in
            [(1001, 3, 83), (7, 2, 0), (8, 2, 1), (9, 2, 1), (15, 2, 1), (16, 2, 2)]
        {
            for rank in 0..world_size {
                let order = Order::new(samples, &request(4, rank, world_size, true, true));
                assert_eq!(order.batches, batches, "{samples} samples on {world_size} ranks");
                assert!((0..batches).all(|batch| order.indices(batch).len() == 4));
            }
        }
    }

    #[test]
    fn an_order_in_sequence_takes_every_worldth_sample() {
        let order = Order::new(10, &request(2, 1, 3, false, false));
        assert_eq!((order.indices(0), order.indices(1), order.batches), (vec![1, 4], vec![7], 2));
        let whole = Order::new(u64::MAX, &request(u32::MAX, 7, 1, false, false));
        assert_eq!(whole.batches, u64::MAX.saturating_sub(7).div_ceil(u64::from(u32::MAX)));
        assert_eq!(whole.rank, 7);
    }
}
