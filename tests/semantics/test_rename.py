"""rename in all its forms, and the checkpoint that libraries write with it (case 24)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.linux import RENAME_EXCHANGE, RENAME_NOREPLACE, errno_of, renameat2
from support.volumes import VolumeUnderTest


def test_a_rename_replaces_a_file(place: Path) -> None:
    (place / "a").write_bytes(b"a")
    (place / "b").write_bytes(b"b")
    ino = (place / "a").stat().st_ino
    os.rename(place / "a", place / "b")
    assert os.listdir(place) == ["b"]
    assert (place / "b").read_bytes() == b"a"
    assert (place / "b").stat().st_ino == ino


def test_a_file_that_is_replaced_lives_on_while_it_is_open(place: Path) -> None:
    (place / "a").write_bytes(b"new")
    (place / "b").write_bytes(b"old bytes")
    with open(place / "b", "r+b", buffering=0) as old:
        os.rename(place / "a", place / "b")
        assert old.read() == b"old bytes"
        old.seek(0)
        old.write(b"OLD")
        old.seek(0)
        assert old.read() == b"OLD bytes"
        assert os.fstat(old.fileno()).st_nlink == 0
    assert (place / "b").read_bytes() == b"new"


def test_a_rename_into_another_directory_moves(place: Path) -> None:
    (place / "from").mkdir()
    (place / "to").mkdir()
    (place / "from" / "file").write_bytes(b"x")
    os.rename(place / "from" / "file", place / "to" / "moved")
    assert os.listdir(place / "from") == []
    assert (place / "to" / "moved").read_bytes() == b"x"


def test_a_directory_moves_with_all_that_is_in_it(place: Path) -> None:
    (place / "one" / "deep" / "down").mkdir(parents=True)
    (place / "two").mkdir()
    (place / "one" / "deep" / "down" / "file").write_bytes(b"x")
    before = (place / "one").stat().st_nlink, (place / "two").stat().st_nlink
    os.rename(place / "one" / "deep", place / "two" / "deeper")
    assert (place / "two" / "deeper" / "down" / "file").read_bytes() == b"x"
    after = (place / "one").stat().st_nlink, (place / "two").stat().st_nlink
    assert after == (before[0] - 1, before[1] + 1)
    assert (place / "two" / "deeper" / "..").stat().st_ino == (place / "two").stat().st_ino


def test_an_empty_directory_is_replaced_by_a_directory(place: Path) -> None:
    (place / "a" / "in").mkdir(parents=True)
    (place / "b").mkdir()
    os.rename(place / "a", place / "b")
    assert os.listdir(place) == ["b"]
    assert os.listdir(place / "b") == ["in"]


def test_renames_that_cannot_be_are_refused(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "folder" / "in").mkdir(parents=True)
    (place / "empty").mkdir()
    assert errno_of(os.rename, place / "empty", place / "folder") == "ENOTEMPTY"
    assert errno_of(os.rename, place / "file", place / "empty") == "EISDIR"
    assert errno_of(os.rename, place / "empty", place / "file") == "ENOTDIR"
    assert errno_of(os.rename, place / "none", place / "file") == "ENOENT"
    assert errno_of(os.rename, place / "file", place / "none" / "x") == "ENOENT"
    assert errno_of(os.rename, place / "file", place / "file" / "x") == "ENOTDIR"
    assert errno_of(os.rename, place / "folder", place / "folder" / "x") == "EINVAL"
    assert errno_of(os.rename, place / "folder", place / "folder" / "in" / "x") == "EINVAL"
    assert errno_of(os.rename, place / "folder" / "in", place / "folder") == "ENOTEMPTY"
    assert sorted(os.listdir(place)) == ["empty", "file", "folder"]


def test_a_rename_onto_itself_or_another_link_of_it_does_nothing(place: Path) -> None:
    (place / "a").write_bytes(b"x")
    os.link(place / "a", place / "b")
    os.rename(place / "a", place / "a")
    os.rename(place / "a", place / "b")
    assert sorted(os.listdir(place)) == ["a", "b"]
    assert (place / "a").stat().st_nlink == 2


def test_a_rename_that_must_not_replace_does_not(place: Path) -> None:
    (place / "a").write_bytes(b"a")
    (place / "b").write_bytes(b"b")
    (place / "folder").mkdir()
    assert errno_of(renameat2, place / "a", place / "b", RENAME_NOREPLACE) == "EEXIST"
    assert errno_of(renameat2, place / "a", place / "folder", RENAME_NOREPLACE) == "EEXIST"
    assert errno_of(renameat2, place / "none", place / "c", RENAME_NOREPLACE) == "ENOENT"
    assert (place / "b").read_bytes() == b"b"
    renameat2(place / "a", place / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(place)) == ["b", "c", "folder"]


def test_an_exchange_swaps_files_and_directories(place: Path) -> None:
    (place / "file").write_bytes(b"file")
    (place / "sub").mkdir()
    (place / "sub" / "folder" / "in").mkdir(parents=True)
    nlink = place.stat().st_nlink, (place / "sub").stat().st_nlink
    renameat2(place / "file", place / "sub" / "folder", RENAME_EXCHANGE)
    assert os.listdir(place / "file") == ["in"]
    assert (place / "sub" / "folder").read_bytes() == b"file"
    assert (place.stat().st_nlink, (place / "sub").stat().st_nlink) == (nlink[0] + 1, nlink[1] - 1)
    (place / "other").write_bytes(b"other")
    renameat2(place / "other", place / "sub" / "folder", RENAME_EXCHANGE)
    assert (place / "other").read_bytes() == b"file"
    assert (place / "sub" / "folder").read_bytes() == b"other"
    assert errno_of(renameat2, place / "other", place / "none", RENAME_EXCHANGE) == "ENOENT"
    assert errno_of(renameat2, place / "sub", place / "sub" / "folder", RENAME_EXCHANGE) == "EINVAL"
    both = RENAME_EXCHANGE | RENAME_NOREPLACE
    assert errno_of(renameat2, place / "other", place / "sub", both) == "EINVAL"


def test_an_exchange_with_an_ancestor_is_refused(place: Path) -> None:
    (place / "a" / "b" / "c").mkdir(parents=True)
    assert errno_of(renameat2, place / "a", place / "a" / "b" / "c", RENAME_EXCHANGE) == "EINVAL"
    assert errno_of(renameat2, place / "a" / "b" / "c", place / "a", RENAME_EXCHANGE) in (
        "EINVAL",
        "ENOTEMPTY",
    )
    assert (place / "a" / "b" / "c").is_dir()


def test_a_checkpoint_by_rename_is_whole_at_every_moment(place: Path) -> None:
    target = place / "checkpoint.pt"
    for step in range(20):
        content = bytes([step]) * (300_000 + step)
        temporary = place / f".checkpoint.{step}.tmp"
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
        assert target.read_bytes() == content
    assert os.listdir(place) == ["checkpoint.pt"]


def test_a_symlink_is_renamed_not_followed(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    (place / "link").symlink_to("file")
    os.rename(place / "link", place / "moved")
    assert os.readlink(place / "moved") == "file"
    (place / "other").write_bytes(b"y")
    os.rename(place / "other", place / "moved")
    assert not (place / "moved").is_symlink()
    assert (place / "file").read_bytes() == b"x"


def test_the_api_renames_by_the_same_rules(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    api.write_bytes("/a", b"a")
    api.write_bytes("/b", b"b")
    api.makedirs("/folder/in")
    assert errno_of(api.rename, "/a", "/b", replace=False) == "EEXIST"
    assert errno_of(api.rename, "/folder", "/folder/in/x") == "EINVAL"
    assert errno_of(api.rename, "/a", "/folder") == "EISDIR"
    assert errno_of(api.rename, "/folder", "/a") == "ENOTDIR"
    api.exchange("/a", "/folder")
    assert api.listdir("/a") == ["in"]
    assert api.read_bytes("/folder") == b"a"
    api.rename("/folder", "/b")
    assert api.read_bytes("/b") == b"a"


@pytest.mark.parametrize("levels", [60])
def test_a_deep_directory_moves_in_one_step(place: Path, levels: int) -> None:
    deep = place / "top"
    for level in range(levels):
        deep = deep / f"{level}"
    deep.mkdir(parents=True)
    (deep / "leaf").write_bytes(b"leaf")
    os.rename(place / "top" / "0", place / "moved")
    assert (place / "moved" / deep.relative_to(place / "top" / "0") / "leaf").read_bytes() == b"leaf"
    assert os.listdir(place / "top") == []
