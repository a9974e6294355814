"""Steps whose gradients are compressed, on simulated ranks: nothing of a gradient gets lost, replicas stay the same,
and with a codec that loses nothing the step is that of one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compressing import COMPRESSED, MESHES, Compressed, Small, Wire, numbers
from golden import golden
from torch import nn

import mycel
from mycel.errors import PlanError
from mycel.ir import Role, Type
from mycel.launch import launch
from mycel.message_state import MessageState, lossy_of, name_of
from mycel.ops import collective, o
from mycel.ops.codec_kernels import EIGHT_BITS, codec_of
from mycel.ops.collective import COMMUNICATORS
from mycel.plan import Plan
from mycel.plan.links import message
from mycel.planning import planned
from mycel.run import emit, simulate
from mycel.run.kernels import write_into
from mycel.run.simulate import spread_out

CODECS = ["bf16", "int8", "int4", "int8+stochastic", "int8+ef", "fp16+ef", "int4+ef", "sign+ef", "topk(0.05)+ef",
          "randomk(0.2)+ef", "int4+stochastic+ef", "int8+ef21", "topk(0.1)+ef21", "powersgd(3)+ef",
          "powersgd(2)+ef21", "int4+loco", "sign+loco(0.2)", "topk(0.1)+dgc", "randomk(0.2)+dgc(0.5)"]  # fmt: skip


@pytest.mark.parametrize("kind, memory", [*((kind, "+ef") for kind in MESHES), ("dp", ""), ("zero 1", "+ef21")])
def test_with_a_codec_that_loses_nothing_the_step_is_that_of_one_device(kind, memory):
    case = Compressed({**MESHES[kind], "codec": f"fp32{memory}"})
    values = case.values()
    wanted, got = case.serial(values), case.ranks(values)
    for name, want in wanted.items():
        if not name.startswith("error"):
            torch.testing.assert_close(case.whole(name, got[name], want), want, rtol=1e-4, atol=1e-5)
    assert "encode" in str(case.lowered.program)
    assert wanted.keys() == got.keys()


def received(case: Compressed, name: str, values: dict[str, Any], after: dict[str, Any]) -> torch.Tensor:
    """The gradient that SGD with lr 0.01 was given."""
    before = values[f"parameter {name}"]
    return (before - case.whole(f"parameter {name}", after[f"parameter {name}"], before)) / 0.01


SCATTERED = ["int8+ef", "int4+loco", "topk(0.1)+dgc", "topk(0.1)+ef21", "randomk(0.2)+ef", "powersgd(3)+ef"]


@pytest.mark.parametrize("kind, codec", [*(("dp", codec) for codec in CODECS), *(("zero 3", c) for c in SCATTERED)])
def test_what_is_received_and_what_is_kept_are_all_there_was(kind, codec):
    """ef: gradient + old errors = received + new errors.  ef21: gradient = received + what ranks have yet to say.
    loco: the new error is an average of the old one and of what was lost.  dgc: as ef, of momentum."""
    case = Compressed({**MESHES[kind], "codec": codec})
    values = case.values()
    exact = Compressed({**MESHES[kind], "codec": "exact"})
    plain = {name: values[name] for name in exact.names}
    wanted, got = exact.serial(plain), case.ranks(values)
    for name in COMPRESSED:
        gradient = (values[f"parameter {name}"] - wanted[f"parameter {name}"]) / 0.01
        came, error = received(case, name, values, got), f"error of {name} over dp"
        assert torch.isfinite(came).all()
        if codec.endswith("+ef"):
            before, after = values[error], case.whole(error, got[error], values[error])
            torch.testing.assert_close(came + after, gradient + before, rtol=1e-3, atol=2e-4)
            assert after.norm() < (gradient + before).norm() * case.plan.mesh["dp"]
        elif "+loco" in codec:
            before, after = numbers(values[error]), case.whole(error, got[error], values[error])
            lost, share = gradient + before - came, 0.2 if "0.2" in codec else 0.5
            want = (1 - share) * before + share * lost
            # each rank rounds its part to two bits behind the first
            room = 2.0**-2 * sum(numbers(x).abs() for x in got[error]) + 1e-4
            assert ((after - want).abs() <= room).all() and not torch.equal(after, before)
        elif "+dgc" in codec:
            velocity = f"velocity of {name} over dp"
            momentum = (0.5 if "0.5" in codec else 0.9) * values[velocity] + gradient
            after = case.whole(error, got[error], values[error])
            torch.testing.assert_close(came + after, momentum + values[error], rtol=1e-3, atol=2e-4)
            for u, v in zip(got[velocity], got[error], strict=True):  # what was sent has no velocity
                assert 0.05 < (u == 0).float().mean() < 0.6 and ((v != 0) | (u == 0)).all()
        elif codec.endswith("+ef21"):
            kept, total = (f"error of {name} over dp", f"outer received of {name}")
            torch.testing.assert_close(came, case.whole(total, got[total], values[total]), rtol=1e-3, atol=2e-4)
            moved = case.whole(kept, got[kept], values[kept]) - values[kept]
            torch.testing.assert_close(came - values[total], moved, rtol=1e-3, atol=2e-4)
        else:
            torch.testing.assert_close(came, gradient, rtol=0, atol=float(gradient.abs().max()) * 0.6)
            assert not torch.equal(came, gradient)


def test_along_other_axes_sums_are_exact_and_come_first():
    """Encoded bytes travel along dp alone, and once, however many microbatches there are."""
    for kind in ("two levels", "microbatches"):
        lowered = Compressed({**MESHES[kind], "codec": "int8+ef"}).lowered.program
        chunks = ("exchange_chunks", "gather_chunks")  # two ranks tell each other all they have
        sent = [e for block in lowered.blocks.values() for e in block.eqns if message(e)[0] in chunks]
        assert sent and all(e.params["axes"] == ("dp",) and e in lowered.main.eqns for e in sent)
        if kind == "two levels":
            exact = [e for e in lowered.main.eqns if message(e)[1] == ("near",)]
            assert sum(v.type.numel for e in exact for v in e.vars) >= 2 * 40 * 67


@pytest.mark.parametrize(
    "codec",
    [
        "int8+ef",
        "int4+stochastic",
        "randomk(0.2)+ef",
        "topk(0.05)+ef21",
        "powersgd(2)+ef",
        "int4+loco",
        "topk(0.1)+dgc",
    ],
)
def test_replicas_are_the_same_to_the_bit(codec):
    case = Compressed({"mesh": {"dp": 4}, "codec": codec})
    got = case.ranks(case.values())
    for name, parts in got.items():
        if name.startswith(("parameter", "outer", "counter")):
            assert all(torch.equal(x, parts[0]) for x in parts), name


@pytest.mark.parametrize("codec", ["int8+ef", "topk(0.1)+ef21", "powersgd(2)+ef", "int4+loco", "topk(0.1)+dgc"])
def test_a_skipped_step_keeps_errors(codec):
    case = Compressed({"mesh": {"dp": 2}, "codec": codec})
    values = case.values(poison=True)
    got = case.ranks(values)
    assert int(got["counter skipped"][0]) == 1
    for name, parts in got.items():
        if name.startswith(("error", "velocity", "outer", "parameter")):
            assert torch.equal(case.whole(name, parts, values[name]), numbers(values[name]))


@pytest.mark.parametrize("codec", ["int8+ef", "int8+loco", "randomk(0.5)+dgc"])
def test_errors_are_kept_without_the_loss_scale(codec):
    """Twice the scale: the same errors."""
    case = Compressed({"mesh": {"dp": 2}, "codec": codec}, precision="fp16")
    values = case.values()
    double = values | {"counter loss_scale": values["counter loss_scale"] * 2}
    once, twice = case.ranks(values), case.ranks(double)
    kept = [name for name in once if name.startswith(("error of up", "velocity of up"))]
    assert kept
    for name in kept:
        for a, b in zip(once[name], twice[name], strict=True):
            torch.testing.assert_close(numbers(a), numbers(b), rtol=0.26 if "loco" in codec else 1e-2, atol=1e-4)


@pytest.mark.parametrize("codec", ["int8+ef", "topk(0.05)+ef", "randomk(0.2)+ef", "int4+stochastic", "sign+ef21"])
def test_two_ranks_tell_each_other_all_they_have(codec):
    """In one message, of as many bytes as two would be; what comes is the sum of what both have said, to the bit."""
    case = Compressed({"mesh": {"dp": 2}, "codec": codec})
    eqns = case.lowered.program.main.eqns
    kinds = [message(e)[0] for e in eqns]
    assert kinds.count("gather_chunks") == 1 and "exchange_chunks" not in kinds
    values = case.values()
    got = case.ranks(values)
    for name, parts in got.items():
        if name.startswith(("parameter", "outer")):
            assert torch.equal(parts[0], parts[1]), name
    size = codec_of(codec.rpartition("+")[0] if "+ef" in codec else codec).size(40 * 67)
    exact = 4 * (67 + 40 * 5 + 5)
    assert mycel.lower.sent(case.lowered.program)["dp",] == pytest.approx(2 * size + exact, rel=0.03)


def test_the_bytes_sent_are_those_of_the_codec():
    """2 (n - 1) / n of the encoded size along a ring, and exactly what is not compressed beside it."""
    case = Compressed({"mesh": {"dp": 4}, "codec": "int8+ef"})
    sent = mycel.lower.sent(case.lowered.program)["dp",]
    n = 40 * 67
    row = -(-n // 4)
    encoded = 2 * 4 * (-(-row // 256) * 260)
    exact = 4 * (67 + 40 * 5 + 5)
    assert abs(sent - 2 * 3 / 4 * (encoded + exact)) <= 0.03 * sent


class Apart(nn.Module):
    """Gradients of one rank's rows have a large part that cancels over both ranks, and a small one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(32, 8))

    def forward(self, x, y):
        return 0.5 * ((x @ self.w.T - y) ** 2).sum(1).mean()


