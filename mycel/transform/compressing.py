"""Gradients that a plan compresses: marked where they are made, received where they are used, with what compressing
left behind as state of the step.

    d_w = …                        d_w = …
    return loss, d_w               y, r = compressed(d_w, w.error, None, sent, axes=("dp",), codec="int8", of="w")
                        =>         …
                                   z = summed(y)
                                   return loss, z, w.error=r

Along dp, y is a partial sum and z is not: the reduction between the two is what `lower/compress` writes on encoded
bytes.  New inputs, by their roles:

    error of w over dp        ef: what was lost, added to the next gradient.  ef21: this rank's part in what has been
                              received so far; what travels is the difference to it
    outer received of w       ef21: what has been received so far
    counter draws             how many steps have sent: what codecs draw from that round or choose by chance

Errors are kept without the loss scale of half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import Builder, Eqn, Program, Role, Type, Var
from mycel.ops import o
from mycel.ops.codecs import Compression
from mycel.transform.scaling import LOSS_SCALE

DRAWS = Role("counter", "draws")


def compress_gradients(
    program: Program, names: Sequence[str], results: int, chosen: Mapping[str, Compression], axis: str
) -> Program:
    """results[results:] are the gradients of the parameters of these names; those that are `chosen` travel along an
    axis as it says."""
    return _Compressing(program, axis).done(names, results, chosen)


@dataclass
class CompressedSum:
    """A gradient on its way: its dtype, itself as it is sent, its partial sum and what was lost of it; and the inputs
    it has."""

    dtype: torch.dtype
    gradient: Any
    partial: Var
    lost: Var
    error: Var | None
    received: Var | None


class _Compressing:
    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.axis, self.main = program, axis, program.main
        self.b = Builder()
        self.b.inputs = list(self.main.inputs)
        self.b.reserve(v.name for v in (*self.main.inputs, *(v for e in self.main.eqns for v in e.outputs)))
        self.roles = dict(program.roles)
        self.scale = program.by_role().get(LOSS_SCALE)
        self.sent: Var | None = None
        self.updates: dict[str, Any] = {}

    def done(self, names: Sequence[str], results: int, chosen: Mapping[str, Compression]) -> Program:
        main, n = self.main, len(self.program.results)
        made = {v: i for i, e in enumerate(main.eqns) for v in e.outputs}
        outputs, behind, sent = list(main.outputs), dict[int, list[Eqn]](), dict[int, CompressedSum]()
        for at, name in enumerate(names, results):
            g = outputs[at]
            if name not in chosen or not isinstance(g, Var):
                continue
            place = made.get(g, -1)
            if place >= 0:
                self.b.at(main.eqns[place])
            sent[at] = self.begun(name, chosen[name], g, at)
            behind.setdefault(place, []).extend(self.taken())
        self.b.source, self.b.phase = "", "update"
        with self.b:
            for at, message in sent.items():
                outputs[at] = self.ended(message)
            if self.sent is not None:
                self.updates[self.sent.name] = o.add(self.sent, 1)
        eqns = [*behind.get(-1, ()), *(e for i, eqn in enumerate(main.eqns) for e in (eqn, *behind.get(i, ())))]
        block = replace(
            main,
            inputs=tuple(self.b.inputs),
            eqns=(*eqns, *self.taken()),
            outputs=(*outputs[:n], *outputs[n:], *self.updates.values()),
        )
        return replace(
            self.program,
            blocks={**self.program.blocks, self.program.entry: block},
            updates=(*self.program.updates, *self.updates),
            roles=self.roles,
        )

    def taken(self) -> list[Eqn]:
        """What has been written since."""
        eqns, self.b.eqns = self.b.eqns, []
        return eqns

    def begun(self, name: str, how: Compression, g: Var, site: int) -> CompressedSum:
        """Right behind the gradient: what is sent, from there on."""
        wide = torch.promote_types(g.dtype, torch.float32)
        error = received = None
        if how.memory:
            error = self.input(f"{name}.error", Type(wide, g.shape), Role("error", of=name, over=self.axis))
        if how.memory == "ef21":
            received = self.input(f"{name}.received", Type(wide, g.shape), Role("outer", "received", of=name))
        if self.sent is None:
            self.sent = self.input("draws", Type(torch.int64, ()), DRAWS)
        with self.b:
            x = g if g.dtype == wide else o.cast(g, dtype=wide)
            key = o.fold_in(self.sent, data=site) if how.draws else None
            e = self.scaled(error)
            how_sent = {"codec": how.codec, "axes": (self.axis,), "of": name}
            if received is not None:
                partial, lost = o.compressed(o.sub(x, e), None, key, self.sent, **how_sent)
            else:
                partial, lost = o.compressed(x, e, key, self.sent, **how_sent)
        return CompressedSum(g.dtype, x, partial, lost, error, received)

    def ended(self, message: CompressedSum) -> Any:
        """Where it is used: what has come."""
        z = o.summed(message.partial)
        if message.received is not None and message.error is not None:
            z = o.add(self.scaled(message.received), z)
            self.updates[message.received.name] = self.unscaled(z)
            self.updates[message.error.name] = self.unscaled(o.sub(message.gradient, message.lost))
        elif message.error is not None:
            self.updates[message.error.name] = self.unscaled(message.lost)
        return z if z.dtype == message.dtype else o.cast(z, dtype=message.dtype)

    def scaled(self, x: Any) -> Any:
        return x if x is None or self.scale is None else o.mul(x, o.cast(self.scale, dtype=x.dtype))

    def unscaled(self, x: Any) -> Any:
        return x if self.scale is None else o.div(x, o.cast(self.scale, dtype=x.dtype))

    def input(self, name: str, type: Type, role: Role) -> Var:
        var = self.b.input(name, type)
        self.roles[var.name] = role
        return var
