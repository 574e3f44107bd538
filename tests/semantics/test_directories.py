"""Directories: listings that change while they are read, and removal of whole trees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.linux import errno_of
from support.volumes import VolumeUnderTest


def fill(folder: Path, count: int) -> set[str]:
    names = {f"file-{number:05}" for number in range(count)}
    for name in names:
        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    return names


def test_a_listing_has_every_name_once(place: Path) -> None:
    names = fill(place, 5000)
    listed = os.listdir(place)
    assert len(listed) == len(names)
    assert set(listed) == names


def test_rm_of_a_tree_of_5000_files_leaves_nothing(place: Path) -> None:
    top = place / "top"
    for part in range(5):
        (top / f"{part}" / "deep").mkdir(parents=True)
        fill(top / f"{part}", 500)
        fill(top / f"{part}" / "deep", 500)
    run = subprocess.run(["rm", "-rf", str(top)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert os.listdir(place) == []


def test_rmtree_of_a_flat_directory_leaves_nothing(place: Path) -> None:
    (place / "top").mkdir()
    fill(place / "top", 3000)
    shutil.rmtree(place / "top")
    assert os.listdir(place) == []


def test_a_listing_survives_removal_of_what_it_gave(place: Path) -> None:
    """readdir offsets hold when entries before and after them go."""
    names = fill(place, 3000)
    seen = []
    with os.scandir(place) as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.path)
    assert len(seen) == len(set(seen))
    assert set(seen) == names
    assert os.listdir(place) == []


def test_names_that_stay_are_listed_once_while_others_come_and_go(place: Path) -> None:
    names = fill(place, 2000)
    seen = []
    with os.scandir(place) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 20 == 0:
                (place / f"a-new-{number}").touch()
                (place / f"z-new-{number}").touch()
            if number % 20 == 10 and (place / f"a-new-{number - 10}").exists():
                os.unlink(place / f"a-new-{number - 10}")
    stayed = [name for name in seen if name in names]
    assert len(stayed) == len(set(stayed))
    assert set(stayed) == names


def test_a_listing_tells_kinds(place: Path) -> None:
    (place / "file").touch()
    (place / "folder").mkdir()
    (place / "link").symlink_to("folder")
    with os.scandir(place) as entries:
        kinds = {
            entry.name: (
                entry.is_file(follow_symlinks=False),
                entry.is_dir(follow_symlinks=False),
                entry.is_symlink(),
            )
            for entry in entries
        }
    assert kinds == {
        "file": (True, False, False),
        "folder": (False, True, False),
        "link": (False, False, True),
    }


def test_removals_that_cannot_be_are_refused(place: Path) -> None:
    (place / "file").touch()
    (place / "folder" / "in").mkdir(parents=True)
    assert errno_of(os.rmdir, place / "folder") == "ENOTEMPTY"
    assert errno_of(os.rmdir, place / "file") == "ENOTDIR"
    assert errno_of(os.rmdir, place / "none") == "ENOENT"
    assert errno_of(os.unlink, place / "folder") in ("EISDIR", "EPERM")
    assert errno_of(os.unlink, place / "none") == "ENOENT"
    assert errno_of(os.mkdir, place / "file") == "EEXIST"
    assert errno_of(os.mkdir, place / "none" / "x") == "ENOENT"
    assert errno_of(os.mkdir, place / "file" / "x") == "ENOTDIR"
    assert errno_of(os.rmdir, f"{place}/folder/in/.") == "EINVAL"


def test_an_open_directory_may_be_removed(place: Path) -> None:
    (place / "folder").mkdir()
    fd = os.open(place / "folder", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(place / "folder")
    assert errno_of(os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=fd) == "ENOENT"
    assert os.listdir(fd) == []
    os.close(fd)
    assert os.listdir(place) == []


def test_a_directory_can_be_synced(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    (place / "file").touch()
    os.fsync(fd)
    os.fdatasync(fd)
    os.close(fd)


def test_200_levels_are_made_and_removed(place: Path) -> None:
    deep = place
    for level in range(200):
        deep = deep / f"{level}"
        deep.mkdir()
    (deep / "leaf").write_bytes(b"leaf")
    assert (deep / "leaf").read_bytes() == b"leaf"
    shutil.rmtree(place / "0")
    assert os.listdir(place) == []


def test_files_are_made_and_removed_in_turn(place: Path) -> None:
    for turn in range(300):
        (place / "file").write_bytes(b"%d" % turn)
        assert (place / "file").read_bytes() == b"%d" % turn
        os.unlink(place / "file")
        assert errno_of(os.stat, place / "file") == "ENOENT"


def test_paths_from_an_open_directory(place: Path) -> None:
    (place / "folder").mkdir()
    fd = os.open(place / "folder", os.O_RDONLY | os.O_DIRECTORY)
    os.rename(place / "folder", place / "moved")
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(file, b"x")
    os.close(file)
    assert os.listdir(fd) == ["file"]
    os.close(fd)
    assert (place / "moved" / "file").read_bytes() == b"x"


def test_the_api_removes_what_is_being_listed(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for number in range(50):
        api.write_bytes(f"/d/{number:03}", b"", parents=True)
    for entry in api.scandir("/d"):
        api.remove(entry.path)
    assert api.listdir("/d") == []
    api.rmdir("/d")
    assert api.listdir("/") == []


@pytest.mark.parametrize("writers", [4])
def test_a_tree_is_removed_while_others_fill_it(mount: Path, writers: int) -> None:
    """Case 21: rm may find the directory filled again, but never loops and never loses another's file."""
    script = (
        "import os, sys\n"
        "root, writer = sys.argv[1:]\n"
        "for number in range(300):\n"
        "    try:\n"
        "        os.makedirs(f'{root}/d', exist_ok=True)\n"
        "        open(f'{root}/d/{writer}-{number}', 'x').close()\n"
        # FileExistsError: os.makedirs found the folder, looked again, and it was gone.
        "    except (FileNotFoundError, FileExistsError):\n"
        "        pass\n"
        "    open(f'{root}/keep-{writer}-{number}', 'x').close()\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(mount), f"{w}"]) for w in range(writers)]
    while any(process.poll() is None for process in processes):
        shutil.rmtree(mount / "d", ignore_errors=True)
    assert [process.wait() for process in processes] == [0] * writers
    shutil.rmtree(mount / "d", ignore_errors=True)
    kept = {f"keep-{w}-{number}" for w in range(writers) for number in range(300)}
    assert set(os.listdir(mount)) - {"d"} == kept
