"""Steps whose gradients are compressed, on simulated ranks: nothing of a gradient gets lost, replicas stay the same,
and with a codec that loses nothing the step is that of one device."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from distributing import start_values
from golden import golden
from torch import nn

import mycel
from mycel.errors import PlanError, RunError
from mycel.ir import Mesh, Program, Role, Type, type_of
from mycel.launch import launch
from mycel.message_state import MessageState, lossy_of, name_of
from mycel.ops import collective, o
from mycel.ops.codec_kernels import EIGHT_BITS, EIGHT_BITS_SCALE, codec_of
from mycel.ops.collective import COMMUNICATORS
from mycel.plan import CPU, Plan
from mycel.plan.links import message
from mycel.planning import Task, planned
from mycel.run import emit, interpret, simulate, simulate_stages
from mycel.run.kernels import write_into
from mycel.run.simulate import put_together, spread_out


class Small(nn.Module):
    """Matrices that divide and such that do not, and what is not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 67), nn.Linear(67, 40, bias=False)
        self.head = nn.Linear(40, 5)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.down(torch.relu(self.up(x)))), y)


COMPRESSED = {"up.weight", "down.weight"}


class Compressed:
    """A step under a plan: its serial program beside the ranks', on the same values."""

    def __init__(self, written: dict[str, Any], optimizer: Any = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.batch = {"x": torch.randn(24, 40), "y": torch.randint(0, 5, (24,))}
        optimizer = (optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=1.0)))(self.model)
        patterns = dict.fromkeys(COMPRESSED, written.pop("codec"))
        self.plan = Plan.read({"batch": ["dp"], **written, "compress": {"dp": patterns}})
        step = mycel.train_step(self.model, optimizer, plan=self.plan, compile=False, **settings)
        self.unsharded = step.unsharded(**self.batch)
        task = step._task(self.unsharded)
        task = Task(task.program, task.body, CPU, False, task.inputs, task.gathered)
        self.lowered = planned(task, self.plan)[1]
        self.program = self.unsharded.program
        self.names = [*(str(self.program.role(v)) for v in self.program.inputs)]

    def values(self, poison: bool = False) -> dict[str, torch.Tensor]:
        values = dict(zip(self.names, start_values(self, poison=poison), strict=True))
        return values | {n: values[n] * 0 for n in values if n.startswith("hyper") and not n.startswith("hyper lr")}

    def serial(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.named(interpret(self.program, list(values.values())))

    def named(self, outs: list[Any], program: Program | None = None) -> dict[str, Any]:
        """Results and updates by what they are."""
        program = program or self.program
        n = len(outs) - len(program.updates)
        roles = {v.name: str(program.role(v)) for v in program.inputs}
        return {"loss": outs[0], "norm": outs[1]} | {
            roles[u]: x for u, x in zip(program.updates, outs[n:], strict=True)
        }

    @property
    def programs(self) -> tuple[Program, ...]:
        """What ranks run, stage by stage."""
        return (self.lowered.program,) if self.lowered.pipeline is None else self.lowered.pipeline.programs

    @property
    def mesh(self) -> Mesh:
        """Of the ranks of a stage, where there are several."""
        return self.plan.inside.mesh

    def ranks(self, values: dict[str, torch.Tensor] | dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """On all ranks; values are whole, or lists of the ranks' own."""
        spread = self.lowered.spread
        given = [
            x if isinstance(x, list) else spread_out(x, layout, self.mesh)
            for x, layout in zip(values.values(), spread.inputs, strict=True)
        ]
        if self.lowered.pipeline is None:
            return self.named(simulate(self.lowered.program, self.mesh, given))
        by_name, results = dict(zip(self.names, given, strict=True)), {}
        programs = self.programs
        inputs = [[by_name[str(p.role(v))] for v in p.inputs] for p in programs]
        for program, outs in zip(programs, simulate_stages(programs, self.mesh, "pp", inputs), strict=True):
            results |= self.named(outs, program)
        return results

    def whole(self, name: str, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        layouts = dict(zip(self.names, self.lowered.spread.inputs, strict=True))
        layout = layouts.get(name)
        if like.dtype == EIGHT_BITS:  # torch does not add these up
            parts, like = [numbers(x) for x in parts], numbers(like)
        return parts[0] if layout is None else put_together(parts, layout, type_of(like), self.mesh)

    @property
    def captured(self):  # what `start_values` asks for
        return self.unsharded.captured


def numbers(x: torch.Tensor) -> torch.Tensor:
    """What an error in 8 bits stands for."""
    return x.float() / EIGHT_BITS_SCALE if x.dtype == EIGHT_BITS else x


CODECS = ["bf16", "int8", "int4", "int8+stochastic", "int8+ef", "fp16+ef", "int4+ef", "sign+ef", "topk(0.05)+ef",
          "randomk(0.2)+ef", "int4+stochastic+ef", "int8+ef21", "topk(0.1)+ef21", "powersgd(3)+ef",
          "powersgd(2)+ef21", "int4+loco", "sign+loco(0.2)", "topk(0.1)+dgc", "randomk(0.2)+dgc(0.5)"]  # fmt: skip
MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 3}},
    "dp and tp": {"mesh": {"dp": 2, "tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}},
    "zero 1": {"mesh": {"dp": 2}, "zero": "1 over dp"},
    "zero 3": {"mesh": {"dp": 4}, "zero": "3 over dp"},
    "two levels": {"mesh": {"dp": 2, "near": 2}, "batch": ["dp.near"]},
    "microbatches": {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2},
    "stages": {"mesh": {"dp": 2}, "zero": "1 over dp", "microbatches": 2, "stages": ["up", "down"]},
}


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


@pytest.mark.parametrize("more", [{}, {"stages": ["up", "down"], "microbatches": 2}], ids=["whole", "stages"])
def test_parameters_of_zero3_are_gathered_on_encoded_bytes(more):
    """Exact codec: the step of one device.  int8: fewer bytes, and all compute with what these say."""
    zero3 = {"mesh": {"dp": 2}, "zero": "3 over dp", "codec": "exact", **more}
    exact = Compressed({**zero3, "gather": {"dp": {"*.weight": "fp32"}}})
    values = exact.values()
    wanted, got = exact.serial(values), exact.ranks(values)
    for name, want in wanted.items():
        torch.testing.assert_close(exact.whole(name, got[name], want), want, rtol=1e-4, atol=1e-5)
    plain, int8 = (Compressed({**zero3, "gather": how}) for how in ({}, {"dp": {"up.*": "int8"}}))
    kinds = [{message(e)[0] for p in case.programs for e in p.main.eqns} for case in (plain, int8)]
    assert "gather_chunks" in kinds[1] - kinds[0]
    sent = [sum(mycel.lower.sent(program)["dp",] for program in case.programs) for case in (plain, int8)]
    assert sent[1] < sent[0]
    after = int8.ranks(values)
    for name, want in wanted.items():
        if name.startswith("parameter"):
            close = int8.whole(name, after[name], want)
            assert torch.allclose(close, want, atol=2e-2) and (
                name != "parameter up.weight" or not torch.equal(close, want)
            )


TOLD = {
    "zero 1": {"mesh": {"dp": 3}, "zero": "1 over dp"},  # parts that do not divide
    "zero 2": {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2},
    "tp": {**MESHES["dp and tp"], "zero": "1 over dp"},
    "stages": MESHES["stages"],
}


def telling(kind: str, codec: str, gradients: str = "exact", **settings: Any) -> Compressed:
    """Adam, whose new parameters are told so."""
    case = {**TOLD[kind], "codec": gradients, "gather": {"dp": dict.fromkeys(COMPRESSED, codec)}}
    return Compressed(case, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1.0), **settings)


@pytest.mark.parametrize("kind", TOLD)
def test_told_differences_and_what_is_left_of_them_are_all_there_was(kind):
    """fp32: the step of one device.  int4: what all have then and what is left are what the update made of it, and the
    ranks have the same to the bit."""
    exact, coarse = telling(kind, "fp32+ef"), telling(kind, "int4+ef")
    values = exact.values()
    wanted, got = exact.serial(values), exact.ranks(values)
    for name, want in wanted.items():
        torch.testing.assert_close(exact.whole(name, got[name], want), want, rtol=1e-4, atol=1e-5)
    after = coarse.ranks(values)
    for name in COMPRESSED:
        parameter, unsent = f"parameter {name}", f"outer unsent of {name}"
        now, left = (coarse.whole(n, after[n], wanted[n]) for n in (parameter, unsent))
        torch.testing.assert_close(now + left, wanted[parameter], rtol=1e-4, atol=1e-5)
        assert left.abs().max() > 0
        own, alike = after[parameter], 1 if kind != "tp" else 2
        assert all(torch.equal(x, own[i % alike]) for i, x in enumerate(own))


def test_what_is_gathered_follows_the_level_of_zero_of_each_parameter():
    """One that every rank updates is told of by none; one that is held whole is not gathered for use."""
    shapes, common = {"up.weight": (67, 40), "down.weight": (40, 67)}, {"mesh": {"dp": 2}, "batch": ["dp"]}
    for_updates = {"gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}, "zero": {"up.weight": 0, "*": "2 over dp"}}
    plan = Plan.read({**common, **for_updates})
    assert plan.told_codecs(shapes) == {"down.weight": "int4"} and not plan.gathered_codecs(shapes)
    used = {"gather": {"dp": dict.fromkeys(COMPRESSED, "int8")}, "zero": {"up.weight": 1, "*": "3 over dp"}}
    plan = Plan.read({**common, **used})
    assert plan.gathered_codecs(shapes) == {"down.weight": "int8"} and not plan.told_codecs(shapes)


def test_differences_are_kept_by_a_skipped_step_and_cost_the_bytes_of_their_codec():
    case, exact = (telling("zero 1", codec) for codec in ("int4+ef", "exact"))
    values = case.values(poison=True)
    got = case.ranks(values)
    assert int(got["counter skipped"][0]) == 1
    for name, parts in got.items():
        if name.startswith(("outer", "parameter")):
            assert torch.equal(case.whole(name, parts, values[name]), values[name]), name
    part = 40 * -(-67 // 3)
    sent = [mycel.lower.sent(x.lowered.program)["dp",] for x in (case, exact)]
    assert sent[1] - sent[0] == 2 * 2 * (4 * part - -(-part // 128) * 68)  # of two matrices, to two others
    begun = [e for e in case.lowered.program.main.eqns if message(e)[0] == "gather_chunks"]
    assert len([e for e in begun if e.op is not o.finish]) == 1  # in one message


def test_what_stages_send_is_encoded_token_by_token():
    """Exact codec: the step of one device.  int8: a quarter of the bytes, of what the loop sends, and near to it."""
    stages = {"mesh": {"dp": 2}, "microbatches": 2, "stages": ["up", "down", "head"], "codec": "exact"}
    cases = {codec: Compressed({**stages, "send": {"stages": codec}}) for codec in ("exact", "fp32", "int8", "fp8")}
    values = cases["exact"].values()
    wanted = cases["exact"].serial(values)
    sent = {}
    for codec, case in cases.items():
        got = case.ranks(values)
        near = {"int8": 2e-3, "fp8": 1e-2}.get(codec, 1e-5)
        for name, want in wanted.items():
            torch.testing.assert_close(case.whole(name, got[name], want), want, rtol=1e-4, atol=near)
        programs = case.lowered.pipeline.programs
        begun = [e for p in programs for e in p.main.eqns if e.op is o.begin_send and e.phase != "update"]
        sent[codec] = sum(v.type.bytes for e in begun for v in e.vars)
        same = torch.equal(got["parameter up.weight"][0], cases["exact"].ranks(values)["parameter up.weight"][0])
        assert same == (codec in ("exact", "fp32"))
    tokens = 2 * 6  # of two microbatches a rank's rows; between the last two stages activations and their gradients
    assert sent["exact"] == sent["fp32"] - 4 * tokens * (13 + 2 * 8) == tokens * 4 * (67 + 2 * 40)
    assert sent["int8"] == sent["fp8"] == tokens * (80 + 4 + 2 * (48 + 4))


ENCODED = {
    **{kind: {**mesh, "codec": "int8+ef"} for kind, mesh in MESHES.items()},
    "told": {**TOLD["zero 1"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}},
    "told in stages": {**TOLD["stages"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}},
    "gathered": {**MESHES["zero 3"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int8")}},
    "gathered in stages": {
        **MESHES["stages"],
        "zero": "3 over dp",
        "codec": "exact",
        "gather": {"dp": {"up.w*": "int8"}},
    },
}


@pytest.mark.parametrize("written", ENCODED.values(), ids=ENCODED)
def test_what_comes_encoded_is_verified_before_it_is_used(written):
    """And a mismatch would name the parameter; once in so many steps, which the step counts."""
    case, seen = Compressed(dict(written)), set()
    for program in case.programs:
        kinds = [(e.params.get("op", e.op.name), e) for e in program.main.eqns if e.op is not o.begin]
        come = [v for kind, e in kinds if kind in ("exchange_chunks", "gather_chunks") for v in e.outputs]
        users = {v: [e for e in program.main.eqns if v in e.vars] for v in come}
        for v, using in users.items():
            assert [(e.op, e.inputs[0]) for e in using] == [(o.verified, v)]
            count = using[0].inputs[2]
            assert program.role(count) == Role("counter", "draws") and count.name in program.updates
            seen.add(using[0].params["of"])
    assert seen == ({"up.weight"} if "up.w*" in str(written) else COMPRESSED)


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


class Wire:
    """Of two ranks, the first: what the second sent is what was written down, changed or not."""

    def __init__(self, theirs: torch.Tensor, place: int = 0) -> None:
        self.theirs, self.place = theirs, place

    def index(self, axes) -> int:
        return self.place

    def exchange_chunks(self, sums, axes):
        return torch.tensor([[zlib.crc32(row.numpy())] for row in self.theirs])

    gather_chunks = exchange_chunks


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


@pytest.mark.parametrize("rows", [1, 2])
def test_bytes_that_change_on_their_way_are_told_with_the_parameter_and_where_they_are_from(rows):
    sent = torch.arange(40, dtype=torch.uint8).view(2, 20)
    come = sent.clone()
    come[1, 7] ^= 4
    how = {"axes": ("dp",), "every": 10, "of": "up.weight"}
    COMMUNICATORS.append(Wire(sent))
    try:
        assert o.verified(sent, sent[:rows], torch.tensor(20), **how) is sent
        assert o.verified(come, sent[:rows], torch.tensor(21), **how) is come  # not looked at
        with pytest.raises(RunError, match=r"up.weight: encoded bytes have changed .* over dp: from place 1 to 0"):
            o.verified(come, sent[:rows], torch.tensor(20), **how)
    finally:
        COMMUNICATORS.pop()
