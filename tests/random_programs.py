"""A hypothesis strategy of well-typed programs: pointwise operators, reductions, reshapes, matmuls, calls, constants,
masks, on values of a few shapes."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

import mycel.ops  # noqa: F401  fills the table
from mycel.ir import OPS, Block, Builder, Eqn, Params, Program, Ref, Type, Var, check, prune

SHAPES = [(), (3,), (2, 3), (3, 3), (1, 3), (6,), (2, 3, 3)]
UNARY = ["neg", "abs", "tanh", "sin", "relu", "square", "sigmoid"]
BINARY = ["add", "sub", "mul", "maximum", "minimum"]
COMPARE = ["le", "lt", "gt", "ge", "eq", "ne"]
LITERALS = [0, 1, 2, -1, 0.5, 1.0, 2.0, -0.0]
F64, I64 = torch.float64, torch.int64


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A well-typed program: a few blocks, each of which may call the earlier ones, and an entry."""
    blocks: dict[str, Block] = {}
    for i in range(draw(st.integers(0, 2))):
        blocks[f"f{i}"] = _block(draw, blocks, draw(st.integers(1, 6)))
    blocks["main"] = _block(draw, blocks, draw(st.integers(3, 14)))
    return check(prune(Program(blocks)))


def _block(draw: st.DrawFn, blocks: dict[str, Block], size: int) -> Block:
    b = Builder()
    values = [b.input(f"x{i}", Type(F64, draw(st.sampled_from(SHAPES)))) for i in range(draw(st.integers(1, 3)))]
    with b:
        for i in range(size):
            b.source = f"model.py:{i}"
            kind = draw(st.sampled_from(sorted(STEPS)))
            result = _call(draw, b, values, blocks) if kind == "call" else STEPS[kind](draw, values)
            values += result if isinstance(result, (list, tuple)) else [result] if result is not None else []
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return b.block(outputs)


def _pick(draw: st.DrawFn, values: list[Var], want) -> Var | None:
    fit = [v for v in values if want(v)]
    return draw(st.sampled_from(fit)) if fit else None


def _real(v: Var) -> bool:
    return v.dtype == F64


def _unary(draw, values):
    x = _pick(draw, values, _real)
    return OPS[draw(st.sampled_from(UNARY))](x) if x else None


def _binary(draw, values):
    x = _pick(draw, values, _real)
    y = _pick(draw, values, lambda v: _real(v) and v.shape in ((), x.shape, x.shape[1:])) if x else None
    return None if y is None else OPS[draw(st.sampled_from(BINARY))](*draw(st.permutations([x, y])))


def _scalar(draw, values):
    x = _pick(draw, values, lambda v: v.dtype in (F64, I64))
    if x is None:
        return None
    name = draw(st.sampled_from(["add", "sub", "mul", "pow"]))
    return OPS[name](x, draw(st.sampled_from([1, 2] if name == "pow" else LITERALS)))


def _reduce(draw, values):
    x = _pick(draw, values, lambda v: _real(v) and v.ndim > 0 and v.type.numel)
    if x is None:
        return None
    dim = draw(st.integers(0, x.ndim - 1))
    return OPS[draw(st.sampled_from(["sum", "mean", "amax"]))](x, dims=(dim,), keepdim=draw(st.booleans()))


def _reshape(draw, values):
    x = _pick(draw, values, lambda v: True)
    shapes = [s for s in SHAPES if math.prod(s) == x.type.numel]
    shapes += [(*x.shape, 1), (1, *x.shape)] if x.ndim < 3 else []
    return OPS["reshape"](x, shape=draw(st.sampled_from(shapes))) if shapes else None


def _permute(draw, values):
    x = _pick(draw, values, lambda v: v.ndim > 1)
    return OPS["permute"](x, dims=tuple(draw(st.permutations(range(x.ndim))))) if x else None


def _slice(draw, values):
    x = _pick(draw, values, lambda v: v.ndim > 0)
    if x is None:
        return None
    dim = draw(st.integers(0, x.ndim - 1))
    start = draw(st.integers(0, x.shape[dim]))
    stop = draw(st.integers(start, x.shape[dim]))
    return OPS["slice"](x, dim=dim, start=start, stop=stop, step=draw(st.integers(1, 2)))


