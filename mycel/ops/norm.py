"""Normalisation: y = (x - mean) * rstd * w + b, with statistics of x's last dims or of groups of channels.

Each operator has a `_grad` twin over torch's fused backward kernel, whose `expand` is the textbook formula

    dx = rstd * (g - mean(g) - x^ * mean(g * x^)),   x^ = (x - mean) * rstd,   g already times w

and which is differentiated through that expansion.  Statistics are kept in 32 bits for 16-bit inputs.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, normal_dim, o


def wide(x):
    """16-bit values in 32 bits."""
    return o.cast(x, dtype=torch.float32) if x.dtype.itemsize == 2 else x


def wide_dtype(x, *_):
    """The dtype of statistics of x."""
    return torch.promote_types(x.dtype, torch.float32)


def standardize(x, mean, rstd, w, b):
    """(x - mean) * rstd * w + b in x's dtype; all operands broadcast."""
    y = o.mul(o.sub(wide(x), mean), rstd)
    y = y if w is None else o.mul(y, w)
    return cast_like(y if b is None else o.add(y, b), x)


def standardize_grad(g, x, mean, rstd, dims):
    """The cotangent of x in (x - mean) * rstd, mean and rstd being x's over `dims`; and the standardised x."""
    xhat = o.mul(o.sub(wide(x), mean), rstd)
    shared = o.add(o.mean(g, dims=dims, keepdim=True), o.mul(xhat, o.mean(o.mul(g, xhat), dims=dims, keepdim=True)))
    return cast_like(o.mul(rstd, o.sub(g, shared)), x), xhat


def add_statistics_grad(dx, x, mean, gmean, rate):
    """dx plus what flows back through the statistics: gmean / n + rate * (x - mean) / n, both already divided by n."""
    for part in (gmean, None if rate is None else o.mul(o.sub(wide(x), mean), rate)):
        if part is not None:
            part = cast_like(o.expand(part, shape=tuple(x.shape)) if tuple(part.shape) != tuple(x.shape) else part, x)
            dx = part if dx is None else o.add(dx, part)
    return dx


def layer_norm_dims(x, w, b, *, ndim=1, eps):
    tail, ones = " ".join(f"d{i}^" for i in range(ndim)), " 1" * ndim
    return f"... {tail}, {tail}, {tail} -> ... {tail}, ...{ones}, ...{ones}"


def layer_norm_expand(x, w, b, *, ndim=1, eps):
    dims = tuple(range(x.ndim - ndim, x.ndim))
    mean = o.mean(wide(x), dims=dims, keepdim=True)
    rstd = o.rsqrt(o.add(o.var(wide(x), dims=dims, correction=0, keepdim=True), eps))
    return standardize(x, mean, rstd, w, b), mean, rstd


def layer_norm_vjp(g, y, x, w, b, *, ndim=1, eps):
    (gy, gmean, grstd), (_, mean, rstd) = g, y
    dx = dw = db = None
    if gy is not None and w is not None:
        dx, dw, db = o.layer_norm_grad(gy, x, mean, rstd, w, ndim=ndim)
    elif gy is not None:
        dx = o.layer_norm_grad(gy, x, mean, rstd, None, ndim=ndim)
        db = None if b is None else gy if x.ndim == ndim else o.sum(gy, dims=tuple(range(x.ndim - ndim)))
    n = math.prod(x.shape[-ndim:])
    gmean = None if gmean is None else o.div(gmean, n)
    rate = None if grstd is None else o.mul(grstd, o.div(o.pow(rstd, 3), -n))
    db = None if b is None or db is None else cast_like(db, b)
    return add_statistics_grad(dx, x, mean, gmean, rate), dw, db


