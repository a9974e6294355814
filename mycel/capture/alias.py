"""In-place updates and views, made functional.

Every tensor the user's code holds has a `Cell`: the Var that is its value now.  A view's cell knows its parent's cell
and the equation that made it.  Writing into a view writes into its parent through the operator's `write` rule; reading
a view after its parent changed replays the equation.  So `x[0] += 1; y = x.sum()` becomes select, add, select_update,
sum.

`x.data = other` gives a tensor other memory: what shares the one it had keeps that, with the values there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mycel.capture.fence import refuse
from mycel.errors import CaptureError
from mycel.ir import BUILDERS, Eqn, Var

JOURNALS: list[dict[Cell, tuple[Any, ...]]] = []  # for each block being traced, the cells it changed and what they were


class Cell:
    """The current value of one tensor object; `version` counts its writes, `home` is the journal of the block whose
    code has made it; `memory`: which of those that it has had, `formers` its values in those it had before, `of` the
    one of its parent that it shares; `views`: cells that share the memory of this one; `beside`: why it may not be
    written, where a tensor of outside shares memory with others (`shared_memory.py`)."""

    __slots__ = (
        "__weakref__",
        "at",
        "beside",
        "eqn",
        "formers",
        "home",
        "memory",
        "of",
        "parent",
        "place",
        "seen",
        "var",
        "version",
        "views",
    )

    def __init__(self, var: Var, parent: Cell | None = None, eqn: Eqn | None = None, at: int = 0) -> None:
        self.var, self.parent, self.eqn, self.at = var, parent, eqn, at
        self.version = 0
        self.seen = parent.version if parent else 0
        self.memory, self.of = 0, parent.memory if parent else 0
        self.formers: dict[int, Cell] = {}
        self.place: Any = None  # where a lifted tensor lives, or None
        self.beside: Callable[[], CaptureError | None] | None = None
        self.home = JOURNALS[-1] if JOURNALS else None
        self.views: list[weakref.ref[Cell]] = []
        if parent is not None:
            parent.views.append(weakref.ref(self))

    def read(self) -> Var:
        """The value now."""
        self.follow()
        if self.parent is not None:
            value = self.parent.read()
            if self.seen != self.parent.version:
                self.note()
                self.var = _outputs(self.eqn, value)[self.at]  # type: ignore[arg-type]
                self.seen = self.parent.version
                self.version += 1
        return self.var

    def write(self, value: Var) -> None:
        """Make `value` the value, for this tensor and for everything it shares memory with."""
        self.follow()
        if self.parent is not None:
            eqn = self.eqn
            if eqn is None or eqn.op.write is None:
                raise refuse(
                    f"in-place update of a view made by {eqn.op.name if eqn else 'an operator without a write rule'}",
                    "clone() the view first and update the clone",
                )
            whole = self.parent.read()
            parts = _outputs(eqn, whole) if len(eqn.outputs) > 1 else [None]
            parts[self.at] = value
            try:
                whole = eqn.op.write(whole, tuple(parts), *eqn.inputs[1:], **eqn.params)
            except ValueError as e:
                raise refuse(str(e), "clone() the view first and update the clone") from e
            self.parent.write(whole)
            self.note()
            self.seen = self.parent.version
        elif self.place is not None and not self.place.mutable:
            raise refuse(
                f"in-place update of {self.place.name}, a tensor captured from outside the function",
                "pass it as an argument and return the new value, or make it a buffer of a module",
            )
        if self.beside is not None and (error := self.beside()) is not None:
            raise error
        self.note()
        self.var = value
        self.version += 1

    def move(self) -> None:
        """The tensor gets other memory: what shares the one it has stays there."""
        self.note()
        former = Cell(self.var)
        former.version, former.home = self.version, self.home
        self.formers[self.memory] = former
        self.memory = max(self.formers) + 1

    def follow(self) -> None:
        """Where the parent has other memory by now: its former one is this one's."""
        if self.parent is not None and self.of != self.parent.memory:
            self.note()
            self.parent, self.of = self.parent.formers[self.of], 0

    @property
    def root(self) -> Cell:
        """The cell of the tensor that holds the memory."""
        self.follow()
        return self if self.parent is None else self.parent.root

    def note(self) -> None:
        """About to change: the block that is being traced remembers what was."""
        if JOURNALS:
            now = self.var, self.seen, self.version, self.parent, self.memory, self.of
            JOURNALS[-1].setdefault(self, now)

    def restore(self, was: tuple[Any, ...]) -> None:
        """As `note` found it."""
        self.var, self.seen, self.version, self.parent, self.memory, self.of = was


def _outputs(eqn: Eqn, value: Var) -> list[Any]:
    """The outputs of a view equation on another value."""
    if value is eqn.inputs[0]:
        return list(eqn.outputs)
    outs = BUILDERS[-1].emit(eqn.op, (value, *eqn.inputs[1:]), dict(eqn.params))
    return list(outs) if isinstance(outs, tuple) else [outs]


def view_cells(parent: Cell, source: Var, eqns: list[Eqn], outs: list[Var]) -> list[Cell]:
    """Cells for the results of a view: one for each equation on the way from `source` to each result."""
    cells: dict[Var, Cell] = {source: parent}
    for eqn in eqns:
        start = eqn.inputs[0] if eqn.inputs else None
        if isinstance(start, Var) and start in cells:
            for i, out in enumerate(eqn.outputs):
                cells[out] = Cell(out, cells[start], eqn, i)
    return [cells.get(out) or Cell(out, parent, None) for out in outs]
