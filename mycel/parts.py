"""The parts of a model that this rank holds, and what a plan says of the inputs of its step.

    batch          as the plan says; every rank is given the whole batch and takes its part
    parameters     as the plan says; under ZeRO-3 split once more, and gathered for use
    their state    as the parameters; under ZeRO split once more

A parameter's own tensor becomes the rank's part when a step is first compiled, or was made as one (`adopt`); the shape of the whole is remembered,
and shown again whenever the model is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.capture import Captured
from mycel.ir import Layout, Program, part
from mycel.lower import Distributed
from mycel.ops.collective import COMMUNICATORS
from mycel.optimizers import Bound
from mycel.plan import Plan
from mycel.run import boxes, part_of, world


@dataclass(frozen=True)
class Joined:
    """A step as one program on one device: inputs before `base` are the batch, the model's state and the random key (and the loss scale), then come
    optimiser state and hyper-parameters of the groups; `body` is the block that holds forward and backward."""

    captured: Captured
    program: Program
    groups: tuple[Bound, ...]
    results: int
    base: int
    body: str


@dataclass
class Parts:
    """The parameters and optimiser state of one rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    ranks: Any = None  # the communicator
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of whole parameters and buffers
    layouts: dict[str, Layout] = field(default_factory=dict)  # in which they are held
    stored: dict[int, Layout] = field(default_factory=dict)  # of a trained parameter's state, by its id
    is_split: bool = False

    def __post_init__(self) -> None:
        self.shapes = {name: x.shape for name, x in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters show the shapes of the whole, without data: for capture."""
        if not self.is_split:
            yield
            return
        held = {name: x.data for name, x in self._tensors() if not self.layouts.get(name, Layout()).is_whole}
        by_name = dict(self._tensors())
        try:
            for name, x in held.items():
                by_name[name].data = _without_data(x, self.shapes[name])
            yield
        finally:
            for name, x in held.items():
                by_name[name].data = x

    def adopt(self, shapes: Mapping[str, torch.Size], layouts: Mapping[str, Layout]) -> None:
        """The model was made in parts: these are the shapes of the whole, and how its tensors lie."""
        self.shapes, self.layouts, self.is_split = dict(shapes), dict(layouts), True

    # -- layouts of a step's inputs ------------------------------------------------------------------------------------------

    def given(self, made: Joined) -> tuple[dict[int, Layout], frozenset[int]]:
        """Layouts of the step's inputs by position, those that are not whole; and the parameters that are gathered for use."""
        c, types = made.captured, [v.type for v in made.program.inputs]
        arguments = len(set(c.leaves))
        given = {i: self.plan.batch_layout(v.name, v.type.shape) for i, v in enumerate(made.program.inputs[:arguments])}
        ids = {id(x): name for name, x in self._tensors()}
        state = {arguments + i: ids.get(id(places[0].read()), "") for i, places in enumerate(c.state)}
        used = self.plan.parameter_layouts(self.shapes)
        trained = {i: p for g in made.groups for i, p in zip(g.group.params, g.params, strict=True)}
        stored = {i: self.plan.stored(used[state[i]], types[i].shape) if self.plan.zero else used[state[i]] for i in trained}
        self.stored |= {id(p): stored[i] for i, p in trained.items()}
        if not self.is_split:
            self.layouts = parameter_layouts(self.plan, self.shapes, {state[i] for i in trained}, {n: ids[id(x)] for n, x in self._tensors()})
        given |= {i: self.layouts[name] for i, name in state.items() if name}
        split = frozenset(i for i, name in state.items() if name and (i in trained or self.layouts[name] != used[name]))
        at = made.base
        for g in made.groups:
            for slot in g.group.slots:
                for i in g.group.params:
                    given[at] = stored[i] if g.group.slot_type(slot, types[i]) == types[i] else Layout()
                    at += 1
            at += len(g.group.hyper)
        return {i: layout for i, layout in given.items() if not layout.is_whole}, split if self.plan.zero == 3 else frozenset()

    # -- what this rank holds ---------------------------------------------------------------------------------------------

    def split(self, device: torch.device) -> None:
        """Parameters become this rank's parts, once; `device` is where its ranks speak from."""
        if self.ranks is None:
            self.ranks = world(self.plan.mesh, device)
        if self.is_split:
            return
        self.is_split = True
        done: set[int] = set()
        for name, x in self._tensors():
            layout = self.layouts[name]
            if not layout.is_whole and id(x) not in done:
                done.add(id(x))
                x.data = part_of(x.data, layout, self.plan.mesh, self.ranks.rank).clone()

    def state(self, group: Bound) -> list[torch.Tensor]:
        """A group's optimiser state in parts, made where there is none yet."""
        for p in group.params:
            for slot in group.group.slots:
                if slot != "step" and slot not in self.optimizer.state[p]:
                    shape = boxes.stored(tuple(self.shape(p)), self.stored[id(p)], self.plan.mesh)
                    self.optimizer.state[p][slot] = torch.zeros(shape, dtype=p.dtype, device=p.device)
        return group.state(self.optimizer)

    def shape(self, p: torch.nn.Parameter) -> torch.Size:
        """Of the whole of a parameter."""
        return self.shapes[next(name for name, x in self._tensors() if x is p)]

    def gather(self, x: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
        """The whole of a tensor of which this rank has a part; all ranks call it."""
        for dim, axes in enumerate(layout.dims):
            for k in range(len(axes) - 1, -1, -1):  # the fastest first: each axis has padding of its own
                x = self.ranks.all_gather(x, axes[k : k + 1], dim).narrow(dim, 0, part(shape[dim], axes[:k], self.plan.mesh))
        return x

    def taken(self, code: Callable[..., Any], found: Distributed, arguments: int) -> Callable[..., Any]:
        """The code on this rank's parts of the batch, its first inputs, with its ranks to speak to."""
        mesh, ranks = self.plan.mesh, self.ranks
        split = [(i, layout) for i, layout in enumerate(found.inputs[:arguments]) if not layout.is_whole]

        def run(*inputs: Any) -> Any:
            values = list(inputs)
            for i, layout in split:
                values[i] = part_of(values[i], layout, mesh, ranks.rank)
            COMMUNICATORS.append(ranks)
            try:
                return code(*values)
            finally:
                COMMUNICATORS.pop()

        return run


def parameter_layouts(plan: Plan, shapes: Mapping[str, torch.Size], trained: Collection[str], one: Mapping[str, str]) -> dict[str, Layout]:
    """How tensors are held, by name: as the plan says, trained ones under ZeRO-3 split further; `one` says which of tied names counts."""
    used = plan.parameter_layouts(shapes)
    split = {name: plan.stored(used[name], shapes[name]) for name in trained} if plan.zero == 3 else {}
    return {name: split.get(one[name], used[one[name]]) for name in shapes}


def _without_data(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of the whole's shape that holds nothing."""
    x = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    x.untyped_storage().resize_(0)
    return x
