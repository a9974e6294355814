"""SGD, with momentum or without; ASGD, which averages where it has been."""

from __future__ import annotations

import torch

from mycel.ops.optimisers.paragraph import StateSlot, blend, columns, decayed, laid_like, optimiser, rate, times
from mycel.ops.rules import o


def sgd_update(*xs, count, momentum=False, nesterov=False, maximize=False):
    """SGD over the memory of its operands, in one kernel."""
    (params, *buffers), grads, (lr, mu, damp, decay, first, scale, skip) = columns(xs, count, 1 + momentum)
    torch._fused_sgd_(
        params,
        laid_like(params, grads),
        buffers[0] if momentum else [],
        weight_decay=float(decay),
        momentum=float(mu) if momentum else 0.0,
        lr=rate(lr),
        dampening=float(damp),
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=bool(first),
        grad_scale=scale,
        found_inf=skip,
    )


@optimiser(
    classes={"SGD": {}},
    slots=[StateSlot("momentum_buffer", when="momentum")],
    hyper={
        "lr": "lr",
        "momentum": "momentum",
        "dampening": "dampening",
        "weight_decay": "weight_decay",
        "first_step": "first_step",
    },
    flags={"momentum": "momentum", "nesterov": "nesterov", "maximize": "maximize"},
    first="dampening",
    inplace=sgd_update,
    examples=[
        "f[4,6], f[4,6], f64[]>0, f64[], f64[], f64[]>0, f64[]~0, None, f32[]~0, count=1",
        (
            "f64[4], f64[3], f64[4], f64[3], f64[4], f64[3], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, f64[]~0, f32[]>0, "
            "f32[]~0, count=2, momentum=True"
        ),
        (
            "f64[4], f64[4], f64[4], f64[]>0, f64[]~0.9, f64[]~0, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=1, "
            "momentum=True, nesterov=True"
        ),
        (
            "f64[4], f64[4], f64[4], f64[]>0, f64[]~0.9, f64[]~0, f64[]>0, f64[]~0, None, f32[]~0, count=1, "
            "momentum=True, nesterov=True, maximize=True"
        ),
    ],
)
def sgd(p, g, *, lr, momentum, dampening, weight_decay, first_step, momentum_buffer=None, nesterov=False):
    """b' = mu b + (1-damp) g (the first time: g);  p' = p - lr b', or with Nesterov p - lr (g + mu b')"""
    rate, keep, lost, decay = (o.cast(x, dtype=p.dtype) for x in (lr, momentum, dampening, weight_decay))
    g = o.add(g, o.mul(p, decay))
    if momentum_buffer is None:
        return o.sub(p, o.mul(rate, g)), {}
    b = o.where(o.ne(first_step, 0.0), g, o.add(o.mul(momentum_buffer, keep), o.mul(g, o.sub(1, lost))))
    return o.sub(p, o.mul(rate, o.add(g, o.mul(b, keep)) if nesterov else b)), {"momentum_buffer": b}


@optimiser(
    classes={"ASGD": {"maximize": False}},
    slots=[
        StateSlot("ax"),
        StateSlot("eta", scalar=True, initial="lr"),
        StateSlot("mu", scalar=True, initial=1.0),
        StateSlot("step", scalar=True),
    ],
    hyper={"lr": "lr", "lambd": "lambd", "alpha": "alpha", "t0": "t0", "weight_decay": "weight_decay"},
    flags={"maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6], f32[]~0.1, f32[]~0.9, f32[]>0, f[4,6], f64[]>0, f64[]>0, f64[]>0, f64[]~2, f64[]>0, None, "
        "f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f32[]~0.1, f32[]~0.1, f32[]~0.9, f32[]~0.9, f32[]>0, f32[]>0, f64[4], f64[3], "
        "f64[]>0, f64[]>0, f64[]>0, f64[]~2, f64[]>0, f32[]>0, f32[]~0, count=2, maximize=True",
    ],
)
def asgd(p, g, *, ax, eta, mu, step, lr, lambd, alpha, t0, weight_decay):
    """p' = p (1 - lambda eta) - eta g;  ax' = ax + mu (p' - ax);  eta' = lr / (1 + lambda lr t)^alpha;
    mu' = 1 / max(1, t - t0)"""
    at = o.add(step, 1)
    now = o.cast(at, dtype=torch.float64)
    rate = o.cast(eta, dtype=torch.float64)
    g = o.add(g, times(p, weight_decay))
    new_p = o.sub(decayed(p, rate, lambd), times(g, rate))
    new_eta = o.div(lr, o.pow(o.add(1.0, o.mul(o.mul(lambd, lr), now)), alpha))
    new_mu = o.div(1.0, o.clamp(o.sub(now, t0), 1.0, None))
    new = {"eta": o.cast(new_eta, dtype=eta.dtype), "mu": o.cast(new_mu, dtype=mu.dtype)}
    return new_p, {"ax": blend(ax, new_p, mu), "step": at, **new}
