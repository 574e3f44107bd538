//! Named points at which a test may kill this process, to prove what a crash there leaves behind.
//!
//! `HEADRACE_CRASH_AT=NAME` or `NAME:N` ends the process by SIGKILL when it passes the point for the Nth time
//! (the first by default). Without the variable a point costs one load.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

struct Plan {
    name: String,
    passes_left: AtomicU32,
}

static PLAN: OnceLock<Option<Plan>> = OnceLock::new();

pub fn point(name: &str) {
    let plan = PLAN.get_or_init(|| {
        let text = std::env::var("HEADRACE_CRASH_AT").ok()?;
        let (name, passes) = match text.split_once(':') {
            Some((name, passes)) => (name, passes.parse().unwrap_or(1)),
            None => (text.as_str(), 1),
        };
        Some(Plan { name: name.to_owned(), passes_left: AtomicU32::new(passes) })
    });
    if let Some(plan) = plan
        && plan.name == name
        && plan.passes_left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        let own = rustix::process::getpid();
        // Nothing may run after this, not even destructors: that is the point.
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        std::process::abort();
    }
}
