//! From memory to disk: group commit, the flusher thread and checkpoints of the write-ahead log.
//!
//! Whoever needs durability first leads: it freezes the active layer, writes it in one transaction and tells
//! the others, who wait for their sequence. No thread is handed the work on this path. The flusher leads for
//! commits that nobody waits for. One layer, one transaction, one after the other: what a crash leaves is a
//! prefix of the commits.
//!
//! A layer that could not be written stays `flushing`, readable, and is tried again; everyone who waited for it
//! is told. Only a session that was declared dead ends this: its commits may never reach the database.
//!
//! After the transaction the rows enter the cache, and only then the layer goes (`install`): first the
//! generation grows, so that no reader fills in what it read before.

use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, Kind, MIB, OpId, Result, SessionId, Version, crash, time};
use headrace_format::key::{self, Key};
use headrace_format::record::{Session, SessionState};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use crate::store::{Cleaned, Kept};

use super::overlay::Layer;
use super::schema::{PAGE_BYTES, explain, protect, verify};
use super::{Shared, lock, read, versions, write};

/// How long a commit that nobody waits for may stay in memory. Half of what the store promises; the rest is
/// for the writing itself.
const FLUSH_AFTER: Duration = Duration::from_millis(500);
/// A layer of this size is flushed early: writing it takes about 100 ms.
pub const FLUSH_BYTES: usize = 4 * MIB as usize;
/// Commits wait for the flush when the active layer has this size. With as much again being flushed, the
/// overlay takes 16 MiB.
pub const ACTIVE_BYTES_MAX: usize = 8 * MIB as usize;
/// How long a failed flush rests before it is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// The log is copied into the database when it holds this much. Readers search one block of its index for every
/// 4,096 pages, which is this. (Tests fill less.)
const CHECKPOINT_BYTES: u64 = if cfg!(test) { MIB } else { 16 * MIB };
/// With writers that never rest, a checkpoint beside them never reaches the end of the log, and the log never
/// starts over. At this size the last part is copied while writers wait (a few ms).
const LOG_BYTES_MAX: u64 = 4 * CHECKPOINT_BYTES;
/// An empty log keeps its blocks: overwriting needs no new ones, so fsync is cheaper and the disk cannot be full.
pub const LOG_BYTES_KEPT: u64 = LOG_BYTES_MAX;

/// The connection that writes, and how rows are written.
#[derive(Debug)]
pub struct Writer {
    connection: Connection,
    path: PathBuf,
    session: SessionId,
    session_key: Key,
    /// The session's last op-id before its first commit here.
    op_base: u64,
    /// Ended versions that must stay readable, ascending. None: all.
    kept: Option<Vec<Version>>,
}

impl Writer {
    /// Enters the session, durably.
    pub fn register(
        mut connection: Connection,
        path: &Path,
        id: SessionId,
        record: &Session,
    ) -> Result<Writer> {
        if record.state != SessionState::Alive {
            return Err(Error::invalid(format!(
                "session {id} is to open the volume but is {:?}",
                record.state
            )));
        }
        let session_key = key::session(id);
        let transaction = begin(&mut connection, path)?;
        if stored(&transaction, path, &session_key)?.is_some() {
            return Err(Error::errno(
                errno::EEXIST,
                format!("session {id} has opened this volume before: open it with a new id"),
            ));
        }
        put(&transaction, path, &session_key, 0, &record.encode(), &mut Vec::new())?;
        transaction.commit().map_err(|cause| explain(path, "register the session", cause))?;
        Ok(Writer {
            connection,
            path: path.to_owned(),
            session: id,
            session_key,
            op_base: record.last_op.0,
            kept: None,
        })
    }

