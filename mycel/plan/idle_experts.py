"""More ranks than experts: some would have nothing to compute, at any routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mycel.errors import PlanError
from mycel.ir import Atom, Eqn, Layout, Mesh, Program, Var, call


def refuse_idle(program: Program, given: Mapping[int, Layout], mesh: Mesh) -> None:
    """PlanError where a layer's experts are given over more ranks than there are experts."""
    if not any(len(layout.dims) == 3 and layout.dims[0] for layout in given.values()):
        return
    at = {v: i for i, v in enumerate(program.inputs)}
    for eqn, operands in _layers(program, program.entry, {v: v for v in program.inputs}):
        for x in operands:
            if not isinstance(x, Var):
                continue
            layout = given.get(at.get(x, -1))
            if layout is None or not layout.dims or mesh.count(layout.dims[0]) <= eqn.input_types[3].shape[0]:
                continue
            ranks, axes = mesh.count(layout.dims[0]), ".".join(layout.dims[0])
            name = program.role(x).name
            raise PlanError(
                f"{eqn.input_types[3].shape[0]} experts over {ranks} ranks: some would have none\n"
                f"  layer     {name}: {layout}\n  at        {eqn.source}\n"
                f"  try       a smaller {axes}, and dp or tp for the ranks that are left"
            )


def _layers(program: Program, name: str, outer: Mapping[Var, Atom]) -> Iterator[tuple[Eqn, list[Atom]]]:
    """Equations that are layers of experts, and what their weights are among the inputs of the entry."""
    for eqn in program.blocks[name].eqns:
        operands = [outer.get(x) if isinstance(x, Var) else x for x in eqn.inputs]
        if eqn.op is call:
            inner = program.blocks[eqn.params["block"]].inputs
            known = {v: x for v, x in zip(inner, operands, strict=True) if x is not None}
            yield from _layers(program, eqn.params["block"], known)
        elif eqn.op.for_ranks:
            yield eqn, operands[3:]
