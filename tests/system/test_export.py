"""A tree out of a volume: `headrace export` into folders and into buckets."""

from __future__ import annotations

import os
import random
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.control.exporter import BucketExport, FolderExport
from headrace.errors import Invalid, NotFound, Permission
from support import commands
from support.object_volumes import Maker
from support.objects import Bucket
from support.system import NOBODY, as_user, need_root, wait_until
from support.volumes import ObjectVolumeUnderTest, VolumeUnderTest

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def volume(scratch: Path, engine_binary: str) -> Iterator[VolumeUnderTest]:
    made = VolumeUnderTest(scratch / "vol")
    made.create()
    made.start()
    yield made
    made.tear_down()


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def fill(point: Path) -> None:
    root = os.fsencode(point)
    for folder in (b"a", b"a/b", b"a/deep/er", b"c\xff \n", b"empty"):
        os.makedirs(os.path.join(root, folder))
    for index in range(50):
        (point / "a" / f"{index:03d}").write_bytes(content(index, index * 700))
    (point / "a/b/large").write_bytes(content(100, 17 * MIB + 3))
    (point / "a/deep/er/middle").write_bytes(content(101, 900 * KIB))
    with open(root + b"/c\xff \n/\xfe\\", "wb") as file:
        file.write(b"odd name")
    with open(point / "holes", "wb") as file:
        file.truncate(40 * MIB)
        os.pwrite(file.fileno(), b"in the middle", 20 * MIB)
    (point / "link").symlink_to("a/../nowhere")
    os.symlink(b"/etc/passwd", root + b"/a/outside")
    os.link(point / "a/001", point / "hard")
    os.link(point / "a/001", point / "a/b/hard too")
    os.mkfifo(point / "pipe", 0o600)
    os.setxattr(point / "a/002", "user.colour", b"green\0")
    os.setxattr(point / "a", "user.folder", b"yes")
    os.chmod(point / "a/003", 0o4711)
    os.chmod(point / "a/b", 0o2775)
    os.chmod(point / "a/deep", 0o500)
    for index, name in enumerate((b"a/004", b"a/b", b"empty", b"link", b"")):
        os.utime(os.path.join(root, name), ns=(5, 10**18 + index * 1001), follow_symlinks=False)