    /// Writes the layer in a transaction, which is left to commit. Refused (ESTALE) if the session is not alive.
    pub fn write(&mut self, layer: &Layer, version: Version) -> Result<Transaction<'_>> {
        self.write_over(None, layer, version)
    }

    /// As `write`, but first every versioned key gets the value that it had at version `past`.
    pub fn write_restored(
        &mut self,
        past: Version,
        layer: &Layer,
        version: Version,
    ) -> Result<Transaction<'_>> {
        if past >= version || self.kept.as_ref().is_some_and(|kept| !kept.contains(&past)) {
            return Err(Error::invalid(format!("version {} cannot be restored: it is not kept", past.0)));
        }
        self.write_over(Some(past), layer, version)
    }

    fn write_over(
        &mut self,
        past: Option<Version>,
        layer: &Layer,
        version: Version,
    ) -> Result<Transaction<'_>> {
        let newest_kept = self.newest_kept(version);
        let mut rows =
            Rows { path: &self.path, version: sql_version(version)?, newest_kept, scratch: Vec::new() };
        let transaction = begin(&mut self.connection, &self.path)?;
        let Some(record) = alive(&transaction, &self.path, &self.session_key)? else {
            return Err(stale(self.session));
        };
        if let Some(past) = past {
            rows.restore(&transaction, sql_version(past)?)?;
        }
        rows.write_layer(&transaction, layer, (&self.session_key, record, self.op_base))?;
        Ok(transaction)
    }

    /// A transaction that removes rows which only `gone` needed, left to commit.
    pub fn clean(
        &mut self,
        gone: Version,
        current: Version,
        start: &[u8],
        limit: usize,
    ) -> Result<(Transaction<'_>, Cleaned)> {
        let Some(kept) = self.kept.as_ref().filter(|kept| !kept.contains(&gone)) else {
            return Err(Error::invalid(format!("version {} is kept: its rows cannot be removed", gone.0)));
        };
        let path = &self.path;
        let transaction = begin(&mut self.connection, path)?;
        if alive(&transaction, path, &self.session_key)?.is_none() {
            return Err(stale(self.session));
        }
        let cleaned = versions::clean(&transaction, path, (gone, kept, current), start, limit)?;
        Ok((transaction, cleaned))
    }

    pub fn keep(&mut self, kept: &Kept, current: Version) {
        let mut versions = kept.versions.clone();
        match &self.kept {
            Some(known) => versions.extend(known.iter().filter(|known| **known >= kept.since)),
            None => versions.extend((kept.since.0..current.0).map(Version)),
        }
        versions.sort_unstable();
        versions.dedup();
        self.kept = Some(versions);
    }

    /// A version that has just ended.
    fn add_kept(&mut self, version: Version) {
        if let Some(kept) = &mut self.kept {
            kept.push(version);
        }
    }

    /// Nobody reads what was written between it and `current`, both excluded, and overwritten since.
    fn newest_kept(&self, current: Version) -> i64 {
        let newest = match &self.kept {
            Some(kept) => kept.last().map_or(0, |newest| newest.0),
            None => current.0.saturating_sub(1),
        };
        i64::try_from(newest).unwrap_or(i64::MAX)
    }

    /// Marks the session as ended, durably, and empties the log.
    pub fn end(&mut self, last: u64) -> Result<()> {
        let path = &self.path;
        let transaction = begin(&mut self.connection, path)?;
        let Some(mut record) = alive(&transaction, path, &self.session_key)? else {
            return Err(stale(self.session));
        };
        record.state = SessionState::Ended;
        record.last_op = OpId(self.op_base + last);
        put(&transaction, path, &self.session_key, 0, &record.encode(), &mut Vec::new())?;
        transaction.commit().map_err(|cause| explain(path, "end the session", cause))?;
        if let Err(error) = checkpoint(&self.connection, path, "TRUNCATE") {
            // Nothing is lost: the next open reads the log.
            tracing::warn!(%error, "the metadata log stays beside its database");
        }
        Ok(())
    }

    pub fn log_is_long(&self) -> bool {
        // An error here is for the checkpoint to tell: the commit is durable.
        checkpoint(&self.connection, &self.path, "NOOP")
            .is_ok_and(|log| log.bytes_pending() >= CHECKPOINT_BYTES)
    }

    pub fn session_key(&self) -> &Key {
        &self.session_key
    }
}

