"""Comparing and choosing: truth values of elements, logic and bits, and the choices between elements they make."""

from __future__ import annotations

import torch

from mycel.ir import Op, op, promote
from mycel.ops.capture_rules import captures
from mycel.ops.convert import cast_to
from mycel.ops.pointwise import partials
from mycel.ops.rules import o


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["eq.Tensor", "eq.Scalar"],
    examples=["a[2,3], a[3]", "i64[3], 2", "i64[3], f32[3]"],
    commutes="always",
    scalars=(0, 1),
    c="{0} == {1}",
)
def eq(a, b):
    """a == b"""
    return a == b


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["ne.Tensor", "ne.Scalar"],
    examples=["a[2,3], a[3]", "i64[3], 2"],
    commutes="always",
    scalars=(0, 1),
    c="{0} != {1}",
)
def ne(a, b):
    """a != b"""
    return a != b


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["lt.Tensor", "lt.Scalar"],
    examples=["n[2,3], n[3]", "f[3], 0.1"],
    scalars=(0, 1),
    c="{0} < {1}",
)
def lt(a, b):
    """a < b"""
    return a < b


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["le.Tensor", "le.Scalar"],
    examples=["n[2,3], n[3]", "f[3], 0.1"],
    scalars=(0, 1),
    c="{0} <= {1}",
)
def le(a, b):
    """a <= b"""
    return a <= b


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["gt.Tensor", "gt.Scalar"],
    examples=["n[2,3], n[3]", "f[3], 0.1"],
    scalars=(0, 1),
    c="{0} > {1}",
)
def gt(a, b):
    """a > b"""
    return a > b


@op(
    "..., ... -> ...",
    dtype=torch.bool,
    aten=["ge.Tensor", "ge.Scalar"],
    examples=["n[2,3], n[3]", "f[3], 0.1"],
    scalars=(0, 1),
    c="{0} >= {1}",
)
def ge(a, b):
    """a >= b"""
    return a >= b


def predicate(name: str, examples=("a[2,3]",)) -> Op:
    """An operator that is the truth value `torch.<name>` of one operand."""
    return op("... -> ...", name=name, dtype=torch.bool, aten=[f"{name}.default"], examples=examples)(
        getattr(torch, name)
    )


isnan = predicate("isnan")
isinf = predicate("isinf")
isfinite = predicate("isfinite")
logical_not = predicate("logical_not")


def logic(name: str) -> Op:
    """An operator that is the truth value `torch.<name>` of two operands."""
    return op(
        "..., ... -> ...",
        name=name,
        dtype=torch.bool,
        aten=[f"{name}.default"],
        examples=["a[2,3], a[3]", "bool[2,1], i64[3]"],
        commutes="always",
    )(getattr(torch, name))


logical_and = logic("logical_and")
logical_or = logic("logical_or")
logical_xor = logic("logical_xor")


@captures("aten.isposinf.default")
def _(x):
    return eq(x, float("inf"))


@captures("aten.isneginf.default")
def _(x):
    return eq(x, -float("inf"))


@captures("aten.isreal.default")
def _(x):
    return eq(o.imag(x), 0) if x.dtype.is_complex else o.full(True, shape=tuple(x.shape), dtype=torch.bool)


@captures("aten.signbit.default")
def _(x):
    return logical_or(lt(x, 0), lt(o.reciprocal(x), 0)) if x.dtype.is_floating_point else lt(x, 0)


@op("... -> ...", aten=["bitwise_not.default"], examples=["i64[2,3]", "bool[4]", "u8[3]"])
def bitwise_not(x):
    """~x"""
    return ~x


BITS = ["i64[2,3], i64[3]", "bool[2,3], bool[3]", "u8[4], 3", "i32[2], i64[2]"]


@op(
    "..., ... -> ...",
    aten=["bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor"],
    examples=BITS,
    commutes="always",
)
def bitwise_and(a, b):
    """a & b"""
    return a & b


@op(
    "..., ... -> ...",
    aten=["bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_or.Scalar_Tensor"],
    examples=BITS,
    commutes="always",
)
def bitwise_or(a, b):
    """a | b"""
    return a | b


@op(
    "..., ... -> ...",
    aten=["bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor"],
    examples=BITS,
    commutes="always",
)
def bitwise_xor(a, b):
    """a ^ b"""
    return a ^ b


@op(
    "..., ... -> ...",
    aten=["bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "bitwise_left_shift.Scalar_Tensor",
          "__lshift__.Tensor", "__lshift__.Scalar"],
    examples=["i64[2,3], i64[3]<5", "i32[4], 2", "1, i64[3]<9"],
)  # fmt: skip
def shift_left(a, b):
    """a << b"""
    return a << b


