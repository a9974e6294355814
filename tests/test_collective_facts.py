"""A collective is one paragraph: what it sends, in how many steps, what it means; a new one needs no other place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.ir import OPS, Builder, Mesh, Program, Type, check
from mycel.lower.wide_sums import add_wide
from mycel.ops import o
from mycel.plan.links import Link, Links, sent_by
from mycel.run import simulate

COLLECTIVES = [op for op in OPS.values() if op.collective is not None]


def one(name: str, dtype: torch.dtype, shape: tuple[int, ...], mesh: Mesh, **params) -> Program:
    """A program of one collective."""
    b = Builder()
    x = b.input("x", Type(dtype, shape))
    with b:
        y = OPS[name](x, axes=mesh.axes, count=mesh.world, **params)
    return check(Program({"main": b.block([y])}))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(k=st.integers(2, 8), n=st.integers(1, 20), dim=st.integers(0, 1), seed=st.integers(0, 1000))
def test_sums_of_16_bits_are_made_in_32_and_rounded_once(k, n, dim, seed):
    mesh, g = Mesh(dp=k), torch.Generator().manual_seed(seed)
    xs = [torch.randn((n, 3) if dim == 0 else (3, n), generator=g).to(torch.bfloat16) for _ in range(k)]
    (parts,) = simulate(one("reduce_scatter_wide", torch.bfloat16, tuple(xs[0].shape), mesh, dim=dim), mesh, [xs])
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    assert torch.equal(torch.cat(parts, dim).narrow(dim, 0, n), total.to(torch.bfloat16))


@pytest.mark.parametrize("name, params", [("all_reduce", {}), ("reduce_scatter", {"dim": 1})])
def test_sums_that_a_plan_wants_added_wide(name, params):
    """Whatever moves made of them: one rounding, of all parts."""
    mesh, g = Mesh(dp=3), torch.Generator().manual_seed(0)
    xs = [torch.randn((4, 6), generator=g).to(torch.bfloat16) for _ in range(3)]
    program = add_wide(one(name, torch.bfloat16, (4, 6), mesh, **params))
    (parts,) = simulate(check(program), mesh, [xs])
    total = sum(x.double() for x in xs).to(torch.bfloat16)
    assert torch.equal(parts[0] if name == "all_reduce" else torch.cat(parts, 1), total)
    odd = one("all_reduce", torch.bfloat16, (4, 5), mesh)
    assert add_wide(odd) == odd and "wide" in str(program)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_a_wide_sum_costs_what_its_paragraph_says(k):
    """As many bytes as reduce_scatter of the same dtype, in one step."""
    links = Links(Mesh(dp=k), Link(1e9, 1e-4))
    (eqn,) = one("reduce_scatter_wide", torch.bfloat16, (48, 8), Mesh(dp=k), dim=0).main.eqns
    local = 48 * 8 * 2
    assert sent_by(eqn) == (("dp",), pytest.approx((k - 1) / k * local))
    assert links.seconds("reduce_scatter_wide", ("dp",), local) == pytest.approx((k - 1) / k * local / 1e9 + 1e-4)


@pytest.mark.parametrize("op", COLLECTIVES, ids=repr)
def test_one_rank_sends_nothing(op):
    assert Links(Mesh(dp=1)).seconds(op.name, ("dp",), 1e9) == 0


def test_the_rings():
    """Of k ranks: an all-reduce is a reduce-scatter and an all-gather of its parts, in bytes and in steps."""
    links = Links(Mesh(dp=5), Link(1e9, 1e-3))
    both = links.seconds("reduce_scatter", ("dp",), 1e6) + links.seconds("all_gather", ("dp",), 1e6 / 5)
    assert links.seconds("all_reduce", ("dp",), 1e6) == pytest.approx(both)


def test_the_gradient_of_a_wide_sum_is_a_gather():
    b = Builder()
    x, g = b.input("x", Type(torch.float32, (6, 2))), b.input("g", Type(torch.float32, (3, 2)))
    with b:
        y = o.reduce_scatter_wide(x, axes=("dp",), count=2, dim=0)
        (back,) = o.reduce_scatter_wide.vjp(g, y, x, axes=("dp",), count=2, dim=0)
    assert back.type == x.type and b.eqns[-1].op is o.all_gather
