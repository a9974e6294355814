"""Programs that use what torch's modules and tensors allow: hooks, parametrizations, buffers, subclasses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from handwritten.case import D, Mlp, program


@program
class HooksInside(Mlp):
    """Forward hooks that change results, pre-hooks that change arguments, a hook on a value."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.a.register_forward_hook(lambda m, args, out: out * 1.5)
        self.b.register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
        self.a.register_forward_hook(self.remember)

    def remember(self, module, args, out):
        self.seen["a"] = out

    def forward(self, x, y):
        h = self.features(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return F.cross_entropy(self.b(h), y) + 0.1 * self.seen["a"].pow(2).mean()


class Skew(nn.Module):
    def forward(self, w):
        return w.triu(1) - w.triu(1).mT


class UnitRows(nn.Module):
    def forward(self, w):
        return F.normalize(w, dim=-1)

    def right_inverse(self, w):
        return w * 2


@program
class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, 4)
        parametrize.register_parametrization(self.turn, "weight", Skew())
        parametrize.register_parametrization(self.out, "weight", UnitRows())

    def forward(self, x, y):
        with parametrize.cached():
            turned = torch.linalg.matrix_exp(self.turn.weight)
            return F.cross_entropy(self.out(x @ turned + self.turn(x)), y)


@program
class BuffersByAssignment(Mlp):
    """Buffers that forward replaces, one that starts as None, one whose shape changes once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototypes", torch.eye(4))
        self.register_buffer("last", None)
        self.register_buffer("offsets", torch.zeros(1), persistent=False)

    def forward(self, x, y):
        out = self.b(self.features(x))
        with torch.no_grad():
            if self.training:
                self.prototypes = self.prototypes.index_add(0, y, out.softmax(-1)) / 2
                self.last = out.mean(0)
                self.offsets = torch.ones(4) * 0.1
        extra = 0 if self.last is None else (out - self.last).square().mean()
        return (
            F.cross_entropy(out + self.offsets, y) + (out.softmax(-1) - self.prototypes[y]).abs().mean() + 0.1 * extra
        )


class Tagged(torch.Tensor):
    """A class of tensors of one's own."""


@program
class OwnClassOfTensors(Mlp):
    def forward(self, x, y):
        h = self.features(x).as_subclass(Tagged) * 2
        return F.cross_entropy(self.b(h.as_subclass(torch.Tensor)), y)
