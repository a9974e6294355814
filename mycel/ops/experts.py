"""Rows by expert: tokens sorted by the expert they chose, products of each expert's rows, and the way back.

    order, counts = route(ids, experts=4)           ids: i64[n,k], k experts for each of n tokens.  order: i64[n k], the
                                                    choices sorted by expert; counts: i64[4], how many each expert got
    rows = dispatch(x, order, chosen=k)             a token for each choice, one expert's rows behind another's
    y = grouped_matmul(rows, w, counts)             each row with its expert's matrix
    z = collect(y, order, chosen=k)                 the sum over a token's choices

No row is dropped and none is padding: shapes are static, the counts are data.  This is how one device computes a
mixture of experts; what ranks share is the whole layer (`expert_layer.py`).
"""

from __future__ import annotations

import re

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures, is_on_gpu, layer
from mycel.ops.rules import cast_like, o

ALIGNED = 16  # bytes, by which rows must lie apart for torch's grouped products
WIDE = 128  # elements of a row from which on rows are moved by a kernel of ours on a GPU


# -- which row is whose -----------------------------------------------------------------------------------------


@op(
    lambda ids, *, experts: ("n^ k^ -> m, e", {"m": ids.shape[0] * ids.shape[1], "e": experts}),
    dtype=torch.int64,
    examples=["i64[6,2]<4, experts=4", "i64[5,1]<2, experts=3", "i64[4,3]<1, experts=4"],
    apart=True,
)
def route(ids, *, experts):
    """(The choices in the order of their experts, how many each expert has)"""
    narrow = torch.uint8 if experts <= 256 else torch.int16 if experts <= 32768 else torch.int64  # sorted by its bits
    sorted_ids, order = torch.sort(ids.reshape(-1).to(narrow), stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device, dtype=narrow), right=True)
    return order, torch.diff(ends, prepend=ends.new_zeros(1))


@op("m^ -> m", dtype=torch.int64, examples=["i64[6]!", "i64[1]!"], apart=True)
def inverse_order(order):
    """Where each element of a permutation stands: inverse_order(order)[order[i]] = i"""
    return places_of(order)


def places_of(order):
    """Where the row of each choice stands."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def is_moved_by_kernel(x):
    """Are rows of these moved by a kernel of ours?  On a GPU, where autograd does not watch."""
    return x.is_cuda and x.dtype.itemsize <= 4 and x.shape[1] >= WIDE and not torch.is_grad_enabled()


@op(
    lambda x, order, *, chosen: "n^ d, m^ -> m d",
    vjp=lambda g, y, x, order, *, chosen: (o.collect(g, order, chosen=chosen), None),
    dtype="first",
    linear=((0,),),
    fresh=True,
    apart=True, compiles=False,
    examples=["f[3,4], i64[6]!, chosen=2", "f[4,3], i64[4]!, chosen=1"],
)  # fmt: skip
def dispatch(x, order, *, chosen):
    """A token for each of its choices, in the order of the choices"""
    if is_moved_by_kernel(x):
        from mycel.ops.triton_rows import spread

        return spread(x, places_of(order), chosen)
    return x.index_select(0, order // chosen)


@op(
    lambda y, order, *, chosen: ("m^ d, m^ -> n d", {"n": y.shape[0] // chosen}),
    vjp=lambda g, z, y, order, *, chosen: (dispatch(g, order, chosen=chosen), None),
    dtype="first",
    linear=((0,),),
    fresh=True,
    apart=True, compiles=False,
    examples=["f[6,4], i64[6]!, chosen=2", "f[4,3], i64[4]!, chosen=1"],
)  # fmt: skip
def collect(y, order, *, chosen):
    """The sum over each token's choices: `dispatch` turned round"""
    if is_moved_by_kernel(y):
        from mycel.ops.triton_rows import gathered_sum

        return gathered_sum(y, places_of(order), chosen)
    rows = y.index_select(0, places_of(order))
    return rows if chosen == 1 else rows.view(-1, chosen, y.shape[1]).sum(1)


