"""What `train.task` makes of a run: its data, its loss, and what the model has to be.

auto, pretrain, sft   the next token; which of them carry loss, the data says; auto is classify where the data is
                      images, or texts with labels for a model that tells classes
classify              a class, of text or of an image: a model with as many labels as there are classes
reward                a number that is larger for the preferred of two texts: a model with one label
dpo                   the preferred of two texts becomes likelier than it was, the other less: a language model
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mycel.errors import TrainError
from mycel.forward import evaluating
from mycel.step import Step
from mycel.train import config as settings
from mycel.train.data import Data
from mycel.train.labelled import (
    dpo_loss,
    images_alone,
    labelled_data,
    labelled_record,
    log_likelihoods,
    refuse_images,
    reward_loss,
)
from mycel.train.models import Head
from mycel.train.sample import causal
from mycel.train.tokenize import Tokenizer

LABELLED_TASKS = ("dpo", "reward", "classify")
IMAGE_MODEL = "a model of images: model.path=FOLDER of one, or a model.config with model_type: vit, say"


def with_task(config: settings.Config) -> tuple[settings.Config, str]:
    """The task that the data is plainly for, where none is said, and why it is taken to be; refused where text or label
    may be meant."""
    data, model = config.data, config.model
    if config.train.task != "auto":
        return config, ""
    classify = config.model_copy(update={"train": config.train.model_copy(update={"task": "classify"})})
    if (image := images_alone(data.train)) is not None:
        return classify, f"train.task is classify: the data is images in a folder for each class\n  at        {image}"
    where = labelled_record(data.train, data.format, data.fields.model_dump())
    if where is None:
        return config, ""
    if _names_classes(model):
        return classify, f"train.task is classify: the model tells classes, the data has labels\n  at        {where}"
    raise TrainError(
        f"each text has a label ({data.fields.label!r}), and nothing says which of them is to be learnt\n"
        f"  at        {where}\n  try       train.task=classify for labels, train.task=pretrain for texts"
    )


def _names_classes(model: settings.ModelConfig) -> bool:
    """Is the model said to be one that tells classes?"""
    file = model.path / "config.json" if model.path else None
    own = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    names = {**own, **(model.config or {})}.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("Classification") for name in names)


def mean_over(task: str) -> str:
    """What the loss of a task is a mean over."""
    return {"dpo": "pair", "reward": "pair", "classify": "example"}.get(task, "token")


def task_loss(train: settings.Train) -> Callable[..., Any] | None:
    """loss(model, **batch); None: what the model returns."""
    return {"dpo": dpo_loss(train.beta), "reward": reward_loss}.get(train.task)


def task_data(config: settings.Config, tokenizer: Tokenizer | None, module: Any, saved: Any) -> Data:
    """The examples, checked against the model; `saved` is the configuration that is exported with it."""
    task, data = config.train.task, config.data
    if task == "dpo" and not causal(module):
        raise _wrong_model(module, "dpo trains a language model", "model.config.architectures=[LlamaForCausalLM], say")
    takes_images = "pixel_values" in inspect.signature(module.forward).parameters
    if task == "classify" and not takes_images:
        refuse_images(data.train, type(module).__name__, IMAGE_MODEL)
    if task != "dpo" and not type(module).__name__.endswith("Classification"):
        hint = "a family that has one, such as llama, bert or vit"
        raise _wrong_model(module, f"{task} trains a model that ends in a classification", hint)
    for name, given in (("weights", data.weights is not None), ("stream", data.stream)):
        if given:
            raise TrainError(
                f"data.{name} is for the next token, not for {task}\n  at        data.{name}\n"
                f"  try       leaving data.{name} out"
            )
    own = module.config
    pad = getattr(own, "pad_token_id", None)
    if task != "dpo" and not takes_images and pad is None:
        path = config.model.path
        hint = f"pad_token_id in {path / 'config.json'}" if path is not None else "model.config.pad_token_id=0"
        raise TrainError(
            f"the model has no pad_token_id, by which it finds the end of a text\n  at        model\n  try       {hint}"
        )
    examples = labelled_data(
        task,
        data.train,
        data.validation,
        split=data.split,
        seed=config.train.seed,
        format=data.format,
        fields=data.fields.model_dump(),
        tokenizer=tokenizer,
        length=data.length,
        pad=pad or 0,
        image=image_settings(config.model.path, own) if takes_images else None,
        classes=class_names(own) if task == "classify" else None,
    )
    wanted = len(examples.train.classes) if task == "classify" else 1
    if task != "dpo" and own.num_labels != wanted:
        what = f"the data has {wanted} classes" if task == "classify" else "a reward is one number"
        raise TrainError(
            f"{what}, the model {own.num_labels} labels\n  at        model\n  try       model.labels={wanted}"
        )
    if task == "classify":
        name_classes(examples.train.classes, own, saved)
    return examples


def head_of(config: settings.Config) -> Head:
    """What the last layers of a run's model are for."""
    return Head(config.train.task, config.model.labels)


