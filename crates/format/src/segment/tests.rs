use std::path::PathBuf;

use headrace_base::time::Timestamp;
use headrace_base::{Ino, SegmentId, crc32c};
use proptest::prelude::*;

use super::*;
use crate::{BLOCK, CHUNK};

const SEGMENT: SegmentId = SegmentId(0x0191_2345_6789_0123_4567_89AB_CDEF_0123);

fn origin(path: impl Into<Vec<u8>>, ino: u64, length: usize) -> Origin {
    Origin {
        ino: Ino(ino),
        path: path.into(),
        mode: 0o644,
        uid: 1000,
        gid: 1000,
        mtime: Timestamp(1_700_000_000_123_456_789 + ino as i64 * 7_654_321),
        file_offset: 0,
        file_bytes: length as u64,
    }
}

fn payload(length: usize, record: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + record * 31) as u8).collect()
}

/// A closed pack, put together the way the writer does it.
fn pack_of(frames: &[Vec<(Origin, Vec<u8>)>]) -> Vec<u8> {
    let header = PackHeader { segment: SEGMENT, created: Timestamp(1_700_000_000_000_000_000) };
    let mut pack = encode_pack_header(&header);
    let mut spans = Vec::new();
    for records in frames {
        let crcs: Vec<_> = records.iter().map(|(_, payload)| chunk_crcs(&[payload])).collect();
        let plans: Vec<_> = records
            .iter()
            .zip(&crcs)
            .map(|((origin, payload), crcs)| RecordPlan { origin, length: payload.len() as u64, crcs })
            .collect();
        let start = pack.len();
        let mut header = Vec::new();
        let layout = lay_out_frame(SEGMENT, start as u64, &plans, &mut header).unwrap();
        pack.resize(layout.end as usize, 0);
        pack[start..start + header.len()].copy_from_slice(&header);
        for ((_, payload), offset) in records.iter().zip(&layout.offsets) {
            pack[*offset as usize..][..payload.len()].copy_from_slice(payload);
        }
        spans.push(FrameSpan { offset: start as u64, bytes: layout.end - start as u64 });
    }
    let records = frames.iter().map(|frame| frame.len() as u64).sum();
    encode_footer(SEGMENT, &spans, records, &mut pack);
    pack
}

struct ReadPack {
    header: PackHeader,
    footer: Footer,
    frames: Vec<Frame>,
}

fn read_pack(pack: &[u8]) -> Result<ReadPack> {
    let header = decode_pack_header(SEGMENT, &pack[..pack.len().min(BLOCK as usize)])?;
    let last = &pack[pack.len().saturating_sub(FOOTER_END_BYTES)..];
    let Some(end) = decode_footer_end(SEGMENT, pack.len() as u64, last)? else {
        return Err(Error::not_found("no footer"));
    };
    let footer = decode_footer(SEGMENT, &end, &pack[end.offset as usize..])?;
    let mut frames = Vec::new();
    for span in &footer.frames {
        let frame = pack.get(span.offset as usize..).unwrap_or_default();
        let decoded = decode_frame(SEGMENT, span.offset, frame)?;
        assert_eq!(decoded.span, *span);
        frames.push(decoded);
    }
    Ok(ReadPack { header, footer, frames })
}

