"""What one more result of a captured function says of its layers of experts: who gets the tokens, and whose router
gives what is no number."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mycel import transform
from mycel.capture import LEAF, Captured, Tree
from mycel.errors import RunError, TrainError
from mycel.transform import RoutedLayer


@dataclass(frozen=True)
class SeenLayer:
    """A layer of experts of captured code: its name as in the state dict, its experts, and the choices of a batch."""

    name: str
    experts: int
    choices: int


class SeenRouting:
    """The layers of experts that a function was captured with, and what one tensor says of their routing: for each
    layer how many choices each expert got, and how many of the router's weights are not finite."""

    def __init__(self) -> None:
        self.layers: tuple[SeenLayer, ...] = ()

    def added(self, captured: Captured, alone: bool = False) -> Captured:
        """A function that also returns that tensor, or it `alone`; where it has no such layer, it is as it was."""
        at = len(list(captured.out.paths("")))
        program, layers = transform.with_routing(captured.program, at)
        self.layers = tuple(_named(layers))
        if not layers:
            return captured
        if not alone:
            return replace(captured, program=program, out=Tree("tuple", None, (captured.out, LEAF)))
        outputs = program.main.outputs
        main = replace(program.main, outputs=(outputs[at], *outputs[len(program.results) :]))
        program = replace(program, blocks={**program.blocks, program.entry: main})
        return replace(captured, program=program, out=LEAF, effects=())

    def by_layer(self, routed: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each expert got, by layer."""
        sizes = [layer.experts + 1 for layer in self.layers]
        return {s.name: part[:-1] for s, part in zip(self.layers, routed.split(sizes), strict=True)}

    def broken(self, routed: torch.Tensor) -> str:
        """Which layer's router gives weights that are no numbers; empty: none does."""
        for layer, part in zip(self.layers, routed.split([s.experts + 1 for s in self.layers]), strict=True):
            if bad := int(part[-1]):
                return f"the router of {layer.name} gives weights that are not finite: {bad} of {layer.choices}"
        return ""

    def check(self, routed: torch.Tensor) -> None:
        """RunError where the router of a layer gives what is no number."""
        if what := self.broken(routed):
            raise RunError(f"{what}\n  try       a smaller learning rate, clip_norm, or a router in fp32")


def _named(layers: Sequence[RoutedLayer]) -> Iterator[SeenLayer]:
    """Layers with names of their own, also where one runs twice: the module that holds all tensors of the experts."""
    again: Counter[str] = Counter()
    for layer in layers:
        paths = [name.split(".")[:-1] for name in layer.tensors]
        shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        name = ".".join(parts[0] for parts in shared) or "the model"
        again[name] += 1
        yield SeenLayer(f"{name} ({again[name]})" if again[name] > 1 else name, layer.experts, layer.choices)


def refuse_no_layers() -> TrainError:
    return TrainError("the model has no layer of experts\n  try       mycel.experts, or a model of transformers")
