"""Passes of lower/ that write or change messages: the text before and after on a small program, and that ranks compute
the same, or with a codec nearly so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from distributing import OneDevice, compared, start_values
from golden import change, golden
from models import VOCAB, gpt2

from mycel import lower
from mycel.ir import Builder, Layout, Mesh, Program, Role, Type, check
from mycel.lower import last_call
from mycel.lower.encode_gathers import EncodedGathers, encode_gathers
from mycel.lower.encode_sends import encode_rows_of_experts, encode_sends
from mycel.lower.last_call import divided_last_call
from mycel.lower.places import Crossing
from mycel.lower.wide_sums import add_wide
from mycel.ops import o
from mycel.ops.codecs import Compression
from mycel.parts import ShardedModel
from mycel.plan import CPU, Plan
from mycel.plan.places import read_places
from mycel.plan.synchronising import SyncPolicy
from mycel.planning import Task, planned
from mycel.run import interpret, simulate, simulate_places
from mycel.run.simulate import put_together, simulate_stages, spread_out

DP = Layout((("dp",), ()))


def values(program: Program, seed: int = 0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(v.shape, generator=gen, dtype=v.dtype) for v in program.inputs]


def by_rank(program: Program, ranks: int) -> list[list[torch.Tensor]]:
    """Different inputs for each rank."""
    return [list(xs) for xs in zip(*(values(program, seed) for seed in range(ranks)), strict=True)]


def same_on_ranks(program: Program, changed: Program) -> None:
    """To the bit, of two ranks with inputs of their own."""
    inputs = by_rank(program, 2)
    for before, after in zip(*(simulate(p, Mesh(dp=2), inputs) for p in (program, changed)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def nearly_equal(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> None:
    """As close as 8 bits are, and not to the bit: something was encoded."""
    for x, y in zip(want, got, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=0.02 * float(x.abs().max())) and not torch.equal(x, y)


def each(programs: Sequence[Program], name: str) -> str:
    return "\n".join(f"# {name} {i}\n\n{check(p)}" for i, p in enumerate(programs))


GATHERS = """
def main(x: f32[4,4], w: f32[2,4] = parameter w, b: f32[2] = parameter b):
  t: i64[] = begin(w, b, axes=("dp",), count=2, dims=(0, 0), op="all_gather", sizes=(4, 4))
  h: f32[4,4] = tanh(x)
  v: f32[4,4], c: f32[4] = finish(t, w, b, axes=("dp",), count=2, dims=(0, 0), op="all_gather", sizes=(4, 4))
  y: f32[4,4] = linear_bias(h, v, c)
  return y
"""


def test_encode_gathers():
    """A bucket of which one parameter is encoded: the other goes in a message of its own."""
    program = Program.parse(GATHERS)
    encoded = encode_gathers(program, EncodedGathers("dp", {"w": "int8"}))
    change("encode_gathers", program, encoded)
    inputs = by_rank(program, 2)
    nearly_equal(simulate(program, Mesh(dp=2), inputs)[0], simulate(encoded, Mesh(dp=2), inputs)[0])


COMES = 'axes=("pp",), count=2, dtypes=(f32, f32), shapes=((2, 16), (2,)), source=0, tag=0'
STAGES = f"""
def main(x: f32[2,16]):
  h: f32[2,16] = tanh(x)
  n: f32[2] = sum(h, dims=(1,))
  t: i64[] = begin_send(h, n, axes=("pp",), count=2, tag=0, to=1)
  s: i64[] = finish_send(t, h, n, axes=("pp",), count=2, tag=0, to=1) [update]
  return h

def main():
  t: i64[] = begin_receive({COMES})
  h: f32[2,16], n: f32[2] = finish_receive(t, {COMES})
  y: f32[2,16] = square(h)
  return y, n
"""


def test_encode_sends():
    """What one stage sends another: rows that are wide enough are encoded, others go as they are."""
    first, second = STAGES.split("\n\n")
    programs = [Program.parse(first), Program.parse(second)]
    encoded = encode_sends(programs, "int8")
    golden("encode_sends", f"# before\n\n{each(programs, 'rank')}\n# after\n\n{each(encoded, 'rank')}")
    inputs = [[[x] for x in values(programs[0])], []]
    (_, (want, n)), (_, (got, same)) = (simulate_stages(p, Mesh(dp=1), "pp", inputs) for p in (programs, encoded))
    nearly_equal(want, got)
    assert torch.equal(n[0], same[0])


EXPERTS = """
def layer(x: f32[4,16], sent: i64[2], got: i64[2], w: f32[16,16]):
  rows: f32[4,16] = exchange_rows(x, sent, got, axes=("ep",), count=2, rows=4)
  y: f32[4,16] = linear(rows, w)
  back: f32[4,16] = exchange_rows(y, got, sent, axes=("ep",), count=2, rows=4)
  return back

