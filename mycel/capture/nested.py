"""Tracing a Python closure into a block of its own: the bodies of branches and loops.

While a section is open, the tracer's equations go there.  What the closure changed outside (cells of outer tensors) is
noted in a journal, told and undone, so that a second branch starts where the first did.  Outer values that a section
uses are its free Vars: they become operands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycel.capture.alias import JOURNALS, Cell
from mycel.capture.names import hints
from mycel.capture.record import ModuleCall
from mycel.capture.repeats import assemble_inner
from mycel.capture.trace import KEY, Tracer
from mycel.ir import OPS, Atom, Eqn, Var, structure


@dataclass
class OpenBlock:
    """The equations of one block under way, with what assembling needs to know of them."""

    eqns: list[Eqn] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    regions: list[ModuleCall] = field(default_factory=lambda: [ModuleCall("main", "", 0)])
    inputs: Sequence[Var] = ()

    @property
    def defined(self) -> set[Var]:
        return {v for e in self.eqns for v in e.outputs}


_OUTER: list[OpenBlock] = []  # the sections around the open one, outermost first


def is_inside() -> bool:
    """Is a branch, a loop or another block being traced?"""
    return bool(_OUTER)


def unrecorded(tracer: Tracer) -> set[Var]:
    """What was made under torch.no_grad(), in the open block and around it."""
    open_blocks: list[Tracer | OpenBlock] = [tracer, *_OUTER]
    return {v for b in open_blocks for i in b.frozen for v in b.eqns[i].outputs}


@contextlib.contextmanager
def opened(tracer: Tracer, section: OpenBlock) -> Iterator[None]:
    """Equations go to `section`."""
    outer = OpenBlock(tracer.eqns, tracer.lines, tracer.frozen, tracer.regions)
    _OUTER.append(outer)
    tracer.eqns, tracer.lines, tracer.frozen, tracer.regions = (
        section.eqns,
        section.lines,
        section.frozen,
        section.regions,
    )
    tracer.closed -= section.defined
    try:
        yield
    finally:
        _OUTER.pop()
        tracer.eqns, tracer.lines, tracer.frozen, tracer.regions = outer.eqns, outer.lines, outer.frozen, outer.regions
        tracer.closed |= section.defined
        for leaves in (tracer.leaves, tracer.retained):
            leaves[:] = [x for x in leaves if x.cell.var not in tracer.closed]


@contextlib.contextmanager
def journal() -> Iterator[dict[Cell, tuple[Any, ...]]]:
    """Changes of cells in here are undone at the end."""
    notes: dict[Cell, tuple[Any, ...]] = {}
    JOURNALS.append(notes)
    try:
        yield notes
    finally:
        JOURNALS.pop()
        for cell, was in notes.items():
            cell.restore(was)


def succeeds(tracer: Tracer, run: Callable[[], Any]) -> bool:
    """Can this be captured?  Nothing of the trial is kept."""
    blocks = dict(tracer.blocks)
    with opened(tracer, OpenBlock()), journal():
        try:
            run()
        except Exception:
            return False
        finally:
            tracer.blocks = blocks
    return True


def written(section: OpenBlock, notes: dict[Cell, tuple[Any, ...]]) -> dict[Cell, Var]:
    """Tensors of outside that were updated in place, and their new values."""
    mine = section.defined
    return {
        c: c.var
        for c, (var, *_) in notes.items()
        if c.parent is None and c.var != var and var not in mine and (c.place is not None or c.home is not notes)
    }


def moved(notes: dict[Cell, tuple[Any, ...]]) -> set[Cell]:
    """Tensors that have other memory than before."""
    return {c for c, (*_, memory, _) in notes.items() if c.memory != memory}


def left_behind(notes: dict[Cell, tuple[Any, ...]]) -> bool:
    """Did a tensor of outside get other memory, while outside something else shares the memory that it had?"""
    views = (ref() for c in moved(notes) if c.home is not notes for ref in c.views)
    return any(view is not None and view.home is not notes for view in views)


def free(*sections: OpenBlock, outputs: Sequence[Atom] = ()) -> list[Var]:
    """Values of outside that sections and their outputs use, in order of use."""
    mine = set().union(*(s.defined for s in sections))
    used = [v for s in sections for e in s.eqns for v in e.vars] + [x for x in outputs if isinstance(x, Var)]
    return [v for v in dict.fromkeys(used) if v not in mine]


def finish(tracer: Tracer, name: str, section: OpenBlock, inputs: Sequence[Var], outputs: Sequence[Atom]) -> str:
    """Enter the finished section as a block; the name it has in the program."""
    section.inputs = inputs
    tracer.refuse_rows(outputs, "a branch or a loop gives them")
    around = [*_OUTER, OpenBlock(tracer.eqns, tracer.lines)]
    names = {k: v for s in around for k, v in hints(s.eqns, s.lines).items()}
    inner, block = assemble_inner(
        section, list(outputs), {**names, **tracer.hints}, tracer.regions[-1].path, set(tracer.blocks)
    )
    tracer.blocks.update(inner)
    shape = structure(block)
    known = tracer.shapes.get(shape)
    if (
        known not in tracer.blocks or structure(tracer.blocks[known]) != shape
    ):  # blocks of traces that were given up are gone
        known = tracer.shapes[shape] = tracer.add_block(name, block)
    return known


def branch_key(tracer: Tracer) -> Var:
    """The key of a block that draws: folded from the key here by the block's place among the draws."""
    key, site = tracer.draw()
    return tracer.emit(OPS["fold_in"], (key,), {"data": site})


__all__ = ["KEY", "OpenBlock", "branch_key", "finish", "free", "is_inside", "journal", "opened", "structure", "written"]