@op(
    layer_norm_dims,
    dtype=("first", wide_dtype, wide_dtype),
    vjp=layer_norm_vjp,
    expand=layer_norm_expand,
    flops=lambda d: 8 * d.rows * math.prod(n for k, n in vars(d).items() if k.startswith("d")),
    fresh=True,
    followed=1,
    examples=[
        "f[2,3,8], f[8], f[8], eps=1e-05",
        "f[6,4], f[4], None, eps=1e-05",
        "f[4,6], None, f[6], eps=1e-05",
        "f[4,2,6], None, None, ndim=2, eps=0.001",
        "f[4,2,6], f[2,6], f[2,6], ndim=2, eps=0.001",
        "f[6], f[6], f[6], eps=1e-05",
        "f[6], None, f[6], eps=1e-05",
    ],
    precision="high",
)
def layer_norm(x, w, b, *, ndim=1, eps):
    """Standardised over the last `ndim` dims, scaled by w and shifted by b; also the mean and 1/std used."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-ndim:], w, b, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return y, mean.to(dtype), rstd.to(dtype)


@captures(torch.nn.functional.layer_norm, torch.layer_norm)
def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return _native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@captures("aten.native_layer_norm.default")
def _native_layer_norm(x, shape, weight, bias, eps):
    check_normalized(x, shape, weight)
    return layer_norm(x, weight, bias, ndim=len(shape), eps=eps)


def check_normalized(x, shape, weight):
    """The normalised shape must be x's last dims, and the weight's."""
    if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        raise ValueError(f"normalized_shape {tuple(shape)} is not the end of the input's shape {tuple(x.shape)}")
    if weight is not None and tuple(weight.shape) != tuple(shape):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, normalized_shape is {tuple(shape)}")


def layer_norm_grad_dims(g, x, mean, rstd, w, *, ndim=1):
    lead = " ".join(f"r{i}+" for i in range(x.ndim - ndim))
    tail, ones = " ".join(f"d{i}^" for i in range(ndim)), " 1" * ndim
    full = f"{lead} {tail}"
    outs = full if w is None else f"{full}, {tail}, {tail}"
    return f"{full}, {full}, {lead}{ones}, {lead}{ones}, {tail} -> {outs}"


def layer_norm_grad_expand(g, x, mean, rstd, w, *, ndim=1):
    dims, lead = tuple(range(x.ndim - ndim, x.ndim)), tuple(range(x.ndim - ndim))
    g = wide(g)
    dx, xhat = standardize_grad(g if w is None else o.mul(g, w), x, mean, rstd, dims)
    if w is None:
        return dx
    dw, db = (o.sum(o.mul(g, xhat), dims=lead), o.sum(g, dims=lead)) if lead else (o.mul(g, xhat), g)
    return dx, cast_like(dw, w), cast_like(db, w)


@op(
    layer_norm_grad_dims,
    types=lambda g, x, mean, rstd, w, *, ndim=1: x if w is None else (x, w, w),
    expand=layer_norm_grad_expand,
    flops=lambda d: 12 * math.prod(vars(d).values()),
    fresh=True,
    linear=((0,),),
    followed=0,
    examples=[
        "f[2,3,8], f[2,3,8], f64[2,3,1], f64[2,3,1]>0, None",
        "f[6,4], f[6,4], f64[6,1], f64[6,1]>0, f[4]",
        "f[4,2,6], f[4,2,6], f64[4,1,1], f64[4,1,1]>0, f[2,6], ndim=2",
        "f[6], f[6], f64[1], f64[1]>0, f[6]",
    ],
)
def layer_norm_grad(g, x, mean, rstd, w, *, ndim=1):
    """Cotangents of x, and with a weight also of w and b, in layer_norm."""
    mask, dtype = [True, w is not None, w is not None], x.dtype if w is None else w.dtype
    dtype = dtype if x.device.type == "cpu" else mean.dtype
    g, x, mean, rstd = g.contiguous(), x.contiguous(), mean.to(dtype).contiguous(), rstd.to(dtype).contiguous()
    grads = torch.ops.aten.native_layer_norm_backward.default(g, x, x.shape[-ndim:], mean, rstd, w, w, mask)
    return grads[0] if w is None else grads


def rms_rstd(x, ndim, eps):
    """1 / sqrt(mean of squares + eps), in 32 bits at least; no eps means the machine's."""
    dims, eps = tuple(range(x.ndim - ndim, x.ndim)), torch.finfo(wide_dtype(x)).eps if eps is None else eps
    return o.rsqrt(o.add(o.mean(o.square(wide(x)), dims=dims, keepdim=True), eps))


def rms_norm_expand(x, w, *, ndim=1, eps=None):
    y = o.mul(wide(x), rms_rstd(x, ndim, eps))
    return cast_like(y if w is None else o.mul(y, w), x)


def rms_norm_vjp(g, y, x, w, *, ndim=1, eps=None):
    grads = o.rms_norm_grad(g, x, w, ndim=ndim, eps=eps)
    return (grads, None) if w is None else grads


@op(
    lambda x, w, *, ndim=1, eps=None: "... {0}, {0} -> ... {0}".format(" ".join(f"d{i}^" for i in range(ndim))),
    dtype="first",
    vjp=rms_norm_vjp,
    expand=rms_norm_expand,
    flops=lambda d: 5 * d.rows * math.prod(n for k, n in vars(d).items() if k.startswith("d")),
    fresh=True,
    examples=[
        "f[2,3,8], f[8], eps=1e-06",
        "f[6,4], None, eps=None",
        "f[4,2,6], f[2,6], ndim=2, eps=0.001",
        "bf16[2,4], bf16[4]",
    ],
    precision="high",
)
def rms_norm(x, w, *, ndim=1, eps=None):
    """x over its root mean square in the last `ndim` dims, scaled by w."""
    return torch.rms_norm(x, x.shape[-ndim:], w, eps)


