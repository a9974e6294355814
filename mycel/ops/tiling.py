"""Tensors grown at their edges, turned round, or repeated: a dim that changes stays whole, the others may be split."""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import letters, normal_dim, o
from mycel.ops.shape import expanded, flattened, permuted, reshaped, swap


def pad_dims(x, *, widths, **_):
    """A padded dim is whole."""
    grown = [n + lo + hi for n, (lo, hi) in zip(x.shape, widths, strict=True)]
    if any(n < 0 for n in grown):
        raise ValueError(f"padding {widths} leaves nothing of {list(x.shape)}")
    names = letters(x.ndim)
    touched = [(lo, hi) != (0, 0) for lo, hi in widths]
    left = " ".join(n + "^" if t else n for n, t in zip(names, touched, strict=True))
    right = " ".join(n + "_out" if t else n for n, t in zip(names, touched, strict=True))
    sizes = {f"{n}_out": size for n, size, t in zip(names, grown, touched, strict=True) if t}
    return f"{left or '...'} -> {right}", sizes


@op(
    pad_dims,
    vjp=lambda g, y, x, *, widths, value=0.0: (o.pad(g, widths=tuple((-lo, -hi) for lo, hi in widths)),),
    examples=[
        "n[2,3,4], widths=((0,0),(1,2),(0,0))", "f[4], widths=((-1,2),), value=1.5", "f[4,3], widths=((-1,-2),(3,0))",
        "bool[2,3], widths=((0,0),(1,0)), value=True", "i64[3], widths=((1,1),), value=7",
    ],
)  # fmt: skip
def pad(x, *, widths, value=0.0):
    """(lo, hi) more elements of one value at the ends of each dim; fewer, where negative"""
    last_first = [n for width in reversed(widths) for n in width]
    return torch.constant_pad_nd(x, last_first, value)


def pad_widths(ndim, flat):
    """torch's padding, last dim first -> (lo, hi) for each dim."""
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return ((0, 0),) * (ndim - len(pairs)) + tuple(reversed(pairs))


@captures("aten.constant_pad_nd.default")
def _constant_pad_nd(x, padding, value=0):
    return pad(x, widths=pad_widths(x.ndim, padding), value=value) if any(padding) else x


def pad_edge_expand(x, *, widths, mode):
    """Dim by dim: what is added, cut out of x and turned round, is joined to it."""
    for dim, (lo, hi) in enumerate(widths):
        if not lo and not hi:
            continue
        n = x.shape[dim]

        def part(start, stop, x=x, dim=dim):
            return o.slice(x, dim=dim, start=start, stop=stop)

        def grown(edge, times, x=x, dim=dim):
            return o.expand(edge, shape=(*x.shape[:dim], times, *x.shape[dim + 1 :]))

        if mode == "reflect":
            before, after = (o.flip(p, dims=(dim,)) for p in (part(1, 1 + lo), part(n - 1 - hi, n - 1)))
        elif mode == "circular":
            before, after = part(n - lo, n), part(0, hi)
        else:
            before, after = grown(part(0, 1), lo), grown(part(n - 1, n), hi)
        parts = [p for p, width in ((before, lo), (x, 1), (after, hi)) if width]
        x = o.cat(*parts, dim=dim)
    return x


@op(
    pad_dims,
    expand=pad_edge_expand,
    linear=((0,),),
    examples=[
        'f[2,3,4], widths=((0,0),(0,0),(1,2)), mode="reflect"', 'f[2,3,4], widths=((0,0),(2,0),(1,2)), mode="reflect"',
        'f[2,3,4], widths=((0,0),(2,1),(5,0)), mode="replicate"', 'f[2,4], widths=((0,0),(1,1)), mode="replicate"',
        'f[2,3,4], widths=((0,0),(3,1),(4,0)), mode="circular"',
        'f[2,2,3,4], widths=((0,0),(1,1),(2,1),(2,3)), mode="reflect"',
        'f[0,3,3], widths=((0,0),(0,0),(1,2)), mode="replicate"',
    ],
)  # fmt: skip
def pad_edge(x, *, widths, mode):
    """(lo, hi) more elements at the ends of each dim, taken from x: mode is reflect, replicate or circular"""
    if x.numel() == 0:
        return x.new_empty([n + lo + hi for n, (lo, hi) in zip(x.shape, widths, strict=True)])
    first = next(d for d in range(x.ndim) if widths[d] != (0, 0))
    flat = x.reshape(1, -1, *x.shape[first:])
    grown = torch.nn.functional.pad(flat, [n for width in reversed(widths[first:]) for n in width], mode=mode)
    return grown.reshape(*x.shape[:first], *grown.shape[2:])


def padded_edge(x, padding, mode):
    """pad_edge for torch's padding; x itself if there is none; no rule for cutting off."""
    if not any(padding):
        return x
    return pad_edge(x, widths=pad_widths(x.ndim, padding), mode=mode) if min(padding) >= 0 else NotImplemented


