"""What the steps of a pipeline's stages take, by the clock: of programs that ranks run, lowered as they are."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from mycel.ir import DEVICE, Program, call
from mycel.ops import o
from mycel.plan.clock import Clock, StreamShare, Times
from mycel.plan.links import Link
from mycel.plan.schedule import KINDS, PipelineSchedule, StageCosts, step_name, timeline

BUBBLE = "bubble"  # a share of a step's seconds


def step_seconds(clock: Clock, program: Program, kind: str, stage: int, compiled: Collection[str]) -> float:
    """One step of a stage: its block, and adding what it gives to the sums over microbatches."""
    name, eqns = step_name(kind, stage), program.main.eqns
    at = next((i for i, e in enumerate(eqns) if e.op is call and e.params["block"] == name), None)
    if at is None:
        return 0.0
    lines = clock.lines(program, program.entry, program.entry in compiled)
    until_next = itertools.takewhile(lambda line: line.eqn.op is not call, lines[at + 1 :])
    sums = sum(x.seconds for x in until_next if x.eqn.op is o.add and x.eqn.phase == eqns[at].phase)
    return clock(replace(program, entry=name, updates=(), roles={}), compiled).seconds + sums


def stage_costs(
    clock: Clock, programs: Sequence[Program], schedule: PipelineSchedule, link: Link, compiled: Collection[str]
) -> StageCosts:
    """The steps of all stages, and the longest message between them."""
    forward, backward, weight = (
        tuple(step_seconds(clock, programs[schedule.place[s]], kind, s, compiled) for s in range(schedule.stages))
        for kind in KINDS
    )
    return StageCosts(forward, backward, weight, message_seconds(programs, link))


def beside_each_other(schedule: PipelineSchedule, costs: StageCosts, alone: Sequence[Times]) -> Times:
    """The ranks of a pipeline, each of which takes so long by itself: the loop over microbatches as its schedule has
    it, and the longest of what they do around it; memory is that of the rank which needs most."""
    line = timeline(schedule, costs)
    around = max(max(t.seconds - work, 0.0) for t, work in zip(alone, line.work, strict=True))
    fullest = max(alone, key=lambda t: t.peak[DEVICE])
    busiest = max(alone, key=lambda t: t.seconds)
    bubble = line.seconds - max(line.work)
    stages = [", ".join(map(str, schedule.stages_of(rank))) for rank in range(len(alone))]
    where = f"{fullest.at or 'in the update'}, of stage {stages[list(alone).index(fullest)]}"
    shares = {**busiest.parts, BUBBLE: StreamShare(bubble, bubble)}
    return replace(
        fullest,
        seconds=line.seconds + around,
        at=where,
        assumed=busiest.assumed,
        clock=None,
        program=None,
        shares=shares,
        waits_for_host=busiest.moving,
        of_ranks=tuple((names, t.peak[DEVICE]) for names, t in zip(stages, alone, strict=True)),
    )


def message_seconds(programs: Sequence[Program], link: Link) -> float:
    """Of the longest message that a step of a stage sends."""
    return link.start_s + message_bytes(programs) / link.bytes_s


def message_bytes(programs: Sequence[Program]) -> int:
    sent = [e for p in programs for e in p.main.eqns if e.op is o.begin_send and e.phase != "update"]
    return max((sum(v.type.bytes for v in e.vars) for e in sent), default=0)
