"""Schedules of a pipeline that no pattern gives: of stages that are no chain, without a backward pass, and searched by
the costs.

of_places       each place takes what can start first
forward_only    each microbatch goes on to the next stages while the one behind it is in these
searched        the shortest of several list schedules and of the named ones
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mycel.errors import PlanError
from mycel.plan.schedule import (
    BACKWARD,
    FORWARD,
    KINDS,
    NAMED,
    WEIGHT,
    PipelineSchedule,
    StageCosts,
    StageStep,
    StepGraph,
    interleaved,
    timeline,
)


def of_places(
    name: str, place: Sequence[int], microbatches: int, after: StepGraph, costs: StageCosts | None = None
) -> PipelineSchedule:
    """The list schedule of stages that wait for each other as `after` says, each place taking what can start first.
    gpipe: forward before backward; 1f1b: backward before forward, and no more microbatches begun than there are stages
    on the longest way down, which is enough to keep all of them busy; searched: by the costs, the shortest of both and
    of what lies between them, and of equals the one that holds least."""
    place, known = tuple(place), costs or StageCosts.equal(len(place))
    levels = _longest(after, len(place))

    def listed(forward_first: bool, begun: int) -> PipelineSchedule:
        limit = [begun * len(_of(place, p)) for p in range(len(set(place)))]
        return replace(_listed(place, microbatches, known, False, forward_first, limit, after), name=name)

    if name != "searched":
        return listed(name == "gpipe", microbatches if name == "gpipe" else levels)
    candidates = [listed(first, begun) for begun in {levels, levels + 1, microbatches} for first in (False, True)]
    return min(candidates, key=lambda s: (timeline(s, known).seconds, max(s.held(known.held))))


def forward_only(place: Sequence[int], ranks: int, microbatches: int, after: StepGraph) -> PipelineSchedule:
    """Of a program without a backward pass: each microbatch goes on to the next stages while the one behind it is in
    these."""
    levels = _levels(after, len(place))

    def wave(step: StageStep) -> tuple[int, int]:
        return levels[step.stage] + step.microbatch, step.stage

    steps = [StageStep(FORWARD, s, m) for s in range(len(place)) for m in range(microbatches)]
    orders = [tuple(sorted((s for s in steps if place[s.stage] == r), key=wave)) for r in range(ranks)]
    return PipelineSchedule("forward", microbatches, tuple(place), False, tuple(orders), after)


def _longest(after: StepGraph, stages: int) -> int:
    """Stages on the longest way that a microbatch goes forward."""
    return max(_levels(after, stages))


def _levels(after: StepGraph, stages: int) -> list[int]:
    """The how manieth each stage is on its way; they are in an order in which none waits for a later one."""
    levels: list[int] = []
    for s in range(stages):
        before = [levels[t] for kind, t in after.get((FORWARD, s), ()) if kind == FORWARD]
        levels.append(max(before, default=0) + 1)
    return levels


def searched(place: Sequence[int], microbatches: int, costs: StageCosts, room: float | None = None) -> PipelineSchedule:
    """The shortest of several list schedules and of the named ones for these stages on these ranks; `room`: what a rank
    may hold at once (microbatches, or as `costs.held` says)."""
    place, ranks = tuple(place), len(set(place))
    known = [make(ranks, microbatches) for make in NAMED.values()]
    known.append(interleaved(ranks, microbatches, len(place) // ranks))
    candidates = [s for s in known if s.place == place]
    for splits, forward_first, ahead in itertools.product((True, False), (False, True), (1, 2, None)):
        limit = [len(place) if ahead is None else ahead * (ranks - r) * (len(place) // ranks) for r in range(ranks)]
        candidates.append(_listed(place, microbatches, costs, splits, forward_first, limit))
    fitting = [s for s in candidates if room is None or max(s.held(costs.held)) <= room]
    if not fitting:
        least = min(max(s.held(costs.held)) for s in candidates)
        raise PlanError(
            f"no schedule fits: a rank has room for {room:g}, and needs {least:g}\n"
            "  try       more stages, smaller microbatches, or recompute: full"
        )
    best = min(fitting, key=lambda s: (timeline(s, costs).seconds, max(s.held(costs.held))))
    return replace(best, name="searched")


def _listed(
    place: tuple[int, ...],
    microbatches: int,
    costs: StageCosts,
    splits: bool,
    forward_first: bool,
    limit: Sequence[int],
    after: StepGraph | None = None,
) -> PipelineSchedule:
    """List scheduling: whichever rank can start first takes, of the steps that can start then, backward before forward
    (or the other way round), weights last; never more than `limit` microbatches in its stages at once."""
    ranks, stages = len(set(place)), len(place)
    kinds = KINDS if splits else (FORWARD, BACKWARD)
    empty = PipelineSchedule("listed", microbatches, place, splits, ((),) * ranks, after)
    orders: list[list[StageStep]] = [[] for _ in range(ranks)]
    free, inside = [0.0] * ranks, [0] * ranks
    end: dict[StageStep, float] = {}
    following = {(kind, s): 0 for kind in kinds for s in range(stages)}  # the next microbatch of each
    rank_of = {FORWARD: 0 if forward_first else 1, BACKWARD: 1 if forward_first else 0, WEIGHT: 2}

    def ready(step: StageStep) -> float | None:
        """When it could start; None: what it waits for has no time yet."""
        when = free[place[step.stage]]
        for a in empty.awaited(step):
            if a not in end:
                return None
            when = max(when, end[a] + (costs.message if place[a.stage] != place[step.stage] else 0.0))
        return when

    for _ in range(len(kinds) * stages * microbatches):
        choices = []
        for (kind, s), m in following.items():
            rank, step = place[s], StageStep(kind, s, m)
            full = inside[rank] >= limit[rank]
            # a full rank takes what is on its way already: a stage behind its first
            if m == microbatches or (kind == FORWARD and full and s == min(_of(place, rank))):
                continue
            when = ready(step)
            if when is not None:
                choices.append((when, rank_of[kind], m, -s if kind == FORWARD else s, step))
        _, _, _, _, step = min(choices)
        when = ready(step)
        assert when is not None
        rank = place[step.stage]
        end[step] = free[rank] = when + costs.of(step, splits)
        orders[rank].append(step)
        following[step.kind, step.stage] += 1
        inside[rank] += (step.kind == FORWARD) - (step.kind == kinds[-1])
    return replace(empty, orders=tuple(map(tuple, orders)))


def _of(place: Sequence[int], rank: int) -> list[int]:
    return [s for s, r in enumerate(place) if r == rank]
