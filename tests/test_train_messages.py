"""Messages of `mycel train` that must not mislead: what is wrong, and a way out that is one; as golden texts."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import expert_families
import pytest
import torch
import training
import transformers as hf
from distributing import OneDevice
from golden import golden
from training import GPT2, LLAMA, config, measured

from mycel.errors import CheckpointError, MycelError, PlanError, TrainError
from mycel.ir import Mesh
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.run.folder import RunFolder
from mycel.train import expert_load
from mycel.train.config import Config, Parallel, dump
from mycel.train.config import load as load_config
from mycel.train.loop import train
from mycel.train.ranks import _axes
from mycel.train.summary import _left_whole

disk = training.disk  # a fixture


def refused(given: Config, kind: type[MycelError], **more: object) -> str:
    with pytest.raises(kind) as error:
        train(given, **more)
    return str(error.value)


def notes_in(output: str, words: str) -> str:
    """The notes that a run prints with these words."""
    notes = re.findall(r"^ *note: .*(?:\n  (?:at|try|known) .*)*", output, re.MULTILINE)
    return "\n".join(note for note in notes if words in note)


def test_a_budget_that_nothing_fits_is_told_in_settings(disk, tmp_path):
    text = refused(config(disk, tmp_path / "run", train={"memory": "64KiB"}), PlanError)
    golden("told_budget", re.sub(r"peak      .*", "peak      WHERE", text))
    assert "accumulate" not in text
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_says_so(disk, tmp_path, capsys):
    notes = []
    for batch, accumulate in ((1000, 1), (200, 4), (4, 2)):
        given = config(disk, tmp_path / "run", train={"batch": batch, "accumulate": accumulate})
        assert train(given, dry_run=True) == 0
        output = capsys.readouterr().out
        there = int(re.search(r"train: [\d,]+ tokens, (\d+) sequences", output)[1])
        assert 100 < there < 500
        notes.append(notes_in(output, "but the training data has"))
        assert f"train.batch={there // accumulate}, or more data" in notes[-1] or not notes[-1]
    assert not notes[-1]
    golden("told_batch_larger_than_data", "\n\n".join(notes[:2]))


@pytest.mark.slow
def test_the_command_fails_on_weights_that_are_no_numbers(disk, tmp_path):
    """In a process of its own: exit code 1, what is said, and no run, checkpoint or model."""
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**{k: v for k, v in GPT2.items() if k != "model_type"}))
    with torch.no_grad():
        model.transformer.wpe.weight[5] = torch.inf
    model.save_pretrained(tmp_path / "model")
    given = config(disk, tmp_path / "run", model={"path": str(tmp_path / "model"), "config": None}, export=True)
    (tmp_path / "my.yaml").write_text(dump(given))
    command = [sys.executable, "-m", "mycel", "train", "my.yaml"]
    ran = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stdout
    golden("told_not_finite_by_the_command", ran.stderr.replace(str(tmp_path), "FOLDER"))
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_are_named(disk, tmp_path):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, :5] = torch.nan
    model.save_pretrained(tmp_path / "model")
    given = config(disk, tmp_path / "run", model={"path": str(tmp_path / "model"), "config": None})
    golden("told_not_finite", refused(given, TrainError).replace(str(tmp_path), "FOLDER"))
    assert not (tmp_path / "run").exists()


def test_a_run_all_of_whose_steps_were_skipped_has_failed(disk, tmp_path):
    given = config(disk, tmp_path / "run", train={"steps": 3, "precision": "fp16"}, optimizer={"lr": 1e-2})
    from mycel.train import steps

    def poisoned(self, batch, take=steps.Steps._step):
        with torch.no_grad():
            next(self.parts.module.parameters())[0, 0] = torch.nan
        return take(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Steps, "_step", poisoned)
        text = refused(given, TrainError)
    golden("told_all_skipped", text.replace(str(tmp_path), "FOLDER"))


def poison(patch, first: int, mend: bool) -> None:
    """From a step on a weight is no number, while a step is taken or for good."""
    from mycel.train import steps

    def poisoned(self, batch, take=steps.Steps._step):
        weight = next(self.parts.module.parameters())
        was = weight.detach()[0, 0].clone()
        with torch.no_grad():
            if self.done + 1 >= first:
                weight[0, 0] = torch.nan
            out = take(self, batch)
            if mend:
                weight[0, 0] = was if self.done + 1 >= first else weight[0, 0]
        return out

    patch.setattr(steps.Steps, "_step", poisoned)


@pytest.mark.parametrize("first, code", [(6, 1), (11, 0)])
def test_a_run_whose_last_steps_were_skipped_says_so(disk, tmp_path, monkeypatch, capsys, first, code):
    """Seven of them: it has failed; two are what happens in 16 bits."""
    poison(monkeypatch, first, mend=True)
    assert train(config(disk, tmp_path / "run", evaluate={"every": 0}, export=True)) == code
    output = capsys.readouterr().out
    end = output[output.rindex("\ndone") :]
    title, row = end.strip().splitlines()[0], next(line for line in end.splitlines() if "skipped" in line)
    golden(f"told_skipped_{13 - first}", f"{title}\n{' '.join(end[end.index(row) :].split('model')[0].split())}")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_weights_that_broke_on_the_way_are_not_exported(disk, tmp_path, monkeypatch):
    poison(monkeypatch, 6, mend=False)
    given = config(disk, tmp_path / "run", evaluate={"every": 0}, export=True)
    golden("told_not_finite_at_the_end", refused(given, TrainError).replace(str(tmp_path), "FOLDER"))
    assert not (tmp_path / "run" / "model").exists()


def test_the_best_is_exported_where_the_last_weights_broke(disk, tmp_path, monkeypatch):
    poison(monkeypatch, 8, mend=False)
    checkpoint = {"every": 4, "best": True}
    assert train(config(disk, tmp_path / "run", checkpoint=checkpoint, export=True)) == 1
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert all(x.isfinite().all() for x in model.state_dict().values())


@pytest.mark.parametrize(("every", "words"), [(4, "(step 4)"), (0, "(step 4, not saved)")])
def test_a_best_step_that_was_not_saved_says_so(disk, tmp_path, capsys, every, words):
    """So that the model of the best checkpoint is not taken for that of the best step."""
    climbing = {"options": {"maximize": True}}
    assert train(config(disk, tmp_path / "run", optimizer=climbing, checkpoint={"every": every, "keep": 9})) == 0
    assert f" at best {words}" in " ".join(capsys.readouterr().out.split())


def test_without_its_best_checkpoint_a_run_exports_the_last(disk, tmp_path, monkeypatch, capsys):
    from mycel.errors import CheckpointError
    from mycel.train import state

    def broken(parts, path):
        raise CheckpointError(f"a bit of it flipped\n  at        {path}\n  try       another")

    monkeypatch.setattr(state, "take_weights", broken)
    climbing = {"options": {"maximize": True}}
    checkpoint = {"every": 4, "keep": 3}
    assert train(config(disk, tmp_path / "run", optimizer=climbing, checkpoint=checkpoint, export=True)) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a bit of it flipped" in output
    assert "model, of the last step; step-00000004, the best by validation, cannot be read" in output


@pytest.fixture(scope="module")
def finished(disk, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train(config(disk, path)) == 0
    return path


def again(run: Path, *overrides: str) -> int:
    return train(load_config(run / "config.yaml", overrides).model_copy(update={"run": run}), resume=run)


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(finished, tmp_path):
    texts = []
    for gone in ("checkpoints", "checkpoints/step-*"):
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        for path in run.glob(gone):
            shutil.rmtree(path)
        with pytest.raises(CheckpointError) as error:
            again(run)
        texts.append(str(error.value).replace(str(tmp_path), "FOLDER"))
        assert measured(run) == measured(finished)
        shutil.rmtree(run)
    assert texts[0] == texts[1]
    golden("told_checkpoints_gone", texts[0])


def test_more_steps_say_that_the_schedule_is_stretched(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert again(run, "train.steps=14") == 0
    output = capsys.readouterr().out
    golden("told_stretched", re.search(r"the cosine schedule.*?\n.*?\n", output, re.S)[0])
    assert again(run, "train.steps=15", "schedule.kind=constant") == 0
    assert "stretched" not in capsys.readouterr().out


def test_a_finished_run_says_which_settings_it_ignores(finished, capsys):
    written = (finished / "config.yaml").read_text()
    for overrides in ((), ("optimizer.lr=0.5", "train.clip_norm=null"), ("train.steps=3",)):
        assert again(finished, *overrides) == 0
    assert (finished / "config.yaml").read_text() == written, "what no step was taken with is not the run's"
    golden("told_finished", capsys.readouterr().out.replace(str(finished), "RUN"))


@pytest.mark.parametrize(
    "plan, count, axes",
    [
        ("tp", 2, {"tp": 2}),
        ("cp", 4, {"cp": 4}),
        ("zero3", 2, {"dp": 2}),
        ("zero3+dp", 2, {"dp": 2}),
        (None, 2, {"dp": 2}),
    ],
)
def test_the_mesh_of_a_ready_plan_is_its_axis(plan, count, axes):
    assert _axes(Parallel(plan=plan), count) == axes
    assert _axes(Parallel(plan=plan, mesh={"a": 2}), count) == {"a": 2}


def test_a_plan_for_several_ranks_says_that_one_runs(disk, tmp_path, capsys):
    notes = {}
    for plan in ("zero3+tp", "auto", None):
        assert train(config(disk, tmp_path / "run", parallel={"plan": plan}), dry_run=True) == 0
        notes[plan] = notes_in(capsys.readouterr().out, "one process runs")
    assert not notes["auto"] and not notes[None]
    golden("told_one_process", notes["zero3+tp"])


def test_a_plan_over_several_axes_wants_a_mesh():
    assert _axes(Parallel(plan="zero3+tp"), 1) == {}
    with pytest.raises(PlanError) as error:
        _axes(Parallel(plan="zero3+tp"), 6)
    golden("told_axes_of_a_plan", str(error.value))


def left_whole(held: ShardedModel, name: str) -> list[str]:
    return _left_whole(
        SimpleNamespace(team=SimpleNamespace(plan=held.plan, name=name), step=SimpleNamespace(parts=held))
    )


def held_under(kind: type[hf.PreTrainedConfig], name: str, mesh: Mesh) -> ShardedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(kind(**sizes, vocab_size=32))
    return ShardedModel(model, torch.optim.SGD(model.parameters()), Plan.read(name, mesh))


def test_a_plan_that_leaves_most_of_a_model_whole_says_so():
    helds = [held_under(kind, "tp", Mesh(tp=2)) for kind in (hf.MambaConfig, hf.LlamaConfig, hf.MixtralConfig)]
    notes = [left_whole(held, "tp") for held in helds]
    assert notes[1] == notes[2] == []
    share, whole = helds[2].left_whole()  # of Mixtral: experts are split, routers are not
    assert share < 0.05 and whole and all(name.endswith("gate.weight") for name in whole), (share, whole)
    golden("told_left_whole", notes[0][0])


def test_what_is_whole_beside_experts_is_meant_to_be():
    """And what ZeRO splits is not whole; the axis that is told of is one for other parameters."""
    for name, mesh in (("ep", Mesh(ep=2)), ("zero3+ep", Mesh(dp=2, ep=2)), ("zero3+ep+tp", Mesh(dp=2, ep=2, tp=2))):
        one = OneDevice.of(expert_families.family("mixtral", vocab_size=2048), expert_families.text())
        held = ShardedModel(one.model, one.optimizer, Plan.read(name, mesh))
        held.given(one.unsharded)
        assert left_whole(held, name) == []
    (note,) = left_whole(held_under(hf.MambaConfig, "tp+ep", Mesh(tp=2, ep=2)), "tp+ep")
    assert note.endswith("parameters: {'*.x_proj.weight': [tp, -]}")


# -- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_is_found_before_work_starts(disk, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("mycel.train.loop.assemble", lambda *a: pytest.fail("work was done"))
    text = refused(config(disk, tmp_path / "file" / "run"), CheckpointError)

    def no_folder(**_):  # as /proc has it, also for root
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.mkdtemp", no_folder)
        text += "\n\n" + refused(config(disk, tmp_path / "run"), CheckpointError)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, who may write everywhere
    text += "\n\n" + refused(config(disk, tmp_path / "run"), CheckpointError)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    golden("told_unusable_folder", text.replace(str(tmp_path), "FOLDER"))


def test_a_run_is_overwritten_when_asked_and_nothing_else_is(disk, finished, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    given = config(disk, run, train={"steps": 2})
    assert train(given, dry_run=True) == 0, "what would run is said, and that it would be refused"
    note = notes_in(capsys.readouterr().out, "already holds a run")
    assert len(measured(run)) > 2
    golden("told_a_run_is_there", f"{note}\n\n{refused(given, CheckpointError)}".replace(str(tmp_path), "FOLDER"))
    written = ("trace.json", "schedule.html", expert_load.FILE, expert_load.PICTURE)
    for name in written:
        (run / name).write_text("of the run that was")
    assert train(given, overwrite=True) == 0 and not any((run / name).exists() for name in written)
    assert [r["step"] for r in measured(run)] == [1, 2] and not (run / "checkpoints" / "step-00000012").exists()
    with RunFolder(run, resume=True), monkeypatch.context() as patch:
        patch.setattr("mycel.train.loop.assemble", lambda *a: pytest.fail("work was done"))
        assert "the folder is in use by process" in refused(given, CheckpointError, overwrite=True)
    (run / "thesis.tex").touch()
    text = refused(given, CheckpointError, overwrite=True)
    golden("told_not_overwritten", text.replace(str(tmp_path), "FOLDER"))
    assert (run / "checkpoints" / "step-00000002").exists()
