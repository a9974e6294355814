"""What one expert of a loop does with its rows: a product, something on elements, a product.

    linear(silu(linear(x, w1)) * linear(x, w3), w2)             two products up
    a, b = linear(x, w13).chunk(2, dim=-1)                      the halves of one, or its even and odd elements
    gelu(x @ w1) @ w2                                           weights that are transposed

What is between the products becomes text (`ops/gates.py`).  What it gives may be multiplied by numbers, and by one for
each row: the weight of the row; and elements of it may be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mycel.capture.experts import parts_of
from mycel.ir import Eqn, Op, Var
from mycel.ir.types import NAMES
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops


@dataclass(frozen=True)
class RowProduct:
    """x @ w.T + bias, or x @ w + bias where w is `transposed`."""

    x: Var
    w: Var
    bias: Var | None
    transposed: bool


@dataclass(frozen=True)
class Mlp:
    """down @ gate(up_0 @ x, up_1 @ x), or of the parts of up_0 @ x: `form` and `gate` as in `ops/gates.py`."""

    x: Var
    ups: tuple[tuple[Var, Var | None], ...]  # weight, bias
    gate: str
    form: str
    down: tuple[Var, Var | None]
    transposed: bool
    dropout: Eqn | None = field(default=None, compare=False)  # of what it gives: each expert draws for itself

    @property
    def kind(self) -> tuple[Any, ...]:
        """What experts of a layer have in common."""
        types = [None if w is None else w.type for pair in (*self.ups, self.down) for w in pair]
        rate = self.dropout.params["p"] if self.dropout is not None else None
        return self.x, self.gate, self.form, self.transposed, types, rate

    @property
    def weights(self) -> list[Var]:
        return [w for pair in (*self.ups, self.down) for w in pair if w is not None]

    def with_weights(self, new: Mapping[Any, Var]) -> Mlp:
        """The same with others in the place of some weights."""
        pairs: list[Any] = [tuple(new.get(w, w) for w in pair) for pair in (*self.ups, self.down)]
        return replace(self, ups=tuple(pairs[:-1]), down=pairs[-1])


class Hidden:
    """What an expert does between its products, as text; the products that it is made of are collected."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.products: dict[Var, RowProduct] = {}
        self.forms: dict[Var, str] = {}  # which parts of a product's rows are used

    def text(self, x: Any) -> str | None:
        """Something on elements of products, or of parts of one."""
        x = self.loops.plain(x)
        product = product_of(self.loops, x)
        if product is not None:
            return self._letter(x, product, "whole", "")
        eqn = self.loops.producers.get(x, (None, 0))[0]
        if eqn is None or len(eqn.outputs) > 2 or eqn.op.vjp is None:
            return None
        h: Any = eqn.inputs[0] if eqn.op in (o.split, o.slice) else None
        part = parts_of(eqn, h) if h is not None and h.ndim > 1 else None
        if part is not None:
            product = product_of(self.loops, h)
            return None if product is None else self._letter(self.loops.plain(h), product, part[1], part[0][x])
        if len(eqn.outputs) != 1 or not eqn.op.on_elements:
            return None
        operands = [self.text(v) if isinstance(v, Var) else repr(v) for v in eqn.inputs]
        if None in operands:
            return None
        params = [f"{k}={NAMES.get(v, repr(v))}" for k, v in eqn.params.items()]
        return f"{eqn.op.name}({', '.join([*map(str, operands), *params])})"

    def _letter(self, x: Var, product: RowProduct, form: str, part: str) -> str | None:
        """The name of a product, or of a part of the only one."""
        self.products.setdefault(x, product)
        if self.forms.setdefault(x, form) != form or len(self.products) > (2 if form == "whole" else 1):
            return None
        return part or "ab"[list(self.products).index(x)]


def mlp_of(loops: Loops, y: Any) -> Mlp | None:
    """What an expert does with rows."""
    down = product_of(loops, y)
    if down is None:
        return None
    hidden = Hidden(loops)
    gate = hidden.text(down.x)
    ups = [*hidden.products.values()]
    forms = {*hidden.forms.values()}
    if gate is None or len({p.x for p in ups}) != 1 or len({p.w.shape for p in ups}) != 1 or len(forms) != 1:
        return None
    form = "halves" if len(ups) == 2 else forms.pop()
    if len(ups) > 2 or (len(ups) == 2 and "whole" not in forms) or len({p.transposed for p in (*ups, down)}) != 1:
        return None
    return Mlp(ups[0].x, tuple((p.w, p.bias) for p in ups), gate, form, (down.w, down.bias), down.transposed)


def weighed_mlp(loops: Loops, y: Any, rows: int) -> tuple[Mlp, Var | None] | None:
    """What an expert does with so many rows, and the weight of each row; None: 1."""
    y = loops.plain(y)
    peeled = _peeled(loops, y, rows)
    if peeled is None:
        return None
    mlp, factors = peeled
    of_rows = [f for op, f in factors if op is o.mul and not _is_number(f)]
    if len(factors) == len(of_rows) < 2:
        return mlp, of_rows[0] if of_rows else None

    def weight() -> Any:
        total: Any = o.full(1.0, shape=(rows, 1), dtype=mlp.x.dtype)
        for op, f in factors:
            total = op(total, o.reshape(f, shape=() if _is_number(f) else (rows, 1)) if isinstance(f, Var) else f)
        return total

    return mlp, loops.computed(y, weight)


def _peeled(loops: Loops, y: Any, rows: int) -> tuple[Mlp, tuple[tuple[Op, Any], ...]] | None:
    """What an expert does, and by what that is multiplied and divided: numbers, or one for each row."""
    y = loops.plain(y)
    mlp = mlp_of(loops, y)
    if mlp is not None:
        return mlp, ()
    eqn = loops.of(y, o.mul, o.div, o.dropout)
    if eqn is None:
        return None
    if eqn.op is o.dropout:
        inner = _peeled(loops, eqn.inputs[0], rows)
        return None if inner is None or inner[0].dropout else (replace(inner[0], dropout=eqn), inner[1])
    orders: Any = (eqn.inputs, eqn.inputs[::-1])[: 2 if eqn.op is o.mul else 1]
    for x, f in orders:
        if _is_number(f) or (
            f.type.numel == rows and f.shape[-1] == 1
        ):  # one for each column would be as many, perhaps
            inner = _peeled(loops, x, rows)
            if inner is not None:
                return inner[0], (*inner[1], (eqn.op, f))
    return None


def _is_number(f: Any) -> bool:
    return not isinstance(f, Var) or f.type.numel == 1


def product_of(loops: Loops, y: Any) -> RowProduct | None:
    """y as a product of rows and a matrix."""
    bias: Any = None
    y = loops.plain(y)
    added = loops.of(y, o.add)
    if added is not None and isinstance(added.inputs[1], Var) and added.inputs[1].shape == added.outputs[0].shape[-1:]:
        y, bias = added.inputs
    product = loops.of(y, o.linear, o.matmul)
    w: Any = product.inputs[1] if product is not None else None
    if product is None or w.ndim != 2:
        return None
    return RowProduct(loops.plain(product.inputs[0]), w, bias, product.op is o.matmul)
