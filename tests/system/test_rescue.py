"""A tree from segments alone: `headrace rescue`, when the folder and all backups of its metadata are lost."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.client import engine
from headrace.control.extraction import extract, find_segments, open_segment
from headrace.errors import Corrupt, NotFound, Unavailable
from support import commands
from support.fault_proxy import FaultProxy
from support.objects import Bucket
from support.system import engines_under, wait_until
from support.volumes import ObjectVolumeUnderTest

KIB, MIB = 1 << 10, 1 << 20

Maker = Callable[[str], ObjectVolumeUnderTest]


@pytest.fixture
def place(scratch: Path, object_store: Bucket, fault_proxy: FaultProxy) -> Iterator[Maker]:
    """Folders for volumes of one prefix of the test's bucket. Their engines are ended behind the test."""
    made: list[ObjectVolumeUnderTest] = []
    bucket = object_store.through(fault_proxy.access)

    def make(name: str) -> ObjectVolumeUnderTest:
        made.append(ObjectVolumeUnderTest(scratch / name, bucket))
        return made[-1]

    yield make
    fault_proxy.clear()
    fault_proxy.up()
    for volume in made:
        volume.tear_down()
    bucket.close()


@pytest.fixture
def first(place: Maker) -> ObjectVolumeUnderTest:
    """A volume with an engine: the one that is going to be lost."""
    volume = place("first")
    volume.create()
    volume.start()
    return volume


def rescue(volume: ObjectVolumeUnderTest) -> engine.Rescued:
    """Makes it of the segments in its prefix, and starts its engine."""
    with volume.credentials():
        rescued = engine.rescue(volume.name, volume.bucket.url(volume.prefix))
    volume.start()
    return rescued


