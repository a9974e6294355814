"""One Plan: written, read back and applied to the same program it gives the same text, and nothing is searched."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from distributing import OneDevice, random_plan, tensors
from models import gpt2, llama
from torch import nn
from torch.nn import functional as F

import mycel
from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.parts import ShardedModel
from mycel.plan import CPU, Plan
from mycel.plan.hardware import KNOWN
from mycel.plan.layouts import Solver
from mycel.planning import Task, planned


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def task(one: OneDevice, given: Plan, compiled: bool = False, budget: int | None = None) -> Task:
    inputs, gathered = ShardedModel(one.model, one.optimizer, given).given(one.unsharded)
    hardware = KNOWN["H100"] if compiled else CPU
    return Task(one.unsharded.program, one.unsharded.body, hardware, compiled, inputs, gathered, budget)


def same_again(one: OneDevice, given: Plan, compiled: bool = False, budget: int | None = None) -> Plan:
    """A plan decided, written, read and applied: equal records, equal programs."""
    work = task(one, given, compiled, budget)
    decided, done = planned(work, given)
    text = str(decided)
    back = Plan.read(yaml.safe_load(text))
    assert back == decided and str(back) == text
    again = lower.lowered(work.program, back)
    assert str(again.program) == str(done.program)
    assert again.regions == done.regions
    return decided


def small_llama(**more):
    return llama(num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=96, **more)


def tokens(rows: int = 4, length: int = 8):
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def no_search(monkeypatch):
    """From here on nothing may be searched for."""

    def refuse(*args, **kwargs):
        raise AssertionError("a decided plan was searched for again")

    def arm():
        monkeypatch.setattr(Solver, "solve", refuse)
        monkeypatch.setattr(plan, "solve", refuse)
        monkeypatch.setattr(plan, "decide", refuse)
        monkeypatch.setattr(plan, "Costs", refuse)

    return arm


@pytest.mark.parametrize("names", ["dp", "tp", "zero1", "zero3", "zero3+tp", "cp", "dp+cp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_ready_plans_are_the_same_when_read_back(names, compiled):
    one = OneDevice.of(small_llama(), tokens(), clip_norm=1.0)
    mesh = Mesh(dp=2, tp=2, cp=2) if "cp" in names else Mesh(dp=2, tp=2)
    decided_plan = same_again(one, Plan.read(names, mesh), compiled)
    assert decided_plan.decided.regions or not compiled


@pytest.mark.parametrize("chunk", range(4))
def test_plans_by_chance_are_the_same_when_read_back(chunk):
    rng = random.Random(f"replay {chunk}")
    model = Mlp()
    one = OneDevice.of(model, {"x": torch.randn(6, 8)}, clip_norm=1.0, accumulate=rng.choice([1, 2]))
    for _ in range(6):
        same_again(one, random_plan(tensors(model), 2, rng), rng.random() < 0.5)


@pytest.mark.parametrize("make", [small_llama, lambda: gpt2(n_layer=2, n_embd=32, n_head=2, vocab_size=96)])
def test_what_backward_computes_again_is_in_the_plan(make):
    one = OneDevice.of(make(), tokens(16, 32))
    given = Plan(Mesh(dp=2), batch=["dp"])
    free = same_again(one, given)
    tight = same_again(one, given, budget=free.held + (free.peak - free.held) * 3 // 4)
    assert tight.peak < free.peak and sum(d.seconds for d in tight.residuals.pairs) > 0
    same_again(one, replace(given, recompute="full"))


def test_nothing_is_searched_for_a_second_time(no_search):
    one = OneDevice.of(small_llama(), tokens())
    work = task(one, Plan.read("zero3+tp", Mesh(dp=2, tp=2)))
    decided, done = planned(work, Plan.read("zero3+tp", Mesh(dp=2, tp=2)))
    no_search()
    again, program = planned(work, Plan.read(yaml.safe_load(str(decided))))
    assert again == decided and str(program.program) == str(done.program)
    with pytest.raises(AssertionError, match="searched for again"):
        planned(work, decided.given)


def test_a_step_takes_the_plan_of_another_step(tmp_path, no_search):
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Mlp()
    first = mycel.train_step(model, torch.optim.AdamW(model.parameters()))
    first.prepare(x)
    path = tmp_path / "plan.yaml"
    path.write_text(str(first.plan))
    no_search()
    second = mycel.train_step(model, torch.optim.AdamW(model.parameters()), plan=path)
    second.prepare(x)
    assert second.plan == first.plan and second.source == first.source
    assert second(x).isfinite()


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import test_plan
from distributing import OneDevice
one = OneDevice.of(test_plan.small_llama(), test_plan.tokens(), clip_norm=1.0)
given = test_plan.Plan.read("zero3+tp", test_plan.Mesh(dp=2, tp=2))
decided, done = test_plan.planned(test_plan.task(one, given), given)
print(decided, end="")
"""


