"""What was decided for a step, as plain data that prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mycel.errors import PlanError
from mycel.ir import Program
from mycel.plan.cost import Costs
from mycel.plan.memory import Footprint
from mycel.plan.residuals import Residuals, paired, residuals
from mycel.sizes import shown

KEEPING = 4.0  # without a budget, keeping a byte for backward is worth moving four: about what compilers' own rules come to
STEPS = 24  # prices tried, each twice the one before


@dataclass(frozen=True)
class Decided:
    """`peak` is the memory of the whole step in bytes, as predicted; `held` what is there between steps; `at` the line of the peak."""

    residuals: Residuals
    peak: int
    held: int
    at: str
    budget: int | None = None

    def __str__(self) -> str:
        lines = [
            f"predicted peak   {shown(self.peak)}, of which {shown(self.held)} between steps"
            + (f"; budget {shown(self.budget)}" if self.budget else "")
        ]
        lines += [f"  at             {self.at}"] if self.at else []
        for (block, keep), (calls, size, seconds) in self._by_block().items():
            again = f"{seconds * 1e3:.2f} ms computed again" if seconds else "nothing computed again"
            lines.append(f"residuals        {block} x{calls}: {shown(size)} kept each, {again}")
            lines.append(f"  keeps          {', '.join(keep) or 'its inputs alone'}")
        return "\n".join(lines)

    def _by_block(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, float]]:
        count = Counter((d.block, d.keep) for d in self.residuals.pairs)
        first = {(d.block, d.keep): d for d in reversed(self.residuals.pairs)}
        return {key: (n, first[key].bytes, first[key].seconds) for key, n in count.items()}


Measure = Callable[[Residuals], Footprint]


def decide(program: Program, body: str, costs: Costs, measure: Measure, budget: int | None, recompute: str = "auto") -> Decided:
    """What to keep for backward: the fastest that fits the budget.  `measure` gives the peak of the step under a decision.

    `recompute`, as a plan says it.  full: everything that can be is computed again; none: only what a compiler would merge into its use."""
    price = KEEPING / costs.hardware.bytes_s if costs.compiled else 0.0
    least = price or 0.01 / costs.hardware.bytes_s
    price = {"auto": price, "full": least * 2.0**STEPS, "none": 0.0}[recompute]
    found = residuals(program, body, costs, [price])
    foot = measure(found)
    if budget is None or foot.peak <= budget:
        return Decided(found, foot.peak, foot.held, foot.at, budget)
    if recompute != "auto":
        what = f"a step with recompute: {recompute} needs {shown(foot.peak)}, the budget is {shown(budget)}"
        raise PlanError(f"{what}: {shown(foot.peak - budget)} too much\n  try       recompute: auto")
    before, smallest = price, foot
    for k in range(1, STEPS):
        dear = least * 2.0**k
        found = residuals(program, body, costs, [dear])
        foot = measure(found)
        smallest = min(smallest, foot, key=lambda f: f.peak)
        if foot.peak <= budget:
            return _mixed(program, body, costs, measure, budget, before, dear, Decided(found, foot.peak, foot.held, foot.at, budget))
        before = dear
    raise PlanError(
        f"a step needs at least {shown(smallest.peak)}, the budget is {shown(budget)}: {shown(smallest.peak - budget)} too much\n"
        f"  of which  {shown(smallest.held)} are parameters, optimiser state and the batch\n  peak      {smallest.at or 'in the update'}\n"
        f"  tried     computing everything again that can be\n  try       a larger accumulate= (smaller parts of the batch), or a larger budget"
    )


def _mixed(program: Program, body: str, costs: Costs, measure: Measure, budget: int, cheap: float, dear: float, plan: Decided) -> Decided:
    """As many pairs as fit at the lower price.  Those whose backward comes first: memory is fullest then, and computing again needs some."""
    low, high = 0, len(list(paired(program.blocks[body])))
    while low < high:
        k = (low + high + 1) // 2
        found = residuals(program, body, costs, _prices(cheap, dear, k))
        foot = measure(found)
        if foot.peak <= budget:
            low, plan = k, Decided(found, foot.peak, foot.held, foot.at, budget)
        else:
            high = k - 1
    return plan


def _prices(cheap: float, dear: float, count: int) -> Sequence[float]:
    return [*[cheap] * count, dear]
