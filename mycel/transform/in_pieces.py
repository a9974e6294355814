"""Operators that are one for the sake of a kernel become pieces where a compiler makes the kernels: so backward keeps
what is dear of them, and computes again what is merged with its use.

    y, mean, var = batch_norm(x, w, b, eps=…)     =>     mean, var = batch_statistics(x)
                                                         y = batch_norm_infer(x, w, b, mean, var, eps=…)

Small blocks that hold such (a module of batch norm, with its running statistics) are inlined first: of a call in it a
block computes all again, or nothing.
"""

from __future__ import annotations

from mycel.ir import Program, walk
from mycel.transform.inline import inline
from mycel.transform.opening import opened

SMALL = 16  # equations of a block that is inlined


def in_pieces(program: Program) -> Program:
    """op(x…) => its pieces; itself if nothing has any."""
    holding = {name for name, eqn in walk(program) if eqn.op.pieces is not None}
    if not holding:
        return program
    return opened(inline(program, SMALL, keep=set(program.blocks) - holding), lambda op: op.pieces)
