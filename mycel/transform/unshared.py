"""Without ranks nothing is shared: operators that are one so that ranks can share them are their meaning in smaller
ones, which are differentiated, kept and compiled as all others are.

y = experts(x, ids, weights, up, down, …)          order, counts = route(ids, experts=8)
                                                   rows = dispatch(x, order, chosen=2)
                                            =>     h = grouped_matmul(rows, up, counts)
                                                   …
                                                   y = collect(z, order, chosen=2)
"""

from __future__ import annotations

from mycel.ir import Program, walk
from mycel.transform.opening import opened


def unshared(program: Program) -> Program:
    """The program without operators for ranks; itself if there are none."""
    if not any(eqn.op.for_ranks for _, eqn in walk(program)):
        return program
    return opened(program, lambda op: op.expand if op.for_ranks else None)
