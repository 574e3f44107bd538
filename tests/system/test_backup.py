"""The volume from the bucket alone: metadata backups, and `create --from` on a machine with nothing else."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.errors import AlreadyExists, HeadraceError, Invalid, NotFound
from support.fault_proxy import FaultProxy
from support.objects import Bucket
from support.system import wait_until
from support.volumes import ObjectVolumeUnderTest, VolumeUnderTest

KIB, MIB = 1 << 10, 1 << 20

Maker = Callable[..., ObjectVolumeUnderTest]


@pytest.fixture
def make_volume(scratch: Path, object_store: Bucket, fault_proxy: FaultProxy) -> Iterator[Maker]:
    """Makes volumes in the test's bucket, each with an engine; with `adopt` from what is in the bucket."""
    made: list[ObjectVolumeUnderTest] = []
    bucket = object_store.through(fault_proxy.access)

    def make(name: str = "vol", *, adopt: bool = False) -> ObjectVolumeUnderTest:
        volume = ObjectVolumeUnderTest(scratch / name, bucket)
        volume.create(adopt=adopt)
        made.append(volume)
        volume.start()
        return volume

    yield make
    fault_proxy.clear()
    fault_proxy.up()
    for volume in made:
        volume.tear_down()
    bucket.close()


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def tree(point: Path) -> dict[str, tuple[object, ...]]:
    """What stat and read say of everything below a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(os.fsencode(point)):
        for name in folders + files:
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            facts: list[object] = [stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink, stat.st_mtime_ns]
            if os.path.islink(path):
                facts.append(os.readlink(path))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    facts.append(file.read())
                facts.extend(sorted((key, os.getxattr(path, key)) for key in os.listxattr(path)))
            found[os.fsdecode(os.path.relpath(path, os.fsencode(point)))] = tuple(facts)
    return found


def fill(point: Path) -> None:
    for folder in ("a", "a/b", "c\udcff"):
        (point / folder).mkdir()
    for i in range(40):
        (point / "a" / f"{i}").write_bytes(content(i, i * 700))
    (point / "a/b/large").write_bytes(content(1, 18 * MIB))
    (point / "empty").touch(mode=0o640)
    (point / "link").symlink_to("a/b")
    os.link(point / "a/1", point / "hard")
    os.setxattr(point / "a/2", "user.colour", b"green")
    with open(point / "holes", "wb") as file:
        file.truncate(MIB)
    os.utime(point / "a/3", ns=(1, 2_000_000_003))


def test_a_fresh_machine_brings_the_volume_back(make_volume: Maker) -> None:
    first = make_volume("first")
    point = first.mount()
    fill(point)
    before = tree(point)
    done = first.connect().backup()
    assert done.changed and done.rows > 50
    again = first.connect().backup()
    assert (again.changed, again.version) == (False, done.version)
    first.kill()

    second = make_volume("second", adopt=True)
    assert not second.segments(), "bytes came before they were asked for"
    assert tree(second.mount("mnt2")) == before
    # It goes on from there: new inodes, new segments, the next backup.
    opened = second.connect()
    opened.write_bytes("/new", b"new")
    opened.sync()
    assert opened.backup().changed


def test_changes_are_stored_and_not_everything(make_volume: Maker, fault_proxy: FaultProxy) -> None:
    first = make_volume("first")
    opened = first.connect()
    for i in range(300):
        opened.write_bytes(f"/{i}", content(i, 3000))
    everything = opened.backup()
    opened.write_bytes("/more", b"more")
    opened.remove("/7")
    opened.rename("/8", "/eight")
    changes = opened.backup()
    assert changes.rows < everything.rows / 10
    for i in range(10, 20):
        opened.remove(f"/{i}")
        opened.backup()
    expected = {name: opened.read_bytes(f"/{name}") for name in opened.listdir("/")}
    first.kill()
    second = make_volume("second", adopt=True)
    opened = second.connect()
    assert {name: opened.read_bytes(f"/{name}") for name in opened.listdir("/")} == expected


def test_snapshots_and_sealed_views_come_back(make_volume: Maker) -> None:
    first = make_volume("first")
    opened = first.connect()
    opened.write_bytes("/data/a", b"one", parents=True)
    opened.backup()
    opened.snapshot("monday")
    opened.write_bytes("/data/a", b"two")
    seal = opened.seal("/data").seal
    opened.write_bytes("/data/b", content(1, 50 * KIB))
    opened.snapshot("tuesday")
    opened.remove("/data/b")
    opened.remove("/data/a")
    opened.backup()
    first.kill()
    second = make_volume("second", adopt=True)
    opened = second.connect()
    assert [snapshot.name for snapshot in opened.snapshots()] == [b"monday", b"tuesday"]
    assert opened.listdir("/data") == []
    assert opened.read_bytes("/.snapshots/monday/data/a") == b"one"
    assert opened.read_bytes("/.snapshots/tuesday/data/a") == b"two"
    assert opened.read_bytes("/.snapshots/tuesday/data/b") == content(1, 50 * KIB)
    dataset = opened.dataset(seal)
    assert [bytes(dataset[i]) for i in range(len(dataset))] == [b"two"]


def test_the_collector_keeps_what_the_last_backup_names(make_volume: Maker) -> None:
    first = make_volume("first")
    opened = first.connect()
    opened.write_bytes("/a", content(1, 100 * KIB))
    opened.backup()
    opened.remove("/a")
    opened.sync()
    time.sleep(6)
    assert first.objects(), "the last backup names a segment that is gone"
    opened.backup()
    wait_until(lambda: not first.objects(), 30, "the segment that nothing names any more to go")
    first.kill()
    assert make_volume("second", adopt=True).connect().listdir("/") == []


def test_a_clean_stop_leaves_a_backup(make_volume: Maker) -> None:
    first = make_volume("first")
    first.connect().write_bytes("/a", b"a")
    first.stop()
    second = make_volume("second", adopt=True)
    assert second.connect().read_bytes("/a") == b"a"


def test_a_volume_that_was_taken_over_writes_no_more(make_volume: Maker) -> None:
    first = make_volume("first")
    opened = first.connect()
    opened.write_bytes("/a", content(1, 10 * KIB))
    opened.backup()
    second = make_volume("second", adopt=True)
    with pytest.raises(HeadraceError, match="taken over"):
        opened.backup()
    # Its collector deletes nothing that the other may name.
    opened.remove("/a")
    time.sleep(6)
    assert second.connect().read_bytes("/a") == content(1, 10 * KIB)
    first.close()
    first.kill()
    with pytest.raises(HeadraceError, match="taken over"):
        first.start()


@pytest.mark.parametrize("point", ["backup-held", "backup-clean", "backup-stored", "backup-recorded"])
def test_a_backup_survives_a_kill_at_every_step(make_volume: Maker, point: str) -> None:
    first = make_volume("first")
    opened = first.connect()
    opened.write_bytes("/a", content(1, 10 * KIB))
    opened.backup()
    first.stop()
    pid = first.start(crash_at=point).pid
    opened = first.connect()
    opened.write_bytes("/b", content(2, 10 * KIB))
    with pytest.raises((HeadraceError, OSError)):
        opened.backup()
    first.wait_for_crash(pid)
    first.close()
    first.start()
    opened = first.connect()
    opened.remove("/a")
    opened.backup()
    opened.write_bytes("/c", b"c")
    opened.backup()
    first.kill()
    second = make_volume("second", adopt=True)
    opened = second.connect()
    assert sorted(opened.listdir("/")) == ["b", "c"]
    assert opened.read_bytes("/b") == content(2, 10 * KIB)


def test_what_cannot_be_brought_back_says_why(
    make_volume: Maker, scratch: Path, fault_proxy: FaultProxy, volume: VolumeUnderTest
) -> None:
    first = make_volume("first")
    second = ObjectVolumeUnderTest(scratch / "second", first.bucket)
    with pytest.raises(NotFound, match="no backup"):
        second.create(adopt=True)
    nothing = ObjectVolumeUnderTest(scratch / "nothing", first.bucket, prefix="nothing")
    with pytest.raises(NotFound, match="no volume at"):
        nothing.create(adopt=True)
    opened = first.connect()
    for i in range(200):
        opened.write_bytes(f"/{i}", content(i, 100))
    opened.backup()
    with fault_proxy.flip_byte(method="GET", key=".rows"), pytest.raises(HeadraceError, match="damaged"):
        second.create(adopt=True)
    with pytest.raises(AlreadyExists):
        second.create()
    with pytest.raises(Invalid, match="no object tier"):
        volume.connect().backup()
    # None of these attempts took anything from the volume that is served.
    assert opened.read_bytes("/7") == content(7, 100)
    opened.write_bytes("/more", b"more")
    assert opened.backup().changed


def test_status_tells_the_age_of_the_backup(make_volume: Maker) -> None:
    first = make_volume("first")
    with headrace.connect(first.name, start=False) as opened:
        assert first.status().backup_ns is None
        opened.write_bytes("/a", b"a")
        opened.backup()
        backup_ns = first.status().backup_ns
        assert backup_ns is not None
        assert abs(backup_ns - time.time_ns()) < 60e9
