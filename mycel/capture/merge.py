"""Two Python values that must be one: what a variable is after either branch, or at both ends of a loop's turn.

same object, or equal values that are no tensors      stays as it is
tensor and tensor of one type                         one value, given back by the control-flow equation
tensor and number                                     the number becomes a tensor of that type
number and number that differ                         a 0-dim tensor (i64 or f64) that behaves like a number, a *weak*
                                                      one: after branches where(test, a, b)
containers of one structure                           each part
lists of other lengths                                items that may be there (`maybe_items.py`)
undefined and something                               undefined, or a filler where nobody can read it
anything else                                         CaptureError: the name, both values, the line
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel.capture.fence import refuse
from mycel.capture.maybe_items import MaybeItem
from mycel.capture.record import Traced
from mycel.capture.slots import UNDEFINED
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, attributes, flatten
from mycel.ir import Type, Var, promote, type_of
from mycel.ops import o

Build = Callable[[Iterator[Any]], Any]
NUMBERS = (bool, int, float, complex)
_WEAK = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_KINDS = {torch.bool: 0, torch.int64: 1, torch.float64: 2, torch.complex128: 3}


def is_number(x: Any) -> bool:
    return type(x) in NUMBERS


def is_weak(x: Any) -> bool:
    """A number, or a tensor that stands for one."""
    return is_number(x) or getattr(x, "weak", False)


def describe(x: Any) -> str:
    """A value in an error message."""
    if isinstance(x, torch.Tensor):
        return f"a number ({type_of(x)})" if is_weak(x) else str(type_of(x))
    if x is None or x is UNDEFINED or is_number(x):
        return repr(x)
    text = repr(x)
    is_shown = len(text) < 60 and text != object.__repr__(x)  # that has an address
    return f"{type(x).__name__} {text}" if is_shown else f"a {type(x).__name__}"


@dataclass(frozen=True)
class Want:
    """The type two values meet in; `weak` if both are numbers."""

    type: Type
    weak: bool


_TRUTH = Want(Type(torch.bool, ()), False)


def meet(a: Any, b: Any) -> Want | None:
    """The type a tensor and a tensor, number or undefined meet in; None if they do not."""
    if a is UNDEFINED or b is UNDEFINED:
        return own(b if a is UNDEFINED else a)
    if is_weak(a) and is_weak(b):
        return Want(Type(max(_weak_dtype(a), _weak_dtype(b), key=_KINDS.__getitem__), ()), True)
    if is_weak(a) or is_weak(b):
        strong, weak = (b, a) if is_weak(a) else (a, b)
        t = type_of(strong)
        return Want(Type(promote(t, _example(_weak_dtype(weak))), t.shape), False)
    return Want(type_of(a), False) if type_of(a) == type_of(b) else None


def own(x: Any) -> Want:
    """The type of a tensor or number itself."""
    return Want(Type(_weak_dtype(x), ()), True) if is_weak(x) else Want(type_of(x), False)


def _weak_dtype(x: Any) -> torch.dtype:
    return x.dtype if isinstance(x, torch.Tensor) else _WEAK[type(x)]


def _example(dtype: torch.dtype) -> Any:
    """A Python number of a weak dtype's kind."""
    return {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}[dtype]


def fit(x: Any, want: Type) -> Var:
    """A Var, number or undefined as a value of a type, in the open section."""
    if x is UNDEFINED or is_number(x):
        return o.full(0 if x is UNDEFINED else x, shape=want.shape, dtype=want.dtype)
    if x.dtype != want.dtype:
        x = o.cast(x, dtype=want.dtype)
    return x if x.shape == want.shape else o.expand(x, shape=want.shape)


def wrapped(tracer: Tracer, var: Var, want: Want) -> Traced:
    """A new tensor of the user's with this value."""
    x = tracer.wrap(var)
    if want.weak:
        x.weak = tracer.numbers = True
    return x


