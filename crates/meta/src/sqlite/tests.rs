//! The suite on SQLite, with a disk that can be broken, and what only this store does.

#[path = "../../tests/suite/mod.rs"]
mod suite;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::ids::VolumeId;
use headrace_base::{Kind, time};
use headrace_format::record::SessionState;
use proptest::prelude::*;
use rusqlite::params;

use super::*;
use crate::store::Precondition;
use suite::{World, delete, put};

#[derive(Debug)]
struct Sqlite {
    folder: tempfile::TempDir,
    store: Option<Arc<SqliteStore>>,
}

impl Sqlite {
    fn new() -> Sqlite {
        let folder = tempfile::tempdir().unwrap();
        SqliteStore::create(&folder.path().join("volume.sqlite"), volume()).unwrap();
        Sqlite { folder, store: None }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("volume.sqlite")
    }

    fn store(&mut self) -> Arc<SqliteStore> {
        let path = self.path();
        Arc::clone(self.store.get_or_insert_with(|| {
            let (id, record) = suite::session();
            Arc::new(SqliteStore::open(&path, id, record).unwrap())
        }))
    }

    fn pragma(&self, name: &str, value: i64) {
        if let Some(store) = &self.store {
            lock(&store.shared.writer).pragma(name, value);
        }
    }
}

fn volume() -> VolumeRecord {
    VolumeRecord { volume: VolumeId::generate(), format: 1, created: time::wall_now() }
}

impl World for Sqlite {
    fn join(&mut self) -> Arc<dyn MetaStore> {
        self.store()
    }

    fn leave(&mut self) {
        let store = self.store.take().unwrap();
        store.close().unwrap();
        assert_eq!(Arc::strong_count(&store), 1);
    }

    fn crash(&mut self) {
        let store = self.store.take().unwrap();
        assert_eq!(Arc::strong_count(&store), 1);
    }

    fn break_disk(&mut self) -> bool {
        self.pragma("query_only", 1);
        true
    }

    fn mend_disk(&mut self) {
        self.pragma("query_only", 0);
    }

    fn versioned_rows(&self) -> Option<usize> {
        let other = schema::connect(&self.path(), Role::Reader).unwrap();
        let sql = "SELECT count(*) FROM kv WHERE key>=X'61' AND key<X'7B'";
        let rows: i64 = other.query_row(sql, (), |row| row.get(0)).unwrap();
        usize::try_from(rows).ok()
    }
}

macro_rules! rules {
    ($($rule:ident)*) => { $(
        #[test]
        fn $rule() {
            suite::rules::$rule(&mut Sqlite::new());
        }
    )* };
}

rules! {
    values_are_replaced_and_deleted
    writes_of_one_commit_apply_in_order
    preconditions_name_the_key_that_fails
    sealed_versions_never_change
    a_seal_that_conflicts_changes_nothing
    scans_honour_order_bounds_and_limit
    a_dead_session_commits_nothing_more
    durable_commits_survive_a_crash
    a_closed_store_has_everything_and_takes_nothing
    what_would_break_the_store_is_refused
    sequences_grow
}

