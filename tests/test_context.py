"""Attention split over a sequence: rows alone, rows and columns in a ring, heads by all-to-all.  In parts it equals the
whole; a ring sends what its formula says and computes each score of a causal triangle once."""

from __future__ import annotations

import random

import pytest
import torch
from test_layouts import EXACT, as_tuple, moves_on, run_in_parts

from mycel.ir import Builder, Layout, Mesh, Program, check, extent, type_of
from mycel.lower.spmd import spmd
from mycel.ops.attention import attention, attention_grad, attention_mask_grad
from mycel.ops.sdpa import counted
from mycel.plan.choices import Label, Laid, Options
from mycel.plan.links import sent_by
from mycel.run.simulate import put_together, simulate, spread_out

MESHES = [Mesh(cp=2), Mesh(cp=3), Mesh(cp=4), Mesh(dp=2, cp=2)]
ROWS, RING = Label("q"), Label("q k")


def operands(rows, columns, *, groups=2, mask=None, batch=2, heads=4, dtype=torch.float64, seed=0):
    """q, k, v and a mask: None, or its dtype and shape"""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    q, k, v = draw(batch, heads, rows, 8), draw(batch, groups, columns, 8), draw(batch, groups, columns, 6)
    if mask is None:
        return [q, k, v, None]
    kind, shape = mask
    return [q, k, v, torch.rand(shape, generator=gen) < 0.6 if kind == "bool" else draw(*shape)]


def with_draws(inputs, params):
    """Operands of attention; where weights are dropped, the counts at which rows draw."""
    q, k = inputs[:2]
    return [*inputs, counted(q, k, torch.tensor(7), 3)] if "dropout" in params else inputs


