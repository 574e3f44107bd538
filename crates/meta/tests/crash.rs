//! What kill -9 and a cut log leave: always a prefix of the commits, with all that was acknowledged.
//!
//! A child process (this test program, `child`) commits one numbered commit after the other and prints the
//! number of each that was acknowledged as durable. It is killed, and the files it leaves are looked at.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "suite/given.rs"]
mod given;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use given::{delete, put};
use headrace_base::ids::VolumeId;
use headrace_base::{random, time};
use headrace_format::key;
use headrace_format::record::VolumeRecord;
use headrace_meta::{At, Commit, Durability, MetaStore, Precondition, SqliteStore};

const DATABASE: &str = "HEADRACE_TEST_DATABASE";
const COUNT: &[u8] = b"Ycount";
/// Commit n deletes what commit n - KEPT wrote.
const KEPT: u64 = 10;
const SEAL_EVERY: u64 = 50;

fn name(letter: u8, number: u64) -> Vec<u8> {
    [&[letter][..], &number.to_be_bytes()].concat()
}

fn count(store: &dyn MetaStore) -> u64 {
    let value = store.get(COUNT, At::Latest).unwrap();
    value.map_or(0, |value| u64::from_be_bytes(value.try_into().unwrap()))
}

fn open(path: &Path) -> SqliteStore {
    let (id, record) = given::session();
    SqliteStore::open(path, id, record).unwrap()
}

#[test]
#[ignore = "the process that the other tests start and kill"]
fn child() {
    let store = open(&PathBuf::from(std::env::var_os(DATABASE).unwrap()));
    let mut done = count(&store);
    loop {
        if done.is_multiple_of(SEAL_EVERY) && store.version().0 - 1 < done / SEAL_EVERY {
            store.seal(Commit::default()).unwrap();
            println!("durable {done}");
        }
        let number = done + 1;
        let before = match done {
            0 => Precondition::Absent(COUNT.to_vec()),
            _ => Precondition::Equals(COUNT.to_vec(), done.to_be_bytes().to_vec()),
        };
        let writes = vec![
            put(COUNT, &number.to_be_bytes()),
            put(&name(b'i', number), &vec![number as u8; (number % 900) as usize]),
            put(&name(b'e', number), b"entry"),
            delete(&name(b'i', number.saturating_sub(KEPT))),
        ];
        let durable = number.is_multiple_of(7);
        let durability = if durable { Durability::Durable } else { Durability::Relaxed };
        store.commit(Commit { preconditions: vec![before], writes }, durability).unwrap();
        done = number;
        if durable {
            println!("durable {done}");
        }
    }
}

/// Runs the child until it is killed: by us after so long, or by itself at a crash point. Gives the last number
/// that it acknowledged.
fn run_child(path: &Path, kill_after: Option<Duration>, crash_at: Option<&str>) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]);
    command.env(DATABASE, path).stdout(Stdio::piped());
    if let Some(point) = crash_at {
        command.env("HEADRACE_CRASH_AT", point).stderr(Stdio::null());
    }
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let number = |line: String| line.split_once("durable ").map(|(_, number)| number.parse::<u64>().unwrap());
    let mut last = 0;
    if let Some(kill_after) = kill_after {
        last = lines.by_ref().find_map(|line| number(line.unwrap())).expect("the child starts");
        time::sleep(kill_after);
        child.kill().unwrap();
    }
    last = lines.filter_map(|line| number(line.ok()?)).last().unwrap_or(last);
    let ended = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(9), "{ended:?}");
    last
}

/// Fails unless what is there is exactly the first n commits, for some n, which it gives.
fn check_prefix(path: &Path) -> u64 {
    let store = open(path);
    let count = count(&store);
    let numbers = |letter: u8| -> Vec<u64> {
        let rows = store.scan(&[letter], &[letter + 1], usize::MAX, At::Latest).unwrap();
        rows.iter().map(|(key, _)| u64::from_be_bytes(key[1..].try_into().unwrap())).collect()
    };
    assert_eq!(numbers(b'e'), (1..=count).collect::<Vec<_>>());
    assert_eq!(numbers(b'i'), (1..=count).skip(count.saturating_sub(KEPT) as usize).collect::<Vec<_>>());
    for number in count.saturating_sub(KEPT) + 1..=count {
        let value = store.get(&name(b'i', number), At::Latest).unwrap().unwrap();
        assert_eq!(value, vec![number as u8; (number % 900) as usize]);
    }
    let seals = store.version().0 - 1;
    let last_seal_is_missing =
        count > 0 && count.is_multiple_of(SEAL_EVERY) && seals + 1 == count / SEAL_EVERY;
    assert!(seals == count / SEAL_EVERY || last_seal_is_missing, "{seals} seals after {count} commits");
    if seals > 0 {
        let sealed = At::Version(headrace_base::Version(seals));
        assert_eq!(store.scan(b"e", b"f", usize::MAX, sealed).unwrap().len() as u64, seals * SEAL_EVERY);
    }
    let volume = store.get(&key::volume(), At::Latest).unwrap().unwrap();
    VolumeRecord::decode(&volume).unwrap();
    count
}

fn create(folder: &Path) -> PathBuf {
    let path = folder.join("volume.sqlite");
    let volume = VolumeRecord { volume: VolumeId::generate(), format: 1, created: time::wall_now() };
    SqliteStore::create(&path, volume).unwrap();
    path
}

#[test]
fn kill_at_any_moment_leaves_a_prefix_with_all_that_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let path = create(folder.path());
    let mut before = 0;
    for round in 0..15 {
        let acknowledged = run_child(&path, Some(Duration::from_micros(random::u64() % 120_000)), None);
        let count = check_prefix(&path);
        assert!(count >= acknowledged && acknowledged > before, "round {round}: {count} of {acknowledged}");
        before = count;
    }
}

#[test]
fn a_crash_around_the_commit_leaves_a_prefix_with_all_that_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let path = create(folder.path());
    for point in ["meta.before_commit", "meta.after_commit", "meta.before_seal"] {
        for passes in [1, 2, 5] {
            let acknowledged = run_child(&path, None, Some(&format!("{point}:{passes}")));
            let count = check_prefix(&path);
            assert!(count >= acknowledged, "{point}:{passes}: {count} of {acknowledged}");
        }
    }
}

#[test]
fn a_log_that_ends_anywhere_is_a_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let path = create(folder.path());
    // Each run goes on in the log that the one before left.
    let log = loop {
        run_child(&path, Some(Duration::from_millis(60)), None);
        let log = std::fs::read(folder.path().join("volume.sqlite-wal")).unwrap();
        if log.len() > 200_000 {
            break log;
        }
    };
    let mut counts = Vec::new();
    for part in 0..25 {
        let copy = tempfile::tempdir().unwrap();
        let copied = copy.path().join("volume.sqlite");
        std::fs::copy(&path, &copied).unwrap();
        // What a power failure may leave of an unfinished write: too short, or with garbage at the end.
        let cut = log.len() * part / 25 + part * 7;
        let mut left = log[..cut].to_vec();
        if part % 2 == 1 {
            left.resize(log.len(), 0xA5);
        }
        std::fs::write(copy.path().join("volume.sqlite-wal"), left).unwrap();
        counts.push(check_prefix(&copied));
    }
    assert!(counts.is_sorted() && counts[0] < counts[24], "{counts:?}");
}
