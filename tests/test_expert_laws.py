"""Routers and layers of experts by chance: whichever way tokens choose, and whatever lies where, a step is that of
torch on one device, and that of one device on ranks."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from distributing import OneDevice, step_equals
from experts import SPLIT, Layer, operators
from stepping import plain_step
from torch import nn

import mycel
from mycel import Mesh, Plan


def steps_of_torch(model: nn.Module, batch: dict[str, torch.Tensor], steps: int = 2) -> None:
    """Losses and parameters of a step are torch's with AdamW."""
    model = copy.deepcopy(model)
    twin = copy.deepcopy(model)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    step = mycel.train_step(model, adamw[0], compile=False, strict=True)
    for _ in range(steps):
        assert float(step(**batch)) == pytest.approx(plain_step(twin, adamw[1], batch), rel=1e-9)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


# -- routers


@dataclass(frozen=True)
class Way:
    """How tokens choose: by which scores, with a bias for the choice alone, in groups, with weights that are normed."""

    scores: str
    is_biased: bool
    groups: int
    is_normed: bool


class Chosen(Layer):
    """A layer whose tokens choose 2 of 6 experts."""

    def __init__(self, way: Way) -> None:
        super().__init__(6)
        self.way, self.router = way, nn.Linear(4, 6, dtype=torch.float64)
        self.register_buffer("bias", torch.linspace(0.5, -0.5, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, way = self.router(x), self.way
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "after": logits}[way.scores]
        asked = scores + self.bias if way.is_biased else scores
        if way.groups:
            groups = asked.unflatten(-1, (way.groups, -1))
            best = groups.topk(2)[0].sum(-1).topk(way.groups - 1)[1]
            closed = torch.ones_like(groups[..., 0]).scatter(-1, best, 0.0).bool()
            asked = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
        ids = asked.topk(2)[1]
        weights = scores.gather(-1, ids)
        weights = weights.softmax(-1) if way.scores == "after" else weights
        return super().forward(x, ids, weights / weights.sum(-1, keepdim=True) if way.is_normed else weights)


WAYS = [Way(*way) for way in itertools.product(["softmax", "sigmoid", "after"], [False, True], [0, 3], [False, True])]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_router_chooses_as_in_torch(way):
    """Also where tokens and experts are split, and experts and their columns beside replicas."""
    model, x = Chosen(way), torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps_of_torch(model, {"x": x})
    one = OneDevice.of(model, {"x": x})
    assert "experts" in operators(one.unsharded.program)
    step_equals(one, Plan(Mesh(ep=2), SPLIT, ["ep"]))
    step_equals(one, Plan(Mesh(dp=2, ep=3), SPLIT, ["dp"]))


# -- layers


class Varied(nn.Module):
    """A layer of experts of any form, beside itself computed one choice after the other."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(1000))
        self.experts, self.form = rng.randint(1, 7), rng.choice(["whole", "halves", "pairs"])
        self.transposed, self.capacity = rng.random() < 0.5, rng.choice([None, None, 1, 3])
        hidden = 6 if self.form == "whole" else 12
        up, down = (self.experts, hidden, 4), (self.experts, 4, 6)
        draw = lambda shape: nn.Parameter(torch.randn(*shape, dtype=torch.float64))
        self.up, self.down = (draw((s[0], s[2], s[1]) if self.transposed else s) for s in (up, down))
        self.up_bias, self.down_bias = (draw(s[:2]) if rng.random() < 0.5 else None for s in (up, down))

    def gate(self, h: torch.Tensor) -> torch.Tensor:
        if self.form == "whole":
            return F.gelu(h)
        a, b = h.chunk(2, dim=-1) if self.form == "halves" else (h[..., ::2], h[..., 1::2])
        return F.silu(a) * b

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        biases = {"up_bias": self.up_bias, "down_bias": self.down_bias}
        how = {"gate": self.gate, "transposed": self.transposed, "capacity": self.capacity}
        return (x + mycel.experts(x, ids, weights, self.up, self.down, **biases, **how)).square().mean()

    def one_by_one(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts, y = [0] * self.experts, [*torch.zeros_like(x)]
        for t, row in enumerate(ids.tolist()):
            for j, e in enumerate(row):
                counts[e] += 1
                if self.capacity is None or counts[e] <= self.capacity:
                    y[t] = y[t] + weights[t, j] * self.expert(x[t], e)
        return (x + torch.stack(y)).square().mean()

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        up, down = (w[e].T if self.transposed else w[e] for w in (self.up, self.down))
        h = up @ x if self.up_bias is None else up @ x + self.up_bias[e]
        y = down @ self.gate(h)
        return y if self.down_bias is None else y + self.down_bias[e]


def any_routing(experts: int, rng: random.Random) -> dict[str, torch.Tensor]:
    """Choices by chance, the same expert more than once among them; of few experts; of one alone."""
    g = torch.Generator().manual_seed(rng.randrange(1000))
    tokens, chosen, among = rng.choice([1, 4, 7, 12]), rng.randint(1, 4), rng.choice([experts, max(experts // 2, 1), 1])
    ids = (torch.randint(among, (tokens, chosen), generator=g) + rng.randrange(experts)) % experts
    x, weights = (torch.randn(tokens, n, generator=g, dtype=torch.float64) for n in (4, chosen))
    return {"x": x, "ids": ids, "weights": weights}


def any_layout(model: Varied, rng: random.Random) -> Plan:
    """Experts over some axes, the inner width over others, tokens over any; ZeRO or not."""
    sizes = rng.choice([(2,), (3,), (2, 2), (2, 3), (2, 2, 2)])
    mesh = Mesh(dict(zip(rng.sample(["dp", "ep", "tp"], len(sizes)), sizes, strict=True)))
    over = {axis: rng.choice("ef-") for axis in mesh.axes}
    while mesh.count([a for a in over if over[a] == "e"]) > model.experts:
        over[next(a for a in over if over[a] == "e")] = "-"
    entry = {to: ".".join(a for a in over if over[a] == to) or "-" for to in "ef"}
    up, down = [entry["e"], entry["f"], "-"], [entry["e"], "-", entry["f"]]
    up, down = ([s[0], s[2], s[1]] if model.transposed else s for s in (up, down))
    biases = {"up_bias": [entry["e"], entry["f"]], "down_bias": [entry["e"], "-"]}
    parameters = {"up": up, "down": down, **{k: v for k, v in biases.items() if getattr(model, k) is not None}}
    zero = rng.choice([0, 0, 1, 2, 3])
    rows = [a for a in mesh.axes if rng.random() < 0.6]
    return Plan(mesh, parameters, [".".join(rows) or "-"], {}, zero, tuple(mesh.axes) if zero else ())


@pytest.mark.parametrize("seed", range(60))
def test_any_layer_in_any_layout(seed):
    rng = random.Random(seed)
    model = Varied(rng)
    batch = any_routing(model.experts, rng)
    wanted = model.one_by_one(**batch)
    wanted.backward()
    loss, grads = mycel.value_and_grad(model.forward, wrt=model)(**batch)
    torch.testing.assert_close(loss, wanted.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)
    model.zero_grad()
    step_equals(OneDevice.of(model, batch, clip_norm=1.0), any_layout(model, rng))
