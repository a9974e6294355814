"""Arithmetic on elements: one value out for each value in, operands broadcast as torch broadcasts them."""

from __future__ import annotations

import cmath
import math

import torch

from mycel.ir import is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import conj, o, unbroadcast

SCALARS = (bool, int, float, complex)


def partials(*rules):
    """A gradient rule from one rule for each operand; only those of differentiable tensors are computed."""

    def vjp(g, y, *inputs):
        return tuple(
            unbroadcast(rule(g, y, *inputs), x) if rule and is_float(getattr(x, "dtype", torch.bool)) else None
            for rule, x in zip(rules, inputs, strict=True)
        )

    return vjp


def no_gradient(g, y, *inputs, **params):
    """The gradient rule of what is flat almost everywhere."""
    return (None,) * len(inputs)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: g, lambda g, y, a, b: g),
    into=("{0}.add_({1})", "{1}.add_({0})"),
    linear=((0, 1),),
    examples=["n[2,3], n[2,3]", "f[2,1,4], f[3,1]", "f[2,3], 1.5", "i64[2], 1.5", "f32[2], f64[]", "i64[3], f32[3]"],
    commutes="always",
    scalars=(0, 1),
    c="{0} + {1}",
)
def add(a, b):
    """a + b"""
    return a + b


@captures("aten.add.Tensor", "aten.add.Scalar")
def _(x, y, alpha=1):
    return add(x, times(y, alpha))


def times(x, factor):
    """x * factor, without an equation where there is nothing to compute."""
    return x if factor == 1 else x * factor if isinstance(x, SCALARS) else mul(x, factor)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: g, lambda g, y, a, b: o.neg(g)),
    into=("{0}.sub_({1})",),
    linear=((0, 1),),
    examples=["n[2,3], n[2,3]", "f[2,1,4], f[3,1]", "f[2,3], 1.5", "1, f[2,3]", "i64[2], 1.5", "c128[2], f64[2]"],
    scalars=(0, 1),
    c="{0} - {1}",
)
def sub(a, b):
    """a - b"""
    return a - b


@captures("aten.sub.Tensor", "aten.sub.Scalar")
def _(x, y, alpha=1):
    return sub(x, times(y, alpha))


@captures("aten.rsub.Tensor", "aten.rsub.Scalar")
def _(x, y, alpha=1):
    return sub(y, times(x, alpha))


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: o.mul(g, conj(b)), lambda g, y, a, b: o.mul(g, conj(a))),
    aten=["mul.Tensor", "mul.Scalar"],
    into=("{0}.mul_({1})", "{1}.mul_({0})"),
    linear=((0,), (1,)),
    examples=[
        "n[2,3], n[2,3]",
        "f[2,1,4], f[3,1]",
        "f[2,3], 1.5",
        "i64[3], 1.5",
        "c128[2], c128[2]",
        "f64[2,3], c128[3]",
    ],
    commutes="always",
    scalars=(0, 1),
    c="{0} * {1}",
)
def mul(a, b):
    """a * b"""
    return a * b


@captures("aten.addcmul.default")
def _(x, a, b, value=1):
    return add(x, mul(times(a, value), b))


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: o.div(g, conj(b)), lambda g, y, a, b: o.neg(mul(g, conj(o.div(y, b))))),
    dtype="float",
    aten=["div.Scalar", "true_divide.Tensor", "true_divide.Scalar"],
    into=("{0}.div_({1})",),
    linear=((0,),),
    examples=["f[2,3], f[2,3]>0", "n[4,3], f[3]>0", "f[2,3], 2", "3.0, f[2]>0", "i64[3], i64[3]<9", "c128[2], c128[2]"],
    scalars=(0, 1),
    c="{0} / {1}",
)
def div(a, b):
    """a / b"""
    return a / b


