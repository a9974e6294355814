"""Adam's update of a large parameter in one pass on a GPU, as fast as memory is: torch's own kernel, which goes through
many tensors at once, takes half as long again.  Each element is computed as there, in 32 bits, moments as
b m + (g - b g) with one rounding for each product and sum: the results are torch's.

Beside `optimisers/adam.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGE = 1 << 16  # elements; smaller parameters go together in torch's kernel
BLOCK = 1024


def is_large(*tensors):
    """Are these a parameter, its gradient and its state in at most 32 bits, each in one piece, enough for a kernel?"""
    return tensors[0].numel() >= LARGE and all(
        x.is_floating_point() and x.itemsize <= 4 and x.is_contiguous() for x in tensors
    )


def update_large(tensors, steps, lr, beta1, beta2, eps, decay, scale, skip, decoupled, maximize):
    """Parameters and their state are overwritten; `tensors`: of each its gradient, itself, its first and its second
    moment.  `steps` have this one counted."""
    t = torch.stack(steps).double()
    lr = lr.double() if isinstance(lr, torch.Tensor) and lr.is_cuda else float(lr)
    rates, roots = lr / (1 - beta1**t), (1 - beta2**t).sqrt()
    factors = torch.stack([rates, roots, *[torch.zeros_like(t) + lr * decay] * 2], 1).float()  # rows of 16 bytes
    for row, (g, p, m, v) in zip(factors, tensors, strict=True):
        adam_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p, g, m, v, row, skip if scale is None else scale, skip, p.numel(),
            beta1, beta2, eps, decay,
            SCALED=scale is not None, DECOUPLED=decoupled, MAXIMIZE=maximize, BLOCK=BLOCK,
            num_warps=BLOCK * p.itemsize // 512,
        )  # fmt: skip


@triton.jit
def adam_kernel(
    p, g, m, v, factors, scale, skip, n, beta1, beta2, eps, decay,
    SCALED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        w = tl.load(p + at, mask=here, other=0.0).to(tl.float32)
        d = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
        first = tl.load(m + at, mask=here, other=0.0).to(tl.float32)
        second = tl.load(v + at, mask=here, other=0.0).to(tl.float32)
        if SCALED:
            d = d / tl.load(scale).to(tl.float32)
        if MAXIMIZE:
            d = -d
        if DECOUPLED:
            w -= tl.load(factors + 2) * w
        else:
            d += decay * w
        first = tl.fma(beta1, first, tl.fma(-beta1, d, d))
        second = tl.fma(beta2, second, tl.fma(-beta2, d * d, d * d))
        w -= tl.load(factors) * first / (tl.sqrt_rn(second) / tl.load(factors + 1) + eps)
        tl.store(p + at, w, mask=here)
        tl.store(m + at, first, mask=here)
        tl.store(v + at, second, mask=here)
