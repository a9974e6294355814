"""Densities and dynamics: energies, scores, flows, stochastic equations, filters, physics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn
from torch.distributions import LowRankMultivariateNormal, MixtureSameFamily, MultivariateNormal, Normal

P2 = torch.randn(6, 2, generator=torch.Generator().manual_seed(21))


def mlp(a, b, c, act=nn.Tanh):
    return nn.Sequential(nn.Linear(a, b), act(), nn.Linear(b, c))


class JEM(nn.Module):
    """Contrastive divergence with Langevin steps of given noise, from a buffer that is refilled."""

    def __init__(self):
        super().__init__()
        self.f = mlp(2, 8, 3, nn.SiLU)
        self.register_buffer("replay", torch.zeros(6, 2))

    def energy(self, x):
        return -self.f(x).logsumexp(1)

    def forward(self, x, y, noise):
        neg = self.replay.clone().requires_grad_(True)
        for n in noise:
            (g,) = torch.autograd.grad(self.energy(neg).sum(), neg)
            neg = (neg - 0.1 * g.clamp(-0.5, 0.5) + 0.05 * n).detach().requires_grad_(True)
        neg = neg.detach()
        self.replay.copy_(neg)
        cd = self.energy(x).mean() - self.energy(neg).mean()
        reg = (self.energy(x) ** 2 + self.energy(neg) ** 2).mean()
        return cd + 0.1 * reg + F.cross_entropy(self.f(x), y)


@program
def joint_energy_model():
    return JEM(), (P2, torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(3, 6, 2))


class SlicedScore(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = mlp(2, 8, 1, nn.Softplus)

    def forward(self, x, v):
        x = x.detach().clone().requires_grad_()
        logp = -self.e(x).sum()
        s = torch.autograd.grad(logp, x, create_graph=True)[0]
        gv = torch.autograd.grad((s * v).sum(), x, create_graph=True)[0]
        return ((gv * v).sum(-1) + 0.5 * s.pow(2).sum(-1)).mean()


@program
def sliced_score_matching():
    return SlicedScore(), (P2, torch.randn(6, 2))


class RBM(nn.Module):
    """Persistent contrastive divergence by mean field; free energies in closed form."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 6) * 0.1)
        self.v, self.h = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(4))

    def free_energy(self, x):
        return -(x @ self.v) - F.softplus(F.linear(x, self.W, self.h)).sum(1)

    def gibbs(self, x, k):
        for _ in range(k):
            h = torch.sigmoid(F.linear(x, self.W, self.h))
            x = torch.sigmoid(F.linear(h, self.W.t(), self.v))
        return x

    def forward(self, x):
        with torch.no_grad():
            xk = self.gibbs(x, 3).round()
        return self.free_energy(x).mean() - self.free_energy(xk).mean()


@program
def restricted_boltzmann():
    return RBM(), ((torch.randn(5, 6) > 0).double(),)


