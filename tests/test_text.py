"""Text is a faithful form of programs: what prints parses back, and what does not parse says where."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs
from zoo import CONSTS, TEXTS, ZOO, read

from mycel.errors import IRError, TextError
from mycel.ir import OPS, Block, Builder, Eqn, Params, Program, Type, Var, op, prune
from mycel.ir.build import static
from mycel.ir.program import NAN, RESERVED

steady = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@pytest.fixture(scope="module", autouse=True)
def any_params():
    """An operator for values of text that no real operator takes, while these tests run."""
    op("... -> ...", name="any_params", types=lambda x, **_: x)(lambda x, **params: x)
    yield
    del OPS["any_params"]


def one_param(value) -> Program:
    x = Var("x", Type(torch.float32, ()))
    y = Var("y", Type(torch.float32, ()))
    return Program({"main": Block((x,), (Eqn(OPS["any_params"], (x,), Params(value=static(value)), (y,)),), (y,))})


@pytest.mark.parametrize("name", ZOO)
def test_zoo_reads_back(name):
    program = ZOO[name]
    again = Program.parse(str(program), program.consts)
    assert str(again) == str(program) and again == Program.parse(str(again), program.consts)


@given(programs())
@steady
def test_random_programs_read_back(program):
    assert Program.parse(str(program)) == program


ODD = [
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    0.0,
    1e-300,
    1e22,
    5e-324,
    0.1,
    1.0,
    1,
    True,
    False,
    None,
    -1,
    10**20,
    complex(1, -2),
    complex(0.0, -0.0),
    complex(math.inf, math.nan),
    "",
    "plain",
    'say "hi"',
    "back\\slash",
    "a\nb",
    "\\n",
    "tab\there",
    "ünïcode ✓",
    "# no comment",
    "@ref",
    "(1, 2)",
    "None",
    (),
    (1,),
    (1, 2),
    ((),),
    ((1,), (2, (3,))),
    (None, True, 1.5, "x"),
    torch.float32,
    torch.bool,
    (torch.bfloat16, torch.complex64),
    ((-0.0,), (math.nan,)),
]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_read_back(value):
    program = one_param(value)
    again = Program.parse(str(program))
    assert again == program
    got = again.main.eqns[0].params["value"]
    assert repr(got) == repr(static(value)) and type(got) is type(static(value))


numbers = st.booleans() | st.integers() | st.floats() | st.complex_numbers()
values = st.recursive(
    st.none() | numbers | st.text() | st.sampled_from([torch.float16, torch.int8]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(values)
@steady
def test_any_value_reads_back(value):
    program = one_param(value)
    assert Program.parse(str(program)) == program


def test_numbers_are_told_apart():
    texts = [one_param(v) for v in (1, 1.0, True, 0.0, -0.0, False, 0)]
    assert all((a == b) == (i == j) for i, a in enumerate(texts) for j, b in enumerate(texts))
    assert one_param(float("nan")) == one_param(-float("nan"))
    assert static(float("nan")) is NAN


def test_constants_are_compared_by_bits():
    program = ZOO["equal_constants"]
    assert program == Program.parse(str(program), {k: c.clone() for k, c in program.consts.items()})  # they hold nan
    # -0.0 is not 0.0
    assert program != Program.parse(str(program), {"table": CONSTS["table"].abs(), "copy": CONSTS["copy"]})


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_shapes_and_stacks_read_back(shape, depth):
    x = Var("x", Type(torch.float16, shape, depth))
    program = Program({"main": Block((x,), (), (x, x))})
    assert Program.parse(str(program)) == program


def test_dotted_names_read_back():
    text = """
def model.layer_0(x.y: f32[2], layers.0.weight: f32[2]):
  a.b.c: f32[2] = add(x.y, layers.0.weight)
  return a.b.c
def main(x: f32[2], layers.0.weight: f32[2]):
  y: f32[2] = call(x, layers.0.weight, block=@model.layer_0)
  return y, layers.0.weight=y
"""
    program = read(text)
    assert program.updates == ("layers.0.weight",) and program == Program.parse(str(program))


@pytest.mark.parametrize("hint", [*sorted(RESERVED), "0.weight", "a b", "x-y", "x.", "", "Ünï", "3", "a..b"])
def test_builder_names_can_be_read(hint):
    b = Builder()
    names = [b.input(hint, Type(torch.float32, (2,))).name for _ in range(3)]
    assert len(set(names)) == 3
    program = Program({"main": b.block(b.inputs)})
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("name", ["0.weight", "0.1.bias", "layers.0.weight", "x_1"])
def test_builder_keeps_names_that_can_be_read(name):
    """Those of a Sequential begin with a number: a pass that writes a block anew keeps its inputs' names."""
    assert Builder().input(name, Type(torch.float32, (2,))).name == name


def test_long_lines_and_comments_read_back():
    many = ", ".join(f"input_number_{i}: f32[2]" for i in range(60))
    text = f"""# a comment
def main({many}):  # another
  # one more
  y: f32[2] = exp(  # inside
    input_number_3)  # model.py:1
  return y # end
"""
    program = read(text)
    assert program.main.eqns[0].source == "model.py:1"
    assert Program.parse(str(program)) == program


