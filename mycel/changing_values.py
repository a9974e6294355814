"""Plain values of batches: a program is made for each of them, and a value that is another one in every batch (a count
of steps, an id) makes a program for every call.  A step, an evaluation or a jitted function that was compiled for many
values of one says so, once.

    step(x=x, index=0); step(x=x, index=1); …        index: 0, 1, 2, …        try index=torch.tensor(index)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.capture import flatten_arguments
from mycel.errors import warn
from mycel.ir import Type, type_of

MANY = 5  # values of one argument, for each of which there is a program, beside tensors of the same types
SHOWN = 40  # letters of a value
_PLAIN = (int, float, complex, str, bytes)

Types = tuple[Type, ...]


@dataclass
class CompiledValues:
    """The plain values in batches, or arguments, that something was compiled for, by the types of the tensors beside
    them and by their place."""

    subject: str = "the step"
    given: str = "batch"
    values: dict[tuple[Types, str], dict[str, Any]] = field(default_factory=dict)
    has_warned: bool = False

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more batch; what has many values is named, once."""
        if self.has_warned:
            return
        leaves: list[torch.Tensor] = []
        tree = flatten_arguments((args, kwargs), leaves)
        types = tuple(map(type_of, leaves))
        changing: dict[str, list[str]] = {}
        for path, node in tree.nodes(""):
            if node.kind == "static" and isinstance(node.key, _PLAIN):
                values = self.values.setdefault((types, path), {})
                values[repr(node.key)] = node.key
                if len(values) >= MANY:
                    changing[_name(path)] = [*values]
        if not changing:
            return
        self.has_warned = True
        many = max(map(len, changing.values()))
        lines = [f"  {name:<9} {', '.join(map(_short, values))}" for name, values in changing.items()]
        warn(
            f"{self.subject} was compiled for {many} values of {', '.join(changing)}, which takes time and memory for "
            f"each: a program holds for the plain values of its {self.given} alone\n" + "\n".join(lines) + "\n"
            "  try       a tensor (torch.tensor(value)) where the code computes with it; else a "
            f"{self.given} without it",
        )


def _name(path: str) -> str:
    """1.info.step => 'info.step', 0.2 => argument 2"""
    by_name, _, rest = path.partition(".")
    return repr(rest) if by_name == "1" else f"argument {rest}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
