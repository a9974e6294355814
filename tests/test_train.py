"""`mycel train` end to end: it learns what a plain loop learns, goes on bit for bit whatever interrupts it, and says first what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from rich.console import Console
from safetensors.torch import load_file, save_file

from mycel.errors import CheckpointError, MycelError, TrainError
from mycel.run.checkpoint import best, latest, load
from mycel.run.folder import RunFolder
from mycel.step import Step
from mycel.train import metrics, models
from mycel.train.assemble import assemble
from mycel.train.config import Config, anchored, dump
from mycel.train.config import load as load_config
from mycel.train.evaluate import Validation
from mycel.train.loop import train
from mycel.train.order import Order
from mycel.train.progress import Progress
from mycel.train.schedule import learning_rate
from mycel.train.signals import Interrupted, Signals
from mycel.train.waiting import Waiting

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 258, "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 257,
    "attention_dropout": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
RANDOM = random.Random(7)
WORDS = ["def", "self", "return", "(x)", "if", "else:", "while", "in", "None", "1", "+", "import"]
TEXT = "\n".join(" ".join(RANDOM.choices(WORDS, k=8)) for _ in range(200))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A folder with data, and with tokens cached once for all."""
    path = tmp_path_factory.mktemp("train")
    (path / "text.txt").write_text(TEXT)
    return path


def settings(disk: Path, run: Path, **sections: dict) -> dict:
    """A tiny run of 12 steps, as nested settings; `sections` go over it, key by key."""
    whole = {
        "model": {"config": LLAMA},
        "data": {"train": str(disk / "text.txt"), "tokenizer": "bytes", "length": 16, "split": 0.2, "cache": str(disk / "cache")},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 12, "batch": 4, "device": "cpu"},
        "evaluate": {"every": 4, "batches": 3},
        "checkpoint": {"every": 5},
        "log": {"every": 3, "curve": False, "tensorboard": False},
        "sample": None,
        "export": False,
        "run": str(run),
    }
    for name, values in sections.items():
        whole[name] = {**(whole.get(name) or {}), **values} if isinstance(values, dict) else values
    return whole


def config(disk: Path, run: Path, **sections: dict) -> Config:
    return Config.from_dict(settings(disk, run, **sections))


def measured(run: Path) -> list[dict]:
    """The records without what depends on the machine's speed."""
    return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "memory_bytes", "mfu")} for r in metrics.read(run)]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return load(latest(run / "checkpoints")).tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class Mycel:
    """The command line in processes of its own: see train_child."""

    def __init__(self, out: Path) -> None:
        self.out = out
        script = Path(__file__).with_name("train_child.py")
        self.server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *args: object, cwd: Path, **job: object) -> int:
        """Begin a run: its process."""
        self.server.stdin.write(json.dumps({"args": [str(a) for a in args], "cwd": str(cwd), "out": str(self.out), **job}) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())["pid"]

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        return json.loads(self.server.stdout.readline())["ended"], self.out.read_text()

    def __call__(self, *args: object, cwd: Path, **job: object) -> tuple[int, str]:
        self.start(*args, cwd=cwd, **job)
        return self.end()


@pytest.fixture(scope="module")
def mycel(tmp_path_factory):
    made = Mycel(tmp_path_factory.mktemp("out") / "out.txt")
    yield made
    made.server.stdin.close()
    made.server.wait(60)


def nothing_left(run: Path) -> bool:
    """No lock is held, and no file is there that belongs to something half done."""
    RunFolder(run, resume=True).close()
    return not [p for p in run.rglob("*") if re.search(r"\.tmp|\.part|\.old|\.trash", p.name)]


