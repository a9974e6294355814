"""What a rank does in the test of pipelines in processes:  python pipeline_child.py FOLDER.

A pipeline takes the steps of one device beside it, one of them skipped; then it is asked for its state, saves it, and
another one goes on from there.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from pipelining import Tied
from placed_processes import in_places

import mycel
from mycel.errors import PlanError

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TENSOR = {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}
PLANS = {  # the first takes steps, the second goes on from what it saved
    2: [
        {"stages": 4, "schedule": "interleaved"},
        {"stages": ["embed", "layers.1"], "schedule": "searched"},
    ],
    4: [
        {"stages": 4, "mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp", "schedule": "zbv"},
        {
            "stages": 2,
            "mesh": {"tp": 2},
            "parameters": TENSOR,
            "schedule": "zbh1",
            "offload": {"activations": "host", "optimizer": "host"},
        },
    ],
}[WORLD]


def batch(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(0, 12, (2, 8, 3), generator=g)
    return {"ids": ids[0], "labels": torch.where(torch.rand(8, 3, generator=g) < 0.3, -100, ids[1])}


def step_of(model: torch.nn.Module, plan: dict | None) -> mycel.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    more = {"accumulate": 4, "plan": None} if plan is None else {"plan": {**plan, "microbatches": 4}}
    return mycel.train_step(model, optimizer, compile=False, clip_norm=0.05, **more)


def alike(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def poisoned(step: mycel.Step) -> None:
    with step.whole() as model:
        model.layers[0].down.bias.data[0] = torch.inf


def healed(step: mycel.Step) -> None:
    with step.whole() as model:
        model.layers[0].down.bias.data[0] = 0.25


def held(step: mycel.Step) -> int:
    tensors = [*step.model.parameters(), *(x for s in step.optimizer.state.values() for x in s.values())]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@contextlib.contextmanager
def alone(step: mycel.Step) -> Iterator[None]:
    """Inside, no stage comes to the ranks of another."""
    fetch = step.parts._fetch
    step.parts._fetch = lambda: pytest.fail("a rank holds what another stage does")
    yield
    step.parts._fetch = fetch


def main(folder: Path) -> None:
    torch.manual_seed(0)
    first = Tied(2, 0.1).double()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, PLANS[0])
    for i in range(3):
        if i == 1:
            poisoned(serial)
            poisoned(step)
        wanted, loss = losses(i, serial, step)
        assert torch.allclose(loss, wanted, rtol=1e-10, equal_nan=True), (i, loss, wanted)
        assert torch.allclose(step.grad_norm, serial.grad_norm, rtol=1e-6, equal_nan=True), i
        assert step.skipped == serial.skipped == (i > 0), (i, step.skipped)
        if i == 1:
            healed(serial)
            healed(step)
    compared(step, serial)
    with alone(step):
        assert step.save(folder / "saved").name == "step-00000003"
    other = step_of(Tied(2, 0.1).double(), PLANS[1])
    other.prepare(**batch(0))
    with alone(other):
        other.load(folder / "saved")
    for i in (3, 4):
        wanted, *found = losses(i, serial, step, other)
        alike(found, [wanted] * 2)
    alike(other.state_dict()["model"], serial.state_dict()["model"])
    assert "lives there" in other.explain() or WORLD == 2
    traced(step)
    refused()
    in_places(folder / "places")


def losses(i: int, *steps: mycel.Step) -> list[torch.Tensor]:
    """Of one step of each, with the same random numbers."""
    found = []
    for step in steps:
        torch.manual_seed(10 + i)
        found.append(step(**batch(i)))
    return found


def compared(step: mycel.Step, serial: mycel.Step) -> None:
    found, whole = step.state_dict(), serial.state_dict()
    alike(found["model"], whole["model"])
    for i, slots in whole["optimizer"]["state"].items():
        for slot, x in slots.items():
            alike(found["optimizer"]["state"][i][slot].double(), x.double())
    alike(step.evaluate(**batch(9)), serial.evaluate(**batch(9)))
    assert held(step) < 0.85 * held(serial), (held(step), held(serial))  # a rank holds its stages alone
    assert mycel.Plan.read(yaml.safe_load(str(step.plan))) == step.plan
    assert "bubble" in step.explain()


def traced(step: mycel.Step) -> None:
    """Every rank knows what each did when: all steps of the schedule, none before what it waits for."""
    with step.trace() as trace:
        losses(5, step)
    times = trace.measured
    ran = [x for order in times.schedule.orders for x in order]
    assert {x.microbatch for x in ran} == set(range(4)) and {x.stage for x in ran} == set(range(4))
    assert all(times.end[a] <= times.end[x] for x in ran for a in times.schedule.awaited(x) if a in times.end)
    assert "measured " in step.explain() and len(trace.spans) == WORLD


def refused() -> None:
    for plan, words in (
        ({"stages": WORLD, "schedule": "zigzag"}, "schedule: 'zigzag'"),
        ({"stages": 2 * WORLD + 1, "schedule": "zbv"}, "gives each rank 2"),
        ({"stages": WORLD, "mesh": {"pp": WORLD + 1}}, f"are {WORLD} ranks"),
    ):
        try:
            mycel.Plan.read(plan)
        except PlanError as e:
            assert words in str(e), e
        else:
            raise AssertionError(plan)
    model = Tied()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"stages": WORLD}, compile=False)
    try:
        step(**batch(0))
    except PlanError as e:
        assert "microbatches: 2, or more" in str(e), e
    else:
        raise AssertionError("one microbatch")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
