"""The dims language: one string is an operator's shape rule, sharding rule and byte cost.

    "... k+, n k+ -> ... n"

    letter    a dim; the same letter is the same size and splits together
    k+        may be split and leaves a partial sum; k> a partial maximum, k< a minimum
    k^        must stay whole
    ...       leading batch dims, broadcast against each other as torch does
    (h d)     one dim made of several, h the slower
    1         a dim of size one
    a letter on the right alone takes its size from the rule's `sizes`, and is whole; one that is on neither side is a
    size for costs alone

`fit(text, shapes)` lays a rule over actual shapes: every dim becomes a tuple of letters with known sizes.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

Dim = tuple[str, ...]  # the letters joined in one tensor dim; () is a dim of size one
Item = tuple[Dim, ...]

_TERM = re.compile(r"\.\.\.|\(([^)]*)\)|1|([A-Za-z]\w*)([+^<>]?)")
ELLIPSIS: Dim = ("...",)


@dataclass(frozen=True)
class Rule:
    """A parsed dims string."""

    ins: tuple[Item, ...]
    outs: tuple[Item, ...]
    flags: dict[str, str]


@dataclass(frozen=True)
class Fit:
    """A rule over actual shapes: dims as letters, letters with sizes, flags by letter."""

    ins: tuple[Item | None, ...]  # None: an operand left out
    outs: tuple[Item, ...]
    sizes: dict[str, int]
    flags: dict[str, str]

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.size(dim) for dim in item) for item in self.outs]

    def size(self, dim: Dim) -> int:
        return math.prod(self.sizes[letter] for letter in dim)

    def namespace(self) -> SimpleNamespace:
        """Sizes as attributes for cost rules: `d.k`; `d.rows` is the product of the "..." dims."""
        rows = math.prod(size for letter, size in self.sizes.items() if letter.startswith("_"))
        return SimpleNamespace(rows=rows, **{k: v for k, v in self.sizes.items() if not k.startswith("_")})

    def splits(self) -> list[str]:
        """The letters that may be split: not whole, larger than one, the slowest of every dim they are part of."""
        items = [item for item in (*self.ins, *self.outs) if item is not None]
        dims = [dim for item in items for dim in item]
        in_letters = {letter for item in self.ins if item is not None for dim in item for letter in dim}
        new_letters = {letter for item in self.outs for dim in item for letter in dim} - in_letters

        def legal(letter: str) -> bool:
            major = all(self._major(dim) == letter for dim in dims if letter in dim)
            return self.sizes[letter] > 1 and major and self.flags.get(letter) != "^"

        return [letter for letter in self.sizes if letter in in_letters and legal(letter)] + [
            letter for letter in self.sizes if letter in new_letters and not in_letters and legal(letter)
        ]

    def _major(self, dim: Dim) -> str | None:
        return next((letter for letter in dim if self.sizes[letter] > 1), None)


@functools.cache
def parse(text: str) -> Rule:
    """Dims text -> Rule."""
    flags: dict[str, str] = {}

    def letter(name: str, flag: str) -> str:
        if flag:
            flags[name] = flag
        return name

    def item(part: str) -> Item:
        dims, end = [], 0
        for m in _TERM.finditer(part):
            if part[end : m.start()].strip():
                break
            end = m.end()
            if m[0] == "...":
                dims.append(ELLIPSIS)
            elif m[0] == "1":
                dims.append(())
            elif m[0].startswith("("):
                inner = [_TERM.fullmatch(word) for word in m[1].split()]
                dims.append(tuple(letter(i[2], i[3]) for i in inner if i))
            else:
                dims.append((letter(m[2], m[3]),))
        if part[end:].strip():
            raise ValueError(f"dims {text!r}: cannot read {part[end:].strip()!r}")
        return tuple(dims)

    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"dims {text!r}: no '->'")
    ins = tuple(item(part) for part in left.split(",")) if left.strip() else ()
    outs = tuple(item(part) for part in right.split(","))
    return Rule(ins, outs, flags)


def fit(text: str, shapes: list[tuple[int, ...] | None], given: dict[str, int] | None = None) -> Fit:
    """Lay a rule over shapes (None: an operand left out).  ValueError where they do not fit."""
    rule = parse(text)
    if len(shapes) > len(rule.ins):
        raise ValueError(f"dims {text!r}: {len(shapes)} operands for {len(rule.ins)}")
    sizes: dict[str, int] = dict(given or {})
    batch = _batch(rule, shapes, text)
    sizes.update({f"_{len(batch) - 1 - i}": n for i, n in enumerate(batch)})
    products: list[tuple[Dim, int]] = []
    ins: list[Item | None] = []
    for item, shape in zip(rule.ins, shapes, strict=False):
        if shape is None:
            ins.append(None)
            continue
        dims: list[Dim] = []
        rest = iter(shape)
        for dim in item:
            if dim is ELLIPSIS:
                count = len(shape) - (len(item) - 1)
                for place in reversed(range(count)):
                    n = next(rest)
                    dims.append((f"_{place}",) if n == sizes[f"_{place}"] else ())
                continue
            n = next(rest, -1)
            if n < 0:
                raise ValueError(f"dims {text!r}: shape {tuple(shape)} has too few dims")
            dims.append(dim)
            if len(dim) == 1:
                if sizes.setdefault(dim[0], n) != n:
                    raise ValueError(f"dims {text!r}: {dim[0]} is {sizes[dim[0]]} and {n} (shapes {_show(shapes)})")
            else:
                products.append((dim, n))
        if next(rest, None) is not None:
            raise ValueError(f"dims {text!r}: shape {tuple(shape)} has too many dims")
        ins.append(tuple(dims))
    for dim, n in products:
        _solve(dim, n, sizes, text)
    outs = tuple(
        tuple(
            d for dim in item for d in ([(f"_{i}",) for i in reversed(range(len(batch)))] if dim is ELLIPSIS else [dim])
        )
        for item in rule.outs
    )
    unknown = [letter for item in outs for dim in item for letter in dim if letter not in sizes]
    if unknown:
        raise ValueError(f"dims {text!r}: no size for {unknown[0]}")
    return Fit(tuple(ins), outs, sizes, rule.flags)


def _batch(rule: Rule, shapes: list[tuple[int, ...] | None], text: str) -> list[int]:
    """The broadcast shape of all "..."."""
    batch: list[int] = []
    for item, shape in zip(rule.ins, shapes, strict=False):
        if shape is None or ELLIPSIS not in item:
            continue
        at = item.index(ELLIPSIS)
        lead = list(shape[at : len(shape) - (len(item) - 1 - at)])
        batch = [1] * (len(lead) - len(batch)) + batch
        for i in range(1, len(lead) + 1):
            if lead[-i] != 1 and batch[-i] not in (1, lead[-i]):
                raise ValueError(f"dims {text!r}: shapes {_show(shapes)} do not broadcast")
            batch[-i] = batch[-i] if lead[-i] == 1 else lead[-i]
    return batch


def _solve(dim: Dim, n: int, sizes: dict[str, int], text: str) -> None:
    """A joined dim of size n fixes its one unknown letter."""
    known = math.prod(sizes[letter] for letter in dim if letter in sizes)
    unknown = [letter for letter in dim if letter not in sizes]
    if len(unknown) == 1 and known and n % known == 0:
        sizes[unknown[0]] = n // known
    elif unknown or known != n:
        raise ValueError(f"dims {text!r}: ({' '.join(dim)}) does not fit {n}")


def _show(shapes: list[tuple[int, ...] | None]) -> str:
    return ", ".join(str(list(s)) if s is not None else "none" for s in shapes)
