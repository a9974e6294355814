"""What is the same along a dim is computed once, and repeated where it is used; masks of attention broadcast.

    a: bf16[8,1,512,512]  = expand(below, shape=(8, 1, 512, 512))        m: bf16[1,4,512,512] = add(bias, below)
    b: bf16[8,4,512,512]  = add(bias, a)                             =>  y, lse = attention(q, k, v, m)
    y, lse = attention(q, k, v, b)

A value is the same along a dim if it is an `expand`, if it is known as a function of its index (`indexed.py`) and that
leaves the dim out, or if it is made of such values element by element.  Blocks are followed: an input for which all
calls give an `expand` takes what is expanded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mycel.ir import Atom, Block, Builder, Eqn, Program, Type, Var, call, order, prune, walk
from mycel.ops import o
from mycel.transform.causal import KnownValues, mask_place, masks
from mycel.transform.fold import is_pointwise
from mycel.transform.indexed import Affine, Distance, Value

LEAST = 1 << 16  # elements below which nothing is gained


def narrow(program: Program) -> Program:
    """attention(q, k, v, add(bias, expand(below))) => attention(q, k, v, add(bias, below))"""
    if not masks(program):
        return program
    seen, known = KnownValues(program).inputs, KnownValues(program)
    held = {str(ref) for _, e in walk(program) if e.op is not call for ref in e.refs}
    blocks: dict[str, Block] = {}
    calls: dict[str, list[tuple[str, int, Eqn, list[Atom]]]] = defaultdict(list)
    for name in reversed(order(program)):  # callers first
        sites = calls[name] if name not in held else []
        sunk = _sunk([inner for _, _, _, inner in sites], program.blocks[name])
        for caller, at, eqn, inner in sites if sunk else ():
            given = tuple(inner[j] if j in sunk else x for j, x in enumerate(eqn.inputs))
            block = blocks[caller]
            blocks[caller] = replace(block, eqns=(*block.eqns[:at], replace(eqn, inputs=given), *block.eqns[at + 1 :]))
        writer = _Narrowing(known.values(program.blocks[name], seen[name]))
        blocks[name] = writer.block(program.blocks[name], sunk)
        for at, eqn in enumerate(blocks[name].eqns):
            if eqn.op is call:
                inner = [writer.inner.get(x, x) if isinstance(x, Var) else x for x in eqn.inputs]
                calls[str(eqn.params["block"])].append((name, at, eqn, inner))
    return prune(replace(program, blocks=blocks))


def _sunk(given: Sequence[Sequence[Atom]], block: Block) -> dict[int, Type]:
    """Inputs of a block (by position) for which all calls give an expanded value, and the type of what is expanded."""
    sunk = {}
    for j, v in enumerate(block.inputs):
        types = {x.type if isinstance(x, Var) else None for x in (call_[j] for call_ in given)}
        only = next(iter(types)) if len(types) == 1 else None
        if only is not None and only != v.type and v.type.numel >= LEAST:
            sunk[j] = only
    return sunk


@dataclass
class _Narrowing:
    """Writes one block; `inner`: values that are expanded -> what they are made of."""

    known: dict[Var, Value]
    inner: dict[Var, Var] = field(default_factory=dict)

    def block(self, block: Block, sunk: dict[int, Type]) -> Block:
        b = Builder(names_of=block)
        inputs = list(block.inputs)
        for j, type_ in sunk.items():
            inputs[j] = b.input(f"{block.inputs[j].name}_narrow", type_)
            self._expanded(b, inputs[j], block.inputs[j])
        for eqn in block.eqns:
            b.at(eqn)
            out, at = eqn.outputs[0] if eqn.outputs else None, mask_place(eqn)
            if eqn.op is o.expand and isinstance(eqn.inputs[0], Var) and out is not None and out.type.numel >= LEAST:
                self.inner[out] = self.inner.get(eqn.inputs[0], eqn.inputs[0])
                b.eqns.append(eqn)
            elif at is not None and eqn.inputs[at] in self.inner:
                b.eqns.append(self._unmasked(eqn, at))
            elif out is not None and self._is_repeated(eqn, out):
                with b:
                    small = eqn.op(*(self._operand(x, out) for x in eqn.inputs), **eqn.params)
                self._expanded(b, small, out)
            else:
                b.eqns.append(eqn)
        return Block(tuple(inputs), tuple(b.eqns), block.outputs)

    def _expanded(self, b: Builder, small: Var, out: Var) -> None:
        with b:
            o.expand(small, shape=out.shape)
        b.eqns[-1] = replace(b.eqns[-1], outputs=(out,))
        self.inner[out] = small

    def _unmasked(self, eqn: Eqn, at: int) -> Eqn:
        """The equation with the mask that its own is expanded from."""
        mask: Any = eqn.inputs[at]
        small = replace(eqn, inputs=(*eqn.inputs[:at], self.inner[mask], *eqn.inputs[at + 1 :]))
        return small if small.op.infer(small.input_types, small.params) == tuple(v.type for v in eqn.outputs) else eqn

    def _is_repeated(self, eqn: Eqn, out: Var) -> bool:
        """Is a result made element by element of values that are the same along a dim, not all of them known?"""
        operands = list(eqn.vars)
        if len(eqn.outputs) != 1 or out.type.numel < LEAST or not is_pointwise(eqn.op):
            return False
        return any(v not in self.known for v in operands) and bool(self._dims(operands, out))

    def _dims(self, operands: Sequence[Var], out: Var) -> list[int]:
        """Dims of the result, from the last (-1), along which all operands are the same."""
        return [
            d for d in range(-out.ndim, 0) if out.shape[d] > 1 and all(self._is_same(x, d) for x in operands)
        ]  # fmt: skip

    def _is_same(self, x: Var, d: int) -> bool:
        if -d > x.ndim or x.shape[d] == 1:
            return True
        small = self.inner.get(x)
        if small is not None and (-d > small.ndim or small.shape[d] == 1):
            return True
        return x in self.known and _leaves_out(self.known[x], d)

    def _operand(self, x: Atom, out: Var) -> Any:
        """An operand without the dims along which the result is the same."""
        if not isinstance(x, Var):
            return x
        dims = [d for d in range(-out.ndim, 0) if -d <= x.ndim and x.shape[d] > 1 and self._is_same(x, d)]
        if x in self.inner:
            x, whole = self.inner[x], x
            dims = [d for d in dims if -d <= x.ndim and x.shape[d] > 1 and whole in self.known]
        for d in dims:
            x = o.slice(x, dim=x.ndim + d, start=0, stop=1)  # type: ignore[union-attr]
        return x


def _leaves_out(value: Value, d: int) -> bool:
    """Does a function of the index not depend on a dim?"""
    if isinstance(value, Affine):
        return value.steps[d] == 0
    if isinstance(value, Distance):
        return value.of.steps[d] == 0
    return all(h.steps[d] == 0 for h in value.region.halves)
