"""Layers people write by hand: scans, recurrences, splines, graphs, point sets, codebooks, flows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import Tensor, nn


class XLSTM(nn.Module):
    """sLSTM with exponential gates and a stabiliser, and an mLSTM in its parallel form."""

    def __init__(self, d=8):
        super().__init__()
        self.w, self.r = nn.Linear(d, 4 * d), nn.Parameter(0.1 * torch.randn(4, d, d))
        self.qkv, self.gates = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 2)

    def slstm(self, x):
        b, t, d = x.shape
        h = c = torch.zeros(b, d).to(x)
        n, m, out = torch.ones_like(h), torch.zeros_like(h), torch.empty_like(x)
        pre = self.w(x).unflatten(-1, (4, d))
        for i in range(t):
            zi, ii, fi, oi = (pre[:, i] + torch.einsum("bd,gde->bge", h, self.r)).unbind(1)
            logf = F.logsigmoid(fi)
            m_new = torch.maximum(logf + m, ii)
            f, inp = torch.exp(logf + m - m_new), torch.exp(ii - m_new)
            c, n, m = f * c + inp * torch.tanh(zi), f * n + inp, m_new
            h = torch.sigmoid(oi) * c / n
            out[:, i] = h
        return out

    def mlstm(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        i, f = self.gates(x).unbind(-1)
        logf = F.logsigmoid(f).cumsum(1)
        d = logf[:, :, None] - logf[:, None] + i[:, None]
        d = d.masked_fill(torch.ones(d.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        m = d.amax(-1, keepdim=True)
        s = (q @ k.mT / math.sqrt(q.size(-1))) * torch.exp(d - m)
        return s @ v / torch.maximum(s.sum(-1, keepdim=True).abs(), torch.exp(-m))

    def forward(self, x):
        return self.mlstm(x + self.slstm(x)).square().mean()


@program
def xlstm_both():
    return XLSTM(), (torch.randn(2, 5, 8),)


class RWKV(nn.Module):
    """RWKV-4 time mix with token shift, a state handed on, and channel mix."""

    def __init__(self, d=8):
        super().__init__()
        self.mix = nn.ParameterList(nn.Parameter(torch.rand(d)) for _ in range(3))
        self.k, self.v, self.r, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.decay, self.first = nn.Parameter(torch.linspace(-3, 1, d)), nn.Parameter(torch.zeros(d))

    def forward(self, x, state=None):
        prev = F.pad(x, (0, 0, 1, -1)) if state is None else torch.cat([state[0][:, None], x[:, :-1]], 1)
        k, v, r = (lin(x * m + prev * (1 - m)) for lin, m in zip((self.k, self.v, self.r), self.mix))
        num = den = torch.zeros_like(x[:, 0])
        top = torch.full_like(num, -1e38)
        ys = []
        w = -torch.exp(self.decay)
        for kt, vt in zip(k.unbind(1), v.unbind(1)):
            q = torch.maximum(top, self.first + kt)
            a, b = torch.exp(top - q), torch.exp(self.first + kt - q)
            ys.append((a * num + b * vt) / (a * den + b))
            q = torch.maximum(top + w, kt)
            a, b = torch.exp(top + w - q), torch.exp(kt - q)
            num, den, top = a * num + b * vt, a * den + b, q
        y = self.o(torch.sigmoid(r) * torch.stack(ys, 1))
        return (y[:, 1:] - x[:, :-1]).square().mean(), (x[:, -1], num, den, top)


@program
def rwkv_with_state():
    return RWKV(), (torch.randn(2, 5, 8),)


class S4(nn.Module):
    """A diagonal state space three ways: kernel by Vandermonde and FFT, and a recurrence, as one loss."""

    def __init__(self, d=4, n=4):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(d) * 2 - 4)
        self.log_a = nn.Parameter(torch.log(0.5 * torch.ones(d, n)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(n).float().repeat(d, 1))
        self.c = nn.Parameter(torch.randn(d, n, 2))

    def forward(self, u):
        dt, a = self.log_dt.exp(), torch.complex(-self.log_a.exp(), self.a_imag)
        c = torch.view_as_complex(self.c)
        dta = a * dt[:, None]
        length = u.size(-1)
        v = torch.exp(dta[..., None] * torch.arange(length))
        k = 2 * torch.einsum("dn,dnl->dl", c * (dta.exp() - 1) / a, v).real
        y = torch.fft.irfft(torch.fft.rfft(k, 2 * length) * torch.fft.rfft(u, 2 * length), 2 * length)[..., :length]
        state = torch.zeros(len(u), *a.shape, dtype=dta.dtype)
        outs = []
        for t in range(length):
            state = state * dta.exp() + u[:, :, t, None] * (dta.exp() - 1) / a
            outs.append(2 * (state * c).sum(-1).real)
        return (y - torch.stack(outs, -1)).abs().max() + F.gelu(y).mean()


@program
def s4_two_ways():
    return S4(), (torch.randn(2, 4, 6),)


class KAN(nn.Module):
    """B-spline edges with a grid that is refitted to the inputs' quantiles once."""

    def __init__(self, i=3, o=2, g=5, k=3):
        super().__init__()
        self.k = k
        grid = torch.arange(-k, g + k + 1) * (2 / g) - 1
        self.register_buffer("grid", grid.expand(i, -1).contiguous().float())
        self.coef = nn.Parameter(0.1 * torch.randn(o, i, g + k))
        self.base = nn.Parameter(torch.randn(o, i))
        self.updated = False

    def bases(self, x):
        x = x.unsqueeze(-1)
        b = ((x >= self.grid[:, :-1]) & (x < self.grid[:, 1:])).to(x.dtype)
        for p in range(1, self.k + 1):
            left = (x - self.grid[:, : -(p + 1)]) / (self.grid[:, p:-1] - self.grid[:, : -(p + 1)])
            right = (self.grid[:, p + 1 :] - x) / (self.grid[:, p + 1 :] - self.grid[:, 1:-p])
            b = left * b[..., :-1] + right * b[..., 1:]
        return b

    @torch.no_grad()
    def refit(self, x):
        inner = torch.quantile(x, torch.linspace(0, 1, self.grid.size(1) - 2 * self.k, dtype=x.dtype), dim=0).T
        step = (inner[:, -1:] - inner[:, :1]) / (inner.size(1) - 1)
        ext = torch.arange(1, self.k + 1).to(x)
        self.grid.copy_(torch.cat([inner[:, :1] - step * ext.flip(0), inner, inner[:, -1:] + step * ext], 1))
        self.updated = True

    def forward(self, x):
        if self.training and not self.updated:
            self.refit(x)
        y = F.linear(F.silu(x), self.base) + torch.einsum("nib,oib->no", self.bases(x), self.coef)
        return y.square().mean() + 1e-2 * self.coef.abs().mean()


