"""Products of a few rows with a weight, and attention of a few rows, as each token of a text needs them: as fast as
weights, keys and values are read.

torch's products of 2 to 8 rows take several times as long as those of one, and those in bfloat16 wait for the
processor; in C (`few_rows.c`) each weight is read once and multiplied with all rows on its way.  Weights in 8 bits,
each row of them with a scale, are a quarter of the bytes.  Its attention reads the whole of a cache; in C places that
no row sees are left out.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mycel.ir import Type, op
from mycel.ops.matmul import every_letter, linear
from mycel.ops.native_library import native_library
from mycel.ops.rules import o
from mycel.ops.sdpa import sdpa

MOST = 8  # rows
LEAST = 1 << 16  # elements of a weight, below which a call costs more than the product
DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = {  # in C, and what they take
    "mycel_few_rows": "const void *, const void *, void *, int64_t, int64_t, int64_t, int",
    "mycel_few_rows_of_bytes": "const float *, const int8_t *, const float *, float *, int64_t, int64_t, int64_t",
    "mycel_few_rows_attention": "const float *, const float *, const float *, const uint8_t *, float *, "
    "int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const int64_t *, float",
}


def _dims(x, w, b=None):
    return f"... k^, n k^, {'' if b is None else 'n'} -> ... n"


def _in_c(names: Sequence[str | None], y: str, x: Type, w: Type, b: Type | None = None) -> str:
    """The product, and the bias added to it."""
    n, k = w.shape
    rows, half = x.numel // k, x.dtype == torch.bfloat16
    called = f"if (mycel_few_rows({names[0]}, {names[1]}, {y}, {rows}, {k}, {n}, {int(half)})) return -1;"
    return called + ("" if b is None else _bias_in_c(names[2], y, rows * n, n, half))


def _bias_in_c(b: str | None, y: str, elements: int, n: int, half: bool) -> str:
    added = f"half_of(of_half({y}[i]) + of_half({b}[i % {n}]))" if half else f"{y}[i] + {b}[i % {n}]"
    return f" for (int64_t i = 0; i < {elements}; i++) {y}[i] = {added};"


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
    call_c=_in_c,
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
    code = library() if 1 <= rows <= MOST and x.dtype in DTYPES and x.is_cpu else None
    if code is None or not (x.is_contiguous() and w.is_contiguous()) or x.dtype != w.dtype:
        return torch.nn.functional.linear(x, w, b)
    n, k = w.shape
    y = x.new_empty((*x.shape[:-1], n))
    if code.mycel_few_rows(x.data_ptr(), w.data_ptr(), y.data_ptr(), rows, k, n, x.dtype == torch.bfloat16):
        raise MemoryError(f"no memory for {rows} rows of {k + n} floats")
    return y if b is None else y.add_(b)


def _dims_of_bytes(x, w, scale, b=None):
    return f"... k^, n k^, n, {'' if b is None else 'n'} -> ... n"


def _linear_of_bytes(x, w, scale, b=None):
    y = o.mul(linear(x, o.cast(w, dtype=x.dtype)), scale)
    return y if b is None else o.add(y, b)


def _of_bytes_in_c(
    names: Sequence[str | None], y: str, x: Type, w: Type, scale: Type, b: Type | None = None
) -> str | None:
    n, k = w.shape
    rows = x.numel // k
    if x.dtype != torch.float32 or not 1 <= rows <= MOST:
        return None
    called = f"if (mycel_few_rows_of_bytes({', '.join(map(str, names[:3]))}, {y}, {rows}, {k}, {n})) return -1;"
    return called + ("" if b is None else _bias_in_c(names[3], y, rows * n, n, False))


@op(
    _dims_of_bytes,
    dtype="first",
    expand=_linear_of_bytes,
    flops=every_letter,
    fresh=True,
    examples=[
        "f[2,3,4], i8[6,4], f[6]",
        "f[40], i8[9,40], f[9], f[9]",
        "f[1,1,40], i8[9,40], f[9], None",
    ],
    product=True,
    rate="product",
    precision="kept",
    apart=True,
    compiles=False,
    call_c=_of_bytes_in_c,
)
def linear_rounded(x, w, scale, b=None):
    """x @ (w * scale[:, None]).T + b, of weights in 8 bits (`rounded`); of up to 8 rows of 32-bit floats in C"""
    from mycel.ops.few_rows import product_of_bytes

    return product_of_bytes(x, w, scale, b)


def rounded(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of floats in 8 bits: numbers from -127 to 127, and for each row what 1 stands for."""
    largest = w.abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (w / scale[:, None]).round_().to(torch.int8), scale


