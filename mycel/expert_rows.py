"""Which tensors of a model have a row for each expert of a layer: those that change places where experts do.

It follows from the program: from the weights that a layer takes, and from the scores among which its experts are
chosen, backwards as long as operators treat each expert alike (their dims say it; a softmax by what it is made of;
choices put into a row by what they were chosen among).

    scores.view(n, 4, 8)      experts in 4 groups of 8: a dim holds a digit of the expert's number,
                              8 below it and 4 of them, or 1 below it and 8 of them
    .topk(2).values.sum(-1)   a number of each group, whatever the order in it
    mask.expand(n, 4, 8)      back to experts

Experts that are chosen in groups stay in them: groups change places as a whole, and experts within each.  Where experts
are not treated alike the layer stays as it is, and it is said why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycel.ir import CONTROL, Builder, Eqn, Program, Var, is_float
from mycel.ops import o
from mycel.transform import inline

WHOLE = 1 << 30  # equations: no block is larger
ALIKE = (o.full, o.expand)  # what they make is the same along a new dim
# over a dim: the order along it does not matter to the first result
SYMMETRIC = (o.sum, o.mean, o.amax, o.amin, o.max_dim, o.min_dim, o.topk)


class UnevenExperts(Exception):
    """Experts are not treated alike: why."""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts in a step's program: the tensors of the model with a row for each expert, by name with the
    dim; which of them are the experts' own; how many experts stay together (1: each goes by itself); and why experts
    cannot change places (empty: they can)."""

    experts: int
    tensors: Mapping[str, int]
    weights: tuple[str, ...]
    group: int = 1
    fixed: str = ""


def expert_layers(program: Program) -> list[ExpertLayer]:
    """The layers of experts of a program, in its order."""
    flat = inline(program, small=WHOLE)
    producers = {v: (eqn, i) for eqn in flat.main.eqns for i, v in enumerate(eqn.outputs)}
    names = Builder(names_of=flat.main)
    return [_RowsOfExperts(flat, producers, names).layer(eqn) for eqn in flat.main.eqns if eqn.op.for_ranks]


@dataclass(frozen=True)
class _Digit:
    """What a dim of a value holds of an expert's number: `number // below % size`."""

    below: int
    size: int


_Position = tuple[Var, int, _Digit]  # a value, one of its dims, what that holds


