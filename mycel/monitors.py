"""What a step has measured of its gradients (`monitor` of a plan), from the averages that its program keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from mycel.transform import ERROR, LARGE, SMALL

LEAST = 1e-6  # of a square: below it a gradient is all noise
MOST = 8.0  # times the batch that is suggested: what is measured of one batch says little about much larger ones


def monitored(counters: Mapping[str, torch.Tensor], ranks: Collection[int]) -> dict[str, float]:
    """By name: `gradient_variance` of the whole batch, `noise_scale` in batches of this size, and `batch_factor`, how
    many times this batch is suggested (a power of two: from about the noise scale on, twice the batch saves less than
    half of the steps); of each optimiser's group `compression_error`, what is left behind as a share of a rank's
    gradient.  `ranks`: over how many gradients are summed.  Nothing before the first step."""
    of = {k: [float(counters.get(f"{name}_{k}", 0.0)) for name in (SMALL, LARGE)] for k in ranks if k > 1}
    small, large = (sum(squares[i] for squares in of.values()) for i in (0, 1))
    values: dict[str, float] = {}
    if small <= 0:
        return values
    values["gradient_variance"] = variance = sum(max(own - sum_, 0.0) / (k - 1) for k, (own, sum_) in of.items())
    values["noise_scale"] = noise = variance / max(large - variance, LEAST * small)
    values["batch_factor"] = 2.0 ** round(math.log2(min(max(noise, 1 / MOST), MOST)))
    of_ranks = sum(own / k for k, (own, _) in of.items())  # added up
    for name, x in counters.items():
        if name.startswith(f"{ERROR}_"):
            values[f"compression_error_{name.removeprefix(f'{ERROR}_')}"] = (float(x) / of_ranks) ** 0.5
    return values
