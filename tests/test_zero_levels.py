"""ZeRO by kinds of parameters: the same step as on one device, what is held whole is not gathered, and the search holds
whole what memory has room for."""

from __future__ import annotations

import pytest
import torch
from distributing import OneDevice, compared, ready_to_run, start_values
from models import llama
from test_search import of, tokens

from mycel.errors import PlanError
from mycel.ir import Mesh, Program, walk
from mycel.ops.written_inputs import gathered_into, given_away
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.run.emit import emit

MIXED = {"*norm*": 1, "*.up_proj.weight": 2, "*.o_proj.weight": 0, "*": "3 over dp"}


def plan_of(zero, **more) -> Plan:
    return Plan.read({"mesh": {"dp": 4}, "batch": ["dp"], "zero": zero, **more})


@pytest.fixture(scope="module")
def one():
    ids = torch.randint(0, 64, (8, 16))
    return OneDevice.of(llama(), {"input_ids": ids, "labels": ids}, clip_norm=1.0)


def gathers(program: Program) -> int:
    return sum(e.op.name == "all_gather" or e.params.get("op") == "all_gather" for _, e in walk(program))


def test_serial_is_parallel_and_less_is_gathered(one):
    counts = {}
    for name, zero in (("all", "3 over dp"), ("mixed", MIXED)):
        distributed = one.under(plan_of(zero))
        local = ready_to_run(distributed)
        compared(one.unsharded.program, distributed, Mesh(dp=4), start_values(one), local)
        counts[name] = gathers(distributed.local)
    assert 0 < counts["mixed"] < counts["all"]


def test_each_kind_is_held_as_it_says(one):
    parts = ShardedModel(one.model, one.optimizer, plan_of(MIXED))
    parts.given(one.unsharded)
    name = "model.layers.0.{}.weight".format
    for kind, is_split, state_is_split in (
        ("input_layernorm", False, True),
        ("mlp.up_proj", False, True),
        ("self_attn.o_proj", False, False),
        ("self_attn.q_proj", True, True),
    ):
        assert (parts.layouts[name(kind)].is_whole, parts.stored[name(kind)].is_whole) == (
            not is_split,
            not state_is_split,
        ), kind


@pytest.mark.parametrize("level", [1, 2, 3])
def test_state_is_updated_where_it_lies(one, level):
    """Of what an update writes, the parts of parameters that ranks hold whole are copied first, and nothing else."""
    local = ready_to_run(one.under(plan_of(f"{level} over dp")))
    updates = {i: e for i, e in enumerate(local.main.eqns) if e.op.inplace is not None}
    assert updates and given_away(local).keys() == updates.keys()
    for i, eqn in updates.items():
        copied = {k for k in given_away(local)[i] if k < len(eqn.outputs)}
        assert copied == (set(range(eqn.params["count"])) if level < 3 else set())


@pytest.mark.parametrize("level", [1, 2])
def test_parameters_are_gathered_where_they_lie(one, level):
    """Of a step that updates parts of parameters, each whole one is received into the parameter itself."""
    local = ready_to_run(one.under(plan_of(f"{level} over dp")))
    updated = dict(zip(local.main.outputs[-len(local.updates) :], local.updates, strict=True))
    ends = {i: e for i, e in enumerate(local.main.eqns) if e.op.name == "finish" and e.params["op"] == "all_gather"}
    wanted = {i: [updated.get(y) for y in e.outputs] for i, e in ends.items()}
    assert {i: [v and v.name for v in places] for i, places in gathered_into(local).items()} == wanted
    assert sum(name is not None for names in wanted.values() for name in names) == len(list(one.model.parameters()))
    assert ".copy_(all_gather" not in emit(local, donate=True, reuse=True)


def test_it_is_written_and_read_back():
    plan = plan_of(MIXED)
    assert Plan.read(plan.data()) == plan and plan.data()["zero"] == MIXED
    assert (plan.zero, plan.over, plan.level("a.norm.weight"), plan.level("head")) == (3, ("dp",), 1, 3)


@pytest.mark.parametrize(
    "zero, said",
    [
        ({"*norm*": 1}, 'has no "*"'),
        ({"*norm*": 3, "*": "1 over dp"}, 'norm*: 3, but "*": 1 over dp'),
        ({"*norm*": "1 over tp", "*": "3 over dp"}, "the axes"),
        ({"*norm*": 7, "*": "3 over dp"}, "zero is '7'"),
    ],
    ids=str,
)
def test_nonsense_is_refused(zero, said):
    with pytest.raises(PlanError, match=said.replace("*", r"\*")):
        plan_of(zero)


def test_a_pattern_that_matches_nothing_is_refused(one):
    with pytest.raises(PlanError, match=r"zero: \*\.up_prj\.weight matches no parameter\n  try .*up_proj"):
        one.under(plan_of({"*.up_prj.weight": 1, "*": "3 over dp"}))
    with pytest.raises(PlanError, match=r"zero: #\?§ matches no parameter, and none is near it\n  known .* in all\)$"):
        one.under(plan_of({"#?§": 1, "*": "3 over dp"}))


LATE = {  # every message takes long to begin
    "device": {"half": 1e12, "bytes_s": 2e11, "memory": "1GiB", "launch_s": 1e-7},
    "devices": 4,
    "hosts": 1,
    "levels": [{"bytes_s": 1e10, "start_s": 1e-4}],
}


def test_the_search_holds_whole_what_there_is_room_for():
    """With room for some of the parameters the plan lies between that for none of them and that for all."""
    model = llama(num_hidden_layers=2, hidden_size=128, intermediate_size=352)
    free = of(model, tokens(), LATE, given={"mesh": {"dp": 4}, "zero": 1, "microbatches": 1}).run().best
    tight = of(model, tokens(), LATE, given={"mesh": {"dp": 4}, "zero": 3, "microbatches": 1}).run().best
    assert free is not None and tight is not None and free.peak > tight.peak
    budget = int(0.6 * tight.peak + 0.4 * free.peak)
    plan_search = of(model, tokens(), LATE, memory=budget, given={"mesh": {"dp": 4}, "microbatches": 1})
    best = plan_search.run().best
    assert best is not None and best.peak <= budget
    assert best.shape.levels, str(best.shape)
    plain = [c for c in plan_search.candidates.values() if c.fits and not c.shape.levels]
    assert best.seconds < min(c.seconds for c in plain)
