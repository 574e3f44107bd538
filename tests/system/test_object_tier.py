"""A volume whose segments are durable in a bucket: what fsync means, what is read back from the store alone,
what a full or small flash tier does, what survives kill -9. SeaweedFS behind a proxy that counts."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import headrace
from headrace.client import engine
from headrace.errors import AlreadyExists, Conflict, HeadraceError, Invalid, NotFound
from support.fault_proxy import FaultProxy
from support.object_volumes import KIB, MIB, Maker, content, put
from support.objects import Bucket
from support.system import wait_until
from support.volumes import ObjectVolumeUnderTest, VolumeUnderTest, environment


def test_fsync_returns_when_the_bytes_are_in_the_store(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    data = content(1, 4 * KIB)
    with volume.connect().open("/a", "wb", buffering=0) as file:
        file.write(data)
        file.sync()  # type: ignore[attr-defined]  # VolumeFile, as buffering=0 gives it
        assert volume.objects(), "nothing is stored after fsync"
        assert volume.status().dirty_segments == 0
    # One object, one request.
    assert fault_proxy.count(method="PUT") == 1
    # While the store takes nothing, fsync does not return, and goes on when it does.
    fault_proxy.down()
    done = threading.Event()

    def write_and_sync() -> None:
        with headrace.connect(volume.name, start=False) as own, own.open("/b", "wb", buffering=0) as file:
            file.write(data)
            file.sync()  # type: ignore[attr-defined]  # VolumeFile, as buffering=0 gives it
            done.set()

    writer = threading.Thread(target=write_and_sync)
    writer.start()
    assert not done.wait(2), "fsync returned although the store is down"
    assert volume.connect().read_bytes("/a") == data, "a reader is held up by the store"
    fault_proxy.up()
    assert done.wait(30)
    writer.join()


def test_what_is_written_is_stored_within_five_seconds(make_volume: Maker) -> None:
    volume = make_volume()
    opened = volume.connect()
    opened.write_bytes("/small", content(1, 10 * KIB))
    # A file that is still being written.
    with opened.open("/large", "wb") as file:
        for part in range(10):
            file.write(content(part, 2 * MIB))
        file.flush()
        begun = time.monotonic()
        size = 10 * KIB + 20 * MIB
        wait_until(lambda: sum(volume.objects().values()) >= size, 5.5, "the bytes to be stored")
        assert time.monotonic() - begun < 5.5


def test_all_reads_back_from_the_store_alone(make_volume: Maker) -> None:
    volume = make_volume()
    point = volume.mount()
    files = {f"small-{i}": content(i, 1 + i * 97) for i in range(300)}
    files["empty"] = b""
    files["medium"] = content(7, 5 * MIB + 3)
    files["large"] = content(8, 40 * MIB + 12345)
    files["holes"] = bytes(MIB) + content(9, 100) + bytes(2 * MIB)
    for name, data in files.items():
        (point / name).write_bytes(data)
    with open(point / "holes-2", "wb") as file:
        file.truncate(3 * MIB)
        file.seek(MIB)
        file.write(content(10, 10))
    files["holes-2"] = bytes(MIB) + content(10, 10) + bytes(2 * MIB - 10)
    volume.evict()
    for name, data in files.items():
        with open(point / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == data, name
    # The same by the other doors, and after a restart, from what is on flash by then.
    volume.unmount(point)
    volume.restart()
    opened = volume.connect()
    for name, data in files.items():
        assert opened.read_bytes(f"/{name}") == data if len(data) < 16 * MIB else True, name
    volume.evict()
    opened = volume.connect()
    with opened.open("/large", "rb") as file:
        rng = random.Random(5)
        for _ in range(50):
            at = rng.randrange(len(files["large"]))
            file.seek(at)
            assert file.read(5000) == files["large"][at : at + 5000]


def test_a_sealed_view_reads_from_the_store_alone(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    opened = volume.connect()
    files = {f"/data/{i:04}": content(i, 10 * KIB) for i in range(2000)}
    put(opened, files)
    dataset = opened.seal("/data")
    volume.evict()
    fault_proxy.reset()
    seen = 0
    for batch in headrace.Loader(dataset, batch_size=100, seed=3):
        for sample, data in zip(batch.indices, batch, strict=True):
            assert bytes(data) == files[f"/data/{int(sample):04}"]
            seen += 1
    assert seen == 2000
    assert fault_proxy.count(method="GET") < 0.05 * 2000


def test_an_epoch_of_small_files_costs_few_requests(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    opened = volume.connect()
    files = {f"/data/{i:04}": content(i, 10 * KIB) for i in range(2000)}
    put(opened, files)
    opened.sync()
    assert fault_proxy.count(method="PUT") < 0.01 * 2000
    volume.evict()
    fault_proxy.reset()
    order = list(files)
    random.Random(1).shuffle(order)
    for path in order:
        assert opened.read_bytes(path) == files[path]
    assert fault_proxy.count(method="GET") < 0.05 * 2000
    # And the second one none.
    fault_proxy.reset()
    for path in order:
        assert opened.read_bytes(path) == files[path]
    assert fault_proxy.count() == 0


def test_random_reads_fetch_little_more_than_was_asked_for(
    make_volume: Maker, fault_proxy: FaultProxy
) -> None:
    volume = make_volume()
    opened = volume.connect()
    data = content(1, 64 * MIB)
    with opened.open("/large", "wb") as file:
        file.write(data)
    volume.evict()
    fault_proxy.reset()
    rng = random.Random(1)
    size, asked = 16 * KIB, 0
    with opened.open("/large", "rb", buffering=0) as file:
        for _ in range(100):
            at = rng.randrange(len(data) // size) * size
            file.seek(at)
            assert file.read(size) == data[at : at + size]
            asked += size
    index = sum(request.bytes_out for request in fault_proxy.requests(method="GET") if ".idx" in request.key)
    assert fault_proxy.bytes_out(method="GET") - index <= 4 * asked + 100 * KIB


def test_one_fetch_serves_all_who_ask(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    opened = volume.connect()
    data = content(1, 200 * KIB)
    opened.write_bytes("/one", data)
    volume.evict()
    fault_proxy.reset()
    fault_proxy.delay(0.5, method="GET")
    wrong: list[bool] = []

    def read() -> None:
        with headrace.connect(volume.name, start=False) as own:
            wrong.append(own.read_bytes("/one") != data)

    readers = [threading.Thread(target=read) for _ in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == [False] * 16
    assert fault_proxy.count(method="GET") == 1


def test_a_small_flash_tier_serves_more_than_it_holds(make_volume: Maker) -> None:
    volume = make_volume(flash_bytes_max=20 * MIB)
    point = volume.mount()
    files = {f"{i:03}": content(i, 500 * KIB) for i in range(180)}
    files["large"] = content(1000, 12 * MIB)
    for name, data in files.items():
        (point / name).write_bytes(data)
    sums = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    volume.connect().sync()
    wrong: list[str] = []

    def read(seed: int) -> None:
        order = list(files)
        random.Random(seed).shuffle(order)
        good = {name: hashlib.sha256((point / name).read_bytes()).digest() == sums[name] for name in order}
        wrong.extend(name for name in order if not good[name])

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong
    status = volume.status()
    held = sum(path.stat().st_blocks * 512 for path in (volume.folder / "segments").glob("*/*"))
    assert status.clean_bytes + status.dirty_bytes <= 20 * MIB
    assert held <= 22 * MIB


def test_nothing_dirty_is_evicted_and_a_full_flash_tier_says_so(
    make_volume: Maker, fault_proxy: FaultProxy
) -> None:
    volume = make_volume(flash_bytes_max=32 * MIB)
    point = volume.mount()
    fault_proxy.down()
    written: dict[str, bytes] = {}
    with pytest.raises(OSError, match=r"No space left"):
        for i in range(100):
            data = content(i, MIB)
            with open(point / f"{i:03}", "wb") as file:
                file.write(data)
            written[f"{i:03}"] = data
    assert len(written) >= 15
    volume.connect().evict()
    for name, data in written.items():
        assert (point / name).read_bytes() == data, name
    assert any("uploads fail" in line for line in volume.connect().status().warnings)
    fault_proxy.up()
    volume.connect().sync()
    volume.evict()
    for name, data in written.items():
        with open(point / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == data, name
    (point / "more").write_bytes(content(5, MIB))


def test_a_stream_larger_than_the_flash_tier_goes_through(make_volume: Maker) -> None:
    volume = make_volume(flash_bytes_max=32 * MIB)
    point = volume.mount()
    data = content(1, 80 * MIB)

    def stream(name: str) -> None:
        with open(point / name, "wb", buffering=0) as file:
            for at in range(0, len(data), MIB):
                file.write(data[at : at + MIB])
            os.fsync(file.fileno())

    streams = [threading.Thread(target=stream, args=(name,), daemon=True) for name in ("a", "b")]
    for thread in streams:
        thread.start()
    for thread in streams:
        thread.join(120)
        assert not thread.is_alive(), "a stream is stuck although the store is well"
    volume.evict()
    for name in ("a", "b"):
        with open(point / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == data


def test_a_clean_stop_keeps_what_flash_had_no_room_for(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume(flash_bytes_max=32 * MIB)
    point = volume.mount()
    fault_proxy.down()
    data = content(1, 60 * MIB)
    written = 0
    with pytest.raises(OSError, match="No space left"), open(point / "a", "wb", buffering=0) as file:
        while written < len(data):
            written += file.write(data[written : written + MIB])
    assert written >= 25 * MIB
    volume.unmount(point)
    volume.stop()
    volume.start()
    opened = volume.connect()
    assert opened.stat("/a").size == written
    with opened.open("/a", "rb") as stored:
        assert stored.read() == data[:written]
    fault_proxy.up()
    opened.sync()
    volume.evict()
    with opened.open("/a", "rb") as stored:
        assert stored.read() == data[:written]


def test_a_damaged_copy_on_flash_is_replaced(make_volume: Maker) -> None:
    volume = make_volume()
    opened = volume.connect()
    files = {f"/{i}": content(i, 30 * KIB) for i in range(50)}
    files["/large"] = content(99, 20 * MIB)
    for path, data in files.items():
        opened.write_bytes(path, data)
    opened.sync()
    for segment in volume.segments():
        with open(segment, "r+b") as file:
            file.seek(20 * KIB)
            file.write(bytes(64))
    for path, data in files.items():
        with opened.open(path, "rb") as file:
            assert file.read() == data


@pytest.mark.parametrize("point", ["before-upload", "after-upload", "after-commit", "after-announce"])
def test_what_fsync_acknowledged_survives_a_kill(make_volume: Maker, point: str) -> None:
    volume = make_volume()
    volume.stop()
    pid = volume.start(crash_at=f"{point}:3").pid
    acknowledged: dict[str, bytes] = {}
    with pytest.raises((HeadraceError, OSError)):
        opened = volume.connect()
        for i in range(20):
            data = content(i, 3000 + i)
            with opened.open(f"/{i}", "wb", buffering=0) as file:
                file.write(data)
                file.sync()  # type: ignore[attr-defined]  # VolumeFile, as buffering=0 gives it
            acknowledged[f"/{i}"] = data
    volume.wait_for_crash(pid)
    assert acknowledged
    volume.close()
    volume.start()
    opened = volume.connect()
    opened.sync()
    volume.wait_until_clean()
    volume.evict()
    for path, data in acknowledged.items():
        assert opened.read_bytes(path) == data


def test_space_in_the_bucket_comes_back(make_volume: Maker) -> None:
    volume = make_volume()
    opened = volume.connect()
    for i in range(20):
        opened.write_bytes(f"/{i}", content(i, 100 * KIB))
    with opened.open("/large", "wb") as file:
        file.write(content(1, 20 * MIB))
    volume.evict()
    assert volume.objects()
    for entry in opened.listdir("/"):
        opened.remove(f"/{entry}")
    wait_until(lambda: not volume.objects(), 30, "the objects to be removed")
    assert not volume.bucket.keys(f"{volume.prefix}/segments/")


def test_a_prefix_belongs_to_one_volume(make_volume: Maker, scratch: Path) -> None:
    volume = make_volume("first")
    second = ObjectVolumeUnderTest(scratch / "second", volume.bucket, prefix="first")
    with pytest.raises(AlreadyExists, match="another prefix"):
        second.create()
    # A folder whose prefix was given to another volume meanwhile starts no engine.
    volume.stop()
    volume.bucket.delete("first/HEADRACE")
    second.create()
    with pytest.raises(HeadraceError, match="is the prefix of volume"):
        volume.start()


def test_a_store_that_lies_is_refused(make_volume: Maker, scratch: Path, fault_proxy: FaultProxy) -> None:
    volume = make_volume("good")
    volume.stop()
    for rule, why in [
        (fault_proxy.ignore_conditions, "If-None-Match"),
        (fault_proxy.wrong_bytes, "cannot be trusted"),
    ]:
        with rule():
            other = ObjectVolumeUnderTest(scratch / "bad", volume.bucket, prefix="bad")
            with pytest.raises(Invalid, match=why):
                other.create()
            with pytest.raises(HeadraceError, match=why):
                volume.start()
    volume.start()


def test_a_bucket_that_cannot_be_used_says_why(
    scratch: Path, object_store: Bucket, fault_proxy: FaultProxy
) -> None:
    folder = scratch / "vol"
    bucket = object_store.through(fault_proxy.access)
    volume = ObjectVolumeUnderTest(folder, bucket)
    missing = ObjectVolumeUnderTest(folder, Bucket(fault_proxy.access, "no-such-bucket"))
    with pytest.raises(NotFound, match="bucket does not exist"):
        missing.create()
    with fault_proxy.access_denied(), pytest.raises(HeadraceError, match="refuses"):
        volume.create()
    with fault_proxy.wrong_region(), pytest.raises(Invalid, match="region"):
        volume.create()
    with pytest.raises(Invalid, match="16777216"):
        volume.create(flash_bytes_max=MIB)
    begun = time.monotonic()
    fault_proxy.down()
    with pytest.raises(HeadraceError, match=r"s3://"):
        volume.create()
    assert time.monotonic() - begun < 60
    fault_proxy.up()
    # Whatever was left by these attempts is in nobody's way.
    volume.create()


def test_a_start_does_not_wait_for_a_store_that_is_down(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    data = content(1, 50 * KIB)
    volume.connect().write_bytes("/here", data)
    volume.connect().sync()
    volume.stop()
    fault_proxy.down()
    begun = time.monotonic()
    volume.start()
    assert time.monotonic() - begun < 15
    opened = volume.connect()
    assert opened.read_bytes("/here") == data
    opened.write_bytes("/later", data)
    assert opened.status().warnings
    fault_proxy.up()
    opened.sync()
    assert volume.status().dirty_segments == 0


def test_credentials_of_the_shared_file_are_renewed(
    scratch: Path, object_store: Bucket, fault_proxy: FaultProxy
) -> None:
    access = object_store.access
    file = scratch / "credentials"

    def write(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    write(access.access_key, access.secret_key)
    volume = ObjectVolumeUnderTest(scratch / "vol", object_store)
    names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(environment(name, None))
        stack.enter_context(environment("AWS_SHARED_CREDENTIALS_FILE", str(file)))
        stack.enter_context(environment("AWS_ENDPOINT_URL", access.endpoint))
        engine.create(volume.name, object=object_store.url("vol"))
        engine.start(volume.name)
    opened = volume.connect()
    opened.write_bytes("/a", b"a")
    opened.sync()
    write(access.access_key, "wrong")
    opened.write_bytes("/b", b"b")
    with pytest.raises(HeadraceError):
        opened.sync()
    write(access.access_key, access.secret_key)
    wait_until(lambda: volume.status().dirty_segments == 0, 30, "the upload with renewed credentials")
    volume.tear_down()


def test_numbers_for_prometheus(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    volume = make_volume()
    opened = volume.connect()
    fault_proxy.down()
    opened.write_bytes("/a", content(1, 100 * KIB))

    def numbers() -> dict[str, float]:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(str(volume.folder / "engine.sock"))
            channel.sendall(b"GET /metrics HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
            text = b"".join(iter(lambda: channel.recv(65536), b"")).decode()
        lines = [line.split(" ") for line in text.splitlines() if line.startswith("headrace_")]
        return {name: float(value) for name, value in lines}

    wait_until(lambda: numbers()["headrace_object_dirty_bytes"] >= 100 * KIB, 10, "dirty bytes to be told of")
    fault_proxy.up()
    opened.sync()
    opened.backup()
    told = numbers()
    assert told["headrace_object_dirty_bytes"] == 0 and told["headrace_object_failing"] == 0
    assert told["headrace_flash_clean_bytes"] >= 100 * KIB
    assert abs(told["headrace_backup_timestamp_seconds"] - time.time()) < 60


def test_a_volume_without_an_object_tier_evicts_nothing(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    opened.write_bytes("/a", b"a" * 100 * KIB)
    opened.sync()
    assert opened.status().object is None
    with pytest.raises((Invalid, Conflict), match="only copy"):
        opened.evict()
    report = opened.tier(["/a"])
    assert (report.files, report.bytes, report.flash_bytes, report.dirty_bytes) == (1, 102400, 102400, 0)
