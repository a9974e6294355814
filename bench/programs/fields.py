"""Points, rendering, physics and splines: gathers, searches, derivatives of networks."""

from __future__ import annotations

import itertools
import math

import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class PointNet2(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.m2 = nn.Linear(8, 3)

    def fps(self, xyz, n):
        B, N, _ = xyz.shape
        cent = torch.zeros(B, n, dtype=torch.long)
        dist = torch.ones(B, N, dtype=xyz.dtype) * 1e10
        far = torch.zeros(B, dtype=torch.long)
        bi = torch.arange(B)
        for i in range(n):
            cent[:, i] = far
            c = xyz[bi, far, :].view(B, 1, 3)
            d = torch.sum((xyz - c) ** 2, -1)
            mask = d < dist
            dist[mask] = d[mask]
            far = torch.max(dist, -1)[1]
        return cent

    def ball(self, r, k, xyz, new):
        B, N, _ = xyz.shape
        S = new.shape[1]
        g = torch.arange(N).view(1, 1, N).repeat([B, S, 1])
        sq = torch.cdist(new, xyz) ** 2
        g[sq > r**2] = N
        g = g.sort(dim=-1)[0][:, :, :k]
        first = g[:, :, 0].view(B, S, 1).repeat([1, 1, k])
        m = g == N
        g[m] = first[m]
        return g

    def idx(self, p, i):
        B = p.shape[0]
        v = [B] + [1] * (i.dim() - 1)
        r = [1] + list(i.shape[1:])
        return p[torch.arange(B).view(v).repeat(r), i, :]

    def forward(self, xyz, feat):
        new = self.idx(xyz, self.fps(xyz, 3))
        g = self.ball(1.5, 4, xyz, new)
        h = torch.cat([self.idx(xyz, g) - new.unsqueeze(2), self.idx(feat, g)], -1)
        return self.m2(self.m1(h).max(2)[0]).square().mean()


@program
def pointnet2():
    return PointNet2(), (torch.randn(2, 8, 3), torch.randn(2, 8, 3))


class PointLearned(PointNet2):
    """farthest points of learnt positions"""

    def __init__(self):
        super().__init__()
        self.off = nn.Linear(3, 3)

    def forward(self, xyz, feat):
        return super().forward(xyz + 0.1 * torch.tanh(self.off(feat)), feat)


@program
def pointnet2_learnt():
    return PointLearned(), (torch.randn(2, 8, 3), torch.randn(2, 8, 3))


class DGCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(6, 8, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=3, dim=-1)[1]
        B, C, N = x.shape
        idx = (idx + torch.arange(0, B).view(-1, 1, 1) * N).view(-1)
        xt = x.transpose(2, 1).contiguous()
        f = xt.view(B * N, -1)[idx, :].view(B, N, 3, C)
        xt = xt.view(B, N, 1, C).repeat(1, 1, 3, 1)
        f = torch.cat((f - xt, xt), 3).permute(0, 3, 1, 2).contiguous()
        return F.leaky_relu(self.bn(self.c(f)), 0.2).max(dim=-1, keepdim=False)[0].square().mean()


@program
def dgcnn_knn():
    return DGCNN(), (torch.randn(2, 3, 6),)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 + 12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.n_fine = 4

    def enc(self, x):
        return torch.cat([x] + [fn((2.0**i) * x) for i in range(2) for fn in (torch.sin, torch.cos)], -1)

    def render(self, raw, z, d):
        dists = z[..., 1:] - z[..., :-1]
        dists = torch.cat([dists, torch.tensor([1e10], dtype=z.dtype).expand(dists[..., :1].shape)], -1) * torch.norm(
            d[..., None, :], dim=-1
        )
        rgb = torch.sigmoid(raw[..., :3])
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        w = (
            alpha
            * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1), dtype=z.dtype), 1.0 - alpha + 1e-10], -1), -1)[
                :, :-1
            ]
        )
        return torch.sum(w[..., None] * rgb, -2), w

    def sample_pdf(self, bins, weights, n, det=True):
        weights = weights + 1e-5
        pdf = weights / torch.sum(weights, -1, keepdim=True)
        cdf = torch.cat([torch.zeros_like(pdf[..., :1]), torch.cumsum(pdf, -1)], -1)
        u = torch.linspace(0.0, 1.0, steps=n, dtype=bins.dtype).expand(list(cdf.shape[:-1]) + [n]).contiguous()
        inds = torch.searchsorted(cdf, u, right=True)
        below = torch.max(torch.zeros_like(inds - 1), inds - 1)
        above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds)
        g = torch.stack([below, above], -1)
        ms = [g.shape[0], g.shape[1], cdf.shape[-1]]
        cg = torch.gather(cdf.unsqueeze(1).expand(ms), 2, g)
        bg = torch.gather(bins.unsqueeze(1).expand(ms), 2, g)
        denom = cg[..., 1] - cg[..., 0]
        denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
        return bg[..., 0] + (u - cg[..., 0]) / denom * (bg[..., 1] - bg[..., 0])

    def forward(self, o, d, target):
        z = torch.linspace(0.5, 2, 5, dtype=o.dtype).expand(o.shape[0], 5)
        raw = self.net(self.enc(o[:, None] + d[:, None] * z[..., None]))
        rgb0, w = self.render(raw, z, d)
        zs = self.sample_pdf(0.5 * (z[..., 1:] + z[..., :-1]), w[..., 1:-1], self.n_fine).detach()
        z, _ = torch.sort(torch.cat([z, zs], -1), -1)
        rgb, _ = self.render(self.net(self.enc(o[:, None] + d[:, None] * z[..., None])), z, d)
        mse = F.mse_loss(rgb, target) + F.mse_loss(rgb0, target)
        return {"loss": mse, "psnr": -10.0 * torch.log(mse.detach()) / math.log(10.0)}


