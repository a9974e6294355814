"""Without ranks no layout is to be kept: hints are the values they stand for.

h: f32[8,4] = shard(x, layout=(("dp",), ()))
y: f32[8,4] = gelu(h)                              =>     y: f32[8,4] = gelu(x)
"""

from __future__ import annotations

from mycel.ir import Atom, Block, Program, Var, lookup, rewrite, substitute, walk
from mycel.ops import o


def unhinted(program: Program) -> Program:
    """The program without `shard` equations; itself if there are none."""
    return rewrite(program, _without) if any(eqn.op is o.shard for _, eqn in walk(program)) else program


def _without(block: Block) -> Block:
    values: dict[Var, Atom] = {}
    eqns = []
    for eqn in block.eqns:
        eqn = substitute(eqn, values)
        if eqn.op is o.shard:
            values[eqn.outputs[0]] = eqn.inputs[0]
        else:
            eqns.append(eqn)
    return Block(block.inputs, tuple(eqns), tuple(lookup(x, values) for x in block.outputs))
