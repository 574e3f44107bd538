//! Bounds dirty memory: writers wait here until the flusher has freed some, and get its error while it cannot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace_base::{Error, Kind, Result};

/// Far beyond any disk's longest pause; a writer that waited this long is told.
const PATIENCE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Gate {
    bytes_max: u64,
    used: Mutex<u64>,
    freed: Condvar,
    /// Set while flushing fails: errno and message.
    failing: Mutex<Option<(i32, String)>>,
    is_failing: AtomicBool,
}

impl Gate {
    pub fn new(bytes_max: u64) -> Gate {
        Gate {
            bytes_max,
            used: Mutex::new(0),
            freed: Condvar::new(),
            failing: Mutex::new(None),
            is_failing: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn used(&self) -> u64 {
        *self.lock()
    }

    pub fn is_pressed(&self) -> bool {
        self.used() > self.bytes_max / 4 * 3
    }

    /// Whether so many more bytes may have to wait.
    pub fn is_near(&self, bytes: u64) -> bool {
        self.used() + bytes > self.bytes_max / 8 * 7
    }

    pub fn acquire(&self, bytes: u64, wake: impl Fn()) -> Result<()> {
        self.check()?;
        let mut used = self.lock();
        let mut waited = Duration::ZERO;
        // One write larger than the whole gate passes when nothing else is held.
        while *used > 0 && *used + bytes > self.bytes_max {
            drop(used);
            wake();
            self.check()?;
            used = self.lock();
            if *used > 0 && *used + bytes > self.bytes_max {
                let (guard, timeout) =
                    self.freed.wait_timeout(used, STEP).unwrap_or_else(PoisonError::into_inner);
                used = guard;
                if timeout.timed_out() {
                    waited += STEP;
                }
            }
            if waited > PATIENCE {
                return Err(Error::new(
                    Kind::Unavailable,
                    format!("{} bytes of dirty data could not be written to the segments for 60 s", *used),
                ));
            }
        }
        *used += bytes;
        Ok(())
    }

    /// Counts bytes that are in memory already, whatever the bound.
    pub fn add(&self, bytes: u64) {
        *self.lock() += bytes;
    }

    pub fn release(&self, bytes: u64) {
        if bytes > 0 {
            let mut used = self.lock();
            *used = used.saturating_sub(bytes);
            self.freed.notify_all();
        }
    }

    /// The error of the flusher, while it has one.
    fn check(&self) -> Result<()> {
        if !self.is_failing.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*self.failing.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((errno, message)) => Err(Error::errno(*errno, message.clone())),
            None => Ok(()),
        }
    }

    pub fn set_failing(&self, error: Option<&Error>) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match (error, failing.is_some()) {
            (Some(error), false) => {
                tracing::error!(%error, "writing dirty data fails; it stays in memory and is tried again each second");
            }
            (None, true) => tracing::warn!("writing dirty data works again"),
            _ => {}
        }
        *failing = error.map(|error| (error.raw_errno(), error.message().to_owned()));
        self.is_failing.store(failing.is_some(), Ordering::Release);
        self.freed.notify_all();
    }

    pub fn failing(&self) -> Option<String> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(_, text)| text.clone())
    }
}
