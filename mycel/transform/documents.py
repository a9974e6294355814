"""Masks that let rows see columns of the same document become operands of attention; so does padding.

    r: i64[2,1,512,1]     = reshape(ids, shape=(2, 1, 512, 1))
    c: i64[2,1,1,512]     = reshape(ids, shape=(2, 1, 1, 512))
    e: bool[2,1,512,512]  = eq(r, c)
    m: bool[2,1,512,512]  = logical_and(e, below)             n: i64[2,512,1] = reshape(ids, shape=(2, 512, 1))
    y, lse = attention(query, key, value, m)              =>  y, lse = attention(query, key, value, None, None, n, n,
                                                                                 causal=True)

A mask is followed as a conjunction (`meetings.py`): of a region of positions, of integers of rows that equal those of
columns, and of yes or no for rows or columns alone.  One that is added counts as well, if it is zero and minus
infinity; a finite least number does so where every row sees itself, for a row that sees nothing would look at
everything.  Blocks are followed through their calls: a block that is given a mask is given its documents beside it, and
calls with different structure get blocks of their own.  What is no such conjunction, or small, stays a mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel.ir import Block, Builder, Eqn, Params, Program, Ref, Type, Var, call, prune
from mycel.ops import o
from mycel.transform.causal import KnownValues, is_low, mask_inputs, mask_place, masks, structure_of
from mycel.transform.indexed import Values, broadcast
from mycel.transform.meetings import Following, Meeting
from mycel.transform.regions import Region, Shape, moved
from mycel.transform.sides import Equal, Side

LEAST = 1 << 15  # pairs of rows and columns below which a mask is as fast: a CPU gains from 256 x 256 on


@dataclass(frozen=True)
class GivenMask:
    """What a block knows of a mask that it is given: its region and values, and for each equality which of its new
    inputs are documents of rows and of columns; None: a constant."""

    region: Region
    yes: Any
    no: Any
    keys: tuple[tuple[int | None, int | None], ...]
    types: tuple[Type, ...]


def documents(program: Program) -> Program:
    """attention(q, k, v, row document == column document) => attention(q, k, v, None, None, rows, columns)"""
    if not masks(program):
        return program
    writer = _DocumentedBlocks(program)
    writer.visit(program.entry, (None,) * len(program.inputs))
    return prune(replace(program, blocks=writer.blocks)) if writer.changed else program


class _DocumentedBlocks:
    """Writes the blocks anew, from the entry on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.asked = mask_inputs(program)
        self.seen: dict[str, Values] = KnownValues(program).inputs
        self.known = KnownValues(program)
        self.blocks: dict[str, Block] = {}
        self.names: dict[tuple[str, tuple[GivenMask | None, ...]], str] = {}
        self.changed = False

    def visit(self, name: str, given: tuple[GivenMask | None, ...]) -> str:
        """The block for calls that know so much of its inputs; what is given beside them comes behind them."""
        if (name, given) not in self.names:
            numbered = (f"{name}_{i}" for i in itertools.count(1))
            fresh = itertools.chain([name], (n for n in numbered if n not in self.program.blocks))
            self.names[name, given] = next(n for n in fresh if n not in self.names.values())
            self.blocks[self.names[name, given]] = self._block(name, given)
        return self.names[name, given]

    def _block(self, name: str, given: tuple[GivenMask | None, ...]) -> Block:
        block = self.program.blocks[name]
        b = Builder(names_of=block)
        following = Following(self.known.values(block, self.seen[name]))
        following.look_ahead(block.eqns)
        inputs = list(block.inputs)
        for v, knows in zip(block.inputs, given, strict=True):
            if knows is not None:
                beside = [b.input("documents", type_) for type_ in knows.types]
                inputs.extend(beside)
                following.meetings[v] = _meeting(knows, beside, v)
        canonical = _Canonical(b)
        for eqn in block.eqns:
            b.at(eqn)
            b.eqns.append(self._equation(eqn, following, canonical))
            following.follow(eqn)
        return Block(tuple(inputs), tuple(b.eqns), block.outputs)

    def _equation(self, eqn: Eqn, following: Following, canonical: _Canonical) -> Eqn:
        at = mask_place(eqn)
        if eqn.op is call:
            return self._call(eqn, following, canonical)
        for ref in eqn.refs:
            self.visit(str(ref), (None,) * len(self.program.blocks[ref].inputs))
        if at is None or eqn.op is not o.attention or len(eqn.inputs) > at + 2:
            return eqn
        mask = eqn.inputs[at]
        assert isinstance(mask, Var)
        meeting = following.certain(mask)
        shown = _documented(eqn, at, mask, meeting, canonical) if meeting is not None else None
        self.changed = self.changed or shown is not None
        return shown or eqn

    def _call(self, eqn: Eqn, following: Following, canonical: _Canonical) -> Eqn:
        name = str(eqn.params["block"])
        given: list[GivenMask | None] = [None] * len(eqn.inputs)
        beside: list[Var] = []
        for i in sorted(self.asked[name]):
            x = eqn.inputs[i]
            meeting = following.certain(x)
            keys = _oriented(meeting, x.shape) if meeting is not None and isinstance(x, Var) else None
            if meeting is not None and isinstance(x, Var) and keys and math.prod(x.shape[-2:]) >= LEAST:
                places, own = canonical.inputs(keys, x)
                types = tuple(v.type for v in own)
                given[i] = GivenMask(meeting.region, meeting.yes, meeting.no, places, types)
                beside.extend(own)
        params = Params(eqn.params | {"block": Ref(self.visit(name, tuple(given)))})
        return replace(eqn, inputs=(*eqn.inputs, *beside), params=params)


