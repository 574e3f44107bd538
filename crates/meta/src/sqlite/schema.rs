//! The database file: how it is made, opened and checked, and what a row looks like.
//!
//! ```text
//! kv(key BLOB, version INTEGER, value BLOB, PRIMARY KEY(key, version)) WITHOUT ROWID
//! version   the volume version at which the value was written; 0 for keys that have one value (upper case)
//! value     bytes | u32 crc32c of key and bytes, little-endian; NULL: deleted at this version
//! kv_written(version, key)   an index of the rows above version 1: what was written since a snapshot
//! ```
//! The store's own key `C` holds the version that writes go to now (a number, see `record`).
//!
//! A new file gets its rows in one transaction, and its name is made durable before `create` returns.
//! `application_id` and `user_version` are looked at before anything else of a file is believed. Opening never
//! reads the whole file: a damaged page is found when it is read, a damaged value by its checksum.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use headrace_base::checksum::Crc32c;
use headrace_base::error::errno;
use headrace_base::{Error, Kind, Result, Version, crc32c};
use headrace_format::key;
use headrace_format::record::{VolumeRecord, decode_number, encode_number};
use rusqlite::config::DbConfig;
use rusqlite::ffi::SQLITE_IOERR_SHMSIZE;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension};

use crate::store::Value;

/// "Head", so that `file(1)` and a person with a hex dump can tell what this is.
const APPLICATION_ID: i32 = 0x4865_6164;
/// The layout of the table and of its rows.
const FORMAT: i32 = 1;

/// The version that writes go to now. Written by the store alone.
pub const VERSION_KEY: &[u8] = b"C";

/// Rows of version 1 are left out: until the first snapshot the index costs nothing, and nothing asks for them.
/// Databases that lack it (made before there were snapshots) get it when they are opened.
const INDEX: &str = "CREATE INDEX IF NOT EXISTS kv_written ON kv(version) WHERE version>1";

/// What a committed row costs in the write-ahead log is whole pages, so a small page makes a small fsync.
pub const PAGE_BYTES: usize = 4096;

const CHECKSUM_BYTES: usize = 4;
/// Nobody else opens the file, so waits are for recovery and checkpoints only.
const BUSY_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Writer,
    Reader,
    Checkpointer,
}

impl Role {
    /// Pages that SQLite keeps for the connection. A reader's are dropped at every flush, so few are enough.
    fn cache_kib(self) -> u32 {
        match self {
            Role::Writer => 16 << 10,
            Role::Reader => 2 << 10,
            Role::Checkpointer => 256,
        }
    }
}

/// Makes the database of a new volume. The file must not be there yet.
pub fn create(path: &Path, volume: &VolumeRecord) -> Result<()> {
    let doing = || format!("create metadata database {}", path.display());
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|cause| {
        if cause.kind() == std::io::ErrorKind::AlreadyExists {
            Error::errno(errno::EEXIST, format!("{}: there is one already", doing())).with_cause(cause)
        } else {
            Error::io(doing(), cause)
        }
    })?;
    let made = fill(path, volume).and_then(|()| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|cause| Error::io(format_args!("make {} durable", folder.display()), cause))
    });
    if made.is_err() {
        // Half a database would stand in the way of the next attempt. The first error is the one to tell.
        for tail in ["", "-wal", "-shm"] {
            let mut name = path.as_os_str().to_owned();
            name.push(tail);
            let _ = std::fs::remove_file(name);
        }
    }
    made
}

