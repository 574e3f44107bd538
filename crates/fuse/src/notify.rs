//! Makes the kernel forget what changed through other doors (the local socket, other mounts).
//!
//! One thread per mount does this and nothing else: the kernel may hold the very page or directory that a
//! notification wants, until a request is answered. So no thread that answers requests notifies, none waits for
//! this one, no lock of the volume is held here, and the thread rests while the mount is taken down.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fuser::{INodeNo, Notifier};
use headrace_base::error::errno;
use headrace_base::{Ino, Result, thread, time};
use headrace_volume::{Change, Subscription};

/// How long a change made by this mount itself (see `forget_own`), or an order to rest, may wait.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct State {
    resting: bool,
    stopped: bool,
    /// A notification is with the kernel.
    telling: bool,
    own: Vec<Ino>,
}

/// The thread's door: orders to rest, to go on, to stop.
#[derive(Debug, Default)]
pub struct Notifying {
    state: Mutex<State>,
    moved: Condvar,
}

impl Notifying {
    pub fn start(self: &Arc<Self>, subscription: Subscription, kernel: Notifier) -> Result<()> {
        let door = Arc::clone(self);
        thread::spawn("fuse-notify", move || door.run(&subscription, &kernel))?;
        Ok(())
    }

    /// This mount's own kernel holds something wrong about an inode. Never waits.
    pub fn forget_own(&self, ino: Ino) {
        let mut state = self.lock();
        if !state.own.contains(&ino) {
            state.own.push(ino);
        }
    }

    /// No notification is sent until `go_on`. False if one is still with the kernel after `patience`.
    pub fn rest(&self, patience: Duration) -> bool {
        let mut state = self.lock();
        state.resting = true;
        let deadline = time::monotonic_now() + patience;
        while state.telling {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if left.is_zero() {
                return false;
            }
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub fn go_on(&self) {
        self.lock().resting = false;
        self.moved.notify_all();
    }

    pub fn stop(&self) {
        self.lock().stopped = true;
        self.moved.notify_all();
    }

    fn run(&self, subscription: &Subscription, kernel: &Notifier) {
        loop {
            let change = subscription.next(PATIENCE);
            let Some(own) = self.begin() else { return };
            let own = own.into_iter().map(Change::Inode);
            let outcome = own.chain(change).try_for_each(|change| tell(kernel, &change));
            self.lock().telling = false;
            self.moved.notify_all();
            if outcome.is_err() {
                // The mount is gone: nobody remembers anything.
                return;
            }
        }
    }

    /// Waits until the kernel may be told; None: never again.
    fn begin(&self) -> Option<Vec<Ino>> {
        let mut state = self.lock();
        while state.resting && !state.stopped {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stopped {
            return None;
        }
        state.telling = true;
        Some(std::mem::take(&mut state.own))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Err: the connection to the kernel has ended.
fn tell(kernel: &Notifier, change: &Change) -> std::result::Result<(), ()> {
    // A length of 0 means to the end. The kernel answers ENOENT for what it does not remember, which fuser drops.
    let outcome = match change {
        Change::Inode(ino) => kernel.inval_inode(INodeNo(ino.0), 0, 0),
        Change::Entry(parent, name) => kernel.inval_entry(INodeNo(parent.0), OsStr::from_bytes(name)),
    };
    match outcome {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(ENODEV | errno::ENOTCONN)) => Err(()),
        Err(error) => {
            tracing::warn!(?change, %error, "the kernel did not take a notification");
            Ok(())
        }
    }
}

const ENODEV: i32 = 19;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resting_notifier_goes_on_only_when_told() {
        let door = Arc::new(Notifying::default());
        door.forget_own(Ino(5));
        door.forget_own(Ino(5));
        assert_eq!(door.begin(), Some(vec![Ino(5)]));
        // As if the kernel held on to a notification.
        assert!(!door.rest(Duration::from_millis(20)));
        door.lock().telling = false;
        assert!(door.rest(Duration::ZERO));
        let other = Arc::clone(&door);
        let waiting = thread::spawn("test-begin", move || other.begin()).unwrap();
        time::sleep(Duration::from_millis(50));
        assert!(!waiting.is_finished());
        door.go_on();
        assert_eq!(waiting.join().unwrap(), Some(Vec::new()));
        door.stop();
        assert_eq!(door.begin(), None);
    }
}
