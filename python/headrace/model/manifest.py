"""The manifest of a sealed view, read in place from a memory map.

```text
0     8  magic "HRMANIF\\x01"           40   16  seal id (ULID, big-endian)
8     4  u32 format = 1                56    8  i64 created, ns
12    4  u32 number of columns         64    8  u64 bytes of the whole manifest
16    8  u64 samples n                 72    4  u32 bytes of the sealed root's path (column root_path)
24    8  u64 sum of sample sizes       128   40 per column: name 16 B, zero-padded ASCII
32    8  u64 volume version                     | u32 type (1 u8, 2 u32, 3 u64, 4 i64) | u32 crc32c
                                                | u64 offset | u64 elements
4092  4  u32 crc32c of bytes 0..4092
4096     columns, each from a multiple of 64; little-endian
```
Opening costs the same for ten samples and for a million: the header is checked, columns are only looked at
when asked for, and pages are shared by all processes that map the file. Everything a damaged header could
say is checked before it is used, so that a bad manifest is `Corrupt` and never a crash; columns are indexed
within their bounds by NumPy. Written by `headrace_format::manifest`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Corrupt, Invalid
from headrace.model.crc32c import crc32c

MAGIC = b"HRMANIF\x01"
FORMAT = 1
HEADER_BYTES = 4096
_TABLE_AT = 128
_COLUMN = struct.Struct("<16sIIQQ")
_COLUMNS_MAX = (HEADER_BYTES - 4 - _TABLE_AT) // _COLUMN.size
_HEADER = struct.Struct("<8sIIQQQ16sqQI")
_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u4"),
    3: np.dtype("<u8"),
    4: np.dtype("<i8"),
}
_TYPE_NAMES = {1: "u8", 2: "u32", 3: "u64", 4: "i64"}
_ULID_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

# What this reader uses: type, and elements in terms of n samples and d directories (None: not fixed by them).
_USED = {
    "path_start": (3, "n + 1"),
    "path_bytes": (1, None),
    "directory": (2, "n"),
    "size": (3, "n"),
    "mtime": (4, "n"),
    "mode": (2, "n"),
    "uid": (2, "n"),
    "gid": (2, "n"),
    "dir_path_start": (3, None),
    "dir_path_bytes": (1, None),
    "dir_parent": (2, None),
    "root_path": (1, None),
}


def ulid_text(raw: bytes) -> str:
    """The 26 characters of a ULID's 16 bytes.

    >>> ulid_text(bytes(16))
    '00000000000000000000000000'
    """
    number = int.from_bytes(raw, "big")
    return "".join(_ULID_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


class Manifest:
    """A sealed view's sample table over `buffer` (an mmap or bytes), which it borrows for its lifetime.

    Raises Corrupt when the bytes are not a whole manifest, Invalid for a newer format. `what` names it in
    errors. Reading is safe from any thread and after fork.
    """

    def __init__(self, buffer: Any, what: str) -> None:
        self._what = what
        self._bytes = np.frombuffer(buffer, dtype=np.uint8)
        self._read_header()

    def _read_header(self) -> None:
        length = self._bytes.size
        if length < HEADER_BYTES:
            raise self._corrupt(f"it has {length} bytes, less than its header of {HEADER_BYTES}")
        header = self._bytes[:HEADER_BYTES].tobytes()
        (magic, format_number, columns, self.samples, self.sample_bytes, self.version, seal, self.created_ns,
         file_bytes, root_bytes) = _HEADER.unpack_from(header)  # fmt: skip
        if magic != MAGIC:
            raise self._corrupt(f"it begins with {magic!r}")
        if format_number != FORMAT:
            raise Invalid(
                f"{self._what} has manifest format {format_number}; this headrace reads {FORMAT}: "
                "upgrade headrace"
            )
        stored = int.from_bytes(header[-4:], "little")
        found = crc32c(header[:-4])
        if stored != found:
            raise self._corrupt(f"its header's checksum is {found:#010x}, stored {stored:#010x}")
        if file_bytes != length:
            raise self._corrupt(f"it has {length} bytes and says {file_bytes}")
        if columns > _COLUMNS_MAX:
            raise self._corrupt(f"it claims {columns} columns, more than {_COLUMNS_MAX}")
        self.seal = ulid_text(seal)
        self._columns: dict[str, NDArray[Any]] = {}
        for row in range(columns):
            self._add_column(*_COLUMN.unpack_from(header, _TABLE_AT + row * _COLUMN.size))
        self._check_used(root_bytes)

    def _add_column(self, padded: bytes, type_number: int, _crc: int, offset: int, elements: int) -> None:
        name = padded.rstrip(b"\0").decode("ascii", "backslashreplace")
        dtype = _TYPES.get(type_number)
        if dtype is None:
            return  # a column type of a later revision; needed columns are checked below
        end = offset + elements * dtype.itemsize
        if offset < HEADER_BYTES or offset % 64 or end > self._bytes.size:
            raise self._corrupt(f"column {name} claims bytes {offset} to {end} of {self._bytes.size}")
        self._columns[name] = self._bytes[offset:end].view(dtype)

    def _check_used(self, root_bytes: int) -> None:
        for name, (type_number, elements) in _USED.items():
            column = self._columns.get(name)
            if column is None or column.dtype != _TYPES[type_number]:
                raise self._corrupt(f"column {name} ({_TYPE_NAMES[type_number]}) is missing")
            wanted = {"n": self.samples, "n + 1": self.samples + 1}.get(elements or "")
            if wanted is not None and column.size != wanted:
                raise self._corrupt(f"column {name} has {column.size} rows, not {wanted}")
        directories = self._columns["dir_parent"].size
        if self._columns["dir_path_start"].size != directories + 1 or not directories:
            raise self._corrupt("its directory table is not whole")
        if self._columns["root_path"].size != root_bytes:
            raise self._corrupt("its root path is not whole")

    def _corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"{self._what} is damaged: {why}: seal the folder again, and check the disk")

    def column(self, name: str) -> NDArray[Any]:
        """The column as a read-only view of the map, one element per row. Raises Invalid if there is none."""
        try:
            column = self._columns[name].view()
        except KeyError:
            raise Invalid(
                f"{self._what} has no column {name!r}; it has {', '.join(sorted(self._columns))}"
            ) from None
        column.flags.writeable = False
        return column

    @property
    def root(self) -> bytes:
        """The sealed folder's path in the volume, absolute."""
        return b"/" + self._columns["root_path"].tobytes().lstrip(b"/")

    @functools.cached_property
    def paths(self) -> Paths:
        return Paths(self._columns["path_start"], self._columns["path_bytes"], self._what)

    @functools.cached_property
    def _classes(self) -> tuple[list[str], NDArray[np.int64]]:
        return self._classify()

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted by their bytes: the folders right below the root that hold samples."""
        return list(self._classes[0])

    @property
    def labels(self) -> NDArray[np.int64]:
        """(n,) int64, read-only: the row in `classes` of each sample; -1 for samples right in the root.
        Computed once, about 10 ns a sample, 8 bytes each."""
        return self._classes[1]

    def _classify(self) -> tuple[list[str], NDArray[np.int64]]:
        parent = self._columns["dir_parent"].astype(np.int64)
        directory = self._columns["directory"]
        rows = parent.size
        if parent.max() >= rows or (directory.size and int(directory.max()) >= rows):
            raise self._corrupt("a directory number lies beyond the directory table")
        # Each row's ancestor right below the root, by pointer doubling: log2(depth) steps.
        top = np.where(parent == 0, np.arange(rows), parent)
        for _ in range(64):
            further = top[top]
            if np.array_equal(further, top):
                break
            top = further
        if parent[top].any():
            raise self._corrupt("its directory table has a loop")

        used_rows = np.unique(top[np.unique(directory)]) if directory.size else np.empty(0, np.int64)
        names = Paths(self._columns["dir_path_start"], self._columns["dir_path_bytes"], self._what)
        named = sorted((names.raw(int(row)), int(row)) for row in used_rows if row)
        label_of_row = np.full(rows, -1, dtype=np.int64)
        for label, (_, row) in enumerate(named):
            label_of_row[row] = label
        labels = label_of_row[top][directory]
        labels.flags.writeable = False
        return [os.fsdecode(name) for name, _ in named], labels


class Paths(Sequence[str]):
    """Paths by sample number, decoded when asked for (surrogateescape). Slices and arrays give lists."""

    def __init__(self, start: NDArray[np.uint64], characters: NDArray[np.uint8], what: str) -> None:
        self._start = start
        self._characters = characters
        self._what = what

    def __len__(self) -> int:
        return self._start.size - 1

    def raw(self, index: int) -> bytes:
        """The path's bytes as they are stored. `index` in [0, len)."""
        begin, end = int(self._start[index]), int(self._start[index + 1])
        if not begin <= end <= self._characters.size:
            raise Corrupt(f"{self._what} is damaged: path {index} claims bytes {begin} to {end}")
        return self._characters[begin:end].tobytes()

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> str: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[np.integer[Any]]) -> list[str]: ...
    def __getitem__(self, index: Any) -> str | list[str]:
        if isinstance(index, slice):
            return [os.fsdecode(self.raw(i)) for i in range(*index.indices(len(self)))]
        if isinstance(index, list | tuple | np.ndarray):
            return [self[int(i)] for i in index]
        return os.fsdecode(self.raw(row_of(index, len(self))))

    def __iter__(self) -> Iterator[str]:
        step = 65536
        for begin in range(0, len(self), step):
            starts = self._start[begin : begin + step + 1].tolist()
            first = starts[0]
            if starts != sorted(starts) or starts[-1] > self._characters.size:
                raise Corrupt(f"{self._what} is damaged: its paths overlap")
            block = self._characters[first : starts[-1]].tobytes()
            for left, right in itertools.pairwise(starts):
                yield os.fsdecode(block[left - first : right - first])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def __repr__(self) -> str:
        return f"<{len(self)} paths of {self._what}>"


def row_of(index: Any, count: int, what: str = "sample") -> int:
    """`index` as a row in [0, count), counting from the end when negative; IndexError outside, which names
    `what` is counted, TypeError for what is not an integer (NumPy integers are)."""
    row = operator.index(index)
    if row < 0:
        row += count
    if not 0 <= row < count:
        raise IndexError(f"{what} {operator.index(index)} of {count}")
    return row
