"""Solvers and loops that stop by what they find, and what hooks, logs and containers do on the way."""

from __future__ import annotations

import collections
import math

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn


class LineSearch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        energy = lambda z: (self.net(z).tanh() * z).sum() + z.square().sum()
        z = x
        trace = []
        for _ in range(3):
            g = torch.func.grad(energy)(z)
            step = 1.0
            e0 = energy(z)
            tries = []
            while step > 0.01:
                new = z - step * g
                e = energy(new)
                tries.append(e)
                if e < e0 - 0.1 * step * g.square().sum():
                    break
                step = step * 0.5
            z = new
            trace.append(tries[-1])
        return torch.stack(trace).mean() + z.square().mean()


@program
def line_search():
    return (LineSearch(), (torch.randn(2, 4),))


class EarlyLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.halt = nn.Linear(6, 1)
        self.out = nn.Linear(6, 3)

    def forward(self, x, y):
        states = []
        halts = []
        for l in self.layers:
            x = x + torch.tanh(l(x))
            states.append(x)
            p = self.halt(x).sigmoid().mean()
            halts.append(p)
            if sum(halts) > 1.6:
                break
        w = torch.stack(halts)
        w = w / w.sum()
        h = (torch.stack(states) * w[:, None, None]).sum(0)
        return F.cross_entropy(self.out(h), y) + 0.01 * len(states) + 0.1 * halts[-1]


@program
def halting_layers():
    return (EarlyLayers(), (torch.randn(4, 6), torch.tensor([0, 1, 2, 1])))


class Deque(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        window = collections.deque(maxlen=3)
        out = 0.0
        for t in range(x.size(1)):
            window.append(self.l(x[:, t]))
            out = out + torch.stack(list(window)).mean(0).square().mean()
        d = collections.defaultdict(list)
        for i, w in enumerate(window):
            d[i % 2].append(w)
        c = collections.Counter(type(m).__name__ for m in self.modules())
        return out + sum(torch.cat(v).mean() for v in d.values()) * c["Linear"]


@program
def deques_and_counters():
    return (Deque(), (torch.randn(2, 5, 4),))


class Rejection(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        kept = [r for r in x if float(r.sum()) > 0]
        losses = []
        for r in kept:
            l = (r * self.w).sum()
            if l.abs() < 0.05:
                continue
            losses.append(l.square())
        if len(losses) == 0:
            return self.w.sum() * 0
        worst = max(losses)
        best = min(losses)
        return sum(losses) / len(losses) + 0.1 * (worst - best)


@program
def filtered_losses():
    return (Rejection(), (torch.randn(6, 4),))


class Newton(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0, 3.0, 5.0]))

    def forward(self, x):
        z = x.clone()
        residuals = []
        for it in range(30):
            r = z**3 - self.a.abs() * z - 1
            residuals.append(r.abs().max().item())
            if residuals[-1] < 1e-10:
                break
            if it > 0 and residuals[-1] > 2 * residuals[-2]:
                z = z * 0.5
                continue
            z = z - r / (3 * z**2 - self.a.abs() + 0.001)
        self.iterations = len(residuals)
        return (z * x).sum() + 0 * sum(residuals)


@program
def newton_iterations():
    return (Newton(), (torch.tensor([3.0, 3.0, 3.0]),))


class CG(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(5, 5)

    def forward(self, b):
        a = self.m.weight @ self.m.weight.T + torch.eye(5, dtype=b.dtype)
        x = torch.zeros_like(b)
        r = b - x @ a
        p = r.clone()
        rs = (r * r).sum()
        for i in range(25):
            ap = p @ a
            al = rs / (p * ap).sum()
            x = x + al * p
            r = r - al * ap
            new = (r * r).sum()
            if new.sqrt() < 1e-08:
                break
            p = r + new / rs * p
            rs = new
        return (x * b).sum()


@program
def conjugate_gradients():
    return (CG(), (torch.randn(5),))


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = nn.Linear(4, 4)
        self.join = nn.Linear(8, 4)
        self.gate = nn.Linear(4, 1)

    def build(self, xs, depth=0):
        if len(xs) == 1:
            return self.leaf(xs[0])
        mid = len(xs) // 2
        a, b = (self.build(xs[:mid], depth + 1), self.build(xs[mid:], depth + 1))
        j = torch.tanh(self.join(torch.cat([a, b], -1)))
        return j if self.gate(j).mean() > 0 else a + b

    def forward(self, x):
        return self.build(list(x.unbind(1))).square().mean()


@program
def gated_tree():
    return (Tree(), (torch.randn(3, 5, 4),))


class Metrics(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
        self.history = {"loss": 0.0, "best": float("inf"), "n": 0}

    def forward(self, x, y):
        out = self.l(x)
        loss = F.cross_entropy(out, y)
        v = loss.item()
        self.history["loss"] += v
        self.history["n"] += 1
        self.history["best"] = min(self.history["best"], v)
        acc = (out.argmax(-1) == y).float().mean().item()
        return {
            "loss": loss,
            "acc": acc,
            "avg": self.history["loss"] / self.history["n"],
            "logs": [v, acc, math.exp(min(v, 20))],
        }


@program
def running_metrics():
    return (Metrics(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x, k):
        return torch.zeros_like(x).scatter(-1, x.topk(k, -1).indices, 1.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.softmax(-1)
        return (s * (g - (g * s).sum(-1, keepdim=True)) * ctx.k, None)


class SparseRoute(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(4, 5)
        self.e = nn.Parameter(torch.randn(5, 4, 4) * 0.3)

    def forward(self, x):
        m = Straight.apply(self.r(x), 2)
        y = torch.einsum("nd,edf,ne->nf", x, self.e, m)
        load = m.mean(0)
        return y.square().mean() + 0.1 * (load * load.log().nan_to_num(neginf=0.0)).sum()


@program
def setup_context_route():
    return (SparseRoute(), (torch.randn(6, 4),))


class GradScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)
        self.seen = {}
        self.a.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))
        self.b.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        self.a.register_forward_hook(lambda m, args, out: out + args[0])

    def forward(self, x):
        h = self.a(x * 1.5)
        h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return self.b(h).logsumexp(-1).mean()


@program
def hooks_of_all_kinds():
    return (GradScale(), (torch.randn(3, 4),))


class Accum(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv1d(3, 4, 3, padding=1)
        self.p = nn.Parameter(torch.zeros(1, 4, 1))

    def forward(self, x, lens):
        h = self.c(x) + self.p
        out = []
        for seq, n in zip(h, lens):
            out.append(seq[:, :n].mean(-1))
        pooled = torch.stack(out)
        packed = torch.cat([seq[:, : int(n)] for seq, n in zip(h, lens.tolist())], 1)
        return pooled.square().mean() + packed.std()


@program
def ragged_pooling():
    return (Accum(), (torch.randn(3, 3, 6), torch.tensor([6, 4, 2])))


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 3)

    def forward(self, x):
        q, p = (x, torch.zeros_like(x))
        energies = []
        for i in range(20):
            p = p - 0.1 * (self.f(q) + q)
            q = q + 0.1 * p
            e = 0.5 * (p * p).sum() + 0.5 * (q * q).sum()
            energies.append(e)
            if torch.isnan(e) or e > 100:
                raise RuntimeError("diverged")
        drift = torch.stack(energies)
        return drift.std() + q.square().mean()


@program
def leapfrog_guarded():
    return (Momentum(), (torch.randn(2, 3),))
