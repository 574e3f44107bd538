//! Tells mounts what changed through other doors, so that their kernels forget it.
//!
//! Changes wait in one queue per subscriber. `settle` lets a caller that is not a mount wait until they were
//! handled: a file written through the API is seen by the mount when the call returns. A mount's own threads
//! never wait here: the kernel may hold the very page that a notification wants.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use headrace_base::time;

use crate::types::{Change, Origin};

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Change>,
    /// Changes ever queued, and how many of them are handled.
    queued: u64,
    handled: u64,
    closed: bool,
}

#[derive(Debug)]
struct Subscriber {
    origin: Origin,
    queue: Mutex<Queue>,
    moved: Condvar,
}

impl Subscriber {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
pub struct Changes {
    subscribers: Mutex<Vec<Weak<Subscriber>>>,
    /// Spares the lock on every write while nobody listens.
    count: AtomicUsize,
    last_origin: AtomicU32,
}

impl Changes {
    pub fn new_origin(&self) -> Origin {
        Origin(self.last_origin.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub fn subscribe(&self, origin: Origin) -> Subscription {
        let subscriber = Arc::new(Subscriber { origin, queue: Mutex::default(), moved: Condvar::new() });
        let mut subscribers = self.lock();
        subscribers.push(Arc::downgrade(&subscriber));
        self.count.store(subscribers.len(), Ordering::Release);
        Subscription { subscriber }
    }

    pub fn tell(&self, origin: Origin, changes: impl FnOnce() -> Vec<Change>) {
        let listeners = self.others(Some(origin));
        if listeners.is_empty() {
            return;
        }
        let changes = changes();
        for subscriber in listeners {
            let mut queue = subscriber.lock();
            queue.queued += changes.len() as u64;
            queue.waiting.extend(changes.iter().cloned());
            subscriber.moved.notify_all();
        }
    }

    pub fn settle(&self, patience: Duration) {
        let deadline = time::monotonic_now() + patience;
        for subscriber in self.others(None) {
            let mut queue = subscriber.lock();
            let goal = queue.queued;
            while queue.handled < goal && !queue.closed {
                let left = deadline.saturating_duration_since(time::monotonic_now());
                if left.is_zero() {
                    tracing::warn!(origin = subscriber.origin.0, "a mount is slow to forget old state");
                    return;
                }
                queue = subscriber.moved.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn others(&self, origin: Option<Origin>) -> Vec<Arc<Subscriber>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut subscribers = self.lock();
        subscribers.retain(|subscriber| subscriber.strong_count() > 0);
        self.count.store(subscribers.len(), Ordering::Release);
        subscribers
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|subscriber| origin != Some(subscriber.origin))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Subscriber>>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One mount's queue of changes. Dropping it ends the subscription and wakes whoever waits for it.
#[derive(Debug)]
pub struct Subscription {
    subscriber: Arc<Subscriber>,
}

impl Subscription {
    /// The next change, or None after `patience`. Calling it again says that the one before was handled.
    pub fn next(&self, patience: Duration) -> Option<Change> {
        let mut queue = self.subscriber.lock();
        if queue.queued - queue.waiting.len() as u64 > queue.handled {
            queue.handled = queue.queued - queue.waiting.len() as u64;
            self.subscriber.moved.notify_all();
        }
        if queue.waiting.is_empty() {
            queue =
                self.subscriber.moved.wait_timeout(queue, patience).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.waiting.pop_front()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.subscriber.lock().closed = true;
        self.subscriber.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_changes_are_not_told_and_settle_waits_for_others() {
        let changes = Arc::new(Changes::default());
        let mount = changes.new_origin();
        let subscription = changes.subscribe(mount);
        changes.tell(mount, || vec![Change::Inode(headrace_base::Ino(1))]);
        assert!(subscription.next(Duration::ZERO).is_none());
        changes.tell(Origin::SOCKET, || vec![Change::Inode(headrace_base::Ino(2))]);
        let worker = headrace_base::thread::spawn("notifier", move || {
            let mut seen = 0;
            while subscription.next(Duration::from_millis(200)).is_some() {
                seen += 1;
            }
            seen
        })
        .unwrap();
        changes.settle(Duration::from_secs(5));
        assert_eq!(worker.join().unwrap(), 1);
        changes.tell(Origin::SOCKET, || panic!("nobody listens any more"));
    }
}
