"""`mycel evaluate`, `mycel generate` and `mycel export` on what several ranks have trained: one process reads it; the
scores, the text and the weights are those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_train_ranks
import torch
import training
import transformers as hf
from safetensors.torch import load_file
from test_train_ranks import tiny
from training import TEXT
from typer.testing import CliRunner

from mycel.cli import app
from mycel.run.checkpoint import best, latest, load

disk, worlds = training.disk, test_train_ranks.worlds  # fixtures

PLANS = {
    "zero3": ({"dp": 2}, "zero3"),
    "tp": ({"tp": 2}, "tp"),
    "stages": (None, {"stages": 2, "schedule": "1f1b", "microbatches": 2}),
}


def mycel(*arguments: object) -> str:
    """What a command prints; it has to end well."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="mycel")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def runs(disk, tmp_path_factory, worlds) -> dict[str, Path]:
    """A run under each plan, whose best checkpoint is not its last: it climbs."""
    path = tmp_path_factory.mktemp("ranks_commands")
    climbing = {
        "optimizer": {"options": {"maximize": True}}, "train": {"steps": 4}, "evaluate": {"every": 2, "batches": 2},
        "checkpoint": {"every": 2, "keep": 2},
    }  # fmt: skip
    worlds(2, *({"settings": tiny(disk, path / name, *how, **climbing)} for name, how in PLANS.items()))
    return {name: path / name for name in PLANS}


@pytest.mark.parametrize("plan", PLANS)
def test_the_commands_take_what_ranks_have_trained(runs, plan, tmp_path):
    run = runs[plan]
    held = tmp_path / "held.txt"
    held.write_text(TEXT[:700])
    evaluate = ("evaluate", "--data", held, "--json", "--length", 16)
    generate = ("generate", "--prompt", "def ", "--tokens", 8, "--temperature", 0)
    scores = []
    for which, checkpoint in (("--best", best(run / "checkpoints")), ("--last", latest(run / "checkpoints"))):
        saved = load(checkpoint).tensors
        folder = tmp_path / which
        mycel("export", run, which, "--out", folder)
        exported = hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(exported[n.removeprefix("model.")], x) for n, x in saved.items() if n[:6] == "model.")
        mycel("export", run, which, "--to", "safetensors", "--out", tmp_path / f"weights{which}")
        weights = load_file(tmp_path / f"weights{which}" / "model.safetensors")
        assert all(torch.equal(saved[f"model.{name}"], x) for name, x in weights.items()) and weights
        scores.append(of_run := json.loads(mycel(*evaluate, run, which)))
        assert of_run == pytest.approx(json.loads(mycel(*evaluate, folder)), rel=1e-6)
        assert mycel(*generate, run, which) == mycel(*generate, folder)
    assert scores[0]["loss"] < scores[1]["loss"]
