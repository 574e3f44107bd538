//! The only door to threads: every one has a name, and a failure to start one is an error, not a panic.

use std::thread::{Builder, JoinHandle};

use crate::error::{Error, Result};

/// Starts a named thread. Linux shows the first 15 bytes of the name in `ps -L`.
#[allow(clippy::disallowed_methods, reason = "this is the door")]
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|cause| Error::io(format_args!("start thread {name}"), cause))
}
