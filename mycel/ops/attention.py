"""Attention: softmax(q kᵀ · scale + mask) v, and the log-sum-exp of each row, from which the gradient redraws the
weights.

    s = q kᵀ · scale + mask          lse = log Σ exp(s)          p = exp(s - lse)          y = p v
    dv = pᵀ g          ds = p (g vᵀ - Σ g y)          dq = ds k · scale          dk = dsᵀ q · scale

Shapes are (batch, heads, length, width); k and v may have fewer heads, each shared by a group of q's.  A mask is bool
(True: attend) or added, and broadcasts.  Structure instead of a mask, which excludes one: `causal` lets row i see
columns 0 … i, `window=(before, behind)` columns i - before … i + behind.  A row that sees nothing has y = 0 and
lse = -inf.  With `cap` scores are cap tanh(s / cap) before they are masked; with `draws`, the counts at which rows
draw (`row_counts`), weights are dropped with probability `dropout`, as `drop_rows` does.

Documents: with `rows[b, q, i]` and `columns[b, k, i]`, integers, a row sees a column only if these agree in every i,
and if structure or a bool mask lets it.  That says documents packed into one sequence, padding (rows 1, columns 1 or 0)
and both together.  How many pairs this leaves is data: it is priced as a mask of all pairs is, which is the worst case.

Each kernel takes torch's fused one where its limits allow, one of ours on GPUs where scores are capped or weights
dropped, else plain products; a window without such a kernel goes a block of rows at a time, with the columns these see,
and so do documents on a CPU (`packed_attention.py`).
"""

from __future__ import annotations

import math

import torch

from mycel.ir import SplitRule, is_float, op
from mycel.ops.attention_kernels import (
    FAR,
    added_mask_grad,
    document_attention,
    document_attention_grad,
    largest_block,
    masked_attention,
    masked_attention_grad,
    window_attention,
    window_attention_grad,
)
from mycel.ops.matmul import swap
from mycel.ops.ring import attention_grad_ring, attention_grad_rows, attention_ring, attention_rows, has_columns
from mycel.ops.rules import o, unbroadcast


def _mask_dims(mask, k, columns="c^"):
    """The dims of a mask as it broadcasts over scores.  It has all columns, also where k is split: in a ring rows see
    them in turn."""
    if mask is None:
        return ""
    if mask.ndim > 4:
        raise ValueError(f"attention: a mask of {mask.ndim} dims")
    if mask.ndim and mask.shape[-1] not in (1, k.shape[2]):
        raise ValueError(f"attention: a mask of {mask.shape[-1]} columns for {k.shape[2]} keys")
    names = ["b", "(g n)", "q", columns][4 - mask.ndim :]
    return " ".join("1" if n == 1 else name for n, name in zip(mask.shape, names, strict=True))


