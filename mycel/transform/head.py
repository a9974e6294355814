"""A product whose only use is a cross entropy becomes one operator with it, so that its logits are never whole.

    l: bf16[4,8,100] = linear(x, w)                     r: bf16[32,16] = reshape(x, shape=(32, 16))
    f: f32[4,8,100]  = cast(l, dtype=f32)           =>  loss, dr, dw   = linear_cross_entropy(r, w, None, target)
    z: f32[32,100]   = reshape(f, shape=(32, 100))
    loss, logp       = cross_entropy(z, target)

What lies between the two may take or reshape rows, add a bias and widen: it is done to the rows of x instead.  The log
probabilities must be unused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mycel.ir import Block, Builder, Chain, Eqn, Program, Type, Var, chains, is_float, rewrite
from mycel.ops import o

LEAST = 1 << 16  # logits below which nothing is gained


def head(program: Program, mean: bool = True) -> Program:
    """cross_entropy(linear(x, w), target) => linear_cross_entropy(x, w, None, target).  not `mean`: as a sum that is
    divided by its count."""
    return rewrite(program, lambda block: _joined(block, mean))


def _joined(block: Block, mean: bool) -> Block:
    uses = chains(block)
    producers = {v: eqn for eqn in block.eqns for v in eqn.outputs}
    b = Builder(names_of=block)
    for eqn in block.eqns:
        way = _way(eqn, producers, uses) if eqn.op is o.cross_entropy else None
        if way is None:
            b.eqns.append(eqn)
        else:
            b.at(eqn)
            _write(b, eqn, way, mean)
    return Block(block.inputs, tuple(b.eqns), block.outputs)


def _way(loss: Eqn, producers: dict[Var, Eqn], uses: dict[Var, Chain]) -> list[Eqn] | None:
    """The equations from a linear to this loss, if all of them keep its rows apart and nobody else sees them."""
    z, target, weight = loss.inputs
    _, logp = loss.outputs
    plain = weight is None and loss.params.get("reduction", "mean") != "none" and not loss.params.get("label_smoothing")
    if not plain or uses[logp].uses or uses[logp].is_output or not isinstance(z, Var) or not isinstance(target, Var):
        return None
    if z.ndim != 2 or is_float(target.dtype) or z.type.numel < LEAST:
        return None
    way: list[Eqn] = []
    x: Any = z
    while isinstance(x, Var) and len(uses[x].uses) == 1 and not uses[x].is_output and x in producers:
        eqn = producers[x]
        way.insert(0, eqn)
        if eqn.op is o.linear:
            bias = [e for e in way if e.op is o.add]
            return way if len(bias) <= 1 else None
        if not _keeps_rows(eqn):
            return None
        x = eqn.inputs[0]
    return None


def _keeps_rows(eqn: Eqn) -> bool:
    """Does it leave the classes of each row together, as they are?"""
    x, y = eqn.inputs[0], eqn.outputs[0]
    if not isinstance(x, Var):
        return False
    if eqn.op is o.cast:
        return is_float(y.dtype) and y.dtype.itemsize >= x.dtype.itemsize
    if eqn.op is o.reshape:
        return bool(x.ndim and y.ndim) and x.shape[-1] == y.shape[-1]
    if eqn.op is o.slice:
        return eqn.params["dim"] != x.ndim - 1
    if eqn.op is o.add:
        return isinstance(eqn.inputs[1], Var) and eqn.inputs[1].shape == x.shape[-1:] and eqn.inputs[1].dtype == x.dtype
    return False


def _write(b: Builder, loss: Eqn, way: list[Eqn], mean: bool) -> None:
    x: Any
    (x, w), rest = way[0].inputs, way[1:]
    bias = next((e.inputs[1] for e in rest if e.op is o.add), None)
    _, target, _ = loss.inputs
    reduction, ignored = loss.params.get("reduction", "mean"), loss.params.get("ignore_index", -100)
    with b:
        for eqn in rest:  # the same rows of x
            if eqn.op is o.reshape:
                x = o.reshape(x, shape=(*eqn.outputs[0].shape[:-1], x.shape[-1]))
            elif eqn.op is o.slice:
                x = o.slice(x, **eqn.params)
        if x.ndim != 2:
            x = o.reshape(x, shape=(math.prod(x.shape[:-1]), x.shape[-1]))
        apart = reduction == "mean" and not mean
        fused = o.linear_cross_entropy(
            x, w, bias, target, reduction="sum" if apart else reduction, ignore_index=ignored
        )[0]
        if apart:
            kept = o.cast(o.ne(target, ignored), dtype=fused.dtype)
            fused = o.div(fused, o.sum(kept, dims=(0,)))
        like: Type = loss.outputs[0].type
        fused = fused if fused.dtype == like.dtype else o.cast(fused, dtype=like.dtype)
    last = next(e for e in reversed(b.eqns) if fused in e.outputs)
    b.eqns[b.eqns.index(last)] = replace(
        last, outputs=tuple(loss.outputs[0] if v == fused else v for v in last.outputs)
    )
