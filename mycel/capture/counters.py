"""Plain values that the code itself changes: flags, counters, running averages.

    self.ready = True       guarded by what it was and set after the call, so that the next call is captured for True
    self.count += 1         changes again then: a number of the program, read from its slot before a call and put back
    self.mean = 0.9 * self.mean + 0.1 * loss.item()        after it

A number that Python itself needs (a size, an index) cannot be one of the program: it is guarded, up to `MOST` times,
and then what needs it becomes an island.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mycel.capture.alias import Cell
from mycel.capture.fence import is_library, refuse
from mycel.capture.locations import Container, Location
from mycel.capture.record import Traced
from mycel.capture.slot_holders import Attributes, ClassAttributes, contents, owner
from mycel.capture.state import FUNCTIONS, HOOKS, Reachable, is_static
from mycel.capture.trace import Tracer
from mycel.ir import Var
from mycel.ops import o

STRUCTURES = (list, dict, set)
MOST = 16  # captures that differ in a plain value which the code itself changes
CHANGES: Counter[Slot] = Counter()  # how many captures changed the number in a slot
Slot = tuple[int, Any]  # the id of what holds it, and the key
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class NumberSlots:
    """Slots of a box, their numbers as 0-dim tensors; each has one, which is filled anew whenever it is read."""

    def __init__(self, slots: Any, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.tensors: dict[Any, torch.Tensor] = {}

    def __getitem__(self, key: Any) -> torch.Tensor:
        number = Location("", "", self.slots, key).read()
        known = self.tensors.get(key)
        if known is None or known.dtype != _DTYPES.get(type(number)):
            if type(number) not in _DTYPES:
                raise KeyError(key)  # no number any more: another capture
            known = self.tensors[key] = torch.empty((), dtype=_DTYPES[type(number)], device=self.device)
        with torch.no_grad():
            return known.fill_(number)

    def __setitem__(self, key: Any, new: torch.Tensor) -> None:
        Location("", "", self.slots, key).write(new.item())


def slot_of(box: Container, key: Any) -> Slot:
    return _held_by(box.slots), key


def _held_by(slots: Any) -> int:
    """The id of what holds them at every capture."""
    return id(slots.thing if isinstance(slots, Attributes) else owner(slots))


def place_of(box: Container, key: Any) -> Location:
    """Where the value of a slot is read and written."""
    name = f"{box.name}.{key}" if box.name and not isinstance(box.slots, types.CellType) else box.name or str(key)
    container = box.slots if isinstance(box.slots, ClassAttributes) else owner(box.slots)
    return Location(name, box.kind, container, key, box.inside)


def is_counter(old: Any, new: Any) -> bool:
    """Can a slot that held one and holds the other be a number of the program?"""
    return type(old) in _DTYPES and (type(new) is type(old) or getattr(new, "weak", False)) and abs(old) < 2**62


def changed_values(places: Reachable) -> Iterable[tuple[Container, Any, Any]]:
    """Slots that hold another plain value than before, or a hook that the code has set, each once: the box, the key,
    the value."""
    seen: set[Slot] = set()
    for box in places.boxes:
        now = contents(box.slots)
        if isinstance(box.slots, list) and len(now) != len(box.old):
            continue
        for key, value in now.items():
            old = box.old.get(key)
            if value is old or slot_of(box, key) in seen:
                continue
            if box.kind != HOOKS and not is_static(value) and not _is_function_of(places, value, old):
                continue
            if key in box.old and type(value) is type(old) and value == old:
                continue
            seen.add(slot_of(box, key))
            yield box, key, value


def _is_function_of(places: Reachable, value: Any, old: Any) -> bool:
    """Is a function another one than before, or the first, and one that was there before, or a library's?"""
    if not isinstance(value, FUNCTIONS) or not (old is None or isinstance(old, FUNCTIONS)) or value == old:
        return False
    code = getattr(value, "__code__", None)
    is_own = code is not None and not is_library(code.co_filename)
    return not is_own or any(value is held for box in places.boxes for held in box.old.values())


