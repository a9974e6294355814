"""What the user says of layouts inside model code: a layout for a value, or a region to be spread by hand.

    h = mycel.shard(h, "dp", None, "tp")           from here on dim 0 over dp, dim 2 over tp; the value stays what it is

    with mycel.manual("tp"):                       in here a rank sees what it has itself along tp
        w = comm.part(self.w, "tp", dim=0)         this rank's part of a value
        h = comm.all_gather(x @ w.T, "tp", dim=-1)

    @mycel.manual("tp", ins=[None, ("tp", None)], outs=(None, "tp"))
    def column(x, w):                              x whole, w as this rank's rows; the results of all ranks side by side
        return x @ w.T

Values from outside come into a region whole, the same on every rank, unless `ins` says how an argument is split.  What
leaves a `with` block must be the same on all its ranks again, which is checked; a result of a decorated function is
taken as `outs` says, and along an axis that it does not name the first rank's counts: it is sent to the others where
they may have another.  A list is one layout for each argument or result, a tuple one layout, None the whole.  Axes that
the region does not name are spread as everywhere else.  Random numbers are the same on all ranks of a region.  On one
device, or where an axis has one rank, parts are wholes and nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture import TRACING, Open, checked, closed, divided, flatten, opened, refuse, rewritten
from mycel.errors import PlanError
from mycel.ir import Axes, Var
from mycel.ops import o

# the regions around the code that runs: their axes, and what is traced where they have ranks
OPEN: list[tuple[Axes, Open | None]] = []


def shard(x: torch.Tensor, *layout: Any) -> torch.Tensor:
    """x, to be laid out so: for each dim an axis of the mesh, a tuple of axes, or None.  Its values do not change."""
    if not isinstance(x, torch.Tensor):
        raise PlanError(f"mycel.shard takes a tensor, not {type(x).__name__}")
    dims = _layout(layout, x.ndim, "mycel.shard")
    own = next((a for axes, _ in OPEN for a in axes if any(a in d for d in dims)), None)
    if own is not None:
        raise _refuse(
            f"mycel.shard over {own!r} inside of a manual region over it", "comm.part, or a hint outside of the region"
        )
    if not TRACING:
        return x
    tracer = TRACING[-1]
    hinted: torch.Tensor = tracer.wrap(tracer.apply(lambda v: o.shard(v, layout=dims), (x,), {}))
    return hinted


def _layout(entries: Sequence[Any] | None, ndim: int, what: str) -> tuple[Axes, ...]:
    """Entries as tuples of axes; refuses what is no layout of so many dims."""
    if entries is None:
        return ((),) * ndim
    dims = (
        tuple(() if e is None else (e,) if isinstance(e, str) else e for e in entries)
        if isinstance(entries, tuple | list)
        else None
    )
    if dims is None or not all(isinstance(d, tuple | list) and all(isinstance(a, str) for a in d) for d in dims):
        raise _refuse(
            f"{what}: {entries!r} is no layout", "for each dim an axis such as 'dp', a tuple of axes, or None"
        )
    if len(dims) != ndim:
        raise _refuse(
            f"{what}: {len(dims)} entries for a tensor of {ndim} dims",
            "one entry for each dim, None for a dim that stays whole",
        )
    axes = [a for d in dims for a in d]
    twice = next((a for a in axes if axes.count(a) > 1), None)
    if twice is not None:
        raise _refuse(f"{what}: axis {twice!r} is used twice", "each axis once: a rank holds one part of a tensor")
    return tuple(map(tuple, dims))


def _refuse(what: str, hint: str) -> Exception:
    return refuse(what, hint) if TRACING else PlanError(f"{what}\n  try       {hint}")


class manual:
    """A region spread by hand along some axes: a context, or a decorator for a function."""

    def __init__(self, *axes: str, ins: Sequence[Any] | None = None, outs: Any = None) -> None:
        if not axes or not all(isinstance(a, str) for a in axes):
            raise PlanError(f"mycel.manual takes names of axes, not {axes!r}\n  try       mycel.manual('tp')")
        if ins is not None and not isinstance(ins, list):
            raise PlanError(
                f"mycel.manual: ins is {ins!r}\n"
                "  try       a list with a layout for each argument: ins=[('tp', None), None]"
            )
        self.axes, self.ins, self.outs = axes, ins, outs

    def __enter__(self) -> None:
        if self.ins is not None or self.outs is not None:
            raise _refuse(
                "mycel.manual: ins and outs are for functions",
                "a decorated function, or comm.part and comm.all_gather in the with block",
            )
        self._open()

    def __exit__(self, error: Any, *_: Any) -> None:
        self._close(error is not None)

    def _open(self) -> Open | None:
        sizes = checked(self.axes, "mycel.manual")
        region = opened(TRACING[-1], sizes) if sizes else None
        OPEN.append((self.axes, region))
        return region

    def _close(self, failed: bool = False) -> dict[Any, Any]:
        _, region = OPEN.pop()
        if region is None:
            return {}
        if failed:
            region.tracer.manual.remove(region)
            return {}
        return closed(region)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            region = self._open()
            try:
                given = [self._enter(region, i, x) for i, x in enumerate(args)]
                out = (rewritten(fn) if TRACING else fn)(*given, **kwargs)
                leaves: list[torch.Tensor] = []
                tree = flatten(out, leaves)
                layouts = self._outs(leaves)
                values = self._values(region, leaves, layouts)
            except BaseException:
                self._close(True)
                raise
            inner = self._close()
            if region is None:
                return out
            left = [region.leave(inner.get(v, v), layout) for v, layout in zip(values, layouts, strict=True)]
            return tree.unflatten(iter([region.tracer.wrap(v) for v in left]))

        return run

    def _enter(self, region: Open | None, i: int, x: Any) -> Any:
        """An argument as this rank's part."""
        if self.ins is None or self.ins[i : i + 1] in ([], [None]):
            return x
        leaves: list[torch.Tensor] = []
        tree = flatten(x, leaves)
        layouts = [self._own(_layout(self.ins[i], t.ndim, f"mycel.manual: argument {i}")) for t in leaves]
        if region is None:
            return x
        tracer = region.tracer
        tracer.here()
        parts = []
        for t, layout in zip(leaves, layouts, strict=True):
            for n, axes in zip(t.shape, layout, strict=True):
                divided(n, axes, region.sizes, f"mycel.manual: argument {i}")
            with tracer:
                parts.append(tracer.wrap(region.enter(tracer.cell(t).read(), self._sized(layout, region))))
        return tree.unflatten(iter(parts))

    def _outs(self, leaves: Sequence[torch.Tensor]) -> list[tuple[Axes, ...]]:
        """A layout for each result."""
        listed = self.outs if isinstance(self.outs, list) else [self.outs] * len(leaves)
        if len(listed) != len(leaves):
            raise _refuse(
                f"mycel.manual: outs has {len(listed)} layouts for {len(leaves)} results",
                "one for each tensor the function returns",
            )
        layouts = [
            self._own(_layout(e, t.ndim, f"mycel.manual: result {i}"))
            for i, (e, t) in enumerate(zip(listed, leaves, strict=True))
        ]
        region = OPEN[-1][1]
        return layouts if region is None else [self._sized(layout, region) for layout in layouts]

    def _values(
        self, region: Open | None, leaves: Sequence[torch.Tensor], layouts: Sequence[tuple[Axes, ...]]
    ) -> list[Any]:
        """The results as values of the region, the same on all ranks along axes that their layouts do not name."""
        if region is None:
            return []
        tracer = region.tracer
        tracer.here()
        with tracer:
            values = region.given([tracer.cell(t).read() for t in leaves])
            return [region.agreed(v, layout) for v, layout in zip(values, layouts, strict=True) if isinstance(v, Var)]

    def _own(self, layout: tuple[Axes, ...]) -> tuple[Axes, ...]:
        other = next((a for dim in layout for a in dim if a not in self.axes), None)
        if other is not None:
            raise _refuse(
                f"mycel.manual: a layout names {other!r}; the region is over {', '.join(self.axes)}",
                f"mycel.manual(…, {other!r})",
            )
        return layout

    def _sized(self, layout: tuple[Axes, ...], region: Open) -> tuple[Axes, ...]:
        """Without axes of one rank."""
        return tuple(tuple(a for a in dim if a in region.sizes) for dim in layout)
