"""What a call costs: jitted small functions against torch eager without gradients, interleaved in one run.

    python bench/dispatch.py

Each row is the median of many interleaved rounds; the ratio is eager / ours (above 1: ours is faster).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from small_gpt import SmallGPT, batch
from torch import nn

import mycel
from mycel.capture import bind


def pointwise(x: torch.Tensor) -> torch.Tensor:
    """Ten pointwise operators."""
    a = x * 2.0
    b = a + x
    c = torch.tanh(b)
    d = c * b
    e = torch.sigmoid(d)
    f = e - x
    g = torch.exp(f)
    h = g * e
    i = torch.relu(h)
    return i + a


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def compare(fns: list[Callable[[], Any]], rounds: int, calls: int) -> list[float]:
    """Median seconds a call of each, rounds interleaved so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in fns]
    for fn in fns:
        for _ in range(calls):
            fn()
    for _ in range(rounds):
        for fn, out in zip(fns, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            out.append((time.perf_counter() - start) / calls)
    return [statistics.median(t) for t in times]


def main() -> None:
    torch.manual_seed(0)
    x16, x8, ids = torch.randn(16), torch.randn(8, 64), batch()
    net, gpt = mlp().eval(), SmallGPT().eval()
    cases: list[tuple[str, Any, tuple[Any, ...], int, int, float]] = [
        ("ten pointwise ops, 16 elements", pointwise, (x16,), 201, 200, 0.8),
        ("3-layer MLP, batch 8", net, (x8,), 201, 200, 1.0),
        ("small GPT, 8 x 128", gpt, (ids,), 31, 1, 1.0),
    ]
    print(f"{'':32}{'eager':>10}{'ours':>10}{'ratio':>8}{'bar':>6}{'overhead':>12}")
    with torch.no_grad():
        for name, fn, args, rounds, calls, bar in cases:
            fast = mycel.jit(fn)
            torch.testing.assert_close(fast(*args), fn(*args))
            entry = fast.entries[-1]
            nothing = (None,) * len(entry.captured.program.main.outputs)
            empty, _ = bind(entry.captured, lambda *inputs, nothing=nothing: nothing)  # guards and call, no work
            eager, ours = compare([lambda: fn(*args), lambda: fast(*args)], rounds, calls)
            (overhead,) = compare([lambda: empty(args, {})], 51, 200)
            print(
                f"{name:32}{eager * 1e6:8.1f}µs{ours * 1e6:8.1f}µs{eager / ours:8.2f}{bar:6.1f}{overhead * 1e6:10.2f}µs"
            )


if __name__ == "__main__":
    main()
