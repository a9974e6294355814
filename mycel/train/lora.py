"""Low-rank adapters: train a small product beside frozen weights.

    y = W x + b   →   y = W x + b + s · B A x        A: [rank, in], B: [out, rank], s = alpha / rank

`add` puts adapters beside chosen linear layers and freezes all else; B starts at zero, so the model is unchanged at
first.  `merge` adds s · B A to W and leaves plain layers; `merged` does so for a while.  Files have PEFT's form and
names.  Adapters of half-precision layers are kept and multiplied in float32: their updates are too small for eight bits
of mantissa.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.train.weights import refusal, some

# by how an architecture's name ends, PEFT's word for its task; others have none
TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


class Adapted(nn.Module):
    """A frozen linear layer and the low-rank product trained beside it."""

    def __init__(self, layer: nn.Module, rank: int, alpha: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        # transformers' Conv1D is a linear layer whose weight lies the other way round
        # the layer's own numbers: of the weight this rank may hold a part
        known: Any = layer
        self.outs, self.ins = (known.nf, known.nx) if transposed(layer) else (known.out_features, known.in_features)
        self.frozen, self.rank, self.alpha = layer, rank, alpha
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        self.dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(self.ins, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, self.outs, bias=False, device="meta")
        # drawn on the CPU: the same numbers on every device
        start = nn.init.kaiming_uniform_(torch.empty(rank, self.ins), a=math.sqrt(5), generator=generator)
        self.lora_A.weight = nn.Parameter(start.to(weight.device, dtype))
        self.lora_B.weight = nn.Parameter(torch.zeros(self.outs, rank, device=weight.device, dtype=dtype))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight(self) -> Any:
        """The frozen weight: some models look at their layers' dtype through it."""
        return self.frozen.weight

    @property
    def bias(self) -> Any:
        return self.frozen.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x)
        low = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype))))
        return y + (self.scale * low).to(y.dtype)

    def product(self) -> torch.Tensor:
        """W + s · B A, rounded once, to W's dtype."""
        change = self.scale * (self.lora_B.weight.float() @ self.lora_A.weight.float())
        weight = self.frozen.weight
        assert isinstance(weight, nn.Parameter)
        return (weight.float() + (change.T if transposed(self.frozen) else change)).to(weight.dtype)


def transposed(layer: nn.Module) -> bool:
    """transformers' Conv1D (GPT-2): y = x @ weight + bias."""
    return type(layer).__name__ == "Conv1D"


def adaptable(layer: nn.Module) -> bool:
    """Layers whose forward is theirs alone: subclasses of Linear may be read past their forward
    (nn.MultiheadAttention)."""
    return type(layer) is nn.Linear or transposed(layer)


def adapters(module: nn.Module) -> dict[str, Adapted]:
    """The adapted layers by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Adapted)}


def add(
    module: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[str], *, seed: int = 0
) -> list[str]:
    """Adapters beside every linear layer a target names (by the end of its name, or a regular expression for all of
    it); the rest freezes."""
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        what = (
            f"LoRA with rank {rank}, alpha {alpha}, dropout {dropout}: rank and alpha must be positive, dropout in "
            "[0, 1)"
        )
        raise refusal(what, "model.lora", "rank: 8, alpha: 16, dropout: 0.0")
    if adapters(module):
        raise refusal(
            f"the model has LoRA adapters already: {some(list(adapters(module)))}", "model.lora", "merge them first"
        )
    names = sorted(
        {name for target in targets for name in _matches(module, target)}, key=list(dict(module.named_modules())).index
    )
    if not names:
        raise refusal("LoRA without targets", "model.lora.targets", _linear_names(module))
    _refuse_shared(module, names)
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        module.set_submodule(
            name, Adapted(module.get_submodule(name), rank, alpha, dropout, generator).train(module.training)
        )
    return names


def merge(module: nn.Module) -> None:
    """Adapted layers → plain ones with the product in their weights; these stay frozen."""
    for name, layer in adapters(module).items():
        layer.frozen.weight.data = layer.product().detach()
        module.set_submodule(name, layer.frozen)


@contextlib.contextmanager
def merged(module: nn.Module) -> Iterator[None]:
    """Inside, the module is as `merge` leaves it; after, as it was, bit for bit."""
    kept = [(name, layer, layer.frozen.weight.data) for name, layer in adapters(module).items()]
    try:
        merge(module)
        yield
    finally:
        for name, layer, weight in kept:
            layer.frozen.weight.data = weight
            module.set_submodule(name, layer)


def adapter_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters' tensors under the names PEFT gives them."""
    state = {}
    for name, layer in adapters(module).items():
        state[f"base_model.model.{name}.lora_A.weight"] = layer.lora_A.weight.detach()
        state[f"base_model.model.{name}.lora_B.weight"] = layer.lora_B.weight.detach()
    return state


def write_adapter(module: nn.Module, folder: Path, source: str | None) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT reads them; `source` is the model they belong to."""
    from safetensors.torch import save_file

    layers = adapters(module)
    first = next(iter(layers.values()))
    architecture = type(module).__name__
    config = {
        "peft_type": "LORA",
        "task_type": next((task for end, task in TASKS.items() if architecture.endswith(end)), None),
        "base_model_name_or_path": source,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        "target_modules": list(layers),
        "fan_in_fan_out": any(transposed(layer.frozen) for layer in layers.values()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {name: tensor.contiguous() for name, tensor in adapter_state(module).items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# -- what a target means


def _matches(module: nn.Module, target: str) -> list[str]:
    """Names of the linear layers a target names; an error when there are none."""
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise refusal(f"LoRA target {target!r} is not a regular expression: {error}", "model.lora.targets") from None
    named = {n: m for n, m in module.named_modules() if n and (f".{n}".endswith(f".{target}") or pattern.fullmatch(n))}
    names = [name for name, layer in named.items() if adaptable(layer)]
    if not names:
        what = f"names no layer of {type(module).__name__}"
        if named:
            name, layer = next(iter(named.items()))
            what = f"names no linear layer: {name} is {type(layer).__name__}"
        raise refusal(f"LoRA target {target!r} {what}", "model.lora.targets", _linear_names(module))
    return names


def _refuse_shared(module: nn.Module, names: list[str]) -> None:
    """A weight that another layer uses too cannot take a product of its own."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in names:
        users = owners[id(module.get_submodule(name).weight)]
        if len(users) > 1:
            other = next(user for user in users if user != f"{name}.weight")
            what = (
                f"LoRA target {name} shares its weight with {other.removesuffix('.weight')}: merged, it would "
                "change both"
            )
            raise refusal(what, "model.lora.targets", "leave it out, or a model with tie_word_embeddings: false")


def _linear_names(module: nn.Module) -> str:
    """q_proj (4), lm_head: what a target could say, by the last part of the name."""
    ends = Counter(name.rpartition(".")[2] for name, layer in module.named_modules() if adaptable(layer))
    return (
        ", ".join(f"{end} ({count})" if count > 1 else end for end, count in ends.most_common(20))
        or "a model with linear layers"
    )
