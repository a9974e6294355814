"""The cotangent of what is added to attention's scores, in one kernel for GPUs: scores and their cotangents exist a
tile at a time, and are summed over batch and heads where the bias has none.

    p = exp(q kᵀ · scale + bias - lse)          ds = p (g vᵀ - share)          dbias = Σ ds          share = Σ g y

Where weights are dropped, g vᵀ is, and grows, as they were and did.

Beside `attention.py`, which imports it where tensors are on a GPU: Triton comes with torch there.  It is an operator of
torch, so that a compiler takes it as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mycel.ops.triton_attention import dropping, kept

ROWS, COLUMNS, WARPS = 128, 64, 8  # of a tile


@torch.library.custom_op("mycel::attention_bias_grad", mutates_args=())
def attention_bias_grad(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    share: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    draws: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """The cotangent of a bias of four dims: all rows and columns, and one or all of batch and heads; summed in 32 bits,
    and rounded once."""
    batch, heads, rows, width = q.shape
    out = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(k.shape[2], COLUMNS)
    bias_grad_kernel[(tiles, bias.shape[1], bias.shape[0])](
        g, q, k, v, bias, share.contiguous(), lse.contiguous(), q if draws is None else draws.contiguous(), out,
        *g.stride(), *q.stride(), *k.stride(), *v.stride(), *bias.stride(),
        batch, heads, heads // k.shape[1], rows, k.shape[2], scale, width, v.shape[3], *dropping(dropout),
        ONE_BATCH=bias.shape[0] == 1, ONE_HEAD=bias.shape[1] == 1, DROP=draws is not None, ROWS=ROWS, COLUMNS=COLUMNS,
        WIDTH=max(triton.next_power_of_2(width), 16), WIDTH_V=max(triton.next_power_of_2(v.shape[3]), 16),
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return out


@attention_bias_grad.register_fake
def _(g, q, k, v, bias, share, lse, scale, draws, dropout):
    return bias.new_empty(bias.shape)


@triton.jit
def tile(x, b, h, at, across, sb, sh, sn, sd, count, width):
    """Rows `at` and features `across` of a tensor, zeros outside."""
    inside = (at[:, None] < count) & (across[None, :] < width)
    return tl.load(x + b * sb + h * sh + at[:, None] * sn + across[None, :] * sd, mask=inside, other=0.0)


@triton.jit
def bias_grad_kernel(
    g, q, k, v, bias, share, lse, draws, out,
    gb, gh, gn, gd, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mn, md,
    batch, heads, group, rows, columns, scale, width, width_v, bound, factor,
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    head, member = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    added = bias + member * mb + head * mh + row[:, None] * mn + column[None, :] * md
    added = tl.load(added, mask=inside, other=float("-inf")).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    turns = (batch if ONE_BATCH else 1) * (heads if ONE_HEAD else 1)
    for i in range(turns):
        j = tl.cast(i, tl.int64)
        h = j % heads if ONE_HEAD else head
        b = (j // heads if ONE_HEAD else j) if ONE_BATCH else member
        qs = tile(q, b, h, row, feature, qb, qh, qn, qd, rows, width)
        ks = tile(k, b, h // group, column, feature, kb, kh, kn, kd, columns, width)
        gs = tile(g, b, h, row, feature_v, gb, gh, gn, gd, rows, width_v)
        vs = tile(v, b, h // group, column, feature_v, vb, vh, vn, vd, columns, width_v)
        at = (b * heads + h) * rows + row
        level = tl.load(lse + at, mask=row < rows, other=0.0)
        level = tl.where(level == float("-inf"), 0.0, level)  # a row that sees nothing has weights 0
        own = tl.load(share + at, mask=row < rows, other=0.0)
        p = tl.exp(tl.dot(qs, tl.trans(ks)) * scale + added - level[:, None])
        dp = tl.dot(gs, tl.trans(vs))
        if DROP:
            drawn = tl.load(draws + at, mask=row < rows, other=0)
            dp = tl.where(kept(drawn, column, bound), dp * factor, 0.0)
        total += p * (dp - own[:, None])
    where = out + ((member * (heads if not ONE_HEAD else 1) + head) * rows + row[:, None]) * columns + column[None, :]
    tl.store(where, total, mask=inside)
