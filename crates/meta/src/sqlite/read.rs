//! Reading: overlay, then cache, then database.
//!
//! One key may be looked up without a lock between the steps: commits only move down, from the overlay to the
//! database, and a key that no layer has is in the database as it was then, or newer. Several keys are seen as
//! of one moment: the database's snapshot is pinned by a first row that is read under the overlay's lock.
//!
//! Connections come from a small pool, opened when first needed; a waiting reader waits for a connection before
//! it takes the lock, never under it. Commits have a connection of their own, so that long scans cannot hold
//! them up.

use std::cmp::Ordering;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};

use headrace_base::{Error, Result, Version};
use headrace_format::key::{self, Key};
use rusqlite::{CachedStatement, Connection, Rows, Transaction};

use crate::store::{At, Value};

use super::overlay::{Overlay, Row};
use super::schema::{self, Role, explain, verify_row};
use super::{Shared, lock, read};

/// Two more than cores would be enough: a reader that waits for the disk holds one.
const READERS_MAX: usize = 6;

const GET: &str = "SELECT value FROM kv WHERE key=?1 AND version<=?2 ORDER BY version DESC LIMIT 1";
pub const SCAN: &str =
    "SELECT key, value FROM kv WHERE key>=?1 AND key<?2 AND version<=?3 ORDER BY key, version";

#[derive(Debug)]
pub struct Reader {
    connection: Connection,
    path: PathBuf,
}

fn bound(frozen: Option<Version>) -> i64 {
    frozen.map_or(i64::MAX, |version| i64::try_from(version.0).unwrap_or(i64::MAX))
}

impl Reader {
    pub fn open(path: &Path) -> Result<Reader> {
        Ok(Reader { connection: schema::connect(path, Role::Reader)?, path: path.to_owned() })
    }

    fn explain(&self, cause: rusqlite::Error) -> Error {
        explain(&self.path, "read", cause)
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    pub fn prepare(&self, sql: &str) -> Result<CachedStatement<'_>> {
        self.connection.prepare_cached(sql).map_err(|cause| self.explain(cause))
    }

    fn get(&self, key: &[u8], frozen: Option<Version>) -> Result<Option<Value>> {
        let mut statement = self.prepare(GET)?;
        let mut rows = statement.query((key, bound(frozen))).map_err(|cause| self.explain(cause))?;
        match rows.next().map_err(|cause| self.explain(cause))? {
            Some(row) => {
                let stored = row.get_ref(0).map_err(|cause| self.explain(cause))?;
                verify_row(
                    &self.path,
                    key,
                    stored.as_blob_or_null().map_err(|cause| self.explain(cause.into()))?,
                )
            }
            None => Ok(None),
        }
    }
}

#[derive(Debug)]
pub struct Readers {
    path: PathBuf,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Reader>,
    opened: usize,
}

/// A reader on loan; dropping it gives it back.
#[derive(Debug)]
struct Loan<'a> {
    readers: &'a Readers,
    reader: Option<Reader>,
}

impl Readers {
    pub fn new(path: &Path) -> Readers {
        Readers { path: path.to_owned(), pool: Mutex::default(), returned: Condvar::new() }
    }

    fn take(&self) -> Result<Loan<'_>> {
        let mut pool = lock(&self.pool);
        loop {
            if let Some(reader) = pool.idle.pop() {
                return Ok(Loan { readers: self, reader: Some(reader) });
            }
            if pool.opened < READERS_MAX {
                pool.opened += 1;
                drop(pool);
                // The loan gives the place back if opening fails.
                let mut loan = Loan { readers: self, reader: None };
                loan.reader = Some(Reader::open(&self.path)?);
                return Ok(loan);
            }
            pool = self.returned.wait(pool).unwrap_or_else(|poison| poison.into_inner());
        }
    }
}

impl Loan<'_> {
    fn reader(&self) -> Result<&Reader> {
        self.reader.as_ref().ok_or_else(|| Error::internal("a loan without a reader"))
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let mut pool = lock(&self.readers.pool);
        match self.reader.take() {
            Some(reader) => pool.idle.push(reader),
            None => pool.opened -= 1,
        }
        drop(pool);
        self.readers.returned.notify_one();
    }
}

