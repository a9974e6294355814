"""Do the shares of a batch's parts add up to its loss?  Tried on the first batch, where the programs do not show it:

    for x, y in zip(xs, ys): …     a loop over rows: a part's program is not the equations of the whole batch's
    aten.foo                       an operator of torch of which nothing is known

Forward alone, of the whole batch and part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mycel.ir import Program
from mycel.run import interpret

DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # as a share of the loss
COARSE = 0.02  # of 16 bits

Values = Mapping[str, torch.Tensor]


def shares_add_up(
    part: Program, counting: Program, whole: Program, inputs: Values, split: Collection[str], parts: int
) -> bool | None:
    """`part`: the program whose first result is a part's share in the loss, `counting`: of its counts, `inputs`: of the
    whole batch.  None where it cannot be tried: random numbers are others in each part, and so may be what Python does
    or what has an effect; and where there is no data, or no memory for all of it."""
    if not _can_run(part, inputs) or not _can_run(whole, inputs):
        return None
    try:
        return _add_up(part, counting, whole, inputs, split, parts)
    except torch.OutOfMemoryError:  # the whole batch does not fit, which may be why it comes in parts
        return None


@torch.no_grad()
def _add_up(
    part: Program, counting: Program, whole: Program, inputs: Values, split: Collection[str], parts: int
) -> bool:
    wanted = interpret(whole, [inputs[v.name] for v in whole.inputs])[0]
    pieces = [{**inputs, **{name: inputs[name].chunk(parts)[i] for name in split}} for i in range(parts)]
    counts: list[torch.Tensor] = []
    for piece in pieces:
        counted = interpret(counting, [piece[v.name] for v in counting.inputs])
        counts = [a + b for a, b in zip(counts, counted, strict=True)] if counts else counted
    state: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=wanted.dtype, device=wanted.device)
    for piece in pieces:
        piece.update(state)
        piece.update({v.name: counts[int(part.role(v).name)] for v in part.inputs_of("count")})
        outs = interpret(part, [piece[v.name] for v in part.inputs])
        total += outs[0]
        state = dict(zip(part.updates, outs[len(part.results) :], strict=True))
    difference = DIFFERENCE.get(wanted.dtype, COARSE)
    return torch.allclose(total, wanted, rtol=difference, atol=difference, equal_nan=True)


def _can_run(program: Program, inputs: Values) -> bool:
    given = [v for v in program.inputs if program.role(v).kind != "count"]
    return all(v.name in inputs and inputs[v.name].device.type != "meta" for v in given) and not any(
        eqn.op.effect or eqn.op.python for block in program.blocks.values() for eqn in block.eqns
    )
