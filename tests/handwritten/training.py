"""Programs whose training is of their own: losses, teachers, penalties, queues, gradients made by hand."""

from __future__ import annotations

import copy
import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

from handwritten.case import D, Mlp, program


@program
class MovingAverageInForward(Mlp):
    """The features' mean is a moving average that forward assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.decay = 0.9

    def forward(self, x, y):
        h = self.features(x)
        if self.training:
            with torch.no_grad():
                self.mean = self.decay * self.mean + (1 - self.decay) * h.mean(0)
                self.seen += 1
        corrected = self.mean / (1 - self.decay ** self.seen.clamp(min=1))
        return F.cross_entropy(self.b(h - corrected.detach()), y)


@program
class TeacherOfOnesOwn(Mlp):
    """A mean teacher inside the model, updated by its own forward."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleList([self.a, self.b])).requires_grad_(False)

    @torch.no_grad()
    def follow(self, momentum=0.99):
        for mine, other in zip([*self.a.parameters(), *self.b.parameters()], self.teacher.parameters(), strict=True):
            other.mul_(momentum).add_(mine, alpha=1 - momentum)

    def forward(self, x, y):
        if self.training:
            self.follow()
        out = self.b(self.features(x))
        with torch.no_grad():
            target = self.teacher[1](torch.tanh(self.teacher[0](x))).softmax(-1)
        return F.cross_entropy(out, y) + F.kl_div(out.log_softmax(-1), target, reduction="batchmean")


@program
class SmoothingByHand(Mlp):
    def forward(self, x, y, smoothing=0.1):
        logp = self.b(self.features(x)).log_softmax(-1)
        smooth = torch.full_like(logp, smoothing / (logp.size(-1) - 1))
        smooth.scatter_(1, y.unsqueeze(1), 1 - smoothing)
        smooth[y == 0] *= 0.5
        return -(smooth * logp).sum(-1).mean()


@program
class GradientPenalty(Mlp):
    """As in WGAN-GP: the critic's gradient by interpolated inputs has norm one."""

    def critic(self, x):
        return self.b(self.features(x)).sum(-1)

    def forward(self, x, y):
        fake = x.flip(0)
        mix = (0.3 * x + 0.7 * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.critic(mix).sum(), mix, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).pow(2).mean()
        return self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        mask = (x >= ctx.low) & (x <= ctx.high)
        return torch.where(mask, g, 0.1 * g), None, None


@program
class Adversarial(Mlp):
    """Gradient reversal, and a clip whose gradient leaks."""

    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(8, 2)
        self.reverse = Reversed.apply

    def forward(self, x, y):
        h = Clipped.apply(self.a(x), -0.5, 0.5)
        return F.cross_entropy(self.b(h), y) + F.cross_entropy(self.domain(self.reverse(h, 0.3)), y % 2)


@program
class EarlyExit(nn.Module):
    """Leaves as soon as it is sure."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(D, 4) for _ in range(4))

    def forward(self, x, y):
        total = 0.0
        for depth, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            x = x + torch.tanh(block(x))
            out = head(x)
            total = total + F.cross_entropy(out, y) / (depth + 1)
            if out.softmax(-1).amax(-1).mean() > 0.45:
                break
        return total


@program
class WarmUpByCounter(Mlp):
    """A weight that grows with the number of calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.warmup = 0, 4

    def forward(self, x, y):
        h = self.features(x)
        self.calls += self.training
        weight = min(1.0, self.calls / self.warmup)
        return F.cross_entropy(self.b(h), y) + weight * h.pow(2).mean()


