"""What a rank does in the test of places in processes, beside that of pipelines (`pipeline_child.py`).

Two towers, on one rank and on three, take the steps of one device beside them; then they are asked for their state,
save it, and others that lie differently go on from there.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from placing import Towers

import mycel

RANK = int(os.environ["RANK"])
PLANS = [  # the first takes steps, the second goes on from what it saved
    {"place": {"vision": [0], "*": [1, 2, 3]}, "batch": ["dp"], "zero": "3 over dp"},
    {"place": {"text": [0, 2], "*": {"ranks": [1, 3], "mesh": {"tp": 2}}}, "batch": ["dp"]},
]


def batch(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {"pixels": torch.randn(6, 6, generator=g).double(), "ids": torch.randint(0, 11, (6, 3), generator=g)}


def step_of(model: torch.nn.Module, plan: dict | None) -> mycel.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return mycel.train_step(model, optimizer, compile=False, clip_norm=0.05, plan=plan)


def taken(step: mycel.Step, i: int) -> torch.Tensor:
    torch.manual_seed(i)  # for dropout
    return step(**batch(i))


def alike(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def in_places(folder: Path) -> None:
    torch.manual_seed(0)
    first = Towers(1, 0.1, tied=True).double()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, PLANS[0])
    for i in range(2):
        alike(taken(step, i), taken(serial, i))
        assert torch.allclose(step.grad_norm, serial.grad_norm, rtol=1e-6), i
    held = {name for name, p in step.model.named_parameters() if p.untyped_storage().nbytes() > 8 and p.dim()}
    assert any(name.startswith("vision.layers") for name in held) == (RANK == 0), held
    assert any(name.startswith("text.layers") for name in held) == (RANK > 0), held
    alike(step.state_dict(), serial.state_dict())
    alike(step.evaluate(**batch(7)), serial.evaluate(**batch(7)))
    with step.trace() as trace:
        alike(taken(step, 2), taken(serial, 2))
    assert {"F0.0", "F1.0", "B0.0", "B1.0"} <= {str(s) for s in trace.measured.start}, trace.measured
    with step.whole() as model:
        alike(dict(model.named_parameters()), dict(serial.model.named_parameters()))
    step.save(folder / "saved")
    again = step_of(Towers(1, 0.1, tied=True).double(), PLANS[1])
    again.prepare(**batch(0)).load(folder / "saved")
    alike(taken(again, 3), taken(serial, 3))
    alike(again.state_dict(), serial.state_dict())
    again.export(folder / "exported")
    assert (folder / "exported").is_dir()
