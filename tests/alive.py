"""Alive: a context that counts what is made inside, in bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """`most`: bytes that were there at once."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self._add(x.untyped_storage().nbytes())
                weakref.finalize(x.untyped_storage(), self._add, -x.untyped_storage().nbytes())
        return out

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)
