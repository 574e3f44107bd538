//! The seam. One test suite runs on every implementation.
//!
//! **Versions.** The store has a current version. Versioned keys (`key::is_versioned`) keep one value per
//! version at which they were written; a write replaces the value of the current version in place. A read
//! `At::Version(v)` sees the newest value at or below v. `seal` ends a version: from then on it never changes.
//! Other keys have one value.
//!
//! A version that ended stays readable until its owner says otherwise: `keep` names those that must, and `clean`
//! removes what only a version needed that was given up. Reading another version than the kept ones has no
//! meaning from then on. What a version is kept for (a snapshot, a seal, a backup) the store does not know.
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

/// Which ended versions must stay readable: those named, and all from `since` on. Whoever makes the list reads
/// `MetaStore::version` first, so that a version that ends meanwhile is on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub versions: Vec<Version>,
    pub since: Version,
}

/// What one step of cleaning did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Values that nobody can read any more, with their keys.
    pub removed: Vec<(Key, Value)>,
    /// Where the next step starts; None: nothing is left that only the given-up version needed.
    pub next: Option<Key>,
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

    /// Keys in [start, end), in byte order, at most `limit`, that were written or deleted in versions after
    /// `after` up to `through`: every versioned key whose value differs between the two is among them, others
    /// may be. Costs what was written, not what the store holds. Both versions must be kept, and `after` ended.
    fn written(
        &self,
        after: Version,
        through: At,
        start: &[u8],
        end: &[u8],
        limit: usize,
    ) -> Result<Vec<Key>, Error>;

    /// The versions at which a value of this key is stored, ascending; of what is not stored yet (`sync`) none.
    /// Two ended versions with no such version between them, the later one included, have the same value.
    fn stored_versions(&self, key: &[u8]) -> Result<Vec<Version>, Error>;

    /// The newest value of every versioned key becomes what it was at `version`, which must be kept; then the
    /// commit's writes are applied. All of it at once, durable when it returns; costs what was written since.
    /// Other commits wait.
    fn restore(&self, version: Version, commit: Commit) -> Result<Sequence, CommitError>;

    /// Says anew which versions are kept. Until the first call all are. Changes nothing that is stored.
    fn keep(&self, kept: &Kept);

    /// One step of removing what only `gone` needed, which is not kept (any more): looks at up to `limit` keys
    /// from `start` on, in one short transaction. A step may be repeated. When the last step is done, the store
    /// holds no row that neither a kept version nor the present needs, as far as `gone` was the last one that did.
    fn clean(&self, gone: Version, start: &[u8], limit: usize) -> Result<Cleaned, Error>;

    /// Returns when all commits made before the call are durable. Callers at the same time share one flush.
    fn sync(&self) -> Result<(), Error>;

    /// Ends the session cleanly: all durable, session `Ended`, store closed for commits.
    fn close(&self) -> Result<(), Error>;
}
