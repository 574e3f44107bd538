//! What codecs promise: values come back, equal values have equal bytes, and no bytes make them panic, random
//! or damaged in transit. For manifests also: whatever `open` accepts can be read to its last row.

#![allow(clippy::unwrap_used, reason = "tests; clippy knows only functions marked so")]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::Cursor;

use headrace_base::ids::{SealId, VolumeId};
use headrace_base::time::Timestamp;
use headrace_base::{Ino, Kind, OpId, Result, SegmentId, SessionId, Version, crc32c};
use headrace_format::CHUNK;
use headrace_format::manifest::{self, Manifest, ManifestWriter, Sample};
use headrace_format::message::{self, Answer, Request, StreamCommand, StreamEvent};
use headrace_format::record::{
    Check, Content, Dentry, DirDelta, Extent, FileKind, Inode, Pending, Place, Seal, SegmentKind, Session,
    SessionState, VolumeRecord, decode_extents, decode_number, encode_extents, encode_number,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

// ---- values ----

/// As many small numbers as large ones.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..300_u64, (0..64_u32, any::<u64>()).prop_map(|(shift, n)| n >> shift), Just(u64::MAX)]
}

fn time() -> impl Strategy<Value = Timestamp> {
    prop_oneof![any::<i64>(), Just(i64::MIN), Just(i64::MAX), 0..10_i64].prop_map(Timestamp)
}

fn kind() -> impl Strategy<Value = FileKind> {
    prop::sample::select(&FileKind::ALL[..])
}

fn place(length: u64) -> impl Strategy<Value = Place> {
    let segment = || any::<u128>().prop_map(SegmentId);
    let offset = || 0..1_u64 << 40;
    prop_oneof![
        3 => (segment(), offset(), 0..2 * CHUNK, 0..2 * CHUNK, any::<u32>()).prop_map(
            move |(segment, start, before, after, crc)| {
                let covered = before + length + after;
                let crcs = (0..covered.div_ceil(CHUNK)).map(|k| crc.wrapping_mul(k as u32 + 1)).collect();
                Place::Pack { segment, offset: start + before, check: Check { start, covered, crcs } }
            }
        ),
        1 => (segment(), offset()).prop_map(|(segment, offset)| Place::File { segment, offset }),
        1 => (number(), offset()).prop_map(|(slot, offset)| Place::Inline { slot, offset }),
    ]
}

fn extents(most: usize) -> impl Strategy<Value = Vec<Extent>> {
    let one = (prop_oneof![Just(0), 0..1_u64 << 30], prop_oneof![0..20_000_u64, 0..300_000_u64])
        .prop_flat_map(|(gap, length)| (Just(gap), Just(length), place(length)));
    vec(one, 0..most).prop_map(|list| {
        let mut end = 0;
        list.into_iter()
            .map(|(gap, length, place)| {
                let file_offset = end + gap;
                end = file_offset + length;
                Extent { file_offset, length, place }
            })
            .collect()
    })
}

fn inode() -> impl Strategy<Value = Inode> {
    let content = prop_oneof![
        Just(Content::Empty),
        Just(Content::Regions),
        vec(any::<u8>(), 0..40).prop_map(Content::Target),
        extents(5).prop_map(Content::Extents),
    ];
    let owner = (kind(), 0..0o10000_u16, any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), number());
    (owner, (time(), time(), time(), time()), number(), number(), content).prop_map(
        |(
            (kind, mode, uid, gid, nlink, rdev, size),
            (atime, mtime, ctime, btime),
            parent,
            quota_root,
            content,
        )| Inode {
            kind,
            mode,
            uid,
            gid,
            nlink,
            rdev,
            size,
            atime,
            mtime,
            ctime,
            btime,
            parent: Ino(parent),
            quota_root: Ino(quota_root),
            content,
        },
    )
}

fn session() -> impl Strategy<Value = Session> {
    let state = prop::sample::select(&[SessionState::Alive, SessionState::Ended, SessionState::Dead][..]);
    (state, any::<u32>(), any::<u32>(), "\\PC{0,12}", time(), number()).prop_map(
        |(state, node, pid, host, started, last_op)| Session {
            state,
            node,
            pid,
            host,
            started,
            last_op: OpId(last_op),
        },
    )
}

fn seal() -> impl Strategy<Value = Seal> {
    (number(), vec(any::<u8>(), 0..30), number(), time(), number(), number()).prop_map(
        |(version, path, root, created, samples, bytes)| Seal {
            version: Version(version),
            path,
            root: Ino(root),
            created,
            samples,
            bytes,
        },
    )
}

