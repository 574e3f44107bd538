//! The mount: FUSE requests to volume calls, nothing else.
//!
//! | module | what it owns |
//! |---|---|
//! | `mount` | one mount from its start to its end: options, session, unmount |
//! | `place` | whether a folder can be mounted on, and what to say if not |
//! | `adapter` | each FUSE operation as a call to the volume |
//! | `convert` | FUSE's words for what the volume says: attributes, times, errors |
//! | `handles` | what the kernel has open, by number |
//! | `notify` | the thread that makes the kernel forget what changed through other doors |
//! | `operations` | names of the operations and their counters |
//!
//! The kernel checks permissions (`default_permissions`) and caches without limit; this crate trusts it for the
//! first and keeps it true for the second. It never blocks a request on a notification: see `notify`.

mod adapter;
mod convert;
mod handles;
mod lane;
mod mount;
mod notify;
mod operations;
mod place;

pub use mount::{Mount, MountOptions, THREADS_DEFAULT, mount};
