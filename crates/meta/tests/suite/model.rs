//! Random operations on a store and on a map of maps; every answer must be the same. With pauses of the disk
//! where the world can make them, so that layers pile up; with clean and unclean ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use headrace_base::Version;
use headrace_format::key::{self, Key};
use headrace_meta::{At, Commit, CommitError, Durability, MetaStore, Precondition, Write};
use proptest::collection::vec;
use proptest::prelude::*;

use super::World;

#[derive(Clone, Debug)]
pub enum Step {
    Commit(Vec<Condition>, Vec<Write>, bool),
    Seal(Vec<Condition>, Vec<Write>),
    Get(Key, Option<u64>),
    GetMany(Vec<Key>, Option<u64>),
    Scan(Key, Key, usize, Option<u64>),
    Sync,
    BreakDisk,
    MendDisk,
    Restart,
    /// After a sync, so that the model knows what is left.
    Crash,
}

/// A precondition, made to hold or made as it comes.
#[derive(Clone, Debug)]
pub enum Condition {
    Present(Key),
    Absent(Key),
    Equals(Key, Vec<u8>),
    EqualsNow(Key),
    Empty(Key, Key),
}

fn keys() -> impl Strategy<Value = Key> {
    // Few keys, prefixes of each other, both kinds, bytes at the edges; none between those of the store itself.
    let tail = vec(prop_oneof![Just(0_u8), Just(1), Just(7), Just(255)], 0..3);
    (prop_oneof![4 => Just(b'i'), 2 => Just(b'e'), 2 => Just(b'X'), 1 => Just(b'Y')], tail).prop_map(
        |(letter, tail)| {
            let mut key = vec![letter];
            key.extend(tail);
            key
        },
    )
}

fn values() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![9 => vec(any::<u8>(), 0..4), 1 => vec(any::<u8>(), 3_000..9_000)]
}

fn writes() -> impl Strategy<Value = Write> {
    prop_oneof![
        6 => (keys(), values()).prop_map(|(key, value)| Write::Put(key, value)),
        3 => keys().prop_map(Write::Delete),
        1 => keys().prop_map(Write::DeletePrefix),
    ]
}

fn conditions() -> impl Strategy<Value = Condition> {
    prop_oneof![
        1 => keys().prop_map(Condition::Present),
        1 => keys().prop_map(Condition::Absent),
        1 => (keys(), values()).prop_map(|(key, value)| Condition::Equals(key, value)),
        3 => keys().prop_map(Condition::EqualsNow),
        1 => (keys(), keys()).prop_map(|(prefix, guard)| Condition::Empty(prefix, guard)),
    ]
}

fn versions() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![2 => Just(None), 3 => (0_u64..6).prop_map(Some)]
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        30 => (vec(conditions(), 0..2), vec(writes(), 0..6), proptest::bool::weighted(0.2))
            .prop_map(|(conditions, writes, durable)| Step::Commit(conditions, writes, durable)),
        3 => (vec(conditions(), 0..2), vec(writes(), 0..4))
            .prop_map(|(conditions, writes)| Step::Seal(conditions, writes)),
        15 => (keys(), versions()).prop_map(|(key, at)| Step::Get(key, at)),
        10 => (vec(keys(), 0..12), versions()).prop_map(|(keys, at)| Step::GetMany(keys, at)),
        15 => (keys(), keys(), prop_oneof![0_usize..6, Just(usize::MAX)], versions())
            .prop_map(|(start, end, limit, at)| Step::Scan(start, end, limit, at)),
        4 => Just(Step::Sync),
        3 => Just(Step::BreakDisk),
        3 => Just(Step::MendDisk),
        1 => Just(Step::Restart),
        1 => Just(Step::Crash),
    ];
    vec(step, 1..60)
}

#[derive(Clone, Debug, Default)]
struct Map {
    rows: BTreeMap<Key, BTreeMap<u64, Option<Vec<u8>>>>,
}

impl Map {
    fn get(&self, key: &[u8], version: u64) -> Option<&Vec<u8>> {
        let version = if key::is_versioned(key) { version } else { 0 };
        self.rows.get(key)?.range(..=version).next_back()?.1.as_ref()
    }

    fn with_prefix(&self, prefix: &[u8], version: u64) -> Vec<Key> {
        let keys = self.rows.keys().filter(|key| key.starts_with(prefix));
        keys.filter(|key| self.get(key, version).is_some()).cloned().collect()
    }

    fn set(&mut self, key: &Key, version: u64, value: Option<Vec<u8>>) {
        let version = if key::is_versioned(key) { version } else { 0 };
        self.rows.entry(key.clone()).or_default().insert(version, value);
    }

    fn apply(&mut self, writes: &[Write], version: u64) {
        for write in writes {
            match write {
                Write::Put(key, value) => self.set(key, version, Some(value.clone())),
                Write::Delete(key) => self.set(key, version, None),
                Write::DeletePrefix(prefix) => {
                    for key in self.with_prefix(prefix, version) {
                        self.set(&key, version, None);
                    }
                }
            }
        }
    }

