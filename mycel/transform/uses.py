"""How often parameters are used that only branches or loops read: torch leaves one alone whose branch was not taken.

    y = cond(p, x, w, then=@a, orelse=@b)          y, n = cond(p, x, w, then=@a_counting, orelse=@b_counting)
                                            =>     return …, uses.w=add(uses.w, n)

where @a reads w and @b does not: @a_counting returns 1 behind what @a does, @b_counting 0.  A loop counts turns.  The
numbers are counters of the step (`counter uses.w`), which parts of a batch add to; the update of w is skipped where it
is 0 then, and begins anew (`optimise.py`).  Parameters that are read in the same places share one.

An island says itself which of its operands it used, by the graph that autograd makes of its results.

What of a parameter is read is a *pattern* of a block: ALWAYS, () for never, or (equation, pattern inside of it) for all
equations that may; (OPERAND, position) inside of an island.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Block, Builder, Params, Program, Ref, Role, Type, Var, call, cond, custom, loop, scan
from mycel.ops import o

USES = "uses."
ALWAYS = "always"
OPERAND = "operand"
COUNT = Type(torch.int64, ())
Pattern = Any  # ALWAYS, or a tuple


def count_uses(program: Program, parameters: Iterable[str]) -> tuple[Program, dict[str, str]]:
    """With counters for those of these inputs that may stay unused; by name, the counter of each."""
    uses = _Uses(program)
    main = program.main
    named = {v.name: v for v in main.inputs}
    patterns = {name: uses.pattern(program.entry, named[name]) for name in parameters}
    sometimes = {name: p for name, p in patterns.items() if p not in (ALWAYS, ())}
    if not sometimes:
        return program, {}
    distinct = list(dict.fromkeys(sometimes.values()))
    first = {p: next(name for name, own in sometimes.items() if own == p) for p in distinct}
    counting = uses.counting(main, distinct)
    b = _builder(counting)
    counts = counting.outputs[len(main.outputs) :]
    roles, updates, totals = dict(program.roles), list(program.updates), list[Any]()
    counters: dict[Pattern, str] = {}
    for p, count in zip(distinct, counts, strict=True):
        counters[p] = f"{USES}{program.role(named[first[p]]).name}"
        old = b.input(counters[p], COUNT)
        roles[old.name] = Role("counter", counters[p])
        updates.append(old.name)
        with b:
            totals.append(o.add(old, count))
    block = b.block((*main.outputs, *totals))
    blocks = {**program.blocks, **uses.blocks, program.entry: block}
    changed = replace(program, blocks=blocks, updates=tuple(updates), roles=roles)
    return changed, {program.role(named[name]).name: counters[p] for name, p in sometimes.items()}


class _Uses:
    """The blocks of a program, and those made of them that count."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks: dict[str, Block] = {}
        self._patterns: dict[tuple[str, Var], Pattern] = {}
        self._counting: dict[Any, str] = {}

    # -- where it is read --------------------------------------------------------------------------------------------

    def pattern(self, name: str, v: Var) -> Pattern:
        if (name, v) not in self._patterns:
            self._patterns[name, v] = self._pattern(self.program.blocks[name], v)
        return self._patterns[name, v]

    def _pattern(self, block: Block, v: Var) -> Pattern:
        inside = [
            (i, self._inside(eqn, k)) for i, eqn in enumerate(block.eqns) for k, x in enumerate(eqn.inputs) if x == v
        ]
        if v in block.outputs or any(p == ALWAYS for _, p in inside):
            return ALWAYS
        return tuple(dict.fromkeys((i, p) for i, p in inside if p != ()))

    def _inside(self, eqn: Any, position: int) -> Pattern:
        """Of the operand at a position of an equation."""

        def of(name: str, at: int) -> Pattern:
            return self.pattern(eqn.params[name], self.program.blocks[eqn.params[name]].inputs[at])

        if eqn.op is call:
            return of("block", position)
        if eqn.op is o.island:
            return (OPERAND, position) if position in eqn.params["wrt"] else ()
        if eqn.op is custom:
            return ALWAYS if of("forward", position) != () else ()
        if eqn.op is cond and position:
            both = of("then", position - 1), of("orelse", position - 1)
            return both[0] if both in ((ALWAYS, ALWAYS), ((), ())) else both
        if eqn.op in (loop, scan) and position < eqn.params.get("consts", 0):
            turn = of("body", position)
            return turn if turn == () or (eqn.op is scan and turn == ALWAYS and eqn.params["length"]) else (turn,)
        return ALWAYS

    # -- counted -----------------------------------------------------------------------------------------------------

    def counting(self, block: Block, patterns: Sequence[Pattern]) -> Block:
        """A block that returns a number for each pattern behind its outputs."""
        b = _builder(replace(block, eqns=()), block)
        numbers: dict[tuple[int, Pattern], Var] = {}
        with b:
            for i, eqn in enumerate(block.eqns):
                inside = list(dict.fromkeys(p for own in patterns if own != ALWAYS for at, p in own if at == i))
                if not inside:
                    b.eqns.append(eqn)
                    continue
                b.at(eqn)
                for p, number in zip(inside, self._count(b, eqn, inside), strict=True):
                    numbers[i, p] = number
            totals = []
            for own in patterns:
                counts = [o.full(1, shape=(), dtype=torch.int64)] if own == ALWAYS else [numbers[use] for use in own]
                total = counts[0] if counts else o.full(0, shape=(), dtype=torch.int64)
                for more in counts[1:]:
                    total = o.add(total, more)
                totals.append(total)
        return b.block((*block.outputs, *totals))

    def _count(self, b: Builder, eqn: Any, inside: Sequence[Pattern]) -> list[Var]:
        """Appends an equation that also counts."""
        numbers = [Var(b.name("uses"), COUNT) for _ in inside]
        params, operands, outputs = dict(eqn.params), list(eqn.inputs), list(eqn.outputs)
        if eqn.op is call:
            params["block"] = self._named(params["block"], inside)
            outputs += numbers
        elif eqn.op is o.island:
            return self._count_island(b, eqn, [position for _, position in inside])
        elif eqn.op is cond:
            for k, name in enumerate(("then", "orelse")):
                params[name] = self._named(params[name], [both[k] for both in inside])
            outputs += numbers
        else:
            consts = params.get("consts", 0)
            carry = params.get("carry", 0) if eqn.op is scan else len(operands) - consts
            zeros = [o.full(0, shape=(), dtype=torch.int64) for _ in inside]
            params["body"] = self._turning(params["body"], [turn for (turn,) in inside], consts + carry, carry)
            if eqn.op is loop:
                params["test"] = self._tested(params["test"], len(inside))
            else:
                params["carry"] = carry + len(inside)
            operands[consts + carry : consts + carry] = zeros
            outputs[carry:carry] = numbers
        b.eqns.append(replace(eqn, inputs=tuple(operands), params=Params(params), outputs=tuple(outputs)))
        return numbers

    def _count_island(self, b: Builder, eqn: Any, positions: Sequence[int]) -> list[Var]:
        """Appends an island that also says which of these operands it used."""
        uses = Var(b.name("uses"), Type(torch.int64, (len(positions),)))
        params = Params({**eqn.params, "counted": tuple(positions)})
        b.eqns.append(replace(eqn, params=params, outputs=(*eqn.outputs, uses)))
        return [o.select(uses, dim=0, index=i) for i in range(len(positions))]

    def _named(self, name: str, patterns: Sequence[Pattern]) -> Ref:
        """The block of this name that counts so."""
        return self._kept(name, tuple(patterns), lambda block: self.counting(block, patterns))

    def _turning(self, name: str, patterns: Sequence[Pattern], at: int, carry: int) -> Ref:
        """The body of a loop that adds to numbers of its state: inputs from `at` on, behind `carry` others."""

        def turning(block: Block) -> Block:
            counted = self.counting(block, patterns)
            b = _builder(counted)
            old = [Var(b.name("uses"), COUNT) for _ in patterns]
            counts = counted.outputs[len(block.outputs) :]
            with b:
                new = [o.add(x, count) for x, count in zip(old, counts, strict=True)]
            b.inputs[at:at] = old
            return b.block((*block.outputs[:carry], *new, *block.outputs[carry:]))

        return self._kept(name, ("turn", at, carry, *patterns), turning)

    def _tested(self, name: str, count: int) -> Ref:
        """The test of a loop whose state has so many more numbers."""

        def tested(block: Block) -> Block:
            b = _builder(block)
            b.inputs += [Var(b.name("uses"), COUNT) for _ in range(count)]
            return b.block(block.outputs)

        return self._kept(name, ("test", count), tested)

    def _kept(self, name: str, key: Any, make: Any) -> Ref:
        """A new block, made once."""
        if (name, key) not in self._counting:
            unique, block = f"{name}_counting", make(self.program.blocks[name])
            while unique in self.program.blocks or unique in self.blocks:
                unique += "_"
            self.blocks[unique], self._counting[name, key] = block, unique
        return Ref(self._counting[name, key])


def _builder(block: Block, names: Block | None = None) -> Builder:
    """That goes on writing a block."""
    b = Builder()
    b.inputs, b.eqns = list(block.inputs), list(block.eqns)
    whole = names or block
    b.reserve(v.name for v in (*whole.inputs, *(v for e in whole.eqns for v in e.outputs)))
    return b
