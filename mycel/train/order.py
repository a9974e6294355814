"""In which order a run sees its sequences: for each epoch another permutation of [0, count), computed, never stored.

    position = step * batch + i       epoch = position // count       index = permutation[seed, epoch](position % count)

The permutation is a Feistel network with keyed rounds on the smallest domain 2^(2h) that holds `count`; a value that
falls outside [0, count) is sent through again until it falls inside, which it does as the network is a bijection.  So
any step is found without the steps before it, and an epoch sees every sequence exactly once, also where a batch reaches
over its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

ROUNDS = 8
MIN_HALF_BITS = 3  # half as wide, the network has too few permutations to look random


@dataclass(frozen=True)
class Order:
    """The order of `count` sequences under `seed`; `indices(step, batch)` are those of one step."""

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"an order needs at least one sequence, not {self.count}")

    def indices(self, step: int, batch: int, rows: range | None = None) -> npt.NDArray[np.int64]:
        """The sequences of step `step` (from 0) with `batch` sequences a step: all, or those in some rows of it."""
        rows = range(batch) if rows is None else rows
        return self.at(step * batch + np.arange(rows.start, rows.stop, dtype=np.int64))

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sequences at some places of a run."""
        epochs, within = np.divmod(positions, self.count)
        return self._permute(within.astype(np.uint64), self._keys(epochs.astype(np.uint64))).astype(np.int64)

    def _keys(self, epochs: U64) -> U64:
        """One key for each round (rows) and position (columns)."""
        seed = mix(np.array([self.seed % 2**64], np.uint64))
        rounds = np.arange(ROUNDS, dtype=np.uint64)[:, None]
        return mix(mix(seed ^ epochs)[None, :] + rounds)

    def _permute(self, x: U64, keys: U64) -> U64:
        half = max(MIN_HALF_BITS, ((self.count - 1).bit_length() + 1) // 2)
        x = _feistel(x, keys, half)
        while len(outside := np.flatnonzero(x >= self.count)):
            x[outside] = _feistel(x[outside], keys[:, outside], half)
        return x


def mix(x: U64) -> U64:
    """A bijection of 64-bit words that looks random: splitmix64's step (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: U64, keys: U64, half: int) -> U64:
    """A bijection of [0, 4^half): (left, right) → (right, left ^ round(right)), once for each key."""
    shift, low = np.uint64(half), np.uint64(2**half - 1)
    left, right = x >> shift, x & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & low)
    return left << shift | right
