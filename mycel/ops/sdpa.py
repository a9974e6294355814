"""torch's scaled_dot_product_attention: as a kernel of its own, and what it means as `attention`."""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.attention import (
    attention,
    attention_dims,
    below_diagonal,
    forward_flops,
    wide,
)
from mycel.ops.capture_rules import captures, draw
from mycel.ops.rules import o


def _sdpa_dims(*types, **params):
    return attention_dims(*types, **params).rpartition(",")[0]


def sdpa_scratch(q, *rest, **how):
    """As attention, and its lse."""
    return attention.scratch(q, *rest, **how) + math.prod(q.shape[:3]) * wide(q.dtype).itemsize


@op(
    _sdpa_dims,
    dtype="first",
    expand=lambda *inputs, **params: attention(*inputs, **params)[0],
    flops=forward_flops,
    scratch=sdpa_scratch,
    examples=[
        "f[2,4,6,8], f[2,4,3,8], f[2,4,3,8], None", "f[2,4,6,8], f[2,2,6,8], f[2,2,6,8], None, causal=True",
        "f[2,4,6,8], f[2,2,3,8], f[2,2,3,8], bool[2,1,6,3], scale=0.3", "f[2,2,6,4], f[2,2,3,4], f[2,2,3,6], f[1,3]",
    ],
    apart=True, precision="low",
)  # fmt: skip
def sdpa(q, k, v, mask, *, causal=False, scale=None):
    """attention without lse; written by late fusion alone"""
    if mask is not None and q.dtype == torch.float64 and mask.dtype == torch.float32:
        mask = mask.to(q.dtype)  # torch takes it, and reads its memory as f64
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@captures(torch.nn.functional.scaled_dot_product_attention, "aten.scaled_dot_product_attention.default")
def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Leading dims broadcast and become batch and heads; causal together with a mask becomes a mask."""
    rows, operands = query.shape[-2], [query] if enable_gqa else [query, key, value]
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in operands))
    q, k, v = (_four_dims(x, lead, enable_gqa) for x in (query, key, value))
    mask = None if attn_mask is None else _mask_of_four(attn_mask, lead)
    if is_causal and mask is not None:
        seen = below_diagonal(rows, key.shape[-2])
        mask = o.logical_and(mask, seen) if mask.dtype == torch.bool else o.where(seen, mask, -math.inf)
        is_causal = False
    if dropout_p > 0:
        draws = counted(q, k, *draw())
        y = attention(q, k, v, mask, draws, causal=is_causal, scale=scale, dropout=float(dropout_p))[0]
    else:
        y = attention(q, k, v, mask, causal=is_causal, scale=scale)[0]
    shape = (*lead, rows, value.shape[-1])
    return y if y.shape == shape else o.reshape(y, shape=shape)


def counted(q, k, key, site):
    """The counts at which rows of attention draw what `dropout` of all weights would."""
    b, h, rows, _ = q.shape
    columns = k.shape[2]
    return o.row_counts(key, 0, shape=(b, h, rows), strides=(h * rows * columns, rows * columns, columns), site=site)


def _four_dims(x, lead, grouped):
    """x with its leading dims broadcast to `lead` and made two, batch and heads; grouped heads keep their number."""
    lead = (*lead[:-1], x.shape[-3]) if grouped and x.ndim > 3 else tuple(lead)
    shape = (*lead, *x.shape[-2:])
    x = x if tuple(x.shape) == shape else o.expand(x, shape=shape)
    flat = (math.prod(lead[:-1]), lead[-1]) if len(lead) > 1 else (*lead, 1) if lead else (1, 1)
    return x if len(lead) == 2 else o.reshape(x, shape=(*flat, *x.shape[-2:]))


def _mask_of_four(mask, lead):
    """A mask that broadcasts over leading dims, as it broadcasts over batch and heads."""
    if len(lead) == 1 and mask.ndim == 3:
        return o.reshape(mask, shape=(mask.shape[0], 1, *mask.shape[1:]))
    if len(lead) <= 2 or mask.ndim <= 3:
        return mask
    if any(n != 1 for n in mask.shape[:-3]):
        mask = o.expand(mask, shape=(*lead[:-1], *mask.shape[-3:]))
    return o.reshape(mask, shape=(math.prod(mask.shape[:-3]), *mask.shape[-3:]))


@captures("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash_for_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True), None


# Chosen by torch itself where a function call is not seen (under autocast); of their results only the first is used
# there.


@captures("aten._scaled_dot_product_flash_attention.default")
def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    y = _sdpa(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return y, None, None, None, query.shape[2], key.shape[2], None, None, None


@captures("aten._scaled_dot_product_cudnn_attention.default")
def _cudnn(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    y = _sdpa(query, key, value, attn_bias, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return y, None, None, None, query.shape[2], key.shape[2], None, None, None


@captures("aten._scaled_dot_product_efficient_attention.default")
def _efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    y = _sdpa(query, key, value, attn_bias, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return y, None, None, None
