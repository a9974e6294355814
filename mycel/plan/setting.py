"""What a layout solver is asked, and what both ways to answer (`together.py`, `by_axis.py`) read of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mycel.ir import Axes, Layout, Mesh, Type, Var, scan, walk
from mycel.plan.choices import SAME, Choice, Label
from mycel.plan.cost import Costs
from mycel.plan.domains import Price
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.manual_regions import fixed_label, fixed_letters, is_fixed
from mycel.plan.moves import Moves
from mycel.plan.preferences import PREFERRED, Given, Weights


@dataclass
class Setting:
    """A program, what its inputs and moves are, and what counts."""

    graph: Graph
    moves: Moves
    costs: Costs
    price: Price
    given: Given
    gathered: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by axis: inputs whose users see them whole
    reduced: frozenset[str] = frozenset()  # axes along which sums are reduced in every turn of a scan, not at its end
    order: Sequence[str] = ()  # of the axes; of equals the first is split slowest
    by: Weights = PREFERRED
    wide: bool = False  # sums of 16-bit values that are widened are reduced after that
    free: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by axis: inputs whose layouts are looked for
    limit: float | None = None  # bytes that all values made on one rank may take together
    _work: dict[tuple[str, int], float] = field(default_factory=dict)
    _elements: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.moves.mesh

    @functools.cached_property
    def bodies(self) -> set[str]:
        """Blocks that scans run."""
        return {str(e.params["body"]) for _, e in walk(self.graph.program) if e.op is scan}

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Inputs of the entry by name."""
        return {v.name: i for i, v in enumerate(self.graph.program.inputs)}

    def labels(self, node: Node, axis: str, before: Mapping[str, Axes]) -> list[Label]:
        """What a part of an equation can do with one axis, where others have split letters before."""
        options, eqn, own = self.graph.options[node], self.graph.eqns[node], self.graph.own.get(node, frozenset())
        parts = self.graph.parts[node[1], node[2]]
        if is_fixed(eqn, axis):
            label = fixed_label(eqn, options, axis, own)
            return [label if len(parts) == 1 or label.letter in parts[node[3]] else SAME]
        if axis in own:
            return [SAME]
        if eqn.op.sent_as_sum:
            groups = [x for x in options.labels(self.mesh, axis, before) if x.group]
            if axis in eqn.params["axes"]:
                return groups[-1:]  # of all operands that can be
            return [x for x in options.labels(self.mesh, axis, before) if not x.group]
        if len(parts) == 1:
            return options.labels(self.mesh, axis, before)
        return [x for x in options.labels(self.mesh, axis, before, sorted(parts[node[3]])) if not x.group]

    def fraction(self, node: Node) -> float:
        """What one of an equation's independent parts is of the whole, by elements."""
        options, parts = self.graph.options[node], self.graph.parts[node[1], node[2]]
        if len(parts) == 1:
            return 1.0
        assert options.fit is not None
        at, sizes = (node[1], node[2]), options.fit.sizes
        if at not in self._elements:
            self._elements[at] = [math.prod(sizes[k] for k in own) for own in parts]
        return self._elements[at][node[3]] / (sum(self._elements[at]) or 1)

    def work(self, node: Node) -> float:
        """What a part of an equation counts where no axis divides it: its seconds, those of products by their
        weight."""
        eqn, at = self.graph.eqns[node], (node[1], node[2])
        if at not in self._work:
            self._work[at] = self.costs.seconds(eqn) * (self.by.share if eqn.op.product else 1.0)
        return self._work[at] * self.fraction(node)

    def moved_type(self, source: Source, node: Node, operand: int, cut: int) -> Type:
        """The type of a value where it is moved, on the way along an edge."""
        g = self.graph
        if node in g.options:
            return g.options[node].inputs[operand]
        if node in g.ports and source.rows >= cut:
            return g.ports[node]
        return g.ports[source.node] if source.node in g.ports else g.options[source.node].outputs[source.output]

    def wanted(self) -> Iterable[tuple[Source, Type, Layout]]:
        """How outputs of the entry must lie: results whole, state as it was."""
        program = self.graph.program
        n = len(program.results)
        for j, x in enumerate(program.main.outputs):
            source = self.graph.source(program.entry, x)
            if source is not None:
                assert isinstance(x, Var)
                state = self.numbers[program.updates[j - n]] if j >= n else None
                if state is not None and self.is_free(state):
                    continue  # an edge to where it came from
                yield source, x.type, Layout.whole(x.type.ndim) if state is None else self.input_layout(state)

    def is_free(self, i: int) -> bool:
        """Is it looked for how this input of the entry lies?"""
        return any(i in inputs for inputs in self.free.values())

    def input_layout(self, i: int) -> Layout:
        """How an input of the entry is given."""
        return self.given.get(i, Layout.whole(self.graph.program.inputs[i].type.ndim))


@dataclass
class Solution:
    """What an answer does with each node of a graph."""

    letters: dict[Node, dict[str, Axes]]  # of an equation's part: what is split
    flows: dict[Node, dict[str, tuple[int, ...]]]  # by axis: operands whose partial sum passes through
    places: dict[Node, Layout]  # of inputs of blocks, results of branches, shared values

    def choices(self, g: Graph) -> dict[tuple[str, int], Choice]:
        """By block and equation."""
        choices: dict[tuple[str, int], Choice] = {}
        for (name, i), parts in g.parts.items():
            node = ("eqn", name, i, 0)
            if node not in g.eqns:
                continue  # another one stands for it
            letters = {k: axes for p in range(len(parts)) for k, axes in self.letters["eqn", name, i, p].items()}
            letters |= fixed_letters(g.eqns[node], g.options[node], g.own.get(node, frozenset()))
            choices[name, i] = g.options[node].laid(letters, self.flows[node])
        return choices
