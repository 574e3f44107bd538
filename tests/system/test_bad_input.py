"""Bad input and bad luck: each has an error that names the thing and the way out, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.client import engine
from headrace.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Full,
    HeadraceError,
    Internal,
    Invalid,
    NotFound,
    Permission,
    Unavailable,
)
from support.commands import failure, run
from support.linux import errno_of
from support.system import (
    NOBODY,
    ROOT,
    alive,
    as_user,
    engines_under,
    kill_and_wait,
    mounts_under,
    need_fuse,
    need_root,
    wait_until,
)
from support.volumes import VolumeUnderTest

Make = Callable[[str], VolumeUnderTest]
MIB = 1 << 20


# The volume's folder


def test_a_volume_path_that_is_a_file(scratch: Path) -> None:
    path = scratch / "file"
    path.write_bytes(b"precious")
    for create in (False, True):
        with pytest.raises(Invalid, match="file") as raised:
            headrace.connect(path, create=create)
        assert str(path) in str(raised.value)
    assert str(path) in failure("up", path, code=5)
    assert str(path) in failure("create", path, code=2)
    assert path.read_bytes() == b"precious"


def test_a_volume_path_that_is_missing(scratch: Path) -> None:
    with pytest.raises(NotFound, match="headrace create"):
        headrace.connect(scratch / "none")
    assert "headrace create" in failure("ls", f"{scratch}/none:/", code=3)
    assert not (scratch / "none").exists()


def test_a_folder_that_is_no_volume(scratch: Path) -> None:
    (scratch / "folder").mkdir()
    (scratch / "folder" / "precious").write_bytes(b"x")
    with pytest.raises(Invalid, match="not a volume"):
        headrace.connect(scratch / "folder")
    with pytest.raises(HeadraceError, match="empty"):
        headrace.connect(scratch / "folder", create=True)
    assert "not a volume" in failure("status", scratch / "folder", code=5)
    assert "empty" in failure("create", scratch / "folder", code=5)
    assert os.listdir(scratch / "folder") == ["precious"]


def test_a_volume_of_a_newer_format(new_volume: Make) -> None:
    volume = new_volume("vol")
    marker = volume.folder / "HEADRACE"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    with pytest.raises(Invalid, match=r"format 99.*upgrade"):
        headrace.connect(volume.name)
    assert "format 99" in failure("up", volume.folder, code=5)
    # The engine refuses by itself, too.
    said = serve_directly(volume)
    assert "99" in said["error"]["message"] and said["error"]["kind"] == "invalid"


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 100, b'{"headrace": "volume"}'])
def test_a_damaged_marker(new_volume: Make, content: bytes) -> None:
    volume = new_volume("vol")
    (volume.folder / "HEADRACE").write_bytes(content)
    with pytest.raises(Corrupt, match="HEADRACE"):
        headrace.connect(volume.name)
    failure("up", volume.folder, code=6)
    assert "error" in serve_directly(volume)


def test_a_volume_that_exists_is_not_made_again(volume: VolumeUnderTest) -> None:
    volume.connect().write_bytes("/kept", b"kept")
    with pytest.raises(AlreadyExists):
        engine.create(volume.name)
    failure("create", volume.folder, code=5)
    assert volume.connect().read_bytes("/kept") == b"kept"


def test_a_read_only_volume(small_disk: Callable[..., Path], new_volume: Make) -> None:
    disk = small_disk(64 * MIB)
    volume = new_volume(f"{disk.name}/vol")
    volume.start()
    volume.connect().write_bytes("/kept", b"kept")
    volume.stop()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(Permission, match="read-only"):
        headrace.connect(volume.name)
    assert "read-only" in failure("ls", f"{volume.name}:/", code=4)
    said = serve_directly(volume)
    assert said["error"]["errno"] in (13, 30), said
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    volume.start()
    assert volume.connect().read_bytes("/kept") == b"kept"


def test_another_users_volume(new_volume: Make, other_user: Callable[..., None]) -> None:
    volume = new_volume("vol")

    def connect() -> None:
        headrace.connect(volume.name)

    with pytest.raises(Permission, match=r"uid|owner|belongs"):
        other_user(connect)
    assert engines_under(volume.name) == []


def test_a_users_own_volume_works_without_root(scratch: Path, other_user: Callable[..., bytes]) -> None:
    """All of a volume's life as an ordinary user; the engine's file must be his to run for this."""
    folder = scratch / "his"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    binary = scratch / "headraced"
    binary.write_bytes(Path(engine.find_engine()).read_bytes())
    binary.chmod(0o755)

    def life() -> bytes:
        os.environ["HEADRACE_ENGINE"] = str(binary)
        with headrace.connect(folder / "vol", create=True) as volume:
            volume.write_bytes("/file", b"his own")
            content = volume.read_bytes("/file")
        engine.stop(folder / "vol")
        return content

    assert other_user(life) == b"his own"


# Space


def test_a_full_disk_through_the_api(small_disk: Callable[..., Path], new_volume: Make) -> None:
    disk = small_disk(48 * MIB)
    volume = new_volume(f"{disk.name}/vol")
    volume.start()
    api = volume.connect()
    kept: dict[str, bytes] = {}
    with pytest.raises(Full) as raised:
        for number in range(2000):
            content = b"%06d" % number * 10_000
            api.write_bytes(f"/d/{number}", content, parents=True, durable=True)
            kept[f"{number}"] = content
    assert kept and "space" in str(raised.value).lower()
    check_kept(volume, kept)
    # What is there can be read by a new engine, on the disk that is still full.
    volume.kill()
    volume.start()
    check_kept(volume, kept)
    # Room comes back when files go (a pack's, when the last file in it goes), and writing goes on.
    api = volume.connect()
    for name in list(kept):
        api.remove(f"/d/{name}")
        del kept[name]

    def written() -> bool:
        try:
            api.write_bytes("/d/after", b"after" * 10_000, durable=True)
        except Full:
            return False
        return True

    wait_until(written, 30, "room after removals")
    kept["after"] = b"after" * 10_000
    check_kept(volume, kept)
    volume.restart()
    check_kept(volume, kept)


def check_kept(volume: VolumeUnderTest, kept: dict[str, bytes]) -> None:
    api = volume.connect()
    wrong = [name for name, content in kept.items() if api.read_bytes(f"/d/{name}") != content]
    assert not wrong


def test_a_full_disk_through_the_mount(small_disk: Callable[..., Path], new_volume: Make) -> None:
    need_fuse()
    disk = small_disk(48 * MIB)
    volume = new_volume(f"{disk.name}/vol")
    volume.start()
    point = volume.mount("mnt")
    kept: dict[str, bytes] = {}
    for number in range(2000):
        content = b"%06d" % number * 10_000
        try:
            with open(point / f"{number}", "xb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())
        except OSError as error:
            assert error.errno == 28, error
            break
        kept[f"{number}"] = content
    else:
        pytest.fail("the disk never became full")
    assert kept
    for name, content in kept.items():
        assert (point / name).read_bytes() == content
    volume.unmount(point)
    volume.kill()
    volume.start()
    api = volume.connect()
    assert all(api.read_bytes(f"/{name}") == content for name, content in kept.items())


def test_a_disk_too_small_for_a_volume(small_disk: Callable[..., Path], engine_binary: str) -> None:
    disk = small_disk(8192)
    with pytest.raises(HeadraceError) as raised:
        headrace.connect(disk / "vol", create=True)
    assert isinstance(raised.value, Full), raised.value


# Mountpoints


def test_mountpoints_that_cannot_be(volume: VolumeUnderTest, scratch: Path) -> None:
    need_fuse()
    api = volume.connect()
    (scratch / "full").mkdir()
    (scratch / "full" / "precious").write_bytes(b"x")
    (scratch / "file").write_bytes(b"x")
    with pytest.raises(Conflict, match="empty"):
        api.mount(scratch / "full")
    with pytest.raises(HeadraceError, match=r"director|folder"):
        api.mount(scratch / "file")
    with pytest.raises(NotFound):
        api.mount(scratch / "none")
    point = volume.mount()
    with pytest.raises(Conflict, match="mount"):
        api.mount(point)
    assert (scratch / "full" / "precious").read_bytes() == b"x"
    assert "empty" in failure("mount", volume.folder, scratch / "full", code=5)
    assert "none" in failure("mount", volume.folder, scratch / "none", code=3)
    assert "mount" in failure("unmount", scratch / "full", code=3)
    volume.unmount(point)
    with pytest.raises(NotFound):
        api.unmount(point)


def test_a_mount_in_use_is_not_taken_away(mount: Path, volume: VolumeUnderTest) -> None:
    with open(mount / "file", "wb") as file:
        with pytest.raises(Conflict):
            volume.unmount(mount)
        file.write(b"still works")
    assert (mount / "file").read_bytes() == b"still works"


def test_no_mount_on_the_volumes_own_folder(volume: VolumeUnderTest) -> None:
    need_fuse()
    (volume.folder / "inside").mkdir()
    for point in (volume.folder, volume.folder / "inside"):
        with pytest.raises((Conflict, Invalid)):
            volume.connect().mount(point)
    (volume.folder / "inside").rmdir()


WITHOUT_FUSE = """
import sys
import headrace
from headrace.client import engine
from headrace.errors import Unavailable

