"""Structured outputs and small worlds: transducers, parsers, graphs, sets, memories, routing, retrieval."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn

IDS7 = torch.randint(1, 9, (2, 5), generator=torch.Generator().manual_seed(31))
FRAMES = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(32))
NODES = torch.randn(7, 4, generator=torch.Generator().manual_seed(33))
EDGE = torch.tensor([[0, 1, 1, 2, 3, 4, 5, 6, 6], [1, 0, 2, 3, 4, 5, 6, 0, 3]])


class RNNT(nn.Module):
    """Transducer loss: the lattice filled anti-diagonal by anti-diagonal in nested lists."""

    def __init__(self, vocab=9):
        super().__init__()
        self.enc, self.emb, self.pred = nn.Linear(4, 8), nn.Embedding(vocab, 8), nn.GRU(8, 8, batch_first=True)
        self.joint = nn.Linear(8, vocab)

    def forward(self, x, y):
        e = self.enc(x)
        p, _ = self.pred(F.pad(self.emb(y), (0, 0, 1, 0)))
        lp = self.joint(torch.tanh(e[:, :, None] + p[:, None])).log_softmax(-1)
        B, T, U = lp.shape[0], lp.shape[1], lp.shape[2]
        blank = lp[..., 0]
        emit = lp[:, :, :-1].gather(3, y[:, None, :, None].expand(B, T, U - 1, 1)).squeeze(3)
        alpha = [[None] * U for _ in range(T)]
        for t in range(T):
            for u in range(U):
                terms = []
                if t > 0:
                    terms.append(alpha[t - 1][u] + blank[:, t - 1, u])
                if u > 0:
                    terms.append(alpha[t][u - 1] + emit[:, t, u - 1])
                alpha[t][u] = torch.logsumexp(torch.stack(terms), 0) if terms else lp.new_zeros(B)
        return -(alpha[-1][-1] + blank[:, -1, -1]).mean()


@program
def transducer():
    return RNNT(), (FRAMES[:, :4], IDS7[:, :3])


class CKY(nn.Module):
    """Inside algorithm over spans kept in a dict, and the best tree by backpointers in eval."""

    def __init__(self):
        super().__init__()
        self.emb, self.span = nn.Embedding(9, 6), nn.Bilinear(6, 6, 1)

    def forward(self, ids):
        h = self.emb(ids)
        score = {(i, j): self.span(h[i], h[j]).squeeze() for i in range(len(ids)) for j in range(i, len(ids))}
        inside = {(i, i): score[i, i] for i in range(len(ids))}
        back = {}
        for width in range(1, len(ids)):
            for i in range(len(ids) - width):
                j = i + width
                splits = torch.stack([inside[i, k] + inside[k + 1, j] for k in range(i, j)])
                inside[i, j] = score[i, j] + (splits.logsumexp(0) if self.training else splits.max())
                back[i, j] = splits.argmax()
        total = inside[0, len(ids) - 1]
        gold = sum(score[s] for s in [(0, 1), (2, 3), (0, len(ids) - 1)])
        return total - gold, back[0, len(ids) - 1]


@program
def inside_algorithm():
    return CKY(), (IDS7[0],)


class ShiftReduce(nn.Module):
    """A stack and a buffer: actions by what the scores say, as a transition parser trains with its own choices."""

    def __init__(self):
        super().__init__()
        self.emb, self.act, self.compose = nn.Embedding(9, 5), nn.Linear(10, 2), nn.Linear(10, 5)

    def forward(self, ids):
        stack, buffer, loss = [], list(self.emb(ids)), 0.0
        for _ in range(2 * len(ids) - 1):
            top = stack[-1] if stack else torch.zeros(5).to(self.emb.weight)
            front = buffer[0] if buffer else torch.zeros(5).to(self.emb.weight)
            logit = self.act(torch.cat([top, front]))
            reduce = len(stack) >= 2 and (not buffer or len(stack) > 2)
            loss = loss + F.cross_entropy(logit[None], torch.tensor([int(reduce)]))
            if reduce:
                right, left = stack.pop(), stack.pop()
                stack.append(torch.tanh(self.compose(torch.cat([left, right]))))
            else:
                stack.append(buffer.pop(0))
        return loss / len(ids) + stack[0].pow(2).mean()


@program
def shift_reduce():
    return ShiftReduce(), (IDS7[0],)


class LearnedStack(nn.Module):
    """The same where scores decide: a stack that grows and shrinks by a weight's choice."""

    def __init__(self):
        super().__init__()
        self.emb, self.act, self.compose = nn.Embedding(9, 5), nn.Linear(5, 1), nn.Linear(10, 5)

    def forward(self, ids):
        stack = []
        for h in self.emb(ids):
            stack.append(h)
            if len(stack) > 1 and self.act(stack[-1]).item() > 0:
                b = stack.pop()
                a = stack.pop()
                stack.append(torch.tanh(self.compose(torch.cat([a, b]))))
        return torch.stack(stack).mean(0).pow(2).sum() + 0.01 * len(stack)


