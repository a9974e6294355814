"""Python numbers that code asks of tensors whose values are not known: they stay tensors, and mean what they do."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from models import same
from torch import nn

import mycel
from mycel.errors import CaptureError

WEIGHT = nn.Parameter(torch.linspace(-1, 2, 6, dtype=torch.float64))
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


def scaled(h):
    return h * h.sum().item()


def decided(h):
    return h * 2.0 if h.mean().item() > 0.1 else h - 1


def clamped(h):
    return h / max(float(h.norm()), 1.0) + min(h.max().item(), 0.5)


def counted(h):
    return h * int(h.abs().sum()) / (1 + int(-h.abs().sum()))


def in_steps(h):
    steps = 0
    for _ in range(40):
        h = h * 0.8
        if h.abs().max().item() < 0.3:
            break
        steps += 1
    return h + steps


def listed(h):
    low, *_, high = h[0].tolist()
    return h * (high - low) + sum(h[:, 1].tolist())


def checked(h):
    size = h.norm().item()
    if math.isnan(size) or not math.isfinite(size):
        return h * 0
    return h / math.sqrt(size) + math.floor(size)


def kept_in_float32(h):
    return h.float() * (h.sum().item() / 3)


PROGRAMS = [scaled, decided, clamped, counted, in_steps, listed, checked, kept_in_float32]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_numbers_are_those_of_torch(program, scale):
    """Values, dtypes and gradients: none flows through a number."""
    fast = mycel.jit(lambda x: program(x * WEIGHT), strict=True)
    results = []
    for f in (fast, lambda x: program(x * WEIGHT)):
        x = (X * scale).requires_grad_()
        y = f(x)
        results.append((y, torch.autograd.grad(y.sum(), [x, WEIGHT])))
    same(*results)
    assert results[0][0].dtype == results[1][0].dtype
    fast(X * 0.01)
    assert len(fast.entries) == 1  # whatever the values


class Logs(nn.Module):
    """Keeps numbers where Python code looks for them."""

    def __init__(self):
        super().__init__()
        self.linear, self.average, self.last = nn.Linear(6, 6).double(), 0.0, {}

    def forward(self, x):
        if not hasattr(self, "losses"):
            self.losses = []
        loss = self.linear(x).square().mean()
        self.losses.append(loss.item())
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.last["loss"] = loss.item()
        return loss


def test_numbers_that_are_kept_are_python_numbers():
    """Whoever reads them later wants floats: code that adds one to a list at every call is an island."""
    torch.manual_seed(0)
    model = Logs()
    twin = copy.deepcopy(model)
    fast = mycel.jit(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(3):
            same(fast(X * i), twin(X * i))
    assert (model.losses, model.average, model.last) == (twin.losses, twin.average, twin.last)
    assert len(fast.entries) == 2  # the first call makes the list


def test_a_set_of_numbers_is_not_taken_for_one_of_tensors():
    """What would look for a number by its value has to know it."""
    seen = {1.0}
    with pytest.raises(CaptureError, match="a set or a dict looks for the value"):
        mycel.jit(lambda x: x * 2 if (x * WEIGHT).sum().item() in seen else x, strict=True)(X)


class Judge(nn.Module):
    """Returns numbers of parameters, of the batch, and of a loop."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.5]))

    def forward(self, x):
        y, turns = self.weight * x, 0
        while y.sum() < 50:
            y, turns = y * 2, turns + 1
        large = bool(y.sum() > 60)
        return {"y": y, "seen": (large, not large, bool(x.sum() > 0)), "of": [float(y.sum()), int(y.max()), turns]}


def test_numbers_that_jit_returns_are_those_of_python():
    x, judge = torch.tensor([1.0, 2.0]), Judge()
    eager, fast = judge(x), mycel.jit(judge)(x)
    assert torch.equal(fast.pop("y"), eager.pop("y")) and fast == eager
    assert [type(v) for key in ("seen", "of") for v in fast[key]] == [bool, bool, bool, float, int, int]
    assert mycel.jit(lambda x: bool((x > 1).all()) + 1)(x) == 1
