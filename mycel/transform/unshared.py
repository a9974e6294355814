"""Without ranks nothing is shared: operators that are one so that ranks can share them are their meaning in smaller
ones, which are differentiated, kept and compiled as all others are.

y = experts(x, ids, weights, up, down, …)          order, counts = route(ids, experts=8)
                                                   rows = dispatch(x, order, chosen=2)
                                            =>     h = grouped_matmul(rows, up, counts)
                                                   …
                                                   y = combine(z, weights, order)
"""

from __future__ import annotations

from mycel.ir import Atom, Block, Builder, Program, Var, lookup, rewrite, substitute, walk


def unshared(program: Program) -> Program:
    """The program without operators for ranks; itself if there are none."""
    return rewrite(program, _opened) if any(eqn.op.for_ranks for _, eqn in walk(program)) else program


def _opened(block: Block) -> Block:
    b = Builder()
    b.inputs = list(block.inputs)
    b.reserve(v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs)))
    values: dict[Var, Atom] = {}
    with b:
        for eqn in block.eqns:
            b.at(eqn)
            eqn = substitute(eqn, values)
            if not eqn.op.for_ranks:
                b.eqns.append(eqn)
                continue
            assert eqn.op.expand is not None
            results = eqn.op.expand(*eqn.inputs, **eqn.params)
            values.update(zip(eqn.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    return Block(block.inputs, tuple(b.eqns), tuple(lookup(x, values) for x in block.outputs))