def _meeting(given: GivenMask, beside: Sequence[Var], mask: Var) -> Meeting:
    """A mask that a block is given, by the documents beside it."""
    lead = (None,) * (mask.ndim - 4)

    def side(at: int | None, place: int) -> Side | None:
        if at is None:
            return None
        batch = 0 if mask.ndim >= 4 and beside[at].shape[0] > 1 else None
        rest: list[int | None] = [None, None]
        rest[place] = 1 if beside[at].shape[1] > 1 else None
        return Side(beside[at], (*lead, batch, None, *rest)[-mask.ndim :])

    def equal(row: Side | None, column: Side | None) -> Equal:
        return Equal(row, column, None) if row and column else Equal(None, None, row or column)

    keys = tuple(equal(side(row, 0), side(column, 1)) for row, column in given.keys)
    return Meeting(given.region, keys, given.yes, given.no)


def _documented(eqn: Eqn, at: int, mask: Var, meeting: Meeting, canonical: _Canonical) -> Eqn | None:
    """The attention with documents instead of its mask."""
    q, k = eqn.inputs[:2]
    assert isinstance(q, Var) and isinstance(k, Var)
    keys = _oriented(meeting, mask.shape)
    structure = _positions(meeting.region, mask.shape, (*q.shape[:3], k.shape[2]))
    if not keys or structure is None or math.prod(mask.shape[-2:]) < LEAST or not _masks(meeting, mask.dtype):
        return None
    if not structure and not any(row and column for row, column in keys):  # padding alone broadcasts as it is
        return None
    places, own = canonical.inputs(keys, mask)
    is_sure = q.shape[2] == k.shape[2] and all(row == column is not None for row, column in places)
    if meeting.no is not False and meeting.no != -math.inf and not is_sure:
        return None
    rows, columns = canonical.operands(places, own, q, k)
    more = (*eqn.inputs[at + 1 : at + 2], *(None,) * (at + 2 - len(eqn.inputs)), rows, columns)
    return replace(eqn, inputs=(*eqn.inputs[:at], None, *more), params=Params(eqn.params | structure))


def _masks(meeting: Meeting, dtype: torch.dtype) -> bool:
    """Is it True or zero where rows see columns, and hides the rest?"""
    if dtype == torch.bool:
        return meeting.yes is True and meeting.no is False
    return meeting.yes == 0 and is_low(meeting.no, dtype)


