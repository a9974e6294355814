"""Elements chosen by index tensors along several dims at once: `x[:, i, :, j]` and writing through it.

Dims that are indexed stay whole.  The dims of the index tensors, broadcast together, may be split; they stand where
torch puts them: at the first indexed dim if all indexed dims are adjacent, else in front.

    x: f32[8,9,4], i: i64[6,1], j: i64[5]      index(x, i, j, at=(0,1)): f32[6,5,4]      n0^ n1^ a, p0 1, p1 -> p0 p1 a
"""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures
from mycel.ops.gather_scatter import row
from mycel.ops.rules import cast_like, letters, normal_dim, o, unbroadcast
from mycel.ops.shape import expanded, flattened, reshaped
from mycel.ops.slicing import zeros


class IndexLetters:
    """Letters of x, of each index tensor, and of what they choose; sizes of the chosen."""

    def __init__(self, shape, indices, at):
        batch = torch.broadcast_shapes(*(tuple(i.shape) for i in indices))
        kept = [c for d, c in enumerate(letters(len(shape), "np")) if d not in at]
        rest = iter(kept)
        self.x = [f"n{d}" if d in at else next(rest) for d in range(len(shape))]
        chosen = [f"p{k}" for k in range(len(batch))]
        self.indices = [_aligned(chosen, batch, i.shape) for i in indices]
        front = min(at) if max(at) - min(at) == len(at) - 1 else 0
        self.chosen = [*kept[:front], *chosen, *kept[front:]]
        self.sizes = {**dict(zip(self.x, shape, strict=True)), **dict(zip(chosen, batch, strict=True))}
        self.shape = tuple(self.sizes[name] for name in self.chosen)

    def text(self, names, **flags):
        """Letters as dims text; flags by first character: n the indexed dims, p the dims of the index tensors."""
        return " ".join(name + flags.get(name[0], "") for name in names)


def _aligned(names, sizes, shape):
    """The letters of an operand broadcast against these: "1" where it has a dim of one."""
    lead = len(names) - len(shape)
    return ["1" if n == 1 != sizes[lead + i] else names[lead + i] for i, n in enumerate(shape)]


def index_dims(x, *indices, at):
    """Indexed dims whole, all others free."""
    p = IndexLetters(x.shape, indices, at)
    ins = ", ".join([p.text(p.x, n="^"), *map(p.text, p.indices)])
    return f"{ins} -> {p.text(p.chosen)}"


def index_vjp(g, y, x, *indices, at):
    """Added up where the elements came from."""
    return o.index_grad(g, *indices, shape=tuple(x.shape), at=at), *(None for _ in indices)


@op(
    index_dims,
    vjp=index_vjp,
    dtype="first",
    linear=((0,),),
    looked_up=lambda *, at: at,
    examples=[
        "a[4,6,2], i64[3]<4, at=(0,)", "f[4,6,2], i64[2,3]<6, at=(1,)", "f[4,6,2], i64[2,1]<4, i64[3]<6, at=(0,1)",
        "f[4,6,2], i64[3]<4, i64[3]<2, at=(0,2)", "f[2,4,6,2], i64[]<4, i64[3]<6, at=(1,2)",
        "f[4,6], i32[2,2]<4, i64[1,2]<6, at=(0,1)",
    ],
)  # fmt: skip
def index(x, *indices, at):
    """x[..., i, ..., j, ...] with integer tensors at dims `at`"""
    places = [indices[at.index(d)] if d in at else None for d in range(x.ndim)]
    return torch.ops.aten.index(x, places)


