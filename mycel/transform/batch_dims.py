"""Which arguments have rows of the batch: read off the program, for what is as long as the batch may be so by chance.

    cross_entropy(linear(x, w), y, weight)     x, y: b …     weight: one for each class, as w has: no rows
    table[ids]                                 ids:  b …     table: it is looked up in: no rows

Dims are of one kind where an operator gives them the same letter, through calls, branches and loops; a dim that is
joined of several is of the kind of the slowest.  The kind of the batch is that of the leading dim of the first
argument that is not shown to be without rows and alone in its kind.
Another argument has no rows where its leading dim is of another kind, and that is the kind of a parameter's dim, of one
of an argument that is looked up in (but by each row at its own place), or of another dim of what has rows.  Where
nothing is shown, it has rows: features that meet those of the batch in a product alone (as texts meet images) are such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mycel.ir import Block, Eqn, Program, Var, call, cond, custom, loop, scan
from mycel.ops import o

Kinds = tuple[int, ...]  # of a value's dims


def without_rows(program: Program, arguments: Sequence[str]) -> set[str]:
    """Which arguments (the names of their inputs, in order) have no rows of the batch."""
    dims = _Dims(program)
    inputs = {v.name: kinds for v, kinds in zip(program.inputs, dims.inputs, strict=True)}
    leading = {name: dims.root(inputs[name][0]) for name in arguments if inputs[name]}
    shown = dims.looked_up | {
        dims.root(k) for v in program.inputs if program.role(v).kind == "parameter" for k in inputs[v.name]
    }
    kinds = list(leading.values())
    alone = (k for name, k in leading.items() if not (k in shown and sum(k == other for other in kinds) == 1))
    batch = next(alone, kinds[0] if kinds else None)
    others = {dims.root(k) for name, kind in leading.items() if kind == batch for k in inputs[name][1:]}
    apart = (shown | others) - dims.unknown - {batch}
    return {name for name, kind in leading.items() if kind in apart}


class _Dims:
    """The dims of a program's values, by kind: `root` is one number for all dims of a kind."""

    def __init__(self, program: Program) -> None:
        self.blocks = program.blocks
        self.parents: list[int] = []
        self._looked_up: list[int] = []
        self._positions: list[Kinds] = []  # of values that count: a row's own place
        self._unknown: list[int] = []  # made by operators that have no letters
        self.inputs = [self.new(v.ndim) for v in program.inputs]
        self.block(program.main, self.inputs)
        self.looked_up, self.unknown = self.roots(self._looked_up), self.roots(self._unknown)

    def new(self, ndim: int) -> Kinds:
        first = len(self.parents)
        self.parents.extend(range(first, first + ndim))
        return tuple(range(first, first + ndim))

    def root(self, kind: int) -> int:
        while self.parents[kind] != kind:
            self.parents[kind] = kind = self.parents[self.parents[kind]]
        return kind

    def roots(self, kinds: Iterable[int]) -> set[int]:
        return {self.root(k) for k in kinds}

    def tie(self, one: Sequence[Kinds], other: Sequence[Kinds]) -> None:
        for a, b in zip(one, other, strict=True):
            for i, j in zip(a, b, strict=True):
                self.parents[self.root(i)] = self.root(j)

    def block(self, block: Block, inputs: Sequence[Kinds]) -> list[Kinds]:
        """Of the results."""
        known = dict(zip(block.inputs, inputs, strict=True))
        for eqn in block.eqns:
            given = [known[x] if isinstance(x, Var) else () for x in eqn.inputs]
            known.update(zip(eqn.outputs, self.equation(eqn, given), strict=True))
        return [known[x] if isinstance(x, Var) else () for x in block.outputs]

    def equation(self, eqn: Eqn, given: Sequence[Kinds]) -> list[Kinds]:
        p = eqn.params
        if eqn.op is call:
            return self.block(self.blocks[p["block"]], given)
        if eqn.op is custom:
            return self.block(self.blocks[p["forward"]], given)[: len(eqn.outputs)]
        if eqn.op is cond:
            outs = self.block(self.blocks[p["then"]], given[1:])
            self.tie(outs, self.block(self.blocks[p["orelse"]], given[1:]))
            return outs
        if eqn.op is loop:
            outs = self.block(self.blocks[p["body"]], given)
            self.tie(outs, given[p["consts"] :])
            return outs
        if eqn.op is scan:
            return self.turns(eqn, given)
        outs = [self.new(v.ndim) for v in eqn.outputs]
        if eqn.op.dims is None:
            self._unknown += [k for y in outs for k in y]
            return outs
        self.letters(eqn, given, outs)
        if eqn.op is o.iota:
            self._positions += outs
        if eqn.op.looked_up is not None and _is_among(given[0], self.inputs):
            at = zip(eqn.op.looked_up(**p), given[1:], strict=True)
            self._looked_up += [given[0][d] for d, place in at if not _is_among(place, self._positions)]
        return outs

    def turns(self, eqn: Eqn, given: Sequence[Kinds]) -> list[Kinds]:
        """Of a scan: its rows are one kind."""
        consts, carry = eqn.params["consts"], eqn.params["carry"]
        rows = given[consts + carry :]
        outs = self.block(self.blocks[eqn.params["body"]], [*given[: consts + carry], *(x[1:] for x in rows)])
        self.tie(outs[:carry], given[consts : consts + carry])
        (turn,) = self.new(1)
        self.tie([x[:1] for x in rows], [(turn,)] * len(rows))
        return [*outs[:carry], *((turn, *y) for y in outs[carry:])]

    def letters(self, eqn: Eqn, given: Sequence[Kinds], outs: Sequence[Kinds]) -> None:
        """Dims with the same letter are of one kind."""
        fit = eqn.op.fit(eqn.input_types, dict(eqn.params))
        seen: dict[str, int] = {}
        for item, kinds in zip((*fit.ins, *fit.outs), (*given, *outs), strict=True):
            for dim, kind in zip(item or (), kinds, strict=True):
                letter = next((k for k in dim if fit.sizes[k] > 1), None)
                if letter is not None:
                    self.tie([(kind,)], [(seen.setdefault(letter, kind),)])


def _is_among(kinds: Kinds, others: Sequence[Kinds]) -> bool:
    """Are these the dims of one of those values itself?"""
    return any(kinds is each for each in others)
