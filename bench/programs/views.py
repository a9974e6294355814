"""Losses between views of a batch, and weights that follow others."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn


class MeanTeacher(nn.Module):
    """A teacher that follows by EMA, its decay warmed up by the step count, with a consistency ramp."""

    def __init__(self, decay=0.99, ramp=4):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.decay, self.ramp = decay, ramp
        self.step = 0

    @torch.no_grad()
    def follow(self):
        decay = min(self.decay, 1 - 1 / (self.step + 1))
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.data.mul_(decay).add_(s.data, alpha=1 - decay)
        for (name, t), s in zip(self.teacher.named_buffers(), self.student.buffers()):
            if "num_batches" in name:
                t.copy_(s)
            else:
                t.lerp_(s, 1 - decay)

    def forward(self, x, y):
        if self.training:
            self.follow()
            self.step += 1
        out = self.student(x)
        with torch.no_grad():
            target = self.teacher(x + 0.05 * torch.sin(7 * x)).softmax(-1)
        labelled = y >= 0
        sup = F.cross_entropy(out[labelled], y[labelled]) if labelled.any() else out.sum() * 0
        weight = math.exp(-5 * (1 - min(self.step / self.ramp, 1.0)) ** 2)
        return sup + weight * F.mse_loss(out.softmax(-1), target)


@program
def mean_teacher_ramp():
    return MeanTeacher(), (torch.randn(8, 6), torch.tensor([0, 1, 2, -1, -1, 0, -1, 2]))


class NTXent(nn.Module):
    """SimCLR with a boolean mask of self-similarity and a DINO-like centre."""

    def __init__(self, t=0.5):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.register_buffer("centre", torch.zeros(1, 4))
        self.t = t

    def forward(self, a, b):
        z = F.normalize(torch.cat([self.enc(a), self.enc(b)]), dim=1)
        n = a.size(0)
        sim = z @ z.t() / self.t
        me = torch.eye(2 * n, dtype=torch.bool, device=z.device)
        logits = sim[~me].view(2 * n, -1)
        pos = torch.cat([sim.diag(n), sim.diag(-n)])
        loss = (-pos + torch.logsumexp(logits, 1)).mean()
        self.centre.mul_(0.9).add_(z.detach().mean(0, keepdim=True), alpha=0.1)
        return loss + (z - self.centre).pow(2).mean()


@program
def nt_xent_masked():
    return NTXent(), (torch.randn(5, 6), torch.randn(5, 6))


class SupCon(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(6, 4)

    def forward(self, x, y):
        z = F.normalize(self.enc(x), dim=-1)
        same = y[:, None].eq(y[None]).float()
        same.fill_diagonal_(0)
        logits = z @ z.T / 0.1
        logits = logits - logits.max(1, keepdim=True).values.detach()
        rest = 1 - torch.eye(len(x)).to(x)
        logp = logits - torch.log((logits.exp() * rest).sum(1, keepdim=True))
        counts = same.sum(1)
        has = counts > 0
        return -((same * logp).sum(1)[has] / counts[has]).mean()


@program
def supervised_contrast():
    return SupCon(), (torch.randn(7, 6), torch.tensor([0, 1, 0, 2, 1, 0, 3]))


class VICReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.proj = nn.Linear(8, 5, bias=False)
        self.coeffs = {"inv": 25.0, "var": 25.0, "cov": 1.0}

    @staticmethod
    def off_diagonal(m):
        n, k = m.shape
        assert n == k
        return m.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def forward(self, a, b):
        za, zb = map(lambda v: self.proj(self.body(v)), (a, b))
        parts = {"inv": F.mse_loss(za, zb), "var": 0.0, "cov": 0.0}
        for z in (za, zb):
            z = z - z.mean(0)
            std = torch.sqrt(z.var(0) + 1e-4)
            parts["var"] += F.relu(1 - std).mean() / 2
            cov = (z.T @ z) / (len(z) - 1)
            parts["cov"] += self.off_diagonal(cov).pow_(2).sum().div(z.shape[1])
        barlow = torch.einsum("ni,nj->ij", F.normalize(za, dim=0), F.normalize(zb, dim=0))
        on = torch.diagonal(barlow).add_(-1).pow_(2).sum()
        return sum(self.coeffs[k] * v for k, v in parts.items()) + on + 0.005 * self.off_diagonal(barlow).pow(2).sum()


@program
def vicreg_and_barlow():
    return VICReg(), (torch.randn(8, 6), torch.randn(8, 6))


class Mixup(nn.Module):
    """Mixup and cutmix by a coin, with a permutation of the batch (drawn from the step's own numbers)."""

    def __init__(self, alpha=0.4):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.alpha = alpha

    def mix(self, x, y):
        lam = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        perm = torch.randperm(x.size(0))
        if torch.rand(()) < 0.5:
            side = int(x.size(-1) * math.sqrt(1 - 0.75))
            cx = torch.randint(0, x.size(-1) - side, (1,))
            cols = torch.arange(x.size(-1))
            inside = (cols >= cx) & (cols < cx + side)
            box = inside[:, None] & inside[None]
            x = torch.where(box, x[perm], x)
            lam = 1 - box.to(x.dtype).mean()
        else:
            x = lam * x + (1 - lam) * x[perm]
        return x, y, y[perm], lam

    def forward(self, x, y):
        ya, yb, lam = y, y, 1.0
        if self.training:
            x, ya, yb, lam = self.mix(x, y)
        out = self.head(F.relu(self.conv(x)).mean((2, 3)))
        return lam * F.cross_entropy(out, ya) + (1 - lam) * F.cross_entropy(out, yb)


@program
def mixup_or_cutmix():
    return Mixup(), (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 4, 2]))


class Lookahead(nn.Module):
    """Stochastic weight averaging inside the model: an average of every second step's weights, used in eval."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.avg = nn.ParameterDict(
            {
                k.replace(".", "_"): nn.Parameter(v.detach().clone(), requires_grad=False)
                for k, v in self.net.named_parameters()
            }
        )

    def forward(self, x):
        if self.training:
            self.seen += 1
            if self.seen % 2 == 0:
                for k, p in self.net.named_parameters():
                    slot = self.avg[k.replace(".", "_")]
                    slot.data.add_((p.data - slot.data) / (self.n_averaged + 1))
                self.n_averaged += 1
            return self.net(x).square().mean()
        return F.linear(x, self.avg["weight"], self.avg["bias"]).square().mean()


@program
def averaged_weights():
    return Lookahead(), (torch.randn(4, 6),)
