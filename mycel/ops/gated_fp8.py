"""silu(a) b, as most models have it before the last layer of an MLP, and its gradients, straight in 8 bits:

    v8, v = gated_fp8(a, b, form=f8e4m3)                        fp8_rows(silu(a) b)
    … = gated_fp8_grad(g, a, b, form=f8e5m2, kept=f8e4m3)       of the cotangents of a and b rows and columns, of
                                                                silu(a) b columns, each with its scales

Products read these alone, so on a GPU none of the three is ever in memory in 16 bits: one pass over g, a and b finds
the largest of each row and column, a second one computes all once more, scales and writes.  Elsewhere they are the
operators they stand for (`transform/fp8_gates.py` finds these).
"""

from __future__ import annotations

import torch

from mycel.ir import Type, op
from mycel.ops.fp8 import columns_in_fp8, fp8_columns, fp8_rows, in_fp8
from mycel.ops.rules import o


def gated_expand(a, b, *, form):
    return fp8_rows(o.mul(o.silu(a), b), form=form)


@op(
    "... k^, ... k^ -> ... k, ... 1",
    types=lambda a, b, *, form: (Type(form, a.shape), Type(torch.float32, (*a.shape[:-1], 1))),
    expand=gated_expand,
    flops=lambda d: 8 * d.rows * d.k,
    fresh=True,
    apart=True,
    examples=["bf16[2,4]=1 0 2 3 4 1 0 6, bf16[2,4]=1 1 0 3 2 1 1 2, form=f8e4m3",
              "f32[2,1,2]=1 2 0 3, f32[2,1,2]=1 2 4 1, form=f8e5m2"],
)  # fmt: skip
def gated_fp8(a, b, *, form):
    """Rows of silu(a) b in 8 bits, and what to multiply each by to have it back"""
    if a.is_cuda:
        from mycel.ops.triton_gated_fp8 import gated_rows_in_fp8

        return gated_rows_in_fp8(a, b, form)
    return in_fp8(torch.nn.functional.silu(a) * b, form)


def gated_grad_expand(g, a, b, *, form, kept):
    s = o.silu(a)
    da, db = o.silu_grad(o.mul(g, b), a), o.mul(g, s)
    forms = [convert(x, form=form) for x in (da, db) for convert in (fp8_rows, fp8_columns)]
    return tuple(y for pair in (*forms, fp8_columns(o.mul(s, b), form=kept)) for y in pair)


def _grad_dims(g, a, b, *, form, kept):
    rows = [f"r{i}" for i in range(a.ndim - 1)]
    whole, joint = " ".join(f"{r}^" for r in rows), " ".join(rows)
    by_rows, by_columns = f"{joint} k, {joint} 1", f"k ({joint}), k 1"
    return f"{', '.join([f'{whole} k^'] * 3)} -> {', '.join([by_rows, by_columns] * 2)}, {by_columns}"


def _grad_types(g, a, b, *, form, kept):
    scales = Type(torch.float32, (*a.shape[:-1], 1)), Type(torch.float32, (a.shape[-1], 1))
    turned = a.shape[-1], a.numel // a.shape[-1]
    both = Type(form, a.shape), scales[0], Type(form, turned), scales[1]
    return *both, *both, Type(kept, turned), scales[1]


@op(
    _grad_dims,
    types=_grad_types,
    expand=gated_grad_expand,
    flops=lambda d: 40 * d.k,
    fresh=True,
    apart=True,
    converts=lambda g, a, b, **_: g.bytes + a.bytes + b.bytes,  # read before, for the largest elements
    examples=["bf16[2,3]=1 0 2 3 4 1, bf16[2,3]=1 1 0 3 2 1, bf16[2,3]=2 1 0 1 1 1, form=f8e5m2, kept=f8e4m3",
              "f32[2,1,2]=1 2 0 3, f32[2,1,2]=1 2 4 1, f32[2,1,2]=2 1 1 1, form=f8e5m2, kept=f8e4m3"],
)  # fmt: skip
def gated_fp8_grad(g, a, b, *, form, kept):
    """The cotangents of a and b under silu(a) b, rows and columns of each in 8 bits, and its own columns"""
    if a.is_cuda:
        from mycel.ops.triton_gated_fp8 import gated_grads_in_fp8

        return gated_grads_in_fp8(g, a, b, form, kept)
    s = torch.nn.functional.silu(a)
    da, db = torch.ops.aten.silu_backward.default(g * b, a), g * s
    return (
        *in_fp8(da, form), *columns_in_fp8(da, form), *in_fp8(db, form), *columns_in_fp8(db, form),
        *columns_in_fp8(s * b, kept),
    )  # fmt: skip
