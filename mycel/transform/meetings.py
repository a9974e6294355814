"""What is known of a value that is one thing where rows and columns meet, and another elsewhere.

    Meeting   `yes` where an index is in a region and some integers are equal there, else `no`
              logical_and(eq(a, c), below)    yes True, no False
              where(that, 0.0, -inf)          yes 0.0, no -inf

Values are followed through operators on elements by truth tables, as in `indexed.py`, and through those that move
elements by the change of index.  What a comparison of positions says holds within a document
(`document_positions.py`); where it meets the equality of documents, that is all there is to know.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel.ir import Atom, Eqn, Var, is_float
from mycel.ops import o
from mycel.transform.document_positions import Counting, DocumentPositions, Pair, moved_pair, positions_of
from mycel.transform.fold import is_pointwise
from mycel.transform.indexed import Either, Value, broadcast, change_of_index, element_of, number_of, run_on
from mycel.transform.regions import ALL, NONE, Affine, Region, Shape, meet, moved
from mycel.transform.sides import Change, Equal, Side

LOW = -1e30  # what is as good as minus infinity where it is added
MOST = 3  # values that an operator on elements takes together


@dataclass(frozen=True)
class Meeting:
    """`yes` inside a region where all is equal, else `no`."""

    region: Region
    keys: tuple[Equal, ...]
    yes: Any
    no: Any
    within: frozenset[Pair] = frozenset()  # where these are not of one document, it may be either

    def moved(self, change: Change, new: Shape) -> Meeting | None:
        region = moved(self.region, change, new)
        keys = tuple(equal for key in self.keys if (equal := key.moved(change, new)) is not None)
        within = [moved_pair(pair, change, new) for pair in self.within]
        if region is None or len(keys) < len(self.keys) or None in within:
            return None
        return Meeting(region, keys, self.yes, self.no, frozenset(pair for pair in within if pair is not None))


@dataclass
class Following:
    """Follows the equations of a block; `known` are its values that are functions of their index."""

    known: dict[Var, Value]
    meetings: dict[Var, Meeting] = field(default_factory=dict)
    sides: dict[Var, Side] = field(default_factory=dict)
    producers: dict[Var, Eqn] = field(default_factory=dict)
    positions: DocumentPositions = field(default_factory=DocumentPositions)

    def look_ahead(self, eqns: Sequence[Eqn]) -> None:
        """Finds which tensors are positions of documents, for comparisons that come before."""
        producers = {v: eqn for eqn in eqns for v in eqn.outputs}
        if any(eqn.op is o.cumsum and positions_of(eqn, producers) is not None for eqn in eqns):
            ahead = Following(self.known)
            for eqn in eqns:
                ahead.follow(eqn)
            self.positions.along.update(ahead.positions.along)

    def certain(self, x: Atom) -> Meeting | None:
        """What is known of a value everywhere."""
        meeting = self.meetings.get(x) if isinstance(x, Var) else None
        return meeting if meeting is not None and not meeting.within else None

    def follow(self, eqn: Eqn) -> None:
        """What an equation makes."""
        self.producers.update((v, eqn) for v in eqn.outputs)
        if len(eqn.outputs) != 1 or eqn.outputs[0] in self.known or not eqn.inputs:
            return
        (out,) = eqn.outputs
        x = eqn.inputs[0]
        change = change_of_index(eqn, x.shape, out.shape) if isinstance(x, Var) else None
        if change is not None and isinstance(x, Var):
            self._move(x, out, change)
            self.positions.move(eqn, change)
        elif eqn.op is o.cumsum:
            if (p := positions_of(eqn, self.producers)) is not None:
                self.positions.see(eqn, self.side(p))
        elif eqn.op is o.index:
            self._index(eqn, out)
        elif eqn.op in (o.eq, o.ne) and (key := self._equal(eqn, out)) is not None:
            self.meetings[out] = Meeting(ALL, (key,), eqn.op is o.eq, eqn.op is not o.eq)
        elif (compared := self._compared(eqn)) is not None:
            self.meetings[out] = compared
        elif is_pointwise(eqn.op) and (meeting := self._pointwise(eqn, out)) is not None:
            self.meetings[out] = meeting

    def side(self, x: Var) -> Side:
        """A tensor by what it was expanded from, or by itself."""
        return self.sides.get(x, Side(x, tuple(d if n > 1 else None for d, n in enumerate(x.shape))))

    def meeting(self, x: Var) -> Meeting | None:
        """What is known of a value; of a bool one at least that it is True where it is."""
        if x in self.meetings or x.dtype != torch.bool:
            return self.meetings.get(x)
        return Meeting(ALL, (Equal(None, None, self.side(x)),), True, False)

    def _move(self, x: Var, out: Var, change: Change) -> None:
        meeting, side = self.meetings.get(x), self.side(x).moved(change, out.shape)
        if side is not None:
            self.sides[out] = side
        whole = meeting.moved(change, out.shape) if meeting is not None else None
        if whole is not None:
            self.meetings[out] = whole

    def _index(self, eqn: Eqn, out: Var) -> None:
        """index(x, i, j) where i and j count along dims of the result."""
        x, indices = eqn.inputs[0], eqn.inputs[1:]
        if not isinstance(x, Var) or tuple(eqn.params["at"]) != tuple(range(x.ndim)):
            return
        dims: list[int | None] = [None] * out.ndim
        for d, i in enumerate(indices):
            counted = self._counted(i, out.shape)
            if counted is None or (counted < 0) != (x.shape[d] == 1):
                return
            if counted >= 0:
                if dims[counted] is not None or out.shape[counted] != x.shape[d]:
                    return
                dims[counted] = d
        self.sides[out] = self.side(x).under(Side(x, tuple(dims)))

    def _counted(self, i: Atom, shape: Shape) -> int | None:
        """The dim along which an index counts from 0; -1: it is 0."""
        value = self.known.get(i) if isinstance(i, Var) else None
        if value is None or not isinstance(i, Var):
            return None
        if number_of(value) == 0:
            return -1
        if not isinstance(value, Affine):
            return None
        a = broadcast(i.shape, shape)(value)
        along = [d for d, step in enumerate(a.steps) if step]
        return along[0] if a.offset == 0 and len(along) == 1 and a.steps[along[0]] == 1 else None

    def _equal(self, eqn: Eqn, out: Var) -> Equal | None:
        """Integers of which neither is known, or whose difference is compared with zero."""
        x, y = eqn.inputs
        before = self.producers.get(x) if isinstance(x, Var) and y == 0 and not isinstance(y, bool) else None
        if before is not None and before.op is o.sub:
            x, y = before.inputs
        if not isinstance(x, Var) or not isinstance(y, Var) or is_float(x.dtype) or is_float(y.dtype):
            return None
        if x in self.known or y in self.known or x.dtype != y.dtype or x.dtype.is_complex:
            return None
        one, other = (self.side(v).moved(broadcast(v.shape, out.shape), out.shape) for v in (x, y))
        whole = self.side(out) if eqn.op is o.eq else None
        return Equal(one, other, whole) if one is not None and other is not None else None

    # -- operators on elements

    def _compared(self, eqn: Eqn) -> Meeting | None:
        """A comparison of positions, within their documents."""
        operands: list[Counting | Value | None] = []
        for x in eqn.inputs:
            value = self.known.get(x) if isinstance(x, Var) else None
            operands.append(value or (self.positions.of(x, self.side(x)) if isinstance(x, Var) else None))
            if operands[-1] is None and isinstance(x, Var):
                return None
        compared = self.positions.follow(eqn, operands)
        return None if compared is None else Meeting(compared[0].region, (), True, False, frozenset({compared[1]}))

    def _pointwise(self, eqn: Eqn, out: Var) -> Meeting | None:
        """An operator on elements, by its kernel on one element for each combination of what its operands are."""
        kinds: list[tuple[Region, tuple[Equal, ...]]] = []
        tables: list[tuple[int | None, bool, Any]] = []
        for x in eqn.inputs:
            value: Any = self.known.get(x, self.meeting(x)) if isinstance(x, Var) else Either(ALL, x, x)
            if value is None:
                return None
            number = number_of(value) if not isinstance(value, Meeting) else None
            if isinstance(value, Affine) and number == 0 and isinstance(x, Var) and is_float(x.dtype):  # which zero?
                return None
            value = Either(ALL, number, number) if number is not None else value
            if not isinstance(value, Either | Meeting):
                return None
            value = self._over(value, x, out.shape)
            if value is None:
                return None
            kind = value.region, value.keys if isinstance(value, Meeting) else ()
            tables.append((*_place_of(kind, kinds), value))
        if not any(keys for _, keys in kinds) and not any(_within(value) for *_, value in tables):
            return None
        return self._result(eqn, kinds, tables, out)

    def _over(self, value: Any, x: Atom, shape: Shape) -> Any:
        """An operand's value over the index of the result."""
        if not isinstance(x, Var) or x.shape == shape:
            return value
        change = broadcast(x.shape, shape)
        if isinstance(value, Meeting):
            return value.moved(change, shape)
        region = moved(value.region, change, shape)
        return None if region is None else Either(region, value.yes, value.no)

    def _result(self, eqn: Eqn, kinds: Any, tables: Any, out: Var) -> Meeting | None:
        if len(kinds) > MOST:
            return None
        results: dict[tuple[bool, ...], Any] = {}
        within = frozenset(pair for *_, value in tables for pair in _within(value))
        for inside in itertools.product((True, False), repeat=len(kinds)):
            if not within and _never(kinds, inside, out.shape):
                continue
            chosen = [v.yes if at is None or inside[at] != turned else v.no for at, turned, v in tables]
            results[inside] = self._element(eqn, chosen)
            if results[inside] is None:
                return None
        meeting = _conjunction(results, kinds, out.shape)
        if meeting is None or not within:
            return meeting
        unproven = {pair for pair in within if not self._is_settled(eqn, pair, [v for *_, v in tables], meeting)}
        return replace(meeting, within=frozenset(unproven))

    def _is_settled(self, eqn: Eqn, pair: Pair, values: Sequence[Any], meeting: Meeting) -> bool:
        """Is the result `no` outside of a document, whatever the other operands are there?"""
        for at, value in enumerate(values):
            keys = value.keys if isinstance(value, Meeting) and not value.within else ()
            if not any(self.positions.proves(key, pair) for key in keys):
                continue
            choices = [(v.no,) if n == at else (v.yes, v.no) for n, v in enumerate(values)]
            results = [self._element(eqn, chosen) for chosen in itertools.product(*choices)]
            if None not in results and _alike([meeting.no, *results]):
                return True
        return False

    def _element(self, eqn: Eqn, chosen: Sequence[Any]) -> Any:
        elements = [element_of(x, v) for x, v in zip(eqn.inputs, chosen, strict=True)]
        return run_on(lambda *xs: eqn.op.kernel(*xs, **eqn.params), elements)


