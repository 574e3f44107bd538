"""Cases 13-17: a store that is slow, wrong, refuses, lies, loses, or is gone, and a volume with files in it.

Always: the right bytes, or an error that names the segment or the key; what is on flash is served meanwhile;
what was written is stored when the store is back. The proxy breaks requests (support/fault_proxy.py), the
store behind it is a real one.

Most tests share one volume and one mount. Its files, each group in segments of its own: see `COLD`.
"""

from __future__ import annotations

import errno
import http.server
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headrace
from headrace.client import engine
from headrace.errors import Corrupt, Permission, Unavailable
from support.fault_proxy import FaultProxy, Kind, Rule
from support.object_volumes import KIB, MIB, Maker, content, put, read_fresh
from support.objects import Bucket, Moto, SeaweedFS
from support.system import need_fuse, wait_until
from support.volumes import ObjectVolumeUnderTest, environment

# A read of `small` fetches a part of a pack, one of `large` an index and then ranges of a file segment.
COLD: dict[str, dict[str, bytes]] = {
    "small": {f"/cold/small/{i:02}": content(i, 10 * KIB) for i in range(40)},
    "medium": {"/cold/medium": content(100, 3 * MIB + 5)},
    "large": {"/cold/large": content(101, 20 * MIB + 12345)},
}
ALL = {path: data for group in COLD.values() for path, data in group.items()}
ONE = "/cold/small/17"


class Cold:
    """The shared volume, its proxy, its mount."""

    def __init__(self, volume: ObjectVolumeUnderTest, proxy: FaultProxy, point: Path) -> None:
        self.volume, self.proxy, self.point = volume, proxy, point
        self.opened = volume.connect()

    def evict(self) -> None:
        self.volume.evict()
        self.proxy.reset()

    def api(self, path: str) -> bytes:
        with self.opened.open(path, "rb") as file:
            return file.read()

    def mount(self, path: str) -> bytes:
        return read_fresh(self.point / path.lstrip("/"))

    def key_of(self, path: str, kind: Kind = "pack") -> str:
        """The key of the segment that holds a file."""
        self.evict()
        self.api(path)
        keys = {request.key for request in self.proxy.requests(operation="get", kind=kind)}
        assert len(keys) == 1, keys
        return keys.pop()


def segment_of(key: str) -> str:
    return key.rpartition("/")[2].partition(".")[0]


@pytest.fixture(scope="module")
def _cold(shared_volume: tuple[ObjectVolumeUnderTest, FaultProxy]) -> Cold:
    need_fuse()
    volume, proxy = shared_volume
    cold = Cold(volume, proxy, volume.mount())
    for group in COLD.values():
        if len(group) > 1:
            put(cold.opened, group)
        else:
            for path, data in group.items():
                cold.opened.write_bytes(path, data, parents=True)
        cold.opened.sync()
    return cold


@pytest.fixture
def cold(_cold: Cold) -> Iterator[Cold]:
    """The shared volume with nothing on flash and a store that works."""
    _cold.evict()
    yield _cold
    _cold.proxy.clear()
    _cold.proxy.up()
    # Whatever a test left: the next one finds a store that is used again.
    _cold.opened.sync()
    _cold.volume.wait_until_clean()


# Reads


