"""The largest and the smallest over dims, where they are, and their truth-valued kin any and all."""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.reduce import elements, kept, over
from mycel.ops.rules import letters, normal_dim, normal_dims, o

EXAMPLES = ["n[2,3,4], dims=(1,)", "f[2,3,4], dims=(0,2), keepdim=True", "bool[4,6], dims=(0,1)", "f[], dims=()"]


def extreme_vjp(g, y, x, *, dims, keepdim=False):
    """Shared among the elements that attain the extreme."""
    best = o.eq(x, kept(y, x, dims, keepdim))
    return (o.where(best, o.div(kept(g, x, dims, keepdim), o.sum(best, dims=dims, keepdim=True)), 0),)


@op(over(">"), vjp=extreme_vjp, flops=elements, examples=EXAMPLES)
def amax(x, *, dims, keepdim=False):
    """The largest over dims"""
    return x.max() if len(dims) == x.ndim and not keepdim and x.ndim else torch.amax(x, dims, keepdim)


@op(over("<"), vjp=extreme_vjp, flops=elements, examples=EXAMPLES)
def amin(x, *, dims, keepdim=False):
    """The smallest over dims"""
    return x.min() if len(dims) == x.ndim and not keepdim and x.ndim else torch.amin(x, dims, keepdim)


@captures("aten.amax.default", "aten.max.default")
def largest(x, dim=(), keepdim=False):
    """amax as torch takes its arguments."""
    return amax(x, dims=normal_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.amin.default", "aten.min.default")
def smallest(x, dim=(), keepdim=False):
    """amin as torch takes its arguments."""
    return amin(x, dims=normal_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.aminmax.default")
def _(x, *, dim=None, keepdim=False):
    return smallest(x, dim, keepdim), largest(x, dim, keepdim)


def truth(x):
    """The dtype of truth values: torch keeps uint8."""
    return x.dtype if x.dtype == torch.uint8 else torch.bool


@op(
    over(">", none=True),
    dtype=truth,
    flops=elements,
    examples=["a[2,3,4], dims=(1,)", *EXAMPLES, "u8[4], dims=(0,)", "f[2,3], dims=()"],
)
def any(x, *, dims, keepdim=False):
    """Is one of them true?"""
    return torch.any(x, dims, keepdim)


@op(
    over("<", none=True),
    dtype=truth,
    flops=elements,
    examples=["a[2,3,4], dims=(1,)", *EXAMPLES, "u8[4], dims=(0,)", "f[2,3], dims=()"],
)
def all(x, *, dims, keepdim=False):
    """Are all of them true?"""
    return torch.all(x, dims, keepdim)


def truth_dims(dim, ndim):
    """An empty list of dims is none for any and all, though it means all dims everywhere else in torch."""
    return () if dim is not None and not isinstance(dim, int) and len(dim) == 0 else normal_dims(dim, ndim)


@captures("aten.any.default", "aten.any.dim", "aten.any.dims")
def _(x, dim=None, keepdim=False):
    return any(x, dims=truth_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.all.default", "aten.all.dim", "aten.all.dims")
def _(x, dim=None, keepdim=False):
    return all(x, dims=truth_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.isin.Tensor_Tensor")
def _(x, values, *, assume_unique=False, invert=False):
    pairs = o.reshape(x, shape=(*x.shape, 1)), o.reshape(values, shape=(math.prod(values.shape),))
    last = (x.ndim,)
    return all(o.ne(*pairs), dims=last) if invert else any(o.eq(*pairs), dims=last)


@captures("aten.isin.Tensor_Scalar")
def _(x, value, *, assume_unique=False, invert=False):
    return o.ne(x, value) if invert else o.eq(x, value)


def picks(outputs):
    """The dims rule of a choice along one dim, which stays whole."""

    def rule(x, *, dim, keepdim=False):
        if not x.ndim:
            return "... -> " + ", ".join(["..."] * outputs)
        names = letters(x.ndim)
        left = [c + "^" if i == dim else c for i, c in enumerate(names)]
        right = " ".join("1" if i == dim else c for i, c in enumerate(names) if keepdim or i != dim)
        return f"{' '.join(left)} -> {', '.join([right] * outputs)}"

    return rule


PICKS = ["n[2,3,4]!, dim=1", "f[2,3]!, dim=1, keepdim=True", "f[], dim=0"]


@op(picks(1), dtype=torch.int64, flops=elements, examples=PICKS)
def argmax(x, *, dim, keepdim=False):
    """Where the largest along dim is"""
    return torch.argmax(x, dim, keepdim)


@op(picks(1), dtype=torch.int64, flops=elements, examples=PICKS)
def argmin(x, *, dim, keepdim=False):
    """Where the smallest along dim is"""
    return torch.argmin(x, dim, keepdim)


def position(find, x, dim, keepdim):
    """argmax or argmin along dim, or in the flattened tensor."""
    if dim is not None:
        return find(x, dim=normal_dim(dim, x.ndim), keepdim=keepdim)
    at = find(o.reshape(x, shape=(math.prod(x.shape),)), dim=0)
    return o.reshape(at, shape=(1,) * x.ndim) if keepdim and x.ndim else at


@captures("aten.argmax.default")
def _(x, dim=None, keepdim=False):
    return position(argmax, x, dim, keepdim)


@captures("aten.argmin.default")
def _(x, dim=None, keepdim=False):
    return position(argmin, x, dim, keepdim)


def picked_vjp(g, y, x, *, dim, keepdim=False):
    """All of it to the element picked."""
    if g[0] is None or not x.ndim:
        return (g[0],)
    zeros = o.full(0, shape=tuple(x.shape), dtype=x.dtype)
    return (o.scatter(zeros, kept(y[1], x, (dim,), keepdim), kept(g[0], x, (dim,), keepdim), dim=dim),)


@op(picks(2), vjp=picked_vjp, dtype=("first", torch.int64), flops=elements, examples=PICKS)
def max_dim(x, *, dim, keepdim=False):
    """The largest along dim, and where it is"""
    return torch.max(x, dim, keepdim)


@op(picks(2), vjp=picked_vjp, dtype=("first", torch.int64), flops=elements, examples=PICKS)
def min_dim(x, *, dim, keepdim=False):
    """The smallest along dim, and where it is"""
    return torch.min(x, dim, keepdim)


@captures("aten.max.dim")
def _(x, dim, keepdim=False):
    return max_dim(x, dim=normal_dim(dim, x.ndim), keepdim=keepdim)


@captures("aten.min.dim")
def _(x, dim, keepdim=False):
    return min_dim(x, dim=normal_dim(dim, x.ndim), keepdim=keepdim)
