"""Attention whose scores are changed element by element, for GPUs, a tile of scores at a time: capped, masked by
structure or by a tensor, weights dropped by the step's own random numbers.  Forward and backward need no more memory
than attention without any of that.

    s = cap tanh(q kᵀ · scale / cap) + mask          p = exp(s - lse)          d = where(kept, p / (1 - dropout), 0)
    y = d v          dv = dᵀ g          ds = p (where(kept, g vᵀ / (1 - dropout), 0) - share)          share = Σ g y
    ds *= 1 - tanh²(…)          dq = ds k · scale          dk = dsᵀ q · scale

Row i sees columns i - before … i + behind; tiles outside of that are not looked at, and tiles inside of it not masked.
With documents a row sees columns whose numbers are its own; tiles before the first that can meet one's documents, and
behind the last, are not looked at, and numbers are not compared where two tiles are of one document
(`document_tiles.py`).  Element (i, j) draws what `dropout` of all weights would:
`draws` holds the count at which each row starts.

Beside `attention_kernels.py`, which imports it where tensors are on a GPU: Triton comes with torch there.  Operators of
torch, so that a compiler takes them as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mycel.ops.document_tiles import meeting
from mycel.ops.random import dropout_bound

# rows, columns, warps and stages of a tile, by the width of a head: forward, cotangents of k and v, cotangent of q; the
# quickest of five each on an H200, at lengths of 512 to 2048
TILES = {
    64: ((64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 4, 3)),
    128: ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    256: ((128, 64, 8, 2), (64, 64, 8, 1), (128, 32, 8, 1)),
}
# the same where documents are looked at: of most tiles no number is compared.  Cotangents of k and v want 64 rows: with
# 32 those of k were wrong by 4 % there (Triton 3.6, width 128)
DOCUMENT_TILES = {
    64: ((128, 32, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3)),
    128: ((128, 32, 4, 3), (128, 64, 8, 1), (64, 64, 4, 2)),
    256: ((128, 64, 8, 2), (64, 64, 8, 1), (128, 32, 8, 1)),
}
LOG2E = tl.constexpr(1.4426950408889634)
# of `random.py`: what counts are spread by, and two rounds of murmur3
SPREAD = tl.constexpr(-0x61C8864680B583EB)
FIRST = tl.constexpr(-0xAE502812AA7333)
SECOND = tl.constexpr(-0x3B314601E57A13AD)


def _tiles(width, which, documents):
    """The tile of a kernel; smaller where a block of the device has less memory than an H200's."""
    known = TILES if documents is None else DOCUMENT_TILES
    rows, columns, warps, stages = known[next(w for w in known if width <= w)][which]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3)):
        rows, columns, stages = max(rows // 2, 32), min(columns, 32), min(stages, 2)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def _widths(q, v):
    """Widths of heads, and the powers of two that hold them."""
    wide = [max(triton.next_power_of_2(x.shape[3]), 16) for x in (q, v)]
    exact = [q.shape[3], v.shape[3]] == wide
    return {"width": q.shape[3], "width_v": v.shape[3], "WIDTH": wide[0], "WIDTH_V": wide[1], "EXACT": exact}


def dropping(dropout):
    """(the bound that what is drawn for a weight must reach, how weights that are kept grow)"""
    return dropout_bound(dropout), 1.0 / (1.0 - dropout) if dropout < 1 else 0.0


def _documents(rows, columns, q, size, step, turned=False):
    """Documents as arguments of the kernels, which take a tile of rows, or `turned` of columns, with what it meets."""
    if rows is None:
        return {"row_ids": q, "column_ids": q, "bounds": q, "KEYS": 0}
    rows, columns = (x.to(torch.int64).contiguous() for x in (rows, columns))
    bounds = meeting(columns, rows, step, size) if turned else meeting(rows, columns, size, step)
    return {"row_ids": rows, "column_ids": columns, "bounds": bounds, "KEYS": rows.shape[2]}


def _changes(q, k, mask, draws, scale, cap, dropout, before, behind):
    """What is done to scores, as arguments of the kernels."""
    bound, factor = dropping(dropout)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(*q.shape[:3], k.shape[2])
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    held = q if mask is None else mask.view(torch.uint8) if kind == 1 else mask
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    given = {
        "mask": held, "mb": strides[0], "mh": strides[1], "mn": strides[2], "mk": strides[3],
        "draws": q if draws is None else draws.contiguous(), "bound": bound, "scale": scale,
        "factor": factor, "cap": cap if cap > 0 else 1.0, "before": before, "behind": behind,
        "heads": q.shape[1], "group": q.shape[1] // k.shape[1], "rows": q.shape[2], "columns": k.shape[2],
    }  # fmt: skip
    return {**given, "MASK": kind, "DROP": draws is not None, "CAP": cap > 0}


def _strides(**tensors):
    """Strides by name: qb, qh, qn, qd of q."""
    return {f"{name}{d}": n for name, x in tensors.items() for d, n in zip("bhnd", x.stride(), strict=True)}


@torch.library.custom_op("mycel::tiled_attention", mutates_args=())
def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    draws: torch.Tensor | None,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
    scale: float,
    cap: float,
    dropout: float,
    before: int,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, lse); cap 0: none"""
    y, lse = _results(q, v)
    tiles = _tiles(max(q.shape[3], v.shape[3]), 0, rows)
    grid = (triton.cdiv(q.shape[2], tiles["ROWS"]), q.shape[0] * q.shape[1])
    forward_kernel[grid](
        q, k, v, y, lse, **_strides(q=q, k=k, v=v, y=y), **_widths(q, v), **tiles,
        **_changes(q, k, mask, draws, scale, cap, dropout, before, behind),
        **_documents(rows, columns, q, tiles["ROWS"], tiles["COLUMNS"]),
    )  # fmt: skip
    return y, lse


def _results(q, v):
    y = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return y, q.new_empty(q.shape[:3], dtype=torch.float32)


@tiled_attention.register_fake
def _(q, k, v, mask, draws, rows, columns, scale, cap, dropout, before, behind):
    return _results(q, v)


@torch.library.custom_op("mycel::tiled_attention_grad", mutates_args=())
def tiled_attention_grad(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    draws: torch.Tensor | None,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
    share: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    cap: float,
    dropout: float,
    before: int,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of q, k and v; `share`: Σ g y of each row, in 32 bits"""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    share, lse, width = share.contiguous(), lse.contiguous(), max(q.shape[3], v.shape[3])
    changes = _changes(q, k, mask, draws, scale, cap, dropout, before, behind) | _widths(q, v)
    tiles = _tiles(width, 1, rows)
    columns_kernel[triton.cdiv(k.shape[2], tiles["COLUMNS"]), k.shape[0] * k.shape[1]](
        g, q, k, v, share, lse, dk, dv, **_strides(g=g, q=q, k=k, v=v, x=dk, y=dv), **changes, **tiles,
        **_documents(rows, columns, q, tiles["ROWS"], tiles["COLUMNS"], turned=True),
    )  # fmt: skip
    tiles = _tiles(width, 2, rows)
    rows_kernel[triton.cdiv(q.shape[2], tiles["ROWS"]), q.shape[0] * q.shape[1]](
        g, q, k, v, share, lse, dq, **_strides(g=g, q=q, k=k, v=v, x=dq), **changes, **tiles,
        **_documents(rows, columns, q, tiles["ROWS"], tiles["COLUMNS"]),
    )  # fmt: skip
    return dq, dk, dv


