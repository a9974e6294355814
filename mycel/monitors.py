"""What a step has measured of its gradients (`monitor` of a plan), from the averages that its program keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mycel.transform import ERROR, LARGE, SMALL

LEAST = 1e-6  # of a square: below it a gradient is all noise


def monitored(counters: Mapping[str, torch.Tensor], ranks: int) -> dict[str, float]:
    """By name: `gradient_variance` of the whole batch, `noise_scale` in batches of this size, and of each optimiser's
    group `compression_error`, what is left behind as a share of a rank's gradient; nothing before the first step."""
    small, large = (float(counters.get(name, 0.0)) for name in (SMALL, LARGE))
    values: dict[str, float] = {}
    if small > 0 and ranks > 1:
        variance = max(small - large, 0.0) / (ranks - 1)
        values["gradient_variance"] = variance
        values["noise_scale"] = variance / max(large - variance, LEAST * small)
    for name, x in counters.items():
        if name.startswith(f"{ERROR}_") and small > 0:
            values[f"compression_error_{name.removeprefix(f'{ERROR}_')}"] = (ranks * float(x) / small) ** 0.5
    return values
