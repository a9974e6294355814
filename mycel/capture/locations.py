"""Where values are that code reaches without being handed them: a container and a key, read anew at every call, and
what was there when the code was captured."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Location:
    """Where something is found at every call; `kind` is parameter | buffer | attribute | variable | argument | held."""

    name: str
    kind: str
    container: Any
    key: Any
    inside: Guarded | None = None

    def read(self) -> Any:
        return self.container.cell_contents if isinstance(self.container, types.CellType) else self.container[self.key]

    def write(self, value: Any) -> None:
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        else:
            self.container[self.key] = value

    @property
    def mutable(self) -> bool:
        """May the program update it?  State of modules and arguments: yes; captured variables: no."""
        return self.kind in ("parameter", "buffer", "attribute", "argument")


@dataclass(frozen=True, eq=False)
class TupleItem(Location):
    """An item of a tuple: writing it puts another tuple in the place of that one."""

    @property
    def outer(self) -> Location:
        assert self.inside is not None
        return self.inside.place

    def read(self) -> Any:
        return self.outer.read()[self.key]

    def write(self, value: Any) -> None:
        items = [*self.outer.read()]
        if items[self.key] is not value:
            items[self.key] = value
            is_known = all(a is b for a, b in zip(items, self.container, strict=True))
            self.outer.write(self.container if is_known else with_items(self.container, items))

    def whole(self) -> Any:
        """The outermost tuple that is there now."""
        return self.outer.whole() if isinstance(self.outer, TupleItem) else self.outer.read()


def with_items(like: Any, items: list[Any]) -> Any:
    """A tuple with these items, of the class of another."""
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)


def tuple_item(place: Location) -> TupleItem | None:
    """The place of an item of a tuple as one to write to, where the tuple is in one."""
    if place.inside is None or place.inside.value is not place.container:
        return None
    outer: Location | None = place.inside.place
    if outer is not None and isinstance(outer.container, tuple):
        outer = tuple_item(outer)
    if outer is None:
        return None
    return TupleItem(place.name, place.kind, place.container, place.key, Guarded(outer, place.inside.value))


@dataclass(frozen=True, eq=False)
class Guarded:
    """A place and what it held when the code was captured."""

    place: Location
    value: Any


@dataclass(frozen=True, eq=False)
class Container:
    """A dict, list, cell, global or class whose slots the code may rebind, and what was in it."""

    name: str
    kind: str
    slots: Any
    old: dict[Any, Any]
    inside: Guarded | None = None


def is_there(link: Guarded | None) -> bool:
    """Is the object still where it was, and all on the way to it?"""
    try:
        return link is None or (link.place.read() is link.value and is_there(link.place.inside))
    except (KeyError, IndexError, ValueError, AttributeError):
        return False


def holds(link: Guarded) -> bool:
    """Is the value what it was?"""
    if not is_there(link.place.inside):
        return False
    try:
        now = link.place.read()
    except (KeyError, IndexError, ValueError, AttributeError):
        return False
    return now is link.value or (type(now) is type(link.value) and now == link.value)
