"""Programs that keep what they need in what Python has: properties, closures, dataclasses, enums, contexts."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import operator
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from handwritten.case import D, Mlp, program


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.extras.setdefault("top", self.logits.argmax(-1))

    @property
    def accuracy(self):
        return (self.extras["top"] == self.extras["y"]).double().mean()


@program
class OutputsOfADataclass(Mlp):
    def forward(self, x, y):
        logits = self.b(self.features(x))
        out = Output(F.cross_entropy(logits, y), logits, {"y": y})
        out = dataclasses.replace(out, loss=out.loss + 0.1 * (1 - out.accuracy))
        return out.loss


@program
class StateInADict(Mlp):
    """A dict of tensors that forward changes."""

    def __init__(self):
        super().__init__()
        self.stats = {"sum": torch.zeros(8), "count": torch.zeros(())}

    def forward(self, x, y):
        h = self.features(x)
        if self.training:
            self.stats["sum"] = self.stats["sum"] + h.detach().sum(0)
            self.stats["count"] += len(h)
        return F.cross_entropy(self.b(h - self.stats["sum"] / self.stats["count"].clamp(min=1)), y)


@program
class TiedByAProperty(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, D)
        self.scale = nn.Parameter(torch.tensor(0.5))

    @property
    def weight(self):
        return self.embed.weight * self.scale

    def forward(self, x, y):
        return F.cross_entropy((x + self.embed(y).detach()) @ self.weight.T, y)


@program
class MadeOnFirstUse(nn.Module):
    """Makes a layer when it first knows its width."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.body = nn.LazyLinear(8)
        self.body(torch.zeros(1, D, dtype=torch.get_default_dtype()))
        self.scales = None

    def forward(self, x, y):
        if self.scales is None:
            self.scales = torch.linspace(0.5, 1.5, 8)
        return F.cross_entropy(self.head(torch.relu(self.body(x)) * self.scales), y)


@program
class CachedProperty(Mlp):
    @functools.cached_property
    def positions(self):
        return torch.sin(torch.arange(8) * math.pi / 8)

    def forward(self, x, y):
        return F.cross_entropy(self.b(self.features(x) + self.positions), y)


@program
class Closures(Mlp):
    """Functions in functions that share variables."""

    def forward(self, x, y):
        losses, total = [], 0.0

        def add(name, value, *, scale=1.0):
            nonlocal total
            losses.append((name, value))
            total = total + scale * value
            return total

        def branch(depth):
            def inner(z):
                return torch.sin(z * depth) + (inner2(z) if depth > 1 else 0)

            inner2 = branch(depth - 1) if depth > 1 else None
            return inner

        h = branch(3)(self.features(x))
        add("ce", F.cross_entropy(self.b(h), y))
        add("l2", h.square().mean(), scale=0.1)
        by_name = dict(losses)
        return total + 0.01 * by_name["l2"] * len(losses)


@functools.cache
def positional(length, kind="sin"):
    return torch.tensor([getattr(math, kind)(i / 3) for i in range(length)])


@program
class PartialsAndCaches(Mlp):
    def __init__(self):
        super().__init__()
        self.act = functools.partial(F.leaky_relu, negative_slope=0.2)
        self.steps = [functools.partial(torch.mul, other=0.5), operator.neg, functools.partial(torch.clamp, min=-1.0)]

    def forward(self, x, y):
        h = self.act(self.a(x)) + positional(8) + positional(8, kind="cos")
        h = functools.reduce(lambda value, step: step(value), self.steps, h)
        return F.cross_entropy(self.b(h), y)


class Norm(enum.Enum):
    NONE = "none"
    RMS = "rms"
    MAX = "max"


@program
class Matching(Mlp):
    """match statements and the walrus."""

    def __init__(self):
        super().__init__()
        self.layers = [("norm", Norm.RMS), {"kind": "scale", "by": 0.5}, ["shift", 1, 2], Norm.MAX, "act"]

    def apply_one(self, h, layer):
        match layer:
            case ("norm", Norm() as kind) | (Norm() as kind):
                match kind:
                    case Norm.RMS:
                        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
                    case Norm.MAX if (top := h.abs().amax()) > 0.5:
                        return h / top
                    case _:
                        return h
            case {"kind": "scale", "by": float(by)}:
                return h * by
            case ["shift", *amounts]:
                return h + sum(amounts) / 10
            case str() if (fn := getattr(F, "gelu" if layer == "act" else layer, None)) is not None:
                return fn(h)
        raise ValueError(layer)

    def forward(self, x, y):
        h = self.a(x)
        for layer in self.layers:
            h = self.apply_one(h, layer)
        while (norm := h.norm()) > 4.0:
            h = h / 2
        return F.cross_entropy(self.b(h), y) + 0.01 * norm


