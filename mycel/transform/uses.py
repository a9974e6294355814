"""How often parameters are used that only branches or loops read: torch leaves one alone whose branch was not taken.

    y = cond(p, x, w, then=@a, orelse=@b)          y, n = cond(p, x, w, then=@a_counting, orelse=@b_counting)
                                            =>     return …, uses.w=add(uses.w, n)

where @a reads w and @b does not: @a_counting returns 1 behind what @a does, @b_counting 0.  A loop counts turns.  The
numbers are counters of the step (`counter uses.w`), which parts of a batch add to; the update of w is skipped where it
is 0 then, and begins anew (`optimise.py`).  Parameters that are read in the same places share one.

An island says itself which of its operands it used, by the graph that autograd makes of its results.  Experts of a loop
that passes over those without tokens are used as often as they are chosen (`choices`); a counter has a number for each.

What of a value is used is a *pattern* of a block: ALWAYS, () for never, or (equation, pattern inside of it) for all
equations that may; (OPERAND, position) inside of an island; (CHOSEN, expert, experts) inside of choices, (EACH,
experts) for all of them.  An operator uses its operands as often as its results are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import (
    CONTROL,
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Role,
    Type,
    Var,
    call,
    cond,
    custom,
    is_float,
    lookup,
    loop,
    rewrite,
    scan,
    substitute,
    walk,
)
from mycel.ops import o

USES = "uses."
ALWAYS = "always"
OPERAND, CHOSEN, EACH = "operand", "chosen", "each"
Pattern = Any  # ALWAYS, or a tuple
Shape = tuple[int, ...]
Counted = tuple[Pattern, Shape]  # and the shape of what counts it


def count_uses(program: Program, parameters: Iterable[str]) -> tuple[Program, dict[str, tuple[str, int | None]]]:
    """With counters for those of these inputs that may stay unused; by name, the counter of each, and which of its
    numbers."""
    uses = _Uses(program)
    main = program.main
    named = {v.name: v for v in main.inputs}
    patterns = {name: uses.pattern(program.entry, named[name]) for name in parameters}
    sometimes = {name: _of_all(p) for name, p in patterns.items() if p not in (ALWAYS, ())}
    if not sometimes:
        return _without_choices(program), {}
    distinct = list(dict.fromkeys(counted for counted, _ in sometimes.values()))
    first = {c: next(name for name, (own, _) in sometimes.items() if own == c) for c in distinct}
    counting = uses.counting(main, distinct)
    b = _builder(counting)
    counts = counting.outputs[len(main.outputs) :]
    roles, updates, totals = dict(program.roles), list(program.updates), list[Any]()
    counters: dict[Counted, str] = {}
    for c, count in zip(distinct, counts, strict=True):
        counters[c] = f"{USES}{program.role(named[first[c]]).name}"
        old = b.input(counters[c], _numbers(c[1]))
        roles[old.name] = Role("counter", counters[c])
        updates.append(old.name)
        with b:
            totals.append(o.add(old, count))
    block = b.block((*main.outputs, *totals))
    blocks = {**program.blocks, **uses.blocks, program.entry: block}
    changed = _without_choices(replace(program, blocks=blocks, updates=tuple(updates), roles=roles))
    return changed, {program.role(named[name]).name: (counters[c], at) for name, (c, at) in sometimes.items()}


def _of_all(pattern: Pattern) -> tuple[Counted, int | None]:
    """The pattern of one expert's parameter -> that of all experts, and which of them it is; others as they are."""
    choices = set(_choices_in(pattern))
    if len(choices) != 1:
        return (pattern, ()), None
    ((_, expert, experts),) = choices
    return (_with_each(pattern), (experts,)), expert


def _choices_in(pattern: Pattern) -> Iterator[Pattern]:
    if isinstance(pattern, tuple) and pattern:
        if pattern[0] == CHOSEN:
            yield pattern
        for part in pattern:
            yield from _choices_in(part)


def _with_each(pattern: Pattern) -> Pattern:
    if not isinstance(pattern, tuple) or not pattern:
        return pattern
    return (EACH, pattern[2]) if pattern[0] == CHOSEN else tuple(map(_with_each, pattern))


def _without_choices(program: Program) -> Program:
    """With what says who is chosen gone: it is counted."""
    if not any(eqn.op in (o.choices, o.expert_stack) for _, eqn in walk(program)):
        return program

    def without(block: Block) -> Block:
        values: dict[Var, Atom] = {}
        eqns: list[Eqn] = []
        for eqn in block.eqns:
            eqn = substitute(eqn, values)
            if eqn.op is o.choices:
                values[eqn.outputs[0]] = eqn.inputs[0]
            else:
                eqns.append(replace(eqn, op=o.stack) if eqn.op is o.expert_stack else eqn)
        return Block(block.inputs, tuple(eqns), tuple(lookup(x, values) for x in block.outputs))

    return rewrite(program, without)


