"""Parameters that are updated on the host, where they live with their state: the step is the same (on a CPU to the bit:
host and device have the same kernels), gradients leave for good and nothing of the state moves; whoever reads what the
host writes waits for it; and the clock says where an update is faster."""

from __future__ import annotations

import copy
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import yaml
from distributing import OneDevice, start_values
from stepping import adamw, both
from test_offload import EVERYTHING, Stack, same, small_llama, tokens
from test_stage_offload import simulated, task_of
from test_stages import tied
from test_step_memory import Live

from mycel import Mesh, Plan, Program, lower
from mycel.errors import IRError, PlanError, RunError
from mycel.ir import DEVICE, HOST, Layout, arenas, host_bytes
from mycel.ops import o
from mycel.ops.space import settle_hosts
from mycel.parts import ShardedModel
from mycel.plan import CPU, Clock, Offloaded, StreamedInput, clock, travels
from mycel.planning import Task, planned
from mycel.run import host_space, interpret, load, simulate
from mycel.run.simulate import spread_out

UPDATED = {**EVERYTHING, "update": "host"}
LIVING = {"parameters": "host", "optimizer": "host", "update": "host"}

STEP = """def main(x: f32[8,8], w: f32[8,8] = parameter w, m: f32[8,8] = state momentum_buffer of w,
         lr: f64[] = hyper lr of group 0):
  y: f32[8,8] = matmul(x, w)
  g: f32[8,8] = matmul(y, x) [backward]
  n: f32[] = global_norm(g) [update]
  finite: bool[] = isfinite(n) [update]
  good: f32[] = cast(finite, dtype=f32) [update]
  skip: f32[] = sub(1.0, good) [update]
  w1: f32[8,8], m1: f32[8,8] = sgd(w, m, g, lr, 0.9, 0.0, 0.0, 0.0, None, skip, count=1, momentum=True) [update]
  return n, w=w1, m=m1
"""


def on_the_host() -> Program:
    living = (StreamedInput("w", ("y",)), StreamedInput("m", ()))
    return lower.offload(Program.parse(STEP), Offloaded("main", streamed=living, chunk=1, updated={"w": "skip"}))


def test_copies_are_slower_while_the_host_updates():
    """Those that begin once the host has what its first update reads, and no others."""
    first = "  w1: f32[8,8], m1: f32[8,8] = sgd(w, m, g,"
    second = next(line for line in STEP.splitlines() if line.startswith(first))
    other = second.replace("w1", "v1").replace("m1", "n1").replace("(w, m,", "(v, b,")
    text = STEP.replace(second, f"{second}\n{other}").replace("w=w1, m=m1", "w=w1, m=m1, v=v1, b=n1")
    text = text.replace("lr: f64[]", "v: f32[8,8] = parameter v, b: f32[8,8] = state momentum_buffer of v, lr: f64[]")
    living = tuple(StreamedInput(name, {"w": ("y",), "m": ()}.get(name, ("v1",))) for name in ("w", "m", "v", "b"))
    program = lower.offload(Program.parse(text), Offloaded("main", streamed=living, chunk=1, updated={"w": "skip"}))
    hardware = replace(CPU, host_bytes_s=1e8, busy_host_bytes_s=2e7)
    lines = Clock(hardware, moves=True).lines(program, program.entry, False)
    at = next(i for i, line in enumerate(lines) if line.eqn.outputs[0].name == "skip.host")
    moves = [(i > at, line) for i, line in enumerate(lines) if line.eqn.op.name == "begin_move"]
    assert {updating for updating, _ in moves} == {True, False}
    for updating, line in moves:
        seconds = next(line.eqn.vars).type.bytes / (2e7 if updating else 1e8)
        assert line.seconds == pytest.approx(seconds + hardware.launch_s)


def test_the_pass_brings_gradient_and_scalars_and_nothing_else():
    program = on_the_host()
    assert Program.parse(str(program)) == program
    *_, last = program.main.eqns
    assert last.on_host and [v.type.space for v in last.outputs] == [HOST, HOST]
    left = [next(e.vars).name for e in program.main.eqns if e.op.name == "begin_move" and e.params["to"] == HOST]
    came = [next(e.vars).name for e in program.main.eqns if e.op.name == "begin_move" and e.params["to"] == DEVICE]
    assert left == ["g", "skip.copy"] and came == ["w"]
    values = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), torch.tensor(0.1, dtype=torch.float64)]
    want = interpret(Program.parse(STEP), values)
    assert all(map(torch.equal, interpret(program, values), want))
    code, source = load(program, torch.device("cpu"), reuse=True, donate=True)
    given = [x.clone() for x in values]
    assert torch.equal(code(*given)[0], want[0]) and torch.equal(given[1], want[1]) and torch.equal(given[2], want[2])
    assert source.count("spaces.compute(lambda ") == 1
    given = [x * float("nan") if i == 0 else x.clone() for i, x in enumerate(values)]
    code(*given)
    assert torch.equal(given[1], values[1]) and torch.equal(given[2], values[2]), "a skipped step updates nothing"


