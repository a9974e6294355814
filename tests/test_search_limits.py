"""Where nothing fits: by how much, and the smallest change of each kind, which is enough, and one step less of it is
not.  And what contradicts itself, or does not divide: both values, the place, what to try."""

from __future__ import annotations

import re

import pytest
import torch
from golden import golden
from test_search import SMALL, TWO, of
from test_search_given import ByHand, Deep, Hinted, Two, batch

from mycel.errors import PlanError
from mycel.plan import Plan
from mycel.plan.clock import WORKSPACE
from mycel.plan.cluster import Cluster
from mycel.search import Search
from mycel.sizes import parse_bytes, rounded_up, shown

FIXED = {"mesh": {"dp": 2}, "zero": 0, "offload": "none", "recompute": "none", "microbatches": 1}
PAIRS = {**TWO, "hosts": 1, "levels": [*TWO["levels"], {**TWO["levels"][0], "name": "network"}]}  # and more may come


def tokens(rows: int = 64):
    ids = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def asked(memory: int, rows: int = 64, cluster=PAIRS, **given) -> Search:
    return of(Deep(4), tokens(rows), cluster, memory=memory, given={**FIXED, **given})


def least(**given) -> int:
    """Bytes that the plan takes under what is given, computed and moved as little as that says."""
    plan_search = asked(1 << 40, **given)
    return min(c.peak for c in plan_search.run().candidates if c.fits)


def refusal(plan_search: Search) -> str:
    with pytest.raises(PlanError) as refused:
        plan_search.run()
    return str(refused.value)


def number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])


@pytest.fixture(scope="module")
def tight() -> tuple[int, str]:
    """A little less memory than the plan takes, and what is said of that."""
    memory = least() - (20 << 10)
    return memory, refusal(asked(memory))


def fits(plan_search: Search) -> bool:
    return plan_search.first_fit() is not None


def test_it_is_said_how_much_is_missing(tight):
    memory, said = tight
    missing = parse_bytes(re.search(r"nearest +dp=2: out of memory by ([\d.]+ \w+)", said)[1])
    assert missing == pytest.approx(least() - memory, rel=0.01)
    assert f"no plan fits {shown(memory)} a device" in said
    lost = [c.why for c in asked(memory, mesh=None, zero=None).run().candidates if not c.fits]
    assert lost and all(re.fullmatch(r"out of memory by [\d.]+ (KiB|MiB|bytes)", why) for why in lost)


