"""Tiny training steps and clusters by chance, and every plan there is for them.

A model of one or two equal layers, with or without a table of tokens in front; two to eight devices in one host or in
several, some of them behind slow wires.  `every_shape` names all plans by itself: it asks nothing of the search.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mycel.plan.cluster import Cluster
from mycel.search import Search
from mycel.search_space import Shape
from mycel.train.planner import search

MOST = 48  # plans that are priced
MOST_STAGED = 72  # the same, pipelines among them
STAGES_A_RANK = {"1f1b": 1, "interleaved": 2, "zbv": 2}
WORLDS = ((2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (1, 2), (2, 2), (3, 2), (2, 3))  # devices, hosts


class Layer(nn.Module):
    """Up and down again, beside what it was given; `turns`: a layer of many equations is a block, whose results may be
    computed again."""

    def __init__(self, width: int, inner: int, bias: bool, turns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=False)
        self.turns = turns

    def forward(self, x):
        h = self.up(x)
        for _ in range(self.turns):
            h = torch.sin(h) * torch.relu(h)
        return x + self.down(h)


class Tiny(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, bias: bool, words: int, turns: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width) if words else None
        self.layers = nn.ModuleList(Layer(width, inner, bias, turns) for _ in range(layers))

    def forward(self, x, y):
        h = self.table(x) if self.table is not None else x
        for layer in self.layers:
            h = layer(h)
        if self.table is None:
            return mse_loss(h, y)
        return cross_entropy((h @ self.table.weight.T).flatten(0, 1), y.flatten())


@dataclass
class TinyStep:
    """A question to a search, which may be asked again under other limits."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    cluster: Cluster
    momentum: float

    def search(self, memory: int | None = None, **given: Any) -> Search:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=self.momentum)
        return search(self.model, optimizer, self.batch, self.cluster, given, memory=memory)


def tiny_step(rng: random.Random) -> tuple[TinyStep, list[Shape]]:
    """With all its plans, where these are few."""
    devices, hosts = rng.choice(WORLDS)
    while True:
        step = _any_step(rng, devices, hosts)
        shapes = list(every_shape(step))
        if len(shapes) <= MOST:
            return step, shapes


def staged_step(rng: random.Random) -> tuple[TinyStep, list[Shape]]:
    """A model of two to four layers with all its plans, some of them pipelines, where these are few."""
    devices, hosts = rng.choice(WORLDS)
    while True:
        step = _any_step(rng, devices, hosts, (2, 3, 4))
        staged = list(every_pipeline(step))
        shapes = [*every_shape(step), *staged]
        if staged and len(shapes) <= MOST_STAGED:
            return step, shapes


def deep_step(rng: random.Random) -> TinyStep:
    """Of so many layers that a few of them stand for all, on two to four devices behind wires that are waited for."""
    while True:
        step = _any_step(rng, *rng.choice(WORLDS[:3] + WORLDS[5:7]), (8, 10, 12))
        if list(every_pipeline(step)):
            return step


def _any_step(rng: random.Random, devices: int, hosts: int, layers: tuple[int, ...] = (1, 2)) -> TinyStep:
    words = rng.choice([0, 0, 96])
    width = rng.choice([32, 64, 128])
    with torch.device("meta"):
        inner = rng.choice([1, 2, 4]) * width
        model = Tiny(rng.choice(layers), width, inner, rng.random() < 0.3, words, rng.choice([1, 3]))
        rows = rng.choice([4, 8, 12, 48, 256, 1024])
        x = torch.empty(rows, 8, dtype=torch.int64) if words else torch.empty(rows, *rng.choice([(), (1,)]), width)
    speed = 10 ** rng.uniform(8, 11)
    levels = [{"bytes_s": speed, "start_s": 10 ** rng.uniform(-7, -5)}]
    if hosts > 1:
        levels.append({"bytes_s": speed / rng.choice([1, 4, 30]), "start_s": 10 ** rng.uniform(-6, -5)})
    device = {"half": 1e12, "bytes_s": 2e11, "memory": "1GiB", "launch_s": 1e-7}
    cluster = Cluster.read({"device": device, "devices": devices, "hosts": hosts, "levels": levels})
    return TinyStep(model, {"x": x, "y": x}, cluster, rng.choice([0.0, 0.9]))


def every_shape(step: TinyStep) -> Iterator[Shape]:
    """All sizes of axes on all wires, all levels of ZeRO, all numbers of microbatches."""
    yield from _without_stages(step, step.cluster.world)


def every_pipeline(step: TinyStep) -> Iterator[Shape]:
    """The same of the ranks of one stage, with as many stages as there are layers or less, in all orders of steps."""
    world = step.cluster.world
    for pp, (schedule, stages) in itertools.product(range(2, world + 1), STAGES_A_RANK.items()):
        if world % pp == 0 and pp * stages <= len(step.model.layers):
            for shape in _without_stages(step, world // pp):
                if shape.microbatches >= pp:
                    yield replace(shape, pp=pp, schedule=schedule)


def _without_stages(step: TinyStep, world: int) -> Iterator[Shape]:
    hosts = step.cluster.hosts
    rows, length = step.batch["x"].shape[:2]
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for dp, fsdp, cp, ty, tp in itertools.product(sizes, repeat=5):
        if dp * fsdp * cp * ty * tp != world or length % cp or rows < dp * fsdp or (ty > 1 and tp == 1):
            continue
        plain = Shape(dp=dp, fsdp=fsdp, cp=cp, ty=ty, tp=tp)
        are_apart = hosts > 1 and step.cluster.devices > 1 and step.cluster.devices % world
        orders = itertools.permutations(plain.default_order) if are_apart else [()]
        for order in orders:
            laid = replace(plain, order=() if order == plain.default_order else order)
            for zero in (0, 1, 2, 3) if plain.shards > 1 else (0,):
                for count in (2**k for k in range(4)):
                    is_new = (zero != 2 or count > 1) and (fsdp == 1 or (zero and dp > 1))
                    if is_new and rows // (dp * fsdp) % count == 0:
                        yield replace(laid, zero=zero, microbatches=count)
