"""A loss in which rows of the batch meet, with the activations of one part at a time: what each row is by itself is
computed a part at a time, and again for its gradient; where rows meet, the whole batch is there.

    h: f32[8,4] = features(x: f32[8,6], w)        xs: f32[2,4,6] = reshape(x)              two parts of four rows
    s: f32[8,8] = matmul(h, t(h))            =>   hs: f32[2,4,4] = scan(w, xs, body=@part)
    loss        = cross_entropy(s, …)             h: f32[8,4]    = reshape(hs)
                                                  s, loss        as before

`part` is a `custom` equation: its gradient runs it once more, so of a part its rows and what it returns are kept.

Shown right, not believed: the program of a part and that of the whole batch are the same equations with other sizes.
A value is

    same      no row has a share in it: weights, and what is made of them
    rows      its rows are those of the whole batch's value: for its equation the letter of the batch is free (of a
              draw any numbers are as good)
    once      no parameter has a share in it, nor what a part draws, and rows move or are summed up: x[permutation],
              x - mean(x); it is computed first, of the whole batch, and is rows from there on, or the same
    whole     anything else; from there on the whole batch is computed at once

Nothing is gained where most of the parameters are used by what is whole (a batch norm early in a network): None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mycel.ir import (
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Type,
    Var,
    call,
    custom,
    is_float,
    leading_to,
    prune,
    scan,
    substitute,
)
from mycel.ops import o
from mycel.transform.dce import dce
from mycel.transform.vjp import value_and_grad

NEXT = 1 << 40  # the key of the next part is the child of this one's that no draw or call is
# of blocks and constants of a part and of its gradient: they have the names of the whole batch's
FORWARD, BACKWARD = "part_", "part_again_"
MOST = 0.5  # of the elements of parameters, used where rows have met
SIZED = ("shape", "strides")  # params that say how many rows there are


@dataclass(frozen=True)
class _Value:
    """`rows`: the dim along which a part's value is rows of the whole one's, `outer` times over (of [time batch, …] as
    one dim, for each time); None: the two are the same value."""

    whole: bool = False
    rows: int | None = None
    outer: int = 1
    trained: bool = False
    keyed: bool = False  # the key, or one made of it
    drawn: bool = False
    once: bool = False  # the whole batch's value is there before the first part

    @property
    def feature(self) -> bool:
        """Has it to be computed by parts, and once?"""
        return self.rows is not None and (self.trained or self.drawn)


def by_parts(
    part: Program, whole: Program, trained: Collection[str], split: Collection[str], parts: int
) -> Program | None:
    """The program of the whole batch, its rows computed a part at a time as long as each is alone; None where the two
    programs are not the same equations, or most of the parameters are used where rows have met.

    By name: `trained`, inputs that are differentiated; `split`, inputs that are cut into parts along their first
    dim."""
    if not _alike(part.main, whole.main):
        return None
    keys = {v.name for v in part.inputs_of("key")}
    inputs = [
        _Value(rows=0 if v.name in split else None, trained=v.name in trained, keyed=v.name in keys)
        for v in part.main.inputs
    ]
    values = _Statuses(part, whole, parts).block(part.main, whole.main, inputs)
    late, features = _cut(whole.main, values)
    used = {x.name for i in late for x in whole.main.eqns[i].vars if x.name in trained}
    sizes = {v.name: v.type.numel for v in whole.main.inputs if v.name in trained}
    if not features or sum(sizes[name] for name in used) > MOST * sum(sizes.values()):
        return None
    return _written(part, whole, late, features, values, trained, split, parts)


def _alike(a: Block, b: Block) -> bool:
    """The same equations on the same inputs, but for sizes."""
    shapes = [[(e.op, len(e.inputs), len(e.outputs)) for e in block.eqns] for block in (a, b)]
    return shapes[0] == shapes[1] and [v.name for v in a.inputs] == [v.name for v in b.inputs]


class _Statuses:
    """What the values of a part are to those of the whole batch."""

    def __init__(self, part: Program, whole: Program, parts: int) -> None:
        self.part, self.whole, self.parts = part, whole, parts
        self.inside = 0  # calls

    def block(self, part: Block, whole: Block, inputs: Sequence[_Value]) -> dict[Var, _Value]:
        """By the whole block's values."""
        values = dict(zip(whole.inputs, inputs, strict=True))
        for small, large in zip(part.eqns, whole.eqns, strict=True):
            values.update(zip(large.outputs, self.equation(small, large, values), strict=True))
        return values

    def equation(self, small: Eqn, large: Eqn, values: Mapping[Var, _Value]) -> list[_Value]:
        given = [values[x] if isinstance(x, Var) else _Value() for x in large.inputs]
        outs = None
        if not any(g.whole for g in given):
            outs = self.call(small, large, given) if large.op is call else self.plain(small, large, given)
        if outs is None or any(y.whole for y in outs):
            return self.together(small, large, given)
        return outs

    def together(self, small: Eqn, large: Eqn, given: Sequence[_Value]) -> list[_Value]:
        """Of an equation whose rows are not shown to be apart."""
        trained, drawn = any(g.trained for g in given), any(g.drawn for g in given)
        at = [self.row_dim(v, w) for v, w in zip(small.outputs, large.outputs, strict=True)]
        if self.inside or trained or drawn or large.op.effect or any(at):  # rows are the first dim, or there are none
            return [_Value(whole=True, trained=trained, drawn=drawn)] * len(at)
        return [_Value(rows=dim, once=True) for dim in at]

    def call(self, small: Eqn, large: Eqn, given: Sequence[_Value]) -> list[_Value] | None:
        inner = [p.blocks[e.params["block"]] for p, e in ((self.part, small), (self.whole, large))]
        if not _alike(*inner):
            return None
        self.inside += 1
        values = self.block(inner[0], inner[1], given)
        self.inside -= 1
        return [values[x] if isinstance(x, Var) else _Value() for x in inner[1].outputs]

    def plain(self, small: Eqn, large: Eqn, given: Sequence[_Value]) -> list[_Value] | None:
        """None: not shown."""
        numbers = [[x for x in e.inputs if not isinstance(x, Var)] for e in (small, large)]
        params = [{k: v for k, v in e.params.items() if k not in SIZED} for e in (small, large)]
        if large.op.dims is None or large.op.effect or numbers[0] != numbers[1] or params[0] != params[1]:
            return None
        trained, keyed = any(g.trained for g in given), any(g.keyed for g in given)
        draws = keyed and large.op is not o.fold_in
        drawn = draws or any(g.drawn for g in given)
        at = [self.row_dim(v, w) for v, w in zip(small.outputs, large.outputs, strict=True)]
        if all(g.rows is None for g in given) and set(at) == {None}:
            return None if draws else [_Value(trained=trained, keyed=keyed) for _ in at]
        outer: list[int] | None = [1] * len(at)
        if large.op is not o.expand or any(g.rows is not None for g in given):
            outer = self.apart(small, large, given, draws)
        if outer is None or None in at or -1 in at:
            return None
        return [
            _Value(
                rows=dim,
                outer=times,
                trained=trained and is_float(v.dtype),
                drawn=drawn or (trained and not is_float(v.dtype)),
            )
            for v, dim, times in zip(large.outputs, at, outer, strict=True)
        ]

    def row_dim(self, small: Var, large: Var) -> int | None:
        """The one dim with as many rows as there are parts of a part's; -1 if that is not all that differs."""
        pairs = [*enumerate(zip(small.shape, large.shape, strict=False))]
        differ = [i for i, (a, b) in pairs if a != b]
        if not differ:
            return None
        fits = len(differ) == 1 and small.ndim == large.ndim
        return differ[0] if fits and small.shape[differ[0]] * self.parts == large.shape[differ[0]] else -1

    def apart(self, small: Eqn, large: Eqn, given: Sequence[_Value], draws: bool) -> list[int] | None:
        """How many times over its results have the rows, if the equation's rows are apart: if it has one letter that
        differs, which is free, and each operand has its rows there."""
        fits = [e.op.fit(e.input_types, dict(e.params)) for e in (small, large)]
        fit = fits[1]
        differ = [k for k, n in fit.sizes.items() if fits[0].sizes.get(k) != n]
        letters = {k for item in fit.ins for dim in item or () for k in dim}
        if len(differ) != 1 or fit.flags.get(differ[0]) or (letters and differ[0] not in letters):
            return None
        (letter,) = differ
        if not draws and any(letter in key.split() or key == "*" for key in large.op.parts):
            return None  # a rule of its own says that parts are not apart

        def slower(item: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
            """The dims with the letter, and the number of elements in each that are slower than it."""
            return [
                (i, math.prod(fit.sizes[k] for k in dim[: dim.index(letter)]))
                for i, dim in enumerate(item)
                if letter in dim
            ]

        inside = set()  # how often the letter itself has the rows
        for g, item in zip(given, fit.ins, strict=True):
            places = slower(item or ())
            if [i for i, _ in places] != ([] if g.rows is None else [g.rows]):
                return None
            inside |= {g.outer / n for _, n in places}
        results = [slower(item) for item in fit.outs]
        if len(inside) > 1 or any(n != int(n) for n in inside) or any(len(dims) != 1 for dims in results):
            return None
        return [int(dims[0][1] * next(iter(inside), 1)) for dims in results]


def _cut(whole: Block, values: Mapping[Var, _Value]) -> tuple[list[int], list[Var]]:
    """The equations that are computed for the whole batch, and what they take from those that are not."""
    makers = {v: i for i, e in enumerate(whole.eqns) for v in e.outputs}
    late: set[int] = set()
    features: dict[Var, None] = {}
    ahead = [x for x in whole.outputs if isinstance(x, Var)]
    while ahead:
        x = ahead.pop()
        if x not in makers:
            continue
        if values[x].feature:
            features[x] = None
        elif makers[x] not in late:
            late.add(makers[x])
            ahead += whole.eqns[makers[x]].vars
    order = [*makers]
    return sorted(late), sorted(features, key=order.index)


def _written(
    part: Program,
    whole: Program,
    late: Sequence[int],
    features: Sequence[Var],
    values: Mapping[Var, _Value],
    trained: Collection[str],
    split: Collection[str],
    parts: int,
) -> Program:
    """The scan over the parts, then the equations of the whole batch."""
    results = [[v for e in block.eqns for v in e.outputs] for block in (whole.main, part.main)]
    of_part = dict(zip(*results, strict=True))
    outs = [of_part[v] for v in features]
    once = {of_part[v]: v for v in results[0] if values[v].once}
    eqns = tuple(e for e in part.main.eqns if not once.keys() & {*e.outputs})
    block = Block((*part.main.inputs, *once), eqns, tuple(outs))
    small = dce(replace(part, blocks={**part.blocks, part.entry: block}, updates=()))
    uses = {x for e in small.main.eqns for x in e.vars} | {x for x in small.main.outputs if isinstance(x, Var)}
    used = [v for v in small.main.inputs if v in uses]
    keyed = {v.name for v in part.inputs_of("key")}
    wrt = [v for v in used if v.name in trained]
    keys = [v for v in used if v.name in keyed]
    pieces = [v for v in used if (values[once[v]].rows is not None if v in once else v.name in split)]
    held = wrt + [v for v in used if v not in {*wrt, *keys, *pieces}]
    first = {v: once[v] for v in used if v in once}
    operands = (*held, *keys, *pieces)
    forward = Block(operands, small.main.eqns, small.main.outputs)
    gradient = _gradient(small, forward, wrt)
    blocks, consts = dict(whole.blocks), dict(whole.consts)
    for program, block, name, prefix in (
        (small, forward, "part_features", FORWARD),
        (gradient, gradient.main, "part_gradient", BACKWARD),
    ):
        blocks |= {prefix + k: _prefixed(b, prefix) for k, b in program.blocks.items() if k != program.entry}
        blocks[name] = _prefixed(block, prefix)
        consts |= {prefix + k: c for k, c in program.consts.items()}
    params = Params(forward=Ref("part_features"), backward=Ref("part_gradient"), wrt=len(wrt), outs=len(outs))
    b = Builder()
    b.reserve(v.name for v in (*operands, *outs))
    with b:
        b.eqns.append(Eqn(custom, operands, params, tuple(outs)))
        folded = [o.fold_in(key, data=NEXT) for key in keys]
    blocks["part_turn"] = Block(operands, tuple(b.eqns), (*folded, *outs))
    return _entry(whole, blocks, consts, late, features, values, (held, keys, pieces), first, outs, parts)


def _entry(
    whole: Program,
    blocks: dict[str, Block],
    consts: dict[str, torch.Tensor],
    late: Sequence[int],
    features: Sequence[Var],
    values: Mapping[Var, _Value],
    operands: tuple[Sequence[Var], Sequence[Var], Sequence[Var]],
    first: Mapping[Var, Var],
    outs: Sequence[Var],
    parts: int,
) -> Program:
    """`first`: what is computed before the parts, by its name in a part."""
    main = whole.main
    held, keys, pieces = operands
    b = Builder(names_of=main)
    b.inputs = list(main.inputs)
    by_name = {v.name: v for v in main.inputs} | {v.name: w for v, w in first.items()}
    early = leading_to(main.eqns, first.values())
    with b:
        b.eqns.extend(main.eqns[i] for i in early)
        rows = [o.reshape(by_name[v.name], shape=(parts, *v.shape)) for v in pieces]
        inputs = (*(by_name[v.name] for v in (*held, *keys)), *rows)
        params = {"body": Ref("part_turn"), "length": parts, "consts": len(held), "carry": len(keys)}
        types = [v.type for v in keys] + [Type(v.dtype, (parts, *v.shape)) for v in outs]
        scanned = b.append(scan, inputs, params, types)
        stacked = (list(scanned) if isinstance(scanned, tuple) else [scanned])[len(keys) :]
        whole_values: dict[Var, Atom] = {
            v: _one_behind_the_other(x, v.shape, values[v]) for v, x in zip(features, stacked, strict=True)
        }
    eqns = [substitute(main.eqns[i], whole_values) for i in late if i not in early]
    outputs = tuple(whole_values.get(x, x) if isinstance(x, Var) else x for x in main.outputs)
    blocks[whole.entry] = Block(tuple(b.inputs), (*b.eqns, *eqns), outputs)
    return prune(replace(whole, blocks=blocks, consts=consts))


def _one_behind_the_other(x: Var, shape: Sequence[int], value: _Value) -> Var:
    """[parts, …, outer rows, …] -> […, outer parts rows, …]"""
    dim, outer = value.rows or 0, value.outer
    if dim or outer > 1:
        before, rows, behind = x.shape[1 : dim + 1], x.shape[dim + 1], x.shape[dim + 2 :]
        x = o.reshape(x, shape=(x.shape[0], *before, outer, rows // outer, *behind))
        x = o.permute(x, dims=(*range(1, dim + 2), 0, *range(dim + 2, x.ndim)))
    return o.reshape(x, shape=tuple(shape))


def _gradient(part: Program, forward: Block, wrt: Sequence[Var]) -> Program:
    """(operands, results, cotangents of results) -> cotangents of the first operands, from a second run of forward."""
    b = Builder(names_of=forward)
    b.eqns = list(forward.eqns)
    results = [x for x in forward.outputs if isinstance(x, Var)]
    again = [Var(b.name(f"{v.name}_before"), v.type) for v in results]
    floats = [v for v in results if is_float(v.dtype)]
    given = [Var(b.name(f"d_{v.name}"), v.type) for v in floats]
    total: Atom = None
    with b:
        for v, g in zip(floats, given, strict=True):
            wide = torch.float64 if v.dtype == torch.float64 else torch.float32
            product = o.mul(o.cast(v, dtype=wide), o.cast(g, dtype=wide))
            term = o.sum(product, dims=tuple(range(v.ndim)))
            total = term if total is None else o.add(o.cast(total, dtype=wide), o.cast(term, dtype=wide))
    inputs = (*forward.inputs, *again, *given)
    program = replace(
        part,
        blocks={**part.blocks, part.entry: Block(inputs, tuple(b.eqns), (total,))},
        roles={k: r for k, r in part.roles.items() if k in {v.name for v in inputs}},
        updates=(),
    )
    pulled = value_and_grad(program, range(len(wrt)))
    block = replace(pulled.main, outputs=pulled.main.outputs[1:])
    return dce(replace(pulled, blocks={**pulled.blocks, pulled.entry: block}))


def _prefixed(block: Block, prefix: str) -> Block:
    """A block that names others and constants with a prefix."""

    def param(eqn: Eqn, key: str, value: object) -> object:
        if isinstance(value, Ref):
            return Ref(prefix + value)
        return f"{prefix}{value}" if eqn.op is o.const and key == "name" else value

    def written(eqn: Eqn) -> Eqn:
        return replace(eqn, params=Params({k: param(eqn, k, v) for k, v in eqn.params.items()}))

    return replace(block, eqns=tuple(map(written, block.eqns)))
