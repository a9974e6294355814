"""Islands: a call of the user's code that stays Python, as one equation.

    y = island(x, w, name="Solver at model.py:31", shapes=((8, 3),), dtypes=(f32,), wrt=(0, 1))

A program holds the name; the call itself is a `PythonCall` of this process, found by that name when the equation runs.
Its operands are all tensors the code is given or reaches, its results are what it returns and what it changed of them.
Code runs on tensors as torch has them, and torch.autograd gives its gradient: `island_grad` runs it again for that,
with the same random numbers, and once more for each further derivative.  Everything is kept whole on every rank.
"""

from __future__ import annotations

import torch

from mycel.ir import Type, is_float, op
from mycel.ops.opaque import in_places, whole, zeros_like
from mycel.ops.python_calls import is_wanted, types_of
from mycel.ops.rules import o


def _island_types(*inputs, name, shapes, dtypes, wrt, counted=()):
    types = types_of(shapes, dtypes)
    return (*types, Type(torch.int64, (len(counted),))) if counted else types


def _island_vjp(g, y, *inputs, counted=(), **params):
    ys, gs = (y, g) if isinstance(y, tuple) else ((y,), (g,))
    filled = [zeros_like(v) if d is None else d for v, d in zip(ys, gs, strict=True) if is_float(v.dtype)]
    wrt = params["wrt"]
    if not wrt:
        return (None,) * len(inputs)
    grads = o.island_grad(*inputs, *filled, **params, arity=(len(inputs),))
    rest = iter(grads if isinstance(grads, tuple) else (grads,))
    return tuple(next(rest) if i in wrt else None for i in range(len(inputs)))


@op(
    lambda *inputs, **p: whole(inputs, _island_types(*inputs, **p)),
    types=_island_types,
    vjp=_island_vjp,
    compiles=False,
    apart=True,
    waits=True,
    fresh=True,
    python=True,
    precision="high",
)
def island(*inputs, name, shapes, dtypes, wrt, counted=()):
    """The user's own code, called as it is; behind its results, for operands that are `counted`: 1 where it used them
    for a gradient, else 0."""
    from mycel.ops import python_calls

    return python_calls.run(inputs, name, python_calls.types_of(shapes, dtypes), wrt, counted)


def _grad_types(*operands, name, shapes, dtypes, wrt, arity):
    floats = [t for t in operands[: arity[-1]] if is_float(t.dtype)]
    return tuple(t for t, k in zip(floats, is_wanted(operands[: arity[-1]], wrt, arity), strict=True) if k)


def _grad_vjp(g, y, *operands, arity, **params):
    ys, gs = (y, g) if isinstance(y, tuple) else ((y,), (g,))
    filled = [zeros_like(v) if d is None else d for v, d in zip(ys, gs, strict=True)]
    if len(arity) == 1 and len(filled) < sum(is_float(x.dtype) for x in operands[: arity[0]]):
        rest, at = iter(filled), params["wrt"]  # no gradient was taken of others
        inputs = operands[: arity[0]]
        filled = [next(rest) if i in at else zeros_like(x) for i, x in enumerate(inputs) if is_float(x.dtype)]
    grads = o.island_grad(*operands, *filled, **params, arity=(*arity, len(operands)))
    return in_places(grads, operands)


@op(
    lambda *operands, **p: whole(operands, _grad_types(*operands, **p)),
    types=_grad_types,
    vjp=_grad_vjp,
    compiles=False,
    apart=True,
    waits=True,
    fresh=True,
    python=True,
)
def island_grad(*operands, name, shapes, dtypes, wrt, arity):
    """torch's gradient of an island: operands are its own, then cotangents; each further `arity` is one more
    derivative."""
    from mycel.ops import python_calls

    return python_calls.gradients(operands, name, python_calls.types_of(shapes, dtypes), wrt, arity)
