"""Takes a tree out of a volume: as files into a folder, or as objects into a bucket.

Folder, entry by entry in the order of the tree:
1. a directory is made (for its owner alone while it is filled) and opened without following a link;
2. files are copied by several threads: temporary name, bytes, owner, mode, time, attributes, fsync, rename. A
   name either has the whole file or what it had before;
3. further names of a file become hard links to the first, when all files are there;
4. directories get their owner, mode and times, the deepest first.

Bucket: the engine puts the files (`Volume.export`), some hundred in a message; this only walks the tree.

What is there with the same size and time of change is left as it is, so an interrupted export goes on when it
is repeated. Invariant: nothing is written outside of the folder, nor into the volume's own folder or mounts:
every name is used relative to a directory that was opened by us, no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from headrace.client.file import PIECE_BYTES
from headrace.client.volume import DirEntry, Volume
from headrace.errors import (
    Conflict,
    HeadraceError,
    Invalid,
    NotFound,
    Permission,
    Unavailable,
)
from headrace.model.message import Attr, Kind

_T = TypeVar("_T")
_P = ParamSpec("_P")

# They wait for the disk (fsync) or for the object tier most of the time.
_WRITERS = 16
# Files read ahead of them: bounds memory and open directories.
_PENDING_MAX = 4 * _WRITERS
# One message to the engine. Large enough that the store is kept busy, small enough that progress moves.
_FILES_AT_ONCE = 512
_BYTES_AT_ONCE = 256 << 20
_COPY_ATTEMPTS = 3
_ZEROS = bytes(64 << 10)

# What of a target concerns one name alone; anything else (a full disk) ends the export.
_NAME_ERRORS = {
    errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENOTSUP, errno.EPERM, errno.ETXTBSY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An entry that is not in the target. `is_problem`: it should be; else the target has no such thing."""

    path: bytes
    why: str
    is_problem: bool = True


@dataclass(slots=True)
class ExportReport:
    """What was done so far. Read by a progress display while threads add to it."""

    files: int = 0
    file_bytes: int = 0
    # There already.
    unchanged: int = 0
    directories: int = 0
    links: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, files: int = 0, file_bytes: int = 0, unchanged: int = 0, links: int = 0) -> None:
        with self.lock:
            self.files += files
            self.file_bytes += file_bytes
            self.unchanged += unchanged
            self.links += links

    def leave_out(self, path: bytes, why: str, *, is_problem: bool = True) -> None:
        with self.lock:
            self.left_out.append(LeftOut(path, why, is_problem))

    @property
    def problems(self) -> int:
        return sum(entry.is_problem for entry in self.left_out)


class BucketExport:
    """Puts the files below `root` into `url`. Folders exist in a bucket only as parts of keys."""

    def __init__(
        self, volume: Volume, root: bytes, url: str, *, endpoint: str | None = None, region: str | None = None
    ) -> None:
        self.report = ExportReport()
        self._volume = volume
        self._root = root
        self._url = url
        self._endpoint = endpoint
        self._region = region

    def run(self) -> ExportReport:
        """Raises what `Volume.export` raises; what was put until then stays."""
        for paths in self._batches():
            done = self._volume.export(
                paths, self._root, self._url, endpoint=self._endpoint, region=self._region
            )
            self.report.add(files=done.files, file_bytes=done.bytes, unchanged=done.unchanged)
            for entry in done.left_out:
                self.report.leave_out(entry.path, entry.why)
        return self.report

    def _batches(self) -> Iterator[list[bytes]]:
        if self._volume.stat(self._root, follow_links=False).kind is not Kind.DIRECTORY:
            yield [self._root]
            return
        batch: list[bytes] = []
        size = 0
        stack = [self._root]
        while stack:
            folder = stack.pop()
            self.report.directories += 1
            try:
                entries = list(self._volume.scandir(folder))
            except Permission as error:
                self.report.leave_out(folder, error.message)
                continue
            for entry in entries:
                if entry.kind is Kind.DIRECTORY:
                    stack.append(entry.path)
                elif entry.kind is Kind.FILE:
                    batch.append(entry.path)
                    size += entry.stat(follow_links=False).size
                    if len(batch) >= _FILES_AT_ONCE or size >= _BYTES_AT_ONCE:
                        yield batch
                        batch, size = [], 0
                else:
                    why = f"a {entry.kind.value.replace('_', ' ')} is no object"
                    self.report.leave_out(entry.path, why, is_problem=False)
        if batch:
            yield batch


