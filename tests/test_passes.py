"""The laws of passes, over the zoo and over random programs; one golden text for each pass."""

from __future__ import annotations

import math

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from random_programs import programs
from zoo import ZOO, assert_same_results, inputs, read

from mycel.ir import Mesh, Program, check
from mycel.run import simulate
from mycel.run.interpret import interpret
from mycel.transform import (
    SIMPLIFY,
    algebra,
    attend,
    causal,
    cse,
    dce,
    documents,
    fold,
    fuse,
    in_pieces,
    inline,
    narrow,
    recordable,
    simplify,
)

PASSES = [
    algebra, attend, causal, cse, dce, documents, fold, fuse, in_pieces, inline, narrow, recordable, simplify,
]  # fmt: skip
steady = settings(derandomize=True, deadline=None, max_examples=100, database=None)


def same(a, b) -> bool:
    if not isinstance(a, torch.Tensor):
        return repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    tol = 1e-12 if a.dtype in (torch.float64, torch.complex128) else 1e-6
    return torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)


def assert_law(change, program: Program) -> None:
    """The pass keeps signature, types and results, and has nothing to do on its own result."""
    changed = check(change(program))
    assert (changed.inputs, changed.updates) == (program.inputs, program.updates)
    for seed in (0, 1):
        args = inputs(program, seed)
        for was, now in zip(interpret(program, args), interpret(changed, args), strict=True):
            assert same(was, now), f"{change.__name__}: {program}\n=>\n{changed}\n{was}\n{now}"
    assert Program.parse(str(changed), changed.consts) == changed
    if change is not simplify:
        assert change(changed) == changed, f"{change.__name__}: {changed}\n=>\n{change(changed)}"


@pytest.mark.parametrize("change", PASSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ZOO)
def test_passes_keep_the_zoo(change, name):
    assert_law(change, ZOO[name])


@given(programs())
@steady
def test_passes_keep_random_programs(program):
    for change in PASSES:
        assert_law(change, program)


@given(programs())
@steady
def test_passes_compose_in_any_order(program):
    args = inputs(program)
    want = interpret(program, args)
    for order in (PASSES, PASSES[::-1]):
        changed = program
        for change in order:
            changed = check(change(changed))
        assert all(same(a, b) for a, b in zip(want, interpret(changed, args), strict=True)), f"{program}\n=>\n{changed}"


def test_simplify_is_the_list():
    program = ZOO["constants"]
    for change in SIMPLIFY:
        program = check(change(program))
    assert program == simplify(ZOO["constants"])


# -- golden texts -------------------------------------------------------------------------------------------

