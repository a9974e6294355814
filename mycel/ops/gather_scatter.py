"""Elements chosen along one dim: by an index for each element, or by a vector of indices."""

from __future__ import annotations

import math

import torch

from mycel.ir import SplitRule, Type, op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, letters, normal_dim, o
from mycel.ops.shape import reshaped
from mycel.ops.slicing import along, zeros

# -- gather and scatter -----------------------------------------------------------------------------------------


def lanes(dim, *operands):
    """A letter for each dim but `dim` that all operands have in full; own whole letters where sizes differ.  Along
    `dim` an index and a source of one length share theirs."""
    rows = [[] for _ in operands]
    for d, (name, sizes) in enumerate(zip(letters(len(operands[0])), zip(*operands, strict=True), strict=True)):
        for i, row in enumerate(rows):
            shared = min(i, 1) if sizes[i] == sizes[min(i, 1)] else i
            row.append(f"along{shared}^" if d == dim else f"{name}{i}^" if len(set(sizes)) > 1 else name)
    return rows


def free(names, dim, flag=""):
    """Letters with another flag on `dim`."""
    return [name.rstrip("^") + flag if d == dim else name for d, name in enumerate(names)]


def here(at, letter, index):
    """Indices into the whole of a split letter -> indices into this rank's part, and which of them fall into it."""
    local = o.sub(index, at.start(letter))
    return o.clamp(local, 0, at.local(letter) - 1), o.logical_and(o.ge(local, 0), o.lt(local, at.valid(letter)))


def gather_part(at, x, index, *, dim):
    """What this rank does not hold counts as zero."""
    index, hit = here(at, "along0", index)
    return o.where(hit, gather(x, index, dim=dim), 0)


def gather_dims(x, index, *, dim):
    """The dim of x is whole, that of the index free."""
    a, b = lanes(dim, x.shape, index.shape)
    b = free(b, dim)
    return f"{' '.join(a)}, {' '.join(b)} -> {' '.join(b)}"


@op(
    gather_dims,
    vjp=lambda g, y, x, index, *, dim: (o.gather_grad(g, index, shape=tuple(x.shape), dim=dim), None),
    dtype="first",
    linear=((0,),),
    looked_up=lambda *, dim: (dim,),
    parts={"along0": SplitRule(gather_part, partial="+", uneven=True)},
    examples=["a[2,6,4], i64[2,3,4]<6, dim=1", "f[4,6], i64[2,3]<6, dim=1", "f[4], i64[6]<4, dim=0"],
)
def gather(x, index, *, dim):
    """y[i, j, k] = x[i, index[i, j, k], k] for dim 1"""
    return torch.gather(x, dim, index)


@captures("aten.gather.default")
def _gather(x, dim, index, *, sparse_grad=False):
    if not math.prod(index.shape):
        return zeros(index.shape, x)
    if x.ndim and index.ndim:
        return gather(x, index, dim=normal_dim(dim, x.ndim))
    return reshaped(gather(row(x), row(index), dim=0), index.shape)


def row(x):
    """A tensor without dims as one of one element."""
    return x if x.ndim else reshaped(x, (1,))


def gather_grad_dims(g, index, *, shape, dim):
    """A split dim of the index leaves a partial sum."""
    a, b = lanes(dim, shape, index.shape)
    b, sizes = free(b, dim, "+"), {name.rstrip("^"): n for name, n in zip(a, shape, strict=True)}
    return f"{' '.join(b)}, {' '.join(b)} -> {' '.join(a)}", {k: n for k, n in sizes.items() if len(k) > 1}


def gather_grad_part(at, g, index, *, shape, dim):
    index, hit = here(at, "along0", index)
    return gather_grad(o.where(hit, g, 0), index, shape=shape, dim=dim)


@op(
    gather_grad_dims,
    vjp=lambda g, y, x, index, *, shape, dim: (gather(g, index, dim=dim), None),
    dtype="first",
    linear=((0,),),
    parts={"along0": SplitRule(gather_grad_part, uneven=True)},
    examples=["f[2,3,4], i64[2,3,4]<6, shape=(2,6,4), dim=1", "f[2,3], i64[2,3]<6, shape=(4,6), dim=1"],
    apart=True,
)
def gather_grad(g, index, *, shape, dim):
    """Zeros with g added where `gather` would choose: the gradient of gather."""
    return torch.zeros(shape, dtype=g.dtype, device=g.device).scatter_add(dim, index, g)