@program
class StraightThrough(Mlp):
    """A quantiser, a hard Gumbel-like choice and a commitment loss, all by detach."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.linspace(-1, 1, 40).reshape(5, 8).sin())
        self.register_buffer("usage", torch.zeros(5))

    def forward(self, x, y):
        h = self.features(x)
        chosen = torch.cdist(h, self.codes).argmin(-1)
        if self.training:
            self.usage.mul_(0.9).add_(torch.bincount(chosen, minlength=5).to(self.usage), alpha=0.1)
        code = self.codes[chosen]
        q = h + (code - h).detach()
        soft = self.b(q).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 4).to(soft)
        st = hard - soft.detach() + soft
        target = F.one_hot(y, 4).to(soft)
        return (
            ((st - target) ** 2).mean()
            + (h.detach() - code).square().mean()
            + 0.25 * (h - code.detach()).square().mean()
        )


@program
class WhereWithoutNan(Mlp):
    """The double where, logs of zero, and nan_to_num."""

    def forward(self, x, y):
        h = self.features(x)
        positive = h > 0
        safe = torch.where(positive, h, torch.ones_like(h))
        logs = torch.where(positive, safe.log(), torch.zeros_like(h))
        roots = torch.where(h < 0, (-torch.where(h < 0, h, h.new_tensor(-1.0))).sqrt(), 0.0)
        ratio = (h / (h - h.detach())).nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
        out = self.b(logs + roots) + ratio.detach().mean()
        return F.cross_entropy(torch.where(out.isnan(), torch.zeros_like(out), out), y)


@program
class RaggedLists(Mlp):
    """Sequences of several lengths, padded by hand."""

    lengths = (3, 1, 2)

    def forward(self, x, y):
        pieces = list(torch.split(self.features(x), self.lengths))
        padded = torch.stack([F.pad(p, (0, 0, 0, max(self.lengths) - len(p))) for p in pieces])
        mask = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]
        scores = padded.sum(-1).masked_fill(~mask, -math.inf).softmax(-1)
        pooled = torch.einsum("bl,bld->bd", scores, padded)
        sizes = defaultdict(list)
        for i, p in enumerate(pieces):
            sizes[len(p)].append(pooled[i] / len(p))
        return F.cross_entropy(self.b(torch.stack([v for k in sorted(sizes) for v in sizes[k]])), y[:3])


@program
class SlicesInPlace(Mlp):
    def forward(self, x, y):
        h = self.features(x)
        out = torch.zeros(len(x), 12)
        out[:, :8] = h
        out[:, 8:] += h[:, ::2]
        out[1::2, 2:6].mul_(0.5)
        out[0] = out[1:].mean(0)
        out.select(1, 3).copy_(h[:, 0].exp())
        half = out[:, :8].clone()
        half[torch.arange(len(x)), y] -= 1.0
        half[half < -0.9] = 0.1
        return F.cross_entropy(self.b(half + out[:, 4:]), y)


@program
class FixedPoint(Mlp):
    """Iterates without gradient until it is near, then once with it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.iterations = 0

    def forward(self, x, y):
        u = self.a(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(30):
                new = torch.tanh(0.3 * self.inner(z) + u)
                if (new - z).abs().max() < 1e-6:
                    break
                z = new
        z = torch.tanh(0.3 * self.inner(z) + u)
        return F.cross_entropy(self.b(z), y)


@program
class ContrastiveQueue(Mlp):
    """A queue of keys with a pointer, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 12 * 4).reshape(12, 4).cos())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        q = F.normalize(self.b(self.features(x)), dim=-1)
        with torch.no_grad():
            k = F.normalize(self.b(self.features(x.roll(1, 0))), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach().T], 1) / 0.2
        if self.training:
            at = int(self.pointer)
            self.queue[at : at + len(k)] = k
            self.pointer[0] = (at + len(k)) % 12
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@program
class UncertaintyWeights(nn.Module):
    """Several losses in a dict, weighted by learnt variances; one is skipped where its labels are missing."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(D, 8)
        self.heads = nn.ModuleDict({"cls": nn.Linear(8, 4), "reg": nn.Linear(8, 1), "aux": nn.Linear(8, 2)})
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def losses(self, h, y):
        yield "cls", F.cross_entropy(self.heads["cls"](h), y)
        yield "reg", F.smooth_l1_loss(self.heads["reg"](h).squeeze(-1), y.to(h))
        valid = y < 2
        if valid.any():
            yield "aux", F.cross_entropy(self.heads["aux"](h)[valid], y[valid])

    def forward(self, x, y):
        h = F.softplus(self.body(x))
        total = x.new_zeros(())
        for name, loss in self.losses(h, y):
            s = self.log_var[name]
            total += torch.exp(-s) * loss + s
        return total


@program
class SelfConsistency(Mlp):
    """Functional calls with changed weights: one step of inner learning (MAML)."""

    def forward(self, x, y):
        weights = {"weight": self.b.weight, "bias": self.b.bias}
        h = self.features(x)
        inner = F.cross_entropy(torch.func.functional_call(self.b, weights, (h[:3],)), y[:3])
        grads = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        fast = {k: w - 0.4 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.b, fast, (h[3:],)), y[3:])


@program
class Crf(nn.Module):
    """Forward algorithm, and a best path by back pointers."""

    def __init__(self):
        super().__init__()
        self.scores, self.moves = nn.Linear(D, 4), nn.Parameter(torch.eye(4) * 0.1)

    def best_path(self, scores):
        total, back = scores[0], []
        for row in scores[1:]:
            best = (total[:, None] + self.moves).max(0)
            total = best.values + row
            back.append(best.indices)
        path = [total.argmax()]
        for pointers in reversed(back):
            path.append(pointers[path[-1]])
        return torch.stack(path[::-1])

    def forward(self, x, y):
        scores = self.scores(x)
        alpha = scores[0]
        for i in range(1, len(x)):
            alpha = torch.logsumexp(alpha[:, None] + self.moves, 0) + scores[i]
        gold = scores[torch.arange(len(x)), y].sum() + self.moves[y[:-1], y[1:]].sum()
        hits = (self.best_path(scores.detach()) == y).double().mean()
        return torch.logsumexp(alpha, 0) - gold + 0.01 * hits


@program
class LossSpikes(Mlp):
    """A moving average of the loss in Python decides what a spike is."""

    def __init__(self):
        super().__init__()
        self.average, self.spikes = None, 0

    def forward(self, x, y):
        loss = F.cross_entropy(self.b(self.features(x)), y)
        value = loss.item()
        if self.average is not None and value > 1.01 * self.average:
            loss = loss * 0.5
            self.spikes += 1
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        return loss


@program
class PrototypesByLabel(Mlp):
    """A loop over the labels that there are."""

    def forward(self, x, y):
        h = self.features(x)
        centres = torch.stack([h[y == label].mean(0) for label in y.unique()])
        target = torch.stack([(y.unique() == label).nonzero()[0, 0] for label in y])
        pairs = [(i, j) for i in range(len(y)) for j in range(i) if y[i] == y[j]]
        return F.cross_entropy(-torch.cdist(h, centres), target) + sum((h[i] - h[j]).norm() for i, j in pairs)
