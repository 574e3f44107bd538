//! Snapshots on a real store and real segments: what they hold, what restoring and deleting them does.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Ino, time};
use headrace_volume::{
    FileKind, Identity, NewInode, OpenMode, Origin, RenameMode, SetAttr, Volume, VolumeOptions,
};
use proptest::prelude::*;

const ROOT: Identity = Identity { uid: 0, gid: 0, groups: Vec::new() };
const OPTIONS: VolumeOptions = VolumeOptions { memory_bytes_max: 64 << 20, open_files_max: 64 };

fn new_volume() -> (tempfile::TempDir, Arc<Volume>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    Volume::create(&path).unwrap();
    let volume = Volume::open(&path, OPTIONS).unwrap();
    (folder, volume)
}

fn reopen(folder: &tempfile::TempDir, volume: Arc<Volume>) -> Arc<Volume> {
    volume.close().unwrap();
    drop(volume);
    Volume::open(&folder.path().join("v"), OPTIONS).unwrap()
}

fn file() -> NewInode {
    NewInode { kind: FileKind::File, mode: 0o644, uid: 1, gid: 2, rdev: 0, target: Vec::new() }
}

fn directory() -> NewInode {
    NewInode { kind: FileKind::Directory, mode: 0o755, ..file() }
}

fn write_file(volume: &Arc<Volume>, parent: Ino, name: &[u8], bytes: &[u8]) -> Ino {
    let open = match volume.lookup(parent, name) {
        Ok(attr) => {
            let mode = OpenMode { truncate: true, ..OpenMode::WRITE };
            volume.open_file(Origin::SOCKET, attr.ino, mode).unwrap()
        }
        Err(_) => volume.create_file(Origin::SOCKET, parent, name, file(), OpenMode::WRITE).unwrap().1,
    };
    open.write(0, bytes).unwrap();
    open.ino()
}

fn read_ino(volume: &Arc<Volume>, ino: Ino) -> Vec<u8> {
    let open = volume.open_file(Origin::SOCKET, ino, OpenMode::READ).unwrap();
    let mut bytes = vec![0xEE; open.attr().unwrap().size as usize + 10];
    let count = open.read(0, &mut bytes).unwrap();
    bytes.truncate(count);
    bytes
}

fn read_path(volume: &Arc<Volume>, path: &str) -> Vec<u8> {
    read_ino(volume, volume.resolve(&ROOT, path.as_bytes(), true).unwrap().ino)
}

/// Path -> what it is; file contents and all attributes but atime, and links. Own inode numbers.
fn tree(volume: &Arc<Volume>, top: Ino) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![(top, String::new())];
    while let Some((ino, path)) = waiting.pop() {
        let attr = volume.getattr(ino).unwrap();
        let content = match attr.kind {
            FileKind::Directory => {
                let open = volume.open_dir(ino).unwrap();
                let items = open.read(0, usize::MAX).unwrap();
                let inos: Vec<Ino> = items.iter().map(|item| item.ino).collect();
                let attrs = volume.getattrs(&inos).unwrap();
                for (item, attr) in items.iter().zip(attrs).skip(2) {
                    assert_eq!(attr.unwrap().ino, item.ino);
                    assert_eq!(volume.lookup(ino, &item.name).unwrap().ino, item.ino);
                    let name = String::from_utf8_lossy(&item.name).into_owned();
                    waiting.push((item.ino, format!("{path}/{name}")));
                }
                String::new()
            }
            FileKind::File => format!("{:x?}", headrace_base::crc32c(&read_ino(volume, ino))),
            FileKind::Symlink => String::from_utf8(volume.readlink(ino).unwrap()).unwrap(),
            _ => String::new(),
        };
        let attributes: Vec<_> = volume
            .listxattr(ino)
            .unwrap()
            .into_iter()
            .map(|name| (volume.getxattr(ino, &name).unwrap(), name))
            .collect();
        let own = attr.ino.0 & ((1 << 48) - 1);
        let attr = (attr.kind, attr.mode, attr.uid, attr.gid, attr.nlink, attr.size, attr.mtime, attr.ctime);
        found.insert(path, format!("{own} {attr:?} {attributes:?} {content}"));
    }
    found
}

