//! What the index over versions is for: which keys were written since a version, putting a version back, and
//! removing rows that nobody can read any more.
//!
//! A key's rows, by version; each is what readers see from its version up to the next row's:
//!
//! ```text
//! rows     3 = a     5 = b     6 deleted     9 = c
//! seen     3 4       5         6 7 8         9 ..
//! kept          4                   7              and the present
//! cleaned  3 = a               6 deleted     9 = c
//! ```
//! A row stays if a kept version or the present sees it; a deletion stays only if a value stays below it. What
//! becomes free when one version is given up lies under keys that were written between it and the next kept
//! version: only those are looked at.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use headrace_base::error::errno;
use headrace_base::{Error, Result, Version, crash};
use headrace_format::key::{self, Key};
use rusqlite::{Connection, OptionalExtension, Transaction};

use crate::store::{At, Cleaned, Commit, CommitError, Sequence};

use super::commit::check_writes;
use super::flush::Rows;
use super::overlay::Layer;
use super::schema::{explain, verify_row};
use super::{Shared, lock, read, write};

/// Keys looked at between two queries.
const PAGE_KEYS: usize = 1_000;
/// All versioned keys: they begin with a lower-case letter.
const VERSIONED: (&[u8], &[u8]) = (b"a", b"{");

const NEXT_VERSION: &str =
    "SELECT version FROM kv INDEXED BY kv_written WHERE version>1 AND version>?1 ORDER BY version LIMIT 1";
const WRITTEN_AT: &str = "SELECT key FROM kv INDEXED BY kv_written
    WHERE version>1 AND version=?1 AND key>=?2 AND key<?3 ORDER BY key LIMIT ?4";
const VERSIONS_OF: &str = "SELECT version FROM kv WHERE key=?1 ORDER BY version";
const ROWS_OF: &str = "SELECT version, value FROM kv WHERE key=?1 ORDER BY version";
const REMOVE: &str = "DELETE FROM kv WHERE key=?1 AND version=?2";
const STORED_AT: &str = "SELECT value FROM kv WHERE key=?1 AND version<=?2 ORDER BY version DESC LIMIT 1";

impl Shared {
    pub fn written(
        &self,
        after: Version,
        through: At,
        start: &[u8],
        end: &[u8],
        limit: usize,
    ) -> Result<Vec<Key>> {
        if after.0 == 0 {
            return Err(Error::invalid("what was written after version 0 is everything: scan instead"));
        }
        let (start, end) = (start.max(VERSIONED.0), end.min(VERSIONED.1));
        if start >= end || limit == 0 {
            return Ok(Vec::new());
        }
        // The overlay first: rows move down only, so none is missed.
        let (mut keys, through) = {
            let overlay = read(&self.overlay);
            match overlay.frozen(through) {
                Some(version) => (BTreeSet::new(), version),
                None => {
                    let rows = overlay.range(start, end, limit, None);
                    (rows.into_iter().map(|(key, _)| key).collect(), overlay.version)
                }
            }
        };
        let stored = self.with_reader(|reader| {
            written_in(reader.connection(), &self.path, (after, through), (start, end), limit)
        })?;
        keys.extend(stored);
        Ok(keys.into_iter().take(limit).collect())
    }

    pub fn stored_versions(&self, key: &[u8]) -> Result<Vec<Version>> {
        self.with_reader(|reader| {
            let explain = |cause| explain(&self.path, "read the versions of a key", cause);
            let mut statement = reader.prepare(VERSIONS_OF)?;
            let rows = statement.query_map((key,), |row| row.get::<_, i64>(0)).map_err(explain)?;
            rows.map(|row| Ok(Version(row.map_err(explain)?.unsigned_abs()))).collect()
        })
    }

    pub fn restore(&self, version: Version, commit: Commit) -> Result<Sequence, CommitError> {
        check_writes(&commit.writes)?;
        let committer = lock(&self.committer);
        self.usable(&committer)?;
        if self.touches_session(&commit.writes) {
            return Err(Error::invalid("a restore may not write the session's own row").into());
        }
        self.check(&commit.preconditions, &committer.reader)?;
        // All earlier commits first: then the database is the newest state, and no other commit can come.
        let committed = read(&self.overlay).committed;
        self.flush_to(committed)?;
        let covered = self.covered(&commit.writes, &committer.reader)?;
        if covered.iter().flatten().any(|key| key::is_versioned(key)) {
            // They would be those from before, not those that come back.
            return Err(Error::invalid("a restore may not delete versioned keys by their prefix").into());
        }
        let mut layer = Layer::default();
        layer.last = committed + 1;
        layer.apply(commit.writes, covered);
        self.flush_restored(version, &layer).inspect_err(|error| {
            if error.raw_errno() == errno::ESTALE {
                self.fenced.store(true, Ordering::Release);
            }
        })?;
        Ok(Sequence(layer.last))
    }

