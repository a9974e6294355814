"""Structures of arguments and results: nested tuples, lists, dicts, dataclasses and Hugging Face outputs with tensors at their leaves.

`flatten(value)` gives the tensors and a `Tree`; `tree.unflatten(tensors)` builds it again.  What is not a tensor or a container is static.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tree:
    """kind: leaf | static | tuple | list | dict | named | struct | data | object.  `key` holds what identifies it: value, keys or class."""

    kind: str
    key: Any = None
    children: tuple[Tree, ...] = ()

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """The structure with these leaves."""
        if self.kind == "leaf":
            return next(leaves)
        if self.kind == "static":
            return self.key
        parts = [c.unflatten(leaves) for c in self.children]
        match self.kind:
            case "tuple":
                return tuple(parts)
            case "list":
                return parts
            case "dict":
                made, keys = self.key
                return made(zip(keys, parts, strict=True))
            case "named":
                return self.key(*parts)
            case "struct":
                return self.key(parts)
            case "data":
                cls, names = self.key
                return cls(**dict(zip(names, parts, strict=True)))
        cls, names = self.key
        thing = cls.__new__(cls)
        thing.__dict__.update(zip(names, parts, strict=True))
        return thing

    def paths(self, prefix: str) -> Iterator[str]:
        """A readable name for each leaf."""
        if self.kind == "leaf":
            yield prefix
        names: Sequence[Any] = range(len(self.children))
        if self.kind in ("dict", "data", "object"):
            names = self.key[1]
        elif self.kind == "named":
            names = self.key._fields
        for name, child in zip(names, self.children, strict=True):
            yield from child.paths(f"{prefix}.{name}" if prefix else str(name))

    def statics(self) -> Iterator[Any]:
        """The static values inside."""
        if self.kind == "static":
            yield self.key
        for child in self.children:
            yield from child.statics()


LEAF = Tree("leaf")


def flatten(value: Any, leaves: list[torch.Tensor], objects: bool = False) -> Tree:
    """The tree of `value`; its tensors are appended to `leaves`.  With `objects`, other objects that hold tensors are opened too."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return LEAF

    def inner(parts: Any) -> tuple[Tree, ...]:
        return tuple(flatten(p, leaves, objects) for p in parts)

    if hasattr(type(value), "n_sequence_fields"):  # torch.return_types.max and its like
        return Tree("struct", type(value), inner(value))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return Tree("named", type(value), inner(value)) if hasattr(value, "_fields") else Tree("tuple", None, inner(value))
    if isinstance(value, list):
        return Tree("list", None, inner(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _flatten_data(value, inner)
    if isinstance(value, dict):
        made = dict if type(value) is dict else type(value)
        if made in (dict, collections.OrderedDict) or isinstance(value, collections.UserDict):
            return Tree("dict", (made, tuple(value)), inner(value.values()))
        return Tree("dict", (made, tuple(value)), inner(value.values()))
    if objects and holds_tensors(value):
        fields = vars(value)
        return Tree("object", (type(value), tuple(fields)), inner(fields.values()))
    return Tree("static", value)


def _flatten_data(value: Any, inner: Callable[[Any], tuple[Tree, ...]]) -> Tree:
    """A dataclass by its fields; a Hugging Face output (a dict and a dataclass at once) by the fields that are set."""
    names = tuple(value.keys()) if isinstance(value, dict) else tuple(f.name for f in dataclasses.fields(value) if f.init)
    return Tree("data", (type(value), names), inner(getattr(value, n) for n in names))


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """Is there a tensor inside this object?"""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (torch.nn.Module, type, str, bytes, int, float)) or callable(value):
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_tensors(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return any(holds_tensors(v, depth - 1) for v in value.values())
    return any(holds_tensors(v, depth - 1) for v in getattr(value, "__dict__", {}).values())
