"""What a distributed step says of itself: golden texts, and bytes that add up."""

from __future__ import annotations

import random
import re

import pytest
import torch
from distributing import OneDevice, random_plan, tensors
from golden import golden
from torch import nn

import mycel
from mycel import lower, transform
from mycel.ir import Mesh, check, runs
from mycel.plan import Plan


class Mlp(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(layers))

    def forward(self, x, target):
        for up, down in zip(self.up, self.down, strict=True):
            x = down(torch.relu(up(x)))
        return nn.functional.mse_loss(x, target)


PLANS = {
    "dp": ({"batch": ["dp"]}, Mesh(dp=2)),
    "zero3": ({"batch": ["dp"], "zero": "3 over dp"}, Mesh(dp=2)),
    "tp": ({"parameters": {"up.*.weight": ["tp", "-"], "down.*.weight": ["-", "tp"]}}, Mesh(tp=2)),
}


def one_device(layers=1):
    torch.manual_seed(0)
    return OneDevice.of(Mlp(layers), {"x": torch.randn(4, 8), "target": torch.randn(4, 8)})


@pytest.mark.parametrize("name", PLANS)
def test_golden(name):
    written, mesh = PLANS[name]
    golden(f"explain_{name}", lower.explain(one_device().under(Plan.read(written, mesh))))


def test_textbook_bytes():
    """A ring all-reduce of the gradients for data parallelism, 1.5 times that for ZeRO-3; two activations of each layer
    for tensor parallelism."""
    layers, weight = 3, 16 * 8 * 4
    weights = 2 * layers * weight
    one = one_device(layers)
    sent = {name: lower.sent(one.under(Plan.read(*PLANS[name])).local) for name in PLANS}
    small = 4 * 8 * 4  # the loss and the norm may travel as well: at most what they are made of
    assert 0 <= sent["dp"]["dp",] - 2 * weights / 2 <= small
    assert 0 <= sent["zero3"]["dp",] - (3 * weights - weight) / 2 <= small  # backward needs all weights but the first
    assert 0 <= sent["tp"]["tp",] - (2 * layers - 1) * small <= small


def bytes_in(text, whole):
    """What the lines of an explanation say, as often as their blocks run, and how many there are: each is rounded to a
    byte."""
    often, total, count, name = runs(whole), {}, {}, ""
    for line in text.split("\n"):
        if head := re.match(r"def (\w+)\(", line):
            name = head[1]
        elif sends := re.match(r"  \w+ .* over ([\w.]+) -> .* # ([\d,]+) bytes$", line):
            axes = tuple(sends[1].split("."))
            total[axes] = total.get(axes, 0) + often[name] * int(sends[2].replace(",", ""))
            count[axes] = count.get(axes, 0) + often[name]
    return total, count


@pytest.mark.parametrize("seed", range(8))
def test_lines_add_up(seed):
    """The lines say what the local program sends, and the passes behind it send no more."""
    one = one_device(2)
    rng = random.Random(seed)
    for _ in range(4):
        distributed = one.under(random_plan(tensors(one.model), 2, rng, most=8))
        (said, count), sent = bytes_in(lower.explain(distributed), distributed.whole), lower.sent(distributed.local)
        assert said.keys() == sent.keys()
        assert all(abs(said[axes] - sent[axes]) <= 0.5 * count[axes] for axes in sent)
        simple = check(transform.simplify(distributed.local))
        after = lower.sent(simple)
        assert all(n <= sent[axes] for axes, n in after.items())
        assert lower.sent(check(lower.overlap(simple))) == pytest.approx(after)


def test_without_a_mesh():
    torch.manual_seed(0)
    model = Mlp()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step.prepare(torch.randn(4, 8), torch.randn(4, 8))
    text = step.explain()
    assert str(step.program) in text and "sent by a rank" not in text
    assert lower.sent(step.program) == {}