    fn flush_restored(&self, past: Version, layer: &Layer) -> Result<()> {
        let mut writer = lock(&self.writer);
        let version = read(&self.overlay).version;
        let transaction = writer.write_restored(past, layer, version)?;
        crash::point("meta.before_restore");
        // Readers see all of it or nothing: they wait for this one fsync.
        let mut overlay = write(&self.overlay);
        transaction.commit().map_err(|cause| explain(&self.path, "commit a restore", cause))?;
        crash::point("meta.after_restore");
        overlay.generation += 1;
        overlay.committed = layer.last;
        self.cache.clear();
        drop(overlay);
        let log_is_long = writer.log_is_long();
        drop(writer);
        self.set_durable(layer.last);
        if log_is_long {
            self.wake_flusher(true);
        }
        Ok(())
    }

    pub fn clean(&self, gone: Version, start: &[u8], limit: usize) -> Result<Cleaned> {
        let mut writer = lock(&self.writer);
        let current = read(&self.overlay).version;
        let (transaction, cleaned) = writer.clean(gone, current, start, limit)?;
        crash::point("meta.before_clean");
        transaction.commit().map_err(|cause| explain(&self.path, "commit a cleaning", cause))?;
        crash::point("meta.after_clean");
        let log_is_long = writer.log_is_long();
        drop(writer);
        if log_is_long {
            self.wake_flusher(true);
        }
        // Newest values stay, so what is cached stays true.
        Ok(cleaned)
    }
}

/// Keys in [start, end) with a row in versions (after, through].
fn written_in(
    connection: &Connection,
    path: &Path,
    (after, through): (Version, Version),
    (start, end): (&[u8], &[u8]),
    limit: usize,
) -> Result<BTreeSet<Key>> {
    let explain = |cause| explain(path, "read what was written", cause);
    let through = sql(through);
    let limit_sql = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut keys: BTreeSet<Key> = BTreeSet::new();
    let mut version = sql(after);
    loop {
        let next: Option<i64> = connection
            .prepare_cached(NEXT_VERSION)
            .and_then(|mut statement| statement.query_row((version,), |row| row.get(0)).optional())
            .map_err(explain)?;
        let Some(next) = next.filter(|next| *next <= through) else { break };
        version = next;
        // Of later keys than those at hand none is among the first `limit`.
        let end = match keys.last() {
            Some(last) if keys.len() == limit => last.clone(),
            _ => end.to_vec(),
        };
        let mut statement = connection.prepare_cached(WRITTEN_AT).map_err(explain)?;
        let mut rows = statement.query((version, start, end, limit_sql)).map_err(explain)?;
        while let Some(row) = rows.next().map_err(explain)? {
            keys.insert(row.get(0).map_err(explain)?);
        }
        while keys.len() > limit {
            keys.pop_last();
        }
    }
    Ok(keys)
}

fn sql(version: Version) -> i64 {
    i64::try_from(version.0).unwrap_or(i64::MAX)
}

impl Rows<'_> {
    /// Gives every versioned key the value that it had at version `past`.
    pub fn restore(&self, transaction: &Transaction<'_>, past: i64) -> Result<()> {
        // Rows of the current version before all others: putting keys back makes more of them.
        let mut version = self.version();
        loop {
            let mut start = VERSIONED.0.to_vec();
            loop {
                let keys: Vec<Key> = {
                    let explain = |cause| explain(self.path, "read what was written", cause);
                    let mut statement = transaction.prepare_cached(WRITTEN_AT).map_err(explain)?;
                    let rows = statement
                        .query_map((version, &start, VERSIONED.1, PAGE_KEYS as i64), |row| row.get(0))
                        .map_err(explain)?;
                    rows.collect::<rusqlite::Result<_>>().map_err(explain)?
                };
                for key in &keys {
                    self.restore_key(transaction, key, past)?;
                }
                match keys.last() {
                    Some(last) if keys.len() == PAGE_KEYS => start = after(last),
                    _ => break,
                }
            }
            let from = if version == self.version() { past } else { version };
            let next: Option<i64> = transaction
                .prepare_cached(NEXT_VERSION)
                .and_then(|mut statement| statement.query_row((from,), |row| row.get(0)).optional())
                .map_err(|cause| explain(self.path, "read what was written", cause))?;
            match next {
                Some(next) if next < self.version() => version = next,
                _ => return Ok(()),
            }
        }
    }

    fn restore_key(&self, transaction: &Transaction<'_>, key: &[u8], past: i64) -> Result<()> {
        let stored_at = |version: i64| -> Result<Option<Vec<u8>>> {
            transaction
                .prepare_cached(STORED_AT)
                .and_then(|mut statement| {
                    statement.query_row((key, version), |row| row.get::<_, Option<Vec<u8>>>(0)).optional()
                })
                .map(Option::flatten)
                .map_err(|cause| explain(self.path, "read what was", cause))
        };
        let was = stored_at(past)?;
        // A damaged value must not come back as if it were good.
        verify_row(self.path, key, was.as_deref())?;
        if was == stored_at(self.version())? {
            return Ok(());
        }
        self.set_stored(transaction, key, was.as_deref())
    }
}

