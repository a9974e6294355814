"""1-bit Adam: momentum travels, and what Adam divides by is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mycel
from mycel.errors import PlanError
from mycel.ir import Program, type_of
from mycel.plan import Plan
from mycel.plan.links import message
from mycel.planning import planned
from mycel.run import interpret, simulate, simulate_stages
from mycel.run.simulate import put_together, spread_out


class Squares(nn.Module):
    """Matrices that are compressed without being named, and a bias that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x, y):
        return ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()


def one_bit(codec: str, optimizer=torch.optim.AdamW, mesh: Any = None, **written: Any) -> Any:
    """The second phase of 1-bit Adam on ranks: its program, what that becomes, the mesh (of a stage), what goes in."""
    torch.manual_seed(0)
    model, batch = Squares(), {"x": torch.randn(16, 64), "y": torch.randn(16, 64)}
    compress = {"dp": ["exact until 5", codec]}
    plan = Plan.read({"mesh": mesh or {"dp": 2}, "batch": ["dp"], **written, "compress": compress})
    step = mycel.train_step(
        model, optimizer(model.parameters()), plan=plan, compile=False, accumulate=plan.microbatches
    )
    step.set_counters({"taken": torch.tensor(5)})
    unsharded = step.unsharded(**batch)
    lowered = planned(step._task(unsharded), step._given())[1]
    gen, values = torch.Generator().manual_seed(1), {}
    for v in unsharded.program.inputs:
        role = unsharded.program.role(v)
        known = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 5.0}
        if role.kind in ("batch", "parameter"):
            values[str(role)] = batch[role.name] if role.kind == "batch" else model.get_parameter(role.name).detach()
        elif v.ndim:
            values[str(role)] = torch.rand(v.shape, generator=gen) * 0.01
        else:
            values[str(role)] = torch.tensor(known.get(role.name, 0), dtype=v.dtype)
    return unsharded.program, lowered, plan.inside.mesh, values


def named_updates(program: Program, outs: list[Any]) -> dict[str, Any]:
    roles = {v.name: str(program.role(v)) for v in program.inputs}
    return {roles[u]: x for u, x in zip(program.updates, outs[len(outs) - len(program.updates) :], strict=True)}


