"""Whether parameters are used that only branches or loops read: torch leaves one alone whose branch was not taken.

    y = cond(p, x, w, then=@a, orelse=@b)          y, n = cond(p, x, w, then=@a_counting, orelse=@b_counting)
                                            =>     return …, uses.w=add(uses.w, cast(n))

where @a reads w and @b does not: @a_counting returns True behind what @a does, @b_counting False.  The numbers are
counters of the step (`counter uses.w`), which parts of a batch add to; the update of w is skipped where it is 0 then,
and begins anew (`optimise.py`).  Parameters that are used alike share one.

An island says itself which of its operands it used, by the graph that autograd makes of its results.  Experts of a loop
that passes over those without tokens are used where they are chosen (`choices`); a counter has a number for each.

What counts as a use, and why it is a condition: `use_conditions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import (
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
    lookup,
    loop,
    rewrite,
    scan,
    substitute,
    walk,
)
from mycel.ops import o
from mycel.transform.use_conditions import (
    ALWAYS,
    NEVER,
    Chosen,
    Counted,
    Operand,
    Shape,
    ThroughTurns,
    Use,
    UseConditions,
    asked_of,
    carried,
)

USES = "uses."


def count_uses(program: Program, parameters: Iterable[str]) -> tuple[Program, dict[str, tuple[str, int | None]]]:
    """With counters for those of these inputs that may stay unused; by name, the counter of each, and which of its
    numbers."""
    counting_blocks = _CountingBlocks(program)
    main = program.main
    named = {v.name: v for v in main.inputs}
    of_loss = counting_blocks.conditions.come_to(program.entry, 0)
    each = {name: of_loss.get(named[name], NEVER) for name in parameters}
    sometimes = {
        name: counting_blocks.conditions.of_all(use) for name, use in each.items() if use not in (ALWAYS, NEVER)
    }
    if not sometimes:
        return _without_choices(program), {}
    distinct = list(dict.fromkeys(counted for counted, _ in sometimes.values()))
    first = {c: next(name for name, (own, _) in sometimes.items() if own == c) for c in distinct}
    counting = counting_blocks.counting(main, distinct)
    b = _builder(counting)
    counts = counting.outputs[len(main.outputs) :]
    roles, updates, totals = dict(program.roles), list(program.updates), list[Any]()
    counters: dict[Counted, str] = {}
    for c, count in zip(distinct, counts, strict=True):
        counters[c] = f"{USES}{program.role(named[first[c]]).name}"
        old = b.input(counters[c], Type(torch.int64, c[1]))
        roles[old.name] = Role("counter", counters[c])
        updates.append(old.name)
        with b:
            totals.append(o.add(old, o.cast(count, dtype=torch.int64)))
    block = b.block((*main.outputs, *totals))
    blocks = {**program.blocks, **counting_blocks.blocks, program.entry: block}
    changed = _without_choices(replace(program, blocks=blocks, updates=tuple(updates), roles=roles))
    return changed, {program.role(named[name]).name: (counters[c], at) for name, (c, at) in sometimes.items()}


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


class _CountingBlocks:
    """The blocks of a program that count."""

    def __init__(self, program: Program) -> None:
        self.program, self.conditions = program, UseConditions(program)
        self.blocks: dict[str, Block] = {}
        self._made: dict[Hashable, str] = {}

    def counting(self, block: Block, counted: Sequence[Counted]) -> Block:
        """A block that returns behind its outputs whether each is so; with a shape, numbers that are 0 if not."""
        b = _builder(replace(block, eqns=()), block)
        asked: dict[int, dict[tuple[Any, Shape], None]] = {}
        for use, shape in counted:
            for said in asked_of(use, {}):
                asked.setdefault(said.parts[0], {})[said.parts[1], shape] = None
        answers: dict[tuple[int, Any, Shape], Var] = {}
        known: dict[Counted, Any] = {}

        def value(use: Use, shape: Shape) -> Any:
            if (use, shape) not in known:
                if use in (ALWAYS, NEVER):
                    value_ = _known(use is ALWAYS, shape)
                elif use.kind == "said":
                    value_ = answers[use.parts[0], use.parts[1], shape]
                else:
                    value_ = value(use.parts[0], shape)
                    for part in use.parts[1:]:
                        value_ = _join(use.kind, value_, value(part, shape))
                known[use, shape] = value_
            return known[use, shape]

        with b:
            for i, eqn in enumerate(block.eqns):
                if i not in asked:
                    b.eqns.append(eqn)
                    continue
                b.at(eqn)
                for (question, shape), answer in zip(asked[i], self._answer(b, eqn, [*asked[i]]), strict=True):
                    answers[i, question, shape] = answer
            totals = [value(use, shape) for use, shape in counted]
        return b.block((*block.outputs, *totals))

    def _answer(self, b: Builder, eqn: Eqn, asked: Sequence[tuple[Any, Shape]]) -> list[Var]:
        """Appends an equation that also answers."""
        if eqn.op is o.island:
            return self._answer_of_island(b, eqn, asked)
        if eqn.op is o.choices:
            return self._answer_of_choices(b, eqn, asked)
        if eqn.op in (loop, scan):
            return self._answer_of_turns(b, eqn, asked)
        answers = [Var(b.name("uses"), _type(shape)) for _, shape in asked]
        params = dict(eqn.params)
        for k, name in enumerate(("block",) if eqn.op is call else ("then", "orelse")):
            params[name] = self._named(params[name], tuple((question.uses[k], shape) for question, shape in asked))
        b.eqns.append(replace(eqn, params=Params(params), outputs=(*eqn.outputs, *answers)))
        return answers

    def _answer_of_turns(self, b: Builder, eqn: Eqn, asked: Sequence[tuple[ThroughTurns, Shape]]) -> list[Var]:
        """Appends a loop that carries whether its results come from what is asked about."""
        params, operands, outputs = dict(eqn.params), list(eqn.inputs), list(eqn.outputs)
        consts, carry = params.get("consts", 0), carried(eqn)
        groups: dict[tuple[ThroughTurns, Shape], set[int]] = {}
        for question, shape in asked:
            group = replace(question, out=-1), shape
            groups.setdefault(group, set()).update(self.conditions.reached(eqn, question))
        flags = tuple((*group, k) for group, reached in groups.items() for k in sorted(reached))
        first = [_known(k < carry and k in question.first, shape) for question, shape, k in flags]
        last = [Var(b.name("uses"), _type(shape)) for _, shape, _ in flags]
        params["body"] = self._kept(params["body"], ("turn", flags), lambda block: self._turning(block, eqn, flags))
        if eqn.op is loop:
            shapes = tuple(shape for _, shape, _ in flags)
            params["test"] = self._kept(params["test"], ("test", shapes), lambda block: _tested(block, shapes))
        else:
            params["carry"] = carry + len(flags)
        operands[consts + carry : consts + carry] = first
        outputs[carry:carry] = last
        b.eqns.append(replace(eqn, inputs=tuple(operands), params=Params(params), outputs=tuple(outputs)))
        of_flags = dict(zip(flags, last, strict=True))
        return [of_flags[replace(question, out=-1), shape, question.out] for question, shape in asked]

    def _turning(self, block: Block, eqn: Eqn, flags: Sequence[tuple[ThroughTurns, Shape, int]]) -> Block:
        """The body of a loop that carries these flags behind its state."""
        consts, carry = eqn.params.get("consts", 0), carried(eqn)
        places = {flag: at for at, flag in enumerate(flags)}
        ways: list[list[tuple[int | None, Counted]]] = []  # to each flag: from which, and when
        for question, shape, k in flags:
            from_turn = [] if question.turn[k] is NEVER else [(None, (question.turn[k], shape))]
            from_state = [
                (places[question, shape, at], (use, shape))
                for at in range(carry)
                if (question, shape, at) in places and (use := self.conditions.in_turn(eqn, at, k)) is not NEVER
            ]
            ways.append([*from_turn, *from_state])
        counted = list(dict.fromkeys(way for to in ways for _, way in to))
        counting = self.counting(block, counted)
        when = dict(zip(counted, counting.outputs[len(block.outputs) :], strict=True))
        b = _builder(counting)
        old = [Var(b.name("uses"), _type(shape)) for _, shape, _ in flags]
        new = []
        with b:
            for (_, shape, k), before, to in zip(flags, old, ways, strict=True):
                parts: list[Any] = [before] if k >= carry else []  # a row of any turn
                parts += [when[way] if at is None else _join("all", old[at], when[way]) for at, way in to]
                total = parts[0] if parts else _known(False, shape)
                for part in parts[1:]:
                    total = _join("any", total, part)
                new.append(o.minimum(total, _known(True, shape)) if shape else total)
        b.inputs[consts + carry : consts + carry] = old
        return b.block((*block.outputs[:carry], *new, *block.outputs[carry:]))

    def _answer_of_island(self, b: Builder, eqn: Eqn, asked: Sequence[tuple[Operand, Shape]]) -> list[Any]:
        """Appends an island that also says which of these operands it used."""
        positions = tuple(dict.fromkeys(operand.position for operand, _ in asked))
        uses = Var(b.name("uses"), Type(torch.int64, (len(positions),)))
        params = Params({**eqn.params, "counted": positions})
        b.eqns.append(replace(eqn, params=params, outputs=(*eqn.outputs, uses)))
        each = [o.select(uses, dim=0, index=positions.index(operand.position)) for operand, _ in asked]
        return [_shaped(n, shape) for n, (_, shape) in zip(each, asked, strict=True)]

    def _answer_of_choices(self, b: Builder, eqn: Eqn, asked: Sequence[tuple[Chosen, Shape]]) -> list[Any]:
        """Appends choices, and how many of them each expert has."""
        b.eqns.append(eqn)
        ids: Any = eqn.inputs[0]
        experts = o.iota(shape=(max(eqn.params["experts"]) + 1,), dim=0, dtype=ids.dtype)
        hits = o.cast(o.eq(o.reshape(ids, shape=(*ids.shape, 1)), experts), dtype=torch.int64)
        each = o.sum(hits, dims=tuple(range(ids.ndim)))
        return [
            each if choice.expert is None else _shaped(o.select(each, dim=0, index=choice.expert), shape)
            for choice, shape in asked
        ]

    def _named(self, name: str, counted: tuple[Counted, ...]) -> Ref:
        """The block of this name that counts so."""
        return self._kept(name, counted, lambda block: self.counting(block, counted))

    def _kept(self, name: str, key: Hashable, make: Callable[[Block], Block]) -> Ref:
        """A new block, made once."""
        if (name, key) not in self._made:
            unique, block = f"{name}_counting", make(self.program.blocks[name])
            while unique in self.program.blocks or unique in self.blocks:
                unique += "_"
            self.blocks[unique], self._made[name, key] = block, unique
        return Ref(self._made[name, key])


def _tested(block: Block, shapes: Sequence[Shape]) -> Block:
    """The test of a loop whose state has so many more."""
    b = _builder(block)
    b.inputs += [Var(b.name("uses"), _type(shape)) for shape in shapes]
    return b.block(block.outputs)


def _type(shape: Shape) -> Type:
    """Of one answer: numbers for several experts, which ranks may hold parts of."""
    return Type(torch.int64 if shape else torch.bool, shape)


def _known(is_used: bool, shape: Shape) -> Any:
    return o.full(int(is_used) if shape else is_used, shape=shape, dtype=_type(shape).dtype)


def _shaped(number: Any, shape: Shape) -> Any:
    return o.expand(number, shape=shape) if shape else o.gt(number, 0)


def _join(kind: str, a: Any, b: Any) -> Any:
    if a.dtype == torch.bool:
        return o.logical_or(a, b) if kind == "any" else o.logical_and(a, b)
    return o.add(a, b) if kind == "any" else o.mul(a, b)


def _builder(block: Block, names: Block | None = None) -> Builder:
    """That goes on writing a block."""
    b = Builder(names_of=names or block)
    b.inputs, b.eqns = list(block.inputs), list(block.eqns)
    return b
