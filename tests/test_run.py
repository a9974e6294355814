"""Running programs: control flow, values freed, in-place state, both modes alike."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import mycel
from examples import parse_example
from mycel import Program, RunError
from mycel.ir import OPS, check, type_of
from mycel.ops.collective import COMMUNICATORS
from mycel.run import emit, interpret, load
from mycel.run.kernels import write_into

COND = """\
def double(x: f32[3]):
  y: f32[3] = mul(x, 2.0)
  return y

def halve(x: f32[3]):
  y: f32[3] = div(x, 2.0)
  return y

def main(p: bool[], x: f32[3]):
  y: f32[3] = cond(p, x, then=@double, orelse=@halve)
  return y
"""

LOOP = """\
def test(n: i64[], i: i64[], x: f32[3]):
  more: bool[] = lt(i, n)
  return more

def body(n: i64[], i: i64[], x: f32[3]):
  j: i64[] = add(i, 1)
  y: f32[3] = mul(x, 2.0)
  return j, y

def main(n: i64[], i: i64[], x: f32[3]):
  j: i64[], y: f32[3] = loop(n, i, x, test=@test, body=@body, consts=1)
  return j, y
"""

SCAN = """\
def step(w: f32[2], s: f32[2], x: f32[2]):
  a: f32[2] = mul(s, w)
  t: f32[2] = add(a, x)
  return t, a

def main(w: f32[2], s: f32[2], xs: f32[4,2]):
  t: f32[2], ys: f32[4,2] = scan(w, s, xs, body=@step, length=4, consts=1, carry=1, reverse=REVERSE)
  return t, ys
"""


def both(text, *inputs):
    """The program in both modes; they must agree."""
    program = Program.parse(text)
    ours = mycel.jit(program)(*inputs)
    for a, b in zip(ours, mycel.jit(program, mode="eager")(*inputs), strict=True):
        assert torch.equal(a, b)
    return ours


def test_cond():
    x = torch.randn(3)
    assert torch.equal(both(COND, torch.tensor(True), x)[0], x * 2)
    assert torch.equal(both(COND, torch.tensor(False), x)[0], x / 2)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_loop(n):
    x = torch.randn(3)
    turns, y = both(LOOP, torch.tensor(n), torch.tensor(0), x)
    assert turns == n and torch.equal(y, x * 2**n)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    w, s, xs = torch.randn(2), torch.randn(2), torch.randn(4, 2)
    t, ys = both(SCAN.replace("REVERSE", str(reverse)), w, s, xs)
    rows = []
    for x in reversed(xs) if reverse else xs:
        rows.append(s * w)
        s = rows[-1] + x
    assert torch.allclose(t, s) and torch.allclose(ys, torch.stack(rows[::-1] if reverse else rows))


def test_values_are_freed_after_their_last_use():
    """A chain of k large values never holds more than two of them."""
    eqns = "\n".join(f"  v{i + 1}: f32[1000] = add(v{i}, 1.0)" for i in range(20))
    program = Program.parse(f"def main(v0: f32[1000]):\n{eqns}\n  return v20\n")
    for run in (load(program, torch.device("cpu"))[0], lambda x: interpret(program, [x])):
        alive: list[weakref.ref] = []
        peak = 0
        plain = torch.Tensor.__add__

        def watched(self, other):
            nonlocal peak
            out = plain(self, other)
            alive.append(weakref.ref(out))
            gc.collect()
            peak = max(peak, sum(r() is not None for r in alive))
            return out

        torch.Tensor.__add__ = watched
        try:
            run(torch.zeros(1000))
        finally:
            torch.Tensor.__add__ = plain
        assert len(alive) == 20 and peak <= 2


def test_outputs_do_not_alias_state_that_is_updated():
    text = """\
def main(a: f32[3], b: f32[3]):
  c: f32[3] = add(a, 1.0)
  v: f32[3,1] = reshape(a, shape=(3, 1))
  return a, v, a=c, b=a
"""
    a, b = torch.tensor([1.0, 2, 3]), torch.zeros(3)
    old, view = mycel.jit(Program.parse(text))(a, b)
    assert old.tolist() == [1, 2, 3] and view.flatten().tolist() == [1, 2, 3]
    assert a.tolist() == [2, 3, 4] and b.tolist() == [1, 2, 3]


def test_wrong_inputs_are_named():
    fn = mycel.jit(Program.parse(COND))
    with pytest.raises(RunError, match=r"missing   x: f32\[3\]"):
        fn(torch.tensor(True))
    with pytest.raises(RunError, match=r"input x is f64\[3\], the program takes f32\[3\]"):
        fn(torch.tensor(True), torch.randn(3).double())
    with pytest.raises(RunError, match="unknown   z"):
        fn(torch.tensor(True), x=torch.randn(3), z=torch.randn(3))


def test_generated_source_is_plain_python():
    """It runs with torch alone."""
    source = emit(check(Program.parse(LOOP)))
    env = {}
    exec(source, env)
    turns, y = env["main"](torch.tensor(3), torch.tensor(0), torch.ones(3))
    assert turns == 3 and y.tolist() == [8, 8, 8] and "mycel" not in source


def test_jit_remembers_signatures():
    calls = []

    def fn(x, scale=2):
        calls.append(x.shape)
        return x * scale

    fast = mycel.jit(fn)
    a, b = torch.randn(2), torch.randn(3)
    for _ in range(3):
        assert torch.equal(fast(a), a * 2) and torch.equal(fast(b), b * 2) and torch.equal(fast(a, scale=3), a * 3)
        assert torch.equal(fast(a.double()), a.double() * 2)
    assert len(fast.entries) == 4 and len(calls) == 12  # what it adds to a list is added by every call
    assert "mul(x, 3)" in str(fast.program(a, scale=3)) and "x * 3" in fast.source(a, scale=3)
    assert len(fast.entries) == 4


REUSE = """\
def main(x: f64[4,6], w: f64[6,6], b: f64[6]):
  h: f64[4,6] = linear(x, w)
  a: f64[4,6] = add(h, b)
  g: f64[4,6] = gelu(a)
  v: f64[24] = reshape(g, shape=(24,))
  k: f64[4,6] = linear(x, w)
  s: f64[4,6] = mul(x, k)
  t: f64[4,6] = tanh(s)
  u: f64[24] = add(v, 1.0)
  z: f64[4,6] = mul(g, t)
  q: f64[4,6] = sub(z, x)
  return q, u, v, x
