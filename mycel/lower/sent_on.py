"""What is computed of what has come, and sent on, is computed and sent between calls, not behind all of them.

    s = exchange_chunks(a, …)                        s = exchange_chunks(a, …)
    b = call(…, block=@layer_backward)               b = call(…, block=@layer_backward)
    c = call(…, block=@layer_backward)        =>     d = decode_sum(s, …)
    d = decode_sum(s, …)                             e = encode(d, …)
    e = encode(d, …)                                 c = call(…, block=@layer_backward)
    g = gather_chunks(e, …)                          g = gather_chunks(e, …)

Where messages begin and end is said by `overlap.py`, which is given this order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from mycel.ir import CONTROL, Block, Var, call, custom, loop, scan
from mycel.ops import o

CALLS = (call, custom, scan, loop)


def sent_on(block: Block) -> Block:
    """What is computed of what a collective brings, and leads to another one, stands behind the call that follows the
    first, and what that one makes is sent before."""
    eqns, places = block.eqns, _places(block)
    if not places:
        return block
    ordered = sorted(range(len(eqns)), key=lambda i: (places.get(i, i), i not in places, i))
    return Block(block.inputs, tuple(eqns[i] for i in ordered), block.outputs)


def _places(block: Block) -> dict[int, int]:
    """By the number of an equation that can stand earlier: before which one."""
    eqns = block.eqns
    if any(e.op.effect and e.op is not o.verified for e in eqns):  # that compares what came on all ranks at one place
        return {}  # stages of a pipeline wait for each other in this order
    calls = [i for i, e in enumerate(eqns) if e.op in CALLS]
    is_sent = [e.op.collective is not None and e.op.collective.together for e in eqns]
    is_plain = [not sent and e.op not in CONTROL for sent, e in zip(is_sent, eqns, strict=True)]
    wanted = set[Var]()  # by a collective, by way of plain equations
    leads = set[int]()
    for i in reversed(range(len(eqns))):
        if is_sent[i] or (is_plain[i] and not wanted.isdisjoint(eqns[i].outputs)):
            wanted.update(eqns[i].vars)
            leads.update([i] if is_plain[i] else [])
    there: dict[Var, int] = {}  # before which equation a value can be there; of others, behind the one that makes it
    come = set[Var]()  # what is computed of what a collective brings
    places: dict[int, int] = {}
    for i, e in enumerate(eqns):
        at = max((there[v] for v in e.vars if v in there), default=0)
        if i in leads:
            comes = not come.isdisjoint(e.vars)
            come.update(e.outputs if comes else ())
            there.update((v, min(at, i + 1)) for v in e.outputs)
            if comes and at < i:
                places[i] = at
        elif is_sent[i]:
            come.update(e.outputs)
            behind = next_call(calls, at, len(eqns)) + 1
            there.update((v, min(next_call(calls, behind, behind), len(eqns))) for v in e.outputs)
        else:
            there.update((v, i + 1) for v in e.outputs)
    makers = {v: i for i, e in enumerate(eqns) for v in e.outputs}
    for i in sorted(places, reverse=True):  # what they need besides comes with them
        needed = [makers[v] for v in eqns[i].vars if v in makers]
        while needed:
            j = needed.pop()
            if (j in leads or is_sent[j]) and places.get(j, j + 1) > places[i]:
                places[j] = places[i]
                needed += [makers[v] for v in eqns[j].vars if v in makers]
    return places


def next_call(calls: Sequence[int], i: int, end: int) -> int:
    after = bisect.bisect_left(calls, i)
    return calls[after] if after < len(calls) else end
