"""Several of torch's optimisers as one, each with parameters of its own: Muon for matrices, AdamW for the rest.

    step = mycel.train_step(model, [torch.optim.Muon(matrices), torch.optim.AdamW(others)])

Groups and state are those of the optimisers themselves, so that their schedulers work as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mycel.errors import TrainError


class SeveralOptimizers(torch.optim.Optimizer):
    """`optimizers`, one after the other; `owners`: whose each of its groups is."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "nothing"
            hint = "[torch.optim.Muon(…), torch.optim.AdamW(…)]"
            raise TrainError(f"train_step was given a list of {kinds} as optimizer\n  try       {hint}")
        self.optimizers = list(optimizers)
        self.owners = [each for each in optimizers for _ in each.param_groups]
        try:
            super().__init__([group for each in optimizers for group in each.param_groups], {})
        except ValueError as error:  # a parameter in two of them
            raise TrainError(
                f"optimizers share a parameter: {error}\n  try       each parameter in one of them"
            ) from None
        for each in optimizers:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        """The groups and the state are one for all."""
        for each in self.optimizers:
            each.state = self.state
            each.param_groups = [g for g, owner in zip(self.param_groups, self.owners, strict=True) if owner is each]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def owner(optimizer: torch.optim.Optimizer, index: int) -> torch.optim.Optimizer:
    """Who takes the update of a group."""
    return optimizer.owners[index] if isinstance(optimizer, SeveralOptimizers) else optimizer


def each_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]
