"""Offload changes no arithmetic: losses and parameters are to the bit those of a step that moves nothing, on one device
and on ranks; the planned peak fits the budget of each memory space and is what a walk of every equation sees."""

import copy
import itertools
import math
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml
from distributing import OneDevice, start_values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama
from stepping import adamw, both, cross_entropy
from test_clock import brute_peak
from test_step_memory import Live
from test_step_precision import Layer
from torch import nn

from mycel import Mesh, Plan, Program, lower
from mycel.errors import IRError, PlanError, RunError, TrainError
from mycel.ir import DEVICE, HOST, Layout, arenas, check, host_alive, host_bytes, host_held, rounded
from mycel.ir.arena import packed
from mycel.offloading import Mover, Spaces, Way
from mycel.ops import o
from mycel.parts import ShardedModel
from mycel.plan import AUTO, CPU, KINDS, Clock, Copies, Offload, absences, clock, travels
from mycel.planning import Task, planned
from mycel.run import host_space, interpret, load, simulate
from mycel.run.simulate import spread_out
from mycel.search_page import between, device_memory, host_memory
from mycel.sizes import parse_bytes, shown

HOST_STATE = {"activations": "host", "optimizer": "host"}
EVERYTHING = dict.fromkeys(KINDS, "host")


def small_llama(**more):
    """Layers are blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return llama(**{"num_hidden_layers": 4, "vocab_size": 100, **sizes, **more})


class Stack(nn.Module):
    """Layers are equations of the body."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OneLayer(nn.Module):
    """A large gradient that is made right before the update."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 4096)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids).square().mean()


def tokens(i=0, rows=4, length=16):
    ids = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(i))
    return {"input_ids": ids, "labels": ids}


# -- the IR ----------------------------------------------------------------------------------------------------------

TEXT = """def main(x: f32[64,64], s: host(f32[64,64]) = state m of w):
  a: f32[64,64] = matmul(x, x)
  t: i64[] = begin_move(a, to="host")
  b: f32[64,64] = matmul(a, x)
  h: host(f32[64,64]) = finish_move(t, a, to="host")
  c: f32[64,64] = matmul(b, x)
  u: i64[] = begin_move(h, to="device")
  d: f32[64,64] = matmul(c, x)
  a2: f32[64,64] = finish_move(u, h, to="device")
  e: f32[64,64] = add(d, a2)
  q: i64[] = begin_move(s, to="device")
  s1: f32[64,64] = finish_move(q, s, to="device")
  s2: f32[64,64] = add(s1, e)
  r: i64[] = begin_move(s2, to="host")
  s3: host(f32[64,64]) = finish_move(r, s2, to="host", wait=False)
  return e, s=s3
