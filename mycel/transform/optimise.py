"""A program that returns gradients -> a program that takes the step: clip, skip what is not finite, update parameters
and optimiser state.

    loss, d_w = …              loss, d_w = …
    return loss, d_w           norm  = global_norm(d_w)
                        =>     skip  = 1 - isfinite(norm)
                               w', m', v', t' = adam(w, m, v, t, d_w, lr, …, scale, skip, count=1)
                               return loss, norm, updates: w', m', v', t', skipped + skip

Gradients are divided by `scale`: the loss scale of half precision times what clipping takes away.  A skipped step
changes no state at all: updates of buffers are undone as well.  A group whose parameters were not used stays as it is.
A group without a kind is not updated here: whoever does it gets the gradients, without the loss scale and not clipped.
New inputs, by their roles:

    state exp_avg of w         for each slot of a group, for each of its parameters
    hyper lr of group 0        the scalar operands of a group's update
    gradient of w              where gradients are asked for: as clipped, or of a group that is updated elsewhere
    counter skipped            how many steps changed nothing
    counter uses.w             of a group that may stay unused: how often this step used it, or each of several
    counter good_steps         where there is a loss scale: steps since it changed.  The scale itself is an input
                               already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import OPS, Block, Builder, Program, Role, Type, Var
from mycel.ops import o
from mycel.ops.optimisers import OPTIMISERS, StateSlot
from mycel.transform.scaling import LOSS_SCALE

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000  # torch.amp.GradScaler's
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s

SCALAR = Type(torch.float64, ())


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated together: `kind` is an optimiser of ours (empty: they are updated elsewhere),
    `params` by the names their roles have, `slots` their state, `hyper` the scalar operands by name; `name` tells
    groups apart.  `counter`: of how often they are used, where that may be never (`uses.py`); `number`: which of its
    numbers, where it has several."""

    kind: str
    params: tuple[str, ...]
    slots: tuple[str, ...]
    hyper: tuple[str, ...]
    flags: tuple[tuple[str, Any], ...] = ()
    name: str = "0"
    counter: str = ""
    number: int | None = None

    def state_roles(self) -> list[Role]:
        """Its state, slot by slot."""
        return [Role("state", slot, of=p) for slot in self.slots for p in self.params]

    def hyper_roles(self) -> list[Role]:
        return [Role("hyper", name, of=self.name) for name in self.hyper]

    def slot_type(self, slot: str, param: Type) -> Type:
        """The type of a parameter's state, as the optimiser's paragraph says."""
        return self.slot(slot).type(param)

    def slot(self, name: str) -> StateSlot:
        return next(slot for slot in OPTIMISERS[self.kind].slots if slot.name == name)