#[test]
fn a_10_kib_file_costs_at_most_a_quarter_more_and_a_small_one_a_fifth_and_64_bytes() {
    let cost_of_each = |length: usize, group: u64| {
        let crcs = chunk_crcs(&[&payload(length, 0)]);
        let mut start = PACK_HEADER_BYTES;
        let mut header = Vec::new();
        // Enough groups that where the first one begins does not matter; the header block is not metadata.
        let groups = 100;
        for number in 0..groups {
            let origins: Vec<_> = (0..group)
                .map(|file| {
                    let class = ["airplane", "automobile", "bird"][(number % 3) as usize];
                    origin(format!("test/{class}/{file:04}.jpg"), 5000 + number * group + file, length)
                })
                .collect();
            let plans: Vec<_> = origins
                .iter()
                .map(|origin| RecordPlan { origin, length: length as u64, crcs: &crcs })
                .collect();
            start = lay_out_frame(SEGMENT, start, &plans, &mut header).unwrap().end;
        }
        let footer = groups * 16 + FOOTER_END_BYTES as u64;
        ((start + footer) as f64 / (groups * group) as f64, header.len() as f64 / group as f64)
    };
    for group in [50, 64, 200] {
        let (cost, descriptor) = cost_of_each(10 * 1024, group);
        assert!(cost <= 1.25 * 10.0 * 1024.0, "10 KiB in groups of {group}: {cost} bytes");
        assert!(descriptor <= 40.0, "{descriptor} bytes of descriptor");
        // 64-byte alignment itself may cost a file of few bytes 63 of the 64: from 256 bytes on the promise
        // holds whatever the length.
        for length in [256, 300, 321, 500, 577, 1000, 1025, 1400, 1999, 2047] {
            let (cost, _) = cost_of_each(length, group);
            assert!(cost <= 1.2 * length as f64 + 64.0, "{length} bytes in groups of {group}: {cost} bytes");
        }
    }
}

#[test]
fn every_directory_is_named_once_and_paths_of_any_bytes_come_back() {
    let paths: [&[u8]; 8] =
        [b"a/b/1", b"a/b/2", b"c/3", b"a/b/4", b"", b"/absolute", b"name", b"odd//\xFF\n/trailing/"];
    let records: Vec<_> =
        paths.iter().enumerate().map(|(at, path)| (origin(*path, 9, 5), payload(5, at))).collect();
    let pack = pack_of(&[records]);
    let frame = &read_pack(&pack).unwrap().frames[0];
    let found: Vec<_> = frame.records.iter().map(|record| record.origin.path.as_slice()).collect();
    assert_eq!(found, paths);
    assert_eq!(pack.windows(4).filter(|window| window == b"a/b/").count(), 1);
}

#[test]
fn payloads_lie_where_the_layout_says() {
    let lengths = [2047, 2048, 0, 4096, 1, 70_000, 64];
    let records: Vec<_> = lengths
        .iter()
        .enumerate()
        .map(|(at, length)| (origin("x", 1, *length), payload(*length, at)))
        .collect();
    let small = vec![(origin("y", 2, 3), payload(3, 9))];
    let pack = pack_of(&[small.clone(), records, small]);
    let read = read_pack(&pack).unwrap();
    assert_eq!(read.footer.records, 9);
    for (record, length) in read.frames[1].records.iter().zip(lengths) {
        assert_eq!(record.length, length as u64);
        if length >= 2048 {
            assert_eq!(record.offset % BLOCK, 0, "{length} bytes lie on a block boundary");
            let end = (record.offset + record.length) as usize;
            let block_end = end.next_multiple_of(BLOCK as usize);
            assert!(
                pack[end..block_end].iter().all(|byte| *byte == 0),
                "the last block is filled with zeros"
            );
        } else {
            assert_eq!(record.offset % DENSE_ALIGNMENT, 0);
        }
        let bytes = &pack[record.offset as usize..][..length];
        assert_eq!(record.crcs.to_vec(), bytes.chunks(CHUNK as usize).map(crc32c).collect::<Vec<_>>());
    }
    assert_eq!(read.frames[1].records[5].crcs.len(), 5);
}

#[test]
fn checksums_do_not_depend_on_the_pieces() {
    let bytes = payload(3 * CHUNK as usize + 17, 3);
    let whole = chunk_crcs(&[&bytes]);
    assert_eq!(whole.len(), 4);
    for cut in [0, 1, 100, CHUNK as usize - 1, CHUNK as usize, CHUNK as usize + 1, bytes.len()] {
        let (left, right) = bytes.split_at(cut);
        assert_eq!(chunk_crcs(&[left, &[], right]), whole, "cut at {cut}");
    }
    assert!(
        chunk_crcs(&[]).is_empty() && chunk_crcs(&[&[]]).is_empty() && chunk_crcs(&[&[], &[]]).is_empty()
    );
}

