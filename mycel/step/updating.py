"""What a step does with its gradients beside its program.

by rule         the program updates parameters; p.grad is what it leaves, where that was asked for
torch's own     the program leaves gradients, the optimiser runs as it is (`torch_update.py`)
added up        they are kept for `step.apply()` (`accumulation.py`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mycel import optimizers, torch_update
from mycel.accumulation import Accumulation
from mycel.errors import PlanError
from mycel.parts import ShardedModel, UnshardedStep
from mycel.step.settings import Settings


class Updating:
    """Of one step; `by_rule`: is the update part of the program?"""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.by_rule = not optimizers.without_rule(optimizer)
        self._told = False  # that it is not
        self._gradients: dict[str, torch.Tensor] = {}

    def choose(self) -> None:
        """Is the update part of the program, or torch's?  The latter is said once."""
        why = self.why_torch()
        self.by_rule = not why
        if why and not self._told:
            self._told = True
            torch_update.warn_of_torch(self.optimizer, why)

    def why_torch(self) -> str:
        """Why torch has to take the update; empty: nothing."""
        return optimizers.without_rule(self.optimizer) or optimizers.left_to_torch(self.model, self.optimizer)

    def refuse_split(self, parts: ShardedModel) -> None:
        """PlanError where torch would take the update of parts."""
        if not self.by_rule:
            torch_update.refuse_split(self.optimizer, self.why_torch(), parts.plan, _split(parts))

    def gradient(self, p: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Where the program puts the gradient of a parameter."""
        held = self._gradients.get(name)
        if held is None or held.shape != p.shape or held.dtype != p.dtype or held.device != p.device:
            held = self._gradients[name] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
        return held

    def gradients_of(
        self, unsharded: UnshardedStep, unused: Collection[torch.nn.Parameter]
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        named = [(p, name) for g in unsharded.groups for p, name in zip(g.params, g.group.params, strict=True)]
        return [(p, self._gradients[name]) for p, name in named if p not in unused]

    def finish(
        self,
        unsharded: UnshardedStep,
        outs: Sequence[Any],
        unused: Collection[torch.nn.Parameter],
        parts: ShardedModel | None,
    ) -> None:
        """What is left to do with gradients after the program: parameters get them, and the optimiser, where its update
        is no part of the program.  Those that the step did not use have none."""
        pairs = self.gradients_of(unsharded, unused)
        finite = self.by_rule or bool(torch.isfinite(outs[unsharded.results]) & torch.isfinite(outs[0]))
        if not self.by_rule and finite:
            clipping = self.settings.clip_norm, self.settings.clip_value
            torch_update.update(self.optimizer, pairs, *clipping, partial(norm_of, parts))
        if self.by_rule or not finite or not self.settings.grads:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
            if self.settings.grads:
                for p, g in pairs:
                    p.grad = g


class AddingUp(Updating):
    """The update is left to another step, for which gradients are added up with the `weights` of each call."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        super().__init__(model, optimizer, settings)
        self.by_rule = False
        self.sums = Accumulation()
        self.weights: list[float] = []  # of the call that is under way

    def choose(self) -> None:
        """Not here."""

    def in_parts(self, parts: ShardedModel) -> bool:
        """Do ranks hold parts of what is updated, of its tensors or some of them?"""
        written = parts.written
        return bool(_split(parts) or parts.plan.zero or written.is_pipeline or written.place)

    def by_program(self, parts: ShardedModel) -> bool:
        """Is the update of what was added up a program's?"""
        return self.in_parts(parts) and not self.why_torch()

    def refuse_split(self, parts: ShardedModel) -> None:
        if why := self.why_torch():
            torch_update.refuse_split(self.optimizer, why, parts.plan, _split(parts))
        if parts.plan.synced() is not None:
            raise PlanError(
                "step.accumulate adds up gradients of ranks that step together, and with sync replicas take steps of "
                "their own\n"
                "  try       train_step(…, accumulate=k): parts of one large batch, under any plan"
            )

    def finish(
        self,
        unsharded: UnshardedStep,
        outs: Sequence[Any],
        unused: Collection[torch.nn.Parameter],
        parts: ShardedModel | None,
    ) -> None:
        self.sums.add(self.gradients_of(unsharded, unused), self.weights)


def norm_of(parts: ShardedModel | None, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """Of gradients that this rank has whole, or some of, or parts of: then all ranks call it."""
    if parts is None or not (parts.owners or _split(parts)):
        return torch.nn.utils.get_total_norm(gradients.values())
    return parts.norm(gradients)


def _split(parts: ShardedModel) -> list[str]:
    """Trained parameters that ranks hold parts of, in the order of the model: all ranks name the same."""
    stored = {name for name in parts.stored if not parts.layouts[name].is_whole}
    return [name for name, _ in parts.model.named_parameters() if name in stored]
