"""torch's autograd through jitted code, to the second order: over all operators, and through code that takes gradients
itself.  Nothing here knows an operator by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_operator_laws import CASES, as_tuple
from torch import nn
from torch.nn import functional as F

import mycel
from mycel import Program, transform
from mycel.ir import Block, Builder, check, type_of
from mycel.ops import o
from mycel.run import interpret

EXACT = (torch.float64, torch.complex128)
INEXACT = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def folded(values):
    """One number of many tensors, in which no second derivative is zero."""
    total = None
    for v in values:
        v = o.real(v) if v.dtype.is_complex else v
        part = o.sum(o.mul(o.sin(v), v), dims=tuple(range(v.ndim)))
        total = part if total is None else o.add(total, part)
    return total


def scalar_program(op, example, inputs):
    """A number of all that an operator gives, as a program; None where there is nothing to take a gradient of."""
    b = Builder()
    atoms = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    if not b.inputs:
        return None
    with b:
        outs = [y for y in as_tuple(op(*atoms, **example.params)) if y.dtype in EXACT]
        total = folded(outs)
    return None if total is None else check(Program({"main": b.block([total])}))


def number_of_gradients(program, wrt):
    """The program of a number of its gradients."""
    program = transform.value_and_grad(program, wrt, 0, 1)
    main = program.main
    b = Builder(phase="backward")
    b.reserve(v.name for v in (*main.inputs, *(v for e in main.eqns for v in e.outputs)))
    with b:
        total = folded(main.outputs[1:])
    main = Block(main.inputs, (*main.eqns, *b.eqns), (total,))
    return check(replace(program, blocks={**program.blocks, program.entry: main}))


def torch_gradients(run, tensors, wrt, twice):
    """By torch's autograd, of what `run` gives; `twice`: of a number of its gradients."""
    xs = [x.clone().requires_grad_(i in wrt) for i, x in enumerate(tensors)]
    wanted = [xs[i] for i in wrt]
    y = run(*xs)[0]
    if twice and y.requires_grad:
        grads = torch.autograd.grad(y, wanted, create_graph=True, allow_unused=True)
        y = sum(((g.sin() * g).sum() for g in grads if g is not None), y * 0)
    grads = torch.autograd.grad(y, wanted, allow_unused=True) if y.requires_grad else [None] * len(wrt)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


def torch_refuses(op, example, inputs):
    """Has torch no second derivative of its own kernel?"""
    xs = [x.clone().requires_grad_(x.dtype in EXACT) if isinstance(x, torch.Tensor) else x for x in inputs]
    wanted = [x for x in xs if isinstance(x, torch.Tensor) and x.requires_grad]
    try:
        outs = [y for y in as_tuple(op.kernel(*xs, **example.params)) if y.requires_grad]
        grads = torch.autograd.grad([(y * y).abs().sum() for y in outs], wanted, create_graph=True, allow_unused=True)
        torch.autograd.grad([(g * g).abs().sum() for g in grads if g is not None], wanted, allow_unused=True)
    except RuntimeError as e:
        return "derivative for" in str(e) or "not differentiable" in str(e)
    return False


@pytest.mark.parametrize("op, example", [c for c in CASES if c.values[0].vjp or c.values[0].expand])
def test_second_derivatives_by_torch_are_our_own(op, example):
    """Both by torch, and the second by torch of ours: those of the program differentiated twice."""
    torch.manual_seed(0)
    inputs = example.make("f64")
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    wrt = [i for i, x in enumerate(tensors) if x.dtype == torch.float64]
    if not wrt or any(x.dtype in INEXACT for x in tensors):
        return
    program = scalar_program(op, example, inputs)
    if program is None or not interpret(program, tensors)[0].isfinite():
        return
    once = number_of_gradients(program, wrt)
    want = interpret(check(transform.value_and_grad(once, wrt, 0, 1)), tensors)[1:]
    got = torch_gradients(mycel.jit(once), tensors, wrt, twice=False)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
    try:
        got = torch_gradients(mycel.jit(program), tensors, wrt, twice=True)
    except RuntimeError:
        assert torch_refuses(op, example, inputs)
        return
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(0).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))[0, 0]


class ByHand(nn.Module):
    """Torch's own operator, captured as it is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6) / 4)

    def forward(self, x):
        return x @ torch.linalg.matrix_exp(self.w * x.mean())


LAYERS = {
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "layer_norm": lambda: nn.LayerNorm(6),
    "group_norm": lambda: nn.GroupNorm(2, 6),
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "rms_norm": lambda: nn.RMSNorm(6),
    "opaque": ByHand,
    "attention": Attend,
    "lstm": lambda: Last(nn.LSTM(6, 6, batch_first=True)),
}


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unsqueeze(0))[0][0]


def critic(name):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), LAYERS[name](), nn.Linear(6, 1)).double()


def penalised(run, x):
    x = x.detach().requires_grad_()
    out = run(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + ((g.norm(2, dim=1) - 1) ** 2).mean()


POINTS = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_gradient_penalty(name, where, mode):
    """Of a jitted critic, and in jitted code, as plain torch has it; attention without its fast kernels, of which torch
    has no second derivative."""
    jitted, plain = critic(name), critic(name)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = penalised(plain, POINTS)
        want.backward()
        if where == "inside":
            got = mycel.jit(lambda x: penalised(jitted, x), strict=True, mode=mode)(POINTS)
        else:
            got = penalised(mycel.jit(jitted, strict=True, mode=mode), POINTS)
        got.backward()
    torch.testing.assert_close(got, want)
    for p, q in zip(jitted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(jitted.state_dict(), plain.state_dict())


def test_a_batch_norm_in_training_stays_one_kernel():
    """Its statistics lead to new values of buffers alone."""
    model = nn.BatchNorm1d(6).double()
    assert "batch_norm(" in mycel.jit(model).source(POINTS)
