"""A global program and its layouts -> the one local program that every rank runs.

    def f(x: f32[8,4], w: f32[6,4]):                    def f(x: f32[4,4], w: f32[6,2]):          mesh dp=2 tp=2
      y: f32[8@dp,6]+tp = linear(x, w)         =>         x1: f32[4,2] = own_part(x, axes=("tp",), count=2, dim=1)
      z: f32[8@dp,6] = gelu(y)                            y: f32[4,6] = linear(x1, w)
      return z                                            y1: f32[4,6] = all_reduce(y, axes=("tp",), count=2)
                                                          z: f32[4,6] = gelu(y1)
                                                          return z

Each equation gets its operands in the layouts its choice wants (the cheapest chain of moves, from the nearest layout at
hand) and is written on local types.  Where a split leaves padding, what would reach other elements is masked.  What
depends on the rank is an operator (`place`), so the text is the same on all ranks, however many they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.errors import IRError
from mycel.ir import (
    OPS,
    Atom,
    Axes,
    Block,
    Builder,
    Eqn,
    Layout,
    Mesh,
    Program,
    Var,
    call,
    cond,
    custom,
    is_even,
    loop,
    part,
    scan,
)  # fmt: skip
from mycel.ops import o
from mycel.plan.choices import Choice, Layouts, Options
from mycel.plan.follow import follow
from mycel.plan.moves import Moves


def spmd(program: Program, layouts: Layouts, moves: Moves, again: Collection[int] = ()) -> Program:
    """Every block on local types, with the collectives its layouts ask for.  `again`: inputs of the entry that are
    moved anew for each use."""
    blocks = {
        name: _LocalBlock(program, name, layouts, moves).lowered(again if name == program.entry else ())
        for name in program.blocks
    }
    return replace(program, blocks=blocks)


@dataclass(frozen=True)
class LoweredBlock:
    """The local equations that each equation of a block became, last those for its outputs; and what moves among them
    have made of which value."""

    by_equation: list[list[Eqn]]
    moved: dict[Var, tuple[Var, Layout]]


def lowered_block(
    program: Program, name: str, layouts: Layouts, moves: Moves, again: Collection[int] = ()
) -> LoweredBlock:
    """What a block becomes, equation by equation."""
    block = _LocalBlock(program, name, layouts, moves)
    block.lowered(again if name == program.entry else ())
    return LoweredBlock(block.by_equation, block.moved)


class At:
    """Where this rank's part lies, for rules of operators (`Op.parts`)."""

    def __init__(self, mesh: Mesh, choice: Choice, sizes: Mapping[str, int], shape: Sequence[int]) -> None:
        """`shape` is the whole shape of the first result."""
        self.mesh, self.letters, self.sizes, self.shape, self.layout = (
            mesh,
            choice.letters,
            sizes,
            tuple(shape),
            choice.outs[0],
        )

    def axes(self, letter: str) -> Axes:
        return tuple(self.letters.get(letter, ()))

    def count(self, letter: str) -> int:
        return self.mesh.count(self.axes(letter))

    def local(self, letter: str) -> int:
        """How many elements a rank stores."""
        return part(self.sizes[letter], self.axes(letter), self.mesh)

    def start(self, letter: str) -> Any:
        """The first element of this rank's part: a number where it is not split, else an i64[]."""
        return offset(self.sizes[letter], self.axes(letter), self.mesh)

    def valid(self, letter: str) -> Any:
        """How many elements of this rank's part are real: a number where all are, else an i64[]."""
        n, axes = self.sizes[letter], self.axes(letter)
        return self.local(letter) if is_even(n, axes, self.mesh) else valid(n, axes, self.mesh)

    def start_of(self, dim: int) -> Any:
        """The first element of this rank's part of a dim of the first result."""
        return offset(self.shape[dim], self.layout.dims[dim], self.mesh)

    def masked(self, x: Any, dim: int, letter: str, value: Any) -> Any:
        """x with `value` in the padding of a letter, which is its dim `dim`."""
        axes = self.axes(letter)
        return (
            x
            if is_even(self.sizes[letter], axes, self.mesh)
            else masked(x, dim, self.sizes[letter], axes, self.mesh, value)
        )

    def all_reduce(self, x: Any, letter: str, kind: str = "+") -> Any:
        return o.all_reduce(x, axes=self.axes(letter), count=self.count(letter), kind=kind)


