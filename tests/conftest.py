"""Fixtures for the tests that use the real thing: an engine, a volume, a mount, another user.

Every test works in `scratch`, a folder that all users may enter. It is checked when the test ends, and the
whole session's when the session ends: no engine and no mount of ours is left, or the run fails. Promises
about files take `place`, which is once the mount and once a folder of the local disk: the local disk proves
the test, the mount is what is tested.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.client import engine as engine_process
from headrace.errors import NotFound
from support.fault_proxy import FaultProxy
from support.object_volumes import Maker
from support.objects import Bucket, SeaweedFS, each_bucket, seaweedfs_missing
from support.system import (
    CI,
    NOBODY,
    T,
    as_user,
    detach,
    engines_under,
    kill_and_wait,
    mounts_under,
    need,
    need_fuse,
    need_root,
)
from support.volumes import ObjectVolumeUnderTest, VolumeUnderTest

# A run in the background of a script is started with SIGINT ignored, and its children would inherit that:
# then Ctrl-C, which several promises are about, would reach nobody.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every scratch folder of this session lies in it.
_SESSION = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    folder.chmod(0o755)
    config.stash[_SESSION] = folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.stash[_SESSION]
    engines, points = _clean(folder)
    if engines or points:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"left behind: engines {engines}, mounts {points}", red=True)


def _clean(folder: Path) -> tuple[list[int], list[str]]:
    """Ends and removes everything in `folder`; returns what should not have been there."""
    points = mounts_under(str(folder))
    for point in points:
        detach(point)
    engines = engines_under(str(folder))
    for pid in engines:
        kill_and_wait(pid)
    shutil.rmtree(folder, ignore_errors=True)
    return engines, points


@pytest.fixture(scope="session")
def engine_binary() -> str:
    """Path of the headraced under test: $HEADRACE_ENGINE, or the one that `make build` installed."""
    try:
        return engine_process.find_engine()
    except NotFound as error:
        need(False, f"no engine: {error}")
        raise


@pytest.fixture
def scratch(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder that every user may enter and only this one may write; gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[_SESSION]))
    folder.chmod(0o755)
    yield folder
    engines, points = _clean(folder)
    assert not engines, f"the test left engines {engines}"
    assert not points, f"the test left mounts {points}"


@pytest.fixture
def plain_dir(scratch: Path) -> Path:
    """A folder of the local disk."""
    folder = scratch / "plain"
    folder.mkdir()
    return folder


@pytest.fixture
def new_volume(engine_binary: str, scratch: Path) -> Iterator[Callable[[str], VolumeUnderTest]]:
    """Makes volumes by name, engine not started; all are stopped at the end."""
    made: list[VolumeUnderTest] = []

    def make(name: str = "vol") -> VolumeUnderTest:
        volume = VolumeUnderTest(scratch / name)
        made.append(volume)
        volume.create()
        return volume

    yield make
    for volume in made:
        volume.tear_down()


@pytest.fixture
def volume(new_volume: Callable[[str], VolumeUnderTest]) -> VolumeUnderTest:
    """A new volume with a running engine."""
    volume = new_volume("vol")
    volume.start()
    return volume


@pytest.fixture
def mount(volume: VolumeUnderTest) -> Iterator[Path]:
    """The new volume, mounted; unmounted at the end, which an open file would prevent."""
    need_fuse()
    point = volume.mount()
    yield point
    if engines_under(volume.name) and mounts_under(str(point)):
        _unmount_patiently(volume, point)


def _unmount_patiently(volume: VolumeUnderTest, point: Path) -> None:
    # The kernel releases a file a moment after close() returned.
    for attempt in range(50):
        try:
            volume.unmount(point)
            return
        except OSError:
            if attempt == 49:
                raise
            time.sleep(0.02)


@pytest.fixture(params=["plain", "mount"])
def place(request: pytest.FixtureRequest) -> Path:
    """An empty folder that must behave like a local disk: it is one, or it is the mount."""
    if request.param == "plain":
        plain: Path = request.getfixturevalue("plain_dir")
        return plain
    mounted: Path = request.getfixturevalue("mount")
    return mounted


@pytest.fixture
def other_user() -> Callable[[Callable[[], T]], T]:
    """Calls a function as user nobody, who is in no group of ours."""
    need_root()

    def call(function: Callable[[], T]) -> T:
        return as_user(NOBODY, function)

    return call


@pytest.fixture
def small_disk(scratch: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small file systems in memory: small_disk(bytes) gives the folder."""
    need_root()
    made: list[Path] = []

    def make(size_bytes: int, name: str = "small") -> Path:
        folder = scratch / name
        folder.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "headrace-test", str(folder)],
            check=True,
        )
        made.append(folder)
        return folder

    yield make
    for folder in made:
        for point in mounts_under(str(folder)):
            detach(point)


