"""Layouts for a whole program, from those of its inputs: the labels that cost least.

    variables   for each equation, in each distinct block once: what it does with every axis (`Label`: splits a letter,
                lets a partial sum through, neither); for each input of a block and each shared value: its layout
    objective   seconds of computing, as often as a block is run, + seconds of moving each value from how it is made to
                how it is used
    fixed       what the plan gives: inputs of the entry, `shard` equations; state comes out as it went in, results
                whole
    limit       bytes a rank: what all equations make, as often as they are run, added up

All calls of a block have the same layouts: a layer is solved once, with the edge from its output to its own input among
the costs.  A small program is solved for all axes together, which is exact (`together.py`).  The tables of a large one
would be too large for that: it is solved for one axis after another (`by_axis.py`), and a bound says how far from the
least that may be (`bound.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mycel.errors import PlanError
from mycel.ir import Atom, Layout, Var, cond, loop, order, scan, walk
from mycel.plan.alike import Alike
from mycel.plan.bound import gap
from mycel.plan.by_axis import ByAxis
from mycel.plan.choices import Choice, Laid, Layouts
from mycel.plan.graph import Node, Source
from mycel.plan.known import KnownLayouts
from mycel.plan.setting import Setting, Solution
from mycel.plan.together import Together
from mycel.sizes import shown

FEW, TOGETHER = 100, 3  # parts of equations, and axes, up to which all axes are solved together


@dataclass
class Solver(Setting):
    """Layouts of all values of a program."""

    solution: Solution = field(default_factory=lambda: Solution({}, {}, {}))
    value: float = math.inf  # of the objective
    bound: float = -math.inf  # what no layouts go below
    gap: float = math.inf  # how far above the least the seconds may be, as a share of them
    known: KnownLayouts | None = None  # of the blocks of programs like this one
    bounds: bool = True  # is the gap asked for?

    def solve(self) -> Layouts:
        axes = self.order or slowest_first(self.mesh.axes, self.given.values())
        axes = tuple(a for a in axes if self.mesh[a] > 1)
        alike = Alike.of(self) if self.limit is None else Alike.none(self.graph)
        small = replace(self, graph=alike.graph)
        solution = self._together(small, axes) if not self.free else None
        if solution is not None:
            self.solution = alike.spread(solution)
            return self._laid()
        if self.limit is not None:
            raise PlanError("a limit of bytes can be kept where all axes are solved together, in small programs")
        by_axis = ByAxis(small, axes, self.known)
        self.solution = alike.spread(by_axis.solve())
        if self.free:
            return self._laid()
        if self.known is not None:
            self.known.learn(self.graph.program, by_axis.labels, by_axis.places)
        if self.bounds:
            self.value, self.bound, self.gap = gap(small, axes, by_axis.labels, self.solution)
        return self._laid()

    def _together(self, small: Setting, axes: Sequence[str]) -> Solution | None:
        """Solve all axes at once; nothing where that is too much, or not proved."""
        if len(small.graph.options) > FEW or len(axes) > TOGETHER:
            return None
        problem = Together(small, tuple(axes))
        answer = problem.sum.least(self.limit)
        if not answer.chosen and self.limit is not None:
            least = shown(int(problem.lightest))
            raise PlanError(f"values made on one rank take at least {least}, the limit is {shown(int(self.limit))}")
        if not answer.chosen or not answer.exact:
            return None
        self.value, self.bound, self.gap = answer.value, answer.bound, 0.0
        return problem.solution(answer.chosen)

    # -- the layouts that were found ---------------------------------------------------------------------------------

    def _laid(self) -> Layouts:
        g = self.graph
        laid: dict[str, Laid] = {}
        choices = self.solution.choices(g)
        for name in order(g.program):
            block = g.program.blocks[name]
            inputs = [self._input(name, i) for i in range(len(block.inputs))]
            equations = [choices.get((name, i)) for i in range(len(block.eqns))]
            outputs = [self._output(name, j, x, choices) for j, x in enumerate(block.outputs)]
            laid[name] = Laid(tuple(inputs), tuple(equations), tuple(outputs))
        return laid

    def _input(self, name: str, i: int) -> Layout:
        if name == self.graph.program.entry and not self.is_free(i):
            return self.input_layout(i)
        return self.solution.places[self.graph.port(name, i)]

    def _output(self, name: str, j: int, x: Atom, choices: Mapping[tuple[str, int], Choice]) -> Layout:
        g = self.graph
        program = g.program
        if name == program.entry:
            n = len(program.results)
            if j >= n:
                return self._input(name, self.numbers[program.updates[j - n]])
            return Layout.whole(x.type.ndim if isinstance(x, Var) else 0)
        held = self._held(name, j)
        if held is not None:
            return self.solution.places.get(held, Layout())
        source = g.source(name, x)
        return self.layout_of(source, choices) if source is not None else Layout(())

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
        if node in self.solution.places:
            layout = self.solution.places[node]
        elif node == ("whole",):
            return Layout(())
        else:
            layout = choices[node[1], node[2]].outs[source.output]
        return Layout(((),) * source.rows + layout.dims, layout.partial)


def slowest_first(axes: Sequence[str], layouts: Iterable[Layout]) -> list[str]:
    """Axes in an order in which those before others on a dim come first, as far as the layouts agree."""
    before = {(a, b) for x in layouts for dim in x.dims for i, b in enumerate(dim) for a in dim[:i]}
    left, ordered = list(axes), []
    while left:
        ordered.append(next((b for b in left if not any((a, b) in before for a in left)), left[0]))
        left.remove(ordered[-1])
    return ordered
