"""precision="fp8": the emulation is what formats of 8 bits are, gradients are those of the same casts, ranks change no
more than rounding, and which layers are in 8 bits follows from where they are and what they cost."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from distributing import OneDevice, start_values
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from models import gpt2, llama
from torch import nn

import mycel
from mycel import lower, plan, transform
from mycel.errors import PlanError, TrainError
from mycel.ir import OPS, Mesh, Program, check, walk
from mycel.ops.fp8 import E4M3, E5M2
from mycel.plan import Plan, fp8_products
from mycel.plan.cluster import Cluster
from mycel.plan.hardware import KNOWN
from mycel.run import interpret, simulate
from mycel.run.simulate import spread_out
from mycel.train import planner

linear, matmul, weight = (OPS[name].kernel for name in ("fp8_linear", "fp8_matmul", "fp8_linear_weight"))


# -- the reference: every number of a format, and the nearest of them


def numbers_of(form):
    every = torch.arange(256, dtype=torch.uint8).view(form).double()
    return every[every.isfinite()].unique()


NUMBERS = {form: numbers_of(form) for form in (E4M3, E5M2)}


def rounded(row, form):
    """A row times the largest power of two with which it fits, as the nearest numbers of the format (of two equally
    near the one whose last bit is even), and back."""
    known = NUMBERS[form]
    top, most = row.abs().max().item(), known.max().item()
    if top == 0:
        return row
    power = next(p for p in range(140, -140, -1) if top * 2.0**p <= most)
    scaled = row * 2.0**power
    gaps = (scaled.unsqueeze(1) - known).abs()
    nearest = gaps == gaps.min(1, keepdim=True).values
    is_even = known.to(form).view(torch.uint8) % 2 == 0
    best = (nearest.double() + 0.5 * (nearest & is_even)).argmax(1)
    return known[best] / 2.0**power


def reference(a, b, left):
    """a [m, k] @ b [n, k].T of rounded rows, in double precision."""
    rows = [torch.stack([rounded(r, form) for r in x.double()]) for x, form in ((a, left), (b, E4M3))]
    return rows[0] @ rows[1].t()


@given(st.integers(0, 10_000), st.integers(-70, 70), st.sampled_from([E4M3, E5M2]))
@settings(derandomize=True, deadline=None, max_examples=25, database=None)
def test_the_emulation_is_the_format(seed, exponent, left):
    """Rows of all magnitudes, with elements that are far apart, and one of zeros."""
    gen = torch.Generator().manual_seed(seed)

    def some(rows):
        spread_of = torch.randint(-12, 3, (rows, 24), generator=gen)
        return torch.randn(rows, 24, generator=gen) * 2.0 ** (spread_of + exponent).double()

    x, w = some(5).float(), (some(3) * 2.0**-exponent).float()
    x[0] = 0
    want = reference(x, w, left)
    for got in (linear(x, w, left=left), matmul(x, w.t(), left=left), weight(x.t(), w.t(), left=left)):
        assert (got.double() - want).abs().max() <= 1e-6 * (x.double().abs() @ w.double().abs().t()).max()
    assert (linear(x.bfloat16(), w.bfloat16(), left=left)[0] == 0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad):
    x, w = torch.randn(4, 16), torch.randn(3, 16)
    x[1, 5] = bad
    y = linear(x, w)
    assert not y[1].isfinite().any() and y[[0, 2, 3]].isfinite().all()


def test_rows_and_columns_are_independent():
    """To the bit: so ranks that have some of them compute what one device does."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 32).bfloat16(), torch.randn(10, 32).bfloat16()
    whole = linear(x, w)
    assert torch.equal(whole, torch.cat([linear(x[:2], w), linear(x[2:], w)]))
    assert torch.equal(whole, torch.cat([linear(x, w[:7]), linear(x, w[7:])], 1))
    parts = linear(x[:, :16], w[:, :16]).float() + linear(x[:, 16:], w[:, 16:]).float()
    exact = (x.float() @ w.float().t()).double()
    assert (parts - exact).norm() <= 1.3 * (whole - exact).norm()  # scales of parts are no coarser


# -- whole steps


