"""Places in lists that data decide: which item, in a list of known length, or which of those that are there.

    xs[k]                    the k-th of all, for a traced number k or among items that may be there (`maybe_items.py`)
    xs[k] = y                each item x_j is y where j is the place, else what it was
    del xs[k], xs.pop(k)     items behind the place move up; one that may be there is not there from here on
    xs.insert(k, y)          items from the place on move back
    sorted(xs, key=f), xs.sort(key=f), max(xs, key=f)      by the order of the keys

What moves is of one type: tensors of one shape, numbers, or containers of these.  On other lists, and for places that
Python knows, all of it is what Python does.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.capture.branches import check
from mycel.capture.fence import refuse
from mycel.capture.maybe_items import LoopItems, MaybeItem, parts, refuse_item, varies
from mycel.capture.merge import is_number, is_weak, meet, opened, own
from mycel.capture.record import Traced
from mycel.capture.syntax.lists import each_apart, loop_rows, nth, pick, vary
from mycel.capture.trace import TRACING
from mycel.capture.weak import as_number

_KEEP_ORDER = frozenset(("append", "extend", "clear", "copy"))  # methods that do the same to items that may be there
_DO_NOT_LOOK = (isinstance, type)
_OUT_OF_RANGE = "IndexError: list index out of range"


def is_unknown(x: Any) -> bool:
    """A traced number that Python does not know, not for this batch either."""
    return isinstance(x, Traced) and x.numel() == 1 and TRACING[-1].fact(x) is None


def subscripted(xs: Any) -> Any:
    """What x[i], x[i] = y and del x[i] are done with."""
    return Subscripted(xs) if TRACING and type(xs) in (list, tuple) else xs


class Subscripted:
    """A list or tuple where it is subscripted."""

    def __init__(self, xs: Any) -> None:
        self.xs = xs

    def __getitem__(self, key: Any) -> Any:
        if is_unknown(key):
            return _gathered(list(self.xs), _index(_place(self.xs, key)))
        if not (vary() and varies(self.xs)):
            return self.xs[key]
        return _sliced(self.xs, key) if isinstance(key, slice) else nth(self.xs, key.__index__())

    def __setitem__(self, key: Any, value: Any) -> None:
        if not is_unknown(key) and not (vary() and varies(self.xs)):
            self.xs[key] = value
            return
        if isinstance(key, slice):
            raise refuse_item("a part of them is written", self.xs)
        self.xs[:] = _written(self.xs, key, value)

    def __delitem__(self, key: Any) -> None:
        if not is_unknown(key) and not (vary() and varies(self.xs)):
            del self.xs[key]
            return
        if isinstance(key, slice):
            raise refuse_item("a part of them is deleted", self.xs)
        self.xs[:] = _without(self.xs, key)


def _sliced(xs: Any, key: slice) -> Any:
    """Bounds among the items that are there for sure, from either end."""
    sure = [not varies([item]) for item in xs]
    head, tail = (next(i for i, is_sure in enumerate(ordered) if not is_sure) for ordered in (sure, sure[::-1]))
    if key.step not in (None, 1, -1) or any(
        bound is not None and not (type(bound) is int and -tail <= bound <= head) for bound in (key.start, key.stop)
    ):
        raise refuse_item("a part of them is asked for", xs)
    return (xs if key.step != -1 else each_apart(xs))[key]


# -- one place


def _theres(xs: Sequence[Any]) -> torch.Tensor:
    """Is it there, for each item and each row of a loop."""
    theres = [loop_rows(x)[1] if isinstance(x, LoopItems) else _truth(parts(x)[1]).reshape(1) for x in xs]
    if not theres:
        raise IndexError("list index out of range")
    return torch.cat(theres)


def _truth(there: Any) -> torch.Tensor:
    return torch.ones((), dtype=torch.bool) if there is True else there


def _place(xs: Sequence[Any], key: Any) -> torch.Tensor:
    """Which of all items and rows is the key-th that is there; that there is one is checked when the program runs."""
    theres = _theres(xs)
    if type(key) is int:
        ordered = theres if key >= 0 else theres.flip(0)
        at = (ordered.long().cumsum(0) == (key + 1 if key >= 0 else -key)) & ordered
        at = at if key >= 0 else at.flip(0)
    else:
        wanted = key.detach().reshape(()).to(torch.int64)
        wanted = torch.where(wanted < 0, wanted + theres.sum(), wanted)
        at = (theres.long().cumsum(0) == wanted + 1) & theres
    check(TRACING[-1], at.any(), _OUT_OF_RANGE)
    return at


def _index(at: torch.Tensor) -> torch.Tensor:
    return at.long().argmax(0)


def _each_with(xs: Sequence[Any], at: torch.Tensor, change: Callable[[Any, torch.Tensor], Any]) -> list[Any]:
    """Items changed by what is said of their place, or for rows of a loop, of their places."""
    changed, i = [], 0
    for item in xs:
        n = loop_rows(item)[0].shape[0] if isinstance(item, LoopItems) else 1
        changed.append(change(item, at[i : i + n] if isinstance(item, LoopItems) else at[i]))
        i += n
    return changed


def _written(xs: Sequence[Any], key: Any, value: Any) -> list[Any]:
    """The items after xs[key] = value."""

    def change(item: Any, here: torch.Tensor) -> Any:
        if isinstance(item, LoopItems):
            rows, _ = loop_rows(item)
            if own(value) != own(as_number(TRACING[-1], rows[0]) if item.is_number else rows[0]):
                raise refuse_item("another kind of value is written among them", item)
            return replace(item, value=torch.where(here.reshape(-1, *(1 for _ in rows.shape[1:])), value, rows))
        if type(item) is MaybeItem:
            return replace(item, value=pick(here, value, item.value))
        return pick(here, value, item)

    return _each_with(xs, _place(xs, key), change)


def _without(xs: Sequence[Any], key: Any) -> list[Any]:
    """The items after del xs[key]."""
    at = _place(xs, key)
    if not varies(xs):
        behind = at.long().cumsum(0) > 0  # at the place and after it
        return [pick(behind[j], xs[j + 1], xs[j]) for j in range(len(xs) - 1)]
    known = next(item for item in xs if isinstance(item, MaybeItem))

    def change(item: Any, here: torch.Tensor) -> Any:
        if isinstance(item, LoopItems):
            return replace(item, there=item.mask() & ~here)
        value, there = parts(item)
        return MaybeItem(value, ~here if there is True else there & ~here, known.name, known.source)

    return _each_with(xs, at, change)


def _inserted(xs: Sequence[Any], key: Any, value: Any) -> list[Any]:
    """The items after xs.insert(key, value)."""
    wanted = key.detach().reshape(()).to(torch.int64)
    at = torch.where(wanted < 0, wanted + len(xs), wanted).clamp(0, len(xs))
    items = [*xs, value]
    return [
        pick(at > j, items[j], pick(at == j, value, items[j - 1])) if 0 < j < len(xs)
        else pick(at == j, value, items[j - 1] if j else items[0])
        for j in range(len(items))
    ]  # fmt: skip


# -- all places


def _gathered(values: list[Any], at: torch.Tensor) -> Any:
    """The value at a place of values of one type; with a tensor of places, all of them as rows."""
    apart = each_apart(values)
    first = [parts(x)[0] for x in apart]
    numbers = all(map(is_weak, first))
    if numbers or all(isinstance(x, torch.Tensor) and own(x) == own(first[0]) for x in first):
        rows = _stacked_numbers(first) if numbers else torch.stack(first)
        return as_number(TRACING[-1], rows[at]) if numbers and not at.ndim else rows[at]
    if all(x is first[0] for x in first):
        return first[0]
    columns = [opened(first[0], x) for x in first]
    if any(c is None for c in columns):
        raise refuse(
            "a tensor says which item of a list is asked for, and they are not of one type",
            "tensors of one shape, or tuples of these, in the list",
        )
    gathered = [_gathered(list(column), at) for column in zip(*(c[2] for c in columns if c), strict=True)]
    return columns[0][0].close(gathered)  # type: ignore[index]


def _stacked_numbers(values: list[Any]) -> torch.Tensor:
    want = meet(values[0], values[0])
    for x in values[1:]:
        want = max(want, meet(values[0], x), key=lambda w: w.type.dtype.itemsize)  # type: ignore[union-attr, type-var]
    dtype = want.type.dtype  # type: ignore[union-attr]
    return torch.stack([torch.full((), x, dtype=dtype) if is_number(x) else x.to(dtype) for x in values])


def _reordered(values: list[Any], order: torch.Tensor) -> list[Any]:
    """Values of one type in an order."""
    return [_gathered(values, order[i]) for i in range(len(values))]


def _keys(xs: Sequence[Any], key: Callable[..., Any] | None) -> torch.Tensor | None:
    """The keys to sort by, where a traced number is among them."""
    values = [x if key is None else key(x) for x in xs]
    if not values or not all(is_number(x) or isinstance(x, torch.Tensor) and x.numel() == 1 for x in values):
        return None
    if not any(map(is_unknown, values)):
        return None
    return _stacked_numbers([x if is_number(x) else x.detach().reshape(()) for x in values])


def ordered(xs: Any, key: Callable[..., Any] | None = None, reverse: Any = False) -> list[Any]:
    """sorted(xs, key=key, reverse=reverse)"""
    values = list(xs)
    if not TRACING or vary() and varies(values):
        return builtins.sorted(values, key=key, reverse=reverse)
    keys = _keys(values, key)
    if keys is None:
        return builtins.sorted(values, key=key, reverse=reverse)
    return _reordered(values, torch.argsort(keys, descending=bool(reverse), stable=True))


def first_by(xs: Sequence[Any], key: Callable[..., Any], is_max: bool) -> tuple[Any] | None:
    """(max(xs, key=key),) where a traced number is among the keys."""
    keys = _keys(xs, key)
    if keys is None:
        return None
    return (_gathered(list(xs), keys.argmax(0) if is_max else keys.argmin(0)),)


# -- methods


def list_method(fn: Any) -> Any:
    """A method of a list: of places that are not known, and among items that may be there."""
    xs, name = fn.__self__, fn.__name__
    if name == "sort":
        return lambda **how: xs.__setitem__(builtins.slice(None), ordered(xs, **how))
    if name == "pop":
        return lambda key=-1: _popped(xs, key)
    if name == "insert":
        return lambda key, value: _insert(xs, key, value)
    if name in _KEEP_ORDER or not (vary() and varies(xs)):
        return fn

    def method(*args: Any, **kwargs: Any) -> Any:
        raise refuse_item(f"{name} asks for a place among them", xs)

    return method


def _popped(xs: list[Any], key: Any) -> Any:
    is_plain = not (vary() and varies(xs))
    if not is_unknown(key) and (is_plain or _is_sure(xs, key)):
        return xs.pop(key)
    value = Subscripted(xs)[key]
    xs[:] = _without(xs, key)
    return value


def _is_sure(xs: list[Any], key: Any) -> bool:
    """Are the item at a place and all before it, counted from its end, there for sure?"""
    before = xs[: key + 1] if key >= 0 else xs[key:]
    return len(xs) >= len(before) == (key + 1 if key >= 0 else -key) and not varies(before)


def _insert(xs: list[Any], key: Any, value: Any) -> None:
    if is_unknown(key):
        if varies(xs):
            raise refuse_item("a tensor says where another is put", xs)
        xs[:] = _inserted(xs, key, value)
    elif vary() and varies(xs) and key != 0:
        raise refuse_item("insert asks for a place among them", xs)
    else:
        xs.insert(key, value)


def checked(fn: Any) -> Any:
    """A function that is not rewritten is not given a list whose length depends on values."""
    if any(fn is known for known in _DO_NOT_LOOK) or isinstance(fn, torch.nn.Module):
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if any(map(varies, values)) or varies(values):
            raise refuse_item("they are given to code that is not captured", *values)
        return fn(*args, **kwargs)

    return call


def is_list_method(fn: Any) -> bool:
    return isinstance(fn, types.BuiltinMethodType) and type(fn.__self__) is list
