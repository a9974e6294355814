"""An operator with a gradient of its own: weights rounded to three values, trained through the rounding.

    python examples/custom_operator.py

Rounding has no slope; the straight-through estimator pretends that it is the identity.  Written with `custom_vjp` it is
one equation of the program, with its own backward, in Mycel and under torch's autograd alike.
"""

from __future__ import annotations

import torch

import mycel


@mycel.custom_vjp
def ternary(w):
    """w => -s, 0 or s, whichever is nearest; s is the mean size."""
    scale = w.abs().mean()
    return torch.clamp(torch.round(w / scale), -1, 1) * scale


@ternary.backward
def _(g, y, w):
    return g


class TernaryLinear(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, ternary(self.weight), self.bias)


def main(steps: int = 150) -> tuple[float, float]:
    """The loss before and after training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(TernaryLinear(8, 64), torch.nn.Tanh(), TernaryLinear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mycel.train_step(model, optimizer, loss=torch.nn.functional.mse_loss)
    x = torch.randn(256, 8)
    y = (x[:, :1] - x[:, 1:2]).sin()
    first = float(step(x, y))
    for _ in range(steps):
        loss = step(x, y)
    print(f"loss {first:.3f} => {float(loss):.3f}, with weights of {len(ternary(model[0].weight).unique())} values")
    return first, float(loss)


if __name__ == "__main__":
    main()
