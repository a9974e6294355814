"""Batch and instance normalisation of [n, c, ...], and how their running statistics move."""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import assign, captures
from mycel.ops.norm import add_statistics_grad, group_norm, standardize, standardize_grad, wide, wide_dtype
from mycel.ops.rules import cast_like, o


def spread(s, x):
    """A value for each channel, shaped to broadcast against x [n, c, ...]."""
    return None if s is None else o.reshape(s, shape=(1, s.shape[0]) + (1,) * (x.ndim - 2))


def others(x):
    """All dims of x but the channels'."""
    return (0, *range(2, x.ndim))


def full_dims(x, flag):
    """ "n c s0 s1" with a flag on all but the channels."""
    return f"n{flag} c " + " ".join(f"s{i}{flag}" for i in range(x.ndim - 2))


def batch_norm_expand(x, w, b, *, eps):
    mean, var = (f(wide(x), dims=others(x)) for f in (o.mean, lambda v, dims: o.var(v, dims=dims, correction=0)))
    rstd = spread(o.rsqrt(o.add(var, eps)), x)
    return standardize(x, spread(mean, x), rstd, spread(w, x), spread(b, x)), mean, var


def batch_norm_pieces(x, w, b, *, eps):
    mean, var = o.batch_statistics(x)
    return o.batch_norm_infer(x, w, b, mean, var, eps=eps), mean, var


