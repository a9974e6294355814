"""Small equations as blocks in C: what an operator says of itself in C is its kernel, blocks are what they were in
Python, and text is written by them."""

from __future__ import annotations

import pytest
import torch
import transformers
from golden import golden

import mycel.ops
from examples import parse_example
from mycel import Program, api, transform
from mycel.ir import CONTROL, OPS, Block, Builder, Var, check, type_of
from mycel.ops.few_rows import attention_of_few
from mycel.run import interpret, is_small, load, native_blocks
from mycel.run.native_blocks import LARGEST, native_functions
from mycel.train import decode
from mycel.train.generate import Sampling, stream
from mycel.transform.small_blocks import MOST_BYTES

CPU = torch.device("cpu")


def test_what_an_operator_is_in_c_is_its_kernel():
    """All operators that say it, all of their examples, in one library."""
    cases, blocks = [], {}
    for op in OPS.values():
        for text in op.examples if op.c is not None and op not in CONTROL else ():
            example = parse_example(text)
            for free in {*example.dtypes()} & {"f32", "bf16", "i64", "bool", ""}:
                inputs = example.make(free or "f32")
                b = Builder()
                given = [
                    b.input(f"x{i}", type_of(x)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)
                ]
                with b:
                    out = op(*given, **example.params)
                block = b.block((out,))
                if is_small(block.eqns[0]):
                    cases.append((op, example, inputs))
                    blocks[f"case_{len(cases)}"] = block
    assert len({op.name for op, *_ in cases}) == sum(op.c is not None for op in OPS.values())
    functions = native_functions(Program({**blocks, "main": Block((), (), ())}), [*blocks])
    for (op, example, inputs), name in zip(cases, blocks, strict=True):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        (got,), wanted = functions[name](*tensors), op.kernel(*inputs, **example.params)
        near = {"rtol": 1e-2, "atol": 1e-2} if wanted.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            got, wanted, equal_nan=True, msg=lambda m, at=f"{op}({example.text})": at + m, **near
        )


BEFORE = """\
def main(x: f32[2,8], w: f32[8], up: f32[8,8], place: i64[]):
  s: f32[2,8] = square(x)
  h: f32[2,8] = linear(x, up)
  t: f32[2,8] = tanh(s)
  g: f32[2,8] = mul(t, w)
  next: i64[] = add(place, 1)
  y: f32[2,8] = linear(g, up)
  u: f32[2,8] = square(y)
  v: f32[2,8] = tanh(u)
  k: f32[2,8] = mul(v, w)
  after: i64[] = add(next, 1)
  z: f32[2,8] = linear(k, up)
  one: f32[2,8] = neg(z)
  last: f32[2,8] = linear(one, up)
  return h, t, v, after, last
"""


def test_small_blocks():
    program = Program.parse(BEFORE)
    changed, names = transform.small_blocks(program, is_small)
    golden("small_blocks", f"# before\n\n{program}\n# after\n\n{check(changed)}")
    torch.manual_seed(0)
    given = [torch.randn(2, 8), torch.randn(8), torch.randn(8, 8), torch.tensor(4)]
    wanted = interpret(program, given)
    for native in ((), names):
        got = load(changed, CPU, reuse=True, native=native)[0](*given)
        torch.testing.assert_close(list(got), list(wanted))


PRODUCTS = """\
def main(x: f32[5,256], up: f32[300,256], b: f32[300], narrow: i8[256,300], scale: f32[256], k: f32[1,4,9,64],
         v: f32[1,4,9,8], mask: bool[5,9]):
  h: f32[5,300] = linear_few_rows(x, up, b)
  a: f32[5,300] = silu(h)
  y: f32[5,256] = linear_rounded(a, narrow, scale)
  q: f32[1,5,4,64] = reshape(y, shape=(1, 5, 4, 64))
  p: f32[1,4,5,64] = permute(q, dims=(0, 2, 1, 3))
  w: f32[1,4,5,8] = sdpa_few_rows(p, k, v, mask, scale=0.1)
  z: f32[1,4,5,8] = tanh(w)
  return a, z
"""


def test_blocks_go_on_behind_products():
    """And behind attention: one call in C, of the same functions."""
    changed, names = transform.small_blocks(Program.parse(PRODUCTS), is_small)
    assert [e.op.name for e in check(changed).main.eqns] == ["call"]
    torch.manual_seed(0)
    given = [torch.randn(5, 256), torch.randn(300, 256), torch.randn(300)]
    given += [torch.randint(-127, 128, (256, 300)).char(), torch.rand(256) / 1000]
    given += [torch.randn(1, 4, 9, 64), torch.randn(1, 4, 9, 8), torch.rand(5, 9) < 0.5]
    got = load(changed, CPU, native=names)[0](*given)
    torch.testing.assert_close(list(got), list(interpret(Program.parse(PRODUCTS), given)), rtol=1e-4, atol=1e-5)
    wide = [x.bfloat16() for x in given[:3]]
    half = "def main(x: bf16[5,256], up: bf16[300,256], b: bf16[300]):\n  h: bf16[5,300] = linear_few_rows(x, up, b)\n"
    program = Program.parse(half + "  a: bf16[5,300] = neg(h)\n  c: bf16[5,300] = neg(a)\n  return c\n")
    changed, names = transform.small_blocks(program, is_small)
    assert len(changed.main.eqns) == 1
    (y,) = load(check(changed), CPU, native=names)[0](*wide)
    torch.testing.assert_close(y, torch.nn.functional.linear(*wide), rtol=2e-2, atol=0.1)


