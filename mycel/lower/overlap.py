"""Collectives begin as early as they can and end as late as they may, and those that begin together go in one message.

    dx, dw, db = call(…, block=@layer_backward)          dx, dw, db = call(…, block=@layer_backward)
    dx1, dw1 = call(dx, …, block=@layer_backward)        t = begin(dw, db, op="all_reduce", …)
    gw = all_reduce(dw, …)                        =>     dx1, dw1 = call(dx, …, block=@layer_backward)
    gb = all_reduce(db, …)                               gw, gb = finish(t, dw, db, op="all_reduce", …)
    w1 = adam(w, gw, …)                                  w1 = adam(w, gw, …)

What is made on the way (gradients) is sent right after it is made, and so is what is there at the start (gradients that
are one step late).  What takes more memory once it has come (parts of parameters) is sent one call ahead of its use.
What takes less memory once it has come (a rank's part of a gradient) is waited for one call later: what was sent stays
until then, and the link is busy with the next one anyway; what goes on over another axis is sent on then, and so is
what is computed of it on the way (sums of gradients that came encoded, encoded again).  A small
message goes with one that begins between the same two calls and is waited for before it, as biases go with the sketches
of `powersgd`: a message is several of the network's own, whatever it holds.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mycel.ir import PHASES, Block, Builder, Chain, Eqn, Program, Var, chains, rewrite
from mycel.lower.by_arrival import by_arrival
from mycel.lower.sent_on import CALLS, next_call, sent_on
from mycel.ops import o

BUCKET = 32 << 20  # bytes in one message
SMALL = 64 << 10  # bytes that take less than the start of a message: between four ranks over gloo, twelve round trips


@dataclass(frozen=True)
class Sent:
    """A collective of a block: where it stands, where it can begin, where it ends."""

    at: int
    begin: int
    use: int


Known = dict[int, tuple[Block, Block]]  # by id, with the block: what it becomes


def overlap(program: Program, known: Known | None = None) -> Program:
    """Every block with its collectives begun early, finished late, and in buckets; `known`: of programs that share
    blocks (the same objects)."""
    done: Known = {} if known is None else known

    def change(block: Block) -> Block:
        if id(block) not in done:
            done[id(block)] = block, _overlapped(block)
        return done[id(block)][1]

    return rewrite(program, change)


def _overlapped(block: Block) -> Block:
    block = by_arrival(sent_on(block))
    collectives = [i for i, e in enumerate(block.eqns) if e.op.collective is not None and e.op.collective.together]
    if not collectives:
        return block
    uses = chains(block)
    calls = [i for i, e in enumerate(block.eqns) if e.op in CALLS]
    begin: dict[int, int] = {}
    arrived: dict[Var, int] = {}  # what one collective brings and another may send on
    for i in collectives:
        begin[i] = _ready(block, i, uses, calls, arrived)
        if _shrinks(block.eqns[i]):
            arrived[block.eqns[i].outputs[0]] = min(i + 1, next_call(calls, begin[i], len(block.eqns)) + 1)
    sent = [Sent(i, begin[i], _end(block, i, uses, calls, begin)) for i in collectives]
    buckets = [b for b in _buckets(block, sent, uses) if len(b) > 1 or _works(block, b[0])]
    gone = {s.at for b in buckets for s in b}
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for k, b in enumerate(buckets):
        begins.setdefault(max(s.begin for s in b), []).append(k)
        ends.setdefault(_use(b), []).append(k)
    names = Builder(names_of=block)
    tokens: dict[int, Var] = {}
    eqns: list[Eqn] = []
    for i in range(len(block.eqns) + 1):
        eqns += [
            _finish(block, buckets[k], tokens[k], _phase(block, buckets[k], uses))
            for k in ends.get(i, ())
            if k in tokens
        ]
        for k in begins.get(i, ()):
            eqn = _begin(names, block, buckets[k], _phase(block, buckets[k], uses))
            tokens[k] = eqn.outputs[0]
            eqns.append(eqn)
            if _use(buckets[k]) <= i:  # begun where it is needed
                eqns.append(_finish(block, buckets[k], tokens[k], _phase(block, buckets[k], uses)))
        if i < len(block.eqns) and i not in gone:
            eqns.append(block.eqns[i])
    return Block(block.inputs, tuple(eqns), block.outputs)


def _ready(block: Block, i: int, uses: Mapping[Var, Chain], calls: Sequence[int], arrived: Mapping[Var, int]) -> int:
    """Where a collective can begin: right behind what it sends; one call ahead of its use, if it grows."""
    eqn = block.eqns[i]
    ready = max((arrived.get(v, uses[v].defined + 1) for v in eqn.vars), default=0)
    before = bisect.bisect_left(calls, min(uses[eqn.outputs[0]].uses, default=len(block.eqns)))
    if before and eqn.op.grows:
        ready = max(ready, calls[before - 1])
    return min(ready, i)


def _end(block: Block, i: int, uses: Mapping[Var, Chain], calls: Sequence[int], begin: Mapping[int, int]) -> int:
    """Where its result is needed (another collective needs it where that begins); or behind the next call, if what it
    sends takes more memory."""
    eqn = block.eqns[i]
    use = min((begin.get(u, u) for u in uses[eqn.outputs[0]].uses), default=len(block.eqns))
    if _shrinks(eqn):
        use = min(use, next_call(calls, begin[i], len(block.eqns)) + 1)
    return use


def _shrinks(eqn: Eqn) -> bool:
    """Does what it brings take less memory than what it sends?"""
    return sum(v.type.bytes for v in eqn.vars) > eqn.outputs[0].type.bytes


def _works(block: Block, s: Sent) -> bool:
    """Is anything computed between its beginning and its use?"""
    between = [block.eqns[i] for i in range(s.begin, min(s.use, len(block.eqns))) if i != s.at]
    return any(e.op.write is None and not e.op.by_rank for e in between)


def _buckets(block: Block, sent: Sequence[Sent], uses: Mapping[Var, Chain]) -> list[list[Sent]]:
    """Collectives of one kind that can begin at the same place and end at the same place, as many as fit one
    message."""
    open_: dict[object, list[Sent]] = {}
    done: list[list[Sent]] = []
    calls = [0]  # before each place: between two calls the exact place does not matter
    for e in block.eqns:
        calls.append(calls[-1] + (e.op in CALLS))
    kind = {s.at: (calls[s.begin], *_kind(block.eqns[s.at])) for s in sent}
    for s in sorted(sent, key=lambda s: (s.begin, s.at)):
        key = (kind[s.at], calls[min(s.use, len(block.eqns))], block.eqns[s.at].phase)
        bucket = open_.get(key)
        if bucket is None or not _fit_together(block, bucket, [s]):
            bucket = open_[key] = []
            done.append(bucket)
        bucket.append(s)
    alike: dict[object, list[list[Sent]]] = {}
    for b in done:
        alike.setdefault(kind[b[0].at], []).append(b)
    for buckets in alike.values():
        for small in sorted(buckets, key=_use, reverse=True):
            others = (b for b in buckets if b is not small and b and _use(b) <= _use(small))
            fit = (b for b in others if _fit_together(block, b, small) and _phase(block, [*b, *small], uses))
            if _bytes(block, small) <= SMALL and (other := next(fit, None)) is not None:
                other += small
                small.clear()
    return [b for b in done if b]


def _kind(eqn: Eqn) -> tuple[object, ...]:
    return eqn.op.name, eqn.params["axes"], eqn.params.get("kind", "+")


def _use(bucket: Sequence[Sent]) -> int:
    return min(s.use for s in bucket)


def _bytes(block: Block, bucket: Sequence[Sent]) -> int:
    return sum(v.type.bytes for s in bucket for v in block.eqns[s.at].vars)


def _fit_together(block: Block, a: Sequence[Sent], b: Sequence[Sent]) -> bool:
    """Can both begin before one of them is needed, and be one message?"""
    both = [*a, *b]
    if max(s.begin for s in both) > _use(both) or _bytes(block, both) > BUCKET:
        return False
    brought = {block.eqns[s.at].outputs[0] for s in both}
    return not any(v in brought for s in both for v in block.eqns[s.at].vars)


def _phase(block: Block, bucket: Sequence[Sent], uses: Mapping[Var, Chain]) -> str:
    """In which a message goes: that of what it holds, or if that is of several, when the last is made; "" where one of
    them is read before."""
    eqns = [block.eqns[s.at] for s in bucket]
    if len({e.phase for e in eqns}) == 1:
        return eqns[0].phase
    order = lambda i: PHASES.index(block.eqns[i].phase)
    last_made = max((order(uses[v].defined) for e in eqns for v in e.vars if uses[v].defined >= 0), default=0)
    read = min((order(i) for e in eqns for i in uses[e.outputs[0]].uses), default=last_made)
    return PHASES[last_made] if last_made <= read else ""


def _params(block: Block, bucket: Sequence[Sent]) -> tuple[tuple[Var, ...], dict[str, object]]:
    eqns = [block.eqns[s.at] for s in bucket]
    p = eqns[0].params
    how: dict[str, object] = {"op": eqns[0].op.name, "axes": p["axes"], "count": p["count"]}
    how |= {"kind": p["kind"]} if p.get("kind", "+") != "+" else {}
    if "dim" in p:
        how["dims"] = tuple(e.params["dim"] for e in eqns)
    if "size" in p:
        how["sizes"] = tuple(e.params["size"] for e in eqns)
    return tuple(v for e in eqns for v in e.vars), how


def _begin(names: Builder, block: Block, bucket: Sequence[Sent], phase: str) -> Eqn:
    inputs, how = _params(block, bucket)
    names.at(block.eqns[bucket[0].at])
    names.phase = phase
    names.emit(o.begin, inputs, how)
    return names.eqns[-1]


def _finish(block: Block, bucket: Sequence[Sent], token: Var, phase: str) -> Eqn:
    inputs, how = _params(block, bucket)
    b = Builder()
    b.at(block.eqns[bucket[0].at])
    b.append(o.finish, (token, *inputs), how, [block.eqns[s.at].outputs[0].type for s in bucket])
    return Eqn(
        o.finish,
        b.eqns[0].inputs,
        b.eqns[0].params,
        tuple(block.eqns[s.at].outputs[0] for s in bucket),
        b.source,
        phase,
    )
