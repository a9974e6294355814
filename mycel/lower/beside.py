"""While rows are on their way to their experts and back, what does not wait for them is computed: above all a shared
expert, and its gradients.

    rows = exchange_rows(x, …)                 t = begin(x, …, op="exchange_rows")
    y = experts(rows, …)                       h = linear(x, w)                        beside the rows that go
    back = exchange_rows(y, …)          =>     rows = finish(t, x, …)
    z = combine(back, …)                       y = experts(rows, …)
    h = linear(x, w)                           t_1 = begin(y, …, op="exchange_rows")
    s = linear(gelu(h), v)                     s = linear(gelu(h), v)                  beside those that come back
    r = add(z, s)                              back = finish(t_1, y, …)
                                               …

The messages there and back of a layer, forward or backward, are a group.  Equations that none of them waits for and
that wait for none of them are free, if they are of the same phase and stand between the groups around.  They run where
ranks would be waited for, as many operations at each such place; all others stay in their order, so messages have the
same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mycel.ir import CONTROL, Block, Builder, Eqn, Program, Var, leading_to, rewrite
from mycel.lower.interleave import TOKEN, half
from mycel.ops import o


def beside(program: Program) -> Program:
    """Every block that exchanges rows, with what is free of that between the beginning and the end of messages."""
    return rewrite(program, _beside)


def _beside(block: Block) -> Block:
    free = [g for g in _groups(block) if any(block.eqns[i].op.product for i in g.free)]
    if not free:
        return block
    order = _RunOrder(block, [[block.eqns[i] for i in g.free] for g in free])
    moved = {i for g in free for i in g.free}
    rest = [(i, e) for i, e in enumerate(block.eqns) if i not in moved]
    group_of = {block.eqns[i].outputs[0]: k for k, g in enumerate(free) for i in g.messages}
    shares = [_shares(waiting, _waits(rest, g)) for waiting, g in zip(order.waiting, free, strict=True)]
    for _, eqn in rest:
        for k in dict.fromkeys(group_of[v] for v in eqn.vars if v in order.under_way):
            order.run_free(k, shares[k].pop(0))
        order.finish(eqn.vars)
        order.run_free_for(eqn.vars)
        if eqn.outputs and eqn.outputs[0] in group_of:
            order.begin(eqn)
        else:
            order.emit(eqn)
    for k, waiting in enumerate(order.waiting):
        order.run_free(k, len(waiting))
    order.finish(list(order.under_way))
    return Block(block.inputs, tuple(order.eqns), block.outputs)


def _is_message(eqn: Eqn) -> bool:
    return eqn.op.collective is not None and eqn.op.collective.counted


@dataclass(frozen=True)
class _ExchangeGroup:
    """Equations by number: messages there and back, and what is free of them."""

    messages: tuple[int, ...]
    free: tuple[int, ...]


def _groups(block: Block) -> list[_ExchangeGroup]:
    """A message that waits for none is one there, one that waits for such a one is one back, what waits for that
    belongs to the next group."""
    depth: dict[Var, tuple[str, int]] = {}  # of values: how many messages of a phase they have waited for, in a row
    members: dict[tuple[str, int], list[int]] = {}
    for i, eqn in enumerate(block.eqns):
        phases = [depth[v] for v in eqn.vars if v in depth]
        waited = max((n for phase, n in phases if phase == eqn.phase), default=0)
        if _is_message(eqn):
            members.setdefault((eqn.phase, waited // 2), []).append(i)
            waited += 1
        depth.update(dict.fromkeys(eqn.outputs, (eqn.phase, waited)))
    messages = sorted(members.values())
    starts = [*(m[0] for m in messages[1:]), len(block.eqns)]
    ends = [-1, *(m[-1] for m in messages)]
    claimed: set[int] = set()
    groups = []
    for own, start, end in zip(messages, ends, starts, strict=False):
        phase = block.eqns[own[0]].phase
        free = [
            i
            for i in _free(block, [block.eqns[i] for i in own])
            if start < i < end and i not in claimed and block.eqns[i].phase == phase
        ]
        claimed.update(free)
        groups.append(_ExchangeGroup(tuple(own), tuple(free)))
    return groups


def _free(block: Block, messages: Sequence[Eqn]) -> list[int]:
    """Equations, by number, that wait for none of the messages, that none waits for, and that say nothing to other
    ranks."""
    behind: set[Var] = {v for e in messages for v in e.outputs}
    for eqn in block.eqns:
        if not behind.isdisjoint(eqn.vars):
            behind.update(eqn.outputs)
    before = {*leading_to(block.eqns, [v for e in messages for v in e.vars])}
    return [i for i, e in enumerate(block.eqns) if not _speaks(e) and behind.isdisjoint(e.outputs) and i not in before]


def _speaks(eqn: Eqn) -> bool:
    """Does it speak to other ranks, or do more than compute?"""
    return eqn.op.collective is not None or eqn.op.by_rank or eqn.op.effect or eqn.op.stacks or eqn.op in CONTROL


def _waits(rest: Iterable[tuple[int, Eqn]], group: _ExchangeGroup) -> int:
    """How often a message of a group is waited for."""
    count, under_way = 0, set[Var]()
    for i, eqn in rest:
        if not under_way.isdisjoint(eqn.vars):
            count += 1
            under_way.difference_update(eqn.vars)
        under_way.update(eqn.outputs if i in group.messages else ())
    return count


def _shares(free: Sequence[Eqn], count: int) -> list[int]:
    """How many equations to run at each of `count` places, for as many operations at each."""
    work = [e.op.cost(e.input_types, e.params).flops for e in free]
    total, done, shares = sum(work), 0.0, [0] * count
    for operations in work:
        shares[min(int(count * done / total), count - 1)] += 1
        done += operations
    return shares


class _RunOrder:
    """Equations as they are to run; `waiting`: free ones of each group that have not run yet, in their order."""

    def __init__(self, block: Block, free: list[list[Eqn]]) -> None:
        self.names = Builder(names_of=block)
        self.waiting = free
        self.eqns: list[Eqn] = []
        self.there = set(block.inputs)
        self.under_way: dict[Var, tuple[Eqn, Var]] = {}

    def emit(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        self.there.update(eqn.outputs)

    def begin(self, eqn: Eqn) -> None:
        token = Var(self.names.name("begin"), TOKEN)
        self.emit(half(o.begin, eqn, tuple(eqn.vars), (token,)))
        self.under_way[eqn.outputs[0]] = eqn, token

    def finish(self, results: Iterable[Var]) -> None:
        for v in dict.fromkeys(results):
            if v in self.under_way:
                sent, token = self.under_way.pop(v)
                self.emit(half(o.finish, sent, (token, *sent.vars), sent.outputs))

    def run_free(self, group: int, count: int) -> None:
        """The next free equations of a group, as far as what they read is there."""
        waiting = self.waiting[group]
        while count and waiting and self.there.issuperset(waiting[0].vars):
            self.emit(waiting.pop(0))
            count -= 1

    def run_free_for(self, values: Iterable[Var]) -> None:
        """Those that are needed now, with all before them."""
        needed = {v for v in values if v not in self.there}
        for k, waiting in enumerate(self.waiting):
            last = max((i for i, e in enumerate(waiting) if not needed.isdisjoint(e.outputs)), default=-1)
            self.run_free(k, last + 1)
