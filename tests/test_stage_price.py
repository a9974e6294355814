"""Stages priced from a few layers: what the clock says of those that are lowered, without lowering them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributing import OneDevice
from pipelining import Tied
from test_search import TWO, of
from torch import nn

from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.plan import CPU, Plan, ladder
from mycel.plan.schedule import splits
from mycel.planning import LaidOut, Task
from mycel.search_space import Shape
from mycel.stage_price import LayerRun, StagePieces

LAYERS = 9
RUN = LayerRun("layers", kept=4, period=1, count=LAYERS)


def laid_out(layers: int, plan: Plan | None = None) -> LaidOut:
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (8, 16))
    model = Tied(layers, width=64, vocabulary=512)
    one = OneDevice.of(model, {"ids": ids, "labels": ids}, accumulate=4, clip_norm=1.0)
    return LaidOut.of(Task(one.unsharded.program, one.unsharded.body, CPU), plan or Plan(Mesh()))


@pytest.fixture(scope="module")
def shallow() -> LaidOut:
    return laid_out(RUN.kept)


@pytest.mark.parametrize("stages, schedule", [(3, "1f1b"), (4, "zbh1"), (4, "interleaved")])
def test_as_the_stages_of_the_whole_model(stages, schedule, shallow):
    priced = StagePieces.of(shallow, [RUN], 0.0, splits(schedule)).priced(stages, schedule)
    whole = laid_out(LAYERS, Plan(Mesh(), stages=priced.begin, schedule=schedule))
    outcome = whole.under(ladder(whole.costs)[:1])
    assert outcome.steps is not None
    for kind in ("forward", "backward", "weight"):
        assert getattr(priced.costs, kind) == pytest.approx(getattr(outcome.steps, kind), rel=1e-3, abs=1e-9)
    assert priced.costs.message == outcome.steps.message
    assert priced.times.seconds == pytest.approx(outcome.times.seconds, rel=0.01)
    real, most = outcome.times.peak["device"], priced.times.peak["device"]
    several = priced.schedule.stages > priced.schedule.ranks  # the peaks of a rank's stages need not meet
    assert 0.97 * real <= most <= (1.1 if several else 1.03) * real
    assert sum(priced.layers) == LAYERS


def test_layers_go_where_the_head_is_not(shallow):
    """The cut is the best of all by the figures of its blocks, so a stage with the head has fewer layers."""
    priced = StagePieces.of(shallow, [RUN], 0.0, splits=False).priced(3, "1f1b")
    assert priced.layers[-1] < max(priced.layers)
    assert priced.begin[0] == "embed"


def test_a_cut_that_fits_is_taken_where_there_is_one(shallow):
    """The first stage has most microbatches in flight: with less memory it has fewer layers, at a price."""
    pieces = StagePieces.of(shallow, [replace(RUN, count=40)], 0.0, splits=False)
    free = pieces.priced(4, "1f1b")
    fitting = pieces.priced(4, "1f1b", max(free.peaks) - 1)
    assert max(fitting.peaks) < max(free.peaks) and fitting.times.seconds >= free.times.seconds
    assert fitting.layers[0] < free.layers[0]
    assert pieces.priced(4, "1f1b", memory=1).layers == free.layers


def test_refusals(shallow):
    pieces = StagePieces.of(shallow, [RUN], 0.0, splits=False)
    with pytest.raises(PlanError, match="stages: 10, but the model has 9 layers\n  try       stages: 9"):
        pieces.priced(10, "1f1b")
    with pytest.raises(PlanError, match="known     gpipe, 1f1b"):
        pieces.priced(2, "2f2b")


class LateFirst(nn.Module):
    """Two lists of layers, made in one order and called in the other."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.late = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.early = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.early, *self.late):
            x = torch.relu(layer(x))
        return x.sum()


def test_lists_are_cut_in_the_order_of_their_calls():
    plan_search = of(LateFirst(), {"x": torch.empty(8, 8, device="meta")}, TWO)
    priced = plan_search.price(Shape(pp=2, microbatches=4))
    assert plan_search.is_shallow and priced.plan.stages[0].startswith("early")
