"""Training steps in 16 bits on a CPU: ours against torch eager under autocast, taking turns in the same run; the small
GPT of the benchmarks on a short batch, since torch's products of 16 bits are slow where a CPU has none.

python bench/half_step.py [--dtype bfloat16|float16] [--tokens 32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from small_gpt import VOCABULARY, SmallGPT

import mycel

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def eager(low: torch.dtype | None) -> Callable[..., object]:
    """torch's own step; low: products in that dtype."""
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ours(precision: str) -> Callable[..., object]:
    model = SmallGPT()
    return mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision=precision)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=[*PRECISIONS], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    batch = [torch.randint(0, VOCABULARY, (1, args.tokens)) for _ in "xy"]
    ways = {
        "torch eager, autocast": partial(eager, getattr(torch, args.dtype)),
        "mycel": partial(ours, PRECISIONS[args.dtype]),
        "torch eager, fp32": partial(eager, None),
        "mycel, fp32": partial(ours, "fp32"),
    }
    steps, seconds = {}, {name: [] for name in ways}
    for name, make in ways.items():
        torch.manual_seed(0)
        steps[name] = make()
        print(f"{name:24} loss of the first step {float(steps[name](*batch)):.4f}", flush=True)
        steps[name](*batch)
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            seconds[name].append(time.perf_counter() - start)
    reference = statistics.median(seconds["torch eager, autocast"])
    for name, times in seconds.items():
        each = statistics.median(times)
        print(f"{name:24} {each * 1e3:9.1f} ms a step of {args.tokens} tokens  {reference / each:7.2f}x")


if __name__ == "__main__":
    main()
