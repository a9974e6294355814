"""Mixtures of experts: the families in use train as in torch, whichever way their experts are computed there; experts
split over ranks give the same, whatever the routing.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from distributing import OneDevice, start_values, step_equals
from expert_families import FAMILIES, family, text
from experts import Layer, Loop, Routed, StackedLoop, routed
from models import VOCAB
from stepping import plain_step
from torch import nn
from transformers.models.switch_transformers import modeling_switch_transformers

import mycel
from mycel import Mesh, Plan
from mycel.errors import CaptureError, PlanError, RunError
from mycel.expert_placement import balanced, by_rank
from mycel.expert_rows import expert_layers
from mycel.ir import type_of, walk
from mycel.launch import launch
from mycel.parts import ShardedModel
from mycel.plan import CPU
from mycel.planning import Task, planned
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out

IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def operators(program):
    return {e.op.name for _, e in walk(program)}


def quiet(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_torch(name):
    """Losses, and parameters after two steps; in 64 bits, but for norms and routers that compute in 32."""
    model = quiet(family(name).double()).train(name != "phimoe")  # whose router draws numbers in training
    twin = copy.deepcopy(model)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
    step = mycel.train_step(model, adamw[0], compile=False)
    for _ in range(2):
        assert float(step(**text())) == pytest.approx(plain_step(twin, adamw[1], text()), rel=1e-6)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert {"dispatch", "grouped_matmul", "collect"} <= operators(step.program)


def test_every_implementation_is_the_same_program():
    def captured(how):
        model = family("mixtral", how)
        return mycel.capture(lambda ids: model(input_ids=ids).logits, text()["input_ids"])

    programs = [captured(how) for how in IMPLEMENTATIONS]
    assert len(set(map(str, programs))) == 1
    assert [e.op.name for _, e in walk(programs[0])].count("experts") == 1  # of a block that is called for each layer


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_experts_whose_results_are_normed_are_the_same_program(how):
    """Muse Spark norms the row of each expert before it is weighed."""
    model = normed(how).double()
    twin = copy.deepcopy(model)
    twin.config._experts_implementation = "eager"
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
    ids = text()["input_ids"]

    def loss(net, input_ids):
        return net(input_ids=input_ids).last_hidden_state.sin().sum()

    step = mycel.train_step(model, optimizers[0], loss=lambda model, input_ids: loss(model, input_ids), compile=False)
    for _ in range(2):
        optimizers[1].zero_grad()
        (want := loss(twin, ids)).backward()
        optimizers[1].step()
        assert float(step(input_ids=ids)) == pytest.approx(float(want.detach()), rel=1e-6)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert {"dispatch", "grouped_matmul", "collect"} <= operators(step.program)


def normed(how: str) -> nn.Module:
    from transformers.models.muse_spark import MuseSparkTextConfig, MuseSparkTextModel

    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 16, "moe_hidden_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    tokens = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = MuseSparkTextConfig(**sizes, **heads, **tokens, hidden_size=32, max_position_embeddings=64)
    config._experts_implementation = how
    model: nn.Module = MuseSparkTextModel(config)
    return model


@pytest.mark.parametrize("name", ["step3p7", "longcat_flash"])
def test_loops_of_the_library_without_its_choice(name):
    """Layers that transformers writes out; of LongCat's choices some are of experts without weights."""
    torch.manual_seed(0)
    model, spread = written_out(name).double(), 8
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    x = torch.randn(10, 12, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(10, spread, dtype=torch.float64).sigmoid()

    def forward(x, scores):
        weights, ids = torch.topk(scores, 3)
        return model(x, ids, weights).sin().sum()

    value = forward(x, scores.requires_grad_())
    wanted = torch.autograd.grad(value, [x, scores, *model.parameters()])
    ours = mycel.value_and_grad(forward, argnums=(0, 1))(x, scores)
    torch.testing.assert_close(ours[0], value)
    theirs = mycel.value_and_grad(lambda x, scores: forward(x, scores), wrt=model)(x, scores)
    for a, b in zip((*ours[1], *theirs[1].values()), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert "experts" in operators(mycel.capture(forward, x, scores))


def written_out(name: str) -> nn.Module:
    from transformers.models.longcat_flash import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
    from transformers.models.step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    model: nn.Module
    if name == "step3p7":
        config = Step3p7TextConfig(hidden_size=12, moe_intermediate_size=10, num_local_experts=8)
        model = Step3p7Experts(config, swiglu_limit=0.5)
    else:
        sizes = {"hidden_size": 12, "expert_ffn_hidden_size": 10, "n_routed_experts": 5, "zero_expert_num": 3}
        model = LongcatFlashExperts(LongcatFlashConfig(**sizes))
    return model


def test_what_is_written_with_torchs_grouped_products():
    def f(x, w, ends):
        return nn.functional.grouped_mm(x, w.transpose(-2, -1), offs=ends)

    x, w, ends = torch.randn(8, 16), torch.randn(3, 8, 16), torch.tensor([3, 3, 8], dtype=torch.int32)
    assert "grouped_matmul" in operators(mycel.capture(f, x, w, ends))
    torch.testing.assert_close(mycel.jit(f)(x, w, ends), f(x, w, ends))


@pytest.mark.parametrize("how", ["random", "one", "few"])
def test_a_layer_written_by_hand(how):
    layer, batch = Layer(5), routed(how, 5)
    wanted = layer(**batch)
    wanted.backward()
    loss, grads = mycel.value_and_grad(layer.forward, wrt=layer)(**batch)
    torch.testing.assert_close(loss, wanted.detach())
    for name, p in layer.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def dense(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A layer with a capacity, one choice after the other."""
    counts = [0] * len(layer.up)
    y = [torch.zeros_like(row) for row in x]
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            counts[e] += 1
            if counts[e] <= layer.capacity:
                y[t] = y[t] + weights[t, j] * (layer.down[e] @ layer.gate(layer.up[e] @ x[t]))
    return (x + torch.stack(y)).square().mean()


@pytest.mark.parametrize("how, capacity", [("random", 1), ("one", 3)])
def test_a_capacity_drops_the_last_choices(how, capacity):
    """As counted one by one: in plain torch, captured with gradients, and on ranks."""
    layer, batch = Layer(5, capacity=capacity), routed(how, 5)
    batch = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in batch.items()}
    wanted = dense(layer, **batch)
    torch.testing.assert_close(layer(**batch), wanted)
    grads = torch.autograd.grad(wanted, [batch["x"], batch["weights"]])
    ours = mycel.grad(lambda x, w: layer(x, batch["ids"], w), argnums=(0, 1))(batch["x"], batch["weights"])
    for a, b in zip(ours, grads, strict=True):
        torch.testing.assert_close(a, b)
    one = OneDevice.of(layer, {name: x.detach() for name, x in batch.items()})
    step_equals(one, Plan(Mesh(ep=2), SPLIT, ["ep"]))


class Switch(nn.Module):
    """A layer of Switch Transformers, whose experts drop some tokens of a sequence; its loss is the square of what it
    gives."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = hf.SwitchTransformersConfig(
            d_model=8, d_ff=12, num_experts=3, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0
        )
        self.layer = modeling_switch_transformers.SwitchTransformersSparseMLP(config).double()
        self.layer.router.dtype = torch.float64

    def forward(self, x):
        return (x + self.layer(x)).square().mean()


def test_a_capacity_as_switch_transformers_have_it():
    model, x = Switch(2), torch.randn(4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    step = mycel.train_step(model, sgd[0], compile=False, strict=True)
    assert not torch.allclose(twin(x), Switch(99)(x))  # it drops some
    for _ in range(2):
        assert float(step(x=x)) == pytest.approx(plain_step(twin, sgd[1], {"x": x}), rel=1e-9)
    names = operators(step.program)
    assert "grouped_matmul" in names and not names & {"island", "index_add"}
    step_equals(OneDevice.of(Switch(2), {"x": x}), Plan(Mesh(dp=2), {}, ["dp"]))
    none = Switch(0)
    with pytest.raises(CaptureError, match="expert_capacity=0: every token would be dropped"):
        mycel.train_step(none, torch.optim.SGD(none.parameters()), strict=True)(x=x)


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_a_capacity_that_drops_everything_is_refused(capacity):
    layer, batch = Layer(5, capacity=capacity), routed("random", 5)
    with pytest.raises(CaptureError, match="every choice would be dropped"):
        mycel.capture(layer, *batch.values())


def test_what_does_not_fit_is_told():
    layer, batch = Layer(5), routed("random", 5)
    with pytest.raises(CaptureError, match="weights does not fit"):
        layer(**{**batch, "weights": batch["weights"][:, :1]})
    layer.gate = lambda h: h[:, :6] / h.sum()
    with pytest.raises(CaptureError, match="the gate does more"):
        mycel.capture(layer, *batch.values())


# -- on ranks

SPLIT = {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}


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


@pytest.mark.parametrize(
    "name, names, sizes",
    [
        ("mixtral", "ep", {"ep": 2}),
        ("gpt_oss", "ep+tp", {"ep": 2, "tp": 2}),
        ("qwen3_moe", "dp+ep", {"dp": 2, "ep": 3}),
        ("deepseek_v3", "zero3+ep", {"dp": 2, "ep": 2}),
        ("llama4", "ep", {"ep": 2}),
        ("mixtral", "zero3+ep+cp", {"dp": 2, "ep": 2, "cp": 2}),
    ],
)
def test_ready_plans_for_experts(name, names, sizes):
    step_equals(OneDevice.of(family(name).double(), text(), clip_norm=1.0), Plan.read(names, Mesh(sizes)))


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


def test_experts_on_processes(tmp_path):
    child = str(Path(__file__).parent / "experts_child.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([], 2, program=[child], env=env, logs=tmp_path) == 0, "".join(
        p.read_text() for p in tmp_path.glob("*") if p.is_file()
    )


# -- where tokens go, and what is refused


def test_the_load_of_experts_by_layer():
    model = family("qwen3_moe").double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    load = step.expert_load(**text())
    assert list(load) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(counts.shape == (5,) and counts.sum() == 2 * 24 for counts in load.values())
    model.model.layers[1].mlp.gate.weight.data.fill_(torch.nan)
    with pytest.raises(RunError, match=r"router of model\.layers\.1\.mlp\.experts gives weights that are not finite"):
        step.expert_load(**text())


@pytest.mark.parametrize("how", ["added", "in_place", "mixtral", "first", "columns", "repeated"])
def test_the_load_of_loops_over_experts(how):
    """A layer that is one operator only once it is captured has a load as well."""
    model, x = Loop(how), torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chosen = torch.topk(model.router(x), 2).indices[:, : 1 if how == "first" else 2]
    expected = chosen.reshape(-1).bincount(minlength=3)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    assert torch.equal(step.expert_load(x=x)["experts"], expected)
    step(x=x)
    assert torch.equal(step.expert_load()["experts"], expected.float())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_measure_the_load_of_experts(accumulate):
    """A moving average of what single batches give, as far as parts of them give the same."""
    model, x = Routed(6), torch.randn(8, 4, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    step = mycel.train_step(model, sgd, compile=False, expert_load=True, accumulate=accumulate)
    average = None
    for i in range(3):
        step(x=x + i)
        load = step.expert_load(x=x + i)["the model"].double()
        average = load if average is None else average + 0.1 * (load - average)
        torch.testing.assert_close(step.expert_load()["the model"].double(), average, atol=1e-5, rtol=0)
    step.load_state_dict(step.state_dict())  # it is part of a step's state
    torch.testing.assert_close(step.expert_load()["the model"].double(), average, atol=1e-5, rtol=0)


def test_a_step_names_the_layer_whose_router_breaks():
    model = family("qwen3_moe").double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    model.model.layers[1].mlp.gate.weight.data.fill_(torch.nan)
    step(**text())
    with pytest.raises(RunError, match=r"router of model\.layers\.1\.mlp\.experts gives weights that are not finite"):
        step.expert_load()


def test_choices_of_experts_that_are_not_there():
    layer, batch = Layer(5), routed("few", 5)
    step = mycel.train_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1), compile=False)
    assert step.expert_load(**batch)["the model"].tolist() == [0, 0, 0, *torch.bincount(batch["ids"].view(-1))[3:]]
    with pytest.raises(RunError, match="choices of experts that are not there: ids must be 0 to 4"):
        step.expert_load(**{**batch, "ids": batch["ids"] + 5})


class Idle(nn.Module):
    """LongCat's layer: of its experts the last have no weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.router = written_out("longcat_flash").double(), nn.Linear(12, 8, dtype=torch.float64)
        for p in self.layer.parameters():
            torch.nn.init.normal_(p, std=0.4)

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).sigmoid(), 3)
        return self.layer(x, ids, weights).square().mean()


def test_the_load_of_experts_some_of_which_have_no_weights():
    model, x = Idle(), torch.randn(10, 12, dtype=torch.float64)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    expected = torch.topk(model.router(x), 3).indices.view(-1).bincount(minlength=8)[:5]
    assert torch.equal(step.expert_load(x=x)["layer"], expected) and expected.sum() < 30
    step(x=x)
    assert torch.equal(step.expert_load()["layer"], expected.float())


class Inner(nn.Module):
    """A layer of experts inside of a model."""

    def __init__(self, **more: int) -> None:
        super().__init__()
        self.mixture = Layer(5, **more)

    def forward(self, x, ids, weights):
        return self.mixture(x, ids, weights)


@pytest.mark.parametrize("bad", [5, 261, -1])
@pytest.mark.parametrize("more", [{}, {"capacity": 2}], ids=str)
def test_a_step_names_the_layer_whose_choices_are_of_no_expert(bad, more):
    model, batch = Inner(**more), routed("random", 5)
    wrong = {**batch, "ids": batch["ids"].index_fill(0, torch.tensor(3), bad)}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step(**batch)
    says = r"mixture: choices of experts that are not there: ids must be 0 to 4\n  at        .*experts\.py:\d+\n  try"
    with pytest.raises(RunError, match=says):
        step(**wrong)
    with pytest.raises(RunError, match=r"mycel\.experts: choices of experts that are not there"):
        model(**wrong)


def test_ranks_name_the_layer_whose_choices_are_of_no_expert():
    batch, mesh = routed("random", 5, chosen=1), Mesh(ep=2)
    one = OneDevice.of(Inner(), batch)
    distributed = one.under(Plan(mesh, {f"mixture.{name}": layout for name, layout in SPLIT.items()}, ["ep"]))
    assert "exchange_rows" in operators(distributed.local)
    values = start_values(one)
    next(x for x in values if x.dtype == torch.int64 and x.ndim == 2)[3] = 5
    parts = [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    with pytest.raises(RunError, match="mixture: choices of experts that are not there"):
        simulate(distributed.local, mesh, parts)


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "llama4"])
def test_choices_of_a_topk_need_no_check(name):
    model = family(name)
    program = mycel.capture(lambda ids: model(input_ids=ids, use_cache=False).logits, text()["input_ids"])
    assert "experts" in operators(program) and "assert_true" not in operators(program)


@pytest.mark.parametrize("ends", [[3, 3, 6], [3, 2, 8], [3, 5, 9]])
def test_counts_that_do_not_add_up(ends):
    def f(x, w, ends):
        return nn.functional.grouped_mm(x, w, offs=ends)

    with pytest.raises(RunError, match=r"counts of groups that do not add up: \[3, .*\] are \d of 8 rows"):
        mycel.jit(f)(torch.randn(8, 16), torch.randn(3, 16, 8), torch.tensor(ends, dtype=torch.int32))


# -- experts change places


def test_experts_are_balanced_over_ranks():
    """Any loads and numbers of experts: nobody is lost, each rank keeps its number, the busiest never gets more, and
    equal pairs end up apart."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 5, (int(torch.randint(2, 5, (), generator=g)),), generator=g).tolist()
        load = (torch.rand(sum(sizes), generator=g) ** 4 * 100).tolist()
        order = balanced(load, sizes)
        assert sorted(order) == list(range(len(load)))
        assert max(by_rank([load[i] for i in order], sizes)) <= max(by_rank(load, sizes))
    assert balanced([90, 80, 5, 6], [2, 2]) == [0, 2, 1, 3]
    assert balanced([1, 1, 1, 1], [2, 2]) == [0, 1, 2, 3]


def test_groups_of_experts_stay_together():
    """Whole groups go to ranks that have several, experts of one to ranks that share it."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        group, groups, ranks = (2 ** int(torch.randint(1, 4, (), generator=g)) for _ in range(3))
        load = (torch.rand(group * groups, generator=g) ** 4 * 100).tolist()
        sizes = [len(load) // ranks] * ranks if len(load) >= ranks else [1] * len(load)
        order = balanced(load, sizes, group)
        assert sorted(order) == list(range(len(load)))
        assert all(len({k // group for k in order[i : i + group]}) == 1 for i in range(0, len(order), group))
        assert max(by_rank([load[i] for i in order], sizes)) <= max(by_rank(load, sizes))
    assert balanced([9, 0, 8, 0, 1, 0, 1, 0], [4, 4], 2) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert balanced([9, 8, 1, 0, 7, 6, 0, 1], [2, 2, 2, 2], 4) == [0, 3, 1, 2, 4, 6, 5, 7]
    assert balanced([9, 8, 1, 0, 7, 6], [4, 2], 3) == [0, 1, 2, 3, 4, 5]  # a rank has parts of two


PLACED: dict[str, tuple[dict[str, Any], int]] = {
    "olmoe": ({}, 1),
    "gpt_oss": ({}, 1),
    "llama4": ({}, 1),
    "deepseek_v2": ({"topk_method": "group_limited_greedy", "first_k_dense_replace": 0}, 2),
    "deepseek_v3": ({"first_k_dense_replace": 0}, 2),
}


def after_moving(name, order):
    """Losses of three steps, and of three between which experts changed places."""
    more, group = PLACED[name]
    models = [quiet(family(name, **more).double()) for _ in range(2)]
    steps = [mycel.train_step(m, torch.optim.AdamW(m.parameters(), lr=1e-2), compile=False) for m in models]
    losses = [[float(step(**text()))] for step in steps]
    for layer in expert_layers(steps[0]._captured_program):
        assert not layer.fixed and layer.group == group
        steps[0].state.reorder({name: (dim, order) for name, dim in layer.tensors.items()})
    moved, stayed = (next(p for n, p in m.named_parameters() if n.endswith("experts.down_proj")) for m in models)
    assert torch.equal(moved[1], stayed[order[1]]) and not torch.equal(moved[1], stayed[1])
    for _ in range(2):
        for step, own in zip(steps, losses, strict=True):
            own.append(float(step(**text())))
    return losses


@pytest.mark.parametrize("name", PLACED)
def test_experts_change_places_and_nothing_else_changes(name):
    """With the rows of their routers, biases and optimiser state: losses go on as if they had not."""
    moved, stayed = after_moving(name, (2, 0, 3, 1) if PLACED[name][1] == 1 else (3, 2, 0, 1))
    assert moved == pytest.approx(stayed, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, (_, group) in PLACED.items() if group > 1])
def test_experts_in_other_groups_would_be_others(name):
    moved, stayed = after_moving(name, (2, 0, 3, 1))
    assert moved != pytest.approx(stayed, rel=1e-6)


class Grouped(nn.Module):
    """Experts chosen in 2 groups of 3, by what `best` makes of the scores of a group."""

    def __init__(self, best):
        super().__init__()
        self.best, self.router, self.weigh = best, nn.Linear(4, 6), nn.Parameter(torch.rand(3))
        self.layer, self.of_group = Layer(6), nn.Parameter(torch.rand(2))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = self.best(self, scores.view(-1, 2, 3))
        mask = torch.zeros_like(best).scatter(1, best.topk(1)[1], 1.0)
        allowed = scores.masked_fill(mask.unsqueeze(-1).expand(-1, 2, 3).reshape(scores.shape) == 0, 0.0)
        weights, ids = allowed.topk(2)
        return self.layer(x, ids, weights)


BEST = {
    "sums": (lambda self, x: x.sum(-1), ""),
    "a function of each": (lambda self, x: x.exp().mul(2).amax(2), ""),
    "weighed by place": (lambda self, x: (x * self.weigh).sum(-1), "in groups"),
    "products": (lambda self, x: x @ self.weigh, "in groups"),
    "the first of each": (lambda self, x: x[:, :, 0], "in groups"),
    "a weight of each group": (lambda self, x: x.sum(-1) + self.of_group, "a row for each of 2"),
    "the best one's place": (lambda self, x: x.sum(-1) + x.argmax(-1), "in groups"),
}


@pytest.mark.parametrize("how", BEST)
def test_groups_are_those_whose_order_does_not_matter(how):
    best, why = BEST[how]
    (layer,) = expert_layers(mycel.capture(Grouped(best).double(), torch.randn(5, 4).double()))
    assert (why in layer.fixed and layer.group == 1) if why else (not layer.fixed and layer.group == 3)


def test_experts_that_are_not_treated_alike_stay():
    model = family("phimoe")
    program = mycel.capture(lambda ids: model(input_ids=ids, use_cache=False).logits, text()["input_ids"])
    assert all("exponential makes a row for each" in layer.fixed for layer in expert_layers(program))


def test_experts_that_the_batch_chooses_stay():
    layer, batch = Layer(5), routed("random", 5)
    (experts,) = expert_layers(mycel.capture(layer, *batch.values()))
    assert "who is chosen is given" in experts.fixed


def test_more_ranks_than_experts_are_refused():
    one = OneDevice.of(family("mixtral").double(), text(8))
    with pytest.raises(PlanError, match=r"4 experts over 8 ranks(.|\n)*layers\.0\.mlp\.experts\.\w+: \[ep,-,-\]"):
        one.under(Plan.read("ep", Mesh(ep=8)))


# -- loops over experts


def same_as_torch(model: nn.Module, x: torch.Tensor) -> None:
    """Loss and gradients; an expert that no token chooses has zeros where a loop leaves it out."""
    wanted = model(x)
    wanted.backward()
    loss, grads = mycel.value_and_grad(model.forward, wrt=model, strict=True)(x)
    torch.testing.assert_close(loss, wanted.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize("how, gated", [("added", False), ("in_place", True), ("mixtral", True)])
def test_a_loop_over_experts_is_one_operator(how, gated, recwarn):
    """Whose weights are put together where it runs; with losses and gradients of torch, and on ranks."""
    model, x = Loop(how, gated=gated), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and not names & {"index_add", "index_put", "index"}
    same_as_torch(model, x)
    assert not [w for w in recwarn if "computes every one" in str(w.message)]
    if how == "mixtral":
        step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(dp=2), {}, ["dp"]))


@pytest.mark.parametrize("how", ["first", "columns", "whichever", "repeated"])
def test_a_loop_that_writes_where_a_mask_holds_is_one_operator(how):
    """Rows of one choice or several, overwritten or added to, in a branch or not."""
    model, x = Loop(how, gated=how != "columns"), torch.randn(6, 4, dtype=torch.float64)
    program = mycel.capture(model, x)
    names = operators(program)
    assert "experts" in names and not names & {"cond", "any"}
    assert sum(e.op.name == "linear" for _, e in walk(program)) == 1  # the router
    same_as_torch(model, x)


WAYS = ["continued", "length_asked", "counted", "hit", "hit_numbers", "unique", "tutorial", "unweighted", "overwritten"]


@pytest.mark.parametrize("how", WAYS)
def test_ways_to_write_a_loop(how, recwarn):
    """Also where one expert gets no token: the last has a bias."""
    model, x = Loop(how, gated=how != "unique"), torch.randn(6, 4, dtype=torch.float64)
    model.router.bias.data[2] = -9.0
    program = mycel.capture(model, x)
    names = operators(program)
    assert "experts" in names and not names & {"cond", "index_add", "index_put"}
    assert sum(e.op.name == "linear" for _, e in walk(program)) == 1  # the router
    assert not [w for w in recwarn if "computes every one" in str(w.message)]
    same_as_torch(model, x)


def test_a_loop_whose_experts_get_weighed_tokens():
    model, x = Loop("weighed_before"), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and "index_add" not in names
    same_as_torch(model, x)
    step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(dp=2), {}, ["dp"]))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_loop_over_rows_of_tensors_splits_over_ranks(transposed):
    """Their rows are not put together again: the tensors are what ranks have parts of."""
    model, x = StackedLoop(transposed), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and not names & {"index_add", "stack", "select"}
    same_as_torch(model, x)
    distributed = step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(ep=2), SPLIT, ["ep"]))
    assert {"experts", "experts_grad"} <= operators(distributed.local)


@pytest.mark.parametrize("tokens", [6, 96])
@pytest.mark.parametrize("how", ["last_wins", "if_many", "if_many_places", "if_many_inside", "both_overwritten"])
def test_a_mask_that_says_more_stays_as_it_is(how, tokens):
    model, x = Loop(how), torch.randn(tokens, 4, dtype=torch.float64)
    assert "experts" not in operators(mycel.capture(model, x))
    same_as_torch(model, x)


@pytest.mark.parametrize("how", ["some", "twice"])
def test_a_loop_that_does_more_stays_as_it_is(how):
    model, x = Loop(how), torch.randn(6, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"computes every one(.|\n)*mycel\.experts"):
        assert "experts" not in operators(mycel.capture(model, x))
    same_as_torch(model, x)


@pytest.mark.parametrize("how", ["sorted_rows", "full_experts"])
def test_a_loop_that_is_refused_is_told_how_to_write_it(how):
    with pytest.raises(CaptureError, match=r"experts\.py:\d+\n(.|\n)*try       for a loop over experts .*mycel\.exp"):
        mycel.capture(Loop(how), torch.randn(6, 4, dtype=torch.float64))


class Linears(nn.Module):
    """Experts that are one product each."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y


def test_a_loop_over_experts_is_captured_with_the_better_way_to_write_it():
    model, x = Linears(), torch.randn(6, 4)
    with pytest.warns(UserWarning, match=r"computes every one(.|\n)*mycel\.experts"):
        fast = mycel.jit(model, strict=True)
        torch.testing.assert_close(fast(x), model(x))
