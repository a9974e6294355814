"""vmap: a function of one row, for all rows of a batch.

    mycel.vmap(f)(xs)            [f(x) for x in xs], stacked
    mycel.vmap(f, (0, None))     the second argument is the same for every row

What torch's own vmap can do (most of what has no decision on values) becomes plain equations with one dim more;
branches and loops on a row's values are captured for one row, and a scan goes over the rows.  It differentiates, and
nests with grad, as all captured code does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.api import Jit, unjit
from mycel.capture import TRACING, Tree, each, flatten, rewritten, succeeds

InDims = int | None | Sequence[int | None]


def vmap(fn: Callable[..., Any], in_dims: InDims = 0, out_dims: int = 0) -> Mapped:
    """A function that maps `fn` over a dim of its arguments, one for all or one for each (None: not mapped); results
    have the new dim at `out_dims`."""
    return Mapped(unjit(fn), in_dims, out_dims)


class Mapped:
    """A function of rows as a function of batches; see `vmap`."""

    def __init__(self, fn: Callable[..., Any], in_dims: InDims, out_dims: int) -> None:
        self.fn, self.in_dims, self.out_dims = fn, in_dims, out_dims
        functools.update_wrapper(self, fn, updated=())
        self._jit = Jit(self._mapped, "graph")

    def __call__(self, *args: Any) -> Any:
        return self._mapped(*args) if TRACING else self._jit(*args)

    def _mapped(self, *args: Any) -> Any:
        given: Any = self.in_dims
        dims: tuple[int | None, ...] = tuple(given) if isinstance(given, (tuple, list)) else (given,) * len(args)
        if len(dims) != len(args):
            raise ValueError(f"vmap: in_dims has {len(dims)} entries for {len(args)} arguments")
        at_once = torch.func.vmap(rewritten(self.fn), in_dims=dims, out_dims=self.out_dims, randomness="different")
        if succeeds(TRACING[-1], lambda: at_once(*args)):
            return at_once(*args)
        return self._row_by_row(args, dims)

    def _row_by_row(self, args: Sequence[Any], dims: Sequence[int | None]) -> Any:
        """The rows in a loop, their results written into what holds all of them."""
        leaves: list[torch.Tensor] = []
        trees = [flatten(a, leaves) for a in args]
        along = [d for d, tree in zip(dims, trees, strict=True) for _ in tree.paths("")]
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(leaves, along, strict=True)]
        sizes = {x.shape[0] for x, d in zip(moved, along, strict=True) if d is not None}
        if len(sizes) != 1:
            raise ValueError(f"vmap: the mapped dims have sizes {sorted(sizes)}; they must have one")
        count, fn = sizes.pop(), rewritten(self.fn)

        def row(i: Any) -> tuple[Tree, list[torch.Tensor]]:
            parts = iter([x if d is None else x[i] for x, d in zip(moved, along, strict=True)])
            results: list[torch.Tensor] = []
            return flatten(fn(*(tree.unflatten(parts) for tree in trees)), results), results

        out, first = row(0)
        held = [y.new_zeros((count, *y.shape)) for y in first]

        def body(i: Any) -> None:
            for all_rows, y in zip(held, row(i)[1], strict=True):
                all_rows[i] = y

        each(range(count), body, None, ())
        return out.unflatten(iter([x.movedim(0, self.out_dims) for x in held]))
