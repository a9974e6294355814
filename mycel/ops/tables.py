"""Tables of rows: embedding looks rows up by id, its gradient adds rows up by id, and one_hot is the row of each id in
the table of the identity.

    embedding(w, ids)        y[i] = w[ids[i]]              w: f32[v,d], ids: i64[…] -> f32[…,d]
    embedding_grad(g, ids)   y[ids[i]] += g[i]             g: f32[…,d], ids: i64[…] -> f32[v,d]

A vocabulary in parts: each rank has the rows of some ids, and those of the others count as zero.
"""

from __future__ import annotations

import torch

from mycel.ir import SplitRule, op
from mycel.ops.capture_rules import captures
from mycel.ops.gather_scatter import here
from mycel.ops.rules import letters, o
from mycel.ops.shape import reshaped


def embedding_vjp(g, y, w, ids, *, padding=-1):
    """Rows of g added up by id."""
    return o.embedding_grad(g, ids, shape=tuple(w.shape), padding=padding), None


def embedding_part(at, w, ids, *, padding=-1):
    """Each rank its share of the vocabulary: rows of the others count as zero."""
    ids, hit = here(at, "v", ids)
    return o.where(reshaped(hit, (*ids.shape, 1)), embedding(w, ids), 0)


@op(
    "v^ d, ... -> ... d",
    vjp=embedding_vjp,
    dtype="first",
    flops=lambda d: 0,
    linear=((0,),),
    looked_up=lambda **_: (0,),
    parts={"v": SplitRule(embedding_part, partial="+", uneven=True)},
    examples=["f[6,4], i64[2,3]<6", "f[6,4], i64[]<6", "f[6,4], i32[4]<2, padding=2", "i64[6,4], i64[4]<6"],
)
def embedding(w, ids, *, padding=-1):
    """The rows of a table by id; the row `padding`, if it is not -1, learns nothing"""
    return torch.embedding(w, ids, padding)


@captures("aten.embedding.default")
def _embedding(w, ids, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    if scale_grad_by_freq:
        return NotImplemented
    return embedding(w, ids, padding=max(padding_idx, -1))


def embedding_grad_dims(g, ids, *, shape, padding=-1):
    """The dims of ids are summed over; the features may be split."""
    rows = " ".join(f"{name}+" for name in letters(ids.ndim, "dv"))
    return f"{rows} d, {rows} -> v^ d", {"v": shape[0]}


def embedding_grad_vjp(g, y, x, ids, *, shape, padding=-1):
    """The rows by id again, without the padding."""
    rows = embedding(g, ids)
    if padding >= 0:
        rows = o.where(reshaped(o.eq(ids, padding), (*ids.shape, 1)), 0.0, rows)
    return rows, None


def embedding_grad_part(at, g, ids, *, shape, padding=-1):
    local, hit = here(at, "v", ids)
    hit = hit if padding < 0 else o.logical_and(hit, o.ne(ids, padding))
    return embedding_grad(o.where(reshaped(hit, (*ids.shape, 1)), g, 0), local, shape=shape)


@op(
    embedding_grad_dims,
    vjp=embedding_grad_vjp,
    dtype="first",
    linear=((0,),),
    parts={"v": SplitRule(embedding_grad_part, uneven=True)},
    examples=[
        "f[2,3,4], i64[2,3]<6, shape=(6,4)", "f[4], i64[]<6, shape=(6,4)", "f[4,2], i64[4]<6, shape=(6,2), padding=1",
    ],
    apart=True,
)  # fmt: skip
def embedding_grad(g, ids, *, shape, padding=-1):
    """A table of zeros with each row of g added to the row of its id: the gradient of embedding"""
    return torch.ops.aten.embedding_dense_backward.default(g, ids, shape[0], padding, False)


@captures("aten.embedding_dense_backward.default")
def _embedding_dense_backward(g, ids, num_weights, padding_idx, scale_grad_by_freq):
    if scale_grad_by_freq:
        return NotImplemented
    return embedding_grad(g, ids, shape=(num_weights, g.shape[-1]), padding=max(padding_idx, -1))


@op(
    lambda ids, *, classes: ("... -> ... c^", {"c": classes}),
    dtype=torch.int64,
    examples=["i64[2,3]<4, classes=4", "i64[]<4, classes=4"],
)
def one_hot(ids, *, classes):
    """1 at each id along a new last dim, else 0"""
    return (ids.unsqueeze(-1) == torch.arange(classes, device=ids.device)).long()


@captures(torch.nn.functional.one_hot)
def _one_hot(tensor, num_classes=-1):
    return one_hot(tensor, classes=num_classes) if num_classes > 0 else NotImplemented
