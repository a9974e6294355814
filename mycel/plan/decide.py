"""What forward keeps for backward: the fastest that fits a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from mycel.errors import PlanError
from mycel.ir import DEVICE
from mycel.plan.clock import Times
from mycel.plan.cost import Costs
from mycel.plan.residuals import KEEPING
from mycel.sizes import shown

STEPS = 24  # prices tried, each twice the one before
FINE = 64  # parts of what is counted


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
    upwards: bool = False,
) -> D:
    """What to keep for backward: the fastest that fits the budget.  `under` gives the step under prices, which may
    differ between its `pairs` of calls.

    `recompute`, as a plan says it.  full: everything that can be is computed again; none: only what a compiler would
    merge into its use.  `slack`: where all that is tried first needs more than the budget by this share, no other price
    is tried.  `upwards`: a low price is likely to do, so they are tried from the lowest on, at growing distances."""
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
    peaks = {0: peak}
    low, high = 0, len(prices) - 1  # the price at `low` is too low, that at `high` is not known to be enough

    def fits(k: int) -> bool:
        nonlocal smallest, best
        outcome = under([prices[k]])
        peaks[k] = outcome.times.peak[DEVICE]
        smallest = min(smallest, outcome.times, key=lambda t: t.peak[DEVICE])
        best = outcome if peaks[k] <= budget else best
        return peaks[k] <= budget

    while high - low > 1:
        k = min(max(2 * low, 1), high - 1) if upwards and best is None else (low + high) // 2
        low, high = (low, k) if fits(k) else (k, high)
    if best is None and smallest.peak[DEVICE] <= budget * (1 + slack):
        # computing much again needs memory too: a lower price may need less
        for k in _beside_least(peaks) if upwards else range(1, (len(prices) - 1) // 2):
            if fits(k):
                low, high = max(i for i in peaks if i < k), k
                break
    if best is not None:
        return _mixed(under, pairs, budget, prices[low], prices[high], best, peaks[low])
    peak = smallest.peak[DEVICE]
    raise PlanError(
        f"a step needs at least {shown(peak)}, the budget is {shown(budget)}: {shown(peak - budget)} too much\n"
        f"  of which  {shown(smallest.held)} are parameters, optimiser state and the batch\n"
        f"  peak      {smallest.at or 'in the update'}\n"
        f"{_stages_line(smallest)}"
        "  tried     computing everything again that can be\n"
        f"  try       {less(smallest)}"
    )


def _beside_least(peaks: Mapping[int, int]) -> list[int]:
    """Of numbers with what they need: those half way from the one that needs least to the next on each side."""
    least = min(peaks, key=lambda k: peaks[k])
    below, above = [k for k in peaks if k < least], [k for k in peaks if k > least]
    candidates = ([(max(below) + least) // 2] if below else []) + ([(least + min(above)) // 2] if above else [])
    return [k for k in candidates if k not in peaks]


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


def _mixed(under: Under[D], pairs: int, budget: int, cheap: float, dear: float, best: D, over: int) -> D:
    """As many pairs as fit at the lower price, at which all need `over` bytes.  Those whose backward comes first:
    memory is fullest then, and computing again needs some."""
    return last_that_fits(pairs, lambda k: under([*[cheap] * k, dear]), budget, best, over)[1]


def last_that_fits(
    count: int, at: Callable[[int], D], budget: float, first: D, over: int | None = None
) -> tuple[int, D]:
    """Of 0 … count, which need ever more memory, the last that fits, and what that is; of many, to within a 64th of
    them.  `first`: what 0 is, which fits; `over`: about what the last needs, where that is known to be too much.  It is
    looked for where the line through the last two that need too much (or through one of them and the last that fits)
    meets the budget, where that helps, else in the middle."""
    low, best, stalled = 0, first, 0
    beyond = [(count + 1, over)] if over is not None else list[tuple[int, int]]()  # what needs too much, and its bytes
    if over is None and count:
        last = at(count)
        if last.times.peak[DEVICE] <= budget:
            return count, last
        beyond.append((count, last.times.peak[DEVICE]))
    while beyond and beyond[-1][0] - low > max(1, count // FINE):
        high, most = beyond[-1]
        k = (low + high) // 2
        far, bytes_far = beyond[-2] if len(beyond) > 1 else (low, best.times.peak[DEVICE])
        slope = (bytes_far - most) / (far - high)
        if slope > 0 and far and stalled < 3:
            k = min(max(high - math.ceil((most - budget) / slope), low + 1), high - 1)
        outcome = at(k)
        if outcome.times.peak[DEVICE] <= budget:
            stalled = 0 if 2 * (k - low) >= high - low else stalled + 1
            low, best = k, outcome
        else:
            stalled = 0 if 2 * (k - low) <= high - low else stalled + 1
            beyond.append((k, outcome.times.peak[DEVICE]))
    return low, best
