"""Layouts for one axis of the mesh after another: later axes see the parts that the earlier ones left.

    variables   for each equation: what it does with the axis; for each input and shared value: where the axis lies
    objective   seconds of computing, and of moving each value from how it is made to how it is used, along this axis

For programs that are too large to be solved for all axes together (`together.py`).  The answer is good, not proved.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycel.ir import Axes, Layout, Mesh, Type, part
from mycel.ops import o
from mycel.plan import pairs
from mycel.plan.choices import PARTIAL, WHOLE, Label, Options
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.known import KnownLayouts
from mycel.plan.least import Sum, Table
from mycel.plan.preferences import made_of, norm_labels, place, updates, weights
from mycel.plan.setting import Setting, Solution

NEVER = float("inf")


@dataclass
class ByAxis:
    """Labels and places, axis by axis, the first split slowest."""

    setting: Setting
    axes: Sequence[str]
    known: KnownLayouts | None = None
    labels: dict[Node, dict[str, Label]] = field(default_factory=dict)
    places: dict[Node, Layout] = field(default_factory=dict)
    swapped: dict[tuple[Node, str], Axes] = field(default_factory=dict)
    _moving: dict[Any, float] = field(default_factory=dict)
    _tables: dict[Any, Table] = field(default_factory=dict)

    @functools.cached_property
    def _shared(self) -> set[str]:
        """Blocks of which it is known what they do."""
        return self.known.shared(self.graph.program) if self.known is not None else set()

    @property
    def graph(self) -> Graph:
        return self.setting.graph

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh

    def solve(self) -> Solution:
        g = self.graph
        self.labels = {node: {} for node in g.options}
        self.places = {node: Layout.whole(t.ndim) for node, t in g.ports.items()}
        for axis in self.axes:
            self._axis(axis)
        self._reorder()
        flows = {node: {a: x.group for a, x in labels.items() if x.group} for node, labels in self.labels.items()}
        return Solution({node: self.letters(node) for node in g.options}, flows, self.places)

    def _reorder(self) -> None:
        """Where several axes split a dim of a parameter, or of what is made of it alone or updates it: as it is
        held."""
        g = self.graph
        several = {i: [dim for dim in layout.dims if len(dim) > 1] for i, layout in self.setting.given.items()}
        orders = {frozenset(dim): dim for dims in several.values() for dim in dims}
        if not orders:
            return
        held = made_of(g, (i for i, dims in several.items() if dims))
        for source, node, operand, _ in g.edges:
            if node in g.options and (source in held or g.eqns[node].op is o.global_norm):
                fit = g.options[node].fit
                mine = {k for dim in (fit.ins[operand] or () if fit is not None else ()) for k in dim}
                for letter, axes in self.letters(node).items():
                    if letter in mine and frozenset(axes) in orders:
                        self.swapped[node, letter] = orders[frozenset(axes)]
        for node in {s.node for s in held} & self.places.keys():
            layout = self.places[node]
            self.places[node] = Layout(tuple(orders.get(frozenset(dim), dim) for dim in layout.dims), layout.partial)

    def letters(self, node: Node) -> dict[str, Axes]:
        """What the axes so far have split of an equation's part."""
        split: dict[str, Axes] = {}
        for axis, label in self.labels[node].items():
            split.update((k, (*split.get(k, ()), axis)) for k in label.letter.split())
        return {k: self.swapped.get((node, k), axes) for k, axes in split.items()} if self.swapped else split

    def _axis(self, axis: str) -> None:
        g = self.graph
        problem = Sum()
        domains: dict[Node, list[Any]] = {("whole",): [WHOLE]}
        before = {node: self.letters(node) for node in self.labels}
        for node in g.options:
            domains[node] = self.setting.labels(node, axis, before[node])
        # of gradients as they are updated
        for node, label in norm_labels(g, self.setting.given, axis, self.setting.free.get(axis, ())).items():
            domains[node] = [label] if label in domains[node] else domains[node]
        for node, t in g.ports.items():
            domains[node] = self._places(node, t, axis)
        if self.known is not None:
            for node, domain in domains.items():
                value = self.known.value(node, axis, self._shared)
                domains[node] = [value] if value in domain else domain
        lies = {node: self._lies(node, domain) for node, domain in domains.items()}
        sizes: dict[Source, float] = {}
        problem.sizes = {node: len(domain) for node, domain in domains.items()}
        for node, domain in domains.items():
            if len(domain) > 1:
                problem.add((node,), self._work(node, domain, axis, before.get(node, {})))
        derived = made_of(g, self.setting.gathered.get(axis, ()))  # parameters gathered along this axis
        free = self.setting.free.get(axis, ())
        hidden = weights(g, self.setting.given, axis, derived, self.setting.by, self.setting.wide, free)
        for (source, node, operand, cut), times in g.edges.items():
            often = times * hidden.get((source, node), 1.0)
            if source not in sizes:
                sizes[source] = self._bytes(source)
            shift = source.rows - cut
            have = [_shifted(x.get(source.output, WHOLE), shift) for x in lies[source.node][1]]
            want = [x.get(operand, WHOLE) for x in lies[node][0]]
            table = often * self._table(tuple(have), tuple(want), sizes[source], axis)
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
        for source, _, layout in self.setting.wanted():
            target = place(layout, axis)
            have = [_shifted(x.get(source.output, WHOLE), source.rows) for x in lies[source.node][1]]
            size = self._bytes(source)
            problem.add((source.node,), [NEVER if h is None else self.moving(h, target, size, axis) for h in have])
        chosen = pairs.least(problem).chosen
        for node, domain in domains.items():
            value = domain[chosen[node]]
            if node in g.options:
                self.labels[node][axis] = value
            elif node in self.places:
                self.places[node] = _put(self.places[node], value, axis)

    # -- what a node can do, and how its operands and results then lie

    def _places(self, node: Node, t: Type, axis: str) -> list[int]:
        if node[:2] == ("in", self.graph.program.entry):
            if node[2] in self.setting.free.get(axis, ()):
                dims = [d for d, n in enumerate(self._left(node, t)) if n > 1 and n % self.mesh[axis] == 0]
                return dims if dims and t.ndim > 1 else [WHOLE, *dims]  # what is large is split
            return [place(self.setting.given.get(node[2], Layout.whole(t.ndim)), axis)]
        if t.depth or axis in self.graph.own.get(node, ()):
            return [WHOLE]
        waits = axis in self.setting.reduced and node[1] in self.setting.bodies
        partial = [PARTIAL["+"]] if t.dtype.is_floating_point and not waits else []
        return [WHOLE, *(d for d, n in enumerate(t.shape) if n > 1), *partial]

    def _left(self, node: Node, t: Type) -> Sequence[int]:
        """A rank's shape of an input along the axes so far."""
        return self.places[node].local(t, self.mesh).shape

    def _lies(self, node: Node, domain: Sequence[Any]) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """For each value of a node: where the axis lies in its operands, and in its results."""
        if node not in self.graph.options:
            return [{0: x} for x in domain], [{0: x} for x in domain]
        places = [self.graph.options[node].places(x) for x in domain]
        return [ins for ins, _ in places], [outs for _, outs in places]

    # -- costs -------------------------------------------------------------------------------------------------------

    def _work(self, node: Node, domain: Sequence[Any], axis: str, before: Mapping[str, Axes]) -> list[float]:
        """Seconds that a node takes by itself, for each of its values."""
        g = self.graph
        if node not in g.options:
            # of equals: gathered outside, where it can begin early
            return [1e-12 if value == PARTIAL["+"] else 1e-9 * (value >= 0) for value in domain]
        seconds = self.setting.work(node)
        for letter, axes in before.items():
            seconds *= _share(g.options[node], letter, axes, self.mesh)
        return [g.often(node) * self._seconds(node, seconds, value, axis, before) for value in domain]

    def _seconds(self, node: Node, seconds: float, value: Label, axis: str, before: Mapping[str, Axes]) -> float:
        """What is left of an equation's seconds under a label, and what its messages take."""
        if not value.letter:
            return seconds
        options, letters = self.graph.options[node], dict.fromkeys(value.letter.split(), (axis,))
        first = next(iter(letters))  # letters split together by a rule: every rank goes through all of the others
        axes = before.get(first, ())
        seconds *= _share(options, first, (*axes, axis), self.mesh) / _share(options, first, axes, self.mesh)
        is_plain = all(k in options.plain and options.rule(letters, k) is None for k in letters)
        return seconds if is_plain else seconds + sum(self.setting.price(self.graph.eqns[node], value, (axis,)))

    def moving(self, have: int, want: int, size: float, axis: str) -> float:
        """Seconds from one place of an axis to another, for a tensor of `size` bytes where the axis is whole."""
        if have == want:
            return 0.0
        key = (have if have < 0 else 0, want if want < 0 else 0, size, axis)
        seconds = self._moving.get(key)
        if seconds is None:
            seconds = self._moving[key] = self._moved(have, want, size, axis)
        return seconds

    def _table(self, have: tuple[int | None, ...], want: tuple[int, ...], size: float, axis: str) -> Table:
        """Seconds from each place to each other; the same for many values."""
        key = (have, want, size, axis)
        if key not in self._tables:
            rows = [[NEVER if h is None else self.moving(h, w, size, axis) for w in want] for h in have]
            self._tables[key] = np.array(rows)
        return self._tables[key]

    def _moved(self, have: int, want: int, size: float, axis: str) -> float:
        k, links = self.mesh[axis], self.setting.moves.links
        if have in PARTIAL.values():
            if want >= 0:
                return links.seconds("reduce_scatter", (axis,), size)
            return links.seconds("all_reduce", (axis,), size) if want == WHOLE else NEVER
        if have == WHOLE:
            return 1e-9 + size / k / self.setting.costs.hardware.bytes_s if want >= 0 else 1e-7
        if want >= 0:
            return links.seconds("all_to_all", (axis,), size / k)
        return links.seconds("all_gather", (axis,), size / k) if want == WHOLE else NEVER

    def _bytes(self, source: Source) -> float:
        """What a rank holds of a value along the axes so far."""
        g = self.graph
        if source.node in g.ports:
            t, layout = g.ports[source.node], self.places[source.node]
        elif source.node in g.options:
            t, letters = g.options[source.node].outputs[source.output], self.letters(source.node)
            fit = g.options[source.node].fit
            item = fit.outs[source.output] if letters and fit is not None else ((),) * t.ndim
            layout = Layout(tuple(next((letters[k] for k in dim if k in letters), ()) for dim in item))
        else:
            return 8.0
        return float(layout.local(t, self.mesh).bytes)


def _put(layout: Layout, where: int, axis: str) -> Layout:
    if where >= 0:
        return layout.split(where, axis)
    kind = next((k for k, n in PARTIAL.items() if n == where), "")
    return layout.with_partial(axis, kind) if kind else layout


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
