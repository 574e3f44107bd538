"""Brings a tree into a volume: every kind of entry, with modes, times and (as root) owners.

Steps for each entry, in the source's order: refuse what would leave the target or go through a symbolic
link; skip what is there already (kind, size, mode and mtime agree), which is what makes an interrupted
import safe to run again; keep what differs and is newer than the source, unless told to replace it; collect
the rest into batches, which a few threads read and one sends, in order, while the caller's thread walks on;
stream files above STREAMED_BYTES_MIN to a temporary name that is renamed when it is whole. Directories get
their times last, bottom up, since filling them changes them. One sync at the end makes all of it durable.

Invariant: a name in the target is either as it was before or complete. One entry that fails is noted in the
report and the import goes on; only a fault of the volume (full, unavailable, corrupt) ends it.
The volume is reached through `Destination` (destination.py); nothing here knows the wire.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.control.source import (
    STREAMED_BYTES_MIN,
    Entry,
    Runs,
    Source,
    SourceChanged,
    SourceDamaged,
    SourceProblem,
    SourceRefused,
)
from headrace.model.temporary import is_temporary, temporary_name

BATCH_BYTES = 8 << 20
BATCH_ENTRIES = 2_000
# Paths and link texts of one request; the wire allows 16 MiB of metadata.
_BATCH_PATH_BYTES = 4 << 20
# Growing files may make a batch larger than it was planned; the wire allows 64 MiB.
_REQUEST_BYTES_MAX = 48 << 20
_READERS = 4
# Batches read ahead: with BATCH_BYTES this bounds the memory, and it keeps every reader busy.
_BATCHES_AHEAD = 5
_LISTINGS_KEPT = 64
# After an interruption an engine that answers has answered long before.
_LAST_SEND_SECONDS_MAX = 5
_STREAM_ATTEMPTS = 3


class Refused(Exception):
    """The volume refuses this one entry; the message says why. Others may follow."""


class Existing(NamedTuple):
    """What the target holds under a name."""

    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: int
    ino: int


class Handle(Protocol):
    """A file of the volume, open for writing."""

    def write_at(self, offset: int, data: bytes) -> None: ...
    def truncate(self, size: int) -> None: ...
    def close(self) -> None: ...


class Destination(Protocol):
    """The volume as the importer needs it. Paths are absolute in the volume. Every method raises Refused for
    what concerns its path alone and a HeadraceError for what concerns the volume. `stat` and `listing` may be
    called while another thread is in `put`."""

    def stat(self, path: bytes) -> Existing | None: ...
    def listing(self, path: bytes) -> dict[bytes, Existing]: ...
    def put(self, entries: Sequence[tuple[bytes, Entry]], payload: Sequence[bytes], owners: bool) -> None:
        """Creates or replaces entries, in order; for a hard link `target` is absolute here. A directory never
        takes the place of something else, nor something else that of a directory: Refused. Those before the
        one that is refused are done."""

    def make_directories(self, path: bytes) -> None: ...
    def set_attributes(self, items: Sequence[tuple[bytes, Entry]], owners: bool) -> list[tuple[bytes, str]]:
        """Sets modes and times (and owners), in order. Gives those that were refused, with the reason."""

    def open_new(self, path: bytes) -> Handle: ...
    def rename(self, source: bytes, destination: bytes) -> None: ...
    def unlink(self, path: bytes) -> None: ...
    def remove_directory(self, path: bytes) -> None: ...
    def sync(self) -> None: ...


@dataclass(slots=True)
class ImportReport:
    """What an import did. Counters grow while it runs, so that a progress display can read them."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    hard_links: int = 0
    special: int = 0
    # Of the files in `files`.
    file_bytes: int = 0
    # Entries that were there already, and their bytes.
    skipped: int = 0
    skipped_bytes: int = 0
    # Of the entries above, those that took the place of something else.
    replaced: int = 0
    # Entries that differ and are newer in the target: left as they are.
    kept: list[bytes] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    # How many of the problems another run cannot mend.
    refused: int = 0
    notes: list[str] = field(default_factory=list)
    # Why the source ended before its end; None when it was read whole.
    damage: str | None = None

    @property
    def entries(self) -> int:
        return self.files + self.directories + self.symlinks + self.hard_links + self.special

    @property
    def complete(self) -> bool:
        return self.damage is None and not self.problems


