"""What each collective packs, sends and unpacks; whole tensors in, whole tensors out.

A collective is a generator over the messages of a group (`run/groups.py`): it packs its tensors, yields the messages
that are then under way, and when they have come, unpacks and returns.  Several tensors of one type go in one message:

    all_reduce        [ a | b | c ]                 summed where it lies; the results are views of it
    all_gather        [ a | b | c ] of each rank    one row each; a column is one tensor's parts
    reduce_scatter    a row for each rank, of its parts of a, b and c; exchange_chunks likewise
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch

from mycel.errors import RunError
from mycel.ops.collective import together
from mycel.run.groups import RankGroup, Works, wide

Tensor = torch.Tensor
Places = Sequence[Tensor | None] | None  # where results are wanted
Messages = Generator[Works, Places, list[Tensor]]


def begin(group: RankGroup, name: str, xs: Sequence[Tensor], how: dict[str, Any]) -> Messages:
    """A collective of one bucket."""
    return COLLECTIVES[name](group, [_plain(x) for x in xs], **how)


def buckets(name: str, xs: Sequence[Tensor], count: int, how: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
    """The tensors that travel together between so many ranks, by their positions, with the arguments for them: those of
    one type; of gathers and scatters as many as one message is good for."""
    messages = together(name, [((x.dtype, x.device), x.nbytes) for x in xs], count)
    if "dim" not in how:
        return [(bucket, how) for bucket in messages]
    dims = [how["dim"]] * len(xs) if isinstance(how["dim"], int) else how["dim"]
    return [(bucket, {**how, "dim": [dims[i] for i in bucket]}) for bucket in messages]


def finish(messages: Messages, places: Places = None) -> list[Tensor]:
    """What a collective returns once its messages have come; of a gather, in these places."""
    try:
        messages.send(places)
    except StopIteration as done:
        return done.value
    raise AssertionError("a collective has messages to send after its last")


def all_reduce(group: RankGroup, xs: list[Tensor], kind: str = "+") -> Messages:
    if kind == "+":
        x = _joined(xs, group.adds(xs[0].dtype), fresh=True)
        yield group.sum(x)
        return _views(_as(x, xs[0].dtype), xs)
    # brought together and compared here: the networks' own maximum loses NaN
    x = _joined(xs, xs[0].dtype)
    parts = x.new_empty(group.count, x.numel())
    yield group.gather(parts, x)
    return _views(_reduced(parts, kind), xs)


def all_gather(group: RankGroup, xs: list[Tensor], dim: list[int]) -> Messages:
    x = _joined(xs, xs[0].dtype)
    parts = x.new_empty(group.count, x.numel())
    places = yield group.gather(parts, x)
    each = parts.split([x.numel() for x in xs], 1) if len(xs) > 1 else [parts]
    return [
        _side_by_side(p.view(group.count, *x.shape), d, place)
        for p, x, d, place in zip(each, xs, dim, places or [None] * len(xs), strict=True)
    ]


def reduce_scatter(group: RankGroup, xs: list[Tensor], dim: list[int], kind: str = "+") -> Messages:
    shaped = [_parted(x, d, group.count) for x, d in zip(xs, dim, strict=True)]
    x = _in_rows(shaped)
    if kind == "+" and group.scatters:
        x = _as(x, group.adds(x.dtype))
        y = x.new_empty(x.shape[1])
        yield group.scatter(y, x)
    else:
        parts = torch.empty_like(x)
        yield group.exchange(parts, x)
        y = _reduced(parts, kind)
    return _views(_as(y, xs[0].dtype), [p[0] for p in shaped])


def all_to_all(group: RankGroup, xs: list[Tensor], split: int, join: int) -> Messages:
    x = _parted(xs[0], split, group.count).contiguous()
    parts = torch.empty_like(x)
    yield group.exchange(parts, x)
    return [_side_by_side(parts, join)]


def exchange_chunks(group: RankGroup, xs: list[Tensor]) -> Messages:
    x = _in_rows([x.reshape(group.count, x.numel() // group.count) for x in xs])
    parts = torch.empty_like(x)
    yield group.exchange(parts, x)
    widths = [x.numel() // group.count for x in xs]
    return [part.reshape(y.shape) for part, y in zip(parts.split(widths, 1), xs, strict=True)]


def gather_chunks(group: RankGroup, xs: list[Tensor]) -> Messages:
    x = _joined(xs, xs[0].dtype)
    parts = x.new_empty(group.count, x.numel())
    yield group.gather_small(parts, x)
    each = parts.split([x.numel() for x in xs], 1)
    return [p.reshape(group.count * x.shape[0], *x.shape[1:]) for p, x in zip(each, xs, strict=True)]


def permute(group: RankGroup, xs: list[Tensor], to: tuple[int, ...]) -> Messages:
    x, me, n = xs[0].contiguous(), group.index, xs[0].numel()
    comes = me in to
    y = torch.empty_like(x) if comes else torch.zeros_like(x)
    nothing = x.new_empty(0)
    received = [n if to[i] == me else 0 for i in range(group.count)]
    sent = [n if to[me] == i else 0 for i in range(group.count)]
    yield group.exchange(y if comes else nothing, x if to[me] >= 0 else nothing, received, sent)
    return [y]


def exchange_rows(group: RankGroup, xs: list[Tensor], sent: list[int], got: list[int], rows: int) -> Messages:
    x = xs[0].contiguous()
    y, width = x.new_empty(rows, *x.shape[1:]), math.prod(x.shape[1:])
    counts = [[n * width for n in per_rank] for per_rank in (got, sent)]
    yield group.exchange(y.view(-1)[: sum(counts[0])], x.view(-1)[: sum(counts[1])], *counts)
    return [y]


class TransferPiece(Protocol):
    """A piece that goes from rank to rank (plan/across.py: Transfer): where it lies in the sender's part and in the
    receiver's."""

    source: int
    target: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]


