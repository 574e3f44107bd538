"""mmap of files: shared and private, in every open mode, also beside O_DIRECT (case 19)."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from support.linux import aligned, errno_of
from support.volumes import VolumeUnderTest

SIZES = [1, 4096, 10_000, 3 * (1 << 20) + 17]


def pattern(size: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(min(size, 251))) * (size // 251 + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_RDWR])
def test_a_map_shows_the_file(place: Path, size: int, flags: int, mode: int) -> None:
    content = pattern(size)[:size]
    (place / "file").write_bytes(content)
    fd = os.open(place / "file", mode)
    with mmap.mmap(fd, 0, flags, mmap.PROT_READ) as mapped:
        os.close(fd)
        assert mapped[:] == content


@pytest.mark.parametrize("size", SIZES)
def test_a_private_map_keeps_its_changes(place: Path, size: int) -> None:
    content = pattern(size)[:size]
    (place / "file").write_bytes(content)
    with open(place / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapped[0] = content[0] ^ 255
    assert mapped[0] == content[0] ^ 255
    mapped.close()
    assert (place / "file").read_bytes() == content


@pytest.mark.parametrize("size", SIZES)
def test_a_shared_map_writes_to_the_file(place: Path, size: int) -> None:
    content = bytearray(pattern(size)[:size])
    (place / "file").write_bytes(content)
    with open(place / "file", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED)
    for offset in {0, size // 2, size - 1}:
        mapped[offset] = content[offset] = content[offset] ^ 255
    mapped.flush()
    assert (place / "file").read_bytes() == content
    mapped.close()
    assert (place / "file").stat().st_size == size


def test_a_shared_map_and_a_descriptor_agree(place: Path) -> None:
    (place / "file").write_bytes(bytes(20_000))
    with open(place / "file", "r+b", buffering=0) as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED)
        file.seek(5000)
        file.write(b"written")
        assert mapped[5000:5007] == b"written"
        mapped[9000:9006] = b"mapped"
        file.seek(9000)
        assert file.read(6) == b"mapped"
        mapped.close()


def test_a_map_beside_direct_reads_agrees(place: Path) -> None:
    """safetensors maps a file that a checkpoint writer wrote with O_DIRECT."""
    size = 1 << 20
    memory = aligned(size)
    memory[:] = pattern(size)[:size]
    fd = os.open(place / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.writev(fd, [memory]) == size
    mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    assert mapped[:] == memory[:]
    again = aligned(size)
    assert os.preadv(fd, [again], 0) == size
    assert again[:] == mapped[:]
    mapped.close()
    os.close(fd)


def test_a_map_lives_when_descriptor_and_name_are_gone(place: Path) -> None:
    content = pattern(100_000)[:100_000]
    (place / "file").write_bytes(content)
    with open(place / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.unlink(place / "file")
    assert mapped[:] == content
    mapped.close()


def test_a_map_for_writing_needs_a_descriptor_for_writing(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    with open(place / "file", "rb") as file:
        assert errno_of(mmap.mmap, file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_WRITE) == "EACCES"


def test_what_a_map_wrote_is_durable_after_msync(mount: Path, volume: VolumeUnderTest) -> None:
    (mount / "file").write_bytes(bytes(1 << 20))
    with open(mount / "file", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED)
    mapped[123_456:123_460] = b"kept"
    mapped.flush()
    volume.kill()
    mapped.close()
    volume.start()
    content = volume.connect().read_bytes("/file")
    assert content[123_456:123_460] == b"kept"
    assert len(content) == 1 << 20
