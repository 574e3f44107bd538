"""The volume as the importer's destination: its requests on two connections of their own.

One for changes, since handles live and die with a connection and requests on one keep their order; one for
questions, which need not wait for a batch that is being stored.
Errors are told apart here, once: what concerns a path alone (invalid, not found, conflict, permission)
becomes `Refused` and the import goes on; what concerns the volume passes through and ends the import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from headrace.client.connection import Connection
from headrace.client.engine import open_connection, volume_folder
from headrace.control.importer import Existing, Refused
from headrace.control.source import Entry
from headrace.errors import Conflict, Invalid, NotFound, Permission
from headrace.model import message
from headrace.model.message import Attr, Kind, PutEntry, SetAttr

_LISTING_ENTRIES = 10_000
_ATTRIBUTES_PER_REQUEST = 1_000
_KINDS = {kind.value: kind for kind in Kind}


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (Invalid, NotFound, Conflict, Permission) as error:
        raise Refused(error.message) from error


class VolumeDestination:
    """A volume to import into. Starts its engine if none runs. One thread may change while one asks."""

    def __init__(self, volume: str | os.PathLike[str]) -> None:
        folder = volume_folder(volume)
        self._connection: Connection = open_connection(folder)
        self._questions: Connection = open_connection(folder)

    def close(self) -> None:
        self._connection.close()
        self._questions.close()

    def stat(self, path: bytes) -> Existing | None:
        with _refusals():
            try:
                attr = self._questions.call(message.Stat(path, follow=False), Attr).ok
            except NotFound:
                return None
        return _existing(attr)

    def listing(self, path: bytes) -> dict[bytes, Existing]:
        found: dict[bytes, Existing] = {}
        after: bytes | None = None
        while True:
            request = message.List(path or b"/", after, _LISTING_ENTRIES, attrs=True)
            with _refusals():
                listing: message.Listing = self._questions.call(request, message.Listing).ok
            for entry in listing.entries:
                if entry.attr is not None:
                    found[entry.name] = _existing(entry.attr)
            after = listing.next
            if after is None:
                return found

    def put(self, entries: Sequence[tuple[bytes, Entry]], payload: Sequence[bytes], owners: bool) -> None:
        self._put([_put_entry(path, entry, owners) for path, entry in entries], payload)

    def _put(self, entries: list[PutEntry], payload: Sequence[bytes]) -> None:
        with _refusals():
            self._connection.call(
                message.Put(entries, parents=False, durable=False), message.PutDone, payload=payload
            )

    def make_directories(self, path: bytes) -> None:
        with _refusals():
            self._connection.call(message.Mkdir(path, 0o755, parents=True, exist_ok=True))

    def set_attributes(self, items: Sequence[tuple[bytes, Entry]], owners: bool) -> list[tuple[bytes, str]]:
        refused = []
        for begin in range(0, len(items), _ATTRIBUTES_PER_REQUEST):
            piece = items[begin : begin + _ATTRIBUTES_PER_REQUEST]
            if all(entry.kind == "directory" for _, entry in piece):
                # Putting a directory that is there sets its attributes: one request for many.
                try:
                    self._put([_put_entry(path, entry, owners, final=True) for path, entry in piece], [])
                    continue
                except Refused:
                    pass  # one of them: singly, to learn which
            for path, entry in piece:
                try:
                    self._set_one(path, entry, owners)
                except Refused as error:
                    refused.append((path, str(error)))
        return refused

    def _set_one(self, path: bytes, entry: Entry, owners: bool) -> None:
        set_attr = SetAttr(
            mode=entry.mode,
            uid=entry.uid if owners else None,
            gid=entry.gid if owners else None,
            mtime_ns=entry.mtime_ns,
        )
        self._change(message.Setattr(path, set_attr))

    def open_new(self, path: bytes) -> _Handle:
        flags = message.OpenFlags(write=True, create=True, truncate=True)
        with _refusals():
            opened: message.Opened = self._connection.call(
                message.Open(path, flags, 0o600), message.Opened
            ).ok
        return _Handle(self._connection, opened.handle)

    def rename(self, source: bytes, destination: bytes) -> None:
        self._change(message.Rename(source, destination, noreplace=False, exchange=False))

    def unlink(self, path: bytes) -> None:
        self._change(message.Unlink(path))

    def remove_directory(self, path: bytes) -> None:
        self._change(message.Rmdir(path))

    def sync(self) -> None:
        self._connection.call(message.Sync())

    def _change(self, request: message.Request) -> None:
        with _refusals():
            self._connection.call(request)


class _Handle:
    def __init__(self, connection: Connection, handle: int) -> None:
        self._connection = connection
        self._handle = handle

    def write_at(self, offset: int, data: bytes) -> None:
        with _refusals():
            self._connection.call(message.Pwrite(self._handle, offset), message.Written, payload=[data])

    def truncate(self, size: int) -> None:
        with _refusals():
            self._connection.call(message.Ftruncate(self._handle, size))

    def close(self) -> None:
        if not self._connection.closed:
            self._connection.call(message.Close(self._handle))


def _existing(attr: Attr) -> Existing:
    return Existing(
        attr.kind.value, attr.size, attr.mode, attr.uid, attr.gid, attr.mtime_ns, attr.rdev, attr.ino
    )


def _put_entry(path: bytes, entry: Entry, owners: bool, *, final: bool = False) -> PutEntry:
    mode = entry.mode
    if entry.kind == "directory" and not owners and not final:
        mode |= 0o700  # until it is filled; its own mode follows at the end
    carries_bytes = entry.kind == "file" and not entry.hard_link
    return PutEntry(
        path=path,
        kind=_KINDS[entry.kind],
        mode=mode,
        uid=entry.uid if owners else None,
        gid=entry.gid if owners else None,
        mtime_ns=entry.mtime_ns,
        size=entry.size if carries_bytes else 0,
        target=entry.target,
        hard_link=entry.hard_link,
        rdev=entry.rdev,
    )
