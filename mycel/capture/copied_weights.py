"""Weights of experts that are picked by tokens: a copy of a matrix for each token and choice.

    torch.einsum("ti,taoi->tao", x, w1[ids])    at model.py:12    ->    a warning with that line, and a better way

Of few tokens this is as good as any; it is told of where there are more copies than matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from mycel.ir import Block, Eqn, Program, Var, call

_WARNED: set[str] = set()  # lines that were told of


def warn_of_copies(program: Program) -> None:
    """Once for a line."""
    for eqn, w in copied_weights(program):
        if eqn.source in _WARNED:
            continue
        _WARNED.add(eqn.source)
        matrices = [x.type.numel // (w.shape[-1] * w.shape[-2]) for x in (eqn.outputs[0], w)]
        warnings.warn(
            f"weights are picked for each token here: {matrices[0]} copies of {matrices[1]} matrices, which ranks "
            f"cannot share\n  at        {eqn.source}\n"
            "  try       for weights of experts: mycel.experts(x, ids, weights, up, down, gate=…), which copies none",
            stacklevel=2,
        )


def copied_weights(program: Program) -> Iterator[tuple[Eqn, Var]]:
    """Equations that pick matrices of a parameter, more often than there are any."""
    for block, weights in blocks_with_parameters(program):
        for eqn in block.eqns:
            rows = eqn.op.looked_up is not None and tuple(eqn.op.looked_up(**eqn.params)) == (0,)
            w = eqn.inputs[0] if rows else None
            if isinstance(w, Var) and w in weights and w.ndim > 2 and eqn.outputs[0].type.numel > w.type.numel:
                yield eqn, w


def blocks_with_parameters(program: Program) -> Iterator[tuple[Block, frozenset[Var]]]:
    """Blocks that are called, each with those of its inputs that are parameters."""
    waiting = [(program.entry, frozenset(v for v in program.inputs_of("parameter")))]
    done = set(waiting)
    while waiting:
        name, weights = waiting.pop()
        yield program.blocks[name], weights
        for eqn in program.blocks[name].eqns:
            if eqn.op is call:
                body = program.blocks[eqn.params["block"]]
                given = frozenset(v for v, x in zip(body.inputs, eqn.inputs, strict=True) if x in weights)
                inner = (eqn.params["block"], given)
                waiting += [] if inner in done else [inner]
                done.add(inner)
