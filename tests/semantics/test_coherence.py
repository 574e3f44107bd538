"""One engine, several roads: what one road changed, the others see at once, whatever the kernel cached."""

from __future__ import annotations

import os
from pathlib import Path

from support.linux import errno_of
from support.volumes import VolumeUnderTest


def test_a_file_that_the_api_replaced_is_read_anew(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for turn in range(20):
        content = bytes([turn]) * (1000 + 3000 * (turn % 5))
        api.write_bytes("/file", content)
        assert (mount / "file").read_bytes() == content
        assert (mount / "file").stat().st_size == len(content)


def test_a_file_that_the_api_changed_in_place_is_read_anew(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "file").write_bytes(b"a" * 20_000)
    with open(mount / "file", "rb", buffering=0) as reader, api.open("/file", "r+b") as writer:
        assert reader.read() == b"a" * 20_000
        for turn in range(10):
            writer.seek(5000 * (turn % 4))
            writer.write(bytes([turn]) * 100)
            writer.flush()
            assert os.pread(reader.fileno(), 100, 5000 * (turn % 4)) == bytes([turn]) * 100
        writer.seek(0, os.SEEK_END)
        writer.write(b"end")
        writer.flush()
        assert os.fstat(reader.fileno()).st_size == 20_003
        assert os.pread(reader.fileno(), 10, 19_998) == b"aaend"
        writer.truncate(10)
        assert os.fstat(reader.fileno()).st_size == 10
        assert os.pread(reader.fileno(), 100, 5) == api.read_bytes("/file")[5:]


def test_what_the_mount_wrote_the_api_reads_at_once(mount: Path, volume: VolumeUnderTest) -> None:
    """Before close and without fsync."""
    api = volume.connect()
    with open(mount / "file", "xb", buffering=0) as file:
        for turn in range(20):
            file.write(b"%02d" % turn)
            assert api.read_bytes("/file")[-2:] == b"%02d" % turn
            assert api.stat("/file").size == 2 * (turn + 1)


def test_a_name_looked_up_in_vain_appears(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for turn in range(20):
        assert errno_of(os.stat, mount / f"file{turn}") == "ENOENT"
        api.write_bytes(f"/file{turn}", b"x")
        assert (mount / f"file{turn}").read_bytes() == b"x"
        api.remove(f"/file{turn}")
        assert errno_of(os.stat, mount / f"file{turn}") == "ENOENT"


def test_listings_follow_the_api(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "d").mkdir()
    expected: set[str] = set()
    for turn in range(20):
        api.write_bytes(f"/d/{turn}", b"")
        expected.add(f"{turn}")
        assert set(os.listdir(mount / "d")) == expected
        if turn % 3 == 0:
            api.remove(f"/d/{turn}")
            expected.remove(f"{turn}")
            assert set(os.listdir(mount / "d")) == expected
    api.rename("/d", "/e")
    assert os.listdir(mount) == ["e"]
    assert set(os.listdir(mount / "e")) == expected


def test_attributes_follow_the_api(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "file").write_bytes(b"x" * 100)
    for mode in (0o600, 0o644, 0o400, 0o777):
        api.set_attributes("/file", mode=mode, mtime_ns=mode)
        status = (mount / "file").stat()
        assert (status.st_mode & 0o7777, status.st_mtime_ns) == (mode, mode)
    api.set_attributes("/file", size=7)
    assert (mount / "file").read_bytes() == b"x" * 7


def test_two_mounts_of_one_volume_agree(mount: Path, volume: VolumeUnderTest) -> None:
    """Case 20 on one machine: append on A, open on B."""
    other = volume.mount("other")
    (mount / "log").write_bytes(b"")
    for turn in range(30):
        with open(mount / "log", "ab") as file:
            file.write(b"%04d" % turn)
        assert (other / "log").read_bytes()[-4:] == b"%04d" % turn
        assert (other / "log").stat().st_size == 4 * (turn + 1)
        os.rename(mount / "log", mount / "moved")
        assert os.listdir(other) == ["moved"]
        os.rename(other / "moved", other / "log")
        assert os.listdir(mount) == ["log"]
    volume.unmount(other)


def test_a_read_only_mount_refuses_every_change(volume: VolumeUnderTest) -> None:
    from support.system import need_fuse

    need_fuse()
    volume.connect().write_bytes("/d/file", b"x", parents=True)
    point = volume.mount(read_only=True)
    assert (point / "d" / "file").read_bytes() == b"x"
    assert errno_of(os.open, point / "d" / "file", os.O_WRONLY) == "EROFS"
    assert errno_of(os.mkdir, point / "new") == "EROFS"
    assert errno_of(os.unlink, point / "d" / "file") == "EROFS"
    assert errno_of(os.chmod, point / "d" / "file", 0o600) == "EROFS"
    assert errno_of(os.rename, point / "d" / "file", point / "x") == "EROFS"
    volume.unmount(point)


def test_a_sealed_view_does_not_change(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "d").mkdir()
    for number in range(20):
        (mount / "d" / f"{number:02}").write_bytes(b"old %d" % number)
    dataset = api.seal("/d")
    for number in range(0, 20, 3):
        (mount / "d" / f"{number:02}").write_bytes(b"new")
    os.unlink(mount / "d" / "01")
    os.rename(mount / "d" / "02", mount / "d" / "99")
    (mount / "d" / "added").write_bytes(b"added")
    with open(mount / "d" / "04", "ab") as file:
        file.write(b" more")
    api.sync()
    assert [sample.decode() for sample in dataset] == [f"old {number}" for number in range(20)]
    assert list(dataset.paths) == [f"{number:02}" for number in range(20)]
    newer = api.seal("/d")
    assert newer.version > dataset.version
    assert newer[list(newer.paths).index("00")] == b"new"
    volume.unmount(mount)
    volume.restart()
    again = volume.connect().dataset(dataset.seal)
    assert [sample.decode() for sample in again] == [f"old {number}" for number in range(20)]
