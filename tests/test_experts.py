"""Mixtures of experts: the families in use train as in torch, whichever way their experts are computed there; layers
written by hand, and capacities.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from distributing import OneDevice, step_equals
from expert_families import FAMILIES, family, quiet, text, written_out
from experts import SPLIT, Layer, operators, routed
from models import VOCAB
from stepping import plain_step
from torch import nn
from transformers.models.switch_transformers import modeling_switch_transformers

import mycel
from mycel import Mesh, Plan
from mycel.errors import CaptureError
from mycel.ir import walk

IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


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


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"llama4"}))  # which has one implementation
def test_every_implementation_is_the_same_program(name):
    def captured(how):
        model = family(name, how)
        return mycel.capture(lambda ids: model(input_ids=ids, use_cache=False).logits, text()["input_ids"])

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
