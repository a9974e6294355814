"""Nodes of a graph that cannot be told apart become one: the layers of a model have the same parameters, and these are
gathered, updated and counted in a norm in the same way.

    before   32 times   weight_i ─▶ layer:in, layer_backward:out ─▶ update_i ─▶ weight_i
    after               weight ─(32)▶ layer:in, layer_backward:out ─(32)▶ update ─(32)▶ weight

Which nodes are alike is found as for isomorphic graphs: at first all of the same operator and types are, then those are
told apart whose neighbours are, until nothing changes.  What hangs on the same node in the same way costs least with
the same layout, so that solving the small graph solves the large one; its size does not depend on a model's depth.
Under a limit of bytes that does not hold: one of two that are alike may be small and the other large.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mycel.ir import Layout
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.setting import Setting, Solution

Use = tuple[Source, Node, int, int]


@dataclass
class Alike:
    """A graph with one node for each class, and the way back to all nodes."""

    whole: Graph
    first: dict[Node, Node] = field(default_factory=dict)  # each node -> the one that stands for its class

    @staticmethod
    def none(graph: Graph) -> Alike:
        """Every node by itself."""
        return Alike(graph, {node: node for node in (*graph.ports, *graph.options)})

    @staticmethod
    def of(setting: Setting) -> Alike:
        """`setting` asks about the whole graph."""
        alike = Alike(setting.graph)
        colors = alike._refined(_first_colors(setting))
        firsts: dict[int, Node] = {}
        nodes = [*setting.graph.ports, *setting.graph.options]
        for node in sorted(nodes, key=lambda n: n[0] == "hub"):  # a shared value is that of the node that makes it
            if node[0] != "hub" or alike.first.get(node[1], node[1]) == node[1]:
                firsts.setdefault(colors[node], node)
            alike.first[node] = firsts.get(colors[node], node)
        return alike

    @property
    def graph(self) -> Graph:
        """One node of each class; edges count as often as all of theirs together."""
        g, small = self.whole, copy.copy(self.whole)
        small.options = {n: x for n, x in g.options.items() if self.first[n] == n}
        small.eqns = {n: x for n, x in g.eqns.items() if self.first[n] == n}
        small.ports = {n: x for n, x in g.ports.items() if self.first[n] == n}
        small.sizes = Counter(self.first.values())
        small.sources = {name: {v: self._source(s) for v, s in sources.items()} for name, sources in g.sources.items()}
        small.edges = Counter()
        for (source, node, operand, cut), times in g.edges.items():
            first = self.first.get(node, node)
            small.edges[self._source(source), first, g.operand(first, g.rank_of(node, 0, operand)), cut] += times
        return small

    def spread(self, solution: Solution) -> Solution:
        """What was found for one of each class, for all nodes."""
        g = self.whole
        letters = {}
        for node in g.options:
            first = self.first[node]
            names = dict(zip(g.letters(first), g.letters(node), strict=True)) if first != node else {}
            letters[node] = {names.get(k, k): axes for k, axes in solution.letters[first].items()}
        flows = {node: solution.flows[self.first[node]] for node in g.options}
        return Solution(letters, flows, {node: solution.places[self.first[node]] for node in g.ports})

    def _source(self, source: Source) -> Source:
        first = self.first.get(source.node, source.node)
        if first == source.node:
            return source
        output = self.whole.result(first, self.whole.rank_of(source.node, 1, source.output))
        return Source(first, output, source.rows)

    def _refined(self, colors: dict[Node, int]) -> dict[Node, int]:
        g = self.whole
        number = {node: i for i, node in enumerate(colors)}
        now, count = list(colors.values()), 0
        ways: dict[tuple[int, ...], int] = {}  # in which values are used, numbered
        edges = []
        for (s, node, operand, cut), times in g.edges.items():
            use = (g.rank_of(s.node, 1, s.output), s.rows, g.rank_of(node, 0, operand), cut, times)
            edges.append((number[s.node], number[node], ways.setdefault(use, len(ways))))
        while count < len(set(now)):
            count = len(set(now))
            around: list[list[tuple[int, int]]] = [[] for _ in now]
            for a, b, way in edges:
                around[a].append((way, now[b]))
                around[b].append((~way, now[a]))
            seen: dict[Hashable, int] = {}
            now = [seen.setdefault((own, *sorted(near)), len(seen)) for own, near in zip(now, around, strict=True)]
        return dict(zip(colors, now, strict=True))


def _first_colors(setting: Setting) -> dict[Node, int]:
    """Operator, types, and what is fixed: layouts of inputs and of outputs of the entry."""
    g = setting.graph
    wanted: dict[Node, list[tuple[int, Layout]]] = {}
    for source, _, layout in setting.wanted():
        wanted.setdefault(source.node, []).append((g.rank_of(source.node, 1, source.output), layout))
    seen: dict[Hashable, int] = {}
    colors = {("whole",): seen.setdefault("whole", 0)}
    for node, t in g.ports.items():
        key: Hashable = node
        if node[0] == "hub":
            key = ("hub", t)
        elif node[:2] == ("in", g.program.entry):
            i = node[2]
            gathered = tuple(axis for axis, inputs in setting.gathered.items() if i in inputs)
            key = ("in", t, setting.given.get(i), gathered, setting.is_free(i))
        colors[node] = seen.setdefault((key, _fixed(wanted, node)), len(seen))
    for node in g.options:
        key = ("eqn", node[1], id(g.options[node]), g.own.get(node))
        if len(g.parts[node[1], node[2]]) > 1:
            key = (*key, node[2], g.shape(node))
        colors[node] = seen.setdefault((key, _fixed(wanted, node)), len(seen))
    return colors


def _fixed(wanted: Mapping[Node, Sequence[tuple[int, Layout]]], node: Node) -> Hashable:
    return frozenset(Counter(wanted.get(node, ())).items())
