"""Collectives begin as early as they can and end as late as they may, and those that begin together go in one message.

    dx, dw, db = call(…, block=@layer_backward)          dx, dw, db = call(…, block=@layer_backward)
    dx1, dw1 = call(dx, …, block=@layer_backward)        t = begin(dw, db, op="all_reduce", …)
    gw = all_reduce(dw, …)                        =>     dx1, dw1 = call(dx, …, block=@layer_backward)
    gb = all_reduce(db, …)                               gw, gb = finish(t, dw, db, op="all_reduce", …)
    w1 = adam(w, gw, …)                                  w1 = adam(w, gw, …)

What is made on the way (gradients) is sent right after it is made, and so is what is there at the start (gradients that
are one step late).  What takes more memory once it has come (parts of parameters) is sent one call ahead of its use.
What takes less memory once it has come (a rank's part of a gradient) is waited for one call later: what was sent stays
until then, and the link is busy with the next one anyway.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mycel.ir import Block, Builder, Chain, Eqn, Program, Var, call, chains, custom, loop, rewrite, scan
from mycel.ops import o

BUCKET = 32 << 20  # bytes in one message


@dataclass(frozen=True)
class Sent:
    """A collective of a block: where it stands, where it can begin, where it ends."""

    at: int
    begin: int
    use: int


def overlap(program: Program) -> Program:
    """Every block with its collectives begun early, finished late, and in buckets."""
    return rewrite(program, _overlapped)


def _overlapped(block: Block) -> Block:
    collectives = [i for i, e in enumerate(block.eqns) if e.op.collective is not None and e.op.collective.together]
    if not collectives:
        return block
    uses = chains(block)
    calls = [i for i, e in enumerate(block.eqns) if e.op in (call, custom, scan, loop)]
    begin = {i: _ready(block, i, uses, calls) for i in collectives}
    sent = [Sent(i, begin[i], _end(block, i, uses, calls, begin)) for i in collectives]
    buckets = [b for b in _buckets(block, sent) if len(b) > 1 or b[0].begin < b[0].use - 1 and _works(block, b[0])]
    gone = {s.at for b in buckets for s in b}
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for k, b in enumerate(buckets):
        begins.setdefault(max(s.begin for s in b), []).append(k)
        ends.setdefault(min(s.use for s in b), []).append(k)
    names = Builder()
    names.reserve(v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs)))
    tokens: dict[int, Var] = {}
    eqns: list[Eqn] = []
    for i in range(len(block.eqns) + 1):
        eqns += [_finish(block, buckets[k], tokens[k]) for k in ends.get(i, ()) if k in tokens]
        for k in begins.get(i, ()):
            eqn = _begin(names, block, buckets[k])
            tokens[k] = eqn.outputs[0]
            eqns.append(eqn)
            if min(s.use for s in buckets[k]) <= i:  # begun where it is needed
                eqns.append(_finish(block, buckets[k], tokens[k]))
        if i < len(block.eqns) and i not in gone:
            eqns.append(block.eqns[i])
    return Block(block.inputs, tuple(eqns), block.outputs)


def _ready(block: Block, i: int, uses: Mapping[Var, Chain], calls: Sequence[int]) -> int:
    """Where a collective can begin: right behind what it sends; one call ahead of its use, if it grows."""
    eqn = block.eqns[i]
    ready = max((uses[v].defined for v in eqn.vars), default=-1) + 1
    before = bisect.bisect_left(calls, min(uses[eqn.outputs[0]].uses, default=len(block.eqns)))
    if before and eqn.op.grows:
        ready = max(ready, calls[before - 1])
    return min(ready, i)


def _end(block: Block, i: int, uses: Mapping[Var, Chain], calls: Sequence[int], begin: Mapping[int, int]) -> int:
    """Where its result is needed (another collective needs it where that begins); or behind the next call, if what it
    sends takes more memory."""
    eqn = block.eqns[i]
    use = min((begin.get(u, u) for u in uses[eqn.outputs[0]].uses), default=len(block.eqns))
    after = bisect.bisect_left(calls, begin[i])
    if after < len(calls) and sum(v.type.bytes for v in eqn.vars) > eqn.outputs[0].type.bytes:
        use = min(use, calls[after] + 1)
    return use


def _works(block: Block, s: Sent) -> bool:
    """Is anything computed between its beginning and its use?"""
    between = [block.eqns[i] for i in range(s.begin, min(s.use, len(block.eqns))) if i != s.at]
    return any(e.op.write is None and not e.op.by_rank for e in between)


def _buckets(block: Block, sent: Sequence[Sent]) -> list[list[Sent]]:
    """Collectives of one kind that can begin at the same place and end at the same place, as many as fit one
    message."""
    open_: dict[object, list[Sent]] = {}
    done: list[list[Sent]] = []
    calls = [0]  # before each place: between two calls the exact place does not matter
    for e in block.eqns:
        calls.append(calls[-1] + (e.op in (call, custom, scan, loop)))
    for s in sorted(sent, key=lambda s: (s.begin, s.at)):
        eqn = block.eqns[s.at]
        key = (
            calls[s.begin],
            calls[min(s.use, len(block.eqns))],
            eqn.op.name,
            eqn.params["axes"],
            eqn.params.get("kind", "+"),
            eqn.phase,
        )
        bucket = open_.get(key)
        full = bucket is not None and sum(v.type.bytes for x in (*bucket, s) for v in block.eqns[x.at].vars) > BUCKET
        # this message sends what one of them brings
        sends = bucket is not None and any(block.eqns[x.at].outputs[0] in eqn.vars for x in bucket)
        if bucket is None or full or sends or max(x.begin for x in (*bucket, s)) > min(x.use for x in (*bucket, s)):
            bucket = open_[key] = []
            done.append(bucket)
        bucket.append(s)
    return done


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


def _begin(names: Builder, block: Block, bucket: Sequence[Sent]) -> Eqn:
    inputs, how = _params(block, bucket)
    names.at(block.eqns[bucket[0].at])
    names.emit(o.begin, inputs, how)
    return names.eqns[-1]


def _finish(block: Block, bucket: Sequence[Sent], token: Var) -> Eqn:
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
        b.phase,
    )