@op(
    lambda x: f"{full_dims(x, '^')} -> c, c",
    dtype=(wide_dtype, wide_dtype),
    expand=lambda x: (o.mean(wide(x), dims=others(x)), o.var(wide(x), dims=others(x), correction=0)),
    flops=lambda d: 4 * math.prod(vars(d).values()),
    examples=["f[4,6]", "f[3,4,2,2]", "f[2,2,4,1,2]"],
    apart=True,
    precision="high",
)
def batch_statistics(x):
    """Mean and biased variance over all dims but the second."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    var, mean = torch.var_mean(x.to(dtype), (0, *range(2, x.ndim)), correction=0)
    return mean, var


def batch_norm_vjp(g, y, x, w, b, *, eps):
    (gy, gmean, gvar), (_, mean, var) = g, y
    dx = dw = db = None
    if gy is not None and w is not None:
        dx, dw, db = o.batch_norm_grad(gy, x, mean, var, w, eps=eps)
    elif gy is not None:
        dx = o.batch_norm_grad(gy, x, mean, var, None, eps=eps)
        db = None if b is None else o.sum(gy, dims=others(x))
    n = math.prod(x.shape) // x.shape[1]
    gmean = None if gmean is None else spread(o.div(gmean, n), x)
    rate = None if gvar is None else spread(o.mul(gvar, 2 / n), x)
    db = None if b is None or db is None else cast_like(db, b)
    return add_statistics_grad(dx, x, spread(mean, x), gmean, rate), dw, db


@op(
    lambda x, w, b, *, eps: "{0}, c, c -> {0}, c, c".format(full_dims(x, "^")),
    dtype=("first", wide_dtype, wide_dtype),
    vjp=batch_norm_vjp,
    expand=batch_norm_expand,
    pieces=batch_norm_pieces,
    flops=lambda d: 8 * math.prod(vars(d).values()),
    followed=1,
    examples=[
        "f[4,6], f[6], f[6], eps=1e-05",
        "f[3,4,2,2], f[4], None, eps=1e-05",
        "f[3,2,4], None, f[2], eps=0.001",
        "f[2,2,4,1,2], None, None, eps=0.001",
    ],
    precision="high",
)
def batch_norm(x, w, b, *, eps):
    """Standardised over all dims but the second, scaled by w, shifted by b; also the mean and biased variance used."""
    dtype = x.dtype
    if x.device.type == "cpu" and dtype.itemsize == 2:
        x, w, b = (None if v is None else v.float() for v in (x, w, b))
    y, mean, rstd = torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
    return y.to(dtype), mean, (rstd.pow(-2) - eps).clamp_min(0)


def batch_norm_grad_dims(g, x, mean, var, w, *, eps):
    full = full_dims(x, "^")
    return f"{full}, {full}, c, c, c -> {full}" + ("" if w is None else ", c, c")


def batch_norm_grad_expand(g, x, mean, var, w, *, eps):
    g, rstd = wide(g), spread(o.rsqrt(o.add(var, eps)), x)
    gw = g if w is None else o.mul(g, spread(w, x))
    dx, xhat = standardize_grad(gw, x, spread(mean, x), rstd, others(x))
    if w is None:
        return dx
    return dx, *(cast_like(o.sum(v, dims=others(x)), w) for v in (o.mul(g, xhat), g))


@op(
    batch_norm_grad_dims,
    types=lambda g, x, mean, var, w, *, eps: x if w is None else (x, w, w),
    expand=batch_norm_grad_expand,
    flops=lambda d: 12 * math.prod(vars(d).values()),
    followed=0,
    examples=[
        "f[4,6], f[4,6], f64[6], f64[6]>0, f[6], eps=1e-05",
        "f[3,4,2,2], f[3,4,2,2], f64[4], f64[4]>0, None, eps=0.001",
    ],
)
def batch_norm_grad(g, x, mean, var, w, *, eps):
    """Cotangents of x, and with a weight also of w and b, in batch_norm."""
    rstd, types = torch.rsqrt(var + eps), (x.dtype, None if w is None else w.dtype)
    if x.device.type == "cpu":
        dtype = torch.promote_types(x.dtype, torch.float32)
        g, x, mean, rstd, w = (None if v is None else v.to(dtype) for v in (g, x, mean, rstd, w))
    mask = [True, w is not None, w is not None]
    dx, dw, db = torch.ops.aten.native_batch_norm_backward.default(g, x, w, None, None, mean, rstd, True, eps, mask)
    return dx.to(types[0]) if w is None else (dx.to(types[0]), dw.to(types[1]), db.to(types[1]))


def batch_norm_infer_expand(x, w, b, mean, var, *, eps):
    rstd = spread(o.rsqrt(o.add(wide(var), eps)), x)
    return standardize(x, spread(mean, x), rstd, spread(w, x), spread(b, x))


@op(
    lambda x, w, b, mean, var, *, eps: "{0}, c, c, c, c -> {0}".format(full_dims(x, "")),
    dtype="first",
    expand=batch_norm_infer_expand,
    flops=lambda d: 4 * math.prod(vars(d).values()),
    examples=[
        "f[4,6], f[6], f[6], f[6], f[6]>0, eps=1e-05",
        "f[3,4,2,2], f[4], None, f[4], f[4]>0, eps=0.001",
        "f[2,2,4], None, None, f[2], f[2]>0, eps=0.001",
        "bf16[3,4,2,2], bf16[4], bf16[4], f32[4], f32[4]>0, eps=0.001",
    ],
    precision="high",
)
def batch_norm_infer(x, w, b, mean, var, *, eps):
    """(x - mean) / sqrt(var + eps), scaled by w and shifted by b, with statistics given by channel."""
    if mean.dtype != x.dtype:  # of the batch itself, in 32 bits
        mean, rstd, w, b = (
            None if s is None else s.reshape((1, -1) + (1,) * (x.ndim - 2))
            for s in (mean, torch.rsqrt(var + eps), w, b)
        )
        y = (x - mean) * rstd
        y = y if w is None else y * w
        return (y if b is None else y + b).to(x.dtype)
    return torch.nn.functional.batch_norm(x, mean, var, w, b, False, 0.0, eps)


@captures(torch.nn.functional.batch_norm)
def _batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    return _native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


@captures(torch.batch_norm)
def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return _native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


@captures("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")
def _native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    if not math.prod(x.shape):
        unsaved = o.full(0.0, shape=(0,), dtype=wide_dtype(x))
        return x, unsaved, unsaved
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm outside of training needs running statistics")
        unsaved = o.full(0.0, shape=(0,), dtype=wide_dtype(x))
        return batch_norm_infer(x, weight, bias, running_mean, running_var, eps=eps), unsaved, unsaved
    n = math.prod(x.shape) // x.shape[1]
    if n == 1:
        raise ValueError(f"batch_norm in training needs more than one value per channel, got shape {tuple(x.shape)}")
    y, mean, var = batch_norm(x, weight, bias, eps=eps)
    move(running_mean, mean, momentum)
    move(running_var, o.mul(var, n / (n - 1)), momentum)
    return y, mean, o.rsqrt(o.add(var, eps))


def move(running, value, momentum):
    """running <- (1 - momentum) * running + momentum * value, through which no gradient flows."""
    if running is not None:
        value = cast_like(o.stop_gradient(value), running)
        assign(running, o.add(o.mul(running, 1 - momentum), o.mul(value, momentum)))


@captures("aten._native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return _native_batch_norm(x, weight, bias, None, None, training, momentum, eps)


@captures("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps):
    return _native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)


@captures("aten.cudnn_batch_norm.default")
def _cudnn_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    outs = _native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return *outs, o.full(0, shape=(0,), dtype=torch.uint8)


@captures("aten._batch_norm_with_update.default")
def _batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps):
    return _cudnn_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)


@captures("aten._batch_norm_no_update.default")
def _batch_norm_no_update(x, weight, bias, running_mean, running_var, momentum, eps):
    return _cudnn_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)


@captures(torch.nn.functional.instance_norm)
def _instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    return _torch_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


@captures(torch.instance_norm)
def _torch_instance_norm(
    input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True
):
    """Instance norm is group norm with a group for each channel."""
    if not use_input_stats:
        return _native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[0]
    size, spatial = math.prod(input.shape[2:]), tuple(range(2, input.ndim))
    if size == 1:
        raise ValueError(f"instance_norm needs more than one value per channel, got shape {tuple(input.shape)}")
    if running_mean is not None:
        move(running_mean, o.mean(wide(input), dims=others(input)), momentum)
        move(running_var, o.mean(o.var(wide(input), dims=spatial), dims=(0,)), momentum)
    return group_norm(input, weight, bias, groups=input.shape[1], eps=eps)[0]
