"""The layouts of a settled program under what a plan gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mycel.ir import Axes, Layout, Program
from mycel.plan.choices import Layouts
from mycel.plan.cost import Costs
from mycel.plan.domains import Price
from mycel.plan.graph import Graph
from mycel.plan.known import KnownLayouts
from mycel.plan.layouts import Solver
from mycel.plan.links import Links
from mycel.plan.moves import Moves
from mycel.plan.plan import Plan


@dataclass(frozen=True)
class Solved:
    """Layouts of all blocks; `gap`: how far they may be above the cheapest, as a share of their seconds; 0: none cost
    less."""

    layouts: Layouts
    gap: float


def parameter_layouts(
    whole: Program,
    plan: Plan,
    inputs: Mapping[int, Layout],
    free: Mapping[int, int],
    axes: Axes,
    costs: Costs,
    links: Links,
    price: Price,
) -> dict[int, Layout]:
    """How parameters should lie over some axes, where nothing says it: by position, as the cheapest layouts of the
    whole program have them.  `free`: inputs of the entry that are looked for, each with the one it lies like: optimiser
    state like its parameter."""
    first = [a for a in plan.batch_axes() if a in plan.mesh]
    order = [*first, *(a for a in plan.mesh.axes if a not in first)]
    looked = dict.fromkeys(axes, frozenset(free))
    graph = Graph(whole, free)
    solver = Solver(graph, Moves(links), costs, price, inputs, order=order, free=looked)
    solver.solve()
    return {i: solver.solution.places[graph.port(whole.entry, i)] for i in free}


def solve(
    whole: Program,
    plan: Plan,
    inputs: Mapping[int, Layout],
    gathered: frozenset[int],
    costs: Costs,
    links: Links,
    price: Price,
    known: KnownLayouts | None = None,
    bounds: bool = True,
) -> Solved:
    """`inputs`: layouts of inputs of the entry; `gathered`: those that are used whole along ZeRO's axes; `price`: of
    messages inside an operator; `known`: of the blocks of other programs under this plan; not `bounds`: the gap of
    large programs is not asked for, and endless."""
    along = dict.fromkeys(plan.over, gathered) if plan.zero == 3 else {}
    once = [how.axis for how in (plan.compressed(), plan.delayed()) if how is not None]  # encoded, or sent a step late
    at_the_end = frozenset(once)
    at_the_end |= frozenset(plan.batch_axes()[:1] if plan.monitored() else ())  # what ranks compare of their own
    reduced = frozenset(plan.over) - at_the_end if plan.zero >= 2 else frozenset()
    # activations are split by these anyway: what others split of a dim lies inside
    first = [a for a in plan.batch_axes() if a in plan.mesh]
    order = [*first, *(a for a in plan.mesh.axes if a not in first)]
    wide = plan.sums == "fp32"
    graph, moves = Graph(whole), Moves(links)
    solver = Solver(
        graph, moves, costs, price, inputs, along, reduced, order, wide=wide, known=known, bounds=bounds
    )  # fmt: skip
    return Solved(solver.solve(), solver.gap)