def main(x: f32[4,16], sent: i64[2], got: i64[2], w: f32[16,16]):
  y: f32[4,16] = call(x, sent, got, w, block=@layer)
  return y
"""


def test_encode_rows_of_experts():
    program = Program.parse(EXPERTS)
    encoded = encode_rows_of_experts(program, "int8")
    change("encode_rows_of_experts", program, encoded)
    two = torch.tensor([2, 2])
    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((4, 16), (16, 16)))
    inputs = [[x, x + 1], [two, two], [two, two], [w, w * 2]]
    nearly_equal(simulate(program, Mesh(ep=2), inputs)[0], simulate(encoded, Mesh(ep=2), inputs)[0])


W, BUFFER = Role("parameter", "w"), Role("buffer", "mean")
OUTER = {
    "outer_diloco": (
        SyncPolicy("dp", "diloco", {"H": 8, "lr": 0.7, "momentum": 0.9}),
        {"w": Compression("int8", True)},
    ),
    "outer_sma": (SyncPolicy("dp", "sma", {"H": 1, "alpha": 0.1}), {}),
    "outer_later": (SyncPolicy("dp", "local", {"H": 8, "overlap": 1}), {}),
    "outer_two_steps_later": (
        SyncPolicy("dp", "diloco", {"H": 8, "overlap": 2, "lr": 0.7, "momentum": 0.9}),
        {"w": Compression("int8", True)},
    ),
}


@pytest.mark.parametrize("name", OUTER)
def test_outer(name):
    """What replicas say to each other: an outer step of what is encoded, with a buffer that is averaged beside it; a
    part of the way to the mean; a message that goes on beside the next step; and one beside two, which waits twice."""
    policy, codecs = OUTER[name]
    count = 3 if name == "outer_two_steps_later" else 2
    tensors = {W: Type(torch.float32, (4,)), BUFFER: Type(torch.float32, (2,))}
    message = lower.outer_message(policy, tensors, count, codecs)
    texts = [f"# takes\n\n{check(message.takes)}"] if message.takes is not None else []
    texts += [f"# part {k}\n\n{check(part)}" for k, part in enumerate(message.parts, 1)]
    golden(name, "\n".join((f"# {policy} of w and mean, between {count} replicas\n", *texts)))


def test_an_outer_message_averages():
    """Without a codec, both replicas have the mean of w; overlapped, they get what the mean was away from what they
    sent."""
    tensors = {W: Type(torch.float32, (4,))}
    now = lower.outer_message(SyncPolicy("dp", "local", {"H": 8}), tensors, 2, {}).whole
    w = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    mean = (w[0] + w[1]) / 2
    assert all(torch.allclose(x, mean) for x in simulate(now, Mesh(dp=2), [w])[0])
    later = lower.outer_message(SyncPolicy("dp", "local", {"H": 8, "overlap": 1}), tensors, 2, {}).whole
    given = {W: [x + 3 for x in w], lower.outer_role("sent", W): w}
    got = simulate(later, Mesh(dp=2), [given[later.role(v)] for v in later.inputs])[0]
    assert all(torch.allclose(x, mean + 3) for x in got)


STEP = """
def part(a: f64[4], b: f64[4], loss: f64[], ga: f64[4], gb: f64[4], x: f64[2,4]):
  u: f64[2,4] = mul(x, a)                          # model.py:1
  h: f64[2,4] = sin(u)                             # model.py:1
  y: f64[2,4] = mul(h, b)                          # model.py:2
  s: f64[2,4] = square(y)                          # model.py:3
  l: f64[] = sum(s, dims=(0, 1))                   # model.py:3
  loss_new: f64[] = add(loss, l)                   # model.py:3
  dy: f64[2,4] = mul(y, 2.0) [backward]            # model.py:3
  pb: f64[2,4] = mul(dy, h) [backward]             # model.py:2
  db: f64[4] = sum(pb, dims=(0,)) [backward]       # model.py:2
  dh: f64[2,4] = mul(dy, b) [backward]             # model.py:2
  c: f64[2,4] = cos(u) [backward]                  # model.py:1
  du: f64[2,4] = mul(dh, c) [backward]             # model.py:1
  pa: f64[2,4] = mul(du, x) [backward]             # model.py:1
  da: f64[4] = sum(pa, dims=(0,)) [backward]       # model.py:1
  ga_new: f64[4] = add(ga, da) [backward]
  gb_new: f64[4] = add(gb, db) [backward]
  return loss_new, ga_new, gb_new

