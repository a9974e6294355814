"""The law the project lives by: lowered on simulated ranks equals serial; programs and training steps, random plans and
ready ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers as hf
from distributing import (
    SIZES,
    ControlFlow,
    OneDevice,
    compared,
    equals_serial,
    random_plan,
    ready_to_run,
    start_values,
    step_equals,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs
from torch import nn
from zoo import ZOO, inputs

import mycel
from mycel import lower, transform
from mycel.errors import PlanError
from mycel.ir import Layout, Mesh, call, chains, check, walk
from mycel.plan import CPU, Costs, Plan, least, pairs, ready_plans, residuals
from mycel.run import interpret, simulate
from mycel.run.simulate import spread_out

# -- programs --------------------------------------------------------------------------------------------------------


def random_inputs(program, mesh, rng):
    """Any layout for each input, partial sums among them."""
    layouts = {}
    for i, v in enumerate(program.inputs):
        dims = [[] for _ in v.shape]
        partial = []
        for axis in mesh.axes:
            where = rng.randrange(len(dims) + 2)
            if where < len(dims):
                dims[where].append(axis)
            elif where == len(dims) and v.dtype.is_floating_point and v.name not in program.updates:
                partial.append((axis, "+"))
        layouts[i] = Layout(tuple(map(tuple, dims)), tuple(partial))
    return layouts


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name):
    rng = random.Random(name)
    program = ZOO[name]
    for sizes in ({"a": 2}, {"a": 3, "b": 2}):
        mesh = Mesh(sizes)
        equals_serial(program, Plan(mesh), random_inputs(program, mesh, rng), inputs(program))


@given(programs(), st.sampled_from(SIZES), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_random_programs(program, size, second, rng):
    mesh = Mesh({"a": size, **({"b": 2} if second and size < 6 else {})})
    equals_serial(program, Plan(mesh), random_inputs(program, mesh, rng), inputs(program))


# -- training steps --------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 7), nn.Dropout(0.2), nn.Linear(7, 5)
        )

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.net(x), target)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, groups=2)
        self.norm, self.group, self.head = nn.BatchNorm2d(6), nn.GroupNorm(2, 4), nn.Linear(4, 5)

    def forward(self, x, target):
        h = self.group(self.b(torch.relu(self.norm(self.a(x)))))
        return nn.functional.cross_entropy(self.head(h.mean((2, 3))), target)


def rows(*shape):
    return lambda: {"x": torch.randn(*shape, dtype=torch.float64), "target": torch.randint(0, 5, shape[:1])}


def text(**more):
    ids = torch.randint(3, models.VOCAB, (4, 6))
    return {"input_ids": ids, "labels": torch.where(torch.rand(4, 6) < 0.8, ids, -100), **more}


def small(make, **sizes):
    def of():
        before = dict(models.TEXT)
        models.TEXT.update(num_hidden_layers=2, **sizes)
        try:
            return make()
        finally:
            models.TEXT.clear()
            models.TEXT.update(before)

    return of


MODELS = {
    "mlp": (Mlp, rows(5, 6)),
    "convolutions": (Convolutions, rows(4, 3, 6, 6)),
    "branches": (
        lambda: ControlFlow(6),
        lambda: {name: torch.randn(5, 6, dtype=torch.float64) for name in ("x", "y")},
    ),
    "llama": (small(models.llama), text),
    "qwen3": (small(models.qwen3), text),
    "gpt2": (lambda: models.gpt2(n_layer=2), text),
    "bert": (small(models.bert), text),
    "t5": (models.t5, text),
    "vit": (
        small(models.vit),
        lambda: {"pixel_values": torch.randn(4, 3, 32, 32, dtype=torch.float64), "labels": torch.randint(0, 2, (4,))},
    ),
}
TIMES = {
    "mlp": 40,
    "convolutions": 20,
    "branches": 15,
    "llama": 20,
    "qwen3": 10,
    "gpt2": 10,
    "bert": 10,
    "t5": 5,
    "vit": 10,
}


def model_and_batch(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().double()
    return model, batch()


@pytest.fixture
def quick(monkeypatch):
    """Layouts need not be the cheapest to be right."""
    monkeypatch.setattr(least, "LARGEST", 1 << 10)
    monkeypatch.setattr(pairs, "LARGEST", 1 << 10)
    monkeypatch.setattr(pairs, "WHOLE_TABLE", 1 << 10)
    monkeypatch.setattr(pairs, "TURNS", 0)


@pytest.mark.parametrize("name, chunk", [(name, k) for name, n in TIMES.items() for k in range(n // 5)])
def test_random_plans(name, chunk, quick):
    """300 and more plans by chance, uneven sizes among them."""
    rng = random.Random(f"{name} {chunk}")
    model, batch = model_and_batch(name)
    more = {"clip_norm": 1.0} if rng.random() < 0.5 else {}
    if name not in ("branches", "convolutions") and rng.random() < 0.3:
        more["accumulate"] = 2 if next(iter(batch.values())).shape[0] % 2 == 0 else 5
    one = OneDevice.of(model, batch, **more)
    for _ in range(5):
        step_equals(one, random_plan(tensors(model), 2, rng))


PRODUCTS = [
    ("dp", {"dp": 4}),
    ("zero1", {"dp": 4}),
    ("zero2", {"dp": 3}),
    ("zero3", {"dp": 4}),
    ("tp", {"tp": 4}),
    ("tp2d", {"tx": 2, "ty": 2}),
    ("cp", {"cp": 3}),
    ("dp+tp", {"dp": 2, "tp": 2}),
    ("zero3+tp", {"dp": 2, "tp": 2}),
    ("zero3+tp", {"tp": 2, "dp": 3}),
    ("dp+cp", {"dp": 2, "cp": 2}),
    ("dp+tp+cp", {"dp": 2, "tp": 2, "cp": 2}),
    ("zero1+tp2d", {"dp": 2, "tx": 2, "ty": 2}),
    ("zero2+cp", {"dp": 2, "cp": 2}),
    ("zero3+tp+cp", {"dp": 2, "tp": 2, "cp": 2}),
]


@pytest.mark.parametrize("names, sizes", PRODUCTS, ids=[f"{names} {sizes}" for names, sizes in PRODUCTS])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "t5"])
def test_ready_plans_and_their_products(name, names, sizes, quick):
    step_equals(OneDevice.of(*model_and_batch(name), clip_norm=1.0), Plan.read(names, Mesh(sizes)))


def named(name, **more):
    """A small Hugging Face model by the name of its class."""
    return lambda: getattr(hf, name)(getattr(hf, name).config_class(**{**models.TEXT, "num_hidden_layers": 2, **more}))


OTHERS = {
    "gemma2": named("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8),
    "falcon": named("FalconForCausalLM"),
    "bloom": named("BloomForCausalLM", n_layer=2, n_head=4),
    "mixtral": models.mixtral,
    "mamba": named("MambaForCausalLM", state_size=4),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=models.VOCAB,
            dropout=0.0,
        )
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_no_plan_was_written_for(name, quick):
    torch.manual_seed(0)
    model, rng = OTHERS[name]().double(), random.Random(name)
    one = OneDevice.of(model, text(), clip_norm=1.0)
    chance = random_plan(tensors(model), 2, rng)
    layouts_by_name = lambda: chance.parameter_layouts(tensors(model)).items()
    while any(chance.mesh.count(x.dims[0]) > 4 for n, x in layouts_by_name() if ".experts." in n):
        chance = random_plan(tensors(model), 2, rng)  # ranks without experts are refused
    for written in (Plan.read("zero3+tp+cp", Mesh(dp=2, tp=2, cp=2)), chance):
        step_equals(one, written)


class Weighted(nn.Module):
    """Rows, and two tensors that are as long as the batch by chance."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6 + 3, 4)

    def forward(self, x, ids, target, weight, table):
        return nn.functional.cross_entropy(self.head(torch.cat([x, table[ids]], -1)), target, weight=weight)