@captures("aten.div.Tensor", "aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _(x, y, rounding_mode=None):
    return {None: div, "floor": floor_divide, "trunc": trunc_divide}[rounding_mode](x, y)


@captures("aten.addcdiv.default")
def _(x, a, b, value=1):
    return add(x, div(times(a, value), b))


@op(
    "..., ... -> ...",
    vjp=no_gradient,
    aten=["floor_divide.default", "floor_divide.Scalar"],
    examples=["n[2,3], n[3]>1", "f[2,3], 0.7", "i64[2,3], 2"],
    scalars=(1,),
    padding="ones",
)
def floor_divide(a, b):
    """The largest whole number not above a / b"""
    return torch.div(a, b, rounding_mode="floor")


@op(
    "..., ... -> ...",
    vjp=no_gradient,
    examples=["n[2,3], n[3]>1", "f[2,3], 0.7", "i64[2,3], 2"],
    scalars=(1,),
    padding="ones",
)
def trunc_divide(a, b):
    """a / b rounded towards zero"""
    return torch.div(a, b, rounding_mode="trunc")


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: g, lambda g, y, a, b: o.neg(mul(g, trunc_divide(a, b)))),
    aten=["fmod.Tensor", "fmod.Scalar"],
    examples=["n[2,3], n[3]>1", "f[2,3], 0.7", "i64[2,3], 3"],
    scalars=(1,),
    padding="ones",
)
def fmod(a, b):
    """What division leaves, with the sign of a"""
    return torch.fmod(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: g, lambda g, y, a, b: o.neg(mul(g, floor_divide(a, b)))),
    aten=["remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"],
    examples=["n[2,3], n[3]>1", "f[2,3], 0.7", "i64[2,3], 3", "5, i64[3]>0"],
    scalars=(1,),
    padding="ones",
)
def remainder(a, b):
    """What division leaves, with the sign of b"""
    return torch.remainder(a, b)


def pow_base(g, y, a, b):
    """g * d a**b / d a; zero where b is."""
    if isinstance(b, SCALARS):
        return mul(g, conj(times(power(a, b - 1), b))) if b != 0 else None
    return mul(g, o.where(o.eq(b, 0), 0, conj(mul(pow(a, sub(b, 1)), b))))


def pow_exponent(g, y, a, b):
    """g * d a**b / d b; zero at 0**b for b >= 0."""
    if isinstance(a, SCALARS) and a != 0:
        return mul(g, conj(mul(y, log_of(a))))
    nonnegative = o.ge(o.real(b) if b.dtype.is_complex else b, 0)
    if isinstance(a, SCALARS):
        return mul(g, o.where(nonnegative, 0, -math.inf))
    return mul(g, o.where(o.logical_and(o.eq(a, 0), nonnegative), 0, conj(mul(y, o.log(a)))))


def power_in_c(at, a, b):
    """As torch has it: squares and cubes are products."""
    if b in (2, 3):
        return " * ".join([at(0)] * int(b))
    return f"pow({at(0)}, {at(1)})" if any(is_float(getattr(x, "dtype", torch.bool)) for x in (a, b)) else None


def log_of(a):
    """The logarithm of a literal."""
    return cmath.log(a) if isinstance(a, complex) else math.log(a) if a > 0 else math.nan


@op(
    "..., ... -> ...",
    vjp=partials(pow_base, pow_exponent),
    examples=[
        "f[2,3]>0, f[3]",
        "f[2,3], 3",
        "f[2,3]>0, 1.7",
        "2, f[2,3]",
        "n[2,3], 2",
        "i64[2], 1.5",
        "f[2], 0",
        "c128[2], 3",
    ],
    precision="high",
    scalars=(0, 1),
    c=power_in_c,
)
def pow(a, b):
    """a to the power b"""
    return a**b


POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


