"""Batches in shared memory: kept ones are never overwritten, dropped ones come back, nothing leaks."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace
from headrace.errors import Corrupt, Internal, Invalid, Unavailable
from headrace.policy.order import permute
from support.fake_engine import FakeEngine, SlotStream, send_frame
from support.manifest_builder import SEAL_TEXT, build

N = 1200
BATCH = 8
CONTENTS = [b"%05d" % number * (1 + number % 50) for number in range(N)]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return sum("memfd:slot" in line for line in Path("/proc/self/maps").read_text().splitlines())


def batches(contents: list[bytes] = CONTENTS) -> list[list[bytes]]:
    return [contents[at : at + BATCH] for at in range(0, len(contents), BATCH)]


@pytest.fixture
def stream(fake_engine: FakeEngine) -> SlotStream:
    from support.fake_engine import Canned, memfd_of

    raw = build({f"c{number // 400}/{number:05}": CONTENTS[number] for number in range(N)})
    sealed = {
        "seal": SEAL_TEXT, "version": 3, "path": b"/data", "samples": N, "bytes": 1,
        "manifest_bytes": len(raw), "created_ns": 0,
    }  # fmt: skip
    fake_engine.answers["open_seal"] = lambda fields, payload: Canned(sealed, fds=[memfd_of(raw)])
    handler = SlotStream(batches())
    fake_engine.stream = handler
    return handler


@pytest.fixture
def dataset(fake_engine: FakeEngine, stream: SlotStream) -> headrace.Dataset:
    return headrace.connect(fake_engine.folder, start=False).dataset(SEAL_TEXT)


@pytest.fixture
def loader(dataset: headrace.Dataset) -> headrace.Loader:
    return headrace.Loader(dataset, BATCH)


def test_an_epoch_gives_every_batch_in_order(stream: SlotStream, loader: headrace.Loader) -> None:
    seen = []
    for number, batch in enumerate(loader):
        assert batch.number == number
        assert [sample.tobytes() for sample in batch] == CONTENTS[number * BATCH : (number + 1) * BATCH]
        assert batch.indices.tolist() == list(range(number * BATCH, number * BATCH + len(batch)))
        assert batch.labels.tolist() == [index // 400 for index in batch.indices]
        seen += batch.indices.tolist()
    assert seen == list(range(N))


def test_the_request_says_what_the_loader_was_told(
    fake_engine: FakeEngine, dataset: headrace.Dataset
) -> None:
    loader = headrace.Loader(
        dataset, BATCH, shuffle=True, seed=2**64 - 1, drop_last=True, prefetch=7, rank=1, world_size=3
    )
    loader.set_epoch(5)
    for _ in loader:
        break
    assert fake_engine.requests[-1] == {
        "seal": SEAL_TEXT, "batch_size": BATCH, "shuffle": True, "seed": 2**64 - 1, "epoch": 5,
        "drop_last": True, "first_batch": 0, "prefetch": 7, "rank": 1, "world_size": 3,
    }  # fmt: skip


def bytes_of(array: Any) -> bytes:
    return np.asarray(array).tobytes()


KEEPERS: dict[str, Any] = {
    "sample": lambda batch: batch[3],
    "slice of a sample": lambda batch: batch[3][1:][1:],
    "data": lambda batch: batch.data,
    "indices": lambda batch: batch.indices,
    "offsets": lambda batch: batch.offsets[2:4],
    "other dtype": lambda batch: batch.data[:40].view(np.uint32).reshape(2, 5).T,
    "memoryview": lambda batch: memoryview(batch[5])[2:],
    "array of a memoryview": lambda batch: np.asarray(memoryview(batch[5])),
    "frombuffer": lambda batch: np.frombuffer(batch[5], dtype=np.uint8),
    "iterated": lambda batch: list(batch)[6],
    "the base of a view": lambda batch: batch[3].base,
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_one_kept_view_keeps_its_batch_from_being_overwritten(
    stream: SlotStream, loader: headrace.Loader, keeper: str
) -> None:
    iterator = iter(loader)
    batch = next(iterator)
    kept = KEEPERS[keeper](batch)
    before = bytes_of(kept)
    del batch
    for _ in range(100):
        next(iterator)
    assert stream.released >= 95
    assert bytes_of(kept) == before
    released = stream.released
    del kept
    for batch in iterator:
        del batch
    assert stream.released > released + 20
    assert stream.made <= stream.slots


def test_every_kept_batch_has_a_slot_of_its_own(stream: SlotStream, loader: headrace.Loader) -> None:
    stream.slots = len(loader) + 2
    kept = list(loader)
    assert stream.made == len(loader)
    assert b"".join(batch.data.tobytes() for batch in kept) == b"".join(CONTENTS)


def test_batches_outlive_the_stream_the_loader_and_the_volume(
    stream: SlotStream, loader: headrace.Loader
) -> None:
    batch = next(iter(loader))
    for _ in range(20):
        for other in loader:
            assert other.number == 0
            break
    del loader, other
    gc.collect()
    assert [sample.tobytes() for sample in batch] == CONTENTS[:BATCH]


def test_breaking_off_100_times_leaks_nothing(stream: SlotStream, loader: headrace.Loader) -> None:
    for _ in loader:
        break
    del _
    fds, maps = open_fds(), mappings()
    for _ in range(100):
        for batch in loader:
            assert batch[0].tobytes() == CONTENTS[0]
            break
    del batch
    deadline = time.monotonic() + 5
    while open_fds() > fds and time.monotonic() < deadline:
        time.sleep(0.01)  # the fake engine's threads close their ends
    assert open_fds() <= fds
    assert mappings() <= maps
    assert maps <= 4  # the fake engine's own, of the last stream


def test_views_dropped_in_other_threads_come_back(stream: SlotStream, loader: headrace.Loader) -> None:
    stream.slots = 8
    held: list[Any] = []
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set() or held:
            if held:
                held.pop(0)
            else:
                time.sleep(0.0001)

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    count = 0
    for batch in loader:
        held.append(batch[0])
        count += 1
        del batch
    stop.set()
    for thread in threads:
        thread.join()
    assert count == len(loader)


def test_releases_wait_when_the_socket_is_full_and_go_out_later(
    stream: SlotStream, loader: headrace.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.client.wire import Channel

    real = Channel.try_send
    refusals = [True] * 10

    def full(channel: Channel, frames: bytes) -> bool:
        if refusals:
            refusals.pop()
            return False
        return real(channel, frames)

    stream.slots = 2
    monkeypatch.setattr(Channel, "try_send", full)
    assert sum(len(batch) for batch in loader) == N
    assert not refusals


def test_what_is_held_at_a_fork_is_never_given_back(stream: SlotStream, loader: headrace.Loader) -> None:
    iterator = iter(loader)
    batch = next(iterator)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # until the parent has gone on
        same = [sample.tobytes() for sample in batch] == CONTENTS[:BATCH]
        os._exit(0 if same else 1)
    del batch
    for _ in range(50):
        next(iterator)
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


def test_an_iterator_goes_on_in_both_after_a_fork(stream: SlotStream, loader: headrace.Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        numbers = [batch.number for batch in iterator]
        os._exit(0 if numbers == list(range(1, len(loader))) else 1)
    assert [batch.number for batch in iterator] == list(range(1, len(loader)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_sent_by_a_forked_child(stream: SlotStream, loader: headrace.Loader) -> None:
    iterator = iter(loader)
    batch = next(iterator)
    released = stream.released
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.05)
    assert stream.released == released
    assert batch[0].tobytes() == CONTENTS[0]


def test_errors_on_the_stream_are_raised_and_end_it(
    fake_engine: FakeEngine, dataset: headrace.Dataset
) -> None:
    def fail(engine: FakeEngine, sock: Any, fields: Any) -> None:
        send_frame(sock, {"event": "error", "kind": "corrupt", "errno": 5, "message": "segment X at 4096"})

    def refuse(engine: FakeEngine, sock: Any, fields: Any) -> None:
        send_frame(sock, {"error": {"kind": "corrupt", "errno": 5, "message": "segment X at 4096"}})

    for handler in (fail, refuse):
        fake_engine.stream = handler
        fds = open_fds()
        with pytest.raises(Corrupt, match="segment X at 4096"):
            next(iter(headrace.Loader(dataset)))
        assert open_fds() <= fds + 2


def test_engine_death_in_a_stream_is_unavailable(
    fake_engine: FakeEngine, stream: SlotStream, loader: headrace.Loader
) -> None:
    stream.on_send = lambda number: fake_engine.kill() if number == 5 else None
    done = 0
    with pytest.raises(Unavailable, match=r"ended while batches were read"):
        for batch in loader:
            done = batch.number
    assert done <= 5
    state = loader.state_dict()
    assert state["samples"] == (done + 1) * BATCH
    stream.on_send = lambda number: None
    fake_engine.listen()
    loader.load_state_dict(state)
    assert next(iter(loader)).number == done + 1


def test_an_engine_that_forgets_the_slots_memory_is_internal(
    fake_engine: FakeEngine, dataset: headrace.Dataset
) -> None:
    layout = {"count": 0, "offsets_at": 0, "data_at": 8, "data_bytes": 0, "slot_bytes": 4096, "gather_ns": 0}

    def handler(engine: FakeEngine, sock: Any, fields: Any) -> None:
        send_frame(sock, {"event": "batch", "batch": 0, "slot": 3, "layout": layout})

    fake_engine.stream = handler
    with pytest.raises(Internal, match="slot 3"):
        next(iter(headrace.Loader(dataset)))


@pytest.mark.parametrize("moment", ["wait", "decode"])
def test_ctrl_c_ends_the_script_within_two_seconds(
    fake_engine: FakeEngine, stream: SlotStream, dataset: headrace.Dataset, moment: str
) -> None:
    gate = threading.Event()
    if moment == "wait":

        def stall(number: int) -> None:
            if number == 3:
                gate.wait(30)

        stream.on_send = stall
    script = f"""
