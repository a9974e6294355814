"""Experts placed by their load: a rank whose experts get most of the choices is waited for by all others.

    load                 how many choices each expert of a layer gets        [90, 5, 80, 5]     ranks: 95 | 85
    order = balanced     the experts, in their new places                    [0, 1, 2, 3] ->
                         the busiest first, each to the rank with the least  [0, 3, 1, 2]

Experts change places, not the program: rows of the router, of the experts' weights and of the optimiser's state of both
are put in another order together, which computes the same.  Which tensors have a row for each expert follows from the
program: from the weights that a layer takes, and from the scores among which its experts are chosen, backwards as long
as operators treat each expert alike (their dims say it; a softmax by what it is made of).  Where they do not (experts
that are chosen in groups, by a batch) the layer stays as it is, and it is said why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import CONTROL, Builder, Eqn, Layout, Mesh, Program, Var, is_float
from mycel.ops import o
from mycel.run import boxes
from mycel.transform import inline

WHOLE = 1 << 30  # equations: no block is larger
ALIKE = (o.full, o.expand)  # what they make is the same along a new dim


# -- which tensors have a row for each expert


class UnevenExperts(Exception):
    """Experts are not treated alike: why."""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts in a step's program: the tensors of the model with a row for each expert, by name with the
    dim; which of them are the experts' own; and why experts cannot change places (empty: they can)."""

    experts: int
    tensors: Mapping[str, int]
    weights: tuple[str, ...]
    fixed: str = ""


def expert_layers(program: Program) -> list[ExpertLayer]:
    """The layers of experts of a program, in its order."""
    flat = inline(program, small=WHOLE)
    search = _RowsOfExperts(flat)
    return [search.layer(eqn) for eqn in flat.main.eqns if eqn.op.for_ranks]


class _RowsOfExperts:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {v: (eqn, i) for eqn in program.main.eqns for i, v in enumerate(eqn.outputs)}
        self.names = Builder()
        self.names.reserve(v.name for v in (*program.inputs, *self.made))

    def layer(self, eqn: Eqn) -> ExpertLayer:
        _, ids, _, *weights = eqn.inputs
        experts = eqn.input_types[3].shape[0]
        own: dict[str, int] = {}
        try:
            for w in weights:
                if isinstance(w, Var):
                    self.follow(w, 0, own)
            tensors = dict(own)
            for scores, dim in self.scores(ids):
                if scores.shape[dim] != experts:
                    raise UnevenExperts(f"they are chosen among {scores.shape[dim]} scores")
                self.follow(scores, dim, tensors)
        except UnevenExperts as why:
            return ExpertLayer(experts, own, tuple(own), str(why))
        return ExpertLayer(experts, tensors, tuple(own))

    def scores(self, ids: Any) -> Iterator[tuple[Var, int]]:
        """What choices are positions in, and along which dim."""
        eqn, _ = self.made.get(ids, (None, 0))
        if eqn is None:
            raise UnevenExperts("who is chosen is given, not computed")
        x = eqn.inputs[0] if eqn.inputs else None
        if isinstance(x, Var) and is_float(x.dtype) and "dim" in eqn.params:
            yield x, eqn.params["dim"]
        elif eqn.op.moves or eqn.op in (o.cast, o.cat, o.stack):
            for v in eqn.vars:
                yield from self.scores(v)
        else:
            raise UnevenExperts(f"{eqn.op.name} computes who is chosen, {eqn.source}")

    def follow(self, x: Var, dim: int, tensors: dict[str, int]) -> None:
        """The tensors of the model whose rows become those of x along a dim, each row by itself."""
        waiting, done = [(x, dim)], set[tuple[Var, int]]()
        while waiting:
            at = waiting.pop()
            if at in done:
                continue
            done.add(at)
            eqn, i = self.made.get(at[0], (None, 0))
            if eqn is None:
                self._collect(*at, tensors)
            else:
                waiting += self._operands(eqn, i, at[1])

    def _collect(self, x: Var, dim: int, tensors: dict[str, int]) -> None:
        role = self.program.role(x)
        if role.kind not in ("parameter", "buffer"):
            raise UnevenExperts(f"a row for each expert is given by {role}")
        if tensors.setdefault(role.name, dim) != dim:
            raise UnevenExperts(f"{role.name} has experts along two dims")

    def _operands(self, eqn: Eqn, i: int, dim: int) -> list[tuple[Var, int]]:
        """The operands with a row for each row of result i along a dim."""
        if eqn.op.dims is None or eqn.op in CONTROL:
            raise UnevenExperts(f"{eqn.op.name} takes them, {eqn.source}")
        fit = eqn.op.fit(list(eqn.input_types), eqn.params)
        letters = [c for c in fit.outs[i][dim] if fit.sizes[c] > 1]
        if len(letters) != 1:
            raise UnevenExperts(f"{eqn.op.name} takes them in groups, {eqn.source}")
        (letter,) = letters
        if fit.flags.get(letter) == "^":
            return self._expanded(eqn, i, dim)
        operands = []
        for x, item in zip(eqn.inputs, fit.ins, strict=True):
            for d, dim_letters in enumerate(item or ()):
                if letter in dim_letters:
                    if any(fit.sizes[c] > 1 for c in dim_letters if c != letter):
                        raise UnevenExperts(f"{eqn.op.name} takes them in groups, {eqn.source}")
                    operands += [(x, d)] if isinstance(x, Var) else []
        if not operands and eqn.op not in ALIKE:
            raise UnevenExperts(f"{eqn.op.name} makes a row for each, {eqn.source}")
        return operands

    def _expanded(self, eqn: Eqn, i: int, dim: int) -> list[tuple[Var, int]]:
        """The same by what an operator is made of."""
        if eqn.op.expand is None:
            raise UnevenExperts(f"{eqn.op.name} mixes them, {eqn.source}")
        with Builder(beside=self.names) as b:
            b.at(eqn)
            outs = eqn.op.expand(*eqn.inputs, **eqn.params)
        self.made.update((v, (inner, k)) for inner in b.eqns for k, v in enumerate(inner.outputs))
        return [((outs if isinstance(outs, tuple) else (outs,))[i], dim)]


