"""What a rank does in the test of places in processes, beside that of pipelines (`pipeline_child.py`).

Two towers, on one rank and on three, take the steps of one device beside them; then they are asked for their state,
save it, and others that lie differently go on from there: one tower in stages, the other in parts, with all that can be
on the host.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from placing import Towers

import mycel
from mycel.run import processes

RANK = int(os.environ["RANK"])
DIES = 2  # the second stage of the text tower under the second plan
PLANS = [  # the first takes steps, the second goes on from what it saved
    {"place": {"vision": [0], "*": [1, 2, 3]}, "batch": ["dp"], "zero": "3 over dp"},
    {
        "place": {
            "text": {"ranks": [0, 2], "stages": ["text.layers.0", "text.out"]},
            "*": {"ranks": [1, 3], "mesh": {"tp": 2}},
        },
        "parameters": {"vision.layers.*.weight": ["tp", "-"], "vision.layers.*.bias": ["tp"]},
        "batch": ["dp"],
        "offload": dict.fromkeys(["activations", "optimizer", "parameters", "gradients"], "host"),
    },
]


def batch(i: int, rows: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {"pixels": torch.randn(rows, 6, generator=g).double(), "ids": torch.randint(0, 11, (rows, 3), generator=g)}


def step_of(model: torch.nn.Module, plan: dict | None) -> mycel.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    more = {"accumulate": 2, "plan": None} if plan is None else {"plan": {**plan, "microbatches": 2}}
    return mycel.train_step(model, optimizer, compile=False, clip_norm=0.05, **more)


def take_step(step: mycel.Step, i: int) -> torch.Tensor:
    torch.manual_seed(i)  # for dropout
    return step(**batch(i))


def alike(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@contextlib.contextmanager
def alone(step: mycel.Step) -> Iterator[None]:
    """Inside, nothing of what other stages or places hold comes to this rank."""
    fetch = step.parts._fetch
    step.parts._fetch = lambda: pytest.fail("a rank holds what another one does")
    yield
    step.parts._fetch = fetch


def dies_in_backward(step: mycel.Step) -> None:
    """A stage of a place is killed where it would send what the one before it waits for."""
    ranks = step.parts.ranks
    send = ranks.start_send_across

    def start_send_across(*args: object) -> object:
        if RANK == DIES and "backward" in ranks.at:
            time.sleep(0.6)  # until its watch has told where it is
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*args)

    ranks.start_send_across = start_send_across
    take_step(step, 4)
    raise AssertionError("a step without one of its stages ended well")


def compressed(folder: Path) -> None:
    """Gradients travel encoded inside of a place, each rank keeps what it lost, and a checkpoint has the sum of that;
    under a plan without codecs the first step sends it: it is one of torch's, with that added to its gradients."""

    def new_step(compress: dict, **more: object) -> mycel.Step:
        torch.manual_seed(0)
        model = Towers(1)
        plan = {"place": {"vision": [0, 1], "*": [2, 3]}, "batch": ["dp"], "microbatches": 2, "compress": compress}
        plan |= more
        return mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, plan=plan)

    def flushed(step: mycel.Step, state: dict) -> None:
        plain, whole = Towers(1), single(3)
        plain.load_state_dict(state["model"])
        plain(**whole).backward()
        errors = {name.removeprefix("error.dp."): x for name, x in state["messages"].items()}
        assert {name.split(".")[0] for name in errors} == {"vision", "text", "embed"}, errors.keys()
        assert sum(float(x.abs().sum()) for x in errors.values()) > 0.001, "something was lost"
        step(**whole)
        assert not step.messages.held and not step.messages.lossy
        after = step.state_dict()["model"]
        for name, p in plain.named_parameters():
            wanted = p.detach() - 0.1 * (p.grad + errors.get(name, 0.0))
            torch.testing.assert_close(after[name], wanted, rtol=1e-4, atol=1e-5)

    def single(i: int) -> dict[str, torch.Tensor]:
        return {name: x.float() if x.is_floating_point() else x for name, x in batch(i, rows=8).items()}

    codec = {"dp": {"*weight": "topk(0.2)+ef"}}
    step = new_step(codec)
    for i in range(2):
        step(**single(i))
    assert {role.of.split(".")[0] for role in step.messages.held} == ({"vision"} if RANK < 2 else {"text", "embed"})
    step.save(folder)
    state = copy.deepcopy(step.state_dict())
    same, exact = new_step(codec), new_step({})
    for other in (same, exact):
        other.prepare(**single(3)).load(folder)
    alike(same.state_dict()["messages"], state["messages"])
    assert torch.equal(step(**single(2)), same(**single(2)))
    flushed(exact, state)
    watched = new_step({"dp": "auto"}, monitor=["noise"])  # each place measures its link, and all choose the same
    watched(**single(0))
    assert watched.plan.decided.compress == "exact" and {k for _, k, *_ in watched.link.link.measured} == {2}
    reports = watched.state.process.tell(watched.monitored())
    assert reports == [reports[0]] * 4 and reports[0]["gradient_variance"] > 0, reports


