"""Training code that leans on Python: states in records and caches, exceptions, generators, wrappers."""

from __future__ import annotations

import functools
import math
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from programs.entry import IDS, SEQ, X, program
from torch import nn


class Phase(Enum):
    WARM = "warm"
    MAIN = "main"


@dataclass
class Schedule:
    step: int = 0
    phase: Phase = Phase.WARM
    history: list = field(default_factory=list)

    def advance(self, value):
        self.step += 1
        self.history.append(round(value, 3))
        if self.step >= 2:
            self.phase = Phase.MAIN


class Phased(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.plan = nn.Linear(6, 3), nn.Linear(6, 3), Schedule()

    def forward(self, x):
        loss = self.a(x).pow(2).mean()
        if self.plan.phase is Phase.MAIN:
            loss = loss + self.b(x).abs().mean()
        self.plan.advance(1.0 / (self.plan.step + 1))
        return loss


@program
def phases_in_a_dataclass():
    return Phased(), (X,)


class Carry(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor
    step: int = 0

    @property
    def mean(self):
        return (self.h + self.c).mean()


class Recur(nn.Module):
    """Zoneout with a NamedTuple state that `_replace` changes, and truncated backpropagation."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 5)
        self.state = None

    def forward(self, xs):
        s = self.state or Carry(*(xs.new_zeros(xs.shape[0], 5) for _ in range(2)))
        loss = 0.0
        for t, x in enumerate(xs.unbind(1)):
            h, c = self.cell(x, (s.h, s.c))
            s = s._replace(h=0.9 * h + 0.1 * s.h, c=c, step=s.step + 1)
            if (t + 1) % 2 == 0:
                s = Carry(s.h.detach(), s.c.detach(), s.step)
            loss = loss + s.mean**2 + h.pow(2).mean()
        self.state = Carry(s.h.detach(), s.c.detach(), 0)
        return loss


@program
def carried_state():
    return Recur(), (SEQ,)


class Caches(nn.Module):
    """Masks in a class-level dict by size, positions under functools.lru_cache, a weak dictionary by module."""

    masks: ClassVar[dict] = {}
    seen = weakref.WeakKeyDictionary()

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    @classmethod
    def mask(cls, n):
        if n not in cls.masks:
            cls.masks[n] = torch.full((n, n), float("-inf")).triu(1)
        return cls.masks[n]

    @staticmethod
    @functools.cache
    def positions(n, d):
        freq = torch.exp(-math.log(100) * torch.arange(0, d, 2) / d)
        angle = torch.arange(n)[:, None] * freq
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)

    def forward(self, x):
        Caches.seen[self] = Caches.seen.get(self, 0) + 1
        n, d = x.shape[1:]
        q, k, v = self.qkv(x + self.positions(n, d).to(x)).chunk(3, -1)
        return ((q @ k.mT / d**0.5 + self.mask(n).to(x)).softmax(-1) @ v).pow(2).mean()


@program
def caches_of_a_class():
    return Caches(), (SEQ,)


class Fallback(nn.Module):
    """Cholesky with growing jitter in try and except, an else and a finally, errors of one's own."""

    class NotPositive(RuntimeError):
        pass

    def __init__(self):
        super().__init__()
        self.f, self.tries = nn.Linear(6, 3), 0

    def factor(self, k):
        for i in range(4):
            try:
                if i == 0 and k.shape[0] > 100:
                    raise Fallback.NotPositive("large")
                chol = torch.linalg.cholesky(k + 10.0 ** (i - 6) * torch.eye(len(k)).to(k))
            except (Fallback.NotPositive, torch.linalg.LinAlgError):
                continue
            else:
                return chol
            finally:
                self.tries += 1
        raise Fallback.NotPositive("no jitter helps")

    def forward(self, x):
        z = self.f(x)
        try:
            bad = z.view(5, 7)
        except RuntimeError:
            bad = z
        L = self.factor(z @ z.t() + 0.1 * torch.eye(len(z)).to(z))
        a = torch.cholesky_solve(bad, L)
        return (bad * a).sum() + 2 * L.diagonal().log().sum()


@program
def jitter_in_try():
    return Fallback(), (X,)


class Streaming(nn.Module):
    """Batches by a generator method, windows by another, reduced with a running generator expression."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 4)

    def windows(self, x, size=2):
        for i in range(x.shape[1] - size + 1):
            yield i, x[:, i : i + size]

    def features(self, x):
        yield from (self.l(w).mean(1) for _, w in self.windows(x))

    def forward(self, x):
        first, *rest = self.features(x)
        total = functools.reduce(torch.maximum, rest, first)
        gen = (f.pow(2).mean() for f in self.features(x))
        return total.mean() + next(gen) + sum(gen) * 0.1


@program
def windows_by_generators():
    return Streaming(), (SEQ,)


class Loss(ABC):
    registry: ClassVar[dict] = {}

    def __init_subclass__(cls, name, **kw):
        super().__init_subclass__(**kw)
        Loss.registry[name] = cls

    @abstractmethod
    def __call__(self, y, t): ...

    def __mul__(self, k):
        return Scaled(self, k)

    __rmul__ = __mul__

    def __add__(self, other):
        return Sum(self, other)


class Scaled(Loss, name="scaled"):
    def __init__(self, inner, k):
        self.inner, self.k = inner, k

    def __call__(self, y, t):
        return self.k * self.inner(y, t)


class Sum(Loss, name="sum"):
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, y, t):
        return sum(p(y, t) for p in self.parts)


class Charbonnier(Loss, name="charbonnier"):
    def __call__(self, y, t):
        return torch.sqrt((y - t) ** 2 + 1e-6).mean()


class Wing(Loss, name="wing"):
    def __call__(self, y, t, w=1.0, eps=0.5):
        d = (y - t).abs()
        return torch.where(d < w, w * torch.log1p(d / eps), d - (w - w * math.log1p(w / eps))).mean()


class Composed(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.loss = 0.5 * Loss.registry["charbonnier"]() + Loss.registry["wing"]() * 2

    def forward(self, x):
        return self.loss(self.l(x), x)


@program
def losses_with_operators():
    return Composed(), (X,)


class Views:
    """An attribute view over one flat parameter, by descriptors."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, obj, owner=None):
        if obj is None:
            return self
        start, shape = obj.layout[self.name]
        return obj.flat[start : start + math.prod(shape)].view(shape)


class Flat(nn.Module):
    w, b = Views(), Views()

    def __init__(self):
        super().__init__()
        self.layout = {"w": (0, (4, 6)), "b": (24, (4,))}
        self.flat = nn.Parameter(torch.randn(28) * 0.3)

    def forward(self, x):
        return F.gelu(F.linear(x, self.w, self.b)).pow(2).mean()


@program
def flat_parameter_views():
    return Flat(), (X,)


def rearrange(x, pattern, **sizes):
    """Einops in a few lines: names on both sides, groups in parentheses."""
    left, right = (p.replace("(", " ( ").replace(")", " ) ").split() for p in pattern.split("->"))

    def groups(tokens):
        out, inner = [], None
        for t in tokens:
            if t == "(":
                inner = []
            elif t == ")":
                out.append(inner)
                inner = None
            elif inner is not None:
                inner.append(t)
            else:
                out.append([t])
        return out

    known = dict(sizes)
    for g, n in zip(groups(left), x.shape, strict=True):
        unknown = [t for t in g if t not in known]
        assert len(unknown) <= 1
        for t in unknown:
            known[t] = n // math.prod(known[u] for u in g if u != t)
    names = [t for g in groups(left) for t in g]
    x = x.reshape([known[t] for t in names]).permute([names.index(t) for g in groups(right) for t in g])
    return x.reshape([math.prod(known[t] for t in g) for g in groups(right)])


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, img):
        w = rearrange(img, "b c (h i) (w j) -> (b h w) (i j) c", i=4, j=4)
        q, k, v = self.qkv(w).chunk(3, -1)
        y = (q @ k.mT).softmax(-1) @ v
        y = rearrange(y, "(b h w) (i j) c -> b c (h i) (w j)", b=img.shape[0], h=2, i=4)
        return (y - img).pow(2).mean()


@program
def small_einops():
    return Windows(), (torch.randn(2, 4, 8, 8),)


@dataclass(frozen=True)
class Config:
    width: int = 6
    layers: int = 3
    tie: bool = True

    def wider(self):
        return replace(self, width=self.width * 2)


class FromConfig(nn.Module):
    """A frozen config, layers from a factory of closures, tied every other one, gates by the walrus."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.layers = nn.ModuleList()
        for i in range(cfg.layers):
            self.layers.append(self.layers[0] if cfg.tie and i == 2 else nn.Linear(cfg.width, cfg.width))
        self.acts = [lambda x, k=k: x * torch.sigmoid(k * x) for k in (1.0, 1.7, 2.0)]

    def forward(self, x):
        norms = {}
        for i, (layer, act) in enumerate(zip(self.layers, self.acts, strict=True)):
            if (gain := layer(x).pow(2).mean()) is not None and i:
                norms[f"layer.{i}"] = gain
            x = x + act(layer(x))
        return x.pow(2).mean() + sum(norms.values()) / max(len(norms), 1)


@program
def frozen_config():
    return FromConfig(Config()), (X,)


class Bags(nn.Module):
    """A vocabulary in a dict of strings, words as Python lists of the batch's ids, counts in a Counter-like dict."""

    def __init__(self):
        super().__init__()
        self.vocab = {f"w{i}": i for i in range(20)}
        self.inverse = {v: k for k, v in self.vocab.items()}
        self.emb, self.out = nn.EmbeddingBag(20, 6, mode="sum"), nn.Linear(6, 20)

    def forward(self, ids):
        words = [[self.inverse[i] for i in row] for row in ids.tolist()]
        flat, offsets, counts = [], [], {}
        for row in words:
            offsets.append(len(flat))
            for w in row:
                counts[w] = counts.get(w, 0) + 1
                flat.append(self.vocab[w])
        bag = self.emb(torch.tensor(flat), torch.tensor(offsets))
        weight = torch.tensor([1.0 / counts.get(self.inverse[i], 1) for i in range(20)]).to(bag)
        return F.cross_entropy(self.out(bag), ids[:, 0], weight=weight)


@program
def words_in_dicts():
    return Bags(), (IDS,)


class Proxy:
    """Wraps a module and adds to what it gives; everything else is the module's own."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)

    def __call__(self, *a, **k):
        self.calls += 1
        return self.inner(*a, **k) + 0.1 * self.inner.weight.mean()


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Linear(6, 3)
        object.__setattr__(self, "proxy", Proxy(self.real))

    def forward(self, x):
        out = self.proxy(x)
        assert self.proxy.out_features == 3
        return out.pow(2).mean() + 0.01 * self.proxy.calls


@program
def module_behind_a_proxy():
    return Wrapped(), (X,)


class Kept(nn.Tanh):
    """Keeps what it gave."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Logged(nn.Module):
    """Activations kept by a layer, losses in a list, a mean over the last three calls."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), Kept(), nn.Linear(6, 3))
        self.losses, self.recent = [], []

    def forward(self, x):
        y = self.net(x)
        loss = y.pow(2).mean() + 0.1 * self.net[1].last.abs().mean()
        self.losses.append(loss.item())
        self.recent = [*self.recent, loss.detach()][-3:]
        return loss + 0.01 * torch.stack(self.recent).mean()


@program
def logs_and_recent_values():
    return Logged(), (X,)
