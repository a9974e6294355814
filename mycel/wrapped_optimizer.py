"""An object that is no optimiser of torch's but holds one, and takes its steps: it changes the learning rate, averages
weights, counts.

    class Warmup:                                          step = mycel.train_step(model, Warmup(torch.optim.Adam(…)))
        def __init__(self, optimizer): …
        def step(self): …; self.optimizer.step()

Groups and state are those of the optimiser that it holds, the step is its own (`torch_update.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.several_optimizers import SeveralOptimizers, each_of

DEPTH = 3  # wrappers around wrappers


class WrappedOptimizer(torch.optim.Optimizer):
    """`wrapper` takes the steps of `held`; that a first one reaches it is looked at."""

    def __init__(self, wrapper: Any, held: torch.optim.Optimizer) -> None:
        self.wrapper, self.held, self._has_stepped = wrapper, held, False

    @property
    def state(self) -> Any:
        return self.held.state

    @state.setter
    def state(self, state: Any) -> None:
        self.held.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.held.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.held.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.held.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._has_stepped:
            self.wrapper.step()
            return
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p._version for p in params]
        calls: list[int] = []
        hooks = [each.register_step_pre_hook(lambda *_: calls.append(1)) for each in each_of(self.held)]
        try:
            self.wrapper.step()
        finally:
            for hook in hooks:
                hook.remove()
        if not calls and before == [p._version for p in params]:
            raise TrainError(
                f"{name_of(self)}.step() took no step of the optimizer that it holds\n"
                "  try       train_step(model, optimizer), and this one's step() after each: schedulers work as always"
            )
        self._has_stepped = True

    def state_dict(self) -> dict[str, Any]:
        return self.held.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held.load_state_dict(state_dict)


def as_optimizer(given: Any) -> Any:
    """An object that holds optimisers and takes their steps, as an optimiser; anything else as it is."""
    if isinstance(given, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)) or not _steps(given):
        return given
    held = [*{id(x): x for x in _held(given, DEPTH)}.values()]
    if not held:
        return given
    return WrappedOptimizer(given, held[0] if len(held) == 1 else SeveralOptimizers(held))


def _steps(given: Any) -> bool:
    """Has it a step that asks for nothing?"""
    try:
        inspect.signature(given.step).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _held(given: Any, depth: int) -> Iterator[torch.optim.Optimizer]:
    """The optimisers in its attributes, and in those of what else steps."""
    for attribute in getattr(given, "__dict__", {}).values():
        for value in attribute if isinstance(attribute, (list, tuple)) else [attribute]:
            if isinstance(value, torch.optim.Optimizer):
                yield value
            elif depth and _steps(value):
                yield from _held(value, depth - 1)


def name_of(optimizer: Any) -> str:
    """The class of an optimiser, as its user has it."""
    kind = type(optimizer.wrapper if isinstance(optimizer, WrappedOptimizer) else optimizer)
    home = "torch.optim" if getattr(torch.optim, kind.__name__, None) is kind else kind.__module__
    return f"{home}.{kind.__qualname__}"
