"""A step with fewer layers stands for the whole one: what is said of the whole from it is what the whole says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from models import VOCAB, gpt2, llama
from test_search import SLOW, of
from torch import nn

from mycel.ir import DEVICE
from mycel.plan import clock
from mycel.plan.clock import WORKSPACE
from mycel.planning import LaidOut
from mycel.search import Search
from mycel.search_space import Shape
from mycel.shallow import FEW, layer_lists, shortened

DEEP = 9


def t5() -> nn.Module:
    """Two lists, whose first layers have a bias that the others share."""
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": DEEP, "num_heads": 4, "vocab_size": VOCAB}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: llama(num_hidden_layers=DEEP), Shape(4, 1, 1, 3, 1)),
        (lambda: llama(num_hidden_layers=DEEP), Shape(4, 1, 1, 3, 2)),
        (lambda: gpt2(n_layer=DEEP), Shape(2, 2, 1, 0, 1)),
        (t5, Shape(4, 1, 1, 1, 1)),
    ],
    ids=["llama zero3", "llama zero3, microbatches", "gpt2 dp, cp", "t5 zero1"],
)
def test_what_is_said_of_the_whole_is_what_it_says_itself(make, shape):
    plan_search = of(make(), cluster=SLOW)
    assert plan_search.shallow is not None
    written = plan_search.written(shape)
    few, whole = plan_search._timed_shallow(shape, written), plan_search._timed_whole(shape, written)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert few.peak == pytest.approx(whole.peak, rel=0.01)
    assert few.times.held == whole.times.held
    assert few.sent == pytest.approx(whole.sent, rel=0.01)


def test_a_plan_that_need_not_move_values_is_priced_without_all_layers(monkeypatch):
    plan_search = of(llama(num_hidden_layers=DEEP), cluster=SLOW)
    monkeypatch.setattr(Search, "_timed_whole", None)
    here = Shape(4, 1, 1, 3, 1)
    resting, moving = plan_search.price(here), plan_search.price(replace(here, offload=True))
    assert moving.seconds == resting.seconds and moving.peak == resting.peak
    assert resting.plan.offload.is_none and not moving.plan.offload.is_none


def test_ways_to_move_that_do_not_look_likely_are_tried_where_no_other_fits(monkeypatch):
    """What few layers say leaves out work, and no plan."""
    alone = {**SLOW, "devices": 1, "hosts": 1, "levels": SLOW["levels"][:1]}
    held = int(of(llama(num_hidden_layers=DEEP), cluster=alone).held(Shape()))

    def priced():
        plan_search = of(llama(num_hidden_layers=DEEP), cluster=alone, memory=WORKSPACE + held)
        return plan_search.price(Shape(offload=True))

    guided = priced()
    monkeypatch.setattr(Search, "_may_fit", lambda self, shape, written: lambda way: False)
    assert guided.fits and guided.seconds == priced().seconds


def test_a_deep_model_that_must_move_values_fits_as_it_is_lowered():
    alone = {**SLOW, "devices": 1, "hosts": 1, "levels": SLOW["levels"][:1]}
    free = of(llama(num_hidden_layers=DEEP), cluster=alone)
    held = int(free.held(Shape()))
    plan_search = of(llama(num_hidden_layers=DEEP), cluster=alone, memory=WORKSPACE + held)
    best = plan_search.run().best
    assert plan_search.shallow is not None and best.shape.offload
    program = best.outcome.lowered.program
    times = clock(program, plan_search.cluster.hardware, compiled=program.blocks)
    assert times.peak[DEVICE] == best.peak <= WORKSPACE + held
    assert times.seconds == pytest.approx(best.seconds)


class Layer(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.wide = wide

    def forward(self, x):
        return x + (torch.tanh(self.fc(x)) if self.wide else torch.relu(self.fc(x)))


class Stack(nn.Module):
    def __init__(self, kinds, numbered: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, kinds))
        self.numbered = numbered

    def forward(self, x, y):
        for i in range(len(self.layers) if not self.numbered else 12):
            x = self.layers[i](x)
        return ((x - y) ** 2).mean()


def batch():
    return {"x": torch.empty(8, 32, device="meta"), "y": torch.empty(8, 32, device="meta")}


def test_layers_that_take_turns_are_left_out_in_turns():
    plan_search = of(Stack([False, True] * 6), batch())
    assert plan_search.shallow is not None and [x.period for x in plan_search.shallow.lists] == [2]


def test_layers_without_a_pattern_are_all_planned():
    assert of(Stack([k in (1, 2, 6, 7, 11) for k in range(12)]), batch()).shallow is None


def test_code_that_counts_on_all_layers_is_planned_as_it_is():
    plan_search = of(Stack([False] * 12, numbered=True), batch())
    assert plan_search.shallow is None and plan_search.price(Shape(4)).fits


def test_a_model_has_all_its_layers_again():
    model = Stack([False] * 12)
    (layers,) = layer_lists(model)
    with pytest.raises(ZeroDivisionError), shortened({layers: FEW}):
        assert len(model.layers) == FEW
        raise ZeroDivisionError
    assert len(model.layers) == 12 and len(list(model.parameters())) == 24


def test_twice_as_many_layers_are_no_more_work(monkeypatch):
    """Of a search: what is laid out and priced, counted in equations; seconds are those of `bench/plans.py depth`."""
    work = []
    for layers in (32, 64):
        equations, laid_out = [0], LaidOut.of

        def counted(task, written, laid_out=laid_out, equations=equations):
            equations[0] += sum(len(block.eqns) for block in task.program.blocks.values())
            return laid_out(task, written)

        monkeypatch.setattr(LaidOut, "of", counted)
        given = {"mesh": {"dp": 4}, "zero": 3, "microbatches": 1}
        plan_search = of(llama(num_hidden_layers=layers), cluster=SLOW, given=given)
        plan_search.run()
        monkeypatch.setattr(LaidOut, "of", laid_out)
        blocks = plan_search.program.blocks
        work.append((equations[0], sum(len(b.eqns) for name, b in blocks.items() if b is not plan_search.program.main)))
    (few, distinct), (many, all_distinct) = work
    assert few > 0 and many <= 1.2 * few and all_distinct == distinct
