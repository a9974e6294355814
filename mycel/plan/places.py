"""Sub-models on ranks of their own: which equation of a training step belongs to which place.

    place: {vision_model: [0, 1], "*": [2, 3, 4]}                      modules by name or pattern -> ranks, all along dp
    place: {vision_model: [0, 1], "*": {ranks: 2..7, mesh: {dp: 3, tp: 2}}}        with a mesh of their own

Entries of the same ranks are one place; a parameter is in the first that has it, and in that of "*" if none has.
An equation is where the parameters are that it reads, and one that reads none where its latest operand was made (of
several, the last place).  What of a place waits for no other one can run at once with them, so a place is cut into
*stages* by how often values have crossed on their way there, its depth:

    depth(e) = max over staged operands v of  depth(v) + (is v made in another place?)          stage = (depth, place)

       ranks 0 1     vision tower, 0 ─────────┐                 stages 0 and 1 run at the same time, then stage 2,
       ranks 2 3 4   text tower, 0 ── loss, 1 ┘                 and backward the other way round
                     (stage 1)        (stage 2)

Values cross from a smaller depth to a larger one, so no two stages wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mycel.errors import PlanError
from mycel.ir import Mesh, Var
from mycel.plan.stages import StageMap, StepFlow, assigned, names_of_inputs

PLACE_AXIS = "place"  # of the mesh of all ranks: along it no tensor lies in parts
REST = "*"


@dataclass(frozen=True)
class Place:
    """Modules (names or patterns) on some ranks of the world, which are this mesh."""

    patterns: tuple[str, ...]
    ranks: tuple[int, ...]
    mesh: Mesh

    def has(self, parameter: str) -> bool:
        return any(
            parameter.startswith(f"{p}.") or fnmatchcase(parameter, p) or fnmatchcase(parameter, f"{p}.*")
            for p in self.patterns
            if p != REST
        )

    def data(self) -> Any:
        """The ranks as people write them."""
        sizes = {axis: n for axis, n in self.mesh.sizes().items() if n > 1}
        plain = sizes in ({"dp": len(self.ranks)}, {})
        return list(self.ranks) if plain else {"ranks": list(self.ranks), "mesh": self.mesh.sizes()}

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={n}" for axis, n in self.mesh.sizes().items() if n > 1)
        return f"{', '.join(self.patterns)} on {named_ranks(self.ranks)}{f' ({sizes})' if sizes else ''}"


def named_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def read_places(entry: Any) -> tuple[Place, ...]:
    """What a plan says; PlanError where ranks are missing or in two places."""
    if entry == "auto":
        raise PlanError(
            'place: auto is for a search\n  try       plan="auto", mycel plan, or for mycel train parallel.plan: auto'
        )
    if not isinstance(entry, Mapping) or len(entry) < 2:
        raise PlanError(
            f"place: {entry!r}\n"
            '  try       modules with the ranks they are on, all others by "*": {vision_model: [0, 1], "*": [2, 3]}'
        )
    places: list[Place] = []
    for pattern, value in entry.items():
        new = _read_place(str(pattern), value)
        at = next((i for i, p in enumerate(places) if (p.ranks, p.mesh) == (new.ranks, new.mesh)), None)
        if at is None:
            places.append(new)
        else:
            places[at] = Place((*places[at].patterns, *new.patterns), new.ranks, new.mesh)
    ranks = sorted(r for place in places for r in place.ranks)
    if len(places) < 2 or ranks != list(range(len(ranks))):
        raise PlanError(
            f"place: {'; '.join(map(str, places))}\n"
            f"  try       each rank from 0 to {max(ranks)} in one place, and two places or more"
        )
    return _with_all_axes(places)


def _read_place(pattern: str, value: Any) -> Place:
    known = isinstance(value, Mapping) and set(value) <= {"ranks", "mesh"}
    ranks = _read_ranks(value["ranks"] if known and "ranks" in value else value)
    if not ranks or (isinstance(value, Mapping) and not known):
        raise PlanError(
            f"place: {pattern}: {value!r}\n"
            "  try       ranks, as in [0, 1] or 2..7; or {ranks: 2..7, mesh: {dp: 3, tp: 2}}"
        )
    mesh = Mesh(value.get("mesh") or {"dp": len(ranks)}) if known else Mesh(dp=len(ranks))
    if mesh.world != len(ranks):
        raise PlanError(
            f"place: {pattern}: {mesh} has {mesh.world} ranks, was given {len(ranks)}: {', '.join(map(str, ranks))}\n"
            f"  try       mesh: {{dp: {len(ranks)}}}"
        )
    return Place((pattern,), ranks, mesh)


def _read_ranks(value: Any) -> tuple[int, ...]:
    """[0, 1], 2..7, or [0, 2..7]; nothing where it is neither."""
    ranks: list[int] = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        first, dots, last = str(item).partition("..")
        if not first.strip().isdigit() or (dots and not last.strip().isdigit()):
            return ()
        ranks += range(int(first), int(last) + 1) if dots else [int(first)]
    return tuple(ranks)


def _with_all_axes(places: Sequence[Place]) -> tuple[Place, ...]:
    """Each mesh with the axes of all, of size one where it has them not: a layout is written once, and splits where
    there is something to split over."""
    axes = dict.fromkeys(axis for place in places for axis in place.mesh.axes)
    return tuple(
        Place(p.patterns, p.ranks, Mesh({**p.mesh.sizes(), **{a: 1 for a in axes if a not in p.mesh}})) for p in places
    )


def places_mesh(places: Sequence[Place]) -> Mesh:
    """Of the ranks of all places: one axis, on which no tensor lies in parts; others have their sizes in a place
    alone."""
    return Mesh({PLACE_AXIS: sum(len(p.ranks) for p in places), **dict.fromkeys(places[0].mesh.axes, 1)})


def place_of(places: Sequence[Place], parameter: str) -> int:
    """The first place that has a parameter, or the one for all others; PlanError where there is none."""
    rest = next((i for i, place in enumerate(places) if REST in place.patterns), None)
    at = next((i for i, place in enumerate(places) if place.has(parameter)), rest)
    if at is None:
        patterns = ", ".join(p for place in places for p in place.patterns)
        raise PlanError(f'place: {parameter} is in none of {patterns}\n  try       "*": ranks, for all others')
    return at


@dataclass(frozen=True)
class PlacedStages:
    """A step cut into stages, and the place of each."""

    stages: StageMap
    place: tuple[int, ...]


def placed_stages(flow: StepFlow, places: Sequence[Place]) -> PlacedStages:
    """The stages of a step whose parameters are in places; PlanError for a place that does nothing."""
    names, homes, depths = names_of_inputs(flow), dict[int, tuple[int, int]](), dict[Var, tuple[int, int]]()
    for i in flow.units:
        operands = [depths[v] for v in flow.behind(flow.block.eqns[i]) if v in depths]
        weights = _weights(flow, i, names, places)
        latest = max(operands, default=(0, len(places) - 1))[1]
        at = max(weights, key=lambda p: (weights[p], p)) if weights else latest
        depth = max((d + (p != at) for d, p in operands), default=0)
        homes[i] = depth, at
        depths.update(dict.fromkeys(flow.block.eqns[i].outputs, (depth, at)))
    there = {p for _, p in homes.values()}
    idle = next((place for i, place in enumerate(places) if i not in there), None)
    if idle is not None:
        known = sorted({name.split(".", 1)[0] for of_input in names.values() for name in of_input})
        raise PlanError(
            f"place: {', '.join(idle.patterns)}: no part of the step reads a parameter of it\n"
            f"  try       names of modules, such as {', '.join(known[:4])}"
        )
    order = sorted(set(homes.values()))
    number = {home: s for s, home in enumerate(order)}
    stages = assigned(flow, {i: number[home] for i, home in homes.items()}, len(order))
    return PlacedStages(stages, tuple(p for _, p in order))


def _weights(flow: StepFlow, unit: int, names: Mapping[Var, set[str]], places: Sequence[Place]) -> dict[int, int]:
    """Of the parameters that an equation reads: elements, by place."""
    found: dict[int, int] = {}
    for v in flow.behind(flow.block.eqns[unit]):
        for name in names.get(v, ()):
            at = place_of(places, name)
            found[at] = found.get(at, 0) + v.type.numel
    return found
