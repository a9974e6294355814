"""What a search says beside its table: why a plan lost, what would be faster and changes numbers, and what is missing
where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from mycel.candidates import Answer, Candidate
from mycel.errors import PlanError
from mycel.plan.cluster import Cluster
from mycel.plan.compression import CANDIDATES
from mycel.search_order import Pricing, SearchOrder
from mycel.search_space import Shape
from mycel.sizes import rounded_up, shown, span

WAITING = 0.2  # the share of a step above which it is said that ranks wait for each other
LEFT_TO_THE_SEARCH = ("recompute", "offload", "microbatches", "zero", "stages", "parameters", "activations", "mesh")
ASKED = 8  # times, how much memory a plan needs
LOOKED_AT = 3  # plans that are named where the time was too short, or asked for what is missing
MORE_DEVICES = (2, 4, 8, 16, 32, 64)  # times


class Searching(Pricing, Protocol):
    """What is asked of a search."""

    def run(self) -> Answer: ...
    def on_one_host(self) -> Searching: ...
    def otherwise(
        self, cluster: Cluster | None = ..., memory: int | None = ..., without: Collection[str] = ...
    ) -> Searching: ...
    def is_given(self, name: str) -> bool: ...
    def with_rows(self, rows: int) -> Searching | None: ...
    def first_fit(self) -> Candidate | None: ...
    def price(self, shape: Shape) -> Candidate: ...
    def bytes_of(self, kind: str) -> int: ...


def remarked(search: Searching, answer: Answer) -> Answer:
    """With what would be faster and changes numbers; interrupted, without."""
    best = answer.best
    if best is None or answer.interrupted:
        return answer
    try:
        fewer = _on_fewer_devices(search, best) if answer.complete else ()
        return replace(answer, remarks=(*answer.remarks, *_with_encoded_gradients(search, best), *fewer))
    except KeyboardInterrupt:
        return replace(answer, interrupted=True)


def _with_encoded_gradients(search: Searching, best: Candidate) -> Iterator[str]:
    if search.given.codecs or best.exposed < WAITING * best.seconds:
        return
    shapes = [replace(c.shape, compress=CANDIDATES[1]) for c in SearchOrder(search).worth_encoding()]
    other = min((search.price(shape) for shape in shapes), key=lambda c: c.seconds, default=best)
    if other.seconds < (1 - WAITING / 2) * best.seconds:
        saved = 1 - other.seconds / best.seconds
        yield (
            f"{other.shape} would save {100 * saved:.0f} % of a step ({span(other.seconds)}); gradients "
            "are then not quite the same: compress: auto in the plan"
        )


def _on_fewer_devices(search: Searching, best: Candidate) -> Iterator[str]:
    """Where ranks wait for other hosts, and one host could compute it all in less time: would it?"""
    given, cluster = search.given, search.cluster
    is_fixed = given.mesh is not None or given.pp > 1 or bool(given.place) or given.sync is not None
    if is_fixed or cluster.hosts == 1 or best.exposed < WAITING * best.seconds:
        return
    limit = (1 - WAITING / 2) * best.seconds
    if search.bound * cluster.hosts > limit:
        return
    try:
        other = search.on_one_host().run().best
    except PlanError:  # it does not fit there
        return
    if other is not None and other.seconds < limit:
        waiting = f"{100 * best.exposed / best.seconds:.0f} %"
        yield (
            f"the {cluster.devices} devices of one host would take {span(other.seconds)} ({other.shape}), "
            f"less than these {cluster.world}, which wait for each other {waiting} of a step: others may stay "
            "idle, or a larger batch gives them more to do"
        )


def explained(candidate: Candidate, best: Candidate) -> Candidate:
    """With why it lost."""
    if candidate is best or not candidate.fits or candidate.times is None or best.times is None:
        return candidate
    computing = candidate.times.totals["compute"] - best.times.totals["compute"]
    again = " again" if 2 * (candidate.again - best.again) > computing else ""
    level = max(candidate.sent, key=lambda k: candidate.sent[k] - best.sent.get(k, 0.0), default="links")
    more = {
        f"of computing{again}": computing,
        f"waiting for messages over {level}": candidate.exposed - best.exposed,
        "of bubbles": candidate.bubble - best.bubble,
        "waiting for copies to and from the host": candidate.moving - best.moving,
    }
    what, seconds = max(more.items(), key=lambda each: each[1])
    return replace(candidate, why=f"+{span(seconds)} {what}") if seconds > 0 else candidate


def too_short(search: Searching, ranked: Sequence[Candidate], seconds: float) -> PlanError:
    """The time was over before a plan was found that fits: of the others nothing is known."""
    looked = "one plan" if len(ranked) == 1 else f"{len(ranked)} plans"
    lines = [f"{c.shape}: {c.why}" for c in sorted(ranked, key=lambda c: (c.short, str(c.shape)))[:LOOKED_AT]]
    more = [f"and {len(ranked) - LOOKED_AT} more"] if len(ranked) > LOOKED_AT else []
    return PlanError(
        f"the time was too short to find a plan that fits {shown(search.memory or 0)} a device; there may be one\n"
        f"  after     {span(seconds)}, {looked} of those there are\n"
        "  looked at " + "\n            ".join([*lines, *more]) + "\n"
        f"  try       --seconds {math.ceil(4 * seconds)}, or none: all of them"
    )


def nothing_fits(search: Searching, ranked: Sequence[Candidate]) -> PlanError:
    """How much is missing, and the smallest change of each kind under which a plan fits."""
    least = min((search.held(c.shape) for c in ranked), default=0.0)
    parameters, state = search.bytes_of("parameter"), search.bytes_of("state")
    nearest = min(ranked, key=lambda c: (c.short, search.held(c.shape)))
    memory = search.memory or 0
    changes = list(_that_fit(search, ranked, nearest)) or ["a smaller batch, with more devices"]
    changes += ["more of the host's"] if any("on the host" in c.why for c in ranked) else []
    return PlanError(
        f"no plan fits {shown(memory)} a device\n"
        f"  needs     at least {shown(least)} for {shown(parameters)} of parameters and {shown(state)} of state\n"
        f"  nearest   {nearest.shape}: {nearest.why}\n"
        f"  try       {', or '.join(changes)}"
    )


def _that_fit(search: Searching, ranked: Sequence[Candidate], nearest: Candidate) -> Iterator[str]:
    """What fits, each tried, and as little of it as is enough; what costs least comes first: another plan, the faster
    before the slower; memory that the device has; a smaller batch, which is another training; a larger device; more of
    them."""
    given = [name for name in LEFT_TO_THE_SEARCH if search.is_given(name)]
    without = [(name, best) for name in given if (best := search.otherwise(without=(name,)).first_fit())]
    for name, best in sorted(without, key=lambda each: each[1].seconds):
        yield f"the plan without {name} ({best.shape})"
    least, there = _least_memory(search, ranked), search.cluster.memory or 0
    memory = [f"{shown(least[0])} a device ({least[1]})"] if least is not None else []
    is_there = least is not None and least[0] <= there
    yield from memory if is_there else ()
    if search.held(nearest.shape) < (search.memory or 0) and (smaller := _smaller_batch(search, nearest)) is not None:
        yield smaller
    yield from () if is_there else memory
    if (more := _fewest_hosts(search)) is not None:
        yield more


def _least_memory(search: Searching, ranked: Sequence[Candidate]) -> tuple[int, Shape] | None:
    """For the plans of which least is missing: a refusal says what is missing at the least, so it is asked again with
    as much more."""
    least: tuple[int, Shape] | None = None
    here = search.memory or 0
    for candidate in sorted(ranked, key=lambda c: (c.short, search.held(c.shape)))[:LOOKED_AT]:
        short, needed = candidate.short, float(here)
        for _ in range(ASKED):
            if short == float("inf"):
                break
            needed = rounded_up(needed + max(short, 1.0))
            if least is not None and needed >= least[0]:
                break
            again = search.otherwise(memory=int(needed)).price(candidate.shape)
            if again.fits:
                least = int(needed), candidate.shape
                break
            short = again.short
    return least


def _smaller_batch(search: Searching, nearest: Candidate) -> str | None:
    """Half of the rows, or half of these, under the plan of which least is missing."""
    rows = search.space.rows // 2
    while rows >= max(nearest.shape.replicas, 1) and (other := search.with_rows(rows)) is not None:
        count = min(nearest.shape.microbatches, rows // nearest.shape.replicas)
        best = other.price(replace(nearest.shape, microbatches=count))
        if best.fits:
            return f"a batch of {rows} rows ({best.shape})"
        rows //= 2
    return None


def _fewest_hosts(search: Searching) -> str | None:
    """More of them, of the same kind."""
    cluster = search.cluster

    def fitting(count: int) -> tuple[Cluster, Candidate] | None:
        more = cluster.times(2 if not cluster.sizes else count)
        more = more if cluster.sizes else replace(more, hosts=count)
        best = search.otherwise(cluster=more, without=("mesh", "place")).first_fit()
        return (more, best) if best is not None else None

    first = 1 if cluster.sizes else cluster.hosts
    too_few, enough, there = first, 0, None
    for times in MORE_DEVICES:
        if (there := fitting(first * times)) is not None:
            enough = first * times
            break
        too_few = first * times
    while there is not None and enough - too_few > 1:
        between = (too_few + enough) // 2
        fewer = fitting(between)
        too_few, enough, there = (between, enough, there) if fewer is None else (too_few, between, fewer)
    return f"{there[0].world} devices ({there[1].shape})" if there is not None else None
