"""What a call leaves behind: slots of objects that hold other values than before, buffers with new values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.capture.alias import Cell
from mycel.capture.autograd import without_grads
from mycel.capture.counters import (
    CHANGES,
    MOST,
    STRUCTURES,
    CountedSlot,
    Slot,
    changed_structures,
    changed_values,
    place_of,
    slot_of,
)
from mycel.capture.fence import refuse
from mycel.capture.locations import Container, Location, is_there
from mycel.capture.record import Traced
from mycel.capture.slot_holders import GONE, Attributes, TakenOut, contents, owner, put_back
from mycel.capture.state import Reachable, is_static
from mycel.capture.structures import Structures
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, flatten, holds_tensors
from mycel.ir import Var, type_of
from mycel.ops import o


@dataclass(frozen=True)
class ReboundSlot:
    """A slot that holds new tensors after the call: rebound, not updated in place."""

    box: Container
    key: Any
    tree: Tree
    values: list[Var]
    copies: list[bool]


def rebound_slots(tracer: Tracer, places: Reachable, counted: Mapping[Slot, CountedSlot]) -> list[ReboundSlot]:
    """All slots that were rebound to tensors, to structures that hold traced ones, or to other plain values."""
    rebound = [
        ReboundSlot(box, key, Tree("static", value), [], [])
        for box, key, value in changed_values(places)
        if slot_of(box, key) not in counted
    ]
    for box, key, value in changed_structures(places):
        if CHANGES[slot_of(box, key)] > MOST:
            raise refuse(
                f"{place_of(box, key).name}, a {type(value).__name__} that the code makes anew at every call, has "
                "other items each time",
                "a buffer, or returning it",
            )
        tree = Tree("static", value) if isinstance(value, set) else flatten(value, [])
        rebound.append(ReboundSlot(box, key, tree, [], []))
    for box in places.boxes:
        if isinstance(box.slots, list) and not is_there(box.inside):
            continue  # another one is in its place
        for key, value in contents(box.slots).items():
            if (
                slot_of(box, key) in counted
                or value is box.old.get(key)
                or not (isinstance(value, torch.Tensor) or _holds_traced(value))
            ):
                continue
            leaves: list[torch.Tensor] = []
            tree = flatten(value, leaves, objects=True, varying=True)
            with tracer:
                values = [tracer.cell(x).read() for x in leaves]
                copies = copied(tracer, leaves)
            tree = tree.with_numbers(iter([isinstance(x, Traced) and x.weak for x in leaves]))
            if isinstance(box.slots, list) and len(box.slots) != len(box.old):
                raise refuse(
                    f"a traced tensor was kept in {box.name}, which lives outside of the function",
                    "return it, or keep it in a buffer or an attribute of a module",
                    next((tracer.producers[v].source for v in values if v in tracer.producers), ""),
                )
            rebound.append(ReboundSlot(box, key, tree, values, copies))
    return rebound


def taken_out(places: Reachable) -> Iterator[tuple[Container, Any]]:
    """Slots of dicts, hooks among them, that held something before and are gone, each once."""
    seen: set[Slot] = set()
    for box in places.boxes:
        if isinstance(box.slots, dict) and is_there(box.inside):
            for key in box.old:
                if key not in box.slots and slot_of(box, key) not in seen:
                    seen.add(slot_of(box, key))
                    yield box, key


def effects_of(
    tracer: Tracer, changes: list[ReboundSlot], structures: Structures
) -> tuple[list[tuple[Location, Tree]], list[Var], list[bool]]:
    """A rebound parameter or buffer of the same type, whose memory is its own, is an update of it; any other rebound
    slot is assigned after each call: where, the values, and which of them are copies."""
    effects, values, copies = [], [], []
    for change in changes:
        box, key, old = change.box, change.key, change.box.old.get(change.key)
        if (
            box.kind in ("parameter", "buffer")
            and isinstance(old, torch.Tensor)
            and type_of(old) == change.values[0].type
            and not tracer.shared.others(old)  # which keep the memory that it had
        ):
            with tracer:
                tracer.cell(old).write(change.values[0])
            continue
        effects.append((place_of(box, key), change.tree))
        _guard_rebound(tracer.places, structures, change)
        values += change.values
        copies += change.copies
    for box, key in taken_out(tracer.places):
        place = place_of(box, key)
        effects.append((replace(place, container=TakenOut(place.container)), Tree("static", GONE)))
    structures.settle()
    return effects, values, copies


def copied(tracer: Tracer, tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which of them have the value of a tensor that lives on, or of a part of it, and memory of their own:
    `weight.detach().clone()`."""
    lifted = {cell for _, cell in tracer.lifted.values()}
    live = {*tracer.inputs, *(cell.var for cell in lifted)}

    def is_copy(cell: Cell) -> bool:
        value = cell.read()
        while value not in live and (eqn := tracer.producers.get(value)) is not None:
            first = eqn.inputs[0] if eqn.op.write is not None or eqn.op is o.stop_gradient else None
            if not isinstance(first, Var):
                return False
            value = first
        return value in live and cell.root not in lifted

    return [is_copy(tracer.cell(x)) for x in tensors]


