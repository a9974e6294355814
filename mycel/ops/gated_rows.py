"""What most experts do with a hidden row, and the product behind it, as one operator:

    y = gated_matmul(h, w, scale, counts)       y = grouped_matmul(silu(a) * b * scale, w, counts),  a, b: halves of h

`scale` is the weight that a router gave each row.  Backward needs h and scale alone: the cotangent taken back through w
and the halves of h give, in one pass, the cotangents of both and the rows that the gradient of w asks for
(`gated_grad`).  Other gates are written in small operators (`gates.py`).
"""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.experts import group_products, grouped_matmul, grouped_weight, is_moved_by_kernel
from mycel.ops.gates import Evaluation, from_parts, parts
from mycel.ops.rules import cast_like, o

GATE, FORM = "mul(silu(a), b)", "halves"


def weighted(rows, scale):
    """Rows by the weight of each, computed as wide as the wider of both, as wide as the rows are."""
    wide = torch.promote_types(rows.dtype, scale.dtype)
    return cast_like(o.mul(cast_to(rows, wide), cast_to(scale, wide)), rows)


def cast_to(x, dtype):
    return x if x.dtype == dtype else o.cast(x, dtype=dtype)


# -- kernels


def gated_rows(h, scale):
    """silu(a) b times the scale of a row."""
    if is_moved_by_kernel(h):
        from mycel.ops.triton_rows import gated

        return gated(h, scale)
    a, b = h.chunk(2, dim=1)
    return (torch.nn.functional.silu(a) * b * scale).to(h.dtype)


# -- gradients


def gated_grad_expand(g, h, scale):
    gate = Evaluation(GATE, parts(h, FORM))
    dh = from_parts(gate.pulled(weighted(g, scale)), FORM)
    common = o.sum(cast_to(o.mul(g, gate.value), scale.dtype), dims=(1,), keepdim=True)
    return dh, common, weighted(gate.value, scale)


@op(
    lambda g, h, scale: ("m f^, m (c^ f^), m 1 -> m (c f), m 1, m f", {"c": 2}),
    types=lambda g, h, scale: (h, scale, g),
    expand=gated_grad_expand,
    fresh=True,
    apart=True, compiles=False, precision="low", kept=(2,),
    followed=0,
    examples=["f[6,4], f[6,8], f[6,1]", "f64[1,3], f64[1,6], f64[1,1]"],
)  # fmt: skip
def gated_grad(g, h, scale):
    """The cotangents of h and scale, from that of what the gate gives, and what it gives"""
    if is_moved_by_kernel(h):
        from mycel.ops.triton_rows import gated_grads

        return gated_grads(g, h, scale)
    a, b = h.chunk(2, dim=1)
    silu = torch.nn.functional.silu(a)
    share, value, by_scale = torch.sigmoid(a), silu * b, (g * scale).to(h.dtype)
    dh = torch.cat([by_scale * b * (share + silu * (1 - share)), by_scale * silu], dim=1)
    return dh, (g * value).sum(1, keepdim=True, dtype=scale.dtype), (value * scale).to(h.dtype)


def gated_matmul_vjp(g, y, h, w, scale, counts, *, transposed=False):
    da = grouped_matmul(g, w, counts, transposed=not transposed)
    dh, dscale, rows = gated_grad(da, h, scale)
    dw = grouped_weight(rows, g, counts) if transposed else grouped_weight(g, rows, counts)
    return dh, dw, dscale, None


def gated_matmul_expand(h, w, scale, counts, *, transposed=False):
    rows = weighted(Evaluation(GATE, parts(h, FORM)).value, scale)
    return grouped_matmul(rows, w, counts, transposed=transposed)


def gated_scratch(h, w, scale, counts, *, transposed=False):
    """The rows behind the gate, or two stages of them before there is a result."""
    columns = w.shape[2] if transposed else w.shape[1]
    return max(h.bytes // 2, h.bytes - h.shape[0] * columns * h.dtype.itemsize)


@op(
    lambda h, w, scale, counts, *, transposed=False: (
        f"m^ (c^ f^), e^ {'f^ n' if transposed else 'n f^'}, m^ 1, e^ -> m n", {"c": 2}
    ),
    vjp=gated_matmul_vjp,
    expand=gated_matmul_expand,
    dtype="first",
    flops=lambda d: 2 * d.m * d.f * d.n,
    scratch=gated_scratch,
    fresh=True,
    linear=((1,), (2,)),
    product=True, rate="product", apart=True, compiles=False, precision="low", kept=(2,),
    examples=["f[6,8], f[2,3,4], f[6,1], i64[2]=2 4", "f[6,4], f[3,2,5], f[6,1], i64[3]=0 6 0, transposed=True"],
)  # fmt: skip
def gated_matmul(h, w, scale, counts, *, transposed=False):
    """The rows that the gate makes of h and the scale of each, in groups of `counts`, with the groups' matrices"""
    return group_products(gated_rows(h, scale), w, counts, transposed)
