"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from fake_destination import FakeDestination  # noqa: E402


@pytest.fixture
def destination() -> FakeDestination:
    return FakeDestination()
