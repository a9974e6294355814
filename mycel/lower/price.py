"""What it costs to split an operator in a way that needs messages inside: its equation alone, lowered for that axis, and its collectives added up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mycel.ir import Block, Eqn, Mesh, Program, Var
from mycel.lower.spmd import spmd
from mycel.plan.choices import Label, Laid, Options
from mycel.plan.links import COLLECTIVES, Links
from mycel.plan.moves import Moves


@dataclass
class Prices:
    """Seconds of messages by equation, label and axis; found once for each."""

    links: Links
    _found: dict[Any, float] = field(default_factory=dict)

    def __call__(self, eqn: Eqn, label: Label, axis: str) -> float:
        key = (eqn.op.name, eqn.input_types, eqn.params, label, axis)
        if key not in self._found:
            self._found[key] = self._seconds(eqn, label, axis)
        return self._found[key]

    def _seconds(self, eqn: Eqn, label: Label, axis: str) -> float:
        mesh = Mesh({axis: self.links.mesh[axis]})
        links = Links(mesh, self.links.other, self.links.named)
        choice = Options.of(eqn).choice({axis: label}, mesh)
        inputs = tuple(dict.fromkeys(eqn.vars))
        layouts = {x: layout for x, layout in zip(eqn.inputs, choice.ins, strict=True) if isinstance(x, Var) and layout is not None}
        laid = Laid(tuple(layouts[v] for v in inputs), (choice,), choice.outs)
        program = spmd(Program({"main": Block(inputs, (eqn,), eqn.outputs)}), {"main": laid}, Moves(links))
        sent = [e for e in program.main.eqns if e.op.name in COLLECTIVES]
        return sum(links.seconds(e.op.name, (axis,), sum(v.type.bytes for v in e.vars)) for e in sent)
