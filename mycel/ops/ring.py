"""Attention where a sequence is split: rows of q alone, or rows and, over the same ranks, the columns k and v.

Rows alone: k and v are whole, and a causal triangle or a window is the mask of a rank's rows.

Rows and columns: in `count` turns all parts of k and v come by.  What they give is merged; backward, cotangents of k
and v follow them, and go home.

    lse = log(exp lse₁ + exp lse₂)          y = y₁ exp(lse₁ - lse) + y₂ exp(lse₂ - lse)

Of a causal triangle the last rank would have most, so it is folded first: of 2n chunks rank r takes r and 2n-1-r, its
early and its late one.

    rows 0  ◣            rank 0
         1  ■ ◣          rank 1
         2  ■ ■ ◣        rank 1
         3  ■ ■ ■ ◣      rank 0

In turn 0 a rank's chunks on themselves are a smaller triangle.  With keys from a rank before, both its chunks see the
early keys and neither the late; with keys from a rank behind, its late chunk sees all of them and its early one none.
Either way two full blocks: late on early, and one that the rank picks.  Each rank computes the same number of scores,
and none that is masked.

A mask comes with the rows of a rank and all columns, of which each turn takes those that came by.  Where weights are
dropped, rows draw at the count of the first column that came by; a triangle is not folded then.  Documents of columns
go round with them.
"""

from __future__ import annotations

import functools
import math

import torch

from mycel.ops.rules import cast_like, o


class Ring:
    """The ranks a sequence is split over."""

    def __init__(self, at):
        self.axes, self.count = at.axes("q"), at.count("q")

    @functools.cached_property
    def place(self):
        return o.place(axes=self.axes, count=self.count)

    def sent(self, x, to):
        return o.permute_ranks(x, axes=self.axes, count=self.count, to=tuple(to))

    def passed(self, xs):
        """Each to the next rank."""
        return tuple(self.sent(x, ((r + 1) % self.count for r in range(self.count))) for x in xs)

    def is_before(self, turn):
        """Do the keys of a turn come from a rank before this one?"""
        return o.ge(self.place, turn)

    # Even chunks go to different ranks, and odd ones too; on an even rank the even chunk is the early one.

    def folds(self):
        """The ranks that take the even chunks, and the odd ones."""
        taker = [min(chunk, 2 * self.count - 1 - chunk) for chunk in range(2 * self.count)]
        return taker[::2], taker[1::2]

    def in_order(self, x, y):
        """(x, y) on even ranks, (y, x) on odd ones"""
        even = o.eq(o.remainder(self.place, 2), 0)
        return o.where(even, x, y), o.where(even, y, x)

    def folded(self, x):
        """Chunks 2r and 2r+1 -> chunks r and 2n-1-r"""
        chunks = [self.sent(half, to) for half, to in zip(halves(x), self.folds(), strict=True)]
        return o.cat(*self.in_order(*chunks), dim=2)

    def unfolded(self, x):
        """Chunks r and 2n-1-r -> chunks 2r and 2r+1"""
        chunks = self.in_order(*halves(x))
        back = [[to.index(r) for r in range(self.count)] for to in self.folds()]
        return o.cat(*(self.sent(chunk, to) for chunk, to in zip(chunks, back, strict=True)), dim=2)


def is_foldable(at, causal):
    """Is it a square triangle of two whole chunks a rank?"""
    return causal and at.sizes["q"] == at.sizes["k"] and at.sizes["q"] % (2 * at.count("q")) == 0


def halves(x):
    """Early and late rows."""
    n = x.shape[2] // 2
    return o.slice(x, dim=2, start=0, stop=n), o.slice(x, dim=2, start=n, stop=2 * n)


def is_uneven(at, letter):
    return at.sizes[letter] % at.count(letter) != 0


def rows_here(at, *xs):
    """xs with zeros where their rows, dim 2, are padding: in sums over rows these count for nothing."""
    return tuple(at.masked(x, 2, "q", 0.0) for x in xs)


# -- which columns rows see


def by_place(at, columns, window):
    """Where this rank's rows see columns, given by number: those up to its own, or a window around it."""
    rows = o.add(o.iota(shape=(at.local("q"), 1), dim=0, dtype=torch.int64), at.start("q"))
    columns = o.reshape(columns, shape=(1, columns.shape[0]))
    if window is None:
        return o.ge(rows, columns)
    ahead = o.sub(columns, rows)
    return o.logical_and(o.ge(ahead, -window[0]), o.le(ahead, window[1]))


def columns_here(at):
    """The numbers of this rank's columns; padding has the first number that is none."""
    columns = o.add(o.iota(shape=(at.local("k"),), dim=0, dtype=torch.int64), at.start("k"))
    return at.masked(columns, 0, "k", at.sizes["k"])


def has_columns(mask):
    return mask is not None and mask.ndim > 0 and mask.shape[-1] > 1