def test_what_is_as_long_as_the_batch_by_chance_is_whole_on_every_rank():
    batch = {
        "x": torch.randn(4, 6, dtype=torch.float64),
        "ids": torch.tensor([3, 0, 0, 2]),
        "target": torch.tensor([1, 0, 3, 2]),
        "weight": torch.rand(4, dtype=torch.float64),
        "table": torch.randn(4, 3, dtype=torch.float64),
    }
    one = OneDevice.of(Weighted().double(), batch)
    mesh = Mesh(dp=2)
    distributed = step_equals(one, Plan(mesh, batch=["dp"]))
    program = one.unsharded.program
    lying = {program.role(v).name: x for v, x in zip(program.inputs, distributed.inputs, strict=True)}
    assert {name for name in batch if lying[name].is_whole} == {"weight", "table"}
    named = step_equals(one, Plan(mesh, batch={name: ["dp"] for name in batch}))
    lying = {program.role(v).name: x for v, x in zip(program.inputs, named.inputs, strict=True)}
    assert not any(lying[name].is_whole for name in batch), "what a plan names lies as it says"


@pytest.mark.parametrize(
    "names, sizes", [("zero3", {"dp": 3}), ("tp", {"tp": 2}), ("zero1+cp", {"dp": 2, "cp": 2})], ids=str
)
def test_a_step_that_is_skipped_is_skipped_by_all(names, sizes):
    one = OneDevice.of(*model_and_batch("llama"), clip_norm=1.0)
    step_equals(one, Plan.read(names, Mesh(sizes)), poison=True)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("names, sizes", [("zero3", {"dp": 2}), ("tp", {"tp": 2}), ("cp", {"cp": 2})], ids=str)
