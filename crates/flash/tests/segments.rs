//! What segments promise, seen through the crate's public face and the files it leaves.

#![allow(clippy::unwrap_used, reason = "a test ends at the first thing that is not as it should be")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use headrace_base::time::{Timestamp, monotonic_now};
use headrace_base::{Error, Ino, Kind, SegmentId, thread};
use headrace_flash::{Flash, PackRecord, Placed, Recovered, is_missing};
use headrace_format::CHUNK;
use headrace_format::record::{Check, SegmentKind};
use headrace_format::segment::{FOOTER_END_BYTES, INDEX_ENTRY_BYTES, Origin, PACK_HEADER_BYTES};
use tempfile::TempDir;

const CHUNK_BYTES: usize = CHUNK as usize;

struct Place {
    folder: TempDir,
    flash: Arc<Flash>,
}

impl Place {
    fn new() -> Place {
        Place::on(tempfile::tempdir().unwrap())
    }

    /// In memory where there is such a place: for tests that sync thousands of times.
    fn quick() -> Place {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        Place::on(folder.unwrap())
    }

    fn on(folder: TempDir) -> Place {
        let flash = Flash::open(&folder.path().join("segments"), 16).unwrap();
        Place { folder, flash }
    }

    /// As after a restart: nothing cached, nobody writing.
    fn reopen(&mut self) {
        self.flash = Flash::open(&self.folder.path().join("segments"), 16).unwrap();
    }

    fn path(&self, segment: SegmentId, extension: &str) -> PathBuf {
        path_in(&self.folder.path().join("segments"), segment, extension)
    }
}

fn path_in(folder: &Path, segment: SegmentId, extension: &str) -> PathBuf {
    let name = segment.to_string();
    folder.join(&name[24..]).join(format!("{name}.{extension}"))
}

fn origin(path: &str, length: usize) -> Origin {
    Origin {
        ino: Ino(42),
        path: path.into(),
        mode: 0o640,
        uid: 1,
        gid: 2,
        mtime: Timestamp(1_700_000_000_000_000_000),
        file_offset: 0,
        file_bytes: length as u64,
    }
}

fn payload(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + at / 251 + seed * 31) as u8).collect()
}

fn record<'a>(path: &str, bytes: &'a [u8]) -> PackRecord<'a> {
    PackRecord { origin: origin(path, bytes.len()), pieces: vec![bytes] }
}

fn read_whole(flash: &Flash, segment: SegmentId, placed: &Placed) -> Result<Vec<u8>, Error> {
    let mut out = vec![0xAA; placed.length as usize];
    flash.read_pack(segment, placed.offset, &placed.check, &mut out)?;
    Ok(out)
}

fn read_file(flash: &Flash, segment: SegmentId, offset: u64, length: usize) -> Result<Vec<u8>, Error> {
    let mut out = vec![0xAA; length];
    flash.read_file(segment, offset, &mut out)?;
    Ok(out)
}

#[track_caller]
fn assert_corrupt(error: &Error, names: &[&str]) {
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    for name in names {
        assert!(error.message().contains(name), "{name:?} is not named: {error}");
    }
}

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_was_appended_reads_back_before_and_after_close_and_reopen() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let lengths =
        [0, 1, 64, 2047, 2048, 4096, 10 * 1024, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5, 2 << 20];
    let payloads: Vec<_> = lengths.iter().enumerate().map(|(seed, length)| payload(*length, seed)).collect();
    let mut placed = Vec::new();
    // All in one frame, then each in its own, then in pieces that meet anywhere.
    let all: Vec<_> = payloads.iter().map(|payload| record("all/in one", payload)).collect();
    placed.extend(writer.append(&all).unwrap());
    for payload in &payloads {
        placed.extend(writer.append(&[record("each", payload)]).unwrap());
    }
    for payload in &payloads {
        let pieces = payload.chunks(5000.max(payload.len() / 3)).collect();
        let record = PackRecord { origin: origin("pieces", payload.len()), pieces };
        placed.extend(writer.append(&[record]).unwrap());
    }
    assert_eq!(writer.append(&[]).unwrap(), []);
    let check = |place: &Place, when: &str| {
        for (at, placed) in placed.iter().enumerate() {
            let expected = &payloads[at % payloads.len()];
            assert_eq!(&read_whole(&place.flash, segment, placed).unwrap(), expected, "{when}, record {at}");
        }
        let records = place.flash.records(segment).unwrap();
        let places: Vec<_> = records.iter().map(|(_, placed)| placed.clone()).collect();
        assert_eq!(places, placed, "{when}");
        assert_eq!(records[12].0, origin("each", 1));
    };
    check(&place, "open");
    writer.sync().unwrap();
    check(&place, "synced");
    writer.close().unwrap();
    check(&place, "closed");
    place.reopen();
    check(&place, "reopened");
}

