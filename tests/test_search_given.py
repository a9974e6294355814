"""What is given of a plan holds in every plan the search looks at; gradients are encoded where that is asked for and
pays, never unasked; and a search equals pricing everything it may choose from."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from test_search import SLOW, TWO, of
from transformers import LlamaConfig, LlamaForCausalLM

import mycel
from mycel import search_text
from mycel.errors import PlanError
from mycel.ir import Mesh, call
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.plan.clock import WORKSPACE
from mycel.plan.cluster import Cluster
from mycel.plan.compression import CANDIDATES
from mycel.planning import Task, planned
from mycel.search_given import Given
from mycel.search_remarks import remarked
from mycel.sizes import parse_bytes, span
from mycel.train.planner import question_of, search

CRAWLING = {**SLOW, "levels": [SLOW["levels"][0], {"bytes_s": 1e6, "start_s": 1e-6, "name": "network"}]}


class Two(torch.nn.Module):
    """Two products."""

    def __init__(self, width=64):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


def batch(rows=4096, width=64):
    x = torch.empty(rows, width, device="meta")
    return {"x": x, "y": x}


def tokens(rows=16):
    ids = torch.empty(rows, 4, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def test_codecs_are_picked_where_asked_for_and_quicker():
    exact = of(Two(), batch(), CRAWLING, given={"mesh": {"dp": 4}}).run().best
    plan_search = of(Two(), batch(), CRAWLING, given={"mesh": {"dp": 4}, "compress": "auto"})
    answer = plan_search.run()
    assert exact.shape.compress == "" and answer.best.shape.compress in CANDIDATES[1:]
    assert answer.best.seconds < exact.seconds
    written = answer.best.plan.data()["compress"]
    assert written == {answer.best.shape.compressed: answer.best.shape.compress}
    fast = {**SLOW, "levels": [{"bytes_s": 1e12, "start_s": 1e-9}, {"bytes_s": 1e12, "start_s": 1e-9}]}
    assert of(Two(), batch(), fast, given={"mesh": {"dp": 4}, "compress": "auto"}).run().best.shape.compress == ""


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({"at_once": 2}, lambda p: p.at_once == 2 and p.microbatches % 2 == 0),
        ({"at_once": 1}, lambda p: p.at_once == 1),
        ({"gather": {"dp": "int8"}}, lambda p: p.zero == 3 and p.over == ("dp",) and p.gather),
        ({"gather": {"dp": "int8+ef"}}, lambda p: p.zero in (1, 2) and p.over == ("dp",) and p.gather),
        ({"stages": 2, "send": {"stages": "int8"}}, lambda p: p.sent_codecs() == {"stages": "int8"}),
        ({"monitor": ["noise"]}, lambda p: p.monitored() == {"noise"}),
        ({"sync": {"dp": "delayed()"}}, lambda p: p.delayed() is not None and p.mesh["dp"] > 1),
        ({"sync": {"dp": "diloco(H=4)"}}, lambda p: p.synced().kind == "diloco" and p.mesh["dp"] == 2),
        ({"sync": {"dp": "local(H=4)"}, "mesh": {"dp": 4}}, lambda p: p.synced() and p.mesh["dp"] == 4),
        ({"sync": {"dp": "diloco(H=4)"}, "compress": {"dp": "int8+ef"}}, lambda p: p.synced() and p.compress),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_said_of_messages_holds_in_every_plan(given, holds):
    """And each of them is priced as the plan it is, when that is checked; some of what is given costs something."""
    plan_search = of(Two(), batch(), CRAWLING, given=given)
    fitting = [c for c in plan_search.run().candidates if c.fits]
    assert fitting and all(holds(c.plan) for c in fitting)
    free = of(Two(), batch(), CRAWLING)
    for candidate in fitting[:3]:
        assert free.priced(candidate.plan.given).seconds == pytest.approx(candidate.seconds)


def test_replicas_are_priced_as_their_step_predicts_it():
    """Gradients stay inside a host, and what the hosts say to each other comes on top."""
    given = {"sync": {"dp": "local(H=4)"}}
    crawling = {**CRAWLING, "levels": [{**CRAWLING["levels"][0], "name": "inside"}, CRAWLING["levels"][1]]}
    plan_search = of(Two(), batch(), crawling, given=given)
    answer = plan_search.run()
    best = answer.best
    step = plan_search.step(best.shape)
    inputs, gathered = ShardedModel(plan_search.model, plan_search.optimizer, best.plan.replica).given(step)
    hardware = plan_search.cluster.hardware
    task = Task(step.program, step.body, hardware, plan_search.compiled, inputs, gathered, outlines=False)
    predicted, _ = planned(task, best.plan.given)
    assert best.seconds == pytest.approx(predicted.predicted.seconds)
    every = of(Two(), batch(), CRAWLING).run().best
    assert best.seconds < every.seconds and answer.bound <= best.seconds
    held = best.shape.tp * (best.shape.fsdp if best.shape.zero == 3 else 1)
    parameters = 4 * (64 * 256 * 2) / held
    assert best.sent["network"] == pytest.approx(parameters / 4, rel=0.01)  # to the other host, every fourth step


def test_axes_of_ready_plans_in_two_dims_are_known():
    planes = {"up.weight": ["tx", "ty"], "down.weight": ["ty", "tx"]}
    for given in ({"parameters": planes}, {"parameters": planes, "mesh": {"tx": 2, "ty": 2}}):
        answer = of(Two(), batch(), SLOW, given=given).run()
        assert answer.best.plan.data()["parameters"] == {"up.weight": ["tp", "ty"], "down.weight": ["ty", "tp"]}
        assert all(c.shape.sizes.keys() == {"tp", "ty"} for c in answer.candidates)


def test_a_plan_that_is_checked_is_priced_with_its_codec():
    plan_search = of(Two(), batch(), CRAWLING)
    exact = {"mesh": {"dp": 4}, "batch": ["dp"]}
    seconds = {
        codec: plan_search.priced(Plan.read({**exact, "compress": {"dp": codec}})).seconds
        for codec in ("exact", "int8+ef", "int4", "auto")
    }
    assert seconds["int4"] < seconds["int8+ef"] < seconds["exact"] / 2
    assert seconds["auto"] <= seconds["int8+ef"]
    with pytest.raises(PlanError, match="is priced where all travels in one way"):
        plan_search.checked(Plan.read({**exact, "compress": {"dp": ["exact until 100", "int8"]}}))


def test_what_would_be_faster_is_remarked_on_not_done():
    plan_search = of(Two(), batch(), CRAWLING, given={"mesh": {"dp": 4}})
    answer = remarked(plan_search, plan_search.run())
    (text,) = answer.remarks
    assert "int8+ef" in text and "compress: auto" in text and text in search_text.table(answer)
    quick = of(Two(), batch(), TWO)
    assert remarked(quick, quick.run()).remarks == ()


@pytest.mark.parametrize(
    "given, holds",
    [
        ({"zero": 1}, lambda s: s.zero == 1),
        ({"zero": "3 over dp", "mesh": {"dp": 4}}, lambda s: s.zero == 3 and s.dp == 4),
        ({"microbatches": 2}, lambda s: s.microbatches == 2),
        ({"mesh": {"tp": 2, "dp": 2}}, lambda s: (s.dp, s.tp, s.order) == (2, 2, ("tp", "dp"))),
        ({"compress": {"dp": "int4"}}, lambda s: s.compress == "int4" or s.replicas == 1),
        ({"offload": {"optimizer": "host"}}, lambda s: s.offload),
        ({"stages": 1}, lambda s: s.pp == 1),
    ],
    ids=["zero", "mesh", "microbatches", "order", "codec", "offload", "stages"],
)
def test_what_is_given_holds_in_every_plan(given, holds):
    plan_search = of(Two(), batch(4), TWO if "mesh" not in given else SLOW, given=given)
    answer = plan_search.run()
    assert all(holds(c.shape) for c in answer.candidates)
    if "offload" in given:
        assert answer.best.plan.data()["offload"] == given["offload"]


class Deep(torch.nn.Module):
    """Layers that stages can be cut from."""

    def __init__(self, layers=8, width=64):
        super().__init__()
        self.table = torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def test_where_all_is_computed_again_a_layer_hands_on_its_result_alone():
    """Also what backward reads in another layout than forward made it in."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 512}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=8, use_cache=False))
    ids = torch.empty(16, 256, dtype=torch.int64, device="meta")
    given = {"mesh": {"dp": 2, "tp": 2}, "zero": 3, "microbatches": 1, "recompute": "full"}
    optimizer, batch = torch.optim.AdamW(model.parameters()), {"input_ids": ids, "labels": ids}
    best = search(model, optimizer, batch, Cluster.read("h100x4"), given, precision="bf16").run().best
    layers = [e for e in best.outcome.lowered.program.main.eqns if e.op is call and e.phase == "forward"]
    assert [len(e.outputs) for e in layers] == [1, 1]


