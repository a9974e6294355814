"""A plan of one's own: which parameters are split over which axis, and what the rest comes to.

    torchrun --nproc-per-node 2 examples/custom_plan.py

Only the matrices are said; biases, activations and what is sent are solved for, and `step.explain()` shows them.
"""

from __future__ import annotations

import os

import torch

import mycel

PLAN = {
    "mesh": {"tp": 2},
    "parameters": {  # one entry a dim: a matrix of Linear is [out, in]
        "up.weight": ["tp", "-"],  # each rank computes half of the hidden values
        "down.weight": ["-", "tp"],  # and their share of the result: a partial sum
    },
}


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x, target):
        hidden = torch.relu(self.up(x))
        return torch.nn.functional.mse_loss(self.down(hidden), target)


def main() -> None:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mycel.train_step(model, optimizer, plan=PLAN)
    x = torch.randn(64, 32)
    for _ in range(40):
        loss = step(x, x)
    if os.environ.get("RANK") == "0":
        print(step.explain())
        print(f"this rank's part of up.weight: {tuple(model.up.weight.shape)} of (128, 32)")
        print(f"loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
