"""What is kept for backward: gradients are the same at every price, and the cut is the cheapest there is."""

import copy
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mycel
from mycel import lower, plan, transform
from mycel.ir import Program, call, check
from mycel.plan.residuals import BlockCut
from mycel.run import load
from mycel.run.compiled_blocks import BlockServer

UNARY = ("tanh", "sin", "exp", "square", "neg", "sigmoid")
BINARY = ("add", "mul", "sub", "matmul", "linear")
SHAPE = "f64[4,4]"
PRICES = (0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-7, 1.0)


@st.composite
def layers(draw, least=6, most=12):
    """The text of a block from x and w: each line a value of those before it, the last one scaled down to be the
    result."""
    names, lines = ["x", "w"], []
    for i in range(draw(st.integers(least, most))):
        name = f"v{i}"
        recent = st.sampled_from(names[-4:])
        if draw(st.booleans()):
            lines.append(f"  {name}: {SHAPE} = {draw(st.sampled_from(UNARY))}({draw(recent)})")
        else:
            a = draw(recent)
            b = draw(st.sampled_from(names))
            lines.append(f"  {name}: {SHAPE} = {draw(st.sampled_from(BINARY))}({a}, {b})")
        names.append(name)
    lines += [
        f"  s: {SHAPE} = tanh({names[-1]})",
        f"  y: {SHAPE} = add(x, s)",
        f"  t: {SHAPE} = mul({names[-2]}, 0.5)",
        f"  return y, {draw(st.sampled_from((*names[2:], 's', 't')))}",
    ]
    return f"def layer(x: {SHAPE}, w: {SHAPE}):\n" + "\n".join(lines)


def stacked(layer, depth):
    """The block `depth` times, one after the other, and what the loss sees of each."""
    calls = [f"  h{i + 1}: {SHAPE}, t{i}: {SHAPE} = call(h{i}, w{i}, block=@layer)" for i in range(depth)]
    total = [f"  s{i}: f64[] = sum(t{i}, dims=(0, 1))" for i in range(depth)] + [
        f"  l0: f64[] = sum(h{depth}, dims=(0, 1))"
    ]
    total += [f"  l{i + 1}: f64[] = add(l{i}, s{i})" for i in range(depth)]
    main = f"def main(h: {SHAPE}, {', '.join(f'w{i}: {SHAPE}' for i in range(depth))}):\n  h0: {SHAPE} = sin(h)\n"
    return Program.parse(layer + "\n" + main + "\n".join([*calls, *total]) + f"\n  return l{depth}\n")


def differentiated(program):
    wrt = list(range(len(program.inputs)))
    return check(transform.simplify(transform.value_and_grad(transform.simplify(program), wrt, 0)))


def results(program, inputs):
    with torch.no_grad():
        return load(program, torch.device("cpu"), reuse=True)[0](*(x.clone() for x in inputs))