fn fill(path: &Path, volume: &VolumeRecord) -> Result<()> {
    let explain = |cause| explain(path, "create", cause);
    let mut connection = Connection::open_with_flags(path, flags()).map_err(explain)?;
    connection
        .execute_batch(&format!(
            "PRAGMA page_size={PAGE_BYTES};
             PRAGMA synchronous=FULL;
             PRAGMA journal_mode=WAL;"
        ))
        .map_err(explain)?;
    let transaction = connection.transaction().map_err(explain)?;
    transaction
        .execute_batch(&format!(
            "PRAGMA application_id={APPLICATION_ID};
             PRAGMA user_version={FORMAT};
             CREATE TABLE kv(key BLOB NOT NULL, version INTEGER NOT NULL, value BLOB,
                             PRIMARY KEY(key, version)) WITHOUT ROWID;
             {INDEX};"
        ))
        .map_err(explain)?;
    let mut stored = Vec::new();
    let rows = [(key::volume(), volume.encode()), (VERSION_KEY.to_vec(), encode_number(1))];
    for (key, value) in rows {
        protect(&mut stored, &key, &value);
        transaction
            .execute("INSERT INTO kv VALUES(?1, 0, ?2)", (&key, &stored[key.len()..]))
            .map_err(explain)?;
    }
    transaction.commit().map_err(explain)?;
    // Closing checkpoints the log into the file and removes it.
    connection.close().map_err(|(_, cause)| explain(cause))
}

fn flags() -> OpenFlags {
    // NO_MUTEX: a connection belongs to one thread at a time (`Connection` is not Sync).
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

/// Opens one more connection to a database that was checked.
pub fn connect(path: &Path, role: Role) -> Result<Connection> {
    let explain = |cause| explain(path, "open", cause);
    let connection = Connection::open_with_flags(path, flags()).map_err(explain)?;
    connection.busy_timeout(BUSY_PATIENCE).map_err(explain)?;
    // Checkpoints are the flusher's: within a commit they would stall an fsync.
    connection
        .execute_batch(&format!(
            "PRAGMA cache_size=-{};
             PRAGMA synchronous=FULL;
             PRAGMA wal_autocheckpoint=0;
             PRAGMA journal_size_limit={};
             PRAGMA mmap_size=0;
             PRAGMA temp_store=MEMORY;
             PRAGMA cell_size_check=ON;
             PRAGMA query_only={};",
            role.cache_kib(),
            super::flush::LOG_BYTES_KEPT,
            if role == Role::Reader { "ON" } else { "OFF" },
        ))
        .map_err(explain)?;
    // Else a statement whose bound range has changed is planned anew, each time: twice the cost of a get.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(explain)?;
    connection.set_prepared_statement_cache_capacity(16);
    Ok(connection)
}

/// Opens the writing connection and checks that the file is what it should be. Gives the current version.
pub fn open(path: &Path) -> Result<(Connection, Version)> {
    // SQLite says the same of a missing file and of one that may not be opened.
    OpenOptions::new().read(true).write(true).open(path).map_err(|cause| {
        let hint = match cause.kind() {
            std::io::ErrorKind::NotFound => ": it was moved or deleted; without it the volume has no names",
            _ => "",
        };
        Error::io(format_args!("open metadata database {}{hint}", path.display()), cause)
    })?;
    let connection = connect(path, Role::Writer)?;
    let explain = |cause| explain(path, "open", cause);
    let pragma =
        |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0)).map_err(explain);
    let application_id = pragma("application_id")?;
    let format = pragma("user_version")?;
    if application_id != APPLICATION_ID {
        return Err(damaged(
            path,
            format_args!("it is not a metadata database of Headrace (application id {application_id:#x})"),
        ));
    }
    if format > FORMAT {
        return Err(Error::invalid(format!(
            "metadata database {} holds format {format}; this engine reads 1-{FORMAT}: upgrade headrace",
            path.display()
        )));
    }
    if format < 1 {
        return Err(damaged(path, format_args!("it says that it holds format {format}")));
    }
    let mode: String =
        connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).map_err(explain)?;
    if mode != "wal" {
        return Err(damaged(path, format_args!("its journal mode is {mode}, not wal")));
    }
    let table: Option<i32> = connection
        .query_row("SELECT 1 FROM sqlite_schema WHERE type='table' AND name='kv'", (), |row| row.get(0))
        .optional()
        .map_err(explain)?;
    if table.is_none() {
        return Err(damaged(path, format_args!("it has no table kv")));
    }
    connection.execute_batch(INDEX).map_err(explain)?;
    let stored: Option<Vec<u8>> = connection
        .query_row("SELECT value FROM kv WHERE key=?1 AND version=0", (VERSION_KEY,), |row| row.get(0))
        .optional()
        .map_err(explain)?;
    let Some(stored) = stored else {
        return Err(damaged(path, format_args!("it does not say which version it is at (key C)")));
    };
    let version = decode_number(verify(path, VERSION_KEY, &stored)?)
        .map_err(|error| error.context(format_args!("metadata database {}, key C", path.display())))?;
    Ok((connection, Version(version)))
}

