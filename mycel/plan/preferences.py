"""What given layouts mean for the values around them, beyond what moving costs.

    a parameter in parts        is used in parts, and so is what is made of it alone: taking it apart or together counts
                                more
    a parameter gathered        reaches its layer while others compute; a gradient its update likewise: such a message
                                counts less
    the norm of a gradient      is taken of it as it lies for its update: as the optimiser state does
    a sum that has come         is not gathered once more: that message would be neither encoded nor beside computing

The solver (`layouts.py`) weighs its messages by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mycel.ir import Eqn, Layout, Var
from mycel.plan.choices import PARTIAL, SAME, WHOLE, Label
from mycel.plan.graph import Graph, Node, Source, origin


@dataclass(frozen=True)
class Weights:
    """What the solver makes of seconds.  All three are wishes that a plan says without words, not times; with (1, 1, 1)
    seconds alone decide.

    share     of products.  Who gives a mesh wants the work divided among its ranks, also where a slow link would make
              it quicker for each to do all of it.  So large that products are divided before anything is saved
              elsewhere: all messages of a step take less than 1e4 times its products.
    hidden    of messages that run beside computing (`lower/overlap`): gathered parameters one layer ahead, gradients
              until their update.  What is left of them on the clock is the part that computing does not cover; a tenth
              keeps the cheaper of two such messages the better one.
    as_given  of messages that undo what the plan gives: a parameter given in parts is to be used in parts, though at
              large batches it were quicker to gather it (that is ZeRO 3, and said by `zero: 3`); a sum that is to be
              encoded is not to travel as it is as well.  Ten times: more than the ratio of any two ways to use it.
    """

    share: float = 1e4
    hidden: float = 0.1
    as_given: float = 10.0


PREFERRED = Weights()


Given = Mapping[int, Layout]  # inputs of the entry; one that is not there is whole


def place(layout: Layout | None, axis: str) -> int:
    """Where an axis lies in a layout: a dim, WHOLE, or a kind of partial value."""
    if layout is None:
        return WHOLE
    for d, axes in enumerate(layout.dims):
        if axis in axes:
            return d
    return next((PARTIAL[kind] for a, kind in layout.partial if a == axis), WHOLE)


def weights(
    g: Graph,
    given: Given,
    axis: str,
    derived: set[Source],
    by: Weights,
    wide: bool = False,
    free: Collection[int] = (),
) -> dict[tuple[Source, Node], float]:
    """Messages that count less, since they go on beside computing: gathered parameters on their way to a layer,
    gradients to their update.  And those that count more: inputs that were given in parts are meant to be used in
    parts, and sums that have come in whatever way the plan says not to travel again; with `wide`, what is widened is to
    be added up wide."""
    late = {node for node, eqn in g.eqns.items() if updates(eqn) or eqn.op.name in ("global_norm", "summed")}
    used_as_given = made_of(g, [*(i for i, layout in given.items() if place(layout, axis) >= 0), *free]) - derived
    wanted = {source.node for source, node, _, _ in g.edges if source.node[0] == "hub" and node not in late}
    late |= {node for node in g.ports if node[0] == "hub" and node not in wanted}  # on its way to updates alone
    weight, come = {}, _come(g)
    for source, node, _, _ in g.edges:
        if source in used_as_given or source.node in come or (wide and node in g.eqns and _widens(g.eqns[node])):
            weight[source, node] = by.as_given
        elif source in derived or node in late:
            weight[source, node] = by.hidden
    return weight


def _come(g: Graph) -> set[Node]:
    """Sums that came compressed or one step late, and what is made of them before an update: to be gathered there they
    would travel once more, as they are."""
    uses: dict[Node, list[Node]] = {}
    for source, node, _, _ in g.edges:
        uses.setdefault(source.node, []).append(node)
    todo = [node for node, eqn in g.eqns.items() if eqn.op.name == "summed"]
    reached = set(todo)
    while todo:
        more = [n for n in uses.get(todo.pop(), ()) if n not in reached and not (n in g.eqns and updates(g.eqns[n]))]
        reached.update(more)
        todo += more
    return reached


def made_of(g: Graph, inputs: Iterable[int]) -> set[Source]:
    """Inputs of the entry, and values made of one of them alone."""
    sources = {Source(g.port(g.program.entry, i), 0) for i in inputs}
    if not sources:
        return sources
    waits: dict[Node, int] = {}  # by node: for how many of its sources, all of which it needs
    uses: dict[Source, list[Node]] = {}
    for source, node, _, _ in g.edges:
        waits[node] = waits.get(node, 0) + 1
        uses.setdefault(source, []).append(node)
    alone = {node for node, n in waits.items() if n == 1 or node in g.ports}
    todo = list(sources)
    while todo:
        for node in uses.get(todo.pop(), ()):
            waits[node] -= 1
            if not waits[node] and node in alone:
                count = len(g.options[node].outputs) if node in g.options else 1
                more = [x for x in (Source(node, j) for j in range(count)) if x not in sources]
                sources.update(more)
                todo += more
    return sources


def norm_labels(g: Graph, given: Given, axis: str, free: Collection[int] = ()) -> dict[Node, Label]:
    """For each gradient whose norm is taken: the label under which it lies as its optimiser state does; nothing where
    that is looked for."""
    state: dict[Node, int] = {}  # by part of an update: where the axis lies in what it updates
    for source, node, _, _ in g.edges:
        first = origin(source)
        if node in g.eqns and updates(g.eqns[node]) and first[:2] == ("in", g.program.entry) and g.ports[first].ndim:
            if first[2] in free:
                continue
            where = place(given.get(first[2]), axis)
            state[node] = max(state.get(node, WHOLE), where)
    lies = {
        source: state[node]
        for source, node, _, _ in g.edges
        if node in state and origin(source)[:2] != ("in", g.program.entry)
    }
    labels = {}
    for source, node, operand, _ in g.edges:
        if node in g.eqns and g.eqns[node].op.name == "global_norm" and source in lies:
            where = lies[source]
            labels[node] = Label(f"p{operand}d{where}") if where >= 0 else SAME
    return labels


def updates(eqn: Eqn) -> bool:
    """Is it an optimiser's update?"""
    return eqn.op.inplace is not None


def _widens(eqn: Eqn) -> bool:
    """Does it take 16 bits to more?"""
    x = eqn.inputs[0] if eqn.op.name == "cast" else None
    return isinstance(x, Var) and x.dtype.is_floating_point and x.dtype.itemsize < eqn.outputs[0].dtype.itemsize