#[cfg(test)]
impl Writer {
    pub fn pragma(&self, name: &str, value: i64) {
        // max_page_count answers with the value, others do not.
        self.connection.execute_batch(&format!("PRAGMA {name}={value}")).unwrap();
    }

    pub fn pragma_value(&self, name: &str) -> i64 {
        self.connection.pragma_query_value(None, name, |row| row.get(0)).unwrap()
    }
}

fn begin<'a>(connection: &'a mut Connection, path: &Path) -> Result<Transaction<'a>> {
    connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|cause| explain(path, "begin to write", cause))
}

fn stale(session: SessionId) -> Error {
    Error::errno(
        errno::ESTALE,
        format!("session {session} was declared dead: it may commit nothing more; open the volume again"),
    )
}

fn sql_version(version: Version) -> Result<i64> {
    i64::try_from(version.0).map_err(|_| Error::internal(format!("version {} is beyond 63 bits", version.0)))
}

fn stored(transaction: &Transaction<'_>, path: &Path, key: &[u8]) -> Result<Option<Vec<u8>>> {
    transaction
        .prepare_cached("SELECT value FROM kv WHERE key=?1 AND version=0")
        .and_then(|mut statement| statement.query_row((key,), |row| row.get(0)).optional())
        .map_err(|cause| explain(path, "read before writing", cause))
}

fn alive(transaction: &Transaction<'_>, path: &Path, session_key: &[u8]) -> Result<Option<Session>> {
    let Some(stored) = stored(transaction, path, session_key)? else { return Ok(None) };
    let record = Session::decode(verify(path, session_key, &stored)?)?;
    Ok((record.state == SessionState::Alive).then_some(record))
}

fn put(
    transaction: &Transaction<'_>,
    path: &Path,
    key: &[u8],
    version: i64,
    value: &[u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    protect(scratch, key, value);
    put_stored(transaction, path, key, version, &scratch[key.len()..])
}

/// Not REPLACE: that would write the row's entry in the index again.
fn put_stored(
    transaction: &Transaction<'_>,
    path: &Path,
    key: &[u8],
    version: i64,
    stored: &[u8],
) -> Result<()> {
    transaction
        .prepare_cached(
            "INSERT INTO kv VALUES(?1, ?2, ?3) ON CONFLICT(key, version) DO UPDATE SET value=excluded.value",
        )
        .and_then(|mut statement| statement.execute((key, version, stored)))
        .map_err(|cause| explain(path, "write", cause))?;
    Ok(())
}

/// How rows of the current version are written.
pub struct Rows<'a> {
    pub path: &'a Path,
    version: i64,
    newest_kept: i64,
    scratch: Vec<u8>,
}

impl Rows<'_> {
    /// With the session's key, its record, and its last op-id before its first commit here.
    fn write_layer(
        &mut self,
        transaction: &Transaction<'_>,
        layer: &Layer,
        (session_key, mut session, op_base): (&[u8], Session, u64),
    ) -> Result<()> {
        for (key, value) in layer.rows() {
            match value {
                _ if key::is_versioned(key) => self.set(transaction, key, value)?,
                Some(value) => put(transaction, self.path, key, 0, value, &mut self.scratch)?,
                None => delete(transaction, self.path, key, 0)?,
            }
        }
        // The layer itself may have changed or ended the session; that stays as it was committed.
        if let Some(own) = layer.find(session_key) {
            match own.map(Session::decode) {
                Some(Ok(own)) => session = own,
                _ => return Ok(()),
            }
        }
        session.last_op = OpId(op_base + layer.last);
        put(transaction, self.path, session_key, 0, &session.encode(), &mut self.scratch)
    }

    fn set(&mut self, transaction: &Transaction<'_>, key: &[u8], value: Option<&[u8]>) -> Result<()> {
        match value {
            Some(value) => {
                protect(&mut self.scratch, key, value);
                let stored = std::mem::take(&mut self.scratch);
                let written = self.set_stored(transaction, key, Some(&stored[key.len()..]));
                self.scratch = stored;
                written
            }
            None => self.set_stored(transaction, key, None),
        }
    }

    /// Gives a versioned key its newest value, as stored. What nobody can read after that goes at once: writes
    /// leave nothing to clean.
    pub fn set_stored(&self, transaction: &Transaction<'_>, key: &[u8], stored: Option<&[u8]>) -> Result<()> {
        if self.newest_kept + 1 < self.version {
            transaction
                .prepare_cached("DELETE FROM kv WHERE key=?1 AND version>?2 AND version<?3")
                .and_then(|mut statement| statement.execute((key, self.newest_kept, self.version)))
                .map_err(|cause| explain(self.path, "replace", cause))?;
        }
        match stored {
            Some(stored) => put_stored(transaction, self.path, key, self.version, stored),
            None => delete(transaction, self.path, key, self.version),
        }
    }

    pub fn version(&self) -> i64 {
        self.version
    }
}

