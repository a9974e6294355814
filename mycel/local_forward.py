"""A program without a step, under the plan of a step -> what this rank runs of it.

Where ranks hold the stages of a pipeline, or the sub-models of their places, each runs what it holds the tensors for,
and all have the results (`lower/forward_stages.py`).  Where that cannot be, since an equation reads tensors of several
stages at once (an island that reaches the whole model, say), every rank runs all of it, with what others hold brought
there for as long as it takes (`ShardedModel.complete`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from mycel import lower, plan
from mycel.ir import Layout, Program, check
from mycel.parts import ShardedModel, UnshardedStep
from mycel.placed_model import PlacedModel
from mycel.placing import Given, PlacedStep
from mycel.plan.held_stages import HeldInputs
from mycel.planning import Task, with_layouts


@dataclass(frozen=True)
class LocalForward:
    """`program`: what this rank runs; `is_whole`: does it take what all stages or places hold?  `rows`: results that
    are rows of the batch and left in parts, as they lie."""

    program: Program
    spread: lower.Distributed | None
    is_whole: bool = False
    rows: Mapping[int, Layout] = field(default_factory=dict)


def local_forward(
    parts: ShardedModel, unsharded: UnshardedStep, hardware: plan.Hardware, in_parts: bool
) -> LocalForward:
    """`in_parts`: results that are rows of the batch stay on the ranks that have these."""
    if isinstance(parts, PlacedModel) and parts.owners and parts.others:
        placed = in_places(parts, unsharded, hardware)
        if placed is not None:
            mine = placed.at(parts.place)
            return LocalForward(mine.program, mine.spread)
    whole = of_whole_model(parts, unsharded, hardware, in_parts)
    if parts.owners and parts.plan.is_pipeline:
        pipeline = in_stages(parts, whole.program)
        if pipeline is not None:
            return LocalForward(check(lower.overlap(pipeline.programs[parts.place])), whole.spread)
    ordered = whole.program if whole.spread is None else check(lower.overlap(whole.program))
    return replace(whole, program=ordered)


def of_whole_model(
    parts: ShardedModel, unsharded: UnshardedStep, hardware: plan.Hardware, in_parts: bool = False
) -> LocalForward:
    """As a rank would run it that holds its part of every tensor; messages are not begun early yet."""
    program, together = unsharded.program, parts.plan.together
    inputs, gathered = parts.given(unsharded, together)
    rows = parts.rows_of(unsharded, together) if in_parts else {}
    task = Task(program, program.entry, hardware, False, inputs, gathered, results=rows)
    spread = with_layouts(task, together)[1]
    local = lower.local_of(program, spread)
    return LocalForward(local if spread is None else check(lower.hoist(local)), spread, True, rows)


def in_stages(parts: ShardedModel, whole: Program) -> lower.Pipeline | None:
    """The programs of all ranks along the stages, of that of a rank which holds all; None where one would read what it
    does not hold."""
    held = HeldInputs(parts.owners, parts.users, parts.plan.mesh[plan.STAGE_AXIS])
    return lower.forward_stages(whole, held, lower.RankWriter, plan.STAGE_AXIS)


def in_places(parts: PlacedModel, unsharded: UnshardedStep, hardware: plan.Hardware) -> lower.Lowered | None:
    """The programs of all places; None likewise."""

    def laid_out(program: Program, of_place: plan.Plan, inputs: Given) -> tuple[plan.Plan, lower.Distributed | None]:
        return with_layouts(Task(program, program.entry, hardware, False, *inputs), of_place.together)

    given = partial(parts.given_at, unsharded)
    step = PlacedStep(unsharded.program, unsharded.body, parts.written, hardware, given, laid_out)
    return step.forward(HeldInputs(parts.owners, parts.users, len(parts.written.places)))