@program
class TryExceptFinally(Mlp):
    def __init__(self):
        super().__init__()
        self.depth, self.log = 0, []

    def shaped(self, h):
        try:
            return h.view(-1, 3)
        except RuntimeError:
            return h.view(-1, 4)
        else:
            return None
        finally:
            self.depth -= 1

    def forward(self, x, y):
        self.depth += 1
        h = self.shaped(self.features(x)).reshape(len(x), 8)
        try:
            weight = {"a": 1.0}["b"]
        except (KeyError, IndexError) as error:
            weight = len(error.args)
        try:
            with contextlib.suppress(ZeroDivisionError):
                weight = weight / self.depth
        finally:
            h = h * 2
        return F.cross_entropy(self.b(h), y) * weight


@contextlib.contextmanager
def frozen(*modules):
    before = [[p.requires_grad for p in m.parameters()] for m in modules]
    for m in modules:
        m.requires_grad_(False)
    try:
        yield modules
    finally:
        for m, flags in zip(modules, before, strict=True):
            for p, flag in zip(m.parameters(), flags, strict=True):
                p.requires_grad_(flag)


class Scope:
    """A context manager that is an object, with a stack of its own."""

    stack: list[float] = []

    def __init__(self, scale):
        self.scale = scale

    def __enter__(self):
        Scope.stack.append(self.scale)
        return self

    def __exit__(self, *exc):
        Scope.stack.pop()
        return False


@program
class ContextManagers(Mlp):
    def forward(self, x, y):
        with Scope(2.0) as outer, Scope(0.5):
            h = self.features(x) * math.prod(Scope.stack) * outer.scale
        with frozen(self.b):
            aux = self.b(h.sin())
        with torch.no_grad():
            target = self.b(h).softmax(-1)
            with torch.enable_grad():
                extra = self.a(x).mean()
        return F.cross_entropy(self.b(h), y) + (aux.softmax(-1) - target).pow(2).sum() + 0.1 * extra + len(Scope.stack)


@program
class GatesByTernary(Mlp):
    """Conditional expressions, chained comparisons, any/all, sorted, sum and max on tensors."""

    def forward(self, x, y):
        h = self.features(x)
        norms = [row.norm() for row in h[:3]]
        scale = 2.0 if 0.1 < norms[0] < 100 else 0.5
        biggest = max(norms)
        positive = all(n > 0 for n in norms) and not any(n > 1e3 for n in norms)
        total = sum(n for n in norms if n > 0.2)
        out = self.b(h * scale / biggest if positive else h)
        return F.cross_entropy(out, y) + 0.01 * total + (0.1 if out.mean() > 0 or out.std() < 0.01 else 0.2)


@program
class NestedStructures(nn.Module):
    """A tree of modules by names, called by recursion; outputs in an OrderedDict."""

    def __init__(self):
        super().__init__()
        self.tree = nn.ModuleDict({"root": nn.Linear(D, D), "left": nn.Linear(D, 4), "right": nn.Linear(D, 4)})
        self.edges = {"root": ["left", "right"], "left": [], "right": []}
        self.mix = nn.ParameterDict({"left": nn.Parameter(torch.tensor(0.3)), "right": nn.Parameter(torch.tensor(0.7))})

    def walk(self, name, x, outs):
        h = torch.tanh(self.tree[name](x))
        for child in self.edges[name]:
            self.walk(child, h, outs)
        if not self.edges[name]:
            outs[name] = h * self.mix[name]
        return outs

    def forward(self, x, y):
        outs = self.walk("root", x, OrderedDict())
        outs.move_to_end("left")
        left, *rest = outs.values()
        return F.cross_entropy(left + sum(rest), y)


@program
class AsksForTypes(Mlp):
    """type(x), x.__class__, isinstance, a table by type: a tensor is a tensor."""

    def forward(self, x, y):
        h = self.features(x)
        if type(x) is torch.Tensor:
            h = h * 2
        if x.__class__ is torch.Tensor and type(self.a.weight) is nn.Parameter:
            h = h + 0.1
        if isinstance(h, torch.Tensor) and torch.is_tensor(y) and h.type() == "torch.DoubleTensor":
            h = h - 0.2
        if type(h).__name__ == "Tensor":
            h = h * 1.3
        return F.cross_entropy(self.b({torch.Tensor: torch.sin}.get(type(h), torch.cos)(h)), y)


@program
class AsksForTypesOfNumbers(Mlp):
    """What .item() gives is one of Python's numbers."""

    def forward(self, x, y):
        h = self.features(x)
        loss = F.cross_entropy(self.b(h), y)
        value, count = loss.item(), (h > 0).sum().item()
        if isinstance(value, float) and type(value) is float:
            loss = loss * 2
        if not isinstance(value, torch.Tensor):
            loss = loss + 0.1
        if isinstance(count, int) and not isinstance(count, (bool, float)):
            loss = loss * 1.5
        return loss + 0.001 * count


@program
class FunctionsThatChangePlaces(Mlp):
    """Which activation comes next is kept in attributes."""

    def __init__(self):
        super().__init__()
        self.act, self.other = torch.tanh, F.silu

    def forward(self, x, y):
        loss = F.cross_entropy(self.b(self.act(self.a(x))), y)
        self.act, self.other = self.other, self.act
        return loss