def _matmul(draw, values):
    x = _pick(draw, values, lambda v: _real(v) and v.ndim > 1)
    w = _pick(draw, values, lambda v: _real(v) and v.ndim == 2 and v.shape[1] == x.shape[-1]) if x else None
    if w is None:
        return None
    turned = OPS["permute"](w, dims=(1, 0))
    return OPS["linear"](x, w) if draw(st.booleans()) else [turned, OPS["matmul"](x, turned)]


def _constant(draw, values):
    shape = draw(st.sampled_from(SHAPES))
    if shape and draw(st.booleans()):
        start, step = draw(st.integers(-2, 2)), draw(st.integers(-1, 2))
        return OPS["iota"](shape=shape, dim=draw(st.integers(0, len(shape) - 1)), dtype=I64, start=start, step=step)
    dtype, numbers = draw(st.sampled_from([(F64, LITERALS), (I64, [0, 1, -1]), (torch.bool, [True, False])]))
    return OPS["full"](draw(st.sampled_from(numbers)), shape=shape, dtype=dtype)


def _mask(draw, values):
    x = _pick(draw, values, lambda v: v.dtype in (F64, I64))
    y = _pick(draw, values, lambda v: x.dtype == v.dtype and v.shape in ((), x.shape)) if x else None
    if y is None:
        return None
    p = OPS[draw(st.sampled_from(COMPARE))](x, y)
    q = draw(st.sampled_from([p, *[v for v in values if v.type == p.type]]))
    c = OPS[draw(st.sampled_from(["logical_and", "logical_or", "bitwise_xor"]))](p, q)
    return [p, c, OPS["where"](c, x, draw(st.sampled_from([x, y, 0])))]


def _cast(draw, values):
    x = _pick(draw, values, lambda v: True)
    return (
        OPS["cast"](x, dtype=draw(st.sampled_from([F64, I64, torch.bool])))
        if x.dtype != F64
        else OPS["stop_gradient"](x)
    )


def _attend(draw, values):
    """Attention of a tiny sequence on itself under a random mask of half planes."""
    x = _pick(draw, values, lambda v: _real(v) and v.shape == (2, 3, 3))
    if x is None:
        return None
    q = OPS["reshape"](x, shape=(1, 2, 3, 3))
    rows, columns = OPS["iota"](shape=(3, 1), dim=0, dtype=I64), OPS["iota"](shape=(1, 3), dim=1, dtype=I64)
    shifted = OPS["add"](rows, draw(st.integers(-1, 2)))
    allowed = OPS[draw(st.sampled_from(["le", "lt"]))](columns, shifted)
    if draw(st.booleans()):
        window = OPS["gt"](columns, OPS["sub"](rows, draw(st.integers(1, 4))))
        allowed = OPS[draw(st.sampled_from(["logical_and", "logical_or"]))](allowed, window)
    allowed = OPS["logical_or"](allowed, OPS["eq"](columns, 0))
    mask = OPS["where"](allowed, 0.0, -math.inf) if draw(st.booleans()) else allowed
    mask = OPS["cast"](mask, dtype=F64) if mask.dtype != torch.bool else mask
    y, lse = OPS["attention"](q, q, q, mask)
    return [OPS["reshape"](y, shape=(2, 3, 3)), lse]


def _call(draw, b: Builder, values, blocks: dict[str, Block]):
    """A call of an earlier block on values of the right types."""
    for name, block in blocks.items():
        operands = [_pick(draw, values, lambda v, want=want: v.type == want.type) for want in block.inputs]
        if all(x is not None for x in operands) and draw(st.booleans()):
            outs = tuple(Var(b.name("y"), x.type) for x in block.outputs)
            b.eqns.append(Eqn(OPS["call"], tuple(operands), Params(block=Ref(name)), outs, b.source))
            return list(outs)
    return None


STEPS = {
    "attend": _attend,
    "binary": _binary,
    "call": None,
    "cast": _cast,
    "constant": _constant,
    "mask": _mask,
    "matmul": _matmul,
    "permute": _permute,
    "reduce": _reduce,
    "reshape": _reshape,
    "scalar": _scalar,
    "slice": _slice,
    "unary": _unary,
}
