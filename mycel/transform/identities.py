"""Identities: the docstring of each is the rewrite, and the table at the end says where each is tried.

Rules look at operands only, which are already rewritten.  A scalar in a rule stands for a literal or for a `full` of
it.  A rule returns a value (or one for each output), a new equation `(op, inputs, params)`, or None where it does not
apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mycel.ir import Atom, Eqn, Var, is_float

Rule = Callable[[Eqn, "Made"], Any]


class Made:
    """The equations so far, by what they define."""

    def __init__(self) -> None:
        self.eqns: dict[Var, Eqn] = {}

    def by(self, x: Atom, op: str) -> Eqn | None:
        """The equation of operator `op` that made x."""
        eqn = self.eqns.get(x) if isinstance(x, Var) else None
        return eqn if eqn is not None and eqn.op.name == op else None

    def scalar(self, x: Atom) -> Any:
        """The number x is everywhere; None if that is not known."""
        if not isinstance(x, Var):
            return x
        eqn = self.by(x, "full")
        return None if eqn is None or isinstance(eqn.inputs[0], Var) else eqn.inputs[0]


# -- arithmetic ---------------------------------------------------------------------------------------------


def add_zero(e: Eqn, m: Made) -> Any:
    """add(x, 0) => x;  add(0, x) => x, of integers: -0.0 + 0 is 0.0"""
    return None if is_float(e.outputs[0].dtype) else _without(e, m, 0)


def sub_zero(e: Eqn, m: Made) -> Any:
    """sub(x, 0) => x"""
    return e.inputs[0] if _is(m, e.inputs[1], 0) else None


def mul_one(e: Eqn, m: Made) -> Any:
    """mul(x, 1) => x;  mul(1, x) => x"""
    return _without(e, m, 1)


def second_is_one(e: Eqn, m: Made) -> Any:
    """div(x, 1) => x;  pow(x, 1) => x"""
    return e.inputs[0] if _is(m, e.inputs[1], 1) else None


def mul_minus_one(e: Eqn, m: Made) -> Any:
    """mul(x, -1) => neg(x)"""
    for x, c in (e.inputs, e.inputs[::-1]):
        if isinstance(x, Var) and _is(m, c, -1) and (is_float(x.dtype) or x.dtype.is_signed):
            return "neg", (x,), {}
    return None


def square(e: Eqn, m: Made) -> Any:
    """pow(x, 2) => mul(x, x)"""
    return (
        ("mul", (e.inputs[0], e.inputs[0]), {})
        if _is(m, e.inputs[1], 2) and not e.outputs[0].dtype.is_complex
        else None
    )


def root(e: Eqn, m: Made) -> Any:
    """pow(x, 0.5) => sqrt(x)"""
    return ("sqrt", (e.inputs[0],), {}) if _is(m, e.inputs[1], 0.5) and not e.outputs[0].dtype.is_complex else None


def add_neg(e: Eqn, m: Made) -> Any:
    """add(x, neg(y)) => sub(x, y);  add(neg(y), x) => sub(x, y)"""
    for x, y in (e.inputs, e.inputs[::-1]):
        if (neg := m.by(y, "neg")) and _exact_neg(neg, e):
            return "sub", (x, neg.inputs[0]), {}
    return None


def sub_neg(e: Eqn, m: Made) -> Any:
    """sub(x, neg(y)) => add(x, y)"""
    neg = m.by(e.inputs[1], "neg")
    return ("add", (e.inputs[0], neg.inputs[0]), {}) if neg and _exact_neg(neg, e) else None


def twice_is_none(e: Eqn, m: Made) -> Any:
    """neg(neg(x)) => x;  also bitwise_not, conj, and logical_not of bools"""
    inner = m.by(e.inputs[0], e.op.name)
    return inner.inputs[0] if inner else None


def twice_is_once(e: Eqn, m: Made) -> Any:
    """relu(relu(x)) => relu(x);  also abs, ceil, floor, trunc, stop_gradient, and tril, triu with the same diagonal"""
    inner = m.by(e.inputs[0], e.op.name)
    return e.inputs[0] if inner and inner.params == e.params else None


def same_operands(e: Eqn, m: Made) -> Any:
    """maximum(x, x) => x;  also minimum, and logical and bitwise and, or of bools"""
    return e.inputs[0] if e.inputs[0] == e.inputs[1] else None


def clamp_nothing(e: Eqn, m: Made) -> Any:
    """clamp(x, None, None) => x"""
    return e.inputs[0] if e.inputs[1] is None and e.inputs[2] is None else None


def dropout_nothing(e: Eqn, m: Made) -> Any:
    """dropout(x, key, offset, p=0) => x"""
    return e.inputs[0] if e.params["p"] == 0 else None


# -- truth --------------------------------------------------------------------------------------------------


def and_true(e: Eqn, m: Made) -> Any:
    """logical_and(x, True) => x;  also bitwise_and, of bools"""
    return _without(e, m, True) if e.outputs[0].dtype == torch.bool else None


def or_false(e: Eqn, m: Made) -> Any:
    """logical_or(x, False) => x;  also logical_xor, bitwise_or, bitwise_xor"""
    return _without(e, m, False)


def where_known(e: Eqn, m: Made) -> Any:
    """where(True, a, b) => a;  where(False, a, b) => b"""
    known = m.scalar(e.inputs[0])
    return None if known is None else e.inputs[1] if known else e.inputs[2]


def where_same(e: Eqn, m: Made) -> Any:
    """where(c, x, x) => x"""
    return e.inputs[1] if isinstance(e.inputs[1], Var) and e.inputs[1] == e.inputs[2] else None


# -- the same elements --------------------------------------------------------------------------------------


def nothing_changes(e: Eqn, m: Made) -> Any:
    """reshape, expand, cast to what x is => x;  a slice of all of x => x"""
    return e.inputs[0]


def permute_nothing(e: Eqn, m: Made) -> Any:
    """permute(x, dims=(0, 1, …)) => x"""
    return e.inputs[0] if tuple(e.params["dims"]) == tuple(range(len(e.params["dims"]))) else None


def outer_alone(e: Eqn, m: Made) -> Any:
    """reshape(reshape(x)) => reshape(x);  expand(expand(x)) => expand(x)"""
    inner = m.by(e.inputs[0], e.op.name)
    return (e.op.name, inner.inputs, dict(e.params)) if inner else None


def permute_twice(e: Eqn, m: Made) -> Any:
    """permute(permute(x, dims=p), dims=q) => permute(x, dims=p[q])"""
    inner = m.by(e.inputs[0], "permute")
    if inner is None:
        return None
    return "permute", inner.inputs, {"dims": tuple(inner.params["dims"][d] for d in e.params["dims"])}


def slice_twice(e: Eqn, m: Made) -> Any:
    """slice(slice(x, start=a, step=s), start=b, step=t) => slice(x, start=a + s b, step=s t)"""
    inner = m.by(e.inputs[0], "slice")
    if inner is None or inner.params["dim"] != e.params["dim"]:
        return None
    n, s, t = e.outputs[0].shape[e.params["dim"]], inner.params.get("step", 1), e.params.get("step", 1)
    start = inner.params["start"] + s * e.params["start"]
    stop = start if n == 0 else start + s * t * (n - 1) + 1
    step = {"step": s * t} if s * t != 1 else {}
    return "slice", inner.inputs, {"dim": e.params["dim"], "start": start, "stop": stop, **step}


def cast_twice(e: Eqn, m: Made) -> Any:
    """cast(cast(x, dtype=a), dtype=b) => cast(x, dtype=b), where a loses nothing of x"""
    inner = m.by(e.inputs[0], "cast")
    if (
        inner is None
        or not isinstance(inner.inputs[0], Var)
        or not _holds(inner.params["dtype"], inner.inputs[0].dtype)
    ):
        return None
    return "cast", inner.inputs, dict(e.params)


def stop_nothing(e: Eqn, m: Made) -> Any:
    """stop_gradient(x) => x, where x is no float"""
    x = e.inputs[0]
    return x if isinstance(x, Var) and not is_float(x.dtype) else None


def reduce_nothing(e: Eqn, m: Made) -> Any:
    """sum(x, dims=()) => x;  also mean, prod, amax, amin, and flip"""
    return e.inputs[0] if not e.params["dims"] and e.params.get("count") is None else None


def pad_nothing(e: Eqn, m: Made) -> Any:
    """pad(x, widths=((0, 0), …)) => x"""
    return e.inputs[0] if all(tuple(w) == (0, 0) for w in e.params["widths"]) else None


def repeat_once(e: Eqn, m: Made) -> Any:
    """repeat(x, times=(1, …)) => x"""
    times = e.params["times"]
    return e.inputs[0] if (times == 1 if isinstance(times, int) else all(n == 1 for n in times)) else None


# -- parts --------------------------------------------------------------------------------------------------


def single_part(e: Eqn, m: Made) -> Any:
    """cat(x) => x;  split(x, sizes=(n,)) => x"""
    return e.inputs[0] if len(e.inputs) == len(e.outputs) == 1 else None


def split_of_cat(e: Eqn, m: Made) -> Any:
    """split(cat(a, b, dim=d), sizes=…, dim=d) => a, b;  unbind(stack(a, b, dim=d), dim=d) => a, b"""
    inner = m.by(e.inputs[0], "cat" if e.op.name == "split" else "stack")
    return (
        inner.inputs
        if inner and inner.params["dim"] == e.params["dim"] and len(inner.inputs) == len(e.outputs)
        else None
    )


def cat_of_split(e: Eqn, m: Made) -> Any:
    """cat(*split(x, dim=d), dim=d) => x;  stack(*unbind(x, dim=d), dim=d) => x"""
    inner = m.by(e.inputs[0], "split" if e.op.name == "cat" else "unbind") if e.inputs else None
    return inner.inputs[0] if inner and inner.outputs == e.inputs and inner.params["dim"] == e.params["dim"] else None


# -- matrices -----------------------------------------------------------------------------------------------


def product_transposed(e: Eqn, m: Made) -> Any:
    """matmul(x, permute(w, dims=(1, 0))) => linear(x, w);  linear(x, permute(w, dims=(1, 0))) => matmul(x, w)"""
    w = m.by(e.inputs[1], "permute")
    other = "linear" if e.op.name == "matmul" else "matmul"
    return (other, (e.inputs[0], w.inputs[0]), {}) if w and tuple(w.params["dims"]) == (1, 0) else None


def attention_of_repeated(e: Eqn, m: Made) -> Any:
    """attention(q, repeat_each(k, times=n, dim=1), repeat_each(v, times=n, dim=1), …) => attention(q, k, v, …)"""
    q, k, v, *mask = e.inputs
    repeated_k, repeated_v = _repeated(m, k), _repeated(m, v)
    if repeated_k is None or repeated_v is None or repeated_k.shape[1] != repeated_v.shape[1]:
        return None
    return e.op.name, (q, repeated_k, repeated_v, *mask), dict(e.params)


# -- what the rules ask -------------------------------------------------------------------------------------


def _is(m: Made, x: Atom, number: float) -> bool:
    """Is x the number everywhere?"""
    known = m.scalar(x)
    return known is not None and known == number


def _repeated(m: Made, x: Atom) -> Var | None:
    """The value whose dim 1 was repeated element by element to make x: by repeat_each, or by reshape, expand,
    reshape."""
    if each := m.by(x, "repeat_each"):
        source = each.inputs[0]
        return source if each.params["dim"] == 1 and isinstance(source, Var) else None
    outer = m.by(x, "reshape")
    wide = m.by(outer.inputs[0], "expand") if outer else None
    inner = m.by(wide.inputs[0], "reshape") if wide else None
    source = inner.inputs[0] if inner else None
    if not wide or not isinstance(source, Var) or source.ndim < 2 or not isinstance(x, Var):
        return None
    b, g, *rest = source.shape
    n = wide.outputs[0].shape[2] if wide.outputs[0].ndim > 2 else 0
    steps = [(b, g, 1, *rest), (b, g, n, *rest), (b, g * n, *rest)]
    return source if steps == [wide.input_types[0].shape, wide.outputs[0].shape, x.shape] else None


def _exact_neg(neg: Eqn, e: Eqn) -> bool:
    """Does negation commute with the promotion to e's dtype?  Not for the least integer."""
    return is_float(neg.outputs[0].dtype) or neg.outputs[0].dtype == e.outputs[0].dtype