#[test]
fn a_frame_of_another_segment_or_place_is_refused() {
    let pack = pack_of(&[vec![(origin("x", 1, 10), payload(10, 0))]]);
    let frame = &pack[BLOCK as usize..];
    assert!(decode_frame(SEGMENT, BLOCK, frame).is_ok());
    assert!(decode_frame(SegmentId(1), BLOCK, frame).is_err());
    assert!(decode_frame(SEGMENT, 2 * BLOCK, frame).is_err());
    assert!(decode_pack_header(SegmentId(1), &pack[..BLOCK as usize]).is_err());
}

#[test]
fn any_changed_byte_of_header_frame_header_or_footer_is_found_and_the_segment_named() {
    let pack = pack_of(&[
        vec![(origin("dir/a", 1, 100), payload(100, 0)), (origin("dir/b", 2, 3000), payload(3000, 1))],
        vec![(origin("dir/c", 3, 10), payload(10, 2))],
    ]);
    let read = read_pack(&pack).unwrap();
    let mut covered: Vec<usize> = (0..BLOCK as usize).collect();
    for frame in &read.frames {
        let begin = frame.span.offset as usize;
        let header = decode_frame_prefix(SEGMENT, frame.span.offset, &pack[begin..]).unwrap().header_bytes;
        covered.extend(begin..begin + header);
    }
    // All but the magic at the very end: without it the pack is an open one.
    covered.extend(read.footer.offset as usize..pack.len() - 8);
    for at in covered {
        for flip in [1, 0x80] {
            let mut pack = pack.clone();
            pack[at] ^= flip;
            match read_pack(&pack) {
                Ok(_) => panic!("byte {at} was changed and nobody saw it"),
                Err(error) => assert!(error.message().contains(&SEGMENT.to_string()), "{error}"),
            }
        }
    }
}

#[test]
fn a_later_format_is_refused_by_name() {
    let mut block = encode_pack_header(&PackHeader { segment: SEGMENT, created: Timestamp(0) });
    block[8..12].copy_from_slice(&(FORMAT + 1).to_le_bytes());
    let crc = crc32c(&block[..BLOCK as usize - 4]);
    block[BLOCK as usize - 4..].copy_from_slice(&crc.to_le_bytes());
    let error = decode_pack_header(SEGMENT, &block).unwrap_err();
    assert_eq!(error.kind(), headrace_base::Kind::Invalid);
    assert!(error.message().contains("upgrade headrace"), "{error}");
}

fn index_of(entries: &[IndexEntry]) -> Vec<u8> {
    let mut index = encode_index_header(SEGMENT, &origin("big/file", 7, 99));
    for entry in entries {
        index.extend_from_slice(&encode_index_entry(SEGMENT, entry));
    }
    index
}

fn chunk(chunk: u32, covered: u64, crc: u32) -> IndexEntry {
    IndexEntry::Chunk { chunk, covered: covered as u32, crc }
}

#[test]
fn the_last_entry_of_a_chunk_counts_and_the_closing_entry_ends_the_index() {
    let bytes = index_of(&[chunk(0, 100, 1), chunk(0, CHUNK, 2), chunk(1, 5, 3), chunk(1, 6, 4)]);
    let open = decode_index(SEGMENT, &bytes).unwrap();
    assert_eq!((open.crcs.as_slice(), open.bytes, open.closed), ([2, 4].as_slice(), CHUNK + 6, false));
    assert_eq!(open.valid_bytes, bytes.len());
    assert_eq!(open.origin, origin("big/file", 7, 99));

    let closing = |bytes| encode_index_entry(SEGMENT, &IndexEntry::Closing { bytes });
    let closed = [bytes.clone(), closing(CHUNK + 6).to_vec()].concat();
    assert!(decode_index(SEGMENT, &closed).unwrap().closed);
    // Recovery cut a damaged chunk off.
    let cut = decode_index(SEGMENT, &[bytes.clone(), closing(CHUNK).to_vec()].concat()).unwrap();
    assert_eq!((cut.crcs.as_slice(), cut.bytes, cut.closed), ([2].as_slice(), CHUNK, true));
    for wrong in [0x1_0000_0000, CHUNK + 5, CHUNK + 7, 1] {
        assert!(
            decode_index(SEGMENT, &[bytes.clone(), closing(wrong).to_vec()].concat()).is_err(),
            "{wrong}"
        );
    }
    let behind = [closed, encode_index_entry(SEGMENT, &chunk(1, 7, 5)).to_vec()].concat();
    assert!(decode_index(SEGMENT, &behind).is_err());
}

