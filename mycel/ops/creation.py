"""Tensors from nothing: one value everywhere, or counting along a dim; torch's other constructors are made of these.

Their kernels take `device`, which is not part of the equation: the runner passes it.
"""

from __future__ import annotations

import math

import torch

from mycel.errors import IRError
from mycel.ir import SplitRule, Type, op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, letters, o
from mycel.ops.shape import expanded


def full_dims(value, *, shape, dtype):
    """Every dim may be split: each part is filled with the same value."""
    names = letters(len(shape))
    return f"... -> {' '.join(names)}", dict(zip(names, shape, strict=True))


def full_vjp(g, y, value, *, shape, dtype):
    """The value is in every element."""
    if getattr(value, "shape", None) is None:
        return (None,)
    return (cast_like(o.sum(g, dims=tuple(range(len(shape)))) if shape else g, value),)


@op(
    full_dims,
    types=lambda value, *, shape, dtype: Type(dtype, shape),
    vjp=full_vjp,
    linear=((0,),),
    examples=[
        "1.5, shape=(2,3), dtype=f32", "True, shape=(), dtype=bool", "2, shape=(4,), dtype=f64",
        "f64[], shape=(2,3), dtype=f64", "i64[], shape=(2,), dtype=f32",
    ],
    free=True, precision="kept", scalars=(0,),
)  # fmt: skip
def full(value, *, shape, dtype, device=None):
    """A tensor of one value."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).expand(shape)
    return torch.full(shape, value, dtype=dtype, device=device)


def iota_dims(*, shape, dim, dtype, start=0, step=1):
    """The counted dim is whole, the others may be split."""
    names = letters(len(shape))
    names[dim] = "count"
    flagged = [n + "^" if i == dim else n for i, n in enumerate(names)]
    return f"-> {' '.join(flagged)}", dict(zip(names, shape, strict=True))


def iota_part(at, *, shape, dim, dtype, start=0, step=1):
    """Counting from where this rank's part starts."""
    count = o.add(iota(shape=shape, dim=dim, dtype=torch.int64), at.start("count"))
    if not (isinstance(start, int) and isinstance(step, int)):
        count = o.cast(count, dtype=torch.float64)
    count = o.add(o.mul(count, step), start)
    return count if count.dtype == dtype else o.cast(count, dtype=dtype)


@op(
    iota_dims,
    types=lambda *, shape, dim, dtype, start=0, step=1: Type(dtype, shape),
    parts={"count": SplitRule(iota_part, uneven=True)},
    examples=[
        "shape=(6,), dim=0, dtype=i64", "shape=(2,3,4), dim=1, dtype=f32, start=2, step=3",
        "shape=(5,), dim=0, dtype=f64, start=0.5, step=-0.1", "shape=(0,), dim=0, dtype=i32",
        "shape=(4,), dim=0, dtype=i64, start=3, step=-2", "shape=(4,2), dim=0, dtype=bf16",
    ],
    precision="kept",
)  # fmt: skip
def iota(*, shape, dim, dtype, start=0, step=1, device=None):
    """start + step * i along `dim`, the same along the other dims"""
    exact = isinstance(start, int) and isinstance(step, int)
    count = torch.arange(shape[dim], dtype=torch.int64 if exact else torch.float64, device=device)
    along = (count * step + start).to(dtype)
    return along.reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)


def const_dims(*, name, shape, dtype):
    """Whole: every device holds it."""
    names = letters(len(shape))
    return f"-> {' '.join(n + '^' for n in names)}", dict(zip(names, shape, strict=True))


@op(const_dims, types=lambda *, name, shape, dtype: Type(dtype, shape), free=True, precision="kept")
def const(*, name, shape, dtype):
    """A tensor that the program carries with it."""
    raise IRError(f"const {name} has no kernel: the runner supplies it")


# -- torch's constructors ---------------------------------------------------------------------------------------


def dtype_or_default(dtype):
    """None means torch's default float."""
    return torch.get_default_dtype() if dtype is None else dtype


def filled(value, shape, dtype):
    """A tensor of one number."""
    return full(value, shape=tuple(shape), dtype=dtype)


