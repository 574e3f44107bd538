"""`headrace bench`: a folder, a mount or the Loader measured, side by side with another folder.

The native driver (driver.py) does the file operations and their timing, since a Python loop is slower than
what it would measure. This module decides the order: in each round every side goes through the same phases,
the order of the sides turns from round to round so that a drifting machine harms both alike, and medians over
the rounds are reported. A side's files are made anew in each round and removed after it.

Cold: the page cache is dropped, and where the folder lies in a mount of Headrace its engine is stopped and
started as well, so that neither the kernel nor the engine remembers anything. Where that is not permitted,
cold metrics are null: never a warm number under a cold name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from headrace.cli.driver import Driver, LargeFile, SmallFiles
from headrace.cli.machine import describe_machine
from headrace.cli.mounts import mount_holding
from headrace.cli.page_cache import drop_page_cache
from headrace.cli.restart import EngineRestart
from headrace.cli.text import print_json, print_table, stderr_is_terminal, warn
from headrace.client.dataset import Dataset
from headrace.client.volume import connect
from headrace.errors import Internal, Invalid, NotADirectory, NotFound
from headrace.loaders.loader import Loader
from headrace.model.clock import monotonic_ns
from headrace.units import format_bytes, format_count

# Each file of this phase waits for the disk by itself: a quarter of them says as much.
_FSYNCED_SHARE = 4
_RANDOM_READS = 20_000
_RANDOM_BYTES = 4096
_SEED = 1

Medians = dict[str, dict[str, float | None]]


@dataclass
class Side:
    """One thing that is measured, and what was measured of it."""

    name: str
    folder: str
    restart: EngineRestart | None = None
    # (metric, threads) -> values, one per round; none where cold was not possible.
    values: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    engine_resident_bytes: int = 0
    not_cold: str | None = None

    def measure(self, metric: str, threads: int, run: Callable[[], float], *, cold: bool = False) -> None:
        """Runs once and notes the value. A cold metric that cannot be cold is run and not noted: what comes
        after it in a round expects what it leaves behind."""
        values = self.values.setdefault((metric, threads), [])
        possible = not cold or self.make_cold()
        value = run()
        if possible:
            values.append(value)

    def make_cold(self) -> bool:
        if self.not_cold is None:
            self.note_memory()
            self.not_cold = drop_page_cache() if self.restart is None else self.restart.run(drop_page_cache)
        return self.not_cold is None

    def note_memory(self) -> None:
        if self.restart is not None:
            self.engine_resident_bytes = max(self.engine_resident_bytes, self.restart.resident_bytes_max())

    @contextlib.contextmanager
    def workspace(self) -> Iterator[str]:
        """A folder for one round, removed afterwards."""
        folder = os.path.join(self.folder, f".headrace-bench-{os.getpid()}")
        os.mkdir(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def medians(self) -> Medians:
        medians: Medians = {}
        for (metric, threads), values in self.values.items():
            median = round(statistics.median(values), 1) if values else None
            medians.setdefault(metric, {})[str(threads)] = median
        return medians


def bench_small_files(
    target: str,
    compare: str | None,
    files: int,
    size_bytes: int,
    threads: list[int],
    rounds: int,
    as_json: bool,
) -> None:
    sides = _sides(target, compare)
    driver = Driver()

    def one_round(side: Side) -> None:
        for count in threads:
            with side.workspace() as folder:
                _small_files(side, driver, folder, files, size_bytes, count)

    _run_rounds(sides, rounds, one_round)
    _report(sides, rounds, f"{format_count(files)} files of {format_bytes(size_bytes)}", as_json)


def _small_files(side: Side, driver: Driver, folder: str, files: int, size_bytes: int, threads: int) -> None:
    tree = SmallFiles(os.path.join(folder, "files"), files, size_bytes)
    synced_files = max(threads, files // _FSYNCED_SHARE)
    synced = SmallFiles(os.path.join(folder, "synced"), synced_files, size_bytes)
    side.measure("create_per_s", threads, lambda: driver.create(tree, threads).per_second)
    side.measure("cold_read_per_s", threads, lambda: driver.read(tree, threads).per_second, cold=True)
    side.measure("warm_read_per_s", threads, lambda: driver.read(tree, threads).per_second)
    side.measure("stat_cold_per_s", threads, lambda: driver.stat(tree, threads).per_second, cold=True)
    side.measure("stat_warm_per_s", threads, lambda: driver.stat(tree, threads).per_second)
    side.measure("list_cold_per_s", threads, lambda: driver.list(tree, threads).per_second, cold=True)
    side.measure("create_fsync_per_s", threads, lambda: driver.create_fsync(synced, threads).per_second)
    side.note_memory()


def bench_large_file(
    target: str, compare: str | None, total_bytes: int, threads: list[int], rounds: int, as_json: bool
) -> None:
    sides = _sides(target, compare)
    driver = Driver()

    def one_round(side: Side) -> None:
        with side.workspace() as folder:
            _large_file(side, driver, LargeFile(os.path.join(folder, "large"), total_bytes), threads)

    _run_rounds(sides, rounds, one_round)
    _report(sides, rounds, f"one file of {format_bytes(total_bytes)}", as_json)


def _large_file(side: Side, driver: Driver, file: LargeFile, threads: list[int]) -> None:
    reads = min(_RANDOM_READS, max(1, file.total_bytes // _RANDOM_BYTES))
    side.measure("write_mb_s", 1, lambda: driver.write_large(file).mb_per_second)
    side.measure("read_cold_mb_s", 1, lambda: driver.read_large(file).mb_per_second, cold=True)
    side.measure("read_warm_mb_s", 1, lambda: driver.read_large(file).mb_per_second)

    def random_reads(count: int) -> float:
        return driver.random_4k(file, reads, count).per_second

    for count in threads:
        side.measure("random_4k_hot_per_s", count, lambda count=count: random_reads(count))  # type: ignore[misc]
    for count in threads:
        side.measure("random_4k_cold_per_s", count, lambda count=count: random_reads(count), cold=True)  # type: ignore[misc]
    side.note_memory()


def bench_loader(volume: str, path: str, batch_size: int, rounds: int, as_json: bool) -> None:
    volume = os.path.abspath(volume)  # before the working folder changes
    with connect(volume) as opened:
        dataset = opened.seal(path)
        seal, samples, sample_bytes = dataset.seal, len(dataset), dataset.nbytes
    if not samples:
        raise Invalid(f"there is not one file in {volume}:{path}: nothing to read")
    side = Side("target", volume, EngineRestart(volume))

    def one_round(side: Side) -> None:
        for metric, cold in (("samples_cold_per_s", True), ("samples_warm_per_s", False)):
            side.measure(metric, 1, lambda: _read_epoch(volume, seal, batch_size), cold=cold)
        side.note_memory()

    _run_rounds([side], rounds, one_round)
    mean = format_bytes(sample_bytes / samples)
    _report([side], rounds, f"{format_count(samples)} samples of {mean}, batches of {batch_size}", as_json)


def _read_epoch(volume: str, seal: str, batch_size: int) -> float:
    """Samples a second of one shuffled epoch, one byte of each sample touched."""
    with connect(volume) as opened:
        dataset: Dataset = opened.dataset(seal)
        loader = Loader(dataset, batch_size, shuffle=True, seed=_SEED, rank=0, world_size=1)
        touched = samples = 0
        begin = monotonic_ns()
        for batch in loader:
            starts = batch.offsets[:-1]
            touched += int(batch.data[starts[starts < batch.offsets[1:]]].sum(dtype=np.uint64))
            samples += len(batch)
        seconds = (monotonic_ns() - begin) / 1e9
    if samples != len(dataset):
        raise Internal(f"the Loader gave {samples} of {len(dataset)} samples")
    return samples / seconds


def _sides(target: str, compare: str | None) -> list[Side]:
    sides = []
    for name, folder in (("target", target), ("compare", compare)):
        if folder is None:
            continue
        if not os.path.exists(folder):
            raise NotFound(f"--{name} {folder} does not exist")
        if not os.path.isdir(folder):
            raise NotADirectory(f"--{name} {folder} is not a folder")
        absolute = os.path.realpath(folder)
        mount = mount_holding(absolute)
        restart = None if mount is None else EngineRestart(mount.volume)
        sides.append(Side(name, absolute, restart))
    return sides


def _run_rounds(sides: Sequence[Side], rounds: int, one_round: Callable[[Side], None]) -> None:
    if any(side.restart is not None for side in sides):
        os.chdir("/")  # a process that works in a mount keeps it from being ended
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            if stderr_is_terminal():
                click.echo(f"round {number + 1} of {rounds}: {side.name} {side.folder}", err=True)
            one_round(side)
    for reason in {side.not_cold for side in sides} - {None}:
        warn(f"cold was not possible here ({reason}): cold metrics are left empty")


def _report(sides: Sequence[Side], rounds: int, title: str, as_json: bool) -> None:
    medians = {side.name: side.medians() for side in sides}
    target, compare = medians["target"], medians.get("compare", {})
    ratio = {
        metric: {threads: _ratio(value, compare[metric][threads]) for threads, value in by_threads.items()}
        for metric, by_threads in target.items()
        if metric in compare
    }
    if as_json:
        report: dict[str, Any] = {
            "target": target,
            "compare": compare,
            "ratio": ratio,
            "rounds": rounds,
            "machine": describe_machine({side.name: side.folder for side in sides}),
            "engine_resident_bytes_max": {side.name: side.engine_resident_bytes or None for side in sides},
        }
        print_json(report)
        return
    headings = ["metric", "threads", *(side.name for side in sides), *(["ratio"] if compare else [])]
    rows = []
    for metric, by_threads in target.items():
        for threads in by_threads:
            values = [_shown(medians[side.name][metric][threads]) for side in sides]
            last = [_shown(ratio[metric][threads])] if compare else []
            rows.append([metric, threads, *values, *last])
    click.echo(f"{title}, medians of {rounds} rounds")
    print_table(headings, rows)
    for side in sides:
        if side.engine_resident_bytes:
            click.echo(f"engine of {side.name}: {format_bytes(side.engine_resident_bytes)} resident at most")


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else round(value / other, 3)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return format_count(value) if value >= 100 else f"{value:.2f}"
