"""Snapshots, through the mount and by path: they hold what was, do not change, and come back by a restore."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.model.message import Change
from support.linux import errno_of
from support.system import wait_until
from support.volumes import VolumeUnderTest

AsUser = Callable[[Callable[[], Any]], Any]


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """What is under a folder, as far as two looks at it must agree."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, names, files in os.walk(top):
        for name in [*names, *files]:
            path = Path(folder, name)
            seen = path.lstat()
            content: object = None
            if stat.S_ISLNK(seen.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(seen.st_mode):
                content = path.read_bytes()
            attributes = (
                {key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path)}
                if not stat.S_ISLNK(seen.st_mode)
                else {}
            )
            found[str(path.relative_to(top))] = (
                seen.st_mode,
                seen.st_uid,
                seen.st_gid,
                seen.st_size,
                seen.st_mtime_ns,
                content,
                attributes,
            )
    return found


def build(top: Path) -> None:
    (top / "d" / "deep").mkdir(parents=True)
    (top / "d" / "file").write_bytes(b"first")
    (top / "d" / "large").write_bytes(os.urandom(3 << 20))
    (top / "d" / "deep" / "gone").write_bytes(b"soon")
    (top / "moves").write_bytes(b"about")
    (top / "link").symlink_to("d/file")
    os.link(top / "d" / "file", top / "d" / "second")
    os.setxattr(top / "d" / "file", "user.a", b"1")
    os.utime(top / "d", ns=(5, 7))


def change(top: Path) -> None:
    (top / "d" / "file").write_bytes(b"other, and longer")
    with open(top / "d" / "large", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"x" * 100_000)
        file.truncate(2 << 20)
    shutil.rmtree(top / "d" / "deep")
    os.rename(top / "moves", top / "d" / "moved")
    os.unlink(top / "link")
    os.removexattr(top / "d" / "file", "user.a")
    (top / "new").write_bytes(b"!")
    os.chmod(top / "d", 0o700)


def test_a_snapshot_keeps_what_was_and_the_present_goes_on(mount: Path, volume: VolumeUnderTest) -> None:
    build(mount)
    before = tree(mount)
    api = volume.connect()
    api.snapshot("one")
    assert tree(mount / ".snapshots" / "one") == before
    change(mount)
    assert tree(mount) != before
    assert tree(mount / ".snapshots" / "one") == before
    assert api.read_bytes("/.snapshots/one/d/file") == b"first"
    assert api.readlink("/.snapshots/one/link") == "d/file"
    assert api.read_bytes("/.snapshots/one/link") == b"first"
    assert {entry.name for entry in api.scandir("/.snapshots/one")} == {"d", "moves", "link"}
    volume.close()
    volume.unmount(mount)
    volume.restart()
    volume.mount()
    assert tree(mount / ".snapshots" / "one") == before


