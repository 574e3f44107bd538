//! Newest values as the database has them, and which keys it lacks; bounded by bytes, newly used ones stay
//! (second chance). Only the overlay knows what is newer: look there first.
//!
//! Filling races with flushing; `Overlay::generation` decides who may fill. Nothing here is ever written back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::store::Value;

use super::lock;

const SHARDS: usize = 8;
/// What an entry costs beside its bytes: slot, index entry at the usual load, shared key's and heap headers.
const ENTRY_BYTES: usize = 128;

#[derive(Debug)]
pub struct Cache {
    shards: [Mutex<Shard>; SHARDS],
    shard_bytes_max: usize,
}

#[derive(Debug, Default)]
struct Shard {
    index: HashMap<Arc<[u8]>, usize>,
    slots: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// The slot that is asked next to leave.
    hand: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    key: Arc<[u8]>,
    value: Option<Value>,
    used: bool,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.key.len() + self.value.as_ref().map_or(0, Vec::len) + ENTRY_BYTES
    }
}

impl Cache {
    pub fn new(bytes_max: usize) -> Cache {
        Cache { shards: Default::default(), shard_bytes_max: bytes_max / SHARDS }
    }

    fn shard(&self, key: &[u8]) -> &Mutex<Shard> {
        let sum = key.iter().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)));
        &self.shards[sum % SHARDS]
    }

    /// None: not known here. Some(None): the database has no such key.
    pub fn get(&self, key: &[u8]) -> Option<Option<Value>> {
        let mut shard = lock(self.shard(key));
        let slot = *shard.index.get(key)?;
        let entry = shard.slots[slot].as_mut()?;
        entry.used = true;
        Some(entry.value.clone())
    }

    pub fn put(&self, key: &[u8], value: Option<&[u8]>) {
        let mut shard = lock(self.shard(key));
        shard.remove(key);
        let entry = Entry { key: key.into(), value: value.map(<[u8]>::to_vec), used: false };
        // One entry may not push out half of the others.
        if entry.bytes() <= self.shard_bytes_max / 2 {
            shard.insert(entry);
            shard.shrink(self.shard_bytes_max);
        }
    }

    pub fn remove(&self, key: &[u8]) {
        lock(self.shard(key)).remove(key);
    }

    pub fn clear(&self) {
        for shard in &self.shards {
            *lock(shard) = Shard::default();
        }
    }
}

impl Shard {
    fn insert(&mut self, entry: Entry) {
        self.bytes += entry.bytes();
        let key = Arc::clone(&entry.key);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot] = Some(entry);
                slot
            }
            None => {
                self.slots.push(Some(entry));
                self.slots.len() - 1
            }
        };
        self.index.insert(key, slot);
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(slot) = self.index.remove(key)
            && let Some(entry) = self.slots[slot].take()
        {
            self.bytes -= entry.bytes();
            self.free.push(slot);
        }
    }

    fn shrink(&mut self, bytes_max: usize) {
        while self.bytes > bytes_max {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            match &mut self.slots[slot] {
                Some(entry) if entry.used => entry.used = false,
                Some(entry) => {
                    let key = Arc::clone(&entry.key);
                    self.remove(&key);
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_values_and_absence_and_forgets() {
        let cache = Cache::new(1 << 20);
        assert_eq!(cache.get(b"a"), None);
        cache.put(b"a", Some(b"1"));
        cache.put(b"b", None);
        assert_eq!(cache.get(b"a"), Some(Some(b"1".to_vec())));
        assert_eq!(cache.get(b"b"), Some(None));
        cache.put(b"a", Some(b"22"));
        assert_eq!(cache.get(b"a"), Some(Some(b"22".to_vec())));
        cache.remove(b"a");
        assert_eq!(cache.get(b"a"), None);
        cache.clear();
        assert_eq!(cache.get(b"b"), None);
        cache.put(b"b", Some(b"3"));
        assert_eq!(cache.get(b"b"), Some(Some(b"3".to_vec())));
    }

    #[test]
    fn stays_within_its_bytes_and_keeps_what_is_used() {
        let bytes_max = 8 * 10_000;
        let cache = Cache::new(bytes_max);
        cache.put(b"kept", Some(b"value"));
        for number in 0..10_000_u64 {
            assert_eq!(cache.get(b"kept"), Some(Some(b"value".to_vec())), "after {number} entries");
            cache.put(&number.to_be_bytes(), Some(&[0; 20]));
        }
        let bytes: usize = cache.shards.iter().map(|shard| lock(shard).bytes).sum();
        assert!(bytes <= bytes_max && bytes > bytes_max / 2, "{bytes}");
        let counted: usize = cache
            .shards
            .iter()
            .flat_map(|s| lock(s).slots.iter().flatten().map(Entry::bytes).collect::<Vec<_>>())
            .sum();
        assert_eq!(bytes, counted);
        cache.put(b"huge", Some(&vec![0; bytes_max]));
        assert_eq!(cache.get(b"huge"), None);
    }
}