def scatter_dims(x, index, src, *, dim, **_):
    """The dim is whole in all operands; where the index is smaller than x or src, so is that dim."""
    literal = not isinstance(src, Type)
    rows = lanes(dim, x.shape, index.shape, index.shape if literal else src.shape)
    a, b, c = (" ".join(row) for row in rows)
    return f"{a}, {b}, {'' if literal else c} -> {a}"


def gather_src(g, index, src, dim):
    """The cotangent of what was scattered; zero for what of src the index does not reach."""
    if getattr(src, "shape", None) is None:
        return None
    part = gather(g, index, dim=dim)
    widths = tuple((0, n - m) for n, m in zip(src.shape, part.shape, strict=True))
    return cast_like(o.pad(part, widths=widths) if any(hi for _, hi in widths) else part, src)


@op(
    scatter_dims,
    vjp=lambda g, y, x, index, src, *, dim: (o.scatter(g, index, 0.0, dim=dim), None, gather_src(g, index, src, dim)),
    dtype="first",
    examples=[
        "a[2,6,4], i64[2,1,4]<6, a[2,1,4], dim=1", "f[4,6], i64[2,1]<6, f[2,1], dim=1",
        "f[4,6], i64[4,3]<6, 1.5, dim=1",
    ],
    apart=True,
)  # fmt: skip
def scatter(x, index, src, *, dim):
    """x with y[i, index[i, j, k], k] = src[i, j, k] for dim 1; src may be a number"""
    return torch.scatter(x, dim, index, src)


@captures("aten.scatter.src", "aten.scatter.value")
def _scatter(x, dim, index, src):
    src = cast_like(src, x) if hasattr(src, "dtype") else src
    return scattered(scatter, x, dim, index, src)


def scattered(into, x, dim, index, src, **params):
    """One of the scatter operators; x itself for an empty index; operands without dims become rows."""
    if not math.prod(index.shape):
        return x
    src = row(src) if hasattr(src, "dtype") else src
    return reshaped(into(row(x), row(index), src, dim=normal_dim(dim, x.ndim), **params), x.shape)


def scatter_add_part(at, x, index, src, *, dim):
    index, hit = here(at, "along0", index)
    src = o.where(hit, cut(src, index), 0)
    return scatter_add(x, index, src, dim=dim)


def cut(src, index):
    """What of src the index reaches."""
    for d, n in enumerate(index.shape):
        src = src if src.shape[d] == n else o.slice(src, dim=d, start=0, stop=n)
    return src


def scatter_add_of_rows(at, x, index, src, *, dim):
    """Nothing is added for rows that do not count; one number for each row, expanded, is as in `index_add`."""
    column, n = at.expanded(index, dim), index.shape[dim]
    if column is not None and src.shape == (*x.shape[:dim], n, *x.shape[dim + 1 :]):
        return index_add(x, at.plain(o.reshape(column, shape=(n,))), at.covered(src, 0), dim=dim)
    return scatter_add(x, at.plain(index), at.covered(src, 0), dim=dim)


@op(
    scatter_dims,
    vjp=lambda g, y, x, index, src, *, dim: (g, None, gather_src(g, index, src, dim)),
    dtype="first",
    linear=((0, 2),),
    of_rows=scatter_add_of_rows,
    parts={"along0": SplitRule(scatter_add_part, uneven=True)},
    examples=["n[2,6,4], i64[2,3,4]<6, n[2,3,4], dim=1", "f[4,6], i64[2,3]<6, f[2,3], dim=1"],
    apart=True,
)
def scatter_add(x, index, src, *, dim):
    """x with src[i, j, k] added to y[i, index[i, j, k], k] for dim 1"""
    return torch.scatter_add(x, dim, index, src)


@captures("aten.scatter_add.default")
def _scatter_add(x, dim, index, src):
    return scattered(scatter_add, x, dim, index, src)


def scatter_reduce_vjp(g, y, x, index, src, *, dim, reduce, include_self=True):
    """As torch does: products divide out what was multiplied, extremes share among ties, means divide by the count."""
    at = {"dim": dim}
    if reduce == "sum":
        gx, gsrc = g, gather(g, index, **at)
    elif reduce == "mean":
        ones = o.full(1, shape=tuple(src.shape), dtype=g.dtype)
        count = o.scatter_add(o.full(int(include_self), shape=tuple(g.shape), dtype=g.dtype), index, ones, **at)
        gx = o.div(g, o.clamp(count, 1.0, None))
        gsrc = gather(gx, index, **at)
    elif reduce == "prod":
        gx, gsrc = _product_vjp(g, y, x, index, src, dim=dim, include_self=include_self)
    else:
        mine, theirs = o.cast(o.eq(x, y), dtype=g.dtype), o.cast(o.eq(src, gather(y, index, **at)), dtype=g.dtype)
        share = o.div(g, o.scatter_add(mine, index, theirs, **at))
        gx, gsrc = o.mul(mine, share), o.mul(theirs, gather(share, index, **at))
    return gx if include_self else scatter(gx, index, 0.0, **at), None, gsrc


