"""Cases 1 to 4 of the fault list: forks, pickles, ends of programs, and what is left of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from support.samples import SAMPLES, check, fill, rows_of, worker
from support.system import ROOT, alive, kill_and_wait, wait_until
from support.volumes import VolumeUnderTest

ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'tests'}"}


@pytest.fixture
def dataset(volume: VolumeUnderTest) -> headrace.Dataset:
    return fill(volume.connect())


# Case 1


@pytest.mark.parametrize("read_before", [False, True])
def test_a_fork_reads_on_both_sides(dataset: headrace.Dataset, read_before: bool) -> None:
    """Open in the parent, read, fork, read in the child, read again in the parent: 200 times."""
    for turn in range(200):
        if read_before:
            check(dataset, rows_of(turn))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                check(dataset, rows_of(turn + 1))
                status = 0
            finally:
                os._exit(status)
        check(dataset, rows_of(turn + 2))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("read_before", [False, True])
def test_eight_workers_read_batches(dataset: headrace.Dataset, method: str, read_before: bool) -> None:
    if read_before:
        check(dataset, rows_of(0))
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    workers = [
        context.Process(target=worker, args=(dataset, range(25 * number, 25 * number + 25), answers))
        for number in range(8)
    ]
    for process in workers:
        process.start()
    check(dataset, rows_of(1))
    for process in workers:
        process.join(120)
    assert [process.exitcode for process in workers] == [0] * 8
    assert sum(answers.get() for _ in workers) == 200 * 256
    answers.close()
    check(dataset, rows_of(2))


def test_a_fork_in_mid_epoch_goes_on_on_both_sides(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, batch_size=64, shuffle=True, seed=3)
    expected = [batch.indices.tolist() for batch in headrace.Loader(dataset, 64, shuffle=True, seed=3)]
    batches = iter(loader)
    seen = [next(batches).indices.tolist() for _ in range(5)]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rest = [batch.indices.tolist() for batch in batches]
            status = 0 if seen + rest == expected else 2
        finally:
            os._exit(status)
    seen += [batch.indices.tolist() for batch in batches]
    assert seen == expected
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_batch_that_a_fork_copied_stays_whole(dataset: headrace.Dataset) -> None:
    batches = iter(headrace.Loader(dataset, batch_size=64))
    kept = next(batches)
    before = kept.data.tobytes()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in batches:
                assert kept.data.tobytes() == before
            status = 0
        finally:
            os._exit(status)
    for _ in batches:
        assert kept.data.tobytes() == before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Case 2


def test_pickles_are_small_and_hold_no_secrets(dataset: headrace.Dataset) -> None:
    os.environ["HEADRACE_TEST_SECRET"] = "hush-hush"
    loader = headrace.Loader(dataset, batch_size=256, shuffle=True)
    try:
        sizes = set()
        for _ in range(2):
            for thing in (dataset, loader):
                raw = pickle.dumps(thing)
                sizes.add(len(raw))
                assert b"hush-hush" not in raw
            next(iter(loader))
            check(dataset, rows_of(0))
            assert dataset.labels is not None
        assert max(sizes) < 1024
    finally:
        del os.environ["HEADRACE_TEST_SECRET"]
    again = pickle.loads(pickle.dumps(loader))
    assert [b.indices.tolist() for b in again] == [
        b.indices.tolist() for b in headrace.Loader(dataset, 256, shuffle=True)
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_million_samples_pickle_as_small(volume: VolumeUnderTest) -> None:
    from headrace.model.message import Kind, PutEntry

    api = volume.connect()
    for folder in range(100):
        entries = [
            PutEntry(b"/m/%03d/%06d" % (folder, number), kind=Kind.FILE, mode=0o644, size=1)
            for number in range(10_000)
        ]
        api.put(entries, [b"x" * 10_000], parents=True)
    dataset = api.seal("/m")
    assert len(dataset) == 1_000_000
    check_bytes = len(pickle.dumps(dataset))
    begin = time.monotonic()
    again = pickle.loads(pickle.dumps(dataset))
    assert again[999_999] == b"x"
    assert time.monotonic() - begin < 2
    assert check_bytes < 1024
    begin = time.monotonic()
    first = next(iter(headrace.Loader(dataset, 256, shuffle=True)))
    assert len(first) == 256 and time.monotonic() - begin < 2
    assert dataset.labels.max() == 99


# Case 3

PROGRAM = """
import os, signal, sys, time
import headrace

