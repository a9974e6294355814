"""Every pass of lower/ on a small program: the text before and after, and that ranks together compute what one device
does.

Layouts are written here by hand, as a plan has them: no solver stands between the program and the text.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from golden import change, golden

import mycel
from mycel import lower, transform
from mycel.errors import PlanError
from mycel.ir import Layout, Mesh, Program, check, prune, type_of
from mycel.lower.distribute import pin
from mycel.lower.offload import norms_of_each
from mycel.lower.settle import settle
from mycel.lower.split_calls import CallSplitter
from mycel.ops import o
from mycel.parts import ShardedModel
from mycel.plan import CPU, Decided, MovedValue, Offloaded, Plan, Residuals, StreamedInput
from mycel.plan.decided import BlockLayouts, digest
from mycel.planning import Task, with_layouts
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out

MESH = Mesh(dp=2, tp=2)


def decided(program: Program, plan: Plan, blocks: str) -> Plan:
    """A plan with layouts as its file has them."""
    layouts = {name: BlockLayouts.read(data) for name, data in yaml.safe_load(blocks).items()}
    return replace(plan, decided=Decided(digest(program), Residuals(program.entry, ()), layouts=layouts))


def values(program: Program) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(v.shape, generator=gen, dtype=v.dtype) for v in program.inputs]


def on_ranks(local: Program, spread: lower.Distributed, mesh: Mesh, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of the ranks together, whole."""
    parts = [spread_out(x, layout, mesh) for x, layout in zip(inputs, spread.inputs, strict=True)]
    outs = zip(simulate(local, mesh, parts), spread.outputs, spread.whole.main.outputs, strict=True)
    return [put_together(xs, layout, x.type, mesh) for xs, layout, x in outs]


def equals(program: Program, local: Program, spread: lower.Distributed, mesh: Mesh) -> None:
    inputs = values(program)
    for want, got in zip(interpret(program, inputs), on_ranks(local, spread, mesh, inputs), strict=True):
        assert type_of(got) == type_of(want) and torch.allclose(got, want, rtol=1e-12, atol=1e-12)


MLP = """
def main(x: f64[8,4], up: f64[6,4], down: f64[4,6]):
  a: f64[8,6] = linear(x, up)      # mlp.py:1
  h: f64[8,6] = gelu(a)            # mlp.py:1
  y: f64[8,4] = linear(h, down)    # mlp.py:2
  z: f64[8,4] = tanh(y)            # mlp.py:3
  return z
"""


def test_pin():
    program, plan = Program.parse(MLP), Plan(MESH, activations={"h": ["dp", "tp"]})
    change("pin", program, pin(program, plan))
    assert pin(program, Plan(MESH)) is program
    for want, got in zip(
        interpret(program, values(program)), interpret(pin(program, plan), values(program)), strict=True
    ):
        assert torch.equal(want, got)


LAYERS = """
def layer(x: f64[8,4], w: f64[4,4]):
  a: f64[8,4] = linear(x, w)
  y: f64[8,4] = tanh(a)
  return y

def main(x: f64[8,4], w0: f64[4,4], w1: f64[4,4], w2: f64[4,4]):
  h: f64[8,4] = call(x, w0, block=@layer)
  i: f64[8,4] = call(h, w1, block=@layer)
  y: f64[8,4] = call(i, w2, block=@layer)
  return y
"""


def test_settle():
    program = Program.parse(LAYERS)
    split, other = Layout((("tp",), ())), Layout(((), ("tp",)))
    settled = settle(program, {1: split, 2: other, 3: split})
    change("settle", program, settled)
    assert len(settled.blocks) == 3 and len(settle(program, {}).blocks) == 2
    assert torch.equal(interpret(settled, values(program))[0], interpret(program, values(program))[0])


MEGATRON = """
main:
  inputs: {x: "f64[8@dp,4]", up: "f64[6@tp,4]", down: "f64[4,6@tp]"}
  values:
    a: "linear _0@dp n@tp -> f64[8@dp,6@tp]"
    h: "gelu _1@dp _0@tp -> f64[8@dp,6@tp]"
    y: "linear _0@dp k@tp -> f64[8@dp,4]+tp"
    z: "tanh _1@dp -> f64[8@dp,4]"
  outputs: ["f64[8,4]"]
"""


def test_spmd():
    program = Program.parse(MLP)
    spread = lower.distribute(program, decided(program, Plan(MESH), MEGATRON))
    change("spmd", program, spread.local)
    equals(program, spread.local, spread, MESH)


def test_spmd_with_padding():
    """Six columns over four ranks: the last part holds none, and what pads it does not reach the sum."""
    program, mesh = Program.parse(MLP), Mesh(dp=2, tp=4)
    spread = lower.distribute(program, decided(program, Plan(mesh), MEGATRON))
    change("spmd_padding", program, spread.local)
    equals(program, spread.local, spread, mesh)


