"""A simulated accelerator, and epochs measured against it.

There is no GPU here: a training step is a sleep. `SimulatedAccelerator` computes for a fixed time per batch
and has a fixed overhead of a ninth of it (launching, the optimizer's host side), so that it is 90 % busy when
data costs nothing. Whatever waits for data lowers that; the difference is what the three ways show.

Fairness: each way reads the same samples in the same shuffled order in batches of the same size, and each
reads ahead of the training loop: files by one thread, as a data loader with one worker does, the Loader by
the engine. Each batch's bytes are touched before the step.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Internal
from headrace.loaders.loader import Loader
from headrace.model.clock import monotonic_ns, sleep_seconds

# About what a server with eight GPUs takes of small images (8 x 3,200/s), and never more than half a
# GiB/s: beyond it a demo would measure the disk.
SAMPLES_PER_SECOND = 25_600
BYTES_PER_SECOND = 512 << 20
OVERHEAD_PER_COMPUTE = 1 / 9
BATCHES_AHEAD = 4


class SimulatedAccelerator:
    """Takes `compute_seconds` of accelerator time per batch and a ninth of it of overhead. Sleeps."""

    def __init__(self, compute_seconds: float) -> None:
        self.compute_seconds = compute_seconds
        self.overhead_seconds = compute_seconds * OVERHEAD_PER_COMPUTE
        self.busy_ns = 0
        self.overhead_ns = 0

    @staticmethod
    def for_batches(batch_size: int, sample_bytes: float) -> SimulatedAccelerator:
        """One that takes SAMPLES_PER_SECOND, or less of large samples, if data is free."""
        rate = min(SAMPLES_PER_SECOND, BYTES_PER_SECOND / max(sample_bytes, 1.0))
        step_seconds = batch_size / rate
        return SimulatedAccelerator(step_seconds / (1 + OVERHEAD_PER_COMPUTE))

    def step(self) -> None:
        begin = monotonic_ns()
        sleep_seconds(self.compute_seconds)
        computed = monotonic_ns()
        sleep_seconds(self.overhead_seconds)
        self.busy_ns += computed - begin
        self.overhead_ns += monotonic_ns() - computed


@dataclass(frozen=True)
class EpochResult:
    """Sums over one or more epochs read one way."""

    samples: int
    sample_bytes: int
    wall_ns: int
    busy_ns: int
    overhead_ns: int
    waits_ns: tuple[int, ...]

    def __add__(self, other: EpochResult) -> EpochResult:
        return EpochResult(
            self.samples + other.samples,
            self.sample_bytes + other.sample_bytes,
            self.wall_ns + other.wall_ns,
            self.busy_ns + other.busy_ns,
            self.overhead_ns + other.overhead_ns,
            self.waits_ns + other.waits_ns,
        )

    @property
    def samples_per_second(self) -> float:
        return self.samples * 1e9 / self.wall_ns if self.wall_ns else 0.0

    @property
    def utilisation(self) -> float:
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time in which the training loop waited for data."""
        return sum(self.waits_ns) / self.wall_ns if self.wall_ns else 0.0

    @property
    def overhead(self) -> float:
        return max(0.0, 1.0 - self.utilisation - self.waiting) if self.wall_ns else 0.0

    def wait_seconds(self, quantile: float) -> float:
        """Of the waits for a batch, e.g. 0.99: the slowest one in a hundred."""
        return float(np.quantile(self.waits_ns, quantile)) / 1e9 if self.waits_ns else 0.0


# (samples, bytes) of a batch that is in memory.
Batches = Iterator[tuple[int, int]]


def run_epoch(batches: Batches, accelerator: SimulatedAccelerator, seconds_max: float) -> EpochResult:
    """Takes batches and steps until they end, or `seconds_max` have passed."""
    samples = sample_bytes = 0
    waits = []
    busy_before, overhead_before = accelerator.busy_ns, accelerator.overhead_ns
    start = now = monotonic_ns()
    while True:
        batch = next(batches, None)
        received = monotonic_ns()
        if batch is None:
            break
        waits.append(received - now)
        samples += batch[0]
        sample_bytes += batch[1]
        accelerator.step()
        now = monotonic_ns()
        if now - start > seconds_max * 1e9:
            break
    return EpochResult(
        samples,
        sample_bytes,
        now - start,
        accelerator.busy_ns - busy_before,
        accelerator.overhead_ns - overhead_before,
        tuple(waits),
    )


def file_batches(path_of: Callable[[int], bytes], batches: Sequence[NDArray[np.uint64]]) -> Batches:
    """Reads each batch's files with one thread, BATCHES_AHEAD ahead of the consumer."""
    ready: queue.Queue[list[bytes] | BaseException | None] = queue.Queue(BATCHES_AHEAD)
    stopped = threading.Event()

    def hand_over(item: list[bytes] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for indices in batches:
                if stopped.is_set():
                    return
                hand_over([_read_file(path_of(index)) for index in indices.tolist()])
            hand_over(None)
        except (OSError, ValueError, LookupError, MemoryError) as error:  # raised in the consumer
            hand_over(error)

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)  # nothing forks here
    thread.start()
    try:
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield len(batch), sum(map(len, batch))
    finally:
        stopped.set()
        thread.join(timeout=5)


def _read_file(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def loader_batches(loader: Loader, batches: Sequence[NDArray[np.uint64]]) -> Batches:
    """The Loader's batches, checked to be the same samples in the same order as the files' ones."""
    with contextlib.closing(iter(loader)) as given:  # type: ignore[type-var]  # a generator
        for expected, batch in zip(batches, given, strict=False):
            if not np.array_equal(batch.indices, expected):
                raise Internal("the Loader's order differs from the permutation that Python computes")
            # One byte of each page: what is mapped but not yet here is waited for.
            batch.data[:: mmap.PAGESIZE].sum()
            yield len(batch), batch.data.size
