"""The stack a loop keeps its residuals on: a value like any other, pushed and popped by operators that are each other's
gradients.

A stack is a chain of pairs, `(rest, top)`, and None when empty: so a push copies nothing and older stacks stay what
they were.  Popping an empty stack gives zeros: a cotangent stack nobody wrote to is empty.
"""

from __future__ import annotations

import torch

from mycel.ir import Type, op
from mycel.ops.rules import o


def _under(s):
    """The type of what a stack holds."""
    return Type(s.dtype, s.shape, s.depth - 1)


def _push_type(s, x):
    element = x if isinstance(x, Type) else Type(torch.bool, ())
    if _under(s) != element:
        raise ValueError(f"push of {x} on a {s}")
    return s


@op(stacks=True, types=lambda *, shape, dtype, depth=1: Type(dtype, shape, depth))
def stack_empty(*, shape, dtype, depth=1):
    """A stack with nothing on it"""
    return None


@op(
    stacks=True,
    types=_push_type,
    vjp=lambda g, y, s, x: o.stack_pop(g, shape=x.shape, dtype=x.dtype) if hasattr(x, "shape") else (None, None),
)
def stack_push(s, x):
    """The stack with x on top"""
    return (s, x)


@op(
    stacks=True,
    types=lambda s, *, shape, dtype, sure=False: (s, _under(s)),
    vjp=lambda g, y, s, **_: (_pushed(g, y, s),),
)
def stack_pop(s, *, shape, dtype, sure=False, device=None):
    """The stack under the top, and the top; from an empty stack (unless it is `sure` that it is not) zeros"""
    return s if sure else s if s is not None else (None, torch.zeros(shape, dtype=dtype, device=device))


def _pushed(g, y, s):
    """The cotangent of a popped stack: the cotangent of the top on the cotangent of the rest."""
    rest, top = g
    under = _under(s.type)
    if rest is None:
        rest = o.stack_empty(shape=s.shape, dtype=s.dtype, depth=s.type.depth)
    if top is None:
        top = zeros(under)
    return o.stack_push(rest, top)


@op(stacks=True, types=lambda s: Type(torch.bool, ()))
def stack_holds(s):
    """Is there anything on the stack?"""
    return s is not None


def zeros(type):
    """The zero of a type: zeros, or an empty stack."""
    if type.depth:
        return o.stack_empty(shape=type.shape, dtype=type.dtype, depth=type.depth)
    return o.full(0 if not type.dtype.is_floating_point else 0.0, shape=type.shape, dtype=type.dtype)
