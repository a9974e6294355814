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
        lambda: np.random.normal(0.5, 1.0),
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
        lambda x: x * random.choice([1, 2]),
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
