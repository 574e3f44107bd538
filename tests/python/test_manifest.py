"""The manifest reader: the engine's golden file, and nothing but Corrupt for damaged ones."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Corrupt, HeadraceError, Invalid
from headrace.model.manifest import Manifest
from support.manifest_builder import SEAL_TEXT, assemble, build, resealed

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    "README": b"r",
    "cat/1": b"one",
    "cat/old/2": b"",
    "cat.txt": b"x",
    "dog/deep/er/3": b"three",
    "b\udce9t/4": b"4",
    "emp/x": b"",
}


def test_the_engines_manifest_is_read_as_it_was_meant() -> None:
    meant = json.loads((GOLDEN / "manifest-1.json").read_text())
    manifest = Manifest((GOLDEN / "manifest-1.bin").read_bytes(), "golden")
    rows = meant["sample_rows"]
    assert manifest.samples == len(rows) == len(manifest.paths)
    assert manifest.sample_bytes == meant["bytes"]
    assert manifest.created_ns == meant["created_ns"]
    assert manifest.root == b"/" + bytes.fromhex(meant["root_path_hex"])
    assert [manifest.paths.raw(i).hex() for i in range(len(rows))] == [row["path_hex"] for row in rows]
    assert [name.encode("utf-8", "surrogateescape").hex() for name in manifest.classes] == meant[
        "classes_hex"
    ]
    assert manifest.labels.tolist() == [row["label"] for row in rows]
    for column in ("size", "mode", "uid", "gid", "ino", "directory"):
        assert manifest.column(column).tolist() == [row[column] for row in rows]
    assert manifest.column("mtime").tolist() == [row["mtime_ns"] for row in rows]
    assert manifest.version == meant["version"]
    assert manifest.seal == meant["seal"]


def test_labels_are_the_first_folder() -> None:
    manifest = Manifest(build(FILES), "test")
    assert manifest.classes == ["b\udce9t", "cat", "dog", "emp"] or manifest.classes == sorted(
        ["b\udce9t", "cat", "dog", "emp"], key=lambda name: name.encode("utf-8", "surrogateescape")
    )
    for path, label in zip(manifest.paths, manifest.labels, strict=True):
        folder, slash, _ = path.partition("/")
        assert label == (manifest.classes.index(folder) if slash else -1)
    assert manifest.labels.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        manifest.labels[0] = 1


def test_paths_behave_as_a_sequence() -> None:
    paths = Manifest(build(FILES), "test").paths
    expected = list(paths)
    assert sorted(expected) == sorted(FILES)
    assert paths == expected
    assert paths[-1] == expected[-1]
    assert paths[np.int64(2)] == expected[2]
    assert paths[1:4] == expected[1:4]
    assert paths[[3, 0]] == [expected[3], expected[0]]
    assert expected[2] in paths
    assert paths.index(expected[4]) == 4
    for wrong in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            paths[wrong]


def test_an_empty_view_has_no_classes() -> None:
    manifest = Manifest(build({}), "test")
    assert (manifest.samples, manifest.classes, manifest.labels.tolist(), list(manifest.paths)) == (
        0,
        [],
        [],
        [],
    )


def test_header_fields_are_read() -> None:
    manifest = Manifest(build(FILES, root=b"a/b", version=9), "test")
    assert (manifest.version, manifest.root, manifest.seal) == (9, b"/a/b", SEAL_TEXT)
    assert manifest.sample_bytes == sum(map(len, FILES.values()))


def test_a_newer_format_says_upgrade() -> None:
    raw = build(FILES)
    with pytest.raises(Invalid, match="upgrade headrace"):
        Manifest(resealed(raw[:8] + struct.pack("<I", 2) + raw[12:]), "test")


def test_a_flipped_bit_in_the_header_is_corrupt() -> None:
    raw = bytearray(build(FILES))
    for at in (0, 20, 70, 130, 400, 4000, 4093):
        raw[at] ^= 4
        with pytest.raises(Corrupt, match="damaged"):
            Manifest(bytes(raw), "test")
        raw[at] ^= 4
    Manifest(bytes(raw), "test")


def test_a_cut_manifest_is_corrupt() -> None:
    raw = build(FILES)
    for length in (0, 1, 4095, 4096, len(raw) - 1):
        with pytest.raises(Corrupt):
            Manifest(raw[:length], "test")


@given(st.lists(st.tuples(st.integers(16, 900), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_header_with_a_right_checksum_can_crash_the_reader(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(build(FILES))
    for at, byte in changes:
        raw[at] = byte
    try:
        manifest = Manifest(resealed(bytes(raw)), "test")
        list(manifest.paths)
        manifest.paths[:]
        manifest.labels.sum()
    except (HeadraceError, IndexError):
        pass


def test_a_loop_in_the_directory_table_is_corrupt() -> None:
    raw = build({"a/b/x": b"", "c/y": b""})
    column = Manifest(raw, "test").column("dir_parent")
    assert column.tolist() == [0, 0, 1, 0]
    at = raw.rindex(column.tobytes())
    looped = raw[:at] + np.array([0, 2, 1, 0], dtype="<u4").tobytes() + raw[at + 16 :]
    with pytest.raises(Corrupt, match="loop"):
        _ = Manifest(looped, "test").labels


def test_a_million_samples_open_at_once_and_label_quickly() -> None:
    n, classes = 1_000_000, 1000
    names = [b"", *(b"%05d" % number for number in range(classes))]
    path = np.char.mod(b"%011d", np.arange(n))
    columns: dict[str, Any] = {
        "path_start": np.arange(n + 1, dtype="<u8") * 11,
        "path_bytes": np.frombuffer(path.tobytes(), dtype="<u1"),
        "directory": (np.arange(n) // (n // classes) + 1).astype("<u4"),
        "mtime": np.zeros(n, dtype="<i8"),
        "dir_path_start": np.cumsum([0, *map(len, names)], dtype="<u8"),
        "dir_path_bytes": np.frombuffer(b"".join(names), dtype="<u1"),
        "dir_parent": np.zeros(classes + 1, dtype="<u4"),
        "root_path": np.frombuffer(b"data", dtype="<u1"),
        "size": np.full(n, 10_240, dtype="<u8"),
    }
    columns |= {name: np.zeros(n, dtype="<u4") for name in ("mode", "uid", "gid")}
    raw = assemble(columns, n * 10_240, b"data", 1)
    begin = time.perf_counter()
    manifest = Manifest(raw, "test")
    assert (len(manifest.paths), manifest.paths[-1]) == (n, "00000999999")
    opened = time.perf_counter()
    assert np.bincount(manifest.labels).tolist() == [n // classes] * classes
    labelled = time.perf_counter()
    assert opened - begin < 0.05
    assert labelled - opened < 1
