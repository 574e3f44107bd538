//! One engine: what stands around a volume so that processes of this machine can use it.
//!
//! | module | what it owns |
//! |---|---|
//! | `engine` | the engine's life: start, serve until told to stop, stop in order |
//! | `node` | what all parts share: the volume, who is connected, the answer to `status` |
//! | `listener` | the socket: binding it, accepting, telling HTTP from our messages |
//! | `identity` | who is at the other end of a connection |
//! | `channel` | frames and descriptors over one socket, ended by the peer's death |
//! | `connection` | one client: requests in, answers out |
//! | `requests` | each request as calls of the volume, checked for the client's identity |
//! | `files` | the requests that carry a file's bytes: handles, reads, writes |
//! | `batch` | the layout of a batch, and gathering one |
//! | `slots` | shared memory that batches are gathered into |
//! | `streams` | a loader's batches, gathered ahead and sent in order |
//! | `pool` | the threads that gather |
//! | `mounts` | the table of mounts |
//! | `rest`, `metrics` | HTTP: status and numbers for people and Prometheus |
//! | `signals`, `wake` | SIGTERM and SIGINT; a bell that `poll` hears |
//!
//! Shared memory and descriptors carry bytes, messages carry ownership. What a client holds lives in its
//! connection's thread and ends with it.

mod batch;
mod channel;
mod connection;
mod engine;
mod files;
mod identity;
mod listener;
mod memory;
mod metrics;
mod mounts;
mod node;
mod pool;
mod requests;
mod rest;
mod signals;
mod slots;
mod streams;
mod wake;

pub use engine::{Engine, EngineOptions, MEMORY_BYTES_DEFAULT};
pub use memory::keep_small;
pub use signals::block_signals;

pub const ENGINE_VERSION: &str = env!("CARGO_PKG_VERSION");