fn live(volume: &Arc<Volume>) -> BTreeMap<String, String> {
    tree(volume, Ino::ROOT)
}

fn past(volume: &Arc<Volume>, name: &str) -> BTreeMap<String, String> {
    tree(volume, volume.resolve(&ROOT, format!("/.snapshots/{name}").as_bytes(), true).unwrap().ino)
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = time::monotonic_now() + Duration::from_secs(20);
    while !condition() {
        assert!(time::monotonic_now() < deadline, "not within 20 s: {what}");
        time::sleep(Duration::from_millis(20));
    }
}

/// A tree with all that a snapshot must keep, and changes to each of it.
fn build(volume: &Arc<Volume>) -> Ino {
    let dir = volume.make(Origin::SOCKET, Ino::ROOT, b"dir", directory()).unwrap().ino;
    let deep = volume.make(Origin::SOCKET, dir, b"deep", directory()).unwrap().ino;
    write_file(volume, dir, b"small", b"hello");
    write_file(volume, dir, b"large", &noise(20 << 20, 3));
    write_file(volume, deep, b"gone", b"soon");
    write_file(volume, Ino::ROOT, b"moves", b"about");
    let link = NewInode { kind: FileKind::Symlink, mode: 0o777, target: b"dir/small".to_vec(), ..file() };
    volume.make(Origin::SOCKET, Ino::ROOT, b"link", link).unwrap();
    let small = volume.lookup(dir, b"small").unwrap().ino;
    volume.link(Origin::SOCKET, small, deep, b"second").unwrap();
    volume.setxattr(Origin::SOCKET, small, b"user.a", b"1", true, false).unwrap();
    // Rides in the metadata store.
    let inline = write_file(volume, dir, b"inline", b"few bytes");
    volume.open_file(Origin::SOCKET, inline, OpenMode::WRITE).unwrap().fsync().unwrap();
    dir
}

fn change(volume: &Arc<Volume>, dir: Ino) {
    write_file(volume, dir, b"small", b"other bytes");
    write_file(volume, dir, b"inline", b"were changed");
    let deep = volume.lookup(dir, b"deep").unwrap().ino;
    volume.unlink(Origin::SOCKET, deep, b"gone").unwrap();
    volume.unlink(Origin::SOCKET, deep, b"second").unwrap();
    volume.rmdir(Origin::SOCKET, dir, b"deep").unwrap();
    volume.rename(Origin::SOCKET, (Ino::ROOT, b"moves"), (dir, b"moved"), RenameMode::Replace).unwrap();
    volume.unlink(Origin::SOCKET, Ino::ROOT, b"link").unwrap();
    write_file(volume, Ino::ROOT, b"new", b"!");
    let small = volume.lookup(dir, b"small").unwrap().ino;
    volume.removexattr(Origin::SOCKET, small, b"user.a").unwrap();
    let set = SetAttr { mode: Some(0o700), uid: Some(9), ..SetAttr::default() };
    volume.setattr(Origin::SOCKET, dir, &set).unwrap();
    let large = volume.lookup(dir, b"large").unwrap().ino;
    let open = volume.open_file(Origin::SOCKET, large, OpenMode::WRITE).unwrap();
    open.write(5 << 20, &noise(1 << 20, 9)).unwrap();
    open.truncate(18 << 20).unwrap();
}

#[test]
fn a_snapshot_holds_everything_and_never_changes() {
    let (folder, volume) = new_volume();
    let dir = build(&volume);
    // Bytes that are not flushed yet are in it too.
    let before = live(&volume);
    volume.snapshot_create(b"one").unwrap();
    assert_eq!(past(&volume, "one"), before);
    change(&volume, dir);
    assert_ne!(live(&volume), before);
    assert_eq!(past(&volume, "one"), before);
    volume.snapshot_create(b"two").unwrap();
    let changed = live(&volume);
    assert_eq!(past(&volume, "two"), changed);
    let volume = reopen(&folder, volume);
    assert_eq!(past(&volume, "one"), before);
    assert_eq!(past(&volume, "two"), changed);
    assert_eq!(live(&volume), changed);
    let names: Vec<_> = volume.snapshots().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, [b"one".to_vec(), b"two".to_vec()]);
}