@op(
    "..., ... -> ...",
    aten=["bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "bitwise_right_shift.Scalar_Tensor",
          "__rshift__.Tensor", "__rshift__.Scalar"],
    examples=["i64[2,3], i64[3]<5", "i32[4], 2", "64, i64[3]<5"],
)  # fmt: skip
def shift_right(a, b):
    """a >> b"""
    return a >> b


@op(
    "..., ..., ... -> ...",
    vjp=partials(None, lambda g, y, c, a, b: o.where(c, g, 0), lambda g, y, c, a, b: o.where(c, 0, g)),
    dtype=lambda c, a, b: promote(a, b),
    linear=((1, 2),),
    examples=[
        "bool[2,3], n[2,3], n[2,3]", "bool[2,1], f[3], 0.5", "bool[3], 1.0, 0.0", "bool[2,3], i64[3], 1.5",
        "bool[2], f[3,2], f[1,2]", "bool[2], f32[2], f64[]",
    ],
    scalars=(1, 2),
    c="{0} ? {1} : {2}",
)  # fmt: skip
def where(c, a, b):
    """a where c holds, else b"""
    return torch.where(c, a, b)


@captures("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def choose(c, x, y):
    """where, on a condition of any dtype."""
    return where(c if c.dtype == torch.bool else ne(c, 0), x, y)


@captures("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _(x, mask, value):
    return cast_to(choose(mask, value, x), x.dtype)


@captures("aten.heaviside.default")
def _(x, at_zero):
    return where(eq(x, 0), at_zero, cast_to(gt(x, 0), x.dtype))


def share(g, a, b, beats):
    """The cotangent of a, one of two of which the better was taken: half of it between equals."""
    return where(eq(a, b), o.mul(g, 0.5), where(beats(a, b), g, 0))


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: share(g, a, b, gt), lambda g, y, a, b: share(g, b, a, gt)),
    aten=["maximum.default"],
    examples=["n[2,3], n[2,3]", "f[2,1,4], f[3,1]", "i64[3], f32[3]"],
    commutes="exactly",
    c="{0} > {1} || {0} != {0} ? {0} : {1}",
)
def maximum(a, b):
    """The larger of two"""
    return torch.maximum(a, b)


@op(
    "..., ... -> ...",
    vjp=partials(lambda g, y, a, b: share(g, a, b, lt), lambda g, y, a, b: share(g, b, a, lt)),
    aten=["minimum.default"],
    examples=["n[2,3], n[2,3]", "f[2,1,4], f[3,1]", "i64[3], f32[3]"],
    commutes="exactly",
    c="{0} < {1} || {0} != {0} ? {0} : {1}",
)
def minimum(a, b):
    """The smaller of two"""
    return torch.minimum(a, b)


@captures("aten.fmax.default")
def _(x, y):
    return where(logical_or(ge(x, y), isnan(y)), x, y)


@captures("aten.fmin.default")
def _(x, y):
    return where(logical_or(le(x, y), isnan(y)), x, y)


def inside(g, y, x, lo, hi):
    """The cotangent where x is within its bounds, bounds included."""
    if lo is None or hi is None:
        return where(le(x, hi) if lo is None else ge(x, lo), g, 0)
    return where(logical_and(ge(x, lo), le(x, hi)), g, 0)


@op(
    "..., ..., ... -> ...",
    vjp=partials(
        inside,
        lambda g, y, x, lo, hi: where(lt(x, lo) if hi is None else logical_and(lt(x, lo), lt(lo, hi)), g, 0),
        lambda g, y, x, lo, hi: where(gt(x, hi) if lo is None else logical_or(gt(x, hi), lt(hi, lo)), g, 0),
    ),
    examples=[
        "n[2,3], -1, 1", "f[2,3], None, 0.5", "f[2,3], 0.0, None", "f[2,3], f[3], f[2,1]", "f[2,3], f[3], None",
        "f[2,3], None, f[3]", "i64[3], 0.5, None",
    ],
)  # fmt: skip
def clamp(x, lo, hi):
    """x held between lo and hi; None is no bound"""
    return torch.clamp(x, lo, hi)


@captures("aten.clamp.default", "aten.clamp.Tensor")
def _(x, min=None, max=None):
    return clamp(x, min, max)


@captures("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _(x, lo):
    return clamp(x, lo, None)


@captures("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _(x, hi):
    return clamp(x, None, hi)
