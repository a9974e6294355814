"""A model that ranks hold in parts, as one folder in Hugging Face form: gathered tensor by tensor, written by rank 0.

    rank 0   gather w1 ── write ── gather w2 ── write …
    others   gather w1 ─────────── gather w2 …

At most one tensor is whole, and one file of them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.train import lora
from mycel.train.assemble import Assembly
from mycel.train.weights import write_gathered

Wholes = dict[str, Callable[[], torch.Tensor]]  # by name in the folder; all ranks call the same ones in the same order


def export(parts: Assembly, write: Callable[..., Path], merge: bool) -> None:
    """All ranks call this; rank 0 runs `write`, which is `export.export`."""
    if lora.adapters(parts.module) and not merge:
        with _whole(parts, [p for p in parts.module.parameters() if p.requires_grad]):
            if parts.team.rank == 0:
                write()
        return
    tensors = _tensors(parts)
    if parts.team.rank:
        for make in tensors.values() if parts.team.tell(None)[0] else ():
            make()
        return
    begun = False

    def weights(folder: Path) -> None:
        nonlocal begun
        begun = parts.team.tell(True)[0]
        write_gathered(folder, tensors, lambda name: tensors[name]())

    try:
        write(write=weights)
    finally:
        if not begun:  # it failed before: the others need not gather
            parts.team.tell(False)


def _tensors(parts: Assembly) -> Wholes:
    """What the folder holds: the module's state, tied tensors once, adapters merged."""
    module: Any = parts.module
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    state = {name: x for name, x in module.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    adapted = lora.adapters(module)
    found: Wholes = {}
    seen: set[int] = set()
    for name in sorted(state, key=lambda name: name in tied):  # of tied names, that which transformers keeps
        x, layer = state[name], next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        if id(x) in seen or (layer and ".lora_" in name[len(layer) :]):
            continue
        seen.add(id(x))
        plain = name if layer is None else name.replace(f"{layer}.frozen.", f"{layer}.")
        if layer is not None and x is adapted[layer].weight:
            found[plain] = lambda layer=layer: _merged(parts, adapted[layer])  # type: ignore[misc]
        else:
            found[plain] = lambda name=name, x=x: parts.whole(name, x)  # type: ignore[misc]
    return dict(sorted(found.items()))


def _merged(parts: Assembly, layer: lora.Adapted) -> torch.Tensor:
    with _whole(parts, list(layer.parameters())):
        return layer.product().detach()


@contextmanager
def _whole(parts: Assembly, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters hold all of themselves."""
    names = {id(p): name for name, p in parts.module.named_parameters()}
    held = [(p, p.data) for p in parameters]
    try:
        for p in parameters:
            p.data = parts.whole(names[id(p)], p)
        yield
    finally:
        for p, part in held:
            p.data = part
