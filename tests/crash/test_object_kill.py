"""Case 18 with an object tier: kill -9 of the engine, of the store, of both; what fsync acknowledged is in
the bucket and is read back when nothing is left on flash.

As in test_kill_nine.py a writer (writer.py) journals what was acknowledged, and `Expected` says what must be
there. All runs share one volume, each its own folder of it: making one takes longer than a run.
A writer that outlives its store goes on when the store is back, and must come to its end.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash.test_kill_nine import STEPS, Expected, read_all
from support.fault_proxy import FaultProxy
from support.objects import SeaweedFS
from support.system import kill_and_wait, need_fuse, wait_until
from support.volumes import ObjectVolumeUnderTest

VICTIMS = ("engine", "store", "both")
Shared = tuple[ObjectVolumeUnderTest, FaultProxy]


def start_writer(
    volume: ObjectVolumeUnderTest, road: str, seed: int, journal: Path
) -> subprocess.Popen[bytes]:
    place = volume.name
    if road == "mount":
        need_fuse()
        place = str(volume.mount() / "work")
    program = Path(__file__).with_name("writer.py")
    return subprocess.Popen(
        [sys.executable, str(program), road, place, str(journal), str(seed), str(STEPS)],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}/python"},
    )


def kill_once(volume: ObjectVolumeUnderTest, store: SeaweedFS, victim: str, seed: int, journal: Path) -> None:
    draw = random.Random(seed)
    journal.touch()
    volume.connect().makedirs("/work")
    volume.connect().sync()
    writer = start_writer(volume, ["mount", "api"][seed % 2], seed, journal)
    try:
        # The moment counts from the first acknowledged step: an interpreter starts in its own time.
        wait_until(
            lambda: b"done" in journal.read_bytes() or writer.poll() is not None, 30, "the writer's start"
        )
        time.sleep(draw.uniform(0.0, 1.2))
        if victim != "engine":
            store.kill()
        if victim == "both":
            time.sleep(draw.choice([0.0, 0.3]))
        if victim != "store":
            kill_and_wait(volume.pid)
            volume.close()
            volume.detach()
        if victim != "engine":
            time.sleep(draw.uniform(0.0, 0.5))
            store.restart()
        # Only one whose engine was killed may end with an error.
        assert writer.wait(90) in ((0,) if victim == "store" else (0, 3))
    finally:
        if writer.poll() is None:
            writer.kill()
            writer.wait()
    expected = Expected(seed, journal)
    assert expected.acknowledged, "nothing was acknowledged: the run proves nothing"
    if victim == "store":
        assert expected.acknowledged == STEPS
    else:
        volume.start()
    expected.check(read_all(volume))
    volume.connect().sync()
    assert volume.status().dirty_segments == 0
    volume.evict()
    expected.check(read_all(volume))
    # The next run has its own folder.
    volume.close()
    volume.detach()
    volume.connect().rename("/work", f"/run-{seed}")


@pytest.mark.parametrize("seed", range(10))
def test_what_was_acknowledged_is_in_the_store(
    shared_volume: Shared, object_server: SeaweedFS, scratch: Path, seed: int
) -> None:
    kill_once(shared_volume[0], object_server, VICTIMS[seed % 3], seed, scratch / "journal")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_what_was_acknowledged_is_in_the_store_a_hundred_times(
    shared_volume: Shared, object_server: SeaweedFS, scratch: Path, seed: int
) -> None:
    kill_once(shared_volume[0], object_server, VICTIMS[seed % 3], seed, scratch / "journal")