#[test]
fn any_range_of_a_record_reads_right() {
    let place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let bytes = payload(3 * CHUNK_BYTES + 777, 1);
    let neighbour = payload(9000, 2);
    let placed = writer.append(&[record("n", &neighbour), record("a", &bytes)]).unwrap().remove(1);
    let edges = [0, 1, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES];
    let edges: Vec<_> = edges.into_iter().chain([bytes.len() - 1, bytes.len()]).collect();
    for from in &edges {
        for to in edges.iter().filter(|to| *to >= from) {
            let mut out = vec![0xAA; to - from];
            place.flash.read_pack(segment, placed.offset + *from as u64, &placed.check, &mut out).unwrap();
            assert!(out == bytes[*from..*to], "{from}..{to}");
        }
    }
    // An extent that lost its front keeps only the checksums of the chunks it touches.
    let part = Check {
        start: placed.offset + 2 * CHUNK,
        covered: CHUNK + 777,
        crcs: placed.check.crcs[2..].iter().copied().collect(),
    };
    let mut out = vec![0; 1000];
    place.flash.read_pack(segment, part.start + 500, &part, &mut out).unwrap();
    assert!(out == bytes[2 * CHUNK_BYTES + 500..][..1000]);
    // Beyond what the checksums cover nothing is read, whatever lies there.
    for offset in [part.start - 1, part.start + part.covered - 999, u64::MAX] {
        assert_eq!(
            place.flash.read_pack(segment, offset, &part, &mut out).unwrap_err().kind(),
            Kind::Internal
        );
    }
}

#[test]
fn a_closed_pack_of_many_small_files_costs_what_was_promised() {
    let place = Place::new();
    for (length, bound) in [(10 * 1024, 1.25 * 10.0 * 1024.0), (1000, 1.2 * 1000.0 + 64.0)] {
        let segment = SegmentId::generate();
        let mut writer = place.flash.create_pack(segment).unwrap();
        let bytes = payload(length, 1);
        for group in 0..40 {
            let path = |file| format!("test/airplane/{:04}.jpg", group * 50 + file);
            let records: Vec<_> = (0..50).map(|file| record(&path(file), &bytes)).collect();
            writer.append(&records).unwrap();
        }
        writer.close().unwrap();
        let file = fs::metadata(place.path(segment, "pack")).unwrap();
        let allocated = std::os::unix::fs::MetadataExt::blocks(&file) * 512;
        for (what, total) in [("length", file.len()), ("allocated", allocated)] {
            let each = total as f64 / 2000.0;
            assert!(each <= bound, "{length} bytes cost {each} bytes each ({what})");
            assert!(each >= length as f64);
        }
    }
}

#[test]
fn a_changed_byte_of_a_payload_is_reported_with_segment_and_offset_and_nothing_is_shown() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let bytes = payload(2 * CHUNK_BYTES + 100, 1);
    let small = payload(700, 2);
    let placed = writer.append(&[record("big", &bytes), record("small", &small)]).unwrap();
    writer.close().unwrap();
    let path = place.path(segment, "pack");
    let name = segment.to_string();
    let chunk_at = placed[0].offset + CHUNK;
    flip(&path, chunk_at + 12_345);
    place.reopen();
    let error = read_whole(&place.flash, segment, &placed[0]).unwrap_err();
    assert_corrupt(&error, &[&name, &format!("offset {chunk_at} "), "CRC32C", "expected", "backup"]);
    // Any range that needs the chunk fails, even if the byte itself is not asked for; others are served.
    for (offset, length, good) in
        [(CHUNK + 1, 10, false), (CHUNK - 1, 2, false), (0, CHUNK_BYTES, true), (2 * CHUNK, 100, true)]
    {
        let mut out = vec![0xAA; length];
        let read = place.flash.read_pack(segment, placed[0].offset + offset, &placed[0].check, &mut out);
        assert_eq!(read.is_ok(), good, "{length} bytes at {offset}");
        assert!(good || out.iter().all(|byte| *byte == 0), "what was not verified is not shown");
    }
    assert_eq!(read_whole(&place.flash, segment, &placed[1]).unwrap(), small);
    flip(&path, placed[1].offset + 699);
    let error = read_whole(&place.flash, segment, &placed[1]).unwrap_err();
    assert_corrupt(&error, &[&name, &format!("offset {} ", placed[1].offset)]);
}

#[test]
fn a_changed_byte_of_header_frame_or_footer_is_reported_and_files_still_read() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let bytes = payload(700, 1);
    let placed = writer.append(&[record("a", &bytes)]).unwrap().remove(0);
    let frames_end = writer.bytes();
    writer.close().unwrap();
    let path = place.path(segment, "pack");
    let good = fs::read(&path).unwrap();
    for at in [20, PACK_HEADER_BYTES + 9, PACK_HEADER_BYTES + 60, frames_end, frames_end + 20] {
        flip(&path, at);
        place.reopen();
        let error = place.flash.records(segment).unwrap_err();
        assert_corrupt(&error, &[&segment.to_string()]);
        assert_eq!(read_whole(&place.flash, segment, &placed).unwrap(), bytes, "byte {at} of no payload");
        fs::write(&path, &good).unwrap();
    }
    assert_eq!(place.flash.records(segment).unwrap().len(), 1);
}

