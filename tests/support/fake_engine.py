"""An engine for tests of the client: speaks the wire on a volume folder's socket, answers what it is told.

`answers` maps an op to a function (request fields, payload) -> Canned. Ops without one are answered with an
error of kind invalid, as the real engine does for ops it does not know. A stream handler takes over the
socket: `stream(engine, sock, fields)`.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

HEADER = struct.Struct("<IIQ")


class Canned:
    def __init__(
        self, ok: Any = None, payload: bytes = b"", fds: list[int] | None = None, error: Any = None
    ) -> None:
        self.meta = {"error": error} if error else {"ok": ok}
        self.payload = payload
        self.fds = fds or []


def frame_bytes(meta: Any, payload: bytes = b"", fds: int = 0) -> bytes:
    raw = msgspec.msgpack.encode(meta)
    return HEADER.pack(len(raw), fds, len(payload)) + raw + payload


def send_frame(sock: socket.socket, meta: Any, payload: bytes = b"", fds: list[int] | None = None) -> None:
    whole = memoryview(frame_bytes(meta, payload, len(fds or [])))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([whole], ancillary)
    sock.sendall(whole[sent:])


def read_exactly(sock: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = sock.recv(count - len(pieces))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def read_frame(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    meta_bytes, _fds, payload_bytes = HEADER.unpack(read_exactly(sock, HEADER.size))
    meta = msgspec.msgpack.decode(read_exactly(sock, meta_bytes))
    return meta, read_exactly(sock, payload_bytes)


def memfd_of(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


class FakeEngine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        marker = {"headrace": "volume", "format": 1, "volume": "0" * 26, "created_ns": 0}
        (folder / "HEADRACE").write_text(json.dumps(marker))
        self.answers: dict[str, Callable[[dict[str, Any], bytes], Canned | None]] = {
            "hello": lambda fields, payload: Canned(
                {"wire": 1, "engine": "fake", "pid": os.getpid(), "volume": "0" * 26, "format": 1, "later": 1}
            )
        }
        self.stream: Callable[[FakeEngine, socket.socket, dict[str, Any]], None] | None = None
        self.requests: list[dict[str, Any]] = []
        self.hellos: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.listener: socket.socket
        self.listen()

    def listen(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = os.open(self.folder, os.O_PATH)
        address = f"/proc/self/fd/{fd}/engine.sock"
        (self.folder / "engine.sock").unlink(missing_ok=True)
        self.listener.bind(address)
        os.close(fd)
        self.listener.listen(64)
        thread = threading.Thread(target=self._accept, args=(self.listener,), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self.connections.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self.hellos.append(read_exactly(sock, 8))
            while True:
                fields, payload = read_frame(sock)
                self.requests.append(fields)
                op = fields.pop("op")
                if op == "loader" and self.stream is not None:
                    self.stream(self, sock, fields)
                    return
                handler = self.answers.get(op)
                if handler is None:
                    error = {"kind": "invalid", "errno": 22, "message": f"unknown op {op}"}
                    send_frame(sock, {"error": error})
                    continue
                canned = handler(fields, payload)
                if canned is None:  # die in mid-call
                    return
                send_frame(sock, canned.meta, canned.payload, canned.fds)
                for fd in canned.fds:
                    os.close(fd)
        except (OSError, EOFError):
            return
        finally:
            sock.close()

    def kill(self) -> None:
        """Drops every connection and listens no more. May be repeated."""
        if self.listener.fileno() < 0:
            return
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self.connections:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.connections.clear()


class SlotStream:
    """A stream handler with `slots` memfds, honouring releases, that sends `batches` (lists of samples).

    Like the real engine it reuses a slot only when it was released, and fills it with the new batch.
    """

    def __init__(self, batches: list[list[bytes]], slots: int = 4, slot_bytes: int = 1 << 16) -> None:
        self.batches = batches
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.made = 0
        self.released = 0
        self.on_send: Callable[[int], None] = lambda number: None

    def __call__(self, engine: FakeEngine, sock: socket.socket, fields: dict[str, Any]) -> None:
        import mmap
        import select

        memory: list[tuple[int, mmap.mmap]] = []
        free: list[int] = []
        number = fields["first_batch"]
        indices_at = 0
        try:
            for samples in self.batches[number:]:
                while True:
                    ready, _, _ = select.select(
                        [sock], [], [], 0 if free or len(memory) < self.slots else None
                    )
                    if not ready:
                        break
                    command, _ = read_frame(sock)
                    assert command["event"] == "release", command
                    free.append(command["slot"])
                    self.released += 1
                self.on_send(number)
                fds = []
                if free:
                    slot = free.pop()
                elif len(memory) < self.slots:
                    fd = os.memfd_create("slot")
                    os.ftruncate(fd, self.slot_bytes)
                    memory.append((fd, mmap.mmap(fd, self.slot_bytes)))
                    slot = len(memory) - 1
                    fds = [fd]
                    self.made += 1
                _, mapped = memory[slot]
                layout = lay_out(mapped, samples, indices_at)
                indices_at += len(samples)
                event = {"event": "batch", "batch": number, "slot": slot, "layout": layout}
                send_frame(sock, event, fds=fds)
                number += 1
            send_frame(sock, {"event": "end"})
            while sock.recv(4096):
                pass
        finally:
            for fd, mapped in memory:
                mapped.close()
                os.close(fd)


def lay_out(into: Any, samples: list[bytes], first_index: int = 0) -> dict[str, int]:
    count = len(samples)
    indices = struct.pack(f"<{count}Q", *range(first_index, first_index + count))
    edges = [0]
    for sample in samples:
        edges.append(edges[-1] + len(sample))
    offsets = struct.pack(f"<{count + 1}Q", *edges)
    data = b"".join(samples)
    data_at = (len(indices) + len(offsets) + 63) // 64 * 64
    into[0 : len(indices)] = indices
    into[len(indices) : len(indices) + len(offsets)] = offsets
    into[data_at : data_at + len(data)] = data
    return {
        "count": count,
        "offsets_at": len(indices),
        "data_at": data_at,
        "data_bytes": len(data),
        "slot_bytes": len(into),
        "gather_ns": 1000,
    }