@program
def kan_refitted_grid():
    return KAN(), (torch.randn(9, 3),)


class MPNN(nn.Module):
    """Messages with edge features, softmax per node by scatter, and a readout per graph."""

    def __init__(self, d=6):
        super().__init__()
        self.msg, self.att, self.upd, self.out = (
            nn.Linear(2 * d + 2, d),
            nn.Linear(d, 1),
            nn.GRUCell(d, d),
            nn.Linear(d, 1),
        )

    def forward(self, x, edges, feats, batch):
        src, dst = edges
        n = x.size(0)
        for _ in range(2):
            m = F.relu(self.msg(torch.cat([x[src], x[dst], feats], -1)))
            score = self.att(m).squeeze(-1)
            top = torch.full((n,), -math.inf).to(x).scatter_reduce(0, dst, score, "amax", include_self=False)
            e = (score - top[dst]).exp()
            norm = torch.zeros(n).to(x).scatter_add(0, dst, e)
            agg = torch.zeros_like(x).index_add(0, dst, m * (e / norm[dst])[:, None])
            x = self.upd(agg, x)
        graphs = int(batch.max()) + 1
        size = torch.bincount(batch, minlength=graphs).to(x)
        pooled = torch.zeros(graphs, x.size(1)).to(x).index_add_(0, batch, x) / size[:, None]
        return self.out(pooled).square().sum()


