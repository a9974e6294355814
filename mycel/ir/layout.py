"""How a tensor lies on a mesh of devices.

    Mesh(dp=2, tp=4)          eight ranks in two named axes, the last one the fastest: rank = dp * 4 + tp
    f32[64@dp,4096]+tp        dim 0 in two parts over dp; a partial sum over tp: the value is the sum of what the
                              ranks of a tp row hold
    f32[64@tp.dp]             dim 0 over two axes, tp the slower

A dim is split from its slowest axis to its fastest, each time into parts of ceil(n / k) elements: the last parts may be
short or empty.  Every rank stores a full part; what lies behind its last valid element is padding, and means nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mycel.errors import PlanError
from mycel.ir.types import DTYPES, NAMES, Type

Axes = tuple[str, ...]

KINDS = {"+": "sum", ">": "maximum", "<": "minimum"}  # kinds of partial values
MEAN = "~"  # of what is held between steps: each rank has one of its own, and their mean stands for all
_AXIS = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TYPED = re.compile(r"((?:stack\()*)(\w+)\[([\w@.,]*)\]((?:[+<>~]\w+)*)(\)*)", re.ASCII)


class Mesh:
    """Named axes with their sizes, the first the slowest.  Immutable."""

    __slots__ = ("_sizes",)

    def __init__(self, axes: Mapping[str, int] | None = None, /, **more: int) -> None:
        sizes = {**(axes or {}), **more}
        for name, n in sizes.items():
            if not isinstance(name, str) or not _AXIS.fullmatch(name):
                raise PlanError(f"{name!r} is no name for an axis of a mesh\n  try       a word such as dp, tp, cp")
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise PlanError(f"axis {name} of the mesh has size {n!r}\n  try       a whole number, at least 1")
        self._sizes = dict(sizes)

    @property
    def axes(self) -> Axes:
        """Their names, the outermost first."""
        return tuple(self._sizes)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self._sizes.values())

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def __contains__(self, axis: object) -> bool:
        return axis in self._sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self._sizes.items()) == list(other._sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self._sizes.items())})"

    def sizes(self) -> dict[str, int]:
        """How many ranks there are along each axis."""
        return dict(self._sizes)

    def count(self, axes: Axes) -> int:
        """Ranks along some axes together."""
        return math.prod(self._sizes[a] for a in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is along each axis."""
        coordinates = {}
        for axis, n in reversed(self._sizes.items()):
            rank, coordinates[axis] = divmod(rank, n)
        return coordinates

    def index(self, rank: int, axes: Axes) -> int:
        """The place of a rank among those that differ from it along `axes` only, the first axis the slowest."""
        at, place = self.coordinates(rank), 0
        for axis in axes:
            place = place * self._sizes[axis] + at[axis]
        return place

    def group(self, rank: int, axes: Axes) -> list[int]:
        """The ranks that differ from this one along `axes` only, by their index."""
        return _groups(self, axes)[rank]

    def groups(self, axes: Axes) -> list[list[int]]:
        """All such groups, each once."""
        return [list(g) for g in dict.fromkeys(tuple(g) for g in _groups(self, axes))]


@functools.lru_cache(maxsize=4096)
def _groups(mesh: Mesh, axes: Axes) -> list[list[int]]:
    by_rest: dict[tuple[int, ...], list[int]] = {}
    rest = [tuple(n for a, n in mesh.coordinates(r).items() if a not in axes) for r in range(mesh.world)]
    for rank in sorted(range(mesh.world), key=lambda r: mesh.index(r, axes)):
        by_rest.setdefault(rest[rank], []).append(rank)
    return [by_rest[k] for k in rest]


@dataclass(frozen=True, slots=True)
class Layout:
    """For each dim of a tensor the axes it is split over, slowest first; and the axes over which it is partial, with
    the kind: + > <."""

    dims: tuple[Axes, ...] = ()
    partial: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def whole(ndim: int) -> Layout:
        """Every rank holds all of it."""
        return Layout(((),) * ndim)

    @property
    def is_whole(self) -> bool:
        return not self.partial and not any(self.dims)

    @property
    def axes(self) -> set[str]:
        """The axes it uses."""
        return {a for axes in self.dims for a in axes} | {a for a, _ in self.partial}

    @property
    def reduced(self) -> Layout:
        """The same after partial values are reduced."""
        return Layout(self.dims)

    def split(self, dim: int, axis: str) -> Layout:
        """The same with one more axis, the fastest, on a dim."""
        return Layout(tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(self.dims)), self.partial)

    def with_partial(self, axis: str, kind: str) -> Layout:
        return Layout(self.dims, tuple(sorted((*self.partial, (axis, kind)))))

    def without(self, axis: str) -> Layout:
        """The same where an axis has no part in it."""
        return Layout(
            tuple(tuple(a for a in axes if a != axis) for axes in self.dims),
            tuple(x for x in self.partial if x[0] != axis),
        )

    def counts(self, mesh: Mesh) -> tuple[int, ...]:
        """Parts of each dim."""
        return tuple(mesh.count(axes) for axes in self.dims)

    def local(self, type: Type, mesh: Mesh) -> Type:
        """The type of a rank's part."""
        shape = tuple(part(n, axes, mesh) for n, axes in zip(type.shape, self.dims, strict=True))
        return Type(type.dtype, shape, type.depth)

    def __str__(self) -> str:
        return "[" + ",".join(".".join(axes) or "-" for axes in self.dims) + "]" + _partial_text(self.partial)