@pytest.mark.parametrize("optimizer, decoupled", [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_momentum_travels_and_what_adam_divides_by_is_frozen(optimizer, decoupled):
    """m' = b1 m + (1-b1) g and p' = p - lr m'/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) with the t of before; what is not
    compressed is updated by Adam."""
    program, lowered, mesh, values = one_bit("fp32+adam", optimizer)
    spread = [spread_out(x, at, mesh) for x, at in zip(values.values(), lowered.spread.inputs, strict=True)]
    # of a sum over ranks the error is fed back, too
    got = named_updates(program, simulate(lowered.program, mesh, spread))
    model = Squares()
    model.load_state_dict({n: values[f"parameter {n}"] for n in model.state_dict()})
    model(values["batch x"], values["batch y"]).backward()
    twin = optimizer([model.first.bias], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for name, p in model.named_parameters():
        state = {slot: values[f"state {slot} of {name}"].clone() for slot in ("exp_avg", "exp_avg_sq", "step")}
        m, v, e = state["exp_avg"], state["exp_avg_sq"], values.get(f"error of {name} over dp", torch.zeros(()))
        if name.endswith("weight"):
            g, old = p.grad, p.detach().clone()
            m_new = 0.9 * m + 0.1 * (g if decoupled else g + 0.1 * old) + e
            base = old * (1 - 0.01 * 0.1) if decoupled else old
            want = base - 0.01 * m_new / (1 - 0.9**6) / ((v / (1 - 0.99**5)).sqrt() + 1e-8)
            torch.testing.assert_close(got[f"state exp_avg of {name}"][0], m_new, rtol=1e-4, atol=1e-6)
            after = got[f"state exp_avg_sq of {name}"][0]
            torch.testing.assert_close(after / (1 - 0.99**6), v / (1 - 0.99**5), rtol=1e-5, atol=1e-8)
        else:
            twin.state[p] = state
            twin.step()
            want = p.detach()
        torch.testing.assert_close(got[f"parameter {name}"][0], want, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(x, got[f"parameter {name}"][0]) for x in got[f"parameter {name}"])
        assert float(got[f"state step of {name}"][0]) == 6


@pytest.mark.parametrize("written", [
    {"microbatches": 2, "stages": ["first", "second"]},
    {"mesh": {"dp": 2, "tp": 2}, "parameters": {"first.weight": ["tp", "-"], "second.weight": ["-", "tp"]}},
    {"mesh": {"dp": 2, "fs": 2}, "batch": ["dp.fs"], "zero": "3 over fs"},
], ids=["stages", "tp", "zero 3"])  # fmt: skip
def test_momentum_travels_under_any_plan(written):
    """By a codec that loses nothing: the step of one device."""
    program, lowered, mesh, values = one_bit("fp32+adam", **written)
    wanted = named_updates(program, interpret(program, list(values.values())))
    layouts = dict(zip(values, lowered.spread.inputs, strict=True))
    given = {name: spread_out(x, layouts[name], mesh) for name, x in values.items()}
    programs = lowered.pipeline.programs if lowered.pipeline is not None else (lowered.program,)
    inputs = [[given[str(p.role(v))] for v in p.inputs] for p in programs]
    outs = (
        simulate_stages(programs, mesh, "pp", inputs) if len(programs) > 1 else [simulate(programs[0], mesh, inputs[0])]
    )
    got = {name: x for p, own in zip(programs, outs, strict=True) for name, x in named_updates(p, own).items()}
    assert got.keys() == wanted.keys() and any("encode" in str(p) for p in programs)
    for name, want in wanted.items():
        if not name.startswith("error"):
            whole = put_together(got[name], layouts[name], type_of(want), mesh)
            torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-5)


def test_one_bit_adam_sends_a_bit_of_each_element():
    _, lowered, mesh, values = one_bit("sign+adam", mesh={"dp": 4})
    sent = {
        kind: sum(v.type.numel for e in lowered.program.main.eqns if message(e)[0] == kind for v in e.vars if v.ndim)
        for kind in ("exchange_chunks", "gather_chunks")
    }
    row = -(-1024 // 512) * 68  # of each matrix a quarter for each rank
    assert sent == {"exchange_chunks": 2 * 4 * row, "gather_chunks": 2 * row}
    spread = [spread_out(x, at, mesh) for x, at in zip(values.values(), lowered.spread.inputs, strict=True)]
    outs = simulate(lowered.program, mesh, spread)
    for name, parts in named_updates(lowered.program, outs).items():
        if name.startswith(("parameter", "state")):
            assert all(torch.equal(x, parts[0]) for x in parts), name


@pytest.mark.parametrize("codec, optimizer, settings, why", [
    ("sign+adam", torch.optim.SGD, {}, r"momentum of Adam, but the optimiser of first.weight is sgd"),
    ("sign+adam", lambda p: torch.optim.Adam(p, amsgrad=True), {}, "Adam with amsgrad"),
    ("sign+adam", torch.optim.AdamW, {"clip_norm": 1.0}, "first.weight is the momentum of Adam, and clip_norm asks"),
    ("topk(0.1)+dgc", torch.optim.Adam, {}, "ranks keep the momentum of first.weight, but its optimiser is adam"),
    ("topk(0.1)+dgc", lambda p: torch.optim.SGD(p, momentum=0.9), {}, r"SGD with momentum\n  try .* momentum=0"),
])  # fmt: skip
def test_what_travels_must_be_what_the_optimiser_takes(codec, optimizer, settings, why):
    model = Squares()
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": ["exact until 5", codec]}})
    step = mycel.train_step(model, optimizer(model.parameters()), plan=plan, compile=False, **settings)
    step.set_counters({"taken": torch.tensor(5)})
    with pytest.raises(PlanError, match=why):
        step.unsharded(x=torch.randn(4, 64), y=torch.randn(4, 64))
