//! Promises of the volume, kept on a real store and real segments in a temporary folder.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Ino, Kind, time};
use headrace_format::message::{self, PutEntry};
use headrace_meta::At;
use headrace_volume::{
    FileKind, Identity, NewInode, OpenMode, Origin, RenameMode, SetAttr, Volume, VolumeOptions,
};
use proptest::prelude::*;
use serde_bytes::ByteBuf;

const ROOT: Identity = Identity { uid: 0, gid: 0, groups: Vec::new() };
const OPTIONS: VolumeOptions = VolumeOptions { memory_bytes_max: 64 << 20, open_files_max: 64 };

fn new_volume() -> (tempfile::TempDir, Arc<Volume>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    Volume::create(&path).unwrap();
    let volume = Volume::open(&path, OPTIONS).unwrap();
    (folder, volume)
}

fn reopen(folder: &Path, volume: Arc<Volume>) -> Arc<Volume> {
    volume.close().unwrap();
    drop(volume);
    Volume::open(&folder.join("v"), OPTIONS).unwrap()
}

fn file() -> NewInode {
    NewInode { kind: FileKind::File, mode: 0o644, uid: 1, gid: 2, rdev: 0, target: Vec::new() }
}

fn directory() -> NewInode {
    NewInode { kind: FileKind::Directory, mode: 0o755, ..file() }
}

fn write_file(volume: &Arc<Volume>, parent: Ino, name: &[u8], bytes: &[u8]) -> Ino {
    let (attr, open) = volume.create_file(Origin::SOCKET, parent, name, file(), OpenMode::WRITE).unwrap();
    open.write(0, bytes).unwrap();
    attr.ino
}

fn read_file(volume: &Arc<Volume>, parent: Ino, name: &[u8]) -> Vec<u8> {
    let attr = volume.lookup(parent, name).unwrap();
    let open = volume.open_file(Origin::SOCKET, attr.ino, OpenMode::READ).unwrap();
    let mut bytes = vec![0xEE; attr.size as usize + 10];
    let count = open.read(0, &mut bytes).unwrap();
    bytes.truncate(count);
    bytes
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

#[test]
fn a_reopened_volume_keeps_its_tree() {
    let (folder, volume) = new_volume();
    let inner = volume.make(Origin::SOCKET, Ino::ROOT, b"dir", directory()).unwrap();
    write_file(&volume, inner.ino, b"small", b"hello");
    let large = noise(3 << 20, 7);
    write_file(&volume, inner.ino, b"large", &large);
    let link = NewInode { kind: FileKind::Symlink, mode: 0o777, target: b"dir/small".to_vec(), ..file() };
    volume.make(Origin::SOCKET, Ino::ROOT, b"link", link).unwrap();
    let set = SetAttr { mtime: Some(time::Timestamp(-5)), mode: Some(0o600), ..SetAttr::default() };
    let small = volume.lookup(inner.ino, b"small").unwrap();
    volume.setattr(Origin::SOCKET, small.ino, &set).unwrap();
    volume.setxattr(Origin::SOCKET, small.ino, b"user.a", b"1", true, false).unwrap();

    let volume = reopen(folder.path(), volume);
    assert!(volume.recovery().is_empty(), "a clean stop needs no recovery: {:?}", volume.recovery());
    assert_eq!(read_file(&volume, inner.ino, b"small"), b"hello");
    assert_eq!(read_file(&volume, inner.ino, b"large"), large);
    let small = volume.resolve(&ROOT, b"/link", true).unwrap();
    assert_eq!((small.mtime.0, small.mode, small.size, small.uid), (-5, 0o600, 5, 1));
    assert_eq!(volume.getxattr(small.ino, b"user.a").unwrap(), b"1");
    assert_eq!(volume.listxattr(small.ino).unwrap(), [b"user.a"]);
    let root = volume.getattr(Ino::ROOT).unwrap();
    assert_eq!((root.nlink, root.size), (3, 2));
}

#[test]
fn a_second_engine_is_refused_and_told_the_pid() {
    let (folder, _volume) = new_volume();
    let error = Volume::open(&folder.path().join("v"), OPTIONS).unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict);
    assert!(error.message().contains(&std::process::id().to_string()), "{error}");
}

