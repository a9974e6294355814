"""Argument lists for the laws, in a small language the operator paragraphs use.

"f[2,3], i64[3]<5, dim=1"

f[..]    any floating dtype       n[..]  any numeric dtype       a[..]  any dtype       f32[..] i64[..] …  just that
<5       integers in [0, 5)       >0     positive                ~0.9   |x| <= 0.9       !      all values distinct
=2 0     just these numbers
others   literals of the IR text: 1.5, None, "mean", (1, 2); name=value is a static param
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from mycel.ir.parse import _Parser
from mycel.ir.types import DTYPES

_DTYPE = r"f|n|a|f8e4m3|f8e5m2|f16|bf16|f32|f64|i8|i16|i32|i64|u8|bool|c64|c128"
_TYPE = re.compile(rf"({_DTYPE})\[([\d,]*)\]([<>~!][\d.]*|=[\d ]+)?$")
CLASSES = {
    "f": ("f32", "f16", "bf16", "f64"),
    "n": ("f32", "i64", "f16", "i32", "f64"),
    "a": ("f32", "bool", "i64", "bf16"),
}


@dataclass(frozen=True)
class Example:
    """Parsed arguments: inputs are literals or (dtype class, shape, constraint)."""

    text: str
    inputs: tuple[Any, ...]
    params: dict[str, Any]

    def dtypes(self) -> tuple[str, ...]:
        """The dtypes its free dtype class ranges over."""
        free = [i.kind for i in self.inputs if isinstance(i, Slot) and i.kind in CLASSES]
        return CLASSES[free[0]] if free else ("",)

    def make(self, free: str = "f64", seed: int = 0) -> list[Any]:
        """Actual inputs, tensors of the free class in dtype `free`."""
        gen = torch.Generator().manual_seed(seed)
        return [x.make(free, gen) if isinstance(x, Slot) else x for x in self.inputs]


@dataclass(frozen=True)
class Slot:
    kind: str
    shape: tuple[int, ...]
    constraint: str

    def make(self, free: str, gen: torch.Generator) -> torch.Tensor:
        dtype = DTYPES[free if self.kind in CLASSES else self.kind]
        c, shape = self.constraint, self.shape
        if c.startswith("="):
            return torch.tensor([int(n) for n in c[1:].split()], dtype=dtype).reshape(shape)
        if c == "!":
            n = 1
            for s in shape:
                n *= s
            values = torch.randperm(n, generator=gen).reshape(shape)
            return values.to(dtype) if not dtype.is_floating_point else (values * 0.37 - 0.17 * n).to(dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=gen) < 0.5
        if not dtype.is_floating_point and not dtype.is_complex:
            low, high = (0, int(c[1:])) if c.startswith("<") else (1 if c else -4, 5)
            return torch.randint(low, high, shape, generator=gen).to(dtype)
        if dtype.is_complex:
            return torch.complex(*(torch.randn(shape, generator=gen, dtype=torch.float64) for _ in "ab")).to(dtype)
        if c.startswith(">"):
            return (float(c[1:] or 0) + 0.2 + 2 * torch.rand(shape, generator=gen, dtype=torch.float64)).to(dtype)
        if c.startswith("~"):
            return ((2 * torch.rand(shape, generator=gen, dtype=torch.float64) - 1) * float(c[1:])).to(dtype)
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def parse_example(text: str) -> Example:
    """Text -> Example."""
    inputs: list[Any] = []
    params: dict[str, Any] = {}
    for part in _split(text):
        if m := _TYPE.match(part):
            shape = tuple(int(n) for n in m[2].split(",") if n)
            inputs.append(Slot(m[1], shape, m[3] or ""))
        elif m := re.match(r"(\w+)=(.*)$", part):
            params[m[1]] = _Parser(m[2]).value()
        else:
            inputs.append(_Parser(part).value())
    return Example(text, tuple(inputs), params)


def _split(text: str) -> list[str]:
    parts, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text + ","):
        quoted ^= c == '"'
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0 and not quoted:
            if text[last:i].strip():
                parts.append(text[last:i].strip())
            last = i + 1
    return parts
