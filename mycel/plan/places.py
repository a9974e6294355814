"""Sub-models on ranks of their own: which equation of a training step belongs to which place.

    place: {vision_model: [0, 1], "*": [2, 3, 4]}                      modules by name or pattern -> ranks, all along dp
    place: {vision_model: [0, 1], "*": {ranks: 2..7, mesh: {dp: 3, tp: 2}}}        with a mesh of their own
    place: {vision_model: {ranks: 0..3, stages: [vision_model, vision_model.layers.6]}, "*": [4, 5]}

Stages of a sub-model are named by the module each begins with, as those of a pipeline: each is a place, on as many of
the ranks, whose mesh is that of one stage.
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

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from mycel.errors import PlanError
from mycel.ir import Mesh, Var
from mycel.plan.stages import StageMap, StepFlow, assigned, names_of_inputs

PLACE_AXIS = "place"  # of the mesh of all ranks: along it no tensor lies in parts
REST = "*"
BESIDE_PLACES = {  # what is not for sub-models on meshes of their own, and why
    "stages": "a pipeline of all would cut across the meshes of sub-models",
    "gather": "parameters are gathered on the mesh of each sub-model, exactly",
    "send": "sub-models send each other pieces of tensors, exactly",
    "sync": "a replica is all of a model, and ranks along an axis of a place have a part of it",
}


@dataclass(frozen=True)
class Place:
    """Modules (names or patterns) on some ranks of the world, which are this mesh; of several stages of theirs, those
    from the module `begins` on, and `stage` says the how manieth that is."""

    patterns: tuple[str, ...]
    ranks: tuple[int, ...]
    mesh: Mesh
    begins: str = ""
    stage: int = 0

    def has(self, parameter: str) -> bool:
        return any(
            parameter.startswith(f"{p}.") or fnmatchcase(parameter, p) or fnmatchcase(parameter, f"{p}.*")
            for p in self.patterns
            if p != REST
        )

    def begins_at(self, parameter: str) -> bool:
        return parameter == self.begins or parameter.startswith(f"{self.begins}.")

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={n}" for axis, n in self.mesh.sizes().items() if n > 1)
        what = f"{', '.join(self.patterns)}{f' from {self.begins}' if self.begins else ''}"
        return f"{what} on {named_ranks(self.ranks)}{f' ({sizes})' if sizes else ''}"


def places_data(places: Sequence[Place]) -> dict[str, Any]:
    """As people write them."""
    data: dict[str, Any] = {}
    for i, place in enumerate(places):
        stages = _stages_from(places, i)
        if place.stage:
            continue
        ranks = [rank for each in stages for rank in each.ranks]
        sizes = {axis: n for axis, n in place.mesh.sizes().items() if n > 1}
        more: dict[str, Any] = {"stages": [each.begins for each in stages]} if len(stages) > 1 else {}
        more |= {} if sizes in ({"dp": len(place.ranks)}, {}) else {"mesh": place.mesh.sizes()}
        data |= dict.fromkeys(place.patterns, {"ranks": ranks, **more} if more else ranks)
    return data


def _stages_from(places: Sequence[Place], i: int) -> list[Place]:
    """A place, and those that are later stages of it."""
    later = itertools.takewhile(lambda place: place.stage > 0, places[i + 1 :])
    return [places[i], *later]


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
        stages = _read_stages(_read_place(str(pattern), value), value)
        at = next((i for i, p in enumerate(places) if replace(p, patterns=(str(pattern),)) == stages[0]), None)
        if at is None:
            places += stages
            continue
        for i in range(at, at + len(stages)):
            places[i] = replace(places[i], patterns=(*places[i].patterns, str(pattern)))
    ranks = sorted(r for place in places for r in place.ranks)
    if len(places) < 2 or ranks != list(range(len(ranks))):
        raise PlanError(
            f"place: {'; '.join(map(str, places))}\n"
            f"  try       each rank from 0 to {max(ranks)} in one place, and two places or more"
        )
    return _with_all_axes(places)


def _read_stages(place: Place, value: Any) -> list[Place]:
    """A place, or each of its stages on as many of its ranks."""
    names = value.get("stages") if isinstance(value, Mapping) else None
    if not names:
        return [place]
    pattern, count = place.patterns[0], len(place.ranks)
    if not isinstance(names, (list, tuple)) or len(names) < 2 or count % len(names):
        raise PlanError(
            f"place: {pattern}: stages: {names!r} on {count} ranks\n"
            "  try       the module each stage begins with, two or more, on as many ranks each: "
            f"[{pattern}, {pattern}.layers.6]"
        )
    each = count // len(names)
    parts = [place.ranks[i : i + each] for i in range(0, count, each)]
    return [
        Place((pattern,), ranks, place.mesh, str(n), i) for i, (n, ranks) in enumerate(zip(names, parts, strict=True))
    ]


def _read_place(pattern: str, value: Any) -> Place:
    """The mesh is that of one of its stages."""
    known = isinstance(value, Mapping) and set(value) <= {"ranks", "mesh", "stages"}
    ranks = _read_ranks(value["ranks"] if known and "ranks" in value else value)
    if not ranks or (isinstance(value, Mapping) and not known):
        raise PlanError(
            f"place: {pattern}: {value!r}\n"
            "  try       ranks, as in [0, 1] or 2..7; or {ranks: 2..7, mesh: {dp: 3, tp: 2}}"
        )
    stages = value.get("stages") if known else None
    count = (
        len(ranks) // len(stages) if isinstance(stages, (list, tuple)) and 0 < len(stages) <= len(ranks) else len(ranks)
    )
    mesh = Mesh(value.get("mesh") or {"dp": count}) if known else Mesh(dp=count)
    if mesh.world != count:
        raise PlanError(
            f"place: {pattern}: {mesh} has {mesh.world} ranks, was given {count}: {', '.join(map(str, ranks))}\n"
            f"  try       mesh: {{dp: {count}}}"
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
    return tuple(replace(p, mesh=Mesh({**p.mesh.sizes(), **{a: 1 for a in axes if a not in p.mesh}})) for p in places)


def refuse_beside_places(given: Mapping[str, Any]) -> None:
    """PlanError for what a plan with places also says, and cannot."""
    refused = next((name for name, is_given in given.items() if is_given), None)
    if refused is not None:
        hint = f"a plan without place, or without {refused}"
        if refused == "stages":
            hint = 'the stages of a place: "*": {ranks: 2..5, stages: [embed, layers.8]}'
        if refused == "sync":
            hint = "a plan without place, or sync: {dp: delayed}, under which all ranks have one model"
        raise PlanError(f"place: {refused}: {BESIDE_PLACES[refused]}\n  try       {hint}")


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
    names = names_of_inputs(flow)
    begun = {i: 0 for i, place in enumerate(places) if not place.stage}  # stages, by the first of them

    def place_at(unit: int, latest: int | None) -> int:
        weights = _weights(flow, unit, names, places)
        if not weights:
            return len(places) - 1 if latest is None else latest
        at = max(weights, key=lambda p: (weights[p], p))
        read = {name for v in flow.behind(flow.block.eqns[unit]) for name in names.get(v, ())}
        later = _stages_from(places, at)[begun[at] + 1 :]
        begun[at] += next((k for k, place in enumerate(later, 1) if any(map(place.begins_at, read))), 0)
        return at + begun[at]

    placed = by_depth(flow, place_at)
    idle = next((place for i, place in enumerate(places) if i not in placed.place), None)
    if idle is not None:
        known = sorted({name.split(".", 1)[0] for of_input in names.values() for name in of_input})
        what = (
            f"no part of it begins with {idle.begins}" if idle.stage else "no part of the step reads a parameter of it"
        )
        raise PlanError(
            f"place: {', '.join(idle.patterns)}: {what}\n  try       names of modules, such as {', '.join(known[:4])}"
        )
    return placed


def by_depth(flow: StepFlow, place_at: Callable[[int, int | None], int]) -> PlacedStages:
    """Stages by how often values have crossed on their way; `place_at`: the place of a unit, given that in which its
    latest operand was made."""
    homes, depths = dict[int, tuple[int, int]](), dict[Var, tuple[int, int]]()
    for i in flow.units:
        eqn = flow.block.eqns[i]
        operands = [depths[v] for v in flow.behind(eqn) if v in depths]
        at = place_at(i, max(operands)[1] if operands else None)
        homes[i] = max((d + (p != at) for d, p in operands), default=0), at
        depths.update(dict.fromkeys(eqn.outputs, homes[i]))
    order = sorted(set(homes.values()))
    number = {home: s for s, home in enumerate(order)}
    stages = assigned(flow, {i: number[home] for i, home in homes.items()}, len(order))
    return PlacedStages(stages, tuple(p for _, p in order))


def _weights(flow: StepFlow, unit: int, names: Mapping[Var, set[str]], places: Sequence[Place]) -> dict[int, int]:
    """Of the parameters that an equation reads: elements, by place."""
    elements: dict[int, int] = {}
    for v in flow.behind(flow.block.eqns[unit]):
        for name in names.get(v, ()):
            at = place_of(places, name)
            elements[at] = elements.get(at, 0) + v.type.numel
    return elements