#[test]
fn folders_that_are_no_volumes_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let open = |name: &str| Volume::open(&folder.path().join(name), OPTIONS).unwrap_err();
    assert_eq!(open("missing").kind(), Kind::NotFound);
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(open("empty").message().contains("headrace create"));
    std::fs::write(folder.path().join("file"), b"").unwrap();
    assert_eq!(open("file").raw_errno(), errno::ENOTDIR);
    Volume::create(&folder.path().join("v")).unwrap();
    assert_eq!(Volume::create(&folder.path().join("v")).unwrap_err().raw_errno(), errno::EEXIST);
    let marker = folder.path().join("v/HEADRACE");
    let text = std::fs::read_to_string(&marker).unwrap().replace("\"format\": 1", "\"format\": 9");
    std::fs::write(&marker, text).unwrap();
    assert!(open("v").message().contains("holds format 9; this engine reads 1-1: upgrade headrace"));
}

#[test]
fn a_creation_that_was_cut_short_can_be_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    Volume::create(&path).unwrap();
    // As a crash before the last step leaves it.
    std::fs::rename(path.join("HEADRACE"), path.join("HEADRACE.unfinished")).unwrap();
    assert!(Volume::open(&path, OPTIONS).is_err());
    Volume::create(&path).unwrap();
    Volume::open(&path, OPTIONS).unwrap();
    // A volume that lost its marker is somebody's data: nothing is removed.
    std::fs::remove_file(path.join("HEADRACE")).unwrap();
    assert_eq!(Volume::create(&path).unwrap_err().raw_errno(), errno::ENOTEMPTY);
    assert!(path.join("meta/volume.sqlite").exists());
}

#[test]
fn of_many_who_make_a_volume_at_once_one_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    let makers: Vec<_> = (0..8)
        .map(|_| {
            let path = path.clone();
            headrace_base::thread::spawn("maker", move || Volume::create(&path).is_ok()).unwrap()
        })
        .collect();
    let made = makers.into_iter().map(|maker| maker.join().unwrap()).filter(|made| *made).count();
    assert_eq!(made, 1);
    Volume::open(&path, OPTIONS).unwrap();
}

#[test]
fn names_follow_posix() {
    let (_folder, volume) = new_volume();
    let make = |parent, name: &[u8], new| volume.make(Origin::SOCKET, parent, name, new);
    let code = |outcome: headrace_base::Result<()>| outcome.unwrap_err().raw_errno();
    let rename = |from: (Ino, &[u8]), to: (Ino, &[u8]), mode| volume.rename(Origin::SOCKET, from, to, mode);
    let a = make(Ino::ROOT, b"a", directory()).unwrap().ino;
    let b = make(a, b"b", directory()).unwrap().ino;
    write_file(&volume, a, b"f", b"f");
    write_file(&volume, Ino::ROOT, b"g", b"g");
    assert_eq!(make(Ino::ROOT, b"a", directory()).unwrap_err().raw_errno(), errno::EEXIST);
    assert_eq!(make(Ino::ROOT, &[b'x'; 256], directory()).unwrap_err().raw_errno(), errno::ENAMETOOLONG);
    assert_eq!(code(volume.rmdir(Origin::SOCKET, Ino::ROOT, b"a")), errno::ENOTEMPTY);
    assert_eq!(code(volume.rmdir(Origin::SOCKET, Ino::ROOT, b"g")), errno::ENOTDIR);
    assert_eq!(code(volume.unlink(Origin::SOCKET, Ino::ROOT, b"a")), errno::EISDIR);
    let replace = RenameMode::Replace;
    assert_eq!(code(rename((Ino::ROOT, b"a"), (b, b"a"), replace)), errno::EINVAL);
    assert_eq!(code(rename((Ino::ROOT, b"g"), (Ino::ROOT, b"a"), replace)), errno::EISDIR);
    assert_eq!(code(rename((Ino::ROOT, b"a"), (Ino::ROOT, b"g"), replace)), errno::ENOTDIR);
    assert_eq!(code(rename((Ino::ROOT, b"g"), (a, b"f"), RenameMode::NoReplace)), errno::EEXIST);
    assert_eq!(code(rename((Ino::ROOT, b"g"), (a, b"no"), RenameMode::Exchange)), errno::ENOENT);
    make(Ino::ROOT, b"c", directory()).unwrap();
    assert_eq!(code(rename((Ino::ROOT, b"c"), (Ino::ROOT, b"a"), replace)), errno::ENOTEMPTY);
    rename((a, b"b"), (Ino::ROOT, b"c"), replace).unwrap();
    assert_eq!(volume.lookup(Ino::ROOT, b"c").unwrap().ino, b);
    assert_eq!(volume.lookup(b, b"..").unwrap().ino, Ino::ROOT);
    assert_eq!(volume.getattr(a).unwrap().nlink, 2);
    rename((Ino::ROOT, b"g"), (a, b"f"), replace).unwrap();
    assert_eq!(read_file(&volume, a, b"f"), b"g");
    write_file(&volume, Ino::ROOT, b"h", b"h");
    rename((Ino::ROOT, b"h"), (a, b"f"), RenameMode::Exchange).unwrap();
    assert_eq!(
        (read_file(&volume, a, b"f"), read_file(&volume, Ino::ROOT, b"h")),
        (b"h".to_vec(), b"g".to_vec())
    );
    let f = volume.lookup(a, b"f").unwrap().ino;
    assert_eq!(volume.link(Origin::SOCKET, f, Ino::ROOT, b"f2").unwrap().nlink, 2);
    assert_eq!(volume.link(Origin::SOCKET, a, Ino::ROOT, b"d2").unwrap_err().raw_errno(), errno::EPERM);
    rename((a, b"f"), (Ino::ROOT, b"f2"), replace).unwrap();
    assert!(volume.lookup(a, b"f").is_ok(), "two names of one file: rename does nothing");
    volume.unlink(Origin::SOCKET, a, b"f").unwrap();
    assert_eq!(volume.getattr(f).unwrap().nlink, 1);
    volume.rmdir(Origin::SOCKET, Ino::ROOT, b"a").unwrap();
    assert_eq!(make(a, b"late", directory()).unwrap_err().raw_errno(), errno::ENOENT);
}

