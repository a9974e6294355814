"""Rows to their experts and back on a GPU: each row of a token is read once and written to its places, or read at its
places and written once, summed up in 32 bits.  And what experts do between their products, in one pass each way.

Beside `experts.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # elements of a row at a time


def spread(x, places, chosen):
    """Row t of x at places[t * chosen], …, places[t * chosen + chosen - 1]; `places` is a permutation."""
    x = x.contiguous()
    y = x.new_empty(places.shape[0], x.shape[1])
    grid, how = _launch(x, chosen)
    if x.shape[0]:
        spread_kernel[grid](x, places, y, x.shape[1], **how)
    return y


def gathered_sum(y, places, chosen):
    """Row t: the sum of the rows of y at places[t * chosen], …, places[t * chosen + chosen - 1]."""
    y = y.contiguous()
    z = y.new_empty(places.shape[0] // chosen, y.shape[1])
    grid, how = _launch(z, chosen)
    if z.shape[0]:
        gathered_sum_kernel[grid](y, places, z, y.shape[1], **how)
    return z


def gated(h, scale):
    """silu(a) b times the scale of a row, for the halves a and b of each row of h."""
    h = h.contiguous()
    y = h.new_empty(h.shape[0], h.shape[1] // 2)
    block, warps = _block(y)
    if y.numel():
        gated_kernel[(y.shape[0], triton.cdiv(y.shape[1], block))](
            h, scale.contiguous(), y, y.shape[1], BLOCK=block, num_warps=warps
        )
    return y


def gated_grads(g, h, scale):
    """The cotangents of h and scale from that of `gated`, and what it gave."""
    g, h, scale = g.contiguous(), h.contiguous(), scale.contiguous()
    dh, dscale, y = torch.empty_like(h), torch.empty_like(scale), torch.empty_like(g)
    block, warps = _block(y)
    if y.numel():
        gated_grads_kernel[(y.shape[0],)](g, h, scale, dh, dscale, y, y.shape[1], BLOCK=block, num_warps=warps)
    return dh, dscale, y


def _block(x):
    """Elements of a row of x at a time, and warps: 16 bytes for each thread."""
    block = min(BLOCK, triton.next_power_of_2(x.shape[1]))
    return block, min(max(block * x.itemsize // 512, 1), 8)


def _launch(x, chosen):
    """A program for each row of x and block of it."""
    block, warps = _block(x)
    return (x.shape[0], triton.cdiv(x.shape[1], block)), {"CHOSEN": chosen, "BLOCK": block, "num_warps": warps}


@triton.jit
def spread_kernel(x, places, y, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + token * width + at, mask=at < width)
    for j in range(CHOSEN):
        place = tl.load(places + token * CHOSEN + j)
        tl.store(y + place * width + at, row, mask=at < width)


@triton.jit
def gathered_sum_kernel(y, places, z, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(CHOSEN):
        place = tl.load(places + token * CHOSEN + j)
        total += tl.load(y + place * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(z + token * width + at, total, mask=at < width)


@triton.jit
def gated_kernel(h, scale, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    h += row * 2 * width
    a = tl.load(h + at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(h + width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, a * tl.sigmoid(a) * b * tl.load(scale + row).to(tl.float32), mask=here)


@triton.jit
def gated_grads_kernel(g, h, scale, dh, dscale, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(scale + row).to(tl.float32)
    g += row * width
    h += row * 2 * width
    dh += row * 2 * width
    y += row * width
    common = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, width, BLOCK):
        at = i + tl.arange(0, BLOCK)
        here = at < width
        a = tl.load(h + at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(h + width + at, mask=here, other=0.0).to(tl.float32)
        d = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
        share = tl.sigmoid(a)
        value = a * share * b
        common += d * value
        d *= weight
        tl.store(dh + at, d * b * share * (1 + a * (1 - share)), mask=here)
        tl.store(dh + width + at, d * a * share, mask=here)
        tl.store(y + at, value * weight, mask=here)
    tl.store(dscale + row, tl.sum(common, 0))