#[test]
fn all_interleavings_of_file_system_steps_are_some_order() {
    suite::races::all_interleavings(&mut Sqlite::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_map(steps in suite::model::steps()) {
        suite::model::agrees_with_a_map(&mut Sqlite::new(), &steps);
    }

    #[test]
    fn kept_versions_stay_and_others_leave_nothing(steps in suite::cleaning::steps()) {
        suite::cleaning::kept_versions_stay_and_others_leave_nothing(&mut Sqlite::new(), &steps);
    }
}

fn commit(
    store: &SqliteStore,
    writes: Vec<crate::store::Write>,
    durability: Durability,
) -> Result<Sequence, CommitError> {
    store.commit(Commit { preconditions: Vec::new(), writes }, durability)
}

fn error_of<T: std::fmt::Debug>(result: Result<T, CommitError>) -> headrace_base::Error {
    match result {
        Err(CommitError::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_full_disk_loses_nothing_and_recovers() {
    let mut world = Sqlite::new();
    let store = world.store();
    let big = vec![7; 100_000];
    commit(&store, vec![put(b"i0", &big)], Durability::Durable).unwrap();
    let pages: i64 = lock(&store.shared.writer).pragma_value("page_count");
    world.pragma("max_page_count", pages + 5);

    let failed = error_of(commit(&store, vec![put(b"i1", &big)], Durability::Durable));
    assert_eq!((failed.kind(), failed.raw_errno()), (Kind::Full, errno::ENOSPC), "{failed:?}");
    assert!(failed.message().contains("volume.sqlite"), "{failed}");
    let failed = store.sync().unwrap_err();
    assert_eq!(failed.kind(), Kind::Full);
    assert_eq!(error_of(store.seal(Commit::default())).kind(), Kind::Full);
    assert_eq!(store.close().unwrap_err().kind(), Kind::Full);
    // Relaxed commits go on, above the layer that waits.
    commit(&store, vec![put(b"i2", &big), delete(b"i0")], Durability::Relaxed).unwrap();
    assert_eq!(store.get(b"i1", At::Latest).unwrap().as_ref(), Some(&big));
    assert_eq!(store.get(b"i0", At::Latest).unwrap(), None);
    assert_eq!(store.scan(b"i", b"j", 10, At::Latest).unwrap().len(), 2);

    // Until memory is full too.
    let mut taken = 0;
    let refused = loop {
        match commit(&store, vec![put(format!("im{taken:06}").as_bytes(), &big)], Durability::Relaxed) {
            Ok(_) => taken += 1,
            Err(CommitError::Failed(error)) => break error,
            Err(CommitError::Conflict(key)) => panic!("{key:?}"),
        }
        assert!(taken < 1_000, "memory is bounded");
    };
    assert_eq!(refused.kind(), Kind::Full);
    assert!(taken > 50, "{taken}");

    world.pragma("max_page_count", 1 << 30);
    // The flusher tries by itself.
    let patience = time::monotonic_now() + Duration::from_secs(20);
    while read(&store.shared.overlay).pending_commits() > 0 {
        assert!(time::monotonic_now() < patience, "the flusher does not try again");
        time::sleep(Duration::from_millis(20));
    }
    commit(&store, vec![put(b"i3", b"3")], Durability::Durable).unwrap();
    drop(store);
    world.crash();
    let store = world.store();
    assert_eq!(store.scan(b"im", b"in", usize::MAX, At::Latest).unwrap().len(), taken);
    let keys = [b"i0".to_vec(), b"i1".to_vec(), b"i2".to_vec(), b"i3".to_vec()];
    let found = store.get_many(&keys, At::Latest).unwrap();
    assert_eq!(found, [None, Some(big.clone()), Some(big), Some(b"3".to_vec())]);
}

#[test]
fn everyone_who_waits_for_a_failed_flush_is_told() {
    let mut world = Sqlite::new();
    let store = world.store();
    world.break_disk();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..8_u8)
            .map(|number| {
                let store = &store;
                scope.spawn(move || commit(store, vec![put(&[b'i', number], b"x")], Durability::Durable))
            })
            .collect();
        for waiting in waiting {
            assert_eq!(error_of(waiting.join().unwrap()).kind(), Kind::Permission);
        }
    });
    world.mend_disk();
    store.sync().unwrap();
    drop(store);
    world.crash();
    assert_eq!(world.store().scan(b"i", b"j", 100, At::Latest).unwrap().len(), 8);
}

#[test]
fn a_session_declared_dead_by_another_cannot_flush() {
    let mut world = Sqlite::new();
    let store = world.store();
    let own = key::session(store.session());
    commit(&store, vec![put(b"ia", b"durable")], Durability::Durable).unwrap();
    // What another process would do that took the volume over.
    let other = schema::connect(&world.path(), Role::Writer).unwrap();
    let record = store.get(&own, At::Latest).unwrap().unwrap();
    let mut record = Session::decode(&record).unwrap();
    record.state = SessionState::Dead;
    let mut stored = Vec::new();
    schema::protect(&mut stored, &own, &record.encode());
    let changed = other
        .execute("UPDATE kv SET value=?2 WHERE key=?1 AND version=0", params![own, &stored[own.len()..]])
        .unwrap();
    assert_eq!(changed, 1);

    commit(&store, vec![put(b"ib", b"late")], Durability::Relaxed).unwrap();
    assert_eq!(store.sync().unwrap_err().raw_errno(), errno::ESTALE);
    assert_eq!(
        error_of(commit(&store, vec![put(b"ic", b"later")], Durability::Relaxed)).raw_errno(),
        errno::ESTALE
    );
    assert_eq!(error_of(store.seal(Commit::default())).raw_errno(), errno::ESTALE);
    assert_eq!(store.close().unwrap_err().raw_errno(), errno::ESTALE);
    drop(store);
    world.crash();
    let store = world.store();
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(b"durable".to_vec()));
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), None);
}

