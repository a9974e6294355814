"""Seconds of an equation, and whether a value of it is ever in memory.

A compiler merges elementwise work, reductions and views with what uses them; products, attention and the like are kernels of their own, whose
operands and results lie in memory.  Without a compiler every equation is such a kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, custom
from mycel.plan.hardware import Hardware

FUSED = 0.1  # a merged equation costs this share of writing its result: its reads and writes are somebody else's


@dataclass
class Costs:
    """The cost of equations of one program on one device."""

    program: Program
    hardware: Hardware
    compiled: bool
    _blocks: dict[str, float] = field(default_factory=dict)

    def seconds(self, eqn: Eqn, there: Collection[Var] = ()) -> float:
        """One execution; a merged equation writes those of its results that must lie in memory, `there`."""
        if eqn.op is call or eqn.op is custom:
            name = eqn.params["block" if eqn.op is call else "forward"]
            if name not in self._blocks:
                self._blocks[name] = sum(self.seconds(e) for e in self.program.blocks[name].eqns)
            return self._blocks[name]
        if eqn.op.write is not None or eqn.op.free:
            return 0.0
        if eqn.op in CONTROL:
            return sum(self.seconds(e) for ref in eqn.refs for e in self.program.blocks[ref].eqns)
        out_bytes = sum(v.type.bytes for v in eqn.outputs)
        if self.compiled and not self.is_apart(eqn):
            return (FUSED * out_bytes + sum(v.type.bytes for v in eqn.outputs if v in there)) / self.hardware.bytes_s
        cost = eqn.op.cost(eqn.input_types, eqn.params)
        return cost.flops / self.hardware.flops(eqn.outputs[0].dtype) + cost.bytes / self.hardware.bytes_s + self.hardware.launch_s

    def whole(self) -> float:
        """Seconds of the whole program, roughly."""
        return sum(self.seconds(e) for e in self.program.main.eqns)

    def is_apart(self, eqn: Eqn) -> bool:
        """Is it a kernel of its own?"""
        return not self.compiled or eqn.op in CONTROL or eqn.op.apart

    def gain(self, eqns: Sequence[Eqn]) -> float:
        """Seconds that a compiler saves on a stretch of equations: reads, writes and starts of kernels it merges."""
        merged = [e for e in eqns if e.op.write is None and e.op not in CONTROL and not e.op.apart]
        moved = sum(e.op.cost(e.input_types, e.params).bytes for e in merged)
        return (1 - FUSED) * moved / self.hardware.bytes_s + len(merged) * self.hardware.launch_s

    def in_memory(self, block: Block) -> set[Var]:
        """Values of a block that lie in memory whether or not anybody keeps them; views of them count as they do."""
        found = {*block.inputs, *(v for v in block.outputs if isinstance(v, Var))}
        for eqn in block.eqns:
            if self.is_apart(eqn):
                found.update((*eqn.vars, *eqn.outputs))
        for eqn in reversed(block.eqns):  # what a view in memory shows is there too
            if eqn.op.write is not None and any(v in found for v in eqn.outputs) and isinstance(eqn.inputs[0], Var):
                found.add(eqn.inputs[0])
        for eqn in block.eqns:
            if eqn.op.write is not None and eqn.inputs[0] in found:
                found.update(eqn.outputs)
        return found
