"""Random numbers, clocks, iterators and variables of the process: what Python gives anew at every call."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
import torch
from models import same
from test_capture import X, agrees
from torch import nn

import mycel


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.uniform(0.0, 1.0),
        lambda: random.randint(0, 1),
        lambda: random.randrange(2),
        lambda: random.gauss(0.5, 0.3),
        lambda: np.random.rand(),
        lambda: np.random.uniform(0, 1),
        lambda: np.random.randint(2),
        lambda: np.random.normal(loc=0.5, scale=1.0),
        lambda: np.random.beta(0.4, 0.4),
        lambda: np.random.gamma(1.0, size=None),
        lambda: random.expovariate(1.0),
        lambda: np.random.poisson(0.7),
        lambda: np.random.binomial(n=1, p=0.5),
        lambda: np.random.choice(2),
        lambda: random.choice([0.1, 0.9]),
    ],
)
def test_numbers_of_python_are_drawn_at_every_call(draw):
    def fn(x):
        if draw() < 0.5:
            return x * 2
        return x * 3

    torch.manual_seed(0)
    fast = mycel.jit(fn)
    results = [fast(X) for _ in range(30)]
    assert all(torch.equal(y, X * 2) or torch.equal(y, X * 3) for y in results)
    assert 5 <= sum(torch.equal(y, X * 2) for y in results) <= 25
    assert len(fast.entries) == 1
    torch.manual_seed(0)
    assert all(torch.equal(fast(X), y) for y in results)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * random.choices([1, 2])[0],
        lambda x: x * np.random.default_rng().random(),
        lambda x: x * random.Random(None).random(),
        lambda x: x[torch.from_numpy(np.random.permutation(2))],
        lambda x: x * torch.from_numpy(np.random.rand(3)),
    ],
)
def test_other_draws_are_refused(fn):
    with pytest.raises(mycel.CaptureError, match="every call would use the same"):
        mycel.jit(fn, strict=True)(X)


def test_iterators_of_others_are_refused():
    with pytest.raises(mycel.CaptureError, match=r"ITEMS.0, a range_iterator that lives outside of the function"):
        mycel.jit(lambda x: x * next(ITEMS[0]), strict=True)(X)


ITEMS = (iter(range(1, 100)),)


def test_iterators_of_the_function_itself_and_clocks():
    layer = nn.Linear(3, 3)
    agrees(lambda x: x * next(iter([2.0, 3.0])) * next(layer.parameters()).sum(), X)
    with pytest.warns(UserWarning, match=r"time\(\) is called when the code is captured"):
        mycel.jit(lambda x: x + 0 * time.time())(X)


def test_variables_of_the_process_are_part_of_the_signature(monkeypatch):
    def fn(x):
        factor = float(os.environ.get("MYCEL_TEST_FACTOR", "1"))
        return x * factor if "MYCEL_TEST_SIGN" in os.environ else x - factor

    fast = mycel.jit(fn, strict=True)
    for name, value in ((None, None), ("MYCEL_TEST_FACTOR", "3"), ("MYCEL_TEST_SIGN", "on"), ("OTHER", "x")):
        if name is not None:
            monkeypatch.setenv(name, value)
        same(fast(X), fn(X))
    assert len(fast.entries) == 3


@pytest.mark.parametrize(
    "drawn, plain",
    [
        (lambda: np.random.beta(0.3, 0.6), lambda n: np.random.beta(0.3, 0.6, n)),
        (lambda: np.random.gamma(2.0, 1.5), lambda n: np.random.gamma(2.0, 1.5, n)),
        (lambda: random.gammavariate(2.0, 1.5), lambda n: np.random.gamma(2.0, 1.5, n)),
        (lambda: np.random.exponential(2.0), lambda n: np.random.exponential(2.0, n)),
        (lambda: random.expovariate(0.5), lambda n: np.random.exponential(2.0, n)),
        (lambda: np.random.poisson(3.0), lambda n: np.random.poisson(3.0, n)),
        (lambda: np.random.binomial(10, 0.3), lambda n: np.random.binomial(10, 0.3, n)),
        (lambda: random.choice((1, 2, 6)), lambda n: np.random.choice([1, 2, 6], n)),
    ],
)
def test_numbers_are_drawn_as_numpy_draws_them(drawn, plain):
    """Mean and deviation of many."""
    torch.manual_seed(0)
    np.random.seed(0)
    fast, x = mycel.jit(lambda x: x * drawn(), strict=True), torch.ones((), dtype=torch.float64)
    mine = np.array([float(fast(x)) for _ in range(800)])
    wanted = plain(100_000)
    error = wanted.std() / len(mine) ** 0.5
    assert abs(mine.mean() - wanted.mean()) < 4 * error
    assert mine.std() == pytest.approx(wanted.std(), rel=0.2)


def test_mixup_is_no_island():
    def mixup(x, alpha=0.4):
        share = np.random.beta(alpha, alpha) if alpha > 0 else 1.0
        return share * x + (1 - share) * x[torch.randperm(len(x))]

    x = torch.arange(6.0)
    fast = mycel.jit(mixup, strict=True)
    results = [fast(x) for _ in range(4)]
    assert len({tuple(y.tolist()) for y in results}) == 4
    for y in results:
        torch.testing.assert_close(y.sum(), x.sum())


class Noisy(torch.autograd.Function):
    """Noise on the way, and other noise on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, g):
        return g + torch.randn_like(g)


def test_functions_with_a_gradient_of_their_own_draw_anew_wherever_they_are_called():
    def fn(x):
        return Noisy.apply(x), Noisy.apply(x), torch._standard_gamma(x + 1), torch._standard_gamma(x + 1)

    x = torch.zeros(3, dtype=torch.float64)
    a, b, c, d = mycel.jit(fn, strict=True)(x)
    assert not torch.equal(a, b) and not torch.equal(c, d)
    torch.manual_seed(0)
    value, slope = mycel.value_and_grad(lambda x: (Noisy.apply(x) * torch.tensor([1.0, 0, 0])).sum())(x)
    assert abs(float(slope[0] - 1)) != pytest.approx(abs(float(value)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda n, g: torch.rand(n, generator=g),
        lambda n, g: torch.randn((n,), generator=g),
        lambda n, g: torch.randint(1 << 40, (n,), generator=g),
        lambda n, g: torch.randint(-(1 << 40), 1 << 40, (n,), generator=g),
        lambda n, g: torch.randperm(1000 * n, generator=g)[:n],
    ],
)
def test_no_generator_is_as_none_given(draw):
    fast = mycel.jit(lambda x: x * draw(4, None), strict=True)
    x = torch.ones(4, dtype=torch.float64)
    torch.manual_seed(3)
    one, other = fast(x), fast(x)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    assert torch.equal(fast(x), one)
