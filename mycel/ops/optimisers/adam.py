"""Adam, AdamW, NAdam, RAdam and Adamax: two moments of the gradient.  And Adam whose second is frozen."""

from __future__ import annotations

import torch

from mycel.ops.optimisers.paragraph import StateSlot, blend, columns, decayed, laid_like, optimiser, plus, rate, times
from mycel.ops.rules import o


def adam_update(*xs, count, decoupled=True, amsgrad=False, maximize=False):
    """Adam over the memory of its operands: in one kernel of torch's, but for large parameters on a GPU."""
    lists, grads, (lr, beta1, beta2, eps, decay, scale, skip) = columns(xs, count, 5 if amsgrad else 4)
    params, first, second, *top, steps = lists
    torch._foreach_add_(steps, 1)
    grads = laid_like(params, grads)
    if params[0].is_cuda and not amsgrad:
        from mycel.ops.triton_adam import is_large, update_large

        of_each = list(zip(grads, params, first, second, steps, strict=True))
        large = [row for row in of_each if is_large(*row[:4])]
        if large:
            hyper = float(beta1), float(beta2), float(eps), float(decay)
            update_large([x[:4] for x in large], [x[4] for x in large], lr, *hyper, scale, skip, decoupled, maximize)
        small = [row for row in of_each if not is_large(*row[:4])]
        grads, params, first, second, now = map(list, zip(*small, strict=True)) if small else ([],) * 5
    else:
        now = steps
    if params:
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            first,
            second,
            top[0] if amsgrad else [],
            now,
            lr=rate(lr),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(decay),
            eps=float(eps),
            amsgrad=amsgrad,
            maximize=maximize,
            grad_scale=scale,
            found_inf=skip,
        )
    torch._foreach_sub_(steps, [skip] * count)


@optimiser(
    classes={"Adam": {"decoupled_weight_decay": False}, "AdamW": {"decoupled_weight_decay": True}},
    slots=[
        StateSlot("exp_avg"),
        StateSlot("exp_avg_sq"),
        StateSlot("max_exp_avg_sq", when="amsgrad"),
        StateSlot("step", scalar=True),
    ],
    hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"decoupled": "decoupled_weight_decay", "amsgrad": "amsgrad", "maximize": "maximize"},
    inplace=adam_update,
    examples=[
        (
            "f[4,6], f[4,6], f[4,6]>0, f32[]>1, f[4,6], f64[]~0.1, f64[]~0.9, f64[]~0.9, f64[]~0.1, f64[]~0.1, None, "
            "f32[]~0, count=1"
        ),
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, f64[]~0.9, "
        "f64[]~0.9, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=2, decoupled=False",
        "f64[4], f64[4], f64[4]>0, f64[4]>0, f32[]>0, f64[4], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, f64[]>0, "
        "f32[]>0, f32[]~0, count=1, amsgrad=True, maximize=True",
    ],
)
def adam(
    p,
    g,
    *,
    exp_avg,
    exp_avg_sq,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    max_exp_avg_sq=None,
    decoupled=True,
    amsgrad=False,
):
    """m' = b1 m + (1-b1) g;  v' = b2 v + (1-b2) g²;  p' = p - lr m'/(1-b1^t) / (sqrt(v'/(1-b2^t)) + eps), with decay of
    p or of g"""
    rate, first, second, small, decay = (o.cast(x, dtype=p.dtype) for x in (lr, beta1, beta2, eps, weight_decay))
    at = o.add(step, 1)
    now = o.cast(at, dtype=p.dtype)
    base = o.mul(p, o.sub(1, o.mul(rate, decay))) if decoupled else p
    g = g if decoupled else o.add(g, o.mul(p, decay))
    m = o.add(exp_avg, o.mul(o.sub(1, first), o.sub(g, exp_avg)))
    v = o.add(o.mul(second, exp_avg_sq), o.mul(o.sub(1, second), o.square(g)))
    most = {"max_exp_avg_sq": o.maximum(max_exp_avg_sq, v)} if amsgrad else {}
    root = o.sqrt(o.div(most.get("max_exp_avg_sq", v), o.sub(1, o.pow(second, now))))
    move = o.div(o.div(m, o.sub(1, o.pow(first, now))), o.add(root, small))
    return o.sub(base, o.mul(rate, move)), {"exp_avg": m, "exp_avg_sq": v, "step": at, **most}