def test_bytes_that_are_not_written_yet_are_in_a_snapshot(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    with open(mount / "f", "wb", buffering=0) as file:
        file.write(b"a" * 5_000_000)
        api.snapshot("open")
        file.write(b"b" * 10)
        os.fsync(file.fileno())
        api.snapshot("later")
    assert (mount / ".snapshots" / "open" / "f").read_bytes() == b"a" * 5_000_000
    assert (mount / ".snapshots" / "later" / "f").read_bytes() == b"a" * 5_000_000 + b"b" * 10


def test_small_synced_bytes_stay_in_a_snapshot(mount: Path, volume: VolumeUnderTest) -> None:
    """They ride in the metadata store, and move to a segment of the present later."""
    api = volume.connect()
    api.write_bytes("/f", b"first")
    api.snapshot("s")
    for turn in range(5):
        api.write_bytes("/f", b"turn %d" % turn)
    assert api.read_bytes("/.snapshots/s/f") == b"first"
    volume.close()
    volume.unmount(mount)
    volume.restart()
    assert volume.connect().read_bytes("/.snapshots/s/f") == b"first"


def test_the_folder_of_snapshots_is_reserved_and_not_listed(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "f").touch()
    assert os.listdir(mount) == ["f"]
    assert os.listdir(mount / ".snapshots") == []
    assert errno_of(os.mkdir, mount / ".snapshots") == "EEXIST"
    assert errno_of(os.rmdir, mount / ".snapshots") == "EPERM"
    assert errno_of(os.rename, mount / "f", mount / ".snapshots") in ("EPERM", "EISDIR")
    with pytest.raises(headrace.AlreadyExists):
        api.write_bytes("/.snapshots", b"")
    assert errno_of(os.stat, mount / ".snapshots" / "s") == "ENOENT"
    api.snapshot("s")
    # The kernel had remembered that it was not there.
    assert os.listdir(mount / ".snapshots") == ["s"]
    assert os.listdir(mount / ".snapshots" / "s") == ["f"]
    assert os.stat(mount / ".snapshots" / "s" / "..").st_ino == os.stat(mount / ".snapshots").st_ino
    assert os.listdir(mount) == ["f"]
    # Further down the name is like any other.
    (mount / "d").mkdir()
    (mount / "d" / ".snapshots").mkdir()
    assert os.listdir(mount / "d") == [".snapshots"]


def test_nothing_in_a_snapshot_can_be_changed(mount: Path, volume: VolumeUnderTest) -> None:
    build(mount)
    api = volume.connect()
    api.snapshot("s")
    top = mount / ".snapshots" / "s"
    before = tree(top)
    attempts: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.open, (top / "new", os.O_CREAT | os.O_WRONLY)),
        (os.open, (top / "d" / "file", os.O_WRONLY)),
        (os.truncate, (top / "d" / "file", 0)),
        (os.mkdir, (top / "x",)),
        (os.mkdir, (mount / ".snapshots" / "x",)),
        (os.rmdir, (mount / ".snapshots" / "s",)),
        (os.unlink, (top / "d" / "file",)),
        (os.rmdir, (top / "d" / "deep",)),
        (os.symlink, ("a", top / "x")),
        (os.rename, (top / "moves", top / "x")),
        (os.rename, (top / "moves", mount / "x")),
        (os.rename, (mount / "moves", top / "x")),
        (os.link, (mount / "moves", top / "x")),
        (os.chmod, (top / "d", 0o777)),
        (os.chown, (top / "d", 1, 1)),
        (os.utime, (top / "d" / "file",)),
        (os.setxattr, (top / "d" / "file", "user.a", b"2")),
        (os.removexattr, (top / "d" / "file", "user.a")),
    ]
    for call, arguments in attempts:
        assert errno_of(call, *arguments) == "EROFS", (call, arguments)
    for by_path in (
        lambda: api.write_bytes("/.snapshots/s/new", b""),
        lambda: api.write_bytes("/.snapshots/s/d/file", b""),
        lambda: api.remove("/.snapshots/s/d/file"),
        lambda: api.rename("/moves", "/.snapshots/s/x"),
        lambda: api.mkdir("/.snapshots/s/x"),
        lambda: api.open("/.snapshots/s/d/file", "r+b"),
    ):
        with pytest.raises(headrace.HeadraceError) as refused:
            by_path()
        assert refused.value.errno == errno.EROFS, refused.value
    assert tree(top) == before


def test_a_snapshot_shows_only_what_its_modes_allow(
    mount: Path, volume: VolumeUnderTest, other_user: AsUser
) -> None:
    (mount / "open").write_bytes(b"for all")
    (mount / "secret").write_bytes(b"mine")
    os.chmod(mount / "secret", 0o600)
    volume.connect().snapshot("s")
    os.chmod(mount / "secret", 0o644)
    os.chmod(mount / "open", 0o600)
    top = mount / ".snapshots" / "s"
    assert other_user((top / "open").read_bytes) == b"for all"
    assert other_user(lambda: errno_of(open, top / "secret")) == "EACCES"


def test_a_restore_brings_the_tree_back(mount: Path, volume: VolumeUnderTest) -> None:
    build(mount)
    before = tree(mount)
    inode = (mount / "d" / "file").stat().st_ino
    api = volume.connect()
    api.snapshot("good")
    change(mount)
    changed = tree(mount)
    restored = api.restore_snapshot("good")
    # Whatever the kernel had cached of names, attributes and pages.
    assert tree(mount) == before
    assert (mount / "d" / "file").stat().st_ino == inode
    assert tree(mount / ".snapshots" / os.fsdecode(restored.before)) == changed
    assert restored.before.startswith(b"before-restore-")
    # It is a tree like any other.
    change(mount)
    api.restore_snapshot(restored.before)
    assert tree(mount) == changed
    volume.close()
    volume.unmount(mount)
    volume.restart()
    assert volume.connect().read_bytes("/d/moved") == b"about"


