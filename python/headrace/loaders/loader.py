"""The loader: an epoch's batches in the keyed order, gathered by the engine ahead of the training loop.

An epoch's order is `headrace.policy.order.permute` of (seed, epoch); rank r of w takes the positions r,
r + w, r + 2w, ... and cuts them into batches. So a place in an epoch is one number, and the state of a loader
is (seed, epoch, samples consumed by all ranks together): it can be resumed with another number of ranks or
another batch size wherever that place is a whole number of their batches.

Iterating opens a stream (`headrace.client.slots`); `loader[k]` reads batch k of the current epoch by itself,
which is what torch's DataLoader does with `batch_size=None` in its workers.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.client.dataset import Dataset
from headrace.client.slots import BatchStream
from headrace.errors import Internal, Invalid
from headrace.model import clock, message
from headrace.model.manifest import row_of
from headrace.policy.order import permute

if TYPE_CHECKING:
    from headrace.model.batch import Batch

STATE_FORMAT = 1
_U64_MAX = (1 << 64) - 1

Decode = Callable[[NDArray[np.uint8]], Any]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `Loader.state_dict` saves. samples: consumed by all ranks together in `epoch`."""

    format: int
    seal: str
    version: int
    shuffle: bool
    seed: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class LoaderStats:
    """Sums over all batches that this loader gave in this process.

    wait_seconds: the training loop waited in `next()`. gather_seconds: the engine worked on these batches,
    mostly ahead of time. decode_seconds: spent in `decode`.
    """

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    decode_seconds: float = 0.0


class _EpochWatch:
    """Sees that batches asked for by number run through one shuffled epoch again, as they do when `set_epoch`
    was forgotten.

    Batch 0 alone, asked for again and again, is somebody looking at it: others must lie between. Iterating
    never comes here. A forked worker starts to count anew.
    """

    def __init__(self) -> None:
        self._where = (0, 0)
        self._began = self._went_on = self._warned = False

    def asked(self, number: int, epoch: int) -> None:
        where = (os.getpid(), epoch)
        if where != self._where:
            self._where = where
            self._began = self._went_on = False
        if number:
            self._went_on = self._began
            return
        if self._went_on and not self._warned:
            self._warned = True
            warnings.warn(
                f"batch 0 of epoch {epoch} is asked for a second time: every pass gives the same order. Call "
                "loader.set_epoch(epoch) before each epoch (and use no persistent_workers)",
                UserWarning,
                stacklevel=3,
            )
        self._began, self._went_on = True, False