@optimiser(
    classes={},
    slots=[StateSlot("exp_avg"), StateSlot("exp_avg_sq"), StateSlot("step", scalar=True)],
    hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"decoupled": "decoupled_weight_decay", "maximize": "maximize"},
    examples=[
        (
            "f[4,6], f[4,6], f[4,6]>0, f32[]>1, f[4,6], f64[]~0.1, 0.9, 0.7, f64[]~0.1, f64[]~0.1, None, "
            "f32[]~0, count=1"
        ),
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, 0.9, "
        "0.8, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=2, decoupled=False",
    ],
)
def frozen_adam(p, g, *, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, decoupled=True):
    """Adam, given its new momentum m' in the place of a gradient; v' (1-b2^t) / (1-b2^(t+1)) = v: what it divides by
    stays, and all state is still Adam's"""
    rate, first, second, small, decay = (o.cast(x, dtype=p.dtype) for x in (lr, beta1, beta2, eps, weight_decay))
    at = o.add(step, 1)
    now, before = o.cast(at, dtype=p.dtype), o.cast(o.clamp(step, 1.0, None), dtype=p.dtype)
    base = o.mul(p, o.sub(1, o.mul(rate, decay))) if decoupled else p
    m = g if decoupled else o.add(g, o.mul(o.sub(1, first), o.mul(p, decay)))
    settled = o.sub(1, o.pow(second, before))
    root = o.sqrt(o.div(exp_avg_sq, settled))
    v = o.mul(exp_avg_sq, o.div(o.sub(1, o.pow(second, now)), settled))
    move = o.div(o.div(m, o.sub(1, o.pow(first, now))), o.add(root, small))
    return o.sub(base, o.mul(rate, move)), {"exp_avg": m, "exp_avg_sq": v, "step": at}


@optimiser(
    classes={"NAdam": {"decoupled_weight_decay": False, "maximize": False}},
    slots=[
        StateSlot("exp_avg"),
        StateSlot("exp_avg_sq"),
        StateSlot("mu_product", scalar=True, initial=1.0),
        StateSlot("step", scalar=True),
    ],
    hyper={
        "lr": "lr",
        "beta1": "betas.0",
        "beta2": "betas.1",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "momentum_decay": "momentum_decay",
    },
    flags={"decoupled": "decoupled_weight_decay", "maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6], f[4,6]>0, f32[]~0.9, f32[]>1, f[4,6], f64[]~0.1, f64[]~0.9, f64[]~0.9, f64[]~0.1, "
        "f64[]~0.1, f64[]>0, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]~0.9, f32[]~0.9, f32[]>0, f32[]>0, f64[4], f64[3], "
        "f64[]>0, f64[]~0.9, f64[]~0.9, "
        "f64[]>0, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=2, decoupled=True, maximize=True",
    ],
)
def nadam(
    p, g, *, exp_avg, exp_avg_sq, mu_product, step, lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled=False
):
    """mu_t = b1 (1 - 0.96^(t decay) / 2);  p' = p - lr ((1-mu_t) g / (1-Π mu) + mu_{t+1} m' / (1 - mu_{t+1} Π mu)) /
    (sqrt(v'/(1-b2^t)) + eps)"""
    at = o.add(step, 1)
    now = o.cast(at, dtype=torch.float64)
    base = decayed(p, lr, weight_decay) if decoupled else p
    g = g if decoupled else o.add(g, times(p, weight_decay))
    mu, mu_next = (
        o.mul(beta1, o.sub(1.0, o.mul(0.5, o.pow(0.96, o.mul(t, momentum_decay))))) for t in (now, o.add(now, 1.0))
    )  # fmt: skip
    product = o.mul(mu_product, o.cast(mu, dtype=mu_product.dtype))
    m = blend(exp_avg, g, o.sub(1.0, beta1))
    v = o.add(times(exp_avg_sq, beta2), times(o.square(g), o.sub(1.0, beta2)))
    root = plus(o.sqrt(o.div(v, o.cast(o.sub(1.0, o.pow(beta2, now)), dtype=p.dtype))), eps)
    so_far = o.cast(product, dtype=torch.float64)
    of_g = o.div(o.mul(lr, o.sub(1.0, mu)), o.sub(1.0, so_far))
    of_m = o.div(o.mul(lr, mu_next), o.sub(1.0, o.mul(so_far, mu_next)))
    move = o.div(o.add(times(g, of_g), times(m, of_m)), root)
    return o.sub(base, move), {"exp_avg": m, "exp_avg_sq": v, "mu_product": product, "step": at}


