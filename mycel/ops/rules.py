"""What gradient rules and expansions are written with.

`o` reaches any operator by name (`o.mul(g, y)`), so families need not import each other.
"""

from __future__ import annotations

from typing import Any

import torch

from mycel.ir import OPS, Op, is_float


class _Operators:
    """Operators as attributes, looked up when used."""

    def __getattr__(self, name: str) -> Op:
        return OPS[name]


o = _Operators()


def unbroadcast(g: Any, like: Any) -> Any:
    """The cotangent of a broadcast operand: summed over what was expanded, in the operand's dtype; None for a literal
    or integers."""
    shape = getattr(like, "shape", None)
    if g is None or shape is None or not is_float(like.dtype):
        return None
    if g.dtype.is_complex and not like.dtype.is_complex:
        g = o.real(g)
    lead = len(g.shape) - len(shape)
    dims = tuple(range(lead)) + tuple(i + lead for i, n in enumerate(shape) if n == 1 and g.shape[i + lead] != 1)
    if dims:
        g = o.sum(g, dims=dims)
    if tuple(g.shape) != tuple(shape):
        g = o.reshape(g, shape=tuple(shape))
    return cast_like(g, like)


def cast_like(g: Any, like: Any) -> Any:
    """g in the dtype of `like`."""
    return g if g.dtype == like.dtype else o.cast(g, dtype=like.dtype)


def conj(x: Any) -> Any:
    """The complex conjugate; real values and literals as they are."""
    if isinstance(x, complex):
        return x.conjugate()
    dtype = getattr(x, "dtype", None)
    return o.conj(x) if isinstance(dtype, torch.dtype) and dtype.is_complex else x


def normal_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"dim {dim} is out of range for {ndim} dims")
    return dim % ndim if ndim else 0


def normal_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front, sorted; none given means all."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(ndim))
    dims = [dims] if isinstance(dims, int) else dims
    found = tuple(sorted(normal_dim(d, ndim) for d in dims))
    return found if ndim else ()


def letters(n: int, skip: str = "") -> list[str]:
    """n distinct letters for building dims text."""
    return [c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in skip][:n]
