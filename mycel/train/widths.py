"""Rows of unequal length, in batches no wider than they need: `data.buckets`.

    rows of a batch      5   12   7   9      of at most data.length 64
    data.buckets         [16, 32]            the batch is 16 wide; behind the end of its rows there was nothing but
                                             padding, which counts for nothing: loss and gradients are the same

The width follows from all rows of a batch, so ranks that read parts of it know the same.  The step is compiled once for
each width; the first time for the widest, whose memory is what a plan has to do with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mycel.errors import TrainError
from mycel.feed import Local
from mycel.step import Step
from mycel.train.rank_batch import outline

TEXTS = ("input_ids", "attention_mask", "labels")


@dataclass(frozen=True)
class Narrow:
    """The rows of a split, cut to a width."""

    split: Any
    width: int

    def batch(self, indices: Sequence[int] | npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = self.split.batch(indices)
        texts = {name for name, x in arrays.items() if name in TEXTS and x.ndim > 1}
        return {name: x[..., : self.width] if name in texts else x for name, x in arrays.items()}


@dataclass(frozen=True)
class Widths:
    """The widths that batches of a split come in; none: all are `data.length` wide."""

    split: Any
    sizes: tuple[int, ...]

    @staticmethod
    def of(split: Any, buckets: Sequence[int] | None) -> Widths:
        """As `data.buckets` says; TrainError for rows that are all of one length."""
        if buckets is None:
            return Widths(split, ())
        if not hasattr(split, "lengths") or getattr(split, "packed", False):
            raise TrainError(
                "data.buckets is for rows of unequal length, and those of this data are all of one\n"
                "  at        data.buckets\n  try       data.pack=false, or no buckets"
            )
        return Widths(split, tuple(sorted({*(n for n in buckets if n < split.length), split.length})))

    def at(self, indices: npt.NDArray[Any]) -> Any:
        """The split as wide as these rows, all of a batch, need it."""
        if not self.sizes:
            return self.split
        longest = int(np.max(self.split.lengths(indices), initial=0))
        return Narrow(self.split, next(n for n in self.sizes if n >= longest))

    def local_step(self, step: Step, rows: int) -> Callable[..., torch.Tensor]:
        """The step, called with this rank's part of a batch of any width."""
        if not self.sizes:
            return step.local(**outline(self.split, rows))
        return LocalSteps(step, [outline(Narrow(self.split, n), rows) for n in reversed(self.sizes)])


class LocalSteps:
    """A step for parts of batches of several forms, each compiled when it comes."""

    def __init__(self, step: Step, forms: Sequence[dict[str, torch.Tensor]]) -> None:
        self.step, self.forms = step, forms
        self._known: dict[tuple[Any, ...], Local] = {}
        self._local(forms[0])

    def _shapes(self, form: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        slices = {name: self.step.slices(name, x.shape) for name, x in form.items()}
        return tuple(sorted((name, tuple(s.stop - s.start for s in part)) for name, part in slices.items()))

    def _local(self, form: dict[str, torch.Tensor]) -> Local:
        local = self.step.local(**form)
        return self._known.setdefault(self._shapes(form), local)

    def __call__(self, **part: torch.Tensor) -> Any:
        shapes = tuple(sorted((name, tuple(x.shape)) for name, x in part.items()))
        if shapes not in self._known:
            self._local(next(form for form in self.forms if self._shapes(form) == shapes))
        return self._known[shapes](**part)
