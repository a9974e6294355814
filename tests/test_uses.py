"""Parameters that only branches or loops read: where they were not read, torch has no gradient and leaves them alone,
whatever momentum or weight decay they have; so does a step."""

from __future__ import annotations

import copy

import pytest
import torch
from distributing import OneDevice, step_equals
from torch import nn

import mycel
from mycel import Mesh, Plan, Program
from mycel.ir import check
from mycel.run import interpret
from mycel.transform import count_uses

OPTIMISERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, maximize=True),
}


class Branch(nn.Module):
    """One of two layers, of which the first has a branch of its own; a third that both use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.inner, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.shared = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.head(x)
        if h.sum() > 0:
            z = self.a(x) * self.shared
            if z.mean() > 0:
                z = z + self.inner(z)
        else:
            z = self.b(x) + self.shared
        return ((self.head(z) - y) ** 2).mean()


class Turns(nn.Module):
    """A layer as often as a value says, which may be never; another in some of four turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.some, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, turns = self.head(x), 0
        while h.sum() + turns < 1.5:
            h = torch.tanh(self.layer(h))
            turns = turns + 1
        for i in range(4):
            if h[i].sum() > 2.0:
                h = h + self.some(h)
        return ((h - y) ** 2).mean()


def eager(model, optimizer, batches, parts=1):
    losses, unused = [], 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = sum(model(*part) for part in zip(x.chunk(parts), y.chunk(parts), strict=True)) / parts
        loss.backward()
        unused += sum(p.grad is None for p in model.parameters())
        optimizer.step()
        losses.append(float(loss))
    return losses, unused


def batches(count=8, rows=4):
    torch.manual_seed(3)
    return [(torch.randn(rows, 8).double(), torch.randn(rows, 8).double()) for _ in range(count)]


@pytest.mark.parametrize("kind", [Branch, Turns])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_what_was_not_used_stays_as_it_is(kind, name):
    torch.manual_seed(1)
    model = kind().double()
    like = copy.deepcopy(model)
    step = mycel.train_step(model, OPTIMISERS[name](model.parameters()))
    losses = [float(step(x, y)) for x, y in batches()]
    want, unused = eager(like, OPTIMISERS[name](like.parameters()), batches())
    assert losses == pytest.approx(want, rel=1e-9) and unused > 0
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Branch, Turns])
def test_parts_of_a_batch_use_it_if_one_does(kind):
    torch.manual_seed(1)
    model = kind().double()
    like = copy.deepcopy(model)
    step = mycel.train_step(model, OPTIMISERS["adamw"](model.parameters()), accumulate=2)
    losses = [float(step(x, y)) for x, y in batches(rows=8)]
    want, unused = eager(like, OPTIMISERS["adamw"](like.parameters()), batches(rows=8), 2)
    assert losses == pytest.approx(want, rel=1e-9) and unused > 0
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_what_is_always_used_is_not_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), loss=lambda out: out.sum())
    step(torch.randn(4, 8))
    assert [step.program.role(v).name for v in step.program.inputs_of("counter")] == ["skipped"]


def test_counts_in_text():
    program = Program.parse("""
def a(x: f32[2], w: f32[2], v: f32[2]):
  y: f32[2] = mul(x, w)
  return y

def b(x: f32[2], w: f32[2], v: f32[2]):
  y: f32[2] = mul(x, 2.0)
  return y

def turn(w: f32[2], x: f32[2]):
  y: f32[2] = mul(x, w)
  return y

def test(w: f32[2], x: f32[2]):
  s: f32[] = sum(x, dims=(0,))
  p: bool[] = gt(s, 0.0)
  return p

def main(x: f32[2], p: bool[], w: f32[2] = parameter w, v: f32[2] = parameter v, u: f32[2] = parameter u):
  y: f32[2] = cond(p, x, w, v, then=@a, orelse=@b)
  z: f32[2] = loop(w, y, test=@test, body=@turn, consts=1)
  t: f32[2] = loop(v, z, test=@test, body=@turn, consts=1)
  s: f32[2] = mul(t, u)
  l: f32[] = sum(s, dims=(0,))
  return l
""")
    counted, counters = count_uses(program, ["w", "v", "u"])
    check(counted)
    assert counters == {"w": "uses.w", "v": "uses.v"}

    ones, falling, none = torch.ones(2), torch.tensor([-1.0, 1.0]), torch.tensor(0)
    for condition, turns in ((True, 0), (False, 1)):  # a loop turns until the sum is 0
        outs = interpret(counted, [ones, torch.tensor(condition), falling, falling, falling, none, none])
        assert [int(n) for n in outs[-2:]] == [condition + turns, 0]


@pytest.mark.parametrize(
    "names, sizes", [("dp", {"dp": 2}), ("zero1", {"dp": 2}), ("zero3", {"dp": 2}), ("tp", {"tp": 2})]
)
@pytest.mark.parametrize("kind", [Branch, Turns])
def test_ranks_leave_the_same_alone(kind, names, sizes):
    x, y = batches(1)[0]
    one = OneDevice.of(kind(), {"x": x.float(), "y": y.float()})
    step_equals(one, Plan.read(names, Mesh(sizes)))
