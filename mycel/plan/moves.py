"""From one layout of a tensor to another: the cheapest chain of moves, a shortest path over layouts.

    own_part        [-]   -> [a]         nothing is sent
    all_gather      [a.b] -> [a]         the fastest axis of a dim
    all_to_all      [a,-] -> [-,a]
    all_reduce      [-]+a -> [-]
    reduce_scatter  [-]+a -> [a]
    permute_ranks   any   -> any         parts as they are, to other ranks: [a.b] -> [b.a]
    only_first      [-]   -> [-]+a       nothing is sent

Found once for each (type, from, to).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mycel.errors import IRError
from mycel.ir import Axes, Layout, Mesh, Params, Type, extent, is_even, part
from mycel.plan.links import Links

COPY_S = 1e-7  # so that of two ways that send nothing the shorter one is taken


@dataclass(frozen=True)
class Move:
    """One operator of a chain, with the layout and local type that result."""

    op: str
    params: Params
    layout: Layout
    type: Type


@dataclass
class Moves:
    """Chains between layouts on one mesh."""

    links: Links
    _found: dict[Any, tuple[float, tuple[Move, ...]]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.links.mesh

    def seconds(self, type: Type, source: Layout, target: Layout) -> float:
        return self.chain(type, source, target)[0]

    def chain(self, type: Type, source: Layout, target: Layout) -> tuple[float, tuple[Move, ...]]:
        """(seconds, moves) of the cheapest way; `type` is the global one."""
        if source == target:
            return 0.0, ()
        key = (type, source, target)
        if key not in self._found:
            self._found[key] = self._search(type, source, target)
        return self._found[key]

    def _search(self, type: Type, source: Layout, target: Layout) -> tuple[float, tuple[Move, ...]]:
        order = itertools.count()
        best: dict[Layout, float] = {source: 0.0}
        heap: list[tuple[float, int, Layout, tuple[Move, ...]]] = [(0.0, next(order), source, ())]
        while heap:
            cost, _, at, path = heapq.heappop(heap)
            if at == target:
                return cost, path
            if cost > best.get(at, cost):
                continue
            for move in self._from(type, at, target):
                total = cost + self._cost(move, at.local(type, self.mesh))
                if total < best.get(move.layout, float("inf")):
                    best[move.layout] = total
                    heapq.heappush(heap, (total, next(order), move.layout, (*path, move)))
        raise IRError(f"no way from {source} to {target} for {type}")

    def _cost(self, move: Move, given: Type) -> float:
        """What the clock says of it: seconds on the wire.  A part of what is there is a view; of what is not the
        first, zeros, merged with whoever reads them."""
        return COPY_S + self.links.seconds(move.op, move.params.get("axes", ()), given.bytes)

    # -- what can be done from a layout ------------------------------------------------------------------------------

    def _from(self, type: Type, at: Layout, target: Layout) -> Iterator[Move]:
        wanted = target.axes
        used = at.axes
        kinds = dict(at.partial)
        for axis, kind in at.partial:
            free = Layout(at.dims, tuple(x for x in at.partial if x[0] != axis))
            yield self._move("all_reduce", type, free, (axis,), kind=kind)
            if axis in wanted:
                for d in range(type.ndim):
                    yield self._move("reduce_scatter", type, free.split(d, axis), (axis,), dim=d, kind=kind)
        for axes in self._joint(at, target):
            yield self._move(
                "all_reduce",
                type,
                Layout(at.dims, tuple(x for x in at.partial if x[0] not in axes)),
                axes,
                kind=kinds[axes[0]],
            )
        for axis in sorted(wanted - used):
            for d in range(type.ndim):
                if axis in target.dims[d]:
                    yield self._move("own_part", type, at.split(d, axis), (axis,), dim=d)
            if dict(target.partial).get(axis) == "+":
                yield self._move("only_first", type, at.with_partial(axis, "+"), (axis,))
            elif axis in dict(target.partial):
                yield Move("", Params(), at.with_partial(axis, dict(target.partial)[axis]), at.local(type, self.mesh))
        for d, axes in enumerate(at.dims):
            for n in range(len(axes)):
                rest, gone = axes[:n], axes[n:]
                less = Layout(tuple(rest if e == d else a for e, a in enumerate(at.dims)), at.partial)
                if self._gathers_at_once(type.shape[d], rest, gone):
                    yield self._move("all_gather", type, less, gone, dim=d, size=less.local(type, self.mesh).shape[d])
                if len(gone) == 1 and gone[0] in wanted:
                    for e in range(type.ndim):
                        if e != d and gone[0] in target.dims[e]:
                            size = less.local(type, self.mesh).shape[d]
                            yield self._move(
                                "all_to_all", type, less.split(e, gone[0]), gone, split=e, join=d, size=size
                            )
        if not at.partial and not target.partial and at.axes | target.axes:
            axes = tuple(a for a in self.mesh.axes if a in at.axes or a in target.axes)
            to = self._permutation(type, at, target, axes)
            if to is not None:
                yield self._move("permute_ranks", type, target, axes, to=to)

    def _joint(self, at: Layout, target: Layout) -> list[Axes]:
        """Several axes with partial values of one kind, to be reduced at once."""
        groups = []
        for kind in ("+", ">", "<"):
            axes = tuple(a for a, k in at.partial if k == kind and (a, k) not in target.partial)
            if len(axes) > 1:
                groups.append(axes)
        return groups

    def _gathers_at_once(self, n: int, rest: Axes, gone: Axes) -> bool:
        """Parts over several axes join to a whole in one go where none but the last ones are short."""
        return len(gone) == 1 or is_even(part(n, rest, self.mesh), gone, self.mesh)

    def _permutation(self, type: Type, at: Layout, target: Layout, axes: Axes) -> tuple[int, ...] | None:
        """Where the part of each rank along the axes is wanted, if the parts are the same ones."""
        if at.local(type, self.mesh) != target.local(type, self.mesh):
            return None
        mesh = Mesh({a: self.mesh[a] for a in axes})
        holders: dict[tuple[Any, ...], list[int]] = {}
        takers: dict[tuple[Any, ...], list[int]] = {}
        for rank in range(mesh.world):
            holders.setdefault(_piece(type, at, mesh, rank), []).append(rank)
            takers.setdefault(_piece(type, target, mesh, rank), []).append(rank)
        if {k: len(v) for k, v in holders.items()} != {k: len(v) for k, v in takers.items()}:
            return None
        to = [0] * mesh.world
        for piece, ranks in holders.items():
            stay = set(ranks) & set(takers[piece])
            for rank in stay:
                to[rank] = rank
            for rank, taker in zip(
                (r for r in ranks if r not in stay), (r for r in takers[piece] if r not in stay), strict=True
            ):
                to[rank] = taker
        return tuple(to)

    def _move(self, op: str, type: Type, layout: Layout, axes: Axes, **params: Any) -> Move:
        params = {k: v for k, v in params.items() if not (k == "kind" and v == "+")}
        return Move(op, Params(axes=axes, count=self.mesh.count(axes), **params), layout, layout.local(type, self.mesh))


def _piece(type: Type, layout: Layout, mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """Which elements a rank holds."""
    at = mesh.coordinates(rank)
    return tuple(extent(n, axes, mesh, at) for n, axes in zip(type.shape, layout.dims, strict=True))
