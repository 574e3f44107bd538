//! What every MetaStore promises, as tests against `dyn MetaStore`. A `World` says how to get stores of one
//! kind; `rules` are the promises one by one, `races` all interleavings of file-system steps, `model` random
//! operations beside a map, `cleaning` the same of versions that come and go.

pub mod cleaning;
mod given;
pub mod model;
pub mod races;
pub mod rules;

use std::fmt::Debug;
use std::sync::Arc;

use headrace_meta::{Commit, CommitError, MetaStore, Precondition};

pub use given::{delete, put, session, write};

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

    /// How many rows of versioned keys are stored. None: this world cannot tell.
    fn versioned_rows(&self) -> Option<usize> {
        None
    }
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
