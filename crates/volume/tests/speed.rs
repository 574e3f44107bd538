//! How fast the volume is without a kernel between: `cargo test --release -p headrace-volume --test speed --
//! --ignored --nocapture`. Prints; promises nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::sync::Arc;

use headrace_base::{Ino, time};
use headrace_volume::{FileKind, Identity, NewInode, OpenMode, Origin, Volume, VolumeOptions};

const FILES: usize = 20_000;
const BYTES: usize = 10 << 10;

fn report(what: &str, count: usize, since: std::time::Instant) {
    let seconds = since.elapsed().as_secs_f64();
    println!("{what}: {:.0}/s ({:.1} us each)", count as f64 / seconds, seconds * 1e6 / count as f64);
}

#[test]
#[ignore = "a measurement"]
fn small_files() {
    let folder = tempfile::tempdir_in(std::env::var("SPEED_DIR").unwrap_or_else(|_| ".".into())).unwrap();
    let path = folder.path().join("v");
    Volume::create(&path).unwrap();
    let options = VolumeOptions { memory_bytes_max: 256 << 20, open_files_max: 256 };
    let volume = Volume::open(&path, options.clone()).unwrap();
    let bytes = vec![7; BYTES];
    let new = || NewInode { kind: FileKind::File, mode: 0o644, uid: 0, gid: 0, rdev: 0, target: vec![] };
    let started = time::monotonic_now();
    let mut inodes = Vec::new();
    for index in 0..FILES {
        let name = format!("file-{index:06}");
        let (attr, file) =
            volume.create_file(Origin::SOCKET, Ino::ROOT, name.as_bytes(), new(), OpenMode::WRITE).unwrap();
        file.write(0, &bytes).unwrap();
        inodes.push(attr.ino);
    }
    report("create", FILES, started);
    volume.sync().unwrap();
    report("create + sync", FILES, started);
    let read_all = |volume: &Arc<Volume>, what: &str| {
        let started = time::monotonic_now();
        let mut out = vec![0; BYTES];
        for index in 0..FILES {
            let at = index * 7919 % FILES;
            let file = volume.open_file(Origin::SOCKET, inodes[at], OpenMode::READ).unwrap();
            assert_eq!(file.read(0, &mut out).unwrap(), BYTES);
        }
        report(what, FILES, started);
    };
    read_all(&volume, "read in process");
    let started = time::monotonic_now();
    for index in 0..FILES {
        volume.lookup(Ino::ROOT, format!("file-{index:06}").as_bytes()).unwrap();
    }
    report("lookup", FILES, started);
    volume.close().unwrap();
    drop(volume);
    let volume = Volume::open(&path, options.clone()).unwrap();
    read_all(&volume, "read after reopen");
    let root = Identity { uid: 0, gid: 0, groups: vec![] };
    let started = time::monotonic_now();
    let view = volume.seal(&root, b"/").unwrap();
    report("seal, per file", FILES, started);
    let started = time::monotonic_now();
    let mut out = vec![0; BYTES];
    for index in 0..FILES {
        view.read_sample((index * 7919 % FILES) as u64, &mut out).unwrap();
    }
    report("sealed read", FILES, started);
    let started = time::monotonic_now();
    for index in 0..FILES {
        volume.unlink(Origin::SOCKET, Ino::ROOT, format!("file-{index:06}").as_bytes()).unwrap();
    }
    report("unlink", FILES, started);
    let started = time::monotonic_now();
    for index in 0..2000 {
        let name = format!("sync-{index:06}");
        let (_, file) =
            volume.create_file(Origin::SOCKET, Ino::ROOT, name.as_bytes(), new(), OpenMode::WRITE).unwrap();
        file.write(0, &bytes).unwrap();
        file.fsync().unwrap();
    }
    report("create + fsync each", 2000, started);
}
