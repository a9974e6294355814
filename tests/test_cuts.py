"""Cuts by the clock: the best of all for few blocks; a large head gets a stage with few layers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from distributing import OneDevice
from pipelining import local_program
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.plan import CPU, Clock, Plan
from mycel.plan.cuts import CutBlock, best_cut, cut_blocks
from mycel.plan.links import CPU_LINK
from mycel.plan.stages import StepFlow, cut
from mycel.planning import LaidOut, Task, planned


def cut_seconds(blocks, starts, microbatches):
    """What a cut is worth, as the head of mycel/plan/cuts.py has it; `starts`: where the second and later stages
    begin."""
    edges = [0, *starts, len(blocks)]
    stages = [sum(b.seconds for b in blocks[x:y]) for x, y in itertools.pairwise(edges)]
    return (microbatches - 1) * max(stages) + sum(stages) + sum(blocks[i].message for i in starts)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_worth_less(seed):
    rng = random.Random(seed)
    n, stages, microbatches = rng.randint(4, 12), rng.randint(2, 4), rng.randint(2, 8)
    blocks = [CutBlock(i, rng.choice([0.1, 1.0, 3.0]) * rng.random(), rng.choice([0.0, 0.5, 2.0])) for i in range(n)]
    every = itertools.combinations(range(1, n), stages - 1)
    least = min(cut_seconds(blocks, starts, microbatches) for starts in every)
    assert cut_seconds(blocks, best_cut(blocks, stages, microbatches), microbatches) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_that_fits_is_worth_less(seed):
    """Stages hold what their number asks for, as those of a pipeline do their microbatches in flight."""
    rng = random.Random(seed)
    n, stages = rng.randint(5, 10), rng.randint(2, 4)
    blocks = [CutBlock(i, rng.random(), rng.choice([0.0, 0.5])) for i in range(n)]
    held = [rng.random() for _ in range(n)]
    for room in (n * stages, n / 2, n / 4, 0.0):
        fits = lambda stage, a, b, most=room: (stages - stage) * sum(held[a:b]) <= most
        cuts = [(0, *starts, n) for starts in itertools.combinations(range(1, n), stages - 1)]
        fitting = [c[1:-1] for c in cuts if all(fits(s, *ends) for s, ends in enumerate(itertools.pairwise(c)))]
        if not fitting:
            with pytest.raises(PlanError, match=f"no cut into {stages} stages fits the memory"):
                best_cut(blocks, stages, 4, fits)
            continue
        least = min(cut_seconds(blocks, starts, 4) for starts in fitting)
        assert cut_seconds(blocks, best_cut(blocks, stages, 4, fits), 4) == pytest.approx(least)


def test_more_stages_than_blocks():
    with pytest.raises(PlanError, match="stages: 4, but the step has 3 parts that take time\n  try       stages: 3"):
        best_cut([CutBlock(i, 1.0) for i in range(3)], 4, 8)


class Words(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])
        self.head = nn.Linear(16, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_a_large_head_leaves_its_stage_few_layers():
    def layers_of_last(vocabulary: int) -> int:
        one = OneDevice.of(Words(vocabulary), {"ids": torch.zeros(256, 16, dtype=torch.long)}, accumulate=4)
        local, _ = local_program(one, None)
        flow = StepFlow(local, one.unsharded.body)
        blocks = cut_blocks(flow, Clock(CPU), CPU_LINK)
        starts = [blocks[i].unit for i in best_cut(blocks, 2, 4)]
        stages = cut(flow, starts)
        users = [s for v, s in stages.users.items() if ".layers." in v.name and v.name.endswith("weight")]
        assert len(users) == 8
        return sum(s == {1} for s in users)

    assert layers_of_last(16) == 4 and layers_of_last(1024) == 0


def test_a_large_vocabulary_is_cut_for_by_the_clock():
    """A Llama with 128k words, whose head is worth five layers: the cut that is searched beats that of equal layers."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, vocab_size=128256
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(4, 128, dtype=torch.long)
    one = OneDevice.of(model, {"input_ids": ids, "labels": ids}, accumulate=4)
    task = Task(one.unsharded.program, one.unsharded.body, CPU)
    equal = ("model.embed_tokens", "model.layers.4", "model.layers.8", "model.layers.12")
    searched, given = (LaidOut.of(task, Plan(Mesh(), stages=stages)).under([0.0]) for stages in (4, equal))
    longest = [max(map(sum, zip(o.steps.forward, o.steps.backward, strict=True))) for o in (searched, given)]
    assert longest[0] < 0.7 * longest[1] and searched.times.seconds < 0.85 * given.times.seconds


def test_a_budget_moves_the_cut():
    """A table of embeddings that takes no time, and microbatches in flight: where the cut by the clock alone does not
    fit, one that leaves the first stage fewer layers does, without computing anything again."""
    one = OneDevice.of(Words(16), {"ids": torch.zeros(512, 16, dtype=torch.long)}, accumulate=8)

    def under(budget: int | None) -> tuple[int, int, float]:
        task = Task(one.unsharded.program, one.unsharded.body, CPU, budget=budget)
        decided, done = planned(task, Plan(Mesh(), stages=2, recompute="none"))
        owners = done.pipeline.owners
        first = [r for r, at in owners.items() if r.kind == "parameter" and r.name.endswith("weight") and 0 in at]
        return len(first), decided.peak, decided.predicted.seconds

    layers, peak, seconds = under(None)
    budget = int(0.88 * peak)
    fewer, lower_peak, more_seconds = under(budget)
    assert fewer < layers and lower_peak <= budget and more_seconds >= seconds
    with pytest.raises(PlanError, match="too much"):
        under(lower_peak // 4)
