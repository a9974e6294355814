"""Products of linear layers in 8 bits: e4m3 for values and weights, e5m2 for gradients; sums in 32 bits.

y = fp8_linear(x, w):     dx = fp8_matmul(g, w, left=f8e5m2)     dw = fp8_linear_weight(g, x, left=f8e5m2)

Both operands are matrices [rows, k], summed over k.  Each row is multiplied by a power of two of its own, the largest
with which all of it fits into the format, rounded to 8 bits, and the result divided by the two again.  A power of two
loses nothing itself and is the same on all devices, so rounding to 8 bits is all that is lost, and it depends on the
row alone: rows and columns may be split over ranks without changing a bit.  Where k is split, each rank scales what
it has: no message is needed for that, rounding is at most as coarse, and bits differ from those of one device.  So
ranks share products whole; what a rank does is written in smaller operators, and an operand of several products (of q,
k and v; of gate and up) is converted once:

    a8, a = fp8_rows(x, form=f8e4m3)           x by rows: bytes [… k], and what to multiply them by [… 1]
    b8, b = fp8_columns(w, form=f8e4m3)        w by columns, which become the rows
    y = fp8_product(a8, a, b8, b, dtype=bf16)

GPUs from compute capability 8.9 on multiply 8 bits (torch._scaled_mm), where all sizes are multiples of 16.  Elsewhere
the same rounded numbers are multiplied in a wider type, which holds each product of two of them exactly.  Hopper's
tensor cores keep 14 bits of a running sum; where an operand is a gradient (e5m2), that is added up in 32 bits every
few products, in forward products it is not: as is common.
"""

from __future__ import annotations

from typing import Any

import torch

from mycel.ir import Type, op
from mycel.ops.matmul import every_letter
from mycel.ops.rules import o

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MULTIPLE = 16  # of what all sizes of a product in 8 bits must be, for a GPU to compute it so
FP8_LEAST = 2.0**-100  # the largest element of a row below which it is taken to be this: 1 / scale stays finite
FP32_EXPONENT = 0x7F800000  # the bits of a float that hold its exponent


# -- operands in 8 bits -----------------------------------------------------------------------------------------


