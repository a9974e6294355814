"""A training step beside a plain PyTorch loop over the same batches.

beside     the same model twice, one trained by mycel.train_step, one by the loop everybody writes
agree      losses within 1e-5 of each other at every step, and close parameters at the end
rows       batches of features and classes, some of which are to be ignored: parts of a batch count unequally
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mycel

Batch = tuple[Any, ...] | dict[str, Any]


@dataclass
class Both:
    """Two copies of a model and their optimisers, and the losses of each."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: mycel.step.Step
    twin: nn.Module
    plain: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    wanted: list[float] = field(default_factory=list)
    loss: Callable[..., Any] | None = None

    def further(self, batch: Batch) -> None:
        """One step of each."""
        self.losses.append(self.step(**batch).item() if isinstance(batch, dict) else self.step(*batch).item())
        self.wanted.append(plain_step(self.twin, self.plain, batch, self.loss, self.step.settings.clip_norm))


def both(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[..., Any] | None = None,
    **settings: Any,
) -> Both:
    """A model and its twin, before the first step."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    mine = optimizer(model)
    step = mycel.train_step(model, mine, loss=loss, **{"compile": False, **settings})
    return Both(model, mine, step, twin, optimizer(twin), loss=loss)


def beside(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Callable[[int], Batch],
    loss: Callable[..., Any] | None = None,
    steps: int = 10,
    change: Callable[[int, nn.Module, torch.optim.Optimizer], Any] | None = None,
    **settings: Any,
) -> Both:
    """`steps` steps of each; `change` is done to both before a step."""
    pair = both(make, optimizer, loss, **settings)
    for i in range(steps):
        if change is not None:
            change(i, pair.model, pair.optimizer)
            change(i, pair.twin, pair.plain)
        pair.further(batches(i))
    return pair


def plain_loss(model: nn.Module, batch: Batch, loss: Callable[..., Any] | None) -> torch.Tensor:
    """The loss of a batch, as one calls it in PyTorch."""
    if loss is not None:
        x, *rest = batch
        return loss(model(x), *rest)
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, torch.Tensor) else out["loss"]


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    loss: Callable[..., Any] | None = None,
    clip_norm: float | None = None,
) -> float:
    """The loop everybody writes; a step whose gradients are not finite is left out."""
    optimizer.zero_grad(set_to_none=True)
    value = plain_loss(model, batch, loss)
    value.backward()
    params = [p for p in model.parameters() if p.grad is not None]
    if clip_norm is not None:
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip_norm)
    if all(p.grad.isfinite().all() for p in params):
        optimizer.step()
    return value.item()


def agree(pair: Both, loss: float = 1e-5, params: float = 2e-4) -> Both:
    """The same curve, the same parameters and buffers."""
    for i, (ours, wanted) in enumerate(zip(pair.losses, pair.wanted, strict=True)):
        assert abs(ours - wanted) <= loss * max(abs(wanted), 1e-2), f"step {i}: loss {ours}, in PyTorch {wanted}"
    wanted = pair.twin.state_dict()
    for name, value in pair.model.state_dict().items():
        torch.testing.assert_close(
            value, wanted[name], rtol=params, atol=params, msg=lambda m, name=name: f"{name}: {m}"
        )
    return pair


def frozen_copy(*things: Any) -> Any:
    """What modules, optimisers and tensors hold now, by value."""
    return copy.deepcopy([x.state_dict() if hasattr(x, "state_dict") else x for x in things])


def bitwise(a: Any, b: Any) -> bool:
    """Equal to the last bit, NaN included."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(bitwise(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(bitwise(x, y) for x, y in zip(a, b, strict=True))
    return a == b


# -- small things to train


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def rows(i: int, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and classes; the first four rows do not count."""
    g = torch.Generator().manual_seed(i)
    x, y = torch.randn(n, 6, generator=g), torch.randint(0, 5, (n,), generator=g)
    y[:4] = -100
    return x, y


def sgd(**more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.SGD(m.parameters(), **{"lr": 0.1, **more})


def adam(**more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.Adam(m.parameters(), **{"lr": 0.01, **more})


def adamw(**more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.AdamW(m.parameters(), **{"lr": 0.01, **more})


cross_entropy = F.cross_entropy
