"""From a step's program to its plan: layouts, what backward computes again, what is compiled as one.

Deciding needs prices of lowered programs, so this room looks into both `plan` and `lower`; what comes out is a Plan,
and `lower.lowered` of that Plan is the program that runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import Eqn, Layout, Program
from mycel.plan import Decided, Hardware, Plan, Predicted, Residuals
from mycel.sizes import shown

WORTH = 0.005  # the share of a step that compiling a stretch between calls must save


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
    outlines: bool = True  # stretches between calls are compiled where that pays


def planned(task: Task, given: Plan) -> tuple[Plan, lower.Lowered]:
    """The plan with everything decided, and the program it makes; a plan that is decided already is applied as it
    is."""
    if given.decided is not None:
        return _applied(task, given)
    step = LaidOut.of(task, given)
    outcome = plan.decide(step.under, step.pairs, step.costs, task.budget, given.recompute)
    return step.plan_of(outcome), outcome.lowered


@dataclass(frozen=True)
class Outcome:
    """A step lowered under a decision of what backward computes again."""

    residuals: Residuals
    lowered: lower.Lowered
    regions: Mapping[str, tuple[str, ...]]
    times: plan.Times


@dataclass
class LaidOut:
    """A step whose layouts are decided: what is left is what backward computes again, and what is compiled as one."""

    task: Task
    plan: Plan
    spread: lower.Distributed | None
    local: Program
    costs: plan.Costs
    clock: plan.Clock

    @staticmethod
    def of(task: Task, given: Plan) -> LaidOut:
        laid_out, spread = with_layouts(task, given)
        local = lower.local_of(task.program, spread)
        links = task.hardware.links(given.mesh)
        costs = plan.Costs(local, task.hardware, task.compiled, links)
        return LaidOut(task, laid_out, spread, local, costs, plan.Clock(task.hardware, links))

    @property
    def pairs(self) -> int:
        """Calls of blocks with their backward."""
        return len(list(plan.paired(self.local.blocks[self.task.body])))

    def under(self, prices: Sequence[float]) -> Outcome:
        """Lowered, where keeping a byte costs so many seconds."""
        residuals = plan.residuals(self.local, self.task.body, self.costs, prices)
        resident = lower.with_residuals(self.local, residuals, self.spread)
        names, regions = frozenset[str](), dict[str, tuple[str, ...]]()
        if self.task.compiled and self.task.outlines:
            resident, names, regions = self._outlined(resident)
        done = lower.Lowered(lower.finished(resident, self.spread), names, self.spread)
        return Outcome(residuals, done, regions, self.clock(done.program, self.compiled(done)))

    def _outlined(self, resident: Program) -> tuple[Program, frozenset[str], dict[str, tuple[str, ...]]]:
        """Stretches between calls that are worth compiling as one; by block the first value of each."""
        costs = plan.Costs(resident, self.task.hardware, True, self.clock.links)
        least, regions = WORTH * self.clock(resident, resident.blocks).seconds, dict[str, tuple[str, ...]]()

        def is_worth(block: str, run: Sequence[Eqn]) -> bool:
            worth = costs.gain(run) > least
            if worth:
                regions[str(block)] = (*regions.get(str(block), ()), run[0].outputs[0].name)
            return worth

        outlined, names = lower.with_regions(resident, is_worth)
        return outlined, names, regions

    def compiled(self, done: lower.Lowered) -> Collection[str]:
        """The blocks that a compiler takes whole: without outlines, as if that were all."""
        return done.regions if self.task.outlines or not self.task.compiled else done.program.blocks

    def plan_of(self, outcome: Outcome) -> Plan:
        """Everything decided."""
        assert self.plan.decided is not None and self.plan.predicted is not None
        decided = replace(self.plan.decided, residuals=outcome.residuals, regions=outcome.regions)
        predicted = Predicted.of(outcome.times, self.task.budget, self.plan.predicted.gap)
        return replace(self.plan, decided=decided, predicted=predicted)


def with_layouts(task: Task, given: Plan) -> tuple[Plan, lower.Distributed | None]:
    """The plan with layouts decided, and the program spread over the ranks; on one device there is nothing to
    decide."""
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
    solved = plan.solve(whole, given, given_inputs, task.gathered, costs, links, lower.Prices(links))
    layouts = {name: plan.BlockLayouts.of(block, solved.layouts[name]) for name, block in whole.blocks.items()}
    gathered = tuple(v.name for i, v in enumerate(whole.inputs) if i in task.gathered)
    decided = Decided(plan.digest(whole), nothing, task.compiled, links.named, gathered, layouts)
    laid_out = replace(given, decided=decided, predicted=Predicted(0, 0, gap=solved.gap))
    return laid_out, lower.distribute(task.program, laid_out)


def _applied(task: Task, decided_plan: Plan) -> tuple[Plan, lower.Lowered]:
    """What was decided before, for the same program; PlanError says what differs."""
    decided = decided_plan.decided
    assert decided is not None
    if decided.compiled != task.compiled:
        was, asked = ("compiled", "not") if decided.compiled else ("not compiled", "compiled")
        raise PlanError(
            f"the plan was decided for a step that is {was}, this one is {asked}\n"
            f"  try       compile={decided.compiled}, or plan.given"
        )
    budget = task.budget
    if budget is not None and decided_plan.predicted is not None and decided_plan.peak > budget:
        raise PlanError(
            f"the plan needs {shown(decided_plan.peak)}, the budget is {shown(budget)}\n"
            "  try       plan.given, to decide anew"
        )
    if decided_plan.mesh.world == 1:
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