#[test]
fn names_of_snapshots_are_names() {
    let (_folder, volume) = new_volume();
    volume.snapshot_create(b"one").unwrap();
    let taken = volume.snapshot_create(b"one").unwrap_err();
    assert_eq!(taken.raw_errno(), errno::EEXIST);
    for bad in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'x'; 256]] {
        assert!(volume.snapshot_create(bad).is_err(), "{bad:?}");
    }
    volume.snapshot_create(&[0xFF; 255]).unwrap();
    for missing in [volume.snapshot_delete(b"two"), volume.snapshot_restore(b"two").map(drop)] {
        let missing = missing.unwrap_err();
        assert_eq!(missing.raw_errno(), errno::ENOENT);
        assert!(missing.message().contains("there is no snapshot \"two\""), "{missing}");
    }
    assert_eq!(volume.snapshots().unwrap().len(), 2);
}

#[test]
fn snapshots_are_a_folder_that_the_root_does_not_list() {
    let (_folder, volume) = new_volume();
    build(&volume);
    volume.snapshot_create(b"b").unwrap();
    volume.snapshot_create(b"a").unwrap();
    let names = |ino: Ino| -> Vec<Vec<u8>> {
        volume.open_dir(ino).unwrap().read(0, 100).unwrap().into_iter().map(|item| item.name).collect()
    };
    assert!(!names(Ino::ROOT).contains(&b".snapshots".to_vec()));
    let top = volume.lookup(Ino::ROOT, b".snapshots").unwrap();
    assert_eq!((top.kind, top.mode, top.size), (FileKind::Directory, 0o555, 2));
    assert_eq!(names(top.ino), [&b"."[..], b"..", b"a", b"b"]);
    assert_eq!(volume.list(&ROOT, top.ino, Some(b"a"), 9).unwrap().len(), 1);
    let snapshot = volume.lookup(top.ino, b"a").unwrap();
    assert_eq!(volume.lookup(snapshot.ino, b"..").unwrap().ino, top.ino);
    assert_eq!(volume.lookup(top.ino, b"..").unwrap().ino, Ino::ROOT);
    let inner = volume.lookup(snapshot.ino, b"dir").unwrap();
    assert_eq!(volume.lookup(inner.ino, b"..").unwrap().ino, snapshot.ino);
    assert_eq!(volume.lookup(top.ino, b"c").unwrap_err().raw_errno(), errno::ENOENT);
    // A number is a snapshot's own.
    let other = volume.lookup(top.ino, b"b").unwrap();
    assert_ne!(other.ino, snapshot.ino);
    volume.snapshot_delete(b"a").unwrap();
    assert_eq!(volume.lookup(top.ino, b"a").unwrap_err().raw_errno(), errno::ENOENT);
    assert_eq!(volume.getattr(inner.ino).unwrap_err().raw_errno(), errno::ESTALE);
    volume.snapshot_create(b"a").unwrap();
    let again = volume.lookup(top.ino, b"a").unwrap();
    assert!(again.ino != snapshot.ino && again.ino != other.ino);
}

