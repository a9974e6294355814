"""Experts split over ranks give what one device gives, whatever the routing; plans that split them, and plans that are
refused."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributing import OneDevice, start_values, step_equals
from expert_families import FAMILIES, family, quiet, text
from experts import SPLIT, Expert, Layer, Loop, Routed, operators, routed
from torch import nn

import mycel
from mycel import Mesh, Plan
from mycel.errors import PlanError
from mycel.ir import type_of, walk
from mycel.launch import launch
from mycel.parts import ShardedModel
from mycel.plan import CPU
from mycel.planning import Task, planned
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out


@pytest.mark.parametrize("how", ["random", "one", "few"])
@pytest.mark.parametrize("chosen, experts, message", [(4, 5, "all_gather"), (1, 7, "exchange_rows")])
def test_any_routing_is_exact_on_ranks(how, chosen, experts, message):
    """Also where the number of experts does not divide, where one gets all tokens, and where some get none."""
    one = OneDevice.of(Layer(experts), routed(how, experts, chosen=chosen), clip_norm=1.0)
    for mesh, batch in ((Mesh(ep=2), ["ep"]), (Mesh(dp=2, ep=2), ["dp.ep"])):
        distributed = step_equals(one, Plan(mesh, SPLIT, batch))
        assert message in operators(distributed.local)


def lowered_under(one: OneDevice, plan: Plan) -> mycel.lower.Lowered:
    inputs = ShardedModel(one.model, one.optimizer, plan).given(one.unsharded)
    return planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, *inputs), plan)[1]


def test_rows_travel_to_experts_in_fewer_bytes():
    """Each row by itself, there and back, forward and backward, beside weights that stay as they are: by fp32 near to
    what 64 bits give, by int8 a quarter of its bytes and not far off."""
    batch, mesh = routed("random", 7, chosen=1, width=32), Mesh(ep=2)
    one = OneDevice.of(Layer(7, width=32), batch)
    plans = {
        codec: Plan(mesh, SPLIT, ["ep"], send={"experts": codec} if codec else {}) for codec in ("", "fp32", "int8")
    }
    values = start_values(one)
    serial = interpret(one.unsharded.program, values)
    sent = {}
    for codec, near in (("", 1e-9), ("fp32", 1e-5), ("int8", 5e-2)):
        lowered = lowered_under(one, plans[codec])
        inputs = [spread_out(x, at, mesh) for x, at in zip(values, lowered.spread.inputs, strict=True)]
        got = simulate(lowered.program, mesh, inputs)
        for want, parts, at in zip(serial, got, lowered.spread.outputs, strict=True):
            whole = put_together(parts, at, type_of(want), mesh)
            largest = float(want.abs().max().clamp(min=1e-3)) if want.is_floating_point() else 1.0
            assert float((whole.double() - want.double()).abs().max()) <= near * largest
        rows = [e.vars for _, e in walk(lowered.program) if e.op.name == "exchange_rows"]
        sent[codec] = sum(x.type.bytes // x.shape[0] for x, *_ in map(list, rows) if x.shape[1] > 1)
    assert sent[""] == 8 * (32 + 32 + 64) and sent["fp32"] == sent[""] / 2  # there, back, and with its cotangent there
    assert sent["int8"] == (32 + 2 * 4) + (32 + 2 * 4) + (64 + 2 * 4)  # in two blocks: one would serve gradients badly


def test_without_rows_that_travel_nothing_can_be_encoded():
    one = OneDevice.of(Layer(5), routed("random", 5))
    plan = Plan(Mesh(ep=2), {}, ["ep"], send={"experts": "int8"})  # every rank has all experts
    with pytest.raises(PlanError, match="no tokens travel to the ranks of their experts"):
        lowered_under(one, plan)


@pytest.mark.parametrize("chosen", [1, 4])
def test_a_rank_is_priced_for_its_share(chosen):
    """Whether tokens are gathered or rows exchanged, half of the products are its own."""
    one = OneDevice.of(Layer(4), routed("random", 4, chosen=chosen))
    local = one.under(Plan(Mesh(ep=2), SPLIT, ["ep"])).local
    for name in ("experts", "experts_grad"):
        whole, own = (
            next(e.op.cost(e.input_types, e.params).flops for _, e in walk(p) if e.op.name == name)
            for p in (one.unsharded.program, local)
        )
        assert own == whole / 2


READY = [
    ("ep", {"ep": 4}),
    ("ep+tp", {"ep": 2, "tp": 2}),
    ("dp+ep", {"dp": 2, "ep": 3}),
    ("zero3+ep", {"dp": 2, "ep": 2}),
]
FURTHER = [
    ("mixtral", "zero3+ep+cp", {"dp": 2, "ep": 2, "cp": 2}),
    ("olmoe", "zero2+ep+tp", {"dp": 2, "ep": 2, "tp": 2}),
    ("qwen2_moe", "dp+ep+tp+cp", {"dp": 2, "ep": 2, "tp": 2, "cp": 2}),
]


@pytest.mark.parametrize("name, names, sizes", [*((name, *plan) for name in FAMILIES for plan in READY), *FURTHER])
def test_ready_plans_for_experts(name, names, sizes):
    """Every family under each of them, also where the number of experts does not divide."""
    one = OneDevice.of(quiet(family(name).double()), text(), clip_norm=1.0)
    distributed = step_equals(one, Plan.read(names, Mesh(sizes)))
    own = {e.input_types[-4].shape[0] for _, e in walk(distributed.local) if e.op.name in ("experts", "experts_grad")}
    split = sizes["ep"] * sizes.get("tp", 1)  # whole experts over both
    assert own == {-(-FAMILIES[name][1].get("num_experts", 4) // split)}


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"dp": 2}], ids=str)
def test_half_precision_on_ranks(sizes):
    """The same loss up to the rounding of 16 bits; the weights that a router gives stay in 32."""
    mesh = Mesh(sizes)
    one = OneDevice.of(family("mixtral"), text(), precision="bf16")
    layer = next(e for _, e in walk(one.unsharded.program) if e.op.name == "experts")
    assert [t.dtype for t in layer.input_types[:4:2]] == [torch.bfloat16, torch.float32]
    distributed, values = one.under(Plan.read(*sizes, mesh)), start_values(one)
    serial = interpret(one.unsharded.program, values)[0]
    parts = [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    assert all(torch.allclose(loss, serial, rtol=4e-3) for loss in simulate(distributed.local, mesh, parts)[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_processes(ranks, tmp_path):
    child = str(Path(__file__).parent / "experts_child.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([], ranks, program=[child], env=env, logs=tmp_path) == 0, "".join(
        p.read_text() for p in tmp_path.glob("*") if p.is_file()
    )


def test_more_ranks_than_experts_are_refused():
    one = OneDevice.of(family("mixtral").double(), text(8))
    with pytest.raises(PlanError, match=r"4 experts over 8 ranks(.|\n)*layers\.0\.mlp\.experts\.\w+: \[ep,-,-\]"):
        one.under(Plan.read("ep", Mesh(ep=8)))


# -- experts that are modules in a list, and experts that no pattern names


@pytest.mark.parametrize("ranks, gated", [(2, True), (4, False)])
def test_modules_in_a_list_split_over_ranks(ranks, gated):
    """A rank holds a part of each expert."""
    model = Loop("added", experts=5, width=16, hidden=24, gated=gated)
    one = OneDevice.of(model, {"x": torch.randn(8, 16, dtype=torch.float64)}, clip_norm=1.0)
    distributed = step_equals(one, Plan.read("ep", Mesh(ep=ranks)))
    program = one.unsharded.program
    for v, layout in zip(program.inputs, distributed.inputs, strict=True):
        if program.role(v).name.startswith("experts.") and v.ndim == 2:
            assert layout.axes == {"ep"}, program.role(v)


def test_large_experts_in_a_list_are_whole_on_their_ranks():
    """Where that sends less than all of their weights to all ranks."""
    model = Loop("added", experts=8, width=64, hidden=256)
    one = OneDevice.of(model, {"x": torch.randn(16, 64, dtype=torch.float64)})
    local = one.under(Plan.read("ep", Mesh(ep=4))).local
    layers = [e for _, e in walk(local) if e.op.name in ("experts", "experts_grad")]
    assert [e.input_types[-4].shape for e in layers] == [(2, 512, 64)] * 2
    assert "exchange_rows" in operators(local)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_more_ranks_than_modules_in_a_list_are_refused(precision):
    one = OneDevice.of(Loop("added").float(), {"x": torch.randn(8, 4)}, precision=precision)
    with pytest.raises(PlanError, match=r"3 experts over 4 ranks(.|\n)*experts\.\d\.\w+\.weight: \[-,ep\](.|\n)*try"):
        one.under(Plan.read("ep", Mesh(ep=4)))


def test_more_ranks_than_experts_are_refused_in_half_precision():
    one = OneDevice.of(family("mixtral"), text(8), precision="bf16")
    with pytest.raises(PlanError, match="4 experts over 8 ranks"):
        one.under(Plan.read("ep", Mesh(ep=8)))


class Named(nn.Module):
    """Experts whose names no ready plan knows: rows of tensors, and modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.router = Routed(4), nn.Linear(4, 4, dtype=torch.float64)
        self.mlps = nn.ModuleList(Expert(4, 6, True) for _ in range(4)).double()

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.mlps):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return self.mixture(x + y)


