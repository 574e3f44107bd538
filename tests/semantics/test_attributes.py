"""What stat says: times to the nanosecond, modes, owners, counts of links; and statfs."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from support.linux import errno_of
from support.volumes import VolumeUnderTest

# Kernels stamp files with the time of the last tick.
TICK_NS = 20_000_000

TIMES_NS = [
    0,
    1,
    999_999_999,
    1_760_000_000_123_456_789,
    4_102_444_800_000_000_001,  # 2100
    -1_500_000_001,  # before 1970
]


@pytest.mark.parametrize("time_ns", TIMES_NS)
def test_times_are_kept_to_the_nanosecond(place: Path, time_ns: int) -> None:
    (place / "file").write_bytes(b"x")
    (place / "folder").mkdir()
    (place / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        os.utime(place / name, ns=(time_ns, time_ns + 7), follow_symlinks=False)
        status = os.lstat(place / name)
        assert (status.st_atime_ns, status.st_mtime_ns) == (time_ns, time_ns + 7)


def test_times_survive_a_restart(mount: Path, volume: VolumeUnderTest) -> None:
    for number, time_ns in enumerate(TIMES_NS):
        (mount / f"{number}").write_bytes(b"x")
        os.utime(mount / f"{number}", ns=(time_ns, time_ns + 7))
    volume.unmount(mount)
    volume.restart()
    mounted = volume.mount()
    for number, time_ns in enumerate(TIMES_NS):
        assert os.stat(mounted / f"{number}").st_mtime_ns == time_ns + 7


def test_writing_moves_mtime_and_ctime_on(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(0, 0))
    before_ns = time.time_ns()
    with open(path, "ab", buffering=0) as file:
        file.write(b"y")
    status = path.stat()
    assert before_ns - TICK_NS <= status.st_mtime_ns <= time.time_ns()
    assert before_ns - TICK_NS <= status.st_ctime_ns <= time.time_ns()
    os.utime(path, ns=(0, 0))
    os.truncate(path, 1)
    assert path.stat().st_mtime_ns >= before_ns - TICK_NS


def test_reading_changes_neither_mtime_nor_ctime(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x")
    before = path.stat()
    time.sleep(0.03)
    path.read_bytes()
    after = path.stat()
    assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)


def test_a_change_of_attributes_moves_only_ctime(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x")
    before = path.stat()
    time.sleep(0.03)
    os.chmod(path, 0o604)
    after = path.stat()
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns
    time.sleep(0.03)
    os.link(path, place / "link")
    assert path.stat().st_ctime_ns > after.st_ctime_ns


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4755, 0o7777])
def test_all_mode_bits_are_kept(place: Path, mode: int) -> None:
    (place / "folder").mkdir()
    os.chmod(place / "folder", mode)
    assert stat.S_IMODE((place / "folder").stat().st_mode) == mode
    (place / "file").write_bytes(b"x")
    os.chmod(place / "file", mode)
    assert stat.S_IMODE((place / "file").stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (owners)")
def test_owners_are_kept(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    os.chown(place / "file", 12345, 54321)
    status = (place / "file").stat()
    assert (status.st_uid, status.st_gid) == (12345, 54321)
    os.chown(place / "file", -1, 7)
    assert ((place / "file").stat().st_uid, (place / "file").stat().st_gid) == (12345, 7)
    (place / "link").symlink_to("file")
    os.lchown(place / "link", 1, 2)
    assert (os.lstat(place / "link").st_uid, (place / "file").stat().st_uid) == (1, 12345)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (groups)")
def test_a_setgid_directory_gives_its_group_to_what_is_made_in_it(place: Path) -> None:
    (place / "shared").mkdir()
    os.chown(place / "shared", -1, 777)
    os.chmod(place / "shared", 0o2775)
    (place / "shared" / "file").write_bytes(b"")
    (place / "shared" / "folder").mkdir()
    assert (place / "shared" / "file").stat().st_gid == 777
    assert (place / "shared" / "folder").stat().st_gid == 777
    assert (place / "shared" / "folder").stat().st_mode & stat.S_ISGID


def test_a_directory_counts_itself_and_the_directories_in_it(place: Path) -> None:
    (place / "top").mkdir()
    assert (place / "top").stat().st_nlink == 2
    (place / "top" / "a").mkdir()
    (place / "top" / "b").mkdir()
    (place / "top" / "file").write_bytes(b"")
    assert (place / "top").stat().st_nlink == 4
    os.rmdir(place / "top" / "a")
    assert (place / "top").stat().st_nlink == 3


def test_a_change_in_a_directory_is_its_mtime(place: Path) -> None:
    (place / "other").mkdir()
    top = place / "top"
    top.mkdir()

    def moved() -> bool:
        status = top.stat()
        os.utime(top, ns=(0, 0))
        return status.st_mtime_ns != 0

    moved()
    (top / "a").write_bytes(b"x")
    assert moved()
    (top / "a").write_bytes(b"y")
    assert not moved()
    os.rename(top / "a", top / "b")
    assert moved()
    os.link(top / "b", top / "c")
    assert moved()
    os.unlink(top / "c")
    assert moved()
    os.rename(top / "b", place / "other" / "b")
    assert moved()
    os.mkdir(top / "d")
    assert moved()
    os.rmdir(top / "d")
    assert moved()
    os.symlink("x", top / "l")
    assert moved()


def test_inode_numbers_stay(place: Path) -> None:
    (place / "a").write_bytes(b"x")
    ino = (place / "a").stat().st_ino
    os.rename(place / "a", place / "b")
    (place / "b").write_bytes(b"longer")
    assert (place / "b").stat().st_ino == ino
    with os.scandir(place) as entries:
        assert [entry.inode() for entry in entries] == [ino]


def test_sizes_and_blocks(place: Path) -> None:
    (place / "file").write_bytes(b"x" * 100_000)
    fd = os.open(place / "file", os.O_RDONLY)
    os.fsync(fd)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == 100_000
    assert 100_000 <= status.st_blocks * 512 < 400_000


def test_statfs_tells_the_space_that_is_left(place: Path, scratch: Path) -> None:
    here, below = os.statvfs(place), os.statvfs(scratch)
    assert here.f_namemax == 255
    assert here.f_bsize > 0 and here.f_frsize > 0
    free, expected = here.f_bavail * here.f_frsize, below.f_bavail * below.f_frsize
    assert abs(free - expected) < 1 << 30
    assert here.f_files > 0 and here.f_ffree > 0


def test_access_asks_for_this_user(place: Path) -> None:
    (place / "file").write_bytes(b"")
    os.chmod(place / "file", 0o600)
    assert os.access(place / "file", os.R_OK | os.W_OK)
    assert not os.access(place / "file", os.X_OK)
    assert not os.access(place / "none", os.F_OK)


def test_the_api_and_the_mount_say_the_same(mount: Path, volume: VolumeUnderTest) -> None:
    (mount / "file").write_bytes(b"x" * 5000)
    os.chmod(mount / "file", 0o4751)
    os.utime(mount / "file", ns=(11, 22))
    os.link(mount / "file", mount / "link")
    (mount / "folder" / "in").mkdir(parents=True)
    api = volume.connect()
    for name in ("file", "folder", ""):
        there, here = os.stat(mount / name), api.stat(f"/{name}")
        assert (
            here.ino,
            here.mode,
            here.nlink,
            here.uid,
            here.gid,
            here.size,
            here.mtime_ns,
            here.ctime_ns,
        ) == (
            there.st_ino,
            stat.S_IMODE(there.st_mode),
            there.st_nlink,
            there.st_uid,
            there.st_gid,
            there.st_size,
            there.st_mtime_ns,
            there.st_ctime_ns,
        )
    changed = api.set_attributes("/file", mode=0o600, size=10, mtime_ns=-5)
    status = os.stat(mount / "file")
    assert (changed.mode, changed.size, changed.mtime_ns) == (0o600, 10, -5)
    assert (stat.S_IMODE(status.st_mode), status.st_size, status.st_mtime_ns) == (0o600, 10, -5)
    assert errno_of(api.set_attributes, "/none", mode=0o600) == "ENOENT"