// ---- damage ----

#[derive(Clone, Debug)]
enum Damage {
    Set(Index, u8),
    Flip(Index, u8),
    Cut(Index),
    Remove(Index),
    Insert(Index, u8),
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let one = prop_oneof![
        (any::<Index>(), prop_oneof![any::<u8>(), Just(0xFF), Just(0x80), Just(0)])
            .prop_map(|(at, byte)| Damage::Set(at, byte)),
        (any::<Index>(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        any::<Index>().prop_map(Damage::Cut),
        any::<Index>().prop_map(Damage::Remove),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
    ];
    vec(one, 1..4)
}

fn damaged(mut bytes: Vec<u8>, damage: &[Damage]) -> Vec<u8> {
    for one in damage {
        if bytes.is_empty() {
            break;
        }
        let count = bytes.len();
        match one {
            Damage::Set(at, byte) => bytes[at.index(count)] = *byte,
            Damage::Flip(at, bit) => bytes[at.index(count)] ^= 1 << bit,
            Damage::Cut(at) => bytes.truncate(at.index(count)),
            Damage::Remove(at) => drop(bytes.remove(at.index(count))),
            Damage::Insert(at, byte) => bytes.insert(at.index(count + 1), *byte),
        }
    }
    bytes
}

// ---- records ----

/// Accepted bytes are the bytes of the value that they gave; others are `Corrupt`, with a reason.
fn decodes_or_says_why<T>(bytes: &[u8], decode: fn(&[u8]) -> Result<T>, encode: fn(&T) -> Vec<u8>) {
    match decode(bytes) {
        Ok(value) => assert_eq!(encode(&value), bytes),
        Err(error) => {
            assert_eq!(error.kind(), Kind::Corrupt);
            assert!(error.message().contains("record of"), "{error}");
        }
    }
}

fn comes_back<T: PartialEq + Debug>(
    value: &T,
    decode: fn(&[u8]) -> Result<T>,
    encode: fn(&T) -> Vec<u8>,
    damage: &[Damage],
) {
    let bytes = encode(value);
    assert_eq!(&decode(&bytes).unwrap(), value);
    decodes_or_says_why(&damaged(bytes, damage), decode, encode);
}

#[allow(clippy::ptr_arg, reason = "the type that `comes_back` passes")]
fn encode_extent_list(extents: &Vec<Extent>) -> Vec<u8> {
    encode_extents(extents)
}

fn encode_one_number(number: &u64) -> Vec<u8> {
    encode_number(*number)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn inodes_come_back(inode in inode(), damage in damage()) {
        comes_back(&inode, Inode::decode, Inode::encode, &damage);
    }

    #[test]
    fn extents_come_back(extents in extents(30), damage in damage()) {
        comes_back(&extents, decode_extents, encode_extent_list, &damage);
    }

    #[test]
    fn small_records_come_back(
        kind in kind(), a in number(), b in any::<i64>(), c in any::<i64>(), id in any::<u128>(),
        time in time(), session in session(), seal in seal(), damage in damage(),
    ) {
        let dentry = Dentry { ino: Ino(a), kind };
        comes_back(&dentry, Dentry::decode, Dentry::encode, &damage);
        let delta = DirDelta { entries: b, subdirectories: c, changed: time };
        comes_back(&delta, DirDelta::decode, DirDelta::encode, &damage);
        comes_back(&session, Session::decode, Session::encode, &damage);
        let kind = if b < 0 { SegmentKind::Pack } else { SegmentKind::File };
        let pending = Pending { session: SessionId(id), kind };
        comes_back(&pending, Pending::decode, Pending::encode, &damage);
        comes_back(&seal, Seal::decode, Seal::encode, &damage);
        let volume = VolumeRecord { volume: VolumeId(id), format: c as u32, created: time };
        comes_back(&volume, VolumeRecord::decode, VolumeRecord::encode, &damage);
        comes_back(&a, decode_number, encode_one_number, &damage);
    }

    #[test]
    fn any_bytes_decode_or_say_why(mut bytes in vec(any::<u8>(), 0..80), layout in any::<bool>()) {
        if layout && let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        decodes_or_says_why(&bytes, Inode::decode, Inode::encode);
        decodes_or_says_why(&bytes, decode_extents, encode_extent_list);
        decodes_or_says_why(&bytes, Dentry::decode, Dentry::encode);
        decodes_or_says_why(&bytes, DirDelta::decode, DirDelta::encode);
        decodes_or_says_why(&bytes, Session::decode, Session::encode);
        decodes_or_says_why(&bytes, Pending::decode, Pending::encode);
        decodes_or_says_why(&bytes, Seal::decode, Seal::encode);
        decodes_or_says_why(&bytes, VolumeRecord::decode, VolumeRecord::encode);
        decodes_or_says_why(&bytes, decode_number, encode_one_number);
    }

    #[test]
    fn any_bytes_are_a_message_or_invalid(bytes in vec(any::<u8>(), 0..200), damage in damage(), pick in any::<Index>()) {
        let known = [
            message::encode_meta(&Request::Rename {
                from: b"/a".to_vec().into(), to: b"/b".to_vec().into(), noreplace: true, exchange: false,
            }).unwrap(),
            message::encode_meta(&Request::Put { entries: vec![], parents: true, durable: false }).unwrap(),
            message::encode_meta(&StreamCommand::Release { slot: 3 }).unwrap(),
            message::encode_meta(&Answer::Ok(message::Written { offset: 1, bytes: 2 })).unwrap(),
        ];
        for bytes in [&bytes, &damaged(pick.get(&known).clone(), &damage)] {
            let errors = [
                message::decode_meta::<Request>(bytes).err(),
                message::decode_meta::<StreamCommand>(bytes).err(),
                message::decode_meta::<StreamEvent>(bytes).err(),
                message::decode_meta::<Answer<message::Written>>(bytes).err(),
            ];
            for error in errors.into_iter().flatten() {
                prop_assert_eq!(error.kind(), Kind::Invalid);
            }
        }
    }
}

fn small_file() -> Inode {
    let now = Timestamp(1_760_000_000_123_456_789);
    let check = Check { start: 44_040_192, covered: 10_240, crcs: [0xDEAD_BEEF].into_iter().collect() };
    let place = Place::Pack { segment: SegmentId(1 << 100), offset: 44_040_192, check };
    Inode {
        kind: FileKind::File,
        mode: 0o644,
        uid: 1000,
        gid: 1000,
        nlink: 1,
        rdev: 0,
        size: 10_240,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        parent: Ino(123_456),
        quota_root: Ino::ROOT,
        content: Content::Extents(vec![Extent { file_offset: 0, length: 10_240, place }]),
    }
}

#[test]
fn a_small_file_takes_few_bytes() {
    let bytes = small_file().encode();
    assert!(bytes.len() <= 64, "{} bytes", bytes.len());
}

#[test]
fn damaged_records_say_what_is_wrong() {
    let good = small_file().encode();
    let error = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Inode::decode(&bytes).unwrap_err().message().to_owned()
    };
    assert!(error(0, 9).contains("layout 9"), "{}", error(0, 9));
    assert!(error(2, 0).contains("of no kind"), "{}", error(2, 0));
    assert!(error(3, 7).contains("7 is no content"), "{}", error(3, 7));
    assert!(Inode::decode(&[]).unwrap_err().message().contains("of 0 bytes, at byte 0"));
    let longer = [&good[..], &[0]].concat();
    assert!(Inode::decode(&longer).unwrap_err().message().contains("more bytes than"));

    let unordered = |first: (u64, u64), second: (u64, u64)| {
        let place = Place::Inline { slot: 1, offset: 0 };
        let one = |(file_offset, length)| Extent { file_offset, length, place: place.clone() };
        decode_extents(&encode_extents(&[one(first), one(second)])).unwrap_err().message().to_owned()
    };
    assert!(unordered((0, 100), (99, 5)).contains("begins before 100"));
    assert!(unordered((0, 1), (u64::MAX, 1)).contains("beyond 64 bits"));

    let check = |offset, start, covered, crcs: &[u32]| {
        let check = Check { start, covered, crcs: crcs.iter().copied().collect() };
        let place = Place::Pack { segment: SegmentId(1), offset, check };
        decode_extents(&encode_extents(&[Extent { file_offset: 0, length: 10, place }]))
            .map(drop)
            .map_err(|error| error.message().to_owned())
    };
    assert_eq!(check(4096, 0, 16_384, &[1]), Ok(()));
    assert!(check(4096, 0, 16_384, &[1, 2]).unwrap_err().contains("2 checksums for 16384 bytes"));
    assert!(check(4096, 0, 65_537, &[1]).unwrap_err().contains("1 checksums for 65537 bytes"));
    assert!(check(16_380, 0, 16_384, &[1]).unwrap_err().contains("ends after its checksums"));
}

#[test]
fn kinds_are_those_of_linux() {
    for kind in FileKind::ALL {
        assert_eq!(FileKind::of_st_mode(kind.st_type() | 0o7777), Some(kind));
        assert_eq!(FileKind::from(message::Kind::from(kind)), kind);
    }
    assert_eq!(FileKind::Directory.st_type(), 0o040_000);
    assert_eq!(FileKind::File.st_type() >> 12, 8);
    assert_eq!(FileKind::of_st_mode(0o644), None);
}

// ---- manifests ----

#[derive(Clone, Debug)]
struct File {
    path: Vec<u8>,
    directory: usize,
    size: u64,
    mtime: i64,
    mode: u16,
    owner: u32,
    extents: Vec<Extent>,
    inline: Vec<Vec<u8>>,
}

#[derive(Clone, Debug)]
struct Tree {
    /// (path, parent)
    directories: Vec<(Vec<u8>, usize)>,
    files: Vec<File>,
}

fn tree() -> impl Strategy<Value = Tree> {
    const NAMES: [&[u8]; 8] = [b"a", b"a.b", b"a-", b"b", b"\xFF\xFE", b"train", b"0", b"z z"];
    let path = vec(prop::sample::select(&NAMES[..]), 1..4);
    let file = (path, extents(4), 0..100_u64, any::<i64>(), 0..0o10000_u16, any::<u32>());
    vec(file, 0..24).prop_map(|list| {
        let mut list: Vec<_> = list;
        // The order of components is the order of the tree.
        list.sort_by(|a, b| a.0.cmp(&b.0));
        list.dedup_by(|b, a| a.0 == b.0);
        let folders: BTreeSet<Vec<&[u8]>> =
            list.iter().flat_map(|file| (1..file.0.len()).map(|depth| file.0[..depth].to_vec())).collect();
        let mut directories = vec![(Vec::new(), 0)];
        let mut files = Vec::new();
        for (path, mut extents, more, mtime, mode, owner) in list {
            if folders.contains(&path) {
                continue;
            }
            let mut directory = 0;
            for depth in 1..path.len() {
                let folder = path[..depth].join(&b'/');
                directory = directories.iter().position(|known| known.0 == folder).unwrap_or_else(|| {
                    directories.push((folder, directory));
                    directories.len() - 1
                });
            }
            let mut inline = Vec::new();
            for extent in &mut extents {
                // One segment is of one kind.
                match &mut extent.place {
                    Place::Pack { segment, .. } => segment.0 = (segment.0 % 3) << 90,
                    Place::File { segment, .. } => segment.0 = segment.0 % 3 + 7,
                    Place::Inline { slot, .. } => inline.push(vec![*slot as u8; extent.length as usize]),
                }
            }
            let size = extents.last().map_or(0, Extent::end) + more;
            let path = path.join(&b'/');
            files.push(File { path, directory, size, mtime, mode, owner, extents, inline });
        }
        Tree { directories, files }
    })
}

const OF: manifest::Seal =
    manifest::Seal { seal: SealId(77 << 64), version: Version(5), created: Timestamp(-1) };

fn write(tree: &Tree) -> Result<(Vec<u8>, manifest::Written)> {
    let mut writer = ManifestWriter::new(b"data/set", Cursor::new(Vec::new()))?;
    let mut added = 0;
    for (k, file) in tree.files.iter().enumerate() {
        while added <= file.directory {
            let (path, parent) = &tree.directories[added];
            writer.directory(path, *parent as u32, 0o755, added as u32, 9)?;
            added += 1;
        }
        let inline: Vec<&[u8]> = file.inline.iter().map(Vec::as_slice).collect();
        writer.sample(Sample {
            directory: file.directory as u32,
            path: &file.path,
            size: file.size,
            mtime: Timestamp(file.mtime),
            mode: file.mode,
            uid: file.owner,
            gid: !file.owner,
            ino: Ino(k as u64 + 100),
            extents: &file.extents,
            inline: &inline,
        })?;
    }
    if added == 0 {
        writer.directory(b"", 0, 0o755, 0, 9)?;
    }
    let mut bytes = Vec::new();
    let written = writer.finish(OF, &mut bytes)?;
    Ok((bytes, written))
}

fn same_extents(found: manifest::Extents<'_, &[u8]>, file: &File) {
    assert_eq!(found.len(), file.extents.len());
    let mut inline = file.inline.iter();
    for (found, extent) in found.zip(&file.extents) {
        assert_eq!((found.file_offset, found.length), (extent.file_offset, extent.length));
        match (found.place, &extent.place) {
            (
                manifest::Place::Pack { segment, offset, check },
                Place::Pack { segment: s, offset: o, check: c },
            ) => {
                assert_eq!((segment, offset, &check.to_record()), (*s, *o, c));
            }
            (manifest::Place::File { segment, offset }, Place::File { segment: s, offset: o }) => {
                assert_eq!((segment, offset), (*s, *o));
            }
            (manifest::Place::Inline { bytes, crc }, Place::Inline { .. }) => {
                assert_eq!(bytes, inline.next().unwrap());
                assert_eq!(crc, crc32c(bytes));
            }
            (found, extent) => panic!("{found:?} is not {extent:?}"),
        }
    }
}

/// Touches everything that there is.
fn read_all(manifest: &Manifest<&[u8]>) -> u64 {
    let mut sum = manifest.bytes() ^ manifest.version().0 ^ manifest.created().0 as u64;
    sum ^= manifest.seal().0 as u64 ^ manifest.root_path().len() as u64 ^ manifest.segments().len() as u64;
    sum ^= manifest.segments().map(|(segment, _)| segment.0 as u64).fold(0, u64::wrapping_add);
    for row in 0..manifest.directories() {
        let directory = manifest.dir(row);
        sum ^= directory.path.len() as u64 ^ u64::from(directory.parent ^ directory.uid ^ directory.gid);
        assert!(directory.parent < row.max(1));
    }
    for row in 0..manifest.samples() {
        sum ^= manifest.size(row) ^ manifest.path(row).len() as u64 ^ manifest.ino(row).0;
        sum ^= manifest.mtime(row).0 as u64 ^ u64::from(manifest.mode(row));
        sum ^= u64::from(manifest.uid(row) ^ manifest.gid(row));
        sum ^= manifest.dir(manifest.directory(row)).path.len() as u64;
        for extent in manifest.extents(row) {
            assert!(extent.file_offset + extent.length <= manifest.size(row));
            sum ^= match extent.place {
                manifest::Place::Inline { bytes, crc } => {
                    assert_eq!(bytes.len() as u64, extent.length);
                    u64::from(crc)
                }
                manifest::Place::File { offset, .. } => offset + extent.length,
                manifest::Place::Pack { offset, check, .. } => {
                    assert!(check.start <= offset && offset + extent.length <= check.start + check.covered);
                    assert_eq!(check.crcs().len() as u64, check.covered.div_ceil(CHUNK));
                    check.crcs().map(u64::from).sum()
                }
            };
        }
    }
    sum
}

fn mend_header(bytes: &mut [u8]) {
    if bytes.len() >= 4096 {
        let crc = crc32c(&bytes[..4092]);
        bytes[4092..4096].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Offset, bytes an element, elements.
fn column(bytes: &[u8], name: &str) -> (usize, usize, usize) {
    let entry = bytes[128..4092]
        .chunks_exact(40)
        .find(|entry| entry.starts_with(name.as_bytes()) && entry[name.len()] == 0);
    let entry = entry.unwrap();
    let u64_at = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap()) as usize;
    (u64_at(24), [0, 1, 4, 8, 8][entry[16] as usize], u64_at(32))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn manifests_come_back(tree in tree()) {
        let (bytes, written) = write(&tree).unwrap();
        prop_assert_eq!(written.manifest_bytes, bytes.len() as u64);
        let manifest = Manifest::open(&bytes[..]).unwrap();
        manifest.verify().unwrap();
        prop_assert_eq!((manifest.seal(), manifest.version(), manifest.created()), (OF.seal, OF.version, OF.created));
        prop_assert_eq!(manifest.root_path(), b"data/set");
        prop_assert_eq!(manifest.samples(), tree.files.len() as u64);
        prop_assert_eq!(manifest.bytes(), tree.files.iter().map(|file| file.size).sum::<u64>());
        prop_assert_eq!((written.samples, written.bytes), (manifest.samples(), manifest.bytes()));
        for (row, (path, parent)) in tree.directories.iter().enumerate() {
            if !tree.files.is_empty() {
                let found = manifest.dir(row as u32);
                prop_assert_eq!((found.path, found.parent as usize), (&path[..], *parent));
                prop_assert_eq!((found.mode, found.uid, found.gid), (0o755, row as u32, 9));
            }
        }
        for (row, file) in tree.files.iter().enumerate() {
            let row = row as u64;
            prop_assert_eq!(manifest.path(row), &file.path[..]);
            prop_assert_eq!(manifest.directory(row) as usize, file.directory);
            prop_assert_eq!((manifest.size(row), manifest.mtime(row).0), (file.size, file.mtime));
            prop_assert_eq!((manifest.mode(row), manifest.uid(row)), (file.mode, file.owner));
            prop_assert_eq!((manifest.gid(row), manifest.ino(row)), (!file.owner, Ino(row + 100)));
            same_extents(manifest.extents(row), file);
        }
        read_all(&manifest);
    }

    /// The worst case: damage under a header whose checksum is right.
    #[test]
    fn damaged_manifests_are_refused_or_readable(tree in tree(), damage in damage(), elements in vec((any::<Index>(), any::<Index>(), number()), 0..3)) {
        let (mut bytes, _) = write(&tree).unwrap();
        for (which, element, value) in elements {
            let (offset, width, count) = {
                let entry = 128 + which.index(28) * 40;
                let name = &bytes[entry..entry + 16];
                let name = std::str::from_utf8(name).unwrap().trim_end_matches('\0').to_owned();
                column(&bytes, &name)
            };
            if count > 0 {
                let at = offset + element.index(count) * width;
                bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
        }
        if let Ok(manifest) = Manifest::open(&bytes[..]) {
            read_all(&manifest);
        }
        for in_header in [true, false] {
            let mut bytes = if in_header {
                [damaged(bytes[..1300].to_vec(), &damage), bytes[1300..].to_vec()].concat()
            } else {
                damaged(bytes.clone(), &damage)
            };
            mend_header(&mut bytes);
            match Manifest::open(&bytes[..]) {
                Ok(manifest) => drop(read_all(&manifest)),
                Err(error) => prop_assert!(matches!(error.kind(), Kind::Corrupt | Kind::Invalid)),
            }
        }
    }

    #[test]
    fn any_bytes_are_no_manifest(bytes in vec(any::<u8>(), 0..9000), head in any::<bool>()) {
        let mut bytes = bytes;
        if head && bytes.len() >= 4096 {
            bytes[..12].copy_from_slice(b"HRMANIF\x01\x01\0\0\0");
            let count = bytes.len() as u64;
            bytes[64..72].copy_from_slice(&count.to_le_bytes());
            mend_header(&mut bytes);
        }
        prop_assert_eq!(Manifest::open(&bytes[..]).unwrap_err().kind(), Kind::Corrupt);
    }
}

/// Three files: "a/x" in a pack (two chunks), "a/y" inline, "b" in a file segment.
fn three() -> Tree {
    let file = |path: &[u8], directory, size, place, inline| File {
        path: path.to_vec(),
        directory,
        size,
        mtime: 3,
        mode: 0o640,
        owner: 12,
        extents: vec![Extent { file_offset: 0, length: size, place }],
        inline,
    };
    let check =
        Check { start: 0, covered: 100_000, crcs: (1..=100_000_u64.div_ceil(CHUNK) as u32).collect() };
    Tree {
        directories: vec![(b"".to_vec(), 0), (b"a".to_vec(), 0)],
        files: vec![
            file(b"a/x", 1, 90_000, Place::Pack { segment: SegmentId(5), offset: 4096, check }, vec![]),
            file(b"a/y", 1, 5, Place::Inline { slot: 0, offset: 0 }, vec![b"hello".to_vec()]),
            file(b"b", 0, 1 << 25, Place::File { segment: SegmentId(6), offset: 0 }, vec![]),
        ],
    }
}

#[test]
fn what_a_reader_relies_on_is_checked_at_open() {
    let (good, _) = write(&three()).unwrap();
    Manifest::open(&good[..]).unwrap();
    for (name, element, value, why) in [
        ("path_start", 1, 99, "path_start does not rise"),
        ("path_start", 0, 1, "path_start does not rise"),
        ("path_start", 3, 6, "path_start does not rise from 0 to 7"),
        ("extent_start", 1, 9, "extent_start does not rise"),
        ("dir_path_start", 2, 9, "dir_path_start does not rise"),
        ("x_crc_start", 1, 9, "x_crc_start does not rise"),
        ("directory", 0, 2, "in directory 2 of 2"),
        ("dir_parent", 0, 1, "directory 0 has parent 1"),
        ("dir_parent", 1, 1, "directory 1 has parent 1"),
        ("mode", 0, 0o10_644, "mode holds"),
        ("dir_mode", 1, 0o40_755, "dir_mode holds"),
        ("size", 0, 90_001, "bytes, not"),
        ("size", 0, u64::MAX, "bytes, not"),
        ("x_file_offset", 0, 1, "extent 0 (90000 bytes at 1) of sample 0"),
        ("x_file_offset", 2, u64::MAX, "of sample 2"),
        ("x_length", 1, 6, "of sample 1"),
        ("x_segment", 0, 2, "segment row 2 of 2"),
        ("x_segment", 0, 1, "extent 0"),
        ("x_segment", 1, 1, "extent 1"),
        ("x_segment", 2, 0, "extent 2"),
        ("x_segment", 2, 0xFFFF_FFFF, "extent 2"),
        ("x_offset", 0, 10_001, "extent 0"),
        ("x_offset", 0, u64::MAX, "extent 0"),
        ("x_offset", 1, 1, "extent 1"),
        ("x_offset", 2, u64::MAX, "extent 2"),
        ("x_check_start", 0, 4097, "extent 0"),
        ("x_covered", 0, 94_095, "extent 0"),
        ("x_covered", 0, 140_000, "7 checksums for 140000"),
        ("seg_kind", 0, 3, "kind 3"),
        ("seg_kind", 0, 2, "extent 0"),
    ] {
        let mut bytes = good.clone();
        let (offset, width, count) = column(&bytes, name);
        assert!(element < count, "{name}");
        let at = offset + element * width;
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        let error = Manifest::open(&bytes[..]).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.message().contains(why), "{name}[{element}] = {value}: {error}");
    }
}

#[test]
fn damaged_headers_are_refused() {
    let (good, _) = write(&three()).unwrap();
    let refused = |mend: bool, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        if mend {
            mend_header(&mut bytes);
        }
        Manifest::open(&bytes[..]).unwrap_err()
    };
    let entry = |name: &str| {
        128 + 40
            * good[128..4092].chunks_exact(40).position(|entry| entry.starts_with(name.as_bytes())).unwrap()
    };
    for (change, why) in [
        (&(|bytes: &mut Vec<u8>| bytes[0] = b'X') as &dyn Fn(&mut Vec<u8>), "do not begin as a manifest"),
        (&|bytes| bytes.truncate(4095), "4095 bytes do not begin"),
        (&|bytes| bytes.truncate(bytes.len() - 1), "holds"),
        (&|bytes| bytes.push(0), "holds"),
        (&|bytes| bytes[12] = 100, "100 columns do not fit"),
        (&|bytes| bytes[12] = 27, "column root_path is missing"),
        (&|bytes| bytes[16] = 4, "3 elements in directory, not 4"),
        (&|bytes| bytes[16..24].fill(0xFF), "elements in"),
        (&|bytes| bytes[72] = 9, "8 elements in root_path, not 9"),
        (&|bytes| bytes[entry("size") + 16] = 4, "column size is of type 4, not 3"),
        (&|bytes| bytes[entry("size") + 24] ^= 1, "column size"),
        (&|bytes| bytes[entry("size") + 26] = 0x7F, "column size"),
        (&|bytes| bytes[entry("size") + 39] = 0xFF, "column size"),
        (&|bytes| bytes[entry("size") + 24..entry("size") + 32].fill(0), "column size"),
        (
            &|bytes| bytes[entry("crcs")..entry("crcs") + 4].copy_from_slice(b"uid\0"),
            "column uid comes twice",
        ),
    ] {
        let error = refused(true, change);
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.message().contains(why), "{error}, not: {why}");
    }
    assert!(refused(false, &|bytes| bytes[130] ^= 1).message().contains("header has checksum"));
    let newer = refused(true, &|bytes| bytes[8] = 2);
    assert_eq!(newer.kind(), Kind::Invalid);
    assert!(newer.message().contains("format 2; this engine reads format 1: upgrade"), "{newer}");
}