@pytest.fixture(scope="session")
def object_server(request: pytest.FixtureRequest) -> Iterator[SeaweedFS]:
    """A running SeaweedFS, the same for all tests; one that was killed or paused runs again for the next."""
    why = seaweedfs_missing()
    need(not why, why)
    folder = Path(tempfile.mkdtemp(prefix="seaweedfs-", dir=request.config.stash[_SESSION]))
    with SeaweedFS(folder) as server:
        yield server


@pytest.fixture(scope="session")
def _object_buckets(object_server: SeaweedFS) -> Iterator[Generator[Bucket, None, None]]:
    with closing(each_bucket(object_server)) as buckets:
        yield buckets


@pytest.fixture
def object_store(
    object_server: SeaweedFS, _object_buckets: Generator[Bucket, None, None]
) -> Iterator[Bucket]:
    """A new bucket in the running server."""
    yield next(_object_buckets)
    # An engine that is stopped after this wants to upload.
    object_server.ensure_running()


@pytest.fixture
def fault_proxy(object_store: Bucket) -> Iterator[FaultProxy]:
    """A proxy before `object_store` that breaks nothing yet; `object_store.through(fault_proxy.access)` and
    `fault_proxy.endpoint` go through it."""
    with FaultProxy(object_store.access) as proxy:
        yield proxy
    assert not proxy.problems, "\n".join(proxy.problems)


@pytest.fixture
def make_volume(scratch: Path, object_store: Bucket, fault_proxy: FaultProxy) -> Iterator[Maker]:
    """Makes volumes in the test's bucket, each with an engine, behind the test's proxy."""
    made: list[ObjectVolumeUnderTest] = []
    bucket = object_store.through(fault_proxy.access)

    def make(name: str = "vol", *, flash_bytes_max: int | None = None) -> ObjectVolumeUnderTest:
        volume = ObjectVolumeUnderTest(scratch / name, bucket, prefix=name)
        volume.create(flash_bytes_max=flash_bytes_max)
        made.append(volume)
        volume.start()
        fault_proxy.reset()
        return volume

    yield make
    fault_proxy.clear()
    fault_proxy.up()
    for volume in made:
        volume.tear_down()
    bucket.close()


@pytest.fixture(scope="module")
def shared_volume(
    request: pytest.FixtureRequest, object_server: SeaweedFS, engine_binary: str
) -> Iterator[tuple[ObjectVolumeUnderTest, FaultProxy]]:
    """One volume for all tests of a module, with an engine, in a bucket of its own behind a proxy of its own:
    making one for each would take most of the time."""
    object_server.ensure_running()
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[_SESSION]))
    folder.chmod(0o755)
    bucket = object_server.make_bucket()
    with FaultProxy(bucket.access) as proxy:
        volume = ObjectVolumeUnderTest(folder / "vol", bucket.through(proxy.access))
        volume.create()
        volume.start()
        yield volume, proxy
        proxy.clear()
        proxy.up()
        object_server.ensure_running()
        volume.tear_down()
        volume.bucket.close()
        assert not proxy.problems, "\n".join(proxy.problems)
    bucket.remove()
    bucket.close()


@pytest.fixture(scope="session")
def torch_python() -> str:
    """The interpreter that has torch: in the environment that HEADRACE_TORCH_VENV names (`make torch`)."""
    folder = os.environ.get("HEADRACE_TORCH_VENV")
    need(folder, "needs torch: run `make torch`, then HEADRACE_TORCH_VENV=FOLDER make test")
    python = os.path.join(folder or "", "bin", "python")
    need(os.access(python, os.X_OK), f"HEADRACE_TORCH_VENV names {folder}, which has no bin/python")
    return python


def pytest_report_header() -> str:
    user = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    return (
        f"headrace: {user}, kernel {os.uname().release}, {'CI: nothing may be skipped' if CI else 'not CI'}"
    )
