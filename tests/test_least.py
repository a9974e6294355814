"""The least sum of tables: by elimination it is the one brute force finds, within a limit too; where tables grow too
large a bound is proved."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.plan import least
from mycel.plan.least import Sum


def random_sum(rng, variables, tables, forbid=0.0):
    s = Sum({f"x{i}": rng.randint(1, 4) for i in range(variables)})
    for _ in range(tables):
        names = rng.sample(list(s.sizes), rng.randint(1, min(2, variables)))
        table = np.array([rng.randint(0, 20) for _ in range(int(np.prod([s.sizes[n] for n in names])))], float)
        table[[i for i in range(1, len(table)) if rng.random() < forbid]] = np.inf
        s.add(names, table.reshape([s.sizes[n] for n in names]))
    return s


def brute(s):
    return min(
        s.value(dict(zip(s.sizes, v, strict=True))) for v in itertools.product(*(range(n) for n in s.sizes.values()))
    )


@given(st.integers(1, 7), st.integers(0, 14), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_elimination_is_exact(variables, tables, rng):
    s = random_sum(rng, variables, tables, forbid=0.1)
    answer = s.least()
    assert (
        answer.exact and answer.chosen.keys() == s.sizes.keys() and answer.value == s.value(answer.chosen) == brute(s)
    )


@given(st.integers(1, 7), st.integers(0, 14), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_without_values_that_are_worse_the_least_is_the_same(variables, tables, rng):
    s = random_sum(rng, variables, tables, forbid=0.1)
    small, kept = s.without_worse()
    assert all(len(kept[n]) == k >= 1 for n, k in small.sizes.items())
    assert brute(small) == brute(s) == s.value(s.good())


@given(st.integers(3, 7), st.integers(1, 30), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_where_tables_are_too_large(variables, largest, rng):
    """The bound lies below the least sum, the answer above it, and no single change improves the answer."""
    s = random_sum(rng, variables, 3 * variables)
    before, least.LARGEST = least.LARGEST, largest
    try:
        answer = s.least()
    finally:
        least.LARGEST = before
    lowest = brute(s)
    assert answer.bound <= lowest + 1e-9 and lowest <= answer.value == s.value(answer.chosen)
    assert not answer.exact or answer.value == lowest
    for name, n in s.sizes.items():
        assert all(s.value({**answer.chosen, name: k}) >= answer.value for k in range(n))


@given(st.integers(1, 6), st.integers(0, 10), st.floats(0, 1), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_within_a_limit(variables, tables, tight, rng):
    s = random_sum(rng, variables, tables)
    s.weights = {
        n: np.array([float(rng.randint(0, 9)) for _ in range(k)]) for n, k in s.sizes.items() if rng.random() < 0.8
    }
    lightest, heaviest = (sum(float(f(w)) for w in s.weights.values()) for f in (np.min, np.max))
    limit = lightest + tight * (heaviest - lightest)
    answer = s.least(limit)
    within = [dict(zip(s.sizes, v, strict=True)) for v in itertools.product(*(range(n) for n in s.sizes.values()))]
    within = [c for c in within if sum(w[c[n]] for n, w in s.weights.items()) <= limit]
    assert sum(w[answer.chosen[n]] for n, w in s.weights.items()) <= limit
    assert answer.exact and answer.value == s.value(answer.chosen) == min(map(s.value, within))
    assert not s.weights or s.least(lightest - 1).value == np.inf