BEFORE = {
    "algebra": """
def main(x: f32[2,6], w: f32[5,6], n: i32[3]):
  a: f32[12] = reshape(x, shape=(12,))
  b: f32[2,6] = reshape(a, shape=(2, 6))
  c: f32[2,6] = mul(b, 1)
  d: f32[6,5] = permute(w, dims=(1, 0))
  e: f32[2,5] = matmul(c, d)                     # model.py:7
  f: f32[2,5] = pow(e, 2)                        # model.py:8
  g: f32[2,5] = neg(f)
  h: f32[2,5] = add(e, g)                        # model.py:9
  i: f64[2,5] = cast(h, dtype=f64)
  j: f32[2,5] = cast(i, dtype=f32)
  k: i8[3] = cast(n, dtype=i8)
  l: i32[3] = cast(k, dtype=i32)
  z: f32[2,5] = mul(j, 0)
  return j, l, z
""",
    "attend": """
def main(q: f32[2,4,64,8], kt: f32[2,4,8,64], v: f32[2,4,64,8], bias: f32[4,64,64], padded: bool[2,1,1,64]):
  s: f32[2,4,64,64] = matmul(q, kt)                                              # model.py:5
  t: f32[2,4,64,64] = div(s, 4.0)                                                # model.py:5
  a: f32[2,4,64,64] = add(t, bias)                                               # model.py:6
  m: f32[2,4,64,64] = where(padded, -inf, a)                                     # model.py:7
  p: f32[2,4,64,64] = softmax(m, dim=3)                                          # model.py:8
  y: f32[2,4,64,8] = matmul(p, v)                                                # model.py:9
  return y
""",
    "causal": """
def layer(q: f32[2,4,2048,64], k: f32[2,4,2048,64], v: f32[2,4,2048,64], mask: f32[2,1,2048,2048]):
  y: f32[2,4,2048,64], lse: f32[2,4,2048] = attention(q, k, v, mask)           # model.py:12
  return y
def main(q: f32[2,4,2048,64], k: f32[2,4,2048,64], v: f32[2,4,2048,64]):
  n: i64[2048] = iota(dim=0, dtype=i64, shape=(2048,))
  row: i64[1,1,2048,1] = reshape(n, shape=(1, 1, 2048, 1))
  column: i64[1,1,1,2048] = reshape(n, shape=(1, 1, 1, 2048))
  yes: bool[] = full(True, dtype=bool, shape=())
  below: bool[1,1,2048,2048] = le(column, row)
  both: bool[1,1,2048,2048] = bitwise_and(yes, below)
  each: bool[2,1,2048,2048] = expand(both, shape=(2, 1, 2048, 2048))
  zero: f32[] = full(0.0, dtype=f32, shape=())
  mask: f32[2,1,2048,2048] = where(each, zero, -3.4028234663852886e+38)
  y: f32[2,4,2048,64] = call(q, k, v, mask, block=@layer)
  z: f32[2,4,2048,64] = call(y, k, v, mask, block=@layer)
  return z
""",
    "documents": """
def layer(q: f32[2,4,2048,64], k: f32[2,4,2048,64], v: f32[2,4,2048,64], mask: bool[2,1,2048,2048]):
  y: f32[2,4,2048,64], lse: f32[2,4,2048] = attention(q, k, v, mask)           # model.py:12
  return y
def main(q: f32[2,4,2048,64], k: f32[2,4,2048,64], v: f32[2,4,2048,64], ids: i64[2,2048], kept: bool[2,2048]):
  i: i64[2048,1] = iota(dim=0, dtype=i64, shape=(2048, 1))
  j: i64[1,2048] = iota(dim=1, dtype=i64, shape=(1, 2048))
  below: bool[2048,2048] = ge(i, j)
  far: i64[2048,2048] = sub(i, j)
  near: bool[2048,2048] = lt(far, 512)
  row: i64[2,1,2048,1] = reshape(ids, shape=(2, 1, 2048, 1))
  column: i64[2,1,1,2048] = reshape(ids, shape=(2, 1, 1, 2048))
  same: bool[2,1,2048,2048] = eq(row, column)
  mask: bool[2,1,2048,2048] = logical_and(same, below)
  local: bool[2,1,2048,2048] = logical_and(mask, near)
  y: f32[2,4,2048,64] = call(q, k, v, mask, block=@layer)                       # model.py:20
  z: f32[2,4,2048,64] = call(y, k, v, local, block=@layer)                      # model.py:20
  w: f32[2,4,2048,64] = call(z, k, v, mask, block=@layer)                       # model.py:20
  there: bool[2,1,1,2048] = reshape(kept, shape=(2, 1, 1, 2048))
  shown: bool[2,1,2048,2048] = logical_and(mask, there)
  u: f32[2,4,2048,64], lse: f32[2,4,2048] = attention(w, k, v, shown)           # model.py:24
  return u
""",
    "cse": """
def f(x: f32[2]):
  y: f32[2] = exp(x)
  return y
def g(a: f32[2]):
  b: f32[2] = exp(a)
  return b
def main(x: f32[2], w: f32[2]):
  a: f32[2] = call(x, block=@f)
  b: f32[2] = call(x, block=@g)
  c: f32[2] = mul(a, w)
  d: f32[2] = mul(w, b)
  e: f32[2] = add(c, 1)
  f: f32[2] = add(d, 1.0)
  g: f32[2] = sub(c, d)
  return e, f, g
""",
    "dce": """
def step(c: f32[], i: i64[], x: f32[], y: f32[]):
  j: i64[] = add(i, 1)
  a: f32[] = mul(x, c)
  b: f32[] = exp(y)
  return j, a, b
def more(c: f32[], i: i64[], x: f32[], y: f32[]):
  p: bool[] = lt(i, 5)
  return p
def f(x: f32[], w: f32[]):
  a: f32[] = exp(x)
  b: f32[] = mul(x, w)
  return a, b
def main(x: f32[], w: f32[]):
  zero: i64[] = full(0, dtype=i64, shape=())
  n: i64[], s: f32[], t: f32[] = loop(w, zero, x, x, body=@step, consts=1, test=@more)
  y: f32[], z: f32[] = call(s, w, block=@f)
  return y
""",
    "fold": """
def main(x: f32[4], h: f16[4]):
  n: i64[4] = iota(dim=0, dtype=i64, shape=(4,))
  m: i64[4] = add(n, 1)
  sq: i64[4] = mul(m, m)
  ones: f32[500,500] = full(1.0, dtype=f32, shape=(500, 500))
  twos: f32[500,500] = add(ones, ones)
  two: f32[] = full(2.0, dtype=f32, shape=())
  tenth: f32[] = full(0.1, dtype=f32, shape=())
  y: f32[4] = mul(x, two)
  z: f16[4] = mul(h, tenth)
  return y, z, twos, m, sq
""",
    "fuse": """
def main(x: f32[4,8], w: f32[6,8], b: f32[6], q: f32[1,2,4,8], u: f32[2,3,5,5], k: f32[4,3,3,3], c: f32[4]):
  h: f32[4,6] = linear(x, w)                                                     # model.py:3
  y: f32[4,6] = add(b, h)                                                        # model.py:3
  g: f32[4,6] = linear(x, w)
  z: f32[4,6] = add(g, y)
  o: f32[1,2,4,8], lse: f32[1,2,4] = attention(q, q, q, None, causal=True)
  s: f32[2,4,5,5] = conv(u, k, dilation=(1, 1), groups=1, padding=(1, 1), stride=(1, 1))
  d: f32[4,1,1] = reshape(c, shape=(4, 1, 1))
  t: f32[2,4,5,5] = add(s, d)
  return z, o, t
""",
    "narrow": """
def layer(q: f32[8,4,128,16], mask: f32[8,4,128,128]):
  y: f32[8,4,128,16], lse: f32[8,4,128] = attention(q, q, q, mask)             # model.py:12
  return y
def main(q: f32[8,4,128,16], bias: f32[1,4,128,128], given: f32[8,1,1,128]):
  row: i64[128,1] = iota(dim=0, dtype=i64, shape=(128, 1))
  column: i64[1,128] = iota(dim=1, dtype=i64, shape=(1, 128))
  below: bool[128,128] = le(column, row)
  each: bool[8,1,128,128] = expand(below, shape=(8, 1, 128, 128))
  zero: f32[] = full(0.0, dtype=f32, shape=())
  hidden: f32[8,1,128,128] = where(each, zero, -inf)                           # model.py:3
  mask: f32[8,4,128,128] = add(bias, hidden)                                   # model.py:4
  half: f32[8,4,128,128] = mul(mask, 0.5)                                      # model.py:5
  own: f32[8,4,128,128] = add(mask, given)                                     # model.py:6
  y: f32[8,4,128,16] = call(q, mask, block=@layer)
  z: f32[8,4,128,16] = call(y, half, block=@layer)
  w: f32[8,4,128,16], lse: f32[8,4,128] = attention(z, z, z, own)              # model.py:7
  return w
""",
    "recordable": """
    def main(x: f32[4,6], g: f32[4,6], m: f32[6]):
      y: f32[4,6], mean: f32[6], var: f32[6] = batch_norm(x, None, None, eps=1e-05)
      d: f32[4,6] = silu_grad(g, y)
      n: f32[6] = add(m, mean)
      return d, m=n
    """,
    "in_pieces": """
def norm(x: f32[4,3,2,2], w: f32[3], kept: f32[3]):
  y: f32[4,3,2,2], mean: f32[3], var: f32[3] = batch_norm(x, w, None, eps=1e-05)  # model.py:3
  new: f32[3] = add(kept, mean)                                                   # model.py:4
  return y, new
def main(x: f32[4,3,2,2], w: f32[3], kept: f32[3]):
  a: f32[4,3,2,2], b: f32[3] = call(x, w, kept, block=@norm)                      # model.py:9
  c: f32[4,3,2,2] = relu(a)                                                       # model.py:9
  d: f32[4,3,2,2], e: f32[3] = call(c, w, b, block=@norm)                         # model.py:10
  return d, e
""",
    "inline": """
def twice(x: f32[2]):
  a: f32[2] = add(x, x)                          # model.py:2
  return a, x
def yes(x: f32[2]):
  a: f32[2] = exp(x)
  return a
def no(x: f32[2]):
  a: f32[2] = log(x)
  return a
def main(x: f32[2]):
  a: f32[2], b: f32[2] = call(x, block=@twice)   # model.py:9
  c: f32[2], d: f32[2] = call(a, block=@twice)
  p: bool[] = full(False, dtype=bool, shape=())
  e: f32[2] = cond(p, c, orelse=@no, then=@yes)
  return e, d
""",
}