def test_layouts_of_another_program_are_refused():
    other = Program.parse(MLP.replace("gelu", "relu"))
    with pytest.raises(PlanError, match=r"in main: h is relu -> f64\[8,6\], in the plan gelu"):
        lower.distribute(other, decided(other, Plan(MESH), MEGATRON))


@pytest.mark.parametrize(
    "line, message",
    [
        ("linear q@dp -> f64[8,6]", r"linear has no dim q"),
        ("linear _0@dp -> f64[8,6@tp]", r"linear _0@dp gives f64\[8@dp,6\], the plan says f64\[8,6@tp\]"),
        (
            "linear _0@dp n@tp -> f64[8@dp,6@tp]; f64[2]",
            r"a is linear -> f64\[8,6\], in the plan linear -> f64\[8,6\], f64\[2\]",
        ),
    ],
)
def test_a_line_that_does_not_fit_its_operator_is_refused(line, message):
    program = Program.parse(MLP)
    with pytest.raises(PlanError, match=message):
        lower.distribute(
            program, decided(program, Plan(MESH), MEGATRON.replace("linear _0@dp n@tp -> f64[8@dp,6@tp]", line))
        )


GATHERED = """
def layer(x: f64[4,4], w: f32[2,4]):
  u: f64[2,4] = cast(w, dtype=f64)
  v: f64[4,4] = all_gather(u, axes=("dp",), count=2, dim=0, size=4)
  a: f64[4,4] = linear(x, v)
  y: f64[4,4] = tanh(a)
  return y

def main(x: f64[4,4], w0: f32[2,4], w1: f32[2,4]):
  h: f64[4,4] = call(x, w0, block=@layer)
  y: f64[4,4] = call(h, w1, block=@layer)
  return y
"""


def rows(program: Program, count: int) -> list[list[torch.Tensor]]:
    """Different inputs for each rank."""
    per_rank = [seeded(program, seed) for seed in range(count)]
    return [list(xs) for xs in zip(*per_rank, strict=True)]


def seeded(program: Program, seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(v.shape, generator=gen, dtype=v.dtype) for v in program.inputs]