def _within(value: Any) -> frozenset[Pair]:
    return value.within if isinstance(value, Meeting) else frozenset()


def _place_of(kind: tuple[Region, tuple[Equal, ...]], kinds: list[Any]) -> tuple[int | None, bool]:
    """(which of the conditions decides an operand, whether it is the inverse of it); new ones are added"""
    region, keys = kind
    if not keys and region in (ALL, NONE):
        return None, False
    if not keys and (region.inverse(), ()) in kinds:
        return kinds.index((region.inverse(), ())), True
    if kind not in kinds:
        kinds.append(kind)
    return kinds.index(kind), False


def _never(kinds: Sequence[Any], inside: Sequence[bool], shape: Shape) -> bool:
    """Is a combination impossible, by regions of positions alone?"""
    regions = [r if i else r.inverse() for (r, keys), i in zip(kinds, inside, strict=True) if not keys]
    return any(meet(a, b, shape) == NONE for a, b in itertools.combinations(regions, 2))


def _conjunction(results: dict[tuple[bool, ...], Any], kinds: Sequence[Any], shape: Shape) -> Meeting | None:
    """The one combination whose result is unlike all others, which are alike, as a Meeting."""
    for state, yes in results.items():
        others = [v for s, v in results.items() if s != state]
        if any(keys and not inside for (_, keys), inside in zip(kinds, state, strict=True)):
            continue
        if not others or not _alike(others) or _alike([yes, others[0]]):
            continue
        region: Region | None = ALL
        for (r, _), inside in zip(kinds, state, strict=True):
            region = None if region is None else meet(region, r if inside else r.inverse(), shape)
        if region is None:
            return None
        keys = tuple(dict.fromkeys(key for _, ks in kinds for key in ks))
        return Meeting(region, keys, yes, max(others))
    return None


def _alike(values: Sequence[Any]) -> bool:
    """All the same, or all as good as minus infinity."""
    if all(isinstance(v, float) and v <= LOW for v in values):
        return True
    return len(set(map(repr, values))) == 1
