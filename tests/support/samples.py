"""A data set whose every sample says its own number, and what checks it from any process.

A module of its own since spawned processes import what they run.
"""

from __future__ import annotations

from typing import Any

import headrace
from headrace.model.message import PutEntry

SAMPLES = 2000


def content(number: int) -> bytes:
    return b"%06d" % number * (1 + number % 400)


def name(number: int) -> str:
    return f"class-{number * 7 % 5}/{number:06}"


def fill(volume: headrace.Volume) -> headrace.Dataset:
    """Writes the samples to /train and seals it."""
    contents = [content(number) for number in range(SAMPLES)]
    entries = [
        PutEntry(f"/train/{name(number)}".encode(), mode=0o644, size=len(contents[number]))
        for number in range(SAMPLES)
    ]
    volume.put(entries, contents, parents=True)
    return volume.seal("/train")


def check(dataset: headrace.Dataset, rows: list[int]) -> int:
    """Reads these samples as one batch and compares their bytes; returns how many."""
    batch = dataset.read_batch(rows)
    for row, sample in zip(rows, batch, strict=True):
        number = int(dataset.paths[row].rpartition("/")[2])
        assert sample.tobytes() == content(number)
    return len(batch)


def rows_of(turn: int) -> list[int]:
    """A batch of 256, another one each turn."""
    return [(turn * 97 + step * 13) % SAMPLES for step in range(256)]


def worker(dataset: headrace.Dataset, turns: range, answers: Any) -> None:
    """One process of several: reads the batches of `turns`."""
    answers.put(sum(check(dataset, rows_of(turn)) for turn in turns))
