"""Triangles, diagonals and sliding windows: the two dims (or the one) they run along stay whole."""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, letters, normal_dim, o
from mycel.ops.shape import expanded
from mycel.ops.slicing import zeros


@op(
    "... n^ m^ -> ... n m",
    vjp=lambda g, y, x, *, diagonal=0: (o.tril(g, diagonal=diagonal),),
    linear=((0,),),
    examples=["a[2,3,4]", "f[4,4], diagonal=-1", "f[2,3,3], diagonal=1"],
)
def tril(x, *, diagonal=0):
    """x on and below a diagonal, zero above"""
    return torch.tril(x, diagonal)


@op(
    "... n^ m^ -> ... n m",
    vjp=lambda g, y, x, *, diagonal=0: (o.triu(g, diagonal=diagonal),),
    linear=((0,),),
    examples=["a[2,3,4]", "f[4,4], diagonal=-1", "f[2,3,3], diagonal=1"],
)
def triu(x, *, diagonal=0):
    """x on and above a diagonal, zero below"""
    return torch.triu(x, diagonal)


@captures("aten.tril.default")
def _tril(x, diagonal=0):
    return tril(x, diagonal=diagonal)


@captures("aten.triu.default")
def _triu(x, diagonal=0):
    return triu(x, diagonal=diagonal)


def diagonal_size(n, m, offset):
    """How many elements a diagonal of an n by m matrix has."""
    return max(0, min(n + min(offset, 0), m - max(offset, 0)))


def diagonal_letters(x, dim1, dim2):
    """The matrix's letters, and the letters beside it."""
    names = letters(x.ndim, "nmk")
    rest = [c for i, c in enumerate(names) if i not in (dim1, dim2)]
    return " ".join("n^" if i == dim1 else "m^" if i == dim2 else c for i, c in enumerate(names)), " ".join(rest)


def diagonal_dims(x, *, offset, dim1, dim2):
    """The diagonal is the last dim of the result."""
    matrix, rest = diagonal_letters(x, dim1, dim2)
    return f"{matrix} -> {rest} k", {"k": diagonal_size(x.shape[dim1], x.shape[dim2], offset)}


@op(
    diagonal_dims,
    vjp=lambda g, y, x, **params: (o.diagonal_update(zeros(x.shape, g), g, **params),),
    write=lambda x, new, **params: o.diagonal_update(x, new[0], **params),
    linear=((0,),),
    examples=[
        "a[3,4], offset=0, dim1=0, dim2=1", "f[2,3,4], offset=1, dim1=2, dim2=0", "f[2,4,3], offset=-2, dim1=1, dim2=2",
        "f[2,3], offset=5, dim1=0, dim2=1",
    ],
)  # fmt: skip
def diagonal(x, *, offset, dim1, dim2):
    """A diagonal of the matrices in two dims, as the last dim."""
    return torch.diagonal(x, offset, dim1, dim2)


