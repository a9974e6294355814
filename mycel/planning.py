"""From a step's program to its plan: layouts, what backward computes again, what is compiled as one, and of a pipeline
where it is cut and in which order its steps run.

Deciding needs prices of lowered programs, so this room looks into both `plan` and `lower`; what comes out is a Plan,
and `lower.lowered` of that Plan is the program that runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import DEVICE, Atom, Block, Eqn, Layout, Mesh, Program, Var, call
from mycel.offloading import Mover, PipelineMover, Spaces, StepOutcome, Way, with_moves
from mycel.placing import Given, PlacedStep, outlined
from mycel.plan import (
    Clock,
    Costs,
    Decided,
    Hardware,
    KeepChoices,
    Plan,
    Predicted,
    Residuals,
    StageCosts,
    StageCutter,
    StepFlow,
    Times,
)
from mycel.plan.choices import Laid
from mycel.sizes import shown

CUTS = 8  # how often a pipeline is cut anew for its stages to fit
NEARLY = 0.05  # of a budget: so little too much that the next smaller cut may do


@dataclass(frozen=True)
class Task:
    """A step to plan.

    program   global, forward to update; `body` is the block that holds forward and backward
    inputs    layouts of inputs of the entry that are not whole, by position; `gathered`: those that ZeRO-3 gathers for
              each use
    """

    program: Program
    body: str
    hardware: Hardware
    compiled: bool = False
    inputs: Mapping[int, Layout] | None = None
    gathered: frozenset[int] = frozenset()
    budget: int | None = None
    results: Mapping[int, Layout] | None = None  # layouts of results of the entry that are not whole, by position
    outlines: bool = True  # stretches between calls are compiled where that pays
    # of sub-models on meshes of their own: `inputs` and `gathered` of the program of a place
    at_place: Callable[[int, Program], Given] | None = None
    known: plan.KnownLayouts | None = None  # of the blocks of programs with fewer layers, under the same plan
    bounds: bool = True  # is it asked how far layouts may be above the cheapest?
    starts: tuple[str, ...] = ()  # where the stages of other batches begin: ranks hold what these stages use


def planned(task: Task, given: Plan) -> tuple[Plan, lower.Lowered]:
    """The plan with everything decided, and the program it makes; a plan that is decided already is applied as it
    is."""
    if given.synced() is not None:
        return _of_replicas(task, given)
    if given.place:
        return _in_places(task, given)
    if given.decided is not None:
        return _applied(task, given)
    plan.warn_of_unsplit(task.program, task.inputs or {}, given.mesh)
    step = LaidOut.of(task, given)
    outcome = step.decided()
    return step.plan_of(outcome), outcome.lowered


def _in_places(task: Task, given: Plan) -> tuple[Plan, lower.Lowered]:
    """The plan of sub-models on meshes of their own, decided now or before."""
    step = placed_step(task, given.given)
    if given.decided is None:
        outcome = step.decided(task.budget)
        return step.plan_of(outcome, task.budget), outcome.lowered
    _refuse_compiled(task, given.decided)
    decided = given.decided
    decided.refuse_other_in_places(task.program, len(given.places))
    done = step.keeping(decided.residuals, decided.places, decided.orders).lowered
    return given, lower.with_moves_by_rank(done, decided.moved_by_rank)


def placed_step(task: Task, given: Plan) -> PlacedStep:
    """A step to cut into the programs of places."""
    assert task.at_place is not None
    lower.refuse_unknown_values(task.program, given)

    def laid_out(program: Program, of_place: Plan, inputs: Given) -> tuple[Plan, lower.Distributed | None]:
        return with_layouts(Task(program, task.body, task.hardware, task.compiled, *inputs), of_place)

    return PlacedStep(
        task.program, task.body, given, task.hardware, task.at_place, laid_out, task.compiled, task.outlines
    )


def _of_replicas(task: Task, given: Plan) -> tuple[Plan, lower.Lowered]:
    """The plan of the ranks that step together, with what they say to others now and then: its share of each step."""
    replica, done = planned(task, given.replica)
    assert replica.predicted is not None
    shares = (replicas_share(task, given, replica.predicted.seconds, holds) for holds in _held_by_ranks(done))
    sync = max(shares)
    predicted = replace(replica.predicted, seconds=replica.predicted.seconds + sync[0], sync=sync)
    return replace(given, decided=replica.decided, predicted=predicted), done


def replicas_share(
    task: Task, given: Plan, step_s: float, holds: Callable[[str], bool] = lambda name: True
) -> tuple[float, float]:
    """Seconds and bytes of a step, which itself takes so long, of what a rank says to other replicas about the tensors
    that it has."""
    policy = given.synced()
    assert policy is not None
    clock = plan.Clock(task.hardware, task.hardware.links(given.mesh))
    beside = policy.overlap * step_s  # a message of one fragment goes on beside so much
    seconds = sent_bytes = 0.0
    for message in (each[0] for each in lower.outer_messages(task.program, task.inputs or {}, given, holds) if each):
        times, size = clock(message.whole), sum(lower.sent(message.whole).values())
        computing = times.totals[plan.COMPUTE]
        waiting = times.seconds - computing
        at_end = waiting * sum(lower.sent(message.parts[-1]).values()) / max(size, 1.0)  # not begun before
        seconds += (computing + at_end + max(0.0, waiting - at_end - beside)) / policy.every
        sent_bytes += size / policy.every
    return seconds, sent_bytes


def _held_by_ranks(done: lower.Lowered) -> list[Callable[[str], bool]]:
    """Of each rank of a pipeline: does it hold a tensor of the model?  Where there are no stages, of one that holds
    all."""
    if done.pipeline is None:
        return [lambda name: True]
    owners = {role.name: ranks for role, ranks in done.pipeline.owners.items() if role.kind in ("parameter", "buffer")}

    def holds(rank: int, name: str) -> bool:
        return rank in owners[name]

    return [functools.partial(holds, rank) for rank in range(done.pipeline.schedule.ranks)]


@dataclass(frozen=True)
class Outcome(StepOutcome):
    """A step lowered under a decision of what backward computes again, and what is on the host meanwhile; of a
    pipeline, where its stages begin."""

    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()


@dataclass
class LaidOut:
    """A step whose layouts are decided: what is left is what backward computes again, and what is compiled as one."""

    task: Task
    plan: Plan
    spread: lower.Distributed | None
    local: Program
    costs: Costs
    clock: Clock
    _outcomes: dict[Residuals, Outcome] = field(default_factory=dict)

    @staticmethod
    def of(task: Task, given: Plan) -> LaidOut:
        lower.refuse_unknown_values(task.program, given)
        laid_out, spread = with_layouts(task, given)
        rows = given.sent_codecs().get("experts", "")
        local = lower.local_of(task.program, spread, given.is_pipeline, rows=rows)
        links = task.hardware.links(given.mesh)
        costs = plan.Costs(local, task.hardware, task.compiled, links)
        clock = plan.Clock(task.hardware, links, moves=not given.offload.is_none)
        return LaidOut(task, laid_out, spread, local, costs, clock)

    @property
    def pairs(self) -> int:
        """Calls of blocks with their backward."""
        return len(list(plan.paired(self.local.blocks[self.task.body])))

    def decided(self, is_likely: Callable[[Way], bool] = lambda way: True) -> Outcome:
        """The fastest that fits: what backward computes again, and what is on the host meanwhile; `is_likely`: may a
        way to move fit?"""
        if self.plan.offload.is_none:
            return plan.decide(self.under, self.pairs, self.costs, self.task.budget, self.plan.recompute)
        spaces = Spaces.of(self.plan.offload, self.task.budget, self.task.hardware)
        return with_moves(self, self.plan.offload, spaces, self.plan.recompute, is_likely)

    def mover(self, outcome: Outcome, way: Way, spaces: Spaces) -> Mover | PipelineMover:
        """What may be moved of a step in one way."""
        done, compiled = outcome.lowered, self.compiled(outcome.lowered)
        if done.pipeline is None:
            return Mover(done, self.task.body, self.clock, self.plan.offload, spaces, way, compiled)
        count = len(done.pipeline.programs)
        of_ranks = done.regions_of if self._outlines else [compiled] * count
        return PipelineMover.of(outcome, [self.clock] * count, of_ranks, self.plan.offload, spaces, way)

    def under(self, prices: Sequence[float]) -> Outcome:
        """Lowered, where keeping a byte costs so many seconds; several prices may mean the same."""
        residuals = self.residuals(prices)
        if residuals not in self._outcomes:
            self._outcomes[residuals] = self._keeping(residuals)
        return self._outcomes[residuals]

    def residuals(self, prices: Sequence[float]) -> Residuals:
        """What is kept for backward at these prices."""
        return self._choices.at(prices)

    @functools.cached_property
    def _choices(self) -> KeepChoices:
        return KeepChoices(self.local, self.task.body, self.costs)

    def _keeping(self, residuals: Residuals) -> Outcome:
        """Lowered, with these values kept for backward."""
        is_woven = self.plan.at_once > 1 or self.plan.is_pipeline
        resident = lower.with_residuals(self.local, residuals, self.spread, is_woven)
        if self.plan.is_pipeline:
            return self._in_stages(residuals, resident)
        woven = lower.in_pairs(resident, self.spread, self.plan, self.task.body)
        names, regions = frozenset[str](), dict[str, tuple[str, ...]]()
        if self._outlines:
            woven, names, regions = outlined(woven, self.clock, self.task.hardware)
        done = lower.Lowered(lower.finished(woven, self.spread, self.plan, self.task.compiled), names, self.spread)
        return Outcome(residuals, done, self.clock(done.program, self.compiled(done)), regions=regions)

    @property
    def _outlines(self) -> bool:
        return self.task.compiled and self.task.outlines

    def _in_stages(self, residuals: Residuals, resident: Program) -> Outcome:
        """A pipeline: cut as the plan says or by the clock, its schedule as named or searched."""
        assert self.plan.decided is not None
        body = self.task.body
        summed = lower.summed_for_stages(resident, self.plan, body)
        flow, budget = plan.StepFlow(summed, body), self.task.budget

        def cut_at(units: Sequence[int]) -> Outcome:
            starts = tuple(flow.block.eqns[i].outputs[0].name for i in units)
            return self._cut_at(starts, summed, residuals)

        if not isinstance(self.plan.stages, int):
            return cut_at(plan.starts_of(flow, self.plan.stages))
        if self.task.starts and {*self.task.starts} <= {v.name for i in flow.units for v in flow.block.eqns[i].outputs}:
            return self._cut_at(self.task.starts, summed, residuals)
        cutter = self._cutter(flow)
        room, outcomes = None, list[Outcome]()
        for _ in range(CUTS):  # what a stage needs is estimated before it is cut, and known once it is
            starts = cutter.best(room)
            needs = cutter.needs(starts)
            if room is not None and needs > room:
                break
            outcomes.append(cut_at([cutter.blocks[i].unit for i in starts]))
            too_much = outcomes[-1].times.peak[DEVICE] - budget if budget is not None else 0
            if too_much <= 0:
                return outcomes[-1]
            room = needs - (1.0 if too_much < NEARLY * (budget or 0) else 0.75 * too_much)
        return min(outcomes, key=lambda x: x.times.peak[DEVICE])

    def _cut_at(self, starts: tuple[str, ...], summed: Program, residuals: Residuals) -> Outcome:
        """A pipeline whose stages begin at these values."""
        assert self.plan.decided is not None
        body = self.task.body
        decided = replace(self.plan.decided, residuals=residuals, stages=starts)

        def under(schedule: str, orders: tuple[str, ...] = ()) -> tuple[lower.Lowered, Mapping[str, tuple[str, ...]]]:
            ordered = replace(self.plan, schedule=schedule, decided=replace(decided, orders=orders))
            done = lower.staged(summed, self.spread, ordered, body)
            regions = self._regions_by_rank(done) if self._outlines else {}
            within = replace(decided, orders=orders, compiled=self._outlines, regions=regions)
            return lower.with_regions_by_rank(done, replace(ordered, decided=within)), regions

        orders: tuple[str, ...] = ()
        if self.plan.schedule == "searched":
            split, _ = under("zbh1")
            assert split.pipeline is not None
            schedule = split.pipeline.schedule
            best = plan.searched(schedule.place, schedule.microbatches, self._stage_costs(split))
            orders = plan.orders_text(best)
        done, regions = under(self.plan.schedule, orders)
        costs = self._stage_costs(done)
        times = self._pipeline_times(done, costs)
        return Outcome(residuals, done, times, steps=costs, regions=regions, stages=starts, orders=orders)

    def _regions_by_rank(self, done: lower.Lowered) -> dict[str, tuple[str, ...]]:
        """What of the steps of stages, and of the update, is compiled as one: wherever it pays on some rank."""
        assert done.pipeline is not None
        steps, regions = plan.step_names(done.pipeline.schedule.stages), dict[str, tuple[str, ...]]()
        for program in done.pipeline.programs:

            def may_be(block: str, run: Sequence[Eqn], entry: str = program.entry) -> bool:
                return block != entry or all(eqn.phase == "update" for eqn in run)

            for block, firsts in outlined(program, self.clock, self.task.hardware, may_be, steps)[2].items():
                regions[block] = tuple(dict.fromkeys((*regions.get(block, ()), *firsts)))
        return regions

    def _cutter(self, flow: StepFlow) -> StageCutter:
        """What there is to cut, by the clock, and what stages would hold."""
        assert self.clock.links is not None and isinstance(self.plan.stages, int)
        compiled = flow.program.blocks if self.task.compiled else ()
        blocks = plan.cut_blocks(flow, self.clock, self.clock.links.of((plan.STAGE_AXIS,)), compiled)
        like = replace(self.plan, schedule="1f1b") if self.plan.schedule == "searched" else self.plan
        in_flight = like.schedule_of(flow.body.length).in_flight
        memory = plan.block_memory(flow, blocks) if self.task.budget is not None else []
        return StageCutter(blocks, memory, in_flight, flow.body.length)

    def _stage_costs(self, done: lower.Lowered) -> StageCosts:
        """Seconds of the steps of each stage, and of the longest message between them."""
        assert done.pipeline is not None and self.clock.links is not None
        link = self.clock.links.of((plan.STAGE_AXIS,))
        pipeline = done.pipeline
        return plan.stage_costs(self.clock, pipeline.programs, pipeline.schedule, link, self.compiled(done))

    def _pipeline_times(self, done: lower.Lowered, costs: StageCosts) -> Times:
        """The ranks beside each other."""
        assert done.pipeline is not None
        alone = [self.clock(p, self.compiled(done)) for p in done.pipeline.programs]
        return plan.beside_each_other(done.pipeline.schedule, costs, alone)

    def compiled(self, done: lower.Lowered) -> Collection[str]:
        """The blocks that a compiler takes whole: without outlines, as if that were all."""
        if self.task.outlines or not self.task.compiled:
            return done.regions
        programs = [done.program] if done.pipeline is None else done.pipeline.programs
        return {name for program in programs for name in program.blocks}

    def plan_of(self, outcome: Outcome) -> Plan:
        """Everything decided."""
        assert self.plan.decided is not None and self.plan.predicted is not None
        decided = replace(
            self.plan.decided,
            residuals=outcome.residuals,
            regions=outcome.regions,
            moved=outcome.moved,
            moved_by_rank=outcome.moved_by_rank if any(outcome.moved_by_rank) else (),
            stages=outcome.stages,
            orders=outcome.orders,
        )
        predicted = Predicted.of(outcome.times, self.task.budget, self.plan.predicted.gap)
        return replace(self.plan, decided=decided, predicted=replace(predicted, steps=outcome.steps))


def with_layouts(task: Task, given: Plan) -> tuple[Plan, lower.Distributed | None]:
    """The plan with layouts decided, and the program spread over the ranks; on one device there is nothing to
    decide."""
    if given.is_pipeline:  # as each stage's ranks would do it
        inside, spread = with_layouts(task, given.inside)
        return replace(given, decided=inside.decided, predicted=inside.predicted), spread
    nothing = Residuals(task.body, ())
    if given.mesh.world == 1:
        main = task.program.main
        inputs = plan.BlockLayouts({v.name: (v.type, Layout.whole(v.type.ndim)) for v in main.inputs}, {}, ())
        decided = Decided(plan.digest(task.program), nothing, task.compiled, layouts={task.program.entry: inputs})
        return replace(given, decided=decided, predicted=Predicted(0, 0)), None
    given_inputs = task.inputs or {}
    plan.refuse_idle(task.program, given_inputs, given.mesh)
    links = task.hardware.links(given.mesh)
    whole = lower.settled(task.program, given, given_inputs)
    costs = plan.Costs(whole, task.hardware, task.compiled)
    prices = lower.Prices(links)
    solved = plan.solve(whole, given, given_inputs, task.gathered, costs, links, prices, task.known, task.bounds)
    laid = {**solved.layouts, whole.entry: _returned(solved.layouts[whole.entry], task.results or {})}
    laid = _gathered_by_backward(whole, task.body, laid, given.mesh)
    layouts = {name: plan.BlockLayouts.of(block, laid[name]) for name, block in whole.blocks.items()}
    gathered = tuple(v.name for i, v in enumerate(whole.inputs) if i in task.gathered)
    decided = Decided(plan.digest(whole), nothing, task.compiled, links.named, gathered, layouts, mesh=str(given.mesh))
    laid_out = replace(given, decided=decided, predicted=Predicted(0, 0, gap=solved.gap))
    return laid_out, lower.distribute(task.program, laid_out)


def _returned(entry: Laid, results: Mapping[int, Layout]) -> Laid:
    """The layouts of the entry, with some of its results left in parts."""
    return replace(entry, outputs=tuple(results.get(i, layout) for i, layout in enumerate(entry.outputs)))


def _gathered_by_backward(program: Program, body: str, laid: Mapping[str, Laid], mesh: Mesh) -> dict[str, Laid]:
    """What forward leaves in parts and backward reads whole is handed over whole where forward gathers it for itself,
    and in parts elsewhere: it is gathered once, in a block that can be computed again.  (The programs of places have
    their steps behind them, and no such block.)"""
    if body not in program.blocks:
        return dict(laid)
    block, changed = program.blocks[body], dict(laid)
    uses = Counter(x for eqn in block.eqns for x in eqn.inputs if isinstance(x, Var))
    calls = Counter(str(eqn.params["block"]) for eqn in block.eqns if eqn.op is call)
    inputs = list(_inputs_of_calls(block))
    whole: dict[tuple[str, int], list[Layout]] = {}  # results of blocks, as one backward alone reads them
    for name, n, x, result in inputs:
        layout = laid[name].inputs[n]
        if (
            result
            and isinstance(x, Var)
            and uses[x] == 1
            and _reads(program.blocks[result[0]], laid[result[0]], result[1], layout)
        ):
            whole.setdefault(result, []).append(layout)
    for (name, n), layouts in whole.items():
        if len(layouts) == calls[name] and len(set(layouts)) == 1:
            changed[name] = replace(changed[name], outputs=_with(changed[name].outputs, n, layouts[0]))
    left: dict[tuple[str, int], set[Layout]] = {}  # by forward, for the inputs of blocks, in all calls
    for name, n, _, result in inputs:
        layout = changed[result[0]].outputs[result[1]] if result else changed[name].inputs[n]
        left.setdefault((name, n), set()).add(layout)
    for (name, n), given in left.items():
        layout, v, wanted = next(iter(given)), program.blocks[name].inputs[n], changed[name].inputs
        is_less = layout.local(v.type, mesh).bytes < wanted[n].local(v.type, mesh).bytes
        if len(given) == 1 and is_less and not layout.partial:
            changed[name] = replace(changed[name], inputs=_with(wanted, n, layout))
    return changed


def _inputs_of_calls(block: Block) -> Iterator[tuple[str, int, Atom, tuple[str, int] | None]]:
    """A block that is called and which of its inputs, what it is given, and which result of which block that is, if it
    is one of the forward that the called block is the backward of."""
    pairs = {j: block.eqns[i] for i, j in plan.paired(block)}
    for j, eqn in enumerate(block.eqns):
        if eqn.op is call:
            forward = pairs.get(j)
            results = {v: (str(forward.params["block"]), n) for n, v in enumerate(forward.outputs)} if forward else {}
            for n, x in enumerate(eqn.inputs):
                yield str(eqn.params["block"]), n, x, results.get(x) if isinstance(x, Var) else None


def _with(layouts: tuple[Layout, ...], at: int, layout: Layout) -> tuple[Layout, ...]:
    return (*layouts[:at], layout, *layouts[at + 1 :])


def _reads(block: Block, laid: Laid, result: int, layout: Layout) -> bool:
    """Does an equation of a block read one of its results in this layout?"""
    x = block.outputs[result]
    chosen = zip(block.eqns, laid.choices, strict=True)
    return any(y == x and used == layout for eqn, c in chosen if c for y, used in zip(eqn.inputs, c.ins, strict=True))


def _refuse_compiled(task: Task, decided: Decided) -> None:
    if decided.compiled != task.compiled:
        was, asked = ("compiled", "not") if decided.compiled else ("not compiled", "compiled")
        raise PlanError(
            f"the plan was decided for a step that is {was}, this one is {asked}\n"
            f"  try       compile={decided.compiled}, or plan.given"
        )


def _applied(task: Task, decided_plan: Plan) -> tuple[Plan, lower.Lowered]:
    """What was decided before, for the same program; PlanError says what differs."""
    decided = decided_plan.decided
    assert decided is not None
    _refuse_compiled(task, decided)
    if decided.mesh and decided.mesh != str(decided_plan.inside.mesh):
        raise PlanError(
            "the plan was decided for another mesh\n"
            f"  differs   the mesh is {decided_plan.inside.mesh}, that of the decisions {decided.mesh}\n"
            "  try       plan.given, to decide anew"
        )
    budget = task.budget
    if budget is not None and decided_plan.predicted is not None and decided_plan.peak > budget:
        raise PlanError(
            f"the plan needs {shown(decided_plan.peak)}, the budget is {shown(budget)}\n"
            "  try       plan.given, to decide anew"
        )
    if decided_plan.inside.mesh.world == 1:
        decided.refuse_other(task.program)
    done = lower.lowered(task.program, decided_plan)
    if done.spread is not None:
        decided.refuse_other(done.spread.whole)
        for i, (v, layout) in enumerate(zip(task.program.inputs, done.spread.inputs, strict=True)):
            wanted = (task.inputs or {}).get(i, Layout.whole(v.type.ndim))
            if layout != wanted:
                raise PlanError(
                    f"the plan gives {v.name} as {wanted}, and has decided {layout}\n"
                    "  try       plan.given, to decide anew"
                )
    return decided_plan, done
