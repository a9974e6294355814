"""Reductions: dims go, and what is left is a sum, a mean, a product, a spread of what was there.

`dims` are counted from the front and always given; they are empty only for a tensor without dims.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.convert import cast_to, part_dtype
from mycel.ops.pointwise import power
from mycel.ops.rules import conj, letters, normal_dims, o
from mycel.ops.unary import unit


def over(flag, none=False):
    """The dims rule of a reduction whose reduced letters carry this flag; with `none` there may be none."""

    def rule(x, *, dims, keepdim=False, **_):
        if not x.ndim:
            return "... -> ..."
        if not dims and not none:
            raise ValueError(f"no dims to reduce are named for {x}")
        names = letters(x.ndim)
        left = [c + flag if i in dims else c for i, c in enumerate(names)]
        right = ["1" if i in dims else c for i, c in enumerate(names) if keepdim or i not in dims]
        return f"{' '.join(left)} -> {' '.join(right)}"

    return rule


def elements(d):
    """One operation for each element read."""
    return math.prod(vars(d).values())


def kept(y, x, dims, keepdim):
    """A reduced value with its reduced dims as dims of one."""
    return y if keepdim or not dims else o.reshape(y, shape=tuple(1 if i in dims else n for i, n in enumerate(x.shape)))


def spread(g, x, dims, keepdim):
    """A reduced value copied along its reduced dims."""
    return o.expand(kept(g, x, dims, keepdim), shape=tuple(x.shape)) if dims else g


def count_of(x, dims):
    """How many elements each result is made of."""
    return math.prod(x.shape[d] for d in dims)


def total_dtype(x):
    """The dtype of sums and products: integers widen to int64."""
    return x.dtype if is_float(x.dtype) else torch.int64


def sum_in_c(at, x, *, dims, keepdim=False):
    """Added up in twice the bits."""
    outer = iter([i for d, i in enumerate(at.index) if not keepdim or d not in dims])
    index = [f"r{d}" if d in dims else next(outer) for d in range(x.ndim)]
    loops = " ".join(f"for (int64_t r{d} = 0; r{d} < {x.shape[d]}; r{d}++)" for d in dims)
    wide = "double" if is_float(x.dtype) else "int64_t"
    return f"({{ {wide} total = 0; {loops} total += {at(0, index)}; total; }})"


EXAMPLES = ["f[2,3,4], dims=(1,)", "f[2,3,4], dims=(0,2), keepdim=True", "f[4,6], dims=(0,1)", "f[], dims=()"]


@op(
    over("+"),
    vjp=lambda g, y, x, *, dims, keepdim=False: (spread(g, x, dims, keepdim),),
    dtype=total_dtype,
    flops=elements,
    linear=((0,),),
    examples=[*EXAMPLES, "n[2,3,4], dims=(1,)", "bool[4,6], dims=(0,1)", "c128[2,3], dims=(1,)"],
    precision="high",
    c=sum_in_c,
)
def sum(x, *, dims, keepdim=False):
    """The sum over dims"""
    return torch.sum(x, dims, keepdim)


@captures("aten.sum.default", "aten.sum.dim_IntList")
def total(x, dim=None, keepdim=False, *, dtype=None):
    """The sum as torch takes its arguments."""
    return cast_to(sum(cast_to(x, dtype), dims=normal_dims(dim, x.ndim), keepdim=keepdim), dtype)


@captures("aten.nansum.default")
def _(x, dim=None, keepdim=False, *, dtype=None):
    return total(o.where(o.isnan(x), 0, x) if is_float(x.dtype) else x, dim, keepdim, dtype=dtype)


@captures("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _(x, dim=None):
    return total(o.ne(x, 0), dim)


def mean_vjp(g, y, x, *, dims, keepdim=False, count=None):
    """Every element has the same share."""
    return (spread(o.div(g, count or count_of(x, dims)), x, dims, keepdim),)


def mean_of_rows(at, x, *, dims, keepdim=False, count=None):
    """The sum of the rows that count, over their number."""
    total = sum(at.covered(x, 0), dims=dims, keepdim=keepdim)
    return o.div(total, at.share(count_of(x, dims), total.dtype))


@op(
    lambda x, *, dims, keepdim=False, count=None: over("^" if count is None else "+")(x, dims=dims, keepdim=keepdim),
    vjp=mean_vjp,
    expand=lambda x, *, dims, keepdim=False, count=None: o.div(
        sum(x, dims=dims, keepdim=keepdim), count or count_of(x, dims)
    ),
    flops=elements,
    linear=((0,),),
    examples=[*EXAMPLES, "f[2,3,4], dims=(0,2), keepdim=True, count=8", "f[4,6], dims=(0,1), count=24"],
    precision="high",
    averages=True,
    of_rows=mean_of_rows,
    c=lambda at, x, *, count=None, **over: f"{sum_in_c(at, x, **over)} / {count or count_of(x, over['dims'])}",
)
def mean(x, *, dims, keepdim=False, count=None):
    """The mean over dims; with `count`, x's share in the mean of that many elements: shares of parts sum up"""
    n = math.prod([x.shape[d] for d in dims])
    y = torch.mean(x, dims, keepdim)
    return y if count is None or count == n else y * (n / count)


