"""What `compress: auto` comes to, by given figures of links and codecs, and what it says of that."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import mycel
from mycel.errors import PlanError
from mycel.plan import CPU, Plan
from mycel.plan.compression import choice_text, least_lossy, usual_loss
from mycel.plan.links import Link

AUTO = {"batch": ["dp"], "compress": {"dp": "auto"}}


def chosen(link: Link, monkeypatch, plan: Any = None, hardware: Any = None) -> tuple[Plan, str]:
    """What `auto` comes to over such a link, and the program it makes, or those of all stages."""
    hardware = hardware or replace(CPU, levels=(link,))
    monkeypatch.setattr("mycel.plan.hardware_of", lambda device, local=0: hardware)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    plan = plan or Plan.read({"mesh": {"dp": 2}, **AUTO})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mycel.train_step(model, optimizer, nn.functional.mse_loss, plan=plan, compile=False)
    batch = torch.randn(64, 512), torch.randn(64, 512)
    _, decided, lowered = step._planned(batch, {}, (batch, {}))
    programs = [lowered.program] if lowered.pipeline is None else lowered.pipeline.programs
    return decided, "\n".join(map(str, programs))


def test_auto_compresses_where_the_clock_says_so_and_says_why_not(monkeypatch):
    slow, program = chosen(Link(1e7, 1e-4), monkeypatch)
    assert slow.decided.compress == "int4+ef" and "encode_residual" in program
    assert re.match(r"along dp int4\+ef: [\d.]+ (ms|s) a step, exact [\d.]+ (ms|s)$", slow.compress_text())
    again, same = chosen(Link(1e12, 1e-7), monkeypatch, Plan.read(yaml.safe_load(str(slow))))  # nothing is chosen anew
    assert same == program and again == slow
    fast, program = chosen(Link(1e12, 1e-7), monkeypatch)
    assert fast.decided.compress == "exact" and "encode" not in program and "all_reduce" in program
    assert "links are fast: compression would cost" in fast.compress_text()


@pytest.mark.parametrize("exact, int8, int4, chosen, said", [
    (0.100, 0.102, 0.101, "exact", "exact: links are fast: compression would cost 1.0 ms a step (int4+ef 101.0 ms,"),
    (0.100, 0.098, 0.096, "exact", "exact: int4+ef would save 4.0%, 5% are asked for what it loses (int4+ef 96.0 ms,"),
    (0.100, 0.090, 0.070, "int4+ef", "int4+ef: 70.0 ms a step, exact 100.0 ms"),
    (0.100, 0.090, 0.087, "int8+ef", "int8+ef: 90.0 ms a step, exact 100.0 ms; int4+ef would save 3.3% more, 5% are"),
    (0.100, 0.050, 0.060, "int8+ef", "int8+ef: 50.0 ms a step, exact 100.0 ms"),
])  # fmt: skip
def test_what_auto_chooses_by_the_seconds_of_a_step_and_what_it_says(exact, int8, int4, chosen, said):
    """What is lost must be worth it: of those that are about as quick as the quickest, the one that loses least."""
    seconds = {"exact": exact, "int8+ef": int8, "int4+ef": int4}
    assert least_lossy(seconds) == chosen
    assert choice_text(seconds, chosen).startswith(said)


def test_auto_takes_no_codec_that_loses_more_than_its_budget(monkeypatch):
    auto = lambda text: Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": text}})
    losses = {codec: usual_loss(codec) for codec in ("exact", "int8+ef", "int4+ef")}
    assert losses["exact"] == 0 and losses["int8+ef"] < 0.01 and 0.05 < losses["int4+ef"] < 0.2
    slow, _ = chosen(Link(1e7, 1e-4), monkeypatch, auto("auto(0.05)"))
    assert slow.decided.compress == "int8+ef" and "int4+ef would lose 0.12 of a gradient" in slow.compress_text()
    none, program = chosen(Link(1e7, 1e-4), monkeypatch, auto("auto(0.001)"))
    assert none.decided.compress == "exact" and "encode" not in program and "int8+ef would lose" in none.compress_text()
    for bad in ("auto(0)", "auto(2)", "auto(x)"):
        with pytest.raises(PlanError, match=r"more than 0 and at most 1\n  try       auto\(0.05\)"):
            auto(bad)


def test_the_clock_prices_codecs_as_they_were_measured(monkeypatch):
    """A slow codec is not worth its bytes."""
    link = Link(2e8, 1e-5)
    quick, _ = chosen(link, monkeypatch)
    kinds = [f"{work}_{name}.fp32" for work in ("residual", "added", "decode", "encode") for name in ("int8", "int4")]
    crawling = replace(CPU, levels=(link,), rates=dict.fromkeys(kinds, ((1e4, 1e5),)))
    slow, _ = chosen(link, monkeypatch, hardware=crawling)
    assert quick.decided.compress != "exact" and slow.decided.compress == "exact"


@pytest.mark.parametrize("more", [
    {"mesh": {"dp": 2}, "stages": ["0", "2"], "microbatches": 2},
    {"place": {"0": [0, 1], "2": [0, 1], "*": [2]}},
    {"place": {"0": [0, 1], "2": [0, 1], "*": [2, 3]}, "microbatches": 2},
], ids=["stages", "one place of several ranks", "places"])  # fmt: skip
def test_auto_prices_each_stage_and_each_place(more, monkeypatch):
    """As anywhere: over slow links it compresses, over fast ones it does not; a plan read back makes the same."""
    plan = Plan.read({**AUTO, **more})
    slow, program = chosen(Link(1e7, 1e-4), monkeypatch, plan)
    assert slow.decided.compress == "int4+ef" and "encode_residual" in program
    again, same = chosen(Link(1e12, 1e-7), monkeypatch, Plan.read(yaml.safe_load(str(slow))))
    assert same == program and again == slow
    fast, program = chosen(Link(1e12, 1e-7), monkeypatch, plan)
    assert fast.decided.compress == "exact" and "encode" not in program
    assert "links are fast" in fast.compress_text()


def test_a_place_is_priced_by_links_between_as_many_ranks(monkeypatch):
    """The message that takes long is one of four ranks: a place of two has no reason to encode."""
    quick, slow = 1e10, 1e6
    measured = tuple((name, k, quick if k == 2 else slow, 1e-6)
                     for name in ("all_reduce", "exchange_chunks", "gather_chunks") for k in (2, 4))  # fmt: skip
    link = Link(slow, 1e-6, measured=measured)
    two = Plan.read({**AUTO, "place": {"0": [0, 1], "2": [0, 1], "*": [2]}})
    four = Plan.read({**AUTO, "place": {"0": ["0..3"], "2": ["0..3"], "*": [4]}})
    assert chosen(link, monkeypatch, two)[0].decided.compress == "exact"
    assert chosen(link, monkeypatch, four)[0].decided.compress == "int4+ef"