def converged(codec: str, steps: int = 120) -> float:
    """How far from the best weights the step ends, where gradients are small."""
    gen = torch.Generator().manual_seed(0)
    half = torch.randn(16, 8, generator=gen)
    half = 0.3 * (half - half.mean(0)) / half.std(0)
    half[:, 0] = 1.0
    best = torch.ones(32, 8)
    x, away = half.repeat(2, 1), torch.tensor([3.0, -3.0]).repeat_interleave(16)[:, None]
    model, batch = Apart(), {"x": x, "y": x @ best.T + away}
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": {"w": codec}}})
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), plan=plan, compile=False)
    unsharded = step.unsharded(**batch)
    lowered = planned(step._task(unsharded), plan)[1]
    program = unsharded.program
    state: dict[str, list[torch.Tensor]] = {}
    for v, layout in zip(program.inputs, lowered.spread.inputs, strict=True):
        role = program.role(v)
        value = batch[role.name] if role.kind == "batch" else torch.full(v.shape, 0.5 if role.name == "lr" else 0)
        state[v.name] = spread_out(value.to(v.dtype), layout, plan.mesh)
    for _ in range(steps):
        outs = simulate(lowered.program, plan.mesh, list(state.values()))
        state |= dict(zip(program.updates, outs[len(outs) - len(program.updates) :], strict=True))
    w = state[program.by_role()[Role("parameter", "w")].name][0]
    return float((w - best)[:, 1:].abs().mean())