#[test]
fn an_unlinked_file_lives_until_its_last_close() {
    let (folder, volume) = new_volume();
    let ino = write_file(&volume, Ino::ROOT, b"f", b"first");
    let open = volume.open_file(Origin::SOCKET, ino, OpenMode::WRITE).unwrap();
    volume.unlink(Origin::SOCKET, Ino::ROOT, b"f").unwrap();
    assert_eq!(volume.lookup(Ino::ROOT, b"f").unwrap_err().kind(), Kind::NotFound);
    open.append(b" second").unwrap();
    open.fsync().unwrap();
    let mut bytes = [0; 12];
    assert_eq!(open.read(0, &mut bytes).unwrap(), 12);
    assert_eq!(&bytes, b"first second");
    assert_eq!(open.attr().unwrap().nlink, 0);
    drop(open);
    assert_eq!(volume.getattr(ino).unwrap_err().kind(), Kind::NotFound);
    let volume = reopen(folder.path(), volume);
    assert_eq!(volume.getattr(ino).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_large_file_is_one_extent_of_its_own_segment() {
    let (folder, volume) = new_volume();
    let bytes = noise(40 << 20, 3);
    let (attr, open) =
        volume.create_file(Origin::SOCKET, Ino::ROOT, b"big", file(), OpenMode::WRITE).unwrap();
    for (index, piece) in bytes.chunks(1 << 20).enumerate() {
        open.write((index as u64) << 20, piece).unwrap();
    }
    let mut middle = vec![0; 100_000];
    open.read(20_000_000, &mut middle).unwrap();
    assert_eq!(middle, bytes[20_000_000..20_100_000], "read while it is written");
    open.fsync().unwrap();
    drop(open);
    let volume = reopen(folder.path(), volume);
    assert_eq!(read_file(&volume, Ino::ROOT, b"big"), bytes);
    let files: Vec<_> = walk_files(&folder.path().join("v/segments"));
    assert!(files.iter().any(|(name, size)| name.ends_with(".file") && *size == 40 << 20), "{files:?}");

    let open = volume.open_file(Origin::SOCKET, attr.ino, OpenMode::WRITE).unwrap();
    open.write(1_000_000, b"small change").unwrap();
    open.truncate(30 << 20).unwrap();
    open.truncate(31 << 20).unwrap();
    drop(open);
    let volume = reopen(folder.path(), volume);
    let mut expected = bytes[..30 << 20].to_vec();
    expected[1_000_000..1_000_012].copy_from_slice(b"small change");
    expected.resize(31 << 20, 0);
    assert!(read_file(&volume, Ino::ROOT, b"big") == expected);
}

#[test]
fn a_log_that_is_synced_line_by_line_stays_in_few_pieces() {
    let (folder, volume) = new_volume();
    let (_, open) = volume.create_file(Origin::SOCKET, Ino::ROOT, b"log", file(), OpenMode::WRITE).unwrap();
    let mut expected = Vec::new();
    for round in 0..3000_u64 {
        let line = noise(100, round + 1);
        open.append(&line).unwrap();
        expected.extend_from_slice(&line);
        open.flush().unwrap();
    }
    // And changes in the middle of a large file.
    let (_, big) = volume.create_file(Origin::SOCKET, Ino::ROOT, b"big", file(), OpenMode::WRITE).unwrap();
    let mut model = noise(18 << 20, 5);
    for (index, piece) in model.chunks(1 << 20).enumerate() {
        big.write((index as u64) << 20, piece).unwrap();
    }
    big.flush().unwrap();
    for round in 0..200_usize {
        let at = round * 7919 * 4096 % (18 << 20);
        model[at..at + 4096].fill(round as u8);
        big.write(at as u64, &[round as u8; 4096]).unwrap();
        big.flush().unwrap();
    }
    drop((open, big));
    let volume = reopen(folder.path(), volume);
    assert!(read_file(&volume, Ino::ROOT, b"log") == expected);
    assert!(read_file(&volume, Ino::ROOT, b"big") == model);
    let view = volume.seal(&ROOT, b"/").unwrap();
    for index in 0..2 {
        assert!(view.sample_extents(index) <= 16 * 5 + 20, "{} pieces", view.sample_extents(index));
    }
}

fn walk_files(folder: &Path) -> Vec<(String, u64)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            files.extend(walk_files(&entry.path()));
        } else {
            files.push((entry.file_name().to_string_lossy().into_owned(), entry.metadata().unwrap().len()));
        }
    }
    files
}

