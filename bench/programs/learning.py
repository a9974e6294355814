"""Losses that search, match and remember: early exits, beams, CRFs, matching, self-supervision, reinforcement."""

from __future__ import annotations

import copy
import math

import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


class EarlyExit(nn.Module):
    """BranchyNet style: stops when confident (batch of any size, whole batch decides)"""

    def __init__(self, thr=0.5):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
        self.thr = thr

    def forward(self, x, y):
        losses = []
        for i, (b, h) in enumerate(zip(self.blocks, self.heads)):
            x = torch.relu(b(x))
            logits = h(x)
            losses.append(F.cross_entropy(logits, y))
            if not self.training:
                conf = logits.softmax(-1).max(-1)[0]
                if conf.min() > self.thr:
                    return losses[-1], logits
        return sum(losses) / len(losses), logits


@program
def early_exit_eval():
    return EarlyExit(0.3), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))


class EarlyExitTrain(EarlyExit):
    def forward(self, x, y):
        for i, (b, h) in enumerate(zip(self.blocks, self.heads)):
            x = torch.relu(b(x))
            logits = h(x)
            if (logits.softmax(-1).max(-1)[0] > self.thr).all():
                break
        return F.cross_entropy(logits, y) + 0.01 * i


@program
def early_exit_train():
    return EarlyExitTrain(0.4), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))


class PerSampleExit(EarlyExit):
    """rows leave as soon as they are sure"""

    def forward(self, x, y):
        out = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        active = torch.ones(x.shape[0], dtype=torch.bool)
        for b, h in zip(self.blocks, self.heads):
            x = torch.relu(b(x))
            logits = h(x)
            sure = (logits.softmax(-1).amax(-1) > self.thr) & active
            out[sure] = logits[sure]
            active = active & ~sure
            if not active.any():
                break
        out[active] = logits[active]
        return F.cross_entropy(out, y)


@program
def early_exit_rows():
    return PerSampleExit(0.4), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))


