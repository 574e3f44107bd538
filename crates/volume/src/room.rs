//! Keeps a little of the disk for what gives space back: removals, and the start after a crash, are metadata
//! commits, and a database on a disk that is full to the last byte can make none.
//!
//! Bytes of files stop at the reserve, new names at half of it; removals may use all.

use std::sync::Arc;

use headrace_base::error::errno;
use headrace_base::{Error, MIB, Result};
use headrace_flash::Flash;

/// A full overlay of the metadata store, or a sixteenth of a disk that is small.
const RESERVE_BYTES_MAX: u64 = 16 * MIB;
const RESERVE_SHARE: u64 = 16;

#[derive(Debug)]
pub struct Room {
    flash: Arc<Flash>,
    reserve_bytes: u64,
}

impl Room {
    pub fn new(flash: Arc<Flash>) -> Result<Room> {
        let (total, _, _) = flash.space()?;
        Ok(Room { flash, reserve_bytes: RESERVE_BYTES_MAX.min(total / RESERVE_SHARE) })
    }

    /// Full unless `bytes` of file contents can be stored. Asks the kernel: about a microsecond.
    pub fn check_bytes(&self, bytes: u64) -> Result<()> {
        self.check(bytes, self.reserve_bytes)
    }

    /// Full unless a new name can be stored.
    pub fn check_name(&self) -> Result<()> {
        self.check(0, self.reserve_bytes / 2)
    }

    fn check(&self, bytes: u64, reserve: u64) -> Result<()> {
        let (_, _, available) = self.flash.space()?;
        if available >= bytes + reserve {
            return Ok(());
        }
        Err(Error::errno(
            errno::ENOSPC,
            format!(
                "the disk is full: {available} bytes are left, {reserve} of them are kept for removals and \
                 restarts: free space on it, or remove files"
            ),
        ))
    }
}
