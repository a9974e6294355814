"""Models out of the trainer: Hugging Face folders, whole at any moment, their tokenizers, and text."""

from __future__ import annotations

import copy
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from folders import FOLDERS, LLAMA, bits, check_message, equal, load_again, make, saved, ties
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mycel.errors import TrainError
from mycel.train.export import export
from mycel.train.models import LoadedModel, build
from mycel.train.sample import generate

# -- out -------------------------------------------------------------------------------------------------------------


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
    assert again.config.to_dict() == {
        **load_again(tmp_path / "in").config.to_dict(),
        "_name_or_path": again.config._name_or_path,
    }
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
    assert (
        equal(bits(load_again(tmp_path / "out")), bits(model.module))
        and model.module.generation_config.temperature == 0.6
    )


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
        check_message(error, tmp_path / name, "another folder")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def intact(folder: Path, module: nn.Module) -> bool:
    return equal(bits(load_again(folder)), bits(module)) and [
        p.name for p in folder.parent.iterdir() if p.name != "lost+found"
    ] == [folder.name]


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
    check_message(error, "cannot be written", "unchanged", tmp_path / "out")
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
        check_message(error, "disk full: it needs", " KiB are free", "unchanged", tmp_path / "out")
        assert intact(tmp_path / "out", one.module)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def killed(at: int, model: LoadedModel, folder: Path) -> bool:
    """kill -9 before the child's file operation number `at` in an export; False when it has fewer."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    done = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal done
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and folder.name in str(
            arguments[0]
        ):
            done += 1
            if done > at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    try:
        export(model.module, folder, config=model.config)
    finally:
        os._exit(0)


def test_kill_at_any_moment(tmp_path):
    """At all times one complete model is there, under its name or (between two renames) beside it; the next export puts
    all in order."""
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
    copied = {p.name for p in (tmp_path / "out").iterdir()} - {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert (
        copied == {"tokenizer.json", "tokenizer_config.json", "merges.txt"}
        and (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"
    )


@pytest.fixture(scope="module")
def byte_words(tmp_path_factory):
    model, folder = build(None, LLAMA), tmp_path_factory.mktemp("bytes")
    export(model.module, folder, config=model.config, tokenizer_folder="bytes")
    return hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@given(
    text=st.text() | st.sampled_from(["<|bos|>", "a <|eos|> b", " \r\n\t ", "\x00", "e\u0301 ﬁ 🙂", "\ufeffdef f( ) :"])
)
@settings(max_examples=100, deadline=None)
def test_byte_tokenizer_is_the_bytes(byte_words, text):
    ids = byte_words.encode(text)
    assert ids == list(text.encode()) and byte_words.decode(ids) == text
    assert (byte_words.bos_token_id, byte_words.eos_token_id, len(byte_words), byte_words.model_max_length) == (
        256,
        257,
        258,
        16,
    )


# -- sampling --------------------------------------------------------------------------------------------------------


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
        torch.tensor([[5, 6, 7]]),
        attention_mask=torch.ones(1, 3),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
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
    ("prompt", "tokens", "temperature"),
    [([], 3, 1.0), ([258], 3, 1.0), ([-1], 3, 1.0), ([1], -1, 1.0), ([1], 3, -0.1), ([1], 3, float("nan"))],
)
def test_bad_requests(prompt, tokens, temperature):
    with pytest.raises(TrainError) as error:
        generate(build(None, LLAMA).module, prompt, tokens, temperature, 0, None)
    check_message(error, "sample")


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_models_that_continue_no_text(name):
    with pytest.raises(TrainError) as error:
        generate(make(name), [1], 3, 1.0, 0, None)
    check_message(error, "not a causal language model")


def test_a_model_that_diverged():
    module = build(None, LLAMA).module
    module.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainError) as error:
        generate(module, [1], 3, 1.0, 0, None)
    check_message(error, "not finite")
    assert module.training
