//! The promises of the seam, one by one.

use headrace_base::error::errno;
use headrace_base::{Kind, Version};
use headrace_format::key;
use headrace_format::record::{Session, SessionState};
use headrace_meta::{At, Commit, CommitError, Durability, MetaStore, Precondition, Write};

use super::{World, conflict_of, delete, put, write};

fn rows(store: &dyn MetaStore, prefix: &[u8], at: At) -> Vec<(Vec<u8>, Vec<u8>)> {
    store.scan(prefix, &key::end_of(prefix), usize::MAX, at).unwrap()
}

fn row(key: &[u8], value: &[u8]) -> (Vec<u8>, Vec<u8>) {
    (key.to_vec(), value.to_vec())
}

pub fn values_are_replaced_and_deleted(world: &mut dyn World) {
    let store = world.join();
    for durable in [false, true] {
        let settle = || {
            if durable {
                store.sync().unwrap()
            }
        };
        write(&*store, vec![put(b"ia", b"1"), put(b"ib", b"2"), put(b"Oa", b"3")]);
        settle();
        assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(b"1".to_vec()));
        write(&*store, vec![put(b"ia", b"11"), delete(b"ib"), delete(b"Oa"), delete(b"inone")]);
        settle();
        let keys = [b"ia".to_vec(), b"ib".to_vec(), b"Oa".to_vec(), b"ia".to_vec(), b"inone".to_vec()];
        let eleven = Some(b"11".to_vec());
        let found = store.get_many(&keys, At::Latest).unwrap();
        assert_eq!(found, [eleven.clone(), None, None, eleven, None]);
        assert_eq!(rows(&*store, b"i", At::Latest), [row(b"ia", b"11")]);
        write(&*store, vec![put(b"ia", b"")]);
        settle();
        assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(Vec::new()), "an empty value is a value");
    }
}

pub fn writes_of_one_commit_apply_in_order(world: &mut dyn World) {
    let store = world.join();
    write(&*store, vec![put(b"aa1", b"old"), put(b"aa2", b"old"), put(b"ab", b"other")]);
    store.sync().unwrap();
    write(&*store, vec![put(b"aa2", b"newer"), put(b"aa3", b"newer")]);
    write(
        &*store,
        vec![
            put(b"aa4", b"gone"),
            Write::DeletePrefix(b"aa".to_vec()),
            put(b"aa5", b"kept"),
            put(b"aa6", b"x"),
            delete(b"aa6"),
        ],
    );
    assert_eq!(rows(&*store, b"a", At::Latest), [row(b"aa5", b"kept"), row(b"ab", b"other")]);
    store.sync().unwrap();
    assert_eq!(rows(&*store, b"a", At::Latest), [row(b"aa5", b"kept"), row(b"ab", b"other")]);
}

