//! Measurements, not promises: `cargo test --release -p headrace-meta --test speed -- --ignored --nocapture`.
//! The database lies in TMPDIR: point that at the disk to be measured.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "suite/given.rs"]
mod given;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use given::put;
use headrace_base::ids::VolumeId;
use headrace_base::{Ino, time};
use headrace_format::key;
use headrace_format::record::{Dentry, FileKind, VolumeRecord};
use headrace_meta::{At, Commit, Durability, MetaStore, Precondition, SqliteStore};

const DIRECTORY: Ino = Ino(1);

/// What creating a small file commits: inode, name, the directory's delta.
fn creation(number: u64) -> Commit {
    let ino = Ino(100 + number);
    // Names as imports have them: not in the order of their numbers.
    let name = format!("image-{:016x}.jpg", number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let entry = key::dentry(DIRECTORY, name.as_bytes());
    Commit {
        preconditions: vec![
            Precondition::Present(key::alive(DIRECTORY)),
            Precondition::Absent(entry.clone()),
        ],
        writes: vec![
            put(&key::inode(ino), &[number as u8; 65]),
            put(&entry, &Dentry { ino, kind: FileKind::File }.encode()),
            put(&key::delta(DIRECTORY, 1), &number.to_be_bytes()),
        ],
    }
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

fn report(what: &str, count: u64, since: std::time::Instant) {
    let elapsed = time::monotonic_now() - since;
    let each = elapsed.as_nanos() as f64 / 1e3 / count as f64;
    println!(
        "{what:<44} {:>10.0} /s {each:>9.2} us each; {} MiB resident",
        count as f64 / elapsed.as_secs_f64(),
        resident_mib()
    );
}

fn open(path: &std::path::Path) -> SqliteStore {
    let (id, record) = given::session();
    SqliteStore::open(path, id, record).unwrap()
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume.sqlite");
    let volume = VolumeRecord { volume: VolumeId::generate(), format: 1, created: time::wall_now() };
    SqliteStore::create(&path, volume).unwrap();
    let store = open(&path);
    given::write(&store, vec![put(&key::alive(DIRECTORY), b"")]);
    let files = 300_000;

    let start = time::monotonic_now();
    for number in 0..files {
        store.commit(creation(number), Durability::Relaxed).unwrap();
    }
    report("relaxed creations, 1 thread", files, start);
    store.sync().unwrap();
    report("  the same and a sync", files, start);

    for threads in [1_u64, 8] {
        let next = AtomicU64::new(files + threads * 10_000_000);
        let start = time::monotonic_now();
        let until = start + Duration::from_secs(3);
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while time::monotonic_now() < until {
                        store
                            .commit(creation(next.fetch_add(1, Ordering::Relaxed)), Durability::Durable)
                            .unwrap();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        report(&format!("durable creations, {threads} threads"), done.into_inner(), start);
    }

    let start = time::monotonic_now();
    for _ in 0..1_000 {
        store.sync().unwrap();
    }
    report("syncs with nothing to do", 1_000, start);
    store.close().unwrap();
    drop(store);

    let store = open(&path);
    let get = |number: u64| {
        assert!(store.get(&key::inode(Ino(100 + number)), At::Latest).unwrap().is_some());
    };
    let scattered = |step: u64| step * 7_919 % files;
    let start = time::monotonic_now();
    (0..50_000).for_each(|step| get(scattered(step)));
    report("gets, from the database, scattered", 50_000, start);
    let start = time::monotonic_now();
    (100_000..150_000).for_each(get);
    report("gets, from the database, in order", 50_000, start);
    let start = time::monotonic_now();
    (0..1_000_000).for_each(|step| get(100_000 + step % 50_000));
    report("gets, cached", 1_000_000, start);
    let start = time::monotonic_now();
    for step in 0..50_000_u64 {
        assert!(store.get(&key::dentry(DIRECTORY, &step.to_be_bytes()), At::Latest).unwrap().is_none());
    }
    report("gets of what is not there, database", 50_000, start);
    let start = time::monotonic_now();
    for batch in 0..1_000 {
        let keys: Vec<_> =
            (0..256).map(|place| key::inode(Ino(100 + scattered(batch * 256 + place)))).collect();
        assert!(store.get_many(&keys, At::Latest).unwrap().iter().all(Option::is_some));
    }
    report("get_many of 256, scattered, a key", 256_000, start);
    let start = time::monotonic_now();
    let names = key::dentries(DIRECTORY);
    let found = store.scan(&names, &key::end_of(&names), usize::MAX, At::Latest).unwrap().len() as u64;
    assert!(found >= files);
    report("scan of the directory, a name", found, start);
    let start = time::monotonic_now();
    for step in 0..20_000 {
        let prefix = key::all_xattrs(Ino(100 + step));
        assert!(store.scan(&prefix, &key::end_of(&prefix), usize::MAX, At::Latest).unwrap().is_empty());
    }
    report("scans that find nothing", 20_000, start);
    let size = std::fs::metadata(&path).unwrap().len();
    println!("database {} MiB, {} bytes a file", size >> 20, size / found);
}