@program
def message_passing_softmax():
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 0], [1, 2, 0, 4, 5, 3, 0, 2]])
    return MPNN(), (torch.randn(6, 6), edges, torch.randn(8, 2), torch.tensor([0, 0, 0, 1, 1, 1]))


class PointNet(nn.Module):
    """Farthest points, neighbours by topk, relative features, maximum."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.tnet = nn.Linear(3, 9)

    @torch.no_grad()
    def farthest(self, p, k):
        b, n, _ = p.shape
        chosen = torch.zeros(b, k, dtype=torch.long)
        dist = torch.full((b, n), 1e10).to(p)
        far = torch.zeros(b, dtype=torch.long)
        for i in range(k):
            chosen[:, i] = far
            d = (p - p[torch.arange(b), far][:, None]).pow(2).sum(-1)
            dist = torch.minimum(dist, d)
            far = dist.argmax(-1)
        return chosen

    def forward(self, p):
        t = self.tnet(p.mean(1)).view(-1, 3, 3) + torch.eye(3).to(p)
        p = torch.bmm(p, t)
        centres = torch.gather(p, 1, self.farthest(p, 4)[..., None].expand(-1, -1, 3))
        idx = torch.cdist(centres, p).topk(3, largest=False).indices
        near = p[torch.arange(len(p))[:, None, None], idx]
        f = torch.cat([near - centres[:, :, None], near], -1).permute(0, 3, 1, 2)
        g = self.mlp(f).amax((2, 3))
        return g.logsumexp(-1).mean() + 1e-3 * torch.linalg.matrix_norm(t @ t.mT - torch.eye(3).to(p)).mean()


@program
def farthest_point_neighbours():
    return PointNet(), (torch.randn(2, 10, 3),)


class VQ(nn.Module):
    """Straight-through codes, an EMA codebook, dead codes replaced by rows of the batch, perplexity kept."""

    def __init__(self, k=5, d=4):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, d), nn.Linear(d, 6)
        self.register_buffer("code", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("total", self.code.clone())
        self.stats = {}

    def forward(self, x):
        z = self.enc(x)
        idx = torch.cdist(z, self.code).argmin(-1)
        hot = F.one_hot(idx, len(self.code)).type_as(z)
        q = hot @ self.code
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                n = self.count.sum()
                smooth = (self.count + 1e-5) / (n + len(self.code) * 1e-5) * n
                self.code.copy_(self.total / smooth[:, None])
                dead = self.count < 0.85
                if dead.any():
                    self.code[dead] = z[:1].expand_as(self.code)[dead]
        p = hot.mean(0)
        self.stats["perplexity"] = torch.exp(-(p * (p + 1e-10).log()).sum()).item()
        out = self.dec(z + (q - z).detach())
        return F.mse_loss(out, x) + 0.25 * F.mse_loss(z, q.detach())


@program
def vq_dead_codes():
    return VQ(), (torch.randn(8, 6),)


class RealNVP(nn.Module):
    """Affine couplings with alternating masks, log determinants, and the inverse as a second term."""

    def __init__(self, d=4, n=3):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, 2 * d)) for _ in range(n))
        self.register_buffer("masks", torch.stack([(torch.arange(d) + i) % 2 for i in range(n)]).float())
        self.prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(d), torch.ones(d)), 1)

    def forward(self, x):
        z, logdet = x, 0
        for mask, net in zip(self.masks, self.nets):
            s, t = net(z * mask).chunk(2, -1)
            s = torch.tanh(s) * (1 - mask)
            z = z * mask + (1 - mask) * (z * s.exp() + t)
            logdet = logdet + s.sum(-1)
        back = z.detach()
        for mask, net in reversed(list(zip(self.masks, self.nets))):
            s, t = net(back * mask).chunk(2, -1)
            back = back * mask + (1 - mask) * (back - t) * torch.exp(-torch.tanh(s) * (1 - mask))
        return -(self.prior.log_prob(z) + logdet).mean() + F.mse_loss(back, x)


@program
def realnvp_and_inverse():
    return RealNVP(), (torch.randn(5, 4),)


class MDN(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.h, self.pi, self.mu, self.sigma = (
            nn.Linear(6, 8),
            nn.Linear(8, k),
            nn.Linear(8, 2 * k),
            nn.Linear(8, 2 * k),
        )

    def forward(self, x, y):
        h = self.h(x).tanh()
        comp = torch.distributions.Normal(self.mu(h).view(-1, 3, 2), self.sigma(h).view(-1, 3, 2).exp())
        gmm = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=self.pi(h)), torch.distributions.Independent(comp, 1)
        )
        return -gmm.log_prob(y).mean() + gmm.variance.mean() * 0.01 + (gmm.mean - y).abs().mean()


@program
def mixture_density_family():
    return MDN(), (torch.randn(5, 6), torch.randn(5, 2))


class NeuralProcess(nn.Module):
    """A latent neural process: context size from the data, posterior against prior, rsample in training alone."""

    def __init__(self):
        super().__init__()
        self.enc, self.stat, self.dec = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(6, 4)

    def latent(self, x, y):
        mu, s = self.stat(self.enc(torch.cat([x, y], -1)).relu().mean(-2)).chunk(2, -1)
        return torch.distributions.Normal(mu, 0.1 + 0.9 * torch.sigmoid(s))

    def forward(self, x, y, n_context):
        n = int(n_context)
        prior, post = self.latent(x[:, :n], y[:, :n]), self.latent(x, y)
        z = post.mean if not self.training else post.mean + post.stddev * torch.sin(13 * post.mean.detach())
        out = self.dec(torch.cat([z[:, None].expand(-1, x.size(1), -1), x], -1))
        mu, s = out.split(2, -1)
        like = torch.distributions.Normal(mu[..., :1], F.softplus(s[..., :1]) + 1e-2)
        return -like.log_prob(y).sum(1).mean() + torch.distributions.kl.kl_divergence(post, prior).sum(-1).mean()


@program
def latent_neural_process():
    return NeuralProcess(), (torch.randn(3, 6, 2), torch.randn(3, 6, 1), torch.tensor(4))


class Capsule(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(1, 6, 3, 4, 2))

    @staticmethod
    def squash(s: Tensor, dim: int = -1) -> Tensor:
        n2 = s.pow(2).sum(dim, keepdim=True)
        return n2 / (1 + n2) * s / (n2.sqrt() + 1e-8)

    def forward(self, x, y):
        u = (self.w @ x.view(len(x), 6, 1, 2, 1)).squeeze(-1)
        b = torch.zeros(*u.shape[:3], 1).type_as(u)
        for r in range(3):
            c = F.softmax(b, 2)
            v = self.squash((c * (u if r == 2 else u.detach())).sum(1, keepdim=True))
            if r < 2:
                b = b + (u.detach() * v).sum(-1, keepdim=True)
        length = v.squeeze(1).norm(dim=-1)
        t = torch.eye(3).to(x).index_select(0, y)
        return (t * F.relu(0.9 - length) ** 2 + 0.5 * (1 - t) * F.relu(length - 0.1) ** 2).sum(-1).mean()


@program
def capsule_routing_detached():
    return Capsule(), (torch.randn(4, 12), torch.tensor([0, 2, 1, 0]))


class Hyper(nn.Module):
    """A hypernetwork that writes a small net's weights by vmap, conditioned by FiLM."""

    def __init__(self):
        super().__init__()
        self.small = [nn.Linear(3, 4), nn.Linear(4, 1)]
        sizes = [p.numel() for l in self.small for p in l.parameters()]
        self.gen = nn.Linear(5, sum(sizes))
        self.film = nn.Linear(5, 6)
        self.sizes = sizes

    def apply_one(self, flat, gamma, beta, x):
        w1, b1, w2, b2 = flat.split(self.sizes)
        x = gamma * x + beta
        return F.linear(torch.relu(F.linear(x, w1.view(4, 3), b1)), w2.view(1, 4), b2)

    def forward(self, task, x):
        gamma, beta = self.film(task).chunk(2, dim=-1)
        y = torch.func.vmap(self.apply_one)(self.gen(task), 1 + gamma, beta, x)
        return y.pow(2).mean()


@program
def hypernet_by_vmap():
    return Hyper(), (torch.randn(3, 5), torch.randn(3, 7, 3))
