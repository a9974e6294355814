"""Constant folding: what is made of constants only is computed now.

    n: i64[4] = iota(dim=0, dtype=i64, shape=(4,))
    m: i64[4] = add(n, 1)                           =>     m: i64[4] = iota(dim=0, dtype=i64, shape=(4,), start=1)
    c: f32[]  = full(2.0, dtype=f32, shape=())
    y: f32[4] = mul(x, c)                                  y: f32[4] = mul(x, 2.0)

A result is written as `full` if it is one number, as `iota` if it counts, else as `const` up to `LIMIT` elements;
larger ones stay as they are, and so do views of constants.  One number everywhere folds at any size, through operators
on elements and through those that only move elements.  A 0-dim constant becomes a literal operand where the operator's
type does not change by it (a Python scalar promotes less than a 0-dim tensor) and the promoted dtype holds its value.
Random operators are left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import CONTROL, OPS, Atom, Block, Eqn, Op, Params, Program, Type, Var, promote, rewrite, type_of
from mycel.ir.build import static
from mycel.ops import o

LIMIT = 4096  # elements of a constant: 32 KiB at most, less than a kernel launch is worth


def fold(program: Program) -> Program:
    """Equations of constants => full, iota or const; 0-dim constants => literals."""
    consts = dict(program.consts)
    return rewrite(replace(program, consts=consts), lambda block: _folded(block, consts))


def _folded(block: Block, consts: dict[str, torch.Tensor]) -> Block:
    """One block; new constants go into `consts`."""
    known: dict[Var, torch.Tensor] = {}
    eqns: list[Eqn] = []
    for eqn in block.eqns:
        eqn = _with_literals(eqn, known)
        values = _values(eqn, known, consts)
        if values is None:
            eqns.append(eqn)
            continue
        known.update(zip(eqn.outputs, values, strict=True))
        new = [_constant(eqn, var, value, consts) for var, value in zip(eqn.outputs, values, strict=True)]
        view = eqn.op.write is not None and any(e.op is o.const for e in new)  # costs nothing as it is
        eqns += [eqn] if view or eqn.op in (o.full, o.iota) else new
    return Block(block.inputs, tuple(eqns), block.outputs)


# -- values -------------------------------------------------------------------------------------------------


def _values(
    eqn: Eqn, known: Mapping[Var, torch.Tensor], consts: Mapping[str, torch.Tensor]
) -> list[torch.Tensor] | None:
    """What an equation computes, if that is known and small; one number everywhere is a tensor with strides of zero."""
    types = [v.type for v in eqn.outputs]
    if eqn.op in CONTROL or eqn.op.effect or eqn.op.by_rank or _is_random(eqn.op) or any(t.depth for t in types):
        return None
    if any(v not in known for v in eqn.vars):
        return None
    inputs = [known[x] if isinstance(x, Var) else x for x in eqn.inputs]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if eqn.op is o.const:
        value = consts[eqn.params["name"]].cpu()
        return [value] if value.numel() <= LIMIT else None
    if eqn.op is o.full or (tensors and all(map(_is_one_number, tensors)) and (eqn.op.moves or is_pointwise(eqn.op))):
        numbers = _one_number(eqn, inputs, types)
        return None if numbers is None else [x.reshape(()).expand(t.shape) for x, t in zip(numbers, types, strict=True)]
    if (tensors or eqn.op is o.iota) and all(n <= LIMIT for n in _numels(tensors, types)):
        return _run(eqn.op, inputs, eqn.params, types)
    return None


def _one_number(eqn: Eqn, inputs: list[Any], types: list[Type]) -> list[torch.Tensor] | None:
    """The one number that each output is everywhere."""
    if eqn.op is o.full:
        return _run(eqn.op, inputs, {**eqn.params, "shape": ()}, [Type(types[0].dtype, ())])
    small = [x[(slice(0, 1),) * x.ndim] if isinstance(x, torch.Tensor) else x for x in inputs]
    if eqn.op.moves:
        return small[:1] * len(types)
    return _run(eqn.op, small, eqn.params, [Type(t.dtype, (1,) * t.ndim) for t in types])


def _run(op: Op, inputs: list[Any], params: Mapping[str, Any], types: list[Type]) -> list[torch.Tensor] | None:
    """The kernel's results; None if it refuses, or gives other types than stated."""
    try:
        outs = op.kernel(*inputs, **params)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, ZeroDivisionError):
        return None
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    same = all(isinstance(y, torch.Tensor) for y in outs) and [type_of(y) for y in outs] == types
    return outs if same else None


