"""Structures of arguments and results: nested tuples, lists, dicts, dataclasses and Hugging Face outputs with tensors
at their leaves.

`flatten(value)` gives the tensors and a `Tree`; `tree.unflatten(tensors)` builds it again.  What is not a tensor or a
container is static.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycel.capture.caches import is_static_cache
from mycel.capture.fence import refuse
from mycel.capture.maybe_items import LoopItems, MaybeItem, refuse_item


@dataclass(frozen=True)
class Tree:
    """kind: leaf | number | static | tuple | list | named | struct | dict | output | object, and of items whose number
    depends on values, maybe (a value, and is it there) | rows (of a loop, and which are).

    `key` holds what identifies it: the value, the class, or (class or empty mapping, keys).
    """

    kind: str
    key: Any = None
    children: tuple[Tree, ...] = ()

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """The structure with these leaves."""
        if self.kind in ("leaf", "number"):
            return next(leaves)
        if self.kind == "static":
            return self.key
        parts = [c.unflatten(leaves) for c in self.children]
        match self.kind:
            case "tuple":
                return tuple(parts)
            case "list":
                return parts
            case "named":
                return self.key(*parts)
            case "struct":
                return self.key(parts)
            case "maybe" | "rows":
                return self.key(*parts)
        template, names = self.key
        return rebuild(template, names, parts)

    def paths(self, prefix: str) -> Iterator[str]:
        """A readable name for each leaf."""
        if self.kind in ("leaf", "number"):
            yield prefix
        names: Sequence[Any] = range(len(self.children))
        if self.kind in ("dict", "output", "object"):
            names = self.key[1]
        elif self.kind == "named":
            names = self.key._fields
        elif self.kind in ("maybe", "rows"):
            names = ["items", "there"]
        for name, child in zip(names, self.children, strict=True):
            yield from child.paths(f"{prefix}.{name}" if prefix else str(name))

    def with_numbers(self, numbers: Iterator[bool]) -> Tree:
        """The leaves that are Python numbers, which the program has as 0-dim tensors, said to be these."""
        if self.kind == "leaf":
            return Tree("number") if next(numbers) else self
        return Tree(self.kind, self.key, tuple(child.with_numbers(numbers) for child in self.children))

    def statics(self) -> Iterator[Any]:
        """The static values inside."""
        if self.kind == "static":
            yield self.key
        for child in self.children:
            yield from child.statics()


LEAF = Tree("leaf")


def flatten(value: Any, leaves: list[torch.Tensor], objects: bool = False, varying: bool = False) -> Tree:
    """The tree of `value`; its tensors are appended to `leaves`.  With `objects`, other objects that hold tensors are
    opened too; a static cache always is.  `varying`: items of lists may be there or not."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return LEAF

    def inner(parts: Iterable[Any]) -> tuple[Tree, ...]:
        return tuple(flatten(p, leaves, objects, varying) for p in parts)

    if hasattr(type(value), "n_sequence_fields"):  # torch.return_types.max and its like
        return Tree("struct", type(value), inner(value))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return (
            Tree("named", type(value), inner(value)) if hasattr(value, "_fields") else Tree("tuple", None, inner(value))
        )
    if type(value) is list:
        return Tree("list", None, tuple(_item(x, leaves, objects) if varying else inner([x])[0] for x in value))
    if isinstance(value, (dict, collections.UserDict)):
        kind = "output" if dataclasses.is_dataclass(value) else "dict"
        return Tree(kind, (_empty(value), tuple(value.keys())), inner(value.values()))
    if objects and isinstance(value, MaybeItem):
        raise refuse_item("they are returned, kept or given to code that is not captured", value)
    cache = is_static_cache(value)
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_data or cache or (objects and holds_tensors(value)):
        objects, fields = objects or cache, attributes(value)
        if not fields:
            raise refuse(
                f"a {type(value).__name__} of tensors cannot be taken apart",
                "tuples, lists, dicts and dataclasses of tensors",
            )
        return Tree("object", (type(value), tuple(fields)), inner(fields.values()))
    return Tree("static", value)


def _item(item: Any, leaves: list[torch.Tensor], objects: bool) -> Tree:
    """The tree of an item of a list, with the tensor that tells whether it is there."""
    if not isinstance(item, MaybeItem):
        return flatten(item, leaves, objects, varying=True)
    how = functools.partial(type(item), name=item.name, source=item.source)
    if isinstance(item, LoopItems):
        leaves += [item.value, item.mask()]
        return Tree("rows", functools.partial(how, is_number=item.is_number), (LEAF, LEAF))
    value = flatten(item.value, leaves, objects, varying=True)
    leaves.append(item.there)
    return Tree("maybe", how, (value, LEAF))


def rebuild(template: Any, names: Sequence[Any], parts: Sequence[Any]) -> Any:
    """A mapping like the empty one `template`, a Hugging Face output or an object of class `template`, with these
    entries or attributes."""
    entries = dict(zip(names, parts, strict=True))
    if not isinstance(template, type):
        full = copy.copy(template)
        full.update(entries)
        return full
    if issubclass(template, dict):
        return template(**entries)
    thing = object.__new__(template)
    for name, part in entries.items():
        object.__setattr__(thing, name, part)
    return thing


def maker(tree: Tree) -> Callable[[Sequence[Any]], Any]:
    """`rebuild` for such a tree.  A Hugging Face output goes through the fields of its class whenever it is made: one
    of tensors is filled directly instead, where one that was made by its class shows that this gives the same."""
    template, names = tree.key
    leaves = all(child.kind == "leaf" for child in tree.children)
    if tree.kind == "output" and leaves and issubclass(template, collections.OrderedDict):
        example = template(**{name: torch.empty(0) for name in names})
        unset = dict.fromkeys(vars(example))
        filled = _filled(template, unset, names, [example[name] for name in names])
        if [*filled.items()] == [*example.items()] and vars(filled) == vars(example):
            return functools.partial(_filled, template, unset, names)
    return functools.partial(rebuild, template, names)


def _filled(cls: type, unset: dict[str, None], names: Sequence[str], parts: Sequence[Any]) -> Any:
    output: Any = collections.OrderedDict.__new__(cls)
    attributes = vars(output)
    attributes.update(unset)
    for name, part in zip(names, parts, strict=True):
        collections.OrderedDict.__setitem__(output, name, part)
        attributes[name] = part
    return output


def _empty(value: Any) -> Any:
    """A mapping of the same class without entries; Hugging Face outputs, which do not allow that, are made by their
    class."""
    if dataclasses.is_dataclass(value):
        return type(value)
    empty = copy.copy(value)
    empty.clear()
    return empty


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds: its __dict__ and its slots."""
    names = [n for cls in type(value).__mro__ for n in _slots(cls) if hasattr(value, n) and not n.startswith("__")]
    return {**{n: getattr(value, n) for n in names}, **getattr(value, "__dict__", {})}


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """Is there a tensor inside this object?"""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (torch.nn.Module, type, str, bytes, int, float)) or callable(value):
        return False
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return any(holds_tensors(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return any(holds_tensors(v, depth - 1) for v in value.values())
    return any(holds_tensors(v, depth - 1) for v in attributes(value).values())
