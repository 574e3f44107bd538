"""A volume as Python sees it: files by path, sealing, and the engine behind it.

Every method is one request (a few where it says so) to the engine on this machine; whether the caller may do
it is decided there, by the mode bits, for the user of this process. Paths are str (surrogateescape) or bytes,
absolute in the volume; the leading "/" may be left out. What is returned has the type of the path given.
Open files are in `file.py`, sealed views in `dataset.py`, the connections in `connection.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, AnyStr, Generic, Literal, Self, overload

from headrace.client.connection import Connection, Pool
from headrace.client.engine import create_if_missing, greet, open_connection, volume_folder
from headrace.client.file import PIECE_BYTES, VolumeFile, open_file
from headrace.client.wire import Buffer
from headrace.errors import Full, HeadraceError, Invalid, IsADirectory, NotFound
from headrace.model import message
from headrace.model.message import Attr, Difference, Kind, PutDone, PutEntry, Restored, Sealed, Snapshot
from headrace.model.temporary import temporary_name

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.client.dataset import Dataset

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# A page of a listing; with attributes about 150 bytes an entry.
_LIST_ENTRIES_MAX = 4096


def connect(volume: str | os.PathLike[str], *, start: bool = True, create: bool = False) -> Volume:
    """The volume in the folder `volume`, connected.

    start: start the engine if none runs; it stays for the next user and leaves when unused for 15 minutes.
    create: make the volume if the folder is missing or empty. Blocks until the engine answers, up to 60 s
    when it starts. Safe from many processes at once: they end up with one engine. After fork the child
    connects anew by itself.

    Raises NotFound (no such folder, no headraced), Invalid (not a volume, a newer format), Permission (not
    this user's), Unavailable (start=False and no engine runs; or it did not get ready), Corrupt.

    >>> with connect(folder, create=True) as volume:
    ...     volume.write_bytes("/hello", b"hi")
    ...     volume.read_bytes("/hello")
    b'hi'
    """
    folder = volume_folder(volume)
    if create:
        create_if_missing(folder)
    connected = Volume(folder, start=start)
    connected.hello()
    return connected


class Volume:
    """One volume. Make it with `headrace.connect`.

    Safe from any thread (calls run side by side on connections of their own) and after fork, where the child
    connects anew. Pickles to its path; the copy connects when it is first used. An engine that ends in
    mid-call makes that call Unavailable; the next one starts it again unless `start` was False.
    """

    def __init__(self, folder: str, *, start: bool = True) -> None:
        self._folder = folder
        self._start = start
        self._connect = functools.partial(open_connection, folder, start)
        self._pool = Pool(self._connect)

    @property
    def path(self) -> str:
        """The volume's folder, absolute."""
        return self._folder

    def connection(self) -> Connection:
        """A new connection that is the caller's alone, for bulk work or a stream, and its to close."""
        return self._connect()

    def call(
        self,
        request: message.Request,
        answer: Any = None,
        payload: Sequence[Buffer] = (),
        into: memoryview | None = None,
    ) -> Any:
        """Sends one request of `headrace.model.message` and gives its answer's `ok`, of type `answer`.

        For what the methods below do not cover. Blocks until the engine answers; Ctrl-C ends the wait.
        """
        return self._pool.call(request, answer, payload, into).ok

    def hello(self) -> message.Welcome:
        """Who answers: engine version, process id, volume id, format."""
        connection = self._pool.take()
        try:
            return greet(connection)
        finally:
            self._pool.give(connection)

    # Whole files

    def read_bytes(self, path: Path) -> bytes:
        """The file's content. One request for most files; one per 8 MiB for those that are more than an
        answer (64 MiB) or the engine's memory holds.

        A file that is replaced meanwhile is read whole, as it was when it was opened.
        Raises NotFound, Permission, IsADirectory, Corrupt.
        """
        name = wire_path(path)
        try:
            return self._pool.call(message.ReadFile(name)).payload
        except (Invalid, Full) as error:
            # More than an answer, or than the engine's memory, holds; or something else is wrong.
            if isinstance(error, IsADirectory) or self.stat(name).size <= PIECE_BYTES:
                raise
        with self.open(name, "rb", buffering=0) as raw:
            content: bytes = raw.read()
        return content

    def write_bytes(
        self, path: Path, data: Buffer, *, mode: int = 0o644, parents: bool = False, durable: bool = False
    ) -> None:
        """Makes `path` a file with content `data`, replacing one that was there in one step.

        mode: permission bits. parents: missing folders are made. durable: on disk when this returns, else
        within 5 s. Above 8 MiB the bytes go to a file `.headrace-partial-*` beside it first, which is then
        renamed. Raises NotFound (no such folder), IsADirectory, Permission, Full.
        """
        name = wire_path(path)
        view = memoryview(data).cast("B")
        if view.nbytes <= PIECE_BYTES:
            self.put([PutEntry(name, mode=mode, size=view.nbytes)], [view], parents=parents, durable=durable)
            return
        folder = os.path.dirname(name)
        if parents:
            self.makedirs(folder, exist_ok=True)
        partial, raw = self._open_partial(name, mode)
        try:
            with raw:
                for at in range(0, view.nbytes, PIECE_BYTES):
                    piece = view[at : at + PIECE_BYTES]
                    while piece.nbytes:
                        piece = piece[raw.write(piece) :]
                if durable:
                    raw.sync()
            self.rename(partial, name)
        except BaseException:
            with contextlib.suppress(HeadraceError):
                self.remove(partial)
            raise
        if durable:
            self.sync()

    def _open_partial(self, path: bytes, mode: int) -> tuple[bytes, VolumeFile]:
        folder, name = os.path.split(path)
        for attempt in itertools.count():
            kind = b"partial-%d-%d" % (os.getpid(), attempt)
            partial = os.path.join(folder, temporary_name(kind, name))
            try:
                return partial, VolumeFile(self._pool, partial, "x", mode)
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def put(
        self,
        entries: Sequence[PutEntry],
        data: Sequence[Buffer] = (),
        *,
        parents: bool = False,
        durable: bool = False,
    ) -> PutDone:
        """Creates or replaces many entries in one request, each atomically, in their order.

        data: buffers with the files' bytes one after the other, as the entries' `size`s divide them; 64 MiB
        at most, and less where the engine was given little memory (8 MiB are always taken).
        parents: missing folders are made (0755). durable: all on disk when this returns.
        An error names the first entry that failed; those before it are done, those after it are not.
        """
        wanted = sum(entry.size for entry in entries)
        given = sum(memoryview(buffer).nbytes for buffer in data)
        if wanted != given:
            raise Invalid(f"put: the entries' sizes add up to {wanted} bytes, but {given} were given")
        done: PutDone = self.call(message.Put(list(entries), parents, durable), PutDone, data)
        return done

    # Open files

    @overload
    def open(
        self,
        path: Path,
        mode: Literal["r", "w", "a", "x", "r+", "w+", "a+", "x+", "rt", "wt", "at", "xt"] = "r",
        *,
        permissions: int = ...,
        buffering: int = ...,
        encoding: str | None = ...,
        errors: str | None = ...,
        newline: str | None = ...,
    ) -> IO[str]: ...
    @overload
    def open(
        self,
        path: Path,
        mode: Literal["rb", "wb", "ab", "xb", "rb+", "wb+", "ab+", "xb+", "r+b", "w+b", "a+b", "x+b"],
        *,
        permissions: int = ...,
        buffering: int = ...,
    ) -> IO[bytes]: ...
    @overload
    def open(
        self,
        path: Path,
        mode: str,
        *,
        permissions: int = ...,
        buffering: int = ...,
        encoding: str | None = ...,
        errors: str | None = ...,
        newline: str | None = ...,
    ) -> IO[Any]: ...
    def open(
        self,
        path: Path,
        mode: str = "r",
        *,
        permissions: int = 0o644,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file object like the builtin `open` gives: modes r, w, a, x with + and b or t; text is UTF-8.

        permissions: mode bits of a file that this creates. buffering: bytes, default 1 MiB; 0 for none
        (binary only). Each open file holds one connection. Visible to others at flush() or close(), durable
        within 5 s of that; for durable now: flush, then `raw.sync()`, or `Volume.sync`.
        Raises NotFound, AlreadyExists (x), IsADirectory, Permission, Invalid (mode).

        >>> with volume.open("/notes.txt", "w") as file:
        ...     _ = file.write("one")
        >>> volume.open("/notes.txt").read()
        'one'
        """
        return open_file(self._pool, wire_path(path), mode, permissions, buffering, encoding, errors, newline)

    # Folders

    @overload
    def listdir(self, path: str = "/") -> list[str]: ...
    @overload
    def listdir(self, path: bytes) -> list[bytes]: ...
    def listdir(self, path: str | bytes = "/") -> list[str] | list[bytes]:
        """The names in a folder, in byte order. One request per 4,096 names."""
        if isinstance(path, bytes):
            return [entry.name for entry in self._entries(path, attrs=False)]
        return [os.fsdecode(entry.name) for entry in self._entries(os.fsencode(path), attrs=False)]

    def scandir(self, path: AnyStr, *, attrs: bool = True) -> Iterator[DirEntry[AnyStr]]:
        """The entries of a folder in byte order, with their attributes unless `attrs` is False.

        One request per 4,096 entries, as they are consumed; entries made or removed meanwhile may or may not
        be seen, all others once.
        """
        for entry in self._entries(os.fsencode(path), attrs):
            name: Any = entry.name if isinstance(path, bytes) else os.fsdecode(entry.name)
            yield DirEntry(self, name, os.path.join(path, name), entry)

    def _entries(self, path: bytes, attrs: bool) -> Iterator[message.ListEntry]:
        after = None
        while True:
            listing: message.Listing = self.call(
                message.List(wire_path(path), after, _LIST_ENTRIES_MAX, attrs), message.Listing
            )
            yield from listing.entries
            after = listing.next
            if after is None:
                return

    def walk(
        self, path: AnyStr, *, follow_links: bool = False
    ) -> Iterator[tuple[AnyStr, list[AnyStr], list[AnyStr]]]:
        """(folder, names of folders in it, names of all else), top down, as `os.walk`; the list of folders
        may be changed to steer the walk. Raises at once what a listing raises."""
        waiting = [path]
        while waiting:
            folder = waiting.pop()
            folders: list[AnyStr] = []
            others: list[AnyStr] = []
            for entry in self.scandir(folder, attrs=False):
                (folders if entry.is_dir(follow_links) else others).append(entry.name)
            yield folder, folders, others
            waiting += [os.path.join(folder, name) for name in reversed(folders)]

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        """Makes one folder. Raises AlreadyExists, NotFound (no parent), NotADirectory, Permission."""
        self.call(message.Mkdir(wire_path(path), mode, parents=False, exist_ok=False))

    def makedirs(self, path: Path, mode: int = 0o755, *, exist_ok: bool = False) -> None:
        """Makes a folder and those above it that are missing, in one request."""
        self.call(message.Mkdir(wire_path(path), mode, parents=True, exist_ok=exist_ok))

    def rmdir(self, path: Path) -> None:
        """Removes an empty folder. Raises Conflict (ENOTEMPTY) if it is not."""
        self.call(message.Rmdir(wire_path(path)))

    # Names

    def stat(self, path: Path, *, follow_links: bool = True) -> Attr:
        """Attributes; of the link itself with follow_links=False. Raises NotFound, Permission."""
        attr: Attr = self.call(message.Stat(wire_path(path), follow_links), Attr)
        return attr

    def exists(self, path: Path) -> bool:
        """Whether `path` leads to something; False for a dangling link."""
        return self._kind(path) is not None

    def is_dir(self, path: Path) -> bool:
        """Whether `path` leads to a folder."""
        return self._kind(path) is Kind.DIRECTORY

    def is_file(self, path: Path) -> bool:
        """Whether `path` leads to a regular file."""
        return self._kind(path) is Kind.FILE

    def _kind(self, path: Path) -> Kind | None:
        try:
            return self.stat(path).kind
        except (NotFound, NotADirectoryError):
            return None

    def remove(self, path: Path) -> None:
        """Removes a name that is not a folder's; the file lives on while it is open or linked elsewhere."""
        self.call(message.Unlink(wire_path(path)))

    def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
        """Renames in one step. A file or an empty folder at `target` is replaced, or AlreadyExists with
        replace=False. Raises Invalid for a folder into itself."""
        self.call(message.Rename(wire_path(source), wire_path(target), noreplace=not replace, exchange=False))

    def exchange(self, one: Path, other: Path) -> None:
        """Swaps two names in one step; both must exist."""
        self.call(message.Rename(wire_path(one), wire_path(other), noreplace=False, exchange=True))

    def symlink(self, target: str | bytes, path: Path) -> None:
        """Makes `path` a symbolic link that says `target`, which need not exist."""
        self.call(message.Symlink(os.fsencode(target), wire_path(path)))

    def link(self, source: Path, path: Path) -> None:
        """Makes `path` one more name of the file `source`."""
        self.call(message.Link(wire_path(source), wire_path(path)))

    @overload
    def readlink(self, path: str) -> str: ...
    @overload
    def readlink(self, path: bytes) -> bytes: ...
    def readlink(self, path: str | bytes) -> str | bytes:
        """What a symbolic link says. Raises Invalid for anything else."""
        target = self._pool.call(message.Readlink(wire_path(path))).payload
        return target if isinstance(path, bytes) else os.fsdecode(target)

    def set_attributes(
        self,
        path: Path,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> Attr:
        """Changes what is given, in one step; links are not followed."""
        change = message.SetAttr(mode, uid, gid, size, atime_ns, mtime_ns)
        attr: Attr = self.call(message.Setattr(wire_path(path), change), Attr)
        return attr

    def getxattr(self, path: Path, name: str) -> bytes:
        """The value of an extended attribute. Raises NotFound (ENODATA) when there is none."""
        return self._pool.call(message.Getxattr(wire_path(path), os.fsencode(name))).payload

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        """Sets an extended attribute; `user.` names are the caller's to choose."""
        self.call(message.Setxattr(wire_path(path), os.fsencode(name), value))

    def listxattr(self, path: Path) -> list[str]:
        """Names of the extended attributes."""
        names: message.Names = self.call(message.Listxattr(wire_path(path)), message.Names)
        return [os.fsdecode(name) for name in names.names]

    def removexattr(self, path: Path, name: str) -> None:
        """Removes an extended attribute. Raises NotFound (ENODATA) when there is none."""
        self.call(message.Removexattr(wire_path(path), os.fsencode(name)))

    # Sealed views

    def seal(self, path: Path) -> Dataset:
        """Freezes the tree under the folder `path` and gives it as a data set.

        Costs one pass over the tree's metadata, no file is read; the folder may change on, the view does not.
        Raises NotFound, NotADirectory, Permission (every file of it must be readable by the caller).

        >>> volume.write_bytes("/pets/cat/1", b"meow", parents=True)
        >>> pets = volume.seal("/pets")
        >>> pets[0], pets.paths[0], pets.classes
        (b'meow', 'cat/1', ['cat'])
        """
        from headrace.client.dataset import Dataset

        reply = self._pool.call(message.Seal(wire_path(path)), Sealed, fds=1)
        return Dataset._of_descriptor(self, reply.ok.seal, reply.fds[0])

    def dataset(self, seal: str) -> Dataset:
        """The sealed view with this id (`Dataset.seal`). Costs nothing until it is used, O(1) then."""
        from headrace.client.dataset import Dataset

        return Dataset(self, seal)

    def seals(self) -> list[Sealed]:
        """All sealed views of the volume, oldest first."""
        listed: message.SealList = self.call(message.Seals(), message.SealList)
        return listed.seals

    def delete_seal(self, seal: str) -> None:
        """Nobody opens the sealed view any more; who has it open reads on. What only it held is given back.

        Raises NotFound, Permission (root and the engine's own user may).
        """
        self.call(message.SealDelete(seal))

    # Snapshots

    def snapshot(self, name: str | bytes) -> Snapshot:
        """Keeps the whole volume as it is now, as `/.snapshots/NAME`, read-only.

        What was written before the call is in it; takes as long as writing what is dirty. Reading it follows
        the mode bits in it; only root and the engine's own user make, compare, restore and delete snapshots.
        Raises AlreadyExists, Permission.

        >>> volume.write_bytes("/notes", b"first")
        >>> volume.snapshot("monday").name
        b'monday'
        >>> volume.write_bytes("/notes", b"second")
        >>> volume.read_bytes("/.snapshots/monday/notes")
        b'first'
        >>> [(one.change.value, one.path) for one in volume.snapshot_diff("monday")]
        [('changed', b'/notes')]
        """
        made: Snapshot = self.call(message.SnapshotCreate(os.fsencode(name)), Snapshot)
        return made

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, in the order of their names."""
        listed: message.SnapshotList = self.call(message.Snapshots(), message.SnapshotList)
        return listed.snapshots

    def snapshot_diff(self, older: str | bytes, newer: str | bytes | None = None) -> Iterator[Difference]:
        """What changed between two snapshots, or between one and the present.

        Costs what changed, and a request for every 1,500 names of it; the order is the engine's. A rename
        shows once. Raises NotFound, Invalid (`newer` is older), Permission.
        """
        after: bytes | None = None
        to = None if newer is None else os.fsencode(newer)
        while True:
            request = message.SnapshotDiff(os.fsencode(older), to, after, 0)
            page: message.Differences = self.call(request, message.Differences)
            yield from page.differences
            if page.next is None:
                return
            after = page.next

    def restore_snapshot(self, name: str | bytes) -> Restored:
        """Makes the volume what it was at the snapshot; what it is now is kept as `before-restore-TIME`.

        At once or not at all, at the cost of what changed since. Raises NotFound, Permission, Conflict (a
        file is open for writing, or one is open that would change: the message names it).
        """
        restored: Restored = self.call(message.SnapshotRestore(os.fsencode(name)), Restored)
        return restored

    def delete_snapshot(self, name: str | bytes) -> None:
        """Deletes a snapshot; what only it held is given back in the background.

        Raises NotFound, Permission.
        """
        self.call(message.SnapshotDelete(os.fsencode(name)))

    # The whole volume

    def sync(self) -> None:
        """Everything written before is durable when this returns."""
        self.call(message.Sync())

    def fsck(self, *, deep: bool = False) -> message.FsckReport:
        """Checks names, links, extents and segments, on flash and in the object tier; changes nothing.

        deep: reads and verifies every byte too, which fetches all of the volume. Some seconds for a million
        files without. Runs beside everything else. Only root and the engine's user may.
        """
        report: message.FsckReport = self.call(message.Fsck(deep), message.FsckReport)
        return report

    def compact(self) -> message.Compacted:
        """Writes packs anew that are mostly dead or small, so that their space comes back.

        The engine does so every ten minutes by itself; this waits for one round (512 MiB at most). What
        snapshots and sealed views name stays. With an object tier an old pack goes when the next backup of
        the metadata no longer names it. Only root and the engine's user may.
        """
        done: message.Compacted = self.call(message.Compact(), message.Compacted)
        return done

    def backup(self) -> message.BackupDone:
        """Stores what changed of the metadata beside the segments in the object tier.

        The engine does so every five minutes by itself, and when it is stopped. Waits until everything that
        is written is in the object tier. Only root and the engine's user may. Invalid without an object tier.
        """
        done: message.BackupDone = self.call(message.Backup(), message.BackupDone)
        return done

    def tier(self, paths: Sequence[Path]) -> message.TierReport:
        """How many bytes of these files are on flash, and how many of those not in the object tier yet.

        Folders and links count nothing. One message for all paths: some hundred at a time are sensible.
        """
        report: message.TierReport = self.call(
            message.Tier([wire_path(path) for path in paths]), message.TierReport
        )
        return report

    def warm(self, paths: Sequence[Path]) -> message.TierReport:
        """Brings all of these files to flash, in parallel, and waits for it; gives what `tier` says then.

        As far as they fit. Raises Unavailable when the store does not answer for some 30 s.
        """
        report: message.TierReport = self.call(
            message.Warm([wire_path(path) for path in paths]), message.TierReport
        )
        return report

    def evict(self, paths: Sequence[Path] | None = None) -> int:
        """Removes from flash what is in the object tier too, and returns how many bytes that freed.

        Whole segments: those that hold these files, and what else is in them; None: all. What is not in the
        object tier yet stays. Invalid for a volume without an object tier.
        """
        wanted = None if paths is None else [wire_path(path) for path in paths]
        evicted: message.Evicted = self.call(message.Evict(wanted), message.Evicted)
        return evicted.bytes

    def export(
        self,
        paths: Sequence[Path],
        root: Path,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
    ) -> message.Exported:
        """Puts these files as plain objects into `url`, s3://bucket/prefix, named by paths below `root`.

        The engine does it, with the credentials that it was started with: only root and its user may. An
        object that is there with the same size and time of change (metadata `mtime`, as rclone has it) stays
        as it is. One message for all paths: some hundred at a time are sensible. What cannot be exported is
        told in `left_out`. Raises Invalid for a place in the volume's own prefix, NotFound for a bucket that
        is not there, Unavailable when the store does not answer.
        """
        request = message.Export([wire_path(path) for path in paths], wire_path(root), url, endpoint, region)
        exported: message.Exported = self.call(request, message.Exported)
        return exported

    def statfs(self) -> message.StatfsResult:
        """Space, in bytes, of the file system that the volume lies on, and inodes in use.

        With an object tier the space is 1 PiB, all of it free: a bucket has no end.
        """
        space: message.StatfsResult = self.call(message.Statfs(), message.StatfsResult)
        return space

    def status(self) -> message.EngineStatus:
        """What the engine is and does: pid, memory, mounts, clients, segments, recovery, warnings."""
        status: message.EngineStatus = self.call(message.Status(), message.EngineStatus)
        return status

    def mount(
        self, mountpoint: str | os.PathLike[str], *, read_only: bool = False, allow_other: bool = False
    ) -> message.Mounted:
        """Mounts the volume on the empty folder `mountpoint`; it is usable when this returns and stays until
        `unmount` or the engine's end. allow_other: other users may enter, with their own rights.

        Raises NotFound, NotADirectory, Conflict (busy or not empty), Unavailable (no FUSE here).
        """
        request = message.Mount(os.fsencode(os.path.abspath(mountpoint)), read_only, allow_other)
        mounted: message.Mounted = self.call(request, message.Mounted)
        return mounted

    def unmount(self, mountpoint: str | os.PathLike[str]) -> None:
        """Ends a mount. Raises Conflict (EBUSY) while files on it are open, NotFound if it is not one."""
        self.call(message.Unmount(os.fsencode(os.path.abspath(mountpoint))))

    def close(self) -> None:
        """Closes the idle connections; a later call makes new ones. Open files and loaders go on."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restored, (self._folder, self._start))

    def __repr__(self) -> str:
        return f"<Volume {self._folder}>"


def _restored(folder: str, start: bool) -> Volume:
    return Volume(folder, start=start)


class DirEntry(Generic[AnyStr]):
    """One entry of a folder, as `os.DirEntry`. `path` is the scanned path with the name added."""

    __slots__ = ("_entry", "_volume", "name", "path")

    name: AnyStr
    path: AnyStr

    def __init__(self, volume: Volume, name: AnyStr, path: AnyStr, entry: message.ListEntry) -> None:
        self._volume = volume
        self._entry = entry
        self.name = name
        self.path = path

    @property
    def kind(self) -> Kind:
        """What the name itself is; a link is a link."""
        return self._entry.kind

    def inode(self) -> int:
        return self._entry.ino

    def is_symlink(self) -> bool:
        return self._entry.kind is Kind.SYMLINK

    def is_dir(self, follow_links: bool = True) -> bool:
        """Costs a request only for a link that is to be followed."""
        return self._leads_to(Kind.DIRECTORY, follow_links)

    def is_file(self, follow_links: bool = True) -> bool:
        """Costs a request only for a link that is to be followed."""
        return self._leads_to(Kind.FILE, follow_links)

    def _leads_to(self, kind: Kind, follow_links: bool) -> bool:
        if self._entry.kind is Kind.SYMLINK and follow_links:
            return self._volume._kind(self.path) is kind
        return self._entry.kind is kind

    def stat(self, *, follow_links: bool = True) -> Attr:
        """Attributes: those of the listing if it has them, else one request."""
        attr = self._entry.attr
        if attr is None or (attr.kind is Kind.SYMLINK and follow_links):
            attr = self._volume.stat(self.path, follow_links=follow_links)
        return attr

    def __fspath__(self) -> AnyStr:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


def wire_path(path: Path) -> bytes:
    """`path` as the engine wants it: bytes, absolute. Nothing is normalised: names are bytes."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise Invalid(f"path {path!r} has a zero byte, which no file system can name")
    return raw if raw.startswith(b"/") else b"/" + raw
