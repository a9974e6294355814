"""Equations whose operators have a meaning in others become that; what `unshared`, `in_pieces` and
`recordable` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mycel.ir import Atom, Block, Builder, Eqn, Op, Program, Var, lookup, rewrite, substitute

Meaning = Callable[..., Any]


def opened(program: Program, meaning: Callable[[Op], Meaning | None]) -> Program:
    """y = op(x…) => the equations of meaning(op)(x…), where there is one."""
    return rewrite(program, lambda block: opened_block(block, lambda eqn: meaning(eqn.op)))


def opened_block(block: Block, meaning: Callable[[Eqn], Meaning | None]) -> Block:
    """The same for the equations of one block, each looked at by itself."""
    b = Builder(names_of=block)
    b.inputs = list(block.inputs)
    values: dict[Var, Atom] = {}
    with b:
        for eqn in block.eqns:
            b.at(eqn)
            write = meaning(eqn)
            eqn = substitute(eqn, values)
            if write is None:
                b.eqns.append(eqn)
                continue
            results = write(*eqn.inputs, **eqn.params)
            values.update(zip(eqn.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    return Block(block.inputs, tuple(b.eqns), tuple(lookup(x, values) for x in block.outputs))
