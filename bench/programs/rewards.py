"""Losses of reinforcement learning and of preferences, as single files of research code have them."""

from __future__ import annotations

import copy
import math
from collections import deque, namedtuple

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn
from torch.distributions import Beta, Categorical, Normal, kl_divergence

Transition = namedtuple("Transition", "state action reward next_state done")
OBS = torch.randn(6, 5, generator=torch.Generator().manual_seed(11))
NEXT = torch.randn(6, 5, generator=torch.Generator().manual_seed(12))
ACTS = torch.tensor([0, 2, 1, 1, 0, 2])
REW = torch.tensor([0.5, -0.2, 1.0, 0.0, 0.3, -1.0])
DONE = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])


class VTrace(nn.Module):
    """IMPALA's targets, computed backwards into a list that is reversed."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ELU())
        self.pi, self.v = nn.Linear(8, 3), nn.Linear(8, 1)

    def targets(self, rho, r, v, d, boot, gamma=0.99):
        c, rho = rho.clamp(max=1.0), rho.clamp(max=2.0)
        nxt = torch.cat([v[1:], boot.view(1)])
        deltas = rho * (r + gamma * (1 - d) * nxt - v)
        acc, out = torch.zeros(()).to(v), []
        for t in range(len(r) - 1, -1, -1):
            acc = deltas[t] + gamma * (1 - d[t]) * c[t] * acc
            out.append(acc + v[t])
        return torch.stack(out[::-1])

    def forward(self, obs, act, rew, done, mu):
        h = self.net(obs)
        logits, v = self.pi(h), self.v(h)[:, 0]
        logp = logits.log_softmax(-1).gather(1, act[:, None])[:, 0]
        with torch.no_grad():
            vs = self.targets((logp - mu).exp(), rew, v, done, v[-1])
            adv = (rew + 0.99 * (1 - done) * torch.cat([vs[1:], v[-1:]]) - v) * (logp - mu).exp().clamp(max=1.0)
        ent = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return -(logp * adv).mean() + 0.5 * F.mse_loss(v, vs) - 0.01 * ent


@program
def vtrace():
    return VTrace(), (OBS, ACTS, REW, DONE, torch.full((6,), -1.1))


class C51(nn.Module):
    def __init__(self, atoms=11):
        super().__init__()
        self.register_buffer("support", torch.linspace(-2, 2, atoms))
        self.online = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3 * atoms))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.atoms = atoms

    def project(self, nxt, r, d):
        dz = 4 / (self.atoms - 1)
        tz = (r[:, None] + 0.9 * (1 - d[:, None]) * self.support[None]).clamp(-2, 2)
        b = (tz + 2) / dz
        lo, up = b.floor().long(), b.ceil().long()
        lo[(up > 0) * (lo == up)] -= 1
        up[(lo < (self.atoms - 1)) * (lo == up)] += 1
        m = torch.zeros_like(nxt)
        off = torch.linspace(0, (len(r) - 1) * self.atoms, len(r)).long()[:, None].expand(len(r), self.atoms)
        m.view(-1).index_add_(0, (lo + off).view(-1), (nxt * (up.to(nxt) - b)).view(-1))
        m.view(-1).index_add_(0, (up + off).view(-1), (nxt * (b - lo.to(nxt))).view(-1))
        return m

    def forward(self, obs, act, rew, nxt, done):
        with torch.no_grad():
            p = self.target(nxt).view(-1, 3, self.atoms).softmax(-1)
            best = (p * self.support).sum(-1).argmax(1)
            m = self.project(p[range(len(best)), best], rew, done)
        logp = self.online(obs).view(-1, 3, self.atoms).log_softmax(-1)[range(len(act)), act]
        return -(m * logp).sum(1).mean()


@program
def c51_projection():
    return C51(), (OBS, ACTS, REW, NEXT, DONE)


class IQN(nn.Module):
    """Quantile Huber loss over cosine features of given fractions."""

    def __init__(self):
        super().__init__()
        self.body, self.cos, self.head = nn.Linear(5, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def quantiles(self, obs, taus):
        basis = torch.cos(taus[..., None] * torch.arange(1, 17, device=obs.device).to(obs) * math.pi)
        phi = F.relu(self.cos(basis))
        return self.head(F.relu(self.body(obs))[:, None] * phi)

    def forward(self, obs, act, rew, nxt, taus, taus2):
        q = self.quantiles(obs, taus).gather(2, act[:, None, None].expand(-1, taus.shape[1], 1))
        with torch.no_grad():
            qn = self.quantiles(nxt, taus2)
            a = qn.mean(1).argmax(-1)
            y = rew[:, None] + 0.9 * qn.gather(2, a[:, None, None].expand(-1, taus2.shape[1], 1)).squeeze(-1)
        u = y[:, None] - q
        huber = torch.where(u.abs() <= 1, 0.5 * u**2, u.abs() - 0.5)
        return ((taus[..., None] - (u.detach() < 0).to(u)).abs() * huber).sum(1).mean()


@program
def implicit_quantiles():
    return IQN(), (OBS, ACTS, REW, NEXT, torch.rand(6, 4), torch.rand(6, 5))


class Replay(nn.Module):
    """n-step returns from a deque of named tuples that the module keeps."""

    def __init__(self, n=3):
        super().__init__()
        self.q, self.n = nn.Linear(5, 3), n
        self.memory = deque(maxlen=4)

    def forward(self, obs, act, rew, nxt, done):
        window, losses = deque(maxlen=self.n), []
        for t in range(len(obs)):
            window.append(Transition(obs[t], act[t], rew[t], nxt[t], done[t]))
            if len(window) < self.n:
                continue
            ret, alive = 0.0, 1.0
            for i, tr in enumerate(window):
                ret = ret + alive * 0.9**i * tr.reward
                alive = alive * (1 - tr.done)
            boot = self.q(window[-1].next_state).max().detach()
            target = ret + alive * 0.9**self.n * boot
            losses.append((self.q(window[0].state)[window[0].action] - target) ** 2)
        return torch.stack(losses).mean()


@program
def n_step_deque():
    return Replay(), (OBS, ACTS, REW, NEXT, DONE)


class TRPO(nn.Module):
    """Surrogate gain with a natural direction: conjugate gradients on Fisher-vector products."""

    def __init__(self):
        super().__init__()
        self.mu = nn.Linear(5, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def fvp(self, obs, vec):
        d = Normal(self.mu(obs), self.log_std.exp())
        old = Normal(d.loc.detach(), d.scale.detach())
        kl = kl_divergence(old, d).sum(-1).mean()
        g = torch.autograd.grad(kl, [self.mu.weight, self.log_std], create_graph=True)
        flat = torch.cat([x.reshape(-1) for x in g])
        hv = torch.autograd.grad((flat * vec).sum(), [self.mu.weight, self.log_std])
        return torch.cat([x.reshape(-1) for x in hv]) + 0.1 * vec

    def forward(self, obs, a, adv):
        d = Normal(self.mu(obs), self.log_std.exp())
        gain = (d.log_prob(a).sum(-1).exp() * adv).mean()
        g = torch.cat(
            [x.reshape(-1) for x in torch.autograd.grad(gain, [self.mu.weight, self.log_std], retain_graph=True)]
        )
        x, r = torch.zeros_like(g), g.clone()
        p, rs = r.clone(), r.dot(r)
        for _ in range(4):
            ap = self.fvp(obs, p)
            alpha = rs / (p.dot(ap) + 1e-8)
            x, r = x + alpha * p, r - alpha * ap
            new = r.dot(r)
            p, rs = r + new / (rs + 1e-8) * p, new
        step = x.detach()
        return -gain + 0.01 * (step * torch.cat([self.mu.weight.reshape(-1), self.log_std])).sum()


@program
def trust_region_direction():
    return TRPO(), (OBS, torch.randn(6, 2), REW)


class DPO(nn.Module):
    """Preferences against a frozen reference, padding masked, with a label-smoothed and an IPO variant by name."""

    def __init__(self, kind="sigmoid"):
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
        self.reference = copy.deepcopy(self.policy)
        for p in self.reference.parameters():
            p.requires_grad = False
        self.kind, self.metrics = kind, {}

    def logps(self, model, ids, mask):
        lp = model(ids[:, :-1]).log_softmax(-1)
        return (lp.gather(2, ids[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(-1)

    def forward(self, chosen, rejected, cm, rm):
        pc, pr = self.logps(self.policy, chosen, cm), self.logps(self.policy, rejected, rm)
        with torch.no_grad():
            rc, rr = self.logps(self.reference, chosen, cm), self.logps(self.reference, rejected, rm)
        h = (pc - pr) - (rc - rr)
        match self.kind:
            case "sigmoid":
                loss = -F.logsigmoid(0.1 * h) * 0.9 - F.logsigmoid(-0.1 * h) * 0.1
            case "ipo":
                loss = (h - 1 / 0.2) ** 2
            case _:
                raise ValueError(self.kind)
        self.metrics["margin"] = h.mean().item()
        self.metrics["accuracy"] = (h > 0).double().mean().item()
        return loss.mean()


@program
def dpo_sigmoid():
    ids = torch.randint(0, 12, (3, 6))
    return DPO(), (ids, ids.flip(0), (ids > 1).double(), (ids.flip(0) > 2).double())


@program
def dpo_ipo():
    ids = torch.randint(0, 12, (3, 6))
    return DPO("ipo"), (ids, ids.flip(1), torch.ones(3, 6).double(), torch.ones(3, 6).double())


class GRPO(nn.Module):
    """Group-relative advantages; groups in a dict by prompt, those without spread skipped."""

    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(5, 3)

    def forward(self, obs, act, rew, prompt):
        logp = self.pi(obs).log_softmax(-1).gather(1, act[:, None]).squeeze(1)
        groups = {}
        for i, p in enumerate(prompt.tolist()):
            groups.setdefault(p, []).append(i)
        total, n = 0.0, 0
        for _, rows in sorted(groups.items()):
            r = rew[rows]
            if r.std() < 1e-6:
                continue
            adv = (r - r.mean()) / (r.std() + 1e-4)
            ratio = (logp[rows] - logp[rows].detach()).exp()
            total = total - torch.min(ratio * adv, ratio.clamp(0.8, 1.28) * adv).sum()
            n += len(rows)
        return total / max(n, 1)


@program
def group_relative():
    return GRPO(), (OBS, ACTS, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2]))


class Curiosity(nn.Module):
    """Intrinsic reward by random network distillation, normalised by running moments in Python floats."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(5, 4).requires_grad_(False)
        self.predict = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def update(self, x):
        m, v, n = x.mean().item(), x.var().item(), x.numel()
        delta, tot = m - self.mean, self.count + n
        self.mean += delta * n / tot
        self.var = (self.var * self.count + v * n + delta**2 * self.count * n / tot) / tot
        self.count = tot

    def forward(self, obs):
        err = (self.predict(obs) - self.target(obs)).pow(2).mean(-1)
        if self.training:
            self.update(err.detach())
        return (err / math.sqrt(self.var + 1e-8)).mean() + err.mean()