class Loader:
    """Batches of a data set, epoch after epoch.

    batch_size: samples a batch; the last one of an epoch may be shorter unless `drop_last`.
    shuffle, seed: the order of each epoch is a permutation keyed by (seed, epoch), else path order.
    decode: called with each sample's uint8 view; results are `batch.decoded`. Runs in the consumer; its
    errors keep their type and gain a note with the sample's path and number.
    prefetch: batches that the engine gathers ahead.
    rank, world_size: which part of the epoch this process takes. Default: torch.distributed if it is
    initialised, else the environment's RANK and WORLD_SIZE, else all.

    `for batch in loader` is one epoch, and the next one is the next epoch; broken off, it starts the epoch
    again. `len` is the number of this rank's batches. With drop_last all ranks take the same number of
    steps; without, ranks may differ by one, which a warning says.

    `loader[k]` is batch k of the current epoch, so that `torch.utils.data.DataLoader(loader,
    batch_size=None, num_workers=4)` works; there `set_epoch` starts each epoch (not with persistent workers,
    which keep the epoch they were started in).

    Iterating blocks only when the engine is behind; Ctrl-C ends the wait. Use one iterator per thread. An
    iterator that a fork copies goes on in the child by itself; batches held at a fork stay valid in both, and
    their memory is not used again before the epoch's end. Pickles in under 1 KB plus `decode`.
    Raises what `Dataset.read_batch` raises, and Full when more batches are kept than the engine has memory
    for.

    >>> import headrace
    >>> for name in "abcde":
    ...     volume.write_bytes(f"/train/{name}", name.encode(), parents=True)
    >>> loader = headrace.Loader(volume.seal("/train"), batch_size=2, shuffle=True, seed=7)
    >>> sorted(sample.tobytes() for batch in loader for sample in batch)
    [b'a', b'b', b'c', b'd', b'e']
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 256,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        decode: Decode | None = None,
        prefetch: int = 4,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"Loader takes a Dataset, not a {type(dataset).__name__}: seal a folder first: "
                "volume.seal(path)"
            )
        for name, value in (("batch_size", batch_size), ("prefetch", prefetch), ("seed", seed)):
            if not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an integer, not {value!r}")
        if not 1 <= batch_size < 1 << 32:
            raise Invalid(f"batch_size must be at least 1, not {batch_size}")
        if not 1 <= prefetch <= 1024:
            raise Invalid(f"prefetch must be in [1, 1024] batches, not {prefetch}")
        if not 0 <= seed <= _U64_MAX:
            raise Invalid(f"seed must be in [0, 2**64), not {seed}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.decode = decode
        self.prefetch = prefetch
        self.rank, self.world_size = _place_among_ranks(rank, world_size)
        self._epoch = 0
        self._batches_done = 0
        self._resume_at = 0
        self._stats = LoaderStats()
        self._watch = _EpochWatch()
        first, last = self._steps(0), self._steps(self.world_size - 1)
        if first != last:
            warnings.warn(
                f"{len(dataset)} samples on {self.world_size} ranks in batches of {batch_size}: the first "
                f"ranks take {first} steps, the last {last}; drop_last=True makes them equal",
                stacklevel=2,
            )

    def _samples(self, rank: int) -> int:
        """Samples of an epoch that a rank takes before drop_last."""
        return max(0, -(-(len(self.dataset) - rank) // self.world_size))

    def _steps(self, rank: int) -> int:
        if self.drop_last:
            # What the rank with the fewest samples can fill.
            return len(self.dataset) // self.world_size // self.batch_size
        return -(-self._samples(rank) // self.batch_size)

    def __len__(self) -> int:
        return self._steps(self.rank)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`, from its beginning unless a loaded state is in it."""
        if not 0 <= epoch <= _U64_MAX:
            raise Invalid(f"epoch must be in [0, 2**64), not {epoch}")
        self._watch = _EpochWatch()
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches_done = self._resume_at = 0

    def __iter__(self) -> Iterator[Batch]:
        start = self._resume_at
        self._resume_at = 0
        self._batches_done = start
        return self._iterate(self._epoch, start)

    def _iterate(self, epoch: int, number: int) -> Iterator[Batch]:
        stream: BatchStream | None = None
        steps = len(self)
        try:
            while number < steps:
                if stream is None or not stream.usable:
                    stream = self._stream(epoch, number)
                number += 1
                # No name for the batch here: this frame would keep its slot through the next wait.
                yield self._take(stream, number - 1)
        finally:
            if stream is not None:
                stream.close()
        if self._epoch == epoch:
            self._epoch = epoch + 1
            self._batches_done = 0

    def _take(self, stream: BatchStream, number: int) -> Batch:
        begin_ns = clock.monotonic_ns()
        batch = stream.next()
        if batch is None or batch.number != number:
            came = "the end" if batch is None else f"batch {batch.number}"
            raise Internal(f"the engine sent {came} of an epoch where batch {number} of {len(self)} was due")
        batch.wait_ns = clock.monotonic_ns() - begin_ns
        batch.labels = self.dataset.labels.take(batch.indices.view(np.int64))
        self._decode(batch)
        self._batches_done = number + 1
        return batch

    def _stream(self, epoch: int, first_batch: int) -> BatchStream:
        return BatchStream(
            self.dataset.volume.connection(),
            message.Loader(
                seal=self.dataset.seal,
                batch_size=self.batch_size,
                shuffle=self.shuffle,
                seed=self.seed,
                epoch=epoch,
                drop_last=self.drop_last,
                first_batch=first_batch,
                prefetch=self.prefetch,
                rank=self.rank,
                world_size=self.world_size,
            ),
        )

    def __getitem__(self, index: SupportsIndex) -> Batch:
        """Batch `index` of the current epoch, read by itself. IndexError outside [-len, len)."""
        number = row_of(index, len(self), "batch")
        if self.shuffle:
            self._watch.asked(number, self._epoch)
        begin = number * self.batch_size
        end = min(begin + self.batch_size, self._samples(self.rank))
        positions = np.arange(begin, end, dtype=np.uint64) * np.uint64(self.world_size) + np.uint64(self.rank)
        if self.shuffle:
            positions = permute(positions, len(self.dataset), self.seed, self._epoch)
        begin_ns = clock.monotonic_ns()
        batch = self.dataset.read_batch(positions)
        batch.number = number
        batch.wait_ns = clock.monotonic_ns() - begin_ns
        self._decode(batch)
        return batch

    def _decode(self, batch: Batch) -> None:
        decode_ns = 0
        if self.decode is not None:
            begin_ns = clock.monotonic_ns()
            decoded: list[Any] = []
            for row, sample in enumerate(batch):
                try:
                    decoded.append(self.decode(sample))
                except Exception as error:
                    number = int(batch.indices[row])
                    error.add_note(
                        f"while decoding sample {number}, {self.dataset.paths[number]!r}, of {self.dataset!r}"
                    )
                    raise
            batch.decoded = decoded
            decode_ns = clock.monotonic_ns() - begin_ns
        stats = self._stats
        self._stats = LoaderStats(
            stats.batches + 1,
            stats.samples + len(batch),
            stats.bytes + batch.data.size,
            stats.wait_seconds + batch.wait_ns / 1e9,
            stats.gather_seconds + batch.gather_ns / 1e9,
            stats.decode_seconds + decode_ns / 1e9,
        )

    def stats(self) -> LoaderStats:
        """What this loader has given so far and what it cost (for one batch: its `wait_ns`, `gather_ns`)."""
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """The place of the last batch that iterating gave: plain values, under 1 KB, in microseconds.

        All ranks at the same step save the same state. After an epoch's last batch it is the beginning of the
        next epoch.
        """
        epoch = self._epoch
        samples = min(self._batches_done * self.batch_size * self.world_size, len(self.dataset))
        if self._batches_done and self._batches_done >= self._steps(0):  # rank 0 takes the most steps
            epoch, samples = epoch + 1, 0
        state: dict[str, Any] = msgspec.to_builtins(
            State(
                STATE_FORMAT, self.dataset.seal, self.dataset.version, self.shuffle, self.seed, epoch, samples
            )
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where `state` was saved; once. Seed and epoch become the state's.

        Raises Invalid when the state is of another sealed view or order, or when its place is not a whole
        number of this loader's batches over all ranks.
        """
        try:
            saved = msgspec.convert(state, State)
        except msgspec.ValidationError as error:
            raise Invalid(f"this is not a loader's state: {error}") from error
        if saved.format != STATE_FORMAT:
            raise Invalid(
                f"loader state has format {saved.format}; this headrace reads {STATE_FORMAT}: "
                "upgrade headrace"
            )
        if saved.seal != self.dataset.seal:
            raise Invalid(
                f"loader state is of sealed view {saved.seal}, this loader of {self.dataset.seal}: load it "
                "with Volume.dataset of the state's seal"
            )
        if saved.shuffle != self.shuffle:
            raise Invalid(
                f"loader state was saved with shuffle={saved.shuffle}, this loader has {self.shuffle}"
            )
        step = self.batch_size * self.world_size
        if not 0 <= saved.samples <= len(self.dataset) or saved.samples % step:
            raise Invalid(
                f"loader state has consumed {saved.samples} samples, which is not a whole number of steps of "
                f"{self.world_size} ranks x {self.batch_size}: resume with ranks and a batch size that fit"
            )
        if not (0 <= saved.seed <= _U64_MAX and 0 <= saved.epoch <= _U64_MAX):
            raise Invalid(f"loader state has seed {saved.seed} and epoch {saved.epoch}, beyond [0, 2**64)")
        self.seed = saved.seed
        self._epoch = saved.epoch
        self._batches_done = self._resume_at = saved.samples // step

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_stats"] = LoaderStats()
        state["_watch"] = _EpochWatch()
        return state

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in path order"
        return (
            f"<Loader of {self.dataset!r}: {len(self)} batches of {self.batch_size} {order}, "
            f"epoch {self._epoch}, rank {self.rank} of {self.world_size}>"
        )


def _place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise Invalid("rank and world_size go together: give both or neither")
    source = "the arguments"
    if rank is None or world_size is None:
        # Asked only if the program uses it: importing torch takes seconds.
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        source = "RANK and WORLD_SIZE in the environment"
        try:
            rank = int(os.environ.get("RANK", "0"))
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        except ValueError as error:
            raise Invalid(f"{source} must be numbers: {error}") from error
    if not 0 <= rank < world_size:
        raise Invalid(
            f"rank {rank} of world size {world_size} (from {source}): ranks are 0 to world size - 1"
        )
    return rank, world_size
