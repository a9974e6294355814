"""Losses.  Cross entropy and the negative log likelihood are operators, for their big class dim; the rest are rules.

Logits are [n, classes, ...] and targets class indices [n, ...] or probabilities [n, classes, ...].  A mean keeps its
batch whole; its `expand` is a sum over a count, each of which may be split.
"""

from __future__ import annotations

import math

import torch
from torch.nn._reduction import legacy_get_string

from mycel.ir import is_float, op, rounded
from mycel.ops.capture_rules import captures
from mycel.ops.convert import cast_to
from mycel.ops.rules import o

FEW = 1 << 16  # log probabilities, of which what makes the fewest calls is fastest


def cross_entropy_dims(x, target, weight, *, reduction="mean", **_):
    """The loss, and log probabilities like x."""
    rest = " ".join(f"s{i}" for i in range(x.ndim - 2))
    return f"{loss_dims(x, target, weight, reduction=reduction)}, n c {rest}"


def loss_dims(x, target, weight, *, reduction="mean", **_):
    flag = {"none": "", "sum": "+", "mean": "^"}[reduction]
    rows = [f"n{flag}", *(f"s{i}{flag}" for i in range(x.ndim - 2))]
    full = " ".join([rows[0], "c^", *rows[1:]])
    labels = full if is_float(target.dtype) else " ".join(rows)
    return f"{full}, {labels}, c -> {' '.join(rows) if reduction == 'none' else ''}"


def by_class(weight, x):
    """A value for each class, shaped to broadcast against x [n, classes, ...]."""
    return o.reshape(weight, shape=(x.shape[1],) + (1,) * (x.ndim - 2))


SCALAR_TYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int",
}  # fmt: skip


def scalar_type(dtype):
    """torch's name of a dtype in its errors."""
    return SCALAR_TYPES.get(dtype, str(dtype).removeprefix("torch."))


def refuse_other_dtype(x, weight):
    """torch's own error for weights of classes of another dtype, which its kernels find when they run; of another shape
    the operator's rule knows."""
    if weight is not None and weight.dtype != x.dtype and tuple(weight.shape) == tuple(x.shape[:2][-1:]):
        raise RuntimeError(f"expected scalar type {scalar_type(x.dtype)} but found {scalar_type(weight.dtype)}")


def in_place(x, y):
    """x.mul_(y): the product in the dtype of x."""
    return cast_to(o.mul(x, y), x.dtype)


def numbers(target, x):
    """Truth values as 0 and 1, in the dtype of x."""
    return cast_to(target, x.dtype) if target.dtype == torch.bool else target


def lift(v):
    """[n, ...] -> [n, 1, ...]"""
    return o.reshape(v, shape=(v.shape[0], 1, *v.shape[1:]))


def reduced(losses, reduction, count=None):
    """Losses as they are, summed, or summed and divided by a count (of their number if not given)."""
    if reduction == "none" or losses.ndim == 0:
        return losses
    dims = tuple(range(losses.ndim))
    if reduction == "mean" and count is None:
        return o.mean(losses, dims=dims)
    total = o.sum(losses, dims=dims)
    return o.div(total, count) if reduction == "mean" else total


def chosen(x, target, weight, ignore_index):
    """The classes to look up (zero where ignored) and how much each row weighs (nothing where ignored)."""
    keep = o.ne(target, ignore_index)
    classes = o.where(keep, target, 0)
    kept = o.cast(keep, dtype=x.dtype)
    if weight is None:
        return classes, kept
    rows = o.index_select(weight, o.reshape(classes, shape=(math.prod(target.shape),)), dim=0)
    return classes, o.mul(kept, o.reshape(rows, shape=tuple(target.shape)))


def smoothed(target, classes, label_smoothing):
    """Probabilities moved a little towards the uniform."""
    return o.add(o.mul(target, 1 - label_smoothing), label_smoothing / classes) if label_smoothing else target


