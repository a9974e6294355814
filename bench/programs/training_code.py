"""What training code does besides: quantisation, inner loops, routing, checkpoints, adapters, random depth."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from programs.entry import program
from torch import Tensor, nn
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


class Einops(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.p = nn.Linear(3 * 4, 8)

    def forward(self, img):
        from einops import einsum, rearrange, reduce, repeat

        x = self.p(rearrange(img, "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=2, p2=2))
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=2) for t in self.qkv(x).chunk(3, -1))
        a = einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        o = rearrange(a @ v, "b h n d -> b n (h d)")
        return (
            reduce(o, "b n d -> b d", "mean").square().mean()
            + reduce(o, "b (n two) d -> b n d", "max", two=2).mean()
            + repeat(o.mean(1), "b d -> b k d", k=2).sum() * 0.01
        )


@program
def einops_vit():
    return Einops(), (torch.randn(2, 3, 4, 4),)


@dataclass
class Stats:
    mean: Tensor
    std: Tensor | None = None


@dataclass
class Output:
    loss: Tensor
    stats: Stats
    hidden: list = field(default_factory=list)
    meta: dict = field(default_factory=dict)


class Mode(enum.Enum):
    A = "a"
    B = "b"


class KwargsNet(nn.Module):
    def __init__(self, **cfg):
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("text", "image", "shared")})
        self.mode = Mode.A

    def block(self, x, *args, name="shared", act=None, residual=True, **kw):
        y = self.blocks[name](x)
        y = y if act is None else getattr(F, act)(y)
        return x + y * kw.get("scale", 1.0) if residual else y

    def forward(self, x, *, labels=None, return_hidden=True, **kwargs):
        hid = []
        for name, opts in self.cfg.items():
            x = self.block(x, name=name, **opts)
            hid.append(x)
        if self.mode is Mode.A:
            x = x * 2
        match kwargs:
            case {"scale": s}:
                x = x * s
            case _:
                pass
        loss = F.mse_loss(x, labels) if labels is not None else x.square().mean()
        return Output(
            loss,
            Stats(x.mean(), None if not self.training else x.std()),
            hid if return_hidden else [],
            {"n": len(hid), "norms": {f"l{i}": h.norm().item() for i, h in enumerate(hid)}},
        )


@program
def kwargs_dataclass():
    return KwargsNet(text={"act": "relu"}, image={"act": "gelu", "scale": 0.5}, shared={"residual": False}), {
        "x": torch.randn(3, 4),
        "labels": torch.randn(3, 4),
        "scale": torch.tensor(0.7),
    }


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 4)})
        self.heads = nn.ModuleDict(OrderedDict(cls=nn.Linear(4, 3), reg=nn.Linear(4, 1)))

    def forward(self, batch, tasks):
        losses = defaultdict(float)
        feats = {k: self.enc[k](v) for k, v in batch.items() if k in self.enc}
        for task, (mod, y) in tasks.items():
            out = self.heads[task](feats[mod])
            losses[task] += F.cross_entropy(out, y) if task == "cls" else F.mse_loss(out.squeeze(-1), y)
        return {"loss": sum(losses.values()), **{f"{k}_loss": v.detach() for k, v in losses.items()}}


class RouterFlat(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = Router()

    def forward(self, a, b, c, d):
        return self.r({"a": a, "b": b}, {"cls": ("a", c), "reg": ("b", d)})


@program
def moduledict_tasks():
    return RouterFlat(), (torch.randn(3, 3), torch.randn(3, 5), torch.tensor([0, 2, 1]), torch.randn(3))


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


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.att = nn.MultiheadAttention(4, 2, batch_first=True)
        self.o = nn.Linear(4, 2)

    def forward(self, seqs, labels):
        pads = nn.utils.rnn.pad_sequence(seqs, batch_first=True)
        lens = torch.tensor([len(s) for s in seqs])
        packed = nn.utils.rnn.pack_padded_sequence(pads, lens, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        m = torch.arange(h.shape[1])[None] >= lens[:, None]
        a, _ = self.att(h, h, h, key_padding_mask=m)
        pooled = torch.stack([a[i, :n].mean(0) for i, n in enumerate(lens)])
        return F.cross_entropy(self.o(pooled), labels)


class RaggedFlat(Ragged):
    def forward(self, a, b, c, y):
        return super().forward([a, b, c], y)


@program
def ragged_lists():
    return RaggedFlat(), (torch.randn(4, 3), torch.randn(2, 3), torch.randn(3, 3), torch.tensor([0, 1, 1]))


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
