"""What is known of a tensor as a function of its index.

    Affine   offset + Σ steps · index                              iota and its sums, shifts, slices
    Either   `yes` inside a region of the index space, else `no`   comparisons of Affine, full,
                                                                   and operators on elements of these
    Distance |offset + Σ steps · index|                            abs of an Affine that changes its sign

An operator on elements is applied to Eithers by its own kernel, on one element for each combination of regions, so
rounding, promotion and infinities are exactly torch's.  An Affine is kept only where its dtype holds all its numbers
exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import Atom, Eqn, Type, Var, promote
from mycel.transform.fold import is_pointwise
from mycel.transform.regions import ALL, NONE, Affine, Region, Shape, half, join, meet, moved


@dataclass(frozen=True, slots=True, eq=False)
class Either:
    """`yes` inside the region, `no` outside."""

    region: Region
    yes: Any
    no: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Either) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        return self.region, repr(self.yes), repr(self.no)  # tells 0.0 from -0.0


@dataclass(frozen=True, slots=True)
class Distance:
    """|of|"""

    of: Affine


Value = Affine | Either | Distance
Values = tuple[Value | None, ...]


def of_equation(eqn: Eqn, operands: Values) -> Value | None:
    """The value of an equation with one output, from those of its operands, all known."""
    inputs = [Either(ALL, x, x) if v is None else v for x, v in zip(eqn.inputs, operands, strict=True)]
    rule = RULES.get(eqn.op.name)
    if any(isinstance(v, Distance) for v in inputs):
        return rule(eqn, inputs) if rule is _move else _near(eqn, inputs) if rule is _compare else None
    value = rule(eqn, inputs) if rule else None
    if value is None and is_pointwise(eqn.op):
        value = _pointwise(eqn, inputs, lambda *xs: eqn.op.kernel(*xs, **eqn.params))
    return _held(value, eqn.outputs[0].type) if isinstance(value, Affine) else value


def of_constant(value: torch.Tensor) -> Value | None:
    """A constant that is one number, or two numbers on the two sides of a diagonal."""
    if not value.numel() or value.is_complex() or (value.is_floating_point() and value.itemsize == 1):
        return None
    first = value.reshape(-1)[0]
    if bool((value == first).all()):
        return Either(ALL, first.item(), first.item())
    if value.ndim < 2:
        return None
    face = value.reshape(-1, *value.shape[-2:])[0]
    yes, no = face[-1, 0], face[0, -1]
    diagonal = int((face[0] == yes).sum()) - 1
    inside = torch.tril(torch.ones_like(face, dtype=torch.bool), diagonal)
    if not bool((value == torch.where(inside, yes, no)).all()):
        return None
    return Either(half(Affine(diagonal, (0,) * (value.ndim - 2) + (1, -1)), tuple(value.shape)), yes.item(), no.item())


def _affine(value: Value | None, ndim: int) -> Affine | None:
    """The value as an Affine, if it is one."""
    if isinstance(value, Affine):
        return value
    number = number_of(value)
    return Affine(int(number), (0,) * ndim) if _is_whole(number) and not isinstance(number, bool) else None


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def number_of(value: Value | None) -> Any:
    """The number a value is everywhere, or None."""
    if isinstance(value, Affine):
        return value.offset if not any(value.steps) else None
    return value.yes if isinstance(value, Either) and value.region == ALL else None


def _held(a: Affine, type: Type) -> Affine | None:
    """The Affine, if its dtype holds all of it exactly."""
    a = a.normal(type.shape)
    return a if _fits(a, type.shape, type.dtype) else None


def _fits(a: Affine, shape: Shape, dtype: torch.dtype) -> bool:
    low, high = a.bounds(shape)
    if dtype.is_floating_point:
        return max(-low, high) <= min(2 / torch.finfo(dtype).eps, torch.finfo(dtype).max)
    return (
        dtype != torch.bool
        and not dtype.is_complex
        and torch.iinfo(dtype).min <= low
        and high <= torch.iinfo(dtype).max
    )


# -- operators on elements ----------------------------------------------------------------------------------


def broadcast(old: Shape, new: Shape) -> Callable[[Affine], Affine]:
    """A change of index: an operand broadcast to a larger shape."""
    lead = len(new) - len(old)
    return lambda a: Affine(a.offset, (0,) * lead + tuple(s if n > 1 else 0 for s, n in zip(a.steps, old, strict=True)))


def _is_real(x: Atom) -> bool:
    return isinstance(x, Var) and x.dtype.is_floating_point


def _shape(x: Atom) -> Shape:
    return x.shape if isinstance(x, Var) else ()


def _pointwise(eqn: Eqn, inputs: Sequence[Value], kernel: Callable[..., Any]) -> Either | None:
    """An operator on elements: its kernel on one element for each combination of the operands' regions."""
    shape = eqn.outputs[0].shape
    regions: list[Region] = []
    tables: list[tuple[int | None, bool, Either]] = []  # which region decides an operand, and whether inversely
    for x, value in zip(eqn.inputs, inputs, strict=True):
        if isinstance(value, Affine):
            number = number_of(value)
            if number is None or (number == 0 and _is_real(x)):  # which zero?
                return None
            value = Either(ALL, number, number)
        if isinstance(value, Distance):
            return None
        region = moved(value.region, broadcast(_shape(x), shape), shape)
        if region is None:
            return None
        if region in (ALL, NONE):
            tables.append((None, region == NONE, value))
        elif region.inverse() in regions:
            tables.append((regions.index(region.inverse()), True, value))
        else:
            if region not in regions:
                regions.append(region)
            tables.append((regions.index(region), False, value))
    if len(regions) > 2:
        return None
    results: dict[tuple[bool, ...], Any] = {}
    for inside in itertools.product((True, False), repeat=len(regions)):
        if len(regions) == 2 and meet(_side(regions[0], inside[0]), _side(regions[1], inside[1]), shape) == NONE:
            continue
        elements = [
            element_of(x, c.yes if (True if at is None else inside[at]) != inverse else c.no)
            for x, (at, inverse, c) in zip(eqn.inputs, tables, strict=True)
        ]
        results[inside] = run_on(kernel, elements)
        if results[inside] is None:
            return None
    return _table(results, regions, shape)


