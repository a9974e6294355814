"""Products of linear layers in 8 bits: e4m3 for values and weights, e5m2 for gradients; sums in 32 bits.

y = fp8_linear(x, w):     dx = fp8_matmul(g, w, left=f8e5m2)     dw = fp8_linear_weight(g, x, left=f8e5m2)

Both operands are matrices [rows, k], summed over k.  Each row is multiplied by a power of two of its own, the largest
with which all of it fits into the format, rounded to 8 bits, and the result divided by the two again.  A power of two
loses nothing itself and is the same on all devices, so rounding to 8 bits is all that is lost, and it depends on the
row alone: rows and columns may be split over ranks without changing a bit.  Where k is split, each rank scales what
it has: no message is needed for that, rounding is at most as coarse, and bits differ from those of one device.

GPUs from compute capability 8.9 on multiply 8 bits (torch._scaled_mm), where all sizes are multiples of 16.  Elsewhere
the same rounded numbers are multiplied in a wider type, which holds each product of two of them exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from mycel.ir import op
from mycel.ops.matmul import every_letter
from mycel.ops.rules import o

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MULTIPLE = 16  # of what all sizes of a product in 8 bits must be, for a GPU to compute it so
FP8_LEAST = 2.0**-100  # the largest element of a row below which it is taken to be this: 1 / scale stays finite
FP32_EXPONENT = 0x7F800000  # the bits of a float that hold its exponent


def in_fp8(x: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x [rows, k] in 8 bits, and what to multiply them by to have them back [rows, 1].  A row that is not
    finite becomes one of NaNs."""
    x = x.float()  # also for the maximum: a compiler of CPU code fails on several in 16 bits
    room = torch.finfo(form).max / x.abs().amax(1, keepdim=True).clamp(min=FP8_LEAST)
    scale = (room.view(torch.int32) & FP32_EXPONENT).view(torch.float32)  # the power of two below
    return (x * scale).to(form).contiguous(), 1 / scale


def fp8_product(a: torch.Tensor, b: torch.Tensor, left: torch.dtype) -> torch.Tensor:
    """a [m, k] @ b [n, k].T in 8 bits, b in e4m3; the result as wide as a."""
    a8, a_scale = in_fp8(a, left)
    b8, b_scale = in_fp8(b, torch.float8_e4m3fn)
    if a.is_cuda and not any(size % FP8_MULTIPLE for size in (*a.shape, *b.shape)):
        y = torch._scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16)
        return y.to(a.dtype)
    wide = torch.bfloat16 if a.is_cuda else torch.float32
    return (torch.mm(a8.to(wide), b8.to(wide).t()).float() * a_scale * b_scale.t()).to(a.dtype)


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def copies(x, w, **_):
    """Bytes of both operands in 8 bits."""
    return x.numel + w.numel


def converted(x, w, **_):
    """Bytes moved to make them: each operand is read and written again."""
    return x.bytes + w.bytes + copies(x, w)


FACTS: dict[str, Any] = {
    "dtype": "first", "flops": every_letter, "fresh": True, "product": True, "rate": "product_fp8", "apart": True,
    "scratch": copies, "converts": converted,
}  # fmt: skip


@op(
    "... k+, n k+ -> ... n",
    vjp=lambda g, y, x, w, **_: (o.fp8_matmul(g, w, left=E5M2), o.fp8_linear_weight(g, x, left=E5M2)),
    examples=[
        "bf16[2,4]=1 0 2 3 4 1 0 6, bf16[3,4]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,1,2]=1 2 0 3, bf16[2,2]=3 1 0 2, left=f8e5m2",
        "f32[6,2]=1 0 2 3 4 1 0 6 1 1 2 0, f32[1,2]=3 2",
    ],
    **FACTS,
)
def fp8_linear(x, w, *, left=torch.float8_e4m3fn):
    """x @ w.T in 8 bits, x in the format `left`"""
    return fp8_product(fp8_rows(x), w, left).reshape(*x.shape[:-1], w.shape[0])


@op(
    "... k+, k+ n -> ... n",
    vjp=lambda g, y, x, w, **_: (fp8_linear(g, w, left=E5M2), o.fp8_linear_weight(g, x, left=E5M2, turned=True)),
    examples=[
        "bf16[2,4]=1 0 2 3 4 1 0 6, bf16[4,3]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,1,2]=1 2 0 3, bf16[2,2]=3 1 0 2, left=f8e5m2",
    ],
    **FACTS,
)
def fp8_matmul(x, w, *, left=torch.float8_e4m3fn):
    """x @ w in 8 bits, w a matrix, x in the format `left`"""
    return fp8_product(fp8_rows(x), w.t(), left).reshape(*x.shape[:-1], w.shape[1])


def _weight_dims(g, x, *, left=E4M3, turned=False):
    rows = " ".join(f"r{i}+" for i in range(g.ndim - 1))
    return f"{rows} n, {rows} k -> {'k n' if turned else 'n k'}"


def _weight_vjp(h, y, g, x, *, left=E4M3, turned=False):
    return (fp8_matmul(x, h), fp8_linear(g, h)) if turned else (fp8_linear(x, h), fp8_matmul(g, h))


@op(
    _weight_dims,
    vjp=_weight_vjp,
    examples=[
        "bf16[4,2]=1 0 2 3 4 1 0 6, bf16[4,3]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,2,1]=1 2 0 3, bf16[2,2,2]=3 1 0 2 1 1 0 4, left=f8e5m2, turned=True",
    ],
    **FACTS,
)
def fp8_linear_weight(g, x, *, left=torch.float8_e4m3fn, turned=False):
    """The gradient of fp8_linear's weight, in 8 bits: columns of g against columns of x, summed over all rows;
    `turned`: of fp8_matmul's, which lies the other way (the gradient has to be the left operand)"""
    y = fp8_product(fp8_rows(g).t(), fp8_rows(x).t(), left)
    return y.t().contiguous() if turned else y
