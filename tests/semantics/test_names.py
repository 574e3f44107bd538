"""Case 25: a name is bytes. The bytes that went in come out, never normalised, by every road."""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from support.volumes import VolumeUnderTest

NAMES = [
    b"plain",
    b"caf\xe9",  # Latin-1: not UTF-8
    b"\xff\xfe\x80",
    "café".encode(),
    unicodedata.normalize("NFD", "café").encode(),  # looks the same, is another name
    "日本語 ファイル".encode(),
    "\U0001f30a".encode(),
    b"new\nline",
    b"tab\there",
    b"carriage\rreturn",
    b"\x01\x1b[31m\x7f",
    b"-rf",
    b"--help",
    b"trailing space ",
    b" leading space",
    b"trailing dot.",
    b"..hidden",
    b"...",
    b"%2F",
    b"%00",
    b"back\\slash",
    b"a:b",
    b"VOLUME:",
    b"quote'\"`$(x)",
    b"glob*?[a]{b}",
    b"CON",
    b"case",
    b"CASE",
    b"x" * 255,
    b"\xc3" * 255,
    b".headrace",
    b"HEADRACE",
    b"#hash;semi&amp|pipe<>",
]


def test_the_bytes_of_a_name_come_back(place: Path) -> None:
    root = os.fsencode(place)
    for number, name in enumerate(NAMES):
        with open(os.path.join(root, name), "xb") as file:
            file.write(b"%d" % number)
    assert sorted(os.listdir(root)) == sorted(NAMES)
    for number, name in enumerate(NAMES):
        path = os.path.join(root, name)
        with open(path, "rb") as file:
            assert file.read() == b"%d" % number
        os.rename(path, path[:-1] + (b"z" if path[-1:] != b"z" else b"y"))
    assert len(os.listdir(root)) == len(NAMES)


def test_directories_and_links_take_any_name(place: Path) -> None:
    root = os.fsencode(place)
    for name in NAMES:
        folder = os.path.join(root, name)
        os.mkdir(folder)
        os.symlink(name, os.path.join(folder, name))
        assert os.readlink(os.path.join(folder, name)) == name
        os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    assert os.listdir(root) == []


@pytest.mark.parametrize("length", [256, 300, 4000])
def test_a_name_above_255_bytes_is_refused(place: Path, length: int) -> None:
    for act in (
        lambda path: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)),
        os.mkdir,
        os.stat,
        lambda path: os.symlink(b"x", path),
    ):
        with pytest.raises(OSError) as raised:
            act(os.path.join(os.fsencode(place), b"n" * length))
        assert raised.value.errno == errno.ENAMETOOLONG


def test_a_path_of_many_folders_is_reached(place: Path) -> None:
    """Ten levels of 100 bytes: the 1,024-byte keys of object stores."""
    deep = os.path.join(os.fsencode(place), *[b"%d" % level * 100 for level in range(10)])
    os.makedirs(deep)
    with open(os.path.join(deep, b"leaf"), "xb") as file:
        file.write(b"deep")
    with open(os.path.join(deep, b"leaf"), "rb") as file:
        assert file.read() == b"deep"


def test_the_mount_and_the_api_see_the_same_bytes(mount: Path, volume: VolumeUnderTest) -> None:
    api = volume.connect()
    root = os.fsencode(mount)
    for number, name in enumerate(NAMES):
        if number % 2:
            api.write_bytes(b"/" + name, name)
        else:
            with open(os.path.join(root, name), "xb") as file:
                file.write(name)
    assert api.listdir(b"/") == sorted(NAMES) == sorted(os.listdir(root))
    for name in NAMES:
        assert api.read_bytes(b"/" + name) == name
        with open(os.path.join(root, name), "rb") as file:
            assert file.read() == name


def test_names_survive_a_restart(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for name in NAMES:
        api.write_bytes(b"/d/" + name, name, parents=True)
    volume.restart()
    api = volume.connect()
    assert api.listdir(b"/d") == sorted(NAMES)
    assert [api.read_bytes(b"/d/" + name) for name in NAMES] == NAMES


def test_names_stand_in_a_sealed_view(volume: VolumeUnderTest) -> None:
    api = volume.connect()
    for name in NAMES:
        api.write_bytes(b"/d/" + name + b"/" + name, name, parents=True)
    dataset = api.seal("/d")
    assert [os.fsencode(path) for path in dataset.paths] == [name + b"/" + name for name in sorted(NAMES)]
    assert [os.fsencode(name) for name in dataset.classes] == sorted(NAMES)
    assert dataset[:] == sorted(NAMES)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a\0b", b"n" * 256])
def test_the_api_refuses_what_no_file_system_can_name(volume: VolumeUnderTest, name: bytes) -> None:
    api = volume.connect()
    api.makedirs("/d")
    with pytest.raises(HeadraceError):
        api.write_bytes(b"/d/" + name, b"")
    assert api.listdir("/d") == []
