"""Models into the trainer: Hugging Face folders and configurations, bit for bit, or refused with a clear message; their
sizes and groups."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from folders import FOLDERS, LLAMA, NAMES, batch, bits, check_message, equal, logits, make, saved, ties
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mycel.errors import TrainError
from mycel.train.assemble import tokenizer_of
from mycel.train.config import Config
from mycel.train.export import byte_tokenizer
from mycel.train.models import build, count, flops_per_token, parameter_groups

# -- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shard"), FOLDERS)
def test_saved_by_transformers_loads_bitwise(name, shard, tmp_path):
    there = saved(tmp_path, name, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    model = build(tmp_path, None, weights="load")
    assert type(model.module) is type(there) and model.notes == ()
    assert equal(bits(model.module), bits(there)) and ties(model.module) == ties(there)
    if name == "mixtral":  # it is not saved how experts are computed
        model.module.set_experts_implementation(there.config._experts_implementation)
    # buffers that are not saved, too
    assert torch.equal(logits(model.module.eval(), batch(name)), logits(there, batch(name)))


@pytest.mark.parametrize(("name", "dtype"), [("bert", torch.bfloat16), ("t5", torch.float16)])
def test_dtype_converts_as_transformers_does(name, dtype, tmp_path):
    there = saved(tmp_path, name)
    model = build(tmp_path, None, dtype=dtype)
    assert equal(bits(model.module), bits(type(there).from_pretrained(tmp_path, dtype=dtype)))
    back = build(tmp_path, None, dtype=torch.float32)
    assert equal(bits(back.module), bits(there))


def test_built_to_train_and_configuration_kept(tmp_path):
    saved(tmp_path)
    model = build(tmp_path, None)
    assert all(part.training for part in model.module.modules()) and all(
        p.requires_grad for p in model.module.parameters()
    )
    assert not model.module.config.use_cache and model.config.use_cache
    assert model.tokenizer_folder is None and str(tmp_path) in model.source
    ids = torch.randint(0, 90, (2, 8))
    output = model.module(input_ids=ids, labels=ids)
    assert output.loss.ndim == 0 and output.past_key_values is None


def test_model_does_not_live_in_its_files(tmp_path):
    """Loaded weights are copies: a file written over later changes nothing."""
    there = bits(saved(tmp_path))
    model = build(tmp_path, None)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert equal(bits(model.module), there)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_fresh_weights_are_transformers_own_and_repeat(seed):
    torch.manual_seed(seed)
    there = hf.LlamaForCausalLM(hf.AutoConfig.for_model(**LLAMA))
    before = torch.get_rng_state()
    one, two, other = (build(None, LLAMA, seed=s) for s in (seed, seed, seed + 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (
        equal(bits(one.module), bits(there))
        and equal(bits(one.module), bits(two.module))
        and not equal(bits(one.module), bits(other.module))
    )


def test_scratch_ignores_the_weights_that_are_there(tmp_path):
    there = saved(tmp_path)
    model = build(tmp_path, None, weights="scratch", dtype=torch.bfloat16)
    assert "fresh" in model.source and {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert bits(model.module).keys() == bits(there).keys()


@pytest.mark.parametrize(
    ("kind", "architectures", "expected"),
    [
        ("llama", None, "LlamaForCausalLM"),
        ("gpt2", None, "GPT2LMHeadModel"),
        ("bert", None, "BertForMaskedLM"),
        ("t5", None, "T5ForConditionalGeneration"),
        ("vit", None, "ViTForImageClassification"),
        ("bert", ["BertForSequenceClassification"], "BertForSequenceClassification"),
        ("llama", ["LlamaModel"], "LlamaForCausalLM"),
        ("llama", ["Unheard"], "LlamaForCausalLM"),
        ("bart", None, "BartForConditionalGeneration"),
    ],
)
def test_class_by_architecture_else_by_task(kind, architectures, expected):
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes = {
        "t5": {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32},
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64},
    }
    config = {"model_type": kind, "architectures": architectures, **sizes.get(kind, small)}
    assert type(build(None, config, device="meta").module).__name__ == expected


def test_unexpected_tensors_are_noted(tmp_path):
    there = saved(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "extra.weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build(tmp_path, None)
    note = f"1 tensor of {tmp_path} is not part of {type(there).__name__}: extra.weight"
    assert model.notes == (note,) and equal(bits(model.module), bits(there))


def test_tokenizer_files_are_noticed(tmp_path):
    saved(tmp_path)
    byte_tokenizer(tmp_path)
    assert build(tmp_path, None).tokenizer_folder == tmp_path


# -- refused on the way in


@pytest.mark.parametrize("name", ["llama", "vit", "mixtral"])
def test_shapes_that_do_not_fit_are_listed(name, tmp_path):
    saved(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    check_message(error, "shape", "64", "96", tmp_path)
    if name == "llama":
        check_message(
            error,
            "9 weights",
            "model.layers.0.mlp.down_proj.weight: [32, 64] in the files, [32, 96] by the configuration",
            "and 5 more",
        )


def test_a_model_without_a_loss_of_its_own_name_has_that_of_transformers():
    """It would be told at the first step that `loss_type=None` is unrecognised."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    module = build(None, {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}).module
    assert module.loss_type in LOSS_MAPPING and module.loss_function is LOSS_MAPPING["ForCausalLM"]


