//! The seam. One test suite runs on every implementation.
//!
//! **Versions.** The store has a current version. Versioned keys (`key::is_versioned`) keep one value per
//! version at which they were written; a write replaces the value of the current version in place. A read
//! `At::Version(v)` sees the newest value at or below v. `seal` ends a version: from then on it never changes.
//! Other keys have one value.
//!
//! **Commits** are atomic, and ordered: what is durable after a crash is always a prefix of the commits in
//! the order in which they were answered. `Relaxed` ones are visible to every reader at once and durable
//! within a second; `Durable` ones are durable when `commit` returns, and so are all before them.

use std::fmt::Debug;

use headrace_base::{Error, SessionId, Version};
use headrace_format::key::Key;

pub type Value = Vec<u8>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Latest,
    Version(Version),
}

/// Orders the commits of one opened store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sequence(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    Relaxed,
    Durable,
}

#[derive(Clone, Debug)]
pub enum Precondition {
    /// The key has a value. Commits that only share it do not conflict.
    Present(Key),
    Absent(Key),
    /// The key's value is exactly this.
    Equals(Key, Value),
    /// No key begins with `prefix`. Legal only while `guard` is held exclusively, which this does; every
    /// commit that adds a key under the prefix has `Present(guard)`. The guard must have a value; a conflict
    /// names it if it has none, else the prefix.
    Empty {
        prefix: Key,
        guard: Key,
    },
}

#[derive(Clone, Debug)]
pub enum Write {
    Put(Key, Value),
    Delete(Key),
    /// Deletes all keys that begin with the prefix.
    DeletePrefix(Key),
}

/// What becomes true at once, or not at all. The session's own key is a precondition of every commit and the
/// op-id is written with it; the store adds both by itself.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    pub preconditions: Vec<Precondition>,
    pub writes: Vec<Write>,
}

#[derive(Debug)]
pub enum CommitError {
    /// The precondition on this key does not hold: re-read and decide again.
    Conflict(Key),
    Failed(Error),
}

impl From<Error> for CommitError {
    fn from(error: Error) -> Self {
        CommitError::Failed(error)
    }
}

pub trait MetaStore: Send + Sync + Debug {
    /// The session that this store was opened with.
    fn session(&self) -> SessionId;

    /// The version that writes go to now.
    fn version(&self) -> Version;

    fn get(&self, key: &[u8], at: At) -> Result<Option<Value>, Error>;

    /// One answer per key, in their order. Cheaper than as many `get`s.
    fn get_many(&self, keys: &[Key], at: At) -> Result<Vec<Option<Value>>, Error>;

    /// Keys in [start, end) in byte order with their values, at most `limit`.
    fn scan(&self, start: &[u8], end: &[u8], limit: usize, at: At) -> Result<Vec<(Key, Value)>, Error>;

    fn commit(&self, commit: Commit, durability: Durability) -> Result<Sequence, CommitError>;

    /// Applies the commit at the current version, then ends that version. Gives the version that is now
    /// frozen. Durable when it returns.
    fn seal(&self, commit: Commit) -> Result<Version, CommitError>;

    /// Returns when all commits made before the call are durable. Callers at the same time share one flush.
    fn sync(&self) -> Result<(), Error>;

    /// Ends the session cleanly: all durable, session `Ended`, store closed for commits.
    fn close(&self) -> Result<(), Error>;
}