@program
def random_network_distillation():
    return Curiosity(), (OBS,)


class BetaPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 4)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, obs, act, adv):
        a, b = (F.softplus(self.net(obs)) + 1).chunk(2, -1)
        d = Beta(a, b)
        logp = d.log_prob(act).sum(-1)
        alpha = self.log_alpha.exp()
        loss = -(logp * adv).mean() - alpha.detach() * d.entropy().sum(-1).mean()
        return loss + alpha * (d.entropy().sum(-1).mean().detach() + 1.0)


@program
def beta_policy():
    return BetaPolicy(), (OBS, torch.rand(6, 2) * 0.8 + 0.1, REW)


class MCTS(nn.Module):
    """MuZero's training: unrolled dynamics with scaled gradients, two-hot values."""

    def __init__(self):
        super().__init__()
        self.rep, self.dyn = nn.Linear(5, 6), nn.Linear(6 + 3, 6)
        self.val, self.pol = nn.Linear(6, 9), nn.Linear(6, 3)
        self.register_buffer("bins", torch.linspace(-2, 2, 9))

    def two_hot(self, x):
        x = x.clamp(-2, 2)
        pos = (x + 2) / 0.5
        lo = pos.floor().long().clamp(max=7)
        w = (pos - lo).unsqueeze(-1)
        return F.one_hot(lo, 9) * (1 - w) + F.one_hot(lo + 1, 9) * w

    def forward(self, obs, act, rew):
        h, loss = torch.tanh(self.rep(obs)), 0
        for k in range(3):
            loss = loss - (self.two_hot(rew / (k + 1)) * self.val(h).log_softmax(-1)).sum(-1).mean()
            loss = loss + F.cross_entropy(self.pol(h), act)
            h = torch.tanh(self.dyn(torch.cat([h, F.one_hot(act, 3).to(h)], -1)))
            if h.requires_grad:
                h.register_hook(lambda g: g * 0.5)
            lo, hi = h.min(-1, keepdim=True)[0], h.max(-1, keepdim=True)[0]
            h = (h - lo) / (hi - lo + 1e-5)
        return loss