def with_documents(inputs, params, padding=True):
    """Operands of attention, and documents of rows and columns; with padding, as a second number, some rows see
    nothing."""
    inputs, count = with_draws(inputs, params), min(x.shape[2] for x in inputs[:2])
    ids = [(torch.arange(x.shape[2]) * 3 // count).clamp(max=2).expand(x.shape[0], -1) for x in inputs[:2]]
    kept = (torch.arange(inputs[1].shape[2]) % 5 != 0).long().expand_as(ids[1])
    rows, columns = ids[0].unsqueeze(2), ids[1].unsqueeze(2)
    if padding:
        rows, columns = torch.cat([rows, rows * 0 + 1], 2), torch.cat([columns, kept.unsqueeze(2)], 2)
    return [*inputs, *([None] if len(inputs) == 4 else []), rows, columns]


def with_results(inputs, params, seed=1):
    """The operands of the gradient: a cotangent, those of attention, its results."""
    y, lse = attention.kernel(*inputs, **params)
    return [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype),
        *inputs[:4],
        y,
        lse,
        *inputs[4:],
    ]


def labels_on(mesh, label):
    return {axis: label if axis != "dp" else Label("b") for axis in mesh.axes}


def options(op, inputs, params):
    types = [type_of(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    return Options(op, types, params, op.infer(types, params))


def holds(op, inputs, params, labels, mesh, seed=0):
    """In parts, from and to random layouts, it equals the whole."""
    whole = as_tuple(op.kernel(*inputs, **params))
    got, _ = run_in_parts(op, inputs, params, labels, mesh, random.Random(seed))
    for y, want in zip(got, whole, strict=True):
        assert y.dtype == want.dtype and torch.allclose(y, want, rtol=EXACT, atol=EXACT, equal_nan=True), (
            op,
            mesh,
            labels,
        )


def lowered(op, inputs, params, labels, mesh):
    """The local program of the operator alone, everything laid out as it wants it."""
    b = Builder()
    atoms = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        outs = as_tuple(op(*atoms, **params))
    choice = Options.of(b.eqns[0]).choice(labels)
    laid = Laid(tuple(x for x in choice.ins if x is not None), (choice,), choice.outs)
    return check(spmd(Program({"main": b.block(outs)}), {"main": laid}, moves_on(mesh))), choice, outs


# -- in parts it equals the whole

CASES = {
    "full": ((24, 24), None, {}),
    "crossed": ((24, 12), None, {"scale": 0.3}),
    "causal": ((24, 24), None, {"causal": True}),
    "causal, odd chunks": ((12, 12), None, {"causal": True, "scale": 0.3}),
    "causal, long": ((24, 12), None, {"causal": True}),
    "causal, wide": ((12, 24), None, {"causal": True}),
    "window": ((24, 24), None, {"window": (5, 0)}),
    "window, long": ((24, 12), None, {"window": (3, 4), "scale": 0.3}),
    "yes or no": ((24, 12), ("bool", (2, 1, 24, 12)), {}),
    "added": ((12, 24), ("added", (2, 4, 12, 24)), {}),
    "padded keys": ((12, 12), ("bool", (2, 1, 1, 12)), {}),
    "added to columns": ((12, 12), ("added", (12,)), {}),
    "rows that see nothing": ((12, 12), ("bool", (12, 1)), {}),
    "capped": ((24, 24), None, {"causal": True, "cap": 1.5}),
    "dropped": ((12, 12), ("bool", (2, 1, 1, 12)), {"dropout": 0.4}),
    "dropped, causal": ((24, 24), None, {"causal": True, "dropout": 0.4, "cap": 2.0}),
}


@pytest.mark.parametrize("label", [ROWS, RING], ids=["rows", "ring"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_in_parts_it_equals_the_whole(case, mesh, label):
    sizes, mask, params = CASES[case]
    for groups in (4, 2, 1):
        inputs = with_draws(operands(*sizes, groups=groups, mask=mask), params)
        holds(attention, inputs, params, labels_on(mesh, label), mesh)
        holds(attention_grad, with_results(inputs, params), params, labels_on(mesh, label), mesh)


BY_AXIS = [(ROWS, 2), (ROWS, 3), (RING, 2), (RING, 3), (RING, 4), (Label("b"), 2), (Label("g"), 2)]


@pytest.mark.parametrize("label, count", BY_AXIS, ids=lambda x: x.letter if isinstance(x, Label) else str(x))
@pytest.mark.parametrize("case", [c for c, (_, mask, _) in CASES.items() if mask is None or mask[0] == "bool"])
def test_documents_in_parts_equal_the_whole(case, label, count):
    """Documents go with rows and columns, however these are split, beside any structure."""
    sizes, mask, params = CASES[case]
    inputs = with_documents(operands(*sizes, mask=mask), params)
    for op, xs in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        holds(op, xs, params, {"cp": label}, Mesh(cp=count))


@pytest.mark.parametrize("label", [ROWS, RING], ids=["rows", "ring"])
@pytest.mark.parametrize("seed", range(40))
def test_sizes_that_do_not_divide(seed, label):
    """Any sizes, masks and groups; axes that split the sequence twice; parts that hold nothing."""
    rng = random.Random(seed)
    mesh = rng.choice([*MESHES, Mesh(a=2, b=2), Mesh(a=3, b=2), Mesh(cp=6)])
    rows, columns = rng.randint(2, 17), rng.randint(2, 17)
    mask = rng.choice(
        [
            None,
            None,
            ("bool", (rows, columns)),
            ("added", (2, 1, rows, columns)),
            ("bool", (1, columns)),
            ("added", (4, rows, 1)),
        ]
    )
    structure = {"causal": True} if rng.random() < 0.6 else {"window": (rng.randint(0, rows), rng.randint(0, 4))}
    params = structure if mask is None and rng.random() < 0.8 else {}
    params |= {"dropout": 0.3} if seed % 4 == 0 else {}
    inputs = operands(rows, columns, groups=rng.choice([1, 2, 4]), mask=mask, seed=seed)
    packed = seed % 3 == 0 and (mask is None or mask[0] == "bool")
    inputs = with_documents(inputs, params, padding=False) if packed else with_draws(inputs, params)
    holds(attention, inputs, params, labels_on(mesh, label), mesh, seed)
    holds(attention_grad, with_results(inputs, params), params, labels_on(mesh, label), mesh, seed)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 10, 7), (10, 7), (2, 1, 1, 7), (4, 10, 1)], ids=str)
def test_the_gradient_of_a_mask_by_rows(shape, mesh):
    inputs = with_results(operands(10, 7, mask=("added", shape)), {})
    holds(attention_mask_grad, inputs, {}, labels_on(mesh, ROWS), mesh)


@pytest.mark.parametrize("label", [ROWS, RING], ids=["rows", "ring"])
@pytest.mark.parametrize(
    "mask, params",
    [
        (None, {}),
        (None, {"causal": True}),
        (None, {"window": (2, 1)}),
        (("added", (7, 10)), {}),
        (("bool", (2, 4, 7, 10)), {}),
    ],
)
def test_padding_may_hold_anything(mask, params, label):
    mesh, inputs = Mesh(cp=4), operands(7, 10, mask=mask)
    for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        program, choice, outs = lowered(op, given, params, labels_on(mesh, label), mesh)
        tensors = [(x, layout) for x, layout in zip(given, choice.ins, strict=True) if layout is not None]
        outputs = simulate(program, mesh, [poisoned(x, layout, mesh) for x, layout in tensors])
        for m, layout, v, want in zip(outputs, choice.outs, outs, op.kernel(*given, **params), strict=True):
            assert torch.allclose(put_together(m, layout, v.type, mesh), want, rtol=EXACT, atol=EXACT)


def poisoned(x, layout, mesh):
    """The parts of x, nan (True) where they are padding."""
    parts = []
    for rank, part in enumerate(spread_out(x, layout, mesh)):
        part = part.clone()
        for d, (n, axes) in enumerate(zip(x.shape, layout.dims, strict=True)):
            valid = extent(n, axes, mesh, mesh.coordinates(rank))[1]
            part.narrow(d, valid, part.shape[d] - valid).fill_(float("nan") if x.is_floating_point() else True)
        parts.append(part)
    return parts


def test_axes_together_and_beside_others():
    """A ring over two axes; beside it heads and batch split over others."""
    inputs, params = operands(24, 24, batch=2), {"causal": True}
    mesh = Mesh(a=2, b=2, tp=2)
    heads, batch = Label("g"), Label("b")
    for labels in (
        {"a": RING, "b": RING, "tp": heads},
        {"a": batch, "b": RING, "tp": heads},
        {"tp": RING, "b": heads, "a": RING},
    ):
        holds(attention, inputs, params, labels, mesh)
        holds(attention_grad, with_results(inputs, params), params, labels, mesh)


def test_a_ring_is_offered_where_rows_and_columns_lie_alike():
    labels = options(attention, operands(8, 8), {"causal": True}).labels(Mesh(cp=2), "cp", {})
    assert ROWS in labels and RING in labels
    assert RING not in options(attention, operands(8, 8), {}).labels(Mesh(a=2, b=2), "b", {"q": ("a",)})


def test_sums_are_kept_in_32_bits():
    """In 16 bits what each turn gives is rounded once more than the whole is, the sum of all turns is not: cotangents
    travel in 32."""
    mesh, params = Mesh(cp=8), {"causal": True}
    inputs = operands(128, 128, dtype=torch.bfloat16)
    for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        program, choice, outs = lowered(op, given, params, {"cp": RING}, mesh)
        laid = [spread_out(x, layout, mesh) for x, layout in zip(given, choice.ins, strict=True) if layout is not None]
        got = [
            put_together(m, layout, v.type, mesh)
            for m, layout, v in zip(simulate(program, mesh, laid), choice.outs, outs, strict=True)
        ]
        truth = op.kernel(*(x if x is None else x.double() for x in given), **params)
        for y, whole, want in zip(got, op.kernel(*given, **params), truth, strict=True):
            assert y.dtype == whole.dtype and (y - want).norm() <= 2 * (whole - want).norm()
    passed = {
        e.inputs[0].dtype
        for e in program.main.eqns
        if e.op.name == "permute_ranks" and e.inputs[0].shape == (2, 2, 16, 8)
    }
    assert passed == {torch.bfloat16, torch.float32}


# -- what it computes


def blocks(program, name):
    """(rows, columns, causal) of the attention equations"""
    at = 0 if name == "attention" else 1
    equations = [e for e in program.main.eqns if e.op.name == name]
    assert all(e.inputs[at + 3] is None for e in equations), "a mask: scores are computed for nothing"
    return [(e.inputs[at].shape[2], e.inputs[at + 1].shape[2], e.params.get("causal", False)) for e in equations]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_causal_ring_computes_each_score_once(count):
    """The text is the same on all ranks, so each computes its n-th of the triangle, to the element, and none beside
    it."""
    mesh, length = Mesh(cp=count), 48
    inputs, params = operands(length, length), {"causal": True}
    for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        shapes = blocks(lowered(op, given, params, {"cp": RING}, mesh)[0], op.name)
        assert all(q == k for q, k, causal in shapes if causal)
        needed = sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in shapes)
        assert count * needed == length * (length + 1) // 2
        touched = sum(q * k for q, k, _ in shapes)  # by kernels that do not skip the other half of a triangle
        assert touched * 2 * count == (count + 1) * (length // count) * length


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_ring_without_a_triangle_computes_all(count):
    program, *_ = lowered(attention, operands(24, 12), {}, {"cp": RING}, Mesh(cp=count))
    assert blocks(program, "attention") == [(24 // count, 12 // count, False)] * count


def test_an_axis_of_one_rank_costs_nothing():
    inputs, params = operands(8, 8), {"causal": True}
    for label in (ROWS, RING):
        for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
            program, *_ = lowered(op, given, params, {"cp": label}, Mesh(cp=1))
            assert [e.op for e in program.main.eqns] == [op] and program.main.eqns[0].params == params


# -- what it sends ---------------------------------------------------------------------------------------------------


def sent(program):
    return sum(sent_by(e)[1] for e in program.main.eqns)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_on_the_wire(count):
    """k and v go on count - 1 times, their cotangents too; a triangle is folded and unfolded: each operand and result
    once."""
    mesh, inputs = Mesh(cp=count), operands(24, 24)
    q, k, v, _ = (0 if x is None else x.nbytes // count for x in inputs)
    y, lse = (x.nbytes // count for x in attention.kernel(*inputs))
    dq, dk, dv, g = q, k, v, y
    turns = count - 1

    def of(op, params):
        given = inputs if op is attention else with_results(inputs, params)
        return sent(lowered(op, given, params, {"cp": RING}, mesh)[0])

    assert of(attention, {}) == turns * (k + v)
    assert of(attention_grad, {}) == turns * (k + v + dk + dv)
    assert of(attention, {"causal": True}) == turns * (k + v) + q + k + v + y + lse
    assert of(attention_grad, {"causal": True}) == turns * (k + v + dk + dv) + (g + q + k + v + y + lse) + (
        dq + dk + dv
    )


def test_rows_alone_send_nothing():
    inputs, params = operands(24, 24), {"causal": True}
    for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        program, choice, _ = lowered(op, given, params, {"cp": ROWS}, Mesh(cp=2))
        assert sent(program) == 0
        assert [x.partial for x in choice.outs] == (
            [()] * 2 if op is attention else [(), (("cp", "+"),), (("cp", "+"),)]
        )


# -- all-to-all over heads


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("params", [{}, {"causal": True}], ids=["full", "causal"])
def test_from_sequence_to_heads_and_back(params, mesh):
    """Operands and results are split over the sequence, the equation over heads: no rule, only moves."""
    inputs = operands(12, 12, groups=4)
    labels = labels_on(mesh, Label("g"))
    batch = ("dp",) if "dp" in mesh else ()
    for op, given in ((attention, inputs), (attention_grad, with_results(inputs, params))):
        b = Builder()
        atoms = [b.input(f"x{i}", type_of(x)) if x is not None else None for i, x in enumerate(given)]
        with b:
            outs = op(*atoms, **params)
        choice = Options.of(b.eqns[0]).choice(labels)

        def split(x):
            return Layout((batch, (), ("cp",), *((),) * (x.ndim - 3)))

        tensors = [x for x in given if x is not None]
        laid = Laid(tuple(map(split, tensors)), (choice,), tuple(map(split, outs)))
        program = check(spmd(Program({"main": b.block(outs)}), {"main": laid}, moves_on(mesh)))
        assert [e.op.name for e in program.main.eqns] == ["all_to_all"] * len(tensors) + [op.name] + [
            "all_to_all"
        ] * len(outs)
        outputs = simulate(program, mesh, [spread_out(x, split(x), mesh) for x in tensors])
        for m, v, want in zip(outputs, outs, op.kernel(*given, **params), strict=True):
            assert torch.allclose(put_together(m, split(v), v.type, mesh), want, rtol=EXACT, atol=EXACT)
