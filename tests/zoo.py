"""A zoo of small programs that every pass and every runner must treat well, and inputs for them.

ZOO        name -> Program: control flow, repeated blocks, constants, updates, dtypes, masks
inputs     seeded tensors of the types of a program's inputs
"""

from __future__ import annotations

import math

import torch

import mycel.ops  # noqa: F401  fills the table
from mycel.ir import Program, Type
from mycel.run.interpret import interpret

TEXTS = {
    "arithmetic": """
def main(x: f64[2,3], y: f64[3]):
  a: f64[2,3] = add(x, y)
  b: f64[2,3] = mul(a, 2.5)
  c: f64[2,3] = sub(b, x)
  d: f64[2,3] = mul(c, 1)
  e: f64[2,3] = add(d, 0)
  return e, a
""",
    "identities": """
def main(x: f64[2,3], n: i64[4], p: bool[4]):
  a: f64[6] = reshape(x, shape=(6,))
  b: f64[3,2] = reshape(a, shape=(3, 2))
  c: f64[2,3] = permute(b, dims=(1, 0))
  d: f64[3,2] = permute(c, dims=(1, 0))
  e: f64[3,2] = neg(d)
  f: f64[3,2] = neg(e)
  g: f64[3,2] = pow(f, 2)
  h: f64[3,2] = add(g, e)
  i: f64[3,2] = expand(h, shape=(3, 2))
  j: f64[3,2] = slice(i, dim=0, start=0, stop=3)
  k: f64[2,2] = slice(j, dim=0, start=1, stop=3)
  l: f64[1,2] = slice(k, dim=0, start=1, stop=2)
  m: i64[4] = mul(n, -1)
  o: i64[4] = stop_gradient(m)
  q: bool[4] = full(True, dtype=bool, shape=(4,))
  r: bool[4] = logical_and(p, q)
  s: i64[4] = where(q, o, n)
  t: f64[2,3] = flip(x, dims=())
  return j, l, s, r, t
""",
    "casts": """
def main(x: f32[4], i: i32[4], h: bf16[4], b: bool[4]):
  a: f64[4] = cast(x, dtype=f64)
  c: f32[4] = cast(a, dtype=f32)
  d: i64[4] = cast(i, dtype=i64)
  e: f64[4] = cast(d, dtype=f64)
  f: f32[4] = cast(h, dtype=f32)
  g: bf16[4] = cast(f, dtype=bf16)
  j: i8[4] = cast(i, dtype=i8)
  k: i32[4] = cast(j, dtype=i32)
  l: f32[4] = cast(b, dtype=f32)
  m: bool[4] = cast(l, dtype=bool)
  return c, e, g, k, m
""",
    "promotion": """
def main(h: f16[3], x: f32[3], i: i64[3], u: u8[3]):
  a: f32[] = full(0.1, dtype=f32, shape=())
  b: f64[] = full(2.0, dtype=f64, shape=())
  c: f16[3] = mul(h, a)
  d: f32[3] = mul(x, b)
  e: f64[] = add(a, b)
  f: f64[3] = mul(i, b)
  g: i64[] = full(300, dtype=i64, shape=())
  j: u8[3] = add(u, g)
  k: i64[3] = add(i, g)
  return c, d, e, f, j, k
""",
    "complex_numbers": """
def main(x: f64[3], y: f64[3]):
  complex_1: c128[3] = complex(x, y)
  z: c128[3] = mul(complex_1, complex(0.0, 1.0))
  w: c128[3] = conj(z)
  v: c128[3] = conj(w)
  r: f64[3] = real(v)
  return r, w
""",
    "constants": """
def main(x: f64[4]):
  n: i64[4] = iota(dim=0, dtype=i64, shape=(4,))
  m: i64[4] = add(n, 1)
  o: i64[4,1] = reshape(m, shape=(4, 1))
  p: bool[4,4] = ge(o, m)
  zero: f64[] = full(0.0, dtype=f64, shape=())
  q: f64[4,4] = where(p, zero, -inf)
  t: f64[4] = const(dtype=f64, name="table", shape=(4,))
  u: f64[4] = mul(t, 2.0)
  v: f64[4] = add(x, u)
  big: f64[100,100] = full(1.0, dtype=f64, shape=(100, 100))
  two: f64[100,100] = add(big, big)
  s: f64[] = sum(two, dims=(0, 1))
  w: f64[4] = mul(v, s)
  return w, q, m
""",
    "equal_constants": """
def main(x: f64[4]):
  a: f64[4] = const(dtype=f64, name="table", shape=(4,))
  b: f64[4] = const(dtype=f64, name="copy", shape=(4,))
  c: f64[4] = add(x, a)
  d: f64[4] = mul(c, b)
  return d
""",
    "odd_numbers": """
def main(x: f64[3]):
  a: f64[3] = full(nan, dtype=f64, shape=(3,))
  b: f64[3] = full(-0.0, dtype=f64, shape=(3,))
  c: f64[3] = full(0.0, dtype=f64, shape=(3,))
  d: f64[3] = div(1.0, b)
  e: f64[3] = div(1.0, c)
  f: f64[3] = minimum(d, e)
  h: f64[3] = full(nan, dtype=f64, shape=(3,))
  i: f64[3] = add(a, h)
  return f, i
""",
    "empty": """
def main(x: f64[0,3], y: f64[]):
  a: f64[0,3] = mul(x, y)
  b: f64[3,0] = permute(a, dims=(1, 0))
  c: f64[0] = reshape(b, shape=(0,))
  d: f64[] = sum(c, dims=(0,))
  e: f64[] = add(d, y)
  n: i64[0] = iota(dim=0, dtype=i64, shape=(0,))
  m: i64[0] = add(n, 1)
  return e, m
""",
    "dead_code": """
def unused(x: f64[2]):
  y: f64[2] = exp(x)
  return y
def f(x: f64[2], w: f64[2], v: f64[2]):
  a: f64[2] = mul(x, w)
  b: f64[2] = exp(x)
  c: f64[2] = mul(v, v)
  return a, b, c
def main(x: f64[2], w: f64[2], v: f64[2]):
  y: f64[2], z: f64[2], u: f64[2] = call(x, w, v, block=@f)
  t: f64[2], s: f64[2], r: f64[2] = call(y, w, v, block=@f)
  q: f64[2] = call(x, block=@unused)
  return t
""",
    "equal_calls": """
def f(x: f64[2]):
  a: f64[2] = exp(x)
  return a
def g(y: f64[2]):
  b: f64[2] = exp(y)
  return b
def main(x: f64[2]):
  a: f64[2] = call(x, block=@f)
  b: f64[2] = call(x, block=@g)
  c: f64[2] = call(x, block=@f)
  d: f64[2] = add(a, b)
  e: f64[2] = add(d, c)
  f: f64[2] = add(c, d)
  g: f64[2] = sub(e, f)
  return g, e
""",
    "layers": """
def layer(x: f64[4,8], w: f64[8,8], b: f64[8]):
  h: f64[4,8] = linear(x, w)              # model.py:3
  a: f64[4,8] = add(h, b)                 # model.py:3
  t: f64[4,8] = tanh(a)                   # model.py:4
  y: f64[4,8] = add(x, t)                 # model.py:4
  m: f64[4,1] = mean(y, dims=(1,), keepdim=True)
  c: f64[4,8] = sub(y, m)
  d: f64[4,8] = mul(c, c)
  v: f64[4,1] = mean(d, dims=(1,), keepdim=True)
  r: f64[4,1] = rsqrt(v)
  z: f64[4,8] = mul(c, r)
  return z
def main(x: f64[4,8], layers.0.w: f64[8,8], layers.0.b: f64[8], layers.1.w: f64[8,8], layers.1.b: f64[8]):
  h0: f64[4,8] = call(x, layers.0.w, layers.0.b, block=@layer)
  h1: f64[4,8] = call(h0, layers.1.w, layers.1.b, block=@layer)
  s: f64[] = sum(h1, dims=(0, 1))
  return s
""",
    "nested_calls": """
def inner(x: f64[3]):
  a: f64[3] = exp(x)
  return a, x
def middle(x: f64[3], y: f64[3]):
  a: f64[3], b: f64[3] = call(x, block=@inner)
  c: f64[3], d: f64[3] = call(y, block=@inner)
  e: f64[3] = add(a, c)
  return e, d, 2.0
def main(x: f64[3], y: f64[3]):
  a: f64[3], b: f64[3], c: f32[] = call(x, y, block=@middle)
  d: f64[3] = mul(a, c)
  return d, b
""",
    "conditional": """
def double(x: f64[3], w: f64[3]):
  y: f64[3] = mul(x, 2.0)
  z: f64[3] = mul(x, w)
  return y, z
def negative(x: f64[3], w: f64[3]):
  y: f64[3] = neg(x)
  return y, w
def main(x: f64[3], w: f64[3]):
  s: f64[] = sum(x, dims=(0,))
  p: bool[] = gt(s, 0.0)
  y: f64[3], z: f64[3] = cond(p, x, w, orelse=@negative, then=@double)
  return y
""",
    "decided": """
def yes(x: f64[3]):
  y: f64[3] = exp(x)
  return y
def no(x: f64[3]):
  y: f64[3] = neg(x)
  return y
def main(x: f64[3]):
  p: bool[] = full(True, dtype=bool, shape=())
  q: bool[] = logical_not(p)
  a: f64[3] = cond(p, x, orelse=@no, then=@yes)
  b: f64[3] = cond(q, a, orelse=@no, then=@yes)
  return b
""",
    "while_loop": """
def test(c: f64[], i: i64[], x: f64[], unused: f64[]):
  p: bool[] = lt(i, 5)
  return p
def body(c: f64[], i: i64[], x: f64[], unused: f64[]):
  j: i64[] = add(i, 1)
  y: f64[] = mul(x, c)
  z: f64[] = exp(unused)
  return j, y, z
def main(c: f64[], x: f64[]):
  i: i64[] = full(0, dtype=i64, shape=())
  n: i64[], y: f64[], z: f64[] = loop(c, i, x, x, body=@body, consts=1, test=@test)
  return y
""",
    "loop_needs_state": """
def test(i: i64[], x: f64[]):
  p: bool[] = lt(x, 100.0)
  return p
def body(i: i64[], x: f64[]):
  j: i64[] = add(i, 1)
  y: f64[] = mul(x, 2.0)
  return j, y
def main(x: f64[]):
  a: f64[] = abs(x)
  s: f64[] = add(a, 1.0)
  i: i64[] = full(0, dtype=i64, shape=())
  n: i64[], y: f64[] = loop(i, s, body=@body, test=@test)
  return n
""",
    "scan": """
def body(w: f64[3], d: f64[3], s: f64[3], t: f64[3], x: f64[3], u: f64[3]):
  a: f64[3] = mul(s, w)
  b: f64[3] = add(a, x)
  c: f64[3] = exp(t)
  e: f64[3] = sub(b, x)
  f: f64[3] = mul(u, d)
  return b, c, e, f
def main(w: f64[3], s: f64[3], xs: f64[4,3]):
  a: f64[3], b: f64[3], c: f64[4,3], d: f64[4,3] = scan(w, w, s, s, xs, xs, body=@body, carry=2, consts=2, length=4)
  return a, c
""",
    "reverse_scan": """
def body(s: f64[], x: f64[]):
  y: f64[] = add(s, x)
  return y, y
def main(s: f64[], xs: f64[5]):
  t: f64[], ys: f64[5] = scan(s, xs, body=@body, carry=1, length=5, reverse=True)
  return ys, t
""",
    "shared_by_call_and_scan": """
def step(s: f64[2], x: f64[2]):
  y: f64[2] = add(s, x)
  z: f64[2] = mul(s, x)
  return y, z
def main(s: f64[2], xs: f64[3,2]):
  a: f64[2], b: f64[3,2] = scan(s, xs, body=@step, carry=1, length=3)
  c: f64[2], d: f64[2] = call(s, a, block=@step)
  return a, d
""",
    "updates": """
def main(model.w: f64[3], model.count: i64[], x: f64[3]):
  g: f64[3] = mul(x, 2.0)
  d: f64[3] = mul(g, 0.1)
  w: f64[3] = sub(model.w, d)
  n: i64[] = add(model.count, 1)
  l: f64[] = sum(g, dims=(0,))
  return l, model.w=w, model.count=n
""",
    "update_with_itself": """
def main(w: f64[3], x: f64[3]):
  a: f64[3] = mul(w, 1)
  b: f64[3] = add(w, x)
  return b, w=a
""",
    "matmuls": """
def main(x: f64[2,3,4], w: f64[5,4], v: f64[4,5], b: f64[5]):
  t: f64[4,5] = permute(w, dims=(1, 0))
  a: f64[2,3,5] = matmul(x, t)
  c: f64[2,3,5] = add(a, b)
  u: f64[5,4] = permute(v, dims=(1, 0))
  d: f64[2,3,5] = linear(x, u)
  e: f64[2,3,5] = add(b, d)
  f: f64[2,3,5] = add(c, e)
  return f, d
""",
    "convolution": """
def main(x: f64[2,3,5,5], w: f64[4,3,3,3], b: f64[4]):
  y: f64[2,4,5,5] = conv(x, w, dilation=(1, 1), groups=1, padding=(1, 1), stride=(1, 1))
  c: f64[4,1,1] = reshape(b, shape=(4, 1, 1))
  z: f64[2,4,5,5] = add(y, c)
  return z
""",
    "causal_attention": """
def main(q: f64[2,2,6,4], k: f64[2,2,6,4], v: f64[2,2,6,4]):
  n: i64[6] = iota(dim=0, dtype=i64, shape=(6,))
  r: i64[1,1,6,1] = reshape(n, shape=(1, 1, 6, 1))
  c: i64[1,1,1,6] = reshape(n, shape=(1, 1, 1, 6))
  m: bool[1,1,6,6] = le(c, r)
  e: bool[2,1,6,6] = expand(m, shape=(2, 1, 6, 6))
  y: f64[2,2,6,4], l: f64[2,2,6] = attention(q, k, v, e)
  return y
""",
    "attention_layers": """
def layer(q: f64[1,2,4,4], k: f64[1,2,4,4], v: f64[1,2,4,4], mask: f64[1,1,4,4]):
  y: f64[1,2,4,4], l: f64[1,2,4] = attention(q, k, v, mask, scale=0.5)
  a: f64[1,2,4,4] = add(q, y)
  b: f64[1,2,4,4] = tanh(a)
  c: f64[1,2,4,4] = mul(b, 2.0)
  d: f64[1,2,4,4] = exp(c)
  e: f64[1,2,4,4] = log(d)
  f: f64[1,2,4,4] = sin(e)
  g: f64[1,2,4,4] = cos(f)
  h: f64[1,2,4,4] = add(g, y)
  return h
def main(q: f64[1,2,4,4], k: f64[1,2,4,4], v: f64[1,2,4,4]):
  low: f64[4,4] = full(-1.7976931348623157e+308, dtype=f64, shape=(4, 4))
  up: f64[4,4] = triu(low, diagonal=1)
  n: i64[4] = iota(dim=0, dtype=i64, shape=(4,))
  r: i64[4,1] = reshape(n, shape=(4, 1))
  p: bool[4,4] = gt(n, r)
  m: f64[4,4] = mul(up, p)
  e: f64[1,1,4,4] = expand(m, shape=(1, 1, 4, 4))
  a: f64[1,2,4,4] = call(q, k, v, e, block=@layer)
  b: f64[1,2,4,4] = call(a, k, v, e, block=@layer)
  return b
""",
    "windowed_attention": """
def main(q: f64[1,2,6,4], k: f64[1,2,6,4], v: f64[1,2,6,4]):
  r: i64[6,1] = iota(dim=0, dtype=i64, shape=(6, 1))
  c: i64[1,6] = iota(dim=1, dtype=i64, shape=(1, 6))
  a: bool[6,6] = le(c, r)
  w: i64[6,1] = sub(r, 3)
  b: bool[6,6] = gt(c, w)
  m: bool[6,6] = bitwise_and(a, b)
  y: f64[1,2,6,4], l: f64[1,2,6] = attention(q, k, v, m)
  return y, l
""",
    "random": """
def main(x: f64[4,3], key: i64[]):
  a: i64[] = fold_in(key, data=1)
  b: i64[] = fold_in(key, data=1)
  c: f64[4,3] = dropout(x, a, 0, p=0.5)
  d: f64[4,3] = dropout(x, b, 0, p=0.5)
  e: f64[4,3] = sub(c, d)
  f: f64[4,3] = dropout(x, key, 0, p=0.0)
  g: f64[4,3] = add(e, f)
  return g
""",
    "indexing": """
def main(w: f64[6,4], ids: i64[2,3]):
  e: f64[2,3,4] = embedding(w, ids)
  n: i64[3] = iota(dim=0, dtype=i64, shape=(3,))
  s: f64[2,3,4] = index_select(e, n, dim=1)
  a: f64[2,1,4], b: f64[2,2,4] = split(s, dim=1, sizes=(1, 2))
  c: f64[2,3,4] = cat(a, b, dim=1)
  d: f64[2,3,4], i: i64[2,3,4] = sort(c, dim=1)
  x: f64[3,4], y: f64[3,4] = unbind(d, dim=0)
  z: f64[2,3,4] = stack(x, y, dim=0)
  return z
""",
    "text_oddities": """
def main(x: f32[4,4], blocks.0.weight: f32[4,4]):
  y: f32[4,4] = opaque(x, args=(("x", 0),), kwargs=(), target="aten.matrix_exp.default")   # a "quoted" # source: 3
  z: f32[4,4] = clamp(y, None, 0.5)
  w: f32[4,4] = add(z, blocks.0.weight)
  return w
""",
}  # fmt: skip

