"""Which equations are products of 16 bits, and which of them are slow where such are (`product_speed.py`): who writes
them in 32 bits asks (`transform/wide_products.py`), and the clock."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mycel.ir import CONTROL, Eqn, Type, Var
from mycel.ops.rules import o

HALVES = (torch.bfloat16, torch.float16)


def is_product(eqn: Eqn) -> bool:
    """Is it a product, or made of them?"""
    is_one = eqn.op.product or eqn.op.precision == "low"
    return is_one and eqn.op not in CONTROL and eqn.op is not o.linear_few_rows


def halves_of(eqn: Eqn) -> set[torch.dtype]:
    """The dtypes of its operands that have 16 bits."""
    return {x.dtype for x in eqn.inputs if isinstance(x, Var) and x.dtype in HALVES}


def is_slow_product(eqn: Eqn, slow: Mapping[torch.dtype, int]) -> bool:
    """Is it computed in 32 bits, where products are `slow` that use an operand's element so often or more?"""
    dtypes = halves_of(eqn) if is_product(eqn) else set[torch.dtype]()
    return bool(dtypes) and dtypes <= slow.keys() and _uses(eqn) >= max(slow[dtype] for dtype in dtypes)


def _uses(eqn: Eqn) -> float:
    """How often the product uses an element of its largest operand: of a weight, the number of rows."""
    types = [t for t in eqn.input_types if isinstance(t, Type)]
    return eqn.op.cost(eqn.input_types, eqn.params).flops / max(2 * max(t.numel for t in types), 1)
