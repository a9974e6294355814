"""Subscripts whose integers are tensors: torch would read their values to select by them.

x[:, n]        select_at(x, n, dim=1), a view, then [:] of it
x[:, n] = y    the same view, written
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Unknown = Callable[[torch.Tensor], bool]  # does the value of this tensor depend on inputs?
Select = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def open_key(x: torch.Tensor, key: Any, unknown: Unknown, select: Select) -> tuple[torch.Tensor, Any]:
    """x[key] -> the same as a subscript without integers that are tensors, of a view of x."""
    keys = list(key) if isinstance(key, tuple) or _is_tuple(key) else [key]
    if not any(map(_is_number, keys)) and not any(map(_is_tuple, keys)):
        return x, key
    dim, kept = 0, []
    for at, k in enumerate(keys):
        k = torch.stack([torch.as_tensor(v) for v in k]) if _is_tuple(k) else k
        if _is_number(k) and unknown(k):
            x = select(x, torch.where(k < 0, k + x.shape[dim], k), dim)
            continue
        kept.append(k)
        dim = x.ndim - sum(map(_width, keys[at + 1 :])) if k is Ellipsis else dim + _width(k)
    return x, tuple(kept)


def _width(k: Any) -> int:
    """How many dims of x an item of the key takes."""
    if k is None or isinstance(k, bool):
        return 0
    return k.ndim if isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8) else 1


def _is_number(k: Any) -> bool:
    return (
        isinstance(k, torch.Tensor) and k.ndim == 0 and k.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    )


def _is_tuple(k: Any) -> bool:
    """A list with integer tensors: the whole key as a tuple, or one item of it as a vector."""
    return isinstance(k, list) and any(map(_is_number, k))
