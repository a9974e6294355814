"""Attention of documents packed into one sequence, on a CPU: by pieces (`document_layout.py`), so that no mask of all
pairs is made, and pairs of documents that do not meet are not looked at.

Operators of torch, so that a compiler takes them as they are: what they do follows from values.
"""

from __future__ import annotations

import torch

from mycel.ops.attention_kernels import (
    masked_attention,
    masked_attention_grad,
    window_attention,
    window_attention_grad,
)
from mycel.ops.document_layout import Sight, layout

CALL = 1 << 19  # what a call of a kernel is worth, in pairs times widths of heads: 0.13 ms of what one core multiplies


def _layout(q, v, rows, columns, before, behind):
    """(samples of the batch, their pieces)"""
    rows, columns = (x.to(torch.int64).contiguous().numpy() for x in (rows, columns))
    sight = Sight(before, behind, 2 * CALL // (q.shape[1] * (q.shape[3] + v.shape[3])))
    return layout(rows.tobytes(), columns.tobytes(), rows.shape[0], rows.shape[2], sight)


def _mask_of(samples, piece, mask, rows, columns, before, behind):
    """The mask of a piece; None: structure alone."""
    start, stop, first, last, whole = piece
    part = None if mask is None else _cut(mask, samples, piece)
    if whole:
        return part
    equal = rows[samples, start:stop].unsqueeze(2) == columns[samples, first:last].unsqueeze(1)
    equal = equal.all(3).unsqueeze(1)
    ahead = torch.arange(first, last).unsqueeze(0) - torch.arange(start, stop).unsqueeze(1)
    if before >= 0:
        equal &= ahead >= -before
    if behind >= 0:
        equal &= ahead <= behind
    return equal if part is None else equal & part


def _cut(mask, samples, piece):
    """A mask that broadcasts, of a piece."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    mask = mask[samples] if mask.shape[0] > 1 else mask
    mask = mask[:, :, piece.start : piece.stop] if mask.shape[2] > 1 else mask
    return mask[..., piece.first : piece.last] if mask.shape[3] > 1 else mask


def _parts(samples, piece, of_rows, of_columns):
    """What there is of rows, and of columns, in a piece."""
    return (
        [x[samples, :, piece.start : piece.stop] for x in of_rows],
        [x[samples, :, piece.first : piece.last] for x in of_columns],
    )


def _drawn(draws, samples, piece):
    return None if draws is None else draws[samples, :, piece.start : piece.stop] + piece.first


def _structure(piece, before, behind):
    """(causal, window) of a piece."""
    if not piece.whole or (before < 0 and behind < 0):
        return False, None
    return (True, None) if before < 0 and behind == 0 else (False, (before, behind))


@torch.library.custom_op("mycel::packed_attention", mutates_args=())
def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    draws: torch.Tensor | None,
    rows: torch.Tensor,
    columns: torch.Tensor,
    scale: float | None,
    cap: float,
    dropout: float,
    before: int,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, lse); cap 0: none, before and behind -1: rows see all"""
    y, lse = _results(q, v)
    y.zero_()
    lse.fill_(-torch.inf)
    for samples, blocks in _layout(q, v, rows, columns, before, behind):
        for piece in blocks:
            (qs,), (ks, vs) = _parts(samples, piece, (q,), (k, v))
            shown = _mask_of(samples, piece, mask, rows, columns, before, behind)
            causal, window = _structure(piece, before, behind)
            more = cap or None, _drawn(draws, samples, piece), dropout
            if window is not None:
                part = window_attention(qs, ks, vs, scale, window, *more)
            else:
                part = masked_attention(qs, ks, vs, shown, causal, scale, *more)
            y[samples, :, piece.start : piece.stop], lse[samples, :, piece.start : piece.stop] = part
    return y, lse


def _results(q, v):
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    y = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return y, q.new_empty(q.shape[:3], dtype=wide)


@packed_attention.register_fake
def _(q, k, v, mask, draws, rows, columns, scale, cap, dropout, before, behind):
    return _results(q, v)


@torch.library.custom_op("mycel::packed_attention_grad", mutates_args=())
def packed_attention_grad(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    y: torch.Tensor,
    lse: torch.Tensor,
    draws: torch.Tensor | None,
    rows: torch.Tensor,
    columns: torch.Tensor,
    scale: float | None,
    cap: float,
    dropout: float,
    before: int,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of q, k and v, whose sums over blocks of rows are in the wide dtype."""
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for samples, blocks in _layout(q, v, rows, columns, before, behind):
        for piece in blocks:
            (gs, qs, ys, level), (ks, vs) = _parts(samples, piece, (g, q, y, lse), (k, v))
            shown = _mask_of(samples, piece, mask, rows, columns, before, behind)
            causal, window = _structure(piece, before, behind)
            more = cap or None, _drawn(draws, samples, piece), dropout
            if window is not None:
                part = window_attention_grad(gs, qs, ks, vs, ys, level, scale, window, *more)
            else:
                part = masked_attention_grad(gs, qs, ks, vs, shown, ys, level, causal, scale, *more)
            dq[samples, :, piece.start : piece.stop] = part[0]
            dk[samples, :, piece.first : piece.last] += part[1]
            dv[samples, :, piece.first : piece.last] += part[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@packed_attention_grad.register_fake
def _(g, q, k, v, mask, y, lse, draws, rows, columns, scale, cap, dropout, before, behind):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
