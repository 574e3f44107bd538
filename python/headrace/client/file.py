"""An open file of a volume as a Python file object.

`open_file` builds the same layers as the builtin: `VolumeFile` (raw), a buffer of 1 MiB, text if asked for.
An open file holds a connection of its own until it is closed, so that closing one (also by the garbage
collector, in the middle of anything) never waits for another call, and its handle in the engine ends with
it. The position lives here. A file opened for reading is opened again, by path and only if it is the same
inode, after a fork or when the engine was restarted; one opened for writing only after a fork.
"""

from __future__ import annotations

import errno
import io
import os
from typing import IO, TYPE_CHECKING, Any

from headrace.errors import Conflict, HeadraceError, Invalid, Unavailable
from headrace.model.message import (
    Attr,
    Close,
    Fstat,
    Fsync,
    Ftruncate,
    Open,
    Opened,
    OpenFlags,
    Pread,
    Pwrite,
    Written,
)

if TYPE_CHECKING:
    from headrace.client.connection import Connection, Pool

# One request of a file moves at most this much: several clients fit into the engine's memory at once.
PIECE_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20


def open_file(
    pool: Pool,
    path: bytes,
    mode: str,
    permissions: int,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> IO[Any]:
    """See `Volume.open`."""
    kinds = set(mode)
    if (
        kinds - set("rwaxbt+")
        or len(kinds) != len(mode)
        or len(kinds & set("rwax")) != 1
        or kinds >= {"b", "t"}
    ):
        raise Invalid(f"file mode {mode!r}: one of r, w, a, x, with + and b or t as needed")
    binary = "b" in kinds
    if binary and (encoding is not None or errors is not None or newline is not None):
        raise Invalid(f"file mode {mode!r} is binary: encoding, errors and newline are for text")
    if buffering == 0 and not binary:
        raise Invalid("text needs a buffer: buffering=0 goes with binary modes")
    raw = VolumeFile(pool, path, mode.replace("t", ""), permissions)
    if buffering == 0:
        return raw  # type: ignore[return-value]  # typeshed: RawIOBase is no IO, as for builtin open
    buffer_bytes = buffering if buffering > 1 else _BUFFER_BYTES
    buffer: io.BufferedIOBase
    if "+" in kinds:
        buffer = io.BufferedRandom(raw, buffer_bytes)
    elif "r" in kinds:
        buffer = io.BufferedReader(raw, buffer_bytes)
    else:
        buffer = io.BufferedWriter(raw, buffer_bytes)
    if binary:
        return buffer
    text = io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]  # builtin open sets it the same way
    return text


class VolumeFile(io.RawIOBase):
    """The unbuffered file: every call is one or more requests. Not for two threads at once (its buffered
    wrappers lock)."""

    def __init__(self, pool: Pool, path: bytes, mode: str, permissions: int) -> None:
        super().__init__()
        self._connection: Connection | None = None
        self._pool = pool
        self._path = path
        self.mode = mode
        self._append = "a" in mode
        self._flags = OpenFlags(
            read="r" in mode or "+" in mode,
            write="r" not in mode or "+" in mode,
            create="r" not in mode,
            exclusive="x" in mode,
            truncate="w" in mode,
        )
        self._position = 0
        opened, _ = self._open(self._flags, permissions)
        self._ino = opened.attr.ino
        if self._append:
            self._position = opened.attr.size

    @property
    def name(self) -> str:
        return os.fsdecode(self._path)

    def _open(self, flags: OpenFlags, permissions: int) -> tuple[Opened, Connection]:
        connection = self._pool.take()
        try:
            opened: Opened = connection.call(Open(self._path, flags, permissions), Opened).ok
        except BaseException:
            self._pool.give(connection)
            raise
        self._connection = connection
        self._handle = opened.handle
        return opened, connection

    def _call(
        self, request: Any, answer: Any = None, payload: Any = (), into: memoryview | None = None
    ) -> Any:
        """`request` is a function of the handle, since the handle may be a new one."""
        connection = self._connection
        if connection is None or self.closed:
            raise ValueError("I/O operation on closed file")
        forked = connection.owner_pid != os.getpid()
        if forked or not connection.usable():
            connection.close()
            if self._flags.write and not forked:
                raise Unavailable(
                    f"{self.name} was open for writing when its engine ended: what was not synced may be "
                    "lost; open it again and check",
                    errno.ECONNRESET,
                )
            connection = self._reopen()
        return connection.call(request(self._handle), answer, payload, into)

    def _reopen(self) -> Connection:
        opened, connection = self._open(OpenFlags(read=self._flags.read, write=self._flags.write), 0)
        if opened.attr.ino != self._ino:
            raise Conflict(
                f"{self.name} was replaced by another file while it was open: open it again",
                errno.ESTALE,
            )
        return connection

    def readable(self) -> bool:
        self._check_open()
        return self._flags.read

    def writable(self) -> bool:
        self._check_open()
        return self._flags.write

    def seekable(self) -> bool:
        self._check_open()
        return True

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readinto(self, buffer: Any, /) -> int:
        self._check_open()
        if not self._flags.read:
            raise io.UnsupportedOperation("not readable")
        view = memoryview(buffer).cast("B")[:PIECE_BYTES]
        if not view.nbytes:
            return 0
        position = self._position
        reply = self._call(lambda handle: Pread(handle, position, view.nbytes), into=view)
        self._position += reply.received_bytes
        return int(reply.received_bytes)

    def readall(self) -> bytes:
        """The rest of the file."""
        self._check_open()
        if not self._flags.read:
            raise io.UnsupportedOperation("not readable")
        pieces: list[bytes] = []
        while True:
            position = self._position
            reply = self._call(lambda handle, at=position: Pread(handle, at, PIECE_BYTES))
            if not reply.payload:
                return b"".join(pieces)
            self._position += len(reply.payload)
            pieces.append(reply.payload)

    def write(self, data: Any, /) -> int:
        self._check_open()
        if not self._flags.write:
            raise io.UnsupportedOperation("not writable")
        view = memoryview(data).cast("B")[:PIECE_BYTES]
        if not view.nbytes:
            return 0
        offset = None if self._append else self._position
        written: Written = self._call(lambda handle: Pwrite(handle, offset), Written, [view]).ok
        self._position = written.offset + written.bytes
        return written.bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self.stat().size
        elif whence != os.SEEK_SET:
            raise Invalid(f"seek from {whence}: use SEEK_SET, SEEK_CUR or SEEK_END")
        if offset < 0:
            raise Invalid(f"seek of {self.name} to {offset}, before its beginning")
        self._position = offset
        return offset

    def tell(self) -> int:
        self._check_open()
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        self._check_open()
        if not self._flags.write:
            raise io.UnsupportedOperation("not writable")
        bytes_wanted = self._position if size is None else size
        self._call(lambda handle: Ftruncate(handle, bytes_wanted))
        return bytes_wanted

    def stat(self) -> Attr:
        """Attributes of the open file, also when its name is gone."""
        self._check_open()
        attr: Attr = self._call(Fstat, Attr).ok
        return attr

    def sync(self) -> None:
        """What was written here is durable when this returns (flush a buffer above it first)."""
        self._check_open()
        self._call(Fsync)

    def close(self) -> None:
        """Gives the handle back. What was written is visible; it is durable within 5 s, or at `sync`."""
        if self.closed:
            return
        super().close()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not connection.usable():
            connection.close()
            return
        try:
            connection.call(Close(self._handle))
        except HeadraceError:
            connection.close()  # a connection's end closes its handles
            raise
        self._pool.give(connection)
