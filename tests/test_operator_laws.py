"""The laws every operator keeps, in one loop over the table: nothing here knows an operator by name."""

from __future__ import annotations

import math

import pytest
import torch
from test_step_memory import GRAIN, Live

import mycel.ops  # noqa: F401  fills the table
from examples import parse_example
from mycel import Program, transform
from mycel.ir import CONTROL, OPS, Builder, Eqn, Params, Var, check, is_float, type_of
from mycel.plan.allocations import allocated, is_unsaid
from mycel.run import interpret, load

CASES = [
    pytest.param(op, parse_example(text), id=f"{op.name}({text})")
    for op in OPS.values()
    if op not in CONTROL
    for text in op.examples
]


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def types_of(inputs):
    return [type_of(x) if isinstance(x, torch.Tensor) else x for x in inputs]


def close(a, b, tol):
    if a.is_floating_point() and a.itemsize == 1:  # torch compares none in 8 bits
        a, b = a.float(), b.float()
    return torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def test_every_operator_has_examples():
    held = (*CONTROL, OPS["const"])  # no kernel: the runner has blocks or data for them
    # what they act on is no tensor: tests of control flow
    held += tuple(op for op in OPS.values() if op.effect or op.name.startswith("stack_"))
    held += tuple(op for op in OPS.values() if op.by_rank)  # they need ranks: tests of layouts
    held += tuple(op for op in OPS.values() if op.transfers)  # halves of a move: tests of offload
    held += tuple(op for op in OPS.values() if op.python)  # code of the user: tests of islands
    assert [op.name for op in OPS.values() if op not in held and not op.examples] == []


def test_every_operator_is_documented():
    assert [op.name for op in OPS.values() if not (op.kernel.__doc__ or "").strip()] == []


@pytest.mark.parametrize("op, example", CASES)
def test_type_rule_is_the_kernels(op, example):
    ran = 0
    for free in example.dtypes():
        inputs = example.make(free or "f32")
        try:
            outs = as_tuple(op.kernel(*inputs, **example.params))
        except (RuntimeError, NotImplementedError) as e:
            assert "not implemented for" in str(e) or "not support" in str(e), e  # torch has no kernel for this dtype
            continue
        ran += 1
        assert op.infer(types_of(inputs), example.params) == tuple(type_of(y) for y in outs)
    assert ran, "no dtype of the example ran"


# what they take depends on data, or is that of kernels of ours, which examples in 64 bits do without
BY_DATA = {"experts", "experts_grad", "experts_of_rows", "encode", "encode_residual", "averaged_error", "decode_sum"}
FEW = 4  # small tensors, which show in an example of a few numbers