@settings(max_examples=10, deadline=None)
@given(layers(), st.integers(2, 4), st.booleans(), st.data())
def test_gradients_are_the_same_at_every_price(layer, depth, compiled, data):
    program = differentiated(stacked(layer, depth))
    torch.manual_seed(0)
    inputs = [torch.randn(v.shape, dtype=v.dtype) * 0.3 for v in program.inputs]
    wanted = results(program, inputs)
    costs = plan.Costs(program, plan.CPU, compiled)
    pairs = len(list(plan.paired(program.main)))
    mixed = data.draw(st.lists(st.sampled_from(PRICES), min_size=1, max_size=max(pairs, 1)))
    for prices in (*([p] for p in PRICES), mixed):
        decided = plan.residuals(program, program.entry, costs, prices)
        resident = check(lower.reside(program, decided))
        for a, b in zip(results(resident, inputs), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@settings(max_examples=15, deadline=None)
@given(layers(), st.integers(2, 4), st.booleans())
def test_the_dearer_a_byte_the_less_is_kept_and_the_more_computed_again(layer, depth, compiled):
    program = differentiated(stacked(layer, depth))
    costs = plan.Costs(program, plan.CPU, compiled)
    by_price = [plan.residuals(program, program.entry, costs, [p]) for p in PRICES]
    kept = [sum(d.bytes for d in r.pairs) for r in by_price]
    again = [sum(d.seconds for d in r.pairs) for r in by_price]
    assert kept == sorted(kept, reverse=True)
    assert all(a <= b * (1 + 1e-6) + 1e-15 for a, b in itertools.pairwise(again))


def cost_of(block, needed, share, costs, price, redone):
    """Seconds of computing these equations again, and of keeping what they and backward read besides: the sum that is
    to be smallest."""
    there = costs.in_memory(block)
    recomputed = {v for e in redone for v in e.outputs}
    read = {*needed, *(v for e in redone for v in e.vars)}
    keep = sum(
        share.get(v, 1.0) * v.type.bytes * price + (0.0 if v in there else v.type.bytes / costs.hardware.bytes_s)
        for v in read
        if v not in recomputed
    )
    return keep + sum(costs.seconds(e, there) for e in redone)


@settings(max_examples=40, deadline=None)
@given(layers(2, 6), st.booleans(), st.sampled_from(PRICES), st.data())
def test_the_cut_is_the_cheapest_of_all(layer, compiled, price, data):
    """Against every choice of equations to compute again."""
    program = stacked(layer, 1)
    block = program.blocks["layer"]
    costs = plan.Costs(program, plan.CPU, compiled)
    values = [v for e in block.eqns for v in e.outputs]
    needed = data.draw(st.lists(st.sampled_from([*block.inputs, *values]), min_size=1, max_size=4, unique=True))
    share = {v: data.draw(st.sampled_from((0.0, 0.5, 1.0))) for v in block.inputs}
    best = min(
        cost_of(block, needed, share, costs, price, chosen)
        for n in range(len(block.eqns) + 1)
        for chosen in itertools.combinations(block.eqns, n)
    )
    keep, seconds, _ = BlockCut(block, tuple(needed), share, costs).at(price)
    redone, read = [], list(needed)
    while read:
        v = read.pop()
        eqn = next((e for e in block.eqns if v in e.outputs), None)
        if eqn is not None and v.name not in keep and eqn not in redone:
            redone.append(eqn)
            read += eqn.vars
    cost = cost_of(block, needed, share, costs, price, redone)
    whole = cost_of(block, [*block.inputs, *values], {}, costs, price, ()) + sum(costs.seconds(e) for e in block.eqns)
    assert cost <= best + 1e-6 * whole + 1e-18
    assert seconds == pytest.approx(sum(costs.seconds(e, costs.in_memory(block)) for e in redone), abs=1e-15)


def deep(last):
    """A block of a dozen equations, so that it stays one; `last` is what it returns besides."""
    lines = [f"  v{i + 1}: {SHAPE} = {'tanh' if i % 2 else 'sin'}(v{i})" for i in range(8)]
    body = [
        f"  v0: {SHAPE} = matmul(x, w)",
        *lines,
        f"  y: {SHAPE} = add(x, v8)",
        f"  t: {SHAPE} = mul(v1, 0.5)",
        f"  return y, {last}",
    ]
    return f"def layer(x: {SHAPE}, w: {SHAPE}):\n" + "\n".join(body)


def test_all_is_kept_where_memory_is_free_and_inputs_alone_where_it_is_dear():
    program = differentiated(stacked(deep("t"), 3))
    costs = plan.Costs(program, plan.CPU, False)
    free, dear = (plan.residuals(program, program.entry, costs, [p]) for p in (0.0, 1e3))
    assert len(free.pairs) == len(dear.pairs) == 3
    assert all(d.seconds == 0 for d in free.pairs)
    assert all(d.keep == () and d.seconds > 0 for d in dear.pairs)
    resident = lower.reside(program, dear)
    backward = [e for e in resident.main.eqns if e.op is call and e.phase == "backward"]
    again = [e.op.name for e in resident.blocks[backward[0].params["block"]].eqns]
    assert again.count("tanh") >= 3 and again.count("sin") >= 3, "computed again in backward"


def test_a_block_whose_result_is_also_needed_by_backward():
    program = differentiated(stacked(deep("v2"), 2))
    for price in PRICES:
        check(
            lower.reside(program, plan.residuals(program, program.entry, plan.Costs(program, plan.CPU, False), [price]))
        )


def test_an_operand_that_stands_twice():
    """add(x, x) costs next to nothing; keeping its result costs a write."""
    text = (
        f"def layer(x: {SHAPE}, w: {SHAPE}):\n  a: {SHAPE} = add(x, x)\n  b: {SHAPE} = add(a, a)\n"
        f"  c: {SHAPE} = sin(b)\n  return c, c"
    )
    program = stacked(text, 1)
    block = program.blocks["layer"]
    costs = plan.Costs(program, plan.CPU, True)
    b = block.eqns[1].outputs[0]
    assert BlockCut(block, (b,), dict.fromkeys(block.inputs, 0.0), costs).at(0.0)[0] == ()


def test_random_numbers_are_drawn_again_as_they_were():
    """An operator that draws is computed again from its key: the same mask."""
    text = f"""def layer(x: {SHAPE}, w: {SHAPE}, key: i64[]):
  a: {SHAPE} = matmul(x, w)
  b: {SHAPE} = tanh(a)
  c: {SHAPE} = sin(b)
  d: {SHAPE} = dropout(c, key, 0, p=0.5)
  e: {SHAPE} = square(d)
  f: {SHAPE} = tanh(e)
  g: {SHAPE} = sin(f)
  t: {SHAPE} = square(g)
  y: {SHAPE} = add(x, t)
  return y
def main(h0: {SHAPE}, w0: {SHAPE}, w1: {SHAPE}, key: i64[]):
  k0: i64[] = fold_in(key, data=0)
  h1: {SHAPE} = call(h0, w0, k0, block=@layer)
  k1: i64[] = fold_in(key, data=1)
  h2: {SHAPE} = call(h1, w1, k1, block=@layer)
  l: f64[] = sum(h2, dims=(0, 1))
  return l
"""
    program = check(transform.simplify(transform.value_and_grad(Program.parse(text), [0, 1, 2], 0)))
    inputs = [*(torch.randn(4, 4, dtype=torch.float64) for _ in range(3)), torch.tensor(77)]
    wanted = results(program, inputs)
    assert len(list(plan.paired(program.main))) == 2
    for price in PRICES:
        resident = lower.reside(
            program, plan.residuals(program, program.entry, plan.Costs(program, plan.CPU, False), [price])
        )
        for a, b in zip(results(resident, inputs), wanted, strict=True):
            assert torch.equal(a, b)


def test_pairs_do_not_depend_on_comments():
    """Which equations are backward is a field of theirs: a program without source lines has the same pairs."""
    chain = "\n".join(f"  v{i}: {SHAPE} = tanh(v{i - 1})" for i in range(1, 10))
    layer = f"def layer(x: {SHAPE}, w: {SHAPE}):\n  v0: {SHAPE} = mul(x, w)\n{chain}\n  return v8, v9"
    program = differentiated(stacked(layer, 3))
    text = re.sub(r" *#.*", "", str(program))
    bare = Program.parse(text)
    assert all(not e.source for b in bare.blocks.values() for e in b.eqns)
    assert len(list(plan.paired(program.main))) == 3
    assert list(plan.paired(bare.main)) == list(plan.paired(program.main))


def test_what_backward_reads_between_the_calls_costs_a_block_nothing_to_keep():
    """The result of the last layer is read by the gradient of a product behind it: it is kept as those of the others,
    which the next layer keeps, and all layers share one block."""
    chain = [f"  v{i + 1}: {SHAPE} = sin(v{i})" for i in range(8)]
    lines = [f"  v0: {SHAPE} = linear(x, w)", *chain, f"  y: {SHAPE} = relu(v8)", "  return y"]
    layer = "\n".join([f"def layer(x: {SHAPE}, w: {SHAPE}):", *lines])
    calls = [f"  h{i + 1}: {SHAPE} = call(h{i}, w{i}, block=@layer)" for i in range(3)]
    ends = [f"  z: {SHAPE} = linear(h3, u)", "  l: f64[] = sum(z, dims=(0, 1))", "  return l"]
    main = f"def main(h0: {SHAPE}, {', '.join(f'w{i}: {SHAPE}' for i in range(3))}, u: {SHAPE}):"
    program = differentiated(Program.parse("\n".join([layer, main, *calls, *ends, ""])))
    decided = plan.residuals(program, program.entry, plan.Costs(program, plan.CPU, True), [1e-9])
    assert [d.keep for d in decided.pairs] == [("v0", "y")] * 3
    resident = check(lower.reside(program, decided))
    assert len(resident.blocks) == 3, "forward, backward and the entry"


class Normed(torch.nn.Module):
    """Convolutions with batch norm, as they come."""

    def __init__(self):
        super().__init__()
        conv = lambda: [torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(*conv(), *conv()) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()


def executed(program, name, block=None):
    """How often an operator runs."""
    eqns = program.main.eqns if block is None else program.blocks[block].eqns
    return sum(executed(program, name, e.params["block"]) if e.op is call else e.op.name == name for e in eqns)


def test_without_a_budget_backward_computes_neither_products_nor_statistics_again(monkeypatch):
    """And the step is torch's, running statistics too."""
    monkeypatch.setattr("mycel.step.compiler.start_workers", lambda: None)  # as if it were compiled
    monkeypatch.setattr(BlockServer, "start", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    torch.manual_seed(0)
    model = Normed().double()
    theirs, x = copy.deepcopy(model), torch.randn(8, 4, 16, 16, dtype=torch.float64)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=True)
    losses = [float(step(x)) for _ in range(2)]
    program = step.program
    assert executed(program, "conv") + executed(program, "conv_bias") == executed(program, "batch_statistics") == 6
    assert executed(program, "batch_norm") == 0
    assert executed(program, "batch_norm_infer") > 6  # what is merged with its use is
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for loss in losses:
        want = theirs(x)
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss - want.item()) < 1e-12
    for (name, a), b in zip(model.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