def combine_vjp(g, z, y, weights, order):
    """A row's cotangent is its token's times its weight; a weight's is what its row and the cotangent have in
    common."""
    shared = o.cast(dispatch(g, order, chosen=weights.shape[1]), dtype=weights.dtype)
    scale = o.index_select(o.reshape(weights, shape=(y.shape[0],)), order, dim=0)
    common = o.sum(o.mul(shared, o.cast(y, dtype=weights.dtype)), dims=(1,))
    dweights = o.index_select(common, inverse_order(order), dim=0)
    dy = o.mul(shared, o.reshape(scale, shape=(y.shape[0], 1)))
    return cast_like(dy, y), o.reshape(dweights, shape=tuple(weights.shape)), None


@op(
    "m^ d, n^ k^, m^ -> n d",
    vjp=combine_vjp,
    dtype="first",
    linear=((0,), (1,)),
    precision="kept",
    examples=["f[6,4], f[3,2], i64[6]!", "f[4,3], f[4,1], i64[4]!"],
)
def combine(y, weights, order):
    """The sum over each token's choices, each with its weight; computed as wide as the wider of both"""
    rows = y.index_select(0, places_of(order)).view(*weights.shape, y.shape[1])
    return (rows * weights.unsqueeze(2)).sum(1).to(y.dtype)


# -- products of each expert's rows -----------------------------------------------------------------------------


def is_grouped(*xs):
    """Has torch a kernel for grouped products of these?  On a GPU in bf16, where rows lie as it wants them."""
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.stride(-2) * x.itemsize % ALIGNED == 0
        for x in xs
    )


def grouped_mm(a, b, counts):
    """torch's own, under the name it has."""
    ends = counts.cumsum(0, dtype=torch.int32)
    if hasattr(torch.nn.functional, "grouped_mm"):
        return torch.nn.functional.grouped_mm(a, b, offs=ends)
    return torch._grouped_mm(a, b, offs=ends)


def sizes_of_groups(counts, rows):
    """How many rows each group has, as Python's numbers: they are all rows."""
    from mycel.errors import RunError

    sizes = counts.tolist()
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise RunError(
            f"counts of groups that do not add up: {sizes} are {sum(sizes)} of {rows} rows\n"
            "  try       counts of 0 and more, or ends (offs) that rise, with every row in a group"
        )
    return sizes


def segments(x, w, counts):
    """Each expert's rows of x with its matrix w[e]: k n, one after the other."""
    sizes = sizes_of_groups(counts, x.shape[0])
    if torch.is_grad_enabled():
        return torch.cat([part @ w[e] for e, part in enumerate(x.split(sizes))])
    y, start = x.new_empty(x.shape[0], w.shape[2]), 0
    for e, size in enumerate(sizes):
        if size:
            torch.mm(x[start : start + size], w[e], out=y[start : start + size])
        start += size
    return y


def group_products(x, w, counts, transposed):
    product = grouped_mm if is_grouped(x, w) else segments
    return product(x, w if transposed else w.transpose(1, 2), counts)


def grouped_flops(d):
    return 2 * d.m * d.k * d.n


def grouped_matmul_dims(x, w, counts, *, transposed=False):
    return f"m^ k+, e^ {'k+ n' if transposed else 'n k+'}, e^ -> m n"


def grouped_matmul_vjp(g, y, x, w, counts, *, transposed=False):
    dw = grouped_weight(x, g, counts) if transposed else grouped_weight(g, x, counts)
    return grouped_matmul(g, w, counts, transposed=not transposed), dw, None


@op(
    grouped_matmul_dims,
    vjp=grouped_matmul_vjp,
    dtype="first",
    flops=grouped_flops,
    fresh=True,
    linear=((0,), (1,)),
    product=True, rate="product", apart=True, compiles=False, precision="low",
    examples=["f[6,4], f[2,3,4], i64[2]=2 4", "f[6,4], f[3,4,5], i64[3]=0 6 0, transposed=True",
              "f[6,4], f[4,8,4], i64[4]=6 0 0 0"],
)  # fmt: skip
def grouped_matmul(x, w, counts, *, transposed=False):
    """The rows of x in groups of `counts`, group e with w[e]: x @ w[e].T, or x @ w[e] where w is transposed"""
    return group_products(x, w, counts, transposed)


