"""Products of few rows with parameters (in 32 bits) in 8: what a draft of the next tokens is computed by.

    def main(x: f32[1,768], w: f32[2048,768] = parameter up):
      y: f32[1,2048] = linear_few_rows(x, w)
      return y
 =>
    def main(x: f32[1,768], w: f32[2048,768] = parameter up, w_rounded: i8[2048,768] = rounded of up,
             w_scale: f32[2048] = scale of up):
      y: f32[1,2048] = linear_rounded(x, w_rounded, w_scale)
      return y

matmul(x, w) is a product with the transpose.  Parameters may have other readers (tied to an embedding): those read all
of their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from mycel.ir import Atom, Block, Eqn, Params, Program, Role, Type, Var
from mycel.ops import o
from mycel.ops.few_rows import gains


def rounded_weights(program: Program) -> tuple[Program, Mapping[str, bool]]:
    """The program with products of parameters in 8 bits; and which, by their inputs' names: is it the transpose?  Each
    is two more inputs, in this order."""
    main = program.main
    floats = {v for v in program.inputs_of("parameter") if v.dtype == torch.float32}
    turned: dict[str, bool] = {}
    more: dict[str, tuple[Var, Var]] = {}
    roles = dict(program.roles)

    def changed(eqn: Eqn) -> Eqn:
        by_columns = eqn.op is o.matmul and _fits(*eqn.inputs)
        if not (by_columns or eqn.op is o.linear_few_rows):
            return eqn
        x, w, *bias = eqn.inputs
        if w not in floats or turned.setdefault(w.name, by_columns) != by_columns:
            return eqn
        if w.name not in more:
            n, k = reversed(w.shape) if by_columns else w.shape
            more[w.name] = (
                Var(f"{w.name}_rounded", Type(torch.int8, (n, k))),
                Var(f"{w.name}_scale", Type(torch.float32, (n,))),
            )
            for v, kind in zip(more[w.name], ("rounded", "scale"), strict=True):
                roles[v.name] = Role(kind, of=roles[w.name].name)
        return replace(eqn, op=o.linear_rounded, inputs=(x, *more[w.name], *bias), params=Params())

    eqns = tuple(map(changed, main.eqns))
    inputs = (*main.inputs, *(v for pair in more.values() for v in pair))
    blocks = {**program.blocks, program.entry: Block(inputs, eqns, main.outputs)}
    return replace(program, blocks=blocks, roles=roles), turned


def _fits(x: Atom, w: Atom) -> bool:
    return isinstance(x, Var) and isinstance(w, Var) and w.ndim == 2 and gains(x.type, w.type)
