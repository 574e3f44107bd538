"""The order of an epoch's samples: a keyed permutation of [0, n), computed position by position.

State is (seed, epoch) and nothing else: any position of any epoch costs the same, so resuming and sharding
need no list. A balanced Feistel network of 8 rounds over 2 x half bits, with cycle walking: a value that
falls outside [0, n) is permuted again until it falls inside, which keeps it a bijection (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). The domain has fewer than 4 n values, so at most 4 passes on
average. Rounds are mixed with the finaliser of splitmix64 (Steele et al., OOPSLA 2014).

The engine computes the same in `headrace_format::order`; tests/golden/order.json holds both together.
Changing anything here changes the meaning of saved loader states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import Invalid

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

SAMPLES_MAX = 1 << 62
ROUNDS = 8
_WORD = (1 << 64) - 1


def permute(positions: ArrayLike, n: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The sample index at each position of the epoch `epoch` under `seed`; same shape as `positions`.

    positions: integers in [0, n), any number, any order. n: samples, at most 2**62. seed, epoch: [0, 2**64).
    A new array; pure; about 0.3 ms for 256 positions, 0.13 us each for many.
    Raises Invalid when a position, n, seed or epoch is out of range.

    >>> sorted(permute(range(5), 5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    if not 0 <= n <= SAMPLES_MAX:
        raise Invalid(f"a permutation has 0 to 2**62 samples, not {n}")
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value <= _WORD:
            raise Invalid(f"{name} must be in [0, 2**64), not {value}")
    given = np.asarray(positions)
    if given.size and given.dtype.kind not in "ui":
        raise Invalid(f"positions must be integers, not {given.dtype}")
    if given.size and (given.min() < 0 or int(given.max()) >= n):
        raise Invalid(f"positions must be in [0, {n}); they span [{given.min()}, {given.max()}]")
    values = given.astype(np.uint64)  # a copy, also when the type fits
    if n < 2 or not values.size:
        return values

    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key) for key in _round_keys(seed, epoch)]
    flat = values.reshape(-1)
    walking = np.arange(flat.size)
    moved = flat
    while walking.size:
        moved = _feistel(moved, half, keys)
        inside = moved < np.uint64(n)
        flat[walking[inside]] = moved[inside]
        outside = ~inside
        walking, moved = walking[outside], moved[outside]
    return flat.reshape(values.shape)


def _round_keys(seed: int, epoch: int) -> list[int]:
    seeded = _mix_int(seed + 0x9E3779B97F4A7C15)
    return [
        _mix_int(seeded ^ _mix_int(epoch * 0xD1B54A32D192ED03 + round_number + 1))
        for round_number in range(ROUNDS)
    ]


def _feistel(values: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    shift = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Array arithmetic on uint64 wraps, as the definition wants.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    value &= _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
