"""The epoch's order: a bijection, uniform, the same as the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Invalid
from headrace.policy.order import permute

U64 = st.integers(0, 2**64 - 1)
GOLDEN = Path(__file__).parents[1] / "golden" / "order.json"


@given(st.integers(0, 3000), U64, U64)
def test_an_epoch_holds_each_sample_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@given(st.integers(1, 2**62), U64, U64, st.data())
def test_positions_are_computed_one_by_one(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    together = permute(np.array(positions, dtype=np.uint64), n, seed, epoch)
    assert len(set(together.tolist())) == len(positions)
    assert together.max() < n
    for position, sample in zip(positions, together, strict=True):
        assert permute([position], n, seed, epoch)[0] == sample


@given(st.integers(2, 500), U64)
@settings(max_examples=30)
def test_epochs_and_seeds_differ(n: int, seed: int) -> None:
    orders = {permute(np.arange(n), n, seed, epoch).tobytes() for epoch in range(4)}
    assert len(orders) > 1 or n < 6


def test_order_is_uniform() -> None:
    n, bins = 100_000, 100
    order = permute(np.arange(n), n, seed=3, epoch=1).astype(np.int64)
    distance = np.abs(np.diff(order)).mean()
    assert abs(distance / (n / 3) - 1) < 0.02
    table, _, _ = np.histogram2d(np.arange(n) * bins // n, order * bins // n, bins=bins)
    expected = n / bins**2
    chi_square = ((table - expected) ** 2 / expected).sum()
    freedom = (bins - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)


def test_first_sample_is_uniform_over_epochs() -> None:
    counts = np.bincount([int(permute([0], 10, 5, epoch)[0]) for epoch in range(5000)], minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 33.7  # chi-square, 9 degrees, p = 0.0001


def test_shape_and_input_are_kept() -> None:
    positions = np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert permute(positions, 6, 0, 0).shape == (2, 3)
    assert np.array_equal(positions.ravel(), np.arange(6))


@pytest.mark.parametrize(
    ("positions", "n", "seed", "epoch"),
    [
        ([3], 3, 0, 0),
        ([-1], 3, 0, 0),
        ([0.5], 3, 0, 0),
        ([0], 2**62 + 1, 0, 0),
        ([0], 3, -1, 0),
        ([0], 3, 0, 2**64),
    ],
)
def test_out_of_range_is_invalid(positions: list[float], n: int, seed: int, epoch: int) -> None:
    with pytest.raises(Invalid):
        permute(positions, n, seed, epoch)


def test_python_agrees_with_the_golden_vectors() -> None:
    vectors = json.loads(GOLDEN.read_text())  # written by the engine's side; missing is a failure
    vectors = vectors.get("vectors", vectors) if isinstance(vectors, dict) else vectors
    assert len(vectors) >= 5
    for vector in vectors:
        found = permute(
            np.array([int(p) for p in vector["positions"]], dtype=np.uint64),
            int(vector["n"]), int(vector["seed"]), int(vector["epoch"]),
        )  # fmt: skip
        assert found.tolist() == [int(i) for i in vector["indices"]], vector
