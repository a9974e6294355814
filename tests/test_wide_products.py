"""Products of 16 bits where a processor has none: in 32, rounded once; and how it is known that it has none."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
import torch
from golden import golden
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import read

import mycel
from examples import parse_example
from mycel import Program, transform
from mycel.ir import CONTROL, OPS, Builder, check, is_float, type_of, walk
from mycel.ops import o, product_speed
from mycel.run import interpret, wide_calls
from mycel.run.wide_calls import PRODUCTS
from mycel.train.generate import Sampling, stream

HALF = {"bf16": torch.bfloat16, "f16": torch.float16}
SLOW = dict.fromkeys(HALF.values(), 0)
CASES = [
    pytest.param(op, parse_example(text), free, id=f"{op.name}({text}) {free}")
    for op in OPS.values()
    if (op.product or op.precision == "low") and op not in CONTROL and op is not o.linear_few_rows
    for text in op.examples
    for free in HALF
    if free in parse_example(text).dtypes()
]


def program_of(op, inputs, params) -> Program:
    b = Builder()
    given = [b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
    with b:
        out = op(*given, **params)
    return check(Program({"main": b.block(out if isinstance(out, tuple) else (out,))}))


def exact(x):
    """A tensor with its numbers in 64 bits."""
    return x.double() if isinstance(x, torch.Tensor) and is_float(x.dtype) else x


def assert_rounded(got, wanted, roundings: float) -> None:
    """So many roundings to the dtype of `got` away from what it should be, besides those of sums in 32 bits."""
    assert got.shape == wanted.shape
    infinite = ~wanted.isfinite()  # rows of attention that see nothing
    assert torch.equal(got.double()[infinite].nan_to_num(), wanted[infinite].nan_to_num())
    got, wanted = got[~infinite], wanted[~infinite]
    off, step = (got.double() - wanted).abs(), torch.finfo(got.dtype).eps / 2
    size = wanted.abs().max() if wanted.numel() else 0.0
    assert (off <= roundings * step * wanted.abs() + 2e-6 * (1 + size)).all(), (got, wanted)


@pytest.mark.parametrize("op, example, free", CASES)
def test_a_product_is_rounded_once(op, example, free):
    inputs = example.make(free)
    program = program_of(op, inputs, example.params)
    changed = check(transform.wide_products(program, SLOW))
    assert changed != program and transform.halves(changed) == frozenset()
    assert check(transform.wide_products(changed, SLOW)) == changed
    assert Program.parse(str(changed)) == changed
    wanted = op.kernel(*(exact(x) for x in inputs), **example.params)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    results = interpret(changed, [x for x in inputs if isinstance(x, torch.Tensor)])
    for y, before, z in zip(results, program.main.outputs, wanted, strict=True):
        assert type_of(y) == before.type
        assert_rounded(y, z, 1.01)


@pytest.mark.parametrize("op, example, free", [c for c in CASES if c.values[0].vjp])
def test_gradients_of_a_product_are_near_those_in_64_bits(op, example, free):
    """Of its first result, for a cotangent by chance: all their products are in 32 bits."""
    inputs = example.make(free)
    first = program_of(op, inputs, example.params).main.outputs[0]
    cotangent = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first.dtype)

    def weighed(*args):
        return o.sum(o.mul(_first(op(*args[:-1], **example.params)), args[-1]), dims=tuple(range(first.ndim)))

    program = program_of(weighed, [*inputs, cotangent], {})
    wrt = [i for i, v in enumerate(program.inputs[:-1]) if is_float(v.dtype)]
    gradient = check(transform.value_and_grad(program, wrt))
    changed = check(transform.wide_products(gradient, SLOW))
    assert transform.halves(changed) == frozenset() != transform.halves(gradient)
    wide = [exact(x).requires_grad_() if isinstance(x, torch.Tensor) and is_float(x.dtype) else x for x in inputs]
    leaves = [x for x in wide if isinstance(x, torch.Tensor) and x.requires_grad]
    total = (_first(op.kernel(*wide, **example.params)) * exact(cotangent)).sum()
    wanted = torch.autograd.grad(total, leaves, allow_unused=True)
    got = interpret(changed, [x for x in (*inputs, cotangent) if isinstance(x, torch.Tensor)])[1:]
    for y, z in zip(got, wanted, strict=True):
        z = torch.zeros_like(y, dtype=torch.float64) if z is None else z
        assert (y.double() - z).abs().max() <= 2 * torch.finfo(HALF[free]).eps * z.abs().max().clamp(min=1.0), (y, z)


def _first(y):
    return y[0] if isinstance(y, tuple) else y


BEFORE = """
def main(x: bf16[64,768], w: bf16[2048,768], few: bf16[2,768], mask: f32[64,64]):
  y: bf16[64,2048] = linear(x, w)
  z: bf16[2,2048] = linear(few, w)
  q: bf16[1,12,64,64] = reshape(x, shape=(1, 12, 64, 64))
  a: bf16[1,12,64,64], lse: f32[1,12,64] = attention(q, q, q, mask)
  s: f32[64,64] = matmul(mask, mask)
  return y, z, a, lse, s
