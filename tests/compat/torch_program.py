"""Feeds torch's DataLoader from a Headrace volume; run by test_torch.py with an interpreter that has torch.

    python torch_program.py VOLUME SEAL WORKERS METHOD        METHOD: fork, spawn or none

Prints one JSON line: what each way of feeding gave. Labels and numbers are compared by the caller.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import headrace
from headrace.model.batch import Batch

warnings.simplefilter("error")
# The CUDA build of torch on a machine without a GPU has something to say about that; nothing to do with us.
warnings.filterwarnings("ignore", message=".*CUDA.*")
warnings.filterwarnings("ignore", message=".*pin_memory.*")
# Four workers are the promise, also on a machine with two cores.
warnings.filterwarnings("ignore", message=".*worker processes in total.*")

BATCH = 32


def as_tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bytes, offsets, labels), the bytes without a copy."""
    offsets = torch.from_numpy(batch.offsets.astype(np.int64))
    return torch.from_numpy(batch.data), offsets, torch.from_numpy(batch.labels)


def collate_bytes(samples: list[bytes]) -> list[bytes]:
    return samples


def identity(batch: Batch) -> Batch:
    return batch


def main() -> None:
    folder, seal, workers_text, method = sys.argv[1:]
    workers = int(workers_text)
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options["multiprocessing_context"] = method
    said: dict[str, Any] = {}
    dataset = headrace.connect(folder, start=False).dataset(seal)

    # The loader's batches as a map-style data set, before a first read in this process.
    loader = headrace.Loader(dataset, BATCH, shuffle=True, seed=5)
    loader.set_epoch(1)
    data = DataLoader(loader, batch_size=None, collate_fn=as_tensors, **options)
    total, labels = b"", []
    for values, offsets, batch_labels in data:
        assert values.dtype == torch.uint8 and int(offsets[-1]) == len(values)
        total += values.numpy().tobytes()
        labels += batch_labels.tolist()
    expected = headrace.Loader(dataset, BATCH, shuffle=True, seed=5)
    expected.set_epoch(1)
    whole = list(expected)
    assert total == b"".join(batch.data.tobytes() for batch in whole)
    assert labels == [label for batch in whole for label in batch.labels.tolist()]
    said["loader"] = len(labels)

    # The data set itself, sampled and batched by torch through __getitems__, after a first read.
    generator = torch.Generator()
    generator.manual_seed(1)
    data = DataLoader(
        dataset, batch_size=BATCH, shuffle=True, generator=generator, collate_fn=collate_bytes, **options
    )
    samples = [sample for batch in data for sample in batch]
    assert sorted(samples) == sorted(dataset[:])
    said["dataset"] = len(samples)

    # Batches that cross from a worker arrive whole, and stay.
    data = DataLoader(headrace.Loader(dataset, BATCH), batch_size=None, collate_fn=identity, **options)
    kept = list(data)
    assert [sample.tobytes() for batch in kept for sample in batch] == dataset[:]
    said["kept"] = sum(len(batch) for batch in kept)

    # A training step on it, in this process.
    model = torch.nn.Linear(16, len(dataset.classes))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in headrace.Loader(dataset, BATCH, shuffle=True):
        rows = torch.stack([torch.from_numpy(sample[:16].astype(np.float32)) for sample in batch])
        loss = torch.nn.functional.cross_entropy(model(rows), torch.from_numpy(batch.labels))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    said["loss"] = bool(torch.isfinite(loss))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
