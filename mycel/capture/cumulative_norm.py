"""Batch norm with momentum=None, whose running statistics are plain averages over all batches.

torch asks its counter for a Python float, 1 / float(num_batches_tracked): a number that every call changes.  Traced,
the same is computed of the counter as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[..., torch.Tensor]


def cumulative_forward(plain: Forward) -> Forward:
    """The forward of batch norms; `plain` wherever there is no average over all batches."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counts:
            return plain(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        y = torch.nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.add_((new - running) / self.num_batches_tracked)
        return y

    return forward
