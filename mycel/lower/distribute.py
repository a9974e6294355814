"""A global program under a plan -> the local program of every rank.

settle      one layout for each block
pin         layouts of activations the plan names
solve       (plan/layouts.py) all other layouts, at the least cost or near it
spmd        local types, explicit collectives
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mycel.errors import PlanError
from mycel.ir import Block, Eqn, Layout, Mesh, Params, Program, Var, check, substitute, walk
from mycel.lower.price import Prices
from mycel.lower.settle import settle
from mycel.lower.spmd import spmd
from mycel.ops import o
from mycel.plan.choices import Layouts
from mycel.plan.cost import Costs
from mycel.plan.graph import Graph
from mycel.plan.hardware import Hardware
from mycel.plan.layouts import Solver
from mycel.plan.links import CPU_LINK, GPU_LINK, Links
from mycel.plan.moves import Moves
from mycel.plan.written import Plan


@dataclass(frozen=True)
class Distributed:
    """The program of all ranks, and the global one with the layouts it came from; `gap`: how far these may be above the cheapest ones, as a share of
    their seconds (0: none are cheaper, inf: nothing is proved); `gathered`: see `distribute`."""

    local: Program
    whole: Program
    layouts: Layouts
    gap: float
    moves: Moves
    gathered: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[Layout, ...]:
        return self.layouts[self.whole.entry].inputs

    @property
    def outputs(self) -> tuple[Layout, ...]:
        return self.layouts[self.whole.entry].outputs


def distribute(
    program: Program, plan: Plan, given: Mapping[int, Layout], gathered: frozenset[int], hardware: Hardware, compiled: bool = False
) -> Distributed:
    """`given`: layouts of inputs of the entry; `gathered`: those that are used whole along ZeRO's axes."""
    links = Links(plan.mesh, GPU_LINK if hardware.memory else CPU_LINK)
    whole = settle(pin(known(program, plan.mesh), plan), given)
    along = dict.fromkeys(plan.over, gathered) if plan.zero == 3 else {}
    reduced = frozenset(plan.over) if plan.zero >= 2 else frozenset()
    first = [a for a in plan.batch_axes() if a in plan.mesh]  # activations are split by these anyway: what others split of a dim lies inside
    order = [*first, *(a for a in plan.mesh.axes if a not in first)]
    moves = Moves(links, hardware.bytes_s)
    solver = Solver(Graph(whole), moves, Costs(whole, hardware, compiled), Prices(links), given, along, reduced, order, wide=plan.sums == "fp32")
    layouts = solver.solve()
    return Distributed(check(spmd(whole, layouts, moves, gathered)), whole, layouts, solver.gap, moves, gathered)


def known(program: Program, mesh: Mesh) -> Program:
    """The program itself; PlanError for a hint that names an axis the mesh lacks."""
    for _, eqn in walk(program):
        lost = [a for dim in eqn.params["layout"] for a in dim if a not in mesh] if eqn.op.name == "shard" else []
        if lost:
            raise PlanError(
                f"mycel.shard: there is no axis {lost[0]!r}\n  the mesh  {mesh}\n  at        {eqn.source}\n  try       one of {', '.join(mesh.axes)}"
            )
    return program


def pin(program: Program, plan: Plan) -> Program:
    """Values the plan names are followed by the layout it wants: h = add(x, y)  =>  h = add(x, y); h_1 = shard(h, layout=…)"""
    if not plan.activations:
        return program
    wanted = {name: tuple(plan.activation_layout(name).dims) for name in plan.activations}
    blocks = {name: _pinned(block, wanted) for name, block in program.blocks.items()}
    return replace(program, blocks=blocks)


def _pinned(block: Block, wanted: Mapping[str, tuple[tuple[str, ...], ...]]) -> Block:
    taken = {v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs))}
    values: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in block.eqns:
        eqns.append(substitute(eqn, dict(values)))
        for v in eqn.outputs:
            layout = wanted.get(re.sub(r"_\d+$", "", v.name))
            if layout is not None and len(layout) == v.type.ndim:
                new = f"{v.name}_pinned"
                while new in taken:
                    new += "_"
                taken.add(new)
                values[v] = Var(new, v.type)
                eqns.append(Eqn(o.shard, (v,), Params(layout=layout), (values[v],), eqn.source, eqn.phase))
    return Block(block.inputs, tuple(eqns), tuple(values.get(x, x) if isinstance(x, Var) else x for x in block.outputs))