def in_fp8(x: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x [..., k] in 8 bits, and what to multiply them by to have them back [..., 1].  A row that is not finite
    becomes one of NaNs."""
    x = x.float()  # also for the maximum: a compiler of CPU code fails on several in 16 bits
    room = torch.finfo(form).max / x.abs().amax(-1, keepdim=True).clamp(min=FP8_LEAST)
    scale = (room.view(torch.int32) & FP32_EXPONENT).view(torch.float32)  # the power of two below
    return (x * scale).to(form).contiguous(), 1 / scale


def columns_in_fp8(x: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the columns of x [..., k], all of its rows together: [k, rows] and [k, 1]."""
    x = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from mycel.ops.triton_fp8 import columns

        return columns(x, form)
    return in_fp8(x.t(), form)


@op(
    "... k^ -> ... k, ... 1",
    types=lambda x, *, form: (Type(form, x.shape), Type(torch.float32, (*x.shape[:-1], 1))),
    fresh=True,
    examples=["bf16[2,4]=1 0 2 3 4 1 0 6, form=f8e4m3", "f32[2,1,2]=1 2 0 3, form=f8e5m2"],
)
def fp8_rows(x, *, form):
    """Each row in 8 bits, and what to multiply it by to have it back"""
    return in_fp8(x, form)


def _column_dims(x, *, form):
    rows = [f"r{i}" for i in range(x.ndim - 1)]
    return f"{' '.join(f'{r}^' for r in rows)} k -> k ({' '.join(rows)}), k 1"


@op(
    _column_dims,
    types=lambda x, *, form: (
        Type(form, (x.shape[-1], x.numel // x.shape[-1])), Type(torch.float32, (x.shape[-1], 1))
    ),
    fresh=True,
    apart=True,
    converts=lambda x, *, form: x.bytes,  # read before, for the largest element of each column
    examples=["bf16[2,4]=1 0 2 3 4 1 0 6, form=f8e4m3", "f32[2,2,2]=1 2 0 3 1 1 4 0, form=f8e5m2"],
)  # fmt: skip
def fp8_columns(x, *, form):
    """Each column in 8 bits, as a row, and what to multiply it by to have it back"""
    return columns_in_fp8(x, form)


# -- products ---------------------------------------------------------------------------------------------------


def product_of_fp8(a, a_scale, b, b_scale, dtype):
    """a [..., k] @ b [n, k].T of rows in 8 bits."""
    rows, scale = a.reshape(-1, a.shape[-1]), a_scale.reshape(-1, 1)
    if a.is_cuda and not any(size % FP8_MULTIPLE for size in (*rows.shape, *b.shape)):
        y = torch._scaled_mm(
            rows, b.t(), scale_a=scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16,
            use_fast_accum=a.dtype == torch.float8_e4m3fn,
        )  # fmt: skip
    else:
        wide = torch.bfloat16 if a.is_cuda else torch.float32
        y = torch.mm(rows.to(wide), b.to(wide).t()).float() * scale * b_scale.t()
    return y.to(dtype).reshape(*a.shape[:-1], b.shape[0])


@op(
    "... k+, ... 1, n k+, n 1 -> ... n",
    types=lambda a, a_scale, b, b_scale, *, dtype: Type(dtype, (*a.shape[:-1], b.shape[0])),
    flops=every_letter,
    fresh=True,
    product=True, rate="product_fp8", apart=True,
    examples=["f8e4m3[2,4]=1 0 2 3 4 1 0 6, f32[2,1]=1 2, f8e4m3[2,4]=1 2 0 1 5 1 1 2, f32[2,1]=1 4, dtype=bf16",
              "f8e5m2[2,1,2]=1 2 0 3, f32[2,1,1]=1 2, f8e4m3[2,2]=3 1 0 2, f32[2,1]=1 4, dtype=f32"],
)  # fmt: skip
def fp8_product(a, a_scale, b, b_scale, *, dtype):
    """a @ b.T of rows in 8 bits, each with its scale"""
    return product_of_fp8(a, a_scale, b, b_scale, dtype)


def copies(x, w, **_):
    """Bytes of both operands in 8 bits."""
    return x.numel + w.numel


def converted(x, w, **_):
    """Bytes moved to make them: each operand is read and written again."""
    return x.bytes + w.bytes + copies(x, w)


FACTS: dict[str, Any] = {
    "dtype": "first", "flops": every_letter, "fresh": True, "product": True, "rate": "product_fp8", "apart": True,
    "opens": True, "scratch": copies, "converts": converted,
}  # fmt: skip


@op(
    "... k+, n k+ -> ... n",
    vjp=lambda g, y, x, w, **_: (o.fp8_matmul(g, w, left=E5M2), o.fp8_linear_weight(g, x, left=E5M2)),
    expand=lambda x, w, *, left=E4M3: fp8_product(*fp8_rows(x, form=left), *fp8_rows(w, form=E4M3), dtype=x.dtype),
    examples=[
        "bf16[2,4]=1 0 2 3 4 1 0 6, bf16[3,4]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,1,2]=1 2 0 3, bf16[2,2]=3 1 0 2, left=f8e5m2",
        "f32[6,2]=1 0 2 3 4 1 0 6 1 1 2 0, f32[1,2]=3 2",
    ],
    **FACTS,
)
def fp8_linear(x, w, *, left=torch.float8_e4m3fn):
    """x @ w.T in 8 bits, x in the format `left`"""
    return product_of_fp8(*in_fp8(x, left), *in_fp8(w, torch.float8_e4m3fn), x.dtype)


@op(
    "... k+, k+ n -> ... n",
    vjp=lambda g, y, x, w, **_: (fp8_linear(g, w, left=E5M2), o.fp8_linear_weight(g, x, left=E5M2, turned=True)),
    expand=lambda x, w, *, left=E4M3: fp8_product(*fp8_rows(x, form=left), *fp8_columns(w, form=E4M3), dtype=x.dtype),
    examples=[
        "bf16[2,4]=1 0 2 3 4 1 0 6, bf16[4,3]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,1,2]=1 2 0 3, bf16[2,2]=3 1 0 2, left=f8e5m2",
    ],
    **FACTS,
)
def fp8_matmul(x, w, *, left=torch.float8_e4m3fn):
    """x @ w in 8 bits, w a matrix, x in the format `left`"""
    return product_of_fp8(*in_fp8(x, left), *columns_in_fp8(w, torch.float8_e4m3fn), x.dtype)


def _weight_dims(g, x, *, left=E4M3, turned=False):
    rows = " ".join(f"r{i}+" for i in range(g.ndim - 1))
    return f"{rows} n, {rows} k -> {'k n' if turned else 'n k'}"


def _weight_vjp(h, y, g, x, *, left=E4M3, turned=False):
    return (fp8_matmul(x, h), fp8_linear(g, h)) if turned else (fp8_linear(x, h), fp8_matmul(g, h))


def _weight_expand(g, x, *, left=E4M3, turned=False):
    y = fp8_product(*fp8_columns(g, form=left), *fp8_columns(x, form=E4M3), dtype=g.dtype)
    return o.permute(y, dims=(1, 0)) if turned else y


@op(
    _weight_dims,
    vjp=_weight_vjp,
    expand=_weight_expand,
    examples=[
        "bf16[4,2]=1 0 2 3 4 1 0 6, bf16[4,3]=1 2 0 1 0 0 0 0 5 1 1 2",
        "bf16[2,2,1]=1 2 0 3, bf16[2,2,2]=3 1 0 2 1 1 0 4, left=f8e5m2, turned=True",
    ],
    **FACTS,
)
def fp8_linear_weight(g, x, *, left=torch.float8_e4m3fn, turned=False):
    """The gradient of fp8_linear's weight, in 8 bits: columns of g against columns of x, summed over all rows;
    `turned`: of fp8_matmul's, which lies the other way (the gradient has to be the left operand)"""
    y = product_of_fp8(*columns_in_fp8(g, left), *columns_in_fp8(x, torch.float8_e4m3fn), g.dtype)
    return y.t().contiguous() if turned else y