@pytest.mark.parametrize("memory", ["ef", "ef21", "loco"])
def test_error_feedback_converges_where_plain_compression_does_not(memory):
    assert converged("int4") > 0.9
    assert converged(f"int4+{memory}") < 0.2


def test_in_two_processes_and_on_from_a_checkpoint_to_the_bit(tmp_path):
    child = str(Path(__file__).parent / "compress_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([str(tmp_path)], 2, program=[child], env=env, logs=tmp_path / "logs") == 0
    for name in ("mixed", "dgc", "one bit"):
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert all(torch.equal(x, second[k]) for k, x in first.items())


def test_errors_are_kept_in_8_bits_or_more_as_the_next_plan_says():
    """From ef to loco and back; and what is owed is what was lost, not what EF21 has said so far."""
    state, role = MessageState(None), Role("error", of="w", over="dp")
    ef21_role = Role("error", of="v", over="dp")
    state.held = {role: torch.randn(50), ef21_role: torch.ones(2), Role("outer", "received", of="v"): torch.ones(2)}
    before = state.held[role].clone()
    small = state.value(role, Type(EIGHT_BITS, (50,)), torch.device("cpu"))
    assert small.dtype == EIGHT_BITS and ((numbers(small) - before).abs() <= before.abs() / 8 + 1.3).all()
    kept = before.abs() < 1.7  # more is cut off
    assert ((numbers(small) - before).abs() <= before.abs() / 8)[kept].all()
    assert torch.equal(state.value(role, Type(torch.float32, (50,)), torch.device("cpu")), numbers(small))
    assert lossy_of(state.held) == {"w": "dp"}
    state.take({name_of(r): x for r, x in state.held.items()}, True, lambda own: [own, {"of another stage": "dp"}])
    assert state.lossy == {"w": "dp", "of another stage": "dp"}
    state.drop({"w"})
    assert state.lossy == {"of another stage": "dp"} and len(state.held) == 2


def test_small_tensors_vectors_and_what_is_said_to_stay_exact(monkeypatch):
    shapes = {"a.weight": (64, 64), "a.bias": (8192,), "b.weight": (8, 8), "router.weight": (128, 64), "c.w": (99, 99)}
    plan = lambda how: Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": how}})
    assert set(plan("int8").compressed().of(shapes)) == {"a.weight", "c.w"}
    gates = {"mlp.gate.weight": (64, 2048), "ffn.gate.weight": (2048, 512)}  # of experts, of a gated layer
    assert set(plan("int8").compressed().of(gates)) == {"ffn.gate.weight"}
    given = plan({"c.*": "exact", "router.*": "int4+ef", "*": "int8"}).compressed().of(shapes)
    assert {name: str(how) for name, how in given.items()} == {"a.weight": "int8", "router.weight": "int4+ef"}
    assert Plan.read({"mesh": {"dp": 1}, "batch": ["dp"], "compress": {"dp": "int8"}}).compressed() is None


def refused(plan: dict[str, Any]) -> str:
    """What is said of a plan for `Counting`."""
    model = Counting()
    with pytest.raises(PlanError) as error:
        given = Plan.read({"mesh": {"dp": 2, "tp": 2}, "batch": ["dp"], **plan})
        step = mycel.train_step(model, torch.optim.SGD(model.parameters()), plan=given, compile=False)
        step.unsharded(x=torch.randn(4, 40), y=torch.zeros(4, dtype=torch.int64))
    return str(error.value)


class Counting(Small):
    """With a tensor of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


BAD = [
    *({"compress": how} for how in (
        {"dp": "int9+ef"}, {"tp": "int8"}, {"pp": "int8"}, {"dp": "int8", "tp": "int8"}, "int8",
        {"dp": {"*.nothing": "int8"}}, {"dp": {"seen": "int8"}}, {"dp": {"up.*": "topk(3)+ef"}}, {"dp": "topk(0.01)"},
        {"dp": {"*.bias": "powersgd(2)+ef"}}, {"dp": "powersgd(0)+ef"}, {"dp": {"up.weight": "powersgd(41)+ef"}},
        {"dp": "int8(block=17)"}, {"dp": "sign"}, {"dp": "randomk(0.1)+stochastic+ef"}, {"dp": "int8+loco(7)"},
        {"dp": {"up.weight": "sign+adam"}}, {"dp": "1bit-adam"}, {"dp": "int8+dgc"},
    )),
    {"compress": {"dp": "1bit-adam(5)"}, "zero": "1 over dp"},
    {"gather": {"dp": "int8"}, "zero": "2 over dp"},
    {"gather": {"dp": "int8+ef"}},
    {"gather": {"dp": "powersgd(2)+ef"}, "zero": "1 over dp"},
    {"gather": {"dp": "int8+ef"}, "zero": "3 over dp"},
    {"gather": {"dp": "auto"}, "zero": "3 over dp"},
    {"send": {"stages": "int8"}},
    {"send": {"pp": "int8"}},
    {"send": {"experts": "int8+ef"}},
    {"send": {"experts": "topk(0.1)+ef"}},
    {"gather": "int8", "zero": "3 over dp"},
]  # fmt: skip


def test_what_is_said_of_bad_plans():
    golden("compress_refusals", "\n\n".join(f"{yaml.safe_dump(plan).strip()}\n  => {refused(plan)}" for plan in BAD))


def test_an_error_is_added_to_over_its_own_memory():
    """As generated code writes it, where nobody else reads what the first encoding has left."""
    x, row = torch.arange(7.0), torch.tensor([10.0, 20.0, 30.0])
    COMMUNICATORS.append(Wire(x, place=2))
    try:
        added = o.add_own_row(x, row, axes=("dp",), count=3)
        assert added.tolist() == [0, 1, 2, 3, 4, 5, 16] and x.tolist() == list(range(7))
        over = eval(
            write_into(o.add_own_row, 0, ["x", "row"], {"axes": ("dp",), "count": 3}),
            {"ranks": collective, "x": x, "row": row},
        )
        assert over is x and torch.equal(x, added)
    finally:
        COMMUNICATORS.pop()
    program = Compressed({"mesh": {"dp": 3}, "codec": "int8+ef"}).lowered.program
    source = emit(program, reuse=True, donate=True)
    assert source.count("ranks.added_own_row(") == 2 and source.count("_error.copy_(") == 2
    assert not re.search(r"= torch.where\(.*_error\)", source)
