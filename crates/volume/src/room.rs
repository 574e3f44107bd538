//! Keeps a little of the disk for what gives space back: removals, and the start after a crash, are metadata
//! commits, and a database on a disk that is full to the last byte can make none.
//!
//! Bytes of files stop at the reserve, new names at half of it; removals may use all.

use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, MIB, Result};
use headrace_flash::Flash;

use crate::remote::Remote;

/// A full overlay of the metadata store, or a sixteenth of a disk that is small.
const RESERVE_BYTES_MAX: u64 = 16 * MIB;
const RESERVE_SHARE: u64 = 16;
/// Writers wait so long while no upload succeeds, then they are told.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(10);
/// So many segments fit on the smallest flash tier.
const SEGMENTS_MIN: u64 = 8;

#[derive(Debug)]
pub struct Room {
    flash: Arc<Flash>,
    /// Some: the volume has an object tier, and what is clean can go.
    remote: Option<Arc<Remote>>,
    reserve_bytes: u64,
}

/// Of the flash tier, what may be dirty: the rest is for the segments that are open, and for reads.
fn dirty_bytes_max(remote: &Remote) -> u64 {
    remote.bytes_max() / 10 * 9
}

impl Room {
    pub fn new(flash: Arc<Flash>, remote: Option<Arc<Remote>>) -> Result<Room> {
        let (total, _, _) = flash.space()?;
        Ok(Room { flash, remote, reserve_bytes: RESERVE_BYTES_MAX.min(total / RESERVE_SHARE) })
    }

    /// Full unless `bytes` of file contents can be stored. Asks the kernel: about a microsecond.
    pub fn check_bytes(&self, bytes: u64) -> Result<()> {
        let Some(remote) = &self.remote else { return self.check(bytes, self.reserve_bytes) };
        let dirty_max = dirty_bytes_max(remote);
        if let Err(failing) = remote.uploads.wait_for_room(bytes, dirty_max, BACKLOG_PATIENCE) {
            return Err(Error::errno(
                errno::ENOSPC,
                format!(
                    "flash is full of what is not in the object tier yet: {} bytes of {dirty_max} ({failing}): \
                     nothing is lost, writes go on when uploads do",
                    remote.uploads.dirty_bytes()
                ),
            ));
        }
        remote.make_room(bytes);
        self.check(bytes, self.reserve_bytes)
    }

    /// Whether `check_bytes` may have to wait for uploads.
    pub fn is_near(&self, bytes: u64) -> bool {
        self.remote
            .as_ref()
            .is_some_and(|remote| remote.uploads.dirty_bytes() + bytes > dirty_bytes_max(remote) / 4 * 3)
    }

    /// A segment may have this many bytes: several must fit on flash beside each other.
    pub fn segment_bytes_max(&self) -> u64 {
        self.remote.as_ref().map_or(u64::MAX, |remote| remote.bytes_max() / SEGMENTS_MIN)
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