@program
def unrolled_dynamics():
    return MCTS(), (OBS, ACTS, REW)


class QMix(nn.Module):
    """Agents' values mixed by a monotone hypernetwork; unavailable actions masked."""

    def __init__(self, agents=3):
        super().__init__()
        self.gru = nn.GRUCell(5, 8)
        self.q = nn.Linear(8, 3)
        self.w1, self.b1 = nn.Linear(6, agents * 4), nn.Linear(6, 4)
        self.w2, self.b2 = nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
        self.agents = agents

    def forward(self, obs, state, act, avail, rew):
        b, t, n, _ = obs.shape
        h = obs.new_zeros(b * n, 8)
        qs = []
        for i in range(t):
            h = self.gru(obs[:, i].reshape(b * n, -1), h)
            q = self.q(h).view(b, n, -1)
            q[avail[:, i] == 0] = -1e4
            qs.append(q)
        qs = torch.stack(qs, 1)
        chosen = qs.gather(3, act.unsqueeze(-1)).squeeze(-1)
        w1 = self.w1(state).abs().view(b, t, n, 4)
        hid = F.elu(torch.einsum("btn,btnk->btk", chosen, w1) + self.b1(state))
        tot = (hid * self.w2(state).abs()).sum(-1) + self.b2(state).squeeze(-1)
        target = rew[:, :-1] + 0.9 * qs.max(-1)[0].sum(-1).detach()[:, 1:] * 1e-3
        return (tot[:, :-1] - target).pow(2).mean()


