"""Blocks in the form in which they are compiled: whatever a block and its inputs are called, and in whatever order they
come, the form is one, and it computes what the block does."""

from __future__ import annotations

import itertools

import torch

from mycel.ir import Program
from mycel.run.block_texts import BlockTexts
from mycel.run.emit import emit, function_names

TEXT = """
def {inner}(x: f32[4,8], s: f32[8]):
  c: f32[8] = const(dtype=f32, name="{const}", shape=(8,))
  y: f32[4,8] = mul(x, s)
  z: f32[4,8] = add(y, c)
  return z

def {block}({inputs}):
  {h}: f32[4,8] = call({x}, {s}, block=@{inner})
  n: f32[4,8], mean: f32[4,1], rstd: f32[4,1] = layer_norm({h}, {s}, {s}, eps=1e-05)
  o: f32[4,8] = linear(n, {w})
  return o, {h}

def main(x: f32[4,8], s: f32[8], w: f32[8,8]):
  y: f32[4,8], h: f32[4,8] = call({given}, block=@{block})
  return y, h
"""
TYPES = {"x": "f32[4,8]", "s": "f32[8]", "w": "f32[8,8]"}


def texts(names: dict[str, str], order: tuple[str, ...]) -> tuple[BlockTexts, str, dict]:
    """(the source taken apart, its block's function, what it was made of) of one way to write the program"""
    inputs = ", ".join(f"{names[k]}: {TYPES[k]}" for k in order)
    text = TEXT.format(inputs=inputs, given=", ".join(order), **names)
    program = Program.parse(text, {names["const"]: torch.arange(8.0)})
    functions = function_names(program, donate=False)
    source = emit(program, "cpu", reuse=True)
    env: dict = {}
    exec(source, env)
    return BlockTexts(source, set(functions.values())), functions[names["block"]], env


PLAIN = {"inner": "inner", "block": "block", "const": "shift", "h": "h", "x": "x", "s": "s", "w": "w"}
OTHER = {"inner": "norm", "block": "layer_7", "const": "other", "h": "a", "x": "w", "s": "value_0", "w": "block_0"}


def test_names_and_the_order_of_inputs_are_forgotten():
    values = {"x": torch.randn(4, 8), "s": torch.randn(8), "w": torch.randn(8, 8)}
    sources = set()
    for names, order in itertools.product((PLAIN, OTHER), itertools.permutations(TYPES)):
        apart, function, env = texts(names, order)
        form = apart.canonical(function)
        sources.add((form.source, form.name, form.own_consts, tuple(order[k] for k in form.order)))
        own = {name: env[x] for name, x in zip(form.own_consts, form.consts, strict=True)}
        exec(form.source, own)
        given = [values[k] for k in order]
        results = own[form.name](*(given[k] for k in form.order))
        assert all(torch.equal(a, b) for a, b in zip(results, env[function](*given), strict=True))
    assert len(sources) == 1


def test_what_is_computed_is_not_forgotten():
    apart, function, _ = texts(PLAIN, ("x", "s", "w"))
    wider, other, _ = texts(PLAIN | {"x": "s", "s": "x"}, ("x", "s", "w"))
    assert wider.canonical(other).source == apart.canonical(function).source
    less = TEXT.replace("mul(x, s)", "sub(x, s)")
    program = Program.parse(less.format(inputs="x: f32[4,8], s: f32[8], w: f32[8,8]", given="x, s, w", **PLAIN),
                            {"shift": torch.arange(8.0)})  # fmt: skip
    sub = BlockTexts(emit(program, "cpu", reuse=True), set(function_names(program, donate=False).values()))
    assert sub.canonical("block").source != apart.canonical(function).source
