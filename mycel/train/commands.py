"""What the command line does with a trained model: `mycel evaluate`, `mycel generate`, `mycel export`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from mycel.api import capture
from mycel.errors import TrainError
from mycel.sizes import counted
from mycel.train import device as devices
from mycel.train import generate as generating
from mycel.train import lora, score
from mycel.train.config import DataConfig
from mycel.train.documents import FIELDS
from mycel.train.export import export
from mycel.train.labelled import examples, refuse_images
from mycel.train.models import too_long
from mycel.train.onnx_file import write_onnx
from mycel.train.run_folders import is_run, no_run, run_of_checkpoint
from mycel.train.tasks import class_names, image_settings
from mycel.train.trained import TrainedModel, model_at_start, trained

Say = Callable[[str], None]
TARGETS = ("hf", "safetensors", "onnx", "program")


def evaluate(
    where: Path,
    data: Sequence[str],
    say: Say,
    *,
    last: bool,
    length: int | None,
    device: str,
    as_json: bool,
    fields: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The score of a model on data, in words or as JSON; `fields`: what those of records are called here, where the run
    had other names."""
    chosen = devices.choose(device, "--device")
    given = trained(where, last, chosen)
    say(given.source)
    own = given.config.data if given.config is not None else DataConfig()
    own = own.model_copy(update={"fields": own.fields.model_copy(update=dict(fields))})
    result = (
        _classifier_score(given, own, where, data, length, say)
        if type(given.module).__name__.endswith("Classification")
        else _language_score(given, own, data, length, chosen, say)
    )
    return score.as_json(result) if as_json else str(result)


def _language_score(
    given: TrainedModel, own: DataConfig, data: Sequence[str], length: int | None, device: Any, say: Say
) -> score.Score:
    """Of a language model: by text, choices, or pairs, as the data has them."""
    refuse_images(data, type(given.module).__name__, "text, or a model of images")
    room = getattr(_text_config(given), "max_position_embeddings", None)
    width = length or (own.length if given.config is not None else min(room or 1024, 1024))
    form = score.form_of(data)
    if form != "choices":
        _tell_length(width, given, say)
    if form == "choices":
        return score.choice_score(given.module, data, given.needs_tokenizer())
    if form == "pairs":
        pairs = _examples(given, own, "dpo", data, width)
        if given.config is None or given.config.train.task != "dpo":
            return score.preference_score(given.module, pairs)
        start = model_at_start(given.config, device).module
        return score.preference_score(given.module, pairs, start, given.config.train.beta)
    return score.text_score(
        given.module, data, given.tokenizer, length=width, cache=own.cache_folder, fields=own.fields.model_dump()
    )


def _classifier_score(
    given: TrainedModel, own: DataConfig, where: Path, data: Sequence[str], length: int | None, say: Say
) -> score.Score:
    """Of a model that tells classes, or how much it likes a text."""
    module: Any = given.module
    width = length or own.length
    if "pixel_values" in inspect.signature(module.forward).parameters:
        image = image_settings(given.config.model.path if given.config is not None else where, module.config)
        return score.example_score(
            module, _examples(given, own, "classify", data, width, image, class_names(module.config))
        )
    refuse_images(data, type(module).__name__, "texts with their labels, or a model of images")
    _tell_length(width, given, say)
    if module.config.num_labels == 1:
        return score.reward_score(module, _examples(given, own, "reward", data, width))
    return score.example_score(module, _examples(given, own, "classify", data, width, None, class_names(module.config)))


def _examples(
    given: TrainedModel,
    own: DataConfig,
    task: str,
    data: Sequence[str],
    length: int,
    image: Any = None,
    classes: Any = None,
) -> Any:
    """The examples of a task, as the run has read its own."""
    module: Any = given.module
    trained_so = given.config is not None and given.config.train.task == task
    return examples(
        task, [*data], own.format if trained_so else "auto", {**FIELDS, **own.fields.model_dump()},
        given.tokenizer if image is not None else given.needs_tokenizer(), length,
        getattr(module.config, "pad_token_id", None) or 0, image, classes,
    )  # fmt: skip


def _tell_length(width: int, given: TrainedModel, say: Say) -> None:
    if note := too_long(width, given.module, "--length"):
        say(f"note: {note}")


def _text_config(given: TrainedModel) -> Any:
    module: Any = given.module
    return module.config.get_text_config()