def test_half_precision(precision, names, sizes):
    """The same loss up to the rounding of 16 bits, in which sums in another order differ."""
    torch.manual_seed(0)
    one = OneDevice.of(MODELS["llama"][0](), text(), precision=precision)
    distributed = one.under(Plan.read(names, Mesh(sizes)))
    values = start_values(one)
    serial = interpret(one.unsharded.program, values)[0]
    parts = [spread_out(x, layout, Mesh(sizes)) for x, layout in zip(values, distributed.inputs, strict=True)]
    assert all(
        torch.allclose(loss, serial, rtol=4e-3) for loss in simulate(check(distributed.local), Mesh(sizes), parts)[0]
    )


def test_parameters_travel_in_16_bits_and_gradients_in_32():
    """A weight is cast before it is gathered, its gradient widened before it is summed."""
    one = OneDevice.of(MODELS["llama"][0](), text(), precision="bf16")
    messages = [
        (e.op.name, e.inputs[0].type)
        for _, e in walk(one.under(Plan.read("zero3", Mesh(dp=2))).local)
        if e.op.by_rank and e.inputs
    ]
    tables = {(97, 16), (97, 32)}  # the embedding is looked up in as it is
    gathered = [t for name, t in messages if name == "all_gather" and t.ndim == 2 and t.shape not in tables]
    summed = [t for name, t in messages if name == "reduce_scatter"]
    assert gathered and all(t.dtype == torch.bfloat16 for t in gathered)
    assert summed and all(t.dtype == torch.float32 for t in summed)


def test_what_a_rank_holds_under_zero():
    """Parameters, gradients and optimiser state: a quarter on four ranks."""
    one = OneDevice.of(*model_and_batch("llama"))
    distributed = one.under(Plan.read("zero3", Mesh(dp=4)))
    sizes = lambda program: sum(v.type.bytes for v in program.inputs if v.dtype.is_floating_point and v.type.ndim)
    assert sizes(distributed.local) <= 0.27 * sizes(one.unsharded.program)
    gradients = next(e for _, e in walk(distributed.local) if e.op.name == "adam")
    count = gradients.params["count"]
    whole = next(e for e in one.unsharded.program.main.eqns if e.op.name == "adam")
    mine, all_ = (sum(v.type.bytes for v in e.inputs[4 * count : 5 * count]) for e in (gradients, whole))
    assert mine <= 0.27 * all_


def test_every_ready_plan_is_among_them():
    assert {n for names, _ in PRODUCTS for n in names.split("+")} | {"ep"} == set(ready_plans())  # test_expert_ranks


# -- what is refused