/// Looks at the keys that were written between `gone` and the next kept version, from `start` on.
pub fn clean(
    transaction: &Transaction<'_>,
    path: &Path,
    (gone, kept, current): (Version, &[Version], Version),
    start: &[u8],
    limit: usize,
) -> Result<Cleaned> {
    let through = kept.iter().copied().find(|kept| *kept > gone).unwrap_or(current);
    let keys = written_in(transaction, path, (gone, through), (start.max(VERSIONED.0), VERSIONED.1), limit)?;
    let mut cleaned = Cleaned {
        removed: Vec::new(),
        next: keys.last().filter(|_| keys.len() == limit).map(|last| after(last)),
    };
    let explain = |cause| explain(path, "clean", cause);
    for key in keys {
        let rows: Vec<(i64, Option<Vec<u8>>)> = {
            let mut statement = transaction.prepare_cached(ROWS_OF).map_err(explain)?;
            let rows = statement.query_map((&key,), |row| Ok((row.get(0)?, row.get(1)?))).map_err(explain)?;
            rows.collect::<rusqlite::Result<_>>().map_err(explain)?
        };
        let seen: Vec<(u64, bool)> =
            rows.iter().map(|(version, value)| (version.unsigned_abs(), value.is_some())).collect();
        for ((version, value), stays) in rows.into_iter().zip(needed(&seen, kept)) {
            if stays {
                continue;
            }
            transaction
                .prepare_cached(REMOVE)
                .and_then(|mut statement| statement.execute((&key, version)))
                .map_err(explain)?;
            match verify_row(path, &key, value.as_deref()) {
                Ok(Some(value)) => cleaned.removed.push((key.clone(), value)),
                Ok(None) => {}
                // Nobody will miss it, but what it named is not known.
                Err(error) => tracing::warn!(%error, "a damaged value that nobody needs was removed"),
            }
        }
    }
    Ok(cleaned)
}

/// Which of a key's rows stay: (version, whether it is a value), ascending, as are the kept versions.
fn needed(rows: &[(u64, bool)], kept: &[Version]) -> Vec<bool> {
    let mut value_below = false;
    rows.iter()
        .enumerate()
        .map(|(place, (version, is_value))| {
            let is_seen = match rows.get(place + 1) {
                None => true,
                Some((next, _)) => {
                    let first = kept.partition_point(|kept| kept.0 < *version);
                    kept.get(first).is_some_and(|kept| kept.0 < *next)
                }
            };
            let stays = is_seen && (*is_value || value_below);
            if stays {
                value_below = *is_value;
            }
            stays
        })
        .collect()
}

/// The smallest key that is greater.
fn after(key: &[u8]) -> Key {
    [key, &[0]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_stays_if_it_is_seen_and_hides_or_shows_something() {
        let kept = |versions: &[u64]| versions.iter().map(|version| Version(*version)).collect::<Vec<_>>();
        let rows = [(3, true), (5, true), (6, false), (9, true)];
        assert_eq!(needed(&rows, &kept(&[4, 7])), [true, false, true, true]);
        assert_eq!(needed(&rows, &kept(&[])), [false, false, false, true]);
        // What the deletion hid is gone, and so is the need for it.
        assert_eq!(needed(&rows, &kept(&[7])), [false, false, false, true]);
        assert_eq!(needed(&rows[..3], &kept(&[2])), [false, false, false]);
        assert_eq!(needed(&rows[..3], &kept(&[5])), [false, true, true]);
        assert_eq!(needed(&rows, &kept(&[2, 3, 8, 9, 12])), [true, false, true, true]);
    }
}
