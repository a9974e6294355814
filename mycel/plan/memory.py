"""The peak of a program's memory, by going through it: what is alive at each equation, and what a called block needs on top.

Inputs of the entry (parameters, state, the batch) are there all the time.  In a compiled block only values that lie in memory count; a
view has the memory of what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, custom, lifetimes, scan
from mycel.plan.cost import Costs

GRAIN = 512  # bytes: what allocators round up to
WORKSPACE = 100 << 20  # what the libraries for products and attention take on a GPU, once: as seen on an H200


@dataclass(frozen=True)
class Footprint:
    """`peak` bytes in all, of which `held` are the inputs; `at` is the line of the peak."""

    peak: int
    held: int
    at: str


@dataclass
class _Simulation:
    program: Program
    costs: Costs
    compiled: set[str]
    peaks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def block(self, name: str) -> tuple[int, str]:
        """The most that a block needs besides its inputs, results included, and where."""
        if name not in self.peaks:
            self.peaks[name] = self._block(self.program.blocks[name], name in self.compiled)
        return self.peaks[name]

    def _block(self, block: Block, compiled: bool) -> tuple[int, str]:
        owner = _owners(self.program, block)
        there = self.costs.in_memory(block) if compiled else {v for e in block.eqns for v in e.outputs}
        end: dict[Var, int] = {}
        for v, (_, last) in lifetimes(block).items():
            mine = owner.get(v)
            if mine is not None:
                end[mine] = max(end.get(mine, -1), last)
        dying: dict[int, list[Var]] = {}
        for v, last in end.items():
            dying.setdefault(last, []).append(v)
        alive, most, where = 0, 0, ""
        for i, eqn in enumerate(block.eqns):
            new = [v for v in eqn.outputs if owner.get(v) is v and v in there]
            alive += sum(_size(v) for v in new)
            inner, at = self.inner(eqn)
            extra = max(inner - sum(_size(v) for v in new), 0)
            if alive + extra > most:
                most, where = alive + extra, at or eqn.line
            alive -= sum(_size(v) for v in dying.get(i, ()) if v in there)
        return most, where

    def inner(self, eqn: Eqn) -> tuple[int, str]:
        """What an equation needs while it runs, its results included."""
        if eqn.op is scan:
            return self.block(eqn.params["body"])
        if eqn.op in (call, custom):
            return self.block(eqn.params["block" if eqn.op is call else "forward"])
        if eqn.op in CONTROL:
            return max((self.block(ref) for ref in eqn.refs), default=(0, ""))
        return (0, "") if eqn.op.scratch is None else (eqn.op.scratch(*eqn.input_types, **eqn.params) + sum(map(_size, eqn.outputs)), eqn.line)


def footprint(program: Program, costs: Costs, compiled: set[str]) -> Footprint:
    """The peak of a whole step."""
    held = sum(_size(v) for v in program.inputs) + (WORKSPACE if costs.hardware.memory else 0)
    most, at = _Simulation(program, costs, compiled).block(program.entry)
    return Footprint(held + most, held, at)


def _owners(program: Program, block: Block) -> dict[Var, Var]:
    """Values -> the value whose memory they lie in; inputs own nothing here, their memory is the caller's."""
    found: dict[Var, Var] = {}
    inputs = set(block.inputs)
    for eqn in block.eqns:
        first = eqn.inputs[0] if eqn.inputs else None
        if eqn.op.write is not None and isinstance(first, Var):
            if first in inputs:
                inputs.update(eqn.outputs)
            elif first in found:
                found.update((v, found[first]) for v in eqn.outputs)
        elif eqn.op.inplace is None:  # what is updated in place has its memory already
            found.update((v, v) for v in eqn.outputs)
    return found


def _size(v: Var) -> int:
    return -(-v.type.bytes // GRAIN) * GRAIN
