"""A run goes on bit for bit whatever interrupts it; what would not be the same run is refused."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import training
import transformers as hf
from safetensors.torch import load_file, save_file
from training import GPT2, LLAMA, config, measured, nothing_left, same, settings, tensors

from mycel.errors import CheckpointError
from mycel.run.checkpoint import best, latest
from mycel.run.folder import RunFolder
from mycel.train import models
from mycel.train.config import Config, dump
from mycel.train.config import load as load_config
from mycel.train.evaluate import Validation
from mycel.train.loop import train
from mycel.train.signals import Interrupted, Signals

disk, mycel = training.disk, training.mycel  # fixtures


# whatever interrupts it, it goes on bit for bit

RUNS = {
    "dropout, accumulate": {"train": {"accumulate": 2}, "checkpoint": {"every": 2, "keep": 1}},
    "LoRA on GPT-2": {
        "model": {"config": GPT2, "lora": {"rank": 2, "dropout": 0.1, "targets": ["c_attn"]}},
        "checkpoint": {"best": False},
    },
    "momentum, bf16": {"optimizer": {"name": "sgd", "lr": 0.1}, "train": {"precision": "bf16"}},
}


@pytest.mark.parametrize("sections", RUNS.values(), ids=RUNS)
def test_an_interrupted_run_is_the_uninterrupted_one(disk, tmp_path, mycel, sections):
    """SIGTERM between checkpoints, kill -9 later, the process elsewhere: losses, validation, weights and optimiser
    state are the same bits."""
    whole = settings(disk, tmp_path / "straight", export=True, **sections)
    Path(tmp_path / "my.yaml").write_text(dump(Config.from_dict({**whole, "run": None})))
    code, output = mycel("train", "my.yaml", "--run", "straight", cwd=tmp_path)
    assert code == 0, output
    code, output = mycel("train", "my.yaml", "--run", "broken", cwd=tmp_path, kill=[4, signal.SIGTERM])
    assert code == 143 and "step-00000004 is safe" in output and "mycel train --resume broken" in output, output
    assert nothing_left(tmp_path / "broken")
    code, _ = mycel("train", "--resume", "broken", cwd=tmp_path, kill=[11, signal.SIGKILL])
    assert code == -signal.SIGKILL and latest(tmp_path / "broken" / "checkpoints").name > "step-00000004"
    (tmp_path / "elsewhere").mkdir()
    code, output = mycel("train", "--resume", "../broken", cwd=tmp_path / "elsewhere")
    assert code == 0 and "from step" in output, output
    assert measured(tmp_path / "broken") == measured(tmp_path / "straight")
    assert same(tensors(tmp_path / "broken"), tensors(tmp_path / "straight"))
    assert same(*(load_file(tmp_path / run / "model" / "model.safetensors") for run in ("broken", "straight")))
    assert nothing_left(tmp_path / "broken")
    last = [r for r in measured(tmp_path / "straight") if "validation" in r][-1]
    assert last["step"] == 12 and math.isfinite(last["validation"])


def test_a_run_killed_before_its_first_checkpoint_starts_anew(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    assert mycel("train", "my.yaml", cwd=tmp_path, kill=[4, signal.SIGKILL])[0] == -signal.SIGKILL
    code, output = mycel("train", "--resume", "run", cwd=tmp_path)
    assert code == 0 and "no checkpoint yet: it starts anew" in output, output
    assert train(config(disk, tmp_path / "straight")) == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "straight")


def test_ctrl_c_saves_and_a_second_one_stops_at_once(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    code, output = mycel("train", "my.yaml", cwd=tmp_path, kill=[7, signal.SIGINT])
    assert code == 130 and "stopping after this step" in output and "step-00000007 is safe" in output, output
    pid = mycel.start("train", "--resume", "run", cwd=tmp_path, kill=[8, signal.SIGINT], stuck=8)
    while not list((tmp_path / "run" / "checkpoints").glob(".tmp-step-00000008*/shard*")):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    code, output = mycel.end()
    assert code == 130 and "step-00000007 is safe" in output and "Traceback" not in output, output
    assert latest(tmp_path / "run" / "checkpoints").name == "step-00000007" and nothing_left(tmp_path / "run")


def test_a_signal_during_validation_does_not_wait_for_it(disk, tmp_path, monkeypatch):
    given, whole = config(disk, tmp_path / "run"), Validation.__call__
    monkeypatch.setattr(
        Validation, "__call__", lambda self, stop: (os.kill(os.getpid(), signal.SIGTERM), whole(self, stop))[1]
    )
    assert train(given) == 143 and [r["step"] for r in measured(tmp_path / "run")] == [1, 3]
    monkeypatch.setattr(Validation, "__call__", whole)
    assert train(given, resume=tmp_path / "run") == 0
    assert train(config(disk, tmp_path / "straight")) == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "straight") and same(
        tensors(tmp_path / "run"), tensors(tmp_path / "straight")
    )


def test_a_signal_in_the_last_step_leaves_the_rest_to_be_done(disk, tmp_path, mycel):
    (tmp_path / "my.yaml").write_text(dump(config(disk, tmp_path / "run")))
    assert mycel("train", "my.yaml", cwd=tmp_path, kill=[12, signal.SIGTERM])[0] == 143
    assert (
        measured(tmp_path / "run")[-1]["step"] < 12 and latest(tmp_path / "run" / "checkpoints").name == "step-00000012"
    )
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
    calls: list[int] = []
    with Signals() as signals, signals.patiently(lambda: calls.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1] and signals.asked == signal.SIGTERM
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
    assert again(old, "train.steps=14", "train.clip_norm=null", "parallel.mesh={dp: 1}") == 0
    output = capsys.readouterr().out
    assert "train.clip_norm was 1.0, is now null" in output and "parallel.mesh was null, is now {dp: 1}" in output
    assert "train.steps was 12, is now 14" in output and "from step 12" in output and measured(old)[-1]["step"] == 14
    assert again(old) == 0 and "finished: 14" in capsys.readouterr().out, "the new setting is kept"


def test_a_damaged_checkpoint_is_passed_over(old, finished, capsys):
    shard = next((old / "checkpoints" / "step-00000012").glob("shard*"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(old / "model")
    assert again(old) == 0
    output = capsys.readouterr().out
    assert "step-00000012 is damaged" in output and "using step-00000010" in output
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
    "model.config.hidden_size=32": (
        "12 tensors differ\n  model.embed_tokens.weight: float32[258, 16] in the checkpoint, float32[258, 32]"
    ),
    "model.dtype=bfloat16": (
        "model.embed_tokens.weight: float32[258, 16] in the checkpoint, bfloat16[258, 16] in the model"
    ),
    "model.lora.rank=2": (
        "model.layers.0.self_attn.q_proj.lora_A.weight: not there in the checkpoint, float32[2, 16] in the model"
    ),
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
    assert (
        train(
            config(
                disk, tmp_path / "run", checkpoint=every, evaluate={"every": 5}, optimizer={"lr": 0.5}, log={"every": 1}
            )
        )
        == 0
    )
    records = {r["step"]: r["validation"] for r in measured(tmp_path / "run")}
    lowest = min(records, key=records.get)
    kept = {int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {11, 12, lowest} and best(tmp_path / "run" / "checkpoints").name == f"step-{lowest:08d}"
    assert len(records) == 12, "a checkpoint knows how good it is"
