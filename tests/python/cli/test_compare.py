"""The demo's comparison finds every kind of difference: it would be worth nothing if it could not fail."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.compare import MountedCopy, compare_trees


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for index in range(20):
        folder = root / f"d{index % 4}" / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}").write_bytes(bytes([index]) * index * 100)
    (root / "large").write_bytes(os.urandom((9 << 20) + 17))
    (root / "link").symlink_to("large")
    os.close(os.open(os.fsencode(root) + b"/\xff", os.O_CREAT, 0o600))
    return root


def copied(tree: Path) -> Path:
    copy = tree.parent / "copy"
    shutil.copytree(tree, copy, symlinks=True)
    for folder, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            other = os.path.join(copy, os.path.relpath(path, tree))
            os.utime(other, ns=(0, status.st_mtime_ns), follow_symlinks=False)
    os.utime(copy, ns=(0, tree.stat().st_mtime_ns))
    return copy


def differences(tree: Path, copy: Path, slack_ns: int = 0) -> list[tuple[bytes, str]]:
    return sorted(compare_trees(os.fsencode(tree), MountedCopy(os.fsencode(copy)), slack_ns).differences)


def test_equal_trees_compare_equal_and_whole(tree: Path) -> None:
    result = compare_trees(os.fsencode(tree), MountedCopy(os.fsencode(copied(tree))))
    assert result.differences == []
    assert (result.files, result.directories, result.others) == (22, 8, 1)
    assert result.file_bytes == sum(index * 100 for index in range(20)) + (9 << 20) + 17


def in_place(path: Path, change: Callable[[], object]) -> None:
    """Changes, and gives back the times that the change would show in."""
    times = [(each, os.lstat(each)) for each in (path, path.parent) if os.path.lexists(each)]
    change()
    for each, status in times:
        if os.path.lexists(each):
            os.utime(each, ns=(0, status.st_mtime_ns), follow_symlinks=False)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def retarget(path: Path) -> None:
    path.unlink()
    path.symlink_to("d1")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("d1/deep/5", lambda path: path.unlink(), "is missing"),
        ("d1/deep/extra", lambda path: path.touch(), "is not in the source"),
        ("d1/deep/5", flip_last_byte, "has other bytes"),
        ("large", flip_last_byte, "has other bytes"),
        ("d1/deep/5", lambda path: path.write_bytes(b"x"), "1 bytes, not 500"),
        ("d1/deep/5", lambda path: path.chmod(0o755), "mode 755, not 644"),
        ("d1/deep", lambda path: path.chmod(0o700), "mode 700, not 755"),
    ],
)
def test_each_difference_is_found(tree: Path, name: str, change: Callable[[Path], object], says: str) -> None:
    copy = copied(tree)
    in_place(copy / name, lambda: change(copy / name))
    found = differences(tree, copy)
    assert {path for path, _ in found} == {os.fsencode(name)} and says in found[0][1], found


def test_times_and_links_are_compared(tree: Path) -> None:
    copy = copied(tree)
    mtime_ns = (copy / "d2/deep/2").stat().st_mtime_ns
    os.utime(copy / "d2/deep/2", ns=(0, mtime_ns + 1))
    assert [path for path, _ in differences(tree, copy)] == [b"d2/deep/2"]
    assert differences(tree, copy, slack_ns=1) == []
    status = os.lstat(copy / "link")
    in_place(copy / "link", lambda: retarget(copy / "link"))
    os.utime(copy / "link", ns=(0, status.st_mtime_ns), follow_symlinks=False)
    assert (b"link", "is a link to something else") in differences(tree, copy)


def test_file_in_place_of_a_link_is_found(tree: Path) -> None:
    copy = copied(tree)
    in_place(copy / "link", (copy / "link").unlink)
    in_place(copy / "link", (copy / "link").touch)
    assert stat.S_ISREG(os.lstat(copy / "link").st_mode)
    assert (b"link", "is of another kind") in differences(tree, copy)
