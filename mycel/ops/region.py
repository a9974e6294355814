"""Regions in which the user sees this rank's part: what goes in, what comes out.

    a = enter(x, axes=("tp",), counts=(4,), layout=((), ("tp",)))     f32[8,16] -> f32[8,4]     this rank's part
    y = leave(b, axes=("tp",), counts=(4,), layout=(("tp",), ()))     f32[2,16] -> f32[8,16]    the parts of all ranks

Between the two, types are those of one rank along the region's axes, and the user's code speaks to other ranks itself.
Along an axis of the region that a layout does not name, `enter` gives every rank the same and `leave` is given the same
by every rank.  Both are linear maps; their transposes:

    dx = leave(all_reduce(da))     summed where every rank was given the same
    db = only_first(enter(dy))     on the first rank where one value stands for all

Lowering makes nothing of them: a rank holds its part already.
"""

from __future__ import annotations

from mycel.errors import RunError
from mycel.ir import Type, op
from mycel.ops.rules import o


def unnamed(axes, counts, layout):
    """The axes of a region that a layout does not name, and how many ranks they have."""
    named = {a for dim in layout for a in dim}
    left = tuple(a for a in axes if a not in named)
    count = 1
    for a, n in zip(axes, counts, strict=True):
        count *= n if a in left else 1
    return left, count


def parts_of(axes, counts, layout):
    """How many parts each dim has."""
    sizes = dict(zip(axes, counts, strict=True))
    parts = []
    for dim in layout:
        n = 1
        for a in dim:
            n *= sizes[a]
        parts.append(n)
    return parts


def enter_dims(x, *, axes, counts, layout):
    """Dims the region splits are whole for all other axes."""
    if not any(layout):
        return "... -> ..."
    sizes = {
        f"q{d}": n // k
        for d, (n, k) in enumerate(zip(x.shape, parts_of(axes, counts, layout), strict=True))
        if layout[d]
    }
    left = " ".join(f"p{d}^" if dim else f"d{d}" for d, dim in enumerate(layout))
    right = " ".join(f"q{d}" if dim else f"d{d}" for d, dim in enumerate(layout))
    return f"{left} -> {right}", sizes


def leave_dims(x, *, axes, counts, layout):
    if not any(layout):
        return "... -> ..."
    sizes = {
        f"q{d}": n * k
        for d, (n, k) in enumerate(zip(x.shape, parts_of(axes, counts, layout), strict=True))
        if layout[d]
    }
    return enter_dims(x, axes=axes, counts=(1,) * len(counts), layout=layout)[0], sizes


def enter_type(x, *, axes, counts, layout):
    return Type(x.dtype, tuple(n // k for n, k in zip(x.shape, parts_of(axes, counts, layout), strict=True)))


def leave_type(x, *, axes, counts, layout):
    return Type(x.dtype, tuple(n * k for n, k in zip(x.shape, parts_of(axes, counts, layout), strict=True)))


def enter_vjp(g, y, x, *, axes, counts, layout):
    left, count = unnamed(axes, counts, layout)
    total = o.all_reduce(g, axes=left, count=count) if left else g
    return (o.leave(total, axes=axes, counts=counts, layout=layout),)


def leave_vjp(g, y, x, *, axes, counts, layout):
    left, count = unnamed(axes, counts, layout)
    inside = o.enter(g, axes=axes, counts=counts, layout=layout)
    return (o.only_first(inside, axes=left, count=count) if left else inside,)


def not_lowered():
    return RunError(
        "a manual region was run before it was lowered for its ranks\n  try       a training step with a mesh"
    )


@op(enter_dims, types=enter_type, vjp=enter_vjp, lies=True, linear=((0,),), compiles=False, by_rank=True)
def enter(x, *, axes, counts, layout):
    """This rank's part of x along the axes of a region."""
    raise not_lowered()


@op(leave_dims, types=leave_type, vjp=leave_vjp, lies=True, linear=((0,),), compiles=False, by_rank=True)
def leave(x, *, axes, counts, layout):
    """What the parts of all ranks along the axes of a region are together."""
    raise not_lowered()
