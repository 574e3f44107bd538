//! Golden files: the bytes of this release, in tests/golden at the repository's root. Rust and Python read the
//! same files, and later releases must go on reading them. A test that differs from its file fails; after a
//! wanted change of a layout (with a new version number and a decision record) `HEADRACE_BLESS=1` rewrites it.

#![allow(clippy::unwrap_used, reason = "tests; clippy knows only functions marked so")]

use std::fmt::{Debug, Write};
use std::io::Cursor;
use std::path::PathBuf;

use headrace_base::ids::{SealId, VolumeId};
use headrace_base::time::Timestamp;
use headrace_base::{Ino, OpId, Result, SegmentId, SessionId, Version, crc32c};
use headrace_format::manifest::{self, Manifest, ManifestWriter, Sample};
use headrace_format::message::{self, *};
use headrace_format::order::Permutation;
use headrace_format::record::{
    Backup, Check, Content, Dentry, DirDelta, Extent, FileKind, Inode, Pending, Place, Seal, SegmentKind,
    Session, SessionState, Snapshot, VolumeRecord, decode_extents, encode_extents,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// The bytes of a golden file, after writing `bytes` to it if that is asked for.
fn stored(name: &str, bytes: &[u8]) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    if std::env::var_os("HEADRACE_BLESS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

const BLESS: &str = "HEADRACE_BLESS=1 rewrites it, if the layout was changed on purpose";

fn golden(name: &str, bytes: &[u8]) {
    let stored = stored(name, bytes);
    let differs = stored.iter().zip(bytes).position(|(a, b)| a != b);
    let (there, here) = (stored.len(), bytes.len());
    assert!(stored == bytes, "{name} differs ({there} bytes, {here} now) from byte {differs:?} on; {BLESS}");
}

/// Compares values: the order of keys may differ.
fn golden_json(name: &str, value: &Value) {
    let text = format!("{}\n", serde_json::to_string_pretty(value).unwrap());
    let stored: Value = serde_json::from_slice(&stored(name, text.as_bytes())).unwrap();
    if let (Value::Object(stored), Value::Object(now)) = (&stored, value) {
        for (key, was) in stored {
            assert_eq!(now.get(key), Some(was), "{key} in {name} differs; {BLESS}");
        }
    }
    assert_eq!(&stored, value, "{name} differs; {BLESS}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

#[test]
fn sample_order() {
    let mut cases = Vec::new();
    let mut case = |count: u64, seed: u64, epoch: u64, positions: Vec<u64>| {
        let order = Permutation::new(count, seed, epoch);
        let indices: Vec<u64> = positions.iter().map(|&position| order.index(position)).collect();
        cases.push(
            json!({"n": count, "seed": seed, "epoch": epoch, "positions": positions, "indices": indices}),
        );
    };
    let spread = |count: u64| -> Vec<u64> {
        let mut positions: Vec<u64> = (0..8).chain((0..8).map(|k| count / 8 * k + k)).collect();
        positions.extend([count - 2, count - 1]);
        positions
    };
    for (seed, epoch) in [(0, 0), (0, 1), (1, 0), (42, 7), (u64::MAX, u64::MAX)] {
        for count in [0, 1, 2, 3, 4, 5, 10, 16, 17] {
            case(count, seed, epoch, (0..count).collect());
        }
        for count in [1000, 50_000, 65_536, 65_537, 1_000_000, 1_000_000_000_000, 1 << 62] {
            case(count, seed, epoch, spread(count));
        }
    }
    golden_json("order.json", &Value::Array(cases));
}

/// One message: its name, and its bytes, which must give it back.
fn wire<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    into: &mut Map<String, Value>,
    name: &str,
    message: T,
) {
    let bytes = encode_meta(&message).unwrap();
    assert_eq!(decode_meta::<T>(&bytes).unwrap(), message);
    assert!(into.insert(name.to_owned(), Value::from(hex(&bytes))).is_none(), "{name} comes twice");
}

/// A new op does not compile until `Request::name` knows it; without an example below, the count differs.
const OPS: usize = 48;

fn bytes(text: &[u8]) -> serde_bytes::ByteBuf {
    serde_bytes::ByteBuf::from(text)
}

/// Not UTF-8: a name in Latin-1.
const ODD: &[u8] = b"/d/caf\xE9";
const ID: &str = "01K6QZ4V8Y0000000000000042";

fn requests() -> Vec<Request> {
    let flags = OpenFlags { read: true, write: true, create: true, exclusive: false, truncate: false };
    let file = PutEntry {
        path: bytes(ODD),
        kind: Kind::File,
        mode: 0o644,
        uid: None,
        gid: None,
        mtime_ns: Some(-1_500_000_000),
        size: 10_240,
        target: None,
        hard_link: false,
        rdev: 0,
    };
    let link = PutEntry {
        path: bytes(b"/d/link"),
        kind: Kind::Symlink,
        mode: 0o777,
        uid: Some(0),
        gid: Some(100_000),
        mtime_ns: None,
        size: 0,
        target: Some(bytes(b"caf\xE9")),
        hard_link: false,
        rdev: 0,
    };
    let path = || bytes(ODD);
    vec![
        Request::Hello { client: "python 0.1.0".into() },
        Request::Status {},
        Request::Stat { path: path(), follow: true },
        Request::List { path: bytes(b"/"), after: Some(bytes(b"a\xFF")), limit: 1000, attrs: true },
        Request::Open { path: path(), flags, mode: 0o600 },
        Request::Pread { handle: 7, offset: 1 << 40, length: 1 << 20 },
        Request::Pwrite { handle: 7, offset: None },
        Request::Fstat { handle: 7 },
        Request::Ftruncate { handle: 7, size: 65_536 },
        Request::Fsync { handle: 7 },
        Request::Close { handle: 7 },
        Request::ReadFile { path: path() },
        Request::Put { entries: vec![file, link], parents: true, durable: false },
        Request::Mkdir { path: path(), mode: 0o755, parents: true, exist_ok: false },
        Request::Unlink { path: path() },
        Request::Rmdir { path: path() },
        Request::Rename { from: path(), to: bytes(b"/e"), noreplace: true, exchange: false },
        Request::Symlink { target: bytes(b"../t"), path: path() },
        Request::Link { from: path(), to: bytes(b"/e") },
        Request::Readlink { path: path() },
        Request::Setattr {
            path: path(),
            set: SetAttr { mode: Some(0o4755), mtime_ns: Some(i64::MIN), ..SetAttr::default() },
        },
        Request::Getxattr { path: path(), name: bytes(b"user.a") },
        Request::Setxattr { path: path(), name: bytes(b"user.a"), value: bytes(b"\0\xFF") },
        Request::Listxattr { path: path() },
        Request::Removexattr { path: path(), name: bytes(b"user.a") },
        Request::Sync {},
        Request::Backup {},
        Request::Compact {},
        Request::Fsck { deep: true },
        Request::Tier { paths: vec![bytes(b"/a"), bytes(b"/caf\xE9")] },
        Request::Warm { paths: vec![bytes(b"/a")] },
        Request::Evict { paths: None },
        Request::Export {
            paths: vec![bytes(b"/d/a"), bytes(b"/d/caf\xE9")],
            root: bytes(b"/d"),
            url: "s3://bucket/prefix".into(),
            endpoint: Some("http://127.0.0.1:8333".into()),
            region: None,
        },
        Request::Statfs {},
        Request::Seal { path: bytes(b"/d") },
        Request::OpenSeal { seal: ID.into() },
        Request::Seals {},
        Request::SealDelete { seal: ID.into() },
        Request::SnapshotCreate { name: bytes(b"caf\xE9") },
        Request::Snapshots {},
        Request::SnapshotDiff {
            from: bytes(b"monday"),
            to: Some(bytes(b"caf\xE9")),
            after: Some(bytes(b"e\0\xFF")),
            limit: 1000,
        },
        Request::SnapshotRestore { name: bytes(b"monday") },
        Request::SnapshotDelete { name: bytes(b"monday") },
        Request::ReadBatch { seal: ID.into() },
        Request::Loader(LoaderRequest {
            seal: ID.into(),
            batch_size: 256,
            shuffle: true,
            seed: u64::MAX,
            epoch: 3,
            drop_last: true,
            first_batch: 17,
            prefetch: 4,
            rank: 1,
            world_size: 2,
        }),
        Request::Mount { mountpoint: bytes(b"/mnt/v"), read_only: true, allow_other: false },
        Request::Unmount { mountpoint: bytes(b"/mnt/v") },
        Request::Shutdown {},
    ]
}

#[test]
fn wire_messages() {
    let mut all = Map::new();
    let into = &mut all;
    let requests = requests();
    assert_eq!(requests.len(), OPS, "one example for each op");
    for request in requests {
        let name = format!("request.{}", request.name());
        wire(into, &name, request);
    }
    wire(into, "request.pwrite_at", Request::Pwrite { handle: 7, offset: Some(0) });
    wire(
        into,
        "request.list_first",
        Request::List { path: bytes(b"/"), after: None, limit: 0, attrs: false },
    );
    let to_the_present = Request::SnapshotDiff { from: bytes(b"monday"), to: None, after: None, limit: 0 };
    wire(into, "request.snapshot_diff_first", to_the_present);

    let attr = Attr {
        ino: 1025,
        kind: message::Kind::File,
        mode: 0o4644,
        nlink: 2,
        uid: 1000,
        gid: 0,
        rdev: 0,
        size: 10_240,
        blocks: 24,
        atime_ns: 1_760_000_000_123_456_789,
        mtime_ns: -1,
        ctime_ns: 0,
    };
    wire(into, "answer.nothing", Answer::Ok(()));
    let failed: Answer<()> = Answer::Error(ErrorBody {
        kind: "not_found".into(),
        errno: 2,
        message: "stat /d/x: no such file".into(),
    });
    wire(into, "answer.error", failed);
    wire(
        into,
        "answer.welcome",
        Answer::Ok(Welcome { wire: 1, engine: "0.1.0".into(), pid: 4242, volume: ID.into(), format: 1 }),
    );
    wire(into, "answer.attr", Answer::Ok(attr.clone()));
    let entries = [
        (bytes(b"caf\xE9"), message::Kind::File, Some(attr.clone())),
        (bytes(b"d"), message::Kind::Directory, None),
        (bytes(b"l"), message::Kind::Symlink, None),
        (bytes(b"p"), message::Kind::Fifo, None),
        (bytes(b"s"), message::Kind::Socket, None),
        (bytes(b"tty"), message::Kind::CharDevice, None),
        (bytes(b"vda"), message::Kind::BlockDevice, None),
    ]
    .into_iter()
    .zip(1025..)
    .map(|((name, kind, attr), ino)| ListEntry { name, ino, kind, attr })
    .collect();
    wire(into, "answer.listing", Answer::Ok(Listing { entries, next: Some(bytes(b"vda")) }));
    wire(into, "answer.listing_last", Answer::Ok(Listing { entries: vec![], next: None }));
    wire(into, "answer.opened", Answer::Ok(Opened { handle: 7, attr }));
    wire(into, "answer.written", Answer::Ok(Written { offset: 1 << 33, bytes: 4096 }));
    wire(into, "answer.put_done", Answer::Ok(PutDone { created: 2, replaced: 1, bytes: 10_240 }));
    wire(into, "answer.names", Answer::Ok(Names { names: vec![bytes(b"user.a"), bytes(b"user.\xFF")] }));
    wire(
        into,
        "answer.statfs",
        Answer::Ok(Statfs {
            bytes_total: 1 << 40,
            bytes_free: 1 << 39,
            bytes_available: 1 << 38,
            inodes_used: 1025,
        }),
    );
    let sealed = Sealed {
        seal: ID.into(),
        version: 2,
        path: bytes(ODD),
        samples: 10_000,
        bytes: 102_400_000,
        manifest_bytes: 1_704_192,
        created_ns: 1_760_000_000_000_000_000,
    };
    wire(into, "answer.sealed", Answer::Ok(sealed.clone()));
    wire(into, "answer.seals", Answer::Ok(Seals { seals: vec![sealed] }));
    let snapshot =
        message::Snapshot { name: bytes(b"caf\xE9"), version: 300, created_ns: 1_760_000_000_000_000_000 };
    wire(into, "answer.snapshot", Answer::Ok(snapshot.clone()));
    wire(into, "answer.snapshots", Answer::Ok(Snapshots { snapshots: vec![snapshot] }));
    let difference = |change, path: &[u8], from: Option<&[u8]>| Difference {
        change,
        kind: message::Kind::File,
        path: bytes(path),
        from: from.map(bytes),
    };
    let differences = vec![
        difference(Change::Added, ODD, None),
        difference(Change::Removed, b"/a", None),
        difference(Change::Changed, b"/b", None),
        difference(Change::Renamed, b"/d/c", Some(b"/c")),
    ];
    let next = Some(bytes(b"e\0\xFF"));
    wire(into, "answer.differences", Answer::Ok(Differences { differences, next }));
    wire(
        into,
        "answer.restored",
        Answer::Ok(Restored { before: bytes(b"before-restore-20261201-164307"), changed: 12 }),
    );
    let layout = BatchLayout {
        count: 256,
        offsets_at: 2048,
        data_at: 4160,
        data_bytes: 2_621_440,
        slot_bytes: 2_629_632,
        gather_ns: 1_234_567,
    };
    wire(into, "answer.batch_layout", Answer::Ok(layout));
    wire(
        into,
        "answer.mounted",
        Answer::Ok(Mounted { mountpoint: bytes(b"/mnt/v"), notes: vec!["mounted read-only".into()] }),
    );
    let mount = MountStatus { mountpoint: bytes(b"/mnt/v"), read_only: true, requests: 12 };
    let status = Status {
        engine: "0.1.0".into(),
        pid: 4242,
        volume: ID.into(),
        path: bytes(b"/home/u/caf\xE9"),
        format: 1,
        started_ns: 1_760_000_000_000_000_000,
        session: ID.into(),
        resident_bytes: 1 << 26,
        memory_bytes_max: 1 << 28,
        buffers_bytes: 1 << 20,
        dirty_bytes: 0,
        mounts: vec![mount],
        clients: 1,
        streams: 0,
        seals: 1,
        segments: 3,
        segment_bytes: 1 << 27,
        inodes: 10_002,
        object: Some(ObjectStatus {
            location: "s3://bucket/prefix".into(),
            flash_bytes_max: 1 << 36,
            clean_bytes: 1 << 30,
            dirty_bytes: 1 << 20,
            dirty_segments: 2,
            dirty_ms: 1500,
            failing: Some("put s3://bucket/prefix: no".into()),
            backup_ns: Some(1_760_000_000_000_000_000),
        }),
        recovery: vec!["closed one pack segment".into()],
        warnings: vec![],
    };
    wire(into, "answer.status", Answer::Ok(status));
    let report = TierReport { files: 3, bytes: 1 << 20, flash_bytes: 1 << 19, dirty_bytes: 4096 };
    let done =
        BackupDone { version: 9, created_ns: 1_760_000_000_000_000_000, changed: true, rows: 12, bytes: 999 };
    let checked = FsckReport {
        names: 3,
        inodes: 4,
        segments: 2,
        unnamed: 1,
        verified_bytes: 1 << 20,
        problems_count: 1,
        problems: vec!["segment 01K6QZ is missing".into()],
    };
    wire(into, "answer.fsck_report", Answer::Ok(checked));
    wire(into, "answer.compacted", Answer::Ok(Compacted { packs: 3, bytes: 1 << 20 }));
    wire(into, "answer.backup_done", Answer::Ok(done));
    wire(into, "answer.tier_report", Answer::Ok(report));
    let left_out = vec![LeftOut { path: bytes(b"/d/caf\xE9"), why: "a key is UTF-8".into() }];
    wire(into, "answer.exported", Answer::Ok(Exported { files: 2, bytes: 1 << 20, unchanged: 1, left_out }));
    wire(into, "answer.evicted", Answer::Ok(Evicted { bytes: 1 << 30 }));

    wire(into, "stream_event.batch", StreamEvent::Batch { batch: 17, slot: 1, layout });
    wire(into, "stream_event.end", StreamEvent::End {});
    let damaged = "segment 01K6QZ: checksum".to_owned();
    wire(
        into,
        "stream_event.error",
        StreamEvent::Error(ErrorBody { kind: "corrupt".into(), errno: 5, message: damaged }),
    );
    wire(into, "stream_command.release", StreamCommand::Release { slot: 1 });

    all.insert("hello".into(), Value::from(hex(&HELLO)));
    all.insert("header".into(), Value::from(hex(&encode_header(300, 1, 1 << 20).unwrap())));
    golden_json("wire.json", &Value::Object(all));
}

#[test]
fn metadata_records() {
    let mut all = Map::new();
    fn record<T: PartialEq + Debug>(
        into: &mut Map<String, Value>,
        name: &str,
        value: &T,
        encode: impl Fn(&T) -> Vec<u8>,
        decode: fn(&[u8]) -> Result<T>,
    ) {
        let bytes = encode(value);
        assert_eq!(&decode(&bytes).unwrap(), value);
        into.insert(name.to_owned(), Value::from(hex(&bytes)));
    }
    let now = Timestamp(1_760_000_000_123_456_789);
    let segment = SegmentId(0x0199_AF92_B11E_0000_0000_0000_0000_0042);
    let check =
        Check { start: 4096, covered: 70_000, crcs: [0xE306_9283, 7, 8, 9, 10].into_iter().collect() };
    let extents = vec![
        Extent { file_offset: 0, length: 60_000, place: Place::Pack { segment, offset: 8192, check } },
        Extent { file_offset: 1 << 20, length: 1 << 24, place: Place::File { segment, offset: 1 << 20 } },
        Extent { file_offset: 1 << 30, length: 5, place: Place::Inline { slot: 3, offset: 300 } },
    ];
    let mut inode = Inode {
        kind: FileKind::File,
        mode: 0o4644,
        uid: 1000,
        gid: 65_534,
        nlink: 2,
        rdev: 0,
        size: (1 << 30) + 5,
        atime: Timestamp(now.0 + 1),
        mtime: now,
        ctime: Timestamp(now.0 - 1),
        btime: Timestamp(-1),
        parent: Ino(1025),
        quota_root: Ino::ROOT,
        content: Content::Extents(extents.clone()),
    };
    let into = &mut all;
    record(into, "inode.extents", &inode, Inode::encode, Inode::decode);
    inode.content = Content::Regions;
    record(into, "inode.regions", &inode, Inode::encode, Inode::decode);
    inode.content = Content::Target(b"../caf\xE9".to_vec());
    inode.kind = FileKind::Symlink;
    record(into, "inode.symlink", &inode, Inode::encode, Inode::decode);
    inode.content = Content::Empty;
    for (kind, name) in [
        (FileKind::Directory, "inode.directory"),
        (FileKind::Fifo, "inode.fifo"),
        (FileKind::Socket, "inode.socket"),
        (FileKind::CharDevice, "inode.char_device"),
        (FileKind::BlockDevice, "inode.block_device"),
    ] {
        inode.kind = kind;
        inode.rdev = 0x0801;
        record(into, name, &inode, Inode::encode, Inode::decode);
    }
    record(into, "extents", &extents, |extents| encode_extents(extents), decode_extents);
    record(
        into,
        "dentry",
        &Dentry { ino: Ino(300), kind: FileKind::Directory },
        Dentry::encode,
        Dentry::decode,
    );
    let delta = DirDelta { entries: -3, subdirectories: 200, changed: now };
    record(into, "directory_delta", &delta, DirDelta::encode, DirDelta::decode);
    let mut session = Session {
        state: SessionState::Alive,
        node: 1,
        pid: 4242,
        host: "node-1".into(),
        started: now,
        last_op: OpId(1 << 40),
    };
    record(into, "session.alive", &session, Session::encode, Session::decode);
    session.state = SessionState::Ended;
    record(into, "session.ended", &session, Session::encode, Session::decode);
    session.state = SessionState::Dead;
    record(into, "session.dead", &session, Session::encode, Session::decode);
    for (kind, name) in [(SegmentKind::Pack, "pending.pack"), (SegmentKind::File, "pending.file")] {
        record(
            into,
            name,
            &Pending { session: SessionId(segment.0), kind },
            Pending::encode,
            Pending::decode,
        );
    }
    let seal = Seal {
        version: Version(2),
        path: b"/d/caf\xE9".to_vec(),
        root: Ino(1025),
        created: now,
        samples: 10_000,
        bytes: 102_400_000,
    };
    record(into, "seal", &seal, Seal::encode, Seal::decode);
    let snapshot = Snapshot { version: Version(300), created: now };
    record(into, "snapshot", &snapshot, Snapshot::encode, Snapshot::decode);
    let backup = Backup { version: Version(301), created: now, globals_crc: 0xDEAD_BEEF };
    record(into, "backup", &backup, Backup::encode, Backup::decode);
    let volume = VolumeRecord { volume: VolumeId(segment.0), format: 1, created: now };
    record(into, "volume", &volume, VolumeRecord::encode, VolumeRecord::decode);
    record(
        into,
        "number",
        &2049,
        |number| headrace_format::record::encode_number(*number),
        headrace_format::record::decode_number,
    );
    golden_json("records-1.json", &Value::Object(all));
}

/// A tree with what readers get wrong: samples in the root, a class without samples of its own, names that are
/// not UTF-8, a name that sorts between a directory and its files, holes, several extents, an empty file.
#[test]
fn sealed_manifest() {
    let packs = [SegmentId(0x0199_AF92_B11E_0000_0000_0000_0000_0001), SegmentId(2)];
    let large = SegmentId(0x0199_AF92_B11E_0000_0000_0000_0000_0003);
    let pack = |k: usize, offset: u64, length: u64| {
        let crcs = (0..length.div_ceil(headrace_format::CHUNK))
            .map(|chunk| 0x1000 * (k as u32 + 1) + chunk as u32)
            .collect();
        Place::Pack { segment: packs[k], offset, check: Check { start: offset, covered: length, crcs } }
    };
    let whole = |place: Place, length: u64| vec![Extent { file_offset: 0, length, place }];
    let part =
        Check { start: 65_536, covered: 65_536 + 100, crcs: [11, 12, 13, 14, 15].into_iter().collect() };
    let inline = || Place::Inline { slot: 1, offset: 0 };
    let directories: [(&[u8], u32); 6] =
        [(b"", 0), (b"caf\xE9", 0), (b"cat", 0), (b"cat/old", 2), (b"dog", 0), (b"dog/deep", 4)];
    type Row<'a> = (u32, &'a [u8], u64, Vec<Extent>, Vec<&'a [u8]>);
    let samples: Vec<Row<'_>> = vec![
        (0, b"README", 9, whole(inline(), 9), vec![b"read me.\n"]),
        (1, b"caf\xE9/0", 2048, whole(pack(0, 4096, 2048), 2048), vec![]),
        (2, b"cat/1.jpg", 10_240, whole(pack(0, 8192, 10_240), 10_240), vec![]),
        (2, b"cat/2.jpg", 0, vec![], vec![]),
        (3, b"cat/old/3.jpg", 70_000, whole(pack(1, 0, 70_000), 70_000), vec![]),
        (0, b"cat.txt", 3, whole(inline(), 3), vec![b"cat"]),
        (
            5,
            b"dog/deep/4.jpg",
            200_000,
            vec![
                Extent {
                    file_offset: 0,
                    length: 50_000,
                    place: Place::Pack { segment: packs[1], offset: 70_000, check: part },
                },
                Extent { file_offset: 100_000, length: 4, place: inline() },
                Extent {
                    file_offset: 100_004,
                    length: 90_000,
                    place: Place::File { segment: large, offset: 4096 },
                },
            ],
            vec![b"\0\xFF\x7F\x80"],
        ),
        (0, b"hole", 1 << 40, vec![], vec![]),
        (0, b"large", 1 << 25, whole(Place::File { segment: large, offset: 0 }, 1 << 25), vec![]),
    ];

    let of = manifest::Seal {
        seal: SealId(0x0199_AF92_B11E_0000_0000_0000_0000_0077),
        version: Version(2),
        created: Timestamp(1_760_000_000_123_456_789),
    };
    let mut writer = ManifestWriter::new(b"data/caf\xE9", Cursor::new(Vec::new())).unwrap();
    for (row, (path, parent)) in directories.iter().enumerate() {
        let number = row as u32;
        assert_eq!(writer.directory(path, *parent, 0o755 - row as u16, 1000 + number, 100).unwrap(), number);
    }
    for (row, (directory, path, size, extents, inline)) in samples.iter().enumerate() {
        let number = row as u64;
        writer
            .sample(Sample {
                directory: *directory,
                path,
                size: *size,
                mtime: Timestamp(number as i64 * 1_000_000_007 - 1),
                mode: 0o600 + row as u16,
                uid: 1000,
                gid: 100 + row as u32,
                ino: Ino(1025 + number),
                extents,
                inline,
            })
            .unwrap();
    }
    let mut bytes = Vec::new();
    let written = writer.finish(of, &mut bytes).unwrap();
    assert!(bytes.len() < 20_000);
    let manifest = Manifest::open(&bytes[..]).unwrap();
    manifest.verify().unwrap();
    golden("manifest-1.bin", &bytes);

    let class =
        |directory: u32| directories[directory as usize].0.split(|&byte| byte == b'/').next().unwrap();
    let mut classes: Vec<&[u8]> =
        samples.iter().map(|sample| class(sample.0)).filter(|class| !class.is_empty()).collect();
    classes.sort_unstable();
    classes.dedup();
    let describe_extent = |extent: &manifest::Extent<'_>| {
        let place = match extent.place {
            manifest::Place::Pack { segment, offset, check } => json!({
                "kind": "pack", "segment": segment.to_string(), "offset": offset, "check_start": check.start,
                "covered": check.covered, "crcs": check.crcs().collect::<Vec<_>>(),
            }),
            manifest::Place::File { segment, offset } => {
                json!({"kind": "file", "segment": segment.to_string(), "offset": offset})
            }
            manifest::Place::Inline { bytes, crc } => {
                assert_eq!(crc32c(bytes), crc);
                json!({"kind": "inline", "bytes_hex": hex(bytes), "crc": crc})
            }
        };
        json!({"file_offset": extent.file_offset, "length": extent.length, "place": place})
    };
    let described: Vec<Value> = samples
        .iter()
        .zip(0_u64..)
        .map(|((directory, path, size, ..), row)| {
            assert_eq!(
                (manifest.path(row), manifest.size(row), manifest.directory(row)),
                (*path, *size, *directory)
            );
            let label = classes.iter().position(|known| *known == class(*directory));
            json!({
                "path_hex": hex(path),
                "directory": directory,
                "size": size,
                "mtime_ns": manifest.mtime(row).0,
                "mode": manifest.mode(row),
                "uid": manifest.uid(row),
                "gid": manifest.gid(row),
                "ino": manifest.ino(row).0,
                "label": label.map_or(-1, |label| label as i64),
                "extents": manifest.extents(row).map(|extent| describe_extent(&extent)).collect::<Vec<_>>(),
            })
        })
        .collect();
    let directories: Vec<Value> = (0..manifest.directories())
        .map(|row| {
            let manifest::Directory { path, parent, mode, uid, gid } = manifest.dir(row);
            json!({"path_hex": hex(path), "parent": parent, "mode": mode, "uid": uid, "gid": gid})
        })
        .collect();
    let segments: Vec<Value> = manifest
        .segments()
        .map(|(segment, kind)| json!({"id": segment.to_string(), "kind": kind.number()}))
        .collect();
    golden_json(
        "manifest-1.json",
        &json!({
            "format": 1,
            "seal": of.seal.to_string(),
            "version": of.version.0,
            "created_ns": of.created.0,
            "root_path_hex": hex(manifest.root_path()),
            "samples": written.samples,
            "bytes": written.bytes,
            "manifest_bytes": written.manifest_bytes,
            "classes_hex": classes.iter().map(|class| hex(class)).collect::<Vec<_>>(),
            "sample_rows": described,
            "directory_rows": directories,
            "segment_rows": segments,
        }),
    );
}