@captures("aten.mean.default", "aten.mean.dim")
def average(x, dim=None, keepdim=False, *, dtype=None):
    """The mean as torch takes its arguments."""
    dims = normal_dims(dim, x.ndim)
    return mean(cast_to(x, dtype), dims=dims, keepdim=keepdim, count=count_of(x, dims))


def prod_vjp(g, y, x, *, dims, keepdim=False):
    """The product of the others: of a lone zero, the product without it; of several zeros, none has a share."""
    zero = o.eq(x, 0)
    rest = prod(o.where(zero, 1, x), dims=dims, keepdim=True)
    lone = o.where(o.eq(sum(zero, dims=dims, keepdim=True), 1), rest, 0)
    others = o.where(zero, lone, o.div(kept(y, x, dims, keepdim), o.where(zero, 1, x)))
    return (o.mul(kept(g, x, dims, keepdim), conj(others)),)


@op(
    over("^"),
    vjp=prod_vjp,
    dtype=total_dtype,
    flops=elements,
    examples=[
        *EXAMPLES,
        "n[2,3,4], dims=(1,)",
        "i64[4,6]<2, dims=(0,)",
        "bool[4,6], dims=(0,1)",
        "c128[2,3], dims=(1,)",
    ],
    precision="high",
    of_rows=lambda at, x, **params: o.prod(at.covered(x, 1), **params),
)
def prod(x, *, dims, keepdim=False):
    """The product over dims"""
    for d in reversed(dims):
        x = torch.prod(x, d, keepdim)
    return torch.prod(x) if dims == () else x


@captures("aten.prod.default", "aten.prod.dim_int")
def _(x, dim=None, keepdim=False, *, dtype=None):
    return prod(cast_to(x, dtype), dims=normal_dims(dim, x.ndim), keepdim=keepdim)


def deviations(x, dims):
    """x less its mean over dims."""
    return o.sub(x, mean(x, dims=dims, keepdim=True, count=count_of(x, dims)))


def freedom(x, dims, correction):
    """What the squared deviations are divided by."""
    return max(count_of(x, dims) - correction, 0)


def per_freedom(y, x, dims, correction):
    """y / freedom, as IEEE divides where there is none."""
    n = freedom(x, dims, correction)
    return o.div(y, n) if n else o.mul(y, math.inf)


def var_vjp(g, y, x, *, dims, correction=1, keepdim=False):
    """2 (x - mean) / freedom"""
    return (o.mul(per_freedom(o.mul(kept(g, x, dims, keepdim), 2), x, dims, correction), deviations(x, dims)),)


def var_expand(x, *, dims, correction=1, keepdim=False):
    """sum (x - mean)**2 / freedom"""
    return per_freedom(sum(o.square(deviations(x, dims)), dims=dims, keepdim=keepdim), x, dims, correction)


def var_of_rows(at, x, *, dims, correction=1, keepdim=False):
    """Of the rows that count, over their number less `correction`."""
    far = o.sub(x, mean_of_rows(at, x, dims=dims, keepdim=True))
    total = sum(o.square(at.covered(far, 0)), dims=dims, keepdim=keepdim)
    return o.div(total, o.clamp(o.sub(at.share(count_of(x, dims), total.dtype), correction), 0, None))


def std_of_rows(at, x, **params):
    """Its root, whose gradient is zero where it is."""
    spread = var_of_rows(at, x, **params)
    none = o.eq(spread, 0)
    return o.where(none, 0, o.sqrt(o.where(none, 1, spread)))


@op(
    over("^"),
    vjp=var_vjp,
    expand=var_expand,
    flops=lambda d: 4 * elements(d),
    examples=[
        "f[2,3,4], dims=(1,)",
        "f[2,3,4], dims=(0,2), correction=0, keepdim=True",
        "f[4,6], dims=(0,1), correction=2.5",
    ],
    precision="high",
    of_rows=var_of_rows,
)
def var(x, *, dims, correction=1, keepdim=False):
    """The variance over dims: squared deviations from the mean, over their number less `correction`"""
    return torch.var(x, dims, correction=correction, keepdim=keepdim)


@captures("aten.var.correction")
def variance(x, dim=None, *, correction=None, keepdim=False):
    """The variance as torch takes its arguments; complex numbers have that of both parts."""
    if x.dtype.is_complex:
        parts = [variance(part, dim, correction=correction, keepdim=keepdim) for part in (o.real(x), o.imag(x))]
        return o.add(*parts)
    return var(x, dims=normal_dims(dim, x.ndim), correction=1 if correction is None else correction, keepdim=keepdim)


