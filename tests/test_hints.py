"""Hints: what people write of layouts inside a model changes where things are computed, never what."""

from __future__ import annotations

import random

import pytest
import torch
from distributing import OneDevice, equals_serial, random_plan, spread, step_equals, tensors
from test_manual import rows
from torch import nn
from torch.nn import functional as F

import mycel
from mycel import transform
from mycel.errors import CaptureError, PlanError
from mycel.ir import Mesh, check
from mycel.plan import Plan


class Hinted(nn.Module):
    """A small model with a hint behind every line, as they come."""

    def __init__(self, seed=0, axes=("a", "b")):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 5)
        self.seed, self.axes = seed, axes

    def forward(self, x, target):
        rng = random.Random(self.seed)

        def hint(h):
            if rng.random() < 0.3:
                return h
            dims = [[] for _ in range(h.ndim)]
            for axis in rng.sample(self.axes, len(self.axes)):
                if rng.random() < 0.7:
                    dims[rng.randrange(h.ndim)].append(axis)
            return mycel.shard(h, *(tuple(d) if len(d) != 1 else d[0] for d in dims))

        h = hint(self.up(hint(x)))
        h = hint(self.norm(hint(F.gelu(h))))
        h = hint(h.reshape(-1, 2, 10).transpose(0, 1))
        return F.cross_entropy(hint(self.down(h)).reshape(-1, 5), target)


@pytest.mark.parametrize("seed", range(12))
def test_random_hints_keep_the_result(seed):
    rng = random.Random(seed)
    batch = rows()
    while len((written := random_plan(tensors(Hinted()), 1, rng, most=6)).mesh.axes) != 2:
        pass
    model = Hinted(seed).double()
    one = OneDevice.of(model, batch, mesh=written.mesh, plan=written, clip_norm=1.0)
    distributed = step_equals(one, written)
    assert any(e.op.name == "shard" for b in distributed.whole.blocks.values() for e in b.eqns)


def hinted(x):
    y = torch.sin(x)
    z = mycel.shard(y, "tp", None)
    return torch.cos(z)


def test_a_hint_fixes_the_layout_and_its_gradient():
    def loss(x, w):
        return (mycel.shard(torch.sin(x), ("tp", "dp"), None) * w).sum()

    x, w = torch.randn(8, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    program = check(transform.value_and_grad(transform.simplify(mycel.capture(loss, x, w), ranks=True), [0, 1]))
    distributed = equals_serial(program, Plan(Mesh(dp=2, tp=2)), {}, [x, w])
    hints = [
        (e, c)
        for b, laid in ((distributed.whole.main, distributed.layouts["main"]),)
        for e, c in zip(b.eqns, laid.choices, strict=True)
    ]
    layouts = [str(c.outs[0]) for e, c in hints if e.op.name == "shard"]
    assert layouts == ["[tp.dp,-]", "[tp.dp,-]"]


def test_without_a_mesh_a_hint_is_nothing():
    x = torch.randn(4, 3)
    assert mycel.shard(x, "tp", None) is x
    assert "shard" in str(mycel.capture(hinted, x))
    assert "shard" not in str(transform.simplify(mycel.capture(hinted, x)))
    assert torch.equal(mycel.jit(hinted)(x), hinted(x))
    assert "shard" not in str(mycel.jit(hinted).program(x))
    model = Hinted().double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step.prepare(**rows())
    assert "shard" not in str(step.program)


def test_wrong_hints_are_told_with_their_line():
    x = torch.randn(4, 3)
    for layout, message in [
        (("tp",), "mycel.shard: 1 entries for a tensor of 2 dims"),
        (("tp", "tp"), "axis 'tp' is used twice"),
        ((3, None), "is no layout"),
    ]:
        with pytest.raises(PlanError, match=message):
            mycel.shard(x, *layout)
        with pytest.raises(CaptureError, match=message) as raised:
            mycel.capture(lambda x, layout=layout: mycel.shard(x, *layout), x)
        assert "test_hints.py" in str(raised.value)
    with pytest.raises(PlanError, match=r"no axis 'tp'\n  the mesh  Mesh\(dp=2\)\n  at        .*test_hints.py:\d+"):
        spread(mycel.capture(hinted, x), Plan(Mesh(dp=2)), {})
