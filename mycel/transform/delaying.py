"""Gradients one step late: each step is taken with the gradients of the one before, whose sum over an axis travels
while this one computes; so that they are of about the weights that they change, parameters are held ahead.

    d_w = …                        d_w = …
    return loss, d_w               return loss, w.delayed, w.delayed=d_w
                        =>         and behind it, of the update w', m' = adam(w, m, …):
                                   here = w - w.ahead
                                   there, m' = adam(here, m, …)
                                   h = ahead · b1 · (there - here)
                                   return w=there + h, w.ahead=h, …

w.delayed is a partial sum over the axis, and there when the step begins: nothing has to be waited for to send it.

A late gradient pushes where it should have pushed a step ago; with momentum, which goes on pushing, that adds up: of a
quadratic with b1 = 0.9 the largest stable rate falls from 38 / curvature to 1 / curvature.  So parameters are held
where momentum alone will have taken the optimiser by the time that their gradients come (Nesterov's point; Ajanthan et
al. 2025 for late gradients): what is left of the delay is the share (1 - b1) that new gradients have in a move.  The
optimiser itself goes its own way, `here`, `there`, …; without momentum it is where it was.  New inputs, by their roles:

    delayed of w over dp      this rank's gradient of the step before, without the loss scale
    outer ahead of w          how far w is held ahead of where the optimiser is

The first step has no gradient: it changes nothing but what weight decay does.  A step that changes nothing leaves
parameters where they are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Builder, Eqn, Program, Role, Type, Var
from mycel.ops import o
from mycel.ops.optimisers import is_group_update, optimiser_of
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
    block = replace(
        program.main,
        inputs=tuple(b.inputs),
        eqns=(*first, *b.eqns),
        outputs=(*outputs, *updates.values()),
    )
    return replace(
        program,
        blocks={**program.blocks, program.entry: block},
        updates=(*program.updates, *updates),
        roles=roles,
    )


def sum_late(program: Program, names: Sequence[str], results: int) -> Program:
    """Late gradients of these parameters are summed once, whoever reads them, or are parts of the sum."""
    b, _ = _builder(program)
    outputs = list(program.main.outputs)
    with b:
        for at, _ in enumerate(names, results):
            outputs[at] = o.summed(outputs[at]) if isinstance(outputs[at], Var) else outputs[at]
    block = replace(program.main, eqns=tuple(b.eqns), outputs=tuple(outputs))
    return replace(program, blocks={**program.blocks, program.entry: block})


def hold_ahead(program: Program, share: float) -> Program:
    """A step whose parameters are held ahead of where its optimisers are, by a share of what their momentum will do
    again; those of optimisers without momentum stay."""
    b, roles = _builder(program)
    b.eqns, n = [], len(program.results)
    updates = dict(zip(program.updates, program.main.outputs[n:], strict=True))
    updated = {new: name for name, new in updates.items() if isinstance(new, Var)}
    held: dict[str, Any] = {}
    with b:
        for eqn in program.main.eqns:
            b.at(eqn)
            lead = _momentum(eqn) if is_group_update(eqn.op) else None
            if lead is None:
                b.eqns.append(eqn)
                continue
            before: list[Any] = [*eqn.inputs]
            inputs, leads = [*before], list[Var]()
            for i, p in enumerate(before[: eqn.params["count"]]):
                of = program.roles[updated[eqn.outputs[i]]].name
                h = b.input(f"{of}.ahead", Type(torch.promote_types(p.dtype, torch.float32), p.shape))
                roles[h.name] = Role("outer", "ahead", of=of)
                leads.append(h)
                inputs[i] = _as(o.sub(p, h), p.dtype)
            b.eqns.append(replace(eqn, inputs=tuple(inputs)))
            moves = o.ne(inputs[-1], 1.0)
            for i, h in enumerate(leads):
                p, here, there = before[i], inputs[i], eqn.outputs[i]
                moved = o.sub(_as(there, h.dtype), _as(here, h.dtype))
                more = o.mul(moved, o.cast(o.mul(lead, share), dtype=h.dtype))
                held[updated[there]] = o.where(moves, _as(o.add(there, more), p.dtype), p)
                held[h.name] = o.where(moves, more, h)
    updates |= held
    block = replace(
        program.main,
        inputs=tuple(b.inputs),
        eqns=tuple(b.eqns),
        outputs=(*program.main.outputs[:n], *updates.values()),
    )
    return replace(program, blocks={**program.blocks, program.entry: block}, updates=tuple(updates), roles=roles)


def _momentum(update: Eqn) -> Any:
    """The operand of an update of parameters that says how much of their last move they make again; None: nothing."""
    known = optimiser_of(update.op)
    name, hyper = known.momentum(update.params), [*known.hyper]
    return update.inputs[hyper.index(name) - len(hyper) - 2] if name else None  # behind them: scale, skip


def _as(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else o.cast(x, dtype=dtype)


def _builder(program: Program) -> tuple[Builder, dict[str, Role]]:
    main = program.main
    b = Builder.after(main, phase="update")
    return b, dict(program.roles)