@pytest.mark.parametrize("change", [f for f in PASSES if f is not simplify], ids=lambda f: f.__name__)
def test_golden(change):
    program = read(BEFORE[change.__name__])
    golden(change.__name__, f"# before\n\n{program}\n# after\n\n{check(change(program))}")


# -- particular cases ---------------------------------------------------------------------------------------


def test_narrow_needs_all_calls_to_agree():
    program = read(BEFORE["narrow"])
    narrowed = narrow(program)
    assert_same_results(program, narrowed)
    assert "mask_narrow: f32[1,4,128,128]" in str(narrowed)
    wide = read(BEFORE["narrow"].replace("call(y, half", "call(y, own"))
    assert "mask: f32[8,4,128,128]):" in str(narrow(wide))
    assert_same_results(wide, narrow(wide))


def test_fold_keeps_promotion():
    program = fold(ZOO["promotion"])
    by_name = {e.outputs[0].name: e for e in program.main.eqns}
    assert by_name["d"].inputs[1] == 2.0  # f32 * 2.0 is f32 either way
    assert by_name["c"].inputs[1] != 0.1  # f16 * f32[] rounds 0.1 to f16 first
    assert by_name["f"].inputs[1] != 2.0  # i64 * f64[] is f64, i64 * 2.0 would be f32
    assert not isinstance(by_name["j"].inputs[1], int)  # 300 is no u8


