"""Compares a tree in a volume with the folder it was imported from: names, kinds, bytes, modes, times, links.

Through a mount both sides are folders and the kernel's own calls do the reading; without one, attributes and
bytes come through the API. Either way every byte is compared, by several threads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from headrace.client.volume import Volume
from headrace.errors import HeadraceError

_THREADS = 4
_CHUNK_BYTES = 4 << 20


class _Attributes(Protocol):
    """The part of `os.stat_result` and of `Attr` that is compared."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_rdev(self) -> int: ...


class Copy(Protocol):
    """The side that was imported, by paths relative to its root."""

    def names(self, directory: bytes) -> dict[bytes, _Attributes]: ...
    def attributes(self, path: bytes) -> _Attributes: ...
    def chunks(self, path: bytes, size: int) -> Iterator[bytes]: ...
    def link(self, path: bytes) -> bytes: ...


@dataclass
class Comparison:
    """What was compared and how it differed. `differences`: (path, what), in no order."""

    files: int = 0
    file_bytes: int = 0
    directories: int = 0
    # Symbolic links and special files.
    others: int = 0
    differences: list[tuple[bytes, str]] = field(default_factory=list)

    def add(self, other: Comparison) -> None:
        self.files += other.files
        self.file_bytes += other.file_bytes
        self.directories += other.directories
        self.others += other.others
        self.differences += other.differences