def main(x: f64[4,4], a: f64[4] = parameter a, b: f64[4] = parameter b):
  parts: f64[2,2,4] = reshape(x, shape=(2, 2, 4))
  none: f64[] = full(0.0, dtype=f64, shape=())
  no_a: f64[4] = full(0.0, dtype=f64, shape=(4,))
  no_b: f64[4] = full(0.0, dtype=f64, shape=(4,))
  loss: f64[], ga: f64[4], gb: f64[4] = scan(a, b, none, no_a, no_b, parts, body=@part, carry=3, consts=2, length=2)
  new_a: f64[4] = sub(a, ga) [update]
  new_b: f64[4] = sub(b, gb) [update]
  return loss, a=new_a, b=new_b
"""


def test_in_places():
    """a on rank 0, b on rank 1: h crosses, its cotangent comes back, and each place updates its own."""
    program, places = Program.parse(STEP), read_places({"a": [0], "*": [1]})
    placed = lower.in_places(program, "part", places, "1f1b").programs
    golden("in_places", f"# before\n\n{check(program)}\n# after\n\n{each(placed, 'place')}")
    ends = [lower.crossings(p, None) for p in placed]
    connected = lower.connect(placed, ends, places)
    inputs = values(program)
    loss, new_a, new_b = interpret(program, inputs)
    by_name = {v.name: [x] for v, x in zip(program.inputs, inputs, strict=True)}
    given = [[by_name[v.name] for v in p.inputs] for p in connected]
    ranks = simulate_places(connected, [p.mesh for p in places], [p.ranks for p in places], given)
    for (got, new), want in zip(ranks, (new_a, new_b), strict=True):
        assert torch.allclose(got[0], loss) and torch.allclose(new[0], want)


ACROSS = """
def main(h: f32[6,8]):
  t: i64[] = begin_send_across(h, tag=0, to=1)
  s: i64[] = finish_send_across(t, h, tag=0, to=1)
  return h

def main():
  t: i64[] = begin_receive_across(dtype=f32, source=0, tag=0)
  h: f32[4,8] = finish_receive_across(t, dtype=f32, shape=(4, 8), source=0, tag=0)
  return h
"""


def test_connect():
    """Twelve rows on two ranks, sent to three: each message names its pieces."""
    first, second = ACROSS.split("\n\n")
    programs, places = [Program.parse(first), Program.parse(second)], read_places({"a": [0, 1], "*": [2, 3, 4]})
    whole = Type(torch.float32, (12, 8))
    ends = [{(0, True): Crossing(whole, DP)}, {(0, False): Crossing(whole, DP)}]
    connected = lower.connect(programs, ends, places)
    golden("connect", f"# before\n\n{each(programs, 'place')}\n# after\n\n{each(connected, 'place')}")
    x = torch.randn(12, 8)
    meshes, ranks = [p.mesh for p in places], [p.ranks for p in places]
    got = simulate_places(connected, meshes, ranks, [[spread_out(x, DP, meshes[0])], []])[1][0]
    assert torch.equal(put_together(got, DP, whole, meshes[1]), x)


def test_sums_added_wide():
    b = Builder()
    x = b.input("x", Type(torch.bfloat16, (4, 6)))
    with b:
        total = o.all_reduce(x, axes=("dp",), count=2)
        part = o.reduce_scatter(o.relu(x), axes=("dp",), count=2, dim=1)
    program = check(Program({"main": b.block([total, part])}))
    golden("wide_sums", f"# before\n\n{program}\n# after\n\n{check(add_wide(program))}")


LAYER = """
def layer(x: f32[4,4], w: f32[4,4]):
  h: f32[4,4] = linear(x, w)
  y: f32[4,4] = tanh(h)
  return y

def main(x: f32[4,4], w: f32[4,4]):
"""
SENT_ON = f"""{LAYER}  a: f32[4,4] = call(x, w, block=@layer)
  s: f32[2,4] = reduce_scatter(a, axes=("dp",), count=2, dim=0)
  b: f32[4,4] = call(a, w, block=@layer)
  c: f32[4,4] = call(b, w, block=@layer)
  d: f32[4,4] = call(c, w, block=@layer)
  half: f32[2,4] = mul(s, 0.5)
  bent: f32[2,4] = tanh(half)
  all: f32[4,4] = all_reduce(a, axes=("dp",), count=2)
  wave: f32[4,4] = sin(all)
  both: f32[4,4] = all_reduce(wave, axes=("dp",), count=2)
  mean: f32[2,4] = all_reduce(bent, axes=("dp",), count=2)
  y: f32[2,4] = add(mean, 1.0)
  return y, both, d, wave
