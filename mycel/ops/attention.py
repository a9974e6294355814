"""Attention: softmax(q kᵀ · scale + mask) v, and the log-sum-exp of each row, from which the gradient redraws the
weights.

    s = q kᵀ · scale + mask          lse = log Σ exp(s)          p = exp(s - lse)          y = p v
    dv = pᵀ g          ds = p (g vᵀ - Σ g y)          dq = ds k · scale          dk = dsᵀ q · scale

Shapes are (batch, heads, length, width); k and v may have fewer heads, each shared by a group of q's.  A mask is bool
(True: attend) or added, and broadcasts.  `causal` lets row i see columns 0 … i, and excludes a mask.  A row that sees
nothing has y = 0 and lse = -inf.  Each kernel takes torch's fused one where its limits allow, else plain products.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import SplitRule, is_float, op
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


def attention_dims(q, k, v, mask, *, causal=False, scale=None):
    """Batch, groups of heads and, unless causal, rows may be split."""
    if causal and mask is not None:
        raise ValueError("attention: causal excludes a mask")
    rows = "q^" if causal else "q"
    return f"b (g n) {rows} d^, b g k^ d^, b g k^ e^, {_mask_dims(mask, k)} -> b (g n) q e, b (g n) q"


def _grad_dims(g, q, k, v, mask, y, lse, *, causal=False, scale=None):
    rows, columns = ("q^", "k^") if causal else ("q+", "k^" if has_columns(mask) else "k+")
    given = f"b (g n+) {rows} e^, b (g n) q d^, b g {columns} d, b g k e, {_mask_dims(mask, k)}, b (g n) q e, b (g n) q"
    return f"{given} -> b (g n) q d, b g k d, b g k e"


def _mask_grad_dims(g, q, k, v, mask, y, lse, *, scale=None):
    dims = _mask_dims(mask, k, "k")
    return f"b+ (g+ n+) q+ e^, b (g n) q d^, b g k+ d, b g k e, {dims}, b (g n) q e, b (g n) q -> {dims}"


def forward_flops(d):
    """Two products."""
    return 2 * d.b * d.g * d.n * d.q * d.k * (d.d + d.e)


def _backward_flops(d):
    """Five products."""
    return 2 * d.b * d.g * d.n * d.q * d.k * (3 * d.d + 2 * d.e)


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


def scores_in_operators(q, k, mask, causal, scale):
    """Masked scores in the wide dtype."""
    dtype = wide(q.dtype)
    k = repeated(_cast(k, dtype), q.shape[1])
    s = o.mul(o.matmul(_cast(q, dtype), swap(k)), q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        return o.where(below_diagonal(q.shape[2], k.shape[2]), s, -math.inf)
    if mask is None:
        return s
    return o.where(mask, s, -math.inf) if mask.dtype == torch.bool else o.add(s, _cast(mask, dtype))


def weights_in_operators(s, lse, mask):
    """exp(s - lse); a row that sees nothing has weights 0"""
    lse = lse if mask is None else o.where(o.eq(lse, -math.inf), 0.0, lse)
    return o.exp(o.sub(s, o.reshape(lse, shape=(*lse.shape, 1))))


def _attention_in_operators(q, k, v, mask, *, causal=False, scale=None):
    s = scores_in_operators(q, k, mask, causal, scale)
    lse = o.logsumexp(s, dims=(3,), keepdim=False)
    p = weights_in_operators(s, lse, mask)
    return _cast(o.matmul(p, repeated(_cast(v, s.dtype), q.shape[1])), q.dtype), lse


def _score_cotangent(g, g_lse, q, k, v, mask, y, lse, causal, scale):
    """(weights, cotangent of the scores)"""
    s = scores_in_operators(q, k, mask, causal, scale)
    p = weights_in_operators(s, lse, mask)
    cotangent = None if g_lse is None else o.reshape(g_lse, shape=(*g_lse.shape, 1))
    if g is not None:
        g = _cast(g, s.dtype)
        dp = o.matmul(g, swap(repeated(_cast(v, s.dtype), q.shape[1])))
        delta = o.sub(dp, o.sum(o.mul(g, _cast(y, s.dtype)), dims=(3,), keepdim=True))
        cotangent = delta if cotangent is None else o.add(delta, cotangent)
    return p, o.mul(p, cotangent)


def _grad_in_operators(g, q, k, v, mask, y, lse, *, causal=False, scale=None, g_lse=None):
    p, ds = _score_cotangent(g, g_lse, q, k, v, mask, y, lse, causal, scale)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    dq = o.mul(o.matmul(ds, repeated(_cast(k, p.dtype), q.shape[1])), factor)
    dk = o.mul(o.matmul(swap(ds), _cast(q, p.dtype)), factor)
    dv = None if g is None else _grouped(o.matmul(swap(p), _cast(g, p.dtype)), v)
    return _cast(dq, q.dtype), _grouped(dk, k), dv


def _mask_grad_in_operators(g, q, k, v, mask, y, lse, *, scale=None, g_lse=None):
    return unbroadcast(_score_cotangent(g, g_lse, q, k, v, mask, y, lse, False, scale)[1], mask)


def _attention_vjp(g, y, q, k, v, mask, **params):
    gy, g_lse = g
    learned = mask is not None and is_float(mask.dtype)
    masking = {"scale": params.get("scale")}
    if g_lse is not None:
        dmask = _mask_grad_in_operators(gy, q, k, v, mask, *y, **masking, g_lse=g_lse) if learned else None
        return *_grad_in_operators(gy, q, k, v, mask, *y, **params, g_lse=g_lse), dmask
    dmask = attention_mask_grad(gy, q, k, v, mask, *y, **masking) if learned else None
    return *attention_grad(gy, q, k, v, mask, *y, **params), dmask


# The kernels, in torch.


def _route(q, k, v, mask, causal):
    """Which fused kernel takes these operands: "cpu", "cudnn", "flash", "efficient", or "plain" for none."""
    d, fits = q.shape[3], k.shape[3] == v.shape[3] and 0 not in (*q.shape, *k.shape)
    traced = mask is not None and mask.requires_grad  # autograd knows no gradient of a fused kernel's mask
    if not fits or traced or q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    low = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type != "cuda" or q.dtype == torch.float64 or d % (8 if low else 4) != 0:
        return "plain"
    if low and d <= 128 and torch.cuda.get_device_capability(q.device)[0] in (9, 10):
        return "cudnn"  # on an H200 1.5 to 2 times as fast as flash, 3 times as efficient
    square = not causal or q.shape[2] == k.shape[2]  # flash aligns causal rows to the last column
    return "flash" if low and mask is None and square and d <= 256 else "efficient"


def _dense(x):
    """Fused kernels read the last dim as if it were contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_like(x, q):
    """x with the strides of an output for q: cuDNN's plan is kept by the strides of q, k and v alone."""
    laid = torch.empty_like(q)
    return x if x.stride() == laid.stride() else laid.copy_(x)