    /// The precondition, and the key that a conflict names.
    fn judge(&self, condition: &Condition, version: u64) -> (Precondition, Option<Key>) {
        let get = |key: &Key| self.get(key, version);
        let unless = |holds: bool, key: &Key| if holds { None } else { Some(key.clone()) };
        match condition.clone() {
            Condition::Present(key) => {
                let failed = unless(get(&key).is_some(), &key);
                (Precondition::Present(key), failed)
            }
            Condition::Absent(key) => {
                let failed = unless(get(&key).is_none(), &key);
                (Precondition::Absent(key), failed)
            }
            Condition::Equals(key, value) => {
                let failed = unless(get(&key) == Some(&value), &key);
                (Precondition::Equals(key, value), failed)
            }
            Condition::EqualsNow(key) => match get(&key) {
                Some(value) => (Precondition::Equals(key, value.clone()), None),
                None => (Precondition::Absent(key), None),
            },
            Condition::Empty(prefix, guard) => {
                let failed = unless(get(&guard).is_some(), &guard)
                    .or_else(|| unless(self.with_prefix(&prefix, version).is_empty(), &prefix));
                (Precondition::Empty { prefix, guard }, failed)
            }
        }
    }

    fn prepare(&self, conditions: &[Condition], writes: &[Write], version: u64) -> (Commit, Option<Key>) {
        let judged: Vec<_> = conditions.iter().map(|condition| self.judge(condition, version)).collect();
        let failed = judged.iter().find_map(|(_, failed)| failed.clone());
        let preconditions = judged.into_iter().map(|(precondition, _)| precondition).collect();
        (Commit { preconditions, writes: writes.to_vec() }, failed)
    }
}

pub fn agrees_with_a_map(world: &mut dyn World, steps: &[Step]) {
    let mut map = Map::default();
    let mut store: Arc<dyn MetaStore> = world.join();
    let mut version = store.version().0;
    let mut broken = false;
    for (number, step) in steps.iter().enumerate() {
        let told = |what: &str| format!("step {number}, {step:?}: {what}");
        let at = |asked: &Option<u64>| match asked {
            Some(asked) => (At::Version(Version(*asked)), *asked),
            None => (At::Latest, u64::MAX),
        };
        match step {
            Step::Commit(conditions, writes, durable) => {
                let (commit, failed) = map.prepare(conditions, writes, version);
                let durability = if *durable { Durability::Durable } else { Durability::Relaxed };
                match store.commit(commit, durability) {
                    Ok(_) => assert_eq!(failed, None, "{}", told("went through")),
                    Err(CommitError::Conflict(key)) => assert_eq!(Some(key), failed, "{}", told("conflict")),
                    Err(CommitError::Failed(error)) => {
                        assert!(broken && *durable && failed.is_none(), "{}: {error:?}", told("failed"));
                    }
                }
                // One that could not be made durable is visible all the same.
                if failed.is_none() {
                    map.apply(writes, version);
                }
            }
            Step::Seal(conditions, writes) => {
                let (commit, failed) = map.prepare(conditions, writes, version);
                match store.seal(commit) {
                    Ok(sealed) => {
                        assert!(!broken, "{}", told("sealed on a broken disk"));
                        assert_eq!((failed, sealed), (None, Version(version)), "{}", told("sealed"));
                        map.apply(writes, version);
                        version += 1;
                    }
                    Err(CommitError::Conflict(key)) => assert_eq!(Some(key), failed, "{}", told("conflict")),
                    Err(CommitError::Failed(error)) => {
                        assert!(broken && failed.is_none(), "{}: {error:?}", told("failed"));
                    }
                }
                assert_eq!(store.version(), Version(version), "{}", told("version"));
            }
            Step::Get(key, asked) => {
                let (at, asked) = at(asked);
                assert_eq!(store.get(key, at).unwrap().as_ref(), map.get(key, asked), "{}", told("get"));
            }
            Step::GetMany(keys, asked) => {
                let (at, asked) = at(asked);
                let expected: Vec<_> = keys.iter().map(|key| map.get(key, asked).cloned()).collect();
                assert_eq!(store.get_many(keys, at).unwrap(), expected, "{}", told("get_many"));
            }
            Step::Scan(start, end, limit, asked) => {
                let (at, asked) = at(asked);
                let expected: Vec<_> = map
                    .rows
                    .keys()
                    .filter(|key| *key >= start && *key < end)
                    .filter_map(|key| Some((key.clone(), map.get(key, asked)?.clone())))
                    .take(*limit)
                    .collect();
                assert_eq!(store.scan(start, end, *limit, at).unwrap(), expected, "{}", told("scan"));
            }
            Step::Sync => {
                if let Err(error) = store.sync() {
                    assert!(broken, "{}: {error:?}", told("failed"));
                }
            }
            Step::BreakDisk => broken = world.break_disk(),
            Step::MendDisk => {
                world.mend_disk();
                broken = false;
            }
            Step::Restart | Step::Crash => {
                world.mend_disk();
                broken = false;
                if matches!(step, Step::Crash) {
                    store.sync().unwrap();
                }
                drop(store);
                if matches!(step, Step::Crash) {
                    world.crash()
                } else {
                    world.leave()
                }
                store = world.join();
                assert_eq!(store.version(), Version(version), "{}", told("version"));
            }
        }
    }
    world.mend_disk();
    store.sync().unwrap();
    for at in 0..=version {
        for prefix in [b"i", b"e", b"X", b"Y"] {
            let found =
                store.scan(prefix, &key::end_of(prefix), usize::MAX, At::Version(Version(at))).unwrap();
            let keys = map.with_prefix(prefix, at);
            let expected: Vec<_> =
                keys.into_iter().map(|key| (key.clone(), map.get(&key, at).unwrap().clone())).collect();
            assert_eq!(found, expected, "at the end, version {at}");
        }
    }
}