import sys, time
import headrace
def decode(sample):
    if {moment == "decode"}:
        print("waiting", flush=True)
        time.sleep(30)
dataset = headrace.connect({str(fake_engine.folder)!r}).dataset({SEAL_TEXT!r})
loader = headrace.Loader(dataset, {BATCH}, decode=decode)
for batch in loader:
    if batch.number == 2:
        print("waiting", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=20)
        took = time.monotonic() - begin
    gate.set()
    assert took < 2
    assert told.count("Traceback") == 1
    assert told.strip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT


def test_a_script_that_ends_while_it_holds_batches_ends_quietly(
    fake_engine: FakeEngine, stream: SlotStream, dataset: headrace.Dataset
) -> None:
    script = f"""
import headrace
loader = headrace.Loader(headrace.connect({str(fake_engine.folder)!r}).dataset({SEAL_TEXT!r}), {BATCH})
iterator = iter(loader)
kept = [next(iterator)[0], next(iterator)]
kept.append(kept)
"""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=30
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# Loader


def test_decode_gives_its_results_and_names_the_sample_that_failed(loader: headrace.Loader) -> None:
    loader.decode = lambda sample: int(bytes(sample[:5]))
    assert next(iter(loader)).decoded == list(range(BATCH))

    class Broken(Exception):
        pass

    def decode(sample: NDArray[np.uint8]) -> int:
        if bytes(sample[:5]) == b"00003":
            raise Broken("not an image")
        return 0

    loader.decode = decode
    with pytest.raises(Broken, match="not an image") as caught:
        next(iter(loader))
    assert "sample 3, 'c0/00003'" in caught.value.__notes__[0]


