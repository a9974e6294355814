"""What a block brings in from other ranks and has been there all along, its callers bring in: they can begin while the
block before is at work.

    def layer(x, w):                                def layer(x, v):
      u = cast(w, dtype=bf16)                         y = linear(x, v)
      v = all_gather(u, axes=("dp",), …)              return y
      y = linear(x, v)
      return y                              =>

    def main(x, w0, w1):                            def main(x, w0, w1):
      h = call(x, w0, block=@layer)                   u0 = cast(w0, dtype=bf16)
      y = call(h, w1, block=@layer)                   v0 = all_gather(u0, axes=("dp",), …)
                                                      u1 = cast(w1, dtype=bf16)
                                                      v1 = all_gather(u1, axes=("dp",), …)
                                                      h = call(x, v0, block=@layer)
                                                      y = call(h, v1, block=@layer)

They stand before the call that comes before: earlier they would only take memory.  Where that call makes what they
gather (the last layer's, for its own backward) they stand behind it.  A block without messages is also one
that a compiler takes whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mycel.ir import (
    Atom,
    Block,
    Builder,
    Chain,
    Eqn,
    Program,
    Var,
    call,
    chains,
    custom,
    loop,
    order,
    prune,
    scan,
    substitute,
)
from mycel.ops import o


def hoist(program: Program) -> Program:
    """The program whose blocks are given what they would gather, wherever one who calls them could have gathered it
    before the call before."""
    blocks = dict(program.blocks)
    for name in order(program):
        gathers = _gathers(blocks[name])
        callers = [n for n, b in blocks.items() if any(name in map(str, e.refs) for e in b.eqns)]
        if (
            name == program.entry
            or not gathers
            or any(name in map(str, e.refs) and e.op is not call for n in callers for e in blocks[n].eqns)
        ):
            continue
        late = [
            set(_late(blocks, blocks[n], i, uses))
            for n in callers
            for uses in [chains(blocks[n])]
            for i, e in enumerate(blocks[n].eqns)
            if name in map(str, e.refs)
        ]
        moved = {
            v: chain
            for v, chain in gathers.items()
            if not all(any(u in x for e in chain for u in e.vars) for x in late)
        }
        if moved:
            old, blocks[name] = blocks[name], _without(blocks[name], moved)
            for n in callers:
                blocks[n] = _caller(blocks[n], name, old, blocks[name], moved)
    return prune(replace(program, blocks=blocks))


def _gathers(block: Block) -> dict[Var, list[Eqn]]:
    """What is gathered of inputs as they are, cast or viewed: each with the equations that make it."""
    producers: dict[Var, list[Eqn]] = {v: [] for v in block.inputs}
    for eqn in block.eqns:
        if (
            eqn.vars
            and all(v in producers for v in eqn.vars)
            and (eqn.op is o.cast or eqn.op.grows or eqn.op.write is not None)
        ):
            before = dict.fromkeys(e for v in eqn.vars for e in producers[v])
            producers.update((v, [*before, eqn]) for v in eqn.outputs)
    return {v: chain for v, chain in producers.items() if chain and chain[-1].op.grows}


def _before(block: Block, at: int) -> int:
    """Where the last call before a place stands; the place itself if there is none."""
    return next((i for i in range(at - 1, -1, -1) if block.eqns[i].op in (call, custom, scan, loop)), at)


def _late(blocks: dict[str, Block], caller: Block, at: int, uses: Mapping[Var, Chain]) -> list[Var]:
    """Inputs of a called block that are not there yet before the call before."""
    place = _before(caller, at)
    inner = blocks[str(caller.eqns[at].params["block"])]
    return [
        v
        for x, v in zip(caller.eqns[at].inputs, inner.inputs, strict=True)
        if not isinstance(x, Var) or uses[x].defined >= place
    ]


def _without(block: Block, moved: dict[Var, list[Eqn]]) -> Block:
    """The block that is given what it gathered; inputs and equations that nothing reads any more are gone."""
    read = {v for v in block.outputs if isinstance(v, Var)}
    eqns: list[Eqn] = []
    for eqn in reversed(block.eqns):
        if not any(v in moved for v in eqn.outputs) and (
            eqn.op.effect or any(v in read for v in eqn.outputs) or any(True for _ in eqn.refs)
        ):
            eqns.append(eqn)
            read.update(eqn.vars)
    inputs = (*(v for v in block.inputs if v in read), *(v for v in moved if v in read))
    return Block(inputs, tuple(reversed(eqns)), block.outputs)


def _caller(block: Block, name: str, old: Block, new: Block, moved: dict[Var, list[Eqn]]) -> Block:
    names = Builder(names_of=block)
    ahead: dict[int, list[Eqn]] = {}
    calls: dict[int, Eqn] = {}
    uses = chains(block)
    for i, eqn in enumerate(block.eqns):
        if name in map(str, eqn.refs):
            values: dict[Var, Atom] = dict(zip(old.inputs, eqn.inputs, strict=True))
            place = {v: uses[x].defined + 1 if isinstance(x, Var) else 0 for v, x in values.items()}
            for e in dict.fromkeys(e for v in new.inputs if v in moved for e in moved[v]):
                at = max(_before(block, i), *(place[v] for v in e.vars))
                place.update(dict.fromkeys(e.outputs, at))
                ahead.setdefault(at, []).extend(_renamed([e], values, names))
            calls[i] = replace(eqn, inputs=tuple(values[v] for v in new.inputs))
    eqns = [e for i, eqn in enumerate(block.eqns) for e in (*ahead.get(i, ()), calls.get(i, eqn))]
    return Block(block.inputs, tuple(eqns), block.outputs)


def _renamed(chain: Iterable[Eqn], values: dict[Var, Atom], names: Builder) -> list[Eqn]:
    """The equations on the caller's values, under new names, which are entered."""
    eqns = []
    for eqn in chain:
        outputs = tuple(Var(names.name(v.name), v.type) for v in eqn.outputs)
        eqns.append(replace(substitute(eqn, values), outputs=outputs))
        values.update(zip(eqn.outputs, outputs, strict=True))
    return eqns
