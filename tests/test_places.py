"""Sub-models on meshes of their own: the programs of all places, run together, do what the serial step does, whatever
lies where; branches that do not need each other run at once; plans read back give the same programs; refusals.  (In
processes: `test_pipeline.py`.)"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
import yaml
from distributing import start_values
from golden import golden
from pipelining import Tied
from placing import Towers, one_of, placed_equals, placed_results, task_of
from torch import nn

import mycel
from mycel.errors import PlanError, RunError
from mycel.ir import Mesh, Program, call, walk
from mycel.lower import Lowered
from mycel.ops import o
from mycel.parts import ShardedModel
from mycel.plan import CPU, KINDS, Plan
from mycel.plan.list_schedules import of_places
from mycel.plan.places import place_of, read_places
from mycel.plan.schedule import StageCosts, StageStep, timeline
from mycel.planning import Task, planned
from mycel.run import moves, simulate, simulate_places
from mycel.run.simulate import put_together, spread_out

TENSOR = {"*.layers.*.weight": ["tp", "-"], "*.layers.*.bias": ["tp"]}
PLACES = {
    "one and two": ({"vision": [0], "*": [1, 2]}, {}),
    "two and three": ({"vision": ["0..1"], "*": [2, 3, 4]}, {}),
    "two and one, two modules": ({"vision": [0, 1], "scale": [0, 1], "*": [2]}, {}),
    "three places": ({"vision": [0], "text": [2, 1], "*": [3]}, {}),
    "tp beside dp": (
        {"vision": {"ranks": [0, 3], "mesh": {"tp": 2}}, "*": {"ranks": [1, 2], "mesh": {"dp": 2}}},
        {"parameters": TENSOR, "loose": True},
    ),
    "stages in a place": (
        {"vision": {"ranks": "0..3", "stages": ["vision", "vision.out"]}, "*": [4]},
        {},
    ),
    "dp and tp": (
        {"text": [0], "*": {"ranks": "1..4", "mesh": {"dp": 2, "tp": 2}}},
        {"parameters": TENSOR, "loose": True},
    ),
}


def towers(plan: Plan, seed: int = 0, rows: int = 12, **settings):
    torch.manual_seed(seed)
    batch = {"pixels": torch.randn(rows, 6).double(), "ids": torch.randint(0, 11, (rows, 3))}
    model = Towers(1, 0.2, tied=seed % 3 == 0).double()
    model.vision.requires_grad_(seed % 4 != 2)  # a tower that only looks on has no backward
    return one_of(model, batch, plan, **settings)


@pytest.mark.filterwarnings("ignore:accumulate")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", PLACES)
def test_placed_is_serial(name, seed):
    rng = random.Random(f"{name} {seed}")
    place, more = PLACES[name]
    zero = rng.choice([0, 1, 2, 3])
    more = more | ({"zero": f"{zero} over dp"} if zero and "tp" not in name else {})
    plan = Plan.read({
        "place": place, "batch": ["dp"], "microbatches": rng.choice([1, 2, 3]),
        "schedule": rng.choice(["gpipe", "1f1b", "searched"]), **more,
    })  # fmt: skip
    settings = {
        "clip_norm": rng.choice([None, 0.05]), "precision": rng.choice(["fp32", "fp32", "bf16"]),
        "grads": rng.choice([False, True]), "outputs": rng.choice([False, True]),
    }  # fmt: skip
    placed_equals(towers(plan, seed, **settings), plan, seed, poison=seed % 4 == 3)


def test_a_chain_in_places():
    """Layers on one mesh, embedding and head (which are tied) on another: three stages, two of them in one place."""
    plan = Plan.read({"place": {"layers": [0, 1], "*": [2]}, "batch": ["dp"], "microbatches": 2})
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 12, (8, 3))}
    one = one_of(Tied(2, 0.1).double(), batch, plan, clip_norm=0.05)
    assert placed_equals(one, plan).pipeline.schedule.place == (1, 0, 1)


@pytest.mark.filterwarnings("ignore:accumulate")
def test_on_the_host_to_the_bit_what_they_are_without():
    """Each place moves its own: activations, sums of gradients, state and parameters; a plan read back makes the same
    programs."""
    place, more = PLACES["stages in a place"]
    outs = []
    for offload in ("none", dict.fromkeys(KINDS, "host")):
        plan = Plan.read({"place": place, "batch": ["dp"], "microbatches": 3, "offload": offload, **more})
        task = task_of(one := towers(plan, 1), plan)
        decided, done = planned(task, plan)
        assert all(moves(p) == (offload != "none") for p in done.pipeline.programs)
        again = planned(task, Plan.read(decided.data()))[1]
        assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
        outs.append(placed_results(one, plan, done))
    assert decided.decided.moved_by_rank[0].inside and decided.predicted.host > 0
    for plain, moved in zip(*outs, strict=True):
        assert all(map(torch.equal, plain, moved))


def test_a_place_that_does_not_fit_moves_what_it_takes():
    plan = Plan.read({"place": {"vision": [0], "*": [1]}, "microbatches": 2, "recompute": "none", "schedule": "gpipe"})
    one = towers(plan, 1, rows=400)
    free = planned(task_of(one, plan), plan)[0].predicted
    budget = int(0.8 * free.peak)
    with pytest.raises(PlanError, match="too much"):
        planned(task_of(one, plan, budget), plan)
    fits = planned(task_of(one, plan, budget), replace(plan, offload=Plan.read({"offload": "auto"}).offload))[0]
    assert fits.predicted.peak <= budget and fits.predicted.host > 0


@pytest.mark.filterwarnings("ignore:accumulate")
def test_steps_of_a_place_are_compiled():
    """What a compiler takes as one is named for each place, and its programs do what the serial step does."""
    plan = Plan.read({"place": PLACES["one and two"][0], "batch": ["dp"], "microbatches": 2})
    one = towers(plan, 1)
    decided, done = planned(task_of(one, plan, compiled=True), plan)
    assert all(done.at(i).regions for i in range(2)) and decided.decided.compiled
    assert all(done.at(i).regions <= set(done.at(i).program.blocks) for i in range(2))
    placed_equals(one, plan, compiled=True)
    again = planned(task_of(one, plan, compiled=True), Plan.read(decided.data()))[1]
    assert again.regions_of == done.regions_of
    assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
    with pytest.raises(PlanError, match="decided for a step that is compiled"):
        planned(task_of(one, plan), decided)


def test_stages_of_a_place():
    """A tower in two stages beside one in one: microbatches go down both at once; the plan is written as it was."""
    written = {"vision": {"ranks": [0, 1], "stages": ["vision.layers.0", "vision.layers.1"]}, "*": [2]}
    plan = Plan.read({"place": written, "batch": ["dp"], "microbatches": 3})
    assert Plan.read(plan.data()) == plan and plan.data()["place"] == written
    torch.manual_seed(0)
    batch = {"pixels": torch.randn(6, 6).double(), "ids": torch.randint(0, 11, (6, 3))}
    schedule = placed_equals(one_of(Towers(2).double(), batch, plan), plan).pipeline.schedule
    assert schedule.place == (0, 2, 1, 2)  # vision, text; the rest of vision; the loss
    line = timeline(schedule, StageCosts.equal(4))
    assert line.start[StageStep("F", 0, 1)] == line.start[StageStep("F", 2, 0)] == 1.0


def clip() -> tuple[nn.Module, dict]:
    tiny = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {"vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 19, "bos_token_id": 1, "pad_token_id": 0}
    pictures = {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=tiny | words, vision_config=tiny | pictures, projection_dim=6)
    ids = torch.randint(2, 19, (6, 7))
    ids[:, -1] = 19
    batch = {"input_ids": ids, "pixel_values": torch.randn(6, 3, 8, 8), "return_loss": True}
    return transformers.CLIPModel(config), batch


def t5() -> tuple[nn.Module, dict]:
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    ids = torch.randint(1, 20, (2, 4, 5))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids[0], "labels": ids[1]}


@pytest.mark.parametrize(
    ("make", "place", "stages"),
    [
        (clip, {"vision_model": [0], "visual_projection": [0], "*": [1, 2]}, (0, 1, 1)),
        (t5, {"encoder": [0, 1], "*": [2]}, (1, 0, 1)),
    ],
    ids=["clip", "t5"],
)
def test_models_of_two_parts(make, place, stages):
    """As transformers has them, unmodified: a contrastive loss over the whole batch; an embedding that both use."""
    torch.manual_seed(0)
    model, batch = make()
    plan = Plan.read({"place": place, "batch": ["dp"]})
    pipeline = placed_equals(one_of(model.eval(), batch, plan), plan).pipeline
    assert pipeline.schedule.place == stages
    for program in pipeline.programs:  # each place has the gradients of its own attention
        counts = Counter(eqn.op.name for _, eqn in walk(program))
        assert counts["attention"] == counts["attention_grad"] > 0


@pytest.fixture(scope="module")
def two() -> tuple[Plan, Plan, Lowered]:
    plan = Plan.read({"place": PLACES["one and two"][0], "batch": ["dp"], "schedule": "searched"})
    one = towers(plan)
    return one, *planned(task_of(one, plan), plan)


def test_branches_run_at_once(two):
    """Neither tower waits for the other, forward or backward, though the loss waits for both."""
    schedule = two[2].pipeline.schedule
    assert schedule.place == (0, 1, 1)
    line = timeline(schedule, StageCosts.equal(3))
    step = lambda text: StageStep(text[0], int(text[1]), 0)
    assert line.start[step("F0")] == line.start[step("F1")] == 0.0 and line.start[step("F2")] == 1.0
    assert line.start[step("B0")] == line.start[step("B1")] == line.end[step("B2")]


def test_a_plan_read_back_makes_the_same_programs(two):
    one, decided, done = two
    again = planned(task_of(one, decided), Plan.read(mycel.Plan.read(decided).data()))[1]
    assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
    other = replace(decided, decided=replace(decided.decided, program="another"))
    with pytest.raises(PlanError, match="decided for another program"):
        planned(task_of(one, other), other)


def test_each_rank_sends_just_what_another_lacks():
    """One rank to two: each half of the rows once, where there are enough of them to be worth splitting."""
    plan = Plan.read({"place": {"vision": [0], "*": [1, 2]}, "batch": ["dp"]})
    first, second = planned(task_of(one := towers(plan, rows=40000), plan), plan)[1].pipeline.programs
    sent = [e.params["pieces"] for e in first.main.eqns if e.op.name == "begin_send_across"]
    n = one.batch["ids"].shape[0] // 2
    assert ((0, 1, (0, 0), (0, 0), (n, 4)), (0, 2, (n, 0), (0, 0), (n, 4))) in sent
    received = [e.outputs[0].shape for e in second.main.eqns if e.op.name == "finish_receive_across"]
    assert (n, 4) in received and (2 * n, 4) not in received


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "searched"])
def test_schedules_of_a_graph(name, microbatches):
    """Nobody waits in a circle, each step runs once, and 1f1b holds no more than the longest way down has stages."""
    rng = random.Random(f"{name}{microbatches}")
    for _ in range(8):
        stages = rng.randint(2, 6)
        homes = [0, 1, *(rng.randrange(3) for _ in range(stages))]
        place = [sorted(set(homes)).index(p) for p in homes]
        edges = [(s, t) for t in range(len(place)) for s in range(t) if rng.random() < 0.4]
        after = {("F", t): tuple(("F", s) for s, u in edges if u == t) for t in range(len(place))}
        after |= {("B", s): (("F", s), *(("B", t) for u, t in edges if u == s)) for s in range(len(place))}
        seconds = (tuple(rng.uniform(0.1, 2) for _ in place) for _ in range(3))
        costs = StageCosts(*seconds, message=rng.choice([0.0, 0.3]))
        schedule = of_places(name, place, microbatches, after, costs)
        steps = [step for order in schedule.orders for step in order]
        assert len(set(steps)) == len(steps) == 2 * len(place) * microbatches
        assert len(list(schedule.in_time())) == len(steps)
        if name == "1f1b":
            counts = [len([s for s in place if s == p]) for p in range(max(place) + 1)]
            assert all(held <= len(place) * n for held, n in zip(schedule.held(), counts, strict=True))


def test_places_that_wait_for_each_other_are_named():
    text = """
