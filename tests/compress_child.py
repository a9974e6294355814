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
from mycel import step as step_module
from mycel.plan import compression
from mycel.run.rendezvous import seat

MIXED = {"up.weight": "int8+ef", "down.weight": "int4+loco", "head.weight": "topk(0.1)+ef21"}
PLANS = {
    "mixed": {"compress": {"dp": MIXED}, "zero": "2 over dp", "gather": {"dp": {"up.weight": "int4+ef"}}},
    "dgc": {"compress": {"dp": {"*.weight": "topk(0.1)+dgc"}}},
    "one bit": {"compress": {"dp": "1bit-adam(2)"}},
}


def made(plan):
    torch.manual_seed(0)
    model = Small()
    is_sgd = "dgc" in str(plan)
    optimizer = (torch.optim.SGD if is_sgd else torch.optim.AdamW)(model.parameters(), lr=0.02)
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
    priced_anew(step)


def priced_anew(step) -> None:
    """A link that slows for one of two ranks is no reason, for both it is: from the next step on."""
    step_module.LINK_WATCHED_EVERY = 2
    watch, rank = step._link_watch, seat().rank
    for slow_ranks, measured in (((0,), 1), ((0, 1), 2)):
        watch.reference_s = 1e-9 if rank in slow_ranks else 1e9
        entry = step.entries[0] if step.entries else None
        for i in range(2):
            assert step._priced == 1 and step.entries[0] is entry
            step(**batch(i))
        assert step._priced == measured and (step._link is None) == (measured == 2)
    step(**batch(2))
    assert step.entries[0] is not entry and step._link is not None and step._link_watch is not watch
    assert "priced anew 1 time(s), since the link had slowed" in step.explain()


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
        assert mine and all(torch.equal(x.float(), theirs[k].float()) for k, x in mine.items()), name
        errors = [x.float() for k, x in mine.items() if k.startswith(("error", "velocity"))]
        assert all(x.abs().max() > 0 for x in errors)

        torch.save(step.state_dict()["model"], folder / f"{name}-{seat().rank}.pt")
        if name != "mixed":
            continue
        loaded = made(plan)  # from the whole, before anything is in parts: the same sum, held otherwise
        loaded.load_state_dict(whole)
        loaded.prepare(**batch(3))
        assert abs(float(loaded(**batch(3))) - losses[0]) < 1e-6, name
        loaded.load(folder / name)
        sums = loaded.state_dict()["messages"]
        assert all(torch.allclose(x.float(), sums[k].float(), atol=1e-6) for k, x in whole["messages"].items()), name


if __name__ == "__main__":
    compression.SMALL = 1000  # the matrices of `Small` count
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