def test_stages_that_are_given():
    answer = of(Deep(), tokens(), SLOW, given={"stages": 2}).run()
    assert all(c.shape.pp == 2 for c in answer.candidates) and answer.best.plan.stage_count == 2
    assert len({c.shape.mesh for c in answer.candidates}) > 1
    fixed = of(Deep(), tokens(), SLOW, given={"stages": 4, "schedule": "interleaved", "mesh": {"dp": 2}}).run()
    assert {(c.shape.pp, c.shape.schedule, c.shape.dp) for c in fixed.candidates} == {(2, "interleaved", 2)}


@pytest.mark.parametrize("cluster, given", [(SLOW, {}), (CRAWLING, {"compress": "auto", "zero": 1})], ids=["all", "1"])
def test_the_best_of_all_it_may_choose_from(cluster, given):
    """Brute force: meshes and orders x ZeRO x microbatches x codecs, each priced."""
    plan_search = of(Two(32), batch(4, 32), cluster, given=given)
    best = plan_search.run().best
    shapes = [
        replace(shape, zero=zero, microbatches=count, compress=codec)
        for mesh in plan_search.space.meshes()
        for shape in (mesh, *plan_search.space.orders(mesh), *plan_search.space.hybrids(replace(mesh, zero=3)))
        for zero in ([given["zero"]] if given else (0, 1, 2, 3) if shape.dp * shape.fsdp > 1 else (0,))
        if zero or shape.fsdp == 1
        for count in plan_search.space.microbatches(shape)[:2]
        for codec in (("", *plan_search.given.codecs) if shape.replicas > 1 else ("",))
    ]
    least = min((plan_search.price(shape) for shape in dict.fromkeys(shapes)), key=lambda c: c.seconds)
    assert plan_search.bound <= least.seconds
    assert best.seconds <= least.seconds, f"{best.shape} {best.seconds}, but {least.shape} {least.seconds}"


