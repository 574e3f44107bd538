"""What tests of volumes in a bucket share: contents, writing them, and reading past what the kernel keeps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import headrace
from headrace.model.message import PutEntry
from support.volumes import ObjectVolumeUnderTest

KIB, MIB = 1 << 10, 1 << 20

# Makes a volume by name, with an engine; flash_bytes_max.
Maker = Callable[..., ObjectVolumeUnderTest]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def put(opened: headrace.Volume, files: Mapping[str, bytes], *, durable: bool = False) -> None:
    """Writes many files in one request, so that they come into one pack."""
    entries = [PutEntry(path.encode(), size=len(data)) for path, data in files.items()]
    opened.put(entries, list(files.values()), parents=True, durable=durable)


def read_fresh(path: Path) -> bytes:
    """A file's bytes through its mount, asked of the engine and not of the kernel's page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces = []
        while piece := os.read(descriptor, MIB):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)
