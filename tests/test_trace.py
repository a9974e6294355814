"""Traces of steps: which part of a program ran when, beside what was predicted; pictures and files of it."""

from __future__ import annotations

import json

import models
import pytest
import torch
from golden import golden
from pages import check_colors

import mycel
from mycel.ir import Mesh
from mycel.plan import Plan, Predicted, clock, hardware_of
from mycel.plan.schedule import StageCosts, named, step_name, timeline
from mycel.run.trace import STEP, Span, chrome_trace
from mycel.schedule_page import schedule_page
from mycel.step.step_trace import StepTrace

COSTS = StageCosts((1.0, 2.0), (1.5, 1.5), (0.5, 1.0), 0.1)


def one_step() -> tuple[mycel.Step, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = models.llama(), models.text()
    return mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), {**batch, "labels": batch["input_ids"]}


def test_of_one_device():
    """Layers are timed inside the step, as often as they run; afterwards nothing is."""
    step, batch = one_step()
    step(**batch)
    with step.trace() as trace:
        step(**batch)
    (spans,) = trace.spans
    whole = next(s for s in spans if s.block == STEP)
    layers = [s for s in spans if s.block.startswith("llama_decoder_layer_forward")]
    assert [s.call for s in layers] == list(range(len(layers))) and len(layers) > 1
    assert all(whole.start_s <= s.start_s <= s.end_s <= whole.end_s for s in spans)
    step(**batch)
    assert trace.spans == [spans] and step.traced is trace
    assert "measured step" in step.explain()


def test_a_block_is_timed_without_the_messages_in_it():
    """One step of this rank, by blocks and messages, beside the clock's; a step that has ended is timed no more."""
    step, batch = one_step()
    step(**batch)
    with step.timing() as timed:
        step(**batch)
    hardware = hardware_of(torch.device("cpu"))
    real = timed.parts(hardware)
    names = [p.name.rpartition("_")[0] for p in real]
    assert names == [f"llama_decoder_layer_{x}" for x in ("forward", "backward")] and {p.calls for p in real} == {3}
    times = clock(step.program, hardware)
    assert sum(p.predicted_s for p in real) < times.seconds and all(p.predicted_s and p.measured_s for p in real)
    took = [p.measured_s for p in real]
    step(**batch)
    assert [p.measured_s for p in timed.parts(hardware)] == took
    layer = real[0].name
    timed.spans = [
        Span(layer, 0, 10.0, 20.0), Span("all_reduce", 0, 12.0, 15.0, "dp"), Span(layer, 1, 30.0, 31.0),
        Span("all_reduce", 1, 40.0, 42.0, "dp"), Span(STEP, 0, 0.0, 50.0),
    ]  # fmt: skip
    block, message = timed.parts(hardware)
    assert (block.kind, block.calls, block.measured_s) == ("block", 2, 8.0)
    assert block.predicted_s == pytest.approx(2 / 3 * real[0].predicted_s)
    assert (message.kind, message.name) == ("all_reduce over network", "all_reduce over dp")
    assert (message.calls, message.measured_s, message.predicted_s) == (2, 5.0, 0.0)


def trace_of(name: str) -> StepTrace:
    """A step that took twice as long as predicted."""
    schedule = named(name, 2, 3)
    plan = Plan(Mesh(), stages=2, schedule=name, predicted=Predicted(0, 0, steps=COSTS))
    times = timeline(schedule, COSTS)
    spans = [
        [Span(STEP, 0, 100.0, 200.0)]
        + [Span(step_name(x.kind, x.stage), x.microbatch, 110 + 2 * times.start[x], 110 + 2 * times.end[x]) for x in o]
        for o in schedule.orders
    ]
    return StepTrace(plan, schedule, spans)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_of_a_pipeline_is_its_schedule(name):
    trace = trace_of(name)
    predicted, measured = trace.predicted, trace.measured
    assert predicted is not None and measured is not None
    assert measured.schedule.orders == predicted.schedule.orders
    assert measured.seconds == pytest.approx(2 * predicted.seconds)
    assert measured.idle == pytest.approx([2 * x for x in predicted.idle])
    assert str(trace).startswith("  measured ")


def test_chrome():
    events = json.loads(trace_of("1f1b").chrome())["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert rows == ["rank 0", "rank 1", "predicted, pp 0", "predicted, pp 1"]
    boxes = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["name"] for e in boxes][:3] == ["step", "forward_1.0", "backward_1.0"]
    assert boxes[1]["ts"] == pytest.approx(10e6 + 2 * 1.1e6) and boxes[1]["dur"] == pytest.approx(4e6)
    assert json.loads(chrome_trace({}))["traceEvents"] == []


def test_page():
    page = schedule_page({"predicted": timeline(named("zbh1", 2, 2), COSTS), "measured": None})
    check_colors(page)
    golden("schedule_page", page)


def test_before_the_first_step():
    step, _ = one_step()
    with pytest.raises(mycel.errors.TrainError, match="has not seen a batch yet"), step.trace():
        pass
