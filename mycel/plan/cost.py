"""Seconds of an equation by itself, and whether a value of it is ever in memory.  Together they are timed by
`clock.py`.

A compiler merges elementwise work, reductions and views with what uses them; products, attention and the like are
kernels of their own, whose operands and results lie in memory.  Without a compiler every equation is such a kernel.

    a kernel         max(operations / operations a second, bytes / bytes a second) + launch; where it takes its operands
                     in another form, before that the bytes of bringing each into it, and a launch
    merged ones      each value in memory that they read, once, and those that they write; one launch: a *group* hangs
                     together by values that are never in memory.  What is standardised across rows (batch norm) is read
                     twice: first for its statistics
    a collective     as `links.py` has it
    call, custom     its block
    cond             the dearer branch
    scan, loop       its length times the body, TURNS times the body
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, cond, loop, scan
from mycel.plan.hardware import Hardware
from mycel.plan.links import Links, message

FUSED = 0.1  # a merged equation costs this share of writing its result: its reads and writes are somebody else's
TURNS = 10  # of a loop: how often it turns is known when it runs


def alignment(eqn: Eqn) -> int:
    """The power of two, up to 8, that divides the lengths of all rows of a product: of its operands, its result, and
    its weight's columns; 8 where its kernel sees to that."""
    if eqn.op.pads:
        return 8
    types = [v.type for v in (*eqn.vars, *eqn.outputs) if v.type.ndim > 1]
    weights = [t.shape[0] for t in types[1:2] if t.ndim == 2]
    return math.gcd(8, *(t.shape[-1] for t in types), *weights)


def is_free(eqn: Eqn) -> bool:
    """Does it run nothing here: a view, a constant, half of a move, which has a stream of its own?"""
    return eqn.op.write is not None or eqn.op.free or eqn.op.transfers


