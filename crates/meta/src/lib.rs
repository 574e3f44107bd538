//! The metadata store: an ordered key-value store with versions, preconditions and group commit.
//!
//! `store` holds the seam, `sqlite` the embedded implementation. The file-system transactions on top live
//! in the volume crate.

// The suite in tests/ names this crate as others do; the store's own tests run it from within.
#[cfg(test)]
extern crate self as headrace_meta;

pub mod sqlite;
pub mod store;

pub use sqlite::SqliteStore;
pub use store::{
    At, Cleaned, Commit, CommitError, Durability, Kept, MetaStore, Precondition, Sequence, Write,
};
