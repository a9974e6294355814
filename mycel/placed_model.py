"""The parts of a model that this rank holds, where sub-models are on meshes of their own: those of its place.

A rank's plan is that of its place, an ordinary one; what other places hold comes, for as long as it is asked for, in
pieces from their layouts to those that this rank's place would have it in (`plan/across.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel.feed import Arguments, Feed
from mycel.ir import Layout, Program, Role, Type
from mycel.lower import Distributed
from mycel.parts import ShardedModel, UnshardedStep
from mycel.placing import Given
from mycel.plan import Plan
from mycel.plan.across import Placed, transfers
from mycel.run import boxes, part_of
from mycel.run.rendezvous import seat


@dataclass
class PlacedModel(ShardedModel):
    """`placed`: the plan of all; `plan`: that of this rank's place, the how manieth `at` says; `others`: what each
    place would hold of the model, were it to hold all of it."""

    placed: Plan | None = None
    at: int = 0
    others: list[ShardedModel] = field(default_factory=list)

    @staticmethod
    def of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, placed: Plan) -> PlacedModel:
        """Of this process."""
        at = placed.place_at(seat().rank)
        return PlacedModel(model, optimizer, placed.at_place(at), placed=placed, at=at)

    @property
    def written(self) -> Plan:
        assert self.placed is not None
        return self.placed

    @property
    def rank(self) -> int:
        ranks, number = self.written.places[self.at].ranks, seat().rank
        return ranks.index(number) if number in ranks else 0

    @property
    def place(self) -> int:
        return self.at

    def meet(self, everyone: Any) -> None:
        place = self.written.places[self.at]
        self.ranks = everyone.within(place.mesh, place.ranks)

    def given(self, unsharded: UnshardedStep, plan: Plan | None = None) -> Given:
        if not self.others and unsharded.groups:  # a step says how they lie, and it stays so
            self.others = [self._would_hold(i) for i in range(len(self.written.places))]
        for other in self.others:
            other.given(unsharded)
            other.is_split = True
        return super().given(unsharded, plan)

    def _would_hold(self, i: int) -> ShardedModel:
        other = ShardedModel(self.model, self.optimizer, self.written.at_place(i))
        other.shapes = self.shapes
        return other

    def given_at(self, unsharded: UnshardedStep, i: int, program: Program) -> Given:
        """As `given`, of the program of a place."""
        holder = self.others[i] if self.others else self._would_hold(i)
        return holder.given(replace(unsharded, program=program))

    def feed(self, unsharded: UnshardedStep, sharded: Distributed | None, whole: Arguments | None = None) -> Feed:
        """As everywhere; what of the batch this place's program does not read comes as the plan splits it."""
        feed = super().feed(unsharded, sharded, whole)
        read = {v.name for v in sharded.whole.inputs} if sharded is not None else set()
        lie = [
            layout if v.name in read else unsharded.batch_layout(self.plan, v)
            for v, layout in zip(feed.inputs, feed.layouts, strict=True)
        ]
        return replace(feed, layouts=tuple(lie))

    # -- what other places hold

    def _most(self, counts: torch.Tensor) -> torch.Tensor:
        everyone = self.ranks.world
        return everyone.all_reduce(counts, everyone.mesh.axes, ">")

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        everyone = self.ranks.world
        return everyone.all_reduce(x, everyone.mesh.axes)

    def _holders(self) -> Sequence[ShardedModel]:
        return [self, *self.others]

    def _from_first(self, name: str, held: Any, dtype: torch.dtype, role: Role | None = None) -> torch.Tensor:
        first, (layout, shape) = self.owners[name][0], self._lying(name, role)
        is_sum = bool(layout.partial)  # what ranks lost of a message, say: it goes added up
        pieces = [
            piece
            for i in range(len(self.others))
            if i != first
            for piece in transfers(Type(dtype, shape), self._at(first, name, role), self._at(i, name, role))
        ]
        own = torch.zeros((0,) * len(shape), dtype=dtype, device=self.ranks.device)
        if self.at == first:
            own = self.gather(held, layout, shape) if is_sum else held.to(self.ranks.device)
        part = shape if is_sum else tuple(boxes.stored(shape, layout, self.plan.mesh))
        came = self.ranks.world.exchange(own, pieces, part)
        if self.at == first:
            return held.clone()
        return part_of(came, layout, self.plan.mesh, self.ranks.rank).clone() if is_sum else came

    def _at(self, i: int, name: str, role: Role | None) -> Placed:
        place, (layout, shape) = self.written.places[i], self.others[i]._lying(name, role)
        return Placed(Layout.whole(len(shape)) if layout.partial else layout, place.mesh, place.ranks)