/// Appends to nothing: `out` becomes key, value and checksum. What follows the key is what the row stores.
pub fn protect(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    out.clear();
    out.reserve(key.len() + value.len() + CHECKSUM_BYTES);
    out.extend_from_slice(key);
    out.extend_from_slice(value);
    let checksum = crc32c(out);
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// The value in a stored row, checked.
pub fn verify<'a>(path: &Path, key: &[u8], stored: &'a [u8]) -> Result<&'a [u8]> {
    if let Some((value, checksum)) = stored.split_last_chunk::<CHECKSUM_BYTES>() {
        let mut actual = Crc32c::default();
        actual.update(key);
        actual.update(value);
        if actual.value() == u32::from_le_bytes(*checksum) {
            return Ok(value);
        }
    }
    Err(damaged(
        path,
        format_args!("the value of key \"{}\" ({} bytes) is not what was written", show(key), stored.len()),
    ))
}

/// As `verify`, for a column that may be NULL.
pub fn verify_row(path: &Path, key: &[u8], stored: Option<&[u8]>) -> Result<Option<Value>> {
    stored.map(|stored| verify(path, key, stored).map(<[u8]>::to_vec)).transpose()
}

pub fn show(key: &[u8]) -> impl std::fmt::Display + '_ {
    key.escape_ascii()
}

pub fn damaged(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::corrupt(format!(
        "metadata database {} is damaged: {why}. Stop the engine, keep a copy of the volume's folder, and \
         restore this file (with its -wal) from a backup",
        path.display()
    ))
}

/// What SQLite's error means for the caller.
pub fn explain(path: &Path, doing: &str, cause: rusqlite::Error) -> Error {
    let place = format!("metadata database {}: {doing}", path.display());
    // The index beside the log could not grow: what a full disk says there.
    let index_is_full = cause.sqlite_error().is_some_and(|error| error.extended_code == SQLITE_IOERR_SHMSIZE);
    let error = match cause.sqlite_error_code() {
        // Not SQLite but its binding says this: a column holds another type than was written.
        None => damaged(path, format_args!("{doing}: {cause}")),
        // Some of its writes report a full disk as any other failed write.
        Some(ErrorCode::SystemIoFailure) if disk_is_full(path) => {
            Error::new(Kind::Full, format!("{place}: {cause}: the disk is full: free space on it"))
        }
        _ if index_is_full => Error::new(Kind::Full, format!("{place}: {cause}: free space on its disk")),
        Some(ErrorCode::DiskFull) => {
            Error::new(Kind::Full, format!("{place}: the disk is full: free space on it"))
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            damaged(path, format_args!("{doing}: {cause}"))
        }
        Some(ErrorCode::PermissionDenied | ErrorCode::ReadOnly | ErrorCode::CannotOpen) => Error::new(
            Kind::Permission,
            format!("{place}: {cause}: the file, its -wal and -shm and their folder must be writable"),
        ),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            Error::new(Kind::Unavailable, format!("{place}: {cause}: another program has the file open"))
        }
        Some(ErrorCode::OutOfMemory) => Error::errno(errno::ENOMEM, format!("{place}: {cause}")),
        _ => Error::internal(format!("{place}: {cause}")),
    };
    error.with_cause(cause)
}

/// Less is free than one transaction takes.
fn disk_is_full(path: &Path) -> bool {
    path.parent()
        .and_then(|folder| rustix::fs::statvfs(folder).ok())
        .is_some_and(|disk| disk.f_bavail * disk.f_frsize < 16 * PAGE_BYTES as u64)
}
