"""Frames on a Unix stream socket, as `crates/format/src/message.rs` defines them.

```text
client -> engine   8 bytes HELLO
both ways          frame = u32 meta_bytes | u32 fds | u64 payload_bytes | meta | payload     (little-endian)
```
Descriptors travel with a frame's header (SCM_RIGHTS). `Channel` owns one socket: it sends frames whole and
reads them through a small buffer, so that an answer with a small payload costs one system call. Descriptors
that arrive are kept in order; each frame takes as many as its header says, and whatever a caller does not
take is closed. A channel is used by one thread at a time; `Connection` and `BatchStream` see to that.

A wait here is a plain blocking system call: Ctrl-C ends it. An exception in the middle of a frame leaves the
stream out of step, so whoever owns the channel closes it on any exception.
"""

from __future__ import annotations

import array
import io
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError, Internal, Invalid
from headrace.model.message import META_BYTES_MAX, PAYLOAD_BYTES_MAX, Answer

HELLO = b"\0HRWIRE\x01"
HEADER = struct.Struct("<IIQ")
FDS_MAX = 8

# A 10 KiB sample with its frame in one read; larger payloads are received where they belong.
_BUFFER_BYTES = 16 << 10
# The kernel takes at most 1,024 pieces (IOV_MAX); header and meta are two.
_PIECES_MAX = 1000
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)

Buffer = bytes | bytearray | memoryview
_AnyAnswer = Answer[Any]
_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class Frame(NamedTuple):
    """What one frame carried. `payload`: bytes, or how many were received into the caller's buffer."""

    meta: bytes
    payload: bytes | int
    fds: list[int]


class Disconnected(Exception):
    """The peer closed the stream. Private to the client, which tells the user as `Unavailable`."""


def encode(message: msgspec.Struct) -> bytes:
    """The message as MessagePack."""
    return _encode(message)


def decode(meta: bytes, kind: Any) -> Any:
    """The message of type `kind` in `meta`. Raises Internal when the bytes say something else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(meta)
    except msgspec.DecodeError as error:
        raise Internal(
            f"the engine's answer is not understood ({error}): are headrace and headraced of one release?"
        ) from error


def decode_answer(meta: bytes, kind: Any) -> Any:
    """The `ok` part of an answer, as `kind` (None: whatever it is); raises the error it holds."""
    answer = decode(meta, _AnyAnswer if kind is None else Answer[kind])
    if answer.error is not None:
        raise HeadraceError.of(answer.error.kind, answer.error.errno, answer.error.message)
    if answer.ok is None and kind is not None:
        raise Internal(f"the engine answered nothing where {kind.__name__} was due: are both of one release?")
    return answer.ok


class Channel:
    """One socket's frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket and what descriptors arrived untaken. Never blocks; the stream is not touched, so
        that a forked child may close its copy while the parent goes on."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def peer_pid(self) -> int:
        pid, _uid, _gid = struct.unpack(
            "3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return int(pid)

    def send(self, prefix: bytes, meta: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Sends one frame after `prefix`. Blocks while the peer does not read."""
        pieces = [memoryview(piece).cast("B") for piece in payload if len(piece)]
        payload_bytes = sum(piece.nbytes for piece in pieces)
        if len(meta) > META_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            raise Invalid(
                f"a request of {len(meta)} + {payload_bytes} bytes is more than {META_BYTES_MAX} + "
                f"{PAYLOAD_BYTES_MAX}: split it"
            )
        header = HEADER.pack(len(meta), 0, payload_bytes)
        pieces.insert(0, memoryview(prefix + header + meta))
        at = 0
        try:
            while at < len(pieces):
                sent = self._socket.sendmsg(pieces[at : at + _PIECES_MAX])
                while at < len(pieces) and sent >= pieces[at].nbytes:
                    sent -= pieces[at].nbytes
                    at += 1
                if sent:
                    pieces[at] = pieces[at][sent:]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def try_send(self, frames: bytes) -> bool:
        """Sends small whole frames without blocking; False when the socket's buffer has no room for them.

        A Unix stream socket takes a message below a page whole or not at all.
        """
        try:
            return self._socket.send(frames, socket.MSG_DONTWAIT) == len(frames)
        except BlockingIOError:
            return False

    def receive(self, into: memoryview | None = None) -> Frame:
        """Reads one frame, blocking until it is whole. The payload goes to `into` if given."""
        while self._end - self._begin < HEADER.size:
            self._fill()
        meta_bytes, fd_count, payload_bytes = HEADER.unpack_from(self._buffer, self._begin)
        self._begin += HEADER.size
        if meta_bytes > META_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX or fd_count > FDS_MAX:
            raise Internal(
                f"the engine sent a frame of {meta_bytes} + {payload_bytes} bytes with {fd_count} "
                "descriptors, beyond the protocol's limits"
            )
        meta = self._take(meta_bytes)
        payload: bytes | int
        if into is None:
            payload = self._take(payload_bytes)
        elif payload_bytes > into.nbytes:
            raise Internal(
                f"the engine sent {payload_bytes} bytes where at most {into.nbytes} were asked for"
            )
        else:
            self._take_into(into[:payload_bytes])
            payload = payload_bytes
        if fd_count > len(self._fds):
            raise Internal(f"the engine announced {fd_count} descriptors and sent {len(self._fds)}")
        return Frame(meta, payload, [self._fds.popleft() for _ in range(fd_count)])

    def _fill(self) -> None:
        """Reads what is there, at least one byte, behind what the buffer holds."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == _BUFFER_BYTES:
            held = self._end - self._begin
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        received = self._receive(self._view[self._end :])
        self._end += received

    def _receive(self, into: memoryview) -> int:
        try:
            received, ancillary, flags, _ = self._socket.recvmsg_into(
                [into], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise Disconnected from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise Internal(
                "descriptors from the engine were lost: this process is at its limit of open files "
                "(ulimit -n); raise it or close some"
            )
        if received == 0:
            raise Disconnected
        return received

    def _take(self, count: int) -> bytes:
        if count <= _BUFFER_BYTES - HEADER.size:
            while self._end - self._begin < count:
                self._fill()
            taken = bytes(self._view[self._begin : self._begin + count])
            self._begin += count
            return taken
        # BytesIO hands its buffer over as bytes without a copy, unlike bytearray.
        whole = io.BytesIO()
        whole.seek(count - 1)
        whole.write(b"\0")
        with whole.getbuffer() as view:
            self._take_into(view)
        return whole.getvalue()

    def _take_into(self, into: memoryview) -> None:
        held = min(self._end - self._begin, into.nbytes)
        into[:held] = self._view[self._begin : self._begin + held]
        self._begin += held
        while held < into.nbytes:
            held += self._receive(into[held:])
