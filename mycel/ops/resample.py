"""Changing the spatial size of [n, c, ...]: interpolation, and moving channels into space.

Interpolation is linear: its gradient is an operator whose gradient is the interpolation again.  `mode` is the name
of torch's kernel.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import o

MODES = [
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
]  # fmt: skip


def resized(x, size):
    """Batch and channels pass, spatial dims are made anew."""
    ins, outs = ([f"{letter}{i}" for i in range(len(size))] for letter in "sy")
    return f"n c {' '.join(f'{s}^' for s in ins)} -> n c {' '.join(outs)}", dict(zip(outs, size, strict=True))


@op(
    lambda x, *, size, mode, scales, align=False: resized(x, size),
    vjp=lambda g, y, x, *, size, **how: (o.upsample_grad(g, shape=tuple(x.shape), **how),),
    flops=lambda d: 8 * d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "y"),
    examples=[
        'f[2,4,3], size=(6,), mode="upsample_nearest1d", scales=(2.0,)',
        'f[2,4,3,2], size=(6,5), mode="upsample_nearest2d", scales=(None,None)',
        'f[2,2,3,2,2], size=(6,5,1), mode="_upsample_nearest_exact3d", scales=(None,None,None)',
        'f[2,4,3], size=(7,), mode="upsample_linear1d", scales=(None,), align=True',
        'f[2,4,3,4], size=(5,3), mode="upsample_bilinear2d", scales=(1.7,0.8)',
        'f[2,4,3,4], size=(5,3), mode="upsample_bicubic2d", scales=(None,None), align=True',
        'f[2,2,3,2,2], size=(6,3,1), mode="upsample_trilinear3d", scales=(2.0,None,None)',
        'f[2,4,6,4], size=(3,3), mode="_upsample_bilinear2d_aa", scales=(None,None)',
    ],
)
def upsample(x, *, size, mode, scales, align=False):
    """x with its spatial dims interpolated to `size`; `scales` (if given) fix the grid, `align` ties the corners."""
    return getattr(torch.ops.aten, mode).default(x, size, *(() if "nearest" in mode else (align,)), *scales)


@op(
    lambda g, *, shape, mode, scales, align=False: resized(g, shape[2:]),
    vjp=lambda g, y, x, *, shape, **how: (upsample(g, size=tuple(x.shape[2:]), **how),),
    flops=lambda d: 8 * d.n * d.c * math.prod(n for k, n in vars(d).items() if k[0] == "s"),
    examples=[
        'f[2,4,6], shape=(2,4,3), mode="upsample_nearest1d", scales=(2.0,)',
        'f[2,2,6,5,1], shape=(2,2,3,2,2), mode="_upsample_nearest_exact3d", scales=(None,None,None)',
        'f[2,4,5,3], shape=(2,4,3,4), mode="upsample_bilinear2d", scales=(1.7,0.8)',
        'f[2,4,5,3], shape=(2,4,3,4), mode="upsample_bicubic2d", scales=(None,None), align=True',
        'f[2,4,3,3], shape=(2,4,6,4), mode="_upsample_bilinear2d_aa", scales=(None,None)',
    ],
)
def upsample_grad(g, *, shape, mode, scales, align=False):
    """Each interpolated value's share given back to what it was made of: the gradient of upsample on `shape`"""
    return getattr(torch.ops.aten, f"{mode}_backward").default(
        g, g.shape[2:], shape, *(() if "nearest" in mode else (align,)), *scales
    )


def upsample_rule(mode):
    """The rule for torch's kernel of this name."""

    def rule(x, output_size, align_corners, *scales, **named):
        scales = (*scales, *named.values())
        scales += (None,) * (len(output_size) - len(scales))
        return upsample(x, size=tuple(output_size), mode=mode, scales=scales, align=bool(align_corners))

    def unaligned(x, output_size, *scales, **named):
        return rule(x, output_size, False, *scales, **named)

    return unaligned if "nearest" in mode else rule


def upsample_vec_rule(mode):
    """The rule for the form with either a size or scale factors."""

    def rule(x, output_size, *rest):
        *align, factors = rest
        scales = (None,) * (x.ndim - 2) if factors is None else tuple(factors)
        size = output_size or [math.floor(n * f) for n, f in zip(x.shape[2:], scales, strict=True)]
        return upsample(x, size=tuple(size), mode=mode, scales=scales, align=bool(align and align[0]))

    return rule


for _mode in MODES:
    if hasattr(torch.ops.aten, _mode):  # the list of kernels grows with torch
        captures(f"aten.{_mode}.default")(upsample_rule(_mode))
        captures(f"aten.{_mode}.vec")(upsample_vec_rule(_mode))


@captures("aten.pixel_shuffle.default")
def _pixel_shuffle(x, factor):
    *lead, c, h, w = x.shape
    if c % factor**2:
        raise ValueError(f"pixel_shuffle by {factor} needs channels divisible by {factor**2}, got {c}")
    n, c = len(lead), c // factor**2
    x = o.reshape(x, shape=(*lead, c, factor, factor, h, w))
    x = o.permute(x, dims=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return o.reshape(x, shape=(*lead, c, h * factor, w * factor))


@captures("aten.pixel_unshuffle.default")
def _pixel_unshuffle(x, factor):
    *lead, c, h, w = x.shape
    if h % factor or w % factor:
        raise ValueError(f"pixel_unshuffle by {factor} needs sizes divisible by it, got {h} by {w}")
    n, h, w = len(lead), h // factor, w // factor
    x = o.reshape(x, shape=(*lead, c, h, factor, w, factor))
    x = o.permute(x, dims=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return o.reshape(x, shape=(*lead, c * factor**2, h, w))


@captures("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _channel_shuffle(x, groups):
    n, c, *spatial = x.shape
    x = o.reshape(x, shape=(n, groups, c // groups, *spatial))
    x = o.permute(x, dims=(0, 2, 1, *range(3, x.ndim)))
    return o.reshape(x, shape=(n, c, *spatial))
