"""Packs that are mostly dead, or small from the start, are written anew; nothing that can be read is lost."""

from __future__ import annotations

import random
import threading

import pytest

import headrace
from headrace.errors import HeadraceError
from headrace.model.message import PutEntry
from support.object_volumes import Maker, content
from support.system import wait_until
from support.volumes import VolumeUnderTest

KIB = 1 << 10


def write(opened: headrace.Volume, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        opened.write_bytes(path, data)
    opened.sync()


def test_space_of_mostly_dead_packs_comes_back(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    files = {f"/{i:03}": content(i, 20 * KIB) for i in range(200)}
    write(opened, files)
    volume.restart()
    opened = volume.connect()
    before = {path: path.stat().st_size for path in volume.segments()}
    for i in range(200):
        if i % 10:
            opened.remove(f"/{i:03}")
    opened.sync()
    done = opened.compact()
    assert done.packs == len(before)
    wait_until(lambda: not set(before) & set(volume.segments()), 30, "the old packs to go")
    volume.restart()
    opened = volume.connect()
    for i in range(0, 200, 10):
        assert opened.read_bytes(f"/{i:03}") == files[f"/{i:03}"]
    # There is nothing more to gain.
    assert opened.compact().packs == 0


def test_small_objects_are_merged(make_volume: Maker) -> None:
    volume = make_volume()
    opened = volume.connect()
    files = {f"/{i}": content(i, 3000 + i) for i in range(40)}
    for path, data in files.items():
        opened.put([PutEntry(path.encode(), size=len(data))], [data], durable=True)
    assert len(volume.objects()) == 40
    assert opened.compact().packs == 40
    opened.sync()
    opened.backup()
    wait_until(lambda: len(volume.objects()) <= 2, 30, "the small objects to go")
    volume.evict()
    for path, data in files.items():
        assert opened.read_bytes(path) == data


def test_what_a_snapshot_names_stays_where_it_is(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    files = {f"/{i:03}": content(i, 20 * KIB) for i in range(100)}
    write(opened, files)
    # What was fsynced rides in the metadata for a while.
    volume.restart()
    opened = volume.connect()
    opened.snapshot("full")
    for i in range(1, 100):
        opened.remove(f"/{i:03}")
    assert opened.compact().packs == 0
    assert opened.read_bytes("/.snapshots/full/050") == files["/050"]
    opened.delete_snapshot("full")
    wait_until(lambda: opened.compact().packs > 0, 30, "the pack to be written anew")
    assert opened.read_bytes("/000") == files["/000"]


def test_packs_of_tiny_files_do_not_look_dead(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    write(opened, {f"/{i:04}": b"x" * (i % 3 + 1) for i in range(2000)})
    volume.restart()
    assert volume.connect().compact().packs == 0


def test_writers_beside_it_lose_nothing(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    files = {f"/{i:03}": content(i, 20 * KIB) for i in range(150)}
    write(opened, files)
    stop = threading.Event()
    failures: list[str] = []

    def churn(seed: int) -> None:
        draw = random.Random(seed)
        with headrace.connect(volume.name, start=False) as own:
            mine = [path for number, path in enumerate(files) if number % 3 == seed]
            while not stop.is_set():
                path = draw.choice(mine)
                data = draw.randbytes(draw.randrange(1, 40 * KIB))
                own.write_bytes(path, data)
                files[path] = data
                if own.read_bytes(path) != data:
                    failures.append(path)

    writers = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(8):
        opened.compact()
    stop.set()
    for writer in writers:
        writer.join()
    assert not failures
    volume.restart()
    opened = volume.connect()
    for path, data in files.items():
        assert opened.read_bytes(path) == data


@pytest.mark.parametrize("point", ["after-append", "after-data-sync", "before-commit", "after-compaction"])
def test_a_kill_in_the_middle_loses_nothing(volume: VolumeUnderTest, point: str) -> None:
    opened = volume.connect()
    files = {f"/{i:03}": content(i, 20 * KIB) for i in range(100)}
    write(opened, files)
    volume.stop()
    pid = volume.start().pid
    for i in range(100):
        if i % 5:
            volume.connect().remove(f"/{i:03}")
    volume.stop()
    pid = volume.start(crash_at=point).pid
    with pytest.raises((HeadraceError, OSError)):
        volume.connect().compact()
    volume.wait_for_crash(pid)
    volume.close()
    volume.start()
    opened = volume.connect()
    opened.compact()
    for i in range(0, 100, 5):
        assert opened.read_bytes(f"/{i:03}") == files[f"/{i:03}"]
