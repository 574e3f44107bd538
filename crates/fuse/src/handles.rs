//! What the kernel has open, by the number it was given. A handle lives from open to release, so that a file
//! whose name is gone keeps its bytes for as long. Numbers are never used twice within a mount.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use headrace_base::error::errno;
use headrace_base::{Error, Result};

/// Enough that threads of one machine seldom meet.
const SHARDS: usize = 16;

#[derive(Debug)]
pub struct Handles<T> {
    shards: [RwLock<HashMap<u64, Arc<T>>>; SHARDS],
    next: AtomicU64,
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Handles { shards: std::array::from_fn(|_| RwLock::default()), next: AtomicU64::new(1) }
    }
}

impl<T> Handles<T> {
    pub fn add(&self, item: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.shard(number).write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(item));
        number
    }

    pub fn get(&self, number: u64) -> Result<Arc<T>> {
        let shard = self.shard(number).read().unwrap_or_else(PoisonError::into_inner);
        shard.get(&number).cloned().ok_or_else(|| not_open(number))
    }

    /// What the number stood for; the caller drops it, outside of any lock of the table.
    pub fn remove(&self, number: u64) -> Result<Arc<T>> {
        let mut shard = self.shard(number).write().unwrap_or_else(PoisonError::into_inner);
        shard.remove(&number).ok_or_else(|| not_open(number))
    }

    fn shard(&self, number: u64) -> &RwLock<HashMap<u64, Arc<T>>> {
        &self.shards[number as usize % SHARDS]
    }
}

fn not_open(number: u64) -> Error {
    Error::errno(errno::EBADF, format!("handle {number} is not open"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_lives_from_add_to_remove_and_its_number_is_not_reused() {
        let handles = Handles::default();
        let first = handles.add("first");
        let second = handles.add("second");
        assert_eq!(*handles.get(first).unwrap(), "first");
        assert_eq!(*handles.remove(first).unwrap(), "first");
        assert_eq!(handles.get(first).unwrap_err().raw_errno(), errno::EBADF);
        assert_eq!(handles.remove(first).unwrap_err().raw_errno(), errno::EBADF);
        assert!(handles.add("third") > second);
        assert_eq!(*handles.get(second).unwrap(), "second");
    }
}