def test_the_checker_knows_what_runs_on_the_host():
    text = str(on_the_host())
    line = next(x for x in text.splitlines() if " = sgd(" in x)
    for right, wrong, why in (
        ("g.host", "g", "computes on the host, but g lies on the device"),
        ("w1.host: host(f32[8,8])", "w1.host: f32[8,8]", r"stated as \(f32\[8,8\], host\(f32\[8,8\]\)\)"),
    ):
        assert right in line
        with pytest.raises(IRError, match=why):
            Program.parse(text.replace(line, line.replace(right, wrong)))


def test_what_the_host_does_has_a_stream_of_its_own():
    """The next step's first use of a parameter waits for its update, and for those before it."""
    program, slow = on_the_host(), replace(CPU, update_bytes_s=1e6)
    size = 5 * 8 * 8 * 4 + 4 + 8  # w, m and g are read, two of them written; skip, lr
    fast, late = clock(program, replace(CPU, update_bytes_s=1e12)), clock(program, slow)
    assert late.totals["on the host"] == pytest.approx(size / 1e6 + CPU.launch_s)
    assert late.seconds - fast.seconds == pytest.approx(size / 1e6 - size / 1e12)
    assert late.peak == fast.peak and late.peak[HOST] == host_bytes(program)
    assert late.parts["on the host"].exposed > 0.9 * late.totals["on the host"]


# -- steps -----------------------------------------------------------------------------------------------------------


def trained(offload, steps=3, optimizer=None, make=Stack, **settings):
    plan = {"offload": offload} if offload else "auto"
    pair = both(make, optimizer or adamw(), plan=plan, **settings)
    losses = [pair.step(**tokens(i)) for i in range(steps)]
    if settings.get("precision") == "fp16":  # a scale with which gradients overflow, and half of it, until they do not
        pair.step.set_counters({**pair.step.counters(), "loss_scale": torch.tensor(2.0**24)})
        losses += [pair.step(**tokens(i)) for i in range(8)]
    settle_hosts()
    return pair.step, [*losses, *(p.detach().clone() for p in pair.model.parameters())]


OPTIMISERS = {
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),  # no kernel of its own: its rule
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2, "clip_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16", "clip_norm": 1.0},
        *({"optimizer": each} for each in OPTIMISERS.values()),
    ],
    ids=["accumulate", "bf16", "fp16", *OPTIMISERS],
)
def test_a_step_updated_on_the_host_is_the_same_step(settings):
    step, values = trained(UPDATED, **settings)
    plain, want = trained(None, **settings)
    assert same(values, want) and step.skipped == plain.skipped
    assert 0 < step.skipped < 8 if settings.get("precision") == "fp16" else not step.skipped
    matrices = {name for name, p in step.model.named_parameters() if p.ndim > 1}
    assert {f"model.{name}" for name in matrices} == set(step.plan.decided.moved.updated)
    moved = {next(e.vars).name for e in step.program.main.eqns if e.op is o.begin_move}
    state = [v for v in step.program.inputs_of("state") if step.program.role(v).of in matrices]
    assert state and all(v.type.space == HOST and v.name not in moved for v in state), "state stays where it is"
    on_host = [e.on_host for e in step.program.main.eqns]
    assert on_host == sorted(on_host), "what the host does comes last"


def test_nothing_is_brought_where_an_update_of_the_step_before_may_still_read():
    step, _ = trained(UPDATED)
    block, arena = step.program.main, arenas(step.program)[step.program.entry]
    begun = {e.outputs[0]: i for i, e in enumerate(block.eqns) if e.op is o.begin_move}
    places = {  # on the host, by value
        e.outputs[0]: range(at, at + e.outputs[0].type.bytes)
        for e in block.eqns
        if e.op is o.finish_move and (at := arena.at.get(begun[next(e.vars)])) is not None
    }
    read = {v for e in block.eqns if e.on_host for v in e.vars if v in places}
    assert any(v.ndim > 1 for v in read) and len(read) < len(places), "gradients, and others"
    for v, mine in places.items():
        others = [
            w for w, other in places.items() if w is not v and mine.start < other.stop and other.start < mine.stop
        ]
        assert not (others if v in read else read.intersection(others)), v.name