"""


def test_memory_is_used_again_only_where_nobody_looks():
    program = Program.parse(REUSE)
    plain, lean = load(program, torch.device("cpu"))[0], load(program, torch.device("cpu"), reuse=True)
    inputs = [
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(6, 6, dtype=torch.float64),
        torch.randn(6, dtype=torch.float64),
    ]
    kept = [x.clone() for x in inputs]
    for a, b in zip(plain(*inputs), lean[0](*inputs), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))
    for line in (
        "a = h.add_(b)",
        "torch._C._nn.gelu_(a",
        "s = k.mul_(x)",
        "t = torch.tanh_(s)",
        "z = t.mul_(g)",
        "q = z.sub_(x)",
    ):
        assert line in lean[1], line
    # v is an output and lies in g
    assert "g.mul_" not in lean[1] and "v.add_" not in lean[1] and "x." not in lean[1].replace("max.", "")


def last(outs):
    return outs[-1] if isinstance(outs, tuple) else outs


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.into and not op.by_rank])
def test_writing_over_an_operand_is_the_kernel(name):
    op, ran = OPS[name], 0
    for text in op.examples:
        example = parse_example(text)
        inputs = example.make("f64")
        want = last(op.kernel(*inputs, **example.params))
        for at in range(len(op.into)):
            if not isinstance(inputs[at], torch.Tensor) or type_of(inputs[at]) != type_of(want):
                continue
            own = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
            names = [f"x{i}" if isinstance(x, torch.Tensor) else repr(x) for i, x in enumerate(own)]
            env = {f"x{i}": x for i, x in enumerate(own)}
            known = {"torch": torch, op.kernel.__name__: op.kernel, **env}
            got = last(eval(write_into(op, at, names, example.params), known))
            may = "over=" in op.into[at]  # where its kernel can
            assert torch.equal(got, want) and (may or got.data_ptr() == own[at].data_ptr())
            ran += 1
    assert ran


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.into or op.fresh])
def test_fresh_results_share_no_memory(name):
    op = OPS[name]
    for text in op.examples:
        example = parse_example(text)
        inputs = example.make("f64")
        outs = op.kernel(*inputs, **example.params)
        held = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        addresses = [y.untyped_storage().data_ptr() for y in (outs if isinstance(outs, tuple) else (outs,))]
        assert not held & set(addresses) and len(set(addresses)) == len(addresses)


SHARING = """
def main(x: f64[4], w: f64[2], m: f64[2], lr: f64[], zero: f64[], scale: f32[], skip: f32[]):
  a: f64[4] = add(x, 1.0)
  p: f64[2] = own_part(a, axes=("dp",), count=2, dim=0)
  first: f64[4] = only_first(a, axes=("dp",), count=2)
  b: f64[4] = mul(a, 2.0)
  c: f64[4] = add(b, first)
  d: f64[2] = own_part(c, axes=("dp",), count=2, dim=0)
  e: f64[2] = mul(d, p)
  f: f64[4] = sub(c, 3.0)
  g: f64[2] = own_part(f, axes=("dp",), count=2, dim=0)
  w1: f64[2], m1: f64[2] = sgd(w, m, g, lr, lr, zero, zero, zero, scale, skip, count=1, momentum=True)
  h: f64[4] = mul(f, 1.5)
  return e, h, w=w1, m=m1
"""


OLD = SHARING.replace("  h: f64", '  old: f64[2] = own_part(w, axes=("tp",), count=1, dim=0)\n  h: f64').replace(
    "e, h,", "e, h, old,"
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("text", [SHARING, OLD], ids=["given away", "an old value returned"])
def test_what_a_rank_takes_of_a_value_is_not_written_over(text, rank):
    """`own_part` and `only_first` give the memory of what they are given, or a part of it."""
    program = check(Program.parse(text))
    scalars = [torch.tensor(x, dtype=torch.float64) for x in (0.5, 0.0)] + [torch.tensor(2.0), torch.tensor(0.0)]
    given = lambda: [torch.arange(4.0).double(), torch.ones(2).double(), torch.zeros(2).double(), *scalars]
    COMMUNICATORS.append(SimpleNamespace(index=lambda axes: rank if axes == ("dp",) else 0, at=""))
    try:
        wanted = interpret(program, given())
        state = given()
        got = [*load(program, torch.device("cpu"), reuse=True, donate=True)[0](*state), *state[1:3]]
    finally:
        COMMUNICATORS.pop()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (got, wanted)