class Fp8Linear(torch.autograd.Function):
    """The same casts, in torch."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return reference(x, w, E4M3).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return reference(g, w.t(), E5M2).to(x.dtype), reference(g.t(), x.t(), E5M2).to(w.dtype)


class Mlp(nn.Module):
    """Four layers: in 8 bits are the two in the middle."""

    def __init__(self):
        super().__init__()
        sizes = (16, 32, 48, 32, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == len(self.layers) - 1 else F.gelu(layer(x))
        return x

    def by_hand(self, x):
        for i, layer in enumerate(self.layers):
            product = Fp8Linear.apply if i in (1, 2) else F.linear
            x = product(x.bfloat16(), layer.weight.bfloat16())
            x = x if i == len(self.layers) - 1 else F.gelu(x)
        return x


def squares(y, target):
    return ((y.float() - target) ** 2).mean()


def test_gradients_are_those_of_the_same_casts():
    torch.manual_seed(0)
    model = Mlp()
    twin = copy.deepcopy(model)
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.0), squares, precision="fp8", compile=False, grads=True
    )
    loss = step(x, target)
    want = squares(twin.by_hand(x), target)
    want.backward()
    assert torch.allclose(loss, want.detach(), rtol=1e-3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 6e-3 * q.grad.norm()  # rounding of 16 bits in another order
        assert p.grad.dtype == torch.float32


def test_what_is_in_eight_bits_is_said():
    model = Mlp()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), squares, precision="fp8", compile=False)
    step(torch.randn(32, 16), torch.randn(32, 16))
    said = [line for line in step.explain().splitlines() if not line.startswith("predicted")][:4]
    golden("fp8_explain", "\n".join(said))
    used = [e.op.name for _, e in walk(step.program) if e.op.name.startswith("fp8")]
    assert sorted(used) == 6 * ["fp8_columns"] + 6 * ["fp8_product"] + 6 * ["fp8_rows"]


def curve(make, precision, steps=30, **more):
    torch.manual_seed(0)
    model = make()
    step = mycel.train_step(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), precision=precision, compile=False, **more
    )
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (8, 16), generator=gen)
    losses = torch.stack([step(input_ids=x, labels=x) for x in (ids[i % 2 :: 2] for i in range(steps))])
    return losses, step


SMALL = {
    "gpt2": (lambda: gpt2(n_layer=2), 8),
    "llama": (lambda: llama(num_hidden_layers=2), 14),
}


@pytest.mark.parametrize("name", SMALL)
def test_thirty_steps_fall_as_in_16_bits(name):
    make, layers = SMALL[name]
    losses, step = curve(make, "fp8")
    other, _ = curve(make, "bf16")
    fell = (other[0] - other[-1]).item()
    assert fell > 1.0 and not torch.equal(losses, other)
    assert (losses - other).abs().max().item() < 0.03 * fell
    assert f"{layers} of {layers + 1} products" in step.explain() and "last" in step.explain()


def test_under_a_budget_in_parts_and_clipped():
    """What backward computes again, microbatches and clipping: the same up to the rounding of 16 bits."""
    make = SMALL["gpt2"][0]
    plain, step = curve(make, "fp8", 4)
    tight, other = curve(make, "fp8", 4, memory=int(0.9 * step.plan.peak), accumulate=2, clip_norm=10.0)
    assert torch.allclose(plain, tight, rtol=4e-3)
    assert other.plan.peak < step.plan.peak


def test_weights_in_16_bits():
    losses, _ = curve(lambda: llama(num_hidden_layers=1).bfloat16(), "fp8", 8)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("names, sizes", [("zero3", {"dp": 2}), ("tp", {"tp": 2})], ids=["zero3", "tp"])
def test_ranks(names, sizes):
    """Each rank multiplies its part in 8 bits; the loss is that of one device up to the rounding of 16 bits, as no sum
    but those of tp is over parts that were scaled apart."""
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (4, 16))
    one = OneDevice.of(SMALL["llama"][0](), {"input_ids": ids, "labels": ids}, precision="fp8")
    mesh = Mesh(sizes)
    distributed = one.under(Plan.read(names, mesh))
    kinds = [e.op.name for _, e in walk(distributed.local)]
    assert {"fp8_linear", "fp8_matmul", "fp8_linear_weight"} <= set(kinds)
    values = start_values(one)
    serial = interpret(one.unsharded.program, values)[0]
    parts = [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    run = lower.local_of(one.unsharded.program, distributed)
    assert {"fp8_rows", "fp8_columns", "fp8_product"} <= {e.op.name for _, e in walk(run)}
    for local in (check(distributed.local), run):
        assert all(torch.allclose(loss, serial, rtol=4e-3) for loss in simulate(local, mesh, parts)[0])


# -- which layers

PROGRAM = """\
def layer(x: bf16[32,64], w: f32[64,64]):
  c: bf16[64,64] = cast(w, dtype=bf16)
  y: bf16[32,64] = linear(x, c)
  return y
