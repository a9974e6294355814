"""This rank's part of a batch, read by index: of the sequences only its rows, and of these only its positions are kept.

step.slices("input_ids", (64, 2048))  =>  rows 16:32, positions 0:2048     split.batch(sequences of rows 16:32)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mycel.step import Step
from mycel.train.store import I64


def outline(split: Any, size: int) -> dict[str, torch.Tensor]:
    """A batch of so many sequences without data."""
    none = {name: torch.from_numpy(x) for name, x in split.batch(()).items()}
    return {name: torch.empty((size, *x.shape[1:]), dtype=x.dtype, device="meta") for name, x in none.items()}


def rank_batch(step: Step, split: Any, size: int, sequences: Callable[[range], I64]) -> dict[str, torch.Tensor]:
    """What this rank's step takes of a batch of `size` sequences; `sequences` are those in some of its rows."""
    parts = {name: step.slices(name, x.shape) for name, x in outline(split, size).items()}
    rows = _hull(parts)
    arrays = split.batch(sequences(rows))
    return {name: torch.from_numpy(_cut(arrays[name], rows.start, *part)) for name, part in parts.items()}


def _hull(parts: Mapping[str, tuple[slice, ...]]) -> range:
    """The rows that some tensor has a part of."""
    rows = [part[0] for part in parts.values() if part[0].start < part[0].stop]
    return range(min(r.start for r in rows), max(r.stop for r in rows)) if rows else range(0)


def _cut(x: Any, first: int, rows: slice, *others: slice) -> Any:
    """A tensor's part of the rows that were read, which begin with row `first`."""
    held = slice(rows.start - first, rows.stop - first) if rows.start < rows.stop else slice(0, 0)
    return np.ascontiguousarray(x[(held, *others)])
