"""Models of libraries that Mycel does not know, where these are installed, each beside torch in f64: two AdamW steps,
and what evaluation gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mycel

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])
MODELS: dict[str, tuple[str, Callable[[Any], tuple[nn.Module, tuple[torch.Tensor, ...]]]]] = {}


def of(library: str) -> Callable[[Any], Any]:
    """Enter what makes a model and a batch of a library."""

    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        MODELS[make.__name__] = library, make
        return make

    return enter


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@of("torch_geometric.nn")
def graph_attention(gnn):
    return gnn.GAT(6, 8, 2, 4, v2=True, norm="batch", jk="cat"), (normal(8, 6), EDGES)


@of("torch_geometric.nn")
def relations(gnn):
    return gnn.RGCNConv(6, 4, 3), (normal(8, 6), EDGES, torch.arange(10) % 3)


class Flow(nn.Module):
    """A network that torchdiffeq integrates."""

    def __init__(self, torchdiffeq: Any) -> None:
        super().__init__()
        self.solve = torchdiffeq.odeint
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, y: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return self.solve(lambda t, y: self.net(y) * torch.cos(t), y, times, method="rk4")[-1]


@of("torchdiffeq")
def neural_ode(torchdiffeq):
    return Flow(torchdiffeq), (normal(3, 4), torch.linspace(0, 1, 3, dtype=torch.float64))


@of("x_transformers")
def decoder(x_transformers):
    layers = x_transformers.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True)
    model = x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    return model, (torch.randint(0, 20, (2, 12)),)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_libraries(name):
    library, make = MODELS[name]
    module = pytest.importorskip(library)
    torch.manual_seed(0)
    model, batch = make(module)
    model = model.double()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(mycel.jit(copy.deepcopy(model).eval())(*batch), copy.deepcopy(twin).eval()(*batch))

    def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        return model(*batch).square().mean()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # a bias before a norm gets rounding alone

    step, plain = mycel.train_step(model, adamw(model), loss=loss, compile=False), adamw(twin)
    for _ in range(2):
        plain.zero_grad()
        wanted = loss(twin, *batch)
        wanted.backward()
        plain.step()
        torch.testing.assert_close(step(*batch), wanted.detach())
        for (key, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")
