//! What tests begin with: a session to open a store, writes, a commit that must go through.
#![allow(dead_code, reason = "each test program uses a part of it")]

use headrace_base::time::wall_now;
use headrace_base::{OpId, SessionId};
use headrace_format::record::{Session, SessionState};
use headrace_meta::{Commit, Durability, MetaStore, Sequence, Write};

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
