"""Full disks, losses that are not finite, too little memory, bad input and odd input: each is told, and nothing is
lost."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
import subprocess
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import training
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from training import GPT2, LLAMA, config, measured, nothing_left, tensors

from mycel.errors import CheckpointError, MycelError, TrainError
from mycel.feed import Local
from mycel.run.checkpoint import latest, load
from mycel.train import device, summary
from mycel.train.config import dump
from mycel.train.data import prepare
from mycel.train.export import byte_tokenizer
from mycel.train.loop import train
from mycel.train.progress import Progress
from mycel.train.tokenize import Bytes

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 258,
}

disk, mycel = training.disk, training.mycel  # fixtures


# faults


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a disk is not allowed here")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("ends", ["free", "full"])
def test_disk_full_while_saving(disk, tmp_path, small_disk, mycel, ends):
    saves = {"every": 3, "asynchronous": ends == "free"}
    given = config(
        disk, small_disk / "run", checkpoint=saves, export=True, log={"curve": True, "tensorboard": True, "every": 3}
    )
    (tmp_path / "my.yaml").write_text(dump(given))
    code, output = mycel("train", "../my.yaml", cwd=small_disk, fill=4, **({"free": 10} if ends == "free" else {}))
    assert (
        "step 6 is not saved: disk full: needs" in output
        and "step 9 is not saved" in output
        and "Traceback" not in output
    ), output
    good = latest(small_disk / "run" / "checkpoints")
    if ends == "free":
        assert (
            code == 0 and good.name == "step-00000012" and (small_disk / "run" / "model" / "config.json").is_file()
        ), output
        assert [r["step"] for r in measured(small_disk / "run")] == [1, 3, 4, 6, 8, 9, 12], "metrics waited for room"
    else:
        assert code == 1 and good.name == "step-00000003" and "not all of it could be saved" in output, output
        assert load(good).step == 3
        (small_disk / "filler").unlink()
        code, output = mycel("train", "--resume", "run", cwd=small_disk)
        assert code == 0 and measured(small_disk / "run")[-1]["step"] == 12, output
    assert nothing_left(small_disk / "run")


def test_disk_full_from_the_start(disk, small_disk):
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CheckpointError, match=r"(No space left on device|disk full).*\n  at .*\n  try "):
        train(config(disk, small_disk / "run"))


def test_a_loss_that_is_not_finite_stops_the_run(disk, tmp_path, capsys):
    given = config(
        disk, tmp_path / "run", optimizer={"lr": 1e38}, train={"steps": 60}, schedule={"warmup": 0}, log={"every": 4}
    )
    with pytest.raises(
        TrainError,
        match=r"1\d steps in a row were skipped: their gradients are not finite\n  at        step \d to \d+, loss nan",
    ):
        train(given)
    output = capsys.readouterr().out
    assert "skipped, weights unchanged" in output and "a lower optimizer.lr (it is 1e+38)" in output
    records = measured(tmp_path / "run")
    assert records[-1]["skipped"] >= 10 and records[-1]["step"] < 20 and math.isnan(records[-1]["loss"])
    saved = tensors(tmp_path / "run")
    assert int(saved["step.skipped"]) == records[-1]["skipped"] and nothing_left(tmp_path / "run")


def test_out_of_memory_is_told(disk, tmp_path, monkeypatch):
    def full(self, **batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Local, "__call__", full)
    with pytest.raises(
        TrainError,
        match=(
            r"out of memory in step 1, which was predicted to need 0.0 GiB: CUDA out of memory. Tried[^\n]*\n  "
            r"at        cpu"
        ),
    ):
        train(config(disk, tmp_path / "run"))


def test_a_terminal_shows_that_it_is_stopping():
    shown = io.StringIO()
    progress = Progress(Console(file=shown, force_terminal=True, width=120), 10)
    progress.update(3, loss=1.0)
    progress.stopping()
    assert shown.getvalue() == "", "in the middle of anything, nothing may be printed"
    progress.console.print(progress.rows())
    assert "stopping after this step; Ctrl-C again: at once" in shown.getvalue()


# bad input, told before anything is made


def missing(disk, tmp_path):
    return {"data": {"train": str(tmp_path / "txet.txt")}}, "no such data file"


def empty(disk, tmp_path):
    (tmp_path / "empty.txt").touch()
    return {"data": {"train": str(tmp_path / "empty.txt")}}, "the data is empty"


def wrong_tokenizer(disk, tmp_path):
    return {
        "model": {"config": {**LLAMA, "vocab_size": 200}}
    }, "the tokenizer does not belong to the model: it has 258 ids, the model 200"


def out_of_range(disk, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000) % 300)
    return {
        "data": {"train": str(tmp_path / "ids.npy"), "tokenizer": None}
    }, "token id 258 is out of range: the model has ids 0 to 257"


def shapes(disk, tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**settings, "intermediate_size": 48}))
    return {
        "model": {"path": str(tmp_path / "base"), "config": None}
    }, "3 weights do not have the shape that config.json gives them"


def no_tokenizer(disk, tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    return {
        "model": {"path": str(tmp_path / "base"), "config": None},
        "data": {"tokenizer": None},
    }, "text needs a tokenizer"


def pictures(disk, tmp_path):
    vit = {
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
    }
    return {"model": {"config": vit}}, "ViTForImageClassification takes no tokens"


def classes(disk, tmp_path):
    return {
        "model": {"config": {**BERT, "architectures": ["BertForSequenceClassification"]}}
    }, "BertForSequenceClassification predicts classes, not tokens"


def padding(disk, tmp_path):
    """Its default is made for the published vocabulary."""
    return {"model": {"config": {**LLAMA, "model_type": "phi3"}}}, "pad_token_id is 32000, but the model has 258 ids"


def adapters(disk, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    return {
        "model": {"path": str(tmp_path), "config": None},
        "data": {"tokenizer": None},
    }, "the folder holds LoRA adapters, not a model"


def too_long(disk, tmp_path):
    return {"model": {"config": GPT2}, "data": {"length": 65}}, "data.length is 65, but the model knows 64 positions"


def too_little_memory(disk, tmp_path):
    return {"train": {"memory": "10KB"}}, "the budget is 9.77 KiB"


def no_such_layer(disk, tmp_path):
    return {"model": {"lora": {"targets": ["qq_proj"]}}}, "LoRA target 'qq_proj' names no layer"


def no_gpu(disk, tmp_path):
    return {"train": {"device": "cuda:77"}}, "device 'cuda:77' was asked for, but"


@pytest.mark.parametrize(
    "case",
    [
        missing,
        empty,
        wrong_tokenizer,
        out_of_range,
        shapes,
        no_tokenizer,
        pictures,
        classes,
        padding,
        adapters,
        too_long,
        too_little_memory,
        no_such_layer,
        no_gpu,
    ],
    ids=lambda case: case.__name__,
)
def test_bad_input_is_told_before_anything_is_made(disk, tmp_path, case):
    changes, message = case(disk, tmp_path)
    with pytest.raises(MycelError) as error:
        train(config(disk, tmp_path / "run", **changes))
    assert message in str(error.value) and "\n  " in str(error.value)
    assert not (tmp_path / "run").exists()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0.001, 0.4))
@hypothesis.settings(max_examples=60, deadline=None)
def test_examples_that_repeat_are_divided_or_the_way_out_is_one(sizes, split):
    """Equal examples stay on one side: where that leaves too few for validation, the split that is suggested works."""
    rows = [
        json.dumps({"prompt": "ab", "response": "c" * (1 + kind)})
        for kind, times in enumerate(sizes)
        for _ in range(times)
    ]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "rows.jsonl")
        file.write_text("\n".join(rows))
        divided = functools.partial(prepare, file, tokenizer=Bytes(), length=16, pack=False, cache=Path(name, "cache"))
        try:
            data = divided(split=split)
        except TrainError as error:
            if len(sizes) == 1:
                assert re.search("examples are equal|too little data", str(error))
                return
            assert f"{len(sizes)} are different, each there {min(sizes)} to {max(sizes)} times" in str(error)
            data = divided(split=float(re.search(r"data.split=([\d.]+)", str(error))[1]))
        assert data.train.count + data.validation.count == len(rows) and data.train.count and data.validation.count


# what is odd is said


def copies(tmp_path):
    return {
        "model": {"config": BERT}
    }, "BertForMaskedLM is no causal language model: it sees the tokens that it has to predict, and learns to copy them"


def other_end(tmp_path):
    wanted = (
        "the tokenizer ends a text with id 257, the model's eos_token_id is 2: what it writes will not end where "
        "it should\n"
    )
    return {"model": {"config": {**LLAMA, "eos_token_id": 2}}}, wanted + "  try       model.config.eos_token_id=257"


def ids_without_text(tmp_path):
    wanted = "the model has 600 ids, the tokenizer 258: what it writes of the others has no text\n"
    return {"model": {"config": {**LLAMA, "vocab_size": 600}}}, wanted + "  try       model.config.vocab_size=258"


def no_end(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return {"data": {"tokenizer": str(tmp_path)}}, "the tokenizer names no end of text"


def adapters_of_nothing(tmp_path):
    return {
        "model": {"lora": {"rank": 2, "merge": False}},
        "export": True,
    }, "the adapters are exported without the weights they belong to"


@pytest.mark.parametrize(
    "case", [copies, other_end, ids_without_text, no_end, adapters_of_nothing], ids=lambda case: case.__name__
)
def test_what_is_odd_is_said(disk, tmp_path, capsys, case):
    changes, note = case(tmp_path)
    for sections, said in (({}, False), (changes, True)):
        assert train(config(disk, tmp_path / "run", **sections), dry_run=True) == 0
        assert (f"note: {note}" in capsys.readouterr().out) == said


def test_a_step_larger_than_the_machine_is_said(disk, tmp_path, capsys, monkeypatch):
    assert 2**28 < device.memory_total(torch.device("cpu")) < 2**50
    for there, said in ((2**40, False), (2**10, True), (None, False)):
        monkeypatch.setattr(summary, "memory_total", lambda _, there=there: there)
        assert train(config(disk, tmp_path / "run"), dry_run=True) == 0
        assert ("note: the step is predicted to need" in capsys.readouterr().out) == said
