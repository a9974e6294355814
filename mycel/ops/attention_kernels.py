"""Kernels of attention, in torch: its fused ones where their limits allow, else plain products.

    cudnn, flash, efficient    on GPUs, by dtype, width and hardware
    tiled                      on GPUs, in 16 bits, where scores are capped or weights dropped (`triton_attention.py`)
    cpu                        torch's fused one there
    plain                      products in the wide dtype
    window                     flash where it can; else blocks of rows, each with the columns it sees, by those above
    documents                  on a CPU each document, or a few small ones, by those above (`packed_attention.py`); on
                               GPUs tiled, in 16 bits, else a mask

Copied into generated code by what `attention.py` calls: functions of tensors alone.
"""

from __future__ import annotations

import math

import torch

from mycel.ops.random import keeps

FEWEST_ROWS = 64  # of a block
FEW_COLUMNS = 512  # of documents that see both ways: a mask of all pairs is quicker than tiles up to here, on an H200
SHORT = (
    64  # rows and columns up to which a mask is left to `efficient`: windows of 49 pixels take it a third of the time
)
FAR = -1e3  # below this lse has lost digits that weights need: where a mask adds a low number to a whole row


def _route(q, k, v, mask, causal, changed=False):
    """Which fused kernel takes these operands: "cpu", "cudnn", "flash", "efficient", "tiled" (alone where scores are
    changed or weights dropped), or "plain" for none."""
    if changed:
        return "tiled" if _is_tiled(q, k, v) else "plain"
    d, fits = q.shape[3], k.shape[3] == v.shape[3] and 0 not in (*q.shape, *k.shape)
    traced = mask is not None and mask.requires_grad  # autograd knows no gradient of a fused kernel's mask
    if not fits or traced or q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    low = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type != "cuda" or q.dtype == torch.float64 or d % (8 if low else 4) != 0:
        return "plain"
    short = mask is not None and max(q.shape[2], k.shape[2]) <= SHORT
    if low and d <= 128 and not short and torch.cuda.get_device_capability(q.device)[0] in (9, 10):
        return "cudnn"  # on an H200 1.5 to 2 times as fast as flash, 3 times as efficient
    square = not causal or q.shape[2] == k.shape[2]  # flash aligns causal rows to the last column
    return "flash" if low and mask is None and square and d <= 256 else "efficient"


def _is_tiled(q, k, v):
    """On a GPU, in 16 bits, and nothing that torch's autograd is to follow."""
    low = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    traced = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return low and not traced and max(q.shape[3], v.shape[3]) <= 256 and 0 not in (*q.shape, *k.shape)


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
    """The mask as a fused kernel wants it: added, four dims; on GPUs full, but for heads that cuDNN reads it for: a
    compiler writes what is expanded; for `efficient` with rows of aligned length."""
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
    heads = bias.shape[1] if route == "cudnn" else q.shape[1]
    return bias.expand(q.shape[0], heads, q.shape[2], columns)


def _seeing(mask):
    """Which rows of a mask see anything."""
    return (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1)


def _wide_scores(q, k, mask, causal, scale, cap):
    """(scores, how steep the cap is there)"""
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    s = torch.matmul(q.to(dtype), _repeat(k, q.shape[1]).to(dtype).transpose(2, 3))
    s = s * (q.shape[3] ** -0.5 if scale is None else scale)
    slope = None
    if cap is not None:
        t = torch.tanh(s / cap)
        s, slope = t * cap, 1 - t * t
    if causal:
        return s.masked_fill(s.new_ones(s.shape[2:], dtype=torch.bool).tril().logical_not(), -math.inf), slope
    if mask is None:
        return s, slope
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(dtype), slope


def _dropped(p, draws, dropout):
    """Weights of which some are dropped."""
    if draws is None:
        return p
    return p * keeps(draws, p.shape[3], dropout) * (1.0 / (1.0 - dropout) if dropout < 1 else 0.0)