#[test]
fn a_missing_or_short_segment_is_reported_by_name() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let name = segment.to_string();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let bytes = payload(10_000, 1);
    let placed = writer.append(&[record("a", &bytes)]).unwrap().remove(0);
    writer.close().unwrap();
    let path = place.path(segment, "pack");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(placed.offset + 5000).unwrap();
    let error = read_whole(&place.flash, segment, &placed).unwrap_err();
    assert_corrupt(&error, &[&name, "too short", &(placed.offset + 5000).to_string()]);
    assert!(!is_missing(&error));
    fs::remove_file(&path).unwrap();
    place.reopen();
    let error = read_whole(&place.flash, segment, &placed).unwrap_err();
    assert_corrupt(&error, &[&name, "missing"]);
    assert!(is_missing(&error));
    for error in [
        read_file(&place.flash, segment, 0, 10).unwrap_err(),
        place.flash.records(segment).unwrap_err(),
        place.flash.recover(segment, SegmentKind::Pack, 1).unwrap_err(),
        place.flash.recover(segment, SegmentKind::File, 1).unwrap_err(),
    ] {
        assert_corrupt(&error, &[&name]);
        assert!(is_missing(&error));
    }
}

/// Three frames of small files, left open; what was placed, and where each frame ends.
fn open_pack(place: &Place) -> (SegmentId, Vec<Placed>, Vec<u64>) {
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let (mut placed, mut ends) = (Vec::new(), vec![writer.bytes()]);
    for frame in 0..3 {
        let payloads = [payload(70, frame), payload(30, frame + 10)];
        placed.extend(writer.append(&[record("x/a", &payloads[0]), record("x/b", &payloads[1])]).unwrap());
        ends.push(writer.bytes());
    }
    writer.sync().unwrap();
    (segment, placed, ends)
}

#[test]
fn a_pack_cut_at_any_byte_recovers_the_whole_frames_before() {
    let mut place = Place::quick();
    let (segment, placed, ends) = open_pack(&place);
    let path = place.path(segment, "pack");
    let whole = fs::read(&path).unwrap();
    assert_eq!(whole.len() as u64, ends[3]);
    for cut in ends[0] - 10..=ends[3] {
        fs::write(&path, &whole[..cut as usize]).unwrap();
        place.reopen();
        let frames = ends[1..].iter().filter(|end| **end <= cut).count();
        let end = if frames == 0 { 0 } else { ends[frames] };
        let expected = Recovered { bytes: end, truncated_bytes: cut - end, records: 2 * frames as u64 };
        assert_eq!(place.flash.recover(segment, SegmentKind::Pack, end).unwrap(), expected, "cut at {cut}");
        if frames == 0 {
            assert!(!path.exists(), "nothing was valid: it is removed");
            continue;
        }
        let recovered = fs::read(&path).unwrap();
        let footer = frames * 16 + FOOTER_END_BYTES;
        assert_eq!(recovered.len(), end as usize + footer, "cut at {cut}");
        for placed in &placed[..2 * frames] {
            read_whole(&place.flash, segment, placed).unwrap();
        }
        assert_eq!(place.flash.records(segment).unwrap().len(), 2 * frames);
        // Closed now: again changes nothing.
        let again = place.flash.recover(segment, SegmentKind::Pack, end).unwrap();
        assert_eq!(again, Recovered { truncated_bytes: 0, ..expected });
        assert_eq!(fs::read(&path).unwrap(), recovered);
    }
}

#[test]
fn recovery_never_cuts_what_files_need() {
    let mut place = Place::quick();
    let (segment, _, ends) = open_pack(&place);
    let path = place.path(segment, "pack");
    let whole = fs::read(&path).unwrap();
    let mut damaged_bytes = 0;
    for at in ends[0]..ends[3] {
        let mut damaged = whole.clone();
        damaged[at as usize] ^= 1;
        fs::write(&path, &damaged).unwrap();
        place.reopen();
        let frame = ends[1..].iter().position(|end| at < *end).unwrap();
        match place.flash.recover(segment, SegmentKind::Pack, ends[3]) {
            Ok(recovered) => {
                assert_eq!((recovered.bytes, recovered.truncated_bytes), (ends[3], 0));
                // Zeros between payloads belong to nobody.
                assert_eq!(whole[at as usize], 0, "byte {at} was changed and nobody saw it");
            }
            Err(error) => {
                damaged_bytes += 1;
                let valid = if frame == 0 { 0 } else { ends[frame] };
                assert_corrupt(&error, &[&segment.to_string(), &format!("{valid} bytes are valid")]);
                assert_corrupt(&error, &[&format!("files need {}", ends[3])]);
                assert!(fs::read(&path).unwrap() == damaged, "it is left as it was");
                // Where no file needs more, the whole frames before are kept.
                let kept = place.flash.recover(segment, SegmentKind::Pack, valid).unwrap();
                assert_eq!((kept.bytes, kept.records), (valid, 2 * frame as u64), "byte {at}");
            }
        }
    }
    assert!(damaged_bytes > 3 * (70 + 30 + 56), "payloads and headers of three frames");
}

