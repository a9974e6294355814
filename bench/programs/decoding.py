"""Structured outputs and iterations: CRFs, alignments, transport, fixed points, beams, rollouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from programs.entry import program
from torch import nn


class CRF(nn.Module):
    """Forward algorithm with a mask, and a structured hinge by Viterbi with back pointers."""

    def __init__(self, tags=4):
        super().__init__()
        self.emit = nn.Linear(8, tags)
        self.trans = nn.Parameter(0.1 * torch.randn(tags, tags))
        self.start = nn.Parameter(torch.zeros(tags))

    def score(self, e, tags, mask):
        first = tags[:, 0]
        total = self.start[first] + e[:, 0].gather(1, first[:, None]).squeeze(1)
        for t in range(1, e.size(1)):
            step = self.trans[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            total = total + step * mask[:, t]
        return total

    def viterbi(self, e, lengths):
        paths = []
        for row, n in zip(e, lengths.tolist()):
            alpha, back = self.start + row[0], []
            for t in range(1, n):
                alpha, best = (alpha[:, None] + self.trans + row[t]).max(0)
                back.append(best)
            tag = alpha.argmax()
            path = [tag]
            for best in reversed(back):
                tag = best[tag]
                path.insert(0, tag)
            paths.append(torch.stack(path))
        return nn.utils.rnn.pad_sequence(paths, batch_first=True)

    def forward(self, x, tags, lengths):
        e = self.emit(x)
        mask = (torch.arange(x.size(1)) < lengths[:, None]).to(e.dtype)
        alpha = self.start + e[:, 0]
        for t in range(1, e.size(1)):
            new = torch.logsumexp(alpha[:, :, None] + self.trans + e[:, t, None], 1)
            alpha = torch.where(mask[:, t, None].bool(), new, alpha)
        nll = (alpha.logsumexp(1) - self.score(e, tags, mask)).mean()
        with torch.no_grad():
            best = self.viterbi(e, lengths)
        margin = F.relu(self.score(e, best, mask) - self.score(e, tags, mask) + (best != tags).sum(1))
        return nll + 0.1 * margin.mean()


@program
def crf_with_viterbi_hinge():
    return CRF(), (torch.randn(3, 5, 8), torch.randint(0, 4, (3, 5)), torch.tensor([5, 3, 2]))


class Sinkhorn(nn.Module):
    """Entropic transport, in log space, until the marginal's error is under a tolerance."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, y):
        cost = torch.cdist(self.a(x), self.b(y)) ** 2
        n, m = cost.shape
        log_mu, log_nu = -torch.log(torch.tensor(float(n))), -torch.log(torch.tensor(float(m)))
        f, g, eps, errors = cost.new_zeros(n), cost.new_zeros(m), 0.5, []
        for i in range(50):
            f_old = f
            f = eps * (log_mu - torch.logsumexp((g[None] - cost) / eps, 1))
            g = eps * (log_nu - torch.logsumexp((f[:, None] - cost) / eps, 0))
            err = (f - f_old).abs().max()
            errors.append(err.item())
            if err < 1e-3:
                break
        plan = torch.exp((f[:, None] + g[None] - cost) / eps)
        self.iterations = i + 1
        self.last_error = errors[-1]
        return (plan * cost).sum()


@program
def sinkhorn_tolerance():
    return Sinkhorn(), (torch.randn(5, 6), torch.randn(4, 6))


class DEQ(nn.Module):
    """A fixed point found without gradient until it stands, then one step with it and a phantom gradient."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(5, 5), nn.Linear(6, 5)
        nn.init.uniform_(self.w.weight, -0.2, 0.2)

    def f(self, z, x):
        return torch.tanh(self.w(z) + self.u(x))

    def forward(self, x):
        trace = []
        with torch.no_grad():
            z = torch.zeros(len(x), 5).to(x)
            for k in range(40):
                z_next = self.f(z, x)
                gap = (z_next - z).norm() / (1e-8 + z_next.norm())
                trace.append(float(gap))
                z = z_next
                if gap < 1e-4:
                    break
        for _ in range(3):
            z = 0.5 * z + 0.5 * self.f(z, x)
        self.log = {"steps": len(trace), "gap": trace[-1]}
        return z.square().mean()


@program
def equilibrium_with_trace():
    return DEQ(), (torch.randn(4, 6),)


class BeamLoss(nn.Module):
    """Beam search on tensors with finished beams, its best hypothesis' score against a margin."""

    def __init__(self, vocab=9, beam=3, eos=0):
        super().__init__()
        self.emb, self.cell = nn.Embedding(vocab, 6), nn.GRUCell(6, 6)
        self.out = nn.Linear(6, vocab)
        self.vocab, self.beam, self.eos = vocab, beam, eos

    def forward(self, x):
        h = x.repeat_interleave(self.beam, 0)
        tokens = torch.full((h.size(0), 1), 1, dtype=torch.long)
        scores = torch.tensor([0.0] + [-1e9] * (self.beam - 1)).to(x).repeat(len(x))
        done = torch.zeros_like(scores, dtype=torch.bool)
        for _ in range(4):
            h = self.cell(self.emb(tokens[:, -1]), h)
            logp = self.out(h).log_softmax(-1)
            pad = torch.full_like(logp, float("-inf"))
            pad[:, self.eos] = 0.0
            logp = torch.where(done[:, None], pad, logp)
            total = (scores[:, None] + logp).view(len(x), -1)
            scores, flat = total.topk(self.beam, -1)
            source = (
                torch.div(flat, self.vocab, rounding_mode="floor") + self.beam * torch.arange(len(x))[:, None]
            ).view(-1)
            tokens = torch.cat([tokens[source], (flat % self.vocab).view(-1, 1)], 1)
            h, done = h[source], done[source] | (tokens[source.new_tensor(range(len(source)))][:, -1] == self.eos)
            scores = scores.view(-1)
            if done.all():
                break
        best = scores.view(len(x), self.beam)
        return F.softplus(best[:, 1] - best[:, 0] + 1).mean() - best[:, 0].mean() * 0.1


