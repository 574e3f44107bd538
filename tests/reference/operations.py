"""Random file-system operations, the same for every folder they are applied to.

`Script(seed)` draws operations one after the other; each is a value (a name and arguments with relative
paths) that `Actor.apply` carries out below one root and answers with a value: what the call gave, or the
name of its errno. Two actors over two folders must give equal answers for ever.

Drawing knows the tree only through `paths`, which the test refreshes from the plain folder, so that about
three in four operations meet something that exists and the rest meet what does not.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from typing import Any

from support.linux import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

NAMES = [b"a", b"b", b"c", b"d", b"long-name-" * 12, b"caf\xe9", b" x", b"e\nf"]
SIZES = [0, 1, 7, 100, 512, 2047, 2048, 4095, 4096, 4097, 10_240, 65_535, 65_536, 65_537, 150_000]
OFFSETS = [0, 0, 0, 1, 100, 4096, 5000, 65_535, 65_536, 131_072, 200_000]
HANDLES = 6

Operation = tuple[Any, ...]


class Script:
    """A seeded source of operations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.paths: list[bytes] = []

    def next(self) -> Operation:
        draw = self._random
        kind = draw.choices(
            list(_WEIGHTS),
            weights=list(_WEIGHTS.values()),
        )[0]
        path = self._path()
        match kind:
            case "write":
                return kind, path, draw.choice(OFFSETS), self._data(), draw.random() < 0.7
            case "replace" | "append":
                return kind, path, self._data()
            case "truncate":
                return kind, path, draw.choice(SIZES)
            case "rename" | "rename_noreplace" | "rename_exchange" | "link":
                return kind, path, self._path()
            case "symlink":
                return kind, draw.choice([draw.choice(NAMES), self._path(), b"no/such", b"."]), path
            case "chmod":
                return kind, path, draw.choice([0o600, 0o644, 0o755, 0o400, 0o4711, 0o1777])
            case "utime":
                return kind, path, draw.randrange(-(10**18), 3 * 10**18)
            case "setxattr":
                value = draw.randbytes(draw.choice([0, 1, 20, 200]))
                return kind, path, f"user.{draw.choice('xyz')}", value, draw.choice([0, 0, 1, 2])
            case "removexattr" | "getxattr":
                return kind, path, f"user.{draw.choice('xyz')}"
            case "open":
                flags = draw.choice([os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_APPEND])
                flags |= draw.choice(
                    [0, 0, 0, os.O_TRUNC if flags & os.O_RDWR else 0, os.O_EXCL if flags & os.O_CREAT else 0]
                )
                return kind, draw.randrange(HANDLES), path, flags
            case "handle_write":
                return kind, draw.randrange(HANDLES), draw.choice(OFFSETS), self._data()
            case "handle_read":
                return kind, draw.randrange(HANDLES), draw.choice(OFFSETS), draw.choice(SIZES)
            case "handle_truncate":
                return kind, draw.randrange(HANDLES), draw.choice(SIZES)
            case "handle_fsync" | "handle_stat" | "close":
                return kind, draw.randrange(HANDLES)
            case "mkdir" | "create":
                return kind, path, draw.choice([0o700, 0o755, 0o750])
            case _:
                return kind, path

    def _path(self) -> bytes:
        draw = self._random
        if self.paths and draw.random() < 0.65:
            known = draw.choice(self.paths)
            # A neighbour or a child of something known, or the thing itself.
            where = draw.random()
            if where < 0.6:
                return known
            if where < 0.8:
                return os.path.join(known, draw.choice(NAMES))
            return os.path.join(os.path.dirname(known), draw.choice(NAMES))
        return b"/".join(draw.choice(NAMES) for _ in range(draw.choice([1, 1, 2, 3])))

    def _data(self) -> bytes:
        draw = self._random
        size = draw.choice(SIZES)
        if draw.random() < 0.004:
            size = 3 << 20
        return (draw.randbytes(min(size, 997)) * (size // 997 + 1))[:size]


_WEIGHTS = {
    "create": 8,
    "write": 10,
    "replace": 10,
    "append": 6,
    "truncate": 5,
    "unlink": 6,
    "mkdir": 6,
    "rmdir": 3,
    "rename": 8,
    "rename_noreplace": 2,
    "rename_exchange": 3,
    "link": 4,
    "symlink": 4,
    "readlink": 2,
    "chmod": 4,
    "utime": 3,
    "setxattr": 3,
    "removexattr": 1,
    "getxattr": 2,
    "listdir": 3,
    "stat": 5,
    "read": 8,
    "open": 8,
    "handle_write": 6,
    "handle_read": 6,
    "handle_truncate": 3,
    "handle_fsync": 3,
    "handle_stat": 3,
    "close": 3,
}


class Actor:
    """Applies operations below one root; holds its open files."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fsencode(root)
        self._handles: dict[int, int] = {}

    def apply(self, operation: Operation) -> Any:
        """The operation's answer: a value, or the name of its errno."""
        kind, *arguments = operation
        try:
            return getattr(self, "_" + kind)(*arguments)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))

    def close_all(self) -> None:
        for fd in self._handles.values():
            os.close(fd)
        self._handles.clear()

    def _at(self, path: bytes) -> bytes:
        return os.path.join(self._root, path)

    def _create(self, path: bytes, mode: int) -> None:
        os.close(os.open(self._at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))

    def _write(self, path: bytes, offset: int, data: bytes, create: bool) -> int:
        fd = os.open(self._at(path), os.O_WRONLY | (os.O_CREAT if create else 0), 0o644)
        try:
            return os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def _replace(self, path: bytes, data: bytes) -> int:
        with open(self._at(path), "wb", buffering=0) as file:
            return file.write(data)

    def _append(self, path: bytes, data: bytes) -> int:
        with open(self._at(path), "ab", buffering=0) as file:
            return file.write(data)

    def _truncate(self, path: bytes, size: int) -> None:
        os.truncate(self._at(path), size)

    def _unlink(self, path: bytes) -> None:
        os.unlink(self._at(path))

    def _mkdir(self, path: bytes, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def _rmdir(self, path: bytes) -> None:
        os.rmdir(self._at(path))

    def _rename(self, source: bytes, target: bytes) -> None:
        os.rename(self._at(source), self._at(target))

    def _rename_noreplace(self, source: bytes, target: bytes) -> None:
        renameat2(self._at(source), self._at(target), RENAME_NOREPLACE)

    def _rename_exchange(self, source: bytes, target: bytes) -> None:
        renameat2(self._at(source), self._at(target), RENAME_EXCHANGE)

    def _link(self, source: bytes, target: bytes) -> None:
        os.link(self._at(source), self._at(target), follow_symlinks=False)

    def _symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, self._at(path))

    def _readlink(self, path: bytes) -> bytes:
        return os.readlink(self._at(path))

    def _chmod(self, path: bytes, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def _utime(self, path: bytes, time_ns: int) -> int:
        os.utime(self._at(path), ns=(time_ns, time_ns))
        return os.stat(self._at(path)).st_mtime_ns

    def _setxattr(self, path: bytes, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self._at(path), name, value, flags)

    def _removexattr(self, path: bytes, name: str) -> None:
        os.removexattr(self._at(path), name)

    def _getxattr(self, path: bytes, name: str) -> bytes:
        return os.getxattr(self._at(path), name)

    def _listdir(self, path: bytes) -> list[bytes]:
        return sorted(os.listdir(self._at(path)))

    def _stat(self, path: bytes) -> tuple[int, ...]:
        return _facts(os.lstat(self._at(path)))

    def _read(self, path: bytes) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()

    def _open(self, handle: int, path: bytes, flags: int) -> None:
        fd = os.open(self._at(path), flags, 0o644)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            return
        self._close(handle)
        self._handles[handle] = fd

    def _handle_write(self, handle: int, offset: int, data: bytes) -> int | None:
        fd = self._handles.get(handle)
        return None if fd is None else os.pwrite(fd, data, offset)

    def _handle_read(self, handle: int, offset: int, size: int) -> bytes | None:
        fd = self._handles.get(handle)
        return None if fd is None else os.pread(fd, size, offset)

    def _handle_truncate(self, handle: int, size: int) -> None:
        fd = self._handles.get(handle)
        if fd is not None:
            os.ftruncate(fd, size)

    def _handle_fsync(self, handle: int) -> None:
        fd = self._handles.get(handle)
        if fd is not None:
            os.fsync(fd)

    def _handle_stat(self, handle: int) -> tuple[int, ...] | None:
        fd = self._handles.get(handle)
        return None if fd is None else _facts(os.fstat(fd))

    def _close(self, handle: int) -> None:
        fd = self._handles.pop(handle, None)
        if fd is not None:
            os.close(fd)


def _facts(status: os.stat_result) -> tuple[int, ...]:
    # A directory's size is the file system's own affair.
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return status.st_mode, status.st_nlink, size, status.st_uid, status.st_gid