@captures(torch.nn.functional.rms_norm, torch.rms_norm)
def _rms_norm(input, normalized_shape, weight=None, eps=None):
    check_normalized(input, normalized_shape, weight)
    norm = rms_norm_expand if input.dtype.is_complex else rms_norm  # whose gradient is that of real numbers
    return norm(input, weight, ndim=len(normalized_shape), eps=eps)


@captures("aten._fused_rms_norm.default")
def _fused_rms_norm(x, shape, weight, eps):
    return _rms_norm(x, shape, weight, eps), rms_rstd(x, len(shape), eps)


def rms_norm_grad_dims(g, x, w, *, ndim=1, eps=None):
    lead, tail = " ".join(f"r{i}+" for i in range(x.ndim - ndim)), " ".join(f"d{i}^" for i in range(ndim))
    return f"{lead} {tail}, {lead} {tail}, {tail} -> {lead} {tail}" + ("" if w is None else f", {tail}")


def rms_norm_grad_expand(g, x, w, *, ndim=1, eps=None):
    rstd, dims = rms_rstd(x, ndim, eps), tuple(range(x.ndim - ndim, x.ndim))
    xhat, g = o.mul(wide(x), rstd), wide(g)
    gw = g if w is None else o.mul(g, w)
    dx = cast_like(o.mul(rstd, o.sub(gw, o.mul(xhat, o.mean(o.mul(gw, xhat), dims=dims, keepdim=True)))), x)
    if w is None:
        return dx
    dw = o.mul(g, xhat)
    return dx, cast_like(o.sum(dw, dims=tuple(range(x.ndim - ndim))) if x.ndim > ndim else dw, w)


@op(
    rms_norm_grad_dims,
    types=lambda g, x, w, *, ndim=1, eps=None: x if w is None else (x, w),
    expand=rms_norm_grad_expand,
    flops=lambda d: 10 * math.prod(vars(d).values()),
    linear=((0,),),
    followed=0,
    examples=[
        "f[2,3,8], f[2,3,8], f[8], eps=1e-06",
        "f[6,4], f[6,4], None, eps=None",
        "f[4,2,6], f[4,2,6], f[2,6], ndim=2, eps=0.001",
    ],
)
def rms_norm_grad(g, x, w, *, ndim=1, eps=None):
    """Cotangents of x, and with a weight also of w, in rms_norm."""
    shape, dims, dtype = x.shape[-ndim:], tuple(range(-ndim, 0)), torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(dtype).eps if eps is None else eps
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype)
    rstd = torch.rsqrt(norm * norm / math.prod(shape) + eps)
    if x.is_cuda and (w is None or w.dtype == x.dtype):
        grads = torch.ops.aten._fused_rms_norm_backward.default(g, x, shape, rstd, w, [True, w is not None])
        return grads[0] if w is None else grads
    xhat = x * rstd
    gw = g if w is None else g * w
    dx = (rstd * (gw - xhat * (gw * xhat).mean(dims, keepdim=True))).to(x.dtype)
    return dx if w is None else (dx, (g * xhat).reshape(-1, *shape).sum(0).to(w.dtype))


def group_norm_dims(x, w, b, *, groups, eps):
    full = "n c^ " + " ".join(f"s{i}^" for i in range(x.ndim - 2))
    return f"{full}, c, c -> {full}, n g, n g", {"g": groups}


