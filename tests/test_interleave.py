"""Two microbatches at once on a device: results are those of one after the other, under any layouts; messages of one
are under way while the other computes, and the clock sees it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from distributing import OneDevice, compared, start_values
from experts import Mixed
from golden import golden
from pipelining import Tied, local_program, pipeline_equals
from test_stage_offload import simulated
from test_stages import INNER, tied

from mycel.errors import PlanError
from mycel.ir import Mesh, Program, call, scan
from mycel.lower.interleave import interleave
from mycel.lower.lowered import Lowered
from mycel.lower.stage_sums import plain_sums
from mycel.ops import o
from mycel.parts import ShardedModel
from mycel.plan import CPU, Plan
from mycel.plan.hardware import KNOWN
from mycel.plan.schedule import named, splits, step_names
from mycel.plan.stages import StepFlow
from mycel.planning import Task, planned

TENSOR = {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}
PLANS = {
    "tp": {"mesh": {"tp": 2}, "parameters": TENSOR},
    "sequence": {"mesh": {"tp": 2}, "parameters": TENSOR, "activations": {"x": ["-", "tp", "-"]}, "loose": True},
    "dp": {"mesh": {"dp": 2}, "batch": ["dp"]},
    "zero3": {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
    "dp tp zero2": {"mesh": {"dp": 2, "tp": 2}, "parameters": TENSOR, "batch": ["dp"], "zero": "2 over dp"},
    "recompute": {"mesh": {"tp": 2}, "parameters": TENSOR, "recompute": "full"},
}


def step_of(width: int = 4, rows: int = 8) -> OneDevice:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 12, (rows, 3)), "labels": torch.randint(0, 12, (rows, 3))}
    batch["labels"][:3] = -100  # microbatches count unequally
    return OneDevice.of(Tied(2, 0.1, width).double(), batch, accumulate=4, clip_norm=0.05)


@pytest.fixture(scope="module")
def one() -> OneDevice:
    return step_of()


def lowered(one: OneDevice, plan: Plan) -> tuple[Plan, Lowered]:
    given, gathered = ShardedModel(one.model, one.optimizer, plan).given(one.unsharded)
    return planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, given, gathered), plan)


@pytest.mark.parametrize("name", PLANS)
def test_two_at_once_are_one_after_the_other(name, one):
    plan = Plan.read({**PLANS[name], "microbatches": 4, "at_once": 2})
    decided, done = lowered(one, plan)
    loop = next(e for e in done.program.main.eqns if e.params.get("body") == one.unsharded.body)
    assert loop.params["length"] == 2
    compared(one.unsharded.program, done.spread, plan.mesh, start_values(one), done.program)
    assert str(lowered(one, Plan.read(decided.data()))[1].program) == str(done.program)


CLIP = {"*.[qkv]_proj.weight": ["tp", "-"], "*.[qkv]_proj.bias": ["tp"], "*.out_proj.weight": ["-", "tp"],
        "*.fc1.weight": ["tp", "-"], "*.fc1.bias": ["tp"], "*.fc2.weight": ["-", "tp"]}  # fmt: skip


@pytest.mark.parametrize("plan", [
    {"mesh": {"tp": 2}, "parameters": CLIP}, {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
])  # fmt: skip
def test_towers_whose_rows_meet_go_two_at_once(plan):
    """Of a loss over the whole batch, features are computed a part at a time and again for their gradients: there are
    two loops over the parts, and both take two."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 50, "max_position_embeddings": 6, "bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
    torch.manual_seed(0)
    images = {"image_size": 8, "patch_size": 4, "attention_dropout": 0.1}
    config = CLIPConfig(text_config={**size, **text}, vision_config={**size, **images}, projection_dim=8)
    ids = torch.randint(2, 49, (8, 6))
    batch = {"input_ids": ids, "pixel_values": torch.randn(8, 3, 8, 8).double(), "return_loss": True}
    one = OneDevice.of(CLIPModel(config).double(), batch, accumulate=4, clip_norm=0.5)
    assert one.unsharded.body == one.unsharded.program.entry
    plan = Plan.read({**plan, "microbatches": 4, "at_once": 2})
    decided, done = lowered(one, plan)
    scans = [e for e in done.program.main.eqns if e.op is scan]
    assert [e.params["length"] for e in scans] == [2, 2] and [e.params.get("reverse", False) for e in scans] == [0, 1]
    assert any(e.op is o.begin for e in done.program.blocks[scans[0].params["body"]].eqns)
    compared(one.unsharded.program, done.spread, plan.mesh, start_values(one), done.program)
    assert str(lowered(one, Plan.read(decided.data()))[1].program) == str(done.program)


