"""Layouts of small programs are the cheapest of all, on meshes of one to three axes, with and without a limit of
memory."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from brute import Case, compare, least_by_the_clock, random_case
from distributing import spread

import mycel
from mycel import lower
from mycel.ir import Builder, Layout, Mesh, Program, Type, check
from mycel.ops import o
from mycel.plan import CPU, Plan, layouts
from mycel.plan.distances import Distances
from mycel.plan.links import CPU_LINK, Links
from mycel.plan.moves import COPY_S, Moves


@pytest.mark.parametrize("seed", range(10))
def test_the_cheapest_of_all(seed):
    rng = random.Random(seed)
    for _ in range(10):
        case, every = random_case(rng)
        compare(case, every, None)
        sizes = [size for _, size in every]
        compare(case, every, min(sizes) + rng.random() * (max(sizes) - min(sizes)))


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_by_the_clock(seed):
    """Of all layouts, each lowered and put to the clock, the solver's take the least; but for a tie's tenth of a
    microsecond, and where sizes are even: masks of what is padded have no price before they are written."""
    rng = random.Random(200 + seed)
    for _ in range(12):
        case, _ = random_case(rng, even=True)
        chosen, least = least_by_the_clock(replace(case, share=1.0))
        assert chosen <= least + 20 * COPY_S, (case.program, case.mesh, case.given)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_layouts_solved_axis_by_axis(seed, monkeypatch):
    """It is no more than the least of all; what was found costs no less, and is called the least only where it is."""
    monkeypatch.setattr(layouts, "FEW", 0)
    rng = random.Random(100 + seed)
    for _ in range(10):
        case, every = random_case(rng)
        least, solver = min(seconds for seconds, _ in every), case.solver()
        solver.solve()
        assert solver.bound <= least * (1 + 1e-9) and least <= solver.value * (1 + 1e-9)
        assert solver.gap > 0 or solver.value <= least * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(2,), (4, 2), (2, 3), (2, 2, 3)])
def test_tables_of_distances_are_lengths_of_chains(sizes):
    """What the solver adds up is what lowering will send, for every pair of layouts of even and uneven tensors."""
    mesh, rng = Mesh(dict(zip("abc", sizes, strict=False))), random.Random(sum(sizes))
    moves = Moves(Links(mesh, CPU_LINK))
    for shape in ((24,), (7,), (12, 8), (5, 6)) if len(sizes) < 3 else ((24,), (7, 4)):
        distances, t = Distances(moves, mesh, "+"), Type(torch.float32, shape)
        table, space = distances.table(t), distances.space(t.ndim)
        pairs = list(itertools.product(range(len(space.layouts)), space.targets))
        for i, j in rng.sample(pairs, min(len(pairs), 400)):
            chain = moves.seconds(t, space.layouts[i], space.layouts[j])
            assert table[i, j] == pytest.approx(chain, rel=1e-9), (mesh, t, space.layouts[i], space.layouts[j])


def mlp(x, w1, w2):
    return torch.relu(x @ w1) @ w2


def test_the_order_of_axes_does_not_matter():
    program = mycel.capture(mlp, torch.randn(64, 256), torch.randn(256, 1024), torch.randn(1024, 256))
    spreads = [spread(program, Plan(mesh), {}, frozenset(), CPU) for mesh in (Mesh(a=2, b=4), Mesh(b=4, a=2))]
    assert lower.sent(spreads[0].local) == lower.sent(spreads[1].local)


def test_two_alike_need_not_lie_alike_under_a_limit():
    """Two equal transposes of a value that is split: where memory is for one of them whole, one is."""
    b = Builder()
    y = b.input("y", Type(torch.float32, (256, 256)))
    with b:
        o.permute(y, dims=(1, 0))
        o.permute(y, dims=(1, 0))
        product = o.linear(y, y)
    given = {0: Layout(((), ("a",)))}
    case = Case(check(Program({"main": b.block([product])})), Mesh(a=3), given)
    every = case.every()
    assert every is not None
    for limit in sorted({size for _, size in every}):
        compare(case, every, limit)
