"""Rows of a table, looked up by id and reduced bag by bag."""

from __future__ import annotations

import torch

from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, o
from mycel.ops.shape import expanded, reshaped
from mycel.ops.slicing import zeros


@captures(torch.nn.functional.embedding_bag)
def _embedding_bag(
    input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode="mean", sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=None,
):  # fmt: skip
    """Ids [bag, n], or [n] with the offset of each bag; the padding id and what no bag holds count for nothing."""
    if max_norm is not None or scale_grad_by_freq or mode not in ("sum", "mean", "max"):
        return NotImplemented
    if (offsets is None) != (input.ndim == 2):
        raise ValueError("embedding_bag: offsets belong to ids of one dim, and to those alone")
    bags = input.shape[0] if offsets is None else offsets.shape[0] - bool(include_last_offset)
    n = input.shape[0] * (input.shape[1] if input.ndim == 2 else 1)
    ids = reshaped(input, (n,))
    if offsets is None:
        bag = reshaped(o.iota(shape=tuple(input.shape), dim=0, dtype=torch.int64), (n,))
    else:
        starts = o.cast(offsets, dtype=torch.int64)
        bag = o.sub(o.searchsorted(starts, o.iota(shape=(n,), dim=0, dtype=torch.int64), right=True), 1)
        bag = o.clamp(bag, 0, bags - 1)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    rows = o.embedding(weight, ids, padding=padding)
    seen = o.ne(ids, padding)
    if per_sample_weights is not None:
        rows = o.mul(rows, reshaped(per_sample_weights, (n, 1)))
    if mode == "max":
        return _largest(rows, bag, seen, bags)
    rows = o.where(reshaped(seen, (n, 1)), rows, 0.0)
    total = o.index_add(zeros((bags, rows.shape[1]), rows), bag, rows, dim=0)
    if mode == "sum":
        return total
    count = o.index_add(zeros((bags,), rows), bag, cast_like(seen, rows), dim=0)
    return o.div(total, reshaped(o.clamp(count, 1.0, None), (bags, 1)))


def _largest(rows, bag, seen, bags):
    """The maximum of each bag by feature; zeros for a bag without rows."""
    n, features = rows.shape
    index = expanded(reshaped(o.where(seen, bag, bags), (n, 1)), (n, features))
    maxima = o.scatter_reduce(zeros((bags + 1, features), rows), index, rows, dim=0, reduce="amax", include_self=False)
    return o.slice(maxima, dim=0, start=0, stop=bags)
