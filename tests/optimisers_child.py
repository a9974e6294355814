"""What a rank does in the test of optimisers:  python optimisers_child.py.  It trains in parts beside torch on the
whole."""

from __future__ import annotations

import copy
import faulthandler

import torch
from optimising import CASES, SPREAD, Whitened, rows, small, trained
from stepping import plain_step

import mycel
from mycel import Mesh

PLAN = {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"}
TENSOR = {"mesh": {"tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}}


def main() -> None:
    for name in SPREAD.values():
        for plan in (PLAN, TENSOR):
            model = small(name)
            twin = copy.deepcopy(model)
            optimizer, plain = CASES[name](trained(model)), CASES[name](trained(twin))
            step = mycel.train_step(model, optimizer, compile=False, plan=plan, mesh=Mesh(plan["mesh"]))
            for i in range(3):
                got, wanted = float(step(**rows(i))), plain_step(twin, plain, rows(i))
                assert abs(got - wanted) < 1e-9, (name, plan, i, got, wanted)
            assert any(not layout.is_whole for layout in step.parts.layouts.values())
            for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                whole = step.parts.gather(p.data, step.parts.layouts[key], q.shape)
                torch.testing.assert_close(whole, q.data, rtol=1e-9, atol=1e-9)
    as_it_is()


def as_it_is() -> None:
    """An optimiser without a rule, on whole parameters of which each rank has its own copy."""
    model = small("")
    twin = copy.deepcopy(model)
    optimizer, plain = Whitened(trained(model)), Whitened(trained(twin))
    step = mycel.train_step(model, optimizer, compile=False, mesh=Mesh(dp=2), clip_norm=0.1, grads=True)
    for i in range(3):
        got, wanted = float(step(**rows(i))), plain_step(twin, plain, rows(i), clip_norm=0.1)
        assert abs(got - wanted) < 1e-6, (i, got, wanted)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    main()