def element_of(x: Atom, value: Any) -> Any:
    """One element of an operand, with as many dims and the dtype that it has."""
    return torch.full((1,) * x.ndim, value, dtype=x.dtype) if isinstance(x, Var) else x


def run_on(kernel: Callable[..., Any], elements: list[Any]) -> Any:
    try:
        return kernel(*elements).item()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, ZeroDivisionError):
        return None


def _table(results: dict[tuple[bool, ...], Any], regions: list[Region], shape: Shape) -> Either | None:
    """Results for each combination of regions -> one region with two values."""
    kinds = list(dict.fromkeys(map(repr, results.values())))
    by_kind = {repr(v): v for v in results.values()}
    if len(kinds) == 1:
        return Either(ALL, by_kind[kinds[0]], by_kind[kinds[0]])
    if len(kinds) != 2:
        return None
    yes, no = (by_kind[k] for k in kinds)
    for region, members in _formulas(regions, shape):
        if region is not None and all((repr(v) == kinds[0]) == (i in members) for i, v in results.items()):
            return Either(region, yes, no)
    return None


def _formulas(regions: list[Region], shape: Shape) -> Iterator[tuple[Region | None, set[tuple[bool, ...]]]]:
    """Regions made of one or two regions, each with the combinations that are inside."""
    every = set(itertools.product((True, False), repeat=len(regions)))
    for k, s in itertools.product(range(len(regions)), (True, False)):
        yield _side(regions[k], s), {i for i in every if i[k] == s}
    if len(regions) == 2:
        for s, t in sorted(every):
            a, b = _side(regions[0], s), _side(regions[1], t)
            yield meet(a, b, shape), {(s, t)}
            yield join(a, b, shape), {i for i in every if i[0] == s or i[1] == t}


def _side(region: Region, inside: bool) -> Region:
    return region if inside else region.inverse()


# -- operators that know their index ------------------------------------------------------------------------


