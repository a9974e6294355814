"""A rank that moves tensors from one mesh to another, by real messages, and compares its part with a slice of the
whole."""

from __future__ import annotations

import random

import torch
from test_layouts import random_layout

from mycel.ir import Mesh, type_of
from mycel.plan.across import Placed, transfers
from mycel.run.processes import world
from mycel.run.simulate import part_of


def main() -> None:
    rng = random.Random(0)
    with world(Mesh(w=3), device="cpu") as ranks:
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
            for _ in range(6):
                x = (torch.arange(5 * 6).reshape(5, 6) % 7).to(dtype)
                first, second = (
                    Placed(random_layout(2, m, rng, partial=False), m, r)
                    for m, r in ((Mesh(a=2), (0, 2)), (Mesh(a=3), (0, 1, 2)))
                )
                first, second = (second, first) if rng.random() < 0.5 else (first, second)
                mine = (
                    part_of(x, first.layout, first.mesh, first.ranks.index(ranks.rank))
                    if ranks.rank in first.ranks
                    else x.new_empty(0)
                )
                want = (
                    part_of(x, second.layout, second.mesh, second.ranks.index(ranks.rank))
                    if ranks.rank in second.ranks
                    else x.new_empty(0)
                )
                got = ranks.exchange(mine, transfers(type_of(x), first, second), want.shape)
                assert torch.equal(got, want), (ranks.rank, first, second, got, want)
    print("moved")


if __name__ == "__main__":
    main()
