"""What a rank does in the test of compressed steps:  python compress_child.py FOLDER.  Trains, saves in the middle, and
goes on from there in a step of its own."""

from __future__ import annotations

import copy
import faulthandler
import sys
from pathlib import Path

import torch
from test_compress import Small

import mycel
from mycel import Mesh
from mycel.run.rendezvous import seat

PLANS = {
    "int8": {"compress": {"dp": {"*.weight": "int8+ef"}}},
    "topk": {"compress": {"dp": {"*.weight": "topk(0.1)+ef21"}}, "zero": "2 over dp"},
}


def made(plan):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return mycel.train_step(model, optimizer, compile=False, plan={"batch": ["dp"], **plan}, mesh=Mesh(dp=2))


def batch(i):
    gen = torch.Generator().manual_seed(i)
    return {"x": torch.randn(24, 40, generator=gen), "y": torch.randint(0, 5, (24,), generator=gen)}


def chosen_by_measurement() -> None:
    """`auto` measures the link: all ranks choose the same, and say what they have seen."""
    step = made({"compress": {"dp": "auto"}}).prepare(**batch(0))
    axis, link = step._link
    assert axis == "dp" and link.bytes_s > 1e5 and {name for name, *_ in link.measured} >= {"all_reduce"}
    assert step.plan.decided.links["dp"] == link
    assert step.plan.compress_text().startswith("along dp exact"), step.plan.compress_text()  # nothing is large here


def main(folder: Path) -> None:
    chosen_by_measurement()
    for name, plan in PLANS.items():
        step = made(plan)
        for i in range(3):
            step(**batch(i))
        step.save(folder / name)
        whole = copy.deepcopy(step.state_dict())
        losses = [float(step(**batch(i))) for i in (3, 4, 5)]
        again = made(plan).prepare(**batch(0))
        again.load(folder / name)
        assert [float(again(**batch(i))) for i in (3, 4, 5)] == losses, name
        mine, theirs = step.messages.tensors(), again.messages.tensors()
        assert mine and all(torch.equal(x, theirs[k]) for k, x in mine.items()), name
        errors = [x for k, x in mine.items() if k.startswith("error")]
        assert all(x.abs().max() > 0 for x in errors)

        loaded = made(plan)  # from the whole, before anything is in parts: the same sum, held otherwise
        loaded.load_state_dict(whole)
        loaded.prepare(**batch(3))
        assert abs(float(loaded(**batch(3))) - losses[0]) < 1e-6
        loaded.load(folder / name)
        sums = loaded.state_dict()["messages"]
        assert all(torch.allclose(x, sums[k], atol=1e-6) for k, x in whole["messages"].items()), name
        state = step.state_dict()["model"]
        torch.save(state, folder / f"{name}-{seat().rank}.pt")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
