"""Extended attributes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.linux import errno_of
from support.volumes import VolumeUnderTest


@pytest.fixture(params=["file", "folder"])
def thing(place: Path, request: pytest.FixtureRequest) -> Path:
    (place / "file").write_bytes(b"x")
    (place / "folder").mkdir()
    return place / str(request.param)


def test_attributes_are_set_read_listed_and_removed(thing: Path) -> None:
    assert os.listxattr(thing) == []
    os.setxattr(thing, "user.one", b"\0\xff binary")
    os.setxattr(thing, "user.empty", b"")
    os.setxattr(thing, "user.one", b"replaced")
    assert os.getxattr(thing, "user.one") == b"replaced"
    assert os.getxattr(thing, "user.empty") == b""
    assert sorted(os.listxattr(thing)) == ["user.empty", "user.one"]
    os.removexattr(thing, "user.one")
    assert os.listxattr(thing) == ["user.empty"]


def test_what_is_not_there_is_said(thing: Path) -> None:
    assert errno_of(os.getxattr, thing, "user.none") == "ENODATA"
    assert errno_of(os.removexattr, thing, "user.none") == "ENODATA"
    assert errno_of(os.setxattr, thing, "user.none", b"x", os.XATTR_REPLACE) == "ENODATA"
    os.setxattr(thing, "user.there", b"x", os.XATTR_CREATE)
    assert errno_of(os.setxattr, thing, "user.there", b"y", os.XATTR_CREATE) == "EEXIST"
    os.setxattr(thing, "user.there", b"z", os.XATTR_REPLACE)
    assert os.getxattr(thing, "user.there") == b"z"


def test_names_and_values_of_many_sizes(thing: Path) -> None:
    for size in (1, 100, 2000):
        os.setxattr(thing, f"user.{size}", b"v" * size)
    os.setxattr(thing, "user." + "n" * 250, b"long name")
    for size in (1, 100, 2000):
        assert os.getxattr(thing, f"user.{size}") == b"v" * size
    assert os.getxattr(thing, "user." + "n" * 250) == b"long name"
    assert errno_of(os.setxattr, thing, "user." + "n" * 251, b"") == "ERANGE"


def test_attributes_belong_to_the_file_not_the_name(place: Path) -> None:
    (place / "a").write_bytes(b"")
    os.setxattr(place / "a", "user.x", b"1")
    os.link(place / "a", place / "b")
    os.rename(place / "a", place / "c")
    assert os.getxattr(place / "b", "user.x") == os.getxattr(place / "c", "user.x") == b"1"
    os.unlink(place / "b")
    assert os.getxattr(place / "c", "user.x") == b"1"
    fd = os.open(place / "c", os.O_RDONLY)
    assert os.getxattr(fd, "user.x") == b"1"
    os.close(fd)


def test_a_new_file_of_an_old_name_has_none(place: Path) -> None:
    (place / "a").write_bytes(b"")
    os.setxattr(place / "a", "user.x", b"1")
    os.unlink(place / "a")
    (place / "a").write_bytes(b"")
    assert os.listxattr(place / "a") == []


def test_large_values_are_kept_by_the_mount(mount: Path, volume: VolumeUnderTest) -> None:
    (mount / "file").write_bytes(b"")
    os.setxattr(mount / "file", "user.big", b"v" * 60_000)
    assert os.getxattr(mount / "file", "user.big") == b"v" * 60_000
    volume.unmount(mount)
    volume.restart()
    assert volume.connect().getxattr("/file", "user.big") == b"v" * 60_000


def test_the_api_sees_the_mounts_attributes(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "file").write_bytes(b"")
    os.setxattr(mount / "file", "user.a", b"1")
    assert api.getxattr("/file", "user.a") == b"1"
    api.setxattr("/file", "user.b", b"2")
    assert os.getxattr(mount / "file", "user.b") == b"2"
    assert sorted(api.listxattr("/file")) == ["user.a", "user.b"]
    api.removexattr("/file", "user.a")
    assert os.listxattr(mount / "file") == ["user.b"]
    assert errno_of(api.getxattr, "/file", "user.a") == "ENODATA"