fn put_entry(path: &str, size: usize) -> PutEntry {
    PutEntry {
        path: ByteBuf::from(path.as_bytes()),
        kind: message::Kind::File,
        mode: 0o640,
        uid: None,
        gid: None,
        mtime_ns: Some(1_000_000_007),
        size: size as u64,
        target: None,
        hard_link: false,
        rdev: 0,
    }
}

#[test]
fn put_replaces_atomically_and_makes_links() {
    let (folder, volume) = new_volume();
    let mut entries = vec![
        PutEntry { kind: message::Kind::Directory, mode: 0o700, ..put_entry("/d", 0) },
        put_entry("/d/a", 5),
        put_entry("/d/b", 0),
        PutEntry { target: Some(ByteBuf::from(&b"/d/a"[..])), hard_link: true, ..put_entry("/d/c", 0) },
    ];
    let done = volume.put(&ROOT, &entries, b"12345", false, true).unwrap();
    assert_eq!((done.created, done.replaced, done.bytes), (4, 0, 5));
    let d = volume.resolve(&ROOT, b"/d", true).unwrap();
    assert_eq!((d.mode, d.mtime.0), (0o700, d.mtime.0));
    assert_eq!(volume.lookup(d.ino, b"c").unwrap().nlink, 2);
    let old =
        volume.open_file(Origin::SOCKET, volume.lookup(d.ino, b"a").unwrap().ino, OpenMode::READ).unwrap();
    entries.truncate(2);
    let done = volume.put(&ROOT, &entries, b"67890", false, false).unwrap();
    assert_eq!((done.created, done.replaced), (0, 2));
    let mut bytes = [0; 5];
    old.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"12345", "whoever had it open keeps the old bytes");
    assert_eq!(read_file(&volume, d.ino, b"c"), b"12345");
    drop(old);
    let volume = reopen(folder.path(), volume);
    assert_eq!(read_file(&volume, d.ino, b"a"), b"67890");
    let short = volume.put(&ROOT, &[put_entry("/d/x", 9)], b"1", false, false).unwrap_err();
    assert_eq!(short.kind(), Kind::Invalid);
    let user = Identity { uid: 7, gid: 7, groups: vec![] };
    let denied = volume.put(&user, &[put_entry("/d/x", 1)], b"1", false, false).unwrap_err();
    assert_eq!(denied.raw_errno(), errno::EACCES);

    let link = |target: &[u8]| PutEntry {
        kind: message::Kind::Symlink,
        target: Some(ByteBuf::from(target)),
        ..put_entry("/d/link", 0)
    };
    for bad in [&b""[..], b"a\0b", &[b'x'; 5000]] {
        assert!(volume.put(&ROOT, &[link(bad)], b"", false, false).is_err());
    }
    volume.put(&ROOT, &[link(b"a")], b"", false, false).unwrap();
    let open_to_all = PutEntry { kind: message::Kind::Directory, mode: 0o777, ..put_entry("/pub", 0) };
    volume.put(&ROOT, &[open_to_all], b"", false, false).unwrap();
    let hard =
        PutEntry { hard_link: true, target: Some(ByteBuf::from(&b"/secret"[..])), ..put_entry("/pub/s", 0) };
    volume.put(&ROOT, &[PutEntry { mode: 0o600, ..put_entry("/secret", 1) }], b"1", false, false).unwrap();
    assert_eq!(volume.put(&user, &[hard], b"", false, false).unwrap_err().raw_errno(), errno::EPERM);
}

