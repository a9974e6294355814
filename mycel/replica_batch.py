"""The batch of replicas: ranks that step together have a part of it that is a batch of its own.

a batch of 8 rows under [dp.near] on Mesh(dp=2, near=2), sync over dp

dp=0  rows 0:4, a batch of 4 under [near]        dp=1  rows 4:8, a batch of 4 under [near]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.capture import flatten_arguments
from mycel.errors import PlanError
from mycel.feed import Arguments, Feed
from mycel.ir import Layout, Type, Var
from mycel.plan import Plan


def own_batch(plan: Plan, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The part of a batch that is the replica's of a rank; all of it where all ranks step together."""
    policy = plan.synced()
    if policy is None:
        return args, kwargs
    tensors: list[torch.Tensor] = []
    tree = flatten_arguments((args, kwargs), tensors)
    if tree.has_sparse:
        raise PlanError(
            f"sync: {policy.axis}: replicas have rows of the batch, and a sparse tensor of it has none\n"
            f"  try       sync: {{{policy.axis}: every step}}, or a batch of dense tensors"
        )
    place, parts = plan.mesh.index(rank, (policy.axis,)), []
    for path, x in zip(tree.paths(""), tensors, strict=True):
        for dim in split_dims(plan, path, x.shape):
            rows = x.shape[dim] // plan.mesh[policy.axis]
            x = x.narrow(dim, place * rows, rows)
        parts.append(x)
    arguments: Arguments = tree.unflatten(iter(parts))
    return arguments


def fed_whole(plan: Plan, feed: Feed, whole: Arguments) -> Feed:
    """How a replica's part is fed => how it is of the whole batch."""
    policy = plan.synced()
    if policy is None:
        return feed
    tensors: list[torch.Tensor] = []
    paths = flatten_arguments(whole, tensors).paths("")
    given = {leaf: (path, x) for leaf, path, x in zip(feed.leaves, paths, tensors, strict=True)}
    inputs, layouts = [], []
    for v, layout in zip(feed.inputs, feed.layouts, strict=True):
        path, x = given[v.name]
        dims = split_dims(plan, path, x.shape)
        inputs.append(Var(v.name, Type(v.dtype, tuple(x.shape))))
        layouts.append(Layout(tuple((policy.axis, *axes) if d in dims else axes for d, axes in enumerate(layout.dims))))
    return replace(feed, inputs=tuple(inputs), layouts=tuple(layouts))


def split_dims(plan: Plan, path: str, shape: Sequence[int]) -> list[int]:
    """The dims of a batch tensor that replicas have parts of; PlanError where these would not be alike."""
    policy = plan.synced()
    assert policy is not None
    name, count = path.rpartition(".")[2], plan.mesh[policy.axis]
    if isinstance(plan.batch, Mapping) and path.startswith("0"):
        raise PlanError(
            f"sync: {policy.axis}: the plan names tensors of the batch, and one is given without a name\n"
            "  try       step(**batch), with the names of the plan"
        )
    dims = [dim for dim, axes in enumerate(plan.batch_layout(name, shape).dims) if policy.axis in axes]
    for dim in dims:
        if shape[dim] % count:
            raise PlanError(
                f"sync: {policy.axis}: {count} replicas cannot have equal parts of {name} {list(shape)}\n"
                f"  try       {-(-shape[dim] // count) * count} rows, or {shape[dim] // count * count}"
            )
    return dims
