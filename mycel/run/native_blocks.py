"""Blocks of small equations as functions in C: an equation of a thousand elements takes a microsecond, torch's call of
it ten.

    def main_1(x: f32[1,1,768], w: f32[768]):       void main_1(const float *a0, const float *a1, float *y0) {
      s = square(x)                            =>     float t0[768];
      y = mul(s, w)                                   for (int64_t i2 = 0; i2 < 768; i2++) t0[i2] = a0[i2] * a0[i2];
      return y                                        for (int64_t i2 = 0; i2 < 768; i2++) y0[i2] = t0[i2] * a1[i2]; }

Each equation is a loop over its result; what an element is made of, its operator says (`Op.c`).  16 bits are computed
in 32 and rounded after each equation, as torch does.  Products and attention of few rows are calls of their functions
in C (`Op.call_c`), so that a block goes on behind them.  Where there is no compiler, blocks stay Python.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from mycel.ir import Block, Eqn, Program, Type, Var
from mycel.ops import few_rows
from mycel.ops.native_library import library_of

C_TYPES = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.int64: "int64_t", torch.bool: "_Bool"}
GIVEN = {**C_TYPES, torch.int8: "int8_t"}  # to functions in C
LARGEST = 1 << 16  # elements of a value: it lies on the stack, and one core computes it
HEAD = """#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tgmath.h>

#include "elements.h"
#undef exp
#define exp exp_of
"""
DECLARED = "\n".join(f"int (*{name})({types});" for name, types in few_rows.FUNCTIONS.items()) + "\n"
Function = Callable[..., tuple[torch.Tensor, ...]]


class Elements:
    """Elements of an equation's operands, as C, for the element of its result at `index`."""

    def __init__(self, eqn: Eqn, names: Mapping[Var, str]) -> None:
        self.eqn, self.names = eqn, names
        result = eqn.outputs[0].type
        self.index = tuple("0" if n == 1 else f"i{d}" for d, n in enumerate(result.shape))
        self._flat = _place(self.index, result.shape)
        decides = result.dtype
        if decides == torch.bool:  # a comparison is one of what it compares
            types = [x.type.dtype if isinstance(x, Var) else torch.tensor(x).dtype for x in eqn.inputs]
            decides = next((t for t in types if t.is_floating_point), torch.int64)
        self.kind = "float" if decides.is_floating_point else "int64_t"

    def __call__(self, k: int, index: Sequence[str] | None = None) -> str:
        """Of operand k; without an index where it is broadcast."""
        x = self.eqn.inputs[k]
        if not isinstance(x, Var):
            return self._number(x)
        given = self.index[len(self.index) - x.ndim :] if index is None else index
        places = ["0" if n == 1 else i for i, n in zip(given, x.shape, strict=True)]
        return self._read(x, _place(places, x.shape))

    def flat(self, k: int) -> str:
        """Of operand k, in the order of memory."""
        x = self.eqn.inputs[k]
        assert isinstance(x, Var)
        return self._read(x, self._flat)

    def _read(self, x: Var, place: str) -> str:
        element = f"{self.names[x]}[{place}]"
        return f"(({self.kind}){f'of_half({element})' if x.dtype == torch.bfloat16 else element})"

    def _number(self, x: Any) -> str:
        if isinstance(x, float) and not math.isfinite(x):
            return f"(({self.kind}){'NAN' if math.isnan(x) else 'INFINITY' if x > 0 else '-INFINITY'})"
        return f"(({self.kind}){x!r})" if not isinstance(x, bool) else f"(({self.kind}){int(x)})"

    def text(self) -> str | None:
        """The element itself."""
        op, inputs = self.eqn.op, self.eqn.inputs
        if callable(op.c):
            return op.c(self, *self.eqn.input_types, **self.eqn.params)
        return None if op.c is None else op.c.format(*map(self, range(len(inputs))))


