"""Code that runs as it is, its products of 16 bits in 32 where these are faster: what the pass `wide_products` is to
programs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mycel.ops.narrow_products import HALVES
from mycel.ops.product_speed import slow_products

_aten = torch.ops.aten
PRODUCTS = frozenset({
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default,
    _aten.addmv.default, _aten.convolution.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip


def wide_calls(module: Any, rows: int) -> contextlib.AbstractContextManager[Any]:
    """Around a call of a module that is given so many rows; where autograd records, and around other functions,
    nothing."""
    first = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    if first is None or first.dtype not in HALVES or torch.is_grad_enabled():
        return contextlib.nullcontext()
    slow = slow_products(first.device, [first.dtype])
    return _WideCalls(first.dtype) if rows >= slow.get(first.dtype, rows + 1) else contextlib.nullcontext()


class _WideCalls(TorchDispatchMode):
    """op(x, w) => op(x.float(), w.float()).to(dtype)"""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or not self._is_narrow(args[0]):
            return func(*args, **kwargs)
        result = func(*map(self._wide, args), **{name: self._wide(x) for name, x in kwargs.items()})
        if isinstance(result, torch.Tensor):
            return result.to(self.dtype)
        return result[0].to(self.dtype), *result[1:]  # of attention, and its log-sum-exp, in 32 bits as ever

    def _is_narrow(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype

    def _wide(self, x: Any) -> Any:
        return x.float() if self._is_narrow(x) else x
