"""Operands of an island that share memory: where the call writes one of them, all of them are views of one tensor.

queue.add_(1); newest.sum()         is given queue and newest = queue[0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mycel.capture.alias import Cell
from mycel.capture.fence import refuse
from mycel.capture.record import Record, Traced
from mycel.errors import RunError
from mycel.ir import Eqn, Var

Way = tuple[tuple[Eqn, int], ...]  # views, one of another, and which result of each


class OperandViews:
    """Which operands lie in the memory of which others, and how; `written`: those that the call writes, or a view of
    which."""

    def __init__(self, tracer: Record, operands: list[torch.Tensor]) -> None:
        """Where two operands are parts of a tensor that is none, that becomes one."""
        self.ways: dict[int, tuple[int, Way | None]] = {}
        self.written: frozenset[int] = frozenset()
        self.needed = len(operands)  # those behind are there in vain
        cells = [tracer.cell(x) for x in operands]
        at = {cell: i for i, cell in enumerate(cells) if cell.root is cell}
        parts = [cell.root for cell in cells if cell.root is not cell]
        for root in dict.fromkeys(root for root in parts if root not in at and parts.count(root) > 1):
            at[root] = len(operands)
            operands.append(Traced.make(root, tracer))
        for i, cell in enumerate(cells):
            if cell.root is not cell and cell.root in at:
                self.ways[i] = at[cell.root], _way(cell)

    def note(self, written: Iterable[int]) -> set[int]:
        """Operands with values of their own among those that were written, or whose views were; these are views from
        now on."""
        wholes = {self.ways[i][0] if i in self.ways else i for i in written}
        shared = wholes & {whole for whole, _ in self.ways.values()}
        if any(whole in shared and way is None for whole, way in self.ways.values()):
            raise refuse("it writes a tensor of which it is given a part that values choose", "clone() of the part")
        self.written |= shared
        self.needed = max(self.needed, *(i + 1 for i in shared), 0)
        return wholes

    def __contains__(self, i: int) -> bool:
        """Is it one of several that share memory?"""
        return i in self.ways or any(whole == i for whole, _ in self.ways.values())

    def laid(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands, those that share memory with one that is written as views of it."""
        laid = list(given)
        for i, (whole, way) in self.ways.items():
            if whole in self.written:
                laid[i] = _view(given[whole], way or ())
        return laid

    @property
    def ways_shown(self) -> Any:
        """Which operands are views of which, and how."""
        shown = [(i, whole, way or ()) for i, (whole, way) in self.ways.items() if whole in self.written]
        return [(i, whole, [(eqn.op.name, eqn.params, at) for eqn, at in way]) for i, whole, way in shown]


def _way(cell: Cell) -> Way | None:
    """How a view is made of the tensor that holds its memory; None where values say it."""
    way: list[tuple[Eqn, int]] = []
    while cell.parent is not None:
        if cell.eqn is None or any(isinstance(x, Var) for x in cell.eqn.inputs[1:]):
            return None
        way.append((cell.eqn, cell.at))
        cell = cell.parent
    return tuple(reversed(way))


def _view(whole: torch.Tensor, way: Way) -> torch.Tensor:
    value = whole
    for eqn, at in way:
        outs = eqn.op.kernel(value, *eqn.inputs[1:], **eqn.params)
        value = outs[at] if isinstance(outs, (tuple, list)) else outs
    if value.numel() and value.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        raise RunError("an operand of an island that shares memory with another was given a copy")
    return value