class _Uses:
    """The blocks of a program, and those made of them that count."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks: dict[str, Block] = {}
        self._patterns: dict[str, dict[Var, Pattern]] = {}
        self._counting: dict[Any, str] = {}

    # -- where it is used --------------------------------------------------------------------------------------------

    def pattern(self, name: str, v: Var) -> Pattern:
        if name not in self._patterns:
            self._patterns[name] = self._of_values(self.program.blocks[name])
        return self._patterns[name].get(v, ())

    def _of_values(self, block: Block) -> dict[Var, Pattern]:
        """Of all values of a block, last ones first."""
        patterns: dict[Var, Pattern] = {v: ALWAYS for v in block.outputs if isinstance(v, Var)}
        for i in reversed(range(len(block.eqns))):
            eqn = block.eqns[i]
            for position, x in enumerate(eqn.inputs):
                if isinstance(x, Var) and patterns.get(x) != ALWAYS:
                    patterns[x] = _either(patterns.get(x, ()), self._used_by(i, eqn, position, patterns))
        return patterns

    def _used_by(self, i: int, eqn: Eqn, position: int, patterns: dict[Var, Pattern]) -> Pattern:
        """Of the operand at a position of an equation."""
        if eqn.op in CONTROL or eqn.op in (o.island, o.choices):
            inside = self._inside(eqn, position)
            return inside if inside in (ALWAYS, ()) else ((i, inside),)
        if eqn.op in (o.stop_gradient, o.expert_stack):  # of an expert's weights choices tell
            return ()
        pattern: Pattern = ()
        for v in eqn.outputs:
            if is_float(v.dtype):
                pattern = _either(pattern, patterns.get(v, ()))
        return pattern

    def _inside(self, eqn: Eqn, position: int) -> Pattern:
        def of(name: str, at: int) -> Pattern:
            return self.pattern(eqn.params[name], self.program.blocks[eqn.params[name]].inputs[at])

        if eqn.op is call:
            return of("block", position)
        if eqn.op is o.island:
            return (OPERAND, position) if position in eqn.params["wrt"] else ()
        if eqn.op is o.choices:
            experts = eqn.params["experts"]
            return (CHOSEN, experts[position - 1], max(experts) + 1) if position else ()
        if eqn.op is custom:
            return ALWAYS if position < eqn.params["wrt"] else ()
        if eqn.op is cond and position:
            both = of("then", position - 1), of("orelse", position - 1)
            return both[0] if both in ((ALWAYS, ALWAYS), ((), ())) else both
        if eqn.op in (loop, scan) and position < eqn.params.get("consts", 0):
            turn = of("body", position)
            return turn if turn == () or (eqn.op is scan and turn == ALWAYS and eqn.params["length"]) else (turn,)
        return ALWAYS

    # -- counted -----------------------------------------------------------------------------------------------------

    def counting(self, block: Block, patterns: Sequence[Counted]) -> Block:
        """A block that returns numbers for each pattern behind its outputs."""
        b = _builder(replace(block, eqns=()), block)
        numbers: dict[tuple[int, Counted], Var] = {}
        inside: dict[int, dict[Counted, None]] = {}
        for own, shape in patterns:
            for at, p in own if own != ALWAYS else ():
                inside.setdefault(at, {})[p, shape] = None
        with b:
            for i, eqn in enumerate(block.eqns):
                if i not in inside:
                    b.eqns.append(eqn)
                    continue
                b.at(eqn)
                for use, number in zip(inside[i], self._count(b, eqn, [*inside[i]]), strict=True):
                    numbers[i, use] = number
            totals = []
            for own, shape in patterns:
                counts = [_full(1, shape)] if own == ALWAYS else [numbers[at, (p, shape)] for at, p in own]
                total = counts[0] if counts else _full(0, shape)
                for more in counts[1:]:
                    total = o.add(total, more)
                totals.append(total)
        return b.block((*block.outputs, *totals))

    def _count(self, b: Builder, eqn: Eqn, inside: Sequence[Counted]) -> list[Var]:
        """Appends an equation that also counts."""
        if eqn.op is o.island:
            return self._count_island(b, eqn, inside)
        if eqn.op is o.choices:
            return self._count_choices(b, eqn, inside)
        numbers = [Var(b.name("uses"), _numbers(shape)) for _, shape in inside]
        params, operands, outputs = dict(eqn.params), list(eqn.inputs), list(eqn.outputs)
        if eqn.op is call:
            params["block"] = self._named(params["block"], inside)
            outputs += numbers
        elif eqn.op is cond:
            for k, name in enumerate(("then", "orelse")):
                params[name] = self._named(params[name], [(both[k], shape) for both, shape in inside])
            outputs += numbers
        else:
            consts = params.get("consts", 0)
            carry = params.get("carry", 0) if eqn.op is scan else len(operands) - consts
            zeros = [_full(0, shape) for _, shape in inside]
            turns = [(turn, shape) for (turn,), shape in inside]
            params["body"] = self._turning(params["body"], turns, consts + carry, carry)
            if eqn.op is loop:
                params["test"] = self._tested(params["test"], [shape for _, shape in inside])
            else:
                params["carry"] = carry + len(inside)
            operands[consts + carry : consts + carry] = zeros
            outputs[carry:carry] = numbers
        b.eqns.append(replace(eqn, inputs=tuple(operands), params=Params(params), outputs=tuple(outputs)))
        return numbers

    def _count_island(self, b: Builder, eqn: Eqn, inside: Sequence[Counted]) -> list[Var]:
        """Appends an island that also says which of these operands it used."""
        positions = tuple(dict.fromkeys(position for (_, position), _ in inside))
        uses = Var(b.name("uses"), _numbers((len(positions),)))
        params = Params({**eqn.params, "counted": positions})
        b.eqns.append(replace(eqn, params=params, outputs=(*eqn.outputs, uses)))
        each = [o.select(uses, dim=0, index=positions.index(position)) for (_, position), _ in inside]
        return [o.expand(n, shape=shape) if shape else n for n, (_, shape) in zip(each, inside, strict=True)]

    def _count_choices(self, b: Builder, eqn: Eqn, inside: Sequence[Counted]) -> list[Var]:
        """Appends choices, and how many of them each expert has."""
        b.eqns.append(eqn)
        ids: Any = eqn.inputs[0]
        experts = o.iota(shape=(max(eqn.params["experts"]) + 1,), dim=0, dtype=ids.dtype)
        hits = o.cast(o.eq(o.reshape(ids, shape=(*ids.shape, 1)), experts), dtype=torch.int64)
        each = o.sum(hits, dims=tuple(range(ids.ndim)))
        return [each if shape else o.select(each, dim=0, index=which[1]) for which, shape in inside]

    def _named(self, name: str, patterns: Sequence[Counted]) -> Ref:
        """The block of this name that counts so."""
        return self._kept(name, tuple(patterns), lambda block: self.counting(block, patterns))

    def _turning(self, name: str, patterns: Sequence[Counted], at: int, carry: int) -> Ref:
        """The body of a loop that adds to numbers of its state: inputs from `at` on, behind `carry` others."""

        def turning(block: Block) -> Block:
            counted = self.counting(block, patterns)
            b = _builder(counted)
            old = [Var(b.name("uses"), _numbers(shape)) for _, shape in patterns]
            counts = counted.outputs[len(block.outputs) :]
            with b:
                new = [o.add(x, count) for x, count in zip(old, counts, strict=True)]
            b.inputs[at:at] = old
            return b.block((*block.outputs[:carry], *new, *block.outputs[carry:]))

        return self._kept(name, ("turn", at, carry, *patterns), turning)

    def _tested(self, name: str, shapes: Sequence[Shape]) -> Ref:
        """The test of a loop whose state has so many more numbers."""

        def tested(block: Block) -> Block:
            b = _builder(block)
            b.inputs += [Var(b.name("uses"), _numbers(shape)) for shape in shapes]
            return b.block(block.outputs)

        return self._kept(name, ("test", *shapes), tested)

    def _kept(self, name: str, key: Any, make: Any) -> Ref:
        """A new block, made once."""
        if (name, key) not in self._counting:
            unique, block = f"{name}_counting", make(self.program.blocks[name])
            while unique in self.program.blocks or unique in self.blocks:
                unique += "_"
            self.blocks[unique], self._counting[name, key] = block, unique
        return Ref(self._counting[name, key])


def _either(a: Pattern, b: Pattern) -> Pattern:
    """Used where one of two says so."""
    if ALWAYS in (a, b):
        return ALWAYS
    return a if not b else b if not a else tuple(sorted({*a, *b}, key=repr))


def _numbers(shape: Shape) -> Type:
    return Type(torch.int64, shape)


def _full(n: int, shape: Shape) -> Any:
    return o.full(n, shape=shape, dtype=torch.int64)


def _builder(block: Block, names: Block | None = None) -> Builder:
    """That goes on writing a block."""
    b = Builder()
    b.inputs, b.eqns = list(block.inputs), list(block.eqns)
    whole = names or block
    b.reserve(v.name for v in (*whole.inputs, *(v for e in whole.eqns for v in e.outputs)))
    return b
