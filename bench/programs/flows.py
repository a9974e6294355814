"""Flows, neural ODEs and equilibria: losses as their papers' code has them."""

from __future__ import annotations

import math

import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))
        self.loc = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        q, _ = torch.linalg.qr(torch.randn(4, 4))
        self.weight = nn.Parameter(q)
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x):
        b, _, h, w = x.shape
        if self.initialized.item() == 0:
            with torch.no_grad():
                flat = x.permute(1, 0, 2, 3).contiguous().view(x.shape[1], -1)
                self.loc.data.copy_(-flat.mean(1).view(1, -1, 1, 1))
                self.scale.data.copy_(1 / (flat.std(1).view(1, -1, 1, 1) + 1e-6))
            self.initialized.fill_(1)
        logdet = h * w * torch.sum(torch.log(torch.abs(self.scale)))
        x = self.scale * (x + self.loc)
        logdet = logdet + h * w * torch.slogdet(self.weight.double())[1].to(x.dtype)
        x = F.conv2d(x, self.weight.unsqueeze(2).unsqueeze(3))
        a, bb = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        bb = (bb + t) * s
        logdet = logdet + torch.sum(torch.log(s).view(b, -1), 1)
        z = torch.cat([a, bb], 1)
        lp = (-0.5 * math.log(2 * math.pi) - 0.5 * z**2).sum((1, 2, 3))
        return -(lp + logdet).mean()


@program
def glow_actnorm():
    return Glow(), (torch.randn(2, 4, 4, 4),)


class MaskedLinear(nn.Linear):
    def __init__(self, i, o, mask):
        super().__init__(i, o)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.mask * self.weight, self.bias)


class MAF(nn.Module):
    def __init__(self, d=4, h=12):
        super().__init__()
        m0, m1 = torch.arange(d), torch.arange(h) % (d - 1)
        self.l1 = MaskedLinear(d, h, (m1[:, None] >= m0[None]).float())
        self.l2 = MaskedLinear(h, 2 * d, (m0.repeat(2)[:, None] > m1[None]).float())
        self.bn_gamma = nn.Parameter(torch.zeros(d))
        self.register_buffer("rm", torch.zeros(d))
        self.register_buffer("rv", torch.ones(d))
        self.d = d

    def inverse(self, u):
        x = torch.zeros_like(u)
        for i in range(self.d):
            m, loga = self.l2(torch.tanh(self.l1(x))).chunk(2, 1)
            x = x.clone()
            x[:, i] = u[:, i] * torch.exp(loga.clamp(max=10.0)[:, i]) + m[:, i]
        return x

    def forward(self, x):
        m, a = self.l2(torch.tanh(self.l1(x))).chunk(2, 1)
        u = (x - m) * torch.exp(-a)
        if self.training:
            bm, bv = u.mean(0), (u - u.mean(0)).pow(2).mean(0) + 1e-5
            self.rm.mul_(0.9)
            self.rv.mul_(0.9)
            self.rm.add_(bm.data * 0.1)
            self.rv.add_(bv.data * 0.1)
        else:
            bm, bv = self.rm, self.rv
        xh = (u - bm) / bv.sqrt()
        y = torch.exp(self.bn_gamma) * xh
        nll = 0.5 * y.pow(2).sum(1) + a.sum(1) - (self.bn_gamma - 0.5 * torch.log(bv)).sum()
        return nll.mean() + (self.inverse(x.detach()) ** 2).mean()


@program
def maf_inverse_inplace():
    return MAF(), (torch.randn(6, 4),)


