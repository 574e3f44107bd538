"""A folder as the source of an import.

Walks with scandir in bytes (a name need not be UTF-8), sorted, directory by directory: first everything in a
directory, then its subdirectories, so that the files of one directory lie together in the volume's packs.

Invariant: the bytes given for a file are what it held at one moment. Size and mtime are compared before and
after the read; a file that changed meanwhile is read again, RETRIES times, and then named as a problem.
Everything that vanishes, cannot be read or has no place in a volume is named, and the walk goes on.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator

from headrace.control.source import STREAMED_BYTES_MIN, Entry, Extras, Runs, SourceChanged, SourceProblem

RETRIES = 2
# Of streamed files. Large enough that a request's fixed cost does not show, small enough to hold two.
CHUNK_BYTES = 8 << 20

# O_NONBLOCK: a name that became a FIFO since the scan must not hang the import. O_NOFOLLOW: nor may one that
# became a symbolic link lead out of the tree.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char_device",
    stat.S_IFBLK: "block_device",
}


class FolderSource:
    """The tree under a folder.

    skip: directories by (device, inode) that are left out with a note: the volume's own folder must not be
    imported into itself. skip_devices: file systems that are left out likewise: the mounts of that volume,
    which would grow while they are read.
    """

    sequential = False

    def __init__(
        self,
        folder: bytes,
        *,
        skip: frozenset[tuple[int, int]] = frozenset(),
        skip_devices: frozenset[int] = frozenset(),
        devices: bool,
    ) -> None:
        self.extras = Extras()
        self._folder = folder
        self._skip = skip
        self._skip_devices = skip_devices
        self._devices = devices

    def entries(self) -> Iterator[Entry]:
        status = os.stat(self._folder)
        yield self._entry(b"", self._folder, status)
        # First path of each inode with several links: later ones become hard links to it.
        linked: dict[tuple[int, int], bytes] = {}
        stack = [(b"", self._folder)]
        while stack:
            relative, absolute = stack.pop()
            subdirectories: list[tuple[bytes, bytes]] = []
            for name, status in self._scan(relative, absolute):
                path = relative + b"/" + name if relative else name
                entry = self._classify(path, absolute + b"/" + name, status, linked)
                if entry is None:
                    continue
                if entry.kind == "directory":
                    subdirectories.append((path, entry.origin))
                yield entry
            stack.extend(reversed(subdirectories))

    def _scan(self, relative: bytes, absolute: bytes) -> list[tuple[bytes, os.stat_result]]:
        try:
            with os.scandir(absolute) as scan:
                found = sorted((item.name, item) for item in scan)
        except OSError as error:
            self.extras.problem(relative, _why(error, "read as a directory"))
            return []
        statuses = []
        for name, item in found:
            try:
                statuses.append((name, item.stat(follow_symlinks=False)))
            except OSError as error:
                self.extras.problem(relative + b"/" + name if relative else name, _why(error, "looked at"))
        return statuses

    def _classify(
        self, path: bytes, absolute: bytes, status: os.stat_result, linked: dict[tuple[int, int], bytes]
    ) -> Entry | None:
        entry = self._entry(path, absolute, status)
        inode = (status.st_dev, status.st_ino)
        if entry.kind == "directory":
            why = self._left_out(status)
            if why is not None:
                self.extras.note(f"skipped {os.fsdecode(absolute)}: it is {why}")
                return None
            return entry
        if entry.kind in ("char_device", "block_device"):
            if not self._devices:
                self.extras.refuse(path, "is a device, which only root can import")
                return None
            entry.rdev = status.st_rdev
        elif entry.kind == "symlink":
            try:
                entry.target = os.readlink(absolute)
            except OSError as error:
                self.extras.problem(path, _why(error, "read as a symbolic link"))
                return None
        if status.st_nlink > 1:
            first = linked.setdefault(inode, path)
            if first is not path:
                entry.hard_link = True
                entry.target = first
                entry.size = status.st_size
        return entry

    def _left_out(self, status: os.stat_result) -> str | None:
        """What the directory is, if it is not to be walked."""
        if (status.st_dev, status.st_ino) in self._skip:
            return "the volume's own folder"
        if status.st_dev in self._skip_devices:
            return "a mount of the volume that is imported into"
        return None

    @staticmethod
    def _entry(path: bytes, absolute: bytes, status: os.stat_result) -> Entry:
        kind = _KINDS[stat.S_IFMT(status.st_mode)]
        return Entry(
            path=path,
            kind=kind,
            mode=status.st_mode & 0o7777,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            size=status.st_size if kind == "file" else 0,
            origin=absolute,
        )

    def load(self, entry: Entry) -> bytes:
        for _ in range(1 + RETRIES):
            data = _read_once(entry)
            if data is not None:
                return data
        raise SourceProblem(f"changed while it was read, {1 + RETRIES} times")

    def stream(self, entry: Entry) -> Runs:
        # Retried by the importer, which has to start its temporary file anew.
        descriptor = _open(entry)
        try:
            before = _adopt(entry, os.fstat(descriptor))
            offset = 0
            while offset < entry.size:
                try:
                    start = os.lseek(descriptor, offset, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # nothing but a hole from here to the end
                        break
                    raise
                end = min(os.lseek(descriptor, start, os.SEEK_HOLE), entry.size)
                while start < end:
                    data = os.pread(descriptor, min(CHUNK_BYTES, end - start), start)
                    if not data:
                        raise SourceChanged("became shorter while it was read")
                    yield start, data
                    start += len(data)
                offset = start
            if _identity(os.fstat(descriptor)) != before:
                raise SourceChanged("changed while it was read")
        except OSError as error:
            raise SourceProblem(_why(error, "read")) from error
        finally:
            os.close(descriptor)

    def position(self) -> tuple[int, int]:
        return 0, 0

    def count(self, tell: Callable[[int, int], bool]) -> None:
        files = size = 0
        stack = [self._folder]
        while stack:
            try:
                with os.scandir(stack.pop()) as scan:
                    for item in scan:
                        try:
                            if item.is_dir(follow_symlinks=False):
                                if self._left_out(item.stat(follow_symlinks=False)) is not None:
                                    continue
                                stack.append(item.path)
                            elif item.is_file(follow_symlinks=False):
                                size += item.stat(follow_symlinks=False).st_size
                        except OSError:  # the import itself will name it
                            continue
                        files += 1
            except OSError:
                continue
            if not tell(files, size):
                return

    def close(self) -> None:
        pass


def _open(entry: Entry) -> int:
    try:
        return os.open(entry.origin, _OPEN_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise SourceProblem("became something else than a file during the import") from error
        raise SourceProblem(_why(error, "opened")) from error


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _adopt(entry: Entry, status: os.stat_result) -> tuple[int, int]:
    """The entry says from now on what the opened file says: it may be another than the one scanned."""
    if not stat.S_ISREG(status.st_mode):
        raise SourceProblem("became something else than a file during the import")
    entry.size = status.st_size
    entry.mode = status.st_mode & 0o7777
    entry.uid, entry.gid = status.st_uid, status.st_gid
    entry.mtime_ns = status.st_mtime_ns
    return _identity(status)


def _read_once(entry: Entry) -> bytes | None:
    """The file's bytes, or None if it changed under the read."""
    descriptor = _open(entry)
    try:
        before = _adopt(entry, os.fstat(descriptor))
        if entry.size > 2 * STREAMED_BYTES_MIN:
            raise SourceProblem(f"grew to {entry.size} bytes during the import")
        # One byte more than it should have: growth shows in the same call.
        data = os.read(descriptor, entry.size + 1)
        while 0 < len(data) < entry.size:
            more = os.read(descriptor, entry.size + 1 - len(data))
            if not more:
                break
            data += more
        if len(data) != entry.size or _identity(os.fstat(descriptor)) != before:
            return None
        return data
    except OSError as error:
        raise SourceProblem(_why(error, "read")) from error
    finally:
        os.close(descriptor)


def _why(error: OSError, doing: str) -> str:
    if error.errno == errno.ENOENT:
        return "vanished during the import"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot be {doing}: permission denied"
    return f"cannot be {doing}: {error.strerror}"