def test_missing_weights_are_named(tmp_path):
    saved(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    check_message(error, "1 weights of LlamaForCausalLM", "model.norm.weight", tmp_path)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_truncated_weights_are_refused(files, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(files, name, dirs_exist_ok=True))
        file = folder / "model.safetensors"
        os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))
        with pytest.raises(TrainError) as error:
            build(folder, None)
        check_message(error, file, "damaged or cut short")


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_flipped_bit_in_the_header_is_refused_or_harmless(files, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(files, name, dirs_exist_ok=True))
        content = bytearray((folder / "model.safetensors").read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        content[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / "model.safetensors").write_bytes(content)
        try:
            module = build(folder, None).module
        except TrainError:
            return
        assert equal(bits(module), bits(make("llama")))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    saved(folder)
    return folder


@pytest.mark.parametrize("weights", ["auto", "load"])
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors", "model.gguf"]
)
def test_weights_of_other_forms_are_refused(name, weights, tmp_path):
    """Never silently fresh weights instead of those that are there."""
    make("llama").config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(TrainError) as error:
        build(tmp_path, None, weights=weights)
    check_message(error, name, "save_pretrained", tmp_path)
    assert "fresh" in build(tmp_path, None, weights="scratch").source


def test_no_weights(tmp_path):
    make("llama").config.save_pretrained(tmp_path)
    assert "fresh" in build(tmp_path, None, weights="auto").source
    with pytest.raises(TrainError) as error:
        build(tmp_path, None, weights="load")
    check_message(error, "no weights", tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "../model.safetensors"),
        ('{"weight_map": {"a": 3}}', "3"),
    ],
)
def test_damaged_index(index, says, tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    check_message(error, says, "model.safetensors.index.json")


def test_missing_shard(tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    check_message(error, shard.name)


def test_a_model_that_is_not_there_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    for name, hint in (("lama", "llama"), ("meta/llama", "the folder of `hf download meta/llama --local-dir FOLDER`")):
        with pytest.raises(
            TrainError, match=f"no such model folder: {name}\n  at        model.path\n  try       {hint}"
        ):
            tokenizer_of(Config.from_dict({"model": {"path": name}}))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ("[1]", "model_type"),
        ("{}", "model_type"),
        ('{"model_type": "lama"}', "llama"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 33}', "33"),
        ('{"model_type": "unheard", "auto_map": {"AutoConfig": "code.Config"}}', "unheard"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}', "quantised"),
    ],
)
def test_damaged_config(config, says, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    check_message(error, says, tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "model_type"),
        ({"model_type": "lama"}, "llama"),
        ({"model_type": ["llama"]}, "llama"),
        ({**LLAMA, "hidden_size": "wide"}, "wide"),
        ({**LLAMA, "hiden_act": "gelu"}, "hidden_act"),
        ({**LLAMA, "hidden_act": "unheard"}, "unheard"),
        ({"model_type": "sam"}, "loss"),
    ],
)
def test_bad_configuration(config, says):
    with pytest.raises(TrainError) as error:
        build(None, config, device="meta")
    check_message(error, says, "model")


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 90}


