"""Numbers that a step keeps on its device: how many steps were skipped, the loss scale of fp16, averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mycel import transform
from mycel.optimizers import Bound

SCALE = 65536.0  # the first loss scale of fp16, torch.amp.GradScaler's


class Counters(dict[str, torch.Tensor]):
    """By name; each is made when it is first asked for."""

    def on(self, device: torch.device, name: str, shape: Sequence[int] = ()) -> torch.Tensor:
        if name not in self or self[name].shape != torch.Size(shape):
            first = {"loss_scale": torch.tensor(SCALE), "good_steps": torch.tensor(0, dtype=torch.int32)}
            is_average = name.startswith((transform.SMALL, transform.LARGE, transform.ERROR))
            self[name] = first.get(name, torch.full(tuple(shape), 0.0 if is_average else 0)).to(device)
        return self[name]

    def unused(self, groups: Iterable[Bound]) -> list[Bound]:
        """The groups whose parameters the last step did not use."""
        groups = [g for g in groups if g.group.counter]
        uses = {name: self[name].tolist() for name in dict.fromkeys(g.group.counter for g in groups)}
        number = lambda g: uses[g.group.counter] if g.group.number is None else uses[g.group.counter][g.group.number]
        return [g for g in groups if not number(g)]

    @property
    def skipped(self) -> int:
        """Steps whose gradients were not finite."""
        return int(self["skipped"]) if "skipped" in self else 0