def test_another_process_makes_the_same_plan():
    """Names in a plan do not hang on the order of sets or on object ids."""
    code = CHILD.format(tests=str(Path(__file__).parent))
    texts = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    one = OneDevice.of(small_llama(), tokens(), clip_norm=1.0)
    read = Plan.read(yaml.safe_load(texts[0]))
    planned(task(one, read), read)


def test_a_plan_for_another_model_is_refused_with_what_differs():
    given = Plan(Mesh(dp=2), batch=["dp"])
    one = OneDevice.of(Mlp(), {"x": torch.randn(4, 8)})
    decided = same_again(one, given)

    def other(model: nn.Module, **settings):
        two = OneDevice.of(model, {"x": torch.randn(4, 9 if isinstance(model, Wider) else 8)}, **settings)
        return planned(task(two, decided), decided)

    class Wider(Mlp):
        def __init__(self) -> None:
            super().__init__(9)

    class Tanh(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x))).square().mean()

    class Twice(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x))).square().mean() * 2.0

    with pytest.raises(
        PlanError, match=r"another program\n  differs   in main: input x is f32\[4,9\], in the plan f32\[4,8\]"
    ):
        other(Wider())
    with pytest.raises(PlanError, match=r"another program\n  differs   in main: tanh is not in the plan"):
        other(Tanh())
    with pytest.raises(PlanError, match="another program\n  differs "):
        other(Twice())
    with pytest.raises(PlanError, match="another program\n  differs "):
        other(Mlp(), clip_norm=1.0)
    other(Mlp())


def test_operands_count_though_names_and_types_are_the_same():
    class Either(nn.Module):
        def __init__(self, order: bool) -> None:
            super().__init__()
            self.w, self.order = nn.Parameter(torch.randn(4, 4)), order

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a = x - y if self.order else y - x
            return (a * self.w).sum()

    batch, given = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}, Plan(Mesh(dp=2), batch=["dp"])
    decided = same_again(OneDevice.of(Either(True), batch), given)
    with pytest.raises(PlanError, match="differs   operators, their operands or parameters"):
        planned(task(OneDevice.of(Either(False), batch), decided), decided)


def test_a_plan_for_another_mesh_or_setting_is_refused():
    given = Plan(Mesh(dp=2), batch=["dp"])
    one = OneDevice.of(Mlp(), {"x": torch.randn(4, 8)})
    decided = same_again(one, given)
    with pytest.raises(PlanError, match=r"was decided for Mesh\(dp=2\)\n  asked     Mesh\(dp=4\)"):
        Plan.read(decided, Mesh(dp=4))
    with pytest.raises(PlanError, match=r"was decided for Mesh\(dp=2\)\n  asked     Mesh\(dp=4\)"):
        Plan.read(decided.data(), Mesh(dp=4))
    assert Plan.read(decided.given, Mesh(dp=4)).mesh == Mesh(dp=4)
    edited = Plan.read({**decided.data(), "mesh": {"dp": 4}})
    differs = r"another mesh\n  differs   the mesh is Mesh\(dp=4\), that of the decisions Mesh"
    with pytest.raises(PlanError, match=differs):
        planned(task(one, edited), edited)
    with pytest.raises(PlanError, match="a step that is not compiled, this one is compiled"):
        planned(task(one, decided, compiled=True), decided)
    with pytest.raises(PlanError, match=r"the plan needs .*, the budget is 1 bytes"):
        planned(task(one, decided, budget=1), decided)
    moved = replace(decided, batch=["-", "dp"])
    with pytest.raises(PlanError, match=r"the plan gives x as \[-,dp\], and has decided \[dp,-\]"):
        planned(task(one, moved), moved)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.pop("residuals"), "'residuals' is missing"),
        (lambda d: d.update(colour="red"), "unknown key 'colour'"),
        (lambda d: d["layouts"]["main"]["inputs"].update(x="f32[4@"), "no type with a layout"),
        (lambda d: d["layouts"]["main"]["values"].update(gelu="gelu nonsense"), "no layout of a value"),
        (lambda d: d["residuals"].update(pairs=3), "not iterable"),
    ],
)
def test_a_broken_file_is_refused(change, message):
    one = OneDevice.of(Mlp(), {"x": torch.randn(4, 8)})
    given = Plan(Mesh(dp=2), batch=["dp"])
    data = yaml.safe_load(str(planned(task(one, given), given)[0]))
    change(data["decided"])
    with pytest.raises(PlanError, match=rf"decided cannot be read\n  because   .*{message}"):
        Plan.read(data)


def test_a_plan_without_decisions_says_so():
    with pytest.raises(PlanError, match="nothing is decided in this plan"):
        _ = Plan(Mesh(dp=2)).peak