@tiled_attention_grad.register_fake
def _(g, q, k, v, mask, draws, rows, columns, share, lse, scale, cap, dropout, before, behind):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@triton.jit
def tile(x, at, feature, sn, sd, count, width, INSIDE: tl.constexpr, EXACT: tl.constexpr):
    """Rows `at` and features of a tensor, zeros outside; INSIDE: all rows are there, EXACT: all features."""
    place = x + at[:, None].to(tl.int64) * sn + feature[None, :] * sd
    if INSIDE and EXACT:
        return tl.load(place)
    if EXACT:
        return tl.load(place, mask=at[:, None] < count, other=0.0)
    return tl.load(place, mask=(at[:, None] < count) & (feature[None, :] < width), other=0.0)


@triton.jit
def kept(drawn, column, bound):
    """Which of the numbers that rows draw at their counts, and columns further, are above the bound."""
    x = (drawn * SPREAD)[:, None] + (column.to(tl.int64) * SPREAD)[None, :]
    x = (x ^ (x >> 32)) * FIRST
    x = (x ^ (x >> 32)) * SECOND
    return x >= bound


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def changed(
    s, row, column, mask, row_ids, column_ids, mn, mk, scale, cap, before, behind, rows, columns,
    MASK: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """(scores in base 2 of a tile of products, how steep the cap is there); INSIDE: every row sees all of the tile, but
    for what a mask hides."""
    slope = s
    if CAP:
        t = tanh(s * (scale / cap))
        slope = 1.0 - t * t
        s = t * (cap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    r, c = row[:, None], column[None, :]
    if MASK == 1:
        shown = tl.load(mask + r.to(tl.int64) * mn + c * mk, mask=(r < rows) & (c < columns), other=0)
        s = tl.where(shown != 0, s, float("-inf"))
    if MASK == 2:
        added = tl.load(mask + r.to(tl.int64) * mn + c * mk, mask=(r < rows) & (c < columns), other=0.0)
        s += added.to(tl.float32) * LOG2E
    if not INSIDE:
        for i in tl.static_range(KEYS):
            own = tl.load(row_ids + row * KEYS + i, mask=row < rows, other=0)
            theirs = tl.load(column_ids + column * KEYS + i, mask=column < columns, other=0)
            s = tl.where(own[:, None] == theirs[None, :], s, float("-inf"))
        s = tl.where((c < columns) & (c >= r - before) & (c <= r + behind), s, float("-inf"))
    return s, slope


@triton.jit
def spans(first, size, count, before, behind, STEP: tl.constexpr):
    """Of what the places first … first + size - 1 see among `count` places: the first and the end of what any sees,
    and of what all see, in steps."""
    begin = tl.maximum(first - before, 0) // STEP * STEP
    end = tl.minimum(first + size + behind, count)
    inner = tl.maximum(first + size - 1 - before, 0)
    inner = tl.minimum((inner + STEP - 1) // STEP * STEP, (end + STEP - 1) // STEP * STEP)
    inner = tl.maximum(inner, begin)
    outer = tl.maximum(tl.minimum(first + behind + 1, count) // STEP * STEP, inner)
    return begin, inner, outer, end


@triton.jit
def met(bounds, at, begin, inner, outer, end, STEP: tl.constexpr, KEYS: tl.constexpr):
    """Spans without what the documents of a tile do not meet; what all see is of one document, which is the tile's."""
    if KEYS > 0:
        bounds += at * 4
        begin, end = tl.maximum(begin, tl.load(bounds)), tl.minimum(end, tl.load(bounds + 1))
        stop = tl.maximum((end + STEP - 1) // STEP * STEP, begin)
        inner = tl.minimum(tl.maximum(tl.maximum(inner, tl.load(bounds + 2)), begin), stop)
        outer = tl.maximum(tl.minimum(tl.minimum(outer, tl.load(bounds + 3)), stop), inner)
    return begin, inner, outer, end


@triton.jit
def forward_span(
    acc, top, total, qs, k, v, row, drawn, mask, row_ids, column_ids, begin, end, feature, feature_v,
    kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
    COLUMNS: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        ks = tile(k, column, feature, kn, kd, columns, width, INSIDE, EXACT)
        s = tl.dot(qs, tl.trans(ks))
        s, _ = changed(
            s, row, column, mask, row_ids, column_ids, mn, mk, scale, cap, before, behind, rows, columns,
            MASK, CAP, KEYS, INSIDE,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - level[:, None])
        less = tl.exp2(top - level)
        total = total * less + tl.sum(p, 1)
        top = higher
        if DROP:
            p = tl.where(kept(drawn, column, bound), p * factor, 0.0)
        vs = tile(v, column, feature_v, vn, vd, columns, width_v, INSIDE, EXACT)
        acc = tl.dot(p.to(vs.dtype), vs, acc * less[:, None])
    return acc, top, total


@triton.jit
def forward_kernel(
    q, k, v, y, lse, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, yb, yh, yn, yd,
    mask, mb, mh, mn, mk, draws, row_ids, column_ids, bounds, bound, factor, scale, cap, before, behind,
    heads, group, rows, columns,
    width, width_v, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr,
    DROP: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    at = tl.program_id(1).to(tl.int64)
    b, h = at // heads, at % heads
    row, feature, feature_v = first + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    k += b * kb + h // group * kh
    v += b * vb + h // group * vh
    mask += b * mb + h * mh
    row_ids += b * rows * KEYS
    column_ids += b * columns * KEYS
    qs = tile(q + b * qb + h * qh, row, feature, qn, qd, rows, width, False, EXACT)
    drawn = row.to(tl.int64)
    if DROP:
        drawn = tl.load(draws + at * rows + row, mask=row < rows, other=0)
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    begin, inner, outer, end = spans(first, ROWS, columns, before, behind, COLUMNS)
    begin, inner, outer, end = met(
        bounds, b * tl.num_programs(0) + tl.program_id(0), begin, inner, outer, end, COLUMNS, KEYS
    )  # fmt: skip
    acc, top, total = forward_span(
        acc, top, total, qs, k, v, row, drawn, mask, row_ids, column_ids, begin, tl.minimum(inner, end),
        feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, False,
    )  # fmt: skip
    acc, top, total = forward_span(
        acc, top, total, qs, k, v, row, drawn, mask, row_ids, column_ids, inner, outer, feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, True,
    )  # fmt: skip
    acc, top, total = forward_span(
        acc, top, total, qs, k, v, row, drawn, mask, row_ids, column_ids, outer, end, feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, False,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = y + b * yb + h * yh + row[:, None].to(tl.int64) * yn + feature_v[None, :] * yd
    tl.store(place, acc.to(y.dtype.element_ty), mask=(row[:, None] < rows) & (feature_v[None, :] < width_v))
    tl.store(lse + at * rows + row, top / LOG2E + tl.log(total), mask=row < rows)


@triton.jit
def cotangents(
    qs, gs, ks, vs, row, column, drawn, level, shares, mask, row_ids, column_ids, mn, mk, bound, factor, scale, cap,
    before, behind, rows, columns, MASK: tl.constexpr, DROP: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """(dropped weights, cotangents of scores) of a tile, from its scores computed anew."""
    s, slope = changed(
        tl.dot(qs, tl.trans(ks)), row, column, mask, row_ids, column_ids, mn, mk, scale, cap, before, behind,
        rows, columns, MASK, CAP, KEYS, INSIDE,
    )  # fmt: skip
    p = tl.exp2(s - level[:, None])
    dp = tl.dot(gs, tl.trans(vs))
    d = p
    if DROP:
        keep = kept(drawn, column, bound)
        d = tl.where(keep, p * factor, 0.0)
        dp = tl.where(keep, dp * factor, 0.0)
    ds = p * (dp - shares[:, None])
    if CAP:
        ds = ds * slope
    return d, ds


@triton.jit
def rows_told(lse, share, draws, at, row, rows, DROP: tl.constexpr):
    """(log-sum-exp in base 2, share, counts) of rows; a row that sees nothing, or is none, has weights 0."""
    level = tl.load(lse + at * rows + row, mask=row < rows, other=float("inf")) * LOG2E
    level = tl.where(level == float("-inf"), 0.0, level)
    shares = tl.load(share + at * rows + row, mask=row < rows, other=0.0)
    drawn = row.to(tl.int64)
    if DROP:
        drawn = tl.load(draws + at * rows + row, mask=row < rows, other=0)
    return level, shares, drawn


@triton.jit
def columns_span(
    dk, dv, ks, vs, g, q, lse, share, draws, mask, row_ids, column_ids, at, column, begin, end, feature, feature_v,
    gn, gd, qn, qd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
    ROWS: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        qs = tile(q, row, feature, qn, qd, rows, width, INSIDE, EXACT)
        gs = tile(g, row, feature_v, gn, gd, rows, width_v, INSIDE, EXACT)
        level, shares, drawn = rows_told(lse, share, draws, at, row, rows, DROP)
        d, ds = cotangents(
            qs, gs, ks, vs, row, column, drawn, level, shares, mask, row_ids, column_ids, mn, mk, bound, factor,
            scale, cap, before, behind, rows, columns, MASK, DROP, CAP, KEYS, INSIDE,
        )  # fmt: skip
        dv = tl.dot(tl.trans(d.to(gs.dtype)), gs, dv)
        dk = tl.dot(tl.trans(ds.to(qs.dtype)), qs, dk)
    return dk, dv


@triton.jit
def columns_kernel(
    g, q, k, v, share, lse, dk, dv, gb, gh, gn, gd, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    xb, xh, xn, xd, yb, yh, yn, yd,
    mask, mb, mh, mn, mk, draws, row_ids, column_ids, bounds, bound, factor, scale, cap, before, behind,
    heads, group, rows, columns,
    width, width_v, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr,
    DROP: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cotangents of a tile's columns of k and v: the sum over all rows that see them, of all heads that share them."""
    first = tl.program_id(0) * COLUMNS
    shared = tl.program_id(1).to(tl.int64)
    b, kv = shared // (heads // group), shared % (heads // group)
    column, feature, feature_v = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    ks = tile(k + b * kb + kv * kh, column, feature, kn, kd, columns, width, False, EXACT)
    vs = tile(v + b * vb + kv * vh, column, feature_v, vn, vd, columns, width_v, False, EXACT)
    sum_k, sum_v = tl.zeros((COLUMNS, WIDTH), tl.float32), tl.zeros((COLUMNS, WIDTH_V), tl.float32)
    row_ids += b * rows * KEYS
    column_ids += b * columns * KEYS
    begin, inner, outer, end = spans(first, COLUMNS, rows, behind, before, ROWS)
    begin, inner, outer, end = met(
        bounds, b * tl.num_programs(0) + tl.program_id(0), begin, inner, outer, end, ROWS, KEYS
    )  # fmt: skip
    for i in range(group):
        h = kv * group + i
        at = b * heads + h
        gs, qs, shown = g + b * gb + h * gh, q + b * qb + h * qh, mask + b * mb + h * mh
        sum_k, sum_v = columns_span(
            sum_k, sum_v, ks, vs, gs, qs, lse, share, draws, shown, row_ids, column_ids, at, column,
            begin, tl.minimum(inner, end),
            feature, feature_v, gn, gd, qn, qd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns,
            width, width_v, ROWS, EXACT, MASK, DROP, CAP, KEYS, False,
        )  # fmt: skip
        sum_k, sum_v = columns_span(
            sum_k, sum_v, ks, vs, gs, qs, lse, share, draws, shown, row_ids, column_ids, at, column,
            inner, outer,
            feature, feature_v, gn, gd, qn, qd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns,
            width, width_v, ROWS, EXACT, MASK, DROP, CAP, KEYS, True,
        )  # fmt: skip
        sum_k, sum_v = columns_span(
            sum_k, sum_v, ks, vs, gs, qs, lse, share, draws, shown, row_ids, column_ids, at, column,
            outer, end,
            feature, feature_v, gn, gd, qn, qd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns,
            width, width_v, ROWS, EXACT, MASK, DROP, CAP, KEYS, False,
        )  # fmt: skip
    there = column[:, None] < columns
    place = dk + b * xb + kv * xh + column[:, None].to(tl.int64) * xn + feature[None, :] * xd
    tl.store(place, (sum_k * scale).to(dk.dtype.element_ty), mask=there & (feature[None, :] < width))
    place = dv + b * yb + kv * yh + column[:, None].to(tl.int64) * yn + feature_v[None, :] * yd
    tl.store(place, sum_v.to(dv.dtype.element_ty), mask=there & (feature_v[None, :] < width_v))


@triton.jit
def rows_span(
    dq, qs, gs, k, v, row, drawn, level, shares, mask, row_ids, column_ids, begin, end, feature, feature_v,
    kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
    COLUMNS: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        ks = tile(k, column, feature, kn, kd, columns, width, INSIDE, EXACT)
        vs = tile(v, column, feature_v, vn, vd, columns, width_v, INSIDE, EXACT)
        _, ds = cotangents(
            qs, gs, ks, vs, row, column, drawn, level, shares, mask, row_ids, column_ids, mn, mk, bound, factor,
            scale, cap, before, behind, rows, columns, MASK, DROP, CAP, KEYS, INSIDE,
        )  # fmt: skip
        dq = tl.dot(ds.to(ks.dtype), ks, dq)
    return dq


@triton.jit
def rows_kernel(
    g, q, k, v, share, lse, dq, gb, gh, gn, gd, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, xb, xh, xn, xd,
    mask, mb, mh, mn, mk, draws, row_ids, column_ids, bounds, bound, factor, scale, cap, before, behind,
    heads, group, rows, columns,
    width, width_v, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr,
    DROP: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The cotangent of a tile's rows of q: the sum over all columns that they see."""
    first = tl.program_id(0) * ROWS
    at = tl.program_id(1).to(tl.int64)
    b, h = at // heads, at % heads
    row, feature, feature_v = first + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    k += b * kb + h // group * kh
    v += b * vb + h // group * vh
    mask += b * mb + h * mh
    row_ids += b * rows * KEYS
    column_ids += b * columns * KEYS
    qs = tile(q + b * qb + h * qh, row, feature, qn, qd, rows, width, False, EXACT)
    gs = tile(g + b * gb + h * gh, row, feature_v, gn, gd, rows, width_v, False, EXACT)
    level, shares, drawn = rows_told(lse, share, draws, at, row, rows, DROP)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    begin, inner, outer, end = spans(first, ROWS, columns, before, behind, COLUMNS)
    begin, inner, outer, end = met(
        bounds, b * tl.num_programs(0) + tl.program_id(0), begin, inner, outer, end, COLUMNS, KEYS
    )  # fmt: skip
    total = rows_span(
        total, qs, gs, k, v, row, drawn, level, shares, mask, row_ids, column_ids, begin, tl.minimum(inner, end),
        feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, False,
    )  # fmt: skip
    total = rows_span(
        total, qs, gs, k, v, row, drawn, level, shares, mask, row_ids, column_ids, inner, outer,
        feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, True,
    )  # fmt: skip
    total = rows_span(
        total, qs, gs, k, v, row, drawn, level, shares, mask, row_ids, column_ids, outer, end,
        feature, feature_v,
        kn, kd, vn, vd, mn, mk, bound, factor, scale, cap, before, behind, rows, columns, width, width_v,
        COLUMNS, EXACT, MASK, DROP, CAP, KEYS, False,
    )  # fmt: skip
    place = dq + b * xb + h * xh + row[:, None].to(tl.int64) * xn + feature[None, :] * xd
    there = (row[:, None] < rows) & (feature[None, :] < width)
    tl.store(place, (total * scale).to(dq.dtype.element_ty), mask=there)