def on_the_way(at, k, v, mask, placed):
    """What goes round: keys, values, and the numbers of their columns where rows do not see all."""
    k, v = (at.masked(x, 2, "k", 0.0) for x in (k, v))
    return (k, v, columns_here(at)) if placed or is_uneven(at, "k") or has_columns(mask) else (k, v)


def seen(at, mask, placed, window, columns=None):
    """The mask of this rank's rows and the columns that came by; no numbers: all of them."""
    if columns is None:
        return mask
    n, shown = at.sizes["k"], None
    if has_columns(mask):
        mask = o.index_select(mask, o.clamp(columns, 0, n - 1) if is_uneven(at, "k") else columns, dim=mask.ndim - 1)
    if is_uneven(at, "k"):
        shown = o.reshape(o.lt(columns, n), shape=(1, columns.shape[0]))
    if placed:
        here = by_place(at, columns, window)
        shown = here if shown is None else o.logical_and(shown, here)
    if shown is None or mask is None:
        return mask if shown is None else shown
    return o.logical_and(mask, shown) if mask.dtype == torch.bool else o.where(shown, mask, -math.inf)


# -- rows alone ------------------------------------------------------------------------------------------------------


def attention_rows(at, q, k, v, mask, *more, causal=False, window=None, **how):
    if not (causal or window) or at.count("q") == 1:
        return o.attention(q, k, v, mask, *more, causal=causal, window=window, **how)
    return o.attention(q, k, v, by_place(at, all_columns(k), window), *more, **how)


def attention_grad_rows(at, g, q, k, v, mask, y, lse, *more, causal=False, window=None, **how):
    if not (causal or window) or at.count("q") == 1:
        return o.attention_grad(g, q, k, v, mask, y, lse, *more, causal=causal, window=window, **how)
    g, q, y, lse = rows_here(at, g, q, y, lse)
    return o.attention_grad(g, q, k, v, by_place(at, all_columns(k), window), y, lse, *more, **how)


def all_columns(k):
    return o.iota(shape=(k.shape[2],), dim=0, dtype=torch.int64)


# -- rows and columns, forward


def attention_ring(at, q, k, v, mask, *more, causal=False, window=None, **how):
    ring, placed = Ring(at), causal or window is not None
    if ring.count == 1:
        return o.attention(q, k, v, mask, *more, causal=causal, window=window, **how)
    if is_foldable(at, causal) and not has_draws(more):
        rows, columns = (tuple(map(ring.folded, xs)) for xs in beside_documents((q,), (k, v), more))
        y, lse = merged(ring, columns, lambda turn, *came: folded_turn(ring, turn, rows, came, how))
        return ring.unfolded(cast_like(y, q)), ring.unfolded(lse)

    def turn(_, k, v, *came):
        columns, more_here = at_turn(more, came)
        return o.attention(q, k, v, seen(at, mask, placed, window, *columns), *more_here, **how)

    y, lse = merged(ring, (*on_the_way(at, k, v, mask, placed or has_draws(more)), *more[2:]), turn)
    return cast_like(y, q), lse


def has_draws(more):
    """Are weights dropped?  `more` are the operands behind a mask: counts, documents of rows and of columns."""
    return bool(more) and more[0] is not None


def at_turn(more, came):
    """(numbers of the columns that came by, if they have some; counts of rows at the first of these, and documents of
    rows and of what came by)"""
    columns, documents = (came[:-1], (more[1], came[-1])) if len(more) > 1 else (came, ())
    if not has_draws(more):
        return columns, (*more[:1], *documents)
    counts = o.add(more[0], o.reshape(o.slice(columns[0], dim=0, start=0, stop=1), shape=()))
    return columns, (counts, *documents)


def merged(ring, travelling, block):
    """block(turn, *what came by) for every turn, merged; what goes on is sent first."""
    result = None
    for turn in range(ring.count):
        ahead = ring.passed(travelling) if turn + 1 < ring.count else ()
        part = block(turn, *travelling)
        result = part if result is None else merge(result, part)
        travelling = ahead
    return result


def merge(one, two):
    """Attention over two sets of columns, from that over each."""
    lse = o.logaddexp(one[1], two[1])
    level = o.where(o.eq(lse, -math.inf), 0.0, lse)
    parts = [
        o.mul(cast_like(y, lse), o.reshape(o.exp(o.sub(part, level)), shape=(*lse.shape, 1))) for y, part in (one, two)
    ]
    return o.add(*parts), lse


def beside_documents(rows, columns, more):
    """What there is of rows, and of columns, with their documents, which then have rows and columns in dim 2 too."""
    if len(more) < 3:
        return rows, columns
    own, others = (o.reshape(x, shape=(x.shape[0], 1, *x.shape[1:])) for x in more[1:])
    return (*rows, own), (*columns, others)


