"""The law of pipelines: the programs of all stages, run together, do what the serial step does, wherever it is cut,
under every schedule, whatever lies inside a stage; and what is sent and held is what the cut asks for."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace

import models
import pytest
import torch
from distributing import OneDevice, start_values
from golden import golden
from pipelining import Tied, local_program, pipeline_equals, stages_equal
from torch import nn

import mycel
from mycel.errors import PlanError, RunError
from mycel.ir import Mesh, Program, Role
from mycel.lower.interleave import interleave
from mycel.lower.stage_sums import plain_sums
from mycel.lower.stages import pipelined
from mycel.ops import o
from mycel.parts import ShardedModel
from mycel.plan import CPU, Plan
from mycel.plan.schedule import NAMED, named
from mycel.plan.stages import StepFlow, starts_of
from mycel.planning import Task, planned
from mycel.run import simulate, simulate_stages
from mycel.run.simulate import spread_out


class Normed(nn.Module):
    """Running means, which each microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), labels)


def tied(microbatches: int = 4, layers: int = 4, dropout: float = 0.0, width: int = 4, **settings) -> OneDevice:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 12, (8, 3))}
    batch["labels"][:3] = -100  # microbatches count unequally
    return OneDevice.of(
        Tied(layers, dropout, width).double(), batch, accumulate=microbatches, **{"clip_norm": 0.05, **settings}
    )


@pytest.fixture(scope="module")
def steps() -> dict[int, OneDevice]:
    return {m: tied(m) for m in (2, 4)}


INNER = {
    "alone": None,
    "dp": Plan(Mesh(dp=2), batch=["dp"]),
    "zero1": Plan(Mesh(dp=2), batch=["dp"], zero=1, over=("dp",)),
    "zero3": Plan(Mesh(dp=2), batch=["dp"], zero=3, over=("dp",)),
    "tp": Plan(Mesh(tp=2), {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}, loose=True),
    "dp tp": Plan(
        Mesh(dp=2, tp=2), {"*.up.weight": ["tp", "-"], "embed.weight": ["tp", "-"]}, ["dp"], zero=2, over=("dp",)
    ),
}


MODELS = [  # layers, microbatches, dropout, clip_norm
    (1, 2, 0.0, 0.05),
    (1, 4, 0.2, None),
    (2, 2, 0.0, 0.05),
]
SCHEDULES = [*NAMED, "interleaved 3"]
CASES = {"alone": 84, "dp": 66, "zero1": 60, "zero3": 42, "tp": 36, "dp tp": 18}  # 306 in all, fewer of what takes long


@functools.cache
def made_by_chance(model: int) -> OneDevice:
    layers, microbatches, dropout, clip = MODELS[model]
    return tied(microbatches, layers, dropout, clip_norm=clip)


@pytest.mark.parametrize("inner", INNER)
def test_pipelined_is_serial(inner):
    """Each schedule with each of what lies inside a stage, several times; the model, the number of ranks, where stages
    begin (also in the middle of a line) and what is in the tensors by chance."""
    programs = [local_program(made_by_chance(i), INNER[inner]) for i in range(len(MODELS))]
    for case in range(CASES[inner]):
        rng, at = random.Random(f"{inner} {case}"), case % len(MODELS)
        one, known, ranks = made_by_chance(at), programs[at], rng.randint(2, 4)
        flow = StepFlow(known[0], one.unsharded.body)
        schedule = named(SCHEDULES[case % len(SCHEDULES)], ranks, flow.body.length)
        if schedule.stages > len(flow.units):
            schedule = named("1f1b", min(ranks, len(flow.units)), flow.body.length)
        poison = rng.random() < 0.1
        pipeline_equals(one, schedule, rng, INNER[inner], rng.randrange(99), poison, known)


