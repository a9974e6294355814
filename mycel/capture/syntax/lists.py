"""What rewritten code calls for lists whose length depends on values (`maybe_items.py`): len, sum, subscripts …

On other lists all of it is what Python does.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mycel.capture.branches import branch, check
from mycel.capture.chosen_places import is_chosen
from mycel.capture.maybe_items import LoopItems, MaybeItem, parts, refuse_item, varies, with_value
from mycel.capture.merge import is_weak, meet
from mycel.capture.trace import TRACING
from mycel.capture.weak import as_number
from mycel.ir import type_of

_ITERATORS: Any = (zip, type(reversed([])), types.GeneratorType)


def vary() -> bool:
    """Are there such lists at all?"""
    return bool(TRACING) and TRACING[-1].lists_vary


def each_apart(xs: Any) -> Any:
    """The list with one item for each turn of a loop."""
    if not vary() or type(xs) not in (list, tuple) or not any(isinstance(item, LoopItems) for item in xs):
        return xs
    apart: list[Any] = []
    for item in xs:
        if isinstance(item, LoopItems):
            values, theres = loop_rows(item)
            numbers = functools.partial(as_number, TRACING[-1]) if item.is_number else lambda x: x
            apart += [MaybeItem(numbers(v), t, item.name, item.source) for v, t in zip(values, theres, strict=True)]
        else:
            apart.append(item)
    return apart


# -- choosing


def pick(test: Any, a: Any, b: Any) -> Any:
    """a if test else b"""
    if isinstance(test, bool):
        return a if test else b
    tracer = TRACING[-1]
    want = meet(a, b) if is_weak(a) and is_weak(b) else None
    if want is not None:
        return as_number(tracer, torch.where(test, _as_tensor(a, want.type.dtype), _as_tensor(b, want.type.dtype)))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and type_of(a) == type_of(b):
        return torch.where(test, a, b)
    return branch(tracer, test, lambda: a, lambda: b, ())


def _as_tensor(x: Any, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype)


def loop_rows(item: LoopItems) -> tuple[torch.Tensor, torch.Tensor]:
    if item.value is None:
        raise refuse_item("earlier ones are asked for", item)
    return item.value, item.mask()


def rows_of(xs: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """All items, those that are not there too, as rows of a tensor, and which of them are there."""
    values, theres = [], []
    for item in xs:
        if isinstance(item, LoopItems):
            value, there = loop_rows(item)
        else:
            value, is_there = parts(item)
            value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=_dtype(value))
            value = value.unsqueeze(0)
            there = torch.ones(1, dtype=torch.bool) if is_there is True else is_there.reshape(1)
        values.append(value)
        theres.append(there)
    return torch.cat(values), torch.cat(theres)


def _dtype(x: Any) -> torch.dtype | None:
    return torch.float64 if isinstance(x, float) else None


def _are_numbers(xs: Sequence[Any]) -> bool:
    return all(item.is_number if isinstance(item, LoopItems) else is_weak(parts(item)[0]) for item in xs)


def valued(xs: Sequence[Any], x: torch.Tensor) -> Any:
    """What was made of the items: a number where they are."""
    return as_number(TRACING[-1], x) if _are_numbers(xs) else x


def from_loops(xs: Sequence[Any]) -> bool:
    return any(isinstance(item, LoopItems) for item in xs)


# -- what lists are asked for


def some(xs: Sequence[Any]) -> Any:
    """bool(xs)"""
    if any(not isinstance(item, LoopItems) and parts(item)[1] is True for item in xs):
        return True
    return count(xs) > 0


def count(xs: Sequence[Any]) -> Any:
    """len(xs)"""
    total: Any = 0
    for item in xs:
        if isinstance(item, LoopItems):
            total = total + as_number(TRACING[-1], item.mask().sum())
        else:
            there = parts(item)[1]
            total = total + (1 if there is True else as_number(TRACING[-1], there))
    return total


def _sum(xs: Sequence[Any], start: Any = 0) -> Any:
    if from_loops(xs):
        values, theres = rows_of(xs)
        lane = theres.reshape(-1, *(1 for _ in values.shape[1:]))
        return start + valued(xs, torch.where(lane, values, torch.zeros_like(values)).sum(0))
    total = start
    for value, there in map(parts, xs):
        more = total + value
        total = more if there is True else pick(there, more, total)
    return total


def extreme(xs: Sequence[Any], sign: Callable[[Any, Any], Any]) -> Any:
    """max(xs) or min(xs), the first of several that are."""
    if from_loops(xs):
        values, theres = rows_of(xs)
        at_least(xs, 1)
        is_max, is_float = sign(1, 0), values.is_floating_point()
        least, most = (
            (-math.inf, math.inf) if is_float else (torch.iinfo(values.dtype).min, torch.iinfo(values.dtype).max)
        )
        shown = values.masked_fill(~theres, least if is_max else most)
        return valued(xs, values[shown.argmax(0) if is_max else shown.argmin(0)])
    best = nth(xs, 0)
    for value, there in map(parts, xs):
        better = sign(value, best)
        best = pick(better if there is True else better & there, value, best)
    return best


def _numbered(xs: Iterable[Any], start: Any = 0) -> list[Any]:
    """enumerate(xs, start)"""
    pairs = []
    for item in each_apart(xs):
        value, there = parts(item)
        pairs.append(with_value(item, (start, value)))
        start = start + (1 if there is True else as_number(TRACING[-1], there))
    return pairs


def _stacked(xs: Sequence[Any], dim: int = 0) -> torch.Tensor:
    """torch.stack(xs, dim)"""
    values, theres = rows_of(xs)
    return values[theres].movedim(0, dim)


def _joined(xs: Sequence[Any], dim: int = 0) -> torch.Tensor:
    """torch.cat(xs, dim)"""
    values, theres = rows_of(xs)
    dim = dim % (values.ndim - 1)
    return values[theres].movedim(0, dim).flatten(dim, dim + 1)


def _tensor(xs: Sequence[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch.tensor(xs) of numbers."""
    if not _are_numbers(xs):
        raise refuse_item("torch.tensor takes their values", xs)
    values, theres = rows_of(xs)
    is_float = values.is_floating_point()
    return values.to(dtype or (torch.get_default_dtype() if is_float else values.dtype))[theres]