@captures("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def _reflection_pad(x, padding):
    return padded_edge(x, padding, "reflect")


@captures("aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default")
def _replication_pad(x, padding):
    return padded_edge(x, padding, "replicate")


@captures(torch.nn.functional.pad)
def _pad(input, pad, mode="constant", value=None):
    return padded_edge(input, pad, mode) if mode == "circular" else NotImplemented


def whole_dims(x, dims):
    """These dims are whole, the others free; the shape stays."""
    names = letters(x.ndim)
    return f"{' '.join(n + '^' if i in dims else n for i, n in enumerate(names)) or '...'} -> {' '.join(names)}"


@op(
    lambda x, *, dims: whole_dims(x, dims),
    vjp=lambda g, y, x, *, dims: (o.flip(g, dims=dims),),
    linear=((0,),),
    examples=["a[2,3,4], dims=(0,2)", "f[3], dims=(0,)"],
    moves=True,
)
def flip(x, *, dims):
    """The elements in reverse order along these dims."""
    return torch.flip(x, dims)


@captures("aten.flip.default")
def _flip(x, dims):
    dims = tuple(sorted(normal_dim(d, x.ndim) for d in dims))
    return flip(x, dims=dims) if dims and x.ndim else x


@op(
    lambda x, *, shifts, dims: whole_dims(x, dims),
    vjp=lambda g, y, x, *, shifts, dims: (o.roll(g, shifts=tuple(-s for s in shifts), dims=dims),),
    linear=((0,),),
    examples=["a[2,3,4], shifts=(1,-2), dims=(0,2)", "f[3], shifts=(5,), dims=(0,)", "f[6], shifts=(1,2), dims=(0,0)"],
    moves=True,
)
def roll(x, *, shifts, dims):
    """The elements moved along these dims, around the ends."""
    return torch.roll(x, shifts, dims)


@captures("aten.rot90.default")
def _rot90(x, k=1, dims=(0, 1)):
    a, b = (normal_dim(d, x.ndim) for d in dims)
    turned = flip(x, dims={1: (b,), 2: tuple(sorted((a, b))), 3: (a,)}[k % 4]) if k % 4 else x
    return permuted(turned, swap(x.ndim, a, b)) if k % 2 else turned


@captures("aten.linalg_cross.default")
def _cross(x, y, *, dim=-1):
    """x0 y1 - x1 y0 and so on round"""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    dim = normal_dim(dim, len(shape))
    x, y = (expanded(v, shape) for v in (x, y))
    x1, x2, y1, y2 = (roll(v, shifts=(-n,), dims=(dim,)) for v in (x, y) for n in (1, 2))
    return o.sub(o.mul(x1, y2), o.mul(x2, y1))


@captures("aten.roll.default")
def _roll(x, shifts, dims=()):
    shifts, dims = ((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims))
    if not dims:
        return reshaped(roll(flattened(x), shifts=shifts, dims=(0,)), x.shape)
    return roll(x, shifts=shifts, dims=tuple(normal_dim(d, x.ndim) for d in dims))


def repeat_dims(x, *, times):
    """A repeated dim is (times n): whole; the others may be split."""
    lead = len(times) - x.ndim
    names = letters(x.ndim)
    copies = {f"t{i}": t for i, t in enumerate(times) if i < lead or t != 1}
    right = [
        f"t{i}^" if i < lead else f"(t{i}^ {names[i - lead]})" if f"t{i}" in copies else names[i - lead]
        for i in range(len(times))
    ]
    return f"{' '.join(names) or '...'} -> {' '.join(right)}", copies


def repeat_vjp(g, y, x, *, times):
    """The sum over the copies."""
    lead = len(times) - x.ndim
    sizes = (1,) * lead + tuple(x.shape)
    apart = reshaped(g, tuple(n for pair in zip(times, sizes, strict=True) for n in pair))
    copies = tuple(range(0, 2 * len(times), 2))
    return (reshaped(o.sum(apart, dims=copies) if copies else g, tuple(x.shape)),)


@op(
    repeat_dims,
    vjp=repeat_vjp,
    linear=((0,),),
    examples=["a[2,3], times=(1,2)", "f[2,3], times=(4,2,1)", "f[], times=(2,)", "f[2], times=(0,)"],
    moves=True,
)
def repeat(x, *, times):
    """Copies of the whole tensor along each dim, and along new leading dims."""
    return x.repeat(times)


@captures("aten.repeat.default")
def _repeat(x, repeats):
    return x if len(repeats) == x.ndim and all(n == 1 for n in repeats) else repeat(x, times=tuple(repeats))


def repeat_each_dims(x, *, times, dim):
    """The dim becomes (n times)."""
    names = letters(x.ndim, "t")
    right = [f"({n} t)" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(names)} -> {' '.join(right)}", {"t": times}


def repeat_each_vjp(g, y, x, *, times, dim):
    """The sum over the copies."""
    return (o.sum(reshaped(g, (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])), dims=(dim + 1,)),)


@op(
    repeat_each_dims,
    vjp=repeat_each_vjp,
    linear=((0,),),
    examples=["a[2,3], times=2, dim=1", "f[4,3], times=3, dim=0"],
    moves=True,
)
def repeat_each(x, *, times, dim):
    """Copies of each element, one after the other along a dim."""
    return torch.repeat_interleave(x, times, dim)


@captures("aten.repeat_interleave.self_int", torch.repeat_interleave, torch.Tensor.repeat_interleave)
def _repeat_interleave(input, repeats=None, dim=None, *, output_size=None):
    if not isinstance(repeats, int):
        return NotImplemented
    x, dim = (flattened(input), 0) if dim is None else (input, normal_dim(dim, input.ndim))
    return x if repeats == 1 else repeat_each(x, times=repeats, dim=dim)


@captures("aten.repeat_interleave.Tensor")
def _repeat_interleave_tensor(repeats, *, output_size=None):
    if output_size is None:
        return NotImplemented
    ends = o.cumsum(repeats, dim=0)
    count = o.iota(shape=(output_size,), dim=0, dtype=ends.dtype)
    return o.cast(o.searchsorted(ends, count, right=True), dtype=repeats.dtype)