@program
def learnt_stack():
    return LearnedStack(), (IDS7[0],)


class BeamTrain(nn.Module):
    """Beams as dicts in a list, sorted by score; the loss compares them with the gold sequence."""

    def __init__(self, k=3):
        super().__init__()
        self.emb, self.cell, self.out, self.k = nn.Embedding(9, 6), nn.GRUCell(6, 6), nn.Linear(6, 9), k

    def forward(self, ids):
        beams = [
            {"score": torch.zeros(()).to(self.out.weight), "h": torch.zeros(1, 6).to(self.out.weight), "last": ids[0]}
        ]
        gold, h = 0.0, beams[0]["h"]
        for t in range(1, len(ids)):
            h = self.cell(self.emb(ids[t - 1])[None], h)
            gold = gold + self.out(h).log_softmax(-1)[0, ids[t]]
            cand = []
            for b in beams:
                hb = self.cell(self.emb(b["last"])[None], b["h"])
                lp, idx = self.out(hb).log_softmax(-1)[0].topk(self.k)
                for s, i in zip(lp, idx, strict=True):
                    cand.append({"score": b["score"] + s, "h": hb, "last": i})
            beams = sorted(cand, key=lambda b: b["score"], reverse=True)[: self.k]
        margin = [F.relu(1 - gold + b["score"]) for b in beams]
        return sum(margin) / len(margin) - 0.1 * gold


@program
def beams_in_dicts():
    return BeamTrain(), (IDS7[0],)


class EGNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h, self.x = nn.Linear(9, 6), nn.Linear(10, 4), nn.Linear(6, 1, bias=False)

    def forward(self, h, x, edge):
        i, j = edge
        for _ in range(2):
            d = x[i] - x[j]
            m = F.silu(self.e(torch.cat([h[i], h[j], (d**2).sum(-1, keepdim=True)], -1)))
            agg = torch.zeros(len(h), 6).to(m).index_add_(0, i, m)
            cnt = torch.zeros(len(h), 1).to(m).index_add_(0, i, torch.ones_like(m[:, :1])).clamp(min=1)
            x = x + torch.zeros_like(x).index_add(0, i, d * self.x(m)) / cnt
            h = h + self.h(torch.cat([h, agg], -1))
        return h.pow(2).mean() + torch.cdist(x, x).triu(1).mean()


@program
def equivariant_messages():
    return EGNN(), (NODES, torch.randn(7, 3), EDGE)


class GraphBySets(nn.Module):
    """Neighbours in Python sets of ints from the edge list, two hops by set algebra, sampled by sorted order."""

    def __init__(self):
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, h, edge):
        near = defaultdict(set)
        for a, b in edge.t().tolist():
            near[a].add(b)
        far = {v: set().union(*(near[u] for u in near[v])) - {v} for v in list(near)}
        for hop, layer in zip((near, far), self.w, strict=True):
            rows = []
            for v in range(len(h)):
                nb = sorted(hop.get(v, ()))[:2]
                pooled = h[nb].max(0).values if nb else torch.zeros_like(h[0])
                rows.append(layer(torch.cat([h[v], pooled])))
            h = F.normalize(torch.stack(rows), dim=-1)
        return (h @ h.t()).logsumexp(0).mean()


@program
def neighbours_in_sets():
    return GraphBySets(), (NODES, EDGE)