def test_fold_leaves_random_numbers_alone():
    program = read("""
def main():
  k: i64[] = full(7, dtype=i64, shape=())
  x: f64[3] = full(1.0, dtype=f64, shape=(3,))
  y: f64[3] = dropout(x, k, 0, p=0.5)
  return y
""")
    assert "dropout" in str(fold(program))


def test_algebra_keeps_what_rounds():
    program = ZOO["arithmetic"]
    text = str(
        algebra(
            read("""
def main(x: f64[3], n: i64[3]):
  a: f64[3] = mul(x, 0)
  b: f64[3] = sub(x, x)
  c: f64[3] = div(x, x)
  e: f32[3] = cast(x, dtype=f32)
  f: f64[3] = cast(e, dtype=f64)
  g: i64[3] = bitwise_and(n, 1)
  return a, b, c, f, g
""")
        )
    )
    assert all(f" {name}(" in text for name in ("mul", "sub", "div", "cast", "bitwise_and"))
    assert "mul(c, 1)" not in str(algebra(program))


@pytest.mark.parametrize("how", ["each", "views", "in turn"])
def test_algebra_groups_repeated_heads(how):
    ways = {
        "each": "{0}2: f64[2,4,3,4] = repeat_each({0}, dim=1, times=2)",
        "views": """{0}0: f64[2,2,1,3,4] = reshape({0}, shape=(2, 2, 1, 3, 4))
  {0}1: f64[2,2,2,3,4] = expand({0}0, shape=(2, 2, 2, 3, 4))
  {0}2: f64[2,4,3,4] = reshape({0}1, shape=(2, 4, 3, 4))""",
        "in turn": """{0}0: f64[2,1,2,3,4] = reshape({0}, shape=(2, 1, 2, 3, 4))
  {0}1: f64[2,2,2,3,4] = expand({0}0, shape=(2, 2, 2, 3, 4))
  {0}2: f64[2,4,3,4] = reshape({0}1, shape=(2, 4, 3, 4))""",
    }
    program = read(f"""
def main(q: f64[2,4,6,4], k: f64[2,2,3,4], v: f64[2,2,3,4]):
  {ways[how].format("k")}
  {ways[how].format("v")}
  y: f64[2,4,6,4], lse: f64[2,4,6] = attention(q, k2, v2, None)
  return y, lse
""")
    assert_law(algebra, program)
    assert ("attention(q, k, v, None)" in str(algebra(program))) == (how != "in turn")


def test_fold_leaves_views_of_constants():
    program = read("""
def main(x: f64[2,4]):
  t: f64[4] = const(dtype=f64, name="table", shape=(4,))
  u: f64[4] = mul(t, 2.0)
  e: f64[2,4] = expand(u, shape=(2, 4))
  y: f64[2,4] = add(x, e)
  return y
""")
    folded = fold(program)
    assert [e.op.name for e in folded.main.eqns] == ["const", "const", "expand", "add"]
    assert set(dce(folded).consts) == {"u"}