"""


def test_text_with_moves_reads_back_and_runs():
    program = Program.parse(TEXT)
    assert Program.parse(str(program)) == program and str(program) == TEXT
    x, s = torch.randn(64, 64), torch.randn(64, 64)
    e, new = interpret(program, [x, s])
    held = s.clone()
    code, source = load(program, torch.device("cpu"), reuse=True, donate=True)
    assert torch.equal(code(x, held)[0], e) and torch.equal(held, new), "the new state is written over the old"
    assert "over=s" in source and torch.equal(new, s + e)
    assert host_bytes(program) == 2 * 64 * 64 * 4, "the state, and one value that is there a while"


def test_a_page_draws_what_lies_on_the_host():
    program = Program.parse(TEXT)
    times, size = clock(program, CPU), 64 * 64 * 4
    assert [held for _, held in times.host_curve()] == [size, *[2 * size] * 7, *[size] * 6], "from begin to last use"
    assert "Memory of the host" in host_memory(times, program) and "16.00 KiB" in host_memory(times, program)
    on_device = device_memory(times, program)
    assert "Dashed: the batch, 16.00 KiB" in on_device and "<td>a2</td>" in on_device
    assert "host(" not in on_device and "<td>u</td>" not in on_device, "no value of the host, no copy"
    assert "2 values" in between(times, program) and "<li>s: 16.00 KiB, lives there" in between(times, program)
    plain = Program.parse("def main(x: f32[4,4]):\n  a: f32[4,4] = matmul(x, x)\n  return a\n")
    assert host_memory(clock(plain, CPU), plain) == between(clock(plain, CPU), plain) == ""


@pytest.mark.parametrize("line, wrong, why", [
    ("matmul(b, x)", "matmul(b, h)", "computes on the device, but h lies on the host"),
    ("h: host(f32[64,64]) = finish", "h: f32[64,64] = finish", "gives (host(f32[64,64])), stated as (f32[64,64])"),
    ("begin_move(h,", "begin_move(c,", "f32[64,64] is moved to the device"),
    ("return e, s=s3", "return e, s=s2", "update of s: host(f32[64,64]) with s2: f32[64,64]"),
    ('(u, h, to="device")', '(u, h, to="device", wait=False)', "is moved to the device, and not waited for"),
])  # fmt: skip
def test_the_checker_knows_where_values_lie(line, wrong, why):
    assert TEXT.count(line) == 1
    with pytest.raises(IRError, match=re.escape(why)):
        Program.parse(TEXT.replace(line, wrong))


def test_a_trip_says_how_long_a_value_is_away():
    """What lives on the host, from when it has left to when it comes in the next step."""
    timer, program = Clock(CPU, moves=True), Program.parse(TEXT)
    trips = {trip.value.name: trip for trip in travels(program, timer)}
    a, s, step_s = trips["a"], trips["s"], timer.spans(program, "main")[-1][1]
    assert s.home and math.isclose(s.away, step_s - (s.leaves[0].end - s.comes[0].start))
    assert re.search(r"^s: 16.00 KiB, lives there; comes .*, leaves .*; away for up to [\d.]+ (µs|ms)", str(s))
    assert not a.home and re.search(r"^a: 16.00 KiB, away for [\d.]+ (µs|ms); leaves .*, back ", str(a))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9)), max_size=12))
def test_values_that_are_there_at_once_lie_apart(drawn):
    spans = {i: (min(a, b), max(a, b), size) for i, (a, b, size) in enumerate(drawn)}
    offsets, size = packed(spans)
    assert size == max((offsets[i] + spans[i][2] for i in spans), default=0) <= sum(s[2] for s in spans.values())
    for i, j in itertools.combinations(spans, 2):
        together = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
        apart = offsets[i] + spans[i][2] <= offsets[j] or offsets[j] + spans[j][2] <= offsets[i]
        assert apart or not together


LATE = """def main(x: f32[64,64], s: host(f32[64,64]) = state m of w):
  a: f32[64,64] = matmul(x, x)
  b: f32[64,64] = matmul(a, x)
  c: f32[64,64] = matmul(b, x)
  d: f32[64,64] = add(a, b)
  e: f32[64,64] = add(d, c)
  q: i64[] = begin_move(s, to="device")
  s1: f32[64,64] = finish_move(q, s, to="device")
  s2: f32[64,64] = add(s1, e)
  r: i64[] = begin_move(s2, to="host")
  s3: host(f32[64,64]) = finish_move(r, s2, to="host", wait=False)
  return e, s=s3
"""


def test_what_is_not_waited_for_leaves_while_the_next_step_computes():
    program, waiting = Program.parse(LATE), Program.parse(LATE.replace(", wait=False", ""))
    size = 64 * 64 * 4
    later, waited = clock(program, CPU), clock(waiting, CPU)
    assert later.totals == waited.totals and math.isclose(waited.seconds - later.seconds, CPU.move_s(size))
    assert waited.peak[DEVICE] == 4 * size, "x, and a to c: d lies in a, e in d"
    slow = replace(CPU, host_bytes_s=1e6)  # while a to c are made, s2 of the step before is still leaving
    assert clock(waiting, slow).peak[DEVICE] == 4 * size and clock(program, slow).peak[DEVICE] == 5 * size


CROSSING = """
def main(x: f32[64,64]):
  large: f32[256,64] = cat(x, x, x, x, dim=0)
  small: f32[64,64] = exp(x)
  a: f32[64,64] = sin(x)
  b: f32[256,64] = neg(large) [backward]
  c: f32[64,64] = cos(x) [backward]
  d: f32[64,64] = mul(c, small) [backward]
  return a, b, d