#[test]
fn an_index_with_a_gap_or_a_chunk_that_shrinks_ends_there() {
    for (entries, valid) in [
        (vec![chunk(1, CHUNK, 1)], 0),
        (vec![chunk(0, 100, 1), chunk(1, 100, 1)], 1),
        (vec![chunk(0, 100, 1), chunk(0, 99, 1)], 1),
        (vec![chunk(0, CHUNK, 1), chunk(2, 5, 1)], 1),
        (vec![chunk(0, 0, 1)], 0),
        (vec![chunk(0, CHUNK + 1, 1)], 0),
    ] {
        let bytes = index_of(&entries);
        assert!(decode_index(SEGMENT, &bytes).is_err(), "{entries:?}");
        let prefix = decode_index_prefix(SEGMENT, &bytes).unwrap();
        let header = bytes.len() - entries.len() * INDEX_ENTRY_BYTES;
        assert_eq!(prefix.valid_bytes, header + valid * INDEX_ENTRY_BYTES, "{entries:?}");
    }
}

#[test]
fn any_changed_byte_of_an_index_is_found_and_the_segment_named() {
    let bytes = index_of(&[chunk(0, CHUNK, 1), chunk(1, 5, 3), IndexEntry::Closing { bytes: CHUNK + 5 }]);
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 4;
        let error = decode_index(SEGMENT, &changed).unwrap_err();
        assert!(error.message().contains(&SEGMENT.to_string()), "{error}");
    }
    for end in 0..bytes.len() {
        // Cut between two entries it is an open index, as its writer left it.
        let whole_entries = (bytes.len() - end).is_multiple_of(INDEX_ENTRY_BYTES)
            && end >= bytes.len() - 3 * INDEX_ENTRY_BYTES;
        match decode_index(SEGMENT, &bytes[..end]) {
            Ok(index) => assert!(whole_entries && !index.closed, "cut at {end}"),
            Err(_) => assert!(!whole_entries, "cut at {end}"),
        }
    }
}

fn any_origin() -> impl Strategy<Value = Origin> {
    let path = prop_oneof![
        "[ab]{0,2}/[ab]{0,2}/[a-z]{1,9}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..40)
    ];
    (any::<u64>(), path, any::<u16>(), any::<u32>(), any::<u32>(), any::<i64>(), any::<u64>(), any::<u64>())
        .prop_map(|(ino, path, mode, uid, gid, mtime, file_offset, file_bytes)| Origin {
            ino: Ino(ino),
            path,
            mode,
            uid,
            gid,
            mtime: Timestamp(mtime),
            file_offset,
            file_bytes,
        })
}