@program
def beam_with_finished():
    return BeamLoss(), (torch.randn(2, 6),)


class WorldModel(nn.Module):
    """A latent dynamics model: posterior along a sequence, imagination by the actor, lambda returns backwards."""

    def __init__(self):
        super().__init__()
        self.cell, self.prior, self.post = nn.GRUCell(5, 6), nn.Linear(6, 6), nn.Linear(14, 6)
        self.actor, self.critic, self.reward = nn.Linear(9, 2), nn.Linear(9, 1), nn.Linear(9, 1)

    def forward(self, obs, act):
        b, t, _ = obs.shape
        h, z, kl, states = obs.new_zeros(b, 6), obs.new_zeros(b, 3), [], []
        for i in range(t):
            h = self.cell(torch.cat([z, act[:, i]], -1), h)
            stats = {"prior": self.prior(h), "post": self.post(torch.cat([h, obs[:, i]], -1))}
            dists = {
                k: torch.distributions.Normal(*(f(c) for f, c in zip((lambda m: m, F.softplus), v.chunk(2, -1))))
                for k, v in stats.items()
            }
            kl.append(torch.distributions.kl_divergence(dists["post"], dists["prior"]).sum(-1).clamp(min=0.1))
            z = dists["post"].mean
            states.append(torch.cat([h, z], -1))
        s = torch.stack(states, 1).flatten(0, 1).detach()
        rewards, values = [], []
        h, z = s.split([6, 3], -1)
        for _ in range(3):
            a = torch.tanh(self.actor(torch.cat([h, z], -1)))
            h = self.cell(torch.cat([z, a], -1), h)
            z = self.prior(h).chunk(2, -1)[0]
            rewards.append(self.reward(torch.cat([h, z], -1)).squeeze(-1))
            values.append(self.critic(torch.cat([h, z], -1)).squeeze(-1))
        returns, last = [], values[-1]
        for r, v in zip(rewards[::-1], values[::-1]):
            last = r + 0.9 * (0.05 * v + 0.95 * last)
            returns.insert(0, last)
        target = torch.stack(returns)
        return torch.stack(kl).mean() - target.mean() + F.mse_loss(torch.stack(values), target.detach())


@program
def world_model_imagination():
    return WorldModel(), (torch.randn(2, 4, 8), torch.randn(2, 4, 2))


class CTCHand(nn.Module):
    """CTC by hand over an extended label sequence, against torch's own as a second term."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 6)

    def forward(self, x, labels, lengths):
        logp = self.out(x).log_softmax(-1)
        total = 0.0
        for b in range(x.size(0)):
            lab = labels[b, : lengths[b]]
            ext = torch.zeros(2 * len(lab) + 1, dtype=torch.long)
            ext[1::2] = lab
            skip = torch.zeros(len(ext), dtype=torch.bool)
            skip[3::2] = lab[1:] != lab[:-1]
            alpha = torch.full((len(ext),), -1e30).to(logp)
            alpha[:2] = logp[b, 0, ext[:2]]
            for t in range(1, x.size(1)):
                stay, one = alpha, F.pad(alpha, (1, 0), value=-1e30)[:-1]
                two = F.pad(alpha, (2, 0), value=-1e30)[:-2].masked_fill(~skip, -1e30)
                alpha = torch.logsumexp(torch.stack([stay, one, two]), 0) + logp[b, t, ext]
            total = total - torch.logaddexp(alpha[-1], alpha[-2])
        own = F.ctc_loss(logp.transpose(0, 1), labels, torch.full((len(x),), x.size(1)), lengths, reduction="sum")
        return total + own


@program
def ctc_by_hand():
    return CTCHand(), (torch.randn(2, 8, 8), torch.tensor([[1, 2, 2], [3, 4, 0]]), torch.tensor([3, 2]))


class Decoder(nn.Module):
    """Greedy decoding till end-of-sequence inside a loss (scheduled sampling in eval), steps kept in a list."""

    def __init__(self):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(7, 6), nn.LSTMCell(6, 6), nn.Linear(6, 7)

    def forward(self, x, y):
        state, token, logits, used = (x, torch.zeros_like(x)), torch.ones(len(x), dtype=torch.long), [], 0
        for t in range(y.size(1)):
            state = self.cell(self.emb(token), state)
            step = self.out(state[0])
            logits.append(step)
            token = y[:, t] if self.training else step.argmax(-1)
            used = t + 1
            if not self.training and (token == 0).all():
                break
        logits = torch.stack(logits, 1)
        return F.cross_entropy(logits.flatten(0, 1), y[:, :used].flatten())


@program
def decode_until_end():
    return Decoder(), (torch.randn(3, 6), torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 0, 0, 0]]))
