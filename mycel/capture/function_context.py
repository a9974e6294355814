"""What forward and backward of a torch.autograd.Function share while they are captured: the `ctx` they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mycel.capture.tree import holds_tensors


class Context:
    """What a Function's forward and backward share."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.saved_tensors: Sequence[torch.Tensor | None] = ()
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self.plain: tuple[torch.Tensor, ...] = ()  # results that are marked to have no gradient
        self.own = {*vars(self), "own"}

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.plain = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        """What is updated in place is seen by itself."""

    def attributes(self) -> dict[str, Any]:
        """What forward keeps besides, with tensors in it."""
        return {k: v for k, v in vars(self).items() if k not in self.own and holds_tensors(v)}
