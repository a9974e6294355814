"""The cotangent of what is added to attention's scores, in one kernel for GPUs: scores and their cotangents exist a
tile at a time, and are summed over batch and heads where the bias has none, in several parts where one for each tile
would leave the GPU idle (windows of 49 pixels have one tile, and thousands of members).

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

COLUMNS = 64  # of a tile
PROGRAMS = 1024  # that keep a GPU busy; tiles of sums besides the result are no more


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
    size, warps = (128, 8) if rows > 64 else (64, 4)
    tiles = triton.cdiv(rows, size) * triton.cdiv(k.shape[2], COLUMNS)
    turns = (batch if bias.shape[0] == 1 else 1) * (heads if bias.shape[1] == 1 else 1)
    parts = max(min(PROGRAMS // (tiles * bias.shape[0] * bias.shape[1]), turns), 1)
    each = triton.cdiv(turns, parts)
    parts = triton.cdiv(turns, each)
    out = torch.empty((parts, *bias.shape), dtype=torch.float32 if parts > 1 else bias.dtype, device=q.device)
    bias_grad_kernel[(tiles * parts, bias.shape[1], bias.shape[0])](
        g, q, k, v, bias, share.contiguous(), lse.contiguous(), q if draws is None else draws.contiguous(), out,
        *g.stride(), *q.stride(), *k.stride(), *v.stride(), *bias.stride(),
        turns, each, heads, heads // k.shape[1], rows, k.shape[2], scale, width, v.shape[3], *dropping(dropout),
        ONE_BATCH=bias.shape[0] == 1, ONE_HEAD=bias.shape[1] == 1, DROP=draws is not None, ROWS=size, COLUMNS=COLUMNS,
        WIDTH=max(triton.next_power_of_2(width), 16), WIDTH_V=max(triton.next_power_of_2(v.shape[3]), 16),
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0).to(bias.dtype)


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
    turns, each, heads, group, rows, columns, scale, width, width_v, bound, factor,
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    part, at_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = (at_tile // across) * ROWS + tl.arange(0, ROWS)
    column = (at_tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    feature, feature_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    head, member = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    added = bias + member * mb + head * mh + row[:, None] * mn + column[None, :] * md
    added = tl.load(added, mask=inside, other=float("-inf")).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(part * each, tl.minimum((part + 1) * each, turns)):
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
    at_part = (part.to(tl.int64) * tl.num_programs(2) + member) * tl.num_programs(1) + head
    where = out + (at_part * rows + row[:, None]) * columns + column[None, :]
    tl.store(where, total, mask=inside)