#[test]
fn a_snapshot_is_read_only() {
    let (_folder, volume) = new_volume();
    let dir = build(&volume);
    volume.snapshot_create(b"s").unwrap();
    let before = past(&volume, "s");
    let resolve = |path: &str| volume.resolve(&ROOT, path.as_bytes(), false).unwrap().ino;
    let (top, root, small) =
        (resolve("/.snapshots"), resolve("/.snapshots/s"), resolve("/.snapshots/s/dir/small"));
    let inner = resolve("/.snapshots/s/dir");
    let set = SetAttr { mode: Some(0), ..SetAttr::default() };
    let socket = Origin::SOCKET;
    let refused = [
        volume.make(socket, root, b"n", directory()).map(drop),
        volume.make(socket, top, b"n", directory()).map(drop),
        volume.create_file(socket, inner, b"n", file(), OpenMode::WRITE).map(drop),
        volume.unlink(socket, inner, b"small"),
        volume.rmdir(socket, inner, b"deep"),
        volume.rmdir(socket, top, b"s"),
        volume.rename(socket, (inner, b"small"), (Ino::ROOT, b"x"), RenameMode::Replace),
        volume.rename(socket, (dir, b"small"), (inner, b"x"), RenameMode::Replace),
        volume.rename(socket, (top, b"s"), (top, b"t"), RenameMode::Replace),
        volume.setattr(socket, small, &set).map(drop),
        volume.setattr(socket, small, &SetAttr { size: Some(0), ..SetAttr::default() }).map(drop),
        volume.setxattr(socket, small, b"user.a", b"2", false, false),
        volume.removexattr(socket, small, b"user.a"),
        volume.open_file(socket, small, OpenMode::WRITE).map(drop),
        volume.link(socket, dir, inner, b"x").map(drop),
    ];
    for (number, refused) in refused.into_iter().enumerate() {
        assert_eq!(refused.unwrap_err().raw_errno(), errno::EROFS, "attempt {number}");
    }
    assert_eq!(volume.link(socket, small, dir, b"x").unwrap_err().raw_errno(), errno::EXDEV);
    // The name itself is taken.
    assert_eq!(
        volume.make(socket, Ino::ROOT, b".snapshots", directory()).unwrap_err().raw_errno(),
        errno::EEXIST
    );
    let moved = volume.rename(socket, (dir, b"small"), (Ino::ROOT, b".snapshots"), RenameMode::Replace);
    assert_eq!(moved.unwrap_err().raw_errno(), errno::EPERM);
    assert_eq!(volume.rmdir(socket, Ino::ROOT, b".snapshots").unwrap_err().raw_errno(), errno::EPERM);
    // Elsewhere it is a name like any other.
    volume.make(socket, dir, b".snapshots", directory()).unwrap();
    assert!(volume.seal(&ROOT, b"/.snapshots/s/dir").is_err());
    assert_eq!(past(&volume, "s"), before);
}

#[test]
fn a_restored_tree_is_what_the_snapshot_was() {
    let (folder, volume) = new_volume();
    let dir = build(&volume);
    let before = live(&volume);
    volume.snapshot_create(b"good").unwrap();
    change(&volume, dir);
    let changed = live(&volume);
    let restored = volume.snapshot_restore(b"good").unwrap();
    assert!(restored.changed > 10 && restored.changed < 60, "{restored:?}");
    assert_eq!(live(&volume), before);
    let kept = String::from_utf8(restored.before).unwrap();
    assert!(kept.starts_with("before-restore-2"), "{kept}");
    assert_eq!(past(&volume, &kept), changed);
    assert_eq!(past(&volume, "good"), before);
    // The tree goes on as if nothing had been.
    change(&volume, dir);
    let again = live(&volume);
    let volume = reopen(&folder, volume);
    assert!(volume.recovery().is_empty());
    assert_eq!(live(&volume), again);
    // And back to what was before the restore, with inode numbers that nobody had since.
    let new = write_file(&volume, Ino::ROOT, b"newer", b"");
    volume.snapshot_restore(kept.as_bytes()).unwrap();
    assert_eq!(live(&volume), changed);
    assert!(write_file(&volume, Ino::ROOT, b"newest", b"") > new);
    // Nothing to put back is no fault.
    volume.unlink(Origin::SOCKET, Ino::ROOT, b"newest").unwrap();
    volume.snapshot_create(b"now").unwrap();
    let now = live(&volume);
    assert_eq!(volume.snapshot_restore(b"now").unwrap().changed, 0);
    assert_eq!(live(&volume), now);
}