@captures("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def power(x, y):
    """x to the power y, by the cheaper operator for common exponents."""
    if not isinstance(y, (int, float)) or not is_float(getattr(x, "dtype", torch.bool)):
        return pow(x, y)
    if y == 1:
        return x
    return getattr(o, POWERS[y])(x) if y in POWERS else pow(x, y)


@op(
    "..., ... -> ...",
    vjp=partials(
        lambda g, y, a, b: mul(g, div(b, add(o.square(a), o.square(b)))),
        lambda g, y, a, b: mul(g, div(o.neg(a), add(o.square(a), o.square(b)))),
    ),
    dtype="float",
    aten=["atan2.default"],
    examples=["f[2,3], f[3]", "i64[3], i64[3]"],
)
def atan2(a, b):
    """The angle of the point (b, a)"""
    return torch.atan2(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: mul(g, div(a, y)), lambda g, y, a, b: mul(g, div(b, y))),
    aten=["hypot.default"],
    examples=["f[2,3], f[3]"],
    precision="high",
)
def hypot(a, b):
    """The length of the vector (a, b)"""
    return torch.hypot(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: mul(g, o.where(o.eq(a, 0), 0, div(y, a))), None),
    dtype="float",
    aten=["copysign.Tensor", "copysign.Scalar"],
    examples=["f[2,3], f[3]", "f[2,3], -1.0", "i64[3], i64[3]"],
)
def copysign(a, b):
    """The size of a with the sign of b"""
    return torch.copysign(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(
        lambda g, y, a, b: mul(g, conj(o.sigmoid(sub(a, b)))), lambda g, y, a, b: mul(g, conj(o.sigmoid(sub(b, a))))
    ),
    aten=["logaddexp.default"],
    examples=["f[2,3], f[3]", "c128[2,3], c128[3]"],
    precision="high",
)
def logaddexp(a, b):
    """log(exp(a) + exp(b))"""
    return torch.logaddexp(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(
        lambda g, y, a, b: mul(g, o.sigmoid(mul(sub(a, b), math.log(2)))),
        lambda g, y, a, b: mul(g, o.sigmoid(mul(sub(b, a), math.log(2)))),
    ),
    aten=["logaddexp2.default"],
    examples=["f[2,3], f[3]"],
    precision="high",
)
def logaddexp2(a, b):
    """log2(2**a + 2**b)"""
    return torch.logaddexp2(a, b)


def xlogy_first(g, y, a, b):
    """g * log(b), zero where 0 * log(b) was taken as zero."""
    if isinstance(b, SCALARS):
        return xlogy(g, b) if b > 0 else o.where(o.eq(a, 0), 0, xlogy(g, b))
    return o.where(o.logical_and(o.eq(a, 0), o.le(b, 0)), 0, xlogy(g, b))


@op(
    "..., ... -> ...",
    vjp=partials(xlogy_first, lambda g, y, a, b: mul(g, div(a, b))),
    dtype="float",
    aten=["xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"],
    examples=["f[2,3], f[3]>0", "f[2,3], 1.5", "2.0, f[3]>0", "i64[3]<4, i64[3]<4"],
    precision="high",
)
def xlogy(a, b):
    """a * log(b), zero where a is"""
    return torch.xlogy(a, b)


@op(
    "..., ..., ... -> ...",
    vjp=partials(
        lambda g, y, a, b, w: sub(g, mul(g, conj(w))),
        lambda g, y, a, b, w: mul(g, conj(w)),
        lambda g, y, a, b, w: mul(g, conj(sub(b, a))),
    ),
    expand=lambda a, b, w: add(a, mul(sub(b, a), w)),
    dtype="first",
    aten=["lerp.Scalar", "lerp.Tensor"],
    examples=["f[2,3], f[2,3], 0.3", "f[2,3], f[3], f[3]", "f[3], f[2,3], 0.8"],
)
def lerp(a, b, w):
    """a + w * (b - a)"""
    return torch.lerp(a, b, w)


@captures("aten.ldexp.Tensor")
def _(x, y):
    return mul(x, pow(2.0, y))


@captures("aten.special_xlog1py.default")
def _(x, y):
    return o.where(o.logical_and(o.eq(x, 0), o.le(y, -1)), 0, mul(x, o.log1p(y)))


@captures("aten.special_entr.default")
def _(x):
    return o.where(o.lt(x, 0), -math.inf, o.neg(xlogy(x, x)))
