"""The mount against the local disk: the same random operations give the same answers and the same tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reference.operations import Actor, Operation, Script
from support.system import need_fuse
from support.trees import differences, tree_of
from support.volumes import VolumeUnderTest

OPERATIONS = 2_400
COMPARE_EVERY = 300
RESTART_EVERY = 800


class Pair:
    """A plain folder and a folder of a mount that live through the same."""

    def __init__(self, plain: Path, mounted: Path, seed: int) -> None:
        self.seed = seed
        self.plain = plain
        self.script = Script(seed)
        self._actors = [Actor(plain), Actor(mounted)]
        self._done: list[Operation] = []

    def step(self) -> None:
        if len(self._done) % 10 == 0:
            self.script.paths = [
                os.path.relpath(os.path.join(folder, name), os.fsencode(self.plain))
                for folder, folders, files in os.walk(os.fsencode(self.plain))
                for name in [*folders, *files]
            ]
        operation = self.script.next()
        self._done.append(operation)
        expected, found = (actor.apply(operation) for actor in self._actors)
        assert found == expected, f"mount: {_short(found)}, local disk: {_short(expected)}; {self.history()}"

    def history(self) -> str:
        last = "\n".join(f"  {_short(operation)}" for operation in self._done[-15:])
        return f"seed {self.seed}, operation {len(self._done)}; the last ones were\n{last}"

    def close(self) -> None:
        for actor in self._actors:
            actor.close_all()

    def move_to(self, mounted: Path) -> None:
        self.close()
        self._actors[1] = Actor(mounted)

    def compare(self, mounted: Path, when: str) -> None:
        wrong = differences(tree_of(self.plain), tree_of(mounted))
        assert not wrong, f"{when}: {len(wrong)} names differ: {wrong[:5]}; {self.history()}"


def _short(value: object) -> str:
    if isinstance(value, bytes) and len(value) > 150:
        return f"{len(value)} bytes {value[:8]!r}..."
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_short, value)) + ")"
    return repr(value)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_mount_does_what_a_local_disk_does(volume: VolumeUnderTest, plain_dir: Path, seed: int) -> None:
    run(volume, plain_dir, seed, OPERATIONS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_the_mount_does_what_a_local_disk_does_for_long(
    volume: VolumeUnderTest, plain_dir: Path, seed: int
) -> None:
    run(volume, plain_dir, seed, 10_000)


def run(volume: VolumeUnderTest, plain: Path, seed: int, operations: int) -> None:
    need_fuse()
    mounted = volume.mount()
    pair = Pair(plain, mounted, seed)
    try:
        for number in range(1, operations + 1):
            pair.step()
            if number % COMPARE_EVERY == 0:
                pair.compare(mounted, f"after {number} operations")
            if number % RESTART_EVERY == 0:
                pair.close()
                volume.unmount(mounted)
                volume.restart()
                mounted = volume.mount()
                pair.move_to(mounted)
                pair.compare(mounted, f"after {number} operations and a restart")
    finally:
        pair.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [11, 12])
def test_what_was_synced_is_kept_by_kill_9(volume: VolumeUnderTest, plain_dir: Path, seed: int) -> None:
    run_with_kills(volume, plain_dir, seed, rounds=5)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(200, 210))
def test_what_was_synced_is_kept_by_kill_9_for_long(
    volume: VolumeUnderTest, plain_dir: Path, seed: int
) -> None:
    run_with_kills(volume, plain_dir, seed, rounds=20)


def run_with_kills(volume: VolumeUnderTest, plain: Path, seed: int, rounds: int) -> None:
    """Each round: random operations in `kept`, a sync of the volume, then, in `loose`, operations that are
    not synced and files that are fsynced one by one; kill -9; `kept` and those files are whole."""
    need_fuse()
    mounted = volume.mount()
    (plain / "kept").mkdir()
    (mounted / "kept").mkdir()
    kept = Pair(plain / "kept", mounted / "kept", seed)
    noise = Script(seed + 1)
    for number in range(rounds):
        for _ in range(200):
            kept.step()
        kept.close()
        volume.connect().sync()

        loose = mounted / f"loose-{number}"
        loose.mkdir()
        actor = Actor(loose)
        fsynced: dict[str, bytes] = {}
        for step in range(60):
            actor.apply(noise.next())
            if step % 6 == 0:
                name, content = f"fsynced-{step}", b"%d " % step * (step * 50)
                with open(loose / name, "xb", buffering=0) as file:
                    file.write(content)
                    os.fsync(file.fileno())
                fsynced[name] = content
        volume.kill()
        actor.close_all()

        ready = volume.start()
        mounted = volume.mount()
        kept.move_to(mounted / "kept")
        kept.compare(mounted / "kept", f"after kill -9 in round {number}, recovery said {ready.recovery}")
        found = {name: (mounted / f"loose-{number}" / name).read_bytes() for name in fsynced}
        assert found == fsynced, (
            f"round {number}: {[name for name in fsynced if found[name] != fsynced[name]]}"
        )
        tree_of(mounted)  # what was not synced may be there or not, but is whole
    volume.unmount(mounted)