@contextmanager
def timed(seconds_max: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < seconds_max, f"{took:.1f} s"


Break = Callable[[FaultProxy, Kind], Rule]

PASSING: dict[str, Break] = {
    "503": lambda proxy, kind: proxy.slow_down(first=2, method="GET", kind=kind),
    "500": lambda proxy, kind: proxy.internal_error(first=2, method="GET", kind=kind),
    "body reset": lambda proxy, kind: proxy.break_body(first=1, method="GET", kind=kind),
    "body cut short": lambda proxy, kind: proxy.cut_body(first=1, method="GET", kind=kind),
    "body empty": lambda proxy, kind: proxy.cut_body(0, first=1, method="GET", kind=kind),
    "wrong range": lambda proxy, kind: proxy.wrong_range(first=1, method="GET", kind=kind),
    "no range": lambda proxy, kind: proxy.ignore_range(first=1, method="GET", kind=kind),
    "wrong bytes": lambda proxy, kind: proxy.wrong_bytes(first=1, method="GET", kind=kind),
    "flipped byte": lambda proxy, kind: proxy.flip_byte(first=1, method="GET", kind=kind),
    "reset before the store": lambda proxy, kind: proxy.lose_request(first=2, method="GET", kind=kind),
    "reset after the store": lambda proxy, kind: proxy.lose_answer(first=2, method="GET", kind=kind),
    "closed": lambda proxy, kind: proxy.lose_answer("close", first=2, method="GET", kind=kind),
}
# An index is asked for as a whole.
_NEEDS_RANGE = {"wrong range", "no range", "wrong bytes"}


@pytest.mark.parametrize("fault", PASSING)
def test_a_read_gets_the_right_bytes_past_a_fault_of_the_store(cold: Cold, fault: str) -> None:
    read: Callable[[str], bytes] = cold.mount if len(fault) % 2 else cold.api
    targets: list[tuple[Kind, str]] = [("pack", ONE), ("file", "/cold/large"), ("index", "/cold/large")]
    for kind, path in targets:
        if kind == "index" and fault in _NEEDS_RANGE:
            continue
        cold.evict()
        with PASSING[fault](cold.proxy, kind) as rule, timed(8):
            assert read(path) == ALL[path], f"{kind}: wrong bytes"
        assert rule.hits, f"{kind}: the fault did not happen"


def test_bytes_that_stay_wrong_are_an_error_that_names_the_segment(cold: Cold) -> None:
    # Alone in its segment: whatever range is fetched, the flipped byte is one of its own.
    path = "/cold/medium"
    key = cold.key_of(path)
    cold.evict()
    with cold.proxy.flip_byte(method="GET", key=key):
        with pytest.raises(Corrupt, match=segment_of(key)):
            cold.api(path)
        with pytest.raises(OSError) as caught:
            cold.mount(path)
        assert caught.value.errno == errno.EIO
        # Nobody else's.
        assert cold.mount(ONE) == ALL[ONE]
    assert cold.mount(path) == ALL[path]
    cold.evict()
    index = cold.key_of("/cold/large", "index")
    cold.evict()
    with cold.proxy.flip_byte(method="GET", key=index), pytest.raises(Corrupt, match=segment_of(index)):
        cold.api("/cold/large")
    assert cold.mount("/cold/large") == ALL["/cold/large"]


def test_an_answer_that_stays_wrong_is_an_error_that_names_key_and_attempts(cold: Cold) -> None:
    key = cold.key_of(ONE)
    cold.evict()
    with cold.proxy.wrong_range(method="GET", key=key):
        with pytest.raises(Unavailable, match=r"asked \d+ times") as caught, timed(8):
            cold.api(ONE)
        assert key in str(caught.value)
        # EAGAIN would be no error to whoever reads a file: Python takes it as its end.
        with pytest.raises(OSError) as refused, timed(8):
            cold.mount(ONE)
        assert refused.value.errno == errno.EIO
    assert cold.mount(ONE) == ALL[ONE]
    assert cold.api(ONE) == ALL[ONE]


def test_a_connection_on_which_nothing_moves_is_given_up(cold: Cold) -> None:
    with (
        cold.proxy.hold(at="answer", first=1, method="GET", kind="pack") as held,
        cold.proxy.stall(3600, at="body", first=1, method="GET", kind="file") as stalled,
        ThreadPoolExecutor(2) as readers,
        timed(20),
    ):
        reads = {path: readers.submit(cold.mount, path) for path in (ONE, "/cold/large")}
        for path, read in reads.items():
            assert read.result() == ALL[path]
    assert held.hits == stalled.hits == 1


def test_readers_that_wait_for_the_store_hold_up_nobody_else(cold: Cold) -> None:
    """There are 8 threads that answer the kernel; 24 readers wait."""
    local, waiting = "/cold/medium", [f"/cold/small/{i:02}" for i in range(24)]
    assert cold.mount(local) == ALL[local]
    cold.proxy.reset()
    with ThreadPoolExecutor(len(waiting)) as readers:
        with cold.proxy.hold(method="GET"):
            reads = {path: readers.submit(cold.mount, path) for path in waiting}
            cold.proxy.wait_for(1, method="GET")
            time.sleep(0.3)
            for _ in range(20):
                with timed(1.5):
                    assert cold.mount(local) == ALL[local]
                    assert cold.api(local) == ALL[local]
                    assert len(os.listdir(cold.point / "cold/small")) == 40
            with timed(2), open(cold.point / "written-meanwhile", "wb") as file:
                file.write(b"written")
            assert not any(read.done() for read in reads.values())
        for path, read in reads.items():
            assert read.result() == ALL[path]


def test_a_read_waits_for_a_store_that_is_down_for_a_while(cold: Cold) -> None:
    for how in ("refuse", "reset"):
        cold.evict()
        with ThreadPoolExecutor(2) as readers:
            cold.proxy.down(how)
            reads = {path: readers.submit(cold.mount, path) for path in (ONE, "/cold/large")}
            time.sleep(1.5)
            assert not any(read.done() for read in reads.values())
            cold.proxy.up()
            for path, read in reads.items():
                assert read.result(10) == ALL[path]


@pytest.mark.long
def test_a_read_from_a_store_that_stays_down_fails_and_names_the_segment(cold: Cold) -> None:
    key = cold.key_of(ONE)
    cold.evict()
    cold.proxy.down()
    with timed(60), pytest.raises(Unavailable, match=segment_of(key)):
        cold.api(ONE)
    with timed(60), pytest.raises(OSError) as caught:
        cold.mount(ONE)
    assert caught.value.errno == errno.EIO
    cold.proxy.up()
    assert cold.mount(ONE) == ALL[ONE]


def test_a_read_that_the_store_refuses_fails_at_once(cold: Cold) -> None:
    local = "/cold/medium"
    assert cold.mount(local) == ALL[local]
    key = cold.key_of(ONE)
    cold.evict()
    assert cold.mount(local) == ALL[local]
    with cold.proxy.access_denied(method="GET"):
        with timed(3), pytest.raises(Permission) as caught:
            cold.api(ONE)
        assert key in str(caught.value)
        with timed(3), pytest.raises(OSError) as refused:
            cold.mount(ONE)
        assert refused.value.errno in (errno.EACCES, errno.EIO)
        assert cold.mount(local) == cold.api(local) == ALL[local]
    assert cold.mount(ONE) == ALL[ONE]


@pytest.mark.parametrize("harm", ["deleted", "overwritten", "cut short"])
def test_an_object_that_somebody_harmed_costs_its_own_files_alone(cold: Cold, harm: str) -> None:
    bucket = cold.volume.bucket
    targets: list[tuple[str, Kind]] = [(ONE, "pack"), ("/cold/large", "file")]
    for path, kind in targets:
        key = cold.key_of(path, kind)
        good = bucket.get(key)
        # All of it is on flash: what becomes of the object is of no interest.
        cold.opened.warm(list(COLD["small"] if kind == "pack" else COLD["large"]))
        if harm == "deleted":
            bucket.delete(key)
        else:
            bucket.put(key, content(9, len(good)) if harm == "overwritten" else good[: len(good) // 3])
        assert cold.mount(path) == ALL[path], "the copy on flash is lost too"
        cold.evict()
        try:
            # Of an object that is cut short, what is left is right.
            lost = max(COLD["small"]) if kind == "pack" else path
            with timed(8), pytest.raises(Corrupt, match=segment_of(key)):
                cold.api(lost)
            with timed(8), pytest.raises(OSError) as caught:
                cold.mount(lost)
            assert caught.value.errno == errno.EIO
            assert cold.mount("/cold/medium") == ALL["/cold/medium"]
        finally:
            bucket.put(key, good)
        for again in COLD["small"] if kind == "pack" else COLD["large"]:
            assert cold.mount(again) == ALL[again]


def test_a_sealed_view_says_that_a_segment_is_lost_not_that_a_sample_is_missing(cold: Cold) -> None:
    """A job that skips files which are not there must not skip these."""
    dataset = cold.opened.seal("/cold/small")
    key = cold.key_of(ONE)
    good = cold.volume.bucket.get(key)
    cold.evict()
    cold.volume.bucket.delete(key)
    try:
        with timed(8), pytest.raises(Corrupt, match=segment_of(key)):
            dataset[17]
        with timed(8), pytest.raises(Corrupt, match=segment_of(key)):
            list(headrace.Loader(dataset, batch_size=4, seed=1))
    finally:
        cold.volume.bucket.put(key, good)
    assert bytes(dataset[17]) == ALL[ONE]


def test_one_index_serves_all_who_read_a_large_file(cold: Cold) -> None:
    data = ALL["/cold/large"]

    def read(number: int) -> bool:
        own = headrace.connect(cold.volume.name, start=False)
        with own, own.open("/cold/large", "rb", buffering=0) as file:
            file.seek(number * MIB)
            return file.read(1000) == data[number * MIB : number * MIB + 1000]

    with cold.proxy.delay(0.2, kind="index"), ThreadPoolExecutor(16) as readers:
        assert all(readers.map(read, range(16)))
    fetched = cold.proxy.requests(method="GET", kind="index")
    assert len(fetched) == 1, fetched


def test_a_damaged_index_on_flash_is_replaced(make_volume: Maker) -> None:
    volume = make_volume()
    data = content(1, 20 * MIB)
    volume.connect().write_bytes("/large", data)
    volume.evict()
    with volume.connect().open("/large", "rb", buffering=0) as file:
        file.read(1000)
    volume.stop()
    (index,) = volume.folder.glob("segments/*/*.idx")
    damaged = bytearray(index.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    index.write_bytes(damaged)
    volume.start()
    with volume.connect().open("/large", "rb") as file:
        assert file.read() == data


def test_a_store_that_stops_for_longer_than_any_connection_lasts(
    cold: Cold, object_server: SeaweedFS
) -> None:
    """SIGSTOP for 15 s: a connection is given up after 10 s without a byte."""
    with ThreadPoolExecutor(3) as workers:
        object_server.pause()
        try:
            reads = {path: workers.submit(cold.mount, path) for path in (ONE, "/cold/large")}
            cold.opened.write_bytes("/during-the-stop", b"d" * 5000)
            synced = workers.submit(cold.opened.sync)
            time.sleep(15)
            assert not synced.done(), "sync returned although the store has stopped"
        finally:
            object_server.resume()
        for path, read in reads.items():
            assert read.result(30) == ALL[path]
        synced.result(30)
    cold.evict()
    assert cold.mount("/during-the-stop") == b"d" * 5000


# Writes

UPLOADING: dict[str, Callable[[FaultProxy], list[Rule]]] = {
    "503 and 500": lambda proxy: [
        proxy.slow_down(first=3, method="PUT"),
        proxy.internal_error(first=3, method="PUT"),
        proxy.internal_error(first=2, method="POST"),
    ],
    "answer lost": lambda proxy: [proxy.lose_answer(first=4, method="PUT")],
    "completion lost": lambda proxy: [proxy.lose_answer(first=1, operation="complete_upload")],
    "request lost": lambda proxy: [
        proxy.lose_request(first=4, method="PUT"),
        proxy.lose_request("close", first=2, method="POST"),
    ],
    "body broken": lambda proxy: [
        proxy.break_upload(first=2, operation="put"),
        proxy.break_upload(first=2, operation="upload_part"),
    ],
    "parts refused": lambda proxy: [
        proxy.answer(400, "BadDigest", first=1, operation="upload_part"),
        proxy.answer(400, "InvalidPart", first=1, operation="complete_upload"),
    ],
}


@pytest.mark.parametrize("fault", UPLOADING)
def test_what_is_written_is_stored_past_a_fault_of_the_store(cold: Cold, fault: str) -> None:
    seed = sum(fault.encode())
    files = {f"/up/{seed}/{i}": content(seed + i, 3000 + i) for i in range(10)}
    large = content(seed, 20 * MIB + seed)
    rules = UPLOADING[fault](cold.proxy)
    with timed(30):
        put(cold.opened, files)
        cold.opened.write_bytes(f"/up/{seed}/large", large)
        cold.opened.sync()
    assert all(rule.hits for rule in rules), [(rule.name, rule.where) for rule in rules if not rule.hits]
    cold.proxy.clear()
    assert not cold.volume.bucket.unfinished_uploads()
    cold.evict()
    for path, data in files.items():
        assert cold.mount(path) == data
    assert cold.mount(f"/up/{seed}/large") == large


def test_parts_of_an_upload_that_the_store_lost_sight_of_are_cleaned_up(cold: Cold) -> None:
    data = content(5, 20 * MIB)
    held = cold.proxy.hold(operation="upload_part", skip=1)
    writer = threading.Thread(target=cold.opened.write_bytes, args=("/parts", data), kwargs={"durable": True})
    writer.start()
    held.wait()
    assert cold.volume.bucket.unfinished_uploads()
    # Refused for good: the upload is given up, and the store cannot be told.
    with cold.proxy.lose_request(operation="abort_upload"):
        refusal = cold.proxy.answer(400, "InvalidRequest", operation="upload_part")
        held.remove()
        cold.proxy.down()
        cold.proxy.up()
        cold.proxy.wait_for(1, 30, operation="abort_upload")
    refusal.remove()
    writer.join(40)
    assert not writer.is_alive()
    wait_until(lambda: not cold.volume.bucket.unfinished_uploads(), 10, "the end of unfinished uploads")
    cold.evict()
    assert cold.mount("/parts") == data


def test_heavy_writing_through_an_outage_loses_nothing(cold: Cold) -> None:
    written: dict[str, bytes] = {}
    over = threading.Event()

    def write(number: int) -> None:
        draw = random.Random(number)
        for step in range(1000):
            if over.is_set():
                return
            size = 18 * MIB if step % 15 == 7 else draw.choice([100, 10 * KIB, 300 * KIB, 2 * MIB])
            name, data = f"heavy-{number}-{step}", content(number * 1000 + step, size)
            with open(cold.point / name, "wb") as file:
                file.write(data)
                if step % 4 == 0 and not file.closed and outage.is_set() is False:
                    os.fsync(file.fileno())
            written[name] = data
            time.sleep(0.02)

    outage = threading.Event()
    with ThreadPoolExecutor(2) as writers:
        done = [writers.submit(write, number) for number in range(2)]
        time.sleep(1)
        for how in ("refuse", "reset"):
            outage.set()
            cold.proxy.down(how)
            time.sleep(1.5)
            cold.proxy.up()
            outage.clear()
            time.sleep(0.5)
        over.set()
        for each in done:
            each.result(60)
    with timed(40):
        cold.opened.sync()
    assert cold.volume.status().dirty_segments == 0
    wait_until(lambda: not cold.volume.bucket.unfinished_uploads(), 10, "the end of unfinished uploads")
    cold.evict()
    for name, data in written.items():
        assert cold.mount(name) == data, name
        os.unlink(cold.point / name)


def test_fsync_fails_at_once_while_the_store_refuses_writes(cold: Cold) -> None:
    path, data = cold.point / "refused", content(3, 20 * KIB)
    with cold.proxy.access_denied(method="PUT"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, data)
            for _ in range(2):
                with timed(3), pytest.raises(OSError) as caught:
                    os.fsync(descriptor)
                assert caught.value.errno == errno.EACCES
        finally:
            os.close(descriptor)
        with timed(3), pytest.raises(Permission, match="refuses"):
            cold.opened.sync()
        assert any(
            "uploads fail" in line and "AccessDenied" in line for line in cold.opened.status().warnings
        )
        assert read_fresh(path) == data
        cold.opened.evict()
        assert read_fresh(path) == data, "the only copy was evicted"
    with timed(3):
        cold.opened.sync()
    assert not cold.opened.status().warnings
    cold.evict()
    assert read_fresh(path) == data


@pytest.mark.parametrize("status", [400, 403])
def test_uploads_go_on_when_an_expired_token_is_renewed(cold: Cold, status: int) -> None:
    data = content(status, 30 * KIB)
    with cold.proxy.expired_token(status, method="PUT") as rule:
        done = threading.Event()

        def write() -> None:
            with headrace.connect(cold.volume.name, start=False) as own:
                own.write_bytes(f"/expired-{status}", data, durable=True)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        rule.wait(2)
        assert not done.wait(0.5), "fsync returned although nothing could be stored"
        assert any("expired" in line for line in cold.opened.status().warnings)
        assert cold.api(f"/expired-{status}") == data
    assert done.wait(12)
    writer.join()
    cold.evict()
    assert cold.api(f"/expired-{status}") == data


# Credentials


class CredentialServer:
    """A container's endpoint for credentials: gives keys that are good for `seconds`, and counts."""

    def __init__(self, bucket: Bucket, seconds: float) -> None:
        self.given = 0
        self.tokens: set[str | None] = set()
        self.access_key, self.secret_key = bucket.access.access_key, bucket.access.secret_key
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                own.given += 1
                own.tokens.add(self.headers.get("Authorization"))
                end = datetime.now(UTC) + timedelta(seconds=seconds)
                body = json.dumps(
                    {
                        "AccessKeyId": own.access_key,
                        "SecretAccessKey": own.secret_key,
                        "Token": "",
                        "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    }
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/credentials"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize("token", ["", "secret-token"])
def test_credentials_of_a_container_are_renewed_before_they_expire(
    scratch: Path, object_store: Bucket, token: str
) -> None:
    server = CredentialServer(object_store, 3)
    volume = ObjectVolumeUnderTest(scratch / "vol", object_store)
    variables: dict[str, str | None] = {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "AWS_SHARED_CREDENTIALS_FILE": str(scratch / "none"),
        "AWS_ENDPOINT_URL": object_store.access.endpoint,
        "AWS_REGION": object_store.access.region,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": server.url,
    }
    if token:
        (scratch / "token").write_text(token)
        variables["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(scratch / "token")
    try:
        with ExitStack() as stack:
            for name, value in variables.items():
                stack.enter_context(environment(name, value))
            engine.create(volume.name, object=object_store.url("vol"))
            engine.start(volume.name)
        opened = volume.connect()
        opened.write_bytes("/first", b"first", durable=True)
        before = server.given
        assert before
        time.sleep(3.2)
        opened.write_bytes("/second", b"second", durable=True)
        assert server.given > before
        volume.evict()
        assert opened.read_bytes("/first") == b"first"
        if token:
            assert server.tokens == {token}
    finally:
        volume.tear_down()
        server.close()


# The engine's end, and a disk that ends


def test_a_clean_stop_with_the_store_down_leaves_what_is_dirty_to_the_next_start(
    make_volume: Maker, fault_proxy: FaultProxy
) -> None:
    volume = make_volume()
    files = {f"/{i}": content(i, 50 * KIB) for i in range(10)}
    fault_proxy.down()
    put(volume.connect(), files)
    large = content(99, 20 * MIB)
    volume.connect().write_bytes("/large", large)
    with timed(25):
        volume.stop()
    assert volume.segments()
    volume.start()
    opened = volume.connect()
    for path, data in files.items():
        assert opened.read_bytes(path) == data
    assert volume.status().dirty_segments
    fault_proxy.up()
    with timed(30):
        opened.sync()
    volume.evict()
    for path, data in files.items():
        assert opened.read_bytes(path) == data
    with opened.open("/large", "rb") as file:
        assert file.read() == large


def test_a_disk_smaller_than_the_flash_tier(
    small_disk: Callable[..., Path], object_store: Bucket, fault_proxy: FaultProxy
) -> None:
    """Writers wait for uploads as long as these go on; then they hear ENOSPC, and nothing is torn."""
    folder = small_disk(64 * MIB)
    volume = ObjectVolumeUnderTest(folder / "vol", object_store.through(fault_proxy.access))
    volume.create(flash_bytes_max=1 << 30)
    volume.start()
    try:
        point = volume.mount()
        files = {f"{i:03}": content(i, 3 * MIB) for i in range(35)}
        for name, data in files.items():
            (point / name).write_bytes(data)
        volume.connect().sync()
        for name, data in files.items():
            assert read_fresh(point / name) == data, name
        fault_proxy.down()
        begun = time.monotonic()
        more: dict[str, bytes] = {}
        with pytest.raises(OSError) as caught:
            for i in range(100):
                data = content(1000 + i, 2 * MIB)
                with open(point / f"more-{i}", "wb") as file:
                    file.write(data)
                more[f"more-{i}"] = data
        assert caught.value.errno == errno.ENOSPC
        assert time.monotonic() - begun < 25, "writers wait once, not once for each piece"
        assert len(more) >= 10
        for name, data in more.items():
            assert read_fresh(point / name) == data, name
        fault_proxy.up()
        wait_until(lambda: _writes(point / "again", b"again"), 40, "writes after the outage")
        volume.connect().sync()
        volume.evict()
        for name, data in (more | files).items():
            assert read_fresh(point / name) == data, name
        # Somebody else fills the disk: what is read is not kept then, and read all the same.
        volume.evict()
        room = os.statvfs(folder)
        (folder / "foreign").write_bytes(bytes(room.f_bavail * room.f_frsize - 2 * MIB))
        for name in list(files)[:10]:
            assert read_fresh(point / name) == files[name], name
        with pytest.raises(OSError) as caught, open(point / "too-much", "wb") as file:
            file.write(content(1, MIB))
            os.fsync(file.fileno())
        assert caught.value.errno == errno.ENOSPC
        (folder / "foreign").unlink()
        wait_until(lambda: _writes(point / "again", b"at last"), 20, "writes after the space came back")
        volume.connect().sync()
        volume.evict()
        assert read_fresh(point / "again") == b"at last"
    finally:
        volume.tear_down()
        volume.bucket.close()


def _writes(path: Path, data: bytes) -> bool:
    try:
        path.write_bytes(data)
    except OSError:
        return False
    return True


# All at once


class Churn:
    """Threads that change files of their own and compare every read with what they wrote."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.files: dict[str, bytes] = {}
        self.reads = 0
        self.refused: list[str] = []
        self.end = threading.Event()

    def run(self, number: int) -> None:
        draw = random.Random(self.seed * 100 + number)
        mine: list[str] = []
        for step in range(1_000_000):
            if self.end.is_set():
                return
            kind = draw.choices(["new", "append", "patch", "remove", "rename", "read"], [4, 2, 2, 1, 1, 12])[
                0
            ]
            if not mine:
                kind = "new"
            name = f"{number}-{step}" if kind == "new" else draw.choice(mine)
            self._step(kind, name, mine, draw)

    def _step(self, kind: str, name: str, mine: list[str], draw: random.Random) -> None:
        path = self.root / name
        match kind:
            case "new":
                large = 17 * MIB if draw.random() < 0.02 else 0
                self.files[name] = draw.randbytes(large or draw.choice([0, 10, 700, 10_240, 70_000, 900_000]))
                self._write(path, os.O_CREAT, 0, self.files[name], durable=draw.random() < 0.3)
                mine.append(name)
            case "append" | "patch":
                old, new = self.files[name], draw.randbytes(draw.choice([5, 5000, 50_000]))
                at = len(old) if kind == "append" else draw.randrange(len(old) + 1)
                self.files[name] = old[:at] + new + old[at + len(new) :]
                self._write(path, 0, at, new, durable=draw.random() < 0.3)
            case "remove":
                path.unlink()
                mine.remove(name)
                del self.files[name]
            case "rename":
                path.rename(self.root / f"{name}r")
                mine[mine.index(name)] = f"{name}r"
                self.files[f"{name}r"] = self.files.pop(name)
            case _:
                self.reads += 1
                try:
                    found = read_fresh(path)
                except OSError as error:
                    assert error.errno == errno.EIO, error
                    self.refused.append(name)
                    return
                assert found == self.files[name], f"{name}: wrong bytes"

    def _write(self, path: Path, flags: int, at: int, data: bytes, *, durable: bool) -> None:
        descriptor = os.open(path, os.O_WRONLY | flags, 0o644)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], at + written)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def churn(make_volume: Maker, proxy: FaultProxy, seed: int, seconds: float) -> None:
    need_fuse()
    volume = make_volume(flash_bytes_max=64 * MIB)
    point = volume.mount()
    run = Churn(point, seed)
    proxy.slow_down(probability=0.04)
    proxy.internal_error(probability=0.04)
    proxy.lose_request(probability=0.03)
    proxy.lose_answer(probability=0.03)
    proxy.break_upload(probability=0.03)
    proxy.break_body(probability=0.03, method="GET")
    proxy.cut_body(probability=0.03, method="GET")
    proxy.wrong_range(probability=0.03, method="GET")
    proxy.wrong_bytes(probability=0.02, method="GET")
    proxy.flip_byte(probability=0.02, method="GET")
    proxy.expired_token(probability=0.01, method="PUT")
    proxy.delay(0.05, probability=0.1)
    opened = volume.connect()
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(run.run, number) for number in range(4)]
        begun = time.monotonic()
        while time.monotonic() - begun < seconds and not any(each.done() for each in running):
            time.sleep(0.7)
            opened.evict()
        run.end.set()
        for each in running:
            each.result(60)
    assert run.reads > 20 * seconds
    # A range at an object's end has no other of its length beside it: the proxy could not break that one.
    proxy.problems[:] = [problem for problem in proxy.problems if "is not as long" not in problem]
    # Wrong several times in a row is rare, and said; it is never wrong bytes.
    assert len(run.refused) <= 5 + run.reads * 0.03, run.refused
    proxy.clear()
    # There is no range beside the one that is the whole object.
    proxy.problems[:] = [problem for problem in proxy.problems if "is not as long" not in problem]
    opened.sync()
    assert volume.status().dirty_segments == 0
    volume.unmount(point)
    volume.stop()
    shutil.rmtree(volume.folder / "segments")
    (volume.folder / "segments").mkdir()
    volume.start()
    point = volume.mount()
    assert sorted(os.listdir(point)) == sorted(run.files)
    for name, data in run.files.items():
        assert read_fresh(point / name) == data, name


def test_churn_under_random_faults_gives_no_wrong_byte(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    churn(make_volume, fault_proxy, seed=1, seconds=10)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 14))
def test_long_churn_under_random_faults_gives_no_wrong_byte(
    make_volume: Maker, fault_proxy: FaultProxy, seed: int
) -> None:
    churn(make_volume, fault_proxy, seed=seed, seconds=60)


# Another store


def test_moto_is_a_store_too(scratch: Path) -> None:
    folder = scratch / "moto"
    folder.mkdir()
    with Moto(folder) as server:
        bucket = server.make_bucket()
        volume = ObjectVolumeUnderTest(scratch / "vol", bucket)
        volume.create()
        volume.start()
        try:
            write_read_remove(volume)
        finally:
            volume.tear_down()
        assert not bucket.unfinished_uploads()
        bucket.close()


def write_read_remove(volume: ObjectVolumeUnderTest) -> None:
    opened = volume.connect()
    files = {f"/{i}": content(i, 1000 * i) for i in range(20)}
    put(opened, files)
    files["/large"] = content(1, 20 * MIB)
    opened.write_bytes("/large", files["/large"])
    for _ in range(2):
        volume.evict()
        for path, data in files.items():
            with opened.open(path, "rb") as file:
                assert file.read() == data
    for name in opened.listdir("/"):
        opened.remove(f"/{name}")
    wait_until(lambda: not volume.objects(), 30, "the objects to be removed")