impl Shared {
    pub fn get(&self, key: &[u8], at: At) -> Result<Option<Value>> {
        let frozen = read(&self.overlay).frozen(at).filter(|_| key::is_versioned(key));
        match frozen {
            Some(_) => self.readers.take()?.reader()?.get(key, frozen),
            None => self.newest(key, None),
        }
    }

    /// The newest value, by `reader` if there is one at hand.
    pub fn newest(&self, key: &[u8], reader: Option<&Reader>) -> Result<Option<Value>> {
        let generation = {
            let overlay = read(&self.overlay);
            if let Some(value) = self.in_memory(&overlay, key) {
                return Ok(value);
            }
            overlay.generation
        };
        let value = match reader {
            Some(reader) => reader.get(key, None)?,
            None => self.readers.take()?.reader()?.get(key, None)?,
        };
        self.fill(generation, [(key, value.as_deref())]);
        Ok(value)
    }

    /// Puts into the cache what the database had, unless rows were flushed since no layer had the keys.
    pub fn fill<'a>(&self, generation: u64, rows: impl IntoIterator<Item = (&'a [u8], Option<&'a [u8]>)>) {
        let overlay = read(&self.overlay);
        if overlay.generation == generation {
            for (key, value) in rows {
                self.cache.put(key, value);
            }
        }
    }

    fn in_memory(&self, overlay: &Overlay, key: &[u8]) -> Option<Option<Value>> {
        match overlay.find(key) {
            Some(value) => Some(value.map(<[u8]>::to_vec)),
            None => self.cache.get(key),
        }
    }

    pub fn get_many(&self, keys: &[Key], at: At) -> Result<Vec<Option<Value>>> {
        let mut answers = vec![None; keys.len()];
        if self.answer(&read(&self.overlay), keys, at, &mut answers).is_empty() {
            return Ok(answers);
        }
        let loan = self.readers.take()?;
        self.finish_many(self.pin_many(loan.reader()?, keys, at)?)
    }

    /// Answers what is in memory, and pins what the database has at this moment.
    pub fn pin_many<'a>(&self, reader: &'a Reader, keys: &'a [Key], at: At) -> Result<Many<'a>> {
        let snapshot = reader.connection.unchecked_transaction().map_err(|cause| reader.explain(cause))?;
        let mut answers = vec![None; keys.len()];
        let overlay = read(&self.overlay);
        let frozen = overlay.frozen(at);
        let mut missing = self.answer(&overlay, keys, at, &mut answers);
        // Neighbours share pages.
        missing.sort_unstable_by(|left, right| keys[*left].cmp(&keys[*right]));
        if let Some(&first) = missing.first() {
            answers[first] = reader.get(&keys[first], frozen)?;
        }
        let generation = overlay.generation;
        Ok(Many { keys, reader, frozen, generation, answers, missing, _snapshot: snapshot })
    }

    pub fn finish_many(&self, mut many: Many<'_>) -> Result<Vec<Option<Value>>> {
        for &missed in many.missing.iter().skip(1) {
            many.answers[missed] = many.reader.get(&many.keys[missed], many.frozen)?;
        }
        let newest =
            many.missing.iter().map(|&missed| (&*many.keys[missed], many.answers[missed].as_deref()));
        let newest = newest.filter(|(key, _)| many.frozen.is_none() || !key::is_versioned(key));
        self.fill(many.generation, newest);
        Ok(many.answers)
    }

    /// Fills in what is in memory; gives the places of the keys that are not.
    fn answer(&self, overlay: &Overlay, keys: &[Key], at: At, answers: &mut [Option<Value>]) -> Vec<usize> {
        let frozen = overlay.frozen(at).is_some();
        let mut missing = Vec::new();
        for (place, key) in keys.iter().enumerate() {
            let known = if frozen && key::is_versioned(key) { None } else { self.in_memory(overlay, key) };
            match known {
                Some(value) => answers[place] = value,
                None => missing.push(place),
            }
        }
        missing
    }

    /// Does something with a reader of the pool.
    pub fn with_reader<T>(&self, body: impl FnOnce(&Reader) -> Result<T>) -> Result<T> {
        body(self.readers.take()?.reader()?)
    }

    pub fn scan(&self, start: &[u8], end: &[u8], limit: usize, at: At) -> Result<Vec<(Key, Value)>> {
        let loan = self.readers.take()?;
        self.scan_by(loan.reader()?, start, end, limit, at)
    }

    pub fn scan_by(
        &self,
        reader: &Reader,
        start: &[u8],
        end: &[u8],
        limit: usize,
        at: At,
    ) -> Result<Vec<(Key, Value)>> {
        if start >= end || limit == 0 {
            return Ok(Vec::new());
        }
        self.pin_scan(reader, &mut reader.prepare(SCAN)?, (start, end), limit, at)?.finish()
    }

    /// Copies what the overlay has, and pins what the database has at this moment.
    pub fn pin_scan<'a>(
        &self,
        reader: &'a Reader,
        statement: &'a mut CachedStatement<'_>,
        (start, end): (&[u8], &[u8]),
        limit: usize,
        at: At,
    ) -> Result<Scan<'a>> {
        let overlay = read(&self.overlay);
        let frozen = overlay.frozen(at);
        let above = overlay.range(start, end, limit, frozen).into_iter().peekable();
        let rows = statement.query((start, end, bound(frozen))).map_err(|cause| reader.explain(cause))?;
        Ok(Scan { above, below: Stored::first(reader, rows)?, limit })
    }
}