def main(x: bf16[32,64], a: f32[64,64] = parameter a, b: f32[64,64] = parameter b, c: f32[64,64] = parameter c,
         d: f32[64,16] = parameter d):
  p: bf16[32,64] = call(x, a, block=@layer)
  e: bf16[64,64] = cast(b, dtype=bf16)
  q: bf16[32,64] = matmul(p, e)
  r: bf16[32,64] = call(q, c, block=@layer)
  f: bf16[64,16] = cast(d, dtype=bf16)
  z: bf16[32,16] = matmul(r, f)
  s: f32[32,16] = cast(z, dtype=f32)
  loss: f32[] = sum(s, dims=(0,1))
  return loss
"""


def test_the_pass():
    """The first call of the block reads the batch, the second does not: the block is not the first layer."""
    program = check(Program.parse(PROGRAM))
    chosen = fp8_products(program, plan.CPU, False)
    narrow = check(transform.fp8(program, chosen.narrow))
    golden("fp8", f"{chosen}\n\n{narrow}")


SHARED = """\
def main(x: bf16[32,64], g: bf16[32,48], q: bf16[48,64], k: bf16[48,64]):
  a: bf16[32,48] = fp8_linear(x, q)
  b: bf16[32,48] = fp8_linear(x, k)
  c: bf16[32,64] = fp8_matmul(g, q, left=f8e5m2)
  d: bf16[48,64] = fp8_linear_weight(g, x, left=f8e5m2)
  e: bf16[64,48] = fp8_linear_weight(g, x, left=f8e5m2, turned=True)
  return a, b, c, d, e
"""


def test_an_operand_is_converted_once():
    """By rows and by columns, whoever multiplies it; and the products are the same to the bit."""
    program = check(Program.parse(SHARED))
    opened = check(transform.once(program))
    golden("fp8_once", str(opened))
    values = [torch.randn(v.shape).bfloat16() for v in program.inputs]
    pairs = zip(interpret(program, values), interpret(opened, values), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert transform.once(opened) is opened


GATES = """\
def main(g: bf16[32,48], a: bf16[32,48], b: bf16[32,48]):
  s: bf16[32,48] = silu(a)
  v: bf16[32,48] = mul(s, b)
  x: f8e4m3[32,48], x_scale: f32[32,1] = fp8_rows(v, form=f8e4m3)
  y: bf16[32,32] = fp8_product(x, x_scale, x, x_scale, dtype=bf16)
  t: bf16[32,48] = silu(b)
  w: bf16[32,48] = mul(t, a)
  p: f8e4m3[48,32], p_scale: f32[48,1] = fp8_columns(w, form=f8e4m3)
  d: bf16[32,48] = mul(g, a)
  e: bf16[32,48] = mul(t, g)
  q: f8e5m2[32,48], q_scale: f32[32,1] = fp8_rows(e, form=f8e5m2)
  r: f8e5m2[48,32], r_scale: f32[48,1] = fp8_columns(e, form=f8e5m2)
  f: bf16[32,48] = silu_grad(d, b)
  i: f8e5m2[32,48], i_scale: f32[32,1] = fp8_rows(f, form=f8e5m2)
  j: f8e5m2[48,32], j_scale: f32[48,1] = fp8_columns(f, form=f8e5m2)
  return y, p, p_scale, q, q_scale, r, r_scale, i, i_scale, j, j_scale
