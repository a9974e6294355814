"""The law of programs without a step, where ranks hold the stages of one: run together, each with what it holds and
nothing else, they give every rank the results of one device."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import torch
from distributing import OneDevice
from golden import golden
from pipelining import Tied, local_program, random_starts
from test_stages import INNER, SCHEDULES, Normed
from torch import nn

from mycel.capture import capture as capture_call
from mycel.forward import evaluating
from mycel.ir import Layout, Mesh, Program, check, type_of
from mycel.local_forward import LocalForward, in_stages, of_whole_model
from mycel.lower import Pipeline, overlap, pipelined
from mycel.objective import objective
from mycel.parts import ShardedModel, UnshardedStep, roles_of
from mycel.plan import CPU, Plan
from mycel.plan.schedule import PipelineSchedule, named
from mycel.plan.stages import StepFlow, starts_of
from mycel.run import interpret, simulate_stages
from mycel.run.simulate import put_together, spread_out
from mycel.step.gradients import prepared
from mycel.step.settings import Settings

SETTINGS = Settings("fp32", 1, None, None, False)


def unsharded_forward(model: nn.Module, fn: Callable[..., Any], batch: Mapping[str, Any]) -> UnshardedStep:
    """What a function makes of a batch, in evaluation mode, before it is laid out."""
    with evaluating(model):
        captured = capture_call(fn, (), dict(batch), known=roles_of(model))
    program = prepared(captured, SETTINGS, True)
    return UnshardedStep(captured, program, (), len(program.results), program.entry)


def held_by_stages(
    one: OneDevice,
    schedule: PipelineSchedule,
    starts: list[str] | random.Random,
    inner: Plan | None = None,
    known: Program | None = None,
) -> ShardedModel:
    """What ranks hold of the model once such a step is cut; `known`: what a rank would run if there was one stage."""
    local = known or local_program(one, inner)[0]
    if isinstance(starts, random.Random):
        starts = random_starts(local, one.unsharded.body, schedule.stages, starts)
    stages = pipelined(local, one.unsharded.body, starts, schedule, "pp")
    sizes = inner.mesh.sizes() if inner is not None else {}
    parts = ShardedModel(one.model, one.optimizer, inner or Plan(Mesh()))
    parts.given(one.unsharded)
    parts.plan = Plan(
        Mesh({"pp": schedule.ranks, **sizes}), *([inner.parameters, inner.batch] if inner else [{}, []]),
        zero=inner.zero if inner else 0, over=inner.over if inner else (), stages=schedule.ranks,
    )  # fmt: skip
    parts.is_split, parts.owners = True, parts.owners_under(stages)
    parts.users = parts._by_all_names(stages.users)
    return parts


def forward_equals(
    parts: ShardedModel, forward: UnshardedStep, batch: Mapping[str, Any], whole: LocalForward | None = None
) -> Pipeline:
    """On simulated ranks, of which each is given what it holds; `whole`: as `of_whole_model` has it."""
    whole = whole or of_whole_model(parts, forward, CPU)
    pipeline = in_stages(parts, whole.program)
    assert pipeline is not None, "no rank needs what others hold"
    programs, mesh = [check(overlap(p)) for p in pipeline.programs], parts.plan.inside.mesh
    serial, spread = forward.program, whole.spread
    state = {name: places[0].read().detach() for name, places in forward.captured.state.items()}
    values = []
    for v in serial.inputs:
        role = serial.role(v)
        given_here = {"batch": batch.get(role.name), "key": torch.tensor(7)}
        values.append(given_here[role.kind] if role.kind in given_here else state[v.name])
    layouts = spread.inputs if spread is not None else [Layout.whole(v.ndim) for v in serial.inputs]
    given = {
        serial.role(v): spread_out(x, layout, mesh) for v, x, layout in zip(serial.inputs, values, layouts, strict=True)
    }
    for rank, program in enumerate(programs):
        for role in map(program.role, program.inputs):
            assert role.kind in given_here or rank in parts.owners.get(role.name, (rank,)), (rank, role)
    results = simulate_stages(programs, mesh, "pp", [[given[p.role(v)] for v in p.inputs] for p in programs])
    outs = spread.outputs if spread is not None else [None] * len(serial.results)
    wanted = list(zip(interpret(serial, values), outs, strict=False))[: len(serial.results)]
    for of_rank in results:
        for each, (want, layout) in zip(of_rank, wanted, strict=True):
            if not isinstance(want, torch.Tensor):
                assert each[0] == want
                continue
            joint = put_together(each, layout or Layout.whole(want.ndim), type_of(want), mesh)
            torch.testing.assert_close(joint, want, rtol=1e-9 if want.dtype == torch.float64 else 2e-5, atol=1e-6)
    return pipeline


CASES = {"alone": 40, "dp": 20, "zero1": 10, "zero3": 20, "tp": 20, "dp tp": 10}


@functools.cache
def tied_step(layers: int, dropout: float) -> tuple[OneDevice, UnshardedStep]:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 12, (8, 3))}
    one = OneDevice.of(Tied(layers, dropout).double(), batch, accumulate=4, clip_norm=0.05)
    return one, unsharded_forward(one.model, objective(one.model, None), batch)


@pytest.mark.parametrize("inner", INNER)
def test_evaluated_in_stages_is_serial(inner):
    """Each schedule with each of what lies inside a stage; where the step is cut, by chance: also in the middle of a
    line."""
    known: dict[Any, tuple[Program, LocalForward]] = {}
    for case in range(CASES[inner]):
        rng = random.Random(f"{inner} {case}")
        kind = rng.randint(1, 2), rng.choice([0.0, 0.2])
        one, forward = tied_step(*kind)
        local = known[kind][0] if kind in known else local_program(one, INNER[inner])[0]
        units = len(StepFlow(local, one.unsharded.body).units)
        schedule = named(SCHEDULES[case % len(SCHEDULES)], rng.randint(2, 4), 4)
        schedule = schedule if schedule.stages <= units else named("1f1b", 2, 4)
        parts = held_by_stages(one, schedule, rng, INNER[inner], local)
        known.setdefault(kind, (local, of_whole_model(parts, forward, CPU)))
        pipeline = forward_equals(parts, forward, one.batch, known[kind][1])
        assert pipeline.schedule.ranks == schedule.ranks and pipeline.schedule.microbatches == 1


FAMILIES = {
    "llama": (models.llama, models.text, "interleaved"),
    "gpt2": (models.gpt2, models.text, "zbv"),
    "bert": (models.bert, models.padded, "1f1b"),
    "t5": (models.t5, models.seq2seq, "zbh1"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Loss and outputs; evaluated with other lengths than were trained with."""
    make, batch_of, name = FAMILIES[family]
    torch.manual_seed(0)
    model, batch = make().double(), batch_of()
    batch.setdefault("labels", batch["input_ids"].flip(1))
    whole = {k: torch.cat([x, x.flip(1)]) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}
    one = OneDevice.of(model, whole, accumulate=4)
    parts = held_by_stages(one, named(name, 2, 4), random.Random(family))

    def loss_and_logits(**batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(**batch)
        return out.loss, out.logits

    forward_equals(parts, unsharded_forward(model, loss_and_logits, batch), batch)


def normed() -> tuple[OneDevice, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "labels": torch.randint(0, 3, (8,))}
    model = Normed()
    model(**batch)  # running means that are none of the first
    return OneDevice.of(model, batch, accumulate=2), batch


def at_modules(one: OneDevice, *names: str) -> list[str]:
    flow = StepFlow(local_program(one, None)[0], one.unsharded.body)
    return [flow.block.eqns[i].outputs[0].name for i in starts_of(flow, names)]


def test_buffers_of_a_stage():
    """Running means, which the step changes, are read by the rank of their stage."""
    one, batch = normed()
    parts = held_by_stages(one, named("1f1b", 2, 2), at_modules(one, "body.0", "body.3"))
    assert parts.owners["body.1.running_mean"] == (0,) and parts.owners["body.4.running_var"] == (1,)
    forward_equals(parts, unsharded_forward(one.model, objective(one.model, None), batch), batch)
    scaled = unsharded_forward(one.model, lambda x, labels: (x @ one.model.body[1].running_mean[:4], labels + 1), batch)
    assert forward_equals(parts, scaled, batch).schedule.place == (0,)  # of a buffer and the batch, without a parameter


def test_functions_that_use_stages_otherwise():
    """Modules in another order than that of the step, twice, or not at all; results that are free, and random ones."""
    one, _ = tied_step(2, 0.2)
    parts = held_by_stages(one, named("1f1b", 3, 4), at_modules(one, "embed", "layers.0", "layers.1"))
    first, second = one.model.layers

    def backwards(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = second(first(second(one.model.embed(ids))))
        drawn = nn.functional.dropout(x, 0.5, training=True)
        return {"x": x, "drawn": drawn, "labels": labels + 1, "again": x, "three": 3}

    def few(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return first(one.model.embed(ids)).argmax(-1) == labels

    forward = forward_equals(parts, unsharded_forward(one.model, backwards, one.batch), one.batch)
    assert forward.schedule.place == (0, 2, 1, 2)
    assert forward_equals(parts, unsharded_forward(one.model, few, one.batch), one.batch).schedule.place == (0, 1)


class Deep(nn.Module):
    """Two equal halves of two equal layers, whose dropouts differ: in evaluation a half is one block."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 * k), nn.Tanh(), nn.Linear(4, 4)) for k in range(4)]
        self.halves = nn.ModuleList([nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            x = half(x)
        return x.square().mean()


def test_blocks_that_hold_several_stages_are_opened():
    torch.manual_seed(0)
    model, batch = Deep(), {"x": torch.randn(8, 4)}
    one = OneDevice.of(model, batch, accumulate=2)
    parts = held_by_stages(one, named("1f1b", 3, 2), at_modules(one, "halves.0.0", "halves.0.1", "halves.1.1"))
    forward = unsharded_forward(model, objective(model, None), batch)
    assert forward_equals(parts, forward, batch).schedule.stages == 3


def test_what_no_rank_can_compute_alone():
    """An equation that reads tensors of two stages is for ranks that have all."""
    one, _ = tied_step(2, 0.0)
    parts = held_by_stages(one, named("1f1b", 2, 4), at_modules(one, "embed", "layers.1"))
    layers = one.model.layers
    for fn in (
        lambda ids, labels: ids @ torch.ones_like(ids).T * (layers[0].up.weight * layers[1].up.weight).sum(),
        lambda ids, labels: layers[0].up.weight,
    ):
        whole = of_whole_model(parts, unsharded_forward(one.model, fn, one.batch), CPU)
        assert in_stages(parts, whole.program) is None


def test_golden():
    one, forward = tied_step(1, 0.0)
    parts = held_by_stages(one, named("1f1b", 2, 4), at_modules(one, "embed", "layers.0.down"))
    pipeline = forward_equals(parts, forward, one.batch)
    golden("forward_stages", "\n\n".join(f"# rank {r}\n{p}" for r, p in enumerate(pipeline.programs)))
