"""Plans of steps that are compiled on a GPU, where stretches of equations are outlined as regions: whatever the plan,
the lowered programs do what the serial step does, and a plan read back gives the same ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributing import OneDevice, compared, start_values
from experts import Mixed
from pipelining import Tied, stages_equal
from placing import Towers, one_of, places_equal, task_of

from mycel.lower import Lowered
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.plan.hardware import KNOWN
from mycel.plan.schedule import NAMED
from mycel.planning import Task, planned
from mycel.run import interpret

GPU = replace(KNOWN["H200"], memory=139 << 30, bytes_s=1e7)  # so slow that small blocks take time
INNER: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp": {"mesh": {"dp": 2}, "batch": ["dp"]},
    "zero1": {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "1 over dp"},
    "zero3": {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
    "tp": {
        "mesh": {"tp": 2}, "loose": True,
        "parameters": {"*up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*down.weight": ["-", "tp"], "up": ["tp"]},
    },
}  # fmt: skip
PLACES = [
    {"vision": [0], "*": [1, 2]},
    {"vision": {"ranks": [0, 1], "stages": ["vision", "vision.out"]}, "*": [2]},
    {"vision": [0], "text": [2, 1], "*": [3]},
]
STATE = {"activations": "host", "optimizer": "host"}
HOST = [STATE, {**STATE, "parameters": "host", "gradients": "host"}]


def written(kind: str, rng: random.Random) -> Plan:
    """A plan of a kind by chance."""
    plan = dict(rng.choice(list(INNER.values())))
    if kind == "pairs":
        plan = {**INNER[rng.choice(["dp", "zero3", "tp"])], "at_once": 2}
    if kind == "stages":
        schedule = rng.choice([*NAMED, "searched"])
        count = rng.choice([2, 3]) if schedule in ("gpipe", "1f1b", "zbh1", "searched") else 4
        plan |= {"stages": count, "schedule": schedule, "at_once": rng.choice([1, 2])}
    if kind == "places":
        plan = {"place": rng.choice(PLACES), "batch": ["dp"], "schedule": rng.choice(["gpipe", "1f1b", "searched"])}
    if plan.get("at_once", 1) == 1 and rng.random() < 0.4:
        plan["offload"] = rng.choice(HOST)
    return Plan.read({**plan, "microbatches": 4, "recompute": rng.choice(["auto", "none", "full"])})


def step_of(kind: str, plan: Plan, rng: random.Random) -> OneDevice:
    """A model by chance, with dropout or a router, and its step."""
    torch.manual_seed(rng.randrange(99))
    settings = {"clip_norm": rng.choice([None, 0.05])}
    if kind == "places":
        batch = {"pixels": torch.randn(8, 6).double(), "ids": torch.randint(0, 11, (8, 3))}
        return one_of(Towers(1, 0.2, tied=rng.random() < 0.5).double(), batch, plan, **settings)
    if kind != "stages" and rng.random() < 0.3:
        return OneDevice.of(Mixed(), {"x": torch.randn(16, 16).double()}, accumulate=4, **settings)
    batch = {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 12, (8, 3))}
    batch["labels"][:3] = -100  # microbatches count unequally
    return OneDevice.of(Tied(rng.choice([1, 2]), rng.choice([0.0, 0.2])).double(), batch, accumulate=4, **settings)


def on_gpu(one: OneDevice, plan: Plan) -> tuple[Task, Plan, Lowered]:
    """The step as a GPU of today would compile it."""
    if plan.place:
        task = task_of(one, plan, compiled=True, hardware=GPU)
    else:
        given = ShardedModel(one.model, one.optimizer, plan.inside).given(one.unsharded)
        task = Task(one.unsharded.program, one.unsharded.body, GPU, True, *given)
    return task, *planned(task, plan)


def programs_of(done: Lowered) -> list[str]:
    return list(map(str, done.pipeline.programs if done.pipeline else (done.program,)))


@pytest.mark.filterwarnings("ignore:accumulate")
@pytest.mark.parametrize("kind, cases", {"together": 4, "pairs": 4, "stages": 6, "places": 2}.items())
def test_compiled_is_serial(kind, cases):
    for case in range(cases):
        rng = random.Random(f"{kind} {case}")
        plan = written(kind, rng)
        one = step_of(kind, plan, rng)
        task, decided, done = on_gpu(one, plan)
        again = planned(task, Plan.read(decided.data()))[1]
        assert done.regions and again.regions_of == done.regions_of and programs_of(again) == programs_of(done)
        if plan.place:
            places_equal(one, plan, done)
        elif done.pipeline is not None:
            stages_equal(one, done.pipeline.programs, done.spread, plan.inside.mesh)
        elif done.spread is not None:
            compared(one.unsharded.program, done.spread, plan.mesh, start_values(one), done.program)
        else:
            wanted, results = (interpret(p, start_values(one)) for p in (one.unsharded.program, done.program))
            assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-10) for x, y in zip(results, wanted, strict=True))
