"""What torch's own functions mean in operators: the rules capture applies, each written beside the operator it serves.

    @captures("aten.add.Tensor", "aten.add.Scalar")
    def _(x, y, alpha=1):
        return add(x, y if alpha == 1 else mul(y, alpha))

A rule takes the torch function's arguments, with Vars for tensors, and returns Vars.  In-place and `out=` forms of an
ATen overload need no rule: capture derives them from the functional one.  An operator whose `aten` field names an
overload needs no rule either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mycel.ir.op import BUILDERS

RULES: dict[Any, Callable[..., Any]] = {}


def captures(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated rule for ATen overloads (by name) or torch functions."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            RULES[resolve(target) if isinstance(target, str) else target] = rule
        return rule

    return enter


def resolve(name: str) -> Any:
    """ "aten.add.Tensor" -> the overload."""
    overload: Any = torch.ops
    for part in name.split("."):
        overload = getattr(overload, part)
    return overload


def assign(target: Any, value: Any) -> None:
    """An in-place update made by a rule: capture records it."""
    BUILDERS[-1].assign(target, value)


def draw() -> tuple[Any, int]:
    """(key Var, site) for one random equation; capture supplies them."""
    return BUILDERS[-1].draw()


def layer() -> tuple[str, str]:
    """The name of the module whose code is captured, and the line."""
    tracer = BUILDERS[-1]
    return tracer.regions[-1].path, tracer.source


def is_on_gpu() -> bool:
    """Does the code that is captured compute on a GPU?"""
    return bool(BUILDERS[-1].device.type == "cuda")
