"""Several sources in given shares: which sequence of which source comes at which place of a run.

    data.train: [books/*.txt, code.jsonl]     data.weights: [0.7, 0.3]

Places are taken in blocks of 1000.  In each block every source has its share of the places, to the nearest; which ones,
another permutation says for each block.  Within a source sequences come in an order of its own, epoch after epoch.  So
a place is found without those before it, ranks read their rows alone, and shares are exact in every thousand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.sizes import counted
from mycel.train.data import Data
from mycel.train.order import Order

BLOCK = 1000


@dataclass(frozen=True)
class BlendOrder:
    """The order of the sequences of several splits, numbered one split after the other."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def indices(self, step: int, batch: int, rows: range | None = None) -> npt.NDArray[np.int64]:
        """The sequences of step `step` (from 0) with `batch` sequences a step: all, or those in some rows of it."""
        shares = np.array(self.shares(), np.int64)
        starts = np.concatenate([[0], np.cumsum(shares)])
        bases = np.concatenate([[0], np.cumsum(self.counts)])
        rows = range(batch) if rows is None else rows
        blocks = (step * batch + np.arange(rows.start, rows.stop, dtype=np.int64)) // BLOCK
        slots = Order(BLOCK, self.seed).indices(step, batch, rows)
        sources = np.searchsorted(starts, slots, "right") - 1
        within = blocks * shares[sources] + slots - starts[sources]
        chosen = np.empty(len(slots), np.int64)
        for i, count in enumerate(self.counts):
            mine = np.flatnonzero(sources == i)
            chosen[mine] = bases[i] + Order(count, self.seed + i).at(within[mine])
        return chosen

    def shares(self) -> list[int]:
        """How many places of a block each source has: at least one, the nearest to its weight."""
        exact = np.array(self.weights) / sum(self.weights) * BLOCK
        places = np.maximum(1, np.floor(exact)).astype(int)
        while (rest := BLOCK - int(places.sum())) != 0:
            off = exact - places
            at = int(np.argmax(off)) if rest > 0 else int(np.argmin(np.where(places > 1, off, np.inf)))
            places[at] += 1 if rest > 0 else -1
        return [int(n) for n in places]


class Blend:
    """Several splits as one, their sequences numbered one split after the other."""

    def __init__(self, splits: Sequence[Any]) -> None:
        self.splits, self.length = tuple(splits), splits[0].length
        self.counts = tuple(split.count for split in splits)
        self._bases = np.concatenate([[0], np.cumsum(self.counts)])
        self.count = int(self._bases[-1])

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)

    @property
    def each(self) -> tuple[str, int, str]:
        each: tuple[str, int, str] = self.splits[0].each
        return each

    def batch(self, indices: Sequence[int] | npt.NDArray[Any]) -> dict[str, npt.NDArray[np.int64]]:
        """The sequences at `indices`, in their order."""
        at = np.asarray(indices, np.int64)
        sources = np.searchsorted(self._bases, at, "right") - 1
        whole = {name: np.zeros((len(at), *x.shape[1:]), x.dtype) for name, x in self.splits[0].batch(()).items()}
        for i, split in enumerate(self.splits):
            rows = np.flatnonzero(sources == i)
            if len(rows):
                for name, x in split.batch(at[rows] - self._bases[i]).items():
                    whole[name][rows] = x
        return whole

    @property
    def packed(self) -> bool:
        return any(split.packed for split in self.splits)

    def lengths(self, indices: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """How many tokens each row has, padding not counted."""
        at = np.asarray(indices, np.int64)
        sources = np.searchsorted(self._bases, at, "right") - 1
        lengths = np.zeros(len(at), np.int64)
        for i, split in enumerate(self.splits):
            lengths[sources == i] = split.lengths(at[sources == i] - self._bases[i])
        return lengths

    def loud(self, index: int, first: int) -> int:
        """How many tokens of a sequence carry loss."""
        source = int(np.searchsorted(self._bases, index, "right")) - 1
        return int(self.splits[source].loud(index - int(self._bases[source]), first))


def blended(parts: Sequence[Data], names: Sequence[str], weights: Sequence[float], held_apart: bool) -> Data:
    """The data of several sources as one; `held_apart`: all have the same validation data."""
    train = Blend([data.train for data in parts])
    validation = parts[0].validation if held_apart else Blend([data.validation for data in parts])
    shares = BlendOrder(train.counts, tuple(weights)).shares()
    listed = ", ".join(f"{n / BLOCK:.1%} {name}" for n, name in zip(shares, names, strict=True))
    sizes = [
        f"{name}: {counted(split.tokens, 'token')}, {counted(split.count, 'sequence')} of {split.length}"
        for name, split in (("train", train), ("validation", validation))
    ]
    notes = dict.fromkeys(note for data in parts for note in data.report[2:])
    identity = [[data.fingerprint for data in parts], list(weights)]
    fingerprint = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    stores = tuple(store for data in parts for store in data.stores)
    return Data(train, validation, (f"{sizes[0]}: {listed}", sizes[1], *notes), fingerprint, stores)
