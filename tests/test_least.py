"""The least sum of tables: by elimination it is the one brute force finds, within a limit too; where tables grow too
large a bound is proved."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.plan import least, pairs
from mycel.plan.least import Least, Sum
from mycel.plan.pairs import Pairs


def random_sum(rng, variables, tables, forbid=0.0):
    s = Sum({f"x{i}": rng.randint(1, 4) for i in range(variables)})
    for _ in range(tables):
        names = rng.sample(list(s.sizes), rng.randint(1, min(2, variables)))
        table = np.array([rng.randint(0, 20) for _ in range(int(np.prod([s.sizes[n] for n in names])))], float)
        table[[i for i in range(1, len(table)) if rng.random() < forbid]] = np.inf
        s.add(names, table.reshape([s.sizes[n] for n in names]))
    return s


@contextlib.contextmanager
def tables_up_to(largest):
    """Inside, larger tables are not made."""
    before = pairs.LARGEST, pairs.WHOLE_TABLE
    pairs.LARGEST = pairs.WHOLE_TABLE = largest
    try:
        yield
    finally:
        pairs.LARGEST, pairs.WHOLE_TABLE = before


def all_sums(s):
    """Of every choice: an array with a dim for each variable."""
    names = list(s.sizes)
    sums = np.zeros(list(s.sizes.values()))
    for scope, t in s.tables:
        t = t.transpose(np.argsort([names.index(n) for n in scope]))
        sums = sums + t.reshape([s.sizes[n] if n in scope else 1 for n in names])
    return sums


def brute(s):
    return float(all_sums(s).min())


@given(st.integers(1, 7), st.integers(0, 14), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_elimination_is_exact(variables, tables, rng):
    s = random_sum(rng, variables, tables, forbid=0.1)
    answer = s.least()
    assert (
        answer.exact and answer.chosen.keys() == s.sizes.keys() and answer.value == s.value(answer.chosen) == brute(s)
    )


@given(st.integers(1, 7), st.integers(0, 20), st.sampled_from([1, 8, 1 << 14]), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_pairs(variables, tables, largest, rng):
    """Shrinking keeps the least sum, and what was removed follows from the rest; the bound is never above it."""
    s = random_sum(rng, variables, tables, forbid=0.1)
    lowest = brute(s)
    small = Pairs.of(s)
    small.shrink()
    chosen, exact = small.answer(s)
    assert exact and chosen.value == s.value(chosen.chosen) == lowest
    with tables_up_to(largest):
        answer = pairs.least(s)
    assert answer.chosen.keys() == s.sizes.keys() and answer.value == s.value(answer.chosen)
    assert answer.bound <= lowest + 1e-9 and lowest <= answer.value
    assert not answer.exact or answer.value <= lowest + 1e-9


@given(st.integers(4, 6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_diffusion(variables, rng):
    """Moved costs: every choice that is no dearer than the best known one costs what it did, and none less than the
    bound says; no value of a better answer is left out."""
    s = random_sum(rng, variables, 0)
    s.sizes = dict.fromkeys(s.sizes, 3)
    for a, b in itertools.combinations(s.sizes, 2):  # everyone has three neighbours or more
        s.add((a, b), [[rng.random() for _ in range(3)] for _ in range(3)])
    left, best = Pairs.of(s), {n: rng.randrange(3) for n in s.sizes}
    known = Least(best, s.value(best), -np.inf)
    left.diffuse(known)
    pairs_of = itertools.combinations(s.sizes, 2)
    moved = Sum(s.sizes, [*(((n,), t) for n, t in left.own.items()), *(((a, b), left.near[a][b]) for a, b in pairs_of)])
    before, after = all_sums(s), all_sums(moved) + left.settled
    assert (left.bound <= after + 1e-9).all() and (after <= before + 1e-9).all()
    assert np.allclose(after[before <= known.value], before[before <= known.value], rtol=0, atol=1e-9)
    left.leave_out(known)
    least_of_all = np.unravel_index(before.argmin(), before.shape)
    is_left = all(k in left.kept[n] for n, k in zip(s.sizes, least_of_all, strict=True))
    assert is_left or known.value == before.min()


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
