"""What a rank holds of a model whose stages, or sub-models, others hold too: its own, and the rest for as long as it is
asked for.

hold       from the first step on a rank holds what its stages use, and lets go of the rest
complete   inside, every rank has its part of what all hold
averaged   inside, replicas hold the mean of their models
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.errors import PlanError
from mycel.held_model import HeldModel
from mycel.ir import Layout, Role, Type
from mycel.lower import Pipeline
from mycel.model_guards import guard
from mycel.plan import STAGE_AXIS
from mycel.run import boxes


@dataclass
class HeldByStage(HeldModel):
    """A model of which this rank may hold some stages alone."""

    # in a pipeline: the places along its axis that hold a tensor, by name; what is not there, all do
    owners: dict[str, tuple[int, ...]] = field(default_factory=dict)
    users: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of these, those whose forward steps read it
    starts: tuple[str, ...] = ()  # where stages begin, once a batch has decided it
    messages: Any = None  # what messages keep (`message_state.py`), by role in `held`
    _completed: bool = False
    _average: dict[int, torch.Tensor] = field(default_factory=dict)  # of replicas' models, by id

    @property
    def place(self) -> int:
        """Of this rank along the axis of stages."""
        return self.plan.mesh.index(self.ranks.rank, (STAGE_AXIS,))

    def is_own(self, name: str) -> bool:
        """Does this rank hold a tensor of the model?"""
        return not self.owners or self.place in self.owners.get(name, (self.place,))

    def hold(self, pipeline: Pipeline) -> None:
        """From now on this rank holds what its stages use."""
        owners = self.owners_under(pipeline)
        if self.owners and owners != self.owners:
            other = next(name for name in owners if owners[name] != self.owners.get(name))
            raise PlanError(
                f"the stages of this batch would hold other parameters than those of the first one: {other}\n"
                "  try       stages: by the names of modules, or batches of one shape"
            )
        if not self.owners:
            guard(self, True)
        self.owners, self.users = owners, self._by_all_names(pipeline.users)
        self._let_go()

    def owners_under(self, pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
        """The places that hold each tensor, by all its names."""
        return self._by_all_names(pipeline.owners)

    def _by_all_names(self, by_role: Mapping[Role, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        known = {role.name: places for role, places in by_role.items() if role.kind in ("parameter", "buffer")}
        by_id = {id(x): name for name, x in reversed(list(self.tensors())) if name in known}
        return {name: known[by_id[id(x)]] for name, x in self.tensors() if id(x) in by_id}

    def _let_go(self) -> None:
        """What other stages hold is not here."""
        for name, x in self.tensors():
            if not self.is_own(name):
                x.data = torch.zeros((), dtype=x.dtype, device=x.device).expand(self.shapes[name])  # one number
                self.optimizer.state.pop(x, None)
        kept = self.messages.held if self.messages is not None else {}
        for role in [role for role in kept if not self.is_own(role.of)]:
            del kept[role]

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Inside, every rank has its part of what all stages hold; all ranks enter it.  What it is at the end, those
        who hold it keep."""
        if not self.owners or self._completed:
            yield
            return
        self._completed = True
        try:
            self._fetch()
            yield
        finally:
            self._completed = False
            self._let_go()

    def evaluating(self, call: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
        """A call that is made with what this rank holds, or with what all stages do (`is_whole`); of replicas with the
        mean of their models."""

        def run(*args: Any) -> Any:
            with self.complete() if is_whole else contextlib.nullcontext(), self.averaged():
                return call(*args)

        return run

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, all ranks hold the mean of the replicas' models; all ranks enter it.  It is computed once between two
        steps."""
        if self.plan.synced() is None:
            yield
            return
        here = [x for name, x in self.tensors() if self._completed or self.is_own(name)]
        own = {id(x): x for x in here if x.is_floating_point() and self.is_trained(x)}
        self._average |= {i: self.gather_mean(x.data) for i, x in own.items() if i not in self._average}
        held = {i: x.data for i, x in own.items()}
        try:
            for i, x in own.items():
                x.data = self._average[i]
            yield
        finally:
            for i, x in own.items():
                x.data = held[i]

    def moved(self) -> None:
        """A step was taken: averages are of before."""
        self._average.clear()

    # -- of gradients

    def norm(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """Of gradients that lie as their parameters do, whoever holds them: of the ranks that step together, all of
        which call this.  Each element is counted by one of those that hold it."""
        names, mesh = {id(x): name for name, x in self.tensors()}, self.plan.mesh
        at, axes = mesh.coordinates(self.ranks.rank), [a for a in self.plan.replica.mesh.axes if a != STAGE_AXIS]
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for p, g in gradients.items():
            name = names.get(id(p), "")
            layout, shape = self.layouts.get(name, Layout()), tuple(self.shapes.get(name, p.shape))
            is_first = not self.owners or self.place == self.owners.get(name, (0,))[0]
            if is_first and not any(at[axis] for axis in axes if axis not in layout.axes):
                sizes = shape if layout.is_whole else boxes.extents(boxes.held(shape, layout, mesh, self.ranks.rank))
                own = g[tuple(map(slice, sizes))]
                squares += (
                    torch.linalg.vector_norm(own, dtype=torch.promote_types(g.dtype, torch.float32)).double().square()
                )
        kinds = [g.dtype for g in gradients.values()]
        return self._summed(squares).sqrt().to(functools.reduce(torch.promote_types, kinds, torch.float32))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks that step together."""
        return self.ranks.all_reduce(x, self.plan.replica.mesh.axes)

    # -- what others hold

    def whole_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """All of a parameter or buffer, whoever holds it; all ranks call this."""
        layout, x = self.lies(name, x), x.detach()
        if name in self.owners and not self._completed:
            x = self._from_first(name, x, x.dtype)
        return self.gather(x, layout, self.shapes[name])

    def _fetch(self) -> None:
        """What others hold, from the first of them."""
        done: set[int] = set()
        for name, x in self.tensors():
            if name not in self.owners or id(x) in done:
                continue
            done.add(id(x))
            held = self._from_first(name, x.data, x.dtype)
            if not self.is_own(name):
                x.data = held
        params = dict(self.model.named_parameters())
        roles = [role for role in self.slots if role.kind == "state" and role.of in params]
        there = torch.tensor([role.name in self.optimizer.state.get(params[role.of], {}) for role in roles])
        there = self._most(there.int()).bool()
        for role, is_there in zip(roles, there.tolist(), strict=True):
            if is_there and role.of in self.owners:
                state = self.optimizer.state[params[role.of]]
                held = self._from_first(role.of, state.get(role.name), self.slots[role][1].dtype, role)
                if not self.is_own(role.of):
                    state[role.name] = held
        self._fetch_messages()

    def _fetch_messages(self) -> None:
        """What messages of parameters of other stages keep, by the same ranks of those."""
        kept = self.messages.held if self.messages is not None else {}
        kinds = ("error", "velocity", "delayed", "outer")
        roles = [role for role in self.slots if role.kind in kinds and role.of in self.owners]
        if not roles:
            return
        there = self._most(torch.tensor([int(role in kept) for role in roles])).bool()
        for role in itertools.compress(roles, there.tolist()):
            held = self._from_first(role.of, kept.get(role), self.slots[role][1].dtype, role)
            kept.setdefault(role, held)

    def _most(self, counts: torch.Tensor) -> torch.Tensor:
        """The largest over all stages."""
        return self.ranks.all_reduce(counts, (STAGE_AXIS,), ">")

    def whole_from_first(self, name: str, held: Any, type: Type) -> torch.Tensor:
        """Something that is kept of a tensor of the model, whole, as the first of those who hold it have it; all ranks
        call this, and know its type."""
        role, holders = Role("state", "whole", of=name), self._holders()
        for each in holders:
            each.slots[role] = Layout.whole(type.ndim), type
        try:
            return self._from_first(name, held, type.dtype, role)
        finally:
            for each in holders:
                del each.slots[role]

    def _holders(self) -> Sequence[HeldModel]:
        """What is known here of how the model is held, by this rank and by others."""
        return [self]

    def _lying(self, name: str, role: Role | None) -> tuple[Layout, tuple[int, ...]]:
        """How a tensor of the model lies, or of what is kept of it that with a role; and the shape of its whole."""
        if role is None:
            return self.layouts[name], tuple(self.shapes[name])
        layout, type = self.slots[role]
        return layout, type.shape

    def _from_first(self, name: str, held: Any, dtype: torch.dtype, role: Role | None = None) -> torch.Tensor:
        """This rank's part of a tensor of the model (or of what is kept of it), as the first of those who hold it
        have it."""
        first, (layout, whole) = self.owners[name][0], self._lying(name, role)
        shape = boxes.stored(whole, layout, self.plan.mesh)
        own = held if self.place == first else torch.zeros(tuple(shape), dtype=dtype, device=self.ranks.device)
        return self.ranks.all_gather(own.unsqueeze(0).to(self.ranks.device), (STAGE_AXIS,), 0)[first].clone()
