"""Builds manifests from the drawing in `headrace.model.manifest`, independently of the engine's writer."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.model.crc32c import crc32c

TYPES = {"u1": 1, "u4": 2, "u8": 3, "i8": 4}
SEAL = bytes(range(16))
SEAL_TEXT = "00041061050R3GG28A1C60T3GF"


def build(files: dict[str, bytes], root: bytes = b"data", version: int = 3) -> bytes:
    """A manifest of `files` (path below the root -> content); only what the Python reader uses is true."""
    paths = sorted(
        (path.encode("utf-8", "surrogateescape") for path in files), key=lambda path: path.split(b"/")
    )
    directories = [b""]
    parents = [0]
    of_sample = []
    for path in paths:
        parts = path.split(b"/")[:-1]
        row = 0
        for depth in range(len(parts)):
            name = b"/".join(parts[: depth + 1])
            if name not in directories:
                directories.append(name)
                parents.append(row)
            row = directories.index(name)
        of_sample.append(row)
    sizes = [len(files[path.decode("utf-8", "surrogateescape")]) for path in paths]
    n = len(paths)
    columns: dict[str, NDArray[Any]] = {
        "path_start": np.cumsum([0, *map(len, paths)], dtype="<u8"),
        "path_bytes": np.frombuffer(b"".join(paths), dtype="<u1"),
        "directory": np.array(of_sample, dtype="<u4"),
        "size": np.array(sizes, dtype="<u8"),
        "mtime": np.arange(n, dtype="<i8") * -1,
        "mode": np.full(n, 0o644, dtype="<u4"),
        "uid": np.zeros(n, dtype="<u4"),
        "gid": np.zeros(n, dtype="<u4"),
        "ino": np.arange(n, dtype="<u8"),
        "dir_path_start": np.cumsum([0, *map(len, directories)], dtype="<u8"),
        "dir_path_bytes": np.frombuffer(b"".join(directories), dtype="<u1"),
        "dir_parent": np.array(parents, dtype="<u4"),
        "root_path": np.frombuffer(root, dtype="<u1"),
    }
    return assemble(columns, sum(sizes), root, version)


def assemble(columns: dict[str, NDArray[Any]], sample_bytes: int, root: bytes, version: int) -> bytes:
    """The manifest with these columns."""
    table = b""
    body = bytearray()
    for column_name, column in columns.items():
        body += bytes(-len(body) % 64)
        raw = column.tobytes()
        table += struct.pack(
            "<16sIIQQ", column_name.encode(), TYPES[column.dtype.str[1:]], 0, 4096 + len(body), column.size
        )
        body += raw
    header = struct.pack(
        "<8sIIQQQ16sqQI",
        b"HRMANIF\x01", 1, len(columns), columns["size"].size, sample_bytes, version, SEAL, 42,
        4096 + len(body), len(root),
    )  # fmt: skip
    header += bytes(128 - len(header)) + table
    return resealed(header + bytes(4096 - len(header)) + bytes(body))


def resealed(manifest: bytes) -> bytes:
    """The same bytes with the header's checksum made right again."""
    return manifest[:4092] + struct.pack("<I", crc32c(manifest[:4092])) + manifest[4096:]