def _without(e: Eqn, m: Made, neutral: float) -> Any:
    """The operand left when the other is neutral; the type check refuses it if the neutral one broadcasts or
    promotes."""
    a, b = e.inputs
    return a if isinstance(a, Var) and _is(m, b, neutral) else b if isinstance(b, Var) and _is(m, a, neutral) else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Is every value of `narrow` a value of `wide`?"""
    if narrow in (wide, torch.bool):
        return True
    if wide == torch.bool or wide.is_complex or narrow.is_complex:
        return False
    if narrow.is_floating_point:
        if not wide.is_floating_point:
            return False
        w, n = torch.finfo(wide), torch.finfo(narrow)
        return w.eps <= n.eps and w.max >= n.max and w.tiny * w.eps <= n.tiny * n.eps
    low, high = torch.iinfo(narrow).min, torch.iinfo(narrow).max
    if wide.is_floating_point:
        return max(-low, high + 1) <= min(1 / torch.finfo(wide).eps, torch.finfo(wide).max)
    return torch.iinfo(wide).min <= low and high <= torch.iinfo(wide).max


# -- messages of manual regions -------------------------------------------------------------------------------


def sum_of_one(e: Eqn, m: Made) -> Any:
    """all_reduce(only_first(x)) => x, where x is what all ranks were given alike"""
    return x if e.params.get("kind", "+") == "+" and (x := _alike(e, m)) is not None else None


def part_of_one(e: Eqn, m: Made) -> Any:
    """reduce_scatter(only_first(enter(x)), dim=d) => enter(x) in parts along d, where all ranks were given x alike"""
    inside = m.by(_alike(e, m), "enter") if e.params.get("kind", "+") == "+" else None
    if inside is None:
        return None
    p = inside.params
    layout = tuple((*axes, *e.params["axes"]) if d == e.params["dim"] else axes for d, axes in enumerate(p["layout"]))
    return "enter", inside.inputs, {**p, "layout": layout}


def _alike(e: Eqn, m: Made) -> Any:
    """The operand of an only_first over the axes of e, entered without them; None if e has no such operand."""
    first = m.by(e.inputs[0], "only_first")
    inside = m.by(first.inputs[0], "enter") if first is not None and first.params["axes"] == e.params["axes"] else None
    if first is None or inside is None:
        return None
    named = {a for axes in inside.params["layout"] for a in axes}
    return (
        None
        if named & set(e.params["axes"]) or not set(e.params["axes"]) <= set(inside.params["axes"])
        else first.inputs[0]
    )


TABLE: dict[str, tuple[Rule, ...]] = {
    "abs": (twice_is_once,),
    "add": (add_zero, add_neg),
    "all_reduce": (sum_of_one,),
    "amax": (reduce_nothing,),
    "amin": (reduce_nothing,),
    "attention": (attention_of_repeated,),
    "bitwise_and": (and_true, same_operands),
    "bitwise_not": (twice_is_none,),
    "bitwise_or": (or_false, same_operands),
    "bitwise_xor": (or_false,),
    "cast": (nothing_changes, cast_twice),
    "cat": (single_part, cat_of_split),
    "ceil": (twice_is_once,),
    "clamp": (clamp_nothing,),
    "conj": (twice_is_none,),
    "div": (second_is_one,),
    "dropout": (dropout_nothing,),
    "expand": (nothing_changes, outer_alone),
    "flip": (reduce_nothing,),
    "floor": (twice_is_once,),
    "linear": (product_transposed,),
    "logical_and": (and_true, same_operands),
    "logical_not": (twice_is_none,),
    "logical_or": (or_false, same_operands),
    "logical_xor": (or_false,),
    "matmul": (product_transposed,),
    "maximum": (same_operands,),
    "mean": (reduce_nothing,),
    "minimum": (same_operands,),
    "mul": (mul_one, mul_minus_one),
    "neg": (twice_is_none,),
    "pad": (pad_nothing,),
    "permute": (permute_nothing, permute_twice),
    "pow": (second_is_one, square, root),
    "prod": (reduce_nothing,),
    "reduce_scatter": (part_of_one,),
    "relu": (twice_is_once,),
    "repeat": (repeat_once,),
    "reshape": (nothing_changes, outer_alone),
    "slice": (nothing_changes, slice_twice),
    "split": (single_part, split_of_cat),
    "stack": (cat_of_split,),
    "stop_gradient": (stop_nothing, twice_is_once),
    "sub": (sub_zero, sub_neg),
    "sum": (reduce_nothing,),
    "tril": (twice_is_once,),
    "triu": (twice_is_once,),
    "trunc": (twice_is_once,),
    "unbind": (split_of_cat,),
    "where": (where_known, where_same),
}
