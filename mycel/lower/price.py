"""What it costs to split an operator in a way that needs messages inside: its equation alone, lowered for that axis, and its collectives added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mycel.ir import Block, Eqn, Mesh, Program, Var
from mycel.lower.spmd import spmd
from mycel.plan.choices import Label, Laid, Options
from mycel.plan.links import Links, message
from mycel.plan.moves import Moves

FOUND: dict[Any, float] = {}  # by equation, label, ranks along the axis and link: layers and plans repeat


@dataclass
class Prices:
    """Seconds of messages by equation, label and axis; found once for each."""

    links: Links

    def __call__(self, eqn: Eqn, label: Label, axis: str) -> float:
        link = self.links.of((axis,))
        key = (eqn.op.name, eqn.input_types, eqn.params, label, self.links.mesh[axis], link)
        if key not in FOUND:
            FOUND[key] = self._seconds(eqn, label, axis)
        return FOUND[key]

    def _seconds(self, eqn: Eqn, label: Label, axis: str) -> float:
        mesh = Mesh({axis: self.links.mesh[axis]})
        links = Links(mesh, self.links.other, self.links.named)
        choice = Options.of(eqn).choice({axis: label}, mesh)
        inputs = tuple(dict.fromkeys(eqn.vars))
        layouts = {x: layout for x, layout in zip(eqn.inputs, choice.ins, strict=True) if isinstance(x, Var) and layout is not None}
        laid = Laid(tuple(layouts[v] for v in inputs), (choice,), choice.outs)
        program = spmd(Program({"main": Block(inputs, (eqn,), eqn.outputs)}), {"main": laid}, Moves(links))
        return sum(links.seconds(*message(e)) for e in program.main.eqns)