@captures("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(x, offset=0, dim1=0, dim2=1):
    return diagonal(x, offset=offset, dim1=normal_dim(dim1, x.ndim), dim2=normal_dim(dim2, x.ndim))


@captures("aten.trace.default")
def _trace(x):
    return o.sum(diagonal(x, offset=0, dim1=0, dim2=1), dims=(0,))


def diagonal_update_dims(x, new, *, offset, dim1, dim2):
    """The matrix's dims and the diagonal's are whole."""
    matrix, rest = diagonal_letters(x, dim1, dim2)
    return f"{matrix}, {rest} k^ -> {matrix}"


def diagonal_update_vjp(g, y, x, new, **params):
    """x is not seen where new is."""
    return o.diagonal_update(g, zeros(new.shape, g), **params), cast_like(diagonal(g, **params), new)


@op(
    diagonal_update_dims,
    vjp=diagonal_update_vjp,
    dtype="first",
    linear=((0, 1),),
    examples=["a[3,4], a[3], offset=0, dim1=0, dim2=1", "f[2,3,4], f[3,1], offset=1, dim1=2, dim2=0"],
)
def diagonal_update(x, new, *, offset, dim1, dim2):
    """x with a diagonal replaced"""
    return torch.diagonal_scatter(x, new, offset, dim1, dim2)


@captures("aten.diagonal_scatter.default")
def _diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    dim1, dim2 = normal_dim(dim1, x.ndim), normal_dim(dim2, x.ndim)
    return diagonal_update(x, cast_like(src, x), offset=offset, dim1=dim1, dim2=dim2)


def diag_embed_dims(x, *, offset, dim1, dim2):
    """The last dim becomes a matrix in two dims."""
    names = iter(letters(x.ndim - 1, "nmk"))
    right = ["n^" if i == dim1 else "m^" if i == dim2 else next(names) for i in range(x.ndim + 1)]
    size = x.shape[-1] + abs(offset)
    return f"{' '.join(letters(x.ndim - 1, 'nmk'))} k^ -> {' '.join(right)}", {"n": size, "m": size}


@op(
    diag_embed_dims,
    vjp=lambda g, y, x, **params: (diagonal(g, **params),),
    linear=((0,),),
    examples=["a[2,3], offset=0, dim1=1, dim2=2", "f[2,3], offset=-1, dim1=0, dim2=2"],
)
def diag_embed(x, *, offset, dim1, dim2):
    """Matrices in two dims with the last dim of x on a diagonal."""
    return torch.diag_embed(x, offset, dim1, dim2)


@captures("aten.diag_embed.default")
def _diag_embed(x, offset=0, dim1=-2, dim2=-1):
    dim1, dim2 = normal_dim(dim1, x.ndim + 1), normal_dim(dim2, x.ndim + 1)
    return diag_embed(x, offset=offset, dim1=dim1, dim2=dim2)


@captures("aten.block_diag.default")
def _block_diag(xs):
    blocks = [o.reshape(x, shape=((1,) * (2 - x.ndim) + tuple(x.shape))) for x in xs]
    width, at, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(o.pad(x, widths=((0, 0), (at, width - at - x.shape[1]))))
        at += x.shape[1]
    return o.cat(*rows, dim=0)


def unfold_dims(x, *, dim, size, step):
    """The dim becomes windows; their elements are the last dim."""
    if not 0 <= size <= x.shape[dim] or step < 1:
        raise ValueError(f"windows of {size} every {step} in dim {dim} of {list(x.shape)}")
    names = letters(x.ndim, "nkw")
    left, right = (" ".join([*names[:dim], n, *names[dim + 1 :]]) for n in ("n^", "k"))
    return f"{left} -> {right} w", {"k": (x.shape[dim] - size) // step + 1, "w": size}


def unfold_write(x, new, *, dim, size, step):
    """Windows that do not overlap, laid back where they came from; what lies between them stays."""
    if step < size:
        raise ValueError(f"in-place update of unfold({dim}, {size}, {step}): its elements may share memory")
    places = {"shape": tuple(x.shape), "dim": dim, "size": size, "step": step}
    covered = o.unfold_grad(o.full(1.0, shape=new[0].shape, dtype=torch.float32), **places)
    return o.where(o.ne(covered, 0), o.unfold_grad(new[0], **places), x)


@op(
    unfold_dims,
    vjp=lambda g, y, x, *, dim, size, step: (o.unfold_grad(g, shape=tuple(x.shape), dim=dim, size=size, step=step),),
    write=unfold_write,
    linear=((0,),),
    examples=["a[2,6], dim=1, size=3, step=2", "f[5,4], dim=0, size=2, step=1", "f[6], dim=0, size=2, step=3"],
)
def unfold(x, *, dim, size, step):
    """Windows of `size` every `step` along a dim, their elements as the last dim."""
    return x.unfold(dim, size, step)


@captures("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(x, dimension, size, step):
    return unfold(x, dim=normal_dim(dimension, x.ndim), size=size, step=step) if x.ndim else expanded(x, (1,))


def unfold_grad_dims(g, *, shape, dim, size, step):
    """The dim of the windows and the one they came from are whole."""
    names = letters(len(shape), "nkw")
    left, right = (" ".join([*names[:dim], n, *names[dim + 1 :]]) for n in ("k^", "n"))
    return f"{left} w^ -> {right}", {"n": shape[dim]}


@op(
    unfold_grad_dims,
    vjp=lambda g, y, x, *, shape, dim, size, step: (unfold(g, dim=dim, size=size, step=step),),
    linear=((0,),),
    examples=["f[2,2,3], shape=(2,6), dim=1, size=3, step=2", "f[4,4,2], shape=(5,4), dim=0, size=2, step=1"],
    apart=True,
)
def unfold_grad(g, *, shape, dim, size, step):
    """The sum of windows laid back where they came from: the gradient of unfold."""
    return torch.ops.aten.unfold_backward.default(g, shape, dim, size, step)