class Dijkstra(nn.Module):
    """Shortest paths on learnt weights with a heap of Python floats: perturbed-optimiser style loss."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 1)

    def forward(self, h, edge):
        cost = F.softplus(self.w(torch.cat([h[edge[0]], h[edge[1]]], -1))).squeeze(-1)
        out = defaultdict(list)
        for k, (a, b) in enumerate(edge.t().tolist()):
            out[a].append((b, k))
        dist, prev, heap = {0: 0.0}, {}, [(0.0, 0)]
        c = cost.tolist()
        while heap:
            d, v = heapq.heappop(heap)
            for u, k in out[v]:
                if u not in dist or d + c[k] < dist[u]:
                    dist[u], prev[u] = d + c[k], k
                    heapq.heappush(heap, (dist[u], u))
        used = torch.zeros_like(cost)
        for k in prev.values():
            used[k] += 1
        return (cost * used).sum() + 0.1 * cost.pow(2).mean()


@program
def shortest_paths():
    return Dijkstra(), (NODES, EDGE)


class DNC(nn.Module):
    """Content and usage addressing with allocation by sorted free cells."""

    def __init__(self, cells=5, width=4):
        super().__init__()
        self.ctrl, self.iface = nn.LSTMCell(4 + width, 8), nn.Linear(8, 3 * width + 4)
        self.out, self.cells, self.width = nn.Linear(8 + width, 4), cells, width

    def forward(self, xs):
        B, T, _ = xs.shape
        M, usage = xs.new_zeros(B, self.cells, self.width), xs.new_zeros(B, self.cells)
        read, hc, loss = xs.new_zeros(B, self.width), None, 0
        for t in range(T - 1):
            hc = self.ctrl(torch.cat([xs[:, t], read], 1), hc)
            k, e, a, g = self.iface(hc[0]).split([self.width, self.width, self.width, 4], 1)
            free, phi = usage.sort(1)
            alloc_sorted = (1 - free) * torch.cat([torch.ones_like(free[:, :1]), free.cumprod(1)[:, :-1]], 1)
            alloc = torch.zeros_like(usage).scatter(1, phi, alloc_sorted)
            content = torch.softmax(F.cosine_similarity(M + 1e-6, k[:, None], dim=-1) * F.softplus(g[:, :1]), 1)
            w = torch.sigmoid(g[:, 1:2]) * (g[:, 2:3].sigmoid() * alloc + (1 - g[:, 2:3].sigmoid()) * content)
            usage = (usage + w - usage * w).detach() * 0.9 + 0.1 * w
            M = M * (1 - w[..., None] * e.sigmoid()[:, None]) + w[..., None] * a[:, None]
            read = torch.einsum("bn,bnw->bw", content, M)
            loss = loss + F.mse_loss(self.out(torch.cat([hc[0], read], 1)), xs[:, t + 1])
        return loss / (T - 1)


@program
def differentiable_computer():
    return DNC(), (FRAMES,)


class KNNLM(nn.Module):
    """A key-value store of past states, looked up by distance, overwritten in a ring by a Python pointer."""

    def __init__(self, size=8):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 9)
        self.register_buffer("keys", torch.randn(size, 6))
        self.register_buffer("vals", torch.randint(0, 9, (size,)))
        self.ptr, self.size = 0, size

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids[:, :-1]))
        flat, gold = h.reshape(-1, 6), ids[:, 1:].reshape(-1)
        d, i = torch.cdist(flat, self.keys.clone()).topk(3, largest=False)
        knn = torch.zeros(len(flat), 9).to(h).scatter_add(1, self.vals[i], torch.softmax(-d, -1))
        p = 0.7 * self.out(flat).softmax(-1) + 0.3 * knn
        if self.training:
            with torch.no_grad():
                for k, v in zip(flat[:3].detach(), gold[:3], strict=True):
                    self.keys[self.ptr] = k
                    self.vals[self.ptr] = v
                    self.ptr = (self.ptr + 1) % self.size
        return -torch.log(p.gather(1, gold[:, None]) + 1e-8).mean()


@program
def nearest_neighbour_store():
    return KNNLM(), (IDS7,)


class ExpertChoice(nn.Module):
    """Experts choose tokens: top tokens of each, gathered, computed, scattered back."""

    def __init__(self, experts=3, cap=2):
        super().__init__()
        self.gate = nn.Linear(4, experts, bias=False)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(experts, 4, 8) * 0.3),
            nn.Parameter(torch.randn(experts, 8, 4) * 0.3),
        )
        self.cap = cap

    def forward(self, x):
        flat = x.flatten(0, 1)
        s = self.gate(flat).softmax(-1)
        g, idx = torch.topk(s.t(), self.cap, dim=-1)
        hid = torch.einsum("ecd,edf->ecf", flat[idx], self.w1).relu()
        out = torch.einsum("ecf,efd->ecd", hid, self.w2) * g[..., None]
        y = torch.zeros_like(flat).index_add(0, idx.flatten(), out.flatten(0, 1))
        load = torch.bincount(idx.flatten(), minlength=len(flat))
        return (flat + y).pow(2).mean() + 0.01 * (load == 0).to(y).mean() * s.max()


@program
def expert_choice():
    return ExpertChoice(), (FRAMES,)


class MixtureOfDepths(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.routers = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x):
        aux = 0.0
        for block, router in zip(self.blocks, self.routers, strict=True):
            w = router(x).squeeze(-1)
            top = w.topk(3, dim=1).indices.sort(1).values
            take = top[..., None].expand(-1, -1, x.shape[-1])
            sub = x.gather(1, take)
            x = x.scatter_add(1, take, block(sub) * w.gather(1, top).sigmoid()[..., None])
            target = torch.zeros_like(w).scatter_(1, top, 1.0)
            aux = aux + F.binary_cross_entropy_with_logits(w, target)
        return x.pow(2).mean() + 0.1 * aux


@program
def mixture_of_depths():
    return MixtureOfDepths(), (FRAMES,)


class Permutations(nn.Module):
    """A determinant and a permanent by Ryser's formula over itertools; Plackett-Luce of a ranking."""

    def __init__(self):
        super().__init__()
        self.a, self.s = nn.Linear(4, 4), nn.Linear(4, 1)

    def permanent(self, m):
        n, total = len(m), 0
        for r in range(1, n + 1):
            for cols in itertools.combinations(range(n), r):
                total = total + (-1) ** r * m[:, list(cols)].sum(1).prod()
        return (-1) ** n * total

    def forward(self, x, rank):
        m = torch.sigmoid(self.a(x[:4]))
        s = self.s(x).squeeze(-1)[rank]
        pl = sum(torch.logsumexp(s[i:], 0) - s[i] for i in range(len(s)))
        sign = sum(
            (-1) ** sum(a > b for a, b in itertools.combinations(p, 2)) * m[range(4), p].prod()
            for p in itertools.permutations(range(4))
        )
        return pl / math.factorial(3) + self.permanent(m).log() + (sign - torch.det(m)).abs() + torch.det(m) ** 2


@program
def permanents_and_ranks():
    return Permutations(), (NODES, torch.tensor([3, 1, 0, 6, 5, 2, 4]))


class Poincare(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Parameter(torch.randn(9, 3) * 0.1)

    def dist(self, u, v):
        a = (u - v).pow(2).sum(-1)
        b = (1 - u.pow(2).sum(-1)).clamp(min=1e-5) * (1 - v.pow(2).sum(-1)).clamp(min=1e-5)
        return torch.acosh((1 + 2 * a / b).clamp(min=1 + 1e-7))

    def forward(self, pos, neg):
        with torch.no_grad():
            norm = self.e.norm(dim=-1, keepdim=True)
            self.e.copy_(torch.where(norm >= 1, self.e / norm * (1 - 1e-3), self.e))
        u, v = self.e[pos[:, 0]], self.e[pos[:, 1]]
        d = torch.cat([self.dist(u, v)[:, None], self.dist(u[:, None], self.e[neg])], 1)
        return F.cross_entropy(-d, torch.zeros(len(d), dtype=torch.long))


@program
def hyperbolic_embedding():
    return Poincare(), (torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.randint(0, 9, (3, 4)))
