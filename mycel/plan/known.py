"""What the blocks of one program do with each axis holds for another with the same blocks, under the same plan: a model
with three layers and one with four differ in how often they call a layer, and in their entries alone.

Nodes of blocks that are equal get the labels they had; the entry is solved for, around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mycel.ir import Block, Layout, Program
from mycel.plan.choices import Label
from mycel.plan.graph import Node
from mycel.plan.preferences import place


@dataclass
class KnownLayouts:
    """Of the blocks of the first of several programs."""

    blocks: dict[str, Block] = field(default_factory=dict)
    labels: Mapping[Node, Mapping[str, Label]] = field(default_factory=dict)
    places: Mapping[Node, Layout] = field(default_factory=dict)

    def learn(
        self, program: Program, labels: Mapping[Node, Mapping[str, Label]], places: Mapping[Node, Layout]
    ) -> None:
        """From the first program that is solved for."""
        if not self.blocks:
            self.blocks = {name: block for name, block in program.blocks.items() if name != program.entry}
            self.labels, self.places = labels, places

    def shared(self, program: Program) -> set[str]:
        """Blocks that a program has as well."""
        return {name for name, block in program.blocks.items() if self.blocks.get(name) == block}

    def value(self, node: Node, axis: str, shared: set[str]) -> Label | int | None:
        """What a node of a shared block does with an axis: of an equation its label, of a value where the axis lies."""
        made_by = node[1] if node[0] == "hub" else node
        if made_by == ("whole",) or made_by[1] not in shared:
            return None
        if node in self.labels:
            return self.labels[node].get(axis)
        return place(self.places[node], axis) if node in self.places else None
