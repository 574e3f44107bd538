//! Reading: overlay, then cache, then database.
//!
//! One key may be looked up without a lock between the steps: commits only move down, from the overlay to the
//! database, and a key that no layer has is in the database as it was then, or newer. Several keys are seen as
//! of one moment: the database's snapshot is pinned by a first row that is read under the overlay's lock.
//!
//! Connections come from a small pool, opened when first needed; a waiting reader waits for a connection before
//! it takes the lock, never under it. Commits have a connection of their own, so that long scans cannot hold
//! them up.

use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};

use headrace_base::{Error, Result, Version};
use headrace_format::key::{self, Key};
use rusqlite::{CachedStatement, Connection, Rows};

use crate::store::{At, Value};

use super::overlay::{Overlay, Row};
use super::schema::{self, Role, explain, verify_row};
use super::{Shared, lock, read};

/// Two more than cores would be enough: a reader that waits for the disk holds one.
const READERS_MAX: usize = 6;

const GET: &str = "SELECT value FROM kv WHERE key=?1 AND version<=?2 ORDER BY version DESC LIMIT 1";
const SCAN: &str = "SELECT key, value FROM kv WHERE key>=?1 AND key<?2 AND version<=?3 ORDER BY key, version";

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

    fn prepare(&self, sql: &str) -> Result<CachedStatement<'_>> {
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
        let overlay = read(&self.overlay);
        if true {
            self.cache.put(key, value.as_deref());
        }
        Ok(value)
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
        let reader = loan.reader()?;
        // Ends when dropped; it wrote nothing.
        let _snapshot = reader.connection.unchecked_transaction().map_err(|cause| reader.explain(cause))?;
        let overlay = read(&self.overlay);
        let frozen = overlay.frozen(at);
        let generation = overlay.generation;
        let mut missing = self.answer(&overlay, keys, at, &mut answers);
        // Neighbours share pages.
        missing.sort_unstable_by(|left, right| keys[*left].cmp(&keys[*right]));
        let Some((first, rest)) = missing.split_first() else { return Ok(answers) };
        answers[*first] = reader.get(&keys[*first], frozen)?;
        drop(overlay);
        for &missed in rest {
            answers[missed] = reader.get(&keys[missed], frozen)?;
        }
        let overlay = read(&self.overlay);
        if true {
            for &missed in &missing {
                if frozen.is_none() || !key::is_versioned(&keys[missed]) {
                    self.cache.put(&keys[missed], answers[missed].as_deref());
                }
            }
        }
        Ok(answers)
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
        let mut found = Vec::new();
        if start >= end || limit == 0 {
            return Ok(found);
        }
        let mut statement = reader.prepare(SCAN)?;
        let overlay = read(&self.overlay);
        let frozen = overlay.frozen(at);
        let mut above = overlay.range(start, end, limit, frozen).into_iter().peekable();
        let rows = statement.query((start, end, bound(frozen))).map_err(|cause| reader.explain(cause))?;
        let mut below = Stored::first(reader, rows)?;
        drop(overlay);
        let mut next_below = below.next()?;
        while found.len() < limit {
            let (key, value) = match (above.peek(), next_below.take()) {
                (None, None) => break,
                (None, Some(row)) => {
                    next_below = below.next()?;
                    row
                }
                (Some((key, _)), Some(row)) if row.0 < *key => {
                    next_below = below.next()?;
                    row
                }
                (Some((key, _)), row) => {
                    next_below = match row {
                        Some(row) if row.0 == *key => below.next()?,
                        row => row,
                    };
                    match above.next() {
                        Some(row) => row,
                        None => break,
                    }
                }
            };
            if let Some(value) = value {
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