def cross_entropy_expand(x, target, weight, *, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    logp, classes = o.log_softmax(x, dim=1), x.shape[1]
    if is_float(target.dtype):
        wanted = smoothed(target, classes, label_smoothing)
        wanted = wanted if weight is None else o.mul(wanted, by_class(weight, x))
        losses = o.neg(o.sum(o.mul(logp, wanted), dims=(1,)))
        return reduced(losses, reduction, math.prod(x.shape) // classes), logp
    losses, count = picked_nll(logp, target, weight, ignore_index)
    if label_smoothing:
        spread = o.sum(logp if weight is None else o.mul(logp, by_class(weight, x)), dims=(1,))
        spread = o.mul(o.cast(o.ne(target, ignore_index), dtype=x.dtype), spread)
        losses = o.sub(o.mul(losses, 1 - label_smoothing), o.mul(spread, label_smoothing / classes))
    return reduced(losses, reduction, count if reduction == "mean" else None), logp


def picked_nll(logp, target, weight, ignore_index):
    """-weight * logp at the target class of each row, and the sum of these weights."""
    classes, rows = chosen(logp, target, weight, ignore_index)
    picked = o.reshape(o.gather(logp, lift(classes), dim=1), shape=tuple(target.shape))
    return o.neg(o.mul(rows, picked)), o.sum(rows, dims=tuple(range(rows.ndim)))


def ignored(at, target, ignore_index=-100, **_):
    """Classes of rows, those that do not count being ignored."""
    if is_float(target.dtype):
        raise at.refusal("a loss with probabilities as targets")
    return at.covered(target, ignore_index)


def cross_entropy_vjp(gs, ys, x, target, weight, **params):
    """Through the loss, and through the log probabilities where they were used."""
    (g, dlogp), (y, logp) = gs, ys
    grads = (None, None, None) if g is None else loss_vjp(g, y, logp, x, target, weight, **params)
    if dlogp is None:
        return grads
    through = o.log_softmax_grad(dlogp, logp, dim=1)
    return through if grads[0] is None else o.add(grads[0], through), *grads[1:]


def loss_vjp(g, y, logp, x, target, weight, *, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    """dx = softmax(x) * (total target weight) - target weight, for each row times its cotangent"""
    classes, rows_shape = x.shape[1], (x.shape[0], *x.shape[2:])
    soft = is_float(target.dtype)
    if reduction == "mean" and x.ndim == 2 and weight is None and not soft and not label_smoothing:
        return o.cross_entropy_mean_grad(g, logp, target, ignore_index=ignore_index), None, None
    index, rows = (None, None) if soft else chosen(x, target, weight, ignore_index)
    count = math.prod(rows_shape) if soft else None
    if reduction == "mean":
        count = count or o.sum(rows, dims=tuple(range(rows.ndim)))
        dcount = None if soft or weight is None else o.neg(o.div(o.mul(g, y), count))
        g = o.div(g, count)
    g = g if reduction == "none" else o.expand(g, shape=rows_shape)
    if soft:
        return soft_cross_entropy_vjp(g, logp, x, target, weight, label_smoothing)
    kept = o.mul(g, o.cast(o.ne(target, ignore_index), dtype=x.dtype))
    hit = o.mul(o.mul(g, rows), 1 - label_smoothing) if label_smoothing else o.mul(g, rows)
    total = hit
    if label_smoothing:
        share = o.mul(kept, label_smoothing / classes)
        total = o.add(hit, o.mul(share, classes if weight is None else o.sum(weight, dims=(0,))))
    dx = o.cross_entropy_grad(x, index, total, hit)
    if label_smoothing:
        dx = o.sub(dx, lift(share) if weight is None else o.mul(lift(share), by_class(weight, x)))
    if weight is None:
        return dx, None, None
    picked = o.reshape(o.gather(logp, lift(index), dim=1), shape=rows_shape)
    drows = o.neg(o.mul(o.mul(kept, 1 - label_smoothing), picked))
    if reduction == "mean":
        drows = o.add(drows, o.mul(o.cast(o.ne(target, ignore_index), dtype=x.dtype), dcount))
    flat = (math.prod(rows_shape),)
    dweight = o.mul(weight, 0.0)
    if label_smoothing:
        dweight = o.neg(o.sum(o.mul(lift(share), logp), dims=(0, *range(2, x.ndim))))
    return dx, None, o.index_add(dweight, o.reshape(index, shape=flat), o.reshape(drows, shape=flat), dim=0)


def soft_cross_entropy_vjp(g, logp, x, target, weight, label_smoothing):
    """The gradient against probabilities; g is by row."""
    g, wanted = lift(g), smoothed(target, x.shape[1], label_smoothing)
    weighted = wanted if weight is None else o.mul(wanted, by_class(weight, x))
    dx = o.mul(g, o.sub(o.mul(o.softmax(x, dim=1), o.sum(weighted, dims=(1,), keepdim=True)), weighted))
    cost = o.neg(o.mul(g, logp))
    dtarget = cost if weight is None else o.mul(cost, by_class(weight, x))
    dtarget = o.mul(dtarget, 1 - label_smoothing) if label_smoothing else dtarget
    dweight = None if weight is None else o.sum(o.mul(cost, wanted), dims=(0, *range(2, x.ndim)))
    return dx, dtarget, dweight


@op(
    cross_entropy_dims,
    dtype=("first", "first"),
    vjp=cross_entropy_vjp,
    expand=cross_entropy_expand,
    flops=lambda d: 6 * math.prod(vars(d).values()),
    examples=[
        'f[6,5], i64[6]<5, None, reduction="sum"',
        "f[6,4], i64[6]<4, None, ignore_index=1",
        'f[4,3,2], i64[4,2]<3, None, reduction="none", label_smoothing=0.1',
        'f[4,3,2,2], i64[4,2,2]<3, f[3]>0, reduction="none", ignore_index=2',
        "f[6,4], i64[6]<4, f[4]>0, label_smoothing=0.2, ignore_index=0",
        'f[6,4], i64[6]<4, f[4]>0, reduction="sum"',
        'f[6,4], f[6,4]>0, None, reduction="sum"',
        'f[4,3,2], f[4,3,2]>0, f[3]>0, reduction="none", label_smoothing=0.1',
        "f[4,3], f[4,3]>0, f[3]>0, label_smoothing=0.1",
    ],
    precision="high",
    averages=True,
    of_rows=lambda at, x, target, weight, **params: o.cross_entropy(
        at.plain(x), ignored(at, target, **params), weight, **params
    ),
)
def cross_entropy(x, target, weight, *, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    """The cross entropy of logits x against class indices or probabilities; and the log probabilities, which its
    gradient needs."""
    logp = torch.log_softmax(x, 1)
    if weight is None and not label_smoothing and not target.is_floating_point():
        return torch.nn.functional.nll_loss(logp, target, None, ignore_index=ignore_index, reduction=reduction), logp
    if weight is None or target.is_floating_point():
        loss = torch.nn.functional.cross_entropy(
            x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        return loss, logp
    keep = target != ignore_index
    classes = torch.where(keep, target, 0)
    rows = weight[classes] * keep
    losses = -(1 - label_smoothing) * rows * logp.gather(1, classes.unsqueeze(1)).squeeze(1)
    if label_smoothing:
        spread = (logp * weight.reshape(-1, *(1,) * (x.ndim - 2))).sum(1)
        losses = losses - label_smoothing / x.shape[1] * (keep * spread)
    if reduction == "none":
        return losses, logp
    return losses.sum() if reduction == "sum" else losses.sum() / rows.sum(), logp


@captures(torch.nn.functional.cross_entropy)
def _cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    if not is_float(target.dtype):
        refuse_other_dtype(input, weight)
    if input.ndim == 1:
        target = o.reshape(target, shape=(1, *target.shape))
        batch = o.reshape(input, shape=(1, *input.shape))
        losses = _cross_entropy(
            batch, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        return o.reshape(losses, shape=()) if reduction == "none" else losses
    mixed = len({x.dtype for x in (input, target, weight) if x is not None and is_float(x.dtype)}) > 1
    form = cross_entropy_expand if mixed else cross_entropy  # whose gradient is in one dtype
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return form(input, target, weight, **options)[0]


REDUCTIONS = ("none", "mean", "sum")  # torch's numbers for them


@captures(torch._C._nn.cross_entropy_loss, "aten.cross_entropy_loss.default")
def _cross_entropy_loss(input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    names = {"reduction": REDUCTIONS[reduction], "label_smoothing": label_smoothing}
    return _cross_entropy(input, target, weight, ignore_index=ignore_index, **names)


def cross_entropy_grad_dims(x, target, total, hit):
    rest = " ".join(f"s{i}" for i in range(x.ndim - 2))
    return f"n c^ {rest}, n {rest}, n {rest}, n {rest} -> n c {rest}"


def cross_entropy_grad_expand(x, target, total, hit):
    return o.scatter_add(o.mul(o.softmax(x, dim=1), lift(total)), lift(target), o.neg(lift(hit)), dim=1)


@op(
    cross_entropy_grad_dims,
    dtype="first",
    expand=cross_entropy_grad_expand,
    flops=lambda d: 6 * math.prod(vars(d).values()),
    followed=0,
    examples=["f[6,4], i64[6]<4, f[6], f[6]", "f[2,3,4], i64[2,4]<3, f[2,4], f[2,4]"],
)
def cross_entropy_grad(x, target, total, hit):
    """softmax(x) * total - one_hot(target) * hit, along the class dim 1; total and hit are by row."""
    return torch.softmax(x, 1).mul_(total.unsqueeze(1)).scatter_add_(1, target.unsqueeze(1), -hit.unsqueeze(1))


def mean_grad_scratch(g, logp, target, **_):
    """The cotangent of logp and two numbers, or what is one number for each row: what is kept, by how much, where."""
    if logp.numel < FEW:
        return logp.bytes + 2 * rounded(logp.dtype.itemsize)
    return target.numel * (9 + 2 * logp.dtype.itemsize) + rounded(logp.dtype.itemsize)


def mean_grad_expand(g, logp, target, *, ignore_index=-100):
    index, rows = chosen(logp, target, None, ignore_index)
    hit = o.mul(o.div(g, o.sum(rows, dims=(0,))), rows)
    return o.scatter_add(o.mul(o.exp(logp), lift(hit)), lift(index), o.neg(lift(hit)), dim=1)


@op(
    ", n^ c^, n^ -> n c",
    dtype=lambda g, logp, target: logp.dtype,
    expand=mean_grad_expand,
    scratch=mean_grad_scratch,
    flops=lambda d: 6 * d.n * d.c,
    followed=0,
    examples=[
        "f[], f[6,4], i64[6]<4",
        "f[], f[6,4], i64[6]<4, ignore_index=1",
        "f[], f[64,1024], i64[64]<4, ignore_index=1",
    ],
)
def cross_entropy_mean_grad(g, logp, target, *, ignore_index=-100):
    """g times the gradient of the mean cross entropy: (exp(logp) - one_hot(target)) / count, nothing where ignored."""
    if logp.numel() < FEW:  # fewest calls
        _, count = torch.ops.aten.nll_loss_forward.default(logp, target, None, 1, ignore_index)
        dlogp = torch.ops.aten.nll_loss_backward.default(g, logp, target, None, 1, ignore_index, count)
        return torch.ops.aten._log_softmax_backward_data.default(dlogp, logp, 1, logp.dtype)
    keep = target != ignore_index
    scale = (keep * (g / keep.sum(dtype=logp.dtype))).unsqueeze(1)  # fewest passes over all classes
    return torch.exp(logp).mul_(scale).scatter_add_(1, torch.where(keep, target, 0).unsqueeze(1), -scale)


def nll_loss_expand(x, target, weight, *, reduction="mean", ignore_index=-100):
    losses, count = picked_nll(x, target, weight, ignore_index)
    return reduced(losses, reduction, count)


@op(
    loss_dims,
    dtype="first",
    expand=nll_loss_expand,
    flops=lambda d: 2 * math.prod(n for k, n in vars(d).items() if k != "c"),
    examples=[
        'f[6,5], i64[6]<5, None, reduction="sum"',
        'f[4,3,2], i64[4,2]<3, None, reduction="none", ignore_index=1',
        "f[4,3,2,2], i64[4,2,2]<3, f[3]>0",
    ],
    precision="high",
    averages=True,
    of_rows=lambda at, x, target, weight, **params: o.nll_loss(
        at.plain(x), ignored(at, target, **params), weight, **params
    ),
)
def nll_loss(x, target, weight, *, reduction="mean", ignore_index=-100):
    """Minus the log probability x of each target class, weighed by class."""
    return torch.nn.functional.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=reduction)


@captures(torch.nn.functional.nll_loss)
def _nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    refuse_other_dtype(input, weight)
    if input.ndim == 1:
        x, target = o.reshape(input, shape=(1, *input.shape)), o.reshape(target, shape=(1,))
        return o.reshape(nll_loss(x, target, weight, reduction=reduction, ignore_index=ignore_index), shape=())
    return nll_loss(input, target, weight, reduction=reduction, ignore_index=ignore_index)


@captures("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_loss_forward(x, target, weight, reduction, ignore_index):
    loss = _nll_loss(x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])
    if REDUCTIONS[reduction] == "none":
        return loss, o.full(0.0, shape=(), dtype=x.dtype)
    batch = x if x.ndim > 1 else o.reshape(x, shape=(1, *x.shape))
    rows = chosen(batch, target if x.ndim > 1 else o.reshape(target, shape=(1,)), weight, ignore_index)[1]
    return loss, o.sum(rows, dims=tuple(range(rows.ndim)))


def bce_vjp(g, y, x, target):
    slope = o.div(o.sub(x, target), o.clamp(o.mul(x, o.sub(1, x)), 1e-12, None))
    return o.mul(g, slope), o.mul(g, o.sub(o.log1p(o.neg(x)), o.log(x)))


@op(
    "..., ... -> ...",
    vjp=bce_vjp,
    flops=lambda d: 8 * d.rows,
    examples=["f32[2,3]~0, f32[2,3]~0"],
    precision="high",
    padding="zeros",
)
def binary_cross_entropy(x, target):
    """-(target * log(x) + (1 - target) * log(1 - x)), logarithms not below -100, for x in [0, 1]"""
    return torch._C._nn.binary_cross_entropy(x, target, None, 0)


@captures("aten.binary_cross_entropy.default")
def _binary_cross_entropy(x, target, weight=None, reduction=1):
    losses = binary_cross_entropy(x, target)
    return reduced(losses if weight is None else in_place(losses, weight), REDUCTIONS[reduction])


@captures("aten.binary_cross_entropy_with_logits.default")
def _binary_cross_entropy_with_logits(x, target, weight=None, pos_weight=None, reduction=1):
    """(1 - t) x - log sigmoid(x), the logarithm weighed 1 + (pos_weight - 1) t; in the dtype of t"""
    if not is_float(target.dtype) and target.dtype != torch.bool:
        names = scalar_type(x.dtype), scalar_type(target.dtype)
        raise RuntimeError("result type {} can't be cast to the desired output type {}".format(*names))
    certainty = o.logsigmoid(x)
    if pos_weight is not None:
        certainty = in_place(certainty, o.add(o.mul(o.sub(pos_weight, 1), target), 1))
    losses = cast_to(o.sub(o.mul(o.sub(1, target), x), certainty), target.dtype)
    return reduced(losses if weight is None else in_place(losses, weight), REDUCTIONS[reduction])


@captures("aten.mse_loss.default")
def _mse_loss(x, target, reduction=1):
    return reduced(o.square(o.sub(x, numbers(target, x))), REDUCTIONS[reduction])


@captures("aten.smooth_l1_loss.default")
def _smooth_l1_loss(x, target, reduction=1, beta=1.0):
    d = o.sub(x, numbers(target, x))
    z = o.abs(d)
    near, far = o.mul(o.square(d), 0.5 / beta), o.sub(z, 0.5 * beta)
    return reduced(o.where(o.lt(z, beta), near, far), REDUCTIONS[reduction])


@captures("aten.huber_loss.default")
def _huber_loss(x, target, reduction=1, delta=1.0):
    d = o.sub(x, numbers(target, x))
    z = o.abs(d)
    near, far = o.mul(o.square(d), 0.5), o.mul(o.sub(z, 0.5 * delta), delta)
    return reduced(o.where(o.le(z, delta), near, far), REDUCTIONS[reduction])


@captures("aten.soft_margin_loss.default")
def _soft_margin_loss(x, target, reduction=1):
    return reduced(o.neg(o.logsigmoid(in_place(x, target))), REDUCTIONS[reduction])


@captures("aten.multi_margin_loss.default")
def _multi_margin_loss(x, target, p=1, margin=1, weight=None, reduction=1):
    """max(0, margin - x[target] + x)^p summed over the other classes, divided by their number"""
    refuse_other_dtype(x, weight)
    single, x = x.ndim < 2, x if x.ndim == 2 else o.reshape(x, shape=(1, math.prod(x.shape)))
    target = o.reshape(target, shape=(x.shape[0],))
    z = o.clamp(o.add(o.sub(x, o.gather(x, lift(target), dim=1)), margin), 0, None)
    z = z if p == 1 else o.square(z)
    z = z if weight is None else o.mul(z, lift(o.index_select(weight, target, dim=0)))
    other = o.ne(o.iota(shape=(x.shape[1],), dim=0, dtype=target.dtype), lift(target))
    losses = o.div(o.sum(o.where(other, z, 0), dims=(1,)), x.shape[1])
    return reduced(o.reshape(losses, shape=()) if single else losses, REDUCTIONS[reduction])


@captures("aten.multilabel_margin_loss_forward.default")
def _multilabel_margin_loss(x, target, reduction):
    """max(0, 1 - x[t] + x[j]) over targets t (those before the first -1) and other classes j, summed, by class"""
    shape, x = tuple(target.shape), x if x.ndim == 2 else o.reshape(x, shape=(1, math.prod(x.shape)))
    target, (n, classes) = o.reshape(target, shape=tuple(x.shape)), x.shape
    listed = o.cumprod(o.cast(o.ge(target, 0), dtype=x.dtype), dim=1)
    index = o.clamp(target, 0, None)
    hits = o.scatter_add(o.full(0, shape=(n, classes), dtype=x.dtype), index, listed, dim=1)
    other = o.cast(o.eq(hits, 0), dtype=x.dtype)
    wanted = o.reshape(o.gather(x, index, dim=1), shape=(n, classes, 1))
    z = o.clamp(o.add(o.sub(o.reshape(x, shape=(n, 1, classes)), wanted), 1), 0, None)
    pairs = o.mul(o.reshape(listed, shape=(n, classes, 1)), o.reshape(other, shape=(n, 1, classes)))
    losses = o.div(o.sum(o.mul(z, pairs), dims=(1, 2)), classes)
    losses = losses if len(shape) == 2 else o.reshape(losses, shape=())
    return reduced(losses, REDUCTIONS[reduction]), o.reshape(o.sub(1, other), shape=shape)


@captures(torch.nn.functional.gaussian_nll_loss)
def _gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """Without torch's look at the values for a negative variance; no gradient sees the variance's floor."""
    if isinstance(var, (int, float)):
        var = o.full(float(var), shape=tuple(input.shape), dtype=input.dtype)
    elif tuple(var.shape) != tuple(input.shape) and tuple(var.shape) == tuple(input.shape[:-1]):
        var = o.reshape(var, shape=(*var.shape, 1))
    floored = o.add(var, o.stop_gradient(o.sub(o.clamp(var, eps, None), var)))
    losses = o.mul(o.add(o.log(floored), o.div(o.square(o.sub(input, target)), floored)), 0.5)
    return reduced(o.add(losses, 0.5 * math.log(2 * math.pi)) if full else losses, reduction)