def part(n: int, axes: Axes, mesh: Mesh) -> int:
    """How many elements of a dim of n a rank stores."""
    for axis in axes:
        n = -(-n // mesh[axis])
    return n


def is_even(n: int, axes: Axes, mesh: Mesh) -> bool:
    """Do the parts of a dim hold nothing but its elements?"""
    return n % mesh.count(axes) == 0


def extent(n: int, axes: Axes, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """(first element, how many) of the part of the rank with these coordinates; what it stores beyond that is
    padding."""
    start, valid, stored = 0, n, n
    for axis in axes:
        stored = -(-stored // mesh[axis])
        start += at[axis] * stored
        valid = min(max(valid - at[axis] * stored, 0), stored)
    return start, valid


def typed(type: Type, layout: Layout) -> str:
    """A type with its layout: f32[64@dp,4096]+tp"""
    dims = ",".join(
        f"{n}@{'.'.join(axes)}" if axes else str(n) for n, axes in zip(type.shape, layout.dims, strict=True)
    )
    return "stack(" * type.depth + f"{NAMES[type.dtype]}[{dims}]" + _partial_text(layout.partial) + ")" * type.depth


def parse_typed(text: str) -> tuple[Type, Layout]:
    """What `typed` wrote; ValueError if it did not."""
    match = _TYPED.fullmatch(text)
    if match is None or match[2] not in DTYPES or len(match[5]) * len("stack(") != len(match[1]):
        raise ValueError(f"{text!r} is no type with a layout")
    dims = [dim.partition("@") for dim in match[3].split(",")] if match[3] else []
    shape = tuple(int(n) for n, _, _ in dims)
    split = tuple(tuple(axes.split(".")) if axes else () for _, _, axes in dims)
    partial = tuple((part[1:], part[0]) for part in re.findall(r"[+<>~]\w+", match[4]))
    return Type(DTYPES[match[2]], shape, len(match[5])), Layout(split, partial)


def _partial_text(partial: Sequence[tuple[str, str]]) -> str:
    return "".join(kind + axis for axis, kind in partial)


def read_dims(entry: object, where: str) -> tuple[Axes, ...]:
    """The axes of each dim of a layout as people write it: "dp", None or "-", ("tp", "dp"), "tp.dp".  PlanError says
    what is wrong, and `where`."""
    if isinstance(entry, str):
        entry = [e.strip() for e in entry.strip("[] ").split(",")] if entry.strip("[] ") else []
    if not isinstance(entry, (list, tuple)):
        raise PlanError(
            f"{where}: {entry!r} is no layout\n  try       one entry for each dim, such as [dp, -, tp] or [tp.dp, -]"
        )
    dims = []
    for e in entry:
        words = [] if e in (None, "-", "") else e.split(".") if isinstance(e, str) else e
        if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) for w in words):
            raise PlanError(f"{where}: {e!r} names no axes\n  try       an axis, several as a.b, or - for none")
        dims.append(tuple(words))
    return tuple(dims)


def read_layout(entry: object, mesh: Mesh, where: str) -> Layout:
    """A layout as people write it, on a mesh that has its axes."""
    dims = read_dims(entry, where)
    seen: set[str] = set()
    for axis in (a for axes in dims for a in axes):
        if axis not in mesh:
            raise PlanError(
                f"{where}: there is no axis {axis!r}\n  the mesh  {mesh}\n"
                f"  try       one of {', '.join(mesh.axes) or 'none: the mesh has no axes'}"
            )
        if axis in seen:
            raise PlanError(
                f"{where}: axis {axis!r} is used twice in {entry}\n"
                "  try       each axis once: a device holds one part of a tensor"
            )
        seen.add(axis)
    return Layout(dims)