def _place(index: Sequence[str], shape: Sequence[int]) -> str:
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return " + ".join(f"{i} * {s}" if s != 1 else i for i, s in zip(index, steps, strict=True) if i != "0") or "0"


def is_small(eqn: Eqn) -> bool:
    """Is it small, or a call of a function in C, and does its operator say what it is there?"""
    values = [x for x in (*eqn.inputs, *eqn.outputs) if isinstance(x, Var)]
    if eqn.op.call_c is not None:
        return _call_text(eqn, dict.fromkeys(values, "x")) is not None
    if eqn.op.c is None or None in eqn.inputs or len(eqn.outputs) != 1 or len(values) < 2:
        return False
    if not all(v.dtype in C_TYPES and 0 < v.type.numel <= LARGEST for v in values):
        return False
    return Elements(eqn, dict.fromkeys(values, "x")).text() is not None


def _call_text(eqn: Eqn, names: Mapping[Var, str]) -> str | None:
    """The statement that computes it; None where it is no call."""
    if eqn.op.call_c is None:
        return None
    given = [names[x] if isinstance(x, Var) else None for x in eqn.inputs]
    return eqn.op.call_c(given, names[eqn.outputs[0]], *eqn.input_types, **eqn.params)


def c_text(name: str, block: Block) -> str:
    """A block as a function of the memory of its inputs and its results; not 0 where there is no memory."""
    names = {v: f"a{i}" for i, v in enumerate(block.inputs)}
    given = [f"const {_c_type(v.type)} *restrict a{i}" for i, v in enumerate(block.inputs)]
    lines = []
    for i, x in enumerate(block.outputs):
        assert isinstance(x, Var) and x not in names, "results are values of the block, each once"
        names[x] = f"y{i}"
        given.append(f"{_c_type(x.type)} *restrict y{i}")
    for i, eqn in enumerate(block.eqns):
        (y,) = eqn.outputs
        if y not in names:
            names[y] = f"t{i}"
            lines.append(f"{_c_type(y.type)} t{i}[{y.type.numel}];")
        called = _call_text(eqn, names)
        if called is not None:
            lines.append(called)
            continue
        at = Elements(eqn, names)
        element = at.text()
        loops = [f"for (int64_t i{d} = 0; i{d} < {n}; i{d}++) " for d, n in enumerate(y.shape) if n != 1]
        value = f"half_of({element})" if y.dtype == torch.bfloat16 else element
        lines.append(f"{''.join(loops)}{names[y]}[{_place(at.index, y.shape)}] = {value};")
    return f"int {name}({', '.join(given)}) {{\n  " + "\n  ".join(lines) + "\n  return 0;\n}\n"


def _c_type(t: Type) -> str:
    return GIVEN[t.dtype]


def native_functions(program: Program, blocks: Collection[str]) -> dict[str, Function]:
    """These blocks as functions in C; none of them without a compiler."""
    texts = [c_text(f"block_{i}", program.blocks[name]) for i, name in enumerate(blocks)]
    library = library_of(HEAD + DECLARED + "\n".join(texts), "blocks", ("-fno-math-errno",)) if texts else None
    called = few_rows.library()
    if library is None or called is None:
        return {}
    for function in few_rows.FUNCTIONS:
        ctypes.c_void_p.in_dll(library, function).value = ctypes.cast(called[function], ctypes.c_void_p).value
    return {name: _function(library[f"block_{i}"], program.blocks[name]) for i, name in enumerate(blocks)}


def _function(code: Any, block: Block) -> Function:
    """Called as the block's Python would be."""
    code.argtypes = [ctypes.c_void_p] * (len(block.inputs) + len(block.outputs))
    code.restype = ctypes.c_int
    results = [(v.shape, v.dtype) for v in block.outputs if isinstance(v, Var)]

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        ys = tuple([torch.empty(shape, dtype=dtype) for shape, dtype in results])
        if code(*[x.data_ptr() for x in given], *[y.data_ptr() for y in ys]):
            raise MemoryError("no memory for a product or for attention of few rows")
        return ys

    return run
