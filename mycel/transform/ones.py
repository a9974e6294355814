"""Inputs that hold nothing but ones, such as an attention mask of sequences without padding, may be taken for
constants where masks of attention go for it:

    m: bool[2,1,8,8]  = bitwise_and(below_diagonal, cast(attention_mask))
    y, lse = attention(query, key, value, m)        =>      y, lse = attention(query, key, value, None, causal=True)

Whoever does so has to ask at every call whether it holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mycel.ir import Block, Builder, Program, lookup, substitute
from mycel.ops import o


def with_ones(program: Program, names: Collection[str]) -> Program:
    """The program with these inputs taken to be ones; they stay inputs, which nobody reads."""
    main = program.main
    b = Builder(names_of=main)
    with b:
        ones = {v: o.full(1, shape=v.shape, dtype=v.dtype) for v in main.inputs if v.name in names}
    eqns = (*b.eqns, *(substitute(eqn, ones) for eqn in main.eqns))
    block = Block(main.inputs, eqns, tuple(lookup(x, ones) for x in main.outputs))
    return replace(program, blocks={**program.blocks, program.entry: block})