class WithNames(Two):
    """With a value that has a name."""

    def forward(self, x, y):
        hidden = torch.relu(self.up(x))
        return torch.nn.functional.mse_loss(self.down(hidden), y)


class Hinted(Two):
    """With a hint in its code."""

    def forward(self, x, y):
        h = mycel.shard(torch.relu(self.up(x)), None, "tp")
        return torch.nn.functional.mse_loss(self.down(h), y)


class ByHand(Two):
    """With a region spread by hand."""

    def forward(self, x, y):
        with mycel.manual("tp"):
            h = torch.relu(x @ mycel.comm.part(self.up.weight, "tp").T)
            z = mycel.comm.all_reduce(h @ mycel.comm.part(self.down.weight, "tp", dim=1).T, "tp")
        return torch.nn.functional.mse_loss(z, y)


@pytest.mark.parametrize(
    "given, holds",
    [
        ({"parameters": {"up.weight": ["-", "tp"]}}, lambda s: s.tp > 1),
        ({"parameters": {"*.weight": ["tp", "-"]}, "mesh": {"dp": 2, "tp": 2}}, lambda s: s.tp == 2),
        ({"parameters": {"up.weight": ["tp", "-"]}, "mesh": {"dp": 4, "tp": 1}}, lambda s: s.dp == 4),
        ({"activations": {"hidden": ["dp", "tp"]}}, lambda s: s.dp == s.tp == 2),
        ({"zero": "3 over fsdp"}, lambda s: s.zero == 3 and s.over == ("fsdp",)),
        ({"zero": {"up.*": 1, "*": "2 over dp"}}, lambda s: s.over == ("dp",)),
        ({"batch": ["dp"], "parameters": {"up.weight": ["tp", "-"]}}, lambda s: (s.batch, s.tp > 1) == (["dp"], True)),
        ({"batch": ["-"]}, lambda s: s.replicas == s.cp == 1),
        ({"parameters": {"up.weight": ["ty", "tp"]}}, lambda s: s.ty == s.tp == 2),
        ({"compress": {"fsdp": "int8"}, "zero": "1 over fsdp"}, lambda s: s.compressed == "fsdp" and s.compress),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_axes_that_are_named_are_there_and_layouts_as_given(given, holds):
    """In every plan that is looked at, and in the one it writes."""

    answer = of(WithNames(), batch(), SLOW, given=given).run()
    assert all(holds(c.shape) for c in answer.candidates)
    written = Plan.read(yaml.safe_load(search_text.file_text(answer)))
    layouts = written.parameter_layouts({name: p.shape for name, p in Two().named_parameters()})
    for pattern, entry in given.get("parameters", {}).items():
        name = pattern.replace("*", "up")
        assert str(layouts[name]) == f"[{','.join(entry)}]", layouts
    assert {**Mesh(given.get("mesh", {})).sizes(), **written.mesh.sizes()} == written.mesh.sizes()
    assert {k: written.data()["activations"][k] for k in given.get("activations", {})} == given.get("activations", {})


def test_axes_that_code_names_are_there():
    answer = of(Hinted(), batch(), SLOW).run()
    assert len({c.shape.tp for c in answer.candidates}) > 1
    assert all("tp" in c.plan.mesh for c in answer.candidates if c.fits)
    assert of(Hinted(), batch(), SLOW, given={"mesh": {"dp": 4, "tp": 1}}).run().best.plan.mesh == Mesh(dp=4, tp=1)
    by_hand = of(ByHand(), batch(), SLOW, given={"mesh": {"dp": 2, "tp": 2}}).run().best
    assert by_hand.plan.mesh == Mesh(dp=2, tp=2) and "all_reduce" in str(by_hand.outcome.lowered.program)
    with pytest.raises(PlanError, match=r"(?s)no axis 'tp'.*the mesh +Mesh\(dp=4\).*test_search_given.py"):
        of(Hinted(), batch(), SLOW, given={"mesh": {"dp": 4}}).run()
    with pytest.raises(PlanError, match=r"(?s)mycel.manual: .*'tp'.*test_search_given.py.*try .*a mesh that has tp"):
        of(ByHand(), batch(), SLOW).run()


def made():
    x = torch.empty(64, 64)
    return Two(), {"x": x, "y": x}


@pytest.mark.parametrize("plan", ["zero1", "zero2+tp", "file"])
def test_ready_plans_and_files_bind_the_search(plan, tmp_path):
    if plan == "file":
        plan = str(tmp_path / "plan.yaml")
        (tmp_path / "plan.yaml").write_text("zero: 2 over dp\nbatch: [dp]\nparameters: {up.weight: [tp, -]}\n")
    answer = question_of("test_search_given:made", Cluster.read(SLOW), settings=[f"parallel.plan={plan}"]).run()
    assert {c.shape.zero for c in answer.candidates} == {1 if plan == "zero1" else 2}
    assert {c.shape.over for c in answer.candidates} == {("dp",)}
    assert plan == "zero1" or all(c.shape.tp > 1 for c in answer.candidates)


def test_values_that_are_not_there_are_refused():
    for name, says in [("hiden", "no value of this name.*try +hidden"), ("qqq", "no value.*known +.*hidden")]:
        with pytest.raises(PlanError, match=f"(?s)activations: {name}: {says}"):
            of(WithNames(), batch(), SLOW, given={"activations": {name: ["dp", "-"]}}).run()
    with pytest.raises(PlanError, match=r"activations: hidden: \[dp\] has 1 dim, hidden has 2"):
        of(WithNames(), batch(), SLOW, given={"activations": {"hidden": ["dp"]}}).run()
    model = WithNames()
    x = torch.ones(4, 64)
    step = mycel.train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan={"mesh": {"dp": 2}, "batch": ["dp"], "activations": {"hiden": ["dp", "-"]}},
    )
    with pytest.raises(PlanError, match=r"(?s)activations: hiden.*try +hidden"):
        step.prepare(x=x, y=x)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"stage": 2}, "stages"),
        ({"parameters": {"up.weight": ["dq", "-"]}}, "parameters: up.weight: there is no axis 'dq'.*known.*try +"),
        ({"activations": {"h": ["tp", "-"]}, "mesh": {"dp": 4}}, "activations: h: there is no axis 'tp'.*the mesh"),
        ({"batch": ["dpp"]}, "batch: there is no axis 'dpp'.*try +dp"),
        ({"zero": "3 over tp"}, "zero: 3 over tp: tp does not split the batch.*try +"),
        ({"sync": {"tp": "local(H=4)"}}, "sync: tp does not split the batch.*try +dp"),
        (
            {"sync": {"dp": "local(H=4)"}, "zero": "3 over dp"},
            "zero: 3 over dp is over dp.*try +zero over another axis",
        ),
        ({"sync": {"dp": "local(H=4)"}, "stages": 2}, "and stages: 2.*try +the plan without one of them"),
        ({"gather": {"dp": "int8"}, "zero": "1 over dp"}, "gather: dp: .*under zero: 1.*try +int4"),
        ({"gather": {"dpp": "int8"}}, "gather: there is no axis 'dpp'.*try +dp"),
        ({"gather": {"dp": "int8"}, "zero": 0}, "there is no zero.*try +zero: 3 over dp"),
        ({"send": {"stage": "int8"}}, "send: .*known +stages, experts"),
        ({"monitor": ["noize"]}, "monitor: 'noize'.*try +noise"),
        ({"at_once": 2, "microbatches": 3}, "at_once: 2, but microbatches: 3.*try +microbatches: 4"),
        ({"mesh": {"dq": 2}}, "no axis 'dq'"),
        ({"mesh": {"dpp": 2}}, "mesh: the search knows no axis 'dpp'.*try +dp"),
        ({"mesh": {"pp": 2, "dp": 2}}, "no axis 'pp'.*try +stages: 2"),
        ({"mesh": ["dp", 4]}, r"mesh: \['dp', 4\].*mesh: {dp: 4}"),
        ({"sync": {"dp": "dilocco(H=50)"}}, r"sync: dp: dilocco.*no policy 'dilocco'.*try +diloco\(H=50\)"),
        ({"sync": {"dp": "diloco(HH=50)"}}, "sync: dp: .*no option 'HH'.*try +"),
        ({"sync": {"dpp": "diloco(H=50)"}}, "sync: there is no axis 'dpp'.*try +dp"),
        ({"at_once": 3}, "at_once: 3.*try +1, or 2"),
        ({"compress": "int5"}, "int4"),
        ({"compress": {"dp": "int5+ef"}}, "compress: dp: there is no codec 'int5'.*try +int"),
        ({"compress": {"dpp": "int8"}}, "compress: there is no axis 'dpp'.*try +dp"),
        ({"compress": {"tp": "int8"}, "mesh": {"dp": 2, "tp": 2}}, "tp does not split the batch.*the mesh.*try +dp"),
        ({"zero": "1 over dpp"}, "zero: 1 over dpp: there is no axis 'dpp'.*try +dp"),
        ({"zero": "1 over tp", "mesh": {"dp": 4}}, "zero: 1 over tp: there is no axis 'tp'.*the mesh.*try +dp"),
        ({"schedule": "1f1bb"}, "schedule: '1f1bb'.*try +1f1b"),
        ({"stages": "two"}, "stages: 'two'.*try +a whole number"),
        ({"stages": -2}, "stages: -2.*try +a whole number"),
        ({"stages": ["embed", "layers.8"]}, "the search decides where stages begin.*try +stages: 2"),
        ({"microbatches": -2}, "microbatches: -2.*try +a whole number"),
        ({"microbatches": "two"}, "microbatches: 'two'.*try +a whole number"),
        ({"stages": 3, "schedule": "zbv"}, "stages: 2"),
    ],
    ids=str,
)
def test_what_cannot_be_given(given, says):
    with pytest.raises(PlanError, match=f"(?s){says}"):
        Given.read(given)