def main(x: f32[2]):
  t: i64[] = begin_receive_across(dtype=f32, source={other}, tag={mine})
  y: f32[2] = finish_receive_across(t, dtype=f32, shape=(2,), source={other}, tag={mine})  # a.py:{mine}
  u: i64[] = begin_send_across(y, tag={other}, to={other})
  return y
"""
    programs = [Program.parse(text.format(mine=i, other=1 - i)) for i in range(2)]
    with pytest.raises(RunError) as e:
        simulate_places(programs, [Mesh(), Mesh()], [[0], [1]], [[[torch.ones(2)]]] * 2)
    assert str(e.value).splitlines()[1:] == [
        "  stage 0   at a.py:0: waits for message 0 of stage 1",
        "  stage 1   at a.py:1: waits for message 1 of stage 0",
    ]


@pytest.mark.filterwarnings("ignore:accumulate")
@pytest.mark.parametrize("sync", [{}, {"dp": "delayed"}])
def test_gradients_travel_encoded_inside_a_place(sync):
    """As between as many ranks that hold all of the model: the same parameters, and the same is lost.  A place of one
    rank has no sums, and encodes nothing."""
    how = {"batch": ["dp"], "microbatches": 2, "compress": {"dp": {"*weight": "int8+ef"}}, "sync": sync}
    written, flat = Plan.read({"place": {"vision": [0, 1], "*": [2]}, **how}), Plan.read({"mesh": {"dp": 2}, **how})
    one = towers(written, seed=1)
    decided, done = planned(task_of(one, written), written)
    assert Plan.read(decided.data()) == decided and "int8+ef" in decided.compress_text()
    encoded = [{p.role(v).of for v in p.inputs_of("error")} for p in done.pipeline.programs]
    assert encoded == [{"vision.layers.0.weight", "vision.out.weight"}, set()]
    vision = done.pipeline.programs[0]
    updated = dict(zip(vision.updates, placed_results(one, written, done)[0][-len(vision.updates) :], strict=True))
    inputs = ShardedModel(one.model, one.optimizer, flat).given(one.unsharded)
    alone = planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, *inputs), flat)[1]
    given = [spread_out(x, layout, flat.mesh) for x, layout in zip(start_values(one), alone.spread.inputs, strict=True)]
    of_all = zip(
        simulate(alone.program, flat.mesh, given), alone.spread.outputs, one.unsharded.program.main.outputs, strict=True
    )
    whole = [put_together(x, layout, v.type, flat.mesh) for x, layout, v in of_all]
    wanted = dict(zip(alone.program.updates, whole[-len(alone.program.updates) :], strict=True))
    for name, x in updated.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-5, atol=1e-5)
    lost = [x for name, x in updated.items() if name.endswith(".error")]
    assert len(lost) == 2 and all(float(x.abs().max()) > 0 for x in lost)


@pytest.mark.filterwarnings("ignore:accumulate")
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", PLACES)
def test_gradients_of_places_one_step_late(name, zero):
    """As on one device, of all parameters, also in places of one rank; a place begins its sums before it computes."""
    place, more = PLACES[name]
    plan = {"place": place, "batch": ["dp"], "microbatches": 2, "sync": {"dp": "delayed(ahead=0.5)"}}
    written = Plan.read({**plan, **more, **({"zero": f"{zero} over dp"} if zero else {})})
    one = towers(written, zero, clip_norm=0.5)
    done = placed_equals(one, written, zero)
    late = {one.unsharded.program.role(v).of for v in one.unsharded.program.inputs_of("delayed")}
    assert late == {name for name, p in one.model.named_parameters() if p.requires_grad}
    for program, at in zip(done.pipeline.programs, written.places, strict=True):
        delayed, eqns = set(program.inputs_of("delayed")), program.main.eqns
        begun = [i for i, e in enumerate(eqns) if e.op is o.begin and delayed.intersection(e.vars)]
        if delayed and at.mesh["dp"] > 1:
            assert begun and begun[0] < next(i for i, e in enumerate(eqns) if e.op is call)


def test_where_parameters_are():
    places = read_places({"vision": [0], "*.bias": [1], "text": [0], "*": [2]})
    named = {name: place_of(places, name) for name in ("vision.up.bias", "text.w", "other.bias", "visionary", "scale")}
    assert named == {"vision.up.bias": 0, "text.w": 0, "other.bias": 1, "visionary": 2, "scale": 2}


class Shared(nn.Module):
    """A running mean that both towers change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.a(x)) - self.norm(self.b(x))).square().sum()