def same_on_ranks(before: Program, after: Program, mesh: Mesh) -> None:
    inputs = rows(before, mesh.world)
    for want, got in zip(simulate(before, mesh, inputs), simulate(after, mesh, inputs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_hoist():
    program, mesh = Program.parse(GATHERED), Mesh(dp=2)
    hoisted = lower.hoist(program)
    change("hoist", program, hoisted)
    same_on_ranks(program, hoisted, mesh)
    assert not any(e.op.name == "all_gather" for e in hoisted.blocks["layer"].eqns)


BACKWARD = """
def layer(dy: f64[4,4], w: f64[4,4]):
  d: f64[4,4] = linear(dy, w)
  dx: f64[4,4] = tanh(d)
  dw: f64[4,4] = matmul(dx, dy)
  db: f64[4] = sum(dy, dims=(0,))
  return dx, dw, db

def main(dy: f64[4,4], w0: f64[4,4], w1: f64[4,4]):
  d1: f64[4,4], g1: f64[4,4], b1: f64[4] = call(dy, w1, block=@layer) [backward]
  d0: f64[4,4], g0: f64[4,4], b0: f64[4] = call(d1, w0, block=@layer) [backward]
  s1: f64[4,4] = all_reduce(g1, axes=("dp",), count=2, kind="+") [backward]
  t1: f64[4] = all_reduce(b1, axes=("dp",), count=2, kind="+") [backward]
  s0: f64[4,4] = all_reduce(g0, axes=("dp",), count=2, kind="+") [backward]
  t0: f64[4] = all_reduce(b0, axes=("dp",), count=2, kind="+") [backward]
  v1: f64[4,4] = sub(w1, s1) [update]
  v0: f64[4,4] = sub(w0, s0) [update]
  return d0, t1, t0, v1, v0
"""


def test_overlap():
    program, mesh = Program.parse(BACKWARD), Mesh(dp=2)
    overlapped = lower.overlap(program)
    change("overlap", program, overlapped)
    same_on_ranks(program, overlapped, mesh)
    names = [e.op.name for e in overlapped.main.eqns]
    assert names.index("begin") < names.index("call", 1), "gradients are sent while the layer before is at work"


TWICE = """
def layer(dy: f64[8,8], w: f64[8,8]):
  dx: f64[8,8] = matmul(dy, w) [backward]
  g: f64[8,8] = linear(dx, dy) [backward]
  return dx, g

def main(dy: f64[8,8], w0: f64[8,8], w1: f64[8,8], w2: f64[8,8]):
  d2: f64[8,8], g2: f64[8,8] = call(dy, w2, block=@layer) [backward]
  d1: f64[8,8], g1: f64[8,8] = call(d2, w1, block=@layer) [backward]
  d0: f64[8,8], g0: f64[8,8] = call(d1, w0, block=@layer) [backward]
  r2: f64[4,8] = reduce_scatter(g2, axes=("tp",), count=2, dim=0) [update]
  s2: f64[4,4] = reduce_scatter(r2, axes=("dp",), count=2, dim=1) [update]
  return d0, g1, g0, s2
"""


def test_what_goes_on_over_another_axis_is_sent_on_while_layers_are_at_work():
    program = Program.parse(TWICE)
    overlapped = lower.overlap(program)
    same_on_ranks(program, overlapped, Mesh(dp=2, tp=2))
    at = [f"{e.op.name} {e.params['axes'][0]}" if "axes" in e.params else e.op.name for e in overlapped.main.eqns]
    assert at == ["call", "begin tp", "call", "finish tp", "begin dp", "call", "finish dp"]


SKETCHED = """
def main(dy: f64[4,4], w: f64[4,4], m: f64[N,4]):
  d: f64[4,4] = linear(dy, w) [backward]
  b: f64[N,4] = linear(m, dy) [backward]
  p: f64[4,4] = all_reduce(d, axes=("dp",), count=2) [backward]
  q: f64[4,4] = tanh(p) [backward]
  s: f64[N,4] = all_reduce(b, axes=("dp",), count=2) [update]
  t: f64[N,4] = matmul(s, q) [update]
  return t
"""


@pytest.mark.parametrize("rows, messages", [(8, [["d", "b"]]), (4096, [["b"], ["d"]])], ids=["small", "large"])
def test_a_small_message_goes_with_one_that_is_waited_for_before_it(rows, messages):
    """A large one does not: the first would be waited for until all of it has come."""
    program = Program.parse(SKETCHED.replace("N", str(rows)))
    overlapped = lower.overlap(program)
    same_on_ranks(program, overlapped, Mesh(dp=2))
    sent = [[v.name for v in e.vars] for e in overlapped.main.eqns if e.op in (o.begin, o.all_reduce)]
    assert sorted(sent) == messages


LOSS = """
def main(x: f32[4], w: f32[4] = parameter w):
  y: f32[4] = mul(x, w)
  loss: f32[] = mean(y, dims=(0,))
  return loss
"""


def test_scaling():
    program = Program.parse(LOSS)
    change("scaling", program, transform.scaled(transform.with_scale(program)))
    assert transform.scaled(program) is program


def test_lowered():
    """All passes, as a plan has decided: no solver and no clock."""
    program = Program.parse(MLP)
    plan = decided(program, Plan(MESH), MEGATRON)
    done = lower.lowered(program, plan)
    change("lowered", program, done.program)
    assert done.spread is not None and not done.regions
    equals(program, done.program, done.spread, MESH)


MOVING = """
def main(x: f64[8,4], w: f64[6,4], v: f64[4,6]):
  a: f64[8,6] = linear(x, w)                                # mlp.py:1
  h: f64[8,6] = gelu(a)                                     # mlp.py:1
  y: f64[8,4] = linear(h, v)                                # mlp.py:2
  z: f64[8,4] = square(y)                                   # mlp.py:3
  dy: f64[8,4] = mul(z, 2.0) [backward]                     # mlp.py:3
  dh: f64[8,6] = matmul(dy, v) [backward]                   # mlp.py:2
  dv: f64[4,6] = linear_weight(dy, h) [backward]            # mlp.py:2
  return dh, dv
"""


def test_offload():
    program = Program.parse(MOVING)
    moved = lower.offload(program, Offloaded("main", (MovedValue("h", "z", "dh"),)))
    change("offload", program, moved)
    inputs = values(program)
    assert all(map(torch.equal, interpret(program, inputs), interpret(moved, inputs)))


UPDATE = """
def main(dy: f64[8,4], x: f64[8,4], a: f64[4,4] = parameter a, b: f64[4,4] = parameter b,
         a.m: f64[4,4] = state exp_avg of a, b.m: f64[4,4] = state exp_avg of b, lr: f64[] = hyper lr of group 0,
         beta1: f64[] = hyper beta1 of group 0, beta2: f64[] = hyper beta2 of group 0,
         decay: f64[] = hyper weight_decay of group 0, skip: f32[]):
  gb: f64[4,4] = linear_weight(dy, x) [backward]
  dx: f64[8,4] = matmul(dy, b) [backward]
  ga: f64[4,4] = linear_weight(dx, x) [backward]
  norm: f64[] = global_norm(ga, gb) [update]
  p: f64[4,4], q: f64[4,4], m: f64[4,4], n: f64[4,4] = lion(UPDATED) [update]
  return norm, a=p, b=q, a.m=m, b.m=n
""".replace("UPDATED", "a, b, a.m, b.m, ga, gb, lr, beta1, beta2, decay, None, skip, count=2")


def same(before: Program, after: Program) -> None:
    inputs = values(before)
    assert all(map(torch.equal, interpret(before, inputs), interpret(after, inputs)))


def test_norms_of_each():
    """The norm of each gradient is taken where it is made, so that it may leave."""
    program = Program.parse(UPDATE)
    change("norms_of_each", program, norms_of_each(program))
    same(program, norms_of_each(program))


def test_split_updates():
    """The state of a is on the host, and 200 bytes of it come at a time: an update of each parameter."""
    program = Program.parse(UPDATE)
    split = lower.split_updates(program, {"a.m", "b.m"}, chunk=200)
    change("split_updates", program, split)
    same(program, split)
    assert str(lower.split_updates(program, {"a.m", "b.m"}, chunk=1000)) == str(program)


def test_hosted_updates():
    """a and its state live on the host, which updates them: gradient and `skip` leave, and nothing comes back."""
    program = Program.parse(UPDATE)
    streamed = tuple(StreamedInput(name, (), "") for name in ("a", "a.m"))
    plan = Offloaded("main", (), streamed, updated={"a": ""})
    hosted = lower.offload(program, plan)
    change("hosted_updates", program, hosted)
    same(program, hosted)
    split = lower.split_updates(program, {"a", "a.m"}, plan.chunk, {"a"})
    (at,) = lower.hosted_updates(split, {"a"})
    assert split.main.eqns[at].inputs[0].name == "a" and lower.hosted_updates(split, ()) == ()


SUMMED = """
def part(w: f64[4], total: f64[4], x: f64[4]):
  d: f64[4] = mul(x, w)
  s: f64[4] = only_first(total, axes=("dp",), count=2)
  t: f64[4] = add(s, d)
  new: f64[4] = all_reduce(t, axes=("dp",), count=2)
  return new

def main(w: f64[4] = parameter w, x: f64[3,4]):
  zero: f64[4] = full(0.0, dtype=f64, shape=(4,))
  total: f64[4] = scan(w, zero, x, body=@part, carry=1, consts=1, length=3)
  return total
"""


def test_plain_sums():
    """A sum that is made partial and whole again in each microbatch: what is added is summed over ranks instead."""
    program = Program.parse(SUMMED)
    plain = lower.plain_sums(program, "part")
    change("plain_sums", program, plain)
    inputs = rows(program, 2)
    (want,), (got,) = simulate(program, Mesh(dp=2), inputs), simulate(plain, Mesh(dp=2), inputs)
    assert all(torch.allclose(a, b) for a, b in zip(want, got, strict=True))


CALLED = """
def layer(dy: f64[8,4], w: f64[4,4], x: f64[8,4]):
  d: f64[8,4] = tanh_grad(dy, x) [backward]
  dx: f64[8,4] = matmul(d, w) [backward]
  dw: f64[4,4] = linear_weight(d, x) [backward]
  return dx, dw

def main(dy: f64[8,4], w: f64[4,4], x: f64[8,4]):
  dx: f64[8,4], dw: f64[4,4] = call(dy, w, x, block=@layer) [backward]
  return dx, dw
"""


def test_split_calls():
    """The stage before waits for dx alone: dw, and what it needs, can be computed later."""
    program = Program.parse(CALLED)
    splitter = CallSplitter(dict(program.blocks), program.main)
    first, second = splitter.split(list(enumerate(program.main.eqns)), program.main.outputs[:1])
    main = replace(program.main, eqns=tuple(eqn for _, eqn in (*first, *second)))
    split = prune(replace(program, blocks={**splitter.blocks, "main": main}))
    change("split_calls", program, split)
    same(program, split)
    assert len(first) == len(second) == 1 and set(splitter.blocks) > set(program.blocks)


def test_compress():
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": {"weight": "int8+ef"}}})
    model = torch.nn.Linear(32, 16, bias=False)
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss, plan=plan, compile=False
    )
    unsharded = step.unsharded(torch.randn(4, 32), torch.randn(4, 16))
    given, gathered = ShardedModel(model, step.optimizer, plan).given(unsharded)
    spread = with_layouts(Task(unsharded.program, unsharded.body, CPU, False, given, gathered), plan)[1]
    assert spread is not None
    texts = [re.sub(r" +# .*", "", str(check(p))) for p in (spread.local, lower.compress(spread.local))]
    golden("compress", f"# before\n\n{texts[0]}\n# after\n\n{texts[1]}")
