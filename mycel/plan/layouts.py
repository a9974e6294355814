"""Layouts for a whole program, from those of its inputs: for one axis of the mesh after another, the labels that cost least together.

    variables   for each equation, in each distinct block once: what it does with the axis (`Label`: splits a letter, lets a sum through, neither)
                for each input of a block: where the axis lies (whole, split along a dim, a sum owed)
    objective   seconds of computing, as often as a block is run, + seconds of moving each value from how it is made to how it is used
    fixed       what the plan gives: inputs of the entry, `shard` equations; state must come out as it went in, results whole

All calls of a block have the same layouts: a layer is solved once, with the edge from its output to its own input among the costs.  Axes later in the
order see parts that the earlier ones made.  The sum is solved by elimination (`least.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycel.ir import Atom, Axes, Eqn, Layout, Mesh, Type, Var, cond, loop, order, part, scan, walk
from mycel.plan.choices import OWED, SAME, WHOLE, Choice, Label, Laid, Layouts, Options
from mycel.plan.cost import Costs
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.least import Sum
from mycel.plan.links import Links
from mycel.plan.meant import Given, made_of, norm_labels, place, updates, weights
from mycel.plan.region import fixed_label, fixed_letters, is_fixed

SHARE = 1e4  # products count so much that they are shared before anything else is saved
NEVER = float("inf")

Price = Callable[[Eqn, Label, str], float]


@dataclass
class Solver:
    """Labels and places, axis by axis."""

    graph: Graph
    links: Links
    costs: Costs
    price: Price
    given: Given
    gathered: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by axis: inputs whose users see them whole along it
    reduced: frozenset[str] = frozenset()  # axes along which sums are paid in every turn of a scan, not owed until its end
    order: Sequence[str] = ()  # of the axes; the first split slowest
    share: float = SHARE
    labels: dict[Node, dict[str, Label]] = field(default_factory=dict)
    places: dict[Node, Layout] = field(default_factory=dict)
    exact: bool = True
    bodies: set[str] = field(default_factory=set)
    swapped: dict[tuple[Node, str], Axes] = field(default_factory=dict)
    _inputs: dict[str, int] = field(default_factory=dict)
    _moving: dict[Any, float] = field(default_factory=dict)
    _computing: dict[tuple[str, int], float] = field(default_factory=dict)
    _elements: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.links.mesh

    def solve(self) -> Layouts:
        g = self.graph
        self._inputs = {v.name: i for i, v in enumerate(g.program.inputs)}
        self.bodies = {str(e.params["body"]) for _, e in walk(g.program) if e.op is scan}
        self.labels = {node: {} for node in g.options}
        self.places = {node: Layout.whole(t.ndim) for node, t in g.ports.items()}
        for axis in self.order or slowest_first(self.mesh.axes, self.given.values()):
            self._axis(axis)
        self._reorder()
        return self._laid()

    def _reorder(self) -> None:
        """Where several axes split a dim of a parameter, or of what is made of it alone or updates it: in the order in which it is held."""
        g = self.graph
        several = {i: [dim for dim in layout.dims if len(dim) > 1] for i, layout in self.given.items()}
        orders = {frozenset(dim): dim for dims in several.values() for dim in dims}
        if not orders:
            return
        held = made_of(g, (i for i, dims in several.items() if dims))
        for source, node, operand, _ in g.edges:
            if node in g.options and (source in held or g.eqns[node].op.name == "global_norm"):
                fit = g.options[node].fit
                mine = {k for dim in (fit.ins[operand] or () if fit is not None else ()) for k in dim}
                for letter, axes in self.letters(node).items():
                    if letter in mine and frozenset(axes) in orders:
                        self.swapped[node, letter] = orders[frozenset(axes)]
        for node in {s.node for s in held} & self.places.keys():
            layout = self.places[node]
            self.places[node] = Layout(tuple(orders.get(frozenset(dim), dim) for dim in layout.dims), layout.owed)

    def letters(self, node: Node) -> dict[str, Axes]:
        """What the axes so far have split of an equation's part."""
        found: dict[str, Axes] = {}
        for axis, label in self.labels[node].items():
            found.update((k, (*found.get(k, ()), axis)) for k in label.letter.split())
        return {k: self.swapped.get((node, k), axes) for k, axes in found.items()} if self.swapped else found

    def _axis(self, axis: str) -> None:
        g, k = self.graph, self.mesh[axis]
        if k == 1:
            for labels in self.labels.values():
                labels[axis] = SAME
            return
        problem = Sum()
        domains: dict[Node, list[Any]] = {("whole",): [WHOLE]}
        before = {node: self.letters(node) for node in self.labels}
        for node in g.options:
            domains[node] = self._labels(node, axis, before[node])
        for node, label in norm_labels(g, self.given, axis).items():  # the size of gradients is taken of them as they are updated
            domains[node] = [label] if label in domains[node] else domains[node]
        for node, t in g.ports.items():
            domains[node] = self._places(node, t, axis)
        lies = {node: self._lies(node, domain, axis) for node, domain in domains.items()}
        sizes: dict[Source, float] = {}
        problem.sizes = {node: len(domain) for node, domain in domains.items()}
        for node, domain in domains.items():
            if len(domain) > 1:
                problem.add((node,), self._work(node, domain, axis, before.get(node, {})))
        derived = made_of(g, self.gathered.get(axis, ()))  # parameters gathered along this axis
        hidden = weights(g, self.given, axis, derived)
        for (source, node, operand, cut), times in g.edges.items():
            often = times * hidden.get((source, node), 1.0)
            if source not in sizes:
                sizes[source] = self._bytes(source)
            shift = source.rows - cut
            have = [_shifted(x.get(source.output, WHOLE), shift) for x in lies[source.node][1]]
            want = [x.get(operand, WHOLE) for x in lies[node][0]]
            table = np.array([[NEVER if h is None else often * self.moving(h, w, sizes[source], axis) for w in want] for h in have])
            if (
                source in derived
                and node in g.options
                and len([x for x in g.options[node].inputs if isinstance(x, Type)]) > 1
                and not updates(g.eqns[node])
            ):
                table[:, [b for b, w in enumerate(want) if w >= 0]] = NEVER
            if source.node == node:
                problem.add((node,), np.diagonal(table))
            else:
                problem.add((source.node, node), table)
        for source, target in self._wanted(axis):
            made = [_shifted(x.get(source.output, WHOLE), source.rows) for x in lies[source.node][1]]
            problem.add((source.node,), [NEVER if h is None else self.moving(h, target, self._bytes(source), axis) for h in made])
        chosen, exact = problem.least()
        self.exact &= exact
        for node, domain in domains.items():
            value = domain[chosen[node]]
            if node in g.options:
                self.labels[node][axis] = value
            elif node in self.places:
                self.places[node] = _put(self.places[node], value, axis)

    # -- what a node can do, and how its operands and results then lie -----------------------------------------------

    def _labels(self, node: Node, axis: str, before: Mapping[str, Axes]) -> list[Label]:
        options, eqn = self.graph.options[node], self.graph.eqns[node]
        parts = self.graph.parts[node[1], node[2]]
        if is_fixed(eqn, axis):
            label = fixed_label(eqn, options, axis, self.graph.own.get(node, frozenset()))
            return [label if len(parts) == 1 or label.letter in parts[node[3]] else SAME]
        if axis in self.graph.own.get(node, ()):
            return [SAME]
        if len(parts) == 1:
            return options.labels(self.mesh, axis, before)
        return [x for x in options.labels(self.mesh, axis, before, sorted(parts[node[3]])) if not x.group]

    def _places(self, node: Node, t: Type, axis: str) -> list[int]:
        if node[:2] == ("in", self.graph.program.entry):
            return [place(self.given.get(node[2], Layout.whole(t.ndim)), axis)]
        if t.depth or axis in self.graph.own.get(node, ()):
            return [WHOLE]
        waits = axis in self.reduced and node[1] in self.bodies
        owed = [OWED["+"]] if t.dtype.is_floating_point and not waits else []
        return [WHOLE, *(d for d, n in enumerate(t.shape) if n > 1), *owed]

    def _lies(self, node: Node, domain: Sequence[Any], axis: str) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """For each value of a node: where the axis lies in its operands, and in its results."""
        if node not in self.graph.options:
            return [{0: x} for x in domain], [{0: x} for x in domain]
        found = [self.graph.options[node].places(x, axis) for x in domain]
        return [ins for ins, _ in found], [outs for _, outs in found]

    # -- costs -------------------------------------------------------------------------------------------------------

    def _work(self, node: Node, domain: Sequence[Any], axis: str, before: Mapping[str, Axes]) -> list[float]:
        """Seconds that a node takes by itself, for each of its values."""
        g = self.graph
        if node not in g.options:
            return [1e-12 if value == OWED["+"] else 1e-9 * (value >= 0) for value in domain]  # of equals: gathered outside, where it can begin early
        eqn = g.eqns[node]
        at = node[1], node[2]
        if at not in self._computing:
            self._computing[at] = self.costs.seconds(eqn)
        seconds = self._computing[at] * self._fraction(node)
        seconds *= self.share if eqn.op.product else 1.0
        for letter, axes in before.items():
            seconds *= _share(g.options[node], letter, axes, self.mesh)
        return [g.runs[node[1]] * self._seconds(node, seconds, value, axis, before) for value in domain]

    def _fraction(self, node: Node) -> float:
        """What one of an equation's independent parts is of the whole, by elements."""
        options, parts = self.graph.options[node], self.graph.parts[node[1], node[2]]
        if len(parts) == 1:
            return 1.0
        assert options.fit is not None
        at, sizes = (node[1], node[2]), options.fit.sizes
        if at not in self._elements:
            self._elements[at] = [math.prod(sizes[k] for k in own) for own in parts]
        return self._elements[at][node[3]] / sum(self._elements[at])

    def _seconds(self, node: Node, seconds: float, value: Label, axis: str, before: Mapping[str, Axes]) -> float:
        """What is left of an equation's seconds under a label, and what its messages take."""
        if not value.letter:
            return seconds
        options, letters = self.graph.options[node], dict.fromkeys(value.letter.split(), (axis,))
        first = next(iter(letters))  # letters split together by a rule: every rank goes through all of the others
        axes = before.get(first, ())
        seconds *= _share(options, first, (*axes, axis), self.mesh) / _share(options, first, axes, self.mesh)
        is_plain = all(k in options.plain and options.rule(letters, k) is None for k in letters)
        return seconds if is_plain else seconds + self.price(self.graph.eqns[node], value, axis)

    def moving(self, have: int, want: int, size: float, axis: str) -> float:
        """Seconds from one place of an axis to another, for a tensor of `size` bytes where the axis is whole."""
        if have == want:
            return 0.0
        key = (have if have < 0 else 0, want if want < 0 else 0, size, axis)
        found = self._moving.get(key)
        if found is None:
            found = self._moving[key] = self._moved(have, want, size, axis)
        return found

    def _moved(self, have: int, want: int, size: float, axis: str) -> float:
        k = self.mesh[axis]
        if have in OWED.values():
            if want >= 0:
                return self.links.seconds("reduce_scatter", (axis,), size)
            return self.links.seconds("all_reduce", (axis,), size) if want == WHOLE else NEVER
        if have == WHOLE:
            return 1e-9 + size / k / self.costs.hardware.bytes_s if want >= 0 else 1e-7
        if want >= 0:
            return self.links.seconds("all_to_all", (axis,), size / k)
        return self.links.seconds("all_gather", (axis,), size / k) if want == WHOLE else NEVER

    def _bytes(self, source: Source) -> float:
        """What a rank holds of a value along the axes so far."""
        g = self.graph
        if source.node in g.ports:
            t, layout = g.ports[source.node], self.places[source.node]
        elif source.node in g.options:
            t, letters = g.options[source.node].outputs[source.output], self.letters(source.node)
            item = g.options[source.node].fit.outs[source.output] if letters else ((),) * t.ndim  # type: ignore[union-attr]
            layout = Layout(tuple(next((letters[k] for k in dim if k in letters), ()) for dim in item))
        else:
            return 8.0
        return float(layout.local(t, self.mesh).bytes)

    def _wanted(self, axis: str) -> Iterable[tuple[Source, int]]:
        """How outputs of the entry must lie: results whole, state as it was."""
        program = self.graph.program
        at = {v.name: i for i, v in enumerate(program.inputs)}
        n = len(program.results)
        for j, x in enumerate(program.main.outputs):
            found = self.graph.source(program.entry, x)
            if found is not None:
                layout = self._given(at[program.updates[j - n]]) if j >= n else None
                yield found, WHOLE if layout is None else place(layout, axis)

    def _given(self, i: int) -> Layout:
        return self.given.get(i, Layout.whole(self.graph.program.inputs[i].type.ndim))

    # -- all axes together -------------------------------------------------------------------------------------------

    def _laid(self) -> Layouts:
        g = self.graph
        laid: dict[str, Laid] = {}
        choices: dict[tuple[str, int], Choice] = {}
        for (name, i), parts in g.parts.items():
            node = ("eqn", name, i, 0)
            flows = {axis: label.group for axis, label in self.labels[node].items() if label.group}
            letters = {k: axes for p in range(len(parts)) for k, axes in self.letters(("eqn", name, i, p)).items()}
            letters |= fixed_letters(g.eqns[node], g.options[node], g.own.get(node, frozenset()))
            choices[name, i] = g.options[node].laid(letters, flows)
        for name in order(g.program):
            block = g.program.blocks[name]
            inputs = [self._entry_layout(name, i, self.places[g.port(name, i)]) for i in range(len(block.inputs))]
            made = [choices.get((name, i)) for i in range(len(block.eqns))]
            laid[name] = Laid(tuple(inputs), tuple(made), tuple(self._output(name, j, x, choices) for j, x in enumerate(block.outputs)))
        return laid

    def _entry_layout(self, name: str, i: int, found: Layout) -> Layout:
        return self._given(i) if name == self.graph.program.entry else found

    def _output(self, name: str, j: int, x: Atom, choices: Mapping[tuple[str, int], Choice]) -> Layout:
        g = self.graph
        program = g.program
        if name == program.entry:
            n = len(program.results)
            if j >= n:
                return self._given(self._inputs[program.updates[j - n]])
            return Layout.whole(x.type.ndim if isinstance(x, Var) else 0)
        held = self._held(name, j)
        if held is not None:
            return self.places.get(held, Layout())
        found = g.source(name, x)
        return self.layout_of(found, choices) if found is not None else Layout(())

    def _held(self, name: str, j: int) -> Node | None:
        """The node that fixes an output of a branch or a loop's body."""
        for _, eqn in walk(self.graph.program):
            p = eqn.params
            if eqn.op is cond and name in (p["then"], p["orelse"]):
                return ("out", p["then"], j)
            if eqn.op in (loop, scan) and name == p["body"]:
                n = p.get("consts", 0)
                count = p.get("carry", 0) if eqn.op is scan else len(eqn.outputs)
                return self.graph.port(name, n + j) if j < count else None
            if eqn.op is loop and name == p["test"]:
                return ("whole",)
        return None

    def layout_of(self, source: Source, choices: Mapping[tuple[str, int], Choice]) -> Layout:
        node = source.node
        if node in self.places:
            layout = self.places[node]
        elif node == ("whole",):
            return Layout(())
        else:
            layout = choices[node[1], node[2]].outs[source.output]
        return Layout(((),) * source.rows + layout.dims, layout.owed)


def _put(layout: Layout, where: int, axis: str) -> Layout:
    if where >= 0:
        return layout.split(where, axis)
    kind = next((k for k, n in OWED.items() if n == where), "")
    return layout.owing(axis, kind) if kind else layout


def _shifted(where: int, rows: int) -> int | None:
    """A place seen through leading dims that a scan put on (or took off: None if it lies there)."""
    if where < 0 or rows == 0:
        return where
    return where + rows if where + rows >= 0 else None


def _share(options: Options, letter: str, axes: Axes, mesh: Mesh) -> float:
    """The part of the work that is left when a letter is split."""
    assert options.fit is not None
    n = options.fit.sizes[letter]
    return part(n, axes, mesh) / n


def slowest_first(axes: Sequence[str], layouts: Iterable[Layout]) -> list[str]:
    """Axes in an order in which those before others on a dim come first, as far as the layouts agree."""
    before = {(a, b) for x in layouts for dim in x.dims for i, b in enumerate(dim) for a in dim[:i]}
    left, found = list(axes), []
    while left:
        found.append(next((b for b in left if not any((a, b) in before for a in left)), left[0]))
        left.remove(found[-1])
    return found