LLAMA = {"*.[qkv]_proj.weight": ["tp", "-"], "*.o_proj.weight": ["-", "tp"], "*.mlp.[gu]*.weight": ["tp", "-"],
         "*.down_proj.weight": ["-", "tp"]}  # fmt: skip


def test_regions_leave_sums_alone():
    """Of a large Llama on a GPU, where stretches of equations are compiled as one: sums over microbatches are still
    seen, which two at once hand on, and stages are cut around."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "vocab_size": 8192}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)).to(torch.bfloat16)
    ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")
    one = OneDevice.of(model, {"input_ids": ids, "labels": ids}, accumulate=4)
    gpu = replace(KNOWN["H200"], memory=139 << 30)
    split = {"mesh": {"tp": 2}, "parameters": LLAMA}
    for more in ({**split, "at_once": 2}, {"stages": 2, "schedule": "zbv"}, {**split, "stages": 2, "at_once": 2}):
        plan = Plan.read({"microbatches": 4, **more})
        given, gathered = ShardedModel(one.model, one.optimizer, plan.inside).given(one.unsharded)
        task = Task(one.unsharded.program, one.unsharded.body, gpu, True, given, gathered)
        decided, done = planned(task, plan)
        again = planned(task, Plan.read(decided.data()))[1]
        assert done.regions and again.regions_of == done.regions_of
        pairs = zip(done.pipeline.programs, again.pipeline.programs, strict=True) if done.pipeline else ()
        assert all(str(a) == str(b) for a, b in pairs) and str(again.program) == str(done.program)
        for regions, program in zip(done.regions_of, done.pipeline.programs if done.pipeline else (), strict=True):
            assert regions and not regions & step_names(2) and all(name in program.blocks for name in regions)


STAGED = {
    "tp": {**PLANS["tp"], "schedule": "1f1b"},
    "dp zero1": {**PLANS["dp"], "zero": "1 over dp", "schedule": "1f1b"},
    "tp zbh1": {**PLANS["tp"], "schedule": "zbh1"},
    "sequence zbh1": {**PLANS["sequence"], "schedule": "zbh1"},
    "zero3 searched": {**PLANS["zero3"], "schedule": "searched"},
}


def in_stages(one: OneDevice, name: str, at_once: int) -> tuple[Plan, Task, Plan, Lowered]:
    plan = Plan.read({**STAGED[name], "stages": ["embed", "layers.1"], "microbatches": 4, "at_once": at_once})
    given, gathered = ShardedModel(one.model, one.optimizer, plan.inside).given(one.unsharded)
    task = Task(one.unsharded.program, one.unsharded.body, CPU, False, given, gathered)
    return plan, task, *planned(task, plan)


@pytest.mark.parametrize("name", STAGED)
def test_pairs_go_through_stages(name, one):
    """A step of a stage is of two microbatches; all results are those of a pipeline of single ones."""
    outs, owners = [], []
    for at_once in (1, 2):
        plan, task, decided, done = in_stages(one, name, at_once)
        assert done.pipeline.schedule.microbatches == 4 // at_once
        again = planned(task, Plan.read(decided.data()))[1]
        assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
        outs.append(simulated(one, task, plan, done))
        owners.append(done.pipeline.owners)
    assert owners[0] == owners[1]  # both microbatches are on the same side of each cut
    programs = done.pipeline.programs
    called = {str(e.params["block"]) for p in programs for e in p.main.eqns if e.op is call}
    assert any(block.startswith("weight") for block in called) == splits(plan.schedule)
    for program in programs:
        for block in (b for at, b in program.blocks.items() if at != program.entry):
            begun = {v for e in block.eqns if e.op is o.begin for v in e.outputs}
            assert begun == {e.inputs[0] for e in block.eqns if e.op is o.finish}, "a message ends where it begins"
    for plain, woven in zip(*outs, strict=True):
        for x, y in zip(plain, woven, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


WEAVES = ["zbh1", "zbv", "dualpipev", "1f1b", "interleaved", "gpipe"]


@pytest.mark.parametrize("inner", INNER)
def test_pairs_are_serial(inner):
    """Under every schedule, weights in steps of their own or not, wherever the step is cut."""
    for layers, dropout in ((1, 0.2), (2, 0.0)):
        one = tied(4, layers, dropout)
        local, spread = local_program(one, INNER[inner])
        woven = plain_sums(interleave(local, one.unsharded.body, staged=True), one.unsharded.body)
        flow, plain = StepFlow(woven, one.unsharded.body), StepFlow(local, one.unsharded.body)
        single = {plain.block.eqns[i].outputs[0].name for i in plain.units}
        names = [name for i in flow.units[1:] if (name := flow.block.eqns[i].outputs[0].name) in single]
        for case, schedule_name in enumerate(WEAVES):
            rng = random.Random(f"{inner} {layers} {case}")
            schedule = named(schedule_name, rng.randint(2, 3), flow.body.length)
            starts = sorted(rng.sample(range(len(names)), schedule.stages - 1))
            known = woven, spread
            pipeline_equals(one, schedule, [names[i] for i in starts], INNER[inner], rng.randrange(99), known=known)


@pytest.mark.parametrize("name", ["tp", "tp zbh1"])
def test_a_step_of_two_waits_less_than_two_steps(name):
    """Of a stage with tensor parallelism, by the clock; steps of weights send nothing, and take as long."""
    large = step_of(width=256, rows=64)
    alone, both = (in_stages(large, name, k)[2].predicted for k in (1, 2))
    for kind in ("forward", "backward"):
        single, pair = (sum(getattr(p.steps, kind)) for p in (alone, both))
        assert pair < 0.95 * 2 * single
    assert sum(both.steps.weight) == pytest.approx(2 * sum(alone.steps.weight), rel=0.05)
    assert (sum(both.steps.weight) > 0) == (name == "tp zbh1")
    assert both.parts["network"][1] < 0.7 * alone.parts["network"][1]


def test_rows_travel_beside_the_experts_of_the_other():
    """Of a layer whose experts and tokens are split: while one microbatch's rows are under way the other's experts
    compute, and the clock says that it pays."""
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = OneDevice.of(Mixed(), {"x": x}, accumulate=4)
    split = {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}
    plan = {"mesh": {"ep": 2}, "batch": ["ep"], "parameters": split, "microbatches": 4}
    plain, woven = (lowered(one, Plan.read({**plan, "at_once": k})) for k in (1, 2))
    compared(one.unsharded.program, woven[1].spread, Mesh(ep=2), start_values(one), woven[1].program)
    names = [e.params.get("op", e.op.name) + ("" if e.op.name != "finish" else " ends")
             for e in woven[1].program.blocks[one.unsharded.body].eqns]  # fmt: skip
    layer = names.index("experts")
    begun, ended = (names[:layer].count(name) for name in ("exchange_rows", "exchange_rows ends"))
    assert begun == 2 and ended == 1
    assert woven[0].predicted.seconds < plain[0].predicted.seconds


def test_messages_go_on_beside_the_other(one):
    """Of a step with tensor parallelism less is waited for, and nothing else is sent."""
    large = step_of(width=256, rows=64)
    alone, both = (
        lowered(large, Plan.read({**PLANS["tp"], "microbatches": 4, "at_once": k}))[0].predicted for k in (1, 2)
    )
    wire = next(name for name in alone.parts if name in ("network", "loopback") or "tp" in name)
    (sent, waited), (sent_2, waited_2) = alone.parts[wire], both.parts[wire]
    assert sent_2 == pytest.approx(sent, rel=0.01)
    assert waited_2 < 0.7 * waited and both.seconds < alone.seconds


def test_golden():
    program = Program.parse("""
