"""Programs as people write them by hand, each beside torch in f64: forward in training and evaluation, gradients, and
two AdamW steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import math
import operator
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import mycel

D = 6
MODELS: dict[str, Any] = {}


def program(cls):
    MODELS[cls.__name__] = cls
    return cls


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 8), nn.Linear(8, 4)

    def features(self, x):
        return torch.tanh(self.a(x))


@program
class MovingAverageInForward(Mlp):
    """The features' mean is a moving average that forward assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.decay = 0.9

    def forward(self, x, y):
        h = self.features(x)
        if self.training:
            with torch.no_grad():
                self.mean = self.decay * self.mean + (1 - self.decay) * h.mean(0)
                self.seen += 1
        corrected = self.mean / (1 - self.decay ** self.seen.clamp(min=1))
        return F.cross_entropy(self.b(h - corrected.detach()), y)


@program
class TeacherOfOnesOwn(Mlp):
    """A mean teacher inside the model, updated by its own forward."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleList([self.a, self.b])).requires_grad_(False)

    @torch.no_grad()
    def follow(self, momentum=0.99):
        for mine, other in zip([*self.a.parameters(), *self.b.parameters()], self.teacher.parameters(), strict=True):
            other.mul_(momentum).add_(mine, alpha=1 - momentum)

    def forward(self, x, y):
        if self.training:
            self.follow()
        out = self.b(self.features(x))
        with torch.no_grad():
            target = self.teacher[1](torch.tanh(self.teacher[0](x))).softmax(-1)
        return F.cross_entropy(out, y) + F.kl_div(out.log_softmax(-1), target, reduction="batchmean")


@program
class SmoothingByHand(Mlp):
    def forward(self, x, y, smoothing=0.1):
        logp = self.b(self.features(x)).log_softmax(-1)
        smooth = torch.full_like(logp, smoothing / (logp.size(-1) - 1))
        smooth.scatter_(1, y.unsqueeze(1), 1 - smoothing)
        smooth[y == 0] *= 0.5
        return -(smooth * logp).sum(-1).mean()


@program
class GradientPenalty(Mlp):
    """As in WGAN-GP: the critic's gradient by interpolated inputs has norm one."""

    def critic(self, x):
        return self.b(self.features(x)).sum(-1)

    def forward(self, x, y):
        fake = x.flip(0)
        mix = (0.3 * x + 0.7 * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.critic(mix).sum(), mix, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).pow(2).mean()
        return self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        mask = (x >= ctx.low) & (x <= ctx.high)
        return torch.where(mask, g, 0.1 * g), None, None


