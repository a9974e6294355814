"""Places where a mask holds, one by one: all places, each of which may be there (`maybe_items.py`).

for i in nonzero(mask): f(i)            =>      if mask[0]: f(0); if mask[1]: f(1); …
nonzero(mask).flatten().tolist()        =>      [0 if mask[0], 1 if mask[1], …]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.bounds import bounds
from mycel.capture.maybe_items import MaybeItem
from mycel.capture.record import Traced
from mycel.capture.rows import all_of_chosen, places
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.trace import Tracer

MOST_PLACES = 512  # of a mask, for which the body of a loop is written out


def is_chosen(tracer: Tracer, x: Any) -> bool:
    """Are these rows of which some count?"""
    return bool(tracer.rows) and isinstance(x, Traced) and tracer.cell(x).read() in tracer.rows


def present_values(tracer: Tracer, x: torch.Tensor, *more: Any) -> Any:
    """torch.unique(x) of whole numbers whose bounds are known, and no more than that: those of them that are there, as
    chosen rows; None for others."""
    known = bounds(tracer.cell(x).read(), tracer.producers) if x.dtype == torch.int64 else None
    if known is None or known[0] < 0 or known[1] >= MOST_PLACES or any(more[1:]):
        return None
    with tracer:
        flat = o.reshape(tracer.value(x), shape=(x.numel(), 1))
        numbers = o.iota(shape=(1, int(known[1]) + 1), dim=1, dtype=torch.int64)
        there = o.any(o.eq(flat, numbers), dims=(0,))
        values = o.reshape(places(tracer, there, tracer.source), shape=tuple(there.shape))
        nothing = o.full(0, shape=(0,), dtype=torch.int64)
        return tracer.wrap((values, nothing, nothing))


def possible_places(tracer: Tracer, x: Any, as_numbers: bool = False) -> list[Any] | None:
    """The rows of x, if these are places where a mask holds, as items that may be there; None where they are not."""
    if not is_chosen(tracer, x):
        return None
    value = tracer.cell(x).read()
    tracer.here()
    before, chosen_at = len(tracer.eqns), tracer.rows[value].source
    with tracer:
        every = all_of_chosen(tracer, value)
        at, keep = tracer.wrap(every) if every is not None else (None, None)
    known = tracer.concrete(at) if at is not None and len(at) <= MOST_PLACES else None
    if at is None or keep is None or known is None or (as_numbers and known.ndim > 1):
        tracer.undo(before)
        return None
    tracer.expert_loops.discard(chosen_at)  # each is computed where it is there
    tracer.lists_vary = True
    with _disable_current_modes():
        numbers = known.tolist() if as_numbers else None
    with tracer.mode:
        items, theres = at.unbind() if numbers is None else numbers, keep.unbind()
    return [MaybeItem(i, there, "", tracer.source) for i, there in zip(items, theres, strict=True)]
