"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
from fake_destination import FakeDestination


@pytest.fixture
def destination() -> FakeDestination:
    return FakeDestination()
