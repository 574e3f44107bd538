"""The samples of the loader tests, and checking them in a process of any kind.

In a module of its own, since a spawned child imports what it is to run by name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import headrace


def content(number: int) -> bytes:
    """What file number `number` holds: 0 to 22 KB."""
    return hashlib.sha256(b"%d" % number).digest() * (number % 700)


def sample_of(path: str) -> bytes:
    """What the sample at `path`, like a/0003, holds."""
    return b"in the root" if path == "zz" else content(int(path[2:]))


def checked(dataset: headrace.Dataset, rows: list[int]) -> str:
    """Reads the rows one way and the first batch the other; "right", or what differs."""
    for row, sample in zip(rows, dataset[rows], strict=True):
        if sample != sample_of(dataset.paths[row]):
            return f"sample {row} differs"
    batch = next(iter(headrace.Loader(dataset, 8)))
    if batch[1].tobytes() != sample_of(dataset.paths[1]):
        return "the loader's sample 1 differs"
    return "right"


def answer_checked(dataset: headrace.Dataset, rows: list[int], answers: Any) -> None:
    answers.put(checked(dataset, rows))
