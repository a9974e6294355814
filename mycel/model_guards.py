"""A model that ranks hold in parts is no model to call, to copy, to pickle or to ask for its state: whoever does is
told what to do instead, unless it is known that it is in parts.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from mycel.errors import TrainError


class GuardedModel(Protocol):
    """`is_open`: does whoever uses the model now know that it is in parts?"""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def is_open(self) -> bool: ...


GUARDED: weakref.WeakKeyDictionary[torch.nn.Module, GuardedModel] = weakref.WeakKeyDictionary()


def guard(parts: GuardedModel, model: bool) -> None:
    """Whoever calls the `model`, if that is in parts, or asks it or the optimiser for their state, or gives them
    another, is told what to do instead."""
    asked = StateRefusal(parts, "asked for its state", "step.state_dict(), step.save(folder)")
    given = StateRefusal(parts, "given a state", "step.load_state_dict(state), step.load(folder)")
    _guard_calls()
    for module in parts.model.modules() if model else ():
        GUARDED[module] = parts
        module.register_state_dict_pre_hook(asked)
        module.register_load_state_dict_pre_hook(given)
    parts.optimizer.register_state_dict_pre_hook(asked)
    parts.optimizer.register_load_state_dict_pre_hook(given)


@dataclass(frozen=True)
class StateRefusal:
    """A hook of modules and optimisers that refuses what is done with their state while they are in parts.  Who copies
    or pickles the model does so with its hooks: that is refused as well, and a copy of a model that is whole refuses
    nothing."""

    parts: GuardedModel
    what: str
    instead: str

    def __call__(self, whose: Any, *_: Any) -> None:
        if not self.parts.is_open:
            raise _in_parts(f"{type(whose).__name__} was {self.what}", f"{self.instead}, or `with step.whole():`")

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.parts.is_open:
            raise _in_parts(f"{type(self.parts.model).__name__} was copied", "copy.deepcopy in `with step.whole():`")
        return partial(refuse_nothing)

    def __reduce__(self) -> Any:
        if not self.parts.is_open:
            hint = "step.save(folder), step.export(folder), or `with step.whole():`"
            raise _in_parts(f"{type(self.parts.model).__name__} was pickled", hint)
        return partial, (refuse_nothing,)


def refuse_nothing(*_: Any) -> None:
    """The hook of a model that was pickled whole."""


@functools.cache
def _guard_calls() -> None:
    """One hook for all models, once: hooks of a module itself are part of what was captured."""

    def refuse_call(module: torch.nn.Module, *_: Any) -> None:
        if module in GUARDED and not GUARDED[module].is_open:
            raise _in_parts(f"{type(module).__name__} was called", "step.evaluate(batch), or `with step.whole():`")

    torch.nn.modules.module.register_module_forward_pre_hook(refuse_call)


def _in_parts(what: str, hint: str) -> TrainError:
    return TrainError(f"{what}, but this rank holds parts of its tensors\n  try       {hint}")
