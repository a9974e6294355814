"""What a search says beside its table: why a plan lost, what would be faster and changes numbers, and what is missing
where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from mycel.candidates import Answer, Candidate
from mycel.errors import PlanError
from mycel.plan.compression import CANDIDATES
from mycel.search_order import Pricing, SearchOrder
from mycel.search_space import Shape
from mycel.sizes import shown, span

WAITING = 0.2  # the share of a step above which it is said that ranks wait for each other


class Searching(Pricing, Protocol):
    """What is asked of a search."""

    def run(self) -> Answer: ...
    def on_one_host(self) -> Searching: ...
    def price(self, shape: Shape) -> Candidate: ...
    def bytes_of(self, kind: str) -> int: ...


def remarked(search: Searching, answer: Answer) -> Answer:
    """With what would be faster and changes numbers; interrupted, without."""
    best = answer.best
    if best is None:
        return answer
    try:
        fewer = _on_fewer_devices(search, best) if answer.complete else ()
        return replace(answer, remarks=(*_with_encoded_gradients(search, best), *fewer))
    except KeyboardInterrupt:
        return answer


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
    is_fixed = given.mesh is not None or given.pp > 1 or bool(given.place)
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
    waiting = candidate.exposed - best.exposed
    if computing > waiting:
        why = f"+{span(computing)} of computing" + (" again" if 2 * (candidate.again - best.again) > computing else "")
    else:
        level = max(candidate.sent, key=lambda k: candidate.sent[k] - best.sent.get(k, 0.0), default="links")
        why = f"+{span(waiting)} waiting for messages over {level}"
    return replace(candidate, why=why)


def nothing_fits(search: Searching, ranked: Sequence[Candidate]) -> PlanError:
    least = min((search.held(c.shape) for c in ranked), default=0.0)
    parameters, state = search.bytes_of("parameter"), search.bytes_of("state")
    nearest = min(ranked, key=lambda c: search.held(c.shape)) if ranked else None
    memory = search.memory or 0
    devices = -(-int(parameters + state) // max(1, int(memory * 0.8)))
    return PlanError(
        f"no plan fits {shown(memory)} a device\n"
        f"  needs     at least {shown(least)} for {shown(parameters)} of parameters and {shown(state)} of state\n"
        f"  nearest   {nearest.shape if nearest else ''}: {nearest.why if nearest else ''}\n"
        f"  try       {max(devices, search.cluster.world * 2)} devices, a smaller batch, or more memory"
        + (", or more of the host's" if any("on the host" in c.why for c in ranked) else "")
    )
