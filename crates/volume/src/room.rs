//! Keeps a little of the disk for what gives space back: removals, and the start after a crash, are metadata
//! commits, and a database on a disk that is full to the last byte can make none.
//!
//! Bytes of files stop at the reserve, new names at half of it; removals may use all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    segment_bytes_max: u64,
    /// The engine ends: what is in memory goes to flash, whatever its size was to be.
    ending: AtomicBool,
}

/// What is kept of a disk of so many bytes.
pub fn reserve_bytes(disk_bytes: u64) -> u64 {
    RESERVE_BYTES_MAX.min(disk_bytes / RESERVE_SHARE)
}

impl Room {
    pub fn new(flash: Arc<Flash>, remote: Option<Arc<Remote>>) -> Result<Room> {
        let (total, _, _) = flash.space()?;
        let mut room = Room {
            flash,
            remote,
            reserve_bytes: reserve_bytes(total),
            segment_bytes_max: u64::MAX,
            ending: AtomicBool::new(false),
        };
        if let Some(remote) = &room.remote {
            room.segment_bytes_max = room.flash_bytes_max(remote)? / SEGMENTS_MIN;
        }
        Ok(room)
    }

    /// What the flash tier may take: its size, or less where the disk has no more.
    fn flash_bytes_max(&self, remote: &Remote) -> Result<u64> {
        let (_, _, available) = self.flash.space()?;
        let held = remote.clean_bytes() + remote.uploads.dirty_bytes();
        Ok(remote.bytes_max().min((available + held).saturating_sub(self.reserve_bytes)))
    }

    /// Of that, what may be dirty: the rest is for the segments that are open, and for reads.
    fn dirty_bytes_max(&self, remote: &Remote) -> Result<u64> {
        Ok(self.flash_bytes_max(remote)? / 10 * 9)
    }

    /// Full unless `bytes` of file contents can be stored. Asks the kernel: about a microsecond.
    pub fn check_bytes(&self, bytes: u64) -> Result<()> {
        let Some(remote) = &self.remote else { return self.check(bytes, self.reserve_bytes) };
        if self.ending.load(Ordering::Acquire) {
            return self.check(bytes, self.reserve_bytes);
        }
        let dirty_max = self.dirty_bytes_max(remote)?;
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

    /// From now on only the disk itself is the limit.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Whether `check_bytes` may have to wait for uploads.
    pub fn is_near(&self, bytes: u64) -> bool {
        self.remote.as_ref().is_some_and(|remote| {
            // A disk that cannot be asked is met by the write itself.
            let dirty_max = self.dirty_bytes_max(remote).unwrap_or(0);
            remote.uploads.dirty_bytes() + bytes > dirty_max / 4 * 3
        })
    }

    /// A segment may have this many bytes: several must fit on flash beside each other.
    pub fn segment_bytes_max(&self) -> u64 {
        self.segment_bytes_max
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
