"""Layouts of small programs are the cheapest of all, on meshes of one to three axes, with and without a limit of
memory."""

from __future__ import annotations

import random

import pytest
import torch
from brute import compare, random_case
from distributing import spread

import mycel
from mycel import lower
from mycel.ir import Mesh
from mycel.plan import CPU, Plan


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_of_all(seed):
    rng = random.Random(seed)
    for _ in range(10):
        case, every = random_case(rng)
        compare(case, every, None)
        sizes = [size for _, size in every]
        compare(case, every, min(sizes) + rng.random() * (max(sizes) - min(sizes)))


def mlp(x, w1, w2):
    return torch.relu(x @ w1) @ w2


def test_the_order_of_axes_does_not_matter():
    program = mycel.capture(mlp, torch.randn(64, 256), torch.randn(256, 1024), torch.randn(1024, 256))
    found = [spread(program, Plan(mesh), {}, frozenset(), CPU) for mesh in (Mesh(a=2, b=4), Mesh(b=4, a=2))]
    assert lower.sent(found[0].local) == lower.sent(found[1].local)
