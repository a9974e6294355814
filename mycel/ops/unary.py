"""Functions of one element: exponentials, roots, circles, rounding; gradients hold for complex numbers too."""

from __future__ import annotations

import math

import torch

from mycel.ir import Op, is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.convert import part_dtype
from mycel.ops.pointwise import no_gradient
from mycel.ops.rules import conj, o


def unary(name: str, vjp, *, dtype="float", examples=("f[2,3]", "i64[3]<4"), **facts) -> Op:
    """An operator that is `torch.<name>` of one operand."""
    return op(
        "... -> ...",
        name=name,
        vjp=lambda g, y, x: vjp(g, y, x) if is_float(x.dtype) else (None,),
        dtype=dtype,
        aten=[f"{name}.default"],
        examples=examples,
        **facts,
    )(getattr(torch, name))


def slope(rule):
    """A gradient rule from the derivative as a function of (y, x)."""
    return lambda g, y, x: (o.mul(g, conj(rule(y, x))),)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.neg(g),),
    aten=["neg.default"],
    linear=((0,),),
    examples=["n[2,3]", "c128[3]"],
    c="-{0}",
)
def neg(x):
    """-x"""
    return -x


def unit(x):
    """x / |x|, zero at zero."""
    if not x.dtype.is_complex:
        return sign(x)
    size = abs(x)
    return o.div(x, o.where(o.eq(size, 0), 1, size))


abs = unary("abs", lambda g, y, x: (o.mul(g, unit(x)),), dtype=part_dtype, examples=["n[2,3]", "c128[3]"])
sign = unary("sign", no_gradient, dtype="promote", examples=["a[2,3]"])
captures("aten.sgn.default")(unit)

exp = unary(
    "exp", c="exp({0})", precision="high", vjp=slope(lambda y, x: y), examples=["f[2,3]", "i64[3]<4", "c128[3]"]
)
exp2 = unary("exp2", precision="high", vjp=slope(lambda y, x: o.mul(y, math.log(2))))
expm1 = unary("expm1", precision="high", vjp=slope(lambda y, x: o.add(y, 1)))
log = unary(
    "log", precision="high", vjp=lambda g, y, x: (o.div(g, conj(x)),), examples=["f[2,3]>0", "i64[3]>0", "c128[3]"]
)
log2 = unary(
    "log2", precision="high", vjp=lambda g, y, x: (o.div(g, o.mul(conj(x), math.log(2))),), examples=["f[2,3]>0"]
)
log10 = unary(
    "log10", precision="high", vjp=lambda g, y, x: (o.div(g, o.mul(conj(x), math.log(10))),), examples=["f[2,3]>0"]
)
log1p = unary("log1p", precision="high", vjp=lambda g, y, x: (o.div(g, o.add(conj(x), 1)),), examples=["f[2,3]>0"])

sqrt = unary(
    "sqrt",
    c="sqrt({0})",
    precision="high",
    vjp=lambda g, y, x: (o.div(g, o.mul(conj(y), 2)),),
    examples=["f[2,3]>0", "i64[3]<9", "c128[3]"],
)
rsqrt = unary(
    "rsqrt",
    c="1 / sqrt({0})",
    precision="high",
    vjp=lambda g, y, x: (o.mul(o.mul(g, -0.5), conj(o.mul(o.square(y), y))),),
    examples=["f[2,3]>0", "c128[3]"],
)
reciprocal = unary(
    "reciprocal",
    c="1 / {0}",
    precision="high",
    vjp=slope(lambda y, x: neg(o.square(y))),
    examples=["f[2,3]>0", "i64[3]>0", "c128[3]"],
)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.mul(o.mul(g, 2), conj(x)),),
    examples=["n[2,3]", "c128[3]"],
    precision="high",
    c="{0} * {0}",
)
def square(x):
    """x * x"""
    return x * x


@captures("aten.square.default")
def _square(x):
    return square(o.cast(x, dtype=torch.int64) if x.dtype == torch.bool else x)


