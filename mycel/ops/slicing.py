"""Parts of a tensor along one dim, and tensors joined along one: that dim stays whole, the others may be split."""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, letters, normal_dim, o
from mycel.ops.shape import expanded, reshaped


def replaced(shape, dim, *sizes):
    """A shape with other sizes, or none, in the place of one dim."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def along(names, dim, *new):
    """Letters with others, or none, in the place of one dim."""
    return " ".join([*names[:dim], *new, *names[dim + 1 :]])


def zeros(shape, like):
    """Zeros of this shape in the dtype of `like`."""
    return o.full(0, shape=tuple(shape), dtype=like.dtype)


# -- parts ------------------------------------------------------------------------------------------------------


def slice_dims(x, *, dim, start, stop, step=1):
    """The sliced dim is whole."""
    if not 0 <= start <= stop <= x.shape[dim] or step < 1:
        raise ValueError(f"slice {start}:{stop}:{step} of dim {dim} of {list(x.shape)}")
    names = letters(x.ndim, "nm")
    return f"{along(names, dim, 'n^')} -> {along(names, dim, 'm')}", {"m": -(-(stop - start) // step)}


def slice_in_c(at, x, *, dim, start, stop, step=1):
    return at(0, replaced(at.index, dim, f"({start} + {step} * {at.index[dim]})"))


def slice_vjp(g, y, x, *, dim, start, stop, step=1):
    """The part's cotangent in its place, zeros around it."""
    if step != 1:
        return (o.slice_update(zeros(x.shape, g), g, dim=dim, start=start, stop=stop, step=step),)
    widths = [(start, x.shape[d] - stop) if d == dim else (0, 0) for d in range(x.ndim)]
    return (o.pad(g, widths=tuple(widths)),)


@op(
    slice_dims,
    vjp=slice_vjp,
    write=lambda x, new, **params: o.slice_update(x, new[0], **params),
    linear=((0,),),
    examples=[
        "a[2,6,4], dim=1, start=1, stop=4", "f[6,2], dim=0, start=1, stop=6, step=2", "f[4], dim=0, start=2, stop=2",
        "f[2,6], dim=1, start=0, stop=6",
    ],
    moves=True,
    c=slice_in_c,
)  # fmt: skip
def slice(x, *, dim, start, stop, step=1):
    """x[start:stop:step] along a dim"""
    return x.narrow(dim, start, stop - start) if step == 1 else torch.ops.aten.slice.Tensor(x, dim, start, stop, step)


def normal_slice(n, start, stop, step):
    """A Python slice's bounds -> 0 <= start <= stop <= n."""
    if step < 1:
        raise ValueError(f"slice step must be positive, not {step}")
    start, stop = (min(max(v + n if v < 0 else v, 0), n) for v in (start or 0, n if stop is None else stop))
    return start, max(start, stop)


@captures(torch.narrow, torch.Tensor.narrow)
def _narrow(input, dim, start, length):
    """By a start that is known torch slices; by a tensor it is a choice of indices."""
    if not hasattr(start, "dtype"):
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    first = reshaped(o.cast(start, dtype=torch.int64), ())
    first = o.where(o.lt(first, 0), o.add(first, input.shape[dim]), first)
    return o.index_select(input, o.add(o.iota(shape=(length,), dim=0, dtype=torch.int64), first), dim=dim)


def sliced(x, dim, start, stop, step=1):
    """x[start:stop:step] along a dim; x itself if that is all of it."""
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    return slice(x, dim=dim, start=start, stop=stop, step=step)


@captures("aten.slice.Tensor")
def _slice(x, dim=0, start=None, end=None, step=1):
    dim = normal_dim(dim, x.ndim)
    return sliced(x, dim, *normal_slice(x.shape[dim], start, end, step), step)


def slice_update_dims(x, new, *, dim, start, stop, step=1):
    """The sliced dim is whole."""
    names = letters(x.ndim, "nm")
    return f"{along(names, dim, 'n^')}, {along(names, dim, 'm^')} -> {along(names, dim, 'n')}"


def slice_update_vjp(g, y, x, new, *, dim, start, stop, step=1):
    """x is not seen where new is."""
    bounds = {"dim": dim, "start": start, "stop": stop, "step": step}
    return o.slice_update(g, zeros(new.shape, g), **bounds), cast_like(slice(g, **bounds), new)


@op(
    slice_update_dims,
    vjp=slice_update_vjp,
    dtype="first",
    linear=((0, 1),),
    examples=[
        "a[2,6,4], a[2,3,4], dim=1, start=1, stop=4", "f[6,2], f[3,2], dim=0, start=1, stop=6, step=2",
        "f32[4], f64[2], dim=0, start=2, stop=4",
    ],
)  # fmt: skip
def slice_update(x, new, *, dim, start, stop, step=1):
    """x with x[start:stop:step] along a dim replaced"""
    if x.is_complex():  # torch's autograd has no rule for these
        x, new = torch.view_as_real(x.resolve_conj()), torch.view_as_real(new.to(x.dtype).resolve_conj())
        return torch.view_as_complex(torch.slice_scatter(x, new, dim, start, stop, step))
    return torch.slice_scatter(x, new, dim, start, stop, step)


