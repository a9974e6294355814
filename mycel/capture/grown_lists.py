"""Lists that every turn of a loop adds an item to.

    for i in range(50):             loop: the items so far are rows of a tensor of 50, part of the loop's state; turn i
        xs.append(f(x))             writes row i.  Rows of turns that were not taken are not there.
        if c(x): break

    for x in rows:                  scan: the items are the rows that its turns give, all of them there
        xs.append(f(x))

While a turn is traced, `LoopItems` stand in the list for what earlier turns have added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mycel.capture.branches import TracedClosure
from mycel.capture.fence import refuse
from mycel.capture.maybe_items import LoopItems, parts
from mycel.capture.merge import Want, fit, is_number, own, wrapped
from mycel.capture.slots import Slot, Watched
from mycel.capture.trace import Tracer
from mycel.errors import CaptureError
from mycel.ir import Type, Var


class GrownList:
    """A list under growth: `turns` are at most taken."""

    def __init__(self, tracer: Tracer, box: Watched, now: list[Any], turns: int) -> None:
        self.tracer, self.box, self.turns = tracer, box, turns
        self.xs: list[Any] = box.object
        self.start = list(self.xs)
        added = now[len(self.start) :]
        if len(added) != 1 or any(a is not b for a, b in zip(self.start, now, strict=False)):
            raise self.refusal()
        value, there = parts(added[0])
        if not isinstance(value, torch.Tensor) and not is_number(value):
            raise self.refusal()
        self.want, self.is_sure = own(value), there is True
        tracer.lists_vary = True
        self.xs.append(self.earlier())

    def earlier(self) -> LoopItems:
        """What stands for the items of earlier turns."""
        return self._items(None, None)

    def _items(self, value: Any, there: Any) -> LoopItems:
        return LoopItems(value, there, self.box.name, self.tracer.source, self.want.weak)

    def refusal(self) -> CaptureError:
        return refuse_growth(self.box)

    def added(self) -> tuple[Any, Any]:
        """What a turn has added, and is it there?"""
        tail = self.xs[len(self.start) + 1 :]
        if len(tail) != 1:
            raise self.refusal()
        value, there = parts(tail[0])
        if own(value) != self.want or (there is True) != self.is_sure:
            raise self.refusal()
        return value, there

    @property
    def slot(self) -> Slot | None:
        """The state of the loop that the list is, if any."""
        return None

    def end_turn(self) -> None:
        """Take what a turn has added out of the list."""
        raise NotImplementedError

    def ends(self, done: TracedClosure) -> list[Var]:
        """What a turn gives as rows, in its section."""
        return []

    def finish(self, outs: list[Var]) -> None:
        """The list after the last turn; its rows are the first of `outs`."""
        raise NotImplementedError

    def undo(self) -> None:
        self.xs[:] = self.start


class ListOfLoop(GrownList):
    """… in a loop of which nobody knows when it ends; `finished` tells how many turns are over, in a turn and
    in the test before it."""

    def __init__(self, tracer: Tracer, box: Watched, now: list[Any], turns: int, finished: Callable[[], Any]) -> None:
        self.finished = finished
        super().__init__(tracer, box, now, turns)

    def earlier(self) -> LoopItems:
        rows = self._rows(self.want.type)
        return self._items(rows, self._over if self.is_sure else self._rows(Type(torch.bool, ())))

    def _rows(self, row: Type) -> torch.Tensor:
        self.tracer.here()
        with self.tracer:
            rows = Type(row.dtype, (self.turns, *row.shape))
            return wrapped(self.tracer, fit(0, rows), Want(rows, False))

    def _over(self) -> torch.Tensor:
        return torch.arange(self.turns) < self.finished()

    @property
    def slot(self) -> Slot:
        return self.box.slot(len(self.start))

    def end_turn(self) -> None:
        value, there = self.added()
        at, before = self.finished(), self.xs[len(self.start)]
        there = before.there if self.is_sure else _written(before.there, at, there)
        self.xs[len(self.start) :] = [self._items(_written(before.value, at, value), there)]

    def finish(self, outs: list[Var]) -> None:
        items = self.xs[len(self.start)]
        if self.is_sure:
            self.xs[-1:] = [self._items(items.value, self._over())]


class ListOfScan(GrownList):
    """… in a loop over all rows of a tensor."""

    ended: tuple[Any, Any]

    def end_turn(self) -> None:
        self.ended = self.added()
        del self.xs[len(self.start) + 1 :]

    def ends(self, done: TracedClosure) -> list[Var]:
        value, there = self.ended
        rows = [fit(done.var(self.tracer, value), self.want.type)]
        return rows if self.is_sure else [*rows, fit(done.var(self.tracer, there), Type(torch.bool, ()))]

    def finish(self, outs: list[Var]) -> None:
        rows = self.tracer.wrap(outs.pop(0))
        if not self.is_sure:
            there = self.tracer.wrap(outs.pop(0))
            self.xs[len(self.start) :] = [self._items(rows, there)]
            return
        items: list[Any] = list(rows.unbind(0))
        for item in items if self.want.weak else ():
            item.weak = self.tracer.numbers = True
        self.xs[len(self.start) :] = items


def _written(rows: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    """The rows with another one at a place."""
    new = rows.clone()
    new[at] = value
    return new


def refuse_growth(box: Watched) -> CaptureError:
    error = refuse(
        f"{box.name or 'a container'} has another number of items after each turn of a loop on tensors",
        "a tensor of the full size that the loop fills, a loop over a static sequence, or a counter in its test",
    )
    error.grows = True
    return error
