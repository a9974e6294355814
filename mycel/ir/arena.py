"""Where values on the host lie: one piece of memory for each block that moves any, laid out before it runs.

    bytes     h0 ├──────────┤                 h0 and h2 are never there at once, and lie in the same place
              h1      ├───────────┤
              h2                 ├────┤

A value is there from where its move begins to its last use; what an update on the host reads, whose results nobody in
the step waits for, all the time: the host may be at it when the next step brings its first values.  What replaces an
input that lies on the host is written over that input, and takes nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mycel.ir.program import Block, Program, Var
from mycel.ir.types import DEVICE, HOST
from mycel.ir.walk import order

GRAIN = 512  # bytes: what memory is rounded up to


@dataclass(frozen=True)
class Arena:
    """The values of a block on the host, by the place of the `begin_move` that brings them there: offsets in bytes;
    `over`: the inputs of the program that some replace; `size` of all."""

    at: Mapping[int, int]
    over: Mapping[int, Var]
    size: int


def arena_of(program: Program, name: str, base: int = 0) -> Arena:
    """Of one block, from byte `base` on."""
    spans, over = _spans(program, name)
    offsets, size = packed(spans)
    return Arena({i: base + at for i, at in offsets.items()}, over, size)


def _spans(program: Program, name: str) -> tuple[dict[int, tuple[int, int, int]], dict[int, Var]]:
    """(first, last, bytes) of the values that a block brings to the host, by the place of their `begin_move`; and those
    that are written over an input instead."""
    block = program.blocks[name]
    begun = {e.outputs[0]: i for i, e in enumerate(block.eqns) if e.op.transfers and e.op.effect}
    ends = _ends_on_host(block)
    for eqn in reversed(block.eqns):
        if eqn.on_host:  # what it makes lies where its operands did
            pairs = zip(eqn.inputs, eqn.outputs, strict=False)
            ends.update((x, max(ends[x], ends[y])) for x, y in pairs if isinstance(x, Var) and x in ends)
    replaced = _replaced(program, block) if name == program.entry else {}
    awaited = {v for eqn in block.eqns if not eqn.on_host for v in eqn.vars}
    late = {v for eqn in block.eqns if eqn.on_host and awaited.isdisjoint(eqn.outputs) for v in eqn.vars}
    over: dict[int, Var] = {}
    spans: dict[int, tuple[int, int, int]] = {}
    for eqn in block.eqns:
        if eqn.op.transfers and not eqn.op.effect and eqn.params["to"] == HOST:
            host, start = eqn.outputs[0], begun[next(eqn.vars)]
            if host in replaced and ends[replaced[host]] < start:
                over[start] = replaced[host]
            else:
                first, last = (0, len(block.eqns)) if host in late else (start, ends[host])
                spans[start] = (first, last, rounded(host.type.bytes))
    return spans, over


def _ends_on_host(block: Block) -> dict[Var, int]:
    """The last equation at which each value on the host is alive; outputs live to the end."""
    ends = {v: -1 for v in block.inputs if v.type.space == HOST}
    for i, eqn in enumerate(block.eqns):
        for v in (*eqn.vars, *eqn.outputs):
            if v.type.space == HOST:
                ends[v] = i
    ends.update((v, len(block.eqns)) for v in block.outputs if isinstance(v, Var) and v.type.space == HOST)
    return ends


def arenas(program: Program) -> dict[str, Arena]:
    """Of all blocks that bring values to the host, one behind the other."""
    moving = [
        name
        for name in order(program)
        if any(e.op.transfers and e.params["to"] == HOST for e in program.blocks[name].eqns)
    ]
    by_block, base = dict[str, Arena](), 0
    for name in moving:
        own = by_block[name] = arena_of(program, name, base)
        base += own.size
    return by_block


def host_bytes(program: Program) -> int:
    """What a program keeps on the host: inputs that lie there, and what it brings there."""
    return host_held(program) + sum(a.size for a in arenas(program).values())


def host_held(program: Program) -> int:
    """Of that, what is there between two runs."""
    return sum(rounded(v.type.bytes) for v in program.inputs if v.type.space != DEVICE)


def host_alive(program: Program) -> list[int]:
    """The bytes of values on the host at each equation of the entry; while a block runs, what that needs at most."""
    spans, _ = _spans(program, program.entry)
    inner = {name: arena.size for name, arena in arenas(program).items()}
    held = host_held(program)
    return [
        held
        + sum(n for first, last, n in spans.values() if first <= i <= last)
        + sum(inner.get(r, 0) for r in eqn.refs)
        for i, eqn in enumerate(program.main.eqns)
    ]


def _replaced(program: Program, block: Block) -> dict[Var, Var]:
    """New values of inputs that lie on the host -> these inputs."""
    inputs = {v.name: v for v in block.inputs}
    new = block.outputs[len(block.outputs) - len(program.updates) :] if program.updates else ()
    pairs = zip(new, (inputs[name] for name in program.updates), strict=True)
    return {x: v for x, v in pairs if isinstance(x, Var) and v.type.space != DEVICE}


def packed(spans: Mapping[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """(first, last, bytes) of each value -> offsets at which no two that are there at once overlap, and the bytes of
    all; the largest are placed first, each at the lowest place that is free."""
    offsets: dict[int, int] = {}
    size = 0
    for key in sorted(spans, key=lambda k: (-spans[k][2], spans[k][0])):
        first, last, need = spans[key]
        beside = sorted(
            (offsets[k], offsets[k] + spans[k][2]) for k in offsets if spans[k][0] <= last and first <= spans[k][1]
        )
        offsets[key] = at = _lowest(beside, need)
        size = max(size, at + need)
    return offsets, size


def _lowest(occupied: Iterable[tuple[int, int]], need: int) -> int:
    at = 0
    for start, end in occupied:
        if start - at >= need:
            break
        at = max(at, end)
    return at


def rounded(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
