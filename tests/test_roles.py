"""Roles: what an input of a program is.  Text holds them, the checker wants them apart, every pass keeps them, values
are bound by them."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import together
from distributing import OneDevice, compared, ready_to_run, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs
from torch import nn

import mycel
from mycel import Plan, Program, lower, transform
from mycel.errors import IRError, TextError
from mycel.ir import Block, Layout, Mesh, Role, check, is_float
from mycel.ir.role import FORMS
from mycel.parts import ShardedModel, UnshardedStep, state_layout
from mycel.plan import CPU, Costs, residuals
from mycel.run.checkpoint import Saver, load, load_parts
from mycel.run.simulate import part_of, put_together

ODD = [
    "w",
    "0.weight",
    "of",
    "group",
    "None",
    "inf",
    "nan",
    "def",
    "1",
    "a b",
    '"',
    "\\",
    "",
    "é",
    "\n",
    "x,y)",
    "# no",
]
NAMES = st.one_of(st.sampled_from(ODD), st.text(max_size=8))


@st.composite
def roles(draw) -> Role:
    kind = draw(st.sampled_from(sorted(FORMS)))
    fields = [word.lower() for word in FORMS[kind] if word.isupper()]
    return Role(kind, **{field: draw(NAMES) for field in fields})


@given(roles())
@settings(derandomize=True, deadline=None, max_examples=300, database=None)
def test_a_role_is_its_text(role):
    assert Role.parse(str(role)) == role


@given(programs(), st.data())
@settings(derandomize=True, deadline=None, max_examples=60, database=None)
def test_roles_are_part_of_the_text_and_of_equality(program, data):
    known = {v.name: data.draw(roles()) for v in program.inputs if data.draw(st.booleans())}
    if len({replace(program, roles=known).role(v) for v in program.inputs}) < len(program.inputs):
        return
    labelled = check(replace(program, roles=known))
    again = Program.parse(str(labelled), program.consts)
    assert again == labelled and [again.role(v) for v in again.inputs] == [labelled.role(v) for v in labelled.inputs]
    assert (labelled == program) == all(role == Role("batch", name) for name, role in known.items())


def test_wrong_roles_are_refused():
    text = "def main(x: f32[2] = {0}, y: f32[2] = {1}):\n  return x\n"
    with pytest.raises(IRError, match="the inputs x and y are both parameter w"):
        Program.parse(text.format("parameter w", "parameter w"))
    with pytest.raises(TextError, match="no role 'weight': one of parameter"):
        Program.parse(text.format("weight w", "key"))
    with pytest.raises(TextError, match="'state m' is no role: state NAME of OF"):
        Program.parse(text.format("state m", "key"))
    with pytest.raises(TextError, match="only the last block"):
        Program.parse("def f(x: f32[2] = key):\n  return x\n" + text.format("parameter w", "key"))
    with pytest.raises(IRError, match="z is key, but no input"):
        check(replace(Program.parse("def main(x: f32[2]):\n  return x\n"), roles={"z": Role("key")}))


# -- every pass keeps them


def kept(program: Program) -> list[Role]:
    return [program.role(v) for v in program.inputs]


@given(programs(), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, max_examples=60, database=None)
def test_passes_keep_roles_of_random_programs(program, rng):
    kinds = ["parameter", "buffer", "variable", "batch"]
    program = check(
        replace(program, roles={v.name: Role(rng.choice(kinds), f"role {i}") for i, v in enumerate(program.inputs)})
    )
    before = kept(program)
    passes = [*transform.SIMPLIFY, transform.unhinted, transform.head, transform.fuse, lower.hoist, lower.overlap]
    passes += [
        lambda p: transform.outline(p, lambda block, run: True)[0],
        lambda p: transform.precision(p, torch.bfloat16),
    ]
    for change in passes:
        assert kept(check(change(program))) == before, change
    assert kept(check(transform.with_scale(program))) == [*before, Role("counter", "loss_scale")]
    floats = [i for i, v in enumerate(program.inputs) if is_float(v.dtype)]
    try:
        pushed = transform.jvp(program, floats)
    except mycel.GradientError:
        return
    assert kept(check(pushed))[: len(before)] == before


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 5))

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.body(x), target)


@pytest.fixture(scope="module")
def steps():
    """Training steps of models with buffers, dropout and repeated layers; in parts, in 16 bits, on one device."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "target": torch.randint(0, 5, (8,))}
    return {
        "fp32": OneDevice.of(Classifier(), batch),
        "parts": OneDevice.of(Classifier(), batch, accumulate=2, clip_norm=1.0),
        "fp16": OneDevice.of(Classifier(), batch, precision="fp16"),
    }