def changed_structures(places: Reachable) -> Iterable[tuple[Container, Any, Any]]:
    """Slots in which the code has put another list, dict or set of plain values, which it may ask for: the box, the
    key, the value."""
    for box in places.boxes:
        if isinstance(box.slots, list):
            continue
        for key, value in contents(box.slots).items():
            old = box.old.get(key)
            if (
                value is not old
                and isinstance(key, str)
                and key in places.read_names
                and isinstance(value, STRUCTURES)
                and _is_plain(value)
                and (old is None or (isinstance(old, STRUCTURES) and _is_plain(old)))
                and not (type(value) is type(old) and value == old)
            ):
                yield box, key, value


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(is_static(k) and _is_plain(v) for k, v in value.items())
    return all(map(_is_plain, value)) if type(value) in (list, tuple, set) else is_static(value)


@dataclass(frozen=True)
class CountedSlot:
    """A number of the program while it is traced."""

    box: Container
    key: Any
    cell: Cell

    def end(self, tracer: Tracer) -> None:
        """What the slot holds now is the new value of the number."""
        value = contents(self.box.slots).get(self.key)
        if isinstance(value, Traced) and value.weak:
            new: Var | None = tracer.cell(value).read()
        else:
            dtype = _DTYPES.get(type(value))
            new = None if dtype is None else o.full(value, shape=(), dtype=dtype)
        if new is None or new.type != self.cell.var.type:
            raise refuse(
                f"{place_of(self.box, self.key).name}, a number that the code changes, became something else",
                "a number of one type, or a buffer",
            )
        if new is not self.cell.var:
            self.cell.write(new)


def lift_counters(tracer: Tracer, places: Reachable, counters: frozenset[Slot]) -> Mapping[Slot, CountedSlot]:
    """These slots hold traced numbers from here on."""
    lifted: dict[Slot, CountedSlot] = {}
    device = torch.device("cpu") if tracer.device.type == "meta" else tracer.device
    for box in places.boxes:
        for key, old in box.old.items() if counters else ():
            slot = slot_of(box, key)
            if slot not in counters or slot in lifted or type(old) not in _DTYPES:
                continue
            place = place_of(box, key)
            numbers = NumberSlots(place.container, device)
            number = tracer.lift_at(numbers[key], [Location(place.name, "attribute", numbers, key, place.inside)])
            number.weak = tracer.numbers = True
            place.write(number)
            lifted[slot] = CountedSlot(box, key, number.cell)
    places.statics[:] = [s for s in places.statics if (_held_by(s.place.container), s.place.key) not in lifted]
    return lifted


def note_changes(places: Reachable, lifted: Mapping[Slot, CountedSlot]) -> None:
    """Remember which numbers a finished capture changed."""
    for box, key, value in changed_values(places):
        if slot_of(box, key) not in lifted and is_counter(box.old.get(key), value):
            CHANGES[slot_of(box, key)] += 1
    for box, key, _ in changed_structures(places):
        CHANGES[slot_of(box, key)] += 1


def refuse_counters(places: Reachable, lifted: Mapping[Slot, CountedSlot]) -> None:
    """Numbers that this capture changed, as an earlier one did, or that became what depends on values, are to be
    numbers of the program."""
    again = {
        slot_of(box, key)
        for box, key, value in changed_values(places)
        if CHANGES[slot_of(box, key)] and is_counter(box.old.get(key), value)
    }
    for box in places.boxes:
        for key, value in contents(box.slots).items():
            if isinstance(value, Traced) and value.weak and is_counter(box.old.get(key), value):
                again.add(slot_of(box, key))
    if again - lifted.keys():
        error = refuse("the code changes a number at every call", "a buffer")
        error.counters = frozenset(again - lifted.keys())
        raise error