def lose_metadata(volume: ObjectVolumeUnderTest) -> None:
    """The machine is gone, and of the bucket's objects all that are no segments."""
    volume.kill()
    for key in volume.bucket.keys(f"{volume.prefix}/"):
        if not key.startswith(f"{volume.prefix}/segments/"):
            volume.bucket.delete(key)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def write(path: bytes, data: bytes, offset: int | None = None, *, truncate: int | None = None) -> None:
    """Writes over what is there (offset None: a new file, or all of it), fsynced when it returns."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if offset is None else 0)
    descriptor = os.open(path, flags, 0o640)
    try:
        if truncate is not None:
            os.ftruncate(descriptor, truncate)
        os.pwrite(descriptor, data, offset or 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_in(point: Path) -> dict[bytes, bytes]:
    found = {}
    for folder, _, names in os.walk(os.fsencode(point)):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), os.fsencode(point))] = file.read()
    return found


def fill(point: Path) -> None:
    """Every way to write a file whose bytes segments can know."""
    root = os.fsencode(point)
    for folder in (b"a", b"a/b", b"c\xff \n", b"train"):
        os.mkdir(os.path.join(root, folder))
    for index in range(60):
        write(root + b"/train/%03d" % index, content(index, index * 613 + 1))
    write(root + b"/a/chunked", content(1000, 16 * KIB * 5 + 77))
    write(root + b"/a/b/large", content(1001, 20 * MIB + 5))
    write(root + b"/c\xff \n/\xfe\\ name", content(1002, 3000))
    write(root + b"/a/overwritten", content(1003, 300 * KIB))
    write(root + b"/a/overwritten", content(1004, 50 * KIB), 100 * KIB + 3)
    write(root + b"/a/overwritten", content(1005, 10), 299 * KIB)
    write(root + b"/a/again", content(1006, 100 * KIB))
    write(root + b"/a/again", content(1007, 5 * KIB))
    write(root + b"/a/cut", content(1008, 100 * KIB))
    write(root + b"/a/cut", content(1009, KIB), 10 * KIB, truncate=20 * KIB)
    write(root + b"/a/large, then small", content(1010, 17 * MIB))
    write(root + b"/a/large, then small", content(1011, 4 * KIB), 3 * MIB + 1)
    write(root + b"/a/holes", content(1012, 9 * KIB), 5 * MIB)
    for index in range(12):
        write(root + b"/a/appended", content(1100 + index, 3000 + index), index * 3100)


def test_every_fsynced_file_comes_back(first: ObjectVolumeUnderTest, place: Maker) -> None:
    point = first.mount()
    fill(point)
    os.chmod(point / "train/001", 0o4755)
    os.utime(point / "train/002", ns=(1, 2_000_000_003))
    write(os.fsencode(point / "train/001"), b"x", 0)
    mtimes = {name: os.lstat(point / "train" / name).st_mtime_ns for name in ("001", "000")}
    expected = files_in(point)
    inodes = {name: os.lstat(os.path.join(os.fsencode(point), name)).st_ino for name in expected}
    first.connect().backup()
    lose_metadata(first)

    second = place("second")
    rescued = rescue(second)
    assert rescued.notes == []
    assert (rescued.files, rescued.bytes) == (len(expected), sum(map(len, expected.values())))
    assert not second.segments(), "bytes came before they were asked for"
    point = second.mount("mnt2")
    assert files_in(point) == expected
    assert {name: os.lstat(os.path.join(os.fsencode(point), name)).st_ino for name in expected} == inodes
    assert {name: os.lstat(point / "train" / name).st_mtime_ns for name in mtimes} == mtimes
    assert os.lstat(point / "train/001").st_mode & 0o7777 == 0o755
    assert os.lstat(point / "a").st_mode & 0o7777 == 0o755
    assert (os.lstat(point).st_nlink, os.lstat(point / "a").st_nlink) == (2 + 3, 2 + 1)

    # It is a volume like any other: it goes on, is backed up, and outlives crashes.
    write(os.fsencode(point / "a/new"), b"new")
    (point / "folder").mkdir()
    (point / "folder").rmdir()
    second.connect().backup()
    second.kill()
    second.start()
    point = second.mount("mnt2")
    assert files_in(point) == expected | {b"a/new": b"new"}
    os.unlink(point / "a/chunked")
    del expected[b"a/chunked"]
    second.kill()

    third = place("third")
    with third.credentials():
        engine.create(third.name, object=third.bucket.url(third.prefix), adopt=True)
    third.start()
    assert files_in(third.mount("mnt3")) == expected | {b"a/new": b"new", b"a/chunked": content(1000, 81997)}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_come_back_as_the_extractor_reads_them(
    first: ObjectVolumeUnderTest, place: Maker, scratch: Path, seed: int
) -> None:
    """The pure Python reader and the engine agree on every byte and name, also where neither can know."""
    chance = random.Random(seed)
    point = os.fsencode(first.mount())
    os.mkdir(point + b"/d")
    names = [b"/%d" % index for index in range(8)] + [b"/d/%d" % index for index in range(8)]
    for step in range(250):
        path = point + chance.choice(names)
        size = chance.choice([1, 500, 3000, 70 * KIB, 400 * KIB] + [17 * MIB] * (step % 25 == 0))
        try:
            match chance.randrange(8):
                case 0:
                    os.unlink(path)
                case 1:
                    os.rename(path, point + chance.choice(names))
                case 2:
                    os.truncate(path, chance.randrange(200 * KIB))
                case 3:
                    write(path, content(step, size))
                case 4:
                    first.connect().write_bytes(path[len(point) :], content(step, size))
                case _:
                    write(path, content(step, size), chance.randrange(300 * KIB))
        except FileNotFoundError:
            continue
    first.connect().sync()
    first.wait_until_clean()
    lose_metadata(first)
    downloaded = scratch / "downloaded"
    for key in first.bucket.keys(f"{first.prefix}/segments/"):
        target = downloaded / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(first.bucket.get(key))
    told: list[str] = []
    readers = [open_segment(path) for path in find_segments([str(downloaded)])]
    extract(readers, str(scratch / "extracted"), told.append)

    second = place("second")
    rescued = rescue(second)
    found = files_in(second.mount("mnt2"))
    assert found == files_in(scratch / "extracted")
    assert rescued.files == len(found) and len(rescued.notes) == len(told)


def test_a_lost_marker_gets_a_new_volume_and_the_old_folder_is_fenced(
    first: ObjectVolumeUnderTest, place: Maker
) -> None:
    opened = first.connect()
    before = opened.status().volume
    opened.write_bytes("/a", b"one")
    opened.sync()
    opened.backup()
    first.kill()
    marker = f"{first.prefix}/HEADRACE"
    first.bucket.delete(marker)

    second = place("second")
    rescued = rescue(second)
    assert rescued.volume != before
    assert second.connect().read_bytes("/a") == b"one"
    told = json.loads(second.bucket.get(marker))
    assert told["volume"] == rescued.volume and told["epoch"] > 0
    # The backup of the volume that was is not in the way of the next one.
    second.connect().backup()
    second.kill()
    third = place("third")
    with third.credentials():
        engine.create(third.name, object=third.bucket.url(third.prefix), adopt=True)
    third.start()
    assert third.connect().read_bytes("/a") == b"one"
    # Whoever comes back from before uploads nothing.
    with pytest.raises(Exception, match="prefix of volume"):
        first.start()
    wait_until(lambda: not engines_under(first.name), 30, "the end of the engine that was refused")


def test_damaged_segments_are_named_and_the_others_read(first: ObjectVolumeUnderTest, place: Maker) -> None:
    opened = first.connect()
    bucket = first.bucket
    keys: dict[str, str] = {}
    for name, size in {
        "good": 9000, "torn": 9000, "header": 9000, "frame": 9000, "payload": 9000,
        "index": 17 * MIB, "short": 17 * MIB, "lost": 17 * MIB,
    }.items():  # fmt: skip
        seen = set(first.objects())
        for half in range(2):
            opened.write_bytes(f"/{name}{half}", content(len(keys), size))
            opened.sync()
            if size > MIB:
                break
        new = sorted(set(first.objects()) - seen, key=os.path.basename)
        keys[name] = new[0]
    lose_metadata(first)

    def change(name: str, at: int) -> None:
        data = bytearray(bucket.get(keys[name]))
        data[at] ^= 0x40
        bucket.put(keys[name], bytes(data))

    bucket.put(keys["torn"], bucket.get(keys["torn"], 0, 4096 + 3000))
    change("header", 100)
    change("frame", 4096 + 20)
    change("payload", 4096 + 4096 + 17)
    index = keys["index"].replace(".file", ".idx")
    bucket.put(index, bucket.get(index)[:50])
    bucket.put(keys["short"], bucket.get(keys["short"], 0, 10 * MIB))
    bucket.delete(keys["lost"])

    second = place("second")
    rescued = rescue(second)
    notes = "\n".join(rescued.notes)
    for name in ("torn", "header", "frame", "index", "short", "lost"):
        segment = keys[name].split("/")[-1].split(".")[0]
        assert segment in notes, f"{name}: {notes}"
    assert keys["good"].split("/")[-1].split(".")[0] not in notes
    opened = second.connect()
    names = {os.fsdecode(name) for name in opened.listdir("/")}
    there = {"good0", "good1", "header0", "header1", "torn1", "frame1", "payload0", "payload1", "short0"}
    assert names == there
    for number, name in enumerate(("good", "header")):
        assert opened.read_bytes(f"/{name}1") == content(2 * number, 9000)
    # What is damaged is an error and never other bytes; what is not can be read.
    with pytest.raises(Corrupt):
        opened.read_bytes("/payload0")
    with opened.open("/short0", "rb") as file:
        assert file.read(10 * MIB) == content(6, 17 * MIB)[: 10 * MIB]
        with pytest.raises(Corrupt):
            file.read(MIB)
    # Nothing of a damaged segment is removed, also not by the look through the bucket that follows a crash.
    before = second.objects()
    second.kill()
    second.start()
    wait_until(lambda: second.connect().backup() is not None, 30, "a backup")
    opened = second.connect()
    opened.write_bytes("/more", b"more")
    opened.sync()
    assert before.items() <= second.objects().items()


def test_of_two_files_with_one_name_the_newer_keeps_it(first: ObjectVolumeUnderTest, place: Maker) -> None:
    opened = first.connect()
    opened.write_bytes("/a", b"older")
    opened.snapshot("one")  # which holds what it names
    opened.remove("/a")
    opened.write_bytes("/a/b", b"in a folder of that name", parents=True)
    opened.write_bytes("/c", b"c, replaced")
    opened.snapshot("two")
    opened.write_bytes("/c", b"c")
    opened.sync()
    lose_metadata(first)

    second = place("second")
    rescued = rescue(second)
    opened = second.connect()
    told = "\n".join(rescued.notes)
    names = {os.fsdecode(name) for name in opened.listdir("/")}
    assert opened.read_bytes("/a/b") == b"in a folder of that name"
    assert opened.read_bytes("/c") == b"c"
    older, replaced = sorted(names - {"a", "c"})
    assert older.startswith("a.ino-") and replaced.startswith("c.ino-")
    assert older in told and replaced in told
    assert (opened.read_bytes(f"/{older}"), opened.read_bytes(f"/{replaced}")) == (b"older", b"c, replaced")


def test_the_command_says_what_it_cannot_know(first: ObjectVolumeUnderTest, place: Maker) -> None:
    opened = first.connect()
    opened.write_bytes("/renamed", b"1")
    opened.sync()
    opened.rename("/renamed", "/new name")
    opened.sync()
    lose_metadata(first)
    second = place("second")
    url = second.bucket.url(second.prefix)
    with second.credentials():
        answer = commands.answer("rescue", second.name, "--from", url)
        assert (answer["files"], answer["bytes"]) == (1, 1)
        assert "renames" in answer["notes"][-1]
        third = place("third")
        out, _ = commands.run("rescue", third.name, "--from", url)
    assert "rescued 1 file" in out and "renames" in out
    third.start()
    assert [os.fsdecode(name) for name in third.connect().listdir("/")] == ["renamed"]


def test_nothing_is_made_of_nothing(place: Maker, fault_proxy: FaultProxy) -> None:
    volume = place("none")
    with volume.credentials(), pytest.raises(NotFound, match="no segments"):
        engine.rescue(volume.name, volume.bucket.url("nowhere"))
    assert volume.bucket.keys() == []
    fault_proxy.down()
    with volume.credentials(), pytest.raises(Unavailable):
        engine.rescue(volume.name, volume.bucket.url("nowhere"))
