"""Experts that compute tokens which a mask then leaves out, in products of all experts at once.

    y = torch.einsum("ted,te->td", each, gates)    at model.py:12    ->    a warning with that line, and a better way

Here `gates` is made of the ids of a topk, and `each` is what experts give: a product with weights of as many experts as
there are scores, or a stack of as many results.  A layer whose experts all count (a soft one) has no such ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from mycel.capture.copied_weights import blocks_with_parameters
from mycel.capture.expert_masks import CHOICES
from mycel.ir import Block, Eqn, Program, Var, call
from mycel.ops import o

_WARNED: set[str] = set()  # lines that were told of
_PICKS = (o.gather, o.index, o.mul)


def warn_of_masks(program: Program) -> None:
    """Once for a line."""
    for block, parameters in blocks_with_parameters(program):
        for eqn, experts in masked(block, parameters):
            if eqn.source in _WARNED:
                continue
            _WARNED.add(eqn.source)
            warnings.warn(
                f"of what all {experts} experts give, a mask picks here what counts: they compute more than they are "
                f"chosen for, or tokens come to them by products with masks\n  at        {eqn.source}\n"
                "  try       mycel.experts(x, ids, weights, up, down, gate=…), which moves and computes the rows that "
                "are chosen; with capacity=… so many of an expert at most",
                stacklevel=2,
            )


def masked(block: Block, parameters: frozenset[Var]) -> Iterator[tuple[Eqn, int]]:
    """Equations that pick of what all experts give by choices among them; and how many experts there are."""
    counts: set[int] = set()  # of experts
    chosen: set[Var] = set()  # what is made of ids
    weights: set[Var] = set()  # what is made of the best scores alone
    results: set[Var] = set()  # of products, and what is made of these
    given: dict[Var, int] = {}  # what all experts give
    for eqn in block.eqns:
        is_product = eqn.op.product or eqn.op in (o.einsum, call)
        scores = eqn.inputs[0] if eqn.inputs else None
        picked = [v for i, v in enumerate(eqn.outputs) if (eqn.op, i) in CHOICES]
        if picked and isinstance(scores, Var) and eqn.params.get("dim") in (scores.ndim - 1, None):
            counts.add(scores.shape[-1])
            chosen.update(picked)
            weights.update(eqn.outputs)
            continue
        here = next((given[v] for v in eqn.vars if v in given), 0)
        if any(v in chosen for v in eqn.vars):
            if here and (is_product or eqn.op in _PICKS):
                yield eqn, here
            elif not here and (not is_product or chosen.union(weights).issuperset(eqn.vars)):  # without tokens
                chosen.update(eqn.outputs)
            continue
        if eqn.vars and weights.issuperset(eqn.vars):
            weights.update(eqn.outputs)
        if is_product or any(v in results for v in eqn.vars):
            results.update(v for v in eqn.outputs if v.dtype.is_floating_point)
        of = [v.shape[0] for v in eqn.vars if v in parameters and v.ndim == 3 and v.shape[0] in counts]
        stacked = eqn.op is o.stack and len(eqn.inputs) in counts and eqn.outputs[0].ndim > 2
        experts = of[0] if is_product and of else len(eqn.inputs) if stacked and results.issuperset(eqn.vars) else here
        if experts:
            given.update(dict.fromkeys(eqn.outputs, experts))
