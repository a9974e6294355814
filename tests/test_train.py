"""`mycel train` end to end: it learns what a plain loop learns, and shows and makes what it says."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
import transformers as hf
from rich.console import Console
from training import LLAMA, RANDOM, config, measured, same, tensors

from mycel.train.assemble import assemble
from mycel.train.config import Config, anchored, dump
from mycel.train.config import load as load_config
from mycel.train.loop import train
from mycel.train.order import Order
from mycel.train.progress import Progress
from mycel.train.schedule import learning_rate
from mycel.train.steps import Steps
from mycel.train.waiting import Waiting

disk, mycel = training.disk, training.mycel  # fixtures


# it learns what a plain loop learns


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_those_of_a_plain_loop(disk, tmp_path, accumulate):
    plain = {"config": {**LLAMA, "attention_dropout": 0.0}}
    given = config(
        disk,
        tmp_path / "run",
        model=plain,
        train={"accumulate": accumulate, "batch": 4 // accumulate, "steps": 6},
        log={"every": 1},
    )
    assert train(given) == 0
    losses = [r["loss"] for r in measured(tmp_path / "run")]

    # the same data and first weights; the loop is torch's
    parts = assemble(given, Waiting(Progress(Console(quiet=True), 1)))
    module, wanted = parts.module, []
    vectors = [p for p in module.parameters() if p.ndim < 2]
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr=1e-2, kind="cosine", steps=6, warmup=0.1, min_lr=0.1)
        batch = parts.data.train.batch(Order(parts.data.train.count, 0).indices(step, 4))
        loss = module(**{k: torch.from_numpy(v) for k, v in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
FAMILIES = {
    "gemma2": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
    "gpt_neox": SMALL,
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 258, "eos_token_id": 257},
    "opt": {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi3": {**SMALL, "num_key_value_heads": 1, "pad_token_id": None, "original_max_position_embeddings": 64},
    "qwen2_moe": {
        **SMALL, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_go_on_and_come_out(disk, tmp_path, monkeypatch, kind):
    """Interrupted after 4 of 8 steps or not, the run is the same; what comes out has, in transformers, the loss that
    was said, and writes."""
    sections = {
        "model": {"config": {"model_type": kind, **FAMILIES[kind]}},
        "evaluate": {"every": 8, "batches": 100},
        "export": True,
    }
    straight, broken = (
        config(disk, tmp_path / name, train={"steps": 8}, log={"every": 1}, **sections)
        for name in ("straight", "broken")
    )
    take = Steps._step

    def interrupted(steps, batch):
        if steps.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(steps, batch)

    assert train(straight) == 0
    monkeypatch.setattr(Steps, "_step", interrupted)
    assert train(broken) == 143
    monkeypatch.setattr(Steps, "_step", take)
    assert train(broken, resume=tmp_path / "broken") == 0
    assert measured(tmp_path / "broken") == measured(tmp_path / "straight") and same(
        tensors(tmp_path / "broken"), tensors(tmp_path / "straight")
    )
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "broken" / "model").eval()
    held = assemble(straight, Waiting(Progress(Console(quiet=True), 1))).data.validation
    batch = {name: torch.from_numpy(x) for name, x in held.batch(range(held.count)).items()}
    with torch.no_grad():
        assert measured(tmp_path / "broken")[-1]["validation"] == pytest.approx(module(**batch).loss.item(), rel=1e-5)
    start = batch["input_ids"][:1, :4]
    assert module.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=3, do_sample=False, eos_token_id=None
    ).shape == (1, 7)


def test_a_report_is_the_mean_of_its_steps(disk, tmp_path):
    """Also: what a step returned is not written over by the next."""
    for every in (1, 5):
        assert train(config(disk, tmp_path / str(every), log={"every": every}, evaluate={"every": 0})) == 0
    each = [r["loss"] for r in measured(tmp_path / "1")]
    reports = {r["step"]: r["loss"] for r in measured(tmp_path / "5")}
    assert reports == {
        1: each[0],
        5: math.fsum(each[1:5]) / 4,
        10: math.fsum(each[5:10]) / 5,
        12: math.fsum(each[10:]) / 2,
    }


def test_validation_is_the_mean_over_tokens_that_carry_loss(disk, tmp_path):
    rows = [{"prompt": "a" * RANDOM.randint(1, 9), "response": "b" * RANDOM.randint(1, 9)} for _ in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(tmp_path / "rows.jsonl"), "pack": False}
    given = config(
        disk,
        tmp_path / "run",
        data=data,
        train={"steps": 2, "batch": 3},
        export=True,
        model={"config": {**LLAMA, "attention_dropout": 0.0}},
    )
    assert train(given) == 0
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    total = count = 0
    held = assemble(given, Waiting(Progress(Console(quiet=True), 1))).data.validation
    for index in Order(held.count, 0).indices(0, min(held.count, 9)):
        row = {name: torch.from_numpy(x) for name, x in held.batch([index]).items()}
        logits = module(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), row["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        ).item()
        count += (row["labels"][:, 1:] != -100).sum().item()
    assert measured(tmp_path / "run")[-1]["validation"] == pytest.approx(total / count, rel=1e-5)


# what it shows and makes


def test_what_will_run_and_what_came_of_it(disk, tmp_path, mycel):
    given = config(
        disk,
        tmp_path / "run",
        export=True,
        sample={"prompt": "def", "tokens": 5},
        log={"curve": True, "tensorboard": True},
    )
    (tmp_path / "my.yaml").write_text(dump(given))
    code, output = mycel("train", "my.yaml", "--dry-run", "train.accumulate=3", cwd=tmp_path)
    assert code == 0 and not (tmp_path / "run").exists()
    wanted = [
        "192 tokens = 4 (batch) x 3 (accumulate) x 1 (device)",
        "predicted at the peak",
        "fp32",
        "train: ",
        "6,096, all of them trained",
        "adamw, lr 0.01 cosine (warm-up 2)",
    ]
    assert all(line in output for line in [*wanted, f"results     {tmp_path / 'run'}"]), output
    code, output = mycel("train", "my.yaml", cwd=tmp_path)
    assert (
        code == 0 and "step 12/12  100%  loss " in output and "sample\n\ndef" in output and "● validation" in output
    ), output
    assert "\ndone\n" in output and "12 steps in " in output and "\x1b" not in output
    assert re.search(r"a step +[\d.]+ (ms|s) measured, [\d.]+ (µs|ms|s) predicted \(", output), output
    there = "checkpoints config.yaml corrections.json curve.png metrics.jsonl model predicted.json tensorboard"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", *there.split()]
    assert (tmp_path / "run" / "curve.png").read_bytes()[1:4] == b"PNG"
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    trained = {
        name.removeprefix("model."): x for name, x in tensors(tmp_path / "run").items() if name.startswith("model.")
    }
    assert same(dict(module.state_dict()), trained)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").encode("dé") == list("dé".encode())


def test_models_that_write_no_text(disk, tmp_path, capsys):
    bert = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 258,
    }
    given = config(
        disk, tmp_path / "run", model={"config": bert}, train={"steps": 2}, sample={"tokens": 5}, export=True
    )
    assert train(given) == 0 and "sample" not in capsys.readouterr().out


def test_nobody_reads_on(disk, tmp_path):
    """A closed pipe does not stop training."""
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run", log={"every": 1})))
    piped = f"'{sys.executable}' -m mycel train my.yaml | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", piped], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stderr == "", ran
    assert measured(tmp_path / "run")[-1]["step"] == 12


def test_a_written_configuration_means_the_same_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "a[1]").mkdir()
    monkeypatch.chdir(tmp_path / "a[1]")
    given = Config.from_dict(
        {"data": {"train": ["*.txt", "stdlib", "/abs/*"], "validation": "v.txt", "cache": "c"}, "run": "r"}
    )
    configuration = anchored(given)
    assert (
        configuration.data.train == (f"{tmp_path}/a[[]1]/*.txt", "stdlib", "/abs/*")
        and configuration.data.tokenizer == "bytes"
    )
    assert (
        configuration.data.validation == f"{tmp_path}/a[1]/v.txt"
        and configuration.data.cache == tmp_path / "a[1]" / "c"
        and configuration.run is None
    )
    assert anchored(configuration) == configuration == load_config(_written(tmp_path, configuration))


def _written(folder: Path, configuration: Config) -> Path:
    (folder / "written.yaml").write_text(dump(configuration))
    return folder / "written.yaml"