def attention_dims(
    q, k, v, mask, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    """Batch, groups of heads and, unless rows see different columns, rows may be split."""
    if (causal, window is not None, mask is not None).count(True) > 1:
        raise ValueError("attention: causal, a window and a mask exclude each other")
    if window is not None and min(window) < 0:
        raise ValueError(f"attention: a window of {window[0]} columns before a row and {window[1]} behind it")
    q_letter = "q^" if causal or window else "q"
    given = f"b (g n) {q_letter} d^, b g k^ d^, b g k^ e^, {_mask_dims(mask, k)}"
    return f"{given}{_more_dims(mask, draws, rows, columns)} -> b (g n) q e, b (g n) q"


def _more_dims(mask=None, draws=None, rows=None, columns=None):
    """The dims of optional operands behind the others: counts, and documents."""
    counts = "" if draws is None else "b (g n) q"
    if (rows is None) != (columns is None):
        raise ValueError("attention: documents of rows without those of columns, or the other way round")
    if rows is None:
        return counts and f", {counts}"
    numbers = not is_float(rows.dtype) and not is_float(columns.dtype)
    if not numbers or not rows.ndim == columns.ndim == 3 or not rows.shape[2]:
        raise ValueError(f"attention: documents of {rows} and {columns}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError("attention: documents beside a mask that is added")
    return f", {counts}, b q i^, b k i^"


def _grad_dims(
    g, q, k, v, mask, y, lse, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    whole = has_columns(mask) or draws is not None  # columns that are told apart
    q_letter, k_letter = ("q^", "k^") if causal or window else ("q+", "k^" if whole else "k+")
    given = f"b (g n+) {q_letter} e^, b (g n) q d^, b g {k_letter} d, b g k e, {_mask_dims(mask, k)}, b (g n) q e"
    return f"{given}, b (g n) q{_more_dims(mask, draws, rows, columns)} -> b (g n) q d, b g k d, b g k e"


def _mask_grad_dims(g, q, k, v, mask, y, lse, draws=None, *, scale=None, cap=None, dropout=0.0):
    dims = _mask_dims(mask, k, "k" if draws is None else "k^")
    columns = "k+" if draws is None else "k^"
    given = f"b+ (g+ n+) q+ e^, b (g n) q d^, b g {columns} d, b g k e, {dims}, b (g n) q e, b (g n) q"
    return f"{given}{_more_dims(draws=draws)} -> {dims.replace('^', '')}"


def forward_flops(d):
    """Two products."""
    return 2 * d.b * d.g * d.n * d.q * d.k * (d.d + d.e)


def _backward_flops(d):
    """Five products, of which the scores are forward's."""
    return 2 * d.b * d.g * d.n * d.q * d.k * (3 * d.d + 2 * d.e)


def _rate(name, q, mask, draws=None, rows=None, columns=None, causal=False, window=None, cap=None, dropout=0.0, **_):
    """There are other kernels for what is causal, has a window, or a mask, documents being one; for wide heads, which
    compute more for each pair that is looked at; and where scores are changed or weights dropped."""
    kind = "_causal" if causal else "_window" if window is not None else "_masked" if mask is not None else ""
    kind = kind if rows is None else "_masked"
    kind += "_wide" if q.shape[-1] > 64 else ""
    return f"{name}{kind}{'_dropped' if dropout else '_capped' if cap is not None else ''}"


def _share(q, k, draws=None, rows=None, columns=None, window=None, **_):
    """Of all pairs of rows and columns those in a window; all, where causal, whose rate is measured so, and with
    documents, of which nothing is known before they come."""
    if window is None or rows is not None:
        return 1.0
    n, m = q.shape[2], k.shape[2]
    return (_pairs(n, m, window[1]) - _pairs(n, m, -window[0] - 1)) / max(n * m, 1)


def _pairs(rows, columns, behind):
    """How many of row i and column j have j - i <= behind."""

    def up_to(n):  # the sum of min(x, columns) for x = 1 … n
        n, whole = max(n, 0), min(max(n, 0), columns)
        return whole * (whole + 1) // 2 + (n - whole) * columns

    return up_to(behind + rows) - up_to(behind)


def mask_scratch(q, k, v, mask, **_):
    """Bytes of a mask as a fused kernel adds it, and of lse before rows that see nothing are set apart."""
    if mask is None:
        return 0
    rows = math.prod(q.shape[:3])
    return rows * (q.dtype.itemsize + 1) + (mask.numel * q.dtype.itemsize if mask.dtype == torch.bool else 0)


def _plain_scratch(scores, weights, results=0, always=False):
    """Bytes of plain products, which there are where scores are changed or weights dropped (`always`: in any case): so
    many times all scores, or those of a window's largest block, one more with a cap; or those there are when weights
    are dropped, besides two times 64 random bits for each.  Of the mask that documents are on GPUs, as bool and as what
    is added: in 16.  `results`: operands that are those of forward.  Fused kernels take what a mask does,
    and with a window each block's results beside those of all."""

    def scratch(q, k, *rest, cap=None, dropout=0.0, window=None, **_):
        if len(rest) > 3 + results and q.dtype.itemsize == 2:
            return q.shape[0] * q.shape[2] * k.shape[2] * 3
        if q.dtype.itemsize < 4:
            return 0
        is_fused = rest[0].shape[3] == q.shape[3] and cap is None and not dropout
        if is_fused and not always:
            return mask_scratch(q, k, rest[0], rest[1]) + (
                0 if window is None else q.bytes + results // 2 * 2 * k.bytes
            )
        pairs = q.shape[2] * k.shape[2] if window is None else largest_block(q.shape[2], k.shape[2], window)
        copies = max(scores * q.dtype.itemsize, weights * q.dtype.itemsize + (16 if dropout else 0))
        return math.prod(q.shape[:2]) * pairs * (copies + (0 if cap is None else q.dtype.itemsize))

    return scratch


def wide(dtype):
    """The dtype that scores and lse are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# The meaning in operators.


def _cast(x, dtype):
    return x if x.dtype == dtype else o.cast(x, dtype=dtype)


def repeated(x, heads):
    """Shared heads, once for each head of q."""
    return x if x.shape[1] == heads else o.repeat_each(x, times=heads // x.shape[1], dim=1)


def _grouped(dx, like):
    """The cotangent of shared heads: the sum over each group, in the dtype of `like`."""
    if dx.shape[1] != like.shape[1]:
        b, heads, *rest = dx.shape
        groups = like.shape[1]
        dx = o.sum(o.reshape(dx, shape=(b, groups, heads // groups, *rest)), dims=(2,))
    return _cast(dx, like.dtype)


def below_diagonal(rows, columns):
    """Where row i sees column j: j <= i."""
    count = {"shape": (rows, columns), "dtype": torch.int64}
    return o.ge(o.iota(dim=0, **count), o.iota(dim=1, **count))


def in_window(rows, columns, window):
    """Where row i sees column j: i - before <= j <= i + behind."""
    count = {"shape": (rows, columns), "dtype": torch.int64}
    ahead = o.sub(o.iota(dim=1, **count), o.iota(dim=0, **count))
    return o.logical_and(o.ge(ahead, -window[0]), o.le(ahead, window[1]))


def products_in_operators(q, k, scale, cap=None):
    """(scores in the wide dtype before they are masked, how steep the cap is there)"""
    dtype = wide(q.dtype)
    k = repeated(_cast(k, dtype), q.shape[1])
    s = o.mul(o.matmul(_cast(q, dtype), swap(k)), q.shape[3] ** -0.5 if scale is None else scale)
    if cap is None:
        return s, None
    t = o.tanh(o.div(s, cap))
    return o.mul(t, cap), o.sub(1.0, o.mul(t, t))


def in_documents(rows, columns):
    """Where rows and columns are of one document."""
    seen = None
    for i in range(rows.shape[2]):
        row, column = (o.slice(x, dim=2, start=i, stop=i + 1) for x in (rows, columns))
        row = o.reshape(row, shape=(rows.shape[0], 1, rows.shape[1], 1))
        equal = o.eq(row, o.reshape(column, shape=(columns.shape[0], 1, 1, columns.shape[1])))
        seen = equal if seen is None else o.logical_and(seen, equal)
    return seen


def masked_in_operators(s, mask, causal, window=None, rows=None, columns=None):
    """Scores with what is not seen at minus infinity, and what is added."""
    if rows is not None:
        s = o.where(in_documents(rows, columns), s, -math.inf)
    if causal:
        return o.where(below_diagonal(*s.shape[2:]), s, -math.inf)
    if window is not None:
        return o.where(in_window(*s.shape[2:], window), s, -math.inf)
    if mask is None:
        return s
    return o.where(mask, s, -math.inf) if mask.dtype == torch.bool else o.add(s, _cast(mask, s.dtype))


def weights_in_operators(s, lse, mask, window=None, rows=None):
    """exp(s - lse); a row that sees nothing has weights 0, one of low numbers goes by its own sum"""
    sees = mask is None and window is None and rows is None
    is_far = None if mask is None or mask.dtype == torch.bool else o.logical_and(o.lt(lse, FAR), o.gt(lse, -math.inf))
    lse = lse if sees else o.where(o.eq(lse, -math.inf), 0.0, lse)
    p = o.exp(o.sub(s, o.reshape(lse, shape=(*lse.shape, 1))))
    if is_far is None:
        return p
    return o.div(p, o.where(o.reshape(is_far, shape=(*lse.shape, 1)), o.sum(p, dims=(3,), keepdim=True), 1.0))


def _dropped(p, draws, dropout):
    return p if draws is None else o.drop_rows(p, draws, p=dropout)


def _attention_in_operators(
    q, k, v, mask, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    s = masked_in_operators(products_in_operators(q, k, scale, cap)[0], mask, causal, window, rows, columns)
    lse = o.logsumexp(s, dims=(3,), keepdim=False)
    p = _dropped(weights_in_operators(s, lse, mask, window, rows), draws, dropout)
    return _cast(o.matmul(p, repeated(_cast(v, s.dtype), q.shape[1])), q.dtype), lse


def _score_cotangents(
    g, g_lse, q, k, v, mask, y, lse, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    """(weights, dropped; cotangent of masked scores; and of those before they were capped)"""
    s, slope = products_in_operators(q, k, scale, cap)
    s = masked_in_operators(s, mask, causal, window, rows, columns)
    p = weights_in_operators(s, lse, mask, window, rows)
    cotangent = None if g_lse is None else o.reshape(g_lse, shape=(*g_lse.shape, 1))
    if g is not None:
        g = _cast(g, s.dtype)
        dp = _dropped(o.matmul(g, swap(repeated(_cast(v, s.dtype), q.shape[1]))), draws, dropout)
        delta = o.sub(dp, o.sum(o.mul(g, _cast(y, s.dtype)), dims=(3,), keepdim=True))
        cotangent = delta if cotangent is None else o.add(delta, cotangent)
    ds = o.mul(p, cotangent)
    return _dropped(p, draws, dropout), ds, ds if slope is None else o.mul(ds, slope)


def _grad_in_operators(g, q, k, v, mask, y, lse, *more, g_lse=None, **how):
    p, _, ds = _score_cotangents(g, g_lse, q, k, v, mask, y, lse, *more, **how)
    factor = q.shape[3] ** -0.5 if how.get("scale") is None else how["scale"]
    dq = o.mul(o.matmul(ds, repeated(_cast(k, p.dtype), q.shape[1])), factor)
    dk = o.mul(o.matmul(swap(ds), _cast(q, p.dtype)), factor)
    dv = None if g is None else _grouped(o.matmul(swap(p), _cast(g, p.dtype)), v)
    return _cast(dq, q.dtype), _grouped(dk, k), dv


def _mask_grad_in_operators(g, q, k, v, mask, y, lse, *draws, g_lse=None, **how):
    return unbroadcast(_score_cotangents(g, g_lse, q, k, v, mask, y, lse, *draws, **how)[1], mask)


def _attention_vjp(g, y, q, k, v, mask, *more, **how):
    gy, g_lse = g
    learned = mask is not None and is_float(mask.dtype)
    masking = {name: x for name, x in how.items() if name in ("scale", "cap", "dropout")}
    nothing = (None,) * len(more)
    if g_lse is not None:
        dmask = _mask_grad_in_operators(gy, q, k, v, mask, *y, *more, **masking, g_lse=g_lse) if learned else None
        return *_grad_in_operators(gy, q, k, v, mask, *y, *more, **how, g_lse=g_lse), dmask, *nothing
    dmask = attention_mask_grad(gy, q, k, v, mask, *y, *more, **masking) if learned else None
    return *attention_grad(gy, q, k, v, mask, *y, *more, **how), dmask, *nothing


@op(
    attention_dims,
    dtype=("first", lambda q, *_: wide(q.dtype)),
    vjp=_attention_vjp,
    expand=_attention_in_operators,
    flops=forward_flops,
    share=lambda q, k, v, mask, *more, **how: _share(q, k, *more, **how),
    parts={"q": SplitRule(attention_rows, uneven=True), "q k": SplitRule(attention_ring, uneven=True)},
    scratch=_plain_scratch(4, weights=2),
    followed=1,
    examples=[
        "f[2,4,6,8], f[2,4,3,8], f[2,4,3,8], None", "f[2,4,6,8], f[2,2,6,8], f[2,2,6,8], None, causal=True",
        "f[2,4,6,8], f[2,1,3,8], f[2,1,3,8], bool[2,1,6,3], scale=0.3", "f[2,2,6,8], f[2,2,4,8], f[2,2,4,8], f[2,6,4]",
        "f[2,2,6,4], f[2,2,3,4], f[2,2,3,6], f[1,3]", "f[2,2,4,4], f[2,2,6,4], f[2,2,6,4], None, causal=True",
        "f[1,2,2,4], f[1,2,2,4], f[1,2,2,4], bool[2,2]", "f[2,2,6,4], f[2,2,3,4], f[2,2,3,4], bool[6,1]",
        "f[2,4,6,8], f[2,2,6,8], f[2,2,6,8], None, window=(2, 0)",
        "f[1,2,6,4], f[1,2,3,4], f[1,2,3,4], None, window=(1, 1)",
        "f[2,4,6,8], f[2,2,6,8], f[2,2,6,8], None, causal=True, cap=2.0",
        "f[2,2,6,4], f[2,2,4,4], f[2,2,4,4], bool[2,1,1,4], i64[2,2,6], dropout=0.4",
        "f[1,4,6,4], f[1,2,6,4], f[1,2,6,4], None, i64[1,4,6], window=(2, 1), cap=3.0, dropout=0.2",
        (
            "f[2,4,4,8], f[2,2,4,8], f[2,2,4,8], None, None, i64[2,4,1]=0 0 1 1 2 3 3 2, i64[2,4,1]=0 0 1 1 2 3 3 2, "
            "causal=True"
        ),
        (
            "f[1,2,4,4], f[1,2,3,4], f[1,2,3,4], bool[4,1]=1 1 1 1, i64[1,2,4], i64[1,4,2]=0 1 5 1 0 1 5 1, "
            "i64[1,3,2]=0 1 5 1 5 0, dropout=0.4"
        ),
    ],
    product=True, apart=True, precision="low",
    rate=lambda q, k, v, mask, *more, **how: _rate("attention", q, mask, *more, **how),
)  # fmt: skip
def attention(
    q, k, v, mask, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    """(softmax(q kᵀ · scale + mask) v, log-sum-exp of the scores)"""
    if rows is not None:
        return document_attention(q, k, v, mask, draws, rows, columns, causal, scale, window, cap, dropout)
    if window is not None:
        return window_attention(q, k, v, scale, window, cap, draws, dropout)
    return masked_attention(q, k, v, mask, causal, scale, cap, draws, dropout)


@op(
    _grad_dims,
    dtype=tuple(lambda *types, at=at: types[at].dtype for at in (1, 2, 3)),
    expand=_grad_in_operators,
    flops=_backward_flops,
    again=1 / 5,
    share=lambda g, q, k, v, mask, y, lse, *more, **how: _share(q, k, *more, **how),
    linear=((0,),),
    scratch=lambda g, *rest, **how: _plain_scratch(5, weights=4, results=2)(*rest, **how),
    parts={
        "q": SplitRule(attention_grad_rows, partial="+", uneven=True),
        "q k": SplitRule(attention_grad_ring, uneven=True),
    },
    followed=0,
    examples=[
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,4,3,8], f64[2,4,3,8], None, f64[2,4,6,8], f64[2,4,6]>4",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,6,8], f64[2,2,6,8], None, f64[2,4,6,8], f64[2,4,6]>4, causal=True",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,1,3,8], f64[2,1,3,8], bool[2,1,6,3], f64[2,4,6,8], f64[2,4,6]>4, scale=0.3",
        "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,6,4], f64[2,2,6,8], f64[2,2,6]>4",
        "f64[2,2,6,6], f64[2,2,6,4], f64[2,2,3,4], f64[2,2,3,6], f64[1,3], f64[2,2,6,6], f64[2,2,6]>4",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,6,8], f64[2,2,6,8], None, f64[2,4,6,8], f64[2,4,6]>4, window=(2, 1)",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,6,8], f64[2,2,6,8], None, f64[2,4,6,8], f64[2,4,6]>4, causal=True, cap=2.",
        (
            "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], bool[2,1,1,4], f64[2,2,6,8], f64[2,2,6]>4, "
            "i64[2,2,6], cap=3.0, dropout=0.4"
        ),
        (
            "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,6,8], f64[2,2,6,8], None, f64[2,4,6,8], f64[2,4,6]>4, None, "
            "i64[2,6,1]<3, i64[2,6,1]<3, causal=True"
        ),
        (
            "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], None, f64[2,2,6,8], f64[2,2,6]>4, None, "
            "i64[2,6,2]<2, i64[2,4,2]<2"
        ),
    ],
    product=True,
    rate=lambda g, q, k, v, mask, y, lse, *more, **how: _rate("attention_grad", q, mask, *more, **how),
    apart=True,
)
def attention_grad(
    g, q, k, v, mask, y, lse, draws=None, rows=None, columns=None, *,
    causal=False, scale=None, window=None, cap=None, dropout=0.0,
):  # fmt: skip
    """Cotangents of q, k and v."""
    if rows is not None:
        how = causal, scale, window, cap, dropout
        return document_attention_grad(g, q, k, v, mask, y, lse, draws, rows, columns, *how)
    if window is not None:
        return window_attention_grad(g, q, k, v, y, lse, scale, window, cap, draws, dropout)
    return masked_attention_grad(g, q, k, v, mask, y, lse, causal, scale, cap, draws, dropout)


@op(
    _mask_grad_dims,
    dtype=lambda *types: types[4].dtype,
    expand=_mask_grad_in_operators,
    flops=forward_flops,
    again=1.0,
    scratch=lambda g, *rest, **how: _plain_scratch(5, weights=4, results=2, always=True)(*rest, **how),
    linear=((0,),),
    examples=[
        "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,6,4], f64[2,2,6,8], f64[2,2,6]>4",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,1,1,4], f64[2,4,6,8], f64[2,4,6]>4, scale=0.3",
        "f64[2,2,6,6], f64[2,2,6,4], f64[2,2,3,4], f64[2,2,3,6], f64[1,3], f64[2,2,6,6], f64[2,2,6]>4",
        (
            "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,6,4], f64[2,2,6,8], f64[2,2,6]>4, "
            "i64[2,2,6], cap=3.0, dropout=0.4"
        ),
    ],
    rate="attention_mask_grad",
    apart=True,
)
def attention_mask_grad(g, q, k, v, mask, y, lse, draws=None, *, scale=None, cap=None, dropout=0.0):
    """The cotangent of an added mask: its own equation, for it is large and a constant mask needs none."""
    return added_mask_grad(g, q, k, v, mask, y, lse, scale, cap, draws, dropout)
