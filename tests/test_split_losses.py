"""Losses under split batches: with class weights, smoothing, ignored targets and every reduction, a step on simulated
ranks is that of one device."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path

import pytest
import torch
from distributing import OneDevice, random_plan, step_equals, tensors
from torch import nn
from torch.nn import functional as F

from mycel.ir import Mesh
from mycel.plan import Plan

CLASSES = 5
WEIGHT = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1

CROSS_ENTROPIES = {
    f"{reduction}{' weighted' * weighted}{' smoothed' * smooth}{' soft' * soft}": (reduction, weighted, smooth, soft)
    for reduction, weighted, smooth, soft in itertools.product(
        ["mean", "sum", "none"], [False, True], [False, True], [False, True]
    )
}


class Classes(nn.Module):
    """Rows -> the loss of their classes; `trained`: the class weights are parameters."""

    def __init__(self, reduction: str, weighted: bool, smooth: bool, soft: bool, trained: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.how = {"reduction": reduction, "label_smoothing": 0.1 * smooth} | ({} if soft else {"ignore_index": 2})
        if trained:
            self.weight = nn.Parameter(WEIGHT.clone())
        else:
            self.register_buffer("weight", WEIGHT.clone() if weighted else None)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), y, self.weight, **self.how).mean()


def batch(rows: int, soft: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    y = (
        torch.rand(rows, CLASSES, generator=g, dtype=torch.float64)
        if soft
        else torch.randint(0, CLASSES, (rows,), generator=g)
    )
    return {"x": torch.randn(rows, 6, generator=g, dtype=torch.float64), "y": y}


class Lookup(nn.Module):
    """A number for each user, and cells whose products go over split columns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.cell = nn.Parameter(torch.randn(7)), nn.GRU(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        return (self.cell(x)[0].sum((1, 2)) + self.bias[user]).square().mean()


@pytest.mark.parametrize("rows", [8, 7])
def test_lookups_in_vectors_and_cells_split_by_columns(rows):
    torch.manual_seed(rows)
    model = Lookup().double()
    x, user = torch.randn(rows, 3, 6, dtype=torch.float64), torch.randint(0, 7, (rows,))
    one = OneDevice.of(model, {"x": x, "user": user})
    step_equals(one, Plan(Mesh(dp=4), batch=["dp"]))
    step_equals(one, Plan(Mesh(dp=2, tp=3), {"bias": ["tp"], "cell.weight_hh_l0": ["-", "tp"]}, ["dp"]))
    step_equals(one, random_plan(tensors(model), 1, random.Random(rows)))


@pytest.mark.parametrize("form", CROSS_ENTROPIES)
def test_cross_entropies_under_plans_by_chance(form):
    rng, how = random.Random(form), CROSS_ENTROPIES[form]
    for rows, trained in ((8, False), (7, how[1])):
        model = Classes(*how, trained=trained).double()
        one = OneDevice.of(model, batch(rows, how[3]))
        step_equals(one, Plan(Mesh(dp=4), batch=["dp"]))
        step_equals(one, Plan(Mesh(dp=2, tp=3), {"linear.weight": ["tp", "-"], "linear.bias": ["tp"]}, ["dp"]))
        step_equals(one, random_plan(tensors(model), 1, rng))


def test_some_cases_of_the_sweep():
    """One model of bench/sweep_plans.py, on ranks and as the planner decides it."""
    spec = importlib.util.spec_from_file_location("sweep_plans", Path(__file__).parent.parent / "bench/sweep_plans.py")
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    outcomes = list(sweep.tried(5))
    assert [verdict for _, verdict, _ in outcomes] == ["right"] * sweep.PLANS, outcomes
