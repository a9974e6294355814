"""Gradients inside a loss: inner loops, attacks, perturbed weights, surgery, functions with gradients of their own."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class MAML(nn.Module):
    def __init__(self, first_order=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
        self.lr = nn.Parameter(torch.tensor(0.1))
        self.fo = first_order

    def forward(self, xs, ys, xq, yq):
        total = 0.0
        for i in range(xs.shape[0]):
            params = OrderedDict(self.net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(self.net, params, (xs[i],)), ys[i])
                grads = torch.autograd.grad(loss, params.values(), create_graph=not self.fo)
                params = OrderedDict((n, p - self.lr * g) for (n, p), g in zip(params.items(), grads))
            total = total + F.mse_loss(torch.func.functional_call(self.net, params, xq[i]), yq[i])
        return total / xs.shape[0]


@program
def maml_functional_call():
    return MAML(), (torch.randn(2, 3, 2), torch.randn(2, 3, 1), torch.randn(2, 3, 2), torch.randn(2, 3, 1))


@program
def fomaml():
    return MAML(True), (torch.randn(2, 3, 2), torch.randn(2, 3, 1), torch.randn(2, 3, 2), torch.randn(2, 3, 1))


class RevBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g, *params):
        with torch.no_grad():
            x1, x2 = x.chunk(2, -1)
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.f, ctx.g = f, g
        y = torch.cat([y1, y2], -1)
        ctx.save_for_backward(y.detach(), *params)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, *params = ctx.saved_tensors
        y1, y2 = y.chunk(2, -1)
        d1, d2 = dy.chunk(2, -1)
        with torch.enable_grad():
            y1_ = y1.detach().requires_grad_()
            gy = ctx.g(y1_)
        gp = [p for p in ctx.g.parameters()]
        fp = [p for p in ctx.f.parameters()]
        grads = torch.autograd.grad(gy, [y1_] + gp, d2)
        x2 = y2 - gy.detach()
        d1 = d1 + grads[0]
        gg = grads[1:]
        with torch.enable_grad():
            x2_ = x2.detach().requires_grad_()
            fx = ctx.f(x2_)
        grads = torch.autograd.grad(fx, [x2_] + fp, d1)
        return (torch.cat([d1, d2 + grads[0]], -1), None, None, *grads[1:], *gg)


class RevNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.g = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        for f, g in zip(self.f, self.g):
            x = RevBlock.apply(x, f, g, *f.parameters(), *g.parameters())
        return x.square().mean()


@program
def reversible_function():
    return RevNet(), (torch.randn(4, 6),)


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.alpha, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 5)
        self.c = nn.Linear(5, 3)
        self.d = nn.Linear(5, 2)
        self.it = 0

    def forward(self, xs, ys, xt):
        p = self.it / 10.0
        alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
        self.it += 1
        fs, ft = F.relu(self.f(xs)), F.relu(self.f(xt))
        dom = self.d(GradReverse.apply(torch.cat([fs, ft]), alpha))
        return F.cross_entropy(self.c(fs), ys) + F.cross_entropy(
            dom, torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))]).long()
        )


@program
def dann_schedule():
    return DANN(), (torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.randn(3, 4))


class Sam(nn.Module):
    """sharpness aware: gradient ascent inside the loss"""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.rho = 0.05

    def forward(self, x, y):
        params = dict(self.net.named_parameters())
        loss = F.cross_entropy(self.net(x), y)
        g = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        norm = torch.sqrt(sum((t**2).sum() for t in g)) + 1e-12
        adv = {k: p + self.rho * t / norm for (k, p), t in zip(params.items(), g)}
        return F.cross_entropy(torch.func.functional_call(self.net, adv, (x,)), y)


@program
def sam_perturbation():
    return Sam(), (torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))


class VAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x, d0):
        with torch.no_grad():
            pred = F.softmax(self.net(x), 1)
        d = F.normalize(d0, dim=1)
        for _ in range(2):
            d.requires_grad_()
            adv = F.kl_div(F.log_softmax(self.net(x + 10.0 * d), 1), pred, reduction="batchmean")
            adv.backward() if False else None
            d = F.normalize(torch.autograd.grad(adv, d)[0], dim=1).detach()
        return F.kl_div(F.log_softmax(self.net(x + d), 1), pred, reduction="batchmean")


@program
def vat():
    return VAT(), (torch.randn(5, 4), torch.randn(5, 4))


class PGD(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x, y):
        was = self.training
        self.eval()
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            loss = F.cross_entropy(self.net(x + delta), y)
            (g,) = torch.autograd.grad(loss, delta)
            delta = (delta + 0.1 * g.sign()).clamp(-0.3, 0.3).detach().requires_grad_()
        self.train(was)
        return F.cross_entropy(self.net(x + delta), y)


@program
def pgd_eval_inside():
    return PGD(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))


class HessianFree(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, v):
        loss = self.net(x).square().mean()
        ps = list(self.net.parameters())
        g = torch.autograd.grad(loss, ps, create_graph=True)
        flat = torch.cat([t.reshape(-1) for t in g])
        hv = torch.autograd.grad((flat * v[: len(flat)]).sum(), ps, create_graph=True)
        return loss + 0.1 * sum((h**2).sum() for h in hv)


@program
def hvp_penalty():
    return HessianFree(), (torch.randn(4, 3), torch.randn(30))


class Surgery(nn.Module):
    """PCGrad on a shared trunk: conflicting gradients are projected, the loss gets them by a detached product."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x, y):
        h = torch.tanh(self.trunk(x))
        losses = [F.mse_loss(head(h).squeeze(-1), y[:, i]) for i, head in enumerate(self.heads)]
        grads = [torch.autograd.grad(l, h, retain_graph=True)[0].detach().flatten() for l in losses]
        fixed = []
        for i, g in enumerate(grads):
            g = g.clone()
            for j, other in enumerate(grads):
                if i != j and (dot := torch.dot(g, other)) < 0:
                    g -= dot / other.norm() ** 2 * other
            fixed.append(g)
        merged = torch.stack(fixed).sum(0).view_as(h)
        return (
            sum(losses).detach()
            + (h * merged).sum()
            - (h * merged).sum().detach()
            + sum(F.mse_loss(head(h.detach()).squeeze(-1), y[:, i]) for i, head in enumerate(self.heads))
        )


@program
def gradient_surgery():
    return Surgery(), (torch.randn(6, 6), torch.randn(6, 3))


class SAM(nn.Module):
    """Sharpness-aware: the loss at the point a gradient step up, the same parameters through functional_call."""

    def __init__(self, rho=0.05):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.rho = rho

    def forward(self, x, y):
        params = dict(self.net.named_parameters())
        loss = F.cross_entropy(self.net(x), y)
        if not self.training:
            return loss
        grads = torch.autograd.grad(loss, list(params.values()))
        norm = torch.stack([g.norm() for g in grads]).norm().clamp_min(1e-12)
        up = {k: p + self.rho * g / norm for (k, p), g in zip(params.items(), grads)}
        return F.cross_entropy(torch.func.functional_call(self.net, up, (x,)), y)


@program
def sharpness_aware():
    return SAM(), (torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
