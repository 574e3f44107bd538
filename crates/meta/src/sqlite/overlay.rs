//! Commits that are not in the database yet, as readers see them: a layer that takes commits, above a frozen
//! one that is being written.
//!
//! commit -> active -> `freeze` -> flushing -> written -> `thaw`. A layer holds whole commits, and all of its
//! rows are of the current version: `seal` empties both layers before it ends a version.
//!
//! Invariant: newest first, active over flushing over database is the state after the last commit, at every
//! moment under the lock.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Range;
use std::iter::Peekable;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

use headrace_base::Version;
use headrace_format::key::{self, Key};

use crate::store::{At, Value, Write};

/// A key's value, or that it has none.
pub type Row = (Key, Option<Value>);

/// What a row costs beside its bytes: two vectors, its part of a tree node, two heap headers.
const ROW_BYTES: usize = 96;

#[derive(Debug, Default)]
pub struct Layer {
    rows: BTreeMap<Key, Option<Value>>,
    bytes: usize,
    /// The last commit in it.
    pub last: u64,
    pub commits: u64,
    /// When its first commit came.
    pub since: Option<Instant>,
}

impl Layer {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn rows(&self) -> impl Iterator<Item = (&Key, Option<&[u8]>)> {
        self.rows.iter().map(|(key, value)| (key, value.as_deref()))
    }

    /// None: this layer does not know the key. Some(None): it was deleted.
    pub fn find(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        self.rows.get(key).map(Option::as_deref)
    }

    pub fn set(&mut self, key: Key, value: Option<Value>) {
        let cost = |value: &Option<Value>| value.as_ref().map_or(0, Vec::len);
        self.bytes += key.len() + cost(&value) + ROW_BYTES;
        let key_bytes = key.len();
        if let Some(old) = self.rows.insert(key, value) {
            self.bytes -= key_bytes + cost(&old) + ROW_BYTES;
        }
    }

    /// Applies writes in their order. `covered` has, for each DeletePrefix, the keys that it deletes below
    /// this layer.
    pub fn apply(&mut self, writes: Vec<Write>, covered: Vec<Vec<Key>>) {
        let mut covered = covered.into_iter();
        for write in writes {
            match write {
                Write::Put(key, value) => self.set(key, Some(value)),
                Write::Delete(key) => self.set(key, None),
                Write::DeletePrefix(prefix) => {
                    let here: Vec<Key> = range(&self.rows, &prefix, &key::end_of(&prefix))
                        .filter(|(_, value)| value.is_some())
                        .map(|(key, _)| key.clone())
                        .collect();
                    for key in here.into_iter().chain(covered.next().unwrap_or_default()) {
                        self.set(key, None);
                    }
                }
            }
        }
    }
}

fn range<'a>(
    rows: &'a BTreeMap<Key, Option<Value>>,
    start: &[u8],
    end: &[u8],
) -> Range<'a, Key, Option<Value>> {
    // A range that ends before it begins is empty here, and a panic in the standard library.
    let end = end.max(start);
    rows.range::<[u8], _>((Bound::Included(start), Bound::Excluded(end)))
}

#[derive(Debug)]
pub struct Overlay {
    pub active: Layer,
    pub flushing: Option<Arc<Layer>>,
    /// Grows when rows of a layer reach the database, before the layer goes. What a reader found in the
    /// database may enter the cache only if it is still the generation at which no layer had the key.
    pub generation: u64,
    pub version: Version,
    /// The last commit.
    pub committed: u64,
}

impl Overlay {
    pub fn new(version: Version) -> Overlay {
        Overlay { active: Layer::default(), flushing: None, generation: 0, version, committed: 0 }
    }

    /// The frozen version that is asked for; None: the newest values.
    pub fn frozen(&self, at: At) -> Option<Version> {
        match at {
            At::Version(version) if version < self.version => Some(version),
            _ => None,
        }
    }

    pub fn find(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        self.active.find(key).or_else(|| self.flushing.as_ref()?.find(key))
    }

    /// Rows in [start, end), up to the `limit`-th that has a value: no merged result needs more of them.
    pub fn range(&self, start: &[u8], end: &[u8], limit: usize, frozen: Option<Version>) -> Vec<Row> {
        let mut active = range(&self.active.rows, start, end).peekable();
        let mut below = self.flushing.as_ref().map(|layer| range(&layer.rows, start, end).peekable());
        let mut rows = Vec::new();
        let mut values = 0;
        while values < limit {
            let Some((key, value)) = next_of(&mut active, below.as_mut()) else { break };
            // No layer has values of a version that has ended.
            if frozen.is_some() && key::is_versioned(key) {
                continue;
            }
            values += usize::from(value.is_some());
            rows.push((key.clone(), value.clone()));
        }
        rows
    }

    /// The layer to write next: what an earlier attempt left, else all commits up to now.
    pub fn freeze(&mut self) -> Option<Arc<Layer>> {
        if self.flushing.is_none() && !self.active.is_empty() {
            self.flushing = Some(Arc::new(std::mem::take(&mut self.active)));
        }
        self.flushing.clone()
    }

    /// When the oldest commit that is not in the database was made.
    pub fn pending_since(&self) -> Option<Instant> {
        self.flushing.as_ref().and_then(|layer| layer.since).or(self.active.since)
    }

    pub fn pending_commits(&self) -> u64 {
        self.active.commits + self.flushing.as_ref().map_or(0, |layer| layer.commits)
    }
}

type Rows<'a> = Peekable<Range<'a, Key, Option<Value>>>;

/// The next row of both layers; of a key that is in both, the upper one's.
fn next_of<'a>(upper: &mut Rows<'a>, lower: Option<&mut Rows<'a>>) -> Option<(&'a Key, &'a Option<Value>)> {
    let Some(lower) = lower else { return upper.next() };
    let order = match (upper.peek(), lower.peek()) {
        (Some((above, _)), Some((below, _))) => above.cmp(below),
        (Some(_), None) => Ordering::Less,
        (None, _) => Ordering::Greater,
    };
    match order {
        Ordering::Less => upper.next(),
        Ordering::Greater => lower.next(),
        Ordering::Equal => {
            lower.next();
            upper.next()
        }
    }
}
