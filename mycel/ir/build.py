"""Writing blocks: operators called on Vars inside `with Builder()` become equations.

b = Builder()
x = b.input("x", Type(torch.float32, (2, 3)))
with b:
    y = mul(x, 2.0)
block = b.block([y])
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mycel.errors import IRError
from mycel.ir.op import BUILDERS, Op
from mycel.ir.program import NAN, RESERVED, Atom, Block, Eqn, Params, Ref, Var
from mycel.ir.types import NAMES, Type

_NAME = re.compile(r"(?:\d+(?:\.\w+)*\.)?[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)  # as the text has them


class Builder:
    """Collects the equations of one block; `source` and `phase` are those of the next ones."""

    def __init__(self, beside: Builder | None = None, phase: str = "forward", names_of: Block | None = None) -> None:
        """`beside`: another builder whose names are taken too, as when both write into one block; `names_of`: a block
        whose names are taken."""
        self.inputs: list[Var] = []
        self.eqns: list[Eqn] = []
        self.source = ""
        self.phase = phase
        self._names: dict[str, int] = beside._names if beside else {}
        if names_of is not None:
            self.reserve(v.name for v in names_of.inputs)
            self.reserve(v.name for eqn in names_of.eqns for v in eqn.outputs)

    @staticmethod
    def after(block: Block, phase: str = "forward") -> Builder:
        """One that goes on where a block ends."""
        b = Builder(phase=phase, names_of=block)
        b.inputs, b.eqns = list(block.inputs), list(block.eqns)
        return b

    def __enter__(self) -> Builder:
        BUILDERS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        BUILDERS.pop()

    def name(self, hint: str) -> str:
        """A name not yet used in this block, one that the text can hold."""
        if not _NAME.fullmatch(hint) or hint in RESERVED:
            hint = "_" + re.sub(r"[^\w.]|\.(?!\w)", "_", hint, flags=re.ASCII)
        count = self._names.get(hint, 0)
        self._names[hint] = count + 1
        if not count:
            return hint
        return self.name(f"{hint}_{count}")

    def reserve(self, names: Iterable[str]) -> None:
        """These names are taken."""
        for name in names:
            self._names.setdefault(name, 1)

    def at(self, eqn: Eqn) -> None:
        """The next equations are written for this one: its line, its phase."""
        self.source, self.phase = eqn.source, eqn.phase

    def input(self, name: str, type: Type) -> Var:
        var = Var(self.name(name), type)
        self.inputs.append(var)
        return var

    def emit(self, op: Op, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
        """Append `op(inputs, **params)`; returns its output Var, or a tuple of them."""
        params = {k: static(v) for k, v in params.items() if k not in op.defaults or not _same(op.defaults[k], v)}
        types = op.infer([x.type if isinstance(x, Var) else x for x in inputs], params)
        return self.append(op, tuple(inputs), params, types)

    def append(self, op: Op, inputs: tuple[Atom, ...], params: dict[str, Any], types: Sequence[Type]) -> Any:
        """Append an equation whose output types are known."""
        outs = tuple(Var(self.name(op.name), t) for t in types)
        self.eqns.append(Eqn(op, tuple(map(_atom, inputs)), Params(params), outs, self.source, self.phase))
        return outs[0] if len(outs) == 1 else outs

    def block(self, outputs: Sequence[Atom]) -> Block:
        return Block(tuple(self.inputs), tuple(self.eqns), tuple(outputs))


def static(value: Any) -> Any:
    """A param in its canonical form: lists and sizes as tuples, only values the text can hold."""
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        return tuple(static(v) for v in value)
    if value is None or isinstance(value, (bool, int, float, complex, str, Ref)):
        return _atom(value)
    if isinstance(value, torch.dtype) and value in NAMES:
        return value
    raise IRError(f"{value!r} of type {type(value).__name__} is not a static param")


def _atom(value: Any) -> Any:
    """Every nan is the one nan."""
    return NAN if isinstance(value, float) and math.isnan(value) else value


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)
