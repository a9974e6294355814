"""A router that gives what is no number, noticed by the loss of its step.

    loss of step k ──▶ host, behind the step     step k+1 is begun     not finite? ──▶ the routers, of the same batch

Nothing is added to the program: a weight that is no number makes the loss one, and such a step changes no parameter, so
its batch goes through the model's routers once more, and the layer is named.  A GPU is looked at one step late: by then
it computes the next one, and nobody waits.  Ranks have the same loss, so all of them look, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mycel.feed import Arguments


@dataclass
class SentLoss:
    """A loss on its way to the host, and the batch that it is of."""

    value: torch.Tensor
    arrived: torch.cuda.Event
    batch: Arguments

    @staticmethod
    def of(loss: torch.Tensor, batch: Arguments) -> SentLoss:
        value = torch.empty((), dtype=loss.dtype, pin_memory=True)
        value.copy_(loss.detach(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(loss.device))
        return SentLoss(value, arrived, batch)


class RouterWatch:
    """Of the losses of a step; `check` raises where a router breaks on a batch."""

    def __init__(self, check: Callable[[Arguments], None]) -> None:
        self.is_on = False  # are there routers, and is nobody else looking?
        self.check = check
        self._sent: SentLoss | None = None
        self._is_known = False  # that losses are not finite, and no router is why

    def see(self, loss: torch.Tensor, batch: Arguments) -> None:
        """RunError that names the layer, where the loss of this step (on a GPU, of the one before) shows one."""
        if loss.device.type != "cuda":
            self._look(float(loss.detach()), batch)
            return
        before, self._sent = self._sent, SentLoss.of(loss, batch)
        if before is not None:
            before.arrived.synchronize()
            self._look(float(before.value), before.batch)

    def _look(self, loss: float, batch: Arguments) -> None:
        is_broken = not math.isfinite(loss)
        if is_broken and not self._is_known:
            with torch.random.fork_rng():
                self.check(batch)
        self._is_known = is_broken
