"""Muon: momentum made orthogonal by Newton-Schulz iterations, in 16 bits."""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.optimisers.paragraph import StateSlot, blend, decayed, optimiser, times
from mycel.ops.rules import o


def iteration_flops(d):
    """Of five iterations on n by m: two products with the smaller square, one of it with itself."""
    least = min(d.n, d.m)
    return 5 * (4 * d.n * d.m * least + 2 * least**3)


@op(
    "n^ m^ -> n m",
    dtype="first",
    fresh=True,
    apart=True,
    flops=iteration_flops,
    examples=[
        "bf16[4,6], coefficients=(3.4445, -4.775, 2.0315), steps=5, eps=1e-07",
        "f64[6,4], coefficients=(2.0, -1.5, 0.5), steps=2, eps=1e-07",
    ],
)
def newton_schulz(x, *, coefficients, steps, eps):
    """x with its singular values near one: `steps` times x => a x + (b A + c A²) x with A = x x', from x of norm one

    It must be whole: parts of it would be summed up in another order, and 16 bits show that.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate_ratio(shape, way):
    """What the learning rate of a matrix is multiplied by."""
    n, m = shape
    return 0.2 * math.sqrt(max(n, m)) if way == "match_rms_adamw" else math.sqrt(max(1, n / m))


@optimiser(
    classes={"Muon": {}},
    slots=[StateSlot("momentum_buffer")],
    hyper={"lr": "lr", "momentum": "momentum", "weight_decay": "weight_decay"},
    flags={"nesterov": "nesterov"},
    static={"coefficients": "ns_coefficients", "steps": "ns_steps", "eps": "eps", "adjust": "adjust_lr_fn"},
    pointwise=False,
    examples=[
        "f32[4,6], f32[4,6], f32[4,6], f64[]>0, f64[]~0.9, f64[]~0.1, None, f32[]~0, count=1, nesterov=True, "
        "coefficients=(3.4445, -4.775, 2.0315), "
        "steps=5, eps=1e-07, adjust=None",
        "f32[6,4], f32[2,2], f32[6,4], f32[2,2], f32[6,4], f32[2,2], f64[]>0, f64[]~0.9, f64[]~0.1, f32[]>0, f32[]~0, "
        "count=2, nesterov=False, "
        'coefficients=(3.4445, -4.775, 2.0315), steps=3, eps=1e-07, adjust="match_rms_adamw"',
    ],
)
def muon(p, g, *, momentum_buffer, lr, momentum, weight_decay, nesterov, coefficients, steps, eps, adjust):
    """b' = mu b + (1-mu) g;  p' = p (1 - lr decay) - lr ratio O(b'), with Nesterov O(mu b' + (1-mu) g); O makes
    orthogonal"""
    b = blend(momentum_buffer, g, o.sub(1.0, momentum))
    move = o.cast(blend(g, b, momentum) if nesterov else b, dtype=torch.bfloat16)
    move = o.cast(o.newton_schulz(move, coefficients=coefficients, steps=steps, eps=eps), dtype=p.dtype)
    return o.sub(decayed(p, lr, weight_decay), times(move, o.mul(lr, rate_ratio(p.shape, adjust)))), {
        "momentum_buffer": b
    }
