"""A layer of experts alone, told by its batch where tokens go."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import mycel


class Layer(nn.Module):
    """A layer of experts that is told where tokens go; its loss is the square of what it gives."""

    def __init__(self, experts: int, width: int = 4, hidden: int = 6, capacity: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.capacity = capacity
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, width, hidden, dtype=torch.float64))

    @staticmethod
    def gate(h: torch.Tensor) -> torch.Tensor:
        a, b = h.chunk(2, dim=-1)
        return F.silu(a) * b

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = mycel.experts(x, ids, weights, self.up, self.down, gate=self.gate, capacity=self.capacity)
        return (x + y).square().mean()


class Routed(Layer):
    """A layer that chooses by itself, the first experts more often than the last."""

    def __init__(self, experts: int, width: int = 4, chosen: int = 2) -> None:
        super().__init__(experts, width)
        self.router = nn.Linear(width, experts, dtype=torch.float64)
        self.router.bias.data = torch.linspace(2, -2, experts, dtype=torch.float64)
        self.scale, self.chosen = nn.Parameter(torch.ones(width, dtype=torch.float64)), chosen

    def choices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(self.router(x * self.scale).softmax(-1), self.chosen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choices(x)
        return super().forward(x * self.scale, ids, weights)


def routed(how: str, experts: int, tokens: int = 8, chosen: int = 2, width: int = 4) -> dict[str, torch.Tensor]:
    """A batch for a Layer: tokens by chance, to one expert alone, or to the last two, so that others have none."""
    g = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(experts, generator=g)[:chosen] for _ in range(tokens)])
    ids = {"random": ids, "one": torch.zeros_like(ids), "few": experts - 1 - ids % 2}[how]
    x, weights = (torch.randn(tokens, n, generator=g, dtype=torch.float64) for n in (width, chosen))
    return {"x": x, "ids": ids, "weights": weights}