fn delete(transaction: &Transaction<'_>, path: &Path, key: &[u8], version: i64) -> Result<()> {
    // Only a value of a frozen version below needs something to hide it. In version 1 there is none.
    let hides = version > 1
        && transaction
            .prepare_cached(
                "SELECT value IS NOT NULL FROM kv WHERE key=?1 AND version<?2 ORDER BY version DESC LIMIT 1",
            )
            .and_then(|mut statement| {
                statement.query_row((key, version), |row| row.get::<_, bool>(0)).optional()
            })
            .map_err(|cause| explain(path, "read before deleting", cause))?
            .unwrap_or(false);
    let sql = if hides {
        "INSERT INTO kv VALUES(?1, ?2, NULL) ON CONFLICT(key, version) DO UPDATE SET value=NULL"
    } else {
        "DELETE FROM kv WHERE key=?1 AND version=?2"
    };
    transaction
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute((key, version)))
        .map_err(|cause| explain(path, "delete", cause))?;
    Ok(())
}

/// How far the disk is, and who works on it.
#[derive(Debug, Default)]
pub struct Group {
    /// The last durable commit.
    durable: u64,
    leading: bool,
    /// Attempts begun so far.
    attempts: u64,
    /// The attempt that failed last, and why. Cleared by the next that succeeds.
    failure: Option<(u64, Failure)>,
}

/// An error that several are told.
#[derive(Clone, Debug)]
struct Failure {
    kind: Kind,
    errno: i32,
    message: String,
}

impl Failure {
    fn of(error: &Error) -> Failure {
        Failure { kind: error.kind(), errno: error.raw_errno(), message: error.message().to_owned() }
    }

    fn error(&self) -> Error {
        let error = Error::new(self.kind, self.message.clone());
        if error.raw_errno() == self.errno { error } else { Error::errno(self.errno, self.message.clone()) }
    }
}

/// Ends the lead even if the leader panics, so that the others do not wait for ever.
struct Lead<'a>(&'a Shared);

impl Lead<'_> {
    fn end<'a>(shared: &'a Shared, lead: Lead<'a>) -> MutexGuard<'a, Group> {
        std::mem::forget(lead);
        let mut group = lock(&shared.group);
        group.leading = false;
        shared.group_changed.notify_all();
        group
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        lock(&self.0.group).leading = false;
        self.0.group_changed.notify_all();
    }
}

impl Shared {
    /// Returns when the commit with this sequence is durable, and so all before it.
    pub fn flush_to(&self, sequence: u64) -> Result<()> {
        let mut group = lock(&self.group);
        let first_attempt = group.attempts + u64::from(!group.leading);
        loop {
            if group.durable >= sequence {
                return Ok(());
            }
            if let Some((attempt, failure)) = &group.failure
                && *attempt >= first_attempt
            {
                return Err(failure.error());
            }
            if group.leading {
                group = self.group_changed.wait(group).unwrap_or_else(|poison| poison.into_inner());
                continue;
            }
            group.leading = true;
            group.attempts += 1;
            let attempt = group.attempts;
            drop(group);
            let lead = Lead(self);
            let flushed = self.flush_layer();
            group = Lead::end(self, lead);
            match flushed {
                Ok(through) => {
                    group.durable = group.durable.max(through);
                    if group.failure.take().is_some() {
                        tracing::info!("metadata is written again");
                    }
                }
                Err(error) => {
                    if group.failure.is_none() {
                        self.report(&error);
                    }
                    group.failure = Some((attempt, Failure::of(&error)));
                    return Err(error);
                }
            }
        }
    }