def documents_of(own, others):
    """The optional operands of attention from documents so beside rows and columns, if there are any."""
    flat = (o.reshape(x, shape=(x.shape[0], *x.shape[2:])) for x in (*own, *others))
    return (None, *flat) if own else ()


def folded_turn(ring, turn, rows, came, how):
    """Both chunks of a rank on what came by: (y, lse), -inf where a row sees nothing of it."""

    def attend(q, own, k, v, others, **triangle):
        return o.attention(q, k, v, None, *documents_of(own, others), **triangle, **how)

    (q, *own), (k, v, *others) = rows, came
    if turn == 0:
        return attend(q, own, k, v, others, causal=True)
    before, chunks, columns = ring.is_before(turn), [halves(x) for x in rows], [halves(x) for x in came]
    (late, *own), (k, v, *others) = (x for _, x in chunks), (x for x, _ in columns)
    fixed = attend(late, own, k, v, others)
    (q, *own), (k, v, *others) = ([o.where(before, *pair) for pair in pairs] for pairs in (chunks, columns))
    y, lse = attend(q, own, k, v, others)
    y_late, lse_late = merge(fixed, (y, o.where(before, -math.inf, lse)))
    return o.cat(cast_like(y, y_late), y_late, dim=2), o.cat(o.where(before, lse, -math.inf), lse_late, dim=2)


# -- rows and columns, backward


def attention_grad_ring(at, g, q, k, v, mask, y, lse, *more, causal=False, window=None, **how):
    ring, placed = Ring(at), causal or window is not None
    if ring.count == 1:
        return o.attention_grad(g, q, k, v, mask, y, lse, *more, causal=causal, window=window, **how)
    if is_foldable(at, causal) and not has_draws(more):
        rows, columns = (tuple(map(ring.folded, xs)) for xs in beside_documents((g, q, y, lse), (k, v), more))
        grads = summed(ring, columns, lambda turn, *came: folded_grad_turn(ring, turn, rows, came, how))
        return tuple(ring.unfolded(cast_like(d, x)) for d, x in zip(grads, (q, k, v), strict=True))
    g, q, y, lse = rows_here(at, g, q, y, lse) if placed else (g, q, y, lse)

    def turn(_, k, v, *came):
        columns, more_here = at_turn(more, came)
        mask_here = seen(at, mask, placed, window, *columns)
        return wide(lse, o.attention_grad(g, q, k, v, mask_here, y, lse, *more_here, **how))

    grads = summed(ring, (*on_the_way(at, k, v, mask, placed or has_draws(more)), *more[2:]), turn)
    return tuple(cast_like(d, x) for d, x in zip(grads, (q, k, v), strict=True))


def wide(lse, xs):
    """xs in the dtype that sums are kept in."""
    return tuple(cast_like(x, lse) for x in xs)


def summed(ring, travelling, block):
    """The sum of dq over all turns; those of dk and dv follow their keys and values, and come home."""
    dq, home, away = None, (), ()
    for turn in range(ring.count):
        ahead = ring.passed(travelling) if turn + 1 < ring.count else ()
        arrived = ring.passed(away)
        grads = block(turn, *travelling)
        if turn == 0:
            dq, *home = grads
        else:
            dq, away = o.add(dq, grads[0]), plus(arrived, grads[1:])
        travelling = ahead
    return dq, *plus(ring.passed(away), home)


def plus(xs, ys):
    return tuple(map(o.add, xs, ys)) if xs else tuple(ys)


def folded_grad_turn(ring, turn, rows, came, how):
    """Cotangents of both chunks of a rank and of what came by."""

    def attend(g, q, y, lse, own, k, v, others, **triangle):
        more = documents_of(own, others)
        return wide(lse, o.attention_grad(g, q, k, v, None, y, lse, *more, **triangle, **how))

    (g, q, y, lse, *own), (k, v, *others) = rows, came
    if turn == 0:
        return attend(g, q, y, lse, own, k, v, others, causal=True)
    before, chunks, columns = ring.is_before(turn), [halves(x) for x in rows], [halves(x) for x in came]
    (g, q, y, lse, *own), (k, v, *others) = (x for _, x in chunks), (x for x, _ in columns)
    fixed = attend(g, q, y, lse, own, k, v, others)
    (g, q, y, lse, *own), (k, v, *others) = ([o.where(before, *pair) for pair in pairs] for pairs in (chunks, columns))
    picked = attend(g, q, y, lse, own, k, v, others)
    as_early, as_late = (
        [o.where(before, *pair) for pair in pairs] for pairs in ([(d, 0.0) for d in picked], [(0.0, d) for d in picked])
    )
    dq = o.cat(as_early[0], o.add(fixed[0], as_late[0]), dim=2)
    return dq, *(o.cat(o.add(f, a), b, dim=2) for f, a, b in zip(fixed[1:], as_early[1:], as_late[1:], strict=True))
