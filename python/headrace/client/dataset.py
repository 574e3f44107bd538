"""A sealed view as a data set: samples by number, read in batches from the engine.

A `Dataset` is (volume, seal id). Whatever else it knows it takes from the manifest, which the engine passes
as a descriptor and every process maps: opening costs the same for any size, and pickling is the two names.
Sample bytes come through shared memory: `read_batch` maps it, single samples are copied out of it. What is
mapped is shared pages of an immutable file, so that a forked child goes on using it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.client.shared_memory import batch_over, map_descriptor
from headrace.errors import Internal, Invalid
from headrace.model import message
from headrace.model.batch import Batch
from headrace.model.manifest import Manifest, Paths, row_of

if TYPE_CHECKING:
    from headrace.client.volume import Volume

# Lists of samples are fetched in pieces, so that a slice of the whole set does not ask the engine for the
# whole set at once.
_PIECE_BYTES = 16 << 20
_PIECE_SAMPLES = 4096


class Dataset:
    """The regular files below a sealed folder, in path order, as samples 0 .. n - 1.

    Immutable. `ds[i]` and `ds[-1]` give bytes, slices, lists and integer arrays give lists of bytes;
    `read_batch` gives a `Batch` without a copy. Works as a map-style data set of torch (`__getitems__`).
    Safe from any thread; works in forked, spawned and forkserver children, and pickles in under 1 KB (the
    volume's path and the seal's id), rebuilt in O(1) when first used there.

    Indexing raises IndexError outside [-n, n). Reads raise Unavailable, Corrupt (naming segment and offset)
    and Permission.
    """

    def __init__(self, volume: Volume, seal: str) -> None:
        self._volume = volume
        self._seal = seal
        self._opened: Manifest | None = None

    @classmethod
    def _of_descriptor(cls, volume: Volume, seal: str, fd: int) -> Dataset:
        dataset = cls(volume, seal)
        dataset._map(fd)
        return dataset

    @property
    def _manifest(self) -> Manifest:
        if self._opened is None:
            reply = self._volume._pool.call(message.OpenSeal(self._seal), message.Sealed, fds=1)
            return self._map(reply.fds[0])
        return self._opened

    def _map(self, fd: int) -> Manifest:
        """Maps the manifest and closes `fd`."""
        what = f"manifest {self._seal} of volume {self._volume.path}"
        try:
            mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except ValueError as error:
            raise Internal(f"{what} is empty") from error
        finally:
            os.close(fd)
        manifest = Manifest(mapped, what)
        if manifest.seal != self._seal:
            raise Internal(f"{what} says that it is {manifest.seal}")
        self._opened = manifest
        return manifest

    @property
    def volume(self) -> Volume:
        return self._volume

    @property
    def seal(self) -> str:
        """The sealed view's id; `Volume.dataset(id)` opens it again, anywhere and later."""
        return self._seal

    @property
    def version(self) -> int:
        """The volume's version that is frozen here; it grows with every seal."""
        version: int = self._manifest.version
        return version

    @property
    def root(self) -> str:
        """The sealed folder's path in the volume."""
        return os.fsdecode(self._manifest.root)

    @property
    def paths(self) -> Paths:
        """The samples' paths below `root`, a lazy sequence of str by name (bytes) within each folder."""
        return self._manifest.paths

    @property
    def classes(self) -> list[str]:
        """Names of the folders right below `root` that hold samples, sorted by their bytes."""
        return self._manifest.classes

    @property
    def labels(self) -> NDArray[np.int64]:
        """(n,) int64, read-only: each sample's row in `classes`, -1 for one right in the root. Computed at
        first use in a process, in about 10 ns a sample."""
        return self._manifest.labels

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """(n,) uint64, read-only: bytes of each sample; a view of the shared manifest."""
        return self._manifest.column("size")

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        nbytes: int = self._manifest.sample_bytes
        return nbytes

    def column(self, name: str) -> NDArray[Any]:
        """A column of the manifest (size, mtime, mode, uid, gid, ino ...), read-only, not copied."""
        return self._manifest.column(name)

    def __len__(self) -> int:
        samples: int = self._manifest.samples
        return samples

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> bytes: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> list[bytes]: ...
    def __getitem__(self, index: Any) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return self._read_many(np.arange(*index.indices(len(self)), dtype=np.int64))
        if isinstance(index, list | tuple | range) or (isinstance(index, np.ndarray) and index.ndim):
            return self._read_many(self._rows(index))
        return self._read(np.array([row_of(index, len(self))], dtype=np.uint64))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        """`self[indices]`: torch's DataLoader asks for a whole batch with it."""
        return self._read_many(self._rows(indices))

    def __iter__(self) -> Iterator[bytes]:
        for begin in range(0, len(self), 256):
            yield from self[begin : begin + 256]

    def read_batch(self, indices: ArrayLike) -> Batch:
        """The samples with these numbers, in this order, in one buffer of shared memory, not copied.

        indices: integers in [-n, n), repeats allowed. One request; blocks until the engine has gathered them.
        Raises Full when the batch is larger than the engine's memory budget allows.

        >>> volume.write_bytes("/letters/a", b"A", parents=True)
        >>> batch = volume.seal("/letters").read_batch([0, 0])
        >>> batch.data.tobytes(), batch.offsets.tolist(), batch.labels.tolist()
        (b'AA', [0, 1, 2], [-1, -1])
        """
        rows = self._rows(indices)
        layout, fd = self._gather(rows)
        try:
            mapped = map_descriptor(fd, layout.slot_bytes)
        finally:
            os.close(fd)
        batch = batch_over(np.frombuffer(mapped, dtype=np.uint8), layout)
        batch.labels = self.labels[rows]
        return batch

    def _rows(self, indices: Any) -> NDArray[np.int64]:
        given = np.asarray(indices)
        count = len(self)
        if not given.size:
            return np.empty(0, dtype=np.int64)
        if given.dtype == bool and given.shape == (count,):
            return np.flatnonzero(given)
        if given.ndim != 1 or given.dtype.kind not in "ui":
            raise Invalid(
                f"samples are chosen by a list of integers, not by {given.dtype} of shape {given.shape}"
            )
        low, high = int(given.min()), int(given.max())
        if low < -count or high >= count:
            raise IndexError(f"sample {high if high >= count else low} of {count}")
        rows = given.astype(np.int64)
        if low < 0:
            rows[rows < 0] += count
        return rows

    def _gather(self, rows: NDArray[Any]) -> tuple[message.BatchLayout, int]:
        numbers = np.ascontiguousarray(rows, dtype="<u8")
        reply = self._volume._pool.call(
            message.ReadBatch(self._seal), message.BatchLayout, [numbers.data], fds=1
        )
        return reply.ok, reply.fds[0]

    def _read_many(self, rows: NDArray[np.int64]) -> list[bytes]:
        samples: list[bytes] = []
        sizes = self._manifest.column("size")
        begin = 0
        while begin < rows.size:
            piece = rows[begin : begin + _PIECE_SAMPLES]
            ends = np.cumsum(sizes[piece], dtype=np.uint64)
            count = max(1, int(np.searchsorted(ends, np.uint64(_PIECE_BYTES), side="right")))
            samples += self._read(piece[:count])
            begin += count
        return samples

    def _read(self, rows: NDArray[Any]) -> list[bytes]:
        """Copies of the samples, read from the descriptor: cheaper than to map it for one use."""
        layout, fd = self._gather(rows)
        try:
            if layout.count == 1:
                return [_read_exactly(fd, layout.data_bytes, layout.data_at)]
            raw = _read_exactly(fd, 8 * (layout.count + 1), layout.offsets_at)
            edges = np.frombuffer(raw, dtype="<u8").tolist()
            data = _read_exactly(fd, layout.data_bytes, layout.data_at)
        finally:
            os.close(fd)
        return [data[begin:end] for begin, end in itertools.pairwise(edges)]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dataset, (self._volume, self._seal))

    def __repr__(self) -> str:
        if self._opened is None:
            return f"<Dataset {self._seal} of {self._volume.path}>"
        return (
            f"<Dataset {self._seal} of {self._volume.path}:{self.root}, {len(self)} samples, "
            f"{self.nbytes} bytes, version {self.version}>"
        )


def _read_exactly(fd: int, count: int, offset: int) -> bytes:
    raw = os.pread(fd, count, offset)
    if len(raw) == count:
        return raw
    pieces = [raw]
    got = len(raw)
    while got < count:  # one pread gives 2 GiB at most
        piece = os.pread(fd, count - got, offset + got)
        if not piece:
            raise Internal(f"the engine's batch ends after {got} of {count} bytes", errno.EIO)
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)