class BeamLoss(nn.Module):
    """minimum risk training with beam search as lists of hypotheses"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.cell = nn.GRUCell(6, 6)
        self.out = nn.Linear(6, 7)

    def forward(self, h0, target):
        beams = [([1], torch.zeros((), dtype=h0.dtype), h0[:1])]
        for _ in range(3):
            cand = []
            for toks, score, h in beams:
                h = self.cell(self.emb(torch.tensor([toks[-1]])), h)
                lp = F.log_softmax(self.out(h), -1)[0]
                top, idx = lp.topk(2)
                for s, i in zip(top, idx):
                    cand.append((toks + [i.item()], score + s, h))
            beams = sorted(cand, key=lambda c: c[1].item(), reverse=True)[:2]
        scores = torch.stack([s for _, s, _ in beams])
        probs = scores.softmax(0)
        risk = torch.tensor(
            [sum(a != b for a, b in zip(t[1:], target.tolist())) for t, _, _ in beams], dtype=probs.dtype
        )
        return (probs * risk).sum() + 0.1 * -scores[0]


@program
def beam_search_mrt():
    return BeamLoss(), (torch.randn(2, 6), torch.tensor([2, 3, 4]))


class BeamTensor(BeamLoss):
    def forward(self, h0, target):
        B, K, V = h0.shape[0], 3, 7
        h = h0.repeat_interleave(K, 0)
        tok = torch.ones(B * K, dtype=torch.long)
        score = torch.full((B, K), -1e9, dtype=h0.dtype)
        score[:, 0] = 0
        for _ in range(3):
            h = self.cell(self.emb(tok), h)
            lp = F.log_softmax(self.out(h), -1).view(B, K, V)
            score, idx = (score[..., None] + lp).view(B, -1).topk(K, -1)
            parent, tok = idx // V, (idx % V).view(-1)
            h = h.view(B, K, -1).gather(1, parent[..., None].expand(-1, -1, h.shape[-1])).reshape(B * K, -1)
        return -(score.softmax(-1) * score).sum(-1).mean()


@program
def beam_search_tensors():
    return BeamTensor(), (torch.randn(2, 6), torch.tensor([2, 3, 4]))


class LinearCRF(nn.Module):
    """pytorch tutorial / torchcrf: with masks and viterbi in eval"""

    def __init__(self, n=4):
        super().__init__()
        self.lin = nn.Linear(5, n)
        self.start = nn.Parameter(torch.randn(n))
        self.end = nn.Parameter(torch.randn(n))
        self.T = nn.Parameter(torch.randn(n, n))

    def score(self, em, tags, mask):
        L, B = tags.shape
        mask = mask.type_as(em)
        s = self.start[tags[0]] + em[0, torch.arange(B), tags[0]]
        for i in range(1, L):
            s += self.T[tags[i - 1], tags[i]] * mask[i]
            s += em[i, torch.arange(B), tags[i]] * mask[i]
        ends = mask.long().sum(0) - 1
        return s + self.end[tags[ends, torch.arange(B)]]

    def norm(self, em, mask):
        s = self.start + em[0]
        for i in range(1, em.shape[0]):
            n = torch.logsumexp(s.unsqueeze(2) + self.T + em[i].unsqueeze(1), 1)
            s = torch.where(mask[i].unsqueeze(1), n, s)
        return torch.logsumexp(s + self.end, 1)

    def viterbi(self, em, mask):
        s = self.start + em[0]
        hist = []
        for i in range(1, em.shape[0]):
            n = s.unsqueeze(2) + self.T + em[i].unsqueeze(1)
            n, idx = n.max(1)
            s = torch.where(mask[i].unsqueeze(1), n, s)
            hist.append(idx)
        s += self.end
        ends = mask.long().sum(0) - 1
        best = []
        for b in range(em.shape[1]):
            _, last = s[b].max(0)
            tags = [last.item()]
            for h in reversed(hist[: ends[b]]):
                tags.append(h[b][tags[-1]].item())
            tags.reverse()
            best.append(tags)
        return best

    def forward(self, x, tags, mask):
        em = self.lin(x)
        loss = -(self.score(em, tags, mask) - self.norm(em, mask)).mean()
        return loss


class CRFDecode(LinearCRF):
    def forward(self, x, tags, mask):
        loss = super().forward(x, tags, mask)
        if not self.training:
            return {"loss": loss, "tags": self.viterbi(self.lin(x), mask)}
        return {"loss": loss}


MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)


@program
def crf_masked():
    return LinearCRF(), (torch.randn(4, 3, 5), torch.randint(0, 4, (4, 3)), MASK)


@program
def crf_viterbi_eval():
    return CRFDecode(), (torch.randn(4, 3, 5), torch.randint(0, 4, (4, 3)), MASK)


class DETRLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls = nn.Linear(6, 4)
        self.box = nn.Linear(6, 4)

    @torch.no_grad()
    def match(self, logits, boxes, targets):
        from scipy.optimize import linear_sum_assignment

        bs, nq = logits.shape[:2]
        prob = logits.flatten(0, 1).softmax(-1)
        bb = boxes.flatten(0, 1)
        ids = torch.cat([t["labels"] for t in targets])
        tb = torch.cat([t["boxes"] for t in targets])
        C = torch.cdist(bb, tb, p=1) - prob[:, ids]
        C = C.view(bs, nq, -1).cpu()
        sizes = [len(t["boxes"]) for t in targets]
        idx = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1))]
        return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in idx]

    def forward(self, h, boxes, labels):
        targets = [{"labels": labels[0, :2], "boxes": boxes[0, :2]}, {"labels": labels[1, :3], "boxes": boxes[1, :3]}]
        logits, pred = self.cls(h), self.box(h).sigmoid()
        indices = self.match(logits, pred, targets)
        bi = torch.cat([torch.full_like(s, i) for i, (s, _) in enumerate(indices)])
        si = torch.cat([s for s, _ in indices])
        tc_o = torch.cat([t["labels"][J] for t, (_, J) in zip(targets, indices)])
        tc = torch.full(logits.shape[:2], 3, dtype=torch.int64)
        tc[bi, si] = tc_o
        w = torch.ones(4, dtype=h.dtype)
        w[-1] = 0.1
        ce = F.cross_entropy(logits.transpose(1, 2), tc, w)
        tb = torch.cat([t["boxes"][i] for t, (_, i) in zip(targets, indices)])
        l1 = F.l1_loss(pred[bi, si], tb, reduction="none").sum() / 5
        return {"loss": ce + 5 * l1, "ce": ce.detach(), "l1": l1.detach()}


@program
def detr_hungarian():
    return DETRLoss(), (torch.randn(2, 5, 6), torch.rand(2, 3, 4), torch.randint(0, 3, (2, 3)))


class TripletMiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, x, labels):
        e = F.normalize(self.net(x), dim=-1)
        d = torch.cdist(e, e)
        trips = []
        for a in range(len(labels)):
            pos = torch.where((labels == labels[a]) & (torch.arange(len(labels)) != a))[0]
            neg = torch.where(labels != labels[a])[0]
            for p in pos:
                semi = neg[(d[a, neg] > d[a, p]) & (d[a, neg] < d[a, p] + 0.4)]
                if len(semi) > 0:
                    trips.append((a, int(p), int(semi[d[a, semi].argmin()])))
        if not trips:
            return d.sum() * 0
        t = torch.tensor(trips)
        return F.relu(d[t[:, 0], t[:, 1]] - d[t[:, 0], t[:, 2]] + 0.4).mean()


@program
def triplet_semi_hard():
    return TripletMiner(), (torch.randn(6, 5), torch.tensor([0, 0, 1, 1, 2, 2]))


class MoCo(nn.Module):
    def __init__(self, m=0.9, K=8, T=0.2):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.k = copy.deepcopy(self.q)
        self.m, self.K, self.T = m, K, T
        for p in self.k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, K), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum(self):
        for pq, pk in zip(self.q.parameters(), self.k.parameters()):
            pk.data = pk.data * self.m + pq.data * (1.0 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        b = keys.shape[0]
        ptr = int(self.ptr)
        assert self.K % b == 0
        self.queue[:, ptr : ptr + b] = keys.T
        self.ptr[0] = (ptr + b) % self.K

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            self.momentum()
            k = F.normalize(self.k(b), dim=1)
        lpos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        lneg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([lpos, lneg], 1) / self.T
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@program
def moco_queue():
    return MoCo(), (torch.randn(4, 5), torch.randn(4, 5))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.pred = nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online)
        self.global_step = 0
        self.max_steps = 10
        for p in self.target.parameters():
            p.requires_grad_(False)

    def update(self):
        tau = 1 - 0.01 * (math.cos(math.pi * self.global_step / self.max_steps) + 1) / 2
        with torch.no_grad():
            for o, t in zip(self.online.parameters(), self.target.parameters()):
                t.data.mul_(tau).add_(o.data, alpha=1 - tau)
        self.global_step += 1

    def forward(self, a, b):
        pa, pb = self.pred(self.online(a)), self.pred(self.online(b))
        with torch.no_grad():
            za, zb = self.target(a), self.target(b)
        loss = 2 - 2 * F.cosine_similarity(pa, zb.detach(), dim=-1) + 2 - 2 * F.cosine_similarity(pb, za, dim=-1)
        if self.training:
            self.update()
        return loss.mean()


@program
def byol_python_step():
    return BYOL(), (torch.randn(4, 5), torch.randn(4, 5))


class BarlowVICReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 4)
        self.bn = nn.BatchNorm1d(4, affine=False)

    def off_diagonal(self, x):
        n, m = x.shape
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def forward(self, a, b):
        z1, z2 = self.net(a), self.net(b)
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(len(a))
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = self.off_diagonal(c).pow_(2).sum()
        x = z1 - z1.mean(0)
        std = torch.sqrt(x.var(dim=0) + 1e-4)
        cov = (x.T @ x) / (len(a) - 1)
        return on + 5e-3 * off + torch.mean(F.relu(1 - std)) + self.off_diagonal(cov).pow_(2).sum().div(4)


@program
def barlow_vicreg():
    return BarlowVICReg(), (torch.randn(6, 5), torch.randn(6, 5))


class SwAV(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 4)
        self.prototypes = nn.Linear(4, 6, bias=False)

    @torch.no_grad()
    def sinkhorn(self, out):
        Q = torch.exp(out / 0.05).t()
        B, K = Q.shape[1], Q.shape[0]
        Q /= torch.sum(Q)
        for _ in range(3):
            Q /= torch.sum(Q, dim=1, keepdim=True)
            Q /= K
            Q /= torch.sum(Q, dim=0, keepdim=True)
            Q /= B
        Q *= B
        return Q.t()

    def forward(self, a, b):
        with torch.no_grad():
            w = self.prototypes.weight.data.clone()
            w = F.normalize(w, dim=1, p=2)
            self.prototypes.weight.copy_(w)
        outs = [self.prototypes(F.normalize(self.net(v), dim=1)) for v in (a, b)]
        loss = 0
        for i, o in enumerate(outs):
            q = self.sinkhorn(o.detach())
            loss -= torch.mean(torch.sum(q * F.log_softmax(outs[1 - i] / 0.1, dim=1), dim=1))
        return loss / 2


@program
def swav_sinkhorn():
    return SwAV(), (torch.randn(6, 5), torch.randn(6, 5))


class PPO(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.v = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.target_kl = 0.01

    def gae(self, r, v, d, gamma=0.99, lam=0.95):
        adv = torch.zeros_like(r)
        last = 0
        for t in reversed(range(len(r))):
            nv = v[t + 1] if t + 1 < len(r) else torch.zeros_like(v[0])
            delta = r[t] + gamma * nv * (1 - d[t]) - v[t]
            adv[t] = last = delta + gamma * lam * (1 - d[t]) * last
        return adv

    def forward(self, obs, act, old_logp, rew, done):
        dist = torch.distributions.Categorical(logits=self.pi(obs))
        logp = dist.log_prob(act)
        v = self.v(obs).squeeze(-1)
        with torch.no_grad():
            adv = self.gae(rew, v, done)
            ret = adv + v
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (logp - old_logp).exp()
        surr = torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv)
        approx_kl = ((ratio - 1) - (logp - old_logp)).mean().item()
        vclip = v + torch.clamp(v - v.detach(), -0.2, 0.2)
        loss = -surr.mean() + 0.5 * torch.max((v - ret) ** 2, (vclip - ret) ** 2).mean() - 0.01 * dist.entropy().mean()
        return {"loss": loss, "kl": approx_kl, "clipfrac": ((ratio - 1.0).abs() > 0.2).float().mean().item()}


@program
def ppo():
    return PPO(), (
        torch.randn(6, 4),
        torch.randint(0, 3, (6,)),
        -torch.rand(6),
        torch.randn(6),
        torch.tensor([0.0, 0, 1, 0, 0, 1]),
    )


class SAC(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(4, 4)
        self.q1 = nn.Linear(6, 1)
        self.q2 = nn.Linear(6, 1)
        self.t1 = copy.deepcopy(self.q1).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.target_entropy = -2

    def pi(self, s):
        mean, log_std = self.actor(s).chunk(2, -1)
        log_std = torch.tanh(log_std)
        log_std = -5 + 0.5 * 7 * (log_std + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = normal.rsample()
        y = torch.tanh(x)
        lp = normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
        return y, lp.sum(1, keepdim=True)

    def forward(self, s, a, r, s2):
        with torch.no_grad():
            a2, lp2 = self.pi(s2)
            y = r[:, None] + 0.99 * (self.t1(torch.cat([s2, a2], 1)) - self.log_alpha.exp() * lp2)
        sa = torch.cat([s, a], 1)
        ql = F.mse_loss(self.q1(sa), y) + F.mse_loss(self.q2(sa), y)
        pa, lp = self.pi(s)
        spa = torch.cat([s, pa], 1)
        al = (self.log_alpha.exp().detach() * lp - torch.min(self.q1(spa), self.q2(spa))).mean()
        return ql + al + (-self.log_alpha.exp() * (lp + self.target_entropy).detach()).mean()


@program
def sac_rsample():
    return SAC(), (torch.randn(6, 4), torch.randn(6, 2), torch.randn(6), torch.randn(6, 4))


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.t = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.t.load_state_dict(self.q.state_dict())
        self.t.requires_grad_(False)
        self.steps = 0
        self.sync_every = 2

    def forward(self, s, a, r, s2, done):
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.t.load_state_dict(self.q.state_dict())
        qv = self.q(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            nxt = self.t(s2).gather(1, self.q(s2).argmax(1, keepdim=True)).squeeze(1)
            nxt[done] = 0.0
        return F.smooth_l1_loss(qv, r + 0.9 * nxt)


@program
def dqn_target_sync():
    return DQN(), (
        torch.randn(6, 4),
        torch.randint(0, 3, (6,)),
        torch.randn(6),
        torch.randn(6, 4),
        torch.tensor([0, 1, 0, 0, 1, 0]).bool(),
    )


class Reinforce(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(4, 3)
        self.baseline = 0.0

    def forward(self, s, r):
        m = torch.distributions.Categorical(F.softmax(self.pi(s), dim=-1))
        a = m.sample()
        reward = (r * (a == 1)).mean()
        loss = -(m.log_prob(a) * (r - self.baseline)).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * float(reward)
        return loss


@program
def reinforce_baseline():
    return Reinforce(), (torch.randn(6, 4), torch.randn(6))
