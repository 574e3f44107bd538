"""Messages and frames: the same bytes as the engine's, whole frames whatever way they arrive."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.wire import HEADER, HELLO, Channel, Disconnected, decode, decode_answer, encode
from headrace.errors import Internal, Invalid, NotFound
from headrace.model import message
from support.fake_engine import frame_bytes, memfd_of, send_frame

GOLDEN: dict[str, str] = json.loads((Path(__file__).parents[1] / "golden" / "wire.json").read_text())

REQUESTS = {request.__struct_config__.tag: request for request in message.Request.__subclasses__()}
ANSWERS: dict[str, Any] = {
    "attr": message.Attr,
    "backup_done": message.BackupDone,
    "batch_layout": message.BatchLayout,
    "compacted": message.Compacted,
    "differences": message.Differences,
    "evicted": message.Evicted,
    "fsck_report": message.FsckReport,
    "exported": message.Exported,
    "listing": message.Listing,
    "listing_last": message.Listing,
    "mounted": message.Mounted,
    "names": message.Names,
    "opened": message.Opened,
    "put_done": message.PutDone,
    "restored": message.Restored,
    "sealed": message.Sealed,
    "seals": message.SealList,
    "snapshot": message.Snapshot,
    "snapshots": message.SnapshotList,
    "statfs": message.StatfsResult,
    "status": message.EngineStatus,
    "tier_report": message.TierReport,
    "welcome": message.Welcome,
    "written": message.Written,
}
EVENTS = message.Batch | message.End | message.Error


def golden(prefix: str) -> list[str]:
    return sorted(name.removeprefix(prefix) for name in GOLDEN if name.startswith(prefix))


@pytest.mark.parametrize("name", golden("request."))
def test_requests_are_the_engines_bytes(name: str) -> None:
    raw = bytes.fromhex(GOLDEN[f"request.{name}"])
    request = msgspec.msgpack.decode(raw, type=REQUESTS[msgspec.msgpack.decode(raw)["op"]])
    assert msgspec.msgpack.decode(encode(request)) == msgspec.msgpack.decode(raw)


def test_every_request_has_a_golden_message() -> None:
    assert {
        msgspec.msgpack.decode(bytes.fromhex(GOLDEN[f"request.{n}"]))["op"] for n in golden("request.")
    } == set(REQUESTS)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_answers_are_read_whole(name: str) -> None:
    raw = bytes.fromhex(GOLDEN[f"answer.{name}"])
    ok = decode_answer(raw, ANSWERS[name])
    # Reading loses nothing: what is written again says the same.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"ok": ok})) == msgspec.msgpack.decode(raw)


def test_every_golden_answer_is_tested() -> None:
    assert set(golden("answer.")) == {*ANSWERS, "error", "nothing"}


def test_an_error_answer_is_raised() -> None:
    with pytest.raises(NotFound, match="no such file"):
        decode_answer(bytes.fromhex(GOLDEN["answer.error"]), message.Attr)


def test_an_answer_of_nothing_is_nothing() -> None:
    assert decode_answer(bytes.fromhex(GOLDEN["answer.nothing"]), None) is None
    with pytest.raises(Internal, match="answered nothing"):
        decode_answer(bytes.fromhex(GOLDEN["answer.nothing"]), message.Attr)


@pytest.mark.parametrize("name", golden("stream_event."))
def test_stream_events_are_read_whole(name: str) -> None:
    raw = bytes.fromhex(GOLDEN[f"stream_event.{name}"])
    event = decode(raw, EVENTS)
    assert type(event).__name__.lower() == name
    assert msgspec.msgpack.decode(encode(event)) == msgspec.msgpack.decode(raw)


def test_release_is_the_engines_bytes() -> None:
    assert msgspec.msgpack.decode(encode(message.Release(1))) == msgspec.msgpack.decode(
        bytes.fromhex(GOLDEN["stream_command.release"])
    )


def test_header_and_hello_are_the_engines_bytes() -> None:
    assert HEADER.pack(300, 1, 1 << 20).hex() == GOLDEN["header"]
    assert HELLO.hex() == GOLDEN["hello"]


def test_fields_of_a_newer_engine_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"ok": {"offset": 1, "bytes": 2, "later": [1, 2]}, "also": 1})
    assert decode_answer(raw, message.Written) == message.Written(1, 2)


def test_what_is_no_answer_is_internal() -> None:
    for raw in (b"", b"\xc1", msgspec.msgpack.encode({"ok": 3}), msgspec.msgpack.encode([1])):
        with pytest.raises(Internal, match="one release"):
            decode_answer(raw, message.Attr)


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@given(st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 40000)), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_frames_arrive_whole_however_they_are_cut(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    frames = [({"m": b"m" * meta}, os.urandom(payload)) for meta, payload in sizes]
    stream = b"".join(frame_bytes(meta, payload) for meta, payload in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)

    def send() -> None:
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            theirs.sendall(stream[begin:end])

    sender = threading.Thread(target=send)
    sender.start()
    for number, (meta, payload) in enumerate(frames):
        if number % 2:
            into = bytearray(len(payload) + 3)
            frame = channel.receive(memoryview(into))
            assert frame.payload == len(payload)
            assert into == payload + bytes(3)
        else:
            frame = channel.receive()
            assert frame.payload == payload
        assert msgspec.msgpack.decode(frame.meta) == meta
    sender.join()
    theirs.close()
    with pytest.raises(Disconnected):
        channel.receive()
    channel.close()


def test_descriptors_stay_with_their_frames(pair: Any) -> None:
    channel, theirs = pair
    for number in range(5):
        fds = [memfd_of(b"%d.%d" % (number, k)) for k in range(number % 3)]
        send_frame(theirs, {"ok": number}, b"x" * 100, fds)
        for fd in fds:
            os.close(fd)
    for number in range(5):
        frame = channel.receive()
        assert [os.pread(fd, 10, 0) for fd in frame.fds] == [
            b"%d.%d" % (number, k) for k in range(number % 3)
        ]
        assert not any(os.get_inheritable(fd) for fd in frame.fds)
        for fd in frame.fds:
            os.close(fd)


def test_untaken_descriptors_are_closed_with_the_channel(pair: Any) -> None:
    channel, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        fd = memfd_of(b"x")
        send_frame(theirs, {"ok": 1}, b"", [fd])
        os.close(fd)
    for fd in channel.receive().fds:
        os.close(fd)
    channel._fill()  # the second frame's descriptor has arrived
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_many_buffers_are_sent_as_one_payload(pair: Any) -> None:
    channel, theirs = pair
    pieces = [b"%d," % number for number in range(5000)] + [b"", memoryview(bytearray(b"end"))]
    expected = b"".join(bytes(piece) for piece in pieces)
    sender = threading.Thread(target=channel.send, args=(HELLO, b"meta", pieces))
    sender.start()
    received = b""
    while len(received) < 8 + 16 + 4 + len(expected):
        received += theirs.recv(1 << 16)
    sender.join()
    assert received == HELLO + HEADER.pack(4, 0, len(expected)) + b"meta" + expected


def test_too_large_a_request_is_refused_before_its_first_byte(pair: Any) -> None:
    channel, theirs = pair
    with pytest.raises(Invalid, match="split it"):
        channel.send(b"", b"meta", [bytes(message.PAYLOAD_BYTES_MAX), b"x"])
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


@pytest.mark.parametrize("header", [(1 << 31, 0, 0), (0, 9, 0), (0, 0, 1 << 40), (0, 1, 0)])
def test_a_senseless_header_is_internal(pair: Any, header: tuple[int, int, int]) -> None:
    channel, theirs = pair
    theirs.sendall(HEADER.pack(*header))
    with pytest.raises(Internal):
        channel.receive()


def test_a_payload_larger_than_asked_for_is_internal(pair: Any) -> None:
    channel, theirs = pair
    send_frame(theirs, {"ok": None}, b"12345")
    with pytest.raises(Internal, match="5 bytes where at most 4"):
        channel.receive(memoryview(bytearray(4)))
