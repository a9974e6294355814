"""What training code does besides: quantisation, routing, checkpoints, adapters, random depth."""

from __future__ import annotations

import random

import numpy as np
import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class GumbelST(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(5, 6)
        self.d = nn.Linear(6, 5)
        self.tau = 1.0

    def forward(self, x):
        y = F.gumbel_softmax(self.e(x), tau=self.tau, hard=True)
        self.tau = max(0.5, self.tau * 0.9)
        return F.mse_loss(self.d(y), x)


@program
def gumbel_annealed():
    return GumbelST(), (torch.randn(4, 5),)


class STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits, mode="round"):
        ctx.save_for_backward(x)
        ctx.bits = bits
        n = 2**bits - 1
        return torch.round(x.clamp(0, 1) * n) / n if mode == "round" else torch.floor(x * n) / n

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ((x >= 0) & (x <= 1)).to(g.dtype) * (1 + 1 / ctx.bits), None, None


class QuantNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 4)
        self.alpha = nn.Parameter(torch.tensor(1.0))
        self.quant = STE.apply

    def forward(self, x):
        w = torch.tanh(self.l.weight)
        w = w / (2 * w.abs().max()) + 0.5
        w = 2 * self.quant(w, 3, "round") - 1
        a = self.quant(torch.minimum(F.relu(x), self.alpha) / self.alpha, 2) * self.alpha
        return F.linear(a, w, self.l.bias).square().mean()


@program
def dorefa_pact():
    return QuantNet(), (torch.randn(4, 5),)


class Ckpt(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.LayerNorm(5)) for _ in range(4)])
        self.re = reentrant

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint, checkpoint_sequential

        x = x.requires_grad_() if self.re else x
        for i, b in enumerate(self.blocks):
            x = x + (checkpoint(b, x, use_reentrant=self.re) if self.training and i % 2 else b(x))
        return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=self.re).square().mean()


@program
def checkpoint_reentrant():
    return Ckpt(True), (torch.randn(3, 5),)


@program
def checkpoint_new():
    return Ckpt(False), (torch.randn(3, 5),)


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cdouble))
        self.b = nn.Parameter(torch.zeros(4, dtype=torch.cdouble))
        self.ph = nn.Parameter(torch.zeros(4))

    def modrelu(self, z, b):
        return F.relu(z.abs() + b) * torch.exp(1j * z.angle())

    def forward(self, x):
        z = torch.complex(x, x.flip(-1))
        z = z @ self.w.T + self.b
        z = self.modrelu(z, -0.1)
        z = z * torch.polar(torch.ones_like(self.ph), self.ph)
        z = torch.fft.fft(z, norm="ortho")
        return (z.real**2 + z.imag.abs()).mean() + (z * z.conj()).real.mean() + torch.view_as_real(z).std()


@program
def complex_modrelu():
    return ComplexNet(), (torch.randn(3, 4),)


class LoRA(nn.Linear):
    def __init__(self, i, o, r=2, alpha=4):
        super().__init__(i, o)
        self.A = nn.Parameter(torch.randn(r, i) * 0.1)
        self.B = nn.Parameter(torch.zeros(o, r))
        self.s = alpha / r
        self.weight.requires_grad = False
        self.bias.requires_grad = False
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode and self.merged:
            self.weight.data -= self.B @ self.A * self.s
            self.merged = False
        elif not mode and not self.merged:
            self.weight.data += self.B @ self.A * self.s
            self.merged = True
        return self

    def forward(self, x):
        return (
            F.linear(x, self.weight, self.bias)
            if self.merged
            else F.linear(x, self.weight, self.bias) + (x @ self.A.T @ self.B.T) * self.s
        )


@program
def lora_merged_eval():
    return nn.Sequential(LoRA(4, 6), nn.ReLU(), LoRA(6, 3), LossOf()), (torch.randn(3, 4),)


class LossOf(nn.Module):
    def forward(self, x):
        return (x**2).mean() + x.mean()


class DoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
        self.l.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(2, 4))
        self.B = nn.Parameter(torch.randn(3, 2) * 0.1)
        self.m = nn.Parameter(self.l.weight.norm(dim=0, keepdim=True))

    def forward(self, x):
        w = self.l.weight + self.B @ self.A
        w = self.m * w / w.norm(dim=0, keepdim=True).detach()
        return F.linear(x, w, self.l.bias).square().mean()


@program
def dora():
    return DoRA(), (torch.randn(3, 4),)


class NaNTricks(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x, y):
        h = self.l(x)
        y = torch.where(x > 0.5, torch.full_like(y, float("nan")), y)
        ok = ~torch.isnan(y)
        safe = torch.where(ok, y, torch.zeros_like(y))
        mse = ((h - safe) ** 2 * ok).sum() / ok.sum().clamp(min=1)
        lg = torch.where(h > 0, torch.log(torch.where(h > 0, h, torch.ones_like(h))), h)
        return mse + lg.nan_to_num(0.0).mean() + torch.nanmean(y) * h.mean() + (h[ok] - y[ok]).abs().mean()


@program
def nan_masks():
    return NaNTricks(), (torch.randn(4, 4), torch.randn(4, 4))


