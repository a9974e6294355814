"""The same elements under another shape: reshape, permute, expand, and what torch builds from them.

A reshape keeps the flat order, so its dims are the common factors of both shapes, slowest first:

    [8,128,256] -> [1024,256]      a b c -> (a b) c
    [1024,256]  -> [8,128,8,32]    (a b) (c d) -> a b c d
    [4,6]       -> [6,4]           (a b^) d^ -> (a c) e       a = 2 is what both slowest dims share; the rest is whole
"""

from __future__ import annotations

import functools
import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, letters, normal_dim, o, unbroadcast


def common_factors(old, new):
    """Two shapes of the same elements -> letters of each old dim, letters of each new dim, sizes, the whole letters."""
    before, after = [[] for _ in old], [[] for _ in new]
    sizes, whole, names = {}, set(), iter(letters(52))

    def factor(n, *dims):
        name = next(names)
        sizes[name] = n
        for dim in dims:
            dim.append(name)
        if len(dims) == 1:
            whole.add(name)

    left = [(dim, n) for dim, n in zip(before, old, strict=True) if n != 1][::-1]
    right = [(dim, n) for dim, n in zip(after, new, strict=True) if n != 1][::-1]
    while left:
        (a, p), (b, q) = left.pop(), right.pop()
        shared = math.gcd(p, q)
        if shared > 1:
            factor(shared, a, b)
            left += [(a, p // shared)] * (p > shared)
            right += [(b, q // shared)] * (q > shared)
            continue
        factor(p, a)
        factor(q, b)
        while p != q:  # whole up to where the flat orders meet again
            dim, n = (left if p < q else right).pop()
            factor(n, dim)
            p, q = (p * n, q) if p < q else (p, q * n)
    return before, after, sizes, whole


@functools.lru_cache(4096)
def reshape_dims(x, *, shape):
    """The common factors of both shapes; an empty tensor is whole."""
    if math.prod(shape) != x.numel or any(n < 0 for n in shape):
        raise ValueError(f"cannot reshape {list(x.shape)} to {list(shape)}")
    if x.numel:
        before, after, sizes, whole = common_factors(x.shape, shape)
    else:
        names = letters(x.ndim + len(shape))
        sizes, whole = dict(zip(names, (*x.shape, *shape), strict=True)), set(names)
        before, after = [[n] for n in names[: x.ndim]], [[n] for n in names[x.ndim :]]

    def side(dims):
        flagged = [[n + "^" if n in whole else n for n in dim] for dim in dims]
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] if dim else "1" for dim in flagged)

    return f"{side(before) or '...'} -> {side(after)}", sizes


@op(
    reshape_dims,
    vjp=lambda g, y, x, *, shape: (o.reshape(g, shape=tuple(x.shape)),),
    write=lambda x, new, *, shape: o.reshape(new[0], shape=tuple(x.shape)),
    linear=((0,),),
    examples=[
        "a[4,3,2], shape=(12,2)", "f[12,6], shape=(2,6,2,3)", "f[4,6], shape=(6,4)", "f[2,3], shape=(6,)",
        "f[1,4,1,3], shape=(4,3,1)", "f[1], shape=()", "f[], shape=(1,1)", "f[0,3], shape=(3,0,2)",
        "f[2,12,5], shape=(2,4,5,3)", "f[12,3], shape=(4,9)", "f[4,6,5], shape=(6,4,5)",
    ],
    moves=True,
    c=lambda at, x, *, shape: at.flat(0),
)  # fmt: skip
def reshape(x, *, shape):
    """The same elements in the same order under another shape."""
    return x.reshape(shape)


def reshaped(x, shape):
    """x under this shape; x itself if it has it."""
    return x if tuple(shape) == tuple(x.shape) else reshape(x, shape=tuple(shape))


def flattened(x):
    """x as one dim."""
    return reshaped(x, (math.prod(x.shape),))


@captures(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default",
    "aten.view_copy.default",
)  # fmt: skip
def _reshape(x, shape, stride=None):
    known = math.prod(n for n in shape if n != -1)
    return reshaped(x, [math.prod(x.shape) // max(known, 1) if n == -1 else n for n in shape])


@captures("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def _unsqueeze(x, dim):
    at = normal_dim(dim, x.ndim + 1)
    return reshaped(x, (*x.shape[:at], 1, *x.shape[at:]))


@captures(
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.squeeze_copy.default", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims",
)  # fmt: skip
def _squeeze(x, dims=None):
    dims = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    drop = {normal_dim(d, x.ndim) for d in dims}
    return reshaped(x, [n for i, n in enumerate(x.shape) if n != 1 or i not in drop])


def strided_places(shape, stride, offset):
    """Where in memory each element lies."""
    place = o.full(offset, shape=shape, dtype=torch.int64)
    for d, s in enumerate(stride):
        if s:
            place = o.add(place, o.iota(shape=shape, dim=d, dtype=torch.int64, step=s))
    return place


def strided_write(x, new, *, shape, stride, offset=0):
    """Elements back to their places, of which each is there once."""
    steps = sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1)
    reach = 0
    for s, n in steps:  # each dim must step over all that the finer ones reach
        if s <= reach:
            raise ValueError(f"in-place update of as_strided({shape}, {stride}): its elements may share memory")
        reach += s * (n - 1)
    places = strided_places(shape, stride, offset)
    return o.reshape(o.index_put(flattened(x), new[0], places, at=(0,)), shape=tuple(x.shape))


def strided_dims(x, *, shape, stride, offset=0):
    left = " ".join(f"a{i}^" for i in range(x.ndim)) or "..."
    names = [f"b{i}" for i in range(len(shape))]
    return f"{left} -> {' '.join(f'{n}^' for n in names)}", dict(zip(names, shape, strict=True))


@op(
    strided_dims,
    dtype="first",
    expand=lambda x, *, shape, stride, offset=0: o.index(flattened(x), strided_places(shape, stride, offset), at=(0,)),
    write=strided_write,
    linear=((0,),),
    examples=["a[3,4], shape=(2,2), stride=(4,2), offset=1", "f[6], shape=(3,2), stride=(1,3)"],
)
def strided(x, *, shape, stride, offset=0):
    """A view of contiguous memory by strides."""
    return x.reshape(-1)[offset:].as_strided(shape, stride)


@captures("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(x, size, stride, storage_offset=None):
    """Of a contiguous x that is no view: capture asks for it."""
    contiguous = [math.prod(size[i + 1 :]) for i in range(len(size))]
    same = math.prod(size) == math.prod(x.shape) and not storage_offset
    if same and all(n == 1 or s == c for n, s, c in zip(size, stride, contiguous, strict=True)):
        return reshaped(x, size)
    return strided(x, shape=tuple(size), stride=tuple(stride), offset=storage_offset or 0)


def permute_dims(x, *, dims):
    """The same letters in another order."""
    names = letters(x.ndim)
    return f"{' '.join(names) or '...'} -> {' '.join(names[d] for d in dims)}"


def permute_back(g, dims):
    """Undo permute."""
    return permute(g, dims=tuple(sorted(range(len(dims)), key=dims.__getitem__)))


@op(
    permute_dims,
    vjp=lambda g, y, x, *, dims: (permute_back(g, dims),),
    write=lambda x, new, *, dims: permute_back(new[0], dims),
    linear=((0,),),
    examples=["a[2,3,4], dims=(2,0,1)", "f[2,3], dims=(0,1)", "f[], dims=()"],
    moves=True,
    c=lambda at, x, *, dims: at(0, [at.index[dims.index(d)] for d in range(x.ndim)]),
)
def permute(x, *, dims):
    """The dims in another order."""
    return x.permute(dims)


def permuted(x, dims):
    """x with its dims in this order; x itself if they are."""
    return x if tuple(dims) == tuple(range(x.ndim)) else permute(x, dims=tuple(dims))


def swap(ndim, a, b):
    """The order of dims that exchanges two."""
    return [b if d == a else a if d == b else d for d in range(ndim)]


@captures("aten.permute.default", "aten.permute_copy.default")
def _permute(x, dims):
    return permuted(x, [normal_dim(d, x.ndim) for d in dims])


@captures("aten.transpose.int", "aten.transpose_copy.int")
def _transpose(x, dim0, dim1):
    return permuted(x, swap(x.ndim, normal_dim(dim0, x.ndim), normal_dim(dim1, x.ndim)))


@captures("aten.t.default", "aten.t_copy.default", "aten.numpy_T.default")
def _t(x):
    return permuted(x, [*reversed(range(x.ndim))])


def expand_dims(x, *, shape):
    """New dims and dims grown from one are letters of the result alone."""
    names, lead = letters(len(shape)), len(shape) - x.ndim
    old = x.shape
    if lead < 0 or any(n not in (1, shape[i + lead]) for i, n in enumerate(old)):
        raise ValueError(f"cannot expand {list(old)} to {list(shape)}")
    left = " ".join("1" if n == 1 != shape[i + lead] else names[i + lead] for i, n in enumerate(old))
    return f"{left or '...'} -> {' '.join(names)}", dict(zip(names, shape, strict=True))


def refuse_expand_write(x, new, *, shape):
    """Several elements of the view are one of x."""
    raise ValueError(f"in-place update of {list(x.shape)} expanded to {list(shape)}: its elements share memory")


@op(
    expand_dims,
    vjp=lambda g, y, x, *, shape: (unbroadcast(g, x),),
    write=refuse_expand_write,
    linear=((0,),),
    examples=["a[2,1,3], shape=(2,4,3)", "f[3,1], shape=(2,3,1)", "f[], shape=(2,4)", "f[1,2], shape=(0,2)"],
    moves=True,
    c="{0}",
)
def expand(x, *, shape):
    """Repeat dims of size one, and lead with new ones, to this shape."""
    return x.expand(shape)


def expanded(x, shape):
    """x broadcast to this shape; x itself if it has it."""
    return x if tuple(shape) == tuple(x.shape) else expand(x, shape=tuple(shape))


@captures("aten.expand.default", "aten.expand_copy.default")
def _expand(x, size, implicit=False):
    lead = len(size) - x.ndim
    return expanded(x, [x.shape[i - lead] if n == -1 else n for i, n in enumerate(size)])


@captures("aten.broadcast_tensors.default")
def _broadcast_tensors(xs):
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return [expanded(x, shape) for x in xs]


@captures("aten.copy.default")
def _copy(x, src, non_blocking=False):
    return expanded(cast_like(src, x), x.shape)


def unshuffled(x, old, order, new):
    """reshape, permute, reshape."""
    return reshaped(permuted(reshaped(x, old), order), new)


@captures("aten.pixel_shuffle.default")
def _pixel_shuffle(x, factor):
    *lead, c, h, w = x.shape
    n, r = len(lead), factor
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return unshuffled(x, (*lead, c // r**2, r, r, h, w), order, (*lead, c // r**2, h * r, w * r))


@captures("aten.pixel_unshuffle.default")
def _pixel_unshuffle(x, factor):
    *lead, c, h, w = x.shape
    n, r = len(lead), factor
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return unshuffled(x, (*lead, c, h // r, r, w // r, r), order, (*lead, c * r**2, h // r, w // r))


@captures("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _channel_shuffle(x, groups):
    b, c, *rest = x.shape
    apart = (b, groups, c // groups, *rest)
    return unshuffled(x, apart, [0, 2, 1, *range(3, len(apart))], x.shape)
