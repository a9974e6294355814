"""Along one dim, which stays whole: running sums, products and extremes, and the softmax family."""

from __future__ import annotations

import math

import torch

from mycel.ir import is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.convert import cast_to
from mycel.ops.reduce import elements, kept, over, total_dtype
from mycel.ops.rules import conj, letters, normal_dim, normal_dims, o


def along(inputs=1, outputs=1):
    """The dims rule of operators that keep the shape and need one dim whole."""

    def rule(x, *_, dim):
        names = [c + "^" if i == dim else c for i, c in enumerate(letters(x.ndim))]
        item = " ".join(names) or "..."
        return f"{', '.join([item] * inputs)} -> {', '.join([item] * outputs)}"

    return rule


def backwards(running, x, dim):
    """A running value from the end."""
    return o.flip(running(o.flip(x, dims=(dim,)), dim=dim), dims=(dim,)) if x.ndim else x


EXAMPLES = ["f[2,3,4], dim=1", "f[2,3], dim=0", "f[], dim=0"]


@op(
    along(),
    vjp=lambda g, y, x, *, dim: (backwards(o.cumsum, g, dim),),
    dtype=total_dtype,
    linear=((0,),),
    examples=["n[2,3,4], dim=1", "bool[6], dim=0", *EXAMPLES, "c128[2,3], dim=1"],
    apart=True,
    precision="high",
)
def cumsum(x, *, dim):
    """Running sums along dim"""
    return torch.cumsum(x, dim)


@captures("aten.cumsum.default")
def _(x, dim, *, dtype=None):
    return cumsum(cast_to(x, dtype), dim=normal_dim(dim, x.ndim))


def cumprod_vjp(g, y, x, *, dim):
    """Before the first zero: sums of g y over x; at it: the sums as if it were one; behind it: nothing."""
    if not x.ndim:
        return (g,)
    zero = o.eq(x, 0)
    seen = cumsum(zero, dim=dim)
    first = o.logical_and(zero, o.eq(seen, 1))
    before = o.div(backwards(cumsum, o.mul(g, conj(y)), dim), conj(o.where(zero, 1, x)))
    without = cumprod(o.where(first, 1, x), dim=dim)
    at = backwards(cumsum, o.mul(g, conj(without)), dim)
    return (o.where(first, at, o.where(o.eq(seen, 0), before, 0)),)


@op(
    along(),
    vjp=cumprod_vjp,
    dtype=total_dtype,
    examples=["n[2,3,4], dim=1", *EXAMPLES, "c128[2,3], dim=1"],
    apart=True,
    precision="high",
)
def cumprod(x, *, dim):
    """Running products along dim"""
    return torch.cumprod(x, dim)


@captures("aten.cumprod.default")
def _(x, dim, *, dtype=None):
    return cumprod(cast_to(x, dtype), dim=normal_dim(dim, x.ndim))


def logcumsumexp_grad_expand(g, y, x, *, dim):
    """exp(x) * running sums from the end of g exp(-y): linear in g, but it may overflow where the kernel does not."""
    return o.mul(o.exp(x), backwards(o.cumsum, o.mul(g, o.exp(o.neg(y))), dim))


@op(
    lambda g, y, x, *, dim: (
        ", ".join([along()(x, dim=dim).split(" -> ")[0]] * 3) + " -> " + along()(x, dim=dim).split(" -> ")[1]
    ),
    expand=logcumsumexp_grad_expand,
    flops=lambda d: 8 * elements(d),
    followed=0,
    examples=["f[2,3,4], f[2,3,4], f[2,3,4], dim=1", "f[6], f[6], f[6], dim=0"],
)
def logcumsumexp_grad(g, y, x, *, dim):
    """The cotangent of x under logcumsumexp: in logarithms, positive and negative g apart, but for complex numbers."""
    if g.is_complex():
        return torch.exp(torch.logcumsumexp((g.log() - y).flip(dim), dim).flip(dim) + x)
    up, down = (
        torch.exp(torch.logcumsumexp((torch.where(v > 0, v, 0).log() - y).flip(dim), dim).flip(dim) + x)
        for v in (g, -g)
    )
    return up - down


@op(
    along(),
    vjp=lambda g, y, x, *, dim: (logcumsumexp_grad(g, conj(y), conj(x), dim=dim) if x.ndim else g,),
    flops=lambda d: 4 * elements(d),
    examples=EXAMPLES,
    apart=True,
    precision="high",
)
def logcumsumexp(x, *, dim):
    """Running logarithms of sums of exponentials along dim"""
    return torch.logcumsumexp(x, dim)


@captures("aten.logcumsumexp.default")
def _(x, dim):
    return logcumsumexp(x, dim=normal_dim(dim, x.ndim))


def running_extreme_vjp(g, y, x, *, dim):
    """To the element each running extreme came from."""
    if g[0] is None or not x.ndim:
        return (g[0],)
    zeros = o.full(0, shape=tuple(x.shape), dtype=x.dtype)
    return (o.scatter_add(zeros, y[1], g[0], dim=dim),)


RUNNING = ["n[2,3,4]!, dim=1", "f[6,2]!, dim=0", "f[], dim=0"]


@op(along(outputs=2), vjp=running_extreme_vjp, dtype=("first", torch.int64), examples=RUNNING)
def cummax(x, *, dim):
    """Running maxima along dim, and where they are"""
    return torch.cummax(x, dim)


