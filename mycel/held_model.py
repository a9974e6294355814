"""The tensors of a model as one rank holds them: how they lie, how they are shown whole to capture, and gathered.

A parameter's own tensor becomes the rank's part; the shape of the whole is remembered, and shown again whenever the
model is captured.  Of replicas, ranks that take steps of their own, the mean of what they hold stands for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.ir import MEAN, Layout, Role, Type, part
from mycel.ops.collective import COMMUNICATORS
from mycel.plan import Plan
from mycel.run.rendezvous import seat


@dataclass
class HeldModel:
    """A model, its optimiser, and the plan by which ranks hold parts of them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    ranks: Any = None  # the communicator
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of whole parameters and buffers
    layouts: dict[str, Layout] = field(default_factory=dict)  # in which they are held
    # of each piece of state: how it lies, and its type as a whole
    slots: dict[Role, tuple[Layout, Type]] = field(default_factory=dict)
    is_split: bool = False
    _open: int = 0

    def __post_init__(self) -> None:
        self.shapes = {name: x.shape for name, x in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers as they are held, by all their names."""
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the model may be called and asked for its state: whoever does it knows that it is in parts."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters show the shapes of the whole, without data: for capture."""
        if not self.is_split:
            yield
            return
        with self.opened():
            yield from self._shown()

    def _shown(self) -> Iterator[None]:
        held = {name: x.data for name, x in self.tensors() if not self.layouts.get(name, Layout()).is_whole}
        by_name = dict(self.tensors())
        try:
            for name, x in held.items():
                by_name[name].data = without_data(x, self.shapes[name])
            yield
        finally:
            for name, x in held.items():
                by_name[name].data = x

    @property
    def written(self) -> Plan:
        """The plan of all ranks."""
        return self.plan

    @property
    def rank(self) -> int:
        """Of this process in the mesh of the plan, also before it speaks to the others."""
        return int(self.ranks.rank) if self.ranks is not None else seat().rank

    def meet(self, everyone: Any) -> None:
        """From now on this rank speaks to these: all ranks of the plan."""
        self.ranks = everyone

    def connected(self, code: Callable[..., Any], what: str = "a step") -> Callable[..., Any]:
        """The code with its ranks to speak to; `what` it is, as others are told.  Islands in it call modules, in which
        whole tensors lie meanwhile."""

        def run(*inputs: Any) -> Any:
            COMMUNICATORS.append(self.ranks)
            try:
                with self.ranks.calling(what, often=True), self.opened():
                    return code(*inputs)
            finally:
                COMMUNICATORS.pop()

        return run

    def calling(self, what: str, often: bool = False) -> contextlib.AbstractContextManager[None]:
        """What the user calls, as others are told."""
        return self.ranks.calling(what, often) if self.ranks is not None else contextlib.nullcontext()

    def gather(self, x: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
        """The whole of a tensor of which this rank has a part, or a summand; all ranks call it."""
        for axis, kind in layout.partial:
            if kind != MEAN:
                is_small = x.is_floating_point() and x.itemsize == 1  # which nobody adds up
                x = self.ranks.all_reduce(x.float() if is_small else x, (axis,), kind).to(x.dtype)
            elif x.is_floating_point():
                wide = torch.promote_types(x.dtype, torch.float32)
                x = (self.ranks.all_reduce(x.to(wide), (axis,)) / self.plan.mesh[axis]).to(x.dtype)
            else:  # counts: those of the first replica
                x = self.ranks.all_gather(x.unsqueeze(0), (axis,), 0)[0]
        for dim, axes in enumerate(layout.dims):
            for k in range(len(axes) - 1, -1, -1):  # the fastest first: each axis has padding of its own
                size, x = part(shape[dim], axes[:k], self.plan.mesh), self.ranks.all_gather(x, axes[k : k + 1], dim)
                # in memory of its own, without padding: files are written of memory
                x = x if x.shape[dim] == size else x.narrow(dim, 0, size).clone()
        return x

    @property
    def is_open(self) -> bool:
        """Does whoever uses the model now know that it is in parts?"""
        return self._open > 0

    # -- replicas: ranks that take steps of their own

    def apart(self, layout: Layout) -> Layout:
        """How something lies that each replica has one of: over their axis, its mean stands for all."""
        policy = self.plan.synced()
        return layout if policy is None else layout.with_partial(policy.axis, MEAN)

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        policy = self.plan.synced()
        return self.plan.mesh.index(self.ranks.rank, (policy.axis,)) if policy is not None else 0

    def lies(self, name: str, x: torch.Tensor) -> Layout:
        """How ranks hold a tensor of the model: of what trains, replicas have one each."""
        return self.apart(self.layouts[name]) if self.is_trained(x) else self.layouts[name]

    def is_trained(self, x: torch.Tensor) -> bool:
        """May replicas have it differently?"""
        return x.requires_grad or not isinstance(x, torch.nn.Parameter)

    def gather_mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the replicas of what lies alike in them."""
        return self.gather(x, self.apart(Layout.whole(x.ndim)), x.shape)


def without_data(like: torch.Tensor, shape: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """A tensor of this shape, on this device or where another is, that holds nothing."""
    x = torch.empty(tuple(shape), dtype=like.dtype, device=device or like.device)
    x.untyped_storage().resize_(0)
    return x
