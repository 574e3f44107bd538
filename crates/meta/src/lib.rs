//! The metadata store: an ordered key-value store with versions, preconditions and group commit.
//!
//! `store` holds the seam, `sqlite` the embedded implementation. The file-system transactions on top live
//! in the volume crate.

pub mod sqlite;
pub mod store;

pub use sqlite::SqliteStore;
pub use store::{At, Commit, CommitError, Durability, MetaStore, Precondition, Sequence, Write};