    fn report(&self, error: &Error) {
        let commits = read(&self.overlay).pending_commits();
        if self.fenced.load(Ordering::Acquire) {
            tracing::error!(%error, commits, "commits of this session are lost");
        } else {
            tracing::error!(%error, commits, "metadata stays in memory until it can be written");
        }
    }

    /// Writes one layer; gives the last durable commit. Only a leader calls this.
    fn flush_layer(&self) -> Result<u64> {
        let (layer, version) = {
            let mut overlay = write(&self.overlay);
            match overlay.freeze() {
                Some(layer) => (layer, overlay.version),
                None => return Ok(overlay.committed),
            }
        };
        let mut writer = lock(&self.writer);
        let transaction = writer.write(&layer, version).inspect_err(|error| {
            if error.raw_errno() == errno::ESTALE {
                self.fenced.store(true, Ordering::Release);
            }
        })?;
        crash::point("meta.before_commit");
        transaction.commit().map_err(|cause| explain(&self.path, "commit", cause))?;
        crash::point("meta.after_commit");
        self.install(&layer, writer.session_key());
        let log_is_long = writer.log_is_long();
        drop(writer);
        if log_is_long {
            self.wake_flusher(true);
        }
        Ok(layer.last)
    }

    fn install(&self, layer: &Layer, session_key: &[u8]) {
        write(&self.overlay).generation += 1;
        // The layer still hides these rows of the cache from readers.
        self.fill_cache(layer, session_key);
        let gone = write(&self.overlay).flushing.take();
        // A large layer takes a while to free: not under the lock.
        drop(gone);
    }

    fn fill_cache(&self, layer: &Layer, session_key: &[u8]) {
        for (key, value) in layer.rows() {
            self.cache.put(key, value);
        }
        self.cache.remove(session_key);
    }

    /// Writes a seal's layer, which no reader has seen yet, and ends the version with it. No commit may be
    /// pending, and none may come meanwhile.
    pub fn flush_seal(&self, layer: &Layer) -> Result<Version> {
        let mut writer = lock(&self.writer);
        let version = read(&self.overlay).version;
        let transaction = writer.write(layer, version)?;
        crash::point("meta.before_seal");
        // Readers see all of the seal or nothing of it: they wait for this one fsync.
        let mut overlay = write(&self.overlay);
        transaction.commit().map_err(|cause| explain(&self.path, "commit a seal", cause))?;
        overlay.generation += 1;
        overlay.version = Version(version.0 + 1);
        overlay.committed = layer.last;
        self.fill_cache(layer, writer.session_key());
        drop(overlay);
        writer.add_kept(version);
        drop(writer);
        self.set_durable(layer.last);
        Ok(version)
    }

    pub fn set_durable(&self, sequence: u64) {
        let mut group = lock(&self.group);
        group.durable = group.durable.max(sequence);
    }

    /// Wakes the flusher: to look when the next flush is due, or (`at_once`) to flush now.
    pub fn wake_flusher(&self, at_once: bool) {
        // A flusher that waits for a deadline looks again by itself.
        if !self.armed.swap(true, Ordering::SeqCst) || at_once {
            let mut alarm = lock(&self.alarm);
            alarm.at_once |= at_once;
            self.alarm_changed.notify_one();
        }
    }

    /// Lets the flusher sleep until it is woken, if nothing is pending.
    fn disarm(&self) {
        if read(&self.overlay).pending_since().is_none() {
            self.armed.store(false, Ordering::SeqCst);
            // A commit that came before the store found it armed, and did not ring.
            if read(&self.overlay).pending_since().is_some() {
                self.armed.store(true, Ordering::SeqCst);
            }
        }
    }