@pytest.mark.parametrize("name", ["fp32", "parts", "fp16"])
def test_a_step_says_what_its_inputs_are(steps, name):
    """Names as in the state dict; each trained parameter has its state, each group its numbers."""
    one = steps[name]
    program = one.unsharded.program
    names = {kind: {program.role(v).name for v in program.inputs_of(kind)} for kind in FORMS}
    assert names["parameter"] == {n for n, _ in one.model.named_parameters()}
    assert names["buffer"] == {n for n, _ in one.model.named_buffers()}
    assert names["batch"] == {"x", "target"} and names["count"] == set() and len(program.inputs_of("key")) == 1
    assert {program.role(v) for v in program.inputs_of("state")} == {
        Role("state", slot, of=n) for slot in ("exp_avg", "exp_avg_sq", "step") for n in names["parameter"]
    }
    assert {program.role(v).of for v in program.inputs_of("hyper")} == {"0"} and "lr" in names["hyper"]
    assert names["counter"] == {"skipped", *(["loss_scale", "good_steps"] if name == "fp16" else [])}
    assert len(program.by_role()) == len(program.inputs)
    assert Program.parse(str(program), program.consts) == program


@pytest.mark.parametrize("name", ["fp32", "parts", "fp16"])
def test_lowering_keeps_the_roles_of_a_step(steps, name):
    one = steps[name]
    before = kept(one.unsharded.program)
    for written in (Plan.read("dp", Mesh(dp=2)), Plan.read("zero3", Mesh(dp=4))):
        distributed = one.under(written)
        for program in (
            distributed.whole,
            distributed.local,
            transform.simplify(distributed.local),
            ready_to_run(distributed),
        ):
            assert kept(program) == before
    program = one.unsharded.program
    costs = Costs(program, CPU, False)
    for price in (0.0, 1.0):
        assert kept(check(lower.reside(program, residuals(program, one.unsharded.body, costs, [price])))) == before


# -- values are bound by them


def shuffled(program: Program, seed: int = 0) -> Program:
    """The inputs in another order; those that nothing reads left out."""
    main = program.main
    used = (
        {v for e in main.eqns for v in e.vars}
        | set(main.outputs)
        | {v for v in main.inputs if v.name in program.updates}
    )
    inputs = [v for v in main.inputs if v in used]
    random.Random(seed).shuffle(inputs)
    names = {v.name for v in inputs}
    block = Block(tuple(inputs), main.eqns, main.outputs)
    roles = {name: role for name, role in program.roles.items() if name in names}
    return check(replace(program, blocks={**program.blocks, program.entry: block}, roles=roles))


@pytest.mark.parametrize("settings_", [{}, {"accumulate": 2}, {"precision": "fp16"}], ids=str)
def test_the_order_of_inputs_means_nothing(monkeypatch, settings_):
    """A step whose program takes its inputs in another order, without those nobody reads, trains to the same bits."""

    def trained(change):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
        monkeypatch.setattr("mycel.transform.fuse", change)
        step = mycel.train_step(
            model, optimizer, lambda out, target, unused: nn.functional.cross_entropy(out, target), **settings_
        )
        losses = [step(torch.randn(8, 6), torch.randint(0, 5, (8,)), torch.zeros(8)) for _ in range(3)]
        return step, [*losses, *model.state_dict().values(), *(x for s in optimizer.state.values() for x in s.values())]

    plain = transform.fuse
    first, wanted = trained(plain)
    second, got = trained(lambda program: shuffled(plain(program)))
    assert [v.name for v in second.program.inputs] != [v.name for v in first.program.inputs]
    # a scan over parts takes all of the batch
    assert "accumulate" in settings_ or len(second.program.inputs) < len(first.program.inputs)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_the_order_of_a_jitted_functions_inputs_means_nothing(monkeypatch):
    plain = transform.fuse

    def reversed_inputs(program, **how):
        block = replace(plain(program, **how).main, inputs=program.inputs[::-1])
        return replace(program, blocks={**program.blocks, program.entry: block})

    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def fn(a, b):
        return model(a) - b, b * nn.functional.dropout(a, 0.5)

    def drawn():
        torch.manual_seed(1)
        return mycel.jit(fn)(x, b=2 * x)

    wanted = drawn()
    monkeypatch.setattr("mycel.api.transform.fuse", reversed_inputs)
    assert all(torch.equal(a, b) for a, b in zip(wanted, drawn(), strict=True))