#[test]
fn verify_names_the_damaged_column() {
    let (good, _) = write(&three()).unwrap();
    for name in ["path_bytes", "mtime", "uid", "ino", "crcs", "seg_id", "inline_bytes", "root_path"] {
        let mut bytes = good.clone();
        bytes[column(&good, name).0] ^= 0x10;
        let error = Manifest::open(&bytes[..]).unwrap().verify().unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.message().contains(&format!("column {name} ")), "{error}");
    }
}

#[test]
fn columns_of_a_later_engine_are_left_alone() {
    let (mut bytes, _) = write(&three()).unwrap();
    let at = 128 + 28 * 40;
    bytes[at..at + 5].copy_from_slice(b"later");
    bytes[at + 16] = 77;
    bytes[12] = 29;
    mend_header(&mut bytes);
    read_all(&Manifest::open(&bytes[..]).unwrap());
}

#[test]
fn writers_refuse_what_readers_would() {
    let refused = |change: &dyn Fn(&mut Tree), why: &str| {
        let mut tree = three();
        change(&mut tree);
        let error = write(&tree).map(drop).unwrap_err();
        assert!(error.message().contains(why), "{error}");
    };
    refused(&|tree| tree.files.swap(0, 1), "a/x: comes after a/y");
    refused(&|tree| tree.files[1].path = b"a/x".to_vec(), "a/x: comes after a/x");
    refused(&|tree| tree.files[1].path = b"c".to_vec(), "b: comes after c");
    refused(&|tree| tree.directories[1].1 = 1, "has parent 1");
    refused(&|tree| tree.directories[0].0 = b"a".to_vec(), "must be the sealed root");
    refused(&|tree| tree.files[0].size -= 1, "beyond its place");
    refused(&|tree| tree.files[1].inline[0].push(0), "inline bytes given: Some(6)");
    refused(&|tree| tree.files[1].inline.clear(), "inline bytes given: None");
    refused(&|tree| tree.files[0].inline.push(vec![]), "more inline bytes");
    refused(&|tree| tree.files[0].size = u64::MAX, "more than 2^64");
    refused(
        &|tree| {
            let Place::Pack { check, .. } = &mut tree.files[0].extents[0].place else { unreachable!() };
            check.crcs.pop();
        },
        "checksums do not cover",
    );
    refused(
        &|tree| {
            let Place::File { segment, .. } = &mut tree.files[2].extents[0].place else { unreachable!() };
            *segment = SegmentId(5);
        },
        "as Pack and as File",
    );
    let mut writer = ManifestWriter::new(b"", Cursor::new(Vec::new())).unwrap();
    let sample = Sample {
        directory: 0,
        path: b"x",
        size: 0,
        mtime: Timestamp(0),
        mode: 0,
        uid: 0,
        gid: 0,
        ino: Ino(2),
        extents: &[],
        inline: &[],
    };
    assert!(writer.sample(sample).unwrap_err().message().contains("has not been added"));
    assert!(writer.finish(OF, &mut Vec::new()).unwrap_err().message().contains("root was not added"));
}

