"""Snapshots under kill -9: making one, restoring one and deleting one are done or not done, never in part.

An engine dies at a named point of `headrace_base::crash`, or at a random moment between random requests.
The next one must show one of the two states around the request in flight, with every other snapshot as it
was; the request can be repeated; and when all snapshots are deleted, not a row of them is left.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

import headrace
from headrace.errors import HeadraceError
from headrace.model.message import Kind
from support.system import kill_and_wait, wait_until
from support.volumes import VolumeUnderTest

Make = Callable[[str], VolumeUnderTest]
Tree = dict[str, tuple[str, bytes]]

POINTS = [
    ("snapshot", "meta.before_seal"),
    ("snapshot", "after-snapshot"),
    ("restore", "meta.before_seal"),
    ("restore", "restore-begun"),
    ("restore", "meta.before_restore"),
    ("restore", "meta.after_restore"),
    ("restore", "restored"),
    ("delete", "after-snapshot-delete"),
    ("delete", "meta.before_clean"),
    ("delete", "meta.after_clean"),
    ("delete", "clean-step"),
    ("delete", "clean-end"),
    ("delete_seal", "after-seal-delete"),
]


def tree(api: headrace.Volume, top: str = "/") -> Tree:
    """Paths below `top`, with kinds and contents."""
    found: Tree = {}
    waiting = [(top, "")]
    while waiting:
        folder, shown = waiting.pop()
        for entry in api.scandir(folder):
            path = f"{shown}/{entry.name}"
            kind = entry.stat(follow_links=False).kind
            content = api.read_bytes(entry.path) if kind is Kind.FILE else b""
            found[path] = (kind.value, content)
            if kind is Kind.DIRECTORY:
                waiting.append((entry.path, path))
    return found


def stored_rows(volume: VolumeUnderTest) -> tuple[int, int, int]:
    """Rows of versioned keys, how many keys they are, and how many say that one was deleted."""
    with closing(sqlite3.connect(f"file:{volume.folder}/meta/volume.sqlite?mode=ro", uri=True)) as database:
        counted = database.execute(
            "SELECT count(*), count(DISTINCT key), count(*) - count(value) FROM kv WHERE key >= x'61'"
        ).fetchone()
    return (counted[0], counted[1], counted[2])


def is_clean(volume: VolumeUnderTest) -> bool:
    rows, keys, deletions = stored_rows(volume)
    return rows == keys and deletions == 0


def fill(api: headrace.Volume, turn: int) -> None:
    for number in range(20):
        api.write_bytes(f"/d{number % 3}/f{number}", b"%d of turn %d" % (number, turn) * 300, parents=True)
    api.write_bytes(f"/large{turn}", bytes([turn]) * (3 << 20))


@pytest.mark.parametrize(("request_", "point"), POINTS)
def test_at_a_named_point(new_volume: Make, request_: str, point: str) -> None:
    volume = new_volume("vol")
    volume.start()
    api = volume.connect()
    fill(api, 1)
    seal = api.seal("/d0").seal
    api.snapshot("one")
    first = tree(api)
    for number in range(0, 20, 2):
        api.remove(f"/d{number % 3}/f{number}")
    api.remove("/large1")
    fill(api, 2)
    api.snapshot("two")
    api.remove("/large2")
    second = tree(api)
    api.sync()
    volume.stop()

    pid = volume.start(crash_at=point).pid
    api = volume.connect()
    requests: dict[str, Callable[[], object]] = {
        "snapshot": lambda: api.snapshot("new"),
        "restore": lambda: api.restore_snapshot("one"),
        "delete": lambda: api.delete_snapshot("one"),
        "delete_seal": lambda: api.delete_seal(seal),
    }
    with suppress(HeadraceError):
        requests[request_]()
    volume.wait_for_crash(pid)
    volume.close()

    volume.start()
    api = volume.connect()
    names = {one.name for one in api.snapshots()}
    now = tree(api)
    assert now == second or (request_ == "restore" and now == first)
    assert tree(api, "/.snapshots/two") == {**second, "/large2": ("file", bytes([2]) * (3 << 20))}
    if b"one" in names:
        assert tree(api, "/.snapshots/one") == first
    else:
        assert request_ == "delete"
    if b"new" in names:
        assert tree(api, "/.snapshots/new") == second
    # What was cut short can be done again.
    if request_ == "restore":
        api.restore_snapshot("one")
        assert tree(api) == first
    elif request_ == "snapshot" and b"new" not in names:
        api.snapshot("new")
    # And when everything is given up, nothing is left.
    for one in api.snapshots():
        api.delete_snapshot(one.name)
    for sealed in api.seals():
        api.delete_seal(sealed.seal)
    wait_until(lambda: is_clean(volume), 20, "no row is left that nobody needs")
    assert list((volume.folder / "manifests").iterdir()) == []
    now = tree(api)
    volume.restart()
    assert tree(volume.connect()) == now
    assert is_clean(volume)


def run_at_random(volume: VolumeUnderTest, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    volume.start()
    api = volume.connect()
    live: Tree = {}
    snapshots: dict[str, Tree] = {}
    for _ in range(kills):
        pid = volume.pid
        killer = threading.Timer(chance.uniform(0.0, 0.4), kill_and_wait, [pid])
        killer.start()
        # The states that the request in flight may leave, and how each is to be remembered.
        after: tuple[Tree, dict[str, Tree]] = (live, snapshots)
        before_restore = False
        try:
            while True:
                after, before_restore = (live, snapshots), False
                step = chance.choice(["write", "write", "write", "remove", "snapshot", "delete", "restore"])
                if step == "write":
                    path = f"/f{chance.randrange(12)}"
                    content = chance.randbytes(chance.choice([10, 5_000, 200_000]))
                    after = ({**live, path: ("file", content)}, snapshots)
                    api.write_bytes(path, content)
                    api.sync()
                elif step == "remove" and live:
                    path = chance.choice(sorted(live))
                    after = ({name: what for name, what in live.items() if name != path}, snapshots)
                    api.remove(path)
                    api.sync()
                elif step == "snapshot":
                    name = f"s{chance.randrange(5)}"
                    if name in snapshots:
                        continue
                    after = (live, {**snapshots, name: live})
                    api.snapshot(name)
                elif step == "delete" and snapshots:
                    name = chance.choice(sorted(snapshots))
                    after = (live, {other: what for other, what in snapshots.items() if other != name})
                    api.delete_snapshot(name)
                elif step == "restore" and snapshots:
                    name = chance.choice(sorted(snapshots))
                    after, before_restore = (snapshots[name], snapshots), True
                    kept = api.restore_snapshot(name).before.decode()
                    after = (snapshots[name], {**snapshots, kept: live})
                live, snapshots = after
        except HeadraceError:
            pass
        killer.join()
        volume.close()
        volume.start()
        api = volume.connect()
        found = {one.name.decode(): tree(api, f"/.snapshots/{one.name.decode()}") for one in api.snapshots()}
        if before_restore:
            for name in sorted(found.keys() - snapshots.keys()):
                assert name.startswith("before-restore-") and found[name] == live, (seed, name)
                snapshots, after = {**snapshots, name: live}, (after[0], {**after[1], name: live})
        now = (tree(api), found)
        assert now == (live, snapshots) or now == after, seed
        live, snapshots = now
    for name in snapshots:
        api.delete_snapshot(name)
    wait_until(lambda: is_clean(volume), 30, "no row is left that nobody needs")
    assert tree(api) == live, seed


def test_at_random_moments(new_volume: Make) -> None:
    run_at_random(new_volume("vol"), int(time.time()), 5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_at_random_moments_often(new_volume: Make, seed: int) -> None:
    run_at_random(new_volume("vol"), seed, 10)
