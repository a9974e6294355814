"""All axes of a mesh solved together: the sum of tables whose least is the cheapest layouts of a program.

A variable for each node of the graph.  The values of an equation are its labels for all axes, with the order of axes
that split one letter (`domains.py`); those of an input or a shared value its layouts.  Moving costs what the chain of
messages costs that lowering will write (`distances.py`).  Tables grow with the labels of all axes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mycel.ir import Axes, Layout, Mesh, Type
from mycel.plan.choices import PARTIAL, WHOLE, Label, Options
from mycel.plan.distances import Distances, Indices, Space, Table
from mycel.plan.domains import Domain
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.least import Name, Sum
from mycel.plan.manual_regions import fixed_letters
from mycel.plan.preferences import made_of, norm_labels, updates, weights
from mycel.plan.setting import Setting, Solution


class Together:
    """The sum of tables: a variable for each node of the graph, its values numbered layouts or values of a `Domain`."""

    def __init__(self, setting: Setting, axes: Axes) -> None:
        self.setting, self.graph, self.axes = setting, setting.graph, axes
        g, mesh = self.graph, Mesh({a: setting.mesh[a] for a in axes})
        self.derived = {a: made_of(g, setting.gathered.get(a, ())) for a in axes}  # parameters gathered along an axis
        labels = {axis: self._labels(axis) for axis in axes}
        self._allowed: dict[Any, Indices] = {}
        self._prefixed: dict[tuple[int, int], Indices] = {}
        self._domains: dict[Any, tuple[Domain, Table, Table]] = {}
        self.domains = {node: self._domain(node, {a: labels[a][node] for a in axes}) for node in g.options}
        self.distances = Distances(setting.moves, mesh, self._kinds())
        self.ports = {node: self._port(node, t) for node, t in g.ports.items()}
        counts = {node: len(d) for node, (d, _, _) in self.domains.items()} | {
            node: len(x) for node, x in self.ports.items()
        }
        sizes: dict[Hashable, int] = {node: counts[node] for node in in_order(g)}
        self.sum = Sum(sizes | {("whole",): 1})
        self._work()
        if setting.limit is not None:
            self._weights()
        self._edges()
        self._outputs()

    def solution(self, chosen: Mapping[Name, int]) -> Solution:
        """The values chosen, as layouts."""
        solution = Solution({}, {}, {})
        for node, (domain, _, _) in self.domains.items():
            value = chosen[node]
            solution.letters[node] = domain.letters[value]
            labels = {axis: domain.label(value, a) for a, axis in enumerate(self.axes)}
            solution.flows[node] = {axis: label.group for axis, label in labels.items() if label.group}
        for node, numbers in self.ports.items():
            solution.places[node] = self._space(node).layouts[numbers[chosen[node]]]
        return solution

    @property
    def lightest(self) -> float:
        """Bytes below which no choice goes."""
        return sum(float(w.min()) for w in self.sum.weights.values())

    def _domain(self, node: Node, single: Mapping[str, Sequence[Label]]) -> tuple[Domain, Table, Table]:
        """The values of a part of an equation, the share of its work each leaves to a rank, seconds of messages
        inside."""
        g = self.graph
        options, eqn = g.options[node], g.eqns[node]
        fixed = fixed_letters(eqn, options, g.own.get(node, frozenset()))
        key = (options, node[3], tuple(map(tuple, single.values())), tuple(fixed.items()))
        if key not in self._domains:
            domain = Domain(options, self.setting.mesh, single, fixed)
            decides = len(domain) > 1
            messages = domain.messages(eqn, self.setting.price) if decides else np.zeros(len(domain))
            self._domains[key] = domain, domain.shares(), messages
        return self._domains[key]

    def _labels(self, axis: str) -> dict[Node, list[Label]]:
        """What each equation can do with one axis: norms of gradients as these are updated, gathered parameters used
        whole."""
        g = self.graph
        labels = {node: self.setting.labels(node, axis, {}) for node in g.options}
        for node, label in norm_labels(g, self.setting.given, axis).items():
            labels[node] = [label] if label in labels[node] else labels[node]
        for source, node, operand, _ in g.edges:
            if (
                source in self.derived[axis]
                and node in labels
                and not updates(g.eqns[node])
                and _tensors(g.options[node]) > 1
            ):
                labels[node] = [x for x in labels[node] if g.options[node].places(x)[0].get(operand, WHOLE) < 0]
        return labels

    def _space(self, node: Node) -> Space:
        return self.distances.space(self.graph.ports[node].ndim)

    def _kinds(self) -> str:
        """What some result may be partial in."""
        places = {
            p
            for d, _, _ in self.domains.values()
            for labels in d.single
            for x in labels
            for p in d.options.places(x)[1].values()
        }
        return "".join(kind for kind, n in PARTIAL.items() if kind == "+" or n in places)

    def _port(self, node: Node, t: Type) -> Indices:
        """The layouts that an input of a block, a result of a branch or a shared value may have."""
        setting, space = self.setting, self._space(node)
        if node[:2] == ("in", self.graph.program.entry):
            layout = setting.given.get(node[2], Layout.whole(t.ndim))
            return np.array([space.index[self._along(layout)]])
        own, waits = (
            self.graph.own.get(node, frozenset()),
            setting.reduced if node[1] in setting.bodies else frozenset(),
        )
        key = (t.depth, t.dtype.is_floating_point, tuple(n > 1 for n in t.shape), own, waits)
        if key not in self._allowed:
            fits = np.ones(len(space.layouts), bool)
            for a, axis in enumerate(self.axes):
                places = [WHOLE]
                if not t.depth and axis not in own:
                    places += [d for d, n in enumerate(t.shape) if n > 1]
                    places += [PARTIAL["+"]] if t.dtype.is_floating_point and axis not in waits else []
                fits &= np.isin(space.places[:, a], places)
            self._allowed[key] = np.flatnonzero(fits)
        return self._allowed[key]

    # -- costs -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Seconds that each node takes by itself."""
        g, setting = self.graph, self.setting
        for node, (_, shares, messages) in self.domains.items():
            self.sum.add((node,), g.often(node) * (setting.work(node) * shares + messages))
        for node, numbers in self.ports.items():
            if len(numbers) > 1:  # of equals: gathered outside, where it can begin early
                places = self._space(node).places[numbers]
                self.sum.add((node,), 1e-9 * (places >= 0).sum(1) + 1e-12 * (places == PARTIAL["+"]).sum(1))

    def _weights(self) -> None:
        """Bytes of what each equation makes on a rank, as often as it is run."""
        g = self.graph
        for node, (domain, _, _) in self.domains.items():
            size = np.zeros(len(domain))
            for j, t in enumerate(g.options[node].outputs):
                if g.first_part(node, j) == node[3]:
                    space = self.distances.space(t.ndim)
                    size += self.distances.local_bytes(space, t)[domain.layouts(1, j, space)]
            self.sum.weights[node] = g.often(node) * size

    def _edges(self) -> None:
        """Seconds from how each value is made to how it is used."""
        g = self.graph
        counts = [
            weights(g, self.setting.given, axis, self.derived[axis], self.setting.by, self.setting.wide)
            for axis in self.axes
        ]
        types = {edge: self.setting.moved_type(*edge) for edge in g.edges}
        self.distances.prepare(types.values())
        for edge, times in g.edges.items():
            source, node, operand, cut = edge
            t, shift = types[edge], source.rows - cut
            have = self._ahead(self._made(source, t), t.ndim, shift)
            want = self._ahead(self._used(node, operand, t), t.ndim, -shift)
            table = times * self.distances.table(t)[have[:, None], want]
            places = self.distances.space(t.ndim).places
            table *= self._weight([count.get((source, node), 1.0) for count in counts], places[have], places[want])
            if source.node == node:
                self.sum.add((node,), np.diagonal(table))
            else:
                self.sum.add((source.node, node), table)

    def _weight(self, counts: Sequence[float], have: Indices, want: Indices) -> Any:
        """What a message counts: that of the dearest axis that it moves."""
        if min(counts) == max(counts):
            return counts[0]
        moved = have[:, None, :] != want[None, :, :]
        return np.where(moved, np.array(counts), 0.0).max(-1)

    def _made(self, source: Source, t: Type) -> Indices:
        """The layout in which a value is made, for each value of the node that makes it."""
        node = source.node
        if node in self.domains:
            return self.domains[node][0].layouts(
                1, source.output, self.distances.space(self.graph.options[node].outputs[source.output].ndim)
            )
        return (
            self.ports[node]
            if node in self.ports
            else np.array([self.distances.space(t.ndim).index[Layout.whole(t.ndim)]])
        )

    def _used(self, node: Node, operand: int, t: Type) -> Indices:
        """The layout in which a node wants a value, for each value of the node."""
        if node in self.domains:
            return self.domains[node][0].layouts(0, operand, self.distances.space(t.ndim))
        return (
            self.ports[node]
            if node in self.ports
            else np.array([self.distances.space(t.ndim).index[Layout.whole(t.ndim)]])
        )

    def _ahead(self, numbers: Indices, ndim: int, rows: int) -> Indices:
        """Layouts as those of tensors with that many dims more before them, in which they are whole."""
        if rows <= 0:
            return numbers
        key = (ndim, rows)
        if key not in self._prefixed:
            inner, outer = self.distances.space(ndim - rows), self.distances.space(ndim)
            self._prefixed[key] = np.array(
                [outer.index[Layout(((),) * rows + x.dims, x.partial)] for x in inner.layouts]
            )
        return self._prefixed[key][numbers]

    def _outputs(self) -> None:
        for source, t, layout in self.setting.wanted():
            have = self._ahead(self._made(source, t), t.ndim, source.rows)
            target = self.distances.space(t.ndim).index[self._along(layout)]
            self.sum.add((source.node,), self.distances.table(t)[have, target])

    def _along(self, layout: Layout) -> Layout:
        """The same along the axes that are solved for."""
        dims = tuple(tuple(a for a in dim if a in self.axes) for dim in layout.dims)
        return Layout(dims, tuple(x for x in layout.partial if x[0] in self.axes))


def in_order(g: Graph) -> list[Node]:
    """The nodes as values flow: inputs of a block, its equations, each shared value behind what makes it."""
    hubs: dict[Node, list[Node]] = {}
    for node in g.ports:
        if node[0] == "hub":
            hubs.setdefault(node[1], []).append(node)
    inputs: dict[str, list[Node]] = {}
    for node in (*(n for n in g.ports if n[0] != "hub"), *g.options):
        inputs.setdefault(node[1], []).append(node)
    return [x for block in inputs.values() for node in block for x in (node, *hubs.get(node, ()))]


def _tensors(options: Options) -> int:
    return sum(isinstance(x, Type) for x in options.inputs)
