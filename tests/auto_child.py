"""What a rank does in the test of train_step(plan="auto"): two steps, the same as those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from models import llama

import mycel
from mycel.errors import TrainError

torch.manual_seed(0)
model = llama()
alone = copy.deepcopy(model)
batch = {"input_ids": torch.randint(0, 30, (4, 16))}
batch["labels"] = batch["input_ids"]
step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), compile=False)
one = mycel.train_step(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), plan=None, compile=False)
with pytest.raises(TrainError, match="before the plan was found"):
    step.rows(4)
for _ in range(2):
    torch.testing.assert_close(step(**batch), one(**batch), rtol=1e-5, atol=1e-5)
assert step.plan.mesh.world == 2 and one.plan.mesh.world == 1