pub fn preconditions_name_the_key_that_fails(world: &mut dyn World) {
    let store = world.join();
    write(&*store, vec![put(b"la", b""), put(b"eax", b"1"), put(b"lb", b"")]);
    for durable in [false, true] {
        if durable {
            store.sync().unwrap();
        }
        let fails = |precondition| {
            let failed = conflict_of(&*store, vec![precondition], |store, commit| {
                store.commit(commit, Durability::Relaxed)
            });
            // A refused commit leaves nothing behind.
            assert_eq!(store.get(b"Owritten", At::Latest).unwrap().is_some(), failed.is_none());
            write(&*store, vec![delete(b"Owritten")]);
            failed
        };
        let empty =
            |prefix: &[u8], guard: &[u8]| Precondition::Empty { prefix: prefix.into(), guard: guard.into() };
        assert_eq!(fails(Precondition::Present(b"la".to_vec())), None);
        assert_eq!(fails(Precondition::Present(b"lx".to_vec())), Some(b"lx".to_vec()));
        assert_eq!(fails(Precondition::Absent(b"lx".to_vec())), None);
        assert_eq!(fails(Precondition::Absent(b"la".to_vec())), Some(b"la".to_vec()));
        assert_eq!(fails(Precondition::Equals(b"eax".to_vec(), b"1".to_vec())), None);
        assert_eq!(fails(Precondition::Equals(b"eax".to_vec(), b"2".to_vec())), Some(b"eax".to_vec()));
        assert_eq!(fails(Precondition::Equals(b"eay".to_vec(), b"".to_vec())), Some(b"eay".to_vec()));
        assert_eq!(fails(empty(b"eb", b"lb")), None);
        assert_eq!(fails(empty(b"ea", b"la")), Some(b"ea".to_vec()));
        assert_eq!(fails(empty(b"ec", b"lc")), Some(b"lc".to_vec()), "a range without its guard");
    }
    let both = vec![Precondition::Present(b"la".to_vec()), Precondition::Absent(b"eax".to_vec())];
    let failed = conflict_of(&*store, both, |store, commit| store.commit(commit, Durability::Durable));
    assert_eq!(failed, Some(b"eax".to_vec()));
    assert_eq!(store.get(b"Owritten", At::Latest).unwrap(), None);
    // A range that became empty, in memory and on disk.
    write(&*store, vec![delete(b"eax")]);
    let empty = || vec![Precondition::Empty { prefix: b"ea".to_vec(), guard: b"la".to_vec() }];
    assert_eq!(conflict_of(&*store, empty(), |store, c| store.commit(c, Durability::Durable)), None);
    assert_eq!(conflict_of(&*store, empty(), |store, c| store.commit(c, Durability::Durable)), None);
}

pub fn sealed_versions_never_change(world: &mut dyn World) {
    let store = world.join();
    let first = store.version();
    write(&*store, vec![put(b"ia", b"1"), put(b"ib", b"1"), put(b"Oa", b"1")]);
    let sealed = store
        .seal(Commit {
            preconditions: vec![Precondition::Present(b"ia".to_vec())],
            writes: vec![put(b"Zz", b"seal")],
        })
        .unwrap();
    assert_eq!((sealed, store.version()), (first, Version(first.0 + 1)));
    assert_eq!(store.get(b"Zz", At::Latest).unwrap(), Some(b"seal".to_vec()));
    write(&*store, vec![put(b"ia", b"2"), delete(b"ib"), put(b"ic", b"2"), put(b"Oa", b"2")]);
    let second = store.seal(Commit::default()).unwrap();
    write(&*store, vec![put(b"ib", b"3"), delete(b"ic"), delete(b"ia"), delete(b"Oa")]);
    let check = |store: &dyn MetaStore| {
        let see = |at| rows(store, b"i", at);
        assert_eq!(see(At::Version(first)), [row(b"ia", b"1"), row(b"ib", b"1")]);
        assert_eq!(see(At::Version(second)), [row(b"ia", b"2"), row(b"ic", b"2")]);
        assert_eq!(see(At::Latest), [row(b"ib", b"3")]);
        assert_eq!(see(At::Version(Version(second.0 + 1))), [row(b"ib", b"3")]);
        assert_eq!(store.get(b"ib", At::Version(first)).unwrap(), Some(b"1".to_vec()));
        assert_eq!(store.get(b"ib", At::Version(second)).unwrap(), None);
        let keys = [b"ia".to_vec(), b"Oa".to_vec(), b"ib".to_vec()];
        let found = store.get_many(&keys, At::Version(first)).unwrap();
        assert_eq!(found, [Some(b"1".to_vec()), None, Some(b"1".to_vec())], "one value at all versions: Oa");
        assert_eq!(store.get(b"Oa", At::Version(first)).unwrap(), None);
    };
    check(&*store);
    store.sync().unwrap();
    check(&*store);
    drop(store);
    world.leave();
    let store = world.join();
    assert_eq!(store.version(), Version(second.0 + 1));
    check(&*store);
}