class RQS(nn.Module):
    """neural spline flow: rational quadratic with searchsorted"""

    def __init__(self, K=4):
        super().__init__()
        self.K = K
        self.net = nn.Linear(2, 2 * (3 * K + 1))

    def forward(self, x):
        a, b = x[:, :2], x[:, 2:]
        b = torch.sigmoid(b)
        p = self.net(a).view(-1, 2, 3 * self.K + 1)
        W, H, D = p.split([self.K, self.K, self.K + 1], -1)
        widths = 1e-3 + (1 - 1e-3 * self.K) * F.softmax(W, -1)
        cumw = F.pad(torch.cumsum(widths, -1), pad=(1, 0), mode="constant", value=0.0)
        cumw[..., -1] = 1.0
        widths = cumw[..., 1:] - cumw[..., :-1]
        heights = 1e-3 + (1 - 1e-3 * self.K) * F.softmax(H, -1)
        cumh = F.pad(torch.cumsum(heights, -1), pad=(1, 0))
        cumh[..., -1] = 1.0
        heights = cumh[..., 1:] - cumh[..., :-1]
        deriv = 1e-3 + F.softplus(D)
        loc = cumw.clone()
        loc[..., -1] += 1e-6
        bin = (torch.sum(b[..., None] >= loc, dim=-1) - 1)[..., None]
        g = lambda t: t.gather(-1, bin)[..., 0]
        cw, w, ch, h = g(cumw), g(widths), g(cumh), g(heights)
        delta = g(heights / widths) if False else h / w
        d0, d1 = g(deriv), deriv[..., 1:].gather(-1, bin)[..., 0]
        th = (b - cw) / w
        t1 = th * (1 - th)
        num = h * (delta * th.pow(2) + d0 * t1)
        den = delta + (d0 + d1 - 2 * delta) * t1
        out = ch + num / den
        dn = delta.pow(2) * (d1 * th.pow(2) + 2 * delta * t1 + d0 * (1 - th).pow(2))
        return -(torch.log(dn) - 2 * torch.log(den)).mean() + out.square().mean()


@program
def neural_spline_flow():
    return RQS(), (torch.randn(6, 4),)


class CNF(nn.Module):
    """hutchinson trace with rk4 loop"""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))

    def f(self, t, z, e):
        with torch.enable_grad():
            z = z.requires_grad_(True) if z.is_leaf else z
            t = torch.ones(z.shape[0], 1, dtype=z.dtype) * t
            dz = self.net(torch.cat([z, t], 1))
            e_dzdx = torch.autograd.grad(dz, z, e, create_graph=True)[0]
        return dz, -(e_dzdx * e).sum(1)

    def forward(self, z, e):
        lp = torch.zeros(z.shape[0], dtype=z.dtype)
        n = 3
        dt = 1 / n
        z = z.clone()
        for i in range(n):
            t = i * dt
            k1, l1 = self.f(t, z, e)
            k2, l2 = self.f(t + dt / 2, z + dt / 2 * k1, e)
            k3, l3 = self.f(t + dt / 2, z + dt / 2 * k2, e)
            k4, l4 = self.f(t + dt, z + dt * k3, e)
            z = z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            lp = lp + dt / 6 * (l1 + 2 * l2 + 2 * l3 + l4)
        return (0.5 * z.square().sum(1) + lp).mean()


@program
def cnf_hutchinson():
    return CNF(), (torch.randn(4, 3), torch.randn(4, 3))


