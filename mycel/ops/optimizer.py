"""Optimiser updates: one equation for all parameters of a group, one fused kernel.

    p1' p2' m1' m2' v1' v2' t1' t2' = adam(p1 p2 m1 m2 v1 v2 t1 t2, g1 g2, lr, beta1, beta2, eps, decay, scale, skip, count=2)

What is updated comes first, in the order of the results; gradients are divided by `scale` (None: taken as they are); where `skip` is 1 nothing
changes.  Hyper-parameters are scalar operands, since schedules change them from step to step; the kernels take numbers or tensors.
`inplace` writes the results over their operands, and may overwrite the gradients: the state of a step is donated.
"""

from __future__ import annotations

import torch

from mycel.ir import Part, Type, op
from mycel.ops.rules import o


def columns(xs, count, slots):
    """The operands of an update: lists of `count` each (the parameter, then its state), the gradients, the scalars."""
    lists = [list(xs[i * count : (i + 1) * count]) for i in range(slots + 1)]
    return lists[:slots], lists[slots], xs[(slots + 1) * count :]


def update_dims(types, count, slots):
    """Each parameter lies as its state and its gradient do."""
    own = [" ".join(f"p{i}d{d}" for d in range(types[i].ndim)) for i in range(count)]
    states = [own[i % count] if types[i].ndim else "" for i in range(slots * count)]
    scalars = [""] * (len(types) - (slots + 1) * count)
    return f"{', '.join([*states, *own, *scalars])} -> {', '.join(states)}"


def laid_like(params, grads):
    """Gradients that lie as their parameters do, each in memory of its own: a kernel that scales them writes them back."""
    seen = set()
    made = []
    for p, g in zip(params, grads, strict=True):
        if g.stride() != p.stride() or g.data_ptr() in seen:
            g = torch.empty_like(p).copy_(g)
        seen.add(g.data_ptr())
        made.append(g)
    return made


# -- Adam and AdamW ----------------------------------------------------------------------------------------------------


def adam_slots(amsgrad):
    """parameter, first moment, second moment, (its maximum,) step count"""
    return 5 if amsgrad else 4


def adam_expand(*xs, count, decoupled=True, amsgrad=False, maximize=False):
    """m' = b1 m + (1-b1) g;  v' = b2 v + (1-b2) g²;  p' = p - lr m'/(1-b1^t) / (sqrt(v'/(1-b2^t)) + eps), with decay of p or of g"""
    lists, gs, (lr, b1, b2, eps, decay, scale, skip) = columns(xs, count, adam_slots(amsgrad))
    new = [[] for _ in lists]
    for i, g in enumerate(gs):
        p, m, v, *top, t = (column[i] for column in lists)
        rate, first, second, small, wd = (o.cast(x, dtype=p.dtype) for x in (lr, b1, b2, eps, decay))
        g = o.neg(g) if maximize else g
        g = g if scale is None else o.div(g, o.cast(scale, dtype=p.dtype))
        at = o.add(t, 1)
        now = o.cast(at, dtype=p.dtype)
        base = o.mul(p, o.sub(1, o.mul(rate, wd))) if decoupled else p
        g = g if decoupled else o.add(g, o.mul(p, wd))
        m1 = o.add(m, o.mul(o.sub(1, first), o.sub(g, m)))
        v1 = o.add(o.mul(second, v), o.mul(o.sub(1, second), o.square(g)))
        most = [o.maximum(top[0], v1)] if amsgrad else []
        root = o.sqrt(o.div([v1, *most][-1], o.sub(1, o.pow(second, now))))
        move = o.div(o.div(m1, o.sub(1, o.pow(first, now))), o.add(root, small))
        after = (o.sub(base, o.mul(rate, move)), m1, v1, *most, at)
        for column, old, value in zip(new, (p, m, v, *top, t), after, strict=True):
            column.append(o.where(o.eq(skip, 1.0), old, value))
    made = tuple(x for column in new for x in column)
    return made if len(made) > 1 else made[0]