def test_exponentials_over_all_floats():
    """To two units in the last place, also of results without full precision."""
    program = Program.parse("def main(x: f32[60000]):\n  a: f32[60000] = exp(x)\n  return a\n")
    x = torch.cat([torch.linspace(-105, 89, 59990), torch.tensor([0.0, -0.0, 88.72, 88.73, 200, -200])])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-30])])
    (got,) = native_functions(program, ["main"])["main"](x)
    torch.testing.assert_close(got, x.double().exp().float(), rtol=2.4e-7, atol=3e-45, equal_nan=True)


def test_without_a_compiler_blocks_stay_python(monkeypatch):
    monkeypatch.setattr(native_blocks, "library_of", lambda *_: None)
    changed, names = transform.small_blocks(Program.parse(BEFORE), is_small)
    assert native_functions(changed, names) == {} and names
    given = [torch.randn(2, 8), torch.randn(8), torch.randn(8, 8), torch.tensor(4)]
    assert load(changed, CPU, native=names)[0](*given)[3] == 6


def test_memory_that_lies_otherwise():
    program = Program.parse("def main(x: f32[3,4], y: f32[4]):\n  a: f32[3,4] = add(x, y)\n  return a\n")
    run = native_functions(program, ["main"])["main"]
    x, y = torch.randn(4, 3).T, torch.randn(1).expand(4)
    torch.testing.assert_close(run(x, y)[0], x + y)


FAMILIES = {
    "llama": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 256, "n_layer": 1, "n_head": 4, "n_positions": 128},
    "gemma": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 1},
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    "family, dtype", [*((name, torch.float32) for name in FAMILIES), ("llama", torch.bfloat16)], ids=str
)
def test_text_is_written_by_them(family, dtype, monkeypatch):
    """Weights large enough; tokens one by one and with guesses; the logits of the model as it is."""
    torch.manual_seed(0)
    more = {"vocab_size": 300, "num_hidden_layers": 1, "max_position_embeddings": 128, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **more, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    taken: list[str] = []
    monkeypatch.setattr(api, "load", lambda *a, **k: taken.extend(k.get("native", ())) or load(*a, **k))
    for guess in (False, True):
        decoder = decode.Decoder(model, 128, guess=guess)
        text = [3, 1, 4, 1, 5, 3, 1]
        with torch.no_grad():
            decoder.start(text)
            for token in (4, 1, 5, 9):
                text.append(token)
                wanted = model(input_ids=torch.tensor([text])).logits[0, -1]
                got = decoder.after(token)
                near = 1e-4 if dtype == torch.float32 else 0.05
                torch.testing.assert_close(got, wanted, rtol=near, atol=near * float(wanted.float().abs().max()))
    assert taken
    if dtype == torch.float32:
        wanted = model.generate(torch.tensor([text]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0]
        assert [*stream(model, text, Sampling(12, 0.0), [], decoder)] == wanted[len(text) :].tolist()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(1, 4, 4, 64, 16), (2, 4, 2, 33, 7), (1, 1, 1, 1, 40), (1, 12, 12, 300, 64)])
def test_attention_of_few_rows(rows, shape):
    b, heads, groups, places, width = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, n, width) for h, n in ((heads, rows), (groups, places), (groups, places)))
    seen = torch.rand(b, 1, rows, places) < 0.5
    seen[..., 0] = True
    for mask in (None, seen, seen[:1, 0], seen[:, :, :, ::1].transpose(2, 3).contiguous().transpose(2, 3)):
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=heads != groups)
        torch.testing.assert_close(attention_of_few(q, k, v, mask, None), wanted, rtol=1e-4, atol=1e-5)
    wide = torch.randn(b, heads, width, rows).transpose(2, 3)
    wanted = torch.nn.functional.scaled_dot_product_attention(wide, k, v, seen, scale=0.3, enable_gqa=heads != groups)
    torch.testing.assert_close(attention_of_few(wide, k, v, seen, 0.3), wanted, rtol=1e-4, atol=1e-5)
    spoilt = k.masked_fill(~seen[:, :, :1].transpose(2, 3), torch.nan)  # what no row sees is not read
    assert attention_of_few(q[:, :, :1], spoilt, v, seen[:, :, :1], None).isfinite().all()


def test_a_row_that_sees_nothing_is_what_torch_makes_of_it():
    q, k, v = torch.randn(3, 1, 2, 1, 8).unbind()
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(attention_of_few(q, k, v, mask, None), wanted, equal_nan=True)


def test_a_value_that_is_too_large_is_torchs():
    large = Var("x", type_of(torch.empty(1 << 17)))
    b = Builder()
    with b:
        mycel.ops.o.add(b.input("x", large.type), 1.0)
    assert not is_small(b.eqns[0])


def test_a_block_fits_on_the_stack():
    b = Builder()
    with b:
        y = x = b.input("x", type_of(torch.empty(LARGEST)))
        for _ in range(50):
            y = mycel.ops.o.add(y, x)
    program = Program({"main": b.block((y,))}, "main")
    program, names = transform.small_blocks(program, is_small)
    assert len(names) > 1 and sum(len(program.blocks[name].eqns) for name in names) <= 50
    for name in names:
        assert sum(v.type.bytes for eqn in program.blocks[name].eqns for v in eqn.outputs) <= MOST_BYTES
    given = torch.randn(LARGEST)
    (got,) = load(check(program), CPU, native=names)[0](given)
    torch.testing.assert_close(got, given * 51)
