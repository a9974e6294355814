"""What a rank does in the test of replicas:  python sync_child.py FOLDER first|again.

first   trains by some policies, as plain torch does with one replica after the other; saves, and is killed
again   goes on from what was saved: the same losses and models, to the bit, as without an interruption
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import torch
from test_sync import STEPS, Small, batch, reference

import mycel
from mycel import Mesh
from mycel.run.rendezvous import seat

PLANS = {
    "diloco": {"sync": {"dp": "diloco(H=3, lr=0.5, momentum=0.8)"}, "compress": {"dp": {"*.weight": "int8+ef"}}},
    "diloco late": {
        "sync": {"dp": "diloco(H=4, overlap=2, lr=0.5, momentum=0.8)"},
        "compress": {"dp": {"*.weight": "int8+ef"}},
    },
    "streaming": {"sync": {"dp": "streaming(H=4, fragments=2, overlap=2, mixing=0.25)"}},
    "gossip": {"sync": {"dp": "gossip"}},
}
SAVED, END = 5, STEPS


def new_step(plan):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = mycel.train_step(model, optimizer, compile=False, plan={"batch": ["dp"], **plan}, mesh=Mesh(dp=2))
    return step.prepare(**batch(0))


def first(folder: Path) -> None:
    rank = seat().rank
    for name, plan in PLANS.items():
        step, losses = new_step(plan), []
        for i in range(END):
            if i == SAVED:
                step.save(folder / name)
            losses.append(float(step(**batch(i))))
        check_against_torch(name, step, losses, rank)
        state = {key: x.clone() for key, x in step.model.state_dict().items()}
        torch.save((losses, state), folder / f"{name}-{rank}.pt")
    step = new_step(PLANS["diloco"])
    step.load(folder / "diloco")
    step(**batch(SAVED))
    os.kill(os.getpid(), signal.SIGKILL)


def check_against_torch(name: str, step: mycel.step.Step, losses: list[float], rank: int) -> None:
    """The same losses, models and mean; and that evaluation is of the mean, and leaves replicas as they are."""
    replicas, expected = reference(PLANS[name]["sync"]["dp"], 2)
    within = 2e-2 if "compress" in PLANS[name] else 2e-5
    assert max(abs(a - b) for a, b in zip(losses, expected[rank], strict=True)) < within, name
    held = dict(step.model.named_parameters())
    own = {key: p.detach().clone() for key, p in held.items()}
    for key, x in replicas[rank].items():
        torch.testing.assert_close(own[key], x, rtol=1e-4, atol=within, msg=f"{name} {key}")
    mean = {key: torch.stack([p[key] for p in replicas]).mean(0) for key in replicas[0]}
    for key, x in step.state_dict()["model"].items():
        torch.testing.assert_close(x, mean[key], rtol=1e-4, atol=within, msg=f"{name} {key}")
    with step.whole() as model, torch.no_grad():
        alone = float(model(**batch(99)))
    assert abs(float(step.evaluate(**batch(99))) - alone) < 1e-5, name
    assert all(torch.equal(p, own[key]) for key, p in held.items())
    assert f"synchronised     along dp {name.split(maxsplit=1)[0]}(" in step.explain()


def again(folder: Path) -> None:
    for name, plan in PLANS.items():
        losses, state = torch.load(folder / f"{name}-{seat().rank}.pt")
        step = new_step(plan)
        step.load(folder / name)
        assert [float(step(**batch(i))) for i in range(SAVED, END)] == losses[SAVED:], name
        assert all(torch.equal(x, state[key]) for key, x in step.model.state_dict().items()), name


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    globals()[sys.argv[2]](Path(sys.argv[1]))
