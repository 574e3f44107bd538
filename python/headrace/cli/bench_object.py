"""`headrace bench object`: the object tier against its goals, beside s3fs and rclone on the same store.

The store is SeaweedFS on loopback, or one that is named. "Slow" is the same store behind `headraced workload
proxy`: 20 ms on each request, 100 MB/s on each connection in each direction; the proxy also counts requests.
Parts, each a function below, each in a prefix of its own:

    epoch   import to the slow store until it is all durable; then, with an empty flash tier and page cache, a
            first epoch in random order through the mount; s3fs and rclone read plain objects of the same
            content, by the same program in the same order, in turns with us. All were listed before.
    large   one large file, cold, from the fast store; beside it the store's own rate, got by parallel ranged
            GETs of the same objects, the best of some configurations
    fsync   4 KiB files written and synced one by one, durable in the fast store

Engine, store, proxy and driver share the processors. Each phase notes how idle they were and who used them,
and the report says where they were the limit. What is reported, and the goals: object_report.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from headrace.cli.cpu_time import Meter, process_seconds
from headrace.cli.driver import Driver, LargeFile, SmallFiles, StoreObjects
from headrace.cli.machine import describe_machine
from headrace.cli.object_report import CONNECTION_BYTES_PER_SECOND, LATENCY_MS, Plan, Results, report
from headrace.cli.page_cache import drop_page_cache
from headrace.cli.restart import EngineRestart
from headrace.cli.store_client import Bucket, Credentials
from headrace.cli.store_processes import Counts, PeerMount, Rclone, S3fs, SeaweedFS, SlowProxy
from headrace.cli.text import stderr_is_terminal
from headrace.client import engine
from headrace.client.volume import connect
from headrace.errors import Internal, Invalid, Unavailable
from headrace.model.clock import monotonic_ns, sleep_seconds
from headrace.units import format_bytes, format_count

_EPOCH_THREADS = 8
_FSYNCS = 500
_FSYNCED_BYTES = 4096
_PUT_CONNECTIONS = 16
_MIB = 1 << 20
# Ranged GETs: (connections, bytes of a range). One of them is about the best that a store on loopback does.
_GET_CONFIGURATIONS = ((2, 8 * _MIB), (4, 8 * _MIB), (8, 8 * _MIB), (16, 8 * _MIB), (8, 16 * _MIB))
_DURABLE_SECONDS_MAX = 600
_POLL_SECONDS = 0.01
# At rest: under 5 % of a processor during half a second; waited for up to 30 s.
_SETTLE_SECONDS = 0.5
_SETTLED_SHARE = 0.05
_SETTLE_STEPS_MAX = 60


def bench_object(plan: Plan, endpoint: str | None, bucket: str, folder: str | None, as_json: bool) -> None:
    """Measures and reports. Without `endpoint` a store is started, in `folder` like all the rest."""
    with contextlib.ExitStack() as stack:
        place = tempfile.mkdtemp(
            prefix="headrace-bench-", dir=None if folder is None else os.path.abspath(folder)
        )
        stack.callback(shutil.rmtree, place)
        work = Path(place)
        processes: dict[str, int] = {}
        if endpoint is None:
            store = stack.enter_context(SeaweedFS(work))
            processes["store"] = store.pid
            direct = store.bucket(bucket)
        else:
            direct = Bucket(_address(endpoint), bucket, Credentials.of_environment())
            direct.create()
        stack.enter_context(_environment(direct.credentials))
        proxy = stack.enter_context(
            SlowProxy(direct.address, LATENCY_MS, CONNECTION_BYTES_PER_SECOND, work / "proxy.log")
        )
        processes["proxy"] = proxy.pid
        bench = _Bench(plan, work, direct, proxy, processes, own_store=endpoint is None)
        for part in plan.parts:
            {"epoch": bench.epoch, "large": bench.large, "fsync": bench.fsync}[part]()
        machine = describe_machine({"work": place})
    report(plan, bench.results, machine, endpoint, as_json)


class _Bench:
    """The parts. Every round makes a new volume in a new prefix."""

    def __init__(
        self,
        plan: Plan,
        work: Path,
        direct: Bucket,
        proxy: SlowProxy,
        processes: dict[str, int],
        *,
        own_store: bool,
    ) -> None:
        self.results = Results()
        self._plan = plan
        self._work = work
        self._direct = direct
        self._slow = direct.at(proxy.address)
        self._proxy = proxy
        self._processes = processes
        # A store of ours goes as a whole, and deleting keeps it busy in the next round.
        self._delete = not own_store
        self._driver = Driver()
        self._prefix = f"headrace-bench-{os.getpid()}"

    # -- epoch --------------------------------------------------------------------------------------------

    def epoch(self) -> None:
        plan, source = self._plan, self._work / "source"
        _say(f"writing {format_count(plan.files)} files and objects")
        self._driver.create(SmallFiles(str(source), plan.files, plan.size_bytes), 2)
        peers = [peer for peer in (S3fs, Rclone) if plan.peer_files and not self._is_missing(peer)]
        plain = f"{self._prefix}/plain/"
        if peers:
            self._put_plain_objects(plain)
        sides: list[Callable[[int], None]] = [lambda number: self._own_epoch(number, source)]
        sides += [lambda number, peer=peer: self._peer_epoch(number, peer, plain) for peer in peers]  # type: ignore[misc]
        for number in range(plan.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side(number)
        if peers and self._delete:
            self._direct.delete(plain)
        shutil.rmtree(source)
        self._compare_with_peers()

    def _is_missing(self, peer: type[PeerMount]) -> bool:
        why = peer.missing()
        if why:
            self.results.note(f"{peer.name} is left out: {why}")
        return bool(why)

    def _own_epoch(self, number: int, source: Path) -> None:
        plan = self._plan
        with self._volume(f"epoch-{number}", self._slow) as volume:
            _say(f"round {number + 1} of {plan.rounds}: import")
            self._proxy.reset()
            with self._measured("import", volume) as seconds:
                self._import(source, volume)
                _wait_until_durable(volume.folder)
            counts = self._proxy.reset()
            _check_no_errors(counts)
            self.results.add("import_files_per_s", plan.files / seconds())
            self.results.add("import_puts_per_file", counts.of("PUT", "POST") / plan.files)
            tree = SmallFiles(os.path.join(volume.mountpoint, "data"), plan.files, plan.size_bytes)
            _evict(volume.folder)
            if not self._make_cold(volume):
                return
            self._driver.list(tree, _EPOCH_THREADS)
            _say(f"round {number + 1} of {plan.rounds}: first epoch")
            self._proxy.reset()
            with self._measured("epoch", volume):
                done = self._driver.read_verified(tree, _EPOCH_THREADS, plan.files, number)
            counts = self._proxy.reset()
            _check_no_errors(counts)
            if not counts.of("GET"):
                raise Internal("the cold epoch asked the store for nothing: the flash tier was not empty")
            self.results.add("epoch_files_per_s", done.per_second)
            self.results.add("epoch_gets_per_file", counts.of("GET") / done.operations)

    def _peer_epoch(self, number: int, peer: type[PeerMount], plain: str) -> None:
        _say(f"round {number + 1} of {self._plan.rounds}: {peer.name}")
        with peer(self._slow, plain, self._work) as mount:
            tree = SmallFiles(mount.mountpoint, self._plan.files, self._plan.size_bytes)
            self._driver.list(tree, _EPOCH_THREADS)
            if not self._is_cold(drop_page_cache()):
                return
            self._proxy.reset()
            with self._measured(peer.name, None, **{peer.name: mount.pid}):
                done = self._driver.read_verified(tree, _EPOCH_THREADS, self._plan.peer_files, number)
            counts = self._proxy.reset()
        self.results.add(f"{peer.name}_files_per_s", done.per_second)
        self.results.add(f"{peer.name}_gets_per_file", counts.of("GET", "HEAD") / done.operations)

    def _put_plain_objects(self, prefix: str) -> None:
        files = self._plan.files
        keys = [f"{prefix}d{file // 1000:05}/f{file:07}" for file in range(files)]
        # s3fs knows folders by such objects, and saves requests for them.
        for folder in [prefix, *sorted({key.rpartition("/")[0] + "/" for key in keys})]:
            self._direct.put(folder, b"", "application/x-directory")
        objects = self._requests([self._direct.target("PUT", key) for key in keys])
        self._driver.store_put(objects, files, self._plan.size_bytes, _PUT_CONNECTIONS)

    def _compare_with_peers(self) -> None:
        ours = self.results.median("epoch_files_per_s")
        rates = [self.results.median(f"{peer.name}_files_per_s") for peer in (S3fs, Rclone)]
        theirs = [rate for rate in rates if rate is not None]
        if ours is not None and theirs:
            self.results.add("epoch_times_peers", ours / max(theirs))

    # -- large --------------------------------------------------------------------------------------------

    def large(self) -> None:
        for number in range(self._plan.rounds):
            with self._volume(f"large-{number}", self._direct) as volume:
                _say(f"round {number + 1} of {self._plan.rounds}: large file")
                file = LargeFile(os.path.join(volume.mountpoint, "large"), self._plan.large_bytes)
                self._driver.write_large(file)
                _wait_until_durable(volume.folder)
                self._large_round(volume, file)

    def _large_round(self, volume: _Volume, file: LargeFile) -> None:
        objects = self._objects_of(volume.prefix)
        for name, store_is_cached in (("cold", False), ("cached", True)):
            suffix = "-cached" if store_is_cached else ""
            _evict(volume.folder)
            if not self._make_cold(volume):
                return
            if store_is_cached:
                self._driver.store_get_ranges(objects, *_ranges(4, 8 * _MIB))
            with self._measured(f"large{suffix}", volume):
                ours = self._driver.read_large(file).mb_per_second
            rates = []
            for connections, range_bytes in _GET_CONFIGURATIONS:
                if not store_is_cached:
                    drop_page_cache()
                with self._measured(f"store-get{suffix}", None):
                    done = self._driver.store_get_ranges(objects, *_ranges(connections, range_bytes))
                rates.append(done.mb_per_second)
            self.results.add(f"large_{name}_mb_s", ours)
            self.results.add(f"store_get_{name}_mb_s", max(rates))
            self.results.add(f"large_{name}_share", ours / max(rates))

    def _objects_of(self, prefix: str) -> StoreObjects:
        """The stored bytes of the large file, as requests for the driver."""
        found = [object for object in self._direct.objects(f"{prefix}/") if object.size_bytes >= _MIB]
        stored = sum(object.size_bytes for object in found)
        if stored < self._plan.large_bytes:
            raise Internal(
                f"{self._direct.name}/{prefix} holds {format_bytes(stored)} in objects of 1 MiB and more, "
                f"not the {format_bytes(self._plan.large_bytes)} that were written"
            )
        return self._requests(
            [f"{object.size_bytes} {self._direct.target('GET', object.key)}" for object in found]
        )

    # -- fsync --------------------------------------------------------------------------------------------

    def fsync(self) -> None:
        for number in range(self._plan.rounds):
            _say(f"round {number + 1} of {self._plan.rounds}: fsync")
            with self._volume(f"fsync-{number}", self._direct) as volume:
                files = SmallFiles(os.path.join(volume.mountpoint, "synced"), _FSYNCS, _FSYNCED_BYTES)
                with self._measured("fsync", volume):
                    latencies = self._driver.create_fsync(files, 1).fsync
                if latencies is None:
                    raise Internal("the driver did not time its fsyncs")
                self.results.add("fsync_p50_ms", latencies.p50_ms)
                self.results.add("fsync_p99_ms", latencies.p99_ms)
            prefix = f"{self._prefix}/puts-{number}/"
            targets = [self._direct.target("PUT", f"{prefix}{file}") for file in range(_FSYNCS)]
            with self._measured("store-put", None):
                done = self._driver.store_put(self._requests(targets), _FSYNCS, _FSYNCED_BYTES, 1)
            self.results.add("store_put_4k_ms", done.seconds / done.operations * 1e3)
            if self._delete:
                self._direct.delete(prefix)

    # -- what they share ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _volume(self, name: str, bucket: Bucket) -> Iterator[_Volume]:
        """A new volume, mounted; gone afterwards."""
        prefix = f"{self._prefix}/{name}"
        volume = _Volume(str(self._work / name), str(self._work / f"{name}-mount"), prefix)
        engine.create(
            volume.folder,
            object=f"s3://{bucket.name}/{prefix}",
            endpoint=bucket.endpoint,
            region=bucket.credentials.region,
        )
        os.mkdir(volume.mountpoint)
        try:
            engine.start(volume.folder)
            with connect(volume.folder, start=False) as opened:
                opened.mount(volume.mountpoint)
            yield volume
        finally:
            engine.stop(volume.folder)
            os.rmdir(volume.mountpoint)
            shutil.rmtree(volume.folder)
        if self._delete:
            self._direct.delete(f"{prefix}/")

    @contextlib.contextmanager
    def _measured(self, phase: str, volume: _Volume | None, **more: int) -> Iterator[Callable[[], float]]:
        """Notes who uses the processors. Gives a function for the seconds that the block took."""
        processes = {**self._processes, **more}
        self._settle()
        if volume is not None:
            with connect(volume.folder, start=False) as opened:
                processes["engine"] = opened.status().pid
        meter = Meter(processes)
        begin_ns = monotonic_ns()
        end_ns: list[int] = []
        yield lambda: (end_ns[0] - begin_ns) / 1e9
        end_ns.append(monotonic_ns())
        self.results.usages.setdefault(phase, []).append(meter.usage())

    def _settle(self) -> None:
        """Waits until a store of ours has done what it still does by itself: no phase pays for another."""
        store = self._processes.get("store")
        if store is None:
            return
        os.sync()
        for _ in range(_SETTLE_STEPS_MAX):
            before = process_seconds(store)
            sleep_seconds(_SETTLE_SECONDS)
            if process_seconds(store) - before <= _SETTLE_SECONDS * _SETTLED_SHARE:
                return
        self.results.note("the store did not come to rest between phases: it works in the background")

    def _import(self, source: Path, volume: _Volume) -> None:
        """As a person does it: the command, in a process of its own."""
        command = [sys.executable, "-m", "headrace.cli.main", "import", str(source), f"{volume.folder}:/data"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", check=False)
        if done.returncode != 0:
            tail = (done.stdout + done.stderr)[-500:].decode(errors="replace").strip()
            raise Internal(f"headrace import ended with status {done.returncode}: {tail}")

    def _make_cold(self, volume: _Volume) -> bool:
        return self._is_cold(EngineRestart(volume.folder).run(drop_page_cache))

    def _is_cold(self, why_not: str | None) -> bool:
        if why_not is not None:
            self.results.note(f"cold was not possible here ({why_not}): cold reads are left out")
        return why_not is None

    def _requests(self, lines: Sequence[str]) -> StoreObjects:
        """Requests to the store itself, signed for its address."""
        path = self._work / "requests"
        path.write_text("".join(f"{line}\n" for line in lines))
        return StoreObjects(self._direct.address, str(path))


class _Volume(NamedTuple):
    folder: str
    mountpoint: str
    prefix: str


def _ranges(connections: int, range_bytes: int) -> tuple[int, int]:
    return range_bytes, connections


def _wait_until_durable(folder: str) -> None:
    """Until `headrace status` says that nothing waits for upload."""
    with connect(folder, start=False) as opened:
        opened.sync()
        deadline_ns = monotonic_ns() + _DURABLE_SECONDS_MAX * 10**9
        while True:
            status = opened.status()
            if status.object is None:
                raise Internal(f"{folder} has no object tier")
            if not status.dirty_bytes and not status.object.dirty_segments:
                return
            if monotonic_ns() > deadline_ns:
                raise Unavailable(f"uploads do not end: {status.object}")
            sleep_seconds(_POLL_SECONDS)


def _evict(folder: str) -> None:
    """Empties the flash tier. Raises Internal if something stays."""
    with connect(folder, start=False) as opened:
        opened.evict()
        left = opened.status().object
    if left is None or left.clean_bytes or left.dirty_bytes:
        raise Internal(f"the flash tier of {folder} is not empty after evict: {left}")


def _check_no_errors(counts: Counts) -> None:
    """A store that refuses, or a proxy that gives up, is not what is to be measured."""
    failed = {status: count for status, count in counts.responses.items() if status >= 500}
    if failed or counts.broken_connections:
        raise Unavailable(f"the store answered {failed}, {counts.broken_connections} connections broke")


def _address(endpoint: str) -> str:
    """host:port of an endpoint; the driver and the proxy speak plain HTTP to an address."""
    scheme, _, address = endpoint.rstrip("/").partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "http" or not host or not port.isdecimal():
        raise Invalid(f"--endpoint {endpoint}: write http://ADDRESS:PORT (TLS would be measured with it)")
    return f"127.0.0.1:{port}" if host == "localhost" else address


@contextlib.contextmanager
def _environment(credentials: Credentials) -> Iterator[None]:
    """Only these AWS variables, for all that is started: a user's others would change what is measured."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    os.environ.update({name: value for name, value in credentials.environment().items() if value})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(before)


def _say(text: str) -> None:
    if stderr_is_terminal():
        click.echo(text, err=True)
