"""Every optimiser with several of its options, and something small to train with it in f64.

CASES    name -> (a function of parameters that makes torch's optimiser)
Lion     torch has none: this one has the interface and the update of lion-pytorch
Whitened one of which Mycel knows nothing
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(average.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Whitened(torch.optim.Optimizer):
    """Shampoo's idea in small: a matrix of each parameter's own, which no part of it could make."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            g = p.grad.reshape(p.shape[0] if p.ndim else 1, -1)
            seen = self.state[p]
            seen["gram"] = seen.get("gram", 0) + g @ g.T
            seen["count"] = seen.get("count", 0) + 1  # a plain number: state need not be tensors
            size = len(seen["gram"])
            p -= self.param_groups[0]["lr"] * torch.linalg.solve(seen["gram"] + torch.eye(size), g).reshape(p.shape)


Make = Callable[[Any], torch.optim.Optimizer]


def options(**values: list[Any]) -> Iterator[dict[str, Any]]:
    """Every combination."""
    yield from (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


def cases() -> dict[str, Make]:
    adamish = list(options(weight_decay=[0.0, 0.2], maximize=[False, True]))
    momentum = [{"momentum": 0.9, "dampening": 0.3, "maximize": True}]
    means = [(False, 0.0), (True, 0.0), (False, 0.9), (True, 0.9)]
    factors = [((None, 1e-3), 1.0, -0.8), ((1e-3, 1e-2), 1.5, -0.5)]
    iterations = [{"ns_steps": 3, "ns_coefficients": [2.0, -1.5, 0.5], "weight_decay": 0.0}]
    every = {
        "SGD": [*options(momentum=[0.0, 0.9], weight_decay=[0.0, 0.1], maximize=[False, True]), *momentum],
        "Adam": [{**o, "amsgrad": a} for o in adamish for a in (False, True)],
        "AdamW": [{**o, "amsgrad": a} for o in adamish for a in (False, True)],
        "NAdam": [
            {**o, "decoupled_weight_decay": d, "momentum_decay": m}
            for o in adamish
            for d, m in ((False, 4e-3), (True, 0.1))
        ],
        "RMSprop": [{**o, "centered": c, "momentum": m} for o in adamish for c, m in means],
        "Adagrad": [
            {**o, "lr_decay": d, "initial_accumulator_value": v} for o in adamish for d, v in ((0.0, 0.0), (0.1, 0.5))
        ],
        "RAdam": [{}, {"weight_decay": 0.2, "maximize": True, "decoupled_weight_decay": True, "betas": (0.8, 0.9)}],
        "Adamax": [{}, {"weight_decay": 0.2, "maximize": True, "betas": (0.5, 0.3)}],
        "Adadelta": [{}, {"weight_decay": 0.2, "maximize": True, "rho": 0.3}],
        "ASGD": [{}, {"weight_decay": 0.2, "maximize": True, "lambd": 0.1, "t0": 1}],
        "Rprop": [{}, {"maximize": True, "etas": (0.1, 3.0)}, {"step_sizes": (0.015, 0.03)}],
        "Adafactor": [{**o, "eps": e, "d": d, "beta2_decay": b} for o in adamish for e, d, b in factors],
        "Muon": [*options(nesterov=[False, True], adjust_lr_fn=[None, "match_rms_adamw"]), *iterations],
        "Lion": [{}, {"weight_decay": 0.3, "betas": (0.5, 0.8)}],
    }
    kinds = {name: Lion if name == "Lion" else getattr(torch.optim, name, None) for name in every}
    return {
        f"{name}{more or ''}": lambda params, kind=kinds[name], more=more: kind(params, **{"lr": 0.02, **more})
        for name, chosen in every.items()
        for more in chosen
        if kinds[name] is not None
    }


CASES = cases()
ONE_EACH = {name.partition("{")[0]: name for name in CASES}  # of each optimiser its last
LIKE_NADAM = ("RAdam", "Adamax", "Adadelta")  # state as large as the parameter and a count, updated element by element
SPREAD = {kind: name for kind, name in ONE_EACH.items() if kind not in LIKE_NADAM}  # what is tried on ranks


class Small(nn.Module):
    """Matrices wide and tall, a vector, a scalar, three dims; with Muon matrices alone."""

    def __init__(self, matrices: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=not matrices), nn.Linear(8, 4, bias=False)
        self.mixed = nn.Parameter(torch.randn(*(4, 4) if matrices else (2, 4, 4)) * 0.5)
        self.size = nn.Parameter(torch.ones(()), requires_grad=not matrices)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.tanh(self.up(x)))
        h = (h @ self.mixed) if self.mixed.ndim == 2 else (h @ self.mixed[0]) * torch.tanh(h @ self.mixed[1])
        return ((h * self.size - y) ** 2).mean()


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Small(name.startswith("Muon")).double()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def rows(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {
        "x": torch.randn(8, 6, generator=g, dtype=torch.float64),
        "y": torch.randn(8, 4, generator=g, dtype=torch.float64),
    }
