"""Several ranks on one machine, in a loop of one's own: each reads its rows of a batch, and no others.

    torchrun --nproc-per-node 2 examples/ranks.py
    torchrun --nproc-per-node 4 examples/ranks.py --plan zero3

The losses are those of one process, whatever the plan and the number of ranks.
"""

from __future__ import annotations

import argparse
import os

import torch

import mycel

ROWS = 64


def read(rows: range, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """These rows of a step's batch: here drawn by their number, elsewhere read from a file."""
    draws = [torch.randn(16, generator=torch.Generator().manual_seed(step * ROWS + row)) for row in rows]
    x = torch.stack(draws)
    return x, x[:, :4].sum(1, keepdim=True)


def main(plan: str) -> None:
    torch.manual_seed(0)  # the same model on all ranks
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spread = {"mesh": mycel.Mesh(dp=ranks), "plan": plan} if ranks > 1 else {}
    step = mycel.train_step(model, optimizer, loss=torch.nn.functional.mse_loss, **spread)
    take = step.local(torch.empty(ROWS, 16, device="meta"), torch.empty(ROWS, 1, device="meta"))
    for i in range(40):
        loss = take(*read(step.rows(ROWS), i))
        if rank == "0" and i % 10 == 0:
            print(f"step {i:2d}   loss {float(loss):.4f}")
    with step.whole() as whole:  # all ranks come here
        size = sum(p.numel() for p in whole.parameters())
    if rank == "0":
        print(f"loss {float(loss):.4f} with {size} parameters on {ranks} rank(s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="zero1")
    main(parser.parse_args().plan)
