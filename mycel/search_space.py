"""The plans a search looks at: how many devices split what, and the steps from one such plan to its neighbours.

dp      the batch                               zero    over dp, or over fsdp where dp is split in two or ranks along
                                                        it have models of their own
fsdp    the batch, and what ZeRO splits         cp      the sequence
ep      the batch, and experts                  tp      parameters; with ty in two dims
pp      stages of a pipeline, each on a mesh of the rest
place   sub-models on meshes of their own, instead of all of these
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.plan.places import REST, Place, places_data, places_mesh, read_places
from mycel.plan.schedule import stages_a_rank
from mycel.plan.zero import zero_data

AXES = ("dp", "fsdp", "ep", "cp", "ty", "tp")  # of a mesh, the slowest first: tp inside a host
BATCH = ("dp", "fsdp", "ep")
TENSOR = 64  # the largest number of ranks a parameter is split over by tp
LEVELS = (0, 1, 2, 3)  # of ZeRO
MICROBATCHES = 64  # at most


@dataclass(frozen=True)
class Shape:
    """What a plan is before anything is decided: sizes of its axes, and what is not of the mesh.

    order     of the axes on the wires, the slowest first, where it is not that of `AXES`
    at_once   of the microbatches: two, of which one computes while the other waits for ranks
    compress  how gradients travel, along `along` or between the ranks that share no wire faster than the slowest
    levels    of ZeRO, of patterns of parameters that have another than `zero`
    sync      ranks along dp take steps of their own, and become one model so
    ready     parameters over tp lie as in the ready plan, not as is cheapest by their own prices
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    microbatches: int = 1
    fsdp: int = 1
    ep: int = 1
    ty: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    order: tuple[str, ...] = ()
    offload: bool = False
    compress: str = ""
    along: str = ""
    levels: tuple[tuple[str, int], ...] = ()
    place: tuple[Place, ...] = ()
    at_once: int = 1
    sync: str = ""
    ready: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes that split anything, as they lie on the wires; without stages."""
        return {name: n for name in self.order or AXES if (n := getattr(self, name)) > 1}

    @property
    def mesh(self) -> Mesh:
        """Of the ranks of one stage; of places, of all their ranks."""
        if self.place:
            return places_mesh(self.place)
        return Mesh(self.sizes or {"dp": 1})

    @property
    def world(self) -> int:
        return self.mesh.world * self.pp

    @property
    def replicas(self) -> int:
        """Parts of the batch."""
        return self.dp * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """Ranks that split the batch and could split what ZeRO does, beside those of experts."""
        return self.fsdp if self.fsdp > 1 or self.sync else self.dp

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of ZeRO."""
        if not self.zero or self.place:
            return ("dp",) if self.zero else ()
        batch = "fsdp" if self.fsdp > 1 or self.sync else "dp"
        return tuple(a for a in (batch, "ep") if getattr(self, a) > 1)

    @property
    def batch(self) -> list[str]:
        """How the batch lies, as a plan says it."""
        rows = ".".join(a for a in self.sizes if a in BATCH) or "-"
        return [rows, "cp"] if self.cp > 1 else [rows] if rows != "-" else []

    def data(self) -> dict[str, Any]:
        """What of a plan it says."""
        data: dict[str, Any] = {"mesh": self.mesh.sizes(), "batch": self.batch}
        if self.place:
            data = {"place": places_data(self.place), "batch": ["dp"]}
            data |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
        data |= {"zero": zero_data(self.zero, self.over, dict(self.levels))} if self.over else {}
        data |= {"microbatches": self.microbatches} if self.microbatches > 1 else {}
        data |= {"at_once": self.at_once} if self.at_once > 1 else {}
        if self.pp > 1:
            data |= {"stages": self.pp * stages_a_rank(self.schedule), "schedule": self.schedule}
        data |= {"offload": "auto"} if self.offload else {}
        data |= {"compress": self.codecs} if self.compress else {}
        data |= {"sync": {"dp": self.sync}} if self.sync else {}
        return data

    @property
    def codecs(self) -> dict[str, str]:
        """How gradients travel, by axis."""
        return {self.compressed: self.compress} if self.compress else {}

    @property
    def compressed(self) -> str:
        """The axis along which gradients are compressed: the slowest that splits the batch, or as it is said."""
        return self.along or next((a for a in self.sizes if a in BATCH), "dp")

    def __str__(self) -> str:
        axes = [f"pp={self.pp}"] if self.pp > 1 else []
        axes += [f"{name}={n}" for name, n in self.sizes.items()]
        said = ["; ".join(map(str, self.place)) or " ".join(axes) or "one device"]
        if self.order:
            said.append("the slowest axis first")
        if self.zero:
            others = f", for {len(self.levels)} kinds of parameters less" if self.levels else ""
            said.append(f"zero {self.zero}" + (" over fsdp" if self.fsdp > 1 else "") + others)
        said += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        said += [f"{self.at_once} at once"] if self.at_once > 1 else []
        said += [self.schedule] if self.pp > 1 or (self.place and self.schedule != "1f1b") else []
        said += ["offload"] if self.offload else []
        said += [f"{self.compress} along {self.compressed}"] if self.compress else []
        said += [f"{self.sync} along dp"] if self.sync else []
        said += ["parameters as in the ready plan"] if self.ready else []
        return ", ".join(said)

    @property
    def default_order(self) -> tuple[str, ...]:
        return tuple(name for name in AXES if getattr(self, name) > 1)


