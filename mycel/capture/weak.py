"""Python numbers that control flow made tensors, or that were asked of tensors (`x.item()`) whose values are not known:
0-dim, i64, f64 or bool, and *weak*.

Arithmetic on them is Python's, so that a loop gives what its written-out turns give: with numbers it stays in i64 and
f64 (`1 / 2` is 0.5 in f64), with other tensors a weak one takes the dtype a Python number would take.  They do not
change in place, as numbers do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.ir import promote, type_of

_BINARY = {
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "floor_divide",
    "remainder",
    "pow",
    "rsub",
    "__rsub__",
    "__rdiv__",
    "__rtruediv__",
    "__floordiv__",
    "__rfloordiv__",
    "__rmod__",
    "__mod__",
    "__rpow__",
    "__and__",
    "__or__",
    "__xor__",
    "__lshift__",
    "__rshift__",
    "lt",
    "le",
    "gt",
    "ge",
    "ne",
    "eq",
    "__eq__",
    "__ne__",
}
_UNARY = {"neg", "abs", "positive", "__invert__", "logical_not"}
_BITS = {"__and__", "__or__", "__xor__", "__invert__", "logical_not", "eq", "__eq__", "ne", "__ne__"}
_DIVISIONS = {"div", "true_divide", "__rdiv__", "__rtruediv__"}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": torch.Tensor.add,
    "sub_": torch.Tensor.sub,
    "mul_": torch.Tensor.mul,
    "div_": torch.Tensor.div,
    "pow_": torch.Tensor.pow,
    "remainder_": torch.Tensor.remainder,
    "floor_divide_": torch.Tensor.floor_divide,
    "__iadd__": torch.Tensor.add,
    "__isub__": torch.Tensor.sub,
    "__imul__": torch.Tensor.mul,
    "__idiv__": torch.Tensor.div,
    "__itruediv__": torch.Tensor.div,
    "__ifloordiv__": torch.Tensor.floor_divide,
    "__imod__": torch.Tensor.remainder,
    "__ipow__": torch.Tensor.pow,
    "__iand__": torch.Tensor.__and__,
    "__ior__": torch.Tensor.__or__,
    "__ixor__": torch.Tensor.__xor__,
    "__ilshift__": torch.Tensor.__lshift__,
    "__irshift__": torch.Tensor.__rshift__,
}
_EXAMPLES = {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}


def as_numbers(func: Any, name: str, args: Sequence[Any]) -> tuple[Any, Sequence[Any], bool]:
    """(function, arguments, is the result weak?) that stand for an operation with weak operands."""
    if name in _IN_PLACE and _is_weak(args[0]):
        func = _IN_PLACE[name]
        name = func.__name__
    if name.rstrip("_") not in _BINARY and name not in _BINARY | _UNARY:
        return func, args, False
    strong = [type_of(a) for a in args if isinstance(a, torch.Tensor) and not _is_weak(a)]
    if strong:
        return func, [_as(a, promote(*strong, _EXAMPLES[a.dtype])) if _is_weak(a) else a for a in args], False
    floats = name in _DIVISIONS or any(isinstance(a, float) or (_is_weak(a) and a.dtype == torch.float64) for a in args)
    if floats:
        args = [_as(a, torch.float64) if _is_weak(a) and not a.dtype.is_complex else a for a in args]
    elif name not in _BITS:
        args = [_as(a, torch.int64) if _is_weak(a) and a.dtype == torch.bool else a for a in args]
    return func, args, True


def as_number(tracer: Any, x: torch.Tensor) -> Any:
    """x.item() of a tensor whose value is not known: a number that no gradient flows through."""
    wide = x.dtype if x.dtype == torch.bool else torch.float64 if x.is_floating_point() else torch.int64
    number: Any = x.detach().reshape(()).to(torch.complex128 if x.is_complex() else wide, copy=True)
    number.weak = tracer.numbers = True
    return number


def _is_weak(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and getattr(x, "weak", False)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def python_type(x: torch.Tensor) -> type:
    """What Python would have for a number that is a tensor here."""
    return bool if x.dtype == torch.bool else float if x.is_floating_point() else complex if x.is_complex() else int