#[test]
fn a_torn_or_damaged_footer_and_header_are_written_anew_by_recovery() {
    let mut place = Place::quick();
    let (segment, placed, ends) = open_pack(&place);
    let path = place.path(segment, "pack");
    place.flash.recover(segment, SegmentKind::Pack, 0).unwrap();
    let closed = fs::read(&path).unwrap();
    let expected = Recovered { bytes: ends[3], truncated_bytes: 0, records: 6 };
    for cut in ends[3]..closed.len() as u64 {
        fs::write(&path, &closed[..cut as usize]).unwrap();
        place.reopen();
        let recovered = place.flash.recover(segment, SegmentKind::Pack, ends[3]).unwrap();
        assert_eq!(recovered, Recovered { truncated_bytes: cut - ends[3], ..expected.clone() });
        assert_eq!(fs::read(&path).unwrap(), closed, "cut at {cut}");
    }
    for at in (0..PACK_HEADER_BYTES as usize).step_by(97).chain(ends[3] as usize..closed.len()) {
        let mut damaged = closed.clone();
        damaged[at] ^= 0x40;
        fs::write(&path, &damaged).unwrap();
        place.reopen();
        assert_eq!(place.flash.recover(segment, SegmentKind::Pack, ends[3]).unwrap().records, 6, "byte {at}");
        assert_eq!(place.flash.records(segment).unwrap().len(), 6, "byte {at}");
        read_whole(&place.flash, segment, &placed[5]).unwrap();
    }
}

