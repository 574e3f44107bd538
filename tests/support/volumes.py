"""A volume under test: the real engine, started and ended by the real client, killed when a test wants it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import headrace
from headrace.client import engine
from headrace.model.message import ObjectStatus
from support.objects import Bucket
from support.system import alive, detach, engines_under, kill_and_wait, mounts_under, wait_until


class VolumeUnderTest:
    """One volume folder, its engine and its mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)
        self._opened: list[headrace.Volume] = []

    # The engine

    def create(self) -> None:
        engine.create(self.name)

    def start(self, *, crash_at: str | None = None, system: bool = False, **options: int) -> engine.Ready:
        """Starts an engine. crash_at: the point of `headrace_base::crash`, as NAME or NAME:PASS, at which it
        kills itself."""
        with environment("HEADRACE_CRASH_AT", crash_at):
            ready = engine.start(self.name, system=system, **options)
        assert ready is not None, f"an engine serves {self.name} already"
        return ready

    @property
    def pid(self) -> int:
        pid = engine.running_pid(self.name)
        assert pid is not None, f"no engine serves {self.name}"
        return pid

    def kill(self, pid: int | None = None) -> None:
        """kill -9, and what it mounted is taken away as an administrator would."""
        kill_and_wait(self.pid if pid is None else pid, signal.SIGKILL)
        self.detach()

    def wait_for_crash(self, pid: int, seconds: float = 30.0) -> None:
        """Waits until engine `pid` has killed itself at its crash point."""
        wait_until(lambda: not alive(pid), seconds, f"engine {pid} reaching its crash point")
        self.detach()

    def detach(self) -> None:
        for point in mounts_under(str(self.folder.parent)):
            if self._is_ours(point):
                detach(point)

    def _is_ours(self, point: str) -> bool:
        mounted = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
        fields = [line.split(" ") for line in mounted]
        return any(line[1] == point.replace(" ", "\\040") and line[2].startswith("fuse") for line in fields)

    def stop(self) -> None:
        """Stops the engine cleanly."""
        self.close()
        assert engine.stop(self.name), f"no engine served {self.name}"

    def restart(self) -> engine.Ready:
        self.stop()
        return self.start()

    # The client

    def connect(self) -> headrace.Volume:
        """A connected volume; starts no engine by itself, so that one that died is noticed."""
        opened = headrace.connect(self.name, start=False)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for opened in self._opened:
            opened.close()
        self._opened.clear()

    # Mounts

    def mount(self, name: str = "mnt", *, read_only: bool = False, allow_other: bool | None = None) -> Path:
        """Mounts on a folder beside the volume and returns it. For all users when root mounts."""
        point = self.folder.parent / name
        point.mkdir(exist_ok=True)
        others = os.geteuid() == 0 if allow_other is None else allow_other
        self.connect().mount(point, read_only=read_only, allow_other=others)
        return point

    def unmount(self, point: Path) -> None:
        self.connect().unmount(point)

    # What is on disk

    def segments(self) -> list[Path]:
        """Segment files with bytes of files in them."""
        found = self.folder.glob("segments/*/*")
        return sorted(path for path in found if path.suffix in (".pack", ".file"))

    def tear_down(self) -> None:
        """Stops the engine; whatever had to be ended by force is a failure."""
        self.close()
        self.detach()
        left = engines_under(self.name)
        if left:
            engine.stop(self.name)
        still = engines_under(self.name)
        for pid in still:
            kill_and_wait(pid)
        assert not still, f"engines {still} of {self.name} did not stop; log: {self.log_tail()}"

    def log_tail(self) -> str:
        try:
            return (self.folder / "engine.log").read_text(errors="replace")[-4000:]
        except OSError:
            return "(no log)"


class ObjectVolumeUnderTest(VolumeUnderTest):
    """A volume whose segments are durable in a bucket. Its engines get the bucket's credentials."""

    def __init__(self, folder: Path, bucket: Bucket, prefix: str = "vol") -> None:
        super().__init__(folder)
        self.bucket = bucket
        self.prefix = prefix

    def create(self, *, flash_bytes_max: int | None = None, adopt: bool = False) -> None:
        with self.credentials():
            engine.create(
                self.name,
                object=self.bucket.url(self.prefix),
                flash_bytes_max=flash_bytes_max,
                adopt=adopt,
            )

    def start(self, *, crash_at: str | None = None, system: bool = False, **options: int) -> engine.Ready:
        with self.credentials():
            return super().start(crash_at=crash_at, system=system, **options)

    @contextmanager
    def credentials(self) -> Iterator[None]:
        """The environment of who may use the bucket, for programs started inside."""
        with ExitStack() as stack:
            for name, value in self.bucket.access.environment().items():
                stack.enter_context(environment(name, value))
            yield

    def status(self) -> ObjectStatus:
        with headrace.connect(self.name, start=False) as volume:
            status = volume.status().object
        assert status is not None
        return status

    def wait_until_clean(self, seconds: float = 30.0) -> None:
        """Waits until nothing is on flash alone. What is in memory is not counted: sync first."""
        wait_until(lambda: self.status().dirty_segments == 0, seconds, "the uploads")

    def evict(self) -> None:
        """Syncs, then leaves no byte of a segment on flash."""
        with headrace.connect(self.name, start=False) as volume:
            volume.sync()

            def evicted() -> bool:
                # What is arriving at this moment (somebody read ahead) stays until it has arrived.
                volume.evict()
                return not list(self.folder.glob("segments/*/*"))

            wait_until(evicted, 10, "the end of what is arriving from the object tier")

    def objects(self) -> dict[str, int]:
        """Objects of segments that hold bytes of files, and their sizes."""
        sizes = self.bucket.sizes(f"{self.prefix}/segments/")
        return {key: size for key, size in sizes.items() if not key.endswith(".idx")}


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """`name` set to `value` (None: unset) for what is started inside."""
    before = os.environ.get(name)
    try:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