#[test]
fn a_restore_waits_for_nobody_and_says_what_is_open() {
    let (_folder, volume) = new_volume();
    let dir = build(&volume);
    volume.snapshot_create(b"s").unwrap();
    let before = live(&volume);
    let busy = |expected: &str| {
        let error = volume.snapshot_restore(b"s").unwrap_err();
        assert_eq!(error.raw_errno(), errno::EBUSY);
        assert!(error.message().contains(expected), "{error}");
    };
    let open = |path: &str, mode| {
        let ino = volume.resolve(&ROOT, path.as_bytes(), true).unwrap().ino;
        volume.open_file(Origin::SOCKET, ino, mode).unwrap()
    };
    let writing = open("/dir/large", OpenMode::WRITE);
    busy("1 file is open for writing: \"/dir/large\": close it");
    drop(writing);
    change(&volume, dir);
    let reading = open("/dir/small", OpenMode::READ);
    busy("open, and other in the snapshot: \"/dir/small\"");
    assert_eq!(volume.snapshots().unwrap().len(), 1, "a refused restore leaves nothing");
    drop(reading);
    // Files that do not change may be open, files of the past and directories too.
    write_file(&volume, dir, b"small", b"once more");
    let past = open("/.snapshots/s/dir/small", OpenMode::READ);
    let listing = volume.open_dir(dir).unwrap();
    let removed = volume.resolve(&ROOT, b"/new", true).unwrap();
    volume.snapshot_restore(b"s").unwrap();
    assert_eq!(live(&volume), before);
    let mut bytes = [0; 5];
    assert_eq!(past.read(0, &mut bytes).unwrap(), 5);
    assert_eq!(&bytes, b"hello");
    assert!(listing.read(0, 10).unwrap().len() > 5);
    assert_eq!(volume.getattr(removed.ino).unwrap_err().raw_errno(), errno::ENOENT);
}

#[test]
fn a_file_that_had_no_name_does_not_come_back() {
    let (folder, volume) = new_volume();
    let ino = write_file(&volume, Ino::ROOT, b"f", &noise(100_000, 1));
    volume.setxattr(Origin::SOCKET, ino, b"user.a", b"1", true, false).unwrap();
    let open = volume.open_file(Origin::SOCKET, ino, OpenMode::READ).unwrap();
    volume.unlink(Origin::SOCKET, Ino::ROOT, b"f").unwrap();
    volume.snapshot_create(b"s").unwrap();
    drop(open);
    assert!(volume.getattr(ino).is_err());
    volume.snapshot_restore(b"s").unwrap();
    assert!(volume.getattr(ino).is_err());
    assert!(volume.getxattr(ino, b"user.a").is_err());
    let volume = reopen(&folder, volume);
    assert!(volume.getattr(ino).is_err());
}

#[test]
fn what_only_a_deleted_snapshot_held_is_given_back() {
    let (folder, volume) = new_volume();
    let bytes = noise(20 << 20, 5);
    write_file(&volume, Ino::ROOT, b"large", &bytes);
    volume.sync().unwrap();
    volume.snapshot_create(b"one").unwrap();
    volume.snapshot_create(b"two").unwrap();
    volume.unlink(Origin::SOCKET, Ino::ROOT, b"large").unwrap();
    volume.sync().unwrap();
    time::sleep(Duration::from_secs(3));
    assert_eq!(volume.segments().unwrap().0, 1);
    volume.snapshot_delete(b"one").unwrap();
    time::sleep(Duration::from_secs(3));
    assert_eq!(read_path(&volume, "/.snapshots/two/large"), bytes);
    let held = volume.hold_version().unwrap();
    assert_eq!(volume.held_versions().unwrap(), [held]);
    let open = {
        let ino = volume.resolve(&ROOT, b"/.snapshots/two/large", true).unwrap().ino;
        volume.open_file(Origin::SOCKET, ino, OpenMode::READ).unwrap()
    };
    volume.snapshot_delete(b"two").unwrap();
    time::sleep(Duration::from_secs(3));
    // Whoever has it open reads on.
    let mut read = vec![0; bytes.len()];
    assert_eq!(open.read(0, &mut read).unwrap(), bytes.len());
    assert!(read == bytes);
    drop(open);
    wait_until("the segment is gone", || volume.segments().unwrap().0 == 0);
    volume.release_version(held).unwrap();
    assert_eq!(volume.release_version(held).unwrap_err().raw_errno(), errno::ENOENT);
    let volume = reopen(&folder, volume);
    assert!(volume.held_versions().unwrap().is_empty());
}