#[test]
fn what_a_reader_read_before_a_flush_never_enters_the_cache() {
    let mut world = Sqlite::new();
    let store = world.store();
    let shared = &store.shared;
    commit(&store, vec![put(b"ia", b"old")], Durability::Durable).unwrap();
    let generation = read(&shared.overlay).generation;
    // A reader has found the old value in the database and is slow to say so.
    commit(&store, vec![put(b"ia", b"new")], Durability::Relaxed).unwrap();
    store.sync().unwrap();
    shared.fill(generation, [(b"ia".as_slice(), Some(b"old".as_slice()))]);
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(b"new".to_vec()));
    shared.cache.remove(b"ia");
    shared.fill(generation, [(b"ia".as_slice(), Some(b"old".as_slice()))]);
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(b"new".to_vec()));
}

#[test]
fn readers_of_several_keys_see_one_moment() {
    let mut world = Sqlite::new();
    let store = world.store();
    let shared = &store.shared;
    let keys: Vec<Key> = (0..10_u8).map(|number| vec![b'i', number]).collect();
    let all = |value: &[u8]| keys.iter().map(|key| put(key, value)).collect::<Vec<_>>();
    commit(&store, all(b"old"), Durability::Durable).unwrap();
    for in_memory in [0, 1, 5, 9] {
        commit(&store, all(b"old"), Durability::Durable).unwrap();
        for key in &keys {
            shared.cache.remove(key);
        }
        commit(&store, all(b"old").split_off(10 - in_memory), Durability::Relaxed).unwrap();
        let (first, second) = (Reader::open(&shared.path).unwrap(), Reader::open(&shared.path).unwrap());
        let mut statement = second.prepare(read::SCAN).unwrap();
        let many = shared.pin_many(&first, &keys, At::Latest).unwrap();
        let scan = shared.pin_scan(&second, &mut statement, (b"i", b"j"), 100, At::Latest).unwrap();
        commit(&store, all(b"new"), Durability::Durable).unwrap();
        let found = shared.finish_many(many).unwrap();
        assert!(found.iter().all(|value| value.as_deref() == Some(b"old")), "{in_memory}: {found:?}");
        let found = scan.finish().unwrap();
        assert_eq!(found.len(), 10);
        assert!(found.iter().all(|(_, value)| value == b"old"), "{in_memory}: {found:?}");
        let found = store.get_many(&keys, At::Latest).unwrap();
        assert!(found.iter().all(|value| value.as_deref() == Some(b"new")), "{in_memory}: {found:?}");
    }
}

#[test]
fn relaxed_commits_are_durable_within_a_second() {
    let mut world = Sqlite::new();
    let store = world.store();
    for round in 0..2_u8 {
        commit(&store, vec![put(&[b'i', round], b"x")], Durability::Relaxed).unwrap();
        time::sleep(Duration::from_millis(950));
        let other = schema::connect(&world.path(), Role::Reader).unwrap();
        let rows: i64 = other
            .query_row("SELECT count(*) FROM kv WHERE key=?1", params![[b'i', round]], |row| row.get(0))
            .unwrap();
        assert_eq!(rows, 1, "round {round}");
    }
}