def class_names(config: Any) -> list[str] | None:
    """What a model calls its classes; None: it has no names for them."""
    names = [config.id2label[i] for i in range(config.num_labels)]
    return None if names == [f"LABEL_{i}" for i in range(len(names))] else names


def name_classes(names: Sequence[str], *configs: Any) -> None:
    """Call the classes of a model by these names, in what it exports too."""
    for config in configs:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}


def batch_outline(config: settings.Config, module: Any, rows: int) -> dict[str, torch.Tensor]:
    """A batch as a run would have it, without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device="meta")

    task, length = config.train.task, config.data.length
    if task == "auto" and type(module).__name__.endswith("Classification"):
        task = "classify"
    if task == "classify" and "pixel_values" in inspect.signature(module.forward).parameters:
        size = image_settings(config.model.path, module.config)["size"]
        return {"pixel_values": empty(3, size, size, dtype=torch.float32), "labels": empty()}
    if task == "classify":
        return {"input_ids": empty(length), "attention_mask": empty(length), "labels": empty()}
    if task in LABELLED_TASKS:
        reference = {"reference": empty(2, dtype=torch.float32)} if task == "dpo" else {}
        return {name: empty(2, length) for name in ("input_ids", "labels", "attention_mask")} | reference
    names = ("input_ids", "labels") if config.data.pack else ("input_ids", "labels", "attention_mask")
    return {name: empty(length) for name in names}


def with_reference(data: Data, step: Step, rows: int) -> Data:
    """The pairs with their log-likelihoods under the model as it is now, before the first step: every start of the run
    computes them anew, from the weights it begins with."""
    model = step.model
    forward = step.forward(lambda **batch: log_likelihoods(model, **batch))

    def measured(pairs: Any) -> Any:
        likelihoods = []
        with evaluating(model), torch.no_grad():
            for at in range(0, pairs.count, rows):
                # the last rows come in a batch as large as all others: no program is made for them
                chosen = np.arange(at, at + rows) % pairs.count
                device = next(model.parameters()).device
                batch = {name: torch.from_numpy(x).to(device) for name, x in pairs.batch(chosen).items()}
                likelihoods.append(forward(**batch)[: pairs.count - at].float().cpu().numpy())
        return pairs.with_array("reference", np.concatenate(likelihoods).astype(np.float32))

    return replace(data, train=measured(data.train), validation=measured(data.validation))


def _wrong_model(module: Any, what: str, hint: str) -> TrainError:
    return TrainError(f"{what}, not {type(module).__name__}\n  at        model\n  try       {hint}")


def image_settings(folder: Path | None, own: Any) -> dict[str, Any]:
    """The size that a model takes, and how pixels are centred: as its folder says, else around a half."""
    size = getattr(own, "image_size", None) or 224
    size = size[0] if isinstance(size, (list, tuple)) else size
    chosen = {"size": size, "mean": (0.5,) * 3, "deviation": (0.5,) * 3}
    file = folder / "preprocessor_config.json" if folder else None
    if file is not None and file.is_file():
        said = json.loads(file.read_text())
        named = {"mean": "image_mean", "deviation": "image_std"}
        chosen.update({ours: tuple(said[theirs]) for ours, theirs in named.items() if theirs in said})
    return chosen