def optimise(
    program: Program,
    groups: Sequence[ParameterGroup],
    results: int,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    gradients: bool = False,
) -> Program:
    """Gradients in results[results:], in the order of the groups' parameters => updates of these; with `gradients`, of
    inputs for them too."""
    main, inputs = program.main, dict(program.by_role())
    loss_scale = inputs.get(LOSS_SCALE)
    n = len(program.results)
    grads: Sequence[Any] = main.outputs[results:n]
    b = Builder(phase="update", names_of=main)
    b.inputs = list(main.inputs)
    b.eqns = list(main.eqns)
    roles = dict(program.roles)

    def new_input(name: str, type: Type, role: Role) -> Var:
        """An input of this role; some state and hyper-parameters are there, where messages read them."""
        if role not in inputs:
            inputs[role] = b.input(name, type)
            roles[inputs[role].name] = role
        return inputs[role]

    params = [[inputs[Role("parameter", p)] for p in group.params] for group in groups]
    given = [_state(new_input, group, own) for group, own in zip(groups, params, strict=True)]
    returned = [p for group, own in zip(groups, params, strict=True) for p in own if gradients or not group.kind]
    # in the groups' order
    kept = {p: new_input(f"{p.name}.grad", p.type, Role("gradient", of=program.role(p).name)) for p in returned}
    skipped = new_input("skipped", Type(torch.int64, ()), Role("counter", "skipped"))
    counted = dict(zip(program.updates, main.outputs[n:], strict=True))
    counters = {group.counter: inputs[Role("counter", group.counter)] for group in groups if group.counter}
    updates: dict[str, Any] = {}
    with b:
        wide = o.global_norm(*grads)
        norm = o.cast(wide, dtype=torch.float32)
        scale = None
        if loss_scale is not None:
            scale = loss_scale
            norm = o.div(norm, scale)
        if clip_norm is not None:
            more = o.clamp(o.div(o.add(norm, CLIP_EPS), clip_norm), 1.0, None)
            scale = more if scale is None else o.mul(scale, more)
        finite = o.isfinite(norm if wide.dtype == torch.float32 else wide)  # 32 bits do not hold all that 64 do
        finite = o.logical_and(finite, o.isfinite(main.outputs[0]))  # of a loss that is no number, too
        skip = o.sub(1.0, o.cast(finite, dtype=torch.float32))
        if kept or clip_value is not None:  # gradients are wanted as they are, not by way of a scale
            grads, scale = [_clipped(g, scale, clip_value) for g in grads], None
        for name, new in zip(program.updates, main.outputs[n:], strict=True):
            old = next(v for v in main.inputs if v.name == name)
            is_late = program.role(old).kind == "delayed"  # the step that is skipped is that of the old one
            updates[name] = new if is_late else o.where(finite, new, old)
        uses = {name: o.sub(counted[v.name], v) for name, v in counters.items()}  # of this step
        updates.update((counters[name].name, count) for name, count in uses.items())
        unused = {name: o.cast(o.eq(count, 0), dtype=torch.float32) for name, count in uses.items()}
        idle = {name: o.maximum(no_use, skip) for name, no_use in unused.items()}
        at = 0
        for group, own, (state, hyper) in zip(groups, params, given, strict=True):
            count = len(own)
            mine = grads[at : at + count]
            at += count
            updates.update((kept[p].name, g) for p, g in zip(own, mine, strict=True) if p in kept)
            if not group.kind:
                continue
            named = [*own, *state]
            over = [updates.get(v.name, v) for v in named]  # the forward pass may have changed a parameter itself
            flags = {"count": count, **dict(group.flags)}
            stays = idle.get(group.counter, skip)
            if group.number is not None:
                stays = o.select(stays, dim=0, index=group.number)
            updated = OPS[group.kind](*over, *mine, *hyper, scale, stays, **flags)
            updates.update(
                (v.name, new)
                for v, new in zip(named, updated if isinstance(updated, tuple) else (updated,), strict=True)
            )
        updates[skipped.name] = o.add(skipped, o.cast(skip, dtype=torch.int64))
        if loss_scale is not None:
            good = new_input("good_steps", Type(torch.int32, ()), Role("counter", "good_steps"))
            _scale_updates(updates, loss_scale, good, finite)
    block = Block(tuple(b.inputs), tuple(b.eqns), (*main.outputs[:results], norm, *updates.values()))
    return replace(program, blocks={**program.blocks, program.entry: block}, updates=tuple(updates), roles=roles)


def _clipped(g: Any, scale: Any, most: float | None) -> Any:
    """A gradient without its scale, no element beyond `most`."""
    g = g if scale is None else o.div(g, o.cast(scale, dtype=g.dtype))
    return g if most is None else o.clamp(g, -most, most)


def _state(
    new_input: Callable[[str, Type, Role], Var], group: ParameterGroup, params: Sequence[Var]
) -> tuple[list[Var], list[Var]]:
    """Inputs for a group's state, slot by slot, and for its hyper-parameters."""
    slots = [(f"{p.name}.{slot}", group.slot_type(slot, p.type)) for slot in group.slots for p in params]
    state = [new_input(name, type, role) for (name, type), role in zip(slots, group.state_roles(), strict=True)]
    return state, [new_input(role.name, SCALAR, role) for role in group.hyper_roles()]


def _scale_updates(updates: dict[str, Any], scale: Var, good: Var, finite: Var) -> None:
    """Half the scale after a step that was skipped; twice after INTERVAL good ones."""
    count = o.add(good, 1)
    grown = o.eq(count, INTERVAL)
    up = o.where(grown, o.mul(scale, GROWTH), scale)
    up = o.where(o.isfinite(up), up, scale)
    updates[scale.name] = o.where(finite, up, o.mul(scale, BACKOFF))
    updates[good.name] = o.where(o.logical_and(finite, o.logical_not(grown)), count, o.sub(good, good))