/// Snapshots are made, restored and deleted while others work; nobody waits for ever, no snapshot changes, and
/// what is left is a whole tree.
#[test]
fn snapshots_come_and_go_beside_writers() {
    let (folder, volume) = new_volume();
    let until = time::monotonic_now() + Duration::from_secs(4);
    let (mut made, mut restored) = (0, 0);
    std::thread::scope(|scope| {
        for worker in 0..3_u64 {
            let volume = &volume;
            scope.spawn(move || {
                let mut turn = worker;
                while time::monotonic_now() < until {
                    turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(worker + 1);
                    let name = [b'a' + worker as u8, b'0' + (turn >> 40) as u8 % 8];
                    let other = [b'a' + worker as u8, b'0' + (turn >> 50) as u8 % 8];
                    // A restore may come between any two calls: what is not there any more is no fault.
                    let found = volume.lookup(Ino::ROOT, &name);
                    let _ = match ((turn >> 33) % 6, found) {
                        (0, _) => volume.unlink(Origin::SOCKET, Ino::ROOT, &name),
                        (1, _) => volume.rename(
                            Origin::SOCKET,
                            (Ino::ROOT, &name),
                            (Ino::ROOT, &other),
                            RenameMode::Replace,
                        ),
                        (2, Ok(attr)) => {
                            volume.setxattr(Origin::SOCKET, attr.ino, b"user.a", &name, false, false)
                        }
                        (3, Ok(attr)) => volume
                            .open_file(Origin::SOCKET, attr.ino, OpenMode::WRITE)
                            .and_then(|open| open.write(turn % 50_000, &name).and_then(|()| open.fsync())),
                        (_, Ok(attr)) => volume
                            .open_file(Origin::SOCKET, attr.ino, OpenMode::WRITE)
                            .and_then(|open| open.write(0, &noise((turn >> 44) as usize % 40_000, turn))),
                        (_, Err(_)) => volume
                            .create_file(Origin::SOCKET, Ino::ROOT, &name, file(), OpenMode::WRITE)
                            .and_then(|(_, open)| open.write(0, &name)),
                    };
                }
            });
        }
        while time::monotonic_now() < until {
            volume.snapshot_create(b"s").unwrap();
            made += 1;
            let first = past(&volume, "s");
            match volume.snapshot_restore(b"s") {
                Ok(done) => {
                    restored += 1;
                    volume.snapshot_delete(&done.before).unwrap();
                }
                Err(error) => assert_eq!(error.raw_errno(), errno::EBUSY, "{error}"),
            }
            assert_eq!(past(&volume, "s"), first);
            volume.snapshot_delete(b"s").unwrap();
        }
    });
    assert!(made > 3, "{made} snapshots, {restored} restored");
    let now = live(&volume);
    let root = volume.getattr(Ino::ROOT).unwrap();
    assert_eq!(root.size as usize, now.len() - 1, "the root counts its names");
    let volume = reopen(&folder, volume);
    assert!(volume.recovery().is_empty());
    assert_eq!(live(&volume), now);
}

