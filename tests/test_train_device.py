"""What a step is given: its device, its seed, its learning rate."""

from __future__ import annotations

import mmap
import random
import re
import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.errors import PlanError, TrainError
from mycel.plan import Plan
from mycel.train import device
from mycel.train.config import load
from mycel.train.ranks import team
from mycel.train.schedule import KINDS, learning_rate, warmup_steps

few = settings(max_examples=60, deadline=None)

# The learning rate.

schedules = st.integers(1, 300).flatmap(
    lambda steps: st.fixed_dictionaries({
        "lr": st.floats(1e-6, 1.0),
        "kind": st.sampled_from(KINDS),
        "steps": st.just(steps),
        "warmup": st.one_of(st.integers(0, steps - 1), st.floats(0, 0.9)),
        "min_lr": st.floats(0, 1),
    })
)  # fmt: skip


@given(schedules)
@few
def test_the_rate_rises_to_lr_then_falls_to_the_floor(s):
    rates = [learning_rate(step, **s) for step in range(s["steps"] + 3)]
    lr, floor, w = s["lr"], s["min_lr"] * s["lr"], warmup_steps(s["warmup"], s["steps"])
    assert rates[0] > 0
    assert all(a < b for a, b in pairwise(rates[: w + 1]))
    if w == s["steps"]:
        return
    assert rates[w] == pytest.approx(lr)
    assert w == 0 or rates[w] - rates[w - 1] == pytest.approx(lr / (w + 1))  # the last rise is as the others: no jump
    if s["kind"] == "constant":
        assert set(rates[w:]) == {lr}
        return
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[w:]))
    assert all(floor - 1e-12 <= rate for rate in rates[w:])
    assert rates[s["steps"] - 1] - floor <= (lr - floor) / (s["steps"] - w) + 1e-12
    assert rates[s["steps"]] == rates[s["steps"] + 2] == pytest.approx(floor, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    "name, kind, min_lr", [("cosine", "cosine", 0.0), ("linear", "linear", 0.0), ("cosine_with_min_lr", "cosine", 0.1)]
)
def test_the_rate_is_that_of_transformers(name, kind, min_lr, warmup):
    from transformers import get_scheduler

    def theirs(warmup: int, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        extra = {"scheduler_specific_kwargs": {"min_lr_rate": min_lr}} if min_lr else {}
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, **extra)
        rates = []
        for _ in range(steps):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return rates

    ours = [learning_rate(step, lr=0.3, kind=kind, steps=40, warmup=warmup, min_lr=min_lr) for step in range(40)]
    assert ours[warmup:] == pytest.approx(theirs(warmup, 40)[warmup:], rel=1e-12)
    assert ours[:warmup] == pytest.approx(theirs(warmup + 1, 41)[1 : warmup + 1], rel=1e-12)


def test_a_fraction_of_warm_up_and_an_unknown_schedule():
    assert [warmup_steps(w, 300) for w in (0, 0.05, 0.0501, 1, 100, 100.0)] == [0, 15, 16, 1, 100, 100]
    with pytest.raises(TrainError, match=r"(?s)'cosin'.*schedule\.kind.*cosine, linear, constant"):
        learning_rate(0, lr=1, kind="cosin", steps=1, warmup=0, min_lr=0)


# The device.


def test_choosing_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == device.choose("cpu") == torch.device("cpu")
    with pytest.raises(
        TrainError,
        match=r"(?s)'cuda' was asked for, but .*\n  at        train\.device\n  try       train\.device=auto, or cpu",
    ):
        device.choose("cuda")
    for name in ("gpu", "cuda:", "cuda:-1", "CUDA", "auto:1", ""):
        with pytest.raises(TrainError, match=re.escape(f"device {name!r} is not known")):
            device.choose(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose("auto") == device.choose("cuda") == torch.device("cuda", 0)
    assert device.choose("cuda:1") == torch.device("cuda", 1)
    assert device.choose("cpu") == torch.device("cpu")
    with pytest.raises(TrainError, match="'cuda:2' was asked for, but there is only cuda:0 to cuda:1"):
        device.choose("cuda:2")


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312e12),
        ("NVIDIA L40S", "fp16", 362e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA H200", "int8", None),
        ("", "bf16", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, precision, peak):
    assert device.peak_of(name, precision) == peak


def test_every_entry_finds_itself_and_faster_formats_are_faster():
    for name, (half, tf32, full) in device.PEAKS.items():
        assert device.peak_of(f"NVIDIA {name}-80GB", "fp16") == half * 1e12
        assert half > full and (tf32 == 0 or half >= tf32 >= full)
    assert device.peak_flops(torch.device("cpu"), "fp32") is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_the_peak_of_the_cpu_is_that_of_the_process():
    cpu, page = torch.device("cpu"), resource.getpagesize()
    resident = lambda: page * int(Path("/proc/self/statm").read_text().split()[1])
    held = mmap.mmap(-1, 64 * 2**20)  # not malloc's: it may hold freed memory, and give that out again
    held.write(bytes(64 * 2**20))
    assert device.memory_peak(cpu) >= resident() - 2**20
    held.close()
    assert device.memory_peak(cpu) - resident() > 32 * 2**20
    assert re.fullmatch(r"cpu, .+, 1 thread", device.describe(cpu)) or torch.get_num_threads() > 1


@given(st.integers(0, 2**63 - 1))
@few
def test_a_seed_fixes_every_generator(seed):
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    device.seed_all(seed)
    first = draw()
    assert draw() != first
    device.seed_all(seed)
    assert draw() == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu():
    gpu = device.choose("cuda")
    before = torch.cuda.memory_allocated(gpu)
    held = torch.ones(2**20, device=gpu)
    assert device.memory_peak(gpu) >= before + held.nbytes
    assert torch.cuda.get_device_name(gpu) in device.describe(gpu)


@pytest.mark.parametrize(
    "plan, message",
    [
        ("tpp", "there is no plan 'tpp'"),
        ("dp+no", "'no'"),
        ("no.yaml", "no.yaml"),
        ("pp", r"try       \{stages: 2\}, a pipeline"),
    ],
)
def test_a_plan_that_is_not_there_is_told_of_on_one_device(plan, message):
    with pytest.raises(PlanError, match=message):
        team(load(None, [f"parallel.plan={plan}"]))
    assert team(load(None, ["parallel.plan=tp"])).plan is None


@pytest.mark.parametrize(
    "content, message",
    [
        (b"mesh: {dp: 2", "the plan is not YAML: .*\\n  at        .*plan.yaml:\\d+:\\d+\\n  try "),
        (b"\x9d\xff", "the plan is not text\\n  at        .*plan.yaml\\n  try       a YAML file saved as UTF-8"),
        (b"[1, 2]", "a plan is a mapping\\n  at        .*plan.yaml"),
    ],
    ids=["broken", "binary", "list"],
)
def test_a_plan_that_cannot_be_read_is_told_of_on_one_device(content, message, tmp_path):
    (tmp_path / "plan.yaml").write_bytes(content)
    with pytest.raises(PlanError, match=message):
        team(load(None, [f"parallel.plan={tmp_path / 'plan.yaml'}"]))
    with pytest.raises(PlanError, match=r"there is no plan .*plans.yaml\n  try       .*/plan.yaml"):
        team(load(None, [f"parallel.plan={tmp_path / 'plans.yaml'}"]))
    with pytest.raises(PlanError, match="cannot read the plan: Is a directory"):
        Plan.read(tmp_path)