/// A `get_many` of which the snapshot is pinned. The snapshot ends with it; it wrote nothing.
#[derive(Debug)]
pub struct Many<'a> {
    keys: &'a [Key],
    reader: &'a Reader,
    frozen: Option<Version>,
    generation: u64,
    answers: Vec<Option<Value>>,
    /// Places of the keys that are not in memory, in key order. The first of them is answered.
    missing: Vec<usize>,
    _snapshot: Transaction<'a>,
}

/// A scan of which the snapshot is pinned.
pub struct Scan<'a> {
    above: Peekable<std::vec::IntoIter<Row>>,
    below: Stored<'a>,
    limit: usize,
}

impl Scan<'_> {
    pub fn finish(mut self) -> Result<Vec<(Key, Value)>> {
        let mut found = Vec::new();
        let mut next_below = self.below.next()?;
        while found.len() < self.limit {
            let order = match (self.above.peek(), &next_below) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((above, _)), Some((below, _))) => above.cmp(below),
            };
            let row = if order.is_le() { self.above.next() } else { next_below.take() };
            // Of a key that is in both, the database's value is older.
            if order.is_ge() {
                next_below = self.below.next()?;
            }
            if let Some((key, Some(value))) = row {
                found.push((key, value));
            }
        }
        Ok(found)
    }
}

/// The rows of a running scan, one a key: the newest that the scan may see.
struct Stored<'a> {
    reader: &'a Reader,
    rows: Rows<'a>,
    /// Read already, as stored: the key's newest so far.
    ahead: Option<Row>,
}

impl<'a> Stored<'a> {
    /// Reads the first row, which pins the snapshot.
    fn first(reader: &'a Reader, rows: Rows<'a>) -> Result<Stored<'a>> {
        let mut stored = Stored { reader, rows, ahead: None };
        stored.ahead = stored.step()?;
        Ok(stored)
    }

    fn step(&mut self) -> Result<Option<Row>> {
        let explain = |cause| explain(&self.reader.path, "read", cause);
        let Some(row) = self.rows.next().map_err(explain)? else { return Ok(None) };
        let blob = |column| -> rusqlite::Result<Option<Vec<u8>>> {
            Ok(row.get_ref(column)?.as_blob_or_null()?.map(<[u8]>::to_vec))
        };
        let key = blob(0).map_err(explain)?.unwrap_or_default();
        Ok(Some((key, blob(1).map_err(explain)?)))
    }

    fn next(&mut self) -> Result<Option<Row>> {
        let Some(mut newest) = self.ahead.take() else { return Ok(None) };
        while let Some(row) = self.step()? {
            if row.0 == newest.0 {
                newest = row;
            } else {
                self.ahead = Some(row);
                break;
            }
        }
        let value = verify_row(&self.reader.path, &newest.0, newest.1.as_deref())?;
        Ok(Some((newest.0, value)))
    }
}