def test_what_cannot_be_placed_is_told():
    """Each with what is wrong, and what to try."""
    batch = {"x": torch.randn(8, 4)}

    def under(place: object, model: nn.Module | None = None, **more: object) -> None:
        plan = Plan.read({"place": place, "microbatches": 2, **more})
        one = one_of(model or nn.Sequential(Shared()), batch, plan) if model else towers(plan)
        planned(task_of(one, plan), plan)

    cases = {
        "one place": lambda: under({"*": [0, 1]}),
        "a rank in two places": lambda: under({"vision": [0, 1], "*": [1, 2]}),
        "a rank in none": lambda: under({"vision": [0], "*": [2]}),
        "ranks that are none": lambda: under({"vision": "all", "*": [1]}),
        "a mesh of another size": lambda: under({"vision": {"ranks": [0, 1], "mesh": {"tp": 3}}, "*": [2]}),
        "a module that is not there": lambda: under({"sound": [0], "*": [1]}),
        "parameters that are nowhere": lambda: under({"vision": [0], "text": [1]}),
        "a mesh of all": lambda: under({"vision": [0], "*": [1]}, mesh={"dp": 2}),
        "replicas of a place": lambda: under({"vision": [0, 1], "*": [2]}, batch=["dp"], sync={"dp": "local(H=2)"}),
        "stages beside places": lambda: under({"vision": [0], "*": [1]}, stages=2),
        "stages by their number": lambda: under({"vision": {"ranks": [0, 1], "stages": 2}, "*": [2]}),
        "stages that do not divide ranks": lambda: under({"vision": {"ranks": [0], "stages": ["a", "b"]}, "*": [1]}),
        "a stage that nothing begins": lambda: under(
            {"vision": {"ranks": [0, 1], "stages": ["vision", "vision.roof"]}, "*": [2]}
        ),
        "another schedule": lambda: under({"vision": [0], "*": [1]}, schedule="zbv"),
        "state that two places change": lambda: under({"a": [0], "*": [1]}, Shared()),
    }
    messages = []
    for name, refused in cases.items():
        with pytest.raises(PlanError) as e:
            refused()
        messages.append(f"-- {name}\n{e.value}")
    golden("refusal_places", "\n\n".join(messages))


@pytest.mark.parametrize("written", [
    {"e": {"ranks": [0]}, "*": {"ranks": "1..2"}},
    {"v": [0, 1], "*": {"ranks": "2..7", "mesh": {"dp": 3, "tp": 2}}},
    {"v": {"ranks": "0..3", "stages": ["v", "v.layers.6"]}, "*": [4, 5]},
])  # fmt: skip
def test_however_it_is_written_a_place_reads_the_same(written):
    plan = Plan.read({"place": written})
    assert Plan.read(yaml.safe_load(str(plan))) == plan
