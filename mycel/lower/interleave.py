"""Two microbatches at once on a device: while one waits for other ranks, the other computes.

    def layer(x, w, v):                     def layer_2(x, w, v, x_b):
      h = linear(x, w)                        h = linear(x, w)
      s = all_reduce(h)              =>       t = begin(h, op="all_reduce")
      y = linear(gelu(s), v)                  h_b = linear(x_b, w)                 beside the message of the first
      z = all_reduce(y)                       t_b = begin(h_b, op="all_reduce")
      return z                                s = finish(t, h)
                                              y = linear(gelu(s), v)               beside that of the second
                                              …

The body of the scan over microbatches becomes one that takes two.  Its equations are two threads, each in its order:
one runs until it begins a message, then the other does; a result is waited for where it is read.  Calls of blocks in
which ranks are waited for are taken together, as one call of both blocks, woven in the same way.  What both would
compute alike, parameters gathered for use among it, is computed once.  Sums over microbatches go from the first to the
second where they are added to, so results are those of one after the other.  Where rows meet in the loss
(`transform/by_parts`) there are two such scans, the one of gradients from the last part to the first: both are woven.

In a pipeline the pair is what goes through the stages, whose steps are cut from the woven body: there each equation is
followed by that of the other microbatch, so a cut has both on the same side; messages are begun inside of calls alone,
which no cut divides, and what both add to a sum is added up first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mycel.errors import PlanError
from mycel.ir import (
    Atom,
    Block,
    Builder,
    Eqn,
    Op,
    Params,
    Program,
    Ref,
    Type,
    Var,
    call,
    check,
    lookup,
    prune,
    scan,
    substitute,
    walk,
)
from mycel.lower.stage_sums import joined_sums, plain_sums
from mycel.ops import o
from mycel.plan.stages import StepBody

AT_ONCE = 2
TOKEN = Type(torch.int64, ())


def interleave(program: Program, body: str, staged: bool = False) -> Program:
    """scan over microbatches => scan over pairs of them; `staged`: of which a pipeline's stages will be cut.  A `body`
    that is no scan's, but the whole of a step, has its microbatches in scans of its own."""
    lengths = {str(e.params["body"]): int(e.params["length"]) for e in program.main.eqns if e.op is scan}
    used = Counter(str(ref) for _, eqn in walk(program) for ref in eqn.refs)
    of_parts = [name for name, length in lengths.items() if length % AT_ONCE == 0 and used[name] == 1]
    names = [body] if body in of_parts else [] if body in lengths else of_parts
    if not names:
        length = lengths.get(body, 1)
        raise PlanError(
            f"at_once: {AT_ONCE}, but there is {length} microbatch\n  try       microbatches: {AT_ONCE}"
            if length == 1
            else f"at_once: {AT_ONCE}, but there are {length} microbatches\n  try       microbatches: {length + 1}"
        )
    woven = program
    for name in names:
        woven = check(prune(_Weaver(plain_sums(woven, name), name, staged).program()))
    return joined_sums(woven, body) if staged else woven


@dataclass
class _Thread:
    """Equations still to come, of one of two microbatches, in the names of the block that both are woven into."""

    eqns: deque[Eqn]

    @property
    def head(self) -> Eqn:
        return self.eqns[0]


