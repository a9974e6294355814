"""Positions that start anew with each document: what a comparison of two of them says within one document.

    step      = sub(p[1:], p[:-1])
    documents = cumsum(ne(step, 1))                 a document ends where positions do not go on by one
    eq(documents[i], documents[j])                  so within one, p[i] - p[j] is i - j
    le(p[j], p[i])                                  and this is  j <= i  there; elsewhere nothing is known

A value is followed as an Affine of the index plus so many times an unknown start (`Counting`), which has to cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mycel.ir import Atom, Eqn, Var, is_float
from mycel.ops import o
from mycel.transform.indexed import Either, Value, broadcast, of_equation
from mycel.transform.regions import Affine, Shape
from mycel.transform.sides import Change, Equal, Side

STARTS = {o.add: (1, 1), o.sub: (1, -1), o.neg: (-1,), o.abs: (1,)}  # how starts of operands add up
COMPARISONS = (o.le, o.lt, o.ge, o.gt, o.eq, o.ne)

Pair = frozenset[Side]  # two places of a tensor of positions


@dataclass(frozen=True)
class Counting:
    """A value plus `starts` times the first position of a document; `sides` are the positions it was computed from."""

    value: Value
    starts: int
    sides: Pair


@dataclass
class DocumentPositions:
    """Follows positions through the equations of a block."""

    along: dict[Var, int] = field(default_factory=dict)  # positions: the dim along which they count
    documents: dict[Var, tuple[Side, int]] = field(default_factory=dict)  # their positions, the dim of the cumsum
    values: dict[Var, Counting] = field(default_factory=dict)

    def see(self, eqn: Eqn, positions: Side) -> None:
        """Keeps a cumsum that counts where `positions` do not go on by one."""
        dim = positions.dims[eqn.params["dim"]]
        if dim is not None and self.along.setdefault(positions.of, dim) == dim:
            self.documents[eqn.outputs[0]] = positions, eqn.params["dim"]

    def of(self, x: Atom, side: Side | None) -> Counting | None:
        """A value that counts with its documents, if it is one; `side` is what it was expanded from."""
        if not isinstance(x, Var) or x in self.values or side is None:
            return self.values.get(x) if isinstance(x, Var) else None
        dim = self.along.get(side.of)
        if dim is None or dim not in side.dims:
            return None
        return Counting(Affine(0, tuple(int(d == dim) for d in side.dims)), 1, frozenset({side}))

    def move(self, eqn: Eqn, change: Change) -> None:
        """The same under a change of index."""
        x, out = eqn.inputs[0], eqn.outputs[0]
        counting = self.values.get(x) if isinstance(x, Var) else None
        pair = moved_pair(counting.sides, change, out.shape) if counting is not None else None
        value = of_equation(eqn, (counting.value,)) if counting is not None else None
        if counting is not None and pair is not None and value is not None:
            self.values[out] = Counting(value, counting.starts, pair)

    def follow(self, eqn: Eqn, operands: list[Counting | Value | None]) -> tuple[Either, Pair] | None:
        """What an operator on elements makes of them; of a comparison: (where it is True, within which pair)."""
        op, out = eqn.op, eqn.outputs[0]
        counting = [v if isinstance(v, Counting) else None for v in operands]
        if not any(counting) or (op not in STARTS and op not in COMPARISONS):
            return None
        sides = [
            moved_pair(c.sides, broadcast(x.shape, out.shape), out.shape)
            for c, x in zip(counting, eqn.inputs, strict=True)
            if c is not None and isinstance(x, Var)
        ]
        value = of_equation(eqn, tuple(v.value if isinstance(v, Counting) else v for v in operands))
        if value is None or None in sides:
            return None
        pair = frozenset(side for known in sides if known is not None for side in known)
        signs = STARTS.get(op, (1, -1))
        starts = sum(sign * c.starts for sign, c in zip(signs, counting, strict=True) if c is not None)
        if op in COMPARISONS or op is o.abs:
            if starts:
                return None
            if isinstance(value, Either):
                return (value, pair) if len(pair) == 2 else None
        self.values[out] = Counting(value, starts, pair)
        return None

    def proves(self, key: Equal, pair: Pair) -> bool:
        """Is it one document where a key is equal?"""
        if key.one is None or key.other is None or key.one.of is not key.other.of or key.one.of not in self.documents:
            return False
        positions, dim = self.documents[key.one.of]
        apart = [{a, b} for a, b in zip(key.one.dims, key.other.dims, strict=True) if a != b]
        if any(dims != {dim, None} for dims in apart):
            return False
        return frozenset(positions.under(side) for side in (key.one, key.other)) == pair


def positions_of(eqn: Eqn, producers: dict[Var, Eqn]) -> Var | None:
    """The p of  cumsum(ne(sub(p[1:], p[:-1]), 1)),  whatever is put before its first."""
    dim = eqn.params["dim"]
    breaks = _producer(eqn.inputs[0], producers)
    if breaks is not None and breaks.op is o.cast:
        breaks = _producer(breaks.inputs[0], producers)
    if breaks is None or breaks.op is not o.ne or 1 not in breaks.inputs:
        return None
    step = _producer(next(x for x in breaks.inputs if x != 1), producers)
    if step is None or step.op is not o.sub:
        return None
    ends = [_producer(x, producers) for x in step.inputs]
    wholes = [e.inputs[0] for e in ends if e is not None and e.op is o.slice and e.params["dim"] == dim]
    if len(wholes) != 2 or wholes[0] is not wholes[1] or [e.params["start"] for e in ends if e] != [1, 0]:
        return None
    if any(e.params.get("step", 1) != 1 for e in ends if e):
        return None
    whole = _producer(wholes[0], producers)
    if whole is None or whole.op is not o.cat or whole.params["dim"] != dim or len(whole.inputs) != 2:
        return None
    first, p = whole.inputs
    if not isinstance(first, Var) or not isinstance(p, Var) or first.shape[dim] != 1 or is_float(p.dtype):
        return None
    return p if p.shape == eqn.outputs[0].shape else None


def _producer(x: Atom, producers: dict[Var, Eqn]) -> Eqn | None:
    return producers.get(x) if isinstance(x, Var) else None


def moved_pair(pair: Pair, change: Change, new: Shape) -> Pair | None:
    """Places of positions under a change of index."""
    sides = [side.moved(change, new) for side in pair]
    return None if None in sides else frozenset(side for side in sides if side is not None)
