"""Masks that are functions of positions: what the pass `causal` must see, must not see, and what attention makes of
windows."""

from __future__ import annotations

import itertools

import pytest
import torch
from zoo import assert_same_results, read

from mycel.ir import Program, Type
from mycel.ops import o
from mycel.transform import causal


def attention_with(mask: str, q: int = 6, k: int = 6) -> Program:
    """Attention of q rows on k columns; `mask` is the text of the equations that make `m`, a semicolon between two."""
    mask = "\n  ".join(mask.split("; "))
    heads = f"q: f32[2,2,{q},4], k: f32[2,2,{k},4], v: f32[2,2,{k},4]"
    return read(f"""
def main({heads}, given: bool[2,{k}]):
  i: i64[{q},1] = iota(dim=0, dtype=i64, shape=({q}, 1))
  j: i64[1,{k}] = iota(dim=1, dtype=i64, shape=(1, {k}))
  {mask}
  y: f32[2,2,{q},4], l: f32[2,2,{q}] = attention(q, k, v, m)
  return y
""")


def became(program: Program) -> str:
    """What a pass over it makes of the attention: "causal", a window, "free", or "masked"."""
    (eqn,) = [e for e in causal(program).main.eqns if e.op.name == "attention"]
    if eqn.inputs[3] is not None:
        return "masked"
    return "causal" if eqn.params.get("causal") else str(eqn.params.get("window", "free"))


