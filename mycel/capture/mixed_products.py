"""Products of tensors of different dtypes, which torch refuses: most often a batch that comes from NumPy, in f64.

linear(x: f64[8,4], w: f32[5,4])    at model.py:12    ->    refused, with that line and a way out

Asked of a program whose precision is decided: what is cast for it fits.
"""

from __future__ import annotations

import linecache

from mycel.capture.fence import SOURCES
from mycel.errors import MisfitError
from mycel.ir import NAMES, Eqn, Program, Var, walk
from mycel.ops import o

OF_TWO = (o.linear, o.matmul, o.conv, o.conv_transpose, o.attention)


def refuse_mixed_products(program: Program) -> Program:
    """The program as it is, or MisfitError for the first product that cannot run."""
    for _, eqn in walk(program):
        if eqn.op in OF_TWO or (eqn.op is o.einsum and _sums(eqn)):
            dtypes = [x.type.dtype for x in eqn.inputs[:2] if isinstance(x, Var)]
            if len({*dtypes}) > 1:
                file, line = SOURCES.get(eqn.source, (eqn.source, 0))
                raise MisfitError(
                    f"a product of {' by '.join(NAMES[dtype] for dtype in dtypes)}, which torch refuses",
                    file=file,
                    line=line,
                    text=linecache.getline(file, line).strip(),
                    hint="one dtype for both: .float() makes f32 of what NumPy has in f64",
                )
    return program


def _sums(eqn: Eqn) -> bool:
    """Is it a product with a sum, rather than one element by element, which torch promotes?"""
    terms, _, out = eqn.params["equation"].partition("->")
    left, *right = terms.split(",")
    return len(right) == 1 and bool({*left} & {*right[0]} - {*out})
