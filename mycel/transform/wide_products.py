"""Products of 16 bits in 32 where a processor has none of 16: operands cast, results rounded once; the last pass, for a
CPU.

    y: bf16[64,2048] = linear(x, w)        =>      x32: f32[64,768]   = cast(x)
                                                   w32: f32[2048,768] = cast(w)
                                                   y32: f32[64,2048]  = linear(x32, w32)
                                                   y: bf16[64,2048]   = cast(y32)

Sums are made in 32 bits, so this is at least as exact as torch's.  A cast is made for each product anew and freed with
it: what backward keeps stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from mycel.ir import Block, Builder, Eqn, Program, Var, rewrite, walk
from mycel.ops import o
from mycel.ops.narrow_products import HALVES, halves_of, is_product, is_slow_product


def halves(program: Program) -> frozenset[torch.dtype]:
    """The dtypes of 16 bits in which it has products."""
    return frozenset(dtype for _, e in walk(program) if is_product(e) for dtype in halves_of(e))


def wide_products(program: Program, slow: Mapping[torch.dtype, int]) -> Program:
    """The program with products in 32 bits for each dtype in `slow` that use an operand's element so often or more."""
    return rewrite(program, lambda block: _widened(block, slow)) if slow else program


def _widened(block: Block, slow: Mapping[torch.dtype, int]) -> Block:
    if not any(is_slow_product(eqn, slow) for eqn in block.eqns):
        return block
    b = Builder(names_of=block)
    with b:
        for eqn in block.eqns:
            if is_slow_product(eqn, slow):
                _in_32_bits(b, eqn)
            else:
                b.eqns.append(eqn)
    return Block(block.inputs, tuple(b.eqns), block.outputs)


def _in_32_bits(b: Builder, eqn: Eqn) -> None:
    """Writes one product; its results keep their names."""
    b.at(eqn)
    distinct = dict.fromkeys(x for x in eqn.inputs if isinstance(x, Var) and x.dtype in HALVES)
    casts = {x: o.cast(x, dtype=torch.float32) for x in distinct}
    results = eqn.op(*(casts[x] if isinstance(x, Var) and x in casts else x for x in eqn.inputs), **eqn.params)
    product = len(b.eqns) - 1
    outputs: tuple[Var, ...] = results if isinstance(results, tuple) else (results,)
    same = {v: y for v, y in zip(outputs, eqn.outputs, strict=True) if v.dtype == y.dtype}
    b.eqns[product] = replace(b.eqns[product], outputs=tuple(same.get(v, v) for v in outputs))
    for v, y in zip(outputs, eqn.outputs, strict=True):
        if v not in same:
            o.cast(v, dtype=y.dtype)
            b.eqns[-1] = replace(b.eqns[-1], outputs=(y,))
