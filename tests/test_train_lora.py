"""LoRA adapters: nothing at first, merged the same function, files as PEFT reads them, or refused with a clear
message."""

from __future__ import annotations

import json

import pytest
import torch
from folders import LLAMA, TARGETS, batch, bits, check_message, equal, load_again, logits, make
from safetensors import safe_open
from torch import nn

from mycel.errors import TrainError
from mycel.train import lora
from mycel.train.export import export
from mycel.train.models import build, count

# -- LoRA ------------------------------------------------------------------------------------------------------------


def adapted(name: str, *, filled: bool = True) -> nn.Module:
    """A model with adapters, as if trained for a while."""
    module = make(name)
    lora.add(module, 4, 8.0, 0.0, TARGETS[name], seed=5)
    for layer in lora.adapters(module).values() if filled else ():
        nn.init.normal_(layer.lora_B.weight, std=0.3)
    return module.eval()


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_change_nothing_at_first_and_alone_train(name):
    plain, module = make(name), adapted(name, filled=False)
    assert torch.equal(logits(module, batch(name)), logits(plain, batch(name)))
    assert {n.rpartition(".lora_")[2] for n, p in module.named_parameters() if p.requires_grad} == {
        "A.weight",
        "B.weight",
    }
    assert count(module).trainable == sum(4 * (layer.ins + layer.outs) for layer in lora.adapters(module).values())
    module.train()(**batch(name)).logits.square().sum().backward()
    assert all(layer.lora_B.weight.grad.abs().sum() > 0 for layer in lora.adapters(module).values())
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", TARGETS)
def test_merged_is_the_same_function_and_plain_again(name):
    plain, module = make(name), adapted(name)
    before = logits(module, batch(name))
    assert not torch.allclose(before, logits(plain, batch(name)), atol=1e-3)
    held = bits(module)
    with lora.merged(module):
        assert module.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(logits(module, batch(name)), before, rtol=1e-5, atol=1e-5)
    assert equal(bits(module), held) and torch.equal(logits(module, batch(name)), before)
    lora.merge(module)
    assert {type(m) for m in module.modules()} == {
        type(m) for m in plain.modules()
    } and module.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(module, batch(name)), before, rtol=1e-5, atol=1e-5)


def test_adapters_repeat_by_seed_and_leave_the_random_state():
    before = torch.get_rng_state()
    states = []
    for seed in (5, 5, 6):
        module = build(None, LLAMA).module
        lora.add(module, 2, 4, 0.1, ["v_proj"], seed=seed)
        states.append(lora.adapter_state(module))
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(states[0], states[1]) and not equal(states[0], states[2])


def test_adapters_of_bf16_layers_are_fp32():
    module = build(None, LLAMA, dtype=torch.bfloat16).module
    lora.add(module, 2, 4, 0.0, ["q_proj"])
    assert {t.dtype for t in lora.adapter_state(module).values()} == {torch.float32}
    assert logits(module, {"input_ids": torch.arange(8)[None]}).dtype == torch.bfloat16


@pytest.mark.parametrize("name", TARGETS)
def test_adapter_files_have_peft_form(name, tmp_path):
    """Read as PEFT does: W + alpha / r · B A for each pair of names, on the plain model, is the adapted one."""
    module = adapted(name)
    export(module, tmp_path / "out", config=module.config, merge=False, source="somewhere/plain")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 8.0, "none")
    assert config["base_model_name_or_path"] == "somewhere/plain" and config["fan_in_fan_out"] == (name == "gpt2")
    assert config["task_type"] == {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}.get(name)
    plain = make(name)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as tensors:
        keys = list(tensors.keys())
        names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in keys}
        assert names == set(config["target_modules"]) == set(lora.adapters(module))
        for target in names:
            a, b = (tensors.get_tensor(f"base_model.model.{target}.lora_{letter}.weight") for letter in "AB")
            weight = plain.get_submodule(target).weight.data
            outs, ins = reversed(weight.shape) if config["fan_in_fan_out"] else weight.shape
            assert a.shape == (4, ins) and b.shape == (outs, 4)
            change = config["lora_alpha"] / config["r"] * b @ a
            weight += change.T if config["fan_in_fan_out"] else change
    torch.testing.assert_close(logits(plain, batch(name)), logits(module, batch(name)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_export_merges_and_keeps_the_adapters(name, tmp_path):
    module = adapted(name)
    before, held = logits(module, batch(name)), bits(module)
    export(module, tmp_path / "out", config=module.config)
    torch.testing.assert_close(logits(load_again(tmp_path / "out"), batch(name)), before, rtol=1e-5, atol=1e-5)
    assert equal(bits(module), held)


def test_what_targets_name():
    def added(*targets: str) -> list[str]:
        return lora.add(build(None, LLAMA).module, 2, 4, 0.0, targets)

    assert added("q_proj") == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert added("1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]
    assert added(r".*\.1\..*(up|down)_proj", "up_proj") == [
        f"model.layers.{n}_proj" for n in ("0.mlp.up", "1.mlp.up", "1.mlp.down")
    ]
    assert added("lm_head") == ["lm_head"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((2, 4, 0.0, ["q_proj", "qproj"]), "'qproj' names no layer of LlamaForCausalLM"),
        ((2, 4, 0.0, ["proj"]), "q_proj (2)"),
        ((2, 4, 0.0, ["embed_tokens"]), "Embedding"),
        ((2, 4, 0.0, ["("]), "regular expression"),
        ((2, 4, 0.0, []), "down_proj"),
        ((0, 4, 0.0, ["q_proj"]), "rank 0"),
        ((2, 4, 1.0, ["q_proj"]), "dropout 1.0"),
        ((2, 4, 0.0, ["lm_head"]), "model.embed_tokens"),
    ],
)
def test_bad_lora(arguments, says):
    module = build(None, {**LLAMA, "tie_word_embeddings": True}).module
    before = bits(module)
    with pytest.raises(TrainError) as error:
        lora.add(module, *arguments)
    check_message(error, says, "model.lora")
    assert equal(bits(module), before) and all(p.requires_grad for p in module.parameters())


def test_adapters_are_added_once():
    module = build(None, LLAMA).module
    lora.add(module, 2, 4, 0.0, ["q_proj"])
    with pytest.raises(TrainError, match="already"):
        lora.add(module, 2, 4, 0.0, ["v_proj"])