class _OwnPlace(Invalid):
    """The target is the volume itself."""


class _Folder:
    """An open directory of the target. Closed when nobody holds it any more."""

    def __init__(self, descriptor: int, path: bytes) -> None:
        self.descriptor = descriptor
        self.path = path

    def __del__(self) -> None:
        os.close(self.descriptor)


class FolderExport:
    """Copies what is below `root` (or that one file) into the folder `target`, which is made when missing.

    Owners come back if root does it. Invalid: `target` is in the volume's own folder, or in a mount of it.
    """

    def __init__(self, volume: Volume, root: bytes, target: str) -> None:
        self.report = ExportReport()
        self._volume = volume
        self._root = root
        self._owners = os.geteuid() == 0
        self._forbidden = {_identity(os.stat(volume.path))}
        # A mount that this process cannot see, or may not look at, cannot be written to either.
        self._mounts: set[int] = set()
        for mount in volume.status().mounts:
            with contextlib.suppress(OSError):
                if os.path.ismount(mount.mountpoint):
                    self._mounts.add(os.stat(mount.mountpoint).st_dev)
        self._target = os.fsencode(os.path.realpath(target))
        self._check_target()
        self._first_names: dict[int, bytes] = {}
        self._more_names: list[tuple[bytes, Attr, bytes]] = []
        self._directories: list[tuple[bytes, Attr]] = []
        self._no_attributes = threading.Event()

    def run(self) -> ExportReport:
        """Raises OSError if the folder cannot be written to, Unavailable if the volume cannot be read."""
        os.makedirs(self._target, exist_ok=True)
        top = self._open_top()
        attr = self._volume.stat(self._root, follow_links=False)
        pool = ThreadPoolExecutor(_WRITERS, "export")
        try:
            pending: set[Future[object]] = set()
            if attr.kind is Kind.DIRECTORY:
                self._directories.append((b"", attr))
                self._walk(top, pool, pending)
            else:
                self._place(top, os.path.basename(self._root), self._root, attr, pool, pending)
            _finish(pending, 0)
        finally:
            pool.shutdown(cancel_futures=True)
        for path, attr, first in self._more_names:
            self._attempt(self._source(path), self._link, path, attr, first)
        for relative, attr in reversed(self._directories):
            self._attempt(self._source(relative), self._end_directory, relative, attr)
        return self.report

    # -- where ---------------------------------------------------------------------------------------------

    def _check_target(self) -> None:
        above = self._target
        while True:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._check_directory(os.stat(above), self._target)
            parent = os.path.dirname(above)
            if parent == above:
                return
            above = parent

    def _check_directory(self, status: os.stat_result, path: bytes) -> None:
        if _identity(status) in self._forbidden:
            raise _OwnPlace(f"{os.fsdecode(path)} is in the volume's own folder: export to another place")
        if status.st_dev in self._mounts:
            raise _OwnPlace(
                f"{os.fsdecode(path)} is in a mount of the volume itself: export to another place"
            )

    def _open_top(self) -> _Folder:
        top = _Folder(os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), b"")
        self._check_directory(os.fstat(top.descriptor), self._target)
        return top

    def _open_below(self, folder: _Folder, name: bytes) -> _Folder:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        path = folder.path + b"/" + name if folder.path else name
        opened = _Folder(os.open(name, flags, dir_fd=folder.descriptor), path)
        self._check_directory(os.fstat(opened.descriptor), self._target + b"/" + path)
        return opened

    def _open_path(self, relative: bytes) -> _Folder:
        folder = self._open_top()
        for name in relative.split(b"/") if relative else ():
            folder = self._open_below(folder, name)
        return folder

    def _source(self, relative: bytes) -> bytes:
        return self._root.rstrip(b"/") + b"/" + relative if relative else self._root

    # -- the tree ------------------------------------------------------------------------------------------

    def _walk(self, top: _Folder, pool: ThreadPoolExecutor, pending: set[Future[object]]) -> None:
        stack: list[tuple[_Folder, bytes | None, Attr | None]] = [(top, None, None)]
        while stack:
            parent, name, attr = stack.pop()
            if name is None or attr is None:
                folder: _Folder | None = parent
            else:
                path = self._source(parent.path + b"/" + name if parent.path else name)
                folder = self._attempt(path, self._make_directory, parent, name)
                if folder is not None:
                    self._directories.append((folder.path, attr))
            if folder is None:
                continue
            source = self._source(folder.path)
            entries = self._attempt(source, self._list, source)
            for entry in entries or ():
                attr = entry.stat(follow_links=False)
                if entry.kind is Kind.DIRECTORY:
                    stack.append((folder, entry.name, attr))
                else:
                    self._place(folder, entry.name, entry.path, attr, pool, pending)

    def _list(self, path: bytes) -> list[DirEntry[bytes]]:
        return list(self._volume.scandir(path))

    def _make_directory(self, parent: _Folder, name: bytes) -> _Folder:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent.descriptor)
        made = self._open_below(parent, name)
        # From an earlier run it may have a mode that keeps even its owner from writing.
        if not self._owners:
            os.fchmod(made.descriptor, 0o700)
        self.report.directories += 1
        return made

    def _end_directory(self, relative: bytes, attr: Attr) -> None:
        folder = self._open_path(relative)
        self._set_xattrs(folder.descriptor, self._source(relative))
        self._set_owner(folder.descriptor, attr)
        os.fchmod(folder.descriptor, attr.mode & 0o7777)
        os.utime(folder.descriptor, ns=(attr.atime_ns, attr.mtime_ns))
        os.fsync(folder.descriptor)

    def _place(
        self,
        folder: _Folder,
        name: bytes,
        path: bytes,
        attr: Attr,
        pool: ThreadPoolExecutor,
        pending: set[Future[object]],
    ) -> None:
        relative = folder.path + b"/" + name if folder.path else name
        if attr.nlink > 1:
            first = self._first_names.setdefault(attr.ino, relative)
            if first != relative:
                self._more_names.append((relative, attr, first))
                return
        if attr.kind is not Kind.FILE:
            self._attempt(path, self._place_other, folder, name, path, attr)
            return
        _finish(pending, _PENDING_MAX)
        pending.add(pool.submit(self._attempt, path, self._copy, folder, name, path, attr))

    def _attempt(self, path: bytes, act: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Does it. What is wrong with this entry alone is told, and the others go on."""
        try:
            return act(*args, **kwargs)
        except Unavailable:
            raise
        except _OwnPlace:
            raise
        except HeadraceError as error:
            self.report.leave_out(path, error.message)
        except OSError as error:
            if error.errno not in _NAME_ERRORS:
                raise
            self.report.leave_out(path, f"it cannot be made there: {error.strerror}")
        return None

    # -- one entry -----------------------------------------------------------------------------------------

    def _copy(self, folder: _Folder, name: bytes, path: bytes, attr: Attr) -> None:
        there = _look(folder, name)
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise Conflict("a folder of that name is there: remove it, or export to another place")
        same = (attr.size, attr.mtime_ns)
        if there is not None and stat.S_ISREG(there.st_mode) and (there.st_size, there.st_mtime_ns) == same:
            if there.st_mode & 0o7777 != attr.mode & 0o7777:
                descriptor = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor
                )
                try:
                    os.fchmod(descriptor, attr.mode & 0o7777)
                finally:
                    os.close(descriptor)
            self.report.add(unchanged=1)
            return
        temporary = _temporary(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.descriptor)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder.descriptor)
        try:
            attr = self._fill(descriptor, path, attr)
            self._set_xattrs(descriptor, path)
            self._set_owner(descriptor, attr)
            os.fchmod(descriptor, attr.mode & 0o7777)
            os.utime(descriptor, ns=(attr.atime_ns, attr.mtime_ns))
            # Before it has its name: what has it is whole, also after a power cut.
            os.fsync(descriptor)
            os.rename(temporary, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder.descriptor)
            raise
        finally:
            os.close(descriptor)
        self.report.add(files=1, file_bytes=attr.size)

    def _fill(self, descriptor: int, path: bytes, attr: Attr) -> Attr:
        """The file's bytes, and its attributes as they were from their first to their last byte."""
        for _ in range(_COPY_ATTEMPTS):
            if attr.size <= PIECE_BYTES:
                _write(descriptor, self._volume.read_bytes(path), 0)
            else:
                with self._volume.open(path, "rb") as file:
                    at = 0
                    while data := file.read(PIECE_BYTES):
                        _write(descriptor, data, at)
                        at += len(data)
            after = self._volume.stat(path, follow_links=False)
            if (after.ino, after.size, after.mtime_ns) == (attr.ino, attr.size, attr.mtime_ns):
                os.ftruncate(descriptor, attr.size)
                return after
            attr = after
            os.ftruncate(descriptor, 0)
        raise Conflict(f"it changed while it was read, {_COPY_ATTEMPTS} times")

    def _place_other(self, folder: _Folder, name: bytes, path: bytes, attr: Attr) -> None:
        temporary = _temporary(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.descriptor)
        there = _look(folder, name)
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise Conflict("a folder of that name is there: remove it, or export to another place")
        if attr.kind is Kind.SYMLINK:
            target = self._volume.readlink(path)
            is_link = there is not None and stat.S_ISLNK(there.st_mode)
            if is_link and os.readlink(name, dir_fd=folder.descriptor) == target:
                self.report.add(unchanged=1)
                return
            os.symlink(target, temporary, dir_fd=folder.descriptor)
        else:
            os.mknod(temporary, attr.st_mode & ~0o7000, attr.rdev, dir_fd=folder.descriptor)
        if self._owners:
            os.chown(temporary, attr.uid, attr.gid, dir_fd=folder.descriptor, follow_symlinks=False)
        times = (attr.atime_ns, attr.mtime_ns)
        os.utime(temporary, ns=times, dir_fd=folder.descriptor, follow_symlinks=False)
        os.rename(temporary, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        self.report.add(links=attr.kind is Kind.SYMLINK)

    def _link(self, relative: bytes, attr: Attr, first: bytes) -> None:
        (from_path, from_name), (to_path, name) = os.path.split(first), os.path.split(relative)
        origin, folder = self._open_path(from_path), self._open_path(to_path)
        made = _look(origin, from_name)
        if made is None:
            raise NotFound(f"its first name, {os.fsdecode(first)}, could not be exported")
        there = _look(folder, name)
        if there is not None and _identity(there) == _identity(made):
            self.report.add(unchanged=1)
            return
        temporary = _temporary(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.descriptor)
        os.link(
            from_name, temporary, src_dir_fd=origin.descriptor, dst_dir_fd=folder.descriptor,
            follow_symlinks=False,
        )  # fmt: skip
        os.rename(temporary, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        self.report.add(links=1)

    def _set_owner(self, descriptor: int, attr: Attr) -> None:
        if self._owners:
            os.fchown(descriptor, attr.uid, attr.gid)

    def _set_xattrs(self, descriptor: int, path: bytes) -> None:
        for name in self._volume.listxattr(path):
            try:
                os.setxattr(descriptor, os.fsencode(name), self._volume.getxattr(path, name))
            except OSError as error:
                if isinstance(error, HeadraceError):
                    raise
                if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.E2BIG):
                    raise
                self.report.leave_out(path, f"its attribute {name} cannot be stored there: {error.strerror}")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _look(folder: _Folder, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _temporary(name: bytes) -> bytes:
    """The same for a name in every run, so that the next one removes what an interrupted one has left."""
    return b".headrace-export-" + hashlib.blake2b(name, digest_size=8).hexdigest().encode()


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Writes what is not zero: holes stay holes."""
    view = memoryview(data)
    for start in range(0, len(data), len(_ZEROS)):
        piece = view[start : start + len(_ZEROS)]
        if piece == _ZEROS[: len(piece)]:
            continue
        done = 0
        while done < len(piece):
            done += os.pwrite(descriptor, piece[done:], at + start + done)


def _finish(pending: set[Future[object]], left_max: int) -> None:
    """Waits until no more than `left_max` are left; raises what one of them raised."""
    while len(pending) > left_max:
        for future in [future for future in pending if future.done()] or [next(iter(pending))]:
            pending.discard(future)
            future.result()
