"""Case 18: what fsync acknowledged survives kill -9 at every named step, and the tree is whole.

A writer process (writer.py) works on a volume and journals what was acknowledged. Its engine dies, at a point
of `headrace_base::crash` or at a random moment. A new engine recovers; then every acknowledged step is there,
the one in flight is there, or not, or in part, everything else is untouched, and all files can be read, by
path and from a fresh sealed view.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.writer import content_of, plan
from headrace.errors import HeadraceError
from support.system import alive, kill_and_wait, need_fuse, wait_until
from support.volumes import VolumeUnderTest

Make = Callable[[str], VolumeUnderTest]
STEPS = 60

# Points that writing and fsync pass, with how often a run of 60 steps passes each at least.
POINTS = {
    "after-announce": 1,
    "after-append": 5,
    "after-data-sync": 5,
    "before-commit": 5,
    "after-commit": 5,
    "meta.before_commit": 20,
    "meta.after_commit": 20,
    "after-file-data": 1,
}
# Points that a seal or a clean stop passes.
LATE_POINTS = ["meta.before_seal", "after-seal", "after-footer", "during-close"]


class Expected:
    """What the journal promises about the volume."""

    def __init__(self, seed: int, journal: Path) -> None:
        lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
        done = {line["done"] for line in lines if "done" in line}
        self.in_flight = next(
            (line["intend"] for line in lines if "intend" in line and line["intend"] not in done), None
        )
        self.errors = [line for line in lines if "error" in line]
        self.acknowledged = len(done)
        self.files: dict[str, bytes] = {}
        self._seed = seed
        self._plan = plan(seed, STEPS)
        for what in self._plan:
            if what["step"] in done:
                self._apply(self.files, what)

    def _apply(self, files: dict[str, bytes], what: dict[str, Any]) -> None:
        name, data = what["name"], content_of(self._seed, what["step"], what["size"])
        if what["kind"] == "remove":
            del files[name]
        elif what["kind"] in ("append", "overwrite"):
            old, offset = files[name], what["offset"]
            files[name] = old[:offset] + data + old[offset + len(data) :]
        else:
            files[name] = data

    def check(self, found: dict[str, bytes]) -> None:
        name_in_flight = ""
        if self.in_flight is not None:
            what = self._plan[self.in_flight]
            name_in_flight = what["name"]
            after = dict(self.files)
            self._apply(after, what)
            self._check_in_flight(
                what, self.files.get(name_in_flight), after.get(name_in_flight), found.get(name_in_flight)
            )
        loose = {name_in_flight, name_in_flight + ".tmp"} if name_in_flight else set()
        assert set(found) - loose == set(self.files) - loose
        for name, content in self.files.items():
            if name not in loose:
                assert found[name] == content, f"{name}: {first_difference(found[name], content)}"

    def _check_in_flight(
        self, what: dict[str, Any], old: bytes | None, new: bytes | None, found: bytes | None
    ) -> None:
        """Old, new or between; but a replacement by rename is never between, and nothing is foreign."""
        words = f"step in flight {what}"
        if found is None:
            assert old is None or new is None, f"{words}: the file is gone"
            return
        if what["kind"] in ("replace", "remove"):
            assert found in (old, new), f"{words}: neither the old content nor the new"
            return
        assert new is not None
        assert len(found) <= max(len(old or b""), len(new)), f"{words}: {len(found)} bytes"
        for offset in range(0, len(found), 4096):
            block = found[offset : offset + 4096]
            mixed = [(old or b"")[offset : offset + len(block)], new[offset : offset + len(block)]]
            if block in mixed:
                continue
            sources = [part.ljust(len(block), b"\0") for part in mixed]
            foreign = [at for at, byte in enumerate(block) if byte not in (sources[0][at], sources[1][at], 0)]
            assert not foreign, f"{words}: foreign bytes at {offset + foreign[0]}"


def first_difference(found: bytes, expected: bytes) -> str:
    at = next(
        (at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    return f"{len(found)} bytes, expected {len(expected)}; first difference at {at}"


def read_all(volume: VolumeUnderTest) -> dict[str, bytes]:
    """Every file by path; a sealed view of the same tree must agree."""
    api = volume.connect()
    found = {name: api.read_bytes("/work/" + name) for name in api.listdir("/work")}
    dataset = api.seal("/work")
    sealed = dict(zip(dataset.paths, dataset[:], strict=True))
    assert sealed == found
    return found


def start_writer(volume: VolumeUnderTest, road: str, seed: int, journal: Path) -> subprocess.Popen[bytes]:
    place = volume.name
    if road == "mount":
        need_fuse()
        place = str(volume.mount() / "work")
    root = Path(__file__).parents[2]
    program = Path(__file__).with_name("writer.py")
    return subprocess.Popen(
        [sys.executable, str(program), road, place, str(journal), str(seed), str(STEPS)],
        env=os.environ | {"PYTHONPATH": f"{root}/python"},
    )


def finish(volume: VolumeUnderTest, pid: int) -> int:
    """Seals, then stops the engine as SIGTERM does; returns what it ended with (negative: a signal)."""
    try:
        api = volume.connect()
        api.seal("/work")
        volume.close()
    except HeadraceError:
        pass  # it died in the seal, which is what some points want
    if alive(pid):
        os.kill(pid, signal.SIGTERM)
    status: list[int] = []

    def ended() -> bool:
        try:
            done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return not alive(pid)
        if done is None:
            return False
        status.append(done.si_status if done.si_code == os.CLD_EXITED else -done.si_status)
        return True

    wait_until(ended, 60, f"end of engine {pid}")
    return status[0] if status else 0


def crash_once(
    make: Make, scratch: Path, road: str, seed: int, *, at: str | None = None, after_seconds: float = 0.0
) -> None:
    volume = make("vol")
    volume.start()
    volume.connect().makedirs("/work")
    volume.connect().sync()
    volume.stop()
    journal = scratch / "journal"
    journal.touch()
    pid = volume.start(crash_at=at).pid
    writer = start_writer(volume, road, seed, journal)
    try:
        if at is None:
            time.sleep(after_seconds)
            kill_and_wait(pid)
        wait_until(
            lambda: writer.poll() is not None or not alive(pid), 120, "the writer's end or the engine's"
        )
        if alive(pid):
            volume.detach()
            ended = finish(volume, pid)
            assert ended == -signal.SIGKILL, f"{at} was never passed: the engine ended with {ended}"
        volume.close()
        volume.detach()
        assert writer.wait(60) in (0, 3)
    finally:
        if writer.poll() is None:
            writer.kill()
            writer.wait()
    expected = Expected(seed, journal)
    assert at is None or expected.acknowledged or int(at.partition(":")[2] or 1) < 6, (
        "nothing was acknowledged: the run proves nothing"
    )

    ready = volume.start()
    expected.check(read_all(volume))
    # And it goes on: what is written now is kept by a clean restart.
    volume.connect().write_bytes("/work/afterwards", b"afterwards", durable=True)
    volume.restart()
    found = read_all(volume)
    assert found.pop("afterwards") == b"afterwards"
    expected.check(found)
    assert isinstance(ready.recovery, list)


@pytest.mark.parametrize("road", ["mount", "api"])
@pytest.mark.parametrize("point", sorted(POINTS))
def test_at_a_named_step(new_volume: Make, scratch: Path, point: str, road: str) -> None:
    passes = POINTS[point]
    crash_once(new_volume, scratch, road, seed=7, at=f"{point}:{1 + passes // 2}")


@pytest.mark.parametrize("point", LATE_POINTS)
def test_in_a_seal_or_a_stop(new_volume: Make, scratch: Path, point: str) -> None:
    crash_once(new_volume, scratch, "mount", seed=8, at=point)


@pytest.mark.parametrize("seed", range(6))
def test_at_a_random_moment(new_volume: Make, scratch: Path, seed: int) -> None:
    moment = random.Random(seed).uniform(0.1, 1.0)
    crash_once(new_volume, scratch, ["mount", "api"][seed % 2], seed=seed, after_seconds=moment)


@pytest.mark.long
@pytest.mark.parametrize("road", ["mount", "api"])
@pytest.mark.parametrize("seed", range(100, 105))
@pytest.mark.parametrize("point", sorted(POINTS))
def test_at_every_named_step_often(new_volume: Make, scratch: Path, point: str, seed: int, road: str) -> None:
    # The first commits of the store are the engine's own, before it is ready.
    first = 6 if point.startswith("meta.") else 1
    number = random.Random(seed * 31 + sorted(POINTS).index(point)).randint(first, POINTS[point])
    crash_once(new_volume, scratch, road, seed=seed, at=f"{point}:{number}")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300, 340))
def test_at_many_random_moments(new_volume: Make, scratch: Path, seed: int) -> None:
    moment = random.Random(seed).uniform(0.05, 2.0)
    crash_once(new_volume, scratch, ["mount", "api"][seed % 2], seed=seed, after_seconds=moment)


def test_a_kill_in_recovery_is_recovered_from(new_volume: Make, scratch: Path) -> None:
    """Kill -9 right after each start, ten times over: recovery may be repeated."""
    volume = new_volume("vol")
    volume.start()
    api = volume.connect()
    for number in range(50):
        api.write_bytes(f"/work/{number}", b"%d" % number * 1000, parents=True, durable=True)
    volume.kill()
    for turn in range(10):
        pid = volume.start().pid
        if turn % 2:
            volume.connect().write_bytes("/work/turn", b"%d" % turn, durable=True)
        kill_and_wait(pid)
    volume.start()
    found = read_all(volume)
    assert found.pop("turn") == b"9"
    assert found == {f"{number}": b"%d" % number * 1000 for number in range(50)}


def test_recovery_says_what_it_did(new_volume: Make) -> None:
    volume = new_volume("vol")
    volume.start()
    volume.connect().write_bytes("/file", b"x" * 10_000, durable=True)
    volume.kill()
    ready = volume.start()
    assert ready.recovery, "an engine was killed and the next one has nothing to say about it"
    assert volume.connect().status().recovery == ready.recovery
    assert volume.restart().recovery == []


def test_garbage_of_a_crash_is_collected(new_volume: Make, scratch: Path) -> None:
    """A crash between segment and metadata leaves bytes that nothing names: they go."""
    volume = new_volume("vol")
    volume.start()
    volume.connect().write_bytes("/kept", b"kept" * 5000, durable=True)
    volume.stop()
    pid = volume.start(crash_at="after-file-data").pid
    with pytest.raises(HeadraceError), volume.connect().open("/large", "xb") as file:
        file.write(bytes(20 << 20))
        file.flush()
        file.raw.sync()  # type: ignore[attr-defined]
    wait_until(lambda: not alive(pid), 30)
    volume.close()
    volume.start()
    wait_until(
        lambda: sum(path.stat().st_size for path in volume.segments()) < 1 << 20,
        30,
        "collection of the garbage",
    )
    assert volume.connect().read_bytes("/kept") == b"kept" * 5000
