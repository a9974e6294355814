"""The same numbers in another form: another dtype, the parts of complex numbers, out of differentiation's sight."""

from __future__ import annotations

import torch

from mycel.ir import Type, is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import o, unbroadcast

PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
WHOLES = {part: whole for whole, part in PARTS.items()}


def part_dtype(x, *_):
    """The dtype of the parts of complex numbers; of real numbers, their own."""
    return PARTS.get(x.dtype, x.dtype)


def whole_dtype(x, *_):
    """The dtype of complex numbers made of such parts."""
    return WHOLES[x.dtype]


@op(
    "... -> ...",
    types=lambda x, *, dtype: Type(dtype, x.shape),
    vjp=lambda g, y, x, *, dtype: (unbroadcast(g, x),),
    linear=((0,),),
    examples=[
        "a[2,3], dtype=f32",
        "f[2,3], dtype=bf16",
        "f[2,3], dtype=f64",
        "f[3], dtype=i64",
        "f64[2], dtype=c128",
        "i64[2], dtype=bool",
    ],
    precision="kept",
    c="{0}",
)
def cast(x, *, dtype):
    """x as another dtype"""
    return x.to(dtype)


def cast_to(x, dtype):
    """x in a dtype, or as it is."""
    return x if dtype is None or x.dtype == dtype else cast(x, dtype=dtype)


@captures("aten._to_copy.default", "aten.to.dtype")
def _(x, dtype=None, *_, **__):
    return cast_to(x, dtype)


@captures(
    "aten.clone.default", "aten.alias.default", "aten.alias_copy.default", "aten.contiguous.default",
    "aten.positive.default", "aten.lift.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default",
)  # fmt: skip
def _(x, *_, **__):
    return x


@op(
    "... -> ...",
    vjp=lambda g, y, x: (None,),
    write=lambda x, new: o.carry(new[0], x) if is_float(x.dtype) else new[0],
    aten=["detach.default", "detach_copy.default"],
    linear=((0,),),
    examples=["a[2,3]"],
    free=True,
    precision="kept",
    moves=True,
    c="{0}",
)
def stop_gradient(x):
    """x, a constant to differentiation"""
    return x.detach()


def no_third_derivative(g):
    """What torch's autograd is told that asks for one."""
    raise RuntimeError(
        "a third derivative of a torch.autograd.Function that calls itself in its backward is not followed\n"
        "  try       a backward in torch's own functions"
    )


@op("... -> ...", examples=["f[2,3]"], precision="kept")
def third_derivative(x):
    """x, whose gradient would be a third derivative of a Function that calls itself in its backward: there is none"""
    y = x.clone()
    if y.requires_grad:
        y.register_hook(no_third_derivative)
    return y


@op(
    "..., ... -> ...",
    dtype="first",
    vjp=lambda g, y, value, like: (None, g),
    write=lambda value, new, *_: new[0],
    examples=["i64[2,3], i64[2,3]"],
)
def carry(value, like):
    """The value of one and the gradient of the other: what an update that autograd does not see leaves behind"""
    return value if not like.requires_grad else value.detach() + torch.nan_to_num(like - like.detach())


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.conj(g),),
    write=lambda x, new: o.conj(new[0]),
    examples=["c128[2,3]", "c64[2,3]"],
)
def conj(x):
    """The complex conjugate"""
    return torch.conj_physical(x)


@captures("aten._conj.default", "aten.conj_physical.default", "aten._conj_physical.default", "aten._conj_copy.default")
def _(x):
    return conj(x) if x.dtype.is_complex else x


@captures("aten.resolve_conj.default", "aten.resolve_neg.default")
def _(x):
    return x


@captures("aten._neg_view.default", "aten._neg_view_copy.default")
def _(x):
    return o.neg(x)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.cast(g, dtype=x.dtype),),
    write=lambda x, new: o.complex(new[0], o.imag(x)),
    dtype=part_dtype,
    examples=["c128[2,3]", "c64[2,3]"],
)
def real(x):
    """The real part"""
    return torch.real(x)


@captures("aten.real.default")
def _(x):
    return real(x) if x.dtype.is_complex else x


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.mul(g, 1j),),
    write=lambda x, new: o.complex(real(x), new[0]),
    dtype=part_dtype,
    aten=["imag.default"],
    examples=["c128[2,3]", "c64[2,3]"],
)
def imag(x):
    """The imaginary part"""
    return torch.imag(x)


@op(
    "..., ... -> ...",
    vjp=lambda g, y, re, im: (unbroadcast(real(g), re), unbroadcast(imag(g), im)),
    dtype=whole_dtype,
    aten=["complex.default"],
    examples=["f64[2,3], f64[2,3]", "f32[2,3], f32[3]", "f64[2,1], f64[3]"],
)
def complex(re, im):
    """re + i im"""
    return torch.complex(re, im)


@captures("aten.polar.default")
def _(size, angle):
    return complex(o.mul(size, o.cos(angle)), o.mul(size, o.sin(angle)))


@op(
    lambda x: ("... -> ... t", {"t": 2}),
    vjp=lambda g, y, x: (o.view_as_complex(g),),
    write=lambda x, new: o.view_as_complex(new[0]),
    dtype=part_dtype,
    aten=["view_as_real.default", "view_as_real_copy.default"],
    examples=["c128[2,3]", "c64[4]"],
)
def view_as_real(x):
    """Complex numbers as pairs (re, im) in a new last dim"""
    return torch.view_as_real(x.resolve_conj())  # what was conjugated by an operator may be so in name only


@op(
    "... t^ -> ...",
    vjp=lambda g, y, x: (view_as_real(g),),
    write=lambda x, new: view_as_real(new[0]),
    dtype=whole_dtype,
    aten=["view_as_complex.default", "view_as_complex_copy.default"],
    examples=["f64[2,3,2]", "f32[4,2]"],
)
def view_as_complex(x):
    """Pairs (re, im) in the last dim as complex numbers"""
    return torch.view_as_complex(x.contiguous())


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.mul(o.mul(g, 1j), o.div(x, o.square(o.abs(x)))) if x.dtype.is_complex else None,),
    dtype=lambda x: part_dtype(x) if x.dtype.is_complex or x.dtype.is_floating_point else torch.get_default_dtype(),
    aten=["angle.default"],
    examples=["c128[2,3]", "f[2,3]", "i64[3]"],
)
def angle(x):
    """The angle of complex numbers; of real ones 0, or pi where negative"""
    return torch.angle(x)