def tree(folder: Path) -> dict[bytes, Any]:
    """Everything that a copy keeps. Files with several names: by the least of them."""
    found: dict[bytes, Any] = {}
    names: dict[tuple[int, int], bytes] = {}
    root = os.fsencode(folder)
    for above, folders, files in os.walk(root):
        for path in sorted([above, *(os.path.join(above, name) for name in folders + files)]):
            status = os.lstat(path)
            facts: list[Any] = [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns]
            if stat.S_ISLNK(status.st_mode):
                facts.append(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                facts.append(names.setdefault((status.st_dev, status.st_ino), path)[len(root) :])
                with open(path, "rb") as file:
                    facts.append(file.read())
            if not stat.S_ISLNK(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
                facts += sorted((name, os.getxattr(path, name)) for name in os.listxattr(path))
            found[path[len(root) :]] = facts
    return found


def test_a_folder_gets_everything_that_a_tree_has(volume: VolumeUnderTest, scratch: Path) -> None:
    point = volume.mount()
    fill(point)
    target = scratch / "out" / "deeper"
    answer = commands.answer("export", f"{volume.name}:/", target)
    assert tree(target) == tree(point)
    assert answer["left_out"] == []
    assert os.lstat(target / "holes").st_blocks * 512 < MIB, "holes were filled"
    # Again: nothing to do. After changes: only those.
    answer = commands.answer("export", f"{volume.name}:/", target)
    assert (answer["files"], answer["bytes"], answer["links"]) == (0, 0, 0)
    (point / "a/005").write_bytes(b"new")
    os.chmod(point / "a/006", 0o611)
    (point / "a/007").unlink()
    answer = commands.answer("export", f"{volume.name}:/a", target / "a")
    assert answer["files"] == 1
    (target / "a/007").unlink()
    # It adds a name of what is beyond what was exported now: its hard links are whole again with the tree.
    commands.answer("export", f"{volume.name}:/", target)
    (point / "a").stat()
    expected, found = tree(point), tree(target)
    for changed in (expected, found):  # its time changed with what was removed from it
        del changed[b"/a"]
    assert found == expected


def test_one_file_is_exported_under_its_name(volume: VolumeUnderTest, scratch: Path) -> None:
    volume.connect().write_bytes("/a/b", b"one", parents=True)
    commands.run("export", f"{volume.name}:/a/b", scratch / "out")
    assert (scratch / "out/b").read_bytes() == b"one"
    assert commands.failure("export", f"{volume.name}:/nowhere", scratch / "out", code=3).strip()


def test_no_link_leads_out_of_the_folder(volume: VolumeUnderTest, scratch: Path) -> None:
    opened = volume.connect()
    opened.write_bytes("/d/file", b"from the volume", parents=True)
    opened.write_bytes("/name", b"from the volume")
    opened.write_bytes("/good", b"good")
    outside = scratch / "outside"
    outside.mkdir()
    (outside / "name").write_bytes(b"keep me")
    target = scratch / "out"
    target.mkdir()
    (target / "d").symlink_to(outside)
    (target / "name").symlink_to(outside / "name")
    answer = commands.answer("export", f"{volume.name}:/", target, code=6)
    assert [entry["path"] for entry in answer["left_out"]] == ["/d"]
    assert os.listdir(outside) == ["name"] and (outside / "name").read_bytes() == b"keep me"
    # A link in the place of a file is replaced, not followed.
    assert not (target / "name").is_symlink() and (target / "name").read_bytes() == b"from the volume"
    assert (target / "good").read_bytes() == b"good"


def test_the_volume_is_not_exported_into_itself(volume: VolumeUnderTest, scratch: Path) -> None:
    opened = volume.connect()
    opened.write_bytes("/vol/HEADRACE", b"not the marker", parents=True)
    point = volume.mount()
    os.symlink(volume.folder, scratch / "alias")
    before = (volume.folder / "HEADRACE").read_bytes()
    for target in (volume.folder, volume.folder / "new/er", point, point / "new", scratch / "alias/new"):
        with pytest.raises(Invalid, match="another place"):
            FolderExport(opened, b"/", str(target)).run()
    # The folder of the volume is met on the way: /vol of the tree beside the volume's own.
    with pytest.raises(Invalid, match="another place"):
        FolderExport(opened, b"/", str(scratch)).run()
    assert (volume.folder / "HEADRACE").read_bytes() == before
    assert not (volume.folder / "new").exists() and sorted(os.listdir(point)) == ["vol"]


def test_an_interrupted_export_goes_on(volume: VolumeUnderTest, scratch: Path) -> None:
    opened = volume.connect()
    for index in range(3000):
        opened.write_bytes(f"/d{index % 7}/{index}", content(index, 10_000), parents=True)
    target = scratch / "out"
    process = commands.start("export", f"{volume.name}:/", target)
    wait_until(lambda: len(list(target.glob("*/*"))) > 200, 60, "the first files")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = {path for path in target.glob("*/*") if not path.name.startswith(".headrace")}
    assert 0 < len(there) < 3000, "it was not interrupted"
    # What has its name is whole.
    for path in there:
        assert path.read_bytes() == content(int(path.name), 10_000)
    answer = commands.answer("export", f"{volume.name}:/", target)
    assert answer["unchanged"] >= len(there) and answer["files"] + answer["unchanged"] == 3000
    for path in target.glob("*/*"):
        assert path.read_bytes() == content(int(path.name), 10_000)


def test_only_readable_files_are_exported(scratch: Path, volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    opened.write_bytes("/a", b"a")
    damaged = content(1, 100 * KIB)
    opened.write_bytes("/damaged", damaged)
    opened.sync()
    for path in volume.segments():
        data = bytearray(path.read_bytes())
        at = bytes(data).find(damaged[:100])
        if at >= 0:
            data[at + 5] ^= 1
            path.write_bytes(bytes(data))
    answer = commands.answer("export", f"{volume.name}:/", scratch / "out", code=6)
    assert [entry["path"] for entry in answer["left_out"]] == ["/damaged"]
    assert os.listdir(scratch / "out") == ["a"]


# Buckets


def test_a_bucket_gets_one_object_for_each_file(make_volume: Maker, object_store: Bucket) -> None:
    volume = make_volume()
    point = volume.mount()
    fill(point)
    with open(os.fsencode(point) + "/a/größe %41+~#?&=*'()[]".encode(), "wb") as file:
        file.write(b"signs")
    url = object_store.url("out/plain")
    endpoint = f"--endpoint={volume.bucket.access.endpoint}"
    answer = commands.answer("export", f"{volume.name}:/", url, endpoint, code=6)
    expected: dict[str, bytes] = {}
    for path in point.rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = os.fsencode(path.relative_to(point))
            if b"\xff" not in name:
                expected["out/plain/" + name.decode()] = path.read_bytes()
    assert {key: object_store.get(key) for key in object_store.keys("out/")} == expected
    assert answer["files"] == len(expected)
    told = {entry["path"]: entry for entry in answer["left_out"]}
    assert {"/link", "/a/outside", "/pipe"} < set(told)
    assert [path for path, entry in told.items() if entry["is_problem"]] == [r"/c\xff \n/\xfe\\"]
    facts = object_store.client.head_object(Bucket=object_store.name, Key="out/plain/a/004")
    assert facts["Metadata"]["mtime"] == "1000000000.000000000"

    # Again: nothing is sent. After a change: that.
    answer = commands.answer("export", f"{volume.name}:/", url, endpoint, code=6)
    assert (answer["files"], answer["unchanged"]) == (0, len(expected))
    (point / "a/005").write_bytes(b"new")
    os.utime(point / "a/b/large", ns=(1, 1))
    object_store.delete("out/plain/a/006")
    answer = commands.answer("export", f"{volume.name}:/a", object_store.url("out/plain/a"), endpoint)
    assert answer["files"] == 3
    assert object_store.get("out/plain/a/005") == b"new"
    assert object_store.get("out/plain/a/006") == expected["out/plain/a/006"]
    assert object_store.unfinished_uploads() == []
    commands.run("export", f"{volume.name}:/a/b/large", object_store.url("single"), endpoint)
    assert object_store.get("single/large") == expected["out/plain/a/b/large"]


def test_an_interrupted_export_to_a_bucket_goes_on(make_volume: Maker, object_store: Bucket) -> None:
    volume = make_volume()
    opened = volume.connect()
    for index in range(2500):
        opened.write_bytes(f"/{index}", content(index, 3000))
    url, endpoint = object_store.url("out"), f"--endpoint={volume.bucket.access.endpoint}"
    process = commands.start("export", f"{volume.name}:/", url, endpoint)
    wait_until(lambda: object_store.count("out/") > 100, 60, "the first objects")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = object_store.count("out/")
    assert before < 2500, "it was not interrupted"
    answer = commands.answer("export", f"{volume.name}:/", url, endpoint)
    assert answer["unchanged"] >= before and answer["files"] + answer["unchanged"] == 2500
    keys = object_store.keys("out/")
    assert len(keys) == 2500
    for key in keys[::50]:
        assert object_store.get(key) == content(int(key.removeprefix("out/")), 3000)


def test_a_bucket_that_cannot_take_it_is_refused(make_volume: Maker, object_store: Bucket) -> None:
    volume = make_volume()
    opened = volume.connect()
    opened.write_bytes("/a", b"a")
    opened.sync()
    endpoint = volume.bucket.access.endpoint
    own = volume.bucket.url(volume.prefix)
    before = object_store.keys()
    for url in (own, f"{own}/below", object_store.url()):
        with pytest.raises(Invalid, match="beside it"):
            BucketExport(opened, b"/", url, endpoint=endpoint).run()
    with pytest.raises(NotFound):
        BucketExport(opened, b"/", "s3://no-such-bucket-here/x", endpoint=endpoint).run()
    assert object_store.keys() == before
    BucketExport(opened, b"/", f"{own}-beside", endpoint=endpoint).run()
    assert object_store.get(f"{volume.prefix}-beside/a") == b"a"


def test_only_root_and_the_engines_owner_use_its_credentials(
    scratch: Path, object_store: Bucket, engine_binary: str
) -> None:
    need_root()
    volume = ObjectVolumeUnderTest(scratch / "vol", object_store)
    volume.create()
    os.chmod(volume.folder, 0o755)
    volume.start(system=True)
    try:
        opened = volume.connect()
        opened.write_bytes("/a", b"a")
        url, endpoint = object_store.url("out"), object_store.access.endpoint

        def export() -> None:
            with headrace.connect(volume.name, start=False) as others:
                others.export(["/a"], "/", url, endpoint=endpoint)

        with pytest.raises(Permission, match="credentials"):
            as_user(NOBODY, export)
        assert object_store.keys("out/") == []
        export()
        assert object_store.get("out/a") == b"a"
    finally:
        volume.tear_down()
