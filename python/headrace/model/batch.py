"""A batch of samples in one buffer.

`data` is the samples one after the other; sample i is data[offsets[i]:offsets[i + 1]]. When a batch came
from an engine, all arrays are views of one shared-memory slot, and the slot is the engine's again only when
the last of them is gone: keep as many as memory allows, they are never overwritten.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray


class Batch:
    """Samples with their numbers and labels.

    data: (bytes,) uint8, one buffer. offsets: (count + 1,) uint64. indices: (count,) uint64, sample numbers
    in the dataset. labels: (count,) int64, own copy. decoded: what `decode` made of each sample, else None.
    number: which batch of its epoch, -1 for one that was read by index. wait_ns, gather_ns: what the consumer
    waited for it and what the engine took to gather it.

    `batch[i]` and iteration give zero-copy uint8 views; each keeps the whole slot alive. Arrays are writable
    where the engine allows it; what is written stays in this batch. A batch belongs to the process that
    received it; pickling copies the bytes.

    >>> import numpy as np
    >>> batch = Batch.of([b"ab", b"", b"cde"], indices=[7, 1, 4], labels=[0, 0, 1])
    >>> len(batch), batch[2].tobytes(), [sample.size for sample in batch]
    (3, b'cde', [2, 0, 3])
    """

    __slots__ = (
        "__weakref__",
        "data",
        "decoded",
        "gather_ns",
        "indices",
        "labels",
        "number",
        "offsets",
        "wait_ns",
    )

    def __init__(
        self,
        data: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        indices: NDArray[np.uint64],
        labels: NDArray[np.int64],
        number: int = -1,
        gather_ns: int = 0,
    ) -> None:
        self.data = data
        self.offsets = offsets
        self.indices = indices
        self.labels = labels
        self.decoded: list[Any] | None = None
        self.number = number
        self.wait_ns = 0
        self.gather_ns = gather_ns

    @staticmethod
    def of(samples: list[bytes], indices: Any, labels: Any) -> Batch:
        """A batch of bytes at hand; copies them."""
        offsets = np.zeros(len(samples) + 1, dtype=np.uint64)
        np.cumsum([len(sample) for sample in samples], out=offsets[1:], dtype=np.uint64)
        return Batch(
            np.frombuffer(bytearray().join(samples), dtype=np.uint8),
            offsets,
            np.asarray(indices, dtype=np.uint64),
            np.asarray(labels, dtype=np.int64),
        )

    def __len__(self) -> int:
        return self.indices.size

    def __getitem__(self, index: SupportsIndex) -> NDArray[np.uint8]:
        count = self.indices.size
        row = operator.index(index)
        if row < 0:
            row += count
        if not 0 <= row < count:
            raise IndexError(f"sample {index} of a batch of {count}")
        return self.data[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        data = self.data
        edges = self.offsets.tolist()
        for begin, end in itertools.pairwise(edges):
            yield data[begin:end]

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays pickle their bytes, not the slot that holds them.
        return (
            _restored,
            (self.data, self.offsets, self.indices, self.labels, self.decoded, self.number, self.wait_ns,
             self.gather_ns),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} samples, {self.data.size} bytes>"


def _restored(
    data: NDArray[np.uint8],
    offsets: NDArray[np.uint64],
    indices: NDArray[np.uint64],
    labels: NDArray[np.int64],
    *rest: Any,
) -> Batch:
    batch = Batch(data, offsets, indices, labels)
    batch.decoded, batch.number, batch.wait_ns, batch.gather_ns = rest
    return batch
