"""What the kernel of an equation allocates while it runs, besides what it returns.

Where an operator does not say it (`Op.scratch`), its kernel is run on tensors without data, and every storage that an
operator of torch returns counts from then until it is freed: the most there are at once.  So nothing is said twice, and
what a kernel becomes is followed.  An operand that is a permuted view is one here, too: a product copies it first, and
a reshape of it is no view.

Scalars have data, since kernels read numbers.  What reads other data cannot be run so, and says its scratch by itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mycel.ir import CONTROL, Eqn, Op, Params, Type, Var, rounded
from mycel.ops import o

Operand = Type | float | bool | int | None
Turns = tuple[tuple[int, ...] | None, ...]  # for each operand the dims by which it was permuted


class Allocations(TorchDispatchMode):
    """Bytes of the storages made while it is on: those there are now, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in given | self.sizes.keys():
                self.sizes[key] = rounded(x.untyped_storage().nbytes())
                self.now += self.sizes[key]
                self.most = max(self.most, self.now)
                weakref.finalize(x.untyped_storage(), self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def is_unsaid(op: Op) -> bool:
    """May its kernel allocate what it does not say?  One that computes element by element does not."""
    said = op.scratch is not None or (op.c is not None and op.write is None)
    no_kernel = op in CONTROL or op.by_rank or op.collective or op.transfers or op.python or op.stacks or op.free
    return not (said or no_kernel or op.effect)


def allocated(eqn: Eqn, types: Sequence[Operand], makers: Mapping[Var, Eqn]) -> int:
    """Bytes that an equation takes besides its results, of a view all, with operands of these types; `makers`: of
    values of its block."""
    if not is_unsaid(eqn.op):
        return 0
    turns = tuple(_turned(x, makers) if isinstance(x, Var) else None for x in eqn.inputs)
    if eqn.op.write is not None and not any(turns):
        return 0
    return _allocated(eqn.op, tuple(types), eqn.params, turns)


def _turned(x: Var, makers: Mapping[Var, Eqn]) -> tuple[int, ...] | None:
    """The dims of the permute that made it.  Attention returns what is in order once its heads are put together."""
    maker = makers.get(x)
    if maker is None or maker.op is not o.permute:
        return None
    before = makers.get(next(maker.vars))
    return None if before is not None and before.op is o.attention else maker.params["dims"]


@functools.lru_cache(1 << 14)
def _allocated(op: Op, types: Sequence[Operand], params: Params, turns: Turns) -> int:
    """0 where the kernel needs data: it says its scratch by itself."""
    for numbers in ("cpu", "meta"):  # some read numbers, others compute with them where their tensors are
        run = Allocations()
        operands = [_without_data(t, dims, numbers) for t, dims in zip(types, turns, strict=True)]
        with contextlib.suppress(Exception), torch.no_grad(), torch.device("meta"), run:
            results = (op.inplace or op.kernel)(*operands, **params)  # noqa: F841 (alive while it is counted)
            return run.most if op.write is not None else run.most - run.now
    return 0


def _without_data(t: Operand, turn: tuple[int, ...] | None, numbers: str) -> Any:
    if not isinstance(t, Type):
        return t
    if not t.ndim:
        return torch.ones((), dtype=t.dtype, device=numbers)
    if turn is None:
        return torch.empty(t.shape, dtype=t.dtype, device="meta")
    before = [0] * t.ndim
    for to, dim in enumerate(turn):
        before[dim] = t.shape[to]
    return torch.empty(before, dtype=t.dtype, device="meta").permute(turn)
