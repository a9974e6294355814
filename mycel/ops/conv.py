"""Convolution of [n, c, ...] in one to three spatial dims.

conv is bilinear, and so are its two gradients; with <a, b> the sum of products

    <g, conv(x, w)>  =  <conv_transpose(g, w), x>  =  <conv_weight(g, x), w>

so each of the three is differentiated by the other two.  Taking patches (im2col) and adding them back (col2im)
are each other's gradients too.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import o


def spatial(letter, n, flag=""):
    """ "s0 s1 …" """
    return " ".join(f"{letter}{i}{flag}" for i in range(n))


def channels_last(x):
    """x as the quick kernels of GPUs read images: channels beside each other.  What a convolution gives lies so as
    well, and what is computed of it element by element, so images are moved where they enter a program and no more."""
    if x.is_cuda and x.ndim in (4, 5) and x.dtype in (torch.float16, torch.bfloat16):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x


def conv_sizes(x, kernel, stride, padding, dilation):
    """Spatial sizes of a convolution's result."""
    across = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in across]


def conv_flops(d):
    """Two for each output element and each weight that meets it; letters as in `conv_dims`."""
    return 2 * d.n * d.o * d.c * math.prod(n for name, n in vars(d).items() if name[0] in "ky")


def conv_rate(x, w, *rest, groups, shape=None, **window):
    """With a kernel of one element it is a product of matrices."""
    kernel = (w.shape if shape is None else shape)[2:]
    return "conv_point" if groups == 1 and math.prod(kernel) == 1 else "conv"


def conv_dims(x, w, *, stride, padding, dilation, groups):
    k = len(stride)
    ins = ("n c+", "o c") if groups == 1 else ("n C^", "o^ c^")
    sizes = dict(zip(spatial("y", k).split(), conv_sizes(x, w.shape[2:], stride, padding, dilation), strict=True))
    return f"{ins[0]} {spatial('s', k, '^')}, {ins[1]} {spatial('k', k, '^')} -> n o {spatial('y', k)}", sizes


def left_over(x, g, kernel, *, stride, padding, dilation):
    """The output padding with which the transposed convolution of g has x's spatial sizes."""
    across = zip(x.shape[2:], g.shape[2:], kernel, stride, padding, dilation, strict=True)
    return tuple(n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in across)


def conv_vjp(g, y, x, w, *, groups, **window):
    return (
        o.conv_transpose(g, w, groups=groups, output_padding=left_over(x, g, w.shape[2:], **window), **window),
        o.conv_weight(g, x, shape=tuple(w.shape), groups=groups, **window),
    )


@op(
    conv_dims,
    vjp=conv_vjp,
    flops=conv_flops,
    fresh=True,
    linear=((0,), (1,)),
    examples=[
        "f[2,4,6], f[6,4,3], stride=(1,), padding=(1,), dilation=(1,), groups=1",
        "f[2,4,6,5], f[6,2,3,2], stride=(2,1), padding=(1,0), dilation=(1,2), groups=2",
        "f[2,2,4,4,3], f[4,2,2,2,1], stride=(1,2,1), padding=(0,1,0), dilation=(1,1,1), groups=1",
        "f[2,4,5,5], f[4,1,2,2], stride=(2,2), padding=(0,0), dilation=(1,1), groups=4",
    ],
    product=True,
    rate=conv_rate,
    apart=True,
    precision="low",
)
def conv(x, w, *, stride, padding, dilation, groups):
    """x [n, c, ...] convolved with w [o, c / groups, ...]"""
    return torch.convolution(
        channels_last(x), channels_last(w), None, stride, padding, dilation, False, (0,) * len(stride), groups
    )


