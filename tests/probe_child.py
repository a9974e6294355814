"""What a rank does in the tests of a probe over several hosts: `mycel probe`, on sizes that are quick, as if hosts had
so many ranks each; and a step whose plan is found by what was measured."""

from __future__ import annotations

import copy
import os
import sys

import torch
import yaml

import mycel
from mycel.cli import app
from mycel.run import probe as measuring

os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZES"].split(",")[int(os.environ["RANK"])]
with open(os.environ["TINY"]) as file:
    tiny = yaml.safe_load(file)
measuring.SIZES["cpu"] = {k: [tuple(x) if isinstance(x, list) else x for x in v] for k, v in tiny.items()}
measuring.LEAST_S, measuring.CROWDED_S, measuring.COMPUTED_S = 0.0, 0.001, 0.0001
measuring.ROUNDS = measuring.MOST = 1
app(sys.argv[1:], standalone_mode=False)

os.environ["MYCEL_PROBE"] = sys.argv[-1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
alone = copy.deepcopy(model)
x, y = torch.randn(32, 1, 64), torch.randn(32, 1, 64)
how = {"loss": torch.nn.functional.mse_loss, "compile": False}
step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), mesh=mycel.Mesh(dp=2, tp=2), **how)
one = mycel.train_step(alone, torch.optim.SGD(alone.parameters(), lr=1e-2), plan=None, **how)
for _ in range(2):
    torch.testing.assert_close(step(x, y), one(x, y), rtol=1e-5, atol=1e-5)