def _repeat(x, heads):
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(dx, like):
    if dx.shape[1] == like.shape[1]:
        return dx
    return dx.unflatten(1, (like.shape[1], -1)).sum(2, dtype=dx.dtype)


def _bias(mask, q, k, route):
    """The mask as a fused kernel wants it: added, four dims; on GPUs full, for `efficient` with rows of aligned
    length."""
    if mask is None:
        return None
    bias = torch.where(mask, 0.0, -math.inf).to(q.dtype) if mask.dtype == torch.bool else mask.to(q.dtype)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if route == "cpu":
        return bias
    columns = k.shape[2]
    bias = _dense(bias.expand(*bias.shape[:3], columns))
    if route == "efficient":
        bias = torch.nn.functional.pad(bias.contiguous(), (0, -columns % 16))[..., :columns]
    return bias.expand(*q.shape[:3], columns)


def _seeing(mask):
    """Which rows of a mask see anything."""
    return (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1)


def _wide_scores(q, k, mask, causal, scale):
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    s = torch.matmul(q.to(dtype), _repeat(k, q.shape[1]).to(dtype).transpose(2, 3))
    s = s * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        return s.masked_fill(s.new_ones(s.shape[2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(dtype)


def _plain_attention(q, k, v, mask, causal, scale):
    s = _wide_scores(q, k, mask, causal, scale)
    lse = torch.logsumexp(s, 3)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3))
    return torch.matmul(p, _repeat(v, q.shape[1]).to(s.dtype)).to(q.dtype), lse


@op(
    attention_dims,
    dtype=("first", lambda q, *_: wide(q.dtype)),
    vjp=_attention_vjp,
    expand=_attention_in_operators,
    flops=forward_flops,
    parts={"q": SplitRule(attention_rows, uneven=True), "q k": SplitRule(attention_ring, uneven=True)},
    examples=[
        "f[2,4,6,8], f[2,4,3,8], f[2,4,3,8], None", "f[2,4,6,8], f[2,2,6,8], f[2,2,6,8], None, causal=True",
        "f[2,4,6,8], f[2,1,3,8], f[2,1,3,8], bool[2,1,6,3], scale=0.3", "f[2,2,6,8], f[2,2,4,8], f[2,2,4,8], f[2,6,4]",
        "f[2,2,6,4], f[2,2,3,4], f[2,2,3,6], f[1,3]", "f[2,2,4,4], f[2,2,6,4], f[2,2,6,4], None, causal=True",
        "f[1,2,2,4], f[1,2,2,4], f[1,2,2,4], bool[2,2]", "f[2,2,6,4], f[2,2,3,4], f[2,2,3,4], bool[6,1]",
    ],
    product=True, rate="attention", apart=True, precision="low",
)  # fmt: skip
def attention(q, k, v, mask, *, causal=False, scale=None):
    """(softmax(q kᵀ · scale + mask) v, log-sum-exp of the scores)"""
    route = _route(q, k, v, mask, causal)
    if route == "plain":
        return _plain_attention(q, k, v, mask, causal, scale)
    fused, bias = torch.ops.aten, _bias(mask, q, k, route)
    q, k, v = _dense(q), _dense(k), _dense(v)
    if route == "flash":
        return fused._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    if route == "cpu":
        y, lse = fused._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif route == "cudnn":
        y, lse = fused._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
        lse = lse.reshape(q.shape[:3])
    else:
        k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
        y, lse = fused._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
        lse = lse[..., : q.shape[2]]
    return y, lse if mask is None else lse.masked_fill(~_seeing(mask), -math.inf)


def _plain_grad(g, q, k, v, mask, y, lse, causal, scale):
    """(p, ds) from scores computed anew"""
    s = _wide_scores(q, k, mask, causal, scale)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3))
    g = g.to(s.dtype)
    dp = torch.matmul(g, _repeat(v, q.shape[1]).to(s.dtype).transpose(2, 3))
    return p, p * (dp - (g * y).sum(3, keepdim=True))


