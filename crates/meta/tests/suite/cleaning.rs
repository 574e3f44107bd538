//! Random writes, ends of versions, versions given up, restores, and cleaning at any moment, beside a map that
//! forgets nothing: every kept version reads the same, and after cleaning no row is left that nobody needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use headrace_base::Version;
use headrace_format::key::Key;
use headrace_meta::{At, Commit, Durability, Kept, MetaStore, Write};
use proptest::collection::vec;
use proptest::prelude::*;

use super::World;

#[derive(Clone, Debug)]
pub enum Step {
    Commit(Vec<(u8, Option<u8>)>, bool),
    Seal,
    /// The n-th of the kept versions.
    GiveUp(usize),
    /// One step of cleaning, of so many keys.
    Clean(usize),
    CleanAll,
    Restore(usize),
    Written(usize, usize, usize),
    Sync,
    Restart,
    Crash,
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    let writes = vec((0_u8..12, proptest::option::weighted(0.7, 0_u8..3)), 1..5);
    let step = prop_oneof![
        30 => (writes, proptest::bool::weighted(0.3)).prop_map(|(writes, durable)| Step::Commit(writes, durable)),
        14 => Just(Step::Seal),
        8 => (0_usize..8).prop_map(Step::GiveUp),
        8 => (1_usize..4).prop_map(Step::Clean),
        4 => Just(Step::CleanAll),
        3 => (0_usize..8).prop_map(Step::Restore),
        6 => (0_usize..8, 0_usize..9, 1_usize..14).prop_map(|(from, to, limit)| Step::Written(from, to, limit)),
        4 => Just(Step::Sync),
        2 => Just(Step::Restart),
        1 => Just(Step::Crash),
    ];
    vec(step, 1..80)
}

#[derive(Debug, Default)]
struct Map(BTreeMap<Key, BTreeMap<u64, Option<Vec<u8>>>>);

impl Map {
    fn row(&self, key: &[u8], version: u64) -> Option<(u64, Option<&Vec<u8>>)> {
        let (at, value) = self.0.get(key)?.range(..=version).next_back()?;
        Some((*at, value.as_ref()))
    }

    fn get(&self, key: &[u8], version: u64) -> Option<&Vec<u8>> {
        self.row(key, version)?.1
    }

    fn all(&self, version: u64) -> Vec<(Key, Vec<u8>)> {
        self.0.keys().filter_map(|key| Some((key.clone(), self.get(key, version)?.clone()))).collect()
    }

    /// How many rows the kept versions and the present need.
    fn rows_min(&self, kept: &BTreeSet<u64>) -> usize {
        let mut rows = 0;
        for key in self.0.keys() {
            let mut last: Option<(u64, bool)> = None;
            for version in kept.iter().copied().chain([u64::MAX]) {
                let Some((at, value)) = self.row(key, version) else { continue };
                if last.is_some_and(|(last, _)| last == at) {
                    continue;
                }
                let value_below = last.is_some_and(|(_, is_value)| is_value);
                if value.is_some() || value_below {
                    rows += 1;
                    last = Some((at, value.is_some()));
                }
            }
        }
        rows
    }
}

/// What the owner of a store remembers of its versions.
#[derive(Debug, Default)]
struct Versions {
    kept: BTreeSet<u64>,
    /// Given up, not yet cleaned; and where the next step for the first of them starts.
    gone: Vec<u64>,
    next: Key,
}

impl Versions {
    fn tell(&self, store: &dyn MetaStore) {
        let since = store.version();
        store.keep(&Kept { versions: self.kept.iter().copied().map(Version).collect(), since });
    }

    fn clean(&mut self, store: &dyn MetaStore, map: &Map, limit: usize) {
        let Some(gone) = self.gone.first().copied() else { return };
        let cleaned = store.clean(Version(gone), &self.next, limit).unwrap();
        for (key, value) in cleaned.removed {
            assert!(
                map.0[&key].values().any(|was| was.as_ref() == Some(&value)),
                "{key:?} never had {value:?}"
            );
        }
        match cleaned.next {
            Some(next) => self.next = next,
            None => {
                self.gone.remove(0);
                self.next.clear();
            }
        }
    }

    fn nth(&self, number: usize) -> Option<u64> {
        self.kept.iter().copied().nth(number % self.kept.len().max(1))
    }
}

fn check(store: &dyn MetaStore, map: &Map, versions: &Versions, told: &str) {
    for version in &versions.kept {
        let found = store.scan(b"a", b"{", usize::MAX, At::Version(Version(*version))).unwrap();
        assert_eq!(found, map.all(*version), "{told}: version {version}");
    }
    let found = store.scan(b"a", b"{", usize::MAX, At::Latest).unwrap();
    assert_eq!(found, map.all(u64::MAX), "{told}: the present");
    for key in map.0.keys() {
        assert_eq!(store.get(key, At::Latest).unwrap().as_ref(), map.get(key, u64::MAX), "{told}: {key:?}");
    }
}