@dataclass
class Merge:
    """Values after two branches of `test`; `pairs` are what the equation must give back."""

    tracer: Tracer
    test: torch.Tensor
    filler: bool = False
    pairs: list[tuple[str, Any, Any, Want]] = field(default_factory=list)
    _theres: dict[tuple[int, bool], Build] = field(default_factory=dict)

    def __call__(self, name: str, a: Any, b: Any) -> Build:
        """How to build the value for `a` in one branch and `b` in the other."""
        if a is b or _is_same(a, b):
            return lambda outs: a
        if a is UNDEFINED or b is UNDEFINED:
            return self._undefined(name, a, b)
        if _is_leaf(a) and _is_leaf(b):
            want = meet(a, b)
            if want is None:
                raise self.differ(name, a, b)
            if is_number(a) and is_number(b):
                return lambda outs: wrapped(self.tracer, self._number(a, b, want.type), want)
            self.pairs.append((name, a, b, want))
            return lambda outs: wrapped(self.tracer, next(outs), want)
        if type(a) is list and type(b) is list and len(a) != len(b):
            return self._lists(name, a, b)
        parts = opened(a, b)
        if parts is None:
            raise self.differ(name, a, b)
        tree, left, right = parts
        builds = [self(f"{name}{path}", x, y) for path, x, y in zip(tree.paths(), left, right, strict=True)]
        return lambda outs: tree.close([build(outs) for build in builds])

    def _number(self, a: Any, b: Any, want: Type) -> Var:
        """One of two numbers, apart from what the branches compute: what follows may ask for its value where the batch
        decides (`flag = True` in a branch, `if flag:` later)."""
        with self.tracer:
            return o.where(self.tracer.cell(self.test).read(), fit(a, want), fit(b, want))

    def _undefined(self, name: str, a: Any, b: Any) -> Build:
        known = b if a is UNDEFINED else a
        if not self.filler:
            return lambda outs: UNDEFINED
        if _is_leaf(known) and isinstance(known, torch.Tensor):
            want = own(known)
            self.pairs.append((name, a, b, want))
            return lambda outs: wrapped(self.tracer, next(outs), want)
        parts = opened(known, known)
        if parts is None:
            return lambda outs: known
        tree, values, _ = parts
        builds = [self(name, *((UNDEFINED, v) if a is UNDEFINED else (v, UNDEFINED))) for v in values]
        return lambda outs: tree.close([build(outs) for build in builds])

    def _lists(self, name: str, a: list[Any], b: list[Any]) -> Build:
        """A list that one branch has put more into: the items of both, of which some may be there.  Where the batch
        decides, one branch is taken instead."""
        if self.tracer.fact(self.test) is not None:
            raise refuse(
                f"{name or 'a list'} has other items after one branch than after the other",
                "the same items in both branches, with other values",
            )
        head = _common(a, b)
        tail = _common(a[head:][::-1], b[head:][::-1])
        mine, others = (xs[head : len(xs) - tail] for xs in (a, b))
        items = [
            (replace(self, filler=True)(name, *values), self._there(item, then))
            for then, own_items in ((True, mine), (False, others))
            for item in own_items
            for values in [(_value(item), UNDEFINED) if then else (UNDEFINED, _value(item))]
        ]
        self.tracer.lists_vary, source = True, self.tracer.source
        ends = a[:head], a[len(a) - tail :]

        def build(outs: Iterator[Any]) -> list[Any]:
            between = [MaybeItem(value(outs), there(outs), name, source) for value, there in items]
            return [*ends[0], *between, *ends[1]]

        return build

    def _there(self, item: Any, then: bool) -> Build:
        """Is an item of one branch there after both?  One truth value for all items that are there together."""
        key = id(item.there) if type(item) is MaybeItem else 0, then
        if key not in self._theres:
            known: list[torch.Tensor] = []
            if key[0]:
                self.pairs.append(("there", *((item.there, False) if then else (False, item.there)), _TRUTH))

            def build(outs: Iterator[Any]) -> torch.Tensor:
                if not known:
                    known.append(wrapped(self.tracer, next(outs) if key[0] else self._truth(then), _TRUTH))
                return known[0]

            self._theres[key] = build
        return self._theres[key]

    def _truth(self, then: bool) -> Var:
        with self.tracer:
            value = self.tracer.cell(self.test).read()
            return value if then else o.logical_not(value)

    def differ(self, name: str, a: Any, b: Any) -> Exception:
        return refuse(
            f"{name} is {describe(a)} in one branch and {describe(b)} in the other",
            "the same type and shape in both branches",
        )


def _common(a: list[Any], b: list[Any]) -> int:
    """How many items at the start of two lists are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))


def _value(item: Any) -> Any:
    return item.value if type(item) is MaybeItem else item


def _is_leaf(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or is_number(x)


def _is_same(a: Any, b: Any) -> bool:
    """Equal values that are no tensors and hold none."""
    if isinstance(a, torch.Tensor) or type(a) is not type(b):
        return False
    if isinstance(
        a, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range, type(None))
    ):
        return a == b
    return False


@dataclass(frozen=True)
class Opened:
    """A container taken apart one level."""

    tree: Tree

    def close(self, parts: list[Any]) -> Any:
        return Tree(self.tree.kind, self.tree.key, tuple(Tree("static", p) for p in parts)).unflatten(iter(()))

    def paths(self) -> list[str]:
        keys = self.tree.key[1] if self.tree.kind in ("dict", "output", "object") else range(len(self.tree.children))
        return [f".{k}" if self.tree.kind in ("output", "object") else f"[{k!r}]" for k in keys]


def opened(a: Any, b: Any) -> tuple[Opened, list[Any], list[Any]] | None:
    """Two containers of the same structure as (structure, parts, parts), or None."""
    left, right = flatten(a, []), flatten(b, [])
    if left.kind in ("leaf", "static") or (left.kind, left.key, len(left.children)) != (
        right.kind,
        right.key,
        len(right.children),
    ):
        return None
    return Opened(left), parts_of(a, left), parts_of(b, right)


def parts_of(value: Any, tree: Tree) -> list[Any]:
    """The parts of a container, one level deep."""
    match tree.kind:
        case "dict":
            return [value[k] for k in tree.key[1]]
        case "output":
            return list(value.values())
        case "object":
            return list(attributes(value).values())
    return list(value)
