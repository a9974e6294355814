"""How fast a link is now: a few messages of two sizes along an axis, timed by all ranks together.

What `mycel probe` measures at leisure, for one axis and in a second or two: where a plan leaves it to us how gradients
travel, the link of this moment counts.  All ranks get the same numbers, those of the slowest.
"""

from __future__ import annotations

import statistics
import time

import torch

from mycel.run.processes import Processes

SIZES = (1 << 14, 1 << 20)  # bytes
REPEATS = 3


def timed_messages(ranks: Processes, axis: str) -> dict[str, list[tuple[float, float, float]]]:
    """By collective, those that sums of gradients are made of: (ranks, bytes each puts in, seconds)."""
    count = ranks.mesh[axis]
    messages: dict[str, list[tuple[float, float, float]]] = {}
    for name in ("all_reduce", "exchange_chunks", "gather_chunks"):
        for size in SIZES:
            rows = 1 if name == "gather_chunks" else count
            x = torch.zeros(rows, size // rows, dtype=torch.uint8, device=ranks.device)
            x = torch.zeros(size // 4, device=ranks.device) if name == "all_reduce" else x
            messages.setdefault(name, []).append((count, float(x.nbytes), _seconds(ranks, name, x, axis)))
    return messages


def _seconds(ranks: Processes, name: str, x: torch.Tensor, axis: str) -> float:
    taken = []
    for _ in range(REPEATS + 1):  # the first connects
        begun = time.perf_counter()
        ranks.wait(ranks.start(name, [x], axes=(axis,), at="measuring the link"))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        taken.append(time.perf_counter() - begun)
    mine = torch.tensor([statistics.median(taken[1:])], device=ranks.device)
    return float(ranks.all_reduce(mine, ranks.mesh.axes, ">"))
