"""A global program under a plan -> the local program of every rank.

pin         layouts of activations the plan names
settle      one layout for each block
spmd        local types, explicit collectives, for the layouts that the plan has decided
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from mycel.errors import PlanError
from mycel.ir import Block, Eqn, Layout, Mesh, Params, Program, Var, check, substitute, walk
from mycel.lower.settle import settle
from mycel.lower.spmd import spmd
from mycel.lower.wide_sums import add_wide
from mycel.ops import o
from mycel.plan import Layouts, Plan
from mycel.plan.moves import Moves
from mycel.plan.plan import ADDED_WIDE

KNOWN = 12  # values that a refusal shows where none has a name like that


@dataclass(frozen=True)
class Distributed:
    """The program of all ranks, and the global one with the layouts it came from; `gathered`: inputs of the entry that
    are moved anew for each use."""

    local: Program
    whole: Program
    layouts: Layouts
    moves: Moves
    gathered: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[Layout, ...]:
        return self.layouts[self.whole.entry].inputs

    @property
    def outputs(self) -> tuple[Layout, ...]:
        return self.layouts[self.whole.entry].outputs


def distribute(program: Program, plan: Plan) -> Distributed:
    """The program of every rank under a plan whose layouts are decided; PlanError if they were decided for another
    program."""
    assert plan.decided is not None
    entry = plan.decided.layouts.get(program.entry)
    input_layouts = {
        i: entry.inputs[v.name][1] for i, v in enumerate(program.inputs) if entry is not None and v.name in entry.inputs
    }
    whole = settled(program, plan, input_layouts)
    layouts, moves = plan.decided.laid(whole), Moves(plan.decided.links_of(plan.mesh))
    gathered = frozenset(i for i, v in enumerate(whole.inputs) if v.name in plan.decided.gathered)
    local = spmd(whole, layouts, moves, gathered)
    return Distributed(check(add_wide(local) if plan.sums == ADDED_WIDE else local), whole, layouts, moves, gathered)


def settled(program: Program, plan: Plan, inputs: Mapping[int, Layout]) -> Program:
    """The global program to solve layouts for: activations pinned, one layout for each block.  `inputs`: layouts of
    inputs of the entry."""
    split = {i: layout for i, layout in inputs.items() if not layout.is_whole}
    return settle(pin(with_known_axes(program, plan.mesh), plan), split)


def with_known_axes(program: Program, mesh: Mesh) -> Program:
    """The program itself; PlanError for a hint that names an axis the mesh lacks."""
    for axis, source in hinted_axes(program):
        if axis not in mesh:
            raise PlanError(
                f"mycel.shard: there is no axis {axis!r}\n  the mesh  {mesh}\n  at        {source}\n"
                f"  try       one of {', '.join(mesh.axes)}"
            )
    return program


def hinted_axes(program: Program) -> Iterator[tuple[str, str]]:
    """Axes that hints in code name, and where."""
    for _, eqn in walk(program):
        if eqn.op is o.shard:
            yield from ((axis, eqn.source) for dim in eqn.params["layout"] for axis in dim)


def refuse_unknown_values(program: Program, plan: Plan) -> None:
    """PlanError for a layout of a value that the program does not have, or has with other dims only."""
    ndims: dict[str, list[int]] = {}
    values = [v for phase in ("forward", "backward") for _, e in walk(program) if e.phase == phase for v in e.outputs]
    for v in values if plan.activations else ():
        for name in dict.fromkeys((plain_name(v), v.name)):
            ndims.setdefault(name, []).append(v.type.ndim)
    for name in plan.activations:
        layout = plan.activation_layout(name)
        if name not in ndims:
            close = get_close_matches(name, ndims, 3)
            known = [*dict.fromkeys(map(plain_name, values))]
            there = f"  try       {', '.join(close)}" if close else f"  known     {', '.join(known[:KNOWN])}, …"
            raise PlanError(f"activations: {name}: no value of this name\n{there}")
        if len(layout.dims) not in ndims[name]:
            dims = f"{len(layout.dims)} dim{'s' * (len(layout.dims) != 1)}"
            raise PlanError(f"activations: {name}: {layout} has {dims}, {name} has {ndims[name][0]}")


def pin(program: Program, plan: Plan) -> Program:
    """Values the plan names are followed by the layout it wants: h = add(x, y)  =>  h = add(x, y); h_1 = shard(h,
    layout=…)"""
    if not plan.activations:
        return program
    wanted = {name: tuple(plan.activation_layout(name).dims) for name in plan.activations}
    blocks = {name: _pinned(block, wanted) for name, block in program.blocks.items()}
    return replace(program, blocks=blocks)


def plain_name(v: Var) -> str:
    """As the user's code calls a value, without the number that tells it from others of this name."""
    return re.sub(r"_\d+$", "", v.name)


def _pinned(block: Block, wanted: Mapping[str, tuple[tuple[str, ...], ...]]) -> Block:
    names = {v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs))}
    values: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in block.eqns:
        eqns.append(substitute(eqn, dict(values)))
        for v in eqn.outputs:
            layout = wanted.get(v.name, wanted.get(plain_name(v)))
            if layout is not None and len(layout) == v.type.ndim:
                new = f"{v.name}_pinned"
                while new in names:
                    new += "_"
                names.add(new)
                values[v] = Var(new, v.type)
                eqns.append(Eqn(o.shard, (v,), Params(layout=layout), (values[v],), eqn.source, eqn.phase))
    return Block(block.inputs, tuple(eqns), tuple(values.get(x, x) if isinstance(x, Var) else x for x in block.outputs))
