"""Models out: a module becomes a Hugging Face folder again, with its configuration and its tokenizer.

    folder  ◀──rename──  .folder.partial  ◀──write──  module, adapters merged or alone

What comes out, `transformers` loads back bit for bit; a folder is replaced only by a complete one.
"""

from __future__ import annotations

import copy
import errno
import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mycel.sizes import shown
from mycel.train import lora
from mycel.train.cache import sync
from mycel.train.models import ADAPTER, count
from mycel.train.tasks import image_settings
from mycel.train.tokenize import SETTINGS, VOCABULARIES, Bytes
from mycel.train.weights import ONE, one_line, quietly, refusal

IMAGE_SETTINGS = "preprocessor_config.json"
PROCESSORS = (IMAGE_SETTINGS, "processor_config.json")


def export(
    module: nn.Module,
    folder: Path,
    *,
    config: Any,
    tokenizer_folder: Path | Literal["bytes"] | None = None,
    max_shard: str = "4GB",
    merge: bool = True,
    source: str | None = None,
    write: Callable[[Path], None] | None = None,
) -> Path:
    """A folder that transformers loads back bitwise; adapters merged into it, or alone in PEFT's form with `source` as
    their model.

    `write` puts the weights into the folder, where the module does not hold them whole."""
    if folder.exists() and not (
        folder.is_dir() and (not any(folder.iterdir()) or any((folder / n).is_file() for n in ("config.json", ADAPTER)))
    ):
        raise refusal(f"{folder} is there and is no model folder: it would be replaced", "export", "another folder")
    given, folder = folder, folder.resolve()
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    try:
        # what an export that was killed left: half a model, or the old one without its name
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        partial.mkdir(parents=True)
        if lora.adapters(module) and not merge:
            lora.write_adapter(module, partial, source)
        elif write is not None:
            with quietly():
                _save(module, partial, config, max_shard, {})
            (partial / ONE).unlink(missing_ok=True)
            write(partial)
        else:
            with quietly(), lora.merged(module):
                _save(module, partial, config, max_shard)
        _write_tokenizer(tokenizer_folder, partial, config)
        if (partial / "config.json").is_file():
            _write_image_settings(module, partial, config, source)
        _replace(folder, partial, old)
    except Exception as error:
        from safetensors import SafetensorError

        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        kept = "; the folder that was there is unchanged" if folder.exists() else ""
        what = f"the model cannot be written: {_cause(error, module, folder.parent)}{kept}"
        raise refusal(what, folder, "free space there, or another folder") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return given


def _save(module: Any, folder: Path, config: Any, max_shard: str, state: dict[str, torch.Tensor] | None = None) -> None:
    """transformers' saving, under the configuration the model was built with; of its own weights, or of others."""
    import transformers

    kept = module.config, getattr(module, "generation_config", None)
    try:
        module.config = copy.deepcopy(config)
        if kept[1] is not None:
            try:
                kept[1].validate(strict=True)
            except ValueError:  # transformers loads such a one but does not save it
                module.generation_config = transformers.GenerationConfig.from_model_config(config)
        module.save_pretrained(folder, max_shard_size=max_shard, state_dict=state)
    finally:
        module.config = kept[0]
        if kept[1] is not None:
            module.generation_config = kept[1]


def _write_tokenizer(tokenizer: Path | Literal["bytes"] | None, folder: Path, config: Any) -> None:
    """The files of a tokenizer folder; or, for bytes, a tokenizer whose ids are the bytes of the text."""
    if tokenizer == "bytes":
        return byte_tokenizer(folder, getattr(config.get_text_config(), "max_position_embeddings", None))
    for name in (*VOCABULARIES, *SETTINGS, *PROCESSORS) if tokenizer is not None else ():
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _write_image_settings(module: nn.Module, folder: Path, config: Any, source: str | None) -> None:
    """How a model of images takes pixels: as the folder it is from says, else as it has learnt from them."""
    file, given = folder / IMAGE_SETTINGS, Path(source) / IMAGE_SETTINGS if source else None
    takes = inspect.signature(module.forward).parameters
    if file.is_file() or "pixel_values" not in takes or "input_ids" in takes:
        return
    if given is not None and given.is_file():
        shutil.copyfile(given, file)
        return
    learnt = image_settings(None, config)
    settings = {
        "do_convert_rgb": True, "do_resize": True, "size": {"height": learnt["size"], "width": learnt["size"]},
        "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": learnt["mean"], "image_std": learnt["deviation"],
    }  # fmt: skip  # 2: pillow's bilinear
    file.write_text(json.dumps(settings, indent=2) + "\n")


def byte_tokenizer(folder: Path, length: int | None = None) -> None:
    """tokenizer.json and tokenizer_config.json for `tokenize.Bytes`: encode(text) is the list of its UTF-8 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # the letters that stand for bytes in GPT-2's vocabulary: printable Latin-1 for itself, the rest from U+0100 on
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    letters = {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}
    marks = {"<|bos|>": Bytes.bos, "<|eos|>": Bytes.eos}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, **marks}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", split_special_tokens=True,
        clean_up_tokenization_spaces=False, model_max_length=length,
    ).save_pretrained(folder)  # fmt: skip


def _replace(folder: Path, complete: Path, old: Path) -> None:
    """`complete`, safely on disk, takes the folder's name; what had it goes, by way of `old`."""
    for file in (*complete.rglob("*"), complete):
        sync(file)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        complete.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _cause(error: Exception, module: nn.Module, where: Path) -> str:
    """Why a write failed, with both sizes when the disk is full."""
    full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    if not full:
        return one_line(error)
    needed, free = count(module).total_bytes, shutil.disk_usage(where).free
    return f"disk full: it needs {shown(needed)}, {shown(free)} are free"