def nth(xs: Sequence[Any], key: int) -> Any:
    """xs[key]"""
    backwards, n = key < 0, key if key >= 0 else -key - 1
    ordered = list(xs)[::-1] if backwards else list(xs)
    if not varies(ordered[: n + 1]) and len(ordered) > n:
        return ordered[n]
    if len([item for item in ordered if not varies([item])]) <= n:
        at_least(xs, n + 1)
    if from_loops(ordered):
        values, theres = rows_of(xs)
        order = theres.flip(0) if backwards else theres
        at = ((order.long().cumsum(0) == n + 1) & order).long().argmax(0)
        return valued(xs, values[len(theres) - 1 - at if backwards else at])
    if len(ordered) <= n:
        raise IndexError("list index out of range")
    later: list[Any] = []  # the first, second … of the items behind the one looked at
    for value, there in map(parts, reversed(ordered)):
        here = [value, *later[:n]]
        later = [x if there is True or later[i:] == [] else pick(there, x, later[i]) for i, x in enumerate(here)]
    return later[n]


def at_least(xs: Sequence[Any], n: int) -> None:
    """Stop the program where there are less than n items."""
    check(TRACING[-1], count(xs) >= n, "IndexError: list index out of range")


# -- functions that lists are given to


def _on_lists(plain: Callable[..., Any], varying: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first argument may be such a list, or go over one."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if args and vary():
            xs = list(args[0]) if isinstance(args[0], _ITERATORS) else args[0]
            if varies(xs):
                return varying(xs, *args[1:], **kwargs)
            args = (xs, *args[1:])
        return plain(*args, **kwargs)

    return function


def _item_by_item(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that hands items on as they are."""
    return lambda *args, **kwargs: plain(*map(each_apart, args), **kwargs)


def _length(xs: Any) -> Any:
    """len(xs), also of chosen rows."""
    if TRACING and is_chosen(TRACING[-1], xs):
        return xs.shape[0]
    return _on_lists(builtins.len, count)(xs)


LISTS: dict[Any, Callable[..., Any]] = {
    len: _length,
    sum: _on_lists(builtins.sum, _sum),
    enumerate: _on_lists(builtins.enumerate, _numbered),
    **{plain: _item_by_item(plain) for plain in (zip, reversed, list, tuple)},
    torch.stack: _on_lists(torch.stack, _stacked),
    torch.cat: _on_lists(torch.cat, _joined),
    torch.concat: _on_lists(torch.concat, _joined),
    torch.tensor: _on_lists(torch.tensor, _tensor),
}