@dataclass(slots=True)
class _Directory:
    """A directory of the target that is known to be one (and no symbolic link)."""

    # Made by this import: nothing was in it.
    fresh: bool
    # Attributes to give it at the end; None: not in the source, or not known yet.
    final: Entry | None = None
    # Its times must be set again, since something in it changed or they differ.
    touched: bool = False


class _Batch(NamedTuple):
    entries: list[Entry]
    loaded: Future[list[bytes | SourceProblem | None]] | list[bytes | SourceProblem | None]


class Importer:
    """One import of `source` into the directory `root` (absolute) of a volume. `owners`: keep owners, which
    only root may. `replace`: replace also what is newer in the volume."""

    def __init__(
        self, source: Source, destination: Destination, root: bytes, *, owners: bool, replace: bool = False
    ) -> None:
        self.report = ImportReport()
        self._source = source
        self._destination = destination
        self._root = root.rstrip(b"/")
        self._owners = owners
        self._replace = replace
        # Entries on their way that will take the place of something.
        self._replacing: set[bytes] = set()
        # What this import sent to directories that were there before. An archive may name a file twice, and
        # what it brought itself is not somebody's newer version.
        self._sent: set[bytes] = set()
        self._directories: dict[bytes, _Directory] = {}
        self._listings: OrderedDict[bytes, dict[bytes, Existing]] = OrderedDict()
        # Symbolic links that this import made: no later member of an archive may go through them.
        self._symlinks: set[bytes] = set()
        self._leftovers: set[bytes] = set()
        self._batch: list[Entry] = []
        self._batch_loaded: list[bytes | SourceProblem | None] = []
        self._batch_bytes = 0
        self._batch_path_bytes = 0
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="import-read")
        # One sender: batches arrive in their order, a directory before what lies in it.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="import-send")
        self._pending: deque[Future[None]] = deque()
        self._stopped = False

    def run(self) -> ImportReport:
        """Imports and makes durable. Raises HeadraceError when the volume fails; run it again to go on."""
        try:
            self._open_root()
            try:
                for entry in self._source.entries():
                    try:
                        self._take(entry)
                    except (SourceProblem, Refused) as problem:
                        self._problem(entry.path, str(problem))
                        self.report.refused += isinstance(problem, SourceRefused)
            except SourceDamaged as damage:
                self.report.damage = str(damage)
            self._drain()
            self._finish_directories()
            self._remove_leftovers()
            self._destination.sync()
        finally:
            # After an error or an interruption: what is on the wire ends, the rest is not begun.
            self._stopped = True
            self._readers.shutdown(wait=False, cancel_futures=True)
            wait(self._pending, _LAST_SEND_SECONDS_MAX)
            self._sender.shutdown(wait=False, cancel_futures=True)
            self.report.problems.extend(self._source.extras.problems)
            self.report.refused += self._source.extras.refused
            self.report.notes.extend(self._source.extras.notes)
        return self.report

    # -- one entry ---------------------------------------------------------------------------------------

    def _open_root(self) -> None:
        existing = self._destination.stat(self._root or b"/")
        if existing is None:
            self._destination.make_directories(self._root)
        elif existing.kind != "directory":
            raise Refused(f"the target is there already and is a {_words(existing.kind)}, not a directory")
        self._directories[b""] = _Directory(fresh=existing is None)

    def _take(self, entry: Entry) -> None:
        if not entry.path:
            if self._root:  # a volume's own root keeps its attributes: they say who may enter the volume
                self._directories[b""].final = entry
                self._directories[b""].touched = True
            return
        parent, _, name = entry.path.rpartition(b"/")
        directory = self._directory(parent)
        existing = None if directory.fresh else self._listing(parent).get(name)
        if entry.kind == "directory":
            self._take_directory(entry, existing)
            return
        if existing is not None and self._is_there(entry, existing):
            self.report.skipped += 1
            self.report.skipped_bytes += entry.size
            return
        if existing is not None and existing.kind != "directory" and entry.path not in self._sent:
            if self._is_newer(entry, existing):
                self.report.kept.append(entry.path)
                return
            self._replacing.add(entry.path)
        if self._source.sequential and not directory.fresh:
            self._sent.add(entry.path)
        directory.touched = True
        if entry.path in self._directories:
            self._replace_directory(entry)
        if not directory.fresh:
            self._listing(parent).pop(name, None)
        if entry.hard_link:
            assert entry.target is not None
            self._directory(entry.target.rpartition(b"/")[0])
        if self._source.sequential:
            if entry.kind == "symlink":
                self._symlinks.add(entry.path)
            else:
                self._symlinks.discard(entry.path)
        if entry.kind == "file" and not entry.hard_link and entry.size > STREAMED_BYTES_MIN:
            self._drain()
            self._send_streamed(entry)
        else:
            self._append(entry)

    def _take_directory(self, entry: Entry, existing: Existing | None) -> None:
        known = self._directories.get(entry.path)
        if known is not None:  # an archive may name a directory twice, or after what lies in it
            known.final, known.touched = entry, True
            return
        directory = _Directory(fresh=True, final=entry, touched=True)
        if existing is not None and existing.kind == "directory":
            directory.fresh = False
            directory.touched = not self._same_attributes(entry, existing)
            if not self._owners and existing.mode & 0o700 != 0o700:
                self._unlock(entry, existing)
                directory.touched = True
            self._directories[entry.path] = directory
            self.report.skipped += 1
            return
        if existing is not None and entry.path not in self._sent:
            if self._is_newer(entry, existing):
                raise SourceProblem(
                    f"a newer {_words(existing.kind)} is in its place in the volume; --replace overwrites it"
                )
            self._replacing.add(entry.path)
        parent = self._directories[entry.path.rpartition(b"/")[0]]
        parent.touched = True
        if existing is not None or entry.path in self._symlinks:
            # Never put a directory over a symbolic link: what follows would land where the link leads.
            self._drain()
            self._attempt_unlink(entry.path)
            self._symlinks.discard(entry.path)
        self._directories[entry.path] = directory
        self._append(entry)

    def _unlock(self, entry: Entry, existing: Existing) -> None:
        """Lets its owner into a read-only directory until the end of the import."""
        self._drain()
        opened = Entry(entry.path, "directory", existing.mode | 0o700, 0, 0, existing.mtime_ns)
        self._destination.set_attributes([(self._absolute(entry.path), opened)], False)

    def _attempt_unlink(self, path: bytes) -> None:
        try:
            self._destination.unlink(self._absolute(path))
        except Refused as refused:
            raise SourceProblem(f"what is in its place cannot be removed: {refused}") from refused

    def _replace_directory(self, entry: Entry) -> None:
        """A later member of the archive takes the place of a directory: only of an empty one."""
        self._drain()
        try:
            self._destination.remove_directory(self._absolute(entry.path))
        except Refused as refused:
            raise SourceProblem(f"a directory is in its place: {refused}") from refused
        del self._directories[entry.path]
        self._listings.pop(entry.path, None)

    def _directory(self, path: bytes) -> _Directory:
        """The directory that an entry lies in, made if an archive does not name it."""
        known = self._directories.get(path)
        if known is not None:
            return known
        parent_path, _, name = path.rpartition(b"/")
        parent = self._directory(parent_path)
        existing = None if parent.fresh else self._listing(parent_path).get(name)
        if path in self._symlinks or (existing is not None and existing.kind == "symlink"):
            raise SourceRefused(f"refused: it goes through the symbolic link {_shown(path)}")
        directory = _Directory(fresh=existing is None)
        if existing is None:
            parent.touched = True
            self._append(Entry(path, "directory", 0o755, 0, 0, None))
        elif existing.kind != "directory":
            raise SourceProblem(f"{_shown(path)} is a {_words(existing.kind)} in the target, not a directory")
        self._directories[path] = directory
        return directory

    def _listing(self, path: bytes) -> dict[bytes, Existing]:
        listing = self._listings.get(path)
        if listing is not None:
            self._listings.move_to_end(path)
            return listing
        if self._source.sequential:
            self._drain()  # an archive comes back to a directory: what it holds must be there to be listed
        try:
            listing = self._destination.listing(self._absolute(path))
        except Refused as refused:
            raise SourceProblem(f"its directory in the target cannot be listed: {refused}") from refused
        self._leftovers.update(path + b"/" + name if path else name for name in listing if is_temporary(name))
        self._listings[path] = listing
        if len(self._listings) > _LISTINGS_KEPT:
            self._listings.popitem(last=False)
        return listing

    def _is_there(self, entry: Entry, existing: Existing) -> bool:
        if entry.hard_link:
            assert entry.target is not None
            self._drain()
            first = self._destination.stat(self._absolute(entry.target))
            return first is not None and first.ino == existing.ino
        if entry.kind != existing.kind or entry.rdev != existing.rdev:
            return False
        if entry.kind == "file" and entry.size != existing.size:
            return False
        return self._same_attributes(entry, existing)

    def _is_newer(self, entry: Entry, existing: Existing) -> bool:
        """Whether what is in the target was changed after what is to take its place."""
        return not self._replace and entry.mtime_ns is not None and existing.mtime_ns > entry.mtime_ns

    def _same_attributes(self, entry: Entry, existing: Existing) -> bool:
        if entry.mtime_ns != existing.mtime_ns:
            return False
        if entry.mode != existing.mode and entry.kind != "symlink":
            return False
        return not self._owners or (entry.uid, entry.gid) == (existing.uid, existing.gid)

    # -- batches -----------------------------------------------------------------------------------------

    def _append(self, entry: Entry) -> None:
        size = entry.size if entry.kind == "file" and not entry.hard_link else 0
        if self._batch_bytes + size > BATCH_BYTES and self._batch:
            self._submit()
        if self._source.sequential:
            self._batch_loaded.append(self._load_one(entry))
        self._batch.append(entry)
        self._batch_bytes += size
        self._batch_path_bytes += len(self._root) + len(entry.path) + len(entry.target or b"")
        if len(self._batch) >= BATCH_ENTRIES or self._batch_path_bytes >= _BATCH_PATH_BYTES:
            self._submit()

    def _submit(self) -> None:
        """Hands the batch to readers and sender; waits when enough are under way."""
        if self._batch:
            entries = self._batch
            if self._source.sequential:
                batch = _Batch(entries, self._batch_loaded)
                self._batch_loaded = []
            else:
                batch = _Batch(entries, self._readers.submit(self._load, entries))
            self._pending.append(self._sender.submit(self._send, batch))
            self._batch, self._batch_bytes, self._batch_path_bytes = [], 0, 0
        while len(self._pending) > _BATCHES_AHEAD:
            self._pending.popleft().result()

    def _drain(self) -> None:
        """All that was appended is in the volume when this returns, and the sender is idle."""
        self._submit()
        while self._pending:
            self._pending.popleft().result()

    def _load(self, entries: list[Entry]) -> list[bytes | SourceProblem | None]:
        return [self._load_one(entry) for entry in entries]

    def _load_one(self, entry: Entry) -> bytes | SourceProblem | None:
        if entry.kind != "file" or entry.hard_link:
            return None
        try:
            return self._source.load(entry)
        except SourceProblem as problem:
            return problem

    def _send(self, batch: _Batch) -> None:
        """In the sender's thread."""
        if self._stopped:
            return
        try:
            self._send_batch(batch)
        except BaseException:
            self._stopped = True
            raise

    def _send_batch(self, batch: _Batch) -> None:
        loaded = batch.loaded if isinstance(batch.loaded, list) else batch.loaded.result()
        entries: list[Entry] = []
        payload: list[bytes] = []
        size = 0
        for entry, data in zip(batch.entries, loaded, strict=True):
            if isinstance(data, SourceProblem):
                self._problem(entry.path, str(data))
                continue
            if data is not None:
                if size + len(data) > _REQUEST_BYTES_MAX:
                    self._put(entries, payload)
                    entries, payload, size = [], [], 0
                payload.append(data)
                size += len(data)
            entries.append(entry)
        self._put(entries, payload)

    def _put(self, entries: list[Entry], payload: list[bytes]) -> None:
        if not entries:
            return
        try:
            self._destination.put(self._placed(entries), payload, self._owners)
        except Refused:
            # One of them: send them singly to learn which. Those that came through replace themselves.
            self._put_singly(entries, payload)
            return
        for entry in entries:
            self._count(entry)

    def _put_singly(self, entries: list[Entry], payload: list[bytes]) -> None:
        rest = iter(payload)
        for entry in entries:
            data = [next(rest)] if entry.kind == "file" and not entry.hard_link else []
            try:
                self._destination.put(self._placed([entry]), data, self._owners)
            except Refused as refused:
                self._problem(entry.path, str(refused))
            else:
                self._count(entry)

    def _placed(self, entries: list[Entry]) -> list[tuple[bytes, Entry]]:
        placed = []
        for entry in entries:
            if entry.hard_link:
                assert entry.target is not None
                link = Entry(entry.path, entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns)
                link.hard_link, link.target = True, self._absolute(entry.target)
                placed.append((self._absolute(entry.path), link))
            else:
                placed.append((self._absolute(entry.path), entry))
        return placed

    # -- large files -------------------------------------------------------------------------------------

    def _send_streamed(self, entry: Entry) -> None:
        parent, _, name = entry.path.rpartition(b"/")
        # The same number for the same name in every run: an interrupted import leaves one file behind, and
        # its next run takes it over.
        number = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest())
        relative = (parent + b"/" if parent else b"") + temporary_name(b"import-%d" % number, name)
        temporary = self._absolute(relative)
        self._leftovers.discard(relative)
        for attempt in range(1, _STREAM_ATTEMPTS + 1):
            counted = self.report.file_bytes
            try:
                self._fill(temporary, entry)
                self._destination.set_attributes([(temporary, entry)], self._owners)
                self._destination.rename(temporary, self._absolute(entry.path))
                self.report.files += 1
                self._count_replaced(entry)
                return
            except (SourceProblem, SourceDamaged, Refused) as error:
                self.report.file_bytes = counted
                with contextlib.suppress(Refused):
                    self._destination.unlink(temporary)
                if isinstance(error, SourceDamaged):
                    raise
                if isinstance(error, SourceChanged):
                    if attempt < _STREAM_ATTEMPTS and not self._source.sequential:
                        continue
                    raise SourceProblem(f"{error}, {attempt} times") from error
                raise SourceProblem(str(error)) from error

    def _fill(self, temporary: bytes, entry: Entry) -> None:
        handle = self._destination.open_new(temporary)
        try:
            with contextlib.closing(self._ahead(self._source.stream(entry))) as runs:
                for offset, data in runs:
                    handle.write_at(offset, data)
                    self.report.file_bytes += len(data)
            handle.truncate(entry.size)  # a hole at the end
        finally:
            handle.close()

    def _ahead(self, runs: Runs) -> Generator[tuple[int, bytes]]:
        """Reads one run further while the one before is being sent."""

        def take() -> tuple[int, bytes] | None:
            return next(runs, None)

        run = self._readers.submit(take)
        try:
            while (current := run.result()) is not None:
                run = self._readers.submit(take)
                yield current
        finally:
            wait([run])  # nobody else may read an archive while one of its members is being read

    # -- the end -----------------------------------------------------------------------------------------

    def _finish_directories(self) -> None:
        """Bottom up, so that a directory without write or search permission is closed after its inside."""
        final = [
            (self._absolute(path) or b"/", directory.final)
            for path, directory in reversed(self._directories.items())
            if directory.final is not None and directory.touched
        ]
        final.sort(key=lambda item: item[0].count(b"/"), reverse=True)
        for refused, why in self._destination.set_attributes(final, self._owners):
            self._problem(refused[len(self._root) + 1 :], f"mode and times could not be set: {why}")

    def _remove_leftovers(self) -> None:
        for path in self._leftovers:
            with contextlib.suppress(Refused):
                self._destination.unlink(self._absolute(path))

    def _count_replaced(self, entry: Entry) -> None:
        if entry.path in self._replacing:
            self._replacing.discard(entry.path)
            self.report.replaced += 1

    def _count(self, entry: Entry) -> None:
        self._count_replaced(entry)
        if entry.hard_link:
            self.report.hard_links += 1
        elif entry.kind == "file":
            self.report.files += 1
            self.report.file_bytes += entry.size
        elif entry.kind == "directory":
            self.report.directories += 1
        elif entry.kind == "symlink":
            self.report.symlinks += 1
        else:
            self.report.special += 1

    def _problem(self, path: bytes, why: str) -> None:
        self.report.problems.append((path, why))

    def _absolute(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root


def _words(kind: str) -> str:
    return {"symlink": "symbolic link", "fifo": "FIFO"}.get(kind, kind.replace("_", " "))


def _shown(path: bytes) -> str:
    return repr(path.decode("utf-8", "surrogateescape"))
