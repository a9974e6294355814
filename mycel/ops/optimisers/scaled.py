"""RMSprop, Adagrad and Adadelta: gradients over the root of their squares, averaged or summed up."""

from __future__ import annotations

import torch

from mycel.ops.optimisers.paragraph import StateSlot, blend, optimiser, plus, times
from mycel.ops.rules import o


@optimiser(
    classes={"RMSprop": {"maximize": False}},
    slots=[
        StateSlot("square_avg"),
        StateSlot("momentum_buffer", when="momentum"),
        StateSlot("grad_avg", when="centered"),
        StateSlot("step", scalar=True),
    ],
    hyper={"lr": "lr", "alpha": "alpha", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum"},
    flags={"momentum": "momentum", "centered": "centered", "maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6]>0, f32[]>0, f[4,6], f64[]>0, f64[]~0.9, f64[]>0.1, f64[]>0, f64[]~0, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4]>2, f64[3]>2, f64[4], f64[3], f64[4]~0.1, f64[3]~0.1, f32[]>0, f32[]>0, f64[4], "
        "f64[3], f64[]>0, f64[]~0.9, "
        "f64[]>0.1, f64[]>0, f64[]~0.9, f32[]>0, f32[]~0, count=2, momentum=True, centered=True, maximize=True",
    ],
)
def rmsprop(
    p,
    g,
    *,
    square_avg,
    step,
    lr,
    alpha,
    eps,
    weight_decay,
    momentum,
    momentum_buffer=None,
    grad_avg=None,
    centered=False,
):
    """v' = a v + (1-a) g²;  p' = p - lr g / (sqrt(v' - mean²) + eps), the mean of g where it is centred; with momentum
    b' = mu b + that"""
    g = o.add(g, times(p, weight_decay))
    new = {"square_avg": o.add(times(square_avg, alpha), times(o.square(g), o.sub(1.0, alpha))), "step": o.add(step, 1)}
    v = new["square_avg"]
    if centered:
        new["grad_avg"] = blend(grad_avg, g, o.sub(1.0, alpha))
        v = o.sub(v, o.square(new["grad_avg"]))
    move = o.div(g, plus(o.sqrt(v), eps))
    if momentum_buffer is not None:
        move = new["momentum_buffer"] = o.add(times(momentum_buffer, momentum), move)
    return o.sub(p, times(move, lr)), new


@optimiser(
    classes={"Adagrad": {"maximize": False}},
    slots=[StateSlot("sum", initial="initial_accumulator_value"), StateSlot("step", scalar=True)],
    hyper={"lr": "lr", "lr_decay": "lr_decay", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6]>0, f32[]>0, f[4,6], f64[]>0, f64[]>0, f64[]>0, f64[]>0, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, f64[]>0, f64[]>0, f64[]>0, "
        "f32[]>0, f32[]~0, count=2, maximize=True",
    ],
)
def adagrad(p, g, *, sum, step, lr, lr_decay, eps, weight_decay):
    """s' = s + g²;  p' = p - lr / (1 + (t-1) lr_decay) g / (sqrt(s') + eps)"""
    g = o.add(g, times(p, weight_decay))
    rate = o.div(lr, o.add(1.0, o.mul(o.cast(step, dtype=torch.float64), lr_decay)))
    s = o.add(sum, o.square(g))
    return o.sub(p, times(o.div(g, plus(o.sqrt(s), eps)), rate)), {"sum": s, "step": o.add(step, 1)}


@optimiser(
    classes={"Adadelta": {"maximize": False}},
    slots=[StateSlot("square_avg"), StateSlot("acc_delta"), StateSlot("step", scalar=True)],
    hyper={"lr": "lr", "rho": "rho", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6]>0, f[4,6]>0, f32[]>0, f[4,6], f64[]>0, f64[]~0.9, f64[]>0.1, f64[]>0, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4]>0, f64[3]>0, f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, "
        "f64[]~0.9, f64[]>0.1, f64[]>0, f32[]>0, f32[]~0, count=2, maximize=True",
    ],
)
def adadelta(p, g, *, square_avg, acc_delta, step, lr, rho, eps, weight_decay):
    """v' = rho v + (1-rho) g²;  d = g sqrt(u + eps) / sqrt(v' + eps);  u' = rho u + (1-rho) d²;  p' = p - lr d"""
    g = o.add(g, times(p, weight_decay))
    v = o.add(times(square_avg, rho), times(o.square(g), o.sub(1.0, rho)))
    d = o.mul(o.div(o.sqrt(plus(acc_delta, eps)), o.sqrt(plus(v, eps))), g)
    u = o.add(times(acc_delta, rho), times(o.square(d), o.sub(1.0, rho)))
    return o.sub(p, times(d, lr)), {"square_avg": v, "acc_delta": u, "step": o.add(step, 1)}
