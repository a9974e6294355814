"""What a rank does in the test of corrections: its own ledger is not what counts, that of rank 0 is.  Where computing
and messages took twice what figures say, a step of any plan is predicted to take twice as long; a search decides by it,
the same on all ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import mycel
from mycel.plan import Measured, basis_of, hardware_of, write_down
from mycel.step.auto_plan import ranks_of

rank, out = os.environ["RANK"], Path(sys.argv[1])
os.environ["MYCEL_LEDGER"] = str(out / f"ledger-{rank}.jsonl")
basis = basis_of(hardware_of(torch.device("cpu")))
took = 0.6 if rank == "0" else 1.2
write_down(Measured("CPU", 2, 0.3, took, 1, 1, "a model", 9, 0.2, 0.1, basis))
x, y = torch.randn(32, 1, 64), torch.randn(32, 1, 64)


def step_of(plan: object) -> mycel.Step:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    return mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), mse_loss, plan=plan, compile=False)


def predicted(plan: object) -> float:
    step = step_of(plan).prepare(x, y)
    assert step.plan.predicted is not None
    assert step.corrected_hardware(torch.device("cpu")) == step.corrections.hardware(torch.device("cpu"), 2)
    return step.plan.predicted.seconds


PLANS = {
    "dp": {"mesh": {"dp": 2}, "batch": ["dp"]},
    "zero3": {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
    "stages": {"mesh": {"pp": 2}, "stages": 2, "microbatches": 2},
    "replicas": {"mesh": {"dp": 2}, "batch": ["dp"], "sync": {"dp": "diloco(H=4)"}},
    "auto": "auto",
}
slower = {name: predicted(plan) for name, plan in PLANS.items()}
cluster = ranks_of("cpu", 2, step_of(PLANS["dp"]).corrections)
assert cluster.correction is not None and abs(cluster.correction.computing - 2) < 1e-9, cluster
os.environ["MYCEL_UNCORRECTED"] = "1" if rank == "0" else ""
for name, plan in PLANS.items():
    torch.testing.assert_close(
        slower[name], 2 * predicted(plan), rtol=1e-6, atol=0.0, msg=lambda text: f"{name}: {text}"
    )
step = step_of("auto")
loss = step(x, y)
step.evaluate(x, y)
print("done", float(loss))
