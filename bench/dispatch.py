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


def compare(
    fns: list[Callable[[], Any]], rounds: int, calls: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds a call of each, rounds interleaved so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in fns]
    for fn in fns:
        for _ in range(calls):
            fn()
    for _ in range(rounds):
        for fn, out in zip(fns, times, strict=True):
            start = clock()
            for _ in range(calls):
                fn()
            out.append((clock() - start) / calls)
    return [statistics.median(t) for t in times]


def deep_llama() -> nn.Module:
    """32 layers, so small that what is left is looking at 423 modules and 292 tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=32, vocab_size=32, use_cache=False))


def overhead_of(fast: Any, args: tuple[Any, ...], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of guards and call, without the work."""
    captured = fast.entries[-1].captured
    nothing = (None,) * len(captured.program.main.outputs)
    empty, _ = bind(captured, lambda *inputs: nothing)
    return compare([lambda: empty(args, {})], 51, 200, clock)[0]


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
            eager, ours = compare([lambda: fn(*args), lambda: fast(*args)], rounds, calls)
            overhead = overhead_of(fast, args)
            print(
                f"{name:32}{eager * 1e6:8.1f}µs{ours * 1e6:8.1f}µs{eager / ours:8.2f}{bar:6.1f}{overhead * 1e6:10.2f}µs"
            )
        fast, ids = mycel.jit(deep_llama().eval()), torch.zeros(1, 8, dtype=torch.int64)
        fast(ids)
        (yardstick,) = compare([lambda: None], 51, 2000)
        wall, cpu = (overhead_of(fast, (ids,), clock) * 1e6 for clock in (time.perf_counter, time.process_time))
        print(f"32-layer Llama, guards alone (bar 50 µs): {wall:.2f} µs, of which this process computed {cpu:.2f} µs")
        print(f"a call of nothing: {yardstick * 1e6:.3f} µs")


if __name__ == "__main__":
    main()
