"""Layouts: moving between any two of them keeps the tensor; every operator on parts, in every layout its dims allow,
equals the whole.

On meshes of two axes both laws are tried in full, with padding that harms whatever it reaches; on larger ones, and for
an operator between moves, at random.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mycel.ops  # noqa: F401  fills the table
from examples import parse_example
from mycel.errors import PlanError
from mycel.ir import (
    CONTROL,
    OPS,
    Builder,
    Layout,
    Mesh,
    Program,
    Type,
    check,
    extent,
    part,
    read_layout,
    type_of,
    typed,
)
from mycel.ir.layout import KINDS
from mycel.lower.spmd import spmd
from mycel.plan.choices import SAME, Laid, Options
from mycel.plan.links import CPU_LINK, Links
from mycel.plan.moves import Moves
from mycel.run.simulate import part_of, put_together, simulate

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=3, b=2), Mesh(a=2, b=1, c=3), Mesh(a=4, b=2)]
PAIRS = [Mesh(a=2, b=2), Mesh(a=2, b=3)]  # small enough for everything


@functools.cache
def moves_on(mesh):
    return Moves(Links(mesh, CPU_LINK))


def random_layout(ndim, mesh, rng, partial=True):
    """Any layout: each axis on some dim at some place, partial, or unused."""
    dims, sums = [[] for _ in range(ndim)], []
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        where = rng.randrange(ndim + 2)
        if where < ndim:
            dims[where].insert(rng.randrange(len(dims[where]) + 1), axis)
        elif where == ndim and partial:
            sums.append((axis, "+"))
    return Layout(tuple(map(tuple, dims)), tuple(sorted(sums)))


def held(x, layout, mesh, seed=0):
    """A tensor as ranks may hold it: of a partial sum each has its share, of a maximum or minimum some rank each
    element; padding does harm."""
    gen = torch.Generator().manual_seed(seed)
    shares = {
        axis: _shares(x, kind, mesh[axis], gen) for axis, kind in sorted(layout.partial, key=lambda x: x[1] != "+")
    }
    real = torch.ones_like(x, dtype=torch.bool)
    parts = []
    for rank in range(mesh.world):
        at, mine = mesh.coordinates(rank), x
        for axis, share in shares.items():
            mine = share[at[axis]](mine)
        mine = part_of(mine, layout.reduced, mesh, rank)
        parts.append(
            mine.where(part_of(real, layout.reduced, mesh, rank), worst(x.dtype)) if any(layout.dims) else mine
        )
    return parts


def _shares(x, kind, n, gen):
    """What each of n ranks makes of x, so that the sum, maximum or minimum of it is x."""
    if kind != "+":
        less = torch.randint(0, 3, (n, *x.shape), generator=gen)
        less = (less - less.amin(0)) * (1 if kind == ">" else -1)
        return [lambda y, r=r: y - less[r] for r in range(n)]
    times = (
        torch.randint(-2, 3, (n, *x.shape), generator=gen)
        if x.dtype in (torch.float64, torch.complex128)
        else torch.zeros(n, *x.shape)
    )
    times[0] += 1 - times.sum(0)
    return [lambda y, r=r: y * times[r].to(y.dtype) for r in range(n)]


def worst(dtype):
    """The padding that does most harm."""
    value = (
        torch.nan
        if dtype.is_floating_point or dtype.is_complex
        else True
        if dtype == torch.bool
        else torch.iinfo(dtype).max
    )
    return torch.tensor(value, dtype=dtype)


# -- meshes and parts


def test_a_mesh_names_its_ranks():
    mesh = Mesh(dp=2, tp=3)
    assert mesh.world == 6 and mesh.coordinates(4) == {"tp": 1, "dp": 1}
    assert mesh.group(4, ("tp",)) == [3, 4, 5] and mesh.group(4, ("dp",)) == [1, 4]
    assert mesh.group(0, ("tp", "dp")) == [0, 3, 1, 4, 2, 5]
    assert [mesh.index(r, ("tp", "dp")) for r in (0, 3, 1, 4, 2, 5)] == list(range(6))
    assert repr(mesh) == "Mesh(dp=2, tp=3)" and mesh == Mesh({"dp": 2, "tp": 3}) != Mesh(tp=3, dp=2)


@pytest.mark.parametrize("axes, why", [
    *(({"dp": size}, f"axis dp of the mesh has size {size}") for size in (0, 1.5, True)),
    *(({name: 2}, f"'{name}' is no name for an axis") for name in ("1x", "")),
])  # fmt: skip
def test_a_mesh_that_is_none(axes, why):
    with pytest.raises(PlanError, match=why):
        Mesh(axes)


def test_layouts_as_people_write_them():
    mesh = Mesh(dp=2, tp=4)
    assert read_layout(["dp", None, "tp"], mesh, "x") == Layout((("dp",), (), ("tp",)))
    assert (
        read_layout("[tp.dp, -]", mesh, "x")
        == read_layout([("tp", "dp"), "-"], mesh, "x")
        == Layout((("tp", "dp"), ()))
    )
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


# -- moving ----------------------------------------------------------------------------------------------------------


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
    (out,) = simulate(program, mesh, [held(x, source, mesh)])
    assert torch.allclose(put_together(out, target, type_of(x), mesh), x, rtol=1e-12)


def all_layouts(ndim, mesh):
    """Every layout on a mesh: each axis unused, partial, or on some dim, there at each place among the others."""
    layouts = [Layout.whole(ndim)]
    for axis in mesh.axes:
        partial = [x.with_partial(axis, kind) for x in layouts for kind in KINDS]
        at = [(x, d, n) for x in layouts for d in range(ndim) for n in range(len(x.dims[d]) + 1)]
        layouts += partial + [
            Layout((*x.dims[:d], (*x.dims[d][:n], axis, *x.dims[d][n:]), *x.dims[d + 1 :]), x.partial) for x, d, n in at
        ]
    return layouts


@pytest.mark.parametrize("mesh", PAIRS, ids=repr)
@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (6,), (12, 6)], ids=str)
@pytest.mark.parametrize("extreme", [False, True], ids=["to sums", "to extremes"])
def test_from_each_layout_to_each_other(shape, mesh, extreme):
    layouts = all_layouts(len(shape), mesh)
    # a place for each axis; two on one dim in both orders
    assert len(layouts) == len(set(layouts)) == (len(shape) + len(KINDS) + 1) ** 2 + len(shape)
    # whole numbers: sums are exact
    x = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0)).double()
    for source in layouts:
        given = held(x, source, mesh)
        assert torch.equal(put_together(given, source, type_of(x), mesh), x), source
        for target in (t for t in layouts if any(kind != "+" for _, kind in t.partial) == extreme):
            (out,) = simulate(moved(type_of(x), source, target, mesh), mesh, [given])
            assert torch.equal(put_together(out, target, type_of(x), mesh), x), (str(source), str(target))


def names(program):
    return [e.op.name for e in program.main.eqns]


def test_the_cheapest_chain():
    mesh, x = Mesh(a=4, b=2), Type(torch.float32, (1024, 1024))

    def of(*dims, partial=()):
        return Layout(tuple(tuple(d) for d in dims), tuple((a, "+") for a in partial))

    assert names(moved(x, of("a", ""), of("", "a"), mesh)) == ["all_to_all"]
    assert names(moved(x, of("", "", partial="a"), of("a", ""), mesh)) == ["reduce_scatter"]
    assert names(moved(x, of("", "", partial="a"), of("", ""), mesh)) == ["all_reduce"]
    assert names(moved(x, of("", "", partial="ab"), of("", ""), mesh)) == ["all_reduce"]
    assert names(moved(x, of("ab", ""), of("a", ""), mesh)) == ["all_gather"]
    assert set(names(moved(x, of("ab", ""), of("", ""), mesh))) == {"all_gather"}
    assert names(moved(x, of("ab", ""), of("ba", ""), mesh)) == ["permute_ranks"]
    assert names(moved(x, of("a", ""), of("ab", ""), mesh)) == ["own_part"]
    assert names(moved(x, of("", ""), of("b", "a"), mesh)) == ["own_part", "own_part"]


# -- every operator, every layout

OF_EACH_RANK = ("rank_squares", "averaged_error", "unsent")  # of partial sums as they are: how these differ tells
CASES = [
    pytest.param(op, parse_example(text), id=f"{op.name}({text})")
    for op in OPS.values()
    if op not in CONTROL
    for text in (op.examples if op.name not in OF_EACH_RANK else ())
]
EXACT = 1e-10


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def alone(op, inputs, params):
    """An operator alone in a program."""
    b = Builder()
    atoms = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        outs = as_tuple(op(*atoms, **params))
    return Program({"main": b.block(outs)})


def elsewhere(choice, program, mesh, rng):
    """Layouts for the operands and results of the one equation: half of them those it wants, half of them any."""

    def some(layout, v):
        fits = layout if rng.random() < 0.5 else random_layout(v.ndim, mesh, rng, partial=v.dtype.is_floating_point)
        return fits.reduced if v.dtype == torch.bool else fits

    wanted = [want for want in choice.ins if want is not None]
    ins = [some(want, v) for want, v in zip(wanted, program.inputs, strict=True)]
    return ins, [
        o if v.dtype == torch.bool else some(o, v)
        for o, v in zip(choice.outs, program.main.eqns[0].outputs, strict=True)
    ]


def laid_out(program, inputs, labels, mesh, rng=None):
    """Its one operator on parts, the operands and results as its choice has them, or with `rng` elsewhere; the results
    put together."""
    (eqn,) = program.main.eqns
    choice = Options.of(eqn).choice(labels)
    given, result = (
        elsewhere(choice, program, mesh, rng)
        if rng
        else ([want for want in choice.ins if want is not None], choice.outs)
    )
    local = check(spmd(program, {"main": Laid(tuple(given), (choice,), tuple(result))}, moves_on(mesh)))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    outputs = simulate(
        local, mesh, [held(x, g, mesh, seed=i) for i, (x, g) in enumerate(zip(tensors, given, strict=True))]
    )
    return [put_together(m, r, v.type, mesh) for m, r, v in zip(outputs, result, eqn.outputs, strict=True)]


def run_in_parts(op, inputs, params, labels, mesh, rng):
    """The operator alone in a program, its operands and results in random layouts; the results put together, and its
    choice."""
    program = alone(op, inputs, params)
    return laid_out(program, inputs, labels, mesh, rng), Options.of(program.main.eqns[0]).choice(labels)


def made_whole(op, example):
    """(inputs, results) of an example on one device."""
    inputs = example.make("f64")
    # few digits: what is rounded loses none
    if len({x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()}) > 1:
        inputs = [
            x.bfloat16().to(x.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
        ]
    return inputs, as_tuple(op.kernel(*inputs, **example.params))


def same(got, whole):
    return all(
        y.dtype == want.dtype and torch.allclose(wide(y), wide(want), rtol=EXACT, atol=EXACT, equal_nan=True)
        for y, want in zip(got, whole, strict=True)
    )


@pytest.mark.parametrize("op, example", CASES)
def test_every_operator_in_every_layout(op, example):
    rng = random.Random(0)
    inputs, whole = made_whole(op, example)
    program = alone(op, inputs, example.params)
    options = Options.of(program.main.eqns[0])
    assert options.fit is None or options.fit.out_shapes == [tuple(y.shape) for y in whole], (
        "dims disagree with the kernel"
    )
    for mesh in MESHES:
        first = options.labels(mesh, mesh.axes[0], {})
        tried = (
            [{mesh.axes[0]: label} for label in first]
            if len(mesh.axes) == 1
            else [random_labels(options, mesh, rng) for _ in range(4)]
        )
        for labels in tried:
            assert same(laid_out(program, inputs, labels, mesh, rng), whole), (mesh, labels)


@pytest.mark.parametrize("op, example", CASES)
def test_every_operator_in_every_pair_of_labels(op, example):
    """Nothing is moved and padding is harmful: what is proved is each choice itself."""
    inputs, whole = made_whole(op, example)
    program = alone(op, inputs, example.params)
    for mesh in PAIRS:
        for labels in all_labels(Options.of(program.main.eqns[0]), mesh):
            assert same(laid_out(program, inputs, labels, mesh), whole), (mesh, labels)


def all_labels(options, mesh):
    """Labels for two axes: each for the one with each for the other, the axes in both orders where they share a letter.

    On a mesh whose axes are alike, of two pairs that are each other's with the axes exchanged only one is tried.
    """
    a, b = mesh.axes
    tried = set()
    for slow, fast in ((a, b), (b, a)):
        for label in options.labels(mesh, slow, {}):
            letters = dict.fromkeys(label.letter.split(), (slow,))
            for more in options.labels(mesh, fast, letters):
                labels, shared = {slow: label, fast: more}, not letters.keys().isdisjoint(more.letter.split())
                pair = frozenset((label, more)) if mesh[a] == mesh[b] else (labels[a], labels[b], shared and slow)
                if pair not in tried:
                    tried.add(pair)
                    yield labels


def random_labels(options, mesh, rng):
    labels, letters = {}, {}
    for axis in mesh.axes:
        labels[axis] = label = rng.choice(options.labels(mesh, axis, letters))
        letters.update((k, (*letters.get(k, ()), axis)) for k in label.letter.split())
    return labels


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def test_same_is_always_possible():
    equations = [
        alone(op, made_whole(op, example)[0], example.params).main.eqns[0]
        for op, example in (c.values for c in CASES[::7])
    ]
    assert all(SAME in Options.of(eqn).labels(Mesh(a=2), "a", {}) for eqn in equations)


def test_a_part_of_a_tensor():
    mesh, x = Mesh(a=2, b=2), torch.arange(10.0).reshape(5, 2)
    assert part_of(x, Layout((("a",), ())), mesh, 3).tolist() == [[6, 7], [8, 9], [0, 0]]
    assert part_of(x, Layout((("a", "b"), ())), mesh, 1).tolist() == [[4, 5], [0, 0]]