def toggles(tracer: Tracer) -> list[tuple[Location, Tree]]:
    """Tensors that ask for a gradient after the call and did not before, or the other way round."""
    return [
        (Location("requires_grad", "attribute", Attributes(x, ["requires_grad"]), "requires_grad"), Tree("static", now))
        for x, asked in tracer.toggled.values()
        if (now := x.requires_grad) != asked
    ]


def cleared_grads(tracer: Tracer) -> list[tuple[Location, Tree]]:
    """Parameters have no gradient after the call, where the code has taken one away."""
    return [
        (Location("grad", "attribute", Attributes(x, ["grad"]), "grad"), Tree("static", None))
        for x in without_grads(tracer)
    ]


def _guard_rebound(places: Reachable, structures: Structures, change: ReboundSlot) -> None:
    """A slot that is new is one that was not there before, where code may ask for it (of a dict, by a key that it
    makes); a structure in a slot that nobody reads is of no interest, one that is read is read through the slot."""
    box, key = change.box, change.key
    is_dict = isinstance(box.slots, dict) and box.inside is not None and box.inside.value is box.slots
    if key not in box.old and (is_dict or key in places.read_names):
        places.sizes_before.append((owner(box.slots), len(box.old)))
    elif not isinstance(key, str):
        return
    elif key in box.old and key not in places.read_names and not is_static(box.old[key]):
        places.forget_inside(owner(box.slots), key, box.old[key])
    elif isinstance(box.old.get(key), STRUCTURES) and not change.values:
        places.forget_inside(owner(box.slots), key, box.old[key])
        structures.add_plain(place_of(box, key), box.old[key])
    elif key in box.old:
        structures.add(box, key)


def restore(places: Reachable) -> None:
    """Put back what slots held before: what they hold now is assigned after each call.  Objects without tensors, and
    what was added to lists, stay."""
    gone = {slot_of(box, key) for box, key in taken_out(places)}
    changed = itertools.chain(changed_values(places), changed_structures(places))
    rebound = {slot_of(box, key) for box, key, _ in changed}
    for box in places.boxes:
        now = contents(box.slots)
        grew = isinstance(box.slots, list) and len(now) != len(box.old)

        def stays(v: Any, grew: bool = grew) -> bool:
            return not isinstance(v, torch.Tensor) and (grew or not is_static(v)) and not _holds_traced(v)

        want = {
            k: v if v is box.old.get(k) or (stays(v) and slot_of(box, k) not in rebound) else box.old.get(k)
            for k, v in now.items()
            if k in box.old or (stays(v) and slot_of(box, k) not in rebound)
        }
        want |= {k: v for k, v in box.old.items() if slot_of(box, k) in gone}
        if want.keys() != now.keys() or any(v is not now[k] for k, v in want.items()):
            put_back(box.slots, want)


def undo(places: Reachable) -> None:
    """Everything is as it was before the call."""
    for box in places.boxes:
        put_back(box.slots, box.old)


def _holds_traced(value: Any) -> bool:
    leaves: list[torch.Tensor] = []
    if isinstance(value, Traced):
        return True
    if is_static(value) or isinstance(value, (torch.nn.Module, type)) or not holds_tensors(value):
        return False
    flatten(value, leaves, objects=True, varying=True)
    return any(isinstance(x, Traced) for x in leaves)


def updates_of(tracer: Tracer) -> tuple[list[Var], list[Var]]:
    """Inputs whose cells were written, with their new values."""
    inputs, values = [], []
    for (_, cell), start in zip(tracer.lifted.values(), tracer.inputs, strict=True):
        if cell.version:
            inputs.append(start)
            values.append(cell.var)
    return inputs, values
