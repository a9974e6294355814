"""Every optimiser with several of its options, and something small to train with it in f64.

CASES    name -> (a function of parameters that makes torch's optimiser)
Lion     torch has none: this one has the interface and the update of lion-pytorch
Whitened one of which Mycel knows nothing
Shampoo  its state are lists of matrices, which are made anew every other step
EightBit its state are codes in 8 bits, in a class of tensors of its own
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


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018: the gradient times an inverse root of its own statistics along each dim, with momentum."""

    def __init__(self, params, lr=0.02, momentum=0.9, every=2):
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(self.direction(p, group), alpha=-group["lr"])
        return loss

    def direction(self, p, group):
        state = self.state[p]
        if not state:
            eyes = [torch.eye(n, dtype=p.dtype) for n in p.shape]
            state.update(step=0, sums=[0.01 * eye for eye in eyes], roots=eyes, momentum=torch.zeros_like(p))
        g = p.grad
        for dim in range(p.ndim):
            flat = p.grad.transpose(0, dim).reshape(p.shape[dim], -1)
            state["sums"][dim] = state["sums"][dim] + flat @ flat.T
            if state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(state["sums"][dim])
                state["roots"][dim] = vectors * values ** (-0.5 / p.ndim) @ vectors.T
            g = torch.tensordot(g, state["roots"][dim], dims=([0], [0]))  # the next dim comes to the front
        state["step"] += 1
        return state["momentum"].mul_(group["momentum"]).add_(g)


class Codes(torch.Tensor):
    """Numbers in blocks of 16, each a byte and the block a scale; it can be made and read, nothing else."""

    @staticmethod
    def __new__(cls, codes, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)

    def __init__(self, codes, scale, shape):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, x):
        blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 16)).view(-1, 16)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return cls((blocks / scale * 127 + 128).round().to(torch.uint8), scale, x.shape)

    def numbers(self):
        return ((self.codes.to(self.scale.dtype) - 128) / 127 * self.scale).flatten()[: self.numel()].view(self.shape)

    def __tensor_flatten__(self):
        return ["codes", "scale"], tuple(self.shape)

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Codes(tensors["codes"], tensors["scale"], torch.Size(context))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of codes")


class EightBit(torch.optim.Optimizer):
    """Adam whose averages are kept as codes."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                before = [state[slot].numbers() if slot in state else torch.zeros_like(p) for slot in ("mean", "root")]
                mean, root = before[0].lerp(p.grad, 1 - beta1), before[1].square().lerp(p.grad**2, 1 - beta2).sqrt()
                state["mean"], state["root"] = Codes.of(mean), Codes.of(root)
                p.addcdiv_(mean, root + 1e-3, value=-group["lr"])


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
