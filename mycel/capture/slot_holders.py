"""What holds slots that code may rebind, as mappings: a dict, a list, a closure cell, one name of a globals dict, a
class, attributes without a dict; what is in them, and how that is put back."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict
from typing import Any

CELL = "cell_contents"


class ByItems:
    """A mapping whose subscript makes something of what it holds, by what it holds (transformers' ACT2FN makes a new
    module each time)."""

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self.mapping = mapping

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self.mapping, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self.mapping, key, value)


def as_mapped(container: Any) -> Any:
    own = isinstance(container, dict) and type(container).__getitem__ is not dict.__getitem__
    return ByItems(container) if own else container


class Attributes:
    """Attributes of an object that are no entries of a dict: its slots."""

    def __init__(self, thing: Any, names: list[str]) -> None:
        self.thing, self.names = thing, names

    def __getitem__(self, key: str) -> Any:
        return getattr(self.thing, key)

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self.thing, key, value)

    def __bool__(self) -> bool:
        return bool(self.names)


def slots_of(value: Any) -> Attributes:
    listed = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
    names = [n for slots in listed for n in ((slots,) if isinstance(slots, str) else slots)]
    return Attributes(value, [n for n in names if not n.startswith("__") and hasattr(value, n)])


class ClassAttributes:
    """The dict of a class, which the class alone writes to."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        (self.names,) = gc.get_referents(vars(cls))

    def __getitem__(self, key: str) -> Any:
        return self.names[key]

    def __setitem__(self, key: str, value: Any) -> None:
        type.__setattr__(self.cls, key, value)

    def __delitem__(self, key: str) -> None:
        type.__delattr__(self.cls, key)


GONE = object()


class TakenOut:
    """Slots of a dict that the code takes out: what is GONE is not there."""

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self.mapping = mapping

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self.mapping, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not GONE:
            self.mapping[key] = value
        elif key in self.mapping:
            del self.mapping[key]


class GlobalName:
    """One name of a globals dict: functions may rebind the globals they name."""

    def __init__(self, names: dict[str, Any], key: str) -> None:
        self.names, self.key = names, key


def owner(slots: Any) -> Any:
    """What holds the slots of a box, or of a location."""
    if isinstance(slots, (GlobalName, ClassAttributes)):
        return slots.names
    return slots.mapping if isinstance(slots, (ByItems, TakenOut)) else slots


def contents(slots: Any) -> dict[Any, Any]:
    """key -> value of a box's slots."""
    if isinstance(slots, ClassAttributes):
        return dict(slots.names)
    if isinstance(slots, types.CellType):
        return {CELL: slots.cell_contents}
    if isinstance(slots, GlobalName):
        return {slots.key: slots.names.get(slots.key)}
    if isinstance(slots, Attributes):
        return {name: slots[name] for name in slots.names}
    if isinstance(slots, list):
        return dict(enumerate(slots))
    if not isinstance(slots, dict):  # of a module of torch.jit
        return dict(slots.items())
    return {k: dict.__getitem__(slots, k) for k in slots}


def put_back(slots: Any, old: dict[Any, Any]) -> None:
    """Make the slots of a box what they were."""
    if isinstance(slots, types.CellType):
        slots.cell_contents = old[CELL]
    elif isinstance(slots, GlobalName):
        slots.names[slots.key] = old[slots.key]
    elif isinstance(slots, Attributes):
        for name, value in old.items():
            slots[name] = value
    elif isinstance(slots, list):
        slots[:] = old.values()
    else:
        now = contents(slots)
        for key in now.keys() - old.keys():
            del slots[key]
        for key, value in old.items():
            if key not in now or now[key] is not value:
                slots[key] = value
        if type(slots) in (dict, OrderedDict) and old.keys() - now.keys():
            for key in old:  # in the order they had
                slots[key] = slots.pop(key)
