"""What forward keeps for backward: the fastest that fits a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mycel.errors import PlanError
from mycel.ir import Program
from mycel.plan.clock import DEVICE, Times
from mycel.plan.cost import Costs
from mycel.plan.residuals import Residuals, paired, residuals
from mycel.sizes import shown

# without a budget, keeping a byte for backward is worth moving four: about what compilers' own rules come to
KEEPING = 4.0
STEPS = 24  # prices tried, each twice the one before


Measure = Callable[[Residuals], Times]
Kept = tuple[Residuals, Times]  # a decision and what the step takes under it
LESS = "a larger accumulate= (smaller parts of the batch), or a larger budget"  # what to try where nothing fits


def decide(
    program: Program, body: str, costs: Costs, measure: Measure, budget: int | None, recompute: str = "auto"
) -> Kept:
    """What to keep for backward: the fastest that fits the budget.  `measure` gives the times of the step under a
    decision.

    `recompute`, as a plan says it.  full: everything that can be is computed again; none: only what a compiler would
    merge into its use."""
    price = KEEPING / costs.hardware.bytes_s if costs.compiled else 0.0
    least = price or 0.01 / costs.hardware.bytes_s
    price = {"auto": price, "full": least * 2.0**STEPS, "none": 0.0}[recompute]
    kept = residuals(program, body, costs, [price])
    times = measure(kept)
    if budget is None or times.peak[DEVICE] <= budget:
        return kept, times
    if recompute != "auto":
        what = f"a step with recompute: {recompute} needs {shown(times.peak[DEVICE])}, the budget is {shown(budget)}"
        raise PlanError(f"{what}: {shown(times.peak[DEVICE] - budget)} too much\n  try       recompute: auto")
    smallest, best = times, None
    low, high = 0, STEPS  # a price of least * 2^low is too low, 2^high is not known to be enough
    while high - low > 1:
        k = (low + high) // 2
        kept = residuals(program, body, costs, [least * 2.0**k])
        times = measure(kept)
        smallest = min(smallest, times, key=lambda t: t.peak[DEVICE])
        if times.peak[DEVICE] <= budget:
            high, best = k, (kept, times)
        else:
            low = k
    if best is not None:
        before = least * 2.0**low if low else price
        return _mixed(program, body, costs, measure, budget, before, least * 2.0**high, best)
    peak = smallest.peak[DEVICE]
    raise PlanError(
        f"a step needs at least {shown(peak)}, the budget is {shown(budget)}: {shown(peak - budget)} too much\n"
        f"  of which  {shown(smallest.held)} are parameters, optimiser state and the batch\n"
        f"  peak      {smallest.at or 'in the update'}\n"
        "  tried     computing everything again that can be\n"
        f"  try       {LESS}"
    )


def _mixed(
    program: Program, body: str, costs: Costs, measure: Measure, budget: int, cheap: float, dear: float, best: Kept
) -> Kept:
    """As many pairs as fit at the lower price.  Those whose backward comes first: memory is fullest then, and computing
    again needs some."""
    low, high = 0, len(list(paired(program.blocks[body])))
    while low < high:
        k = (low + high + 1) // 2
        kept = residuals(program, body, costs, _prices(cheap, dear, k))
        times = measure(kept)
        if times.peak[DEVICE] <= budget:
            low, best = k, (kept, times)
        else:
            high = k - 1
    return best


def _prices(cheap: float, dear: float, count: int) -> Sequence[float]:
    return [*[cheap] * count, dear]