#[test]
fn a_sealed_view_never_changes() {
    let (folder, volume) = new_volume();
    let inner = volume.make(Origin::SOCKET, Ino::ROOT, b"data", directory()).unwrap().ino;
    let mut expected = BTreeMap::new();
    for (index, size) in [0_usize, 1, 1000, 10_000, 70_000, 300_000].into_iter().enumerate() {
        let name = format!("f{index}");
        write_file(&volume, inner, name.as_bytes(), &noise(size, index as u64));
        expected.insert(name, noise(size, index as u64));
    }
    // One that rides in the metadata store when it is sealed.
    let ino = volume.lookup(inner, b"f2").unwrap().ino;
    volume.open_file(Origin::SOCKET, ino, OpenMode::WRITE).unwrap().fsync().unwrap();
    let view = volume.seal(&ROOT, b"/data").unwrap();
    for name in expected.keys() {
        volume.unlink(Origin::SOCKET, inner, name.as_bytes()).unwrap();
    }
    write_file(&volume, inner, b"later", b"later");
    let check = |view: &headrace_volume::SealedView| {
        assert_eq!(view.samples(), expected.len() as u64);
        for (index, (name, bytes)) in expected.iter().enumerate() {
            let index = index as u64;
            assert_eq!(view.sample_path(index), name.as_bytes());
            let mut read = vec![0; view.sample_bytes(index).unwrap() as usize];
            view.read_sample(index, &mut read).unwrap();
            assert!(&read == bytes, "sample {name}");
        }
        assert!(view.sample_bytes(expected.len() as u64).is_err());
    };
    check(&view);
    let id = view.id();
    drop(view);
    let volume = reopen(folder.path(), volume);
    check(&volume.open_seal(&ROOT, id).unwrap());
    std::fs::remove_file(folder.path().join(format!("v/manifests/{id}.manifest"))).unwrap();
    let volume = reopen(folder.path(), volume);
    check(&volume.open_seal(&ROOT, id).unwrap());
    assert_eq!(volume.seals().unwrap().len(), 1);
    // One flipped bit anywhere in its columns is found before a byte is served by it.
    let path = folder.path().join(format!("v/manifests/{id}.manifest"));
    let whole = std::fs::read(&path).unwrap();
    for at in (4096..whole.len()).step_by(97) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        std::fs::write(&path, damaged).unwrap();
        if let Ok(view) = volume.open_seal(&ROOT, id) {
            check(&view);
        }
    }
}

#[test]
fn space_of_removed_files_comes_back_but_not_what_a_seal_holds() {
    let (folder, volume) = new_volume();
    // What a crash on a full disk leaves: it must not keep the rest from being looked at.
    let stray = folder.path().join("v/segments/00");
    std::fs::create_dir_all(&stray).unwrap();
    std::fs::write(stray.join("01ARZ3NDEKTSV4RRFFQ69G5F00.pack"), b"").unwrap();
    let large = noise(20 << 20, 1);
    for name in [b"kept".as_slice(), b"gone"] {
        write_file(&volume, Ino::ROOT, name, &large);
        volume.sync().unwrap();
        if name == b"kept" {
            volume.seal(&ROOT, b"/").unwrap();
        }
        volume.unlink(Origin::SOCKET, Ino::ROOT, name).unwrap();
    }
    let bytes = || -> u64 {
        let files = walk_files(&folder.path().join("v/segments"));
        files.iter().filter(|(name, _)| name.ends_with(".file")).map(|(_, size)| size).sum()
    };
    let deadline = time::monotonic_now() + Duration::from_secs(20);
    while bytes() > 20 << 20 && time::monotonic_now() < deadline {
        time::sleep(Duration::from_millis(50));
    }
    assert_eq!(bytes(), 20 << 20);
    let view = volume.seals().unwrap();
    assert_eq!(view.len(), 1);
}

