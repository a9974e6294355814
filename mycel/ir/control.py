"""Structured control flow: operators that hold blocks.

    y… = call(x…, block=@b)                                b(x…)
    y… = cond(p, x…, then=@a, orelse=@b)                   a(x…) if p else b(x…)
    s… = loop(c…, s…, test=@t, body=@b, consts=n)          while t(c…, s…): s… = b(c…, s…)
                                                           (the first n operands are c)
    s…, y… = scan(c…, s…, x…, body=@b, consts=n, carry=m)  for i over dim 0 of x: s…, y_i… = b(c…, s…, x_i…);
                                                           y = stack(y_i)

    y…, z… = custom(x…, forward=@f, backward=@b, wrt=n, outs=k)
        f(x…), with a gradient of the user's: for the first k outputs y and the first n operands,
        b(x…, y…, z…, dy…) gives dx…  (dy and dx for floating point values only)

Their types follow from their blocks (`outputs_of`).  They have no kernel: `run` executes the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mycel.errors import IRError
from mycel.ir.op import Op, op
from mycel.ir.program import Atom, Block, Eqn, Var
from mycel.ir.types import DEVICE, Type, is_float, type_of


@op()
def call(*inputs: Any, block: str) -> Any:
    """Run a block."""
    raise IRError("call has no kernel")


@op()
def cond(*inputs: Any, then: str, orelse: str) -> Any:
    """Run one of two blocks."""
    raise IRError("cond has no kernel")


@op()
def loop(*inputs: Any, test: str, body: str, consts: int = 0) -> Any:
    """Run a block while a test holds."""
    raise IRError("loop has no kernel")


@op()
def scan(*inputs: Any, body: str, length: int, consts: int = 0, carry: int = 0, reverse: bool = False) -> Any:
    """Run a block over the leading dim of its last operands."""
    raise IRError("scan has no kernel")


@op()
def custom(*inputs: Any, forward: str, backward: str, wrt: int, outs: int) -> Any:
    """Run a block whose gradient is another block."""
    raise IRError("custom has no kernel")


CONTROL: tuple[Op, ...] = (call, cond, loop, scan, custom)


def outputs_of(eqn: Eqn, blocks: Mapping[str, Block]) -> tuple[Type, ...]:
    """The output types of a control-flow equation, its blocks checked against its operands."""
    types, p = list(eqn.input_types), eqn.params
    for ref in eqn.refs:
        if ref not in blocks:
            raise IRError(f"no block named {ref}")
    if eqn.op is call:
        return _apply(p["block"], blocks, types)
    if eqn.op is cond:
        pred = types[0] if types else None
        if not _is_scalar_bool(pred):
            raise IRError(f"cond takes a bool[], not {pred}")
        then, orelse = _apply(p["then"], blocks, types[1:]), _apply(p["orelse"], blocks, types[1:])
        if then != orelse:
            raise IRError(f"cond: {p['then']} gives {_show(then)}, {p['orelse']} gives {_show(orelse)}")
        return then
    if eqn.op is custom:
        outputs = _apply(p["forward"], blocks, types)
        given = [t for t in outputs[: p["outs"]] if is_float(t.dtype)]
        if _apply(p["backward"], blocks, [*types, *outputs, *given]) != tuple(
            t for t in types[: p["wrt"]] if is_float(t.dtype)
        ):
            raise IRError(
                f"custom: {p['backward']} does not give a cotangent for each of the first {p['wrt']} operands"
            )
        return outputs
    n = p.get("consts", 0)
    if eqn.op is loop:
        test, body = _apply(p["test"], blocks, types), _apply(p["body"], blocks, types)
        if len(test) != 1 or not _is_scalar_bool(test[0]):
            raise IRError(f"loop: {p['test']} gives {_show(test)}, not bool[]")
        if body != tuple(types[n:]):
            raise IRError(f"loop: {p['body']} gives {_show(body)} for a state of {_show(types[n:])}")
        return body
    m, length = n + p.get("carry", 0), p["length"]
    for t in types[m:]:
        if not isinstance(t, Type) or not t.shape or t.shape[0] != length:
            raise IRError(f"scan of length {length} over {t}")
        if t.space != DEVICE:
            raise IRError(f"scan over {t}: its turns are taken of values on the device")
    body = _apply(p["body"], blocks, types[:m] + [Type(t.dtype, t.shape[1:]) for t in types[m:]])
    if body[: m - n] != tuple(types[n:m]):
        raise IRError(f"scan: {p['body']} gives {_show(body[: m - n])} for a carry of {_show(types[n:m])}")
    if any(t.space != DEVICE for t in body[m - n :]):
        raise IRError(f"scan: {p['body']} gives rows on the host: {_show(body[m - n :])}")
    return body[: m - n] + tuple(Type(t.dtype, (length, *t.shape)) for t in body[m - n :])


def _apply(name: str, blocks: Mapping[str, Block], types: Sequence[Any]) -> tuple[Type, ...]:
    block = blocks[name]
    want = [v.type for v in block.inputs]
    if list(types) != want:
        raise IRError(f"block {name} takes {_show(want)}, was given {_show(types)}")
    return tuple(atom_type(x) for x in block.outputs)


def atom_type(x: Atom) -> Type:
    """The type of a Var, or of a literal as a 0-dim tensor."""
    return x.type if isinstance(x, Var) else type_of(torch.tensor(x))


def _is_scalar_bool(t: Any) -> bool:
    return isinstance(t, Type) and t.dtype == torch.bool and t.shape == () and t.depth == 0


def _show(types: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"
