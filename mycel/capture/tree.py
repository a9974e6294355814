"""Structures of arguments and results: nested tuples, lists, dicts, dataclasses, Hugging Face outputs and objects of
other classes with tensors at their leaves.

`flatten(value)` gives the tensors and a `Tree`; `tree.unflatten(tensors)` builds it again.  What is not a tensor or a
container is static; arrays of NumPy are tensors where they are arguments (`flatten_arguments`).
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch

from mycel.capture.caches import is_cache, is_static_cache
from mycel.capture.fence import refuse
from mycel.capture.maybe_items import LoopItems, MaybeItem, refuse_item
from mycel.capture.sparse import SparseMatrix, form_of, parts_of
from mycel.ops.effects import texts_of


@dataclass(frozen=True)
class Tree:
    """kind: leaf | number | static | tuple | list | named | struct | dict | output | object | sparse (a tensor) | text
    (of tensors), and of items whose number depends on values, maybe (a value, and is it there) | rows (of a loop, and
    which are).

    `key` holds what identifies it: the value, the class, (class or empty mapping, keys), or (parts, forms) of text.
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
            case "text":
                return "".join(texts_of(parts, *self.key))
            case "sparse":
                return self.key.build(parts)
        template, names = self.key
        return rebuild(template, names, parts)

    def paths(self, prefix: str) -> Iterator[str]:
        """A readable name for each leaf."""
        return (path for path, tree in self.nodes(prefix) if tree.kind in ("leaf", "number"))

    def nodes(self, prefix: str) -> Iterator[tuple[str, Tree]]:
        """All trees inside, itself the first, with a readable name for each."""
        yield prefix, self
        names: Sequence[Any] = range(len(self.children))
        if self.kind in ("dict", "output", "object"):
            names = self.key[1]
        elif self.kind == "named":
            names = self.key._fields
        elif self.kind in ("maybe", "rows"):
            names = ["items", "there"]
        for name, child in zip(names, self.children, strict=True):
            yield from child.nodes(f"{prefix}.{name}" if prefix else str(name))

    def with_numbers(self, numbers: Iterator[bool]) -> Tree:
        """The leaves that are Python numbers, which the program has as 0-dim tensors, said to be these."""
        if self.kind == "leaf":
            return Tree("number") if next(numbers) else self
        return Tree(self.kind, self.key, tuple(child.with_numbers(numbers) for child in self.children))

    @property
    def has_sparse(self) -> bool:
        """Is there a sparse tensor, whose indices and values are no rows of a batch?"""
        return any(tree.kind == "sparse" for _, tree in self.nodes(""))

    def statics(self) -> Iterator[Any]:
        """The static values inside."""
        return (tree.key for _, tree in self.nodes("") if tree.kind == "static")


LEAF = Tree("leaf")
_BAGS = (list, tuple, set, frozenset, collections.deque)


def flatten_arguments(arguments: Any, leaves: list[torch.Tensor]) -> Tree:
    """The tree of a call's arguments: arrays are tensors, objects that hold any of them are opened."""
    try:
        return flatten(arguments, leaves, objects=True, arrays=True)
    except RecursionError:
        raise refuse(
            f"the argument {_circle(arguments, '', ())} refers back to what holds it", "a batch without that attribute"
        ) from None


def _circle(value: Any, path: str, above: tuple[Any, ...]) -> str:
    """The first place where a structure holds what it is in."""
    if any(value is thing for thing in above):
        return path
    parts: dict[Any, Any]
    if isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif isinstance(value, (dict, collections.UserDict)):
        parts = dict(value)
    else:
        parts = attributes(value) if holds_tensors(value, arrays=True) else {}
    depth = len(above)  # arguments are those by position and those by name, which have no name themselves
    names = (f"{path}.{name}" if path else str(name) if depth else "" for name in parts)
    inner = (_circle(part, name, (*above, value)) for name, part in zip(names, parts.values(), strict=True))
    return next(filter(None, inner), "")


def flatten(
    value: Any, leaves: list[torch.Tensor], objects: bool = False, varying: bool = False, arrays: bool = False
) -> Tree:
    """The tree of `value`; its tensors are appended to `leaves`.  With `objects`, other objects that hold tensors are
    opened too; a static cache always is.  `varying`: items of lists may be there or not.  `arrays`: NumPy's are the
    tensors that torch makes of them."""
    sparse = form_of(value) if arrays or type(value) is SparseMatrix else None
    if sparse is not None:
        parts = parts_of(value)
        leaves += parts
        return Tree("sparse", sparse, (LEAF,) * len(parts))
    leaf = as_leaf(value) if arrays or isinstance(value, torch.Tensor) else None
    if leaf is not None:
        leaves.append(leaf)
        return LEAF

    def inner(parts: Iterable[Any]) -> tuple[Tree, ...]:
        return tuple(flatten(p, leaves, objects, varying, arrays) for p in parts)

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
    opened = objects and not (arrays and is_cache(value))  # a cache that grows is no argument
    if is_data or cache or (opened and holds_tensors(value, arrays=arrays)):
        objects, fields = objects or cache, attributes(value)
        if arrays and (not fields or isinstance(value, _BAGS)):  # `check_arguments` says where it is
            return Tree("static", value)
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
    new = next(new for base in template.__mro__ if isinstance(new := vars(base).get("__new__"), BuiltinFunctionType))
    thing: Any = new(template)
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


def has_slots(cls: type) -> bool:
    return any(_slots(base) for base in cls.__mro__)


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_array(value: Any) -> bool:
    """An array or a number of NumPy's that torch.as_tensor takes."""
    return isinstance(value, (np.ndarray, np.number, np.bool_)) and value.dtype.kind in "biufc"


def as_leaf(value: Any) -> torch.Tensor | None:
    """The tensor that an argument is, or that torch makes of it; None: neither."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value) if is_array(value) else None


def holds_tensors(value: Any, depth: int = 4, arrays: bool = False) -> bool:
    """Is there a tensor inside this object?  `arrays`: or an array of NumPy's?"""
    if isinstance(value, torch.Tensor) or (arrays and is_array(value)):
        return True
    if depth == 0 or isinstance(value, (torch.nn.Module, type, str, bytes, int, float)) or callable(value):
        return False
    if isinstance(value, _BAGS):
        return any(holds_tensors(v, depth - 1, arrays) for v in value)
    if isinstance(value, dict):
        return any(holds_tensors(v, depth - 1, arrays) for v in value.values())
    return any(holds_tensors(v, depth - 1, arrays) for v in attributes(value).values())