@program
def nerf_hierarchical():
    return NeRF(), (torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3))


class HashGrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.randn(16, 2) * 1e-1) for _ in range(2)])
        self.res = [4, 8]
        self.net = nn.Linear(4, 1)
        self.primes = [1, 2654435761]

    def forward(self, x):
        x = torch.sigmoid(x)
        out = []
        for tab, r in zip(self.tables, self.res):
            s = x * r
            f = torch.floor(s)
            w = s - f
            f = f.long()
            acc = 0
            for c in itertools.product([0, 1], repeat=2):
                c = torch.tensor(c)
                i = f + c
                hsh = (i[:, 0] * self.primes[0]) ^ (i[:, 1] * self.primes[1])
                hsh = hsh % 16
                acc = acc + tab[hsh] * torch.where(c.bool(), w, 1 - w).prod(-1, keepdim=True)
            out.append(acc)
        return self.net(torch.cat(out, -1)).square().mean()


@program
def instant_ngp_hash():
    return HashGrid(), (torch.randn(6, 2),)


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)])

    def net(self, x):
        x = torch.sin(5 * self.l[0](x))
        x = torch.sin(5 * self.l[1](x))
        return self.l[2](x)

    def forward(self, coords, gt):
        coords = coords.clone().detach().requires_grad_(True)
        y = self.net(coords)
        grad = torch.autograd.grad(y, [coords], grad_outputs=torch.ones_like(y), create_graph=True)[0]
        div = 0.0
        for i in range(grad.shape[-1]):
            div += torch.autograd.grad(grad[..., i], coords, torch.ones_like(grad[..., i]), create_graph=True)[0][
                ..., i : i + 1
            ]
        sdf = torch.where(gt != -1, y, torch.zeros_like(y))
        inter = torch.where(gt != -1, torch.zeros_like(y), torch.exp(-1e2 * torch.abs(y)))
        return (div**2).mean() * 1e-2 + torch.abs(sdf).mean() + inter.mean() + torch.abs(grad.norm(dim=-1) - 1).mean()


@program
def siren_laplacian():
    return Siren(), (torch.randn(6, 2), torch.where(torch.rand(6, 1) > 0.5, 0.5, -1.0))


class PINNBurgers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.lam = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, t):
        x = x.requires_grad_(True)
        t = t.requires_grad_(True)
        u = self.net(torch.cat([x, t], 1))
        g = lambda a, b: torch.autograd.grad(a, b, torch.ones_like(a), retain_graph=True, create_graph=True)[0]
        u_t, u_x = g(u, t), g(u, x)
        u_xx = g(u_x, x)
        return torch.mean((u_t + u * u_x - self.lam * u_xx) ** 2)


@program
def pinn_burgers():
    return PINNBurgers(), (torch.randn(5, 1), torch.rand(5, 1))


class HNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
        self.register_buffer("J", torch.eye(4)[torch.tensor([2, 3, 0, 1])] * torch.tensor([1.0, 1, -1, -1]))

    def forward(self, x, dx):
        dH = torch.func.vmap(torch.func.grad(lambda z: self.h(z).squeeze(-1)))(x)
        return F.mse_loss(dH @ self.J.t(), dx)


@program
def hamiltonian_func_grad():
    return HNN(), (torch.randn(5, 4), torch.randn(5, 4))


class LNN(nn.Module):
    """Lagrangian: hessian inverse"""

    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

    def L(self, q, v):
        return self.l(torch.cat([q, v])).squeeze() + 0.5 * (v * v).sum()

    def acc(self, q, v):
        gq = torch.func.grad(self.L, 0)(q, v)
        H = torch.func.hessian(self.L, 1)(q, v)
        J = torch.func.jacrev(torch.func.jacrev(self.L, 1), 0)(q, v)
        return torch.linalg.pinv(H) @ (gq - J @ v)

    def forward(self, q, v, a):
        return F.mse_loss(torch.func.vmap(self.acc)(q, v), a)


@program
def lagrangian_nn():
    return LNN(), (torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2))


class KAN(nn.Module):
    def __init__(self, i=3, o=2, G=4, k=3):
        super().__init__()
        self.i, self.o, self.G, self.k = i, o, G, k
        h = 2 / G
        grid = (torch.arange(-k, G + k + 1) * h - 1).expand(i, -1).contiguous()
        self.register_buffer("grid", grid)
        self.base = nn.Parameter(torch.randn(o, i))
        self.spline = nn.Parameter(torch.randn(o, i, G + k) * 0.1)
        self.scaler = nn.Parameter(torch.randn(o, i))

    def b_splines(self, x):
        assert x.dim() == 2 and x.size(1) == self.i
        g = self.grid
        x = x.unsqueeze(-1)
        b = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(x.dtype)
        for k in range(1, self.k + 1):
            b = ((x - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)]) * b[:, :, :-1]) + (
                (g[:, k + 1 :] - x) / (g[:, k + 1 :] - g[:, 1:(-k)]) * b[:, :, 1:]
            )
        assert b.size() == (x.size(0), self.i, self.G + self.k)
        return b.contiguous()

    def curve2coeff(self, x, y):
        A = self.b_splines(x).transpose(0, 1)
        B = y.transpose(0, 1)
        return torch.linalg.lstsq(A, B).solution.permute(2, 0, 1).contiguous()

    def forward(self, x):
        x = torch.tanh(x) * 0.99
        out = F.linear(F.silu(x), self.base) + F.linear(
            self.b_splines(x).view(x.size(0), -1), (self.spline * self.scaler.unsqueeze(-1)).view(self.o, -1)
        )
        l1 = self.spline.abs().mean(-1)
        p = l1 / l1.sum()
        return out.square().mean() + 1e-2 * (l1.sum() - torch.sum(p * p.log()))


@program
def kan_splines():
    return KAN(), (torch.randn(6, 3),)


class KANFit(KAN):
    def forward(self, x, y):
        x = torch.tanh(x) * 0.99
        coef = self.curve2coeff(x, (torch.einsum("bi,oi->bio", x, self.base)))
        return super().forward(x) + (coef - self.spline).square().mean()


@program
def kan_lstsq():
    return KANFit(), (torch.randn(12, 3), torch.randn(12, 3))


class LstsqHead(nn.Module):
    """meta-learning with a differentiable ridge / least squares head (R2D2)"""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 3)
        self.log_lam = nn.Parameter(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, xs, ys, xq, yq):
        Z, Q = self.f(xs), self.f(xq)
        W = torch.linalg.lstsq(Z, ys).solution
        R = Z.T @ torch.linalg.solve(Z @ Z.T + self.log_lam.exp() * torch.eye(len(Z), dtype=Z.dtype), ys)
        L = torch.linalg.cholesky(Z.T @ Z + 0.1 * torch.eye(3, dtype=Z.dtype))
        C = torch.cholesky_solve(Z.T @ ys, L)
        return (
            F.mse_loss(self.scale * Q @ W, yq)
            + F.mse_loss(Q @ R, yq)
            + F.mse_loss(Q @ C, yq)
            + torch.linalg.matrix_norm(Z, ord="nuc")
        )


@program
def lstsq_head():
    return LstsqHead(), (torch.randn(6, 4), torch.randn(6, 2), torch.randn(3, 4), torch.randn(3, 2))
