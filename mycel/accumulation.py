"""A step over several calls: gradients of each are added up, and one update is taken of their mean.

    loss = step.accumulate(**batch)        forward and backward; the gradient is added to those before
    loss = step.accumulate(**another)
    step.apply()                           clip, update

The update is torch's (`torch_update.py`), on whole parameters.  Where all of a batch is at hand at once, `accumulate=k`
is faster, and weighs the rows of its parts as one batch would.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mycel.errors import TrainError


class Accumulation:
    """The sum of gradients so far, by parameter, and of how many calls; `norm` of their mean, once it is applied."""

    def __init__(self) -> None:
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.calls = 0

    def add(self, gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """One more call's."""
        self.calls += 1
        for p, g in gradients:
            if p in self.sums:
                self.sums[p].add_(g)
            else:
                self.sums[p] = g.clone()

    def mean(self) -> tuple[list[tuple[torch.nn.Parameter, torch.Tensor]], torch.Tensor]:
        """Of all calls since the last time, which are then forgotten; and its norm."""
        if not self.calls:
            raise TrainError("there is nothing to apply\n  try       step.accumulate(batch) before")
        gradients = [(p, total.div_(self.calls)) for p, total in self.sums.items()]
        self.sums, self.calls = {}, 0
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for _, g in gradients]))
        return gradients, norm
