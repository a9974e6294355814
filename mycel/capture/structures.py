"""Lists, tuples and dicts in slots that the code rebinds at every call: hidden states, memories, caches.

    self.memory = [h.detach() for h in hidden]

The next call finds another list there.  What lies in it is read through the slot, and guarded is that it is a list of
as many items (a dict of the same keys): not which list it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from mycel.capture.locations import Container, Guarded, Location
from mycel.capture.slot_holders import owner
from mycel.capture.state import Reachable

_KINDS = (list, tuple, dict)


class Within:
    """What a place holds, whatever list or dict that is now."""

    def __init__(self, place: Location) -> None:
        self.place = place

    def __getitem__(self, key: Any) -> Any:
        return self.place.read()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.place.read()[key] = value


class ShapeOf:
    """The kind of what a place holds, and how many items or which keys it has."""

    def __init__(self, place: Location) -> None:
        self.place = place

    def __getitem__(self, key: str) -> Any:
        value = self.place.read()
        return shape_of(value, value) if isinstance(value, _KINDS) else type(value)


class ContentOf:
    """A copy of what a place holds: plain values, which are compared."""

    def __init__(self, place: Location) -> None:
        self.place = place

    def __getitem__(self, key: str) -> Any:
        return self.place.read()


def shape_of(value: Any, items: Collection[Any]) -> tuple[type, Any]:
    return type(value), tuple(items) if isinstance(value, dict) else len(items)


class Structures:
    """The slots that are rebound so."""

    def __init__(self, places: Reachable) -> None:
        self.places = places
        self.slots: dict[int, Location] = {}  # by id of what was there
        self.before = {id(box.slots): box.old for box in places.boxes if isinstance(box.slots, (list, dict))}

    def add(self, box: Container, key: Any) -> None:
        """A slot whose structure is read through it from here on."""
        old = box.old[key]
        if not isinstance(old, _KINDS):
            return
        container = owner(box.slots)
        self._add(Location(f"{box.name}.{key}" if box.name else str(key), box.kind, container, key, box.inside), old)

    def add_plain(self, place: Location, old: Any) -> None:
        """A slot whose list, dict or set of plain values is another one after each call: guarded is what is in it."""
        content = Location(place.name, place.kind, ContentOf(place), "content", place.inside)
        self.places.statics.append(Guarded(content, copy.deepcopy(old)))

    def _add(self, place: Location, old: Any) -> None:
        self.slots[id(old)] = place
        shape = Location(place.name, place.kind, ShapeOf(place), "shape", place.inside)
        items = self.before.get(id(old), dict(enumerate(old)))  # the code may have changed it, too
        self.places.statics.append(Guarded(shape, shape_of(old, items)))
        self.places.sizes[:] = [(held, n) for held, n in self.places.sizes if held is not old]
        for key, value in items.items():
            if isinstance(value, _KINDS) and type(value).__getitem__ in _PLAIN:
                self._add(Location(f"{place.name}.{key}", place.kind, Within(place), key, place.inside), value)

    def through(self, place: Location) -> Location:
        """The place, read through the slot if it lies in such a structure."""
        slot = self.slots.get(id(owner(place.container)))
        return place if slot is None else Location(place.name, place.kind, Within(slot), place.key, slot.inside)

    def settle(self) -> None:
        """Guards look through the slots."""
        for guards in (self.places.statics, self.places.links):
            guards[:] = [Guarded(self.through(g.place), g.value) for g in guards]


_PLAIN: tuple[Callable[..., Any], ...] = tuple(kind.__getitem__ for kind in _KINDS)