volume = headrace.connect(sys.argv[1], start=False)
dataset = volume.dataset(sys.argv[2])
where = sys.argv[3]

def decode(view):
    if where == "decode":
        print("ready", flush=True)
        time.sleep(60)
    return view[0]

if where == "start":
    print("ready", flush=True)
    time.sleep(60)
loader = headrace.Loader(dataset, batch_size=64, shuffle=True, decode=decode)
batches = iter(loader)
batch = next(batches)
if where == "end":
    sys.exit(0)
print("ready", flush=True)
if where == "hold":
    time.sleep(60)
sys.stdin.read(1)  # until the engine is stopped
print("waiting", flush=True)
while True:
    for batch in batches:
        pass
    batches = iter(loader)
"""


def program(dataset: headrace.Dataset, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, dataset.volume.path, dataset.seal, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def test_a_program_that_ends_after_one_batch_ends(dataset: headrace.Dataset) -> None:
    process = program(dataset, "end")
    begin = time.monotonic()
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (0, "", "")
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["start", "wait", "decode"])
def test_a_signal_ends_a_program_within_two_seconds(
    dataset: headrace.Dataset, volume: VolumeUnderTest, where: str, number: signal.Signals
) -> None:
    pid = volume.pid
    process = program(dataset, where)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        if where == "wait":
            os.kill(pid, signal.SIGSTOP)
            process.stdin.write("x")
            process.stdin.flush()
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.3)
        begin = time.monotonic()
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
        assert time.monotonic() - begin < 2
    finally:
        os.kill(pid, signal.SIGCONT)
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == -number
    assert error.count("Traceback") == (1 if number == signal.SIGINT else 0), error
    check(dataset, rows_of(0))
    wait_until(lambda: dataset.volume.status().streams == 0, 5, "end of the program's stream")


def test_what_a_killed_program_pinned_is_free_in_five_seconds(
    dataset: headrace.Dataset, volume: VolumeUnderTest
) -> None:
    """Also when a child of its lives on with the sockets it inherited."""
    api = volume.connect()
    before = api.status()
    process = program(dataset, "hold")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    held = api.status()
    assert held.streams == before.streams + 1
    assert held.buffers_bytes > before.buffers_bytes
    process.kill()
    process.communicate()

    def freed() -> bool:
        now = api.status()
        return (now.streams, now.buffers_bytes) == (before.streams, before.buffers_bytes)

    wait_until(freed, 5, "what the killed program pinned")


FORKING = """
import os, sys, time
import headrace

dataset = headrace.connect(sys.argv[1], start=False).dataset(sys.argv[2])
batches = iter(headrace.Loader(dataset, batch_size=64))
batch = next(batches)
child = os.fork()
if child == 0:
    time.sleep(120)
print(child, flush=True)
time.sleep(120)
"""


def test_a_forked_child_does_not_keep_a_killed_parents_pins(
    dataset: headrace.Dataset, volume: VolumeUnderTest
) -> None:
    api = volume.connect()
    before = api.status()
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, volume.name, dataset.seal],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        assert alive(child)
        wait_until(lambda: api.status().streams == before.streams, 5, "the killed parent's stream")
    finally:
        kill_and_wait(child)
        process.stdout.close()


# Case 4


def test_loops_broken_off_leave_nothing(dataset: headrace.Dataset, volume: VolumeUnderTest) -> None:
    def usage() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:")
        return len(os.listdir("/proc/self/fd")), maps

    def once() -> None:
        for _ in headrace.Loader(dataset, batch_size=64, shuffle=True):
            break

    for _ in range(10):
        once()
    before, engine_before = usage(), volume.connect().status()
    for _ in range(100):
        once()
    after = usage()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, (before, after)
    wait_until(lambda: volume.connect().status().streams == 0, 5, "end of streams")
    engine_after = volume.connect().status()
    assert engine_after.resident_bytes < engine_before.resident_bytes + (32 << 20)
    assert engine_after.buffers_bytes <= engine_before.buffers_bytes + (1 << 20)


def test_a_kept_batch_is_never_overwritten(dataset: headrace.Dataset) -> None:
    kept = [(batch, batch.data.tobytes()) for batch in headrace.Loader(dataset, batch_size=100, shuffle=True)]
    for _ in headrace.Loader(dataset, batch_size=100, shuffle=True, seed=9):
        pass
    for batch, before in kept:
        assert batch.data.tobytes() == before
    numbers = np.concatenate([batch.indices for batch, _ in kept])
    assert sorted(numbers.tolist()) == list(range(SAMPLES))
