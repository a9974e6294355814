"""A program as a graph: what makes values, what uses them, and how often, each distinct block once.

nodes   an equation's independent parts (an optimiser's parameters do not depend on each other's layouts), inputs of
        blocks, results of branches, and for a value that several use a place of its own
edges   from what makes a value to each that uses it, through calls, branches and loops
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycel.ir import Atom, Block, Eqn, Program, Type, Var, call, cond, loop, order, runs, scan, walk
from mycel.plan.choices import Options
from mycel.plan.manual_regions import own_axes

Node = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """Where a value is made: a node, which of its outputs, and how many leading dims scans have put before it."""

    node: Node
    output: int
    rows: int = 0


@dataclass(frozen=True)
class PartItems:
    """What belongs to one of an equation's independent parts: its letters, and the numbers of operands and results."""

    letters: tuple[str, ...]
    members: tuple[list[int], list[int]]


@dataclass
class Graph:
    """The nodes of a program and its edges, for all axes the same."""

    program: Program
    free: Mapping[int, int] = field(default_factory=dict)  # inputs of the entry that are looked for -> with which
    runs: dict[str, int] = field(default_factory=dict)
    options: dict[Node, Options] = field(default_factory=dict)
    eqns: dict[Node, Eqn] = field(default_factory=dict)
    # letters of an equation that lie independently of the others
    parts: dict[tuple[str, int], list[frozenset[str]]] = field(default_factory=dict)
    ports: dict[Node, Type] = field(default_factory=dict)
    # (from, to, operand, rows cut off) -> how often
    edges: Counter[tuple[Source, Node, int, int]] = field(default_factory=Counter)
    alias: dict[Node, Node] = field(default_factory=dict)
    sources: dict[str, dict[Var, Source]] = field(default_factory=dict)
    # axes along which values are a rank's own: inside manual regions
    own: dict[Node, frozenset[str]] = field(default_factory=dict)
    sizes: Counter[Node] = field(default_factory=Counter)  # how many nodes one stands for, where it does (`alike.py`)
    _parts: dict[tuple[str, int], list[PartItems]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = order(self.program)
        self.runs = runs(self.program)
        for _, eqn in walk(self.program):  # branches take the same operands, and a loop's test what its body takes
            if eqn.op in (cond, loop):
                first, second = (eqn.params[k] for k in (("then", "orelse") if eqn.op is cond else ("body", "test")))
                self.alias.update(
                    (("in", second, i), ("in", first, i)) for i in range(len(self.program.blocks[second].inputs))
                )
        entry = self.program.entry
        self.alias.update((("in", entry, i), ("in", entry, first)) for i, first in self.free.items() if i != first)
        for name in names:  # inner blocks first: what they make is known when they are called
            self._ports(name)
            self._block(name, self.program.blocks[name])
        self._return()
        self.own = own_axes(self.eqns, self.edges)
        self._share()

    def _return(self) -> None:
        """State that is looked for comes out as it went in."""
        n = len(self.program.results)
        position = {v.name: i for i, v in enumerate(self.program.inputs)}
        for name, x in zip(self.program.updates, self.program.main.outputs[n:], strict=True):
            if position[name] in self.free:
                self._into(self.program.entry, x, self.port(self.program.entry, position[name]), 1)

    def _share(self) -> None:
        """What several equations use is moved once for all of them: to a place of its own, from where each takes it."""
        users: dict[Source, list[tuple[Node, int, int]]] = {}
        for source, node, operand, cut in self.edges:
            users.setdefault(source, []).append((node, operand, cut))
        for source, uses in users.items():
            if (
                len(uses) < 2
                or source.rows
                or any(cut for _, _, cut in uses)
                or source.node == ("whole",)
                or self.own.get(source.node)
            ):
                continue
            hub: Node = ("hub", source.node, source.output)
            self.ports[hub] = (
                self.ports[source.node]
                if source.node in self.ports
                else self.options[source.node].outputs[source.output]
            )
            counts = [self.edges.pop((source, *use)) for use in uses]
            self.edges[source, hub, 0, 0] = max(counts)
            for use, times in zip(uses, counts, strict=True):
                self.edges[Source(hub, 0), *use] = times

    def port(self, block: str, i: int) -> Node:
        return self.alias.get(("in", block, i), ("in", block, i))

    def _ports(self, name: str) -> None:
        block = self.program.blocks[name]
        for i, v in enumerate(block.inputs):
            self.ports.setdefault(self.port(name, i), v.type)
        self.sources[name] = {v: Source(self.port(name, i), 0) for i, v in enumerate(block.inputs)}

    def _block(self, name: str, block: Block) -> None:
        sources, often = self.sources[name], self.runs[name]
        for i, eqn in enumerate(block.eqns):
            if eqn.op in (call, cond, loop, scan):
                self._control(eqn, sources, often)
                continue
            options = Options.of(eqn)
            parts = self.parts[name, i] = independent(options)
            part_of = {letter: p for p, own in enumerate(parts) for letter in own}
            for p in range(len(parts)):
                self.options["eqn", name, i, p], self.eqns["eqn", name, i, p] = options, eqn
            for k, x in enumerate(eqn.inputs):
                if isinstance(x, Var):
                    self.edges[
                        sources[x],
                        ("eqn", name, i, _first_part(options.fit.ins if options.fit else None, k, part_of)),
                        k,
                        0,
                    ] += often
            for j, v in enumerate(eqn.outputs):
                sources[v] = Source(
                    ("eqn", name, i, _first_part(options.fit.outs if options.fit else None, j, part_of)), j
                )

    def often(self, node: Node) -> int:
        """How often a node is run, all that it stands for together."""
        return self.runs[node[1]] * (self.sizes[node] or 1)

    # -- an equation of several independent parts: what belongs to one of them

    def letters(self, node: Node) -> tuple[str, ...]:
        """Of a part, in the order in which operands and results have them."""
        return self._items(node).letters if len(self.parts[node[1], node[2]]) > 1 else ()

    def rank_of(self, node: Node, side: int, i: int) -> int:
        """Which of the operands (side 0) or results (side 1) of its part the i-th of the equation is."""
        if node not in self.options or len(self.parts[node[1], node[2]]) == 1:
            return i
        return self._items(node).members[side].index(i)

    def operand(self, node: Node, rank: int) -> int:
        """The operand of an equation that is this one of a part's."""
        if node not in self.options or len(self.parts[node[1], node[2]]) == 1:
            return rank
        return self._items(node).members[0][rank]

    def result(self, node: Node, rank: int) -> int:
        if node not in self.options or len(self.parts[node[1], node[2]]) == 1:
            return rank
        return self._items(node).members[1][rank]

    def shape(self, node: Node) -> tuple[Any, ...]:
        """A part as it is apart from the names of its letters."""
        options, items = self.options[node], self._items(node)
        assert options.fit is not None
        number = {letter: i for i, letter in enumerate(items.letters)}
        return tuple(
            (types[i], tuple(tuple(number.get(k, -1) for k in dim) for dim in fits[i] or ()))
            for types, fits, members in zip(
                (options.inputs, options.outputs), (options.fit.ins, options.fit.outs), items.members, strict=True
            )
            for i in members
        )

    def _items(self, node: Node) -> PartItems:
        equation = (node[1], node[2])
        if equation not in self._parts:
            fit, parts = self.options[node].fit, self.parts[equation]
            assert fit is not None
            part_of = {letter: p for p, own in enumerate(parts) for letter in own}
            letters: list[dict[str, None]] = [{} for _ in parts]
            members: list[tuple[list[int], list[int]]] = [([], []) for _ in parts]
            for side, items in enumerate((fit.ins, fit.outs)):
                for i, item in enumerate(items):
                    members[_first_part(items, i, part_of)][side].append(i)
                    for letter in (k for dim in item or () for k in dim):
                        letters[part_of[letter]][letter] = None
            self._parts[equation] = [PartItems(tuple(k), m) for k, m in zip(letters, members, strict=True)]
        return self._parts[equation][node[3]]

    def first_part(self, node: Node, j: int) -> int:
        """Which of the independent parts of a node's equation makes its result j."""
        fit = self.options[node].fit
        return _first_part(
            fit.outs if fit else None,
            j,
            {letter: p for p, own in enumerate(self.parts[node[1], node[2]]) for letter in own},
        )

    def source(self, block: str, x: Atom) -> Source | None:
        return self.sources[block].get(x) if isinstance(x, Var) else None

    def _control(self, eqn: Eqn, sources: dict[Var, Source], often: int) -> None:
        p = eqn.params
        if eqn.op is call:
            self._pass(eqn.inputs, sources, p["block"], often)
            outs: list[Source | None] = [self.source(p["block"], x) for x in self.program.blocks[p["block"]].outputs]
        elif eqn.op is cond:
            self._whole(eqn.inputs[0], sources, often)
            self._pass(eqn.inputs[1:], sources, p["then"], often)
            outs = []
            for j, v in enumerate(eqn.outputs):
                join: Node = ("out", p["then"], j)
                self.ports[join] = v.type
                outs.append(Source(join, 0))
                for branch in ("then", "orelse"):
                    self._into(p[branch], self.program.blocks[p[branch]].outputs[j], join, often)
        else:
            n = p.get("consts", 0)
            m = n + (p.get("carry", 0) if eqn.op is scan else len(eqn.outputs))
            self._pass(eqn.inputs[:m], sources, p["body"], often)
            self._pass(eqn.inputs[m:], sources, p["body"], often, start=m, rows=1)
            outs = [Source(self.port(p["body"], n + j), 0) for j in range(m - n)]
            for j in range(m - n):
                self._into(p["body"], self.program.blocks[p["body"]].outputs[j], self.port(p["body"], n + j), often)
            if eqn.op is loop:
                self._into(p["test"], self.program.blocks[p["test"]].outputs[0], ("whole",), often)
            for x in self.program.blocks[p["body"]].outputs[m - n :]:
                row = self.source(p["body"], x)
                outs.append(row and Source(row.node, row.output, row.rows + 1))
        for v, s in zip(eqn.outputs, outs, strict=True):
            sources[v] = s or Source(("whole",), 0)

    def _into(self, block: str, x: Atom, node: Node, often: int) -> None:
        """An output of a block that a node takes."""
        source = self.source(block, x)
        if source is not None:
            self.edges[source, node, 0, 0] += often

    def _pass(
        self, inputs: Sequence[Atom], sources: dict[Var, Source], block: str, often: int, start: int = 0, rows: int = 0
    ) -> None:
        for k, x in enumerate(inputs):
            if isinstance(x, Var):
                self.edges[sources[x], self.port(block, start + k), 0, rows] += often

    def _whole(self, x: Atom, sources: dict[Var, Source], often: int) -> None:
        if isinstance(x, Var):
            self.edges[sources[x], ("whole",), 0, 0] += often


def independent(options: Options) -> list[frozenset[str]]:
    """Groups of letters that never meet in an operand or a result: they are split independently of each other.

    All are one group where the operator has a rule for one of them: in  weight[c], index[n] -> rows[n]  the rule for c
    looks up what is this rank's of the weights and leaves a partial sum, for which every rank needs the same index."""
    if options.fit is None:
        return [frozenset()]
    if any(key != "*" for key in options.op.parts):
        return [frozenset(options.fit.sizes)]
    group: dict[str, set[str]] = {}
    for item in (*options.fit.ins, *options.fit.outs):
        letters = {letter for dim in item or () for letter in dim}
        touching = {id(group[k]): group[k] for k in letters if k in group}
        together = set[str]().union(letters, *touching.values())
        group.update(dict.fromkeys(together, together))
    return [frozenset(g) for g in {id(g): g for g in group.values()}.values()] or [frozenset()]


def _first_part(items: Sequence[Any] | None, k: int, part_of: Mapping[str, int]) -> int:
    """Which of an equation's independent parts an operand or a result belongs to."""
    item = items[k] if items is not None and k < len(items) else None
    return min((part_of[letter] for dim in item or () for letter in dim), default=0)


def origin(source: Source) -> Node:
    """The node a value comes from, seen through the place it is shared at."""
    return source.node[1] if source.node[0] == "hub" else source.node
