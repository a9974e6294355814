"""What a rank does in the test of train_step(plan="auto") over hosts: two steps, the same as those of one device, of
which no more travels between hosts than has to: each rank's half of the gradients, once."""

from __future__ import annotations

import copy
import os

import torch

import mycel
from mycel import lower
from mycel.plan import hardware_of

os.environ["LOCAL_WORLD_SIZE"] = "2"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
alone = copy.deepcopy(model)
x, y = torch.randn(2052, 1, 64), torch.randn(2052, 1, 64)
how = {"loss": torch.nn.functional.mse_loss, "compile": False}
step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), **how)
one = mycel.train_step(alone, torch.optim.SGD(alone.parameters(), lr=1e-2), plan=None, **how)
for _ in range(2):
    torch.testing.assert_close(step(x, y), one(x, y), rtol=1e-5, atol=1e-5)
links = hardware_of(torch.device("cpu")).links(step.plan.mesh)
sent = dict.fromkeys(("host", "network"), 0.0)
for axes, size in lower.sent(step.program).items():
    sent[links.of(axes).name] += size
gradients = 4 * 2 * 64 * 256
assert sent["host"] > sent["network"] and 0 < sent["network"] < 0.55 * gradients, (step.plan.mesh, sent)
