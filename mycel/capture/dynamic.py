"""Operators whose shape depends on values: where a number of the batch decides, that number alone is the fact.

nonzero(x)                  n = how many are not zero      the first n of all places, those that are not zero first
masked_select(x, mask)      x[mask], by way of nonzero
repeat_interleave(n)        the sum of n
any other                   its operands are facts, its results constants
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mycel.ir import Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.trace import Tracer

aten = torch.ops.aten


def nonzero(tracer: Tracer, x: torch.Tensor, name: str = "nonzero") -> Any:
    """The places of what is not zero, a row each."""
    value = tracer.value(x)
    holds = value if value.dtype == torch.bool else o.ne(value, 0)
    flat = o.cast(o.reshape(holds, shape=(value.type.numel,)), dtype=torch.int64)
    count = _number(tracer, o.sum(flat, dims=(0,)), name)
    order = o.sort(flat, dim=0, descending=True, stable=True)[1]
    at = o.slice(order, dim=0, start=0, stop=count, step=1)
    columns: list[Var] = []
    for n in reversed(value.shape):
        columns.append(o.remainder(at, n))
        at = o.floor_divide(at, n)
    if not columns:
        return o.full(0, shape=(count, 0), dtype=torch.int64)
    return o.stack(*reversed(columns), dim=1)


def masked_select(tracer: Tracer, x: torch.Tensor, mask: torch.Tensor) -> Any:
    """The elements where the mask holds."""
    with tracer.mode:
        x, mask = torch.broadcast_tensors(x, mask)
        return x[mask]


def repeat_interleave(tracer: Tracer, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    """Each index as often as is said."""
    total = _number(tracer, o.sum(tracer.value(repeats), dims=(0,)), "repeat_interleave")
    with tracer.mode:
        return aten.repeat_interleave.Tensor(repeats, output_size=total)


def _number(tracer: Tracer, var: Var, name: str) -> int:
    return int(tracer.asked(tracer.wrap(var), name))


FORMS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: nonzero,
    aten.masked_select.default: masked_select,
    aten.repeat_interleave.Tensor: repeat_interleave,
}


def columns_of(tracer: Tracer, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    """The indices a mask stands for, one for each of its dims."""
    tracer.here()
    with tracer:
        places: torch.Tensor = tracer.wrap(nonzero(tracer, mask, "indexing with a boolean mask"))
    with tracer.mode:
        return places.unbind(1)