/// More than a block of every column, so that all of them spill.
#[test]
fn large_manifests_spill_and_come_back() {
    let count = 20_000_u64;
    let mut writer = ManifestWriter::new(b"", tempfile::tempfile().unwrap()).unwrap();
    writer.directory(b"", 0, 0o755, 0, 0).unwrap();
    let extent = |k: u64| {
        let check =
            Check { start: k * 8192, covered: 70_000, crcs: [k as u32, 7, 8, 9, 10].into_iter().collect() };
        let place = Place::Pack { segment: SegmentId(u128::from(k / 1000)), offset: k * 8192, check };
        Extent { file_offset: 0, length: 70_000, place }
    };
    for k in 0..count {
        let folder = format!("{:05}", k / 10);
        if k % 10 == 0 {
            let row = writer.directory(folder.as_bytes(), 0, 0o755, 0, 0).unwrap();
            assert_eq!(u64::from(row), k / 10 + 1);
        }
        let tail = Extent { file_offset: 70_000, length: 20, place: Place::Inline { slot: 0, offset: 0 } };
        let tail_bytes = [k as u8; 20];
        writer
            .sample(Sample {
                directory: (k / 10) as u32 + 1,
                path: format!("{folder}/{k:06}.jpg").as_bytes(),
                size: 70_020,
                mtime: Timestamp(k as i64),
                mode: 0o644,
                uid: 1,
                gid: 2,
                ino: Ino(k + 10),
                extents: &[extent(k), tail],
                inline: &[&tail_bytes],
            })
            .unwrap();
    }
    let mut bytes = Vec::new();
    let written = writer.finish(OF, &mut bytes).unwrap();
    assert_eq!((written.samples, written.bytes), (count, count * 70_020));
    let manifest = Manifest::open(&bytes[..]).unwrap();
    manifest.verify().unwrap();
    assert_eq!(manifest.segments().len(), 20);
    assert_eq!(manifest.directories(), 2001);
    for k in (0..count).step_by(7) {
        assert_eq!(manifest.path(k), format!("{:05}/{k:06}.jpg", k / 10).as_bytes());
        assert_eq!(manifest.mtime(k).0, k as i64);
        let found: Vec<_> = manifest.extents(k).collect();
        let manifest::Place::Pack { segment, offset, check } = found[0].place else { panic!("{found:?}") };
        assert_eq!(Place::Pack { segment, offset, check: check.to_record() }, extent(k).place);
        assert_eq!(
            found[1].place,
            manifest::Place::Inline { bytes: &[k as u8; 20], crc: crc32c(&[k as u8; 20]) }
        );
    }
}
