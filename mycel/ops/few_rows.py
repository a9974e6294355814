"""Products of a few rows with a weight, as each token of a text needs them: as fast as the weight is read.

torch's products of 2 to 8 rows take several times as long as those of one, and those in bfloat16 wait for the
processor; in C (`few_rows.c`) each weight is read once and multiplied with all rows on its way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from mycel.ir import Type, op
from mycel.ops.matmul import every_letter, linear
from mycel.ops.native_library import native_library
from mycel.ops.rules import o

MOST = 8  # rows
LEAST = 1 << 16  # elements of a weight, below which a call costs more than the product
DTYPES = (torch.float32, torch.bfloat16)


def _dims(x, w, b=None):
    return f"... k^, n k^, {'' if b is None else 'n'} -> ... n"


@op(
    _dims,
    expand=lambda x, w, b=None: linear(x, w) if b is None else o.add(linear(x, w), b),
    flops=every_letter,
    fresh=True,
    examples=["f[2,3,4], f[6,4]", "f[4], f[6,4], f[6]", "f[1,1,40], f[9,40], None"],
    product=True,
    rate="product",
    apart=True,
    compiles=False,
)
def linear_few_rows(x, w, b=None):
    """x @ w.T + b of up to 8 rows; written where torch's autograd does not record, alone"""
    from mycel.ops.few_rows import product_of_few

    return product_of_few(x, w, b)


def gains(x: Type, w: Type) -> bool:
    """Is linear(x, w) faster in C?"""
    few = x.ndim > 0 and x.numel // max(x.shape[-1], 1) in range(1, MOST + 1)
    return few and x.dtype == w.dtype and x.dtype in DTYPES and w.numel >= LEAST


def product_of_few(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """In C where that is there, and memory lies as it takes it."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    code = _code() if 1 <= rows <= MOST and x.dtype in DTYPES and x.is_cpu else None
    if code is None or not (x.is_contiguous() and w.is_contiguous()) or x.dtype != w.dtype:
        return torch.nn.functional.linear(x, w, b)
    n, k = w.shape
    y = x.new_empty((*x.shape[:-1], n))
    if code(x.data_ptr(), w.data_ptr(), y.data_ptr(), rows, k, n, x.dtype == torch.bfloat16):
        raise MemoryError(f"no memory for {rows} rows of {k + n} floats")
    return y if b is None else y.add_(b)


@functools.cache
def _code() -> Callable[..., int] | None:
    """The function in C, with torch's threads where the compiler knows OpenMP; None without a compiler."""
    library = native_library("few_rows.c", ("-fopenmp",)) or native_library("few_rows.c")
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.mycel_few_rows.argtypes = [pointer] * 3 + [size] * 3 + [ctypes.c_int]
    library.mycel_few_rows.restype = ctypes.c_int
    return library.mycel_few_rows