pub fn a_seal_that_conflicts_changes_nothing(world: &mut dyn World) {
    let store = world.join();
    let before = store.version();
    let absent = vec![Precondition::Present(b"inot".to_vec())];
    assert_eq!(conflict_of(&*store, absent, |store, commit| store.seal(commit)), Some(b"inot".to_vec()));
    assert_eq!(store.version(), before);
    assert_eq!(store.get(b"Owritten", At::Latest).unwrap(), None);
}

pub fn scans_honour_order_bounds_and_limit(world: &mut dyn World) {
    let store = world.join();
    let name = |number: u32| format!("e{number:03}").into_bytes();
    // Every third on disk, every third in memory, every third deleted in memory; and updates of both.
    write(&*store, (0..300).filter(|n| n % 3 != 1).map(|n| put(&name(n), b"disk")).collect());
    store.sync().unwrap();
    write(&*store, (0..300).filter(|n| n % 3 == 1).map(|n| put(&name(n), b"memory")).collect());
    write(&*store, (0..300).filter(|n| n % 3 == 2).map(|n| delete(&name(n))).collect());
    write(&*store, (0..300).filter(|n| n % 30 == 0).map(|n| put(&name(n), b"updated")).collect());
    let expected: Vec<(Vec<u8>, Vec<u8>)> = (0..300)
        .filter(|n| n % 3 != 2)
        .map(|n| {
            let value: &[u8] = match n {
                _ if n % 30 == 0 => b"updated",
                _ if n % 3 == 1 => b"memory",
                _ => b"disk",
            };
            (name(n), value.to_vec())
        })
        .collect();
    for durable in [false, true] {
        if durable {
            store.sync().unwrap();
        }
        assert_eq!(rows(&*store, b"e", At::Latest), expected);
        for limit in [0, 1, 2, 3, 50, 199, 200, 201] {
            let found = store.scan(b"e", b"f", limit, At::Latest).unwrap();
            assert_eq!(found, expected[..limit.min(200)], "limit {limit}");
        }
        let found = store.scan(&name(10), &name(20), usize::MAX, At::Latest).unwrap();
        let within: Vec<_> =
            expected.iter().filter(|(key, _)| (name(10)..name(20)).contains(key)).cloned().collect();
        assert_eq!(found, within);
        assert_eq!(store.scan(&name(20), &name(10), 5, At::Latest).unwrap(), []);
        assert_eq!(store.scan(&name(20), &name(20), 5, At::Latest).unwrap(), []);
        // Page by page, as a listing does.
        let mut pages = Vec::new();
        let mut from = b"e".to_vec();
        loop {
            let page = store.scan(&from, b"f", 7, At::Latest).unwrap();
            let Some((last, _)) = page.last() else { break };
            from = [last.as_slice(), &[0]].concat();
            pages.extend(page);
        }
        assert_eq!(pages, expected);
    }
}

pub fn a_dead_session_commits_nothing_more(world: &mut dyn World) {
    let store = world.join();
    write(&*store, vec![put(b"ia", b"before")]);
    let own = key::session(store.session());
    store.sync().unwrap();
    let mut record = Session::decode(&store.get(&own, At::Latest).unwrap().unwrap()).unwrap();
    assert_eq!(record.state, SessionState::Alive);
    assert!(record.last_op.0 >= 1, "the op-id is in the store: {record:?}");
    record.state = SessionState::Dead;
    write(&*store, vec![put(b"ib", b"with it"), put(&own, &record.encode())]);
    let stale = |failed: CommitError| match failed {
        CommitError::Failed(error) => assert_eq!(error.raw_errno(), errno::ESTALE, "{error:?}"),
        CommitError::Conflict(key) => panic!("{key:?}"),
    };
    let commit = || Commit { preconditions: Vec::new(), writes: vec![put(b"ic", b"after")] };
    stale(store.commit(commit(), Durability::Relaxed).unwrap_err());
    stale(store.commit(commit(), Durability::Durable).unwrap_err());
    stale(store.seal(commit()).unwrap_err());
    // What came before is not lost.
    store.sync().unwrap();
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), Some(b"with it".to_vec()));
    assert_eq!(store.get(b"ic", At::Latest).unwrap(), None);
    assert_eq!(store.close().unwrap_err().raw_errno(), errno::ESTALE);
    drop(store);
    world.crash();
    let store = world.join();
    let record = Session::decode(&store.get(&own, At::Latest).unwrap().unwrap()).unwrap();
    assert_eq!(record.state, SessionState::Dead);
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), Some(b"with it".to_vec()));
}