# it learns what a plain loop learns


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_those_of_a_plain_loop(disk, tmp_path, accumulate):
    plain = {"config": {**LLAMA, "attention_dropout": 0.0}}
    given = config(disk, tmp_path / "run", model=plain, train={"accumulate": accumulate, "batch": 4 // accumulate, "steps": 6}, log={"every": 1})
    assert train(given) == 0
    losses = [r["loss"] for r in measured(tmp_path / "run")]

    # the same data and first weights; the loop is torch's
    parts = assemble(given, Waiting(Progress(Console(quiet=True), 1)))
    module, wanted = parts.module, []
    vectors = [p for p in module.parameters() if p.ndim < 2]
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
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


def test_a_report_is_the_mean_of_its_steps(disk, tmp_path):
    """Also: what a step returned is not written over by the next."""
    for every in (1, 5):
        assert train(config(disk, tmp_path / str(every), log={"every": every}, evaluate={"every": 0})) == 0
    each = [r["loss"] for r in measured(tmp_path / "1")]
    reports = {r["step"]: r["loss"] for r in measured(tmp_path / "5")}
    assert reports == {1: each[0], 5: math.fsum(each[1:5]) / 4, 10: math.fsum(each[5:10]) / 5, 12: math.fsum(each[10:]) / 2}


def test_validation_is_the_mean_over_tokens_that_carry_loss(disk, tmp_path):
    rows = [{"prompt": "a" * RANDOM.randint(1, 9), "response": "b" * RANDOM.randint(1, 9)} for _ in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(tmp_path / "rows.jsonl"), "pack": False}
    given = config(
        disk, tmp_path / "run", data=data, train={"steps": 2, "batch": 3}, export=True, model={"config": {**LLAMA, "attention_dropout": 0.0}}
    )
    assert train(given) == 0
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    total = count = 0
    held = assemble(given, Waiting(Progress(Console(quiet=True), 1))).data.validation
    for index in Order(held.count, 0).indices(0, min(held.count, 9)):
        row = {name: torch.from_numpy(x) for name, x in held.batch([index]).items()}
        logits = module(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), row["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum").item()
        count += (row["labels"][:, 1:] != -100).sum().item()
    assert measured(tmp_path / "run")[-1]["validation"] == pytest.approx(total / count, rel=1e-5)


# whatever interrupts it, it goes on bit for bit

RUNS = {
    "dropout, accumulate": {"train": {"accumulate": 2}, "checkpoint": {"every": 2, "keep": 1}},
    "LoRA on GPT-2": {"model": {"config": GPT2, "lora": {"rank": 2, "dropout": 0.1, "targets": ["c_attn"]}}, "checkpoint": {"best": False}},
    "momentum, bf16": {"optimizer": {"name": "sgd", "lr": 0.1}, "train": {"precision": "bf16"}},
}  # fmt: skip


@pytest.mark.parametrize("sections", RUNS.values(), ids=RUNS)
def test_an_interrupted_run_is_the_uninterrupted_one(disk, tmp_path, mycel, sections):
    """SIGTERM between checkpoints, kill -9 later, the process elsewhere: losses, validation, weights and optimiser state are the same bits."""
    whole = settings(disk, tmp_path / "straight", export=True, **sections)
    Path(tmp_path / "my.yaml").write_text(dump(Config.from_dict({**whole, "run": None})))
    code, told = mycel("train", "my.yaml", "--run", "straight", cwd=tmp_path)
    assert code == 0, told
    code, told = mycel("train", "my.yaml", "--run", "broken", cwd=tmp_path, kill=[4, signal.SIGTERM])
    assert code == 143 and "step-00000004 is safe" in told and "mycel train --resume broken" in told, told
    assert nothing_left(tmp_path / "broken")
    code, _ = mycel("train", "--resume", "broken", cwd=tmp_path, kill=[11, signal.SIGKILL])
    assert code == -signal.SIGKILL and latest(tmp_path / "broken" / "checkpoints").name > "step-00000004"
    (tmp_path / "elsewhere").mkdir()
    code, told = mycel("train", "--resume", "../broken", cwd=tmp_path / "elsewhere")
    assert code == 0 and "from step" in told, told
    assert measured(tmp_path / "broken") == measured(tmp_path / "straight")
    assert same(tensors(tmp_path / "broken"), tensors(tmp_path / "straight"))
    assert same(*(load_file(tmp_path / run / "model" / "model.safetensors") for run in ("broken", "straight")))
    assert nothing_left(tmp_path / "broken")
    last = [r for r in measured(tmp_path / "straight") if "validation" in r][-1]
    assert last["step"] == 12 and math.isfinite(last["validation"])


def test_a_run_killed_before_its_first_checkpoint_starts_anew(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    assert mycel("train", "my.yaml", cwd=tmp_path, kill=[4, signal.SIGKILL])[0] == -signal.SIGKILL
    code, told = mycel("train", "--resume", "run", cwd=tmp_path)
    assert code == 0 and "no checkpoint yet: it starts anew" in told, told
    assert train(config(disk, tmp_path / "straight")) == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "straight")


def test_ctrl_c_saves_and_a_second_one_stops_at_once(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    code, told = mycel("train", "my.yaml", cwd=tmp_path, kill=[7, signal.SIGINT])
    assert code == 130 and "stopping after this step" in told and "step-00000007 is safe" in told, told
    pid = mycel.start("train", "--resume", "run", cwd=tmp_path, kill=[8, signal.SIGINT], stuck=8)
    while not list((tmp_path / "run" / "checkpoints").glob(".tmp-step-00000008*/shard*")):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    code, told = mycel.end()
    assert code == 130 and "step-00000007 is safe" in told and "Traceback" not in told, told
    assert latest(tmp_path / "run" / "checkpoints").name == "step-00000007" and nothing_left(tmp_path / "run")


def test_a_signal_during_validation_does_not_wait_for_it(disk, tmp_path, monkeypatch):
    given, whole = config(disk, tmp_path / "run"), Validation.__call__
    monkeypatch.setattr(Validation, "__call__", lambda self, stop: (os.kill(os.getpid(), signal.SIGTERM), whole(self, stop))[1])
    assert train(given) == 143 and [r["step"] for r in measured(tmp_path / "run")] == [1, 3]
    monkeypatch.setattr(Validation, "__call__", whole)
    assert train(given, resume=tmp_path / "run") == 0
    assert train(config(disk, tmp_path / "straight")) == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "straight") and same(tensors(tmp_path / "run"), tensors(tmp_path / "straight"))


def test_a_signal_in_the_last_step_leaves_the_rest_to_be_done(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    assert mycel("train", "my.yaml", cwd=tmp_path, kill=[12, signal.SIGTERM])[0] == 143
    assert measured(tmp_path / "run")[-1]["step"] < 12 and latest(tmp_path / "run" / "checkpoints").name == "step-00000012"
    assert train(config(disk, tmp_path / "run"), resume=tmp_path / "run") == 0
    assert measured(tmp_path / "run")[-1].keys() >= {"loss", "validation"}


def test_a_signal_before_the_first_step_leaves_nothing(disk, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "build", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert train(config(disk, tmp_path / "run")) == 143
    assert "nothing was begun" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_programs_may_repeat_their_signal_people_mean_it():
    told: list[int] = []
    with Signals() as signals, signals.patiently(lambda: told.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [1] and signals.asked == signal.SIGTERM
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_in_another_thread_of_a_program(disk, tmp_path):
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(train(config(disk, tmp_path / "run", train={"steps": 1}))))
    thread.start()
    thread.join()
    assert codes == [0]


# going on, or not


@pytest.fixture(scope="module")
def finished(disk, tmp_path_factory):
    """A run that is done, to be copied."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train(config(disk, path, export=True)) == 0
    return path


@pytest.fixture
def old(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "old")
    return tmp_path / "old"


def again(old: Path, *overrides: str) -> int:
    return train(load_config(old / "config.yaml", overrides).model_copy(update={"run": old}), resume=old)


def test_a_finished_run(disk, old, capsys):
    before = tensors(old)
    assert again(old) == 0 and "the run is finished: 12 steps are done" in capsys.readouterr().out
    shutil.rmtree(old / "model")
    assert again(old) == 0 and (old / "model" / "config.json").is_file() and same(tensors(old), before)
    assert again(old, "train.steps=14") == 0
    told = capsys.readouterr().out
    assert "train.steps was 12, is now 14" in told and "from step 12" in told and measured(old)[-1]["step"] == 14
    assert again(old) == 0 and "finished: 14" in capsys.readouterr().out, "the new setting is kept"


def test_a_damaged_checkpoint_is_passed_over(old, finished, capsys):
    shard = next((old / "checkpoints" / "step-00000012").glob("shard*"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(old / "model")
    assert again(old) == 0
    told = capsys.readouterr().out
    assert "step-00000012 is damaged" in told and "using step-00000010" in told
    assert measured(old) == measured(finished) and same(tensors(old), tensors(finished))


def test_all_checkpoints_damaged(old):
    for manifest in old.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint is undamaged"):
        again(old, "train.steps=14")


REFUSED = {
    "data.length=8": "the data is not what the run was started with",
    "train.batch=2": "train.batch x train.accumulate is 2, in the checkpoint it is 4",
    "train.seed=1": "train.seed is 1, in the checkpoint it is 0",
    "optimizer.name=sgd": "optimizer.name is sgd, in the checkpoint it is adamw",
    "model.config.hidden_size=32": "12 tensors differ\n  model.embed_tokens.weight: float32[258, 16] in the checkpoint, float32[258, 32]",
    "model.dtype=bfloat16": "model.embed_tokens.weight: float32[258, 16] in the checkpoint, bfloat16[258, 16] in the model",
    "model.lora.rank=2": "model.layers.0.self_attn.q_proj.lora_A.weight: not there in the checkpoint, float32[2, 16] in the model",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_the_checkpoint_is_refused(old, change):
    before = {p: p.stat().st_mtime_ns for p in old.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(CheckpointError) as refused:
        again(old, "train.steps=14", change)
    assert REFUSED[change] in str(refused.value) and "step-00000012" in str(refused.value)
    assert before == {p: p.stat().st_mtime_ns for p in old.rglob("*") if p.is_file() and p.name != ".lock"}


def test_frozen_weights_that_changed_are_refused(disk, tmp_path):
    """With LoRA they are not in the checkpoint."""
    hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "config": None, "lora": {"rank": 2}}
    assert train(config(disk, tmp_path / "run", model=model, train={"steps": 3})) == 0
    assert not any("embed" in name for name in tensors(tmp_path / "run"))
    assert again(tmp_path / "run", "train.steps=4") == 0
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="frozen weights are not those"):
        again(tmp_path / "run", "train.steps=5")


def test_one_run_in_a_folder(disk, old, tmp_path):
    with pytest.raises(CheckpointError, match=r"already holds a run.*\n.*\n  try       --resume"):
        train(config(disk, old))
    with RunFolder(old, resume=True):
        for go in (lambda: again(old, "train.steps=14"), lambda: train(config(disk, old))):
            with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on host"):
                go()


def test_folders_without_a_name_are_apart(disk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    for _ in range(2):
        given = Config.from_dict({**settings(disk, tmp_path, train={"steps": 1}), "run": None})
        assert train(given, started_from=Path("x/my.yaml")) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["my-now", "my-now-2"]


def test_keeps_the_last_and_the_best(disk, tmp_path):
    every = {"every": 1, "keep": 2}
    assert train(config(disk, tmp_path / "run", checkpoint=every, evaluate={"every": 5}, optimizer={"lr": 0.5}, log={"every": 1})) == 0
    records = {r["step"]: r["validation"] for r in measured(tmp_path / "run")}
    lowest = min(records, key=records.get)
    kept = {int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {11, 12, lowest} and best(tmp_path / "run" / "checkpoints").name == f"step-{lowest:08d}"
    assert len(records) == 12, "a checkpoint knows how good it is"


# faults


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk is not allowed here")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("ends", ["free", "full"])
def test_disk_full_while_saving(disk, tmp_path, small_disk, mycel, ends):
    saves = {"every": 3, "asynchronous": ends == "free"}
    given = config(disk, small_disk / "run", checkpoint=saves, export=True, log={"curve": True, "tensorboard": True, "every": 3})
    (tmp_path / "my.yaml").write_text(dump(given))
    code, told = mycel("train", "../my.yaml", cwd=small_disk, fill=4, **({"free": 10} if ends == "free" else {}))
    assert "step 6 is not saved: disk full: needs" in told and "step 9 is not saved" in told and "Traceback" not in told, told
    good = latest(small_disk / "run" / "checkpoints")
    if ends == "free":
        assert code == 0 and good.name == "step-00000012" and (small_disk / "run" / "model" / "config.json").is_file(), told
        assert [r["step"] for r in measured(small_disk / "run")] == [1, 3, 4, 6, 8, 9, 12], "metrics waited for room"
    else:
        assert code == 1 and good.name == "step-00000003" and "not all of it could be saved" in told, told
        assert load(good).step == 3
        (small_disk / "filler").unlink()
        code, told = mycel("train", "--resume", "run", cwd=small_disk)
        assert code == 0 and measured(small_disk / "run")[-1]["step"] == 12, told
    assert nothing_left(small_disk / "run")


def test_disk_full_from_the_start(disk, small_disk):
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CheckpointError, match=r"(No space left on device|disk full).*\n  at .*\n  try "):
        train(config(disk, small_disk / "run"))


def test_a_loss_that_is_not_finite_stops_the_run(disk, tmp_path, capsys):
    given = config(disk, tmp_path / "run", optimizer={"lr": 1e38}, train={"steps": 60}, schedule={"warmup": 0}, log={"every": 4})
    with pytest.raises(TrainError, match=r"1\d steps in a row were skipped: their gradients are not finite\n  at        step \d to \d+, loss nan"):
        train(given)
    told = capsys.readouterr().out
    assert "skipped, weights unchanged" in told and "a lower optimizer.lr (it is 1e+38)" in told
    records = measured(tmp_path / "run")
    assert records[-1]["skipped"] >= 10 and records[-1]["step"] < 20 and math.isnan(records[-1]["loss"])
    saved = tensors(tmp_path / "run")
    assert int(saved["step.skipped"]) == records[-1]["skipped"] and nothing_left(tmp_path / "run")


def test_out_of_memory_is_told(disk, tmp_path, monkeypatch):
    def full(self, **batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Step, "__call__", full)
    with pytest.raises(
        TrainError, match=r"out of memory in step 1, which was predicted to need 0.0 GiB: CUDA out of memory. Tried[^\n]*\n  at        cpu"
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
    return {"model": {"config": {**LLAMA, "vocab_size": 200}}}, "the tokenizer does not belong to the model: it has 258 ids, the model 200"


def out_of_range(disk, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000) % 300)
    return {"data": {"train": str(tmp_path / "ids.npy"), "tokenizer": None}}, "token id 258 is out of range: the model has ids 0 to 257"


def shapes(disk, tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    told = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**told, "intermediate_size": 48}))
    return {"model": {"path": str(tmp_path / "base"), "config": None}}, "3 weights do not have the shape that config.json gives them"


def no_tokenizer(disk, tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    return {"model": {"path": str(tmp_path / "base"), "config": None}, "data": {"tokenizer": None}}, "text needs a tokenizer"


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


def too_long(disk, tmp_path):
    return {"model": {"config": GPT2}, "data": {"length": 65}}, "data.length is 65, but the model knows 64 positions"


def too_little_memory(disk, tmp_path):
    return {"train": {"memory": "10KB"}}, "the budget is 9.77 KiB"


def no_such_layer(disk, tmp_path):
    return {"model": {"lora": {"targets": ["qq_proj"]}}}, "LoRA target 'qq_proj' names no layer"


def no_gpu(disk, tmp_path):
    return {"train": {"device": "cuda:77"}}, "device 'cuda:77' was asked for, but"


@pytest.mark.parametrize("case", [
    missing, empty, wrong_tokenizer, out_of_range, shapes, no_tokenizer, pictures, too_long, too_little_memory, no_such_layer, no_gpu,
], ids=lambda case: case.__name__)  # fmt: skip
def test_bad_input_is_told_before_anything_is_made(disk, tmp_path, case):
    changes, message = case(disk, tmp_path)
    with pytest.raises(MycelError) as told:
        train(config(disk, tmp_path / "run", **changes))
    assert message in str(told.value) and "\n  " in str(told.value)
    assert not (tmp_path / "run").exists()


# what it shows and makes


def test_what_will_run_and_what_came_of_it(disk, tmp_path, mycel):
    given = config(disk, tmp_path / "run", export=True, sample={"prompt": "def", "tokens": 5}, log={"curve": True, "tensorboard": True})
    (tmp_path / "my.yaml").write_text(dump(given))
    code, told = mycel("train", "my.yaml", "--dry-run", "train.accumulate=3", cwd=tmp_path)
    assert code == 0 and not (tmp_path / "run").exists()
    wanted = [
        "192 tokens = 4 (batch) x 3 (accumulate) x 1 (device)",
        "predicted at the peak",
        "fp32",
        "train: ",
        "6,096, all of them trained",
        "adamw, lr 0.01 cosine (warm-up 2)",
    ]
    assert all(line in told for line in [*wanted, f"results     {tmp_path / 'run'}"]), told
    code, told = mycel("train", "my.yaml", cwd=tmp_path)
    assert code == 0 and "step 12/12  100%  loss " in told and "sample\n\ndef" in told and "● validation" in told, told
    assert "\ndone\n" in told and "12 steps in " in told and "\x1b" not in told
    there = "checkpoints config.yaml curve.png metrics.jsonl model tensorboard"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", *there.split()]
    assert (tmp_path / "run" / "curve.png").read_bytes()[1:4] == b"PNG"
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    trained = {name.removeprefix("model."): x for name, x in tensors(tmp_path / "run").items() if name.startswith("model.")}
    assert same(dict(module.state_dict()), trained)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").encode("dé") == list("dé".encode())


def test_models_that_write_no_text(disk, tmp_path, capsys):
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 258}
    given = config(disk, tmp_path / "run", model={"config": bert}, train={"steps": 2}, sample={"tokens": 5}, export=True)
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
    given = Config.from_dict({"data": {"train": ["*.txt", "stdlib", "/abs/*"], "validation": "v.txt", "cache": "c"}, "run": "r"})
    made = anchored(given)
    assert made.data.train == (f"{tmp_path}/a[[]1]/*.txt", "stdlib", "/abs/*") and made.data.tokenizer == "bytes"
    assert made.data.validation == f"{tmp_path}/a[1]/v.txt" and made.data.cache == tmp_path / "a[1]" / "c" and made.run is None
    assert anchored(made) == made == load_config(_written(tmp_path, made))


def _written(folder: Path, made: Config) -> Path:
    (folder / "written.yaml").write_text(dump(made))
    return folder / "written.yaml"