    pub fn stop_flusher(&self) {
        lock(&self.alarm).stop = true;
        self.alarm_changed.notify_one();
    }
}

#[derive(Debug, Default)]
pub struct Alarm {
    stop: bool,
    at_once: bool,
}

/// The flusher's thread: once armed it looks after `FLUSH_AFTER`, and again until nothing is left to do.
pub fn run(shared: &Shared, checkpointer: &Connection) {
    let mut checkpoints_fail = false;
    loop {
        {
            let mut alarm = lock(&shared.alarm);
            while !alarm.stop && !shared.armed.load(Ordering::SeqCst) {
                alarm = shared.alarm_changed.wait(alarm).unwrap_or_else(|poison| poison.into_inner());
            }
        }
        let since = read(&shared.overlay).pending_since().unwrap_or_else(time::monotonic_now);
        if !shared.rest((since + FLUSH_AFTER).saturating_duration_since(time::monotonic_now())) {
            return;
        }
        // What is pending may be younger: others lead too.
        let (due, committed) = {
            let overlay = read(&shared.overlay);
            let old = |since| time::monotonic_now().saturating_duration_since(since) >= FLUSH_AFTER;
            let due = overlay.active.bytes() >= FLUSH_BYTES || overlay.pending_since().is_some_and(old);
            (due, overlay.committed)
        };
        // Its failure was reported where it happened.
        if due && shared.flush_to(committed).is_err() && !shared.rest(RETRY_AFTER) {
            return;
        }
        if shared.fenced.load(Ordering::Acquire) {
            return;
        }
        match shared.checkpoint_if_due(checkpointer) {
            Ok(()) => checkpoints_fail = false,
            Err(error) if !checkpoints_fail => {
                checkpoints_fail = true;
                tracing::warn!(%error, "the metadata log grows: it cannot be copied into its database");
            }
            Err(_) => {}
        }
        shared.disarm();
    }
}

impl Shared {
    /// Waits for so long or until woken at once. False: stop.
    fn rest(&self, how_long: Duration) -> bool {
        let deadline = time::monotonic_now() + how_long;
        let mut alarm = lock(&self.alarm);
        loop {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if alarm.stop {
                return false;
            }
            if std::mem::take(&mut alarm.at_once) || left.is_zero() {
                return true;
            }
            alarm = self.alarm_changed.wait_timeout(alarm, left).unwrap_or_else(|p| p.into_inner()).0;
        }
    }

    fn checkpoint_if_due(&self, checkpointer: &Connection) -> Result<()> {
        let log = checkpoint(checkpointer, &self.path, "NOOP")?;
        if log.bytes_pending() < CHECKPOINT_BYTES {
            return Ok(());
        }
        let log = checkpoint(checkpointer, &self.path, "PASSIVE")?;
        if log.bytes_pending() > 0 && log.bytes() >= LOG_BYTES_MAX {
            let _no_writes = lock(&self.writer);
            checkpoint(checkpointer, &self.path, "PASSIVE")?;
        }
        Ok(())
    }
}

/// What is in the log, in pages.
#[derive(Clone, Copy, Debug)]
struct Log {
    pages: i64,
    copied: i64,
}

impl Log {
    fn bytes(self) -> u64 {
        self.pages.max(0) as u64 * PAGE_BYTES as u64
    }

    fn bytes_pending(self) -> u64 {
        (self.pages - self.copied).max(0) as u64 * PAGE_BYTES as u64
    }
}

fn checkpoint(connection: &Connection, path: &Path, mode: &str) -> Result<Log> {
    connection
        .prepare_cached(&format!("PRAGMA wal_checkpoint({mode})"))
        .and_then(|mut statement| {
            statement.query_row((), |row| Ok(Log { pages: row.get(1)?, copied: row.get(2)? }))
        })
        .map_err(|cause| explain(path, "checkpoint", cause))
}
