//! Files that are not as they should be: a clear error that names the file, and nothing changed.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "suite/given.rs"]
mod given;

use std::path::{Path, PathBuf};

use given::put;
use headrace_base::ids::VolumeId;
use headrace_base::{Error, Kind, time};
use headrace_format::key;
use headrace_format::record::{SessionState, VolumeRecord};
use headrace_meta::{At, Commit, Durability, MetaStore, SqliteStore};

fn volume() -> VolumeRecord {
    VolumeRecord { volume: VolumeId::generate(), format: 1, created: time::wall_now() }
}

fn created(folder: &Path) -> PathBuf {
    let path = folder.join("volume.sqlite");
    SqliteStore::create(&path, volume()).unwrap();
    path
}

fn open(path: &Path) -> Result<SqliteStore, Error> {
    let (id, record) = given::session();
    SqliteStore::open(path, id, record)
}

fn refused(path: &Path, kind: Kind, words: &[&str]) {
    let before = std::fs::read(path).ok();
    let error = open(path).unwrap_err();
    assert_eq!(error.kind(), kind, "{error:?}");
    for word in words.iter().chain(&["volume.sqlite"]) {
        assert!(error.message().contains(word), "{word:?} is not in: {error}");
    }
    assert_eq!(std::fs::read(path).ok(), before, "the file was changed");
}

#[test]
fn a_new_database_holds_the_volume_record_and_version_1() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume.sqlite");
    let record = volume();
    SqliteStore::create(&path, record.clone()).unwrap();
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["volume.sqlite"]);
    let store = open(&path).unwrap();
    assert_eq!(store.get(&key::volume(), At::Latest).unwrap(), Some(record.encode()));
    assert_eq!(store.version(), headrace_base::Version(1));
}

#[test]
fn creating_over_a_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    let before = std::fs::read(&path).unwrap();
    let error = SqliteStore::create(&path, volume()).unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict, "{error:?}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let error = SqliteStore::create(&folder.path().join("no/volume.sqlite"), volume()).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound, "{error:?}");
}

#[test]
fn a_missing_file_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume.sqlite");
    refused(&path, Kind::NotFound, &["moved or deleted"]);
    assert!(!path.exists());
}

#[test]
fn what_is_no_database_of_ours_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume.sqlite");
    std::fs::write(&path, b"").unwrap();
    refused(&path, Kind::Corrupt, &["not a metadata database of Headrace"]);
    std::fs::write(&path, vec![b'x'; 10_000]).unwrap();
    refused(&path, Kind::Corrupt, &["not a database", "backup"]);
    std::fs::remove_file(&path).unwrap();
    rusqlite::Connection::open(&path).unwrap().execute_batch("CREATE TABLE kv(key, version, value)").unwrap();
    refused(&path, Kind::Corrupt, &["not a metadata database of Headrace"]);
}

#[test]
fn a_newer_format_names_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    rusqlite::Connection::open(&path).unwrap().execute_batch("PRAGMA user_version=3").unwrap();
    refused(&path, Kind::Invalid, &["holds format 3", "reads 1-1", "upgrade headrace"]);
}

#[test]
fn a_truncated_or_overwritten_file_is_corrupt() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    let store = open(&path).unwrap();
    let rows =
        (0..2_000_u32).map(|number| put(&[b"i".as_slice(), &number.to_be_bytes()].concat(), &[7; 100]));
    store.commit(Commit { preconditions: Vec::new(), writes: rows.collect() }, Durability::Durable).unwrap();
    store.close().unwrap();
    drop(store);
    let whole = std::fs::read(&path).unwrap();
    assert!(whole.len() > 200_000);
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    refused(&path, Kind::Corrupt, &["backup"]);
    let mut headless = whole.clone();
    headless[..100].fill(0);
    std::fs::write(&path, headless).unwrap();
    refused(&path, Kind::Corrupt, &["backup"]);
    // A page of rows: found when it is read, not at start.
    let mut holed = whole.clone();
    let page = whole.len() * 3 / 4 / 4_096 * 4_096;
    holed[page..page + 4_096].fill(0);
    std::fs::write(&path, holed).unwrap();
    let store = open(&path).unwrap();
    let error = store.scan(b"i", b"j", usize::MAX, At::Latest).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error:?}");
}

#[test]
fn a_flipped_byte_is_never_returned() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    let store = open(&path).unwrap();
    let needle = b"a value that can be found in the file";
    store
        .commit(
            Commit { preconditions: Vec::new(), writes: vec![put(b"ia", needle), put(b"ib", b"whole")] },
            Durability::Durable,
        )
        .unwrap();
    store.close().unwrap();
    drop(store);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(needle.len()).position(|window| window == needle).unwrap();
    bytes[at + 5] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let store = open(&path).unwrap();
    let errors = [
        store.get(b"ia", At::Latest).unwrap_err(),
        store.get_many(&[b"ib".to_vec(), b"ia".to_vec()], At::Latest).unwrap_err(),
        store.scan(b"i", b"j", 10, At::Latest).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), Kind::Corrupt, "{error:?}");
        assert!(error.message().contains("\"ia\"") && error.message().contains("volume.sqlite"), "{error}");
    }
    assert_eq!(store.get(b"ib", At::Latest).unwrap(), Some(b"whole".to_vec()));
}

#[test]
fn a_session_opens_once_and_alive() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    let (id, mut record) = given::session();
    let store = SqliteStore::open(&path, id, record.clone()).unwrap();
    assert_eq!(store.session(), id);
    drop(store);
    let error = SqliteStore::open(&path, id, record.clone()).unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict, "{error:?}");
    record.state = SessionState::Dead;
    let error = SqliteStore::open(&path, given::session().0, record).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error:?}");
    // The first session's row was written before any commit of it.
    assert!(open(&path).unwrap().get(&key::session(id), At::Latest).unwrap().is_some());
}

#[test]
fn an_unwritable_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = created(folder.path());
    let mut permissions = std::fs::metadata(&path).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&path, permissions).unwrap();
    if std::fs::OpenOptions::new().write(true).open(&path).is_ok() {
        // Root may write all the same; then it opens.
        open(&path).unwrap();
    } else {
        refused(&path, Kind::Permission, &[]);
    }
}
