"""Functions whose gradient the user gives: `custom_vjp`.

In a capture such a function is one `custom` equation (`capture/custom.py`); called in plain PyTorch it is a
torch.autograd.Function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mycel.capture import TRACING, rewritten, trace_custom
from mycel.errors import GradientError


class CustomVjp:
    """A function with a gradient of its own; see `custom_vjp`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.rule: Callable[..., Any] | None = None
        functools.update_wrapper(self, fn)

    def backward(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the gradient: rule(g, result, *args) gives one cotangent for each tensor argument (None: no
        gradient)."""
        self.rule = rule
        return rule

    def __call__(self, *args: Any) -> Any:
        if self.rule is None:
            name: str = self.__name__  # type: ignore[attr-defined]
            raise GradientError(f"{name} has no gradient yet: decorate its rule with @{name}.backward")
        if TRACING:
            return trace_custom(TRACING[-1], lambda given: (rewritten(self.fn)(*given), []), self._pull, args)
        return _eager_function(self).apply(self, *args)

    def _pull(self, args: tuple[Any, ...], result: Any, saved: list[Any], cotangents: list[Any]) -> Any:
        assert self.rule is not None
        g = cotangents[0] if isinstance(result, torch.Tensor) else tuple(cotangents)
        return (rewritten(self.rule) if TRACING else self.rule)(g, result, *args)


def custom_vjp(fn: Callable[..., Any]) -> CustomVjp:
    """A function whose gradient the user gives, in Mycel and under torch's autograd alike:

        @mycel.custom_vjp
        def f(x): ...

        @f.backward
        def _(g, y, x): return g * ...

    `g` is the gradient of y; the rule gives those of the arguments.
    """
    return CustomVjp(fn)


@functools.cache
def _eager_function(custom: CustomVjp) -> type[torch.autograd.Function]:
    """The same for plain PyTorch."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, custom: CustomVjp, *args: Any) -> Any:
            ctx.args, ctx.result = args, custom.fn(*args)
            return ctx.result

        @staticmethod
        def backward(ctx: Any, *gs: Any) -> Any:
            rest = iter(_listed(custom._pull(ctx.args, ctx.result, [], list(gs))))
            return None, *(next(rest) if isinstance(a, torch.Tensor) else None for a in ctx.args)

    return Eager


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
