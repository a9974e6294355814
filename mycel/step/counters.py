"""Numbers that a step keeps on its device: how many steps were skipped, the loss scale of fp16, averages."""

from __future__ import annotations

import torch

from mycel import transform

SCALE = 65536.0  # the first loss scale of fp16, torch.amp.GradScaler's


class Counters(dict[str, torch.Tensor]):
    """By name; each is made when it is first asked for."""

    def on(self, device: torch.device, name: str) -> torch.Tensor:
        if name not in self:
            first = {"loss_scale": torch.tensor(SCALE), "good_steps": torch.tensor(0, dtype=torch.int32)}
            is_average = name.startswith((transform.SMALL, transform.LARGE, transform.ERROR))
            self[name] = first.get(name, torch.tensor(0.0 if is_average else 0)).to(device)
        return self[name]

    def used(self, name: str) -> bool:
        """Did the last step use the parameters of a group?  `name`: what counts that; "" where it is no question."""
        return not name or bool(self[name])

    @property
    def skipped(self) -> int:
        """Steps whose gradients were not finite."""
        return int(self["skipped"]) if "skipped" in self else 0
