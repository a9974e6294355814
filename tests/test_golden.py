"""Golden texts beyond the passes: derivatives of a program with a branch, a loop and a repeated block; generated code;
messages."""

from __future__ import annotations

import pytest
import torch
from golden import golden
from torch import nn

import mycel
from mycel import Program, transform
from mycel.ir import check
from mycel.run import emit

BEFORE = """\
def layer(x: f32[3], w: f32[3]):
  h: f32[3] = mul(x, w)  # model.py:4
  y: f32[3] = tanh(h)    # model.py:5
  return y

def grow(n: f32[], x: f32[3]):
  big: f32[] = sum(x, dims=(0,))
  more: bool[] = lt(big, n)  # model.py:9
  return more

def turn(n: f32[], x: f32[3]):
  y: f32[3] = exp(x)  # model.py:10
  return y

def up(x: f32[3]):
  y: f32[3] = sin(x)  # model.py:13
  return y

def down(x: f32[3]):
  y: f32[3] = mul(x, 2.0)  # model.py:15
  return y

def main(p: bool[], n: f32[], x: f32[3], w1: f32[3], w2: f32[3]):
  a: f32[3] = call(x, w1, block=@layer)                      # model.py:20
  b: f32[3] = call(a, w2, block=@layer)                      # model.py:20
  c: f32[3] = loop(n, b, body=@turn, consts=1, test=@grow)   # model.py:9
  d: f32[3] = cond(p, c, orelse=@down, then=@up)             # model.py:12
  loss: f32[] = sum(d, dims=(0,))                            # model.py:21
  return loss
"""


def test_vjp():
    golden("vjp", str(check(transform.value_and_grad(Program.parse(BEFORE), [2, 3, 4]))))


def test_jvp():
    golden("jvp", str(check(transform.jvp(Program.parse(BEFORE), [2]))))


def test_generated_code():
    golden("emit", emit(transform.simplify(check(transform.value_and_grad(Program.parse(BEFORE), [2])))))


@pytest.mark.parametrize("name", ["mask", "item", "global", "packed"])
def test_refusals(name):
    table, weight = torch.zeros(3), nn.Parameter(torch.zeros(3))

    def mask(x):
        return x[x > weight]

    def item(x):
        return x[: (x + weight).sum().long().item()]

    def write(x):
        table.add_(x)
        return x

    def packed(x):
        return nn.utils.rnn.pack_padded_sequence(x[None, :, None], (x > weight)[:1].long() + 1, batch_first=True).data

    fn = {"mask": mask, "item": item, "global": write, "packed": packed}[name]
    with pytest.raises(mycel.CaptureError) as caught:
        mycel.capture(fn, torch.randn(3))
    error = caught.value
    golden(f"refusal_{name}", f"{error.what}\n{error.text}\n{error.hint}\n")
    assert error.file == __file__ and error.line > 0
