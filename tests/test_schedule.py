"""Laws of pipeline schedules: every step once and in an order that ends, bubbles as their formulas say, memory within
bounds, and a search that is never worse than the schedules with names."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace

import pytest

from mycel.errors import PlanError
from mycel.plan.list_schedules import searched
from mycel.plan.schedule import (
    NAMED,
    PipelineSchedule,
    StageCosts,
    StageStep,
    bound,
    interleaved,
    named,
    orders_text,
    read_orders,
    stages_a_rank,
    timeline,
)

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 3), (4, 8), (5, 10), (8, 16)]


def every_schedule() -> list[PipelineSchedule]:
    named_ones = [named(name, p, m) for name in NAMED for p, m in SIZES]
    return named_ones + [interleaved(p, m, 3) for p, m in SIZES]


def random_costs(stages: int, seed: int) -> StageCosts:
    draw = random.Random(seed)
    columns = [tuple(draw.uniform(0.2, 3.0) for _ in range(stages)) for _ in range(3)]
    return StageCosts(*columns, message=draw.choice([0.0, 0.1]))


@pytest.mark.parametrize("schedule", every_schedule(), ids=lambda s: f"{s.name}-{s.ranks}-{s.microbatches}")
def test_every_step_once_on_its_rank_and_no_circle(schedule):
    kinds = "FBW" if schedule.splits else "FB"
    steps = itertools.product(kinds, range(schedule.stages), range(schedule.microbatches))
    assert sorted(s for order in schedule.orders for s in order) == sorted(StageStep(*s) for s in steps)
    assert all(schedule.place[s.stage] == r for r, order in enumerate(schedule.orders) for s in order)
    done = []
    for _, step in schedule.in_time():
        assert all(a in done for a in schedule.awaited(step))
        done.append(step)
    for order in schedule.orders:  # sums over microbatches are taken in their order
        for key in {(s.kind, s.stage) for s in order}:
            own = [s.microbatch for s in order if (s.kind, s.stage) == key]
            assert own == sorted(own)


@pytest.mark.parametrize("p, m", [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("f, b, w", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 2.0, 1.0)])
def test_bubbles_are_those_of_the_formulas(p, m, f, b, w):
    def bubble(schedule: PipelineSchedule) -> float:
        v = schedule.stages // p
        return timeline(schedule, StageCosts.equal(schedule.stages, f / v, b / v, w / v)).bubble

    assert bubble(named("gpipe", p, m)) == pytest.approx((p - 1) * (f + b + w))
    assert bubble(named("1f1b", p, m)) == pytest.approx((p - 1) * (f + b + w))
    for v in (2, 3):
        assert bubble(interleaved(p, m, v)) == pytest.approx((p - 1) * (f + b + w) / v)
    if f == b == w:
        assert bubble(named("zbv", p, m)) == pytest.approx(0.0, abs=1e-9)
    if f == b and m >= 2 * p:
        assert bubble(named("dualpipev", p, m)) == pytest.approx((p - 1) * (f + b - w) / 2)
    assert bubble(named("zbh1", p, m)) == pytest.approx((p - 1) * (f + b - w))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 3), (8, 16)])
def test_what_ranks_hold(p, m):
    assert named("gpipe", p, m).held() == [m] * p
    assert named("1f1b", p, m).held() == [min(m, p - i) for i in range(p)]
    assert max(named("zbh1", p, m).held()) <= p
    assert max(named("zbv", p, m).held()) <= 2 * p
    assert max(named("dualpipev", p, m).held()) <= 2 * p + 1
    assert named("gpipe", p, m).held([2.0] * p) == [2.0 * m] * p


def test_a_circle_is_named():
    good = named("1f1b", 2, 2)
    turned = replace(good, name="turned", orders=(good.orders[0], good.orders[1][::-1]))
    with pytest.raises(PlanError, match=r"rank 1    at B1.1 waits for F1.1 of rank 1"):
        timeline(turned, StageCosts.equal(2))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("seed", range(6))
def test_searched_is_between_its_bound_and_the_best_with_a_name(name, seed):
    p, m = random.Random(seed).choice([(2, 3), (3, 4), (4, 6)])
    like = named(name, p, m)
    costs = random_costs(like.stages, seed)
    best = searched(like.place, m, costs)
    least, seconds = bound(like.place, m, costs), timeline(best, costs).seconds
    names = [n for n in NAMED if named(n, p, m).place == like.place]
    assert least <= seconds * (1 + 1e-12)
    assert seconds <= min(timeline(named(n, p, m), costs).seconds for n in names)
    assert all(least <= timeline(named(n, p, m), costs).seconds * (1 + 1e-12) for n in names)
    steps = [s for order in best.orders for s in order]
    assert len(steps) == len(set(steps)) == (3 if best.splits else 2) * like.stages * m


def test_bound_holds_for_all_orders_of_a_tiny_pipeline():
    """Two stages, two microbatches: no order at all is below the bound, and the search finds the best."""
    for seed in range(4):
        costs = random_costs(2, seed)
        steps = [[StageStep(k, s, m) for k in "FBW" for m in range(2)] for s in range(2)]
        orders = [[o for o in itertools.permutations(own) if _waits(o)] for own in steps]
        seconds = []
        for pair in itertools.product(*orders):
            with contextlib.suppress(PlanError):  # some wait in a circle
                seconds.append(timeline(PipelineSchedule("any", 2, (0, 1), True, pair), costs).seconds)
        assert bound((0, 1), 2, costs) <= min(seconds) + 1e-12
        searched_seconds = timeline(searched((0, 1), 2, costs), costs).seconds
        assert min(seconds) <= searched_seconds + 1e-12 and searched_seconds <= 1.1 * min(seconds)


def _waits(order: tuple[StageStep, ...]) -> bool:
    """Within a stage: forward before backward before weights, microbatches in turn."""
    at = {s: i for i, s in enumerate(order)}
    in_turn = all(at[s] < at[replace(s, microbatch=1)] for s in order if s.microbatch == 0)
    return in_turn and all(
        at[replace(s, kind=k)] < i for s, i in at.items() for k in "FB" if k != s.kind and _before(k, s)
    )


def _before(kind: str, step: StageStep) -> bool:
    return "FBW".index(kind) < "FBW".index(step.kind)


def test_orders_are_read_back():
    best = searched((0, 1, 2), 4, random_costs(3, 0))
    assert read_orders(orders_text(best), best.place, 4) == best
    with pytest.raises(PlanError, match="not that of this step"):
        read_orders(orders_text(best), best.place, 5)


def test_room_is_kept_or_refused():
    costs = StageCosts.equal(4)
    assert max(searched(range(4), 8, costs, room=4).held()) <= 4
    with pytest.raises(PlanError, match="a rank has room for 1, and needs"):
        searched(range(4), 8, costs, room=1)


def test_names():
    assert [stages_a_rank(n) for n in ("zbv", "1f1b", "interleaved", "interleaved 3")] == [2, 1, 2, 3]
    assert named("interleaved 3", 2, 4) == interleaved(2, 4, 3)
    with pytest.raises(PlanError, match="known     gpipe, 1f1b, interleaved, zbh1, zbv, dualpipev, searched"):
        named("2f2b", 2, 2)


@pytest.mark.parametrize("p", [2, 4, 5])
def test_forward_and_backward_in_turn(p):
    """In the middle of dualpipev, each forward step is followed by a backward step of the rank's other stage, of
    another microbatch: neither waits for the other."""
    m = 4 * p
    for rank, order in enumerate(named("dualpipev", p, m).orders):
        pairs = [(a, b) for a, b in itertools.pairwise(s for s in order if s.kind != "W") if a.kind == "F" != b.kind]
        apart = [(a, b) for a, b in pairs if a.stage != b.stage and a.microbatch != b.microbatch]
        assert len(apart) >= 2 * (m - 2 * p) + p and all(a.stage + b.stage == 2 * p - 1 for a, b in apart), rank


def test_drawn():
    assert str(timeline(named("1f1b", 2, 2), StageCosts.equal(2, 1, 1, 1))).splitlines() == [
        "rank 0  F0-F1-......B0----...B1----",
        "rank 1  ...F0-B0----F1-B1----",
    ]
