"""Products of a few rows by the kernel made for them; the last pass, for a CPU outside of autograd.

y: f32[1,4,2048] = linear(x, w)                 =>     y: f32[1,4,2048] = linear_few_rows(x, w)
"""

from __future__ import annotations

from dataclasses import replace

from mycel.ir import Eqn, Program, Type, rewrite
from mycel.ops import o
from mycel.ops.few_rows import gains


def few_rows(program: Program) -> Program:
    """The program with `linear_few_rows` where that gains."""
    return rewrite(program, lambda block: replace(block, eqns=tuple(map(_by_few_rows, block.eqns))))


def _by_few_rows(eqn: Eqn) -> Eqn:
    if eqn.op not in (o.linear, o.linear_bias):
        return eqn
    x, w = eqn.input_types[:2]
    fits = isinstance(x, Type) and isinstance(w, Type) and gains(x, w)
    return replace(eqn, op=o.linear_few_rows) if fits else eqn