def test_stats_add_up(loader: headrace.Loader) -> None:
    waits = [batch.wait_ns for batch in loader]
    stats = loader.stats()
    assert (stats.batches, stats.samples, stats.bytes) == (len(loader), N, sum(map(len, CONTENTS)))
    assert stats.wait_seconds == pytest.approx(sum(waits) / 1e9)
    assert stats.gather_seconds == pytest.approx(len(loader) * 1e-6)


def test_epochs_advance_by_themselves(fake_engine: FakeEngine, loader: headrace.Loader) -> None:
    for _ in loader:
        break
    assert loader.epoch == 0
    for _ in range(2):
        assert [batch.number for batch in loader] == list(range(len(loader)))
    assert loader.epoch == 2
    loaders = [request for request in fake_engine.requests if "first_batch" in request]
    assert [request["epoch"] for request in loaders] == [0, 0, 1]


def test_state_is_small_and_names_the_next_batch(loader: headrace.Loader) -> None:
    assert loader.state_dict()["samples"] == 0
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state == {
        "format": 1, "seal": SEAL_TEXT, "version": 3, "shuffle": False, "seed": 0, "epoch": 0,
        "samples": 3 * BATCH,
    }  # fmt: skip
    assert len(pickle.dumps(state)) < 1000


def test_resuming_gives_the_rest_once(loader: headrace.Loader, dataset: headrace.Dataset) -> None:
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed = headrace.Loader(dataset, BATCH)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    resumed.set_epoch(0)  # as a training loop does at its start: the place stays
    assert [batch.number for batch in resumed] == list(range(5, len(loader)))
    assert (resumed.epoch, [batch.number for batch in resumed]) == (1, list(range(len(loader))))


