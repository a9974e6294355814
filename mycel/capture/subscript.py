"""Subscripts whose integers are tensors: torch would read their values to select by them.

x[:, n]        select_at(x, n, dim=1), a view, then [:] of it
x[:, n] = y    the same view, written
x[n : n + 4]   window_at(x, n, dim=0, size=4), a view, then [:] of it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Unknown = Callable[[torch.Tensor], bool]  # does the value of this tensor depend on inputs?
Select = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
Window = Callable[[torch.Tensor, slice, int], torch.Tensor | None]  # None: it has no size that is known


def open_key(x: torch.Tensor, key: Any, unknown: Unknown, select: Select, window: Window) -> tuple[torch.Tensor, Any]:
    """x[key] -> the same as a subscript without integers that are tensors, of a view of x."""
    keys = list(key) if isinstance(key, tuple) or _is_tuple(key) else [key]
    if not any(_is_number(k) or _is_tuple(k) or _is_window(k) for k in keys):
        return x, key
    dim, kept = 0, []
    for at, given in enumerate(keys):
        k: Any = torch.stack([torch.as_tensor(v) for v in given]) if _is_tuple(given) else given
        if _is_number(k) and unknown(k):
            x = select(x, torch.where(k < 0, k + x.shape[dim], k), dim)
            continue
        if _is_window(k) and unknown(k.start) and (part := window(x, k, dim)) is not None:
            x, k = part, slice(None)
        kept.append(k)
        dim = x.ndim - sum(map(_width, keys[at + 1 :])) if k is Ellipsis else dim + _width(k)
    return x, tuple(kept)


def _width(k: Any) -> int:
    """How many dims of x an item of the key takes."""
    if k is None or isinstance(k, bool):
        return 0
    return k.ndim if isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8) else 1


def _is_number(k: Any) -> bool:
    """A 0-dim integer; of one inside a transform of torch.func each row has its own."""
    return (
        isinstance(k, torch.Tensor)
        and k.ndim == 0
        and k.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        and not torch._C._functorch.is_functorch_wrapped_tensor(k)
    )


def _is_window(k: Any) -> bool:
    return isinstance(k, slice) and _is_number(k.start) and _is_number(k.stop) and k.step in (None, 1)


def _is_tuple(k: Any) -> bool:
    """A list with integer tensors: the whole key as a tuple, or one item of it as a vector."""
    return isinstance(k, list) and any(map(_is_number, k))