F32_MIN = torch.finfo(torch.float32).min
CASES = {
    "below or on": ("causal", "m: bool[6,6] = le(j, i)"),
    "turned around": ("causal", "m: bool[6,6] = ge(i, j)"),
    "less than the next": ("causal", "a: i64[6,1] = add(i, 1); m: bool[6,6] = lt(j, a)"),
    "not above": ("causal", "a: bool[6,6] = gt(j, i); m: bool[6,6] = logical_not(a)"),
    "twice the index": (
        "causal",
        ("a: i64[6,1] = mul(i, 2); b: i64[1,6] = mul(j, 2); c: i64[6,1] = add(a, 1); m: bool[6,6] = le(b, c)"),
    ),
    "difference": ("causal", "a: i64[6,6] = sub(i, j); m: bool[6,6] = ge(a, 0)"),
    "float index": ("causal", "a: f32[6,1] = cast(i, dtype=f32); m: bool[6,6] = ge(a, j)"),
    "ones below": ("causal", "a: bool[6,6] = full(True, dtype=bool, shape=(6, 6)); m: bool[6,6] = tril(a)"),
    "ones not above": (
        "causal",
        "a: f32[6,6] = full(1.0, dtype=f32, shape=(6, 6)); b: f32[6,6] = triu(a, diagonal=1); "
        "c: bool[6,6] = cast(b, dtype=bool); m: bool[6,6] = bitwise_not(c)",
    ),
    "minus infinity above": (
        "causal",
        "a: f32[6,6] = full(-inf, dtype=f32, shape=(6, 6)); m: f32[6,6] = triu(a, diagonal=1)",
    ),
    "older Hugging Face": (
        "causal",
        f"a: f32[6,6] = full({F32_MIN}, dtype=f32, shape=(6, 6)); b: f32[6,6] = triu(a, diagonal=1); "
        "c: bool[6,6] = gt(j, i); d: f32[6,6] = mul(b, c); m: f32[2,1,6,6] = expand(d, shape=(2, 1, 6, 6))",
    ),
    "inverted times minimum": (
        "causal",
        (
            "a: bool[6,6] = le(j, i); b: f32[6,6] = cast(a, dtype=f32); c: f32[6,6] = sub(1.0, b); m: f32[6,6] = "
            "mul(c, "
            f"{F32_MIN})"
        ),
    ),
    "window as wide as the sequence": (
        "causal",
        ("a: bool[6,6] = le(j, i); b: i64[6,1] = sub(i, 6); c: bool[6,6] = gt(j, b); m: bool[6,6] = logical_and(a, c)"),
    ),
    "slice of a larger one": (
        "causal",
        "a: bool[9,9] = full(True, dtype=bool, shape=(9, 9)); b: bool[9,9] = tril(a); "
        "c: bool[6,9] = slice(b, dim=0, start=0, stop=6); m: bool[6,6] = slice(c, dim=1, start=0, stop=6)",
    ),
    "one sequence, not packed": (
        "causal",
        "p: i64[1,6] = add(j, 3); f: i64[1,1] = slice(p, dim=1, start=0, stop=1); g: i64[1,1] = sub(f, 1); "
        "h: i64[1,7] = cat(g, p, dim=1); n: i64[1,6] = slice(h, dim=1, start=1, stop=7); o: i64[1,6] = slice(h, "
        "dim=1, start=0, stop=6); "
        "d: i64[1,6] = sub(n, o); e: bool[1,6] = ne(d, 1); s: i64[1,6] = cumsum(e, dim=1); b: i64[1] = iota(dim=0, "
        "dtype=i64, shape=(1,)); "
        "r: i64[6,1] = index(s, b, i, at=(0, 1)); c: i64[1,6] = index(s, b, j, at=(0, 1)); u: bool[6,6] = eq(r, c); "
        "a: bool[6,6] = le(j, i); m: bool[6,6] = bitwise_and(a, u)",
    ),
    "positions looked up": (
        "causal",
        "p: i64[1,6] = add(j, 3); b: i64[1,1] = full(0, dtype=i64, shape=(1, 1)); r: i64[6,1] = index(p, b, i, "
        "at=(0, 1)); c: i64[1,6] = index(p, b, j, at=(0, 1)); m: bool[6,6] = le(c, r)",
    ),
    "positions looked up from behind": (
        "masked",
        "p: i64[1,6] = add(j, 3); b: i64[1,1] = full(0, dtype=i64, shape=(1, 1)); n: i64[6,1] = sub(i, 6); "
        "r: i64[6,1] = index(p, b, n, at=(0, 1)); m: bool[6,6] = le(p, r)",
    ),
    "rows of a mask": (
        "causal",
        "n: i64[9,1] = iota(dim=0, dtype=i64, shape=(9, 1)); a: bool[9,6] = le(j, n); "
        "e: i64[6] = reshape(i, shape=(6,)); m: bool[6,6] = index(a, e, at=(0,))",
    ),
    "all true": ("free", "m: bool[6,6] = full(True, dtype=bool, shape=(6, 6))"),
    "all zero": ("free", "m: f32[6,6] = full(0.0, dtype=f32, shape=(6, 6))"),
    "index not negative": ("free", "m: bool[6,1] = ge(i, 0)"),
    "either side": ("free", "a: bool[6,6] = le(j, i); b: bool[6,6] = gt(j, i); m: bool[6,6] = bitwise_or(a, b)"),
    "strictly below": ("masked", "m: bool[6,6] = lt(j, i)"),
    "above": ("(0, 5)", "m: bool[6,6] = ge(j, i)"),
    "one too many": ("(5, 1)", "a: i64[6,1] = add(i, 1); m: bool[6,6] = le(j, a)"),
    "three too many": ("masked", "a: i64[6,1] = add(i, 3); m: bool[6,6] = le(j, a)"),
    "two sides": (
        "(2, 2)",
        "a: i64[6,6] = sub(i, j); b: bool[6,6] = le(a, 2); c: bool[6,6] = ge(a, -2); m: bool[6,6] = bitwise_and(b, c)",
    ),
    "near": ("(2, 2)", "a: i64[6,6] = sub(i, j); b: i64[6,6] = abs(a); m: bool[6,6] = le(b, 2)"),
    "not far": (
        "(1, 1)",
        "a: i64[6,6] = sub(j, i); b: i64[6,6] = abs(a); e: i64[1,6,6] = reshape(b, shape=(1, 6, 6)); "
        "c: bool[1,6,6] = le(2, e); m: bool[1,6,6] = logical_not(c)",
    ),
    "far": ("masked", "a: i64[6,6] = sub(j, i); b: i64[6,6] = abs(a); m: bool[6,6] = gt(b, 2)"),
    "twice as near": (
        "masked",
        "a: i64[6,6] = sub(j, i); b: i64[6,6] = abs(a); c: i64[6,6] = mul(b, b); m: bool[6,6] = le(c, 4)",
    ),
    "minus infinity outside": (
        "(1, 0)",
        "a: bool[6,6] = le(j, i); b: i64[6,1] = sub(i, 2); c: bool[6,6] = gt(j, b); d: bool[6,6] = logical_and(a, c); "
        "z: f32[] = full(0.0, dtype=f32, shape=()); m: f32[6,6] = where(d, z, -inf)",
    ),
    "a band without its diagonal": (
        "masked",
        "a: i64[6,1] = sub(i, 1); b: i64[6,1] = sub(i, 4); c: bool[6,6] = le(j, a); d: bool[6,6] = ge(j, b); "
        "m: bool[6,6] = bitwise_and(c, d)",
    ),
    "window": (
        "(2, 0)",
        ("a: bool[6,6] = le(j, i); b: i64[6,1] = sub(i, 3); c: bool[6,6] = gt(j, b); m: bool[6,6] = logical_and(a, c)"),
    ),
    "padding": (
        "masked",
        (
            "a: bool[6,6] = le(j, i); g: bool[2,1,1,6] = reshape(given, shape=(2, 1, 1, 6)); m: "
            "bool[2,1,6,6] = bitwise_and(a, g)"
        ),
    ),
    "only somewhat low": (
        "masked",
        ("a: bool[6,6] = le(j, i); z: f32[] = full(0.0, dtype=f32, shape=()); m: f32[6,6] = where(a, z, -10000.0)"),
    ),
    "not zero below": (
        "masked",
        "a: bool[6,6] = le(j, i); z: f32[] = full(1.0, dtype=f32, shape=()); m: f32[6,6] = where(a, z, -inf)",
    ),
    "nan above": (
        "masked",
        ("a: f32[6,6] = full(-inf, dtype=f32, shape=(6, 6)); b: bool[6,6] = gt(j, i); m: f32[6,6] = mul(a, b)"),
    ),
    "all false": ("masked", "m: bool[6,6] = full(False, dtype=bool, shape=(6, 6))"),
    "index overflows": (
        "masked",
        "a: i8[6,1] = full(127, dtype=i8, shape=(6, 1)); b: i8[6,1] = cast(i, dtype=i8); c: i8[6,1] = add(a, b); "
        "m: bool[6,6] = le(j, c)",
    ),
    "index too coarse": (
        "masked",
        (
            "a: i64[6,1] = add(i, 1000); b: bf16[6,1] = cast(a, dtype=bf16); c: i64[1,6] = add(j, 1000); m: "
            "bool[6,6] = le(c, b)"
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_causal_masks_are_seen(name):
    want, mask = CASES[name]
    program = attention_with(mask)
    assert became(program) == want
    assert_same_results(program, causal(program))


@pytest.mark.parametrize("q, k", [(3, 6), (6, 3), (1, 6), (6, 1), (1, 1)])
def test_causal_is_aligned_at_the_top_left(q, k):
    shift = k - q
    left = attention_with(f"m: bool[{q},{k}] = le(j, i)", q, k)
    right = attention_with(f"a: i64[{q},1] = add(i, {shift}); m: bool[{q},{k}] = le(j, a)", q, k)
    assert became(left) == ("free" if k == 1 else "causal")
    assert became(right) == ("free" if q == 1 else "masked")
    for program in (left, right):
        assert_same_results(program, causal(program))


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (1, 3), (70, 2), (200, 0)])
@pytest.mark.parametrize("q, k", [(150, 150), (150, 90), (90, 150)])
def test_a_window_goes_in_blocks(window, q, k):
    """Rows in several blocks, those that see nothing among them, and their gradients: as with the mask written out."""
    torch.manual_seed(0)
    x, y, z = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, q), (2, k), (2, k)))
    ahead = torch.arange(k) - torch.arange(q).unsqueeze(1)
    mask = (ahead >= -window[0]) & (ahead <= window[1])
    own, whole = o.attention(x, y, z, None, window=window), o.attention(x, y, z, mask)
    g = torch.randn_like(own[0])
    own += o.attention_grad(g, x, y, z, None, *own, window=window)
    whole += o.attention_grad(g, x, y, z, mask, *whole)
    for a, b in zip(own, whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("q, k", [(6, 6), (4, 9), (9, 4)])
def test_a_window_costs_what_it_sees(q, k):
    types = [Type(torch.float32, (1, 1, n, 8)) for n in (q, k, k)]
    for window in itertools.product(range(8), range(8)):
        pairs = sum(i - window[0] <= j <= i + window[1] for i in range(q) for j in range(k))
        assert round(o.attention.cost([*types, None], {"window": window}).flops) == 2 * pairs * 16, window


def test_blocks_with_different_masks_are_different_blocks():
    text = """
def layer(q: f64[1,2,4,4], mask: bool[4,4]):
  y: f64[1,2,4,4], l: f64[1,2,4] = attention(q, q, q, mask)
  return y
def main(q: f64[1,2,4,4]):
  i: i64[4,1] = iota(dim=0, dtype=i64, shape=(4, 1))
  j: i64[1,4] = iota(dim=1, dtype=i64, shape=(1, 4))
  a: bool[4,4] = le(j, i)
  b: bool[4,4] = ge(j, i)
  y: f64[1,2,4,4] = call(q, a, block=@layer)
  z: f64[1,2,4,4] = call(y, {other}, block=@layer)
  return z
"""
    assert str(causal(read(text.format(other="a")))).count("attention(q, q, q, None, causal=True)") == 1
    mixed, one = read(text.format(other="b")), str(causal(read(text.format(other="b"))))
    assert "causal=True" in one and "window=(0, 3)" in one and "call(q, a, block=@layer)" in one
    assert_same_results(mixed, causal(mixed))
    given = "def main(q: f64[1,2,4,4], b: bool[4,4]):"
    partly = read(
        text.replace("def main(q: f64[1,2,4,4]):", given).replace("  b: bool[4,4] = ge(j, i)\n", "").format(other="b")
    )
    assert "causal=True" in str(causal(partly)) and "attention(q, q, q, mask)" in str(causal(partly))
    assert_same_results(partly, causal(partly))


def test_causal_follows_constants():
    text = """
def main(q: f64[1,2,4,4]):
  m: bool[4,4] = const(dtype=bool, name="mask", shape=(4, 4))
  y: f64[1,2,4,4], l: f64[1,2,4] = attention(q, q, q, m)
  return y
"""
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    assert became(Program.parse(text, {"mask": triangle})) == "causal"
    assert became(Program.parse(text, {"mask": triangle.tril(-1)})) == "masked"
    hole = triangle.clone()
    hole[3, 1] = False
    assert became(Program.parse(text, {"mask": hole})) == "masked"