folder, point = sys.argv[1:]
volume = headrace.connect(folder, create=True)
try:
    volume.mount(point)
except Unavailable as error:
    print(error)
volume.write_bytes("/file", b"works without a mount")
print(headrace.Loader(volume.seal("/"))[0].data.tobytes().decode())
engine.stop(folder)
"""


def test_without_dev_fuse_the_rest_works(scratch: Path, engine_binary: str) -> None:
    """A mount namespace in which /dev has no fuse."""
    need_root()
    (scratch / "mnt").mkdir()
    (scratch / "dev").mkdir()
    hide = (
        'set -e; mount -t tmpfs none "$1"; '
        'for node in null zero urandom random; do cp -a "/dev/$node" "$1/"; done; '
        'ln -s /proc/self/fd "$1/fd"; '
        'mount --move "$1" /dev; shift; exec "$@"'
    )
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", str(scratch / "dev"),
         sys.executable, "-c", WITHOUT_FUSE, str(scratch / "vol"), str(scratch / "mnt")],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    refusal, loaded = run.stdout.splitlines()
    assert "/dev/fuse" in refusal
    assert loaded == "works without a mount"


# Engines


def serve_directly(volume: VolumeUnderTest) -> dict[str, dict[str, Any]]:
    """The first line that `headraced serve` says; the process must end by itself, with an error."""
    run = subprocess.run(
        [engine.find_engine(), "serve", "--volume", volume.name],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    assert run.returncode != 0
    said: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[0])
    return said


def test_a_second_engine_is_refused_and_told_whose_the_volume_is(volume: VolumeUnderTest) -> None:
    said = serve_directly(volume)
    assert said["error"]["kind"] == "conflict"
    assert str(volume.pid) in said["error"]["message"]
    assert volume.connect().status().pid == volume.pid


def test_starting_an_engine_twice_is_harmless(volume: VolumeUnderTest) -> None:
    pid = volume.pid
    assert engine.start(volume.name) is None
    assert volume.pid == pid


def test_many_clients_that_start_an_engine_at_once_get_one(new_volume: Make) -> None:
    volume = new_volume("vol")
    script = "import sys, headrace; print(headrace.connect(sys.argv[1]).status().pid)"
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", script, volume.name],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        )
        for _ in range(6)
    ]
    said = {client.communicate(timeout=90)[0] for client in clients}
    assert [client.returncode for client in clients] == [0] * 6
    assert len(said) == 1, said


def test_a_socket_path_beyond_108_bytes(new_volume: Make) -> None:
    volume = new_volume("long-" * 20 + "/" + "name-" * 20)
    assert len(volume.name) > 200
    volume.start()
    volume.connect().write_bytes("/file", b"reached")
    assert volume.connect().read_bytes("/file") == b"reached"


def test_sigterm_is_a_clean_stop(mount: Path, volume: VolumeUnderTest) -> None:
    (mount / "file").write_bytes(b"not synced")
    pid = volume.pid
    volume.close()
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not alive(pid), 20, "end after SIGTERM")
    assert mounts_under(str(mount)) == []
    assert volume.start().recovery == []
    assert volume.connect().read_bytes("/file") == b"not synced"


def test_sigterm_with_open_files_ends_too(mount: Path, volume: VolumeUnderTest) -> None:
    pid = volume.pid
    with open(mount / "file", "wb", buffering=0) as file:
        file.write(b"written, not closed")
        volume.close()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not alive(pid), 20, "end after SIGTERM with an open file")
        assert errno_of(os.fstat, file.fileno()) in ("OK", "ENOTCONN", "ECONNABORTED", "EIO")
        with contextlib.suppress(OSError):
            file.close()
    volume.detach()
    volume.start()
    assert volume.connect().read_bytes("/file") == b"written, not closed"


def test_a_mount_whose_engine_was_killed_says_so_and_can_be_ended(
    mount: Path, volume: VolumeUnderTest
) -> None:
    kill_and_wait(volume.pid)
    # ECONNABORTED: a request that the kernel was about to hand over.
    assert errno_of(os.listdir, mount) in ("ENOTCONN", "ECONNABORTED")
    run("unmount", mount)
    assert mounts_under(str(mount)) == []


# Damage


@pytest.fixture
def filled(new_volume: Make) -> tuple[VolumeUnderTest, dict[str, bytes]]:
    """A stopped volume with small files in packs and one large file of its own segment."""
    volume = new_volume("vol")
    volume.start()
    api = volume.connect()
    contents = {f"/d/{number:03}": b"<%05d>" % number * 1500 for number in range(60)}
    contents["/d/large"] = b"<LARGE>" * (20 * MIB // 7)
    for name, content in contents.items():
        api.write_bytes(name, content, parents=True)
    api.sync()
    volume.stop()
    return volume, contents


def flip(path: Path, what: bytes) -> int:
    """Flips a bit in the middle of the first `what` in the file; returns where."""
    content = path.read_bytes()
    at = content.index(what) + len(what) // 2
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    return at


def segment_with(volume: VolumeUnderTest, what: bytes) -> Path:
    return next(path for path in volume.segments() if what in path.read_bytes())


@pytest.mark.parametrize("name", ["/d/007", "/d/large"])
def test_a_flipped_bit_is_an_error_that_names_segment_and_offset(
    filled: tuple[VolumeUnderTest, dict[str, bytes]], name: str
) -> None:
    volume, contents = filled
    needle = contents[name][7 * 400 : 7 * 500]
    path = segment_with(volume, needle)
    flip(path, needle)
    volume.start()
    api = volume.connect()
    with pytest.raises(Corrupt) as raised:
        if name == "/d/large":
            api.open(name, "rb").read()
        else:
            api.read_bytes(name)
    assert path.stem in str(raised.value)
    assert any(word.strip(",.:;()").isdigit() for word in str(raised.value).split()), raised.value
    assert raised.value.errno == 5
    # By batch, alone and beside others.
    dataset = api.seal("/d")
    row = list(dataset.paths).index(name.removeprefix("/d/"))
    for call in (lambda: dataset[row], lambda: dataset.read_batch([0, row])):
        with pytest.raises(Corrupt, match=path.stem):
            call()
    # The others are served.
    for other, content in contents.items():
        if other != name and other != "/d/large":
            assert api.read_bytes(other) == content


@pytest.mark.parametrize("name", ["/d/007", "/d/large"])
def test_a_flipped_bit_is_eio_through_the_mount(
    filled: tuple[VolumeUnderTest, dict[str, bytes]], name: str
) -> None:
    need_fuse()
    volume, contents = filled
    needle = contents[name][7 * 400 : 7 * 500]
    path = segment_with(volume, needle)
    flip(path, needle)
    volume.start()
    point = volume.mount()
    assert errno_of((point / name[1:]).read_bytes) == "EIO"
    assert (point / "d" / "008").read_bytes() == contents["/d/008"]
    assert path.stem in volume.log_tail(), "the log does not name the damaged segment"
    volume.unmount(point)


def test_a_segment_that_is_cut_short_or_gone(filled: tuple[VolumeUnderTest, dict[str, bytes]]) -> None:
    volume, contents = filled
    pack = segment_with(volume, contents["/d/007"])
    large = segment_with(volume, contents["/d/large"][:4096])
    os.truncate(pack, pack.stat().st_size // 2)
    large.unlink()
    try:
        volume.start()
    except Corrupt as error:
        assert pack.stem in str(error) or large.stem in str(error)
        return
    api = volume.connect()
    wrong = 0
    for name, content in contents.items():
        try:
            with api.open(name, "rb") as file:
                assert file.read() == content
        except HeadraceError as error:
            assert isinstance(error, Corrupt | NotFound | Internal), error
            assert error.errno == 5
            wrong += 1
    assert wrong >= 2


@pytest.mark.parametrize("where", ["head", "middle", "empty", "garbage"])
def test_a_damaged_metadata_file(filled: tuple[VolumeUnderTest, dict[str, bytes]], where: str) -> None:
    volume, contents = filled
    path = volume.folder / "meta" / "volume.sqlite"
    content = bytearray(path.read_bytes())
    match where:
        case "head":
            content[:100] = b"\xff" * 100
        case "middle":
            for at in range(4096, len(content), 4096):
                content[at : at + 512] = b"\xa5" * 512
        case "empty":
            content.clear()
        case _:
            content[:] = b"\xa5" * len(content)
    path.write_bytes(content)
    with pytest.raises(Corrupt) as raised:
        volume.start()
        for name in contents:  # it may start and find the damage when it looks
            volume.connect().read_bytes(name)
    assert "sqlite" in str(raised.value) or volume.name in str(raised.value)
    assert path.read_bytes()[: len(content)] == bytes(content), "what was damaged is not written over"


def test_a_missing_metadata_file_is_not_made_anew(filled: tuple[VolumeUnderTest, dict[str, bytes]]) -> None:
    volume, _ = filled
    for path in (volume.folder / "meta").iterdir():
        path.unlink()
    with pytest.raises((Corrupt, NotFound)):
        volume.start()
    failure("up", volume.folder, code=3)
    assert list((volume.folder / "meta").iterdir()) == []


def test_the_metadata_file_is_sound_after_a_kill(volume: VolumeUnderTest) -> None:
    for number in range(200):
        volume.connect().write_bytes(f"/{number}", b"x")
    volume.kill()
    with sqlite3.connect(volume.folder / "meta" / "volume.sqlite") as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
    database.close()
    volume.start()


def test_a_client_that_talks_nonsense_harms_nobody(volume: VolumeUnderTest) -> None:
    import socket

    api = volume.connect()
    api.write_bytes("/file", b"x")
    for nonsense in (
        b"\0garbage" * 100,
        b"\0HRWIRE\x01" + b"\xff" * 64,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0HRWIRE\x01",
        b"x",
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(volume.folder / "engine.sock"))
            client.sendall(nonsense)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(10)
            while client.recv(65536):
                pass
    assert api.read_bytes("/file") == b"x"


def test_an_engine_that_is_gone_in_mid_call_is_unavailable(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    with api.open("/file", "wb", buffering=0) as file:
        file.write(b"x")
        volume.kill()
        with pytest.raises(Unavailable):
            file.write(b"y")
    with pytest.raises(Unavailable):
        api.read_bytes("/file")
    volume.start()
    assert api.listdir("/") in (["file"], [])


def test_nobody_can_read_the_log_or_the_socket_folder(volume: VolumeUnderTest) -> None:
    need_root()
    assert as_user(NOBODY, lambda: errno_of(Path(volume.folder / "engine.log").read_bytes)) == "EACCES"


def test_a_log_that_cannot_be_written_costs_no_data(new_volume: Make, scratch: Path) -> None:
    """A log on a disk that is full: lines are lost, nothing else."""
    volume = new_volume("vol")
    folder = Path(volume.name)
    with open("/dev/full", "wb") as full:
        serving = subprocess.Popen(
            [engine.find_engine(), "serve", "--volume", folder], stdout=subprocess.PIPE, stderr=full
        )
    try:
        assert serving.stdout is not None
        assert json.loads(serving.stdout.readline())["ready"]["pid"] == serving.pid
        api = headrace.connect(folder, start=False)
        api.write_bytes("/file", b"x" * 300_000)
        dataset = api.seal("/")
        for path in volume.segments():
            path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(Corrupt):
            dataset.read_batch([0])
        api.write_bytes("/after", b"after", durable=True)
        assert api.read_bytes("/after") == b"after"
        api.close()
    finally:
        serving.terminate()
        serving.communicate(timeout=20)
    assert serving.returncode == 0