def test_peaks_are_as_predicted_and_the_plan_reads_back():
    def make():
        return small_llama(num_hidden_layers=2)

    step, _ = trained(UPDATED, steps=1, make=make)
    batch = tokens(3)
    with Live() as live:
        step(**batch)
    assert live.peak == step.plan.peak - step.plan.held and step.plan.predicted.host == host_bytes(step.program)
    steps = {step.program.role(v).of for v in step.program.inputs if v.type.space == HOST and v.name.endswith(".step")}
    assert steps == {name for name, p in step.model.named_parameters() if p.ndim > 1}, "their counts are there, too"
    again = both(make, adamw(), plan=yaml.safe_load(str(step.plan))).step.prepare(**tokens())
    assert str(again.program) == str(step.program) and again.plan.decided == step.plan.decided
    text = step.explain()
    assert "lives there; comes" in text and "updated there" in text and re.search(r"on the host \d+ µs", text)
    assert "d_model.lm_head.weight: 12.50 KiB, leaves for good" in text


def test_resumed_to_the_bit_here_and_there(tmp_path):
    step, _ = trained(UPDATED, steps=2)
    saved = copy.deepcopy(step.state_dict())
    step.save(tmp_path)

    def further(step):
        torch.manual_seed(5)  # of dropout
        loss = step(**tokens(2))
        settle_hosts()
        return [loss, *(p.detach().clone() for p in step.model.parameters())]

    third = further(step)
    for plan in ({"offload": UPDATED}, "auto"):
        fresh = both(Stack, adamw(), plan=plan).step.prepare(**tokens())
        fresh.load_state_dict(saved)
        assert same(further(fresh), third)
        fresh.load(tmp_path)
        assert same(further(fresh), third)


@pytest.fixture
def thread(monkeypatch):
    """Updates in a thread, as beside a GPU, that takes its time."""
    make = host_space.HostSpace.__init__
    compute = host_space.HostSpace.compute

    def with_thread(self, *where):
        make(self, *where)
        self._thread = ThreadPoolExecutor(1)

    def later(self, update, operands):
        compute(self, lambda: (time.sleep(0.02), update()), operands)

    monkeypatch.setattr(host_space.HostSpace, "__init__", with_thread)
    monkeypatch.setattr(host_space.HostSpace, "compute", later)


def asked(offload):
    """Steps, an evaluation, another signature, the model in one piece, state."""
    step, values = trained(offload, steps=2)
    values += [step.evaluate(**tokens(5)), step(**tokens(6, rows=2)), step(**tokens(7))]
    state = step.state_dict()
    values += [x.clone() for held in state["optimizer"]["state"].values() for x in held.values()]
    step(**tokens(8))
    with step.whole() as model:
        values.append(model(**tokens(9)).detach())
        with torch.no_grad():
            model.head.weight.mul_(2.0)
    return [*values, step.evaluate(**tokens(10)), step(**tokens(11)), step.evaluate(**tokens(12))]


def test_whoever_reads_what_the_host_writes_waits_for_it(thread):
    assert same(asked(UPDATED), asked(None))


def test_what_an_update_raises_is_raised_by_whoever_waits(thread):
    step, _ = trained(LIVING, steps=1)

    def broken():
        raise RunError("no such kernel")

    step.host.space.compute(broken, [p.data for p in step.model.parameters()])
    with pytest.raises(RunError, match="no such kernel"):
        step(**tokens(1))


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, sizes", [("zero3", {"dp": 2}), ("zero1+tp", {"dp": 2, "tp": 2}), ("zero2", {"dp": 2})], ids=lambda x: str(x)
)
def test_ranks_update_their_own_part(names, sizes):
    mesh, outs = Mesh(sizes), []
    one = OneDevice.of(Stack(), tokens(), clip_norm=1.0)
    for offload in ("none", UPDATED):
        written = Plan.read({**Plan.read(names, mesh).data(), "offload": offload})
        inputs, gathered = ShardedModel(one.model, one.optimizer, written).given(one.unsharded)
        task = Task(one.unsharded.program, one.unsharded.body, CPU, False, inputs, gathered)
        decided, done = planned(task, written)
        assert any(e.on_host for e in done.program.main.eqns) == (offload != "none")
        assert str(planned(task, decided)[1].program) == str(done.program)
        values = [spread_out(x, inputs.get(i, Layout.whole(x.ndim)), mesh) for i, x in enumerate(start_values(one))]
        outs.append(simulate(done.program, mesh, values))
    for plain, moved in zip(*outs, strict=True):
        assert all(map(torch.equal, plain, moved))
    texts = list(map(str, travels(done.program, Clock(CPU, CPU.links(mesh), moves=True))))
    updated = [text for text in texts if "updated there" in text]
    assert len(updated) == sum(e.params["count"] for e in done.program.main.eqns if e.on_host)
    parts = [text for text in updated if "lives there" not in text]  # made in the step, and back in it
    assert all("; leaves " in text and ", back " in text for text in parts) and bool(parts) == (names != "zero3")