def literal_dtype(value):
    """The dtype torch.full gives a number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, complex):
        return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()


@captures("aten.full.default")
def _full(size, fill_value, *, dtype=None, **_):
    return filled(fill_value, size, dtype or literal_dtype(fill_value))


@captures("aten.zeros.default", "aten.empty.memory_format")
def _zeros(size, *, dtype=None, **_):
    return filled(0, size, dtype_or_default(dtype))


@captures("aten.empty_strided.default", "aten.empty_permuted.default")
def _empty_strided(size, stride, *, dtype=None, **_):
    return filled(0, size, dtype_or_default(dtype))


@captures("aten.ones.default")
def _ones(size, *, dtype=None, **_):
    return filled(1, size, dtype_or_default(dtype))


@captures("aten.scalar_tensor.default")
def _scalar_tensor(value, *, dtype=None, **_):
    return filled(value, (), dtype_or_default(dtype))


@captures("aten.full_like.default")
def _full_like(x, fill_value, *, dtype=None, **_):
    return filled(fill_value, x.shape, dtype or x.dtype)


@captures("aten.zeros_like.default", "aten.empty_like.default")
def _zeros_like(x, *, dtype=None, **_):
    return filled(0, x.shape, dtype or x.dtype)


@captures("aten.ones_like.default")
def _ones_like(x, *, dtype=None, **_):
    return filled(1, x.shape, dtype or x.dtype)


@captures("aten.new_full.default")
def _new_full(x, size, fill_value, *, dtype=None, **_):
    return filled(fill_value, size, dtype or x.dtype)


@captures("aten.new_zeros.default", "aten.new_empty.default")
def _new_zeros(x, size, *, dtype=None, **_):
    return filled(0, size, dtype or x.dtype)


@captures("aten.new_empty_strided.default")
def _new_empty_strided(x, size, stride, *, dtype=None, **_):
    return filled(0, size, dtype or x.dtype)


@captures("aten.new_ones.default")
def _new_ones(x, size, *, dtype=None, **_):
    return filled(1, size, dtype or x.dtype)


@captures("aten.fill.Scalar")
def _fill(x, value):
    return filled(value, x.shape, x.dtype)


@captures("aten.fill.Tensor")
def _fill_tensor(x, value):
    return expanded(cast_like(value, x), x.shape)


@captures("aten.zero.default")
def _zero(x):
    return filled(0, x.shape, x.dtype)


# -- counting ---------------------------------------------------------------------------------------------------


def counted(n, dtype=torch.int64, start=0, step=1):
    """start, start + step, … as a vector of n."""
    return iota(shape=(n,), dim=0, dtype=dtype, start=start, step=step)


@captures("aten.arange.default")
def _arange(end, *, dtype=None, **_):
    return _arange_step(0, end, 1, dtype=dtype)


@captures("aten.arange.start", "aten.arange.start_step")
def _arange_step(start, end, step=1, *, dtype=None, **_):
    if not step or (end - start) / step < 0:
        raise ValueError(f"arange from {start} to {end} by {step}")
    exact = all(isinstance(v, int) for v in (start, end, step))
    count = -((start - end) // step) if exact else math.ceil((end - start) / step)
    if dtype is not None and not dtype.is_floating_point:
        start, step = int(start), int(step)
    return counted(count, dtype or (torch.int64 if exact else torch.get_default_dtype()), start, step)


@captures("aten.linspace.default")
def _linspace(start, end, steps, *, dtype=None, **_):
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    return counted(steps, dtype_or_default(dtype), start if isinstance(start, complex) else float(start), step)


@captures("aten.logspace.default")
def _logspace(start, end, steps, base=10.0, *, dtype=None, **_):
    return o.cast(o.pow(float(base), _linspace(start, end, steps, dtype=torch.float64)), dtype=dtype_or_default(dtype))


@captures("aten.eye.default", "aten.eye.m")
def _eye(n, m=None, *, dtype=None, **_):
    shape = (n, n if m is None else m)
    row, column = (iota(shape=shape, dim=d, dtype=torch.int64) for d in (0, 1))
    return o.cast(o.eq(row, column), dtype=dtype_or_default(dtype))


def triangle(total, starts, counts, dtype):
    """(row, column) of each of `total` elements, given where in its columns each row starts and how many it has."""
    ends = o.cumsum(counts, dim=0)
    at = counted(total)
    row = o.searchsorted(ends, at, right=True)
    shift = o.sub(starts, o.sub(ends, counts))
    return o.cast(o.stack(row, o.add(at, o.index_select(shift, row, dim=0)), dim=0), dtype=dtype or torch.int64)


@captures("aten.tril_indices.default")
def _tril_indices(row, col, offset=0, *, dtype=None, **_):
    total = sum(min(max(r + 1 + offset, 0), col) for r in range(row))
    counts = o.clamp(counted(row, start=1 + offset), 0, col)
    return triangle(total, filled(0, (row,), torch.int64), counts, dtype)


@captures("aten.triu_indices.default")
def _triu_indices(row, col, offset=0, *, dtype=None, **_):
    total = sum(col - min(max(r + offset, 0), col) for r in range(row))
    starts = o.clamp(counted(row, start=offset), 0, col)
    return triangle(total, starts, o.sub(col, starts), dtype)
