"""Cuts by the clock: the best of all for few blocks; a large head gets a stage with few layers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from distributing import OneDevice
from pipelining import local_program
from torch import nn

from mycel.errors import PlanError
from mycel.plan import CPU, Costs
from mycel.plan.cuts import CutBlock, best_cut, cut_blocks, cut_seconds
from mycel.plan.links import CPU_LINK
from mycel.plan.stages import StepFlow, cut


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_worth_less(seed):
    rng = random.Random(seed)
    n, stages, microbatches = rng.randint(4, 12), rng.randint(2, 4), rng.randint(2, 8)
    blocks = [CutBlock(i, rng.choice([0.1, 1.0, 3.0]) * rng.random(), rng.choice([0.0, 0.5, 2.0])) for i in range(n)]
    every = itertools.combinations(range(1, n), stages - 1)
    least = min(cut_seconds(blocks, starts, microbatches) for starts in every)
    assert cut_seconds(blocks, best_cut(blocks, stages, microbatches), microbatches) == pytest.approx(least)


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
        flow = StepFlow(local, one.made.body)
        blocks = cut_blocks(flow, Costs(local, CPU, False), CPU_LINK)
        starts = [blocks[i].unit for i in best_cut(blocks, 2, 4)]
        stages = cut(flow, starts)
        users = [s for v, s in stages.users.items() if ".layers." in v.name and v.name.endswith("weight")]
        assert len(users) == 8
        return sum(s == {1} for s in users)

    assert layers_of_last(16) == 4 and layers_of_last(1024) == 0