#[test]
fn a_pack_of_a_later_format_is_not_touched_by_recovery() {
    let place = Place::new();
    let (segment, _, _) = open_pack(&place);
    let path = place.path(segment, "pack");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 99;
    let crc = headrace_base::crc32c(&bytes[..PACK_HEADER_BYTES as usize - 4]);
    bytes[PACK_HEADER_BYTES as usize - 4..PACK_HEADER_BYTES as usize].copy_from_slice(&crc.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let error = place.flash.recover(segment, SegmentKind::Pack, 0).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().contains("format 99") && error.message().contains("upgrade"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn what_never_came_to_be_recovers_to_nothing() {
    let place = Place::new();
    let nothing = Recovered { bytes: 0, truncated_bytes: 0, records: 0 };
    for kind in [SegmentKind::Pack, SegmentKind::File] {
        let segment = SegmentId::generate();
        assert_eq!(place.flash.recover(segment, kind, 0).unwrap(), nothing);
    }
    // Made, but nothing in it; closed with nothing in it.
    for close in [false, true] {
        let pack = SegmentId::generate();
        let writer = place.flash.create_pack(pack).unwrap();
        if close {
            writer.close().unwrap();
        }
        let file = SegmentId::generate();
        let writer = place.flash.create_file_segment(file, origin("f", 0)).unwrap();
        if close {
            writer.close().unwrap();
        }
        assert_eq!(place.flash.recover(pack, SegmentKind::Pack, 0).unwrap().bytes, 0);
        assert_eq!(place.flash.recover(file, SegmentKind::File, 0).unwrap(), nothing);
    }
    assert_eq!(place.flash.list().unwrap(), []);
    // The crash came between the two files of a file segment.
    for extension in ["file", "idx"] {
        let segment = SegmentId::generate();
        let mut writer = place.flash.create_file_segment(segment, origin("f", 0)).unwrap();
        writer.append(b"unsynced").unwrap();
        drop(writer);
        fs::remove_file(place.path(segment, extension)).unwrap();
        assert_eq!(place.flash.list().unwrap().len(), 1, "half a segment is listed");
        assert!(place.flash.recover(segment, SegmentKind::File, 1).is_err());
        assert_eq!(place.flash.list().unwrap().len(), 1);
        assert_eq!(place.flash.recover(segment, SegmentKind::File, 0).unwrap().bytes, 0);
        assert_eq!(place.flash.list().unwrap(), []);
    }
}

#[test]
fn a_file_segment_holds_exactly_the_bytes_and_reads_any_range_open_and_closed() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_file_segment(segment, origin("big", 0)).unwrap();
    let bytes = payload(5 * CHUNK_BYTES + 4321, 1);
    let check = |place: &Place, length: usize, when: &str| {
        let edges =
            [0, 1, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, length - 1, length];
        for from in edges.iter().filter(|edge| **edge <= length) {
            for to in edges.iter().filter(|to| *to >= from && **to <= length) {
                let read = read_file(&place.flash, segment, *from as u64, to - from);
                assert!(read.unwrap() == bytes[*from..*to], "{when}: {from}..{to} of {length}");
            }
        }
        let error = read_file(&place.flash, segment, length as u64 - 1, 2).unwrap_err();
        assert_corrupt(&error, &[&segment.to_string(), "too short"]);
        assert!(read_file(&place.flash, segment, u64::MAX, 2).is_err());
    };
    let mut length = 0;
    for (step, piece) in
        [1000, 1, CHUNK_BYTES - 1001, CHUNK_BYTES, 10, 2 * CHUNK_BYTES + 5, 7].iter().enumerate()
    {
        assert_eq!(writer.append(&bytes[length..length + piece]).unwrap(), length as u64);
        length += piece;
        check(&place, length, "appended");
        if step % 2 == 1 {
            writer.sync().unwrap();
            check(&place, length, "synced");
        }
    }
    writer.append(&bytes[length..]).unwrap();
    assert_eq!(writer.append(&[]).unwrap(), bytes.len() as u64);
    assert_eq!(writer.bytes(), bytes.len() as u64);
    writer.close().unwrap();
    check(&place, bytes.len(), "closed");
    assert_eq!(fs::read(place.path(segment, "file")).unwrap(), bytes);
    place.reopen();
    check(&place, bytes.len(), "reopened");
    let (found, placed) = place.flash.records(segment).unwrap().remove(0);
    assert_eq!((found, placed.length, placed.check.crcs.len()), (origin("big", 0), bytes.len() as u64, 6));
    let untouched = Recovered { bytes: bytes.len() as u64, truncated_bytes: 0, records: 1 };
    assert_eq!(place.flash.recover(segment, SegmentKind::File, bytes.len() as u64).unwrap(), untouched);
    assert!(place.flash.recover(segment, SegmentKind::File, bytes.len() as u64 + 1).is_err());
}

#[test]
fn a_file_segment_recovers_what_was_synced_and_refuses_to_lose_more() {
    let mut place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_file_segment(segment, origin("big", 0)).unwrap();
    let bytes = payload(3 * CHUNK_BYTES, 1);
    let (first, synced) = (CHUNK_BYTES + 50, 2 * CHUNK_BYTES + 100);
    writer.append(&bytes[..first]).unwrap();
    writer.sync().unwrap();
    writer.append(&bytes[first..synced]).unwrap();
    writer.sync().unwrap();
    writer.append(&bytes[synced..]).unwrap();
    drop(writer);
    place.reopen();
    // Not closed, nobody writes it: what its index covers can be read, no more.
    assert!(read_file(&place.flash, segment, 0, synced).unwrap() == bytes[..synced]);
    assert!(read_file(&place.flash, segment, 0, synced + 1).is_err());

    let (data, index) = (place.path(segment, "file"), place.path(segment, "idx"));
    let (data_before, index_before) = (fs::read(&data).unwrap(), fs::read(&index).unwrap());
    let error = place.flash.recover(segment, SegmentKind::File, synced as u64 + 1).unwrap_err();
    assert_corrupt(&error, &[&segment.to_string(), &synced.to_string(), &(synced + 1).to_string()]);
    assert!(fs::read(&data).unwrap() == data_before && fs::read(&index).unwrap() == index_before);

    // The index cut at any byte: a shorter prefix of the synced states, never an unverified byte.
    let covered = [0, CHUNK_BYTES, first, 2 * CHUNK_BYTES, synced];
    let header = index_before.len() - 4 * INDEX_ENTRY_BYTES;
    for cut in 0..=index_before.len() {
        fs::write(&data, &data_before).unwrap();
        fs::write(&index, &index_before[..cut]).unwrap();
        place.reopen();
        let expected = covered[cut.saturating_sub(header) / INDEX_ENTRY_BYTES];
        let recovered = place.flash.recover(segment, SegmentKind::File, expected as u64);
        assert_eq!(recovered.unwrap().bytes, expected as u64, "index cut at {cut}");
        assert_eq!(data.exists(), expected > 0);
        if expected > 0 {
            assert!(fs::read(&data).unwrap() == bytes[..expected]);
            assert!(read_file(&place.flash, segment, 0, expected).unwrap() == bytes[..expected]);
            let again = place.flash.recover(segment, SegmentKind::File, expected as u64).unwrap();
            assert_eq!(again.truncated_bytes, 0);
        }
    }
}

#[test]
fn damage_in_a_file_segment_is_reported_and_recovery_cuts_only_what_nobody_needs() {
    let mut place = Place::new();
    for close in [false, true] {
        let segment = SegmentId::generate();
        let mut writer = place.flash.create_file_segment(segment, origin("big", 0)).unwrap();
        let bytes = payload(4 * CHUNK_BYTES, 1);
        writer.append(&bytes).unwrap();
        writer.sync().unwrap();
        if close {
            writer.close().unwrap();
        } else {
            drop(writer);
        }
        let (data, index) = (place.path(segment, "file"), place.path(segment, "idx"));
        flip(&data, 2 * CHUNK + 5);
        place.reopen();
        let error = read_file(&place.flash, segment, 2 * CHUNK + 100, 10).unwrap_err();
        assert_corrupt(&error, &[&segment.to_string(), &format!("offset {} ", 2 * CHUNK), "expected"]);
        assert!(read_file(&place.flash, segment, 0, 2 * CHUNK_BYTES).is_ok());
        if close {
            // Cut behind a closing entry that says otherwise: damaged, recovery mends what it can.
            fs::OpenOptions::new().write(true).open(&data).unwrap().set_len(4 * CHUNK - 1).unwrap();
        }
        let error = place.flash.recover(segment, SegmentKind::File, 2 * CHUNK + 1).unwrap_err();
        assert_corrupt(&error, &[&segment.to_string(), &(2 * CHUNK).to_string(), "CRC32C"]);
        let recovered = place.flash.recover(segment, SegmentKind::File, 2 * CHUNK).unwrap();
        assert_eq!(recovered.bytes, 2 * CHUNK);
        assert!(read_file(&place.flash, segment, 0, 2 * CHUNK_BYTES).unwrap() == bytes[..2 * CHUNK_BYTES]);
        assert_eq!(fs::metadata(&data).unwrap().len(), 2 * CHUNK);

        let last = fs::metadata(&index).unwrap().len() - 1;
        for at in [0, 40, 100, last - 20, last] {
            flip(&index, at);
            place.reopen();
            assert_corrupt(&read_file(&place.flash, segment, 0, 10).unwrap_err(), &[&segment.to_string()]);
            flip(&index, at);
        }
        place.reopen();
        assert!(read_file(&place.flash, segment, 0, 10).is_ok());
    }
}

#[test]
fn readers_beside_a_writer_see_whole_verified_records() {
    let place = Place::new();
    let (pack, file) = (SegmentId::generate(), SegmentId::generate());
    let mut pack_writer = place.flash.create_pack(pack).unwrap();
    let mut file_writer = place.flash.create_file_segment(file, origin("f", 0)).unwrap();
    let published: Arc<Mutex<Vec<(Placed, usize)>>> = Arc::default();
    let file_bytes = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    // Lengths that leave the last chunk of the file partly covered, growing under the readers' eyes.
    let whole = Arc::new(payload(6 << 20, 3));
    let readers: Vec<_> = (0..3)
        .map(|reader| {
            let (flash, published, file_bytes) =
                (Arc::clone(&place.flash), Arc::clone(&published), Arc::clone(&file_bytes));
            let (stop, whole) = (Arc::clone(&stop), Arc::clone(&whole));
            thread::spawn("reader", move || {
                let mut reads = 0_usize;
                while !stop.load(Ordering::Acquire) || reads == 0 {
                    let latest = published.lock().unwrap().iter().rev().nth(reads * reader % 7).cloned();
                    let Some((placed, seed)) = latest else { continue };
                    let read = read_whole(&flash, pack, &placed).unwrap();
                    assert!(read == payload(placed.length as usize, seed), "record {seed}");
                    let end = file_bytes.load(Ordering::Acquire) as usize;
                    let from = end.saturating_sub(100_000 + reads % 1000);
                    let read = read_file(&flash, file, from as u64, end - from).unwrap();
                    assert!(read == whole[from..end], "{from}..{end}");
                    reads += 1;
                }
                reads
            })
            .unwrap()
        })
        .collect();
    let mut written = 0;
    for seed in 0..300 {
        let bytes = payload(500 + seed * 37, seed);
        let placed = pack_writer.append(&[record("r", &bytes)]).unwrap().remove(0);
        published.lock().unwrap().push((placed, seed));
        let piece = (1 + seed * 131 % 40_000).min(whole.len() - written);
        file_writer.append(&whole[written..written + piece]).unwrap();
        written += piece;
        file_bytes.store(written as u64, Ordering::Release);
        if seed % 50 == 49 {
            file_writer.sync().unwrap();
        }
    }
    // Also across the close, when the sums move from the writer to the index on disk.
    file_writer.close().unwrap();
    pack_writer.close().unwrap();
    stop.store(true, Ordering::Release);
    for reader in readers {
        assert!(reader.join().unwrap() > 0);
    }
}

#[test]
fn a_hundred_segments_are_read_with_four_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let flash = Flash::open(folder.path(), 4).unwrap();
    let mut packs = Vec::new();
    for number in 0..100 {
        let bytes = payload(3000, number);
        if number % 2 == 0 {
            let mut writer = flash.create_pack(SegmentId::generate()).unwrap();
            let placed = writer.append(&[record("a", &bytes)]).unwrap().remove(0);
            packs.push((writer.segment(), Some(placed)));
            writer.close().unwrap();
        } else {
            let mut writer = flash.create_file_segment(SegmentId::generate(), origin("a", 3000)).unwrap();
            writer.append(&bytes).unwrap();
            packs.push((writer.segment(), None));
            writer.close().unwrap();
        }
    }
    for round in 0..3 {
        for (number, (segment, placed)) in packs.iter().enumerate() {
            let read = match placed {
                Some(placed) => read_whole(&flash, *segment, placed),
                None => read_file(&flash, *segment, 0, 3000),
            };
            assert!(read.unwrap() == payload(3000, number), "round {round}, segment {number}");
            let open = fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
                let target = fs::read_link(entry.as_ref().unwrap().path());
                target.is_ok_and(|target| target.starts_with(folder.path()))
            });
            assert!(open.count() <= 4);
        }
    }
}

