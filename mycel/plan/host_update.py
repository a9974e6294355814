"""Parameters that are updated on the host, where their optimiser state lives.

    p', m', v' = adam(p, m, v, g, …)      m, v lie on the host, g goes there once it is made.  p lies there, too:
                                          nothing comes back, and the next step has p' brought as any parameter that
                                          lives there.  Or p is the part of a parameter that a rank updates (ZeRO 1 and
                                          2): it goes there with g, and p' comes back to be gathered

So state does not move.  What it costs is the host's memory: each byte that is read or written, at `Hardware.update_s`
(torch's fused kernels on all cores reach what memory gives), on a stream of its own.  Updates of parameters that live
on the host are the last of a step's equations, beside what the device does next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mycel.ir import Eqn, Program, Var, chains
from mycel.plan.hardware import Hardware
from mycel.plan.offload import Absence


@dataclass(frozen=True)
class HostUpdate:
    """One parameter of an update in the entry, or a part of it, its state (scalars among it) and its gradient."""

    parameter: Var
    state: tuple[Var, ...]
    gradient: Var

    @property
    def bytes(self) -> int:
        """What the host reads and writes for it."""
        return 2 * (self.parameter.type.bytes + sum(v.type.bytes for v in self.state)) + self.gradient.type.bytes

    def seconds(self, hardware: Hardware) -> float:
        return hardware.update_s(self.bytes, self.parameter.type.dtype)


def host_updates(program: Program, parameters: Collection[str]) -> list[HostUpdate]:
    """What may be updated on the host: with state that is an input which the update replaces; and of these parameters,
    which live on the host, or of a part that was made of one."""
    block, uses = program.main, chains(program.main)
    new = dict(zip(program.updates, block.outputs[len(block.outputs) - len(program.updates) :], strict=True))
    inputs = set(block.inputs)
    updates = []
    for eqn in block.eqns:
        if not eqn.op.hosted or eqn.op.inplace is None or "count" not in eqn.params:
            continue
        for i in range(eqn.params["count"]):
            own, results, gradient = column(eqn, i)
            replaced = [x in inputs and new.get(x.name) == y for x, y in zip(own, results, strict=True)]
            read = any(uses[y].uses for y in results[1:]) or any(len(uses[x].uses) > 1 for x in own[1:])
            lives = replaced[0] and not uses[results[0]].uses and own[0].name in parameters
            if all(replaced[1:]) and not read and uses[gradient].defined >= 0 and own[1:]:
                updates += [HostUpdate(own[0], tuple(own[1:]), gradient)] if lives or own[0] not in inputs else []
    return updates


def needed_last(program: Program, updates: Sequence[HostUpdate], share: float) -> list[HostUpdate]:
    """Of these so many as have this share of their bytes: those whose parameters the next step needs last, for which
    the host has longest."""
    uses, room = chains(program.main), share * sum(update.bytes for update in updates)
    mine = set[str]()
    for update in sorted(updates, key=lambda update: uses[update.parameter].uses[0], reverse=True):
        room -= update.bytes
        if room >= 0:
            mine.add(update.parameter.name)
    return [update for update in updates if update.parameter.name in mine]


def column(eqn: Eqn, i: int) -> tuple[list[Var], list[Var], Var]:
    """Of the i-th parameter of an update: itself and its state, what replaces them, and its gradient."""
    count, old = eqn.params["count"], len(eqn.outputs)
    gradient = eqn.inputs[old + i]
    assert isinstance(gradient, Var)
    own = [x for x in eqn.inputs[i:old:count] if isinstance(x, Var)]
    return own, list(eqn.outputs[i::count]), gradient


def leaving_gradients(program: Program, updates: Iterable[HostUpdate]) -> list[Absence]:
    """Gradients of these, which leave once nobody but the update reads them any more, and do not come back."""
    uses, end = chains(program.main), len(program.main.eqns)
    gradients = dict.fromkeys(update.gradient for update in updates)
    read = {g: [i for i in uses[g].uses if not _is_update(program.main.eqns[i])] for g in gradients}
    return [Absence(g, uses[g].defined, max([uses[g].defined, *read[g]]), end, "gradients") for g in gradients]


def _is_update(eqn: Eqn) -> bool:
    return eqn.op.hosted and eqn.op.inplace is not None
