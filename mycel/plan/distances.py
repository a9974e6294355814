"""Seconds between all layouts of a tensor at once, for many tensors together: the lengths of the chains that `moves.py`
finds, as tables.

    states      each axis whole, on a dim, or partial; several axes on one dim in every order
    arcs        the moves of `moves.py` between states, each with seconds to start and seconds a byte
    allowed     for a target: an axis is split only as the target has it, a sum scattered only where the target uses the
                axis

For each target the least sum of arcs to it, from all states and for all tensors together: one more arc at a time until
nothing gets shorter.  What a rank stores of a dim depends on the ranks that share it alone, not on the order of their
axes: bytes are a product over dims.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycel.ir import Axes, Layout, Mesh, Type, extent, is_even, part
from mycel.plan.choices import PARTIAL, WHOLE
from mycel.plan.moves import COPY_S, Moves

Table = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Arc:
    """A move between two states.  `even`: a dim, the axes that stay on it, those gathered at once; `same`: dims whose
    parts must be the same ones."""

    source: int
    target: int
    op: str
    axes: Axes
    even: tuple[int, Axes, Axes] | None = None
    same: tuple[tuple[int, Axes, Axes], ...] = ()


class Space:
    """All layouts of tensors with some number of dims over some axes.  Of what can be partial, only a sum is ever
    wanted."""

    def __init__(self, ndim: int, mesh: Mesh, kinds: str = "+") -> None:
        self.ndim, self.mesh, self.axes = ndim, mesh, mesh.axes
        self.orders = list(itertools.permutations(range(len(self.axes))))
        self.layouts: list[Layout] = []
        self.index: dict[Layout, int] = {}
        shape = (ndim + 1 + len(PARTIAL),) * len(self.axes)
        # by place of each axis (from the end if negative) and order
        self.number: Indices = np.full((*shape, len(self.orders)), -1, np.int64)
        self.places: Indices = np.zeros((0, len(self.axes)), np.int64)  # by layout and axis
        self._enumerate([WHOLE, *range(ndim), *(PARTIAL[k] for k in kinds)])
        masks = [[sum(1 << self.axes.index(a) for a in dim) for dim in layout.dims] for layout in self.layouts]
        self.masks: Indices = np.array(masks, np.int64).reshape(len(self.layouts), ndim)
        self.targets = [i for i, x in enumerate(self.layouts) if all(kind == "+" for _, kind in x.partial)]
        self.arcs = sorted(self._arcs(), key=lambda arc: arc.source)

    def _enumerate(self, places: list[int]) -> None:
        rows = []
        for where in itertools.product(places, repeat=len(self.axes)):
            for number, order in enumerate(self.orders):
                layout = laid_at(self.ndim, [(self.axes[i], where[i]) for i in order])
                if layout not in self.index:
                    self.index[layout] = len(self.layouts)
                    self.layouts.append(layout)
                    rows.append(where)
                self.number[(*where, number)] = self.index[layout]
        self.places = np.array(rows, np.int64).reshape(len(rows), len(self.axes))

    def _arcs(self) -> Iterator[Arc]:
        permuted: dict[Any, list[int]] = {}
        for i, at in enumerate(self.layouts):
            for op, layout, axes, even in self._moves(at):
                if layout in self.index:
                    yield Arc(i, self.index[layout], op, axes, even)
            if not at.partial:
                permuted.setdefault(at.counts(self.mesh), []).append(i)
        for alike in permuted.values():
            for i, j in itertools.permutations(alike, 2):
                pairs = zip(self.layouts[i].dims, self.layouts[j].dims, strict=True)
                same = tuple((d, one, other) for d, (one, other) in enumerate(pairs) if one != other)
                yield Arc(i, j, "permute_ranks", tuple(sorted(self.layouts[i].axes | self.layouts[j].axes)), None, same)

    def _moves(self, at: Layout) -> Iterator[tuple[str, Layout, Axes, tuple[int, Axes, Axes] | None]]:
        for kind in dict.fromkeys(kind for _, kind in at.partial):
            over = [a for a, k in at.partial if k == kind]
            for count in range(1, len(over) + 1):
                for axes in itertools.combinations(over, count):
                    free = Layout(at.dims, tuple(x for x in at.partial if x[0] not in axes))
                    yield "all_reduce", free, axes, None
                    if count == 1:
                        yield from (("reduce_scatter", free.split(d, axes[0]), axes, None) for d in range(self.ndim))
        for axis in (a for a in self.axes if a not in at.axes):
            yield from (("own_part", at.split(d, axis), (axis,), None) for d in range(self.ndim))
            yield "only_first", at.with_partial(axis, "+"), (axis,), None
        for d, axes in enumerate(at.dims):
            for n in range(len(axes)):
                rest, gone = axes[:n], axes[n:]
                less = Layout(tuple(rest if e == d else a for e, a in enumerate(at.dims)), at.partial)
                yield "all_gather", less, gone, (d, rest, gone) if len(gone) > 1 else None
                if len(gone) == 1:
                    yield from (("all_to_all", less.split(e, gone[0]), gone, None) for e in range(self.ndim) if e != d)

    def allowed(self, arc: Arc, target: int) -> bool:
        """Does `Moves` try this arc on the way to a target?"""
        source, wanted, goal = self.layouts[arc.source], self.layouts[arc.target], self.layouts[target]
        match arc.op:
            case "permute_ranks":
                return arc.target == target
            case "all_reduce":
                kind = dict(source.partial)[arc.axes[0]]
                return len(arc.axes) == 1 or arc.axes == tuple(
                    a for a, k in source.partial if k == kind and (a, k) not in goal.partial
                )
            case "reduce_scatter":
                return arc.axes[0] in goal.axes
            case "only_first":
                return (arc.axes[0], "+") in goal.partial
            case "own_part" | "all_to_all":
                return any(
                    arc.axes[0] in dim and arc.axes[0] in want for dim, want in zip(wanted.dims, goal.dims, strict=True)
                )
        return True

    @functools.cached_property
    def ways(self) -> list[tuple[Indices, Indices, Indices]]:
        """For each target: the arcs allowed, where those of each state begin among them, and these states."""
        by_target = []
        for target in self.targets:
            arcs = [k for k, arc in enumerate(self.arcs) if self.allowed(arc, target)]
            sources = np.array([self.arcs[k].source for k in arcs], np.int64)
            states, starts = np.unique(sources, return_index=True)
            by_target.append((np.array(arcs, np.int64), starts, states))
        return by_target


@functools.lru_cache(maxsize=64)
def space(ndim: int, mesh: Mesh, kinds: str = "+") -> Space:
    """Found once for each mesh."""
    return Space(ndim, mesh, kinds)


@dataclass
class Distances:
    """Tables of seconds by type: from each layout of its space to each."""

    moves: Moves
    mesh: Mesh  # the axes to move along, of equals the slowest first
    kinds: str = "+"
    _tables: dict[Type, Table] = field(default_factory=dict)

    def space(self, ndim: int) -> Space:
        return space(ndim, self.mesh, self.kinds)

    def prepare(self, types: Iterable[Type]) -> None:
        """Make the tables of many types together."""
        by: dict[int, list[Type]] = {}
        for t in dict.fromkeys(types):
            if t not in self._tables:
                by.setdefault(t.ndim, []).append(t)
        for ndim, alike in by.items():
            self._tables.update(zip(alike, self._solve(self.space(ndim), alike), strict=True))

    def table(self, t: Type) -> Table:
        if t not in self._tables:
            self.prepare([t])
        return self._tables[t]

    def local_bytes(self, s: Space, t: Type) -> Table:
        """What a rank stores in each layout."""
        subsets = [tuple(a for i, a in enumerate(s.axes) if mask >> i & 1) for mask in range(1 << len(s.axes))]
        size = np.full(len(s.layouts), float(t.bytes))
        for d, n in enumerate(t.shape):
            shares = np.array([part(n, axes, s.mesh) / n if n else 1.0 for axes in subsets])
            size *= shares[s.masks[:, d]]
        return size

    def _solve(self, s: Space, types: list[Type]) -> list[Table]:
        links, n = self.moves.links, len(s.layouts)
        size = np.stack([self.local_bytes(s, t) for t in types], 1)
        source = np.array([arc.source for arc in s.arcs], np.int64)
        target = np.array([arc.target for arc in s.arcs], np.int64)
        start = np.array([links.seconds(arc.op, arc.axes, 0) for arc in s.arcs])
        rate = np.array([links.seconds(arc.op, arc.axes, 1) for arc in s.arcs]) - start
        cost = COPY_S + start[:, None] + rate[:, None] * size[source]
        for k, arc in enumerate(s.arcs):
            if arc.even is not None or arc.same:
                cost[k, [j for j, t in enumerate(types) if not _holds(arc, t, s.mesh)]] = np.inf
        seconds = np.full((len(types), n, n), np.inf)
        for goal, (arcs, starts, states) in zip(s.targets, s.ways, strict=True):
            away = np.full((n, len(types)), np.inf)
            away[goal] = 0.0
            changed = len(arcs) > 0
            while changed:
                shorter = np.minimum(np.minimum.reduceat(cost[arcs] + away[target[arcs]], starts, 0), away[states])
                changed = bool((shorter < away[states]).any())
                away[states] = shorter
            seconds[:, :, goal] = away.T
        return list(seconds)


def laid_at(ndim: int, places: Iterable[tuple[str, int]]) -> Layout:
    """The layout in which each axis is at its place, slower ones first."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for axis, where in places:
        if where >= 0:
            dims[where].append(axis)
        partial += [(axis, kind) for kind, n in PARTIAL.items() if n == where]
    return Layout(tuple(map(tuple, dims)), tuple(sorted(partial)))


def _holds(arc: Arc, t: Type, mesh: Mesh) -> bool:
    """Do the dims of a type let this move be made?"""
    if arc.even is not None:
        d, rest, gone = arc.even
        return is_even(part(t.shape[d], rest, mesh), gone, mesh)
    return all(_same_parts(t.shape[d], one, other, mesh) for d, one, other in arc.same)


@functools.lru_cache(maxsize=1 << 14)
def _same_parts(n: int, one: Axes, other: Axes, mesh: Mesh) -> bool:
    """Are the parts of a dim over some axes those over others?"""
    if is_even(n, one, mesh):
        return True
    parts = []
    for axes in (one, other):
        mine = Mesh({a: mesh[a] for a in axes})
        parts.append(sorted(extent(n, axes, mine, mine.coordinates(r)) for r in range(mine.world)))
    return parts[0] == parts[1]
