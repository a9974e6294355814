"""Adafactor: of the squares of gradients, a matrix keeps the means of its rows and of its columns alone."""

from __future__ import annotations

import math

import torch

from mycel.ops.optimisers.paragraph import StateSlot, blend, decayed, optimiser, times
from mycel.ops.rules import o


def root_mean_square(x):
    """As a scalar in fp64."""
    total = o.sum(o.square(x), dims=tuple(range(x.ndim))) if x.ndim else o.square(x)
    return o.sqrt(o.cast(o.div(total, math.prod(x.shape)), dtype=torch.float64))


@optimiser(
    classes={"Adafactor": {}},
    slots=[
        StateSlot("row_var", ones=(-1,), when="factored"),
        StateSlot("col_var", ones=(-2,), when="factored"),
        StateSlot("variance", unless="factored"),
        StateSlot("step", scalar=True),
    ],
    hyper={
        "lr": "lr",
        "beta2_decay": "beta2_decay",
        "eps1": "eps.0",
        "eps2": "eps.1",
        "d": "d",
        "weight_decay": "weight_decay",
    },
    flags={"maximize": "maximize"},
    kinds=lambda p: {"factored": p.ndim > 1},
    pointwise=False,
    examples=[
        "f32[4,6], f32[4,1]>0, f32[1,6]>0, f32[]>0, f32[4,6], f64[]>0, f64[]~0.9, f64[]>0, f64[]>0, f64[]>1, "
        "f64[]~0.1, None, "
        "f32[]~0, "
        "count=1, "
        "factored=True",
        "f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, f64[]~0.9, f64[]>0, f64[]>0, "
        "f64[]>1, "
        "f64[]~0.1, f32[]>0, "
        "f32[]~0, count=2, factored=False, maximize=True",
        "f64[2,4,6], f64[2,4,1]>0, f64[2,1,6]>0, f32[]>0, f64[2,4,6], f64[]>0, f64[]~0.9, f64[]>0, f64[]>0, f64[]>1, "
        "f64[]~0.1, "
        "f32[]>0, "
        "f32[]~0, "
        "count=1, factored=True",
    ],
)
def adafactor(
    p,
    g,
    *,
    step,
    lr,
    beta2_decay,
    eps1,
    eps2,
    d,
    weight_decay,
    row_var=None,
    col_var=None,
    variance=None,
    factored=False,
):
    """u = g / sqrt(v'), v' = r' c' / mean(r') of running means of g² along rows and columns;  p' = p - max(eps2,
    rms(p)) rho u / max(1, rms(u)/d)"""
    at = o.add(step, 1)
    now = o.cast(at, dtype=torch.float64)
    share = o.pow(now, beta2_decay)
    rho = o.minimum(lr, o.div(1.0, o.sqrt(now)))
    alpha = o.mul(o.maximum(eps2, root_mean_square(p)), rho)
    small = o.cast(eps1, dtype=p.dtype)
    squares = o.square(g)
    if factored:
        rows = blend(row_var, o.mean(squares, dims=(g.ndim - 1,), keepdim=True), share)
        cols = blend(col_var, o.mean(squares, dims=(g.ndim - 2,), keepdim=True), share)
        v = o.div(o.mul(rows, cols), o.maximum(o.mean(rows, dims=(g.ndim - 2,), keepdim=True), small))
        new = {"row_var": rows, "col_var": cols, "step": at}
    else:
        v = blend(variance, squares, share)
        new = {"variance": v, "step": at}
    u = o.mul(o.rsqrt(o.maximum(v, o.square(small))), g)
    rate = o.div(alpha, o.clamp(o.div(root_mean_square(u), d), 1.0, None))
    return o.sub(decayed(p, lr, weight_decay), times(u, rate)), new
