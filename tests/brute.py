"""Layouts of small programs by trying them all, beside those that the solver finds.

Every combination of labels of all equations and of layouts of all inputs and shared values is priced by itself: seconds
of computing by the shares of letters, of messages inside operators, and of every move by the chain that lowering would
write (`Moves.seconds`).  No table of the solver is used.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mycel.ir import Builder, Layout, Mesh, Program, Type, check, part
from mycel.lower.price import Prices
from mycel.lower.spmd import spmd
from mycel.ops import o
from mycel.plan import CPU
from mycel.plan.choices import Laid, Options
from mycel.plan.clock import clock
from mycel.plan.cost import Costs
from mycel.plan.graph import Graph, Source
from mycel.plan.layouts import Solver
from mycel.plan.links import CPU_LINK, Links
from mycel.plan.moves import Moves
from mycel.plan.preferences import Weights

MOST = 3_000  # combinations that are tried


def random_program(rng: random.Random) -> Program:
    """One to four equations on small matrices: products, elementwise work, sums, transposes."""
    b = Builder()
    n = [rng.choice([2, 3, 4, 6, 8]) * 64 for _ in range(3)]
    values = [b.input(f"x{i}", Type(torch.float32, (rng.choice(n), rng.choice(n)))) for i in range(rng.randint(1, 2))]
    with b:
        for _ in range(rng.randint(1, 4)):
            x = rng.choice(values)
            kind = rng.choice(["product", "pointwise", "add", "sum", "transpose", "softmax"])
            if kind == "product":
                w = next((y for y in values if y.ndim == 2 and x.ndim == 2 and y.shape[1] == x.shape[1]), None)
                values.append(o.linear(x, w) if w is not None else o.relu(x))
            elif kind == "add":
                y = rng.choice([y for y in values if y.shape == x.shape])
                values.append(o.add(x, y))
            elif kind == "sum" and x.ndim:
                values.append(o.sum(x, dims=(rng.randrange(x.ndim),), keepdim=False))
            elif kind == "transpose" and x.ndim == 2:
                values.append(o.permute(x, dims=(1, 0)))
            elif kind == "softmax" and x.ndim:
                values.append(o.softmax(x, dim=x.ndim - 1))
            else:
                values.append(o.relu(x))
    return check(Program({"main": b.block([values[-1]])}))


def random_mesh(rng: random.Random) -> Mesh:
    return Mesh(dict(zip("abc", (rng.choice([2, 2, 3, 4]) for _ in range(rng.randint(1, 3))), strict=False)))


def random_given(program: Program, mesh: Mesh, rng: random.Random) -> dict[int, Layout]:
    given = {}
    for i, v in enumerate(program.inputs):
        dims: list[list[str]] = [[] for _ in v.shape]
        for axis in mesh.axes:
            if dims and rng.random() < 0.5:
                dims[rng.randrange(len(dims))].append(axis)
        given[i] = Layout(tuple(map(tuple, dims)))
    return given


@dataclass
class Case:
    program: Program
    mesh: Mesh
    given: Mapping[int, Layout]
    share: float = 1.0

    def solver(self, limit: float | None = None) -> Solver:
        moves = Moves(Links(self.mesh, CPU_LINK))
        costs = Costs(self.program, CPU, False)
        return Solver(
            Graph(self.program),
            moves,
            costs,
            Prices(moves.links),
            self.given,
            by=Weights(self.share, 1.0, 1.0),
            limit=limit,
        )

    def every(self) -> list[tuple[float, float]] | None:
        """(seconds, bytes) of every combination; nothing where there are too many."""
        solver = self.solver()
        g, moves, price = solver.graph, solver.moves, solver.price
        choices = {node: list(every_choice(options, self.mesh)) for node, options in g.options.items()}
        for node, t in g.ports.items():
            fixed = node[:2] == ("in", "main")
            choices[node] = (
                [self.given.get(node[2], Layout.whole(t.ndim))] if fixed else list(every_layout(t, self.mesh))
            )
        if math.prod(len(x) for x in choices.values()) > MOST:
            return None
        alone = {node: [self._alone(solver, node, c, price) for c in options] for node, options in choices.items()}
        uses = [
            (s, node, operand, g.options[node].inputs[operand] if node in g.options else g.ports[node])
            for s, node, operand, _ in g.edges
        ]
        (out,) = self.program.main.outputs
        last = g.source("main", out)
        combinations = []
        for pick in itertools.product(*(range(len(x)) for x in choices.values())):
            at = dict(zip(choices, pick, strict=True))
            seconds, size = (sum(alone[node][k][i] for node, k in at.items()) for i in (0, 1))

            def lies(source: Source, at: Mapping[tuple[object, ...], int] = at) -> Layout:
                choice = choices[source.node][at[source.node]]
                return choice if isinstance(choice, Layout) else choice[0].outs[source.output]

            for source, node, operand, t in uses:
                want = choices[node][at[node]]
                seconds += moves.seconds(t, lies(source), want if isinstance(want, Layout) else want[0].ins[operand])
            combinations.append((seconds + moves.seconds(out.type, lies(last), Layout.whole(out.type.ndim)), size))
        return combinations

    def _alone(self, solver: Solver, node, choice, price) -> tuple[float, float]:
        """(seconds, bytes) of one node by itself."""
        if isinstance(choice, Layout):
            if node[0] == "in":
                return 0.0, 0.0
            return 1e-9 * sum(map(len, choice.dims)) + 1e-12 * len(choice.partial), 0.0
        laid, labels = choice
        g, eqn, options = solver.graph, solver.graph.eqns[node], solver.graph.options[node]
        share = math.prod(
            part(options.fit.sizes[k], axes, self.mesh) / options.fit.sizes[k] for k, axes in laid.letters.items()
        )
        seconds = solver.costs.seconds(eqn) * share * (self.share if eqn.op.product else 1.0)
        for label in {label for label in labels.values() if label.letter}:
            axes = tuple(a for a, x in labels.items() if x == label)
            if label.letter not in options.plain or options.rule({label.letter: axes}, label.letter) is not None:
                n = options.fit.sizes[label.letter]
                start_s, wire_s = price(eqn, label, axes)
                seconds += start_s + wire_s * share * n / part(n, axes, self.mesh)
        assert g.runs[node[1]] == 1
        return seconds, float(sum(x.local(t, self.mesh).bytes for x, t in zip(laid.outs, options.outputs, strict=True)))


def least_by_the_clock(case: Case) -> tuple[float, float]:
    """Seconds by the clock of what the solver chooses, and the least of all combinations of labels, each lowered."""
    solver = case.solver()
    every = {
        node: [choice for choice, _ in every_choice(options, case.mesh)]
        for node, options in solver.graph.options.items()
    }
    main = case.program.main
    inputs = tuple(case.given.get(i, Layout.whole(v.ndim)) for i, v in enumerate(main.inputs))
    outputs = tuple(Layout.whole(x.type.ndim) for x in main.outputs)

    def seconds(layouts: Mapping[str, Laid]) -> float:
        return clock(check(spmd(case.program, layouts, solver.moves)), CPU, solver.moves.links).seconds

    chosen = seconds(solver.solve())
    return chosen, min(
        seconds({"main": Laid(inputs, choices, outputs)}) for choices in itertools.product(*every.values())
    )


def every_choice(options: Options, mesh: Mesh) -> Iterator[tuple]:
    """Labels for all axes, one after another in every order, each set of layouts once."""
    seen = set()
    for order in itertools.permutations(mesh.axes):
        todo = [{}]
        for axis in order:
            todo = [
                {**labels, axis: label} for labels in todo for label in options.labels(mesh, axis, letters_of(labels))
            ]
        for labels in todo:
            choice = options.choice(labels)
            key = (choice.ins, choice.outs, tuple(sorted(choice.letters.items())))
            if key not in seen:
                seen.add(key)
                yield choice, {a: labels[a] for a in mesh.axes}


def letters_of(labels):
    letters = {}
    for axis, label in labels.items():
        letters.update((k, (*letters.get(k, ()), axis)) for k in label.letter.split())
    return letters


def every_layout(t: Type, mesh: Mesh) -> Iterator[Layout]:
    seen = set()
    places = [None, "+", *(d for d, n in enumerate(t.shape) if n > 1)]
    for order in itertools.permutations(mesh.axes):
        for where in itertools.product(places, repeat=len(order)):
            layout = Layout.whole(t.ndim)
            for axis, at in zip(order, where, strict=True):
                layout = (
                    layout if at is None else layout.with_partial(axis, "+") if at == "+" else layout.split(at, axis)
                )
            if layout not in seen:
                seen.add(layout)
                yield layout


def random_case(rng: random.Random, even: bool = False) -> tuple[Case, list[tuple[float, float]]]:
    """One that can be tried in full; `even`: on a mesh that divides all sizes."""
    while True:
        program, mesh = random_program(rng), random_mesh(rng)
        if even and mesh.world & (mesh.world - 1):
            continue
        case = Case(program, mesh, random_given(program, mesh, rng), rng.choice([1.0, 1e4]))
        every = case.every()
        if every is not None:
            return case, every


def compare(case: Case, every: list[tuple[float, float]], limit: float | None) -> None:
    """The solver's answer is the least of all combinations, within the limit if there is one; its bound is no more."""
    least = min(seconds for seconds, size in every if limit is None or size <= limit)
    solver = case.solver(limit)
    solver.solve()
    close = 1e-9 * abs(least)
    message = f"{case.program}\n{case.mesh} {case.given} limit {limit}: {solver.bound} <= {least} <= {solver.value}"
    assert solver.bound <= least + close and least <= solver.value + close, message
    assert solver.gap == 0 and solver.value <= least + close, message
