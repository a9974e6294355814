"""Value and gradient: ours against torch.autograd, interleaved in one run on the CPU; JAX and MindSpore where their
Python is given.

    python bench/grad.py [--jax PYTHON] [--mindspore PYTHON]

The ratio is theirs / ours (above 1: ours is faster).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from dispatch import compare
from small_gpt import VOCABULARY, SmallGPT, batch
from torch import nn

import mycel

TURNS = 200


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def relax(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A data-dependent loop with a small body: about 200 turns until the state is close to its target."""
    turns = 0
    while (x - target).abs().max() > 1e-3:
        x = x + 0.034 * torch.tanh(target - x)
        turns = turns + 1
    return (x * x).sum()


def cases() -> list[tuple[str, Any, Any, int, int, float]]:
    """(name, theirs, ours, rounds, calls, bar)"""
    rows = []
    for size in (8, 512):
        net, x, y = mlp(), torch.randn(size, 64), torch.randint(0, 10, (size,))
        loss = lambda net=net, x=x, y=y: nn.functional.cross_entropy(net(x), y)
        rows.append((f"3-layer MLP, batch {size}", *pair(net, loss), 101, 30, 1.5 if size == 8 else 1.0))
    gpt, ids, targets = SmallGPT(), batch(), torch.randint(0, VOCABULARY, (8, 128))
    rows.append(("small GPT, 8 x 128", *pair(gpt, lambda: gpt(ids, targets)), 15, 1, 1.0))
    x, target = torch.zeros(2, 2), torch.tensor([[1.0, 0.5], [-0.3, 0.9]])

    def theirs() -> Any:
        leaf = x.clone().requires_grad_()
        value = relax(leaf, target)
        return value, torch.autograd.grad(value, leaf)[0]

    fast = mycel.value_and_grad(relax)
    rows.append((f"while, about {TURNS} turns", theirs, lambda: fast(x, target), 31, 1, 1.5))
    return rows


def pair(module: nn.Module, loss: Any) -> tuple[Any, Any]:
    parameters = list(module.parameters())

    def theirs() -> Any:
        value = loss()
        return value, torch.autograd.grad(value, parameters)

    return theirs, mycel.value_and_grad(loss, wrt=module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jax", help="a Python that has jax")
    parser.add_argument("--mindspore", help="a Python that has mindspore")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'':28}{'autograd':>12}{'ours':>12}{'ratio':>8}{'bar':>6}")
    ours_s: dict[str, float] = {}
    for name, theirs, ours, rounds, calls, bar in cases():
        a, b = theirs(), ours()
        torch.testing.assert_close(a[0], b[0])
        t, m = compare([theirs, ours], rounds, calls)
        ours_s[name] = m
        print(f"{name:28}{t * 1e6:10.1f}µs{m * 1e6:10.1f}µs{t / m:8.2f}{bar:6.1f}")
    for peer in ("jax", "mindspore"):
        if python := getattr(options, peer):
            report(peer, python, ours_s)


def report(peer: str, python: str, ours_s: dict[str, float]) -> None:
    """The same cases in a peer's own environment."""
    script = Path(__file__).parent / f"grad_{peer}.py"
    ran = subprocess.run([python, str(script)], capture_output=True, text=True, check=False)
    if ran.returncode:
        print(
            f"{peer} did not run: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else 'no message'}",
            file=sys.stderr,
        )
        return
    for name, seconds in json.loads(ran.stdout.splitlines()[-1]).items():
        print(f"{name:28}{peer:>10} {seconds * 1e6:10.1f}µs   {seconds / ours_s[name]:.2f}x ours")


if __name__ == "__main__":
    main()
