"""Every schedule in processes, with data parallelism, ZeRO and tensor parallelism inside: two steps each, whose losses
and parameters have to be those of one device.

    python bench/pipeline_schedules.py [--ranks 4]        2 (one rank a stage), 4 or 6 processes
    python bench/pipeline_schedules.py --untagged         messages without tags, as between GPUs
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

TENSOR = {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self, layers: int = 6, width: int = 8, vocabulary: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def insides(ranks: int) -> dict[str, dict[str, Any]]:
    """What lies inside a stage, of two ranks or of one."""
    if ranks == 2:
        return {"alone": {}}
    split = {"mesh": {"dp": 2}, "batch": ["dp"]}
    return {
        "dp": split,
        "zero 1": {**split, "zero": "1 over dp"},
        "zero 3": {**split, "zero": "3 over dp"},
        "tp": {"mesh": {"tp": 2}, "parameters": TENSOR},
    }


def compare(rank: int, ranks: int) -> None:
    import mycel
    from mycel.plan.schedule import NAMED, stages_a_rank

    torch.manual_seed(0)
    first = Tied().double()
    ids, labels = torch.randint(0, 12, (2, 8, 3))

    def step_of(**more: Any) -> mycel.Step:
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return mycel.train_step(model, optimizer, compile=False, clip_norm=0.05, **more)

    serial = step_of(plan=None, accumulate=4)
    wanted = [serial(ids, labels) for _ in range(2)]
    for name in (*NAMED, "interleaved 3", "searched"):
        for inside, plan in insides(ranks).items():
            along = ranks // (1 if ranks == 2 else 2)
            stages = ["embed", *(f"layers.{i}" for i in range(1, along * stages_a_rank(name)))]
            if len(stages) > 6:
                continue
            step = step_of(plan={"stages": stages, "schedule": name, "microbatches": 4, **plan})
            torch.testing.assert_close([step(ids, labels) for _ in range(2)], wanted, rtol=1e-9, atol=1e-9)
            state = step.state_dict()["model"]
            torch.testing.assert_close(state, serial.state_dict()["model"], rtol=1e-9, atol=1e-9)
            if rank == 0:
                print(f"{name:<14} {inside:<8} {along} places, {len(stages)} stages: as one device", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 6))
    parser.add_argument("--untagged", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        from mycel.run import processes

        processes.CHANNELS |= {"cpu"} if given.untagged else set()
        compare(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        from mycel.launch import launch

        arguments = ["--untagged"] if given.untagged else []
        raise SystemExit(launch(arguments, given.ranks, program=[str(Path(__file__))], env={"OMP_NUM_THREADS": "1"}))
