"""Gradients that a plan compresses: marked where they are made, received where they are used, with what compressing
left behind as state of the step.

    d_w = …                        d_w = …
    return loss, d_w               y, r = compressed(d_w, w.error, None, sent, axes=("dp",), codec="int8", of="w")
                        =>         …
                                   z = summed(y)
                                   return loss, z, w.error=r

Along dp, y is a partial sum and z is not: the reduction between the two is what `lower/compress` writes on encoded
bytes.  A gradient that is there when the step begins (`delaying.py`) is received where backward begins: the first half
of its sum travels during forward, the second during backward.  New inputs, by their roles:

    error of w over dp        ef: what was lost, added to the next gradient.  ef21: this rank's part in what has been
                              received so far; what travels is the difference to it
                              loco: a moving average of what was lost, in 8 bits
    outer received of w       ef21: what has been received so far
    velocity of w over dp     dgc: this rank's momentum, of what it has not sent; what travels is momentum
    state exp_avg of w        adam: the optimiser's own.  What travels is Adam's momentum, of which each rank adds a
                              share to its gradient, and what comes is the new one: the update that follows has a frozen
                              variance (`frozen_groups`)
    counter draws             how many steps have sent: what codecs draw from that round or choose by chance, and when
                              checksums of what was sent and has come are compared

Errors are kept without the loss scale of half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import Builder, Eqn, Program, Role, Type, Var
from mycel.ops import o
from mycel.ops.codec_kernels import EIGHT_BITS, EIGHT_BITS_SCALE
from mycel.ops.codecs import Compression
from mycel.transform.optimise import SCALAR, ParameterGroup
from mycel.transform.scaling import LOSS_SCALE

DRAWS = Role("counter", "draws")


def compress_gradients(
    program: Program,
    groups: Sequence[ParameterGroup],
    results: int,
    chosen: Mapping[str, Compression],
    axis: str,
) -> Program:
    """results[results:] are the gradients of the groups' parameters; those that are `chosen` travel along an axis as it
    says."""
    return _Compressing(program, axis).done(groups, results, chosen)


def frozen_groups(
    program: Program, groups: Sequence[ParameterGroup], results: int, chosen: Mapping[str, Compression]
) -> tuple[Program, list[ParameterGroup]]:
    """Parameters whose momentum has come instead of a gradient, in groups of their own, updated with the variance that
    Adam has of them; results in the order of these groups."""
    frozen = {name for name, how in chosen.items() if how.memory == "adam"}
    if not frozen:
        return program, list(groups)
    split = []
    for group in groups:
        kinds = {group.kind: [n for n in group.params if n not in frozen], "frozen_adam": []}
        kinds["frozen_adam"] += [n for n in group.params if n in frozen]
        flags = tuple((name, value) for name, value in group.flags if name != "amsgrad")
        split += [
            replace(group, kind=kind, params=tuple(names), flags=group.flags if kind == group.kind else flags)
            for kind, names in kinds.items()
            if names
        ]
    before, n = [name for group in groups for name in group.params], len(program.results)
    outputs = program.main.outputs
    gradients = dict(zip(before, outputs[results:n], strict=True))
    ordered = [gradients[name] for group in split for name in group.params]
    block = replace(program.main, outputs=(*outputs[:results], *ordered, *outputs[n:]))
    return replace(program, blocks={**program.blocks, program.entry: block}), split


def count_messages(program: Program) -> Program:
    """The step with the number of steps that have sent something, by which messages are looked at now and then."""
    if DRAWS in program.by_role():
        return program
    main = program.main
    b = Builder.after(main, phase="update")
    sent = b.input("draws", Type(torch.int64, ()))
    with b:
        more = o.add(sent, 1)
    block = replace(main, inputs=tuple(b.inputs), eqns=tuple(b.eqns), outputs=(*main.outputs, more))
    return replace(
        program,
        blocks={**program.blocks, program.entry: block},
        updates=(*program.updates, sent.name),
        roles={**program.roles, sent.name: DRAWS},
    )


@dataclass
class CompressedSum:
    """A gradient on its way: how it travels, its dtype, itself as it is sent, its partial sum and what was lost of it;
    and the inputs it has."""

    how: Compression
    dtype: torch.dtype
    gradient: Any
    partial: Var
    lost: Var
    error: Var | None
    kept: Var | None  # what has been received, or velocity
    remembered: Any  # of `error`, as numbers of the gradient's dtype
    site: int  # between messages, for what they draw


class _Compressing:
    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.axis, self.main = program, axis, program.main
        self.b = Builder(names_of=self.main)
        self.b.inputs = list(self.main.inputs)
        self.roles = dict(program.roles)
        self.scale = program.by_role().get(LOSS_SCALE)
        self.sent: Var | None = None
        self.updates: dict[str, Any] = {}

    def done(self, groups: Sequence[ParameterGroup], results: int, chosen: Mapping[str, Compression]) -> Program:
        main, n = self.main, len(self.program.results)
        names = [name for group in groups for name in group.params]
        self.group_of = {name: group.name for group in groups for name in group.params}
        makers = {v: i for i, e in enumerate(main.eqns) for v in e.outputs}
        outputs, behind, sent = list(main.outputs), dict[int, list[Eqn]](), dict[int, CompressedSum]()
        turn = next((i for i, e in enumerate(main.eqns) if e.phase == "backward"), len(main.eqns))
        early = list[int]()  # there before backward begins
        for at, name in enumerate(names, results):
            g = outputs[at]
            if name not in chosen or not isinstance(g, Var):
                continue
            place = makers.get(g, -1)
            if place >= 0:
                self.b.at(main.eqns[place])
            if place < turn:
                early.append(at)
            sent[at] = self.begun(name, chosen[name], g, at)
            behind.setdefault(place, []).extend(self._flushed())
        self.b.source, self.b.phase = "", "update"
        with self.b:
            sums = {at: o.summed(sent[at].partial) for at in early}
            behind.setdefault(turn - 1, []).extend(self._flushed())
            for at, message in sent.items():
                outputs[at] = self.ended(message, sums[at] if at in sums else o.summed(message.partial))
            if self.sent is not None:
                self.updates[self.sent.name] = o.add(self.sent, 1)
        eqns = [*behind.get(-1, ()), *(e for i, eqn in enumerate(main.eqns) for e in (eqn, *behind.get(i, ())))]
        block = replace(
            main,
            inputs=tuple(self.b.inputs),
            eqns=(*eqns, *self._flushed()),
            outputs=(*outputs[:n], *outputs[n:], *self.updates.values()),
        )
        return replace(
            self.program,
            blocks={**self.program.blocks, self.program.entry: block},
            updates=(*self.program.updates, *self.updates),
            roles=self.roles,
        )

    def _flushed(self) -> list[Eqn]:
        """What has been written since."""
        eqns, self.b.eqns = self.b.eqns, []
        return eqns

    def begun(self, name: str, how: Compression, g: Var, site: int) -> CompressedSum:
        """Right behind the gradient: what is sent, from there on."""
        wide = torch.promote_types(g.dtype, torch.float32)
        error = kept = more = None
        if how.memory:
            kind = EIGHT_BITS if how.memory == "loco" else wide
            error = self.input(f"{name}.error", Type(kind, g.shape), Role("error", of=name, over=self.axis))
        if how.memory == "ef21":
            kept = self.input(f"{name}.received", Type(wide, g.shape), Role("outer", "received", of=name))
        elif how.memory == "dgc":
            kept = self.input(f"{name}.velocity", Type(wide, g.shape), Role("velocity", of=name, over=self.axis))
        if self.sent is None:
            self.sent = self.input("draws", Type(torch.int64, ()), DRAWS)
        with self.b:
            x = g if g.dtype == wide else o.cast(g, dtype=wide)
            key = o.fold_in(self.sent, data=site) if how.draws else None
            remembered = error
            if how.memory == "loco":
                remembered = o.mul(o.cast(error, dtype=wide), 1 / EIGHT_BITS_SCALE)
            e = self.scaled(remembered)
            if how.memory == "ef21":
                given, e = o.sub(x, e), None
            elif how.memory == "dgc":
                given = x = o.add(o.mul(self.scaled(kept), how.rate), x)
            elif how.memory == "adam":
                given, more = self.momentum(name, x)
            else:
                given = x
            also = () if more is None else (more,)
            sent_as = {"codec": how.codec, "axes": (self.axis,), "of": name}
            partial, lost = o.compressed(given, e, key, self.sent, *also, **sent_as)
        return CompressedSum(how, g.dtype, x, partial, lost, error, kept, remembered, site)

    def momentum(self, name: str, g: Any) -> tuple[Any, Any]:
        """(1 - b1) g, of which each rank has its own, and b1 m, which all have."""
        role = Role("state", "exp_avg", of=name)
        of = self.program.by_role()[Role("parameter", name)]
        m = self.input(f"{name}.exp_avg", of.type, role)
        rate = Role("hyper", "beta1", of=self.group_of[name])
        beta = next((v for v in self.b.inputs if self.roles.get(v.name) == rate), None)
        beta = o.cast(beta if beta is not None else self.input("beta1", SCALAR, rate), dtype=g.dtype)
        m = m if m.dtype == g.dtype else o.cast(m, dtype=g.dtype)
        return o.mul(g, o.sub(1.0, beta)), self.scaled(o.mul(m, beta))

    def ended(self, message: CompressedSum, z: Any) -> Any:
        """Where it is used: what has come."""
        error, kept, lost = message.error, message.kept, message.lost
        if error is not None:
            match message.how.memory:
                case "ef21":
                    assert kept is not None
                    z = o.add(self.scaled(kept), z)
                    self.updates[kept.name] = self.unscaled(z)
                    lost = o.sub(message.gradient, lost)
                case "dgc":
                    assert kept is not None
                    given = o.add(message.gradient, self.scaled(message.remembered))
                    velocity = o.unsent(message.gradient, given, lost, axes=(self.axis,))
                    self.updates[kept.name] = self.unscaled(velocity)
            new = self.unscaled(lost)
            if message.how.memory == "loco":
                how = {"axes": (self.axis,), "share": message.how.rate}
                assert self.sent is not None
                new = o.averaged_error(message.remembered, new, o.fold_in(self.sent, data=~message.site), **how)
            self.updates[error.name] = new
        return z if z.dtype == message.dtype else o.cast(z, dtype=message.dtype)

    def scaled(self, x: Any) -> Any:
        return x if x is None or self.scale is None else o.mul(x, o.cast(self.scale, dtype=x.dtype))

    def unscaled(self, x: Any) -> Any:
        return x if self.scale is None else o.div(x, o.cast(self.scale, dtype=x.dtype))

    def input(self, name: str, type: Type, role: Role) -> Var:
        var = self.b.input(name, type)
        self.roles[var.name] = role
        return var
