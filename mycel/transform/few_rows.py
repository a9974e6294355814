"""Products and attention of a few rows by the kernels made for them; the last pass, for a CPU outside of autograd.

y: f32[1,4,2048] = linear(x, w)                 =>     y: f32[1,4,2048] = linear_few_rows(x, w)
z: f32[1,12,4,64] = sdpa(q, k, v, mask)         =>     z: f32[1,12,4,64] = sdpa_few_rows(q, k, v, mask)
"""

from __future__ import annotations

from dataclasses import replace

from mycel.ir import Eqn, Params, Program, Type, rewrite
from mycel.ops import o
from mycel.ops.few_rows import attends, gains


def few_rows(program: Program) -> Program:
    """The program with `linear_few_rows` and `sdpa_few_rows` where they gain."""
    return rewrite(program, lambda block: replace(block, eqns=tuple(map(_by_few_rows, block.eqns))))


def _by_few_rows(eqn: Eqn) -> Eqn:
    types = eqn.input_types
    if eqn.op is o.sdpa and attends(*types, **eqn.params):
        return replace(eqn, op=o.sdpa_few_rows, params=Params(scale=eqn.params.get("scale")))
    if eqn.op not in (o.linear, o.linear_bias):
        return eqn
    x, w = types[:2]
    fits = isinstance(x, Type) and isinstance(w, Type) and gains(x, w)
    return replace(eqn, op=o.linear_few_rows) if fits else eqn