@dataclass(frozen=True)
class SearchSpace:
    """What there is to choose from: so many devices, of which each level of wires but the last joins as many as
    `groups` says; a batch of rows, whose second dim is `length` long; so many experts in a layer, and layers one behind
    the other."""

    world: int
    groups: tuple[int, ...]
    rows: int
    length: int
    experts: int = 1
    layers: int = 1

    def meshes(self, named: Collection[str] = (), pp: int = 1) -> Iterator[Shape]:
        """Of dp, cp, tp and the axes that are named, small tp first; of the ranks of one of `pp` stages."""
        world = self.world // pp
        for tp in divisors(world):
            for cp in divisors(world // tp):
                for ty, fsdp, ep in self._splits(world // tp // cp, [a in named for a in ("ty", "fsdp", "ep")]):
                    dp = world // (tp * cp * ty * fsdp * ep)
                    shape = Shape(dp, cp, tp, ty=ty, fsdp=fsdp, ep=ep, pp=pp, microbatches=pp)
                    if self.has(shape):
                        yield shape

    def staged(self, named: Collection[str], schedules: Sequence[str]) -> Iterator[Shape]:
        """All pipelines, few stages first."""
        for pp in divisors(self.world)[1:]:
            for shape, schedule in itertools.product(self.meshes(named, pp), schedules):
                if self.has(staged := replace(shape, schedule=schedule)):
                    yield staged

    def _splits(self, ranks: int, wanted: Sequence[bool]) -> Iterator[tuple[int, ...]]:
        """Sizes of axes that divide so many ranks; 1 for those that are not wanted."""
        for n in divisors(ranks) if wanted[0] else [1]:
            for others in self._splits(ranks // n, wanted[1:]) if wanted[1:] else [()]:
                yield (n, *others)

    def has(self, shape: Shape) -> bool:
        """Do batch and sequence have as many parts as it takes?"""
        return (
            shape.tp * shape.ty <= TENSOR
            and shape.replicas * shape.microbatches <= self.rows
            and (shape.cp == 1 or self.length % shape.cp == 0)
            and (shape.ep == 1 or self.experts % shape.ep == 0)
            and (shape.pp == 1 or shape.pp * stages_a_rank(shape.schedule) <= self.layers)
        )

    def microbatches(self, shape: Shape) -> list[int]:
        """Parts that a rank's rows can be cut into: powers of two, at least one for each stage."""
        rows, counts = self.rows // shape.replicas, [1]
        while rows % (2 * counts[-1]) == 0 and counts[-1] < MICROBATCHES:
            counts.append(2 * counts[-1])
        return [n for n in counts if n >= shape.pp]

    def usual_count(self, shape: Shape, parts: int | None = None) -> int | None:
        """Of microbatches, about four for each stage of a pipeline; `parts`: as many as are given."""
        counts = [n for n in self.microbatches(shape) if parts in (None, n)]
        return min(counts, key=lambda n: abs(n - 4 * shape.pp), default=None)

    # -- neighbours

    def orders(self, shape: Shape) -> Iterator[Shape]:
        """The same axes, others of them inside a host."""
        if {*self.groups} <= {self.world, 1} or not any(n % shape.mesh.world for n in self.groups):
            return
        default = shape.default_order
        for order in itertools.permutations(default):
            if order != (shape.order or default):
                yield replace(shape, order=() if order == default else order)

    def hybrids(self, shape: Shape) -> Iterator[Shape]:
        """ZeRO over the ranks of one host, or of a few; copies between them."""
        inner = [max(1, size // (shape.cp * shape.tp * shape.ty)) for size in self.groups]
        for count in dict.fromkeys((*inner, 4 * inner[-1])):
            if shape.zero and shape.fsdp == 1 and 1 < count < shape.dp and shape.dp % count == 0 and not shape.order:
                yield replace(shape, dp=shape.dp // count, fsdp=count)

    def planes(self, shape: Shape) -> Iterator[Shape]:
        """Parameters split in two dims."""
        for ty in divisors(shape.tp):
            if shape.ty == 1 and 1 < ty < shape.tp and ty * ty <= 4 * shape.tp and not shape.order:
                yield replace(shape, tp=shape.tp // ty, ty=ty)

    def with_experts(self, shape: Shape) -> Iterator[Shape]:
        """Experts over some of the ranks that split the batch, the sequence or parameters."""
        if self.experts == 1 or shape.order:
            return
        for axis in ("dp", "cp", "tp", "ty"):
            for n in divisors(count := getattr(shape, axis))[1:]:
                sizes: dict[str, Any] = {axis: count // n, "ep": shape.ep * n}
                candidate = replace(shape, **sizes)
                if self.has(candidate) and (candidate.ty == 1 or candidate.tp > 1):
                    yield candidate

    def woven(self, shape: Shape, parts: int | None = None) -> Iterator[Shape]:
        """Two microbatches at once, whose rows travel to experts while the other's compute; `parts`: as many of them as
        are given."""
        counts = [n for n in self.microbatches(shape) if n % 2 == 0 and n >= shape.microbatches]
        counts = counts if parts is None else [n for n in counts if n == parts]
        if counts and shape.ep > 1 and shape.pp == shape.at_once == 1 and not (shape.place or shape.offload):
            yield replace(shape, microbatches=counts[0], at_once=2)

    def nearby(self, shape: Shape, parts: int | None = None) -> Iterator[Shape]:
        """One step away: a factor of one axis in another, stages among them, two axes in each other's place, on any
        wires; or as it is on others."""
        lying = [a for a in AXES if (a != "ep" or self.experts > 1) and (a != "fsdp" or shape.zero)]
        axes = ["pp", *lying]
        for a, b in itertools.permutations(axes, 2):
            n, m = getattr(shape, a), getattr(shape, b)
            moved = [(n // k, m * k) for k in divisors(n)[1:]]
            for n_a, n_b in (*moved, *([(m, n)] if a < b and m != n else [])):
                sizes: dict[str, Any] = {a: n_a, b: n_b}
                each = self._filled(replace(shape, order=(), **sizes), shape, parts)
                if each is not None:
                    yield from (each, *self.orders(each))
        yield from self.orders(shape)

    def _filled(self, each: Shape, before: Shape, parts: int | None) -> Shape | None:
        """A mesh made of another, with what goes with it; None where there is no such plan."""
        if each.pp != before.pp:
            count = self.usual_count(each, parts) if each.pp > 1 else parts or 1
            each = replace(each, microbatches=count or 0, schedule=each.schedule if each.pp > 1 else Shape.schedule)
        each = each if each.shards > 1 else replace(each, zero=0)
        is_new = (each.fsdp == 1 or (each.zero and each.dp > 1)) and (each.ty == 1 or each.tp > 1)
        return each if is_new and each.microbatches and self.has(each) else None

    def pipelines(self, shape: Shape, parts: int | None = None) -> Iterator[list[Shape]]:
        """For each size of tp: stages, few first, on the ranks that are left."""
        for tp in dict.fromkeys((shape.tp * shape.ty, min(shape.tp, self.groups[-1]), 1)):
            plain = replace(shape, tp=tp, ty=1, fsdp=1, ep=1, zero=0, order=(), microbatches=1)
            candidates = []
            for pp in divisors(self.world // (tp * shape.cp))[1:]:
                inside = replace(plain, dp=self.world // (tp * shape.cp * pp), pp=pp)
                count = self.usual_count(inside, parts)
                if count is not None and self.has(staged := replace(inside, microbatches=count)):
                    candidates.append(staged)
            yield candidates

    def other_stages(self, shape: Shape, parts: int | None = None) -> Iterator[Shape]:
        """Fewer stages and more, by the least factor, on ranks of dp or tp."""
        for (a, b), axis in itertools.product((("pp", ""), ("", "pp")), ("dp", "tp")):
            a, b = a or axis, b or axis
            n, m = getattr(shape, a), getattr(shape, b)
            for factor in divisors(n)[1:2]:
                sizes: dict[str, Any] = {a: n // factor, b: m * factor}
                each = self._filled(replace(shape, order=(), **sizes), shape, parts)
                if each is not None and each.pp > 1:
                    yield each

    def other_microbatches(self, shape: Shape) -> Iterator[Shape]:
        """Half as many, and twice."""
        counts = self.microbatches(shape)
        for count in (shape.microbatches // 2, 2 * shape.microbatches):
            if count in counts:
                yield replace(shape, microbatches=count)


def on_ranks_of_their_own(groups: Sequence[tuple[str, ...]], counts: Sequence[int]) -> tuple[Place, ...]:
    """Groups of modules, by name or pattern, on so many ranks each, one behind the other."""
    first, entries = 0, dict[str, Any]()
    for modules, count in zip(groups, counts, strict=True):
        entries |= {name: list(range(first, first + count)) for name in modules}
        first += count
    return read_places(entries)


def any_plan(world: int, said: Mapping[str, Any], placed: bool = False, sizes: Mapping[str, int] | None = None) -> Plan:
    """Of so many ranks, on the mesh that is given: the program of one device depends on it only where regions are
    spread by hand; on what is `said` of how gradients and updates travel and of what is watched; and on whether
    sub-models have ranks of their own."""
    if placed:
        return Plan.read({"place": {"-": [0], REST: [f"1..{world - 1}"]}, **said})
    named = [axis for key in ("compress", "gather", "sync") for axis in said.get(key) or ()] or ["dp"]
    mesh = said.get("mesh") or (dict(sizes) if sizes and Mesh(sizes).world > 1 else _over(named, world))
    batch = [".".join(axis for axis in mesh if axis in named) or "-"]
    return Plan.read({**said, "mesh": mesh, "batch": batch})


def _over(axes: Sequence[str], ranks: int) -> dict[str, int]:
    """A mesh of so many ranks with several along each axis, where there are enough."""
    first, *others = (axis for axis in AXES if axis in axes)
    inside = next((n for n in divisors(ranks)[1:-1]), 1) if others else 1
    return {first: ranks // inside, **(_over(others, inside) if others else {})}


def shares(work: Sequence[float], ranks: int) -> list[int]:
    """Of so many ranks, at least one for each; each next one to who has most to do on each of its own."""
    counts = [1] * len(work)
    for _ in range(ranks - len(work)):
        counts[max(range(len(work)), key=lambda i: work[i] / counts[i])] += 1
    return counts


def moved_ranks(counts: Sequence[int]) -> Iterator[list[int]]:
    """With one rank of a place in another."""
    for i, j in itertools.permutations(range(len(counts)), 2):
        if counts[i] > 1:
            yield [n - (k == i) + (k == j) for k, n in enumerate(counts)]


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
