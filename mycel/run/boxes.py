"""Boxes: which part of a tensor a rank holds, what two of them share, and which of its holders saves a part.

    f32[5@dp,4] on Mesh(dp=2, tp=3)      dp=0  rows 0:3   on ranks 0 1 2
                                         dp=1  rows 3:5   on ranks 3 4 5, with a row of padding, which belongs to no box

A partial tensor, the sum of what ranks hold, is saved as its summands: f32[5]+dp as f32[2@dp,5].  So is one that each
rank has a copy of its own of, and whose mean stands for all: f32[5]~dp.

A box is (start, stop) for each dim.  Ranks that differ only along axes that a layout does not use hold the same box;
one of them saves it, the one that has the least to save so far, the largest tensors first.  Every rank finds the same
answer by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from mycel.errors import CheckpointError
from mycel.ir import MEAN, Layout, Mesh, extent, part

Dims = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
SAVED = {"+": "sum", MEAN: "mean"}  # what a partial tensor that is saved is of its summands
Item = tuple[Layout, Dims, int]  # a tensor on a mesh: layout, global shape, bytes of an element


def checked(name: str, layout: Layout, shape: Sequence[int], mesh: Mesh) -> Dims:
    """The shape, if parts of such a tensor can be saved and loaded."""
    summed = all(kind in SAVED for _, kind in layout.partial)
    if not summed or len(layout.dims) != len(shape) or not all(axis in mesh for axis in layout.axes):
        why = f"the mesh is {mesh}" if summed else "of partial values, only sums and means can be state"
        what = f"{name!r} of shape {list(shape)} cannot lie as {layout}: {why}"
        raise CheckpointError(f"{what}\n  try       a layout with one entry for each dim, over axes of the mesh")
    return tuple(int(n) for n in shape)


def summands(layout: Layout, shape: Dims, mesh: Mesh) -> tuple[Layout, Dims]:
    """How a partial tensor is saved: with a first dim, split over the axes of the sum, that has a place for each
    summand."""
    axes = tuple(axis for axis, _ in layout.partial)
    return Layout((axes, *layout.dims)), (mesh.count(axes), *shape)


def held(shape: Dims, layout: Layout, mesh: Mesh, rank: int) -> Box:
    """What a rank holds of a tensor, padding apart."""
    at = mesh.coordinates(rank)
    spans = (extent(n, axes, mesh, at) for n, axes in zip(shape, layout.dims, strict=True))
    return tuple((start, start + valid) if valid else (0, 0) for start, valid in spans)


def stored(shape: Dims, layout: Layout, mesh: Mesh) -> Dims:
    """The shape of every rank's part, padding included."""
    return tuple(part(n, axes, mesh) for n, axes in zip(shape, layout.dims, strict=True))


def whole(shape: Dims) -> Box:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def at(offset: Dims, shape: Dims) -> Box:
    """The box of a shape that starts at an offset."""
    return tuple((start, start + n) for start, n in zip(offset, shape, strict=True))


def extents(box: Box) -> Dims:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share, if anything."""
    both = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that holds `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


@functools.lru_cache(maxsize=32)
def chosen(
    mesh: Mesh, rank: int, items: tuple[Item, ...], there: tuple[frozenset[int] | None, ...] = ()
) -> frozenset[int]:
    """Which of the items a rank saves its part of: each part is saved by one of its holders, and all have about the
    same to save.  `there`: of items that some ranks alone have anything of, these."""
    load = [0] * mesh.world
    mine = []
    for i in sorted(range(len(items)), key=lambda i: -math.prod(items[i][1]) * items[i][2]):
        ranks = there[i] if there else None
        for holders, part_bytes in _parts(mesh, *items[i]):
            saver = min((r for r in holders if ranks is None or r in ranks), key=load.__getitem__)
            load[saver] += part_bytes
            if saver == rank:
                mine.append(i)
    return frozenset(mine)


@functools.lru_cache(maxsize=1024)
def _parts(mesh: Mesh, layout: Layout, shape: Dims, item_bytes: int) -> list[tuple[tuple[int, ...], int]]:
    """The parts of a tensor that are not empty: who holds each, and its bytes."""
    others = tuple(axis for axis in mesh.axes if axis not in layout.axes)
    sized = (
        (holders, math.prod(extents(held(shape, layout, mesh, holders[0]))) * item_bytes)
        for holders in _groups(mesh, others)
    )
    return [(holders, n) for holders, n in sized if n]


@functools.lru_cache(maxsize=64)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    return [tuple(group) for group in mesh.groups(axes)]
