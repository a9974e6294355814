"""Pooling of [n, c, ...] in two or three spatial dims (torch pools one dim as two, the first of size one).

Average pooling is linear: its gradient is an operator whose gradient is the pooling again.  Maximum pooling picks
elements, by their index in the flattened spatial dims: its gradient puts them back (`put_back`), whose gradient picks
again (gather).
"""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import o


def pool_dims(x, out, outputs=1):
    """Batch and channels pass, spatial dims are made anew."""
    k = len(out)
    item = "n c " + " ".join(f"y{i}" for i in range(k))
    ins = "n c " + " ".join(f"s{i}^" for i in range(k))
    return f"{ins} -> {', '.join([item] * outputs)}", {f"y{i}": n for i, n in enumerate(out)}


def pool_sizes(x, kernel, stride, padding, dilation, ceil):
    """Spatial sizes of a pooled x; with `ceil` a last window may hang over, if it starts inside."""
    sizes = []
    for n, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        count = (room + (s - 1 if ceil else 0)) // s + 1
        sizes.append(count - 1 if ceil and (count - 1) * s >= n + p else count)
    return sizes


def batched(x, k, pool):
    """pool(x) with a batch dim lent to an x without one."""
    if x.ndim == k + 2:
        return pool(x)
    ys = pool(o.reshape(x, shape=(1, *x.shape)))
    outs = tuple(o.reshape(y, shape=tuple(y.shape[1:])) for y in (ys if isinstance(ys, tuple) else (ys,)))
    return outs if isinstance(ys, tuple) else outs[0]


def each(v, k):
    """One number for all k dims, or k numbers, as k numbers."""
    v = (v,) if isinstance(v, int) else tuple(v)
    return v * k if len(v) == 1 else v


def window_of(k, kernel_size, stride, padding):
    """torch's window arguments in k dims; without a stride windows lie side by side."""
    kernel = each(kernel_size, k)
    return {"kernel": kernel, "stride": each(stride, k) or kernel, "padding": each(padding, k)}


def max_pool_vjp(g, y, x, **_):
    return (None if g[0] is None else o.put_back(g[0], y[1], shape=tuple(x.shape)),)


@op(
    lambda x, *, kernel, stride, padding, dilation, ceil=False: pool_dims(
        x, pool_sizes(x, kernel, stride, padding, dilation, ceil), 2
    ),
    dtype=("first", torch.int64),
    vjp=max_pool_vjp,
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "s"),
    examples=[
        "f[2,4,4,6]!, kernel=(2,3), stride=(2,3), padding=(0,0), dilation=(1,1)",
        "f[2,3,5,5]!, kernel=(3,2), stride=(2,1), padding=(1,1), dilation=(1,2), ceil=True",
        "f[2,2,4,3,3]!, kernel=(2,2,2), stride=(1,1,1), padding=(0,1,0), dilation=(1,1,1)",
    ],
    apart=True,
)
def max_pool(x, *, kernel, stride, padding, dilation, ceil=False):
    """The maximum in each window, and its index in x's flattened spatial dims."""
    return (torch._C._nn.max_pool2d_with_indices if len(kernel) == 2 else torch._C._nn.max_pool3d_with_indices)(
        x, kernel, stride, padding, dilation, ceil
    )


