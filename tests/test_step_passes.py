"""The passes of a training step: one golden text for each, and the law of each over a program of a repeated layer and
over random programs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs
from zoo import inputs

from mycel import Program, transform
from mycel.ir import Role, check, is_float
from mycel.lower import reside
from mycel.plan import CPU, Costs, residuals
from mycel.run import emit, interpret, load
from mycel.transform import ParameterGroup

LOSS = """\
def layer(x: f32[4,8], w: f32[8,8], b: f32[8]):
  h: f32[4,8] = linear(x, w)    # model.py:4
  s: f32[4,8] = add(h, b)       # model.py:4
  a: f32[4,8] = exp(s)          # model.py:5
  t: f32[4,8] = tanh(a)         # model.py:6
  y: f32[4,8] = mul(t, 0.5)     # model.py:7
  return y

def main(x: f32[4,8], target: i64[4], w1: f32[8,8] = parameter 0.weight, b1: f32[8] = parameter 0.bias,
         w2: f32[8,8] = parameter 1.weight, b2: f32[8] = parameter 1.bias, w: f32[5,8] = parameter head):
  h: f32[4,8] = call(x, w1, b1, block=@layer)             # model.py:10
  g: f32[4,8] = call(h, w2, b2, block=@layer)             # model.py:10
  z: f32[4,5] = linear(g, w)                              # model.py:11
  loss: f32[], logp: f32[4,5] = cross_entropy(z, target, None)  # model.py:12
  return loss