pub fn kept_versions_stay_and_others_leave_nothing(world: &mut dyn World, steps: &[Step]) {
    let mut map = Map::default();
    let mut versions = Versions::default();
    let mut store: Arc<dyn MetaStore> = world.join();
    versions.tell(&*store);
    for (number, step) in steps.iter().enumerate() {
        let told = format!("step {number}, {step:?}");
        let current = store.version().0;
        match step {
            Step::Commit(writes, durable) => {
                let mut commit = Commit::default();
                for (name, value) in writes {
                    let key = vec![b"ie"[usize::from(*name % 2)], *name];
                    let value = value.map(|value| vec![value; 3]);
                    map.0.entry(key.clone()).or_default().insert(current, value.clone());
                    commit.writes.push(match value {
                        Some(value) => Write::Put(key, value),
                        None => Write::Delete(key),
                    });
                }
                let durability = if *durable { Durability::Durable } else { Durability::Relaxed };
                store.commit(commit, durability).unwrap();
            }
            Step::Seal => {
                assert_eq!(store.seal(Commit::default()).unwrap(), Version(current));
                versions.kept.insert(current);
            }
            Step::GiveUp(which) => {
                if let Some(version) = versions.nth(*which) {
                    versions.kept.remove(&version);
                    versions.gone.push(version);
                    versions.tell(&*store);
                }
            }
            Step::Clean(limit) => versions.clean(&*store, &map, *limit),
            Step::CleanAll => {
                while !versions.gone.is_empty() {
                    versions.clean(&*store, &map, 3);
                }
            }
            Step::Restore(which) => {
                if let Some(version) = versions.nth(*which) {
                    let own = vec![b'i', 200];
                    let writes = vec![Write::Put(own.clone(), vec![number as u8])];
                    store.restore(Version(version), Commit { preconditions: Vec::new(), writes }).unwrap();
                    for rows in map.0.values_mut() {
                        let was = rows.range(..=version).next_back().and_then(|(_, value)| value.clone());
                        let is = rows.range(..).next_back().and_then(|(_, value)| value.clone());
                        if was != is {
                            rows.insert(current, was);
                        }
                    }
                    map.0.entry(own).or_default().insert(current, Some(vec![number as u8]));
                    check(&*store, &map, &versions, &told);
                }
            }
            Step::Written(from, to, limit) => {
                let Some(from) = versions.nth(*from) else { continue };
                let (at, to) = match versions.nth(*to).filter(|to| *to > from) {
                    Some(to) => (At::Version(Version(to)), to),
                    None => (At::Latest, u64::MAX),
                };
                let mut keys: Vec<Key> = Vec::new();
                loop {
                    let start = keys.last().map_or(Vec::new(), |last| [&last[..], &[0]].concat());
                    let page = store.written(Version(from), at, &start, b"{", *limit).unwrap();
                    assert!(page.len() <= *limit && page.is_sorted(), "{told}");
                    keys.extend(page.clone());
                    if page.len() < *limit {
                        break;
                    }
                }
                assert!(keys.is_sorted_by(|left, right| left < right), "{told}: {keys:?}");
                for (key, rows) in &map.0 {
                    let differs = map.get(key, from) != map.get(key, to);
                    assert!(!differs || keys.contains(key), "{told}: {key:?} is missing");
                    let touched = rows.keys().any(|version| *version > from && *version <= to);
                    assert!(touched || !keys.contains(key), "{told}: {key:?} was not written");
                }
            }
            Step::Sync => store.sync().unwrap(),
            Step::Restart | Step::Crash => {
                check(&*store, &map, &versions, &told);
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
                versions.tell(&*store);
                versions.next.clear();
                check(&*store, &map, &versions, &told);
            }
        }
        if versions.gone.is_empty() {
            store.sync().unwrap();
            if let Some(rows) = world.versioned_rows() {
                assert_eq!(rows, map.rows_min(&versions.kept), "{told}: rows with {:?} kept", versions.kept);
            }
        }
    }
    check(&*store, &map, &versions, "at the end");
    while !versions.gone.is_empty() {
        versions.clean(&*store, &map, 2);
    }
    store.sync().unwrap();
    check(&*store, &map, &versions, "cleaned at the end");
    if let Some(rows) = world.versioned_rows() {
        assert_eq!(rows, map.rows_min(&versions.kept), "at the end, with {:?} kept", versions.kept);
    }
    drop(store);
    world.leave();
}
