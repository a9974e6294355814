"""What several equations do to the same operand is done once: on a rank, which shares nothing any more, operators that
ranks share whole are their meaning in smaller ones.

    q = fp8_linear(x, wq)               x8, a = fp8_rows(x, form=f8e4m3)
    k = fp8_linear(x, wk)        =>     w8, b = fp8_rows(wq, form=f8e4m3)
                                        q = fp8_product(x8, a, w8, b, dtype=bf16)
                                        v8, c = fp8_rows(wk, form=f8e4m3)
                                        k = fp8_product(x8, a, v8, c, dtype=bf16)
"""

from __future__ import annotations

from mycel.ir import Program, walk
from mycel.transform.cse import cse
from mycel.transform.opening import opened


def once(program: Program) -> Program:
    """op(x…) => its meaning, and equal equations => one; itself if no operator opens."""
    if not any(eqn.op.opens for _, eqn in walk(program)):
        return program
    return cse(opened(program, lambda op: op.expand if op.opens else None))
