"""Columns of a matrix in 8 bits on a GPU, as rows: one pass for the largest element of each column, one that scales,
rounds and turns a tile at a time.  The second goes from the end of the matrix to its beginning: what the first read
last is still in the cache.

    x [m, n]  ->  y [n, m],  scales [n, 1]

Beside `fp8.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

READ = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}  # elements at a time, while the largest are looked for
PROGRAMS, STEPS = 1024, 16  # programs that share these, and of them that one takes at most
TURNED = {"ROWS": 64, "COLUMNS": 128, "num_warps": 8}  # elements of a tile that is turned
LEAST = tl.constexpr(2.0**-100)  # `FP8_LEAST`
EXPONENT = tl.constexpr(0x7F800000)  # `FP32_EXPONENT`
WITHOUT_SIGN = tl.constexpr(0x7FFFFFFF)


def columns(x, form):
    """What `in_fp8` gives for x.t(), to the bit."""
    x = x.contiguous()
    m, n = x.shape
    largest = torch.zeros(n, dtype=torch.int32, device=x.device)
    y, scales = x.new_empty(n, m, dtype=form), x.new_empty(n, 1, dtype=torch.float32)
    if x.numel():
        across, down = triton.cdiv(n, READ["COLUMNS"]), triton.cdiv(m, READ["ROWS"])
        steps = min(max(across * down // PROGRAMS, 1), STEPS)
        largest_kernel[across, triton.cdiv(down, steps)](x, largest, m, n, steps, **READ)
        grid = triton.cdiv(m, TURNED["ROWS"]), triton.cdiv(n, TURNED["COLUMNS"])
        turned_kernel[grid](x, largest, y, scales, m, n, MOST=torch.finfo(form).max, **TURNED)
    return y, scales


@triton.jit
def power_of_two(largest, MOST: tl.constexpr):
    """The largest that brings a magnitude, given by its bits, to at most MOST."""
    top = tl.maximum(largest.to(tl.float32, bitcast=True), LEAST, propagate_nan=tl.PropagateNan.ALL)
    return ((MOST / top).to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def largest_kernel(x, largest, m, n, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The bits of the largest magnitude in each column; as integers they are in the order of the numbers, and NaN is
    above all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * (ROWS * steps) + tl.arange(0, ROWS)
    best = tl.zeros((ROWS, COLUMNS), tl.int32)
    for i in range(steps):
        row = first + i * ROWS
        here = (row < m)[:, None] & (column < n)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * n + column[None, :], mask=here, other=0.0).to(tl.float32)
        best = tl.maximum(best, value.to(tl.int32, bitcast=True) & WITHOUT_SIGN)
    tl.atomic_max(largest + column, tl.max(best, 0), mask=column < n, sem="relaxed")


@triton.jit
def turned_kernel(
    x, largest, y, scales, m, n, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    row = at * ROWS + tl.arange(0, ROWS)
    column = (tl.num_programs(1) - 1 - tl.program_id(1)) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < m)[:, None] & (column < n)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * n + column[None, :], mask=here, other=0.0).to(tl.float32)
    scale = power_of_two(tl.load(largest + column, mask=column < n, other=0), MOST)
    narrow = (value * scale[None, :]).to(y.dtype.element_ty)
    tl.store(y + column.to(tl.int64)[:, None] * m + row[None, :], tl.trans(narrow), mask=tl.trans(here))
    if at == 0:
        tl.store(scales + column, 1 / scale, mask=column < n)