def test_a_state_is_used_once_when_iteration_is_broken_off(loader: headrace.Loader) -> None:
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader)).number == 4
    assert next(iter(loader)).number == 0


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(loader: headrace.Loader) -> None:
    states = [loader.state_dict() for _ in loader]
    assert (states[-1]["epoch"], states[-1]["samples"]) == (1, 0)
    assert loader.state_dict() == states[-1]


def test_a_state_resumes_on_other_ranks_where_they_divide_it(dataset: headrace.Dataset) -> None:
    four = headrace.Loader(dataset, 5, rank=1, world_size=4)
    four._batches_done = 6  # 120 samples
    state = four.state_dict()
    for batch_size, world_size in ((5, 4), (10, 3), (120, 1), (1, 2)):
        other = headrace.Loader(dataset, batch_size, rank=0, world_size=world_size)
        other.load_state_dict(state)
        assert other._resume_at * batch_size * world_size == 120
    with pytest.raises(Invalid, match="not a whole number of steps of 7 ranks x 5"):
        headrace.Loader(dataset, 5, rank=0, world_size=7).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"seal": "0" * 26}, {"format": 2}, {"shuffle": True}, {"samples": 3}, {"samples": -8},
        {"samples": 80000}, {"seed": -1}, {"epoch": 2**64}, {"more": 1}, {"seed": "x"},
    ],
)  # fmt: skip
def test_foreign_states_are_refused(loader: headrace.Loader, change: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(Invalid, match="not a loader's state"):
        loader.load_state_dict({})


@pytest.mark.parametrize(
    ("n", "world_size"), [(0, 1), (1, 1), (1, 3), (7, 2), (7, 8), (30, 3), (31, 3), (32, 3)]
)
def test_ranks_share_an_epoch_and_drop_last_makes_their_steps_equal(
    dataset: headrace.Dataset, n: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.Dataset, "__len__", lambda self: n)
    steps = set()
    for batch_size in (1, 3):
        taken = 0
        for rank in range(world_size):
            steps.add(
                (
                    batch_size,
                    len(
                        headrace.Loader(dataset, batch_size, drop_last=True, rank=rank, world_size=world_size)
                    ),
                )
            )
            with pytest.warns(UserWarning) if _uneven(n, world_size, batch_size) else _nothing():
                loader = headrace.Loader(dataset, batch_size, rank=rank, world_size=world_size)
            samples = loader._samples(rank)
            assert len(loader) == -(-samples // batch_size)
            taken += samples
        assert taken == n
    assert len(steps) == 2


def _uneven(n: int, world_size: int, batch_size: int) -> bool:
    most, least = -(-n // world_size), n // world_size
    return -(-most // batch_size) != -(-least // batch_size)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def test_batches_by_number_follow_the_permutation(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read_batch(self: headrace.Dataset, indices: Any) -> headrace.Batch:
        asked.append(np.asarray(indices))
        return headrace.Batch.of([b""] * len(indices), indices, [0] * len(indices))

    monkeypatch.setattr(headrace.Dataset, "read_batch", read_batch)
    loader = headrace.Loader(dataset, 7, shuffle=True, seed=9, rank=1, world_size=2)
    loader.set_epoch(4)
    order = permute(np.arange(N), N, 9, 4)[1::2]
    for number in range(len(loader)):
        assert loader[number].number == number
    assert np.array_equal(np.concatenate(asked), order)
    assert np.array_equal(loader[-1].indices, order[(len(loader) - 1) * 7 :])
    with pytest.raises(IndexError, match=f"batch {len(loader)} of {len(loader)}"):
        loader[len(loader)]
    with pytest.warns(UserWarning, match="set_epoch"):
        loader[0]
    for number in range(len(loader)):
        loader[number]  # said once; the tests turn a warning into an error
    for epoch in (5, 6, 6):
        loader.set_epoch(epoch)
        for number in (0, 0, *range(len(loader))):
            loader[number]


def test_rank_and_world_size_come_from_arguments_torch_or_environment(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distributed:
        is_available = staticmethod(lambda: True)
        is_initialized = staticmethod(lambda: True)
        get_rank = staticmethod(lambda: 2)
        get_world_size = staticmethod(lambda: 3)

    def place(**options: Any) -> tuple[int, int]:
        loader = headrace.Loader(dataset, 10, **options)
        return loader.rank, loader.world_size

    assert place() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert place() == (1, 4)
    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)
    assert place() == (2, 3)
    assert place(rank=0, world_size=2) == (0, 2)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(Invalid, match="RANK and WORLD_SIZE"):
        place()
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(Invalid, match="must be numbers"):
        place()
    with pytest.raises(Invalid, match="go together"):
        place(rank=0)


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"prefetch": 0}, {"seed": -1}, {"rank": 2, "world_size": 2}]
)
def test_senseless_options_are_invalid(dataset: headrace.Dataset, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        headrace.Loader(dataset, **options)


def test_wrong_types_are_named(dataset: headrace.Dataset) -> None:
    made: Any = headrace.Loader
    with pytest.raises(TypeError, match=r"volume\.seal\(path\)"):
        made(dataset.volume)
    with pytest.raises(TypeError, match="batch_size must be an integer, not '8'"):
        made(dataset, batch_size="8")


def test_a_loader_pickles_small_before_and_after_use(loader: headrace.Loader) -> None:
    before = len(pickle.dumps(loader))
    next(iter(loader))
    raw = pickle.dumps(loader)
    assert max(before, len(raw)) < 1024
    assert next(iter(pickle.loads(raw))).number == 0


def test_the_consumer_uses_little_of_a_core(fake_engine: FakeEngine, dataset: headrace.Dataset) -> None:
    """600 batches a second may cost 20 % of a core: 333 us each; measured in CPU time of this thread."""
    begin = resource.getrusage(resource.RUSAGE_THREAD)
    count = 0
    total = 0
    for _ in range(4):
        for batch in headrace.Loader(dataset, BATCH):
            total += batch.data.size + batch.offsets.size
            count += 1
    end = resource.getrusage(resource.RUSAGE_THREAD)
    used = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    assert count == 4 * N // BATCH
    assert total
    assert used / count < 333e-6
