"""The norm of a large tensor on a GPU, in 32 bits: that of blocks of it first, as fast as memory is.

Beside `gradient_norm.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGE = 1 << 16  # elements
BLOCK, ROUNDS = 4096, 4  # elements at a time, and how often


def is_large(x):
    return x.numel() >= LARGE and x.is_floating_point() and x.itemsize <= 4 and x.is_contiguous()


def block_norms(x):
    """The norms of blocks of x, whose norm is that of x."""
    norms = torch.empty(triton.cdiv(x.numel(), BLOCK * ROUNDS), dtype=torch.float32, device=x.device)
    block_norms_kernel[(norms.numel(),)](x, norms, x.numel(), BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=8)
    return norms


@triton.jit
def block_norms_kernel(x, norms, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(ROUNDS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        total += value * value
    tl.store(norms + tl.program_id(0), tl.sqrt_rn(tl.sum(total, 0)))
