"""Who may not read a file gets none of its bytes: not by path, batch, descriptor or neighbour.

The engine serves all users (`--system`, as root). Each test asks as user nobody, through every road.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
import headrace.client.dataset  # a forked child of another user may not be able to read the source
from headrace.errors import HeadraceError, Permission
from headrace.model import message
from support.linux import errno_of
from support.system import NOBODY, as_user, need_fuse, need_root
from support.volumes import VolumeUnderTest

SECRET = b"SECRET" * 300
OPEN = b"OPEN FOR ALL" * 150

Make = Callable[[str], VolumeUnderTest]


@pytest.fixture
def shared(new_volume: Make) -> Iterator[VolumeUnderTest]:
    """A volume that serves all users: /d holds files of root's, in one pack, readable or not."""
    need_root()
    volume = new_volume("vol")
    volume.start(system=True)
    api = volume.connect()
    api.makedirs("/d")
    for number in range(20):
        secret = number % 2 == 1
        api.write_bytes(f"/d/{number:02}", SECRET if secret else OPEN, mode=0o600 if secret else 0o644)
    api.write_bytes("/locked/file", OPEN, parents=True, mode=0o644)
    api.set_attributes("/locked", mode=0o700)
    api.write_bytes("/large-secret", SECRET * 20_000, mode=0o600)  # a file segment
    api.sync()
    yield volume


def asked(volume: VolumeUnderTest, call: Callable[[headrace.Volume], Any], uid: int = NOBODY) -> Any:
    """What `call` gives as that user, or the name of its errno."""

    def inside() -> Any:
        with headrace.connect(volume.name, start=False) as api:
            try:
                return call(api)
            except HeadraceError as error:
                return errno.errorcode[error.errno or 0]

    return as_user(uid, inside)


def test_by_path(shared: VolumeUnderTest) -> None:
    assert asked(shared, lambda api: api.read_bytes("/d/00")) == OPEN
    assert asked(shared, lambda api: api.read_bytes("/d/01")) == "EACCES"
    assert asked(shared, lambda api: api.open("/d/01", "rb").read()) == "EACCES"
    assert asked(shared, lambda api: api.open("/large-secret", "rb").read(10)) == "EACCES"
    assert asked(shared, lambda api: api.stat("/d/01").size) == len(SECRET)
    assert asked(shared, lambda api: api.read_bytes("/locked/file")) == "EACCES"
    assert asked(shared, lambda api: api.stat("/locked/file")) == "EACCES"
    assert asked(shared, lambda api: api.listdir("/locked")) == "EACCES"
    assert asked(shared, lambda api: len(api.listdir("/d"))) == 20


def test_by_a_link_of_ones_own(shared: VolumeUnderTest) -> None:
    shared.connect().set_attributes("/d", mode=0o1777)
    assert asked(shared, lambda api: api.symlink("/locked/file", "/d/mine")) is None
    assert asked(shared, lambda api: api.read_bytes("/d/mine")) == "EACCES"
    assert asked(shared, lambda api: api.symlink("01", "/d/mine2")) is None
    assert asked(shared, lambda api: api.read_bytes("/d/mine2")) == "EACCES"


def test_nothing_may_be_changed(shared: VolumeUnderTest) -> None:
    assert asked(shared, lambda api: api.write_bytes("/d/new", b"x")) == "EACCES"
    assert asked(shared, lambda api: api.write_bytes("/d/00", b"x")) == "EACCES"
    assert asked(shared, lambda api: api.open("/d/00", "r+b")) == "EACCES"
    assert asked(shared, lambda api: api.open("/d/00", "ab")) == "EACCES"
    assert asked(shared, lambda api: api.remove("/d/00")) == "EACCES"
    assert asked(shared, lambda api: api.rename("/d/00", "/d/x")) == "EACCES"
    assert asked(shared, lambda api: api.mkdir("/new")) == "EACCES"
    assert asked(shared, lambda api: api.symlink("x", "/new")) == "EACCES"
    assert asked(shared, lambda api: api.link("/d/00", "/new")) in ("EACCES", "EPERM")
    assert asked(shared, lambda api: api.set_attributes("/d/00", mode=0o777)) == "EPERM"
    assert asked(shared, lambda api: api.set_attributes("/d/00", uid=NOBODY)) == "EPERM"
    assert asked(shared, lambda api: api.set_attributes("/d/00", size=0)) == "EACCES"
    assert asked(shared, lambda api: api.setxattr("/d/00", "user.x", b"")) == "EACCES"
    assert shared.connect().read_bytes("/d/00") == OPEN


