"""The gradient of an iterative solver whose number of turns depends on the data.

    python examples/newton.py

Solves x^3 + a x = b by Newton's method, in a `while` that stops when it has converged, and differentiates the solution
with respect to a and b.
The implicit function theorem gives the same gradient in closed form: dx/da = -x / (3x^2 + a), dx/db = 1 / (3x^2 + a).
"""

from __future__ import annotations

import torch

import mycel


def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The root of x^3 + a x - b."""
    x = b
    while torch.abs(x**3 + a * x - b) > 1e-12:
        x = x - (x**3 + a * x - b) / (3 * x**2 + a)
    return x


def main() -> None:
    gradient = mycel.value_and_grad(solve, (0, 1))
    print(f"{'a':>6}{'b':>8}{'root':>12}{'dx/da':>12}{'exact':>12}{'dx/db':>12}{'exact':>12}")
    for a, b in [(1.0, 0.0), (1.0, 2.0), (0.5, -30.0), (3.0, 1e4)]:
        at = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        x, (da, db) = gradient(*at)
        slope = 3 * x**2 + at[0]
        print(f"{a:6.1f}{b:8.0f}{x:12.6f}{da:12.6f}{-x / slope:12.6f}{db:12.6f}{1 / slope:12.6f}")
    print("\nThe gradient as Python: the same loop, pushing what its body needs, and a second one that pops it\n")
    print(gradient.source(*at))


if __name__ == "__main__":
    main()