@captures("aten.convolution.default", "aten.convolution_overrideable.default")
def _convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    k = w.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * (k if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    if transposed and any(extra >= s for extra, s in zip(output_padding, stride, strict=True)):
        return NotImplemented
    batched = x if x.ndim == k + 2 else o.reshape(x, shape=(1, *x.shape))
    params = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        y = o.conv_transpose(batched, w, output_padding=output_padding, **params)
    else:
        y = conv(batched, w, **params)
    y = y if bias is None else o.add(y, o.reshape(bias, shape=(bias.shape[0],) + (1,) * k))
    return y if x.ndim == k + 2 else o.reshape(y, shape=y.shape[1:])


@captures("aten.conv_tbc.default")
def _conv_tbc(x, w, bias, pad=0):
    x, w = o.permute(x, dims=(1, 2, 0)), o.permute(w, dims=(2, 1, 0))
    return o.permute(_convolution(x, w, bias, (1,), (pad,), (1,), False, (0,), 1), dims=(2, 0, 1))


def conv_bias_dims(x, w, b, **params):
    text, sizes = conv_dims(x, w, **params)
    ins, outs = text.replace("c+", "c^").split("->")
    return f"{ins}, o ->{outs}", sizes


def conv_bias_expand(x, w, b, **params):
    return o.add(conv(x, w, **params), o.reshape(b, shape=(b.shape[0],) + (1,) * (x.ndim - 2)))


@op(
    conv_bias_dims,
    expand=conv_bias_expand,
    flops=conv_flops,
    fresh=True,
    examples=[
        "f[2,4,6], f[6,4,3], f[6], stride=(1,), padding=(1,), dilation=(1,), groups=1",
        "f[2,4,6,5], f[6,2,3,2], f[6], stride=(2,1), padding=(1,0), dilation=(1,2), groups=2",
    ],
    product=True,
    rate=conv_rate,
    apart=True,
)
def conv_bias(x, w, b, *, stride, padding, dilation, groups):
    """conv(x, w) + b by channel, in one kernel; made by fusion alone."""
    return torch.convolution(
        channels_last(x), channels_last(w), b, stride, padding, dilation, False, (0,) * len(stride), groups
    )


def conv_transpose_dims(x, w, *, stride, padding, dilation, groups, output_padding):
    k = len(stride)
    across = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    sizes = {f"y{i}": (n - 1) * s - 2 * p + d * (m - 1) + e + 1 for i, (n, m, s, p, d, e) in enumerate(across)}
    ins, out = (("n c+", "c o"), "o") if groups == 1 else (("n c^", "c o^"), "O")
    sizes |= {} if groups == 1 else {"O": w.shape[1] * groups}
    return f"{ins[0]} {spatial('s', k, '^')}, {ins[1]} {spatial('k', k, '^')} -> n {out} {spatial('y', k)}", sizes


def conv_transpose_vjp(g, y, x, w, *, output_padding, **params):
    return conv(g, w, **params), o.conv_weight(x, g, shape=tuple(w.shape), **params)


@op(
    conv_transpose_dims,
    vjp=conv_transpose_vjp,
    flops=lambda d: 2 * d.n * d.c * d.o * math.prod(n for name, n in vars(d).items() if name[0] in "ks"),
    linear=((0,), (1,)),
    examples=[
        "f[2,4,3], f[4,6,3], stride=(2,), padding=(1,), dilation=(1,), groups=1, output_padding=(1,)",
        "f[2,4,3,4], f[4,3,2,2], stride=(1,2), padding=(0,1), dilation=(2,1), groups=2, output_padding=(0,0)",
        (
            "f[2,2,2,2,2], f[2,4,2,1,2], stride=(1,1,2), padding=(0,0,0), dilation=(1,1,1), groups=1, "
            "output_padding=(0,0,1)"
        ),
    ],
    apart=True,
    rate=conv_rate,
    precision="low",
)
def conv_transpose(x, w, *, stride, padding, dilation, groups, output_padding):
    """The gradient of conv in its input: x [n, o, ...] and w [o, c / groups, ...] -> [n, c, ...]"""
    return torch.convolution(
        channels_last(x), channels_last(w), None, stride, padding, dilation, True, output_padding, groups
    )


def conv_weight_dims(g, x, *, shape, stride, padding, dilation, groups):
    k = len(stride)
    sizes = dict(zip(spatial("k", k).split(), shape[2:], strict=True))
    ins = ("n+ o", "n c") if groups == 1 else ("n+ o^", "n C^")
    sizes |= {} if groups == 1 else {"c": shape[1]}
    return f"{ins[0]} {spatial('y', k, '^')}, {ins[1]} {spatial('s', k, '^')} -> o c {spatial('k', k)}", sizes


def conv_weight_vjp(g, y, gy, x, *, shape, groups, **window):
    extra = left_over(x, gy, shape[2:], **window)
    return (
        conv(x, g, groups=groups, **window),
        o.conv_transpose(gy, g, groups=groups, output_padding=extra, **window),
    )


@op(
    conv_weight_dims,
    vjp=conv_weight_vjp,
    flops=conv_flops,
    linear=((0,), (1,)),
    examples=[
        "f[2,6,6], f[2,4,6], shape=(6,4,3), stride=(1,), padding=(1,), dilation=(1,), groups=1",
        "f[2,6,3,3], f[2,4,6,5], shape=(6,2,3,2), stride=(2,1), padding=(1,0), dilation=(1,2), groups=2",
        "f[2,4,3,3,3], f[2,2,4,4,3], shape=(4,2,2,2,1), stride=(1,2,1), padding=(0,1,0), dilation=(1,1,1), groups=1",
    ],
    product=True,
    rate=conv_rate,
    apart=True,
    fresh=True,
)
def conv_weight(g, x, *, shape, stride, padding, dilation, groups):
    """The gradient of conv in its weight, of the given shape: cotangent g [n, o, ...] and input x [n, c, ...]"""
    w = g.new_empty(1).expand(shape)
    return torch.ops.aten.convolution_backward.default(
        channels_last(g), channels_last(x), w, None, stride, padding, dilation, False, (0,) * len(stride), groups,
        (False, True, False),
    )[1].contiguous()  # fmt: skip


def im2col_dims(x, *, kernel, dilation, padding, stride):
    places = math.prod(conv_sizes(x, kernel, stride, padding, dilation))
    return "n c h^ w^ -> n (c k) p", {"k": math.prod(kernel), "p": places}


@op(
    im2col_dims,
    vjp=lambda g, y, x, **window: (o.col2im(g, size=tuple(x.shape[2:]), **window),),
    linear=((0,),),
    examples=["f[2,4,4,5], kernel=(2,3), dilation=(1,1), padding=(1,0), stride=(2,1)"],
)
def im2col(x, *, kernel, dilation, padding, stride):
    """The patches of x [n, c, h, w] under a sliding window, as [n, c * window, places]"""
    return torch._C._nn.im2col(x, kernel, dilation, padding, stride)


@captures("aten.im2col.default")
def _im2col(x, kernel_size, dilation, padding, stride):
    batched = x if x.ndim == 4 else o.reshape(x, shape=(1, *x.shape))
    y = im2col(batched, kernel=pair(kernel_size), dilation=pair(dilation), padding=pair(padding), stride=pair(stride))
    return y if x.ndim == 4 else o.reshape(y, shape=y.shape[1:])


def pair(v):
    """One number for both dims, or two, as two."""
    return tuple(v) * (2 if len(v) == 1 else 1)


def col2im_dims(x, *, size, kernel, dilation, padding, stride):
    return "n (c k) p^ -> n c h w", {"k": math.prod(kernel), "h": size[0], "w": size[1]}


@op(
    col2im_dims,
    vjp=lambda g, y, x, *, size, **window: (im2col(g, **window),),
    linear=((0,),),
    examples=["f[2,12,4], size=(3,4), kernel=(2,3), dilation=(1,1), padding=(0,0), stride=(1,1)"],
)
def col2im(x, *, size, kernel, dilation, padding, stride):
    """Patches [n, c * window, places] added into [n, c, *size] where they were taken: the gradient of im2col"""
    return torch._C._nn.col2im(x, size, kernel, dilation, padding, stride)


@captures("aten.col2im.default")
def _col2im(x, output_size, kernel_size, dilation, padding, stride):
    batched = x if x.ndim == 3 else o.reshape(x, shape=(1, *x.shape))
    window = {"kernel": pair(kernel_size), "dilation": pair(dilation), "padding": pair(padding), "stride": pair(stride)}
    y = col2im(batched, size=pair(output_size), **window)
    return y if x.ndim == 3 else o.reshape(y, shape=y.shape[1:])