def test_the_engine_obeys_only_its_owner(shared: VolumeUnderTest, scratch: Path) -> None:
    (scratch / "nobodys").mkdir()
    os.chown(scratch / "nobodys", NOBODY, NOBODY)
    from headrace.client import engine

    assert asked(shared, lambda api: engine.stop(api.path)) in ("EACCES", "EPERM")
    assert asked(shared, lambda api: api.mount(scratch / "nobodys")) in ("EACCES", "EPERM")
    assert shared.connect().status().pid == shared.pid


def test_by_seal(shared: VolumeUnderTest) -> None:
    """Sealing shows names and sizes: it takes the right to list the whole tree; bytes are asked for anew."""
    assert asked(shared, lambda api: api.seal("/locked")) == "EACCES"
    assert asked(shared, lambda api: api.seal("/")) == "EACCES"
    assert asked(shared, lambda api: api.seal("/d")[0]) == OPEN
    assert asked(shared, lambda api: api.seal("/d")[1]) == "EACCES"


def test_by_manifest(shared: VolumeUnderTest) -> None:
    """The table of a sealed view, whose descriptor clients get, holds no bytes of files."""
    api = shared.connect()
    for number in range(5):
        with api.open(f"/d/tiny-{number}", "xb", permissions=0o600) as file:
            file.write(b"SECRET")
            file.flush()
            file.raw.sync()  # type: ignore[attr-defined]  # VolumeFile under the buffer
    seal = api.seal("/d").seal

    def manifest(api: headrace.Volume) -> Any:
        reply = api._pool.call(message.OpenSeal(seal), message.Sealed, fds=1)
        with open(reply.fds[0], "rb") as file:
            return file.read()

    content = asked(shared, manifest)
    assert b"tiny-0" in content and b"SECRET" not in content


def test_by_batch(shared: VolumeUnderTest) -> None:
    """A view that root sealed serves others the samples that they may read, and no batch with another."""
    seal = shared.connect().seal("/d").seal
    assert asked(shared, lambda api: api.dataset(seal)[0]) == OPEN
    assert asked(shared, lambda api: api.dataset(seal)[[0, 2, 4]]) == [OPEN] * 3
    assert asked(shared, lambda api: api.dataset(seal)[1]) == "EACCES"
    assert asked(shared, lambda api: api.dataset(seal)[[0, 1]]) == "EACCES"
    assert asked(shared, lambda api: len(api.dataset(seal).read_batch(range(20)))) == "EACCES"


def test_by_loader(shared: VolumeUnderTest) -> None:
    seal = shared.connect().seal("/d").seal

    def read(api: headrace.Volume) -> Any:
        seen = b""
        try:
            for batch in headrace.Loader(api.dataset(seal), batch_size=4):
                seen += batch.data.tobytes()
        except Permission:
            return seen
        return "no refusal"

    seen = asked(shared, read)
    assert b"SECRET" not in seen and seen != "no refusal"


def test_by_a_sealed_view_in_a_locked_directory(shared: VolumeUnderTest) -> None:
    seal = shared.connect().seal("/locked").seal
    assert asked(shared, lambda api: api.dataset(seal)[0]) == "EACCES"


def test_by_descriptor(shared: VolumeUnderTest) -> None:
    """A descriptor that the engine hands out shows no more than its samples: its memory is zeroed or new."""
    seal = shared.connect().seal("/d").seal

    def whole_slot(api: headrace.Volume) -> Any:
        _, fd = api.dataset(seal)._gather(np.array([0, 2], dtype=np.uint64))
        size = os.fstat(fd).st_size
        content = os.pread(fd, size, 0)
        os.close(fd)
        return content

    # Batches of root's come first, so that reused memory would show them.
    shared.connect().dataset(seal).read_batch([1, 3, 5, 7])
    content = asked(shared, whole_slot)
    assert OPEN * 2 in content
    assert b"SECRET" not in content


def test_by_neighbour(shared: VolumeUnderTest) -> None:
    """Secret and open files lie in one pack: reading beyond the open one's end gives nothing."""

    def beyond(api: headrace.Volume) -> Any:
        with api.open("/d/00", "rb", buffering=0) as file:
            file.seek(len(OPEN) - 10)
            return file.read(1 << 20)

    assert asked(shared, beyond) == OPEN[-10:]


