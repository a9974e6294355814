"""From a step's program to its plan, where sub-models are on meshes of their own: the step is cut into the programs of
places, each is laid out over its mesh as any other step is, and messages between them are what both layouts ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import Eqn, Layout, Program, check, runs, walk
from mycel.offloading import PipelineMover, Spaces, StepOutcome, Way, with_moves
from mycel.ops import o
from mycel.plan import Clock, Costs, Decided, Hardware, Plan, Residuals, StageCosts, Times
from mycel.plan.held_stages import HeldInputs
from mycel.plan.schedule import KINDS

WORTH = 0.005  # the share of a step that compiling a stretch between calls must save

# layouts of a program's inputs, by position; and those that are gathered for use
Given = tuple[dict[int, Layout], frozenset[int]]


@dataclass(frozen=True)
class PlacedOutcome(StepOutcome):
    """A step in places, under a decision of what backward computes again; `plans`: of each place."""

    plans: tuple[Plan, ...] = ()


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
    is_compiled: bool = False
    outlines: bool = True  # stretches between calls are compiled where that pays

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

    @functools.cached_property
    def costs(self) -> Costs:
        return Costs(self.local, self.hardware, self.is_compiled)

    @property
    def pairs(self) -> int:
        """Calls of blocks with their backward."""
        return len(list(plan.paired(self.local.blocks[self.body])))

    @functools.cached_property
    def clocks(self) -> list[Clock]:
        """Of each place."""
        moves = not self.plan.offload.is_none
        return [Clock(self.hardware, self.hardware.links(place.mesh), moves) for place in self.plan.places]

    def decided(self, budget: int | None) -> PlacedOutcome:
        """The fastest that fits every rank: what backward computes again, and what is on the host meanwhile."""
        offload, recompute = self.plan.offload, self.plan.recompute
        if offload.is_none:
            return plan.decide(self.under, self.pairs, self.costs, budget, recompute)
        return with_moves(self, offload, Spaces.of(offload, budget, self.hardware), recompute)

    def under(self, prices: Sequence[float]) -> PlacedOutcome:
        """Lowered, where keeping a byte costs so many seconds."""
        residuals = plan.residuals(self.local, self.body, self.costs, prices)
        outcome = self.keeping(residuals)
        return outcome if self.plan.schedule != "searched" else self.keeping(residuals, costs=outcome.steps)

    def mover(self, outcome: PlacedOutcome, way: Way, spaces: Spaces) -> PipelineMover:
        """What may be moved of the step in one way."""
        return PipelineMover.of(outcome, self.clocks, self.compiled(outcome.lowered), self.plan.offload, spaces, way)

    def compiled(self, done: lower.Lowered) -> list[Collection[str]]:
        """Of each place, the blocks that a compiler takes whole: without outlines, as if that were all."""
        assert done.pipeline is not None
        if self.is_compiled and not self.outlines:
            return [program.blocks for program in done.pipeline.programs]
        return list(done.regions_of)

    def keeping(
        self,
        residuals: Residuals,
        known: Sequence[Decided] = (),
        orders: Sequence[str] = (),
        costs: StageCosts | None = None,
    ) -> PlacedOutcome:
        """Lowered, where forward keeps so much for backward; `known` and `orders`: what was decided for each place
        before; `costs`: of its steps, for a schedule that is searched."""
        summed = lower.plain_sums(lower.with_residuals(self.local, residuals, None), self.body)
        pipeline = lower.in_places(summed, self.body, self.plan.places, self.plan.schedule, costs, orders)
        plans, lowered = self._lowered(pipeline, known)
        assert lowered.pipeline is not None
        done = lowered.pipeline
        times, steps = self._timed(done, self.compiled(lowered))
        return PlacedOutcome(residuals, lowered, times, steps=steps, plans=tuple(plans))

    def forward(self, held: HeldInputs) -> lower.Lowered | None:
        """A program without a step, each place with what it holds the tensors for; None where that cannot be."""
        pipeline = lower.forward_stages(self.local, held, lower.PlaceWriter, plan.PLACE_AXIS)
        return None if pipeline is None else self._lowered(pipeline, ())[1]

    def _lowered(self, pipeline: lower.Pipeline, known: Sequence[Decided]) -> tuple[list[Plan], lower.Lowered]:
        """The programs of places, each laid out over its mesh, with messages between them; and their plans."""
        places = self.plan.places
        plans, spreads, programs = list[Plan](), list[lower.Distributed | None](), list[Program]()
        regions = list[frozenset[str]]()
        for i, program in enumerate(pipeline.programs):
            laid, spread = self._laid_out(i, program, known)
            local, names, chosen = self._outlined(i, lower.local_of_place(program, spread), known)
            plans.append(replace(laid, decided=replace(_decided(laid), regions=chosen)))
            spreads.append(spread)
            programs.append(local)
            regions.append(names)
        ends = [lower.crossings(p, spread) for p, spread in zip(pipeline.programs, spreads, strict=True)]
        connected = [
            p if spread is None else check(lower.overlap(p))
            for p, spread in zip(lower.connect(programs, ends, places), spreads, strict=True)
        ]
        done = replace(pipeline, programs=tuple(connected))
        return plans, lower.Lowered(connected[0], regions[0], spreads[0], done, tuple(spreads), tuple(regions))

    def _outlined(
        self, i: int, local: Program, known: Sequence[Decided]
    ) -> tuple[Program, frozenset[str], Mapping[str, tuple[str, ...]]]:
        """What of the steps of a place is compiled as one, as it was decided or as it pays."""
        if not self.is_compiled or not self.outlines:
            return local, frozenset(), {}
        if not known:
            return outlined(local, self.clocks[i], self.hardware, lambda block, run: block != local.entry)
        chosen = known[i].regions
        program, names = lower.with_regions(local, lower.is_chosen(chosen))
        return program, names, chosen

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

    def _timed(self, pipeline: lower.Pipeline, compiled: Sequence[Collection[str]]) -> tuple[Times, StageCosts]:
        """All places beside each other, by the clock of each."""
        schedule, clocks, programs = pipeline.schedule, self.clocks, pipeline.programs
        forward, backward, weight = (
            tuple(plan.step_seconds(clocks[p], programs[p], kind, s, compiled[p]) for s, p in enumerate(schedule.place))
            for kind in KINDS
        )
        link = self.hardware.links(self.plan.mesh).of((plan.PLACE_AXIS,))
        sent = [
            next(e.vars).type.bytes
            for p in pipeline.programs
            for e in p.main.eqns
            if e.op is o.begin_send_across and e.phase != "update"
        ]
        costs = StageCosts(forward, backward, weight, link.start_s + max(sent, default=0) / link.bytes_s)
        alone = [clock(program, names) for clock, program, names in zip(clocks, programs, compiled, strict=True)]
        return plan.beside_each_other(schedule, costs, alone), costs

    def plan_of(self, outcome: PlacedOutcome, budget: int | None) -> Plan:
        """Everything decided."""
        pipeline = outcome.lowered.pipeline
        assert pipeline is not None
        orders = plan.orders_text(pipeline.schedule) if self.plan.schedule == "searched" else ()
        places = tuple(_decided(p) for p in outcome.plans)
        moved = outcome.moved_by_rank if any(outcome.moved_by_rank) else ()
        decided = Decided(
            plan.digest(self.program),
            outcome.residuals,
            self.is_compiled,
            orders=orders,
            places=places,
            moved_by_rank=moved,
        )
        gap = max(p.predicted.gap if p.predicted is not None else 0.0 for p in outcome.plans)
        predicted = replace(plan.Predicted.of(outcome.times, budget, gap), steps=outcome.steps)
        return replace(self.plan, decided=decided, predicted=predicted)


def outlined(
    program: Program,
    clock: plan.Clock,
    hardware: Hardware,
    may_be: Callable[[str, Sequence[Eqn]], bool] = lambda block, run: True,
    divided: Collection[str] = (),
) -> tuple[Program, frozenset[str], dict[str, tuple[str, ...]]]:
    """A local program with stretches between calls that are worth compiling as one, in all calls of their block
    together; the blocks to compile; and by block the first value of each stretch.  `may_be`: may a stretch of a block
    be outlined?  `divided`: blocks that are not taken whole."""
    costs = plan.Costs(program, hardware, True, clock.links)
    least, regions = WORTH * clock(program, program.blocks).seconds, dict[str, tuple[str, ...]]()
    times = runs(program)

    def is_worth(block: str, run: Sequence[Eqn]) -> bool:
        worth = may_be(block, run) and times[block] * costs.gain(run) > least
        if worth:
            regions[str(block)] = (*regions.get(str(block), ()), run[0].outputs[0].name)
        return worth

    with_blocks, names = lower.with_regions(program, is_worth, divided)
    return with_blocks, names, regions


def _decided(of_place: Plan) -> Decided:
    assert of_place.decided is not None
    return of_place.decided