@pytest.mark.parametrize(
    ("config", "key", "hint"),
    [
        ({**LLAMA, "num_attention_heads": 3}, "num_attention_heads", "num_attention_heads: 2 or 4"),
        ({**GPT2, "n_head": 3}, "n_head", "n_head: 2 or 4"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads", "num_attention_heads: a number above 0"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads", "num_key_value_heads: 2 or 4"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden_size", "hidden_size: 4096, the default"),
        ({**LLAMA, "vocab_size": -3}, "vocab_size", "vocab_size: a number above 0"),
        ({**LLAMA, "hidden_act": "gleu"}, "hidden_act", "gelu"),
        ({**LLAMA, "rope_parameters": {"rope_type": "lineer"}}, "rope_parameters.rope_type", "linear"),
        ({**LLAMA, "hidden_sizee": 64}, "hidden_sizee", "hidden_size, which is given too: leave hidden_sizee out"),
        ({"model_type": "llama", "hidden_sizee": 64}, "hidden_sizee", "hidden_size"),
    ],
)
def test_a_configuration_that_cannot_be_says_which_key_and_what_to_try(config, key, hint):
    with pytest.raises(TrainError) as error:
        build(None, config, device="meta")
    assert str(error.value).endswith(f"\n  at        model.config.{key}\n  try       {hint}"), error.value


def test_a_folder_that_cannot_be_names_its_file_and_what_to_try(tmp_path):
    file = tmp_path / "config.json"
    for config, hint in (
        ({**LLAMA, "num_attention_heads": 3}, "num_attention_heads: 2 or 4"),
        ({**GPT2, "n_head": 3}, "n_head: 2 or 4"),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(TrainError) as error:
            build(tmp_path, None, device="meta")
        assert str(error.value).endswith(f"\n  at        {file}\n  try       {hint}"), error.value


def test_unknown_settings_are_noted_and_old_names_understood():
    model = build(None, {**LLAMA, "favourite_colour": "green", "rope_theta": 5e5, "torch_dtype": "bfloat16"})
    assert len(model.notes) == 1 and "favourite_colour" in model.notes[0]
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = build(None, {"model_type": "t5", **sizes, "decoder_start_token_id": 0})
    assert t5.notes == () and t5.config.decoder_start_token_id == 0  # what T5 shifts labels by
    assert model.config.rope_parameters["rope_theta"] == 5e5 and next(model.module.parameters()).dtype == torch.float32


def test_contradictions(tmp_path):
    for path, config in [(None, None), (tmp_path, LLAMA)]:
        with pytest.raises(TrainError, match="one of them"):
            build(path, config)
    with pytest.raises(TrainError, match="no weights to load"):
        build(None, LLAMA, weights="load")
    with pytest.raises(TrainError, match="nothing is downloaded"):
        build(Path("meta-llama/Llama-3.1-8B"), None)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainError, match="LoRA adapters, not a model"):
        build(tmp_path, None)


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_flops_and_counts_of_a_llama(tied):
    """By hand: attention 2·32·32 + 2·32·16, feed-forward 3·32·48, two norms; a final norm; the output layer 258·32."""
    module = build(None, {**LLAMA, "tie_word_embeddings": tied}).module
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 258 * 32
    sizes = count(module)
    assert (
        sizes.total == sizes.trainable == weights + (0 if tied else 258 * 32) and sizes.total_bytes == 4 * sizes.total
    )
    assert sizes.embedding == (0 if tied else 258 * 32)
    assert flops_per_token(module, 16) == 6 * weights + 12 * 2 * 32 * 16 / 2 == flops_per_token(module.config, 16)
    module.requires_grad_(False)
    assert flops_per_token(module, 16) == 4 * weights + 12 * 2 * 32 * 16 / 2


def test_flops_count_what_a_token_visits():
    module = make("mixtral")  # 2 of 4 experts a token
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in module.parameters()) - experts - module.model.embed_tokens.weight.numel()
    assert flops_per_token(module, 8) == 6 * (others + experts / 2) + 12 * 3 * 32 * 4
    assert flops_per_token(make("bert"), 8) - flops_per_token(make("bert"), 0) == 12 * 3 * 32 * 8  # sees both ways
    window = {**LLAMA, "model_type": "gemma2", "sliding_window": 4, "num_hidden_layers": 2, "head_dim": 8}
    assert flops_per_token(build(None, window).module, 100) - flops_per_token(
        build(None, window).module, 0
    ) == 12 * 32 * (50 + 4)
    assert flops_per_token(make("t5"), 8) - flops_per_token(make("t5"), 0) == 12 * 32 * 3 * (8 + 12)
    assert flops_per_token(make("vit"), 16) > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", [False, True])
def test_groups_hold_each_trainable_parameter_once(name, frozen):
    module = make(name)
    if frozen:
        for parameter in list(module.parameters())[::3]:
            parameter.requires_grad = False
    groups = parameter_groups(module, 0.1)
    flat = [id(p) for group in groups for p in group["params"]]
    assert sorted(flat) == sorted(id(p) for p in module.parameters() if p.requires_grad)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for part in module.modules():
        for tail, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                matrix = parameter.ndim > 1 and tail != "bias"
                assert decay[id(parameter)] == (0.1 if matrix else 0.0), (type(part), tail)
                assert not ("Norm" in type(part).__name__ and matrix)
    torch.optim.AdamW(groups, lr=1e-3)
