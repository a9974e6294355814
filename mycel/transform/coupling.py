"""Where rows of the batch meet before the loss sums them up: what parts of a batch cannot compute alone.

The program of a part and that of the whole batch are the same equations with other sizes: a dim whose size differs runs
over the batch.  Of values that depend on the batch,

    one with two such dims                       s[b,b] = x[b,d] y[b,d]ᵀ         every row meets every other
    one over the batch from one that sums it up  x[b,d] - mean[d]                every row meets all of them
    a dim of the batch that must stay whole      batch_norm, softmax over rows   by way of the operator's expansion
                                                 x[permutation], sort, flip      an operator that has none moves rows

A row looked up at its own place, x[arange(b), y], stays where it is.  A loss of such values over a part is not the
part's share in the loss over the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mycel.ir import CONTROL, Atom, Block, Builder, Eqn, Program, Var, call, is_float
from mycel.ops import o

# rows stay in their order; and of what is opaque nothing is known
IN_ORDER = (o.opaque, o.slice, o.cat, o.split, o.select, o.stack, o.pad, o.repeat)
ARITHMETIC = (o.add, o.mul, o.cast, o.reshape, o.expand, o.permute)  # of places


@dataclass(frozen=True)
class _Known:
    """What a value depends on, and whether it runs over the batch."""

    batch: bool = False
    trained: bool = False
    rows: int = 0  # dims that run over the batch
    place: bool = False  # where each row itself is

    @property
    def summed(self) -> bool:
        """A number of all rows."""
        return self.batch and not self.rows


def coupled(part: Program, whole: Program, trained: Collection[str], split: Collection[str]) -> list[str]:
    """The user's lines where rows meet, in a part's program; none where the programs are not the same equations."""
    inputs = [
        _Known(v.name in split, v.name in trained, _rows(v, w))
        for v, w in zip(part.main.inputs, whole.main.inputs, strict=False)
    ]
    lines: dict[str, None] = {}
    _Walk(part, whole, lines).block(part.main, whole.main, inputs)
    return list(lines)


def _rows(v: Var, w: Var) -> int:
    return sum(a != b for a, b in zip(v.shape, w.shape, strict=False))


class _Walk:
    def __init__(self, part: Program, whole: Program, lines: dict[str, None]) -> None:
        self.part, self.whole, self.lines = part, whole, lines

    def block(self, part: Block, whole: Block, inputs: Sequence[_Known]) -> list[_Known]:
        """What the results of a block are."""
        known: dict[Var, _Known] = dict(zip(part.inputs, inputs, strict=False))
        self.equations(part.eqns, whole.eqns, known)
        return [_known(x, known) for x in part.outputs]

    def equations(self, part: Sequence[Eqn], whole: Sequence[Eqn], known: dict[Var, _Known]) -> None:
        if [e.op for e in part] != [e.op for e in whole]:
            known.update((v, _Known()) for e in part for v in e.outputs)
            return
        for eqn, large in zip(part, whole, strict=True):
            given = [_known(x, known) for x in eqn.inputs]
            if eqn.op is call:
                inner = [p.blocks[e.params["block"]] for p, e in ((self.part, eqn), (self.whole, large))]
                outs = self.block(inner[0], inner[1], given)
            else:
                batch, trained = any(g.batch for g in given), any(g.trained for g in given)
                pairs = zip(eqn.outputs, large.outputs, strict=True)
                place = self.counts(eqn) or (eqn.op in ARITHMETIC and any(g.place for g in given))
                outs = [_Known(batch, trained, rows := _rows(v, w), place and rows > 0) for v, w in pairs]
                self.judge(eqn, large, given, outs)
            known.update(zip(eqn.outputs, outs, strict=True))

    def judge(self, eqn: Eqn, large: Eqn, given: Sequence[_Known], outs: Sequence[_Known]) -> None:
        """Note the line of an equation in which rows meet."""
        of_batch = [(v, k) for v, k in zip(eqn.outputs, outs, strict=True) if k.rows and k.batch]
        if not of_batch or eqn.op in CONTROL:
            return
        if eqn.op.expand is None and self.moves_rows(eqn, large, given):
            self.lines[eqn.line or eqn.op.name] = None
        over = [k for v, k in of_batch if is_float(v.dtype)]
        if not over:
            return
        if (
            any(k.rows > 1 for k in over)
            and not any(g.rows > 1 for g in given)
            or any(g.rows for g in given)
            and any(g.summed for g in given)
        ):
            self.lines[eqn.line or eqn.op.name] = None
        elif eqn.op.expand is not None and self.stays_whole(eqn, large):
            self.expanded(eqn, large, given)

    def stays_whole(self, eqn: Eqn, large: Eqn, given: Sequence[_Known] = ()) -> bool:
        """Must a dim of the batch be whole for this operator; of one of the operands that are `given`, and depend on
        the batch?"""
        if eqn.op.dims is None:
            return False
        fits = [e.op.fit(e.input_types, dict(e.params)) for e in (eqn, large)]
        whole = {k for k, n in fits[0].sizes.items() if fits[0].flags.get(k) == "^" and fits[1].sizes.get(k) != n}
        if not given:
            return bool(whole)
        items = zip(fits[0].ins, given, strict=True)
        return any(g.batch and k in whole for item, g in items for dim in item or () for k in dim)

    def counts(self, eqn: Eqn) -> bool:
        """Is it 0, 1, 2 …, or places in their order, as those of a mask?"""
        if eqn.op is o.iota:
            return (eqn.params.get("start", 0), eqn.params.get("step", 1)) == (0, 1)
        places = self.part.consts[eqn.params["name"]] if eqn.op is o.const else None
        return (
            places is not None and places.ndim == 1 and not is_float(places.dtype) and bool((places.diff() >= 0).all())
        )

    def moves_rows(self, eqn: Eqn, large: Eqn, given: Sequence[_Known]) -> bool:
        """Does a row of the result come from another place?"""
        return eqn.op not in IN_ORDER and not any(g.place for g in given[1:]) and self.stays_whole(eqn, large, given)

    def expanded(self, eqn: Eqn, large: Eqn, given: Sequence[_Known]) -> None:
        """The same for what the operator means in smaller ones."""
        eqns = []
        for e in (eqn, large):
            b = Builder()
            b.reserve(v.name for v in e.vars)
            b.source = eqn.line
            with b:
                e.op.expand(*e.inputs, **e.params)  # type: ignore[misc]
            eqns.append(b.eqns)
        known = {x: g for x, g in zip(eqn.inputs, given, strict=True) if isinstance(x, Var)}
        before = len(self.lines)
        self.equations(eqns[0], eqns[1], known)
        if len(self.lines) > before:
            for line in list(self.lines)[before:]:
                del self.lines[line]
            self.lines[eqn.line or eqn.op.name] = None


def _known(x: Atom, known: dict[Var, _Known]) -> _Known:
    return known.get(x, _Known()) if isinstance(x, Var) else _Known()
