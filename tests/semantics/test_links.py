"""Case 26: symbolic links of all kinds, hard links, files of no bytes, holes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from support.linux import errno_of
from support.volumes import VolumeUnderTest

GIB = 1 << 30


def test_a_symlink_to_a_file_reads_and_writes_the_file(place: Path) -> None:
    (place / "file").write_bytes(b"one")
    (place / "link").symlink_to("file")
    assert (place / "link").read_bytes() == b"one"
    (place / "link").write_bytes(b"other")
    assert (place / "file").read_bytes() == b"other"
    assert os.readlink(place / "link") == "file"
    assert (place / "link").lstat().st_size == 4
    (place / "link").unlink()
    assert (place / "file").read_bytes() == b"other"


def test_a_symlink_to_a_directory_leads_in(place: Path) -> None:
    (place / "folder").mkdir()
    (place / "link").symlink_to("folder")
    (place / "link" / "file").write_bytes(b"x")
    assert os.listdir(place / "folder") == ["file"]
    assert errno_of(os.rmdir, place / "link") == "ENOTDIR"


def test_a_loop_of_symlinks_is_refused(place: Path) -> None:
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    assert errno_of(os.stat, place / "a") == "ELOOP"
    assert os.readlink(place / "a") == "b"


def test_a_dangling_symlink_is_itself(place: Path) -> None:
    (place / "link").symlink_to("nowhere/at/all")
    assert errno_of(os.stat, place / "link") == "ENOENT"
    assert os.readlink(place / "link") == "nowhere/at/all"
    (place / "link2").symlink_to("made-through-it")
    (place / "link2").write_bytes(b"x")
    assert (place / "made-through-it").read_bytes() == b"x"


def test_a_symlink_out_of_the_tree_leads_out(place: Path, scratch: Path) -> None:
    (scratch / "outside").write_bytes(b"out")
    (place / "absolute").symlink_to(scratch / "outside")
    (place / "relative").symlink_to("../outside")
    assert (place / "absolute").read_bytes() == (place / "relative").read_bytes() == b"out"


def test_long_and_odd_targets_come_back(place: Path) -> None:
    for number, target in enumerate([b"x" * 4000, b"\xff\n", b"a//b/../c/", b" "]):
        link = os.path.join(os.fsencode(place), b"%d" % number)
        os.symlink(target, link)
        assert os.readlink(link) == target
        assert os.lstat(link).st_size == len(target)


def test_an_open_that_must_not_follow_does_not(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "link").symlink_to("file")
    assert errno_of(os.open, place / "link", os.O_RDONLY | os.O_NOFOLLOW) == "ELOOP"


def test_the_api_follows_links_within_the_volume_only(volume: VolumeUnderTest, scratch: Path) -> None:
    (scratch / "outside").write_bytes(b"out")
    api = volume.connect()
    api.write_bytes("/folder/file", b"in", parents=True)
    api.symlink("folder", "/relative")
    api.symlink("/folder/file", "/absolute")
    api.symlink(str(scratch / "outside"), "/out")
    api.symlink("../../../../../../folder/file", "/far-up")
    api.symlink("loop", "/loop")
    assert api.read_bytes("/relative/file") == b"in"
    assert api.read_bytes("/absolute") == b"in"
    assert api.read_bytes("/far-up") == b"in"
    assert errno_of(api.read_bytes, "/out") == "ENOENT"
    assert errno_of(api.read_bytes, "/loop") == "ELOOP"


def test_hard_links_are_one_file(place: Path) -> None:
    (place / "a").write_bytes(b"one")
    os.link(place / "a", place / "b")
    (place / "folder").mkdir()
    os.link(place / "b", place / "folder" / "c")
    assert (place / "a").stat().st_nlink == 3
    assert (place / "a").stat().st_ino == (place / "folder" / "c").stat().st_ino
    with open(place / "folder" / "c", "ab") as file:
        file.write(b"+more")
    assert (place / "a").read_bytes() == b"one+more"
    os.chmod(place / "b", 0o640)
    assert (place / "a").stat().st_mode & 0o777 == 0o640
    (place / "a").unlink()
    assert (place / "b").stat().st_nlink == 2
    os.rename(place / "b", place / "a")
    assert (place / "a").read_bytes() == b"one+more"
    assert (place / "folder" / "c").stat().st_nlink == 2
    (place / "a").unlink()
    assert (place / "folder" / "c").stat().st_nlink == 1


def test_links_that_cannot_be_are_refused(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "folder").mkdir()
    assert errno_of(os.link, place / "file", place / "folder") == "EEXIST"
    assert errno_of(os.link, place / "file", place / "file") == "EEXIST"
    assert errno_of(os.link, place / "folder", place / "again") == "EPERM"
    assert errno_of(os.link, place / "none", place / "again") == "ENOENT"
    assert errno_of(os.symlink, "x", place / "file") == "EEXIST"


def test_a_link_to_a_symlink_links_the_symlink(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "soft").symlink_to("file")
    os.link(place / "soft", place / "hard", follow_symlinks=False)
    assert os.readlink(place / "hard") == "file"
    assert (place / "soft").lstat().st_nlink == 2


def test_files_of_no_bytes_between_others(place: Path) -> None:
    for number in range(60):
        (place / f"{number:02}").write_bytes(b"" if number % 3 else b"%d" % number)
    for number in range(60):
        path = place / f"{number:02}"
        assert path.read_bytes() == (b"" if number % 3 else b"%d" % number)
        assert path.stat().st_size == (0 if number % 3 else len(str(number)))


def test_a_hole_of_a_gibibyte_is_zeros_and_costs_nothing(place: Path) -> None:
    with open(place / "hole", "xb") as file:
        file.write(b"head")
        file.seek(GIB)
        file.write(b"tail")
    status = (place / "hole").stat()
    assert status.st_size == GIB + 4
    assert status.st_blocks * 512 < 1 << 20
    with open(place / "hole", "rb", buffering=0) as file:
        assert file.read(8) == b"head\0\0\0\0"
        for offset in (4096, 65536 - 3, GIB // 2, GIB - 65536):
            file.seek(offset)
            assert file.read(65536) == bytes(65536)[: GIB - offset] + b"tail"[: max(0, offset + 65536 - GIB)]
        file.seek(GIB - 2)
        assert file.read() == b"\0\0tail"
    with open(place / "empty", "xb") as file:
        file.truncate(GIB)
    assert (place / "empty").stat().st_size == GIB
    with open(place / "empty", "rb", buffering=0) as file:
        file.seek(GIB - 10)
        assert file.read() == bytes(10)


def test_a_hole_takes_no_space_in_the_volume(mount: Path, volume: VolumeUnderTest) -> None:
    with open(mount / "hole", "xb") as file:
        file.seek(GIB)
        file.write(b"tail")
        file.flush()
        os.fsync(file.fileno())
    volume.unmount(mount)
    volume.restart()
    assert sum(path.stat().st_size for path in volume.segments()) < 1 << 20
    api = volume.connect()
    assert api.stat("/hole").size == GIB + 4
    with api.open("/hole", "rb") as file:
        file.seek(GIB - 1)
        assert file.read() == b"\0tail"


def test_a_sealed_hole_reads_as_zeros(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    api.makedirs("/d")
    with api.open("/d/hole", "wb") as file:
        file.seek(200_000)
        file.write(b"tail")
    with api.open("/d/short", "wb") as file:
        file.truncate(70_000)
    dataset = api.seal("/d")
    assert dataset[0] == bytes(200_000) + b"tail"
    assert dataset[1] == bytes(70_000)


def test_seeking_for_data_and_holes_tells_the_truth(place: Path) -> None:
    """SEEK_DATA may say that all is data; it may never skip over data."""
    with open(place / "file", "xb") as file:
        file.write(b"a" * 65536)
        file.seek(1 << 20)
        file.write(b"b" * 65536)
    with open(place / "file", "rb", buffering=0) as file:
        try:
            assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
            assert os.lseek(file.fileno(), 1 << 20, os.SEEK_DATA) == 1 << 20
            hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            assert 65536 <= hole <= (1 << 20) + 65536
            with pytest.raises(OSError) as raised:
                os.lseek(file.fileno(), (1 << 20) + 65536, os.SEEK_DATA)
            assert raised.value.errno == errno.ENXIO
        except OSError as error:
            assert error.errno in (errno.ENOSYS, errno.EOPNOTSUPP)