def test_mistakes_in_plans_are_told():
    model, _ = model_and_batch("mlp")
    mesh = Mesh(dp=2)
    for written, message in [
        ({"parameters": {"net.9.weight": ["dp", "-"]}}, "net.9.weight matches no parameter\n  try       net"),
        ({"parameters": {"*.wieght": ["dp", "-"]}}, r"\*.wieght matches no parameter\n  try       \*.weight, \*.bias$"),
        ({"parameters": {"net.0.weight": ["dp"]}}, "1 dims, net.0.weight has 2"),
        ({"parameters": {"net.0.weight": ["dp", "dp"]}}, "axis 'dp' is used twice"),
        ({"parameters": {"net.0.weight": ["tp", "-"]}}, "no axis 'tp'\n  the mesh  Mesh\\(dp=2\\)"),
        ({"batch": ["pp"]}, "no axis 'pp'"),
        ({"zero": "4 over dp"}, "zero is '4 over dp'"),
        ({"zero": 3}, "says not over which axes"),
        ({"parametres": {}}, "unknown key 'parametres'\n  try       parameters"),
        ({"recompute": "some"}, "recompute: 'some'"),
        ("megatron", "there is no plan 'megatron'"),
    ]:
        with pytest.raises(PlanError, match=message):
            Plan.read(written, mesh).parameter_layouts(tensors(model))
    with pytest.raises(PlanError, match="no mesh is given"):
        Plan.read({"batch": ["dp"]})


@pytest.mark.parametrize(
    "mesh, plan", [(Mesh(dp=1), "auto"), (Mesh(dp=1, tp=1), "zero3+tp"), (Mesh(), "auto")], ids=str
)
def test_a_mesh_of_one_costs_nothing(mesh, plan):
    """The same program and the same code as without a mesh."""
    sources = []
    for more in ({}, {"mesh": mesh, "plan": plan}):
        model, batch = model_and_batch("llama")
        step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), **more).prepare(**batch)
        sources.append(step.source)
    assert sources[0] == sources[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_come_one_layer_ahead(precision):
    """A layer's parameters are asked for before the layer that comes before it, and not before the one before that; no
    layer holds a message."""
    torch.manual_seed(0)
    one = OneDevice.of(models.gpt2(n_layer=6), text(), precision=precision)
    program = ready_to_run(one.under(Plan.read("zero3", Mesh(dp=2))))
    assert not any(e.op.by_rank for name, e in walk(program) if name != program.entry)
    eqns, uses = program.main.eqns, chains(program.main)
    calls = [i for i, e in enumerate(eqns) if e.op is call]
    ahead = []
    for i in calls:
        arguments = [v for v in eqns[i].vars if uses[v].defined >= 0 and eqns[uses[v].defined].op.name == "finish"]
        begun = [
            uses[eqns[uses[v].defined].inputs[0]].defined
            for v in arguments
            if eqns[uses[v].defined].params["op"] == "all_gather"
        ]
        ahead.append({sum(b < c < i for c in calls) for b in begun})
    assert len(calls) == 12 and all(n <= {0, 1} for n in ahead) and sum(1 in n for n in ahead) >= 10, ahead


@pytest.mark.parametrize(
    "names, sizes", [("zero3", {"dp": 2}), ("tp", {"tp": 2}), ("dp+cp", {"dp": 2, "cp": 2})], ids=str
)
def test_what_is_computed_again_is_the_same_on_ranks(names, sizes):
    """With messages among it."""
    one, mesh = OneDevice.of(*model_and_batch("llama"), clip_norm=1.0), Mesh(sizes)
    distributed = one.under(Plan.read(names, mesh))
    program = check(transform.simplify(distributed.local))
    costs = Costs(program, CPU, False)
    full = residuals(program, one.unsharded.body, costs, [1.0])  # a byte is dearer than computing anything
    assert any(d.seconds for d in full.pairs)
    local = check(lower.overlap(check(lower.hoist(lower.reside(program, full)))))
    compared(one.unsharded.program, distributed, mesh, start_values(one), local)


def test_all_ranks_make_the_same_program():
    """Processes order the same sets differently: the messages of their programs must not follow."""
    code = (
        "from test_distribute import *; one = OneDevice.of(*model_and_batch('llama'), clip_norm=1.0)\n"
        "for names, sizes in (('zero3', {'dp': 2}), ('zero1+tp+cp', {'dp': 2, 'tp': 2, 'cp': 2})):\n"
        "    print(ready_to_run(one.under(Plan.read(names, Mesh(sizes)))))"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    ran = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (p.communicate()[0] for p in ran)
    assert first == second and len(first) > 10_000
