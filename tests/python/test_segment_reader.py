"""Segments read without the engine: the golden files, what a real engine wrote, torn and damaged ones."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.client import engine as engine_process
from headrace.client.file import VolumeFile
from headrace.control.extraction import Extracted, extract, find_segments, open_segment
from headrace.errors import Conflict, Corrupt, Invalid, NotFound
from headrace.model import segment as segment_format
from headrace.model.crc32c import crc32c
from headrace.model.message import PutEntry
from headrace.model.segment import CHUNK_BYTES, FileReader, PackReader, Record, ranges_of
from support.segment_builder import (
    BLOCK,
    CREATED_NS,
    SEGMENT,
    Written,
    chunk_crcs,
    closing_entry,
    index,
    index_entry,
    index_header,
    pack,
)
from support.system import kill_and_wait

GOLDEN = Path(__file__).parents[1] / "golden"
OTHER = "01J4HMASW904HMASW9NF6YY094"
LARGE_BYTES = (16 << 20) + 3 * CHUNK_BYTES + 77


def content_of(number: int, size: int) -> bytes:
    unit = bytes((at * 7 + number * 31 + (at >> 8)) % 256 for at in range(min(size, 4099)))
    return (unit * (size // max(1, len(unit)) + 1))[:size]


def pack_reader(data: bytes, segment: str = SEGMENT, **options: Any) -> PackReader:
    return PackReader(*ranges_of(io.BytesIO(data)), segment, **options)


def file_reader(data: bytes, index: bytes, segment: str = SEGMENT, **options: Any) -> FileReader:
    return FileReader(*ranges_of(io.BytesIO(data)), index, segment, **options)


def read_all(reader: PackReader | FileReader) -> list[tuple[Record, bytes]]:
    return [(record, reader.read(record)) for record in reader.records()]


@pytest.fixture(scope="module")
def golden_pack() -> bytes:
    return (GOLDEN / "pack-1.pack").read_bytes()


def golden_text(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def golden_path(text: str) -> bytes:
    # A path that is no text has one character for each byte; \xff says that one is.
    return text.encode("latin-1") if "\xff" in text else text.encode()


ORIGIN = ("ino", "mode", "uid", "gid", "mtime_ns", "file_offset", "file_bytes")


# Golden files


def test_the_golden_pack_is_read_as_it_was_meant(golden_pack: bytes) -> None:
    meant = golden_text("pack-1.json")
    reader = pack_reader(golden_pack, meant["segment"])
    assert reader.closed and reader.created_ns == meant["created_ns"]
    number = 0
    frames = list(reader.frames())
    for frame, frame_meant in zip(frames, meant["frames"], strict=True):
        assert (frame.offset, frame.frame_bytes) == (frame_meant["offset"], frame_meant["bytes"])
        for record, wanted in zip(frame.records, frame_meant["records"], strict=True):
            for field in (*ORIGIN, "offset", "length"):
                assert getattr(record, field) == wanted[field], field
            assert record.path == golden_path(wanted["path"])
            assert list(record.crcs) == wanted["crcs"]
            expected = bytes((7 * at + 31 * number) % 256 for at in range(record.length))
            assert reader.read(record) == expected
            assert reader.read(record, 3, 5) == expected[3:8]
            number += 1
    assert number == meant["records"]
    assert [record for frame in frames for record in frame.records] == list(reader.records())


def test_the_golden_file_segment_is_read_as_it_was_meant() -> None:
    meant = golden_text("file-1.json")
    data = (GOLDEN / "file-1.file").read_bytes()
    reader = file_reader(data, (GOLDEN / "file-1.idx").read_bytes(), meant["segment"])
    [(record, found)] = read_all(reader)
    assert reader.closed and reader.damage is None
    assert found == data == bytes(7 * at % 256 for at in range(meant["bytes"]))
    assert list(record.crcs) == meant["crcs"]
    assert record.path.decode() == meant["origin"]["path"]
    for field in ORIGIN:
        assert getattr(record, field) == meant["origin"][field], field


def test_the_constants_are_those_of_the_format() -> None:
    source = (GOLDEN.parents[1] / "crates/format/src/lib.rs").read_text()
    found = dict(re.findall(r"^pub const (\w+): u\d+ = ([\d *]+);", source, re.MULTILINE))
    constants = {name: math.prod(map(int, value.split("*"))) for name, value in found.items()}
    assert constants == {"FORMAT": segment_format.FORMAT, "BLOCK": BLOCK, "CHUNK": CHUNK_BYTES}


def test_the_golden_segments_can_be_made_in_python_byte_for_byte(golden_pack: bytes) -> None:
    frames = []
    number = 0
    for frame in golden_text("pack-1.json")["frames"]:
        records = []
        for record in frame["records"]:
            payload = bytes((7 * at + 31 * number) % 256 for at in range(record["length"]))
            origin = {field: record[field] for field in ORIGIN}
            records.append(Written(golden_path(record["path"]), payload, **origin))
            number += 1
        frames.append(records)
    assert pack(frames) == golden_pack

    meant = golden_text("file-1.json")["origin"]
    data = (GOLDEN / "file-1.file").read_bytes()
    written = Written(meant["path"].encode(), data, **{field: meant[field] for field in ORIGIN})
    made = index_header(written) + index_entry(0, 3000, crc32c(data[:3000]))
    made += index_entry(0, 5000, crc32c(data)) + closing_entry(5000)
    assert made == (GOLDEN / "file-1.idx").read_bytes()


# Torn


def test_a_torn_pack_gives_the_records_whose_frames_are_whole(golden_pack: bytes) -> None:
    frames = list(pack_reader(golden_pack).frames())
    ends = [frame.offset + frame.frame_bytes for frame in frames]
    edges = [BLOCK, *ends, *(record.offset for frame in frames for record in frame.records), len(golden_pack)]
    near = {edge + step for edge in edges for step in (-65, -64, -1, 0, 1, 8, 56, 64)}
    for cut in sorted({*range(0, len(golden_pack), 131), *near} & set(range(len(golden_pack)))):
        if cut < BLOCK:
            with pytest.raises(Corrupt, match=f"{SEGMENT} is damaged at byte 0"):
                pack_reader(golden_pack[:cut])
            continue
        reader = pack_reader(golden_pack[:cut])
        whole = [frame for frame, end in zip(frames, ends, strict=True) if end <= cut]
        assert list(reader.frames()) == whole, f"cut at {cut}"
        assert not reader.closed
        if cut in (BLOCK, *ends):
            assert reader.damage is None, f"cut at {cut}"
        else:
            where = whole[-1].offset + whole[-1].frame_bytes if whole else BLOCK
            assert f"segment {SEGMENT} is damaged at byte {where}" in str(reader.damage), f"cut at {cut}"
        for record in reader.records():
            assert reader.read(record) == pack_reader(golden_pack).read(record)


def test_an_open_pack_ends_before_a_frame_whose_payload_was_not_written() -> None:
    records = [Written(b"a", content_of(1, 5000), 1), Written(b"b", content_of(2, 3 * CHUNK_BYTES), 2)]
    data = bytearray(pack([[records[0]], [records[1]]], closed=False))
    assert len(read_all(pack_reader(bytes(data)))) == 2
    second = list(pack_reader(bytes(data)).records())[1]
    data[second.offset + 2 * CHUNK_BYTES + 5] ^= 1
    reader = pack_reader(bytes(data))
    assert [record.path for record in reader.records()] == [b"a"]
    assert f"damaged at byte {second.offset + 2 * CHUNK_BYTES}" in str(reader.damage)


def test_a_torn_index_gives_the_bytes_whose_entries_are_whole() -> None:
    data = content_of(3, 3 * CHUNK_BYTES + 100)
    written = Written(b"big", data, 9)
    whole = index(written)
    header = len(index_header(written))
    for cut in range(len(whole)):
        if cut < header:
            with pytest.raises(Corrupt, match=SEGMENT):
                file_reader(data, whole[:cut])
            continue
        reader = file_reader(data, whole[:cut])
        covered = min((cut - header) // 16 * CHUNK_BYTES, len(data))
        assert [(record.offset, record.length) for record in reader.records()] == (
            [(0, covered)] if covered else []
        )
        assert not reader.closed
        assert (reader.damage is None) == ((cut - header) % 16 == 0)
    [(record, found)] = read_all(file_reader(data, whole[:-16]))
    assert found == data and list(record.crcs) == chunk_crcs(data)


def test_the_last_entry_of_a_chunk_counts_and_recovery_may_have_cut_chunks_off() -> None:
    data = content_of(4, CHUNK_BYTES + 6)
    first, second = data[:CHUNK_BYTES], data[CHUNK_BYTES:]
    written = Written(b"big", data, 9)
    grown = index_header(written) + index_entry(0, 100, crc32c(first[:100]))
    grown += index_entry(0, CHUNK_BYTES, crc32c(first)) + index_entry(1, 5, crc32c(second[:5]))
    grown += index_entry(1, 6, crc32c(second))
    [(_, found)] = read_all(file_reader(data, grown + closing_entry(len(data))))
    assert found == data
    [(_, found)] = read_all(file_reader(first, grown + closing_entry(CHUNK_BYTES)))
    assert found == first
    wrong_tails = [
        closing_entry(CHUNK_BYTES + 5),
        closing_entry(len(data) + 1),
        index_entry(3, 5, 0),
        index_entry(1, 5, 0),
        closing_entry(len(data)) + index_entry(1, 7, 0),
        closing_entry(len(data)) * 2,
    ]
    for tail in wrong_tails:
        if tail[-16:-12] == b"\xff\xff\xff\xff" or len(tail) > 16:
            with pytest.raises(Corrupt, match=f"{SEGMENT}.* its index holds no valid entry"):
                file_reader(data, grown + tail)
        else:  # open, as far as one can know
            assert file_reader(data, grown + tail).damage is not None


# Damaged


def test_a_flipped_byte_of_a_pack_is_found_and_named(golden_pack: bytes) -> None:
    frames = list(pack_reader(golden_pack).frames())
    covered = [*range(0, BLOCK, 37), BLOCK - 1]
    for frame in frames:
        header_bytes = int.from_bytes(golden_pack[frame.offset + 12 : frame.offset + 16], "little")
        covered += range(frame.offset, frame.offset + header_bytes)
        for record in frame.records:
            covered += [*range(record.offset, record.offset + record.length, 251)]
            covered += [record.offset + record.length - 1]
    # All but the magic at the very end: without it the pack is an open one, and all of it is read.
    covered += range(frames[-1].offset + frames[-1].frame_bytes, len(golden_pack) - 8)
    for at in covered:
        damaged = bytearray(golden_pack)
        damaged[at] ^= 0x10
        with pytest.raises(Corrupt, match=f"segment {SEGMENT} is damaged at byte [0-9]+: ") as caught:
            read_all(pack_reader(bytes(damaged)))
        named = int(str(caught.value).split("byte ")[1].split(":")[0])
        begins = [0, 16, *(f.offset for f in frames), frames[-1].offset + frames[-1].frame_bytes]
        begins += [len(golden_pack) - 64, *(r.offset for f in frames for r in f.records)]
        assert named in begins and named <= at, f"byte {at} was flipped, {named} was named"


def test_a_flipped_byte_of_a_file_segment_is_found_and_named() -> None:
    data = content_of(5, 2 * CHUNK_BYTES + 300)
    whole = index(Written(b"dir/big", data, 9))
    # The closing entry damaged, it is an index of an open segment: what it says of chunks still holds.
    for at in range(len(whole) - 16):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        with pytest.raises(Corrupt, match=f"segment {SEGMENT} is damaged at byte [0-9]+: "):
            file_reader(data, bytes(damaged))
    for at in range(len(whole) - 16, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        reader = file_reader(data, bytes(damaged))
        assert not reader.closed and f"byte {len(whole) - 16}:" in str(reader.damage)
        assert [record.length for record in reader.records()] == [len(data)]
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 0x10
        reader = file_reader(bytes(changed), whole)
        [record] = reader.records()
        begin = at // CHUNK_BYTES * CHUNK_BYTES
        with pytest.raises(Corrupt, match=f"segment {SEGMENT} is damaged at byte {begin}: "):
            reader.read(record)
        # The other chunks can still be read.
        other = 0 if begin else CHUNK_BYTES
        assert reader.read(record, other, 10) == data[other : other + 10]
    cut = file_reader(data[:-1], whole)
    with pytest.raises(Corrupt, match=f"segment {SEGMENT} .* ends"):
        cut.read(next(iter(cut.records())))


def test_with_on_damage_everything_else_is_read() -> None:
    frames = [[Written(b"d/%d" % number, content_of(number, 700), number)] for number in range(1, 6)]
    whole = pack(frames)
    spans = list(pack_reader(whole).frames())
    for at, lost in [
        (100, None),
        (spans[2].offset + 60, b"d/3"),
        (len(whole) - 70, None),
        (len(whole) - 40, None),
    ]:
        damaged = bytearray(whole)
        damaged[at] ^= 1
        told: list[Corrupt] = []
        reader = pack_reader(bytes(damaged), on_damage=told.append)
        found = {record.path: reader.read(record) for record in reader.records()}
        assert told and all(SEGMENT in str(damage) for damage in told), at
        expected = {record.path: record.payload for [record] in frames if record.path != lost}
        assert found == expected, at


def test_a_later_format_and_another_segment_are_refused_by_name(golden_pack: bytes) -> None:
    block = golden_pack[:8] + struct.pack("<I", 2) + golden_pack[12 : BLOCK - 4]
    later = block + struct.pack("<I", crc32c(block)) + golden_pack[BLOCK:]
    with pytest.raises(Invalid, match="upgrade headrace"):
        pack_reader(later)
    with pytest.raises(Corrupt, match=f"{OTHER}.*it says that it is {SEGMENT}"):
        pack_reader(golden_pack, OTHER)
    for name in ("", "vol", SEGMENT.lower(), SEGMENT[:-1], "8" + SEGMENT[1:], "U" * 26):
        with pytest.raises(Invalid, match="ULID"):
            pack_reader(golden_pack, name)
    reader = pack_reader(golden_pack)
    foreign = next(iter(pack_reader(pack([[Written(b"x", b"y")]], OTHER), OTHER).records()))
    with pytest.raises(Invalid, match=OTHER):
        reader.read(foreign)
    with pytest.raises(Invalid):
        reader.read(next(iter(reader.records())), -1)


MAGICS = st.sampled_from([b"HRPACK\0\x01", b"HRFRAME\x01", b"HRINDEX\x01", b""])


@given(MAGICS, st.binary(max_size=300), st.integers(0, 5000), st.sampled_from([b"HRPKEND\x01", b""]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_corrupt_or_invalid(magic: bytes, noise: bytes, zeros: int, end: bytes) -> None:
    data = magic + noise + bytes(zeros) + noise + end
    makes: list[Callable[[], PackReader | FileReader]] = [
        lambda: pack_reader(data),
        lambda: file_reader(noise, data),
        # A header that is good, so that what follows is looked at.
        lambda: pack_reader(pack([], closed=False) + data),
        lambda: file_reader(noise, index_header(Written(b"x", noise)) + data),
    ]
    for make in makes:
        try:
            read_all(make())
        except (Corrupt, Invalid) as error:
            assert SEGMENT in str(error)


changes_of_headers = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=6)


@given(changes_of_headers)
@settings(max_examples=300, deadline=None)
def test_a_frame_with_a_right_checksum_is_read_within_its_bounds_or_corrupt(
    changes: list[tuple[int, int]],
) -> None:
    records = [Written(b"d/%d" % number, content_of(number, 1000 * number), number) for number in range(4)]
    data = bytearray(pack([records]))
    header_bytes = int.from_bytes(data[BLOCK + 12 : BLOCK + 16], "little")
    for at, byte in changes:
        data[BLOCK + 48 + at % (header_bytes - 48)] = byte
    data[BLOCK + 8 : BLOCK + 12] = struct.pack("<I", crc32c(bytes(data[BLOCK + 12 : BLOCK + header_bytes])))
    reader = pack_reader(bytes(data))
    try:
        for frame in reader.frames():
            for record in frame.records:
                assert BLOCK + header_bytes <= record.offset
                assert record.offset + record.length <= frame.offset + frame.frame_bytes
                assert len(record.crcs) == -(-record.length // CHUNK_BYTES)
                assert 0 <= record.mode < 2**16 and 0 <= record.file_bytes < 2**64
    except Corrupt as error:
        assert SEGMENT in str(error)


@given(changes_of_headers, st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_a_footer_with_a_right_checksum_is_followed_within_bounds_or_corrupt(
    changes: list[tuple[int, int]], count: int
) -> None:
    data = bytearray(pack([[Written(b"a", b"x" * 10)]] * 3))
    footer = len(data) - 64 - 3 * 16
    for at, byte in changes:
        data[footer + at % (64 + 3 * 16 - 12)] = byte
    if count % 2:
        data[-48:-40] = struct.pack("<Q", count)
    data[-12:-8] = struct.pack("<I", crc32c(bytes(data[footer:-12])))
    try:
        assert [found for _, found in read_all(pack_reader(bytes(data)))] == [b"x" * 10] * 3
    except Corrupt as error:
        assert SEGMENT in str(error)


written_records = st.builds(
    Written,
    path=st.binary(max_size=40) | st.from_regex(rb"([ab]{0,2}/){0,2}[a-z]{1,9}", fullmatch=True),
    payload=st.binary(max_size=200) | st.sampled_from([content_of(6, size) for size in (2047, 2048, 5000)]),
    ino=st.integers(0, 2**64 - 1),
    mode=st.integers(0, 2**16 - 1),
    uid=st.integers(0, 2**32 - 1),
    gid=st.integers(0, 2**32 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    file_offset=st.integers(0, 2**64 - 1),
    file_bytes=st.integers(0, 2**64 - 1),
)


@given(st.lists(st.lists(written_records, min_size=1, max_size=5), max_size=3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_is_read_the_same(frames: list[list[Written]], closed: bool) -> None:
    found = read_all(pack_reader(pack(frames, closed=closed)))
    assert [as_written(record, payload) for record, payload in found] == [
        record for frame in frames for record in frame
    ]


def as_written(record: Record, payload: bytes) -> Written:
    return Written(record.path, payload, **{field: getattr(record, field) for field in ORIGIN})


# By ranges


def test_a_pack_in_a_bucket_is_listed_with_one_range_per_frame() -> None:
    frames = [[Written(b"d/%d" % number, content_of(number, 3000), number)] for number in range(20)]
    data = pack(frames)
    asked: list[tuple[int, int]] = []

    def get(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return data[offset : offset + length]

    reader = PackReader(get, len(data), SEGMENT)
    assert len(asked) == 3  # header, the footer's end, footer
    records = list(reader.records())
    assert len(asked) == 3 + len(frames)
    assert all(length > 0 and offset + length <= len(data) for offset, length in asked)
    assert reader.read(records[7]) == content_of(7, 3000)
    assert asked[-1] == (records[7].offset, 3000) and len(asked) == 4 + len(frames)


def test_what_the_store_raises_passes_through() -> None:
    def get(offset: int, length: int) -> bytes:
        raise TimeoutError("the bucket does not answer")

    with pytest.raises(TimeoutError, match="does not answer"):
        PackReader(get, 10_000, SEGMENT)


# What a real engine wrote


SMALL = {
    b"train/cat/%04d.bin" % number: content_of(number, size)
    for number, size in enumerate(
        [1, 63, 64, 700, 2047, 2048, 4096, 4097, 10_240, CHUNK_BYTES - 1, CHUNK_BYTES]
    )
}
CHUNKED = {
    b"chunks/%d" % number: content_of(number, size)
    for number, size in enumerate([CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 300_001])
}
ODD = {
    path: content_of(number, 500 + number)
    for number, path in enumerate(
        [b"odd/\xff\xfe\n.jpg", "odd/\u00e9\u4e2d.txt".encode(), b"odd/-rf", b"odd/...", b"odd/ a  b ",
         b"odd/" + b"n" * 255, b"odd/a\\b\"'", b"/".join([b"deep"] * 40) + b"/x"]
    )
}  # fmt: skip
EMPTY = [b"empty/1", b"empty/2"]


def fill(volume: headrace.Volume) -> dict[bytes, bytes]:
    """Files of every kind in the volume; returns what they hold, but the empty ones."""
    files = {**SMALL, **CHUNKED, **ODD}
    entries = [
        PutEntry(b"/" + path, size=len(data), mode=0o640, mtime_ns=CREATED_NS + number)
        for number, (path, data) in enumerate(files.items())
    ]
    entries += [PutEntry(b"/" + path) for path in EMPTY]
    volume.put(entries, list(files.values()), parents=True)
    large = bytearray(content_of(50, LARGE_BYTES))
    volume.makedirs("/large")
    with volume.open("/large/model.bin", "wb") as file:
        for at in range(0, len(large), 1 << 20):
            file.write(large[at : at + (1 << 20)])
    # Overwritten after its segment was closed: goes into a pack that was there before.
    volume.sync()
    with volume.open("/large/model.bin", "r+b") as file:
        file.seek(5 << 20)
        file.write(b"overwritten" * 100)
    large[5 << 20 : (5 << 20) + 1100] = b"overwritten" * 100
    files[b"large/model.bin"] = bytes(large)
    return files


def change(volume: headrace.Volume, files: dict[bytes, bytes]) -> None:
    """Some files appended to, overwritten in the middle, cut, made longer by a hole."""
    grown, patched, cut, holed = b"chunks/0", b"chunks/1", b"chunks/2", b"train/cat/0008.bin"
    with volume.open(b"/" + grown, "ab") as file:
        file.write(b"more" * 1000)
    files[grown] += b"more" * 1000
    with volume.open(b"/" + patched, "r+b") as file:
        file.seek(CHUNK_BYTES - 2)
        file.write(b"patch")
    old = files[patched]
    files[patched] = old[: CHUNK_BYTES - 2] + b"patch" + old[CHUNK_BYTES + 3 :]
    with volume.open(b"/" + cut, "wb") as file:
        file.write(b"short")
    files[cut] = b"short"
    with volume.open(b"/" + holed, "r+b") as file:
        file.seek(50_000)
        file.write(b"end")
    files[holed] = files[holed].ljust(50_000, b"\0") + b"end"


def tree(folder: Path) -> dict[bytes, bytes]:
    root = os.fsencode(folder)
    found = {}
    for parent, _, names in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, root)] = Path(os.fsdecode(path)).read_bytes()
    return found


def extract_quietly(segments: Path, folder: Path) -> Extracted:
    told: list[str] = []
    readers = [open_segment(path) for path in find_segments([str(segments)])]
    done = extract(readers, str(folder), told.append)
    assert told == []
    return done


def assert_same(found: dict[bytes, bytes], expected: dict[bytes, bytes]) -> None:
    assert sorted(found) == sorted(expected)
    assert [path for path in expected if found[path] != expected[path]] == []


def test_a_volume_comes_back_from_its_segments_alone(folder: str, tmp_path: Path) -> None:
    with headrace.connect(folder, create=True) as volume:
        files = fill(volume)
        # Another engine, which writes to files whose paths it need not have seen.
        engine_process.stop(folder)
        change(volume, files)
        wanted = {path: volume.stat(b"/" + path) for path in files}
    engine_process.stop(folder)
    done = extract_quietly(Path(folder, "segments"), tmp_path / "back")
    assert_same(tree(tmp_path / "back"), files)
    assert (done.files, done.file_bytes) == (len(files), sum(map(len, files.values())))
    for path, attributes in wanted.items():
        status = os.stat(os.path.join(os.fsencode(tmp_path / "back"), path))
        assert (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns) == (
            0o100000 | attributes.mode & 0o777, attributes.uid, attributes.gid, attributes.mtime_ns,
        ), path  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_come_back(folder: str, tmp_path: Path, seed: int) -> None:
    # What segments cannot say is left out: a hole where bytes were cut off, a cut that no write followed.
    draw = random.Random(seed)
    files: dict[bytes, bytes] = {}
    with headrace.connect(folder, create=True) as volume:
        for step in range(60):
            path = b"%d" % draw.randrange(5)
            old = files.get(path, b"")
            data = content_of(step, draw.choice([1, 100, 5000, 70_000, 400_000]))
            act = "large" if step in (20, 40) else draw.choice(["write", "append", "cut", "fsync", "replace"])
            if act == "replace":
                volume.write_bytes(b"/" + path, data)
                files[path] = data
            elif act == "large":
                data = content_of(step, 17 << 20)
                with volume.open(b"/" + path, "wb") as file:
                    file.write(data)
                files[path] = data
            else:
                keep = draw.randrange(len(old) + 1) if act == "cut" else len(old)
                at = len(old) if act == "append" else draw.randrange(keep + 1)
                with volume.open(b"/" + path, "r+b" if path in files else "wb", buffering=0) as file:
                    file.truncate(keep)
                    file.seek(at)
                    for start in range(0, len(data), 100_000):
                        file.write(data[start : start + 100_000])
                    if act == "fsync":
                        assert isinstance(file, VolumeFile)
                        file.sync()
                files[path] = old[:at] + data + old[at + len(data) : keep]
    engine_process.stop(folder)
    readers = [open_segment(path) for path in find_segments([folder])]
    told: list[str] = []
    done = extract(readers, str(tmp_path / "back"), told.append)
    found = tree(tmp_path / "back")
    assert [path for path, data in files.items() if found.get(path) != data] == []
    # Beside them only what was replaced: its inodes had the same paths.
    assert all(b".ino-" in path for path in found.keys() - files.keys())
    assert done.damaged_files == 0 and len(told) == len(found) - len(files)


def test_records_say_what_the_engine_says(folder: str) -> None:
    with headrace.connect(folder, create=True) as volume:
        files = fill(volume)
        wanted = {path: volume.stat(b"/" + path) for path in files}
    engine_process.stop(folder)
    seen = set()
    kinds = set()
    for path in find_segments([folder]):
        reader = open_segment(path)
        kinds.add(type(reader))
        for record in reader.records():
            assert reader.closed
            attributes = wanted[record.path]
            assert (record.ino, record.uid, record.gid) == (attributes.ino, attributes.uid, attributes.gid)
            assert record.mode & 0o7777 == attributes.mode & 0o7777
            if record.length == len(files[record.path]) and isinstance(reader, PackReader):
                assert reader.read(record) == files[record.path]
                assert record.mtime_ns == attributes.mtime_ns
            assert record.length >= 2048 or record.offset % 64 == 0
            assert record.length < 2048 or record.offset % BLOCK == 0
            seen.add(record.path)
    assert seen == set(files) and kinds == {PackReader, FileReader}


def test_what_kill_nine_left_is_read(folder: str, tmp_path: Path) -> None:
    volume = headrace.connect(folder, create=True)
    files = {**SMALL, **CHUNKED}
    entries = [PutEntry(b"/" + path, size=len(data)) for path, data in files.items()]
    volume.put(entries, list(files.values()), parents=True, durable=True)
    pid = engine_process.running_pid(folder)
    assert pid is not None
    kill_and_wait(pid, signal.SIGKILL)
    readers = [open_segment(path) for path in find_segments([folder])]
    assert readers and not any(reader.closed for reader in readers)
    told: list[str] = []
    extract(readers, str(tmp_path / "back"), told.append)
    assert told == []
    assert_same(tree(tmp_path / "back"), files)
    # Torn in its last frame: whatever is whole before it.
    [path] = find_segments([folder])
    left = open_segment(path)
    assert isinstance(left, PackReader)
    frames = list(left.frames())
    os.truncate(path, frames[-1].offset + frames[-1].frame_bytes - 1)
    torn = open_segment(path)
    assert isinstance(torn, PackReader) and list(torn.frames()) == frames[:-1]
    assert f"{torn.segment} is damaged at byte {frames[-1].offset}" in str(torn.damage)
    # The engine recovers from what the reader only looked at.
    volume.close()
    headrace.connect(folder).close()


# Files put together


def write_segments(
    folder: Path, packs: dict[str, list[list[Written]]], files: dict[str, Written] | None = None
) -> None:
    folder.mkdir()
    for segment, frames in packs.items():
        (folder / f"{segment}.pack").write_bytes(pack(frames, segment))
    for segment, written in (files or {}).items():
        (folder / f"{segment}.file").write_bytes(written.payload)
        (folder / f"{segment}.idx").write_bytes(index(written, segment))


IDS = [SEGMENT[:-1] + digit for digit in "23456789"]


@pytest.fixture
def extracted(tmp_path: Path) -> Iterator[Callable[..., tuple[dict[bytes, bytes], list[str], Extracted]]]:
    """Extracts from packs (and file segments) that are made for it: the tree, what was told, the counts."""

    def make(
        packs: dict[str, list[list[Written]]], files: dict[str, Written] | None = None
    ) -> tuple[dict[bytes, bytes], list[str], Extracted]:
        write_segments(tmp_path / "segments", packs, files)
        told: list[str] = []
        readers = [open_segment(path, lambda damage: told.append(str(damage)))
                   for path in find_segments([str(tmp_path / "segments")])]  # fmt: skip
        done = extract(readers, str(tmp_path / "back"), told.append)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "segments"]
        return tree(tmp_path / "back"), told, done

    yield make


Extract = Callable[..., tuple[dict[bytes, bytes], list[str], Extracted]]


def test_later_records_cover_earlier_ones(extracted: Extract) -> None:
    found, told, _ = extracted(
        {
            IDS[1]: [[Written(b"f", b"B" * 10, 7, file_offset=5, file_bytes=20)]],
            IDS[0]: [
                [Written(b"f", b"A" * 20, 7)],
                [Written(b"", b"C" * 3, 7, file_offset=1, file_bytes=20)],
            ],
        }
    )
    assert (found, told) == ({b"f": b"ACCCA" + b"B" * 10 + b"A" * 5}, [])


def test_what_was_cut_off_stays_cut_off(extracted: Extract) -> None:
    found, _, _ = extracted(
        {
            IDS[0]: [
                [Written(b"f", b"A" * 100, 7)],
                [Written(b"f", b"B", 7)],
                [Written(b"f", b"C", 7, file_offset=50)],
            ]
        }
    )
    assert found == {b"f": b"B" + bytes(49) + b"C"}


def test_a_file_segment_takes_its_place_among_the_records_of_an_older_pack(extracted: Extract) -> None:
    data = content_of(8, CHUNK_BYTES + 10)
    found, told, _ = extracted(
        {
            IDS[0]: [
                [Written(b"f", b"before" * 100_000, 7, mtime_ns=100)],
                [Written(b"f", b"after", 7, mtime_ns=300, file_offset=3, file_bytes=len(data))],
            ],
            IDS[2]: [[Written(b"f", b"later", 7, mtime_ns=50, file_offset=20, file_bytes=len(data))]],
        },
        # Its header was written when the file was shorter.
        {IDS[1]: Written(b"f", data, 7, mtime_ns=200, file_bytes=1000)},
    )
    expected = data[:3] + b"after" + data[8:20] + b"later" + data[25:]
    assert (found, told) == ({b"f": expected}, [])


def test_no_path_leads_out_of_the_folder(extracted: Extract, tmp_path: Path) -> None:
    bad = [
        b"../evil",
        b"a/../../evil",
        b"/abs/evil",
        b"..",
        b".",
        b"a//b",
        b"a/./b",
        b"n\0ul",
        b"",
        b"x/",
        b"y/..",
    ]
    too_long = [b"n" * 256, b"d/" * 3000 + b"x"]
    records = [
        Written(path, b"content %d" % number, number + 2) for number, path in enumerate(bad + too_long)
    ]
    records.append(Written(b"good/.../name", b"good", 1000, mode=0o4755))
    found, told, done = extracted({IDS[0]: [records]})
    expected = {b"headrace-unnamed/ino-%d" % record.ino: record.payload for record in records[:-1]}
    assert_same(found, {**expected, b"good/.../name": b"good"})
    # No message for the one that never had a path; no setuid from bytes that anybody may have made.
    assert len(told) == len(bad) - 1 + len(too_long) and done.damaged_files == 0
    assert (tmp_path / "back/good/.../name").stat().st_mode & 0o7777 == 0o755
    assert not Path("/abs/evil").exists()


def test_a_path_of_many_parts_is_made(tmp_path: Path) -> None:
    path = b"d/" * 1100 + b"x"
    write_segments(tmp_path / "s", {IDS[0]: [[Written(path, b"deep", 5)]]})
    done = extract_quietly(tmp_path / "s", tmp_path / "back")
    assert done.files == 1
    assert Path(tmp_path / "back", os.fsdecode(path)).read_bytes() == b"deep"
    # Too deep for shutil, by which pytest would remove it.
    subprocess.run(["rm", "-rf", tmp_path / "back"], check=True)


def test_a_small_file_that_replaced_a_large_one_gets_its_path(extracted: Extract) -> None:
    # The pack was open before the file segment was made, and after.
    found, _, _ = extracted(
        {IDS[0]: [[Written(b"p", b"small, before", 4)], [Written(b"p", b"small, after", 9, mtime_ns=1)]]},
        {IDS[1]: Written(b"p", b"large", 7)},
    )
    assert found == {b"p": b"small, after", b"p.ino-7": b"large", b"p.ino-4": b"small, before"}


def test_the_inode_written_last_gets_a_path_that_several_had(extracted: Extract) -> None:
    found, told, _ = extracted(
        {
            IDS[0]: [
                [Written(b"p", b"ne", 4)],
                [Written(b"p", b"old", 5), Written(b"p/q", b"beneath a file", 6)],
                [Written(b"p", b"new", 4)],
            ]
        }
    )
    assert found == {b"p": b"new", b"p.ino-5": b"old", b"headrace-unnamed/ino-6": b"beneath a file"}
    assert len(told) == 2


def test_damage_costs_the_chunk_and_is_told_and_named(extracted: Extract, tmp_path: Path) -> None:
    data = content_of(9, 3 * CHUNK_BYTES)
    make = {IDS[0]: [[Written(b"hurt", data, 5), Written(b"fine", b"fine", 6), Written(b"mended", data, 7)]]}
    mended = {IDS[1]: [[Written(b"mended", b"new" * CHUNK_BYTES, 7)]]}
    whole = pack(make[IDS[0]], IDS[0])
    hurt, _, over = pack_reader(whole, IDS[0]).records()
    damaged = bytearray(whole)
    damaged[hurt.offset + CHUNK_BYTES + 9] ^= 1
    damaged[over.offset + 9] ^= 1

    folder = tmp_path / "segments"
    write_segments(folder, mended)
    (folder / f"{IDS[0]}.pack").write_bytes(damaged)
    told: list[str] = []
    readers = [open_segment(path) for path in find_segments([str(folder)])]
    done = extract(readers, str(tmp_path / "back"), told.append)
    expected = data[:CHUNK_BYTES] + bytes(CHUNK_BYTES) + data[2 * CHUNK_BYTES :]
    assert_same(
        tree(tmp_path / "back"),
        {b"hurt.damaged": expected, b"fine": b"fine", b"mended": b"new" * CHUNK_BYTES},
    )
    [message] = told
    assert f"bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES}" in message
    assert f"segment {IDS[0]} is damaged at byte {hurt.offset + CHUNK_BYTES}" in message
    assert (done.files, done.damaged_files) == (3, 1)
    with pytest.raises(Conflict, match="not empty"):
        extract(readers, str(tmp_path / "back"), told.append)


def test_a_record_that_no_file_can_hold_is_told(extracted: Extract) -> None:
    found, told, done = extracted(
        {
            IDS[0]: [
                [
                    Written(b"far", b"x", 5, file_offset=2**64 - 5),
                    Written(b"huge", b"x", 6, file_bytes=2**64 - 1),
                    Written(b"old", b"x", 7, mtime_ns=-(2**63)),
                    Written(b"fine", b"x", 8),
                ]
            ]
        }
    )
    assert found[b"fine"] == b"x" == found[b"old"] and b"far.damaged" in found and b"huge.damaged" in found
    assert done.damaged_files == 2 and len(told) >= 2


def test_segments_are_found_by_name(tmp_path: Path) -> None:
    write_segments(tmp_path / "s", {IDS[1]: [], IDS[0]: []}, {IDS[2]: Written(b"f", b"x")})
    (tmp_path / "s" / f"{IDS[3]}.part").write_bytes(b"")
    found = find_segments([str(tmp_path / "s" / f"{IDS[2]}.file"), str(tmp_path / "s" / f"{IDS[0]}.pack")])
    assert [Path(path).stem for path in found] == [IDS[0], IDS[2]]
    assert [Path(path).stem for path in find_segments([str(tmp_path)])] == IDS[:3]
    with pytest.raises(NotFound):
        find_segments([str(tmp_path / "none")])
    with pytest.raises(Invalid, match="no segment"):
        find_segments([str(tmp_path / "s" / f"{IDS[2]}.idx")])
    (tmp_path / "s" / f"{IDS[2]}.idx").unlink()
    with pytest.raises(NotFound, match=f"{IDS[2]}.*index"):
        open_segment(str(tmp_path / "s" / f"{IDS[2]}.file"))


# The command


def run(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "headrace.cli.segments",
        *(os.fspath(argument) for argument in arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", timeout=120)


def test_the_command_lists_and_extracts(tmp_path: Path) -> None:
    records = [Written(b"d/\xff\n", b"abc", 5, mtime_ns=-1), Written(b"plain name", content_of(1, 5000), 6)]
    write_segments(tmp_path / "s", {IDS[0]: [records]}, {IDS[1]: Written(b"big", b"b" * 100, 7)})
    listed = run(tmp_path / "s")
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith("# segment offset")
    assert lines[1].split(" ")[3:] == ["5", "644", "1000", "1000", "-1.999999999", "0", "3", "d/\\xff\\n"]
    as_json = [json.loads(line) for line in run(tmp_path / "s", "--json").stdout.splitlines()]
    assert [(line["segment"], line["ino"], line["length"]) for line in as_json] == [
        (IDS[0], 5, 3), (IDS[0], 6, 5000), (IDS[1], 7, 100),
    ]  # fmt: skip

    done = run(tmp_path / "s", "--extract", tmp_path / "back")
    assert (done.returncode, done.stderr) == (0, "") and "extracted 3 files" in done.stdout
    assert tree(tmp_path / "back") == {
        b"d/\xff\n": b"abc",
        b"plain name": content_of(1, 5000),
        b"big": b"b" * 100,
    }
    again = run(tmp_path / "s", "--extract", tmp_path / "back")
    assert again.returncode == 5 and "not empty" in again.stderr
    assert run(tmp_path / "none").returncode == 3


def test_the_command_names_damage_and_goes_on(tmp_path: Path) -> None:
    write_segments(
        tmp_path / "s", {IDS[0]: [[Written(b"a", b"aaa", 5)]], IDS[1]: [[Written(b"b", b"bbb", 6)]]}
    )
    (tmp_path / "s" / f"{IDS[2]}.pack").write_bytes(pack([[Written(b"c", b"ccc", 7)]], IDS[2], closed=False))
    path = tmp_path / "s" / f"{IDS[0]}.pack"
    data = bytearray(path.read_bytes())
    data[BLOCK + 60] ^= 1
    path.write_bytes(data)
    listed = run(tmp_path / "s")
    assert listed.returncode == 6 and listed.stdout.rstrip().endswith(" c") and " b\n" in listed.stdout
    assert f"segment {IDS[0]} is damaged at byte {BLOCK}" in listed.stderr
    assert f"segment {IDS[2]} is open; all of it is valid" in listed.stderr
    done = run(tmp_path / "s", "--extract", tmp_path / "back", "--json")
    assert done.returncode == 6 and json.loads(done.stdout)["files"] == 2
    assert tree(tmp_path / "back") == {b"b": b"bbb", b"c": b"ccc"}
