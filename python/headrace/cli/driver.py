"""The native workload driver, `headraced workload`: phases timed without an interpreter in them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.client.engine import find_engine
from headrace.errors import HeadraceError, Internal
from headrace.model.message import ErrorBody


class Latencies(msgspec.Struct, frozen=True):
    """How long calls took, each by itself."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class Measured(NamedTuple):
    """What one phase did in which time; of a phase that writes, until all of it was durable."""

    operations: int
    data_bytes: int
    seconds: float
    fsync: Latencies | None = None

    @property
    def per_second(self) -> float:
        return self.operations / self.seconds

    @property
    def mb_per_second(self) -> float:
        """Millions of bytes a second."""
        return self.data_bytes / 1e6 / self.seconds


class _Line(msgspec.Struct, frozen=True):
    operations: int = 0
    bytes: int = 0
    seconds: float = 0.0
    seconds_with_sync: float | None = None
    fsync: Latencies | None = None
    error: ErrorBody | None = None


class SmallFiles(NamedTuple):
    """Which files there are: the driver computes names and contents from it, the same in every phase."""

    folder: str
    files: int
    size_bytes: int

    def options(self) -> list[str]:
        return ["--target", self.folder, "--files", str(self.files), "--size-bytes", str(self.size_bytes)]


class LargeFile(NamedTuple):
    """One file in `folder`."""

    folder: str
    total_bytes: int

    def options(self) -> list[str]:
        return ["--target", self.folder, "--bytes", str(self.total_bytes)]


class StoreObjects(NamedTuple):
    """Objects of a store: `requests` is a file with a signed target for each (store_client.py)."""

    address: str
    requests: str

    @property
    def folder(self) -> str:
        """What an error names."""
        return self.address

    def options(self) -> list[str]:
        return ["--to", self.address, "--requests", self.requests]


class Driver:
    """Runs phases one at a time, each in a process of its own that works outside the measured folder."""

    def __init__(self) -> None:
        self._engine = find_engine()

    def create(self, files: SmallFiles, threads: int) -> Measured:
        """Makes the folder and the files, then one sync of all, inside the measured time."""
        return self._run("create", files, ["--threads", str(threads)])

    def create_fsync(self, files: SmallFiles, threads: int) -> Measured:
        """Makes the folder and the files, each synced before it is closed."""
        return self._run("create", files, ["--threads", str(threads), "--fsync"])

    def read(self, files: SmallFiles, threads: int) -> Measured:
        """Opens, reads and closes every file once, shuffled."""
        return self._run("read", files, ["--threads", str(threads)])

    def read_verified(self, files: SmallFiles, threads: int, limit: int, seed: int) -> Measured:
        """As `read`, the first `limit` files of the order, every byte compared with what create wrote."""
        options = ["--threads", str(threads), "--limit", str(limit), "--seed", str(seed), "--verify"]
        return self._run("read", files, options)

    def stat(self, files: SmallFiles, threads: int) -> Measured:
        return self._run("stat", files, ["--threads", str(threads)])

    def list(self, files: SmallFiles, threads: int) -> Measured:
        """Reads every directory; operations are names."""
        return self._run("list", files, ["--threads", str(threads)])

    def write_large(self, file: LargeFile) -> Measured:
        """Writes the file and syncs it, inside the measured time."""
        return self._run("write-large", file, [])

    def read_large(self, file: LargeFile) -> Measured:
        return self._run("read-large", file, [])

    def random_4k(self, file: LargeFile, reads: int, threads: int) -> Measured:
        return self._run("random-4k", file, ["--operations", str(reads), "--threads", str(threads)])

    def store_put(self, objects: StoreObjects, files: int, size_bytes: int, connections: int) -> Measured:
        """Puts what `create` would write, an object for each file, without a file system between."""
        sizes = ["--files", str(files), "--size-bytes", str(size_bytes)]
        return self._run("store-put", objects, [*sizes, "--threads", str(connections)])

    def store_get_ranges(self, objects: StoreObjects, range_bytes: int, connections: int) -> Measured:
        """Gets all bytes of objects in ranges, `connections` at a time."""
        options = ["--range-bytes", str(range_bytes), "--threads", str(connections)]
        return self._run("store-get-ranges", objects, options)

    def _run(
        self, phase: str, subject: SmallFiles | LargeFile | StoreObjects, options: Sequence[str]
    ) -> Measured:
        done = subprocess.run(
            [self._engine, "workload", phase, *subject.options(), *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",  # not in the folder: its mount is ended between phases
            check=False,
        )
        try:
            said = msgspec.json.decode(done.stdout, type=_Line)
        except msgspec.DecodeError as error:
            tail = (done.stdout + done.stderr)[-500:].decode(errors="replace").strip()
            raise Internal(
                f"headraced workload {phase} ended with status {done.returncode}: {tail}"
            ) from error
        if said.error is not None:
            raise HeadraceError.of(said.error.kind, said.error.errno, said.error.message)
        if said.seconds <= 0 or not said.operations:
            raise Internal(f"headraced workload {phase} {subject.folder} did nothing: {done.stdout!r}")
        return Measured(said.operations, said.bytes, said.seconds_with_sync or said.seconds, said.fsync)
