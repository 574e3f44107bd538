//! One memory budget for every buffer of the engine: dirty data, gather slots, frames being built.
//! Whoever wants memory reserves it first; a reservation gives it back when it is dropped.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::time;

#[derive(Debug)]
struct State {
    used: u64,
    peak: u64,
}

#[derive(Debug)]
pub struct Budget {
    name: &'static str,
    bytes_max: u64,
    state: Mutex<State>,
    freed: Condvar,
}

impl Budget {
    pub fn new(name: &'static str, bytes_max: u64) -> Arc<Budget> {
        Arc::new(Budget {
            name,
            bytes_max,
            state: Mutex::new(State { used: 0, peak: 0 }),
            freed: Condvar::new(),
        })
    }

    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    pub fn used(&self) -> u64 {
        self.lock().used
    }

    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    /// Takes `bytes` at once, or says that they are not there.
    pub fn try_reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut state = self.lock();
        (state.used + bytes <= self.bytes_max).then(|| self.take(&mut state, bytes))
    }

    /// Takes `bytes`, waiting for others to give back. One reservation larger than the whole budget is
    /// refused at once (`Invalid`); waiting longer than `patience` is `Full`.
    pub fn reserve(self: &Arc<Self>, bytes: u64, patience: Duration) -> Result<Reservation> {
        if bytes > self.bytes_max {
            return Err(Error::invalid(format!(
                "{bytes} bytes are more than the whole budget for {}, {} bytes",
                self.name, self.bytes_max
            )));
        }
        let deadline = time::monotonic_now() + patience;
        let mut state = self.lock();
        while state.used + bytes > self.bytes_max {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if left.is_zero() {
                return Err(Error::new(
                    Kind::Full,
                    format!(
                        "no {bytes} bytes free in the budget for {} ({} of {} in use) after {} s",
                        self.name,
                        state.used,
                        self.bytes_max,
                        patience.as_secs()
                    ),
                ));
            }
            state = self.freed.wait_timeout(state, left).unwrap_or_else(|poison| poison.into_inner()).0;
        }
        Ok(self.take(&mut state, bytes))
    }

    fn take(self: &Arc<Self>, state: &mut State, bytes: u64) -> Reservation {
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        Reservation { budget: Arc::clone(self), bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A count stays right even if its holder panicked: it is changed in one step.
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes over what `other` holds.
    pub fn absorb(&mut self, mut other: Reservation) {
        assert!(Arc::ptr_eq(&self.budget, &other.budget), "both reservations are of one budget");
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Gives `bytes` back early.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.lock().used -= bytes;
        self.budget.freed.notify_all();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.shrink(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_gives_back_and_oversize_is_refused() {
        let budget = Budget::new("test", 100);
        let first = budget.try_reserve(80).unwrap();
        assert!(budget.try_reserve(30).is_none());
        assert_eq!(budget.reserve(30, Duration::from_millis(1)).unwrap_err().kind(), Kind::Full);
        assert_eq!(budget.reserve(101, Duration::ZERO).unwrap_err().kind(), Kind::Invalid);
        drop(first);
        assert_eq!(budget.try_reserve(100).unwrap().bytes(), 100);
        assert_eq!((budget.used(), budget.peak()), (0, 100));
    }
}