def _product_vjp(g, y, x, index, src, *, dim, include_self):
    """The product without one factor: divided out, or taken again without the one zero."""

    def product(x, src):
        return o.scatter_reduce(x, index, src, dim=dim, reduce="prod", include_self=include_self)

    x1 = o.where(o.eq(x, 0), 1.0, x)
    zero = o.eq(src, 0)
    zeros_at = o.scatter_add(zeros(x.shape, g), index, o.cast(zero, dtype=g.dtype), dim=dim)
    alone = o.logical_and(zero, o.eq(gather(zeros_at, index, dim=dim), 1))
    without = product(x, o.where(alone, 1.0, src))
    divided = o.div(gather(o.mul(g, y), index, dim=dim), o.where(zero, 1.0, src))
    return o.div(o.mul(g, product(x1, src)), x1), o.where(alone, gather(o.mul(g, without), index, dim=dim), divided)


@op(
    scatter_dims,
    vjp=scatter_reduce_vjp,
    dtype="first",
    examples=[
        'n[2,6,4], i64[2,3,4]<6, n[2,3,4], dim=1, reduce="sum"', 'f[4,3], i64[2,3]<4, f[2,3], dim=0, reduce="mean"',
        'f[3,4], i64[3,6]<4, f[3,6], dim=1, reduce="mean", include_self=False',
        'f[4], i64[6]<4, f[6], dim=0, reduce="prod"', 'f[4], i64[6]<4, f[6], dim=0, reduce="amax"',
        'f[4], i64[6]<4, f[6], dim=0, reduce="amin", include_self=False',
    ],
    apart=True,
)  # fmt: skip
def scatter_reduce(x, index, src, *, dim, reduce, include_self=True):
    """x with src reduced into y[i, index[i, j, k], k] for dim 1: reduce is sum, prod, mean, amax or amin"""
    return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)


@captures("aten.scatter_reduce.two")
def _scatter_reduce(x, dim, index, src, reduce, *, include_self=True):
    if reduce == "sum" and include_self:
        return scattered(scatter_add, x, dim, index, src)
    return scattered(scatter_reduce, x, dim, index, cut(src, index), reduce=reduce, include_self=include_self)