def placed(x, indices):
    """torch's list of index tensors and Nones -> (tensors, their dims), or None if one is a mask."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    at = tuple(d for d, i in enumerate(indices) if i is not None)
    return [indices[d] for d in at], at


@captures("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(x, indices):
    placement = placed(x, indices)
    if placement is None:
        return NotImplemented
    chosen, at = placement
    return index(x, *chosen, at=at) if at else x


@captures("aten.take.default")
def _take(x, index_):
    return index(flattened(x), index_, at=(0,))


def index_grad_dims(g, *indices, shape, at):
    """A split dim of the index tensors leaves a partial sum."""
    p = IndexLetters(shape, indices, at)
    ins = ", ".join([p.text(p.chosen, p="+"), *map(p.text, p.indices)])
    return f"{ins} -> {p.text(p.x)}", {name: size for name, size in p.sizes.items() if name[0] == "n"}


def index_grad_vjp(g, y, x, *indices, shape, at):
    """The elements chosen again."""
    return index(g, *indices, at=at), *(None for _ in indices)


@op(
    index_grad_dims,
    vjp=index_grad_vjp,
    dtype="first",
    linear=((0,),),
    examples=[
        "f[3,6,2], i64[3]<4, shape=(4,6,2), at=(0,)", "f[4,2,3,2], i64[2,3]<6, shape=(4,6,2), at=(1,)",
        "f[2,3,2], i64[2,1]<4, i64[3]<6, shape=(4,6,2), at=(0,1)", "f[6,2], i64[]<4, shape=(4,6,2), at=(0,)",
        "f[4,6], i64[4]<4, i64[4]<2, shape=(4,6,2), at=(0,2)",
    ],
    apart=True,
)  # fmt: skip
def index_grad(g, *indices, shape, at):
    """Zeros with g added where `index` would choose: the gradient of index."""
    table = torch.zeros(shape, dtype=g.dtype, device=g.device)
    if len(at) == 1:
        ids = indices[0].reshape(-1).remainder(shape[at[0]])
        return table.index_add(at[0], ids, g.reshape(*shape[: at[0]], ids.numel(), *shape[at[0] + 1 :]))
    places = [indices[at.index(d)] if d in at else None for d in range(len(shape))]
    return torch.ops.aten.index_put(table, places, g, True)


def index_put_dims(x, value, *indices, at, accumulate=False):
    """Only dims of x that are not indexed may be split."""
    p = IndexLetters(x.shape, indices, at)
    values = _aligned(p.chosen, p.shape, value.shape)
    ins = ", ".join([p.text(p.x, n="^"), p.text(values, p="^"), *(p.text(names, p="^") for names in p.indices)])
    return f"{ins} -> {p.text(p.x)}"


def index_put_vjp(g, y, x, value, *indices, at, accumulate=False):
    """x is not seen where value is, unless it is added."""
    gx = g if accumulate else o.index_put(g, zeros((), g), *indices, at=at)
    return gx, unbroadcast(index(g, *indices, at=at), value), *(None for _ in indices)


def index_put_of_rows(rows, x, value, *indices, at, accumulate=False):
    """Rows that do not count are added as zeros, or written behind the end."""
    places = [rows.plain(i) for i in indices]
    if accumulate and rows.has(value):
        whole = len(at) == 1 and value.shape == (*x.shape[: at[0]], *indices[0].shape, *x.shape[at[0] + 1 :])
        if whole and indices[0].ndim == 1:  # the same, as most write it
            return o.index_add(x, places[0], rows.covered(value, 0), dim=at[0])
        return o.index_put(x, rows.covered(value, 0), *places, at=at, accumulate=True)
    (marked, *_) = [k for k, i in enumerate(indices) if rows.has(i)]
    n = x.shape[at[marked]]
    places[marked] = rows.covered(indices[marked], n)
    longer = o.pad(x, widths=tuple((0, int(d == at[marked])) for d in range(x.ndim)))
    longer = o.index_put(longer, rows.plain(value), *places, at=at, accumulate=accumulate)
    return o.slice(longer, dim=at[marked], start=0, stop=n)


@op(
    index_put_dims,
    vjp=index_put_vjp,
    dtype="first",
    examples=[
        "a[4,6,2], a[3,6,2], i64[3]!, at=(0,)", "f[4,6,2], f[2,3,2], i64[2,1]!, i64[3]!, at=(0,1)",
        "f[4,6,2], f[], i64[3]<6, at=(1,)",
        "f[4,6,2], f[2,6], i64[2]!, i64[2]!, at=(0,2)", "f[4,6,2], f[3,6,1], i64[3]<4, at=(0,), accumulate=True",
        "f[4,6], f[6], i64[2,3]<4, at=(0,), accumulate=True",
    ],
    apart=True,
    of_rows=index_put_of_rows,
)  # fmt: skip
def index_put(x, value, *indices, at, accumulate=False):
    """x with x[..., i, ..., j, ...] replaced by, or with `accumulate` increased by, value"""
    places = [indices[at.index(d)] if d in at else None for d in range(x.ndim)]
    return torch.ops.aten.index_put(x, places, value, accumulate)


@captures("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def _index_put(x, indices, values, accumulate=False, unsafe=False):
    values = cast_like(values, x)
    placement = placed(x, indices)
    if placement is None:
        return masked_put(x, indices, values, accumulate)
    chosen, at = placement
    if at:
        return index_put(x, values, *chosen, at=at, accumulate=accumulate)
    return o.add(x, values) if accumulate else expanded(values, x.shape)


def masked_put(x, indices, value, accumulate):
    """x with value where one mask holds; NotImplemented if the number of places would have to be known."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) != 1:
        return NotImplemented
    ((front, mask),) = given
    behind = x.ndim - front - mask.ndim
    lead = value.shape[: max(value.ndim - behind, 0)]
    if lead and lead[-1] != 1:
        return NotImplemented
    if lead:
        value = reshaped(value, (*lead[:-1], *(1 for _ in range(mask.ndim)), *value.shape[len(lead) :]))
    mask = o.cast(mask, dtype=torch.bool) if mask.dtype == torch.uint8 else mask
    mask = reshaped(mask, (*mask.shape, *(1 for _ in range(behind))))
    return o.where(mask, o.add(x, value) if accumulate else value, x)


@captures("aten.put.default")
def _put(x, index_, source, accumulate=False):
    value = reshaped(cast_like(source, x), index_.shape)
    return reshaped(index_put(flattened(x), value, index_, at=(0,), accumulate=accumulate), x.shape)


@captures("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def _index_fill(x, dim, index_, value):
    value = cast_like(value, x) if hasattr(value, "dtype") else o.full(value, shape=(), dtype=x.dtype)
    return reshaped(index_put(row(x), value, index_, at=(normal_dim(dim, x.ndim),)), x.shape)


@captures("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(x, mask, value):
    return o.where(mask, cast_like(value, x) if hasattr(value, "dtype") else literal_like(value, x), x)


def literal_like(value, x):
    """A number as one of x's kind: 1 for a float tensor is 1.0."""
    if x.dtype.is_complex or x.dtype.is_floating_point:
        return value if isinstance(value, complex) else float(value)
    return bool(value) if x.dtype == torch.bool else int(value)


@captures("aten.masked_scatter.default")
def _masked_scatter(x, mask, source):
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    if not source.type.numel:  # then the mask holds nowhere
        return expanded(x, shape)
    nth = o.cumsum(o.cast(flattened(expanded(mask, shape)), dtype=torch.int64), dim=0)
    values = o.index_select(flattened(source), o.clamp(o.sub(nth, 1), 0, None), dim=0)
    return o.where(mask, reshaped(values, shape), x)