#[test]
fn deletes_leave_rows_only_where_a_frozen_version_is_hidden() {
    let mut world = Sqlite::new();
    let store = world.store();
    let count = |store: &SqliteStore| -> i64 {
        store.sync().unwrap();
        let other = schema::connect(&store.shared.path, Role::Reader).unwrap();
        other
            .query_row("SELECT count(*) FROM kv WHERE key>=X'69' AND key<X'6A'", (), |row| row.get(0))
            .unwrap()
    };
    commit(&store, vec![put(b"ia", b"1")], Durability::Durable).unwrap();
    commit(&store, vec![delete(b"ia")], Durability::Durable).unwrap();
    assert_eq!(count(&store), 0, "version 1 hides nothing");
    commit(&store, vec![put(b"ia", b"1")], Durability::Durable).unwrap();
    store.seal(Commit::default()).unwrap();
    commit(&store, vec![delete(b"ia"), delete(b"ib")], Durability::Durable).unwrap();
    assert_eq!(count(&store), 2, "the value and what hides it");
    store.seal(Commit::default()).unwrap();
    commit(&store, vec![put(b"ia", b"3")], Durability::Durable).unwrap();
    commit(&store, vec![delete(b"ia")], Durability::Durable).unwrap();
    assert_eq!(count(&store), 2, "below is nothing to hide");
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), None);
}

#[test]
fn a_database_from_before_snapshots_gets_its_index() {
    let mut world = Sqlite::new();
    let store = world.store();
    commit(&store, vec![put(b"ia", b"1"), put(b"ib", b"1")], Durability::Durable).unwrap();
    let first = store.seal(Commit::default()).unwrap();
    commit(&store, vec![put(b"ib", b"2")], Durability::Durable).unwrap();
    drop(store);
    world.leave();
    let other = schema::connect(&world.path(), Role::Writer).unwrap();
    other.execute_batch("DROP INDEX kv_written").unwrap();
    drop(other);
    let store = world.store();
    assert_eq!(store.written(first, At::Latest, b"a", b"z", 10).unwrap(), [b"ib".to_vec()]);
    store.restore(first, Commit::default()).unwrap();
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), Some(b"1".to_vec()));
}

#[test]
fn only_kept_versions_are_restored_and_only_others_cleaned() {
    let mut world = Sqlite::new();
    let store = world.store();
    commit(&store, vec![put(b"ia", b"1")], Durability::Durable).unwrap();
    let first = store.seal(Commit::default()).unwrap();
    let current = store.version();
    assert_eq!(store.clean(first, b"", 10).unwrap_err().kind(), Kind::Invalid, "all are kept at first");
    assert_eq!(error_of(store.restore(current, Commit::default())).kind(), Kind::Invalid);
    store.keep(&crate::store::Kept { versions: vec![], since: current });
    assert_eq!(error_of(store.restore(first, Commit::default())).kind(), Kind::Invalid);
    assert_eq!(store.clean(first, b"", 10).unwrap(), crate::store::Cleaned::default());
    // One that ends after the list was made is kept.
    let second = store.seal(Commit::default()).unwrap();
    assert_eq!(store.clean(second, b"", 10).unwrap_err().kind(), Kind::Invalid);
    store.keep(&crate::store::Kept { versions: vec![], since: second });
    assert_eq!(store.clean(second, b"", 10).unwrap_err().kind(), Kind::Invalid);
    let failed = store.restore(
        second,
        Commit { preconditions: vec![], writes: vec![crate::store::Write::DeletePrefix(b"ia".to_vec())] },
    );
    assert_eq!(error_of(failed).kind(), Kind::Invalid);
    assert_eq!(store.written(Version(0), At::Latest, b"a", b"z", 10).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn the_log_is_copied_and_starts_over_under_steady_writes() {
    let mut world = Sqlite::new();
    let store = world.store();
    let log = {
        let mut name = world.path().into_os_string();
        name.push("-wal");
        PathBuf::from(name)
    };
    // So many writers that one of them always writes: a checkpoint beside them never reaches the end.
    let (writers, commits) = (6_u8, 150_u64);
    let value = vec![1; 100_000];
    let largest = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (store, log, value, largest) = (&store, &log, &value, &largest);
            scope.spawn(move || {
                for number in 0..commits {
                    commit(store, vec![put(&[b'b', writer, number as u8 % 7], value)], Durability::Durable)
                        .unwrap();
                    largest.fetch_max(std::fs::metadata(log).unwrap().len(), Ordering::Relaxed);
                }
            });
        }
    });
    let (written, largest) = (u64::from(writers) * commits * value.len() as u64, largest.into_inner());
    assert!(written > 2 * largest, "{written} bytes written, the log took {largest}");
}

