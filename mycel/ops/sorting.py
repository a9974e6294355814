"""Order along one dim: it stays whole, the others may be split.  Values carry gradients, positions do not."""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import letters, normal_dim, o
from mycel.ops.slicing import along


def chosen_vjp(g, y, x, *, dim, **_):
    """Values go back to the positions they came from."""
    return (None if g[0] is None else o.gather_grad(g[0], y[1], shape=tuple(x.shape), dim=dim),)


def topk_dims(x, *, k, dim, largest=True, sorted=True):
    """The dim is whole."""
    if not 0 <= k <= x.shape[dim]:
        raise ValueError(f"topk: k is {k}, but dim {dim} of {list(x.shape)} is {x.shape[dim]}")
    names = letters(x.ndim, "nk")
    out = along(names, dim, "k")
    return f"{along(names, dim, 'n^')} -> {out}, {out}", {"k": k}


@op(
    topk_dims,
    vjp=chosen_vjp,
    dtype=("first", torch.int64),
    examples=["f[2,6,4]!, k=3, dim=1", "i64[6]!, k=2, dim=0, largest=False", "f[4,6]!, k=6, dim=1, sorted=False"],
    apart=True,
)
def topk(x, *, k, dim, largest=True, sorted=True):
    """(the k largest or smallest values along a dim, their positions)"""
    return torch.topk(x, k, dim, largest, sorted)


def alone(x):
    """Order within a single element: itself, at 0."""
    return x, o.full(0, shape=(), dtype=torch.int64)


@captures("aten.topk.default")
def _topk(x, k, dim=-1, largest=True, sorted=True):
    return topk(x, k=k, dim=normal_dim(dim, x.ndim), largest=largest, sorted=sorted) if x.ndim else alone(x)


def sort_dims(x, *, dim, descending=False, stable=False):
    """The dim is whole."""
    names = letters(x.ndim, "n")
    out = along(names, dim, "n")
    return f"{along(names, dim, 'n^')} -> {out}, {out}"


@op(
    sort_dims,
    vjp=chosen_vjp,
    dtype=("first", torch.int64),
    examples=["f[2,6,4]!, dim=1", "i64[6], dim=0, descending=True, stable=True", "f[4,6]!, dim=1, descending=True"],
    apart=True,
)
def sort(x, *, dim, descending=False, stable=False):
    """(the values in order along a dim, where they were)"""
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


@captures("aten.sort.default")
def _sort(x, dim=-1, descending=False):
    return sort(x, dim=normal_dim(dim, x.ndim), descending=descending) if x.ndim else alone(x)


@captures("aten.sort.stable")
def _sort_stable(x, *, stable=False, dim=-1, descending=False):
    return sort(x, dim=normal_dim(dim, x.ndim), descending=descending, stable=bool(stable)) if x.ndim else alone(x)


@captures("aten.argsort.default")
def _argsort(x, dim=-1, descending=False):
    return _sort(x, dim, descending)[1]


@captures("aten.argsort.stable")
def _argsort_stable(x, *, stable, dim=-1, descending=False):
    return _sort_stable(x, stable=stable, dim=dim, descending=descending)[1]


def searchsorted_dims(ordered, x, *, right=False):
    """One ordered vector for all of x, or one for each row."""
    return "n^, ... -> ..." if ordered.ndim == 1 else "... n^, ... k -> ... k"


@op(
    searchsorted_dims,
    dtype=torch.int64,
    flops=lambda d: d.rows * getattr(d, "k", 1) * d.n.bit_length(),
    examples=["f[6]!, f[2,3]", "i64[6]<1, i64[4], right=True", "f[4,1]!, f[4,6]", "f[6]!, f[]"],
    apart=True,
)
def searchsorted(ordered, x, *, right=False):
    """Where each value of x would be inserted to keep the last dim of `ordered` in order."""
    return torch.searchsorted(ordered.contiguous(), x.contiguous(), right=right)


@captures("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def _searchsorted(ordered, x, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        ordered = o.gather(ordered, sorter, dim=ordered.ndim - 1)
    x = x if hasattr(x, "dtype") else o.full(x, shape=(), dtype=ordered.dtype)
    found = searchsorted(ordered, x, right=right or side == "right")
    return o.cast(found, dtype=torch.int32) if out_int32 else found


@captures("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def _bucketize(x, boundaries, *, out_int32=False, right=False):
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)
