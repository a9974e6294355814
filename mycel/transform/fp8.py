"""Products that a plan names, in 8 bits; what is around them stays as it is.

    y: bf16[8,16] = linear(x, w)      =>      y: bf16[8,16] = fp8_linear(x, w)
    z: bf16[8,16] = matmul(y, v)      =>      z: bf16[8,16] = fp8_matmul(y, v)

It comes last before differentiation, so gradients are products in 8 bits too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mycel.ir import Block, Op, Program


def fp8(program: Program, narrow: Mapping[tuple[str, int], Op]) -> Program:
    """The equations at these places (block, number) with these operators instead."""
    blocks = {
        name: Block(
            block.inputs,
            tuple(replace(eqn, op=narrow[name, i]) if (name, i) in narrow else eqn for i, eqn in enumerate(block.eqns)),
            block.outputs,
        )
        for name, block in program.blocks.items()
    }
    return replace(program, blocks=blocks)
