"""Lists whose length depends on values: what a branch, or a turn of a loop, puts into a list may be there or not.

    if c: xs.append(y)                      [..., MaybeItem(y, c)]; so are the turns of a short loop with a break
    for i in range(50):                     [..., LoopItems(ys, there)]: a row for each turn
        xs.append(y)
        if c: break

    len(xs)                                 how many are there, a number of the program
    xs[-1]                                  the last one that is there; that there is one is checked at run time
    for x in xs: …                          if it is there: …
    torch.stack(xs)                         all rows, of which those that are there are chosen (`rows.py`)

Items stay in their order, so adding to either end and joining such lists is what Python does.  What else they are
asked for is in `syntax/lists.py`, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mycel.capture.fence import refuse
from mycel.errors import CaptureError

_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and or xor neg "
    "abs lt le gt ge eq ne getitem setitem iter len bool float int index contains hash"
)


@dataclass(eq=False)
class MaybeItem:
    """An item of a list, and a traced truth value: is it there?  Where it is not, `value` means nothing.  `name` is
    what the user calls the list, `source` where the code is that has put it there."""

    value: Any
    there: Any
    name: str
    source: str

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.Tensor, name):
            _refused(self)
        raise AttributeError(name)

    def __torch_function__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refused(self)


@dataclass(eq=False)
class LoopItems(MaybeItem):
    """What the turns of a loop have put into a list: rows of `value` (None inside of a scan, where nobody has them
    yet), and a truth value for each, or a function that gives them."""

    is_number: bool  # are they Python's numbers?

    def mask(self) -> torch.Tensor:
        there: torch.Tensor | Callable[[], torch.Tensor] = self.there
        return there if isinstance(there, torch.Tensor) else there()


def _refused(item: MaybeItem, *args: Any) -> NoReturn:
    raise refuse_item("one of them is used", item)


for _name in _OPERATORS.split():
    setattr(MaybeItem, f"__{_name}__", _refused)


def refuse_item(what: str, *values: Any) -> CaptureError:
    """What was asked of such lists or items cannot be said for all lengths."""
    listed = (item for value in values for item in (value if type(value) in (list, tuple) else [value]))
    item = next((item for item in listed if isinstance(item, MaybeItem)), None)
    name = item.name if item is not None and item.name else "a list"
    way = "each turn of a loop on tensors" if isinstance(item, LoopItems) else "one branch than after the other"
    return refuse(
        f"{name} has {'another number of' if isinstance(item, LoopItems) else 'other'} items after {way}, and {what}",
        "len(xs), xs[-1], sum(xs), torch.stack(xs) or a for loop over the list; or a tensor of the full size, and a "
        "count",
        item.source if item is not None else "",
    )


def varies(xs: Any) -> bool:
    """A list or tuple with items that may be there."""
    return type(xs) in (list, tuple) and any(isinstance(item, MaybeItem) or _is_row(item) for item in xs)


def _is_row(item: Any) -> bool:
    """One of zip's tuples."""
    return type(item) is tuple and any(isinstance(part, MaybeItem) for part in item)


def parts(item: Any) -> tuple[Any, Any]:
    """(value, is it there?) of one item; of a tuple of items that are there together (zip), all values."""
    if isinstance(item, LoopItems):
        raise refuse_item("one of them is used", item)
    if type(item) is MaybeItem:
        return item.value, item.there
    if _is_row(item):
        theres = [part.there if type(part) is MaybeItem else None for part in item]
        if any(there is None or there is not theres[0] for there in theres):
            raise refuse_item("one stands beside what is there when others are", item)
        return tuple(part.value for part in item), theres[0]
    return item, True


def with_value(item: Any, value: Any) -> Any:
    """Another value that is there when an item is."""
    there = parts(item)[1]
    known = next((part for part in (item if type(item) is tuple else [item]) if type(part) is MaybeItem), None)
    return value if known is None else MaybeItem(value, there, known.name, known.source)