FAMILIES = {
    "llama": (models.llama, models.text, "interleaved"),
    "gpt2": (models.gpt2, models.text, "zbv"),
    "bert": (models.bert, models.padded, "1f1b"),
    "t5": (models.t5, models.seq2seq, "zbh1"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    pipeline_equals(of_family(family, 4), named(FAMILIES[family][2], 2, 4), random.Random(family))


def of_family(family: str, microbatches: int) -> OneDevice:
    make, batch_of, _ = FAMILIES[family]
    torch.manual_seed(0)
    model, batch = make().double(), batch_of()
    batch = {k: torch.cat([x, x.flip(1)]) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}
    batch.setdefault("labels", batch["input_ids"].flip(1))
    return OneDevice.of(model, batch, accumulate=microbatches, clip_norm=0.1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("names, sizes", [("cp", {"cp": 2}), ("zero1+cp", {"dp": 2, "cp": 2})])
def test_sequences_in_parts_inside_a_stage(names, sizes, schedule):
    rng, inner = random.Random(schedule), Plan.read(names, Mesh(sizes))
    pipeline_equals(of_family("llama", 2), named(schedule, 2, 2), rng, inner)


class Answering(Normed):
    """Gives what it answers beside the loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x, labels), "answer": self.body(x), "first": self.body[0](x).sum()}


@pytest.mark.parametrize("kind", ["dropout", "skipped", "batch norm", "outputs", "bf16", "fp16", "grads", "sgd"])
def test_kinds_of_steps(kind):
    rng = random.Random(kind)
    if kind in ("batch norm", "outputs"):
        torch.manual_seed(0)
        batch = {"x": torch.randn(8, 4), "labels": torch.randint(0, 3, (8,))}
        outputs = kind == "outputs"
        one = OneDevice.of(Answering() if outputs else Normed(), batch, accumulate=2, outputs=outputs)
        starts = ["body.3"]
        local, _ = local_program(one, None)
        flow = StepFlow(local, one.unsharded.body)
        names = [flow.block.eqns[i].outputs[0].name for i in starts_of(flow, ["body.0", *starts])]
        pipeline_equals(one, named("gpipe", 2, 2), names)
        return
    settings = {"bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}, "grads": {"grads": True}}.get(kind, {})
    one = tied(dropout=0.2 if kind == "dropout" else 0.0, **settings)
    if kind == "sgd":
        one = OneDevice.of(one.model, one.batch, torch.optim.SGD(one.model.parameters(), lr=0.1), accumulate=4)
    pipeline_equals(one, named("zbv", 2, 4), rng, poison=kind == "skipped")


def test_a_stage_that_is_the_sum_of_two_losses(steps):
    """Of two microbatches that go through the stages together: the last stage has nothing but what adds them."""
    one, body = steps[4], steps[4].unsharded.body
    local = plain_sums(interleave(local_program(one, None)[0], body, staged=True), body)
    flow = StepFlow(local, body)
    first, last = (flow.block.eqns[flow.units[i]].outputs[0].name for i in (-2, -1))
    assert flow.makers[flow.sums[0].addend] == flow.units[-1] and flow.block.eqns[flow.units[-1]].op is o.add
    pipeline_equals(one, named("1f1b", 3, 2), [first, last], known=(local, None))


def at_layers(one: OneDevice, *layers: int, inner: Plan | None = None) -> tuple[Program, list[str]]:
    local, _ = local_program(one, inner)
    flow = StepFlow(local, one.unsharded.body)
    starts = starts_of(flow, ["embed", *(f"layers.{i}" for i in layers)])
    return local, [flow.block.eqns[i].outputs[0].name for i in starts]


def test_what_is_sent(steps):
    """Between neighbours one activation up and one cotangent down for each microbatch; of what they share, the sums of
    the whole step alone; and the loss to everyone."""
    one = steps[4]
    local, starts = at_layers(one, 1, 2, 3)
    pipeline = pipelined(local, one.unsharded.body, starts, named("1f1b", 4, 4), "pp")
    sent = Counter()
    for rank, program in enumerate(pipeline.programs):
        for eqn in program.main.eqns:
            if eqn.op.name == "begin_send":
                sent[rank, eqn.params["to"], tuple(eqn.inputs[0].shape)] += 1
    activation = (2, 3, 4)
    up = {(r, r + 1, activation): 4 for r in range(3)}
    down = {(r + 1, r, activation): 4 for r in range(3)}
    loss = {(3, r, ()): 1 for r in range(3)}
    shared = {(3, 0, (12, 4)): 1, (0, 3, (12, 4)): 1}
    assert sent == {**up, **down, **loss, **shared}


def test_who_holds_what(steps):
    one = steps[4]
    local, starts = at_layers(one, 2)
    owners = pipelined(local, one.unsharded.body, starts, named("1f1b", 2, 4), "pp").owners
    assert owners[Role("parameter", "embed.weight")] == (0, 1)
    assert owners[Role("state", "exp_avg", of="embed.weight")] == (0, 1)
    assert owners[Role("parameter", "layers.1.up.weight")] == (0,)
    assert owners[Role("state", "exp_avg_sq", of="layers.2.up.weight")] == (1,)
    assert owners[Role("counter", "skipped")] == (0, 1)


def test_weights_are_a_step_of_their_own(steps):
    """What is waited for holds no product of weights, and all of these are in the steps of weights."""
    one = steps[4]
    local, starts = at_layers(one, 2)
    last = pipelined(local, one.unsharded.body, starts, named("zbh1", 2, 4), "pp").programs[1]

    def operators(name: str) -> list[str]:
        eqns = last.blocks[name].eqns
        return [op for e in eqns for op in (operators(e.params["block"]) if e.op.name == "call" else [e.op.name])]

    assert "linear_weight" not in operators("backward_1") and operators("weight_1").count("linear_weight") == 5


def test_golden(steps):
    local, starts = at_layers(tied(2, 2, clip_norm=None), 1)
    pipeline = pipelined(local, "part", starts, named("1f1b", 2, 2), "pp")
    golden("stages", "\n\n".join(f"rank {r}\n\n{p}" for r, p in enumerate(pipeline.programs)))


def test_stages_that_wait_for_each_other_are_named():
    texts = [
        """
def main(x: f32[2]):
  t: i64[] = begin_receive(axes=("pp",), count=2, dtypes=(f32,), shapes=((2,),), source=1, tag=1)  # a.py:1
  y: f32[2] = finish_receive(t, axes=("pp",), count=2, dtypes=(f32,), shapes=((2,),), source=1, tag=1)  # a.py:1
  u: i64[] = begin_send(y, axes=("pp",), count=2, tag=0, to=1)
  return y
""",
        """
def main(x: f32[2]):
  t: i64[] = begin_receive(axes=("pp",), count=2, dtypes=(f32,), shapes=((2,),), source=0, tag=0)  # b.py:7
  y: f32[2] = finish_receive(t, axes=("pp",), count=2, dtypes=(f32,), shapes=((2,),), source=0, tag=0)  # b.py:7
  u: i64[] = begin_send(y, axes=("pp",), count=2, tag=1, to=0)
  return y
""",
    ]
    programs = [Program.parse(text) for text in texts]
    with pytest.raises(RunError) as e:
        simulate_stages(programs, Mesh(), "pp", [[[torch.ones(2)]]] * 2)
    assert str(e.value).splitlines() == [
        "the stages wait for each other and nobody can go on",
        "  stage 0   at a.py:1: waits for message 1 of stage 1",
        "  stage 1   at b.py:7: waits for message 0 of stage 0",
    ]


def test_refusals(steps):
    local, _ = local_program(steps[4], None)
    flow = StepFlow(local, "part")
    with pytest.raises(PlanError, match="no part of the step reads a parameter of it"):
        starts_of(flow, ["embed", "layer.9"])
    with pytest.raises(PlanError, match=r"stages: embedd: the model has no parameter of it\n.*such as embed"):
        starts_of(flow, ["embedd", "layers.1"])
    with pytest.raises(PlanError, match="one after the other"):
        starts_of(flow, ["embed", "layers.2", "layers.1"])
    with pytest.raises(PlanError, match="which this step does not make on its way forward"):
        pipelined(local, "part", ["nothing"], named("1f1b", 2, 4), "pp")


class Recurrent(nn.Module):
    """A stack of cells that a loop over a tensor goes through, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.cells = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        i = torch.zeros((), dtype=torch.long)
        while (x.abs().sum() > 0) & (i < 3):
            x = torch.tanh(self.cells[1](torch.tanh(self.cells[0](x))))
            i = i + 1
        return nn.functional.cross_entropy(self.last(x), labels)


def test_what_cannot_be_a_pipeline_is_told():
    """Each with its numbers, where, and what to try."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "labels": torch.randint(0, 3, (8,))}
    looped = OneDevice.of(Recurrent(), batch, accumulate=2)
    few = tied(2, layers=1)

    def under(one: OneDevice, budget: int | None = None, **plan: object) -> None:
        task = Task(one.unsharded.program, one.unsharded.body, CPU, budget=budget)
        planned(task, Plan.read(plan))

    cases = {
        "more stages than there are parts": lambda: under(few, stages=40),
        "a cut inside a loop": lambda: under(looped, stages=["first", "cells.0", "cells.1"]),
        "a module that is not there": lambda: under(looped, stages=["first", "cell"]),
        "modules in another order": lambda: under(looped, stages=["first", "last", "cells"]),
        "one microbatch": lambda: under(tied(1), stages=2),
        "a schedule for other numbers": lambda: under(few, stages=3, schedule="zbv"),
        "a stage that does not fit": lambda: under(few, 2000, stages=2),
    }
    messages = []
    for name, refused in cases.items():
        with pytest.raises(PlanError) as e:
            refused()
        messages.append(f"-- {name}\n{e.value}")
    golden("refusal_stages", "\n\n".join(messages))


def test_gradients_one_step_late():
    """`sync: {dp: delayed}`: the gradients that a step is taken with, and their norm, are those that each stage kept of
    its own parameters."""
    late = {"mesh": {"dp": 2}, "batch": ["dp"], "microbatches": 4, "sync": {"dp": "delayed(ahead=0.9)"}}
    inner = Plan.read(late)
    one = tied(1, 2, plan=inner)
    pipeline = pipeline_equals(one, named("1f1b", 2, 4), at_layers(one, 1, inner=inner)[1], inner)
    roles = [{p.role(v).of for v in p.inputs_of("delayed")} for p in pipeline.programs]
    assert roles[0] and roles[1] and roles[0] | roles[1] != roles[0]


def test_compressed_gradients():
    """Each stage encodes the gradients of its own parameters, and keeps what was lost of them: new parameters, state
    and errors are those of the same ranks without stages."""
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 12, (8, 3))}
    model = Tied(2, width=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flat = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "microbatches": 2, "compress": {"dp": "int8+ef"}})
    unsharded = mycel.train_step(model, optimizer, compile=False, plan=flat, clip_norm=0.1).unsharded(**batch)
    one = OneDevice(model, batch, optimizer, unsharded)
    task = Task(unsharded.program, unsharded.body, CPU, False, *ShardedModel(model, optimizer, flat).given(unsharded))
    alone = planned(task, flat)[1]
    stages = planned(task, replace(flat, stages=("embed", "layers.1")))[1].pipeline
    roles = [{p.role(v).of for v in p.inputs_of("error")} for p in stages.programs]
    assert roles[0] and roles[1] and not roles[0] & roles[1]
    given = {
        unsharded.program.role(v): spread_out(x, layout, flat.mesh)
        for v, x, layout in zip(unsharded.program.inputs, start_values(one), alone.spread.inputs, strict=True)
    }
    results = simulate(alone.program, flat.mesh, [given[alone.program.role(v)] for v in alone.program.inputs])
    news = dict(zip(alone.program.updates, results[-len(alone.program.updates) :], strict=True))
    inputs = [[given[p.role(v)] for v in p.inputs] for p in stages.programs]
    for p, outs in zip(stages.programs, simulate_stages(stages.programs, flat.mesh, "pp", inputs), strict=True):
        for name, parts in zip(p.updates, outs[-len(p.updates) :], strict=True):
            torch.testing.assert_close(parts, news[name], rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:accumulate")
@pytest.mark.parametrize(
    "more",
    [
        {"mesh": {"dp": 2}, "batch": ["dp"]},
        {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "1 over dp", "schedule": "zbh1"},
        {"mesh": {"tp": 2}, "parameters": {"body.[03].weight": ["tp", "-"], "body.[03].bias": ["tp"]}},
    ],
    ids=["dp", "zero1", "tp"],
)
def test_statistics_stay_in_the_stage_of_their_norm(more):
    """Also where ranks put parts of them together behind the loop's last backward equation."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 4).double(), "labels": torch.randint(0, 3, (16,))}
    one = OneDevice.of(Normed().double(), batch, accumulate=4)
    plan = Plan.read({"stages": ["body.0", "body.3"], "microbatches": 4, **more})
    given = ShardedModel(one.model, one.optimizer, plan.inside).given(one.unsharded)
    _, done = planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, *given), plan)
    assert done.pipeline is not None
    kept = {role.name: ranks for role, ranks in done.pipeline.owners.items() if role.kind == "buffer"}
    assert kept["body.1.running_mean"] == (0,) and kept["body.4.running_mean"] == (1,)
    stages_equal(one, done.pipeline.programs, done.spread, plan.inside.mesh)