@captures("aten.slice_scatter.default")
def _slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    dim = normal_dim(dim, x.ndim)
    start, stop = normal_slice(x.shape[dim], start, end, step)
    if (start, stop, step) == (0, x.shape[dim], 1):
        return expanded(cast_like(src, x), x.shape)
    src = expanded(src, replaced(x.shape, dim, -(-(stop - start) // step)))
    return slice_update(x, cast_like(src, x), dim=dim, start=start, stop=stop, step=step)


def select_dims(x, *, dim, index):
    """The selected dim is whole."""
    if not 0 <= index < x.shape[dim]:
        raise ValueError(f"index {index} is out of range for dim {dim} of {list(x.shape)}")
    names = letters(x.ndim, "n")
    return f"{along(names, dim, 'n^')} -> {along(names, dim)}"


def select_vjp(g, y, x, *, dim, index):
    """The part's cotangent in its place, zeros around it."""
    widths = [(index, x.shape[d] - index - 1) if d == dim else (0, 0) for d in range(x.ndim)]
    return (o.pad(reshaped(g, replaced(x.shape, dim, 1)), widths=tuple(widths)),)


@op(
    select_dims,
    vjp=select_vjp,
    write=lambda x, new, **params: o.select_update(x, new[0], **params),
    linear=((0,),),
    examples=["a[2,3,4], dim=1, index=2", "f[4], dim=0, index=0"],
    moves=True,
    c=lambda at, x, *, dim, index: at(0, replaced(at.index, dim, str(index), *at.index[dim : dim + 1])),
)
def select(x, *, dim, index):
    """x[index] along a dim"""
    return x.select(dim, index)


@captures("aten.select.int")
def _select(x, dim, index):
    dim = normal_dim(dim, x.ndim)
    return select(x, dim=dim, index=normal_index(index, x.shape[dim]))


def normal_index(index, n):
    """An index counted from the front."""
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of range for a dim of {n}")
    return index % n


def select_update_dims(x, new, *, dim, index):
    """The selected dim is whole."""
    names = letters(x.ndim, "n")
    return f"{along(names, dim, 'n^')}, {along(names, dim)} -> {along(names, dim, 'n')}"


def select_update_vjp(g, y, x, new, *, dim, index):
    """x is not seen where new is."""
    return (
        o.select_update(g, zeros(new.shape, g), dim=dim, index=index),
        cast_like(select(g, dim=dim, index=index), new),
    )


@op(
    select_update_dims,
    vjp=select_update_vjp,
    dtype="first",
    linear=((0, 1),),
    examples=["a[2,3,4], a[2,4], dim=1, index=2", "f[4], f[], dim=0, index=0", "f32[4,2], f64[4], dim=1, index=1"],
)
def select_update(x, new, *, dim, index):
    """x with x[index] along a dim replaced"""
    if x.is_complex():
        x, new = torch.view_as_real(x.resolve_conj()), torch.view_as_real(new.to(x.dtype).resolve_conj())
        return torch.view_as_complex(torch.select_scatter(x, new, dim, index))
    return torch.select_scatter(x, new, dim, index)


@captures("aten.select_scatter.default")
def _select_scatter(x, src, dim, index):
    dim = normal_dim(dim, x.ndim)
    src = cast_like(expanded(src, replaced(x.shape, dim)), x)
    return select_update(x, src, dim=dim, index=normal_index(index, x.shape[dim]))


# -- pieces and joins -------------------------------------------------------------------------------------------


def as_tuple(xs):
    """An operator with one output returns it bare; here it is a tuple of one."""
    return xs if isinstance(xs, tuple) else (xs,)


def split_dims(x, *, sizes, dim):
    """The split dim is whole."""
    if sum(sizes) != x.shape[dim] or any(n < 0 for n in sizes):
        raise ValueError(f"sizes {list(sizes)} do not add up to dim {dim} of {list(x.shape)}")
    names = letters(x.ndim, "n")
    parts = {f"n{i}": size for i, size in enumerate(sizes)}
    return f"{along(names, dim, 'n^')} -> {', '.join(along(names, dim, part) for part in parts)}", parts


def split_vjp(g, y, x, *, sizes, dim):
    """Joined again; a part without a cotangent gives zeros."""
    gs = g if isinstance(g, tuple) else (g,)
    like = next(part for part in gs if part is not None)
    whole = [
        zeros(replaced(x.shape, dim, n), like) if part is None else part for part, n in zip(gs, sizes, strict=True)
    ]
    return (o.cat(*whole, dim=dim),)


@op(
    split_dims,
    vjp=split_vjp,
    write=lambda x, new, *, sizes, dim: o.cat(*new, dim=dim),
    linear=((0,),),
    examples=["a[2,6,4], sizes=(1,2,3), dim=1", "f[4,2], sizes=(4,), dim=0", "f[5], sizes=(3,0,2), dim=0"],
    moves=True,
)
def split(x, *, sizes, dim):
    """Consecutive parts of these sizes."""
    return torch.split(x, sizes, dim) if len(sizes) != 1 else x


@captures("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(x, sizes, dim=0):
    return [x] if len(sizes) == 1 else list(split(x, sizes=tuple(sizes), dim=normal_dim(dim, x.ndim)))


@captures("aten.split.Tensor", "aten.unsafe_split.Tensor", "aten.split_copy.Tensor")
def _split(x, size, dim=0):
    n = x.shape[dim]
    return _split_with_sizes(x, [min(size, n - at) for at in range(0, n, size)] if n else [0], dim)


def unbind_dims(x, *, dim):
    """The dim taken apart is whole."""
    names = letters(x.ndim, "n")
    return f"{along(names, dim, 'n^')} -> {', '.join([along(names, dim)] * x.shape[dim])}"


def unbind_vjp(g, y, x, *, dim):
    """Stacked again; a slice without a cotangent gives zeros."""
    gs = g if isinstance(g, tuple) else (g,)
    like = next(part for part in gs if part is not None)
    return (o.stack(*(zeros(like.shape, like) if part is None else part for part in gs), dim=dim),)


@op(
    unbind_dims,
    vjp=unbind_vjp,
    write=lambda x, new, *, dim: o.stack(*new, dim=dim),
    linear=((0,),),
    examples=["a[2,3,4], dim=1", "f[2], dim=0", "f[1,2], dim=0"],
    moves=True,
)
def unbind(x, *, dim):
    """All slices along a dim, which goes away."""
    return torch.unbind(x, dim) if x.shape[dim] != 1 else x.squeeze(dim)


@captures("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(x, dim=0):
    dim = normal_dim(dim, x.ndim)
    return list(as_tuple(unbind(x, dim=dim))) if x.shape[dim] else []


def cat_dims(*xs, dim):
    """The joined dim is whole."""
    names = letters(xs[0].ndim, "n")
    left = ", ".join(along(names, dim, f"n{i}^") for i in range(len(xs)))
    return f"{left} -> {along(names, dim, 'n')}", {"n": sum(x.shape[dim] for x in xs)}


def cat_in_c(at, *xs, dim):
    """The first that reaches that far."""
    text, end = "", 0
    for k, x in enumerate(xs):
        element = at(k, replaced(at.index, dim, f"({at.index[dim]} - {end})"))
        end += x.shape[dim]
        text += element if k == len(xs) - 1 else f"{at.index[dim]} < {end} ? {element} : "
    return text


def cat_vjp(g, y, *xs, dim):
    """Taken apart again."""
    parts = as_tuple(split(g, sizes=tuple(x.shape[dim] for x in xs), dim=dim))
    return tuple(cast_like(part, x) for part, x in zip(parts, xs, strict=True))


@op(
    cat_dims,
    vjp=cat_vjp,
    linear="all",
    examples=[
        "a[2,3,4], a[2,1,4], a[2,2,4], dim=1", "f[4,2], dim=0", "f32[2], f64[3], i64[1], dim=0",
        "f[3,0], f[3,2], dim=1",
    ],
    c=cat_in_c,
)  # fmt: skip
def cat(*xs, dim):
    """Tensors one after the other along a dim."""
    return torch.cat(xs, dim)


@captures("aten.cat.default")
def _cat(xs, dim=0):
    kept = [x for x in xs if tuple(x.shape) != (0,)]  # torch lets an empty 1-D tensor join anything
    if not kept:
        return xs[0]
    return kept[0] if len(kept) == 1 == len(xs) else cat(*kept, dim=normal_dim(dim, kept[0].ndim))


def stack_dims(*xs, dim):
    """The new dim is whole."""
    names = letters(xs[0].ndim, "n")
    left, right = " ".join(names) or "...", " ".join([*names[:dim], "n^", *names[dim:]])
    return f"{', '.join([left] * len(xs))} -> {right}", {"n": len(xs)}


def stack_vjp(g, y, *xs, dim):
    """Taken apart again."""
    return tuple(cast_like(part, x) for part, x in zip(as_tuple(unbind(g, dim=dim)), xs, strict=True))


@op(
    stack_dims,
    vjp=stack_vjp,
    linear="all",
    examples=["a[2,3], a[2,3], a[2,3], dim=1", "f[2,3], f[2,3], dim=2", "f[], f[], dim=0", "f32[2], f64[2], dim=0"],
)
def stack(*xs, dim):
    """Tensors side by side along a new dim."""
    return torch.stack(xs, dim)


@captures("aten.stack.default", "aten._stack.default")
def _stack(xs, dim=0):
    return stack(*xs, dim=normal_dim(dim, xs[0].ndim + 1))