#[test]
fn segments_are_listed_with_kind_and_length_and_removed_whole() {
    let place = Place::new();
    let (pack, file) = (SegmentId::generate(), SegmentId::generate());
    let mut writer = place.flash.create_pack(pack).unwrap();
    let placed = writer.append(&[record("a", &payload(100, 1))]).unwrap().remove(0);
    writer.close().unwrap();
    let mut writer = place.flash.create_file_segment(file, origin("f", 5)).unwrap();
    writer.append(b"12345").unwrap();
    writer.close().unwrap();
    // What is not a segment, or one in a strange place, is left alone.
    let folder = place.folder.path().join("segments");
    fs::create_dir_all(folder.join("lost+found")).unwrap();
    fs::write(folder.join("lost+found").join(format!("{pack}.pack")), b"x").unwrap();
    fs::write(folder.join("README.pack"), b"x").unwrap();
    fs::write(place.path(pack, "pack.part"), b"x").unwrap();

    let mut listed = place.flash.list().unwrap();
    listed.sort_by_key(|found| found.bytes);
    let listed: Vec<_> = listed.iter().map(|found| (found.segment, found.kind, found.bytes)).collect();
    let pack_bytes = fs::metadata(place.path(pack, "pack")).unwrap().len();
    assert_eq!(listed, [(file, SegmentKind::File, 5), (pack, SegmentKind::Pack, pack_bytes)]);

    assert_eq!(place.flash.create_pack(pack).unwrap_err().kind(), Kind::Conflict);
    assert_eq!(place.flash.create_file_segment(file, origin("f", 5)).unwrap_err().kind(), Kind::Conflict);
    read_whole(&place.flash, pack, &placed).unwrap();
    read_file(&place.flash, file, 0, 5).unwrap();
    place.flash.remove(pack, SegmentKind::Pack).unwrap();
    place.flash.remove(file, SegmentKind::File).unwrap();
    assert_eq!(place.flash.list().unwrap(), []);
    assert!(is_missing(&read_whole(&place.flash, pack, &placed).unwrap_err()));
    assert!(is_missing(&read_file(&place.flash, file, 0, 5).unwrap_err()));
    // A removal that is repeated after a crash.
    place.flash.remove(pack, SegmentKind::Pack).unwrap();
    let (total, free, available) = place.flash.space().unwrap();
    assert!(total > 0 && free <= total && available <= free);
}

