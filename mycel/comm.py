"""What code in a manual region says to the other ranks along an axis.  Everything differentiates; an axis with one rank
sends nothing.

    size(axis)                                how many ranks there are: a Python int
    index(axis)                               which one this is: an i64[]
    part(x, axis, dim=0)                      this rank's part of what all have
    all_reduce(x, axis, op="sum")             the sum (max, min) over the ranks
    all_gather(x, axis, dim=0)                the parts of all, side by side
    reduce_scatter(x, axis, dim=0)            this rank's part of the sum
    all_to_all(x, axis, split, join)          part i of dim `split` to rank i; what comes in side by side along `join`
    permute(x, axis, shift=1)                 to the rank `shift` further, round and round; or to=[…]: from rank i to
                                              rank to[i], -1: to nobody

The gradient of a function of all ranks' values is meant: of `all_reduce`, the sum of all ranks' cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture import TRACING, Open, divided, refuse
from mycel.errors import PlanError
from mycel.hints import OPEN
from mycel.ops import o

KINDS = {"sum": "+", "max": ">", "min": "<"}


def size(axis: str) -> int:
    """How many ranks there are along an axis."""
    region = _region(axis, "size")
    return region.sizes[axis] if region is not None else 1


def index(axis: str) -> torch.Tensor:
    """Which rank along an axis this is."""
    region = _region(axis, "index")
    if region is None:
        return torch.tensor(0)
    rank: torch.Tensor = region.tracer.wrap(region.tracer.apply(lambda: o.place(**_along(region, axis)), (), {}))
    return rank


def part(x: torch.Tensor, axis: str, dim: int = 0) -> torch.Tensor:
    """This rank's part of x along a dim."""
    dim = _dim(x, dim)

    def write(region: Open, v: Any) -> Any:
        divided(v.shape[dim], [axis], region.sizes, f"comm.part along {axis}")
        # never whole on a rank
        if not region.is_inside(v) and region.tracer.eqns is region.eqns and len(region.tracer.manual) == 1:
            return region.enter(v, tuple((axis,) if d == dim else () for d in range(v.ndim)))
        return o.own_part(v, **_along(region, axis), dim=dim)

    return _sent(x, axis, "part", write)


def all_reduce(x: torch.Tensor, axis: str, op: str = "sum") -> torch.Tensor:
    """The sum of x over the ranks along an axis, or its maximum or minimum."""
    if op not in KINDS:
        raise PlanError(f"comm.all_reduce: op={op!r}\n  known     {', '.join(KINDS)}")
    return _sent(x, axis, "all_reduce", lambda region, v: o.all_reduce(v, **_along(region, axis), kind=KINDS[op]))


def all_gather(x: torch.Tensor, axis: str, dim: int = 0) -> torch.Tensor:
    """The parts of all ranks, joined along a dim."""
    dim = _dim(x, dim)
    return _sent(
        x,
        axis,
        "all_gather",
        lambda r, v: o.all_gather(v, **_along(r, axis), dim=dim, size=v.shape[dim] * r.sizes[axis]),
    )


def reduce_scatter(x: torch.Tensor, axis: str, dim: int = 0) -> torch.Tensor:
    """This rank's part along a dim of the sum over the ranks."""
    dim = _dim(x, dim)

    def write(region: Open, v: Any) -> Any:
        divided(v.shape[dim], [axis], region.sizes, f"comm.reduce_scatter along {axis}")
        return o.reduce_scatter(v, **_along(region, axis), dim=dim)

    return _sent(x, axis, "reduce_scatter", write)


def all_to_all(x: torch.Tensor, axis: str, split: int, join: int) -> torch.Tensor:
    """Part i of dim `split` goes to rank i; what comes in is joined along dim `join`."""
    split, join = _dim(x, split), _dim(x, join)
    if split == join:
        raise PlanError(f"comm.all_to_all splits and joins dim {split}\n  try       two different dims")

    def write(region: Open, v: Any) -> Any:
        divided(v.shape[split], [axis], region.sizes, f"comm.all_to_all along {axis}")
        return o.all_to_all(v, **_along(region, axis), split=split, join=join, size=v.shape[join] * region.sizes[axis])

    return _sent(x, axis, "all_to_all", write)


def permute(x: torch.Tensor, axis: str, shift: int = 1, to: Sequence[int] | None = None) -> torch.Tensor:
    """x of rank i arrives at the rank `shift` further, or at rank to[i]; zeros where nothing arrives."""

    def write(region: Open, v: Any) -> Any:
        n = region.sizes[axis]
        there = [(i + shift) % n for i in range(n)] if to is None else list(to)
        receivers = [j for j in there if j != -1]
        if len(there) != n or len(set(receivers)) != len(receivers) or not all(0 <= j < n for j in receivers):
            raise ValueError(
                f"permute: to={there} for {n} ranks along {axis}: each rank sends to one other, or to -1, and gets "
                "from one"
            )
        return o.permute_ranks(v, **_along(region, axis), to=tuple(there))

    return _sent(x, axis, "permute", write)


def _sent(x: torch.Tensor, axis: str, name: str, write: Callable[[Open, Any], Any]) -> torch.Tensor:
    """What an operator of the region makes of x; x itself where the axis has one rank."""
    region = _region(axis, name)
    if region is None:
        return x
    output: torch.Tensor = region.tracer.wrap(region.tracer.apply(lambda v: write(region, v), (x,), {}))
    return output


def _region(axis: str, name: str) -> Open | None:
    """The open region over an axis; None where the axis has one rank."""
    innermost = next((region for axes, region in reversed(OPEN) if axis in axes), 0)
    if innermost == 0:
        what, hint = (
            f"comm.{name} over {axis!r} outside of a manual region over it",
            f"with mycel.manual({axis!r}): around it",
        )
        raise refuse(what, hint) if TRACING else PlanError(f"{what}\n  try       {hint}")
    assert not isinstance(innermost, int)
    return innermost if innermost is not None and axis in innermost.sizes else None


def _along(region: Open, axis: str) -> dict[str, Any]:
    return {"axes": (axis,), "count": region.sizes[axis]}


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dim {dim} of a tensor of {x.ndim} dims")
    return dim % x.ndim
