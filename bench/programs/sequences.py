"""Sets, trees, memories and recurrences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class MAB(nn.Module):
    def __init__(self, q, k, d, h, ln=True):
        super().__init__()
        self.d, self.h = d, h
        self.fq, self.fk, self.fv, self.fo = nn.Linear(q, d), nn.Linear(k, d), nn.Linear(k, d), nn.Linear(d, d)
        if ln:
            self.ln0, self.ln1 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, Q, K):
        Q = self.fq(Q)
        K, V = self.fk(K), self.fv(K)
        s = self.d // self.h
        Q_, K_, V_ = (torch.cat(t.split(s, 2), 0) for t in (Q, K, V))
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(self.d), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)
        O = O if getattr(self, "ln0", None) is None else self.ln0(O)
        O = O + F.relu(self.fo(O))
        return O if getattr(self, "ln1", None) is None else self.ln1(O)


class SetTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.I = nn.Parameter(torch.Tensor(1, 3, 8))
        nn.init.xavier_uniform_(self.I)
        self.m0, self.m1 = MAB(8, 5, 8, 2), MAB(5, 8, 8, 2, ln=False)
        self.S = nn.Parameter(torch.randn(1, 2, 8))
        self.pma = MAB(8, 8, 8, 2)

    def forward(self, x):
        H = self.m0(self.I.repeat(x.size(0), 1, 1), x)
        return self.pma(self.S.repeat(x.size(0), 1, 1), self.m1(x, H)).square().mean()


@program
def set_transformer():
    return SetTransformer(), (torch.randn(3, 6, 5),)


@dataclass
class Tree:
    idx: int = -1
    children: list = field(default_factory=list)


class TreeLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.iou = nn.Linear(12, 18)
        self.fw = nn.Linear(6, 6)
        self.fu = nn.Linear(6, 6)
        self.tree = Tree(0, [Tree(1, [Tree(2), Tree(3)]), Tree(4, [Tree(5)]), Tree(6)])

    def node(self, x, cc, ch):
        h_sum = torch.sum(ch, dim=0, keepdim=True)
        i, o, u = torch.split(self.iou(torch.cat([x, h_sum], 1)), 6, dim=1)
        i, o, u = torch.sigmoid(i), torch.sigmoid(o), torch.tanh(u)
        f = torch.sigmoid(self.fw(x).repeat(len(ch), 1) + self.fu(ch))
        c = i * u + torch.sum(f * cc, dim=0, keepdim=True)
        return c, o * torch.tanh(c)

    def walk(self, tree, e):
        states = [self.walk(c, e) for c in tree.children]
        if not states:
            cc = ch = e.detach().new(1, 6).fill_(0.0).requires_grad_()
        else:
            cc, ch = map(lambda x: torch.cat(x, 0), zip(*states))
        return self.node(e[tree.idx : tree.idx + 1], cc, ch)

    def forward(self, words):
        return self.walk(self.tree, self.emb(words))[1].square().sum()


@program
def tree_lstm():
    return TreeLSTM(), (torch.randint(0, 10, (7,)),)


class PointerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.LSTM(2, 6, batch_first=True)
        self.dec = nn.LSTMCell(2, 6)
        self.W1, self.W2, self.v = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 1, bias=False)
        self.start = nn.Parameter(torch.zeros(2))

    def forward(self, x, target):
        enc, (h, c) = self.enc(x)
        h, c = h[0], c[0]
        inp = self.start.expand(x.shape[0], -1)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        loss = 0.0
        for t in range(x.shape[1]):
            h, c = self.dec(inp, (h, c))
            u = self.v(torch.tanh(self.W1(enc) + self.W2(h).unsqueeze(1))).squeeze(-1)
            u = u.masked_fill(mask, float("-inf"))
            loss = loss + F.nll_loss(u.log_softmax(-1), target[:, t])
            mask = mask.scatter(1, target[:, t : t + 1], True)
            inp = x[torch.arange(x.shape[0]), target[:, t]]
        return loss / x.shape[1]


@program
def pointer_network():
    return PointerNet(), (torch.randn(3, 4, 2), torch.stack([torch.randperm(4) for _ in range(3)]))


class NTM(nn.Module):
    def __init__(self, N=5, M=4):
        super().__init__()
        self.N, self.M = N, M
        self.ctl = nn.LSTMCell(3 + M, 8)
        self.head = nn.Linear(8, M + 1 + 1 + 3 + 1 + 2 * M)
        self.out = nn.Linear(8 + M, 3)
        self.register_buffer("mem0", torch.full((N, M), 1e-2))

    def address(self, mem, k, beta, g, s, gamma, w):
        wc = F.softmax(beta * F.cosine_similarity(mem + 1e-16, k.unsqueeze(1) + 1e-16, dim=-1), dim=1)
        wg = g * wc + (1 - g) * w
        wr = torch.zeros_like(wg)
        for b in range(wg.size(0)):
            t = torch.cat([wg[b, -1:], wg[b], wg[b, :1]])
            wr[b] = F.conv1d(t.view(1, 1, -1), s[b].view(1, 1, -1)).view(-1)
        w = wr**gamma
        return w / (w.sum(1, keepdim=True) + 1e-16)

    def forward(self, x, y):
        B = x.shape[1]
        mem = self.mem0.expand(B, -1, -1)
        w = F.one_hot(torch.zeros(B, dtype=torch.long), self.N).to(x.dtype)
        r = torch.zeros(B, self.M, dtype=x.dtype)
        h = c = torch.zeros(B, 8, dtype=x.dtype)
        outs = []
        for xt in x:
            h, c = self.ctl(torch.cat([xt, r], 1), (h, c))
            p = self.head(h)
            k, beta, g, s, gamma, e, a = torch.split(p, [self.M, 1, 1, 3, 1, self.M, self.M], 1)
            w = self.address(
                mem, torch.tanh(k), F.softplus(beta), torch.sigmoid(g), F.softmax(s, 1), 1 + F.softplus(gamma), w
            )
            mem = mem * (1 - torch.einsum("bn,bm->bnm", w, torch.sigmoid(e))) + torch.einsum("bn,bm->bnm", w, a)
            r = torch.matmul(w.unsqueeze(1), mem).squeeze(1)
            outs.append(torch.sigmoid(self.out(torch.cat([h, r], 1))))
        return F.binary_cross_entropy(torch.stack(outs), y)


@program
def neural_turing_machine():
    return NTM(), (torch.randn(4, 2, 3), torch.rand(4, 2, 3))


class RWKV(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, d))
        self.k, self.v, self.r = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.w, self.u = nn.Parameter(torch.rand(d)), nn.Parameter(torch.rand(d))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x):
        B, T, C = x.shape
        xx = self.shift(x)
        xk, xv, xr = (x * m + xx * (1 - m) for m in self.mix)
        k, v, r = self.k(xk), self.v(xv), torch.sigmoid(self.r(xr))
        w = -torch.exp(self.w)
        a = torch.zeros(B, C, dtype=x.dtype)
        b = torch.zeros(B, C, dtype=x.dtype)
        p = torch.full((B, C), -1e38, dtype=x.dtype)
        out = torch.empty_like(v)
        for t in range(T):
            kt, vt = k[:, t], v[:, t]
            q = torch.maximum(p, self.u + kt)
            e1, e2 = torch.exp(p - q), torch.exp(self.u + kt - q)
            out[:, t] = (e1 * a + e2 * vt) / (e1 * b + e2)
            q = torch.maximum(p + w, kt)
            e1, e2 = torch.exp(p + w - q), torch.exp(kt - q)
            a, b, p = e1 * a + e2 * vt, e1 * b + e2, q
        return (r * out).square().mean()


@program
def rwkv_wkv_loop():
    return RWKV(), (torch.randn(2, 5, 6),)


class S4D(nn.Module):
    def __init__(self, H=4, N=6):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(H) * 2 - 4)
        C = torch.randn(H, N // 2, dtype=torch.cfloat)
        self.C = nn.Parameter(torch.view_as_real(C))
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(H, N // 2)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(N // 2).float().repeat(H, 1))
        self.D = nn.Parameter(torch.randn(H))

    def forward(self, u):
        L = u.size(-1)
        dt = torch.exp(self.log_dt)
        C = torch.view_as_complex(self.C)
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dtA = A * dt.unsqueeze(-1)
        K = dtA.unsqueeze(-1) * torch.arange(L)
        C = C * (torch.exp(dtA) - 1.0) / A
        K = 2 * torch.einsum("hn, hnl -> hl", C, torch.exp(K)).real
        kf = torch.fft.rfft(K, n=2 * L)
        uf = torch.fft.rfft(u, n=2 * L)
        y = torch.fft.irfft(uf * kf, n=2 * L)[..., :L] + u * self.D.unsqueeze(-1)
        return F.glu(F.gelu(y), dim=-2).square().mean()


@program
def s4d():
    return S4D(), (torch.randn(2, 4, 8),)


class Hyena(nn.Module):
    def __init__(self, d=4, L=8):
        super().__init__()
        self.inp = nn.Linear(d, 3 * d)
        self.short = nn.Conv1d(3 * d, 3 * d, 3, padding=2, groups=3 * d)
        self.mlp = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, d))
        self.register_buffer("z", torch.randn(1, L, 3))
        self.register_buffer("t", torch.linspace(0, 1, L)[None, :, None])
        self.deltas = nn.Parameter(torch.linspace(1, 3, d)[None, None])
        self.bias = nn.Parameter(torch.randn(d))
        self.out = nn.Linear(d, d)

    def forward(self, u):
        L = u.shape[1]
        x0, x1, v = self.short(self.inp(u).transpose(1, 2))[..., :L].chunk(3, 1)
        k = (self.mlp(self.z[:, :L]) * torch.exp(-self.t[:, :L] * self.deltas.abs())).squeeze(0).T
        v = v * x1
        n = 2 * L
        y = (
            torch.fft.irfft(torch.fft.rfft(v, n=n) * (torch.fft.rfft(k, n=n) / n), n=n, norm="forward")[..., :L]
            + v * self.bias[:, None]
        )
        return self.out((y * x0).transpose(1, 2)).square().mean()


@program
def hyena():
    return Hyena(), (torch.randn(2, 8, 4),)


class CausalLinearAttention(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.h = 2

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        z = 1 / (torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)) + 1e-6)
        return torch.einsum("bhtd,bhtde,bht->bhte", q, kv, z).transpose(1, 2).reshape(B, T, D).square().mean()


@program
def linear_attention_cumsum():
    return CausalLinearAttention(), (torch.randn(2, 5, 6),)
