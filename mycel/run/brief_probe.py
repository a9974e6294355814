"""A glance at this processor, where nobody ran `mycel probe`: a few products, an attention, some memory and a chain of
small operators, in less than half a second, so that what a run prints before its first step is about this machine.

Rounds go over all of them in turn.  Each number is its median, times what the whole look took more than its medians:
what else the machine does now it will do during the run, too.  Nothing is decided by these numbers, which are others
each time: plans rest on presets or on a full probe.  Nothing is drawn at random either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import mycel.ops  # noqa: F401  (what is in OPS)
from mycel.ir import OPS, type_of
from mycel.run.allocator import keep_freed_memory

ROUNDS, LEAST_S = 5, 0.006  # of each, in each round; ten of them
MOST_S, FEWEST = 0.4, 3  # a machine that is busy is not kept longer, once so many rounds are done
MEMORY = [1 << 14, 1 << 18, 1 << 21, 1 << 24, 100 << 20]  # bytes, two read and one written
PRODUCTS = [32, 128, 512]  # square
ATTENTION = (2, 4, 128, 32)  # rows, heads, length, width
KERNELS = 12  # in the chain of small operators


def brief_probe() -> dict[str, Any]:
    """As `probe` has it, of the CPU."""
    keep_freed_memory()  # as a step does
    small = torch.ones(16)
    runs: dict[tuple[str, float], Callable[[], Any]] = {("one", 1.0): lambda: torch.add(small, small)}
    runs["small operators", KERNELS] = small_operators()
    for size in MEMORY:
        x, y = torch.ones(size // 12), torch.ones(size // 12)
        runs["memory", size] = partial(torch.add, x, y)
    for n in PRODUCTS:
        runs["product.fp32", 2.0 * n**3] = partial(F.linear, torch.ones(n, n), torch.ones(n, n))
    runs |= _attention()
    with torch.no_grad():
        seconds = _seconds(runs)
    one_s, launch_s = seconds.pop(("one", 1.0)), seconds.pop(("small operators", KERNELS)) / KERNELS
    rates = dict[str, list[list[float]]]()
    for (kind, work), took in seconds.items():
        rates.setdefault(kind, []).append([work, work / max(took - one_s, 0.1 * took)])
    return {"device": "CPU", "launch_s": launch_s, "rates": rates}


def small_operators() -> Callable[[], Any]:
    """What takes no time but that of being called, on a CPU: KERNELS of a block and their views, one after the other as
    a program calls them.  One of them again and again takes a third of that."""
    x, w, norm = torch.ones(8, 16), torch.ones(16, 16), torch.ones(16)

    def chain() -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = F.linear(x * scale * norm, w)
        heads = y.view(2, 4, 4, 4).transpose(1, 2)
        left, right = heads[..., :2], heads[..., 2:]
        turned = torch.cat((torch.neg(right), left), -1)
        flat = turned.transpose(1, 2).reshape(8, 16)
        return F.silu(flat) + flat.to(torch.float64)

    return chain


def _attention() -> dict[tuple[str, float], Callable[[], Any]]:
    """Forward and backward, by what the operators count."""
    q, k, v = (torch.ones(ATTENTION) for _ in range(3))
    runs: dict[tuple[str, float], Callable[[], Any]] = {}
    attend, gradient = OPS["attention"], OPS["attention_grad"]
    y, lse = attend.kernel(q, k, v, None, causal=True)
    for op, operands in ((attend, (q, k, v, None)), (gradient, (y, q, k, v, None, y, lse))):
        types = [type_of(x) if isinstance(x, torch.Tensor) else x for x in operands]
        kind, flops = op.rate_of(types, {"causal": True}), op.cost(types, {"causal": True}).flops
        runs[f"{kind}.fp32", float(flops)] = partial(op.kernel, *operands, causal=True)
    return runs


def _seconds(runs: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Of one run of each: the median of rounds that go over all, times what others took of the processor meanwhile."""
    often = {}
    for name, run in runs.items():
        run()
        started = time.perf_counter()
        run()
        often[name] = max(1, round(LEAST_S / (time.perf_counter() - started)))
    times: dict[Any, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for n in range(ROUNDS):
        if n >= FEWEST and time.perf_counter() - began > MOST_S:
            break
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(often[name]):
                run()
            times[name].append((time.perf_counter() - started) / often[name])
    medians = {name: statistics.median(each) for name, each in times.items()}
    alone_s = sum(often[name] * len(times[name]) * middle for name, middle in medians.items())
    busy = sum(often[name] * sum(each) for name, each in times.items()) / alone_s
    return {name: busy * middle for name, middle in medians.items()}
