"""Real input, imported and compared byte for byte: ten thousand images from an archive, and site-packages."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import pytest

import headrace
from support.commands import answer, failure
from support.system import need_fuse, shared_data
from support.trees import differences, tree_of
from support.volumes import VolumeUnderTest


@pytest.fixture
def archive() -> Path:
    return shared_data("cifar10-test.tar.xz")


@pytest.fixture
def images(archive: Path, scratch: Path) -> Path:
    folder = scratch / "images"
    folder.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], check=True)
    return folder


@pytest.mark.timeout(300)
def test_an_archive_of_images_is_what_tar_unpacks(
    volume: VolumeUnderTest, archive: Path, images: Path
) -> None:
    need_fuse()
    answer("import", archive, f"{volume.name}:/data")
    point = volume.mount()
    wrong = differences(tree_of(images, times=True), tree_of(point / "data", times=True))
    # The target folder itself is made by the import, with times and owner of its own.
    assert [line for line in wrong if not line.startswith("b'' is")] == []
    volume.unmount(point)


@pytest.mark.timeout(300)
def test_a_folder_of_images_trains(volume: VolumeUnderTest, images: Path) -> None:
    answer("import", images, f"{volume.name}:/data")
    dataset = volume.connect().seal("/data/test")
    on_disk = sorted((images / "test").rglob("*.jpg"))
    assert len(dataset) == len(on_disk) == 10_000
    assert len(dataset.classes) == 10
    assert sorted(dataset.classes) == sorted(os.listdir(images / "test"))
    seen = np.zeros(10_000, dtype=np.int64)
    for batch in headrace.Loader(dataset, batch_size=256, shuffle=True, seed=1):
        for row, sample, label in zip(batch.indices.tolist(), batch, batch.labels.tolist(), strict=True):
            path = dataset.paths[row]
            assert sample.tobytes() == (images / "test" / path).read_bytes()
            assert dataset.classes[label] == path.split("/")[0]
            seen[row] += 1
    assert (seen == 1).all()


@pytest.mark.timeout(300)
def test_small_files_take_little_more_than_their_bytes(volume: VolumeUnderTest, images: Path) -> None:
    """One copy: at most 1.2 x the bytes + 64 a file below 2 KiB, metadata aside."""
    answer("import", images, f"{volume.name}:/data")
    volume.connect().sync()
    volume.stop()
    files = [path for path in images.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    assert max(path.stat().st_size for path in files) < 2048
    stored = sum(path.stat().st_size for path in volume.segments())
    assert stored <= 1.2 * total + 64 * len(files), f"{stored / total:.3f} x the bytes"


def test_files_of_10_kib_take_a_quarter_more_at_most(mount: Path, volume: VolumeUnderTest) -> None:
    for number in range(2000):
        (mount / f"{number}").write_bytes(os.urandom(10_240))
    volume.connect().sync()
    volume.unmount(mount)
    volume.stop()
    stored = sum(path.stat().st_size for path in volume.segments())
    assert stored <= 1.25 * 2000 * 10_240, f"{stored / (2000 * 10_240):.3f} x the bytes"


@pytest.mark.timeout(600)
def test_site_packages_come_back_the_same(volume: VolumeUnderTest) -> None:
    need_fuse()
    source = Path(sysconfig.get_path("purelib"))
    before = tree_of(source, times=True)
    imported = answer("import", source, f"{volume.name}:/site-packages")
    assert imported["complete"] is True
    after = tree_of(source, times=True)  # what changed meanwhile (byte code) is not the import's fault
    steady = {name: node for name, node in before.items() if after.get(name) == node}
    assert len(steady) > 1000
    volume.restart()
    point = volume.mount()
    found = tree_of(point / "site-packages", times=True)
    wrong = differences(steady, {name: found[name] for name in steady if name in found})
    assert wrong == []
    volume.unmount(point)


@pytest.mark.parametrize("cut", [1312, 1536, 1836, 2448])
def test_a_cut_archive_is_named_and_what_was_whole_is_in(
    volume: VolumeUnderTest, scratch: Path, cut: int
) -> None:
    """Case 27: three members of 1,000 bytes, cut inside a member, at its edge, inside a header."""
    path = scratch / "three.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in "abc":
            (scratch / name).write_bytes(name.encode() * 1000)
            tar.add(scratch / name, name)
    os.truncate(path, cut)
    said = failure("import", path, f"{volume.name}:/data", code=6)
    assert "three.tar" in said
    api = volume.connect()
    names = api.listdir("/data") if api.exists("/data") else []
    whole = cut // 1536
    assert names[:whole] == list("abc")[:whole]
    for name in names:
        assert api.read_bytes(f"/data/{name}") == name.encode() * 1000, "a cut member must not be in"


def test_a_flipped_byte_in_a_compressed_archive_is_found(
    volume: VolumeUnderTest, archive: Path, scratch: Path
) -> None:
    damaged = scratch / "damaged.tar.xz"
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 0x10
    damaged.write_bytes(content)
    assert "damaged.tar.xz" in failure("import", damaged, f"{volume.name}:/data", code=6)


def test_sockets_pipes_and_unreadable_files_are_named_and_left_out(
    volume: VolumeUnderTest, scratch: Path
) -> None:
    import socket

    top = scratch / "odd"
    top.mkdir()
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(top / "socket"))
    (top / os.fsdecode(b"caf\xe9")).write_bytes(b"x")
    (top / "file").write_bytes(b"y")
    (top / "dangling").symlink_to("nowhere")
    said = answer("import", top, f"{volume.name}:/odd", code=0 if os.geteuid() == 0 else 6)
    api = volume.connect()
    assert api.read_bytes(b"/odd/caf\xe9") == b"x"
    assert api.readlink("/odd/dangling") == "nowhere"
    kinds = {entry.name: entry.kind.value for entry in api.scandir("/odd")}
    for name, kind in (("pipe", "fifo"), ("socket", "socket")):
        assert kinds.get(name) == kind or any(problem["path"].endswith(name) for problem in said["problems"])