#[derive(Clone, Debug)]
enum Step {
    Write(u8, u16),
    Overwrite(u8, u16, u8),
    Unlink(u8),
    Rename(u8, u8),
    Link(u8, u8),
    Mkdir(u8),
    Rmdir(u8),
    Fsync(u8),
    Snapshot(u8),
    Delete(u8),
    Restore(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0_u8..8, 0_u16..30_000).prop_map(|(name, length)| Step::Write(name, length)),
        3 => (0_u8..8, 0_u16..30_000, any::<u8>()).prop_map(|(name, at, seed)| Step::Overwrite(name, at, seed)),
        3 => (0_u8..8).prop_map(Step::Unlink),
        2 => (0_u8..8, 0_u8..8).prop_map(|(from, to)| Step::Rename(from, to)),
        1 => (0_u8..8, 0_u8..8).prop_map(|(from, to)| Step::Link(from, to)),
        2 => (0_u8..8).prop_map(Step::Mkdir),
        1 => (0_u8..8).prop_map(Step::Rmdir),
        2 => (0_u8..8).prop_map(Step::Fsync),
        4 => (0_u8..4).prop_map(Step::Snapshot),
        3 => (0_u8..4).prop_map(Step::Delete),
        2 => (0_u8..4).prop_map(Step::Restore),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Of every snapshot the tree stays what it was when it was made, whatever is done; a restore brings it back.
    #[test]
    fn snapshots_agree_with_what_was(steps in steps()) {
        let (folder, mut volume) = new_volume();
        let mut held: BTreeMap<u8, BTreeMap<String, String>> = BTreeMap::new();
        let top = volume.make(Origin::SOCKET, Ino::ROOT, b"top", directory()).unwrap().ino;
        // Eight names in two directories.
        let name = |number: u8| (if number < 4 { Ino::ROOT } else { top }, vec![b'a' + number % 4]);
        for step in &steps {
            // What cannot be done (a name that is a directory, or missing) is not done.
            match step {
                Step::Write(number, length) => {
                    let (parent, name) = name(*number);
                    if volume.lookup(parent, &name).is_ok_and(|attr| attr.kind == FileKind::File)
                        || volume.lookup(parent, &name).is_err()
                    {
                        write_file(&volume, parent, &name, &noise(usize::from(*length), u64::from(*length)));
                    }
                }
                Step::Overwrite(number, at, seed) => {
                    let (parent, name) = name(*number);
                    if let Ok(attr) = volume.lookup(parent, &name)
                        && let Ok(open) = volume.open_file(Origin::SOCKET, attr.ino, OpenMode::WRITE)
                    {
                        open.write(u64::from(*at), &noise(500, u64::from(*seed))).unwrap();
                    }
                }
                Step::Unlink(number) => {
                    let (parent, name) = name(*number);
                    let _ = volume.unlink(Origin::SOCKET, parent, &name);
                }
                Step::Rename(from, to) => {
                    let (from, to) = (name(*from), name(*to));
                    let _ = volume.rename(
                        Origin::SOCKET, (from.0, &from.1), (to.0, &to.1), RenameMode::Replace);
                }
                Step::Link(from, to) => {
                    let (from, to) = (name(*from), name(*to));
                    if let Ok(attr) = volume.lookup(from.0, &from.1) {
                        let _ = volume.link(Origin::SOCKET, attr.ino, to.0, &to.1);
                    }
                }
                Step::Mkdir(number) => {
                    let (parent, name) = name(*number);
                    let _ = volume.make(Origin::SOCKET, parent, &name, directory());
                }
                Step::Rmdir(number) => {
                    let (parent, name) = name(*number);
                    let _ = volume.rmdir(Origin::SOCKET, parent, &name);
                }
                Step::Fsync(number) => {
                    let (parent, name) = name(*number);
                    if let Ok(attr) = volume.lookup(parent, &name)
                        && let Ok(open) = volume.open_file(Origin::SOCKET, attr.ino, OpenMode::READ)
                    {
                        open.fsync().unwrap();
                    }
                }
                Step::Snapshot(number) => {
                    if !held.contains_key(number) {
                        let now = live(&volume);
                        volume.snapshot_create(&[b's', b'0' + *number]).unwrap();
                        held.insert(*number, now);
                    }
                }
                Step::Delete(number) => {
                    if held.remove(number).is_some() {
                        volume.snapshot_delete(&[b's', b'0' + *number]).unwrap();
                    }
                }
                Step::Restore(number) => {
                    if let Some(was) = held.get(number) {
                        let restored = volume.snapshot_restore(&[b's', b'0' + *number]).unwrap();
                        prop_assert_eq!(&live(&volume), was);
                        volume.snapshot_delete(&restored.before).unwrap();
                    }
                }
                Step::Reopen => volume = reopen(&folder, volume),
            }
        }
        for (number, was) in &held {
            let root = volume.lookup(volume.lookup(Ino::ROOT, b".snapshots").unwrap().ino, &[b's', b'0' + *number]);
            prop_assert_eq!(&tree(&volume, root.unwrap().ino), was);
        }
        let now = live(&volume);
        let volume = reopen(&folder, volume);
        prop_assert_eq!(live(&volume), now);
    }
}
