"""Lists outside of the code that it adds to at every call: logs of losses, activations that are kept.

    self.history.append(loss.item())        after every call: history.extend([…])

While the code is traced, an `AddedTo` stands for such a list, and refuses whatever would look at what is in it: then
neither its length nor its items are part of the signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from mycel.capture.fence import refuse
from mycel.capture.locations import Container, Location, is_there, tuple_item
from mycel.capture.rebound import copied
from mycel.capture.record import Traced
from mycel.capture.slot_holders import owner
from mycel.capture.state import Reachable
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, flatten
from mycel.errors import CaptureError
from mycel.ir import Var

_LOOKS = (
    "__iter__ __len__ __getitem__ __setitem__ __delitem__ __contains__ __reversed__ __add__ __mul__ __rmul__ __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ pop insert remove clear sort reverse copy index count"
)


class AddedTo(list[Any]):
    """What is added to a list while code is traced; the list itself is not to be looked at."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> AddedTo:  # type: ignore[override, misc]
        self.extend(items)
        return self

    def items(self) -> list[Any]:
        return list.copy(self)


def _looked_at(xs: AddedTo, *args: Any, **kwargs: Any) -> NoReturn:
    error = refuse(
        f"{xs.name}, a list that the code adds to at every call, is looked at, too",
        "a buffer of a fixed size, or returning what is added",
    )
    error.looked_at = True
    raise error


for _name in _LOOKS.split():
    setattr(AddedTo, _name, _looked_at)


class Additions:
    """A list as a place whose new value is added to it."""

    def __init__(self, xs: list[Any]) -> None:
        self.xs = xs

    def __getitem__(self, key: str) -> NoReturn:
        raise LookupError(key)

    def __setitem__(self, key: str, items: list[Any]) -> None:
        self.xs.extend(items)


def refuse_additions(places: Reachable) -> None:
    """Lists that this trace has added to are to be followed."""
    grown = {}
    for box in places.boxes:
        if isinstance(box.slots, list) and len(box.slots) > len(box.old) and is_there(box.inside):
            if box.inside is None or any(box.slots[i] is not old for i, old in box.old.items()):
                raise _refusal(box)
            grown[id(box.slots)] = box
    if grown:
        error = _refusal(next(iter(grown.values())))
        error.added_to = frozenset(grown)
        raise error


def _refusal(box: Container) -> CaptureError:
    return refuse(f"{box.name}, a list that the code adds to at every call", "a buffer, or returning it")


class KeptLists:
    """Lists that code adds to, while it is traced."""

    def __init__(self, places: Reachable, followed: frozenset[int]) -> None:
        self.lists: dict[int, tuple[AddedTo, list[Location]]] = {}
        for box in places.boxes:
            if id(box.slots) in followed and box.inside is not None:
                added, locations = self.lists.setdefault(id(box.slots), (AddedTo(box.name), []))
                place = box.inside.place
                held = tuple_item(place) if isinstance(place.container, tuple) else place
                if held is None:
                    _looked_at(added)
                locations.append(held)
        self.held = {i: locations[0].read() for i, (_, locations) in self.lists.items()}
        for added, locations in self.lists.values():
            for place in locations:
                place.write(added)

    def put_back(self) -> None:
        """The lists are where they were, as they were."""
        for i, (added, locations) in self.lists.items():
            for place in locations:
                if place.read() is added:
                    place.write(self.held[i])

    def effects(self, tracer: Tracer, places: Reachable) -> tuple[list[tuple[Location, Tree]], list[Var], list[bool]]:
        """What is added to them after every call, the values of that, and which of these are copies."""
        effects, values, copies = [], [], []
        for i, (added, locations) in self.lists.items():
            leaves: list[torch.Tensor] = []
            tree = flatten(added.items(), leaves, objects=True, varying=True)
            tree = tree.with_numbers(iter([isinstance(x, Traced) and x.weak for x in leaves]))
            with tracer:
                values += [tracer.cell(x).read() for x in leaves]
                copies += copied(tracer, leaves)
            for place in locations:
                places.forget_inside(owner(place.container), place.key, self.held[i])
            place = locations[0]
            effects.append((Location(place.name, place.kind, Additions(self.held[i]), "added", place.inside), tree))
        return effects, values, copies
