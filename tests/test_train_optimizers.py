"""The optimisers that `mycel train` offers: each is torch's with the settings it takes, and part of the program."""

from __future__ import annotations

import shutil
from typing import get_args

import pytest
import torch
import training
import transformers as hf
from torch import nn
from training import config, measured, same, tensors

from mycel.errors import TrainError
from mycel.ops.optimisers import OPTIMISERS
from mycel.optimizers import without_rule
from mycel.run.checkpoint import latest
from mycel.train.assemble import make_optimizer
from mycel.train.config import Optimizer
from mycel.train.loop import train

disk = training.disk  # a fixture

NAMES = get_args(Optimizer.model_fields["name"].annotation)


def test_all_of_torchs_that_have_a_rule_are_offered():
    known = {name for rule in OPTIMISERS.values() for name in rule.classes if hasattr(torch.optim, name)}
    assert {*NAMES} == {name.lower() for name in known}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "muon"])
def test_each_is_made_by_its_settings(name):
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(
        Optimizer(name=name, lr=0.01, betas=(0.8, 0.9), momentum=0.5, options={"maximize": True}), module
    )
    assert type(optimizer).__name__.lower() == name and not without_rule(optimizer)
    matrices, vectors = optimizer.param_groups
    assert matrices["lr"] == 0.01 and matrices["maximize"] is True
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert matrices.get("momentum", 0.5) == (0.5 if name == "sgd" else 0 if name == "rmsprop" else 0.5)


def test_muon_takes_the_matrices_between_embeddings_and_head():
    with torch.device("meta"):
        module = hf.LlamaForCausalLM(hf.LlamaConfig(**{k: v for k, v in training.LLAMA.items() if k != "model_type"}))
    optimizer = make_optimizer(Optimizer(name="muon", lr=0.01, options={"momentum": 0.8}), module)
    names = {id(p): name for name, p in module.named_parameters()}
    muon, *others = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert len(muon) == 7 and all(name.endswith("_proj.weight") for name in muon)
    assert sorted(name for group in others for name in group) == sorted({*names.values()} - {*muon})
    assert (
        optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw" and optimizer.param_groups[0]["momentum"] == 0.8
    )
    assert not without_rule(optimizer)


def test_muon_trains(disk, tmp_path):
    assert train(config(disk, tmp_path / "run", optimizer={"name": "muon"}, train={"steps": 6}, log={"every": 1})) == 0
    losses = [record["loss"] for record in measured(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.2
    slots = {name.rpartition(".")[2] for name in tensors(tmp_path / "run") if name.startswith("optimizer.")}
    assert slots == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"colour": 1},
            "torch.optim.RMSprop has no option 'colour'\n  at        optimizer.options.colour\n"
            "  try       one of alpha, eps, momentum, centered, capturable, foreach, maximize, differentiable",
        ),
        (
            {"alpha": -1.0},
            "torch.optim.RMSprop cannot be made so: Invalid alpha value: -1.0\n"
            "  at        optimizer.options\n  try       its documentation",
        ),
    ],
)
def test_options_that_torch_refuses(options, message):
    with pytest.raises(TrainError) as refused:
        make_optimizer(Optimizer(name="rmsprop", options=options), nn.Linear(3, 4))
    assert str(refused.value) == message


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(disk, tmp_path):
    """Adafactor: state of three shapes."""
    run = tmp_path / "run"
    given = config(disk, run, optimizer={"name": "adafactor"}, train={"steps": 6}, checkpoint={"every": 3, "keep": 9})
    assert train(given) == 0
    whole = tensors(run)
    shutil.rmtree(latest(run / "checkpoints"))
    assert train(given, resume=run) == 0
    assert same(whole, tensors(run))
