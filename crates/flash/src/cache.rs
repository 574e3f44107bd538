//! A bounded cache that is read far more often than it is filled: a hit takes a shared lock for a look-up
//! and a clone, nothing else. Eviction is by second chance (the clock algorithm): near the least recently
//! used, without a list that every hit would have to reorder.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

#[derive(Debug)]
struct Slot<K, V> {
    key: K,
    value: V,
    weight: usize,
    /// Set by a hit, cleared when the hand passes.
    used: AtomicBool,
}

#[derive(Debug)]
struct Ring<K, V> {
    slots: Vec<Slot<K, V>>,
    rows: HashMap<K, usize>,
    hand: usize,
    weight: usize,
}

#[derive(Debug)]
pub(crate) struct Cache<K, V> {
    weight_max: usize,
    ring: RwLock<Ring<K, V>>,
}

impl<K: Copy + Eq + Hash, V: Clone> Cache<K, V> {
    /// Keeps values up to `weight_max` together, but always the latest one.
    pub(crate) fn new(weight_max: usize) -> Cache<K, V> {
        let ring = Ring { slots: Vec::new(), rows: HashMap::new(), hand: 0, weight: 0 };
        Cache { weight_max, ring: RwLock::new(ring) }
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let ring = self.ring.read().unwrap_or_else(PoisonError::into_inner);
        let slot = ring.slots.get(*ring.rows.get(key)?)?;
        // Looked at first: a store would take the cache line from the other readers each time.
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(slot.value.clone())
    }

    pub(crate) fn insert(&self, key: K, value: V, weight: usize) {
        let mut evicted = Vec::new();
        let mut ring = self.ring.write().unwrap_or_else(PoisonError::into_inner);
        evicted.extend(ring.remove(&key));
        while ring.weight + weight > self.weight_max && !ring.slots.is_empty() {
            evicted.extend(ring.evict());
        }
        let row = ring.slots.len();
        ring.slots.push(Slot { key, value, weight, used: AtomicBool::new(false) });
        ring.rows.insert(key, row);
        ring.weight += weight;
        drop(ring);
        // Behind the lock: dropping may close a file.
        drop(evicted);
    }

    pub(crate) fn remove(&self, key: &K) {
        let removed = self.ring.write().unwrap_or_else(PoisonError::into_inner).remove(key);
        drop(removed);
    }
}

impl<K: Copy + Eq + Hash, V> Ring<K, V> {
    fn evict(&mut self) -> Option<V> {
        loop {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slot = self.slots.get_mut(self.hand)?;
            if !std::mem::take(slot.used.get_mut()) {
                let key = slot.key;
                return self.remove(&key);
            }
            self.hand += 1;
        }
    }

    fn remove(&mut self, key: &K) -> Option<V> {
        let row = self.rows.remove(key)?;
        let slot = self.slots.swap_remove(row);
        if let Some(moved) = self.slots.get(row) {
            self.rows.insert(moved.key, row);
        }
        self.weight -= slot.weight;
        Some(slot.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_its_bound_and_keeps_what_is_used() {
        let cache = Cache::new(4);
        for key in 0..100_u32 {
            cache.insert(key, key * 10, 1);
            // Key 0 is asked for all the time.
            assert_eq!(cache.get(&0), Some(0), "after inserting {key}");
            assert!(cache.ring.read().unwrap().slots.len() <= 4);
        }
        assert_eq!(cache.get(&99), Some(990));
        assert_eq!(cache.get(&1), None);
        cache.remove(&0);
        assert_eq!(cache.get(&0), None);
    }

    #[test]
    fn one_value_heavier_than_the_bound_is_kept_alone() {
        let cache = Cache::new(10);
        cache.insert(1, 'a', 5);
        cache.insert(2, 'b', 50);
        assert_eq!((cache.get(&1), cache.get(&2)), (None, Some('b')));
        cache.insert(3, 'c', 5);
        assert_eq!((cache.get(&2), cache.get(&3)), (None, Some('c')));
        cache.insert(3, 'd', 6);
        assert_eq!((cache.get(&3), cache.ring.read().unwrap().weight), (Some('d'), 6));
    }
}
