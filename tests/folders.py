"""Models as Hugging Face folders, saved and loaded as a user of transformers would, and what it means that two are the
same."""

from __future__ import annotations

import json
from pathlib import Path

import models as zoo
import pytest
import torch
import transformers as hf
from torch import nn

from mycel.errors import TrainError

NAMES = ["llama", "qwen3", "gpt2", "bert", "vit", "t5", "mixtral"]
FOLDERS = [*((name, "4GB") for name in NAMES), *((name, "20KB") for name in ("qwen3", "t5", "mixtral"))]
TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "value"],
    "vit": ["q_proj"],
    "t5": ["q", "wo"],
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 16,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return getattr(zoo, name)().eval()


def saved(folder: Path, name: str = "llama", **options: object) -> nn.Module:
    """A model, saved by transformers."""
    module = make(name)
    module.save_pretrained(folder, **options)
    return module


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and all bits."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def ties(module: nn.Module) -> set[frozenset[str]]:
    """Which names share one parameter."""
    groups: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values()}


def batch(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if name == "vit":
        return zoo.image()
    return {"input_ids": zoo.ids(), **({"labels": zoo.ids()} if name == "t5" else {})}


def logits(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs).logits


def check_message(error: pytest.ExceptionInfo[TrainError], *words: object) -> None:
    """The message says what, where and all of the words."""
    message = str(error.value)
    assert "\n  at        " in message and all(str(word) in message for word in words), message


def load_again(folder: Path) -> nn.Module:
    """As a user of transformers would."""
    kind = getattr(hf, json.loads((folder / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(folder, local_files_only=True)
