"""What is measured of gradients, and what follows from it: on simulated ranks, against the formulas."""

from __future__ import annotations

import pytest
import torch
from distributing import start_values
from placing import Towers, one_of, placed_results, task_of
from test_compress import Compressed, Small
from test_forward_stages import unsharded_forward
from torch import nn
from torch.nn.functional import mse_loss

import mycel
from mycel import Plan
from mycel.errors import PlanError
from mycel.local_forward import in_places, of_whole_model
from mycel.monitors import LEAST, monitored
from mycel.ops import o
from mycel.plan import CPU
from mycel.planning import planned
from mycel.transform.monitoring import ERROR, LARGE, SHARE, SMALL


def gradients(values, rows) -> list[torch.Tensor]:
    """Of matrices, of some rows, by torch."""
    model = Small()
    model.load_state_dict({name: values[f"parameter {name}"] for name, _ in model.named_parameters()})
    model(x=values["batch x"][rows], y=values["batch y"][rows]).backward()
    return [p.grad for p in model.parameters() if p.ndim > 1]


@pytest.mark.parametrize("codec, mesh", [
    ("exact", {"mesh": {"dp": 3}}), ("int8+ef", {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2}),
    ("int8+ef", {"mesh": {"dp": 2, "tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}}),
    ("int8+ef", {"mesh": {"dp": 2}, "stages": ["up", "down", "head"], "microbatches": 2}),
])  # fmt: skip
def test_what_is_measured_is_what_the_formulas_say(codec, mesh):
    case = Compressed({**mesh, "codec": codec, "monitor": ["noise", "error"]})
    values, ranks = case.values(), case.plan.mesh["dp"]
    zero = {name: torch.zeros_like(x) for name, x in values.items() if name.startswith(("counter", "error"))}
    values |= zero
    after = case.ranks(values)
    rows = torch.arange(24).view(case.plan.microbatches, ranks, -1)  # of each microbatch each rank has some
    squares = [sum(float(g.square().sum()) for g in gradients(values, rows[:, i].flatten())) for i in range(ranks)]
    large = sum(float(g.square().sum()) for g in gradients(values, slice(None)))
    got = {name: x[0] for name, x in after.items() if name.startswith("counter")}
    assert float(got[f"counter {SMALL}_{ranks}"]) == pytest.approx(SHARE * sum(squares) / ranks, rel=1e-3)
    assert float(got[f"counter {LARGE}_{ranks}"]) == pytest.approx(SHARE * large, rel=2e-2)
    counters = {name.removeprefix("counter "): x for name, x in got.items()}
    measured = monitored(counters, {ranks})
    small = sum(squares) / ranks
    variance = (small - large) / (ranks - 1)
    assert measured["gradient_variance"] == pytest.approx(SHARE * variance, rel=5e-2)
    noise = variance / max(large - variance, LEAST * small)
    assert measured["batch_factor"] in (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
    assert measured["noise_scale"] == pytest.approx(noise, rel=0.1) or large - variance < 0.1 * large
    if codec != "exact":
        errors = [parts for name, parts in after.items() if name.startswith("error")]
        left = sum(float(x.square().sum()) for parts in errors for x in parts)
        assert counters[f"{ERROR}_0"] == pytest.approx(SHARE * left, rel=1e-3)
        assert 0 < measured["compression_error_0"] < 0.2


@pytest.mark.parametrize("noise, factor", [(0.01, 1 / 8), (0.3, 1 / 4), (0.9, 1.0), (1.6, 2.0), (5.0, 4.0), (1e5, 8.0)])
def test_the_batch_that_is_suggested_follows_the_noise(noise, factor):
    """Of four ranks: variance v and a square 1 of the mean gradient, v = noise."""
    counters = {f"{SMALL}_4": torch.tensor(1 + 4 * noise), f"{LARGE}_4": torch.tensor(1 + noise)}
    measured = monitored(counters, {4})
    assert measured["noise_scale"] == pytest.approx(noise, rel=1e-2) and measured["batch_factor"] == factor


def test_variances_of_sub_models_add_up_each_by_its_ranks():
    """Of two ranks (8 - 6) / 1, of four (9 - 6) / 3; a rank's own gradients have 8 / 2 + 9 / 4.  What other numbers of
    ranks left behind does not count."""
    squares = {f"{SMALL}_2": 8.0, f"{LARGE}_2": 6.0, f"{SMALL}_4": 9.0, f"{LARGE}_4": 6.0, f"{SMALL}_3": 99.0}
    counters = {name: torch.tensor(x) for name, x in (squares | {f"{ERROR}_0": 1.0}).items()}
    measured = monitored(counters, {2, 4, 1})
    assert measured["gradient_variance"] == pytest.approx(3.0)
    assert measured["noise_scale"] == pytest.approx(3.0 / (12.0 - 3.0))
    assert measured["compression_error_0"] == pytest.approx((1.0 / 6.25) ** 0.5)


def test_stages_tell_each_other_what_they_measured_not_their_gradients():
    stages = {"mesh": {"dp": 2}, "stages": ["up", "down", "head"], "microbatches": 2, "codec": "exact"}
    sent = []
    for monitor in ([], ["noise"]):
        programs = Compressed({**stages, "monitor": monitor}).lowered.pipeline.programs
        begun = [e for p in programs for e in p.main.eqns if e.op is o.begin_send]
        sent.append(sum(v.type.bytes for e in begun for v in e.vars))
    assert sent[0] == sent[1] > 0


def test_sub_models_on_meshes_of_their_own_are_measured_each_by_its_ranks():
    """The towers of two and of three ranks, whose loss is a sum over rows, against torch; every place knows of all."""
    plan = Plan.read({"place": {"vision": [0, 1], "*": [2, 3, 4]}, "batch": ["dp"], "monitor": ["noise"]})
    torch.manual_seed(0)
    batch = {"pixels": torch.randn(12, 6).double(), "ids": torch.randint(0, 11, (12, 3))}
    one = one_of(Towers(1).double(), batch, plan)
    done = planned(task_of(one, plan), plan)[1]
    serial = one.unsharded.program
    given = {str(serial.role(v)): x for v, x in zip(serial.inputs, start_values(one), strict=True)}
    model = Towers(1).double()
    model.load_state_dict({name: given[f"parameter {name}"] for name, _ in model.named_parameters()})

    def square(rows, of_vision: bool) -> float:
        model.zero_grad()
        model(given["batch pixels"][rows], given["batch ids"][rows]).backward()
        own = [p for name, p in model.named_parameters() if name.startswith("vision") == of_vision and p.ndim > 1]
        return sum(float(p.grad.square().sum()) for p in own)

    for program, results in zip(done.pipeline.programs, placed_results(one, plan, done), strict=True):
        new = dict(zip(program.updates, results[-len(program.updates) :], strict=True))
        for ranks in (2, 3):
            small = ranks * sum(square(rows, ranks == 2) for rows in torch.arange(12).view(ranks, -1))
            for name, now in ((f"{SMALL}_{ranks}", small), (f"{LARGE}_{ranks}", square(slice(None), ranks == 2))):
                wanted = (1 - SHARE) * float(given[f"counter {name}"]) + SHARE * now
                assert float(new[name]) == pytest.approx(wanted, rel=1e-4), (name, program.updates)


def test_the_codec_follows_the_number_of_steps_or_what_was_measured():
    def step_of(compress) -> mycel.step.Step:
        model = nn.Linear(64, 128)
        plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": compress})
        return mycel.train_step(model, torch.optim.SGD(model.parameters()), mse_loss, plan=plan, compile=False)

    batch = torch.randn(8, 64), torch.randn(8, 128)
    encoded = lambda step: "compressed(" in str(step.unsharded(*batch).program)
    step = step_of({"dp": ["exact until 2", "powersgd(2)+ef until 5", "int8+ef"]})
    kinds = []
    for steps in range(7):
        step.set_counters({"taken": torch.tensor(steps)})
        kinds.append(step._phase())
    assert kinds == [0, 0, 1, 1, 1, 2, 2] and encoded(step)
    step.set_counters({})
    assert not encoded(step) and step.counters() == {"taken": torch.tensor(0)}
    step = step_of({"dp": "int8+ef", "when": "noise > 2"})
    assert not encoded(step)
    for small, large, now in ((2.0, 1.5, 0), (1.1, 0.6, 1)):  # a noise of 0.5, and of 5
        step.set_counters({f"{SMALL}_2": torch.tensor(small), f"{LARGE}_2": torch.tensor(large)})
        assert step._phase() == now
    assert encoded(step)


@pytest.mark.parametrize("compress", [
    {"dp": ["exact until 2", "int8+ef"]}, {"dp": "int8+ef", "when": "noise > 2"}, {"dp": "1bit-adam(5)"},
])  # fmt: skip
@pytest.mark.parametrize("more", [
    {"mesh": {"dp": 2}, "zero": "1 over dp"}, {"mesh": {"dp": 2}, "stages": ["up", "down"], "microbatches": 2},
    {"place": {"up": [0, 1], "*": [2, 3]}},
], ids=["zero", "stages", "places"])  # fmt: skip
def test_a_loss_without_a_step_is_the_same_however_gradients_travel(compress, more):
    """Also where that changes as a run goes on."""

    def evaluated(plan: Plan) -> list[str]:
        model, batch = Small(), {"x": torch.randn(24, 40), "y": torch.randint(0, 5, (24,))}
        step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), plan=plan, compile=False)
        parts, forward = step.parts, unsharded_forward(model, model, batch)
        parts.given(step.unsharded(**batch))
        parts.is_split = True
        if not plan.place:
            return [str(of_whole_model(parts, forward, CPU).program)]
        parts.owners = parts.users = {name: (0 if name.startswith("up") else 1,) for name in parts.shapes}
        return list(map(str, in_places(parts, forward, CPU).pipeline.programs))

    zero = {k: v for k, v in more.items() if k != "zero" or "1bit" not in str(compress)}
    said = {"batch": ["dp"], **zero}
    assert evaluated(Plan.read({**said, "compress": compress})) == evaluated(Plan.read(said))


@pytest.mark.parametrize("plan, why", [
    ({"monitor": ["nose"]}, r"monitor: 'nose'\n  known     noise, variance, error\n  try       noise"),
    ({"compress": {"dp": "int8", "when": "loud"}}, "when: noise > 2"),
    ({"compress": {"dp": ["exact until 5", "int8+ef until 3", "int8"]}}, "steps that grow"),
    ({"compress": {"dp": ["exact until 5"]}}, "one for good at the end"),
    ({"compress": {"dp": ["exact until 5", "int9"]}}, "there is no codec 'int9'"),
])  # fmt: skip
def test_refusals(plan, why):
    with pytest.raises(PlanError, match=why):
        Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], **plan})