def test_a_restore_is_refused_while_files_are_in_use(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    (mount / "f").write_bytes(b"1")
    (mount / "same").write_bytes(b"1")
    api.snapshot("s")
    with open(mount / "same", "ab"), pytest.raises(headrace.Conflict, match=r"open for writing: .*/same"):
        api.restore_snapshot("s")
    (mount / "f").write_bytes(b"2")
    with open(mount / "f", "rb") as file:
        with pytest.raises(headrace.Conflict, match="/f"):
            api.restore_snapshot("s")
        assert file.read() == b"2"
    assert [one.name for one in api.snapshots()] == [b"s"]
    with open(mount / "same", "rb") as file:
        api.restore_snapshot("s")
        assert file.read() == b"1"
    assert (mount / "f").read_bytes() == b"1"


def test_a_diff_names_what_changed(mount: Path, volume: VolumeUnderTest) -> None:
    build(mount)
    api = volume.connect()
    api.snapshot("old")
    assert list(api.snapshot_diff("old")) == []
    change(mount)
    (mount / "d" / "folder").mkdir()
    os.rename(mount / "d", mount / "e")
    os.symlink("x", mount / "link")
    found = {(one.change.value, os.fsdecode(one.path), one.from_) for one in api.snapshot_diff("old")}
    assert found == {
        ("renamed", "/e", b"/d"),
        ("changed", "/e", None),
        # One of two names.
        ("changed", "/e/file", None),
        ("changed", "/e/large", None),
        ("renamed", "/e/moved", b"/moves"),
        ("added", "/e/folder", None),
        ("removed", "/d/deep", None),
        ("removed", "/d/deep/gone", None),
        ("changed", "/link", None),
        ("added", "/new", None),
    }
    api.snapshot("new")
    assert {
        (one.change.value, os.fsdecode(one.path), one.from_) for one in api.snapshot_diff("old", "new")
    } == found
    os.unlink(mount / "new")
    assert {
        (one.change.value, os.fsdecode(one.path), one.from_) for one in api.snapshot_diff("old", "new")
    } == found
    assert [(one.change, one.path) for one in api.snapshot_diff("new")] == [(Change.REMOVED, b"/new")]
    with pytest.raises(headrace.Invalid, match="older"):
        list(api.snapshot_diff("new", "old"))


def test_a_diff_comes_in_pages(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for turn in range(3):
        api.mkdir(f"/d{turn}")
    for number in range(2_000):
        (mount / f"d{number % 3}" / f"{number}").touch()
    api.snapshot("old")
    for number in range(2_000):
        if number % 2:
            os.rename(mount / f"d{number % 3}" / f"{number}", mount / f"d{(number + 1) % 3}" / f"to{number}")
        else:
            (mount / f"d{number % 3}" / f"{number}").write_bytes(b"x")
    found = list(api.snapshot_diff("old"))
    moved = {(one.path, one.from_) for one in found if one.change is Change.RENAMED}
    assert moved == {
        (b"/d%d/to%d" % ((number + 1) % 3, number), b"/d%d/%d" % (number % 3, number))
        for number in range(1, 2_000, 2)
    }
    written = {one.path for one in found if one.change is Change.CHANGED}
    assert written == {b"/d%d/%d" % (number % 3, number) for number in range(0, 2_000, 2)}
    assert len(found) == 2_000


def test_a_deleted_snapshot_is_gone_and_gives_back_its_space(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    content = os.urandom(20 << 20)
    (mount / "large").write_bytes(content)
    api.snapshot("s")
    os.unlink(mount / "large")
    top = mount / ".snapshots" / "s"
    with open(top / "large", "rb") as file:
        assert file.read(10) == content[:10]
        api.delete_snapshot("s")
        assert errno_of(os.stat, top) == "ENOENT"
        assert os.listdir(mount / ".snapshots") == []
        # Who has it open reads on.
        assert file.read() == content[10:]
    wait_until(lambda: not volume.segments(), 20, "the segment is gone")
    # A new one of that name is another.
    api.snapshot("s")
    assert os.listdir(top) == []


def test_a_deleted_sealed_view_is_read_on_and_then_gives_back_its_space(
    mount: Path, volume: VolumeUnderTest
) -> None:
    api = volume.connect()
    content = os.urandom(20 << 20)
    (mount / "d").mkdir()
    (mount / "d" / "large").write_bytes(content)
    dataset = api.seal("/d")
    shutil.rmtree(mount / "d")
    manifests = volume.folder / "manifests"
    assert len(list(manifests.iterdir())) == 1
    batch = dataset.read_batch([0])
    other = volume.connect()
    other.delete_seal(dataset.seal)
    assert list(manifests.iterdir()) == [] and other.seals() == []
    with pytest.raises(headrace.NotFound):
        len(other.dataset(dataset.seal))
    with pytest.raises(headrace.NotFound):
        other.delete_seal(dataset.seal)
    assert dataset[0] == content and bytes(batch[0]) == content
    del batch, dataset
    volume.close()
    wait_until(lambda: not volume.segments(), 20, "the segment is gone")


def test_only_root_and_the_engines_owner_make_and_delete(
    new_volume: Callable[[str], VolumeUnderTest], other_user: AsUser
) -> None:
    volume = new_volume("shared")
    volume.start(system=True)
    os.chmod(volume.folder, 0o755)
    volume.connect().snapshot("s")

    def attempt() -> list[str]:
        with headrace.connect(volume.name, start=False) as api:
            refused = []
            for call in (
                lambda: api.snapshot("mine"),
                lambda: api.delete_snapshot("s"),
                lambda: api.restore_snapshot("s"),
                lambda: list(api.snapshot_diff("s")),
                lambda: api.delete_seal("01K6QZ4V8Y0000000000000042"),
            ):
                try:
                    call()
                    refused.append("allowed")
                except headrace.Permission as error:
                    refused.append(errno.errorcode[error.errno or 0])
            assert [one.name for one in api.snapshots()] == [b"s"]
            return refused

    assert other_user(attempt) == ["EPERM"] * 5