def max_pool_rule(k):
    def rule(x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
        window = window_of(k, kernel_size, stride, padding) | {"dilation": each(dilation, k)}
        return batched(x, k, lambda v: max_pool(v, ceil=ceil_mode, **window))

    return rule


captures("aten.max_pool2d_with_indices.default")(max_pool_rule(2))
captures("aten.max_pool3d_with_indices.default")(max_pool_rule(3))


def flat(x):
    """[n, c, ...] -> [n, c, all the rest]"""
    return o.reshape(x, shape=(x.shape[0], x.shape[1], math.prod(x.shape[2:])))


def put_back_vjp(g, y, x, indices, *, shape):
    return o.reshape(o.gather(flat(g), flat(indices), dim=2), shape=tuple(x.shape)), None


def put_back_dims(x, indices, *, shape):
    item = "n c " + " ".join(f"y{i}^" for i in range(x.ndim - 2))
    out = [f"s{i}" for i in range(len(shape) - 2)]
    return f"{item}, {item} -> n c {' '.join(out)}", dict(zip(out, shape[2:], strict=True))


@op(
    put_back_dims,
    dtype="first",
    vjp=put_back_vjp,
    linear=((0,),),
    examples=["f[2,4,2,3], i64[2,4,2,3]<20, shape=(2,4,4,5)", "f[2,2,2,1,2], i64[2,2,2,1,2]<12, shape=(2,2,3,2,2)"],
)
def put_back(x, indices, *, shape):
    """Zeros of `shape` [n, c, ...] with x added at indices into the flattened spatial dims: the gradient of max_pool"""
    return (
        x.new_zeros(shape[0], shape[1], math.prod(shape[2:]))
        .scatter_add(2, indices.flatten(2), x.flatten(2))
        .reshape(shape)
    )


@captures("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def _max_unpool(x, indices, output_size, stride=None, padding=None):
    lead = x.ndim - len(output_size)
    flat_shape, n = tuple(x.shape[:lead]), math.prod(x.shape[lead:])
    zeros = o.full(0, shape=(*flat_shape, math.prod(output_size)), dtype=x.dtype)
    index, src = (o.reshape(v, shape=(*flat_shape, n)) for v in (indices, x))
    return o.reshape(o.scatter(zeros, index, src, dim=lead), shape=(*flat_shape, *output_size))


def avg_pool_vjp(g, y, x, **window):
    return (o.avg_pool_grad(g, shape=tuple(x.shape), **window),)


@op(
    lambda x, *, kernel, stride, padding, ceil=False, count_padding=True, divisor=None: pool_dims(
        x, pool_sizes(x, kernel, stride, padding, (1,) * len(kernel), ceil)
    ),
    vjp=avg_pool_vjp,
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "s"),
    linear=((0,),),
    examples=[
        "f[2,4,4,6], kernel=(2,3), stride=(2,3), padding=(0,0)",
        "f[2,3,5,5], kernel=(3,2), stride=(2,1), padding=(1,1), ceil=True, count_padding=False",
        "f[2,3,5,5], kernel=(3,3), stride=(2,2), padding=(1,1), divisor=4",
        "f[2,2,4,3,3], kernel=(2,2,2), stride=(1,1,1), padding=(0,1,0)",
    ],
)
def avg_pool(x, *, kernel, stride, padding, ceil=False, count_padding=True, divisor=None):
    """The mean of each window; padding counts as zeros unless `count_padding` is off."""
    return (torch._C._nn.avg_pool2d if len(kernel) == 2 else torch._C._nn.avg_pool3d)(
        x, kernel, stride, padding, ceil, count_padding, divisor
    )


def avg_pool_rule(k):
    def rule(x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        window = window_of(k, kernel_size, stride, padding) | {"ceil": ceil_mode, "divisor": divisor_override}
        return batched(x, k, lambda v: avg_pool(v, count_padding=count_include_pad, **window))

    return rule


captures("aten.avg_pool2d.default")(avg_pool_rule(2))
captures("aten.avg_pool3d.default")(avg_pool_rule(3))


@op(
    lambda g, *, shape, kernel, **_: pool_dims(g, shape[2:]),
    vjp=lambda g, y, x, *, shape, **window: (avg_pool(g, **window),),
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "y"),
    linear=((0,),),
    examples=[
        "f[2,4,2,2], shape=(2,4,4,6), kernel=(2,3), stride=(2,3), padding=(0,0)",
        "f[2,3,3,6], shape=(2,3,5,5), kernel=(3,2), stride=(2,1), padding=(1,1), ceil=True, count_padding=False",
        "f[2,3,3,3], shape=(2,3,5,5), kernel=(3,3), stride=(2,2), padding=(1,1), divisor=4",
        "f[2,2,3,4,2], shape=(2,2,4,3,3), kernel=(2,2,2), stride=(1,1,1), padding=(0,1,0)",
    ],
)
def avg_pool_grad(g, *, shape, kernel, stride, padding, ceil=False, count_padding=True, divisor=None):
    """Each mean's share given back to its window: the gradient of avg_pool on `shape`"""
    return getattr(torch.ops.aten, f"avg_pool{len(kernel)}d_backward")(
        g, g.new_empty(shape), kernel, stride, padding, ceil, count_padding, divisor
    )


@op(
    lambda x, *, size: pool_dims(x, size),
    vjp=lambda g, y, x, *, size: (o.adaptive_avg_pool_grad(g, shape=tuple(x.shape)),),
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "s"),
    examples=["f[2,4,4,6], size=(2,3)", "f[2,3,5,5], size=(3,4)", "f[2,2,4,3,3], size=(2,2,3)"],
)
def adaptive_avg_pool(x, *, size):
    """Means over windows that tile the spatial dims as evenly as `size` of them can."""
    return (torch._C._nn.adaptive_avg_pool2d if len(size) == 2 else torch._C._nn.adaptive_avg_pool3d)(x, size)


@captures("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def _adaptive_avg_pool(x, output_size):
    return batched(x, len(output_size), lambda v: adaptive_avg_pool(v, size=tuple(output_size)))


@op(
    lambda g, *, shape: pool_dims(g, shape[2:]),
    vjp=lambda g, y, x, *, shape: (adaptive_avg_pool(g, size=tuple(x.shape[2:])),),
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "y"),
    examples=["f[2,4,2,3], shape=(2,4,4,6)", "f[2,3,3,4], shape=(2,3,5,5)", "f[2,2,2,2,3], shape=(2,2,4,3,3)"],
)
def adaptive_avg_pool_grad(g, *, shape):
    """Each mean's share given back to its window: the gradient of adaptive_avg_pool on `shape`"""
    return getattr(torch.ops.aten, f"_adaptive_avg_pool{len(shape) - 2}d_backward")(g, g.new_empty(shape))


@op(
    lambda x, *, size: pool_dims(x, size, 2),
    dtype=("first", torch.int64),
    vjp=max_pool_vjp,
    flops=lambda d: d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "s"),
    examples=["f[2,4,4,6]!, size=(2,3)", "f[2,3,5,5]!, size=(3,4)", "f[2,2,4,3,3]!, size=(2,2,3)"],
    apart=True,
)
def adaptive_max_pool(x, *, size):
    """Maxima over windows that tile the spatial dims as evenly as `size` of them can, and their flat indices."""
    return (torch._C._nn.adaptive_max_pool2d if len(size) == 2 else torch._C._nn.adaptive_max_pool3d)(x, size)


@captures("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def _adaptive_max_pool(x, output_size):
    return batched(x, len(output_size), lambda v: adaptive_max_pool(v, size=tuple(output_size)))
