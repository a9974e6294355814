"""Routers and their losses as the models write them: groups, biases, noise, losses for balance, as in torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_families import family, quiet, text
from experts import operators
from stepping import plain_step
from torch import nn
from transformers.models.minimax import modeling_minimax
from transformers.models.mixtral import modeling_mixtral
from transformers.models.phimoe import modeling_phimoe
from transformers.models.switch_transformers import modeling_switch_transformers

import mycel


def trained_alike(model: nn.Module, batch: dict[str, Any], steps: int = 2) -> mycel.Step:
    """Steps of gradient descent, whose change of the parameters is their gradient; in 64 bits, but for norms and
    routers that compute in 32."""
    twin = copy.deepcopy(model)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    step = mycel.train_step(model, sgd[0], compile=False)
    for _ in range(steps):
        assert float(step(**batch)) == pytest.approx(plain_step(twin, sgd[1], batch), rel=1e-6)
    alike(model, twin)
    return step


def alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


ROUTED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "first_k_dense_replace": 0, "routed_scaling_factor": 2.5},
    "deepseek_v3": {
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "olmoe": {"norm_topk_prob": True},
}


@pytest.mark.parametrize("name", ROUTED)
def test_settings_of_routers(name):
    """Groups of which some are allowed, weights that are normed or scaled."""
    step = trained_alike(quiet(family(name, **ROUTED[name]).double()), text())
    assert "grouped_matmul" in operators(step.program)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "jamba"])
def test_losses_for_balance(name):
    """Of all layers, where the model is asked for its router's logits; padding is left out of them."""
    model = quiet(family(name, router_aux_loss_coef=3.0, output_router_logits=True).double())
    batch = {**text(), "attention_mask": torch.ones(4, 6, dtype=torch.int64)}
    batch["attention_mask"][1, 4:] = 0
    with torch.no_grad():
        losses = [float(model(**batch, output_router_logits=asked).loss) for asked in (True, False)]
    assert abs(losses[0] - losses[1]) > 1
    trained_alike(model, batch)


class Balanced(nn.Module):
    """Switch Transformers' layer with its losses: one for balance, one for small logits (z)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"d_model": 8, "d_ff": 12, "num_experts": 3, "expert_capacity": 4, "dropout_rate": 0.0}
        config = modeling_switch_transformers.SwitchTransformersConfig(**sizes, router_jitter_noise=0.0)
        self.layer = modeling_switch_transformers.SwitchTransformersSparseMLP(config).double()
        self.layer.router.dtype = torch.float64

    def forward(self, x):
        _, expert, logits = self.layer.router(x)
        z = modeling_switch_transformers.router_z_loss_func(logits.view(*x.shape[:2], -1))
        balance = modeling_switch_transformers.load_balancing_loss_func(logits.softmax(-1), expert.argmax(-1))
        return self.layer(x).square().mean() + 0.1 * z + 0.5 * balance


def test_a_loss_for_small_logits():
    model, x = Balanced(), torch.randn(4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trained_alike(model, {"x": x})


def test_a_bias_for_balance_changes_between_steps():
    """DeepSeek's: no gradient reaches it; experts that got much are chosen less from then on."""
    model = family("deepseek_v3", first_k_dense_replace=0, n_group=1, topk_group=1).double()
    twin = copy.deepcopy(model)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    step = mycel.train_step(model, sgd[0], compile=False)
    loads = []
    for _ in range(3):
        assert float(step(**text())) == pytest.approx(plain_step(twin, sgd[1], text()), rel=1e-6)
        load = step.expert_load(**text())
        loads.append(max(counts.max() for counts in load.values()))
        for i, counts in enumerate(load.values()):
            for net in (model, twin):
                bias = net.model.layers[i].mlp.gate.e_score_correction_bias
                bias += 0.2 * (counts.double().mean() - counts).sign()
    alike(model, twin)
    assert loads[-1] < loads[0] and len(step.entries) == 1  # compiled once


def test_noise_of_a_router_is_as_in_torch():
    """Phi's router draws its experts in training: as often as in torch, for tokens that are all alike."""
    config = modeling_phimoe.PhimoeConfig(hidden_size=8, num_local_experts=4, router_jitter_noise=0.3)
    torch.manual_seed(0)
    router = modeling_phimoe.PhimoeTopKRouter(config).train()
    for p in router.parameters():
        nn.init.normal_(p, std=0.05)
    x = torch.randn(1, 8).expand(20000, 8)
    route = mycel.jit(lambda x: router(x))
    shares = []
    for run in (router, route):
        torch.manual_seed(1)
        *_, ids = (out for out in run(x.clone()) if not out.is_floating_point())
        shares.append(ids.view(20000, -1)[:, 0].bincount(minlength=4) / 20000)
    assert (shares[0] > 0).sum() > 1  # drawn
    assert float((shares[0] - shares[1]).abs().max()) < 0.02


JITTERED = {
    "mixtral": lambda **sizes: modeling_mixtral.MixtralSparseMoeBlock(modeling_mixtral.MixtralConfig(**sizes)),
    "minimax": lambda **sizes: modeling_minimax.MiniMaxSparseMoeBlock(modeling_minimax.MiniMaxConfig(**sizes)),
    "switch": lambda **sizes: modeling_switch_transformers.SwitchTransformersTop1Router(
        modeling_switch_transformers.SwitchTransformersConfig(d_model=8, num_experts=4, **sizes)
    ),
}


@pytest.mark.parametrize("name", JITTERED)
def test_jitter_of_tokens(name):
    """Multiplied into them in place: each element with a number of its own, and what follows is of these tokens."""
    torch.manual_seed(0)
    layer = JITTERED[name](hidden_size=8, intermediate_size=6, num_local_experts=4, router_jitter_noise=0.3).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    layer.dtype = torch.float64

    def jittered(x):
        x = x.clone()
        return layer.train()(x), x

    x = torch.randn(50, 40, 8, dtype=torch.float64)
    y, after = mycel.jit(jittered, strict=True)(x)
    noise = after / x
    assert noise.min() >= 0.7 and noise.max() <= 1.3
    assert noise.mean() == pytest.approx(1.0, abs=0.01) and noise.std() == pytest.approx(0.6 / 12**0.5, rel=0.02)
    torch.testing.assert_close(y, layer.eval()(after.clone()))
