//! What every MetaStore promises, as tests against `dyn MetaStore`. A `World` says how to get stores of one
//! kind; `rules` are the promises one by one, `races` all interleavings of file-system steps, `model` random
//! operations beside a map.

pub mod model;
pub mod races;
pub mod rules;

use std::fmt::Debug;
use std::sync::Arc;

use headrace_base::time::wall_now;
use headrace_base::{OpId, SessionId};
use headrace_format::record::{Session, SessionState};
use headrace_meta::{Commit, CommitError, Durability, MetaStore, Precondition, Sequence, Write};

/// One volume's metadata.
pub trait World: Debug {
    /// A store for one more actor. Stores of one world may be one and the same, where a volume has one engine.
    fn join(&mut self) -> Arc<dyn MetaStore>;

    /// Ends all sessions cleanly. All stores that were given out must be dropped.
    fn leave(&mut self);

    /// Ends all sessions as a crash does.
    fn crash(&mut self);

    /// From here on nothing can be made durable. False: this world cannot do it.
    fn break_disk(&mut self) -> bool {
        false
    }

    fn mend_disk(&mut self) {}
}

pub fn session() -> (SessionId, Session) {
    let record = Session {
        state: SessionState::Alive,
        node: 1,
        pid: std::process::id(),
        host: "test".to_owned(),
        started: wall_now(),
        last_op: OpId(0),
    };
    (SessionId::generate(), record)
}

pub fn put(key: &[u8], value: &[u8]) -> Write {
    Write::Put(key.to_vec(), value.to_vec())
}

pub fn delete(key: &[u8]) -> Write {
    Write::Delete(key.to_vec())
}

pub fn write(store: &dyn MetaStore, writes: Vec<Write>) -> Sequence {
    store.commit(Commit { preconditions: Vec::new(), writes }, Durability::Relaxed).unwrap()
}

pub fn conflict_of<T: Debug>(
    store: &dyn MetaStore,
    preconditions: Vec<Precondition>,
    then: fn(&dyn MetaStore, Commit) -> Result<T, CommitError>,
) -> Option<Vec<u8>> {
    match then(store, Commit { preconditions, writes: vec![put(b"Owritten", b"yes")] }) {
        Ok(_) => None,
        Err(CommitError::Conflict(key)) => Some(key),
        Err(CommitError::Failed(error)) => panic!("{error:?}"),
    }
}
