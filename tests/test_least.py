"""The least sum of tables: by elimination it is the one brute force finds; where variables are fixed first no single change improves it."""

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
    return min(s.value(dict(zip(s.sizes, v, strict=True))) for v in itertools.product(*(range(n) for n in s.sizes.values())))


@given(st.integers(1, 7), st.integers(0, 14), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_elimination_is_exact(variables, tables, rng):
    s = random_sum(rng, variables, tables, forbid=0.1)
    chosen, exact = s.least()
    assert exact and chosen.keys() == s.sizes.keys() and s.value(chosen) == brute(s)


@given(st.integers(3, 7), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_where_tables_are_too_large(variables, rng):
    """Some variables are fixed: the answer says so, and no single change improves it."""
    s = random_sum(rng, variables, 3 * variables)
    before, least.LARGEST = least.LARGEST, 8
    try:
        chosen, _ = s.least()
    finally:
        least.LARGEST = before
    found = s.value(chosen)
    assert found >= brute(s)
    for name, n in s.sizes.items():
        assert all(s.value({**chosen, name: k}) >= found for k in range(n))
