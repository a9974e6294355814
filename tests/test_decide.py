"""What forward keeps for backward, and how much leaves the device: the last that fits is found in few tries, whatever
memory grows by, and prices tried from the lowest on give what those tried from the middle give."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest

from mycel.errors import PlanError
from mycel.ir import DEVICE, Program
from mycel.plan import CPU, Costs, Times, decide, ladder, last_that_fits
from mycel.plan.decide import FINE

NOTHING = Times(0.0, {}, {}, 0, "")


@dataclass(frozen=True)
class Choice:
    times: Times
    name: object = None


def needing(size: float, name: object = None) -> Choice:
    return Choice(replace(NOTHING, peak={DEVICE: int(size)}), name)


GROWTH = {
    "evenly": lambda chance: 1.0,
    "anyhow": lambda chance: chance.choice([0.0, 0.1, 1.0, 20.0]),
    "late": lambda chance: 0.0 if chance.random() < 0.97 else 50.0,
}


@pytest.mark.parametrize("growth", GROWTH)
def test_the_last_that_fits(growth):
    for seed in range(200):
        chance = random.Random(seed)
        sizes = [1000 * x for x in accumulate([10.0, *(GROWTH[growth](chance) for _ in range(chance.randint(0, 300)))])]
        count, tried = len(sizes) - 1, []

        def at(k, sizes=sizes, tried=tried):
            tried.append(k)
            return needing(sizes[k], k)

        budget = chance.uniform(sizes[0], 1.1 * sizes[-1])
        want = max(k for k, size in enumerate(sizes) if size <= budget)
        index, choice = last_that_fits(count, at, budget, needing(sizes[0], 0))
        assert choice.name == index and sizes[index] <= budget
        assert 0 <= want - index < max(1, count // FINE), (seed, index, want)
        assert len(tried) == len(set(tried)) <= 4 * max(count, 1).bit_length()
        if growth == "evenly":
            assert len(tried) <= 6


@pytest.mark.parametrize("seed", range(20))
def test_prices_from_the_lowest_on(seed):
    """Each higher price needs less memory: both ways end at the lowest that fits."""
    costs = Costs(Program({}), CPU, True)
    prices = ladder(costs)
    chance = random.Random(seed)
    sizes = sorted((chance.randint(100, 10_000) for _ in prices), reverse=True)
    budget = chance.randint(100, 10_000)

    def under(given):
        return needing(sizes[prices.index(given[-1])], given[-1])

    def decided(upwards):
        try:
            return decide(under, 0, costs, budget, upwards=upwards).name
        except PlanError:
            return None

    assert decided(True) == decided(False)
    fitting = [price for price, size in zip(prices, sizes, strict=True) if size <= budget]
    if decided(True) is None:
        assert fitting in ([], prices[-1:])  # the dearest is not tried
    else:
        assert decided(True) == fitting[0]
