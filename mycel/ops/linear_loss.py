"""The last product of a language model and its cross entropy as one operator: logits exist for a few rows at a time, in
the dtype of the product.

    loss, dx, dw = linear_cross_entropy(x, w, None, target)        loss = cross_entropy(x @ w.T, target)

The gradients are made in the same sweep, while a chunk of logits is at hand: nothing of the size of all logits is kept,
computed twice or copied in fp32.  Written by the pass `head` alone, on the way to a gradient.
"""

from __future__ import annotations

import functools

import torch

from mycel.ir import SplitRule, Type, op
from mycel.ops.capture_rules import captures
from mycel.ops.gather_scatter import here
from mycel.ops.loss import cross_entropy
from mycel.ops.rules import cast_like, o

CHUNK = 1 << 26  # logits at a time; twice as many on a GPU in 16 bits
TILE = 64  # classes are padded to a multiple of this on a GPU: rows of 128 bytes
FEWEST = 128  # rows for which that pays: a copy of the weight takes as long as unaligned products of some 20 rows


def linear_cross_entropy_types(x, w, b, target, *, reduction="mean", ignore_index=-100):
    loss = Type(torch.promote_types(x.dtype, torch.float32), ())
    return (loss, x, w) if b is None else (loss, x, w, b)


def linear_cross_entropy_scratch(x, w, b, target, *, reduction="mean", **_):
    """At the fullest moment, besides the results: a chunk of logits, and in 16 bits also of cotangents, as on a GPU,
    rows of x and a few numbers a row; what is summed over chunks, as it was and as it becomes; the weight, where it is
    padded.  The weight's gradient is there in the last moment alone."""
    short, wide = x.dtype.itemsize == 2, max(x.dtype.itemsize, 4)
    n = min(x.shape[0], _rows(w.shape[0], short))
    classes = padded_classes(x.shape[0], w.shape[0]) if short else w.shape[0]
    narrow = (classes + x.shape[1]) * x.dtype.itemsize + 8 * wide  # a row of cotangents
    row = narrow + (classes * wide if short else 0)
    total, result = wide * classes * x.shape[1], w.dtype.itemsize * w.numel
    moments = [n * row, n * narrow + total, 2 * total if reduction == "mean" else total + result]
    if n < x.shape[0]:
        rest = min(n, x.shape[0] - n)
        moments += [total + rest * row, 2 * total + rest * narrow]
    padded = w.dtype.itemsize * classes * x.shape[1] if classes != w.shape[0] else 0
    return max(*moments, result) - result + padded


def linear_cross_entropy_vjp(gs, ys, x, w, b, target, **params):
    """Through the loss, the gradients times g; through the gradients, which are dz = scale (softmax(z) - hit) times w
    and x, their own gradients."""
    g, hx, hw, *hb = gs
    grads = [None, None, None]
    if g is not None:
        grads = [o.mul(d, g) for d in ys[1:]] + [None] * (b is None)
    if hx is None and hw is None and not any(h is not None for h in hb):
        return *grads, None
    p, dz, scale = logit_gradient(x, w, b, target, **params)
    pushed = [o.linear(hx, w)] if hx is not None else []
    pushed += [o.linear(x, hw)] if hw is not None else []
    pushed += [o.expand(h, shape=tuple(p.shape)) for h in hb if h is not None]
    t = functools.reduce(o.add, pushed)
    t = o.mul(o.mul(p, o.sub(t, o.sum(o.mul(p, t), dims=(1,), keepdim=True))), scale)
    more = [o.matmul(t, w), o.linear_weight(t, x), None if b is None else o.sum(t, dims=(0,))]
    if hw is not None:
        more[0] = o.add(more[0], o.matmul(dz, hw))
    if hx is not None:
        more[1] = o.add(more[1], o.linear_weight(dz, hx))
    return *(n if f is None else f if n is None else o.add(f, n) for f, n in zip(grads, more, strict=True)), None


def logit_gradient(x, w, b, target, *, reduction="mean", ignore_index=-100):
    """softmax of all logits, their cotangents, and the scale of each row."""
    z = o.linear(x, w) if b is None else o.add(o.linear(x, w), b)
    keep = o.cast(o.ne(target, ignore_index), dtype=x.dtype)
    scale = o.div(keep, o.sum(keep, dims=(0,))) if reduction == "mean" else keep
    scale = o.reshape(scale, shape=(x.shape[0], 1))
    hit = o.cast(
        o.eq(o.iota(shape=(1, w.shape[0]), dim=1, dtype=target.dtype), o.reshape(target, shape=(x.shape[0], 1))),
        dtype=x.dtype,
    )
    p = o.softmax(z, dim=1)
    return p, o.mul(o.sub(p, hit), scale), scale