def test_kernels_take_no_more_than_is_known():
    """Beside operands and results: what an operator says, or what its kernel allocates without data."""
    more = []
    for op, example in (c.values for c in CASES if is_unsaid(c.values[0]) or c.values[0].scratch):
        inputs = example.make("f32" if "f32" in example.dtypes() else example.dtypes()[0] or "f32")
        atoms = [Var(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
        eqn = Eqn(op, tuple(atoms), Params(example.params), ())
        with torch.no_grad(), Live(grain=1 if op.scratch else GRAIN) as live:
            results = (op.inplace or op.kernel)(*inputs, **example.params)
        said = op.scratch(*eqn.input_types, **eqn.params) if op.scratch else allocated(eqn, eqn.input_types, {})
        known = 1.05 * said + FEW * (32 if op.scratch else GRAIN)
        took = live.peak - live.now
        more += [f"{op.name}({example.text}): {took}, at most {known:.0f} known"] if took > known else []
        del results
    assert not (rest := [x for x in more if x.split("(")[0] not in BY_DATA]), "\n".join(rest)


@pytest.mark.parametrize("op, example", [c for c in CASES if c.values[0].expand])
def test_expand_is_the_kernel(op, example):
    inputs = example.make("f64")
    want, got = (as_tuple(f(*inputs, **example.params)) for f in (op.kernel, op.expand))
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype and close(a, b, 1e-9)


FIRST = [
    c
    for c in CASES
    if c.values[0].compiles and c.values[0].inplace is None and c.values[1].text == c.values[0].examples[0]
]


@pytest.mark.parametrize("op, example", FIRST)
def test_generated_code_can_be_compiled(op, example):
    """As one graph, without a break: torch.compile takes whole blocks."""
    inputs = example.make("f32" if "f32" in example.dtypes() else example.dtypes()[0] or "f32")
    b = Builder()
    given = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        out = op(*given, **example.params)
    run, _ = load(check(Program({"main": b.block(as_tuple(out))})), torch.device("cpu"))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(run, backend="eager", fullgraph=True, dynamic=False)(*tensors)
        assert all(torch.equal(a, b) or close(a, b, 1e-6) for a, b in zip(got, run(*tensors), strict=True))


def leaves(inputs):
    """Inputs with fresh leaves for the differentiable ones."""
    return [
        x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and is_float(x.dtype) else x for x in inputs
    ]


ROUGH = {"hardsigmoid": 5e-8}  # torch's own gradient holds 1/6 in 32 bits: 3e-8 off


@pytest.mark.parametrize("op, example", [c for c in CASES if c.values[0].vjp])
def test_gradient_is_autograds_and_finite_differences(op, example):
    torch.manual_seed(0)
    inputs = leaves(example.make("f64"))
    if any(isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float16, torch.bfloat16) for x in inputs):
        return  # a dtype example: gradients are checked where numbers are exact enough to tell
    outs = as_tuple(op.kernel(*inputs, **example.params))
    diff = [y for y in outs if is_float(y.dtype) and y.requires_grad]
    if not diff:
        return
    gs = {id(y): torch.randn_like(y) for y in diff}
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    ys = tuple(y.detach() for y in outs)
    cotangents = tuple(gs.get(id(y)) for y in outs)
    single = len(outs) == 1
    got = as_tuple(op.vjp(cotangents[0] if single else cotangents, ys[0] if single else ys, *plain, **example.params))
    assert len(got) == len(inputs), f"{len(got)} cotangents for {len(inputs)} inputs"

    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    auto = torch.autograd.grad(diff, wanted, [gs[id(y)] for y in diff], allow_unused=True)
    by_input = {id(x): a for x, a in zip(wanted, auto, strict=True)}
    for x, ours in zip(inputs, got, strict=True):
        if not (isinstance(x, torch.Tensor) and x.requires_grad):
            continue
        theirs = by_input[id(x)]
        theirs = torch.zeros_like(x) if theirs is None else theirs
        ours = torch.zeros_like(x) if ours is None else ours
        assert ours.shape == x.shape and ours.dtype == x.dtype, (ours.shape, x.shape, ours.dtype)
        assert close(ours, theirs, ROUGH.get(op.name, 1e-8)), (ours, theirs)
        if not x.dtype.is_complex and all(y.dtype in (torch.float64, torch.complex128) for y in diff):
            _finite_difference(op, example, plain, next(i for i, v in enumerate(inputs) if v is x), ours, cotangents)


def _finite_difference(op, example, plain, at, ours, cotangents, eps=1e-6):
    """d/dt <g, op(x + t v)> = <vjp, v>"""
    v = torch.randn_like(plain[at])

    def value(t):
        moved = [*plain]
        moved[at] = plain[at] + t * v
        outs = as_tuple(op.kernel(*moved, **example.params))
        return sum((g.conj() * y.detach()).sum().real for g, y in zip(cotangents, outs, strict=True) if g is not None)

    numeric = float(value(eps) - value(-eps)) / (2 * eps)
    exact = float((ours * v).sum())
    assert math.isclose(numeric, exact, rel_tol=2e-4, abs_tol=2e-6), (numeric, exact)


@pytest.mark.parametrize("op, example", [c for c in CASES if c.values[0].vjp or c.values[0].expand])
def test_forward_mode_is_reverse_mode_transposed(op, example):
    """<g, J t> = <J' g, t>, J t by the jvp and J' g by the vjp of a program of this one equation."""
    torch.manual_seed(0)
    inputs = example.make("f64")
    if any(
        isinstance(x, torch.Tensor)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
        for x in inputs
    ):
        return
    b = Builder()
    atoms = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        outs = as_tuple(op(*atoms, **example.params)) if b.inputs else ()
    program = Program({"main": b.block([v for v in outs if v.dtype == torch.float64])})
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    wrt = [i for i, x in enumerate(tensors) if is_float(x.dtype)]
    if not wrt or not program.main.outputs:
        return
    ts = [torch.randn_like(tensors[i]) for i in wrt]
    n = len(program.main.outputs)
    pushed = interpret(check(transform.jvp(program, wrt)), [*tensors, *ts])[n:]
    forward, backward, given = transform.forward_and_backward(program, wrt, n)
    gs = [torch.randn_like(v) for v in pushed]
    kept = interpret(check(forward), tensors)[n:]
    pulled = interpret(check(backward), [*kept, *(gs[i] for i in given)])
    left = sum(float((gs[i] * pushed[i]).sum()) for i in given)
    right = sum(float((d * t).sum()) for d, t in zip(pulled, ts, strict=True))
    assert math.isclose(left, right, rel_tol=1e-7, abs_tol=1e-9), (left, right)