"""


def test_golden():
    """From 16 rows on: products of few rows stay, as do those in 32 bits."""
    program = read(BEFORE)
    changed = check(transform.wide_products(program, {torch.bfloat16: 16}))
    golden("wide_products", f"# before\n\n{program}\n# after\n\n{changed}")
    assert transform.wide_products(program, {torch.float16: 1}) == program == transform.wide_products(program, {})


@pytest.fixture
def slow(monkeypatch):
    """As on a processor without products of 16 bits."""
    monkeypatch.setattr(product_speed, "_slow_from", lambda dtype: 1)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(product_speed, "_slow_from", lambda dtype: 0)


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).bfloat16()


def test_jitted_code_multiplies_in_32_bits(slow):
    model, x = small_model(), torch.randn(16, 8).bfloat16()
    fast_model = mycel.jit(model)
    assert "torch.float32" in fast_model.source(x)
    y, want = fast_model(x), model.double()(x.double())
    assert y.dtype == torch.bfloat16 and (y.double() - want).abs().max() < 0.02
    with torch.no_grad():
        assert torch.equal(mycel.jit(model.bfloat16())(x), y)


def test_where_16_bits_are_fast_nothing_is_cast(fast):
    assert "torch.float32" not in mycel.jit(small_model()).source(torch.randn(16, 8).bfloat16())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_is_near_to_that_in_32_bits(slow, precision):
    losses = {}
    for kind in ("fp32", precision):
        model = small_model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mycel.train_step(model, optimizer, torch.nn.functional.mse_loss, precision=kind)
        x, y = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)), torch.zeros(16, 4)
        losses[kind] = torch.tensor([float(step(x, y)) for _ in range(5)])
    assert torch.allclose(losses[precision], losses["fp32"], rtol=0.01), losses
    assert losses[precision][-1] < losses[precision][0]


def test_products_of_a_step_are_written_in_32_bits(slow):
    model = small_model()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
    step(torch.randn(16, 8).bfloat16(), torch.zeros(16, 4).bfloat16())
    assert {e.op for _, e in walk(step.program)} & {o.linear, o.linear_bias}
    assert step.source.count(".to(torch.float32)") >= 2 * 5  # operands of two products, and of three gradients


def test_what_was_measured_is_remembered(tmp_path, monkeypatch):
    """The first to come says it for all; without a folder, or with a broken file, it is measured again."""
    monkeypatch.setenv("MYCEL_KERNELS", str(tmp_path / "kernels"))
    measured = []
    monkeypatch.setattr(product_speed, "_measured", lambda dtype: measured.append(dtype) or 16)
    ask = product_speed._slow_from.__wrapped__
    assert [ask(torch.bfloat16) for _ in range(3)] == [16] * 3 and measured == [torch.bfloat16]
    (file,) = (tmp_path / "kernels").iterdir()
    assert json.loads(file.read_text()) == {"slow_from_rows": 16}
    file.write_text('{"slow_from_rows": 1}')
    assert ask(torch.bfloat16) == 1 and ask(torch.float16) == 16
    assert product_speed._kept(product_speed._written(file, 99)) == 1  # another rank was first
    file.write_text("{")
    assert ask(torch.bfloat16) == 16
    monkeypatch.setenv("MYCEL_KERNELS", "")
    assert ask(torch.bfloat16) == 16 and len(measured) == 4
    assert len(os.listdir(tmp_path / "kernels")) == 2


@pytest.mark.parametrize("slow, first", [((), 0), ((1, 16, 64, 256), 1), ((64, 256), 64), ((1, 256), 256), ((16,), 0)])
def test_a_processor_may_be_slow_from_some_number_of_rows_on(slow, first, monkeypatch):
    """AVX-512 without bf16 is hardly slower at 16 rows, and six times at 256."""
    monkeypatch.setattr(product_speed, "_is_slow", lambda dtype, rows: rows in slow)
    assert product_speed._measured(torch.bfloat16) == first


def test_a_processor_is_asked_for_cpus_alone():
    assert product_speed.slow_products(torch.device("cuda"), [torch.bfloat16]) == {}
    assert product_speed._measured(torch.float32) == 0  # a cast to itself gains nothing


def test_code_that_runs_as_it_is_multiplies_in_32_bits(slow):
    """As a prompt does, outside of autograd: near to 64 bits, and of the same types."""
    torch.manual_seed(0)
    layer = AllProducts()
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        wanted = layer.double()(x.double())
        layer.bfloat16()
        seen = Seen()
        with seen, wide_calls(layer, 8):
            y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16 and (y.double() - wanted).abs().max() < 0.1
    assert seen.dtypes == {torch.float32}


class AllProducts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = torch.nn.Linear(16, 16), torch.nn.Conv1d(8, 8, 3), torch.nn.Linear(14, 4)

    def forward(self, x):
        q = self.first(x).unflatten(-1, (2, 8)).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        z = (y @ y.transpose(2, 3)).sum(1)
        return self.last(self.conv(torch.cat([z, z], -1)))


class Seen(TorchDispatchMode):
    """The dtypes of products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return func(*args, **(kwargs or {}))


