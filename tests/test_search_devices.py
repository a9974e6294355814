"""Any number of devices, two kinds of hosts, branches and loops in the program: the plan that is found fits, no ready
plan is priced lower, the bound is below it, and it computes what one device does."""

from __future__ import annotations

import pytest
import torch
from distributing import ControlFlow, OneDevice, step_equals
from test_search import SMALL
from test_search import of as searched
from test_search_given import Two, batch

from mycel.ir import Mesh, walk
from mycel.plan import Plan
from mycel.plan.clock import WORKSPACE

INSIDE, NETWORK = {"bytes_s": 1e10, "start_s": 1e-7}, {"name": "network", "bytes_s": 2e9, "start_s": 1e-6}
SLOWER = {**SMALL, "name": "old", "half": 0.5e12, "memory": "0.5GiB"}
CLUSTERS = {
    "6": {"device": SMALL, "devices": 6, "hosts": 1, "levels": [INSIDE]},
    "24": {"device": SMALL, "devices": 8, "hosts": 3, "levels": [INSIDE, NETWORK]},
    "36": {"device": SMALL, "devices": 6, "hosts": 6, "levels": [INSIDE, NETWORK]},
    "two kinds": {
        "hosts": [{"device": SMALL, "devices": 4}, {"device": SLOWER, "devices": 2}], "levels": [INSIDE, NETWORK],
    },
}  # fmt: skip


def ready(world: int):
    """Ready plans and their products on so many devices."""
    for tp in (n for n in (1, 2, 3, 6) if world % n == 0):
        dp = world // tp
        for data in ("dp", "zero1", "zero2", "zero3") if dp > 1 else ("",):
            mesh = Mesh({"dp": dp} if tp == 1 else {"dp": dp, "tp": tp} if dp > 1 else {"tp": tp})
            yield Plan.read("+".join(filter(None, (data, "tp" if tp > 1 else ""))), mesh)


@pytest.mark.parametrize("cluster, make", [("6", ControlFlow), ("24", Two), ("36", Two), ("two kinds", ControlFlow)])
def test_what_is_found_fits_and_no_ready_plan_is_priced_lower(cluster, make):
    """And on six simulated devices it computes what one does."""
    rows, width = 72, 64 if make is Two else 12
    plan_search = searched(make(), batch(rows, width), CLUSTERS[cluster])
    least = plan_search.held(next(iter(plan_search.space.meshes())))
    plan_search.memory = int(WORKSPACE + 4 * least + (1 << 20))
    answer = plan_search.run()
    best, world = answer.best, plan_search.cluster.world
    assert best.plan.mesh.world == world and best.peak <= plan_search.memory
    assert 0 < answer.bound <= best.seconds
    for written in ready(world):
        other = plan_search.priced(written)
        assert not other.fits or best.seconds <= other.seconds * (1 + 1e-9), written
    if make is ControlFlow:
        assert {e.op.name for _, e in walk(plan_search.program)} >= {"cond", "loop", "scan"}
    if cluster == "two kinds":  # every rank waits for the slower half
        assert world == 6 and plan_search.cluster.hardware.half == SLOWER["half"]
    if cluster == "6":
        torch.manual_seed(0)
        values, written = {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}, best.plan.given
        step_equals(OneDevice.of(make(), values, accumulate=written.microbatches), written)
