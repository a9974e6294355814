"""A step of all ranks as it was measured, beside what the clock predicted of it.

with step.trace() as trace:
    loss = step(**batch)
print(trace)                          of a pipeline: its schedule as predicted and as it was, rank by rank
trace.files()                         trace.json for ui.perfetto.dev, schedule.html with both drawings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mycel.plan import PLACE_AXIS, STAGE_AXIS, Plan
from mycel.plan.schedule import KINDS, PipelineSchedule, PipelineTimes, StageStep, step_name, timeline
from mycel.run.trace import STEP, Span, chrome_trace
from mycel.schedule_page import schedule_page
from mycel.sizes import span


@dataclass
class StepTrace:
    """Spans of each rank, known once the step has ended; `schedule`: of a pipeline."""

    plan: Plan
    schedule: PipelineSchedule | None = None
    spans: list[list[Span]] = field(default_factory=list)  # by rank

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        whole = [s for each in self.spans for s in each if s.block == STEP]
        return max(s.end_s for s in whole) - min(s.start_s for s in whole)

    @property
    def measured(self) -> PipelineTimes | None:
        """The steps of a pipeline as they were, of the first ranks of all stages."""
        if self.schedule is None or not self.spans:
            return None
        mesh = self.plan.mesh
        first = [place.ranks[0] for place in self.plan.places] or [
            r for r in range(mesh.world) if mesh.index(r, self.plan.inside.mesh.axes) == 0
        ]
        spans = {(s.block, s.call): s for r in first for s in self.spans[r] if s.block != STEP}
        steps = [step for order in self.schedule.orders for step in order]
        there = {x: spans[key] for x in steps if (key := (step_name(x.kind, x.stage), x.microbatch)) in spans}
        zero = min(s.start_s for s in there.values())
        start = {x: s.start_s - zero for x, s in there.items()}
        return PipelineTimes(self._of(there), start, {x: s.end_s - zero for x, s in there.items()})

    @property
    def predicted(self) -> PipelineTimes | None:
        if self.schedule is None or self.plan.predicted is None or self.plan.predicted.steps is None:
            return None
        return timeline(self.schedule, self.plan.predicted.steps)

    def _of(self, there: Mapping[StageStep, Span]) -> PipelineSchedule:
        """The schedule with the steps that ran: of weights, those that are a step of their own."""
        assert self.schedule is not None
        orders = tuple(tuple(x for x in order if x in there) for order in self.schedule.orders)
        return replace(self.schedule, orders=orders)

    def chrome(self) -> str:
        """All ranks, and of a pipeline the ranks as they were predicted."""
        rows = {f"rank {r}": each for r, each in enumerate(self.spans)}
        predicted = self.predicted
        if predicted is not None:
            began = min(s.start_s for each in self.spans for s in each)
            for r, order in enumerate(predicted.schedule.orders):
                rows[f"predicted, {PLACE_AXIS if self.plan.place else STAGE_AXIS} {r}"] = [
                    Span(step_name(x.kind, x.stage), x.microbatch, began + predicted.start[x], began + predicted.end[x])
                    for x in order
                    if x.kind in KINDS
                ]
        return chrome_trace(rows)

    def page(self) -> str:
        """The schedule drawn twice."""
        return schedule_page({"predicted": self.predicted, "measured": self.measured})

    def files(self) -> dict[str, str]:
        """What is written of it, by name."""
        return {"trace.json": self.chrome()} | ({"schedule.html": self.page()} if self.schedule is not None else {})

    def __str__(self) -> str:
        return measured_text(self.measured) if self.measured is not None else f"measured step    {span(self.seconds)}"


def measured_text(times: PipelineTimes) -> str:
    """For people: as `explain` has what was predicted."""
    wait = ", ".join(map(span, times.idle))
    head = f"  measured       {span(times.seconds)}, of which ranks wait {wait}"
    return "\n".join([head, *(f"  {row}" for row in str(times).splitlines())])