def test_a_plan_for_experts_that_splits_none_says_so():
    """With the lines to write; written, they split both."""
    one = OneDevice.of(Named(), {"x": torch.randn(8, 4, dtype=torch.float64)})
    with pytest.warns(UserWarning, match="ep=2 splits the batch alone: every rank has all experts of ") as record:
        lowered_under(one, Plan.read("ep", Mesh(ep=2)))
    (said,) = [str(w.message) for w in record if "splits the batch alone" in str(w.message)]
    entries = dict(re.findall(r"'([\w.*]+)': \[([-\w, ]+)\]", said))
    assert entries["mixture.up"] == "ep, -, -" and entries["mlps.*.down.weight"] == "-, ep"
    parameters = {name: entry.split(", ") for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered_under(one, Plan(Mesh(ep=2), parameters, ["ep"]))
    step_equals(one, Plan(Mesh(ep=2), parameters, ["ep"]))


def test_a_plan_for_experts_of_a_model_without_says_so():
    one = OneDevice.of(Plain(), {"x": torch.randn(8, 4)})
    with pytest.warns(UserWarning, match=r"ep=2 splits the batch alone: the model has no layer of experts\n  try"):
        lowered_under(one, Plan.read("ep", Mesh(ep=2)))


class AllAtOnce(Layer):
    """Experts that choose their tokens: products of all of them at once, which are no layer of experts."""

    def forward(self, x, scores):
        weights, ids = scores.softmax(0).t().topk(3)
        rows = self.gate(x[ids] @ self.up.transpose(1, 2)) @ self.down.transpose(1, 2) * weights.unsqueeze(-1)
        return (x + torch.zeros_like(x).index_add(0, ids.flatten(), rows.flatten(0, 1))).square().mean()


def test_experts_that_choose_their_tokens_split_over_ranks():
    """Nobody says then that they do not; where nothing lies over `ep`, somebody does."""
    x, scores = (torch.randn(8, n, dtype=torch.float64) for n in (4, 6))
    one = OneDevice.of(AllAtOnce(6), {"x": x, "scores": scores})
    plan = Plan(Mesh(ep=2), SPLIT, ["ep"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local = lowered_under(one, plan).program
    products = {e.outputs[0].shape[0] for _, e in walk(local) if e.op.name == "matmul" and e.outputs[0].ndim == 3}
    assert products == {3}
    step_equals(one, plan)
    with pytest.warns(UserWarning, match="ep=2 splits the batch alone"):
        lowered_under(one, Plan(Mesh(ep=2), {}, ["ep"]))


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x).square().mean()


def test_attention_and_experts_on_meshes_of_their_own():
    """The same four ranks: attention over two of them, experts over all; tokens are moved in between."""
    attention = Plan.read("tp", Mesh(dp=2, tp=2))
    parameters = {name: layout for name, layout in attention.parameters.items() if "experts" not in name}
    rows = {f"*.experts.{name}": ["dp.tp", "-", "-"] for name in ("gate_up_proj", "down_proj")}
    plan = replace(attention, parameters={**rows, **parameters}, batch=["dp"])
    distributed = step_equals(OneDevice.of(family("mixtral").double(), text(), clip_norm=1.0), plan)
    layers = [e for _, e in walk(distributed.local) if e.op.name in ("experts", "experts_grad")]
    assert {e.input_types[-4].shape[0] for e in layers} == {1}
