"""Behind the last call and the last product, messages are waited for in the order in which they were sent.

    g = gather_chunks(e, …)          sent last             a = gather_chunks(d, …)
    x = decode(g, …)                                       y = decode(a, …)
    a = gather_chunks(d, …)          sent first      =>    g = gather_chunks(e, …)
    y = decode(a, …)                                       x = decode(g, …)
    n = global_norm(x, y)                                  n = global_norm(x, y)

Nothing hides a wait there but what is computed of messages that have come: who waits for the last one first has all of
that still to do.  What waits for none comes before them all if it is sent or returned, and else where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.ir import Block, Eqn, Var
from mycel.lower.sent_on import CALLS
from mycel.ops import o

FIRST = -1  # before any message is waited for


def by_arrival(block: Block) -> Block:
    """The equations behind the last call and the last product, by the message that they wait for."""
    eqns = block.eqns
    if any(e.op.effect and e.op is not o.verified for e in eqns):
        return block  # stages of a pipeline wait for each other in this order
    start = max((i + 1 for i, e in enumerate(eqns) if e.op in CALLS or e.op.product), default=0)
    if sum(map(_is_sent, eqns[start:])) < 2:
        return block
    turns = _free_turns(block, start, _turns(eqns, start))
    behind = sorted(range(start, len(eqns)), key=lambda i: (turns[i], not _is_sent(eqns[i]), i))
    return Block(block.inputs, (*eqns[:start], *(eqns[i] for i in behind)), block.outputs)


def _turns(eqns: Sequence[Eqn], start: int) -> dict[int, int]:
    """Of messages from there on, and of what is computed of them: as which one it comes, or what it waits for last."""
    maker = {v: i for i, e in enumerate(eqns) for v in e.outputs}
    waits = sorted(
        (i for i in range(start, len(eqns)) if _is_sent(eqns[i])),
        key=lambda i: max((maker.get(v, FIRST) for v in eqns[i].vars), default=FIRST),
    )
    to_come = set[Var]()
    left = list[int]()  # to be computed of what comes
    for i in range(start, len(eqns)):
        if _is_sent(eqns[i]) or not to_come.isdisjoint(eqns[i].vars):
            to_come.update(eqns[i].outputs)
            left += [] if _is_sent(eqns[i]) else [i]
    turns: dict[int, int] = {}
    on_the_way: list[int] = []
    for turn in range(len(waits)):
        on_the_way += [i for i in waits if to_come.isdisjoint(eqns[i].vars)]
        waits = [i for i in waits if not to_come.isdisjoint(eqns[i].vars)]
        came = on_the_way.pop(0)
        turns[came] = turn
        to_come.difference_update(eqns[came].outputs)
        for i in left:
            if to_come.isdisjoint(eqns[i].vars):
                turns[i] = turn
                to_come.difference_update(eqns[i].outputs)
        left = [i for i in left if i not in turns]
    return turns


def _free_turns(block: Block, start: int, turns: dict[int, int]) -> dict[int, int]:
    """With the equations that wait for none: first what is sent or returned, others at the turn of what uses them."""
    wanted = {v: FIRST for v in block.outputs if isinstance(v, Var)}
    for i in reversed(range(start, len(block.eqns))):
        e = block.eqns[i]
        turn = turns.setdefault(i, min((wanted[v] for v in e.outputs if v in wanted), default=FIRST))
        for v in e.vars:
            wanted[v] = min(wanted.get(v, turn), FIRST if _is_sent(e) else turn)
    return turns


def _is_sent(eqn: Eqn) -> bool:
    return eqn.op.collective is not None and eqn.op.collective.together