def generate(
    where: Path,
    prompt: str | None,
    how: generating.Sampling,
    say: Say,
    write: Say,
    *,
    last: bool,
    chat: bool,
    file: Path | None,
    out: Path | None,
    device: str,
) -> None:
    """Write what a model writes after a prompt, piece by piece; or for each prompt of a file a line of JSON."""
    if (prompt is None) == (file is None):
        raise TrainError("one prompt, or a file of them\n  try       --prompt TEXT, or --file PROMPTS.jsonl")
    if out is not None:
        _refuse_out(out, file)
    records = [*generating.prompts(file)] if file is not None else []  # what is wrong with it comes before the model
    given = trained(where, last, devices.choose(device, "--device"))
    decoder = generating.decoder_of(given.module)  # one for all prompts
    tokenizer = given.needs_tokenizer()
    say(given.source)
    ends = generating.ends_of(given.module, tokenizer)

    def written(ids: list[int]) -> Any:
        return generating.pieces(tokenizer, generating.stream(given.module, ids, how, ends, decoder))

    if prompt is not None:
        ids = generating.prompt_ids(tokenizer, prompt, chat)
        if decoder.places is not None and len(ids) < decoder.places < len(ids) + how.tokens:
            room = decoder.places - len(ids)
            say(f"{counted(room, 'token')} at most: the model has {decoder.places} places, the prompt takes {len(ids)}")
        for piece in written(ids):
            write(piece)
        write("\n")
        return
    asked = []
    for record, at in records:  # all of them, before the first response
        ids = (
            generating.message_ids(tokenizer, record["messages"], at)
            if "messages" in record
            else generating.prompt_ids(tokenizer, record["prompt"], chat, at)
        )
        generating.refuse_long(ids, decoder, at)
        asked.append((record, ids))
    with nullcontext() if out is None else out.open("w", encoding="utf-8") as responses:
        for record, ids in asked:
            line = json.dumps({**record, "response": "".join(written(ids))}, ensure_ascii=False) + "\n"
            if responses is None:
                write(line)
            else:
                responses.write(line)
                responses.flush()
    if out is not None:
        say(f"{counted(len(asked), 'response')}: {out}")


def _refuse_out(out: Path, file: Path | None) -> None:
    """What cannot be written to is found before anything is generated."""
    if file is None:
        raise TrainError("--out is for the responses to a file of prompts\n  try       --file PROMPTS.jsonl, or > FILE")
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "it is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise TrainError(f"the responses cannot be written: {what}\n  at        {out}\n  try       another --out")
    if out.resolve() == file.resolve():
        raise TrainError(f"the responses would replace the prompts\n  at        {out}\n  try       another --out")
    try:
        there = out.exists()
        out.open("a").close()
        if not there:
            out.unlink()
    except OSError as e:
        raise TrainError(
            f"the responses cannot be written: {e.strerror}\n  at        {out}\n  try       another --out"
        ) from None


def export_run(run: Path, say: Say, *, last: bool, to: str, out: Path | None) -> Path:
    """A checkpoint of a run, which it is or RUN/checkpoints/step-N, as a model of its own."""
    whole = run if is_run(run) else run_of_checkpoint(run)
    if whole is None:
        raise TrainError(no_run(run))
    if to not in TARGETS:
        near = get_close_matches(to, TARGETS, 1, cutoff=0.5) or ["hf"]
        raise TrainError(f"cannot export to {to!r}\n  known     {', '.join(TARGETS)}\n  try       --to {near[0]}")
    given = trained(run, last)
    say(given.source)
    assert given.config is not None
    of_one = "" if whole == run else f"-{run.name}"
    folder = out or whole / f"exported{of_one}{'' if to == 'hf' else f'-{to}'}"
    adapters = given.config.model.lora
    if to == "hf":
        base = given.config.model.path
        return export(
            given.module,
            folder,
            config=given.model.config,
            tokenizer_folder=given.tokenizer_source,
            merge=adapters is None or adapters.merge,
            source=str(base.resolve()) if base else None,
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainError(f"there is something already\n  at        {folder}\n  try       --out ANOTHER")
    with lora.merged(given.module):
        if to == "onnx":
            size = image_settings(given.config.model.path, given.model.config)["size"]
            return write_onnx(given.module, folder / "model.onnx", say, image_size=size)
        return _weights(given.module, folder) if to == "safetensors" else _program(given, folder)


def _weights(module: nn.Module, folder: Path) -> Path:
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    save_model(module, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def _program(given: TrainedModel, folder: Path) -> Path:
    """The forward pass for one sequence of the run's length, or one image: logits out; weights and buffers are its
    inputs, and lie beside it under the names that these have."""
    from safetensors.torch import save_file

    assert given.config is not None
    module: Any = given.module.eval()
    takes = inspect.signature(module.forward).parameters
    options = {"use_cache": False} if "use_cache" in takes else {}
    logits_of = MethodType(lambda self, **batch: self(**batch, **options).logits, module)  # names are the module's own
    if "input_ids" in takes:
        ids = torch.zeros(1, given.config.data.length, dtype=torch.int64)
        more = {"decoder_input_ids": ids.clone()} if module.config.is_encoder_decoder else {}
        program = capture(logits_of, input_ids=ids, **more)
    else:
        size = image_settings(given.config.model.path, module.config)["size"]
        pixels = torch.zeros(1, 3, size, size)
        program = capture(logits_of, pixel_values=pixels)
    held = dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    inputs = {v.name: held[v.name] for v in program.inputs if program.role(v).kind != "batch"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: x.detach().contiguous() for n, x in inputs.items()}, folder / "model.safetensors")
    program.save(folder / "program.safetensors")
    return folder / "program.safetensors"
