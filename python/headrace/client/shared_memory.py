"""Batches in memory that an engine filled: mapping its descriptors and laying arrays over them.

The layout comes from the engine (`BatchLayout`) and is checked against the map before any array is made, so
that a faulty engine is an error and not a crash.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Full, Internal
from headrace.model.batch import Batch
from headrace.model.message import BatchLayout

_NO_LABELS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def map_descriptor(fd: int, slot_bytes: int) -> mmap.mmap:
    """Maps `slot_bytes` of the memfd `fd`, shared and writable where the engine's seals allow it.

    The map needs no descriptor of its own from Python 3.13 on; before, it holds one. Raises Internal when the
    memfd is shorter, Full at a limit of this process (descriptors, address space).
    """
    options: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        try:
            return mmap.mmap(fd, slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, **options)
        except PermissionError:
            return mmap.mmap(fd, slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ, **options)
    except ValueError as error:
        raise Internal(f"the engine's batch memory has fewer than its {slot_bytes} bytes") from error
    except OSError as error:
        raise Full(
            f"a batch of {slot_bytes} bytes cannot be mapped ({error.strerror}): each kept batch needs an "
            "open file and memory: keep fewer, or raise `ulimit -n` and `ulimit -v`",
            error.errno,
        ) from error


def batch_over(root: NDArray[np.uint8], layout: BatchLayout) -> Batch:
    """A batch, labels to be set, whose arrays are views of `root`.

    NumPy lets a view of a view keep the owner alive, which is `root` (its own base is the map, no array):
    so `root` lives exactly as long as the last view.
    """
    count = layout.count
    index_bytes = 8 * count
    offsets_end = layout.offsets_at + index_bytes + 8
    data_end = layout.data_at + layout.data_bytes
    if (
        index_bytes > layout.offsets_at
        or layout.offsets_at % 8
        or offsets_end > layout.data_at
        or data_end > root.size
    ):
        raise Internal(f"the engine's layout of a batch does not fit its {root.size} bytes: {layout}")
    return Batch(
        root[layout.data_at : data_end],
        root[layout.offsets_at : offsets_end].view("<u8"),
        root[:index_bytes].view("<u8"),
        _NO_LABELS,
        gather_ns=layout.gather_ns,
    )