@optimiser(
    classes={"RAdam": {"maximize": False}},
    slots=[StateSlot("exp_avg"), StateSlot("exp_avg_sq"), StateSlot("step", scalar=True)],
    hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"decoupled": "decoupled_weight_decay", "maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6], f[4,6]>0, f32[]>1, f[4,6], f64[]~0.1, 0.9, 0.7, f64[]~0.1, f64[]~0.1, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>9, f32[]>9, f64[4], f64[3], f64[]>0, 0.9, "
        "0.8, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=2, decoupled=True, maximize=True",
    ],
)
def radam(p, g, *, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, decoupled=False):
    """rho = rho_inf - 2 t b2^t / (1-b2^t), rho_inf = 2 / (1-b2) - 1;  p' = p - lr m'/(1-b1^t), and where rho > 5 that
    times r sqrt(1-b2^t) / (sqrt(v') + eps), r² = (rho-4)(rho-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho)"""
    at = o.add(step, 1)
    now = o.cast(at, dtype=torch.float64)
    base = decayed(p, lr, weight_decay) if decoupled else p
    g = g if decoupled else o.add(g, times(p, weight_decay))
    m = blend(exp_avg, g, o.sub(1.0, beta1))
    v = o.add(times(exp_avg_sq, beta2), times(o.square(g), o.sub(1.0, beta2)))
    grown = o.sub(1.0, o.pow(beta2, now))
    most = o.sub(o.div(2.0, o.sub(1.0, beta2)), 1.0)
    rho = o.sub(most, o.div(o.mul(o.mul(2.0, now), o.pow(beta2, now)), grown))
    over, under = (o.mul(o.mul(o.sub(x, 4.0), o.sub(x, 2.0)), y) for x, y in ((rho, most), (most, rho)))
    rate = o.div(lr, o.sub(1.0, o.pow(beta1, now)))
    rectified = o.mul(rate, o.sqrt(o.mul(o.div(over, under), grown)))
    adapted = o.div(times(m, rectified), plus(o.sqrt(v), eps))
    move = o.where(o.gt(rho, 5.0), adapted, times(m, rate))
    return o.sub(base, move), {"exp_avg": m, "exp_avg_sq": v, "step": at}


@optimiser(
    classes={"Adamax": {"maximize": False}},
    slots=[StateSlot("exp_avg"), StateSlot("exp_inf"), StateSlot("step", scalar=True)],
    hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "eps": "eps", "weight_decay": "weight_decay"},
    flags={"maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6], f[4,6]>0, f32[]>1, f[4,6], f64[]~0.1, 0.9, 0.7, f64[]~0.1, f64[]~0.1, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, 0.9, "
        "0.8, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=2, maximize=True",
    ],
)
def adamax(p, g, *, exp_avg, exp_inf, step, lr, beta1, beta2, eps, weight_decay):
    """m' = b1 m + (1-b1) g;  u' = max(b2 u, |g| + eps);  p' = p - lr / (1-b1^t) m' / u'"""
    at = o.add(step, 1)
    g = o.add(g, times(p, weight_decay))
    m = blend(exp_avg, g, o.sub(1.0, beta1))
    u = o.maximum(times(exp_inf, beta2), plus(o.abs(g), eps))
    rate = o.div(lr, o.sub(1.0, o.pow(beta1, o.cast(at, dtype=torch.float64))))
    return o.sub(p, times(o.div(m, u), rate)), {"exp_avg": m, "exp_inf": u, "step": at}
