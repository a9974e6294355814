"""The search equals brute force over whole plans of tiny models: meshes of two to eight devices on their wires x ZeRO x
microbatches x stages and their schedules x what is computed again, within memory limits; and its bound is never above
the best of all.  Not among them: codecs, places and, beside stages, what lies on the host."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from tiny_plans import Tiny, TinyStep, deep_step, every_pipeline, staged_step, tiny_step

from mycel.errors import PlanError
from mycel.offloading import FAR
from mycel.plan import KINDS, decide, ladder
from mycel.plan.cluster import Cluster
from mycel.search_order import GAIN
from mycel.search_space import Shape
from mycel.search_text import data

CLOSE = 1 + 1e-6  # the same but for what a rounded cut may cost


def none_is_faster(plan_search, shapes):
    """What a search finds is the least of all plans, and its bound is not above that."""
    answer = plan_search.run()
    least = min((plan_search.price(shape) for shape in shapes), key=lambda c: c.seconds)
    assert answer.bound <= least.seconds
    assert answer.best.seconds <= least.seconds * CLOSE, f"{answer.best.shape}, but {least.shape}"


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_all_is_faster(seed):
    step, shapes = tiny_step(random.Random(seed))
    none_is_faster(step.search(), shapes)


@pytest.mark.parametrize("seed", range(12))
def test_no_pipeline_of_all_is_faster(seed):
    step, shapes = staged_step(random.Random(seed))
    none_is_faster(step.search(), shapes)


@pytest.mark.parametrize("seed", range(6))
def test_no_pipeline_of_all_within_a_limit_is_faster(seed):
    rng = random.Random(seed)
    step, shapes = staged_step(rng)
    peaks = [c.peak for c in map(step.search(recompute="none").price, shapes)]
    limit = round(min(peaks) + rng.uniform(-0.2, 1) ** 2 * (max(peaks) - min(peaks)))
    plan_search = step.search(memory=limit)
    every = [c for c in map(plan_search.price, shapes) if c.fits]
    again = step.search(memory=limit)
    if not every:
        with pytest.raises(PlanError, match="no plan fits"):
            again.run()
        return
    answer, least = again.run(), min(every, key=lambda c: c.seconds)
    assert answer.bound <= least.seconds and answer.best.peak <= limit
    assert answer.best.seconds <= least.seconds * CLOSE, f"{answer.best.shape}, but {least.shape}"


@pytest.mark.parametrize("seed", range(8))
def test_no_pipeline_of_a_deep_model_is_faster(seed):
    """Priced from a few of its layers."""
    step = deep_step(random.Random(seed))
    plan_search = step.search()
    none_is_faster(plan_search, every_pipeline(step))
    assert plan_search.is_shallow


@pytest.mark.parametrize("seed", range(38))
def test_no_plan_of_all_within_a_limit_is_faster(seed):
    """All of backward's values kept, all computed again that can be, or what the limit asks for.  The last of these
    keeps what is worth moving four times (`KEEPING`), so plans that are told to keep or to compute all may differ."""
    rng = random.Random(seed)
    step, shapes = tiny_step(rng)
    fixed = [c for how in ("none", "full") for c in map(step.search(recompute=how).price, shapes)]
    low, high = min(c.peak for c in fixed), max(c.peak for c in fixed)
    limit = round(low + rng.uniform(-0.05, 1) ** 2 * (high - low))
    plan_search = step.search(memory=limit)
    every = [c for c in map(plan_search.price, shapes) if c.fits]
    told = min((c.seconds for c in fixed if c.peak <= limit), default=float("inf"))
    again = step.search(memory=limit)
    if not every and told == float("inf"):
        with pytest.raises(PlanError, match="no plan fits"):
            again.run()
        return
    answer, least = again.run(), min(every, key=lambda c: c.seconds)
    assert answer.bound <= min(least.seconds, told) and answer.best.peak <= limit
    assert answer.best.seconds <= least.seconds * CLOSE, f"{answer.best.shape}, but {least.shape} {least.again}"
    assert answer.best.seconds <= told * (1 + GAIN)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_computed_again_is_told_by_its_seconds(count):
    """By hand, on a device where nothing but products takes time: of each layer the first is computed again, which the
    gradient of the second needs; the second is not, nor is the head."""
    layers, width, inner, rows, words, rate = 2, 64, 256, 48, 96, 1e9
    device = {"half": 2 * rate, "single": rate, "bytes_s": 1e13, "memory": "1GiB", "launch_s": 1e-12}
    with torch.device("meta"):
        model, x = Tiny(layers, width, inner, False, words, 3), torch.empty(rows, 8, dtype=torch.int64)
    step = TinyStep(model, {"x": x, "y": x}, Cluster.read({"device": device, "devices": 1}), 0.0)
    answer = step.search(recompute="full", microbatches=count).run()
    product_s, head_s = (2 * rows * 8 * width * n / rate for n in (inner, words))
    seconds = data(answer)["plans"][0]["seconds"]
    assert seconds["recomputation"] == pytest.approx(layers * product_s, rel=1e-3)
    assert seconds["compute"] == pytest.approx(3 * (layers * 2 * product_s + head_s), rel=1e-3)
    kept = data(step.search(recompute="none", microbatches=count).run())["plans"][0]["seconds"]
    assert kept["recomputation"] == 0.0 and kept["compute"] == pytest.approx(seconds["compute"], rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_values_to_compute_again_are_faster(seed):
    """Of one plan: every price of a byte for every pair of layer and backward, each lowered."""
    rng = random.Random(seed)
    step, _ = tiny_step(rng)
    while step.model.table is None or len(step.model.layers) == 1 or step.model.layers[0].turns == 1:  # pairs of blocks
        step, _ = tiny_step(rng)
    plan_search = step.search()
    laid_out = plan_search._laid_out(plan_search.step(), plan_search.written(Shape()))
    prices = ladder(laid_out.costs)
    every = [laid_out.under(each) for each in itertools.product(prices, repeat=laid_out.pairs)]
    peaks = sorted({x.times.peak["device"] for x in every})
    for limit in peaks:
        least = min(x.times.seconds for x in every if x.times.peak["device"] <= limit)
        decided = decide(laid_out.under, laid_out.pairs, laid_out.costs, limit)
        assert decided.times.peak["device"] <= limit
        assert decided.times.seconds <= least * 1.001, (limit, decided.times.seconds / least)
    assert laid_out.pairs == 2


def every_offload() -> list[dict[str, str]]:
    """All that may be on the host, each kind all or nothing; state that is there is updated here or there."""
    kinds = [dict(zip(KINDS, each, strict=True)) for each in itertools.product(("none", "host"), repeat=len(KINDS))]
    return [
        {**kind, "update": where}
        for kind in kinds
        for where in (("device", "host") if kind["optimizer"] == "host" else ("device",))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_offload_within_a_limit_is_faster(seed):
    """But for what is left alone because it could gain little; and the bound is below all of them."""
    rng = random.Random(seed)
    step, _ = tiny_step(rng)
    while not step.momentum or len(step.batch["x"]) % step.cluster.world:
        step, _ = tiny_step(rng)
    shape = Shape(dp=step.cluster.world)
    free = step.search().price(shape).peak
    limit = round(free * rng.uniform(0.6, 0.95))
    every = [step.search(memory=limit, offload=each).price(replace(shape, offload=True)) for each in every_offload()]
    plan_search = step.search(memory=limit)
    auto = plan_search.price(replace(shape, offload=True))
    seconds = [c.seconds for c in every if c.fits]
    assert auto.fits == bool(seconds)
    if seconds:
        assert auto.peak <= limit and plan_search.bound <= min(seconds)
        assert auto.seconds <= min(seconds) * (1 + FAR)