def offset(n: int, axes: Axes, mesh: Mesh) -> Any:
    """The first element of this rank's part of a dim of n."""
    start: Any = 0
    for axis in axes:
        n = -(-n // mesh[axis])
        step = o.mul(o.place(axes=(axis,), count=mesh[axis]), n)
        start = step if isinstance(start, int) else o.add(start, step)
    return start


def valid(n: int, axes: Axes, mesh: Mesh) -> Any:
    """How many elements of this rank's part are real."""
    left: Any = n
    for axis in axes:
        n = -(-n // mesh[axis])
        before = o.mul(o.place(axes=(axis,), count=mesh[axis]), n)
        left = o.clamp(o.sub(left, before), 0, n)
    return left


def masked(x: Any, dim: int, n: int, axes: Axes, mesh: Mesh, value: Any) -> Any:
    """x with `value` in the padding of a dim of n."""
    shape = tuple(x.shape[dim] if d == dim else 1 for d in range(x.ndim))
    real = o.lt(o.iota(shape=shape, dim=dim, dtype=torch.int64), valid(n, axes, mesh))
    return o.where(real, x, value)


def lowest(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max


class _LocalBlock:
    """Writes one block on local types."""

    def __init__(self, program: Program, name: str, layouts: Layouts, moves: Moves) -> None:
        self.program, self.block, self.layouts, self.laid, self.moves = (
            program,
            program.blocks[name],
            layouts,
            layouts[name],
            moves,
        )
        self.mesh = moves.mesh
        self.b = Builder()
        self.at_hand: dict[Var, dict[Layout, Atom]] = {}
        self.moved: dict[Var, tuple[Var, Layout]] = {}  # what moves have made: of which value, in which layout
        self.wanted: dict[Var, list[Layout]] = {}  # of each value, by the equations of the block and its results
        self.by_equation: list[list[Eqn]] = []  # of each equation of the block, and last of its outputs

    def lowered(self, again: Collection[int] = ()) -> Block:
        for v, layout in zip(self.block.inputs, self.laid.inputs, strict=True):
            self.at_hand[v] = {layout: self.b.input(v.name, layout.local(v.type, self.mesh))}
        as_given = {self.block.inputs[i]: dict(self.at_hand[self.block.inputs[i]]) for i in again}
        for x, wanted in self._uses():
            if isinstance(x, Var) and wanted is not None and x not in as_given:
                self.wanted.setdefault(x, []).append(wanted)
        with self.b:
            for eqn, choice in zip(self.block.eqns, self.laid.choices, strict=True):
                self.b.at(eqn)
                before = len(self.b.eqns)
                self.equation(eqn, choice)
                self.by_equation.append(self.b.eqns[before:])
                for v in eqn.vars:
                    if v in as_given:
                        self.at_hand[v] = dict(as_given[v])
            self.b.source, before = "", len(self.b.eqns)
            outs = [self.get(x, layout) for x, layout in zip(self.block.outputs, self.laid.outputs, strict=True)]
            self.by_equation.append(self.b.eqns[before:])
        return self.b.block(outs)

    def _uses(self) -> Iterator[tuple[Atom, Layout | None]]:
        for eqn, choice in zip(self.block.eqns, self.laid.choices, strict=True):
            ins = choice.ins if choice is not None else interface(eqn, self.layouts)[0]
            yield from zip(eqn.inputs, ins, strict=True)
        yield from zip(self.block.outputs, self.laid.outputs, strict=True)

    def get(self, x: Atom, layout: Layout | None) -> Atom:
        """A value in a layout, moved from the nearest one at hand; or by way of one that another equation wants, where
        both together cost less."""
        if not isinstance(x, Var) or layout is None:
            return x
        if layout not in self.at_hand[x]:
            way, direct = self._first(x, layout), self._seconds(x, layout)
            if way is not None and self._seconds(x, way) + self.moves.seconds(x.type, way, layout) < direct + min(
                self._seconds(x, way), self.moves.seconds(x.type, layout, way)
            ):
                self._move(x, way)
            self._move(x, layout)
        return self.at_hand[x][layout]

    def _first(self, x: Var, layout: Layout) -> Layout | None:
        """Of what else is wanted of a value and not at hand: what this layout is nearest to."""
        others = [y for y in self.wanted.get(x, ()) if y not in self.at_hand[x] and y != layout]
        others = [y for y in others if set(y.partial) >= set(layout.partial)]
        return min(others, key=lambda y: self.moves.seconds(x.type, y, layout), default=None)

    def _seconds(self, x: Var, layout: Layout) -> float:
        return self.moves.seconds(x.type, self._nearest(x, layout), layout)

    def _nearest(self, x: Var, layout: Layout) -> Layout:
        """Of what is at hand; a partial sum is what was computed as one, while there is such, and no sum that is taken
        apart again."""
        have = self.at_hand[x]
        partial = [y for y in have if set(y.partial) >= set(layout.partial)]
        return min(partial or have, key=lambda y: self.moves.seconds(x.type, y, layout))

    def _move(self, x: Var, layout: Layout) -> None:
        have = self.at_hand[x]
        if layout not in have:
            source = self._nearest(x, layout)
            value = have[source]
            for move in self.moves.chain(x.type, source, layout)[1]:
                if move.op:
                    value = OPS[move.op](value, **move.params)
                    self.moved[value] = x, move.layout
                have.setdefault(move.layout, value)

    def equation(self, eqn: Eqn, choice: Choice | None) -> None:
        ins, outs = (choice.ins, choice.outs) if choice is not None else interface(eqn, self.layouts)
        values = [self.get(x, layout) for x, layout in zip(eqn.inputs, ins, strict=True)]
        before = len(self.b.eqns)
        if choice is None:
            types = [layout.local(v.type, self.mesh) for v, layout in zip(eqn.outputs, outs, strict=True)]
            results = self.b.append(eqn.op, tuple(values), dict(eqn.params), types)
        elif eqn.op.lies:  # a rank has its part already
            results = values[0]
        elif choice.expand:
            results = self.expanded(eqn, choice, values)
        else:
            results = self.written(eqn, choice, values)
        results = results if isinstance(results, tuple) else (results,)
        for v, layout, new in zip(eqn.outputs, outs, results, strict=True):
            want = layout.local(v.type, self.mesh)
            if isinstance(new, Var) and new.type != want:
                raise IRError(
                    f"{eqn.op.name} on parts gives {new.type}, not {want} of {v.type} in {layout}\n"
                    f"  at        {eqn.source}"
                )
            self.at_hand[v] = {layout: new}
        self.rename(eqn, before)

    def rename(self, eqn: Eqn, before: int) -> None:
        """Results keep the names the user's lines gave them."""
        if len(self.b.eqns) == before:
            return
        last = self.b.eqns[-1]
        outs = {x for v in eqn.outputs for x in self.at_hand[v].values()}
        if last.op is not eqn.op or not all(x in outs for x in last.outputs):
            return
        names = {new: Var(self.b.name(old.name), new.type) for old, new in zip(eqn.outputs, last.outputs, strict=False)}
        self.b.eqns[-1] = replace(last, outputs=tuple(names.get(x, x) for x in last.outputs))
        for v in eqn.outputs:
            self.at_hand[v] = {k: names.get(x, x) if isinstance(x, Var) else x for k, x in self.at_hand[v].items()}

    def written(self, eqn: Eqn, choice: Choice, values: list[Atom]) -> Any:
        """The operator on parts, by the rule of its split letters where it has one."""
        options = Options.of(eqn)
        values = self.covered(eqn, options, choice, values)
        params = dict(eqn.params)
        if "shape" in params:
            params["shape"] = choice.outs[0].local(eqn.outputs[0].type, self.mesh).shape
        rule = next((r for k in choice.letters if (r := options.rule(choice.letters, k)) is not None), None)
        if rule is None:
            return eqn.op(*values, **params)
        assert options.fit is not None
        return rule.write(At(self.mesh, choice, options.fit.sizes, eqn.outputs[0].shape), *values, **params)

    def covered(self, eqn: Eqn, options: Options, choice: Choice, values: list[Atom]) -> list[Atom]:
        """Operands with their padding masked where it would reach results: zeros before sums, the least before maxima,
        valid indices."""
        if options.fit is None:
            return values
        values, fit = list(values), options.fit
        for letter, axes in choice.letters.items():
            if is_even(fit.sizes[letter], axes, self.mesh):
                continue
            flag = fit.flags.get(letter, "")
            for i, (item, x) in enumerate(zip(fit.ins, values, strict=False)):
                d = next((d for d, dim in enumerate(item or ()) if letter in dim), None)
                if d is None or not isinstance(x, Var):
                    continue
                if flag in (">", "<"):
                    value = lowest(x.dtype) if flag == ">" else highest(x.dtype)
                elif eqn.op.padding == "ones" and not x.dtype.is_floating_point:
                    value = 1
                elif (
                    flag == "+"
                    or eqn.op.padding == "zeros"
                    or (not x.dtype.is_floating_point and not x.dtype.is_complex and not eqn.op.on_elements)
                ):
                    value = False if x.dtype == torch.bool else 0
                else:
                    continue
                values[i] = masked(x, d, fit.sizes[letter], axes, self.mesh, value)
        return values

    def expanded(self, eqn: Eqn, choice: Choice, values: list[Atom]) -> Any:
        """The operator's meaning in smaller operators, each on parts as they come."""
        b = Builder()
        inputs = [b.input(f"x{i}", x.type) if isinstance(x, Var) else x for i, x in enumerate(eqn.inputs)]
        with b:
            assert eqn.op.expand is not None
            results = eqn.op.expand(*inputs, **eqn.params)
        results = results if isinstance(results, tuple) else (results,)
        block = b.block(results)
        layouts = [layout for layout in choice.ins if layout is not None]
        inner = Program({"main": block})
        laid = follow(inner, "main", layouts, choice.outs, self.moves)
        inner_block = _LocalBlock(inner, "main", {"main": laid}, self.moves)
        operands = [x for x in values if isinstance(x, Var)]
        inner_block.b = self.b
        for v, layout, x in zip(block.inputs, layouts, operands, strict=True):
            inner_block.at_hand[v] = {layout: x}
        for e, c in zip(block.eqns, laid.choices, strict=True):
            inner_block.equation(e, c)
        return tuple(inner_block.get(x, layout) for x, layout in zip(block.outputs, laid.outputs, strict=True))


def interface(eqn: Eqn, layouts: Layouts) -> tuple[tuple[Layout | None, ...], tuple[Layout, ...]]:
    """The layouts of the operands and results of control flow: those of its blocks."""
    p = eqn.params
    if eqn.op is call or eqn.op is custom:
        laid = layouts[p["block" if eqn.op is call else "forward"]]
        return laid.inputs, laid.outputs
    if eqn.op is cond:
        laid = layouts[p["then"]]
        return (Layout(()), *laid.inputs), laid.outputs
    laid = layouts[p["body"]]
    if eqn.op is loop:
        return laid.inputs, laid.outputs
    assert eqn.op is scan
    n, m = p.get("consts", 0) + p.get("carry", 0), p.get("carry", 0)
    return (*laid.inputs[:n], *map(_rows, laid.inputs[n:])), (*laid.outputs[:m], *map(_rows, laid.outputs[m:]))


def _rows(layout: Layout) -> Layout:
    """A row's layout -> that of all rows."""
    return Layout(((), *layout.dims), layout.partial)