class Residual(nn.Module):
    """Invertible residual blocks: spectral scaling by power iteration, log-determinants by a truncated series."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 2)]) for _ in range(2))
        for i in range(2):
            self.register_buffer(f"u{i}", F.normalize(torch.randn(8), dim=0))

    def lipschitz(self, w, u):
        with torch.no_grad():
            v = F.normalize(w.t() @ u, dim=0)
            u.copy_(F.normalize(w @ v, dim=0))
        return 0.9 / torch.clamp(u.clone() @ (w @ v), min=0.9)

    def forward(self, x, v):
        logdet = x.new_zeros(len(x))
        for i, (a, b) in enumerate(self.blocks):
            x = x.requires_grad_() if not x.requires_grad else x
            g = F.linear(
                torch.tanh(F.linear(x, a.weight * self.lipschitz(a.weight, getattr(self, f"u{i}")), a.bias)),
                b.weight * 0.5,
            )
            w = v
            for k in range(1, 4):
                (w,) = torch.autograd.grad(g, x, w, create_graph=True)
                logdet = logdet + (-1) ** (k + 1) * (w * v).sum(-1) / k
            x = x + g
        return -(Normal(0, 1).log_prob(x).sum(-1) + logdet).mean()


@program
def invertible_residual():
    return Residual(), (P2, torch.randn(6, 2))


class Autoregressive(nn.Module):
    """Discretised mixtures of logistics, as PixelCNN++ has them."""

    def __init__(self, k=3):
        super().__init__()
        self.conv = nn.Conv2d(1, 3 * k, 3, padding=2)
        self.k = k

    def forward(self, x):
        out = self.conv(x)[:, :, : x.shape[2], : x.shape[3]]
        logit, mean, ls = out.chunk(3, 1)
        ls = ls.clamp(min=-7.0)
        c = x - mean
        inv = torch.exp(-ls)
        plus, minus = inv * (c + 1 / 255), inv * (c - 1 / 255)
        cdf = torch.sigmoid(plus) - torch.sigmoid(minus)
        mid = inv * c
        pdf = mid - ls - 2 * F.softplus(mid)
        inner = torch.where(cdf > 1e-5, torch.log(cdf.clamp(min=1e-12)), pdf - math.log(127.5))
        lp = torch.where(x < -0.999, plus - F.softplus(plus), torch.where(x > 0.999, -F.softplus(minus), inner))
        return -torch.logsumexp(lp + F.log_softmax(logit, 1), 1).mean()


@program
def mixture_of_logistics():
    return Autoregressive(), ((torch.rand(2, 1, 6, 6) * 2 - 1).round(decimals=2),)


class SDE(nn.Module):
    """Euler-Maruyama with a girsanov term; the state is a dataclass that goes from step to step."""

    @dataclass
    class State:
        x: torch.Tensor
        kl: torch.Tensor
        path: list

    def __init__(self):
        super().__init__()
        self.drift, self.prior = mlp(3, 8, 2), mlp(2, 8, 2)
        self.log_sigma = nn.Parameter(torch.full((2,), -1.0))

    def step(self, s, t, dt, dw):
        sigma = self.log_sigma.exp()
        f = self.drift(torch.cat([s.x, s.x.new_full((len(s.x), 1), t)], 1))
        u = (f - self.prior(s.x)) / sigma
        x = s.x + f * dt + sigma * math.sqrt(dt) * dw
        return SDE.State(x, s.kl + 0.5 * u.pow(2).sum(1) * dt, [*s.path, x])

    def forward(self, x0, noise, obs):
        s = SDE.State(x0, x0.new_zeros(len(x0)), [])
        for i, dw in enumerate(noise):
            s = self.step(s, i * 0.1, 0.1, dw)
        ll = Normal(torch.stack(s.path), 0.5).log_prob(obs).sum((0, 2))
        return (s.kl - ll).mean()


@program
def latent_sde():
    return SDE(), (P2, torch.randn(5, 6, 2), torch.randn(5, 6, 2))


class EKF(nn.Module):
    """Extended Kalman filter: the Jacobian of learnt dynamics at each step, Joseph's form of the covariance."""

    def __init__(self):
        super().__init__()
        self.f = mlp(2, 6, 2)
        self.h = nn.Linear(2, 1)
        self.log_q, self.log_r = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))

    def forward(self, ys):
        m, P, nll = ys.new_zeros(2), torch.eye(2).to(ys), 0.0
        eye = torch.eye(2).to(ys)
        for y in ys:
            A = torch.autograd.functional.jacobian(lambda z: z + 0.1 * self.f(z), m, create_graph=True)
            m = m + 0.1 * self.f(m)
            P = A @ P @ A.T + torch.diag(self.log_q.exp())
            H = self.h.weight
            S = H @ P @ H.T + torch.diag(self.log_r.exp())
            K = torch.linalg.solve(S, H @ P).T
            r = y - self.h(m)
            nll = nll + 0.5 * (r @ torch.linalg.inv(S) @ r + torch.logdet(S))
            m = m + K @ r
            ikh = eye - K @ H
            P = ikh @ P @ ikh.T + K @ torch.diag(self.log_r.exp()) @ K.T
        return nll / len(ys)


@program
def extended_kalman():
    return EKF(), (torch.randn(5, 1),)


class Particle(nn.Module):
    """A particle filter with soft resampling by sorted uniforms, resampled only where weights degenerate."""

    def __init__(self):
        super().__init__()
        self.move, self.see = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, parts, ys, us):
        logw = torch.full((len(parts),), -math.log(len(parts))).to(parts)
        total = 0.0
        for y, u in zip(ys, us, strict=True):
            parts = parts + torch.tanh(self.move(parts)) * 0.1
            lw = logw + Normal(self.see(parts)[:, 0], 1.0).log_prob(y)
            z = lw.logsumexp(0)
            total, logw = total - z, lw - z
            ess = 1 / (2 * logw).exp().sum()
            if ess < 0.7 * len(parts):
                cdf = logw.exp().cumsum(0).detach()
                idx = torch.searchsorted(cdf, u.sort()[0]).clamp(max=len(parts) - 1)
                parts = parts[idx]
                logw = logw[idx] - logw[idx].detach() - math.log(len(parts))
        return total / len(ys)


@program
def particle_filter():
    return Particle(), (torch.randn(8, 2), torch.randn(4), torch.rand(4, 8))