def product_of_bytes(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, b: torch.Tensor | None = None
) -> torch.Tensor:
    """In C where that is there, and memory lies as it takes it."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    code = library() if 1 <= rows <= MOST and x.dtype == torch.float32 and x.is_cpu else None
    if code is None or not (x.is_contiguous() and w.is_contiguous() and scale.is_contiguous()):
        y = torch.nn.functional.linear(x, w.to(x.dtype)) * scale
    else:
        n, k = w.shape
        y = x.new_empty((*x.shape[:-1], n))
        pointers = [t.data_ptr() for t in (x, w, scale, y)]
        if code.mycel_few_rows_of_bytes(*pointers, rows, k, n):
            raise MemoryError(f"no memory for {rows} rows of {k} floats")
    return y if b is None else y.add_(b)


def _attention_in_c(
    names: Sequence[str | None], y: str, q: Type, k: Type, v: Type, mask: Type | None, scale: float | None = None
) -> str | None:
    b, h, rows, width = q.shape
    places = k.shape[2]
    steps = [0, 0, 0]
    if mask is not None:
        if not mask.shape or mask.shape[-1] != places:
            return None
        sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        steps = [0 if sizes[d] == 1 else math.prod(sizes[d + 1 :]) for d in range(3)]
    given = [*(name or "0" for name in names), y, b, h, k.shape[1], rows, places, width, v.shape[3]]
    given[3] = f"(const uint8_t *){given[3]}"
    factor = float(width**-0.5 if scale is None else scale)
    lengths = ", ".join(map(str, steps))
    call = f"mycel_few_rows_attention({', '.join(map(str, given))}, (int64_t[]){{{lengths}}}, {factor!r}f)"
    return f"if ({call}) return -1;"


@op(
    sdpa.dims,
    dtype="first",
    expand=sdpa,
    flops=sdpa.flops,
    scratch=sdpa.scratch,
    fresh=True,
    examples=[
        "f[2,4,6,8], f[2,4,3,8], f[2,4,3,8], None", "f[2,4,2,8], f[2,2,3,8], f[2,2,3,8], bool[2,1,2,3], scale=0.3",
        "f[1,2,1,40], f[1,2,9,40], f[1,2,9,6], bool[1,9]",
    ],
    apart=True,
    compiles=False,
    call_c=_attention_in_c,
)  # fmt: skip
def sdpa_few_rows(q, k, v, mask, *, scale=None):
    """sdpa of up to 8 rows; written where torch's autograd does not record, alone"""
    from mycel.ops.few_rows import attention_of_few

    return attention_of_few(q, k, v, mask, scale)


def attends(q: Type, k: Type, v: Type, mask: Type | None, *, causal: bool = False, **_: Any) -> bool:
    """Is sdpa of these faster in C?"""
    seen = mask is None or mask.dtype == torch.bool
    return not causal and seen and q.shape[2] <= MOST and {q.dtype, k.dtype, v.dtype} == {torch.float32}


def attention_of_few(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """In C where that is there, and memory lies as it takes it."""
    code = library() if q.dtype == torch.float32 and q.is_cpu else None
    b, h, rows, width = q.shape
    if code is None or not (k.is_contiguous() and v.is_contiguous()) or (mask is not None and mask.dtype != torch.bool):
        return sdpa.kernel(q, k, v, mask, scale=scale)
    q = q.contiguous()
    steps = None
    if mask is not None:
        mask = mask.expand(b, h, rows, k.shape[2])
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        steps = (ctypes.c_int64 * 3)(*mask.stride()[:3])
    y = q.new_empty((b, h, rows, v.shape[3]))
    pointers = [None if x is None else x.data_ptr() for x in (q, k, v, mask, y)]
    sizes = [b, h, k.shape[1], rows, k.shape[2], width, v.shape[3]]
    if code.mycel_few_rows_attention(*pointers, *sizes, steps, width**-0.5 if scale is None else scale):
        raise MemoryError(f"no memory for scores of {k.shape[2]} places")
    return y


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions in C, with torch's threads where the compiler knows OpenMP; None without a compiler."""
    library = native_library("few_rows.c", ("-fopenmp",)) or native_library("few_rows.c")
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.mycel_few_rows.argtypes = [pointer] * 3 + [size] * 3 + [ctypes.c_int]
    library.mycel_few_rows_of_bytes.argtypes = [pointer] * 4 + [size] * 3
    library.mycel_few_rows_attention.argtypes = [pointer] * 5 + [size] * 7 + [pointer, ctypes.c_float]
    return library
