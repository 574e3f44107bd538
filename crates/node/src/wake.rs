//! A bell that `poll` can wait for: any thread rings it, one thread hears it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use headrace_base::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};

#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    pub fn new() -> Result<Wake> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|cause| Error::io("make an eventfd", cause.into()))?;
        Ok(Wake(fd))
    }

    /// Rings until somebody calls `clear`. Rung twice is rung once.
    pub fn ring(&self) {
        // It fails only when the counter is full, and then it is rung.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub fn clear(&self) {
        // It fails only when it was not rung.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