class HMM(nn.Module):
    """Forward algorithm in log space with a neural emission; posteriors by autograd of the partition."""

    def __init__(self):
        super().__init__()
        self.start, self.trans = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 3))
        self.emit = mlp(2, 6, 3)

    def forward(self, x):
        T = self.trans.log_softmax(1)
        e = self.emit(x)
        e = e if e.requires_grad else e.requires_grad_()
        a = self.start.log_softmax(0) + e[0]
        for t in range(1, len(x)):
            a = torch.logsumexp(a[:, None] + T, 0) + e[t]
        logz = a.logsumexp(0)
        (post,) = torch.autograd.grad(logz, e, create_graph=True)
        return -logz / len(x) - 0.1 * (post * (post + 1e-9).log()).sum(1).mean()


@program
def hidden_markov():
    return HMM(), (P2,)


class GMVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 4 + 6), nn.Linear(2, 4)
        self.means, self.chol = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.zeros(3, 2, 2))
        self.mix = nn.Parameter(torch.zeros(3))

    def forward(self, x, eps):
        h = self.enc(x)
        mu, d, v = h[:, :2], F.softplus(h[:, 2:4]) + 1e-3, h[:, 4:10].view(-1, 2, 3)[..., :1]
        q = LowRankMultivariateNormal(mu, v, d)
        z = mu + d.sqrt() * eps[:, :2] + (v @ eps[:, 2:3, None]).squeeze(-1)
        L = torch.tril(self.chol, -1) + torch.diag_embed(self.chol.diagonal(dim1=-2, dim2=-1).exp())
        p = MixtureSameFamily(
            torch.distributions.Categorical(logits=self.mix), MultivariateNormal(self.means, scale_tril=L)
        )
        return (q.log_prob(z) - p.log_prob(z)).mean() + (self.dec(z) - x).pow(2).sum(1).mean()


@program
def mixture_prior_vae():
    return GMVAE(), (torch.randn(5, 4), torch.randn(5, 3))


class Symplectic(nn.Module):
    """Rays through learnt spheres: intersections, visibility, soft shading, alpha from front to back."""

    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.tensor([[0.0, 0, 3], [0.5, 0.2, 4], [-0.6, -0.1, 5]]))
        self.r, self.col = nn.Parameter(torch.full((3,), 0.8)), nn.Parameter(torch.rand(3, 3))

    def forward(self, dirs, image):
        d = F.normalize(dirs, dim=-1)
        b = (d[:, None] * self.c).sum(-1)
        disc = b**2 - (self.c**2).sum(-1) + self.r**2
        hit = disc > 0
        t = b - torch.where(hit, disc, torch.ones_like(disc)).sqrt()
        t = torch.where(hit, t, torch.full_like(t, 1e3))
        order = t.argsort(1)
        alpha = torch.sigmoid(disc * 10).gather(1, order)
        trans = torch.cat([torch.ones_like(alpha[:, :1]), (1 - alpha + 1e-6).cumprod(1)[:, :-1]], 1)
        rgb = ((alpha * trans)[..., None] * torch.sigmoid(self.col)[order]).sum(1)
        loss = F.mse_loss(rgb, image)
        if hit.any():
            normal = F.normalize(d[:, None] * t[..., None] - self.c, dim=-1)[hit]
            loss = loss + 0.01 * normal[:, 2].clamp(min=0).mean()
        return loss


@program
def soft_spheres():
    y, x = torch.meshgrid(torch.linspace(-0.4, 0.4, 4), torch.linspace(-0.4, 0.4, 4), indexing="ij")
    return Symplectic(), (torch.stack([x, y, torch.ones_like(x)], -1).view(-1, 3), torch.rand(16, 3))


class Gaussians(nn.Module):
    """2-D Gaussian splatting: covariances from scale and rotation, sorted by depth, early stop when opaque."""

    def __init__(self, n=5):
        super().__init__()
        self.xy, self.scale, self.angle = (
            nn.Parameter(torch.randn(n, 2)),
            nn.Parameter(torch.zeros(n, 2)),
            nn.Parameter(torch.randn(n)),
        )
        self.depth, self.op, self.rgb = (
            nn.Parameter(torch.rand(n)),
            nn.Parameter(torch.zeros(n)),
            nn.Parameter(torch.rand(n, 3)),
        )

    def forward(self, grid, image):
        c, s = self.angle.cos(), self.angle.sin()
        R = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
        M = R * self.scale.exp()[:, None]
        prec = torch.linalg.inv(M @ M.mT + 1e-3 * torch.eye(2).to(M))
        T, out = torch.ones_like(grid[:, 0]), torch.zeros_like(image)
        for i in self.depth.argsort():
            d = grid - self.xy[i]
            a = self.op[i].sigmoid() * torch.exp(-0.5 * ((d @ prec[i]) * d).sum(-1))
            out = out + (T * a)[:, None] * self.rgb[i].sigmoid()
            T = T * (1 - a)
            if T.max() < 1e-3:
                break
        return F.l1_loss(out, image)


@program
def gaussian_splats():
    g = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij"), -1).view(-1, 2)
    return Gaussians(), (g, torch.rand(16, 3))