def test_inline_names_stay_unique_and_sources_stay():
    program = inline(ZOO["nested_calls"])
    assert list(program.blocks) == ["main"]
    assert {e.op.name for e in program.main.eqns} == {"exp", "add", "full", "mul"}
    layers = inline(ZOO["layers"])
    assert "layer" in layers.blocks  # ten equations, called twice
    once = inline(ZOO["layers"], small=10)
    assert list(once.blocks) == ["main"] and "model.py:3" in {e.source for e in once.main.eqns}


@pytest.mark.parametrize("op, is_merged", [("mul", True), ("matmul", False)])
def test_inline_opens_what_a_compiler_merges_where_it_is_called_inside(op, is_merged):
    """Blocks that are not small, called twice in a layer and twice in the entry."""
    lines = "".join(f"  x{i + 1}: f32[4,4] = {op}(x{i}, x0)\n" for i in range(12))
    norm = f"def norm(x0: f32[4,4]):\n{lines}  return x12\n"
    twice = "  a: f32[4,4] = call(x, block=@{0})\n  b: f32[4,4] = call(a, block=@{0})\n  return b\n"
    of_layer, of_main = twice.format("norm"), twice.format("layer")
    program = inline(read(f"\n{norm}def layer(x: f32[4,4]):\n{of_layer}def main(x: f32[4,4]):\n{of_main}"), small=1)
    assert [len(program.blocks["layer"].eqns), len(program.main.eqns)] == [24 if is_merged else 2, 2]
    assert len(inline(read(f"\n{norm}def main(x: f32[4,4]):\n{of_layer}")).main.eqns) == 2


def test_dce_keeps_entry_inputs_and_loop_states_the_test_needs():
    program = dce(ZOO["loop_needs_state"])
    assert program.inputs == ZOO["loop_needs_state"].inputs
    assert len(program.blocks["body"].inputs) == 2
    small = dce(ZOO["dead_code"])
    assert (
        set(small.blocks) == {"f", "main"}
        and len(small.blocks["f"].inputs) == 2
        and len(small.blocks["f"].outputs) == 1
    )
    assert math.prod(small.main.outputs[0].shape) == 2


BY_RANK = {
    "a sum of what is one number on each": """
def main(x: f64[2,3]):
  one: f64[2,3] = full(1.0, dtype=f64, shape=(2, 3))
  first: f64[2,3] = only_first(one, axes=("dp",), count=2)
  many: f64[2,3] = all_reduce(one, axes=("dp",), count=2)
  most: f64[2,3] = all_reduce(first, axes=("dp",), count=2, kind=">")
  y: f64[2,3] = mul(x, first)
  z: f64[2,3] = mul(x, many)
  w: f64[2,3] = add(z, most)
  return y, z, w
""",
    "a mask that depends on the rank": """
def main(x: f32[4,4]):
  i: i64[4,1] = iota(dim=0, dtype=i64, shape=(4, 1))
  j: i64[1,4] = iota(dim=1, dtype=i64, shape=(1, 4))
  low: bool[4,4] = ge(i, j)
  mine: f32[4,4] = where(low, 1.0, 0.0)
  here: f32[4,4] = only_first(mine, axes=("dp",), count=2)
  there: f32[4,4] = permute_ranks(mine, axes=("dp",), count=2, to=(1, -1))
  at: i64[] = place(axes=("dp",), count=2)
  k: i64[4,1] = add(i, at)
  later: bool[4,4] = ge(k, j)
  y: f32[4,4] = mul(x, here)
  z: f32[4,4] = mul(x, there)
  w: f32[4,4] = where(later, x, 0.0)
  part: f32[2,4] = own_part(mine, axes=("dp",), count=2, dim=0)
  return y, z, w, part
""",
}


@pytest.mark.parametrize("change", PASSES)
@pytest.mark.parametrize("name", BY_RANK)
def test_a_pass_keeps_what_depends_on_the_rank(name, change):
    program, mesh = check(Program.parse(BY_RANK[name])), Mesh(dp=2)
    changed = check(change(program))
    given = [
        [torch.rand(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        for v in program.inputs
    ]
    for was, now in zip(simulate(program, mesh, given), simulate(changed, mesh, given), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(was, now, strict=True)), f"{program}\n=>\n{changed}"
