"""The cross entropy of rows of logits and its cotangents in one kernel for GPUs: a row is read twice, the second time
out of the cache.

Beside `linear_loss.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

BLOCK = 8192  # logits at a time


def cotangents(z, bias, target, ignore_index, dtype, classes):
    """Losses of rows of logits in 32 bits, to which a bias (or None) is added, and their cotangents in `dtype`; zeros
    where the target is `ignore_index`, NaN where it is no class.  Columns behind the classes are padding: zeros."""
    rows, width = z.shape
    losses, d = z.new_empty(rows), torch.empty_like(z, dtype=dtype)
    block = min(BLOCK, triton.next_power_of_2(width))
    bias = z if bias is None else bias.contiguous()
    cotangents_kernel[(rows,)](
        z, bias, target.contiguous(), losses, d, classes, width, ignore_index,
        BIASED=bias is not z, BLOCK=block, num_warps=max(block // 512, 1),
    )  # fmt: skip
    return losses, d


@triton.jit
def logits(z, bias, at, classes, BIASED: tl.constexpr):
    """Logits in 32 bits; -inf behind the classes."""
    x = tl.load(z + at, mask=at < classes, other=float("-inf"))
    if BIASED:
        x += tl.load(bias + at, mask=at < classes, other=0.0).to(tl.float32)
    return x


@triton.jit
def cotangents_kernel(
    z, bias, target, losses, d, classes, width, ignore_index, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    hit = tl.load(target + row)
    keep = hit != ignore_index
    there = (hit >= 0) & (hit < classes)
    z += row * width
    d += row * width
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -3.0e38, tl.float32)  # finite: a lane past the end never sees a logit
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, classes, BLOCK):
        x = logits(z, bias, i + at, classes, BIASED)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    picked = logits(z, bias, tl.where(there, hit, 0), classes, BIASED) - lse
    picked = tl.where(there, picked, float("nan"))
    tl.store(losses + row, tl.where(keep, -picked, 0.0))
    for i in range(0, width, BLOCK):
        x = logits(z, bias, i + at, classes, BIASED)
        tl.store(d + i + at, tl.where(keep, tl.exp(x - lse), 0.0), mask=i + at < width)
    tl.debug_barrier()  # behind what the loop has stored there
    # p - 1 without loss where p is nearly 1
    tl.store(d + tl.where(there, hit, 0), tl.where(keep, libdevice.expm1(picked), 0.0), mask=keep)