# -- who is where


def of_ranks(experts: int, layout: Layout, dim: int, mesh: Mesh) -> list[int]:
    """How many experts each rank has, in the order of the experts: of those that share them."""
    alone = Layout((layout.dims[dim],))
    spans = {boxes.held((experts,), alone, mesh, rank)[0] for rank in range(mesh.world)}
    return [stop - start for start, stop in sorted(spans) if stop > start]


def by_rank(load: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """What the experts of each rank get."""
    loads, start = [], 0
    for size in sizes:
        loads.append(float(sum(load[start : start + size])))
        start += size
    return loads


def balanced(load: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """The experts in an order in which the busiest rank has less to do: the busiest expert first, each to the rank with
    the least so far that has room; as they are where that is no better."""
    ranks: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    for expert in sorted(range(len(load)), key=lambda i: -load[i]):
        rank = min((r for r in range(len(sizes)) if len(ranks[r]) < sizes[r]), key=lambda r: loads[r])
        ranks[rank].append(expert)
        loads[rank] += float(load[expert])
    is_better = max(loads) < max(by_rank(load, sizes))
    return [expert for rank in ranks for expert in sorted(rank)] if is_better else list(range(len(load)))


# -- a step's layers together


@dataclass(frozen=True)
class Placement:
    """What becomes of a layer, or of several that share their experts: what the busiest of its ranks gets of all before
    and after (1 / ranks at best), the new `order` of its experts, or why they stay."""

    layers: tuple[str, ...]
    ranks: int
    before: float
    after: float
    order: tuple[int, ...]
    fixed: str = ""

    @property
    def moves(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    def __str__(self) -> str:
        if self.fixed:
            return f"{self.layers[0]}: experts stay where they are: {self.fixed}"
        return f"{self.layers[0]}: the busiest of {self.ranks} ranks gets {self.before:.1%}, then {self.after:.1%}"


@dataclass(frozen=True)
class SharedExperts:
    """Layers of experts that share tensors, and what their experts get together."""

    names: tuple[str, ...]
    layer: ExpertLayer
    load: torch.Tensor

    def with_(self, other: SharedExperts) -> SharedExperts:
        mine, its = self.layer, other.layer
        fixed = mine.fixed or its.fixed
        if any(mine.tensors.get(name, dim) != dim for name, dim in its.tensors.items()):
            fixed = fixed or "two layers have them along different dims of a tensor"
        layer = replace(mine, tensors={**mine.tensors, **its.tensors}, fixed=fixed)
        return SharedExperts((*self.names, *other.names), layer, self.load + other.load)

    def sizes(self, layouts: Mapping[str, Layout], mesh: Mesh) -> list[int]:
        """How many of them each rank has; one number where all have all."""
        weight = next((w for w in self.layer.weights if w in layouts), None)
        if weight is None:
            return [self.layer.experts]
        return of_ranks(self.layer.experts, layouts[weight], self.layer.tensors[weight], mesh)

    def placed(self, sizes: Sequence[int]) -> Placement:
        amounts = self.load.tolist()
        order = list(range(self.layer.experts)) if self.layer.fixed else balanced(amounts, sizes)
        total = sum(amounts) or 1.0
        before, after = (max(by_rank(x, sizes)) / total for x in (amounts, [amounts[i] for i in order]))
        return Placement(self.names, len(sizes), before, after, tuple(order), self.layer.fixed)


def shared_experts(layers: Sequence[ExpertLayer], loads: Mapping[str, torch.Tensor]) -> list[SharedExperts]:
    """The layers of a step with their loads, by name; those that share tensors are one."""
    groups: list[SharedExperts] = []
    for (name, load), layer in zip(loads.items(), layers, strict=True):
        one = SharedExperts((name,), layer, load)
        for other in [g for g in groups if g.layer.tensors.keys() & layer.tensors.keys()]:
            groups.remove(other)
            one = other.with_(one)
        groups.append(one)
    return groups
