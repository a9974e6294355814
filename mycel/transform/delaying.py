"""Gradients one step late: each step is taken with the gradients of the one before, whose sum over an axis travels
while this one computes.

    d_w = …                        d_w = …
    return loss, d_w               return loss, w.delayed, w.delayed=d_w
                        =>
                                   then, behind what compressing does:
                                   d = summed(…),  g = d + correction · d² · (w - w.before)
                                   return loss, g, w.before=w

w.delayed is a partial sum over the axis, and there when the step begins: nothing has to be waited for to send it.  It
is a gradient at the weights of the step before.  The correction is the first term of its change since, with the square
of the gradient for the diagonal of the Hessian (DC-ASGD, Zheng et al. 2017): without it AdamW at large rates swings
between two points.  New inputs, by their roles:

    delayed of w over dp      this rank's gradient of the step before, without the loss scale
    outer before of w         the weights it was taken at

The first step has no gradient: it changes nothing but what weight decay does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Builder, Eqn, Program, Role, Type, Var
from mycel.ops import o
from mycel.transform.scaling import LOSS_SCALE


def delay_gradients(program: Program, names: Sequence[str], results: int, axis: str) -> Program:
    """results[results:] are the gradients of the parameters of these names: those of the step before, in their place,
    and as what is updated they themselves."""
    b, roles = _builder(program)
    scale = program.by_role().get(LOSS_SCALE)
    outputs, updates, first = list(program.main.outputs), dict[str, Any](), list[Eqn]()
    with b:
        for at, name in enumerate(names, results):
            g = outputs[at]
            if not isinstance(g, Var):
                continue
            wide = torch.promote_types(g.dtype, torch.float32)
            late = b.input(f"{name}.delayed", Type(wide, g.shape))
            roles[late.name] = Role("delayed", of=name, over=axis)
            now = g if g.dtype == wide else o.cast(g, dtype=wide)
            updates[late.name] = now if scale is None else o.div(now, o.cast(scale, dtype=wide))
            before = len(b.eqns)
            then = late if scale is None else o.mul(late, o.cast(scale, dtype=wide))
            outputs[at] = then if g.dtype == wide else o.cast(then, dtype=g.dtype)
            first += b.eqns[before:]
            del b.eqns[before:]
    b.eqns[:0] = first
    return _written(program, b, outputs, updates, roles)


def correct_delay(program: Program, names: Sequence[str], results: int, correction: float) -> Program:
    """Gradients that are one step late, as they would be about now."""
    b, roles = _builder(program)
    inputs = program.by_role()
    scale = inputs.get(LOSS_SCALE)
    outputs, updates = list(program.main.outputs), dict[str, Any]()
    with b:
        for at, name in enumerate(names, results):
            d, w = outputs[at], inputs.get(Role("parameter", name))
            if not isinstance(d, Var) or w is None:
                continue
            wide = torch.promote_types(d.dtype, torch.float32)
            before = b.input(f"{name}.before", Type(wide, w.shape))
            roles[before.name] = Role("outer", "before", of=name)
            now = w if w.dtype == wide else o.cast(w, dtype=wide)
            g = o.summed(d if d.dtype == wide else o.cast(d, dtype=wide))
            weight = o.mul(o.mul(g, g), correction)
            weight = weight if scale is None else o.div(weight, o.cast(scale, dtype=wide))
            g = o.add(g, o.mul(weight, o.sub(now, before)))
            outputs[at] = g if d.dtype == wide else o.cast(g, dtype=d.dtype)
            updates[before.name] = now
    return _written(program, b, outputs, updates, roles)


def _builder(program: Program) -> tuple[Builder, dict[str, Role]]:
    main, b = program.main, Builder(phase="update")
    b.inputs, b.eqns = list(main.inputs), list(main.eqns)
    b.reserve(v.name for v in (*main.inputs, *(v for e in main.eqns for v in e.outputs)))
    return b, dict(program.roles)


def _written(
    program: Program, b: Builder, outputs: Sequence[Any], updates: dict[str, Any], roles: dict[str, Role]
) -> Program:
    block = replace(program.main, inputs=tuple(b.inputs), eqns=tuple(b.eqns), outputs=(*outputs, *updates.values()))
    return replace(
        program,
        blocks={**program.blocks, program.entry: block},
        updates=(*program.updates, *updates),
        roles=roles,
    )