@op(along(outputs=2), vjp=running_extreme_vjp, dtype=("first", torch.int64), examples=RUNNING)
def cummin(x, *, dim):
    """Running minima along dim, and where they are"""
    return torch.cummin(x, dim)


@captures("aten.cummax.default")
def _(x, dim):
    return cummax(x, dim=normal_dim(dim, x.ndim))


@captures("aten.cummin.default")
def _(x, dim):
    return cummin(x, dim=normal_dim(dim, x.ndim))


def shifted(x, dims):
    """x less its largest over dims, and that largest: exponentials of the first do not overflow."""
    top = o.stop_gradient(o.amax(x, dims=dims, keepdim=True))
    top = o.where(o.isinf(top), 0, top)
    return o.sub(x, top), top


def logsumexp_expand(x, *, dims, keepdim=False):
    """log(sum(exp(x - max))) + max"""
    low, top = shifted(x, dims)
    y = o.add(o.log(o.sum(o.exp(low), dims=dims, keepdim=True)), top)
    return y if keepdim or not dims else o.reshape(y, shape=tuple(n for i, n in enumerate(x.shape) if i not in dims))


def logsumexp_vjp(g, y, x, *, dims, keepdim=False):
    """g softmax(x)"""
    return (o.mul(kept(g, x, dims, keepdim), conj(o.exp(o.sub(x, kept(y, x, dims, keepdim))))),)


@op(
    over("^"),
    vjp=logsumexp_vjp,
    expand=logsumexp_expand,
    flops=lambda d: 4 * elements(d),
    examples=["f[2,3,4], dims=(1,)", "f[2,3,4], dims=(0,2), keepdim=True", "f[4,6], dims=(0,1)", "f[], dims=()"],
    precision="high",
)
def logsumexp(x, *, dims, keepdim=False):
    """The logarithm of the sum of exponentials over dims"""
    return torch.logsumexp(x, dims, keepdim)


@captures("aten.logsumexp.default")
def _(x, dim, keepdim=False):
    x = x if is_float(x.dtype) else cast_to(x, torch.get_default_dtype())
    return logsumexp(x, dims=normal_dims(dim, x.ndim), keepdim=keepdim)


def softmax_expand(x, *, dim):
    """exp(x - max) / sum"""
    e = o.exp(shifted(x, (dim,))[0]) if x.ndim else o.exp(o.sub(x, x))
    return o.div(e, o.sum(e, dims=(dim,), keepdim=True)) if x.ndim else e


@op(
    along(inputs=2),
    expand=lambda g, y, *, dim: o.mul(y, o.sub(g, o.sum(o.mul(g, y), dims=(dim,) if y.ndim else (), keepdim=True))),
    flops=lambda d: 4 * elements(d),
    linear=((0,),),
    examples=["f[2,3,4], f[2,3,4], dim=1", "f[2,3], f[2,3], dim=0", "f[], f[], dim=0"],
)
def softmax_grad(g, y, *, dim):
    """The cotangent of x where y = softmax(x)"""
    return torch.ops.aten._softmax_backward_data.default(g, y, dim, y.dtype)


@op(
    along(),
    vjp=lambda g, y, x, *, dim: (softmax_grad(g, y, dim=dim),),
    expand=softmax_expand,
    flops=lambda d: 5 * elements(d),
    examples=EXAMPLES,
    precision="high",
)
def softmax(x, *, dim):
    """exp(x) over its sum along dim"""
    return torch.softmax(x, dim)


@captures("aten._softmax.default")
def _(x, dim, half_to_float=False):
    return softmax(cast_to(x, torch.float32) if half_to_float else x, dim=normal_dim(dim, x.ndim))


@captures("aten._safe_softmax.default")
def _(x, dim, dtype=None):
    dim = normal_dim(dim, x.ndim)
    empty = o.all(o.eq(x, -math.inf), dims=(dim,) if x.ndim else (), keepdim=True)
    return o.where(empty, 0, softmax(o.where(empty, 0, cast_to(x, dtype)), dim=dim))  # whose gradient is a number, too


def log_softmax_expand(x, *, dim):
    """x - max - log(sum(exp(x - max)))"""
    if not x.ndim:
        return o.sub(x, x)
    low = shifted(x, (dim,))[0]
    return o.sub(low, o.log(o.sum(o.exp(low), dims=(dim,), keepdim=True)))


@op(
    along(inputs=2),
    expand=lambda g, y, *, dim: o.sub(g, o.mul(o.exp(y), o.sum(g, dims=(dim,) if y.ndim else (), keepdim=True))),
    flops=lambda d: 4 * elements(d),
    linear=((0,),),
    examples=["f[2,3,4], f[2,3,4], dim=1", "f[2,3], f[2,3], dim=0", "f[], f[], dim=0"],
)
def log_softmax_grad(g, y, *, dim):
    """The cotangent of x where y = log_softmax(x)"""
    return torch.ops.aten._log_softmax_backward_data.default(g, y, dim, y.dtype)


@op(
    along(),
    vjp=lambda g, y, x, *, dim: (log_softmax_grad(g, y, dim=dim),),
    expand=log_softmax_expand,
    flops=lambda d: 5 * elements(d),
    examples=EXAMPLES,
    precision="high",
)
def log_softmax(x, *, dim):
    """The logarithm of softmax"""
    return torch.log_softmax(x, dim)


@captures("aten._log_softmax.default")
def _(x, dim, half_to_float=False):
    return log_softmax(cast_to(x, torch.float32) if half_to_float else x, dim=normal_dim(dim, x.ndim))