class NODE(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.method = method

    def forward(self, x):
        from torchdiffeq import odeint

        t = torch.linspace(0, 1, 4, dtype=x.dtype)
        y = odeint(lambda t, y: self.f(y) * torch.cos(t), x, t, method=self.method, rtol=1e-4, atol=1e-5)
        return y[-1].square().mean() + y.abs().mean()


@program
def node_adaptive():
    return NODE("dopri5"), (torch.randn(4, 3),)


@program
def node_euler():
    return NODE("euler"), (torch.randn(4, 3),)


@program
def node_adams():
    return NODE("implicit_adams"), (torch.randn(4, 3),)


class NODEAdjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = ODEF()

    def forward(self, x):
        from torchdiffeq import odeint_adjoint

        y = odeint_adjoint(
            self.f, x, torch.tensor([0.0, 1.0], dtype=x.dtype), method="rk4", options={"step_size": 0.25}
        )
        return y[-1].square().mean()


class ODEF(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return torch.tanh(self.l(y))


@program
def node_adjoint():
    return NODEAdjoint(), (torch.randn(4, 3),)


class DEQ(nn.Module):
    """from the NeurIPS tutorial: anderson + backward hook"""

    def __init__(self, solver="forward"):
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.inp = nn.Linear(3, 5)
        self.head = nn.Linear(5, 1)
        self.solver = solver
        with torch.no_grad():
            self.lin.weight.mul_(0.3)

    def f(self, z, x):
        return torch.tanh(self.lin(z) + x)

    @staticmethod
    def forward_iteration(f, x0, max_iter=50, tol=1e-7):
        f0 = f(x0)
        res = []
        for k in range(max_iter):
            x = f0
            f0 = f(x)
            res.append((f0 - x).norm().item() / (1e-5 + f0.norm().item()))
            if res[-1] < tol:
                break
        return f0, res

    @staticmethod
    def anderson(f, x0, m=3, lam=1e-4, max_iter=50, tol=1e-7, beta=1.0):
        bsz, d = x0.shape
        X = torch.zeros(bsz, m, d, dtype=x0.dtype, device=x0.device)
        Fs = torch.zeros(bsz, m, d, dtype=x0.dtype)
        X[:, 0], Fs[:, 0] = x0.reshape(bsz, -1), f(x0).reshape(bsz, -1)
        X[:, 1], Fs[:, 1] = Fs[:, 0], f(Fs[:, 0].reshape_as(x0)).reshape(bsz, -1)
        H = torch.zeros(bsz, m + 1, m + 1, dtype=x0.dtype)
        H[:, 0, 1:] = H[:, 1:, 0] = 1
        y = torch.zeros(bsz, m + 1, 1, dtype=x0.dtype)
        y[:, 0] = 1
        res = []
        for k in range(2, max_iter):
            n = min(k, m)
            G = Fs[:, :n] - X[:, :n]
            H[:, 1 : n + 1, 1 : n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n, dtype=x0.dtype)[None]
            alpha = torch.linalg.solve(H[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
            X[:, k % m] = beta * (alpha[:, None] @ Fs[:, :n])[:, 0] + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
            Fs[:, k % m] = f(X[:, k % m].reshape_as(x0)).reshape(bsz, -1)
            res.append((Fs[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Fs[:, k % m].norm().item()))
            if res[-1] < tol:
                break
        return X[:, k % m].view_as(x0), res

    def forward(self, x):
        x = self.inp(x)
        solve = getattr(self, self.solver if self.solver == "anderson" else "forward_iteration")
        with torch.no_grad():
            z, self.forward_res = solve(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad):
            g, self.backward_res = solve(lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad)
            return g

        if z.requires_grad:
            z.register_hook(backward_hook)
        return self.head(z).square().mean()


@program
def deq_forward():
    return DEQ(), (torch.randn(4, 3),)


@program
def deq_anderson():
    return DEQ("anderson"), (torch.randn(4, 3),)


class ImplicitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, w, x, iters):
        with torch.no_grad():
            for _ in range(iters):
                z = torch.tanh(z @ w + x)
        ctx.save_for_backward(z, w, x)
        ctx.iters = iters
        return z

    @staticmethod
    def backward(ctx, g):
        z, w, x = ctx.saved_tensors
        d = 1 - z**2
        v = g.clone()
        for _ in range(ctx.iters):
            v = g + (v * d) @ w.t()
        vd = v * d
        return None, z.t() @ vd, vd, None


class ImplicitLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5) * 0.1)
        self.i = nn.Linear(3, 5)

    def forward(self, x):
        x = self.i(x)
        return ImplicitFunction.apply(torch.zeros_like(x), self.w, x, 30).square().mean()


@program
def deq_custom_function():
    return ImplicitLayer(), (torch.randn(4, 3),)
