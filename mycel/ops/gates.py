"""What experts do between their two products, as text: operators on elements, of the parts of a hidden row.

    mul(silu(a), b)          a, b: the halves of a row, or its even and its odd elements; a alone: the whole row

It is a static param of the expert layer, which computes it and its gradient by the operators' own kernels and rules;
called with Vars it writes equations.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

from mycel.ir import OPS, is_float
from mycel.ir.types import DTYPES
from mycel.ops.rules import o

FORMS = {"whole": 1, "halves": 2, "pairs": 2}  # how many parts a hidden row has


@functools.cache
def expression(gate: str) -> ast.expr:
    return ast.parse(gate, mode="eval").body


def parts(h: Any, form: str) -> list[Any]:
    """A hidden row as what its gate takes."""
    n = h.shape[1]
    if form == "halves":
        return [o.slice(h, dim=1, start=i * n // 2, stop=(i + 1) * n // 2) for i in range(2)]
    return [o.slice(h, dim=1, start=i, stop=n, step=2) for i in range(2)] if form == "pairs" else [h]


def from_parts(xs: list[Any], form: str) -> Any:
    """`parts` turned round."""
    if form == "halves":
        return o.cat(*xs, dim=1)
    m, n = xs[0].shape
    return o.reshape(o.stack(*xs, dim=2), shape=(m, 2 * n)) if form == "pairs" else xs[0]


class Evaluation:
    """A gate on the parts of a row: its value, and the gradient by the rules of its operators."""

    def __init__(self, gate: str, xs: list[Any]) -> None:
        self.xs = xs
        self.steps: list[tuple[Any, list[Any], dict[str, Any], Any]] = []
        self.value = self._of(expression(gate))

    def _of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return DTYPES[node.id] if node.id in DTYPES else self.xs["ab".index(node.id)]
        if not isinstance(node, ast.Call):
            return ast.literal_eval(node)
        assert isinstance(node.func, ast.Name)
        op, args = OPS[node.func.id], [self._of(x) for x in node.args]
        params = {str(k.arg): self._of(k.value) for k in node.keywords}
        self.steps.append((op, args, params, op(*args, **params)))
        return self.steps[-1][3]

    def pulled(self, g: Any) -> list[Any]:
        """The cotangents of the parts."""
        cotangents = {id(self.value): g}
        for op, args, params, y in reversed(self.steps):
            mine = cotangents.pop(id(y), None)
            if mine is None:
                continue
            for x, d in zip(args, op.vjp(mine, y, *args, **params), strict=True):
                if d is not None and hasattr(x, "dtype") and is_float(x.dtype):
                    cotangents[id(x)] = o.add(cotangents[id(x)], d) if id(x) in cotangents else d
        return [cotangents[id(x)] for x in self.xs]
