"""How fast a link is now: a few messages of two sizes along an axis, timed by all ranks together; and the codecs that
messages may be encoded by.

What `mycel probe` measures at leisure, for one axis and in a second or two: where a plan leaves it to us how gradients
travel, the link of this moment counts.  All ranks get the same numbers, those of the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mycel.ir import Op, type_of
from mycel.ops import o
from mycel.run.processes import Processes

SUMS = ("all_reduce", "exchange_chunks", "gather_chunks")  # what sums of gradients are made of
SIZES = (1 << 14, 1 << 20)  # bytes
CODED = (1 << 14, 1 << 18)  # elements of a gradient
REPEATS = 3
GLANCE = 1 << 17  # bytes of the message by which a link is watched
SLOW = 0.8  # of the speed that a plan was priced by


def timed_messages(ranks: Processes, axis: str) -> dict[str, list[tuple[float, float, float]]]:
    """By collective of SUMS: (ranks, bytes each puts in, seconds).  Where sub-models are on meshes of their own, those
    of all: each measures its own at the same time, if it has several ranks there."""
    count, device = ranks.mesh[axis], ranks.device
    rows = []
    for name in SUMS:
        for size in SIZES:
            parts = 1 if name == "gather_chunks" else count
            x = torch.zeros(parts, size // parts, dtype=torch.uint8, device=device)
            x = torch.zeros(size // 4, device=device) if name == "all_reduce" else x
            rows.append([float(count), float(x.nbytes), _seconds(ranks, name, x, axis) if count > 1 else 0.0])
    everyone = ranks.world
    gathered = everyone.all_gather(torch.tensor([rows], dtype=torch.float64, device=device), everyone.mesh.axes, 0)
    slowest: dict[tuple[str, float, float], float] = {}
    for own in gathered.tolist():
        for name, (k, sent_bytes, seconds) in zip((name for name in SUMS for _ in SIZES), own, strict=True):
            if k > 1:
                slowest[name, k, sent_bytes] = max(seconds, slowest.get((name, k, sent_bytes), 0.0))
    return {name: [(k, size, s) for (of, k, size), s in slowest.items() if of == name] for name in SUMS}


def timed_codecs(ranks: Processes, codecs: Sequence[str]) -> dict[str, tuple[tuple[float, float], ...]]:
    """By kind of work (`Op.rate_of`), how many elements the kernels of codecs make, and how many of them a second: on
    all ranks at once, as in a step, in which those of a host may share its cores."""
    runs = [run for codec in codecs for n in CODED for run in _codec_runs(codec, n, ranks.device)]
    everyone, medians = ranks.world, []
    for op, inputs, params in runs:
        everyone.all_reduce(torch.zeros(1, device=ranks.device), everyone.mesh.axes)  # all begin now
        seconds = [_timed(op, inputs, params) for _ in range(REPEATS + 1)]
        medians.append(statistics.median(seconds[1:]))
    slowest = everyone.all_reduce(torch.tensor(medians, device=ranks.device), everyone.mesh.axes, ">").tolist()
    curves: dict[str, list[tuple[float, float]]] = {}
    for (op, inputs, params), seconds in zip(runs, slowest, strict=True):
        types = [type_of(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        work = op.cost(types, params).flops
        curves.setdefault(f"{op.rate_of(types, params)}.fp32", []).append((work, work / seconds))
    return {kind: tuple(curve) for kind, curve in curves.items()}


def _codec_runs(codec: str, n: int, device: torch.device) -> list[tuple[Op, list[Any], dict[str, Any]]]:
    """What a step does with a gradient of n elements."""
    x, e = torch.randn(n, device=device), torch.zeros(n, device=device)
    how: dict[str, Any] = {"codec": codec, "rows": 1, "row": n}
    code, read = o.encode(x, None, **how), {"codec": codec, "row": n, "shape": (n,)}
    return [
        (o.encode, [x, None], how),
        (o.encode_residual, [x, e, None], how),
        (o.decode, [code, None], read),
        (o.decode_sum, [torch.cat([code, code]), None], read),
    ]


def _timed(op: Op, inputs: Sequence[Any], params: Mapping[str, Any]) -> float:
    begun = time.perf_counter()
    result = op(*inputs, **params)
    first = result[0] if isinstance(result, tuple) else result
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    return time.perf_counter() - begun


def _seconds(ranks: Processes, name: str, x: torch.Tensor, axis: str) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first connects
        begun = time.perf_counter()
        ranks.wait(ranks.start(name, [x], axes=(axis,), at="measuring the link"))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def own_seconds(ranks: Processes, axis: str) -> float:
    """Of a small message along an axis, as this rank sees it; nothing where it is the only one there."""
    if ranks.mesh[axis] == 1:
        return 0.0
    x, times = torch.zeros(GLANCE // 4, device=ranks.device), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        ranks.wait(ranks.start("all_reduce", [x], axes=(axis,), at="measuring the link"))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


class LinkWatch:
    """Is the link of an axis as fast as when a plan was priced by it?  Ranks ask at the same step, and agree."""

    def __init__(self, ranks: Processes, axis: str) -> None:
        self.ranks, self.axis = ranks, axis
        self.reference_s = own_seconds(ranks, axis)

    def is_slow(self) -> bool:
        """Do most ranks see less than SLOW of its speed?"""
        is_slower = own_seconds(self.ranks, self.axis) * SLOW > self.reference_s
        votes = torch.tensor([float(is_slower)], device=self.ranks.device)
        everyone = self.ranks.world
        return 2 * float(everyone.all_reduce(votes, everyone.mesh.axes)) > everyone.mesh.world