def test_stages_that_do_not_divide():
    with pytest.raises(PlanError, match="3 stages on 4 devices"):
        of(Deep(), tokens(), SLOW, given={"stages": 3}).run()
    with pytest.raises(PlanError, match=r"4 stages want .* a step has 2\n  try       microbatches: 4 .*, or stages: 2"):
        of(Deep(), tokens(), SLOW, given={"stages": 4, "microbatches": 2}).run()
    with pytest.raises(PlanError, match="in each of 2 stages"):
        of(Deep(), tokens(), SLOW, given={"stages": 2, "mesh": {"dp": 4}}).run()


def test_one_host_is_remarked_on_where_others_only_make_it_wait():
    """What one host takes is what a search of its devices says; a mesh that is given has as many devices as it has."""
    plan_search = of(Two(), batch(), CRAWLING)
    answer = remarked(plan_search, plan_search.run())
    alone = of(Two(), batch(), {**CRAWLING, "hosts": 1, "levels": CRAWLING["levels"][:1]}).run().best
    assert alone.seconds < answer.best.seconds
    (text,) = [text for text in answer.remarks if "one host" in text]
    assert span(alone.seconds) in text and f"the {CRAWLING['devices']} devices" in text
    quick = of(Two(), batch(), {**CRAWLING, "levels": [{"bytes_s": 1e12, "start_s": 1e-9}] * 2})
    assert not any("one host" in text for text in remarked(quick, quick.run()).remarks)