#[test]
fn readers_see_whole_commits_while_others_write_and_flush() {
    const ACCOUNTS: u8 = 16;
    const TOTAL: u64 = 16_000;
    let mut world = Sqlite::new();
    let store = world.store();
    let keys: Vec<Key> = (0..ACCOUNTS).map(|number| vec![b'i', number]).collect();
    let start = keys.iter().map(|key| put(key, &(TOTAL / u64::from(ACCOUNTS)).to_be_bytes())).collect();
    commit(&store, start, Durability::Relaxed).unwrap();
    let number = |value: &[u8]| u64::from_be_bytes(value.try_into().unwrap());
    let until = time::monotonic_now() + Duration::from_millis(2_500);
    let running = || time::monotonic_now() < until;
    std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for thread in 0..3_u64 {
            let (store, keys, running) = (&store, &keys, &running);
            writers.push(scope.spawn(move || {
                let mut seed = thread + 1;
                let mut moved = 0;
                while running() {
                    seed =
                        seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let from = &keys[(seed >> 33) as usize % keys.len()];
                    let to = &keys[(seed >> 43) as usize % keys.len()];
                    if from == to {
                        continue;
                    }
                    let pair = store.get_many(&[from.clone(), to.clone()], At::Latest).unwrap();
                    let (Some(left), Some(right)) = (&pair[0], &pair[1]) else {
                        panic!("an account is gone")
                    };
                    let amount = number(left).min(1);
                    let done = store.commit(
                        Commit {
                            preconditions: vec![
                                Precondition::Equals(from.clone(), left.clone()),
                                Precondition::Equals(to.clone(), right.clone()),
                            ],
                            writes: vec![
                                put(from, &(number(left) - amount).to_be_bytes()),
                                put(to, &(number(right) + amount).to_be_bytes()),
                            ],
                        },
                        if moved % 16 == 0 { Durability::Durable } else { Durability::Relaxed },
                    );
                    match done {
                        Ok(_) => moved += 1,
                        Err(CommitError::Conflict(_)) => {}
                        Err(CommitError::Failed(error)) => panic!("{error:?}"),
                    }
                }
                moved
            }));
        }
        let readers: Vec<_> = (0..3)
            .map(|thread| {
                let (store, keys, running) = (&store, &keys, &running);
                scope.spawn(move || {
                    let mut reads = 0_u64;
                    while running() {
                        let sum: u64 = if thread == 0 {
                            let found = store.scan(b"i", b"j", usize::MAX, At::Latest).unwrap();
                            found.iter().map(|(_, value)| number(value)).sum()
                        } else {
                            // Half of the keys leave the cache, so that memory and disk are both read.
                            for key in keys.iter().step_by(2) {
                                store.shared.cache.remove(key);
                            }
                            let found = store.get_many(keys, At::Latest).unwrap();
                            found.iter().flatten().map(|value| number(value)).sum()
                        };
                        assert_eq!(sum, TOTAL, "after {reads} reads");
                        reads += 1;
                    }
                    reads
                })
            })
            .collect();
        let seals = scope.spawn(|| {
            let mut seals = 0;
            while running() {
                let sealed = store.seal(Commit::default()).unwrap();
                let found = store.scan(b"i", b"j", usize::MAX, At::Version(sealed)).unwrap();
                assert_eq!(found.iter().map(|(_, value)| number(value)).sum::<u64>(), TOTAL);
                seals += 1;
                time::sleep(Duration::from_millis(50));
            }
            seals
        });
        let moved: u64 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        let reads: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(moved > 100 && reads > 100 && seals.join().unwrap() > 3, "{moved} moved, {reads} reads");
    });
    drop(store);
    world.leave();
    let found = world.store().scan(b"i", b"j", usize::MAX, At::Latest).unwrap();
    assert_eq!(found.iter().map(|(_, value)| number(value)).sum::<u64>(), TOTAL);
}
