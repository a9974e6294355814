"""Layouts: moving between any two of them keeps the tensor; every operator on parts, in every layout its dims allow, equals the whole."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mycel.ops  # noqa: F401  fills the table
from examples import parse_example
from mycel.errors import PlanError
from mycel.ir import CONTROL, OPS, Builder, Layout, Mesh, Program, Type, check, extent, part, read_layout, type_of, typed
from mycel.lower.spmd import spmd
from mycel.plan.choices import SAME, Laid, Options
from mycel.plan.links import CPU_LINK, Links
from mycel.plan.moves import Moves
from mycel.run.simulate import part_of, put_together, simulate, spread_out

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=3, b=2), Mesh(a=2, b=1, c=3), Mesh(a=4, b=2)]


def moves_on(mesh):
    return Moves(Links(mesh, CPU_LINK))


def random_layout(ndim, mesh, rng, owed=True):
    """Any layout: each axis on some dim at some place, owed, or unused."""
    dims, owes = [[] for _ in range(ndim)], []
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        where = rng.randrange(ndim + 2)
        if where < ndim:
            dims[where].insert(rng.randrange(len(dims[where]) + 1), axis)
        elif where == ndim and owed:
            owes.append((axis, "+"))
    return Layout(tuple(map(tuple, dims)), tuple(sorted(owes)))


# -- meshes and parts ----------------------------------------------------------------------------------------------------


def test_a_mesh_names_its_ranks():
    mesh = Mesh(dp=2, tp=3)
    assert mesh.world == 6 and mesh.coordinates(4) == {"tp": 1, "dp": 1}
    assert mesh.group(4, ("tp",)) == [3, 4, 5] and mesh.group(4, ("dp",)) == [1, 4]
    assert mesh.group(0, ("tp", "dp")) == [0, 3, 1, 4, 2, 5]
    assert [mesh.index(r, ("tp", "dp")) for r in (0, 3, 1, 4, 2, 5)] == list(range(6))
    assert repr(mesh) == "Mesh(dp=2, tp=3)" and mesh == Mesh({"dp": 2, "tp": 3}) != Mesh(tp=3, dp=2)


@pytest.mark.parametrize("axes", [{"dp": 0}, {"dp": 1.5}, {"dp": True}, {"1x": 2}, {"": 2}])
def test_a_mesh_that_is_none(axes):
    with pytest.raises(PlanError):
        Mesh(axes)


def test_layouts_as_people_write_them():
    mesh = Mesh(dp=2, tp=4)
    assert read_layout(["dp", None, "tp"], mesh, "x") == Layout((("dp",), (), ("tp",)))
    assert read_layout("[tp.dp, -]", mesh, "x") == read_layout([("tp", "dp"), "-"], mesh, "x") == Layout((("tp", "dp"), ()))
    assert typed(Type(torch.bfloat16, (64, 4096)), Layout((("dp",), ()), (("tp", "+"),))) == "bf16[64@dp,4096]+tp"
    with pytest.raises(PlanError, match="no axis 'pp'"):
        read_layout(["pp"], mesh, "x")
    with pytest.raises(PlanError, match="used twice"):
        read_layout(["dp", "dp"], mesh, "x")


@given(st.integers(0, 40), st.sampled_from(MESHES), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_parts_cover_a_dim_once(n, mesh, rng):
    axes = tuple(rng.sample(mesh.axes, rng.randint(0, len(mesh.axes))))
    seen = []
    for rank in mesh.group(0, axes):
        start, count = extent(n, axes, mesh, mesh.coordinates(rank))
        assert 0 <= count <= part(n, axes, mesh)
        seen += range(start, start + count)
    assert seen == list(range(n))


# -- moving --------------------------------------------------------------------------------------------------------------


def moved(type, source, target, mesh):
    """A program that moves its one input."""
    b = Builder()
    x = b.input("x", type)
    return check(spmd(Program({"main": b.block([x])}), {"main": Laid((source,), (), (target,))}, moves_on(mesh)))


@given(st.lists(st.integers(1, 9), min_size=0, max_size=3), st.sampled_from(MESHES), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_from_any_layout_to_any_other(shape, mesh, rng):
    source, target = (random_layout(len(shape), mesh, rng) for _ in range(2))
    x = torch.randn(shape, dtype=torch.float64)
    program = moved(type_of(x), source, target, mesh)
    (out,) = simulate(program, mesh, [spread_out(x, source, mesh)])
    assert torch.allclose(put_together(out, target, type_of(x), mesh), x, rtol=1e-12)


def names(program):
    return [e.op.name for e in program.main.eqns]


def test_the_cheapest_chain():
    mesh, x = Mesh(a=4, b=2), Type(torch.float32, (1024, 1024))

    def of(*dims, owed=()):
        return Layout(tuple(tuple(d) for d in dims), tuple((a, "+") for a in owed))

    assert names(moved(x, of("a", ""), of("", "a"), mesh)) == ["all_to_all"]
    assert names(moved(x, of("", "", owed="a"), of("a", ""), mesh)) == ["reduce_scatter"]
    assert names(moved(x, of("", "", owed="a"), of("", ""), mesh)) == ["all_reduce"]
    assert names(moved(x, of("", "", owed="ab"), of("", ""), mesh)) == ["all_reduce"]
    assert names(moved(x, of("ab", ""), of("a", ""), mesh)) == ["all_gather"]
    assert set(names(moved(x, of("ab", ""), of("", ""), mesh))) == {"all_gather"}
    assert names(moved(x, of("ab", ""), of("ba", ""), mesh)) == ["permute_ranks"]
    assert names(moved(x, of("a", ""), of("ab", ""), mesh)) == ["own_part"]
    assert names(moved(x, of("", ""), of("b", "a"), mesh)) == ["own_part", "own_part"]


# -- every operator, every layout ----------------------------------------------------------------------------------------

CASES = [pytest.param(op, parse_example(text), id=f"{op.name}({text})") for op in OPS.values() if op not in CONTROL for text in op.examples]
EXACT = 1e-10


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def run_in_parts(op, inputs, params, labels, mesh, rng):
    """The operator alone in a program, its operands and results in random layouts; the results put together."""
    b = Builder()
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    atoms = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        outs = as_tuple(op(*atoms, **params))
    eqn = b.eqns[0]
    choice = Options.of(eqn).choice(labels, mesh)
    given = [random_layout(x.ndim, mesh, rng, owed=x.is_floating_point()) if rng.random() < 0.5 else None for x in tensors]
    wanted = [want for want in choice.ins if want is not None]
    given = [want if g is None else g for g, want in zip(given, wanted, strict=True)]
    given = [g if x.dtype != torch.bool else g.paid for g, x in zip(given, tensors, strict=True)]
    result = [
        o if rng.random() < 0.5 or v.dtype == torch.bool else random_layout(v.ndim, mesh, rng, owed=v.dtype.is_floating_point)
        for o, v in zip(choice.outs, outs, strict=True)
    ]
    laid = Laid(tuple(given), (choice,), tuple(result))
    program = check(spmd(Program({"main": b.block(outs)}), {"main": laid}, moves_on(mesh)))
    local = [spread_out(x, g, mesh) for x, g in zip(tensors, given, strict=True)]
    made = simulate(program, mesh, local)
    return [put_together(m, r, v.type, mesh) for m, r, v in zip(made, result, outs, strict=True)], choice


@pytest.mark.parametrize("op, example", CASES)
def test_every_operator_in_every_layout(op, example):
    rng = random.Random(0)
    inputs = example.make("f64" if "f64" in example.dtypes() else example.dtypes()[0] or "f64")
    whole = as_tuple(op.kernel(*inputs, **example.params))
    types = [type_of(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    options = Options(op, types, example.params, [type_of(y) for y in whole])
    assert options.fit is None or options.fit.out_shapes == [tuple(y.shape) for y in whole], "dims disagree with the kernel"
    for mesh in MESHES:
        first = options.labels(mesh, mesh.axes[0], {})
        tried = [{mesh.axes[0]: label} for label in first] if len(mesh.axes) == 1 else [random_labels(options, mesh, rng) for _ in range(4)]
        for labels in tried:
            got, choice = run_in_parts(op, inputs, example.params, labels, mesh, rng)
            for y, want in zip(got, whole, strict=True):
                assert y.dtype == want.dtype and torch.allclose(wide(y), wide(want), rtol=EXACT, atol=EXACT, equal_nan=True), (mesh, labels, choice)


def random_labels(options, mesh, rng):
    labels, letters = {}, {}
    for axis in mesh.axes:
        labels[axis] = label = rng.choice(options.labels(mesh, axis, letters))
        letters.update((k, (*letters.get(k, ()), axis)) for k in label.letter.split())
    return labels


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def test_same_is_always_possible():
    assert all(SAME in Options.of(_equation(c.values[0], c.values[1])).labels(Mesh(a=2), "a", {}) for c in CASES[::7])


def _equation(op, example):
    b = Builder()
    inputs = example.make("f64" if "f64" in example.dtypes() else example.dtypes()[0] or "f64")
    with b:
        op(*(b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)), **example.params)
    return b.eqns[0]


def test_a_part_of_a_tensor():
    mesh, x = Mesh(a=2, b=2), torch.arange(10.0).reshape(5, 2)
    assert part_of(x, Layout((("a",), ())), mesh, 3).tolist() == [[6, 7], [8, 9], [0, 0]]
    assert part_of(x, Layout((("a", "b"), ())), mesh, 1).tolist() == [[4, 5], [0, 0]]