def test_the_least_memory_is_named(tight):
    """To what is shown: a hundredth of a MiB less is not enough."""
    memory, said = tight
    enough = parse_bytes(re.search(r"([\d.]+ \w+) a device \(dp=2\)", said)[1])
    assert memory < enough and fits(asked(enough)) and not fits(asked(enough - (1 << 20) // 100 - 1))


def test_the_fewest_hosts_are_named():
    """Of three hosts that are enough, two are not: they are asked for in between two and four."""
    peaks = []
    for hosts in (1, 2, 3):
        given = {**FIXED, "mesh": {"dp": 2 * hosts}}
        peaks.append(of(Two(), batch(6144), {**PAIRS, "hosts": hosts}, given=given).run().best.peak)
    assert peaks[2] < peaks[1] < peaks[0]
    said = refusal(of(Two(), batch(6144), PAIRS, memory=peaks[2], given={**FIXED, "batch": ["dp"]}))
    assert number(r"(\d+) devices \(", said) == 6, said


def test_the_largest_batch_is_named(tight):
    memory, said = tight
    rows = number(r"a batch of (\d+) rows \(dp=2\)", said)
    assert fits(asked(memory, rows)) and not fits(asked(memory, 2 * rows))


@pytest.mark.parametrize("name", ["recompute", "offload", "microbatches", "zero"])
def test_what_is_given_and_in_the_way_is_named(name, tight):
    """What was found without it is how it fits: nothing else has to change."""
    memory, said = tight
    how = re.search(rf"the plan without {name} \(([^)]*)\)", said)[1]
    best = of(Deep(4), tokens(), PAIRS, memory=memory, given={k: v for k, v in FIXED.items() if k != name}).first_fit()
    assert str(best.shape) == how and best.peak <= memory and not fits(asked(memory))
    if name == "microbatches":
        assert best.shape.microbatches == 2, "not more than it takes"
    if name == "zero":
        assert best.shape.zero == 1
    if name == "offload":
        assert best.shape.offload and best.times.peak["host"] > 0
    if name == "recompute":
        assert best.plan.recompute != "none"


def test_what_costs_least_is_named_first(tight):
    """Other plans, the fastest first; memory that the device has and the limit forbids; fewer rows; more devices.
    Where the device has no more, fewer rows come before a larger one."""
    memory, said = tight
    changes = re.split(r", or ", said.split("  try       ")[1])
    plans = [re.search(r"without (\w+)", each)[1] for each in changes if "without" in each]
    given = {name: {k: v for k, v in FIXED.items() if k != name} for name in plans}
    found = [of(Deep(4), tokens(), PAIRS, memory=memory, given=given[name]).first_fit() for name in plans]
    times = [each.seconds for each in found]
    assert len(times) > 3 and times == sorted(times) and times[0] < times[-1]
    kinds = [r"the plan without"] * len(plans) + [r"a device \(", r"a batch of", r"devices \("]
    assert len(changes) == len(kinds) and all(re.search(k, x) for k, x in zip(kinds, changes, strict=True)), changes
    full = {**PAIRS, "device": {**SMALL, "memory": f"{memory >> 10}KiB"}}
    said = refusal(of(Deep(4), tokens(), full, given=FIXED))
    assert 0 < said.index("a batch of") < said.index("a device (") < said.index(" devices (")


def test_microbatches_are_as_many_as_it_takes():
    """Also of a small program, of which one and two are looked at first."""
    given = {"mesh": {"dp": 2}, "zero": 0, "offload": "none", "recompute": "none"}
    best = of(Deep(4), tokens(), PAIRS, memory=least(microbatches=8), given=given).first_fit()
    assert best.shape.microbatches in (4, 8)


def test_sizes_that_are_named_are_enough():
    for size in (1, 1023, 1025, 123456, (1 << 20) + 1, (1 << 30) - 1, 77 << 30, (3 << 30) + 12345):
        assert parse_bytes(shown(rounded_up(size)).replace("bytes", "B")) >= size
        assert rounded_up(size) <= 1.01 * size + 1


CONTRADICTIONS = {
    "a hint of an axis that the mesh has not": lambda: of(Hinted(), batch(), TWO, given={"mesh": {"dp": 2}}).run(),
    "a region of an axis that the mesh has not": lambda: of(ByHand(), batch(), TWO, given={"mesh": {"dp": 2}}).run(),
    "a layout of an axis that the mesh has not": lambda: of(
        Two(), batch(), TWO, given={"mesh": {"dp": 2}, "parameters": {"up.weight": ["tp", "-"]}}
    ).run(),
    "a layout of other dims": lambda: of(
        Two(), batch(), TWO, given={"mesh": {"tp": 2}, "parameters": {"up.weight": ["tp", "-", "-"]}}
    ).run(),
    "a parameter that is not there": lambda: of(
        Two(), batch(), TWO, given={"parameters": {"upp.weight": ["tp"]}}
    ).run(),
    "a mesh that is not of so many devices": lambda: of(Two(), batch(), TWO, given={"mesh": {"dp": 3}}).run(),
    "a batch that no mesh divides": lambda: of(Two(), batch(1), TWO, given={"zero": "3 over dp"}).run(),
    "a batch that is smaller than the mesh": lambda: of(Two(), batch(1), TWO, given={"mesh": {"dp": 2}}).run(),
    "stages that do not divide the devices": lambda: of(Deep(), tokens(), TWO, given={"stages": 3}).run(),
    "fewer microbatches than stages": lambda: of(
        Deep(), tokens(), TWO, given={"stages": 2, "microbatches": 1}
    ).run(),
    "two at once of an odd number": lambda: of(Two(), batch(), TWO, given={"at_once": 2, "microbatches": 3}).run(),
    "a batch along an axis of parameters": lambda: of(Two(), batch(), TWO, given={"batch": ["tp"]}).run(),
    "ZeRO along an axis of parameters": lambda: of(Two(), batch(), TWO, given={"zero": "1 over tp"}).run(),
    "a plan for another number of devices": lambda: of(Two(), batch(), TWO).checked(Plan.read({"mesh": {"dp": 4}})),
    "a plan for another model": lambda: of(Two(), batch(), TWO).checked(
        Plan.read({"mesh": {"tp": 2}, "parameters": {"model.layers.*.up.weight": ["tp", "-"]}})
    ),
    "a plan for more memory": lambda: of(Two(), batch(), TWO, memory=WORKSPACE).checked(
        Plan.read({"mesh": {"dp": 2}, "batch": ["dp"]})
    ),
    "a cluster of no devices": lambda: Cluster.read({"device": SMALL, "devices": 0}),
    "a device that is none": lambda: Cluster.read("h10x8"),
}  # fmt: skip


def test_what_contradicts_itself_is_refused_with_both_values_the_place_and_what_to_try():
    texts = []
    for name, ask in CONTRADICTIONS.items():
        with pytest.raises(PlanError) as refused:
            ask()
        text = re.sub(r"\S*/(\w+\.py)", r"\1", re.sub(r"(\.py):\d+", r"\1:LINE", str(refused.value)))
        assert "\n  try  " in text, f"{name}: {text}"
        texts.append(f"# {name}\n{text}\n")
    golden("refusal_plans", "\n".join(texts))
