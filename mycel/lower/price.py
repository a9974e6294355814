"""What it costs to split an operator in a way that needs messages inside: its equation alone, lowered for that axis,
and its collectives added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mycel.ir import Axes, Block, Eqn, Mesh, Program, Var
from mycel.lower.spmd import spmd
from mycel.plan.choices import Label, Laid, Options
from mycel.plan.links import Links, message
from mycel.plan.moves import Moves

FOUND: dict[Any, tuple[float, float]] = {}  # by equation, label, ranks along the axes and link: layers and plans repeat


@dataclass
class Prices:
    """Seconds of messages by equation, label and axes, (to start them, on the wire); found once for each."""

    links: Links

    def __call__(self, eqn: Eqn, label: Label, axes: Axes) -> tuple[float, float]:
        key = (
            eqn.op.name,
            eqn.input_types,
            eqn.params,
            label,
            tuple((self.links.mesh[a], self.links.of((a,))) for a in axes),
        )
        if key not in FOUND:
            FOUND[key] = self._seconds(eqn, label, axes)
        return FOUND[key]

    def _seconds(self, eqn: Eqn, label: Label, axes: Axes) -> tuple[float, float]:
        mesh = Mesh({a: self.links.mesh[a] for a in axes})
        links = Links(mesh, self.links.other, self.links.named)
        choice = Options.of(eqn).choice(dict.fromkeys(axes, label))
        inputs = tuple(dict.fromkeys(eqn.vars))
        layouts = {
            x: layout
            for x, layout in zip(eqn.inputs, choice.ins, strict=True)
            if isinstance(x, Var) and layout is not None
        }
        laid = Laid(tuple(layouts[v] for v in inputs), (choice,), choice.outs)
        program = spmd(Program({"main": Block(inputs, (eqn,), eqn.outputs)}), {"main": laid}, Moves(links))
        sent = [m for e in program.main.eqns if (m := message(e))[0]]
        start = sum(links.seconds(name, over, 0) for name, over, _ in sent)
        return start, sum(links.seconds(name, over, size) for name, over, size in sent) - start
