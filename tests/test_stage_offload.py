"""Stages of a pipeline that keep values, optimiser state, parameters and gradients on the host: to the bit what they
are without, within the memory of each rank.  (In processes: `pipeline_child.py`.)"""

from __future__ import annotations

import pytest
import torch
from distributing import OneDevice, start_values
from test_stages import tied

from mycel.errors import PlanError
from mycel.ir import DEVICE, HOST, Layout
from mycel.lower import Lowered
from mycel.parts import ShardedModel
from mycel.plan import CPU, Clock, Plan
from mycel.planning import Task, planned
from mycel.run import moves, simulate_stages
from mycel.run.simulate import spread_out

STATE = {"activations": "host", "optimizer": "host"}
ALL = {**STATE, "parameters": "host", "gradients": "host"}


def task_of(one: OneDevice, written: Plan, budget: int | None = None) -> Task:
    inside = (
        ShardedModel(one.model, one.optimizer, written.inside).given(one.unsharded) if written.inside.mesh.axes else ()
    )
    return Task(one.unsharded.program, one.unsharded.body, CPU, False, *inside, budget=budget)


def simulated(one: OneDevice, task: Task, written: Plan, done: Lowered) -> list:
    mesh, serial = written.inside.mesh, one.unsharded.program
    laid = [(task.inputs or {}).get(i, Layout.whole(v.type.ndim)) for i, v in enumerate(serial.inputs)]
    given = {
        serial.role(v): spread_out(x, layout, mesh)
        for v, x, layout in zip(serial.inputs, start_values(one), laid, strict=True)
    }
    programs = done.pipeline.programs
    return simulate_stages(programs, mesh, "pp", [[given[p.role(v)] for v in p.inputs] for p in programs])


@pytest.fixture(scope="module")
def one() -> OneDevice:
    return tied(4)


HALVES = ["embed", "layers.2"]
PLANS = [
    {"stages": ["embed", "layers.1", "layers.2", "layers.3"], "schedule": "zbv"},
    {"stages": HALVES, "schedule": "1f1b", "mesh": {"dp": 2}, "batch": ["dp"], "zero": "1 over dp"},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["schedule"])
def test_to_the_bit_what_they_are_without(one, plan):
    """All values that can leave do, on each rank its own; a plan read back makes the same programs."""
    outs = []
    for offload in ("none", ALL):
        written = Plan.read({**plan, "microbatches": 4, "offload": offload})
        task = task_of(one, written)
        decided, done = planned(task, written)
        assert all(moves(p) == (offload != "none") for p in done.pipeline.programs)
        again = planned(task, Plan.read(decided.data()))[1]
        assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
        outs.append(simulated(one, task, written, done))
        by_rank = decided.decided.moved_by_rank
        assert len(by_rank) == 2 * (offload != "none") and all(m.streamed for m in by_rank)
        assert not by_rank or by_rank[0].moved  # the last stage of 1f1b goes back at once
        assert all(m.inside for m in by_rank)  # parameters come inside the steps
    for plain, moved in zip(*outs, strict=True):
        assert all(all(map(torch.equal, x, y)) for x, y in zip(plain, moved, strict=True))


def test_parameters_come_inside_steps_and_sums_leave_between_them():
    """Matrices live on the host, and come layer by layer for each microbatch; a sum of gradients is on the device
    while a microbatch is added to it.  So a rank holds less than with its parameters or its sums on the device."""
    wide = tied(4, width=64)
    peaks = {}
    for name, offload in (("state", STATE), ("parameters", {**STATE, "parameters": "host"}), ("all", ALL)):
        written = Plan.read({"stages": HALVES, "schedule": "gpipe", "microbatches": 4, "offload": offload})
        decided, done = planned(task_of(wide, written), written)
        peaks[name] = decided.predicted.peak
        for program in done.pipeline.programs if name == "all" else ():
            parameters = program.inputs_of("parameter")
            assert {v.type.ndim > 1 for v in parameters if v.type.space == HOST} == {True}
            assert all(v.type.space == HOST for v in parameters if v.type.ndim > 1)
            makers = {v: e.op.name for e in program.main.eqns for v in e.outputs}
            left = [
                makers[e.inputs[0]] for e in program.main.eqns if e.op.name == "begin_move" and e.inputs[0] in makers
            ]
            assert left.count("add") > len(parameters)  # sums, of more than one microbatch
    assert peaks["all"] < peaks["parameters"] < peaks["state"]


def test_a_budget_is_kept_by_each_rank(one):
    """Where computing nothing again does not fit, values leave; no rank needs more than is predicted."""
    plan = {"stages": HALVES, "schedule": "gpipe", "microbatches": 4, "recompute": "none"}
    free = planned(task_of(one, Plan.read(plan)), Plan.read(plan))[0].predicted
    budget = int(0.85 * free.peak)
    with pytest.raises(PlanError, match="too much"):
        planned(task_of(one, Plan.read(plan), budget), Plan.read(plan))
    written = Plan.read({**plan, "offload": "auto"})
    decided, done = planned(task_of(one, written, budget), written)
    assert decided.predicted.peak <= budget < free.peak and decided.predicted.host > 0
    assert decided.predicted.seconds >= free.seconds
    clock = Clock(CPU, CPU.links(written.mesh), moves=True)
    alone = [clock(p, ()).peak[DEVICE] for p in done.pipeline.programs]
    assert max(alone) == decided.predicted.peak


def test_zeros_that_a_sum_begins_with_stay(one):
    written = Plan.read({"stages": 2, "microbatches": 4, "offload": {"activations": "host"}})
    programs = planned(task_of(one, written), written)[1].pipeline.programs
    producers = {v: e for p in programs for e in p.main.eqns for v in e.outputs}
    left = [producers[e.inputs[0]].op.name for p in programs for e in p.main.eqns if e.op.name == "begin_move"]
    assert "call" in left and "full" not in left