class MountedCopy:
    """The volume's tree through a mount."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def names(self, directory: bytes) -> dict[bytes, _Attributes]:
        with os.scandir(self._path(directory)) as scan:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in scan}

    def attributes(self, path: bytes) -> _Attributes:
        return os.lstat(self._path(path))

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        return _file_chunks(self._path(path), size)

    def link(self, path: bytes) -> bytes:
        return os.readlink(self._path(path))

    def _path(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root


class VolumeCopy:
    """The volume's tree through the API."""

    def __init__(self, volume: Volume, root: bytes) -> None:
        self._volume = volume
        self._root = root

    def names(self, directory: bytes) -> dict[bytes, _Attributes]:
        scan = self._volume.scandir(self._path(directory))
        return {entry.name: entry.stat(follow_links=False) for entry in scan}

    def attributes(self, path: bytes) -> _Attributes:
        return self._volume.stat(self._path(path), follow_links=False)

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        if size <= _CHUNK_BYTES:
            yield self._volume.read_bytes(self._path(path))
            return
        with self._volume.open(self._path(path), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def link(self, path: bytes) -> bytes:
        return self._volume.readlink(self._path(path))

    def _path(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root


def compare_trees(source: bytes, copy: Copy, time_slack_ns: int = 0) -> Comparison:
    """Compares everything below `source`, and the root itself, with `copy`. Times may differ by
    `time_slack_ns`."""
    total = Comparison()
    _compare_attributes(b"", os.stat(source), copy.attributes(b""), time_slack_ns, total)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="compare") as pool:
        try:
            directories = _directories(source)
            for result in pool.map(
                lambda path: _compare_directory(source, path, copy, time_slack_ns), directories
            ):
                total.add(result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return total


def _directories(source: bytes) -> list[bytes]:
    found = []
    stack = [b""]
    while stack:
        path = stack.pop()
        found.append(path)
        with os.scandir(source + b"/" + path) as scan:
            stack.extend(
                path + b"/" + entry.name if path else entry.name
                for entry in scan
                if entry.is_dir(follow_symlinks=False)
            )
    return found


def _compare_directory(source: bytes, directory: bytes, copy: Copy, time_slack_ns: int) -> Comparison:
    result = Comparison()
    try:
        with os.scandir(source + b"/" + directory if directory else source) as scan:
            mine = {entry.name: entry.stat(follow_symlinks=False) for entry in scan}
        theirs = copy.names(directory)
    except (OSError, HeadraceError) as error:
        result.differences.append((directory, f"cannot be listed: {error}"))
        return result
    for name in mine.keys() | theirs.keys():
        path = directory + b"/" + name if directory else name
        if name not in theirs:
            result.differences.append((path, "is missing"))
        elif name not in mine:
            result.differences.append((path, "is not in the source"))
        else:
            try:
                _compare_entry(source, path, mine[name], theirs[name], copy, time_slack_ns, result)
            except (OSError, HeadraceError) as error:
                result.differences.append((path, f"cannot be compared: {error}"))
    return result


def _compare_entry(
    source: bytes,
    path: bytes,
    mine: os.stat_result,
    theirs: _Attributes,
    copy: Copy,
    time_slack_ns: int,
    result: Comparison,
) -> None:
    if not _compare_attributes(path, mine, theirs, time_slack_ns, result):
        return
    if stat.S_ISLNK(mine.st_mode):
        result.others += 1
        if os.readlink(source + b"/" + path) != copy.link(path):
            result.differences.append((path, "is a link to something else"))
    elif stat.S_ISREG(mine.st_mode):
        result.files += 1
        result.file_bytes += mine.st_size
        if not _same_bytes(source + b"/" + path, path, mine.st_size, copy):
            result.differences.append((path, "has other bytes"))
    elif stat.S_ISDIR(mine.st_mode):
        result.directories += 1
    else:
        result.others += 1


def _compare_attributes(
    path: bytes, mine: os.stat_result, theirs: _Attributes, time_slack_ns: int, result: Comparison
) -> bool:
    """False if the two are not of one kind, so that there is nothing further to compare."""
    if stat.S_IFMT(mine.st_mode) != stat.S_IFMT(theirs.st_mode):
        result.differences.append((path, "is of another kind"))
        return False
    differing = []
    if stat.S_IMODE(mine.st_mode) != stat.S_IMODE(theirs.st_mode) and not stat.S_ISLNK(mine.st_mode):
        differing.append(f"mode {stat.S_IMODE(theirs.st_mode):o}, not {stat.S_IMODE(mine.st_mode):o}")
    if abs(mine.st_mtime_ns - theirs.st_mtime_ns) > time_slack_ns:
        differing.append(f"time {theirs.st_mtime_ns} ns, not {mine.st_mtime_ns} ns")
    if stat.S_ISREG(mine.st_mode) and mine.st_size != theirs.st_size:
        differing.append(f"{theirs.st_size} bytes, not {mine.st_size}")
    if (stat.S_ISCHR(mine.st_mode) or stat.S_ISBLK(mine.st_mode)) and mine.st_rdev != theirs.st_rdev:
        differing.append(f"device {theirs.st_rdev}, not {mine.st_rdev}")
    # Only root's import keeps owners.
    if os.geteuid() == 0 and (mine.st_uid, mine.st_gid) != (theirs.st_uid, theirs.st_gid):
        differing.append(f"owner {theirs.st_uid}:{theirs.st_gid}, not {mine.st_uid}:{mine.st_gid}")
    if differing:
        result.differences.append((path, "has " + ", ".join(differing)))
    return True


def _same_bytes(source: bytes, path: bytes, size: int, copy: Copy) -> bool:
    theirs = copy.chunks(path, size)
    mine = _file_chunks(source, size)
    if size <= _CHUNK_BYTES:  # one chunk a side, whatever their cuts are
        return b"".join(mine) == b"".join(theirs)
    return _same_streams(mine, theirs)


def _same_streams(one: Iterator[bytes], other: Iterator[bytes]) -> bool:
    left = right = b""
    while True:
        left = left or next(one, b"")
        right = right or next(other, b"")
        if not left or not right:
            return left == right
        length = min(len(left), len(right))
        if left[:length] != right[:length]:
            return False
        left, right = left[length:], right[length:]


def _file_chunks(path: bytes, size: int) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        left = size
        while True:
            # One byte more than expected: a longer file shows without another call.
            chunk = os.read(descriptor, min(_CHUNK_BYTES, left + 1))
            if not chunk:
                return
            yield chunk
            left = max(0, left - len(chunk))
            if not left and size <= _CHUNK_BYTES:
                return
    finally:
        os.close(descriptor)