def late(folder: Path) -> None:
    """Steps with the gradients of the step before are those of torch; what is saved goes on."""

    def new_step() -> mycel.Step:
        torch.manual_seed(0)
        model = Towers(1).double()
        plan = {"place": {"vision": [0, 1], "*": [2, 3]}, "batch": ["dp"], "sync": {"dp": "delayed(ahead=0.5)"}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
        return mycel.train_step(model, optimizer, compile=False, plan=plan)

    torch.manual_seed(0)
    plain, behind = Towers(1).double(), Towers(1).double()
    behind.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(behind.parameters(), lr=0.1, momentum=0.8)
    step, other = new_step(), new_step()
    gradients = [torch.zeros_like(p) for p in plain.parameters()]
    for i in range(4):
        plain.zero_grad()
        plain(**batch(i, rows=8)).backward()
        before = [p.detach().clone() for p in behind.parameters()]
        for p, g in zip(behind.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
        gradients = [p.grad.clone() for p in plain.parameters()]
        for held, p, was in zip(plain.parameters(), behind.parameters(), before, strict=True):
            held.data.copy_(p.detach() + 0.5 * 0.8 * (p.detach() - was))
        step(**batch(i, rows=8))
        if i == 2:
            step.save(folder)
    alike(step.state_dict()["model"], plain.state_dict())
    other.prepare(**batch(3, rows=8)).load(folder)
    other(**batch(3, rows=8))
    alike(other.state_dict(), step.state_dict())


def in_places(folder: Path) -> mycel.Step:
    processes.CHANNELS.add("cpu")  # a channel for each pair of ranks and no tags, as messages between GPUs go
    torch.manual_seed(0)
    first = Towers(1, 0.1, tied=True).double()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, PLANS[0])
    for i in range(2):
        alike(take_step(step, i), take_step(serial, i))
        assert torch.allclose(step.grad_norm, serial.grad_norm, rtol=1e-6), i
    held = {name for name, p in step.model.named_parameters() if p.untyped_storage().nbytes() > 8 and p.dim()}
    assert any(name.startswith("vision.layers") for name in held) == (RANK == 0), held
    assert any(name.startswith("text.layers") for name in held) == (RANK > 0), held
    alike(step.state_dict(), serial.state_dict())
    with alone(step):
        alike(step.evaluate(**batch(7)), serial.evaluate(**batch(7)))
    with step.trace() as trace:
        alike(take_step(step, 2), take_step(serial, 2))
    assert {"F0.0", "F1.0", "B0.0", "B1.0"} <= {str(s) for s in trace.measured.start}, trace.measured
    with step.whole() as model:
        alike(dict(model.named_parameters()), dict(serial.model.named_parameters()))
    step.save(folder / "saved")
    again = step_of(Towers(1, 0.1, tied=True).double(), PLANS[1])
    again.prepare(**batch(0)).load(folder / "saved")
    alike(take_step(again, 3), take_step(serial, 3))
    alike(again.state_dict(), serial.state_dict())
    with alone(again):
        alike(again.evaluate(**batch(7)), serial.evaluate(**batch(7)))
    assert "lives there" in again.explain()
    again.export(folder / "exported")
    assert (folder / "exported").is_dir()
    return again
