"""Equalities of rows and columns of tensors.

Side    a tensor, and which of its dims each dim of the index is; None: it is the same along that
Equal   one side equals the other; or a bool tensor is True, which is its own equality
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mycel.ir import Var
from mycel.transform.regions import Affine, Shape

Change = Callable[[Affine], Affine]


@dataclass(frozen=True)
class Side:
    """A tensor under an index: for each dim of the index the tensor's own, or None."""

    of: Var
    dims: tuple[int | None, ...]

    def moved(self, change: Change, new: Shape) -> Side | None:
        """Under a change of index that leaves places along dims as they are."""
        dims: list[int | None] = [None] * len(new)
        for m, d in enumerate(self.dims):
            if d is None:
                continue
            a = change(Affine(0, tuple(int(n == m) for n in range(len(self.dims)))))
            along = [n for n, step in enumerate(a.steps) if step]
            if a.offset or len(along) != 1 or a.steps[along[0]] != 1 or new[along[0]] != self.of.shape[d]:
                return None
            dims[along[0]] = d
        return Side(self.of, tuple(dims))

    def under(self, outer: Side) -> Side:
        """This one, whose index is the tensor that another side shows."""
        return Side(self.of, tuple(None if d is None else self.dims[d] for d in outer.dims))


@dataclass(frozen=True)
class Equal:
    """Where one side equals the other; `whole` says the same as a bool tensor."""

    one: Side | None
    other: Side | None
    whole: Side | None

    def moved(self, change: Change, new: Shape) -> Equal | None:
        one, other, whole = (
            None if side is None else side.moved(change, new) for side in (self.one, self.other, self.whole)
        )
        if one is None or other is None:
            one = other = None
        return Equal(one, other, whole) if one is not None or whole is not None else None