#[test]
fn nobody_but_the_owner_may_read_segments() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let (segment, _, _) = open_pack(&place);
    let path = place.path(segment, "pack");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
    assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o077, 0);
}

/// Skips with the reason; under CI=true that is a failure.
fn skip(reason: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "may not be skipped in CI: {reason}");
    eprintln!("skipped: {reason}");
}

/// A file system of 1 MiB, unmounted at the end whatever happens.
struct TinyDisk(TempDir);

impl TinyDisk {
    fn mount() -> Result<TinyDisk, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("mounting a tiny file system takes root".to_owned());
        }
        let folder = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "headrace-test"]).arg(folder.path());
        match mount.output() {
            Ok(output) if output.status.success() => Ok(TinyDisk(folder)),
            Ok(output) => Err(format!("mount: {}", String::from_utf8_lossy(&output.stderr).trim())),
            Err(error) => Err(format!("mount: {error}")),
        }
    }
}

impl Drop for TinyDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_reported_and_leaves_the_segment_as_it_was() {
    let disk = match TinyDisk::mount() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let folder = disk.0.path().join("segments");
    let flash = Flash::open(&folder, 8).unwrap();
    let (pack, file) = (SegmentId::generate(), SegmentId::generate());
    let mut pack_writer = flash.create_pack(pack).unwrap();
    let mut file_writer = flash.create_file_segment(file, origin("f", 0)).unwrap();
    let small = payload(10_000, 1);
    let mut placed = pack_writer.append(&[record("a", &small), record("b", &small)]).unwrap();
    file_writer.append(&small).unwrap();
    let (pack_before, file_before) = (pack_writer.bytes(), file_writer.bytes());