CONSTS = {
    "table": torch.tensor([1.0, -0.0, math.nan, 0.5], dtype=torch.float64),
    "copy": torch.tensor([1.0, -0.0, math.nan, 0.5], dtype=torch.float64),
}


def read(text: str) -> Program:
    """The program of a text, with those constants of the zoo that it names."""
    return Program.parse(text, {k: c for k, c in CONSTS.items() if f'"{k}"' in text})


ZOO = {name: read(text) for name, text in TEXTS.items()}


def inputs(program: Program, seed: int = 0) -> list[torch.Tensor]:
    """Tensors of the types of the program's inputs."""
    gen = torch.Generator().manual_seed(seed)
    return [_tensor(v.type, gen) for v in program.inputs]


def assert_same_results(before: Program, after: Program) -> None:
    args = inputs(before)
    for a, b in zip(interpret(before, args), interpret(after, args), strict=True):
        assert torch.allclose(a, b, atol=1e-6, equal_nan=True)


def _tensor(type: Type, gen: torch.Generator) -> torch.Tensor:
    if type.dtype == torch.bool:
        return torch.rand(type.shape, generator=gen) < 0.5
    if type.dtype.is_floating_point:
        return torch.randn(type.shape, generator=gen, dtype=torch.float64).to(type.dtype)
    if type.dtype.is_complex:
        return torch.complex(*(torch.randn(type.shape, generator=gen, dtype=torch.float64) for _ in "ab")).to(
            type.dtype
        )
    return torch.randint(0, 4, type.shape, generator=gen).to(type.dtype)