"""
WRT = [2, 3, 4, 5, 6]
WEIGHTS = ["w1", "b1", "w2", "b2", "w"]
BATCH = ["x", "target"]


def loss_program() -> Program:
    return check(Program.parse(LOSS))


def arguments(program: Program) -> list[torch.Tensor]:
    given = inputs(program)
    return [x.abs() % 5 if x.dtype == torch.int64 else x * 0.3 if x.is_floating_point() else x for x in given]


def graded(program: Program) -> Program:
    """With its gradients; the small layer stays a block."""
    program = check(transform.value_and_grad(program, WRT))
    for change in (transform.dce, transform.cse, transform.algebra, transform.dce):
        program = check(change(program))
    return program


def close(was, now, tol=1e-5):
    for a, b in zip(was, now, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tol, atol=tol)


def test_head(monkeypatch):
    monkeypatch.setattr(sys.modules["mycel.transform.head"], "LEAST", 1)
    program = loss_program()
    fused = check(transform.head(program))
    golden("head", str(fused))
    args = arguments(program)
    close(interpret(program, args), interpret(fused, args))
    close(interpret(graded(program), args), interpret(graded(fused), args))
    apart = check(transform.head(program, mean=False))
    assert 'reduction="sum"' in str(apart)
    close(interpret(graded(program), args), interpret(graded(apart), args))


def test_head_leaves_logits_that_others_see(monkeypatch):
    monkeypatch.setattr(sys.modules["mycel.transform.head"], "LEAST", 1)
    program = check(Program.parse(LOSS.replace("return loss", "return loss, z")))
    assert transform.head(program) == program


def groups() -> list[ParameterGroup]:
    flags = (("decoupled", True), ("amsgrad", False), ("maximize", False))
    hyper = ("lr", "beta1", "beta2", "eps", "weight_decay")
    return [
        ParameterGroup(
            "adam", ("0.weight", "0.bias", "1.weight", "1.bias"), ("exp_avg", "exp_avg_sq", "step"), hyper, flags
        ),
        ParameterGroup("sgd", ("head",), (), ("lr", "momentum", "dampening", "weight_decay", "first_step"), name="1"),
    ]


def test_optimise():
    stepping = check(transform.optimise(graded(loss_program()), groups(), 1, clip_norm=1.0))
    golden("optimise", str(stepping))


def test_optimise_with_a_loss_scale():
    stepping = check(transform.optimise(graded(check(transform.with_scale(loss_program()))), groups(), 1))
    assert {"loss_scale", "good_steps", "skipped"} <= set(stepping.updates)


@pytest.mark.parametrize("ignored", [-100, 2])
def test_microbatch(ignored):
    """The scan over parts gives the loss and gradients of the whole batch, though parts count unequally."""
    program = check(Program.parse(LOSS.replace("None)", f"None, ignore_index={ignored})") if ignored != -100 else LOSS))
    big = check(Program.parse(str(program).replace("[4,", "[12,").replace("i64[4]", "i64[12]")))
    shared, counting, unseen = transform.shares(program, big, WEIGHTS, BATCH, 3)
    assert unseen == []
    parts = transform.simplify(check(transform.value_and_grad(check(shared), WRT)))
    whole = check(transform.microbatch(parts, check(counting), 3, BATCH))
    if ignored == 2:
        golden("microbatch", str(whole))
    args = arguments(big)
    args[1] = torch.tensor([2, 2, 2, 0, 1, 3, 4, 0, 2, 1, 2, 2])
    close(interpret(graded(big), args), interpret(whole, args))


def test_shares_go_by_terms():
    """A sum of a mean over counted rows and of something without a count."""
    text = LOSS.replace(
        "return loss",
        "r: f32[] = mean(w, dims=(0,1))\n  m: f32[] = mul(r, 0.1)\n  total: f32[] = add(loss, m)\n  return total",
    )
    big = check(Program.parse(text.replace("[4,", "[8,").replace("i64[4]", "i64[8]")))
    shared, counting, _ = transform.shares(check(Program.parse(text)), big, WEIGHTS, BATCH, 2)
    assert len(counting.results) == 1
    main = str(check(shared)).split("def main")[1]
    assert "div(m, 2)" in main and ", count)" in main  # by the number of parts, and by the count


def test_precision():
    program = check(Program.parse(LOSS))
    half = check(transform.precision(program, torch.bfloat16))
    golden("precision", str(half))
    args = arguments(program)
    close(interpret(program, args), interpret(half, args), 3e-2)
    assert [v.type for v in half.inputs] == [v.type for v in program.inputs]
    gradients = check(transform.value_and_grad(half, WRT)).results[1:]
    assert all(g.dtype == torch.float32 for g in gradients)  # weights are wide, so are their gradients


@given(programs(), st.sampled_from([torch.bfloat16, torch.float16]))
@settings(derandomize=True, deadline=None, max_examples=60, database=None)
def test_precision_types_any_program(program, dtype):
    program = replace(program, roles={v.name: Role("parameter", v.name) for v in program.inputs})
    half = check(transform.precision(program, dtype))
    assert [getattr(x, "type", x) for x in half.main.outputs] == [getattr(x, "type", x) for x in program.main.outputs]


def test_outline():
    program = graded(loss_program())
    cut, names = transform.outline(program, lambda block, run: True)
    golden("outline", str(check(cut)))
    assert names == {"layer_forward_2", "layer_backward", "layer_backward_2", "main_1"}
    args = arguments(program)
    close(interpret(program, args), interpret(cut, args), 0)
    whole, names = transform.outline(program, lambda block, run: False)
    assert whole == program and names == {"layer_forward_2", "layer_backward", "layer_backward_2"}


CHOICE = """
  y{i}: f32[{n}] = mul(a{i}, 2.0)
  z{i}: f32[{n}] = where(ok, y{i}, a{i})
  m{i}: i64[] = add(n{i}, 1)
  w{i}: i64[] = where(ok, m{i}, n{i})"""


@pytest.mark.parametrize(("chained", "sizes"), [(False, [48, 48, 48, 50]), (True, [48, 48, 98])])
def test_long_stretches_are_outlined_in_parts(chained, sizes):
    """Choices that share a condition alone are apart; tensors that are made of each other stay together."""
    numbers = range(48)
    inputs = ", ".join(f"a{i}: f32[2], n{i}: i64[]" for i in numbers)
    body = "".join(CHOICE.format(i=i, n=2) for i in numbers)
    if chained:
        for i in numbers[1:]:
            body = body.replace(f"mul(a{i}, 2.0)", f"mul(z{i - 1}, 2.0)").replace(f"add(n{i}, 1)", f"add(w{i - 1}, 1)")
    results = ", ".join(f"z{i}, w{i}" for i in numbers)
    head = f"def main(c: f32[], {inputs}):\n  b: f32[] = mul(c, 2.0)\n  ok: bool[] = lt(b, 1.0)"
    program = check(Program.parse(f"{head}{body}\n  return {results}\n"))
    cut, names = transform.outline(program, lambda block, run: True)
    assert sorted(len(check(cut).blocks[name].eqns) for name in names) == sizes
    args = [torch.ones(v.shape, dtype=v.dtype) for v in program.inputs]
    close(interpret(program, args), interpret(cut, args), 0)


PRICES = [0.0, 1e-12, 1e-10, 1e-8, 1.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("price", PRICES)
def test_residency_keeps_results(price, compiled):
    """Whatever is kept, the gradients are the same to the bit: computing again is computing the same."""
    program = graded(loss_program())
    decided = residuals(program, "main", Costs(program, CPU, compiled), [price])
    changed = check(reside(program, decided))
    args = arguments(program)
    close(interpret(program, args), interpret(changed, args), 0)
    assert len(decided.pairs) == 2


def test_residency():
    program = graded(loss_program())
    cheap, dear = (residuals(program, "main", Costs(program, CPU, False), [p]) for p in (0.0, 1.0))
    golden("residency", str(check(reside(program, dear))))
    assert all(d.seconds == 0 for d in cheap.pairs) and all(d.seconds > 0 and not d.keep for d in dear.pairs)
    assert all(a.bytes > b.bytes for a, b in zip(cheap.pairs, dear.pairs, strict=True))


@given(programs(), st.sampled_from(PRICES))
@settings(derandomize=True, deadline=None, max_examples=60, database=None)
def test_residency_keeps_random_programs(program, price):
    wrt = [i for i, v in enumerate(program.inputs) if is_float(v.dtype) and v.type.depth == 0]
    outs = [i for i, x in enumerate(program.results) if getattr(x, "shape", None) == () and is_float(x.dtype)]
    if not wrt or not outs:
        return
    changed = transform.simplify(check(transform.value_and_grad(program, wrt, outs[0])))
    again = check(reside(changed, residuals(changed, changed.entry, Costs(changed, CPU, True), [price])))
    args = inputs(program)
    for a, b in zip(interpret(changed, args), interpret(again, args), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_donated_updates_are_written_in_place():
    """The generated step writes parameters and state where they are, in one call for all of them, and copies nothing
    else."""
    stepping = check(transform.optimise(graded(loss_program()), groups(), 1, clip_norm=1.0))
    source = emit(stepping, donate=True, reuse=True)
    main = source.split("def main")[1]
    # the count of skipped steps
    assert main.count("adam_update(") == 1 and ".clone()" not in main and main.count(".copy_(") == 1
    args: list = []
    for v in stepping.inputs:
        torch.manual_seed(len(args))
        args.append(
            torch.rand(v.shape, dtype=v.dtype) * 0.1
            if v.dtype.is_floating_point
            else torch.zeros(v.shape, dtype=v.dtype)
        )
    wanted = interpret(stepping, [x.clone() for x in args])
    run, _ = load(stepping, torch.device("cpu"), reuse=True, donate=True)
    with torch.no_grad():
        results = run(*args)
    by_name = {v.name: x for v, x in zip(stepping.inputs, args, strict=True)}
    close(wanted, [*results, *(by_name[name] for name in stepping.updates)])


CHOOSING = """
def main(old: f32[3], other: f32[3], c: bool[], x: f32[3]):
  new: f32[3] = add(old, x)
  chosen: f32[3] = where(c, new, old)
  {between}
  return {result}, old=chosen, other=kept
"""


@pytest.mark.parametrize("between, result, is_over", [
    ("kept: f32[3] = where(c, x, other)", "x", 2),
    ("kept: f32[3] = where(c, old, other)", "x", 1),  # the old value is read behind the choice
    ("kept: f32[3] = where(c, x, x)", "x", 1),  # of other values
    ("kept: f32[3] = where(c, x, other)", "other", 1),  # a result
])  # fmt: skip
@pytest.mark.parametrize("condition", [True, False])
def test_what_a_step_keeps_or_replaces_is_chosen_in_its_memory(between, result, is_over, condition):
    program = check(Program.parse(CHOOSING.format(between=between, result=result)))
    run, source = load(program, torch.device("cpu"), reuse=True, donate=True)
    assert source.count("if c:") == is_over
    args = [torch.ones(3), torch.full((3,), 5.0), torch.tensor(condition), torch.arange(3.0)]
    wanted = interpret(program, [x.clone() for x in args])
    close(wanted, [*run(*args), *args[:2]])
