"""Decisions in rewritten code: truth values that may not be known while tracing, and what hangs on them.

if t: …                      a `cond` where t is a traced tensor, Python's own `if` otherwise
a and b, a or b, not a       likewise; what is cheap and cannot fail is computed on both sides
a < b < c                    is (a < b) and (b < c)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture.branches import branch as traced_branch
from mycel.capture.branches import run
from mycel.capture.fence import refuse
from mycel.capture.maybe_items import varies
from mycel.capture.slots import Objects, assigned, variables
from mycel.capture.syntax.lists import some, vary
from mycel.capture.trace import TRACING, Tracer
from mycel.errors import CaptureError

_CHEAP = {
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isfinite", "isinf",
    "add", "sub", "mul", "neg", "abs", "cast", "full", "iota", "const", "reshape", "sum", "mean", "amax", "amin",
    "all", "any", "select", "slice",
}  # fmt: skip

_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "is": operator.is_, "is not": operator.is_not, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


def decide(x: Any) -> Any:
    """The truth of a Python value; a traced 0-dim bool for a tensor that is not known."""
    if vary() and varies(x):
        x = some(x)
    if not isinstance(x, torch.Tensor) or not TRACING or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return bool(x)
    if x.numel() != 1:
        raise refuse(
            f"a decision was asked of a tensor with {x.numel()} elements",
            "x.any() or x.all() to decide, torch.where to choose for each element",
        )
    known = known_number(x)
    if known is not None:
        return bool(known)
    x = x.reshape(()) if x.ndim else x
    return x if x.dtype == torch.bool else x != 0


def branch(
    test: Any, then: Callable[[], Any], orelse: Callable[[], Any], names: Sequence[str], guard: bool = False
) -> Any:
    """if test: then() else: orelse()"""
    answer = decide(test)
    if isinstance(answer, bool):
        return then() if answer else orelse()
    return branch_on(answer, then, orelse, names, guard)


def branch_on(
    answer: torch.Tensor,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    names: Sequence[str],
    guard: bool,
    closures: Sequence[Callable[..., Any]] | None = None,
) -> Any:
    """then() if answer else orelse(), for a traced one."""
    try:
        return traced_branch(TRACING[-1], answer, then, orelse, names, guard, closures)
    except CaptureError:  # what the branches make does not fit together: where the batch decides, one of them is taken
        known = TRACING[-1].fact(answer)
        if known is None:
            raise
    return then() if bool(known) else orelse()


def choose(test: Any, then: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
    """then() if test else orelse()"""
    return branch(test, then, orelse, assigned((then, orelse)), True)


def known_number(x: Any) -> Any:
    """The number a tensor is known to be, None if it is not; other values as they are."""
    if not isinstance(x, torch.Tensor) or not TRACING:
        return x
    value = TRACING[-1].concrete(x)
    return None if value is None else x.item()


def both(value: Any, *rest: Callable[[], Any]) -> Any:
    """value and rest[0]() and …"""
    for fn in rest:
        answer = decide(value) if isinstance(value, torch.Tensor) else bool(value)
        if answer is False:
            return value
        value = fn() if answer is True else _join(answer, fn, value, torch.logical_and)
    return value


def either(value: Any, *rest: Callable[[], Any]) -> Any:
    """value or rest[0]() or …"""
    for fn in rest:
        answer = decide(value) if isinstance(value, torch.Tensor) else bool(value)
        if answer is True:
            return value
        value = fn() if answer is False else _join(answer, fn, value, torch.logical_or)
    return value


def _join(answer: torch.Tensor, fn: Callable[[], Any], value: Any, logic: Callable[..., Any]) -> Any:
    """The right operand is computed only where the left one asks for it, unless it is cheap and cannot fail."""
    cheap = _cheap(TRACING[-1], fn)
    if value.dtype == torch.bool and cheap is (logic is torch.logical_or):
        return cheap  # x and False, x or True: whatever x is
    if isinstance(cheap, torch.Tensor) and value.dtype == torch.bool:
        return logic(answer, cheap)
    then, orelse = (fn, lambda: value) if logic is torch.logical_and else (lambda: value, fn)
    return traced_branch(TRACING[-1], answer, then, orelse, assigned((fn,)), True, (fn,))


def _cheap(tracer: Tracer, fn: Callable[[], Any]) -> torch.Tensor | bool | None:
    """The value of a closure computed here and now, if that is a truth value and a few harmless equations."""
    slots = variables((fn,), assigned((fn,)))
    blocks = dict(tracer.blocks)
    done = run(tracer, fn, slots, Objects.reached((fn,), slots.values()), ())
    tracer.blocks = blocks
    x, section = done.value, done.section
    if isinstance(x, bool) and not (slots or done.contents or done.writes or section.eqns):
        return x
    if (
        slots
        or done.contents
        or done.writes
        or not isinstance(x, torch.Tensor)
        or x.dtype != torch.bool
        or x.numel() != 1
    ):
        return None
    if section.regions[0].children or any(e.op.name not in _CHEAP for e in section.eqns):
        return None
    x = fn()
    return x.reshape(()) if x.ndim else x


def negate(x: Any) -> Any:
    """not x"""
    answer = decide(x)
    return not answer if isinstance(answer, bool) else torch.logical_not(answer)


def compare(left: Any, sign: str, right: Callable[[], Any], *rest: Any) -> Any:
    """left < right() < …"""
    middle = right()
    first = _SIGNS[sign](left, middle)
    return both(first, lambda: compare(middle, *rest)) if rest else first
