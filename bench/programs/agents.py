"""Agents: policies, values and returns as training loops have them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution


class PPO(nn.Module):
    """Clipped objective with GAE over episodes that end, value clipping, an entropy bonus, early stop by KL."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.pi, self.v = nn.Linear(8, 3), nn.Linear(8, 1)

    def gae(self, rewards, values, dones, gamma=0.99, lam=0.95):
        adv, last = torch.zeros_like(rewards), 0.0
        for t in reversed(range(len(rewards))):
            alive = 1.0 - dones[t]
            nxt = values[t + 1] if t + 1 < len(rewards) else 0.0
            delta = rewards[t] + gamma * nxt * alive - values[t]
            adv[t] = last = delta + gamma * lam * alive * last
        return adv

    def forward(self, obs, act, old_logp, old_v, rew, done):
        h = self.body(obs)
        dist, v = Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)
        adv = self.gae(rew, old_v, done)
        ret = adv + old_v
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (dist.log_prob(act) - old_logp).exp()
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        v_clip = old_v + (v - old_v).clamp(-0.2, 0.2)
        vf = 0.5 * torch.max((v - ret).pow(2), (v_clip - ret).pow(2)).mean()
        kl = ((ratio - 1) - ratio.log()).mean().item()
        if kl > 0.5:
            return vf * 0.5
        return pg + 0.5 * vf - 0.01 * dist.entropy().mean()


@program
def ppo_early_stop():
    obs, done = torch.randn(6, 6), torch.tensor([0, 0, 1.0, 0, 0, 1])
    return PPO(), (obs, torch.randint(0, 3, (6,)), torch.full((6,), -1.1), torch.randn(6) * 0.1, torch.randn(6), done)


class DQN(nn.Module):
    """Double dueling DQN with a Polyak target, n-step targets, priorities returned as a list."""

    def __init__(self):
        super().__init__()
        self.q = nn.ModuleDict({"h": nn.Linear(6, 8), "a": nn.Linear(8, 3), "v": nn.Linear(8, 1)})
        self.target = copy.deepcopy(self.q)
        for p in self.target.parameters():
            p.requires_grad = False
        self.updates = 0

    @staticmethod
    def run(net, x):
        h = F.relu(net["h"](x))
        a = net["a"](h)
        return net["v"](h) + a - a.mean(1, keepdim=True)

    def forward(self, s, a, r, s2, done, weight):
        q = self.run(self.q, s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.run(self.q, s2).argmax(1, keepdim=True)
            y = r + 0.97 * (1 - done) * self.run(self.target, s2).gather(1, best).squeeze(1)
        td = (q - y).abs()
        loss = (weight * F.smooth_l1_loss(q, y, reduction="none")).mean()
        if self.training:
            self.updates += 1
            tau = 0.5 if self.updates % 2 == 0 else 0.05
            for p, t in zip(self.q.parameters(), self.target.parameters()):
                t.data.copy_(tau * p.data + (1 - tau) * t.data)
        return loss, [float(e) for e in td.detach() + 1e-6], td.max().item()


@program
def double_dueling_dqn():
    return DQN(), (
        torch.randn(5, 6),
        torch.randint(0, 3, (5,)),
        torch.randn(5),
        torch.randn(5, 6),
        torch.tensor([0, 0, 1.0, 0, 1]),
        torch.rand(5),
    )


class SAC(nn.Module):
    """A squashed Gaussian with a learnt temperature and two critics."""

    def __init__(self):
        super().__init__()
        self.pi, self.q1, self.q2 = nn.Linear(6, 4), nn.Linear(8, 1), nn.Linear(8, 1)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, s, noise):
        mu, log_std = self.pi(s).chunk(2, -1)
        base = Normal(mu, log_std.clamp(-5, 2).exp())
        dist = Independent(TransformedDistribution(base, [TanhTransform(cache_size=1)]), 1)
        u = mu + base.stddev * noise
        a = torch.tanh(u)
        logp = (base.log_prob(u) - 2 * (torch.log(torch.tensor(2.0)) - u - F.softplus(-2 * u))).sum(-1)
        other = dist.log_prob(a.clamp(-0.999, 0.999))
        q = torch.min(self.q1(torch.cat([s, a], -1)), self.q2(torch.cat([s, a], -1))).squeeze(-1)
        alpha = self.log_alpha.exp()
        return (alpha.detach() * logp - q).mean() - (self.log_alpha * (logp.detach() - 2)).mean() + 1e-3 * other.mean()


@program
def squashed_actor():
    return SAC(), (torch.randn(5, 6), torch.randn(5, 2))


class Reinforce(nn.Module):
    """An episode rolled out in a small environment till it ends, log probabilities in a list, returns with a baseline."""

    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(2, 2)
        self.baseline = 0.0

    def forward(self, start, uniforms):
        s, logps, rewards = start, [], []
        for t in range(6):
            dist = Categorical(logits=self.pi(s))
            a = (uniforms[t] > dist.probs[..., 0]).long()
            logps.append(dist.log_prob(a))
            s = s + 0.3 * torch.stack([a.to(s) * 2 - 1, s[0]])
            rewards.append(1.0 - s[0].abs())
            if s[0].abs() > 1.2:
                break
        returns, g = [], 0.0
        for r in reversed(rewards):
            g = r + 0.9 * g
            returns.insert(0, g)
        returns = torch.stack(returns).detach()
        self.baseline = 0.9 * self.baseline + 0.1 * returns.mean().item()
        return -(torch.stack(logps) * (returns - self.baseline)).sum()


@program
def reinforce_episode():
    return Reinforce(), (torch.tensor([0.2, -0.4]), torch.rand(6))
