"""What ranks say to each other, as operators: pure, typed, each over the axes of a mesh it names.

    y = all_reduce(x, axes=("dp",), count=2)                   the sum (or maximum, minimum) over the ranks along dp
    y = all_gather(x, axes=("tp",), count=4, dim=0, size=10)   the parts of all, joined along a dim and cut to its size
    y = reduce_scatter(x, axes=("dp",), count=2, dim=0)        each its part of the sum
    y = all_to_all(x, axes=("cp",), count=2, split=1, join=2)  part i of dim `split` to rank i;
                                                               what comes in joined along `join`
    y = permute(x, axes=("cp",), count=2, to=(1, 0))           to rank to[i] from rank i; -1: to nobody
                                                               (who gets nothing has zeros)
    y = exchange_rows(x, sent, got, axes=("ep",), count=2, rows=8)   to each rank its rows of x, one rank's behind
                                                               another's: `sent` says how many, `got` how many come
    y = own_part(x, axes=("tp",), count=4, dim=0)              this rank's part of what all hold
    y = only_first(x, axes=("tp",), count=4)                   x on the first rank along the axes, zeros on the others:
                                                               a partial sum
    y = exchange_chunks(x, axes=("dp",), count=2)                row i to rank i, row i from rank i: encoded messages
    y = gather_chunks(x, axes=("dp",), count=2)                  the rows of all
    y = verified(y, x, at, axes=("dp",), every=100, of="w")    rows that have come; now and then, compared with
                                                               those that were sent
    y = add_own_row(x, r, axes=("dp",), count=2)               r added to this rank's part of x
    t = begin(x, z, op="all_reduce", axes=("dp",), count=2)    the same for several tensors in one message, unwaited for
    y, w = finish(t, x, z, op="all_reduce", …)                 what it brought
    t = begin_send(x, z, axes=("pp",), count=4, to=1, tag=7)   tensors to the rank with this index along the axes,
    finish_send(t, x, z, …)                                    without waiting; they have been taken, and may change
    t = begin_receive(axes=("pp",), count=4, source=0, tag=7, shapes=…, dtypes=…)
    x, z = finish_receive(t, …)                                what a rank sent under the same tag
    i = place(axes=("tp",), count=4)                           this rank's index along the axes

`count` is the number of ranks along the axes, so that types need no mesh.  Parts are of equal size, the last ones
padded with zeros where needed.  Kernels ask the communicator that the run has put up (`COMMUNICATORS`): real processes
or simulated ranks.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from mycel.errors import GradientError, RunError
from mycel.ir import OPS, Collective, Type, op
from mycel.ops.rules import o

RING = 8  # ranks
ALONE_BYTES = 4 << 20  # of a gather or scatter: larger tensors travel alone, since packing costs more than a message
# of a gather or scatter so much goes in one message, since more leaves the caches (of four processes, tensors of 1 MiB
# took up to a third less CPU time so)
MESSAGE_BYTES = 8 << 20

COMMUNICATORS: list[Any] = []  # the innermost is asked; owned by the runs


def communicator():
    """Whoever carries the messages of this run."""
    if not COMMUNICATORS:
        raise RunError(
            "a collective needs ranks to speak to\n"
            "  try       run it in a training step with a mesh, under torchrun or mycel train --nproc"
        )
    return COMMUNICATORS[-1]


def with_size(type, dim, size):
    return Type(type.dtype, tuple(size if d == dim else n for d, n in enumerate(type.shape)), type.depth)


def linear_in_first(transpose):
    """The gradient of an operator that is linear in x: its transpose."""
    return lambda g, y, x, **params: (transpose(g, x, **params),)


def resized(x, dims):
    """The dims of an operator that gives these dims another size: they are whole along all other axes."""
    left = " ".join(f"p{d}^" if d in dims else f"d{d}" for d in range(x.ndim))
    right = " ".join(f"q{d}" if d in dims else f"d{d}" for d in range(x.ndim))
    return f"{left} -> {right}", {f"q{d}": n for d, n in dims.items()}


# -- what travels together


def together(name, xs, count):
    """Of tensors that are sent at once between so many ranks, (what may not be mixed, bytes) each, those that go in one
    message, by their positions: of gathers and scatters as many as one message is good for."""
    messages, filled = [], {}  # filled: by what may not be mixed, the last message, and its bytes
    apart = name in ("all_to_all", "permute", "exchange", "exchange_rows")
    for i, (key, nbytes) in enumerate(xs):
        size = 0 if name == "all_reduce" else nbytes * (count if "gather" in name else 1)
        message, there = filled.get(key, ([], 0))
        if not message or apart or size >= ALONE_BYTES or there + size > MESSAGE_BYTES:
            messages.append(message := [])
            there = 0
        message.append(i)
        if not (apart or size >= ALONE_BYTES):
            filled[key] = message, there + size
    return messages


# -- what ranks get, from the tensors of all along the axes: how simulated ranks do it


def reduced(xs, kind="+"):
    """The sum (rounded once), maximum or minimum of the ranks' tensors, in their order."""
    if kind == "+":
        wide = xs[0].dtype in (torch.float16, torch.bfloat16)
        total = xs[0].float() if wide else xs[0]
        for x in xs[1:]:
            total = total + x
        return total.to(xs[0].dtype)
    stacked = torch.stack(list(xs))
    return stacked.amax(0) if kind == ">" else stacked.amin(0)


