"""How far layouts may be above the cheapest ones, where no search has proved it.

    value   what they cost by the objective of `together.py`, priced one by one: no tables are made
    bound   every equation divided among all ranks, and no messages: no layouts cost less

The bound costs nothing and is loose where messages take most of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mycel.ir import Layout
from mycel.plan.choices import Choice, Label
from mycel.plan.domains import Domain
from mycel.plan.graph import Node, Source
from mycel.plan.preferences import made_of, norm_labels, place, weights
from mycel.plan.setting import Setting, Solution

Labels = Mapping[Node, Mapping[str, Label]]


def gap(setting: Setting, axes: Sequence[str], labels: Labels, solution: Solution) -> tuple[float, float, float]:
    """(value, bound, how far the seconds may be above the least, as a share of them)"""
    g = setting.graph
    norms = {a: norm_labels(g, setting.given, a) for a in axes}
    computing, messages, seconds, bound = 0.0, moving_seconds(setting, axes, solution), 0.0, 0.0
    for node, by_axis in labels.items():
        domain = Domain.of_one(g.options[node], setting.mesh, {a: by_axis[a] for a in axes}, solution.letters[node])
        often, work = g.often(node), setting.work(node)
        work_s = often * work * float(domain.shares()[0])
        computing += work_s
        seconds += work_s / (setting.by.share if g.eqns[node].op.product else 1.0)
        if not all(norms[a].get(node) == by_axis[a] for a in axes):  # else it sends the same in all layouts
            messages += often * float(domain.messages(g.eqns[node], setting.price)[0])
        bound += often * work / setting.mesh.world
    inputs = {g.port(g.program.entry, i) for i in range(len(g.program.inputs))}
    for node, layout in solution.places.items():
        if node not in inputs:  # as `together.py` prefers between equals
            messages += 1e-9 * sum(map(len, layout.dims)) + 1e-12 * len(layout.partial)
    value = computing + messages
    return value, bound, (value - bound) / max(seconds + messages, 1e-12)


def moving_seconds(setting: Setting, axes: Sequence[str], solution: Solution) -> float:
    """Seconds of all messages between equations, each by what it counts."""
    g, choices = setting.graph, solution.choices(setting.graph)
    derived = {a: made_of(g, setting.gathered.get(a, ())) for a in axes}
    counts = {a: weights(g, setting.given, a, derived[a], setting.by, setting.wide) for a in axes}
    total = 0.0
    for (source, node, operand, cut), times in g.edges.items():
        have = _layout(source.node, source, choices, solution)
        want = choices[node[1], node[2]].ins[operand] if node in g.options else solution.places.get(node, Layout(()))
        shift = source.rows - cut
        have, want = _ahead(have, shift), _ahead(want or Layout.whole(len(have.dims)), -shift)
        if have != want:
            moved = [a for a in axes if place(have, a) != place(want, a)] or axes
            often = times * max(counts[a].get((source, node), 1.0) for a in moved)
            total += often * setting.moves.seconds(setting.moved_type(source, node, operand, cut), have, want)
    for source, t, layout in setting.wanted():
        total += setting.moves.seconds(t, _ahead(_layout(source.node, source, choices, solution), source.rows), layout)
    return total


def _layout(node: Node, source: Source, choices: Mapping[tuple[str, int], Choice], solution: Solution) -> Layout:
    """How a value lies where it is made."""
    if node in solution.places:
        return solution.places[node]
    return Layout(()) if node == ("whole",) else choices[node[1], node[2]].outs[source.output]


def _ahead(layout: Layout, rows: int) -> Layout:
    """As that of a tensor with that many dims more before its own, in which it is whole."""
    return Layout(((),) * rows + layout.dims, layout.partial) if rows > 0 else layout
