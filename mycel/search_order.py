"""In which order a search looks at plans, and which it leaves out.

Of small programs all plans.  Of others meshes first, with the ZeRO level that holds least; then lower levels for the
better ones; then the neighbours of the best (`search_space.py`), each only where what it waits for or computes again
leaves room.  From each number of stages that could be the fastest, other schedules, levels of ZeRO and microbatches are
tried one after the other; from the best pipeline other stages, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mycel.candidates import Candidate
from mycel.errors import PlanError
from mycel.ir import Mesh, Program
from mycel.plan.cluster import Cluster
from mycel.plan.places import REST
from mycel.plan.towers import Tower
from mycel.search_given import Given
from mycel.search_space import AXES, LEVELS, SearchSpace, Shape, moved_ranks, on_ranks_of_their_own, shares

WORSE = 1.02  # a direction that is slower by this is left: more tp (where twice in turn), lower levels of ZeRO
MUCH_WORSE = 1.2  # more tp is left at once
GAIN = 0.03  # the share of a step that a neighbour must be able to save to be looked at
FULL = 0.8  # of the memory: what is computed again is so for want of it
ROUNDS = 3  # of neighbours of neighbours
RUNNERS_UP = 2  # that could be the best on other wires
EVERYTHING = 1200  # equations times plans up to which all are priced
NEARBY = 3000  # up to which all are priced that are one step from the best

Way = Callable[[Shape], Iterator[Shape]]  # plans that differ from one in this


class Pricing(Protocol):
    """What is asked of a search."""

    candidates: dict[Shape, Candidate]
    given: Given
    memory: int | None
    cluster: Cluster

    @property
    def program(self) -> Program: ...
    @property
    def space(self) -> SearchSpace: ...
    @property
    def bound(self) -> float: ...
    @property
    def is_shallow(self) -> bool: ...
    @property
    def towers(self) -> tuple[Tower, ...]: ...
    @property
    def kinds(self) -> Mapping[str, int]: ...
    def held(self, shape: Shape) -> float: ...
    def ready_parameters(self, shape: Shape) -> Mapping[str, Any]: ...


class SearchOrder:
    """Of one search: each plan is priced before the next is asked for."""

    def __init__(self, search: Pricing) -> None:
        self.search, self.given, self.space = search, search.given, search.space
        self.memory = search.memory or float("inf")
        self.replicas = search.given.replicas(search.cluster)
        self.sync = str(search.given.sync) if self.replicas > 1 else ""

    def __iter__(self) -> Iterator[Shape]:
        looked_at = self._in_places() if self.given.place else self._staged() if self.given.pp > 1 else self._all()
        return (self.given.applied(shape) for shape in looked_at if self._holds(shape))

    def _all(self) -> Iterator[Shape]:
        meshes = list(self.meshes())
        if not meshes:
            self._refuse()
        everything = list(self._everything([*meshes, *self._staged_meshes()]))
        if len(everything) * sum(len(b.eqns) for b in self.search.program.blocks.values()) <= EVERYTHING:
            yield from everything
            if not self._fitting():
                yield from itertools.chain(*map(self._until_it_fits, meshes))
        else:
            yield from self._promising(meshes)
        if self.given.may_place:
            yield from self._placed()
        if self.given.mesh is None:
            yield from self._neighbours()
            yield from self._nearby()
        else:
            if self.fastest() == float("inf") and not self.given.on_device:
                yield from self._offloaded(self._best().shape)
            yield from self._held_whole(self._best())
            yield from self._encoded()
        best = self._best().shape
        if best.tp > 1 and not best.place and self.search.ready_parameters(best):
            # layouts were compared by prices that leave out what is begun early
            yield replace(best, ready=True)
        if self._best().exposed > GAIN * self._best().seconds and not self.search.is_shallow:
            yield from self._as_ready(meshes)

    def _as_ready(self, meshes: list[Shape]) -> Iterator[Shape]:
        """Parameters over tp as ready plans have them, whole where these know none: what is computed twice may cost
        less than messages."""
        for mesh in meshes:
            levels = self.given.zeros if mesh.shards > 1 else self.given.zeros[:1]
            before = float("inf")
            for zero in [level for level in levels if level != 2] if mesh.tp > 1 and mesh.cp == 1 else ():
                shape = replace(mesh, zero=zero, microbatches=self._counts(mesh)[0], ready=True)
                yield shape
                seconds = self._priced(shape).seconds
                if before < seconds < float("inf"):
                    break
                before = seconds

    def _everything(self, meshes: list[Shape]) -> Iterator[Shape]:
        """Meshes on all wires, with all levels of ZeRO and codecs, in one microbatch or two; stages in any number."""
        space, is_free = self.space, self.given.mesh is None
        for mesh in meshes:
            levels = self.given.zeros
            for zero in levels if mesh.shards > 1 else levels[:1]:
                first = replace(mesh, zero=zero)
                others = (*space.orders(first), *space.hybrids(first)) if is_free else ()
                counts = self._counts(mesh)
                for shape, count in itertools.product((first, *others), counts if mesh.pp > 1 else counts[:2]):
                    if zero != 2 or count > 1:  # a gradient is there once: level 2 is level 1
                        yield replace(shape, microbatches=count)
                        yield from self._with_codecs(replace(shape, microbatches=count))

    def _with_codecs(self, shape: Shape) -> Iterator[Shape]:
        """Its gradients encoded in each way that may be picked."""
        if self.given.may_encode(shape) and not self.given.is_compressed and shape.pp == 1:
            yield from (self.given.encoded(shape, codec) for codec in self.given.codecs)

    def _promising(self, meshes: list[Shape]) -> Iterator[Shape]:
        yield from self._sizes(meshes)
        yield from self._levels()
        if self.given.microbatches is None:  # fewer values computed again
            for shape in [c.shape for c in self._fitting() if c.again and c.seconds == self.fastest()]:
                more = [n for n in self.space.microbatches(shape) if n > shape.microbatches][:1]
                yield from (replace(shape, microbatches=n) for n in more)

    # -- what was priced

    def _priced(self, shape: Shape) -> Candidate:
        return self.search.candidates[self.given.applied(shape)]

    def _fitting(self) -> list[Candidate]:
        return sorted((c for c in self.search.candidates.values() if c.fits), key=lambda c: c.seconds)

    def _best(self) -> Candidate:
        """The fastest; where none fits, what holds least."""
        return min(self.search.candidates.values(), key=lambda c: (c.seconds, self.search.held(c.shape)))

    def fastest(self) -> float:
        return min((c.seconds for c in self.search.candidates.values()), default=float("inf"))

    # -- meshes

    def meshes(self) -> Iterator[Shape]:
        """Without ZeRO and microbatches, small tp first."""
        fixed, world = self.given.mesh, self.space.world
        if fixed is None:
            named = self.given.axes | ({"fsdp"} if self.sync else set())  # the batch inside a replica
            there = (replace(shape, sync=self.sync) for shape in self.space.meshes(named))
            yield from (shape for shape in there if self._may_be(shape))
            return
        if (count := Mesh(fixed).world * self.given.pp) != world:
            stages = f" in each of {self.given.pp} stages" if self.given.pp > 1 else ""
            raise PlanError(
                f"the mesh has {Mesh(fixed).world} devices{stages}, the cluster {world}\n  the mesh  {Mesh(fixed)}"
                f"\n  try       a mesh of {world // self.given.pp}, or --cluster with {count} devices"
            )
        sizes: dict[str, Any] = dict(fixed)
        shape = Shape(**sizes, pp=self.given.pp, microbatches=self.given.pp)
        order = tuple(a for a, n in fixed.items() if n > 1)
        shape = shape if order == shape.default_order else replace(shape, order=order)
        shape = replace(shape, sync=self.sync)
        if self.space.has(shape) and self._may_be(shape):
            yield shape

    def _staged_meshes(self) -> Iterator[Shape]:
        """Of pipelines, with each schedule, where nothing says how many stages there are, or of which ranks."""
        if self.given.stages is None and self.given.mesh is None:
            yield from filter(self._may_be, self.space.staged(self.given.axes, self.given.schedules))

    def _may_be(self, shape: Shape) -> bool:
        """Has a mesh what is given, and can its batch be cut as that says?"""
        return self._holds(shape) and bool(self._counts(shape))

    def _holds(self, shape: Shape) -> bool:
        """Has a plan what is given, with as many replicas, whose ranks lie together?"""
        if self.sync and (shape.dp != self.replicas or shape.pp > 1 or next(iter(shape.sizes)) != "dp"):
            return False
        return self.given.holds(shape)

    def _sizes(self, meshes: list[Shape]) -> Iterator[Shape]:
        """More cp and then more tp as long as that helps, with microbatches as memory asks for them."""
        tp = 0  # the largest looked at
        worse = 0  # sizes of tp, one after the other, that were slower than smaller ones
        split_length = True  # did splitting the sequence help, the last time it was tried?
        for tp in dict.fromkeys(mesh.tp for mesh in meshes):
            before, fastest = self.fastest(), float("inf")
            cp = 0  # of the fastest
            for mesh in (m for m in meshes if m.tp == tp):
                if mesh.cp > 1 and not split_length and fastest < float("inf"):
                    break
                shape = mesh
                for shape in self._until_it_fits(mesh):
                    yield shape
                seconds = self._priced(shape).seconds
                if mesh.cp > 1:
                    split_length = seconds < fastest
                if seconds > fastest and mesh.cp > cp:
                    break
                if seconds < fastest:
                    fastest, cp = seconds, mesh.cp
            worse = worse + 1 if fastest > before * WORSE else 0
            if worse == 2 or MUCH_WORSE * before < fastest < float("inf"):
                break
        # tp alone, inside a host: it sends no gradients, so it may win where both of them lose
        for mesh in meshes:
            if tp < mesh.tp == self.space.world <= self.search.cluster.devices:
                yield from self._until_it_fits(mesh)

    def _until_it_fits(self, mesh: Shape) -> Iterator[Shape]:
        """With more and more microbatches."""
        for count in self._counts(mesh):
            shape = replace(mesh, zero=self._level(mesh), microbatches=count)
            yield shape
            if self._priced(shape).fits or self.search.held(shape) > self.memory:
                break

    def _level(self, mesh: Shape) -> int:
        """Of ZeRO, to begin with."""
        zeros = self.given.zeros
        return max(zeros) if mesh.shards > 1 or len(zeros) == 1 else 0

    def _counts(self, mesh: Shape) -> list[int]:
        counts = [self.given.microbatches] if self.given.microbatches else self.space.microbatches(mesh)
        return [n for n in counts if n % (self.given.at_once or 1) == 0 and n >= mesh.pp]

    def _levels(self) -> Iterator[Shape]:
        """For the fastest, and those that fewer messages could make so, all levels of ZeRO, as long as that helps."""
        helped = True  # did a lower level help, where it was tried?
        limit = self.fastest() * WORSE
        # gathering parameters is a third of what level 3 sends, and more of its messages
        near = [c for c in self._fitting() if c.seconds - c.exposed / 2 <= limit and c.shape.shards > 1]
        for shape in [c.shape for c in near[: RUNNERS_UP + 1]]:
            if not helped:
                break
            levels = sorted(self.given.zeros, reverse=True) if shape.shards > 1 else []
            first = before = self._priced(shape).seconds
            for zero in levels:
                # without microbatches a gradient is there once: level 2 is level 1
                if zero == shape.zero or (zero == 2 and shape.microbatches == 1):
                    continue
                yield replace(shape, zero=zero)
                seconds = self._priced(replace(shape, zero=zero)).seconds
                if seconds > before * WORSE:
                    break  # a lower level waits longer for the same, or does not fit
                before = min(before, seconds)
            helped = before < first

    # -- neighbours

    def _neighbours(self) -> Iterator[Shape]:
        """Of the best, those that could save what it waits for or computes again; and of what is better then."""
        space, search = self.space, self.search
        for _ in range(ROUNDS):
            best = self._best()
            if best.shape.place or (best.shape.offload and search.is_shallow):
                return  # what moves is told from all layers: of a deep model one such plan is enough
            shape, least = best.shape, GAIN * best.seconds
            groups: list[Iterator[Shape]] = []
            if best.fits and best.exposed > least:
                if self.sending(best) > least:
                    groups += [space.orders(shape)] if self._could_change_places(best) else []
                    groups += [space.hybrids(shape)]
                    groups += [space.orders(c.shape) for c in self._runners_up(best)]
                if self.sending(best, "tp") > least:
                    groups += [space.planes(shape)]
                groups += [space.with_experts(shape), space.woven(shape, self.given.microbatches)]
                groups += [self._held_whole(best)]
            is_full = search.memory is not None and best.peak > FULL * search.memory
            if not best.fits or (is_full and best.again > least):
                groups += [space.with_experts(shape)]
            for each in itertools.chain(*groups):
                if each not in search.candidates and search.held(each) <= self.memory:
                    yield each
            if not best.fits or best.exposed > least or (is_full and best.again > least):
                yield from self._pipelines(shape)
            # of a deep model only if nothing fits
            is_wanted = is_full and best.again > least and best.shape.pp == 1 and not search.is_shallow
            if (self.fastest() == float("inf") or is_wanted) and not self.given.on_device:
                yield from self._offloaded(shape)
            yield from self._encoded()
            if self.fastest() >= best.seconds:
                return

    def _nearby(self) -> Iterator[Shape]:
        """Of a small program every plan one step from the best, until none is better; not of a deep model, whose few
        equations stand for many."""
        search, parts = self.search, self.given.microbatches
        if search.is_shallow:
            return
        eqns = sum(len(b.eqns) for b in search.program.blocks.values())
        fastest = float("inf")
        while self.fastest() < fastest:
            best, fastest = self._best(), self.fastest()
            if best.shape.place:
                return
            meshes = map(self._allowed, self.space.nearby(best.shape, parts))
            for each in itertools.chain(self._on_its_mesh(best.shape), meshes):
                if len(search.candidates) * eqns > NEARBY:
                    return
                if self._is_new(each):
                    yield each

    def _on_its_mesh(self, shape: Shape) -> Iterator[Shape]:
        """Other levels of ZeRO and numbers of microbatches, and schedules of stages."""
        counts = [shape, *(x for x in self.space.other_microbatches(shape) if x.microbatches in self._counts(x))]
        for each in counts:
            yield from (each, *self._other_levels(each))
        yield from self._other_schedules(shape)

    def _other_levels(self, shape: Shape) -> Iterator[Shape]:
        """Of ZeRO; without microbatches a gradient is there once: level 2 is level 1."""
        for zero in self.given.zeros if shape.shards > 1 else ():
            if zero != shape.zero and (zero != 2 or shape.microbatches > 1):
                yield replace(shape, zero=zero)

    def _other_schedules(self, shape: Shape) -> Iterator[Shape]:
        for schedule in self.given.schedules if shape.pp > 1 else ():
            each = replace(shape, schedule=schedule)
            if schedule != shape.schedule and self.space.has(each):
                yield each

    def _allowed(self, shape: Shape) -> Shape:
        """With a level of ZeRO and a schedule that may be."""
        zeros, schedules = self.given.zeros, self.given.schedules
        shape = shape if shape.zero in zeros else replace(shape, zero=zeros[0])
        is_level_1 = shape.zero == 2 and shape.microbatches == 1 and 1 in zeros
        shape = replace(shape, zero=1) if is_level_1 else shape
        return shape if shape.pp == 1 or shape.schedule in schedules else replace(shape, schedule=schedules[0])

    def _is_new(self, shape: Shape) -> bool:
        """Was a plan not priced, and may it fit?"""
        return self.given.applied(shape) not in self.search.candidates and self._may_fit(shape)

    def _may_fit(self, shape: Shape) -> bool:
        return self._holds(shape) and self.search.held(shape) <= self.memory

    def _offloaded(self, shape: Shape) -> Iterator[Shape]:
        """With values on the host; where nothing fits, in more and more microbatches."""
        for count in [n for n in self._counts(shape) if n >= shape.microbatches]:
            moved = replace(shape, offload=True, microbatches=count)
            yield moved
            if self.fastest() < float("inf") or self.search.held(moved) > self.memory:
                break

    def _held_whole(self, best: Candidate) -> Iterator[Shape]:
        """Of ZeRO 3: kinds of parameters that are not gathered, as many as there is memory for; small ones first, whose
        messages take longest for what they bring."""
        shape = best.shape
        if shape.zero != 3 or shape.levels or self.given.zeros != LEVELS or self.search.memory is None:
            return
        if not best.fits or best.exposed < GAIN * best.seconds:
            return
        kinds, most = self.search.kinds, self.search.held(shape) + self.search.memory - best.peak
        ordered = sorted(kinds, key=lambda pattern: kinds[pattern])
        fitting = [n for n in range(1, len(kinds)) if self.search.held(_at_level_1(shape, ordered[:n])) <= most]
        for n in dict.fromkeys((max(fitting, default=0), len(fitting) // 2)):
            if n:
                yield _at_level_1(shape, ordered[:n])

    def _runners_up(self, best: Candidate) -> list[Candidate]:
        """Plans on two axes that would be faster than the best if they waited for nothing."""
        others = (c for c in self._fitting() if c is not best and len(c.shape.sizes) == 2 and not c.shape.order)
        fast = [c for c in others if c.seconds - c.exposed < best.seconds and self._could_change_places(c)]
        return list({c.shape.mesh: c for c in reversed(fast)}.values())[-RUNNERS_UP:]

    def _encoded(self) -> Iterator[Shape]:
        """Gradients encoded on the slowest wire, where that may be."""
        for candidate in self.worth_encoding():
            yield from self._with_codecs(candidate.shape)

    def worth_encoding(self) -> list[Candidate]:
        """Plans that wait for gradients, and would be the fastest if these took no time; those first that split the
        batch into most parts."""
        fastest = self.fastest()
        waiting = [
            c for c in self._fitting()
            if c.shape.pp == 1 and not c.shape.compress and not c.shape.place and c.shape.replicas > 1
            and min(c.exposed, self.sending(c)) > GAIN * c.seconds and c.seconds - c.exposed < fastest * (1 - GAIN)
        ]  # fmt: skip
        waiting = list({c.shape.mesh: c for c in reversed(waiting)}.values())  # of each mesh the fastest
        return sorted(waiting, key=lambda c: (-c.shape.replicas, c.seconds))[:RUNNERS_UP]

    def _pipelines(self, shape: Shape) -> Iterator[Shape]:
        """Stages beside a plan, few first, as long as these get faster; and what is beside the best of them."""
        search, given = self.search, self.given
        if given.stages is not None or shape.pp > 1:
            return
        seed = replace(shape, compress="", schedule=given.schedules[0])
        for each in self.space.pipelines(seed, given.microbatches):
            fastest = float("inf")
            for staged in each:
                bubbles = 1 + (staged.pp - 1) / (2 * staged.microbatches)  # of interleaved stages
                if search.bound * bubbles > self.fastest() or not self._holds(staged):
                    continue
                tried = yield from self._climbed(self._first_level(staged, shape.zero), self._ways)
                seconds = min((c.seconds for c in tried), default=float("inf"))
                if fastest < float("inf") and seconds > fastest * WORSE:
                    break
                fastest = min(fastest, seconds)
        yield from self._beside_pipeline()

    def _first_level(self, staged: Shape, most: int) -> Shape:
        """The lowest level of ZeRO, but for 0, that may fit: it sends as little as that, and holds less."""
        levels = [zero for zero in self.given.zeros if staged.shards > 1 and 0 < zero <= max(most, 1)]
        leveled = [replace(staged, zero=zero) for zero in levels or self.given.zeros[:1]]
        return next((each for each in leveled if self.search.held(each) <= FULL * self.memory), leveled[-1])

    @property
    def _ways(self) -> list[Way]:
        """In which pipelines of as many stages differ, those first that cost least to look at."""
        ways: list[Way] = [self._other_schedules, self._other_levels]
        return [*ways, *([self.space.other_microbatches] if self.given.microbatches is None else [])]

    def _beside_pipeline(self) -> Iterator[Shape]:
        """What is beside the best pipeline, among it other numbers of stages."""
        best, ways = self._best_pipeline(), self._ways
        if self.given.stages is None:
            ways.append(functools.partial(self.space.other_stages, parts=self.given.microbatches))
        if best is not None:
            yield from self._climbed(best.shape, ways)

    def _climbed(self, shape: Shape, ways: Sequence[Way]) -> Generator[Shape, None, list[Candidate]]:
        """Plans that differ from one in one way after the other, each from the best of those before, until none is
        better, or that one would not be the fastest if it were half as far above the bound."""
        tried, before = list[Candidate](), float("inf")
        if self._may_fit(shape):
            yield shape
            tried.append(self._priced(shape))
        while tried and (best := min(tried, key=lambda c: c.seconds)).seconds < before:
            before = best.seconds
            for way in ways:
                best = min(tried, key=lambda c: c.seconds)
                if (best.seconds + self.search.bound) / 2 > self.fastest():
                    return tried
                for each in filter(self._may_fit, map(self._allowed, way(best.shape))):
                    yield each
                    tried.append(self._priced(each))
        return tried

    def _best_pipeline(self) -> Candidate | None:
        return next((c for c in self._fitting() if c.shape.pp > 1), None)

    # -- sub-models on meshes of their own

    def _in_places(self) -> Iterator[Shape]:
        """As it is given, with all levels of ZeRO that are not."""
        given, count = self.given, self.given.microbatches or 1
        shape = Shape(place=given.place, microbatches=count, schedule=given.schedule or "1f1b")
        if shape.world != self.space.world:
            raise PlanError(
                f"place: {shape.world} ranks, the cluster has {self.space.world}\n"
                f"  the ranks {shape}\n  try       --cluster with {shape.world} devices"
            )
        levels = given.zeros
        for zero in levels if any(p.mesh.sizes().get("dp", 1) > 1 for p in given.place) else levels[:1]:
            if zero != 2 or count > 1:
                yield replace(shape, zero=zero)

    def _placed(self) -> Iterator[Shape]:
        """Sub-models that wait for none of the others beside each other, first on ranks by the size of their
        parameters, then on one more or less as long as that is faster; where the best plan waits for messages, or does
        not fit."""
        best, world = self._best(), self.space.world
        waits = not best.fits or best.exposed > GAIN * best.seconds
        if not (waits or self.given.tries_places) or best.seconds <= self.search.bound * (1 + GAIN):
            return
        groups = [(t.modules, t.elements) for t in self.search.towers]
        while len(groups) > max(world, 1):  # the two smallest share ranks
            (a, n), (b, m), *others = sorted(groups, key=lambda x: x[1])
            groups = [((*a, *b), n + m), *others]
        if len(groups) < 2:
            return
        modules = [*(names for names, _ in groups[:-1]), (REST,)]  # the largest, and what is of no tower
        counts = shares([n for _, n in groups], world)
        for _ in range(ROUNDS):
            before = self.fastest_placed()
            for each in (counts, *moved_ranks(counts)):
                yield from self._on_so_many(modules, each)
            if self.fastest_placed() >= before:
                return
            fastest = next(c for c in self._fitting() if c.shape.place)
            if fastest.seconds - fastest.exposed - fastest.bubble > self.fastest() * WORSE:
                return  # what it waits for is not what it loses by
            counts = [len(p.ranks) for p in fastest.shape.place]

    def fastest_placed(self) -> float:
        return min((c.seconds for c in self._fitting() if c.shape.place), default=float("inf"))

    def _on_so_many(self, modules: Sequence[tuple[str, ...]], counts: Sequence[int]) -> Iterator[Shape]:
        """Groups of modules on so many ranks each, with parameters split over these where they do not fit whole."""
        place = on_ranks_of_their_own(modules, counts)
        shape = Shape(place=place, microbatches=self.given.microbatches or 1, zero=self.given.zeros[0])
        yield shape
        if self.given.zeros == LEVELS and not self._priced(shape).fits:
            yield replace(shape, zero=3)

    def _staged(self) -> Iterator[Shape]:
        """As many stages as are given: all meshes of the ranks of one, most tp last; of the best other numbers of
        microbatches and schedules."""
        pp, schedule = self.given.pp, self.given.schedules[0]
        space = self.space
        if space.world % pp:
            raise PlanError(
                f"{pp} stages on {space.world} devices\n  try       a number of stages that divides {space.world}"
            )
        if (count := self.given.microbatches) and count < pp:
            raise PlanError(
                f"{pp} stages want as many microbatches or more, a step has {count}\n"
                f"  try       microbatches: {pp} (train.accumulate={pp}), or stages: {count}"
            )
        meshes = self.meshes() if self.given.mesh is not None else space.meshes(self.given.axes, pp)
        for mesh in filter(self._holds, (replace(mesh, pp=pp, schedule=schedule) for mesh in meshes)):
            zero = self.given.zeros[0] if len(self.given.zeros) == 1 else int(mesh.shards > 1)
            count = space.usual_count(mesh, self.given.microbatches)
            staged = replace(mesh, zero=zero, microbatches=count or 0)
            if count is not None and self._is_new(staged):
                yield staged
        if not self.search.candidates:
            self._refuse()
        yield from self._beside_pipeline()

    def _refuse(self) -> None:
        given, stages = self.given, f" in {self.given.pp} stages" if self.given.pp > 1 else ""
        axes = [axis for axis in AXES if axis in given.axes]
        named = f" with {', '.join(axes)}" if axes else ""
        batch = {"batch": given.passed_on["batch"]} if given.batch is not None else {}
        held = batch | ({"zero": f"{given.zeros[-1]} over {'.'.join(given.over)}"} if given.over else {})
        kept = "".join(f"  given     {name}: {said}\n" for name, said in held.items())
        raise PlanError(
            f"no mesh of {self.space.world} devices{stages}{named} divides a batch of {self.space.rows} rows\n{kept}"
            f"  try       a batch of {self.space.world} rows or more, or "
            + ("a mesh of other axes" if axes or held else "another mesh")
        )

    # -- wires

    def _could_change_places(self, candidate: Candidate) -> bool:
        """Would what goes over faster wires now take less time over the slowest than a rank waits?"""
        slowest = min(self.search.cluster.hardware.links(candidate.shape.mesh).named.values(), key=lambda x: x.bytes_s)
        faster = sum(n for name, n in candidate.sent.items() if name != slowest.name)
        return faster / slowest.bytes_s < candidate.exposed

    def sending(self, candidate: Candidate, axis: str | None = None) -> float:
        """Seconds of the messages over the wires of an axis; None: over the slowest."""
        links = self.search.cluster.hardware.links(candidate.shape.mesh)
        if axis is not None and axis not in links.named:
            return 0.0
        link = links.named[axis] if axis is not None else min(links.named.values(), key=lambda x: x.bytes_s)
        return candidate.sent.get(link.name, 0.0) / link.bytes_s


def _at_level_1(shape: Shape, patterns: Sequence[str]) -> Shape:
    """State is split, parameters are whole."""
    return replace(shape, levels=tuple((pattern, 1) for pattern in patterns))
