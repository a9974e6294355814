"""Activations.

A gradient for which torch has one kernel is an operator too, with its meaning in smaller ones beside it: it rounds
once, runs as one kernel, and can be differentiated again.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.compare import where
from mycel.ops.pointwise import partials
from mycel.ops.rules import conj, normal_dim, o


@op(
    "..., ... -> ...",
    expand=lambda g, y: o.mul(g, conj(o.mul(y, o.sub(1, y)))),
    linear=((0,),),
    examples=["f[2,3], f[2,3]"],
)
def sigmoid_grad(g, y):
    """The cotangent of x where y = sigmoid(x)"""
    return torch.ops.aten.sigmoid_backward.default(g, y)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (sigmoid_grad(g, y) if is_float(x.dtype) else None,),
    dtype="float",
    aten=["sigmoid.default"],
    into=("torch.sigmoid_({0})",),
    examples=["f[2,3]", "i64[3]", "c128[3]"],
    c="1 / (1 + exp(-{0}))",
)
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return torch.sigmoid(x)


@op(
    "..., ... -> ...",
    expand=lambda g, y: o.mul(g, conj(o.sub(1, o.square(y)))),
    linear=((0,),),
    examples=["f[2,3], f[2,3]"],
)
def tanh_grad(g, y):
    """The cotangent of x where y = tanh(x)"""
    return torch.ops.aten.tanh_backward.default(g, y)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (tanh_grad(g, y) if is_float(x.dtype) else None,),
    dtype="float",
    aten=["tanh.default"],
    into=("torch.tanh_({0})",),
    examples=["f[2,3]", "i64[3]", "c128[3]"],
    c="tanh({0})",
)
def tanh(x):
    """The hyperbolic tangent"""
    return torch.tanh(x)


@op(
    "..., ... -> ...",
    vjp=lambda g, y, dy, x, *, threshold: (o.threshold_grad(g, x, threshold=threshold), None),
    expand=lambda g, x, *, threshold: where(o.le(x, threshold), 0, g),
    fresh=True,
    linear=((0,),),
    examples=["f[2,3], f[2,3], threshold=0", "f[2,3], f[2,3], threshold=0.3"],
)
def threshold_grad(g, x, *, threshold):
    """g where x is above the threshold"""
    return torch.ops.aten.threshold_backward.default(g, x, threshold)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (threshold_grad(g, y, threshold=0),),
    aten=["relu.default"],
    into=("torch.relu_({0})",),
    examples=["n[2,3]"],
    c="{0} < 0 ? 0 : {0}",
)
def relu(x):
    """x where positive, else 0"""
    return torch.relu(x)


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, threshold, value: (threshold_grad(g, x, threshold=threshold),),
    examples=["n[2,3], threshold=1, value=2", "f[2,3], threshold=0.3, value=-1.0"],
)
def threshold(x, *, threshold, value):
    """x where above the threshold, else the value"""
    return torch.nn.functional.threshold(x, threshold, value)


@captures("aten.threshold.default")
def _(x, at, value):
    return threshold(x, threshold=at, value=value)


def gelu_in_c(at, x, *, approximate="none"):
    if approximate == "none":
        return f"{at(0)} * 0.5f * (1 + erf({at(0)} * {math.sqrt(0.5)}f))"
    inner = f"{math.sqrt(2 / math.pi)}f * ({at(0)} + 0.044715f * {at(0)} * {at(0)} * {at(0)})"
    return f"0.5f * {at(0)} * (1 + tanh({inner}))"


def gelu_slope(x, approximate):
    """The derivative of gelu."""
    if approximate == "none":
        normal = o.mul(o.add(o.erf(o.mul(x, math.sqrt(0.5))), 1), 0.5)
        density = o.mul(o.exp(o.mul(o.square(x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return o.add(normal, o.mul(x, density))
    t = tanh(o.mul(o.add(x, o.mul(o.pow(x, 3), 0.044715)), math.sqrt(2 / math.pi)))
    inner = o.mul(o.add(o.mul(o.square(x), 3 * 0.044715), 1), math.sqrt(2 / math.pi))
    return o.mul(o.add(o.add(t, 1), o.mul(o.mul(x, o.sub(1, o.square(t))), inner)), 0.5)


@op(
    "..., ... -> ...",
    expand=lambda g, x, *, approximate="none": o.mul(g, gelu_slope(x, approximate)),
    flops=lambda d: 20 * d.rows,
    fresh=True,
    linear=((0,),),
    examples=["f[2,3], f[2,3]", 'f[2,3], f[2,3], approximate="tanh"'],
)
def gelu_grad(g, x, *, approximate="none"):
    """The cotangent of x under gelu"""
    return torch.ops.aten.gelu_backward.default(g, x, approximate=approximate)


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, approximate="none": (gelu_grad(g, x, approximate=approximate),),
    flops=lambda d: 10 * d.rows,
    aten=["gelu.default"],
    into=("torch._C._nn.gelu_({0}, approximate={approximate})",),
    examples=["f[2,3]", 'f[2,3], approximate="tanh"'],
    c=gelu_in_c,
)
def gelu(x, *, approximate="none"):
    """x times the normal distribution function of x"""
    return torch.nn.functional.gelu(x, approximate=approximate)


def silu_slope(x):
    """The derivative of silu."""
    s = sigmoid(x)
    return o.mul(s, o.add(o.mul(x, o.sub(1, s)), 1))


@op(
    "..., ... -> ...",
    expand=lambda g, x: o.mul(g, silu_slope(x)),
    flops=lambda d: 8 * d.rows,
    fresh=True,
    linear=((0,),),
    followed=0,
    examples=["f[2,3], f[2,3]"],
)
def silu_grad(g, x):
    """The cotangent of x under silu"""
    return torch.ops.aten.silu_backward.default(g, x)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (silu_grad(g, x),),
    flops=lambda d: 4 * d.rows,
    aten=["silu.default"],
    into=("torch.nn.functional.silu({0}, inplace=True)",),
    examples=["f[2,3]"],
    c="{0} / (1 + exp(-{0}))",
)
def silu(x):
    """x * sigmoid(x)"""
    return torch.nn.functional.silu(x)


def mish_slope(x):
    """The derivative of mish."""
    t = tanh(softplus(x))
    return o.add(t, o.mul(o.mul(x, sigmoid(x)), o.sub(1, o.square(t))))


@op(
    "..., ... -> ...",
    expand=lambda g, x: o.mul(g, mish_slope(x)),
    flops=lambda d: 12 * d.rows,
    followed=0,
    examples=["f[2,3], f[2,3]"],
)
def mish_grad(g, x):
    """The cotangent of x under mish"""
    return torch.ops.aten.mish_backward.default(g, x)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (mish_grad(g, x),),
    flops=lambda d: 6 * d.rows,
    aten=["mish.default"],
    examples=["f[2,3]"],
)
def mish(x):
    """x * tanh(softplus(x))"""
    return torch.nn.functional.mish(x)


@op(
    "..., ... -> ...",
    expand=lambda g, x, *, beta=1.0, threshold=20.0: where(
        o.gt(o.mul(x, beta), threshold), g, o.mul(g, sigmoid(o.mul(x, beta)))
    ),
    examples=["f[2,3], f[2,3]", "f[2,3], f[2,3], beta=2.0, threshold=0.5"],
)
def softplus_grad(g, x, *, beta=1.0, threshold=20.0):
    """The cotangent of x under softplus"""
    return torch.ops.aten.softplus_backward.default(g, x, beta, threshold)


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, beta=1.0, threshold=20.0: (softplus_grad(g, x, beta=beta, threshold=threshold),),
    flops=lambda d: 4 * d.rows,
    examples=["f[2,3]", "f[2,3], beta=2.0, threshold=0.5"],
    precision="high",
)
def softplus(x, *, beta=1.0, threshold=20.0):
    """log(1 + exp(beta * x)) / beta, linear above the threshold"""
    return torch.nn.functional.softplus(x, beta, threshold)


@captures("aten.softplus.default")
def _(x, beta=1, threshold=20):
    return softplus(x, beta=float(beta), threshold=float(threshold))


@op(
    "... -> ...",
    vjp=lambda g, y, x: (o.mul(g, sigmoid(o.neg(x))),),
    flops=lambda d: 4 * d.rows,
    examples=["f[2,3]"],
    precision="high",
)
def logsigmoid(x):
    """log(sigmoid(x))"""
    return torch.nn.functional.logsigmoid(x)


@captures(torch.nn.functional.logsigmoid)
def _(x):
    return logsigmoid(x)


@captures("aten.log_sigmoid_forward.default")
def _(x):
    y = logsigmoid(x)
    return y, y  # the second is torch's scratch for its own backward


@op(
    "..., ... -> ...",
    expand=lambda g, x, *, alpha=1.0, scale=1.0, input_scale=1.0: o.mul(
        g, where(o.gt(x, 0), scale, o.mul(o.exp(o.mul(x, input_scale)), alpha * scale * input_scale))
    ),
    examples=["f[2,3], f[2,3]", "f[2,3], f[2,3], alpha=1.5, scale=1.2, input_scale=0.7"],
)
def elu_grad(g, x, *, alpha=1.0, scale=1.0, input_scale=1.0):
    """The cotangent of x under elu"""
    return torch.ops.aten.elu_backward.default(g, alpha, scale, input_scale, False, x)


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, alpha=1.0, scale=1.0, input_scale=1.0: (
        elu_grad(g, x, alpha=alpha, scale=scale, input_scale=input_scale),
    ),
    flops=lambda d: 3 * d.rows,
    examples=["f[2,3]", "f[2,3], alpha=1.5, scale=1.2, input_scale=0.7"],
)
def elu(x, *, alpha=1.0, scale=1.0, input_scale=1.0):
    """scale * x where positive, else scale * alpha * (exp(input_scale * x) - 1)"""
    return torch.ops.aten.elu.default(x, alpha, scale, input_scale)


@captures("aten.elu.default")
def _(x, alpha=1, scale=1, input_scale=1):
    return elu(x, alpha=float(alpha), scale=float(scale), input_scale=float(input_scale))


@captures("aten.celu.default")
def _(x, alpha=1.0):
    return elu(x, alpha=float(alpha), input_scale=1 / alpha)


def leaky(g, y, x, *, slope):
    """g where x is positive, else slope * g."""
    return (where(o.gt(x, 0), g, o.mul(g, slope)),)


@op("... -> ...", vjp=leaky, examples=["f[2,3], slope=0.01", "f[2,3], slope=-0.5"])
def leaky_relu(x, *, slope):
    """x where positive, else slope * x"""
    return torch.nn.functional.leaky_relu(x, slope)


@captures("aten.leaky_relu.default")
def _(x, negative_slope=0.01):
    return leaky_relu(x, slope=float(negative_slope))


@captures("aten.rrelu_with_noise.default")
def _(x, noise, lower=0.125, upper=1 / 3, training=False, *_):
    return NotImplemented if training else leaky_relu(x, slope=(lower + upper) / 2)


@op(
    "..., ... -> ...",
    vjp=partials(
        lambda g, y, x, w: where(o.gt(x, 0), g, o.mul(g, w)),
        lambda g, y, x, w: where(o.gt(x, 0), 0, o.mul(g, x)),
    ),
    aten=["_prelu_kernel.default"],
    examples=["f[2,3,4], f[1,3,1]", "f[2,3], f[1,1]"],
)
def prelu(x, w):
    """x where positive, else w * x"""
    return torch.where(x > 0, x, w * x)


@op(
    "... -> ...",
    vjp=lambda g, y, x, *, lo, hi: (where(o.logical_and(o.gt(x, lo), o.lt(x, hi)), g, 0),),
    examples=["n[2,3], lo=-1, hi=1", "f[2,3], lo=0.0, hi=0.6"],
)
def hardtanh(x, *, lo, hi):
    """x held between lo and hi, flat at the bounds themselves"""
    return torch.nn.functional.hardtanh(x, lo, hi)


@captures("aten.hardtanh.default")
def _(x, min_val=-1, max_val=1):
    return hardtanh(x, lo=min_val, hi=max_val)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (where(o.logical_and(o.gt(x, -3), o.lt(x, 3)), o.mul(g, 1 / 6), 0),),
    aten=["hardsigmoid.default"],
    examples=["f[2,3]", "f[4,6]~5"],
)
def hardsigmoid(x):
    """x / 6 + 1/2, held between 0 and 1"""
    return torch.nn.functional.hardsigmoid(x)


@op(
    "..., ... -> ...",
    expand=lambda g, x: o.mul(g, o.where(o.le(x, -3), 0.0, o.where(o.lt(x, 3), o.add(o.mul(x, 1 / 3), 0.5), 1.0))),
    examples=["f[2,3], f[2,3]", "f[2,3], f[4,2,3]~5"],
)
def hardswish_grad(g, x):
    """The cotangent of x under hardswish"""
    return torch.ops.aten.hardswish_backward.default(g, x)


@op(
    "... -> ...",
    vjp=lambda g, y, x: (hardswish_grad(g, x),),
    flops=lambda d: 4 * d.rows,
    aten=["hardswish.default"],
    examples=["f[2,3]", "f[4,6]~5"],
)
def hardswish(x):
    """x * hardsigmoid(x)"""
    return torch.nn.functional.hardswish(x)


def outside(g, y, x, *, width=0.5):
    """g where |x| is above the width."""
    return (where(o.gt(o.abs(x), width), g, 0),)


@op("... -> ...", vjp=outside, examples=["f[2,3]", "f[2,3], width=0.2"])
def hardshrink(x, *, width=0.5):
    """x where |x| > width, else 0"""
    return torch.nn.functional.hardshrink(x, width)


@captures("aten.hardshrink.default")
def _(x, lambd=0.5):
    return hardshrink(x, width=float(lambd))


@op("... -> ...", vjp=outside, examples=["f[2,3]", "f[2,3], width=0.2"])
def softshrink(x, *, width=0.5):
    """x moved towards 0 by the width"""
    return torch.nn.functional.softshrink(x, width)


@captures("aten.softshrink.default")
def _(x, lambd=0.5):
    return softshrink(x, width=float(lambd))


@captures("aten.glu.default")
def _(x, dim=-1):
    dim = normal_dim(dim, x.ndim)
    if x.shape[dim] % 2:
        raise ValueError(f"glu halves dim {dim}, which is odd: {x.shape[dim]}")
    a, b = o.split(x, sizes=(x.shape[dim] // 2,) * 2, dim=dim)
    return o.mul(a, sigmoid(b))