@captures("aten.var_mean.correction")
def _(x, dim=None, *, correction=None, keepdim=False):
    return variance(x, dim, correction=correction, keepdim=keepdim), average(x, dim, keepdim)


def std_vjp(g, y, x, *, dims, correction=1, keepdim=False):
    """That of the variance, over 2 y; zero where y is."""
    g_var = o.where(o.eq(y, 0), 0, o.div(g, o.mul(y, 2)))
    return var_vjp(g_var, y, x, dims=dims, correction=correction, keepdim=keepdim)


@op(
    over("^"),
    vjp=std_vjp,
    expand=lambda x, *, dims, correction=1, keepdim=False: o.sqrt(
        var_expand(x, dims=dims, correction=correction, keepdim=keepdim)
    ),
    flops=lambda d: 4 * elements(d),
    examples=["f[2,3,4], dims=(1,)", "f[2,3,4], dims=(0,2), correction=0, keepdim=True", "f[4,6], dims=(0,1)"],
    precision="high",
    of_rows=std_of_rows,
)
def std(x, *, dims, correction=1, keepdim=False):
    """The standard deviation over dims, the root of `var`"""
    return torch.std(x, dims, correction=correction, keepdim=keepdim)


@captures("aten.std.correction")
def deviation(x, dim=None, *, correction=None, keepdim=False):
    """The standard deviation as torch takes its arguments."""
    if x.dtype.is_complex:
        return o.sqrt(variance(x, dim, correction=correction, keepdim=keepdim))
    return std(x, dims=normal_dims(dim, x.ndim), correction=1 if correction is None else correction, keepdim=keepdim)


@captures("aten.std_mean.correction")
def _(x, dim=None, *, correction=None, keepdim=False):
    return deviation(x, dim, correction=correction, keepdim=keepdim), average(x, dim, keepdim)


def norm_vjp(g, y, x, *, ord=2, dims, keepdim=False):
    """(|x| / y)**(ord - 1) in the direction of x, zero where y is; of an infinite order, shared among the extremes"""
    g, y = kept(g, x, dims, keepdim), kept(y, x, dims, keepdim)
    if ord == 0:
        return (None,)
    if ord == 2:
        return (o.mul(x, o.where(o.eq(y, 0), 0, o.div(g, y))),)
    if ord == 1:
        return (o.mul(g, unit(x)),)
    if math.isinf(ord):
        best = o.eq(o.abs(x), y)
        return (o.mul(unit(x), o.where(best, o.div(g, sum(best, dims=dims, keepdim=True)), 0)),)
    slope = power(o.abs(x), ord - 1)
    slope = o.where(o.eq(x, 0), 0, slope) if ord < 1 else slope
    return (o.mul(o.mul(unit(x), slope), o.where(o.eq(y, 0), 0, o.div(g, power(y, ord - 1)))),)


def norm_expand(x, *, ord=2, dims, keepdim=False):
    """(sum |x|**ord)**(1 / ord), and its limits"""
    over_dims = {"dims": dims, "keepdim": keepdim}
    if ord == 0:
        return sum(cast_to(o.ne(x, 0), part_dtype(x)), **over_dims)
    if math.isinf(ord):
        return (o.amax if ord > 0 else o.amin)(o.abs(x), **over_dims)
    size = x if ord == 2 and not x.dtype.is_complex else o.abs(x)
    return power(sum(power(size, ord), **over_dims), 1 / ord)


@op(
    over("^"),
    vjp=norm_vjp,
    expand=norm_expand,
    dtype=part_dtype,
    flops=lambda d: 2 * elements(d),
    examples=[
        *EXAMPLES, "f[2,3,4], ord=1, dims=(1,)", "f[2,3,4], ord=inf, dims=(1,2)", "f[2,3], ord=0, dims=(1,)",
        "f[2,3], ord=-inf, dims=(1,), keepdim=True", "f[2,3], ord=3, dims=(0,)", "f[2,3], ord=1.5, dims=(1,)",
        "f[2,3], ord=0.5, dims=(1,)", "c128[2,3], dims=(1,)",
    ],
    precision="high",
    of_rows=lambda at, x, ord=2, **params: o.norm(at.covered(x, 0 if ord >= 0 else math.inf), ord=ord, **params),
)  # fmt: skip
def norm(x, *, ord=2, dims, keepdim=False):
    """The vector norm of this order over dims"""
    return torch.linalg.vector_norm(x, ord, dims, keepdim)


@captures("aten.linalg_vector_norm.default")
def _(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    ord = int(ord) if isinstance(ord, float) and ord.is_integer() else ord
    return norm(cast_to(x, dtype), ord=ord, dims=normal_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype")
def _(x, p=None, dim=None, keepdim=False, *, dtype=None):
    return norm(cast_to(x, dtype), ord=2 if p is None else p, dims=normal_dims(dim, x.ndim), keepdim=keepdim)


@captures("aten.dist.default")
def _(x, y, p=2):
    d = o.sub(x, y)
    return norm(d, ord=p, dims=tuple(range(d.ndim)))
