"""How one equation can lie on a mesh: which letters of its dims are split over which axes, and what that makes of its
operands and results.

    y = linear(x, w)       "... k+, n k+ -> ... n"

    k over tp              x[…,k@tp], w[n,k@tp]  ->  y[…,n]+tp
    n over tp              x[…,k],    w[n@tp,k]  ->  y[…,n@tp]
    linear in x            x[…,k]+tp, w[n,k]     ->  y[…,n]+tp
    nothing                x[…,k],    w[n,k]     ->  y[…,n]

A letter that must stay whole (`^`) can be split where its operator has a rule for that (`Op.parts`), or a meaning in
smaller operators, which are then lowered in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycel.ir import Axes, Eqn, Layout, Mesh, Op, Params, SplitRule, Type, is_even
from mycel.ir.dims import Fit


@dataclass(frozen=True)
class Choice:
    """The layouts of an equation's operands (None: no tensor) and results; `letters` are what is split; `expand`: by
    way of smaller operators."""

    ins: tuple[Layout | None, ...]
    outs: tuple[Layout, ...]
    letters: Mapping[str, Axes] = field(default_factory=dict)
    expand: bool = False
    # by axis: operands whose partial sums pass through
    through: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Laid:
    """The layouts of a block: of its inputs, its equations (None: control flow, whose layouts are its blocks'), its
    outputs."""

    inputs: tuple[Layout, ...]
    choices: tuple[Choice | None, ...]
    outputs: tuple[Layout, ...]


Layouts = Mapping[str, Laid]


@dataclass(frozen=True)
class Label:
    """What an equation does with one axis: splits a letter, lets a partial sum on a group of operands through, or
    (neither) the same on all ranks."""

    letter: str = ""
    group: tuple[int, ...] = ()


SAME = Label()
TURNS = 64  # ranks in the largest ring: its turns are written out
WHOLE, PARTIAL = -1, {"+": -2, ">": -3, "<": -4}  # places of an axis besides the dims


class Options:
    """The labels of one equation for each axis, and the choice that labels for all axes make."""

    def __init__(self, op: Op, inputs: Sequence[Any], params: Mapping[str, Any], outputs: Sequence[Type]) -> None:
        self.op, self.inputs, self.params, self.outputs = op, inputs, params, outputs
        self.fit: Fit | None = op.fit(inputs, dict(params)) if op.dims is not None else None
        self.groups = [] if self.fit is None and not op.linear else linear_groups(op, inputs, outputs)
        self.plain = set(self.fit.splits()) if self.fit is not None else set()
        dims = (
            [dim for item in (*self.fit.ins, *self.fit.outs) if item is not None for dim in item]
            if self.fit is not None
            else []
        )
        large = [[k for k in dim if self.fit.sizes[k] > 1] for dim in dims] if self.fit is not None else []
        # letters that are not the slowest of every dim they are part of
        self.minor = {k for dim in large for k in dim[1:]}
        self.in_joint_dims = {k for dim in large if len(dim) > 1 for k in dim}  # part of a dim of several letters
        self._places: dict[Label, tuple[dict[int, int], dict[int, int]]] = {}
        # letters -> the dims they are, by operand and by result
        self._dims_of: dict[str, tuple[dict[int, int], dict[int, int]]] = {}
        if self.fit is not None:
            for side, items in enumerate((self.fit.ins, self.fit.outs)):
                for i, item in enumerate(items):
                    for d, dim in enumerate(item or ()):
                        for letter in dim:
                            self._dims_of.setdefault(letter, ({}, {}))[side][i] = d

    @staticmethod
    def of(eqn: Eqn) -> Options:
        return _options(eqn.op, eqn.input_types, eqn.params, tuple(v.type for v in eqn.outputs))

    def labels(
        self, mesh: Mesh, axis: str, before: Mapping[str, Axes], only: Collection[str] | None = None
    ) -> list[Label]:
        """What can be done along an axis, when letters are split over other axes already; `only`: with these
        letters."""
        labels = [SAME]
        if self.fit is not None:
            alone = [k for k in (self.fit.sizes if only is None else only) if not self._is_together(k, before)]
            labels += [Label(k) for k in alone if self.may_split(k, (*before.get(k, ()), axis), mesh)]
            labels += [
                Label(key) for key in self.op.parts if " " in key and self._may_split_together(key, axis, before, mesh)
            ]
        return labels + [Label(group=g) for g in self.groups]

    def may_split(self, letter: str, axes: Axes, mesh: Mesh) -> bool:
        """Can a letter be split over these axes?"""
        assert self.fit is not None
        n = self.fit.sizes[letter]
        if n < 2 or letter in self.minor:
            return False
        even, rule = is_even(n, axes, mesh), self.rule({letter: axes}, letter)
        if rule is not None:
            return even or (rule.uneven and letter not in self.in_joint_dims)
        if letter not in self.plain:
            return (
                even
                and self.op.expand is not None
                and letter not in self.in_joint_dims
                and any(self._has(item, letter) for item in self.fit.ins)
            )
        return even or (letter not in self.in_joint_dims and self.covers(letter))

    def _is_together(self, letter: str, before: Mapping[str, Axes]) -> bool:
        """Is it split by a joint rule already?  Then it goes on with the other letters or not at all: a result would be
        partial over an axis of its own."""
        return any(letter in key.split() and self._is_joint(key, before) for key in self.op.parts if " " in key)

    def _is_joint(self, key: str, letters: Mapping[str, Axes]) -> bool:
        """Are the letters of a joint rule split over the same axes, the outer one perhaps over slower ones before?"""
        together, outer = key.split(), self.op.parts[key].outer
        inner = letters.get(next(k for k in together if k != outer), ())
        return bool(inner) and all(
            letters.get(k, ())[-len(inner) :] == inner if k == outer else letters.get(k) == inner for k in together
        )

    def _may_split_together(self, key: str, axis: str, before: Mapping[str, Axes], mesh: Mesh) -> bool:
        """Can all letters of a joint rule be split over one more axis?"""
        assert self.fit is not None
        letters = {k: (*before.get(k, ()), axis) for k in key.split()}
        inner = letters[next(k for k in letters if k != self.op.parts[key].outer)]
        if (
            not all(k in self.fit.sizes for k in letters)
            or not self._is_joint(key, letters)
            or mesh.count(inner) > TURNS
        ):
            return False
        fits = [self.fit.sizes[k] > 1 and k not in self.minor and k not in self.in_joint_dims for k in letters]
        return all(fits) and (
            self.op.parts[key].uneven or all(is_even(self.fit.sizes[k], axes, mesh) for k, axes in letters.items())
        )

    def rule(self, letters: Mapping[str, Axes], letter: str) -> SplitRule | None:
        """The operator's own way to be split along a letter, when these letters are split."""
        for key, part in self.op.parts.items():
            if " " in key and letter in key.split() and self._is_joint(key, letters):
                return part
        return self.op.parts.get(letter) or (self.op.parts.get("*") if letter in self.plain else None)

    def covers(self, letter: str) -> bool:
        """Can padding along this letter be made harmless?"""
        assert self.fit is not None
        flag = self.fit.flags.get(letter)
        if flag == "+":
            return any(all(self._has(self.fit.ins[i], letter) for i in g) for g in self.groups)
        if flag in (">", "<"):
            return sum(item is not None for item in self.fit.ins) == 1
        return True

    def needs_expansion(self, letters: Mapping[str, Axes], letter: str) -> bool:
        """Is it split by way of smaller operators?"""
        return letter not in self.plain and self.rule(letters, letter) is None

    def choice(self, labels: Mapping[str, Label]) -> Choice:
        """The layouts that one label for each axis makes; axes in the order given, the first the slowest."""
        letters: dict[str, Axes] = {}
        flows: dict[str, tuple[int, ...]] = {}
        for axis, label in labels.items():
            if label.letter:
                letters.update((k, (*letters.get(k, ()), axis)) for k in label.letter.split())
            elif label.group:
                flows[axis] = label.group
        return self.laid(letters, flows)

    def laid(self, letters: Mapping[str, Axes], flows: Mapping[str, tuple[int, ...]] | None = None) -> Choice:
        """Letters over axes, and partial sums along axes on groups of operands -> layouts."""
        flows = flows or {}
        ins: list[Layout | None] = []
        for i, x in enumerate(self.inputs):
            if not isinstance(x, Type):
                ins.append(None)
                continue
            dims = self._dims(self.fit.ins[i] if self.fit is not None else None, x, letters)
            ins.append(Layout(dims, tuple(sorted((a, "+") for a, g in flows.items() if i in g))))
        outs = []
        sums = {k: axes for k, axes in letters.items() if self._may_be_partial(k)}
        for j, t in enumerate(self.outputs):
            item = self.fit.outs[j] if self.fit is not None else None
            partial = [(a, "+") for a in flows]
            dims = self._dims(item, t, letters)
            own = {a for axes in dims for a in axes}  # of letters split together it may have another one
            for letter, axes in sums.items():
                partial += [
                    (a, kind)
                    for a in axes
                    if a not in own and (kind := self.partial_kind(letters, letter, j)) and not self._has(item, letter)
                ]
            outs.append(Layout(dims, tuple(sorted(partial))))
        expand = any(self.needs_expansion(letters, k) for k in letters)
        return Choice(tuple(ins), tuple(outs), dict(letters), expand, dict(flows))

    def places(self, label: Label) -> tuple[dict[int, int], dict[int, int]]:
        """Where the axis of a label lies, by operand and by result: a dim, or a kind of partial value;
        nothing where it is whole."""
        if label not in self._places:
            self._places[label] = self._placed(label)
        return self._places[label]

    def _placed(self, label: Label) -> tuple[dict[int, int], dict[int, int]]:
        if label.group:
            return dict.fromkeys(label.group, PARTIAL["+"]), dict.fromkeys(range(len(self.outputs)), PARTIAL["+"])
        ins: dict[int, int] = {}
        outs: dict[int, int] = {}
        letters = dict.fromkeys(label.letter.split(), ("",))
        for letter in letters:
            ins.update(self._dims_of[letter][0])
            outs.update(self._dims_of[letter][1])
            for j in range(len(self.outputs)) if self._may_be_partial(letter) else ():
                kind = self.partial_kind(letters, letter, j)
                if kind and j not in self._dims_of[letter][1]:
                    outs.setdefault(j, PARTIAL[kind])
        return ins, outs

    def _may_be_partial(self, letter: str) -> bool:
        """Could a result be partial over its axes?"""
        assert self.fit is not None
        return bool(self.op.parts) or letter in self.fit.flags

    def partial_kind(self, letters: Mapping[str, Axes], letter: str, output: int) -> str:
        """What a result without a letter is partial in over its axes: a sum, a maximum, a minimum, nothing."""
        assert self.fit is not None
        rule = self.rule(letters, letter)
        if rule is not None:
            return rule.partial if isinstance(rule.partial, str) else rule.partial[output]
        flag = self.fit.flags.get(letter, "")
        return flag if flag != "^" else ""

    def _dims(self, item: Any, type: Type, letters: Mapping[str, Axes]) -> tuple[Axes, ...]:
        if item is None:
            return ((),) * type.ndim
        return tuple(next((tuple(letters[k]) for k in dim if k in letters), ()) for dim in item)

    def _has(self, item: Any, letter: str) -> bool:
        return item is not None and any(letter in dim for dim in item)


@functools.lru_cache(maxsize=1 << 14)
def _options(op: Op, inputs: tuple[Any, ...], params: Params, outputs: tuple[Type, ...]) -> Options:
    """Layers repeat, and so do their equations."""
    return Options(op, inputs, params, outputs)


def linear_groups(op: Op, inputs: Sequence[Any], outputs: Sequence[Type]) -> list[tuple[int, ...]]:
    """The groups of operands whose partial sums pass through this equation."""
    if any(not (t.dtype.is_floating_point or t.dtype.is_complex) or t.depth for t in outputs):
        return []
    if op.name == "cast" and not isinstance(inputs[0], Type):
        return []
    # what ranks keep of a message of theirs may be rounded
    digits = 8 if op.sent_as_sum else min(t.dtype.to_real().itemsize for t in outputs)
    groups: list[tuple[int, ...]] = [tuple(range(len(inputs)))] if isinstance(op.linear, str) else list(op.linear)
    passing = []
    for all_of_it in groups:
        group = tuple(i for i in all_of_it if i >= len(inputs) or inputs[i] is not None)  # what is left out is zero
        types = [inputs[i] for i in group if i < len(inputs)]
        # zeros everywhere are a partial sum as well
        if group not in passing and len(types) == len(group) and all(_can_be_partial(t, digits) for t in types):
            passing.append(group)
    return passing


def _can_be_partial(x: Any, digits: int) -> bool:
    """A floating point tensor, or the literal zero; parts are not rounded before they are added up."""
    if isinstance(x, Type):
        return (x.dtype.is_floating_point or x.dtype.is_complex) and x.dtype.to_real().itemsize <= digits
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == 0