def _positions(region: Region, old: Shape, new: Shape) -> dict[str, Any] | None:
    """A region of a mask as params of attention over scores."""
    scores = moved(region, broadcast(old, new), new) if len(old) <= len(new) and 0 not in new else None
    return None if scores is None else structure_of(scores, new, most=1.0)


def _oriented(meeting: Meeting, shape: Shape) -> list[tuple[Side | None, Side | None]] | None:
    """Each equality as (side of rows, side of columns), the first batch and place; None where one is no such."""
    keys: list[tuple[Side | None, Side | None]] = []
    for equal in meeting.keys:
        sides = (equal.one, equal.other), (equal.other, equal.one), (equal.whole, None), (None, equal.whole)
        fitting = [
            (row, column)
            for row, column in sides
            if (row or column) and _is_along(row, shape, -2) and _is_along(column, shape, -1)
        ]
        if not fitting:
            return None
        keys.append(fitting[0])
    return list(dict.fromkeys(keys))


def _is_along(side: Side | None, shape: Shape, place: int) -> bool:
    """Does it tell apart nothing but samples of the batch, and rows (-2) or columns (-1)?"""
    if side is None or len(shape) < 2:
        return side is None
    return all(d is None or m - len(shape) in (-4, place) for m, d in enumerate(side.dims))


@dataclass
class _Canonical:
    """Writes sides of equalities as documents [batch, places], each once in a block."""

    b: Builder
    flat: dict[tuple[Var, int | None, int | None], Var] = field(default_factory=dict)

    def inputs(self, keys: Sequence[tuple[Side | None, Side | None]], mask: Var) -> tuple[Any, tuple[Var, ...]]:
        """(for each equality which of the documents are those of rows and columns, the documents)"""
        own: list[Var] = []
        places = tuple((self._place(row, -2, mask, own), self._place(column, -1, mask, own)) for row, column in keys)
        return places, tuple(own)

    def _place(self, side: Side | None, place: int, mask: Var, own: list[Var]) -> int | None:
        if side is None:
            return None
        flat = self._flat(side, place, mask)
        if flat not in own:
            own.append(flat)
        return own.index(flat)

    def _flat(self, side: Side, place: int, mask: Var) -> Var:
        batch = side.dims[-4] if mask.ndim >= 4 else None
        at = side.dims[place]
        key = side.of, batch, at
        if key not in self.flat:
            x: Any = side.of
            with self.b:
                if batch is not None and at is not None and at < batch:
                    x = o.permute(x, dims=_swapped(x.ndim, batch, at))
                shape = tuple(1 if d is None else side.of.shape[d] for d in (batch, at))
                x = x if x.shape == shape else o.reshape(x, shape=shape)
                self.flat[key] = x if x.dtype == torch.int64 else o.cast(x, dtype=torch.int64)
        return self.flat[key]

    def operands(self, places: Any, own: Sequence[Var], q: Var, k: Var) -> tuple[Var, Var]:
        """Operands of attention: [batch, rows, equalities], and of columns."""
        return self._stacked([r for r, _ in places], own, q), self._stacked([c for _, c in places], own, k)

    def _stacked(self, places: Sequence[int | None], own: Sequence[Var], like: Var) -> Any:
        shape = like.shape[0], like.shape[2], 1
        with self.b:
            parts = [self._column(None if at is None else own[at], shape) for at in places]
            return parts[0] if len(parts) == 1 else o.cat(*parts, dim=2)

    def _column(self, x: Var | None, shape: Shape) -> Any:
        """Documents as one column; ones where anything goes."""
        if x is None:
            return o.full(1, shape=shape, dtype=torch.int64)
        x = o.reshape(x, shape=(*x.shape, 1))
        return x if x.shape == shape else o.expand(x, shape=shape)


def _swapped(ndim: int, a: int, b: int) -> tuple[int, ...]:
    dims = list(range(ndim))
    dims[a], dims[b] = b, a
    return tuple(dims)
