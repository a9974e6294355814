"""A trained model again: from a checkpoint of a run, saved under any plan, or from a folder in Hugging Face form.

RUN       config.yaml ──▶ model, adapters, tokenizer    checkpoints/step-N ──▶ its weights: the best by validation
                                                        where that was measured, else the last
RUN/checkpoints/step-N                                  the same with just these weights
FOLDER    config.json, safetensors ──▶ model            tokenizer.json ──▶ tokenizer
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.run.checkpoint import best, latest, load_latest
from mycel.run.checkpoint import load as load_checkpoint
from mycel.run.folder import resume_command
from mycel.run.kept import steps
from mycel.run.shards import read_manifest
from mycel.step.step_state import model_tensors
from mycel.train import config as settings
from mycel.train import models
from mycel.train.assemble import adapt, tokenizer_of, tokenizer_source
from mycel.train.models import LoadedModel
from mycel.train.progress import number
from mycel.train.run_folders import is_run, near_runs, run_around, run_of_checkpoint
from mycel.train.state import check_shapes
from mycel.train.tasks import head_of, name_classes
from mycel.train.tokenize import VOCABULARIES, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights; `source` says whose, for people; `config` is the run's, if it is from one."""

    model: LoadedModel
    tokenizer: Tokenizer | None
    tokenizer_source: Any  # what an export takes it from
    source: str
    config: settings.Config | None = None

    @property
    def module(self) -> nn.Module:
        return self.model.module

    def needs_tokenizer(self) -> Tokenizer:
        """Its tokenizer; TrainError if it has none."""
        if self.tokenizer is None:
            raise TrainError(
                f"there is no tokenizer: text cannot become tokens\n  at        {self.source}\n"
                "  try       a folder with tokenizer.json, or a run with data.tokenizer"
            )
        return self.tokenizer


def trained(where: Path, last: bool = False, device: str | torch.device = "cpu") -> TrainedModel:
    """The model of a run, of one of its checkpoints, or of a folder, on a device; of a run the best checkpoint, or the
    `last`.  TrainError if its weights are broken."""
    if is_run(where):
        model = _of_run(where, *checkpoint_of(where, last), torch.device(device))
    elif run := run_of_checkpoint(where):
        model = _of_run(run, *named_checkpoint(run, where.name, last), torch.device(device))
    else:
        model = _of_folder(where, device)
    if what := models.not_finite(model.module):
        raise TrainError(f"{what}\n  at        {model.source}\n  try       weights from before they broke")
    return model


def _of_folder(where: Path, device: str | torch.device) -> TrainedModel:
    if not where.is_dir():
        hint = models.of_the_hub(where) or f"{near_runs(where) or 'a folder of `mycel train`'}, or a model's own"
        raise TrainError(f"no such run or model folder: {where}\n  try       {hint}")
    if not (where / "config.json").is_file() and (around := run_around(where)):
        raise TrainError(f"{where} is part of a run, not a run\n  try       {around}")
    model = models.build(where, None, weights="load", dtype=_dtype(where), device=device)
    there = any((where / name).is_file() for name in VOCABULARIES)
    return TrainedModel(model, load_tokenizer(where) if there else None, where if there else None, str(where))


def checkpoint_of(run: Path, last: bool) -> tuple[Path, str]:
    """The checkpoint that is meant, and why in words."""
    folder = run / "checkpoints"
    newest = latest(folder)
    if newest is None:
        load_latest(folder) if any(folder.glob("step-*")) else None  # says what is wrong with each
        model = run / "model"
        hint = f"{model}, which the run has exported" if model.is_dir() else resume_command(run)
        raise TrainError(f"the run has no checkpoint\n  at        {folder}\n  try       {hint}")
    lowest = None if last else best(folder)
    if lowest is None:
        return newest, f"{newest.name}, the last"
    metric = read_manifest(lowest).metric
    assert metric is not None
    others = f"; the last is {newest.name}: --last" if lowest != newest else ", and the last"
    return lowest, f"{lowest.name}, the best by validation (loss {number(metric)}){others}"


def named_checkpoint(run: Path, name: str, last: bool) -> tuple[Path, str]:
    """The checkpoint `step-N` of a run, and its name; `last` contradicts it."""
    there = steps(run / "checkpoints")
    path = there.get(int(name.removeprefix("step-")))
    if path is None:
        known = ", ".join(each.name for each in there.values()) or "none"
        raise TrainError(f"the run has no checkpoint {name}\n  known     {known}\n  try       {run}")
    if last:
        raise TrainError(f"--last is for a run, {path.name} is one checkpoint\n  try       {run} --last")
    return path, path.name


def _of_run(run: Path, path: Path, words: str, device: torch.device) -> TrainedModel:
    config = settings.load(run / "config.yaml")
    model = model_at_start(config, device)
    loaded = load_checkpoint(path, device, only=lambda name: name.startswith("model."))
    if classes := loaded.meta.get("classes"):
        name_classes(classes, model.module.config, model.config)
    saved = loaded.tensors
    own = model_tensors(model.module, frozen=False)
    check_shapes(path, own, {name.removeprefix("model."): x for name, x in saved.items()})
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(saved[f"model.{name}"])
    return TrainedModel(model, tokenizer_of(config), tokenizer_source(config, model), f"{run}: {words}", config)


def model_at_start(config: settings.Config, device: str | torch.device) -> LoadedModel:
    """The model of a run with the weights that it begins with."""
    model = models.build(
        config.model.path,
        config.model.config,
        weights=config.model.weights,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        seed=config.train.seed,
        head=head_of(config),
    )
    adapt(config, model.module)
    return model


def _dtype(folder: Path) -> torch.dtype:
    """As the weights are, if their configuration says so."""
    try:
        named = json.loads((folder / "config.json").read_text())
        return getattr(torch, str(named.get("dtype") or named.get("torch_dtype") or "float32"), torch.float32)
    except (OSError, ValueError):
        return torch.float32
