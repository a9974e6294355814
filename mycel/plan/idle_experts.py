"""The axis `ep` and a model's layers of experts.

More ranks than experts are refused: some would have nothing to compute, at any routing.  Where no layer lies over `ep`
ranks split the batch alone, which a plan named for experts should not do in silence: there is a warning with what to
write.

    up: f32[8,64,32] = parameter experts.up          a row for each expert: [ep, -, -] gives ranks whole experts
    stack(experts.0.up.weight, …, dim=0)             modules in a list: [-, ep] gives ranks a part of each; a layer has
                                                     its ranks exchange them for whole experts, or gathers them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mycel.errors import PlanError, warn
from mycel.ir import Eqn, Layout, Mesh, Program, Var, call
from mycel.ops import o

EXPERT_AXIS = "ep"
MOVES = (o.stack, o.cat, o.cast, o.reshape, o.permute, o.select, o.slice)  # weights stay weights
SHOWN = 6  # names in a warning

Sources = frozenset[Var]  # inputs of a program that a value is put together from


@dataclass(frozen=True)
class ExpertWeights:
    """A weight of a layer of experts, and the inputs of the program that it is put together from."""

    eqn: Eqn
    weight: Var
    sources: Sources

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    def axes(self, source: Var, given: Mapping[Var, Layout]) -> tuple[str, ...]:
        """The axes of a mesh over which an input gives experts to ranks: of a row for each expert those of its first
        dim, of a module in a list the one for experts."""
        layout = given.get(source)
        if layout is None or not layout.dims:
            return ()
        return layout.dims[0] if source.ndim == self.weight.ndim else tuple(a for a in layout.axes if a == EXPERT_AXIS)


def refuse_idle(program: Program, given: Mapping[int, Layout], mesh: Mesh) -> None:
    """PlanError where a layer's experts are given over more ranks than there are experts."""
    layouts = {program.inputs[i]: layout for i, layout in given.items()}
    for weights in expert_weights(program):
        for source in weights.sources:
            axes = weights.axes(source, layouts)
            if mesh.count(axes) > weights.experts:
                raise PlanError(
                    f"{weights.experts} experts over {mesh.count(axes)} ranks: some would have none\n"
                    f"  layer     {program.role(source).name}: {layouts[source]}\n  at        {weights.eqn.source}\n"
                    f"  try       a smaller {'.'.join(axes)}, and dp or tp for the ranks that are left"
                )


def warn_of_unsplit(program: Program, given: Mapping[int, Layout], mesh: Mesh) -> None:
    """Says so where a mesh has an axis for experts and a layer's weights do not lie over it."""
    if EXPERT_AXIS not in mesh or mesh[EXPERT_AXIS] == 1:
        return
    layouts = {program.inputs[i]: layout for i, layout in given.items()}
    whole: dict[str, str] = {}
    weights = list(expert_weights(program))
    for each in weights:
        sources = [v for v in each.sources if program.role(v).kind == "parameter"]
        if not any(EXPERT_AXIS in layouts[v].axes for v in sources if v in layouts):
            entry = lambda v: (
                f"[{EXPERT_AXIS}{', -' * (v.ndim - 1)}]" if v.ndim == each.weight.ndim else f"[-, {EXPERT_AXIS}]"
            )
            whole |= {re.sub(r"\d+", "*", program.role(v).name): entry(v) for v in sources if v.ndim > 1}
    is_laid_over = lambda v: program.role(v).kind == "parameter" and EXPERT_AXIS in layouts[v].axes
    if not whole and (weights or any(map(is_laid_over, layouts))):  # products of all experts at once are no such layer
        return
    what, advice = "the model has no layer of experts", "dp, or experts as mycel.experts has them"
    if whole:
        more = ", …" if len(whole) > SHOWN else ""
        what = f"every rank has all experts of {', '.join(list(whole)[:SHOWN])}{more}"
        advice = f"parameters: {{{', '.join(f'{k!r}: {v}' for k, v in list(whole.items())[:SHOWN])}{more}}}"
    warn(f"{EXPERT_AXIS}={mesh[EXPERT_AXIS]} splits the batch alone: {what}\n  try       {advice}")


def expert_weights(program: Program) -> Iterator[ExpertWeights]:
    """The weights of the layers of experts of a program, of each call of a block its own."""
    if any(eqn.op.for_ranks for block in program.blocks.values() for eqn in block.eqns):
        yield from _in_block(program, program.entry, {v: frozenset({v}) for v in program.inputs})


def _in_block(program: Program, name: str, outer: Mapping[Var, Sources]) -> Iterator[ExpertWeights]:
    producers = {v: eqn for eqn in program.blocks[name].eqns for v in eqn.outputs}
    for eqn in program.blocks[name].eqns:
        if eqn.op is call:
            inner = zip(program.blocks[eqn.params["block"]].inputs, eqn.inputs, strict=True)
            known = {v: _sources(x, producers, outer) for v, x in inner if isinstance(x, Var)}
            yield from _in_block(program, eqn.params["block"], known)
        elif eqn.op.for_ranks:
            for x in eqn.inputs[3:]:
                if isinstance(x, Var):
                    yield ExpertWeights(eqn, x, _sources(x, producers, outer))


def _sources(x: Var, producers: Mapping[Var, Eqn], outer: Mapping[Var, Sources]) -> Sources:
    """The inputs of a program that a value of a block is put together from."""
    waiting, sources = [x], set[Var]()
    while waiting:
        v = waiting.pop()
        if v not in producers:
            sources |= outer.get(v, frozenset())
        elif producers[v].op in MOVES:
            waiting += producers[v].vars
    return frozenset(sources)