def adam_update(*xs, count, decoupled=True, amsgrad=False, maximize=False):
    """Adam over the memory of its operands."""
    (params, first, second, *top, steps), grads, (lr, beta1, beta2, eps, decay, scale, skip) = columns(xs, count, adam_slots(amsgrad))
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        params, laid_like(params, grads), first, second, top[0] if amsgrad else [], steps, lr=float(lr), beta1=float(beta1), beta2=float(beta2),
        weight_decay=float(decay), eps=float(eps), amsgrad=amsgrad, maximize=maximize, grad_scale=scale, found_inf=skip,
    )  # fmt: skip
    torch._foreach_sub_(steps, [skip] * count)


@op(
    lambda *types, count, amsgrad=False, **_: update_dims(types, count, adam_slots(amsgrad)),
    dtype="first",
    types=lambda *types, count, amsgrad=False, **_: tuple(types[: count * adam_slots(amsgrad)]),
    expand=adam_expand,
    inplace=adam_update,
    examples=[
        "f[4,6], f[4,6], f[4,6]>0, f32[]>1, f[4,6], f64[]~0.1, f64[]~0.9, f64[]~0.9, f64[]~0.1, f64[]~0.1, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, "
        "f64[]>0, f32[]>0, f32[]~0, count=2, decoupled=False",
        "f64[4], f64[4], f64[4]>0, f64[4]>0, f32[]>0, f64[4], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=1, "
        "amsgrad=True, maximize=True",
    ],
)
def adam(*xs, count, decoupled=True, amsgrad=False, maximize=False):
    """One step of Adam (decoupled: AdamW) for `count` parameters."""
    done = (4 + amsgrad) * count
    new = [*(x.clone() for x in xs[:done]), *(g.clone() for g in xs[done : done + count])]
    adam_update(*new, *xs[done + count :], count=count, decoupled=decoupled, amsgrad=amsgrad, maximize=maximize)
    return tuple(new[:done]) if done > 1 else new[0]


# -- SGD ---------------------------------------------------------------------------------------------------------------


def sgd_expand(*xs, count, momentum=False, nesterov=False, maximize=False):
    """b' = mu b + (1-damp) g (the first time: g);  p' = p - lr b', or with Nesterov p - lr (g + mu b')"""
    lists, gs, (lr, mu, damp, decay, first, scale, skip) = columns(xs, count, 1 + momentum)
    new = [[] for _ in lists]
    for i, g in enumerate(gs):
        p, *buffer = (column[i] for column in lists)
        rate, keep, lost, wd = (o.cast(x, dtype=p.dtype) for x in (lr, mu, damp, decay))
        g = g if scale is None else o.div(g, o.cast(scale, dtype=p.dtype))
        g = o.neg(g) if maximize else g
        g = o.add(g, o.mul(p, wd))
        after = []
        if momentum:
            b = o.where(o.ne(first, 0.0), g, o.add(o.mul(buffer[0], keep), o.mul(g, o.sub(1, lost))))
            after, g = [b], o.add(g, o.mul(b, keep)) if nesterov else b
        for column, old, value in zip(new, (p, *buffer), (o.sub(p, o.mul(rate, g)), *after), strict=True):
            column.append(o.where(o.eq(skip, 1.0), old, value))
    made = tuple(x for column in new for x in column)
    return made if len(made) > 1 else made[0]


def sgd_update(*xs, count, momentum=False, nesterov=False, maximize=False):
    """SGD over the memory of its operands."""
    (params, *buffers), grads, (lr, mu, damp, decay, first, scale, skip) = columns(xs, count, 1 + momentum)
    torch._fused_sgd_(
        params, laid_like(params, grads), buffers[0] if momentum else [], weight_decay=float(decay), momentum=float(mu) if momentum else 0.0,
        lr=float(lr), dampening=float(damp), nesterov=nesterov, maximize=maximize, is_first_step=bool(first), grad_scale=scale, found_inf=skip,
    )  # fmt: skip