@program
class Adversarial(Mlp):
    """Gradient reversal, and a clip whose gradient leaks."""

    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(8, 2)
        self.reverse = Reversed.apply

    def forward(self, x, y):
        h = Clipped.apply(self.a(x), -0.5, 0.5)
        return F.cross_entropy(self.b(h), y) + F.cross_entropy(self.domain(self.reverse(h, 0.3)), y % 2)


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
class EarlyExit(nn.Module):
    """Leaves as soon as it is sure."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(D, 4) for _ in range(4))

    def forward(self, x, y):
        total = 0.0
        for depth, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            x = x + torch.tanh(block(x))
            out = head(x)
            total = total + F.cross_entropy(out, y) / (depth + 1)
            if out.softmax(-1).amax(-1).mean() > 0.45:
                break
        return total


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
class WarmUpByCounter(Mlp):
    """A weight that grows with the number of calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.warmup = 0, 4

    def forward(self, x, y):
        h = self.features(x)
        self.calls += self.training
        weight = min(1.0, self.calls / self.warmup)
        return F.cross_entropy(self.b(h), y) + weight * h.pow(2).mean()


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
class StraightThrough(Mlp):
    """A quantiser, a hard Gumbel-like choice and a commitment loss, all by detach."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.linspace(-1, 1, 40).reshape(5, 8).sin())
        self.register_buffer("usage", torch.zeros(5))

    def forward(self, x, y):
        h = self.features(x)
        chosen = torch.cdist(h, self.codes).argmin(-1)
        if self.training:
            self.usage.mul_(0.9).add_(torch.bincount(chosen, minlength=5).to(self.usage), alpha=0.1)
        code = self.codes[chosen]
        q = h + (code - h).detach()
        soft = self.b(q).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 4).to(soft)
        st = hard - soft.detach() + soft
        target = F.one_hot(y, 4).to(soft)
        return (
            ((st - target) ** 2).mean()
            + (h.detach() - code).square().mean()
            + 0.25 * (h - code.detach()).square().mean()
        )


@program
class WhereWithoutNan(Mlp):
    """The double where, logs of zero, and nan_to_num."""

    def forward(self, x, y):
        h = self.features(x)
        positive = h > 0
        safe = torch.where(positive, h, torch.ones_like(h))
        logs = torch.where(positive, safe.log(), torch.zeros_like(h))
        roots = torch.where(h < 0, (-torch.where(h < 0, h, h.new_tensor(-1.0))).sqrt(), 0.0)
        ratio = (h / (h - h.detach())).nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
        out = self.b(logs + roots) + ratio.detach().mean()
        return F.cross_entropy(torch.where(out.isnan(), torch.zeros_like(out), out), y)


@program
class RaggedLists(Mlp):
    """Sequences of several lengths, padded by hand."""

    lengths = (3, 1, 2)

    def forward(self, x, y):
        pieces = list(torch.split(self.features(x), self.lengths))
        padded = torch.stack([F.pad(p, (0, 0, 0, max(self.lengths) - len(p))) for p in pieces])
        mask = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]
        scores = padded.sum(-1).masked_fill(~mask, -math.inf).softmax(-1)
        pooled = torch.einsum("bl,bld->bd", scores, padded)
        sizes = defaultdict(list)
        for i, p in enumerate(pieces):
            sizes[len(p)].append(pooled[i] / len(p))
        return F.cross_entropy(self.b(torch.stack([v for k in sorted(sizes) for v in sizes[k]])), y[:3])


@program
class SlicesInPlace(Mlp):
    def forward(self, x, y):
        h = self.features(x)
        out = torch.zeros(len(x), 12)
        out[:, :8] = h
        out[:, 8:] += h[:, ::2]
        out[1::2, 2:6].mul_(0.5)
        out[0] = out[1:].mean(0)
        out.select(1, 3).copy_(h[:, 0].exp())
        half = out[:, :8].clone()
        half[torch.arange(len(x)), y] -= 1.0
        half[half < -0.9] = 0.1
        return F.cross_entropy(self.b(half + out[:, 4:]), y)


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
class FixedPoint(Mlp):
    """Iterates without gradient until it is near, then once with it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.iterations = 0

    def forward(self, x, y):
        u = self.a(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(30):
                new = torch.tanh(0.3 * self.inner(z) + u)
                if (new - z).abs().max() < 1e-6:
                    break
                z = new
        z = torch.tanh(0.3 * self.inner(z) + u)
        return F.cross_entropy(self.b(z), y)


@program
class ContrastiveQueue(Mlp):
    """A queue of keys with a pointer, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 12 * 4).reshape(12, 4).cos())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        q = F.normalize(self.b(self.features(x)), dim=-1)
        with torch.no_grad():
            k = F.normalize(self.b(self.features(x.roll(1, 0))), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach().T], 1) / 0.2
        if self.training:
            at = int(self.pointer)
            self.queue[at : at + len(k)] = k
            self.pointer[0] = (at + len(k)) % 12
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@program
class UncertaintyWeights(nn.Module):
    """Several losses in a dict, weighted by learnt variances; one is skipped where its labels are missing."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(D, 8)
        self.heads = nn.ModuleDict({"cls": nn.Linear(8, 4), "reg": nn.Linear(8, 1), "aux": nn.Linear(8, 2)})
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def losses(self, h, y):
        yield "cls", F.cross_entropy(self.heads["cls"](h), y)
        yield "reg", F.smooth_l1_loss(self.heads["reg"](h).squeeze(-1), y.to(h))
        valid = y < 2
        if valid.any():
            yield "aux", F.cross_entropy(self.heads["aux"](h)[valid], y[valid])

    def forward(self, x, y):
        h = F.softplus(self.body(x))
        total = x.new_zeros(())
        for name, loss in self.losses(h, y):
            s = self.log_var[name]
            total += torch.exp(-s) * loss + s
        return total


@program
class SelfConsistency(Mlp):
    """Functional calls with changed weights: one step of inner learning (MAML)."""

    def forward(self, x, y):
        weights = {"weight": self.b.weight, "bias": self.b.bias}
        h = self.features(x)
        inner = F.cross_entropy(torch.func.functional_call(self.b, weights, (h[:3],)), y[:3])
        grads = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        fast = {k: w - 0.4 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.b, fast, (h[3:],)), y[3:])


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