@dataclass
class _Weaver:
    """Writes blocks of two out of blocks of one."""

    whole: Program
    body: str
    staged: bool = False
    blocks: dict[str, Block] = field(default_factory=dict)
    waiting: dict[str, bool] = field(default_factory=dict)  # blocks: are ranks waited for in them?
    pairs: dict[tuple[str, tuple[bool, ...]], str] = field(default_factory=dict)

    def program(self) -> Program:
        self.blocks = dict(self.whole.blocks)
        step = StepBody.of(self.whole, self.body)
        main = self.whole.main
        names = Builder(names_of=main)
        before, after = Builder(beside=names), Builder(beside=names)
        before.at(step.eqn)
        after.at(step.eqn)
        with before:
            pieces = [self._paired_rows(x, step.length) for x in step.eqn.inputs[step.consts + step.carry :]]
        self.blocks[self.body] = self._body(step)
        rows = step.eqn.outputs[step.carry :]
        raw = [Var(names.name(v.name), Type(v.dtype, (step.length // 2, 2, *v.shape[1:]))) for v in rows]
        with after:
            reshaped = [o.reshape(x, shape=v.shape) for x, v in zip(raw, rows, strict=True)]
        again = replace(
            step.eqn,
            inputs=(*step.eqn.inputs[: step.consts + step.carry], *pieces),
            params=Params({**step.eqn.params, "length": step.length // AT_ONCE}),
            outputs=(*step.eqn.outputs[: step.carry], *raw),
        )
        values = dict(zip(rows, reshaped, strict=True))
        later = [substitute(e, values) for e in main.eqns[step.at + 1 :]]
        eqns = (*main.eqns[: step.at], *before.eqns, again, *after.eqns, *later)
        outputs = tuple(values.get(x, x) if isinstance(x, Var) else x for x in main.outputs)
        self.blocks[self.whole.entry] = Block(main.inputs, eqns, outputs)
        return replace(self.whole, blocks=self.blocks)

    def _paired_rows(self, x: Atom, length: int) -> Var:
        assert isinstance(x, Var)
        return o.reshape(x, shape=(length // AT_ONCE, AT_ONCE, *x.shape[1:]))  # type: ignore[no-any-return]

    def _body(self, step: StepBody) -> Block:
        """Forward and backward of two microbatches."""
        block = step.block
        names = Builder(names_of=block)
        pairs = [Var(names.name(v.name), Type(v.dtype, (AT_ONCE, *v.shape))) for v in step.pieces]
        picking = Builder(beside=names)
        given: list[dict[Var, Atom]] = [{}, {}]
        order = range(AT_ONCE)[::-1] if step.eqn.params.get("reverse") else range(AT_ONCE)
        with picking:
            for v, pair in zip(step.pieces, pairs, strict=True):
                for values, k in zip(given, order, strict=True):
                    values[v] = o.select(pair, dim=0, index=k)
        first = dict(given[0])
        early, rest = self._carried_early(step)
        mine = [substitute(e, first) for e in rest]
        carried = [lookup(x, first) for x in block.outputs[: step.carry]]
        second = given[1] | dict(zip(step.carried, carried, strict=True))
        theirs, shared = self._renamed(block.eqns, second, names, {e.outputs: e for e in (*early, *mine)})
        inputs = (*block.inputs[: step.consts + step.carry], *pairs)
        there = {*inputs, *(v for e in (*picking.eqns, *early) for v in e.outputs)}
        ends = {x for x in (*carried, *(lookup(x, second) for x in block.outputs)) if isinstance(x, Var)}
        if self.staged:
            firsts = {e.outputs: e for e in mine}
            seconds: dict[tuple[Atom, ...], Eqn] = {e.outputs: e for e in theirs}
            twins = [
                (firsts.get(e.outputs), seconds.get(tuple(lookup(v, second) for v in e.outputs))) for e in block.eqns
            ]
            woven = self._in_step(twins, there)
        else:
            woven = self._woven(mine, theirs, there, names, shared | _on_the_side((*mine, *theirs), ends))
        stacking = Builder(beside=names)
        stacking.at(step.eqn)
        with stacking:
            rows = [self._stacked(x, *((first, second)[k] for k in order)) for x in block.outputs[step.carry :]]
        outputs = [lookup(x, second) for x in block.outputs[: step.carry]]
        return Block(inputs, (*picking.eqns, *early, *woven, *stacking.eqns), (*outputs, *rows))

    def _stacked(self, x: Atom, first: dict[Var, Atom], second: dict[Var, Atom]) -> Var:
        both = [lookup(x, values) for values in (first, second)]
        rows = [o.reshape(y, shape=(1, *y.shape)) for y in both if isinstance(y, Var)]
        return o.cat(*rows, dim=0)  # type: ignore[no-any-return]

    def _carried_early(self, step: StepBody) -> tuple[list[Eqn], list[Eqn]]:
        """What of the first microbatch the second needs before it can begin (the key), as far as that waits for
        nothing; and the rest."""
        block, pieces = step.block, set(step.pieces)
        read = {v for e in block.eqns for v in e.vars}
        makers = {v: i for i, e in enumerate(block.eqns) for v in e.outputs}
        early: set[int] = set()
        for v, new in zip(step.carried, block.outputs, strict=False):
            if v not in read or not isinstance(new, Var):
                continue
            behind, open_ = set[int](), [new]
            while open_:
                x = open_.pop()
                if x in makers and makers[x] not in behind:
                    behind.add(makers[x])
                    open_ += block.eqns[makers[x]].vars
            eqns = [block.eqns[i] for i in behind]
            on_batch = any(x in pieces for e in eqns for x in e.vars)  # a sum, a mean: handed on later
            if not on_batch and not any(self._is_waiting(e) or e.op.effect for e in eqns):
                early |= behind
        return (
            [replace(e, phase="forward") for i, e in enumerate(block.eqns) if i in early],
            [e for i, e in enumerate(block.eqns) if i not in early],
        )

    def _renamed(
        self, eqns: Sequence[Eqn], values: dict[Var, Atom], names: Builder, same: Mapping[tuple[Var, ...], Eqn]
    ) -> tuple[list[Eqn], set[Var]]:
        """Equations in names of their own; those that would do what the first thread's do, are these, and what they
        give is the second result."""
        fresh, shared = list[Eqn](), set[Var]()
        for eqn in eqns:
            again = substitute(eqn, values)
            twin = same.get(eqn.outputs)
            if twin is not None and twin.inputs == again.inputs and not eqn.op.effect:
                shared.update(eqn.outputs)
                continue
            outputs = tuple(Var(names.name(v.name), v.type) for v in eqn.outputs)
            values.update(zip(eqn.outputs, outputs, strict=True))
            fresh.append(replace(again, outputs=outputs))
        return fresh, shared

    def _in_step(self, pairs: Sequence[tuple[Eqn | None, Eqn | None]], there: set[Var]) -> list[Eqn]:
        """Each equation of the first microbatch, and that of the second; calls that wait for ranks are one of both."""
        eqns: list[Eqn] = []
        for mine, theirs in pairs:
            if mine is not None and theirs is not None and mine.op is call and self._is_waiting(mine):
                both = [self._both(mine, theirs)]
            else:
                both = [e for e in (mine, theirs) if e is not None]
            for eqn in both:
                late = next((v for v in eqn.vars if v not in there), None)
                if late is not None:
                    raise PlanError(
                        f"at_once: {AT_ONCE}: a microbatch needs what the one before it leaves: {late.name}\n"
                        f"  at        {eqn.line or 'an unknown line'}\n  try       at_once: 1, or a plan without stages"
                    )
                eqns.append(eqn)
                there.update(eqn.outputs)
        return eqns

    # -- two threads as one

    def _woven(
        self, mine: Sequence[Eqn], theirs: Sequence[Eqn], there: set[Var], names: Builder, aside: set[Var]
    ) -> list[Eqn]:
        """`aside`: results of messages that no thread waits for, or both: `overlap` sees to these."""
        threads = [_Thread(deque(mine)), _Thread(deque(theirs))]
        eqns: list[Eqn] = []
        under_way: dict[Var, tuple[Eqn, Var]] = {}  # results of messages that nobody has waited for yet
        turn, stuck = 0, 0

        def finish(v: Var) -> None:
            sent, token = under_way.pop(v)
            eqns.append(half(o.finish, sent, (token, *sent.vars), sent.outputs))
            there.update(sent.outputs)

        def emit(eqn: Eqn) -> None:
            for v in eqn.vars:
                if v in under_way:
                    finish(v)
            eqns.append(eqn)
            there.update(eqn.outputs)

        while any(t.eqns for t in threads):
            thread, other = threads[turn], threads[1 - turn]
            if not thread.eqns or not all(v in there or v in under_way for v in thread.head.vars):
                turn, stuck = 1 - turn, stuck + 1
                assert stuck < 3, "two microbatches wait for each other"
                continue
            eqn = thread.head
            if eqn.op is call and self._is_waiting(eqn) and self._comes_to_call(other, there, under_way):
                if not (other.eqns and other.head.op is call and self._is_waiting(other.head)):
                    turn = 1 - turn  # until it is there as well
                    continue
                first, second = (thread, other) if turn == 0 else (other, thread)
                emit(self._both(first.eqns.popleft(), second.eqns.popleft()))
                turn, stuck = 0, 0
                continue
            thread.eqns.popleft()
            stuck = 0
            if self._is_message(eqn) and eqn.outputs[0] not in aside:
                for v in eqn.vars:
                    if v in under_way:
                        finish(v)
                token = Var(names.name("begin"), TOKEN)
                eqns.append(half(o.begin, eqn, tuple(eqn.vars), (token,)))
                under_way[eqn.outputs[0]] = eqn, token
                turn = 1 - turn
            else:
                emit(eqn)
        for v in list(under_way):
            finish(v)
        return eqns

    def _is_message(self, eqn: Eqn) -> bool:
        """Can it be begun, and waited for later?"""
        collective = eqn.op.collective
        return collective is not None and (collective.together or collective.counted) and len(eqn.outputs) == 1

    def _comes_to_call(self, thread: _Thread, there: set[Var], under_way: Mapping[Var, object]) -> bool:
        """Will it come to a call that waits for ranks, with what there is now?"""
        known = set(there) | set(under_way)
        for eqn in thread.eqns:
            if not all(v in known for v in eqn.vars):
                return False
            if eqn.op is call and self._is_waiting(eqn):
                return True
            known.update(eqn.outputs)
        return False

    def _is_waiting(self, eqn: Eqn) -> bool:
        """Are ranks waited for in it?"""
        return eqn.op.collective is not None or any(self._waits(str(ref)) for ref in eqn.refs)

    def _waits(self, name: str) -> bool:
        if name not in self.waiting:
            self.waiting[name] = any(self._is_waiting(e) for e in self.whole.blocks[name].eqns)
        return self.waiting[name]

    def _both(self, mine: Eqn, theirs: Eqn) -> Eqn:
        """One call for both."""
        f, g = str(mine.params["block"]), str(theirs.params["block"])
        alike = tuple(
            f == g and isinstance(x, Var) and x == y for x, y in zip(mine.inputs, theirs.inputs, strict=False)
        )
        shared = (*alike, *(False,) * (len(theirs.inputs) - len(alike)))
        name = self._pair(f, g, shared)
        inputs = (*mine.inputs, *(x for x, is_shared in zip(theirs.inputs, shared, strict=False) if not is_shared))
        return replace(mine, inputs=inputs, params=Params(block=Ref(name)), outputs=(*mine.outputs, *theirs.outputs))

    def _pair(self, f: str, g: str, shared: tuple[bool, ...]) -> str:
        """The block of two blocks; `shared`: inputs of the second that are those of the first."""
        key = f"{f}\n{g}", shared
        if key in self.pairs:
            return self.pairs[key]
        name = f"{f}_2" if f == g else f"{f}_{g}"
        while name in self.blocks:
            name += "_"
        self.pairs[key] = name
        mine, theirs = self.whole.blocks[f], self.whole.blocks[g]
        names = Builder(names_of=mine)
        values: dict[Var, Atom] = {}
        inputs = list(mine.inputs)
        for i, v in enumerate(theirs.inputs):
            value = mine.inputs[i] if shared[i] else Var(names.name(v.name), v.type)
            inputs += [] if shared[i] else [value]
            values[v] = value
        same = {e.outputs: e for e in mine.eqns} if f == g else {}
        eqns, alike = self._renamed(theirs.eqns, values, names, same)
        woven = self._woven(mine.eqns, eqns, set(inputs), names, alike)
        outputs = (*mine.outputs, *(lookup(x, values) for x in theirs.outputs))
        self.blocks[name] = Block(tuple(inputs), tuple(woven), outputs)
        return name


def _on_the_side(eqns: Sequence[Eqn], ends: set[Var]) -> set[Var]:
    """What is just added to sums, or given back: gradients."""
    uses: dict[Var, list[Eqn]] = {}
    for eqn in eqns:
        for v in eqn.vars:
            uses.setdefault(v, []).append(eqn)
    aside: set[Var] = set()

    def is_move(eqn: Eqn) -> bool:
        return eqn.op.collective is not None or eqn.op is o.cast

    for eqn in reversed(eqns):
        for v in eqn.outputs:
            read = uses.get(v, ())
            adds = all(e.op is o.add and e.outputs[0] in ends or (is_move(e) and e.outputs[0] in aside) for e in read)
            if adds and (read or v in ends):
                aside.add(v)
    return aside


def half(half: Op, eqn: Eqn, inputs: tuple[Atom, ...], outputs: tuple[Var, ...]) -> Eqn:
    """The beginning or the end of a message, as `begin` and `finish` have it."""
    p = eqn.params
    how: dict[str, object] = {"op": eqn.op.name, "axes": p["axes"], "count": p["count"]}
    how |= {"kind": p["kind"]} if p.get("kind", "+") != "+" else {}
    how |= {"dims": (p["dim"],)} if "dim" in p else {}
    how |= {"sizes": (p["size"],)} if "size" in p else {}
    how |= {"to": p["to"]} if "to" in p else {}
    how |= {"rows": p["rows"]} if "rows" in p else {}
    return replace(eqn, op=half, inputs=inputs, params=Params(how), outputs=outputs)