def layer(x: f32[4], w: f32[4]):
  h: f32[4] = mul(x, w)
  s: f32[4] = all_reduce(h, axes=("tp",), count=2)
  g: f32[4] = gelu(s)
  y: f32[4] = mul(g, w)
  z: f32[4] = all_reduce(y, axes=("tp",), count=2)
  return z

def part(w: f32[4], total: f32[4], key: i64[], x: f32[4]):
  v: f32[4] = exp(w)
  k: i64[] = fold_in(key, data=0)
  d: f32[4] = dropout(x, k, 0, p=0.5)
  y: f32[4] = call(d, v, block=@layer)
  z: f32[4] = call(y, v, block=@layer)
  t: f32[4] = add(total, z)
  n: i64[] = fold_in(key, data=7)
  return t, n, y

def main(w: f32[4], x: f32[4,4], key: i64[]):
  zero: f32[4] = full(0.0, dtype=f32, shape=(4,))
  t: f32[4], n: i64[], y: f32[4,4] = scan(w, zero, key, x, body=@part, carry=2, consts=1, length=4)
  return t, y
""")
    golden("interleave", str(interleave(program, "part")))


def test_refusals():
    plan = {**PLANS["tp"], "at_once": 2}
    with pytest.raises(PlanError, match="at_once: 2, but microbatches: 3\n  try       microbatches: 4"):
        Plan.read({**plan, "microbatches": 3})
    with pytest.raises(PlanError, match="at_once: 3\n  try       1, or 2 microbatches"):
        Plan.read({**plan, "at_once": 3})
    with pytest.raises(PlanError, match="at_once: 2: not beside offload yet"):
        Plan.read({**plan, "microbatches": 4, "offload": "auto"})