fn any_records() -> impl Strategy<Value = Vec<(Origin, Vec<u8>)>> {
    let length = prop_oneof![0..200_usize, 2000..2100_usize, 4000..5000_usize, 65_000..140_000_usize];
    prop::collection::vec((any_origin(), length), 1..8).prop_map(|records| {
        let records = records.into_iter().enumerate();
        records.map(|(at, (origin, length))| (origin, payload(length, at))).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn origins_come_back(origin in any_origin()) {
        let bytes = origin.encode();
        prop_assert_eq!(Origin::decode(&bytes).unwrap(), origin);
        for end in 0..bytes.len() {
            prop_assert!(Origin::decode(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn frames_come_back(frames in prop::collection::vec(any_records(), 0..4)) {
        let pack = pack_of(&frames);
        let read = read_pack(&pack).unwrap();
        prop_assert_eq!(read.frames.len(), frames.len());
        for (frame, written) in read.frames.iter().zip(&frames) {
            prop_assert_eq!(frame.records.len(), written.len());
            for (record, (origin, payload)) in frame.records.iter().zip(written) {
                prop_assert_eq!(&record.origin, origin);
                prop_assert_eq!(&pack[record.offset as usize..][..record.length as usize], payload.as_slice());
            }
        }
    }

    #[test]
    fn changed_headers_never_panic_even_with_a_right_checksum(
        records in any_records(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let pack = pack_of(&[records]);
        let mut frame = pack[BLOCK as usize..].to_vec();
        let header = decode_frame_prefix(SEGMENT, BLOCK, &frame).unwrap().header_bytes;
        for (at, byte) in changes {
            // Lengths and tables, not the magic and ids that would only be refused.
            frame[48 + at.index(header - 48)] = byte;
        }
        let crc = crc32c(&frame[12..header]);
        frame[8..12].copy_from_slice(&crc.to_le_bytes());
        if let Ok(frame) = decode_frame(SEGMENT, BLOCK, &frame) {
            for record in &frame.records {
                prop_assert!(record.offset >= BLOCK + header as u64);
                prop_assert!(record.offset + record.length <= frame.span.end());
                prop_assert_eq!(record.crcs.len() as u64, record.length.div_ceil(CHUNK));
            }
        }
    }

    #[test]
    fn changed_footers_never_panic_even_with_a_right_checksum(
        changes in prop::collection::vec((0..88_usize, any::<u8>()), 1..6),
    ) {
        let mut pack = pack_of(&vec![vec![(origin("a", 1, 5), payload(5, 0))]; 3]);
        let footer = pack.len() - FOOTER_END_BYTES - 3 * 16;
        for (at, byte) in changes {
            pack[footer + at] = byte;
        }
        let crc_at = pack.len() - 12;
        let crc = crc32c(&pack[footer..crc_at]);
        pack[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
        let last = pack.last_chunk::<FOOTER_END_BYTES>().unwrap();
        if let Ok(Some(end)) = decode_footer_end(SEGMENT, pack.len() as u64, last) {
            prop_assert_eq!(end.offset as usize + end.bytes, pack.len());
            if let Ok(read) = decode_footer(SEGMENT, &end, &pack[end.offset as usize..]) {
                prop_assert!(read.frames.iter().all(|frame| frame.end() <= end.offset));
            }
        }
    }

    #[test]
    fn any_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        magic in prop::sample::select(vec![*b"HRPACK\0\x01", *b"HRFRAME\x01", *b"HRPKEND\x01", *b"HRINDEX\x01"]),
        length in any::<u64>(),
    ) {
        for bytes in [bytes.clone(), [magic.as_slice(), &bytes].concat(), [bytes.as_slice(), &magic].concat()] {
            let _ = decode_pack_header(SEGMENT, &bytes);
            let _ = decode_frame_prefix(SEGMENT, length, &bytes);
            let _ = decode_frame(SEGMENT, length, &bytes);
            let _ = decode_index(SEGMENT, &bytes);
            let _ = decode_index_prefix(SEGMENT, &bytes);
            let _ = Origin::decode(&bytes);
            if let Ok(Some(end)) = decode_footer_end(SEGMENT, length, &bytes) {
                let _ = decode_footer(SEGMENT, &end, &bytes);
            }
        }
    }
}

// Golden files: what release 1 wrote must be written and read the same by every later one.

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")).join(name)
}

/// Compares with the file, or with HEADRACE_BLESS=1 writes it (for a new format, never for an old one).
fn check_golden(name: &str, bytes: &[u8]) {
    let path = golden(name);
    if std::env::var_os("HEADRACE_BLESS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    let stored = std::fs::read(&path).unwrap_or_else(|error| {
        panic!("{}: {error}: HEADRACE_BLESS=1 writes it", path.display());
    });
    assert!(stored == bytes, "{} is not what this release writes", path.display());
}

fn json_text(bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|byte| format!("\\u{:04x}", u32::from(*byte))).collect();
    match std::str::from_utf8(bytes) {
        Ok(plain) if !plain.contains(['"', '\\']) && !plain.contains(char::is_control) => {
            format!("\"{plain}\"")
        }
        _ => format!("\"{text}\""),
    }
}

fn json_origin(origin: &Origin) -> String {
    format!(
        "\"ino\": {}, \"path\": {}, \"mode\": {}, \"uid\": {}, \"gid\": {}, \"mtime_ns\": {}, \
         \"file_offset\": {}, \"file_bytes\": {}",
        origin.ino,
        json_text(&origin.path),
        origin.mode,
        origin.uid,
        origin.gid,
        origin.mtime.0,
        origin.file_offset,
        origin.file_bytes
    )
}

#[test]
fn golden_pack_is_written_and_read_the_same() {
    let part = Origin { file_offset: 4096, file_bytes: 1 << 40, ..origin("data/part", u64::MAX, 10) };
    let early = Origin { mtime: Timestamp(i64::MIN), uid: u32::MAX, mode: 0o7777, ..origin("old", 3, 64) };
    let lengths_of = |records: Vec<(Origin, usize)>, first: usize| {
        let records = records.into_iter().enumerate();
        records.map(|(at, (origin, length))| (origin, payload(length, first + at))).collect::<Vec<_>>()
    };
    let frames = [
        lengths_of(
            vec![
                (origin("train/cat/0001.jpg", 1001, 1000), 1000),
                (origin("train/cat/0002.jpg", 1002, 2500), 2500),
                (origin("train/dog/\u{e9}.jpg", 1003, 100), 100),
                (origin(b"train/dog/\xFF\n.jpg".as_slice(), 1004, 5000), 5000),
            ],
            0,
        ),
        lengths_of(vec![(part, 10), (origin("", 0, 2047), 2047), (early, 64)], 4),
    ];
    let bytes = pack_of(&frames);
    check_golden("pack-1.pack", &bytes);

    let read = read_pack(&std::fs::read(golden("pack-1.pack")).unwrap()).unwrap();
    let mut text = format!(
        "{{\n  \"about\": \"payload byte i of record k (counted through the pack) is (7 i + 31 k) mod 256; \
         a path that is no text has one character for each byte\",\n  \"segment\": \"{}\", \"created_ns\": {}, \
         \"bytes\": {}, \"footer_offset\": {}, \"records\": {},\n  \"frames\": [",
        read.header.segment,
        read.header.created.0,
        bytes.len(),
        read.footer.offset,
        read.footer.records
    );
    for (number, frame) in read.frames.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        text += &format!(
            "{comma}\n    {{\"offset\": {}, \"bytes\": {}, \"records\": [",
            frame.span.offset, frame.span.bytes
        );
        for (number, record) in frame.records.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            text += &format!(
                "{comma}\n      {{{}, \"offset\": {}, \"length\": {}, \"crcs\": {:?}}}",
                json_origin(&record.origin),
                record.offset,
                record.length,
                record.crcs.as_slice()
            );
        }
        text += "\n    ]}";
    }
    text += "\n  ]\n}\n";
    check_golden("pack-1.json", text.as_bytes());
    assert!(bytes.len() < 30 << 10);
}

#[test]
fn golden_file_segment_is_written_and_read_the_same() {
    let data = payload(5000, 0);
    let origin = origin("models/weights.bin", 77, 5000);
    let mut bytes = encode_index_header(SEGMENT, &origin);
    for entry in [
        chunk(0, 3000, crc32c(&data[..3000])),
        chunk(0, 5000, crc32c(&data)),
        IndexEntry::Closing { bytes: 5000 },
    ] {
        bytes.extend_from_slice(&encode_index_entry(SEGMENT, &entry));
    }
    check_golden("file-1.file", &data);
    check_golden("file-1.idx", &bytes);

    let read = decode_index(SEGMENT, &std::fs::read(golden("file-1.idx")).unwrap()).unwrap();
    assert!(read.closed);
    let text = format!(
        "{{\n  \"about\": \"byte i of the data is (7 i) mod 256; the first 3000 bytes were covered before the \
         rest was appended\",\n  \"segment\": \"{SEGMENT}\", \"bytes\": {}, \"crcs\": {:?}, \"index_bytes\": {},\n  \
         \"origin\": {{{}}}\n}}\n",
        read.bytes,
        read.crcs,
        read.valid_bytes,
        json_origin(&read.origin)
    );
    check_golden("file-1.json", text.as_bytes());
}