def linear_cross_entropy_expand(x, w, b, target, *, reduction="mean", ignore_index=-100):
    z = o.linear(x, w) if b is None else o.add(o.linear(x, w), b)
    loss, _ = o.cross_entropy(z, target, None, reduction=reduction, ignore_index=ignore_index)
    _, dz, _ = logit_gradient(x, w, b, target, reduction=reduction, ignore_index=ignore_index)
    wide = torch.promote_types(x.dtype, torch.float32)
    loss = loss if loss.dtype == wide else o.cast(loss, dtype=wide)
    grads = o.matmul(dz, w), o.linear_weight(dz, x)
    return (loss, *grads) if b is None else (loss, *grads, o.sum(dz, dims=(0,)))


def is_fused(x):
    """On a GPU, in 16 bits: its products give and add up 32 bits, and one kernel of ours does the rest."""
    return x.is_cuda and x.dtype.itemsize == 2 and x.shape[0] > 0 and not torch.is_grad_enabled()


def rows_at_once(x, w):
    """How many rows have their logits at a time: whole tiles of a product."""
    return _rows(w.shape[0], is_fused(x))


def _rows(classes, is_short):
    n = max((2 * CHUNK if is_short else CHUNK) // classes, 1)
    return n - n % 128 if n > 128 else n


def padded_classes(rows, classes):
    """How many classes products of 16 bits get on a GPU: rows of odd length would go through slow kernels."""
    return classes if classes % 8 == 0 or rows < FEWEST else -(-classes // TILE) * TILE


def padded_weight(x, w):
    """w with rows of zeros behind its classes, where that pays."""
    more = padded_classes(x.shape[0], w.shape[0]) - w.shape[0] if is_fused(x) else 0
    return torch.nn.functional.pad(w, (0, 0, 0, more)) if more else w


def chunk_of(x, w, b, target, ignore_index, classes):
    """Of a chunk of rows: the sum of the losses, the cotangents of its logits up to a factor, and that factor of each
    row; None: one.  Behind the classes, where w is padded, cotangents are zero."""
    if is_fused(x):
        from mycel.ops.triton_loss import cotangents

        z = torch.mm(x, w.t(), out_dtype=torch.float32)
        losses, d = cotangents(z, b, target, ignore_index, x.dtype, classes)
        return losses.sum(), d, None
    keep = target != ignore_index
    classes = torch.where(keep, target, 0).unsqueeze(1)
    z = torch.nn.functional.linear(x, w, b)
    z = z.float() if x.dtype.itemsize == 2 else z
    if torch.is_grad_enabled():  # autograd needs the values as they are
        logp = torch.log_softmax(z, 1)
        picked = logp.gather(1, classes)
        d = logp.exp().scatter(1, classes, torch.expm1(picked))  # p - 1 without loss where p is nearly 1
        losses, rows = -picked, torch.ones_like(picked)
    else:
        losses, d, rows = cotangents_in_place(z, classes)
        if x.dtype.itemsize == 2:  # in 32 bits while they last
            d, rows = torch.mul(d, rows, out=torch.empty_like(d, dtype=x.dtype)), torch.ones_like(rows)
    return (losses.squeeze(1) * keep).sum(), d.to(x.dtype), (rows * keep.unsqueeze(1)).to(x.dtype)


def weight_gradient(total, d, x):
    """d.T @ x, added to what there is."""
    if is_fused(x):
        if total is None:
            return torch.mm(d.t(), x, out_dtype=torch.float32)
        return torch.addmm(total, d.t(), x, out_dtype=torch.float32, out=total)
    part = torch.mm(d.t(), x)
    if total is None:
        return part
    return total + part if torch.is_grad_enabled() else total.to(torch.promote_types(x.dtype, torch.float32)).add_(part)


def cotangents_in_place(z, classes):
    """Losses of rows of logits, their cotangents up to a factor, and that factor of each row: all over the memory of
    z."""
    z.sub_(z.amax(1, keepdim=True))
    picked = z.gather(1, classes)
    total = z.exp_().sum(1, keepdim=True)
    return total.log() - picked, z.scatter_add_(1, classes, -total), 1 / total


def linear_cross_entropy_part(at, x, w, b, target, *, reduction="mean", ignore_index=-100):
    """Rows: each rank the sum of its own, divided by the count of all.  Classes: each rank its logits, maxima and sums
    of them over all."""
    x, target = at.masked(x, 0, "n", 0), at.masked(target, 0, "n", ignore_index)
    outputs = (
        split_classes(at, x, w, b, target, ignore_index)
        if at.axes("v")
        else linear_cross_entropy(x, w, b, target, reduction="sum", ignore_index=ignore_index)
    )
    if reduction == "sum":
        return outputs
    count = o.sum(o.cast(o.ne(target, ignore_index), dtype=outputs[0].dtype), dims=(0,))
    count = at.all_reduce(count, "n") if at.axes("n") else count
    return tuple(o.mul(y, cast_like(o.div(1.0, count), y)) for y in outputs)


def split_classes(at, x, w, b, target, ignore_index):
    """The sum of the losses and its gradients where each rank has some of the classes."""
    w = at.masked(w, 0, "v", 0)
    z = o.linear(x, w) if b is None else o.add(o.linear(x, w), b)
    z = at.masked(o.cast(z, dtype=torch.float32) if z.dtype.itemsize == 2 else z, 1, "v", float("-inf"))
    z = o.sub(z, at.all_reduce(o.amax(z, dims=(1,), keepdim=True), "v", ">"))
    e = o.exp(z)
    total = at.all_reduce(o.sum(e, dims=(1,), keepdim=True), "v")
    keep = o.ne(target, ignore_index)
    classes, hit = here(at, "v", o.reshape(o.where(keep, target, 0), shape=(x.shape[0], 1)))
    picked = at.all_reduce(o.where(hit, o.gather(z, classes, dim=1), 0.0), "v")
    rows = o.reshape(o.cast(keep, dtype=z.dtype), shape=(x.shape[0], 1))
    loss = o.sum(o.mul(o.sub(o.log(total), picked), rows), dims=(0, 1))
    column = o.iota(shape=(1, w.shape[0]), dim=1, dtype=classes.dtype)
    hits = o.cast(o.eq(column, o.where(hit, classes, -1)), dtype=z.dtype)  # element by element: in one kernel with p
    d = cast_like(o.mul(o.sub(o.div(e, total), hits), rows), x)
    return loss, o.matmul(d, w), o.linear_weight(d, x), *([] if b is None else [o.sum(d, dims=(0,))])


SPLIT = {
    "n": SplitRule(linear_cross_entropy_part, partial="+", uneven=True),
    "v": SplitRule(linear_cross_entropy_part, partial=("", "+", "", ""), uneven=True),
}


@op(
    lambda x, w, b, target, **_: (
        f"n^ k^, v^ k^, {'' if b is None else 'v^'}, n^ -> , n k, v k{'' if b is None else ', v'}"
    ),
    types=linear_cross_entropy_types,
    flops=lambda d: 6 * d.n * d.k * d.v,
    vjp=linear_cross_entropy_vjp,
    expand=linear_cross_entropy_expand,
    fresh=True,
    scratch=linear_cross_entropy_scratch,
    parts=SPLIT,
    compiles=False,
    examples=[
        "f[6,4], f[5,4], None, i64[6]<5",
        'f[6,4], f[5,4], f[5], i64[6]<5, reduction="sum"',
        "f[6,4], f[5,4], None, i64[6]<5, ignore_index=1",
    ],
    apart=True,
    pads=True,
    rate="product",
    precision="low",
    averages=True,
)
def linear_cross_entropy(x, w, b, target, *, reduction="mean", ignore_index=-100):
    """The cross entropy of x @ w.T + b against class indices, and its gradients for x, w and b."""
    wide = torch.promote_types(x.dtype, torch.float32)
    size, classes, like = rows_at_once(x, w), w.shape[0], w.dtype
    w = padded_weight(x, w)
    loss, dxs, dw, db = 0.0, [], None, None
    for i in range(0, max(x.shape[0], 1), size):
        chunk = x[i : i + size]
        more, d, rows = chunk_of(chunk, w, b, target[i : i + size], ignore_index, classes)
        loss = loss + more
        dxs.append(torch.mm(d, w) if rows is None else torch.mm(d, w) * rows)
        dw = weight_gradient(dw, d, chunk if rows is None else chunk * rows)
        if b is not None:
            part = d[:, :classes].sum(0, dtype=wide) if rows is None else torch.mm(d.t(), rows).squeeze(1)
            db = part if db is None else db + part
        del d
    dx, dw = dxs[0] if len(dxs) == 1 else torch.cat(dxs), dw[:classes]
    if reduction == "mean":
        scale = 1 / (target != ignore_index).sum().to(wide)
        loss, dx, dw, db = loss * scale, dx * scale, dw * scale, None if b is None else db * scale
    grads = (dx, dw.to(like)) if b is None else (dx, dw.to(like), db.to(b.dtype))
    return loss, *grads


if hasattr(torch.nn.functional, "linear_cross_entropy"):  # torch 2.13

    @captures(torch.nn.functional.linear_cross_entropy)
    def _in_chunks(
        input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=None,
        label_smoothing=0.0, options=None,
    ):  # fmt: skip
        """torch's own operator of chunks makes the gradients that tensors ask for while it is captured: the loss alone
        is what it stands for."""
        if options is None or input.ndim > 2 or linear_weight.ndim != 2 or target.dtype != torch.int64:
            return NotImplemented  # torch's own code says it with others
        logits = o.linear(o.reshape(input, shape=(1, *input.shape)) if input.ndim == 1 else input, linear_weight)
        logits = logits if linear_bias is None else o.add(logits, linear_bias)
        ignored = -100 if ignore_index is None else ignore_index
        how = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": label_smoothing}
        loss = cross_entropy(logits, o.reshape(target, shape=logits.shape[:1]), weight, **how)[0]
        return o.reshape(loss, shape=()) if input.ndim == 1 else loss
