"""Sums of values in 16 bits that travel so and are added in 32, `sums: added in fp32`: as many bytes, one rounding.

    y = reduce_scatter(x, …, dim=0)        =>      y = reduce_scatter_wide(x, …, dim=0)
    y = all_reduce(x, …)                   =>      p = reduce_scatter_wide(x, …, dim=0);  y = all_gather(p, …, dim=0)

What has no dim that divides evenly stays as it is: it is small.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mycel.ir import Atom, Block, Builder, Eqn, Program, Var, lookup
from mycel.ops import o

NARROW = (torch.bfloat16, torch.float16)


def add_wide(program: Program) -> Program:
    """A local program whose sums over ranks are made in 32 bits."""
    return replace(program, blocks={name: _added_wide(block) for name, block in program.blocks.items()})


def _added_wide(block: Block) -> Block:
    if not any(map(_is_narrow_sum, block.eqns)):
        return block
    b = Builder(names_of=block)
    b.inputs, values = list(block.inputs), dict[Var, Atom]()
    with b:
        for eqn in block.eqns:
            b.at(eqn)
            eqn = replace(eqn, inputs=tuple(lookup(x, values) for x in eqn.inputs))
            dim = _dim(eqn) if _is_narrow_sum(eqn) else None
            if dim is None:
                b.eqns.append(eqn)
                continue
            x, (y,), over = next(eqn.vars), eqn.outputs, {k: eqn.params[k] for k in ("axes", "count")}
            part = o.reduce_scatter_wide(x, **over, dim=dim)
            values[y] = part if eqn.op is o.reduce_scatter else o.all_gather(part, **over, dim=dim, size=x.shape[dim])
        return b.block([lookup(x, values) for x in block.outputs])


def _is_narrow_sum(eqn: Eqn) -> bool:
    is_sum = eqn.op in (o.all_reduce, o.reduce_scatter) and eqn.params.get("kind", "+") == "+"
    return is_sum and all(v.dtype in NARROW for v in eqn.vars)


def _dim(eqn: Eqn) -> int | None:
    """The dim that is divided among the ranks who add."""
    if eqn.op is o.reduce_scatter:
        return int(eqn.params["dim"])
    sizes = next(eqn.vars).shape
    return next((d for d, n in enumerate(sizes) if n and n % eqn.params["count"] == 0), None)
