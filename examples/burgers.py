"""A physics-informed network for Burgers' equation: second derivatives in the loss, the gradient of that loss, all one
program.

    u_t + u u_x = nu u_xx   on x in [-1, 1], t in [0, 1],   u(0, x) = -sin(pi x),   u(t, -1) = u(t, 1) = 0,   nu = 0.02

    python examples/burgers.py [--steps 1500] [--lbfgs 40]

Trains with Adam, then L-BFGS, and prints the error against the exact solution (Cole-Hopf, by Gauss-Hermite quadrature).
"""

from __future__ import annotations

import argparse
import itertools
import math
import time

import numpy as np
import torch
from torch import nn

import mycel

NU = 0.02


class Net(nn.Module):
    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        sizes = [2] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(width, 1)

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = torch.stack([t, x], dim=-1)
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.out(h)[..., 0]


def residual(net: Net, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """u_t + u u_x - nu u_xx at each point; the points are independent, so the gradient of the sum holds each point's
    derivative."""
    total = lambda t, x: net(t, x).sum()
    u_t, u_x = mycel.grad(total, (0, 1))(t, x)
    u_xx = mycel.grad(lambda x: mycel.grad(total, 1)(t, x).sum())(x)
    return u_t + net(t, x) * u_x - NU * u_xx


def exact(t: np.ndarray, x: np.ndarray, nodes: int = 100) -> np.ndarray:
    """The solution by Cole-Hopf: quotients of integrals against a Gaussian."""
    z, w = np.polynomial.hermite.hermgauss(nodes)
    spread = np.sqrt(4 * NU * np.maximum(t, 1e-12))[..., None] * z
    at = x[..., None] - spread
    weight = w * np.exp(-np.cos(math.pi * at) / (2 * math.pi * NU))
    return -(weight * np.sin(math.pi * at)).sum(-1) / weight.sum(-1)


def error(net: Net) -> float:
    """Relative L2 error on a grid."""
    t, x = np.meshgrid(np.linspace(0, 1, 51), np.linspace(-1, 1, 101), indexing="ij")
    want = exact(t, x)
    with torch.no_grad():
        got = net(torch.tensor(t, dtype=torch.float32), torch.tensor(x, dtype=torch.float32)).numpy()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def train(steps: int = 1500, lbfgs: int = 40, points: int = 1000, seed: int = 0, quiet: bool = False) -> float:
    """The error after training."""
    torch.manual_seed(seed)
    net = Net()
    t, x = torch.rand(points), 2 * torch.rand(points) - 1
    x0 = torch.linspace(-1, 1, 101)
    edge = torch.rand(100)
    left, right = -torch.ones(100), torch.ones(100)

    def loss() -> torch.Tensor:
        start = ((net(torch.zeros_like(x0), x0) + torch.sin(math.pi * x0)) ** 2).mean()
        sides = (net(edge, left) ** 2).mean() + (net(edge, right) ** 2).mean()
        return (residual(net, t, x) ** 2).mean() + start + sides

    step = mycel.value_and_grad(loss, wrt=net)

    def fill() -> torch.Tensor:
        value, grads = step()
        for name, p in net.named_parameters():
            p.grad = grads[name]
        return value

    began = time.perf_counter()
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(steps, 1))
    for i in range(steps):
        value = fill()
        adam.step()
        schedule.step()
        if not quiet and i % 300 == 0:
            print(f"adam {i:5d}   loss {float(value):.2e}   {time.perf_counter() - began:6.1f} s")
    if lbfgs:
        torch.optim.LBFGS(net.parameters(), max_iter=20 * lbfgs, history_size=50, line_search_fn="strong_wolfe").step(
            fill
        )
    final_error = error(net)
    if not quiet:
        print(f"done         loss {float(fill()):.2e}   {time.perf_counter() - began:6.1f} s")
        print(f"relative L2 error against the exact solution: {final_error:.2e}")
    return final_error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lbfgs", type=int, default=40)
    options = parser.parse_args()
    train(options.steps, options.lbfgs)