@dataclass
class Costs:
    """The cost of equations of one program on one device; `links`: of its messages, where it sends any."""

    program: Program
    hardware: Hardware
    compiled: bool
    links: Links | None = None
    _blocks: dict[str, float] = field(default_factory=dict)

    def seconds(self, eqn: Eqn, there: Collection[Var] = ()) -> float:
        """One execution by itself; a merged equation writes those of its results that must lie in memory, `there`."""
        if eqn.op in CONTROL:
            return self._control(eqn)
        if is_free(eqn):
            return 0.0
        if self.message(eqn):
            return self.message(eqn)
        if self.compiled and not self.is_apart(eqn):
            size = FUSED * sum(v.type.bytes for v in eqn.outputs) + sum(v.type.bytes for v in eqn.outputs if v in there)
            return size / self.hardware.bytes_s
        return self.kernel(eqn)

    def _control(self, eqn: Eqn) -> float:
        """Of the blocks an equation holds; the gradient that a custom one holds runs elsewhere."""
        p = eqn.params
        if eqn.op is scan:
            return float(p["length"] * self._block(p["body"]))
        if eqn.op is loop:
            return TURNS * (self._block(p["test"]) + self._block(p["body"]))
        if eqn.op is cond:
            return max(self._block(p["then"]), self._block(p["orelse"]))
        return self._block(p["block" if eqn.op is call else "forward"])

    def _block(self, name: str) -> float:
        if name not in self._blocks:
            self._blocks[name] = sum(self.seconds(e) for e in self.program.blocks[name].eqns)
        return self._blocks[name]

    def message(self, eqn: Eqn) -> float:
        """Seconds on the wire; none for what sends nothing."""
        name, axes, size = message(eqn)
        return self.links.seconds(name, axes, size) if name and self.links is not None else 0.0

    def copies(self, size: float) -> float:
        """Seconds to copy so many bytes."""
        return self.hardware.started(2 * size / self.hardware.bandwidth(2 * size)) if size else 0.0

    def kernel(self, eqn: Eqn, compiled: bool | None = None) -> float:
        """An equation as a kernel of its own; a compiler pads the operands of products."""
        cost, kind = eqn.op.cost(eqn.input_types, eqn.params), eqn.op.rate_of(eqn.input_types, eqn.params)
        dtype = next((v.dtype for v in eqn.vars if v.dtype.is_floating_point), eqn.outputs[0].dtype)
        padded = not kind or (self.compiled if compiled is None else compiled)
        turns = max(eqn.op.turns(*eqn.input_types, **eqn.params), 1) if eqn.op.turns else 1
        flops, size = cost.flops / turns, cost.bytes / turns
        computing = flops / self.hardware.flops(dtype, kind, flops, 8 if padded else alignment(eqn))
        seconds = turns * self.hardware.started(max(computing, size / self.hardware.bandwidth(size)))
        if eqn.op.converts is None:
            return seconds
        moved = eqn.op.converts(*eqn.input_types, **eqn.params)
        return seconds + moved / self.hardware.bandwidth(moved) + len(eqn.inputs) * self.hardware.launch_s

    def computing(self, block: Block) -> list[float]:
        """Seconds of each equation of a block that no compiler takes; messages and the blocks it holds are not among
        them."""
        return [0.0 if e.op in CONTROL or is_free(e) or message(e)[0] else self.kernel(e, False) for e in block.eqns]

    def merged(self, block: Block, there: Collection[Var], group_of: Mapping[int, int]) -> list[float]:
        """The same of a compiled block, beside each other; `there`: values that lie in memory, `group_of`: as `groups`
        has it.  What a group reads is counted where it first reads it."""
        shown = _shown(block)
        read: set[tuple[int, Var]] = set()
        started: set[int] = set()
        seconds = []
        for i, eqn in enumerate(block.eqns):
            if eqn.op in CONTROL or is_free(eqn) or message(eqn)[0]:
                seconds.append(0.0)
            elif self.is_apart(eqn, True):
                seconds.append(self.kernel(eqn, True))
            else:
                group = group_of[i]
                new = {(group, v) for v in eqn.vars if v in there} - read
                read |= new
                moved = _passes(eqn) * sum(min(v.type.bytes, shown.get(v, v).type.bytes) for _, v in new)
                moved += sum(v.type.bytes for v in eqn.outputs if v in there)
                moving = moved / self.hardware.bandwidth(moved)
                seconds.append(moving if group in started else self.hardware.started(moving))
                started.add(group)
        return seconds

    def groups(self, block: Block, there: Collection[Var]) -> dict[int, int]:
        """Merged equations and views -> the first one of those that hang together by values that are never in
        memory."""
        first: dict[int, int] = {}
        maker: dict[Var, int] = {}
        for i, eqn in enumerate(block.eqns):
            if eqn.op in CONTROL or message(eqn)[0] or self.is_apart(eqn, True):
                continue
            roots = sorted({_root(first, maker[v]) for v in eqn.vars if v in maker})
            first[i] = roots[0] if roots else i
            for j in roots[1:]:
                first[j] = roots[0]
            maker.update((v, i) for v in eqn.outputs if v not in there)
        return {i: _root(first, i) for i in first}

    def is_apart(self, eqn: Eqn, compiled: bool | None = None) -> bool:
        """Is it a kernel of its own?  `compiled`: in a block that is, or is not; None: as the program."""
        compiled = self.compiled if compiled is None else compiled
        return not compiled or eqn.op in CONTROL or not eqn.op.compiles or eqn.op.apart

    def gain(self, eqns: Sequence[Eqn]) -> float:
        """Seconds that a compiler saves on a stretch of equations: reads, writes and starts of kernels it merges."""
        merged = [e for e in eqns if e.op.write is None and e.op not in CONTROL and not e.op.apart]
        moved = sum(e.op.cost(e.input_types, e.params).bytes for e in merged)
        return (1 - FUSED) * moved / self.hardware.bytes_s + len(merged) * self.hardware.launch_s

    def in_memory(self, block: Block, compiled: bool | None = None) -> set[Var]:
        """Values of a block that lie in memory whether or not anybody keeps them; views of them count as they do."""
        resident = {*block.inputs, *(v for v in block.outputs if isinstance(v, Var))}
        for eqn in block.eqns:
            if self.is_apart(eqn, compiled):
                resident.update((*eqn.vars, *eqn.outputs))
        for eqn in reversed(block.eqns):  # what a view in memory shows is there too
            if eqn.op.write is not None and any(v in resident for v in eqn.outputs) and isinstance(eqn.inputs[0], Var):
                resident.add(eqn.inputs[0])
        for eqn in block.eqns:
            if eqn.op.write is not None and eqn.inputs[0] in resident:
                resident.update(eqn.outputs)
        return resident


def _passes(eqn: Eqn) -> int:
    """How often a merged equation reads its operands: twice, where each result needs all of a dim that lies outside of
    another; a row it can hold."""
    if eqn.op.dims is None:
        return 1
    fit = eqn.op.fit(eqn.input_types, eqn.params)
    first, result = (fit.ins[0] if fit.ins else None) or (), fit.outs[0] if fit.outs else ()
    whole = [any(fit.flags.get(k) == "^" and fit.sizes[k] > 1 for k in dim) for dim in first]
    return 2 if first == result and any(a and not b for a, b in itertools.pairwise(whole)) else 1


def _shown(block: Block) -> dict[Var, Var]:
    """Views -> the value whose memory they show."""
    shown: dict[Var, Var] = {}
    for eqn in block.eqns:
        first = eqn.inputs[0] if eqn.inputs else None
        if eqn.op.write is not None and isinstance(first, Var):
            shown.update((v, shown.get(first, first)) for v in eqn.outputs)
    return shown


def _root(first: dict[int, int], i: int) -> int:
    while first[i] != i:
        i = first[i]
    return i
