"""What a rank does in the test of experts on processes:  python experts_child.py.  It trains layers with their
experts split, beside torch on the whole."""

from __future__ import annotations

import copy
import faulthandler

import torch
from experts import Layer, routed
from stepping import plain_step

import mycel
from mycel import Mesh
from mycel.ir import walk


def alike(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def trained(experts: int, chosen: int, message: str) -> None:
    """Under a plan that splits tokens and experts, beside the same on one device; `message` is how rows get to their
    experts."""
    twin = Layer(experts)
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    plan = {"batch": ["ep"], "parameters": {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}}
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, mesh=Mesh(ep=2))
    for how in ("random", "one", "few"):
        batch = routed(how, experts, chosen=chosen)
        alike(float(step(**batch)), plain_step(twin, adamw[1], batch))
        load = step.expert_load(**batch)["the model"]
        assert torch.equal(load, torch.bincount(batch["ids"].view(-1), minlength=experts)), load
    sent = {e.params.get("op", e.op.name) for _, e in walk(step.program)}  # of what is begun early its name is a param
    assert message in sent, sorted(sent)
    alike(step.state_dict()["model"], dict(twin.state_dict()))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    trained(5, 4, "all_gather")
    trained(5, 1, "exchange_rows")