class _RowsOfExperts:
    def __init__(self, program: Program, producers: dict[Var, tuple[Eqn, int]], names: Builder) -> None:
        self.program, self.producers, self.names = program, producers, names
        self.users: dict[Var, list[Eqn]] = {}
        for eqn in program.main.eqns:
            for v in dict.fromkeys(eqn.vars):
                self.users.setdefault(v, []).append(eqn)
        self.groups: set[int] = set()

    def layer(self, eqn: Eqn) -> ExpertLayer:
        _, ids, _, *weights = eqn.inputs
        experts = eqn.input_types[3].shape[0]
        own: dict[str, int] = {}
        try:
            for w in weights:
                if isinstance(w, Var):
                    self.follow((w, 0, _Digit(1, experts)), experts, own)
            tensors = dict(own)
            for scores, dim in self.scores(ids):
                if scores.shape[dim] != experts:
                    raise UnevenExperts(f"they are chosen among {scores.shape[dim]} scores")
                self.follow((scores, dim, _Digit(1, experts)), experts, tensors)
            if len(self.groups) > 1:
                raise UnevenExperts(f"they are chosen in groups of {' and of '.join(map(str, sorted(self.groups)))}")
        except UnevenExperts as why:
            return ExpertLayer(experts, own, tuple(own), fixed=str(why))
        return ExpertLayer(experts, tensors, tuple(own), group=max(self.groups, default=1))

    def scores(self, ids: Any) -> Iterator[tuple[Var, int]]:
        """What choices are positions in, and along which dim."""
        eqn, _ = self.producers.get(ids, (None, 0))
        if eqn is None:
            raise UnevenExperts("who is chosen is given, not computed")
        x = eqn.inputs[0] if eqn.inputs else None
        if isinstance(x, Var) and is_float(x.dtype) and "dim" in eqn.params:
            yield x, eqn.params["dim"]
        elif eqn.op.moves or eqn.op in (o.cast, o.cat, o.stack):
            for v in eqn.vars:
                yield from self.scores(v)
        else:
            raise UnevenExperts(f"{eqn.op.name} computes who is chosen, {eqn.source}")

    def follow(self, start: _Position, experts: int, tensors: dict[str, int]) -> None:
        """The tensors of the model whose rows become those of a value along a dim, each row by itself."""
        waiting, done = [start], set[_Position]()
        while waiting:
            at = waiting.pop()
            if at in done:
                continue
            done.add(at)
            x, dim, digit = at
            if digit.below > 1:
                self.groups.add(digit.below)
            eqn, i = self.producers.get(x, (None, 0))
            if eqn is not None:
                waiting += self._operands(eqn, i, dim, digit)
            elif digit.size != experts:
                raise UnevenExperts(f"{self.program.role(x)} has a row for each of {digit.size}, not for each expert")
            else:
                self._collect(x, dim, tensors)

    def _collect(self, x: Var, dim: int, tensors: dict[str, int]) -> None:
        role = self.program.role(x)
        if role.kind not in ("parameter", "buffer"):
            raise UnevenExperts(f"a row for each expert is given by {role}")
        if tensors.setdefault(role.name, dim) != dim:
            raise UnevenExperts(f"{role.name} has experts along two dims")

    def _operands(self, eqn: Eqn, i: int, dim: int, digit: _Digit) -> list[_Position]:
        """Where the operands have what result i has along a dim."""
        if eqn.op.dims is None or eqn.op in CONTROL:
            raise UnevenExperts(f"{eqn.op.name} takes them, {eqn.source}")
        if eqn.op is o.scatter and eqn.params["dim"] == dim:
            return self._scattered(eqn, dim, digit)
        fit = eqn.op.fit(list(eqn.input_types), eqn.params)
        below, positions = digit.below, []
        for letter in reversed(fit.outs[i][dim]):  # the last digit first
            size = fit.sizes[letter]
            if size > 1 and fit.flags.get(letter) == "^":
                return self._expanded(eqn, i, dim, digit)
            for x, d, letters in _with_letter(eqn.inputs, fit.ins, letter) if size > 1 else ():
                inner = letters[letters.index(letter) + 1 :]
                beside = [c for c in inner if c not in fit.outs[i][dim] and fit.sizes[c] > 1]
                if below % math.prod(fit.sizes[c] for c in inner) or not all(
                    self._any_order(eqn, i, c) for c in beside
                ):
                    raise UnevenExperts(f"{eqn.op.name} takes them in groups, {eqn.source}")
                whole = math.prod(fit.sizes[c] for c in letters)
                positions.append((x, d, _Digit(below // math.prod(fit.sizes[c] for c in inner), whole)))
            below *= size
        if not positions and eqn.op not in ALIKE:
            raise UnevenExperts(f"{eqn.op.name} makes a row for each, {eqn.source}")
        return [*dict.fromkeys(positions)]

    def _any_order(self, eqn: Eqn, i: int, letter: str) -> bool:
        """Does the order along a letter of result i not matter to what is computed of it?"""
        out = eqn.op.fit(list(eqn.input_types), eqn.params).outs[i]
        waiting = [(eqn.outputs[i], d) for d, letters in enumerate(out) if letter in letters]
        if not waiting or any(list(out[d]) != [letter] for _, d in waiting):
            return False
        done = set[tuple[Var, int]]()
        while waiting:
            at = waiting.pop()
            for user in self.users.get(at[0], ()) if at not in done else ():
                results = _along(user, *at)
                if results is None or any(self.users.get(v) for v in user.outputs[1:]):
                    return False
                waiting += results
            done.add(at)
        return True

    def _scattered(self, eqn: Eqn, dim: int, digit: _Digit) -> list[_Position]:
        """Rows into which something is put where they were chosen: like what they were chosen among."""
        base, index, _ = eqn.inputs
        chosen = [(x, d, digit) for x, d in self.scores(index)]
        if any(x.shape[d] != digit.size for x, d, _ in chosen):
            raise UnevenExperts(f"{eqn.op.name} mixes them, {eqn.source}")
        return [*chosen, *([(base, dim, digit)] if isinstance(base, Var) else [])]

    def _expanded(self, eqn: Eqn, i: int, dim: int, digit: _Digit) -> list[_Position]:
        """The same by what an operator is made of."""
        if eqn.op.expand is None:
            raise UnevenExperts(f"{eqn.op.name} mixes them, {eqn.source}")
        with Builder(beside=self.names) as b:
            b.at(eqn)
            outs = eqn.op.expand(*eqn.inputs, **eqn.params)
        self.producers.update((v, (inner, k)) for inner in b.eqns for k, v in enumerate(inner.outputs))
        return [((outs if isinstance(outs, tuple) else (outs,))[i], dim, digit)]


def _with_letter(inputs: Sequence[Any], items: Sequence[Any], letter: str) -> Iterator[tuple[Var, int, Sequence[str]]]:
    """The operands that have a letter: the dim, and all letters of that."""
    for x, item in zip(inputs, items, strict=True):
        for d, letters in enumerate(item or ()):
            if isinstance(x, Var) and letter in letters:
                yield x, d, letters


def _along(eqn: Eqn, x: Var, dim: int) -> list[tuple[Var, int]] | None:
    """Where the result has what x has along a dim, in whatever order that is: nowhere, if it is summed up or the like;
    None if the order matters."""
    if eqn.op.dims is None or eqn.op in CONTROL:
        return None
    fit = eqn.op.fit(list(eqn.input_types), eqn.params)
    (letter, *more) = (fit.ins[eqn.inputs.index(x)] or ())[dim]
    out = [d for d, letters in enumerate(fit.outs[0]) if letter in letters]
    if not out:
        return [] if eqn.op in SYMMETRIC else None
    others = [v for v, _, _ in _with_letter(eqn.inputs, fit.ins, letter) if v is not x]
    if more or others or fit.flags.get(letter) == "^" or any(list(fit.outs[0][d]) != [letter] for d in out):
        return None
    return [(eqn.outputs[0], d) for d in out]
