"""Parameters that only branches or loops read: where they were not read, torch has no gradient and leaves them alone,
whatever momentum or weight decay they have; so does a step."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from distributing import OneDevice, start_values, step_equals
from pipelining import pipeline_equals
from torch import nn

import mycel
from mycel import Mesh, Plan, Program
from mycel.ir import check
from mycel.plan.schedule import named
from mycel.run import interpret
from mycel.transform import count_uses


class Own(torch.optim.AdamW):
    """Overrides the update: torch takes it."""

    def step(self, closure=None):
        super().step()


OPTIMISERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, weight_decay=0.1),
    "dampened": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "torch's": lambda ps: Own(ps, lr=0.1, weight_decay=0.1),
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


@mycel.island
def picked(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h * 2 if float(x.detach().sum()) > 0 else x * 3


class Before(nn.Module):
    """What a branch, or an island, uses or not is computed before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, z, best = torch.tanh(self.layer(x)), torch.tanh(self.other(x)), self.layer(x).argmax(-1)
        x = picked(h, x) + best[:, None]
        if x.mean() > 1:
            x = x + z
        return ((self.head(x) - y) ** 2).mean()


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


@pytest.mark.filterwarnings("ignore:test_uses.Own runs as it is")
@pytest.mark.parametrize("kind", [Branch, Turns, Before])
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


@pytest.mark.filterwarnings("ignore:test_uses.Own runs as it is")
@pytest.mark.parametrize("name", ["adamw", "torch's", "calls"])
@pytest.mark.parametrize("kind", [Branch, Turns])
def test_parts_of_a_batch_use_it_if_one_does(kind, name):
    """Parts of one batch, or calls before an update."""
    torch.manual_seed(1)
    model = kind().double()
    like, make = copy.deepcopy(model), OPTIMISERS["adamw" if name == "calls" else name]
    if name == "calls":
        step, losses = mycel.train_step(model, make(model.parameters())), []
        for x, y in batches(rows=8):
            losses.append(sum(float(step.accumulate(*part)) for part in zip(x.chunk(2), y.chunk(2), strict=True)) / 2)
            step.apply()
    else:
        step = mycel.train_step(model, make(model.parameters()), accumulate=2)
        losses = [float(step(x, y)) for x, y in batches(rows=8)]
    want, unused = eager(like, make(like.parameters()), batches(rows=8), 2)
    assert losses == pytest.approx(want, rel=1e-9) and unused > 0
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:test_uses.Own runs as it is")
@pytest.mark.parametrize("name", ["adamw", "torch's"])
def test_what_was_not_used_has_no_gradient(name):
    torch.manual_seed(1)
    model = Branch().double()
    like = copy.deepcopy(model)
    step = mycel.train_step(model, OPTIMISERS[name](model.parameters()), grads=True)
    without = set()
    for x, y in batches(4):
        like.load_state_dict(model.state_dict())
        like.zero_grad()
        like(x, y).backward()
        step(x, y)
        for (which, mine), theirs in zip(model.named_parameters(), like.parameters(), strict=True):
            if theirs.grad is None:
                without.add(which)
                assert mine.grad is None, which
            else:
                torch.testing.assert_close(mine.grad, theirs.grad)
    assert {"a.weight", "b.weight"} <= without


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_leave_the_same_alone(schedule):
    """Whichever of their parts use it, and wherever they are cut."""
    plan, unused = Plan(Mesh(), stages=2, schedule="1f1b", microbatches=2), 0
    for seed, kind in itertools.product(range(3), [Branch, Turns]):
        torch.manual_seed(seed)
        x, y = batches(1, 8)[0]
        one = OneDevice.of(kind().double(), {"x": x, "y": y}, plan=plan, accumulate=2)
        pipeline_equals(one, named(schedule, 2, 2), random.Random(seed), seed=seed)
        program, values = one.unsharded.program, start_values(one, seed)
        news = dict(zip(program.updates, interpret(program, values)[len(program.results) :], strict=True))
        unused += sum(int(new) == 0 for name, new in news.items() if program.roles[name].name.startswith("uses."))
    assert unused


class EarlyExit(nn.Module):
    """Returns what the head of the first layer gives that is sure of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.tanh(layer(x))
            loss = ((head(x) - y) ** 2).mean()
            if loss < 0.8:
                return loss
        return loss


class Smallest(EarlyExit):
    """Keeps what one head gives."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        best = ((self.heads[0](x) - y) ** 2).mean()
        for head in self.heads[1:]:
            loss = ((head(x) - y) ** 2).mean()
            if loss < best:  # noqa: PLR1730
                best = loss
        return best


class LastTurn(EarlyExit):
    """Each turn throws away what the one before gave; what is left is used, or not, after the loop."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = x.sum() * 0
        while x.abs().mean() > 0.25:
            x = torch.tanh(self.layers[0](x)) * 0.7
            if x.mean() > 0:
                kept = self.heads[0](x).square().mean()
            else:
                kept = self.heads[1](x).abs().mean()
        if y.mean() > 0:
            return kept + (x - y).square().mean()
        return (self.heads[2](x) - y).square().mean()


class Rotated(EarlyExit):
    """Values of a loop take each other's places."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b, c = self.layers[0](x), x, y
        while b.mean() < 0.3:
            a, b, c = b * self.heads[0](x).mean(), c + 0.4, a
        if y.mean() > 0.05:
            return a.square().mean()
        return c.square().mean() + b.mean() + self.layers[1](x).mean()


@pytest.mark.parametrize("kind", [EarlyExit, Smallest, LastTurn, Rotated])
def test_what_is_thrown_away_later_is_not_used(kind):
    torch.manual_seed(1)
    model = kind().double()
    like, unused = copy.deepcopy(model), set()
    step = mycel.train_step(model, OPTIMISERS["adamw"](model.parameters()), grads=True)
    optimizer = OPTIMISERS["adamw"](like.parameters())
    for x, y in batches():
        step(x, y)
        eager(like, optimizer, [(x, y)])
        for (name, mine), theirs in zip(model.named_parameters(), like.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
            unused |= {name} if theirs.grad is None else set()
    assert len(unused) > 2


def test_a_gradient_of_another_program_is_not_left_behind():
    class Chosen(EarlyExit):
        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.heads[which](x).square().mean()

    model = Chosen()
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), grads=True)
    for which in (0, 1):
        step(torch.randn(4, 8), which)
        assert [head.weight.grad is not None for head in model.heads] == [which == i for i in range(3)]


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
    assert counters == {"w": ("uses.w", None), "v": ("uses.v", None)}

    ones, falling, none = torch.ones(2), torch.tensor([-1.0, 1.0]), torch.tensor(0)
    for condition in (True, False):  # where it does not hold, the loop turns until the sum is 0
        outs = interpret(counted, [ones, torch.tensor(condition), falling, falling, falling, none, none])
        assert [int(n) for n in outs[-2:]] == [1, 0]


@pytest.mark.parametrize(
    "names, sizes", [("dp", {"dp": 2}), ("zero1", {"dp": 2}), ("zero3", {"dp": 2}), ("tp", {"tp": 2})]
)
@pytest.mark.parametrize("kind", [Branch, Turns])
def test_ranks_leave_the_same_alone(kind, names, sizes):
    x, y = batches(1)[0]
    one = OneDevice.of(kind(), {"x": x.float(), "y": y.float()})
    step_equals(one, Plan.read(names, Mesh(sizes)))