def test_stages_update_their_own_parameters():
    """With ZeRO 1 inside of a stage, parts of them.  (Whole ones in processes: `pipeline_child.py`.)"""
    one, outs = tied(4), []
    plan = {"stages": ["embed", "layers.2"], "mesh": {"dp": 2}, "batch": ["dp"], "zero": "1 over dp", "microbatches": 4}
    for offload in ("none", UPDATED):
        written = Plan.read({**plan, "offload": offload})
        task = task_of(one, written)
        decided, done = planned(task, written)
        again = planned(task, Plan.read(decided.data()))[1]
        assert list(map(str, again.pipeline.programs)) == list(map(str, done.pipeline.programs))
        assert all(m.updated for m in decided.decided.moved_by_rank)
        outs.append(simulated(one, task, written, done))
    for plain, moved in zip(*outs, strict=True):
        assert all(all(map(torch.equal, x, y)) for x, y in zip(plain, moved, strict=True))


# -- decisions and refusals ------------------------------------------------------------------------------------------


def test_the_clock_says_where_an_update_is_faster(monkeypatch):
    """What was not measured is not believed; a host that is faster than the wire takes the update, a slow one not."""

    def decided(hardware, **more):
        monkeypatch.setattr("mycel.plan.hardware_of", lambda device, local=0: hardware)
        offload = {"parameters": "host", "optimizer": "host", **more}
        return both(Stack, adamw(), plan={"offload": offload}).step.prepare(**tokens()).plan

    wire = replace(CPU, host_bytes_s=1e8)
    slow, fast = (decided(replace(wire, update_bytes_s=rate)) for rate in (1e7, 1e11))
    assert not slow.decided.moved.updated and fast.decided.moved.updated and not decided(wire).decided.moved.updated
    assert fast.predicted.seconds < decided(replace(wire, update_bytes_s=1e11), update="device").predicted.seconds
    assert slow.predicted.seconds < decided(replace(wire, update_bytes_s=1e7), update="host").predicted.seconds


def test_host_and_device_share_updates_where_both_are_as_slow(monkeypatch):
    """The host has those that the next forward needs last; the step is the same."""
    wire, living = replace(CPU, host_bytes_s=1e8), {"parameters": "host", "optimizer": "host"}
    steps = {}
    for update in ("auto", "device", "host"):
        monkeypatch.setattr("mycel.plan.hardware_of", lambda device, local=0: replace(wire, update_bytes_s=3e8))
        steps[update] = trained({**living, "update": update})
        monkeypatch.undo()
    step, values = steps["auto"]
    assert same(values, trained(None)[1])
    matrices = [f"model.{name}" for name, p in step.model.named_parameters() if p.ndim > 1]
    mine = [name in step.plan.decided.moved.updated for name in matrices]
    assert any(mine) and not all(mine) and mine == sorted(mine)
    seconds = {update: step.plan.predicted.seconds for update, (step, _) in steps.items()}
    assert seconds["auto"] < min(seconds["device"], seconds["host"])


@pytest.mark.parametrize(
    "offload, message",
    [
        ({"parameters": "host", "update": "host"}, "update is host, but optimizer is none"),
        ({**LIVING, "update": "gpu"}, "update is 'gpu'\n  known     auto, host, device"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(offload, message):
    with pytest.raises(PlanError, match=message):
        Plan.read({"offload": offload})
    for written in (LIVING, {"update": "device"}, {"host": 5, "update": "device"}):
        assert Plan.read({"offload": written}).data()["offload"] == written


def test_a_host_that_has_nothing_to_update_says_so():
    with pytest.raises(PlanError, match=r"nothing can be updated there(?s:.*)said      parameters: none"):
        trained({"optimizer": "host", "update": "host"}, steps=1)


def test_a_host_that_is_too_small_says_so():
    with pytest.raises(PlanError, match=r"needs .* on the host, which has 1.00 KiB: .* too much"):
        trained({**LIVING, "host": "1KiB"}, steps=1)


def test_clock_streams_are_shown_where_there_is_something_on_them():
    assert "on the host" not in str(Clock(CPU, moves=True)(Program.parse(STEP)))