"""


def test_what_could_not_leave_in_time_does_not_take_the_wire():
    program, second = check(Program.parse(CROSSING)), 64 * 64 * 4  # bytes a second: the small value takes one
    times = [0.0, 4.5, 8.8, 9.0, 10.3, 10.4, 11.0]
    hardware = replace(CPU, host_bytes_s=second, launch_s=0.0)
    away = absences(program, "main", times, hardware)
    assert [a.var.name for a in away] == ["large", "small"]
    for wide, leave in ((1.0, ["large", "small"]), (1.2, ["small"])):  # the large one takes four seconds, or 4.8
        slower = replace(hardware, host_bytes_s=second / wide)
        assert [m.value for m in Copies(program, "main", times, slower, away).placed({}).moved] == leave


# -- generated programs ----------------------------------------------------------------------------------------------


def generated(rng: random.Random) -> Program:
    """Forward values of several sizes, some read once more in forward, most of them in backward, in reverse; parameters
    that both read and the update replaces."""
    rows = [rng.choice((16, 32, 64)) for _ in range(rng.randint(4, 9))]
    lines, last = [], "x"
    for i, n in enumerate(rows):
        lines.append(f"  w{i}: f32[{n},32] = slice(x, dim=0, start=0, stop={n}, step=1)")
        lines.append(f"  v{i}: f32[{n},32] = exp(w{i})" if rng.random() < 0.5 else f"  v{i}: f32[{n},32] = neg(w{i})")
        if rng.random() < 0.3:
            lines.append(f"  r{i}: f32[32,{n}] = permute(v{i}, dims=(1, 0))")
        lines.append(f"  k{i}: f32[64,64] = matmul({last}, p{i})")
        last = f"k{i}"
    lines.append(f"  g: f32[64,64] = matmul({last}, p0) [backward]")
    last, grads = "g", []
    for i in reversed(range(len(rows))):
        if rng.random() < 0.9:
            lines.append(f"  s{i}: f32[] = sum(v{i}, dims=(0, 1)) [backward]")
            lines.append(f"  d{i}: f32[64,64] = mul({last}, s{i}) [backward]")
            lines.append(f"  c{i}: f32[64,64] = matmul(d{i}, p{i}) [backward]")
            last, grads = f"c{i}", [*grads, i]
    lines.append(f"  norm: f32[] = global_norm({', '.join(f'd{i}' for i in grads)}) [update]")
    for i in grads:
        lines.append(f"  u{i}: f32[64,64] = mul(d{i}, norm) [update]")
        lines.append(f"  q{i}: f32[64,64] = sub(p{i}, u{i}) [update]")
    params = ", ".join(f"p{i}: f32[64,64] = parameter w{i}" for i in range(len(rows)))
    outs = ", ".join([last, *(f"p{i}=q{i}" for i in grads)])
    text = "\n".join([f"def main(x: f32[64,64], y: f32[64,32], {params}):", *lines, f"  return {outs}\n"])
    return check(Program.parse(text.replace("slice(x, ", "slice(y, ")))


@pytest.mark.parametrize("seed, parameters", [*((i, False) for i in range(8)), *((i, True) for i in range(4))])
def test_the_planned_peak_fits_and_is_what_a_walk_sees(seed, parameters):
    rng = random.Random(seed)
    program = generated(rng)
    timer = Clock(CPU, moves=True)
    free = timer(program)
    budget = int(free.held + (free.peak[DEVICE] - free.held) * rng.uniform(0.3, 1.0))
    spaces = Spaces(budget, None)
    natural, bounded = (
        Mover(lower.Lowered(program), "main", timer, AUTO if parameters else Offload("auto"), spaces, way)
        for way in (Way(False, False, parameters), Way(False, True, parameters))
    )
    fitting = [c for c in (natural.fewest(), bounded.fewest()) if spaces.fit(c.times)]
    choice = fitting[0] if fitting else bounded.most
    moved = check(lower.offload(program, choice.moved))
    late = any(not e.params.get("wait", True) for e in moved.main.eqns)  # what still leaves counts in the next step
    walked = brute_peak(moved) - sum(rounded(v.type.bytes) for v in moved.inputs if v.type.space == HOST)
    assert choice.times.peak[DEVICE] == walked or (late and choice.times.peak[DEVICE] >= walked)
    assert Program.parse(str(moved)) == moved and choice.times.peak[HOST] == host_bytes(moved)
    assert host_held(moved) <= max(host_alive(moved)) <= host_bytes(moved)
    torch.manual_seed(seed)
    values = [torch.randn(v.shape) * 0.02 for v in program.inputs]  # squares of what follows are numbers still
    assert same(interpret(moved, values), interpret(program, values))
    code, _ = load(moved, torch.device("cpu"), reuse=True, donate=True)
    space = host_space.HostSpace(torch.device("cpu")).prepare(moved)
    given = [x.clone() for x in values]
    space.connected(code)(*[x.clone() for x in values])  # places on the host get their strides
    with Live() as live:
        results = space.connected(code)(*given)
    assert torch.equal(results[0], interpret(program, values)[0])
    needed = choice.times.peak[DEVICE] - choice.times.held
    assert live.peak == needed or (late and live.peak <= needed), "an allocator sees what is predicted"
    assert choice.times.peak[DEVICE] <= budget or not fitting
    after = dict(zip(program.updates, interpret(program, values)[1:], strict=True))
    assert all(torch.equal(x, after.get(v.name, old)) for v, x, old in zip(program.inputs, given, values, strict=True))


# -- steps -----------------------------------------------------------------------------------------------------------


def trained(plan, steps=3, memory=None, make=small_llama, **settings):
    """A step after so many, and its losses and parameters."""
    pair = both(make, adamw(), plan=plan, memory=memory, **settings)
    losses = [pair.step(**tokens(i)) for i in range(steps)]
    return pair.step, [*losses, *(p.detach().clone() for p in pair.model.parameters())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture(scope="module")
def free():
    return trained("auto")


@pytest.mark.parametrize("offload, share", [("auto", 0.5), ({"activations": "auto"}, 0.8)], ids=str)
def test_a_budget_is_kept_by_moving_and_the_step_is_the_same(free, offload, share):
    step, values = free
    budget = int(step.plan.peak * share)
    moving, moved_values = trained({"offload": offload}, memory=budget)
    assert same(values, moved_values)
    assert moving.plan.peak <= budget and moving.plan.decided.moved.moved
    assert bool(moving.plan.decided.moved.streamed) == (offload == "auto")
    assert moving.plan.predicted.seconds < 1.3 * step.plan.predicted.seconds
    assert moving.plan.predicted.host == host_bytes(moving.program)
    batch = tokens(3)
    with Live() as live:
        moving(**batch)
    assert live.peak == moving.plan.peak - moving.plan.held, "it takes what is predicted"
    replayed, replayed_values = trained(yaml.safe_load(str(moving.plan)), memory=budget)
    assert str(replayed.program) == str(moving.program) and same(values, replayed_values)
    text = moving.explain()
    assert all(f" {m.value}: " in text for m in moving.plan.decided.moved.moved)
    assert ("lives there" in text) == (offload == "auto")


@pytest.mark.parametrize("make, plan, why", [
    (small_llama, {}, None),
    (small_llama, {"microbatches": 2}, "adds to their sums"),
    (OneLayer, {}, "sooner than its copies"),
])  # fmt: skip
def test_explain_says_why_gradients_stay(make, plan, why):
    """They leave between backward and the update, if there is time for it; not from a sum that parts add to."""
    moving, values = trained({"offload": {"gradients": "host"}, **plan}, make=make)
    assert same(values, trained(plan or "auto", make=make)[1])
    moved = moving.plan.decided.moved
    assert bool(moved and moved.moved) == (why is None)
    lines = [line for line in moving.explain().splitlines() if "gradients: none, as" in line]
    assert [why in line for line in lines] == ([] if why is None else [True])


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.5},
        {"accumulate": 2, "clip_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16", "clip_norm": 1.0},
    ],
    ids=str,
)
def test_all_on_the_host_is_the_same_step(settings):
    moving, values = trained({"offload": EVERYTHING}, make=Stack, **settings)
    assert same(values, trained("auto", make=Stack, **settings)[1])
    on_host = [moving.program.role(v) for v in moving.program.inputs if v.type.space == HOST]
    assert {role.name for role in on_host if role.kind == "state"} == {"exp_avg", "exp_avg_sq"}
    assert {role.name for role in on_host if role.kind == "parameter"} == {
        name for name, p in moving.model.named_parameters() if p.ndim > 1
    }
    assert moving.plan.decided.moved.moved and len(arenas(moving.program)) >= 1
    away = [m.value for m in moving.plan.decided.moved.moved]
    assert ("d_model.head.weight" in away) == ("accumulate" not in settings), "sums of parts stay"
    assert bool(moving.plan.decided.moved.inside) == ("accumulate" in settings), "parameters come for each part"
    assert Plan.read(yaml.safe_load(str(moving.plan))).decided.moved == moving.plan.decided.moved


@pytest.mark.parametrize("kinds", [{"optimizer": "host"}, EVERYTHING, {**EVERYTHING, "update": "host"}], ids=str)
def test_a_gradient_of_two_parameters_is_scaled_once(kinds):
    """One value is the gradient of several biases, which are updated in different chunks."""

    def steps(plan):
        layers = lambda: nn.Sequential(*(Layer() for _ in range(4)))
        pair = both(layers, adamw(), cross_entropy, plan=plan, precision="fp16")
        gen = torch.Generator().manual_seed(0)
        losses = [pair.step(torch.randn(6, 8, generator=gen), torch.randint(8, (6,), generator=gen)) for _ in range(3)]
        return [*losses, *(p.detach() for p in pair.model.parameters())]

    assert same(steps({"offload": kinds}), steps("auto"))


def test_the_norm_of_norms_is_the_norm():
    for seed in range(20):
        xs = [torch.randn(n, generator=torch.Generator().manual_seed(seed + n)) * 10 ** (n - 4) for n in (1, 3, 7)]
        norms = [o.global_norm(x) for x in xs]
        assert torch.equal(o.global_norm(*norms), o.global_norm(*xs)) and all(n.ndim == 0 for n in norms)


def test_a_layer_of_parameters_is_there_at_a_time(free):
    """Of parameters that live on the host a few layers are on the device at once."""
    on_device, on_host = (
        both(small_llama, adamw(), plan={"offload": {"parameters": kind}}).step.prepare(**tokens()).plan
        for kind in ("none", "host")
    )
    matrices = sum(p.numel() * 4 for p in free[0].model.parameters() if p.ndim > 1)
    assert on_device.held - on_host.held == matrices == on_host.predicted.host
    assert on_host.peak < on_device.peak - matrices / 2


def test_moving_is_never_slower_than_computing_again(free):
    budget = int(free[0].plan.peak * 0.85)
    again = both(small_llama, adamw(), memory=budget).step.prepare(**tokens())
    moving = both(small_llama, adamw(), plan={"offload": {"activations": "auto"}}, memory=budget).step
    assert moving.prepare(**tokens()).plan.predicted.seconds <= again.plan.predicted.seconds


def further(step):
    """The loss of one more step, and the parameters after it."""
    torch.manual_seed(5)  # of dropout
    return [step(**tokens(2)), *(p.detach().clone() for p in step.model.parameters())]


@pytest.mark.parametrize("kinds", [{"optimizer": "host"}, EVERYTHING], ids=["state", "all"])
def test_what_lives_on_the_host_is_loaded_and_saved(kinds, tmp_path):
    on_host = {"offload": kinds}
    moving, _ = trained(on_host, steps=2, make=Stack)
    saved = copy.deepcopy(moving.state_dict())
    moving.save(tmp_path)
    third = further(moving)
    for plan in (on_host, "auto"):
        fresh = both(Stack, adamw(), plan=plan).step.prepare(**tokens())
        fresh.load_state_dict(saved)
        assert same(further(fresh), third)
    fresh.load(tmp_path)
    assert same(further(fresh), third)


def test_a_model_on_the_host_is_still_a_model():
    """It is evaluated, called and trained on batches of another shape as one on the device is."""

    def asked(plan):
        step, _ = trained(plan, steps=1, make=lambda: small_llama(num_hidden_layers=2))
        outs = [step.evaluate(**tokens(5)), step(**tokens(6, rows=2)), step(**tokens(7))]
        with step.whole() as model:
            outs.append(model(**tokens(8)).loss.detach())
            with torch.no_grad():
                model.lm_head.weight.mul_(2.0)
        return step, [*outs, step.evaluate(**tokens(9))]

    moving, got = asked({"offload": {"parameters": "host", "optimizer": "host"}})
    assert same(asked("auto")[1], got) and moving.host.held
    assert all("begin_move" in str(entry.program) for entry in moving.entries)


@pytest.mark.parametrize(
    "names, sizes, make, settings",
    [
        ("zero3", {"dp": 2}, lambda: small_llama(num_hidden_layers=2), {}),
        ("zero1+tp", {"dp": 2, "tp": 2}, Stack, {}),
        ("cp", {"cp": 2}, lambda: small_llama(num_hidden_layers=2), {}),
        ("zero2", {"dp": 4}, Stack, {"precision": "fp16", "accumulate": 2}),
        ("zero3+tp", {"dp": 2, "tp": 2}, Stack, {"precision": "bf16", "accumulate": 2}),
    ],
    ids=["zero3", "zero1+tp", "cp", "zero2 fp16", "zero3+tp bf16"],
)
def test_ranks_move_their_own_part(names, sizes, make, settings):
    mesh, outs, parts = Mesh(sizes), [], settings.get("accumulate", 1)
    one = OneDevice.of(make(), tokens(rows=8), clip_norm=1.0, **settings)
    more = {"microbatches": parts, "recompute": "full" if parts > 1 else "auto"}
    for offload in ("none", EVERYTHING):
        written = Plan.read({**Plan.read(names, mesh).data(), **more, "offload": offload})
        inputs, gathered = ShardedModel(one.model, one.optimizer, written).given(one.unsharded)
        task = Task(one.unsharded.program, one.unsharded.body, CPU, False, inputs, gathered)
        decided, done = planned(task, written)
        assert bool(decided.decided.moved) == (offload != "none")
        assert str(planned(task, decided)[1].program) == str(done.program)
        values = [spread_out(x, inputs.get(i, Layout.whole(x.ndim)), mesh) for i, x in enumerate(start_values(one))]
        outs.append(simulate(done.program, mesh, values))
    for plain, moved in zip(*outs, strict=True):
        assert all(map(torch.equal, plain, moved))


# -- counted ----------------------------------------------------------------------------------------------------------


def test_memory_of_the_host_is_made_once_and_used_again(free, monkeypatch):
    """One piece for all values that are there a while, smaller than these together, in which all steps put them."""
    made, begun = [], []
    memory, begin = host_space.HostSpace._memory, host_space.HostSpace.begin

    def making(self, size):
        made.append(memory(self, size))
        return made[-1]

    def beginning(self, x, to, at, over):
        token = begin(self, x, to, at, over)
        begun.extend([(at, token[0])] if to == HOST and over is None else [])
        return token

    monkeypatch.setattr(host_space.HostSpace, "_memory", making)
    monkeypatch.setattr(host_space.HostSpace, "begin", beginning)
    moving, _ = trained({"offload": {"activations": "host", "gradients": "host"}}, steps=1)
    per_step = len(begun)
    for i in range(3):
        moving(**tokens(i + 1))
    assert len(made) == 1 and made[0].numel() == moving.plan.predicted.host, "made before the first step, once"
    assert len(begun) == 4 * per_step and all(at is not None for at, _ in begun)
    start, end = made[0].data_ptr(), made[0].data_ptr() + made[0].numel()
    assert all(start <= x.data_ptr() and x.data_ptr() + x.nbytes <= end for _, x in begun)
    assert {x.data_ptr() for _, x in begun[:per_step]} == {x.data_ptr() for _, x in begun[per_step:]}
    assert made[0].numel() < 0.9 * sum(x.nbytes for _, x in begun[:per_step]), "places are used again"


def test_nothing_is_moved_that_is_computed_again_cheaper(monkeypatch):
    """With a wire that is slow nothing leaves, and the budget is kept by computing again; with a fast one values leave,
    and less is computed again: what comes back is read in backward, and was not made there."""

    def plan_of(wire):
        monkeypatch.setattr("mycel.plan.hardware_of", lambda device, local=0: replace(CPU, host_bytes_s=wire))
        return both(small_llama, adamw(), plan={"offload": {"activations": "auto"}}, memory=budget).step.prepare(
            **tokens()
        )

    again = lambda step: sum(d.seconds for d in step.plan.residuals.pairs)
    budget = int(0.85 * both(small_llama, adamw()).step.prepare(**tokens()).plan.peak)
    slow, fast = plan_of(1e5), plan_of(1e12)
    assert not slow.plan.decided.moved and again(slow) > 0
    assert fast.plan.decided.moved.moved and again(fast) < again(slow)
    moved = {m.value for m in fast.plan.decided.moved.moved}
    body = fast.program.blocks[fast.plan.decided.moved.body]
    made = {v.name: e.phase for e in body.eqns for v in e.outputs}
    assert {made[name] for name in moved} == {"forward"}, "what backward computes again is needed at once, and stays"


def test_the_page_of_a_step_draws_both_memories(free):
    """All values that move are on it, as `explain` has them, and each memory goes up to its predicted peak."""
    moving, _ = trained({"offload": HOST_STATE}, steps=1, make=Stack)
    times = clock(moving.program, CPU)
    text = between(times, moving.program)
    trips = list(travels(moving.program, Clock(CPU, moves=True)))
    said = moving.explain()
    for trip in trips:
        size_, moves_ = shown(trip.value.type.bytes), [*trip.leaves, *trip.comes]
        (line,) = [line for line in said.splitlines() if line[17:].startswith(f"{trip.value.name}: {size_}, ")]
        assert "away for" in line and moves_
        assert all(str(copy) in line for copy in moves_)
        assert ("hidden" in line) == (trip.waited <= 1e-9) and ("waited for" in line) == (trip.waited > 1e-9)
    assert f"{len(trips)} values" in text
    names = {m.value for m in moving.plan.decided.moved.moved} | {s.input for s in moving.plan.decided.moved.streamed}
    assert {trip.value.name for trip in trips} == names
    assert max(n for _, n in times.host_curve()) <= moving.plan.predicted.host == times.peak[HOST]
    assert max(n for _, n, _ in times.curve()) == moving.plan.peak
    assert shown(max(n for _, n in times.host_curve())) in host_memory(times, moving.program)
    assert shown(moving.plan.peak) in device_memory(times, moving.program)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written, message",
    [
        ("everything", "offload is 'everything'"),
        ({"gradient": "host"}, r"unknown key 'gradient'\n  near      gradients"),
        ({"optimizer": "disk"}, "optimizer is 'disk'"),
        ({"activations": "auto", "host": -1}, "host is -1"),
        ({"activations": "auto", "host": "lots"}, "the plan: offload: host is 'lots'\n  try       bytes"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(written, message):
    with pytest.raises(PlanError, match=message):
        Plan.read({"offload": written})


def test_too_little_memory_says_where_and_how_much():
    """A budget below what one layer works in, and a host that is too small: what is needed, had and missing add up, and
    with what is said to be needed the step is planned."""

    def refused(written, memory=None):
        with pytest.raises(PlanError) as caught:
            both(Stack, adamw(), plan={"offload": written}, memory=memory).step.prepare(**tokens())
        text = str(caught.value)
        first = re.match(r"a step needs (?:at least )?(.*) on the .*(?:is|has) (.*): (.*) too much", text)
        assert first is not None, text
        need, had, missing = (parse_bytes(part.replace(" ", "")) for part in first.groups())
        assert need == pytest.approx(had + missing, abs=64)
        assert "tried     computing again what can be, and moving to the host what the plan lets" in text
        return need, text

    need, text = refused("auto", "20KiB")
    assert re.search(r"of which  .* are parameters, optimiser state and the batch\n  peak      \S+:\d+", text)
    roomy = both(Stack, adamw(), plan={"offload": "auto"}, memory=need + 64).step.prepare(**tokens())
    assert need - 64 <= roomy.plan.peak <= need + 64, "no less than it needs is enough"
    need, text = refused({"optimizer": "host", "host": "1KiB"})
    assert f"try       a larger host: in offload, {shown(need)} or more, or fewer kinds there" in text
    roomy = both(Stack, adamw(), plan={"offload": {"optimizer": "host", "host": need + 64}}).step.prepare(**tokens())
    assert need - 64 <= roomy.plan.predicted.host <= need + 64


def test_a_host_without_memory_is_told_before_the_first_step(monkeypatch):
    monkeypatch.setattr(host_space, "available", lambda: 1024)
    with pytest.raises(RunError, match=r"a step needs .* on the host, which has 1.00 KiB free"):
        both(Stack, adamw(), plan={"offload": HOST_STATE}).step.prepare(**tokens())


def test_ranks_of_one_host_do_not_take_its_memory_twice(monkeypatch):
    """Each by itself has room; the one whose part is no longer there says so, before it takes any."""
    monkeypatch.setattr(host_space, "available", lambda: 40 << 10)
    promises = []

    def promise(count):
        promises.append(count)
        return sum(promises), 40 << 10

    first, second = (host_space.HostSpace(torch.device("cpu"), promise) for _ in range(2))
    first.prepare(Program.parse(TEXT))
    with pytest.raises(RunError, match=r"need 64.00 KiB .* together, which had 40.00 KiB .* this one needs 32.00 KiB"):
        second.prepare(Program.parse(TEXT))
    assert promises == [32 << 10] * 2 and not second.homes


def test_a_host_that_gives_no_memory_is_told(monkeypatch):
    monkeypatch.setattr(host_space, "available", lambda: 1 << 60)  # a limit of this process is what is left
    large = Program.parse("def main(x: f32[4], s: host(f32[140737488355328]) = state m of w):\n  return x\n")
    with pytest.raises(RunError, match=r"gave no 524288.00 GiB of its memory, .* are free .* may take is"):
        host_space.HostSpace(torch.device("cpu")).prepare(large)


def test_a_host_that_pins_no_memory_is_told(monkeypatch):
    """With what was asked for and what there is; of a device whose host refuses, as this test's does."""

    class Refusing:
        @staticmethod
        def cudaHostRegister(address, size, flags):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    space = host_space.HostSpace(torch.device("cpu"))
    space.device = torch.device("cuda")
    with pytest.raises(
        RunError, match=r"refused to pin 32.00 KiB .* are free .*\(CUDA error 2\)\n  try       offload: none"
    ):
        space.prepare(Program.parse(TEXT))


