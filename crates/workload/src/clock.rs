//! Threads that start together, and the time from the first start to the last end.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use headrace_base::{Error, Result, thread, time};

/// What one worker did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub operations: u64,
    pub bytes: u64,
}

/// Runs `work(worker)` on `workers` threads. Everything that `work` needs is made before.
pub fn together(
    workers: usize,
    work: impl Fn(usize) -> Result<Done> + Send + Sync + 'static,
) -> Result<(Done, Duration)> {
    let work = Arc::new(work);
    let barrier = Arc::new(Barrier::new(workers));
    let threads: Vec<_> = (0..workers)
        .map(|worker| {
            let (work, barrier) = (Arc::clone(&work), Arc::clone(&barrier));
            thread::spawn("workload", move || {
                barrier.wait();
                let start = time::monotonic_now();
                let outcome = work(worker);
                (outcome, start, time::monotonic_now())
            })
        })
        // Should one not start, the others would wait for ever: the process ends with the error.
        .collect::<Result<_>>()?;
    let mut total = Done::default();
    let mut span = None;
    for thread in threads {
        let (outcome, start, end) = thread.join().map_err(|_| Error::internal("a worker panicked"))?;
        let done = outcome?;
        total.operations += done.operations;
        total.bytes += done.bytes;
        let (first, last) = span.unwrap_or((start, end));
        span = Some((start.min(first), end.max(last)));
    }
    let (first, last) = span.ok_or_else(|| Error::invalid("no worker"))?;
    Ok((total, last - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_run_at_the_same_time_and_are_added_up() {
        let meeting = Barrier::new(4);
        let (done, time) = together(4, move |worker| {
            // Hangs unless all four are there.
            meeting.wait();
            time::sleep(Duration::from_millis(20));
            Ok(Done { operations: worker as u64, bytes: 10 })
        })
        .unwrap();
        assert_eq!((done.operations, done.bytes), (6, 40));
        assert!(time >= Duration::from_millis(20) && time < Duration::from_secs(5));
        assert!(together(2, |_| Err(Error::invalid("no"))).is_err());
    }
}
