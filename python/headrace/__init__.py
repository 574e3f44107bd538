"""Headrace: one data platform for training and inference.

`connect` gives a `Volume` (and starts its engine), `Volume.seal` a `Dataset`, `Loader` its batches:

    import headrace

    volume = headrace.connect("./vol", create=True)
    volume.write_bytes("/pets/cat/1.txt", b"meow", parents=True)
    for batch in headrace.Loader(volume.seal("/pets"), batch_size=256, shuffle=True):
        ...  # batch.data, batch.offsets, batch.labels; batch[i] is sample i, not copied

Errors are in `headrace.errors`. This package is pure Python; bytes are moved by the engine, `headraced`.
"""

from headrace.client.dataset import Dataset
from headrace.client.volume import DirEntry, Volume, connect
from headrace.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Full,
    HeadraceError,
    Internal,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotFound,
    Permission,
    Unavailable,
)
from headrace.loaders.loader import Loader, LoaderStats
from headrace.model.batch import Batch

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "Batch",
    "Conflict",
    "Corrupt",
    "Dataset",
    "DirEntry",
    "Full",
    "HeadraceError",
    "Internal",
    "Invalid",
    "IsADirectory",
    "Loader",
    "LoaderStats",
    "NotADirectory",
    "NotFound",
    "Permission",
    "Unavailable",
    "Volume",
    "__version__",
    "connect",
]