def test_a_value_that_is_not_there_is_refused():
    data = yaml.safe_load(str(trained({"offload": HOST_STATE}, steps=1, make=Stack)[0].plan))
    values = data["decided"]["moved"]["values"]
    values["nothing"] = values.pop(next(iter(values)))
    with pytest.raises(PlanError, match="there is no value nothing to move"):
        trained(data, steps=1, make=Stack)
    del values["nothing"]
    values["gelu_"] = next(iter(values.values()))
    with pytest.raises(PlanError, match=r"no value gelu_ to move, among \d+ of its block\n  near      gelu"):
        trained(data, steps=1, make=Stack)


def test_who_reads_parameters_by_himself_is_refused():
    with pytest.raises(PlanError, match=r"live on the host, where gradients are asked for \(grads=True\)"):
        trained({"offload": EVERYTHING}, make=Stack, grads=True)
    moving, _ = trained({"offload": EVERYTHING}, steps=1, make=Stack)
    with pytest.raises(TrainError, match=r"parameters that live on the host\n  try       train_step"):
        moving.accumulate(**tokens())


def test_under_a_budget_a_plan_that_says_nothing_may_move_anything(monkeypatch):
    step = both(Stack, adamw(), memory="1GiB").step
    assert step._with_offload(Plan(Mesh())).offload.is_none, "on a CPU there is no host beside the device"
    monkeypatch.setattr(type(step), "device", torch.device("cuda"))
    assert step._with_offload(Plan(Mesh())).offload == AUTO
    assert step._with_offload(Plan.read({"offload": "none"})).offload.is_none
    assert Plan.read({"offload": {"host": "1GiB"}}).offload == replace(AUTO, host=2**30)
    for written in ("none", "auto", {"host": 5}, {"parameters": "host", "optimizer": "auto"}):
        given = Plan.read({"offload": written})
        assert given.data()["offload"] == written and Plan.read(given.data()) == given
