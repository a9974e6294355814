"""Where Python keeps what a branch or loop may change: variables, attributes, items of lists and dicts.

Slot       one variable (a closure cell), dict entry (attributes are entries of an object's dict) or list item: get and
           set
Objects    all lists, dicts, attributes and closure cells that some closures reach, with what was in them: tells
           changes, puts back
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.capture.code_names import global_names
from mycel.capture.fence import is_library

DEEPEST = 8
_ATOMS = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Tensor,
    torch.dtype,
    torch.device,
    type,
    types.ModuleType,
    torch.Size,
    range,
)
_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))


class _Undefined:
    """The value of what has none."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = _Undefined()


@dataclass(frozen=True)
class Slot:
    """A place for one value; `name` is what the user calls it."""

    box: Any
    key: Any
    name: str

    def get(self) -> Any:
        try:
            return self.box.cell_contents if isinstance(self.box, types.CellType) else self.box[self.key]
        except (ValueError, KeyError, IndexError):
            return UNDEFINED

    def set(self, value: Any) -> None:
        if isinstance(self.box, types.CellType):
            if value is UNDEFINED:
                if self.get() is not UNDEFINED:
                    del self.box.cell_contents
            else:
                self.box.cell_contents = value
        elif value is UNDEFINED:
            self.box.pop(self.key, None)
        else:
            self.box[self.key] = value

    @property
    def id(self) -> tuple[int, Any]:
        return id(self.box), self.key


def variables(fns: Iterable[Callable[..., Any]], names: Iterable[str]) -> dict[str, Slot]:
    """The named variables of the function whose closures these are."""
    slots: dict[str, Slot] = {}
    for fn in fns:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for name in names:
            if name in cells:
                slots.setdefault(name, Slot(cells[name], None, shown(name)))
            elif name in global_names(fn.__code__):
                slots.setdefault(name, Slot(fn.__globals__, name, name))
    return slots


def assigned(fns: Iterable[Callable[..., Any]]) -> list[str]:
    """Variables of the function around, and globals, that its closures assign."""
    return list(dict.fromkeys(name for fn in fns for name in _assigned(fn.__code__)))


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType) -> tuple[str, ...]:
    names = [
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or i.opname in ("STORE_DEREF", "DELETE_DEREF")
        and i.argval in code.co_freevars
    ]
    inner = [n for const in code.co_consts if isinstance(const, types.CodeType) for n in _assigned(const)]
    return tuple(names + [n for n in inner if n in code.co_freevars or n not in (*code.co_cellvars, *code.co_varnames)])


def shown(name: str) -> str:
    """What the user knows a variable as."""
    return {"result@": "the return value", "item@": "the loop variable"}.get(name, name)


@dataclass
class Watched:
    """One object that may change, what the user calls it and what was in it."""

    name: str
    object: Any
    old: Any = None
    attributes: bool = False

    def read(self) -> Any:
        if isinstance(self.object, types.CellType):
            return {None: Slot(self.object, None, "").get()}
        return list.copy(self.object) if isinstance(self.object, list) else self.object.copy()

    def replace(self, new: Any) -> None:
        if isinstance(self.object, types.CellType):
            Slot(self.object, None, "").set(new[None])
        elif isinstance(self.object, list):
            list.__setitem__(self.object, slice(None), new)
        else:
            self.object.clear()
            self.object.update(new)

    def slot(self, key: Any) -> Slot:
        if isinstance(self.object, types.CellType):
            return Slot(self.object, None, self.name)
        return Slot(self.object, key, f"{self.name}.{key}" if self.attributes else f"{self.name}[{key!r}]")


def changed(old: Any, new: Any) -> bool:
    """Is anything in a box another object than before?"""
    if isinstance(old, set):
        return bool(old != new)
    if isinstance(old, list):
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))
    return old.keys() != new.keys() or any(v is not new[k] for k, v in old.items())


@dataclass
class Objects:
    """What closures reach and may change."""

    boxes: dict[int, Watched] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def reached(fns: Iterable[Callable[..., Any]], own: Iterable[Slot]) -> Objects:
        """Everything the closures reach; the cells of `own` are left to the caller."""
        objects = Objects()
        for slot in own:
            objects._seen[id(slot.box)] = slot.box
            if isinstance(slot.box, types.CellType):
                objects.visit(slot.name, slot.get(), 0)
        for fn in fns:
            objects.visit("", fn, 0)
            if isinstance(fn, types.FunctionType):  # of a library that is rewritten, too
                objects._closure(fn, 0)
        objects.remember()
        return objects

    def remember(self) -> None:
        for box in self.boxes.values():
            box.old = box.read()

    def restore(self) -> None:
        for box in self.boxes.values():
            if changed(box.old, box.read()):
                box.replace(box.old)

    def changes(self) -> dict[int, Any]:
        """What is now in the boxes that changed, by id of the object."""
        now = {i: box.read() for i, box in self.boxes.items()}
        return {i: new for i, new in now.items() if changed(self.boxes[i].old, new)}

    # -- walking --------------------------------------------------------------------------------------------------

    def visit(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _ATOMS) or depth > DEEPEST or id(value) in self._seen or value is UNDEFINED:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.MethodType):
            self.visit(name, value.__self__, depth)
            self.visit(name, value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(name, part, depth + 1)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value, depth)
        elif isinstance(value, (list, tuple)):
            if isinstance(value, list):
                self.boxes[id(value)] = Watched(name, value)
            for i, item in enumerate(list.copy(value) if isinstance(value, list) else value):
                self.visit(f"{name}[{i}]", item, depth + 1)
        elif isinstance(value, dict):
            self._dict(name, value, depth, attributes=False)
        elif isinstance(value, set):
            self.boxes[id(value)] = Watched(name, value)
        elif isinstance(value, types.SimpleNamespace) or (
            hasattr(value, "__dict__") and not _is_library_class(value.__class__)
        ):
            self._dict(name, vars(value), depth, attributes=True)

    def _dict(self, name: str, value: dict[Any, Any], depth: int, attributes: bool) -> None:
        self.boxes[id(value)] = Watched(name, value, attributes=attributes)
        for key, item in list(value.items()):
            self.visit(f"{name}.{key}" if attributes else f"{name}[{key!r}]", item, depth + 1)

    def _module(self, name: str, module: torch.nn.Module, depth: int) -> None:
        for slots in (vars(module), module._buffers, module._parameters):
            self.boxes[id(slots)] = Watched(name, slots, attributes=True)
        for key, item in vars(module).items():
            if key not in _MODULE_FIELDS:
                self.visit(f"{name}.{key}", item, depth + 1)
        for key, child in module._modules.items():
            self.visit(f"{name}.{key}", child, 0)

    def _function(self, fn: types.FunctionType, depth: int) -> None:
        if not is_library(fn.__code__.co_filename):
            self._closure(fn, depth)

    def _closure(self, fn: types.FunctionType, depth: int) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if id(cell) not in self._seen and "@" not in name:
                self._seen[id(cell)] = cell
                self.boxes[id(cell)] = Watched(name, cell)
                self.visit(name, Slot(cell, None, name).get(), depth + 1)
        for name in global_names(fn.__code__):
            if name in fn.__globals__:
                self.visit(name, fn.__globals__[name], depth + 1)


@functools.cache
def _is_library_class(cls: type) -> bool:
    """A class of torch, of an installed package, of the standard library or of ours: its objects are left alone."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return (
        cls.__module__ in ("builtins", "typing")
        or (file is None and cls.__module__ != "__main__")
        or (file is not None and is_library(file))
    )