"""


def test_gates_are_converted_as_they_are_computed():
    """A gate, and the gradients of another one; the same to the bit where the operators are what they stand for."""
    program = check(Program.parse(GATES))
    fused = check(transform.fp8_gates(program))
    golden("fp8_gates", str(fused))
    values = [torch.randn(v.shape).bfloat16() for v in program.inputs]
    pairs = zip(interpret(program, values), interpret(fused, values), strict=True)
    assert all(torch.equal(a.float(), b.float()) for a, b in pairs)


@pytest.mark.parametrize(
    "line, other",
    [
        ("r: f8e5m2[48,32], r_scale: f32[48,1] = fp8_columns(e, form=f8e5m2)",
         "r: f8e4m3[48,32], r_scale: f32[48,1] = fp8_columns(e, form=f8e4m3)"),
        ("fp8_rows(f, form=f8e5m2)", "fp8_rows(g, form=f8e5m2)"),
        ("d: bf16[32,48] = mul(g, a)", "d: bf16[32,48] = mul(g, b)"),
    ],
    ids=["another form", "not converted", "another factor"],
)  # fmt: skip
def test_what_is_no_gradient_of_a_gate_stays(line, other):
    fused = check(transform.fp8_gates(check(Program.parse(GATES.replace(line, other)))))
    assert line in GATES and [e.op.name for _, e in walk(fused) if "gated" in e.op.name] == ["gated_fp8"]


def products(model, batch, hardware, **more):
    """Of a step of a model without data."""
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp8", **more)
    step.planned_for = hardware
    return step.unsharded(**batch).fp8


class Sparse(nn.Module):
    """A router, layers too small to pay, of odd sizes, and one that pays."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 2048)
        self.router, self.small, self.odd = (nn.Linear(2048, n, bias=False) for n in (256, 16, 2047))
        self.large, self.head = nn.Linear(2048, 8192, bias=False), nn.Linear(8192 + 256 + 16 + 2047, 16)

    def forward(self, ids):
        x = self.embedding(ids)
        scores, chosen = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], 256, dtype=scores.dtype, device=x.device).scatter(-1, chosen, scores)
        parts = [weights, self.small(x), self.odd(x), self.large(x)]
        return self.head(torch.cat(parts, -1)).float().square().mean()


def test_layers_stay_wide_for_a_reason():
    with torch.device("meta"):
        model, batch = Sparse(), {"ids": torch.zeros(4, 2048, dtype=torch.int64)}
    chosen = products(model, batch, KNOWN["H200"], compile=True)
    assert chosen.wide == {
        "router": ["router.weight"],
        "too small to pay": ["small.weight"],
        "a size is no multiple of 16": ["odd.weight"],
        "last": ["head.weight"],
    }
    assert chosen.layers == (1, 5)
    slow = products(model, batch, KNOWN["A100-80"], compile=True)  # without a rate for 8 bits: emulated, at any price
    assert "too small to pay" not in slow.wide


class Beside(nn.Module):
    """A layer that pays where another one has converted what it reads."""

    def __init__(self, others):
        super().__init__()
        self.embedding = nn.Embedding(64, 3072)
        self.layers = nn.ModuleList(nn.Linear(3072, n, bias=False) for n in (512, *[3072] * others))
        self.head = nn.Linear(512 + 3072 * others, 16, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(torch.cat([layer(x) for layer in self.layers], -1)).float().square().mean()


@pytest.mark.parametrize("others, reasons", [(0, ["too small to pay", "last"]), (1, ["last"])])
def test_what_is_converted_already_is_free(others, reasons):
    with torch.device("meta"):
        model, batch = Beside(others), {"ids": torch.zeros(4, 4096, dtype=torch.int64)}
    chosen = products(model, batch, KNOWN["H200"], compile=True)
    assert list(chosen.wide) == reasons


def test_nothing_is_in_eight_bits():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda y: y.float().square().mean(), precision="fp8"
    )
    with pytest.warns(UserWarning, match="no product is in 8 bits"):
        step(torch.randn(2, 3, 8, 8))
    assert "fp8              0 of 2 products" in step.explain()


def test_devices_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(TrainError, match=r"A100 has no products in 8 bits\n  at .*8.0; 8.9 has them\n  try .*bf16"):
        plan.refuse_without_fp8(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    plan.refuse_without_fp8(torch.device("cuda", 0))
    with pytest.raises(TrainError, match="a device of type mps"):
        plan.refuse_without_fp8(torch.device("mps"))


def test_a_cluster_without():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="A100-80 has no products in 8 bits"):
        planner.search(model, optimizer, {}, Cluster.read("a100x8"), precision="fp8")
    mixed = {"hosts": [{"device": "H100", "devices": 8}, {"device": "A100", "devices": 8}]}
    assert Cluster.read("h100x8").hardware.quarter and Cluster.read(mixed).hardware.quarter is None