@captures("aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_with(x, dim, index, src, *, reduce):
    src = src if hasattr(src, "dtype") else o.full(src, shape=tuple(index.shape), dtype=x.dtype)
    return _scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


# -- by an index vector -----------------------------------------------------------------------------------------


def index_select_dims(x, index, *, dim):
    """The dim of x is whole, the index free."""
    names = letters(x.ndim, "np")
    return f"{along(names, dim, 'n^')}, p -> {along(names, dim, 'p')}"


def index_select_part(at, x, index, *, dim):
    index, hit = here(at, "n", index)
    return o.where(lane(hit, dim, x.ndim), index_select(x, index, dim=dim), 0)


def lane(v, dim, ndim):
    """A vector as a tensor along one dim."""
    return reshaped(v, tuple(v.shape[0] if d == dim else 1 for d in range(ndim)))


@op(
    index_select_dims,
    vjp=lambda g, y, x, index, *, dim: (o.index_grad(g, index, shape=tuple(x.shape), at=(dim,)), None),
    dtype="first",
    linear=((0,),),
    looked_up=lambda *, dim: (dim,),
    parts={"n": SplitRule(index_select_part, partial="+", uneven=True)},
    examples=["a[2,6,4], i64[3]<6, dim=1", "f[4], i32[6]<4, dim=0"],
)
def index_select(x, index, *, dim):
    """x[index] along a dim, for a vector of integers"""
    return torch.index_select(x, dim, index)


@captures("aten.index_select.default")
def _index_select(x, dim, index):
    if not x.ndim:
        return x
    return index_select(x, row(index), dim=normal_dim(dim, x.ndim))


def select_at_dims(x, index, *, dim):
    """The selected dim is whole."""
    names = letters(x.ndim, "n")
    return f"{along(names, dim, 'n^')}, -> {along(names, dim)}"


def select_at_write(x, new, index, *, dim):
    """The slice at index, replaced."""
    return o.index_copy(x, row(index), reshaped(new[0], (*x.shape[:dim], 1, *x.shape[dim + 1 :])), dim=dim)


@op(
    select_at_dims,
    expand=lambda x, index, *, dim: o.index(x, index, at=(dim,)),
    write=select_at_write,
    dtype="first",
    looked_up=lambda *, dim: (dim,),
    examples=["a[2,6,4], i64[]<6, dim=1", "f[4], i32[]<4, dim=0"],
)
def select_at(x, index, *, dim):
    """x[index] along a dim, for one integer that is a tensor"""
    return torch.index_select(x, dim, index.reshape(1)).squeeze(dim)


def places_from(start, size):
    """start, start + 1, …"""
    return o.add(o.iota(shape=(size,), dim=0, dtype=torch.int64), start)


def window_at_dims(x, start, *, dim, size):
    """The dim is whole."""
    names = letters(x.ndim, "nm")
    return f"{along(names, dim, 'n^')}, -> {along(names, dim, 'm^')}", {"m": size}


def window_at_write(x, new, start, *, dim, size):
    """The rows from start on, replaced."""
    return o.index_copy(x, places_from(start, size), new[0], dim=dim)


@op(
    window_at_dims,
    expand=lambda x, start, *, dim, size: o.index_select(x, places_from(start, size), dim=dim),
    write=window_at_write,
    dtype="first",
    examples=["a[2,6,4], i64[]<4, dim=1, size=3", "f[4], i64[]<2, dim=0, size=2"],
)
def window_at(x, start, *, dim, size):
    """x[start : start + size] along a dim, for a start that is a tensor"""
    return torch.index_select(x, dim, start + torch.arange(size, device=x.device))


def index_add_dims(x, index, src, *, dim):
    """The dim is whole in all operands."""
    names = letters(x.ndim, "np")
    return f"{along(names, dim, 'n^')}, p^, {along(names, dim, 'p^')} -> {along(names, dim, 'n')}"


def index_add_part(at, x, index, src, *, dim):
    index, hit = here(at, "n", index)
    return index_add(x, index, o.where(lane(hit, dim, x.ndim), src, 0), dim=dim)


def index_add_of_rows(at, x, index, src, *, dim):
    """Nothing is added for rows that do not count; as many others as rows cannot be told apart."""
    return index_add(x, at.plain(index), at.covered(src, 0), dim=dim)


@op(
    index_add_dims,
    vjp=lambda g, y, x, index, src, *, dim: (g, None, cast_like(index_select(g, index, dim=dim), src)),
    dtype="first",
    linear=((0, 2),),
    parts={"n": SplitRule(index_add_part, uneven=True)},
    of_rows=index_add_of_rows,
    examples=["n[2,6,4], i64[3]<6, n[2,3,4], dim=1", "f[4], i32[6]<4, f[6], dim=0"],
    apart=True,
)
def index_add(x, index, src, *, dim):
    """x with the slices of src added at index along a dim"""
    return torch.index_add(x, dim, index, src)


@captures("aten.index_add.default")
def _index_add(x, dim, index, source, *, alpha=1):
    return indexed(index_add, x, dim, index, source if alpha == 1 else o.mul(source, alpha))


def indexed(into, x, dim, index, source):
    """index_add or index_copy; operands without dims become rows."""
    dim, index = normal_dim(dim, x.ndim), row(index)
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    return reshaped(into(row(x), index, reshaped(source, shape), dim=dim), x.shape)


def index_copy_vjp(g, y, x, index, src, *, dim):
    """x is not seen where src is."""
    return index_copy(g, index, zeros(src.shape, g), dim=dim), None, cast_like(index_select(g, index, dim=dim), src)


def index_copy_over(x, index, src, *, dim):
    x.index_copy_(dim, index, src)


@op(
    index_add_dims,
    vjp=index_copy_vjp,
    dtype="first",
    inplace=index_copy_over,
    examples=["a[2,6,4], i64[3]!, a[2,3,4], dim=1", "f[4], i64[3]!, f[3], dim=0"],
)
def index_copy(x, index, src, *, dim):
    """x with the slices at index along a dim replaced by those of src"""
    return torch.index_copy(x, dim, index, src)


@captures("aten.index_copy.default")
def _index_copy(x, dim, index, source):
    return indexed(index_copy, x, dim, index, source)
