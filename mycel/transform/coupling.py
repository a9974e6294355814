"""Where rows of the batch meet before the loss sums them up: what parts of a batch cannot compute alone.

The program of a part and that of the whole batch are the same equations with other sizes: a dim whose size differs runs
over the batch.  Of values that depend on the batch,

    one with two such dims                       s[b,b] = x[b,d] y[b,d]ᵀ         every row meets every other
    one over the batch from one that sums it up  x[b,d] - mean[d]                every row meets all of them
    one over the batch with numbers by place     l[b] * linspace(1, 2, b)    a row counts by where it is
    a dim of the batch that must stay whole      batch_norm, softmax over rows   by way of the operator's expansion
                                                 x[permutation], sort, flip,     an operator that has none moves rows
                                                 x.chunk(2), x[1:] - x[:-1]

A row looked up at its own place, x[arange(b), y], stays where it is, and so do those of x and y in [x, y].  A loss of
such values over a part is not the part's share in the loss over the batch.  Of opaque operators nothing is known
(`believed`), nor is anything of programs that are not the same equations, as loops over rows make them: these are tried
(`step/shares_tried.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mycel.ir import CONTROL, Atom, Block, Builder, Eqn, Params, Program, Var, call, is_float
from mycel.ops import o

IN_ORDER = (o.cat, o.stack, o.repeat, o.opaque)
ONCE_A_ROW = (o.expand, o.repeat, o.repeat_each)
SAME_NUMBERS = (o.cast, o.reshape, o.expand, o.permute)


@dataclass(frozen=True)
class _Known:
    """What a value depends on, and whether it runs over the batch."""

    batch: bool = False
    trained: bool = False
    rows: int = 0  # dims that run over the batch
    place: bool = False  # where each row itself is
    uneven: bool = False  # by its place a row has a value of its own: 1, 1.5, 2 …

    @property
    def summed(self) -> bool:
        """A number of all rows."""
        return self.batch and not self.rows


@dataclass(frozen=True)
class Coupling:
    """The user's lines where rows meet, in a part's program; whether the two programs are the same equations at all;
    and the lines of operators of which nothing is known."""

    meeting: list[str]
    are_alike: bool
    believed: list[str]


def coupled(part: Program, whole: Program, trained: Collection[str], split: Collection[str]) -> Coupling:
    """What a part's program does with rows that other parts would have to know."""
    inputs = [
        _Known(v.name in split, v.name in trained, _rows(v, w))
        for v, w in zip(part.main.inputs, whole.main.inputs, strict=False)
    ]
    walk = _Walk(part, whole, {})
    walk.block(part.main, whole.main, inputs)
    return Coupling(list(walk.lines), walk.are_alike, list(walk.believed))


def _whole_dims(eqn: Eqn, large: Eqn) -> list[list[bool]]:
    """For each operand and dim: does it run over the batch, and must be whole?"""
    if eqn.op.dims is None:
        return [[] for _ in eqn.inputs]
    fits = [e.op.fit(e.input_types, dict(e.params)) for e in (eqn, large)]
    whole = {k for k, n in fits[0].sizes.items() if fits[0].flags.get(k) == "^" and fits[1].sizes.get(k) != n}
    return [[any(k in whole for k in dim) for dim in item or ()] for item in fits[0].ins]


