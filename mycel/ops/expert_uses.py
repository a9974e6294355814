"""Experts that a loop passes over where no token chose them: which weights were read is a matter of the choices.

    ids  = choices(ids, up_0, up_1, …, experts=(0, 1, …))       as they are; up_e is read as often as e is among them
    up   = expert_stack(up_0, up_1, …)                          a stack, which alone tells nothing of who was read

torch has no gradient of a weight that no token reached, and its optimisers leave it alone: `transform/uses.py` counts,
and leaves the choices and the stack.  Where torch itself records what is computed, weights that were not read are cut
off from what it records (`recorded_if_chosen`).
"""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.rules import letters
from mycel.ops.slicing import stack_dims, stack_vjp


def names_of(weights, flag):
    return ", ".join(" ".join(f"w{i}{c}{flag}" for c in letters(w.ndim)) for i, w in enumerate(weights))


@op(
    lambda ids, *weights, experts: f"n k, {names_of(weights, '^')} -> n k",
    dtype="first",
    precision="kept",
    examples=["i64[4,2]<3, f[2,3], f[2,3], f[3], experts=(0, 1, 0)"],
)
def choices(ids, *weights, experts):
    """ids; each of the weights is read as often as its expert is among them"""
    return ids


@op(stack_dims, vjp=stack_vjp, linear="all", examples=["f[2,3], f[2,3], dim=0"])
def expert_stack(*xs, dim):
    """Weights of experts, of which `choices` tells which are read, one above the other"""
    return torch.stack(xs, dim)


@op(
    lambda ids, *weights, experts: f"n^ k^, {names_of(weights, '')} -> {names_of(weights, '')}",
    types=lambda ids, *weights, experts: weights,
    vjp=lambda g, y, ids, *weights, experts: (None, *(g if isinstance(g, tuple) else (g,))),
    linear=(),
    compiles=False, waits=True,
    examples=["i64[4,2]<3, f[2,3], f[2,3], f[3], experts=(0, 1, 0)"],
)  # fmt: skip
def recorded_if_chosen(ids, *weights, experts):
    """The weights; those whose experts are not among ids without what torch records of them"""
    if not torch.is_grad_enabled():
        return weights
    chosen = set(ids.unique().tolist())
    return tuple(w if e in chosen else w.detach() for w, e in zip(weights, experts, strict=True))
