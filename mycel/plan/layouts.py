"""Layouts for a whole program, from those of its inputs: for all axes of the mesh together, the labels that cost least.

    variables   for each equation, in each distinct block once: what it does with every axis (`Label`: splits a letter, lets a sum through, neither),
                and the order of axes that split one letter; for each input of a block, and each value with several uses: its layout
    objective   seconds of computing, as often as a block is run, + seconds of moving each value from how it is made to how it is used
    fixed       what the plan gives: inputs of the entry, `shard` equations; state must come out as it went in, results whole
    limit       bytes a rank: what all equations make, as often as they are run, added up

All calls of a block have the same layouts: a layer is solved once, with the edge from its output to its own input among the costs.
Moving costs what the chain of messages costs that lowering will write (`distances.py`).
The sum of all tables is made least by `least.py`, which also proves a bound.

Tables grow with the labels of all axes: of a large program two axes are solved together, of a small one three.
Where the mesh has more, the next ones are solved on the parts that those before have left, and nothing is proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycel.errors import PlanError
from mycel.ir import Atom, Axes, Layout, Mesh, Type, Var, cond, loop, order, part, scan, walk
from mycel.plan.choices import OWED, SAME, WHOLE, Choice, Label, Laid, Layouts, Options
from mycel.plan.cost import Costs
from mycel.plan.distances import Distances, Indices, Space, Table
from mycel.plan.domains import Domain, Price
from mycel.plan.graph import Graph, Node, Source
from mycel.plan.least import Sum
from mycel.plan.meant import PREFERRED, Given, Weights, made_of, norm_labels, updates, weights
from mycel.plan.moves import Moves
from mycel.plan.region import fixed_label, fixed_letters, is_fixed
from mycel.sizes import shown

FEW = 100  # parts of equations, up to which three axes are solved together


@dataclass
class Solver:
    """Layouts of all values of a program."""

    graph: Graph
    moves: Moves
    costs: Costs
    price: Price
    given: Given
    gathered: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by axis: inputs whose users see them whole along it
    reduced: frozenset[str] = frozenset()  # axes along which sums are paid in every turn of a scan, not owed until its end
    order: Sequence[str] = ()  # of the axes; of equals the first is split slowest
    by: Weights = PREFERRED
    wide: bool = False  # sums of 16-bit values that are widened are paid after that
    letters: dict[Node, dict[str, Axes]] = field(default_factory=dict)  # of an equation's part: what is split
    flows: dict[Node, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # by axis: operands whose sum owed passes through
    places: dict[Node, Layout] = field(default_factory=dict)
    limit: float | None = None  # bytes that all values made on one rank may take together
    value: float = 0.0
    bound: float = 0.0
    gap: float = 0.0  # how far above the least the seconds may be, as a share of them
    bodies: set[str] = field(default_factory=set)
    _inputs: dict[str, int] = field(default_factory=dict)
    _domains: dict[Any, tuple[Domain, Table, Table]] = field(default_factory=dict)
    _elements: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.moves.mesh

    def solve(self) -> Layouts:
        g = self.graph
        self._inputs = {v.name: i for i, v in enumerate(g.program.inputs)}
        self.bodies = {str(e.params["body"]) for _, e in walk(g.program) if e.op is scan}
        self.letters = {node: {} for node in g.options}
        self.flows = {node: {} for node in g.options}
        self.places = {node: Layout.whole(t.ndim) for node, t in g.ports.items()}
        axes = tuple(a for a in self.order or slowest_first(self.mesh.axes, self.given.values()) if self.mesh[a] > 1)
        count = 3 if len(g.options) <= FEW else 2
        groups = [axes[i : i + count] for i in range(0, len(axes), count)]
        for group in groups:
            self._together(group)
        if len(groups) > 1:
            self.gap = math.inf
        return self._laid()

    def _together(self, axes: Axes) -> None:
        """Solve some axes at once, on the parts that those before have left."""
        problem = Problem(self, axes)
        answer = problem.sum.least(self.limit)
        if not answer.chosen:
            lightest = sum(float(w.min()) for w in problem.sum.weights.values())
            raise PlanError(f"values made on one rank take at least {shown(int(lightest))}, the limit is {shown(int(self.limit or 0))}")
        self.value, self.bound = answer.value, answer.bound
        seconds = answer.value - sum(float(x[answer.chosen[node]]) for node, x in problem.preferred.items())
        self.gap = 0.0 if answer.exact else (answer.value - answer.bound) / max(seconds, 1e-12)
        problem.keep(answer.chosen)

    # -- what a node can do ----------------------------------------------------------------------------------------------

    def domain(self, node: Node, single: Mapping[str, Sequence[Label]]) -> tuple[Domain, Table, Table]:
        """The values of an equation's part; what part of its work each leaves to a rank; and seconds of messages inside it."""
        g = self.graph
        options, eqn, own = g.options[node], g.eqns[node], g.own.get(node, frozenset())
        fixed = fixed_letters(eqn, options, own)
        key = (options, node[3], tuple(map(tuple, single.values())), tuple(fixed.items()), tuple(self.letters[node].items()))
        if key not in self._domains:
            domain = Domain(options, self.mesh, single, fixed, self.letters[node])
            self._domains[key] = domain, domain.shares(), domain.messages(eqn, self.price)
        return self._domains[key]

    def labels(self, node: Node, axis: str) -> list[Label]:
        """What a part can do with one axis by itself."""
        options, eqn, own = self.graph.options[node], self.graph.eqns[node], self.graph.own.get(node, frozenset())
        parts = self.graph.parts[node[1], node[2]]
        if is_fixed(eqn, axis):
            label = fixed_label(eqn, options, axis, own)
            return [label if len(parts) == 1 or label.letter in parts[node[3]] else SAME]
        if axis in own:
            return [SAME]
        only = None if len(parts) == 1 else sorted(parts[node[3]])
        found = options.labels(self.mesh, axis, self.letters[node], only)
        return found if only is None else [x for x in found if not x.group]

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

    def wanted(self) -> Iterable[tuple[Source, Type, Layout]]:
        """How outputs of the entry must lie: results whole, state as it was."""
        program = self.graph.program
        n = len(program.results)
        for j, x in enumerate(program.main.outputs):
            source = self.graph.source(program.entry, x)
            if source is not None:
                assert isinstance(x, Var)
                yield source, x.type, self._given(self._inputs[program.updates[j - n]]) if j >= n else Layout.whole(x.type.ndim)

    def _given(self, i: int) -> Layout:
        return self.given.get(i, Layout.whole(self.graph.program.inputs[i].type.ndim))

    def left(self, node: Node) -> float:
        """The part of an equation's work that axes solved before have left to a rank."""
        sizes = self.graph.options[node].fit
        return (
            math.prod(part(sizes.sizes[k], axes, self.mesh) / sizes.sizes[k] for k, axes in self.letters[node].items()) if sizes is not None else 1.0
        )

    def local(self, source: Source, t: Type) -> Type:
        """What axes solved before have left a rank of a value."""
        if source.node in self.places:
            layout = self.places[source.node]
        elif source.node in self.graph.options and self.letters[source.node]:
            options, letters = self.graph.options[source.node], self.letters[source.node]
            assert options.fit is not None
            layout = Layout(tuple(next((letters[k] for k in dim if k in letters), ()) for dim in options.fit.outs[source.output]))
        else:
            return t
        if not any(layout.dims):
            return t
        ahead = t.ndim - len(layout.dims)
        return Layout(((),) * ahead + layout.dims).local(t, self.mesh)

    # -- the layouts that were found ----------------------------------------------------------------------------------------------

    def _laid(self) -> Layouts:
        g = self.graph
        laid: dict[str, Laid] = {}
        choices: dict[tuple[str, int], Choice] = {}
        for (name, i), parts in g.parts.items():
            node = ("eqn", name, i, 0)
            letters = {k: axes for p in range(len(parts)) for k, axes in self.letters["eqn", name, i, p].items()}
            letters |= fixed_letters(g.eqns[node], g.options[node], g.own.get(node, frozenset()))
            choices[name, i] = g.options[node].laid(letters, self.flows[node])
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


