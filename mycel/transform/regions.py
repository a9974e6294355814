"""Sets of tensor elements that are cut out by half planes of the index space, and numbers that are affine in the index.

    Affine   offset + Σ steps[d] · i_d                      iota, and what adds and scales such
    Region   where all (or any) of some Affine are >= 0     k <= q is the half plane  q - k >= 0

All questions are answered from the shape alone: whether a half plane holds everywhere, whether one implies another.
None is "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """offset + Σ steps[d] · i_d"""

    offset: int
    steps: tuple[int, ...]

    def bounds(self, shape: Shape) -> tuple[int, int]:
        """The least and the largest value over a shape."""
        ends = [step * (n - 1) for step, n in zip(self.steps, shape, strict=True)]
        return self.offset + sum(min(e, 0) for e in ends), self.offset + sum(max(e, 0) for e in ends)

    def normal(self, shape: Shape) -> Affine:
        """Without steps along dims of size one."""
        return Affine(self.offset, tuple(s if n > 1 else 0 for s, n in zip(self.steps, shape, strict=True)))

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """self + times · other"""
        return Affine(
            self.offset + times * other.offset,
            tuple(a + times * b for a, b in zip(self.steps, other.steps, strict=True)),
        )

    def below(self) -> Affine:
        """The half plane where this one does not hold: not (a >= 0) is -a - 1 >= 0."""
        return Affine(-self.offset - 1, tuple(-s for s in self.steps))


@dataclass(frozen=True, slots=True)
class Region:
    """The elements in every (or else in any) of some half planes."""

    halves: frozenset[Affine]
    every: bool = True

    def inverse(self) -> Region:
        """All other elements."""
        return Region(frozenset(h.below() for h in self.halves), not self.every or len(self.halves) == 1)


ALL, NONE = Region(frozenset(), True), Region(frozenset(), False)


def half(a: Affine, shape: Shape) -> Region:
    """Where a >= 0."""
    a = a.normal(shape)
    low, high = a.bounds(shape)
    if low >= 0:
        return ALL
    if high < 0:
        return NONE
    unit = math.gcd(*a.steps)
    return Region(frozenset({Affine(a.offset // unit, tuple(s // unit for s in a.steps))}))


def meet(a: Region, b: Region, shape: Shape) -> Region | None:
    """The elements in both."""
    if NONE in (a, b):
        return NONE
    if a in (ALL, b):
        return b
    if b == ALL:
        return a
    if a.every and b.every:
        return _every(a.halves | b.halves, shape)
    for x, y in ((a, b), (b, a)):
        if x.every and any(_implies(g, h, shape) for g in x.halves for h in y.halves):
            return x
    return None


def join(a: Region, b: Region, shape: Shape) -> Region | None:
    """The elements in either."""
    both = meet(a.inverse(), b.inverse(), shape)
    return None if both is None else both.inverse()


def moved(region: Region, change: Callable[[Affine], Affine], shape: Shape) -> Region | None:
    """The region under a change of index; `shape` is the new one."""
    if not region.every:
        back = moved(region.inverse(), change, shape)
        return None if back is None else back.inverse()
    found: Region | None = ALL
    for h in region.halves:
        found = None if found is None else meet(found, half(change(h), shape), shape)
    return found


def _every(halves: Iterable[Affine], shape: Shape) -> Region:
    """All of some half planes, without those that others imply."""
    kept: list[Affine] = []
    for h in sorted(halves, key=lambda h: (h.steps, h.offset)):
        if any(g.plus(h).bounds(shape)[1] < 0 for g in kept):
            return NONE
        if not any(_implies(g, h, shape) for g in kept):
            kept = [g for g in kept if not _implies(h, g, shape)] + [h]
    return Region(frozenset(kept))


def _implies(g: Affine, h: Affine, shape: Shape) -> bool:
    """g >= 0 implies h >= 0: h is never below g."""
    return h.plus(g, -1).bounds(shape)[0] >= 0