def _goes_on(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Are the whole batch's places those of the part, and again in each part behind it, one further on each time?"""
    if part.ndim != 1 or is_float(part.dtype) or not part.numel() or whole.numel() % part.numel():
        return False
    steps = whole.reshape(-1, part.numel()) - part
    first = steps[:, 0]
    return bool((steps == first[:, None]).all() and (first.diff() > 0).all() and first[0] == 0)


def _rows(v: Var, w: Var) -> int:
    return sum(a != b for a, b in zip(v.shape, w.shape, strict=False))


class _Walk:
    def __init__(self, part: Program, whole: Program, lines: dict[str, None]) -> None:
        self.part, self.whole, self.lines = part, whole, lines
        self.are_alike = True
        self.believed: dict[str, None] = {}

    def block(self, part: Block, whole: Block, inputs: Sequence[_Known]) -> list[_Known]:
        """What the results of a block are."""
        known: dict[Var, _Known] = dict(zip(whole.inputs, inputs, strict=False))
        self.equations(part.eqns, whole.eqns, known, dict(zip(whole.inputs, part.inputs, strict=False)))
        return [_known(x, known) for x in whole.outputs]

    def equations(
        self, part: Sequence[Eqn], whole: Sequence[Eqn], known: dict[Var, _Known], same: dict[Var, Atom]
    ) -> None:
        """What equations make of what is known of the whole batch's values; `same`: these in the part's program."""
        side_by_side = _side_by_side(part, whole, same)
        if side_by_side is None:
            known.update((v, _Known()) for e in whole for v in e.outputs)
            self.are_alike = False
            return
        for eqn, large in side_by_side:
            given = [_known(x, known) for x in large.inputs]
            if eqn.op is call:
                inner = [p.blocks[e.params["block"]] for p, e in ((self.part, eqn), (self.whole, large))]
                outs = self.block(inner[0], inner[1], given)
            else:
                batch, trained = any(g.batch for g in given), any(g.trained for g in given)
                pairs = zip(eqn.outputs, large.outputs, strict=True)
                place = self.counts(eqn, large, given)
                uneven = any(g.uneven for g in self.copied(eqn, given)) or (
                    not batch and self.is_uneven(eqn, large, given)
                )
                outs = [
                    _Known(
                        batch,
                        trained,
                        rows := _rows(v, w),
                        place and rows > 0,
                        uneven and rows > 0 and not (batch and is_float(v.dtype)),  # its line is noted
                    )
                    for v, w in pairs
                ]
                self.judge(eqn, large, given, outs)
            known.update(zip(large.outputs, outs, strict=True))

    def copied(self, eqn: Eqn, given: Sequence[_Known]) -> list[_Known]:
        """The operands whose numbers are in the result: not the own places at which rows are looked up."""
        is_own = eqn.op.looked_up is not None and given[0].rows > 0
        return [g for k, g in enumerate(given) if not (is_own and k > 0 and g.place)]

    def judge(self, eqn: Eqn, large: Eqn, given: Sequence[_Known], outs: Sequence[_Known]) -> None:
        """Note the line of an equation in which rows meet."""
        if (eqn.op.foreign or eqn.op.python) and any(g.rows and g.batch for g in given):
            self.believed[eqn.line or eqn.op.name] = None
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
            or any(g.uneven for g in given)
            and eqn.op.looked_up is None
            and not self.stays_whole(eqn, large)
        ):
            self.lines[eqn.line or eqn.op.name] = None
        elif eqn.op.expand is not None and self.stays_whole(eqn, large):
            self.expanded(eqn, large, given)

    def stays_whole(self, eqn: Eqn, large: Eqn) -> bool:
        """Must a dim of the batch be whole for this operator?"""
        return any(k for dims in _whole_dims(eqn, large) for k in dims)

    def counts(self, eqn: Eqn, large: Eqn, given: Sequence[_Known]) -> bool:
        """Are these the own places of rows, or such of their elements: 0, 1, 2 …; the places of a mask's ones, which go
        on in the next part where they end in this; 5 * place + i?"""
        if eqn.op is o.iota:
            return (eqn.params.get("start", 0), eqn.params.get("step", 1)) == (0, 1)
        if eqn.op is o.const:
            consts = (p.consts[e.params["name"]] for p, e in ((self.part, eqn), (self.whole, large)))
            return _goes_on(*consts)
        if not any(g.place for g in given):
            return False
        others = [(x, g) for x, g in zip(eqn.inputs, given, strict=True) if not g.place]
        if eqn.op is o.mul:
            return all(isinstance(x, int) and x > 0 for x, _ in others)
        return eqn.op in SAME_NUMBERS or (eqn.op is o.add and all(g.batch or not g.rows for _, g in others))

    def is_uneven(self, eqn: Eqn, large: Eqn, given: Sequence[_Known]) -> bool:
        """Are these numbers that are made without the batch, as many as it has rows, and others in the next part?
        (Numbers that are drawn are as good as any.)"""
        if eqn.op is o.const:
            part, whole = (p.consts[e.params["name"]] for p, e in ((self.part, eqn), (self.whole, large)))
            if part.ndim != whole.ndim or any(b % a for a, b in zip(part.shape, whole.shape, strict=True) if a):
                return False
            return part.shape != whole.shape and not torch.equal(
                part.repeat([b // a if a else 1 for a, b in zip(part.shape, whole.shape, strict=True)]), whole
            )
        if eqn.op is o.iota:
            dim = eqn.params["dim"]
            return eqn.outputs[0].shape[dim] != large.outputs[0].shape[dim]
        if eqn.op in (o.repeat, o.repeat_each) and _is_one_row(eqn, large):
            return False
        is_drawn = "site" in eqn.op.defaults
        return not is_drawn and eqn.op not in (o.full, o.expand) and not any(g.rows for g in given)  # table[:len(x)]

    def moves_rows(self, eqn: Eqn, large: Eqn, given: Sequence[_Known]) -> bool:
        """Does a row of the result come from another place?"""
        if eqn.op in IN_ORDER:
            return False
        whole = _whole_dims(eqn, large)
        if eqn.op.looked_up is not None:
            at = zip(eqn.op.looked_up(**eqn.params), given[1:], strict=True)
            return given[0].batch and any(whole[0][d] and not g.place for d, g in at)
        is_moved = any(g.batch and any(dims) for g, dims in zip(given, whole, strict=True))
        return is_moved and not any(g.place for g in given[1:])

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
        known = {x: g for x, g in zip(large.inputs, given, strict=True) if isinstance(x, Var)}
        same = {x: y for x, y in zip(large.inputs, eqn.inputs, strict=True) if isinstance(x, Var)}
        before, were_alike = len(self.lines), self.are_alike
        self.equations(eqns[0], eqns[1], known, same)
        if not self.are_alike:
            self.believed[eqn.line or eqn.op.name] = None
            self.are_alike = were_alike
        if len(self.lines) > before:
            for line in list(self.lines)[before:]:
                del self.lines[line]
            self.lines[eqn.line or eqn.op.name] = None


def _side_by_side(part: Sequence[Eqn], whole: Sequence[Eqn], same: dict[Var, Atom]) -> list[tuple[Eqn, Eqn]] | None:
    """The equations of a part and those of the whole batch, in pairs; None where they are others.  What gives every row
    of a batch one value (`token.expand(len(x), -1, -1)`) is nothing to do in a part of one row."""
    pairs: list[tuple[Eqn, Eqn]] = []
    rest = list(reversed(part))
    for large in whole:
        given = same.get(large.inputs[0]) if large.inputs and isinstance(large.inputs[0], Var) else None
        if large.op in ONCE_A_ROW and isinstance(given, Var) and not (rest and _is_this(rest[-1], large, given)):
            if large.outputs[0].ndim != given.ndim:
                return None
            times = 1 if large.op is o.repeat_each else (1,) * given.ndim
            of_one = {"shape": given.shape, "times": times}
            params = Params({name: of_one.get(name, value) for name, value in large.params.items()})
            eqn = Eqn(large.op, (given,), params, (given,), large.source, large.phase)
        elif rest and rest[-1].op is large.op and len(rest[-1].outputs) == len(large.outputs):
            eqn = rest.pop()
        else:
            return None
        same.update(zip(large.outputs, eqn.outputs, strict=True))
        pairs.append((eqn, large))
    return None if rest else pairs


def _is_one_row(eqn: Eqn, large: Eqn) -> bool:
    """Is what is as long as the batch one row over and over?"""
    x, y, z = (*eqn.input_types[:1], eqn.outputs[0], large.outputs[0])
    return len(x.shape) == y.ndim and all(n == 1 for n, a, b in zip(x.shape, y.shape, z.shape, strict=True) if a != b)


def _is_this(eqn: Eqn, large: Eqn, given: Var) -> bool:
    return eqn.op is large.op and eqn.inputs[0] == given


def _known(x: Atom, known: dict[Var, _Known]) -> _Known:
    return known.get(x, _Known()) if isinstance(x, Var) else _Known()