def gathered(xs, index, *, axes, count, dim, size):
    return torch.cat(list(xs), dim).narrow(dim, 0, size)


def scattered(xs, index, *, axes, count, dim, kind="+"):
    whole = padded(reduced(xs, kind), dim, count)
    return whole.chunk(count, dim)[index] if whole.shape[dim] else whole


def exchanged(xs, index, *, axes, count, split, join, size):
    return torch.cat([padded(x, split, count).tensor_split(count, split)[index] for x in xs], join).narrow(
        join, 0, size
    )


def permuted(xs, index, *, axes, count, to):
    return xs[to.index(index)] if index in to else torch.zeros_like(xs[index])


def rows_exchanged(xs, index, *, axes, count, rows):
    """Of each rank's (x, sent, got) the rows for this one, in the order of the ranks."""
    pieces = [x.split([*sent.tolist(), x.shape[0] - int(sent.sum())])[index] for x, sent, _ in xs]
    behind = pieces[0].new_zeros(rows - sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    return torch.cat([*pieces, behind])


def ring(k):
    """The share of a tensor that passes each rank of a ring, once around."""
    return (k - 1) / k


def steps(k: int) -> int:
    """Messages that wait for each other: those of a ring between a few ranks; between many, libraries send small ones
    along trees."""
    return k - 1 if k <= RING else RING - 1 + math.ceil(math.log2(k / RING))


def turns(k):
    return k - 1


ALL_REDUCE = Collective(
    lambda k: 2 * ring(k),
    lambda k: 2 * steps(k),
    lambda xs, index, *, axes, count, kind="+": reduced(xs, kind),
    True,
    same=True,
)


def all_reduce_vjp(g, y, x, *, axes, count, kind="+"):
    """Of a maximum: to the elements that are it, in equal shares."""
    total = o.all_reduce(g, axes=axes, count=count)
    if kind == "+":
        return (total,)
    hit = o.cast(o.eq(x, y), dtype=x.dtype)
    return (o.div(o.mul(total, hit), o.all_reduce(hit, axes=axes, count=count)),)


@op("... -> ...", dtype="first", vjp=all_reduce_vjp, compiles=False, by_rank=True, collective=ALL_REDUCE)
def all_reduce(x, *, axes, count, kind="+"):
    """The sum, maximum (>) or minimum (<) of x over the ranks along the axes."""
    return communicator().all_reduce(x, axes, kind)


def gather_transpose(g, x, *, axes, count, dim, size):
    return o.reduce_scatter(g, axes=axes, count=count, dim=dim)


@op(
    lambda x, *, axes, count, dim, size: resized(x, {dim: size}),
    types=lambda x, *, axes, count, dim, size: with_size(x, dim, size),
    vjp=linear_in_first(gather_transpose),
    linear=((0,),),
    compiles=False,
    by_rank=True,
    collective=Collective(turns, steps, gathered, together=True, grows=True, same=True),
)
def all_gather(x, *, axes, count, dim, size):
    """The parts of all ranks along the axes, joined along `dim` and cut to `size`."""
    y = communicator().all_gather(x, axes, dim)
    return y if y.shape[dim] == size else y.narrow(dim, 0, size)


def scatter_transpose(g, x, *, axes, count, dim, kind="+"):
    if kind != "+":
        raise GradientError("no gradient of a maximum or minimum in parts\n  try       all_reduce, or a sum")
    return o.all_gather(g, axes=axes, count=count, dim=dim, size=x.shape[dim])


@op(
    lambda x, *, axes, count, dim, kind="+": resized(x, {dim: -(-x.shape[dim] // count)}),
    types=lambda x, *, axes, count, dim, kind="+": with_size(x, dim, -(-x.shape[dim] // count)),
    vjp=linear_in_first(scatter_transpose),
    compiles=False,
    by_rank=True,
    collective=Collective(ring, steps, scattered, together=True),
)
def reduce_scatter(x, *, axes, count, dim, kind="+"):
    """This rank's part along `dim` of the sum (maximum, minimum) of x over the ranks along the axes."""
    return communicator().reduce_scatter(padded(x, dim, count), axes, dim, kind)


@op(
    lambda x, *, axes, count, dim: resized(x, {dim: -(-x.shape[dim] // count)}),
    types=lambda x, *, axes, count, dim: with_size(x, dim, -(-x.shape[dim] // count)),
    vjp=linear_in_first(scatter_transpose),
    compiles=False,
    by_rank=True,
    collective=Collective(ring, lambda k: 1, scattered),
)
def reduce_scatter_wide(x, *, axes, count, dim):
    """As reduce_scatter of a sum, but whatever the network: 16 bits on the wire, added in 32 and rounded once, by the
    rank whose part it is."""
    x = padded(x, dim, count)
    n = x.shape[dim] // count
    parts = communicator().all_to_all(x, axes, dim, dim)
    return reduced(parts.split(n, dim)) if n else parts


def all_to_all_type(x, *, axes, count, split, join, size):
    return with_size(with_size(x, split, -(-x.shape[split] // count)), join, size)


def all_to_all_transpose(g, x, *, axes, count, split, join, size):
    return o.all_to_all(g, axes=axes, count=count, split=join, join=split, size=x.shape[split])


@op(
    lambda x, *, axes, count, split, join, size: resized(x, {split: -(-x.shape[split] // count), join: size}),
    types=all_to_all_type,
    vjp=linear_in_first(all_to_all_transpose),
    linear=((0,),),
    compiles=False,
    by_rank=True,
    collective=Collective(ring, lambda k: 1, exchanged),
)
def all_to_all(x, *, axes, count, split, join, size):
    """Part i of dim `split` goes to rank i; the parts that come in are joined along `join` and cut to `size`."""
    y = communicator().all_to_all(padded(x, split, count), axes, split, join)
    return y if y.shape[join] == size else y.narrow(join, 0, size)


@op(
    "r^ ... -> r ...",
    dtype="first",
    compiles=False,
    by_rank=True,
    collective=Collective(
        ring, lambda k: 1, lambda xs, index, *, axes, count: torch.stack([x[index] for x in xs]), together=True
    ),
)
def exchange_chunks(x, *, axes, count):
    """Row i goes to rank i along the axes; row i of the result is what rank i sent here."""
    return communicator().exchange_chunks(x, axes)


@op(
    lambda x, *, axes, count: resized(x, {0: count * x.shape[0]}),
    types=lambda x, *, axes, count: with_size(x, 0, count * x.shape[0]),
    compiles=False,
    by_rank=True,
    collective=Collective(
        turns, turns, lambda xs, index, *, axes, count: torch.cat(list(xs)), together=True, same=True
    ),
)
def gather_chunks(x, *, axes, count):
    """The rows of all ranks along the axes; what is encoded is small, so it is sent as soon as it is there."""
    return communicator().gather_chunks(x, axes)


@op(
    lambda come, sent, at, **_: "r^ b^, s^ b^, -> r b",
    dtype="first",
    free=True,
    compiles=False,
    by_rank=True,
    effect=True,
)
def verified(come, sent, at, *, axes, every, of):
    """What has come of encoded rows; in one of `every` messages their checksums are compared with those of what others
    have sent, row i to rank i or one row to all.  Simulated ranks lose nothing, and a GPU does not wait for it."""
    ranks = communicator()
    if come.is_cuda or not hasattr(ranks, "gather_chunks") or int(at) % every:
        return come
    sums = lambda rows: torch.tensor([zlib.crc32(row.numpy()) for row in rows.contiguous()])[:, None]
    mine = sums(sent)
    theirs = ranks.exchange_chunks(mine, axes) if len(sent) == len(come) else ranks.gather_chunks(mine, axes)
    wrong = (sums(come) != theirs).flatten().nonzero().flatten().tolist()
    if wrong:
        places = ", ".join(map(str, wrong))
        raise RunError(
            f"{of}: encoded bytes have changed on their way over {'.'.join(axes)}: from place {places} to "
            f"{ranks.index(axes)}\n  try       the network and the memory of these hosts; the last checkpoint is whole"
        )
    return come


def exchange_rows_vjp(g, y, x, sent, got, *, axes, count, rows):
    return o.exchange_rows(g, got, sent, axes=axes, count=count, rows=x.shape[0]), None, None


@op(
    lambda x, sent, got, *, axes, count, rows: (
        f"m^ {' '.join(f'd{i}' for i in range(1, x.ndim))}, r^, r^ -> p {' '.join(f'd{i}' for i in range(1, x.ndim))}",
        {"p": rows},
    ),
    dtype="first",
    vjp=exchange_rows_vjp,
    linear=((0,),),
    compiles=False,
    by_rank=True,
    collective=Collective(ring, lambda k: 1, rows_exchanged, counted=True),
)
def exchange_rows(x, sent, got, *, axes, count, rows):
    """To each rank along the axes its rows of x, those of the first rank first; those that come stand one rank's behind
    another's, and what is behind them means nothing."""
    return communicator().exchange_rows(x, sent, got, axes, rows)


def permute_transpose(g, x, *, axes, count, to):
    back = [-1] * count
    for i, j in enumerate(to):
        if j >= 0:
            back[j] = i
    return o.permute_ranks(g, axes=axes, count=count, to=tuple(back))


@op(
    "... -> ...",
    dtype="first",
    vjp=linear_in_first(permute_transpose),
    linear=((0,),),
    compiles=False,
    by_rank=True,
    collective=Collective(lambda k: 1.0, lambda k: 1, permuted),
)
def permute_ranks(x, *, axes, count, to):
    """x of rank i arrives at rank to[i] (-1: nowhere); zeros where nothing arrives."""
    return communicator().permute(x, axes, to)


def own_part_transpose(g, x, *, axes, count, dim):
    """Parts of the others count as zero: the result is a partial sum over the axes."""
    return o.spread(g, axes=axes, count=count, dim=dim, size=x.shape[dim])


@op(
    lambda x, *, axes, count, dim: resized(x, {dim: -(-x.shape[dim] // count)}),
    types=lambda x, *, axes, count, dim: with_size(x, dim, -(-x.shape[dim] // count)),
    vjp=linear_in_first(own_part_transpose),
    linear=((0,),),
    free=True,
    compiles=False,
    by_rank=True,
)
def own_part(x, *, axes, count, dim):
    """This rank's part of x along `dim`."""
    n = -(-x.shape[dim] // count)
    i = communicator().index(axes)
    return padded(x, dim, count).narrow(dim, i * n, n)


@op(
    lambda x, *, axes, count, dim, size: resized(x, {dim: size}),
    types=lambda x, *, axes, count, dim, size: with_size(x, dim, size),
    linear=((0,),),
    vjp=linear_in_first(lambda g, x, *, axes, count, dim, size: o.own_part(g, axes=axes, count=count, dim=dim)),
    compiles=False,
    by_rank=True,
)
def spread(x, *, axes, count, dim, size):
    """x at this rank's place along `dim`, zeros elsewhere: `own_part` turned round."""
    shape = list(x.shape)
    shape[dim] *= count
    y = x.new_zeros(shape)
    y.narrow(dim, communicator().index(axes) * x.shape[dim], x.shape[dim]).copy_(x)
    return y.narrow(dim, 0, size)


@op(
    "... -> ...",
    dtype="first",
    vjp=linear_in_first(lambda g, x, *, axes, count: o.only_first(g, axes=axes, count=count)),
    linear=((0,),),
    compiles=False,
    by_rank=True,
)
def only_first(x, *, axes, count):
    """x on the first rank along the axes, zeros on the others."""
    return x if communicator().index(axes) == 0 else torch.zeros_like(x)


@op(
    "..., r^ -> ...",
    dtype="first",
    compiles=False,
    by_rank=True,
    into=("ranks.added_own_row({0}, {1}, {axes}, {count})",),
)
def add_own_row(x, row, *, axes, count):
    """x, the part of which that is this rank's has `row` added: part i of `count`, each as many elements as the row
    has, of x as it lies."""
    return added_own_row(x.clone(), row, axes, count)


def added_own_row(x, row, axes, count):
    """The same over x itself."""
    start = communicator().index(axes) * row.numel()
    n = max(0, min(row.numel(), x.numel() - start))
    x.view(-1)[start : start + n] += row.view(-1)[:n]
    return x


@op(
    types=lambda *, axes, count: Type(torch.int64, ()),
    vjp=lambda g, y, **_: (),
    free=True,
    compiles=False,
    by_rank=True,
)
def place(*, axes, count, device=None):
    """This rank's index along the axes."""
    return torch.tensor(communicator().index(axes), device=device)


def each(i, axes, count, kind="+", dims=(), sizes=(), to=(), rows=0):
    """The params of one of several collectives that go together."""
    params = {"axes": axes, "count": count}
    params |= {} if kind == "+" else {"kind": kind}
    params |= {"to": to} if to else {}
    params |= {"rows": rows} if rows else {}
    return params | ({"dim": dims[i]} if dims else {}) | ({"size": sizes[i]} if sizes else {})


def finish_types(token, *xs, op, **how):
    if OPS[op].collective.counted:  # one tensor, and how many of its rows go where
        return OPS[op].infer(list(xs), each(0, **how))
    return tuple(OPS[op].infer([x], each(i, **how))[0] for i, x in enumerate(xs))


@op(types=lambda *xs, **_: Type(torch.int64, ()), compiles=False, by_rank=True, effect=True)
def begin(*xs, op, axes, count, kind="+", dims=(), sizes=(), to=(), rows=0):
    """Begin a collective on several tensors, or one whose rows are counted; `finish` waits for it."""
    if op == "permute_ranks":
        return communicator().start("permute", xs, axes=axes, to=to)
    if op == "exchange_rows":
        x, sent, got = xs
        return communicator().start(op, [x], axes=axes, rows=rows, sent=sent.tolist(), got=got.tolist())
    how = {"dim": list(dims)} if dims else {}
    how |= {"kind": kind} if op in ("all_reduce", "reduce_scatter") else {}
    xs = [padded(x, d, count) for x, d in zip(xs, dims, strict=True)] if op == "reduce_scatter" else xs
    return communicator().start(op, xs, axes=axes, **how)


@op(types=finish_types, free=True, compiles=False, by_rank=True)
def finish(token, *xs, op, axes, count, kind="+", dims=(), sizes=(), to=(), rows=0):
    """What a collective that was begun has brought."""
    ys = communicator().wait(token)
    if op == "all_gather":
        ys = cut(ys, dims, sizes)
    return tuple(ys) if len(ys) > 1 else ys[0]


def cut(ys, dims, sizes):
    """Gathered tensors without what the last parts are padded with."""
    return [y if y.shape[d] == n else y.narrow(d, 0, n) for y, d, n in zip(ys, dims, sizes, strict=True)]


def finish_into(places, token, *xs, dims, sizes):
    """`finish` of a gather of whose results some replace tensors and are written there: one place for each, or None."""
    ys = cut(communicator().wait(token, places), dims, sizes)
    for y, place in zip(ys, places, strict=True):
        if place is not None and y is not place:  # nothing was sent: a single rank
            place.copy_(y)
    return tuple(ys) if len(ys) > 1 else ys[0]


# -- from one rank to another: what programs that differ say to each other, in order by their tags


@op(types=lambda *xs, **_: Type(torch.int64, ()), free=True, compiles=False, by_rank=True, effect=True)
def begin_send(*xs, axes, count, to, tag):
    """Begin to send tensors to the rank with the index `to` along the axes, which receives them under the same tag."""
    return communicator().start_send(xs, axes, to, tag)


@op(types=lambda token, *xs, **_: Type(torch.int64, ()), free=True, compiles=False, by_rank=True, effect=True)
def finish_send(token, *xs, axes, count, to, tag):
    """Wait until tensors have been taken; until then nobody may write over them."""
    communicator().wait_sent(token)
    return token


@op(types=lambda *, shapes, dtypes, **_: Type(torch.int64, ()), free=True, compiles=False, by_rank=True, effect=True)
def begin_receive(*, axes, count, source, tag, shapes, dtypes):
    """Be ready for tensors of these shapes and types from the rank with the index `source` along the axes."""
    return communicator().start_receive(shapes, dtypes, axes, source, tag)


def received_types(token, *, shapes, dtypes, **_):
    return tuple(Type(dtype, shape) for shape, dtype in zip(shapes, dtypes, strict=True))


@op(types=received_types, free=True, compiles=False, by_rank=True, effect=True)
def finish_receive(token, *, axes, count, source, tag, shapes, dtypes):
    """What another rank has sent."""
    ys = communicator().wait_received(token)
    return tuple(ys) if len(ys) > 1 else ys[0]


def padded(x, dim, count):
    """x with zeros behind it along `dim`, so that it has `count` equal parts."""
    n = x.shape[dim]
    more = -(-n // count) * count - n
    if not more:
        return x
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, x.new_zeros(shape)], dim)