def _weights(s, lse, mask):
    """exp(s - lse); rows of low numbers, which lse tells too coarsely, by their own sum"""
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3))
    if mask is None or mask.dtype == torch.bool:
        return p
    return p / torch.where(_is_far(lse).unsqueeze(3), p.sum(3, keepdim=True), 1.0)


def _is_far(lse):
    return (lse < FAR) & (lse > -math.inf)


def _has_far_rows(lse, mask):
    """Are there rows of low numbers, of which torch's fused kernels have wrong gradients?  Looked for on CPUs alone."""
    return lse.device.type == "cpu" and mask is not None and mask.dtype != torch.bool and bool(_is_far(lse).any())


def _plain_attention(q, k, v, mask, causal, scale, cap, draws, dropout):
    s, _ = _wide_scores(q, k, mask, causal, scale, cap)
    lse = torch.logsumexp(s, 3)
    p = _weights(s, lse, mask)
    return torch.matmul(_dropped(p, draws, dropout), _repeat(v, q.shape[1]).to(s.dtype)).to(q.dtype), lse


def _tiled_structure(q, k, scale, cap, dropout, causal, window):
    """Numbers for the tiled kernels: scale, cap, dropout, and how many columns a row sees before it and behind."""
    beyond = q.shape[2] + k.shape[2]
    before, behind = window if window is not None else (beyond, 0 if causal else beyond)
    return q.shape[3] ** -0.5 if scale is None else scale, cap or 0.0, dropout, before, behind


def masked_attention(q, k, v, mask, causal, scale, cap=None, draws=None, dropout=0.0):
    """(y, lse)"""
    route = _route(q, k, v, mask, causal, cap is not None or draws is not None)
    if route == "plain":
        return _plain_attention(q, k, v, mask, causal, scale, cap, draws, dropout)
    if route == "tiled":
        return _tiled(q, k, v, mask, draws, _tiled_structure(q, k, scale, cap, dropout, causal, None))
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


def _tiled(q, k, v, mask, draws, numbers, rows=None, columns=None):
    from mycel.ops.triton_attention import tiled_attention

    return tiled_attention(_dense(q), _dense(k), _dense(v), mask, draws, rows, columns, *numbers)


def _tiled_grad(g, q, k, v, mask, y, lse, draws, numbers, rows=None, columns=None):
    from mycel.ops.triton_attention import tiled_attention_grad

    share = (g.float() * y.float()).sum(3)
    operands = _dense(g), _dense(q), _dense(k), _dense(v), mask, draws, rows, columns
    return tiled_attention_grad(*operands, share, lse, *numbers)


def _plain_grad(g, q, k, v, mask, y, lse, causal, scale, cap, draws, dropout):
    """(p, cotangents of masked scores, and of those before they were capped) from scores computed anew"""
    s, slope = _wide_scores(q, k, mask, causal, scale, cap)
    p = _weights(s, lse, mask)
    g = g.to(s.dtype)
    dp = torch.matmul(g, _repeat(v, q.shape[1]).to(s.dtype).transpose(2, 3))
    ds = p * (_dropped(dp, draws, dropout) - (g * y).sum(3, keepdim=True))
    return _dropped(p, draws, dropout), ds, ds if slope is None else ds * slope


def masked_attention_grad(g, q, k, v, mask, y, lse, causal, scale, cap=None, draws=None, dropout=0.0):
    """Cotangents of q, k and v."""
    route = _route(q, k, v, mask, causal, cap is not None or draws is not None)
    if route == "tiled":
        numbers = _tiled_structure(q, k, scale, cap, dropout, causal, None)
        return _tiled_grad(g, q, k, v, mask, y, lse, draws, numbers)
    if route == "plain" or _has_far_rows(lse, mask):
        p, _, ds = _plain_grad(g, q, k, v, mask, y, lse, causal, scale, cap, draws, dropout)
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


