"""Attention masks that are functions of positions become params, `causal` or `window`; masks that mask nothing go.

    n: i64[8]         = iota(dim=0, dtype=i64, shape=(8,))
    q: i64[1,1,8,1]   = reshape(n, shape=(1, 1, 8, 1))
    k: i64[1,1,1,8]   = reshape(n, shape=(1, 1, 1, 8))      (dead now)
    m: bool[1,1,8,8]  = le(k, q)
    y, lse = attention(query, key, value, m)            =>  y, lse = attention(query, key, value, None, causal=True)

    m: bool[1,1,8,8]  = logical_and(le(k, q), gt(k, q - 4))
    y, lse = attention(query, key, value, m)            =>  y, lse = attention(query, key, value, None, window=(3, 0))

Values are followed as functions of their index (`indexed.py`), never computed, so the size does not matter.  Blocks are
followed through their calls: an input of a block is known if all its calls agree on it; where they do not, as local and
global layers that are one block, calls with different masks get blocks of their own.  What is not known stays.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Block, Eqn, Params, Program, Ref, Var, call, cond, custom, loop, order, prune, scan, walk
from mycel.ops import o
from mycel.transform.indexed import Either, Value, Values, broadcast, of_constant, of_equation
from mycel.transform.regions import ALL, NONE, Affine, Region, Shape, half, moved

DENSE = 0.75  # the share of scores in a window above which a mask does as well
# The operand that is the mask.
MASKED = {"attention": 3, "sdpa": 3, "attention_grad": 4}
# The operand from which on there are documents.
DOCUMENTED = {"attention": 5, "attention_grad": 8}


def causal(program: Program) -> Program:
    """attention(q, k, v, column <= row) => attention(q, k, v, None, causal=True), window=(before, behind) where columns
    are bounded on the other side too;  attention(…, True) => attention(…, None)"""
    program = _by_masks(program)
    seen = KnownValues(program).inputs
    again = KnownValues(program)
    blocks = {n: _without_masks(program.blocks[n], again.values(program.blocks[n], seen[n])) for n in order(program)}
    return prune(replace(program, blocks=blocks))


def mask_place(eqn: Eqn) -> int | None:
    """Which operand of an attention is its mask; None where it has none."""
    at = MASKED.get(eqn.op.name)
    return at if at is not None and isinstance(eqn.inputs[at], Var) else None


def masks(program: Program) -> int:
    """How many equations of attention have a mask, or documents."""
    return sum(mask_place(eqn) is not None or has_documents(eqn) for _, eqn in walk(program))


def has_documents(eqn: Eqn) -> bool:
    """Has an attention documents of rows and columns, its last operands?"""
    return eqn.op.name in DOCUMENTED and len(eqn.inputs) > DOCUMENTED[eqn.op.name]


# -- one block for each mask ----------------------------------------------------------------------------------


def _by_masks(program: Program) -> Program:
    """Calls of a block that know different values of its masks => calls of as many blocks."""
    asked = mask_inputs(program)
    if not any(asked.values()):
        return program
    known = KnownValues(program)
    blocks: dict[str, Block] = {}
    names: dict[tuple[str, Values], str] = {}

    def visit(name: str, values: Values) -> str:
        key = name, tuple(value if i in asked[name] else None for i, value in enumerate(values))
        if key not in names:
            numbered = (f"{name}_{i}" for i in itertools.count(1))
            fresh = itertools.chain([name], (n for n in numbered if n not in program.blocks))
            names[key] = next(n for n in fresh if n not in names.values())
            block = program.blocks[name]
            held = known.values(block, values)
            eqns = tuple(called(eqn, held) for eqn in block.eqns)
            blocks[names[key]] = replace(block, eqns=eqns)
        return names[key]

    def called(eqn: Eqn, held: dict[Var, Value]) -> Eqn:
        if eqn.op is call:
            operands = tuple(held.get(x) if isinstance(x, Var) else None for x in eqn.inputs)
            return replace(eqn, params=Params(eqn.params | {"block": Ref(visit(str(eqn.params["block"]), operands))}))
        for ref in eqn.refs:
            visit(str(ref), (None,) * len(program.blocks[ref].inputs))
        return eqn

    visit(program.entry, (None,) * len(program.inputs))
    return replace(program, blocks=blocks)


def mask_inputs(program: Program) -> dict[str, set[int]]:
    """For each block the inputs (by position) that masks of attention in it are made of; none for blocks that a branch
    or a loop holds."""
    asked: dict[str, set[int]] = {}
    held = {str(ref) for _, e in walk(program) if e.op is not call for ref in e.refs}
    for name in order(program):
        block = program.blocks[name]
        wanted: set[Var] = set()
        for eqn in reversed(block.eqns):
            at = mask_place(eqn)
            places = asked[str(eqn.params["block"])] if eqn.op is call else {at} - {None}
            wanted.update(x for i in places if isinstance(x := eqn.inputs[i], Var))  # type: ignore[index]
            if eqn.op is not call and any(v in wanted for v in eqn.outputs):
                wanted.update(eqn.vars)
        asked[name] = {i for i, v in enumerate(block.inputs) if v in wanted} if name not in held else set()
    return asked


def _without_masks(block: Block, known: dict[Var, Value]) -> Block:
    eqns = []
    for eqn in block.eqns:
        at = mask_place(eqn)
        mask = eqn.inputs[at] if at is not None else None
        if at is not None and isinstance(mask, Var) and mask in known:
            eqn = _without_mask(eqn, at, _allowed(known[mask], mask, eqn, at))
        eqns.append(eqn)
    return Block(block.inputs, tuple(eqns), block.outputs)


def _without_mask(eqn: Eqn, at: int, allowed: tuple[Region, Shape] | None) -> Eqn:
    """The equation without its mask, if what the mask allows can be said by `causal` or `window`."""
    structure = structure_of(*allowed) if allowed is not None else None
    if structure is None:
        return eqn
    params = Params(eqn.params | structure)
    new = replace(eqn, inputs=(*eqn.inputs[:at], None, *eqn.inputs[at + 1 :]), params=params)
    same = new.op.infer(new.input_types, new.params) == tuple(v.type for v in eqn.outputs)
    return new if same else eqn


def structure_of(region: Region, shape: Shape, most: float = DENSE) -> dict[str, Any] | None:
    """A region of scores as params of attention, aligned at the top left, as torch does; None where it is no such, or
    more than a share of the scores."""
    lead, (rows, columns) = (0,) * (len(shape) - 2), shape[-2:]
    if region == ALL:
        return {}
    if region == half(Affine(0, (*lead, 1, -1)), shape):  # q - k >= 0
        return {"causal": True}
    before, behind = rows - 1, columns - 1
    for h in region.halves if region.every else ():
        if h.steps == (*lead, 1, -1):  # q - k + behind >= 0
            behind = h.offset
        elif h.steps == (*lead, -1, 1):  # k - q + before >= 0
            before = h.offset
        else:
            return None
    if not region.every or before < 0 or behind < 0:
        return None
    ahead = [min(i + behind + 1, columns) - max(i - before, 0) for i in range(rows)]
    return {"window": (before, behind)} if sum(max(n, 0) for n in ahead) <= most * rows * columns else None


def _allowed(value: Value, mask: Var, eqn: Eqn, at: int) -> tuple[Region, Shape] | None:
    """The region of the scores (…, query, key) that a mask allows, and their shape."""
    q, k = (eqn.inputs[i] for i in (at - 3, at - 2))
    if not isinstance(value, Either) or not isinstance(q, Var) or not isinstance(k, Var):
        return None
    shape = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    shape = (1,) * (mask.ndim - len(shape)) + shape
    region = _region(value, mask.dtype)
    if region is None or 0 in shape:
        return None
    region = moved(region, broadcast(mask.shape, shape), shape)
    return None if region is None else (region, shape)


def _region(value: Either, dtype: torch.dtype) -> Region | None:
    """Where a mask lets attention through: True, or zero as opposed to minus infinity."""
    sides = [(value.region, value.yes), (value.region.inverse(), value.no)]
    through = [r for r, v in sides if r != NONE and (v is True if dtype == torch.bool else v == 0)]
    shut = [r for r, v in sides if r != NONE and (v is False if dtype == torch.bool else is_low(v, dtype))]
    if sum(r != NONE for r, _ in sides) != len(through) + len(shut):
        return None
    return ALL if not shut else through[0] if through else None


def is_low(v: Any, dtype: torch.dtype) -> bool:
    """Does adding v leave nothing after softmax?  finfo.min of a narrower dtype does too."""
    return isinstance(v, float) and dtype.is_floating_point and v <= max(torch.finfo(dtype).min, -1e30)


# -- following values ---------------------------------------------------------------------------------------


class KnownValues:
    """The program run on what is known; `inputs` is what all uses of a block agree on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs: dict[str, Values] = {}
        self.results: dict[tuple[str, Values], Values] = {}
        self.named(program.entry, (None,) * len(program.inputs))

    def named(self, name: str, inputs: Values) -> Values:
        """What is known of the outputs of a block."""
        if (name, inputs) not in self.results:
            before = self.inputs.get(name, inputs)
            self.inputs[name] = tuple(a if a == b else None for a, b in zip(before, inputs, strict=True))
            block = self.program.blocks[name]
            known = self.values(block, inputs)
            self.results[name, inputs] = tuple(known.get(x) if isinstance(x, Var) else None for x in block.outputs)
        return self.results[name, inputs]

    def values(self, block: Block, inputs: Values) -> dict[Var, Value]:
        """What is known of the values of a block."""
        known = {v: x for v, x in zip(block.inputs, inputs, strict=True) if x is not None}
        for eqn in block.eqns:
            operands = tuple(known.get(x) if isinstance(x, Var) else None for x in eqn.inputs)
            for var, value in zip(eqn.outputs, self.eqn(eqn, operands), strict=False):
                if value is not None and var.type.numel:
                    known[var] = value
        return known

    def eqn(self, eqn: Eqn, operands: Values) -> Values:
        p = eqn.params
        if eqn.op is call:
            return self.named(p["block"], operands)
        if eqn.op is cond:
            sides = self.named(p["then"], operands[1:]), self.named(p["orelse"], operands[1:])
            return tuple(a if a == b else None for a, b in zip(*sides, strict=True))
        if eqn.op is custom:
            for block in eqn.refs:
                self.named(block, (None,) * len(self.program.blocks[block].inputs))
            return ()
        if eqn.op is loop or eqn.op is scan:
            n = p.get("consts", 0)
            held = operands[:n] + (None,) * (len(operands) - n)
            for block in eqn.refs:
                self.named(block, held)
            return ()
        if eqn.op is o.const:
            return (of_constant(self.program.consts[p["name"]]),)
        if len(eqn.outputs) != 1 or any(
            v is None for x, v in zip(eqn.inputs, operands, strict=True) if isinstance(x, Var)
        ):
            return ()
        return (of_equation(eqn, operands),)