def test_where_nothing_fits_changes_are_named_that_do():
    """The smallest of each kind, each of which was tried."""
    least = min(c.peak for c in of(Two(), batch(64), TWO, memory=WORKSPACE * 2).run().candidates)
    memory = least - (least - WORKSPACE) // 3
    with pytest.raises(PlanError, match=r"(?s)no plan fits .* a device.*needs +at least .*nearest .*try ") as refused:
        of(Two(), batch(64), TWO, memory=memory).run()
    text = str(refused.value)
    more, devices = re.search(r"([\d.]+ \w+) a device \(", text), re.search(r"(\d+) devices \(", text)
    assert more and devices, text
    assert of(Two(), batch(64), TWO, memory=int(parse_bytes(more[1]) * 1.001)).run().best.fits
    wider = {**TWO, "devices": int(devices[1])}
    assert of(Two(), batch(64), wider, memory=memory).run().best.fits
    given = {"mesh": {"dp": 2}, "recompute": "none", "microbatches": 1, "offload": "none"}
    split = of(Two(), batch(64), TWO, given={**given, "zero": 1}).run().best.peak
    with pytest.raises(PlanError, match=r"try +.*the plan without zero \(dp=2, zero "):
        of(Two(), batch(64), TWO, memory=split, given={**given, "zero": 0}).run()
