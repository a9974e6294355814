"""Layers of torch.nn, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from programs.entry import IMG, SEQ, X
from torch import nn
from torch.nn import functional as F


class Regression(nn.Module):
    """Any module, its first result against zeros."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        out = self.inner(*args)
        out = out[0] if isinstance(out, tuple) else out
        return (out * torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)).square().mean()


def layer(module: Callable[[], nn.Module], *args: torch.Tensor) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (Regression(module()), args)


MODULES: dict[str, Callable[[], Any]] = {
    "lstm": layer(lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), SEQ),
    "gru": layer(lambda: nn.GRU(8, 6, batch_first=True), SEQ),
    "rnn": layer(lambda: nn.RNN(8, 6), SEQ),
    "lstm_cell": layer(lambda: nn.LSTMCell(6, 5), X),
    "encoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), SEQ
    ),
    "transformer": layer(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), SEQ, SEQ[:, :4]),
    "attention": layer(lambda: nn.MultiheadAttention(8, 2, batch_first=True), SEQ, SEQ, SEQ),
    "batch_norm_cumulative": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)), X),
    "spectral_norm": layer(lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), X),
    "spectral_norm_parametrization": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), X),
    "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), X),
    "orthogonal": layer(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), X),
    "instance_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)), IMG),
    "group_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMG),
    "conv_transpose": layer(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), IMG),
    "adaptive_pool": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(3)), IMG),
    "max_unpool": layer(lambda: Unpool(), IMG),
    "embedding_bag": layer(lambda: nn.EmbeddingBag(10, 6, mode="sum"), torch.tensor([[1, 2], [3, 4]])),
    "bilinear": layer(lambda: nn.Bilinear(6, 6, 3), X, X),
    "prelu": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), X),
    "fake_quant": layer(lambda: nn.Sequential(nn.Linear(6, 6), torch.ao.quantization.FakeQuantize()), X),
    "scripted": layer(lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "compiled": layer(lambda: torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "lazy": layer(lambda: warmed(nn.LazyLinear(3), X), X),
}


class Unpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, at = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(y, at, 2)


def warmed(module: nn.Module, x: torch.Tensor) -> nn.Module:
    module(x)
    return module