def _has_tiled_mask_grad(q, k, mask):
    """On a GPU, in 16 bits, all rows and columns: one kernel makes the cotangent of a mask, a tile at a time."""
    whole = mask.ndim >= 2 and tuple(mask.shape[-2:]) == (q.shape[2], k.shape[2])
    return q.is_cuda and q.dtype.itemsize == 2 and whole and 0 not in (*q.shape, *k.shape)


def added_mask_grad(g, q, k, v, mask, y, lse, scale, cap=None, draws=None, dropout=0.0):
    """The cotangent of an added mask."""
    if _has_tiled_mask_grad(q, k, mask) and cap is None:
        from mycel.ops.triton_bias import attention_bias_grad

        bias = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        factor = q.shape[3] ** -0.5 if scale is None else scale
        share = (g.float() * y.float()).sum(3)
        return attention_bias_grad(g, q, k, v, bias, share, lse, factor, draws, dropout).reshape(mask.shape)
    ds = _plain_grad(g, q, k, v, mask, y, lse, False, scale, cap, draws, dropout)[1]
    return ds.sum_to_size(mask.shape).to(mask.dtype)


# -- a window


def _flash_takes(q, k, v):
    """Does torch's flash attention take a window of these?  It aligns rows to the last column."""
    low = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    fits = k.shape[3] == v.shape[3] == q.shape[3] and 0 not in (*q.shape, *k.shape)
    return low and fits and q.shape[2] == k.shape[2] and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def _blocks(rows, columns, window):
    """(first row, end of rows, first column, end of columns), for blocks of rows and the columns that these see."""
    size = max((sum(window) + 1) // 2, FEWEST_ROWS)
    starts = range(0, rows, size)
    return [
        (i, min(i + size, rows), min(max(i - window[0], 0), columns), min(i + size + window[1], columns))
        for i in starts
    ]


def largest_block(rows, columns, window):
    """The most pairs of a row and a column that a block has."""
    return max(((stop - i) * (last - first) for i, stop, first, last in _blocks(rows, columns, window)), default=0)


def _band(block, window, device):
    """Which columns of a block its rows see."""
    start, stop, first, last = block
    rows, columns = torch.arange(start, stop, device=device), torch.arange(first, last, device=device)
    ahead = columns.unsqueeze(0) - rows.unsqueeze(1)
    return (ahead >= -window[0]) & (ahead <= window[1])


def _draws_of(block, draws):
    """The counts of a block's rows, from its first column on."""
    return None if draws is None else draws[:, :, block[0] : block[1]] + block[2]


def window_attention(q, k, v, scale, window, cap=None, draws=None, dropout=0.0):
    """(y, lse)"""
    changed = cap is not None or draws is not None
    if changed and _is_tiled(q, k, v):
        return _tiled(q, k, v, None, draws, _tiled_structure(q, k, scale, cap, dropout, False, window))
    if not changed and _flash_takes(q, k, v):
        q, k, v = (_dense(x).transpose(1, 2) for x in (q, k, v))
        before, behind = window
        y, lse = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale,
            window_size_left=before, window_size_right=behind,
        )[:2]  # fmt: skip
        return y.transpose(1, 2), lse
    parts = []
    for block in _blocks(q.shape[2], k.shape[2], window):
        start, stop, first, last = block
        keys, values, band = k[:, :, first:last], v[:, :, first:last], _band(block, window, q.device)
        more = cap, _draws_of(block, draws), dropout
        parts.append(masked_attention(q[:, :, start:stop], keys, values, band, False, scale, *more))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([y for y, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def window_attention_grad(g, q, k, v, y, lse, scale, window, cap=None, draws=None, dropout=0.0):
    """Cotangents of q, k and v."""
    changed = cap is not None or draws is not None
    if changed and _is_tiled(q, k, v):
        numbers = _tiled_structure(q, k, scale, cap, dropout, False, window)
        return _tiled_grad(g, q, k, v, None, y, lse, draws, numbers)
    if not changed and _flash_takes(q, k, v):
        g, q, k, v, y = (_dense(x).transpose(1, 2) for x in (g, q, k, v, y))
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of random numbers, unused
        grads = torch.ops.aten._flash_attention_backward(
            g, q, k, v, y, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, False, state, state, scale=scale,
            window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip
        return tuple(d.transpose(1, 2) for d in grads)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _blocks(q.shape[2], k.shape[2], window):
        start, stop, first, last = block
        own = [x[:, :, start:stop] for x in (g, q)]
        seen = [x[:, :, first:last] for x in (k, v)]
        after = [x[:, :, start:stop] for x in (y, lse)]
        band, more = _band(block, window, q.device), (cap, _draws_of(block, draws), dropout)
        dq, more_k, more_v = masked_attention_grad(*own, *seen, band, *after, False, scale, *more)
        dqs.append(dq)
        dk[:, :, first:last] += more_k
        dv[:, :, first:last] += more_v
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


# -- documents


def _is_packed(q, k, v):
    """On a CPU, and nothing that torch's autograd is to follow: documents are looked at."""
    traced = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return q.device.type == "cpu" and not traced and 0 not in (*q.shape, *k.shape)


def _has_document_tiles(q, k, v, causal, window):
    """Where tiles that do not meet are left out, and that is quicker than a mask."""
    return _is_tiled(q, k, v) and (causal or window is not None or k.shape[2] > FEW_COLUMNS)


def _document_mask(q, k, mask, rows, columns, causal, window):
    """Documents, structure and a bool mask as one mask of all pairs."""
    seen = (rows.unsqueeze(2) == columns.unsqueeze(1)).all(3).unsqueeze(1)
    if causal or window is not None:
        block = 0, q.shape[2], 0, k.shape[2]
        seen = seen & _band(block, window if window is not None else (q.shape[2], 0), q.device)
    return seen if mask is None else seen & mask


def _packed_numbers(causal, scale, window, cap, dropout):
    """Numbers as an operator of torch takes them: no cap is 0, no bound of what a row sees -1."""
    before, behind = window if window is not None else (-1, 0 if causal else -1)
    return scale, cap or 0.0, dropout, before, behind


def document_attention(q, k, v, mask, draws, rows, columns, causal, scale, window, cap, dropout):
    """(y, lse)"""
    if _is_packed(q, k, v):
        from mycel.ops.packed_attention import packed_attention

        numbers = _packed_numbers(causal, scale, window, cap, dropout)
        return packed_attention(q, k, v, mask, draws, rows, columns, *numbers)
    if _has_document_tiles(q, k, v, causal, window):
        numbers = _tiled_structure(q, k, scale, cap, dropout, causal, window)
        return _tiled(q, k, v, mask, draws, numbers, rows, columns)
    seen = _document_mask(q, k, mask, rows, columns, causal, window)
    return masked_attention(q, k, v, seen, False, scale, cap, draws, dropout)


def document_attention_grad(g, q, k, v, mask, y, lse, draws, rows, columns, causal, scale, window, cap, dropout):
    """Cotangents of q, k and v."""
    if _is_packed(q, k, v):
        from mycel.ops.packed_attention import packed_attention_grad

        numbers = _packed_numbers(causal, scale, window, cap, dropout)
        return packed_attention_grad(g, q, k, v, mask, y, lse, draws, rows, columns, *numbers)
    if _has_document_tiles(q, k, v, causal, window):
        numbers = _tiled_structure(q, k, scale, cap, dropout, causal, window)
        return _tiled_grad(g, q, k, v, mask, y, lse, draws, numbers, rows, columns)
    seen = _document_mask(q, k, mask, rows, columns, causal, window)
    return masked_attention_grad(g, q, k, v, seen, y, lse, False, scale, cap, draws, dropout)
