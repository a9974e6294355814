"""What forward keeps for backward: the fastest that fits a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mycel.errors import PlanError
from mycel.ir import DEVICE
from mycel.plan.clock import Times
from mycel.plan.cost import Costs
from mycel.plan.residuals import KEEPING
from mycel.sizes import shown

STEPS = 24  # prices tried, each twice the one before


class Timed(Protocol):
    """A decision and what the step takes under it."""

    @property
    def times(self) -> Times: ...


D = TypeVar("D", bound=Timed)
Under = Callable[[Sequence[float]], D]  # the step where keeping a byte costs so many seconds, for each pair of calls
# what to try where nothing fits, and where a stage does not
LESS = "a larger accumulate= (smaller parts of the batch), or a larger budget"
LESS_OF_STAGES = (
    "more stages, a cut that gives the fullest fewer modules, a schedule that holds fewer microbatches (1f1b), ZeRO "
    "inside a stage, offload: auto, or a larger budget"
)


def decide(
    under: Under[D],
    pairs: int,
    costs: Costs,
    budget: int | None,
    recompute: str = "auto",
    slack: float = math.inf,
) -> D:
    """What to keep for backward: the fastest that fits the budget.  `under` gives the step under prices, which may
    differ between its `pairs` of calls.

    `recompute`, as a plan says it.  full: everything that can be is computed again; none: only what a compiler would
    merge into its use.  `slack`: where all that is tried first needs more than the budget by this share, no other price
    is tried."""
    prices = ladder(costs, recompute)
    outcome = under(prices[:1])
    peak = outcome.times.peak[DEVICE]
    if budget is None or peak <= budget:
        return outcome
    if recompute != "auto":
        what = f"a step with recompute: {recompute} needs {shown(peak)}, the budget is {shown(budget)}"
        stages = _stages_line(outcome.times)
        raise PlanError(f"{what}: {shown(peak - budget)} too much\n{stages}  try       recompute: auto")
    smallest, best = outcome.times, None
    low, high = 0, len(prices) - 1  # the price at `low` is too low, that at `high` is not known to be enough
    while high - low > 1:
        k = (low + high) // 2
        outcome = under([prices[k]])
        smallest = min(smallest, outcome.times, key=lambda t: t.peak[DEVICE])
        if outcome.times.peak[DEVICE] <= budget:
            high, best = k, outcome
        else:
            low = k
    if best is None and smallest.peak[DEVICE] <= budget * (1 + slack):
        # computing much again needs memory too: a lower price may need less
        for high in range(1, (len(prices) - 1) // 2):
            outcome = under([prices[high]])
            smallest = min(smallest, outcome.times, key=lambda t: t.peak[DEVICE])
            if outcome.times.peak[DEVICE] <= budget:
                low, best = high - 1, outcome
                break
    if best is not None:
        return _mixed(under, pairs, budget, prices[low], prices[high], best)
    peak = smallest.peak[DEVICE]
    raise PlanError(
        f"a step needs at least {shown(peak)}, the budget is {shown(budget)}: {shown(peak - budget)} too much\n"
        f"  of which  {shown(smallest.held)} are parameters, optimiser state and the batch\n"
        f"  peak      {smallest.at or 'in the update'}\n"
        f"{_stages_line(smallest)}"
        "  tried     computing everything again that can be\n"
        f"  try       {less(smallest)}"
    )


def _stages_line(times: Times) -> str:
    needs = of_stages(times)
    return f"  stages    {needs}\n" if needs else ""


def of_stages(times: Times) -> str:
    """Of a pipeline, what the ranks of each stage need."""
    return ", ".join(f"{names}: {shown(peak)}" for names, peak in times.of_ranks)


def less(times: Times) -> str:
    """What to try where a step does not fit."""
    return LESS_OF_STAGES if times.of_ranks else LESS


def ladder(costs: Costs, recompute: str = "auto") -> list[float]:
    """Prices of a byte, in seconds, to try one after the other."""
    price = KEEPING / costs.hardware.bytes_s if costs.compiled else 0.0
    least = price or 0.01 / costs.hardware.bytes_s
    if recompute != "auto":
        return [least * 2.0**STEPS if recompute == "full" else 0.0]
    return [price, *(least * 2.0**k for k in range(1, STEPS + 1))]


def _mixed(under: Under[D], pairs: int, budget: int, cheap: float, dear: float, best: D) -> D:
    """As many pairs as fit at the lower price.  Those whose backward comes first: memory is fullest then, and computing
    again needs some."""
    low, high = 0, pairs
    while low < high:
        k = (low + high + 1) // 2
        outcome = under([*[cheap] * k, dear])
        if outcome.times.peak[DEVICE] <= budget:
            low, best = k, outcome
        else:
            high = k - 1
    return best