    let huge = payload(2 << 20, 2);
    for round in 0..2 {
        let error = pack_writer.append(&[record("c", &small), record("d", &huge)]).unwrap_err();
        assert_eq!((error.kind(), error.raw_errno()), (Kind::Full, 28), "{error}");
        assert!(error.message().contains(&pack.to_string()), "{error}");
        assert!(error.message().contains("bytes free"), "{error}");
        let error = file_writer.append(&huge).unwrap_err();
        assert_eq!((error.kind(), error.raw_errno()), (Kind::Full, 28), "{error}");
        assert_eq!((pack_writer.bytes(), file_writer.bytes()), (pack_before, file_before), "round {round}");
        let length = fs::metadata(path_in(&folder, pack, "pack")).unwrap().len();
        assert_eq!(length, pack_before, "the space is given back");
    }
    // With less there is room again, and nothing is torn.
    placed.extend(pack_writer.append(&[record("e", &small)]).unwrap());
    file_writer.append(&small).unwrap();
    pack_writer.sync().unwrap();
    file_writer.sync().unwrap();
    pack_writer.close().unwrap();
    file_writer.close().unwrap();
    let flash = Flash::open(&folder, 8).unwrap();
    for placed in &placed {
        assert_eq!(read_whole(&flash, pack, placed).unwrap(), small);
    }
    assert_eq!(flash.records(pack).unwrap().len(), 3);
    assert_eq!(read_file(&flash, file, 0, 20_000).unwrap(), [small.as_slice(), &small].concat());
    assert_eq!(fs::metadata(path_in(&folder, file, "file")).unwrap().len(), 20_000);
}

#[test]
fn what_release_1_wrote_is_read() {
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden"));
    let place = Place::new();
    let segment: SegmentId = "01J4HMASW904HMASW9NF6YY093".parse().unwrap();
    fs::create_dir_all(place.path(segment, "pack").parent().unwrap()).unwrap();
    for (name, extension) in [("pack-1.pack", "pack"), ("file-1.file", "file"), ("file-1.idx", "idx")] {
        fs::copy(golden.join(name), place.path(segment, extension)).unwrap();
    }
    // The rule that golden/pack-1.json states.
    let expected = |length: u64, record: usize| -> Vec<u8> {
        (0..length as usize).map(|at| (at * 7 + record * 31) as u8).collect()
    };
    let records = place.flash.records(segment).unwrap();
    assert_eq!(records.len(), 7);
    for (number, (_, placed)) in records.iter().enumerate() {
        let read = read_whole(&place.flash, segment, placed).unwrap();
        assert_eq!(read, expected(placed.length, number), "record {number}");
    }
    assert_eq!(read_file(&place.flash, segment, 0, 5000).unwrap(), expected(5000, 0));
    assert_eq!(place.flash.recover(segment, SegmentKind::Pack, 0).unwrap().truncated_bytes, 0);
    assert_eq!(place.flash.recover(segment, SegmentKind::File, 5000).unwrap().truncated_bytes, 0);
}

/// Not a test but a measurement: `cargo test --release -p headrace-flash -- --ignored --nocapture`.
#[test]
#[ignore = "measures; prints numbers"]
fn measure_reading_and_appending() {
    let place = Place::new();
    let segment = SegmentId::generate();
    let mut writer = place.flash.create_pack(segment).unwrap();
    let bytes = payload(10 * 1024, 1);
    let records: Vec<_> = (0..100).map(|file| record(&format!("train/cat/{file:05}.jpg"), &bytes)).collect();
    let mut placed = Vec::new();
    let begin = monotonic_now();
    for _ in 0..60 {
        placed.extend(writer.append(&records).unwrap());
    }
    let seconds = begin.elapsed().as_secs_f64();
    let megabytes = (placed.len() * bytes.len()) as f64 / 1e6;
    println!("append, groups of 100 x 10 KiB: {:.0} MB/s", megabytes / seconds);
    let begin = monotonic_now();
    writer.close().unwrap();
    println!("close with fdatasync of {megabytes:.0} MB: {:.1} ms", begin.elapsed().as_secs_f64() * 1e3);

    let mut out = vec![0; bytes.len()];
    for (what, from, length) in [("10 KiB whole", 0, 10 * 1024), ("4 KiB of 10 KiB", 4096, 4096)] {
        let begin = monotonic_now();
        let rounds = 20;
        for _ in 0..rounds {
            for placed in &placed {
                let out = &mut out[..length];
                place.flash.read_pack(segment, placed.offset + from, &placed.check, out).unwrap();
            }
        }
        let calls = (rounds * placed.len()) as f64;
        println!("read_pack, {what}, warm: {:.2} us", begin.elapsed().as_secs_f64() * 1e6 / calls);
    }

    let file = SegmentId::generate();
    let mut writer = place.flash.create_file_segment(file, origin("f", 0)).unwrap();
    let mebibyte = payload(1 << 20, 1);
    let begin = monotonic_now();
    for _ in 0..256 {
        writer.append(&mebibyte).unwrap();
    }
    println!("file segment, append of 1 MiB: {:.0} MB/s", 268.0 / begin.elapsed().as_secs_f64());
    writer.close().unwrap();
    for length in [1 << 20, 128 << 10, 4096] {
        let mut out = vec![0; length];
        let begin = monotonic_now();
        let calls = 64 << 20 >> length.trailing_zeros();
        for call in 0..calls {
            place.flash.read_file(file, (call * length) as u64, &mut out).unwrap();
        }
        let seconds = begin.elapsed().as_secs_f64();
        println!("read_file, {length} bytes, warm: {:.2} us", seconds * 1e6 / calls as f64);
    }
}