class Problem:
    """The sum of tables for some axes: a variable for each node of the graph, its values numbered layouts or values of a `Domain`."""

    def __init__(self, solver: Solver, axes: Axes) -> None:
        self.solver, self.graph, self.axes = solver, solver.graph, axes
        g, mesh = self.graph, Mesh({a: solver.mesh[a] for a in axes})
        self.derived = {axis: made_of(g, solver.gathered.get(axis, ())) for axis in axes}  # parameters gathered along an axis
        labels = {axis: self._labels(axis) for axis in axes}
        self._allowed: dict[Any, Indices] = {}
        self._prefixed: dict[tuple[int, int], Indices] = {}
        self.domains = {node: solver.domain(node, {a: labels[a][node] for a in axes}) for node in g.options}
        self.distances = Distances(solver.moves, mesh, self._kinds())
        self.ports = {node: self._port(node, t) for node, t in g.ports.items()}
        counts = {node: len(d) for node, (d, _, _) in self.domains.items()} | {node: len(x) for node, x in self.ports.items()}
        self.sum = Sum({node: counts[node] for node in in_order(g)} | {("whole",): 1})
        self.preferred: dict[Node, Table] = {}  # what products count beyond their seconds
        self._work()
        if solver.limit is not None:
            self._weights()
        self._edges()
        self._outputs()

    def keep(self, chosen: Mapping[Node, int]) -> None:
        """Add what was chosen to the solver's layouts."""
        solver = self.solver
        for node, (domain, _, _) in self.domains.items():
            value, letters = chosen[node], solver.letters[node]
            solver.letters[node] = letters | {k: (*letters.get(k, ()), *axes) for k, axes in domain.letters[value].items()}
            labels = {axis: domain.label(value, a) for a, axis in enumerate(self.axes)}
            solver.flows[node] = solver.flows[node] | {axis: label.group for axis, label in labels.items() if label.group}
        for node, numbers in self.ports.items():
            new, old = self._space(node).layouts[numbers[chosen[node]]], solver.places[node]
            dims = tuple((*a, *b) for a, b in zip(old.dims, new.dims, strict=True))
            solver.places[node] = Layout(dims, tuple(sorted((*old.owed, *new.owed))))

    def _labels(self, axis: str) -> dict[Node, list[Label]]:
        """What each equation can do with one axis: norms of gradients as these are updated, gathered parameters used whole."""
        g = self.graph
        labels = {node: self.solver.labels(node, axis) for node in g.options}
        for node, label in norm_labels(g, self.solver.given, axis).items():
            labels[node] = [label] if label in labels[node] else labels[node]
        for source, node, operand, _ in g.edges:
            if source in self.derived[axis] and node in labels and not updates(g.eqns[node]) and _tensors(g.options[node]) > 1:
                labels[node] = [x for x in labels[node] if g.options[node].places(x)[0].get(operand, WHOLE) < 0]
        return labels

    def _space(self, node: Node) -> Space:
        return self.distances.space(self.graph.ports[node].ndim)

    def _kinds(self) -> str:
        """What some result may be partial in."""
        places = {p for d, _, _ in self.domains.values() for labels in d.single for x in labels for p in d.options.places(x)[1].values()}
        return "".join(kind for kind, n in OWED.items() if kind == "+" or n in places)

    def _port(self, node: Node, t: Type) -> Indices:
        """The layouts that an input of a block, a result of a branch or a shared value may have."""
        solver, space = self.solver, self._space(node)
        if node[:2] == ("in", self.graph.program.entry):
            layout = solver.given.get(node[2], Layout.whole(t.ndim))
            return np.array([space.index[Layout(tuple(tuple(a for a in dim if a in self.axes) for dim in layout.dims))]])
        own, waits = self.graph.own.get(node, frozenset()), solver.reduced if node[1] in solver.bodies else frozenset()
        key = (t.depth, t.dtype.is_floating_point, tuple(n > 1 for n in t.shape), own, waits)
        if key not in self._allowed:
            fits = np.ones(len(space.layouts), bool)
            for a, axis in enumerate(self.axes):
                places = [WHOLE]
                if not t.depth and axis not in own:
                    places += [d for d, n in enumerate(t.shape) if n > 1]
                    places += [OWED["+"]] if t.dtype.is_floating_point and axis not in waits else []
                fits &= np.isin(space.places[:, a], places)
            self._allowed[key] = np.flatnonzero(fits)
        return self._allowed[key]

    # -- costs ------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Seconds that each node takes by itself."""
        g, solver = self.graph, self.solver
        seconds: dict[tuple[str, int], float] = {}
        for node, (_, shares, messages) in self.domains.items():
            eqn, at = g.eqns[node], node[1:3]
            if at not in seconds:
                seconds[at] = solver.costs.seconds(eqn) * (solver.by.share if eqn.op.product else 1.0)
            work = seconds[at] * solver.fraction(node) * solver.left(node) * shares
            self.sum.add((node,), g.runs[node[1]] * (work + messages))
            if eqn.op.product:
                self.preferred[node] = g.runs[node[1]] * work * (1 - 1 / solver.by.share)
        for node, numbers in self.ports.items():
            if len(numbers) > 1:  # of equals: gathered outside, where it can begin early
                places = self._space(node).places[numbers]
                self.sum.add((node,), 1e-9 * (places >= 0).sum(1) + 1e-12 * (places == OWED["+"]).sum(1))

    def _weights(self) -> None:
        """Bytes of what each equation makes on a rank, as often as it is run."""
        g = self.graph
        for node, (domain, _, _) in self.domains.items():
            size = np.zeros(len(domain))
            for j, t in enumerate(g.options[node].outputs):
                if g.first_part(node, j) == node[3]:
                    space = self.distances.space(t.ndim)
                    part = self.solver.local(Source(node, j), t)
                    size += self.distances.local_bytes(space, part)[domain.layouts(1, j, space)]
            self.sum.weights[node] = g.runs[node[1]] * size

    def _edges(self) -> None:
        """Seconds from how each value is made to how it is used."""
        g = self.graph
        counts = [weights(g, self.solver.given, axis, self.derived[axis], self.solver.by, self.solver.wide) for axis in self.axes]
        types = {edge: self._type(*edge) for edge in g.edges}
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

    def _type(self, source: Source, node: Node, operand: int, cut: int) -> Type:
        """The type of a value where it is moved, as far as other axes have left of it."""
        g = self.graph
        if node in g.options:
            t = g.options[node].inputs[operand]
        elif node in g.ports and source.rows >= cut:
            t = g.ports[node]
        else:
            t = g.ports[source.node] if source.node in g.ports else g.options[source.node].outputs[source.output]
        return self.solver.local(source, t)

    def _made(self, source: Source, t: Type) -> Indices:
        """The layout in which a value is made, for each value of the node that makes it."""
        node = source.node
        if node in self.domains:
            return self.domains[node][0].layouts(1, source.output, self.distances.space(self.graph.options[node].outputs[source.output].ndim))
        return self.ports[node] if node in self.ports else np.array([self.distances.space(t.ndim).index[Layout.whole(t.ndim)]])

    def _used(self, node: Node, operand: int, t: Type) -> Indices:
        """The layout in which a node wants a value, for each value of the node."""
        if node in self.domains:
            return self.domains[node][0].layouts(0, operand, self.distances.space(t.ndim))
        return self.ports[node] if node in self.ports else np.array([self.distances.space(t.ndim).index[Layout.whole(t.ndim)]])

    def _ahead(self, numbers: Indices, ndim: int, rows: int) -> Indices:
        """Layouts as those of tensors with that many dims more before them, in which they are whole."""
        if rows <= 0:
            return numbers
        key = (ndim, rows)
        if key not in self._prefixed:
            inner, outer = self.distances.space(ndim - rows), self.distances.space(ndim)
            self._prefixed[key] = np.array([outer.index[Layout(((),) * rows + x.dims, x.owed)] for x in inner.layouts])
        return self._prefixed[key][numbers]

    def _outputs(self) -> None:
        for source, t, layout in self.solver.wanted():
            part = self.solver.local(source, t)
            have = self._ahead(self._made(source, t), t.ndim, source.rows)
            target = Layout(tuple(tuple(a for a in dim if a in self.axes) for dim in layout.dims))
            self.sum.add((source.node,), self.distances.table(part)[have, self.distances.space(t.ndim).index[target]])


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


def slowest_first(axes: Sequence[str], layouts: Iterable[Layout]) -> list[str]:
    """Axes in an order in which those before others on a dim come first, as far as the layouts agree."""
    before = {(a, b) for x in layouts for dim in x.dims for i, b in enumerate(dim) for a in dim[:i]}
    left, found = list(axes), []
    while left:
        found.append(next((b for b in left if not any((a, b) in before for a in left)), left[0]))
        left.remove(found[-1])
    return found
