"""From a step's program to its plan, where sub-models are on meshes of their own: the step is cut into the programs of
places, each is laid out over its mesh as any other step is, and messages between them are what both layouts ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import Layout, Program, check, walk
from mycel.ops import o
from mycel.plan import Decided, Hardware, Plan, Residuals, StageCosts, Times
from mycel.plan.schedule import KINDS

# layouts of a program's inputs, by position; and those that are gathered for use
Given = tuple[dict[int, Layout], frozenset[int]]


@dataclass(frozen=True)
class PlacedOutcome:
    """A step in places, under a decision of what backward computes again."""

    residuals: Residuals
    lowered: lower.Lowered
    plans: tuple[Plan, ...]  # of each place
    times: Times
    steps: StageCosts


@dataclass(frozen=True)
class PlacedStep:
    """A step to cut; `given`: how inputs of the program of a place lie there; `laid_out`: a program under the plan of a
    place, with layouts decided, and spread over its ranks."""

    program: Program
    body: str
    plan: Plan
    hardware: Hardware
    given: Callable[[int, Program], Given]
    laid_out: Callable[[Program, Plan, Given], tuple[Plan, lower.Distributed | None]]

    def __post_init__(self) -> None:
        if any(eqn.op in (o.enter, o.leave) for _, eqn in walk(self.program)):
            raise PlanError(
                "place: a manual region is of one mesh, and here each place has its own\n"
                "  try       a plan without place, or model code without mycel.manual"
            )

    @functools.cached_property
    def local(self) -> Program:
        """The step of one device, as it is cut."""
        return lower.local_of(self.program, None, simplified=True)

    def decided(self, budget: int | None) -> PlacedOutcome:
        """The fastest that fits every rank."""
        local = self.local
        costs = plan.Costs(local, self.hardware, False)
        pairs = len(list(plan.paired(local.blocks[self.body])))

        def under(prices: Sequence[float]) -> PlacedOutcome:
            residuals = plan.residuals(local, self.body, costs, prices)
            outcome = self.under(residuals)
            return outcome if self.plan.schedule != "searched" else self.under(residuals, costs=outcome.steps)

        return plan.decide(under, pairs, costs, budget, self.plan.recompute)

    def under(
        self,
        residuals: Residuals,
        known: Sequence[Decided] = (),
        orders: Sequence[str] = (),
        costs: StageCosts | None = None,
    ) -> PlacedOutcome:
        """Lowered, where forward keeps so much for backward; `known` and `orders`: what was decided for each place
        before; `costs`: of its steps, for a schedule that is searched."""
        places = self.plan.places
        summed = lower.plain_sums(lower.with_residuals(self.local, residuals, None), self.body)
        pipeline = lower.in_places(summed, self.body, places, self.plan.schedule, costs, orders)
        plans, spreads, programs = list[Plan](), list[lower.Distributed | None](), list[Program]()
        for i, program in enumerate(pipeline.programs):
            laid, spread = self._laid_out(i, program, known)
            plans.append(laid)
            spreads.append(spread)
            programs.append(lower.local_of_place(program, spread))
        ends = [lower.crossings(p, spread) for p, spread in zip(pipeline.programs, spreads, strict=True)]
        connected = [
            p if spread is None else check(lower.overlap(p))
            for p, spread in zip(lower.connect(programs, ends, places), spreads, strict=True)
        ]
        done = replace(pipeline, programs=tuple(connected))
        lowered = lower.Lowered(connected[0], frozenset(), spreads[0], done, tuple(spreads))
        times, steps = self._timed(done)
        return PlacedOutcome(residuals, lowered, tuple(plans), times, steps)

    def _laid_out(self, i: int, program: Program, known: Sequence[Decided]) -> tuple[Plan, lower.Distributed | None]:
        of_place = self.plan.at_place(i)
        if not known:
            return self.laid_out(program, of_place, self.given(i, program))
        laid = replace(of_place, decided=known[i])
        if of_place.mesh.world == 1:
            known[i].refuse_other(program)
            return laid, None
        spread = lower.distribute(program, laid)
        known[i].refuse_other(spread.whole)
        return laid, spread

    def _timed(self, pipeline: lower.Pipeline) -> tuple[Times, StageCosts]:
        """All places beside each other, by the clock of each."""
        schedule, clocks = pipeline.schedule, list[plan.Clock]()
        for place in self.plan.places:
            clocks.append(plan.Clock(self.hardware, self.hardware.links(place.mesh)))
        forward, backward, weight = (
            tuple(plan.step_seconds(clocks[p], pipeline.programs[p], kind, s, ()) for s, p in enumerate(schedule.place))
            for kind in KINDS
        )
        link = self.hardware.links(self.plan.mesh).of((plan.PLACE_AXIS,))
        sent = [
            next(e.vars).type.bytes
            for p in pipeline.programs
            for e in p.main.eqns
            if e.op is o.begin_send_across and e.source  # of a step
        ]
        costs = StageCosts(forward, backward, weight, link.start_s + max(sent, default=0) / link.bytes_s)
        alone = [clock(program, ()) for clock, program in zip(clocks, pipeline.programs, strict=True)]
        return plan.beside_each_other(schedule, costs, alone), costs

    def plan_of(self, outcome: PlacedOutcome, budget: int | None) -> Plan:
        """Everything decided."""
        pipeline = outcome.lowered.pipeline
        assert pipeline is not None
        orders = plan.orders_text(pipeline.schedule) if self.plan.schedule == "searched" else ()
        places = tuple(_decided(p) for p in outcome.plans)
        decided = Decided(plan.digest(self.program), outcome.residuals, orders=orders, places=places)
        gap = max(p.predicted.gap if p.predicted is not None else 0.0 for p in outcome.plans)
        predicted = replace(plan.Predicted.of(outcome.times, budget, gap), steps=outcome.steps)
        return replace(self.plan, decided=decided, predicted=predicted)


def _decided(of_place: Plan) -> Decided:
    assert of_place.decided is not None
    return of_place.decided