class Tagged(torch.Tensor):
    """A class of tensors of one's own."""


@program
class OwnClassOfTensors(Mlp):
    def forward(self, x, y):
        h = self.features(x).as_subclass(Tagged) * 2
        return F.cross_entropy(self.b(h.as_subclass(torch.Tensor)), y)


@program
class Crf(nn.Module):
    """Forward algorithm, and a best path by back pointers."""

    def __init__(self):
        super().__init__()
        self.scores, self.moves = nn.Linear(D, 4), nn.Parameter(torch.eye(4) * 0.1)

    def best_path(self, scores):
        total, back = scores[0], []
        for row in scores[1:]:
            best = (total[:, None] + self.moves).max(0)
            total = best.values + row
            back.append(best.indices)
        path = [total.argmax()]
        for pointers in reversed(back):
            path.append(pointers[path[-1]])
        return torch.stack(path[::-1])

    def forward(self, x, y):
        scores = self.scores(x)
        alpha = scores[0]
        for i in range(1, len(x)):
            alpha = torch.logsumexp(alpha[:, None] + self.moves, 0) + scores[i]
        gold = scores[torch.arange(len(x)), y].sum() + self.moves[y[:-1], y[1:]].sum()
        hits = (self.best_path(scores.detach()) == y).double().mean()
        return torch.logsumexp(alpha, 0) - gold + 0.01 * hits


@program
class LossSpikes(Mlp):
    """A moving average of the loss in Python decides what a spike is."""

    def __init__(self):
        super().__init__()
        self.average, self.spikes = None, 0

    def forward(self, x, y):
        loss = F.cross_entropy(self.b(self.features(x)), y)
        value = loss.item()
        if self.average is not None and value > 1.01 * self.average:
            loss = loss * 0.5
            self.spikes += 1
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        return loss


@program
class PrototypesByLabel(Mlp):
    """A loop over the labels that there are."""

    def forward(self, x, y):
        h = self.features(x)
        centres = torch.stack([h[y == label].mean(0) for label in y.unique()])
        target = torch.stack([(y.unique() == label).nonzero()[0, 0] for label in y])
        pairs = [(i, j) for i in range(len(y)) for j in range(i) if y[i] == y[j]]
        return F.cross_entropy(-torch.cdist(h, centres), target) + sum((h[i] - h[j]).norm() for i, j in pairs)


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


# -- beside torch


def batch(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(6, D, generator=g, dtype=torch.float64), torch.randint(0, 4, (6,), generator=g)


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def state(model):
    return {
        **{n: p.detach() for n, p in model.named_parameters()},
        **{n: b for n, b in model.named_buffers() if b is not None},
    }


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-11), (name, (a[name] - b[name]).abs().max())


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_forward_is_that_of_torch(name, training):
    plain, twin = made(name).train(training), made(name).train(training)
    fast = mycel.jit(twin)
    for i in range(4):
        expected, loss = plain(*batch(i)), fast(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
        same(state(twin), state(plain))


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch(name):
    plain, twin = made(name), made(name)
    value_and_grad = mycel.value_and_grad(lambda *args: twin(*args), wrt=twin)
    for i in range(2):
        plain.zero_grad()
        expected = plain(*batch(i))
        expected.backward()
        loss, grads = value_and_grad(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
        for n, p in plain.named_parameters():
            if p.requires_grad:
                wanted = torch.zeros_like(p) if p.grad is None else p.grad
                assert torch.allclose(grads[n], wanted, rtol=1e-8, atol=1e-10), n


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch(name):
    plain, twin = made(name), made(name)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    step = mycel.train_step(twin, torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01))
    for i in range(3):
        optimizer.zero_grad()
        expected = plain(*batch(i))
        expected.backward()
        optimizer.step()
        loss = step(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
    same(state(twin), state(plain))


def test_modules_that_change_places_in_forward_are_refused_and_stay():
    class Swapping(Mlp):
        def __init__(self):
            super().__init__()
            self.c = nn.Linear(8, 4)

        def forward(self, x, y):
            loss = F.cross_entropy(self.b(self.features(x)), y)
            self.b, self.c = self.c, self.b
            return loss

    model = Swapping()
    b, c = model.b, model.c
    with pytest.raises(mycel.CaptureError, match="puts another module in the place of b, c") as refused:
        mycel.jit(model)(*batch(0))
    assert refused.value.hint and model.b is b and model.c is c
