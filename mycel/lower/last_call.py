"""The last call of backward becomes two, so that what the first makes travels beside the second.

    dx, dw, dv = call(g, …, block=@layer_backward)          t, dw = call(g, …, block=@layer_backward_inputs)
    gw = all_reduce(dw, …)                            =>    dx, dv = call(t, …, block=@layer_backward_weights)
    gv = all_reduce(dv, …)                                  gw = all_reduce(dw, …)
                                                            gv = all_reduce(dv, …)

What a call makes is sent behind it, beside the next one (`overlap.py`); behind the last one nothing hides it.  The
first half is what half of that, by bytes and in the order in which it is made, needs; what is computed of it on its way
(a gradient is encoded) stands between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, chains
from mycel.lower.sent_on import CALLS
from mycel.lower.split_calls import CallSplitter

LEAST = 256 << 10  # bytes of gradients in each half; fewer are not worth another message


def divided_last_call(program: Program) -> Program:
    """Where there is as much to send of each half, and a product behind the first."""
    main = program.main
    at = max((i for i, e in enumerate(main.eqns) if e.op in CALLS), default=-1)
    if at < 0 or main.eqns[at].op is not call or main.eqns[at].phase != "backward":
        return program
    splitter = CallSplitter(dict(program.blocks), main)
    first, rest = splitter.split([(at, main.eqns[at])], _first_half(program.blocks, main, at))
    if len(first) != 1 or len(rest) != 1:
        return program
    (_, early), (_, late) = first[0], rest[0]
    blocks = splitter.blocks
    if not any(e.op.product for e in blocks[str(late.params["block"])].eqns):
        return program
    between, behind = _ready(main.eqns[at + 1 :], early, late)
    eqns = (*main.eqns[:at], early, *between, late, *behind)
    return replace(program, blocks={**blocks, program.entry: Block(main.inputs, eqns, main.outputs)})


def _ready(eqns: Sequence[Eqn], early: Eqn, late: Eqn) -> tuple[list[Eqn], list[Eqn]]:
    """(what is computed of the first half alone, to be sent; the rest)"""
    wanted, there, to_come = _sent(eqns), set(early.outputs), set(late.outputs)
    between, behind = list[Eqn](), list[Eqn]()
    for e in eqns:
        reads = set(e.vars)
        is_ready = _is_plain(e) and not wanted.isdisjoint(e.outputs) and reads.isdisjoint(to_come)
        if is_ready and not reads.isdisjoint(there):
            between.append(e)
            there.update(e.outputs)
        else:
            behind.append(e)
            to_come.update(e.outputs)
    return between, behind


def _is_plain(eqn: Eqn) -> bool:
    return eqn.op not in CONTROL and eqn.op.collective is None and not eqn.op.effect


def _first_half(blocks: Mapping[str, Block], main: Block, at: int) -> set[Var]:
    """Of what a call makes and collectives send, the values that are made first, half of the bytes; none, if one of the
    halves is small."""
    eqn = main.eqns[at]
    inner, wanted = blocks[str(eqn.params["block"])], _sent(main.eqns[at + 1 :])
    known = chains(inner)
    pairs = [(x, y) for x, y in zip(inner.outputs, eqn.outputs, strict=True) if isinstance(x, Var) and y in wanted]
    pairs.sort(key=lambda pair: known[pair[0]].defined)
    total, done, half = sum(y.type.bytes for _, y in pairs), 0, set[Var]()
    for _, y in pairs:
        if 2 * done < total:
            half.add(y)
            done += y.type.bytes
    return half if min(done, total - done) >= LEAST else set()


def _sent(eqns: Sequence[Eqn]) -> set[Var]:
    """What collectives send of what was there before, also by way of plain equations."""
    wanted = set[Var]()
    for e in reversed(eqns):
        is_sent = e.op.collective is not None and e.op.collective.together
        if is_sent or (_is_plain(e) and not wanted.isdisjoint(e.outputs)):
            wanted.update(e.vars)
    return wanted
