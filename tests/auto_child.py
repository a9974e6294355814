"""What a rank does in the test of train_step(plan="auto"): two steps, the same as those of one device."""

from __future__ import annotations

import copy

import torch

import mycel

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
alone = copy.deepcopy(model)
x, y = torch.randn(8, 16), torch.randn(8, 8)
how = {"loss": torch.nn.functional.mse_loss, "compile": False}
step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **how)
one = mycel.train_step(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), plan=None, **how)
try:
    step.rows(8)
except mycel.TrainError as error:
    assert "before the plan was found" in str(error)
else:
    raise AssertionError("rows are not known yet")
for _ in range(2):
    torch.testing.assert_close(step(x, y), one(x, y), rtol=1e-5, atol=1e-5)
assert step.plan.mesh.world == 2 and one.plan.mesh.world == 1