sin = unary("sin", slope(lambda y, x: o.cos(x)), examples=["f[2,3]", "c128[3]"], c="sin({0})")
cos = unary("cos", slope(lambda y, x: neg(sin(x))), examples=["f[2,3]", "c128[3]"], c="cos({0})")
tan = unary("tan", precision="high", vjp=slope(lambda y, x: o.add(square(y), 1)), examples=["f[2,3]~1.2", "c128[3]"])
asin = unary(
    "asin", precision="high", vjp=slope(lambda y, x: rsqrt(o.sub(1, square(x)))), examples=["f[2,3]~0.9", "c128[3]"]
)
acos = unary(
    "acos",
    precision="high",
    vjp=slope(lambda y, x: neg(rsqrt(o.sub(1, square(x))))),
    examples=["f[2,3]~0.9", "c128[3]"],
)
atan = unary("atan", slope(lambda y, x: reciprocal(o.add(square(x), 1))), examples=["f[2,3]", "c128[3]"])
sinh = unary("sinh", precision="high", vjp=slope(lambda y, x: o.cosh(x)), examples=["f[2,3]", "c128[3]"])
cosh = unary("cosh", precision="high", vjp=slope(lambda y, x: sinh(x)), examples=["f[2,3]", "c128[3]"])
asinh = unary("asinh", slope(lambda y, x: rsqrt(o.add(square(x), 1))), examples=["f[2,3]", "c128[3]"])
acosh = unary("acosh", slope(lambda y, x: rsqrt(o.sub(square(x), 1))), examples=["f[2,3]>1"])
atanh = unary("atanh", slope(lambda y, x: reciprocal(o.sub(1, square(x)))), examples=["f[2,3]~0.9", "c128[3]"])

erf = unary("erf", slope(lambda y, x: o.mul(exp(neg(square(x))), 2 / math.sqrt(math.pi))))
erfc = unary("erfc", slope(lambda y, x: o.mul(exp(neg(square(x))), -2 / math.sqrt(math.pi))))
erfinv = unary(
    "erfinv",
    precision="high",
    vjp=slope(lambda y, x: o.mul(exp(square(y)), math.sqrt(math.pi) / 2)),
    examples=["f[2,3]~0.9"],
)
lgamma = unary("lgamma", precision="high", vjp=slope(lambda y, x: o.digamma(x)), examples=["f[2,3]>0"])
digamma = unary("digamma", precision="high", vjp=slope(lambda y, x: o.polygamma(x, n=1)), examples=["f[2,3]>0"])


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, n: (o.mul(g, o.polygamma(x, n=n + 1)),),
    dtype="float",
    examples=["f[2,3]>0, n=1", "f[2,3]>0, n=0", "f[3]>0, n=2"],
    precision="high",
)
def polygamma(x, *, n):
    """The n-th derivative of digamma"""
    return torch.polygamma(n, x)


@captures("aten.polygamma.default")
def _(n, x):
    return polygamma(x, n=n)


ceil = unary("ceil", no_gradient, dtype="promote", examples=["n[2,3]"])
floor = unary("floor", no_gradient, dtype="promote", examples=["n[2,3]"])
trunc = unary("trunc", no_gradient, dtype="promote", examples=["n[2,3]"])


@op("... -> ...", vjp=no_gradient, aten=["round.default", "round.decimals"], examples=["n[2,3]", "f[2,3], decimals=1"])
def round(x, *, decimals=0):
    """x rounded to so many decimals, halves to even"""
    return torch.round(x) if decimals == 0 else torch.round(x, decimals=decimals)


@captures("aten.frac.default")
def _(x):
    return o.sub(x, trunc(x))


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, nan=0.0, posinf=None, neginf=None: (o.where(o.isfinite(x), g, 0),),
    examples=["f[2,3]", "f[2,3], nan=1.0, posinf=2.0, neginf=-2.0", "i64[3]"],
)
def nan_to_num(x, *, nan=0.0, posinf=None, neginf=None):
    """x with numbers for what is none"""
    return torch.nan_to_num(x, nan, posinf, neginf)


@captures("aten.nan_to_num.default")
def _(x, nan=None, posinf=None, neginf=None):
    return nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@captures("aten.deg2rad.default")
def _(x):
    return o.mul(x, math.pi / 180)


@captures("aten.rad2deg.default")
def _(x):
    return o.mul(x, 180 / math.pi)


@captures("aten.sinc.default")
def _(x):
    t = o.mul(x, math.pi)
    safe = o.where(o.eq(t, 0), 1, t)
    return o.where(o.eq(t, 0), 1, o.div(sin(safe), safe))


@captures("aten.logit.default", "aten.special_logit.default")
def _(x, eps=None):
    x = x if is_float(x.dtype) else o.cast(x, dtype=torch.get_default_dtype())
    x = x if eps is None else o.clamp(x, eps, 1 - eps)
    return log(o.div(x, o.sub(1, x)))