@program
def qmix():
    avail = torch.ones(2, 4, 3, 3)
    avail[0, 1, 2, 1] = 0
    return QMix(), (
        torch.randn(2, 4, 3, 5), torch.randn(2, 4, 6), torch.zeros(2, 4, 3, dtype=torch.long), avail, torch.randn(2, 4),
    )  # fmt: skip


class Options(nn.Module):
    """Option-critic: the option goes on or another is chosen, decided by what weights give."""

    def __init__(self):
        super().__init__()
        self.q, self.term = nn.Linear(5, 2), nn.Linear(5, 2)
        self.acts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, obs, act, rew):
        option, loss, switches = 0, 0.0, []
        for t in range(len(obs)):
            probs = torch.stack([m(obs[t]) for m in self.acts]).log_softmax(-1)
            q = self.q(obs[t])
            loss = loss - probs[option, act[t]] * (rew[t] - q[option].detach()) + (q[option] - rew[t]) ** 2
            beta = torch.sigmoid(self.term(obs[t])[option])
            if beta > 0.5:
                option = q.argmax()
                switches.append(t)
            loss = loss + 0.1 * beta * (q[option] - q.max()).detach()
        return loss / len(obs) + 0.01 * len(switches)


@program
def option_critic():
    return Options(), (OBS, ACTS, REW)


class Bandit(nn.Module):
    """LinUCB on learnt features: the inverse covariance is kept and updated by Sherman-Morrison."""

    def __init__(self):
        super().__init__()
        self.phi = nn.Linear(5, 4)
        self.register_buffer("inv", torch.eye(4))

    def forward(self, obs, rew):
        losses = []
        for x, r in zip(torch.tanh(self.phi(obs)), rew, strict=True):
            bonus = (x @ self.inv.clone() @ x).sqrt()
            losses.append((x.sum() + 0.1 * bonus - r) ** 2)
            with torch.no_grad():
                v = self.inv @ x
                self.inv -= torch.outer(v, v) / (1 + x @ v)
        return sum(losses) / len(losses)


@program
def linear_bandit():
    return Bandit(), (OBS, REW)


class Distribution(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, obs, rew):
        dist = Categorical(logits=self.net(obs))
        ranks = rew.argsort().argsort().to(rew)
        keep = [i for i, r in enumerate(ranks) if r >= len(rew) // 2]
        best = dist.probs[keep].max(-1)
        return -best.values.log().mean() + (0.1 * dist.entropy()[keep]).mean() * best.indices.unique().numel()


@program
def elite_cross_entropy():
    return Distribution(), (OBS, REW)