def test_the_folder_itself_is_closed_to_others(shared: VolumeUnderTest) -> None:
    """Who may connect may not read segments, metadata, manifests or the log on the disk."""
    shared.connect().seal("/d")
    open_to_all = [
        path.relative_to(shared.folder)
        for path in shared.folder.rglob("*")
        if path.is_file() and as_user(NOBODY, partial(os.access, path, os.R_OK))
    ]
    assert [str(path) for path in open_to_all] == ["HEADRACE"]


def test_without_system_no_other_user_is_served(
    volume: VolumeUnderTest, other_user: Callable[..., Any]
) -> None:
    def connect() -> None:
        headrace.connect(volume.name, start=False)

    with pytest.raises(Permission, match=r"uid|serve"):
        other_user(connect)


def test_through_the_mount(shared: VolumeUnderTest) -> None:
    need_fuse()
    point = shared.mount()

    def look() -> dict[str, str]:
        return {
            "open": errno_of((point / "d" / "00").read_bytes),
            "secret": errno_of((point / "d" / "01").read_bytes),
            "write": errno_of(os.open, point / "d" / "00", os.O_WRONLY),
            "create": errno_of(os.open, point / "d" / "new", os.O_CREAT | os.O_WRONLY),
            "chmod": errno_of(os.chmod, point / "d" / "00", 0o777),
            "chown": errno_of(os.chown, point / "d" / "00", NOBODY, NOBODY),
            "truncate": errno_of(os.truncate, point / "d" / "00", 0),
            "unlink": errno_of(os.unlink, point / "d" / "00"),
            "list locked": errno_of(os.listdir, point / "locked"),
            "in locked": errno_of(os.stat, point / "locked" / "file"),
            "utime": errno_of(os.utime, point / "d" / "00", (0, 0)),
            "setxattr": errno_of(os.setxattr, point / "d" / "00", "user.x", b""),
        }

    assert as_user(NOBODY, look) == {
        "open": "OK",
        "secret": "EACCES",
        "write": "EACCES",
        "create": "EACCES",
        "chmod": "EPERM",
        "chown": "EPERM",
        "truncate": "EACCES",
        "unlink": "EACCES",
        "list locked": "EACCES",
        "in locked": "EACCES",
        "utime": "EPERM",
        "setxattr": "EACCES",
    }
    shared.unmount(point)


def test_files_are_made_with_the_owner_who_made_them(shared: VolumeUnderTest) -> None:
    shared.connect().set_attributes("/d", mode=0o1777)
    assert asked(shared, lambda api: api.write_bytes("/d/mine", b"x", mode=0o600)) is None
    assert shared.connect().stat("/d/mine").uid == NOBODY
    assert asked(shared, lambda api: api.read_bytes("/d/mine")) == b"x"
    assert asked(shared, lambda api: api.read_bytes("/d/mine"), uid=12345) == "EACCES"
    # Sticky: another user's file may not be removed by who may write the directory.
    assert asked(shared, lambda api: api.remove("/d/mine"), uid=12345) in ("EPERM", "EACCES")
    assert asked(shared, lambda api: api.remove("/d/00")) in ("EPERM", "EACCES")
    assert asked(shared, lambda api: api.remove("/d/mine")) is None


def test_a_group_counts(shared: VolumeUnderTest) -> None:
    api = shared.connect()
    api.write_bytes("/group", b"for the group", mode=0o640)
    api.set_attributes("/group", gid=4321)

    def read() -> Any:
        with headrace.connect(shared.name, start=False) as mine:
            try:
                return mine.read_bytes("/group")
            except HeadraceError as error:
                return errno.errorcode[error.errno or 0]

    assert as_user(NOBODY, read) == "EACCES"
    assert as_user(NOBODY, read, groups=(4321,)) == b"for the group"


def test_a_write_by_another_user_takes_setuid_away(shared: VolumeUnderTest) -> None:
    need_fuse()
    point = shared.mount()
    (point / "d" / "tool").write_bytes(b"x")
    os.chmod(point / "d" / "tool", 0o4777)

    def write() -> None:
        with open(point / "d" / "tool", "ab") as file:
            file.write(b"y")

    as_user(NOBODY, write)
    assert (point / "d" / "tool").stat().st_mode & 0o7777 == 0o777
    shared.unmount(point)