# -- state of any shape


@pytest.mark.parametrize("shape, wanted", [
    ((6, 8), (("tp", "dp"), ("cp",))), ((6, 1), (("tp", "dp"), ())), ((1, 8), ((), ("cp",))), ((), ()), ((6,), ((),)),
])  # fmt: skip
def test_state_lies_as_the_dims_it_shares_with_its_parameter(shape, wanted):
    assert state_layout(Layout((("tp", "dp"), ("cp",))), (6, 8), shape) == Layout(wanted)


FEEDBACK = """\
def main(x: f64[8,4], w: f64[6,4] = parameter weight, m: f64[6,1] = state row_var of weight,
         e: f64[6,4] = error of weight over dp):
  y: f64[8,6] = linear(x, w)
  r: f64[6] = sum(y, dims=(0,))
  row: f64[6,1] = reshape(r, shape=(6,1))
  n: f64[6,1] = add(m, row)
  s: f64[6,4] = mul(w, n)
  v: f64[6,4] = add(s, e)
  d: f64[6,4] = mul(e, 0.5)
  return r, w=v, m=n, e=d
"""


def test_state_with_a_shape_of_its_own_and_partial_state_run_and_are_saved(tmp_path):
    """A row's statistics lie as the rows of their parameter; what each rank left behind is a sum, is used and updated
    as one, and is saved and loaded under another mesh."""
    torch.manual_seed(0)
    model, program = nn.Linear(4, 6, bias=False).double(), Program.parse(FEEDBACK)
    values = [torch.randn(v.shape, dtype=v.dtype) for v in program.inputs]
    error, rows = Role("error", of="weight", over="dp"), Role("state", "row_var", of="weight")

    def planned(mesh):
        parts = ShardedModel(
            model, torch.optim.SGD(model.parameters()), Plan(mesh, batch=["dp"], parameters={"weight": ["tp", "-"]})
        )
        parts.stored["weight"] = Layout((("tp",), ()))
        return parts, parts.given(UnshardedStep(SimpleNamespace(program=program, leaves=["x"]), program, (), 1, "main"))

    parts, lying = planned(Mesh(dp=2, tp=3))
    distributed = spread(program, parts.plan, *lying)
    lies = dict(zip((program.role(v) for v in program.inputs), distributed.inputs, strict=True))
    assert lies[error] == parts.slots[error][0] == Layout((("tp",), ()), (("dp", "+"),))
    assert lies[rows] == parts.slots[rows][0] == Layout((("tp",), ()))
    assert distributed.outputs[program.updates.index("e") + 1] == lies[error]
    compared(program, distributed, Mesh(dp=2, tp=3), values)

    saved = {"e": parts.slots[error], "m": parts.slots[rows]}
    state = {"e": torch.randint(-9, 9, (2, 6, 4)).double(), "m": values[2].expand(2, 6, 1)}  # by rank of dp

    def act(ranks):
        at = ranks.mesh.index(ranks.rank, ("dp",))
        mine = {
            name: part_of(state[name][at], layout.reduced, ranks.mesh, ranks.rank)
            for name, (layout, _) in saved.items()
        }
        with Saver(tmp_path, asynchronous=False, ranks=ranks) as saver:
            saver.save(1, mine, {}, layouts={name: (layout, type.shape) for name, (layout, type) in saved.items()})
        return saver.last

    path = together(parts.plan.mesh, act)[0]
    whole = {"e": state["e"].sum(0), "m": values[2]}
    assert all(torch.equal(x, whole[name]) for name, x in load(path).tensors.items())
    for mesh in (Mesh(dp=2, tp=3), Mesh(dp=3, tp=1), Mesh(dp=4, tp=2), Mesh(dp=1, tp=1)):
        slots, _ = planned(mesh)
        wanted = {name: (*slots.slots[role], torch.float64) for name, role in (("e", error), ("m", rows))}
        wanted = {name: (layout, type.shape, dtype) for name, (layout, type, dtype) in wanted.items()}
        held = [load_parts(path, wanted, mesh, rank) for rank in range(mesh.world)]
        for name, role in (("e", error), ("m", rows)):
            layout, type = slots.slots[role]
            assert torch.equal(put_together([x[name] for x in held], layout, type, mesh), whole[name])
