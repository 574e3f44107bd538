"""Fixtures: a fake engine for tests of the client alone, and the real one for tests of the promises."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.client import engine as engine_process
from headrace.errors import HeadraceError, NotFound
from support.fake_engine import FakeEngine
from support.system import need


@pytest.fixture
def fake_engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(tmp_path / "volume")
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def engine_binary() -> str:
    """Path of the headraced to test with: $HEADRACE_ENGINE or an installed one; CI=true demands it."""
    try:
        return engine_process.find_engine()
    except NotFound as error:
        need(False, f"no engine: {error}")
        raise


@pytest.fixture
def folder(engine_binary: str, tmp_path: Path) -> Iterator[str]:
    """A path for a volume; whatever engine serves it at the end is stopped, or killed if it does not stop."""
    path = str(tmp_path / "vol")
    yield path
    if os.path.exists(os.path.join(path, "HEADRACE")):
        _stop(path)
    shutil.rmtree(path, ignore_errors=True)


def _stop(path: str) -> None:
    pid = engine_process.running_pid(path)
    try:
        engine_process.stop(path)
    except HeadraceError:
        if pid:
            os.kill(pid, signal.SIGKILL)
        raise


@pytest.fixture
def volume(folder: str) -> Iterator[headrace.Volume]:
    """A new volume, served by the real engine."""
    with headrace.connect(folder, create=True) as connected:
        yield connected