#[test]
fn a_listing_survives_unlinks_between_reads() {
    let (_folder, volume) = new_volume();
    for index in 0..3000 {
        write_file(&volume, Ino::ROOT, format!("{index:05}").as_bytes(), b"");
    }
    let open = volume.open_dir(Ino::ROOT).unwrap();
    let mut cursor = 0;
    let mut seen = 0;
    loop {
        let items = open.read(cursor, 100).unwrap();
        let Some(last) = items.last() else { break };
        cursor = last.cursor;
        for item in items.iter().filter(|item| item.kind == FileKind::File) {
            volume.unlink(Origin::SOCKET, Ino::ROOT, &item.name).unwrap();
            seen += 1;
        }
    }
    assert_eq!(seen, 3000);
    assert!(volume.names_after(Ino::ROOT, None, 10, At::Latest).unwrap().is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Write { name: u8, offset: usize, length: usize },
    Append { name: u8, length: usize },
    Truncate { name: u8, size: usize },
    Fsync { name: u8 },
    Unlink { name: u8 },
    Rename { from: u8, to: u8 },
    Sync,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0..4_u8;
    let length = prop_oneof![1..200_usize, 1..70_000_usize, 60_000..140_000_usize];
    prop_oneof![
        4 => (name.clone(), 0..200_000_usize, length.clone())
            .prop_map(|(name, offset, length)| Step::Write { name, offset, length }),
        2 => (name.clone(), length).prop_map(|(name, length)| Step::Append { name, length }),
        2 => (name.clone(), 0..250_000_usize).prop_map(|(name, size)| Step::Truncate { name, size }),
        2 => name.clone().prop_map(|name| Step::Fsync { name }),
        1 => name.clone().prop_map(|name| Step::Unlink { name }),
        1 => (name.clone(), name).prop_map(|(from, to)| Step::Rename { from, to }),
        1 => Just(Step::Sync),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn files_hold_what_a_map_of_bytes_holds(steps in prop::collection::vec(step(), 1..60)) {
        let (folder, mut volume) = new_volume();
        let mut model: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
        for (round, step) in steps.into_iter().enumerate() {
            let open = |name: u8| {
                let name = [b'a' + name];
                match volume.lookup(Ino::ROOT, &name) {
                    Ok(attr) => volume.open_file(Origin::SOCKET, attr.ino, OpenMode::WRITE).unwrap(),
                    Err(_) => volume
                        .create_file(Origin::SOCKET, Ino::ROOT, &name, file(), OpenMode::WRITE).unwrap().1,
                }
            };
            match step {
                Step::Write { name, offset, length } => {
                    let bytes = noise(length, round as u64 + 1);
                    open(name).write(offset as u64, &bytes).unwrap();
                    let held = model.entry(name).or_default();
                    held.resize(held.len().max(offset + length), 0);
                    held[offset..offset + length].copy_from_slice(&bytes);
                }
                Step::Append { name, length } => {
                    let bytes = noise(length, round as u64 + 1);
                    let at = open(name).append(&bytes).unwrap();
                    let held = model.entry(name).or_default();
                    prop_assert_eq!(at, held.len() as u64);
                    held.extend_from_slice(&bytes);
                }
                Step::Truncate { name, size } => {
                    open(name).truncate(size as u64).unwrap();
                    model.entry(name).or_default().resize(size, 0);
                }
                Step::Fsync { name } => {
                    open(name).fsync().unwrap();
                    model.entry(name).or_default();
                }
                Step::Unlink { name } => {
                    let there = volume.unlink(Origin::SOCKET, Ino::ROOT, &[b'a' + name]).is_ok();
                    prop_assert_eq!(there, model.remove(&name).is_some());
                }
                Step::Rename { from, to } => {
                    let moved = volume
                        .rename(Origin::SOCKET, (Ino::ROOT, &[b'a' + from]), (Ino::ROOT, &[b'a' + to]), RenameMode::Replace)
                        .is_ok();
                    prop_assert_eq!(moved, model.contains_key(&from));
                    if from != to && let Some(bytes) = model.remove(&from) {
                        model.insert(to, bytes);
                    }
                }
                Step::Sync => volume.sync().unwrap(),
                Step::Reopen => volume = reopen(folder.path(), volume),
            }
            for (name, bytes) in &model {
                let read = read_file(&volume, Ino::ROOT, &[b'a' + name]);
                prop_assert!(&read == bytes, "file {} after step {}: {} bytes, expected {}", name, round, read.len(), bytes.len());
            }
        }
    }
}