def grouped_weight_vjp(h, y, g, x, counts):
    return grouped_matmul(x, h, counts), grouped_matmul(g, h, counts, transposed=True), None


def grouped_weight_scratch(g, x, counts):
    """The matrices one by one, before they are put together; one kernel makes those of 16 bits."""
    return counts.numel * g.shape[1] * x.shape[1] * g.dtype.itemsize if g.dtype.itemsize > 2 else 0


@op(
    "m^ n, m^ k, e^ -> e n k",
    vjp=grouped_weight_vjp,
    dtype="first",
    flops=grouped_flops,
    fresh=True,
    linear=((0,), (1,)),
    product=True, rate="product", apart=True, compiles=False, precision="low",
    scratch=grouped_weight_scratch,
    examples=["f[6,4], f[6,3], i64[2]=2 4", "f[6,4], f[6,8], i64[3]=0 6 0"],
)  # fmt: skip
def grouped_weight(g, x, counts):
    """The gradient of a grouped product's weights: for each group its rows of g against its rows of x"""
    if is_grouped(g, x):
        return grouped_mm(g.t(), x, counts)
    sizes = sizes_of_groups(counts, x.shape[0])
    return torch.stack([a.t() @ b for a, b in zip(g.split(sizes), x.split(sizes), strict=True)])


@op(
    lambda b, counts, *, rows: ("e^ n, e^ -> m n", {"m": rows}),
    vjp=lambda g, y, b, counts, *, rows: (o.grouped_sum(g, counts), None),
    dtype="first",
    linear=((0,),),
    apart=True, compiles=False,
    examples=["f[2,4], i64[2]=2 4, rows=6", "f[3,4], i64[3]=0 6 0, rows=6"],
)  # fmt: skip
def grouped_rows(b, counts, *, rows):
    """Row e for each row of group e: how an expert's bias is added"""
    return torch.repeat_interleave(b, counts, dim=0, output_size=rows)


@op(
    "m^ n, e^ -> e n",
    vjp=lambda g, y, x, counts: (grouped_rows(g, counts, rows=x.shape[0]), None),
    dtype="first",
    linear=((0,),),
    apart=True, compiles=False,
    examples=["f[6,4], i64[2]=2 4", "f[6,4], i64[3]=0 6 0"],
)  # fmt: skip
def grouped_sum(x, counts):
    """The sum of the rows of each group"""
    whose = torch.repeat_interleave(counts, output_size=x.shape[0])
    return x.new_zeros(counts.shape[0], x.shape[1]).index_add(0, whose, x)


def check_counts(counts, rows):
    """A check at run time that groups are all rows, which names the layer; of layers that are alike, all of them, so
    that they stay one block."""
    name, line = layer()
    name = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    o.assert_true(
        o.logical_and(o.all(o.ge(counts, 0), dims=(0,)), o.eq(o.sum(counts, dims=(0,)), rows)),
        message=f"{name or 'grouped_mm'}: counts of groups that do not add up to {rows} rows\n  at        {line}\n"
        "  try       ends (offs) that rise, the last of which is the number of rows",
    )


@captures(torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm), "aten._grouped_mm.default")
def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None, **_):
    """Rows in groups with a matrix each, or the products of groups of rows; `offs` are where groups end."""
    if offs is None or bias is not None or out_dtype not in (None, a.dtype) or b.ndim + a.ndim > 5:
        return NotImplemented
    ends = o.cast(offs, dtype=torch.int64)
    counts = o.sub(ends, o.pad(o.slice(ends, dim=0, start=0, stop=ends.shape[0] - 1), widths=((1, 0),)))
    if not is_on_gpu():  # which would be waited for
        check_counts(counts, a.shape[0] if b.ndim == 3 else a.shape[1])
    if a.ndim == 2 and b.ndim == 3:
        return grouped_matmul(a, b, counts, transposed=True)
    if a.ndim == 2 and b.ndim == 2:
        return grouped_weight(o.permute(a, dims=(1, 0)), b, counts)
    return NotImplemented
