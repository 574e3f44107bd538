//! The threads that gather batches, shared by all streams. They are started when there is work for them.
//!
//! Batches are gathered first come, first served, many threads on one batch. How many: as many as there are
//! cores while samples come from memory, since more would only take turns; and when reading turns out to be
//! slow (it waits for a disk), each slow run wakes another thread, until as many are in flight as a fast SSD
//! needs to be busy.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use headrace_base::thread;

use crate::batch::Gather;

/// Random reads in flight that keep an NVMe SSD busy: with 10 KiB each, measured, 16 reach nine tenths of what
/// 64 do.
const WAITING_THREADS: usize = 16;

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Arc<Gather>>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for work and were not woken; threads that were woken or work. Whoever wakes one
    /// counts it from here to there, and leaves it a ticket.
    idle: usize,
    busy: usize,
    tickets: usize,
    stopping: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    cores: usize,
    threads_max: usize,
}

#[derive(Debug)]
pub struct Pool(Arc<Shared>);

impl Pool {
    pub fn new() -> Pool {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Pool(Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            cores,
            threads_max: 2 * cores + WAITING_THREADS,
        }))
    }

    pub fn submit(&self, gather: Arc<Gather>) {
        let mut state = self.0.lock();
        state.queue.push_back(gather);
        while state.busy < self.0.cores {
            let before = state.busy;
            self.0.wake_one(&mut state);
            if state.busy == before {
                break;
            }
        }
    }

    /// Waits until what was submitted is done, and ends the threads.
    pub fn stop(&self) {
        let threads = {
            let mut state = self.0.lock();
            state.stopping = true;
            std::mem::take(&mut state.threads)
        };
        self.0.work.notify_all();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a gathering thread had panicked");
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more thread at work, if there may be one.
    fn wake_one(self: &Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            state.idle -= 1;
            state.busy += 1;
            state.tickets += 1;
            self.work.notify_one();
        } else if state.threads.len() < self.threads_max && !state.stopping {
            let shared = Arc::clone(self);
            match thread::spawn("gather", move || shared.run()) {
                Ok(handle) => {
                    state.threads.push(handle);
                    state.busy += 1;
                }
                // Without any thread nothing would ever be gathered; with some, only slower.
                Err(error) if state.threads.is_empty() => {
                    tracing::error!(%error, "no thread to gather with");
                    for gather in state.queue.drain(..) {
                        while gather.work().is_some() {}
                    }
                }
                Err(error) => tracing::warn!(%error, "fewer threads to gather with than wanted"),
            }
        }
    }

    fn run(self: &Arc<Self>) {
        let mut state = self.lock();
        loop {
            while state.queue.front().is_some_and(|gather| gather.is_claimed()) {
                state.queue.pop_front();
            }
            if let Some(gather) = state.queue.front().cloned() {
                drop(state);
                while let Some(slowness) = gather.work() {
                    if slowness > 1.0 {
                        let mut state = self.lock();
                        let more = state.queue.iter().any(|gather| !gather.is_claimed());
                        if more && state.busy < self.threads_max {
                            self.wake_one(&mut state);
                        }
                    }
                }
                state = self.lock();
            } else if state.stopping {
                return;
            } else {
                state.busy -= 1;
                state.idle += 1;
                while state.tickets == 0 && !state.stopping {
                    state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                // Without a ticket it stops, and nobody counts any more.
                state.tickets = state.tickets.saturating_sub(1);
            }
        }
    }
}
