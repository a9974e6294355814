"""What does not wait for rows on their way to experts runs beside them: results stay, and less is waited for."""

from __future__ import annotations

import torch
from distributing import OneDevice, compared, start_values
from experts import Shared
from golden import golden

from mycel.ir import Block, Mesh, Program
from mycel.lower.beside import beside
from mycel.parts import ShardedModel
from mycel.plan import CPU, Plan
from mycel.planning import Task, planned

SPLIT = {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}


def under_way(block: Block) -> list[set[str]]:
    """Between the beginning and the end of each exchange: the products there."""
    spans = []
    for i, eqn in enumerate(block.eqns):
        if eqn.op.name == "begin" and eqn.params["op"] == "exchange_rows":
            (end,) = (k for k, e in enumerate(block.eqns) if e.op.name == "finish" and e.inputs[0] == eqn.outputs[0])
            spans.append({e.op.name for e in block.eqns[i:end] if e.op.product})
    return spans


def test_a_shared_expert_runs_beside_the_exchange():
    """Forward and backward; and the clock sees that less is waited for."""
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = OneDevice.of(Shared(), {"x": x})
    plan = Plan(Mesh(ep=2), SPLIT, ["ep"])
    inputs = ShardedModel(one.model, one.optimizer, plan).given(one.unsharded)
    decided, done = planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, *inputs), plan)
    compared(one.unsharded.program, done.spread, plan.mesh, start_values(one), done.program)
    spans = [products for block in done.program.blocks.values() for products in under_way(block)]
    there, back, *backward = [products - {"experts", "experts_grad"} for products in spans]
    assert there and back and set().union(*backward) >= {"matmul", "linear_weight"}
    sent, waited = decided.predicted.parts["network"]
    assert waited < 0.97 * sent


def test_without_anything_free_nothing_changes():
    text = """
def main(x: f32[8,4], sent: i64[2], got: i64[2], w: f32[4,4]):
  h: f32[8,4] = linear(x, w)
  rows: f32[16,4] = exchange_rows(h, sent, got, axes=("ep",), count=2, rows=16)
  y: f32[16,4] = linear(rows, w)
  return y
"""
    assert beside(Program.parse(text)) == Program.parse(text)


def test_golden():
    program = Program.parse("""
def main(x: f32[8,4], sent: i64[2], got: i64[2], ids: i64[16,1], ones: f32[16,1], up: f32[2,8,4], down: f32[2,4,8],
         w: f32[16,4], v: f32[4,16]):
  rows: f32[16,4] = exchange_rows(x, sent, got, axes=("ep",), count=2, rows=16)
  y: f32[16,4] = experts(rows, ids, ones, up, down, None, None, elsewhere=2, form="whole", gate="relu(a)")
  back: f32[8,4] = exchange_rows(y, got, sent, axes=("ep",), count=2, rows=8)
  h: f32[8,16] = linear(x, w)
  a: f32[8,16] = gelu(h)
  s: f32[8,4] = linear(a, v)
  z: f32[8,4] = add(back, s)
  return z
""")
    golden("beside", f"{program}\n{beside(program)}")
