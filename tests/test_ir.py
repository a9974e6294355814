"""The checker names what is wrong and where; the walker's queries; the dims language."""

from __future__ import annotations

import pytest
import torch

import mycel.ops
from mycel import IRError, Program, Type
from mycel.ir import OPS, Block, Builder, Eqn, Params, Var, chains, check, dims, lifetimes, order, walk
from mycel.ir.types import promote, type_of

GOOD = """\
def layer(x: f32[2,3], w: f32[3,3]):
  h: f32[2,3] = linear(x, w)  # model.py:3
  y: f32[2,3] = relu(h)       # model.py:4
  return y

def main(x: f32[2,3], w1: f32[3,3], w2: f32[3,3]):
  a: f32[2,3] = call(x, w1, block=@layer)  # model.py:9
  b: f32[2,3] = call(a, w2, block=@layer)  # model.py:9
  return b
"""


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("h: f32[2,3] = linear", "h: f32[2,4] = linear", r"gives \(f32\[2,3\]\), stated as \(f32\[2,4\]\)"),
        ("h: f32[2,3] = linear", "h: f64[2,3] = linear", "at model.py:3"),
        ("linear(x, w)", "linear(w, x)", r"gives \(f32\[3,2\]\)"),
        ("call(a, w2, block=@layer)", "call(a, block=@layer)", "block layer takes"),
        ("call(a, w2, block=@layer)", "call(a, w2, block=@main)", "calls itself"),
        ("call(a, w2, block=@layer)", "call(a, w2, block=@other)", "no block named other"),
        ("return b", "return b, w1=x", "update of w1"),
        ("return b", "return b, w3=x", "update of w3, which is no input"),
        ("linear(x, w)", "linear(x, w) [backward]", "an equation of the forward reads h, made in the backward"),
    ],
)
def test_the_checker_names_what_is_wrong(old, new, message):
    assert check(Program.parse(GOOD)) == Program.parse(GOOD)
    broken = GOOD.replace(old, new)
    assert broken != GOOD
    with pytest.raises(IRError, match=message):
        Program.parse(broken)


def test_values_are_defined_once_and_before_use():
    t = Type(torch.float32, (2,))
    x, y = Var("x", t), Var("y", t)
    relu = OPS["relu"]
    eqn = Eqn(relu, (x,), Params(), (y,))
    check(Program({"main": Block((x,), (eqn,), (y,))}))
    with pytest.raises(IRError, match="twice"):
        check(Program({"main": Block((x,), (eqn, eqn), (y,))}))
    with pytest.raises(IRError, match="not defined"):
        check(Program({"main": Block((), (eqn,), (y,))}))
    with pytest.raises(IRError, match="used as"):
        check(Program({"main": Block((Var("x", Type(torch.float32, (3,))),), (eqn,), (y,))}))


def test_queries():
    program = Program.parse(GOOD)
    assert order(program) == ["layer", "main"]
    assert [e.op.name for _, e in walk(program)] == ["linear", "relu", "call", "call"]
    main = program.main
    x, w1, w2 = main.inputs
    a, b = (e.outputs[0] for e in main.eqns)
    links = chains(main)
    assert links[a].defined == 0 and links[a].uses == (1,) and not links[a].is_output
    assert links[b].is_output and links[w2].uses == (1,)
    assert lifetimes(main) == {x: (-1, 0), w1: (-1, 0), w2: (-1, 1), a: (0, 1), b: (1, 2)}


def test_params_and_records_do_not_change():
    eqn = Program.parse(GOOD).main.eqns[0]
    with pytest.raises(TypeError):
        eqn.params["block"] = "other"
    with pytest.raises(AttributeError):
        eqn.op = None


def test_builder_names_and_defaults():
    b = Builder()
    x = b.input("x", Type(torch.float32, (2, 3)))
    with b:
        gelu = mycel.ops.o.gelu
        y = gelu(gelu(x, approximate="none"), approximate="tanh")
    block = b.block([y])
    assert [v.name for e in block.eqns for v in e.outputs] == ["gelu", "gelu_1"]
    assert [dict(e.params) for e in block.eqns] == [{}, {"approximate": "tanh"}]


def test_dims():
    fit = dims.fit("... k+, n k+ -> ... n", [(2, 5, 8), (6, 8)])
    assert fit.out_shapes == [(2, 5, 6)] and fit.namespace().rows == 10 and fit.sizes["k"] == 8
    assert set(fit.splits()) == {"_0", "_1", "k", "n"}
    grouped = dims.fit("a (h d) -> a h d", [(2, 12)], {"h": 3})
    assert grouped.out_shapes == [(2, 3, 4)] and "d" not in grouped.splits() and "h" in grouped.splits()
    assert dims.fit("..., ... -> ...", [(2, 1, 3), (4, 1)]).out_shapes == [(2, 4, 3)]
    for rule, shapes, why in [
        ("a b, b -> a", [(2, 3), (4,)], "b is 3 and 4"),
        ("..., ... -> ...", [(2,), (3,)], "do not broadcast"),
        ("a -> a b", [(2,)], "no size for b"),
        ("a -> a", [(2, 3)], "has too many dims"),
    ]:
        with pytest.raises(ValueError, match=why):
            dims.fit(rule, shapes)


@pytest.mark.parametrize("seed", range(20))
def test_promotion_is_torchs(seed):
    gen = torch.Generator().manual_seed(seed)
    pool = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ]
    pick = lambda n: int(torch.randint(0, n, (), generator=gen))
    for _ in range(50):
        x = torch.zeros((2,) * pick(2), dtype=pool[pick(len(pool))])
        other = [torch.zeros((2,) * pick(2), dtype=pool[pick(len(pool))]), 2, 2.5, True, 1j][pick(5)]
        want = torch.result_type(x, other)
        assert promote(type_of(x), type_of(other) if isinstance(other, torch.Tensor) else other) == want, (x, other)


def test_cost():
    """Flops by the textbook, bytes of operands and results, nothing for a view."""

    def cost(text):
        eqn = Program.parse(text).main.eqns[0]
        return eqn.op.cost(eqn.input_types, eqn.params)

    linear = cost("def main(x: f32[2,5,8], w: f32[6,8]):\n  y: f32[2,5,6] = linear(x, w)\n  return y\n")
    assert linear.flops == 2 * 10 * 8 * 6 and linear.bytes == 4 * (80 + 48 + 60)
    conv = cost(
        "def main(x: f32[2,3,8,8], w: f32[4,3,3,3]):\n"
        "  y: f32[2,4,6,6] = conv(x, w, dilation=(1, 1), groups=1, padding=(0, 0), stride=(1, 1))\n  return y\n"
    )
    assert conv.flops == 2 * 2 * 4 * 36 * 27
    view = cost("def main(x: f32[2,6]):\n  y: f32[3,4] = reshape(x, shape=(3, 4))\n  return y\n")
    assert view.flops == view.bytes == 0
    assert cost("def main(x: bf16[2,6]):\n  y: bf16[2,6] = exp(x)\n  return y\n").bytes == 2 * 24
