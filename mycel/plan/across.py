"""From a layout on one mesh to a layout on another: point-to-point transfers of just the pieces that overlap.

    x[8@a] on Mesh(a=2), ranks 0 1   ->   x[8@b] on Mesh(b=4), ranks 2 3 4 5

        rank 0 holds 0..4:   2 <- 0..2   3 <- 2..4
        rank 1 holds 4..8:   4 <- 4..6   5 <- 6..8

Of ranks that hold the same piece, the one that has sent least sends it; who holds a piece that it needs itself keeps
it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mycel.errors import PlanError
from mycel.ir import Layout, Mesh, Type, extent

Box = tuple[tuple[int, int], ...]  # (first, past the last) of each dim


@dataclass(frozen=True)
class Placed:
    """A layout on a mesh whose ranks are these of the world."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.mesh.world or len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"{self.mesh} has {self.mesh.world} ranks, was given {list(self.ranks)}")
        if self.layout.partial:
            raise PlanError(f"{self.layout} is a partial sum: it is added up before a tensor goes to another mesh")

    def box(self, type: Type, i: int) -> Box:
        """What the mesh's rank i holds."""
        at = self.mesh.coordinates(i)
        extents = [extent(n, axes, self.mesh, at) for n, axes in zip(type.shape, self.layout.dims, strict=True)]
        return tuple((start, start + count) for start, count in extents)


@dataclass(frozen=True)
class Transfer:
    """A piece of the tensor, from where it lies in the sender's part to where it lies in the receiver's: the first
    element and size of each dim."""

    source: int
    target: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def transfers(type: Type, source: Placed, target: Placed) -> list[Transfer]:
    """What goes from whom to whom; pieces a rank has already are transfers to itself, and cost nothing."""
    holders: dict[Box, list[int]] = {}
    for i, rank in enumerate(source.ranks):
        box = source.box(type, i)
        if all(a < b for a, b in box):
            holders.setdefault(box, []).append(rank)
    sent: Counter[int] = Counter()
    pieces = []
    for i, rank in enumerate(target.ranks):
        want = target.box(type, i)
        if any(a >= b for a, b in want):
            continue
        for box, ranks in _overlapping(holders, want):
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, want, strict=True))
            sender = rank if rank in ranks else min(ranks, key=lambda r: (sent[r], r))
            shape = tuple(b - a for a, b in both)
            sent[sender] += math.prod(shape) * (sender != rank)
            source_start = tuple(a - c for (a, _), (c, _) in zip(both, box, strict=True))
            put = tuple(a - c for (a, _), (c, _) in zip(both, want, strict=True))
            pieces.append(Transfer(sender, rank, source_start, put, shape))
    return pieces


def _overlapping(holders: dict[Box, list[int]], want: Box) -> list[tuple[Box, Sequence[int]]]:
    return [
        (box, ranks)
        for box, ranks in holders.items()
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, want, strict=True))
    ]


def rounds(pieces: Sequence[Transfer]) -> list[list[Transfer]]:
    """Transfers between ranks in rounds in which each rank sends one piece and receives one at most."""
    left, schedule = [t for t in pieces if t.source != t.target], []
    while left:
        busy: tuple[set[int], set[int]] = (set(), set())
        now = []
        for t in left:
            if t.source not in busy[0] and t.target not in busy[1]:
                busy[0].add(t.source)
                busy[1].add(t.target)
                now.append(t)
        schedule.append(now)
        left = list(itertools.filterfalse(now.__contains__, left))
    return schedule
