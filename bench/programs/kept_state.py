"""What models keep between calls, and change: averages of weights, queues, target networks, statistics in one buffer."""

from __future__ import annotations

import copy
import math

import torch
from programs.entry import ROWS, program
from torch import nn
from torch.nn import functional as F

OTHERS = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
LABELS = torch.arange(8) % 3


def network(out: int = 3, width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, out))


class Statistics(nn.Module):
    """Mean and variance are rows of one buffer, which is read as a whole."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.register_buffer("statistics", torch.zeros(2, 3))
        self.register_buffer("mean", self.statistics[0])
        self.register_buffer("variance", self.statistics[1])

    def double(self):
        """Each buffer would get memory of its own."""
        super().double()
        self.mean, self.variance = self.statistics[0], self.statistics[1]
        return self

    def forward(self, x, y):
        h = self.body(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.3)
            self.variance.lerp_(h.var(0), 0.3)
        return F.cross_entropy((h - self.statistics[0]) / (self.statistics[1] + 1).sqrt(), y)


@program
def statistics_in_one_buffer():
    return Statistics(), (ROWS, LABELS)


class Queue(nn.Module):
    """MoCo: the place in the queue is a number of Python's, the slow encoder is set through .data."""

    def __init__(self):
        super().__init__()
        self.fast = network()
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 3), dim=1))
        self.place = 0

    def forward(self, a, b):
        q = F.normalize(self.fast(a), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            k = F.normalize(self.slow(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        self.queue[self.place : self.place + len(k)] = k
        self.place = (self.place + len(k)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(k), dtype=torch.long))


@program
def queue_with_a_python_place():
    return Queue(), (ROWS, OTHERS)


class TwinCritics(nn.Module):
    """TD3: targets follow, and the actor learns, at every second call."""

    def __init__(self):
        super().__init__()
        self.actor, self.critics = network(2), nn.ModuleList([network(1, 8), network(1, 8)])
        self.targets = nn.ModuleList([copy.deepcopy(self.actor), *map(copy.deepcopy, self.critics)])
        self.targets.requires_grad_(False)
        self.calls = 0

    def forward(self, state, action, reward, after):
        self.calls += 1
        with torch.no_grad():
            there = torch.cat([after, self.targets[0](after).clamp(-1, 1)], 1)
            wanted = reward + 0.99 * torch.min(self.targets[1](there), self.targets[2](there))
        here = torch.cat([state, action], 1)
        loss = sum(F.mse_loss(critic(here), wanted) for critic in self.critics)
        if self.calls % 2 == 0:
            loss = loss - self.critics[0](torch.cat([state, torch.tanh(self.actor(state))], 1)).mean()
            with torch.no_grad():
                for net, target in zip((self.actor, *self.critics), self.targets, strict=True):
                    for p, t in zip(net.parameters(), target.parameters(), strict=True):
                        t.data.mul_(0.9)
                        t.data.add_(0.1 * p.data)
        return loss


@program
def twin_critics_every_second_call():
    return TwinCritics(), (ROWS, ROWS[:, :2], ROWS[:, :1], OTHERS)


class MeanTeacher(nn.Module):
    """How fast the teacher follows depends on how many calls there were."""

    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        kept = torch.clamp(1 - 1 / (self.calls + 1.0), max=0.99)
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.lerp_(s, 1 - kept.to(s.dtype))
        self.calls += 1

    def forward(self, x, y):
        self.follow()
        with torch.no_grad():
            wanted = F.softmax(self.teacher(x + 0.01) / 2, -1)
        logits = self.student(x)
        distance = F.kl_div(F.log_softmax(logits / 2, -1), wanted, reduction="batchmean")
        return F.cross_entropy(logits, y) + 4 * distance


@program
def mean_teacher_by_calls():
    return MeanTeacher(), (ROWS, LABELS)


class Cooling(nn.Module):
    """A temperature by math, and a penalty that begins later, both by a count of Python's."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = network(), 0

    def forward(self, x, y):
        temperature = max(0.5, math.exp(-0.3 * self.calls))
        self.calls += 1
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(self.body(x) / temperature, y) + (0.1 if self.calls > 2 else 0.0) * penalty


@program
def temperature_by_calls():
    return Cooling(), (ROWS, LABELS)