def is_pointwise(op: Op) -> bool:
    """One number out for each number in, whatever its place and the rank, and nothing else happens?"""
    return (
        not _is_random(op)
        and not op.by_rank
        and not op.effect
        and isinstance(op.dims, str)
        and set(op.dims.replace(",", " ").split()) == {"...", "->"}
    )


@functools.cache
def _is_random(op: Op) -> bool:
    try:
        return "key" in inspect.signature(op.kernel).parameters
    except ValueError:
        return False


def _is_one_number(x: torch.Tensor) -> bool:
    return x.numel() > 0 and all(stride == 0 or n == 1 for stride, n in zip(x.stride(), x.shape, strict=True))


def _numels(tensors: list[torch.Tensor], types: list[Type]) -> list[int]:
    return [x.numel() for x in tensors] + [t.numel for t in types]


# -- writing them -------------------------------------------------------------------------------------------


def _constant(eqn: Eqn, var: Var, value: torch.Tensor, consts: dict[str, torch.Tensor]) -> Eqn:
    """The equation that makes this value."""
    place = {"shape": var.shape, "dtype": var.dtype}
    if not value.numel():
        return _made(eqn, var, "full", (0,), place)
    flat = value[(slice(0, 1),) * value.ndim].reshape(-1) if _is_one_number(value) else value.reshape(-1)
    if _alike(flat):
        return _made(eqn, var, "full", (static(flat[0].item()),), place)
    if (line := _counts(value)) is not None:
        dim, start, step = line
        params = {"start": start, "step": step}
        return _made(
            eqn,
            var,
            "iota",
            (),
            place | {"dim": dim} | {k: v for k, v in params.items() if OPS["iota"].defaults[k] != v},
        )
    if eqn.op is o.const:
        return eqn
    name, count = var.name, 1
    while name in consts:
        name, count = f"{var.name}_{count}", count + 1
    consts[name] = value.contiguous().clone()
    return _made(eqn, var, "const", (), place | {"name": name})


def _made(eqn: Eqn, var: Var, op: str, inputs: tuple[Atom, ...], params: dict[str, Any]) -> Eqn:
    return Eqn(OPS[op], inputs, Params(params), (var,), eqn.source, eqn.phase)


def _alike(flat: torch.Tensor) -> bool:
    """Are all values the same, to the bit?"""
    rows = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(flat.numel(), -1)
    return bool((rows == rows[:1]).all())


def _counts(value: torch.Tensor) -> tuple[int, int, int] | None:
    """(dim, start, step) if the value counts in whole numbers along one dim."""
    if value.dtype == torch.bool or value.is_complex() or value.numel() < 2:
        return None
    wide = value.to(torch.float64) if value.is_floating_point() else value.to(torch.int64)
    lines = [d for d, n in enumerate(value.shape) if n > 1 and not bool((wide == wide.narrow(d, 0, 1)).all())]
    if len(lines) != 1 or not bool(((wide.abs() < 2**53) & (wide == wide.round())).all()):
        return None
    (dim,) = lines
    ends = wide.select(dim, 0).reshape(-1)[0], wide.select(dim, 1).reshape(-1)[0]
    start, step = int(ends[0]), int(ends[1]) - int(ends[0])
    again = OPS["iota"].kernel(shape=tuple(value.shape), dim=dim, dtype=value.dtype, start=start, step=step)
    return (dim, start, step) if bool((again == value).all()) else None


# -- literals -----------------------------------------------------------------------------------------------


def _with_literals(eqn: Eqn, known: Mapping[Var, torch.Tensor]) -> Eqn:
    """The equation with its 0-dim constant operands as literals, where that changes neither type nor value."""
    for k in eqn.op.scalars:
        x = eqn.inputs[k]
        if not isinstance(x, Var) or x.shape != () or x not in known:
            continue
        literal = static(known[x].item())
        inputs = (*eqn.inputs[:k], literal, *eqn.inputs[k + 1 :])
        types = [i.type if isinstance(i, Var) else i for i in inputs]
        lone = eqn.op is not o.full and not any(isinstance(i, Type) for i in types)
        if lone or eqn.op.infer(types, eqn.params) != tuple(v.type for v in eqn.outputs):
            continue
        if eqn.op is o.full or _survives(known[x], promote(*eqn.input_types)):
            eqn = replace(eqn, inputs=inputs)
    return eqn


def _survives(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Is the value one of this dtype?"""
    there = value.to(dtype)
    return bool((there.to(value.dtype) == value) | value.isnan())
