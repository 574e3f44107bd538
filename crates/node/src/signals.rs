//! SIGTERM, SIGINT and SIGHUP as a descriptor instead of handlers: no code of ours runs inside a signal.
//!
//! The signals must be blocked before the first thread starts, since threads inherit the mask. The first signal
//! stops the engine in order; another one, `INSISTENCE` or more later, ends the process at once. Shells and
//! supervisors send one stop twice in a row (to the process and to its group), which must not cost data.

use std::fs::File;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headrace_base::{Error, Result, thread, time};

use crate::node::Node;

const INSISTENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Signals(File);

/// Call it first in `main`. Programs that the engine runs inherit the mask; they end by themselves (fusermount3).
pub fn block_signals() -> Result<Signals> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset makes the set whole before anything reads it; the pointers are to it for each call's
    // duration.
    let (blocked, fd) = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        let blocked = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        (blocked, libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC))
    };
    if blocked != 0 || fd < 0 {
        return Err(Error::io("take signals", std::io::Error::last_os_error()));
    }
    // SAFETY: signalfd has just made this descriptor; nobody else knows it.
    Ok(Signals(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
}

impl Signals {
    pub(crate) fn stop_engine(mut self, node: Arc<Node>) -> Result<()> {
        thread::spawn("signals", move || {
            let mut first: Option<Instant> = None;
            let mut information = [0_u8; size_of::<libc::signalfd_siginfo>()];
            while self.0.read_exact(&mut information).is_ok() {
                let number = information.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
                let insists = first.is_some_and(|first| time::monotonic_now() - first >= INSISTENCE);
                first.get_or_insert_with(time::monotonic_now);
                if insists {
                    tracing::error!(signal = number, "ended by a second signal: what was not synced is lost");
                    // SAFETY: _exit has no conditions. Nothing may be cleaned up: somebody wants us gone now.
                    unsafe { libc::_exit(1) };
                }
                node.request_stop(match number as i32 {
                    libc::SIGTERM => "SIGTERM",
                    libc::SIGINT => "SIGINT",
                    _ => "SIGHUP",
                });
            }
        })
        .map(drop)
    }
}