@op(
    lambda *types, count, momentum=False, **_: update_dims(types, count, 1 + momentum),
    dtype="first",
    types=lambda *types, count, momentum=False, **_: tuple(types[: count * (1 + momentum)]),
    expand=sgd_expand,
    inplace=sgd_update,
    examples=[
        "f[4,6], f[4,6], f64[]>0, f64[], f64[], f64[]>0, f64[]~0, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4], f64[3], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, f64[]~0, f32[]>0, f32[]~0, count=2, momentum=True",
        "f64[4], f64[4], f64[4], f64[]>0, f64[]~0.9, f64[]~0, f64[]>0, f64[]>0, f32[]>0, f32[]~0, count=1, momentum=True, nesterov=True",
        "f64[4], f64[4], f64[4], f64[]>0, f64[]~0.9, f64[]~0, f64[]>0, f64[]~0, None, f32[]~0, count=1, momentum=True, nesterov=True, maximize=True",
    ],
)
def sgd(*xs, count, momentum=False, nesterov=False, maximize=False):
    """One step of SGD for `count` parameters, with a momentum buffer each or none."""
    done = (1 + momentum) * count
    new = [*(x.clone() for x in xs[:done]), *(g.clone() for g in xs[done : done + count])]
    sgd_update(*new, *xs[done + count :], count=count, momentum=momentum, nesterov=nesterov, maximize=maximize)
    return tuple(new[:done]) if done > 1 else new[0]


# -- the size of all gradients -----------------------------------------------------------------------------------------


def norm_dtype(types):
    return torch.float64 if any(t.dtype == torch.float64 for t in types) else torch.float32


def global_norm_expand(*xs):
    wide = [o.cast(x, dtype=norm_dtype(xs)) for x in xs]
    squares = [o.sum(o.square(x), dims=tuple(range(x.ndim))) if x.ndim else o.square(x) for x in wide]
    total = squares[0]
    for s in squares[1:]:
        total = o.add(total, s)
    return o.sqrt(total)


def norm_dims(*types):
    """Each tensor lies as it will."""
    own = [" ".join(f"p{i}d{d}+" for d in range(t.ndim)) for i, t in enumerate(types)]
    return f"{', '.join(own) or '...'} -> "


def global_norm_part(at, *xs):
    """Squares of parts, summed over the axes each tensor is split over, those with the same axes at once."""
    groups = {}
    for i, x in enumerate(xs):
        axes = {a for d in range(x.ndim) for a in at.axes(f"p{i}d{d}")}
        groups.setdefault(tuple(a for a in at.mesh.axes if a in axes), []).append(x)
    total = None
    for axes, group in groups.items():
        squares = o.square(global_norm(*group))
        if axes:
            squares = o.all_reduce(squares, axes=axes, count=at.mesh.count(axes))
        if total is not None and total.dtype != squares.dtype:
            total, squares = o.cast(total, dtype=torch.float64), o.cast(squares, dtype=torch.float64)
        total = squares if total is None else o.add(total, squares)
    return o.sqrt(total)


def square_sum(x, dtype):
    """As a dot product, the fastest way on a CPU; 16 bits are widened."""
    return torch.dot(x, x).to(dtype) if x.dtype in (torch.float32, torch.float64) else torch.linalg.vector_norm(x, dtype=dtype).square()


@op(
    norm_dims,
    types=lambda *types: Type(norm_dtype(types), ()),
    expand=global_norm_expand,
    parts={"*": Part(global_norm_part, uneven=True)},
    fresh=True,
    compiles=False,
    examples=["f[4,6], f[3]", "f32[4], bf16[2,2]", "f64[]"],
)
def global_norm(*xs):
    """The 2-norm of all tensors as one vector, in fp32 at least."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
    if not xs[0].is_cpu:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(xs, 2, dtype=wide)))
    return torch.stack([square_sum(x.reshape(-1), wide) for x in xs]).sum().sqrt()