class LayerDrop(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.p = p

    def forward(self, x):
        for b in self.blocks:
            if self.training and random.random() < self.p:
                continue
            x = x + torch.tanh(b(x))
        return x.square().mean()


@program
def layer_drop_python():
    return LayerDrop(), (torch.randn(3, 4),)


class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.d1, self.d2, self.d3 = nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.1)

    def drop_path(self, x, p):
        if p == 0.0 or not self.training:
            return x
        keep = 1 - p
        r = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0:
            r.div_(keep)
        return x * r

    def forward(self, x):
        h = x + self.drop_path(self.l(x), 0.4)
        m = torch.bernoulli(torch.full_like(h, 0.8))
        h = h * m / 0.8
        noise = torch.empty_like(h).normal_(0, 0.1) if self.training else 0
        perm = torch.randperm(h.shape[0]) if self.training else torch.arange(h.shape[0])
        lam = np.random.beta(1.0, 1.0) if False else 0.3
        h = lam * h + (1 - lam) * h[perm] + noise
        return self.d3(self.d2(self.d1(h))).square().mean()


@program
def dropout_zoo():
    return DropPath(), (torch.randn(6, 4),)


class Mixup(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, x, y):
        lam = torch.distributions.Beta(0.4, 0.4).sample() if self.training else 1.0
        idx = torch.randperm(len(x))
        x = lam * x + (1 - lam) * x[idx]
        o = self.l(x)
        return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y[idx])


@program
def mixup_beta():
    return Mixup(), (torch.randn(6, 4), torch.randint(0, 3, (6,)))


class WarmBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("mu", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        if self.training:
            self.n += 1
            w = torch.clamp(self.n.float() / 3, max=1.0)
            bm, bv, bc = x.mean(0), x.var(0, unbiased=False), x.shape[0]
            d = bm - self.mu
            tot = self.n * bc
            self.mu += d * bc / tot
            self.var = (self.var * (tot - bc) + bv * bc + d**2 * (tot - bc) * bc / tot) / tot
            if self.n <= 2:
                loss_w = 0.1
            else:
                loss_w = 1.0
        else:
            w, loss_w = 1.0, 1.0
        return (self.l((x - self.mu) / (self.var + 1e-5).sqrt()) * w).square().mean() * loss_w


@program
def warmup_in_buffer():
    return WarmBuffer(), (torch.randn(5, 4),)


class MoEHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(3)])
        self.aux = 0.0

    def forward(self, x):
        B, T, D = x.shape
        x = x.view(-1, D)
        p = F.softmax(self.gate(x), -1)
        w, i = torch.topk(p, 2, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, ex in enumerate(self.experts):
            sel, nth = torch.where(i == e)
            if sel.numel() == 0:
                continue
            out.index_add_(0, sel, w[sel, nth, None] * ex(x[sel]))
        load = F.one_hot(i[:, 0], 3).to(x.dtype).mean(0)
        self.aux = 3 * (load * p.mean(0)).sum()
        return out.view(B, T, D).square().mean() + 0.01 * self.aux


@program
def moe_with_aux_attribute():
    return MoEHand(), (torch.randn(2, 5, 4),)


class GNNScatter(nn.Module):
    def __init__(self):
        super().__init__()
        self.msg = nn.Linear(7, 5)
        self.upd = nn.GRUCell(5, 3)
        self.ro = nn.Linear(3, 1)

    def forward(self, x, ei, ea, batch):
        for _ in range(2):
            m = F.relu(self.msg(torch.cat([x[ei[0]], x[ei[1]], ea], -1)))
            agg = torch.zeros(x.size(0), 5, dtype=x.dtype).scatter_add_(0, ei[1][:, None].expand(-1, 5), m)
            deg = torch.bincount(ei[1], minlength=x.size(0)).clamp(min=1).unsqueeze(-1)
            mx = torch.zeros_like(agg).scatter_reduce_(
                0, ei[1][:, None].expand_as(m), m, reduce="amax", include_self=False
            )
            x = self.upd(agg / deg + mx, x)
        n = int(batch.max()) + 1
        g = torch.zeros(n, 3, dtype=x.dtype).index_add_(0, batch, x) / torch.bincount(batch, minlength=n)[:, None]
        return self.ro(g).square().mean()


@program
def gnn_scatter_readout():
    return GNNScatter(), (
        torch.randn(6, 3),
        torch.randint(0, 6, (2, 9)),
        torch.randn(9, 1),
        torch.tensor([0, 0, 0, 1, 1, 1]),
    )


class SoftDTW(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 2)

    def forward(self, x, y):
        D = torch.cdist(self.l(x), y) ** 2
        n, m = D.shape
        R = [[torch.tensor(float("inf"), dtype=D.dtype)] * (m + 1) for _ in range(n + 1)]
        R[0][0] = torch.tensor(0.0, dtype=D.dtype)
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                r = torch.stack([R[i - 1][j - 1], R[i - 1][j], R[i][j - 1]])
                R[i][j] = D[i - 1, j - 1] - 0.1 * torch.logsumexp(-r / 0.1, 0)
        return R[n][m]


@program
def soft_dtw():
    return SoftDTW(), (torch.randn(4, 2), torch.randn(5, 2))


class SlotAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(1, 1, 4))
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(4, 4)
        self.ni, self.ns = nn.LayerNorm(4), nn.LayerNorm(4)
        self.eps = 1e-8

    def forward(self, x, noise, num_slots=3):
        b, n, d = x.shape
        slots = self.mu.expand(b, num_slots, -1) + noise
        x = self.ni(x)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            prev = slots
            q = self.q(self.ns(slots))
            dots = torch.einsum("bid,bjd->bij", q, k) * d**-0.5
            attn = dots.softmax(dim=1) + self.eps
            attn = attn / attn.sum(dim=-1, keepdim=True)
            u = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(u.reshape(-1, d), prev.reshape(-1, d)).reshape(b, -1, d)
        return slots.square().mean()


@program
def slot_attention():
    return SlotAttention(), (torch.randn(2, 5, 4), torch.randn(2, 3, 4))
