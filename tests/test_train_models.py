"""Models in and out of Hugging Face folders, LoRA adapters, sampling: bit for bit, or refused with a clear message."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import models as zoo
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mycel.errors import TrainError
from mycel.train import lora
from mycel.train.models import Model, build, byte_tokenizer, count, export, flops_per_token, parameter_groups
from mycel.train.sample import generate

NAMES = ["llama", "qwen3", "gpt2", "bert", "vit", "t5", "mixtral"]
FOLDERS = [*((name, "4GB") for name in NAMES), *((name, "20KB") for name in ("qwen3", "t5", "mixtral"))]
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "bert": ["query", "value"], "vit": ["q_proj"], "t5": ["q", "wo"]}
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 258, "max_position_embeddings": 16, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return getattr(zoo, name)().eval()


def saved(folder: Path, name: str = "llama", **options: object) -> nn.Module:
    """A model, saved by transformers."""
    module = make(name)
    module.save_pretrained(folder, **options)
    return module


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and all bits."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def ties(module: nn.Module) -> set[frozenset[str]]:
    """Which names share one parameter."""
    groups: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values()}


def batch(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if name == "vit":
        return zoo.image()
    return {"input_ids": zoo.ids(), **({"labels": zoo.ids()} if name == "t5" else {})}


def logits(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs).logits


def told(error: pytest.ExceptionInfo[TrainError], *words: object) -> None:
    """The message says what, where and all of the words."""
    message = str(error.value)
    assert "\n  at        " in message and all(str(word) in message for word in words), message


def load_again(folder: Path) -> nn.Module:
    """As a user of transformers would."""
    kind = getattr(hf, json.loads((folder / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(folder, local_files_only=True)


# -- in -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shard"), FOLDERS)
def test_saved_by_transformers_loads_bitwise(name, shard, tmp_path):
    there = saved(tmp_path, name, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    model = build(tmp_path, None, weights="load")
    assert type(model.module) is type(there) and model.notes == ()
    assert equal(bits(model.module), bits(there)) and ties(model.module) == ties(there)
    assert torch.equal(logits(model.module.eval(), batch(name)), logits(there, batch(name)))  # buffers that are not saved, too


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
    assert all(part.training for part in model.module.modules()) and all(p.requires_grad for p in model.module.parameters())
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
    assert equal(bits(one.module), bits(there)) and equal(bits(one.module), bits(two.module)) and not equal(bits(one.module), bits(other.module))


def test_scratch_ignores_the_weights_that_are_there(tmp_path):
    there = saved(tmp_path)
    model = build(tmp_path, None, weights="scratch", dtype=torch.bfloat16)
    assert "fresh" in model.source and {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert bits(model.module).keys() == bits(there).keys()


@pytest.mark.parametrize(
    ("kind", "architectures", "expected"),
    [
        ("llama", None, "LlamaForCausalLM"), ("gpt2", None, "GPT2LMHeadModel"), ("bert", None, "BertForMaskedLM"),
        ("t5", None, "T5ForConditionalGeneration"),
        ("vit", None, "ViTForImageClassification"), ("bert", ["BertForSequenceClassification"], "BertForSequenceClassification"),
        ("llama", ["LlamaModel"], "LlamaForCausalLM"), ("llama", ["Unheard"], "LlamaForCausalLM"), ("bart", None, "BartForConditionalGeneration"),
    ],
)  # fmt: skip
def test_class_by_architecture_else_by_task(kind, architectures, expected):
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes = {
        "t5": {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}, "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64},
    }  # fmt: skip
    config = {"model_type": kind, "architectures": architectures, **sizes.get(kind, small)}
    assert type(build(None, config, device="meta").module).__name__ == expected


def test_unexpected_tensors_are_noted(tmp_path):
    there = saved(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "extra.weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build(tmp_path, None)
    assert len(model.notes) == 1 and "extra.weight" in model.notes[0] and equal(bits(model.module), bits(there))


def test_tokenizer_files_are_noticed(tmp_path):
    saved(tmp_path)
    byte_tokenizer(tmp_path)
    assert build(tmp_path, None).tokenizer_folder == tmp_path


# -- refused on the way in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "vit", "mixtral"])
def test_shapes_that_do_not_fit_are_listed(name, tmp_path):
    saved(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    told(error, "shape", "64", "96", tmp_path)
    if name == "llama":
        told(error, "9 weights", "model.layers.0.mlp.down_proj.weight: [32, 64] in the files, [32, 96] by the configuration", "and 5 more")


def test_missing_weights_are_named(tmp_path):
    saved(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    told(error, "1 weights of LlamaForCausalLM", "model.norm.weight", tmp_path)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_truncated_weights_are_refused(files, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(files, name, dirs_exist_ok=True))
        file = folder / "model.safetensors"
        os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))
        with pytest.raises(TrainError) as error:
            build(folder, None)
        told(error, file, "damaged or cut short")


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
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors", "model.gguf"])
def test_weights_of_other_forms_are_refused(name, weights, tmp_path):
    """Never silently fresh weights instead of those that are there."""
    make("llama").config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(TrainError) as error:
        build(tmp_path, None, weights=weights)
    told(error, name, "save_pretrained", tmp_path)
    assert "fresh" in build(tmp_path, None, weights="scratch").source


def test_no_weights(tmp_path):
    make("llama").config.save_pretrained(tmp_path)
    assert "fresh" in build(tmp_path, None, weights="auto").source
    with pytest.raises(TrainError) as error:
        build(tmp_path, None, weights="load")
    told(error, "no weights", tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [("{", "damaged"), ("[]", "damaged"), ("{}", "weight_map"), ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
     ('{"weight_map": {"a": "../model.safetensors"}}', "../model.safetensors"), ('{"weight_map": {"a": 3}}', "3")],
)  # fmt: skip
def test_damaged_index(index, says, tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    told(error, says, "model.safetensors.index.json")


def test_missing_shard(tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    told(error, shard.name)


@pytest.mark.parametrize(
    ("config", "says"),
    [(None, "no config.json"), ("{", "cannot be read"), ("[1]", "model_type"), ("{}", "model_type"), ('{"model_type": "lama"}', "llama"),
     ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"), ('{"model_type": "llama", "hidden_size": 33}', "33"),
     ('{"model_type": "unheard", "auto_map": {"AutoConfig": "code.Config"}}', "unheard"),
     ('{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}', "quantised")],
)  # fmt: skip
def test_damaged_config(config, says, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(TrainError) as error:
        build(tmp_path, None)
    told(error, says, tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [({}, "model_type"), ({"model_type": "lama"}, "llama"), ({"model_type": ["llama"]}, "llama"), ({**LLAMA, "hidden_size": "wide"}, "wide"),
     ({**LLAMA, "hiden_act": "gelu"}, "hidden_act"), ({**LLAMA, "hidden_act": "unheard"}, "unheard"), ({"model_type": "sam"}, "loss")],
)  # fmt: skip
def test_bad_configuration(config, says):
    with pytest.raises(TrainError) as error:
        build(None, config, device="meta")
    told(error, says, "model")


def test_unknown_settings_are_noted_and_old_names_understood():
    model = build(None, {**LLAMA, "favourite_colour": "green", "rope_theta": 5e5, "torch_dtype": "bfloat16"})
    assert len(model.notes) == 1 and "favourite_colour" in model.notes[0]
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


# -- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_flops_and_counts_of_a_llama(tied):
    """By hand: attention 2·32·32 + 2·32·16, feed-forward 3·32·48, two norms; a final norm; the output layer 258·32."""
    module = build(None, {**LLAMA, "tie_word_embeddings": tied}).module
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 258 * 32
    sizes = count(module)
    assert sizes.total == sizes.trainable == weights + (0 if tied else 258 * 32) and sizes.total_bytes == 4 * sizes.total
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
    assert flops_per_token(build(None, window).module, 100) - flops_per_token(build(None, window).module, 0) == 12 * 32 * (50 + 4)
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


# -- out ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shard"), FOLDERS)
def test_exported_loads_bitwise(name, shard, tmp_path):
    saved(tmp_path / "in", name)
    model = build(tmp_path / "in", None)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.125)
    export(model.module, tmp_path / "deep" / "out", config=model.config, max_shard=shard)
    again = load_again(tmp_path / "deep" / "out")
    assert equal(bits(again), bits(model.module)) and ties(again) == ties(model.module)
    assert ((tmp_path / "deep" / "out" / "model.safetensors.index.json").exists()) == (shard == "20KB")
    assert again.config.to_dict() == {**load_again(tmp_path / "in").config.to_dict(), "_name_or_path": again.config._name_or_path}
    assert equal(bits(build(tmp_path / "deep" / "out", None).module), bits(model.module))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]


def test_exported_from_bf16_and_from_one_flat_buffer(tmp_path):
    """Parameters that are views of one storage are still saved one by one."""
    model = build(None, LLAMA, dtype=torch.bfloat16)
    parameters = list(model.module.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    export(model.module, tmp_path / "out", config=model.config)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2 * flat.numel() + 20_000
    assert equal(bits(load_again(tmp_path / "out")), bits(model.module))


def test_export_leaves_the_module_alone(tmp_path):
    model = build(None, LLAMA)
    before = copy.deepcopy(model.module.config.to_dict())
    export(model.module, tmp_path / "out", config=model.config)
    assert model.module.config.to_dict() == before and model.module.training and not model.module.config.use_cache
    assert load_again(tmp_path / "out").generation_config.use_cache is not False


def test_generation_settings_transformers_would_not_save(tmp_path):
    """A temperature without sampling loads with a warning but does not save: no reason to lose a model."""
    saved(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": false}')
    model = build(tmp_path / "in", None)
    export(model.module, tmp_path / "out", config=model.config)
    assert equal(bits(load_again(tmp_path / "out")), bits(model.module)) and model.module.generation_config.temperature == 0.6


def test_replaces_a_model_folder_whole_and_nothing_else(tmp_path):
    one, two = build(None, LLAMA, seed=1), build(None, LLAMA, seed=2)
    folder = tmp_path / "out"
    folder.mkdir()
    export(one.module, folder, config=one.config, max_shard="20KB")
    export(two.module, folder, config=two.config)
    assert equal(bits(load_again(folder)), bits(two.module)) and not list(folder.glob("model-*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(TrainError) as error:
            export(one.module, tmp_path / name, config=one.config)
        told(error, tmp_path / name, "another folder")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def intact(folder: Path, module: nn.Module) -> bool:
    return equal(bits(load_again(folder)), bits(module)) and [p.name for p in folder.parent.iterdir() if p.name != "lost+found"] == [folder.name]


@pytest.mark.parametrize("limit", [100, 3_000, 40_000])
def test_a_failed_write_leaves_the_old_folder(limit, tmp_path):
    """A real limit on file size: config.json, then the weights, then the last of them cannot be written."""
    one, two = build(None, LLAMA, seed=1), build(None, LLAMA, seed=2)
    export(one.module, tmp_path / "out", config=one.config)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(TrainError) as error:
            export(two.module, tmp_path / "out", config=two.config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    told(error, "cannot be written", "unchanged", tmp_path / "out")
    assert intact(tmp_path / "out", one.module)


def test_disk_full(tmp_path):
    """A real full disk, where one may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        one, two = build(None, LLAMA, seed=1), build(None, LLAMA, seed=2)
        export(one.module, tmp_path / "out", config=one.config)
        with pytest.raises(TrainError) as error:
            export(two.module, tmp_path / "out", config=two.config)
        told(error, "disk full", "GiB are free", "unchanged", tmp_path / "out")
        assert intact(tmp_path / "out", one.module)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def killed(at: int, model: Model, folder: Path) -> bool:
    """kill -9 before the child's file operation number `at` in an export; False when it has fewer."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    done = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal done
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and folder.name in str(arguments[0]):
            done += 1
            if done > at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    try:
        export(model.module, folder, config=model.config)
    finally:
        os._exit(0)


def test_kill_at_any_moment(tmp_path):
    """At all times one complete model is there, under its name or (between two renames) beside it; the next export puts all in order."""
    now, other = (build(None, LLAMA, seed=seed) for seed in (1, 2))
    folder = tmp_path / "exported"
    export(now.module, folder, config=now.config)
    at, nameless = 0, 0
    while killed(at, other, folder):
        nameless += not folder.exists()
        there = bits(load_again(folder if folder.exists() else tmp_path / ".exported.old"))
        if equal(there, bits(other.module)):
            now, other = other, now
        assert equal(there, bits(now.module))
        at += 1
    assert at > 15 and nameless
    assert intact(folder, other.module)


def test_tokenizer_goes_along(tmp_path):
    model = build(None, LLAMA)
    (tmp_path / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "private.txt"):
        (tmp_path / "words" / name).write_text(name)
    export(model.module, tmp_path / "out", config=model.config, tokenizer_folder=tmp_path / "words")
    copied = {p.name for p in (tmp_path / "out").iterdir()} - {"config.json", "generation_config.json", "model.safetensors"}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "merges.txt"} and (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"


@pytest.fixture(scope="module")
def byte_words(tmp_path_factory):
    model, folder = build(None, LLAMA), tmp_path_factory.mktemp("bytes")
    export(model.module, folder, config=model.config, tokenizer_folder="bytes")
    return hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@given(text=st.text() | st.sampled_from(["<|bos|>", "a <|eos|> b", " \r\n\t ", "\x00", "e\u0301 ﬁ 🙂", "\ufeffdef f( ) :"]))
@settings(max_examples=100, deadline=None)
def test_byte_tokenizer_is_the_bytes(byte_words, text):
    ids = byte_words.encode(text)
    assert ids == list(text.encode()) and byte_words.decode(ids) == text
    assert (byte_words.bos_token_id, byte_words.eos_token_id, len(byte_words), byte_words.model_max_length) == (256, 257, 258, 16)


# -- LoRA ---------------------------------------------------------------------------------------------------------------


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
    assert {n.rpartition(".lora_")[2] for n, p in module.named_parameters() if p.requires_grad} == {"A.weight", "B.weight"}
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
    assert {type(m) for m in module.modules()} == {type(m) for m in plain.modules()} and module.state_dict().keys() == plain.state_dict().keys()
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
        names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors.keys()}  # noqa: SIM118
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
    assert added(r".*\.1\..*(up|down)_proj", "up_proj") == [f"model.layers.{n}_proj" for n in ("0.mlp.up", "1.mlp.up", "1.mlp.down")]
    assert added("lm_head") == ["lm_head"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((2, 4, 0.0, ["q_proj", "qproj"]), "'qproj' names no layer of LlamaForCausalLM"), ((2, 4, 0.0, ["proj"]), "q_proj (2)"),
     ((2, 4, 0.0, ["embed_tokens"]), "Embedding"), ((2, 4, 0.0, ["("]), "regular expression"), ((2, 4, 0.0, []), "down_proj"),
     ((0, 4, 0.0, ["q_proj"]), "rank 0"), ((2, 4, 1.0, ["q_proj"]), "dropout 1.0"), ((2, 4, 0.0, ["lm_head"]), "model.embed_tokens")],
)  # fmt: skip
def test_bad_lora(arguments, says):
    module = build(None, {**LLAMA, "tie_word_embeddings": True}).module
    before = bits(module)
    with pytest.raises(TrainError) as error:
        lora.add(module, *arguments)
    told(error, says, "model.lora")
    assert equal(bits(module), before) and all(p.requires_grad for p in module.parameters())


def test_adapters_are_added_once():
    module = build(None, LLAMA).module
    lora.add(module, 2, 4, 0.0, ["q_proj"])
    with pytest.raises(TrainError, match="already"):
        lora.add(module, 2, 4, 0.0, ["v_proj"])


# -- sampling -----------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([5e-324, 0.5, 1.0, 3.0]))
@settings(max_examples=8, deadline=None)
def test_samples_repeat_and_leave_no_trace(seed, temperature):
    module = build(None, {**LLAMA, "attention_dropout": 0.5}).module
    module.model.layers[1].eval()
    modes, state = [m.training for m in module.modules()], torch.get_rng_state()
    one, two = (generate(module, [1, 2, 3], 20, temperature, seed, None) for _ in range(2))
    assert one == two and len(one) == 20 and all(0 <= i < 258 for i in one)
    assert modes == [m.training for m in module.modules()] and torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in module.parameters()) and not module.config.use_cache


def test_samples_follow_the_seed_and_the_distribution():
    module = build(None, LLAMA).module
    assert generate(module, [1], 10, 1.0, 0, None) != generate(module, [1], 10, 1.0, 1, None)
    module.lm_head.weight.data.zero_()
    module.lm_head.weight.data[7] = 50 * module.model(torch.tensor([[1]])).last_hidden_state[0, 0]
    assert generate(module, [1], 1, 1.0, 3, None) == [7]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral"])
def test_greedy_is_what_transformers_generates(name):
    module = make(name)
    there = module.generate(
        torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(module, [5, 6, 7], 12, 0, 0, None) == there[0, 3:].tolist()


def test_text_longer_than_the_model_and_its_end():
    """A model with learnt positions has no more than these: the window moves along."""
    module, prompt = make("gpt2"), list(range(10, 70))
    text = generate(module, prompt, 40, 1.0, 0, None)
    assert len(text) == 40
    greedy = generate(module, prompt, 20, 0, 0, None)
    assert greedy[10:] == generate(module, (prompt + greedy[:10])[-64:], 10, 0, 0, None)
    eos = text[25]
    assert generate(module, prompt, 40, 1.0, 0, eos) == text[: text.index(eos)]
    assert generate(module, [1], 0, 1.0, 0, None) == []


@pytest.mark.parametrize(
    ("prompt", "tokens", "temperature"), [([], 3, 1.0), ([258], 3, 1.0), ([-1], 3, 1.0), ([1], -1, 1.0), ([1], 3, -0.1), ([1], 3, float("nan"))]
)
def test_bad_requests(prompt, tokens, temperature):
    with pytest.raises(TrainError) as error:
        generate(build(None, LLAMA).module, prompt, tokens, temperature, 0, None)
    told(error, "sample")


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_models_that_continue_no_text(name):
    with pytest.raises(TrainError) as error:
        generate(make(name), [1], 3, 1.0, 0, None)
    told(error, "not a causal language model")


def test_a_model_that_diverged():
    module = build(None, LLAMA).module
    module.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainError) as error:
        generate(module, [1], 3, 1.0, 0, None)
    told(error, "not finite")
    assert module.training