def test_what_stays_as_it_is(fast, monkeypatch):
    half, single = torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2)
    with torch.no_grad():
        assert isinstance(wide_calls(half, 99), contextlib.nullcontext)  # 16 bits are fast
        monkeypatch.setattr(product_speed, "_slow_from", lambda dtype: 16)
        for module, rows in ((half, 15), (single, 99), (len, 99)):
            assert isinstance(wide_calls(module, rows), contextlib.nullcontext)
        assert not isinstance(wide_calls(half, 16), contextlib.nullcontext)
    assert isinstance(wide_calls(half, 16), contextlib.nullcontext)  # autograd records


@pytest.mark.parametrize("way", ["stream", "jit"])
def test_text_of_a_model_of_16_bits(slow, way, monkeypatch):
    """Neither the prompt nor a token has a product of 16 bits; the text is that of the model in 32, rounded weights
    and all, where tokens are far apart."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, eos_token_id=None, **sizes))
    model = model.eval().bfloat16()
    ids, seen = [5, 7, 11, 2], Seen()
    with torch.no_grad(), seen:
        if way == "stream":
            text = [*stream(model, ids, Sampling(6, 0.0), [])]
        else:
            jitted = mycel.jit(model)
            text = jitted.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        assert seen.dtypes == {torch.float32}
        wanted = model.float().generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
    assert text[0] == wanted[0] and len(text) == 6