def grouped(x, groups):
    """[n, c, ...] -> [n, groups, the rest]"""
    return o.reshape(x, shape=(x.shape[0], groups, math.prod(x.shape[1:]) // groups))


def along_channels(w, x):
    """A value for each channel, shaped to broadcast against x [n, c, ...]."""
    return None if w is None else o.reshape(w, shape=(w.shape[0],) + (1,) * (x.ndim - 2))


def group_norm_expand(x, w, b, *, groups, eps):
    parts = wide(grouped(x, groups))
    mean = o.mean(parts, dims=(2,), keepdim=True)
    rstd = o.rsqrt(o.add(o.var(parts, dims=(2,), correction=0, keepdim=True), eps))
    y = o.reshape(o.mul(o.sub(parts, mean), rstd), shape=tuple(x.shape))
    y = y if w is None else o.mul(y, along_channels(w, x))
    y = cast_like(y if b is None else o.add(y, along_channels(b, x)), x)
    stats = (x.shape[0], groups)
    return y, o.reshape(mean, shape=stats), o.reshape(rstd, shape=stats)


def group_norm_vjp(g, y, x, w, b, *, groups, eps):
    (gy, gmean, grstd), (_, mean, rstd) = g, y
    dx = dw = db = None
    if gy is not None and w is not None:
        dx, dw, db = o.group_norm_grad(gy, x, mean, rstd, w, groups=groups)
    elif gy is not None:
        dx = o.group_norm_grad(gy, x, mean, rstd, None, groups=groups)
        db = None if b is None else o.sum(gy, dims=(0, *range(2, x.ndim)))
    db = None if b is None or db is None else cast_like(db, b)
    if gmean is None and grstd is None:
        return dx, dw, db
    stats, parts = (x.shape[0], groups, 1), grouped(x, groups)
    n = parts.shape[2]
    gmean = None if gmean is None else o.reshape(o.div(gmean, n), shape=stats)
    rate = None if grstd is None else o.reshape(o.mul(grstd, o.div(o.pow(rstd, 3), -n)), shape=stats)
    dparts = None if dx is None else grouped(dx, groups)
    dparts = add_statistics_grad(dparts, parts, o.reshape(mean, shape=stats), gmean, rate)
    return o.reshape(dparts, shape=tuple(x.shape)), dw, db


@op(
    group_norm_dims,
    dtype=("first", wide_dtype, wide_dtype),
    vjp=group_norm_vjp,
    expand=group_norm_expand,
    flops=lambda d: 8 * math.prod(n for k, n in vars(d).items() if k[0] in "ncs"),
    followed=1,
    examples=[
        "f[2,6,4], f[6], f[6], groups=3, eps=1e-05",
        "f[3,4], f[4], None, groups=2, eps=1e-05",
        "f[2,4,2,3], None, None, groups=4, eps=0.001",
        "f[2,4,3], None, None, groups=1, eps=0.001",
    ],
    precision="high",
)
def group_norm(x, w, b, *, groups, eps):
    """Standardised over each group of channels, scaled and shifted by channel; also the mean and 1/std used."""
    n, c, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    y, mean, rstd = torch.native_group_norm(x.contiguous(), w, b, n, c, size, groups, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return y, mean.to(dtype), rstd.to(dtype)


@captures(torch.nn.functional.group_norm, torch.group_norm)
def _group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    if input.shape[1] % num_groups:
        raise ValueError(f"{input.shape[1]} channels do not divide into {num_groups} groups")
    return group_norm(input, weight, bias, groups=num_groups, eps=eps)[0]


@captures("aten.native_group_norm.default")
def _native_group_norm(x, weight, bias, n, c, size, group, eps):
    return group_norm(x, weight, bias, groups=group, eps=eps)


def group_norm_grad_dims(g, x, mean, rstd, w, *, groups):
    full = "n+ c^ " + " ".join(f"s{i}^" for i in range(x.ndim - 2))
    return f"{full}, {full}, n g^, n g, c -> {full}" + (", c, c" if w is not None else "")


def group_norm_grad_expand(g, x, mean, rstd, w, *, groups):
    stats, rest = (x.shape[0], groups, 1), (0, *range(2, x.ndim))
    g = wide(g)
    gw = grouped(g if w is None else o.mul(g, along_channels(w, x)), groups)
    mean, rstd = (o.reshape(s, shape=stats) for s in (mean, rstd))
    dparts, xhat = standardize_grad(gw, grouped(x, groups), mean, rstd, (2,))
    dx = o.reshape(dparts, shape=tuple(x.shape))
    if w is None:
        return dx
    dw = o.sum(o.mul(g, o.reshape(xhat, shape=tuple(x.shape))), dims=rest)
    return dx, cast_like(dw, w), cast_like(o.sum(g, dims=rest), w)


@op(
    group_norm_grad_dims,
    types=lambda g, x, mean, rstd, w, *, groups: x if w is None else (x, w, w),
    expand=group_norm_grad_expand,
    flops=lambda d: 12 * math.prod(n for k, n in vars(d).items() if k[0] in "ncs"),
    followed=0,
    examples=[
        "f[2,6,4], f[2,6,4], f64[2,3], f64[2,3]>0, f[6], groups=3",
        "f[2,4,2,3], f[2,4,2,3], f64[2,4], f64[2,4]>0, None, groups=4",
    ],
)
def group_norm_grad(g, x, mean, rstd, w, *, groups):
    """Cotangents of x, and with a weight also of w and b, in group_norm."""
    n, c, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    mask, dtype = [True, w is not None, w is not None], x.dtype if w is None else w.dtype
    grads = torch.ops.aten.native_group_norm_backward.default(
        *(v.contiguous() for v in (g, x, mean.to(dtype), rstd.to(dtype))), w, n, c, size, groups, mask
    )
    return grads[0] if w is None else grads


@captures("aten._weight_norm_interface.default")
def _weight_norm(v, g, dim=0):
    rest = tuple(d for d in range(v.ndim) if d != normal_dim(dim, v.ndim))
    norm = o.sqrt(o.sum(o.square(wide(v)), dims=rest, keepdim=True))
    return cast_like(o.mul(v, o.div(wide(g), norm)), v), norm