pub fn durable_commits_survive_a_crash(world: &mut dyn World) {
    for round in 0..5_u8 {
        let store = world.join();
        write(&*store, vec![put(&[b'i', round, 0], b"relaxed, before")]);
        store
            .commit(
                Commit { preconditions: Vec::new(), writes: vec![put(&[b'i', round, 1], b"durable")] },
                Durability::Durable,
            )
            .unwrap();
        write(&*store, vec![put(&[b'i', round, 2], b"relaxed, synced")]);
        store.sync().unwrap();
        store.sync().unwrap();
        if round % 2 == 0 {
            let version = store.seal(Commit::default()).unwrap();
            assert_eq!(version, Version(u64::from(round / 2) + 1));
        }
        drop(store);
        world.crash();
        let store = world.join();
        for number in 0..3 {
            assert!(store.get(&[b'i', round, number], At::Latest).unwrap().is_some(), "{round} {number}");
        }
        assert_eq!(store.version(), Version(u64::from(round / 2) + 2));
        drop(store);
        world.crash();
    }
}

pub fn a_closed_store_has_everything_and_takes_nothing(world: &mut dyn World) {
    let store = world.join();
    let own = key::session(store.session());
    write(&*store, vec![put(b"ia", b"1")]);
    store.close().unwrap();
    store.close().unwrap();
    let record = Session::decode(&store.get(&own, At::Latest).unwrap().unwrap()).unwrap();
    assert_eq!(record.state, SessionState::Ended);
    let commit = Commit { preconditions: Vec::new(), writes: vec![put(b"ib", b"1")] };
    assert!(matches!(store.commit(commit, Durability::Relaxed), Err(CommitError::Failed(_))));
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), None);
    drop(store);
    world.crash();
    let store = world.join();
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), Some(b"1".to_vec()));
    assert_ne!(key::session(store.session()), own);
    let record = Session::decode(&store.get(&own, At::Latest).unwrap().unwrap()).unwrap();
    assert_eq!((record.state, record.last_op.0), (SessionState::Ended, 1));
}

pub fn what_would_break_the_store_is_refused(world: &mut dyn World) {
    let store = world.join();
    let refused = [
        put(b"", b"x"),
        delete(b""),
        Write::DeletePrefix(Vec::new()),
        put(b"C", b"x"),
        delete(b"C"),
        Write::DeletePrefix(b"C".to_vec()),
    ];
    for write in refused {
        let shown = format!("{write:?}");
        let commit = Commit { preconditions: Vec::new(), writes: vec![put(b"ia", b"1"), write] };
        match store.commit(commit, Durability::Relaxed) {
            Err(CommitError::Failed(error)) => assert_eq!(error.kind(), Kind::Invalid, "{shown}"),
            other => panic!("{shown}: {other:?}"),
        }
    }
    assert_eq!(store.get(b"ia", At::Latest).unwrap(), None);
}

pub fn sequences_grow(world: &mut dyn World) {
    let store = world.join();
    let mut last = write(&*store, vec![put(b"ia", b"1")]);
    for _ in 0..10 {
        let next = write(&*store, vec![put(b"ia", b"1")]);
        assert!(next > last);
        last = next;
        store.sync().unwrap();
    }
    store.seal(Commit::default()).unwrap();
    assert!(write(&*store, vec![put(b"ia", b"1")]) > last);
}
