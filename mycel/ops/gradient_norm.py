"""The size of all gradients, which clipping and the check for numbers that are not finite ask for."""

from __future__ import annotations

import torch

from mycel.ir import SplitRule, Type, op
from mycel.ops.rules import o


def norm_dtype(types):
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(t.dtype in wide for t in types) else torch.float32


def global_norm_expand(*xs):
    wide = [o.cast(o.abs(x) if x.dtype.is_complex else x, dtype=norm_dtype(xs)) for x in xs]
    squares = [o.sum(o.square(x), dims=tuple(range(x.ndim))) if x.ndim else o.square(x) for x in wide]
    total = squares[0]
    for s in squares[1:]:
        total = o.add(total, s)
    return o.sqrt(total)


def norm_dims(*types):
    """Each tensor lies as it will."""
    own = [" ".join(f"p{i}d{d}+" for d in range(t.ndim)) for i, t in enumerate(types)]
    return f"{', '.join(own) or '...'} -> "


def global_norm_part(at, *xs):
    """Squares of parts, summed over the axes each tensor is split over, those with the same axes at once."""
    groups = {}
    for i, x in enumerate(xs):
        axes = {a for d in range(x.ndim) for a in at.axes(f"p{i}d{d}")}
        groups.setdefault(tuple(a for a in at.mesh.axes if a in axes), []).append(x)
    total = None
    for axes, group in groups.items():
        squares = o.square(o.cast(global_norm(*group), dtype=torch.float64))  # which 32 bits might not hold
        if axes:
            squares = o.all_reduce(squares, axes=axes, count=at.mesh.count(axes))
        total = squares if total is None else o.add(total, squares)
    return o.cast(o.sqrt(total), dtype=norm_dtype(xs))


@op(
    lambda x, **_: f"{' '.join(f'd{d}+' for d in range(x.ndim)) or '...'} -> ",
    types=lambda x, **_: Type(norm_dtype([x]), ()),
    linear=((0,),),
    sent_as_sum=True,
    compiles=False,
    padding="zeros",
    examples=['f[4,6], axes=("dp",)', 'bf16[3], axes=("dp",)'],
)
def rank_squares(x, *, axes):
    """The sum of squares of what a rank has of x, which along the axes is a partial sum; so is the result: the sum over
    ranks of what each has.  It measures how their gradients differ."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(wide).square().sum()


@op(
    lambda *types: f"{', '.join('...' for _ in types)} -> ...",
    linear="all",
    examples=["f[], f[], f[]", "f[3]", "f[2,3], f[2,3]"],
    compiles=False,
)
def total(*xs):
    """The sum of what was measured of different gradients; stages of a pipeline each add up that of theirs."""
    sum_ = xs[0]
    for x in xs[1:]:
        sum_ = sum_ + x
    return sum_


def square_sum(x, dtype):
    """As a dot product, the fastest way on a CPU; 16 bits are widened."""
    return (
        torch.dot(x, x).to(dtype)
        if x.dtype in (torch.float32, torch.float64)
        else torch.linalg.vector_norm(x, dtype=dtype).square()
    )


def norms_of_each(xs, dtype):
    """The 2-norm of each tensor, on a GPU."""
    norms = {}
    if xs[0].is_cuda:
        from mycel.ops.triton_norm import block_norms, is_large

        large = [i for i, x in enumerate(xs) if is_large(x)]
        if large:
            norms.update(zip(large, torch._foreach_norm([block_norms(xs[i]) for i in large], 2), strict=True))
    small = [i for i in range(len(xs)) if i not in norms]
    if small:
        norms.update(zip(small, torch._foreach_norm([xs[i] for i in small], 2, dtype=dtype), strict=True))
    return [norms[i].to(dtype) for i in range(len(xs))]


@op(
    norm_dims,
    types=lambda *types: Type(norm_dtype(types), ()),
    expand=global_norm_expand,
    parts={"*": SplitRule(global_norm_part, uneven=True)},
    fresh=True,
    compiles=False,
    examples=["f[4,6], f[3]", "f32[4], bf16[2,2]", "f64[]", "c128[3], f[4]"],
    apart=True,
)
def global_norm(*xs):
    """The 2-norm of all tensors as one vector, in fp32 at least; on a CPU also where fp32 does not hold their squares.
    It is the norm of the norm of each: to the bit the same where these were taken before."""
    xs = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in xs]
    wide = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
    if not xs[0].is_cpu:
        return torch.linalg.vector_norm(torch.stack(norms_of_each(xs, wide)))
    norm = torch.linalg.vector_norm(torch.stack([square_sum(x.reshape(-1), wide) for x in xs]).sqrt())
    if bool(norm.isfinite()):
        return norm
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in xs]).norm().to(wide)


OVER_STAGES = (global_norm, total)  # each stage takes what is its own, and all get the whole
