"""silu(a) b and its gradients in 8 bits on a GPU, computed in 32 and rounded once.

Beside `gated_fp8.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mycel.ops.triton_fp8 import PROGRAMS, WITHOUT_SIGN, power_of_two

READ = {"ROWS": 8, "COLUMNS": 128, "num_warps": 4}  # elements at a time, while the largest are looked for
STEPS = 32  # of these that a program takes at most
TURNED = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}  # elements of a tile that is written, as it is and turned


def gated_rows_in_fp8(a, b, form):
    """Rows of silu(a) b, and their scales."""
    a, b = a.contiguous(), b.contiguous()
    width = a.shape[-1]
    y, scales = torch.empty_like(a, dtype=form), a.new_empty(*a.shape[:-1], 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    if a.numel():
        gated_rows_kernel[(scales.numel(),)](
            a, b, y, scales, width, MOST=torch.finfo(form).max, BLOCK=block, num_warps=min(max(block // 1024, 1), 32)
        )
    return y, scales


def gated_grads_in_fp8(g, a, b, form, kept):
    """Of the cotangents of a and of b rows and columns, of silu(a) b columns, each with its scales."""
    g, a, b = g.contiguous(), a.contiguous(), b.contiguous()
    n = a.shape[-1]
    m = a.numel() // n
    largest = torch.zeros(2 * m + 3 * n, dtype=torch.int32, device=a.device)  # of rows of da, db; columns of da, db, v
    row_scales = a.new_empty(2, m, dtype=torch.float32)
    column_scales = a.new_empty(3, n, dtype=torch.float32)
    da, db = (torch.empty_like(a, dtype=form) for _ in range(2))
    turned = [a.new_empty(n, m, dtype=dtype) for dtype in (form, form, kept)]
    if a.numel():
        across, down = triton.cdiv(n, READ["COLUMNS"]), triton.cdiv(m, READ["ROWS"])
        steps = min(max(across * down // PROGRAMS, 1), STEPS)
        gated_largest_kernel[across, triton.cdiv(down, steps)](g, a, b, largest, m, n, steps, **READ)
        gated_grads_kernel[triton.cdiv(m, TURNED["ROWS"]), triton.cdiv(n, TURNED["COLUMNS"])](
            g, a, b, largest, da, db, *turned, row_scales, column_scales, m, n,
            MOST=torch.finfo(form).max, MOST_KEPT=torch.finfo(kept).max, **TURNED,
        )  # fmt: skip
    rows = [s.view(*a.shape[:-1], 1) for s in row_scales]
    columns = [s.view(n, 1) for s in column_scales]
    return da, rows[0], turned[0], columns[0], db, rows[1], turned[1], columns[1], turned[2], columns[2]


@triton.jit
def magnitude(x):
    """Its bits without the sign: as integers in the order of the numbers, NaN above all."""
    return x.to(tl.int32, bitcast=True) & WITHOUT_SIGN


@triton.jit
def gated_grads_of(g, a, b, at, here):
    """(The cotangent of a, that of b, silu(a) b) of elements."""
    d = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(a + at, mask=here, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    silu = x * share
    return d * y * share * (1 + x * (1 - share)), d * silu, silu * y


@triton.jit
def gated_rows_kernel(a, b, y, scales, width, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < width
    x = tl.load(a + row * width + at, mask=here, other=0.0).to(tl.float32)
    value = x * tl.sigmoid(x) * tl.load(b + row * width + at, mask=here, other=0.0).to(tl.float32)
    scale = power_of_two(tl.max(magnitude(value), 0), MOST)
    tl.store(y + row * width + at, (value * scale).to(y.dtype.element_ty), mask=here)
    tl.store(scales + row, 1 / scale)


@triton.jit
def gated_largest_kernel(g, a, b, largest, m, n, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * (ROWS * steps) + tl.arange(0, ROWS)
    best_a = tl.zeros((ROWS, COLUMNS), tl.int32)
    best_b = tl.zeros((ROWS, COLUMNS), tl.int32)
    best_v = tl.zeros((ROWS, COLUMNS), tl.int32)
    for i in range(steps):
        row = first + i * ROWS
        here = (row < m)[:, None] & (column < n)[None, :]
        da, db, v = gated_grads_of(g, a, b, row.to(tl.int64)[:, None] * n + column[None, :], here)
        da, db = magnitude(da), magnitude(db)
        best_a, best_b, best_v = tl.maximum(best_a, da), tl.maximum(best_b, db), tl.maximum(best_v, magnitude(v))
        tl.atomic_max(largest + row, tl.max(da, 1), mask=row < m, sem="relaxed")
        tl.atomic_max(largest + m + row, tl.max(db, 1), mask=row < m, sem="relaxed")
    tl.atomic_max(largest + 2 * m + column, tl.max(best_a, 0), mask=column < n, sem="relaxed")
    tl.atomic_max(largest + 2 * m + n + column, tl.max(best_b, 0), mask=column < n, sem="relaxed")
    tl.atomic_max(largest + 2 * m + 2 * n + column, tl.max(best_v, 0), mask=column < n, sem="relaxed")


@triton.jit
def gated_grads_kernel(
    g, a, b, largest, da_rows, db_rows, da_columns, db_columns, v_columns, row_scales, column_scales, m, n,
    MOST: tl.constexpr, MOST_KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    down = tl.num_programs(0) - 1 - tl.program_id(0)  # from the end: what was read last is still in the cache
    across = tl.num_programs(1) - 1 - tl.program_id(1)
    row, column = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < m)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    da, db, v = gated_grads_of(g, a, b, at, here)
    scale_a = power_of_two(tl.load(largest + row, mask=row < m, other=0), MOST)
    scale_b = power_of_two(tl.load(largest + m + row, mask=row < m, other=0), MOST)
    tops = largest + 2 * m + column
    columns_a = power_of_two(tl.load(tops, mask=column < n, other=0), MOST)
    columns_b = power_of_two(tl.load(tops + n, mask=column < n, other=0), MOST)
    columns_v = power_of_two(tl.load(tops + 2 * n, mask=column < n, other=0), MOST_KEPT)
    form = da_rows.dtype.element_ty
    tl.store(da_rows + at, (da * scale_a[:, None]).to(form), mask=here)
    tl.store(db_rows + at, (db * scale_b[:, None]).to(form), mask=here)
    turned = column.to(tl.int64)[:, None] * m + row[None, :]
    inside = tl.trans(here)
    tl.store(da_columns + turned, tl.trans((da * columns_a[None, :]).to(form)), mask=inside)
    tl.store(db_columns + turned, tl.trans((db * columns_b[None, :]).to(form)), mask=inside)
    tl.store(v_columns + turned, tl.trans((v * columns_v[None, :]).to(v_columns.dtype.element_ty)), mask=inside)
    if across == 0:
        tl.store(row_scales + row, 1 / scale_a, mask=row < m)
        tl.store(row_scales + m + row, 1 / scale_b, mask=row < m)
    if down == 0:
        tl.store(column_scales + column, 1 / columns_a, mask=column < n)
        tl.store(column_scales + n + column, 1 / columns_b, mask=column < n)
        tl.store(column_scales + 2 * n + column, 1 / columns_v, mask=column < n)