def _iota(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    start, step = eqn.params.get("start", 0), eqn.params.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return Affine(start, tuple(step if d == eqn.params["dim"] else 0 for d in range(eqn.outputs[0].ndim)))


def _full(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    number = number_of(inputs[0])
    if number is None:
        return None
    number = run_on(lambda: torch.full((), number, dtype=eqn.outputs[0].dtype), [])
    return None if number is None else Either(ALL, number, number)


def _sum(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """add(a, b) and sub(a, b)"""
    pair = _pair(eqn, inputs)
    return None if pair is None else pair[0].plus(pair[1], 1 if eqn.op.name == "add" else -1)


def _product(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    pair = _pair(eqn, inputs)
    for a, b in (pair, pair[::-1]) if pair else ():
        if not any(b.steps):
            return Affine(a.offset * b.offset, tuple(s * b.offset for s in a.steps))
    return None


def _negative(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    a = inputs[0]
    return Affine(-a.offset, tuple(-s for s in a.steps)) if isinstance(a, Affine) else None


def _absolute(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    a = inputs[0]
    if not isinstance(a, Affine):
        return None
    return a if a.bounds(eqn.outputs[0].shape)[0] >= 0 else Distance(a)


def _pair(eqn: Eqn, inputs: Sequence[Value]) -> tuple[Affine, Affine] | None:
    """Two operands as Affines over the output's shape, at least one of them not just a number."""
    if not any(isinstance(v, Affine) for v in inputs):
        return None
    affines = []
    for x, value in zip(eqn.inputs, inputs, strict=True):
        a = _affine(value, len(_shape(x)))
        if a is None:
            return None
        affines.append(broadcast(_shape(x), eqn.outputs[0].shape)(a))
    return affines[0], affines[1]


COMPARE: dict[str, Callable[[Affine, Affine], Affine]] = {
    "ge": lambda a, b: a.plus(b, -1),
    "gt": lambda a, b: b.plus(a, -1).below(),
    "le": lambda a, b: b.plus(a, -1),
    "lt": lambda a, b: a.plus(b, -1).below(),
}


def _compare(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    pair = _pair(eqn, inputs)
    shape, dtype = eqn.outputs[0].shape, promote(*eqn.input_types)
    if pair is None or not all(_fits(a, shape, dtype) for a in pair):
        return None
    if eqn.op.name in COMPARE:
        return Either(half(COMPARE[eqn.op.name](*pair), shape), True, False)
    equal = meet(half(COMPARE["ge"](*pair), shape), half(COMPARE["le"](*pair), shape), shape)
    return None if equal is None else Either(equal, eqn.op.name == "eq", eqn.op.name != "eq")


def _near(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """|a| <= n is where a <= n and -a <= n; also as <, >, >=, and turned around."""
    turned = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
    name = eqn.op.name if isinstance(inputs[0], Distance) else turned.get(eqn.op.name, "")
    (x, far), (_, bound) = sorted(
        zip(eqn.inputs, inputs, strict=True), key=lambda pair: not isinstance(pair[1], Distance)
    )
    number, shape, dtype = number_of(bound), eqn.outputs[0].shape, promote(*eqn.input_types)
    if name not in turned or not isinstance(far, Distance) or not _is_whole(number):
        return None
    limit = int(number) - (name in ("lt", "ge"))  # inside: |a| <= limit
    of = broadcast(_shape(x), shape)(far.of)
    edge = Affine(limit, (0,) * len(shape))
    if not _fits(of, shape, dtype) or not _fits(edge, shape, dtype):
        return None
    inside = meet(half(edge.plus(of, -1), shape), half(edge.plus(of), shape), shape)
    return None if inside is None else Either(inside, name in ("le", "lt"), name in ("ge", "gt"))


def _cast(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    return inputs[0] if isinstance(inputs[0], Affine) else None


def _triangle(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """tril(x) is where(column - row <= diagonal, x, 0), triu(x) where(column - row >= diagonal, x, 0)."""
    x, out, d = eqn.inputs[0], eqn.outputs[0], eqn.params.get("diagonal", 0)
    assert isinstance(x, Var)
    lead = (0,) * (out.ndim - 2)
    kept = Affine(d, (*lead, 1, -1)) if eqn.op.name == "tril" else Affine(-d, (*lead, -1, 1))
    inside = Var("inside", Type(torch.bool, out.shape))
    both = replace(eqn, inputs=(inside, x))
    return _pointwise(
        both,
        [Either(half(kept, out.shape), True, False), inputs[0]],
        lambda c, x: torch.where(c, x, torch.zeros_like(x)),
    )


def _running_sum(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """cumsum of one number counts."""
    number, dim = number_of(inputs[0]), eqn.params["dim"]
    if not _is_whole(number) or eqn.outputs[0].ndim == 0:
        return None
    return Affine(int(number), tuple(int(number) if d == dim else 0 for d in range(eqn.outputs[0].ndim)))


def _joined(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """cat of parts that are one number, or that count on."""
    if all(v == inputs[0] for v in inputs) and number_of(inputs[0]) is not None:
        return inputs[0]
    dim, ndim, at = eqn.params["dim"], eqn.outputs[0].ndim, 0
    parts = [_affine(v, ndim) for v in inputs]
    step = next((a.steps[dim] for a, x in zip(parts, eqn.inputs, strict=True) if a and _shape(x)[dim] > 1), None)
    if step is None or None in parts:
        return None
    line = [Affine(a.offset, (*a.steps[:dim], step if _shape(x)[dim] == 1 else a.steps[dim], *a.steps[dim + 1 :]))
            for a, x in zip(parts, eqn.inputs, strict=True) if a]  # fmt: skip
    for a, x in zip(line, eqn.inputs, strict=True):
        if a != Affine(line[0].offset + at * step, line[0].steps):
            return None
        at += _shape(x)[dim]
    return line[0]


def _anywhere(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """Elements of a tensor that is one number, wherever they are taken from."""
    number = number_of(inputs[0])
    return None if number is None else Either(ALL, number, number)


def _move(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """Operators that move elements: the same value under a change of index."""
    x, value, shape = eqn.inputs[0], inputs[0], eqn.outputs[0].shape
    assert isinstance(x, Var)
    change = change_of_index(eqn, x.shape, shape)
    return _anywhere(eqn, inputs) if change is None else _changed(value, change, shape)


def _indexed(eqn: Eqn, inputs: Sequence[Value]) -> Value | None:
    """x[i, j] where i and j are affine: the same value under a change of index."""
    x, at, out = eqn.inputs[0], eqn.params["at"], eqn.outputs[0]
    assert isinstance(x, Var)
    indices = [_affine(v, len(_shape(i))) for i, v in zip(eqn.inputs[1:], inputs[1:], strict=True)]
    free = [d for d in range(x.ndim) if d not in at]
    lead = sum(d < at[0] for d in free) if at[-1] - at[0] == len(at) - 1 else 0  # dims before those of the indices
    behind = len(free) - lead
    chosen = dict[int, Affine]()  # of dims of x, over the dims of the result
    for d, i, a in zip(at, eqn.inputs[1:], indices, strict=True):
        if a is None or not 0 <= a.bounds(_shape(i))[0] <= a.bounds(_shape(i))[1] < x.shape[d]:
            return _anywhere(eqn, inputs)
        of_all = broadcast(_shape(i), out.shape[lead : out.ndim - behind])(a)
        chosen[d] = Affine(a.offset, (0,) * lead + of_all.steps + (0,) * behind)
    for k, d in enumerate(free):
        place = k if k < lead else out.ndim - len(free) + k
        chosen[d] = Affine(0, tuple(int(p == place) for p in range(out.ndim)))

    def change(a: Affine) -> Affine:
        total = Affine(a.offset, (0,) * out.ndim)
        for d, step in enumerate(a.steps):
            total = total.plus(chosen[d], step)
        return total

    return _changed(inputs[0], change, out.shape)


def _changed(value: Value, change: Callable[[Affine], Affine], shape: Shape) -> Value | None:
    """A value under a change of index."""
    if isinstance(value, Affine):
        return change(value)
    if isinstance(value, Distance):
        return Distance(change(value.of))
    region = moved(value.region, change, shape)
    return None if region is None else Either(region, value.yes, value.no)


def change_of_index(eqn: Eqn, old: Shape, new: Shape) -> Callable[[Affine], Affine] | None:
    p = eqn.params
    match eqn.op.name:
        case "expand":
            return broadcast(old, new)
        case "stop_gradient":
            return lambda a: a
        case "permute":
            return lambda a: Affine(a.offset, tuple(a.steps[d] for d in p["dims"]))
        case "select":
            return lambda a: Affine(
                a.offset + a.steps[p["dim"]] * p["index"], a.steps[: p["dim"]] + a.steps[p["dim"] + 1 :]
            )
        case "slice":
            return lambda a: _along(a, p["dim"], p["start"], p.get("step", 1))
        case "flip" if len(p["dims"]) == 1:
            return lambda a: _along(a, p["dims"][0], old[p["dims"][0]] - 1, -1)
        case "reshape" if [n for n in old if n > 1] == [n for n in new if n > 1]:
            return lambda a: _refit(a, old, new)
    return None


def _along(a: Affine, dim: int, start: int, step: int) -> Affine:
    """Index i of a dim becomes start + step i."""
    steps = tuple(s * step if d == dim else s for d, s in enumerate(a.steps))
    return Affine(a.offset + a.steps[dim] * start, steps)


def _refit(a: Affine, old: Shape, new: Shape) -> Affine:
    """Dims of size one come and go."""
    rest = iter([s for s, n in zip(a.steps, old, strict=True) if n > 1])
    return Affine(a.offset, tuple(next(rest) if n > 1 else 0 for n in new))


RULES: dict[str, Callable[[Eqn, Sequence[Value]], Value | None]] = {
    "iota": _iota, "full": _full, "cast": _cast,
    "add": _sum, "sub": _sum, "mul": _product, "neg": _negative, "abs": _absolute,
    **dict.fromkeys(("eq", "ne", "ge", "gt", "le", "lt"), _compare),
    "tril": _triangle, "triu": _triangle, "cumsum": _running_sum, "cat": _joined,
    **dict.fromkeys(("expand", "stop_gradient", "permute", "select", "slice", "flip", "reshape"), _move),
    "index": _indexed, **dict.fromkeys(("index_select", "gather", "repeat", "repeat_each", "roll"), _anywhere),
}  # fmt: skip