def exchange(group: RankGroup, xs: list[Tensor], pieces: Sequence[TransferPiece], shape: Sequence[int]) -> Messages:
    x, me = xs[0], group.index
    y = x.new_zeros(tuple(shape))
    out = sorted((p for p in pieces if p.source == me != p.target), key=lambda p: p.target)
    come = sorted((p for p in pieces if p.target == me != p.source), key=lambda p: p.source)
    count = [
        [sum(math.prod(p.shape) for p in ps if getattr(p, end) == i) for i in range(group.count)]
        for ps, end in ((come, "source"), (out, "target"))
    ]
    sent = torch.cat([x.new_empty(0), *(box_of(x, p.source_start, p.shape).reshape(-1) for p in out)])
    received = x.new_empty(sum(count[0]))
    yield group.exchange(received, sent, *count)
    for p, values in zip(come, received.split([math.prod(p.shape) for p in come]), strict=True):
        box_of(y, p.target_start, p.shape).copy_(values.view(p.shape))
    for p in pieces:
        if p.source == me == p.target:
            box_of(y, p.target_start, p.shape).copy_(box_of(x, p.source_start, p.shape))
    return [y]


def box_of(x: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A piece of a tensor, in its memory."""
    return x[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


COLLECTIVES: dict[str, Callable[..., Messages]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "exchange_chunks": exchange_chunks,
    "gather_chunks": gather_chunks,
    "permute": permute,
    "exchange": exchange,
    "exchange_rows": exchange_rows,
}


def _plain(x: Tensor) -> Tensor:
    """The numbers as they lie in memory, and no gradient."""
    x = x.detach() if x.requires_grad else x
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _joined(xs: list[Tensor], dtype: torch.dtype, fresh: bool = False) -> Tensor:
    """All elements one behind the other; `fresh`: in memory of their own."""
    if len(xs) > 1:
        return _as(torch.cat([x.reshape(-1) for x in xs]), dtype)
    x = _as(xs[0], dtype)
    x = x.clone(memory_format=torch.contiguous_format) if fresh and x is xs[0] else x.contiguous()
    return x.view(-1)


def _in_rows(parts: list[Tensor]) -> Tensor:
    """Of each tensor the first dim is a row for each rank: all of a row one behind the other."""
    count = parts[0].shape[0]
    rows = [p.reshape(count, p.numel() // count) for p in parts]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).contiguous()


def _views(x: Tensor, like: list[Tensor]) -> list[Tensor]:
    """`_joined` turned round."""
    if len(like) == 1:
        return [x.view(like[0].shape)]
    return [part.view(y.shape) for part, y in zip(x.split([y.numel() for y in like]), like, strict=True)]


def _parted(x: Tensor, dim: int, count: int) -> Tensor:
    """A dim of n -> a new first dim of `count` parts, n / count left."""
    dim, size = dim % x.ndim, x.shape[dim]
    if size % count:
        raise RunError(
            f"a dim of {size} has no {count} equal parts\n  at        dim {dim} of {list(x.shape)}\n"
            "  try       padding it first"
        )
    parts = x.view(*x.shape[:dim], count, size // count, *x.shape[dim + 1 :])
    return parts.movedim(dim, 0) if dim else parts


def _side_by_side(parts: Tensor, dim: int, place: Tensor | None = None) -> Tensor:
    """The first dim -> parts along `dim` of the others, in a place or anywhere."""
    count, *shape = parts.shape
    if place is not None:
        _parted(place, dim, count).copy_(parts)
        return place
    dim %= len(shape)
    shape[dim] *= count
    return (parts.movedim(0, dim) if dim else parts).reshape(shape)


def _reduced(parts: Tensor, kind: str) -> Tensor:
    """The rows' sum (rounded once), maximum or minimum."""
    if kind == "+":
        y = _as(parts[0], wide(parts.dtype)) + parts[1]
        for part in parts[2:]:
            y += part
        return _as(y, parts.dtype)
    larger = {">": torch.maximum, "<": torch.minimum}[kind]
    y = larger(parts[0], parts[1])
    for part in parts[2:]:
        y = larger(y, part)
    return y
