"""Weights that are made, moved or kept beside others: adapters, quantisers, teachers, hypernetworks, inner loops."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from programs.entry import SEQ, X, program
from torch import nn


class LowRank(nn.Module):
    """Adapters by name on a frozen layer, switched by a context manager, merged in eval."""

    def __init__(self, base, r=2):
        super().__init__()
        self.base, self.r, self.active = base.requires_grad_(False), r, ["a"]
        self.down = nn.ModuleDict({n: nn.Linear(base.in_features, r, bias=False) for n in "ab"})
        self.up = nn.ModuleDict({n: nn.Linear(r, base.out_features, bias=False) for n in "ab"})

    @contextlib.contextmanager
    def using(self, *names):
        before, self.active = self.active, list(names)
        try:
            yield self
        finally:
            self.active = before

    def forward(self, x):
        if not self.training:
            w = self.base.weight + sum(self.up[n].weight @ self.down[n].weight for n in self.active) * 0.5
            return F.linear(x, w, self.base.bias)
        return self.base(x) + sum(self.up[n](self.down[n](x)) for n in self.active) * 0.5


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = LowRank(nn.Linear(6, 6))

    def forward(self, x):
        with self.l.using("a", "b"):
            both = self.l(x)
        return (both - self.l(x).detach()).pow(2).mean() + self.l(x).pow(2).mean()


@program
def adapters_by_context():
    return Adapters(), (X,)


class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, lo, hi):
        q = (x / scale).round()
        ctx.save_for_backward(x, scale)
        ctx.lo, ctx.hi = lo, hi
        return q.clamp(lo, hi) * scale

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        q = x / s
        inside = (q >= ctx.lo) & (q <= ctx.hi)
        ds = torch.where(inside, q.round() - q, q.clamp(ctx.lo, ctx.hi))
        return g * inside, (g * ds).sum().reshape(s.shape), None, None


class LSQ(nn.Module):
    """Learnt step sizes, set up from the first batch."""

    def __init__(self, bits=4):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.ws, self.xs = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(1.0))
        self.q, self.ready = 2 ** (bits - 1), False

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.xs.fill_(2 * x.abs().mean() / math.sqrt(self.q))
            self.ready = True
        w = FakeQuant.apply(self.fc.weight, self.ws, -self.q, self.q - 1)
        return F.linear(FakeQuant.apply(x, self.xs, -self.q, self.q - 1), w, self.fc.bias).pow(2).mean()


@program
def learnt_step_quantisation():
    return LSQ(), (X,)


class Ring(nn.Module):
    """A queue of keys with labels, an EMA teacher of its own, updated in a method that torch.no_grad decorates."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(8, 4), dim=1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def refresh(self, k):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1
        start = int(self.at)
        self.queue[start : start + len(k)] = k
        self.at[0] = (start + len(k)) % len(self.queue)

    def forward(self, x):
        q = F.normalize(self.student(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.teacher(x.roll(1, 1)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
        if self.training:
            self.refresh(k)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@program
def ring_of_keys():
    return Ring(), (X,)


class Hyper(nn.Module):
    """Weights of a main network from an embedding of the task, chunk by chunk, called through functional_call."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
        self.main.requires_grad_(False)
        self.task, self.chunk = nn.Embedding(3, 5), nn.Parameter(torch.randn(5, 5) * 0.1)
        self.gen = nn.Linear(10, 8)
        self.shapes = {n: p.shape for n, p in self.main.named_parameters()}

    def forward(self, x, task):
        z = self.task(task)
        flat = torch.cat([self.gen(torch.cat([z, c])) for c in self.chunk])
        weights, at = {}, 0
        for n, s in self.shapes.items():
            weights[n] = flat[at : at + s.numel()].view(s)
            at += s.numel()
        return torch.func.functional_call(self.main, weights, (x,)).pow(2).mean()


@program
def weights_from_a_task():
    return Hyper(), (X, torch.tensor(1))


class Reptile(nn.Module):
    """Inner SGD over a dict of fast weights, one dict comprehension a step, first order and second."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 6) * 0.3), nn.Parameter(torch.zeros(8))
        self.w2, self.lr = (
            nn.Parameter(torch.randn(1, 8) * 0.3),
            nn.ParameterDict({k: nn.Parameter(torch.tensor(0.1)) for k in ("w1", "b1", "w2")}),
        )

    def net(self, fast, x):
        return F.linear(torch.tanh(F.linear(x, fast["w1"], fast["b1"])), fast["w2"])

    def forward(self, x):
        fast = {k: getattr(self, k) for k in ("w1", "b1", "w2")}
        for _ in range(2):
            grads = torch.autograd.grad(
                self.net(fast, x[:2]).pow(2).mean(), list(fast.values()), create_graph=self.training
            )
            fast = {k: v - self.lr[k] * g for (k, v), g in zip(fast.items(), grads, strict=True)}
        return (self.net(fast, x[2:]) - 1).pow(2).mean()


@program
def learnt_inner_rates():
    return Reptile(), (X,)


class Spectral(nn.Module):
    """Complex weights, an FFT filter, phases and magnitudes; a unitary by Cayley's transform."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 2) * 0.3)
        self.a = nn.Parameter(torch.randn(4, 4) * 0.3)
        self.mag = nn.Linear(5, 1)

    def forward(self, x):
        f = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.w)
        y = torch.fft.irfft(f, n=x.shape[-1])
        skew = self.a - self.a.T + 1j * (self.a + self.a.T)
        eye = torch.eye(4).to(skew)
        u = torch.linalg.solve(eye + skew, eye - skew)
        z = (u @ torch.complex(x[..., :4], x[..., 4:]).unsqueeze(-1)).squeeze(-1)
        return y.pow(2).mean() + z.abs().mean() + 0.1 * torch.angle(f).cos().mean() + self.mag(f.abs()).mean()


@program
def phases_and_unitaries():
    return Spectral(), (SEQ,)


class Swapped(nn.Module):
    """Weights swapped for an average in eval and back, kept in plain dicts; the average starts after two calls."""

    def __init__(self):
        super().__init__()
        self.net, self.average, self.seen = nn.Linear(6, 3), {}, 0

    def forward(self, x):
        own = dict(self.net.named_parameters())
        if self.training:
            self.seen += 1
            if self.seen > 1:
                with torch.no_grad():
                    for name, p in own.items():
                        old = self.average.get(name)
                        self.average[name] = p.detach().clone() if old is None else old + (p.detach() - old) / self.seen
            return self.net(x).pow(2).mean()
        weights = {**own, **self.average}
        return F.linear(x, weights["weight"], weights["bias"]).pow(2).mean()


@program
def averaged_in_a_dict():
    return Swapped(), (X,)