"""


def test_what_has_come_is_computed_with_and_sent_on_between_calls():
    """Not behind all of them, where it is used; and nobody computes anything else."""
    program = check(Program.parse(SENT_ON))
    changed = check(lower.overlap(program))
    change("sent_on", program, changed)
    names = [e.op.name for e in changed.main.eqns]
    last = len(names) - 1 - names[::-1].index("call")
    assert names[:last].count("begin") == 3 and {"tanh", "sin"} <= {*names[:last]}
    same_on_ranks(program, changed)


BY_ARRIVAL = f"""{LAYER}  a: f32[4,4] = call(x, w, block=@layer)
  b: f32[4,4] = call(a, w, block=@layer)
  part: f32[2,4] = reduce_scatter(b, axes=("dp",), count=2, dim=0)
  bent: f32[2,4] = tanh(part)
  again: f32[2,4] = all_reduce(bent, axes=("dp",), count=2)
  own: f32[4,4] = all_reduce(b, axes=("dp",), count=2, kind="max")
  half: f32[4,4] = mul(own, 0.5)
  first: f32[4,4] = all_reduce(a, axes=("dp",), count=2)
  wave: f32[4,4] = sin(first)
  free: f32[4,4] = cos(b)
  return again, half, wave, free
"""


def test_behind_the_last_call_messages_are_waited_for_as_they_were_sent():
    """The one sent first comes first, with all that is computed of it; the one sent on of another comes last."""
    program = check(Program.parse(BY_ARRIVAL))
    changed = check(lower.overlap(program))
    change("by_arrival", program, changed)
    same_on_ranks(program, changed)


LAST_CALL = """
def layer_backward(g: f32[4,4], x: f32[4,4], v: f32[4,4], w: f32[4,4]):
  da: f32[4,4] = matmul(g, w) [backward]
  dw: f32[4,4] = linear_weight(g, x) [backward]
  db: f32[4] = sum(da, dims=(0,)) [backward]
  dx: f32[4,4] = matmul(da, v) [backward]
  dv: f32[4,4] = linear_weight(da, x) [backward]
  return dx, dw, dv, db

def main(g: f32[4,4], x: f32[4,4], v: f32[4,4], w: f32[4,4]):
  dx: f32[4,4], dw: f32[4,4], dv: f32[4,4], db: f32[4] = call(g, x, v, w, block=@layer_backward) [backward]
  half: f32[4,4] = mul(dw, 0.5) [backward]
  gw: f32[4,4] = all_reduce(half, axes=("dp",), count=2) [backward]
  gv: f32[4,4] = all_reduce(dv, axes=("dp",), count=2) [backward]
  gb: f32[4] = all_reduce(db, axes=("dp",), count=2) [backward]
  return dx, gw, gv, gb
"""


def test_the_last_call_of_backward_becomes_two(monkeypatch):
    """What is made first is sent beside what is made then; a call with little to send, or in forward, stays whole."""
    program = check(Program.parse(LAST_CALL))
    assert divided_last_call(program) is program
    monkeypatch.setattr(last_call, "LEAST", 16)
    changed = check(lower.overlap(check(divided_last_call(program))))
    change("last_call", program, changed)
    names = [e.op.name for e in changed.main.eqns]
    assert names.index("call") < names.index("begin") < names.index("call", names.index("call") + 1)
    same_on_ranks(program, changed)
    forward = check(Program.parse(LAST_CALL.replace(" [backward]", "")))
    assert divided_last_call(forward) is forward


@pytest.mark.parametrize("zero", ["", "2 over dp"])
def test_a_step_whose_last_call_is_two_is_that_of_one_device(zero, monkeypatch):
    monkeypatch.setattr(last_call, "LEAST", 1)
    ids = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    one = OneDevice.of(gpt2(), {"input_ids": ids, "labels": ids})
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], **({"zero": zero} if zero else {})})
    inputs = ShardedModel(one.model, one.optimizer, plan).given(one.unsharded)
    done = planned(Task(one.unsharded.program, one.unsharded.body, CPU, False, *inputs), plan)[1]
    assert any(name.endswith("_weights") for name in done.program.blocks)
    compared(one.unsharded.program, done.spread, plan.mesh, start_values(one), done.program)