@op(
    _grad_dims,
    dtype=tuple(lambda *types, at=at: types[at].dtype for at in (1, 2, 3)),
    expand=_grad_in_operators,
    flops=_backward_flops,
    linear=((0,),),
    parts={
        "q": SplitRule(attention_grad_rows, partial="+", uneven=True),
        "q k": SplitRule(attention_grad_ring, uneven=True),
    },
    examples=[
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,4,3,8], f64[2,4,3,8], None, f64[2,4,6,8], f64[2,4,6]>4",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,6,8], f64[2,2,6,8], None, f64[2,4,6,8], f64[2,4,6]>4, causal=True",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,1,3,8], f64[2,1,3,8], bool[2,1,6,3], f64[2,4,6,8], f64[2,4,6]>4, scale=0.3",
        "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,6,4], f64[2,2,6,8], f64[2,2,6]>4",
        "f64[2,2,6,6], f64[2,2,6,4], f64[2,2,3,4], f64[2,2,3,6], f64[1,3], f64[2,2,6,6], f64[2,2,6]>4",
    ],
    product=True,
    rate="attention_grad",
    apart=True,
)
def attention_grad(g, q, k, v, mask, y, lse, *, causal=False, scale=None):
    """Cotangents of q, k and v."""
    route = _route(q, k, v, mask, causal)
    if route == "plain":
        p, ds = _plain_grad(g, q, k, v, mask, y, lse, causal, scale)
        factor = q.shape[3] ** -0.5 if scale is None else scale
        dq = torch.matmul(ds, _repeat(k, q.shape[1]).to(p.dtype)) * factor
        dk = torch.matmul(ds.transpose(2, 3), q.to(p.dtype)) * factor
        dv = torch.matmul(p.transpose(2, 3), g.to(p.dtype))
        return dq.to(q.dtype), _sum_groups(dk, k).to(k.dtype), _sum_groups(dv, v).to(v.dtype)
    fused, bias = torch.ops.aten, _bias(mask, q, k, route)
    lse = lse if mask is None else lse.masked_fill(lse == -math.inf, 0.0)
    g, q, y, like = _dense(g), _dense(q), _dense(y), k
    k, v = _dense(k), _dense(v)
    if route == "flash":
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of random numbers, unused
        return fused._scaled_dot_product_flash_attention_backward(
            g, q, k, v, y, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
        )
    if route == "cpu":
        return fused._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, y, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    if route == "cudnn":
        g, y, lse = _laid_like(g, q), _laid_like(y, q), lse.contiguous().unsqueeze(3)
        return fused._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, y, lse, state, state, bias, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)
    dq, dk, dv, _ = fused._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, bias, y, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, _sum_groups(dk, like), _sum_groups(dv, like)


