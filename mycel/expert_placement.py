"""Experts placed by their load: a rank whose experts get most of the choices is waited for by all others.

    load                 how many choices each expert of a layer gets        [90, 5, 80, 5]     ranks: 95 | 85
    order = balanced     the experts, in their new places                    [0, 1, 2, 3] ->
                         the busiest first, each to the rank with the least  [0, 3, 1, 2]

Experts change places, not the program: rows of the router, of the experts' weights and of the optimiser's state of both
(`expert_rows.py`) are put in another order together, which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mycel.expert_rows import ExpertLayer
from mycel.ir import Layout, Mesh
from mycel.run import boxes

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


def balanced(load: Sequence[float], sizes: Sequence[int], group: int = 1) -> list[int]:
    """The experts in an order in which the busiest rank has less to do: the busiest expert first, each to the rank with
    the least so far that has room; as they are where that is no better.  So many stay together as a `group`: ranks that
    have several groups get other groups, ranks that share one get others of its experts."""
    if group == 1:
        return _balanced(load, sizes)
    if not any(size % group for size in sizes):
        groups = _balanced(by_rank(load, [group] * (len(load) // group)), [size // group for size in sizes])
        return [group * g + k for g in groups for k in range(group)]
    order: list[int] = []
    for start in range(0, len(load), group):
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        within = [s for s, end in zip(sizes, ends, strict=True) if start < end <= start + group]
        if sum(within) != group:  # a rank has parts of two
            return list(range(len(load)))
        order += [start + k for k in _balanced(load[start : start + group], within)]
    return order


def _balanced(load: Sequence[float], sizes: Sequence[int]) -> list[int]:
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
        if mine.group != its.group and min(mine.group, its.group) > 1:
            fixed = fixed or f"two layers choose them in groups of {mine.group} and of {its.group}"
        tensors = {**mine.tensors, **its.tensors}
        layer = replace(mine, tensors=tensors, group=max(mine.group, its.group), fixed=fixed)
        return SharedExperts((*self.names, *other.names), layer, self.load + other.load)

    def sizes(self, layouts: Mapping[str, Layout], mesh: Mesh) -> list[int]:
        """How many of them each rank has; one number where all have all."""
        weight = next((w for w in self.layer.weights if w in layouts), None)
        if weight is None:
            return [self.layer.experts]
        return of_ranks(self.layer.experts, layouts[weight], self.layer.tensors[weight], mesh)

    def placed(self, sizes: Sequence[int]) -> Placement:
        amounts = self.load.tolist()
        order = list(range(self.layer.experts)) if self.layer.fixed else balanced(amounts, sizes, self.layer.group)
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
