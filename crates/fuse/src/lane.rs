//! A second lane for requests that have to wait for the object tier: cold reads, writes while the backlog is full. The
//! threads that answer the kernel never wait for it, so a store that is down holds up those who need it and nobody else.
//!
//! Threads are started when there is work and none is idle, up to `THREADS_MAX`, and leave when they have had none for a
//! while. What is more waits its turn.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace_base::thread;

/// More than connections to the store; each is a stack that is hardly touched.
const THREADS_MAX: usize = 128;
const IDLE_MAX: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
pub struct Lane(Arc<Shared>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (guard, timeout) =
                self.work.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if timeout.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl Lane {
    /// Runs the job on another thread. On this one if none can be started: late is better than never.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        if state.idle <= state.queue.len() && state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.0);
            match thread::spawn("fuse-waiting", move || shared.work()) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    drop(state);
                    tracing::warn!(%error, "a request that waits is answered by a thread that others wait for");
                    return job();
                }
                Err(_) => {}
            }
        }
        state.queue.push_back(Box::new(job));
        drop(state);
        self.0.work.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn waiting_jobs_do_not_hold_up_others_and_none_is_lost() {
        let lane = Lane::default();
        let (release, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (said, heard) = mpsc::channel();
        for _ in 0..8 {
            let (gate, said) = (Arc::clone(&gate), said.clone());
            lane.run(move || {
                let _ = gate.lock().unwrap().recv();
                said.send("waited").unwrap();
            });
        }
        let free = said.clone();
        lane.run(move || free.send("free").unwrap());
        assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok("free"));
        drop(release);
        for _ in 0..8 {
            assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok("waited"));
        }
        for _ in 0..1000 {
            let said = said.clone();
            lane.run(move || said.send("more").unwrap());
        }
        for _ in 0..1000 {
            assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok("more"));
        }
        assert!(lane.0.lock().threads <= THREADS_MAX);
    }
}