def _is_tiled(q, k, mask):
    """On a GPU, in 16 bits, all rows and columns: one kernel makes the cotangent of a mask, a tile at a time."""
    whole = mask.ndim >= 2 and tuple(mask.shape[-2:]) == (q.shape[2], k.shape[2])
    return q.is_cuda and q.dtype.itemsize == 2 and whole and 0 not in (*q.shape, *k.shape)


@op(
    _mask_grad_dims,
    dtype=lambda *types: types[4].dtype,
    expand=_mask_grad_in_operators,
    flops=forward_flops,
    linear=((0,),),
    examples=[
        "f64[2,2,6,8], f64[2,2,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,6,4], f64[2,2,6,8], f64[2,2,6]>4",
        "f64[2,4,6,8], f64[2,4,6,8], f64[2,2,4,8], f64[2,2,4,8], f64[2,1,1,4], f64[2,4,6,8], f64[2,4,6]>4, scale=0.3",
        "f64[2,2,6,6], f64[2,2,6,4], f64[2,2,3,4], f64[2,2,3,6], f64[1,3], f64[2,2,6,6], f64[2,2,6]>4",
    ],
    rate="attention",
    apart=True,
)
def attention_mask_grad(g, q, k, v, mask, y, lse, *, scale=None):
    """The cotangent of an added mask: its own equation, for it is large and a constant mask needs none."""
    if _is_tiled(q, k, mask):
        from mycel.ops.triton_bias import attention_bias_grad

        bias = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        factor = q.shape[3] ** -0.5 if scale is None else scale
        return attention_bias_grad(g, q, k, v, bias, y, lse, factor).reshape(mask.shape).to(mask.dtype)
    ds = _plain_grad(g, q, k, v, mask, y, lse, False, scale)[1]
    return ds.sum_to_size(mask.shape).to(mask.dtype)