MALFORMED = {
    "": (1, 1),
    "def main(": (1, 10),
    "def main()\n  return": (2, 3),
    "def main():\n  return x": (2, 10),
    "def main(x: f32[2], x: f32[2]):\n  return": (1, 21),
    "def main(x: f33[2]):\n  return": (1, 13),
    "def main(x: f32[-1]):\n  return": (1, 17),
    "def main(x: f32[2.5]):\n  return": (1, 17),
    "def main(x: f32[2]):\n  y: f32[2] = expp(x)\n  return y": (2, 15),
    "def main(x: f32[2]):\n  y: f32[2] = exp(z)\n  return y": (2, 19),
    "def main(x: f32[2]):\n  y: f32[2] = exp(x\n  return y": (3, 3),
    "def main(x: f32[2]):\n  y: f32[2] = sum(x, dims=(0,), dims=(1,))\n  return y": (2, 33),
    "def main(x: f32[2]):\n  y: f32[2] = sum(dims=(0,), x)\n  return y": (2, 30),
    'def main(x: f32[2]):\n  y: f32[2] = exp("x)\n  return y': (2, 19),
    "def main(x: f32[2]):\n  x: f32[2] = exp(x)\n  return x": (2, 15),
    "def main(x: f32[2]):\n  return x=x, x": (2, 15),
    "def f(x: f32[2]):\n  return x=x\ndef main(x: f32[2]):\n  return x": (3, 1),
    "def f():\n  return\ndef f():\n  return": (3, 5),
    "def main(x: f32[2]):\n  y: f32[2] = exp(x) $\n  return y": (2, 22),
    "def main(x: f32[2]):\n  y: f32[2] = exp(x) [sideways]\n  return y": (2, 23),
    "def main(x: f32[2]):\n  y: f32[2] = exp(x) [update\n  return y": (3, 3),
    "def main(x: f32[2]):\n  return " + "(" * 5000: None,
    "def main(x: f32[" + "9" * 5000 + "]):\n  return": (1, 17),
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda t: repr(t[:60]))
def test_malformed_text_says_where(text):
    with pytest.raises(TextError) as e:
        Program.parse(text)
    assert MALFORMED[text] in (None, (e.value.line, e.value.column)), str(e.value)


@pytest.mark.parametrize(
    "text, why",
    [
        ("def main(x: f32[2]):\n  y: f32[3] = exp(x)\n  return y", "gives (f32[2]), stated as (f32[3])"),
        ("def main(x: f32[2]):\n  y: f32[2] = exp(x, x)\n  return y", "2 operands for 1"),
        ("def main(x: f32[2]):\n  y: f32[2] = exp(x, dim=1)\n  return y", "takes no params, was given dim"),
        ("def main(x: f32[2]):\n  y: f32[] = sum(x)\n  return y", "missing a required argument: 'dims'"),
        ("def main(x: f32[2]):\n  y: f32[2] = call(x, block=@nowhere)\n  return y", "no block named nowhere"),
        (
            "def main(x: f32[2]):\n  y: f32[2] = call(x, block=@main)\n  return y",
            "block main calls itself: main -> main",
        ),
        ("def main(x: f32[2]):\n  y: f32[2] = call(x)\n  return y", "missing a required argument: 'block'"),
        ("def main(x: f32[2]):\n  y: f32[2] = reshape(None, shape=(2,))\n  return y", "block main: y = reshape(None)"),
        ("def main(x: f32[2]):\n  y: f32[2] = reshape(x, shape=2)\n  return y", "block main: y = reshape(f32[2])"),
        (
            'def main():\n  y: f32[2] = const(dtype=f32, name="gone", shape=(2,))\n  return y',
            "the program has no constant named gone",
        ),
        ("def main(x: f32[2]):\n  y: f32[2] = exp(x)\n  return y, z=y", "update of z, which is no input"),
        ("def main(x: f32[2]):\n  y: f32[] = sum(x, dims=(0,))\n  return x=y", "update of x: f32[2] with y: f32[]"),
    ],
)
def test_inconsistent_programs_are_refused(text, why):
    with pytest.raises(IRError, match=re.escape(why)):
        Program.parse(text)


def prune_blocks(program: Program) -> Program:
    """Without blocks that nothing reaches, which do not print; all constants kept."""
    return replace(prune(program), consts=program.consts)


@given(st.sampled_from(sorted(TEXTS)), st.data())
@settings(steady, max_examples=400)
def test_damaged_text_is_refused_or_a_program(name, data):
    """Characters lost, added or exchanged: TextError, IRError or a program, nothing else."""
    text = TEXTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        lost = data.draw(st.integers(0, 3))
        new = data.draw(st.text(st.sampled_from('()[],:=@#"\\ .-0129abfxyz\nÿ'), max_size=2))
        text = text[:at] + new + text[at + lost :]
        if not text:
            break
    try:
        program = Program.parse(text, CONSTS)
    except TextError as e:
        assert 1 <= e.line <= text.count("\n") + 1 and e.column >= 1
    except IRError:
        pass
    else:
        assert Program.parse(str(program), CONSTS) == prune_blocks(program)
