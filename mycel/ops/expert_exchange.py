"""Tokens and experts over the same ranks: rows travel to the ranks of their experts and back.

    rank 0   rows for rank 0 | rows for rank 1          rank 0   from rank 0: expert 0, 1 | from rank 1: expert 0, 1
    rank 1   rows for rank 0 | rows for rank 1    =>    rank 1   from rank 0: expert 2, 3 | from rank 1: expert 2, 3

First the counts go, then just the rows there are; where all tokens choose one expert its rank gets all rows, so what
arrives has room for those of all ranks.  Forward a row goes and comes back once; backward it goes with its cotangent
and its weight, and brings back theirs.
"""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.rules import o


@op(
    lambda counts, *, rows: ("r^ e^ -> m", {"m": rows}),
    dtype=torch.int64,
    examples=["i64[2,3]=1 0 2 0 1 1, rows=8", "i64[1,2]=0 0, rows=2"],
    apart=True,
    compiles=False,
)
def experts_of_rows(counts, *, rows):
    """The expert of each row, for `counts` rows of each expert from each rank; -1 behind the last"""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    real = torch.repeat_interleave(experts, counts.reshape(-1))
    return torch.nn.functional.pad(real, (0, rows - real.shape[0]), value=-1)


class RowExchange:
    """The way of a rank's rows to the ranks of their experts and back."""

    def __init__(self, at, ids):
        n, k = ids.shape
        self.axes, self.count, self.chosen, self.here = at.axes("e"), at.count("e"), k, n * k
        self.there = self.count * self.here  # room for the rows of all
        own = at.local("e")
        self.elsewhere = at.sizes["e"] - own
        self.order, counts = o.route(self.slots(at, ids), experts=self.count * own)
        counts = o.reshape(counts, shape=(self.count, own))
        along = {"axes": self.axes, "count": self.count}
        arriving = o.all_to_all(counts, **along, split=0, join=0, size=self.count)
        self.sent, self.got = (o.sum(c, dims=(1,)) for c in (counts, arriving))
        self.experts = o.reshape(experts_of_rows(arriving, rows=self.there), shape=(self.there, 1))

    @staticmethod
    def slots(at, ids):
        """Experts numbered by rank, and within a rank by place: as they are where all ranks have equally many."""
        n, slots = at.sizes["e"], 0
        for axis in at.axes("e"):
            n = -(-n // at.mesh[axis])
            place = o.floor_divide(ids, n)
            slots, ids = o.add(o.mul(slots, at.mesh[axis]), place) if slots else place, o.sub(ids, o.mul(place, n))
        return o.add(o.mul(slots, n), ids)

    def sorted(self, x):
        """A row for each choice, in the order in which they go."""
        return o.dispatch(x, self.order, chosen=self.chosen)

    def sorted_weights(self, weights):
        flat = o.reshape(weights, shape=(self.here, 1))
        return o.index_select(flat, self.order, dim=0)

    def out(self, rows):
        return o.exchange_rows(rows, self.sent, self.got, axes=self.axes, count=self.count, rows=self.there)

    def back(self, rows):
        return o.exchange_rows(rows, self.got, self.sent, axes=self.axes, count=self.count, rows=self.here)


def exchanged(at, x, ids, weights, *operands, hit, **params):
    """`experts` with its tokens and experts over the same ranks; `hit`: which choices count, None for all."""
    travel = RowExchange(at, ids)
    rows = travel.out(travel.sorted(x))
    ones = o.full(1.0, shape=(travel.there, 1), dtype=weights.dtype)
    y = o.experts(rows, travel.experts, ones, *operands, elsewhere=travel.elsewhere, **params)
    return o.combine(travel.back(y), weights, travel.order)


def exchanged_grad(at, g, x, ids, weights, *operands, hit, **params):
    """`experts_grad` likewise: a row and its cotangent go as one."""
    travel, width = RowExchange(at, ids), x.shape[1]
    both = travel.out(o.cat(travel.sorted(x), travel.sorted(g), dim=1))
    x_there, g_there = (o.slice(both, dim=1, start=i * width, stop=(i + 1) * width) for i in range(2))
    scale = travel.out(travel.sorted_weights(weights))
    there = g_there, x_there, travel.experts, scale
    dx, dweights, *rest = o.experts_grad(*there, *operands, elsewhere=travel.elsewhere, **params)
    dx = o.collect(travel.back(dx), travel.order, chosen=travel.chosen)
    dweights = o.index_select(travel.back(dweights), o.inverse_order(travel.order), dim=0)
    dweights = o.reshape(dweights, shape=tuple(weights.shape))
    return dx, dweights if hit is None else o.where(hit, dweights, 0.0), *rest
